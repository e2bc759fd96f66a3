"""Which rollout a token belongs to, for kernels that walk over tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastadv.rows import Rows

LAYOUT = {"cu_seqlens": "*i64", "rows": "i64", "width": "i64", "count": "i64"}  # types of what `layout` returns
SEARCH = tl.constexpr(32)  # offsets that one step of the search looks at: a warp reads them at once, no barrier


def layout(rows: Rows, like: Tensor) -> dict[str, Tensor | int]:
    """A layout as arguments of a kernel. Padded tokens have no `cu_seqlens`, packed ones a width of 0."""
    packed = rows.cu_seqlens is not None
    cu_seqlens = rows.cu_seqlens if packed else like.new_empty(0, dtype=torch.int64)
    width = 0 if packed else rows.shape[1]
    return {"cu_seqlens": cu_seqlens, "rows": rows.count, "width": width, "count": rows.tokens}


@triton.jit
def last_row_from(cu_seqlens, rows, token):
    """The last row r with cu_seqlens[r] <= token, which holds the token: two reads up to a thousand rows, four up to a
    million.

    `cu_seqlens` is [rows + 1] int64, `rows` at least 1; `token` is a scalar. Where nobody checked the offsets, it is
    one of the rows whatever they are, and of two tokens not an earlier one for the later.
    """
    first = tl.zeros((), tl.int64)
    left = rows.to(tl.int64)  # rows among which it is: first, ..., first + left - 1
    while left > 1:
        step = tl.cdiv(left, SEARCH)
        places = tl.arange(0, SEARCH).to(tl.int64) * step  # [SEARCH]
        inside = places < left
        starts = tl.load(cu_seqlens + first + places, mask=inside, other=0)  # [SEARCH]
        below = tl.maximum(tl.sum((inside & (starts <= token)).to(tl.int32)) - 1, 0)
        first += below * step
        left = tl.minimum(step, left - below * step)
    return first


@triton.jit
def row_of(cu_seqlens, rows, width, token, PACKED: tl.constexpr):
    """The row of one token and where it ends: (row, end). A block that ends there lies in one row.

    A row that does not hold the token, or begins below 0, which only false offsets do, ends at the token: no block
    lies in it.
    """
    if PACKED:
        row = last_row_from(cu_seqlens, rows, token)
        begin = tl.load(cu_seqlens + row)
        end = tl.where((begin < 0) | (begin > token), token, tl.load(cu_seqlens + row + 1))
    else:
        row = token // width
        end = (row + 1) * width
    return row, end


@triton.jit
def rows_from(first, end, cu_seqlens, rows, width, start, tokens, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """The row of each of the tokens start, ..., start + BLOCK - 1, [BLOCK] int64, where `row_of` gave (first, end) for
    the first of them; past the last token, any row. And whether the row holds the token and lies among the tokens: it
    does unless the offsets are false.

    Offsets within the block are int32: half the instructions of int64 ones. False ones may wrap around and find another
    row, of which the last lines say that it does not hold the token.
    """
    place = tl.arange(0, BLOCK)  # [BLOCK]
    if PACKED:
        later = (last_row_from(cu_seqlens, rows, tl.minimum(start + BLOCK, tokens) - 1) - first).to(tl.int32)
        step = tl.full((), 1, tl.int32)
        while step <= later // 2:
            step *= 2
        low = tl.zeros([BLOCK], tl.int32)  # rows after the first that are known to begin at or before the token
        while step > 0:
            middle = low + step  # [BLOCK]
            inside = middle <= later
            begin = tl.load(cu_seqlens + first + middle, mask=inside, other=0)  # [BLOCK]
            low = tl.where(inside & ((begin - start).to(tl.int32) <= place), middle, low)
            step = step // 2
        begins = tl.load(cu_seqlens + (first + low))  # [BLOCK]
        ends = tl.load(cu_seqlens + (first + low) + 1)  # [BLOCK]
        token = start + place
        held = (begins >= 0) & (begins <= token) & (token < ends) & (ends <= tokens)
    else:
        low = (place >= tl.minimum(end - start, BLOCK).to(tl.int32)).to(tl.int32)
        if width < BLOCK:
            # Below 2 * BLOCK a quotient of floats is right: it misses by less than the half that was added.
            before = (start - first * width).to(tl.int32)
            low = ((before + place).to(tl.float32) + 0.5) / width.to(tl.float32)
            low = low.to(tl.int32)
        low = tl.minimum(low, tl.minimum(rows - 1 - first, BLOCK).to(tl.int32))
        held = tl.full([BLOCK], 1, tl.int1)
    return first + low, held


@triton.jit
def rows_of_tokens(cu_seqlens, rows, width, start, tokens, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """The row of each of the tokens start, ..., start + BLOCK - 1, [BLOCK] int64; past the last token, any row. And
    whether the row holds the token.

    Packed tokens have `cu_seqlens` [rows + 1]; padded ones have rows of `width`. A kernel to which it matters that most
    blocks of long rollouts lie in one row calls `row_of`, and `rows_from` for the others.
    """
    first, end = row_of(cu_seqlens, rows, width, start, PACKED)
    return rows_from(first, end, cu_seqlens, rows, width, start, tokens, BLOCK, PACKED)
