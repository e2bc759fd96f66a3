"""What is measured on a GPU: an op, its peers as their users run them, the bytes that it has to move, and its error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastadv as fa
from bench import peers
from bench.batches import PPO, rollouts

Run = Callable[[], Any]


@dataclass(frozen=True)
class Work:
    """One op on one batch."""

    ours: Run
    peers: Mapping[str, Run]
    bytes: int  # that have to be read and written
    error: Callable[[], float]  # of ours against float64: largest difference, relative to the largest value


@dataclass(frozen=True)
class Case:
    """An op at the size that it is measured at, and at one that the interpreter can run."""

    name: str
    make: Callable[..., Work]
    sizes: dict[str, int]
    small: dict[str, int]
    bar: float  # how many times its floor it may take

    def work(self, device: str, backend: str, *, small: bool = False) -> Work:
        """The op on a device's tensors."""
        return self.make(device, backend, **(self.small if small else self.sizes))


def relative_error(values: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest exact value."""
    difference = (values.double() - exact.double()).abs().max()
    return float(difference / exact.double().abs().max().clamp(min=1e-300))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def policy_loss(device: str, backend: str, rows: int, tokens: int) -> Work:
    """ppo with dual clip: loss, gradient and metrics, through autograd."""
    batch = {name: t.to(device) for name, t in rollouts(rows=rows, tokens=tokens).items()}
    count = batch["mask"].sum()
    inputs = [batch[name] for name in ("old_log_probs", "advantages", "mask")]

    def step(loss: Callable[..., Tensor]) -> Run:
        leaf = batch["log_probs"].clone().requires_grad_()

        def run() -> Tensor:
            (gradient,) = torch.autograd.grad(loss(leaf, *inputs), leaf)
            return gradient

        return run

    def ours(*given: Tensor, backend: str = backend) -> Tensor:
        return fa.policy_loss(*given, config=PPO, denominator=count, backend=backend).loss

    def error() -> float:
        leaf = batch["log_probs"].double().requires_grad_()
        exact = ours(leaf, inputs[0].double(), inputs[1].double(), inputs[2], backend="reference")
        (gradient,) = torch.autograd.grad(exact, leaf)
        return relative_error(step(ours)(), gradient)

    compiled = _compiled(peers.formula)
    others: dict[str, Run] = {
        "eager": step(lambda *given: peers.formula(*given)[0]),
        "torch.compile": step(lambda *given: compiled(*given)[0]),
    }
    return Work(step(ours), others, 17 * tokens, error)


def turn_advantages(device: str, backend: str, rows: int, tokens: int) -> Work:
    """Turn-reached advantages written out per token, from index objects."""
    batch = {name: t.to(device) for name, t in rollouts(rows=rows, tokens=tokens).items()}
    turn_ids = fa.turn_ids_from_mask(batch["mask"], backend=backend)
    index, groups = fa.segments(turn_ids, backend=backend), fa.group_index(batch["groups"])

    def run(backend: str) -> Tensor:
        return fa.turn_advantages(batch["rewards"], groups, index, backend=backend)

    def error() -> float:
        exact = fa.turn_advantages(batch["rewards"].double(), groups, index, backend="reference")
        return relative_error(run(backend), exact)

    return Work(partial(run, backend), {"eager": partial(run, "reference")}, 8 * tokens, error)


def _logits(device: str, rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device=device)
    for row in logits:  # no float32 copy of all of them
        row.copy_(3 * torch.randn(vocab, generator=generator, device=device))
    return logits, torch.randint(0, vocab, (rows,), generator=generator, device=device)


def _log_probs(backend: str, logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    out = fa.token_log_probs(logits, labels, return_entropy=True, return_sum_p2=True, backend=backend)
    assert out.entropy is not None
    assert out.sum_p2 is not None
    return out.log_probs, out.entropy, out.sum_p2


def token_log_probs(device: str, backend: str, rows: int, vocab: int) -> Work:
    """Log-prob, entropy and sum of squares of bfloat16 logits, forward."""
    logits, labels = _logits(device, rows, vocab)

    def forward(function: Callable[..., Any]) -> Run:
        return torch.no_grad()(partial(function, logits, labels))

    def error() -> float:
        some = slice(0, 64)
        exact = peers.log_softmax_results(logits[some].double(), labels[some])
        found = _log_probs(backend, logits[some], labels[some])
        return max(relative_error(a, b) for a, b in zip(found, exact, strict=True))

    others = {
        "eager": forward(peers.log_softmax_results),
        "torch.compile": forward(_compiled(peers.log_softmax_results)),
    }
    return Work(forward(partial(_log_probs, backend)), others, logits.nbytes, error)


def token_log_probs_step(device: str, backend: str, rows: int, vocab: int) -> Work:
    """The same with the gradient of a loss of all three: the logits are read twice and a gradient like them written."""
    logits, labels = _logits(device, rows, vocab)

    def step(function: Callable[..., Any], leaf: Tensor) -> Run:
        leaf = leaf.detach().requires_grad_()

        def run() -> Tensor:
            log_prob, entropy, sum_p2 = function(leaf, labels[: leaf.shape[0]])
            (gradient,) = torch.autograd.grad(log_prob.sum() - 0.01 * entropy.sum() + 0.1 * sum_p2.sum(), leaf)
            return gradient

        return run

    mine = partial(_log_probs, backend)

    def error() -> float:
        exact = step(peers.log_softmax_results, logits[:64].double())()
        return relative_error(step(mine, logits[:64])(), exact)

    others = {
        "eager": step(peers.log_softmax_results, logits),
        "torch.compile": step(_compiled(peers.log_softmax_results), logits),
    }
    return Work(step(mine, logits), others, 3 * logits.nbytes, error)


CASES = (
    Case("policy loss, ppo", policy_loss, {"rows": 256, "tokens": 4_194_304}, {"rows": 3, "tokens": 3 * 900}, 1.25),
    Case("turn advantages", turn_advantages, {"rows": 256, "tokens": 4_194_304}, {"rows": 4, "tokens": 4 * 700}, 1.4),
    Case(
        "log-probs, entropy, sum of squares from logits",
        token_log_probs,
        {"rows": 8192, "vocab": 151_936},
        {"rows": 3, "vocab": 700},
        1 / 0.88,
    ),
    Case(
        "the same with the gradient",
        token_log_probs_step,
        {"rows": 4096, "vocab": 151_936},
        {"rows": 3, "vocab": 700},
        1.35,
    ),
)
