"""Importance weights, and a mask of rollouts, for what another policy sampled."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastadv.losses import Correction, SequenceMask
from fastadv.rows import Rows

EXP_BOUND = 80.0  # float32's exp is finite up to here


class ImportanceWeights(NamedTuple):
    """Weights, and what happened to them, each shaped like the log-ratios."""

    weight: Tensor
    capped: Tensor  # bool: a bound changed the ratio
    rejected: Tensor  # bool: outside of the bounds, weight 0


def weigh(log_ratio: Tensor, correction: Correction) -> ImportanceWeights:
    """The correction of a ratio, exp(log_ratio), cut, masked or rejected; acceptance is decided before exp."""
    low = math.log(correction.low) if correction.low > 0 else -math.inf
    outside = (log_ratio < low) | (log_ratio > math.log(correction.high))
    never = torch.zeros_like(outside)
    ratio = log_ratio.clamp(-EXP_BOUND, EXP_BOUND).exp()
    if correction.kind == "tis":
        return ImportanceWeights(ratio.clamp(correction.low, correction.high), outside, never)
    inside = ratio if correction.kind == "mis" else torch.where(log_ratio.isnan(), log_ratio, 1.0)
    return ImportanceWeights(torch.where(outside, 0.0, inside), never, outside)


def token_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, correction: Correction | None, missing: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(weight, capped, missing) of each token; without a correction the weight is 1 where the log-prob is there."""
    absent = rollout_log_probs.isnan()
    if correction is None:
        weight, capped = torch.ones_like(old_log_probs), torch.zeros_like(absent)
    else:
        weight, capped, _ = weigh(torch.where(absent, 0.0, old_log_probs - rollout_log_probs), correction)
    return torch.where(absent, 1.0 if missing == "neutral" else 0.0, weight), capped, absent


def left_out(
    log_probs: Tensor, sampled: Tensor, advantages: Tensor, on: Tensor, rows: Rows, mask: SequenceMask
) -> Tensor:
    """Tokens of negative advantage in rollouts that the policy has moved away from, bool, like the log-probs.

    A comparison with NaN is false, so that what is wrong stays in the loss, where it is seen.
    """
    counted = on & ~sampled.isnan() if mask.log_probs == "rollout" else on
    gap = rows.sum(torch.where(counted, sampled - log_probs, 0.0))  # [B]
    far = gap / rows.sum(on.to(gap.dtype)).clamp(min=1) > mask.delta
    signed = torch.where(on, advantages, 0.0)
    if mask.sign == "rollout":
        signed = rows.spread(rows.sum(signed))
    return on & rows.spread(far) & (signed < 0)
