"""A replay's results as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections import Counter
from typing import Any

import torch

from fastadv.arms import arm_to_dict, compare_arms
from fastadv.intervals import Interval
from fastadv.outcomes import Outcome
from fastadv.replay.arm_table import ArmRow
from fastadv.replay.errors import counted, plain, short
from fastadv.replay.gradient_tables import flat_tables, projection_tables
from fastadv.replay.pipeline import Agreement, ReplayResult
from fastadv.replay.predictions import P7_SUPPORTED
from fastadv.replay.tables import Table, number, percent, significant, times
from fastadv.replay.verdicts import NO_DATA, SUPPORTED, Prediction

FORMAT, VERSION = "fastadv replay", 2  # docs/report_json.md describes it
PROMPTS_SHOWN = 20
APART = ("options", "gram")  # of the JSON: written otherwise, or a file of its own
# Of two independent halves with cosine c, a share c of each gradient's squared norm is signal, and 2c / (1 + c) of the
# whole batch's: below a third, most of it is noise.
NOISY = 1 / 3
SAME_POLICY = 0.01  # mean |logged - policy| log-prob, in nats: engines' numerics differ by less, other weights by more


def tables(result: ReplayResult) -> list[Table]:
    """Every table of the report, in reading order."""
    found = [_files(result), _census(result)]
    if result.prompts:
        found.append(_prompts(result))
    if result.arms:
        found += [arms_table(result.arms, _why_negative(result)), _denominators(result)]
    if result.projections is not None:
        found += projection_tables(result.projections)
    elif result.gradients:
        found += flat_tables(result.gradients, result.noise_floor)
    if result.predictions:
        found.append(predictions_table(result.predictions, "(docs/theory.md, 7 and 14; docs/step_record.md)"))
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
    if result.options.arms:
        caption += " Arms with survivors, a kappa or buckets of their own have theirs, of the same rollouts."
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
    caption = (
        "BUDGET failures have a known reward, so a mask over them hides signal. INFRA rollouts have none: some might "
        f"have succeeded. Which of the two dominates what is not solved decides what a mask does. {result.regime}"
    )
    return Table("Outcome census", caption, ["outcome", "meaning", "rollouts", "share", "of unsolved"], rows)


def _prompts(result: ReplayResult) -> Table:
    numbered = sorted(enumerate(result.prompts, 1), key=lambda p: (-min(p[1].counts[0], sum(p[1].counts[1:])), p[0]))
    rows = [
        [str(i), short(p.label), *(str(c) for c in p.counts), number(p.mean_reward)]
        for i, p in numbered[:PROMPTS_SHOWN]
    ]
    spread = sum(0 < p.counts[0] < sum(p.counts) for p in result.prompts)
    caption = f"{counted(len(result.prompts), 'prompt')}, {spread:,} with both solved and unsolved rollouts. "
    caption += "The most mixed first." if len(rows) == len(numbered) else f"The {len(rows)} most mixed:"
    return Table("Prompts", caption, ["#", "prompt", "solved", "failed", "budget", "infra", "mean reward"], rows)


def arms_table(arms: list[ArmRow], remark: str) -> Table:
    """What each arm makes of advantages; `remark` ends the caption."""
    rows = [
        [
            short(arm.name),
            plain(arm.description),
            number(arm.second_moment, 4),
            number(arm.variance, 4),
            number(arm.explained_variance),
            number(arm.baseline),
            number(arm.subsidy),
        ]
        for arm in arms
    ]
    caption = (
        "Per sampled token, prompts weighted by their tokens; R is the reward, b the baseline. E[A²]: mean square of "
        "the advantage as it enters the loss. variance: of that advantage within prompts. explained: "
        "1 - E[(R - b)²] / Var(R) within prompts, over kept tokens. b: mean over rollouts. subsidy: what running into "
        "the cap is paid, the mean over capped rollouts of b where the arm excludes them and 0 where it does not. "
    )
    caption = (caption + remark).rstrip()
    columns = ["arm", "what it does", "E[A²]", "variance", "explained", "b", "subsidy"]
    return Table("Arms", caption, columns, rows)


def _why_negative(result: ReplayResult) -> str:
    """What "explained" means below 0, at the group size that most prompts have."""
    sizes = Counter(size for size in (sum(p.counts[:3]) for p in result.prompts) if size > 1)
    if not sizes:
        return ""
    size = sizes.most_common(1)[0][0]
    arms = "Leave-one-out baselines"
    if not result.options.arms:
        arms += " (every arm)" if result.options.baseline == "loo" else " (arm e)"
    return (
        f"{arms} may explain less than 0: R - b is then G / (G - 1) times the distance from the group's mean, "
        "so where neither turns nor lengths tell anything about R it is about 1 - (G / (G - 1))², "
        f"{1 - (size / (size - 1)) ** 2:.2f} for groups of {size}. Compare arms with each other, not with 0."
    )


def _denominators(result: ReplayResult) -> Table:
    rows = [
        [
            arm.name,
            percent(arm.kept_rollouts),
            percent(arm.kept_tokens),
            times(arm.token_factor),
            times(arm.sequence_factor),
        ]
        for arm in result.arms
    ]
    caption = (
        "The arms above divide by the same frozen counts. A trainer that counts again, over what an arm keeps, "
        "multiplies the weight of every kept token: by the factor under token-mean if it divides by tokens, under "
        "sequence-mean if by rollouts, and by 1 if by a constant."
    )
    columns = ["arm", "rollouts kept", "tokens kept", "token-mean", "sequence-mean"]
    return Table("Effective weight", caption, columns, rows)


def predictions_table(predictions: list[Prediction], where: str) -> Table:
    """Every prediction with what it is held against; `where` says where that is written."""
    rows = []
    for p in predictions:
        statistics = [f"{name}: {significant(value)}" for name, value in p.statistic.items()] or ["–"]
        found = [p.intervals.get(name) for name in p.statistic]
        intervals = ["–" if one is None else f"{one[0]:.3f} to {one[1]:.3f}" for one in found] or ["–"]
        rows.append([p.name, "\n".join(statistics), "\n".join(intervals), p.threshold.replace("; ", "\n"), p.verdict])
    caption = f"Claims and thresholds are fixed in fastadv {where} and not fitted to these rollouts. "
    caption += "Intervals are 95 %, by a bootstrap over prompts or by Student's t over runs. "
    caption += " ".join(f"{p.name}: {p.claim} ({p.detail})." for p in predictions)
    return Table("Predictions", caption, ["", "statistic", "interval", "threshold", "verdict"], rows)


def headline(result: ReplayResult) -> str:
    """What came out, in a sentence for each prediction."""
    said = [f"{p.name} {p.verdict}: {_meaning(p)}." for p in result.predictions]
    return " ".join(said) if said else "Census only: no arm was computed."


def _meaning(p: Prediction) -> str:
    if p.verdict == NO_DATA:
        return p.detail
    if p.name == "P1":
        if p.verdict == SUPPORTED:
            return "the pipeline passes its self-check, in which masked gradients are what the algebra says they are"
        return "the pipeline fails its self-check: do not rely on the gradients below"
    if p.name != "P7":
        return ", ".join(f"{name} {significant(value)}" for name, value in p.statistic.items()) + f"; {p.detail}"
    drop = p.statistic["variance drop"]
    done = f"cuts the mean square advantage per token by {drop:.1%}"
    if drop < 0:
        done = f"adds {-drop:.1%} to the mean square advantage per token"
    within = "" if p.interval is None else f" (95 % interval {p.interval[0]:.1%} to {p.interval[1]:.1%})"
    return f"the turn-reached baseline {done}{within}; {P7_SUPPORTED:.0%} or more was predicted"


def _reference(result: ReplayResult) -> str:
    """The arm that the others are held against."""
    return short(result.arms[0].name)


def warnings(result: ReplayResult) -> list[str]:
    """What a reader should know before the numbers."""
    found = []
    floor, agreement = result.noise_floor, result.agreement
    if floor is not None and floor < NOISY:
        found.append(
            f"noise: arm ({_reference(result)})'s gradients from two independent halves of these rollouts have cosine "
            f"{floor:.3f}, and 1 would be no noise; so the cosines and slopes below are mostly noise: they describe "
            "these rollouts, not the policy. More prompts would help"
        )
    signal = None if result.projections is None else result.projections.signal
    if signal is not None and signal.low <= 0:
        found.append(
            f"noise: the pairs of prompts do not tell arm ({_reference(result)})'s gradient from none at all: of its "
            f"square {number(signal.value, 2)} is more than noise, with a 95 % interval of {number(signal.low, 2)} to "
            f"{number(signal.high, 2)}"
        )
    if agreement is not None and not agreement.mean_difference < SAME_POLICY:
        found.append(_agreement(agreement))
    return found


def _agreement(a: Agreement) -> str:
    same = "is" if a.mean_difference < SAME_POLICY else "is NOT"
    return (
        f"logged log-probs differ from the policy's by {a.mean_difference:.2g} on average and "
        f"{a.largest_difference:.2g} at most, over {counted(a.tokens, 'token')}: the policy {same} the one that sampled"
    )


def remarks(result: ReplayResult) -> list[str]:
    """Notes and refusals, and how the policy agrees with the log."""
    several = len(result.files) > 1
    found = []
    for f in result.files:
        where = f"{plain(f.name)}: " if several else ""
        found += [where + plain(note) for note in f.notes]
        if f.refused:
            found.append(f"{where}arms and gradients refused: {plain(f.refused)}")
    found += [plain(note) for note in result.policy_notes]
    for arm in result.options.arms:
        found += [f"arm {short(arm.name)}: {flag}" for flag in arm.flags]
        found += filter(None, [plain(compare_arms(result.options.arms[0], arm).report)])
    if result.agreement is not None and result.agreement.mean_difference < SAME_POLICY:
        found.append(_agreement(result.agreement))
    if result.gradients_by == "gram" and result.covered is not None and result.parameters is not None:
        share = percent(result.covered / max(1, result.parameters))
        found.append(
            f"gradients of {result.covered:,} of {result.parameters:,} parameters ({share}), by "
            f"{plain(result.plan.split(chr(10))[0])}"
        )
    if result.gradients_by == "cells":
        found.append(
            f"gradients: flat ones, without intervals and without a file for other arms: {plain(result.gradients_note)}"
        )
    if result.parameters is None:
        found.append("no policy was given: gradients were not computed (--policy)")
    return found


# ---- JSON ------------------------------------------------------------------------------------------------------------


def jsonable(value: Any) -> Any:
    """The value of plain objects; a number that does not exist is None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Interval):
        return jsonable(value._asdict())
    if isinstance(value, dict):
        return {key.name if isinstance(key, Outcome) else key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def as_json(result: ReplayResult) -> str:
    """The whole result; numbers that do not exist are null."""
    from fastadv import __version__

    options = jsonable(result.options)
    options["read"].pop("progress")
    options["arms"] = [arm_to_dict(arm) for arm in result.options.arms]
    document = {
        "format": FORMAT,
        "version": VERSION,
        "fastadv": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "options": options,
        "census": {outcome.name: count for outcome, count in result.census.counts.items()},
        "regime": jsonable(result.regime),
        **{f.name: jsonable(getattr(result, f.name)) for f in dataclasses.fields(result) if f.name not in APART},
    }
    for file in document["files"]:
        file["census"] = file["census"]["counts"]
    for prompt in document["prompts"]:
        prompt["counts"] = {outcome.name: prompt["counts"][outcome] for outcome in Outcome}
    document["reward_by_turn"] = [
        {"turn": turn, "rollouts": int(rollouts), "mean_reward": rewards / rollouts if rollouts else None}
        for turn, (rollouts, rewards) in enumerate(document["reward_by_turn"], start=1)
    ]
    return json.dumps(document, indent=1, allow_nan=False)
