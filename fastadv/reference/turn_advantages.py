"""Reward minus a baseline conditioned on the turn reached (docs/theory.md, equation 13):

    b[i, l] = target_i + lam * (bucket - target_i)
    bucket  = mean of R_j over voters j != i that reached turn l;   n = how many these are;   lam = n / (n + kappa)
    target  = mean of R_j over voters j != i

That rollout i reached turn l is known before the tokens of turn l are sampled, and neither mean contains R_i: the
baseline is independent of the actions it is subtracted for, so the gradient stays unbiased for every kappa.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv.reference.group_advantages import AdvantageInputs, AdvantageRule, group_mean, leave_one_out, scaled, settle
from fastadv.reference.moments import TurnMoments


def turn_advantages(
    inputs: AdvantageInputs,
    rule: AdvantageRule,
    table: TurnMoments,
    segment_offsets: Tensor,
    segments: int,
    kappa: float,
    shrink_to: str,
) -> Tensor:
    """Advantages `[S]` in float64, one a segment."""
    counts = segment_offsets.diff()
    row = torch.repeat_interleave(
        torch.arange(counts.shape[0], device=counts.device), counts, output_size=segments
    )  # [S]
    turn = torch.arange(segments, device=counts.device) - segment_offsets[row]
    group = inputs.groups.index[row]
    slot = table.offsets[group] + turn  # [S]

    minimum = inputs.mean.minimum[inputs.groups.index]  # [B]
    target = (leave_one_out(inputs) if shrink_to == "loo" else group_mean(inputs))[row]
    own = torch.where(inputs.votes != 0, inputs.votes * (inputs.left_out - minimum), 0.0)  # [B]
    n = table.votes[slot] - inputs.votes[row]
    lam, bucket = n / (n + kappa), (table.rewards[slot] - own[row]) / n
    baseline = torch.where(n <= 0, target, target + lam * (bucket - target))

    advantages = scaled((inputs.rewards - minimum)[row] - baseline, group, inputs.spread, rule)
    return settle(advantages, row, inputs, rule)
