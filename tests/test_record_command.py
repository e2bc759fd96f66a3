"""`fastadv record` as a user meets it: tables, the page, mistakes."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import DOCS, fails, fastadv
from step_records import ARMS, record, run

import fastadv as fa
from fastadv.arms.text import arm_settings
from fastadv.record import Bucket, ByOutcome, LongCorrect, RecordedStaleness, StepRecord
from fastadv.record_file import to_line
from fastadv.replay.errors import ReplayError
from fastadv.replay.plots import label
from fastadv.replay.record_plots import NamedRun, long_correct_totals, rates_of_change, record_figures
from fastadv.replay.record_report import record_page, record_tables, report, role_of

HOSTILE = "<script>alert(1)</script>--><b>$x$ [red]é"


def written(path: Path, records: Sequence[StepRecord]) -> Path:
    with fa.RecordWriter(path) as writer:
        for one in records:
            writer.write(one)
    return path


def training(arm: str, seed: int, cap: float, failed: float, **given: Any) -> list[StepRecord]:
    """A run in which b rises past 0.3 and the cap rate changes by `cap` in 100 steps."""
    rng = random.Random(f"{arm} {seed} {cap}")
    return run(
        40, arm,
        b=lambda s: 0.2 + 0.01 * s,
        cap_hit_rate=lambda s: 0.4 + cap * s / 100 + rng.gauss(0, 1e-3),
        submitted_failure_rate=lambda s: 0.4 + failed * s / 100 + rng.gauss(0, 1e-3),
        run=lambda s: f"seed {seed}",
        **given,
    )  # fmt: skip


@pytest.fixture(scope="module")
def report_of_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Terminal and page of three seeds of each arm, with everything that a record may hold."""
    folder = tmp_path_factory.mktemp("runs")
    everything: dict[str, Any] = {
        "clip_ratio": lambda s: 0.1, "update_norm": lambda s: 1.0, "wall_clock_s": lambda s: 3600.0,
        "staleness": lambda s: RecordedStaleness(1.0, 2.0), "ran_tests": lambda s: ByOutcome(solved=0.5),
        "mask_share_by_difficulty": lambda s: (Bucket("hard", 0.4, 8), Bucket("easy", 0.1, 8)),
        "truncation_rate_by_difficulty": lambda s: (Bucket("hard", 0.5, 8),),
        "long_correct": lambda s: (LongCorrect(True, False, 2, -0.5), LongCorrect(True, True, 1, 0.5)),
    }  # fmt: skip
    arms = {
        "a": (-0.2, -0.05, everything),
        "b": (0.1, -0.2, {}),
        "c": (0.4, -0.2, {}),
        "matched": (-0.2, -0.05, {"learning_rate_multiplier": lambda s: 0.8}),
    }
    files = []
    for name, (cap, failed, given) in arms.items():
        arm = "b" if name == "matched" else name
        runs = [training(arm, seed, cap, failed, **given) for seed in range(3)]
        files.append(written(folder / f"{name}.jsonl", [one for records in runs for one in records]))
    done = fastadv("record", *files, "--out", folder / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("record.html\n")
    return done.stdout, (folder / "out" / "record.html").read_text()


@pytest.mark.row(24, 47)
def test_runs_are_shown_and_decide(report_of_runs: tuple[str, str]) -> None:
    for text in report_of_runs:
        for title in ("Runs", "At the end", "Predictions"):
            assert title in text
        for role in ("reference", "mask", "matched", "survivors"):
            assert role in text
        assert "no run of: drop, never" in " ".join(text.split())
    _, page = report_of_runs
    assert "12 runs of 3 arms" in page
    assert re.search(r"cap slope, mask: 0\.(1|099)", page)
    assert "P3 supported, P4 supported, P5 no data, P6 no data" in page


@pytest.mark.row(24, 45)
def test_every_quantity_is_drawn_against_steps_and_b(report_of_runs: tuple[str, str]) -> None:
    _, page = report_of_runs
    for title in (
        "Change of the cap-hit rate, against b", "Cap-hit rate", "Submitted-failure rate", "Success rate", "Clip ratio",
        "Update norm", "Advantage variance per token", "B over sigma", "Staleness, versions", "Seconds of the step",
        "Learning-rate multiplier", "Turns of solved rollouts", "Solved rollouts that ran tests",
        "Mask share by difficulty", "Truncation rate by difficulty", "Long correct answers",
    ):  # fmt: skip
        assert f"<strong>{title}.</strong>" in page, title
    assert "Dropped groups" not in page  # nobody told
    assert page.count("<svg") == len(re.findall("<figure>", page)) > 20
    assert not re.search(r"<script|<link|<img|<iframe|\son\w+=", page)
    assert "url(http" not in page
    assert "docs/step_record.md" in page


def test_text_of_a_record_stays_text(tmp_path: Path) -> None:
    hostile = [
        replace(one, arm=HOSTILE, run=HOSTILE, mask_share_by_difficulty=(Bucket(HOSTILE, 0.5, 2),))
        for one in run(4)
    ]  # fmt: skip
    path = written(tmp_path / "<i>.jsonl", hostile)
    done = fastadv("record", path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "record.html").read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert "<i>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "[red]" in done.stdout
    assert label(HOSTILE) == "?script?alert(1)?/script?-??b??x? ?red??"
    assert label("__") == "?"


def test_long_names_do_not_fill_the_screen(tmp_path: Path) -> None:
    long = [replace(one, arm="a" * 10**5, run="r" * 10**5) for one in run(2)]
    found = report([written(tmp_path / "long.jsonl", long)])
    assert found.runs[0].arm == "a" * 10**5
    for text in (str(record_tables(found)), record_page(found)):
        assert "a" * 79 + "…" in text
        assert "a" * 80 not in text
        assert "r" * 80 not in text
    line = to_line(record()).replace('"step"', f'"{"k" * 10**5}": 1, "{"k" * 10**5}": 1, "step"', 1)
    (tmp_path / "twice.jsonl").write_text(line + "\n")
    with pytest.raises(ReplayError, match=r"line 1: field 'kk+…k+' is there twice") as raised:
        report([tmp_path / "twice.jsonl"])
    assert len(str(raised.value)) < 1000


def test_the_rate_of_change_against_b() -> None:
    records = run(100, b=lambda s: s / 100, cap_hit_rate=lambda s: (s / 100) ** 2)
    bs, changes = rates_of_change(records, lambda r: r.cap_hit_rate)
    assert len(bs) == 9
    assert changes == pytest.approx([2 * b for b in bs])  # d(b^2) / db, and b is 1 in 100 steps
    assert rates_of_change(run(2), lambda r: r.cap_hit_rate) == ([], [])


@pytest.mark.row(45)
def test_long_correct_answers_add_up_over_steps() -> None:
    cells = [(LongCorrect(True, True, 1, 1.0),), (LongCorrect(True, True, 3, 0.0), LongCorrect(False, True, 2, None))]
    totals = long_correct_totals([replace(record(i), long_correct=cell) for i, cell in enumerate(cells)])
    assert [n for n, _ in totals] == [0, 0, 2, 4]  # neither, penalised, clipped, both
    assert totals[3][1] == 0.25
    assert str(totals[2][1]) == str(totals[0][1]) == "nan"
    assert (
        record_figures([NamedRun("a", [replace(record(), long_correct=cells[1])])])[-1].title == "Long correct answers"
    )


def test_roles_come_from_the_arms_settings() -> None:
    roles = {name: role_of(run(2, name)) for name in ARMS}
    assert roles == {"a": "reference", "b": "mask", "c": "survivors", "d0.3": "", "d0.6": "", "d1": "mask", "e": ""}
    assert role_of(run(2, "b", learning_rate_multiplier=lambda s: 1.0)) == "matched"
    timeouts = fa.Arm("t", excludes=(fa.Outcome.INFRA,))
    assert role_of([replace(record(), arm_settings=arm_settings(timeouts))]) == ""
    named = {name: role_of([replace(record(), arm_settings=arm_settings(make()))]) for name, make in fa.ARMS.items()}
    assert {name: role for name, role in named.items() if role} == {
        "none": "reference", "never-drop": "reference", "oracle": "reference", "mask": "mask", "matched-update": "mask",
        "survivors": "survivors",
    }  # fmt: skip
    assert role_of([replace(record(), arm_settings={"of": "another version"})]) == ""


def test_what_was_repeated_or_torn_is_said(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [*run(3), *run(2, b=lambda s: 0.9)])
    with path.open("a") as file:
        file.write('{"schema": 1, "st')
    found = report([path])
    (only,) = found.runs
    assert [one.b for one in only.records] == [0.9, 0.9, 0.5]
    assert "was torn and is left out" in found.remarks[0]
    assert found.remarks[1] == "a.jsonl: 2 records of steps that were repeated later, left out"


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name / "record.jsonl" for name in "ab"]
    for path in paths:
        path.parent.mkdir()
        written(path, run(2))
    assert [one.file for one in report(paths).runs] == ["a/record.jsonl", "b/record.jsonl"]


def test_mistakes(tmp_path: Path) -> None:
    good, out = written(tmp_path / "good.jsonl", run(2)), tmp_path / "out"
    broken, empty = tmp_path / "broken.jsonl", tmp_path / "empty.jsonl"
    broken.write_text('{"schema": 1}\n')
    empty.touch()
    fails("record", broken, "--out", out, message=r"broken\.jsonl, line 1: field 'step' is missing")
    fails("record", empty, "--out", out, message="has no record")
    fails("record", tmp_path / "none.jsonl", "--out", out, message="No such file")
    fails(
        "record", good, tmp_path / "." / "good.jsonl", "--out", out, message="is named twice; its runs would count as"
    )
    fails("record", good, "--out", out, "--role", "best=x", message="is no ROLE=FILE with one of reference, mask")
    fails("record", good, "--out", out, "--role", "rescue:2=x", message="is no ROLE=FILE")
    fails("record", good, "--out", out, "--role", "drop=x", message="x is none of the files")
    assert not out.exists()
    out.mkdir()
    (out / "record.html").touch()
    fails("record", good, "--out", out, message=r"holds record\.html already; --overwrite replaces them")
    done = fastadv("record", good, "--out", out, "--overwrite", "--role", f"rescue:0.5={good}")
    assert done.returncode == 0
    assert "rescue:0.5" in (out / "record.html").read_text()


def test_the_predictions_of_the_page_are_those_of_the_code() -> None:
    """Each threshold in docs/step_record.md is the rule's."""
    from fastadv.replay import predictions_rollouts as rollouts
    from fastadv.replay import predictions_runs as runs

    text = (DOCS / "step_record.md").read_text().replace("−", "-").replace("**", "")
    found = re.findall(r"^\| ?(?:P\d)? ?\| (.+?) \| (-?[\d.]+) \| (-?[\d.]+) \| (-?[\d.]+) \|$", text, re.MULTILINE)
    rules = {
        "cosine": rollouts.P2_COSINE, "elasticity in b": rollouts.P2_ELASTICITY, "gap between": rollouts.P4_GAP,
        "slope": rollouts.P4_SLOPE, "chance that": rollouts.P5_SEPARATION, "cap slope of the mask": runs.P3_STOPS,
        "cap fall of the reference": runs.P3_FALLS, "cap fall of the matched": runs.P3_FALLS,
        "cap gap at the same b": runs.P3_APART, "failures fall faster": runs.P3_FALLS, "drift apart": runs.P4_DRIFT,
        "gap on the cap rate": runs.P4_GROWS, "move apart": runs.P5_CHANGE, "solved get shorter": runs.P5_CHANGE,
        "fewer ran tests": runs.P5_TESTS,
    }  # fmt: skip
    assert len(found) == len(rules)
    for (what, *numbers), (begin, rule) in zip(found, rules.items(), strict=True):
        assert what.startswith(begin)
        assert [float(n) for n in numbers] == [rule.above, rule.null, rule.effect], begin
