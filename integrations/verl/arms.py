"""Estimators of verl's yaml as arms: for the record of a step, and for what only a trainer can do for an arm."""

from __future__ import annotations

from fastadv.integrations.verl.keys import EstimatorOptions
from fastadv.integrations.verl.metrics import ArmRun
from fastadv.integrations.verl.sessions import SessionBatch
from fastadv.integrations.verl.trainer_keys import TrainerOptions
from fastadv.integrations.verl.trainer_rows import TrainerRows
from torch import Tensor

from fastadv import Arm
from fastadv.arms import Known
from fastadv.outcomes import CAPS


def arm_of(estimator: str, options: EstimatorOptions) -> Arm | None:
    """The arm that an estimator is; None where there is none like it."""
    if estimator == "fastadv_arm":
        return options.arm
    usual = options.shrink_to == "loo" and options.ddof == 1 and options.eps == 1e-6
    if estimator == "fastadv_turn" and usual and options.population == "all":
        return Arm(
            "turn-reached", baseline="turn-reached", kappa=options.kappa, scale=options.scale,
            singleton=options.singleton, description=f"no mask, turn-reached baseline, kappa {options.kappa:g}",
        )  # fmt: skip
    if estimator == "fastadv_survivor" and usual:
        return Arm(
            "survivors", endings=CAPS, population="survivors", scale=options.scale, singleton=options.singleton,
            description="mask what was cut off, survivors vote",
        )  # fmt: skip
    if estimator == "fastadv_rloo":
        return Arm("rloo", singleton="raw", description="verl's rloo")
    if estimator == "fastadv_grpo" and options.norm_adv_by_std_in_grpo:
        return Arm("grpo", baseline="mean", scale="std", singleton="raw", description="verl's grpo")
    if estimator in ("fastadv_grpo", "fastadv_dr_grpo"):
        return Arm("dr_grpo", baseline="mean", singleton="raw", description="verl's grpo without std")
    return None


def arm_run(arm: Arm, rewards: Tensor, rows: TrainerRows, options: TrainerOptions) -> ArmRun:
    """What an arm makes of the sessions of verl's rows.

    Args:
        arm: the arm.
        rewards: `[B]`, of rows, as advantages are made of them.
        rows: their sessions.
        options: the trainer's keys.
    """
    sessions = SessionBatch.of(rewards, rows, options)
    known = Known(train_version=rows.train_version, group_ids=sessions.prompts)
    statistics = arm.freeze(sessions.batch, known=known)
    result = arm.apply(sessions.batch, statistics, known=known)
    return ArmRun(arm, sessions, result, statistics)


def arm_advantages(run: ArmRun) -> Tensor:
    """Advantages `[B, R]` float32 at the sampled tokens, the weights of sessions and of tokens multiplied in."""
    advantages = run.sessions.of_segments(run.result.advantages) * run.sessions.of_rollouts(run.result.weights)
    if run.result.token_weights is None:
        return advantages
    return advantages * run.sessions.at_tokens(run.result.token_weights)
