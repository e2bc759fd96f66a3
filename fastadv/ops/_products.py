"""Torch's matrix products with float32 results, and what they multiply.

A product of bfloat16 operands loses nothing before it adds, so where torch leaves float32 of one (`out_dtype`, from
torch 2.8, CUDA only) bfloat16 is multiplied as it is. On the CPU torch rounds such a product to bfloat16, so operands
are widened first.

float16 is widened everywhere: gradients of logits, divided by the tokens of a batch, are below what it holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What hidden states and weights of a dtype are multiplied in."""
    as_it_is = dtype == torch.bfloat16 and device.type == "cuda" and hasattr(torch.ops.aten.mm, "dtype_out")
    return dtype if as_it_is else torch.float32


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """`out = a @ b`; out is float32."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def add_product(sum_: Tensor, a: Tensor, b: Tensor) -> None:
    """`sum += a @ b`; the sum is float32."""
    if a.dtype == sum_.dtype:
        sum_.addmm_(a, b)
    else:
        torch.addmm(sum_, a, b, out_dtype=sum_.dtype, out=sum_)


def is_matrix(t: Tensor, rows_only: bool) -> bool:
    """Whether a product takes these strides without a copy."""
    (rows, columns), (down, across) = t.shape, t.stride()
    return (across == 1 and down >= max(1, columns)) or (not rows_only and down == 1 and across >= max(1, rows))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch's products on one thread of the CPU: how many there are decides in which order they add."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
