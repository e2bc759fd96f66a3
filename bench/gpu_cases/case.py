"""What a case is: an op, its peers as their users run them, its bytes or operations, its error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Any]
CHECKED = slice(0, 64)  # rows of logits or hidden states whose results are compared with float64


@dataclass(frozen=True)
class Peer:
    """Another implementation of what a case computes."""

    name: str
    make: Callable[[], Run]  # imports its package, and may raise
    leaves_out: str = ""  # of what ours computes


@dataclass(frozen=True)
class Floor:
    """Something that the card does at its best rate, measured beside the op."""

    name: str
    run: Run
    amount: float  # bytes that one run moves, or operations
    unit: str  # of the rates beside it: "GB/s" or "TF/s"


@dataclass(frozen=True)
class Work:
    """One op on one batch."""

    ours: Callable[[str], Run]  # by backend
    peers: tuple[Peer, ...]
    amount: float  # of what the floor counts: what has to be read and written, or multiplied and added
    floor: Floor
    error: Callable[
        [Any], float
    ]  # of a run's results against float64: largest difference, relative to the largest value


@dataclass(frozen=True)
class Case:
    """An op at the size that it is measured at, and at one that the interpreter can run."""

    name: str
    make: Callable[..., Work]
    sizes: dict[str, int]
    small: dict[str, int] = field(repr=False)
    bar: float | None = None  # how many times its floor it may take
    seconds: float | None = None  # what it may take on a card like an H100
    tolerance: float = 1e-5  # of the error
    backends: tuple[str, ...] = ("cuda", "triton")  # that have a kernel

    def judged(self, auto: str) -> str:
        """The backend that "auto" takes here, where it takes that one for what it can."""
        return auto if auto in self.backends else self.backends[0]

    def work(self, device: str, *, small: bool = False) -> Work:
        """The op on a device's tensors."""
        return self.make(device, **(self.small if small else self.sizes))


def relative_error(values: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest exact value."""
    difference = (values.double() - exact.double()).abs().max()
    return float(difference / exact.double().abs().max().clamp(min=1e-300))


def copy_of(amount: int, device: str) -> Floor:
    """A copy that moves as many bytes as the op has to: half are read, half are written."""
    source = torch.empty(amount // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Floor("a copy of as many bytes", lambda: target.copy_(source), 2 * source.nbytes, "GB/s")


def product(rows: int, weight: Tensor) -> Floor:
    """torch's own product of a chunk of rows and the output layer."""
    vocab, size = weight.shape
    chunk = torch.randn(rows, size, device=weight.device).to(weight.dtype)
    out = torch.empty(rows, vocab, dtype=weight.dtype, device=weight.device)
    name = f"torch.mm of [{rows}, {size}] and [{size}, {vocab}]"
    return Floor(name, lambda: torch.mm(chunk, weight.t(), out=out), 2.0 * rows * size * vocab, "TF/s")


def with_gradient(leaf: Tensor, loss: Callable[..., Tensor], *inputs: Any) -> Run:
    """Loss and gradient through autograd."""
    leaf = leaf.detach().requires_grad_()

    def run() -> Tensor:
        (gradient,) = torch.autograd.grad(loss(leaf, *inputs), leaf)
        return gradient

    return run


def without_gradient(function: Callable[..., Any], *inputs: Any) -> Run:
    """Results alone."""
    return torch.no_grad()(partial(function, *inputs))
