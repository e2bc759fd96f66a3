// The token losses: one function a loss, value and derivative together.
// The specification is fastadv/reference/policy_loss.py; the CPU and the CUDA kernels call these.
#pragma once

#include "fastadv/portability.h"

namespace fastadv {

enum class Loss : int { kReinforce = 0, kPpo = 1 };

struct LossParameters {
  float ratio_low;        // 1 - clip_low
  float ratio_high;       // 1 + clip_high
  float dual_clip;        // bound c of the loss where the advantage is negative; 0: no bound
  float log_ratio_bound;  // |log ratio| is cut here before exp; no gradient flows beyond it
};

// loss and its derivative with respect to log_prob, and which rule produced them.
template <class F, class Flag>
struct TokenTerm {
  F loss;
  F gradient;
  F log_ratio;     // log_prob - old_log_prob, cut at the bound
  Flag clipped;    // the clipped surrogate was larger than the plain one
  Flag bounded;    // the dual clip bounded the loss
  Flag saturated;  // |log ratio| beyond the bound
};

// Clipped surrogate (Schulman et al. 2017, eq. 7) with separate bounds (DAPO, eq. 5) and the dual clip for negative
// advantages (Ye et al. 2020, eq. 5). Ties go to the earlier branch: exactly on an edge the gradient is the full one.
template <class F>
FASTADV_INLINE auto ppo_term(F log_prob, F old_log_prob, F advantage, const LossParameters& p) {
  using Flag = decltype(log_prob < log_prob);
  const F zero(0.0f), bound(p.log_ratio_bound);
  const F raw = log_prob - old_log_prob;
  const F log_ratio = clamp(raw, -bound, bound);
  const F ratio = exp_bounded(log_ratio);

  const F plain = -advantage * ratio;  // its derivative by log_prob is itself
  const F cut = -advantage * clamp(ratio, F(p.ratio_low), F(p.ratio_high));
  const Flag clipped = cut > plain;
  F loss = select(clipped, cut, plain);

  const F most = -advantage * F(p.dual_clip);
  const Flag bounded = (advantage < zero) & (most < loss) & (F(p.dual_clip) > zero);
  loss = select(bounded, most, loss);

  const Flag saturated = (raw > bound) | (raw < -bound);
  const F gradient = select(clipped | bounded | saturated, zero, plain);
  return TokenTerm<F, Flag>{loss, gradient, log_ratio, clipped, bounded, saturated};
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
FASTADV_INLINE auto token_term(F log_prob, F old_log_prob, F advantage, const LossParameters& p) {
  if constexpr (kLoss == Loss::kPpo) {
    return ppo_term(log_prob, old_log_prob, advantage, p);
  } else {
    return reinforce_term(log_prob, old_log_prob, advantage, p);
  }
}

}  // namespace fastadv
