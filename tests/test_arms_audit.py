"""What a mask costs, against agents that can be enumerated and by hand."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from test_arms_enumeration import batch_of, update
from toy_agent import THREE_OUTCOMES, Enumeration

import fastadv as fa
from fastadv.arms import CAPPED, Arm, Condition, InverseProbability, StaleTokens, TurnMask


@pytest.fixture(scope="module")
def population() -> fa.Batch:
    """One prompt of 750 rollouts, in which every way an episode can go is there as often as it is probable."""
    e = Enumeration.of(THREE_OUTCOMES, 1)
    counts = torch.tensor([int(Fraction(float(p)).limit_denominator(1000) * 750) for p in e.probability])
    assert int(counts.sum()) == 750
    whole = batch_of(e)
    rows = torch.repeat_interleave(torch.arange(whole.num_rollouts), counts)
    part = whole.take(rows)
    return fa.Batch.of(
        mask=part.mask, turn_ids=part.turn_ids, cu_seqlens=part.cu_seqlens, rewards=part.rewards,
        group_ids=torch.zeros(750, dtype=torch.int64), outcomes=part.outcomes, row_ids=torch.arange(750),
    )  # fmt: skip


def costs(arm: Arm, batch: fa.Batch, **known: Any) -> dict[str, float]:
    return fa.audit(arm, batch, known=fa.Known(**known)).over_batch()


ONE = Enumeration.of(THREE_OUTCOMES, 1)
J, P = float(ONE.mean(ONE.rewards)), float(ONE.mean((~ONE.capped).double()))


def mean(arm: Arm, **changes: Any) -> Arm:
    """The arm with the group's mean as its baseline, which is J exactly over the whole population."""
    return Arm(arm.name, arm.excludes, arm.fraction, "mean", arm.population, condition=arm.condition, **changes)


@pytest.mark.row(38)
def test_the_subsidy_is_what_the_gradient_gains(population: fa.Batch) -> None:
    """E2, E5 and E12: masked - unmasked = subsidy * grad P(cap), with the subsidy of the audit."""
    grad_j, grad_cap = ONE.gradient_of(ONE.rewards), ONE.gradient_of(ONE.capped.double())
    e = Enumeration.of(THREE_OUTCOMES, 4)
    mask = costs(mean(fa.ARMS["mask"]()), population)
    assert mask["subsidy"] == mask["baseline"] == pytest.approx(J)
    torch.testing.assert_close(update(fa.ARMS["mask"](), e), grad_j + mask["subsidy"] * grad_cap, rtol=0, atol=1e-9)
    survivors = costs(mean(fa.ARMS["survivors"]()), population)
    assert survivors["subsidy"] == pytest.approx(J / P)
    alone = (1 - P) ** 3
    expected = (1 - alone) * (grad_j + survivors["subsidy"] * grad_cap)
    torch.testing.assert_close(update(fa.ARMS["survivors"](), e), expected, rtol=0, atol=1e-9)
    for rho in (0.3, 0.6):
        assert costs(mean(fa.ARMS["random-mask"](rho=rho)), population)["subsidy"] == pytest.approx(rho * J)


@pytest.mark.row(38)
def test_the_rest_of_the_numbers(population: fa.Batch) -> None:
    found = costs(mean(fa.ARMS["mask"]()), population)
    assert found["masked"] == pytest.approx(1 - P)
    assert found["reward"] == pytest.approx(J)
    assert found["survivors"] == pytest.approx(J / P)
    assert found["extra"] == pytest.approx(J * (1 - P) / P) == pytest.approx(found["survivors"] - J)
    assert found["lost_reward"] == 0
    assert found["in_sigmas"] == pytest.approx(math.sqrt(J / (1 - J)))
    loo = costs(fa.ARMS["mask"](), population)  # of 749 others
    assert loo["subsidy"] == pytest.approx(J * 750 / 749)


@pytest.mark.row(24, 38)
@pytest.mark.parametrize(("solved", "expected"), [(1, 1 / 3), (5, 1.0), (9, 3.0)])
def test_e11_the_subsidy_in_standard_deviations(solved: int, expected: float) -> None:
    """b / sigma = sqrt(p / (1 - p)): .333 at .1, 1 at .5, 3 at .9."""
    outcomes = [0] * solved + [2] * (10 - solved)
    batch = fa.Batch.of(mask=torch.ones(10), cu_seqlens=torch.arange(11), group_ids=[0] * 10, outcomes=outcomes,
                        rewards=torch.tensor([1.0] * solved + [0.0] * (10 - solved)))  # fmt: skip
    assert costs(Arm("mask", CAPPED, baseline="mean"), batch)["in_sigmas"] == pytest.approx(expected)


@pytest.mark.row(38)
@pytest.mark.parametrize(("share", "times"), [(0.2, 1.25), (0.5, 2.0), (0.84, 6.25)])
def test_survivors_multiply_the_subsidy(share: float, times: float) -> None:
    masked = round(100 * share)
    solved = 100 - masked
    batch = fa.Batch.of(
        mask=torch.ones(100), cu_seqlens=torch.arange(101), group_ids=[0] * 100, outcomes=[0] * solved + [2] * masked,
        rewards=torch.tensor([1.0] * solved + [0.0] * masked),
    )  # fmt: skip
    found = costs(Arm("survivors", CAPPED, baseline="mean", population="survivors"), batch)
    assert found["survivors"] / found["reward"] == pytest.approx(times) == pytest.approx(found["subsidy"] / (1 - share))


@pytest.mark.row(37)
def test_a_mask_that_does_not_look_at_the_outcome_pays_nothing(population: fa.Batch) -> None:
    for name in ("none", "predictable", "nat-urs", "nat-rpc", "stopd", "turn-reached"):
        audit = fa.audit(fa.ARMS[name](), population)
        assert audit.kind == fa.ARMS[name]().mask_kind != "outcome"
        assert audit.masked.tolist() == [0.0]
        assert audit.subsidy.tolist() == [0.0]
        assert audit.baseline.isnan().all()
        assert audit.extra.tolist() == [0.0]
    e, grad_j = Enumeration.of(THREE_OUTCOMES, 4), ONE.gradient_of(ONE.rewards)
    skipped = update(Arm("skip", token_weights=TurnMask(skip=(2,))), e) / grad_j
    assert skipped.tolist() == pytest.approx([1.0, 1.0, 0.0])
    # The same tokens masked where the third turn ran into the cap: an outcome, and it pays.
    assert fa.audit(fa.ARMS["mask"](), population).subsidy > 0.3


@pytest.mark.row(42)
def test_inverse_probabilities_give_it_all_back(population: fa.Batch) -> None:
    found = costs(Arm("ipw", CAPPED, 0.5, baseline="mean", row_weights=InverseProbability()), population)
    assert (found["masked"], found["subsidy"], found["extra"]) == (0, 0, 0)
    assert found["baseline"] == pytest.approx(J)


@pytest.mark.row(26)
def test_e20_dropped_groups_pay_the_reward_of_the_fresh(population: fa.Batch) -> None:
    """P(K)^(G - 1) times (grad E[R 1{K}] + b grad P(not K)), with the audit's b."""
    late = population.segments.turns() == 3
    found = costs(fa.ARMS["drop-stale"](), population, stale=late)
    fresh = ONE.cu_seqlens.diff() < 3
    k = fresh.double()
    p = float(ONE.mean(k))
    assert found["masked"] == pytest.approx(1 - p)
    assert found["subsidy"] == pytest.approx(float(ONE.mean(ONE.rewards * k)) / p)
    assert found["lost_reward"] > 0  # late successes are lost too
    e = Enumeration.of(THREE_OUTCOMES, 3)
    expected = p**2 * (ONE.gradient_of(ONE.rewards * k) - found["subsidy"] * ONE.gradient_of(k))
    known = fa.Known(stale=e.cu_seqlens.diff() == 3)
    torch.testing.assert_close(update(fa.ARMS["drop-stale"](), e, known), expected, rtol=0, atol=1e-9)


@pytest.mark.row(41)
def test_stale_tokens_are_audited_by_their_share() -> None:
    """Two of four tokens of the second rollout are stale, of which the first has none."""
    batch = fa.Batch.of(
        mask=torch.ones(8), cu_seqlens=torch.tensor([0, 4, 8]), rewards=torch.tensor([1.0, 0.5]), group_ids=[0, 0],
        outcomes=["solved", "failed"], versions=torch.tensor([5, 5, 5, 5, 1, 1, 5, 5]),
    )  # fmt: skip
    audit = fa.audit(Arm("stale", baseline="mean", token_weights=StaleTokens(1)), batch)
    assert audit.kind == "outcome"
    assert audit.masked.tolist() == [0.25]
    assert audit.baseline.tolist() == [0.75]
    assert audit.subsidy.tolist() == [0.75]
    assert audit.lost_reward.tolist() == [0.5]


@pytest.mark.row(24, 38)
def test_prompt_by_prompt() -> None:
    """b of each prompt; one without a masked rollout pays nobody, one without a survivor has no survivors' mean."""
    outcomes = [0, 1, 2, 2, 0, 0, 1, 1, 2, 2, 2, 2]
    rewards = torch.tensor([1.0, 0, 0, 0] + [1, 1, 0, 0] + [0] * 4)
    batch = fa.Batch.of(mask=torch.ones(12), cu_seqlens=torch.arange(13), rewards=rewards, outcomes=outcomes,
                        group_ids=[0] * 4 + [1] * 4 + [2] * 4)  # fmt: skip
    audit = fa.audit(Arm("mask", CAPPED, baseline="mean"), batch)
    assert audit.subsidy[[0, 2]].tolist() == [0.25, 0.0]
    assert audit.subsidy.isnan().tolist() == [False, True, False]
    assert audit.survivors[:2].tolist() == [0.5, 0.5]
    assert audit.survivors.isnan().tolist() == [False, False, True]
    assert audit.in_sigmas.isnan().tolist() == [False, True, True]
    over = audit.over_batch()
    assert over["masked"] == 0.5
    assert over["subsidy"] == 0.125
    assert over["reward"] == 0.25
    lost = fa.audit(Arm("cut", baseline="mean", condition=Condition(reward_at_most=1.0)), batch).lost_reward
    assert lost.tolist() == [0.25, 0.5, 0.0]
