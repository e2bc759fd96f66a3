"""Predictions P2 to P6: constructed curves on both sides of each threshold, in between, and without data."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from rollout_files import samples, write_dump
from step_records import run
from torch import Tensor

import fastadv as fa
from fastadv.arms.prompt_sums import PromptSums
from fastadv.gradproj import SegmentGram
from fastadv.intervals import Interval
from fastadv.outcomes import Outcome
from fastadv.record import ByOutcome
from fastadv.replay.predictions_rollouts import (
    TurnPairs,
    norm_elasticity,
    p2_direction,
    p4_amplification,
    p5_separation,
)
from fastadv.replay.predictions_runs import Run, p3_drift, p4_drift, p5_signature, p6_rescue
from fastadv.replay.readers import ReadOptions, read
from fastadv.replay.verdicts import (
    FALSIFIED,
    NO_DATA,
    STUDENT,
    SUPPORTED,
    UNDECIDED,
    Rule,
    difference,
    judged,
    over_runs,
    student,
    weighted_slopes,
)

pytestmark = pytest.mark.row(46)
ARMS = {arm.name: arm for arm in fa.arms.question_one_arms()}

# ---- rules and intervals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.51, 0.9, SUPPORTED),
        (0.49, 0.9, UNDECIDED),  # reaches below the threshold
        (0.1, 0.4, UNDECIDED),  # too small, and yet some
        (-0.1, 0.6, UNDECIDED),  # merely wide
        (-0.1, 0.4, FALSIFIED),
        (-0.9, -0.4, FALSIFIED),
        (math.nan, math.nan, UNDECIDED),
    ],
)
def test_what_an_interval_decides(low: float, high: float, verdict: str) -> None:
    assert Rule(above=0.5, null=0.0, effect=0.5).verdict(Interval((low + high) / 2, low, high)) == verdict


def test_a_prediction_of_several_statistics() -> None:
    rule, yes, no, open_ = Rule(0, 0, 1), Interval(2, 1, 3), Interval(0, -0.5, 0.5), Interval(0, -2, 2)

    def verdict(*estimates: Interval, falsifiers: tuple[str, ...] = ("0",), lacking: tuple[str, ...] = ()) -> str:
        found = {str(i): (e, rule) for i, e in enumerate(estimates)}
        return judged("P", "claim", found, falsifiers=falsifiers, lacking=lacking).verdict

    assert verdict(yes, yes) == SUPPORTED
    assert verdict(yes, yes, lacking=("a run",)) == UNDECIDED
    assert verdict(yes, open_) == UNDECIDED
    assert verdict(yes, no) == UNDECIDED  # against it, but no falsifier
    assert verdict(no, yes) == FALSIFIED
    p = judged("P", "claim", {"0": (no, rule), "1": (yes, rule)}, falsifiers=["0"], shown={"2": open_})
    assert p.statistic == {"0": 0, "1": 2, "2": 0}
    assert p.interval == p.intervals["0"] == (-0.5, 0.5)
    assert p.detail == "0 is against it"
    assert p.threshold.startswith("0: supported above 0, falsified below 1 and reaching 0")


def test_slopes_are_least_squares_and_do_without_equal_points() -> None:
    x, y = torch.tensor([0.0, 1.0, 2.0]).double(), torch.tensor([1.0, 2.0, 9.0]).double()
    weights = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 2.0, 0.0], [1.0, 1.0, 2.0]]).double()
    expected = [4.0, 1.0, math.nan]
    weighted = [0.0, 1.0, 2.0, 2.0], [1.0, 2.0, 9.0, 9.0]
    mx, my = (sum(side) / 4 for side in weighted)
    top = sum((a - mx) * (b - my) for a, b in zip(*weighted, strict=True))
    expected.append(top / sum((a - mx) ** 2 for a in weighted[0]))
    torch.testing.assert_close(weighted_slopes(x, y, weights), torch.tensor(expected).double(), equal_nan=True)
    tenths = torch.full((7,), 0.1).double()
    assert bool(weighted_slopes(tenths, torch.arange(7).double(), torch.ones(1, 7).double()).isnan())


def test_students_interval_is_students() -> None:
    """By its own density: 2.5 % of it lies beyond each point."""
    for freedom, point in ((1, STUDENT[0]), (5, STUDENT[4]), (30, STUDENT[29]), (47, student(47.9))):
        x = torch.linspace(0, point, 200_001, dtype=torch.float64)
        scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
        density = scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        assert float(torch.trapezoid(density, x)) == pytest.approx(0.475, abs=2e-4)
    e = over_runs([1.0, 2.0, 3.0])
    assert (e.value, e.high - e.value) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert math.isnan(over_runs([1.0]).low)
    assert math.isnan(over_runs([]).value)
    assert difference([1.0, 1.0], [0.5, 0.5]) == Interval(0.5, 0.5, 0.5)


def test_intervals_over_runs_cover() -> None:
    rng, covered = random.Random(0), 0
    for _ in range(600):
        left, right = ([rng.gauss(mean, sd) for _ in range(3)] for mean, sd in ((0.3, 1.0), (0.0, 0.2)))
        e = difference(left, right)
        covered += e.low <= 0.3 <= e.high
    assert 0.93 <= covered / 600 <= 0.99


# ---- P2 --------------------------------------------------------------------------------------------------------------

SOLVED = (0.15, 0.5, 0.75)  # chances: mostly hard, medium and easy by either half


def gram_of(along: float, power: float, noise: float = 0.05, seed: int = 0) -> SegmentGram:
    """Gradients of 36 prompts with 16 rollouts of one turn, a quarter of them capped.

    What a mask adds is a sum over capped rollouts, whose gradients are v; those of the others are such that the cap's
    direction has the cosine `along` with v. Both are scaled by the prompt's success to `power`: the norm of what the
    mask adds goes with b to 1 + power.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts, size, parameters = 36, 16, 12
    rewards, outcomes, gradients = [], [], []
    v, z = torch.eye(parameters, dtype=torch.float64)[:2]
    for prompt in range(prompts):
        solved = SOLVED[prompt % 3]
        chances = torch.tensor([solved, 0.75 - solved, 0.25])
        ends = torch.multinomial(chances, size, replacement=True, generator=generator).tolist()
        outcomes += ends
        rewards += [float(end == 0) for end in ends]
        for end in ends:
            mean = v if end == 2 else v - along * v - math.sqrt(1 - along**2) * z
            wobble = torch.randn(parameters, generator=generator, dtype=torch.float64)
            gradients.append(solved**power * (mean + noise * wobble))
    rows = prompts * size
    batch = fa.Batch.of(
        mask=torch.ones(rows), cu_seqlens=torch.arange(rows + 1), rewards=torch.tensor(rewards),
        group_ids=torch.arange(prompts).repeat_interleave(size), outcomes=torch.tensor(outcomes),
    )  # fmt: skip
    u = torch.stack(gradients)
    gram = u @ u.T
    turns = torch.zeros(rows, dtype=torch.int64)
    return SegmentGram((gram + gram.T) / 2, torch.arange(rows), turns, parameters, parameters).with_rollouts(batch)


@pytest.mark.parametrize(
    ("along", "power", "verdict", "against"),
    [
        (0.95, 0.0, SUPPORTED, ""),
        (0.6, 0.0, SUPPORTED, ""),
        (0.3, 0.0, UNDECIDED, "cosine with the cap is open"),  # along the cap, but by less than was predicted
        (0.0, 0.0, FALSIFIED, "cosine with the cap is against it"),
        (-0.5, 0.0, FALSIFIED, "cosine with the cap is against it"),
        (0.95, -1.0, UNDECIDED, "elasticity in b is open"),  # nearly flat in b, and too few prompts to tell
        (0.95, -1.3, FALSIFIED, "elasticity in b is against it"),
        (0.95, -2.0, FALSIFIED, "elasticity in b is against it"),
    ],
)
def test_p2_on_both_sides_of_its_thresholds(along: float, power: float, verdict: str, against: str) -> None:
    p = p2_direction(gram_of(along, power, seed=2), ARMS["b"], ARMS["a"], draws=200)
    assert p.statistic["cosine with the cap"] == pytest.approx(along, abs=0.1)
    assert p.statistic["cosine, other half"] == pytest.approx(along, abs=0.1)
    assert p.statistic["elasticity in b"] == pytest.approx(1 + power, abs=0.35)
    assert p.verdict == verdict
    assert against in p.detail


def test_p2_of_noise_and_of_nothing() -> None:
    """Without a common direction nothing is decided; where the mask takes nothing there is no data."""
    noise = p2_direction(gram_of(0.0, 0.0, noise=30.0), ARMS["b"], ARMS["a"], draws=200)
    assert noise.verdict == UNDECIDED
    gram = gram_of(0.95, 0.0)
    assert gram.rollouts is not None
    same = p2_direction(gram, replace(ARMS["a"], name="same"), ARMS["a"], draws=10)
    assert (same.verdict, same.statistic) == (NO_DATA, {})
    hard = replace(gram.rollouts, outcomes=torch.full_like(gram.rollouts.outcomes, int(Outcome.FAILED)))
    assert math.isnan(norm_elasticity(gram, hard, ARMS["b"], ARMS["a"], draws=10).value)  # one subset
    with pytest.raises(ValueError, match="has no rollouts"):
        p2_direction(replace(gram, rollouts=None, tokens=None), ARMS["b"], ARMS["a"])


# ---- P4 and P5, one checkpoint ---------------------------------------------------------------------------------------


def sums(**given: Tensor) -> PromptSums:
    ones = torch.ones_like(next(iter(given.values())))
    return PromptSums(**{name: given.get(name, ones) for name in PromptSums.__dataclass_fields__})


@pytest.mark.parametrize(
    ("level", "slope", "noise", "verdict"),
    [
        (0.1, 0.5, 0.01, SUPPORTED),
        (0.1, 0.0, 0.005, FALSIFIED),  # a gap, and no more of it where the cap is hit often
        (0.1, 0.2, 0.4, UNDECIDED),
        (0.0, 0.0, 0.001, FALSIFIED),  # no gap
        (0.3, -0.5, 0.01, FALSIFIED),
    ],
)
def test_p4_on_both_sides_of_its_thresholds(level: float, slope: float, noise: float, verdict: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rate = torch.linspace(0.1, 0.9, 48, dtype=torch.float64)
    wobble = torch.randn(48, generator=generator, dtype=torch.float64) * noise
    capped, rollouts = 16 * rate, torch.full((48,), 16.0, dtype=torch.float64)
    gap = level + slope * rate + wobble - wobble.mean()
    all_vote = sums(capped=capped, rollouts=rollouts, subsidy=0.3 * capped)
    survivors = sums(capped=capped, rollouts=rollouts, subsidy=(0.3 + gap) * capped)
    p = p4_amplification(all_vote, survivors)
    assert p.verdict == verdict
    assert p.statistic["gap"] == pytest.approx(level + slope / 2)
    low, high = p.intervals["slope on the cap rate"]
    assert low <= slope <= high
    never = sums(capped=torch.zeros(48).double(), rollouts=rollouts)
    assert p4_amplification(never, never).verdict == NO_DATA


def test_turn_pairs_are_those_of_every_pair(tmp_path: Any) -> None:
    batch = read(write_dump(tmp_path / "d.pt", samples()), ReadOptions()).batch
    pairs, turns = TurnPairs.of(batch), batch.segments.turns().tolist()
    group, outcome = batch.groups.index.tolist(), batch.outcomes.tolist()
    for g in range(batch.groups.num_groups):
        here = [row for row in range(batch.num_rollouts) if group[row] == g]
        solved = [turns[row] for row in here if outcome[row] == Outcome.SOLVED]
        for others, count, longer in (
            ((1,), pairs.failed, pairs.failed_longer),
            ((1, 2), pairs.unsolved, pairs.unsolved_longer),
        ):
            every = [(turns[row], s) for row in here if outcome[row] in others for s in solved]
            assert float(count[g]) == len(every)
            assert float(longer[g]) == sum((a > b) + (a == b) / 2 for a, b in every)
    assert float((pairs + pairs).failed.sum()) == 2 * float(pairs.failed.sum())


def turn_batch(chance: float, prompts: int, rng: random.Random) -> fa.Batch:
    """Four solved and four failed rollouts a prompt; a failure is longer with this chance, and there are no ties."""
    outcomes, turns = [], []
    for _ in range(prompts):
        base = rng.randrange(1, 4)
        for _ in range(4):
            outcomes += [0, 1]
            turns += [4 * base + rng.randrange(2), 4 * base + (2 if rng.random() < chance else -1)]
    lengths = torch.tensor(turns)
    return fa.Batch.of(
        mask=torch.ones(int(lengths.sum())), turn_ids=torch.cat([torch.arange(n) for n in turns]),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        rewards=1.0 - torch.tensor(outcomes), group_ids=torch.arange(prompts).repeat_interleave(8), outcomes=outcomes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("chance", "prompts", "verdict"),
    [(0.75, 60, SUPPORTED), (0.5, 2000, FALSIFIED), (0.53, 60, UNDECIDED), (0.25, 60, FALSIFIED)],
)
def test_p5_on_both_sides_of_its_threshold(chance: float, prompts: int, verdict: str) -> None:
    p = p5_separation(TurnPairs.of(turn_batch(chance, prompts, random.Random(4))))
    assert p.verdict == verdict
    low, high = p.interval
    assert low <= chance <= high


def test_p5s_interval_covers_and_prompts_do_not_separate_by_themselves() -> None:
    rng, covered = random.Random(1), 0
    for _ in range(100):
        p = p5_separation(TurnPairs.of(turn_batch(0.6, 25, rng)), draws=200)
        covered += p.interval[0] <= 0.6 <= p.interval[1]
    assert 88 <= covered <= 100
    # An easy prompt is solved in 1 turn, a hard one fails in 9: pooled that separates, within prompts nothing is told.
    batch = fa.Batch.of(
        mask=torch.ones(40), turn_ids=torch.cat([torch.arange(n) for n in (1, 1, 9, 9, 9, 9, 1, 1)]),
        cu_seqlens=torch.tensor([0, 1, 2, 11, 20, 29, 38, 39, 40]), rewards=torch.zeros(8),
        group_ids=[0, 0, 1, 1, 1, 1, 0, 0], outcomes=[0, 1, 0, 1, 1, 1, 0, 0],
    )  # fmt: skip
    assert p5_separation(TurnPairs.of(batch)).statistic["failed takes longer"] == 0.5
    unsolved = batch.select(batch.outcomes == Outcome.FAILED)
    assert p5_separation(TurnPairs.of(unsolved)).verdict == NO_DATA


# ---- runs ------------------------------------------------------------------------------------------------------------

STEPS = 120


def seeds(count: int, arm: str, spread: float = 0.0005, **slopes: float) -> list[Run]:
    """Runs in which b rises from .1 to .7 and the cap rate, from .5, changes by `cap` in 100 steps from b = .3 on."""
    found = []
    for seed in range(count):
        rng = random.Random(f"{arm} {seed}")
        shift = rng.gauss(0, spread)

        def cap(step: int, rng: random.Random = rng, shift: float = shift) -> float:
            after = max(0, step - STEPS / 3) / 100
            return 0.5 - 0.2 * min(step, STEPS / 3) / 100 + slopes["cap"] * after + shift + rng.gauss(0, spread)

        def failed(step: int, rng: random.Random = rng) -> float:
            return 0.4 + slopes.get("failed", 0.0) * step / 100 + rng.gauss(0, spread)

        found.append(
            run(STEPS, arm, b=lambda s: 0.1 + 0.6 * s / STEPS, cap_hit_rate=cap, submitted_failure_rate=failed)
        )
    return found


REFERENCE = {"cap": -0.2, "failed": -0.05}


@pytest.mark.parametrize(
    ("mask", "matched", "count", "verdict", "said"),
    [
        ({"cap": 0.1, "failed": -0.2}, {"cap": -0.2}, 3, SUPPORTED, "whole interval"),  # rises
        ({"cap": 0.0, "failed": -0.2}, {"cap": -0.2}, 3, SUPPORTED, "whole interval"),  # stops falling
        ({"cap": -0.1, "failed": -0.2}, {"cap": -0.2}, 3, UNDECIDED, "cap slope, mask is against it"),  # falls on
        ({"cap": 0.1, "failed": -0.05}, {"cap": -0.2}, 3, UNDECIDED, "failures fall faster is"),
        (REFERENCE, {"cap": -0.2}, 3, FALSIFIED, "cap gap at the same b is against it"),  # the same curves
        (REFERENCE, {"cap": -0.2}, 2, UNDECIDED, "fewer than 3 runs"),
        ({"cap": 0.1, "failed": -0.2}, {"cap": 0.1}, 3, FALSIFIED, "cap fall, matched is against it"),  # reproduces it
        ({"cap": 0.1, "failed": -0.2}, None, 3, UNDECIDED, "no run of the matched update"),
        ({"cap": 0.1, "failed": -0.2}, {"cap": -0.2}, 1, UNDECIDED, "is open"),  # one seed has no noise to hold against
    ],
)
def test_p3(mask: dict[str, float], matched: dict[str, float] | None, count: int, verdict: str, said: str) -> None:
    p = p3_drift(
        seeds(count, "b", **mask), seeds(count, "a", **REFERENCE), seeds(count, "b", **matched) if matched else ()
    )  # fmt: skip
    assert p.verdict == verdict, p.detail
    assert said in p.detail
    assert p.statistic["cap slope, mask"] == pytest.approx(mask["cap"], abs=0.01)
    assert p.statistic["cap fall, reference"] == pytest.approx(0.2, abs=0.01)


def test_p3_looks_only_where_b_is_high_enough() -> None:
    low = [run(20, "b", b=lambda s: 0.29), run(20, "b", b=lambda s: None)]
    p = p3_drift(low, seeds(3, "a", **REFERENCE))
    assert (p.verdict, p.detail) == (NO_DATA, "no run of mask has two steps with b above 0.3")


@pytest.mark.parametrize(
    ("survivors", "count", "verdict", "said"),
    [
        (0.3, 3, SUPPORTED, "whole interval"),
        (0.1, 3, FALSIFIED, "drift apart is against it"),  # the same curves
        (0.1, 2, UNDECIDED, "fewer than 3 runs"),
        (-0.2, 3, FALSIFIED, "drift apart is against it"),
    ],
)
def test_p4_over_runs(survivors: float, count: int, verdict: str, said: str) -> None:
    p = p4_drift(seeds(count, "c", cap=survivors), seeds(count, "b", cap=0.1))
    assert p.verdict == verdict, p.detail
    assert said in p.detail
    assert p4_drift([run(1, "c")], seeds(3, "b", cap=0.1)).verdict == NO_DATA


def turning(count: int, solved: float, failed: float, tests: float | None = 0.0) -> list[Run]:
    """Runs in which solved and failed rollouts, of 5 and 8 turns in the mean, change by these shares of it."""
    found = []
    for seed in range(count):
        rng = random.Random(f"{solved} {failed} {seed}")

        def turns(step: int, rng: random.Random = rng) -> ByOutcome:
            place = step / (STEPS - 1) - 0.5
            return ByOutcome(None, 5 * (1 + solved * place) + rng.gauss(0, 0.02), 8 * (1 + failed * place))

        share = None if tests is None else lambda step: ByOutcome(solved=0.6 + tests * step / STEPS + step % 2 * 1e-3)
        found.append(run(STEPS, turns=turns, **({} if share is None else {"ran_tests": share})))
    return found


@pytest.mark.parametrize(
    ("drop", "count", "verdict"),
    [
        ((-0.3, 0.3, -0.2), 3, SUPPORTED),
        ((-0.3, 0.3, None), 3, UNDECIDED),  # nobody says which rollouts ran tests
        ((-0.3, 0.3, 0.0), 3, UNDECIDED),  # they ran as many
        ((-0.3, 0.3, -0.2), 1, UNDECIDED),
        ((0.0, 0.0, -0.2), 3, FALSIFIED),  # do not separate
        ((0.3, -0.3, -0.2), 3, FALSIFIED),  # the other way
    ],
)
def test_p5_over_runs(drop: tuple[float, float, float | None], count: int, verdict: str) -> None:
    p = p5_signature(turning(count, *drop), turning(count, 0.0, 0.0, 0.0 if drop[2] is not None else None))
    assert p.verdict == verdict, p.detail
    assert p.statistic["move apart"] == pytest.approx(drop[1] - drop[0], abs=0.02)
    assert p5_signature([run(3, turns=lambda s: ByOutcome())], turning(1, 0, 0)).verdict == NO_DATA


def ending(count: int, success: float, seconds: float, spread: float = 0.01) -> list[Run]:
    """Runs that end at a success rate, and take these seconds a step."""
    found = []
    for seed in range(count):
        end = success + spread * (seed - (count - 1) / 2)

        def rate(step: int, end: float = end) -> float:
            return end * min(1.0, step / (0.8 * (STEPS - 1)))

        found.append(run(STEPS, success_rate=rate, wall_clock_s=lambda s, seed=seed: seconds * (1 + 0.01 * seed)))
    return found


NEVER = (3, 0.6, 10.0)


@pytest.mark.parametrize(
    ("half", "tenth", "verdict", "said"),
    [
        ((3, 0.6, 7.0), (3, 0.4, 5.0), SUPPORTED, "a = 0.5 reaches it"),
        ((3, 0.6, 7.0), (3, 0.6, 5.0), UNDECIDED, "a = 0.1 reaches it"),
        ((3, 0.6, 7.0), None, UNDECIDED, "no run with a = 0.1"),
        ((3, 0.4, 7.0), (3, 0.3, 5.0), FALSIFIED, "a = 0.5 does not reach it"),  # none matches
        ((3, 0.6, 12.0), (3, 0.4, 5.0), FALSIFIED, "the wall-clock is higher"),  # never-drop is cheaper
        ((3, 0.6, 10.0), (3, 0.4, 5.0), UNDECIDED, "the wall-clock is not told apart"),
        ((2, 0.6, 7.0), (2, 0.4, 5.0), UNDECIDED, "fewer than 3 runs with a = 0.5"),
    ],
)
def test_p6(half: tuple[Any, ...], tenth: tuple[Any, ...] | None, verdict: str, said: str) -> None:
    rescued = {0.5: ending(*half), **({0.1: ending(*tenth)} if tenth else {})}
    p = p6_rescue(ending(*NEVER), rescued)
    assert p.verdict == verdict, p.detail
    assert said in p.detail
    assert p.statistic["success behind, a = 0.5"] == pytest.approx(0.6 - half[1], abs=1e-6)
    assert p.statistic["time saved (log), a = 0.5"] == pytest.approx(math.log(10 / half[2]), abs=0.01)


def test_p6_without_what_it_needs() -> None:
    assert p6_rescue([], {0.5: ending(*NEVER)}).verdict == NO_DATA
    assert p6_rescue(ending(*NEVER), {}).verdict == NO_DATA
    untimed = [run(5, success_rate=lambda s: 0.5)] * 3
    assert p6_rescue(untimed, {0.5: untimed, 0.1: untimed}).verdict == UNDECIDED
    with pytest.raises(ValueError, match="probability 1"):
        p6_rescue(ending(*NEVER), {1: ending(*NEVER)})
