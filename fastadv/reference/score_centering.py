"""Score centering (arXiv 2609.20807): off-policy token losses whose mean under the sampler is taken out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastadv.losses import Correction
from fastadv.reference.corrections import weigh

LEAST_TAIL = 1e-6  # of the probability outside of the head


class CentredScores(NamedTuple):
    """What a token's loss is -advantage times, and of what it is made."""

    score: Tensor  # like log_probs
    weight: Tensor  # f(p / q) of the sampled token
    tail: Tensor  # probability that the sampler's head leaves out


def weight(log_ratio: Tensor, correction: Correction | None) -> Tensor:
    """f(p / q) from log p - log q: 1 without a correction, else the ratio cut or masked."""
    return torch.ones_like(log_ratio) if correction is None else weigh(log_ratio, correction).weight


def centred_scores(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    head_log_probs: Tensor,
    rollout_head_log_probs: Tensor,
    correction: Correction | None,
    tail: bool,
) -> CentredScores:
    """sg(f(p_y / q_y)) log p_y - sum over the head of sg(c_v) log p_v.

    c_v = q_v f(p_v / q_v) where the head is all there is. With a tail its expected score is estimated by the head's:
    c_v = q_v f(p_v / q_v) - alpha p_v, alpha = rho f(1 / rho), rho = (1 - sum q) / (1 - sum p) over the head.

    `log_probs`, `rollout_log_probs` of the sampled tokens, any shape; the head's `[..., K]`, where NaN in the sampler's
    marks a place that it left empty.
    """
    there = ~rollout_head_log_probs.isnan()  # [..., K]
    log_p = torch.where(there, head_log_probs, 0.0)
    log_q = torch.where(there, rollout_head_log_probs, 0.0)
    with torch.no_grad():
        p, q = torch.where(there, log_p.exp(), 0.0), torch.where(there, log_q.exp(), 0.0)
        coefficients = q * weight(log_p - log_q, correction)
        left = (1 - q.sum(-1)).clamp(min=LEAST_TAIL)  # [...]
        if tail:
            rho = left / (1 - p.sum(-1)).clamp(min=LEAST_TAIL)
            alpha = rho * weight(-rho.log(), correction)
            coefficients = coefficients - alpha[..., None] * p
        own = weight(log_probs - rollout_log_probs, correction)
    centre = torch.where(coefficients != 0, coefficients * log_p, 0.0).sum(-1)
    return CentredScores(own * log_probs - centre, own, left if tail else torch.zeros_like(left))
