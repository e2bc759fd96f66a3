"""What an arm does to advantages, prompt by prompt, without a model: sums that add up over dumps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv.arms.arm import Arm, ArmResult
from fastadv.arms.baselines import baselines, rollout_means, segment_sums
from fastadv.batch import Batch
from fastadv.outcomes import Outcome
from fastadv.statistics import FrozenStatistics


@dataclass(frozen=True, eq=False)
class PromptSums:
    """Sums over the tokens that the model sampled, for one arm, by prompt. Each `[G]` float64; they add over dumps."""

    tokens: Tensor  # tokens of all rollouts
    kept_tokens: Tensor  # of rollouts that are not excluded
    advantage: Tensor  # sum of weight * advantage over tokens
    squares: Tensor  # sum of (weight * advantage)^2 over tokens
    residual: Tensor  # sum of (reward - baseline)^2 over kept tokens
    reward: Tensor  # sum of the reward over kept tokens
    reward_squares: Tensor  # sum of its square over kept tokens
    rollouts: Tensor  # rollouts
    kept: Tensor  # rollouts that are not excluded
    capped: Tensor  # rollouts that ran into the cap
    baseline: Tensor  # sum over rollouts of their baseline, averaged over their tokens
    subsidy: Tensor  # sum over excluded rollouts of their baseline: what exclusion pays instead of R - b = -b

    def __add__(self, other: PromptSums) -> PromptSums:
        return PromptSums(**{name: torch.cat([value, getattr(other, name)]) for name, value in vars(self).items()})


def prompt_sums(
    arm: Arm, result: ArmResult, batch: Batch, statistics: FrozenStatistics, tokens: Tensor | None = None
) -> PromptSums:
    """The sums of one arm over one batch. `tokens`, like its mask: how many sampled tokens each of an outline's tokens
    stands for, which the arm must treat alike; None: one."""
    groups, index = batch.groups, result.advantages.segments
    factors = torch.ones_like(batch.mask) if result.token_weights is None else result.token_weights
    each = torch.ones_like(batch.mask) if tokens is None else tokens

    def over_segment(per_token: Tensor) -> Tensor:
        return segment_sums(batch, index, per_token * each)

    row = index.row_of_segment()
    kept = (~result.excluded).to(torch.float64)
    weighted = result.advantages.values.to(torch.float64) * result.weights.to(torch.float64)[row]
    baseline = baselines(arm, batch, statistics)

    def by_prompt(per_rollout: Tensor) -> Tensor:
        return per_rollout.new_zeros(groups.num_groups).index_add(0, groups.index, per_rollout)

    def by_row(per_segment: Tensor) -> Tensor:
        return by_prompt(per_segment.new_zeros(batch.num_rollouts).index_add(0, row, per_segment))

    kept_tokens = kept[row] * over_segment(factors != 0)  # [S]
    row_baseline = rollout_means(batch, index, baseline, tokens)
    rewards = batch.rewards[row]
    return PromptSums(
        tokens=by_row(over_segment(torch.ones_like(batch.mask))),
        kept_tokens=by_row(kept_tokens),
        advantage=by_row(weighted * over_segment(factors)),
        squares=by_row(weighted.square() * over_segment(factors.to(torch.float64).square())),
        residual=by_row(kept_tokens * (rewards - baseline).square()),
        reward=by_row(kept_tokens * rewards),
        reward_squares=by_row(kept_tokens * rewards.square()),
        rollouts=by_prompt(torch.ones_like(kept)),
        kept=by_prompt(kept),
        capped=by_prompt((batch.outcomes == Outcome.BUDGET).to(torch.float64)),
        baseline=by_prompt(row_baseline),
        subsidy=by_prompt((batch.outcomes == Outcome.BUDGET) * (1 - result.weights.to(torch.float64)) * row_baseline),
    )


def subsidy(arm: Arm, s: PromptSums) -> Tensor:
    """What running into the cap is paid, 0-d: the mean over capped rollouts. Where there are none, an arm that masks
    nothing by outcome pays 0 all the same, and of another nobody can tell: NaN."""
    capped = s.capped.sum()
    return torch.where(capped > 0, s.subsidy.sum() / capped, math.nan if arm.mask_kind == "outcome" else 0.0)
