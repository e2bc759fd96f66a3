"""A policy loss from log-probs: policy term, corrections, KL and entropy of tokens, and how they become one number."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastadv.losses import SEQUENCE_LOSSES, LossConfig, SequenceMask
from fastadv.reference.corrections import left_out, token_weights
from fastadv.reference.kl import penalty
from fastadv.reference.policy_terms import TERMS, Terms, TokenTerms
from fastadv.rows import Rows


class TokenInputs(NamedTuple):
    """Inputs of a loss, shaped like the log-probs unless they say `[B]`; None where there is none."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None = None
    is_weights: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    entropy: Tensor | None = None
    selected: Tensor | None = None
    row_log_ratios: Tensor | None = None  # [B]
    row_is_weights: Tensor | None = None  # [B]


class LossSums(NamedTuple):
    """Weighted token losses, shaped like the log-probs, the loss, and sums over the batch, 0-d float64 by name."""

    token_losses: Tensor
    loss: Tensor
    sums: dict[str, Tensor]


def policy_loss(
    inputs: TokenInputs, rows: Rows, config: LossConfig, scale: Tensor | float, row_tokens: Tensor | None
) -> LossSums:
    """Weighted token losses and their sum times `scale`; with `row_tokens [B]` each row is divided by its tokens.

    What lies at a token outside the mask, or with weight 0, is replaced before any arithmetic: selection, not
    multiplication. An importance weight of 0 and a sequence mask reject a token's policy term; KL, entropy and metrics
    still count it.
    """
    on = inputs.mask != 0  # [N] or [B, T]
    weight = on.to(inputs.log_probs.dtype)
    if inputs.weights is not None:
        on = on & (inputs.weights != 0)
        weight = torch.where(on, inputs.weights, 0.0)

    correction, capped, missing = _correction(inputs, on, rows, config)
    accepted = used = on if correction is None else on & (correction != 0)
    sums = {}
    if config.sequence_mask is not None:
        gone = sums["left_out"] = _left_out(inputs, on, rows, config.sequence_mask)
        used = accepted & ~gone

    def terms_where(where: Tensor) -> TokenTerms:
        log_probs, advantages = torch.where(where, inputs.log_probs, 0.0), torch.where(where, inputs.advantages, 0.0)
        old = torch.where(where, inputs.old_log_probs.detach(), 0.0)
        picked = None if inputs.selected is None else inputs.selected & where
        is_weights = None if correction is None else torch.where(where, correction, 1.0)
        return TERMS[config.loss](
            Terms(log_probs, old, advantages, where, is_weights, picked, inputs.row_log_ratios, rows, config)
        )

    # A rollout's ratio belongs to all of its tokens, those that are not used too.
    terms = terms_where(on if config.loss in SEQUENCE_LOSSES else used)
    policy = torch.where(used, terms.loss, 0.0)
    if correction is not None and config.loss != "vespo":  # vespo has them in its rollout's weight
        policy = policy * torch.where(used, correction, 0.0)
    token_losses = policy * weight
    policy_share = token_losses.detach()
    if inputs.ref_log_probs is not None:
        assert config.kl is not None
        log_probs = torch.where(on, inputs.log_probs, 0.0)
        old, ref = (torch.where(on, values.detach(), 0.0) for values in (inputs.old_log_probs, inputs.ref_log_probs))
        kl = torch.where(on, penalty(log_probs, old, ref, config.kl, config.log_ratio_bound), 0.0)
        token_losses = token_losses + config.kl.coef * kl * weight
        sums["kl"] = kl
    if inputs.entropy is not None:
        entropy = torch.where(on, inputs.entropy, 0.0)
        token_losses = token_losses - config.entropy_coef * entropy * weight
        sums["entropy"] = entropy

    # Without a token the sum is 0, whatever it is divided by.
    scale = torch.where(on.any(), scale, 1.0)

    def total(values: Tensor) -> Tensor:
        per_row = rows.sum(values)  # [B]
        if row_tokens is not None:
            per_row = per_row / row_tokens.clamp(min=1)
        return per_row.sum() * scale

    with torch.no_grad():
        seen = terms if used is on else terms_where(on)
        sums |= {
            "clipped": seen.clipped & on,
            "bounded": seen.bounded & on,
            "saturated": seen.saturated & on,
            "negative_log_ratio": torch.where(on, -seen.log_ratio, 0.0),
            "tokens": on,
            "capped": capped & on,
            "missing": missing & on,
            "rejected": on & ~accepted,
            "is_weight": on if correction is None else torch.where(on, correction, 0.0),
        }
        added = {name: values.detach().to(torch.float64).sum() for name, values in sums.items()}
        added["policy"] = torch.as_tensor(total(policy_share)).to(torch.float64)
    return LossSums(token_losses, total(token_losses).to(weight.dtype), added)


def _correction(
    inputs: TokenInputs, on: Tensor, rows: Rows, config: LossConfig
) -> tuple[Tensor | None, Tensor, Tensor]:
    """(importance weight of each token or None, where a bound cut it, where the sampler's log-prob is missing)."""
    never = torch.zeros_like(on)
    parts = []
    capped = missing = never
    if inputs.row_is_weights is not None:
        parts.append(rows.spread(inputs.row_is_weights))
    if inputs.is_weights is not None:
        parts.append(torch.where(on, inputs.is_weights, 1.0))
    if inputs.rollout_log_probs is not None and config.corrections:
        old, rollout = (
            torch.where(on, values.detach(), 0.0) for values in (inputs.old_log_probs, inputs.rollout_log_probs)
        )
        missing_rule = config.corrections[0].missing
        weight, capped, missing = token_weights(old, rollout, config.token_correction, missing_rule)
        parts.append(weight)
    correction = None
    for part in parts:
        correction = part if correction is None else correction * part
    return correction, capped, missing


def _left_out(inputs: TokenInputs, on: Tensor, rows: Rows, mask: SequenceMask) -> Tensor:
    sampled = inputs.old_log_probs if mask.log_probs == "old" else inputs.rollout_log_probs
    assert sampled is not None
    return left_out(inputs.log_probs.detach(), sampled.detach(), inputs.advantages, on, rows, mask)
