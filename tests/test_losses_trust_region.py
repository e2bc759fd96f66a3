"""Trust regions (dppo_tv, dppo_kl, ipo), dro and the off-policy sequence mask, against formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from draws import BACKENDS
from loss_runs import rollouts, run
from torch import Tensor

import fastadv as fa
from fastadv.losses import AGGREGATIONS, PRESETS

NATIVE = [backend for backend in BACKENDS if backend != "reference"]
LIMITS = {"divergence_low": 0.04, "divergence_high": 0.06}
CONFIGS = {
    "dppo_tv": fa.LossConfig("dppo_tv", **LIMITS, ratio_cap=1.2),
    "dppo_kl": fa.LossConfig("dppo_kl", divergence_low=0.01, divergence_high=0.02, ratio_cap=1.2),
    "dppo_tv, ratio": fa.LossConfig("dppo_tv", **LIMITS, ratio_cap=1.2, surrogate="ratio"),
    "dppo_kl, two sides": fa.LossConfig("dppo_kl", divergence_low=0.01, divergence_high=0.02, two_sided=True),
    "ipo": PRESETS["ipo/prime-rl"],
    "dro": fa.LossConfig("dro", dro_beta=0.4),
}


def term(config: fa.LossConfig, log_prob: Tensor, old: float, advantage: float) -> Tensor:
    """One token's loss, with a graph."""
    if config.loss == "dro":
        return -(advantage * log_prob - config.dro_beta / 2 * (log_prob - old) ** 2)
    p, q = math.exp(log_prob.item()), math.exp(old)
    if config.loss == "dppo_tv":
        divergence = abs(p - q)
    else:
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    limit = config.divergence_high if p > q else config.divergence_low
    pushed_on = (advantage > 0) == (p > q)
    if divergence > limit and (pushed_on or config.two_sided):
        return 0 * log_prob
    ratio = torch.exp(log_prob - old)
    if config.ratio_cap is not None:
        ratio = ratio.clamp(max=config.ratio_cap)
    return -advantage * (ratio if config.surrogate == "ratio" else ratio.detach() * log_prob)


def oracle(config: fa.LossConfig, b: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(token losses, their sum's gradient), a token at a time."""
    leaf = b["log_probs"].clone().requires_grad_()
    zero = 0 * leaf.sum()
    losses = torch.stack([
        term(config, leaf[i], float(b["old"][i]), float(b["per token"][i])) if b["mask"][i] else zero
        for i in range(len(leaf))
    ])  # fmt: skip
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


@pytest.mark.parametrize("name", CONFIGS)
def test_terms_are_the_formulas(name: str) -> None:
    config = CONFIGS[name]
    kinds: set[tuple[bool, bool, bool]] = set()
    for seed in range(4):
        b = {key: t.double() if t.is_floating_point() else t for key, t in rollouts(seed).items()}
        b["old"] = b["old"].clamp(max=-0.01)
        args = (config, b["log_probs"], b["old"], b["per token"], b["mask"])
        out, gradient = run(*args, cu_seqlens=b["cu_seqlens"], reduction="none")
        losses, expected = oracle(config, b)
        torch.testing.assert_close(out.loss.detach(), losses)
        torch.testing.assert_close(gradient, expected)
        out32, gradient32 = run(
            config, *(b[key].detach().float() for key in ("log_probs", "old", "per token")), b["mask"],
            cu_seqlens=b["cu_seqlens"], reduction="none",
        )  # fmt: skip
        torch.testing.assert_close(out32.loss.detach().double(), losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient32.double(), expected, rtol=1e-5, atol=1e-6)
        on = b["mask"]
        zero = (losses == 0)[on]
        assert float(out.metrics["clip_fraction"]) == pytest.approx(float(zero.double().mean()))
        kinds |= set(zip((b["per token"] > 0)[on].tolist(), (b["log_probs"] > b["old"])[on].tolist(), zero.tolist(),
                         strict=True))  # fmt: skip
    if config.loss == "dro":
        return
    # Every way to go was met, with either sign of the advantage, and left out only where it may be.
    ways = {(True, True), (True, False), (False, True), (False, False)}
    assert {(positive, up) for positive, up, gone in kinds if not gone} == ways
    expected_ways = ways if config.two_sided else {(True, True), (False, False)}
    assert {(positive, up) for positive, up, gone in kinds if gone} == expected_ways


def test_the_cap_is_a_metric_of_what_stays() -> None:
    """Ratios of 4 and 1.5 under a cap of 1.3; the first is outside for its positive advantage."""
    old = torch.full((4,), -2.0)
    log_probs = old + torch.tensor([4.0, 4.0, 1.5, 1.0]).log()
    out, gradient = run(
        fa.LossConfig("dppo_tv", ratio_cap=1.3), log_probs, old, torch.tensor([1.0, -1.0, 1.0, 1.0]),
        reduction="none",
    )  # fmt: skip
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.3, -1.3, -1.0]))
    assert out.metrics["clip_fraction"] == 0.25
    assert out.metrics["dual_clip_fraction"] == 0.5


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl"])
def test_probabilities_of_zero_and_one(loss: str) -> None:
    """A token that the policy has come to exclude is outside where that is what the advantage asks for; certainty is a
    number too."""
    log_probs, old = torch.tensor([-math.inf, 0.0, 0.0, -1.0]), torch.tensor([-1.0, -1.0, 0.0, -math.inf])
    out, gradient = run(fa.LossConfig(loss, ratio_cap=2.0), log_probs, old, torch.tensor([-1.0, 1.0, 1.0, -1.0]),
                        reduction="none")  # fmt: skip
    assert out.loss.tolist() == [0.0, 0.0, 0.0, -2.0]
    assert gradient.tolist() == [0.0, 0.0, -1.0, 2.0]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("where", ["log_probs", "old", "per token"])
def test_nan_is_seen_where_a_token_counts_and_nowhere_else(name: str, where: str) -> None:
    b = rollouts(1)
    config = CONFIGS[name]

    def loss(tensors: dict[str, Tensor]) -> tuple[Any, Tensor]:
        return run(config, tensors["log_probs"], tensors["old"], tensors["per token"], b["mask"],
                   cu_seqlens=b["cu_seqlens"])  # fmt: skip

    clean, gradient = loss(b)
    for garbage in (math.nan, math.inf, -math.inf):
        out, same = loss({**b, where: torch.where(b["mask"], b[where], garbage)})
        assert torch.equal(out.loss, clean.loss)
        assert torch.equal(same, gradient)
    for token in b["mask"].nonzero()[:, 0].tolist():
        dirty = b[where].clone()
        dirty[token] = math.nan
        assert loss({**b, where: dirty})[0].loss.isnan()


MASKS = {
    "rollout": fa.LossConfig(sequence_mask=fa.SequenceMask(0.01)),
    "token": fa.LossConfig("cispo", sequence_mask=fa.SequenceMask(0.01, "token")),
    "sampler": fa.LossConfig("gspo", sequence_mask=fa.SequenceMask(0.01, log_probs="rollout")),
}


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", [*CONFIGS, *MASKS])
def test_micro_batches_add_up(name: str, mode: str) -> None:
    config = (CONFIGS | MASKS)[name].but(loss_agg_mode=mode, horizon=20.0)
    b = rollouts(2)
    step = fa.denominators(b["mask"], b["cu_seqlens"])
    by_sampler = config.sequence_mask is not None and config.sequence_mask.log_probs == "rollout"

    def part(first: int, last: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        cu = b["cu_seqlens"][first : last + 1]
        tokens = slice(int(cu[0]), int(cu[-1]))
        out, gradient = run(
            config, b["log_probs"][tokens], b["old"][tokens], b["per token"][tokens], b["mask"][tokens],
            cu_seqlens=cu - cu[0], denominator=step,
            rollout_log_probs=b["old"][tokens] + 0.02 if by_sampler else None,
        )  # fmt: skip
        return out.loss, gradient, out.metrics

    whole = part(0, 4)
    parts = [part(row, row + 1) for row in range(4)]
    torch.testing.assert_close(sum(loss for loss, _, _ in parts), whole[0])
    assert torch.equal(torch.cat([gradient for _, gradient, _ in parts]), whole[1])
    assert whole[1].abs().sum() > 0
    if config.sequence_mask is not None:
        assert 0 < whole[2]["sequence_mask_fraction"] < 1


@pytest.mark.parametrize("config", [*CONFIGS.values(), *MASKS.values()], ids=[*CONFIGS, *MASKS])
def test_native_backends_refuse_by_name_and_auto_takes_the_reference(config: fa.LossConfig) -> None:
    values = torch.full((3,), -1.0)
    sampler = values if config.sequence_mask is not None and config.sequence_mask.log_probs == "rollout" else None

    def loss(backend: str) -> Tensor:
        ones = torch.ones(3)
        return fa.policy_loss(
            values, values, ones, ones, config=config, rollout_log_probs=sampler, backend=backend
        ).loss

    what = "a sequence_mask" if config.sequence_mask is not None else f"the '{config.loss}' loss"
    for backend in NATIVE:
        with pytest.raises(fa.BackendUnavailableError, match=f"no kernel for {what}; use backend='reference'"):
            loss(backend)
    assert torch.equal(loss("auto"), loss("reference"))
    assert fa.last_backend() == "reference"


# ---- the sequence mask -----------------------------------------------------------------------------------------------


def masked(sequence_mask: fa.SequenceMask, gaps: Any, advantages: Any, **given: Any) -> Any:
    """(output, gradient) of reinforce, so that a token's gradient is minus its advantage, or 0 where it is left out."""
    gaps = torch.tensor(gaps)
    config = fa.LossConfig("reinforce", sequence_mask=sequence_mask)
    log_probs = torch.full_like(gaps, -1.0)
    return run(config, log_probs, log_probs + gaps, torch.tensor(advantages), reduction="none", **given)


def test_a_rollout_that_is_too_far_is_left_out_where_its_advantage_is_negative() -> None:
    gaps = [[0.3, 0.0, 0.0], [0.4, 0.2, 0.1], [0.4, 0.2, 0.1], [-3.0, -3.0, -3.0]]  # means .1, .233, .233, -3
    for sign in ("rollout", "token"):
        out, gradient = masked(fa.SequenceMask(0.2, sign), gaps, [-1.0, -1.0, 1.0, -1.0])
        assert gradient[:, 0].tolist() == [1.0, 0.0, -1.0, 1.0]
        assert torch.equal(gradient, gradient[:, :1].expand(4, 3))
        assert out.metrics["sequence_mask_fraction"] == 0.25
    _, gradient = masked(fa.SequenceMask(0.25), gaps, [-1.0, -1.0, 1.0, -1.0])
    assert gradient[1].tolist() == [1.0] * 3


@pytest.mark.parametrize("report", ["miles#1127", "slime#1917"])
def test_advantages_of_mixed_sign(report: str) -> None:
    """The reports' case: by token, the positive tokens of a rollout that should go stay; by rollout, none does."""
    gaps, advantages = [[1.0, 1.0, 1.0]], [[-0.5, 0.25, -0.25]]
    assert masked(fa.SequenceMask(0.1, "token"), gaps, advantages)[1].tolist() == [[0.0, -0.25, 0.0]], report
    assert masked(fa.SequenceMask(0.1), gaps, advantages)[1].tolist() == [[0.0, 0.0, 0.0]], report
    assert fa.SequenceMask(0.1).sign == "rollout"
    up = [[-0.5, 1.25, -0.25]]  # the rollout's sum is positive: it stays whole
    assert masked(fa.SequenceMask(0.1), gaps, up)[1].tolist() == [[0.5, -1.25, 0.25]], report


def test_only_tokens_that_count_decide() -> None:
    """Masked tokens and tokens of weight 0 are in neither mean nor sum."""
    gaps, advantages = [[0.5, 0.0, math.nan, 0.0]], [[-1.0, 9.0, math.nan, 9.0]]
    counted = {"mask": torch.tensor([[1, 1, 0, 0]]), "weights": torch.tensor([[1.0, 0.0, 1.0, 1.0]])}
    out, gradient = masked(fa.SequenceMask(0.4), gaps, advantages, **counted)
    assert gradient.tolist() == [[0.0] * 4]
    assert out.metrics["sequence_mask_fraction"] == 1.0
    assert masked(fa.SequenceMask(0.5), gaps, advantages, **counted)[1].tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_a_missing_sampler_log_prob_is_no_gap() -> None:
    """It counts in the mean, as in TRL: 0.6 over two tokens. An old log-prob of NaN is a fault and stays visible."""
    by_sampler = fa.SequenceMask(0.4, log_probs="rollout")
    sampler = torch.tensor([[-0.4, math.nan], [-0.1, math.nan]])
    out, gradient = masked(by_sampler, [[0.0, 0.0]] * 2, [-1.0, -1.0], rollout_log_probs=sampler)
    assert gradient.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert "is_missing_fraction" not in out.metrics  # no correction weighs anything
    out, _ = run(fa.LossConfig(sequence_mask=fa.SequenceMask(0.1)), torch.full((1, 2), -1.0),
                 torch.tensor([[5.0, math.nan]]), -torch.ones(1))  # fmt: skip
    assert out.loss.isnan()


def test_the_mask_touches_the_policy_term_only() -> None:
    """KL and entropy stay, the denominator too, and what else is seen is of all tokens."""
    log_probs, old = torch.full((2, 2), -1.0), torch.tensor([[-0.5, -0.5], [-1.0, -1.0]])
    entropy = torch.full((2, 2), 0.5, requires_grad=True)
    config = fa.LossConfig(
        sequence_mask=fa.SequenceMask(0.1),
        kl=fa.KL("k1", 2.0),
        entropy_coef=0.1,
        correction=fa.Correction("mis"),
    )
    out, gradient = run(
        config, log_probs, old, torch.tensor([-1.0, -1.0]), ref_log_probs=log_probs - 0.3, entropy=entropy,
        rollout_log_probs=old,
    )  # fmt: skip
    assert out.loss.item() == pytest.approx((2 * 1.0 + 4 * (2 * 0.3 - 0.1 * 0.5)) / 4)
    assert gradient.tolist() == [[pytest.approx(0.5)] * 2, [pytest.approx(0.75)] * 2]
    assert entropy.grad.tolist() == [[pytest.approx(-0.025)] * 2] * 2
    assert out.metrics["policy_loss"] == pytest.approx(0.5)
    assert out.metrics["sequence_mask_fraction"] == 0.5
    assert out.metrics["is_rejected_fraction"] == 0.0  # of the correction
    assert out.metrics["clip_fraction"] == 0.5  # the rollout that is left out is clipped as well
    assert out.metrics["approx_kl"] == pytest.approx(0.25)
    alone = fa.LossConfig(sequence_mask=fa.SequenceMask(0.1))
    assert run(alone, log_probs, old, torch.tensor([-1.0, -1.0]))[0].metrics["clip_fraction"] == 0.5


@pytest.mark.parametrize("preset", ["gspo/trl", "vespo", "gmpo"])
def test_losses_of_whole_rollouts_keep_their_ratios(preset: str) -> None:
    b = rollouts(4)
    gap = torch.stack([
        (b["old"] - b["log_probs"])[first:last][b["mask"][first:last]].sum() / max(int(b["mask"][first:last].sum()), 1)
        for first, last in zip(b["cu_seqlens"][:-1].tolist(), b["cu_seqlens"][1:].tolist(), strict=True)
    ])  # fmt: skip
    advantages = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    delta = float(gap.sort().values[-2] + gap.sort().values[-1]) / 2  # the rollout that is furthest goes
    config = PRESETS[preset]
    given = {"cu_seqlens": b["cu_seqlens"], "denominator": 1.0}
    _, gradient = run(config.but(sequence_mask=fa.SequenceMask(delta)), b["log_probs"], b["old"], advantages, b["mask"],
                      **given)  # fmt: skip
    _, without = run(config, b["log_probs"], b["old"], advantages * (gap <= delta), b["mask"], **given)
    torch.testing.assert_close(gradient, without)
    assert without.abs().sum() > 0
    _, plain = run(config, b["log_probs"], b["old"], advantages, b["mask"], **given)
    assert not torch.equal(gradient, plain)


def test_losses_from_hidden_states_and_in_graphs() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 6, 5, generator=g), torch.randn(7, 5, generator=g).requires_grad_()
    labels, mask = torch.randint(0, 7, (2, 6), generator=g), torch.ones(2, 6)
    log_probs = fa.linear_log_probs(hidden, weight.detach(), labels).log_probs
    old = log_probs + torch.tensor([[0.5], [0.0]])
    given = {"config": fa.LossConfig("cispo", sequence_mask=fa.SequenceMask(0.2))}
    fa.linear_policy_loss(hidden, weight, labels, old, -torch.ones(2), mask, chunk_tokens=4, **given).loss.backward()
    (mine, weight.grad) = (weight.grad, None)
    leaf = fa.linear_log_probs(hidden, weight, labels).log_probs
    fa.policy_loss(leaf, old, torch.tensor([0.0, -1.0]), mask, config="cispo/verl").loss.backward()
    torch.testing.assert_close(mine, weight.grad, rtol=1e-5, atol=1e-6)

    def value(x: Tensor) -> Tensor:
        return fa.policy_loss(x, old, -torch.ones(2), mask, **given).loss

    torch.testing.assert_close(torch.compile(value, fullgraph=True, backend="aot_eager")(log_probs), value(log_probs))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fa.LossConfig(divergence_low=0.1), ValueError, "divergence_low is an option of 'dppo_tv', 'dppo_kl'"),
        (lambda: fa.LossConfig("dro", divergence_high=0.1), ValueError, "divergence_high is an option of 'dppo_tv'"),
        (
            lambda: fa.LossConfig("dppo_tv", clip_high=0.1),
            ValueError,
            "clip_high is an option of .*'dppo_tv' loss ignor",
        ),
        (lambda: fa.LossConfig("dppo_tv", dual_clip=3.0), ValueError, "dual_clip is an option of 'ppo', 'gspo'"),
        (lambda: fa.LossConfig("dppo_kl", dro_beta=0.1), ValueError, "dro_beta is an option of 'dro'"),
        (lambda: fa.LossConfig(two_sided=True), ValueError, "two_sided is an option of 'dppo_tv', 'dppo_kl'"),
        (lambda: fa.LossConfig(ratio_cap=None), ValueError, "ratio_cap is an option of 'dppo_tv', 'dppo_kl'"),
        (lambda: fa.LossConfig(surrogate="ratio"), ValueError, "surrogate is an option of 'dppo_tv', 'dppo_kl'"),
        (lambda: fa.LossConfig("dppo_tv", surrogate="r"), ValueError, "surrogate is 'r'; it must be one of 'log-prob'"),
        (
            lambda: fa.LossConfig("dppo_tv", divergence_low=-0.1),
            ValueError,
            "divergence_low is -0.1; it must be finite",
        ),
        (lambda: fa.LossConfig("dppo_tv", divergence_high=math.nan), ValueError, "divergence_high is nan"),
        (
            lambda: fa.LossConfig("dppo_tv", ratio_cap=0.5),
            ValueError,
            "ratio_cap is 0.5; it must be finite and at least",
        ),
        (lambda: fa.LossConfig("dppo_tv", two_sided=1), TypeError, "two_sided is 1; pass a bool"),
        (lambda: fa.LossConfig("dro", dro_beta=-1.0), ValueError, "dro_beta is -1.0; it must be finite and at least 0"),
        (
            lambda: fa.LossConfig(sequence_mask=0.1),
            TypeError,
            "sequence_mask is a float; pass a fa.SequenceMask or None",
        ),
        (lambda: fa.SequenceMask(-0.1), ValueError, "SequenceMask: delta is -0.1; it must be finite and at least 0"),
        (lambda: fa.SequenceMask(math.nan), ValueError, "SequenceMask: delta is nan"),
        (lambda: fa.SequenceMask(0.1, "turn"), ValueError, "sign is 'turn'; it must be one of 'rollout', 'token'"),
        (lambda: fa.SequenceMask(0.1, log_probs="ref"), ValueError, "log_probs is 'ref'; it must be one of 'old'"),
        (
            lambda: PRESETS["gmpo"].but(sequence_mask=fa.SequenceMask(0.1, "token")),
            ValueError,
            "'gmpo' has one term a rollout; use a sequence_mask of sign 'rollout'",
        ),
    ],
)
def test_options_that_are_unknown_or_contradict(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_what_a_mask_needs_and_cannot_have() -> None:
    values = torch.full((2, 3), -1.0)
    args = (values, values, torch.ones(2), torch.ones(2, 3))
    config = fa.LossConfig(sequence_mask=fa.SequenceMask(0.1))
    ratios = fa.sequence_log_ratios(values, values, args[3])
    parts = {"sequence_log_ratios": ratios, "row_tokens": torch.tensor([3, 3])}
    for name, given in parts.items():
        with pytest.raises(ValueError, match=f"{name} is given, but a sequence_mask looks at whole rollouts"):
            fa.policy_loss(*args, config=config.but(loss_agg_mode="seq-mean-token-mean"), **{name: given})
    corrected = config.but(correction=fa.Correction("mis", "geometric"))
    with pytest.raises(ValueError, match="rollout_log_ratios is given, but a sequence_mask looks at whole rollouts"):
        fa.policy_loss(*args, config=corrected, rollout_log_ratios=ratios)
    by_sampler = config.but(sequence_mask=fa.SequenceMask(0.1, log_probs="rollout"))
    with pytest.raises(ValueError, match="rollout_log_probs is None; a sequence_mask of log_probs 'rollout' needs it"):
        fa.policy_loss(*args, config=by_sampler)
    with pytest.raises(ValueError, match="rollout_log_probs is given, but nothing reads it"):
        fa.policy_loss(*args, config=config, rollout_log_probs=values)
    with pytest.raises(ValueError, match="old_log_probs is None; a sequence_mask of log_probs 'old' needs it"):
        fa.policy_loss(values, None, *args[2:], config=fa.LossConfig("reinforce", sequence_mask=fa.SequenceMask(0.1)))
    with pytest.raises(ValueError, match=r"config\.sequence_mask leaves out tokens after the fact"):
        fa.score_centering_loss(
            values, values, torch.full((2, 3, 2), -1.0), torch.full((2, 3, 2), -1.0), *args[2:],
            config=fa.LossConfig("reinforce", sequence_mask=fa.SequenceMask(0.1)), sampler=fa.Sampler(),
        )  # fmt: skip
