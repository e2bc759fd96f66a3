"""Ops on hidden states and an output layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

import fastadv as fa
from bench import gpu_peers, peers
from bench.gpu_cases.case import (
    CHECKED,
    Case,
    Peer,
    Run,
    Work,
    product,
    relative_error,
    with_gradient,
    without_gradient,
)
from fastadv.ops import _linear


def _layer(device: str, tokens: int, size: int, vocab: int) -> dict[str, Tensor]:
    """Hidden states and an output layer in bfloat16; every other run of 64 tokens counts."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(torch.bfloat16)

    return {
        "hidden": normal(tokens, size),
        "weight": normal(vocab, size, scale=2 * size**-0.5),
        "labels": torch.randint(0, vocab, (tokens,), generator=generator, device=device),
        "mask": torch.arange(tokens, device=device) // 64 % 2 == 0,
    }


def linear_policy_loss(device: str, tokens: int, size: int, vocab: int) -> Work:
    """Mean cross-entropy of the tokens that count (reinforce with advantages of 1), since that is what peers compute,
    with the gradients of hidden states and weight. Three products for each token that counts."""
    given = _layer(device, tokens, size, vocab)
    ones, config = torch.ones(tokens, device=device), fa.LossConfig("reinforce")
    count = int(given["mask"].sum())
    hidden, weight = (given[name].detach().requires_grad_() for name in ("hidden", "weight"))

    def step(loss: Callable[..., Tensor]) -> Run:
        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(loss(hidden, weight, given["labels"], given["mask"]), (hidden, weight))

        return run

    def fused(backend: str, hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return fa.linear_policy_loss(hidden, weight, labels, None, ones, mask, config=config, backend=backend).loss

    @cache
    def exact() -> Tensor:
        def loss(some: Tensor) -> Tensor:
            wide, part = given["weight"].double(), slice(0, some.shape[0])
            return gpu_peers.all_logits(some, wide, given["labels"][part], given["mask"][part], some.dtype) * (
                given["mask"][part].sum() / count
            )

        gradient: Tensor = with_gradient(given["hidden"][CHECKED].double(), loss)()
        return gradient

    others = (
        Peer("eager", lambda: step(gpu_peers.all_logits)),
        Peer("torch.compile", lambda: step(gpu_peers.compiled(gpu_peers.all_logits))),
        Peer("F.linear_cross_entropy", lambda: step(peers.linear_cross_entropy)),
        Peer("F.linear_cross_entropy in chunks", lambda: step(peers.linear_cross_entropy_chunked)),
        Peer("Liger fused linear cross-entropy", lambda: step(gpu_peers.liger_linear_cross_entropy())),
        Peer("verl linear_cross_entropy", lambda: step(gpu_peers.verl_linear_cross_entropy())),
    )
    floor = product(_linear.chunk_rows(vocab, count, device), given["weight"])
    amount = 3 * 2.0 * count * size * vocab
    return Work(
        lambda backend: step(partial(fused, backend)), others, amount, floor,
        lambda found: relative_error(found[0][CHECKED], exact()),
    )  # fmt: skip


def linear_log_probs(device: str, tokens: int, size: int, vocab: int) -> Work:
    """Log-probs and entropy of the tokens that count, forward. One product for each."""
    given = _layer(device, tokens, size, vocab)
    hidden, weight, labels, mask = (given[name] for name in ("hidden", "weight", "labels", "mask"))
    count = int(mask.sum())

    def fused(backend: str) -> tuple[Tensor, ...]:
        out = fa.linear_log_probs(hidden, weight, labels, mask=mask, return_entropy=True, backend=backend)
        assert out.entropy is not None
        return out.log_probs, out.entropy

    def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return peers.log_softmax_results(torch.nn.functional.linear(hidden, weight), labels)[:2]

    @cache
    def exact() -> tuple[Tensor, ...]:
        return eager(hidden[CHECKED].double(), weight.double(), labels[CHECKED])

    def error(found: tuple[Tensor, ...]) -> float:
        on = mask[CHECKED]
        return max(relative_error(a[CHECKED][on], b[on]) for a, b in zip(found, exact(), strict=False))

    def torch_loss() -> Run:
        loss = torch.nn.functional.linear_cross_entropy
        return without_gradient(lambda: (-loss(hidden, weight, labels, reduction="none"),))

    others = (
        Peer("eager", lambda: without_gradient(eager, hidden, weight, labels)),
        Peer("torch.compile", lambda: without_gradient(gpu_peers.compiled(eager), hidden, weight, labels)),
        Peer("F.linear_cross_entropy", torch_loss, "entropy"),
        Peer(
            "verl linear_cross_entropy",
            lambda: without_gradient(gpu_peers.verl_linear_log_probs(), hidden, weight, labels),
        ),
    )
    floor = product(_linear.chunk_rows(vocab, count, device), weight)
    return Work(lambda backend: without_gradient(fused, backend), others, 2.0 * count * size * vocab, floor, error)


LAYER = {"tokens": 8192, "size": 4096, "vocab": 151_936}
SMALL = {"tokens": 16, "size": 16, "vocab": 130}
CASES = (
    Case(
        "hidden to loss with the gradients, half of the tokens count",
        linear_policy_loss,
        LAYER,
        SMALL,
        seconds=0.5 * 50e-3,
        tolerance=1e-2,
    ),
    Case(
        "hidden to log-probs and entropy, half of the tokens count",
        linear_log_probs,
        LAYER,
        SMALL,
        tolerance=1e-2,
    ),
)
