"""The reward hook, `--custom-reward-post-process-path`: from samples to the advantages that the trainer starts from.

Miles and slime call it once a rollout step in the rollout process, with every sample of the batch and before masks are
made, and use what it returns in place of their own group normalisation. For `--advantage-estimator grpo` and `gspo` a
sample's number becomes the advantage of each of its tokens, so that a weight that multiplies it weights the policy
term exactly: clipping and importance sampling are linear in the advantage. Terms without an advantage (KL, entropy)
keep weight 1.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from fastadv.integrations.miles.checks import check_run
from fastadv.integrations.miles.filters import apply_filter
from fastadv.integrations.miles.options import Options
from fastadv.integrations.miles.samples import LOSS_WEIGHT, SampleBatch, check_samples, read_samples
from torch import Tensor

import fastadv as fa
from fastadv import Arm, ArmResult, FrozenStatistics, SegmentTable
from fastadv.arms import Rescue

logger = logging.getLogger(__name__)

TURN_ADVANTAGES = "fastadv_turn_advantages"  # in round_number, beside the sample's own advantage


@dataclass(frozen=True, eq=False)
class Advantages:
    """What the hook made of a batch.

    Attributes:
        rollouts: `[B]` float64, an advantage a rollout; with advantages of turns, the one of its first turn.
        weights: `[B]` float64 that multiply them: the arm's, or the buffer's, times `factor`.
        turns: advantages of (rollout, turn), token weights of turns multiplied in; None: they do not differ by turn.
        removed: `[B]` bool, rollouts whose samples leave the denominators; None: none.
        factor: of the divisor: what stands for groups that a buffer dropped.
        statistics: what an arm was computed from; None: of an estimator.
    """

    rollouts: Tensor  # [B]
    weights: Tensor  # [B]
    turns: SegmentTable | None = None
    removed: Tensor | None = None  # [B]
    factor: float = 1.0
    statistics: FrozenStatistics | None = None

    @property
    def weighted(self) -> Tensor:
        """`[B]` float64, what a rollout's samples are given."""
        return torch.where(self.weights == 0, 0.0, self.rollouts * self.weights)


def reward_post_process(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """`--custom-reward-post-process-path`.

    Args:
        args: the trainer's namespace.
        samples: `[S]` samples of Miles or slime. `remove_sample`, `opd_reverse_kl` and `metadata["round_number"]` of
            them are set where the options ask for it.

    Returns:
        Raw rewards and advantages, `[S]` numbers each. A rollout without a result has advantage 0 and no vote.

    Raises:
        ValueError: options that contradict each other or the trainer's flags, or samples that they cannot be applied
            to; the message names the key or the sample.
    """
    if not samples:
        return [], []
    options = Options.of(args)
    check_run(args, options)
    check_samples(samples)
    apply_filter(options, args, samples)
    batch = read_samples(args, samples, options)
    found = advantages(batch, options)
    if found.statistics is not None:
        logger.info("fastadv: statistics %s", found.statistics.hash[:12])
    if found.removed is not None:
        for sample, gone in zip(samples, _flags(batch, found.removed), strict=True):
            sample.remove_sample = sample.remove_sample or gone
    if options.denominator == "trained":
        found = replace(found, weights=found.weights * _given_back(args, batch))
    if found.turns is None:
        return batch.raw_rewards, batch.at_samples(found.weighted).tolist()
    return batch.raw_rewards, _carry_turns(batch, found, options)


def advantages(batch: SampleBatch, options: Options) -> Advantages:
    """What the run's arm or estimator makes of the rollouts."""
    if options.arm is None:
        return _estimated(batch, options)
    arm, rollouts = options.arm, batch.batch
    statistics = arm.freeze(rollouts, known=batch.known)
    result = arm.apply(rollouts, statistics, known=batch.known)
    _agree(batch, _coin_weights(arm, batch, result))
    weights, removed = result.weights.to(torch.float64), result.removed
    tossed = arm.row_weights is not None and batch.loss_weights is None  # by the arm alone, as in a replay
    factor = _factor(batch, weights if tossed else batch.loss_weights, options.divisor)
    if options.exclusion == "mask" and arm.excludes_any:
        removed = result.excluded if removed is None else removed | result.excluded
    first = result.advantages.segments.offsets[:-1]
    has_turn = result.advantages.segments.offsets.diff() > 0
    values = result.advantages.values.to(torch.float64)
    if result.token_weights is not None:
        values = values * result.token_weights  # the outline has one token a turn
    per_rollout = torch.where(has_turn, torch.cat([values, values.new_zeros(1)])[first], 0.0)
    turns = SegmentTable(values, result.advantages.segments) if arm.level == "turn" else None
    return Advantages(per_rollout, weights * factor, turns, removed, factor, statistics)


def _estimated(batch: SampleBatch, options: Options) -> Advantages:
    assert options.estimator is not None
    rollouts = batch.batch
    needs = fa.ESTIMATORS[options.estimator].needs
    given: dict[str, Any] = {}
    if any("lengths" in need for need in needs):
        given["lengths"] = batch.sampled
    if "turn_ids" in needs:
        given["turn_ids"] = rollouts.segments
    values = fa.estimate(options.estimator, rollouts.rewards, rollouts.groups, **given, **options.options).advantages
    assert isinstance(values, Tensor)
    weights = torch.ones_like(rollouts.rewards) if batch.loss_weights is None else batch.loss_weights
    factor = _factor(batch, batch.loss_weights, options.divisor)
    return Advantages(values.to(torch.float64), weights * factor, factor=factor)


def _coin_weights(arm: Arm, batch: SampleBatch, result: ArmResult) -> Tensor:
    """What the arm's coins about stale groups say, `[B]`; the buffer's own word where the arm excludes a rollout."""
    if not isinstance(arm.row_weights, Rescue):
        return torch.ones_like(batch.batch.rewards)
    gone = arm.excluded(batch.batch, batch.known)
    gone = gone if result.removed is None else gone | result.removed
    said = result.weights if batch.loss_weights is None else batch.loss_weights
    return torch.where(gone, said, result.weights)


def _agree(batch: SampleBatch, weights: Tensor) -> None:
    """The buffer and the arm toss the same coins; if they do not, one of them was told something else."""
    if batch.loss_weights is None:
        return
    differs = (batch.loss_weights - weights).abs() > 1e-6 * weights.abs()
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        raise ValueError(
            f"rollout {row}: the buffer gave it {LOSS_WEIGHT} {float(batch.loss_weights[row]):g}, the arm gives it "
            f"{float(weights[row]):g}; both have to read the same fastadv.arm and fastadv.seed"
        )


def _factor(batch: SampleBatch, weights: Tensor | None, divisor: str) -> float:
    """What the loss, which divides by the rollouts that are here, is multiplied by.

    A buffer that drops groups refills the batch to n groups; T were taken. Dividing by what was kept makes steps larger
    by E[T]/n. (n - 1)/(T - 1) is the unbiased estimate of the share that is kept when one takes until there are n, so
    with it the expected step is that of all candidates.
    """
    if divisor == "kept" or weights is None or not len(weights):
        return 1.0
    if divisor == "hajek":
        total = float(weights.sum())
        return float(weights.shape[0]) / total if total > 0 else 1.0
    groups = len(set(batch.everything.groups))
    if batch.taken is None or batch.taken <= groups:
        return 1.0
    if groups == 1:
        raise ValueError(
            "fastadv.divisor is candidates, and a batch of one group says nothing about how many groups are dropped; "
            "take --rollout-batch-size of 2 or more"
        )
    return (groups - 1) / (batch.taken - 1)


def _given_back(args: Any, batch: SampleBatch) -> float:
    """What the trainer's denominator counts over what is trained on.

    Means over samples are divided by all rollouts, removed ones too; sums over tokens by the tokens of the masks, where
    a removed sample counts as one.
    """
    left = [
        0
        if sample.remove_sample
        else sample.response_length
        if sample.loss_mask is None
        else int(sum(sample.loss_mask))
        for sample in batch.samples
    ]
    if getattr(args, "calculate_per_token_loss", False):
        return sum(max(tokens, 1) for tokens in left) / max(sum(left), 1)
    trained = sum(any(left[row] for row in rows) for rows in batch.everything.members)
    return len(batch.everything.members) / trained if trained else 1.0


def _flags(batch: SampleBatch, rollouts: Tensor) -> list[bool]:
    return [bool(flag) for flag in batch.at_samples(rollouts.to(torch.float64)).tolist()]


def _carry_turns(batch: SampleBatch, found: Advantages, options: Options) -> list[float]:
    """Hands advantages of turns on, by the route that the options name; what each sample is given."""
    assert found.turns is not None
    assert batch.runs is not None
    assert batch.turns is not None
    runs, segments = batch.runs, found.turns.segments
    scaled = found.turns.values * found.weights[segments.row_of_segment()]  # [segments]
    padded = np.append(scaled.numpy(), 0.0)
    rollout = np.repeat(batch.rollout.numpy(), runs.counts)  # [R]
    place = np.where(rollout >= 0, segments.offsets.numpy()[rollout] + batch.turns, -1)
    values: list[float] = padded[place].tolist()  # [R]
    begin, end, offsets = runs.begin.tolist(), runs.end.tolist(), runs.offsets.tolist()
    first = batch.at_samples(found.weighted).tolist()
    for row, (sample, a, b) in enumerate(zip(batch.samples, offsets, offsets[1:], strict=False)):
        if options.turns == "init":
            sample.metadata = {**(sample.metadata or {}), "round_number": {TURN_ADVANTAGES: values[a:b]}}
        elif options.turns == "flags":
            sample.opd_reverse_kl = _spread(begin[a:b], end[a:b], values[a:b], first[row], sample.response_length)
        else:
            if b - a > 1:
                raise ValueError(
                    f"sample {row} has {b - a} turns, and fastadv.turns is samples: each sample is one turn"
                )
            first[row] = values[a] if b > a else 0.0
    return first


def _spread(begin: list[int], end: list[int], values: list[float], base: float, length: int) -> list[float]:
    """What is to be added to `base` at each token, `[R]`: turns' values less the base within runs, 0 outside."""
    result: list[float] = []
    for b, e, value in zip(begin, end, values, strict=True):
        result += [0.0] * (b - len(result))
        result += [value - base] * (e - b)
    return result + [0.0] * (length - len(result))
