"""A replay's results as tables and as JSON. The terminal and the page show the same tables."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from dataclasses import dataclass
from typing import Any

import torch

from fastadv.outcomes import Outcome
from fastadv.replay.errors import plain
from fastadv.replay.gradients import DIFFICULTY_NAMES, TURN_NAMES
from fastadv.replay.pipeline import ReplayResult

FORMAT, VERSION = "fastadv replay", 1
PROMPTS_SHOWN = 20
SAME_POLICY = 0.01  # mean |logged - policy| log-prob, in nats: engines' numerics differ by less, other weights by more


@dataclass(frozen=True)
class Table:
    """A titled table; `caption` says how to read it."""

    title: str
    caption: str
    columns: list[str]
    rows: list[list[str]]


def number(value: float, digits: int = 3) -> str:
    """A number for people; a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def percent(value: float) -> str:
    """A share for people."""
    return "–" if math.isnan(value) else f"{value:.1%}"


def tables(result: ReplayResult) -> list[Table]:
    """Every table of the report, in reading order."""
    found = [_files(result), _census(result)]
    if result.prompts:
        found.append(_prompts(result))
    if result.arms:
        found += [_arms(result), _denominators(result)]
    if result.gradients:
        found.append(_gradients(result, ["all"], "Gradients at the checkpoint"))
        if result.options.buckets:
            found.append(_gradients(result, list(TURN_NAMES), "Gradients by turn"))
            found.append(_gradients(result, list(DIFFICULTY_NAMES), "Gradients by difficulty"))
    if result.predictions:
        found.append(_predictions(result))
    return found


def _files(result: ReplayResult) -> Table:
    rows = [
        [
            plain(f.name),
            f.source,
            f"{f.rollouts:,}",
            "–" if f.tokens is None else f"{f.tokens:,}",
            f.statistics_hash[:16] if f.statistics_hash else "–",
        ]
        for f in result.files
    ]
    caption = (
        "Statistics are frozen once per dump, from its unmasked rollouts, and shared by every arm; the hash names them."
    )
    return Table("Dumps", caption, ["dump", "format", "rollouts", "response tokens", "statistics hash"], rows)


def _census(result: ReplayResult) -> Table:
    census = result.census
    meaning = {
        Outcome.SOLVED: "submitted, or cut off and passed",
        Outcome.FAILED: "submitted and wrong",
        Outcome.BUDGET: "turn, length or context cap",
        Outcome.INFRA: "cancelled, timed out or dropped: no result",
    }
    rows = [
        [
            outcome.name,
            meaning[outcome],
            f"{census.counts[outcome]:,}",
            percent(census.rate(outcome)),
            "–" if outcome == Outcome.SOLVED else percent(census.share_of_unsolved(outcome)),
        ]
        for outcome in Outcome
    ]
    caption = "If budget failures dominate what is not solved, their reward is known and a mask hides signal; if "
    caption += "infrastructure failures do, successes may be missing."
    return Table("Outcome census", caption, ["outcome", "meaning", "rollouts", "share", "of unsolved"], rows)


def _prompts(result: ReplayResult) -> Table:
    numbered = sorted(enumerate(result.prompts, 1), key=lambda p: (-min(p[1].counts[0], sum(p[1].counts[1:])), p[0]))
    rows = [
        [str(i), plain(p.label), *(str(c) for c in p.counts), number(p.mean_reward)]
        for i, p in numbered[:PROMPTS_SHOWN]
    ]
    spread = sum(0 < p.counts[0] < sum(p.counts) for p in result.prompts)
    caption = (
        f"{len(result.prompts):,} prompts, {spread:,} of them with solved and unsolved rollouts. The {len(rows)} most "
    )
    caption += "mixed ones:"
    return Table("Prompts", caption, ["#", "prompt", "solved", "failed", "budget", "infra", "mean reward"], rows)


def _arms(result: ReplayResult) -> Table:
    rows = [
        [
            arm.name,
            arm.description,
            number(arm.second_moment, 4),
            number(arm.variance, 4),
            number(arm.explained_variance),
            number(arm.baseline),
            number(arm.subsidy),
        ]
        for arm in result.arms
    ]
    caption = (
        "Per sampled token, prompts weighted by their tokens. E[A²]: mean square of the advantage as it enters the "
        "loss; variance: of it within prompts; explained: 1 - E[(R - b)²] / Var(R) within prompts, over kept tokens; "
        "b: mean baseline over rollouts; subsidy: what running into the cap is paid, mean over capped rollouts."
    )
    columns = ["arm", "what it does", "E[A²]", "variance", "explained", "b", "subsidy"]
    return Table("Arms", caption, columns, rows)


def _denominators(result: ReplayResult) -> Table:
    rows = [
        [
            arm.name,
            percent(arm.kept_rollouts),
            percent(arm.kept_tokens),
            number(arm.token_factor, 2) + "x",
            number(arm.sequence_factor, 2) + "x",
        ]
        for arm in result.arms
    ]
    caption = (
        "Denominators are frozen here. Recounted over what an arm keeps, they would multiply each kept token's weight: "
        "a token-mean and a mean over sequences by the factors below, a constant divisor by 1."
    )
    columns = ["arm", "rollouts kept", "tokens kept", "token-mean", "sequence-mean"]
    return Table("Effective weight", caption, columns, rows)


def _gradients(result: ReplayResult, scopes: list[str], title: str) -> Table:
    rows = [
        [
            row.scope,
            row.arm,
            number(row.cosine, 4),
            number(row.norm_ratio),
            number(row.difference),
            number(row.cap_projection),
            number(row.cap_cosine),
            number(row.cap_slope),
        ]
        for scope in scopes
        for row in result.gradients
        if row.scope == scope
    ]
    caption = (
        "Against arm (a): cosine, ratio of norms, norm of the difference. The difference is projected on grad P(cap) "
        "as the other half of each group estimates it (relative to |g_a|), with its cosine, and as a slope: the "
        "subsidy b that it amounts to (none if the two halves share no direction)."
    )
    if scopes == ["all"] and result.noise_floor is not None:
        caption += f" Noise floor: (a) from one half of each group alone has cosine {result.noise_floor:.3f} with (a) "
        caption += "from the other."
    if scopes == list(DIFFICULTY_NAMES):
        caption += " Difficulty is the success rate of the other half of the group."
    columns = ["scope", "arm", "cosine", "norm ratio", "|difference|", "on grad P(cap)", "its cosine", "slope"]
    return Table(title, caption, columns, rows)


def _predictions(result: ReplayResult) -> Table:
    rows = []
    for p in result.predictions:
        statistics = [f"{name}: {value:.3g}" for name, value in p.statistic.items()] or ["–"]
        interval = "–" if p.interval is None else f"{p.interval[0]:.3f} to {p.interval[1]:.3f}"
        rows.append([p.name, "\n".join(statistics), interval, p.threshold, p.verdict])
    caption = "Written before the data were seen; intervals are 95 %, by a bootstrap over prompts. "
    caption += " ".join(f"{p.name}: {p.claim} ({p.detail})." for p in result.predictions)
    return Table("Predictions", caption, ["", "statistic", "interval", "threshold", "verdict"], rows)


def remarks(result: ReplayResult) -> list[str]:
    """Notes and refusals, and how the policy agrees with the log."""
    several = len(result.files) > 1
    found = []
    for f in result.files:
        where = f"{plain(f.name)}: " if several else ""
        found += [where + plain(note) for note in f.notes]
        if f.refused:
            found.append(f"{where}arms and gradients refused: {plain(f.refused)}")
    a = result.agreement
    if a is not None:
        same = "is" if a.mean_difference < SAME_POLICY else "is NOT"
        found.append(
            f"logged log-probs differ from the policy's by {a.mean_difference:.2g} on average and "
            f"{a.largest_difference:.2g} at most, over {a.tokens:,} tokens: the policy {same} the one that sampled"
        )
    if result.parameters is None:
        found.append("no policy was given: gradients were not computed (--policy)")
    return found


# ---- JSON ------------------------------------------------------------------------------------------------------------


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key.name if isinstance(key, Outcome) else key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def as_json(result: ReplayResult) -> str:
    """The whole result; numbers that do not exist are null."""
    from fastadv import __version__

    options = _jsonable(result.options)
    options["read"].pop("progress")
    document = {
        "format": FORMAT,
        "version": VERSION,
        "fastadv": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "options": options,
        "census": {outcome.name: count for outcome, count in result.census.counts.items()},
        **{f.name: _jsonable(getattr(result, f.name)) for f in dataclasses.fields(result) if f.name != "options"},
    }
    for file in document["files"]:
        file["census"] = file["census"]["counts"]
    return json.dumps(document, indent=1, allow_nan=False)
