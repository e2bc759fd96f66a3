// Python names for the CPU kernels. Tensors come as addresses and sizes, so one build serves every torch version. The module
// is built once an instruction set, as fastadv._cpu_baseline, _cpu_avx2 and _cpu_avx512; fastadv/native.py picks one.
#include <pybind11/pybind11.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "cpu/kernels.h"

namespace py = pybind11;
using namespace fastadv;

namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// (address, type, row stride, stride), or None for an array that is not there.
TokenView token_view(const py::object& source) {
  if (source.is_none()) return {};
  const auto t = source.cast<py::tuple>();
  const int type = t[1].cast<int>();
  if (type < int(DType::kFloat32) || type > int(DType::kInt64)) throw std::invalid_argument("unknown element type " + std::to_string(type));
  return {pointer<char>(t[0].cast<uintptr_t>()), DType(type), t[2].cast<int64_t>(), t[3].cast<int64_t>(), true};
}

// (number of rows, number of tokens, width of a padded row, address of cu_seqlens or 0).
Rows rows_of(const py::tuple& t) {
  return {t[0].cast<int64_t>(), t[1].cast<int64_t>(), t[2].cast<int64_t>(), pointer<const int64_t>(t[3].cast<uintptr_t>())};
}

// (address of [rows + 1] offsets or 0, size of the table that they point into). Checked: what lies beyond is never touched.
const int64_t* offsets_of(const py::tuple& t, int64_t rows) {
  const auto* offsets = pointer<const int64_t>(t[0].cast<uintptr_t>());
  const auto size = t[1].cast<int64_t>();
  if (!offsets) return nullptr;
  if (offsets[0] != 0 || offsets[rows] != size) throw std::invalid_argument("segment offsets must start at 0 and end at the table's size");
  for (int64_t row = 0; row < rows; ++row)
    if (offsets[row + 1] < offsets[row]) throw std::invalid_argument("segment offsets decrease at row " + std::to_string(row));
  return offsets;
}

// (number of groups, number of rows, address of order, address of offsets).
Groups groups_of(const py::tuple& t) {
  return {t[0].cast<int64_t>(), t[1].cast<int64_t>(), pointer<const int64_t>(t[2].cast<uintptr_t>()), pointer<const int64_t>(t[3].cast<uintptr_t>())};
}

// Addresses of minimum, weight, sum, squares, voters.
MomentArrays moment_arrays(const py::tuple& t) {
  return {pointer<double>(t[0].cast<uintptr_t>()), pointer<double>(t[1].cast<uintptr_t>()), pointer<double>(t[2].cast<uintptr_t>()),
          pointer<double>(t[3].cast<uintptr_t>()), pointer<int64_t>(t[4].cast<uintptr_t>())};
}

// Addresses of offsets, count and sum, and the size of the last two.
TurnTable turn_table(const py::tuple& t) {
  return {pointer<const int64_t>(t[0].cast<uintptr_t>()), pointer<double>(t[1].cast<uintptr_t>()), pointer<double>(t[2].cast<uintptr_t>()),
          t[3].cast<int64_t>()};
}

// (baseline, singleton, scaled, ddof, eps, eps form).
AdvantageRule advantage_rule(const py::tuple& t) {
  return {Baseline(t[0].cast<int>()), Singleton(t[1].cast<int>()), t[2].cast<bool>(), t[3].cast<double>(), t[4].cast<double>(), EpsForm(t[5].cast<int>())};
}

// (rows, groups, then addresses of group, rewards, left_out, votes, include or 0, moments of the mean, moments of the scale).
AdvantageInputs advantage_inputs(const py::tuple& t) {
  return {t[0].cast<int64_t>(),
          t[1].cast<int64_t>(),
          pointer<const int64_t>(t[2].cast<uintptr_t>()),
          pointer<const double>(t[3].cast<uintptr_t>()),
          pointer<const double>(t[4].cast<uintptr_t>()),
          pointer<const double>(t[5].cast<uintptr_t>()),
          pointer<const bool>(t[6].cast<uintptr_t>()),
          moment_arrays(t[7].cast<py::tuple>()),
          moment_arrays(t[8].cast<py::tuple>())};
}

int py_turn_ids(const py::tuple& rows, const py::object& mask, uintptr_t turn_ids, int threads) {
  const Rows r = rows_of(rows);
  const TokenView m = token_view(mask);
  const py::gil_scoped_release release;
  return turn_ids_from_mask(r, m, pointer<int32_t>(turn_ids), threads);
}

int py_turn_counts(const py::tuple& rows, const py::object& turn_ids, uintptr_t counts, int threads) {
  const Rows r = rows_of(rows);
  const TokenView ids = token_view(turn_ids);
  const py::gil_scoped_release release;
  return turn_counts(r, ids, pointer<int64_t>(counts), threads);
}

// `wide`: table and tokens are doubles, else floats. So too below.
int py_segment_tokens(const py::tuple& rows, bool wide, uintptr_t table, const py::tuple& offsets, const py::object& turn_ids,
                      const py::object& mask, uintptr_t tokens, int threads) {
  const Rows r = rows_of(rows);
  const TokenView ids = token_view(turn_ids), m = token_view(mask);
  const auto* first = offsets_of(offsets, r.count);
  const py::gil_scoped_release release;
  if (wide) return segment_tokens(r, pointer<const double>(table), first, ids, m, pointer<double>(tokens), threads);
  return segment_tokens(r, pointer<const float>(table), first, ids, m, pointer<float>(tokens), threads);
}

int py_masked_spread(const py::tuple& rows, const py::object& values, const py::object& mask, uintptr_t spread, int threads) {
  const Rows r = rows_of(rows);
  const TokenView v = token_view(values), m = token_view(mask);
  const py::gil_scoped_release release;
  return masked_spread(r, v, m, pointer<double>(spread), threads);
}

int py_standardize(const py::tuple& rows, const py::object& values, const py::object& mask, uintptr_t mean_and_scale, uintptr_t out,
                   int threads) {
  const Rows r = rows_of(rows);
  const TokenView v = token_view(values), m = token_view(mask);
  const py::gil_scoped_release release;
  return standardize(r, v, m, pointer<const double>(mean_and_scale), pointer<float>(out), threads);
}

// `given`: mask, token rewards or None, values or None, addresses of the rows' rewards and baselines or 0. `rule`: gamma, lam,
// whether gaps are discounted. `out`: addresses of returns, advantages or 0, spread.
int py_token_returns(const py::tuple& rows, const py::tuple& given, const py::tuple& rule, const py::tuple& out, int threads) {
  const TokenReturnsInputs in{rows_of(rows),
                              token_view(given[0]),
                              token_view(given[1]),
                              token_view(given[2]),
                              pointer<const double>(given[3].cast<uintptr_t>()),
                              pointer<const double>(given[4].cast<uintptr_t>())};
  const ReturnRule how{rule[0].cast<double>(), rule[1].cast<double>(), rule[2].cast<bool>()};
  const TokenReturnsOutputs to{pointer<float>(out[0].cast<uintptr_t>()), pointer<float>(out[1].cast<uintptr_t>()),
                               pointer<double>(out[2].cast<uintptr_t>())};
  const py::gil_scoped_release release;
  return token_returns(in, how, to, threads);
}

// `given`: mask, returns, log-probs, sums of squares, weights or None. `rule`: compact, zero tail, eps.
int py_optimal_token_baseline(const py::tuple& rows, const py::tuple& groups, const py::tuple& given, const py::tuple& rule,
                              uintptr_t advantages, int threads) {
  const TokenBaselineInputs in{rows_of(rows),
                               groups_of(groups),
                               token_view(given[0]),
                               token_view(given[1]),
                               token_view(given[2]),
                               token_view(given[3]),
                               token_view(given[4]),
                               rule[0].cast<bool>(),
                               rule[1].cast<bool>(),
                               rule[2].cast<double>()};
  const py::gil_scoped_release release;
  return optimal_token_baseline(in, pointer<float>(advantages), threads);
}

int py_token_counts(const py::tuple& rows, const py::object& mask, uintptr_t counts, int threads) {
  const Rows r = rows_of(rows);
  const TokenView m = token_view(mask);
  const py::gil_scoped_release release;
  return token_counts(r, m, pointer<int64_t>(counts), threads);
}

void py_group_moments(const py::tuple& groups, uintptr_t rewards, uintptr_t votes, const py::tuple& out, int threads) {
  const Groups g = groups_of(groups);
  const MomentArrays moments = moment_arrays(out);
  const py::gil_scoped_release release;
  group_moments(g, pointer<const double>(rewards), pointer<const double>(votes), moments, threads);
}

void py_turn_moments(const py::tuple& groups, uintptr_t rewards, uintptr_t votes, uintptr_t counts, uintptr_t minimum, const py::tuple& out,
                     int threads) {
  const Groups g = groups_of(groups);
  const TurnTable table = turn_table(out);
  const py::gil_scoped_release release;
  turn_moments(g, pointer<const double>(rewards), pointer<const double>(votes), pointer<const int64_t>(counts), pointer<const double>(minimum),
               table, threads);
}

void py_group_advantages(const py::tuple& inputs, const py::tuple& rule, bool wide, uintptr_t advantages, int threads) {
  const AdvantageInputs in = advantage_inputs(inputs);
  const AdvantageRule r = advantage_rule(rule);
  const py::gil_scoped_release release;
  if (wide) return group_advantages(in, r, pointer<double>(advantages), threads);
  group_advantages(in, r, pointer<float>(advantages), threads);
}

void py_turn_advantages(const py::tuple& inputs, const py::tuple& rule, const py::tuple& table, const py::tuple& offsets, double kappa,
                        bool shrink_to_mean, bool wide, uintptr_t segments, int threads) {
  const AdvantageInputs in = advantage_inputs(inputs);
  const AdvantageRule r = advantage_rule(rule);
  const TurnTable t = turn_table(table);
  const auto* first = offsets_of(offsets, in.rows);
  const py::gil_scoped_release release;
  if (wide) return turn_advantages(in, r, t, first, kappa, shrink_to_mean, pointer<double>(segments), threads);
  turn_advantages(in, r, t, first, kappa, shrink_to_mean, pointer<float>(segments), threads);
}

int py_sequence_log_ratios(const py::tuple& rows, const py::object& log_probs, const py::object& old_log_probs, const py::object& mask,
                           bool skip_missing, const py::tuple& out, int threads) {
  const Rows r = rows_of(rows);
  const TokenView a = token_view(log_probs), b = token_view(old_log_probs), m = token_view(mask);
  const SequenceLogRatios o{pointer<double>(out[0].cast<uintptr_t>()), pointer<double>(out[1].cast<uintptr_t>()),
                            pointer<int64_t>(out[2].cast<uintptr_t>()), pointer<int64_t>(out[3].cast<uintptr_t>())};
  const py::gil_scoped_release release;
  return sequence_log_ratios(r, a, b, m, skip_missing, o, threads);
}

// The numbers of fastadv.ops._policy_loss_kernel.Formula, in its order.
PolicyLossRule policy_loss_rule(const py::tuple& f) {
  const auto number = [&](int i) { return f[i].cast<float>(); };
  const auto whole = [&](int i) { return int(f[i].cast<double>()); };
  PolicyLossRule rule;
  rule.loss = Loss(whole(0));
  rule.parameters = {number(1), number(2), number(3), number(4), number(5), number(6), number(7)};
  rule.correction = {Correction(whole(8)), number(9), number(10), number(11), number(12), number(13)};
  rule.kl = {Kl(whole(14)), KlGradient(whole(15)), number(16)};
  rule.entropy_coef = number(17);
  rule.shared_gradient = whole(18) != 0;
  return rule;
}

// The tensors of fastadv.ops._policy_loss_kernel.Inputs, in its order.
PolicyLossInputs policy_loss_inputs(const py::tuple& rows, const py::tuple& t, int advantage_kind) {
  PolicyLossInputs in;
  in.rows = rows_of(rows);
  in.advantage_kind = AdvantageKind(advantage_kind);
  if (advantage_kind < int(AdvantageKind::kToken) || advantage_kind > int(AdvantageKind::kSegment))
    throw std::invalid_argument("no such kind of advantages");
  in.log_probs = token_view(t[0]);
  in.old_log_probs = token_view(t[1]);
  in.mask = token_view(t[2]);
  const TokenView a = token_view(t[3]);
  if (!in.log_probs.present() || !in.mask.present() || !a.present()) throw std::invalid_argument("log-probs, mask and advantages are needed");
  if (in.advantage_kind == AdvantageKind::kToken) {
    in.token_advantages = a;
  } else {
    in.advantages = reinterpret_cast<const float*>(a.data);
  }
  in.turn_ids = token_view(t[4]);
  in.token_weights = token_view(t[5]);
  in.is_weights = token_view(t[6]);
  in.rollout_log_probs = token_view(t[7]);
  in.ref_log_probs = token_view(t[8]);
  in.entropy = token_view(t[9]);
  in.segment_offsets = offsets_of(t[10].cast<py::tuple>(), in.rows.count);
  in.row_weights = pointer<const double>(t[11].cast<uintptr_t>());
  in.row_tokens = pointer<const int64_t>(t[12].cast<uintptr_t>());
  in.row_log_ratios = pointer<const float>(t[13].cast<uintptr_t>());
  in.row_is_weights = pointer<const float>(t[14].cast<uintptr_t>());
  if (in.advantage_kind == AdvantageKind::kSegment && (!in.segment_offsets || !in.turn_ids.present()))
    throw std::invalid_argument("a segment table needs its offsets and turn ids");
  return in;
}

// Returns the faults; sums and, if there, means get what fastadv.ops._policy_loss_kernel.SUMS names, in its order.
int py_policy_loss(const py::tuple& rows, const py::tuple& tensors, int advantage_kind, uintptr_t divisor, const py::tuple& formula,
                   const py::object& gradient, const py::object& entropy_gradient, uintptr_t token_losses, uintptr_t sums, uintptr_t means, int threads) {
  PolicyLossInputs in = policy_loss_inputs(rows, tensors, advantage_kind);
  const double numerator = formula[19].cast<double>();
  const double* given = pointer<const double>(divisor);
  in.scale = given ? scale_of(numerator, *given) : numerator;
  const PolicyLossRule rule = policy_loss_rule(formula);
  const PolicyLossOutputs out{token_view(gradient), token_view(entropy_gradient), pointer<float>(token_losses)};
  for (const TokenView& view : {out.gradient, out.entropy_gradient})
    if (view.dtype > DType::kFloat16) throw std::invalid_argument("gradients are float32, bfloat16 or float16");
  double* values = pointer<double>(sums);
  float* metrics = pointer<float>(means);
  const py::gil_scoped_release release;
  return policy_loss(in, rule, out, values, metrics, threads);
}

// (address, type, sizes of the leading dimensions, their strides, size of the vocabulary, its stride).
LogitsView logits_view(const py::tuple& t) {
  LogitsView v;
  v.data = pointer<char>(t[0].cast<uintptr_t>());
  v.dtype = DType(t[1].cast<int>());
  const auto sizes = t[2].cast<py::tuple>(), strides = t[3].cast<py::tuple>();
  v.dims = int(sizes.size());
  if (v.dims > kLeadingDims || strides.size() != sizes.size()) throw std::invalid_argument("too many dimensions");
  if (int(v.dtype) > int(DType::kFloat16) || int(v.dtype) < 0) throw std::invalid_argument("logits are float32, bfloat16 or float16");
  v.rows = 1;
  for (int d = 0; d < v.dims; ++d) {
    v.sizes[d] = sizes[d].cast<int64_t>();
    v.strides[d] = strides[d].cast<int64_t>();
    v.rows *= v.sizes[d];
  }
  v.vocab = t[4].cast<int64_t>();
  v.stride = t[5].cast<int64_t>();
  return v;
}

// (logits, address of labels, address of inverse temperatures or 0, inverse temperature, softcap or 0).
LogitsInputs logits_inputs(const py::tuple& t) {
  return {logits_view(t[0].cast<py::tuple>()), pointer<const int64_t>(t[1].cast<uintptr_t>()),
          pointer<const double>(t[2].cast<uintptr_t>()), t[3].cast<double>(), t[4].cast<float>()};
}

void py_row_statistics(const py::tuple& inputs, uintptr_t statistics, int threads) {
  const LogitsInputs in = logits_inputs(inputs);
  const py::gil_scoped_release release;
  row_statistics(in, pointer<double>(statistics), threads);
}

void py_finish_statistics(int64_t parts, int64_t rows, uintptr_t statistics, uintptr_t results) {
  const py::gil_scoped_release release;
  finish_statistics(parts, rows, pointer<const double>(statistics), pointer<double>(results));
}

void py_token_log_probs(const py::tuple& inputs, uintptr_t log_probs, uintptr_t entropy, uintptr_t sum_p2, uintptr_t state, int threads) {
  const LogitsInputs in = logits_inputs(inputs);
  const LogProbsOutputs out{pointer<float>(log_probs), pointer<float>(entropy), pointer<float>(sum_p2), pointer<double>(state)};
  const py::gil_scoped_release release;
  token_log_probs(in, out, threads);
}

void py_logits_gradient(const py::tuple& inputs, uintptr_t lse, uintptr_t entropy, uintptr_t sum_p2, uintptr_t g_log_probs,
                        uintptr_t g_entropy, uintptr_t g_sum_p2, const py::tuple& gradient, int threads) {
  const LogitsInputs in = logits_inputs(inputs);
  const LogitsView out = logits_view(gradient);
  const LogProbsGradients upstream{pointer<const float>(g_log_probs), pointer<const float>(g_entropy), pointer<const float>(g_sum_p2)};
  const py::gil_scoped_release release;
  logits_gradient(in, pointer<const double>(lse), pointer<const double>(entropy), pointer<const double>(sum_p2), upstream, out, threads);
}

void py_multi_dot_gram(const py::tuple& rows, const py::sequence& vectors, uintptr_t gram, int threads) {
  GramInputs in;
  in.rows = rows_of(rows);
  for (const auto& vector : vectors) {
    if (in.count == kGramVectors) throw std::invalid_argument("multi_dot_gram: too many vectors for one pass");
    in.vectors[in.count++] = token_view(py::reinterpret_borrow<py::object>(vector));
  }
  const py::gil_scoped_release release;
  multi_dot_gram(in, pointer<double>(gram), threads);
}

// place: (row offset, column offset), of the piece in its parameter.
void py_count_sketch(const py::tuple& rows, const py::object& values, const py::tuple& place, uint64_t key, float scale, int64_t copies,
                     int64_t size, uintptr_t out, int threads) {
  const SketchInputs in{token_view(values), rows_of(rows), place[0].cast<int64_t>(), place[1].cast<int64_t>(), key, scale, copies, size};
  const py::gil_scoped_release release;
  count_sketch(in, pointer<int64_t>(out), threads);
}

// Asks for large pages under an array that is about to be written: faults for small pages would cost more than the kernel.
void advise_large_pages(uintptr_t address, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), first = (address + page - 1) & ~(page - 1), last = (address + bytes) & ~(page - 1);
  if (first < last) madvise(pointer<void>(first), last - first, MADV_HUGEPAGE);  // advice: nothing depends on its success
#endif
}

// The best of the builds that this processor runs.
const char* best_instruction_set() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return "avx512";
  if (__builtin_cpu_supports("avx2")) return "avx2";
#endif
  return "baseline";
}

}  // namespace

PYBIND11_MODULE(FASTADV_MODULE, m) {
  m.doc() = "fastadv's CPU kernels; use the ops of fastadv, which check what they pass here";
  m.def("best_instruction_set", &best_instruction_set);
  m.def("advise_large_pages", &advise_large_pages);
  m.def("turn_ids", &py_turn_ids);
  m.def("turn_counts", &py_turn_counts);
  m.def("segment_tokens", &py_segment_tokens);
  m.def("token_counts", &py_token_counts);
  m.def("masked_spread", &py_masked_spread);
  m.def("standardize", &py_standardize);
  m.def("token_returns", &py_token_returns);
  m.def("optimal_token_baseline", &py_optimal_token_baseline);
  m.def("group_moments", &py_group_moments);
  m.def("turn_moments", &py_turn_moments);
  m.def("group_advantages", &py_group_advantages);
  m.def("turn_advantages", &py_turn_advantages);
  m.def("sequence_log_ratios", &py_sequence_log_ratios);
  m.def("policy_loss", &py_policy_loss);
  m.def("row_statistics", &py_row_statistics);
  m.def("finish_statistics", &py_finish_statistics);
  m.def("token_log_probs", &py_token_log_probs);
  m.def("logits_gradient", &py_logits_gradient);
  m.def("multi_dot_gram", &py_multi_dot_gram);
  m.def("count_sketch", &py_count_sketch);
}
