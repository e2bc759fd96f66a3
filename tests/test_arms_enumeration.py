"""Arms on agents that can be enumerated: what each of them is expected to do to the policy. E-numbers: docs/theory.md.

An update is linear in each coin of an arm, so its expectation over coins is a sum over what all of them may show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_agent import THREE_OUTCOMES, TWO_OUTCOMES, Enumeration

import fastadv as fa
from fastadv.arms import (
    CAPPED,
    Arm,
    Condition,
    Continuation,
    InverseProbability,
    PrefixCut,
    Rescue,
    TokenCoins,
    TurnMask,
    arm,
    rules,
)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def batch_of(e: Enumeration, **more: Any) -> fa.Batch:
    return fa.Batch.of(
        mask=torch.ones_like(e.submits),
        turn_ids=e.turn_ids,
        cu_seqlens=e.cu_seqlens,
        rewards=e.rewards,
        group_ids=e.group_ids,
        outcomes=torch.where(e.capped, 2, torch.where(e.rewards > 0, 0, 1)),
        **more,
    )


def update(one: Arm, e: Enumeration, known: fa.Known | None = None, weights: Tensor | None = None) -> Tensor:
    """Expected ascent direction of an arm under statistics that are frozen for it."""
    batch, known = batch_of(e), known or fa.Known()
    result = one.apply(batch, one.freeze(batch, known=known), known=known)
    tokens = fa.segment_tokens(result.advantages)
    if result.token_weights is not None:
        tokens = tokens * result.token_weights
    rows = result.weights.double()
    return e.update(tokens, rows if weights is None else rows * weights)


@pytest.fixture(scope="module")
def one() -> Enumeration:
    return Enumeration.of(THREE_OUTCOMES, 1)


@pytest.fixture(scope="module", params=[2, 4])
def groups(request: pytest.FixtureRequest) -> Enumeration:
    return Enumeration.of(THREE_OUTCOMES, request.param)


@pytest.fixture(scope="module")
def grad_j(one: Enumeration) -> Tensor:
    return one.gradient_of(one.rewards)


@pytest.fixture(scope="module")
def grad_cap(one: Enumeration) -> Tensor:
    return one.gradient_of(one.capped.double())


@pytest.mark.row(3, 17, 27, 31)
@pytest.mark.parametrize("name", ["none", "never-drop", "oracle"])
def test_without_a_mask_the_update_is_the_gradient(groups: Enumeration, grad_j: Tensor, name: str) -> None:
    close(update(fa.ARMS[name](), groups), grad_j)


@pytest.mark.row(4, 18)
@pytest.mark.parametrize("name", ["mask", "truncated-zero-reward", "matched-update"])
def test_e2_a_mask_pays_the_baseline(
    one: Enumeration, groups: Enumeration, grad_j: Tensor, grad_cap: Tensor, name: str
) -> None:
    """The agent's capped rollouts have reward 0, so that all of these masks are the same."""
    masked = fa.ARMS[name]()
    subsidised = grad_j + float(one.mean(one.rewards)) * grad_cap
    close(update(masked, groups), (1 - (masked.baseline == "mean") / groups.size) * subsidised)


@pytest.mark.row(4)
def test_e3_masking_is_imputing_the_baseline_only_under_frozen_statistics() -> None:
    batch = fa.Batch.of(mask=torch.ones(4), cu_seqlens=torch.arange(5), rewards=torch.tensor([1.0, 0, 1, 0]),
                        group_ids=[0] * 4, outcomes=["solved", "failed", "solved", "budget"])  # fmt: skip
    masked = Arm("mask", CAPPED, baseline="mean").apply(batch, fa.freeze(batch)).advantages.values
    assert masked.tolist() == [0.5, -0.5, 0.5, 0.0]
    imputed = torch.where(batch.outcomes == fa.Outcome.BUDGET, batch.rewards.mean(), batch.rewards)
    assert (imputed - imputed.mean()).tolist() != masked.tolist()


@pytest.mark.row(5, 21)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_e5_survivors_pay_j_over_p(one: Enumeration, grad_j: Tensor, grad_cap: Tensor, size: int) -> None:
    e = Enumeration.of(THREE_OUTCOMES, size)
    j, p = float(one.mean(one.rewards)), float(one.mean((~one.capped).double()))
    alone = (1 - p) ** (size - 1)
    close(update(fa.ARMS["survivors"](), e), (1 - alone) * (grad_j + j / p * grad_cap))
    kappa = 1 - (1 - (1 - p) ** size) / (size * p)
    mean = Arm("mean", CAPPED, baseline="mean", population="survivors")
    close(update(mean, e), kappa * (grad_j + j / p * grad_cap))
    raw = Arm("raw", CAPPED, baseline="mean", population="survivors", singleton="raw")
    close(update(raw, e), (kappa + alone) * grad_j + kappa * j / p * grad_cap)


@pytest.mark.row(43)
@pytest.mark.parametrize("name", ["none", "turn-reached", "position-buckets", "mask"])
def test_nothing_assumes_that_rewards_are_0_or_1(one: Enumeration, groups: Enumeration, name: str) -> None:
    """Partial credit: more for early solutions, some for wrong answers, a little at the cap."""

    def credit(e: Enumeration) -> Enumeration:
        turns = e.cu_seqlens.diff()
        return replace(
            e, rewards=torch.where(e.capped, 0.05, torch.where(e.rewards > 0, 1.3 - 0.3 * turns, 0.2)).double()
        )

    single, many = credit(one), credit(groups)
    expected = single.gradient_of(single.rewards)
    if name == "mask":  # theory, 1: what is masked has a reward now, which is lost
        kept = (~one.capped).double()
        expected = single.gradient_of(single.rewards * kept)
        expected = expected - float(single.mean(single.rewards)) * single.gradient_of(kept)
    close(update(fa.ARMS[name](), many), expected)


@pytest.mark.row(4, 5)
def test_e6_two_outcomes() -> None:
    e, alone = Enumeration.of(TWO_OUTCOMES, 4), Enumeration.of(TWO_OUTCOMES, 1)
    close(update(fa.ARMS["mask"](), e), (1 - alone.mean(alone.rewards)) * alone.gradient_of(alone.rewards))
    close(update(fa.ARMS["survivors"](), e), torch.zeros(3, dtype=torch.float64))


@pytest.mark.row(7, 22)
@pytest.mark.parametrize("kappa", [0.0, 2.0])
def test_e9_turns_and_positions_are_unbiased(groups: Enumeration, grad_j: Tensor, kappa: float) -> None:
    """A turn has one token here, so that positions 1 and 2 are turns 1 and 2."""
    turned, placed = fa.ARMS["turn-reached"](kappa=kappa), fa.ARMS["position-buckets"](edges="1+2", kappa=kappa)
    close(update(turned, groups), grad_j)
    close(update(placed, groups), grad_j)
    batch = batch_of(groups)
    tables = [one.apply(batch, one.freeze(batch)).advantages for one in (turned, placed)]
    assert torch.equal(fa.segment_tokens(tables[0]), fa.segment_tokens(tables[1]))
    coarse = fa.ARMS["position-buckets"](edges="2", kappa=kappa)
    close(update(coarse, groups), grad_j)
    assert coarse.apply(batch, None).advantages.segments.count < tables[0].segments.count


def over_coins(monkeypatch: pytest.MonkeyPatch, where: Any, chance: float, value: Callable[[], Tensor]) -> Tensor:
    """Expectation of something linear in each coin."""
    total = torch.zeros((), dtype=torch.float64)
    for face, weight in ((True, chance), (False, 1 - chance)):
        monkeypatch.setattr(where, "keep", lambda seed, ids, p, stream="", face=face: torch.full((len(ids),), face))
        total = total + weight * value()
    return total


@pytest.mark.row(6)
@pytest.mark.parametrize("rho", [0.3, 0.6])
def test_e12_a_random_share_pays_its_share(
    one: Enumeration, groups: Enumeration, grad_j: Tensor, grad_cap: Tensor, rho: float, monkeypatch: Any
) -> None:
    j = float(one.mean(one.rewards))
    masked = fa.ARMS["random-mask"](rho=rho)
    close(over_coins(monkeypatch, arm, rho, lambda: update(masked, groups)), grad_j + rho * j * grad_cap)


@pytest.mark.row(6, 42)
@pytest.mark.parametrize("rho", [0.3, 0.5])
def test_e12_inverse_probability_restores_the_gradient(
    groups: Enumeration, grad_j: Tensor, rho: float, monkeypatch: Any
) -> None:
    weighted = fa.ARMS["inverse-probability"](rho=rho)
    close(over_coins(monkeypatch, arm, rho, lambda: update(weighted, groups)), grad_j)


@pytest.mark.row(42)
def test_e4_known_keep_probabilities_restore_the_gradient(one: Enumeration, grad_j: Tensor) -> None:
    turns = one.cu_seqlens.diff()
    kept = torch.where(one.rewards == 1, torch.where(turns == 1, 0.9, 0.3), torch.where(turns == 1, 1.0, 0.8)).double()
    weighted = Arm("ipw", baseline="none", row_weights=InverseProbability())
    close(update(weighted, one, fa.Known(keep_probability=kept), weights=kept), grad_j)
    assert not torch.allclose(update(Arm("kept", baseline="none"), one, weights=kept), grad_j, atol=1e-3)


@pytest.mark.row(42)
def test_e7_the_sign_comes_back() -> None:
    """Two strategies, success .6 and .9; late successes and early failures are kept with probability .3."""
    solved, success, score, kept = torch.tensor(
        [[1.0, 0, 1, 0], [0.6, 0.6, 0.9, 0.9], [-0.5, -0.5, 0.5, 0.5], [1.0, 0.3, 0.3, 1.0]], dtype=torch.float64
    )  # the score is of logit P(thorough), at 0
    chance = 0.5 * torch.where(solved == 1, success, 1 - success)
    batch = fa.Batch.of(mask=torch.ones(4), cu_seqlens=torch.arange(5), rewards=solved - 0.75, group_ids=[0] * 4,
                        outcomes=["solved", "failed"] * 2)  # fmt: skip

    def gradient(one: Arm, known: fa.Known) -> float:
        result = one.apply(batch, fa.freeze(batch), known=known)
        return float((chance * kept * result.weights * result.advantages.values * score).sum())

    known = fa.Known(keep_probability=kept)
    assert gradient(Arm("kept", baseline="none"), known) == pytest.approx(-0.016875, abs=1e-9)
    weighted = Arm("ipw", baseline="none", row_weights=InverseProbability())
    assert gradient(weighted, known) == pytest.approx(0.075, abs=1e-12)


def late_groups(e: Enumeration) -> tuple[Tensor, fa.Known]:
    """Rollouts that are fresh (those with fewer than three turns), and what a trainer would say of them."""
    fresh = e.cu_seqlens.diff() < 3
    return fresh, fa.Known(stale=~fresh)


@pytest.mark.row(26)
def test_e20_dropping_stale_groups_is_the_survivor_regime(one: Enumeration) -> None:
    e = Enumeration.of(THREE_OUTCOMES, 3)
    _, known = late_groups(e)
    k = (one.cu_seqlens.diff() < 3).double()
    p, r = one.mean(k), one.mean(one.rewards * k)
    quotient = (one.gradient_of(one.rewards * k) * p - r * one.gradient_of(k)) / p**2
    close(update(fa.ARMS["drop-stale"](), e, known), p**3 * quotient)


@pytest.mark.row(28)
@pytest.mark.parametrize("a", [0.1, 0.25, 0.5])
def test_e8_rescue_restores_the_gradient(grad_j: Tensor, a: float, monkeypatch: Any) -> None:
    e = Enumeration.of(THREE_OUTCOMES, 3)
    _, known = late_groups(e)
    rescue = fa.ARMS["rescue"](a=a)
    close(over_coins(monkeypatch, rules, a, lambda: update(rescue, e, known)), grad_j)
    by_reward = Arm("by reward", row_weights=Rescue(a), weighted="reward")
    close(over_coins(monkeypatch, rules, a, lambda: update(by_reward, e, known)), grad_j)


@pytest.mark.row(37)
def test_e19_a_predictable_mask_pays_nothing(groups: Enumeration, grad_j: Tensor) -> None:
    """It deletes its turns' part of the gradient and adds nothing, whatever the baseline."""
    for baseline in ("loo", "turn-reached"):
        skipped = Arm("skip", baseline=baseline, token_weights=TurnMask(skip=(1,)))
        assert skipped.mask_kind == "predictable"
        close(update(skipped, groups), grad_j * torch.tensor([1.0, 0.0, 1.0]).double())
    first = fa.ARMS["predictable"](below=1)
    close(update(first, groups), grad_j * torch.tensor([1.0, 0.0, 0.0]).double())


@pytest.mark.parametrize("r", [0.4, 0.5])
def test_e17_token_coins_are_unbiased(groups: Enumeration, grad_j: Tensor, r: float, monkeypatch: Any) -> None:
    total = torch.zeros((), dtype=torch.float64)
    for number, weight in ((0.0, r), (0.999, 1 - r)):
        monkeypatch.setattr(rules, "uniforms", lambda seed, ids, stream, n=number: torch.full(ids.shape, n).double())
        total = total + weight * update(Arm("urs", token_weights=TokenCoins(r)), groups)
    close(total, grad_j)


@pytest.mark.parametrize("least", [1, 2])
def test_e17_prefix_cuts_are_unbiased(groups: Enumeration, grad_j: Tensor, least: int, monkeypatch: Any) -> None:
    """Six numbers, of which each value of K gets as many, for one, two and three of them."""
    total = torch.zeros((), dtype=torch.float64)
    for sixth in range(6):
        number = (sixth + 0.5) / 6
        monkeypatch.setattr(rules, "uniforms", lambda seed, ids, stream, n=number: torch.full(ids.shape, n).double())
        total = total + update(Arm("rpc", token_weights=PrefixCut(least)), groups) / 6
    close(total, grad_j)


@pytest.mark.parametrize("turns", [(1,), (1, 2)])
def test_continuations_are_unbiased(
    groups: Enumeration, grad_j: Tensor, turns: tuple[int, ...], monkeypatch: Any
) -> None:
    a, total = 0.3, torch.zeros((), dtype=torch.float64)
    for coins in product((True, False), repeat=len(turns)):
        faces = {f"continuation {number}": face for number, face in enumerate(coins)}
        monkeypatch.setattr(
            rules, "keep", lambda seed, ids, p, stream, faces=faces: torch.full((len(ids),), faces[stream])
        )
        weight = a ** sum(coins) * (1 - a) ** (len(coins) - sum(coins))
        total = total + weight * update(Arm("stopd", token_weights=Continuation(turns, a)), groups)
    close(total, grad_j)


@pytest.mark.row(8, 9)
def test_conditions_change_what_is_masked_and_no_statistic(groups: Enumeration) -> None:
    batch = batch_of(groups)
    frozen = fa.freeze(batch)
    before = frozen.hash
    for one in (
        fa.ARMS["mask"](),
        Arm("failed", (fa.Outcome.FAILED,)),
        Arm("capped", condition=Condition(capped=True)),
    ):
        first, again = one.apply(batch, frozen), one.apply(batch, frozen)
        assert torch.equal(first.advantages.values, again.advantages.values)
        assert bool(first.excluded.any())
    assert frozen.hash == before == fa.freeze(batch).hash
