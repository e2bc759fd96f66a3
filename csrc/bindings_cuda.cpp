// Python names for the CUDA kernels. Tensors come as addresses and sizes, the stream as an integer, so one build serves every
// torch version; the CUDA runtime is linked in. The module is fastadv._cuda; fastadv/cuda.py loads it.
#include <pybind11/pybind11.h>

#include "cuda/kernels.h"

namespace py = pybind11;
using namespace fastadv;
using namespace fastadv::cuda;

namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// (number of rows, number of tokens, width of a padded row, address of cu_seqlens or 0).
Rows rows_of(const py::tuple& t) {
  return {t[0].cast<int64_t>(), t[1].cast<int64_t>(), t[2].cast<int64_t>(), pointer<const int64_t>(t[3].cast<uintptr_t>())};
}

// Every function takes the device's index and the stream first.

// `wide`: table and tokens are doubles, else floats.
void py_segment_tokens(int device, uintptr_t stream, const py::tuple& rows, bool wide, uintptr_t table, int64_t size, uintptr_t offsets, int ids,
                       uintptr_t turn_ids, uintptr_t mask, uintptr_t tokens) {
  const Launcher launcher("segment_tokens", device, stream);
  const Rows r = rows_of(rows);
  const auto* first = pointer<const int64_t>(offsets);
  const auto* on = pointer<const uint8_t>(mask);
  if (wide) return segment_tokens(launcher, r, pointer<const double>(table), size, first, DType(ids), pointer<void>(turn_ids), on, pointer<double>(tokens));
  segment_tokens(launcher, r, pointer<const float>(table), size, first, DType(ids), pointer<void>(turn_ids), on, pointer<float>(tokens));
}

// ---- advantages

void py_turn_ids_from_mask(int device, uintptr_t stream, const py::tuple& rows, uintptr_t mask, uintptr_t runs, uintptr_t turn_ids) {
  const Launcher launcher("turn_ids_from_mask", device, stream);
  turn_ids_from_mask(launcher, rows_of(rows), pointer<const uint8_t>(mask), pointer<int32_t>(runs), pointer<int32_t>(turn_ids));
}

void py_turn_counts(int device, uintptr_t stream, const py::tuple& rows, int ids, uintptr_t turn_ids, uintptr_t counts) {
  turn_counts(Launcher("segments", device, stream), rows_of(rows), DType(ids), pointer<const void>(turn_ids), pointer<int64_t>(counts));
}

void py_token_counts(int device, uintptr_t stream, const py::tuple& rows, uintptr_t mask, uintptr_t counts) {
  token_counts(Launcher("token_counts", device, stream), rows_of(rows), pointer<const uint8_t>(mask), pointer<int64_t>(counts));
}

RowValues row_values(const py::tuple& t) { return {pointer<const void>(t[0].cast<uintptr_t>()), t[1].cast<int>()}; }

// (rows, groups, addresses of index, order and offsets, rewards and votes as (address, type), address of include, survivors).
Voters voters_of(const py::tuple& t) {
  Voters v;
  v.rows = t[0].cast<int64_t>();
  v.groups = t[1].cast<int64_t>();
  v.index = pointer<const int64_t>(t[2].cast<uintptr_t>());
  v.order = pointer<const int64_t>(t[3].cast<uintptr_t>());
  v.offsets = pointer<const int64_t>(t[4].cast<uintptr_t>());
  v.rewards = row_values(t[5]);
  v.votes = row_values(t[6]);
  v.include = pointer<const uint8_t>(t[7].cast<uintptr_t>());
  v.survivors = t[8].cast<bool>();
  return v;
}

MomentArrays moment_arrays(const py::tuple& t) {
  return {pointer<double>(t[0].cast<uintptr_t>()), pointer<double>(t[1].cast<uintptr_t>()), pointer<double>(t[2].cast<uintptr_t>()),
          pointer<double>(t[3].cast<uintptr_t>()), pointer<int64_t>(t[4].cast<uintptr_t>())};
}

void py_group_moments(int device, uintptr_t stream, const py::tuple& voters, const py::tuple& out) {
  group_moments(Launcher("group_moments", device, stream), voters_of(voters), moment_arrays(out));
}

// `table`: addresses of offsets, counts and sums, and the size of the last two.
TurnTable turn_table(const py::tuple& t) {
  return {pointer<const int64_t>(t[0].cast<uintptr_t>()), pointer<double>(t[1].cast<uintptr_t>()),
          pointer<double>(t[2].cast<uintptr_t>()), t[3].cast<int64_t>()};
}

void py_turn_moments(int device, uintptr_t stream, const py::tuple& voters, uintptr_t turn_counts, uintptr_t minimum, const py::tuple& table) {
  turn_moments(Launcher("turn_moments", device, stream), voters_of(voters), pointer<const int64_t>(turn_counts),
               pointer<const double>(minimum), turn_table(table));
}

// As `kernel_arguments` of fastadv/ops/group_advantages.py makes them.
AdvantageInputs advantage_inputs(const py::tuple& t) {
  AdvantageInputs in;
  in.rows = t[0].cast<int64_t>();
  in.groups = t[1].cast<int64_t>();
  in.group = pointer<const int64_t>(t[2].cast<uintptr_t>());
  in.rewards = pointer<const double>(t[3].cast<uintptr_t>());
  in.left_out = pointer<const double>(t[4].cast<uintptr_t>());
  in.votes = pointer<const double>(t[5].cast<uintptr_t>());
  in.include = pointer<const uint8_t>(t[6].cast<uintptr_t>());
  in.mean = moment_arrays(t[7]);
  in.spread = moment_arrays(t[8]);
  return in;
}

fastadv::AdvantageRule advantage_rule(const py::tuple& t) {
  return {fastadv::Baseline(t[0].cast<int>()), fastadv::Singleton(t[1].cast<int>()), t[2].cast<bool>(), t[3].cast<double>(),
          t[4].cast<double>(), fastadv::EpsForm(t[5].cast<int>())};
}

// `wide`, here and below: the advantages are doubles, else floats.
void py_group_advantages(int device, uintptr_t stream, const py::tuple& inputs, const py::tuple& rule, bool wide, uintptr_t advantages) {
  const Launcher launcher("group_advantages", device, stream);
  const AdvantageInputs in = advantage_inputs(inputs);
  if (wide) return group_advantages(launcher, in, advantage_rule(rule), pointer<double>(advantages));
  group_advantages(launcher, in, advantage_rule(rule), pointer<float>(advantages));
}

void py_fused_group_advantages(int device, uintptr_t stream, const py::tuple& voters, const py::tuple& rule, bool wide, uintptr_t advantages) {
  const Launcher launcher("group_advantages", device, stream);
  const Voters v = voters_of(voters);
  if (wide) return group_advantages(launcher, v, advantage_rule(rule), pointer<double>(advantages));
  group_advantages(launcher, v, advantage_rule(rule), pointer<float>(advantages));
}

void py_turn_advantages(int device, uintptr_t stream, const py::tuple& inputs, const py::tuple& rule, const py::tuple& table,
                        uintptr_t offsets, int64_t segments, double kappa, bool shrink_to_mean, bool wide, uintptr_t values) {
  const Launcher launcher("turn_advantages", device, stream);
  const AdvantageInputs in = advantage_inputs(inputs);
  const SegmentIndex index{pointer<const int64_t>(offsets), segments};
  const TurnRule turns{kappa, shrink_to_mean};
  if (wide) return turn_advantages(launcher, in, advantage_rule(rule), turn_table(table), index, turns, pointer<double>(values));
  turn_advantages(launcher, in, advantage_rule(rule), turn_table(table), index, turns, pointer<float>(values));
}

void py_fused_turn_advantages(int device, uintptr_t stream, const py::tuple& voters, const py::tuple& rule, uintptr_t offsets,
                              int64_t segments, double kappa, bool shrink_to_mean, bool wide, uintptr_t values) {
  const Launcher launcher("turn_advantages", device, stream);
  const Voters v = voters_of(voters);
  const SegmentIndex index{pointer<const int64_t>(offsets), segments};
  const TurnRule turns{kappa, shrink_to_mean};
  if (wide) return turn_advantages(launcher, v, advantage_rule(rule), index, turns, pointer<double>(values));
  turn_advantages(launcher, v, advantage_rule(rule), index, turns, pointer<float>(values));
}

// ---- policy loss

// out: addresses of sum, minimum, tokens, missing. partials and counter: 0 where `parts` is 1.
void py_sequence_log_ratios(int device, uintptr_t stream, const py::tuple& rows, int dtype, uintptr_t log_probs, int old_dtype,
                            uintptr_t old_log_probs, uintptr_t mask, bool skip_missing, unsigned parts, const py::tuple& out,
                            uintptr_t partials, uintptr_t counter) {
  const auto address = [&](int i) { return out[i].cast<uintptr_t>(); };
  sequence_log_ratios(Launcher("sequence_log_ratios", device, stream), rows_of(rows), DType(dtype), pointer<void>(log_probs),
                      DType(old_dtype), pointer<void>(old_log_probs), pointer<const uint8_t>(mask), skip_missing, parts,
                      {pointer<double>(address(0)), pointer<double>(address(1)), pointer<int64_t>(address(2)), pointer<int64_t>(address(3))},
                      pointer<RowLogRatios>(partials), pointer<unsigned>(counter));
}

// dtype: of all per-token inputs. inputs, outputs: addresses in the order of PolicyLoss, and the segment table's size; formula: a Formula.
void py_policy_loss(int device, uintptr_t stream, const py::tuple& rows, int dtype, const py::tuple& inputs, const py::tuple& formula,
                    const py::tuple& outputs, unsigned blocks) {
  if (inputs.size() != 18 || formula.size() != 21 || outputs.size() != 9) throw std::invalid_argument("policy_loss: tuples of other lengths");
  // Without pybind11's casts, which for so many numbers would take as long as the launch.
  const auto in = [&](int i) { return uintptr_t(PyLong_AsSize_t(PyTuple_GET_ITEM(inputs.ptr(), i))); };
  const auto out = [&](int i) { return uintptr_t(PyLong_AsSize_t(PyTuple_GET_ITEM(outputs.ptr(), i))); };
  const auto number = [&](int i) { return float(PyFloat_AsDouble(PyTuple_GET_ITEM(formula.ptr(), i))); };
  const auto kind = [&](int i) { return int(number(i)); };
  const PolicyLoss arguments{
      rows_of(rows),
      pointer<void>(in(0)), pointer<void>(in(1)), pointer<void>(in(2)), pointer<void>(in(3)), pointer<void>(in(4)),
      pointer<void>(in(5)), pointer<void>(in(6)), pointer<void>(in(7)), pointer<const uint8_t>(in(8)),
      pointer<const int32_t>(in(9)), pointer<const float>(in(10)), pointer<const int64_t>(in(11)), pointer<const double>(in(12)),
      pointer<const int64_t>(in(13)), pointer<const float>(in(14)), pointer<const float>(in(15)), pointer<const double>(in(16)),
      int64_t(in(17)),
      pointer<void>(out(0)), pointer<void>(out(1)), pointer<float>(out(2)), pointer<float>(out(3)), pointer<double>(out(4)),
      pointer<float>(out(5)), pointer<float>(out(6)), pointer<double>(out(7)), pointer<unsigned>(out(8)),
      AdvantageKind(kind(0)),
      {number(2), number(3), number(4), number(5), number(6), number(7), number(8)},
      {Correction(kind(9)), number(10), number(11), number(12), number(13), number(14)},
      {Kl(kind(15)), KlGradient(kind(16)), number(17)},
      number(18), PyFloat_AsDouble(PyTuple_GET_ITEM(formula.ptr(), 20)), 0, false, false};  // policy_loss() sets the last three
  if (PyErr_Occurred()) throw py::error_already_set();
  policy_loss(Launcher("policy_loss", device, stream), DType(dtype), Loss(kind(1)), arguments, blocks);
}

void py_share_gradients(int device, uintptr_t stream, const py::tuple& rows, uintptr_t mask, uintptr_t token_weights,
                        uintptr_t shared, bool add, uintptr_t gradient) {
  share_gradients(Launcher("share_gradients", device, stream), rows_of(rows), pointer<const uint8_t>(mask),
                  pointer<const float>(token_weights), pointer<const float>(shared), add, pointer<float>(gradient));
}

void py_scale_gradient(int device, uintptr_t stream, int64_t count, int dtype, uintptr_t gradient, uintptr_t factor) {
  scale_gradient(Launcher("scale_gradient", device, stream), count, DType(dtype), pointer<void>(gradient), pointer<const float>(factor));
}

// ---- log-probs from logits

// (address, type, rows, vocabulary, size of the second leading dimension, strides of the first and of the second).
LogitsView logits_view(const py::tuple& t) {
  return {pointer<void>(t[0].cast<uintptr_t>()), DType(t[1].cast<int>()),  t[2].cast<int64_t>(), t[3].cast<int64_t>(),
          t[4].cast<int64_t>(),                  t[5].cast<int64_t>(), t[6].cast<int64_t>()};
}

// (logits, address of labels, address of inverse temperatures or 0, inverse temperature, softcap or 0).
LogitsInputs logits_inputs(const py::tuple& t) {
  const float softcap = t[4].cast<float>();
  return {logits_view(t[0].cast<py::tuple>()),
          pointer<const int64_t>(t[1].cast<uintptr_t>()),
          pointer<const double>(t[2].cast<uintptr_t>()),
          t[3].cast<double>(),
          softcap,
          softcap == 0.0f ? 0.0f : 1.0f / softcap};
}

void py_row_statistics(int device, uintptr_t stream, const py::tuple& inputs, uintptr_t scratch, uintptr_t statistics) {
  const Launcher launcher("token_log_probs", device, stream);
  row_statistics(launcher, logits_inputs(inputs), pointer<double>(scratch), pointer<double>(statistics));
}

void py_finish_statistics(int device, uintptr_t stream, int64_t parts, int64_t rows, uintptr_t statistics, uintptr_t results) {
  const Launcher launcher("token_log_probs", device, stream);
  finish_statistics(launcher, parts, rows, pointer<const double>(statistics), pointer<double>(results));
}

void py_token_log_probs(int device, uintptr_t stream, const py::tuple& inputs, uintptr_t scratch, uintptr_t log_probs, uintptr_t entropy,
                        uintptr_t sum_p2, uintptr_t state) {
  const Launcher launcher("token_log_probs", device, stream);
  const LogProbsOutputs out{pointer<float>(log_probs), pointer<float>(entropy), pointer<float>(sum_p2), pointer<double>(state)};
  token_log_probs(launcher, logits_inputs(inputs), pointer<double>(scratch), out);
}

void py_logits_gradient(int device, uintptr_t stream, const py::tuple& inputs, uintptr_t lse, uintptr_t entropy, uintptr_t sum_p2,
                        uintptr_t g_log_probs, uintptr_t g_entropy, uintptr_t g_sum_p2, const py::tuple& gradient) {
  const Launcher launcher("token_log_probs", device, stream);
  const LogProbsState state{pointer<const double>(lse), pointer<const double>(entropy), pointer<const double>(sum_p2)};
  const LogProbsGradients upstream{pointer<const float>(g_log_probs), pointer<const float>(g_entropy), pointer<const float>(g_sum_p2)};
  logits_gradient(launcher, logits_inputs(inputs), state, upstream, logits_view(gradient));
}

// ---- gradient projections

// vectors: their addresses.
void py_multi_dot_gram(int device, uintptr_t stream, int dtype, int64_t n, const py::list& vectors, uintptr_t partials, uintptr_t gram) {
  const void* data[kGramVectors] = {};
  if (vectors.size() > kGramVectors) throw std::invalid_argument("multi_dot_gram: too many vectors for one pass");
  for (size_t v = 0; v < vectors.size(); ++v) data[v] = pointer<const void>(vectors[v].cast<uintptr_t>());
  multi_dot_gram(Launcher("multi_dot_gram", device, stream), DType(dtype), int(vectors.size()), data, n, pointer<double>(partials),
                 pointer<double>(gram));
}

// place: (row offset, column offset), of the piece in its parameter.
void py_count_sketch(int device, uintptr_t stream, const py::tuple& rows, int dtype, uintptr_t values, const py::tuple& place, uint64_t key,
                     float scale, int64_t copies, int64_t size, uintptr_t out) {
  const Rows r = rows_of(rows);
  const SketchPiece piece{r.count, r.width, place[0].cast<int64_t>(), place[1].cast<int64_t>()};
  count_sketch(Launcher("count_sketch", device, stream), piece, DType(dtype), pointer<const void>(values), key, scale, copies, size,
               pointer<int64_t>(out));
}

void py_check_device(int device) { check_device(Launcher("fastadv", device, 0)); }

// Kind of device whose memory the kernels read: "cuda", or "cpu" where tests compiled them for it.
const char* device_type() {
#if defined(FASTADV_CUDA_EMULATED)
  return "cpu";
#else
  return "cuda";
#endif
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "fastadv's CUDA kernels; use the ops of fastadv, which check what they pass here";
  m.def("device_type", &device_type);
  m.def("check_device", &py_check_device);
  m.def("segment_tokens", &py_segment_tokens);
  // advantages
  m.attr("TURN_IDS_BLOCK") = kTurnIdsBlock;
  m.def("turn_ids_from_mask", &py_turn_ids_from_mask);
  m.def("turn_counts", &py_turn_counts);
  m.def("token_counts", &py_token_counts);
  m.def("group_moments", &py_group_moments);
  m.def("turn_moments", &py_turn_moments);
  m.def("group_advantages", &py_group_advantages);
  m.def("fused_group_advantages", &py_fused_group_advantages);
  m.def("turn_advantages", &py_turn_advantages);
  m.def("fused_turn_advantages", &py_fused_turn_advantages);
  // policy loss
  m.def("sequence_log_ratios", &py_sequence_log_ratios);
  m.def("policy_loss", &py_policy_loss);
  m.def("share_gradients", &py_share_gradients);
  m.def("scale_gradient", &py_scale_gradient);
  // log-probs from logits
  m.def("row_sums_scratch", &row_sums_scratch);
  m.def("row_statistics", &py_row_statistics);
  m.def("finish_statistics", &py_finish_statistics);
  m.def("token_log_probs", &py_token_log_probs);
  m.def("logits_gradient", &py_logits_gradient);
  // gradient projections
  m.attr("GRAM_BLOCK") = kGramBlock;
  m.def("multi_dot_gram", &py_multi_dot_gram);
  m.def("count_sketch", &py_count_sketch);
}
