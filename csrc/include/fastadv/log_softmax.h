// Log-softmax of a row of logits from one read: log-probability, entropy and sum of squared probabilities, and their
// gradients. The specification is fastadv/reference/token_log_probs.py; the CPU and the CUDA kernels call these.
#pragma once

#include <cstdint>

#include "fastadv/portability.h"

namespace fastadv {

// Labels that are no columns; any other that is none gives NaN.
constexpr int64_t kNoLabel = -1;     // the row's label is in another part of the vocabulary
constexpr int64_t kSkippedRow = -2;  // masked or ignored: not read

// Powers are of 2, which need no constants to reduce their range; logits are multiplied by log2(e) with the temperature.
constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;
// Below this power, relative to the maximum (or to the mean), a probability is exactly 0: so -inf needs no branch, and
// exp2_bounded is in its range. A probability of 2^-115 is far below what float32 resolves beside 1.
constexpr float kPowerFloor = -115.0f;
// Squares of powers below this are 0 too: they would be subnormal, which some processors take 100 cycles for.
constexpr float kSquareFloor = -62.0f;

// What a row, or a part of one, leaves: online normalizer (Milakov and Gimelshein 2018, alg. 3) with two more sums.
// z are logits after softcap and temperature.
template <class F>
struct SoftmaxSums {
  F maximum = F(-INFINITY);  // m = max z
  F s = F(0);                // sum e^(z - m)
  F w = F(0);                // sum e^(z - m) (z - m)
  F q = F(0);                // sum e^(2 (z - m))
};

// The sums over both parts. A part of which every logit is -inf adds nothing: its maximum never enters arithmetic.
template <class F>
FASTADV_INLINE SoftmaxSums<F> merge(const SoftmaxSums<F>& a, const SoftmaxSums<F>& b) {
  const F none = F(-INFINITY);
  const F maximum = a.maximum > b.maximum ? a.maximum : b.maximum;
  const F da = a.maximum == none ? F(0) : a.maximum - maximum, db = b.maximum == none ? F(0) : b.maximum - maximum;
  const F ea = da == F(0) ? F(1) : exp(da), eb = db == F(0) ? F(1) : exp(db);
  return {maximum, ea * a.s + eb * b.s, ea * (a.w + a.s * da) + eb * (b.w + b.s * db), ea * ea * a.q + eb * eb * b.q};
}

template <class F>
struct SoftmaxResult {
  F log_prob, entropy, sum_p2, lse;
};

// A row without a finite logit, or with NaN or +inf in it, gives NaN. log_prob is at most 0.
template <class F>
FASTADV_INLINE SoftmaxResult<F> finish(const SoftmaxSums<F>& sums, F label_logit) {
  if (!(sums.s > F(0))) return {F(NAN), F(NAN), F(NAN), F(NAN)};
  const F log_s = log(sums.s);
  const F log_prob = (label_logit - sums.maximum) - log_s;
  return {log_prob > F(0) ? F(0) : log_prob, log_s - sums.w / sums.s, sums.q / (sums.s * sums.s), sums.maximum + log_s};
}

// 2^d for d at most 115, exactly 0 below the floor. In two steps, since sums need d itself, cut at the floor:
// kept = above_floor(d); d = cut_at_floor(kept, d); 2^d = power(kept, d). NaN is kept: it stays visible.
template <class F>
FASTADV_INLINE auto above_floor(F d) {
  return !(d < F(kPowerFloor));
}

template <class Flag, class F>
FASTADV_INLINE F cut_at_floor(Flag kept, F d) {
  return select(kept, d, F(kPowerFloor));
}

template <class Flag, class F>
FASTADV_INLINE F power(Flag kept, F d) {
  return select(kept, exp2_bounded(d), F(0.0f));
}

// Derivative by a logit that is not the label's of the sum of upstream gradients times log_prob, entropy and sum_p2:
// d log_prob / dz = -p, dH / dz = -p (log p + H), d sum_p2 / dz = 2 p (p - sum_p2).
template <class F>
FASTADV_INLINE F logit_gradient(F p, F log_p_plus_entropy, F g_log_prob, F g_entropy, F twice_g_sum_p2, F sum_p2) {
  return -p * multiply_add(-twice_g_sum_p2, p - sum_p2, multiply_add(g_entropy, log_p_plus_entropy, g_log_prob));
}

// The same at the label's logit, where d log_prob / dz = 1 - p.
template <class F>
FASTADV_INLINE F label_gradient(F log_prob, F entropy, F g_log_prob, F g_entropy, F g_sum_p2, F sum_p2) {
  const F p = exp(log_prob);
  return logit_gradient(p, log_prob + entropy, F(0), g_entropy, F(2) * g_sum_p2, sum_p2) - g_log_prob * expm1(log_prob);
}

// cap * tanh(z / cap) and its derivative 1 - tanh^2; -inf stays -inf: a token that cannot be sampled.
template <class F>
struct Capped {
  F value, slope;
};

template <class F>
FASTADV_INLINE Capped<F> softcapped(F z, F cap, F inverse_cap) {
  const F x = z * inverse_cap, one(1.0f), none(-INFINITY);
  const F magnitude = select(x < F(0.0f), -x, x);
  // Small: Cephes' polynomial for tanhf. Large: (1 - u) / (1 + u) with u = e^(-2|x|), which also gives the slope.
  const F square = x * x;
  F small = multiply_add(square, F(-5.70498872745e-3f), F(2.06390887954e-2f));
  small = multiply_add(small, square, F(-5.37397155531e-2f));
  small = multiply_add(small, square, F(1.33314422036e-1f));
  small = multiply_add(small, square, F(-3.33332819422e-1f));
  small = multiply_add(small * square, x, x);
  const F power = magnitude * F(-2.0f), least(-80.0f);
  const F u = exp_bounded(select(power < least, least, power)), inverse_sum = inverse(one + u);
  const F large = (one - u) * inverse_sum;
  const F tanh = select(magnitude < F(0.625f), small, select(x < F(0.0f), -large, large));
  return {select(z > none, cap * tanh, z), F(4.0f) * u * inverse_sum * inverse_sum};
}

}  // namespace fastadv
