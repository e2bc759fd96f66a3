"""What training runs say of P3 to P6, from their step records (docs/step_record.md).

A run is one seed of one arm. Intervals are Student's over runs: steps of one run are no independent observations, so a
single run has no interval and decides nothing. Claims, signs and P3's b of 0.3 are the research plan's; the least
effects are choices that were made with this code, before any run was looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from fastadv.intervals import Interval
from fastadv.record import StepRecord
from fastadv.replay.verdicts import (
    FALSIFIED,
    SUPPORTED,
    UNDECIDED,
    Prediction,
    Rule,
    difference,
    judged,
    no_data,
    over_runs,
    weighted_slopes,
)

Run = Sequence[StepRecord]
SEEDS = 3  # runs of each arm that "the same curves" takes
PER = 100  # steps that slopes are per

P3_B = 0.3  # the cap rate is to stop falling once b is above
P3_FLAT = 0.01  # a point of the cap rate in PER steps is no fall
P3_STOPS = Rule(above=-P3_FLAT, null=-P3_FLAT, effect=-P3_FLAT)
P3_FALLS = Rule(above=0.0, null=0.0, effect=P3_FLAT)
P3_APART = Rule(above=0.0, null=0.0, effect=0.01)  # of the cap rate
P3_BIN = 0.05  # width of the bins of b in which curves are compared
P4_DRIFT = Rule(above=0.0, null=0.0, effect=P3_FLAT)
P4_GROWS = Rule(above=0.0, null=0.0, effect=0.1)  # of the cap rate, per unit of the cap rate
P5_CHANGE = Rule(above=0.0, null=0.0, effect=0.05)  # of the mean number of turns
P5_TESTS = Rule(above=0.0, null=0.0, effect=0.02)  # of the solved rollouts
P6_CHEAPER = Rule(above=0.0, null=0.0, effect=0.0)  # log of the ratio of wall-clocks
P6_RECOVERS, P6_FAILS = 0.5, 0.1  # probabilities of keeping a stale group
P6_FINAL = 0.2  # share of the steps, at the end, that final success is the mean of


def values(run: Run, number: Callable[[StepRecord], float | None]) -> tuple[list[int], list[float]]:
    """Steps that have a number, and the number."""
    found = [(record.step, value) for record in run if (value := number(record)) is not None]
    return [step for step, _ in found], [value for _, value in found]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the least-squares line; NaN where x does not vary."""
    if not x:
        return math.nan
    across, up = (torch.tensor(v, dtype=torch.float64) for v in (x, y))
    return float(weighted_slopes(across, up, torch.ones(1, len(x), dtype=torch.float64)))


def slopes(runs: Sequence[Run], number: Callable[[StepRecord], float | None]) -> list[float]:
    """Change of a number in PER steps, of each run that shows one."""
    found = (PER * slope(*values(run, number)) for run in runs)
    return [change for change in found if math.isfinite(change)]


def _negative(e: Interval) -> Interval:
    return Interval(-e.value, -e.high, -e.low)


# ---- P3 --------------------------------------------------------------------------------------------------------------


def p3_drift(masked: Sequence[Run], reference: Sequence[Run], matched: Sequence[Run] = ()) -> Prediction:
    """P3: under a mask the cap rate stops falling once b is above 0.3, and not for the size of the update.

    Falsified by cap rates that are the same at the same b (of three runs of each arm or more), or by a matched update
    whose cap rate does not fall either.

    Args:
        masked: runs of the arm with the mask.
        reference: runs of the arm without, R = 0 at the cap.
        matched: runs of the mask with the reference's update norm.
    """
    claim = (
        "above b = 0.3 the cap rate stops falling under the mask and goes on falling without it and under the matched "
        "update; submitted failures fall faster under the mask"
    )

    def above(record: StepRecord) -> float | None:
        return record.cap_hit_rate if record.b is not None and record.b > P3_B else None

    capped = {name: slopes(runs, above) for name, runs in (("mask", masked), ("reference", reference))}
    if not all(capped.values()):
        missing = " and ".join(name for name, found in capped.items() if not found)
        return no_data("P3", claim, f"no run of {missing} has two steps with b above {P3_B:g}")
    failures = [slopes(runs, lambda record: record.submitted_failure_rate) for runs in (reference, masked)]
    apart, enough = at_the_same_b(masked, reference)
    found = {
        "cap slope, mask": (over_runs(capped["mask"]), P3_STOPS),
        "cap fall, reference": (_negative(over_runs(capped["reference"])), P3_FALLS),
        "cap gap at the same b": (apart, P3_APART),
        "failures fall faster": (difference(*failures), P3_FALLS),
    }
    falsifiers = ["cap gap at the same b"] if enough else []
    lacking = [] if enough else [f"fewer than {SEEDS} runs of an arm share a range of b"]
    against = slopes(matched, above)
    if against:
        found["cap fall, matched"] = (_negative(over_runs(against)), P3_FALLS)
        falsifiers.append("cap fall, matched")
    else:
        lacking.append(f"no run of the matched update has two steps with b above {P3_B:g}")
    return judged("P3", claim, found, falsifiers=falsifiers, lacking=lacking)


def at_the_same_b(left: Sequence[Run], right: Sequence[Run]) -> tuple[Interval, bool]:
    """Difference of cap rates over the bins of b that every run has been in, and whether that is enough to say that
    there is none."""

    def curve(run: Run) -> dict[int, float]:
        bins: dict[int, list[float]] = {}
        for record in run:
            if record.b is not None and record.cap_hit_rate is not None:
                bins.setdefault(math.floor(record.b / P3_BIN), []).append(record.cap_hit_rate)
        return {number: sum(rates) / len(rates) for number, rates in bins.items()}

    curves = [[curve(run) for run in side] for side in (left, right)]
    shared = set.intersection(*(set(one) for side in curves for one in side))
    if not shared:
        return Interval(math.nan), False
    means = [[sum(one[number] for number in shared) / len(shared) for one in side] for side in curves]
    return difference(*means), min(map(len, means)) >= SEEDS


# ---- P4 --------------------------------------------------------------------------------------------------------------


def p4_drift(survivors: Sequence[Run], all_vote: Sequence[Run]) -> Prediction:
    """P4: the cap rate rises faster under survivors' baselines than under those of all rollouts, by a gap that grows.

    Falsified by curves that are the same, of three runs of each arm or more.

    Args:
        survivors: runs of the mask with survivors' baselines.
        all_vote: runs of the mask in which all rollouts vote.
    """
    claim = "the cap rate drifts up faster under survivors' baselines, and the gap grows with the cap rate"
    sides = [slopes(runs, lambda record: record.cap_hit_rate) for runs in (survivors, all_vote)]
    if not all(sides):
        return no_data("P4", claim, "no run of one of the arms has two steps")
    by_step: dict[int, list[float]] = {}
    for run in all_vote:
        for record in run:
            if record.cap_hit_rate is not None:
                by_step.setdefault(record.step, []).append(record.cap_hit_rate)
    usual = {step: sum(rates) / len(rates) for step, rates in by_step.items()}
    grows = []
    for run in survivors:
        steps, rates = values(run, lambda record: record.cap_hit_rate)
        pairs = [(usual[step], rate - usual[step]) for step, rate in zip(steps, rates, strict=True) if step in usual]
        grows.append(slope([rate for rate, _ in pairs], [gap for _, gap in pairs]))
    found = {
        "drift apart": (difference(*sides), P4_DRIFT),
        "gap on the cap rate": (over_runs([g for g in grows if math.isfinite(g)]), P4_GROWS),
    }
    enough = min(map(len, sides)) >= SEEDS
    lacking = [] if enough else [f"fewer than {SEEDS} runs of an arm"]
    return judged("P4", claim, found, falsifiers=["drift apart"] if enough else [], lacking=lacking)


# ---- P5 --------------------------------------------------------------------------------------------------------------


def p5_signature(drop: Sequence[Run], never: Sequence[Run]) -> Prediction:
    """P5: under staleness drops, successes get shorter and failures longer than without, and fewer successes ran tests.

    Changes are of the line through a run, from its first to its last step, in shares of its mean number of turns.
    Falsified where the two do not move apart, or the other way.

    Args:
        drop: runs that drop stale groups.
        never: runs that keep them.
    """
    claim = (
        "dropping stale groups makes solved rollouts shorter and failed ones longer over training than keeping them "
        "does, and fewer solved rollouts ran tests"
    )

    turns = [
        [(change(run, lambda r: r.turns.failed), change(run, lambda r: r.turns.solved)) for run in runs]
        for runs in (drop, never)
    ]
    pairs = [[(f, s) for f, s in side if math.isfinite(f) and math.isfinite(s)] for side in turns]
    if not all(pairs):
        return no_data("P5", claim, "no run of one of the arms has solved and failed rollouts at two steps")
    (failed, solved), (failed_never, solved_never) = (list(zip(*side, strict=True)) for side in pairs)
    tests = [
        [c for run in runs if math.isfinite(c := change(run, tests_of_solved, relative=False))]
        for runs in (never, drop)
    ]  # fmt: skip
    found = {
        "move apart": (difference(*([f - s for f, s in side] for side in pairs)), P5_CHANGE),
        "solved get shorter": (difference(solved_never, solved), P5_CHANGE),
        "failed get longer": (difference(failed, failed_never), P5_CHANGE),
    }
    lacking = []
    if all(tests):
        found["fewer ran tests"] = (difference(*tests), P5_TESTS)
    else:
        lacking.append("no run says which rollouts ran tests")
    return judged("P5", claim, found, falsifiers=["move apart"], lacking=lacking)


def change(run: Run, number: Callable[[StepRecord], float | None], *, relative: bool = True) -> float:
    """How far the line through a run goes from its first step to its last, over the mean number if `relative`."""
    steps, numbers = values(run, number)
    if not steps:
        return math.nan
    mean = sum(numbers) / len(numbers)
    gone = slope(steps, numbers) * (max(steps) - min(steps))
    return gone if not relative else gone / mean if mean else math.nan


def tests_of_solved(record: StepRecord) -> float | None:
    """Share of the solved rollouts that ran tests."""
    return None if record.ran_tests is None else record.ran_tests.solved


# ---- P6 --------------------------------------------------------------------------------------------------------------


def p6_rescue(never: Sequence[Run], rescued: Mapping[float, Sequence[Run]]) -> Prediction:
    """P6: keeping stale groups with probability 0.5 ends where keeping all ends, in less time; with 0.1 it does not.

    Final success is the mean over the last fifth of the steps. An arm ends where another does if the interval of their
    difference holds 0, of three runs each or more; wall-clock is over the steps that all runs have.

    Args:
        never: runs that drop nothing.
        rescued: by the probability of keeping a stale group, below 1, the runs that did.
    """
    claim = (
        "keeping stale groups with probability 0.5 reaches the final success of keeping all, within the noise between "
        "seeds and at lower wall-clock; with 0.1 it does not reach it"
    )
    for a in rescued:
        if not 0 < a < 1:
            raise ValueError(f"p6_rescue: probability {a}; a stale group is kept with one above 0 and below 1")
    ends = {a: finals(runs) for a, runs in rescued.items()}
    best = finals(never)
    if not best or not any(ends.values()):
        return no_data("P6", claim, "no run that drops nothing, or none that keeps stale groups by a coin")
    behind = {a: difference(best, end) for a, end in ends.items() if end}
    ends_there = {a: e.low <= 0 for a, e in behind.items() if min(len(best), len(ends[a])) >= SEEDS}
    cheaper = {a: saved(never, rescued[a]) for a in behind}
    statistic, intervals = {}, {}
    for what, found in (("success behind", behind), ("time saved (log)", cheaper)):
        for a, e in sorted(found.items(), reverse=True):
            statistic[f"{what}, a = {a:g}"] = e.value
            if not math.isnan(e.low):
                intervals[f"{what}, a = {a:g}"] = (e.low, e.high)
    price = P6_CHEAPER.verdict(cheaper[P6_RECOVERS]) if P6_RECOVERS in cheaper else UNDECIDED
    said = [f"a = {a:g} {'reaches' if there else 'does not reach'} it" for a, there in sorted(ends_there.items())]
    said += [f"at a = {P6_RECOVERS:g} the wall-clock is {_PRICE[price]}"]
    said += [f"fewer than {SEEDS} runs with a = {a:g} or without drops" for a in behind if a not in ends_there]
    said += [f"no run with a = {a:g}" for a in (P6_RECOVERS, P6_FAILS) if a not in behind]
    verdict = UNDECIDED
    if price == FALSIFIED or (len(ends_there) == len(behind) and not any(ends_there.values())):
        verdict = FALSIFIED
    elif price == SUPPORTED and ends_there.get(P6_RECOVERS) is True and ends_there.get(P6_FAILS) is False:
        verdict = SUPPORTED
    return Prediction(
        name="P6",
        claim=claim,
        statistic=statistic,
        threshold=(
            f"supported if a = {P6_RECOVERS:g} is not behind and saves time and a = {P6_FAILS:g} is behind; falsified "
            f"if all are behind, or a = {P6_RECOVERS:g} saves none"
        ),
        interval=intervals.get(next(iter(statistic))),
        verdict=verdict,
        detail="; ".join(said),
        intervals=intervals,
    )


_PRICE = {SUPPORTED: "lower", FALSIFIED: "higher", UNDECIDED: "not told apart"}


def end_of(run: Run, number: Callable[[StepRecord], float | None]) -> float:
    """Mean of a number over the end of a run; NaN without one."""
    steps, numbers = values(run, number)
    if not steps:
        return math.nan
    begin = max(steps) - P6_FINAL * (max(steps) - min(steps))
    last = [value for step, value in zip(steps, numbers, strict=True) if step >= begin]
    return sum(last) / len(last)


def finals(runs: Sequence[Run]) -> list[float]:
    """Success at the end of each run that has one."""
    ends = (end_of(run, lambda record: record.success_rate) for run in runs)
    return [end for end in ends if math.isfinite(end)]


def saved(usual: Sequence[Run], other: Sequence[Run]) -> Interval:
    """Log of the usual wall-clock less the log of the other's, over the steps that all runs have."""
    times = [
        [dict(zip(*values(run, lambda record: record.wall_clock_s), strict=True)) for run in runs]
        for runs in (usual, other)
    ]
    shared = set.intersection(*(set(run) for side in times for run in side))
    sums = [[sum(run[step] for step in shared) for run in side] for side in times]
    if not all(total > 0 for side in sums for total in side):
        return Interval(math.nan)
    return difference(*([math.log(total) for total in side] for side in sums))
