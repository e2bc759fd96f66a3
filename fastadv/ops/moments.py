"""Moments of the voters' rewards: what group and turn-reached baselines are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastadv import cuda, native, validation
from fastadv.groups import GroupIndex
from fastadv.kernels import Kernel
from fastadv.ops._register import native_op
from fastadv.reference import moments as reference
from fastadv.reference.moments import GroupMoments, TurnMoments
from fastadv.segment_table import Segments


def _group_cpu(rewards: Tensor, votes: Tensor, order: Tensor, offsets: Tensor, out: list[Tensor]) -> int:
    groups = offsets.shape[0] - 1
    native.module().group_moments(
        (groups, rewards.shape[0], native.address(order), native.address(offsets)),
        native.address(rewards),
        native.address(votes),
        tuple(t.data_ptr() for t in out),
        native.threads(rewards.shape[0]),
    )
    return 0


FLOAT64 = 6  # for the CUDA kernels, beside the numbers of native.DTYPES


def readable(values: Tensor) -> Tensor:
    """A number a row in a layout and a type that the CUDA kernels read: all but the small integers."""
    known = values.dtype == torch.float64 or values.dtype in native.DTYPES
    return (values if known else values.to(torch.float64)).contiguous()


def row_values(values: Tensor | None) -> tuple[int, int]:
    """What `readable` gave, as the CUDA kernels take it."""
    return native.address(values), FLOAT64 if values is None else native.DTYPES.get(values.dtype, FLOAT64)


def _voters(rewards: Tensor, votes: Tensor, order: Tensor, offsets: Tensor) -> tuple[Any, ...]:
    """Voters as the CUDA kernels take them."""
    sizes = (rewards.shape[0], offsets.shape[0] - 1)
    index = (0, native.address(order), native.address(offsets))
    return (*sizes, *index, row_values(rewards), row_values(votes), 0, False)


def _group_cuda(rewards: Tensor, votes: Tensor, order: Tensor, offsets: Tensor, out: list[Tensor]) -> int:
    voters = _voters(rewards, votes, order, offsets)
    cuda.module().group_moments(*cuda.place(rewards), voters, tuple(t.data_ptr() for t in out))
    return 0


# Writes the fields of a GroupMoments.
GROUP_MOMENTS = Kernel("group_moments", cpu=_group_cpu, triton="moments", cuda=_group_cuda)


def _fake_group(backend: str, rewards: Tensor, votes: Tensor, order: Tensor, offsets: Tensor) -> list[Tensor]:
    floats = [rewards.new_empty(offsets.shape[0] - 1) for _ in range(4)]
    return [*floats, offsets.new_empty(offsets.shape[0] - 1)]


@native_op("group_moments", _fake_group)
def _launch_group(backend: str, rewards: Tensor, votes: Tensor, order: Tensor, offsets: Tensor) -> list[Tensor]:
    groups = offsets.shape[0] - 1
    dtypes = (*[torch.float64] * 4, torch.int64)
    out = [torch.empty(groups, dtype=dtype, device=rewards.device) for dtype in dtypes]
    GROUP_MOMENTS(backend, rewards, votes, order, offsets, out)
    return out


def _turn_cpu(
    rewards: Tensor,
    votes: Tensor,
    order: Tensor,
    offsets: Tensor,
    turns: Tensor,
    minimum: Tensor,
    table: Tensor,
    out: list[Tensor],
) -> int:
    groups, size = offsets.shape[0] - 1, out[0].shape[0]
    used = int(table[-1])
    if used > size:
        raise ValueError(f"turn_moments: groups have {used} turns, the table {size} slots; build both from one batch")
    native.module().turn_moments(
        (groups, rewards.shape[0], native.address(order), native.address(offsets)),
        native.address(rewards),
        native.address(votes),
        native.address(turns),
        native.address(minimum),
        (native.address(table), out[0].data_ptr(), out[1].data_ptr(), size),
        native.threads(size),
    )
    return 0


def _turn_cuda(
    rewards: Tensor,
    votes: Tensor,
    order: Tensor,
    offsets: Tensor,
    turns: Tensor,
    minimum: Tensor,
    table: Tensor,
    out: list[Tensor],
) -> int:
    cuda.module().turn_moments(
        *cuda.place(rewards),
        _voters(rewards, votes, order, offsets),
        native.address(turns),
        native.address(minimum),
        (native.address(table), out[0].data_ptr(), out[1].data_ptr(), out[0].shape[0]),
    )
    return 0


# Adds to two tables of zeros, votes and rewards of each group's turns, float64.
TURN_MOMENTS = Kernel("turn_moments", cpu=_turn_cpu, triton="moments", cuda=_turn_cuda)


def _fake_turn(
    backend: str,
    rewards: Tensor,
    votes: Tensor,
    order: Tensor,
    offsets: Tensor,
    turns: Tensor,
    minimum: Tensor,
    table: Tensor,
    size: int,
) -> list[Tensor]:
    return [rewards.new_empty(size), rewards.new_empty(size)]


@native_op("turn_moments", _fake_turn)
def _launch_turn(
    backend: str,
    rewards: Tensor,
    votes: Tensor,
    order: Tensor,
    offsets: Tensor,
    turns: Tensor,
    minimum: Tensor,
    table: Tensor,
    size: int,
) -> list[Tensor]:
    out = [torch.zeros(size, dtype=torch.float64, device=rewards.device) for _ in range(2)]
    TURN_MOMENTS(backend, rewards, votes, order, offsets, turns, minimum, table, out)
    return out


def group_moments(rewards: Tensor, votes: Tensor, groups: GroupIndex, backend: str) -> GroupMoments:
    """Moments of each group; `rewards` and `votes` `[B]` float64, contiguous, checked."""
    if backend == "reference":
        return reference.group_moments(rewards, votes, groups)
    return GroupMoments(*_launch_group(backend, rewards, votes, groups.order, groups.offsets))


def turn_moments(
    rewards: Tensor, votes: Tensor, groups: GroupIndex, index: Segments, minimum: Tensor, backend: str
) -> TurnMoments:
    """Moments of each group's turns."""
    turns = index.turns()
    table = reference.turn_offsets(groups, turns)
    # On a GPU, and in a graph, the host does not know the table's end; no group has more turns than there are segments.
    size = int(table[-1]) if validation.on_host(table) else index.count
    if not 0 <= size <= index.count:  # of false offsets, which only the C++ kernels refuse
        if backend == "cpu":
            raise ValueError(f"turn_moments: groups have {size} turns, but there are {index.count} segments")
        size = index.count
    if backend == "reference":
        return reference.turn_moments(rewards, votes, groups, index.offsets, index.count, minimum, table, size)
    launched = _launch_turn(backend, rewards, votes, groups.order, groups.offsets, turns, minimum, table, size)
    return TurnMoments(table, *launched)
