"""Monitoring reports on batches that were counted by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fastadv as fa
from fastadv import monitoring
from fastadv.outcomes import Outcome

SOLVED, FAILED, BUDGET, INFRA = Outcome


def batch(**changes: Any) -> fa.Batch:
    """Five rollouts: lengths 3, 2, 4, 1, 2; turns 2, 1, 2, 1, 1; 9 sampled tokens."""
    given = {
        "mask": torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]),
        "cu_seqlens": torch.tensor([0, 3, 5, 9, 10, 12]),
        "rewards": torch.tensor([1.0, 0.0, 0.0, math.nan, 1.0]),
        "group_ids": [0, 0, 0, 1, 1],
        "outcomes": torch.tensor([SOLVED, FAILED, BUDGET, INFRA, SOLVED]),
        "capped": torch.tensor([0, 0, 1, 0, 1]).bool(),
        **changes,
    }
    return fa.Batch.of(**given)


# ---- Counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.row(23, 45)
def test_counts_of_a_batch() -> None:
    excluded = torch.tensor([0, 0, 1, 1, 0]).bool()
    counts = monitoring.rollout_counts(batch(), excluded)
    assert counts == monitoring.RolloutCounts(
        rollouts=5, success_rate=0.4, submitted_failure_rate=0.2, cap_hit_rate=0.4, solved_at_cap_rate=0.2,
        no_result_rate=0.2, response_length=2.4, solved_length=2.5, unsolved_length=3.0, turns=1.4, excluded_rate=0.4,
        excluded_token_rate=4 / 9,
    )  # fmt: skip
    assert monitoring.rollout_counts(batch().padded(), excluded) == counts
    assert monitoring.rollout_counts(batch()).excluded_token_rate == 0
    nothing = monitoring.rollout_counts(batch().select(torch.zeros(5, dtype=torch.bool)))
    assert nothing.rollouts == 0
    assert math.isnan(nothing.success_rate)
    with pytest.raises(TypeError, match="batch is a dict; pass a Batch"):
        monitoring.rollout_counts({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rollout_counts: excluded has dtype"):
        monitoring.rollout_counts(batch(), excluded.int())


@pytest.mark.row(34)
def test_turns_by_outcome_and_whether_successes_come_first() -> None:
    turns = torch.tensor([1, 2, 2, 3, 2, 4, 4, 9])
    outcomes = torch.tensor([SOLVED, SOLVED, SOLVED, SOLVED, FAILED, BUDGET, BUDGET, INFRA])
    histograms = monitoring.turns_by_outcome(turns, outcomes)
    assert histograms[SOLVED].tolist() == [0, 1, 2, 1]
    assert histograms[BUDGET].tolist() == [0, 0, 0, 0, 2]
    separation = monitoring.turn_separation(histograms, levels=(0.25, 0.5, 0.51, 1.0))
    assert separation.solved == monitoring.TurnSummary(4, 2.0, {0.25: 1.0, 0.5: 2.0, 0.51: 2.0, 1.0: 3.0})
    assert separation.unsolved == monitoring.TurnSummary(3, 10 / 3, {0.25: 2.0, 0.5: 4.0, 0.51: 4.0, 1.0: 4.0})
    assert separation.mean_difference == pytest.approx(4 / 3)
    # Of 12 pairs: against 2 turns one win, two ties, one loss; against 4 turns four wins, twice.
    assert separation.solved_first == pytest.approx((1 + 2 * 0.5 + 4 + 4) / 12)
    assert separation.by_outcome[INFRA].mean == 9.0


@pytest.mark.row(34)
def test_turns_that_tell_nothing_or_are_none() -> None:
    outcomes = torch.tensor([SOLVED, FAILED, SOLVED, BUDGET])
    alike = monitoring.turn_separation(monitoring.turns_by_outcome(torch.tensor([3, 3, 5, 5]), outcomes))
    assert alike.solved_first == 0.5
    one_sided = monitoring.turn_separation(monitoring.turns_by_outcome(torch.tensor([3]), torch.tensor([SOLVED])))
    assert math.isnan(one_sided.solved_first)
    assert math.isnan(one_sided.unsolved.mean)
    assert all(math.isnan(q) for q in one_sided.unsolved.quantiles.values())
    with pytest.raises(ValueError, match=r"turns\[1\] is -1"):
        monitoring.turns_by_outcome(torch.tensor([3, -1]), outcomes[:2])
    with pytest.raises(ValueError, match=r"turns\[0\] is 1000000000; it must be from 0 to"):
        monitoring.turns_by_outcome(torch.tensor([10**9]), outcomes[:1])
    good = monitoring.turns_by_outcome(torch.tensor([3]), outcomes[:1])
    for level in (0, math.nan, True, "a"):
        with pytest.raises(ValueError, match=f"levels holds {level!r}"):
            monitoring.turn_separation(good, levels=(level,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="levels is a float; pass a list"):
        monitoring.turn_separation(good, levels=0.5)  # type: ignore[arg-type]
    for bad in ({}, {SOLVED: torch.tensor([1])}, None):
        with pytest.raises(ValueError, match="pass a table for each of the four outcomes"):
            monitoring.turn_separation(bad)  # type: ignore[arg-type]
    for table, kind in ((torch.tensor([-1]), ValueError), (torch.ones(1, 1).long(), ValueError), ([1], TypeError)):
        with pytest.raises(kind, match=r"histograms\[<Outcome.FAILED: 1>\] is"):
            monitoring.turn_separation({**good, FAILED: table})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"histograms\[<Outcome.FAILED: 1>\] has dtype"):
        monitoring.turn_separation({**good, FAILED: torch.tensor([math.nan])})


@pytest.mark.row(34)
def test_pairs_of_many_rollouts_are_counted_in_float64() -> None:
    many = 2**24 + 1  # which float32 does not hold
    tables = dict.fromkeys(Outcome, torch.tensor([0]))
    tables |= {SOLVED: torch.tensor([0, many, 3], dtype=torch.int32), FAILED: torch.tensor([many + 2, 1, 1])}
    wins, ties = many * 1, many * 1 + 3 * 1
    expected = (wins + ties / 2) / ((many + 3) * (many + 4))
    assert monitoring.turn_separation(tables).solved_first == pytest.approx(expected, rel=1e-12, abs=0)


def test_sums_of_tables_do_not_wrap_around() -> None:
    tables = dict.fromkeys(Outcome, torch.tensor([0, 200], dtype=torch.uint8))
    assert monitoring.turn_separation(tables).unsolved.rollouts == 400


# ---- Behaviour and cost ----------------------------------------------------------------------------------------------


def outcomes_and_flags(cells: dict[Outcome, tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rollouts by outcome, without and with the behaviour."""
    outcomes = [o for o, (without, shown) in cells.items() for _ in range(without + shown)]
    flags = [flag for without, shown in cells.values() for flag in [False] * without + [True] * shown]
    order = torch.randperm(len(flags), generator=torch.Generator().manual_seed(0))
    return torch.tensor(outcomes)[order], torch.tensor(flags)[order]


@pytest.mark.row(35)
def test_a_behaviour_by_outcome() -> None:
    # 56 of 70 with it are solved and 48 of 80 without: Newcombe (1998), table II (a).
    cells = {SOLVED: (48, 56), FAILED: (20, 4), BUDGET: (12, 10), INFRA: (3, 7)}
    outcomes, shown = outcomes_and_flags(cells)
    result = monitoring.behaviour(shown, outcomes)
    assert result.by_outcome == cells
    assert result.share == pytest.approx(77 / 160)
    assert (result.solved_share, result.unsolved_share) == pytest.approx((56 / 104, 14 / 46))
    assert (result.success_with, result.success_without) == pytest.approx((0.8, 0.6))
    assert result.difference == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
    assert result.odds_ratio.value == pytest.approx(56.5 * 32.5 / (14.5 * 48.5))
    assert result.odds_ratio.low > 1


@pytest.mark.row(35)
def test_a_behaviour_that_everybody_shows() -> None:
    result = monitoring.behaviour(torch.ones(4, dtype=torch.bool), torch.tensor([SOLVED, SOLVED, FAILED, INFRA]))
    assert result.success_with == pytest.approx(2 / 3)
    assert math.isnan(result.success_without)
    assert math.isnan(result.difference.value)
    with pytest.raises(ValueError, match=r"shown has shape \[3\]; expected \[1\]"):
        monitoring.behaviour(torch.ones(3, dtype=torch.bool), torch.tensor([SOLVED]))


@pytest.mark.row(36)
def test_costs() -> None:
    outcomes = torch.tensor([SOLVED, SOLVED, FAILED, BUDGET, INFRA])
    cost = torch.tensor([10.0, 20.0, 30.0, 100.0, 40.0])
    kept = torch.tensor([1, 0, 1, 1, 0]).bool()
    result = monitoring.costs(cost, outcomes, kept=kept, rewards=torch.tensor([1.0, 1.0, 0.25, 0.0, math.nan]))
    assert result == monitoring.Costs(
        total=200.0, by_outcome={SOLVED: 30.0, FAILED: 30.0, BUDGET: 100.0, INFRA: 40.0},
        mean_by_outcome={SOLVED: 15.0, FAILED: 30.0, BUDGET: 100.0, INFRA: 40.0},
        kept=140.0, dropped=60.0, dropped_share=0.3, per_solved=100.0, per_reward=200 / 1.25,
    )  # fmt: skip


@pytest.mark.row(36)
def test_costs_without_a_gain() -> None:
    result = monitoring.costs(torch.tensor([1.0, 2.0]), torch.tensor([FAILED, INFRA]), rewards=torch.zeros(2))
    assert result.per_solved == result.per_reward == math.inf
    assert result.dropped == 0
    assert math.isnan(monitoring.costs(torch.tensor([1.0]), torch.tensor([FAILED])).per_reward)
    for gain in (math.inf, -math.inf):
        with pytest.raises(ValueError, match=r"rewards\[1\] is -?inf; it must be finite"):
            monitoring.costs(torch.ones(2), torch.tensor([SOLVED, FAILED]), rewards=torch.tensor([1.0, gain]))
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"cost\[1\] is .*finite and not negative"):
            monitoring.costs(torch.tensor([1.0, bad]), torch.tensor([FAILED, INFRA]))


# ---- Staleness -------------------------------------------------------------------------------------------------------


@pytest.mark.row(40)
def test_staleness_in_flight_and_in_the_queue() -> None:
    versions = torch.tensor([4, -1, 6, 7, 7, 9, -1, -1])  # rollouts 4 . 6 | 7 7 | 9 . | .
    cu = torch.tensor([0, 3, 5, 7, 8])
    result = monitoring.staleness(versions, 10, [0, 1, 1, 2], cu_seqlens=cu, max_staleness=3)
    # Ages 6 4 3 3 1; the last tokens' are 4, 3 and 1.
    assert result == monitoring.Staleness(
        tokens=5, mean=17 / 5, most=6, in_flight=2 / 5, in_queue=15 / 5, histogram={1: 1, 3: 2, 4: 1, 6: 1},
        oldest_mean=10 / 3, dropped_rollouts=1, dropped_groups=1, groups=2,
    )  # fmt: skip
    assert result.in_flight + result.in_queue == pytest.approx(result.mean)
    padded = torch.tensor([[4, -1, 6], [7, 7, -1], [9, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    assert monitoring.staleness(padded, 10, [0, 1, 1, 2], max_staleness=3) == result


@pytest.mark.row(40)
@pytest.mark.parametrize(
    ("limit", "rollouts", "groups"), [(None, 0, 0), (6, 0, 0), (5, 1, 1), (3, 1, 1), (2, 3, 2), (0, 3, 2)]
)
def test_a_limit_drops_whole_groups_by_their_oldest_token(limit: int | None, rollouts: int, groups: int) -> None:
    versions, cu = torch.tensor([4, 6, 7, 9]), torch.tensor([0, 2, 3, 4])
    result = monitoring.staleness(versions, 10, ["a", "b", "b"], cu_seqlens=cu, max_staleness=limit)
    assert (result.dropped_rollouts, result.dropped_groups) == (rollouts, groups)


@pytest.mark.row(40)
def test_staleness_of_a_batch_and_of_what_cannot_be() -> None:
    fresh = batch(versions=torch.full((12,), 7))
    result = monitoring.staleness(fresh.versions, 7, fresh.groups, cu_seqlens=fresh.cu_seqlens)
    assert (result.tokens, result.mean, result.histogram) == (9, 0.0, {0: 9})
    nothing = monitoring.staleness(torch.full((2, 3), -1), 7, [0, 1], max_staleness=0)
    assert (nothing.tokens, nothing.groups, nothing.dropped_groups) == (0, 0, 0)
    assert math.isnan(nothing.mean)
    with pytest.raises(ValueError, match="sampled by version 8, newer than version 7"):
        monitoring.staleness(torch.tensor([[8]]), 7, [0])
    with pytest.raises(ValueError, match="versions holds -5"):
        monitoring.staleness(torch.tensor([[-5, 3]]), 7, [0])
    for bad in (3.5, math.nan, True, "3", None):
        with pytest.raises(TypeError, match=r"version is .*; pass an integer"):
            monitoring.staleness(torch.tensor([[3]]), bad, [0])  # type: ignore[arg-type]
        if bad is not None:
            with pytest.raises(TypeError, match=r"max_staleness is .*; pass an integer"):
                monitoring.staleness(torch.tensor([[3]]), 7, [0], max_staleness=bad)  # type: ignore[arg-type]
    narrow = torch.tensor([[3, 200]], dtype=torch.uint8)
    assert monitoring.staleness(narrow, 300, [0]).histogram == {100: 1, 297: 1}
    with pytest.raises(ValueError, match="max_staleness is -1"):
        monitoring.staleness(torch.tensor([[8]]), 9, [0], max_staleness=-1)
    with pytest.raises(ValueError, match="group_ids has 2 rows, versions has 1"):
        monitoring.staleness(torch.tensor([[8]]), 9, [0, 1])


# ---- Difficulty ------------------------------------------------------------------------------------------------------


@pytest.mark.row(13, 25, 45)
def test_difficulty_leaves_a_rollouts_own_outcome_out() -> None:
    # Group 0: one of four solved: its siblings solved 0 of 3, the others' 1 of 3. Group 1: 2 of 3, and one without a
    # result. Group 2: alone. Group 3: one of two.
    outcomes = torch.tensor([SOLVED, FAILED, BUDGET, FAILED, SOLVED, SOLVED, FAILED, INFRA, SOLVED, FAILED, SOLVED])
    groups = [0, 0, 0, 0, 1, 1, 1, 1, 2, 3, 3]
    assert monitoring.difficulty(outcomes, groups).tolist() == [0, 1, 1, 1, 1, 1, 2, 1, 3, 2, 0]
    with pytest.raises(ValueError, match="group_ids has 1 rows, outcomes has 11"):
        monitoring.difficulty(outcomes, [0])


@pytest.mark.row(13, 45)
def test_the_whole_groups_rate_would_select_on_noise() -> None:
    """Success is a coin in every group: siblings' difficulty knows nothing of it, the group's own rate does."""
    outcomes = (torch.rand(4000, 4, generator=torch.Generator().manual_seed(0)) < 0.5).to(torch.int64).flatten()
    groups = torch.arange(4000).repeat_interleave(4)
    rows = monitoring.by_difficulty(outcomes, groups)
    assert [row.rollouts for row in rows[:3]] == pytest.approx([2000, 12000, 2000], rel=0.1)
    assert all(row.success_rate == pytest.approx(0.5, abs=0.04) for row in rows[:3])
    rate = (outcomes.view(-1, 4) == SOLVED).double().mean(1).repeat_interleave(4)
    own = torch.where(rate < 1 / 3, 0, torch.where(rate > 2 / 3, 2, 1))
    selected = monitoring.by_difficulty(outcomes, groups, levels=own)
    assert selected[0].success_rate < 0.25
    assert selected[2].success_rate > 0.75


@pytest.mark.row(25, 45)
def test_masks_truncation_and_shares_by_difficulty() -> None:
    outcomes = torch.tensor([SOLVED, BUDGET, FAILED, SOLVED, SOLVED, BUDGET])
    groups = [0, 0, 0, 1, 1, 1]  # siblings solved 0/2 1/2 1/2 | 1/2 1/2 2/2
    excluded, capped = torch.tensor([0, 1, 0, 0, 0, 1]).bool(), torch.tensor([0, 1, 0, 1, 0, 1]).bool()
    gradient = torch.tensor([1.0, 0.0, 2.0, 3.0, 2.0, 8.0])
    rows = monitoring.by_difficulty(
        outcomes, groups, capped=capped, excluded=excluded, quantities={"gradient": gradient}
    )
    assert [(r.difficulty, r.rollouts) for r in rows] == list(zip(monitoring.DIFFICULTIES, [1, 4, 1, 0], strict=True))
    assert [r.success_rate for r in rows[:3]] == [1.0, 0.5, 0.0]
    assert [r.truncation_rate for r in rows[:3]] == [0.0, 0.5, 1.0]
    assert [r.mask_share for r in rows[:3]] == [0.0, 0.25, 1.0]
    assert [r.shares["gradient"] for r in rows] == [1 / 16, 7 / 16, 8 / 16, 0.0]
    assert math.isnan(rows[3].mask_share)
    assert [r.truncation_rate for r in monitoring.by_difficulty(outcomes, groups)[:3]] == [0.0, 0.25, 1.0]
    with pytest.raises(ValueError, match=r"quantities\['x'\]\[0\] is -1"):
        monitoring.by_difficulty(outcomes, groups, quantities={"x": -torch.ones(6)})
    with pytest.raises(TypeError, match="quantities is a list; pass a dict"):
        monitoring.by_difficulty(outcomes, groups, quantities=[gradient])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group_ids has 1 rows, outcomes has 6"):
        monitoring.by_difficulty(outcomes, [0], levels=torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ValueError, match="levels must be from 0 to 3"):
        monitoring.by_difficulty(outcomes, groups, levels=torch.full((6,), 4))


# ---- Penalties -------------------------------------------------------------------------------------------------------


@pytest.mark.row(45)
def test_use_of_the_window_and_the_penalty() -> None:
    lengths = torch.tensor([50, 80, 85, 95, 100])  # of 100, whose last 20 are the cache
    penalties = torch.tensor([0.0, 0.0, -0.25, -0.75, -1.0])
    solved = torch.tensor([1, 1, 1, 0, 0]).bool()
    result = monitoring.length_budget(lengths, penalties, solved, max_length=100, cache_length=20)
    assert result == monitoring.LengthBudget(
        free=0.4, in_cache=0.4, full=0.2, cache_use=0.5, penalised=0.6, mean_penalty=-0.4, solved_penalised=1 / 3,
        penalty_on_solved=0.125,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"penalties\[0\] is 0.5; a penalty is 0 or negative"):
        monitoring.length_budget(lengths[:1], torch.tensor([0.5]), solved[:1], max_length=100, cache_length=20)
    with pytest.raises(ValueError, match="cache_length is 101"):
        monitoring.length_budget(lengths, penalties, solved, max_length=100, cache_length=101)
    for bad in (math.nan, 20.0, True, "20"):
        for sizes in ({"max_length": bad, "cache_length": 2}, {"max_length": 100, "cache_length": bad}):
            with pytest.raises(TypeError, match=r"_length is .*; pass an integer"):
                monitoring.length_budget(lengths, penalties, solved, **sizes)  # type: ignore[arg-type]


@pytest.mark.row(45)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_windows_that_do_not_fit_into_the_dtype_of_lengths(dtype: torch.dtype) -> None:
    lengths, right, none = torch.tensor([100, 120], dtype=dtype), torch.ones(2, dtype=torch.bool), torch.zeros(2)
    result = monitoring.length_budget(lengths, none, right, max_length=1000, cache_length=890)
    assert (result.free, result.in_cache, result.full) == (0.5, 0.5, 0.0)
    assert result.cache_use == pytest.approx(10 / 890, rel=1e-12)
    long = monitoring.penalty_and_clip(lengths, right, none, none, none, none, longer_than=356)  # 100 in 8 bits
    assert long.rollouts == 0


def test_lengths_that_are_none() -> None:
    right, none = torch.ones(2, dtype=torch.bool), torch.zeros(2)
    calls = (
        lambda x: monitoring.length_budget(x, none, right, max_length=9, cache_length=2),
        lambda x: monitoring.penalty_and_clip(x, right, none, none, none, none, longer_than=2),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"lengths\[1\] is -5; it must not be negative"):
            call(torch.tensor([5, -5]))
        for shape in ((2, 1), ()):
            with pytest.raises(ValueError, match=r"lengths has shape .*; expected \[B\]"):
                call(torch.ones(shape, dtype=torch.int64))
        with pytest.raises(TypeError, match="lengths has dtype"):
            call(torch.ones(2))
    for bad in (math.nan, 2.5, True, "2", None):
        with pytest.raises(TypeError, match=r"longer_than is .*; pass an integer"):
            monitoring.penalty_and_clip(torch.tensor([5, 5]), right, none, none, none, none, longer_than=bad)  # type: ignore[arg-type]


@pytest.mark.row(45)
def test_penalty_by_clip_on_long_correct_answers() -> None:
    lengths = torch.tensor([90, 95, 99, 50, 95])
    solved = torch.tensor([1, 1, 1, 1, 0]).bool()  # the first three are long and right
    plain = torch.tensor([1.0, 1.0, 1.0, 9.0, 9.0])
    penalised = torch.tensor([0.5, -0.5, -0.75, 9.0, 9.0])
    low, high = torch.tensor([0.4, 0.2, 0.0, 1.0, 1.0]), torch.tensor([0.1, 0.2, 0.0, 0.5, 0.5])
    result = monitoring.penalty_and_clip(lengths, solved, plain, penalised, low, high, longer_than=80)
    assert result.rollouts == 3
    neither, clip_only = (0.6 + 0.8 + 1.0) / 3, (0.9 + 0.8 + 1.0) / 3
    penalty_only, both = (0.3 - 0.5 - 0.75) / 3, (0.45 - 0.5 - 0.75) / 3
    assert result.push[0] == pytest.approx((neither, clip_only))
    assert result.push[1] == pytest.approx((penalty_only, both))
    assert result.penalty_effect == pytest.approx(penalty_only - neither)
    assert result.clip_effect == pytest.approx(0.1)
    assert result.interaction == pytest.approx(0.05 - 0.1)
    assert result.turned == pytest.approx(2 / 3)


@pytest.mark.row(45)
def test_where_the_penalty_turns_every_advantage_clip_higher_does_nothing() -> None:
    lengths, solved, half = torch.tensor([90, 95]), torch.ones(2, dtype=torch.bool), torch.tensor([0.5, 0.5])
    plain, turned = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0])
    result = monitoring.penalty_and_clip(lengths, solved, plain, turned, half, 0 * half, longer_than=80)
    assert result.push[1][0] == result.push[1][1] == -1.5
    assert result.interaction == -result.clip_effect == -0.75
    none = monitoring.penalty_and_clip(lengths, ~solved, plain, turned, half, half, longer_than=80)
    assert none.rollouts == 0
    assert math.isnan(none.interaction)
    with pytest.raises(ValueError, match=r"row 0 has clipped 0\.25 and clipped_higher 0\.5"):
        monitoring.penalty_and_clip(lengths, solved, plain, turned, half / 2, half, longer_than=80)
