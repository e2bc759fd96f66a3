"""The token losses: what each says about one token, given its ratio or its rollout's.

r = exp(log_prob - old_log_prob), A the advantage, sg() stops the gradient. Every function takes a `Terms` and returns a
`TokenTerms`; tokens outside the mask hold zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastadv.losses import LossConfig
from fastadv.rows import Rows


class TokenTerms(NamedTuple):
    """Per-token loss and the rules that produced it, each shaped like the log-probs."""

    loss: Tensor
    log_ratio: Tensor  # log_prob - old_log_prob, cut at the bound
    clipped: Tensor  # bool: a clip or a trust region took the gradient away, or (cispo) changed the coefficient
    bounded: Tensor  # bool: the dual clip, delta or the ratio's cap bounded it, or a covariance loss picked the token
    saturated: Tensor  # bool: |log ratio| beyond the bound


class Terms(NamedTuple):
    """What the losses are made of, each shaped like the log-probs."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    on: Tensor  # bool: the token counts
    is_weights: Tensor | None
    selected: Tensor | None  # bool: picked by a covariance
    row_log_ratios: Tensor | None  # [B]: the rollouts' log-ratios, where they are given
    rows: Rows
    config: LossConfig

    @property
    def raw(self) -> Tensor:
        """log_prob - old_log_prob."""
        return self.log_probs - self.old_log_probs

    def log_ratio(self) -> Tensor:
        """log_prob - old_log_prob, cut at the bound."""
        return self.raw.clamp(-self.config.log_ratio_bound, self.config.log_ratio_bound)

    def saturated(self) -> Tensor:
        """Where the cut was."""
        return self.raw.abs() > self.config.log_ratio_bound

    def row_mean(self, values: Tensor) -> Tensor:
        """Mean over the tokens of each rollout that count, 0 where there is none, `[B]`."""
        tokens = self.rows.sum(self.on.to(values.dtype))
        return self.rows.sum(torch.where(self.on, values, 0.0)) / tokens.clamp(min=1)

    def either(self, condition: Tensor, yes: float, no: float) -> Tensor:
        """One of two numbers at each token, in the log-probs' dtype."""
        return torch.where(condition, torch.full_like(self.log_probs, yes), torch.full_like(self.log_probs, no))

    def never(self) -> Tensor:
        """False everywhere."""
        return torch.zeros_like(self.on)


def surrogate(ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """max(-A min(r, delta), -A clip(r)), at most -c A where A < 0: (loss, clipped, bounded)."""
    capped = torch.zeros_like(ratio, dtype=torch.bool) if config.delta is None else ratio > config.delta
    plain = -advantages * (ratio if config.delta is None else ratio.clamp(max=config.delta))
    cut = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    clipped = cut > plain
    loss = torch.where(clipped, cut, plain)
    bounded = capped & ~clipped
    if config.dual_clip is not None:
        most = -advantages * config.dual_clip
        doubly = (advantages < 0) & (most < loss)
        loss = torch.where(doubly, most, loss)
        bounded = bounded | doubly
    return loss, clipped, bounded


def reinforce(t: Terms) -> TokenTerms:
    """-A log_prob."""
    return TokenTerms(-t.advantages * t.log_probs, t.log_ratio(), t.never(), t.never(), t.never())


def ppo(t: Terms) -> TokenTerms:
    """The surrogate of r."""
    loss, clipped, bounded = surrogate(t.log_ratio().exp(), t.advantages, t.config)
    return TokenTerms(loss, t.log_ratio(), clipped, bounded, t.saturated())


def cispo(t: Terms) -> TokenTerms:
    """-A sg(clip(r)) log_prob."""
    ratio = t.log_ratio().exp().detach()
    low, high = 1 - t.config.clip_low, 1 + t.config.clip_high
    loss = -t.advantages * ratio.clamp(low, high) * t.log_probs
    return TokenTerms(loss, t.log_ratio(), (ratio < low) | (ratio > high), t.never(), t.saturated())


def sapo(t: Terms) -> TokenTerms:
    """-A sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A."""
    tau = t.either(t.advantages > 0, t.config.tau_pos, t.config.tau_neg)
    gate = torch.sigmoid(tau * (t.log_ratio().exp() - 1))
    return TokenTerms(-t.advantages * gate * (4 / tau), t.log_ratio(), t.never(), t.never(), t.saturated())


def gspo(t: Terms) -> TokenTerms:
    """The surrogate of s = exp(mean over the rollout of log r), through the tokens' own ratios or through the mean."""
    row = t.row_mean(t.raw) if t.row_log_ratios is None else t.row_log_ratios.to(t.raw.dtype)
    log_ratio = t.rows.spread(row)  # [N] or [B, T]
    if t.config.sequence_gradient == "straight-through":
        own = torch.where(t.log_probs.isfinite(), t.log_probs, 0.0)  # -inf has no gradient, and no difference to itself
        log_ratio = log_ratio.detach() + (own - own.detach())
    saturated = log_ratio > t.config.log_ratio_bound
    ratio = log_ratio.clamp(-80.0, t.config.log_ratio_bound).exp()
    loss, clipped, bounded = surrogate(ratio, t.advantages, t.config)
    return TokenTerms(loss, t.raw, clipped, bounded, saturated)


def vespo(t: Terms) -> TokenTerms:
    """-A sg(phi(w)) log_prob, phi(w) = w^k e^(lambda (1 - w)), w the product over the rollout of r and is_weights."""
    least, most = math.log(1e-8), 20.0
    steps = t.log_ratio().detach()
    if t.is_weights is not None:
        steps = steps + t.is_weights.log().clamp(least, most)
    row = t.rows.sum(torch.where(t.on, steps, 0.0)) if t.row_log_ratios is None else t.row_log_ratios.to(steps.dtype)
    log_w = t.rows.spread(row).clamp(least, most)
    positive = t.advantages >= 0
    k = t.either(positive, t.config.gamma_pos[0], t.config.gamma_neg[0])
    rate = t.either(positive, t.config.gamma_pos[1], t.config.gamma_neg[1])
    phi = (rate + k * log_w - rate * log_w.exp()).exp()
    return TokenTerms(-t.advantages * phi * t.log_probs, t.log_ratio(), t.never(), t.never(), t.saturated())


def gmpo(t: Terms) -> TokenTerms:
    """-mean(A) exp(mean of the clipped log r), at each token of the rollout: with a token mean, one term a rollout."""
    cut = t.raw.clamp(-t.config.clip_low, t.config.clip_high)
    sign = t.advantages.sign()
    lower = sign * t.raw <= sign * cut
    chosen = torch.where(sign == 0, 0.0, torch.where(lower, t.raw, cut))
    bound = t.config.log_ratio_bound
    row = -t.row_mean(t.advantages) * t.row_mean(chosen).clamp(-bound, bound).exp()
    clipped = t.raw != cut
    return TokenTerms(t.rows.spread(row), t.raw, clipped & (sign > 0), clipped & (sign < 0), t.never())


def clip_cov(t: Terms) -> TokenTerms:
    """The surrogate, 0 at the tokens that the covariance picked."""
    term = ppo(t)
    assert t.selected is not None
    return term._replace(loss=torch.where(t.selected, 0.0, term.loss), bounded=t.selected)


def kl_cov(t: Terms) -> TokenTerms:
    """-A r, plus coef |log r| at the tokens that the covariance picked."""
    assert t.selected is not None
    loss = -t.advantages * t.log_ratio().exp() + torch.where(t.selected, t.config.cov_kl_coef * t.raw.abs(), 0.0)
    return TokenTerms(loss, t.log_ratio(), t.never(), t.selected, t.saturated())


def trust_region(t: Terms, divergence: Tensor) -> TokenTerms:
    """-A sg(min(r, cap)) log_prob or -A min(r, cap), 0 where the divergence is beyond the limit."""
    high = (t.raw > 0) & (divergence > t.config.divergence_high)
    low = (t.raw < 0) & (divergence > t.config.divergence_low)
    upwards, downwards = t.advantages > 0, t.advantages <= 0  # neither of NaN, which stays in the loss
    outside = (high & upwards) | (low & downwards)
    if t.config.two_sided:
        outside = (high | low) & (upwards | downwards)
    ratio, capped = t.log_ratio().exp(), t.never()
    if t.config.ratio_cap is not None:
        capped = (ratio > t.config.ratio_cap) & ~outside
        ratio = ratio.clamp(max=t.config.ratio_cap)
    loss = -t.advantages * (ratio if t.config.surrogate == "ratio" else ratio.detach() * t.log_probs)
    return TokenTerms(torch.where(outside, 0.0, loss), t.log_ratio(), outside, capped, t.saturated())


def dppo_tv(t: Terms) -> TokenTerms:
    """The trust region of |p - q|."""
    return trust_region(t, (t.log_probs.detach().exp() - t.old_log_probs.exp()).abs())


def dppo_kl(t: Terms) -> TokenTerms:
    """The trust region of q log(q / p) + (1 - q) log((1 - q) / (1 - p))."""
    log_p, log_q = t.log_probs.detach(), t.old_log_probs
    q = log_q.exp()
    # 1e-8, so that a probability of 1 has a logarithm beside it, is verl's.
    rest_p, rest_q = ((-torch.expm1(x)).clamp(min=0) + 1e-8 for x in (log_p, log_q))
    drawn = torch.where(q == 0, 0.0, q * (log_q - log_p))
    return trust_region(t, drawn + (1 - q) * (rest_q / rest_p).log())


def dro(t: Terms) -> TokenTerms:
    """-(A log_prob - beta / 2 (log r)^2)."""
    loss = -(t.advantages * t.log_probs - t.config.dro_beta / 2 * t.raw.square())
    return TokenTerms(loss, t.log_ratio(), t.never(), t.never(), t.never())


TERMS: dict[str, Callable[[Terms], TokenTerms]] = {
    "reinforce": reinforce,
    "ppo": ppo,
    "cispo": cispo,
    "sapo": sapo,
    "gspo": gspo,
    "vespo": vespo,
    "gmpo": gmpo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
}
