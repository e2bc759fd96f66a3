"""What each row of the policy loss is multiplied by, where rows differ: their weights over their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from fastadv.triton_kernels._launch import blocks, launch, nothing
from fastadv.triton_kernels._policy_tokens import EXCLUDED, ROW_SCALES, ROW_TOKENS, ROW_WEIGHTS, SCALE, when
from torch import Tensor

if TYPE_CHECKING:
    from fastadv.ops._policy_loss_kernel import Inputs

ROW_BLOCK = 1024  # rows, or programs' sums, that a program takes at a time


@triton.jit(do_not_specialize=["rows", "given"])
def row_scales_kernel(
    row_weights,  # [B] float64
    row_tokens,  # [B] int64
    scale,  # 0-d float64
    row_scales,  # [B] float32
    rows: tl.int64,
    given: tl.int64,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = row < rows
    weight = tl.load(row_weights + row, mask=when((given & ROW_WEIGHTS) != 0, inside), other=1.0)  # [BLOCK]
    tokens = tl.load(row_tokens + row, mask=when((given & ROW_TOKENS) != 0, inside), other=1)  # [BLOCK]
    value = weight * tl.load(scale, mask=(given & SCALE) != 0, other=1.0) / tl.maximum(tokens, 1).to(tl.float64)
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)  # [BLOCK]
    bits = tl.where(weight == 0.0, EXCLUDED, tl.where(bits == EXCLUDED, 0, bits))
    tl.store(row_scales + row, bits.to(tl.float32, bitcast=True), mask=inside)


def row_scales(inputs: Inputs, scale: Tensor | None, rows: int, given: int, sums: Tensor) -> Tensor:
    """What each row's sum is multiplied by, where rows differ in that."""
    if not given & ROW_SCALES.value:
        return nothing(sums.device, torch.float32)
    scales = sums.new_empty(rows, dtype=torch.float32)
    launch(
        row_scales_kernel,
        (blocks(scales.numel(), ROW_BLOCK),),
        {
            "row_weights": sums if inputs.row_weights is None else inputs.row_weights,
            "row_tokens": nothing(sums.device, torch.int64) if inputs.row_tokens is None else inputs.row_tokens,
            "scale": sums if scale is None else scale,
            "row_scales": scales,
            "rows": rows,
            "given": given,
        },
        {"BLOCK": ROW_BLOCK},
    )
    return scales
