"""Ops on logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import fastadv as fa
from bench import cuda_bytes, gpu_peers, peers
from bench.gpu_cases.case import (
    CHECKED,
    Case,
    Peer,
    Run,
    Work,
    copy_of,
    relative_error,
    with_gradient,
    without_gradient,
)


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


def token_log_probs(device: str, rows: int, vocab: int) -> Work:
    """Log-prob, entropy and sum of squares of bfloat16 logits, forward."""
    logits, labels = _logits(device, rows, vocab)

    @cache
    def exact() -> tuple[Tensor, ...]:
        return peers.log_softmax_results(logits[CHECKED].double(), labels[CHECKED])

    def error(found: tuple[Tensor, ...]) -> float:
        return max(relative_error(a[CHECKED], b) for a, b in zip(found, exact(), strict=False))  # some give two

    others = (
        Peer("eager", lambda: without_gradient(peers.log_softmax_results, logits, labels)),
        Peer("torch.compile", lambda: without_gradient(gpu_peers.compiled(peers.log_softmax_results), logits, labels)),
        Peer(
            "TRL selective_log_softmax, entropy_from_logits",
            lambda: without_gradient(gpu_peers.trl_log_probs(), logits, labels),
            "sum of squares",
        ),
    )
    amount = cuda_bytes.token_log_probs(rows, vocab, logits.element_size(), moments=True)
    return Work(
        lambda backend: without_gradient(partial(_log_probs, backend), logits, labels), others, amount,
        copy_of(amount, device), error,
    )  # fmt: skip


def token_log_probs_step(device: str, rows: int, vocab: int) -> Work:
    """The same with the gradient of a loss of all three: the logits are read twice and a gradient like them written."""
    logits, labels = _logits(device, rows, vocab)

    def step(function: Callable[..., Any], *, wide: bool = False) -> Run:
        def loss(leaf: Tensor) -> Tensor:
            log_prob, entropy, sum_p2 = function(leaf, labels[: leaf.shape[0]])
            return log_prob.sum() - 0.01 * entropy.sum() + 0.1 * sum_p2.sum()

        return with_gradient(logits[CHECKED].double() if wide else logits, loss)

    @cache
    def exact() -> Tensor:
        gradient: Tensor = step(peers.log_softmax_results, wide=True)()
        return gradient

    others = (
        Peer("eager", lambda: step(peers.log_softmax_results)),
        Peer("torch.compile", lambda: step(gpu_peers.compiled(peers.log_softmax_results))),
    )
    amount = cuda_bytes.token_log_probs_step(rows, vocab, logits.element_size(), moments=True)
    return Work(
        lambda backend: step(partial(_log_probs, backend)), others, amount, copy_of(amount, device),
        lambda found: relative_error(found[CHECKED], exact()),
    )  # fmt: skip


def cross_entropy(device: str, rows: int, vocab: int) -> Work:
    """Mean of the log-probs alone with its gradient: what cross-entropy kernels compute."""
    logits, labels = _logits(device, rows, vocab)

    def loss(backend: str, leaf: Tensor, labels: Tensor) -> Tensor:
        return -fa.token_log_probs(leaf, labels, backend=backend).log_probs.mean()

    @cache
    def exact() -> Tensor:
        def wide(leaf: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(leaf, labels[CHECKED], reduction="sum") / rows

        gradient: Tensor = with_gradient(logits[CHECKED].double(), wide)()
        return gradient

    def peer(name: str, make: Callable[[], Callable[..., Tensor]], *, own: bool = False) -> Peer:
        return Peer(name, lambda: with_gradient(logits.clone() if own else logits, make(), labels))

    others = (
        peer("eager", lambda: gpu_peers.float32_cross_entropy),
        peer("F.cross_entropy of bfloat16", lambda: gpu_peers.torch_cross_entropy),
        peer("torch.compile", lambda: gpu_peers.compiled(gpu_peers.float32_cross_entropy)),
        peer("Liger cross-entropy", gpu_peers.liger_cross_entropy, own=True),
        peer("flash-attn cross-entropy", gpu_peers.flash_attn_cross_entropy),
        peer("quack cross-entropy", gpu_peers.quack_cross_entropy),
    )
    amount = cuda_bytes.token_log_probs_step(rows, vocab, logits.element_size(), moments=False)
    return Work(
        lambda backend: with_gradient(logits, partial(loss, backend), labels), others, amount, copy_of(amount, device),
        lambda found: relative_error(found[CHECKED], exact()),
    )  # fmt: skip


def policy_loss_of_logits(device: str, rows: int, width: int, vocab: int) -> Work:
    """ppo of logits [B, T + 1, V] with the gradient of the logits; half of the tokens count. Those are read twice; the
    gradient is written for all."""
    flat, labels = _logits(device, rows * (width + 1), vocab)
    logits, labels = flat.view(rows, width + 1, vocab), labels.view(rows, width + 1)
    generator = torch.Generator(device).manual_seed(1)
    mask = torch.rand(rows, width + 1, generator=generator, device=device) < 0.5
    mask[:, -1] = False  # what the last logits predict was not sampled
    advantages = torch.randn(rows, generator=generator, device=device)
    config = fa.LossConfig(clip_low=peers.CLIP, clip_high=peers.CLIP)
    with torch.no_grad():
        each = zip(logits, labels, mask, strict=True)  # no float32 copy of all of them
        log_probs = torch.stack([fa.token_log_probs(*r[:2], mask=r[2], backend="reference").log_probs for r in each])
    noise = torch.randn(log_probs.shape, generator=generator, device=device)
    old = log_probs + 0.02 * noise  # no ratio is clipped: every token that counts has a gradient

    def loss(log_probs_of: Callable[[Tensor], Tensor], name: str) -> Callable[[Tensor], Tensor]:
        def run(leaf: Tensor) -> Tensor:
            found = log_probs_of(leaf)
            its_old, its_advantages = (t.to(found.dtype) for t in (old, advantages))
            return fa.policy_loss(found, its_old, its_advantages, mask, config=config, backend=name).loss

        return run

    def ours(backend: str) -> Run:
        def log_probs_of(leaf: Tensor) -> Tensor:
            return fa.token_log_probs(leaf, labels, mask=mask, backend=backend).log_probs

        return with_gradient(logits, loss(log_probs_of, backend))

    def eager(leaf: Tensor) -> Tensor:
        places = labels[: leaf.shape[0], : leaf.shape[1], None]
        wide = leaf if leaf.dtype == torch.float64 else leaf.float()
        return wide.log_softmax(-1).gather(-1, places)[..., 0]

    def liger() -> Run:
        grpo = gpu_peers.liger_grpo(peers.CLIP)
        its_labels, its_old, its_mask = (t[:, :-1].contiguous() for t in (labels, old, mask))
        return with_gradient(logits, lambda leaf: grpo(leaf, its_labels, its_old, advantages, its_mask))

    @cache
    def exact() -> Tensor:
        """Of the first tokens of the first rollout: a token's gradient depends on no other's logits."""

        def padded(some: Tensor) -> Tensor:
            return torch.nn.functional.pad(eager(some), (0, width + 1 - some.shape[1], 0, rows - 1))

        gradient: Tensor = with_gradient(logits[:1, CHECKED].double(), loss(padded, "reference"))()
        return gradient

    others = (
        Peer("eager log-softmax, our reference of the loss", lambda: with_gradient(logits, loss(eager, "reference"))),
        Peer("Liger triton_grpo_loss", liger, "all metrics but the clip fraction"),
    )
    amount = (2 * int(mask.sum()) + mask.numel()) * vocab * logits.element_size()  # beside them, 20 bytes a token
    return Work(
        ours, others, amount, copy_of(amount, device), lambda found: relative_error(found[:1, CHECKED], exact())
    )


VOCAB = 151_936
SMALL = {"rows": 3, "vocab": 700}
STEP = {"rows": 4096, "vocab": VOCAB}
CASES = (
    Case(
        "log-probs, entropy, sum of squares from logits",
        token_log_probs,
        {"rows": 8192, "vocab": VOCAB},
        SMALL,
        1 / 0.88,
    ),
    Case("the same with the gradient", token_log_probs_step, STEP, SMALL, 1.35, tolerance=1e-2),
    Case("mean cross-entropy from logits with the gradient", cross_entropy, STEP, SMALL, tolerance=1e-2),
    Case(
        "ppo from logits with the gradient, half of the tokens count",
        policy_loss_of_logits,
        {"rows": 8, "width": 512, "vocab": VOCAB},
        {"rows": 2, "width": 4, "vocab": 700},
        tolerance=1e-2,
    ),
)
