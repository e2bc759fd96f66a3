"""Token losses from log-probs, and how they become one number."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastadv.losses import LossConfig
from fastadv.rows import Rows


class TokenTerms(NamedTuple):
    """Per-token loss and the rules that produced it, each shaped like the log-probs."""

    loss: Tensor
    log_ratio: Tensor  # log_prob - old_log_prob, cut at the bound
    clipped: Tensor  # bool: the clipped surrogate was the larger one
    bounded: Tensor  # bool: the dual clip bounded the loss
    saturated: Tensor  # bool: |log_prob - old_log_prob| beyond the bound


class TokenInputs(NamedTuple):
    """Per-token inputs of a loss, each shaped like the log-probs."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None
    is_weights: Tensor | None


class LossSums(NamedTuple):
    """Weighted token losses, shaped like the log-probs, and sums over a batch, 0-d."""

    token_losses: Tensor
    loss: Tensor
    clipped: Tensor  # from here on float64, without gradient
    bounded: Tensor
    saturated: Tensor
    negative_log_ratio: Tensor
    tokens: Tensor


def ppo_terms(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: LossConfig) -> TokenTerms:
    """max(-A r, -A clip(r)), at most -c A where A < 0; r = exp(log_prob - old_log_prob)."""
    raw = log_probs - old_log_probs
    log_ratio = raw.clamp(-config.log_ratio_bound, config.log_ratio_bound)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    cut = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    clipped = cut > plain
    loss = torch.where(clipped, cut, plain)
    bounded = torch.zeros_like(clipped)
    if config.dual_clip is not None:
        most = -advantages * config.dual_clip
        bounded = (advantages < 0) & (most < loss)
        loss = torch.where(bounded, most, loss)
    return TokenTerms(loss, log_ratio, clipped, bounded, raw.abs() > config.log_ratio_bound)


def reinforce_terms(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: LossConfig) -> TokenTerms:
    """-A log_prob."""
    log_ratio = (log_probs - old_log_probs).clamp(-config.log_ratio_bound, config.log_ratio_bound)
    never = torch.zeros_like(log_probs, dtype=torch.bool)
    return TokenTerms(-advantages * log_probs, log_ratio, never, never, never)


TERMS = {"ppo": ppo_terms, "reinforce": reinforce_terms}


def policy_loss(
    inputs: TokenInputs, rows: Rows, config: LossConfig, scale: Tensor | float, row_tokens: Tensor | None
) -> LossSums:
    """Weighted token losses and their sum times `scale`; with `row_tokens [B]` each row is divided by its tokens.

    What lies at a token outside the mask, or with weight 0, is replaced before any arithmetic: selection, not
    multiplication.
    """
    on = inputs.mask != 0  # [N] or [B, T]
    weight = on.to(inputs.log_probs.dtype)
    if inputs.weights is not None:
        on = on & (inputs.weights != 0)
        weight = torch.where(on, inputs.weights, 0.0)
    used = on
    if inputs.is_weights is not None:  # an importance weight of 0 rejects the token; metrics still count it
        used = on & (inputs.is_weights != 0)
        weight = weight * torch.where(used, inputs.is_weights, 0.0)

    def terms_where(selected: Tensor) -> TokenTerms:
        log_probs, old_log_probs, advantages = (
            torch.where(selected, values, 0.0)
            for values in (inputs.log_probs, inputs.old_log_probs.detach(), inputs.advantages)
        )
        return TERMS[config.loss](log_probs, old_log_probs, advantages, config)

    terms = terms_where(used)
    token_losses = torch.where(used, terms.loss * weight, 0.0)
    per_row = rows.sum(token_losses)  # [B]
    if row_tokens is not None:
        per_row = per_row / row_tokens.clamp(min=1)

    with torch.no_grad():
        seen = terms if inputs.is_weights is None else terms_where(on)
        counts = [(flag & on).sum().to(torch.float64) for flag in (seen.clipped, seen.bounded, seen.saturated, on)]
        negative_log_ratio = -seen.log_ratio.sum().to(torch.float64)
    loss = (per_row.sum() * scale).to(weight.dtype)
    return LossSums(token_losses, loss, counts[0], counts[1], counts[2], negative_log_ratio, counts[3])
