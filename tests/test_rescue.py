"""Coins that keep or exclude, the weights that make up for it, and what divides. E-numbers: docs/theory.md.

Expectations over coins are exact: ids are picked whose coins fall as each case wants them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from toy_agent import THREE_OUTCOMES, Enumeration, sum_over_coins

import fastadv as fa

EXACT = {"rtol": 0, "atol": 1e-12}
SEED = 11
STALE = torch.tensor([False, True, True])
GRADIENTS = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)  # of three groups


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, **EXACT)


def ids_that_fall(coins: Tensor, chance: float, stream: str = "rescue") -> Tensor:
    """Ids whose coin of this chance falls as asked, all different."""
    fallen = fa.keep(SEED, torch.arange(100_000), chance, stream=stream)
    ids = torch.empty(coins.shape[0], dtype=torch.int64)
    for side in (True, False):
        ids[coins == side] = (fallen == side).nonzero().squeeze(1)[: int((coins == side).sum())]
    return ids


def rescued(coins: Tensor, stale: Tensor, a: float) -> Tensor:
    """`rescue_weights` of groups whose coins fall so."""
    return fa.coins.rescue_weights(SEED, ids_that_fall(coins, a), stale, a).double()


@pytest.fixture(scope="module")
def one() -> Enumeration:
    """Single rollouts: population expectations."""
    return Enumeration.of(THREE_OUTCOMES, 1)


@pytest.fixture(scope="module")
def groups() -> Enumeration:
    return Enumeration.of(THREE_OUTCOMES, 3)


def late(e: Enumeration) -> Tensor:
    """Rollouts that were still going when the weights changed: those of three turns."""
    return e.cu_seqlens.diff() == 3


# ---- which divisor -------------------------------------------------------------------------------------------------


def update(weights: Tensor, denominator: object) -> Tensor:
    """The update of a policy with one parameter from three groups of one rollout of one token."""
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    config = fa.LossConfig("reinforce", loss_agg_mode="seq-mean-token-sum", denominator="candidates")
    fa.policy_loss(
        theta * GRADIENTS, None, -torch.ones(3), torch.ones(3), config=config, cu_seqlens=torch.arange(4),
        weights=weights, denominator=denominator,
    ).loss.backward()  # fmt: skip
    assert theta.grad is not None
    return theta.grad


def expected_update(rule: str, a: float, **options: float) -> Tensor:
    """Over the coins of the two stale groups."""

    def of(coins: Tensor) -> Tensor:
        weights = rescued(torch.cat([torch.tensor([True]), coins]), STALE, a)
        return update(weights, float(fa.divisors.divisor(weights, rule, **options).value))

    return sum_over_coins(2, a, of)


@pytest.mark.row(28, 30)
@pytest.mark.parametrize("a", [0.1, 0.25, 0.5])
def test_e8_only_a_divisor_that_coins_do_not_move_is_unbiased(a: float) -> None:
    full = GRADIENTS.mean()
    torch.testing.assert_close(expected_update("candidates", a), full, rtol=0, atol=1e-6)  # weights are float32
    torch.testing.assert_close(expected_update("constant", a, constant=6.0), full / 2, rtol=0, atol=1e-6)
    for rule in ("hajek", "kept"):
        assert abs(expected_update(rule, a) - full) > 0.2, rule


@pytest.mark.row(30)
def test_e8_the_values_of_the_biased_divisors() -> None:
    """1/a = 2: exact in float32, so these are the enumeration's own numbers."""
    close(expected_update("candidates", 0.5), torch.tensor(4 / 3, dtype=torch.float64))
    close(expected_update("hajek", 0.5), torch.tensor(5 / 3, dtype=torch.float64))
    close(expected_update("kept", 0.5), torch.tensor(13 / 6, dtype=torch.float64))


@pytest.mark.row(28)
def test_e8_the_second_moment_grows_by_the_odds_of_dropping() -> None:
    a, full = 0.25, GRADIENTS.mean()
    second = sum_over_coins(
        2, a, lambda coins: update(rescued(torch.cat([torch.tensor([True]), coins]), STALE, a), 3.0) ** 2
    )
    close(second - full**2, (1 / a - 1) * (GRADIENTS[STALE] ** 2).sum() / 9)


@pytest.mark.row(30)
def test_biased_divisors_say_so() -> None:
    weights = torch.tensor([1.0, 2.0, 0.0])
    for rule in fa.divisors.DIVISORS:
        found = fa.divisors.divisor(weights, rule, constant=4.0 if rule == "constant" else None)
        value = {"candidates": 3.0, "constant": 4.0, "hajek": 3.0, "kept": 2.0}[rule]
        assert (found.rule, float(found.value), found.candidates) == (rule, value, 3)
        assert found.biased == (rule in ("hajek", "kept"))
        assert ("the update is biased" in found.warning) == found.biased
        assert float(found.factor) == 3.0 / value


def test_the_factor_turns_a_loss_over_candidates_into_that_of_the_rule() -> None:
    weights = rescued(torch.tensor([True, True, False]), STALE, 0.25)
    for rule in ("hajek", "kept"):
        found = fa.divisors.divisor(weights, rule)
        close(update(weights, None) * found.factor, update(weights, float(found.value)))


def test_divisors_count_groups() -> None:
    weights = torch.tensor([1.0, 4.0, 4.0, 0.0, 1.0, 0.0])
    labels = ["a", "b", "b", "c", "a", "c"]
    values = [
        float(fa.divisors.divisor(weights, rule, group_ids=labels).value) for rule in ("candidates", "hajek", "kept")
    ]
    assert values == [3.0, 5.0, 2.0]
    for rule in ("hajek", "kept"):  # nothing kept: all numerators are 0, and 0/0 is no update
        assert float(fa.divisors.divisor(torch.zeros(2), rule).value) == 2.0


@pytest.mark.parametrize("constant", [4, torch.tensor(4.0), torch.tensor([4], dtype=torch.int32)])
def test_a_divisor_is_one_number_without_a_gradient(constant: float, recwarn: pytest.WarningsRecorder) -> None:
    weights = torch.tensor([1.0, 4.0], requires_grad=True)
    for found in (fa.divisors.divisor(weights, "constant", constant=constant), fa.divisors.divisor(weights, "hajek")):
        assert (found.value.shape, found.value.dtype, found.value.requires_grad) == ((), torch.float64, False)
    assert float(fa.divisors.divisor(weights, "constant", constant=constant).value) == 4.0
    assert not recwarn.list


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.ones(2), "sum"), {}, "rule is 'sum'; it must be one of 'candidates', 'constant', 'hajek', 'kept'"),
        ((torch.ones(2), "constant"), {}, "one needs the other"),
        ((torch.ones(2), "kept"), {"constant": 2.0}, "one needs the other"),
        ((torch.ones(2), "constant"), {"constant": 0.0}, "constant is 0"),
        ((torch.ones(0),), {}, r"weights has shape \[0\]"),
        ((torch.ones(2),), {"group_ids": [1]}, "group_ids has 1 rows, weights has 2"),
        ((torch.tensor([2.0, 0.0]),), {"group_ids": [1, 1]}, r"weights\[1\] is 0.0, another row of its group has 2.0"),
    ],
)
def test_bad_divisors(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fa.divisors.divisor(*arguments, **options)


# ---- dropping, never dropping, rescuing ------------------------------------------------------------------------------


def arm(e: Enumeration, weights: Tensor | None) -> Tensor:
    """Expected update under weights of groups, [M], with the leave-one-out mean of the whole group."""
    advantages = fa.group_advantages(e.rewards, e.group_ids, baseline="loo")
    return e.update(advantages, None if weights is None else weights[e.group_ids].double())


@pytest.mark.row(26)
def test_e20_dropping_a_group_with_a_late_member_is_the_survivors_regime(one: Enumeration, groups: Enumeration) -> None:
    """P(K)^G grad E[R | K], although every member of a group that ships votes in its baseline."""
    stale = fa.coins.in_any_row(groups.group_ids, late(groups))
    assert torch.equal(stale.view(-1, 3).any(1), late(groups).view(-1, 3).any(1))
    dropped = arm(groups, (~stale).view(-1, 3)[:, 0])
    kept = (~late(one)).double()
    p, reward = one.mean(kept), one.mean(one.rewards * kept)
    quotient = (one.gradient_of(one.rewards * kept) * p - reward * one.gradient_of(kept)) / p**2
    close(dropped, p**3 * quotient)
    assert torch.cosine_similarity(dropped, one.gradient_of(one.rewards), dim=0) < 0.99


@pytest.mark.row(27, 31)
def test_never_dropping_is_the_true_gradient(one: Enumeration, groups: Enumeration) -> None:
    grad_j = one.gradient_of(one.rewards)
    ones = fa.coins.rescue_weights(SEED, torch.arange(groups.probability.shape[0]), groups.probability > 0, 1.0)
    assert bool((ones == 1).all())
    close(arm(groups, ones), grad_j)
    close(arm(groups, None), grad_j)


def over_coins(e: Enumeration, a: float, value: object) -> Tensor:
    """Expectation over a coin a group, of an update to which groups contribute one by one."""
    stale = fa.coins.in_any_row(e.group_ids, late(e)).view(-1, 3)[:, 0]
    total = torch.zeros(3, dtype=torch.float64)
    for side, chance in ((True, a), (False, 1 - a)):
        coins = torch.full(e.probability.shape, side)
        total += chance * value(rescued(coins, stale, a))
    return total


@pytest.mark.row(28)
@pytest.mark.parametrize("a", [0.25, 0.5])
def test_e8_rescued_groups_give_the_true_gradient(one: Enumeration, groups: Enumeration, a: float) -> None:
    close(over_coins(groups, a, lambda weights: arm(groups, weights)), one.gradient_of(one.rewards))


def std_route(e: Enumeration, weights: Tensor, scale: str, *, multiply: str) -> Tensor:
    """The update with 1/a as a weight of the loss, or as a multiplier of the rewards of what is kept."""
    w = weights[e.group_ids]
    rewards = e.rewards * w if multiply == "rewards" else e.rewards
    advantages = fa.group_advantages(rewards, e.group_ids, scale=scale, eps=0.0 if scale == "std" else 1e-6)
    advantages = torch.where(advantages.isfinite(), advantages, 0.0)  # zero-variance groups, with eps 0
    return e.update(advantages, (w > 0).double() if multiply == "rewards" else w)


def unbiased(e: Enumeration, a: float, scale: str, multiply: str) -> None:
    """Asserts that the expectation over coins is the update of all groups."""
    everything = std_route(e, torch.ones(e.probability.shape, dtype=torch.float64), scale, multiply="loss")
    close(over_coins(e, a, lambda weights: std_route(e, weights, scale, multiply=multiply)), everything)


@pytest.mark.row(28)
def test_e8_a_reward_multiplier_is_undone_by_the_standard_deviation(groups: Enumeration) -> None:
    unbiased(groups, 0.5, "std", "loss")
    unbiased(groups, 0.5, "none", "rewards")  # centred only, it is the same weight
    with pytest.raises(AssertionError, match="not close"):
        unbiased(groups, 0.5, "std", "rewards")


@pytest.mark.row(28)
def test_e8_what_is_left_of_a_reward_multiplier() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    plain, doubled = (fa.group_advantages(c * rewards, [0] * 4, scale="std", eps=0.0) for c in (1.0, 2.0))
    close(doubled, plain)


# ---- coins ---------------------------------------------------------------------------------------------------------


@pytest.mark.row(29)
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_coin_that_is_drawn_at_each_pass_leaves_less(passes: int) -> None:
    """E[w] = a^(m - 1), where a memory of the id, or a function of it, leaves 1."""
    a = 0.25
    redrawn = sum_over_coins(passes, a, lambda coins: coins.all().double() / a)
    assert float(redrawn) == pytest.approx(a ** (passes - 1), abs=1e-15)
    ids, everything = torch.arange(200_000), torch.ones(200_000, dtype=torch.bool)
    anew = [fa.coins.rescue_weights(seed, ids, everything, a) for seed in range(passes)]  # a seed a pass
    ours = [fa.coins.rescue_weights(0, ids, everything, a) for _ in range(passes)]
    for draws, mean in ((anew, a ** (passes - 1)), (ours, 1.0)):
        weights = torch.stack([d > 0 for d in draws]).all(0).double() / a
        assert float(weights.mean()) == pytest.approx(mean, abs=5 * math.sqrt(mean / a / 200_000))


@pytest.mark.row(29)
def test_weights_are_one_on_average() -> None:
    """Over seeds for given groups, whichever of them are stale."""
    ids, stale = torch.arange(64), torch.arange(64) % 3 > 0
    for a in (0.1, 0.5):
        weights = torch.stack([fa.coins.rescue_weights(seed, ids, stale, a) for seed in range(1000)]).double()
        deviation = math.sqrt((1 / a - 1) / 1000 / int(stale.sum()))
        assert bool((weights[:, ~stale] == 1).all())
        assert abs(float(weights[:, stale].mean()) - 1) < 5 * deviation
        assert set(weights[:, stale].unique().tolist()) == {0.0, float(torch.tensor(1 / a))}


@pytest.mark.row(29)
def test_one_coin_a_group_in_every_pass_process_and_order() -> None:
    ids = [f"step{i // 8}/task-{i % 8}" for i in range(64)]
    stale = torch.ones(64, dtype=torch.bool)
    sampler = fa.RescueSampler(0.5, seed=3)
    first = sampler.weights(ids, stale)
    assert 0 < int((first > 0).sum()) < 64
    for _ in range(2):
        assert torch.equal(sampler.weights(ids, stale), first)
    assert torch.equal(sampler.weights(ids[::-1], stale), first.flip(0))
    rows = [x for x in ids for _ in range(4)]  # a row a rollout
    assert torch.equal(sampler.weights(rows, stale.repeat_interleave(4)), first.repeat_interleave(4))
    code = (
        "import torch, fastadv as fa; ids = [f'step{i // 8}/task-{i % 8}' for i in range(64)]; "
        "print(fa.RescueSampler(0.5, seed=3).weights(ids, torch.ones(64, dtype=torch.bool)).tolist())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(first.tolist())


@pytest.mark.row(29)
def test_coins_of_groups_are_not_those_of_arms() -> None:
    ids, stale = torch.arange(1000), torch.ones(1000, dtype=torch.bool)
    rescued_ids = fa.coins.rescue_weights(0, ids, stale, 0.5) > 0
    spared = fa.coins.exclusion_weights(0, ids, stale, 0.5) > 0
    assert 400 < int((rescued_ids == spared).sum()) < 600
    few = fa.coins.rescue_weights(0, ids, stale, 0.2) > 0
    assert not bool((few & ~rescued_ids).any())  # a higher a keeps the same groups and more


# ---- the sampler -----------------------------------------------------------------------------------------------------


@pytest.mark.row(29)
def test_the_tally_counts_a_group_once() -> None:
    ids = ids_that_fall(torch.tensor([True, False, True, False]), 0.5).tolist()
    sampler = fa.RescueSampler(0.5, seed=SEED)
    sampler.weights(ids[:3], torch.tensor([False, False, False]))
    assert sampler.statistics() == fa.coins.RescueStatistics(3, 0, 0, 0, 1.0, 3, 1)
    # Two of them wait, and are stale the next time; a fourth comes in.
    for passes in (2, 3):
        sampler.weights([ids[1], ids[1], ids[2], ids[3]], torch.tensor([True, True, True, False]))
        assert sampler.statistics() == fa.coins.RescueStatistics(4, 2, 1, 1, 1.0, 3 * passes, passes)
    sampler.weights(ids[3:], torch.tensor([True]))
    assert sampler.statistics() == fa.coins.RescueStatistics(4, 3, 1, 2, 0.75, 10, 4)
    sampler.reset_statistics()
    assert sampler.statistics() == fa.coins.RescueStatistics(0, 0, 0, 0, 0.0, 0, 0)


@pytest.mark.row(29)
@pytest.mark.parametrize("ids", [[3, 1, 2**62, -5], ["7", "b", "ü", ""], [7, "7", 8, "8"]])
def test_a_restart_changes_nothing(ids: list[int | str]) -> None:
    stale = torch.tensor([True, True, False, True])
    before = fa.RescueSampler(0.3, seed=9)
    weights = before.weights(ids, stale)
    after = fa.RescueSampler(0.3, seed=9)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.statistics() == before.statistics()
    assert after.state_dict() == before.state_dict()
    for sampler in (before, after):
        assert torch.equal(sampler.weights(ids, stale), weights)
    assert after.statistics() == before.statistics()
    assert after.statistics().seen == 4


@pytest.mark.parametrize("other", [{"keep_probability": 0.4}, {"seed": 8}, {"version": 2}])
def test_a_state_of_other_coins_is_refused(other: dict[str, float]) -> None:
    sampler = fa.RescueSampler(0.3, seed=9)
    with pytest.raises(ValueError, match="make one like the state's"):
        sampler.load_state_dict({**sampler.state_dict(), **other})


def test_bad_samplers() -> None:
    for a in (0.0, -0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"keep_probability is .* in \(0, 1\]"):
            fa.RescueSampler(a)
    with pytest.raises(TypeError, match="keep_probability is a str"):
        fa.RescueSampler("0.5")
    with pytest.raises(TypeError, match=r"seed is 0\.5"):
        fa.RescueSampler(0.5, seed=0.5)


def test_bad_weights() -> None:
    stale = torch.tensor([True, False])
    with pytest.raises(ValueError, match="group 'a' is stale in some rows and fresh in row 1"):
        fa.coins.rescue_weights(0, ["a", "a"], stale, 0.5)
    with pytest.raises(ValueError, match="group 4 is stale in some rows and fresh in row 1"):
        fa.coins.rescue_weights(0, torch.tensor([4, 4]), stale, 0.5)
    with pytest.raises(TypeError, match="pass the ids"):
        fa.coins.rescue_weights(0, fa.group_index(["a", "b"]), stale, 0.5)
    with pytest.raises(TypeError, match=r"ids\[0\] is 0.5"):
        fa.coins.rescue_weights(0, [0.5, 1], stale, 0.5)
    with pytest.raises(ValueError, match=r"stale has shape \[2\]; expected \[3\]"):
        fa.coins.rescue_weights(0, [1, 2, 3], stale, 0.5)
    with pytest.raises(TypeError, match=r"stale has dtype torch\.float32"):
        fa.coins.rescue_weights(0, [1, 2], stale.float(), 0.5)
    with pytest.raises(ValueError, match=r"flags has shape \[2\]; expected \[3\]"):
        fa.coins.in_any_row([1, 2, 3], stale)
    with pytest.raises(ValueError, match="nothing is left"):
        fa.coins.exclusion_weights(0, [1, 2], stale, 1.0, reweigh=True)
    with pytest.raises(ValueError, match=r"probability is 1\.5"):
        fa.coins.exclusion_weights(0, [1, 2], stale, 1.5)


# ---- a share of the capped, and of the tokens ------------------------------------------------------------------------


@pytest.mark.row(6)
@pytest.mark.parametrize("rho", [0.3, 0.6, 1.0])
def test_e12_excluding_a_share_pays_for_a_share(one: Enumeration, groups: Enumeration, rho: float) -> None:
    advantages = fa.group_advantages(groups.rewards, groups.group_ids, baseline="loo")
    grad_j, grad_cap = one.gradient_of(one.rewards), one.gradient_of(one.capped.double())

    def expected(reweigh: bool) -> Tensor:
        total = torch.zeros(3, dtype=torch.float64)
        for side, chance in ((True, rho), (False, 1 - rho)):
            if chance == 0:
                continue  # no coin falls so
            ids = ids_that_fall(torch.full(groups.capped.shape, side), rho, "arm exclusion")
            weights = fa.coins.exclusion_weights(SEED, ids, groups.capped, rho, reweigh=reweigh).double()
            total += chance * groups.update(advantages, weights)
        return total

    close(expected(False), grad_j + rho * one.mean(one.rewards) * grad_cap)
    if rho < 1:
        torch.testing.assert_close(expected(True), grad_j, rtol=0, atol=1e-7)  # 1 / (1 - rho) is float32


@pytest.mark.row(6)
def test_the_coins_of_a_share_are_those_of_arms() -> None:
    batch = fa.Batch.of(
        mask=torch.ones(50), cu_seqlens=torch.arange(51), rewards=torch.zeros(50), group_ids=[0] * 50,
        outcomes=torch.arange(50) % 3, row_ids=torch.arange(100, 150),
    )  # fmt: skip
    weights = fa.coins.exclusion_weights(4, batch.row_ids, batch.capped, 0.5)
    arm = fa.Arm("half", (fa.Outcome.BUDGET,), 0.5, seed=4)
    assert torch.equal(arm.excluded(batch), weights == 0)
    assert 0 < int((weights == 0).sum()) < int(batch.capped.sum())


TOKENS = torch.tensor([2.0, -1.0, 3.0, 1.0, -2.0], dtype=torch.float64)  # gradients of the five tokens of a rollout


def thinned(weights: Tensor, denominator: float) -> Tensor:
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    fa.policy_loss(
        theta * TOKENS, None, -torch.ones(5), torch.ones(5), config=fa.LossConfig("reinforce"), weights=weights,
        denominator=denominator,
    ).loss.backward()  # fmt: skip
    assert theta.grad is not None
    return theta.grad


def test_e17_tokens_picked_with_known_chances_divide_by_the_full_length() -> None:
    """arXiv 2603.06619: each token by its own coin, or a prefix that ends at random."""
    r = 0.4
    each = sum_over_coins(5, r, lambda kept: thinned(kept.double() / r, 5.0))
    close(each, TOKENS.mean())
    reached = 1 - torch.arange(5, dtype=torch.float64) / 5  # chance that a cut drawn from 1 to 5 lies behind token t

    def prefix(by_kept: bool) -> Tensor:
        cuts = [(torch.arange(5) < cut).double() / reached for cut in range(1, 6)]
        return torch.stack([thinned(w, float((w > 0).sum()) if by_kept else 5.0) for w in cuts]).mean(0)

    close(prefix(False), TOKENS.mean())
    assert abs(float(prefix(True)) - float(TOKENS.mean())) > 0.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fa.keep(1.5, [1], 0.5), r"seed is 1\.5; pass an integer"),  # type: ignore[arg-type]
        (lambda: fa.Arm("a", seed=0.5), r"Arm 'a': seed is 0\.5"),  # type: ignore[arg-type]
        (lambda: fa.keep(0, [7, 2**63], 0.5), r"ids\[1\] is 9223372036854775808, which has more than 64 bits"),
        (lambda: fa.keep(0, iter([1]), 0.5), "ids is a list_iterator"),  # type: ignore[arg-type]
        (
            lambda: fa.keep(0, [1, 2], torch.full((2, 1), 0.5)),
            r"probability has shape \[2, 1\]; pass one number or \[2\]",
        ),
        (lambda: fa.RescueSampler(1e-39), "1/a of what is kept is no float32"),
        (lambda: fa.divisors.divisor(torch.tensor([1.0, math.nan]), "hajek"), r"weights\[1\] is nan"),
        (lambda: fa.divisors.divisor(torch.tensor([-1.0]), "kept"), r"weights\[0\] is -1\.0"),
        (lambda: fa.divisors.divisor(torch.tensor([math.inf])), r"weights\[0\] is inf"),
    ],
)
def test_coins_and_divisors_that_would_be_wrong_without_a_word(call: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_ids_of_arrays_and_of_any_text_have_coins() -> None:
    assert torch.equal(fa.keep(3, np.arange(9), 0.5), fa.keep(3, torch.arange(9), 0.5))
    assert fa.keep(3, ["\ud800"], 1.0).tolist() == [True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": None}, "is broken"),
        ({"groups": [["a", True]]}, "is broken"),
        ({"looks": "many"}, "is broken"),
        ({"passes": ...}, "has no 'passes'"),
    ],
)
def test_a_broken_state_is_refused_whole(change: dict[str, object], message: str) -> None:
    sampler = fa.RescueSampler(0.5, 3)
    sampler.weights(["a", "b"], torch.tensor([True, True]))
    state = {name: value for name, value in {**sampler.state_dict(), **change}.items() if value is not ...}
    other = fa.RescueSampler(0.5, 3)
    before = other.state_dict()
    with pytest.raises(ValueError, match=f"load_state_dict: the state {message}"):
        other.load_state_dict(state)
    assert other.state_dict() == before
