"""What a soft length penalty meets: how full windows are, and what clipping makes of it on long correct answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv import validation
from fastadv.monitoring.checks import amounts, flag, mean, share, tokens


@dataclass(frozen=True)
class LengthBudget:
    """How rollouts use a window whose last part is the cache, in which a soft penalty rises (docs/outcomes.md).

    Attributes:
        free: share of rollouts that end before the cache.
        in_cache: share that ends in it.
        full: share that fills the window.
        cache_use: of those that end in the cache, the mean share of it that they use; NaN where none does.
        penalised: share of rollouts with a penalty.
        mean_penalty: over all rollouts.
        solved_penalised: share of solved rollouts with one.
        penalty_on_solved: share of the penalties' sum that falls on solved rollouts.
    """

    free: float
    in_cache: float
    full: float
    cache_use: float
    penalised: float
    mean_penalty: float
    solved_penalised: float
    penalty_on_solved: float


def length_budget(
    lengths: Tensor, penalties: Tensor, solved: Tensor, *, max_length: int, cache_length: int
) -> LengthBudget:
    """How full windows are, and whom a length penalty meets.

    Args:
        lengths: `[B]` integers, response tokens.
        penalties: `[B]`, what was added to each reward: 0 or negative.
        solved: `[B]` bool, right answers.
        max_length: the window.
        cache_length: its last part, from whose beginning the penalty rises.

    Returns:
        The LengthBudget.

    Raises:
        ValueError: a cache that is not in the window, a negative length, a positive or infinite penalty, mismatched
            sizes.
        TypeError: lengths that are not integers.
    """
    op = "length_budget"
    lengths = tokens(op, lengths)
    validation.integer(op, "max_length", max_length, least=1, most=2**62)
    validation.integer(op, "cache_length", cache_length, least=1)
    if cache_length > max_length:
        raise ValueError(f"{op}: cache_length is {cache_length}; it must be at most max_length {max_length}")
    penalty = amounts(op, "penalties", penalties, lengths, negative=True)
    if bool((penalty > 0).any()):
        row = int((penalty > 0).nonzero()[0])
        raise ValueError(f"{op}: penalties[{row}] is {float(penalty[row])}; a penalty is 0 or negative")
    flag(op, "solved", solved, lengths)
    start = max_length - cache_length
    cached = (lengths > start) & (lengths < max_length)
    hit = penalty < 0
    return LengthBudget(
        free=mean(lengths <= start),
        in_cache=mean(cached),
        full=mean(lengths >= max_length),
        cache_use=mean((lengths[cached] - start).to(torch.float64) / cache_length),
        penalised=mean(hit),
        mean_penalty=mean(penalty),
        solved_penalised=mean(hit[solved]),
        penalty_on_solved=share(float(penalty[solved].sum()), float(penalty.sum())),
    )


@dataclass(frozen=True)
class PenaltyAndClip:
    """Soft penalty and clip-higher on long correct answers, two by two.

    The push of an answer is its advantage times the share of its tokens that still have a gradient: an upper bound on
    the ratio stops tokens with a positive advantage, and no others.

    Attributes:
        rollouts: number of long correct answers.
        push: mean push without and with the penalty (rows), under the ordinary and the higher bound (columns).
        penalty_effect: what the penalty does to it under the ordinary bound.
        clip_effect: what the higher bound does to it without the penalty.
        interaction: what both do beyond the two: 0 where they do not meet.
        turned: share of these answers whose advantage is positive without the penalty and not with it.
    """

    rollouts: int
    push: tuple[tuple[float, float], tuple[float, float]]
    penalty_effect: float
    clip_effect: float
    interaction: float
    turned: float


def penalty_and_clip(
    lengths: Tensor,
    solved: Tensor,
    advantages: Tensor,
    penalised: Tensor,
    clipped: Tensor,
    clipped_higher: Tensor,
    *,
    longer_than: int,
) -> PenaltyAndClip:
    """The two-by-two of a soft length penalty and a higher upper bound, on long correct answers.

    Args:
        lengths: `[B]` integers, response tokens.
        solved: `[B]` bool, right answers.
        advantages, penalised: `[B]`, advantages of the rewards without and with the penalty.
        clipped, clipped_higher: `[B]` in [0, 1], share of a rollout's tokens whose ratio is above the ordinary and
            above the higher bound, whatever their advantage.
        longer_than: a response of more tokens is long: `max_length - cache_length` of the penalty.

    Returns:
        The PenaltyAndClip; NaN where no long answer is correct.

    Raises:
        ValueError: a share outside of [0, 1], more clipping under the higher bound, a negative length, mismatched
            sizes.
        TypeError: lengths that are not integers, solved that is no bool.
    """
    op = "penalty_and_clip"
    lengths = tokens(op, lengths)
    validation.integer(op, "longer_than", longer_than, most=2**62)
    flag(op, "solved", solved, lengths)
    plain = amounts(op, "advantages", advantages, lengths, negative=True)
    lowered = amounts(op, "penalised", penalised, lengths, negative=True)
    low = amounts(op, "clipped", clipped, lengths)
    high = amounts(op, "clipped_higher", clipped_higher, lengths)
    if bool(((low > 1) | (high > low)).any()):
        row = int(((low > 1) | (high > low)).nonzero()[0])
        raise ValueError(
            f"{op}: row {row} has clipped {float(low[row])} and clipped_higher {float(high[row])}; shares are at most "
            "1, and the higher bound clips no more than the ordinary one"
        )
    long = solved & (lengths > longer_than)

    def push(advantage: Tensor, share_clipped: Tensor) -> float:
        kept = 1 - torch.where(advantage > 0, share_clipped, 0.0)
        return mean((advantage * kept)[long])

    table = (push(plain, low), push(plain, high)), (push(lowered, low), push(lowered, high))
    (neither, clip_only), (penalty_only, both) = table
    return PenaltyAndClip(
        rollouts=int(long.sum()),
        push=table,
        penalty_effect=penalty_only - neither,
        clip_effect=clip_only - neither,
        interaction=both - penalty_only - clip_only + neither,
        turned=mean(((plain > 0) & (lowered <= 0))[long]),
    )
