"""Log-probs, entropy and sum of squared probabilities from logits, against eager, the compiler and the floor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fastadv as fa
from bench import peers
from bench.harness import Line, against_floor, against_peer, copy_bandwidth, interleave, write

VOCAB = 151_936
ROWS = 1024  # forward
STEP_ROWS = 256  # forward and backward: eager keeps several float32 copies of the logits
DTYPES = (torch.bfloat16, torch.float32)

Results = tuple[Tensor, Tensor, Tensor]


def batch(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(rows, VOCAB, dtype=dtype)
    for row in logits:  # no float32 copy of all of them
        row.copy_(3 * torch.randn(VOCAB, generator=generator))
    return logits, torch.randint(0, VOCAB, (rows,), generator=generator)


def ours(logits: Tensor, labels: Tensor) -> Results:
    out = fa.token_log_probs(logits, labels, return_entropy=True, return_sum_p2=True)
    assert out.entropy is not None
    assert out.sum_p2 is not None
    return out.log_probs, out.entropy, out.sum_p2


def step(function: Callable[[Tensor, Tensor], Results], logits: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """Value and gradient of a loss of all three results."""
    leaf = logits.requires_grad_()

    def run() -> Tensor:
        log_prob, entropy, sum_p2 = function(leaf, labels)
        (gradient,) = torch.autograd.grad(log_prob.sum() - 0.01 * entropy.sum() + 0.1 * sum_p2.sum(), leaf)
        return gradient

    return run


def _agree(logits: Tensor, labels: Tensor, *functions: Callable[[Tensor, Tensor], Results]) -> None:
    """No number without the right answer, gradients included."""
    logits, labels = logits[:4], labels[:4]
    exact = peers.log_softmax_results(logits.double(), labels)
    tolerance = 1e-2 if logits.dtype == torch.bfloat16 else 1e-4
    for function in functions:
        for value, expected in zip(function(logits, labels), exact, strict=True):
            torch.testing.assert_close(value.double(), expected.double(), rtol=1e-4, atol=1e-4)
    gradients = [step(function, logits.clone(), labels)() for function in functions]
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=tolerance, atol=1e-6)


def log_probs() -> bool:
    """Forward at [1024, 151936] and forward with backward at [256, 151936], bfloat16 and float32."""
    lines: list[Line] = []
    details: dict[str, object] = {}
    eager = peers.log_softmax_results
    bandwidth = copy_bandwidth()
    details["bandwidth"] = vars(bandwidth)
    for dtype in DTYPES:
        torch._dynamo.reset()
        name = str(dtype).removeprefix("torch.")
        compiled = torch.compile(eager, fullgraph=True)
        logits, labels = batch(ROWS, dtype)
        _agree(logits, labels, ours, eager, compiled)
        with torch.no_grad():
            t = interleave(
                {
                    "ours": lambda z=logits, y=labels: ours(z, y),
                    "only log-probs": lambda z=logits, y=labels: fa.token_log_probs(z, y),
                    "eager": lambda z=logits, y=labels: eager(z, y),
                    "compile": lambda z=logits, y=labels, run=compiled: run(z, y),
                },
                rounds=4,
                counted=2,
            )
        floor = logits.nbytes / bandwidth.bytes_per_second
        lines += [
            against_peer(f"{name}: forward / eager", t["ours"], t["eager"], 8),
            against_peer(f"{name}: forward / torch.compile", t["ours"], t["compile"], 1.6),
            against_floor(f"{name}: forward / floor of one read", t["ours"], floor),
            against_floor(f"{name}: forward, log-probs only / floor", t["only log-probs"], floor),
        ]
        details[f"{name} forward"] = {key: vars(value) for key, value in t.items()}

        small, its_labels = logits[:STEP_ROWS].clone(), labels[:STEP_ROWS]
        del logits
        t = interleave(
            {
                "ours": step(ours, small, its_labels),
                "eager": step(eager, small, its_labels),
                "compile": step(compiled, small, its_labels),
            },
            rounds=4,
            counted=2,
        )
        floor = 3 * small.nbytes / bandwidth.bytes_per_second
        lines += [
            against_peer(f"{name}: forward and backward / eager", t["ours"], t["eager"]),
            against_peer(f"{name}: forward and backward / torch.compile", t["ours"], t["compile"]),
            against_floor(f"{name}: forward and backward / floor of two reads and a write", t["ours"], floor),
        ]
        details[f"{name} forward and backward"] = {key: vars(value) for key, value in t.items()}
    title = f"log-prob, entropy and sum of squared probabilities, {ROWS} x {VOCAB:,} logits"
    return write("log_probs", title, lines, details)
