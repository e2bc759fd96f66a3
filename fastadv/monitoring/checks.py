"""Checks and small means that the monitoring functions share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastadv import validation
from fastadv.statistics import check_rows


def share(part: float, whole: float) -> float:
    """A quotient; NaN for a part of nothing."""
    return part / whole if whole else math.nan


def mean(values: Tensor) -> float:
    """The mean as a float; NaN of nothing."""
    return float(values.to(torch.float64).mean()) if values.numel() else math.nan


def flag(op: str, name: str, values: Tensor, like: Tensor) -> Tensor:
    """A `[B]` bool argument, checked."""
    validation.tensor(op, name, values, shape=tuple(like.shape), dtypes=(torch.bool,), device=like.device)
    return values


def tokens(op: str, lengths: Tensor) -> Tensor:
    """Lengths as `[B]` int64, checked. In a narrower dtype torch would compare with a limit wrapped around."""
    validation.tensor(op, "lengths", lengths, dtypes=validation.INTEGERS)
    validation.rollouts(op, "lengths", lengths)
    if bool((lengths < 0).any()):
        row = int((lengths < 0).nonzero()[0])
        raise ValueError(f"{op}: lengths[{row}] is {int(lengths[row])}; it must not be negative")
    return lengths.to(torch.int64)


def amounts(op: str, name: str, values: Tensor, like: Tensor, *, negative: bool = False) -> Tensor:
    """Finite numbers, one a rollout, as float64."""
    check_rows(op, name, values, like.shape[0], like.device)
    numbers = values.to(torch.float64)
    bad = ~numbers.isfinite() if negative else ~(numbers.isfinite() & (numbers >= 0))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        allowed = "finite" if negative else "finite and not negative"
        raise ValueError(f"{op}: {name}[{row}] is {float(numbers[row])}; it must be {allowed}")
    return numbers
