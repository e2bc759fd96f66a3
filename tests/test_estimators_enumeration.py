"""What estimators expect, over every group of an agent small enough to enumerate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from toy_agent import THREE_OUTCOMES, TWO_OUTCOMES, Enumeration

import fastadv as fa

EXACT = {"rtol": 0, "atol": 1e-12}
PRINTED = {"rtol": 0, "atol": 6e-6}
SIZE = 4


@pytest.fixture(scope="module")
def groups() -> Enumeration:
    return Enumeration.of(THREE_OUTCOMES, SIZE)


@pytest.fixture(scope="module")
def pairs() -> Enumeration:
    return Enumeration.of(TWO_OUTCOMES, SIZE)


def gradient(e: Enumeration) -> Tensor:
    """Of the expected reward."""
    one = Enumeration.of(e.agent, 1)
    return one.gradient_of(one.rewards)


def by_steps(e: Enumeration) -> fa.SegmentTable:
    """verl-agent's episode advantage, as its default has it: the mean is over step rows."""
    turns = e.turn_ids.shape[0]
    return fa.estimate(
        "gigpo/verl-agent", e.rewards, e.group_ids, turn_ids=e.turn_ids, cu_seqlens=e.cu_seqlens,
        anchor_ids=torch.arange(turns), step_rewards=torch.zeros(turns, dtype=torch.float64), omega=0.0,
    ).advantages  # fmt: skip


@pytest.mark.row(3)
@pytest.mark.parametrize("name", sorted(n for n in fa.ESTIMATORS if n.startswith(("rloo/", "dr_grpo/"))))
def test_unmasked_baselines_keep_the_gradient(name: str, groups: Enumeration) -> None:
    """Leave-one-out is unbiased; with the rollout in its mean everything shrinks by 1 - 1/G."""
    shrunk = 1.0 if name.startswith("rloo/") else 1 - 1 / SIZE
    update = groups.update(fa.estimate(name, groups.rewards, groups.group_ids).advantages)
    torch.testing.assert_close(update, shrunk * gradient(groups), **EXACT)


@pytest.mark.row(4, 5)
def test_masks_pay_the_baseline(groups: Enumeration) -> None:
    """Masked with everybody's baseline, the mask pays b; with the survivors', J / P(X)."""
    one = Enumeration.of(THREE_OUTCOMES, 1)
    grad_j, grad_cap = one.gradient_of(one.rewards), one.gradient_of(one.capped.double())
    j, p = float(one.mean(one.rewards)), float(one.mean((~one.capped).double()))
    include = ~groups.capped

    def update(name: str, **options: str) -> Tensor:
        return groups.update(fa.estimate(name, groups.rewards, groups.group_ids, include=include, **options).advantages)

    torch.testing.assert_close(update("rloo/verl"), grad_j + j * grad_cap, **EXACT)
    kept = 1 - (1 - p) ** (SIZE - 1)
    torch.testing.assert_close(update("rloo/nemo-rl"), kept * (grad_j + j / p * grad_cap), **EXACT)
    torch.testing.assert_close(update("rloo/nemo-rl", population="all"), grad_j + j * grad_cap, **EXACT)
    kappa = 1 - (1 - (1 - p) ** SIZE) / (SIZE * p)
    torch.testing.assert_close(update("grpo/prime-rl"), kappa * (grad_j + j / p * grad_cap), **EXACT)
    raw = (kappa + (1 - p) ** (SIZE - 1)) * grad_j + kappa * j / p * grad_cap  # a lone survivor keeps its reward
    torch.testing.assert_close(update("dr_grpo/verl", population="survivors"), raw, **EXACT)


def test_the_mean_over_steps_bends_the_gradient(groups: Enumeration) -> None:
    """A baseline that depends on the actions: turn by turn the update is off by another factor."""
    update = groups.update(by_steps(groups))
    torch.testing.assert_close(update, torch.tensor([-0.01126, 0.02409, 0.07104], dtype=torch.float64), **PRINTED)
    factors = update / (gradient(groups) * (1 - 1 / SIZE))
    torch.testing.assert_close(factors, torch.tensor([1.1731, 1.0039, 0.9250], dtype=torch.float64), rtol=0, atol=6e-5)
    lengths = groups.cu_seqlens.diff()
    opo = fa.estimate("opo/verl", groups.rewards, groups.group_ids, lengths=lengths).advantages
    torch.testing.assert_close(groups.update(opo), update, **EXACT)  # the same number


@pytest.mark.row(15)
def test_two_outcomes_need_the_mean_over_rollouts(pairs: Enumeration) -> None:
    include = (~pairs.capped).double()
    one = Enumeration.of(TWO_OUTCOMES, 1)
    rest = 1 - one.mean(one.rewards)
    steps = pairs.update(by_steps(pairs), include)
    torch.testing.assert_close(steps, torch.tensor([0.02637, 0.03431, 0.03497], dtype=torch.float64), **PRINTED)
    episode = pairs.update(
        fa.estimate("dr_grpo/verl", pairs.rewards, pairs.group_ids, include=~pairs.capped).advantages
    )
    torch.testing.assert_close(episode, rest * (1 - 1 / SIZE) * gradient(pairs), **EXACT)
    survivors = fa.estimate("survivors/fastadv", pairs.rewards, pairs.group_ids, include=~pairs.capped).advantages
    assert not survivors.any()


@pytest.mark.row(7, 22)
def test_turn_reached_keeps_the_gradient(groups: Enumeration) -> None:
    table = fa.estimate(
        "turn_reached/fastadv", groups.rewards, groups.group_ids, turn_ids=groups.turn_ids, cu_seqlens=groups.cu_seqlens
    ).advantages
    torch.testing.assert_close(groups.update(table), gradient(groups), **EXACT)
