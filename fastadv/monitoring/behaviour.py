"""What rollouts do and cost, by outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv.intervals import Interval, difference, odds_ratio
from fastadv.monitoring.checks import amounts, flag, mean, share
from fastadv.outcomes import Outcome, outcome_tensor
from fastadv.statistics import check_rows

UNSOLVED = (Outcome.FAILED, Outcome.BUDGET)  # with a result


@dataclass(frozen=True)
class Behaviour:
    """A behaviour, such as running the tests before submitting, and what became of the rollouts with it.

    Attributes:
        by_outcome: by Outcome, the numbers of rollouts without and with it.
        share: of all rollouts that show it.
        solved_share, unsolved_share: of the solved rollouts, and of the failed and capped ones.
        success_with, success_without: success rates of the rollouts with a result.
        difference: the first of these minus the second, with Newcombe's interval.
        odds_ratio: odds of success with it over those without, with Woolf's interval and half a count in each cell.
    """

    by_outcome: dict[Outcome, tuple[int, int]]
    share: float
    solved_share: float
    unsolved_share: float
    success_with: float
    success_without: float
    difference: Interval
    odds_ratio: Interval


def behaviour(shown: Tensor, outcomes: Tensor) -> Behaviour:
    """Cross-tabulates a yes or no of each rollout with its outcome. It does not say that one is the other's cause.

    Args:
        shown: `[B]` bool, rollouts that show the behaviour.
        outcomes: `[B]`, see Outcome. INFRA rollouts are counted, and left out of success rates.

    Returns:
        The Behaviour.

    Raises:
        ValueError, TypeError: a value that is no outcome, shown of another shape or dtype.
    """
    values = outcome_tensor(outcomes, op="behaviour")
    shown = flag("behaviour", "shown", shown, values)
    cells = torch.bincount(values * 2 + shown, minlength=8).view(4, 2).tolist()
    table = {outcome: (cells[outcome][0], cells[outcome][1]) for outcome in Outcome}
    solved = table[Outcome.SOLVED]
    unsolved = tuple(sum(table[o][i] for o in UNSOLVED) for i in (0, 1))
    hits, totals = (solved[1], solved[0]), (solved[1] + unsolved[1], solved[0] + unsolved[0])
    return Behaviour(
        by_outcome=table,
        share=mean(shown),
        solved_share=share(solved[1], sum(solved)),
        unsolved_share=share(unsolved[1], sum(unsolved)),
        success_with=share(hits[0], totals[0]),
        success_without=share(hits[1], totals[1]),
        difference=difference(hits, totals),
        odds_ratio=odds_ratio(hits, totals),
    )


@dataclass(frozen=True)
class Costs:
    """Seconds, or any other cost, of a batch's rollouts.

    Attributes:
        total: of all of them.
        by_outcome: sums by Outcome.
        mean_by_outcome: means by Outcome.
        kept, dropped: sums over the rollouts that are trained on, and over those that are not.
        dropped_share: of the total.
        per_solved: the total over the number of solved rollouts; infinite where none is.
        per_reward: the total over the sum of the rewards that were trained on; infinite where that is not positive; NaN
            if rewards were not given.
    """

    total: float
    by_outcome: dict[Outcome, float]
    mean_by_outcome: dict[Outcome, float]
    kept: float
    dropped: float
    dropped_share: float
    per_solved: float
    per_reward: float


def costs(cost: Tensor, outcomes: Tensor, *, kept: Tensor | None = None, rewards: Tensor | None = None) -> Costs:
    """What rollouts cost, by outcome and by whether they are trained on.

    Args:
        cost: `[B]` seconds of wall-clock or sandbox time, or money; not negative.
        outcomes: `[B]`, see Outcome.
        kept: `[B]` bool, rollouts that are trained on; None: all.
        rewards: `[B]`, what was gained; NaN, no result, counts as 0.

    Returns:
        The Costs.

    Raises:
        ValueError, TypeError: a negative or infinite cost, an infinite reward, a value that is no outcome, mismatched
            sizes.
    """
    op = "costs"
    values = outcome_tensor(outcomes, op=op)
    spent = amounts(op, "cost", cost, values)
    keep = torch.ones_like(values, dtype=torch.bool) if kept is None else flag(op, "kept", kept, values)
    total, solved = float(spent.sum()), int((values == Outcome.SOLVED).sum())
    gained = math.nan
    if rewards is not None:
        check_rows(op, "rewards", rewards, values.shape[0], values.device)
        each = amounts(op, "rewards", torch.where(rewards.isnan(), 0, rewards), values, negative=True)
        gained = float(each[keep].sum())
    return Costs(
        total=total,
        by_outcome={o: float(spent[values == o].sum()) for o in Outcome},
        mean_by_outcome={o: mean(spent[values == o]) for o in Outcome},
        kept=float(spent[keep].sum()),
        dropped=float(spent[~keep].sum()),
        dropped_share=share(float(spent[~keep].sum()), total),
        per_solved=total / solved if solved else math.inf,
        per_reward=math.inf if gained <= 0 else total / gained,
    )
