"""Labels, masks and temperatures of the log-prob ops, checked and brought into the form that kernels take."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastadv import validation
from fastadv.ops._logits import INVALID, SKIPPED


def positive(op: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; pass a number")
    if not 0 < value < math.inf:
        raise ValueError(f"{op}: {name} is {value}; it must be finite and greater than 0")


def rows_read(labels: Tensor, mask: Tensor | None, ignore_index: int | None) -> Tensor | None:
    """Rows that are read; None: all."""
    kept = None if ignore_index is None else labels != ignore_index
    if mask is None:
        return kept
    return mask != 0 if kept is None else (mask != 0) & kept


def codes(op: str, labels: Tensor, reads: Tensor | None, vocab: int, ignore_index: int | None) -> Tensor:
    """Labels as the kernels take them, `[...]` int64: contiguous, SKIPPED and INVALID marked."""
    labels = labels.detach().to(torch.int64)
    outside = (labels < 0) | (labels >= vocab)
    if reads is not None:
        outside = outside & reads
    if validation.reads_values(labels, reads) and bool(outside.any()):
        position = outside.nonzero()[0].tolist()
        value, but = int(labels[tuple(position)]), "" if ignore_index is None else f", or ignore_index ({ignore_index})"
        where = f"labels[{', '.join(map(str, position))}]" if position else "labels"
        raise ValueError(
            f"{op}: {where} is {value}; a label must be in [0, {vocab}){but}. Exclude the row by mask or ignore_index"
        )
    codes = torch.where(outside, INVALID, labels)
    return (codes if reads is None else torch.where(reads, codes, SKIPPED)).contiguous()


def temperatures(
    op: str, temperature: Tensor, reads: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Temperatures of all rows as float64, contiguous; 1 where the row is not read, NaN where it has no meaning."""
    validation.tensor(op, "temperature", temperature, shape=shape, dtypes=validation.FLOATS, device=device)
    if temperature.requires_grad:
        raise ValueError(f"{op}: temperature requires grad; no gradient flows to it, pass temperature.detach()")
    found = temperature.to(torch.float64)
    if reads is not None:
        found = torch.where(reads, found, 1.0)
    bad = ~((found > 0) & found.isfinite())
    if validation.reads_values(found) and bool(bad.any()):
        position = bad.nonzero()[0].tolist()
        where, value = ", ".join(map(str, position)), float(found[tuple(position)])
        raise ValueError(f"{op}: temperature[{where}] is {value}; it must be finite and greater than 0")
    return torch.where(bad, torch.nan, found).contiguous()
