"""The theory, proved on agents that can be enumerated, through the library's own ops. E-numbers: docs/theory.md."""

from __future__ import annotations

from math import comb

import pytest
import torch
from torch import Tensor
from toy_agent import THREE_OUTCOMES, TWO_OUTCOMES, Enumeration, sum_over_coins

import fastadv as fa

EXACT = {"rtol": 0, "atol": 1e-12}


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, **EXACT)


@pytest.fixture(scope="module")
def one() -> Enumeration:
    """Single rollouts: population expectations."""
    return Enumeration.of(THREE_OUTCOMES, 1)


@pytest.fixture(scope="module", params=[2, 4])
def groups(request: pytest.FixtureRequest) -> Enumeration:
    return Enumeration.of(THREE_OUTCOMES, request.param)


def arm(e: Enumeration, *, excluded: Tensor | None = None, **options: object) -> Tensor:
    """Expected update of a scalar-advantage arm."""
    include = None if excluded is None else ~excluded
    return e.update(fa.group_advantages(e.rewards, e.group_ids, include=include, **options))


def test_e1_masked_identity(one: Enumeration) -> None:
    """E[1{X} (R - b) S] = grad E[R 1{X}] - b grad P(X), whatever b."""
    kept = (~one.capped).double()
    for b in (0.0, float(one.mean(one.rewards)), 0.7):
        expected = one.gradient_of(one.rewards * kept) - b * one.gradient_of(kept)
        close(one.update(one.rewards - b, kept), expected)


def test_e2_a_mask_pays_the_baseline_for_being_excluded(one: Enumeration, groups: Enumeration) -> None:
    grad_j, grad_cap = one.gradient_of(one.rewards), one.gradient_of(one.capped.double())
    b, size = one.mean(one.rewards), groups.size
    subsidised = grad_j + b * grad_cap
    close(arm(groups, excluded=groups.capped, baseline="loo"), subsidised)
    close(arm(groups, excluded=groups.capped, baseline="mean"), (1 - 1 / size) * subsidised)
    # What the mask takes away is -b grad P(cap): unmasked and masked differ by it.
    close(arm(groups, baseline="loo") - arm(groups, excluded=groups.capped, baseline="loo"), -b * grad_cap)
    close(arm(groups, baseline="loo"), grad_j)


def test_e3_masking_is_imputing_the_baseline_only_under_frozen_statistics() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    capped = torch.tensor([False, False, False, True])
    frozen = fa.freeze_statistics(rewards, [0] * 4)
    imputed = torch.where(capped, rewards.mean(), rewards)
    masked = fa.group_advantages(rewards, [0] * 4, include=~capped, statistics=frozen)
    close(fa.group_advantages(imputed, [0] * 4, statistics=frozen), masked)
    assert fa.group_advantages(imputed, [0] * 4)[3] == -0.125


def test_e4_the_survivors_objective(one: Enumeration) -> None:
    """With b = E[R | X] the masked update is P(X) grad(E[R 1{X}] / P(X)), here for keep probabilities c."""
    turns = one.cu_seqlens.diff()
    keep = torch.where(one.rewards == 1, torch.where(turns == 1, 0.9, 0.3), torch.where(turns == 1, 1.0, 0.8)).double()
    kept, kept_reward = one.mean(keep), one.mean(one.rewards * keep)
    update = one.update(one.rewards - kept_reward / kept, keep)
    quotient = (one.gradient_of(one.rewards * keep) * kept - kept_reward * one.gradient_of(keep)) / kept**2
    close(update, kept * quotient)
    assert torch.cosine_similarity(update, one.gradient_of(one.rewards), dim=0) < 0.98


@pytest.mark.parametrize("size", [2, 3, 4])
def test_e5_a_survivor_baseline_amplifies_the_subsidy(one: Enumeration, size: int) -> None:
    e = Enumeration.of(THREE_OUTCOMES, size)
    grad_j, grad_cap = one.gradient_of(one.rewards), one.gradient_of(one.capped.double())
    j, p = float(one.mean(one.rewards)), float(one.mean((~one.capped).double()))
    kappa = 1 - (1 - (1 - p) ** size) / (size * p)
    assert kappa == pytest.approx(
        sum(comb(size, n) * p**n * (1 - p) ** (size - n) * max(n - 1, 0) for n in range(size + 1)) / (size * p)
    )
    beta = kappa * j / p
    survivors = {"excluded": e.capped, "population": "survivors"}
    close(arm(e, baseline="mean", singleton="zero", **survivors), kappa * grad_j + beta * grad_cap)
    # A singleton that keeps its reward (mean := 0, as verl, SkyRL and rLLM have it) changes the first coefficient only.
    close(
        arm(e, baseline="mean", singleton="raw", **survivors),
        (kappa + (1 - p) ** (size - 1)) * grad_j + beta * grad_cap,
    )
    alone_dropped = 1 - (1 - p) ** (size - 1)
    close(arm(e, baseline="loo", singleton="zero", **survivors), alone_dropped * (grad_j + j / p * grad_cap))


@pytest.mark.row(15)
def test_e6_two_outcomes_are_rescaled(one: Enumeration) -> None:
    alone, e = Enumeration.of(TWO_OUTCOMES, 1), Enumeration.of(TWO_OUTCOMES, 4)
    j, grad_j = alone.mean(alone.rewards), alone.gradient_of(alone.rewards)
    close(arm(e, excluded=e.capped, baseline="loo"), (1 - j) * grad_j)
    survivors = {"excluded": e.capped, "population": "survivors"}
    close(arm(e, baseline="mean", **survivors), torch.zeros(3, dtype=torch.float64))


@pytest.mark.row(15)
def test_e6_on_samples() -> None:
    """Per sampled group: masked = (1 - R) * un-baselined reference, and R (1 - R) mean(S) off the baselined one."""
    e = Enumeration.of(TWO_OUTCOMES, 4)
    ones = torch.ones_like(e.rewards)
    for group in range(0, e.probability.shape[0], 7):
        here = (e.group_ids == group).double()
        r = e.rewards[e.group_ids == group].mean()
        masked = fa.group_advantages(e.rewards, e.group_ids, include=~e.capped)
        baselined = fa.group_advantages(e.rewards, e.group_ids)
        close(e.update(masked, here), (1 - r) * e.update(e.rewards, here))
        close(e.update(masked, here) - (1 - r) * e.update(baselined, here), r * (1 - r) * e.update(ones, here))
        loo = fa.group_advantages(e.rewards, e.group_ids, baseline="loo", include=~e.capped)
        close(e.update(loo, here), 4 / 3 * (1 - r) * e.update(e.rewards, here))


FAST_SOLVED, THOROUGH_SOLVED = 0.6, 0.9


def strategies(keep: dict[tuple[str, int], float], baseline: float, inverse: bool = False) -> float:
    """Update of theta = logit(P(thorough)) at 0.5, with (strategy, reward) kept by a known probability."""
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    cells = [("fast", 1), ("fast", 0), ("thorough", 1), ("thorough", 0)]
    thorough = torch.tensor([name == "thorough" for name, _ in cells])
    log_probs = torch.where(thorough, torch.nn.functional.logsigmoid(theta), torch.nn.functional.logsigmoid(-theta))
    rewards = torch.tensor([float(r) for _, r in cells], dtype=torch.float64)
    solved = torch.tensor([FAST_SOLVED, THOROUGH_SOLVED], dtype=torch.float64)[thorough.long()]
    chance = 0.5 * torch.where(rewards == 1, solved, 1 - solved)
    kept = torch.tensor([keep[cell] for cell in cells], dtype=torch.float64)
    weights = chance * kept * (1 / kept if inverse else 1)
    config = fa.LossConfig("reinforce", loss_agg_mode="token-sum")
    fa.policy_loss(log_probs, None, rewards - baseline, thorough | True, config=config, weights=weights).loss.backward()
    return -float(theta.grad)


def test_e7_dropping_can_reverse_the_sign() -> None:
    everything = dict.fromkeys([("fast", 1), ("fast", 0), ("thorough", 1), ("thorough", 0)], 1.0)
    late_successes_dropped = {**everything, ("fast", 0): 0.3, ("thorough", 1): 0.3}
    j = 0.75
    assert strategies(everything, j) == pytest.approx(0.075, abs=1e-12)
    assert strategies(late_successes_dropped, j) == pytest.approx(-0.016875, abs=1e-12)
    assert strategies(late_successes_dropped, j, inverse=True) == pytest.approx(0.075, abs=1e-12)
    # The other table with this number has the survivors' mean as its baseline; with b = J it does not reverse.
    table = {**everything, ("thorough", 1): 0.1}
    kept = 0.5 * (0.6 + 0.1 * 0.9) + 0.5 * (0.4 + 0.1)
    assert strategies(table, (0.5 * (0.6 + 0.09)) / kept) / kept == pytest.approx(-0.01695, abs=5e-6)
    assert strategies(table, j) == pytest.approx(0.0244, abs=5e-5)


def test_e8_a_known_coin_and_a_weight_are_unbiased_and_other_divisors_are_not() -> None:
    """Three groups, two of them late, kept with chance a and weighted by 1/a: only the number of candidates divides."""
    a, gradients = 0.5, torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)
    late = torch.tensor([False, True, True])

    def update(coins: Tensor, divisor: str) -> Tensor:
        weights = torch.ones(3, dtype=torch.float64)
        weights[late] = coins.double() / a
        kept = int((weights > 0).sum())
        denominator = {"candidates": 3.0, "weights": float(weights.sum()), "kept": float(kept)}[divisor]
        config = fa.LossConfig("reinforce", loss_agg_mode="seq-mean-token-sum", denominator="candidates")
        theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
        out = fa.policy_loss(
            theta * gradients, None, -torch.ones(3), torch.ones(3), config=config, cu_seqlens=torch.arange(4),
            weights=weights, denominator=denominator,
        )  # fmt: skip
        out.loss.backward()
        return theta.grad

    full = gradients.mean()
    close(sum_over_coins(2, a, lambda coins: update(coins, "candidates")), full)
    assert sum_over_coins(2, a, lambda coins: update(coins, "weights")).item() == pytest.approx(1.667, abs=5e-4)
    assert sum_over_coins(2, a, lambda coins: update(coins, "kept")).item() == pytest.approx(2.167, abs=5e-4)
    second = sum_over_coins(2, a, lambda coins: update(coins, "candidates") ** 2)
    close(second - full**2, (1 / a - 1) * (gradients[late] ** 2).sum() / 9)
    # As a multiplier of rewards the weight cancels when they are divided by their standard deviation.
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    normalised = [fa.group_advantages(c * rewards, [0] * 4, scale="std", eps=0.0) for c in (1.0, 2.0)]
    close(normalised[0], normalised[1])


@pytest.mark.parametrize("size", [4, 6])
@pytest.mark.parametrize("kappa", [0.0, 2.0, 8.0])
def test_e9_turn_reached_advantages_are_unbiased(one: Enumeration, size: int, kappa: float) -> None:
    e = Enumeration.of(THREE_OUTCOMES, size)
    table = fa.turn_advantages(e.rewards, e.group_ids, e.turn_ids, e.cu_seqlens, kappa=kappa, output="segments")
    close(e.update(table), one.gradient_of(one.rewards))


@pytest.mark.parametrize(("size", "ratios"), [(4, [0.900, 0.883, 0.852]), (6, [0.952, 0.943, 0.924])])
def test_e9_shrinking_to_a_mean_with_the_row_in_it_is_biased_by_turn(
    one: Enumeration, size: int, ratios: list[float]
) -> None:
    """Turn l is scaled by 1 - E[1 - lam] / G with n ~ Bin(G - 1, P(len >= l))."""
    e = Enumeration.of(THREE_OUTCOMES, size)
    table = fa.turn_advantages(e.rewards, e.group_ids, e.turn_ids, e.cu_seqlens, shrink_to="mean", output="segments")
    factor = e.update(table) / one.gradient_of(one.rewards)
    assert factor.tolist() == pytest.approx(ratios, abs=5e-4)
    for turn in range(3):
        reached = float(one.mean((one.cu_seqlens.diff() > turn).double()))
        unshrunk = sum(
            comb(size - 1, n) * reached**n * (1 - reached) ** (size - 1 - n) * (1 - n / (n + 2)) for n in range(size)
        )
        assert float(factor[turn]) == pytest.approx(1 - unshrunk / size, abs=1e-12)


@pytest.mark.row(20, 39)
def test_e15_recounted_denominators_change_the_step() -> None:
    """84 % of the rollouts run into an 80-turn cap, the others take 8 turns, all turns equally many tokens."""
    capped = torch.arange(100) < 84
    lengths = torch.where(capped, 80, 8)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    mask = torch.ones(int(lengths.sum()))
    survivors = (~capped).repeat_interleave(lengths)
    before, after = fa.denominators(mask, cu_seqlens), fa.denominators(mask * survivors, cu_seqlens)
    assert float(before.tokens / after.tokens) == pytest.approx(53.5)
    assert float(before.sequences / after.sequences) == pytest.approx(6.25)
    assert float(before.candidates / after.candidates) == 1.0

    def token_gradient(config: fa.LossConfig, mask: Tensor, weights: Tensor | None, given: object) -> float:
        log_probs = torch.zeros(mask.shape[0], requires_grad=True)
        advantages = torch.ones(mask.shape[0])
        fa.policy_loss(
            log_probs, None, advantages, mask, config=config, cu_seqlens=cu_seqlens, weights=weights, denominator=given
        ).loss.backward()
        return float(log_probs.grad[-1])

    weights = (~capped).float()
    for mode, factor in (("token-mean", 53.5), ("seq-mean-token-sum", 6.25)):
        config = fa.LossConfig("reinforce", loss_agg_mode=mode)
        frozen = token_gradient(config, mask, weights, before)
        assert frozen == pytest.approx(token_gradient(config, mask, None, None))  # exclusion by weight
        assert token_gradient(config, mask * survivors, None, None) / frozen == pytest.approx(factor)
    constant = fa.LossConfig("reinforce", loss_agg_mode="seq-mean-token-sum", denominator="candidates")
    assert token_gradient(constant, mask * survivors, None, None) == token_gradient(constant, mask, weights, before)


def test_e20_dropping_whole_groups_is_the_survivor_regime(one: Enumeration) -> None:
    """A group that ships only if every member is fresh: P(K)^G grad E[R | K], in spite of an all-group baseline."""
    e = Enumeration.of(THREE_OUTCOMES, 3)
    fresh = e.cu_seqlens.diff() < 3
    whole = fa.group_advantages(fresh.double(), e.group_ids, baseline="mean") == 0  # no spread: all fresh or all stale
    shipped = (fresh & whole).double()
    update = e.update(fa.group_advantages(e.rewards, e.group_ids, baseline="loo"), shipped)
    k = (one.cu_seqlens.diff() < 3).double()
    p, r = one.mean(k), one.mean(one.rewards * k)
    close(update, p**3 * (one.gradient_of(one.rewards * k) * p - r * one.gradient_of(k)) / p**2)
