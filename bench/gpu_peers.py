"""Peers of the GPU benchmarks, called as their users call them, where they are installed.

Each function imports its package when it is called, so that an absent one is an ImportError of that peer and nothing
else, and returns a function of tensors. What a peer leaves out is said beside it in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

PACKAGES = ("triton", "verl", "liger-kernel", "trl", "quack-kernels", "flash-attn")
IGNORED = -100  # the label that every cross-entropy passes over


def versions() -> dict[str, str]:
    """Of the packages that peers come from."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` with its default backend, for these sizes."""
    return torch.compile(function, fullgraph=True)


# ---- from logits: log-probs ------------------------------------------------------------------------------------------


def trl_log_probs() -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """TRL's `selective_log_softmax` and `entropy_from_logits`, two calls, as its trainer made them."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    return lambda logits, labels: (selective_log_softmax(logits, labels), entropy_from_logits(logits))


def trl_log_probs_at_once() -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """TRL's fused kernel for both, with a gradient."""
    from trl.trainer.utils import selective_log_softmax_and_entropy

    return lambda logits, labels: tuple(selective_log_softmax_and_entropy(logits, labels))


# ---- from logits: mean cross-entropy ---------------------------------------------------------------------------------


def torch_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """torch's own, of bfloat16 logits as they are."""
    return torch.nn.functional.cross_entropy(logits, labels)


def float32_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """torch's own, of logits widened first, as trainers write it."""
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def liger_cross_entropy() -> Callable[[Tensor, Tensor], Tensor]:
    """Liger's, which writes the gradient over the logits: it needs logits of its own."""
    from liger_kernel.transformers import LigerCrossEntropyLoss

    loss: Callable[[Tensor, Tensor], Tensor] = LigerCrossEntropyLoss()
    return loss


def flash_attn_cross_entropy() -> Callable[[Tensor, Tensor], Tensor]:
    """flash-attn's Triton cross-entropy, one loss a row, averaged."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    return lambda logits, labels: cross_entropy_loss(logits, labels)[0].mean()


def quack_cross_entropy() -> Callable[[Tensor, Tensor], Tensor]:
    """quack's, written in CuTe-DSL."""
    from quack.cross_entropy import cross_entropy

    return lambda logits, labels: cross_entropy(logits, labels, reduction="mean")


# ---- from logits: ppo ------------------------------------------------------------------------------------------------


def liger_grpo(clip: float) -> Callable[..., Tensor]:
    """Liger's GRPO loss of logits [B, T + 1, V], token-mean, without KL. Its default writes the gradient over the
    logits, which a second run would read: switched off."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    def loss(logits: Tensor, labels: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        value, _ = triton_grpo_loss(
            logits, old_log_probs, None, labels, advantages, mask, temperature=1.0, beta=0.0, eps_low=clip,
            eps_high=clip, inplace=False, loss_type="dapo", reduce=True,
        )  # fmt: skip
        return value

    return loss


# ---- from hidden states ----------------------------------------------------------------------------------------------


def all_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Mean cross-entropy of all logits at once, widened to `dtype`, rows outside the mask ignored."""
    logits = torch.nn.functional.linear(hidden, weight).to(dtype)
    return torch.nn.functional.cross_entropy(logits, torch.where(mask, labels, IGNORED), ignore_index=IGNORED)


def liger_linear_cross_entropy() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Liger's fused linear cross-entropy: chunks of rows, gradients made in the forward."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)
    return lambda hidden, weight, labels, mask: loss(weight, hidden, torch.where(mask, labels, IGNORED))


def verl_linear_log_probs() -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """verl's fused log-probs and entropy of hidden states."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, labels: tuple(linear_cross_entropy(hidden, weight, labels, 1.0, "none"))


def verl_linear_cross_entropy() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The same, averaged over the mask by its caller: it takes neither a mask nor an ignored label."""
    log_probs_of = verl_linear_log_probs()

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        log_probs, _ = log_probs_of(hidden, weight, labels)
        return -torch.where(mask, log_probs, 0.0).sum() / mask.sum()

    return loss
