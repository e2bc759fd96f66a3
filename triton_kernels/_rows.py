"""Which rollout a token belongs to, for kernels that walk over tokens."""

from __future__ import annotations

import triton
import triton.language as tl

SEARCH = tl.constexpr(1024)  # offsets that one step of the search looks at


@triton.jit
def last_row_from(cu_seqlens, rows, token):
    """The last row r with cu_seqlens[r] <= token, which holds the token: two reads up to a million rows.

    `cu_seqlens` is [rows + 1] int64 and starts with 0; `token` is a scalar below cu_seqlens[rows].
    """
    first = tl.zeros((), tl.int64)
    left = rows  # rows among which it is: first, ..., first + left - 1
    while left > 1:
        step = tl.cdiv(left, SEARCH)
        places = tl.arange(0, SEARCH).to(tl.int64) * step  # [SEARCH]
        inside = places < left
        starts = tl.load(cu_seqlens + first + places, mask=inside, other=0)  # [SEARCH]
        below = tl.sum((inside & (starts <= token)).to(tl.int64)) - 1
        first += below * step
        left = tl.minimum(step, left - below * step)
    return first


@triton.jit
def rows_of_tokens(cu_seqlens, rows, width, start, tokens, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """The row of each of the tokens start, ..., start + BLOCK - 1, [BLOCK] int64; past the last token, any row.

    Packed tokens have `cu_seqlens` [rows + 1]; padded ones have rows of `width`. A block within one row, the usual case
    of long rollouts, looks at no offset twice.
    """
    token = start + tl.arange(0, BLOCK)  # [BLOCK] int64
    if PACKED:
        first = last_row_from(cu_seqlens, rows, start)
        last = last_row_from(cu_seqlens, rows, tl.minimum(start + BLOCK, tokens) - 1)
        low = tl.zeros([BLOCK], tl.int64) + first  # [BLOCK]
        high = tl.zeros([BLOCK], tl.int64) + last  # [BLOCK]
        left = last - first
        while left > 0:
            middle = (low + high + 1) // 2  # [BLOCK]
            reached = tl.load(cu_seqlens + middle) <= token  # [BLOCK]
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle - 1)
            left = left // 2
        return low
    else:
        first = start // width
        return tl.minimum(first + (start - first * width + tl.arange(0, BLOCK)) // width, rows - 1)
