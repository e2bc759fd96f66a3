"""How rollouts end, and how many end how."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastadv import validation
from fastadv.groups import Labels, group_index
from fastadv.intervals import Interval, wilson


class Outcome(enum.IntEnum):
    """The four ways in which a rollout ends.

    Attributes:
        SOLVED: 0, submitted and right; a rollout that was cut off but passed counts here.
        FAILED: 1, submitted and wrong.
        BUDGET: 2, hit the turn, length or context cap without passing.
        INFRA: 3, cancelled, timed out or dropped: no result exists, and the reward may be NaN.
    """

    SOLVED = 0
    FAILED = 1
    BUDGET = 2
    INFRA = 3


class Ending(enum.IntEnum):
    """How a rollout came to its end, right or wrong: what the compact filters of trainers tell apart.

    Attributes:
        SUBMITTED: 0, the agent ended it: an answer, a stop token.
        ENVIRONMENT: 1, the environment ended it.
        TURN_CAP: 2, the most turns or steps.
        LENGTH_CAP: 3, the most response tokens.
        CONTEXT_CAP: 4, the model's context or the longest prompt.
        TIMEOUT: 5, wall-clock time.
        ERROR: 6, a tool, sandbox or engine failed.
        ABORTED: 7, cancelled, dropped or never finished.
        VOID: 8, a reply without the format that it needs.
        UNKNOWN: 9, not logged.
    """

    SUBMITTED = 0
    ENVIRONMENT = 1
    TURN_CAP = 2
    LENGTH_CAP = 3
    CONTEXT_CAP = 4
    TIMEOUT = 5
    ERROR = 6
    ABORTED = 7
    VOID = 8
    UNKNOWN = 9


# Caps: the budget that a rollout was given ran out. Wall-clock time is the caller's to call a budget or a failure.
CAPS = (Ending.TURN_CAP, Ending.LENGTH_CAP, Ending.CONTEXT_CAP)
NO_RESULT = (Ending.ERROR, Ending.ABORTED)


class Outcomes(NamedTuple):
    """What `outcomes_of` makes of endings and rewards.

    Attributes:
        outcomes: `[B]` int64, values of Outcome.
        capped: `[B]` bool, cut off by a cap, solved or not.
    """

    outcomes: Tensor  # [B]
    capped: Tensor  # [B]


def outcomes_of(
    endings: Tensor, rewards: Tensor, *, solved_above: float = 0.0, timeout: Outcome = Outcome.INFRA
) -> Outcomes:
    """Outcomes from how rollouts ended and what they were given for it.

    In this order: an ending without a result (ERROR, ABORTED) and a reward of NaN are INFRA, whatever else is logged;
    a reward above `solved_above` is SOLVED, cut off or not; a cap (turns, length, context) is BUDGET; the rest is
    FAILED, VOID and UNKNOWN among it.

    Args:
        endings: `[B]` integers, see Ending; `fastadv.statuses.endings` makes them from a trainer's status fields.
        rewards: `[B]`, NaN where there is none.
        solved_above: a rollout with a reward above this is solved.
        timeout: what running out of wall-clock time is. INFRA: the machine was slow, and the reward says nothing.
            BUDGET: time is one more cap, the reward is known, and a rollout that passed is solved.

    Returns:
        Outcomes: `outcomes` and `capped`, as `Batch.of` takes them.

    Raises:
        ValueError, TypeError: a value that is no Ending, other lengths, an infinite reward, another timeout, a
            threshold that is no finite number.
    """
    op = "outcomes_of"
    if isinstance(solved_above, bool) or not isinstance(solved_above, Real) or not math.isfinite(solved_above):
        raise ValueError(f"{op}: solved_above is {solved_above!r}; it must be a finite number")
    if timeout not in (Outcome.INFRA, Outcome.BUDGET):
        raise ValueError(f"{op}: timeout is {timeout!r}; it must be Outcome.INFRA or Outcome.BUDGET")
    endings = ending_tensor(endings, op=op)
    validation.tensor(
        op, "rewards", rewards, shape=tuple(endings.shape), dtypes=validation.MASKS, device=endings.device
    )
    values = rewards.to(torch.float64)
    if bool(values.isinf().any()):
        row = int(values.isinf().nonzero()[0])
        raise ValueError(f"{op}: rewards[{row}] is {float(values[row])}; a reward is finite, or NaN for no result")
    capped = _is_any(endings, CAPS if timeout == Outcome.INFRA else (*CAPS, Ending.TIMEOUT))
    lost = values.isnan() | _is_any(endings, NO_RESULT if timeout == Outcome.BUDGET else (*NO_RESULT, Ending.TIMEOUT))
    outcomes = torch.full_like(endings, Outcome.FAILED)
    outcomes[capped] = Outcome.BUDGET
    outcomes[values > solved_above] = Outcome.SOLVED
    outcomes[lost] = Outcome.INFRA
    return Outcomes(outcomes, capped)


def ending_tensor(endings: Tensor, *, op: str) -> Tensor:
    """Endings as `[B]` int64. Raises ValueError or TypeError for what is none, naming the row."""
    validation.tensor(op, "endings", endings, dtypes=validation.INTEGERS)
    if endings.dim() != 1:
        raise ValueError(f"{op}: endings has shape {list(endings.shape)}; expected [B]")
    bad = (endings < 0) | (endings > max(Ending))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        names = ", ".join(f"{e.name} ({e.value})" for e in Ending)
        raise ValueError(f"{op}: endings[{row}] is {int(endings[row])}; endings are {names}")
    return endings.to(torch.int64)


def _is_any(values: Tensor, members: Sequence[Ending]) -> Tensor:
    return torch.isin(values, torch.tensor(members, device=values.device))


@dataclass(frozen=True)
class Census:
    """Counts of outcomes. Rates are shares of all rollouts. Counts or tables that do not add up are a ValueError.

    Attributes:
        counts: rollouts by Outcome, all four of them.
        by_group: `[G, 4]` int64, rollouts of each group by Outcome; None: groups were not given.
        steps: `[S]` int64, the steps in ascending order; None: steps were not given.
        by_step: `[S, 4]` int64, rollouts of each step by Outcome; None: steps were not given.
    """

    counts: dict[Outcome, int]
    by_group: Tensor | None = None  # [G, 4]
    steps: Tensor | None = None  # [S]
    by_step: Tensor | None = None  # [S, 4]

    def __post_init__(self) -> None:
        counts = self.counts
        if not (isinstance(counts, Mapping) and set(counts) == set(Outcome) and all(map(_is_count, counts.values()))):
            raise ValueError(f"Census: counts is {counts}; expected a number for each Outcome, no negative counts")
        object.__setattr__(self, "counts", {o: int(counts[o]) for o in Outcome})  # NumPy's integers wrap around
        if (self.steps is None) != (self.by_step is None):
            raise ValueError("Census: steps and by_step come together")
        for name, table in (("by_group", self.by_group), ("by_step", self.by_step)):
            if table is not None and (table.dim() != 2 or table.sum(0).tolist() != [counts[o] for o in Outcome]):
                raise ValueError(f"Census: {name}, {list(table.shape)}, does not add up to the counts, {counts}")

    @property
    def total(self) -> int:
        """Number of rollouts."""
        return sum(self.counts.values())

    def rate(self, outcome: Outcome) -> float:
        """Share of the rollouts with this outcome; 0 for no rollouts."""
        return self.counts[_outcome("Census.rate: outcome", outcome)] / self.total if self.total else 0.0

    def share_of_unsolved(self, outcome: Outcome) -> float:
        """Share of this outcome among the rollouts that are not solved; 0 if all are."""
        unsolved = self.total - self.counts[Outcome.SOLVED]
        return self.counts[_outcome("Census.share_of_unsolved: outcome", outcome)] / unsolved if unsolved else 0.0

    def group_rates(self, outcome: Outcome) -> Tensor:
        """Share of each group's rollouts with this outcome, `[G]` float64; NaN for none. Raises ValueError without
        groups."""
        return _rates("group_rates", "group_ids", self.by_group, outcome)

    def step_rates(self, outcome: Outcome) -> Tensor:
        """Share of each step's rollouts with this outcome, `[S]` float64. Raises ValueError without steps."""
        return _rates("step_rates", "steps", self.by_step, outcome)

    def __add__(self, other: Census) -> Census:
        """Both together: groups one after the other, rollouts of one step in one row. What one of them was taken
        without, both are."""
        if not isinstance(other, Census):
            return NotImplemented
        by_group = steps = by_step = None
        if self.by_group is not None and other.by_group is not None:
            by_group = torch.cat([self.by_group, other.by_group])
        if self.steps is not None and other.steps is not None:
            assert self.by_step is not None
            assert other.by_step is not None
            steps, row = torch.unique(torch.cat([self.steps, other.steps]), return_inverse=True)
            by_step = self.by_step.new_zeros(steps.shape[0], 4)
            by_step.index_add_(0, row, torch.cat([self.by_step, other.by_step]))
        return Census({o: self.counts[o] + other.counts[o] for o in Outcome}, by_group, steps, by_step)


def _rates(name: str, argument: str, table: Tensor | None, outcome: Outcome) -> Tensor:
    if table is None:
        raise ValueError(f"Census.{name}: the census was taken without {argument}; pass them to it")
    return table[:, _outcome(f"Census.{name}: outcome", outcome)].to(torch.float64) / table.sum(1)


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


FEWEST = 20  # exclusions below which no regime is named: of 19 rollouts a share is known to 20 points or so
REGIMES = ("budget", "infrastructure", "mixed", "too few")


@dataclass(frozen=True)
class Regime:
    """Which kind of exclusion a batch has: of rollouts with a known reward, or of ones without any.

    Attributes:
        verdict: "budget", "infrastructure", "mixed" or "too few".
        budget: share of BUDGET among BUDGET and INFRA, with its 95 % Wilson interval. Rollouts count as independent,
            so that the interval is too narrow where whole groups fail together.
        exclusions: number of BUDGET and INFRA rollouts.
        unsolved: number of rollouts that are not solved.
    """

    verdict: str
    budget: Interval
    exclusions: int
    unsolved: int

    def __str__(self) -> str:
        if self.verdict == "too few":
            return (
                f"No regime is named: {self.exclusions} of {self.unsolved} unsolved rollouts ended without submitting, "
                f"and {FEWEST} are needed."
            )
        name = "Mixed" if self.verdict == "mixed" else f"{self.verdict.capitalize()} regime"
        value, low, high = self.budget
        return (
            f"{name}: {value:.0%} of the {self.exclusions:,} unsolved rollouts that did not submit hit a cap "
            f"(95 % interval {low:.0%} to {high:.0%}), the others have no result."
        )


def regime(census: Census) -> Regime:
    """Names the regime: are the rollouts that a mask would exclude budget failures, or failures of the infrastructure?

    The rule: of the rollouts that are neither solved nor submitted, a share hit a cap. If the 95 % Wilson interval of
    that share is above 1/2 the regime is "budget", if it is below "infrastructure", else "mixed"; with fewer than 20
    such rollouts it is "too few".

    Args:
        census: counts of outcomes.

    Returns:
        The Regime. `str` of it is a sentence.

    Raises:
        TypeError: no Census.
    """
    if not isinstance(census, Census):
        raise TypeError(f"regime: census is a {type(census).__name__}; pass what fastadv.census returns")
    budget, infra = census.counts[Outcome.BUDGET], census.counts[Outcome.INFRA]
    share, verdict = wilson(budget, budget + infra), "mixed"
    if budget + infra < FEWEST:
        verdict = "too few"
    elif share.low > 0.5:
        verdict = "budget"
    elif share.high < 0.5:
        verdict = "infrastructure"
    return Regime(verdict, share, budget + infra, census.total - census.counts[Outcome.SOLVED])


def outcome_tensor(outcomes: Tensor | Sequence[Outcome | int | str], *, op: str = "census") -> Tensor:
    """Outcomes as `[B]` int64: from integers, members of Outcome, or their names in any case.

    Raises:
        ValueError, TypeError: a value that is no outcome, naming the row.
    """
    if isinstance(outcomes, Tensor):
        validation.tensor(op, "outcomes", outcomes, dtypes=validation.INTEGERS)
        result = outcomes.to(torch.int64)
    else:
        values = [_outcome(f"{op}: outcomes[{row}]", x) for row, x in enumerate(listed(op, "outcomes", outcomes))]
        result = torch.tensor(values, dtype=torch.int64)
    if result.dim() != 1:
        raise ValueError(f"{op}: outcomes has shape {list(result.shape)}; expected [B]")
    bad = (result < 0) | (result > 3)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(f"{op}: outcomes[{row}] is {int(result[row])}; {_VALID}")
    return result


_VALID = "outcomes are " + ", ".join(f"{o.name} ({o.value})" for o in Outcome)


def _outcome(where: str, value: Any) -> Outcome:
    """An Outcome from itself, its name or its number. A member of another enumeration is none, whatever its number."""
    if isinstance(value, str) and value.upper() in Outcome.__members__:
        return Outcome[value.upper()]
    foreign = isinstance(value, enum.Enum) and not isinstance(value, Outcome)
    if foreign or isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) < len(Outcome):
        raise ValueError(f"{where} is {value!r}; {_VALID}")
    return Outcome(int(value))


def listed(op: str, name: str, values: Iterable[Any]) -> list[Any]:
    """What is in order and one a rollout, as a list. Raises TypeError for texts, sets and mappings, which are not."""
    if isinstance(values, (str, bytes, Set, Mapping)) or not isinstance(values, Iterable):
        raise TypeError(f"{op}: {name} is a {type(values).__name__}; pass a list with one for each rollout")
    return list(values)


def census(
    outcomes: Tensor | Sequence[Outcome | int | str], group_ids: Labels | None = None, steps: Tensor | None = None
) -> Census:
    """Counts outcomes, over all rollouts, by group and by step.

    Take it before looking at any gradient: it decides whether exclusions are budget failures, whose reward is known, or
    infrastructure failures, whose outcome was never seen (`fastadv.regime`).

    Args:
        outcomes: `[B]` integers, members of Outcome, or their names.
        group_ids: `[B]` labels or a GroupIndex; groups are listed by first appearance.
        steps: `[B]` integers, the training step of each rollout; steps are listed in ascending order.

    Returns:
        The Census.

    Raises:
        ValueError: a value that is no outcome, or group_ids or steps of another length.
        TypeError: outcomes or steps of another dtype.
    """
    values = outcome_tensor(outcomes)
    counts = torch.bincount(values, minlength=4)
    by_group = labels = by_step = None
    if group_ids is not None:
        groups = group_index(group_ids, op="census")
        if groups.num_rows != values.shape[0]:
            raise ValueError(f"census: group_ids has {groups.num_rows} rows, outcomes has {values.shape[0]}")
        by_group = _table(groups.index.to(values.device), groups.num_groups, values)
    if steps is not None:
        validation.tensor("census", "steps", steps, shape=tuple(values.shape), dtypes=validation.INTEGERS)
        labels, row = torch.unique(steps.to(values.device, torch.int64), return_inverse=True)
        by_step = _table(row, labels.shape[0], values)
    return Census({o: int(counts[o]) for o in Outcome}, by_group, labels, by_step)


def _table(row: Tensor, rows: int, outcomes: Tensor) -> Tensor:
    return torch.bincount(row * 4 + outcomes, minlength=4 * rows).view(-1, 4)  # [rows, 4]
