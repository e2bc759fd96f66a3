"""Covariance losses, which pick tokens out of the whole step."""

from __future__ import annotations

import math

import pytest
import torch
from draws import Shape
from loss_runs import run
from torch import Tensor

import fastadv as fa


def test_covariance_selection() -> None:
    d = Shape(lengths=(400, 300), seed=4, density=0.8).draw()
    log_probs, old, advantages = -d.uniform(*d.tokens), -d.uniform(*d.tokens), 3 * d.normal(*d.tokens)
    on = d.mask
    covariance = (advantages - advantages[on].mean()) * (log_probs - log_probs[on].mean())
    config = fa.LossConfig("kl_cov", cov_fraction=0.05)
    picked = fa.covariance_selection(log_probs, old, advantages, on, config=config)
    count = int(int(on.sum()) * 0.05)
    assert torch.equal(picked, on & (covariance >= covariance[on].topk(count).values[-1]))

    config = fa.LossConfig("clip_cov", cov_fraction=0.05, cov_low=0.3, cov_high=2.0)
    picked = fa.covariance_selection(log_probs, old, advantages, on, config=config)
    ratio = (log_probs - old).exp()
    clipped = -advantages * ratio.clamp(0.8, 1.2) > -advantages * ratio
    allowed = on & ~clipped & (covariance > 0.3) & (covariance < 2.0)
    assert int(picked.sum()) == count < int(allowed.sum())
    assert not (picked & ~allowed).any()
    other = fa.covariance_selection(log_probs, old, advantages, on, config=config.but(seed=1))
    assert not torch.equal(picked, other)
    few = config.but(cov_fraction=1.0)
    assert torch.equal(fa.covariance_selection(log_probs, old, advantages, on, config=few), allowed)
    none = fa.covariance_selection(log_probs, old, advantages, torch.zeros_like(on), config=config)
    assert not none.any()


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_micro_batches_of_covariance_losses_take_the_steps_selection(loss: str) -> None:
    d = Shape(lengths=(60, 80, 40), seed=5).draw()
    log_probs, old, advantages = -d.uniform(*d.tokens), -d.uniform(*d.tokens), 3 * d.normal(*d.tokens)
    config = fa.LossConfig(loss, cov_fraction=0.1, **({"cov_low": 0.1} if loss == "clip_cov" else {}))
    whole = run(config, log_probs, old, advantages, d.mask, cu_seqlens=d.cu_seqlens)
    picked = fa.covariance_selection(log_probs, old, advantages, d.mask, config=config)
    step = fa.denominators(d.mask, d.cu_seqlens)
    losses, gradients = [], []
    for first, last in zip(d.cu_seqlens[:-1].tolist(), d.cu_seqlens[1:].tolist(), strict=True):
        part = slice(first, last)
        out, gradient = run(
            config, log_probs[part], old[part], advantages[part], d.mask[part], denominator=step, selected=picked[part]
        )
        losses.append(out.loss)
        gradients.append(gradient)
    torch.testing.assert_close(sum(losses), whole[0].loss)
    torch.testing.assert_close(torch.cat(gradients), whole[1])
    assert whole[0].metrics["dual_clip_fraction"] == pytest.approx(float(picked.sum() / d.mask.sum()))


def test_ties_of_the_covariance_pick_no_more_than_their_share() -> None:
    """Equal advantages, as in a step whose groups have no variance: every covariance is 0."""
    log_probs = -torch.rand(10_000)
    picked = fa.covariance_selection(log_probs, log_probs, torch.ones(10_000), torch.ones(10_000), config="kl_cov")
    assert picked.nonzero().flatten().tolist() == [0, 1]


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("per_row", [False, True])
def test_tokens_of_weight_zero_stay_out_of_the_covariance(loss: str, per_row: bool) -> None:
    d = Shape(lengths=(60, 80, 40), seed=6, padded=True).draw()
    log_probs, old, advantages = -d.uniform(*d.tokens), -d.uniform(*d.tokens), 3 * d.normal(*d.tokens)
    weights = torch.tensor([1.0, 0.0, 2.0]) if per_row else (d.uniform(*d.tokens) < 0.8).float()
    on = d.mask & ((weights[:, None] if per_row else weights) != 0)
    config = fa.LossConfig(loss, cov_fraction=0.1, **({"cov_low": 0.1} if loss == "clip_cov" else {}))
    clean, gradient = run(config, log_probs, old, advantages, d.mask, weights=weights)
    assert clean.metrics["dual_clip_fraction"] > 0.05
    for garbage in (math.nan, 1e30):
        dirty = [torch.where(on, values, garbage) for values in (log_probs, old, advantages)]
        out, same = run(config, *dirty, d.mask, weights=weights)
        assert torch.equal(out.loss, clean.loss)
        assert torch.equal(same, gradient)


def test_the_steps_selection_is_the_calls_own_in_low_precision() -> None:
    g = torch.Generator().manual_seed(8)
    log_probs = -torch.rand(5000, generator=g).bfloat16()
    old, advantages = (
        (log_probs.float() + 0.3 * torch.randn(5000, generator=g)).bfloat16(),
        torch.randn(5000, generator=g),
    )
    config = fa.LossConfig("clip_cov", cov_fraction=0.2, cov_low=0.05)
    picked = fa.covariance_selection(log_probs, old, advantages, torch.ones(5000), config=config)
    given = (log_probs, old, advantages, torch.ones(5000))
    assert torch.equal(
        fa.policy_loss(*given, config=config).loss, fa.policy_loss(*given, config=config, selected=picked).loss
    )


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_covariance_losses_in_a_graph(loss: str) -> None:
    log_probs = -torch.rand(64, generator=torch.Generator().manual_seed(0))
    config = fa.LossConfig(loss, cov_fraction=0.2)

    def value(leaf: Tensor) -> Tensor:
        return fa.policy_loss(leaf, log_probs, 3 * log_probs.sin(), torch.ones(64), config=config).loss

    leaf = 1.1 * log_probs
    torch.testing.assert_close(torch.compile(value, fullgraph=True, backend="aot_eager")(leaf), value(leaf))
