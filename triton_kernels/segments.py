"""Values of a segment table at each token.

One launch. Reads 4 bytes of turn_ids a token (8 of int64), 1 of the mask if there is one, and writes 4 (8 of float64);
the table stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl
from fastadv.triton_kernels._forms import aligned_form
from fastadv.triton_kernels._launch import NO_BYTE, Configuration, blocks, fractional_byte, launch, mask_bytes
from fastadv.triton_kernels._rows import LAYOUT, layout, row_of, rows_from
from torch import Tensor

from fastadv.rows import Rows

BLOCK = 2048
WARPS = 8  # eight tokens a thread: two reads of 16 bytes


@triton.jit(do_not_specialize=["rows", "width", "count", "size", "fractional"])
def segment_tokens_kernel(
    values,  # [S] float32 or float64
    offsets,  # [B + 1] int64
    turn_ids,  # [N] int32 or int64
    mask,  # [N] uint8
    cu_seqlens,  # [B + 1] int64
    tokens,  # [N] like values
    rows: tl.int64,
    width: tl.int64,
    count: tl.int64,
    size: tl.int64,  # S
    fractional: tl.int64,  # byte of the mask
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
):
    fractional = fractional.to(tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    row, end = row_of(cu_seqlens, rows, width, start, PACKED)
    if (start + BLOCK <= end) & (end <= count):  # the block lies in one row
        first, turns = _turns(offsets, row, size, True)
        _block(values + first, turns, turn_ids, mask, fractional, tokens, start, count, BLOCK, MASKED, True)
    else:
        of_token, held = rows_from(row, end, cu_seqlens, rows, width, start, count, BLOCK, PACKED)  # [BLOCK]
        firsts, lengths = _turns(offsets, of_token, size, held)  # [BLOCK]
        if start + BLOCK <= count:  # no mask on the main stream: the compiler then moves 16 bytes at a time
            _block(values + firsts, lengths, turn_ids, mask, fractional, tokens, start, count, BLOCK, MASKED, True)
        else:
            _block(values + firsts, lengths, turn_ids, mask, fractional, tokens, start, count, BLOCK, MASKED, False)


@triton.jit
def _turns(offsets, row, size, held):
    """The first segment of a row and how many it has: none, if it has any beyond the table or does not hold its
    token."""
    first = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    # As unsigned numbers, negative ones are the largest.
    inside = held & (first.to(tl.uint64) <= end.to(tl.uint64)) & (end.to(tl.uint64) <= size.to(tl.uint64))
    return first, tl.where(inside, tl.minimum(end - first, 2**31 - 1), 0).to(tl.int32)


@triton.jit
def _block(
    table,  # of the one row, or of each token's
    turns,  # likewise
    turn_ids, mask, fractional, tokens, start, count,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    token = start + tl.arange(0, BLOCK)  # [BLOCK]
    inside = None if FULL else token < count
    turn = tl.load(turn_ids + token, mask=inside, other=None if FULL else -1)  # [BLOCK]
    known = (turn >= 0) & (turn < turns)
    wrong = (turn != -1) & ~known
    if MASKED:
        m = tl.load(mask + token, mask=inside, other=None if FULL else 0).to(tl.int32)
        on = m != 0
        wrong = on & (wrong | (m == fractional))
        known = on & known
    value = tl.load(table + turn, mask=known, other=0.0)  # [BLOCK]
    value = tl.where(wrong, float("nan"), value)
    tl.store(tokens + token, value, mask=inside)


def segment_tokens(
    values: Tensor, offsets: Tensor, turn_ids: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None, tokens: Tensor
) -> int:
    """See `fastadv.ops.segments.SEGMENT_TOKENS`. A turn that the row or the table lacks gets NaN, as does a token in no
    row."""
    rows = Rows.trusted(turn_ids, cu_seqlens)
    arguments = {
        "values": values,
        "offsets": offsets,
        "turn_ids": turn_ids.contiguous(),
        "mask": mask_bytes(mask) if mask is not None else values.new_empty(0, dtype=torch.uint8),
        "tokens": tokens,
        **layout(rows, values),
        "size": values.shape[0],
        "fractional": NO_BYTE if mask is None else fractional_byte(mask),
    }
    constants = {"BLOCK": BLOCK, "PACKED": cu_seqlens is not None, "MASKED": mask is not None}
    launch(segment_tokens_kernel, (blocks(rows.tokens, BLOCK),), arguments, constants, num_warps=WARPS)
    return 0


STREAMING = (segment_tokens_kernel,)


def configurations() -> Iterator[Configuration]:
    """Every form that a launch can ask for, with aligned pointers."""
    for values, ids, packed, masked in product(("*fp32", "*fp64"), ("*i32", "*i64"), (True, False), (True, False)):
        arguments = {
            "values": values, "offsets": "*i64", "turn_ids": ids, "mask": "*u8", "tokens": values, **LAYOUT,
            "size": "i64", "fractional": "i64",
        }  # fmt: skip
        constants = {"BLOCK": BLOCK, "PACKED": packed, "MASKED": masked}
        yield aligned_form(segment_tokens_kernel, arguments, constants, num_warps=WARPS)


def bytes_moved(tokens: int, rows: int, segments: int, *, ids: int = 4, values: int = 4, masked: bool = False) -> int:
    """What the op has to read and write, packed; `ids` and `values` are the bytes of a turn id and of a value."""
    return tokens * (ids + values + masked) + segments * values + 16 * (rows + 1)
