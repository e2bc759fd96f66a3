// Log-softmax of rows of logits: log-prob of the label, entropy and sum of squared probabilities from one read, and the
// gradient from one read and one write. Bytes a row: V times the size of a logit, twice that for the gradient.
//
// A row is taken in pieces of kColumns that stay in the first-level cache: one pass converts to float32 and finds the
// maximum, the next takes one exp a logit. Sums are float32 in sixteen lanes within a piece, float64 between pieces, in
// column order: a row's result depends on the row alone.
#include <algorithm>
#include <limits>
#include <stdexcept>

#include "cpu/kernels.h"
#include "cpu/lanes_math.h"
#include "cpu/parallel.h"
#include "fastadv/log_softmax.h"

namespace fastadv {
namespace {

constexpr int64_t kColumns = 2048;        // logits converted at a time
constexpr int64_t kBlockLogits = 65'536;  // rows of about as many logits are one block of parallel work
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr float kNone = -std::numeric_limits<float>::infinity();

template <class Number>
struct Row {
  using Storage = typename Number::Storage;
  const Storage* data;
  int64_t stride, vocab;
  float softcap;

  FASTADV_INLINE Capped<Lanes> capped(const Lanes& z) const { return softcapped(z, Lanes(softcap), Lanes(1.0f / softcap)); }

  // One logit after softcap, to the bit as the loops have it, and the softcap's slope there.
  Capped<float> at(int64_t column) const {
    const float z = Number::one(data[column * stride]);
    if (softcap == 0.0f) return {z, 1.0f};
    const Capped<Lanes> c = capped(Lanes(z));
    float value[kLanes], slope[kLanes];
    store(value, c.value);
    store(slope, c.slope);
    return {value[0], slope[0]};
  }
};

template <class Number>
Row<Number> row_of(const LogitsInputs& in, int64_t row) {
  using Storage = typename Number::Storage;
  const LogitsView& v = in.logits;
  return {reinterpret_cast<const Storage*>(v.data) + v.row(row), v.stride, v.vocab, in.softcap};
}

// The maximum of the `n` logits from `column` on. They are left in `buffer` as floats, padded by -inf, if `kStored`.
template <bool kStored, bool kCapped, class Number>
float convert(const Row<Number>& row, int64_t column, int64_t n, float* buffer) {
  constexpr int kChains = 4;  // independent maxima: one alone would wait for itself
  Lanes top[kChains];
  for (Lanes& t : top) t = Lanes(kNone);
  const auto step = [&](int64_t i, Lanes& t) {
    Lanes z = load_columns<Number>(row.data + (column + i) * row.stride, row.stride, n - i);
    if constexpr (kCapped) z = row.capped(z).value;
    if constexpr (kStored) store(buffer + i, z);
    t = larger(z, t);
  };
  int64_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes)
    for (int k = 0; k < kChains; ++k) step(i + k * kLanes, top[k]);
  for (; i < n; i += kLanes) step(i, top[0]);
  return largest_lane(larger(larger(top[0], top[1]), larger(top[2], top[3])));
}

// The sums of `n` floats (padded to whole lanes) relative to `maximum`. Meanwhile the next piece is fetched: this loop
// reads only what is in the cache, and memory would have nothing to do. `step` bytes of it belong to sixteen logits.
template <bool kMoments>
SoftmaxSums<double> piece_sums(const float* z, int64_t n, float maximum, double inverse_temperature, const char* next, int64_t step) {
  const Lanes m(maximum == kNone ? 0.0f : maximum), scale(float(inverse_temperature * kLog2E)), square_floor(kSquareFloor), zero(0.0f);
  LaneSum s, w, q;
  for (int64_t i = 0; i < n; i += kLanes) {
    __builtin_prefetch(next);
    next += step;
    const Lanes relative = (load(z + i) - m) * scale;
    const LaneMask kept = above_floor(relative);
    const Lanes d = cut_at_floor(kept, relative), e = power(kept, d);
    s.add(e);
    if constexpr (kMoments) {
      w.add(e * d);
      const Lanes root = select(d < square_floor, zero, e);
      q.add(root * root);
    }
  }
  return {double(maximum) * inverse_temperature, s.total(), w.total() * kLn2, q.total()};
}

template <bool kMoments, class Number>
SoftmaxSums<double> row_sums(const Row<Number>& row, double inverse_temperature) {
  alignas(64) float buffer[kColumns];
  const bool in_place = std::is_same_v<Number, Float32> && row.stride == 1 && row.softcap == 0.0f;
  SoftmaxSums<double> total;
  float maximum = kNone;
  for (int64_t column = 0; column < row.vocab; column += kColumns) {
    const int64_t n = std::min(kColumns, row.vocab - column);
    const float* z = buffer;
    float top;
    if (in_place && n % kLanes == 0) {
      z = reinterpret_cast<const float*>(row.data + column);
      top = convert<false, false>(row, column, n, buffer);
    } else if (row.softcap == 0.0f) {
      top = convert<true, false>(row, column, n, buffer);
    } else {
      top = convert<true, true>(row, column, n, buffer);
    }
    // Relative to the maximum so far, not the piece's: after the first pieces it hardly changes, and merging is sums.
    maximum = std::max(maximum, top);
    const char* const next = reinterpret_cast<const char*>(row.data + (column + n) * row.stride);
    const int64_t step = row.stride == 1 ? kLanes * sizeof(*row.data) : 0;
    total = merge(total, piece_sums<kMoments>(z, n, maximum, inverse_temperature, next, step));
  }
  return total;
}

struct RowStatistics {
  double label_logit;
  SoftmaxSums<double> sums;
};

// What a skipped row leaves finishes as log_prob, entropy, sum_p2 and lse of 0.
template <bool kMoments, class Number>
RowStatistics statistics_of(const LogitsInputs& in, int64_t r) {
  const int64_t label = in.labels[r];
  if (label == kSkippedRow) return {0.0, {0.0, 1.0, 0.0, 0.0}};
  if (label < kNoLabel || label >= in.logits.vocab) return {kNaN, {kNaN, kNaN, kNaN, kNaN}};
  const Row<Number> row = row_of<Number>(in, r);
  const double factor = in.temperature_factor(r);
  if (!(factor > 0.0)) return {kNaN, {kNaN, kNaN, kNaN, kNaN}};
  const float label_logit = label == kNoLabel ? kNone : row.at(label).value;
  return {double(label_logit) * factor, row_sums<kMoments>(row, factor)};
}

template <class Body>
void for_rows(const LogitsView& v, int threads, const Body& body) {
  const int64_t rows = std::max<int64_t>(1, kBlockLogits / std::max<int64_t>(1, v.vocab));
  parallel_blocks((v.rows + rows - 1) / rows, threads, [&](int64_t block) {
    for (int64_t r = block * rows; r < std::min(v.rows, (block + 1) * rows); ++r) body(r);
  });
}

template <class Body>
void with_number(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(Float32{});
  if (dtype == DType::kBFloat16) return body(BFloat16{});
  if (dtype == DType::kFloat16) return body(Float16{});
  throw std::invalid_argument("logits are float32, bfloat16 or float16");
}

// What the gradient of a row is computed from.
struct RowGradient {
  double lse, entropy, sum_p2;
  double g_log_prob, g_entropy, g_sum_p2;  // upstream
};

template <bool kCapped, bool kMoments, class Number>
void row_gradient(const Row<Number>& row, const RowGradient& g, int64_t label, double inverse_temperature,
                  typename Number::Storage* out, int64_t out_stride) {
  // The label's gradient in float64: 1 - p has to be right where p is nearly 1. Taken first, `out` may be the logits.
  const Capped<float> at = label >= 0 ? row.at(label) : Capped<float>{kNone, 0.0f};
  float label_gradient_value = 0.0f;
  if (label >= 0) {
    const double log_prob = std::min(double(at.value) * inverse_temperature - g.lse, 0.0);  // std::min(NaN, 0) is NaN
    label_gradient_value = float(label_gradient(log_prob, g.entropy, g.g_log_prob, g.g_entropy, g.g_sum_p2, g.sum_p2) *
                                 inverse_temperature * double(at.slope));
  }

  // (z - center) / T is log p + H: exactly 0 where all logits are equal. The center is a float and a rest.
  const double center = (g.lse - g.entropy) / inverse_temperature;
  const float center_high = float(center);
  const double rest = (center - double(center_high)) * inverse_temperature;
  const Lanes shift(center_high), scale(float(inverse_temperature * kLog2E));
  const Lanes p_scale(float(std::exp(-g.entropy - rest))), power_rest(float(-rest * kLog2E)), zero(0.0f);
  const Lanes g_log_prob(float(g.g_log_prob * inverse_temperature)), g_entropy(float(g.g_entropy * inverse_temperature * kLn2));
  const Lanes twice_g_sum_p2(float(2.0 * g.g_sum_p2 * inverse_temperature)), sum_p2(float(g.sum_p2));
  const auto sixteen = [&](const Lanes& raw) {
    Lanes z = raw, slope;
    if constexpr (kCapped) {
      const Capped<Lanes> c = row.capped(raw);
      for (int k = 0; k < detail::kRegisters; ++k) z.v[k] = c.value.v[k], slope.v[k] = c.slope.v[k];
    }
    const Lanes relative = (z - shift) * scale;
    const LaneMask kept = above_floor(relative);
    const Lanes d = cut_at_floor(kept, relative), p = power(kept, d) * p_scale;
    if constexpr (kCapped) {
      return select(kept, logit_gradient(p, d + power_rest, g_log_prob, g_entropy, twice_g_sum_p2, sum_p2) * slope, zero);
    } else if constexpr (kMoments) {
      return select(kept, logit_gradient(p, d + power_rest, g_log_prob, g_entropy, twice_g_sum_p2, sum_p2), zero);
    } else {
      return select(kept, -p * g_log_prob, zero);
    }
  };
  int64_t i = 0;
  if (row.stride == 1 && out_stride == 1)
    for (; i + kLanes <= row.vocab; i += kLanes) Number::store(out + i, sixteen(Number::load(row.data + i)));
  for (; i < row.vocab; i += kLanes) {
    const int64_t left = row.vocab - i;
    store_columns<Number>(out + i * out_stride, out_stride, left, sixteen(load_columns<Number>(row.data + i * row.stride, row.stride, left)));
  }
  // A label whose logit is -inf keeps gradient 0, as every logit of -inf.
  if (label >= 0 && at.value != kNone) out[label * out_stride] = Number::to(label_gradient_value);
}

}  // namespace

void row_statistics(const LogitsInputs& in, double* statistics, int threads) {
  const int64_t rows = in.logits.rows;
  with_number(in.logits.dtype, [&](auto number) {
    using Number = decltype(number);
    for_rows(in.logits, threads, [&](int64_t r) {
      const RowStatistics s = statistics_of<true, Number>(in, r);
      const double values[] = {s.label_logit, s.sums.maximum, s.sums.s, s.sums.w, s.sums.q};
      for (int64_t i = 0; i < 5; ++i) statistics[i * rows + r] = values[i];
    });
  });
}

void finish_statistics(int64_t parts, int64_t rows, const double* statistics, double* results) {
  for (int64_t r = 0; r < rows; ++r) {
    double label_logit = -std::numeric_limits<double>::infinity();
    SoftmaxSums<double> total;
    for (int64_t part = 0; part < parts; ++part) {
      const double* const s = statistics + part * 5 * rows + r;
      label_logit = s[0] <= label_logit ? label_logit : s[0];  // NaN stays
      total = merge(total, {s[rows], s[2 * rows], s[3 * rows], s[4 * rows]});
    }
    const SoftmaxResult<double> result = finish(total, label_logit);
    const double values[] = {result.log_prob, result.entropy, result.sum_p2, result.lse};
    for (int64_t i = 0; i < 4; ++i) results[i * rows + r] = values[i];
  }
}

void token_log_probs(const LogitsInputs& in, const LogProbsOutputs& out, int threads) {
  const int64_t rows = in.logits.rows;
  with_number(in.logits.dtype, [&](auto number) {
    using Number = decltype(number);
    for_rows(in.logits, threads, [&](int64_t r) {
      const RowStatistics s = out.entropy ? statistics_of<true, Number>(in, r) : statistics_of<false, Number>(in, r);
      const SoftmaxResult<double> result = finish(s.sums, s.label_logit);
      out.log_probs[r] = float(result.log_prob);
      out.state[r] = result.lse;
      if (out.entropy) {
        out.entropy[r] = float(result.entropy);
        out.sum_p2[r] = float(result.sum_p2);
        out.state[rows + r] = result.entropy;
        out.state[2 * rows + r] = result.sum_p2;
      }
    });
  });
}

void logits_gradient(const LogitsInputs& in, const double* lse, const double* entropy, const double* sum_p2,
                     const LogProbsGradients& upstream, const LogitsView& gradient, int threads) {
  if (gradient.rows != in.logits.rows || gradient.vocab != in.logits.vocab || gradient.dtype != in.logits.dtype)
    throw std::invalid_argument("the gradient has another shape or type than the logits");
  if ((upstream.entropy && !entropy) || (upstream.sum_p2 && !sum_p2)) throw std::invalid_argument("entropy or sum_p2 is missing");
  const bool moments = upstream.entropy || upstream.sum_p2;
  with_number(in.logits.dtype, [&](auto number) {
    using Number = decltype(number);
    for_rows(in.logits, threads, [&](int64_t r) {
      const auto at = [r](const auto* p) { return p ? double(p[r]) : 0.0; };
      const RowGradient g{lse[r],
                          upstream.entropy ? entropy[r] : 0.0,
                          upstream.sum_p2 ? sum_p2[r] : 0.0,
                          at(upstream.log_probs),
                          at(upstream.entropy),
                          at(upstream.sum_p2)};
      auto* const out = reinterpret_cast<typename Number::Storage*>(gradient.data) + gradient.row(r);
      if (in.labels[r] == kSkippedRow || (g.g_log_prob == 0.0 && g.g_entropy == 0.0 && g.g_sum_p2 == 0.0)) {
        if (gradient.stride == 1) {
          std::fill(out, out + gradient.vocab, typename Number::Storage{});
        } else {
          for (int64_t i = 0; i < gradient.vocab; ++i) out[i * gradient.stride] = 0;
        }
        return;
      }
      const Row<Number> row = row_of<Number>(in, r);
      const int64_t label = in.labels[r] < row.vocab ? in.labels[r] : kNoLabel;
      const double factor = in.temperature_factor(r);
      const auto run = [&](auto capped, auto with_moments) {
        row_gradient<capped.value, with_moments.value>(row, g, label, factor, out, gradient.stride);
      };
      if (row.softcap != 0.0f) {
        run(std::true_type{}, std::true_type{});
      } else if (moments) {
        run(std::false_type{}, std::true_type{});
      } else {
        run(std::false_type{}, std::false_type{});
      }
    });
  });
}

}  // namespace fastadv
