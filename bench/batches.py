"""Batches of the size that agents are trained on, and steps of a training loop over them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fastadv as fa
from bench import peers
from fastadv.ops import _policy_loss_kernel as op
from fastadv.ops._loss_arguments import TOKEN
from fastadv.ops.sequence_log_ratios import log_ratios_of
from fastadv.rows import Rows

TOKENS = 4_194_304
ROWS = 256
PPO = fa.LossConfig(clip_low=peers.CLIP, clip_high=peers.CLIP, dual_clip=peers.DUAL_CLIP)


def rollouts(rows: int = ROWS, tokens: int = TOKENS, seed: int = 0) -> dict[str, Tensor]:
    """Padded agent rollouts: turns of 64 to 512 sampled tokens, tool results of 32 to 256 between them."""
    generator = torch.Generator().manual_seed(seed)
    width = tokens // rows
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row in range(rows):
        at = 0
        while at < width:
            turn, tool = (int(torch.randint(a, b, (), generator=generator)) for a, b in ((64, 513), (32, 257)))
            mask[row, at : at + turn] = True
            at += turn + tool
    log_probs = -2 * torch.rand(rows, width, generator=generator)
    old_log_probs = log_probs + 0.1 * torch.randn(rows, width, generator=generator)
    return {
        "log_probs": log_probs,
        "old_log_probs": old_log_probs,
        "advantages": torch.randn(rows, width, generator=generator),
        "mask": mask,
        "rewards": torch.randint(0, 2, (rows,), generator=generator).float(),
        "groups": torch.arange(rows) // 8,
        "rollout_log_probs": old_log_probs + 0.02 * torch.randn(rows, width, generator=generator),
        "ref_log_probs": log_probs + 0.1 * torch.randn(rows, width, generator=generator),
    }


def forward_backward(loss: Callable[..., Tensor], batch: dict[str, Tensor]) -> Callable[[], None]:
    """A training step's use of a loss: value and gradient, as autograd gives them."""
    leaf = batch["log_probs"].clone().requires_grad_()

    def run() -> None:
        leaf.grad = None
        loss(leaf, batch["old_log_probs"], batch["advantages"], batch["mask"]).backward()

    return run


def raw_policy_loss(batch: dict[str, Tensor], config: fa.LossConfig) -> Callable[[], None]:
    """A loss's kernels into given buffers, the denominator given: gradient and metrics, and first the rollouts' ratios
    where the loss has those."""
    log_probs, old, mask = batch["log_probs"], batch["old_log_probs"], batch["mask"]
    counts = fa.token_counts(mask)
    by_row = config.loss_agg_mode == "seq-mean-token-mean"
    divisor = torch.as_tensor(mask.shape[0] if by_row else mask.sum(), dtype=torch.float64)
    inputs = op.Inputs(
        old_log_probs=old, mask=mask, cu_seqlens=None, advantages=batch["advantages"], turn_ids=None,
        segment_offsets=None, token_weights=None, row_weights=None, is_weights=None,
        row_tokens=counts if by_row else None, divisor=divisor,
        rollout_log_probs=batch["rollout_log_probs"] if config.corrections else None,
        ref_log_probs=batch["ref_log_probs"] if config.kl else None,
    )  # fmt: skip
    formula = op.Formula.of(config, TOKEN)
    gradient, sums = torch.empty_like(log_probs), torch.empty(len(op.SUMS), dtype=torch.float64)
    rows = Rows.of("bench", "mask", mask, None)

    def run() -> None:
        given = inputs
        if config.loss == "gspo":
            ratios = log_ratios_of("bench", log_probs, old, mask, rows, False, "cpu").mean().float()
            given = inputs._replace(row_log_ratios=ratios)
        op.POLICY_LOSS("cpu", log_probs, None, given, formula, gradient, None, None, sums)

    return run
