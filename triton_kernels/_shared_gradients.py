"""Gradients that the tokens of a rollout share evenly, from what each block of tokens had of each of its rows.

Two launches: the rows' shares, which read 8 bytes a block and row, and a pass over the tokens, which reads 1 byte of
the mask a token, 4 of weights and 4 of a penalty's gradient where there are any, and writes 4.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from fastadv.triton_kernels._launch import TYPES, Configuration, blocks, launch
from fastadv.triton_kernels._policy_tokens import (
    REFERENCE,
    TILE,
    TOKEN_WEIGHTS,
    WARPS,
    load,
    places,
    row_and_end,
    rows_after,
    store,
)
from torch import Tensor

VECTOR = TILE.value
BLOCK = VECTOR * 32 * WARPS  # as in policy_loss, whose inputs are float32 then
CELLS = 1024  # blocks of a row that are added at a time


@triton.jit(do_not_specialize=["rows", "width", "count", "cells"])
def row_shares_kernel(
    pieces,  # [2, cells] float32: sum and tokens of row r in block b at r + b
    cu_seqlens,  # [B + 1] int64
    shares,  # [B] float32: the mean of a row's gradients
    rows: tl.int64,
    width: tl.int64,
    count: tl.int64,
    cells: tl.int64,
    BLOCK: tl.constexpr,
    CELLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if width > 0:
        start = row * width
        end = start + width
    else:
        start = tl.load(cu_seqlens + row)
        end = tl.load(cu_seqlens + row + 1)
    gap = ((row == 0) & (start != 0)) | ((row == rows - 1) & (end != count))
    false = (start < 0) | (end < start) | (end > count) | gap
    start = tl.minimum(tl.maximum(start, 0), count)
    end = tl.minimum(tl.maximum(end, 0), count)
    total = tl.zeros([CELLS], tl.float64)
    tokens = tl.zeros([CELLS], tl.float64)
    behind = tl.where(start < end, tl.cdiv(end, BLOCK), 0)  # nothing was written of a row without tokens
    for first in range(start // BLOCK, behind, CELLS):
        block = first + tl.arange(0, CELLS)  # [CELLS]
        mine = block < behind
        total += tl.load(pieces + row + block, mask=mine, other=0.0).to(tl.float64)
        tokens += tl.load(pieces + cells + row + block, mask=mine, other=0.0).to(tl.float64)
    share = tl.where(false, float("nan"), tl.sum(total) / tl.maximum(tl.sum(tokens), 1.0))
    tl.store(shares + row, share.to(tl.float32))


@triton.jit(do_not_specialize=["rows", "width", "count", "given"])
def share_gradients_kernel(
    mask,  # [N] uint8
    token_weights,  # [N] float32
    shares,  # [B] float32
    cu_seqlens,  # [B + 1] int64
    gradient,  # [N] float32: with a penalty, its gradient, which is added to
    rows: tl.int64,
    width: tl.int64,
    count: tl.int64,
    given: tl.int64,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = places(start, VECTOR, BLOCK, VECTOR)
    row, end = row_and_end(cu_seqlens, rows, width, start)
    if (start + BLOCK <= end) & (end <= count):
        _share(mask, token_weights, tl.load(shares + row), gradient, place, count, given, True)
    else:
        last, _ = row_and_end(cu_seqlens, rows, width, tl.minimum(start + BLOCK, count) - 1)
        after, held = rows_after(cu_seqlens, width, row, last, end, place, count)
        share = tl.where(held, tl.load(shares + row + after), float("nan"))
        _share(mask, token_weights, share, gradient, place, count, given, start + BLOCK <= count)


@triton.jit
def _share(mask, token_weights, share, gradient, place, count, given, full):
    inside = place < count
    on = load(mask + place, True, inside, full, 0) != 0
    on = on & (load(token_weights + place, (given & TOKEN_WEIGHTS) != 0, inside, full, 1.0) != 0.0)
    before = load(gradient + place, (given & REFERENCE) != 0, inside, full, 0.0)
    store(gradient + place, before + tl.where(on, share, 0.0), True, inside, full)


def share_gradients(
    pieces: Tensor,
    mask: Tensor,
    token_weights: Tensor,
    cu_seqlens: Tensor,
    gradient: Tensor,
    rows: int,
    width: int,
    given: int,
) -> None:
    """Gives every token of a row the mean of the row's gradients, beside what a penalty put there."""
    shares = gradient.new_empty(rows)
    launch(
        row_shares_kernel,
        (rows,),
        {
            "pieces": pieces,
            "cu_seqlens": cu_seqlens,
            "shares": shares,
            "rows": rows,
            "width": width,
            "count": gradient.numel(),
            "cells": pieces.shape[1],
        },
        {"BLOCK": BLOCK, "CELLS": CELLS},
    )
    launch(
        share_gradients_kernel,
        (blocks(gradient.numel(), BLOCK),),
        {
            "mask": mask,
            "token_weights": token_weights,
            "shares": shares,
            "cu_seqlens": cu_seqlens,
            "gradient": gradient,
            "rows": rows,
            "width": width,
            "count": gradient.numel(),
            "given": given,
        },
        {"BLOCK": BLOCK, "VECTOR": VECTOR},
        num_warps=WARPS,
    )


STREAMING = (share_gradients_kernel,)


def configurations() -> Iterator[Configuration]:
    """Every form that a launch can ask for, with aligned pointers."""
    forms = (
        (
            row_shares_kernel,
            {"pieces": torch.float32, "cu_seqlens": torch.int64, "shares": torch.float32},
            ("rows", "width", "count", "cells"),
            {"BLOCK": BLOCK, "CELLS": CELLS},
        ),
        (
            share_gradients_kernel,
            {
                "mask": torch.uint8,
                "token_weights": torch.float32,
                "shares": torch.float32,
                "cu_seqlens": torch.int64,
                "gradient": torch.float32,
            },
            ("rows", "width", "count", "given"),
            {"BLOCK": BLOCK, "VECTOR": VECTOR},
        ),
    )
    for kernel, pointers, integers, constants in forms:
        signature = {name: "*" + TYPES[dtype] for name, dtype in pointers.items()} | dict.fromkeys(integers, "i64")
        yield Configuration(kernel, tuple(signature.items()), tuple(constants.items()), tuple(pointers), WARPS)
