"""What our ops are compared with: verl's own function as its trainer calls it, and a compiler on the same formula."""

from __future__ import annotations

from collections.abc import Callable
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
    log_p = torch.log_softmax(logits.float(), -1)  # [N, V]
    p = log_p.exp()
    return log_p.gather(-1, labels[:, None]).squeeze(-1), -(p * log_p).sum(-1), (p * p).sum(-1)
