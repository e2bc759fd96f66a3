"""Moments of the voters' rewards, by group and by the turns of a group, in float64.

One launch each. Reads 24 bytes a row, three times for the moments of a group, the second and third time from the cache;
32 a row for every TURNS turns of a group. A batch has thousands of rows for millions of tokens, so what counts is how
long one group takes, not the bytes.

Sums are in the order of `order`. A group of up to CHUNK rows is summed by one lane, as the C++ kernel does it; a larger
one by LANES lanes, each of which takes consecutive rows, and then the lanes are summed in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from fastadv.triton_kernels._forms import aligned_form
from fastadv.triton_kernels._launch import Configuration, launch
from torch import Tensor

CHUNK = 32  # rows that one lane sums at least
LANES = 128  # of a group
TURNS = 64  # of a group, that a program looks after at a time
TURN_LANES = 8  # for each of these
PROGRAMS = 1024  # for the turns of all groups, about


@triton.jit
def _lane_rows(offsets, group, total, CHUNK: tl.constexpr, LANES: tl.constexpr):
    """Where each lane's part of a group's rows begins and ends in the order, [LANES], and the steps of the longest."""
    first = tl.maximum(tl.load(offsets + group), 0)
    last = tl.minimum(tl.load(offsets + group + 1), total)
    steps = tl.maximum(tl.cdiv(last - first, LANES), CHUNK)
    begin = first + steps * tl.arange(0, LANES)  # [LANES]
    return begin, tl.minimum(begin + steps, last), tl.minimum(steps, last - first).to(tl.int32)


@triton.jit
def _member(place, end, order, rewards, votes, total):
    """The row at each lane's place in the order, [LANES]: its number, its reward and votes, 0 where it does not vote,
    and whether it does. A number that is no row's votes with a reward of NaN."""
    there = place < end
    row = tl.load(order + place, mask=there, other=-1)
    known = (row >= 0) & (row < total)
    vote = tl.load(votes + row, mask=known, other=0.0)
    reward = tl.load(rewards + row, mask=known, other=float("nan"))
    here = there & ((vote != 0.0) | ~known)
    return row, tl.where(here, reward, 0.0), vote, here


@triton.jit(do_not_specialize=["total"])
def group_moments_kernel(
    rewards,  # [B] float64
    votes,  # [B] float64
    order,  # [B] int64
    offsets,  # [G + 1] int64
    minimum,  # [G] float64
    weight,  # [G] float64
    sums,  # [G] float64
    squares,  # [G] float64
    voters,  # [G] int64
    total: tl.int64,  # rows
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    begin, end, steps = _lane_rows(offsets, group, total, CHUNK, LANES)
    least = tl.full([LANES], float("inf"), tl.float64)
    nan = tl.zeros([LANES], tl.int32)  # whether a voter's reward is NaN: it stays visible, where a minimum skips it
    weights = tl.zeros([LANES], tl.float64)
    count = tl.zeros([LANES], tl.int32)
    for step in tl.range(0, steps, loop_unroll_factor=8):
        _, reward, vote, here = _member(begin + step, end, order, rewards, votes, total)
        nan |= (here & (reward != reward)).to(tl.int32)
        least = tl.where(here & (reward < least), reward, least)
        weights += vote
        count += here.to(tl.int32)
    all_voters = tl.sum(count).to(tl.int64)
    all_weight = tl.sum(weights)
    smallest = tl.where(all_voters > 0, tl.min(least), 0.0)
    smallest = tl.where(tl.max(nan) != 0, float("nan"), smallest)

    shifted = tl.zeros([LANES], tl.float64)
    for step in tl.range(0, steps, loop_unroll_factor=8):
        _, reward, vote, here = _member(begin + step, end, order, rewards, votes, total)
        shifted += tl.where(here, vote * (reward - smallest), 0.0)
    all_shifted = tl.sum(shifted)
    mean = tl.where(all_weight == 0.0, 0.0, all_shifted / tl.where(all_weight == 0.0, 1.0, all_weight))

    spread = tl.zeros([LANES], tl.float64)
    for step in tl.range(0, steps, loop_unroll_factor=8):
        _, reward, vote, here = _member(begin + step, end, order, rewards, votes, total)
        centred = reward - smallest - mean
        spread += tl.where(here, vote * (centred * centred), 0.0)

    tl.store(minimum + group, smallest)
    tl.store(weight + group, all_weight)
    tl.store(sums + group, all_shifted)
    tl.store(squares + group, tl.sum(spread))
    tl.store(voters + group, all_voters)


def group_moments(rewards: Tensor, votes: Tensor, order: Tensor, offsets: Tensor, out: list[Tensor]) -> int:
    """See `fastadv.ops.moments.GROUP_MOMENTS`. An order that names no row makes its group's moments NaN."""
    names = ("minimum", "weight", "sums", "squares", "voters")
    launch(
        group_moments_kernel,
        (offsets.shape[0] - 1,),
        {
            "rewards": rewards.contiguous(),
            "votes": votes.contiguous(),
            "order": order,
            "offsets": offsets,
            **dict(zip(names, out, strict=True)),
            "total": rewards.shape[0],
        },
        {"CHUNK": CHUNK, "LANES": LANES},
    )
    return 0


@triton.jit(do_not_specialize=["total", "size"])
def turn_moments_kernel(
    rewards,  # [B] float64
    votes,  # [B] float64
    order,  # [B] int64
    offsets,  # [G + 1] int64, into order
    turns,  # [B] int64: turns of each row
    minimum,  # [G] float64
    table,  # [G + 1] int64, into the outputs
    turn_votes,  # [size] float64
    turn_rewards,  # [size] float64
    total: tl.int64,  # rows
    size: tl.int64,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    TURNS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    begin, end, steps = _lane_rows(offsets, group, total, CHUNK, LANES)
    smallest = tl.load(minimum + group)
    base = tl.load(table + group)
    last = tl.minimum(tl.load(table + group + 1), size)
    column = tl.arange(0, TURNS)[:, None]  # [TURNS, 1]
    for first in range(tl.maximum(base, 0) + tl.program_id(1) * TURNS, last, tl.num_programs(1) * TURNS):
        turn = (first - base).to(tl.int64) + column  # [TURNS, 1]
        count = tl.zeros([TURNS, LANES], tl.float64)
        shifted = tl.zeros([TURNS, LANES], tl.float64)
        for step in tl.range(0, steps, loop_unroll_factor=4):
            row, reward, vote, here = _member(begin + step, end, order, rewards, votes, total)
            reached = tl.load(turns + row, mask=here & (row >= 0) & (row < total), other=0)  # [LANES]
            of_row = tl.where(here, vote * (reward - smallest), 0.0)
            in_turn = turn < reached[None, :]  # [TURNS, LANES]
            count += tl.where(in_turn, vote[None, :], 0.0)
            shifted += tl.where(in_turn, of_row[None, :], 0.0)
        slot = first + tl.arange(0, TURNS)
        tl.store(turn_votes + slot, tl.sum(count, axis=1), mask=slot < last)
        tl.store(turn_rewards + slot, tl.sum(shifted, axis=1), mask=slot < last)


def turn_moments(
    rewards: Tensor,
    votes: Tensor,
    order: Tensor,
    offsets: Tensor,
    turns: Tensor,
    minimum: Tensor,
    table: Tensor,
    out: list[Tensor],
) -> int:
    """See `fastadv.ops.moments.TURN_MOMENTS`. Each turn is summed over the rows that reached it, in their order, as the
    reference does it; the C++ kernel sums from the last turn to the first."""
    groups = offsets.shape[0] - 1
    launch(
        turn_moments_kernel,
        (groups, max(1, min(64, PROGRAMS // max(1, groups)))),
        {
            "rewards": rewards.contiguous(),
            "votes": votes.contiguous(),
            "order": order,
            "offsets": offsets,
            "turns": turns.contiguous(),
            "minimum": minimum,
            "table": table,
            "turn_votes": out[0],
            "turn_rewards": out[1],
            "total": rewards.shape[0],
            "size": out[0].shape[0],
        },
        {"CHUNK": CHUNK, "LANES": TURN_LANES, "TURNS": TURNS},
    )
    return 0


STREAMING = ()  # nothing here is as long as the tokens


def configurations() -> Iterator[Configuration]:
    """Every form that a launch can ask for, with aligned pointers."""
    rows = {"rewards": "*fp64", "votes": "*fp64", "order": "*i64", "offsets": "*i64"}
    moments = {"minimum": "*fp64", "weight": "*fp64", "sums": "*fp64", "squares": "*fp64", "voters": "*i64"}
    constants = {"CHUNK": CHUNK, "LANES": LANES}
    yield aligned_form(group_moments_kernel, {**rows, **moments, "total": "i64"}, constants)
    tables = {"turns": "*i64", "minimum": "*fp64", "table": "*i64", "turn_votes": "*fp64", "turn_rewards": "*fp64"}
    constants = {"CHUNK": CHUNK, "LANES": TURN_LANES, "TURNS": TURNS}
    yield aligned_form(turn_moments_kernel, {**rows, **tables, "total": "i64", "size": "i64"}, constants)


def bytes_moved(rows: int, groups: int) -> int:
    """What group_moments has to read and write."""
    return 24 * rows + 8 * (groups + 1) + 40 * groups


def turn_bytes_moved(rows: int, groups: int, turns: int) -> int:
    """What turn_moments has to read and write, where groups have this many turns in all."""
    return 32 * rows + 16 * (groups + 1) + 8 * groups + 16 * turns
