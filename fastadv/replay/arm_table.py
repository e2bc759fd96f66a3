"""What each arm does to advantages, a line an arm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastadv.arms import Arm
from fastadv.arms.prompt_sums import PromptSums, subsidy
from fastadv.reference.group_advantages import divided


@dataclass(frozen=True)
class ArmRow:
    """One arm's line in the report. Averages over prompts weight each prompt by its tokens."""

    name: str
    description: str
    kept_rollouts: float  # share
    kept_tokens: float  # share
    variance: float  # of weight * advantage within prompts, over all tokens
    second_moment: float  # mean square of weight * advantage over all tokens
    explained_variance: float  # 1 - mean (R - b)^2 / variance of R within prompts, over kept tokens
    token_factor: float  # what a token-mean over the kept tokens would multiply the step by
    sequence_factor: float  # what a mean over the kept rollouts would multiply the step by
    baseline: float  # realised b: mean over rollouts
    subsidy: float  # implied reward for running into the cap: mean over capped rollouts of b where excluded


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    """The quotient of two sums; NaN where there is nothing to divide by."""
    return float(numerator / denominator) if float(denominator) > 0 else float("nan")


def arm_row(arm: Arm, s: PromptSums) -> ArmRow:
    """One line of the table from an arm's sums."""
    within = s.squares - divided(s.advantage.square(), s.tokens)  # [G]: tokens * variance
    reward_within = s.reward_squares - divided(s.reward.square(), s.kept_tokens)
    return ArmRow(
        name=arm.name,
        description=arm.description,
        kept_rollouts=_ratio(s.kept.sum(), s.rollouts.sum()),
        kept_tokens=_ratio(s.kept_tokens.sum(), s.tokens.sum()),
        variance=_ratio(within.sum(), s.tokens.sum()),
        second_moment=_ratio(s.squares.sum(), s.tokens.sum()),
        explained_variance=1 - _ratio(s.residual.sum(), reward_within.sum()),
        token_factor=_ratio(s.tokens.sum(), s.kept_tokens.sum()),
        sequence_factor=_ratio(s.rollouts.sum(), s.kept.sum()),
        baseline=_ratio(s.baseline.sum(), s.rollouts.sum()),
        subsidy=float(subsidy(arm, s)),
    )
