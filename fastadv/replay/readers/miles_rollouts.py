"""Samples of a dump that are parts of one rollout: siblings that continue each other, and leaves of a session."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fastadv.outcomes import Ending
from fastadv.replay.errors import ReplayError, counted
from fastadv.replay.readers.miles_turns import in_order, turns_of_runs, versions_of
from fastadv.replay.readers.rollouts import short

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
    agent_failed: list[bool] = field(default_factory=list)  # finished, but the exit_status says that there is no result
    rollouts: list[Label | None] = field(default_factory=list)  # of samples: rollout_id
    leaves: list[Any] = field(default_factory=list)  # of samples: metadata["leaf"]
    calls: list[object] = field(default_factory=list)  # of samples: weight_versions


class Parts(NamedTuple):
    """Samples that are parts of rollouts."""

    turns: np.ndarray  # [N] int32: turn of each response token of the rollouts, -1 outside of turns
    rollouts: np.ndarray  # [Q] rollout of each sample, in the columns' order
    responses: np.ndarray  # [Q] its response tokens
    note: str  # for reports


def joined(where: str, c: Columns) -> tuple[Columns, Parts | None]:
    """One row a rollout: the samples of a group that share a `rollout_id`, in order, as one response.

    Samples without a `rollout_id` are rollouts of their own, whatever their `index`: the trainers want one on each of
    several. A rollout has one reward, ends as its last sample did, and its turns count on through its samples. The
    calls that leaves share are masked in all but one, and lie at their depth of the tree; leaves come in the order of
    their last calls, so that the last row of the token ids is how the rollout ended.

    Args:
        where: what was read, for errors.
        c: samples.

    Returns:
        The columns, and what ties samples to rollouts; None: every rollout is one sample.

    Raises:
        ReplayError: samples of a rollout with different rewards, leaves that do not fit their masks or responses.
    """
    members: dict[Any, list[int]] = {}
    for row, (group, rollout) in enumerate(zip(c.groups, c.rollouts, strict=True)):
        members.setdefault((None, row) if rollout is None else (group, rollout), []).append(row)
    several = [rows for rows in members.values() if len(rows) > 1]
    if not several:
        return c, None
    made, turns = Columns(), []
    for key, rows in members.items():
        if len(rows) > 1:
            rows[:] = [rows[number] for number in in_order([c.leaves[row] for row in rows])]
        last = rows[-1]
        made.lengths.append(sum(c.lengths[row] for row in rows))
        made.total_lengths += [c.total_lengths[row] for row in rows]
        made.ids += [c.ids[row] for row in rows]
        made.masks.append(np.concatenate([c.masks[row] for row in rows]))
        made.log_probs.append(_all(c.log_probs[row] for row in rows))
        made.rewards.append(_reward(where, key[1], rows, [c.rewards[row] for row in rows]))
        made.endings.append(c.endings[last])
        made.groups.append(c.groups[last])
        made.row_ids.append(c.row_ids[last])
        made.agent_failed.append(c.agent_failed[last])
        own, versions = _turns(where, c, rows)
        turns.append(own)
        made.versions.append(_all(versions))
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


def _reward(where: str, rollout: Label, rows: list[int], rewards: list[float]) -> float:
    given = {reward for reward in rewards if math.isfinite(reward)}
    if len(given) > 1:
        shown = ", ".join(f"sample {row}: {reward:g}" for row, reward in zip(rows, rewards, strict=True))
        raise ReplayError(
            f"{where}: the samples of one rollout (rollout_id {short(rollout)}) have several rewards ({shown}), and a "
            "rollout votes with one"
        )
    return given.pop() if given else math.nan


def _turns(where: str, c: Columns, rows: list[int]) -> tuple[np.ndarray, list[np.ndarray | None]]:
    """The turn of each token of a rollout, `[n]` int32, and the versions that sampled the tokens of its samples."""
    masks, leaves = [c.masks[row] for row in rows], [c.leaves[row] if len(rows) > 1 else None for row in rows]
    starts = [np.diff(mask.astype(np.int8), prepend=np.int8(0)) == 1 for mask in masks]
    try:
        turns = turns_of_runs([int(start.sum()) for start in starts], leaves)
    except ValueError as error:
        raise ReplayError(f"{where}, samples {', '.join(map(str, rows))}: {error}") from error
    found, versions = [], []
    for row, mask, start, leaf, own in zip(rows, masks, starts, leaves, turns, strict=True):
        if leaf is not None and own and own[-1] >= mask.size:  # turns cost memory, and each has a token
            raise ReplayError(
                f"{where}, sample {row}: metadata['leaf']['path_node_ids'] puts its last call at turn {own[-1]}, but "
                f"the response has {counted(mask.size, 'token')}; turns count from 0, and each has a token"
            )
        table = np.array([-1, *own], np.int32)
        found.append(np.where(mask, table[np.cumsum(start)], np.int32(-1)))
        shared = own[0] if leaf is not None and own else 0
        versions.append(versions_of(c.calls[row], mask, shared) if shared else c.versions[row])
    return np.concatenate(found), versions
