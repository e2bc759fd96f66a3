// The token losses in two steps, the ratio and then the loss with its derivative: a kernel can work on the ratios of the next
// tokens while it finishes these.
// The specification is fastadv/reference/policy_terms.py; the CPU and the CUDA kernels call these.
#pragma once

#include <cmath>

#include "fastadv/portability.h"

namespace fastadv {

enum class Loss : int { kReinforce = 0, kPpo = 1, kCispo = 2, kSapo = 3, kGspo = 4 };

// What is summed over the batch; fastadv.ops._policy_loss_kernel.SUMS has the names in this order. Loss and policy are times the
// scale, `policy` being the share without KL and entropy; the others are plain sums over tokens.
enum PolicyLossSum : int {
  kLossSum, kPolicySum, kClipped, kBounded, kSaturated, kNegativeLogRatio, kTokens, kKlSum, kEntropySum, kIsWeight, kRejected,
  kCapped, kMissing, kPolicyLossSums
};

// A sum as it is reported: a mean over the tokens that count, or the loss itself.
FASTADV_INLINE float metric_of(PolicyLossSum which, double sum, double tokens) {
  if (which == kLossSum || which == kPolicySum || which == kTokens) return float(sum);
  return float(sum / (tokens < 1.0 ? 1.0 : tokens));
}

// What the sum over tokens is multiplied by. A divisor that must not be there gives NaN.
FASTADV_INLINE double scale_of(double numerator, double divisor) { return divisor > 0.0 ? numerator / divisor : double(NAN); }

struct LossParameters {
  float ratio_low;        // 1 - clip_low
  float ratio_high;       // 1 + clip_high
  float dual_clip;        // bound c of the loss where the advantage is negative; 0: no bound
  float ratio_cap;        // delta: the ratio itself is cut here before the surrogate; 0: not cut
  float log_ratio_bound;  // |log ratio| is cut here before exp; no gradient flows beyond it
  float tau_pos;          // SAPO's temperatures, by the sign of the advantage
  float tau_neg;
};

// How likely a token became.
template <class F, class Flag>
struct Ratio {
  F log_ratio;     // log_prob - old_log_prob, cut at the bound
  F ratio;         // what the loss is made of: the token's own, or its rollout's
  Flag saturated;  // the logarithm of `ratio` is beyond the bound
};

// loss and its derivative with respect to log_prob, and which rule produced them.
template <class F, class Flag>
struct TokenTerm {
  F loss;
  F gradient;
  Flag clipped;  // a clip took the gradient away, or (cispo) changed the coefficient
  Flag bounded;  // the dual clip or the cap bounded the loss
};

template <class F, class Flag>
struct Surrogate {
  F loss;
  F gradient;  // with respect to the log of the ratio
  Flag clipped;
  Flag bounded;
};

// Clipped surrogate (Schulman et al. 2017, eq. 7) with separate bounds (DAPO, eq. 5), a cap on the ratio (INTELLECT-2)
// and the dual clip for negative advantages (Ye et al. 2020, eq. 5). Ties go to the earlier branch: exactly on an edge the
// gradient is the full one.
template <class F>
FASTADV_INLINE auto surrogate(F ratio, F advantage, const LossParameters& p) {
  using Flag = decltype(ratio < ratio);
  const F zero(0.0f), cap(p.ratio_cap);
  const Flag capped = (cap > zero) & (ratio > cap);
  const F plain = -advantage * select(capped, cap, ratio);  // its derivative by the log of the ratio is itself, unless capped
  const F cut = -advantage * clamp(ratio, F(p.ratio_low), F(p.ratio_high));
  const Flag clipped = cut > plain;
  F loss = select(clipped, cut, plain);

  const F most = -advantage * F(p.dual_clip);
  const Flag doubly = (advantage < zero) & (most < loss) & (F(p.dual_clip) > zero);
  loss = select(doubly, most, loss);
  const Flag bounded = doubly | (capped & !clipped);
  return Surrogate<F, Flag>{loss, select(clipped | bounded, zero, plain), clipped, bounded};
}

template <class F>
FASTADV_INLINE auto token_ratio(F log_prob, F old_log_prob, const LossParameters& p) {
  using Flag = decltype(log_prob < log_prob);
  const F bound(p.log_ratio_bound), raw = log_prob - old_log_prob;
  const F log_ratio = clamp(raw, -bound, bound);
  return Ratio<F, Flag>{log_ratio, exp_bounded(log_ratio), Flag((raw > bound) | (raw < -bound))};
}

// GSPO's: the ratio of the rollout, exp of the mean log-ratio, which is cut at the bound from above only, as verl does.
template <class F>
FASTADV_INLINE auto row_ratio(F log_prob, F old_log_prob, F row_log_ratio, const LossParameters& p) {
  using Flag = decltype(log_prob < log_prob);
  const F bound(p.log_ratio_bound), least(-80.0f);
  return Ratio<F, Flag>{log_prob - old_log_prob, exp_bounded(clamp(row_log_ratio, least, bound)), row_log_ratio > bound};
}

// No ratio: the old log-prob enters the reported log-ratio only.
template <class F>
FASTADV_INLINE auto no_ratio(F log_prob, F old_log_prob, const LossParameters& p) {
  using Flag = decltype(log_prob < log_prob);
  const F bound(p.log_ratio_bound);
  return Ratio<F, Flag>{clamp(log_prob - old_log_prob, -bound, bound), F(1.0f), log_prob < log_prob};
}

// PPO and GSPO (arXiv 2507.18071): the surrogate of the ratio. Every token of a GSPO rollout passes the gradient on as if the
// rollout's ratio were its own.
template <class F, class Flag>
FASTADV_INLINE auto surrogate_term(const Ratio<F, Flag>& r, F advantage, const LossParameters& p) {
  const auto s = surrogate(r.ratio, advantage, p);
  return TokenTerm<F, Flag>{s.loss, select(r.saturated, F(0.0f), s.gradient), s.clipped, s.bounded};
}

// CISPO (MiniMax-M1, arXiv 2506.13585): -A sg(clip(r)) log_prob. The clip changes the coefficient, not who gets a gradient.
template <class F, class Flag>
FASTADV_INLINE auto cispo_term(const Ratio<F, Flag>& r, F log_prob, F advantage, const LossParameters& p) {
  const F low(p.ratio_low), high(p.ratio_high);
  const F coefficient = -advantage * clamp(r.ratio, low, high);
  const Flag never = log_prob < log_prob;
  return TokenTerm<F, Flag>{coefficient * log_prob, coefficient, Flag((r.ratio < low) | (r.ratio > high)), never};
}

// SAPO (arXiv 2511.20347): -A sigmoid(tau (r - 1)) 4 / tau; the derivative of the gate by r is 4 g (1 - g).
template <class F, class Flag>
FASTADV_INLINE auto sapo_term(const Ratio<F, Flag>& r, F advantage, const LossParameters& p) {
  constexpr float kLog2E = 1.44269504088896341f;
  const F zero(0.0f), one(1.0f), least(-115.0f);
  const Flag positive = advantage > zero, never = advantage < advantage;
  const F tau = select(positive, F(p.tau_pos * kLog2E), F(p.tau_neg * kLog2E));
  const F per_tau = select(positive, F(1.0f / p.tau_pos), F(1.0f / p.tau_neg));
  // (1 - g) / g = e^-tau(r - 1). It is at most e^tau, and tau at most 80; where it is 2^-115, g is 1.
  const F power = tau * (one - r.ratio);
  const F odds = exp2_bounded(select(power < least, least, power));
  const F gate = reciprocal(one + odds);
  const F weight = advantage * F(-4.0f) * gate;
  return TokenTerm<F, Flag>{weight * per_tau, select(r.saturated, zero, weight * r.ratio * (odds * gate)), never, never};
}

// REINFORCE (Williams 1992).
template <class F, class Flag>
FASTADV_INLINE auto reinforce_term(const Ratio<F, Flag>&, F log_prob, F advantage) {
  const Flag never = log_prob < log_prob;
  return TokenTerm<F, Flag>{-advantage * log_prob, -advantage, never, never};
}

template <Loss kLoss, class F>
FASTADV_INLINE auto ratio_of(F log_prob, F old_log_prob, F row_log_ratio, const LossParameters& p) {
  if constexpr (kLoss == Loss::kGspo) {
    return row_ratio(log_prob, old_log_prob, row_log_ratio, p);
  } else if constexpr (kLoss == Loss::kReinforce) {
    return no_ratio(log_prob, old_log_prob, p);
  } else {
    return token_ratio(log_prob, old_log_prob, p);
  }
}

template <Loss kLoss, class F, class Flag>
FASTADV_INLINE auto token_term(const Ratio<F, Flag>& r, F log_prob, F advantage, const LossParameters& p) {
  if constexpr (kLoss == Loss::kPpo || kLoss == Loss::kGspo) {
    return surrogate_term(r, advantage, p);
  } else if constexpr (kLoss == Loss::kCispo) {
    return cispo_term(r, log_prob, advantage, p);
  } else if constexpr (kLoss == Loss::kSapo) {
    return sapo_term(r, advantage, p);
  } else {
    return reinforce_term(r, log_prob, advantage);
  }
}

}  // namespace fastadv
