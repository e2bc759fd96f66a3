"""Moments of the voters' rewards: what group and turn-reached baselines are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv import native
from fastadv.groups import GroupIndex
from fastadv.ops._register import native_op
from fastadv.reference import moments as reference
from fastadv.reference.moments import GroupMoments, TurnMoments
from fastadv.segment_table import Segments


def _fake_group(rewards: Tensor, votes: Tensor, order: Tensor, offsets: Tensor) -> list[Tensor]:
    floats = [rewards.new_empty(offsets.shape[0] - 1) for _ in range(4)]
    return [*floats, offsets.new_empty(offsets.shape[0] - 1)]


@native_op("group_moments", _fake_group)
def _launch_group(rewards: Tensor, votes: Tensor, order: Tensor, offsets: Tensor) -> list[Tensor]:
    groups = offsets.shape[0] - 1
    out = [torch.empty(groups, dtype=torch.float64) for _ in range(4)] + [torch.empty(groups, dtype=torch.int64)]
    native.module().group_moments(
        (groups, rewards.shape[0], order.data_ptr(), offsets.data_ptr()),
        rewards.data_ptr(),
        votes.data_ptr(),
        tuple(t.data_ptr() for t in out),
        native.threads(rewards.shape[0]),
    )
    return out


def _fake_turn(
    rewards: Tensor,
    votes: Tensor,
    order: Tensor,
    offsets: Tensor,
    index: Tensor,
    turns: Tensor,
    segments: int,
    minimum: Tensor,
) -> list[Tensor]:
    return [torch.empty_like(offsets), rewards.new_empty(segments), rewards.new_empty(segments)]


@native_op("turn_moments", _fake_turn)
def _launch_turn(
    rewards: Tensor,
    votes: Tensor,
    order: Tensor,
    offsets: Tensor,
    index: Tensor,
    turns: Tensor,
    segments: int,
    minimum: Tensor,
) -> list[Tensor]:
    groups = offsets.shape[0] - 1
    table = torch.zeros_like(offsets)
    longest = torch.zeros(groups, dtype=torch.int64).scatter_reduce(0, index, turns, "amax")
    torch.cumsum(longest, 0, out=table[1:])
    if groups and int(table[-1]) > segments:
        raise ValueError(
            f"turn_moments: the groups have {int(table[-1])} turns, the batch {segments} segments; "
            "build both from one batch"
        )
    # No group has more turns than segments, so this size needs no look at the table; the slots behind its end stay 0.
    count, total = torch.zeros(segments, dtype=torch.float64), torch.zeros(segments, dtype=torch.float64)
    native.module().turn_moments(
        (groups, rewards.shape[0], order.data_ptr(), offsets.data_ptr()),
        rewards.data_ptr(),
        votes.data_ptr(),
        turns.data_ptr(),
        minimum.data_ptr(),
        (table.data_ptr(), count.data_ptr(), total.data_ptr()),
        native.threads(segments),
    )
    return [table, count, total]


def group_moments(rewards: Tensor, votes: Tensor, groups: GroupIndex, backend: str) -> GroupMoments:
    """Moments of each group; `rewards` and `votes` `[B]` float64, contiguous, checked."""
    if backend == "reference":
        return reference.group_moments(rewards, votes, groups)
    return GroupMoments(*_launch_group(rewards, votes, groups.order, groups.offsets))


def turn_moments(
    rewards: Tensor, votes: Tensor, groups: GroupIndex, index: Segments, minimum: Tensor, backend: str
) -> TurnMoments:
    """Moments of each group's turns."""
    turns = index.turns()
    if backend == "reference":
        return reference.turn_moments(rewards, votes, groups, turns, index.offsets, index.count, minimum)
    return TurnMoments(
        *_launch_turn(rewards, votes, groups.order, groups.offsets, groups.index, turns, index.count, minimum)
    )
