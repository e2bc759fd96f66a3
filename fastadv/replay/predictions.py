"""Predictions that logged rollouts decide: one function each, with its threshold, interval and verdict.

P1 is the two-outcome identity (docs/theory.md, 7), P7 what the turn-reached baseline removes (docs/theory.md, 14). What
logged rollouts say of P2, P4 and P5 is in predictions_rollouts.py, what training runs say of P3 to P6 in
predictions_runs.py.
Claims and thresholds were written down before any rollouts were looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fastadv.arms import CAPPED, Arm, freeze
from fastadv.arms.prompt_sums import PromptSums
from fastadv.batch import Batch
from fastadv.gradproj.projections import DRAWS
from fastadv.gradproj.scopes import Weighted
from fastadv.gradproj.statistics import all_and, bootstrapped, resamples
from fastadv.outcomes import Outcome
from fastadv.replay.errors import counted
from fastadv.replay.gradients import policy_gradients
from fastadv.replay.policy import Policy
from fastadv.replay.verdicts import FALSIFIED, NO_DATA, SUPPORTED, UNDECIDED, Prediction
from fastadv.segment_table import SegmentTable

P7_SUPPORTED, P7_FALSIFIED = 0.20, 0.10


def p7_variance_drop(
    reference: PromptSums, turn_reached: PromptSums, *, draws: int = DRAWS, seed: int = 0
) -> Prediction:
    """P7, offline: the turn-reached baseline cuts the per-token variance of advantages by at least 20 %.

    The statistic is 1 - E[A_e^2] / E[A_a^2] over tokens, both arms leave-one-out: within prompts and at the group size
    that the rollouts have. The population's Var(E[R | turn]) / Var(R) would promise more than a finite group can keep.

    Args:
        reference: sums of the arm without mask and with the leave-one-out baseline.
        turn_reached: sums of the arm with the turn-reached baseline.
        draws: bootstrap resamples of prompts.
        seed: of the bootstrap.
    """
    threshold = f"supported from {P7_SUPPORTED:.0%}, falsified below {P7_FALSIFIED:.0%}"
    claim = "the turn-reached baseline cuts the mean square advantage per token by at least 20 % against leave-one-out"
    a, e = reference.squares, turn_reached.squares  # [G]
    if not float(a.sum()) > 0:
        detail = "no group has a spread of rewards: there is no variance to cut"
        return Prediction("P7", claim, {}, threshold, None, NO_DATA, detail)
    counts = all_and(resamples(a.shape[0], draws, seed))  # [1 + D, G]
    drop, low, high = bootstrapped(1 - counts @ e / (counts @ a))
    verdict = SUPPORTED if drop >= P7_SUPPORTED else FALSIFIED if drop < P7_FALSIFIED else UNDECIDED
    clear = low >= P7_SUPPORTED if verdict == SUPPORTED else high < P7_FALSIFIED if verdict == FALSIFIED else False
    if math.isnan(low):
        detail = "there are too few prompts for an interval"
    elif clear:
        detail = "the whole interval is on that side of its threshold"
    else:
        detail = "the interval reaches over the threshold: more prompts would help"
    name, interval = "variance drop", None if math.isnan(low) else (low, high)
    intervals = {} if interval is None else {name: interval}
    return Prediction("P7", claim, {name: drop}, threshold, interval, verdict, detail, intervals)


# ---- P1 --------------------------------------------------------------------------------------------------------------

P1_GRADIENTS = 6  # that its identities are about
P1_TOLERANCE = 1e-4  # rounding of a float32 backward pass; transformers' norms are float32 in any precision

P1_IDENTITIES = {
    "masked, mean baseline": "equals (1 - r) x the un-baselined reference; r is the prompt's mean reward",
    "masked, leave-one-out": "equals G / (G - 1) x (1 - r) x the un-baselined reference",
    "survivors": "is zero with singleton 'zero'",
    "residual": "masked - (1 - r) x the baselined reference equals r (1 - r) x mean score",
}


def two_outcome_prompts(batch: Batch, limit: int) -> list[Batch]:
    """Up to `limit` prompts, each with its solved and its capped rollouts only, rewards 1 and 0."""
    prompts: list[Batch] = []
    solved, capped = batch.outcomes == Outcome.SOLVED, batch.outcomes == Outcome.BUDGET
    for group in range(batch.groups.num_groups):
        here = batch.groups.index == group
        if len(prompts) == limit:
            break
        if bool((here & solved).any()) and bool((here & capped).any()):
            part = batch.select(here & (solved | capped))
            rewards = (part.outcomes == Outcome.SOLVED).to(torch.float64)
            prompts.append(replace(part, rewards=rewards))
    return prompts


def p1_residuals(policy: Policy, prompt: Batch, *, max_tokens: int) -> dict[str, float]:
    """How far a two-outcome prompt's gradients are from each identity, relative to the un-baselined reference.

    Empty where that reference is 0: there is nothing to be relative to.
    """
    statistics = freeze(prompt)

    def weighted(arm: Arm) -> Weighted:
        result = arm.apply(prompt, statistics)
        return Weighted(result.advantages, result.weights)

    arms = (
        weighted(Arm("un-baselined", baseline="none")),
        weighted(Arm("baselined", baseline="mean")),
        weighted(Arm("masked, mean", CAPPED, baseline="mean")),
        weighted(Arm("masked, loo", CAPPED, baseline="loo")),
        weighted(Arm("survivors", CAPPED, baseline="mean", population="survivors")),
        Weighted(SegmentTable(torch.ones(prompt.segments.count), prompt.segments), torch.ones(prompt.num_rollouts)),
    )
    plain, baselined, masked, masked_loo, survivors, scores = (
        policy_gradients(policy, prompt, arms, max_tokens=max_tokens) / prompt.num_rollouts
    )
    if not bool(plain.any()):
        return {}
    size, r = prompt.num_rollouts, float(prompt.rewards.mean())
    errors: dict[str, Tensor] = {
        "masked, mean baseline": masked - (1 - r) * plain,
        "masked, leave-one-out": masked_loo - size / (size - 1) * (1 - r) * plain,
        "survivors": survivors,
        "residual": masked - (1 - r) * baselined - r * (1 - r) * scores,
    }
    return {name: float(error.norm() / plain.norm()) for name, error in errors.items()}


def p1_two_outcomes(
    policy: Policy,
    prompts: list[Batch],
    *,
    max_tokens: int,
    max_memory: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Prediction:
    """P1: on two outcomes the masked gradient is (1 - mean reward) times the un-baselined reference, by prompt.

    It is a check of the pipeline, not a finding: the algebra is exact on any sample in which whatever is not solved ran
    into the cap, so it is made on the solved and the capped rollouts of each prompt. The identities hold to rounding or
    a statistic is not frozen.
    """
    claim = (
        "a self-check, not a finding: over a prompt's solved and capped rollouts alone, the masked gradient is "
        "(1 - mean reward) x the un-baselined one, and the survivor baseline gives zero"
    )
    threshold = f"largest relative residual below {P1_TOLERANCE:g}"
    if policy.parameters[0].element_size() < torch.float32.itemsize:
        detail = "it is to rounding of float32, and the policy has less: --dtype float32"
        return Prediction("P1", claim, {}, threshold, None, NO_DATA, detail)
    if not prompts:
        detail = "no prompt has both a solved and a capped rollout"
        return Prediction("P1", claim, {}, threshold, None, NO_DATA, detail)
    needed = 8 * P1_GRADIENTS * policy.size
    if max_memory is not None and needed > max_memory:
        detail = f"its {P1_GRADIENTS} flat gradients take {needed / 2**30:.1f} GiB, more than --max-memory"
        return Prediction("P1", claim, {}, threshold, None, NO_DATA, detail)
    measured = []
    for number, prompt in enumerate(prompts):
        residuals = p1_residuals(policy, prompt, max_tokens=max_tokens)
        measured += [residuals] if residuals else []
        progress(number + 1)
    if not measured:
        detail = "the un-baselined reference gradient of every prompt with both outcomes is zero"
        return Prediction("P1", claim, {}, threshold, None, NO_DATA, detail)
    # By torch, which keeps a NaN where Python's max may drop it.
    worst = {name: float(torch.tensor([m[name] for m in measured]).max()) for name in P1_IDENTITIES}
    verdict = SUPPORTED if all(residual < P1_TOLERANCE for residual in worst.values()) else FALSIFIED
    detail = f"largest residuals over {counted(len(measured), 'prompt')}, relative to the un-baselined gradient"
    return Prediction("P1", claim, worst, threshold, None, verdict, detail)
