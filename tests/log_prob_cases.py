"""What the tests of token_log_probs share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import BACKENDS, NATIVE
from torch import Tensor

import fastadv as fa

ON = pytest.mark.parametrize("backend", BACKENDS)
ON_NATIVE = pytest.mark.parametrize("backend", NATIVE)
SIZES = (1, 2, 3, 15, 16, 17, 127, 128, 129, 1000, 2047, 2048, 2049, 32003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INF, NAN = float("inf"), float("nan")


def run(
    backend: str, logits: Tensor, labels: Tensor, upstream: Any = (1.0, 0.5, -0.25), **options: Any
) -> list[Tensor]:
    """log_probs, entropy, sum_p2 and the gradient by the logits of their sum weighted by `upstream`."""
    leaf = logits.detach().requires_grad_()
    out = fa.token_log_probs(leaf, labels, return_entropy=True, return_sum_p2=True, backend=backend, **options)
    outputs = [x for x in out if x is not None]
    weighted = [x * torch.as_tensor(u) for x, u in zip(outputs, upstream, strict=True)]
    (gradient,) = torch.autograd.grad(sum(w.sum() for w in weighted), leaf)
    return [*(x.detach() for x in outputs), gradient]


def close(found: list[Tensor], expected: list[Tensor], tolerance: float = 2e-6, rounding: float = 0.0) -> None:
    assert len(found) == len(expected)
    for name, a, b in zip(("log_probs", "entropy", "sum_p2", "gradient"), found, expected, strict=False):
        extra = rounding if name == "gradient" else 0.0
        torch.testing.assert_close(
            a.double(),
            b.double(),
            rtol=tolerance + extra,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def equal(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def draw(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, vocab, generator=generator)
    return logits, torch.randint(0, vocab, (rows,), generator=generator)
