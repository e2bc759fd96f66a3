"""Log-ratios of whole rollouts.

One launch, two where rows are few and long. Reads 9 bytes a token in float32, 5 in bfloat16.

Differences and their sums are float32 along one element of a tile, with what rounding takes from them kept beside; sums
of elements and of parts are float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from fastadv.triton_kernels._forms import aligned_form
from fastadv.triton_kernels._launch import TYPES, Configuration, blocks, fractional_byte, launch, mask_bytes
from fastadv.triton_kernels._row_tiles import (
    aligned_columns,
    aligned_spans,
    columns,
    row_spans,
    shapes,
    steps_of,
    tiles,
)
from fastadv.triton_kernels._rows import LAYOUT, layout
from torch import Tensor

from fastadv.rows import Rows

ELEMENTS = 1024  # of a tile: two reads of 16 bytes a thread and stream
MERGE_ROWS = 16  # of a tile of the second kernel
MERGE = {"ROWS": MERGE_ROWS, "PARTS": 32}
PARTIAL = {"sums": "*fp64", "minima": "*fp64", "tokens": "*i64", "missing": "*i64"}
OUT = {"out_sum": "*fp64", "out_minimum": "*fp64", "out_tokens": "*i64", "out_missing": "*i64"}
UNKNOWN = tl.constexpr(-(2**62))  # the tokens of a row that has no count, whose sum and minimum are NaN
FOUND_BAD = tl.constexpr(2**30)  # a bit beside an element's count, which is one of steps and does not reach it


@triton.jit(do_not_specialize=["rows", "width", "count", "packed", "skip_missing", "fractional"])
def sequence_log_ratios_kernel(
    log_probs,  # [N] float32, bfloat16 or float16
    old_log_probs,  # [N] likewise
    mask,  # [N] uint8
    cu_seqlens,  # [B + 1] int64
    sums,  # [B, parts] float64
    minima,  # [B, parts] float64
    tokens,  # [B, parts] int64
    missing,  # [B, parts] int64
    rows: tl.int64,
    width: tl.int64,
    count: tl.int64,
    packed: tl.int64,
    skip_missing: tl.int64,
    fractional: tl.int64,  # byte of the mask
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    fractional = fractional.to(tl.int32)
    row, begin, end, false = row_spans(cu_seqlens, rows, width, count, packed, ROWS)  # [ROWS]
    low, high, rest = aligned_spans(begin, end, count)
    part, steps, parts = steps_of(low, high, WIDTH)
    column = tl.arange(0, WIDTH)[None, :]  # [1, WIDTH]
    without_old = tl.where(skip_missing != 0, 0.0, float("nan"))  # the log-ratio of a token whose old log-prob is NaN
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    error = tl.zeros([ROWS, WIDTH], tl.float32)  # what rounding took from total: a long row has thousands of steps
    least = tl.zeros([ROWS, WIDTH], tl.float32)
    seen = tl.zeros([ROWS, WIDTH], tl.int32)
    absent = tl.zeros([ROWS, WIDTH], tl.int32)
    for step in range(part, steps, parts):
        at = low + tl.full((), WIDTH, tl.int64) * step  # [ROWS]
        total, error, least, seen, absent = _add(
            total, error, least, seen, absent, log_probs, old_log_probs, mask, fractional, without_old,
            column < aligned_columns(high, at, WIDTH), begin, end, at, WIDTH,
        )  # fmt: skip
    if (part == 0) & (tl.max(end) > rest):
        at = tl.maximum(begin, rest)
        total, error, least, seen, absent = _add(
            total, error, least, seen, absent, log_probs, old_log_probs, mask, fractional, without_old,
            column < columns(end, at, WIDTH), begin, end, at, WIDTH,
        )  # fmt: skip
    error = tl.where(error == error, error, 0.0)  # beside a sum that is not finite
    known = ~false & (tl.max(seen, axis=1) < FOUND_BAD)
    there = row < rows
    place = row * parts + part
    result = tl.sum(total.to(tl.float64) + error.to(tl.float64), axis=1)
    nan = float("nan")
    tl.store(sums + place, tl.where(known, result, nan), mask=there)
    tl.store(minima + place, tl.where(known, tl.min(least, axis=1).to(tl.float64), nan), mask=there)
    counted = tl.sum((seen & (FOUND_BAD - 1)).to(tl.int64), axis=1)
    tl.store(tokens + place, tl.where(known, counted, UNKNOWN), mask=there)
    tl.store(missing + place, tl.sum(absent.to(tl.int64), axis=1), mask=there)


@triton.jit
def _add(
    total, error, least, seen, absent, log_probs, old_log_probs, mask, fractional, without_old,
    read, begin, end, at, WIDTH: tl.constexpr,
):  # fmt: skip
    """What one step adds to each element of the tile."""
    column = tl.arange(0, WIDTH)[None, :]
    m = tl.load(mask + at[:, None] + column, mask=read, other=0)  # [ROWS, WIDTH]
    new = tl.load(log_probs + at[:, None] + column, mask=read, other=0.0).to(tl.float32)
    old = tl.load(old_log_probs + at[:, None] + column, mask=read, other=0.0).to(tl.float32)
    on = (column >= columns(begin, at, WIDTH)) & (column < columns(end, at, WIDTH)) & (m != 0)
    new, old = tl.where(on, new, 0.0), tl.where(on, old, 0.0)  # what is under the mask enters no arithmetic
    lacks = old != old
    x = tl.where(lacks, without_old, new - old)
    wider = total + x
    part = wider - total
    error += (total - (wider - part)) + (x - part)  # exact, where nothing is fused
    least = tl.minimum(least, x)  # of a NaN and a number the number: the NaN stays visible in the sum
    seen = tl.where(on & (m == fractional), seen | FOUND_BAD, seen + on.to(tl.int32))
    return wider, error, least, seen, absent + lacks.to(tl.int32)


@triton.jit(do_not_specialize=["rows", "parts"])
def merge_log_ratios_kernel(
    sums,  # [B, parts] float64
    minima,  # [B, parts] float64
    tokens,  # [B, parts] int64
    missing,  # [B, parts] int64
    out_sum,  # [B] float64
    out_minimum,  # [B] float64
    out_tokens,  # [B] int64
    out_missing,  # [B] int64
    rows: tl.int64,
    parts: tl.int64,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    total = tl.zeros([ROWS, PARTS], tl.float64)
    least = tl.zeros([ROWS, PARTS], tl.float64)
    counted = tl.zeros([ROWS, PARTS], tl.int64)
    unknown = tl.zeros([ROWS, PARTS], tl.int64)
    absent = tl.zeros([ROWS, PARTS], tl.int64)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = (row < rows)[:, None] & (part < parts)[None, :]
        place = row[:, None] * parts + part[None, :]  # [ROWS, PARTS]
        total += tl.load(sums + place, mask=there, other=0.0)
        x = tl.load(minima + place, mask=there, other=0.0)
        least = tl.where(x < least, x, least)
        n = tl.load(tokens + place, mask=there, other=0)
        counted += n
        unknown = tl.minimum(unknown, n)
        absent += tl.load(missing + place, mask=there, other=0)
    known = tl.min(unknown, axis=1) >= 0
    nan = float("nan")
    tl.store(out_sum + row, tl.sum(total, axis=1), mask=row < rows)  # NaN where a part is
    tl.store(out_minimum + row, tl.where(known, tl.min(least, axis=1), nan), mask=row < rows)
    tl.store(out_tokens + row, tl.where(known, tl.sum(counted, axis=1), UNKNOWN), mask=row < rows)
    tl.store(out_missing + row, tl.sum(absent, axis=1), mask=row < rows)


def sequence_log_ratios(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    skip_missing: bool,
    out: list[Tensor],
) -> int:
    """See `fastadv.ops.sequence_log_ratios.SEQUENCE_LOG_RATIOS`. A row with a fractional mask, and a false
    one, gets sums of NaN."""
    rows = Rows.trusted(mask, cu_seqlens)
    cut = tiles(rows, ELEMENTS)
    partial = out if cut.parts == 1 else [t.new_empty((rows.count, cut.parts)) for t in out]
    sums = dict(zip(PARTIAL, partial, strict=True))
    launch(
        sequence_log_ratios_kernel,
        cut.grid,
        {
            "log_probs": log_probs.contiguous(),
            "old_log_probs": old_log_probs.contiguous(),
            "mask": mask_bytes(mask),
            **sums,
            **layout(rows, log_probs),
            "packed": int(cu_seqlens is not None),
            "skip_missing": int(skip_missing),
            "fractional": fractional_byte(mask),
        },
        {"ROWS": cut.rows, "WIDTH": cut.width},
    )
    if cut.parts > 1:
        arguments = {**sums, **dict(zip(OUT, out, strict=True)), "rows": rows.count, "parts": cut.parts}
        launch(merge_log_ratios_kernel, (blocks(rows.count, MERGE_ROWS),), arguments, MERGE)
    return 0


STREAMING = (sequence_log_ratios_kernel,)


def configurations() -> Iterator[Configuration]:
    """Every form that a launch can ask for, with aligned pointers."""
    floats = ["*" + TYPES[dtype] for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    numbers = {**LAYOUT, "packed": "i64", "skip_missing": "i64", "fractional": "i64"}
    for new in floats:
        for old in floats:
            arguments = {"log_probs": new, "old_log_probs": old, "mask": "*u8", **PARTIAL, **numbers}
            for shape in shapes(ELEMENTS):
                yield aligned_form(sequence_log_ratios_kernel, arguments, shape)
    yield aligned_form(merge_log_ratios_kernel, {**PARTIAL, **OUT, "rows": "i64", "parts": "i64"}, MERGE)


def bytes_moved(tokens: int, rows: int, *, new: int = 4, old: int = 4) -> int:
    """What the op has to read and write, packed; `new` and `old` are the bytes of a log-prob."""
    return tokens * (new + old + 1) + 8 * (rows + 1) + 32 * rows
