"""Batches for the Triton kernels, and comparisons that forgive nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def batch(lengths: tuple[int, ...], padded: bool = False, density: float = 0.9) -> tuple[Tensor, Tensor | None]:
    """A mask of long runs and the rows' ends."""
    n = torch.tensor(lengths, dtype=torch.int64)
    if padded:
        width = max(lengths, default=0)
        mask = (torch.arange(width) < n[:, None]) & runs(len(lengths), width, density=density)
        return mask, None
    return runs(sum(lengths), density=density), torch.cat([n.new_zeros(1), n.cumsum(0)])


def runs(*shape: int, density: float) -> Tensor:
    """Runs of either kind of five tokens on average."""
    switches = (torch.rand(shape) < 0.2).cumsum(-1) if shape[-1] else torch.zeros(shape)
    return (switches % 2 == 0) & (torch.rand(shape) < density)


def same(a: Tensor, b: Tensor) -> None:
    """The same bits but for a zero's sign; a NaN is a NaN."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def both(op: Callable[..., Tensor], *args: Any, other: str = "reference", **options: Any) -> None:
    same(op(*args, **options, backend="triton"), op(*args, **options, backend=other))
