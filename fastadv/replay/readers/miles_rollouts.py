"""Samples of a dump that are parts of one rollout: siblings that continue each other, and leaves of a session."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fastadv.outcomes import Ending
from fastadv.replay.errors import ReplayError, counted
from fastadv.replay.readers.miles_turns import last_sample, turns_of_runs

Label = int | str


@dataclass
class Columns:
    """Samples, or the rollouts that they are joined to, as columns."""

    lengths: list[int] = field(default_factory=list)  # response tokens
    total_lengths: list[int] = field(default_factory=list)  # prompt and response, of each sample
    masks: list[np.ndarray] = field(default_factory=list)  # bool
    log_probs: list[np.ndarray | None] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)  # of each sample
    rewards: list[float] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    versions: list[np.ndarray | None] = field(default_factory=list)
    groups: list[Label] = field(default_factory=list)
    row_ids: list[int] = field(default_factory=list)
    rollouts: list[Label | None] = field(default_factory=list)  # rollout_id
    leaves: list[Any] = field(default_factory=list)  # metadata["leaf"]


class Parts(NamedTuple):
    """Samples that are parts of rollouts."""

    turns: np.ndarray  # [N] int32: turn of each response token of the rollouts, -1 outside of turns
    rollouts: np.ndarray  # [Q] rollout of each sample, in the columns' order
    responses: np.ndarray  # [Q] its response tokens
    note: str  # for reports


def joined(where: str, c: Columns) -> tuple[Columns, Parts | None]:
    """One row a rollout: the samples of a group that share a `rollout_id`, in order, as one response.

    A rollout has one reward, ends as its last sample did, and its turns count on through its samples. The calls that
    leaves share are masked in all but one, and lie at their depth of the tree.

    Args:
        where: what was read, for errors.
        c: samples.

    Returns:
        The columns, and what ties samples to rollouts; None: every rollout is one sample.

    Raises:
        ReplayError: samples of a rollout with different rewards, leaves that do not fit their masks.
    """
    members: dict[Any, list[int]] = {}
    for row, (group, rollout) in enumerate(zip(c.groups, c.rollouts, strict=True)):
        members.setdefault(("row", row) if rollout is None else (group, rollout), []).append(row)
    several = [rows for rows in members.values() if len(rows) > 1]
    if not several:
        return c, None
    made, turns = Columns(), []
    for rows in members.values():
        first, last = rows[0], rows[last_sample([c.leaves[row] for row in rows])]
        parts = [c.masks[row] for row in rows]
        made.lengths.append(sum(c.lengths[row] for row in rows))
        made.total_lengths += [c.total_lengths[row] for row in rows]
        made.ids += [c.ids[row] for row in rows]
        made.masks.append(np.concatenate(parts))
        made.log_probs.append(_all(c.log_probs[row] for row in rows))
        made.rewards.append(_reward(where, rows, [c.rewards[row] for row in rows]))
        made.endings.append(c.endings[last])
        made.versions.append(_all(c.versions[row] for row in rows))
        made.groups.append(c.groups[first])
        number = c.rollouts[first]
        made.row_ids.append(number if isinstance(number, int) and len(rows) > 1 else c.row_ids[last])
        turns.append(_turns(where, rows, parts, [c.leaves[row] for row in rows] if len(rows) > 1 else [None]))
    return made, Parts(
        np.concatenate(turns),
        np.repeat(np.arange(len(members)), [len(rows) for rows in members.values()]),
        np.array([c.lengths[row] for rows in members.values() for row in rows]),
        f"{counted(len(several), 'rollout')} of {sum(map(len, several)):,} samples: each votes once",
    )


def _all(parts: Iterable[np.ndarray | None]) -> np.ndarray | None:
    """The parts as one; None where one is not known."""
    listed = list(parts)
    found = [part for part in listed if part is not None]
    return np.concatenate(found) if len(found) == len(listed) else None


def _reward(where: str, rows: list[int], rewards: list[float]) -> float:
    given = {reward for reward in rewards if math.isfinite(reward)}
    if len(given) > 1:
        shown = ", ".join(f"sample {row}: {reward:g}" for row, reward in zip(rows, rewards, strict=True))
        raise ReplayError(
            f"{where}: the samples of one rollout have several rewards ({shown}), and a rollout votes with one"
        )
    return given.pop() if given else math.nan


def _turns(where: str, rows: list[int], masks: list[np.ndarray], leaves: list[Any]) -> np.ndarray:
    """The turn of each token of a rollout, int32."""
    starts = [np.diff(mask.astype(np.int8), prepend=np.int8(0)) == 1 for mask in masks]
    try:
        turns = turns_of_runs([int(start.sum()) for start in starts], leaves)
    except ValueError as error:
        raise ReplayError(f"{where}, samples {', '.join(map(str, rows))}: {error}") from error
    found = []
    for mask, start, own in zip(masks, starts, turns, strict=True):
        table = np.array([-1, *own], np.int32)
        found.append(np.where(mask, table[np.cumsum(start)], np.int32(-1)))
    return np.concatenate(found)
