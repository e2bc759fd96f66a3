"""Norms of gradients and updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def global_norm(tensors: Iterable[Tensor], *, process_group: ProcessGroup | None = None) -> Tensor:
    """Euclidean norm of all the tensors' numbers together.

    Squares are summed in float64: float32 and bfloat16 gradients neither overflow nor lose digits. A number that is not
    finite stays visible (inf or NaN); nothing is clipped and no tensor is written.

    Args:
        tensors: gradients or updates, any dtypes and shapes, on one device.
        process_group: ranks that hold other parts; squares are summed over it (one all-reduce).

    Returns:
        0-d float64 on the tensors' device, 0 for none.

    Raises:
        TypeError: something else than tensors of real numbers.
        RuntimeError: tensors on several devices.
    """
    tensors = list(tensors)
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor) or t.is_complex():
            what = f"of dtype {t.dtype}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
            raise TypeError(f"global_norm: tensors[{i}] is {what}; pass tensors of real numbers")
    squares = [t.detach().to(torch.float64).square().sum() for t in tensors]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    if process_group is not None:
        import torch.distributed as dist

        dist.all_reduce(total, group=process_group)
    return total.sqrt()
