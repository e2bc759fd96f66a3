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
from fastadv.triton_kernels._launch import FRACTIONAL, Configuration, blocks, launch, mask_bytes
from fastadv.triton_kernels._rows import LAYOUT, layout, row_of, rows_from
from torch import Tensor

from fastadv.rows import Rows

BLOCK = 2048
WARPS = 8  # eight tokens a thread: two reads of 16 bytes
BAD = tl.constexpr(FRACTIONAL)


@triton.jit(do_not_specialize=["rows", "width", "count"])
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
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    row, end = row_of(cu_seqlens, rows, width, start, PACKED)
    if start + BLOCK <= tl.minimum(end, count):  # the block lies in one row
        first = tl.load(offsets + row)
        turns = tl.load(offsets + row + 1) - first
        _block(values + first, turns, turn_ids, mask, tokens, start, count, BLOCK, MASKED, True)
    else:
        of_token = rows_from(row, end, cu_seqlens, rows, width, start, count, BLOCK, PACKED)  # [BLOCK]
        firsts = tl.load(offsets + of_token)  # [BLOCK]
        lengths = tl.minimum(tl.load(offsets + of_token + 1) - firsts, 2**31 - 1).to(tl.int32)
        if start + BLOCK <= count:  # no mask on the main stream: the compiler then moves 16 bytes at a time
            _block(values + firsts, lengths, turn_ids, mask, tokens, start, count, BLOCK, MASKED, True)
        else:
            _block(values + firsts, lengths, turn_ids, mask, tokens, start, count, BLOCK, MASKED, False)


@triton.jit
def _block(
    table,  # of the one row, or of each token's
    turns,  # likewise
    turn_ids, mask, tokens, start, count,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    token = start + tl.arange(0, BLOCK)  # [BLOCK]
    inside = None if FULL else token < count
    turn = tl.load(turn_ids + token, mask=inside, other=None if FULL else -1)  # [BLOCK]
    on = turn >= 0
    fractional = turn < -1  # nowhere: what has a turn below -1 was refused
    if MASKED:
        m = tl.load(mask + token, mask=inside, other=None if FULL else 0)
        on = on & (m != 0)
        fractional = m == BAD
    missing = on & (turn >= turns)
    value = tl.load(table + turn, mask=on & ~missing, other=0.0)  # [BLOCK]
    value = tl.where(missing | fractional, float("nan"), value)
    tl.store(tokens + token, value, mask=inside)


def segment_tokens(
    values: Tensor, offsets: Tensor, turn_ids: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None, tokens: Tensor
) -> int:
    """See `fastadv.ops.segments.SEGMENT_TOKENS`."""
    rows = Rows.trusted(turn_ids, cu_seqlens)
    arguments = {
        "values": values,
        "offsets": offsets,
        "turn_ids": turn_ids.contiguous(),
        "mask": mask_bytes(mask) if mask is not None else values.new_empty(0, dtype=torch.uint8),
        "tokens": tokens,
        **layout(rows, values),
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
        }  # fmt: skip
        constants = {"BLOCK": BLOCK, "PACKED": packed, "MASKED": masked}
        yield aligned_form(segment_tokens_kernel, arguments, constants, num_warps=WARPS)


def bytes_moved(tokens: int, rows: int, segments: int, *, ids: int = 4, values: int = 4, masked: bool = False) -> int:
    """What the op has to read and write, packed; `ids` and `values` are the bytes of a turn id and of a value."""
    return tokens * (ids + values + masked) + segments * values + 16 * (rows + 1)
