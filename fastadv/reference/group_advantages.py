"""Reward minus the group's baseline, and the rules that all advantages share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastadv.groups import GroupIndex
from fastadv.reference.moments import GroupMoments


class AdvantageRule(NamedTuple):
    """The options of `fastadv.group_advantages`, validated."""

    baseline: str
    singleton: str
    scale: str
    ddof: float
    eps: float
    eps_form: str


class AdvantageInputs(NamedTuple):
    """Rows and the moments of their groups."""

    rewards: Tensor  # [B] float64
    left_out: Tensor  # [B] float64: the reward that `mean` holds for the row
    votes: Tensor  # [B] float64: the row's votes in `mean`
    include: Tensor | None  # [B] bool: excluded rows get 0
    groups: GroupIndex
    mean: GroupMoments  # of the population that the mean is over
    spread: GroupMoments  # that the scale is over


def divided(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, 0 where the denominator is 0. A NaN in either stays visible."""
    return torch.where(denominator == 0, 0.0, numerator / denominator)


def leave_one_out(inputs: AdvantageInputs) -> Tensor:
    """Mean over the other voters of each row's group, `[B]`, shifted by the group's minimum."""
    index, moments = inputs.groups.index, inputs.mean
    own = torch.where(inputs.votes != 0, inputs.votes * (inputs.left_out - moments.minimum[index]), 0.0)
    return divided(moments.sum[index] - own, moments.weight[index] - inputs.votes)


def group_mean(inputs: AdvantageInputs) -> Tensor:
    """Mean over all voters of each row's group, `[B]`, shifted by the group's minimum."""
    return divided(inputs.mean.sum, inputs.mean.weight)[inputs.groups.index]


def scaled(advantages: Tensor, group: Tensor, spread: GroupMoments, rule: AdvantageRule) -> Tensor:
    """Divides by the standard deviation of each advantage's group; a group whose divisor is 0 has no scale and gives 0
    to every finite advantage."""
    if rule.scale == "none":
        return advantages
    freedom = spread.weight - rule.ddof
    variance = torch.where(freedom <= 0, 0.0, spread.squares / freedom)[group]
    if rule.eps_form == "add":
        divisor = variance.sqrt() + rule.eps
    elif rule.eps_form == "floor":
        divisor = variance.clamp(min=rule.eps).sqrt() + rule.eps
    else:
        divisor = torch.where(variance == 0, 1.0, variance.sqrt() + rule.eps)
    return torch.where(divisor == 0, advantages - advantages, advantages / divisor)


def settle(advantages: Tensor, row: Tensor, inputs: AdvantageInputs, rule: AdvantageRule) -> Tensor:
    """Excluded rows, groups without a voter and groups with exactly one. `row` is the row of each advantage."""
    if rule.baseline != "none" or rule.scale != "none":
        voters = inputs.mean.voters[inputs.groups.index[row]]
        alone = inputs.rewards[row] if rule.singleton == "raw" else torch.zeros_like(advantages)
        advantages = torch.where(voters > 1, advantages, torch.where(voters == 1, alone, 0.0))
    if inputs.include is not None:
        advantages = torch.where(inputs.include[row], advantages, 0.0)
    return advantages


def group_advantages(inputs: AdvantageInputs, rule: AdvantageRule) -> Tensor:
    """Advantages `[B]` in float64."""
    rewards = inputs.rewards - inputs.mean.minimum[inputs.groups.index]
    if rule.baseline == "none":
        advantages = inputs.rewards
    elif rule.baseline == "mean":
        advantages = rewards - group_mean(inputs)
    else:
        advantages = rewards - leave_one_out(inputs)
    advantages = scaled(advantages, inputs.groups.index, inputs.spread, rule)
    return settle(advantages, torch.arange(inputs.groups.num_rows, device=rewards.device), inputs, rule)
