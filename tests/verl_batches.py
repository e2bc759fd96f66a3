"""Padded micro-batches as verl hands them to a loss, and the configuration of its actor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
MASKS = (torch.bool, torch.int64, torch.float32)


class Batch(NamedTuple):
    """Fields of a micro-batch, `[B, R]`."""

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    rollout_is_weights: Tensor | None

    def part(self, rows: slice) -> Batch:
        """Some of the rows."""
        return Batch(*(None if t is None else t[rows] for t in self))


def batch(rows: int, width: int, seed: int = 0, *, mask: torch.dtype = torch.bool, weighted: bool = False) -> Batch:
    """A batch with at least one token, and rows without one where there are several."""
    g = torch.Generator().manual_seed(seed)
    on = torch.rand(rows, width, generator=g) < 0.7
    on[torch.rand(rows, generator=g) < 0.2] = False
    on[0, 0] = True
    log_prob = -2 * torch.rand(rows, width, generator=g) - 1e-3
    old = (log_prob + 0.4 * torch.randn(rows, width, generator=g)).clamp(max=-1e-3)
    weights = 2 * torch.rand(rows, width, generator=g) if weighted else None
    return Batch(log_prob, old, torch.randn(rows, width, generator=g), on.to(mask), weights)


@st.composite
def batches(draw: Any) -> Batch:
    """Batches of every mask dtype, with and without importance weights."""
    return batch(
        draw(st.integers(1, 5)), draw(st.integers(1, 13)), draw(st.integers(0, 2**31)),
        mask=draw(st.sampled_from(MASKS)), weighted=draw(st.booleans()),
    )  # fmt: skip


INFOS = st.sampled_from([
    {},
    {"dp_size": 1, "batch_num_tokens": 61, "global_batch_size": 8, "loss_scale_factor": 17},
    {"dp_size": 2, "batch_num_tokens": 140, "global_batch_size": 12, "loss_scale_factor": 40},
])  # fmt: skip


def actor(info: dict[str, Any] | None = None, policy_loss: Any = None, **keys: Any) -> Any:
    """verl's configuration of an FSDP actor."""
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss or PolicyLossConfig(),
        **keys,
    )  # fmt: skip
    config.global_batch_info.update(info or {})
    return config


class Result(NamedTuple):
    """What a loss gave."""

    loss: Tensor
    gradient: Tensor
    metrics: dict[str, Any]


def run(function: Any, given: Batch, mode: str, config: Any) -> Result:
    """A call as verl makes it: under autocast, by keywords, the loss edited in place, then the backward."""
    leaf = given.log_prob.clone().requires_grad_()
    fields = given._asdict() | {"log_prob": leaf}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, metrics = function(**fields, loss_agg_mode=mode, config=config)
    value = loss.detach().clone()
    loss -= 0.25 * leaf.sum()
    loss += 0.5 * leaf.sum()
    loss.backward()
    assert leaf.grad is not None
    return Result(value, leaf.grad - 0.25, metrics)


def assert_same(ours: Result, theirs: Result) -> None:
    """Equal value and gradient to float32's rounding, and the same metrics."""
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=2e-5, atol=2e-6)
    assert ours.metrics.keys() == theirs.metrics.keys()
    for name, value in theirs.metrics.items():
        assert abs(ours.metrics[name] - value) <= 2e-6 + 2e-5 * abs(value), name
