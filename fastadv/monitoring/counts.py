"""Counts of a batch, and its turns by outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv import validation
from fastadv.batch import Batch
from fastadv.monitoring.checks import flag, mean, share
from fastadv.outcomes import Outcome, outcome_tensor

MOST_TURNS = 2**24  # a table has a row for each number of turns up to the most


@dataclass(frozen=True)
class RolloutCounts:
    """What one batch counts up to, named as in a step record; rates are shares of all its rollouts.

    Attributes:
        rollouts: their number.
        success_rate: share that is solved.
        submitted_failure_rate: share that submitted and was wrong.
        cap_hit_rate: share that a cap cut off, solved or not.
        solved_at_cap_rate: share that a cap cut off and that passed.
        no_result_rate: share of INFRA.
        response_length, solved_length, unsolved_length: mean response tokens, of all, and of those with a result.
        turns: mean turns.
        excluded_rate: share of rollouts that are excluded from the loss.
        excluded_token_rate: share of sampled tokens that are.
    """

    rollouts: int
    success_rate: float
    submitted_failure_rate: float
    cap_hit_rate: float
    solved_at_cap_rate: float
    no_result_rate: float
    response_length: float
    solved_length: float
    unsolved_length: float
    turns: float
    excluded_rate: float
    excluded_token_rate: float


def rollout_counts(batch: Batch, excluded: Tensor | None = None) -> RolloutCounts:
    """Counts a batch in one pass: success, failures, caps, lengths, turns, and what a mask takes out.

    Args:
        batch: the rollouts.
        excluded: `[B]` bool, rollouts that leave the loss (`ArmResult.excluded`); None: none.

    Returns:
        The RolloutCounts.

    Raises:
        ValueError, TypeError: no Batch, excluded of another shape or dtype.
    """
    if not isinstance(batch, Batch):
        raise TypeError(f"rollout_counts: batch is a {type(batch).__name__}; pass a Batch")
    outcomes, n = batch.outcomes, batch.num_rollouts
    out = torch.zeros_like(batch.capped) if excluded is None else flag("rollout_counts", "excluded", excluded, outcomes)
    solved = outcomes == Outcome.SOLVED
    unsolved = (outcomes == Outcome.FAILED) | (outcomes == Outcome.BUDGET)
    sampled = batch.rows.sum(batch.mask.to(torch.int64))  # [B]
    return RolloutCounts(
        rollouts=n,
        success_rate=mean(solved),
        submitted_failure_rate=mean(outcomes == Outcome.FAILED),
        cap_hit_rate=mean(batch.capped),
        solved_at_cap_rate=mean(batch.capped & solved),
        no_result_rate=mean(outcomes == Outcome.INFRA),
        response_length=mean(batch.lengths),
        solved_length=mean(batch.lengths[solved]),
        unsolved_length=mean(batch.lengths[unsolved]),
        turns=mean(batch.segments.turns()),
        excluded_rate=mean(out),
        excluded_token_rate=share(int(sampled[out].sum()), int(sampled.sum())),
    )


def turns_by_outcome(turns: Tensor, outcomes: Tensor) -> dict[Outcome, Tensor]:
    """How many rollouts of each outcome took how many turns: `[L + 1]` counts from 0 turns, L the most of the outcome.

    Args:
        turns: `[B]` integers, turns of each rollout.
        outcomes: `[B]`, see Outcome.

    Returns:
        A table for each Outcome, `[L + 1]` int64 with the number of rollouts at the index of their turns.

    Raises:
        ValueError, TypeError: a negative number of turns or one that no rollout has, a value that is no outcome.
    """
    op = "turns_by_outcome"
    values = outcome_tensor(outcomes, op=op)
    validation.tensor(op, "turns", turns, shape=tuple(values.shape), dtypes=validation.INTEGERS, device=values.device)
    turns = turns.to(torch.int64)
    bad = (turns < 0) | (turns > MOST_TURNS)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(f"{op}: turns[{row}] is {int(turns[row])}; it must be from 0 to {MOST_TURNS}")
    return {outcome: torch.bincount(turns[values == outcome]) for outcome in Outcome}


@dataclass(frozen=True)
class TurnSummary:
    """Turns of one kind of rollout.

    Attributes:
        rollouts: their number.
        mean: of their turns.
        quantiles: by level, the least number of turns that this share of them does not exceed.
    """

    rollouts: int
    mean: float
    quantiles: dict[float, float]


@dataclass(frozen=True)
class TurnSeparation:
    """Do rollouts succeed fast and fail slowly?

    Attributes:
        by_outcome: turns of each outcome.
        solved, unsolved: turns of the solved rollouts, and of those that failed or ran into a cap.
        mean_difference: mean turns of the unsolved minus those of the solved.
        solved_first: chance that a random solved rollout has fewer turns than a random unsolved one, ties counted half:
            1/2 where turns tell nothing, 1 where every success is shorter than every failure.
    """

    by_outcome: dict[Outcome, TurnSummary]
    solved: TurnSummary
    unsolved: TurnSummary
    mean_difference: float
    solved_first: float


def turn_separation(
    histograms: Mapping[Outcome, Tensor], levels: Sequence[float] = (0.1, 0.25, 0.5, 0.75, 0.9)
) -> TurnSeparation:
    """The distribution of turns by outcome, and how well it separates successes from failures.

    Args:
        histograms: of `turns_by_outcome`, or the sum of several; a table for each Outcome.
        levels: of the quantiles, in (0, 1].

    Returns:
        The TurnSeparation.

    Raises:
        ValueError, TypeError: a level outside of (0, 1], an outcome without a table, a table that is not of counts.
    """
    op = "turn_separation"
    if isinstance(levels, str) or not isinstance(levels, Sequence):
        raise TypeError(f"{op}: levels is a {type(levels).__name__}; pass a list")
    for level in levels:
        if isinstance(level, bool) or not isinstance(level, (int, float)) or not 0 < level <= 1:
            raise ValueError(f"{op}: levels holds {level!r}; a level is above 0 and at most 1")
    if not isinstance(histograms, Mapping) or set(histograms) != set(Outcome):
        raise ValueError(f"{op}: histograms is {histograms!r}; pass a table for each of the four outcomes")
    for outcome, table in histograms.items():
        name = f"histograms[{outcome!r}]"
        validation.tensor(op, name, table, dtypes=validation.INTEGERS)
        if table.dim() != 1 or bool((table < 0).any()):
            raise ValueError(f"{op}: {name} is {table.tolist()}; it must be [L + 1] counts, none negative")
    longest = max(h.shape[0] for h in histograms.values())
    padded = {o: torch.nn.functional.pad(h.to(torch.int64), (0, longest - h.shape[0])) for o, h in histograms.items()}
    solved = padded[Outcome.SOLVED]
    unsolved = padded[Outcome.FAILED] + padded[Outcome.BUDGET]
    later = unsolved.sum() - unsolved.cumsum(0)  # [L]: unsolved rollouts with more turns
    wins = float((solved * (later + unsolved.to(torch.float64) / 2)).sum())
    fast, slow = _summary(solved, levels), _summary(unsolved, levels)
    return TurnSeparation(
        by_outcome={o: _summary(h, levels) for o, h in padded.items()},
        solved=fast,
        unsolved=slow,
        mean_difference=slow.mean - fast.mean,
        solved_first=share(wins, float(solved.sum()) * float(unsolved.sum())),
    )


def _summary(histogram: Tensor, levels: Sequence[float]) -> TurnSummary:
    total, up_to = int(histogram.sum()), histogram.cumsum(0)
    turns = torch.arange(histogram.shape[0], device=histogram.device)
    # The least count that a share of at least `level` does not exceed; a hair less, for the rounding of level * total.
    least = {q: float((up_to >= q * total * (1 - 1e-12)).int().argmax()) if total else math.nan for q in levels}
    return TurnSummary(total, share(float((turns * histogram).sum()), total), least)
