"""Training runs as a report: which run is which arm, tables, and the predictions that runs decide."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastadv.arms import CAPPED, arm_from_dict
from fastadv.record import StepRecord
from fastadv.record_file import RecordError, last_of_each_step, read_records
from fastadv.replay.errors import ReplayError, counted, plain, short
from fastadv.replay.page import filled
from fastadv.replay.predictions_runs import Run, end_of, p3_drift, p4_drift, p5_signature, p6_rescue, values
from fastadv.replay.record_plots import QUANTITIES, NamedRun, record_figures
from fastadv.replay.report import predictions_table
from fastadv.replay.tables import Table, percent, significant
from fastadv.replay.verdicts import Prediction, no_data

REFERENCE, MASK, MATCHED, SURVIVORS, DROP, NEVER, RESCUE = (
    "reference", "mask", "matched", "survivors", "drop", "never", "rescue",
)  # fmt: skip
ROLES = (REFERENCE, MASK, MATCHED, SURVIVORS, DROP, NEVER)


@dataclass(frozen=True)
class RecordedRun:
    """One run of one arm."""

    file: str
    arm: str
    run: str
    role: str  # in the predictions; "" if in none
    records: Run


@dataclass(frozen=True)
class RecordReport:
    """Everything that the page shows."""

    runs: list[RecordedRun]
    predictions: list[Prediction]
    remarks: list[str]


def report(paths: Sequence[Path], roles: Sequence[str] = ()) -> RecordReport:
    """Reads files of step records and looks at them together.

    Args:
        paths: files as `fastadv.RecordWriter` writes them; a file may hold several runs and arms.
        roles: "ROLE=FILE": what a file is in the predictions, where its arms' settings do not say it.

    Raises:
        ReplayError: a file or a role that cannot be used.
    """
    seen = Counter(path.resolve() for path in paths)
    twice = next((path for path in paths if seen[path.resolve()] > 1), None)
    if twice is not None:
        raise ReplayError(f"{twice} is named twice; its runs would count as seeds of their own")
    names = Counter(path.name for path in paths)
    given = dict(_role(text, paths) for text in roles)
    runs: list[RecordedRun] = []
    remarks: list[str] = []
    for path in paths:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                records = read_records(path)
            except RecordError as error:
                raise ReplayError(str(error)) from error
        remarks += [str(warning.message) for warning in caught]
        if not records:
            raise ReplayError(f"{path} has no record")
        for (arm, run), found in _split(records).items():
            steps = last_of_each_step(found)
            if len(steps) < len(found):
                again = counted(len(found) - len(steps), "record")
                remarks.append(f"{path.name}: {again} of steps that were repeated later, left out")
            name = path.name if names[path.name] == 1 else f"{path.absolute().parent.name}/{path.name}"
            runs.append(RecordedRun(name, arm, run, given.get(path) or role_of(steps), steps))
    return RecordReport(runs, predictions(runs), remarks)


def _split(records: Sequence[StepRecord]) -> dict[tuple[str, str], list[StepRecord]]:
    found: dict[tuple[str, str], list[StepRecord]] = {}
    for record in records:
        found.setdefault((record.arm, record.run), []).append(record)
    return found


def _role(text: str, paths: Sequence[Path]) -> tuple[Path, str]:
    role, equals, name = text.partition("=")
    if not equals or (role not in ROLES and rescue_probability(role) is None):
        raise ReplayError(f"--role {text!r} is no ROLE=FILE with one of {', '.join(ROLES)}, or {RESCUE}:A, 0 < A < 1")
    if Path(name) not in paths:
        raise ReplayError(f"--role {text!r}: {name} is none of the files")
    return Path(name), role


def rescue_probability(role: str) -> float | None:
    """The a of "rescue:a"; None if it is not that."""
    name, _, number = role.partition(":")
    try:
        a = float(number)
    except ValueError:
        return None
    return a if name == RESCUE and 0 < a < 1 else None


def role_of(records: Run) -> str:
    """What a run is in the predictions, by the settings of its arm; "" where these do not say it."""
    try:
        arm = arm_from_dict({"name": records[0].arm, **records[0].arm_settings})
    except (ValueError, TypeError):  # of a version with other fields
        return ""
    matched = any(r.learning_rate_multiplier is not None for r in records)
    if arm.baseline not in ("mean", "loo") or arm.groups != "all" or arm.row_weights or arm.token_weights:
        return ""
    if not arm.excludes_any:
        return REFERENCE
    other = arm.endings or arm.condition or arm.fraction != 1 or arm.population == "removed"
    if arm.excludes != CAPPED or other:
        return ""
    if arm.population == "survivors":
        return "" if matched else SURVIVORS
    return MATCHED if matched else MASK


def predictions(runs: Sequence[RecordedRun]) -> list[Prediction]:
    """P3 to P6, as far as there are runs for them."""

    def of(role: str) -> list[Run]:
        return [run.records for run in runs if run.role == role]

    rescued: dict[float, list[Run]] = {}
    for run in runs:
        a = rescue_probability(run.role)
        if a is not None:
            rescued.setdefault(a, []).append(run.records)

    def missing(name: str, **needed: object) -> Prediction | None:
        lacking = ", ".join(role for role, there in needed.items() if not there)
        return no_data(name, "from training runs", f"no run of: {lacking}") if lacking else None

    reference, mask, matched, survivors, drop, never = (of(role) for role in ROLES)
    return [
        missing("P3", reference=reference, mask=mask) or p3_drift(mask, reference, matched),
        missing("P4", survivors=survivors, mask=mask) or p4_drift(survivors, mask),
        missing("P5", drop=drop, never=never) or p5_signature(drop, never),
        missing("P6", never=never, rescue=rescued) or p6_rescue(never, rescued),
    ]


# ---- tables and the page ---------------------------------------------------------------------------------------------


def record_tables(found: RecordReport) -> list[Table]:
    """The runs, where they ended, and the predictions."""
    about, ends = [], []
    for run in found.runs:
        records, last = run.records, run.records[-1]
        seconds = sum(values(records, lambda r: r.wall_clock_s)[1])
        about.append(
            [
                plain(run.file), short(run.arm), short(run.run) or "–", run.role or "–",
                f"{records[0].step:,} to {last.step:,}", f"{sum(r.rollouts for r in records):,}",
                f"{sum(r.tokens for r in records):,}", significant(seconds / 3600) if seconds else "–",
                last.statistics_hash[:16] if last.statistics_hash else "–",
            ]
        )  # fmt: skip
        cells = [plain(run.file), short(run.arm)]
        for quantity in QUANTITIES:
            end = end_of(records, quantity.number)
            cells.append(percent(end) if quantity.title.endswith("rate") else significant(end))
        ends.append(cells)
    shown = [i for i in range(len(QUANTITIES)) if any(row[2 + i] != "–" for row in ends)]
    header = ["file", "arm", *(QUANTITIES[i].title for i in shown)]
    ends = [[*row[:2], *(row[2 + i] for i in shown)] for row in ends]
    turned = [[header[i], *(row[i] for row in ends)] for i in range(1, len(header))]
    names = [row[0] for row in ends]
    columns = ["file", "arm", "run", "role", "steps", "rollouts", "sampled tokens", "hours", "last statistics hash"]
    caption = "Of each run; the role is what it is in the predictions below."
    return [
        Table("Runs", caption, columns, about),
        Table("At the end", "Means over the last fifth of the steps that have the number.", ["", *names], turned),
        predictions_table(found.predictions, "(docs/step_record.md)"),
    ]


def record_page(found: RecordReport) -> str:
    """The page."""
    named = Counter(run.arm for run in found.runs)
    arms = counted(len(named), "arm")
    runs = [NamedRun(run.arm, run.records) for run in found.runs]
    decided = ", ".join(f"{p.name} {p.verdict}" for p in found.predictions)
    return filled(
        title="fastadv record",
        heading=f"{counted(len(found.runs), 'run')} of {arms}",
        headline=f"Predictions: {decided}.",
        warnings=[],
        remarks=[plain(remark) for remark in found.remarks],
        tables=record_tables(found),
        figures=record_figures(runs),
        footer="docs/step_record.md says what the numbers are.",
    )
