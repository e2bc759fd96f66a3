"""One result a rollout, from all of its tokens: how the rows are dealt out to programs.

A program takes a tile, one row by many tokens, or many rows by few tokens where the rows of a batch are short on
average, and moves it along its rows. Where rows are few and long, several programs share a tile, each taking every
`parts`-th step, and a second kernel puts together what they found, in a fixed order. The shape of the tile and the
number of parts follow from the numbers of rows and tokens, which the host knows: nothing waits for the lengths. So a
single row of any length keeps a GPU busy, and a hundred thousand rows of forty tokens are a few thousand programs of
one launch. (Cutting the flat stream of tokens into blocks would be even in every case, but the sums by row of a block
with many short rows need a segmented scan.) The price: a row many times as long as the average is left to few programs,
half a microsecond a step.

A row's tokens begin anywhere, and 16 bytes can be read from multiples of ALIGN tokens only. A program therefore reads
from the multiple before its row to the one after, and selects; what is left at the end of the tensor is read by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from fastadv.triton_kernels._forms import aligned_form
from fastadv.triton_kernels._launch import Configuration, blocks, launch
from fastadv.triton_kernels._rows import layout
from torch import Tensor

from fastadv.rows import Rows

ALIGN = tl.constexpr(16)  # tokens: 16 bytes of a mask, the smallest type
SHORT = 512  # average tokens a row below which a tile has many rows
SHORT_WIDTH = 64  # tokens of such a tile
PROGRAMS = 2048  # more do not make a GPU faster
STEPS = 4  # of a part of an average row: fewer are not worth a second launch
PARTS = 512  # at most
MERGE = 32  # rows and parts that the second kernel looks at together


class Tiles(NamedTuple):
    """How a batch is dealt out: tiles of `rows` x `width` tokens, `parts` programs to each."""

    rows: int
    width: int
    parts: int
    grid: tuple[int, int]


def tiles(rows: Rows, elements: int) -> Tiles:
    """The tiles for a batch, each of this many elements."""
    height = elements // SHORT_WIDTH if rows.tokens < SHORT * rows.count else 1
    width = elements // height
    across = triton.cdiv(rows.count, height)
    steps = triton.cdiv(rows.tokens, max(1, rows.count) * width)  # of an average row
    parts = max(1, min(PROGRAMS // max(1, across), triton.cdiv(steps, STEPS), PARTS))
    return Tiles(height, width, parts, (across, parts))


def shapes(elements: int) -> tuple[dict[str, int], ...]:
    """The constants ROWS and WIDTH that `tiles` chooses from."""
    return ({"ROWS": 1, "WIDTH": elements}, {"ROWS": elements // SHORT_WIDTH, "WIDTH": SHORT_WIDTH})


@triton.jit
def row_spans(cu_seqlens, rows, width, count, packed, ROWS: tl.constexpr):
    """The rows of this program's tile and the tokens [begin, end) of each, [ROWS] int64; rows past the last are empty.

    Also which rows are false: those that are not among the tokens, end before they begin, or leave out the first or the
    last token. They are empty too.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    looked_up = row < tl.where(packed != 0, rows, 0)
    begin = tl.load(cu_seqlens + row, mask=looked_up, other=0)
    end = tl.load(cu_seqlens + row + 1, mask=looked_up, other=0)
    gap = ((row == 0) & (begin != 0)) | ((row == rows - 1) & (end != count))
    false = looked_up & ((begin < 0) | (end < begin) | (end > count) | gap)
    padded = row < tl.where(packed != 0, 0, rows)
    begin = tl.where(padded, row * width, tl.where(false, 0, begin))
    return row, begin, tl.where(padded, (row + 1) * width, tl.where(false, 0, end)), false


@triton.jit
def aligned_spans(begin, end, count):
    """The tokens [low, high) that a tile reads 16 bytes at a time, [ROWS], and where the rest of `count` begins."""
    whole = count // ALIGN * ALIGN
    return begin // ALIGN * ALIGN, tl.minimum(tl.cdiv(end, ALIGN) * ALIGN, whole), whole


@triton.jit
def steps_of(low, high, WIDTH: tl.constexpr):
    """The steps of this program's part, as a range: (first, end, stride)."""
    return tl.program_id(1), tl.max(tl.cdiv(high - low, WIDTH)).to(tl.int32), tl.num_programs(1)


@triton.jit
def columns(token, at, WIDTH: tl.constexpr):
    """How many of the tokens at, ..., at + WIDTH - 1 are before `token`, [ROWS, 1] int32: int64 comparisons of every
    element would take twice the registers."""
    return tl.minimum(tl.maximum(token - at, 0), WIDTH).to(tl.int32)[:, None]


@triton.jit
def aligned_columns(high, at, WIDTH: tl.constexpr):
    """The same for an end that is a multiple of ALIGN, as one that the compiler sees to be a multiple."""
    return columns(high, at, WIDTH) // ALIGN * ALIGN


@triton.jit(do_not_specialize=["rows", "parts"])
def merge_counts_kernel(
    counts,  # [B, parts] int64
    out,  # [B] int64
    rows: tl.int64,
    parts: tl.int64,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    merged = tl.zeros([BLOCK, BLOCK], tl.int64)
    smallest = tl.zeros([BLOCK, BLOCK], tl.int64)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        there = (row < rows)[:, None] & (part < parts)[None, :]
        x = tl.load(counts + row[:, None] * parts + part[None, :], mask=there, other=0)  # [BLOCK, BLOCK]
        merged = tl.maximum(merged, x) if LARGEST else merged + x
        smallest = tl.minimum(smallest, x)
    bad = tl.min(smallest, axis=1)  # [BLOCK]
    total = tl.max(merged, axis=1) if LARGEST else tl.sum(merged, axis=1)
    tl.store(out + row, tl.where(bad < 0, bad, total), mask=row < rows)


def launch_counts(
    kernel: Any, stream: dict[str, Tensor | int], rows: Rows, counts: Tensor, *, elements: int, largest: bool
) -> None:
    """Starts a kernel, with its own arguments, that writes a count [B, parts] of each row's part of `stream`, and puts
    the parts together."""
    cut = tiles(rows, elements)
    partial = counts if cut.parts == 1 else counts.new_empty((rows.count, cut.parts))
    packed = int(rows.cu_seqlens is not None)
    arguments = {**stream, "counts": partial, **layout(rows, counts), "packed": packed}
    launch(kernel, cut.grid, arguments, {"ROWS": cut.rows, "WIDTH": cut.width})
    if cut.parts > 1:
        merge_counts(partial, counts, largest=largest)


def merge_counts(counts: Tensor, out: Tensor, *, largest: bool) -> None:
    """Puts the parts' counts [B, parts] together: their sum or the largest, or the negative number that one is."""
    rows, parts = counts.shape
    arguments = {"counts": counts, "out": out, "rows": rows, "parts": parts}
    launch(merge_counts_kernel, (blocks(rows, MERGE),), arguments, {"BLOCK": MERGE, "LARGEST": largest})


def merge_counts_form(*, largest: bool) -> Configuration:
    """The form of the kernel of `merge_counts`."""
    arguments = {"counts": "*i64", "out": "*i64", "rows": "i64", "parts": "i64"}
    return aligned_form(merge_counts_kernel, arguments, {"BLOCK": MERGE, "LARGEST": largest})
