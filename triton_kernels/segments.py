"""Values of a segment table at each token.

One launch. Reads 4 bytes of turn_ids a token (8 of int64), 1 of the mask if there is one, and writes 4 (8 of float64);
the table stays in the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from fastadv.triton_kernels._launch import FRACTIONAL, Configuration, blocks, launch, mask_bytes, offsets_or_empty
from fastadv.triton_kernels._rows import rows_of_tokens
from torch import Tensor

from fastadv.rows import Rows

BLOCK = 2048


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
    BAD: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    row = rows_of_tokens(cu_seqlens, rows, width, start, count, BLOCK, PACKED)  # [BLOCK]
    if start + BLOCK <= count:  # no mask on the main stream: the compiler then moves 16 bytes at a time
        _block(values, offsets, turn_ids, mask, tokens, row, start, count, BLOCK, MASKED, BAD, True)
    else:
        _block(values, offsets, turn_ids, mask, tokens, row, start, count, BLOCK, MASKED, BAD, False)


@triton.jit
def _block(
    values, offsets, turn_ids, mask, tokens, row, start, count,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, BAD: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    token = start + tl.arange(0, BLOCK)  # [BLOCK]
    inside = None if FULL else token < count
    turn = tl.load(turn_ids + token, mask=inside, other=None if FULL else -1).to(tl.int64)  # [BLOCK]
    on = turn >= 0
    fractional = turn < -1  # nowhere: what has a turn below -1 was refused
    if MASKED:
        m = tl.load(mask + token, mask=inside, other=None if FULL else 0)
        on = on & (m != 0)
        fractional = m == BAD
    if not FULL:
        on = on & inside
    first = tl.load(offsets + row, mask=on, other=0)  # [BLOCK]
    missing = on & (turn >= tl.load(offsets + row + 1, mask=on, other=0) - first)
    value = tl.load(values + first + turn, mask=on & ~missing, other=0.0)  # [BLOCK]
    value = tl.where(missing | fractional, float("nan"), value)
    tl.store(tokens + token, value, mask=inside)


def segment_tokens(
    values: Tensor, offsets: Tensor, turn_ids: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None, tokens: Tensor
) -> int:
    """See `fastadv.ops.segments.SEGMENT_TOKENS`."""
    rows = Rows.trusted(turn_ids, cu_seqlens)
    launch(
        segment_tokens_kernel,
        (blocks(rows.tokens, BLOCK),),
        {
            "values": values,
            "offsets": offsets,
            "turn_ids": turn_ids.contiguous(),
            "mask": mask_bytes(mask) if mask is not None else values.new_empty(0, dtype=torch.uint8),
            "cu_seqlens": offsets_or_empty(cu_seqlens, values),
            "tokens": tokens,
            "rows": rows.count,
            "width": 0 if cu_seqlens is not None else rows.shape[1],
            "count": rows.tokens,
        },
        {"BLOCK": BLOCK, "PACKED": cu_seqlens is not None, "MASKED": mask is not None, "BAD": FRACTIONAL},
    )
    return 0


STREAMING = (segment_tokens_kernel,)


def configurations() -> Iterator[Configuration]:
    """Every form that a launch asks for."""
    flags = (True, False)
    for value, turn, packed, masked in itertools.product(("fp32", "fp64"), ("i32", "i64"), flags, flags):
        pointers = {
            "values": value, "offsets": "i64", "turn_ids": turn, "mask": "u8", "cu_seqlens": "i64", "tokens": value,
        }  # fmt: skip
        yield Configuration(
            segment_tokens_kernel,
            (*((n, f"*{kind}") for n, kind in pointers.items()), ("rows", "i64"), ("width", "i64"), ("count", "i64")),
            (("BLOCK", BLOCK), ("PACKED", packed), ("MASKED", masked), ("BAD", FRACTIONAL)),
            tuple(pointers),
        )
