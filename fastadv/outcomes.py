"""How rollouts end, and how many end how."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv import validation
from fastadv.groups import Labels, group_index


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


@dataclass(frozen=True)
class Census:
    """Counts of outcomes. Rates are shares of all rollouts.

    Attributes:
        counts: rollouts by Outcome, all four of them.
        by_group: `[G, 4]` int64, rollouts of each group by Outcome; None: groups were not given.
    """

    counts: dict[Outcome, int]
    by_group: Tensor | None  # [G, 4]

    @property
    def total(self) -> int:
        """Number of rollouts."""
        return sum(self.counts.values())

    def rate(self, outcome: Outcome) -> float:
        """Share of the rollouts with this outcome; 0 for no rollouts."""
        return self.counts[outcome] / self.total if self.total else 0.0

    def share_of_unsolved(self, outcome: Outcome) -> float:
        """Share of this outcome among the rollouts that are not solved; 0 if all are."""
        unsolved = self.total - self.counts[Outcome.SOLVED]
        return self.counts[outcome] / unsolved if unsolved else 0.0

    def __add__(self, other: Census) -> Census:
        by_group = None
        if self.by_group is not None and other.by_group is not None:
            by_group = torch.cat([self.by_group, other.by_group])
        return Census({o: self.counts[o] + other.counts[o] for o in Outcome}, by_group)


def outcome_tensor(outcomes: Tensor | Sequence[Outcome | int | str], *, op: str = "census") -> Tensor:
    """Outcomes as `[B]` int64: from integers, members of Outcome, or their names in any case.

    Raises:
        ValueError, TypeError: a value that is no outcome, naming the row.
    """
    if isinstance(outcomes, Tensor):
        validation.tensor(op, "outcomes", outcomes, dtypes=validation.INTEGERS)
        result = outcomes.to(torch.int64)
    else:
        result = torch.tensor([_outcome(op, row, value) for row, value in enumerate(outcomes)], dtype=torch.int64)
    if result.dim() != 1:
        raise ValueError(f"{op}: outcomes has shape {list(result.shape)}; expected [B]")
    bad = (result < 0) | (result > 3)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(f"{op}: outcomes[{row}] is {int(result[row])}; {_VALID}")
    return result


_VALID = "outcomes are " + ", ".join(f"{o.name} ({o.value})" for o in Outcome)


def _outcome(op: str, row: int, value: Outcome | int | str) -> int:
    if isinstance(value, str) and value.upper() in Outcome.__members__:
        return Outcome[value.upper()]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{op}: outcomes[{row}] is {value!r}; {_VALID}")
    return value


def census(outcomes: Tensor | Sequence[Outcome | int | str], group_ids: Labels | None = None) -> Census:
    """Counts outcomes, over all rollouts and by group.

    Take it before looking at any gradient: it decides whether exclusions are budget failures, whose reward is known, or
    infrastructure failures, whose outcome was never seen.

    Args:
        outcomes: `[B]` integers, members of Outcome, or their names.
        group_ids: `[B]` labels or a GroupIndex; groups are listed by first appearance.

    Returns:
        The Census.

    Raises:
        ValueError: a value that is no outcome, or group_ids of another length.
    """
    values = outcome_tensor(outcomes)
    counts = torch.bincount(values, minlength=4)
    by_group = None
    if group_ids is not None:
        groups = group_index(group_ids, op="census")
        if groups.num_rows != values.shape[0]:
            raise ValueError(f"census: group_ids has {groups.num_rows} rows, outcomes has {values.shape[0]}")
        cells = groups.index.to(values.device) * 4 + values
        by_group = torch.bincount(cells, minlength=4 * groups.num_groups).view(-1, 4)
    return Census({o: int(counts[o]) for o in Outcome}, by_group)
