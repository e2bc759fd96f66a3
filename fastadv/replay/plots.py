"""Plots of a replay as SVG, which the page holds inline."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fastadv.gradproj.projections import Projections
from fastadv.gradproj.scopes import TURN_NAMES
from fastadv.gradproj.statistics import PLUG_IN, U_STATISTIC
from fastadv.monitoring.difficulty import DIFFICULTIES
from fastadv.outcomes import Outcome
from fastadv.replay.errors import plain
from fastadv.replay.pipeline import ReplayResult

COLOURS = {
    Outcome.SOLVED: "#2e7d32",
    Outcome.FAILED: "#c62828",
    Outcome.BUDGET: "#ef6c00",
    Outcome.INFRA: "#757575",
}


LONGEST_LABEL = 24  # characters
MOST_CURVES = 8


class Figure(NamedTuple):
    """A plot and what it shows."""

    title: str
    caption: str
    svg: str


def figures(result: ReplayResult) -> list[Figure]:
    """Every plot that the result has data for."""
    found = []
    if result.reward_by_turn.shape[0]:
        found += [_turns(result), _reward_by_turn(result)]
    if result.arms:
        found.append(_second_moments(result))
    if result.projections is not None:
        found.append(_alignments(result.projections))
    if result.gradients and result.options.buckets:
        found += [_by_bucket(result, TURN_NAMES, "turn"), _by_bucket(result, DIFFICULTIES, "difficulty")]
    return found


def label(text: str) -> str:
    """Untrusted text as a plot may hold it: nothing that SVG, matplotlib's mathematics or its fonts take for their
    own."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in " _-.,:=+/()%") else "?" for c in text)
    return re.sub("-+", "-", kept).lstrip("_ ")[:40] or "?"


def draw(title: str, caption: str, paint: Callable[[Any], None], *, panels: int = 1, height: float = 3.0) -> Figure:
    """A figure whose panels are painted by a function of their axes."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(
        {"svg.hashsalt": "fastadv", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        canvas = Canvas(figsize=(4.6 * panels, height), layout="constrained")
        axes = canvas.subplots(1, panels, squeeze=False)[0]
        paint(axes)
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return Figure(title, caption, text[text.index("<svg") :])


def _label(name: str) -> str:
    """An arm's name as it is written, cut where it is long: matplotlib would read mathematics between dollar signs."""
    shown = plain(name if len(name) <= LONGEST_LABEL else f"{name[:LONGEST_LABEL]}…")
    return shown.replace("$", r"\$")


def _turned(names: Iterable[str]) -> dict[str, Any]:
    """How names stand at an axis: upright where they are words."""
    return {"rotation": 90} if any(len(name) > 4 for name in names) else {}


def _turns(result: ReplayResult) -> Figure:
    def paint(axes: Any) -> None:
        for outcome in (Outcome.SOLVED, Outcome.FAILED, Outcome.BUDGET):
            counts = result.turns_by_outcome[outcome].tolist()
            total = max(1, sum(counts))
            axes[0].step(
                range(len(counts)), [c / total for c in counts], where="mid", color=COLOURS[outcome], label=outcome.name
            )
        axes[0].set_xlabel("turns")
        axes[0].set_ylabel("share of its rollouts")
        axes[0].legend(frameon=False)

    return draw("Turns by outcome", "Succeed fast, fail slow would show as curves that move apart.", paint)


def _reward_by_turn(result: ReplayResult) -> Figure:
    counts, sums = result.reward_by_turn.unbind(1)
    means = (sums / counts.clamp(min=1)).tolist()

    def paint(axes: Any) -> None:
        turns = range(1, len(means) + 1)
        axes[0].plot(turns, means, color="#1565c0", marker=".")
        axes[0].set_xlabel("turn reached")
        axes[0].set_ylabel("mean reward")
        axes[0].set_ylim(bottom=0)
        share = axes[0].twinx()
        share.fill_between(turns, (counts / counts.max()).tolist(), color="#1565c0", alpha=0.12)
        share.set_ylabel("share of rollouts that reach it")
        share.set_ylim(0, 1)

    caption = "What the turn-reached baseline knows: the mean reward of the rollouts that got as far."
    return draw("Reward by turn reached", caption, paint)


def _second_moments(result: ReplayResult) -> Figure:
    def paint(axes: Any) -> None:
        names = [_label(arm.name) for arm in result.arms]
        places = range(len(names))
        axes[0].bar(places, [arm.second_moment for arm in result.arms], color="#5c6bc0")
        axes[0].set_ylabel("E[A²] per token")
        axes[1].bar(places, [arm.subsidy for arm in result.arms], color=COLOURS[Outcome.BUDGET])
        axes[1].set_ylabel("implied reward for the cap")
        for panel in axes:
            panel.set_xticks(places, names, **_turned(names))

    caption = "Left: the mean square advantage per token. Right: what running into the cap is paid."
    return draw("Advantages by arm", caption, paint, panels=2, height=5.0 if result.options.arms else 3.0)


def _alignments(projections: Projections) -> Figure:
    reference = projections.rows[0].arm
    rows = [row for row in projections.rows if row.scope == "all" and row.arm != reference]

    def paint(axes: Any) -> None:
        for estimator, colour, shift in ((PLUG_IN, "#9e9e9e", -0.12), (U_STATISTIC, "#1565c0", 0.12)):
            shown = [row for row in rows if row.estimator == estimator]
            for place, row in enumerate(shown):
                e = row.comparison.alignment
                axes[0].plot([place + shift] * 2, [e.low, e.high], color=colour)
                axes[0].plot(place + shift, e.value, "o", color=colour, label=None if place else estimator)
            axes[0].set_xticks(range(len(shown)), [_label(row.arm) for row in shown], **_turned(r.arm for r in rows))
        axes[0].axhline(0, color="#bdbdbd", linewidth=0.8)
        axes[0].set_ylabel("along grad P(cap)")
        axes[0].legend(frameon=False)

    caption = (
        "How far each arm's difference from the reference lies along grad P(cap), with 95 % intervals: in these "
        "rollouts (plug-in), where noise on both sides makes a cosine out of nothing, and from pairs of other prompts."
    )
    tall = bool(_turned(row.arm for row in rows))
    return draw("What arms add, along the cap", caption, paint, height=5.0 if tall else 3.0)


def _by_bucket(result: ReplayResult, scopes: tuple[str, ...], what: str) -> Figure:
    present = [s for s in scopes if any(row.scope == s for row in result.gradients)]
    reference, *others = [arm.name for arm in result.arms]
    shown = others[:MOST_CURVES] if result.options.arms else ["b", "c", "e"]

    def paint(axes: Any) -> None:
        for name in shown:
            rows = [next(r for r in result.gradients if r.scope == s and r.arm == name) for s in present]
            axes[0].plot(present, [r.cosine for r in rows], marker="o", label=f"({_label(name)})")
            axes[1].plot(present, [r.norm_ratio for r in rows], marker="o")
        axes[0].set_ylabel(f"cosine to ({_label(reference)})")
        axes[1].set_ylabel(f"norm relative to ({_label(reference)})")
        axes[0].legend(frameon=False)
        for panel in axes:
            panel.tick_params(axis="x", rotation=30)

    caption = f"Each arm's gradient against the reference, by {what}"
    caption += (
        f": the first {len(shown)} arms."
        if result.options.arms
        else ": (b) mask, (c) mask with survivors, (e) turn-reached."
    )
    return draw(f"Gradients by {what}", caption, paint, panels=2, height=4.0 if result.options.arms else 3.0)
