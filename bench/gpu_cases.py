"""What is measured on a GPU: an op, its peers as their users run them, its bytes or operations, its error.

Where an op needs what another computes, as an index of turns, the reference computes that and is not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import fastadv as fa
from bench import cuda_bytes, gpu_peers, peers
from bench.batches import PPO, rollouts
from fastadv.ops import _linear

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


def _gradient(leaf: Tensor, loss: Callable[..., Tensor], *inputs: Any) -> Run:
    """Loss and gradient through autograd."""
    leaf = leaf.detach().requires_grad_()

    def run() -> Tensor:
        (gradient,) = torch.autograd.grad(loss(leaf, *inputs), leaf)
        return gradient

    return run


def _no_grad(function: Callable[..., Any], *inputs: Any) -> Run:
    return torch.no_grad()(partial(function, *inputs))


# ---- from log-probs --------------------------------------------------------------------------------------------------


def policy_loss(device: str, rows: int, tokens: int) -> Work:
    """ppo with dual clip: loss, gradient and metrics, through autograd."""
    batch = {name: t.to(device) for name, t in rollouts(rows=rows, tokens=tokens).items()}
    count = batch["mask"].sum()
    inputs = [batch[name] for name in ("old_log_probs", "advantages", "mask")]
    step = partial(_gradient, batch["log_probs"])

    def loss(backend: str, *given: Tensor) -> Tensor:
        return fa.policy_loss(*given, config=PPO, denominator=count, backend=backend).loss

    @cache
    def exact() -> Tensor:
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        gradient: Tensor = _gradient(batch["log_probs"].double(), partial(loss, "reference"), *wide)()
        return gradient

    def compiled() -> Run:
        formula = gpu_peers.compiled(peers.formula)
        return step(lambda *given: formula(*given)[0], *inputs)

    others = (
        Peer("eager", lambda: step(lambda *given: peers.formula(*given)[0], *inputs)),
        Peer("torch.compile", compiled),
        Peer("verl compute_policy_loss_vanilla", lambda: step(peers.verl_vanilla(), *inputs)),
    )
    amount = cuda_bytes.policy_loss(batch["mask"].numel())
    return Work(
        lambda backend: step(partial(loss, backend), *inputs), others, amount, copy_of(amount, device),
        lambda found: relative_error(found, exact()),
    )  # fmt: skip


def turn_advantages(device: str, rows: int, tokens: int) -> Work:
    """Turn-reached advantages written out per token, from index objects."""
    batch = {name: t.to(device) for name, t in rollouts(rows=rows, tokens=tokens).items()}
    turn_ids = fa.turn_ids_from_mask(batch["mask"], backend="reference")
    index, groups = fa.segments(turn_ids, backend="reference"), fa.group_index(batch["groups"])

    def run(rewards: Tensor, backend: str) -> Tensor:
        return fa.turn_advantages(rewards, groups, index, backend=backend)

    def error(found: Tensor) -> float:
        return relative_error(found, run(batch["rewards"].double(), "reference"))

    others = (Peer("eager", lambda: partial(run, batch["rewards"], "reference")),)
    amount = cuda_bytes.turn_advantages(index.count, rows, groups.num_groups)
    amount += cuda_bytes.segment_tokens(batch["mask"].numel(), rows, index.count)
    return Work(lambda backend: partial(run, batch["rewards"], backend), others, amount, copy_of(amount, device), error)


# ---- from logits -----------------------------------------------------------------------------------------------------


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
        Peer("eager", lambda: _no_grad(peers.log_softmax_results, logits, labels)),
        Peer("torch.compile", lambda: _no_grad(gpu_peers.compiled(peers.log_softmax_results), logits, labels)),
        Peer(
            "TRL selective_log_softmax, entropy_from_logits",
            lambda: _no_grad(gpu_peers.trl_log_probs(), logits, labels),
            "sum of squares",
        ),
    )
    amount = cuda_bytes.token_log_probs(rows, vocab, logits.element_size(), moments=True)
    return Work(
        lambda backend: _no_grad(partial(_log_probs, backend), logits, labels), others, amount,
        copy_of(amount, device), error,
    )  # fmt: skip


def token_log_probs_step(device: str, rows: int, vocab: int) -> Work:
    """The same with the gradient of a loss of all three: the logits are read twice and a gradient like them written."""
    logits, labels = _logits(device, rows, vocab)

    def step(function: Callable[..., Any], *, wide: bool = False) -> Run:
        def loss(leaf: Tensor) -> Tensor:
            log_prob, entropy, sum_p2 = function(leaf, labels[: leaf.shape[0]])
            return log_prob.sum() - 0.01 * entropy.sum() + 0.1 * sum_p2.sum()

        return _gradient(logits[CHECKED].double() if wide else logits, loss)

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

        gradient: Tensor = _gradient(logits[CHECKED].double(), wide)()
        return gradient

    def peer(name: str, make: Callable[[], Callable[..., Tensor]], *, own: bool = False) -> Peer:
        return Peer(name, lambda: _gradient(logits.clone() if own else logits, make(), labels))

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
        lambda backend: _gradient(logits, partial(loss, backend), labels), others, amount, copy_of(amount, device),
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

        return _gradient(logits, loss(log_probs_of, backend))

    def eager(leaf: Tensor) -> Tensor:
        places = labels[: leaf.shape[0], : leaf.shape[1], None]
        wide = leaf if leaf.dtype == torch.float64 else leaf.float()
        return wide.log_softmax(-1).gather(-1, places)[..., 0]

    def liger() -> Run:
        grpo = gpu_peers.liger_grpo(peers.CLIP)
        its_labels, its_old, its_mask = (t[:, :-1].contiguous() for t in (labels, old, mask))
        return _gradient(logits, lambda leaf: grpo(leaf, its_labels, its_old, advantages, its_mask))

    @cache
    def exact() -> Tensor:
        """Of the first tokens of the first rollout: a token's gradient depends on no other's logits."""

        def padded(some: Tensor) -> Tensor:
            return torch.nn.functional.pad(eager(some), (0, width + 1 - some.shape[1], 0, rows - 1))

        gradient: Tensor = _gradient(logits[:1, CHECKED].double(), loss(padded, "reference"))()
        return gradient

    others = (
        Peer("eager log-softmax, our reference of the loss", lambda: _gradient(logits, loss(eager, "reference"))),
        Peer("Liger triton_grpo_loss", liger, "all metrics but the clip fraction"),
    )
    amount = (2 * int(mask.sum()) + mask.numel()) * vocab * logits.element_size()  # beside them, 20 bytes a token
    return Work(
        ours, others, amount, copy_of(amount, device), lambda found: relative_error(found[:1, CHECKED], exact())
    )


# ---- from hidden states ----------------------------------------------------------------------------------------------


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

        gradient: Tensor = _gradient(given["hidden"][CHECKED].double(), loss)()
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
        return _no_grad(lambda: (-loss(hidden, weight, labels, reduction="none"),))

    others = (
        Peer("eager", lambda: _no_grad(eager, hidden, weight, labels)),
        Peer("torch.compile", lambda: _no_grad(gpu_peers.compiled(eager), hidden, weight, labels)),
        Peer("F.linear_cross_entropy", torch_loss, "entropy"),
        Peer("verl linear_cross_entropy", lambda: _no_grad(gpu_peers.verl_linear_log_probs(), hidden, weight, labels)),
    )
    floor = product(_linear.chunk_rows(vocab, count, device), weight)
    return Work(lambda backend: _no_grad(fused, backend), others, 2.0 * count * size * vocab, floor, error)


BATCH = {"rows": 256, "tokens": 4_194_304}
VOCAB = 151_936
LAYER = {"tokens": 8192, "size": 4096, "vocab": VOCAB}
SMALL_LAYER = {"tokens": 16, "size": 16, "vocab": 130}
CASES = (
    Case("policy loss, ppo", policy_loss, BATCH, {"rows": 3, "tokens": 3 * 900}, 1.25),
    Case("turn advantages", turn_advantages, BATCH, {"rows": 4, "tokens": 4 * 700}, 1.4),
    Case(
        "log-probs, entropy, sum of squares from logits",
        token_log_probs,
        {"rows": 8192, "vocab": VOCAB},
        {"rows": 3, "vocab": 700},
        1 / 0.88,
    ),
    Case(
        "the same with the gradient",
        token_log_probs_step,
        {"rows": 4096, "vocab": VOCAB},
        {"rows": 3, "vocab": 700},
        1.35,
        tolerance=1e-2,
    ),
    Case(
        "mean cross-entropy from logits with the gradient",
        cross_entropy,
        {"rows": 4096, "vocab": VOCAB},
        {"rows": 3, "vocab": 700},
        tolerance=1e-2,
    ),
    Case(
        "ppo from logits with the gradient, half of the tokens count",
        policy_loss_of_logits,
        {"rows": 8, "width": 512, "vocab": VOCAB},
        {"rows": 2, "width": 4, "vocab": 700},
        tolerance=1e-2,
    ),
    Case(
        "hidden to loss with the gradients, half of the tokens count",
        linear_policy_loss,
        LAYER,
        SMALL_LAYER,
        seconds=0.5 * 50e-3,
        tolerance=1e-2,
    ),
    Case(
        "hidden to log-probs and entropy, half of the tokens count",
        linear_log_probs,
        LAYER,
        SMALL_LAYER,
        tolerance=1e-2,
    ),
)
