// What a token's policy term is multiplied by because another policy sampled it, and the penalty on moving away from a reference.
// The specification is fastadv/reference/corrections.py and fastadv/reference/kl.py.
#pragma once

#include "fastadv/portability.h"

namespace fastadv {

// kTruncate: the ratio, cut to [low, high] (TIS). kMask: the ratio inside of it, 0 outside (MIS, IcePop). kReject: 1 inside, 0
// outside. kPresent: 1; only missing log-probs matter.
enum class Correction : int { kNone = 0, kTruncate = 1, kMask = 2, kReject = 3, kPresent = 4 };

struct CorrectionParameters {
  Correction kind;
  float low, high;          // bounds of the ratio
  float log_low, log_high;  // the same of its logarithm: acceptance is decided before exp, which may overflow
  float missing_weight;     // of a token whose sampler log-prob is NaN: 1 (neutral) or 0 (excluded)
};

template <class F, class Flag>
struct ImportanceWeight {
  F weight;
  Flag capped;   // a bound changed it
  Flag missing;  // no sampler log-prob
};

// Weight of a token that `rollout_log_prob`'s policy sampled and `old_log_prob`'s policy is to be corrected to.
template <class F>
FASTADV_INLINE auto importance_weight(F old_log_prob, F rollout_log_prob, const CorrectionParameters& p) {
  using Flag = decltype(old_log_prob < old_log_prob);
  const F zero(0.0f), one(1.0f), eighty(80.0f);
  const Flag missing = rollout_log_prob != rollout_log_prob;
  const F log_ratio = select(missing, zero, old_log_prob - rollout_log_prob);
  const F ratio = exp_bounded(clamp(log_ratio, -eighty, eighty));
  const Flag outside = (log_ratio < F(p.log_low)) | (log_ratio > F(p.log_high));
  F weight = one;
  Flag capped = old_log_prob < old_log_prob;  // never
  if (p.kind == Correction::kTruncate) {
    weight = clamp(ratio, F(p.low), F(p.high));
    capped = outside;
  } else if (p.kind == Correction::kMask) {
    weight = select(outside, zero, ratio);
  } else if (p.kind == Correction::kReject) {
    weight = select(outside, zero, one);
  }
  // Old minus rollout is NaN for -inf against -inf: it must stay visible, and no comparison above noticed it.
  weight = select(log_ratio != log_ratio, log_ratio, weight);
  return ImportanceWeight<F, Flag>{select(missing, F(p.missing_weight), weight), capped, missing};
}

// ---- KL penalty: estimators of KL(policy | reference) from l = log_prob - ref_log_prob (Schulman 2020)

enum class Kl : int { kNone = 0, kK1 = 1, kAbs = 2, kK2 = 3, kK3 = 4, kLowVariance = 5 };
enum class KlGradient : int { kOwn = 0, kStraightThrough = 1, kUnbiased = 2 };

struct KlParameters {
  Kl kind;
  KlGradient gradient;
  float coef;
};

template <class F>
struct KlTerm {
  F value;
  F gradient;  // with respect to log_prob
};

template <class F>
FASTADV_INLINE KlTerm<F> kl_estimate(F l, Kl kind) {
  const F zero(0.0f), one(1.0f), half(0.5f);
  if (kind == Kl::kK1) return {l, one};
  if (kind == Kl::kAbs) return {select(l < zero, -l, l), select(l < zero, F(-1.0f), select(l > zero, one, l))};
  if (kind == Kl::kK2) return {half * l * l, l};
  // e^-l - 1 + l. K3 goes on by its tangent beyond |l| = 40, finite for any l; the low-variance form cuts l at 20 and the
  // value at 10.
  const F bound(kind == Kl::kK3 ? 40.0f : 20.0f);
  const F cut = clamp(l, -bound, bound);
  const F e = exp_bounded(-cut);
  // Where l is small the terms cancel (at l = 0.01 a thousandth of the value would be rounding): the series instead.
  F series = cut * F(1.0f / 40320.0f) + F(-1.0f / 5040.0f);
  for (const float c : {1.0f / 720.0f, -1.0f / 120.0f, 1.0f / 24.0f, -1.0f / 6.0f, 0.5f}) series = series * cut + F(c);
  F slope = cut * F(-1.0f / 40320.0f) + F(1.0f / 5040.0f);  // of the series' derivative, 1 - e^-l over l
  for (const float c : {-1.0f / 720.0f, 1.0f / 120.0f, -1.0f / 24.0f, 1.0f / 6.0f, -0.5f, 1.0f}) slope = slope * cut + F(c);
  const auto small = (cut < half) & (cut > -half);
  const F value = select(small, series * cut * cut, (e - one) + cut), gradient = select(small, slope * cut, one - e);
  if (kind == Kl::kK3) return {value + (one - e) * (l - cut), gradient};
  const F ten(10.0f);
  return {select(value > ten, ten, value), select((l > bound) | (l < -bound) | (value > ten), zero, gradient)};
}

// kStraightThrough: the estimate's value with k2's gradient, which is that of KL itself in expectation. kUnbiased: the estimate
// times the policy's ratio to the old one, through which the gradient flows too (DeepSeek-V3.2).
template <class F>
FASTADV_INLINE KlTerm<F> kl_term(F log_prob, F old_log_prob, F ref_log_prob, float log_ratio_bound, const KlParameters& p) {
  const F l = log_prob - ref_log_prob;
  KlTerm<F> k = kl_estimate(l, p.kind);
  if (p.gradient == KlGradient::kStraightThrough) {
    k.gradient = l;
  } else if (p.gradient == KlGradient::kUnbiased) {
    const F bound(log_ratio_bound), raw = log_prob - old_log_prob;
    const F ratio = exp_bounded(clamp(raw, -bound, bound));
    const F own = select((raw > bound) | (raw < -bound), F(0.0f), k.value);
    k.gradient = ratio * (k.gradient + own);
    k.value = ratio * k.value;
  }
  return k;
}

}  // namespace fastadv
