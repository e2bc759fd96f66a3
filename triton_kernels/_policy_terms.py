"""The formulas of the policy losses, name by name those of csrc/include/fastadv/policy_loss.h and corrections.h.

The specification is fastadv/reference/policy_terms.py, corrections.py and kl.py. Everything is float32, and what is
multiplied and added at once says so with `fma`: the same token gives the same bits in every kernel and in every block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

REINFORCE, PPO, CISPO, SAPO, GSPO = (tl.constexpr(i) for i in range(5))  # Loss
TRUNCATE, MASK, REJECT = (tl.constexpr(i) for i in range(1, 4))  # Correction; 0: none, 4: only missing ones matter
ABS, K2, K3 = (tl.constexpr(i) for i in range(2, 5))  # Kl; 1: k1, 5: low variance
STRAIGHT_THROUGH, UNBIASED = (tl.constexpr(i) for i in range(1, 3))  # KlGradient; 0: own


class LossParameters(NamedTuple):
    """Bounds of a loss, and SAPO's temperatures."""

    ratio_low: Any
    ratio_high: Any
    dual_clip: Any  # NaN: none
    ratio_cap: Any  # infinite: none
    log_ratio_bound: Any
    tau_pos: Any
    tau_neg: Any


class CorrectionParameters(NamedTuple):
    """What importance weights are made with."""

    kind: Any
    low: Any
    high: Any
    log_low: Any
    log_high: Any
    missing_weight: Any


class KlParameters(NamedTuple):
    """The penalty on moving away from a reference."""

    kind: Any
    gradient: Any
    coef: Any


class Ratio(NamedTuple):
    """How likely a token became."""

    log_ratio: Any  # log_prob - old_log_prob, cut at the bound
    ratio: Any  # what the loss is made of: the token's own, or its rollout's
    saturated: Any  # the logarithm of `ratio` is beyond the bound


class TokenTerm(NamedTuple):
    """The loss, its derivative with respect to log_prob, and which rule produced them."""

    loss: Any
    gradient: Any
    clipped: Any  # a clip took the gradient away, or (cispo) changed the coefficient
    bounded: Any  # the dual clip or the cap bounded the loss


class ImportanceWeight(NamedTuple):
    """A weight, where a bound changed it, and where the sampler's log-prob is missing."""

    weight: Any
    capped: Any
    missing: Any


class KlTerm(NamedTuple):
    """A penalty and its derivative with respect to log_prob."""

    value: Any
    gradient: Any


# ---- what CUDA's libraries have and Triton's interpreter lacks ----------------------------------------------------

LOG2_E = tl.constexpr(1.4426950216293335)  # in float32, and the rest of it
LOG2_E_REST = tl.constexpr(1.925963033500011e-08)
TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has no fraction
ONE_BITS = tl.constexpr(0x3F800000)  # of 1.0


@triton.jit
def clamp(x, low, high):
    """`x` cut to [low, high]. NaN passes through and stays visible."""
    x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exp_bounded(x):
    """e^x for |x| up to 80, to a unit in the last place (tl.exp would miss by eight at 20): 2^n times 2^rest, n an
    integer and the rest at most half."""
    shifted = tl.fma(x, LOG2_E, TO_INTEGER)  # its last bits are n
    rest = tl.fma(x, LOG2_E_REST, tl.fma(x, LOG2_E, -(shifted - TO_INTEGER)))
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + ONE_BITS).to(tl.float32, bitcast=True)  # 2^n
    return tl.exp2(rest) * power  # a product, so that NaN stays NaN


# ---- policy_loss.h ------------------------------------------------------------------------------------------------


@triton.jit
def surrogate(ratio, advantage, p):
    """The clipped surrogate, its cap and its dual clip; its gradient is with respect to the log of the ratio. Ties go
    to the earlier branch: exactly on an edge the gradient is the full one."""
    capped = ratio > p.ratio_cap
    plain = -advantage * tl.minimum(ratio, p.ratio_cap, propagate_nan=tl.PropagateNan.ALL)
    cut = -advantage * clamp(ratio, p.ratio_low, p.ratio_high)
    clipped = cut > plain
    loss = tl.where(clipped, cut, plain)
    most = -advantage * p.dual_clip
    doubly = (advantage < 0.0) & (most < loss)
    loss = tl.where(doubly, most, loss)
    bounded = doubly | (capped & ~clipped)
    return TokenTerm(loss, tl.where(clipped | bounded, 0.0, plain), clipped, bounded)


@triton.jit
def token_ratio(log_prob, old_log_prob, p):
    """The token's own."""
    raw = log_prob - old_log_prob
    log_ratio = clamp(raw, -p.log_ratio_bound, p.log_ratio_bound)
    return Ratio(log_ratio, exp_bounded(log_ratio), tl.abs(raw) > p.log_ratio_bound)


@triton.jit
def row_ratio(log_prob, old_log_prob, row_log_ratio, p):
    """GSPO's: exp of the rollout's mean log-ratio, which is cut at the bound from above only, as verl does."""
    ratio = exp_bounded(clamp(row_log_ratio, -80.0, p.log_ratio_bound))
    return Ratio(log_prob - old_log_prob, ratio, row_log_ratio > p.log_ratio_bound)


@triton.jit
def no_ratio(log_prob, old_log_prob, p):
    """The old log-prob enters the reported log-ratio only."""
    log_ratio = clamp(log_prob - old_log_prob, -p.log_ratio_bound, p.log_ratio_bound)
    return Ratio(log_ratio, log_ratio, log_prob < log_prob)  # nobody looks at the second


@triton.jit
def surrogate_term(r, advantage, p):
    """PPO and GSPO."""
    s = surrogate(r.ratio, advantage, p)
    return TokenTerm(s.loss, tl.where(r.saturated, 0.0, s.gradient), s.clipped, s.bounded)


@triton.jit
def cispo_term(r, log_prob, advantage, p):
    """-A sg(clip(r)) log_prob."""
    coefficient = -advantage * clamp(r.ratio, p.ratio_low, p.ratio_high)
    changed = (r.ratio < p.ratio_low) | (r.ratio > p.ratio_high)
    return TokenTerm(coefficient * log_prob, coefficient, changed, log_prob < log_prob)


@triton.jit
def sapo_term(r, advantage, p):
    """-A sigmoid(tau (r - 1)) 4 / tau; the derivative of the gate by r is 4 g (1 - g)."""
    positive = advantage > 0.0
    tau = tl.where(positive, p.tau_pos * LOG2_E, p.tau_neg * LOG2_E)
    per_tau = tl.where(positive, 1.0 / p.tau_pos, 1.0 / p.tau_neg)
    # (1 - g) / g = e^-tau(r - 1). It is at most e^tau, and tau at most 80; where it is 2^-115, g is 1.
    odds = tl.exp2(tl.maximum(tau * (1.0 - r.ratio), -115.0, propagate_nan=tl.PropagateNan.ALL))
    gate = 1.0 / (1.0 + odds)
    weight = advantage * -4.0 * gate
    gradient = tl.where(r.saturated, 0.0, weight * r.ratio * (odds * gate))
    never = advantage < advantage
    return TokenTerm(weight * per_tau, gradient, never, never)


@triton.jit
def reinforce_term(log_prob, advantage):
    """-A log_prob."""
    never = log_prob < log_prob
    return TokenTerm(-advantage * log_prob, -advantage, never, never)


@triton.jit
def ratio_of(log_prob, old_log_prob, row_log_ratio, p, LOSS: tl.constexpr):
    """The ratio that a loss is made of."""
    if LOSS == GSPO:
        return row_ratio(log_prob, old_log_prob, row_log_ratio, p)
    elif LOSS == REINFORCE:
        return no_ratio(log_prob, old_log_prob, p)
    else:
        return token_ratio(log_prob, old_log_prob, p)


@triton.jit
def token_term(r, log_prob, advantage, p, LOSS: tl.constexpr):
    """The loss of a ratio."""
    if LOSS == CISPO:
        return cispo_term(r, log_prob, advantage, p)
    elif LOSS == SAPO:
        return sapo_term(r, advantage, p)
    elif LOSS == REINFORCE:
        return reinforce_term(log_prob, advantage)
    else:
        return surrogate_term(r, advantage, p)


# ---- corrections.h ------------------------------------------------------------------------------------------------


@triton.jit
def importance_weight(old_log_prob, rollout_log_prob, p):
    """Weight of a token that `rollout_log_prob`'s policy sampled and `old_log_prob`'s policy is to be corrected to."""
    missing = rollout_log_prob != rollout_log_prob
    log_ratio = tl.where(missing, 0.0, old_log_prob - rollout_log_prob)
    ratio = exp_bounded(clamp(log_ratio, -80.0, 80.0))
    outside = (log_ratio < p.log_low) | (log_ratio > p.log_high)  # decided before exp, which may overflow
    weight = tl.full(log_ratio.shape, 1.0, tl.float32)
    capped = log_ratio < log_ratio  # never
    if p.kind == TRUNCATE:
        weight = clamp(ratio, p.low, p.high)
        capped = outside
    elif p.kind == MASK:
        weight = tl.where(outside, 0.0, ratio)
    elif p.kind == REJECT:
        weight = tl.where(outside, 0.0, 1.0)
    # Old minus rollout is NaN for -inf against -inf: it must stay visible, and no comparison above noticed it.
    weight = tl.where(log_ratio != log_ratio, log_ratio, weight)
    return ImportanceWeight(tl.where(missing, p.missing_weight, weight), capped, missing)


@triton.jit
def kl_estimate(l, kind):
    """An estimator of KL(policy | reference) from l = log_prob - ref_log_prob."""
    value = l
    gradient = tl.full(l.shape, 1.0, tl.float32)
    if kind == ABS:
        value = tl.abs(l)
        gradient = tl.where(l < 0.0, -1.0, tl.where(l > 0.0, 1.0, l))
    elif kind == K2:
        value = 0.5 * l * l
        gradient = l
    elif kind >= K3:
        # e^-l - 1 + l. K3 goes on by its tangent beyond |l| = 40, finite for any l; the low-variance form cuts l at 20
        # and the value at 10.
        bound = tl.where(kind == K3, 40.0, 20.0)
        cut = clamp(l, -bound, bound)
        e = exp_bounded(-cut)
        # Where l is small the terms cancel (at l = 0.01 a thousandth of the value would be rounding): the series.
        series = tl.fma(cut, 1.0 / 40320.0, -1.0 / 5040.0)
        series = tl.fma(series, cut, 1.0 / 720.0)
        series = tl.fma(series, cut, -1.0 / 120.0)
        series = tl.fma(series, cut, 1.0 / 24.0)
        series = tl.fma(series, cut, -1.0 / 6.0)
        series = tl.fma(series, cut, 0.5)
        slope = tl.fma(cut, -1.0 / 40320.0, 1.0 / 5040.0)  # of the series' derivative, 1 - e^-l over l
        slope = tl.fma(slope, cut, -1.0 / 720.0)
        slope = tl.fma(slope, cut, 1.0 / 120.0)
        slope = tl.fma(slope, cut, -1.0 / 24.0)
        slope = tl.fma(slope, cut, 1.0 / 6.0)
        slope = tl.fma(slope, cut, -0.5)
        slope = tl.fma(slope, cut, 1.0)
        small = tl.abs(cut) < 0.5
        value = tl.where(small, series * cut * cut, (e - 1.0) + cut)
        gradient = tl.where(small, slope * cut, 1.0 - e)
        if kind == K3:
            value = value + (1.0 - e) * (l - cut)
        else:
            gradient = tl.where((tl.abs(l) > bound) | (value > 10.0), 0.0, gradient)
            value = tl.where(value > 10.0, 10.0, value)
    return KlTerm(value, gradient)


@triton.jit
def kl_term(log_prob, old_log_prob, ref_log_prob, log_ratio_bound, p):
    """The penalty: with the estimate's own gradient, with k2's, which is that of KL itself in expectation, or times the
    ratio to the old policy, through which the gradient flows too."""
    l = log_prob - ref_log_prob
    k = kl_estimate(l, p.kind)
    value = k.value
    gradient = k.gradient
    if p.gradient == STRAIGHT_THROUGH:
        gradient = l
    elif p.gradient == UNBIASED:
        r = token_ratio(log_prob, old_log_prob, LossParameters(0.0, 0.0, 0.0, 0.0, log_ratio_bound, 0.0, 0.0))
        gradient = r.ratio * (gradient + tl.where(r.saturated, 0.0, value))
        value = r.ratio * value
    return KlTerm(value, gradient)
