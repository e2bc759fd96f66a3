// The token losses: one function a loss, value and derivative together.
// The specification is fastadv/reference/policy_terms.py; the CPU and the CUDA kernels call these.
#pragma once

#include "fastadv/portability.h"

namespace fastadv {

enum class Loss : int { kReinforce = 0, kPpo = 1, kCispo = 2, kSapo = 3, kGspo = 4 };

struct LossParameters {
  float ratio_low;        // 1 - clip_low
  float ratio_high;       // 1 + clip_high
  float dual_clip;        // bound c of the loss where the advantage is negative; 0: no bound
  float ratio_cap;        // delta: the ratio itself is cut here before the surrogate; 0: not cut
  float log_ratio_bound;  // |log ratio| is cut here before exp; no gradient flows beyond it
  float tau_pos;          // SAPO's temperatures, by the sign of the advantage
  float tau_neg;
};

// loss and its derivative with respect to log_prob, and which rule produced them.
template <class F, class Flag>
struct TokenTerm {
  F loss;
  F gradient;
  F log_ratio;     // log_prob - old_log_prob, cut at the bound
  Flag clipped;    // a clip took the gradient away, or (cispo) changed the coefficient
  Flag bounded;    // the dual clip or the cap bounded the loss
  Flag saturated;  // |log ratio| beyond the bound
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
FASTADV_INLINE auto ppo_term(F log_prob, F old_log_prob, F advantage, const LossParameters& p) {
  using Flag = decltype(log_prob < log_prob);
  const F bound(p.log_ratio_bound), raw = log_prob - old_log_prob;
  const F log_ratio = clamp(raw, -bound, bound);
  const auto s = surrogate(exp_bounded(log_ratio), advantage, p);
  const Flag saturated = (raw > bound) | (raw < -bound);
  return TokenTerm<F, Flag>{s.loss, select(saturated, F(0.0f), s.gradient), log_ratio, s.clipped, s.bounded, saturated};
}

// GSPO (arXiv 2507.18071): the surrogate of the rollout's ratio, exp of the mean log-ratio, which is cut at the bound from
// above only, as verl does; every token of the rollout passes the gradient on as if the ratio were its own.
template <class F>
FASTADV_INLINE auto gspo_term(F log_prob, F old_log_prob, F advantage, F row_log_ratio, const LossParameters& p) {
  using Flag = decltype(log_prob < log_prob);
  const F bound(p.log_ratio_bound), least(-80.0f), raw = log_prob - old_log_prob;
  const auto s = surrogate(exp_bounded(clamp(row_log_ratio, least, bound)), advantage, p);
  const Flag saturated = row_log_ratio > bound;
  return TokenTerm<F, Flag>{s.loss, select(saturated, F(0.0f), s.gradient), raw, s.clipped, s.bounded, saturated};
}

// CISPO (MiniMax-M1, arXiv 2506.13585): -A sg(clip(r)) log_prob. The clip changes the coefficient, not who gets a gradient.
template <class F>
FASTADV_INLINE auto cispo_term(F log_prob, F old_log_prob, F advantage, const LossParameters& p) {
  using Flag = decltype(log_prob < log_prob);
  const F bound(p.log_ratio_bound), low(p.ratio_low), high(p.ratio_high), raw = log_prob - old_log_prob;
  const F log_ratio = clamp(raw, -bound, bound);
  const F ratio = exp_bounded(log_ratio);
  const F coefficient = -advantage * clamp(ratio, low, high);
  const Flag never = log_prob < log_prob;
  return TokenTerm<F, Flag>{coefficient * log_prob, coefficient, log_ratio, (ratio < low) | (ratio > high), never,
                            (raw > bound) | (raw < -bound)};
}

// SAPO (arXiv 2511.20347): -A sigmoid(tau (r - 1)) 4 / tau; the derivative of the gate by r is 4 g (1 - g).
template <class F>
FASTADV_INLINE auto sapo_term(F log_prob, F old_log_prob, F advantage, const LossParameters& p) {
  using Flag = decltype(log_prob < log_prob);
  constexpr float kLog2E = 1.44269504088896341f;
  const F zero(0.0f), one(1.0f), least(-115.0f), bound(p.log_ratio_bound), raw = log_prob - old_log_prob;
  const F log_ratio = clamp(raw, -bound, bound);
  const F ratio = exp_bounded(log_ratio);
  const Flag positive = advantage > zero;
  const F tau = select(positive, F(p.tau_pos * kLog2E), F(p.tau_neg * kLog2E));
  const F scale = select(positive, F(4.0f / p.tau_pos), F(4.0f / p.tau_neg));
  // (1 - g) / g = e^-tau(r - 1). It is at most e^tau, and tau at most 80; where it is 2^-115, g is 1.
  const F power = tau * (one - ratio);
  const F odds = exp2_bounded(select(power < least, least, power));
  const F gate = reciprocal(one + odds);
  const Flag saturated = (raw > bound) | (raw < -bound), never = log_prob < log_prob;
  const F gradient = -advantage * ratio * (F(4.0f) * gate * (odds * gate));
  return TokenTerm<F, Flag>{-advantage * gate * scale, select(saturated, zero, gradient), log_ratio, never, never, saturated};
}

// REINFORCE (Williams 1992): the old log-prob enters the reported log-ratio only.
template <class F>
FASTADV_INLINE auto reinforce_term(F log_prob, F old_log_prob, F advantage, const LossParameters& p) {
  using Flag = decltype(log_prob < log_prob);
  const F bound(p.log_ratio_bound);
  const F raw = log_prob - old_log_prob;
  const Flag never = log_prob < log_prob;
  return TokenTerm<F, Flag>{-advantage * log_prob, -advantage, clamp(raw, -bound, bound), never, never, never};
}

template <Loss kLoss, class F>
FASTADV_INLINE auto token_term(F log_prob, F old_log_prob, F advantage, F row_log_ratio, const LossParameters& p) {
  if constexpr (kLoss == Loss::kPpo) {
    return ppo_term(log_prob, old_log_prob, advantage, p);
  } else if constexpr (kLoss == Loss::kGspo) {
    return gspo_term(log_prob, old_log_prob, advantage, row_log_ratio, p);
  } else if constexpr (kLoss == Loss::kCispo) {
    return cispo_term(log_prob, old_log_prob, advantage, p);
  } else if constexpr (kLoss == Loss::kSapo) {
    return sapo_term(log_prob, old_log_prob, advantage, p);
  } else {
    return reinforce_term(log_prob, old_log_prob, advantage, p);
  }
}

}  // namespace fastadv
