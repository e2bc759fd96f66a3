"""Plots of training runs from their step records: every quantity against steps and against b, arms overlaid."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastadv.record import Bucket, StepRecord
from fastadv.replay.plots import Figure, draw, label
from fastadv.replay.predictions_runs import PER, Run, slope, values

COLOURS = ("#1565c0", "#ef6c00", "#2e7d32", "#c62828", "#6a1b9a", "#00838f", "#827717", "#5d4037")
LINES = ("-", "--", ":", "-.")
WINDOW = 0.2  # share of a run's steps that a rate of change is the slope of


class NamedRun(NamedTuple):
    """A run, and the name of its arm in reports."""

    name: str
    records: Run


class Quantity(NamedTuple):
    """A number of a record, and what it is called."""

    title: str
    number: Callable[[StepRecord], float | None]


QUANTITIES = (
    Quantity("cap-hit rate", lambda r: r.cap_hit_rate),
    Quantity("submitted-failure rate", lambda r: r.submitted_failure_rate),
    Quantity("success rate", lambda r: r.success_rate),
    Quantity("rollouts without a result", lambda r: r.census.infra / r.rollouts if r.rollouts else None),
    Quantity("reward", lambda r: r.reward),
    Quantity("turns", lambda r: r.turns.all),
    Quantity("turns of solved rollouts", lambda r: r.turns.solved),
    Quantity("turns of submitted failures", lambda r: r.turns.failed),
    Quantity("response tokens", lambda r: r.response_length.all),
    Quantity("response tokens of solved rollouts", lambda r: r.response_length.solved),
    Quantity("response tokens of submitted failures", lambda r: r.response_length.failed),
    Quantity("solved rollouts that ran tests", lambda r: None if r.ran_tests is None else r.ran_tests.solved),
    Quantity("clip ratio", lambda r: r.clip_ratio),
    Quantity("update norm", lambda r: r.update_norm),
    Quantity("learning-rate multiplier", lambda r: r.learning_rate_multiplier),
    Quantity("advantage variance per token", lambda r: r.advantage_variance),
    Quantity("reference's advantage variance", lambda r: r.reference_variance),
    Quantity("b", lambda r: r.b),
    Quantity("b over sigma", lambda r: r.b_over_sigma),
    Quantity("implied reward for the cap", lambda r: r.subsidy),
    Quantity("rollouts that the arm excludes", lambda r: r.excluded_rate),
    Quantity("staleness, versions", lambda r: None if r.staleness is None else r.staleness.mean),
    Quantity("largest staleness", lambda r: None if r.staleness is None else r.staleness.most),
    Quantity("dropped groups", lambda r: None if r.staleness is None else r.staleness.dropped_groups),
    Quantity("seconds of the step", lambda r: r.wall_clock_s),
    Quantity("seconds of rollouts in the loss", lambda r: r.kept_s),
    Quantity("seconds of other rollouts", lambda r: r.excluded_s),
)
BY_DIFFICULTY: tuple[tuple[str, Callable[[StepRecord], Sequence[Bucket]]], ...] = (
    ("Mask share by difficulty", lambda r: r.mask_share_by_difficulty),
    ("Truncation rate by difficulty", lambda r: r.truncation_rate_by_difficulty),
)
RATES = QUANTITIES[:3]  # whose change is shown against b


def record_figures(runs: Sequence[NamedRun]) -> list[Figure]:
    """Every plot that the runs have numbers for."""
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(run.name for run in runs))}
    found = [_changes(rate, runs, colours) for rate in RATES if _has(rate, runs)]
    found += [_curves(quantity, runs, colours) for quantity in QUANTITIES if _has(quantity, runs)]
    for title, buckets in BY_DIFFICULTY:
        if any(buckets(record) for run in runs for record in run.records):
            found.append(_by_difficulty(title, buckets, runs))
    if any(record.long_correct for run in runs for record in run.records):
        found.append(_long_correct(runs, colours))
    return found


def _has(quantity: Quantity, runs: Sequence[NamedRun]) -> bool:
    return any(quantity.number(record) is not None for run in runs for record in run.records)


def _against_b(run: Run, number: Callable[[StepRecord], float | None]) -> tuple[list[float], list[float]]:
    pairs = [(r.b, value) for r in run if r.b is not None and (value := number(r)) is not None]
    return [b for b, _ in pairs], [value for _, value in pairs]


def _curves(quantity: Quantity, runs: Sequence[NamedRun], colours: dict[str, str]) -> Figure:
    def paint(axes: Any) -> None:
        named: set[str] = set()
        for run in runs:
            legend = None if run.name in named else label(run.name)
            named.add(run.name)
            colour = colours[run.name]
            axes[0].plot(*values(run.records, quantity.number), color=colour, label=legend, marker=".", markersize=2)
            axes[1].plot(*_against_b(run.records, quantity.number), ".", color=colour, markersize=3)
        axes[0].set_xlabel("step")
        axes[1].set_xlabel("b")
        axes[0].set_ylabel(quantity.title)
        axes[0].legend(frameon=False)

    title = quantity.title[0].upper() + quantity.title[1:]
    return draw(title, "Against steps, and against the realised baseline b of the same step.", paint, panels=2)


def rates_of_change(run: Run, number: Callable[[StepRecord], float | None]) -> tuple[list[float], list[float]]:
    """Mean b and change in PER steps of a number, over windows of WINDOW of the run, each half over the next."""
    known = [r for r in run if r.b is not None and number(r) is not None]
    size = max(3, math.ceil(WINDOW * len(known)))
    found = []
    for first in range(0, len(known) - size + 1, max(1, size // 2)):
        window = known[first : first + size]
        b = sum(r.b for r in window if r.b is not None) / size
        found.append((b, PER * slope(*values(window, number))))
    return [b for b, _ in found], [change for _, change in found]


def _changes(rate: Quantity, runs: Sequence[NamedRun], colours: dict[str, str]) -> Figure:
    def paint(axes: Any) -> None:
        named: set[str] = set()
        for run in runs:
            legend = None if run.name in named else label(run.name)
            named.add(run.name)
            changes = rates_of_change(run.records, rate.number)
            axes[0].plot(*changes, "o", color=colours[run.name], label=legend, markersize=4)
        axes[0].axhline(0, color="#bdbdbd", linewidth=0.8)
        axes[0].set_xlabel("b")
        axes[0].set_ylabel(f"change in {PER} steps")
        axes[0].legend(frameon=False)

    caption = f"Slope of the line through a window of {WINDOW:.0%} of the steps, against the window's mean b."
    return draw(f"Change of the {rate.title}, against b", caption, paint)


def _by_difficulty(
    title: str, buckets: Callable[[StepRecord], Sequence[Bucket]], runs: Sequence[NamedRun]
) -> Figure:  # fmt: skip
    names = list(dict.fromkeys(bucket.name for run in runs for r in run.records for bucket in buckets(r)))
    arms = list(dict.fromkeys(run.name for run in runs))

    def rate(name: str) -> Callable[[StepRecord], float | None]:
        return lambda record: next((bucket.value for bucket in buckets(record) if bucket.name == name), None)

    def paint(axes: Any) -> None:
        named: set[tuple[str, str]] = set()
        for run in runs:
            style = LINES[arms.index(run.name) % len(LINES)]
            for number, name in enumerate(names):
                steps, rates = values(run.records, rate(name))
                if steps:
                    legend = None if (run.name, name) in named else f"{label(run.name)}: {label(name)}"
                    named.add((run.name, name))
                    axes[0].plot(steps, rates, style, color=COLOURS[number % len(COLOURS)], label=legend)
        axes[0].set_xlabel("step")
        axes[0].set_ylabel("share of rollouts")
        axes[0].legend(frameon=False, fontsize=7)

    caption = "Where a mask takes the most rollouts, those prompts lose weight in training."
    return draw(title, caption, paint)


CELLS = ((False, False), (True, False), (False, True), (True, True))
CELL_NAMES = ("neither", "penalised", "clipped", "both")


def long_correct_totals(run: Run) -> list[tuple[int, float]]:
    """Rollouts and mean advantage of each of CELLS over all steps; NaN without a rollout."""
    found = []
    for cell in CELLS:
        here = [one for r in run for one in r.long_correct if (one.penalised, one.clipped) == cell]
        known = [(one.n, one.mean) for one in here if one.mean is not None]
        weight = sum(n for n, _ in known)
        found.append((sum(one.n for one in here), sum(n * m for n, m in known) / weight if weight else math.nan))
    return found


def _long_correct(runs: Sequence[NamedRun], colours: dict[str, str]) -> Figure:
    def paint(axes: Any) -> None:
        width = 0.8 / len(runs)
        named: set[str] = set()
        for place, run in enumerate(runs):
            totals = long_correct_totals(run.records)
            x = [i + (place - (len(runs) - 1) / 2) * width for i in range(len(CELLS))]
            legend = None if run.name in named else label(run.name)
            named.add(run.name)
            axes[0].bar(x, [n for n, _ in totals], width, color=colours[run.name], label=legend)
            axes[1].bar(x, [mean for _, mean in totals], width, color=colours[run.name])
        for panel in axes:
            panel.set_xticks(range(len(CELLS)), CELL_NAMES)
        axes[0].set_ylabel("long solved rollouts")
        axes[1].set_ylabel("their mean advantage")
        axes[0].legend(frameon=False)

    caption = (
        "Long solved rollouts over all steps: whether the soft overlong penalty took from their reward, and whether "
        "the upper clip took of their gradient. Both at once would hold long correct answers back twice."
    )
    return draw("Long correct answers", caption, paint, panels=2)
