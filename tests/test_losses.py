"""Known values of every loss, presets, configuration, rollouts' ratios and upstream gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from draws import BACKENDS, Shape
from loss_runs import ON, rollouts, run
from torch import Tensor

import fastadv as fa
from fastadv.losses import LOSSES, NATIVE_LOSSES, PRESETS

# Per-token loss and gradient at ratios .5, 1, 1.5, 4 with advantages +1 and -1: log_prob = ln r - 2, old = -2, a token
# a rollout. The numbers were computed in float64 from the papers' formulas and checked against TRL, verl and ROLL.
KNOWN = {
    "reinforce": [
        (2.6931, -1), (-2.6931, 1), (2, -1), (-2, 1), (1.5945, -1), (-1.5945, 1), (0.6137, -1), (-0.6137, 1),
    ],
    "ppo": [(-0.5, -0.5), (0.8, 0), (-1, -1), (1, 1), (-1.2, 0), (1.5, 1.5), (-1.2, 0), (4, 4)],
    "dapo": [(-0.5, -0.5), (0.8, 0), (-1, -1), (1, 1), (-1.28, 0), (1.5, 1.5), (-1.28, 0), (4, 4)],
    "ppo/verl": [(-0.5, -0.5), (0.8, 0), (-1, -1), (1, 1), (-1.2, 0), (1.5, 1.5), (-1.2, 0), (3, 0)],
    "delta": [(-0.5, -0.5), (0.8, 0), (-1, -1), (1, 1), (-1.2, 0), (1.3, 0), (-1.2, 0), (1.3, 0)],
    "cispo/trl": [
        (1.3466, -0.5), (-1.3466, 0.5), (2, -1), (-2, 1), (2.3918, -1.5), (-2.3918, 1.5), (2.4548, -4), (-2.4548, 4),
    ],
    "cispo/verl": [
        (2.1545, -0.8), (-2.1545, 0.8), (2, -1), (-2, 1), (1.9134, -1.2), (-1.9134, 1.2), (0.7364, -1.2),
        (-0.7364, 1.2),
    ],
    "tis/roll": [
        (1.3466, -0.5), (-1.3466, 0.5), (2, -1), (-2, 1), (1.5945, -1), (-1.5945, 1), (0.6137, -1), (-0.6137, 1),
    ],
    "sapo": [
        (-1.5102, -0.4700), (1.4159, 0.4671), (-2, -1), (1.9048, 1), (-2.4898, -1.4100), (2.3936, 1.4012),
        (-3.8103, -0.7228), (3.6530, 0.6304),
    ],
    "vespo": [
        (3.0175, -1.1204), (-0.9151, 0.3398), (2, -1), (-2, 1), (0.8005, -0.5020), (-1.9798, 1.2416),
        (0.0012, -0.0020), (-0.0974, 0.1586),
    ],
    "dppo_tv/verl": [
        (1.3466, -0.5), (-1.3466, 0.5), (2, -1), (-2, 1), (2.3918, -1.5), (-2.3918, 1.5), (0, 0), (-2.4548, 4),
    ],
    "dppo_kl/verl": [
        (1.3466, -0.5), (-1.3466, 0.5), (2, -1), (-2, 1), (2.3918, -1.5), (-2.3918, 1.5), (0, 0), (-2.4548, 4),
    ],
    "dppo_tv/prime-rl": [(-0.5, -0.5), (0.5, 0.5), (-1, -1), (1, 1), (-1.5, -1.5), (1.5, 1.5), (0, 0), (4, 4)],
    "ipo/prime-rl": [(-0.5, -0.5), (0.5, 0.5), (-1, -1), (1, 1), (-1.5, -1.5), (1.5, 1.5), (0, 0), (0, 0)],
    "dro": [
        (2.7052, -1.0347), (-2.6811, 0.9653), (2, -1), (-2, 1), (1.5986, -0.9797), (-1.5904, 1.0203),
        (0.6618, -0.9307), (-0.5657, 1.0693),
    ],
}  # fmt: skip
SAME_AS_PPO = ("grpo", "bnpo", "dr_grpo")  # token by token; they differ in what they divide by
CONFIGS = {name: PRESETS[name] for name in KNOWN if name != "delta"} | {"delta": fa.LossConfig(delta=1.3)}
CONFIGS |= {name: PRESETS[name] for name in SAME_AS_PPO}
RATIOS = torch.tensor([0.5, 0.5, 1, 1, 1.5, 1.5, 4, 4], dtype=torch.float64)
SIGNS = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)


def has_kernel(config: fa.LossConfig, backend: str) -> bool:
    return backend == "reference" or config.loss in NATIVE_LOSSES


RUNS = [(name, b) for name, config in CONFIGS.items() for b in BACKENDS if has_kernel(config, b)]


@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_known_values(name: str, backend: str) -> None:
    config = CONFIGS[name]
    dtype = torch.float64 if backend == "reference" else torch.float32
    log_probs = (RATIOS.log() - 2).to(dtype)
    out, gradient = run(
        config, log_probs, torch.full_like(log_probs, -2.0), SIGNS.to(dtype), cu_seqlens=torch.arange(9),
        reduction="none", backend=backend,
    )  # fmt: skip
    expected = torch.tensor(KNOWN["ppo" if name in SAME_AS_PPO else name], dtype=dtype)
    torch.testing.assert_close(out.loss.detach(), expected[:, 0], rtol=0, atol=5e-5)
    torch.testing.assert_close(gradient, expected[:, 1], rtol=0, atol=5e-5)


# ---- configuration ---------------------------------------------------------------------------------------------------


def test_every_loss_has_a_preset_and_every_preset_runs() -> None:
    assert {config.loss for config in PRESETS.values()} == set(LOSSES)
    d = Shape().draw()
    log_probs, old = -d.uniform(*d.tokens), -d.uniform(*d.tokens)
    step = fa.denominators(d.mask, d.cu_seqlens, horizon=50)
    for name, config in PRESETS.items():
        picked = d.mask & (log_probs < -0.9) if config.loss in ("clip_cov", "kl_cov") else None
        out, gradient = run(
            name, log_probs, old, d.normal(d.rows).repeat_interleave(d.cu_seqlens.diff()), d.mask,
            cu_seqlens=d.cu_seqlens, denominator=step, selected=picked,
        )  # fmt: skip
        assert out.loss.isfinite(), name
        assert gradient.abs().sum() > 0, name
        assert gradient[~d.mask].abs().sum() == 0, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "pop"}, "loss is 'pop'; it must be one of 'reinforce', 'ppo', 'cispo'"),
        (
            {"loss": "reinforce", "clip_low": 0.3},
            "clip_low is an option of 'ppo', 'cispo', .*'reinforce' loss ignores it",
        ),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip is an option of 'ppo', 'gspo'"),
        ({"loss": "ppo", "tau_pos": 2.0}, "tau_pos is an option of 'sapo'"),
        ({"loss": "ppo", "sequence_gradient": "mean"}, "sequence_gradient is an option of 'gspo'"),
        ({"sequence_gradient": "sum"}, "sequence_gradient is 'sum'; it must be one of 'straight-through', 'mean'"),
        ({"delta": 0.9}, "delta is 0.9; it must be above 1"),
        ({"delta": 1.2, "clip_high": 0.5}, "delta is 1.2; it must be at least 1 . clip_high, 1.5"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0; it must be above 1"),
        ({"clip_high": 1e39}, "clip_high is 1e.39; it must be finite"),
        ({"clip_low": float("nan")}, "clip_low is nan"),
        ({"loss": "clip_cov", "cov_fraction": 0.0}, "cov_fraction is 0.0"),
        ({"loss": "clip_cov", "cov_low": math.nan}, "cov_low is nan; it must be at most cov_high"),
        ({"loss": "clip_cov", "cov_low": 6.0}, "cov_low is 6.0; it must be at most cov_high"),
        ({"loss": "kl_cov", "cov_kl_coef": math.inf}, "cov_kl_coef is inf; it must be finite"),
        ({"loss": "vespo", "gamma_pos": (1.0,)}, "gamma_pos is .1.0,.; pass two numbers"),
        ({"loss": "vespo", "gamma_neg": 2.0}, "gamma_neg is 2.0; pass two numbers"),
        ({"loss": "gmpo", "clip_low": -1.0}, "clip_low is -1.0; it must be finite and at least 0"),
        ({"loss": "gmpo"}, "'gmpo' is a mean over rollouts; set loss_agg_mode='seq-mean-token-mean'"),
        ({"correction": (fa.Correction(), fa.Correction("mis"))}, "two of level 'token'"),
        (
            {"correction": (fa.Correction(), fa.Correction(level="sequence", missing="exclude"))},
            "treat missing log-probs differently",
        ),
        ({"loss": "vespo", "correction": fa.Correction(level="sequence")}, "'vespo' weighs whole rollouts itself"),
    ],
)
def test_options_that_are_unknown_or_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fa.LossConfig(**options)


ONES = torch.ones(3)


def test_options_of_the_wrong_type() -> None:
    with pytest.raises(TypeError, match=r"clip_low is '0\.2'; pass a number"):
        fa.LossConfig(clip_low="0.2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"seed is 1\.5; pass an integer"):
        fa.LossConfig("clip_cov", seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config is a dict; pass a LossConfig or the name of a preset"):
        fa.policy_loss(-ONES, -ONES, ONES, ONES, config={"loss": "ppo"})  # type: ignore[arg-type]
    assert fa.LossConfig("vespo", gamma_pos=[2.0, 1.0]).gamma_pos == (2.0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="does not support item assignment"):
        PRESETS["ppo"] = fa.LossConfig()  # type: ignore[index]
    with pytest.raises(TypeError, match="correction holds a str"):
        fa.LossConfig(correction="tis")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="kl is a str"):
        fa.LossConfig(kl="k3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'clip_hgih' is no option; the options are loss, clip_low"):
        fa.LossConfig().but(clip_hgih=0.3)
    with pytest.raises(ValueError, match="kind is 'tos'; it must be one of 'tis', 'mis', 'reject'"):
        fa.Correction("tos")
    with pytest.raises(ValueError, match=r"low is 1\.5; it must be in \[0, 1\], so that a ratio of 1 is inside"):
        fa.Correction(low=1.5)
    with pytest.raises(ValueError, match="estimator is 'k4'"):
        fa.KL("k4")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": fa.LossConfig(correction=fa.Correction())}, "rollout_log_probs is None; a correction needs it"),
        ({"rollout_log_probs": ONES}, "rollout_log_probs is given, but nothing reads it; a correction would"),
        ({"config": fa.LossConfig(kl=fa.KL())}, "ref_log_probs is None; a KL penalty needs it"),
        ({"ref_log_probs": ONES}, "ref_log_probs is given, but nothing reads it"),
        ({"config": fa.LossConfig(entropy_coef=0.1)}, "entropy is None; a non-zero entropy_coef needs it"),
        ({"entropy": ONES}, "entropy is given, but nothing reads it"),
        ({"entropy": ONES[:2], "config": fa.LossConfig(entropy_coef=0.1)}, r"entropy has shape \[2\]; expected \[3\]"),
        ({"selected": ONES.bool()}, "selected is given, but the 'ppo' loss selects nothing"),
        ({"config": "clip_cov", "denominator": 3.0}, "picks tokens out of the whole step"),
        ({"config": "gmpo", "is_weights": ONES}, "'gmpo' has one term a rollout"),
        ({"row_tokens": torch.tensor([3])}, "row_tokens is given, but loss_agg_mode 'token-mean' ignores it"),
        ({"denominator": 3.0, "reduction": "none"}, "denominator is given, but reduction 'none' divides by nothing"),
        ({"row_tokens": ONES, "reduction": "none"}, "row_tokens is given, but reduction 'none' divides by nothing"),
        ({"is_weights": ONES.clone().requires_grad_()}, "is_weights requires grad"),
        ({"denominator": torch.tensor(3.0, requires_grad=True)}, "denominator requires grad"),
    ],
)
def test_arguments_that_are_missing_or_ignored(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fa.policy_loss(-ONES, -ONES, ONES, ONES, **given)


def test_a_loss_without_a_kernel_says_so() -> None:
    for name in ("vespo", "gmpo", "clip_cov", "kl_cov"):
        fa.policy_loss(-ONES, -ONES, ONES, ONES, config=name)
        assert fa.last_backend() == "reference"
        with pytest.raises(
            fa.BackendUnavailableError, match=f"no kernel for the '{name}' loss; use backend='reference'"
        ):
            fa.policy_loss(-ONES, -ONES, ONES, ONES, config=name, backend="cpu")


# ---- rollouts' ratios ------------------------------------------------------------------------------------------------


@ON
def test_gspo_of_both_owners_agree_where_the_advantage_is_constant(backend: str) -> None:
    b = rollouts()
    free = {"clip_low": 0.05, "clip_high": 0.05, "denominator": "candidates"}
    verl, trl = (PRESETS[name].but(**free) for name in ("gspo/verl", "gspo/trl"))
    given = {"cu_seqlens": b["cu_seqlens"], "backend": backend}
    one = run(verl, b["log_probs"], b["old"], b["advantages"], b["mask"], **given)
    other = run(trl, b["log_probs"], b["old"], b["advantages"], b["mask"], **given)
    torch.testing.assert_close(one[0].loss, other[0].loss)
    torch.testing.assert_close(one[1], other[1])
    one = run(verl, b["log_probs"], b["old"], b["per token"], b["mask"], **given)
    other = run(trl, b["log_probs"], b["old"], b["per token"], b["mask"], **given)
    torch.testing.assert_close(one[0].loss, other[0].loss)
    assert not torch.allclose(one[1], other[1])
    rows = torch.repeat_interleave(torch.arange(4), b["cu_seqlens"].diff())
    for row in (0, 3):  # TRL's gradient is the same at all tokens of a rollout, and sums to verl's
        mine = (rows == row) & b["mask"]
        assert other[1][mine].unique().numel() == 1
        torch.testing.assert_close(other[1][mine].sum(), one[1][mine].sum())


@ON
def test_parts_of_a_rollout_take_the_reduced_log_ratio(backend: str) -> None:
    """Context parallel: two calls with halves of every rollout add up to the one with all of it."""
    b = rollouts(1)
    cu, mask = b["cu_seqlens"], b["mask"]
    config = PRESETS["gspo/verl"].but(
        clip_low=0.1, clip_high=0.1, correction=fa.Correction("tis", "sequence", 0.5, 1.5)
    )
    rollout = b["old"] + 0.05
    given = {"config": config, "cu_seqlens": cu, "backend": backend, "rollout_log_probs": rollout}
    step = fa.denominators(mask, cu)
    whole = run(config, b["log_probs"], b["old"], b["advantages"], mask, denominator=step, **{
        k: v for k, v in given.items() if k != "config"})  # fmt: skip
    policy = fa.sequence_log_ratios(b["log_probs"], b["old"], mask, cu, backend=backend)
    sampler = fa.sequence_log_ratios(b["old"], rollout, mask, cu, missing="skip", backend=backend)
    first = torch.cat([torch.arange(n) < n // 2 for n in cu.diff().tolist()])
    losses, gradients = [], torch.zeros_like(b["log_probs"])
    for part in (first, ~first):
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), part.long().cumsum(0)])[cu]
        out, gradient = run(
            config, b["log_probs"][part], b["old"][part], b["advantages"], mask[part], cu_seqlens=ends, backend=backend,
            denominator=step, sequence_log_ratios=policy, rollout_log_ratios=sampler, row_tokens=policy.tokens,
        )  # fmt: skip
        losses.append(out.loss)
        gradients[part] = gradient
    torch.testing.assert_close(sum(losses), whole[0].loss)
    torch.testing.assert_close(gradients, whole[1])
    with pytest.raises(ValueError, match="sequence_gradient='mean' needs all of a rollout's tokens"):
        fa.policy_loss(
            b["log_probs"], b["old"], b["advantages"], mask, config="gspo/trl", cu_seqlens=cu,
            sequence_log_ratios=policy,
        )  # fmt: skip
    with pytest.raises(ValueError, match="the 'ppo' loss has a ratio per token"):
        fa.policy_loss(b["log_probs"], b["old"], b["advantages"], mask, cu_seqlens=cu, sequence_log_ratios=policy)


@ON
def test_sequence_log_ratios(backend: str) -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, math.nan, -5.0], [0.0, 0.0, 0.0]])
    old = torch.tensor([[-1.5, math.nan, -1.0], [-2.0, -1.0, -4.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0]])
    skipped = fa.sequence_log_ratios(log_probs, old, mask, missing="skip", backend=backend)
    assert skipped.sum.tolist() == [-1.5, 0.0, 0.0]
    assert skipped.minimum.tolist() == [-2.0, -1.0, 0.0]
    assert (skipped.tokens.tolist(), skipped.missing.tolist()) == ([3, 2, 0], [1, 0, 0])
    assert skipped.mean().tolist() == [-0.75, 0.0, 0.0]
    visible = fa.sequence_log_ratios(log_probs, old, mask, backend=backend)
    assert visible.sum.isnan().tolist() == [True, False, False]


@ON
@pytest.mark.parametrize("loss", ["ppo", "gspo", "gspo, mean", "cispo", "sapo"])
def test_upstream_gradients_that_differ_by_token(loss: str, backend: str) -> None:
    """Where a rollout shares its gradient, each token's loss reaches all of its tokens."""
    b = rollouts(3)
    config = fa.LossConfig(loss.split(",")[0], **({"sequence_gradient": "mean"} if "mean" in loss else {}))
    upstream = torch.randn(b["log_probs"].shape, generator=torch.Generator().manual_seed(1))

    def gradient(backend: str, dtype: torch.dtype) -> Tensor:
        leaf = b["log_probs"].to(dtype, copy=True).requires_grad_()
        out = fa.policy_loss(
            leaf, b["old"].to(dtype), b["per token"].to(dtype), b["mask"], config=config, cu_seqlens=b["cu_seqlens"],
            reduction="none", backend=backend,
        )  # fmt: skip
        out.loss.backward(upstream.to(dtype))
        return leaf.grad

    if "mean" in loss and backend == "cpu":
        with pytest.raises(fa.BackendUnavailableError, match="no kernel for reduction 'none' with sequence_gradient"):
            gradient(backend, torch.float32)
        backend = "auto"
    exact = gradient("reference", torch.float64)
    torch.testing.assert_close(gradient(backend, torch.float32).double(), exact, rtol=1e-5, atol=1e-6)


def test_vespo_takes_whole_rollouts_where_weights_are_in_its_sum() -> None:
    b = rollouts(2)
    ratios = fa.sequence_log_ratios(b["log_probs"], b["old"], b["mask"], b["cu_seqlens"])
    args = ("vespo", b["log_probs"], b["old"], b["advantages"], b["mask"])
    whole, parts = (
        run(*args, cu_seqlens=b["cu_seqlens"]),
        run(*args, cu_seqlens=b["cu_seqlens"], sequence_log_ratios=ratios),
    )
    torch.testing.assert_close(parts[0].loss, whole[0].loss)
    with pytest.raises(ValueError, match="importance weights belong into the sum over a 'vespo' rollout"):
        run(*args, cu_seqlens=b["cu_seqlens"], sequence_log_ratios=ratios, is_weights=torch.ones_like(b["old"]))


@ON
def test_row_metrics_come_with_their_count(backend: str) -> None:
    b = rollouts(2)
    config = fa.LossConfig(correction=fa.Correction("mis", "geometric"))
    out, _ = run(config, b["log_probs"], b["old"], b["advantages"], b["mask"], cu_seqlens=b["cu_seqlens"],
                 rollout_log_probs=b["old"], backend=backend)  # fmt: skip
    assert out.metrics["rollouts"] == float((fa.token_counts(b["mask"], b["cu_seqlens"]) > 0).sum())


def test_upstream_gradients_of_tokens_that_do_not_count_stay_out_of_compiled_graphs() -> None:
    mask, weights = torch.tensor([1, 0, 1]), torch.tensor([1.0, 1.0, 0.0])
    old = torch.tensor([-1.0, -2.0, -3.0])

    def loss(leaf: Tensor) -> Tensor:
        return fa.policy_loss(leaf, old, torch.ones(3), mask, weights=weights, reduction="none", backend="cpu").loss

    leaf = old.clone().requires_grad_()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(leaf).backward(torch.tensor([2.0, math.nan, math.inf]))
    assert leaf.grad.tolist() == [-2.0, 0.0, 0.0]


# ---- what surviving mutants asked for --------------------------------------------------------------------------------


def test_the_configurations_horizon_goes_before_the_denominators() -> None:
    config = fa.LossConfig("reinforce", loss_agg_mode="seq-mean-token-sum-norm", horizon=10.0)
    step = fa.Denominators(tokens=1.0, sequences=1.0, candidates=1.0, horizon=2.0)
    ones = torch.ones(1, 1)
    assert float(fa.policy_loss(-ones, None, ones[0], ones, config=config, denominator=step).loss) == pytest.approx(0.1)


@ON
def test_a_rollouts_ratio_is_exact_far_below_one(backend: str) -> None:
    """Down to e^-80, and 0 for a token that the policy has come to exclude."""
    config = fa.LossConfig("gspo", 1.0, 0.0)
    log_probs, old = torch.tensor([[-61.0, -61.0], [-math.inf, -1.0]]), torch.full((2, 2), -1.0)
    out, gradient = run(config, log_probs, old, torch.ones(2), reduction="none", backend=backend)
    assert out.loss[0].tolist() == pytest.approx([-math.exp(-60)] * 2, rel=1e-4)
    assert out.loss[1].abs().max() < 1e-34
    assert gradient.isfinite().all()


@ON
def test_shared_gradients_of_long_rollouts_and_of_tokens_of_weight_zero(backend: str) -> None:
    """A rollout over three blocks of work; tokens of weight 0 get nothing and do not count."""
    g = torch.Generator().manual_seed(5)
    tokens = 40_000
    log_probs, mask = -torch.rand(tokens, generator=g), torch.rand(tokens, generator=g) < 0.7
    old = log_probs + 0.1 * torch.randn(tokens, generator=g)
    weights = (torch.rand(tokens, generator=g) < 0.8).float()
    config = fa.LossConfig("gspo", 0.9, 9.0, sequence_gradient="mean", loss_agg_mode="token-sum")
    for kl in (None, fa.KL("k2", 0.5)):
        given = {"weights": weights, "ref_log_probs": old - 0.3 if kl else None, "backend": backend}
        _, gradient = run(config.but(kl=kl), log_probs, old, torch.randn(tokens, generator=g), mask, **given)
        assert gradient[~mask | (weights == 0)].abs().sum() == 0
        if kl is None:
            assert gradient[mask & (weights != 0)].unique().numel() == 1


def test_a_shared_gradient_is_rounded_once() -> None:
    """In bfloat16, where the KL's gradient nearly cancels the policy's."""
    g = torch.Generator().manual_seed(0)
    log_probs = (-torch.rand(1, 64, generator=g)).bfloat16()
    old = (log_probs.float() + 0.01 * torch.randn(1, 64, generator=g)).bfloat16()
    ref = (log_probs.float() - 1 + 0.001 * torch.randn(1, 64, generator=g)).bfloat16()
    config = fa.LossConfig("gspo", 0.2, 0.2, sequence_gradient="mean", kl=fa.KL("k2", 1.0))
    gradients = [
        run(config, *(t.to(dtype) for t in (log_probs, old, torch.ones(1))), ref_log_probs=ref.to(dtype),
            denominator=1.0, backend=backend)[1]
        for dtype, backend in ((torch.bfloat16, "cpu"), (torch.float64, "reference"))
    ]  # fmt: skip
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=5e-3, atol=1e-6)


def test_upstream_gradients_of_excluded_rollouts_stay_out() -> None:
    weights = torch.tensor([0.0, 1.0])
    for backend in BACKENDS:
        leaf = torch.full((2, 2), -1.0, requires_grad=True)
        out = fa.policy_loss(leaf, leaf.detach(), torch.ones(2), torch.ones(2, 2), weights=weights, reduction="none",
                             backend=backend)  # fmt: skip
        out.loss.backward(torch.tensor([[math.nan, 1.0], [1.0, 1.0]]))
        assert leaf.grad.tolist() == [[0.0, 0.0], [-1.0, -1.0]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it loads for forward mode
def test_forward_mode_runs_on_the_reference() -> None:
    import torch.autograd.forward_ad as fw

    log_probs = torch.full((3,), -1.0)
    given = (log_probs, torch.ones(3), torch.ones(3))
    with fw.dual_level():
        dual = fw.make_dual(log_probs, torch.ones(3))
        assert float(fw.unpack_dual(fa.policy_loss(dual, *given).loss).tangent) == pytest.approx(-1.0)
        with pytest.raises(fa.BackendUnavailableError, match="transforms"):
            fa.policy_loss(dual, *given, backend="cpu")


def test_inputs_from_inference_mode_reach_every_loss() -> None:
    with torch.inference_mode():
        old, labels, hidden = torch.full((4,), -1.0), torch.arange(4) % 3, torch.randn(4, 5)
    weight = torch.randn(3, 5, requires_grad=True)
    fa.linear_policy_loss(hidden.clone(), weight, labels, old, torch.ones(4), torch.ones(4)).loss.backward()
    assert weight.grad.isfinite().all()
    log_probs, entropy = old, torch.ones(4, requires_grad=True)
    config = fa.LossConfig(entropy_coef=0.1)
    fa.policy_loss(log_probs, old, torch.ones(4), torch.ones(4), config=config, entropy=entropy).loss.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.025] * 4)


def test_norms_are_of_real_tensors() -> None:
    with pytest.raises(TypeError, match=r"tensors\[1\] is a NoneType"):
        fa.global_norm([torch.ones(2), None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"tensors\[0\] is of dtype torch.complex64"):
        fa.global_norm([torch.ones(2) * 1j])
