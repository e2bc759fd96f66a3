"""Turns from the response mask, and how many each rollout has.

turn_ids: two launches. Reads the mask's byte of a token twice, the second time from the cache, and writes 4 bytes. The
first launch counts, for each block of tokens, the runs that begin in it and in its last row; the second adds up these
counts over the blocks before its own that hold its first row. In a row of a million tokens a block reads a kilobyte
of them on average, where it moves ten of its own; a third launch, for a scan over the blocks, would pay beyond ten
million.

turn_counts: one launch, two where rows are few and long. Reads 4 bytes a token (8 of int64).
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from fastadv.triton_kernels._forms import aligned_form
from fastadv.triton_kernels._launch import Configuration, blocks, fractional_byte, launch, mask_bytes
from fastadv.triton_kernels._row_tiles import (
    aligned_columns,
    aligned_spans,
    columns,
    launch_counts,
    merge_counts_form,
    row_spans,
    shapes,
    steps_of,
)
from fastadv.triton_kernels._rows import LAYOUT, layout, row_of, rows_from
from torch import Tensor

from fastadv.rows import Rows

BLOCK = 2048  # tokens of a block
COUNT_WARPS = 4  # 16 bytes of the mask a thread
WRITE_WARPS = 8  # two writes of 16 bytes a thread
COUNTS = tl.constexpr(256)  # counts of runs that are read at once
ELEMENTS = 1024  # of a tile of turn_counts: two reads of 16 bytes a thread
LARGEST = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["rows", "width", "count"])
def count_runs_kernel(
    mask,  # [N] uint8
    cu_seqlens,  # [B + 1] int64
    runs,  # [blocks] int32: that begin in the block, in the row of its last token
    rows: tl.int64,
    width: tl.int64,
    count: tl.int64,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    row, end = row_of(cu_seqlens, rows, width, tl.minimum(start + BLOCK, count) - 1, PACKED)
    begin = tl.load(cu_seqlens + row) if PACKED else end - width
    offset = tl.maximum(begin - start, -1).to(tl.int32)  # of the row in the block; -1: it began before
    left = tl.minimum(count - start, BLOCK).to(tl.int32)
    if left == BLOCK:
        m, begins = _begins(mask, start, left, BLOCK, 16, True)
    else:
        m, begins = _begins(mask, start, left, BLOCK, 16, False)
    column = tl.arange(0, BLOCK)
    begins = tl.where(column == offset, (m != 0).to(tl.int32), begins)
    tl.store(runs + tl.program_id(0), tl.sum(tl.where(column >= offset, begins, 0)))


@triton.jit
def _begins(mask, start, left, BLOCK: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr):
    """The mask and whether a run begins, as if all tokens were one row, [BLOCK] each.

    Eight or sixteen tokens, which a thread reads at once, are bits of a number: their neighbours then are a shift away,
    and only the token before them is read once more.
    """
    group = tl.arange(0, BLOCK // VECTOR) * VECTOR  # [BLOCK / VECTOR]
    lane = tl.arange(0, VECTOR)[None, :]
    place = group[:, None] + lane  # [BLOCK / VECTOR, VECTOR]
    m = tl.load(mask + start + place, mask=None if FULL else place < left, other=None if FULL else 0)
    there = (group >= tl.where(start > 0, 0, 1)) & (group < left)
    before = tl.load(mask + start - 1 + group, mask=there, other=0)  # [BLOCK / VECTOR]
    bits = tl.sum((m != 0).to(tl.int32) << lane, axis=1)
    first = bits & ~((bits << 1) | (before != 0).to(tl.int32))
    return tl.reshape(m, [BLOCK]), tl.reshape((first[:, None] >> lane) & 1, [BLOCK])


@triton.jit(do_not_specialize=["rows", "width", "count", "fractional"])
def turn_ids_kernel(
    mask,  # [N] uint8
    cu_seqlens,  # [B + 1] int64
    runs,  # [blocks] int32
    turn_ids,  # [N] int32
    rows: tl.int64,
    width: tl.int64,
    count: tl.int64,
    fractional: tl.int64,  # byte of the mask
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    fractional = fractional.to(tl.int32)
    block = tl.program_id(0).to(tl.int64)
    start = block * BLOCK
    row, end = row_of(cu_seqlens, rows, width, start, PACKED)
    begin = tl.load(cu_seqlens + row) if PACKED else end - width
    earlier = tl.zeros([COUNTS], tl.int32)
    for first in range(tl.maximum(begin, 0) // BLOCK, block, COUNTS):
        of = first + tl.arange(0, COUNTS)
        earlier += tl.load(runs + of, mask=of < block, other=0)
    carry = tl.sum(earlier)  # runs of the first row before this block
    left = tl.minimum(count - start, BLOCK).to(tl.int32)
    column = tl.arange(0, BLOCK)
    if (start + BLOCK <= end) & (end <= count):  # the block lies in one row
        m, begins = _begins(mask, start, left, BLOCK, 8, True)
        offset = tl.maximum(begin - start, -1).to(tl.int32)
        begins = tl.where(column == offset, (m != 0).to(tl.int32), begins)
        turn = carry - 1 + tl.cumsum(begins)
        _store(turn_ids, turn, m, tl.full([BLOCK], 1, tl.int1), fractional, start, left, BLOCK, True)
    else:
        of_token, held = rows_from(row, end, cu_seqlens, rows, width, start, count, BLOCK, PACKED)  # [BLOCK]
        begin_of_token = tl.load(cu_seqlens + of_token) if PACKED else of_token * width
        offsets = tl.maximum(begin_of_token - start, -1).to(tl.int32)  # [BLOCK]: -1 where the row began before
        if PACKED:  # where a false row begins may be outside of the block
            offsets = tl.where(held, offsets, -1)
        if left == BLOCK:
            m, begins = _begins(mask, start, left, BLOCK, 8, True)
            turn = _in_rows(m, begins, offsets, carry, BLOCK)
            _store(turn_ids, turn, m, held, fractional, start, left, BLOCK, True)
        else:
            m, begins = _begins(mask, start, left, BLOCK, 8, False)
            turn = _in_rows(m, begins, offsets, carry, BLOCK)
            _store(turn_ids, turn, m, held, fractional, start, left, BLOCK, False)


@triton.jit
def _in_rows(m, begins, offsets, carry, BLOCK: tl.constexpr):
    """The number of each token's run in its row, [BLOCK], where the token is in one."""
    begins = tl.where(tl.arange(0, BLOCK) == offsets, (m != 0).to(tl.int32), begins)
    seen = tl.cumsum(begins)  # runs begun in this block, this token's included
    others = tl.gather(seen - begins, tl.maximum(offsets, 0), axis=0)  # of them those of rows before
    return seen - others - 1 + tl.where(offsets < 0, carry, 0)


@triton.jit
def _store(turn_ids, turn, m, held, fractional, start, left, BLOCK: tl.constexpr, FULL: tl.constexpr):
    column = tl.arange(0, BLOCK)
    turn = tl.where(m == fractional, -2, tl.where(m != 0, turn, -1))
    turn = tl.where(held, turn, -2)
    tl.store(turn_ids + start + column, turn, mask=None if FULL else column < left)


def turn_ids(mask: Tensor, cu_seqlens: Tensor | None, turn_ids: Tensor) -> int:
    """See `fastadv.ops.turn_ids.TURN_IDS`. A token with a fractional mask, or in no row, gets -2, which no op takes for
    a turn."""
    rows = Rows.trusted(mask, cu_seqlens)
    grid = (blocks(rows.tokens, BLOCK),)
    shared = {"mask": mask_bytes(mask), "runs": turn_ids.new_empty(grid), **layout(rows, turn_ids)}
    written = {"turn_ids": turn_ids, "fractional": fractional_byte(mask)}
    constants = {"BLOCK": BLOCK, "PACKED": cu_seqlens is not None}
    launch(count_runs_kernel, grid, shared, constants, num_warps=COUNT_WARPS)
    launch(turn_ids_kernel, grid, {**shared, **written}, constants, num_warps=WRITE_WARPS)
    return 0


@triton.jit(do_not_specialize=["rows", "width", "count", "packed"])
def turn_counts_kernel(
    turn_ids,  # [N] int32 or int64
    cu_seqlens,  # [B + 1] int64
    counts,  # [B, parts] int64
    rows: tl.int64,
    width: tl.int64,
    count: tl.int64,
    packed: tl.int64,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, begin, end, false = row_spans(cu_seqlens, rows, width, count, packed, ROWS)  # [ROWS]
    low, high, rest = aligned_spans(begin, end, count)
    part, steps, parts = steps_of(low, high, WIDTH)
    column = tl.arange(0, WIDTH)[None, :]  # [1, WIDTH]
    largest = tl.full([ROWS, WIDTH], -1, tl.int32)
    smallest = tl.full([ROWS, WIDTH], -1, tl.int32)
    for step in range(part, steps, parts):
        at = low + tl.full((), WIDTH, tl.int64) * step  # [ROWS]
        turn = _turns(turn_ids, column < aligned_columns(high, at, WIDTH), begin, end, at, WIDTH)
        largest, smallest = tl.maximum(largest, turn), tl.minimum(smallest, turn)
    if (part == 0) & (tl.max(end) > rest):
        at = tl.maximum(begin, rest)
        turn = _turns(turn_ids, column < columns(end, at, WIDTH), begin, end, at, WIDTH)
        largest, smallest = tl.maximum(largest, turn), tl.minimum(smallest, turn)
    turns = tl.max(largest, axis=1).to(tl.int64) + 1  # [ROWS]
    turns = tl.where(false | (tl.min(smallest, axis=1) < -1), -1, turns)
    tl.store(counts + row * parts + part, turns, mask=row < rows)


@triton.jit
def _turns(turn_ids, read, begin, end, at, WIDTH: tl.constexpr):
    """Turn ids of a step, [ROWS, WIDTH] int32, in which one beyond int32 stays a large one or one below -1."""
    column = tl.arange(0, WIDTH)[None, :]
    turn = tl.load(turn_ids + at[:, None] + column, mask=read, other=-1)
    inside = (column >= columns(begin, at, WIDTH)) & (column < columns(end, at, WIDTH))
    return tl.where(inside, tl.minimum(tl.maximum(turn, -2), LARGEST).to(tl.int32), -1)


def turn_counts(turn_ids: Tensor, cu_seqlens: Tensor | None, counts: Tensor) -> int:
    """See `fastadv.ops.turn_ids.TURN_COUNTS`. A row with a value below -1, and a false one, gets a count of -1."""
    stream = {"turn_ids": turn_ids.contiguous()}
    rows = Rows.trusted(turn_ids, cu_seqlens)
    launch_counts(turn_counts_kernel, stream, rows, counts, elements=ELEMENTS, largest=True)
    return 0


# The mask, a byte of the five that turn_ids_kernel moves a token, comes eight bytes at a time: sixteen tokens a thread
# take twice the registers.
STREAMING = (count_runs_kernel, turn_counts_kernel)


def configurations() -> Iterator[Configuration]:
    """Every form that a launch can ask for, with aligned pointers."""
    shared = {"mask": "*u8", "runs": "*i32", **LAYOUT}
    for packed in (True, False):
        constants = {"BLOCK": BLOCK, "PACKED": packed}
        yield aligned_form(count_runs_kernel, shared, constants, num_warps=COUNT_WARPS)
        written = {"turn_ids": "*i32", "fractional": "i64"}
        yield aligned_form(turn_ids_kernel, {**shared, **written}, constants, num_warps=WRITE_WARPS)
    for ids in ("*i32", "*i64"):
        for shape in shapes(ELEMENTS):
            arguments = {"turn_ids": ids, "counts": "*i64", **LAYOUT, "packed": "i64"}
            yield aligned_form(turn_counts_kernel, arguments, shape)
    yield merge_counts_form(largest=True)


def bytes_moved(tokens: int, rows: int) -> int:
    """What turn_ids has to read and write, packed."""
    return tokens * 5 + 8 * (rows + 1)


def counts_bytes_moved(tokens: int, rows: int, *, ids: int = 4) -> int:
    """What turn_counts has to read and write, packed; `ids` are the bytes of a turn id."""
    return tokens * ids + 8 * (rows + 1) + 8 * rows
