"""Step records for tests: a plain one, and runs whose numbers are functions of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fastadv as fa
from fastadv.arms.text import arm_settings
from fastadv.record import ByOutcome, Counts, Spread, StepRecord

ARMS = {arm.name: arm for arm in fa.arms.question_one_arms()}


def record(step: int = 0, arm: str = "a", **changes: Any) -> StepRecord:
    plain = StepRecord(
        step=step, arm=arm, arm_settings=arm_settings(ARMS[arm]), run="", versions={"fastadv": "0"},
        statistics_hash="f" * 64, coin_seed=None, prompts=4, mixed_prompts=3, rollouts=16, tokens=100,
        response_tokens=150, census=Counts(8, 4, 4, 0), success_rate=0.5, submitted_failure_rate=0.25,
        cap_hit_rate=0.25, reward=0.5, response_length=ByOutcome(9.0, 8.0, 9.0, 12.0),
        turns=ByOutcome(3.0, 2.0, 4.0, 5.0), b=0.5, b_by_prompt=Spread(4, 0.5, 0.1, 0.4, 0.5, 0.6), b_over_sigma=1.0,
        b_over_sigma_by_prompt=Spread(3, 1.0, 0.1, 0.9, 1.0, 1.1), subsidy=0.5, advantage_variance=0.2,
        advantage_square=0.2, reference_variance=0.3, reference_square=0.3, excluded_rate=0.25,
        excluded_token_rate=0.5,
    )  # fmt: skip
    return replace(plain, **changes)


def run(steps: int, arm: str = "a", **numbers: Callable[[int], Any]) -> list[StepRecord]:
    """A record a step; fields given as functions of the step."""
    return [record(step, arm, **{name: number(step) for name, number in numbers.items()}) for step in range(steps)]
