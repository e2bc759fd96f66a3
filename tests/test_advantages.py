"""Known values and options of group and turn-reached advantages, and frozen statistics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_cases import BACKENDS
from torch import Tensor

import fastadv as fa

ON = pytest.mark.parametrize("backend", BACKENDS)
REWARDS = torch.tensor([1.0, 0.0, 0.5, 3.0, 2.0])
GROUPS = ["a", "a", "a", "b", "c"]
NAN = math.nan


def close(actual: Tensor, expected: list[float], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


@ON
def test_baselines(backend: str) -> None:
    def run(baseline: str) -> Tensor:
        return fa.group_advantages(REWARDS, GROUPS, baseline=baseline, backend=backend)

    close(run("none"), [1.0, 0.0, 0.5, 3.0, 2.0])
    close(run("mean"), [0.5, -0.5, 0.0, 0.0, 0.0])
    close(run("loo"), [0.75, -0.75, 0.0, 0.0, 0.0])


@ON
def test_singletons(backend: str) -> None:
    for rule, alone in (("zero", [0.0, 0.0]), ("raw", [3.0, 2.0]), ("drop", [0.0, 0.0])):
        close(fa.group_advantages(REWARDS, GROUPS, singleton=rule, backend=backend)[3:], alone)


def test_dropped_singletons_leave_the_denominators() -> None:
    assert fa.singleton_rows(GROUPS).tolist() == [False, False, False, True, True]
    include = torch.tensor([True, False, False, True, True])
    assert fa.singleton_rows(GROUPS, population="survivors", include=include).tolist() == [True] * 5
    votes = torch.tensor([0.0, 1.0, 2.0, 0.0, 3.0])
    assert fa.singleton_rows(GROUPS, votes=votes).tolist() == [False, False, False, False, True]
    with pytest.raises(ValueError, match="include is not given"):
        fa.singleton_rows(GROUPS, population="survivors")
    mask = torch.ones(5, 4) * ~fa.singleton_rows(GROUPS)[:, None]
    assert float(fa.denominators(mask).sequences) == 3


@ON
def test_a_singleton_is_a_group_with_one_voter(backend: str) -> None:
    """Also when others sit in the group without a vote: with include they get 0, with votes they share the rule."""
    rewards, group = torch.tensor([5.0, NAN, 7.0]), [0, 0, 0]
    include = torch.tensor([True, False, False])
    options: dict[str, Any] = {"population": "survivors", "include": include, "singleton": "raw", "backend": backend}
    close(fa.group_advantages(rewards, group, **options), [5.0, 0.0, 0.0])
    nobody = {**options, "include": torch.zeros(3, dtype=torch.bool)}
    close(fa.group_advantages(rewards, group, **nobody), [0.0, 0.0, 0.0])
    votes = torch.tensor([1.0, 0.0, 0.0])
    finite = torch.tensor([5.0, 6.0, 7.0])
    close(fa.group_advantages(finite, group, votes=votes, singleton="raw", backend=backend), [5.0, 6.0, 7.0])


@ON
def test_populations(backend: str) -> None:
    include = torch.tensor([True, True, False, True, True])
    close(fa.group_advantages(REWARDS, GROUPS, include=include, backend=backend), [0.5, -0.5, 0.0, 0.0, 0.0])
    survivors = {"population": "survivors", "include": torch.tensor([True, False, True, True, True])}
    close(fa.group_advantages(REWARDS, GROUPS, **survivors, backend=backend), [0.25, 0.0, -0.25, 0.0, 0.0])
    loo = fa.group_advantages(REWARDS, GROUPS, baseline="loo", **survivors, backend=backend)
    close(loo, [0.5, 0.0, -0.5, 0.0, 0.0])


@ON
def test_votes_are_weights_in_the_mean(backend: str) -> None:
    """OPO's baseline: rewards weighted by lengths."""
    votes = torch.tensor([2.0, 6.0, 2.0, 1.0, 1.0])
    mean = (2 * 1.0 + 2 * 0.5) / 10
    advantages = fa.group_advantages(REWARDS, GROUPS, votes=votes, backend=backend)
    close(advantages, [1 - mean, -mean, 0.5 - mean, 0.0, 0.0])
    loo = fa.group_advantages(REWARDS, GROUPS, votes=votes, baseline="loo", backend=backend)
    close(loo[:3], [1 - 1 / 8, 0 - 3 / 4, 0.5 - 2 / 8])
    # Weights that count steps are rows repeated.
    rows = torch.repeat_interleave(torch.arange(3), votes[:3].long())
    repeated = fa.group_advantages(REWARDS[rows], [0] * 10, scale="std", backend=backend)
    weighted = fa.group_advantages(REWARDS[:3], [0] * 3, votes=votes[:3], scale="std", backend=backend)
    close(weighted[rows], repeated.tolist())


@ON
def test_scales(backend: str) -> None:
    """Every owner's form: ddof, and where epsilon goes."""
    rewards, group = torch.tensor([1.0, 0.0, 0.0, 0.0]), [0] * 4
    std = math.sqrt(0.25)  # Bessel's
    population_std = math.sqrt(3 / 16)

    def first(**options: Any) -> float:
        return float(fa.group_advantages(rewards, group, scale="std", backend=backend, **options)[0])

    assert first() == pytest.approx(0.75 / (std + 1e-6), rel=1e-6)  # verl, slime
    assert first(ddof=0) == pytest.approx(0.75 / (population_std + 1e-6), rel=1e-6)  # rLLM
    assert first(eps=1e-4) == pytest.approx(0.75 / (std + 1e-4), rel=1e-6)  # TRL
    assert first(eps=1e-2, eps_form="positive") == pytest.approx(0.75 / (std + 1e-2), rel=1e-6)  # Miles
    assert first(eps=0.5, eps_form="floor") == pytest.approx(0.75 / (math.sqrt(0.5) + 0.5), rel=1e-6)  # verl vectorised


@ON
@pytest.mark.parametrize("form", ["add", "floor", "positive"])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_a_group_without_spread_gives_exact_zeros(form: str, eps: float, backend: str) -> None:
    advantages = fa.group_advantages(
        torch.full((5,), 0.3), [0] * 5, scale="std", eps=eps, eps_form=form, backend=backend
    )
    assert advantages.tolist() == [0.0] * 5


@ON
def test_large_means_lose_nothing(backend: str) -> None:
    """Rewards of 1000 with a spread of 0.01: sums of squares would cancel."""
    rewards = torch.tensor([1000.0, 1000.01, 1000.02, 1000.03], dtype=torch.float64)
    exact = fa.group_advantages(rewards, [0] * 4, scale="std", ddof=0, eps=0.0)
    close(exact, [-1.341641, -0.447214, 0.447214, 1.341641], 1e-5)
    single = fa.group_advantages(rewards.float(), [0] * 4, scale="std", ddof=0, eps=0.0, backend=backend)
    rounded = rewards.float().double()
    expected = (rounded - rounded.mean()) / rounded.std(correction=0)
    close(single, expected.tolist())


# ---- turn-reached ----------------------------------------------------------------------------------------------------

# Four rollouts of 1, 2, 3 and 3 turns, one token a turn.
TURNS = torch.tensor([0, 0, 1, 0, 1, 2, 0, 1, 2])
CU = torch.tensor([0, 1, 3, 6, 9])
OUTCOME = torch.tensor([1.0, 1.0, 0.0, 0.0])


def by_hand(kappa: float, shrink_to: str = "loo") -> list[float]:
    out = []
    lengths = [1, 2, 3, 3]
    for i, length in enumerate(lengths):
        others = [j for j in range(4) if j != i]
        target = sum(float(OUTCOME[j]) for j in (others if shrink_to == "loo" else range(4)))
        target /= 3 if shrink_to == "loo" else 4
        for turn in range(length):
            reached = [float(OUTCOME[j]) for j in others if lengths[j] > turn]
            n = len(reached)
            bucket = sum(reached) / n if n else target
            lam = n / (n + kappa) if n else 0.0
            out.append(float(OUTCOME[i]) - (target + lam * (bucket - target)))
    return out


@ON
@pytest.mark.parametrize("kappa", [0.0, 2.0, 50.0])
@pytest.mark.parametrize("shrink_to", ["loo", "mean"])
def test_turn_reached_by_hand(kappa: float, shrink_to: str, backend: str) -> None:
    advantages = fa.turn_advantages(OUTCOME, [0] * 4, TURNS, CU, kappa=kappa, shrink_to=shrink_to, backend=backend)
    close(advantages, by_hand(kappa, shrink_to))


@ON
def test_a_turn_that_nobody_else_reached_falls_back_to_the_group(backend: str) -> None:
    rewards, ids, cu_seqlens = torch.tensor([0.0, 1.0]), torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 4])
    for kappa in (0.0, 2.0):
        close(fa.turn_advantages(rewards, [0, 0], ids, cu_seqlens, kappa=kappa, backend=backend), [-1.0, 1.0, 1.0, 1.0])


@ON
def test_the_mask_zeroes_outputs_and_nothing_else(backend: str) -> None:
    mask = torch.tensor([1, 0, 1, 1, 1, 0, 0, 0, 0])
    plain = fa.turn_advantages(OUTCOME, [0] * 4, TURNS, CU, backend=backend)
    masked = fa.turn_advantages(OUTCOME, [0] * 4, TURNS, CU, mask=mask, backend=backend)
    assert torch.equal(masked, plain * mask)


@ON
def test_survivors_in_turn_advantages(backend: str) -> None:
    include = torch.tensor([True, True, True, False])
    rewards = torch.tensor([1.0, 1.0, 0.0, NAN])
    options = {"population": "survivors", "include": include, "backend": backend}
    survivors = fa.turn_advantages(rewards, [0] * 4, TURNS, CU, **options)
    alone = fa.turn_advantages(rewards[:3], [0] * 3, TURNS[:6], CU[:4], backend=backend)
    assert torch.equal(survivors, torch.cat([alone, torch.zeros(3)]))


@ON
def test_turn_advantages_without_turns_to_tell_apart_are_leave_one_out(backend: str) -> None:
    single = torch.zeros(5, dtype=torch.int64)
    advantages = fa.turn_advantages(REWARDS, GROUPS, single, torch.arange(6), backend=backend)
    close(advantages, fa.group_advantages(REWARDS, GROUPS, baseline="loo", backend=backend).tolist())


def test_position_buckets_stand_in_for_turns() -> None:
    ids = fa.turn_ids_from_positions(torch.tensor([5, 0, 2]), edges=(2, 4))
    assert ids.tolist() == [0, 0, 1, 1, 2, 0, 0]
    assert ids.dtype == torch.int32
    assert fa.turn_ids_from_positions(torch.tensor([3]), edges=()).tolist() == [0, 0, 0]
    for edges in ((0, 4), (4, 4), (4, 2), (-1,)):
        with pytest.raises(ValueError, match="must be positive and increase"):
            fa.turn_ids_from_positions(torch.tensor([3]), edges=edges)
    with pytest.raises(ValueError, match="negative"):
        fa.turn_ids_from_positions(torch.tensor([-3]), edges=(2,))


@ON
def test_turn_ids(backend: str) -> None:
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 0, 1])
    assert fa.turn_ids_from_mask(mask, backend=backend).tolist() == [0, 0, -1, 1, 1, -1, -1, 2]
    cut = fa.turn_ids_from_mask(mask, torch.tensor([0, 4, 4, 8]), backend=backend)
    assert cut.tolist() == [0, 0, -1, 1, 0, -1, -1, 1]  # a run does not go on into the next rollout
    runs = torch.tensor([0] * 20 + [3] * 37 + [0] * 9 + [1] * 8)
    assert fa.turn_ids_from_mask(runs, backend=backend).tolist() == [-1] * 20 + [0] * 37 + [-1] * 9 + [1] * 8
    index = fa.segments(torch.tensor([-1, 3, -1, -1]), torch.tensor([0, 2, 4]), backend=backend)
    assert index.offsets.tolist() == [0, 4, 4]  # turns are numbered by their ids, gaps included
    assert fa.segments(index) is index


@ON
def test_a_part_of_a_segment_table(backend: str) -> None:
    table = fa.turn_advantages(OUTCOME, [0] * 4, TURNS, CU, output="segments", backend=backend)
    part = table.rollouts(1, 3)
    assert torch.equal(fa.segment_tokens(part, backend=backend), fa.segment_tokens(table, backend=backend)[1:6])
    padded = fa.segments(fa.pad(TURNS, CU, fill=-1))
    rows = fa.SegmentTable(table.values, padded).rollouts(1, 3)
    assert torch.equal(fa.segment_tokens(rows), fa.segment_tokens(fa.SegmentTable(table.values, padded))[1:3])


# ---- frozen statistics -----------------------------------------------------------------------------------------------


@ON
def test_frozen_statistics_equal_fresh_ones_on_the_unmasked_batch(backend: str) -> None:
    include = torch.tensor([True, False, True, True])
    frozen = fa.freeze_statistics(OUTCOME, [0] * 4, include=include, turn_ids=TURNS, cu_seqlens=CU, backend=backend)
    for population in ("all", "survivors"):
        for baseline in ("mean", "loo"):
            options = {"baseline": baseline, "population": population, "include": include, "backend": backend}
            fresh = fa.group_advantages(OUTCOME, [0] * 4, **options)
            assert torch.equal(fa.group_advantages(OUTCOME, [0] * 4, **options, statistics=frozen), fresh)
        options = {"population": population, "include": include, "backend": backend}
        fresh = fa.turn_advantages(OUTCOME, [0] * 4, TURNS, CU, **options)
        assert torch.equal(fa.turn_advantages(OUTCOME, [0] * 4, TURNS, CU, **options, statistics=frozen), fresh)


@ON
def test_the_scale_comes_from_the_whole_batch_and_the_mean_from_the_population(backend: str) -> None:
    include = torch.tensor([True, True, True, False])
    rewards = torch.tensor([1.0, 0.0, 0.5, 4.0])
    frozen = fa.freeze_statistics(rewards, [0] * 4, include=include, backend=backend)
    advantages = fa.group_advantages(
        rewards, [0] * 4, population="survivors", scale="std", eps=0.0, statistics=frozen, backend=backend
    )
    std = float(rewards.std())
    close(advantages, [0.5 / std, -0.5 / std, 0.0, 0.0])


def test_the_hash_names_the_statistics() -> None:
    def frozen(**changes: Any) -> str:
        given = {"rewards": OUTCOME, "group_ids": [0] * 4, "turn_ids": TURNS, "cu_seqlens": CU, "mask": TURNS >= 0}
        return fa.freeze_statistics(**{**given, **changes}).hash

    plain = frozen()
    assert len(plain) == 64
    assert frozen() == plain
    assert frozen(group_ids=["x"] * 4) == plain  # labels are only compared
    assert frozen(backend="reference") == plain  # computed twice, the same numbers
    changes = [
        {"rewards": OUTCOME + 1},
        {"rewards": OUTCOME.roll(1)},
        {"group_ids": [0, 0, 1, 1]},
        {"include": torch.tensor([True, True, True, False])},
        {"kappa": 3.0},
        {"ddof": 0},
        {"turn_ids": torch.tensor([0, 0, 0, 0, 1, 2, 0, 1, 2])},
        {"mask": torch.tensor([0] + [1] * 8)},
        {"horizon": 7.0},
    ]
    hashes = {frozen(**change) for change in changes}
    assert len(hashes | {plain}) == len(changes) + 1


@ON
def test_nothing_that_happens_to_the_inputs_changes_frozen_statistics(backend: str) -> None:
    def frozen() -> tuple[fa.FrozenStatistics, list[Tensor]]:
        given = [OUTCOME.double(), torch.tensor([True, True, False, True]), torch.ones(9), CU.clone(), TURNS.clone()]
        rewards, include, mask, cu_seqlens, turn_ids = given
        result = fa.freeze_statistics(
            rewards, [0] * 4, include=include, turn_ids=turn_ids, cu_seqlens=cu_seqlens, mask=mask, backend=backend
        )
        return result, given

    frozen_first, given = frozen()
    for t in given:
        t.zero_()
    assert frozen_first.hash == frozen()[0].hash  # the hash is computed when it is asked for
    assert float(frozen_first.denominators.tokens) == 9


@ON
@pytest.mark.parametrize("kind", ["group", "turn", "segments"])
def test_float64_rewards_give_float64_advantages(kind: str, backend: str) -> None:
    """The kernels compute in float64 in any case: what is asked for is only how the result is written."""

    def run(rewards: Tensor, backend: str) -> Tensor:
        options: dict[str, Any] = {"scale": "std", "backend": backend}
        if kind == "group":
            return fa.group_advantages(rewards, [0] * 4, **options)
        if kind == "turn":
            return fa.turn_advantages(rewards, [0] * 4, TURNS, CU, mask=TURNS != 1, **options)
        return fa.turn_advantages(rewards, [0] * 4, TURNS, CU, output="segments", **options).values

    rewards = torch.tensor([0.1, 0.7, 1 / 3, 0.0], dtype=torch.float64)
    advantages = run(rewards, backend)
    assert advantages.dtype == torch.float64
    assert fa.last_backend() == backend
    torch.testing.assert_close(advantages, run(rewards, "reference"), rtol=1e-14, atol=1e-15)
    assert run(rewards.float(), backend).dtype == torch.float32


@ON
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_votes_are_finite_and_not_negative(bad: float, backend: str) -> None:
    with pytest.raises(ValueError, match="votes"):
        fa.group_advantages(torch.rand(3), [0, 0, 0], votes=torch.tensor([1.0, bad, 2.0]), backend=backend)


@ON
def test_with_frozen_statistics_the_reward_that_is_left_out_is_the_frozen_one(backend: str) -> None:
    """An arm may change rewards afterwards; the baseline is of the rewards that the statistics hold."""
    rewards = torch.tensor([0.0, 1.0, 5.0])
    frozen = fa.freeze_statistics(rewards, [0, 0, 0], backend=backend)
    changed = fa.group_advantages(5 * rewards, [0, 0, 0], baseline="loo", statistics=frozen, backend=backend)
    assert changed.tolist() == [0 - 3.0, 5 - 2.5, 25 - 0.5]


def test_the_hash_holds_everything_that_arms_use() -> None:
    rewards, ids = torch.tensor([0.0, 1.0, 1.0, 0.0]), [0, 0, 0, 0]
    everyone, some = torch.ones(4, dtype=torch.bool), torch.tensor([True, True, False, False])
    others = torch.tensor([False, False, True, True])  # survivors with the same moments
    hashes = [fa.freeze_statistics(rewards, ids, include=include).hash for include in (None, everyone, some, others)]
    assert len(set(hashes[1:])) == 3
    turns = [torch.tensor([[0, 0], [0, 0], [0, 1], [0, 0]]), torch.tensor([[0, 1], [0, 0], [0, 0], [0, 0]])]
    assert len({fa.freeze_statistics(rewards, ids, turn_ids=t).hash for t in turns}) == 2
