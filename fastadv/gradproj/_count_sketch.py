"""The chunk-shift count sketch in plain PyTorch, until the op of this name is there."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv.coins import _STEP, _mixed, _number, _shifted

CHUNK = 32  # columns that share a hash


def count_sketch(
    values: Tensor,
    size: int,
    *,
    seed: int = 0,
    parameter: str = "",
    row_offset: int = 0,
    column_offset: int = 0,
    out: Tensor | None = None,
    quantum: float = 2.0**-40,
    copies: int = 1,
) -> Tensor:
    """Adds a part of a parameter, `[columns]` or `[rows, columns]` from (row_offset, column_offset) on, to
    `[copies, size]` int64."""
    values = values.detach()
    values = values[None] if values.dim() == 1 else values
    if size < CHUNK or size % CHUNK:
        raise ValueError(f"count_sketch: size is {size}; it must be a multiple of {CHUNK}")
    quanta = (values.to(torch.float64) / quantum).round()
    if bool((~(quanta.abs() < 2.0**50)).any()):
        raise ValueError(f"count_sketch: a value is not finite, or too large for quantum {quantum}")
    rows, columns = values.shape
    row = torch.arange(row_offset, row_offset + rows, device=values.device)[:, None]
    column = torch.arange(column_offset, column_offset + columns, device=values.device)
    out = torch.zeros(copies, size, dtype=torch.int64, device=values.device) if out is None else out
    for copy in range(copies):
        origin = _mixed(torch.tensor(seed * 1_000_003 + copy, device=values.device) + _STEP) ^ _number(parameter)
        word = _mixed(_mixed(origin + (row + 1) * _STEP) + (column // CHUNK + 1) * _STEP)  # [rows, columns]
        slot = CHUNK * (_shifted(word, 33) % (size // CHUNK)) + column % CHUNK
        sign = 1 - 2 * ((_mixed(word + _STEP) >> (column % CHUNK)) & 1)
        out[copy].index_add_(0, slot.flatten(), (sign * quanta.to(torch.int64)).flatten())
    return out


def sketch_values(sketch: Tensor, quantum: float = 2.0**-40) -> Tensor:
    """A sketch in float64; NaN where a slot is no plausible sum."""
    bad = (sketch.abs() >= 2**61).any(-1, keepdim=True)
    return torch.where(bad, torch.nan, sketch.to(torch.float64) * quantum)
