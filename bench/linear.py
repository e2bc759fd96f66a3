"""Log-probs and losses from hidden states: forward and backward of an output layer; most tokens do not count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import fastadv as fa
from bench import peers
from bench.harness import Line, Timing, against_floor, against_peer, interleave, write
from fastadv.ops import _linear
from fastadv.testing import peak_memory_rise

TOKENS, SIZE, VOCAB = 4096, 1024, 32768
MASKED = 0.6
BAR = 2.2
CONFIG = fa.LossConfig("reinforce")


def problem(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """An output layer and tokens of which MASKED do not count: runs, as tool results are."""
    generator = torch.Generator().manual_seed(seed)
    runs = torch.rand(TOKENS // 64, generator=generator).argsort() < round((1 - MASKED) * TOKENS / 64)
    return {
        "hidden": torch.randn(TOKENS, SIZE, generator=generator).to(dtype),
        "weight": (torch.randn(VOCAB, SIZE, generator=generator) * 0.05).to(dtype),
        "labels": torch.randint(0, VOCAB, (TOKENS,), generator=generator),
        "mask": runs.repeat_interleave(64),
    }


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of hidden, weight, labels, mask


def one_pass(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Mean cross-entropy: reinforce with advantages of 1."""
    ones = torch.ones(TOKENS)
    return fa.linear_policy_loss(hidden, weight, labels, None, ones, mask, config=CONFIG).loss


def two_passes(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """The same through the log-probs."""
    return -fa.linear_log_probs(hidden, weight, labels, mask=mask).log_probs.sum() / mask.sum()


class Step:
    """A training step's use of a loss: loss, hidden and weight gradients."""

    def __init__(self, loss: Loss, given: dict[str, Tensor]) -> None:
        self.loss, self.given = loss, given
        self.hidden, self.weight = (given[name].clone().requires_grad_() for name in ("hidden", "weight"))

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        self.clear()
        value = self.loss(self.hidden, self.weight, self.given["labels"], self.given["mask"])
        value.backward()
        assert self.hidden.grad is not None
        assert self.weight.grad is not None
        return value.detach(), self.hidden.grad, self.weight.grad


def agree(steps: dict[str, Step], tolerance: float) -> None:
    """No number without the right answer: every implementation gives the same loss and gradients."""
    right = None
    for name, run in steps.items():
        found = [t.clone() for t in run()]
        run.clear()
        right = right or found
        for a, b in zip(found, right, strict=True):
            error = float((a.float() - b.float()).norm() / b.float().norm())
            assert error < tolerance, (name, error)


def peak_bytes(run: Step) -> int:
    """What a step takes while it runs; a first one pays for pools."""
    run()
    run.clear()
    peak = peak_memory_rise(run)
    run.clear()
    return peak


def linear() -> bool:
    """Two precisions; the peers multiply ignored rows too."""
    met = [_precision(torch.float32, 1e-4, BAR), _precision(torch.bfloat16, 3e-2, None)]
    return all(met)


def _precision(dtype: torch.dtype, tolerance: float, bar: float | None) -> bool:
    given = problem(dtype)
    rows = _linear.chunk_rows(VOCAB, int(given["mask"].sum()))
    losses: dict[str, Loss] = {
        "linear_policy_loss": one_pass,
        "linear_log_probs": two_passes,
        "torch": peers.linear_cross_entropy,
        "torch chunked": peers.linear_cross_entropy_chunked,
        "chunks": partial(peers.chunked_cross_entropy, rows=rows),
    }
    steps = {name: Step(loss, given) for name, loss in losses.items()}
    agree(steps, tolerance)
    chunk, out = given["hidden"][:rows].contiguous(), torch.empty((rows, VOCAB), dtype=dtype)
    product = {"mm": lambda: torch.mm(chunk, given["weight"].t(), out=out)}
    with peers.bfloat16_operands(dtype == torch.bfloat16):
        t: dict[str, Timing] = interleave({**steps, **product}, rounds=3, counted=1)
        memory = {name: peak_bytes(run) for name, run in steps.items()}
    rate = 2 * rows * SIZE * VOCAB / t["mm"].p50  # operations a second of torch's own product
    counted = int(given["mask"].sum())
    lines: list[Line] = []
    for ours in ("linear_policy_loss", "linear_log_probs"):
        for peer, title in (
            ("torch", "torch.nn.functional.linear_cross_entropy"),
            ("torch chunked", "the same in chunks (LinearCrossEntropyOptions)"),
            ("chunks", "chunks of rows, torch autograd for each"),
        ):
            lines.append(
                against_peer(f"{ours} / {title}", t[ours], t[peer], bar if ours == "linear_policy_loss" else None)
            )
        products = 3 if ours == "linear_policy_loss" else 4
        floor = 2 * products * counted * SIZE * VOCAB / rate
        lines.append(against_floor(f"{ours} / {products} products at the rate of torch.mm", t[ours], floor))
    extra = 4 * (rows * VOCAB + given["hidden"].numel() + VOCAB * SIZE)
    name = str(dtype).removeprefix("torch.")
    return write(
        f"linear_{name}",
        f"loss and gradients of an output layer, {TOKENS} tokens ({counted} count) x {SIZE} x {VOCAB}, {name}, "
        f"torch.mm at {rate / 1e9:.0f} GFLOP/s",
        lines,
        {
            "timings": {name: vars(timing) for name, timing in t.items()},
            "peak extra bytes": memory,
            "a float32 chunk of logits and the gradients in float32, bytes": extra,
            "chunk rows": rows,
            "operations per second of torch.mm": rate,
        },
    )
