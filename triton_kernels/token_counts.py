"""Tokens that count, by row.

One launch, two where rows are few and long. Reads 1 byte a token.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from fastadv.triton_kernels._forms import aligned_form
from fastadv.triton_kernels._launch import Configuration, fractional_byte, mask_bytes
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
from fastadv.triton_kernels._rows import LAYOUT
from torch import Tensor

from fastadv.rows import Rows

ELEMENTS = 2048  # of a tile: 16 bytes a thread
UNKNOWN = tl.constexpr(-(2**62))  # the count of a row that has none: nothing plausible comes of it
FOUND_BAD = tl.constexpr(2**30)  # a bit beside an element's count, which is one of steps and does not reach it


@triton.jit(do_not_specialize=["rows", "width", "count", "packed", "fractional"])
def token_counts_kernel(
    mask,  # [N] uint8
    cu_seqlens,  # [B + 1] int64
    counts,  # [B, parts] int64
    rows: tl.int64,
    width: tl.int64,
    count: tl.int64,
    packed: tl.int64,
    fractional: tl.int64,  # byte of the mask
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    fractional = fractional.to(tl.int32)
    row, begin, end, false = row_spans(cu_seqlens, rows, width, count, packed, ROWS)  # [ROWS]
    low, high, rest = aligned_spans(begin, end, count)
    part, steps, parts = steps_of(low, high, WIDTH)
    column = tl.arange(0, WIDTH)[None, :]  # [1, WIDTH]
    seen = tl.zeros([ROWS, WIDTH], tl.int32)
    for step in range(part, steps, parts):
        at = low + tl.full((), WIDTH, tl.int64) * step  # [ROWS]
        seen = _add(seen, mask, fractional, column < aligned_columns(high, at, WIDTH), begin, end, at, WIDTH)
    if (part == 0) & (tl.max(end) > rest):
        at = tl.maximum(begin, rest)
        seen = _add(seen, mask, fractional, column < columns(end, at, WIDTH), begin, end, at, WIDTH)
    total = tl.sum((seen & (FOUND_BAD - 1)).to(tl.int64), axis=1)  # [ROWS]
    total = tl.where(false | (tl.max(seen, axis=1) >= FOUND_BAD), UNKNOWN, total)
    tl.store(counts + row * parts + part, total, mask=row < rows)


@triton.jit
def _add(seen, mask, fractional, read, begin, end, at, WIDTH: tl.constexpr):
    """What one step adds to each element of the tile."""
    column = tl.arange(0, WIDTH)[None, :]
    m = tl.load(mask + at[:, None] + column, mask=read, other=0)  # [ROWS, WIDTH]
    on = (column >= columns(begin, at, WIDTH)) & (column < columns(end, at, WIDTH)) & (m != 0)
    return tl.where(on & (m == fractional), seen | FOUND_BAD, seen + on.to(tl.int32))


def token_counts(mask: Tensor, cu_seqlens: Tensor | None, counts: Tensor) -> int:
    """See `fastadv.ops.token_counts.TOKEN_COUNTS`. A row with a fractional mask, and a false one, gets a count of
    UNKNOWN."""
    stream = {"mask": mask_bytes(mask), "fractional": fractional_byte(mask)}
    rows = Rows.trusted(mask, cu_seqlens)
    launch_counts(token_counts_kernel, stream, rows, counts, elements=ELEMENTS, largest=False)
    return 0


STREAMING = (token_counts_kernel,)


def configurations() -> Iterator[Configuration]:
    """Every form that a launch can ask for, with aligned pointers."""
    arguments = {"mask": "*u8", "fractional": "i64", "counts": "*i64", **LAYOUT, "packed": "i64"}
    for shape in shapes(ELEMENTS):
        yield aligned_form(token_counts_kernel, arguments, shape)
    yield merge_counts_form(largest=False)


def bytes_moved(tokens: int, rows: int) -> int:
    """What the op has to read and write, packed."""
    return tokens + 8 * (rows + 1) + 8 * rows
