"""Policy losses as the tests run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draws import BACKENDS, Shape
from torch import Tensor

import fastadv as fa

ON = pytest.mark.parametrize("backend", BACKENDS)


def run(
    config: Any, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor | None = None, **given: Any
) -> Any:
    """(output, gradient) of a loss."""
    leaf = log_probs.clone().requires_grad_()
    mask = torch.ones_like(log_probs) if mask is None else mask
    out = fa.policy_loss(leaf, old, advantages, mask, config=config, **given)
    out.loss.sum().backward()
    return out, leaf.grad


def rollouts(seed: int = 0) -> dict[str, Tensor]:
    d = Shape(lengths=(40, 1, 0, 17), seed=seed).draw()
    log_probs = -d.uniform(*d.tokens)
    return {
        "log_probs": log_probs,
        "old": log_probs + 0.2 * d.normal(*d.tokens),
        "mask": d.mask,
        "cu_seqlens": d.cu_seqlens,
        "advantages": d.normal(d.rows),
        "per token": d.normal(*d.tokens),
    }
