"""Public bug reports about policy losses, each under its id in data/reports.json (b..), and further ones with their
inputs here (k..)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from draws import BACKENDS
from test_reports import case, close, numbers
from torch import Tensor

import fastadv as fa
from fastadv.losses import AGGREGATIONS, LOSSES, NATIVE_LOSSES, PRESETS

ON = pytest.mark.parametrize("backend", BACKENDS)


def run(log_probs: Tensor, old: Tensor | None, advantages: Tensor, mask: Tensor, **given: Any) -> tuple[Any, Tensor]:
    leaf = log_probs.clone().requires_grad_()
    out = fa.policy_loss(leaf, old, advantages, mask, **given)
    out.loss.sum().backward()
    return out, leaf.grad


@ON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b12_the_exponent_of_a_kl_is_bounded(dtype: torch.dtype, backend: str) -> None:
    given, expected = case("B12")
    log_probs, ref = numbers(given["logp"]).to(dtype), numbers(given["ref_logp"]).to(dtype)
    config = fa.LossConfig(kl=fa.KL("low_var_kl", 1.0))
    out, gradient = run(
        log_probs, log_probs, torch.zeros(4), torch.ones(4), config=config, ref_log_probs=ref, reduction="none",
        backend=backend,
    )  # fmt: skip
    close(out.loss.detach(), expected["value"], 1e-6 if dtype == torch.float32 else 2e-3)
    close(gradient, expected["grad_wrt_logp"], 1e-6 if dtype == torch.float32 else 2e-3)
    wild = torch.tensor([-1e4, 1e4, -200.0, 200.0, -1e-4]).to(dtype)
    for kl in (fa.KL("k3", 1.0), fa.KL("k3", 1.0, "unbiased"), fa.KL("low_var_kl", 1.0)):
        out, gradient = run(wild, wild, torch.zeros(5), torch.ones(5), config=fa.LossConfig(kl=kl),
                            ref_log_probs=torch.zeros_like(wild), reduction="none", backend=backend)  # fmt: skip
        assert (out.loss[2:] >= 0).all()
        assert out.loss.isfinite().all()
        assert gradient.isfinite().all()


@ON
@pytest.mark.parametrize("sign", ["A=+1", "A=-1"])
def test_b15_a_sequence_ratio_neither_overflows_nor_divides_by_zero(sign: str, backend: str) -> None:
    given, expected = case("B15")
    log_ratio, mask = numbers(given["log_ratio"]), torch.tensor(given["mask"])
    config = PRESETS["gspo/verl"].but(clip_low=given["eps_low"], clip_high=given["eps_high"])
    advantages = torch.full((3,), 1.0 if sign == "A=+1" else -1.0)
    out, gradient = run(
        log_ratio - 1, torch.full_like(log_ratio, -1.0), advantages, mask, config=config, backend=backend
    )
    assert out.loss.item() == pytest.approx(expected[sign]["loss"], rel=1e-5)
    torch.testing.assert_close(gradient, numbers(expected[sign]["grad_wrt_logp"]), rtol=1e-5, atol=1e-7)
    wild = torch.where(mask != 0, log_ratio, math.nan)  # the empty sequence may hold anything
    again, same = run(wild - 1, torch.full_like(log_ratio, -1.0), advantages, mask, config=config, backend=backend)
    assert torch.equal(again.loss, out.loss)
    assert torch.equal(same, gradient)


@ON
def test_b17_a_rejected_token_is_decided_before_exp(backend: str) -> None:
    given, expected = case("B17")
    old, low, high = numbers(given["old_logp"]), *given["window"]
    config = fa.LossConfig(correction=fa.Correction("mis", low=low, high=high))
    args = (old, old, numbers(given["advantages"]), torch.tensor(given["mask"]))
    rollout = numbers(given["rollout_logp"])
    out, gradient = run(*args, config=config, rollout_log_probs=rollout, backend=backend)
    close(out.loss.detach(), expected["loss"])
    close(gradient, expected["grad_wrt_logp"])
    assert out.metrics["is_rejected_fraction"] == pytest.approx(2 / 4)
    ones = torch.ones(4)
    weight = fa.policy_loss(
        ones, old, -ones, ones, config=config.but(loss="reinforce"), rollout_log_probs=rollout, reduction="none",
        backend=backend,
    ).loss  # fmt: skip
    close(weight, expected["weights"])


@ON
def test_b18_a_missing_sampler_log_prob_is_neutral_and_infinities_are_capped(backend: str) -> None:
    given, expected = case("B18")
    old = numbers(given["old_logp"])
    sampler = torch.tensor([math.nan if x is None else float(x) for x in given["sampler_logp"]])
    ones = torch.ones(4)

    def weight(correction: fa.Correction) -> Tensor:
        config = fa.LossConfig("reinforce", correction=correction)
        return fa.policy_loss(
            ones, old, -ones, ones, config=config, rollout_log_probs=sampler, reduction="none", backend=backend
        ).loss

    close(weight(fa.Correction("tis", high=2.0)), expected["weights"])
    close(weight(fa.Correction("tis", high=2.0, missing="exclude"))[1], 0.0)
    close(weight(fa.Correction("mis", high=2.0))[2], 0.0)


@pytest.mark.parametrize(
    ("loss", "backend"), [(loss, b) for loss in LOSSES for b in BACKENDS if b == "reference" or loss in NATIVE_LOSSES]
)
@pytest.mark.parametrize("tokens", [None, 0.0])
def test_b26_a_batch_without_a_valid_token(loss: str, tokens: float | None, backend: str) -> None:
    given, expected = case("B26")
    log_probs = numbers(given["logp"]).requires_grad_()
    advantages, mask = numbers(given["advantages"]), torch.tensor(given["mask"])
    entropy = torch.rand(log_probs.shape).requires_grad_()
    for mode in AGGREGATIONS if loss != "gmpo" else ("seq-mean-token-mean",):
        config = fa.LossConfig(
            loss, loss_agg_mode=mode, horizon=2.0, kl=fa.KL("k3"), entropy_coef=0.1,
            correction=None if loss in ("gmpo", "vespo") else (fa.Correction(), fa.Correction("mis", "geometric")),
        )  # fmt: skip
        out = fa.policy_loss(
            log_probs, log_probs.detach(), advantages, mask, config=config, ref_log_probs=log_probs.detach() - 1,
            rollout_log_probs=log_probs.detach() if config.correction else None, entropy=entropy,
            denominator=None if tokens is None else fa.Denominators(tokens=tokens, sequences=0.0, candidates=0.0),
            selected=mask != 0 if loss in ("clip_cov", "kl_cov") else None, backend=backend,
        )  # fmt: skip
        assert out.loss.requires_grad
        assert out.loss.item() == expected["loss"]
        assert all(float(value) == expected["metrics"] for value in out.metrics.values())
        gradients = torch.autograd.grad(out.loss, (log_probs, entropy))
        for gradient in gradients:
            close(gradient, expected["grad"], 0.0)


def test_b38_norms_do_not_overflow_and_say_what_is_not_finite() -> None:
    given, expected = case("B38")
    bf16 = torch.full((100_000,), 0.01, dtype=torch.bfloat16)
    for spec, norm in zip(given["cases"], expected["norm"], strict=True):
        grads = spec["grads"]
        if grads == "100 x 1e20 fp32":
            tensors = [torch.full((10,), 1e20) for _ in range(10)]
        elif grads == "100000 x bf16(0.01)":
            tensors = [bf16]
        else:
            tensors = [torch.tensor([float(x) for x in grads])]
        before = [t.clone() for t in tensors]
        result = fa.global_norm(tensors)
        torch.testing.assert_close(
            result, torch.tensor(float(norm), dtype=torch.float64), rtol=1e-5, atol=0, equal_nan=True
        )
        for a, b in zip(tensors, before, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert fa.global_norm([]) == 0


# ---- further reports -------------------------------------------------------------------------------------------------


@ON
def test_k02_dapo_divides_by_the_tokens_of_the_whole_step(backend: str) -> None:
    """Liger-Kernel#1082: a normaliser per micro-batch made the gradient norm a hundred times too large."""
    masks = [torch.ones(1, 1), torch.ones(1, 9)]
    step = fa.denominators(torch.ones(10), torch.tensor([0, 1, 10]))
    losses = []
    for mask in masks:
        out, gradient = run(-torch.ones_like(mask), None, torch.ones(1), mask, config="reinforce", denominator=step,
                            backend=backend)  # fmt: skip
        losses.append(out.loss.item())
        assert torch.equal(gradient, torch.full_like(mask, -0.1))
    assert losses == pytest.approx([0.1, 0.9])


@ON
def test_k03_the_denominator_leaves_masked_sequences_out(backend: str) -> None:
    """TRL#6369, #6439: of two sequences of four tokens the second is masked."""
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    out, gradient = run(-torch.ones(2, 4), None, torch.ones(2), mask, config="reinforce", backend=backend)
    assert out.loss.item() == pytest.approx(1.0)
    assert gradient[0].tolist() == [-0.25] * 4


@ON
@pytest.mark.parametrize("preset", [name for name, config in PRESETS.items() if config.loss in NATIVE_LOSSES])
def test_k04_k05_all_completions_truncated(preset: str, backend: str) -> None:
    """TRL#3248; NeMo-RL#158 and OpenRLHF#1240, whose KL metric was NaN too."""
    config = PRESETS[preset].but(horizon=4.0)
    out, gradient = run(-torch.rand(2, 4), -torch.rand(2, 4), torch.ones(2), torch.zeros(2, 4), config=config,
                        backend=backend)  # fmt: skip
    assert out.loss.item() == 0
    assert gradient.abs().sum() == 0
    assert all(float(value) == 0 for value in out.metrics.values())


@ON
def test_k06_k07_a_masked_log_ratio_of_any_size_adds_nothing(backend: str) -> None:
    """prime-rl#2084: exp(89) at a masked token; NeMo-RL#4120: a gradient of NaN though the loss is finite."""
    for policy, other in ((-2.0, -91.0), (-1.0, -201.0), (-1.0, -math.inf)):
        log_probs, old = torch.tensor([-1.0, policy]), torch.tensor([-1.0, other])
        config = fa.LossConfig(correction=fa.Correction("tis"), kl=fa.KL("k3", 1.0))
        out, gradient = run(
            log_probs, old, torch.ones(2), torch.tensor([1, 0]), config=config, rollout_log_probs=old,
            ref_log_probs=old, backend=backend,
        )  # fmt: skip
        assert out.loss.item() == -1.0
        assert gradient.tolist() == [-1.0, 0.0]
        assert all(value.isfinite() for value in out.metrics.values())


@ON
def test_k08_icepop_of_a_log_ratio_of_a_thousand(backend: str) -> None:
    """OpenRLHF#1314: exp(1000) * 0."""
    log_probs = torch.tensor([-1.0, -1.0])
    rollout = torch.tensor([-1001.0, -1.0])
    config = fa.LossConfig(correction=fa.Correction("mis", low=0.5, high=5.0))
    out, gradient = run(log_probs, log_probs, torch.ones(2), torch.ones(2), config=config, rollout_log_probs=rollout,
                        backend=backend)  # fmt: skip
    assert out.loss.item() == -0.5
    assert gradient.tolist() == [0.0, -0.5]


@ON
@pytest.mark.parametrize("preset", [name for name, config in PRESETS.items() if config.loss in NATIVE_LOSSES])
def test_k09_padding_of_minus_ten_billion(preset: str, backend: str) -> None:
    """ms-swift#9767: padded log-probs 0 and -1e10."""
    log_probs, old = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.1, -2.0, -1e10]])
    config = PRESETS[preset].but(horizon=3.0)
    clean, expected = run(log_probs[:, :2], old[:, :2], torch.ones(1), torch.ones(1, 2), config=config, backend=backend)
    out, gradient = run(log_probs, old, torch.ones(1), torch.tensor([[1, 1, 0]]), config=config, backend=backend)
    torch.testing.assert_close(out.loss, clean.loss)
    assert gradient[0, 2] == 0
    torch.testing.assert_close(gradient[:, :2], expected)


# ---- wrong results found in other libraries --------------------------------------------------------------------------


@ON
@pytest.mark.parametrize("preset", ["gspo/trl", "gspo/verl"])
def test_sequence_ratios_ignore_upstream_gradients_of_padding(preset: str, backend: str) -> None:
    """A fused GRPO kernel multiplied the gradient by L / length when its per-token output was summed."""
    mask = torch.arange(6) < torch.tensor([[4], [2], [6]])
    generator = torch.Generator().manual_seed(0)
    log_probs, old = -torch.rand(3, 6, generator=generator), -torch.rand(3, 6, generator=generator)
    config = PRESETS[preset].but(clip_low=0.9, clip_high=9.0)
    args = (log_probs, old, torch.tensor([1.0, -1.0, 2.0]), mask)
    if preset == "gspo/trl" and backend != "reference":
        backend = "auto"  # per token this one has no kernel
    out, gradient = run(*args, config=config, reduction="none", backend=backend)
    ratio = ((log_probs - old) * mask).sum(1) / mask.sum(1)
    expected = -torch.tensor([1.0, -1.0, 2.0])[:, None] * ratio.exp()[:, None] * mask
    torch.testing.assert_close(out.loss.detach(), expected)
    torch.testing.assert_close(gradient, expected)


@ON
def test_luspo_is_a_mean_over_rollouts_of_length_times_loss(backend: str) -> None:
    """A fused kernel read the upstream gradient out of bounds here."""
    mask = torch.arange(6) < torch.tensor([[4], [2], [6]])
    generator = torch.Generator().manual_seed(1)
    log_probs, old = -torch.rand(3, 6, generator=generator), -torch.rand(3, 6, generator=generator)
    advantages = torch.tensor([1.0, -1.0, 2.0])
    config = PRESETS["luspo"].but(clip_low=0.9, clip_high=9.0)
    out, gradient = run(log_probs, old, advantages, mask, config=config, backend=backend)
    lengths = mask.sum(1)
    ratio = (((log_probs - old) * mask).sum(1) / lengths).exp()
    assert out.loss.item() == pytest.approx(float((-advantages * ratio * lengths).mean()), rel=1e-5)
    torch.testing.assert_close(gradient, (-advantages * ratio)[:, None] * mask / 3)
