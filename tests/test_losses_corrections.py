"""Corrections for the sampler's policy, and KL penalties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loss_runs import ON, rollouts, run
from torch import Tensor

import fastadv as fa

# ---- corrections -----------------------------------------------------------------------------------------------------


def weight_of(correction: Any, old: Tensor, rollout: Tensor, backend: str, **given: Any) -> Tensor:
    """Weights as they multiply reinforce: log-prob 1 and advantage -1 make the token loss the weight itself."""
    config = fa.LossConfig("reinforce", correction=correction)
    ones = torch.ones_like(old)
    out = fa.policy_loss(
        ones, old, -ones, ones, config=config, rollout_log_probs=rollout, reduction="none", backend=backend, **given
    )
    return out.loss


LOG_RATIO = torch.tensor([[-2.0, 0.0, 0.5], [0.3, 0.3, 0.3], [200.0, 0.0, 0.0]])


@ON
def test_corrections_of_every_kind_and_level(backend: str) -> None:
    old = torch.full((3, 3), -1.0)
    rollout = old - LOG_RATIO
    e = math.exp
    by_token = {
        "tis": [[0.5, 1, e(0.5)], [e(0.3)] * 3, [2.0, 1, 1]],
        "mis": [[0, 1, e(0.5)], [e(0.3)] * 3, [0, 1, 1]],
        "reject": [[0, 1, 1], [1, 1, 1], [0, 1, 1]],
    }
    by_row = {
        ("tis", "sequence"): [0.5, 2.0, 2.0],
        ("mis", "sequence"): [0, 0, 0],
        ("mis", "geometric"): [e(-0.5), e(0.3), 0],
        ("tis", "geometric"): [e(-0.5), e(0.3), 2.0],
        ("reject", "geometric"): [1, 1, 0],
    }
    for kind, expected in by_token.items():
        weight = weight_of(fa.Correction(kind, low=0.5), old, rollout, backend)
        torch.testing.assert_close(weight, torch.tensor(expected).float(), msg=kind)
    for (kind, level), rows in by_row.items():
        weight = weight_of(fa.Correction(kind, level, low=0.5), old, rollout, backend)
        torch.testing.assert_close(weight, torch.tensor(rows)[:, None].expand(3, 3).float(), msg=f"{kind} {level}")


@ON
def test_corrections_multiply_and_a_veto_rejects_the_rollout(backend: str) -> None:
    old = torch.full((3, 3), -1.0)
    rollout = old - LOG_RATIO
    both = (fa.Correction("reject", "geometric", 0.5, 2.0), fa.Correction("tis", high=1.5))  # NeMo-RL's seq-mask-tis
    expected = torch.tensor([[math.exp(-2), 1, 1.5], [math.exp(0.3)] * 3, [0.0, 0, 0]])
    torch.testing.assert_close(weight_of(both, old, rollout, backend), expected)
    vetoed = weight_of(fa.Correction("tis", high=1.5, veto=0.2), old, rollout, backend)
    torch.testing.assert_close(vetoed, torch.tensor([[0.0] * 3, [math.exp(0.3)] * 3, [1.5, 1, 1]]))
    config = fa.LossConfig(correction=fa.Correction("mis", "geometric", 0.5, 2.0, veto=0.2))
    out = fa.policy_loss(old, old, torch.ones(3), torch.ones(3, 3), config=config, rollout_log_probs=rollout,
                         backend=backend)  # fmt: skip
    assert out.metrics["is_row_rejected_fraction"] == pytest.approx(1 / 3)
    assert out.metrics["is_veto_fraction"] == pytest.approx(1 / 3)
    assert out.metrics["is_rejected_fraction"] == pytest.approx(2 / 3)
    assert out.metrics["is_weight_mean"] == pytest.approx(math.exp(0.3) / 3)


@pytest.mark.row(32)
@ON
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_missing_sampler_log_probs(level: str, backend: str) -> None:
    old = torch.tensor([[-1.0, -1.0, -1.0]])
    rollout = torch.tensor([[-1.2, math.nan, -1.4]])
    present = {
        "token": [math.exp(0.2), 1.0, math.exp(0.4)],
        "sequence": [math.exp(0.6)] * 3,
        "geometric": [math.exp(0.3)] * 3,
    }
    neutral = weight_of(fa.Correction("tis", level, high=5.0), old, rollout, backend)
    torch.testing.assert_close(neutral, torch.tensor([present[level]]))
    excluded = weight_of(fa.Correction("tis", level, high=5.0, missing="exclude"), old, rollout, backend)
    torch.testing.assert_close(excluded, torch.tensor([present[level]]) * torch.tensor([1.0, 0.0, 1.0]))
    config = fa.LossConfig(correction=fa.Correction("tis", level))
    out = fa.policy_loss(old, old, -old, torch.ones(1, 3), config=config, rollout_log_probs=rollout, backend=backend)
    assert out.metrics["is_missing_fraction"] == pytest.approx(1 / 3)


@ON
def test_a_correction_touches_the_policy_term_only(backend: str) -> None:
    """KL and entropy of a rejected token stay; denominators too; the loss weight multiplies all."""
    log_probs, ref, entropy = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), torch.tensor([0.7, 0.9])
    rollout = torch.tensor([-1.0, 5.0])  # the second ratio is e^-7
    config = fa.LossConfig("reinforce", correction=fa.Correction("mis", low=0.5), kl=fa.KL("k1", 2.0), entropy_coef=0.1)
    leaf, entropy = log_probs.clone().requires_grad_(), entropy.requires_grad_()
    given = {"ref_log_probs": ref, "rollout_log_probs": rollout, "entropy": entropy, "config": config}
    out = fa.policy_loss(leaf, log_probs, torch.tensor([3.0, 4.0]), torch.ones(2), weights=torch.tensor([0.5, 0.25]),
                         backend=backend, **given)  # fmt: skip
    out.loss.backward()
    terms = [0.5 * (3.0 + 2 * 0.5 - 0.1 * 0.7), 0.25 * (0.0 + 2 * -1.0 - 0.1 * 0.9)]
    assert out.loss.item() == pytest.approx(sum(terms) / 2)
    assert leaf.grad.tolist() == pytest.approx([0.5 * (-3 + 2) / 2, 0.25 * 2 / 2])
    assert entropy.grad.tolist() == pytest.approx([-0.1 * 0.5 / 2, -0.1 * 0.25 / 2])
    assert out.metrics["policy_loss"] == pytest.approx(0.5 * 3.0 / 2)
    assert out.metrics["kl"] == pytest.approx((0.5 - 1.0) / 2)
    assert out.metrics["entropy"] == pytest.approx(0.8)


@ON
def test_parts_of_rollouts_take_corrections_of_both_levels(backend: str) -> None:
    """With the rollouts' log-ratios given, a correction of tokens and missing='exclude' still read the log-probs."""
    b = rollouts(2)
    cu, mask = b["cu_seqlens"], b["mask"]
    rollout = b["old"] + 0.3 * torch.randn(b["old"].shape, generator=torch.Generator().manual_seed(2))
    rollout[mask.nonzero()[4]] = math.nan
    both = (
        fa.Correction("tis", high=1.1, missing="exclude"),
        fa.Correction("mis", "geometric", 0.5, 2.0, missing="exclude"),
    )
    ratios = fa.sequence_log_ratios(b["old"], rollout, mask, cu, missing="skip", backend=backend)
    given = {"cu_seqlens": cu, "backend": backend}
    for corrections in (both, both[1]):
        config = fa.LossConfig(correction=corrections)
        args = (config, b["log_probs"], b["old"], b["advantages"], mask)
        whole = run(*args, rollout_log_probs=rollout, **given)
        parts = run(*args, rollout_log_probs=rollout, rollout_log_ratios=ratios, **given)
        assert torch.equal(parts[0].loss, whole[0].loss)
        assert torch.equal(parts[1], whole[1])
        with pytest.raises(ValueError, match="rollout_log_probs is None; a correction needs it"):
            run(*args, rollout_log_ratios=ratios, **given)
    with pytest.raises(TypeError, match="rollout_log_ratios is a Tensor; pass what"):
        run(*args, rollout_log_probs=rollout, rollout_log_ratios=ratios.sum, **given)
    wrong = ratios._replace(tokens=ratios.tokens[:2])
    with pytest.raises(ValueError, match=r"rollout_log_ratios.tokens has shape \[2\]; expected \[4\]"):
        run(*args, rollout_log_probs=rollout, rollout_log_ratios=wrong, **given)


@ON
def test_of_two_vetoes_the_stricter_one_counts_and_its_edge_is_inside(backend: str) -> None:
    old = torch.full((3, 1), -1.0)
    rollout = old + torch.tensor([[0.5], [1.0], [3.0]])
    corrections = (fa.Correction("tis", veto=math.exp(-1.0)), fa.Correction("tis", "geometric", veto=0.1))
    weights = weight_of(corrections, old, rollout, backend)
    torch.testing.assert_close(weights, torch.tensor([[math.exp(-1.0)], [math.exp(-2.0)], [0.0]]))


@ON
def test_impossible_under_both_policies_is_visible(backend: str) -> None:
    never = torch.tensor([-math.inf, -1.0])
    weights = weight_of(fa.Correction("tis"), never, never, backend)
    assert weights.isnan().tolist() == [True, False]


# ---- KL --------------------------------------------------------------------------------------------------------------

L = torch.tensor([-1000.0, -21.0, -3.0, -0.3, -1e-3, 0.0, 1e-3, 0.4, 3.0, 21.0, 1000.0])


def kl_of(kl: fa.KL, backend: str, log_ratio: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Value and gradient of the penalty alone: advantages are 0."""
    log_probs = L - 5.0
    old = log_probs if log_ratio is None else log_probs - log_ratio
    out, gradient = run(
        fa.LossConfig(kl=kl), log_probs, old, torch.zeros_like(L), ref_log_probs=torch.full_like(L, -5.0),
        reduction="none", backend=backend,
    )  # fmt: skip
    return out.loss.detach(), gradient


@ON
def test_kl_estimators(backend: str) -> None:
    exact = (L - 5.0).double() + 5.0
    values = {
        "k1": (exact, torch.ones_like(exact)),
        "abs": (exact.abs(), exact.sign()),
        "k2": (exact**2 / 2, exact),
        "low_var_kl": (
            (exact.clamp(-20, 20).neg().expm1() + exact.clamp(-20, 20)).clamp(max=10),
            torch.where((exact.abs() > 20) | (exact.neg().expm1() + exact > 10), 0.0, -exact.neg().expm1()),
        ),
    }
    for estimator, (value, gradient) in values.items():
        got = kl_of(fa.KL(estimator, 1.0), backend)
        torch.testing.assert_close(got[0].double(), value, rtol=2e-6, atol=1e-9, msg=estimator)
        torch.testing.assert_close(got[1].double(), gradient, rtol=2e-6, atol=1e-7, msg=estimator)
        straight = kl_of(fa.KL(estimator, 1.0, "straight-through"), backend)
        torch.testing.assert_close(straight[0].double(), value, rtol=2e-6, atol=1e-9, msg=estimator)
        torch.testing.assert_close(straight[1].double(), exact, rtol=2e-6, atol=1e-7, msg=estimator)


@ON
def test_k3_is_finite_everywhere_and_exact_in_between(backend: str) -> None:
    value, gradient = kl_of(fa.KL("k3", 1.0), backend)
    exact = (L - 5.0).double() + 5.0
    inside = exact.abs() <= 40
    torch.testing.assert_close(value[inside].double(), (exact.neg().expm1() + exact)[inside], rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(gradient[inside].double(), -exact.neg().expm1()[inside], rtol=1e-4, atol=1e-7)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient[0] < 0 < gradient[-1]  # it points back to the reference
    assert value[-1] == pytest.approx(999.0)


def test_the_cpu_kernel_keeps_the_digits_of_a_small_kl() -> None:
    """e^-l - 1 + l cancels where l is small; there the kernel takes the series."""
    small = torch.logspace(-4, math.log10(0.6), 300)
    for sign in (1, -1):
        log_probs = (sign * small).requires_grad_()
        zeros = torch.zeros_like(small)
        out = fa.policy_loss(log_probs, small, zeros, zeros + 1, config=fa.LossConfig(kl=fa.KL("k3", 1.0)),
                             ref_log_probs=zeros, reduction="none", backend="cpu")  # fmt: skip
        out.loss.sum().backward()
        l = log_probs.detach().double()
        exact = l**2 / 2 - l**3 / 6 + l**4 / 24 - l**5 / 120 + l**6 / 720 - l**7 / 5040 + l**8 / 40320 - l**9 / 362880
        torch.testing.assert_close(out.loss.detach().double(), exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(log_probs.grad.double(), -l.neg().expm1(), rtol=1e-6, atol=0)


@ON
def test_the_unbiased_form_multiplies_by_the_ratio_and_differentiates_it(backend: str) -> None:
    log_ratio = torch.full_like(L, 0.3)
    for estimator in ("k1", "k2", "low_var_kl"):
        own = kl_of(fa.KL(estimator, 1.0), backend)
        value, gradient = kl_of(fa.KL(estimator, 1.0, "unbiased"), backend, log_ratio)
        ratio = math.exp(0.3)
        torch.testing.assert_close(value, own[0] * ratio, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradient, (own[0] + own[1]) * ratio, rtol=1e-4, atol=1e-6)


@ON
def test_the_unbiased_form_has_no_gradient_through_a_ratio_that_is_cut(backend: str) -> None:
    log_probs, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    config = fa.LossConfig(kl=fa.KL("k2", 1.0, "unbiased"), log_ratio_bound=2.0)
    _, gradient = run(config, log_probs, log_probs - 3, torch.zeros(1), ref_log_probs=ref, backend=backend)
    assert gradient.item() == pytest.approx(0.5 * math.exp(2.0), rel=1e-5)
