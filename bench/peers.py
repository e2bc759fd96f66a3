"""What our ops are compared with: verl's own function as its trainer calls it, and a compiler on the same formula."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

CLIP, DUAL_CLIP = 0.2, 3.0


def verl_vanilla() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """verl's policy loss (`compute_policy_loss_vanilla`), token-mean, with its default clips, metrics included.

    Raises:
        ImportError: verl is not installed; `make bench` installs it.
    """
    from verl.trainer.ppo import core_algos

    class Config(dict):  # type: ignore[type-arg]
        __getattr__ = dict.get

    config: Any = Config(
        clip_ratio=CLIP, clip_ratio_low=CLIP, clip_ratio_high=CLIP, clip_ratio_c=DUAL_CLIP, loss_agg_mode="token-mean",
        global_batch_info={},
    )  # fmt: skip

    def run(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        loss, _ = core_algos.compute_policy_loss_vanilla(
            old_log_probs, log_probs, advantages, mask, "token-mean", config, None
        )
        return loss

    return run


def formula(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same loss and metrics in plain PyTorch without a host synchronisation: what a compiler likes best."""
    zero = torch.zeros((), dtype=log_probs.dtype)
    log_probs = torch.where(mask, log_probs, zero)
    log_ratio = (log_probs - torch.where(mask, old_log_probs, zero)).clamp(-20, 20)
    ratio = log_ratio.exp()
    advantages = torch.where(mask, advantages, zero)
    plain = -advantages * ratio
    cut = -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)
    clipped = torch.maximum(plain, cut)
    loss = torch.where(advantages < 0, torch.minimum(clipped, -advantages * DUAL_CLIP), clipped)
    tokens = mask.sum()
    metrics = torch.stack([
        (cut > plain).sum() / tokens,
        ((clipped > -advantages * DUAL_CLIP) & (advantages < 0)).sum() / tokens,
        (-log_ratio).sum() / tokens,
    ])  # fmt: skip
    return loss.sum() / tokens, metrics.detach()


def compiled_formula() -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`torch.compile` of `formula`, with the default backend."""
    return torch.compile(formula, fullgraph=True)


def turn_advantages_loops(rewards: Tensor, groups: list[int], turn_ids: Tensor, kappa: float) -> Tensor:
    """The turn-reached baseline as a trainer would first write it: Python loops over groups, rollouts and turns."""
    lengths = (turn_ids.max(1).values + 1).tolist()
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    out = torch.zeros(turn_ids.shape)
    for rows in members.values():
        for i in rows:
            others = [j for j in rows if j != i]
            target = sum(float(rewards[j]) for j in others) / len(others)
            for turn in range(lengths[i]):
                reached = [float(rewards[j]) for j in others if lengths[j] > turn]
                bucket = sum(reached) / len(reached) if reached else target
                lam = len(reached) / (len(reached) + kappa)
                out[i][turn_ids[i] == turn] = float(rewards[i]) - (target + lam * (bucket - target))
    return out


def log_softmax_results(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and sum of squared probabilities as trainers write them: log_softmax in float32, then sums."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_p = torch.log_softmax(wide, -1)  # [N, V]
    p = log_p.exp()
    return log_p.gather(-1, labels[:, None]).squeeze(-1), -(p * log_p).sum(-1), (p * p).sum(-1)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """torch's mean cross-entropy from hidden states, rows outside the mask ignored: all logits at once."""
    return torch.nn.functional.linear_cross_entropy(hidden, weight, torch.where(mask, labels, -100), ignore_index=-100)


def linear_cross_entropy_chunked(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """The same in torch's chunks."""
    return torch.nn.functional.linear_cross_entropy(
        hidden, weight, torch.where(mask, labels, -100), ignore_index=-100, options=torch.nn.LinearCrossEntropyOptions()
    )


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, rows: int) -> Tensor:
        tokens, total = mask.sum(), torch.zeros(())
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros(weight.shape)
        for first in range(0, hidden.shape[0], rows):
            part = slice(first, first + rows)
            with torch.enable_grad():
                h, w = hidden[part].detach().requires_grad_(), weight.detach().requires_grad_()
                log_p = (h @ w.t()).float().log_softmax(-1).gather(-1, labels[part, None])[:, 0]
                loss = -torch.where(mask[part], log_p, 0.0).sum() / tokens
                d_hidden[part], part_of_weight = torch.autograd.grad(loss, (h, w))
            d_weight.add_(part_of_weight)
            total += loss.detach()
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * upstream, d_weight * upstream, None, None, None


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, rows: int) -> Tensor:
    """Mean cross-entropy in chunks of rows with torch's autograd for each, gradients made in the forward, as chunked
    losses of Liger and TRL do it: every row is multiplied, whether it counts or not."""
    return _Chunks.apply(hidden, weight, labels, mask, rows)


@contextlib.contextmanager
def bfloat16_operands(on: bool) -> Iterator[None]:
    """torch may multiply float32 that holds bfloat16 values by the processor's bfloat16 instructions, adding in
    float32."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if on:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
