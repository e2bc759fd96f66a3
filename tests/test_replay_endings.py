"""Readers: how rollouts ended, and which weights sampled them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_files import sample, write_dump

from fastadv.outcomes import Ending, Outcome
from fastadv.replay.errors import ReplayError
from fastadv.replay.pipeline import ReplayOptions, replay
from fastadv.replay.readers import ReadOptions, Rollouts, kind_of, portable, read
from fastadv.replay.report import as_json, tables

EXAMPLE = Path(__file__).parent / "data" / "miles_dump_example.pt"
MASK = [1, 1, 0, 1, 0, 0, 1]  # three turns


def one(tmp_path: Path, **changes: Any) -> Rollouts:
    """A dump with one rollout of three turns."""
    entry = sample(
        random.Random(0), 0, 0, loss_mask=MASK, response_ids=[1] * 7, rollout_log_probs=[0.0] * 7, status="completed",
        reward=0.0,
    )  # fmt: skip
    return read(write_dump(tmp_path / "dump.pt", [{**entry, **changes}]), ReadOptions())


@pytest.mark.row(1)
@pytest.mark.parametrize(
    ("status", "exit_status", "ending", "outcome"),
    [
        ("completed", None, Ending.SUBMITTED, Outcome.FAILED),
        ("completed", "Submitted", Ending.SUBMITTED, Outcome.FAILED),
        ("completed", "an agent's own word", Ending.SUBMITTED, Outcome.FAILED),
        ("completed", "x" * 1000, Ending.SUBMITTED, Outcome.FAILED),
        ("completed", 3, Ending.SUBMITTED, Outcome.FAILED),
        ("completed", "TurnLimitExceeded", Ending.TURN_CAP, Outcome.BUDGET),
        ("completed", "LimitsExceeded", Ending.TURN_CAP, Outcome.BUDGET),  # mini-swe-agent's
        ("completed", "TimeLimitExceeded", Ending.TIMEOUT, Outcome.BUDGET),
        ("completed", "RepeatedFormatError", Ending.VOID, Outcome.FAILED),
        ("completed", "AgentError", Ending.ERROR, Outcome.INFRA),
        ("completed", "DockerException", Ending.ERROR, Outcome.INFRA),
        ("truncated", None, Ending.LENGTH_CAP, Outcome.BUDGET),
        ("truncated", "Submitted", Ending.LENGTH_CAP, Outcome.BUDGET),
        ("truncated", "SequenceLengthLimitExceeded", Ending.CONTEXT_CAP, Outcome.BUDGET),
        ("failed", "Submitted", Ending.ERROR, Outcome.INFRA),
        ("aborted", "TurnLimitExceeded", Ending.ABORTED, Outcome.INFRA),
        ("pending", None, Ending.ABORTED, Outcome.INFRA),
    ],
)
def test_endings_of_a_miles_dump(
    tmp_path: Path, status: str, exit_status: object, ending: Ending, outcome: Outcome
) -> None:
    rollouts = one(tmp_path, status=status, metadata={"exit_status": exit_status})
    assert rollouts.batch.endings.tolist() == [ending]
    assert rollouts.outcomes.tolist() == [outcome]
    failed = "1 finished sample whose exit_status says that the agent, not the policy, failed: counted as INFRA"
    assert rollouts.notes == [failed] * (status == "completed" and outcome == Outcome.INFRA)


@pytest.mark.row(40)
@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (["7", "8", "10"], [7, 7, -1, 8, -1, -1, 10]),  # a call a turn
        ([7, 8, 10], [7, 7, -1, 8, -1, -1, 10]),
        (["7"], [7, 7, -1, 7, -1, -1, 7]),
        (["7"] * 5, [7, 7, -1, 7, -1, -1, 7]),  # turns of several calls, but one version
        (["7", "8"], None),
        (["7"] * 8, None),  # more calls than tokens
        (["7", "8", "default"], None),
        (["7", "8", "-1"], None),
        (["7", "8", "²"], None),
        (["7", "8", "9" * 5000], None),
        (["7", "8", 2**31], None),
        (["7", "8", 9.0], None),
        ([["7"], "8", "9"], None),
        ([], None),
        (None, None),
        ("789", None),
    ],
)
def test_versions_of_a_miles_dump(tmp_path: Path, versions: Any, expected: list[int] | None) -> None:
    batch = one(tmp_path, weight_versions=versions).batch
    assert (None if batch.versions is None else batch.versions.tolist()) == expected


def test_versions_that_are_known_of_some_samples_only(tmp_path: Path) -> None:
    entries = [
        {**sample(random.Random(0), 0, i), "weight_versions": versions} for i, versions in enumerate((["3"], []))
    ]
    rollouts = read(write_dump(tmp_path / "dump.pt", entries), ReadOptions())
    assert rollouts.batch.versions is None
    assert rollouts.notes == ["1 sample whose weight_versions do not say which turn is whose: versions are not used"]


def test_the_example_says_how_its_rollouts_ended_and_what_sampled_them() -> None:
    batch = read(EXAMPLE, ReadOptions()).batch
    assert torch.bincount(batch.endings).tolist() == [17, 0, 0, 0, 1, 2, 4]
    versions = batch.versions[batch.mask]
    assert (versions.min(), versions.max()) == (5, 10)
    assert bool((batch.versions[~batch.mask] == -1).all())


# ---- Portable --------------------------------------------------------------------------------------------------------


def test_the_portable_format_keeps_endings_and_versions(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path, batch = tmp_path / "rollouts.safetensors", read(EXAMPLE, ReadOptions()).batch
    portable.write(path, batch)
    again = read(path, ReadOptions()).batch
    assert torch.equal(again.endings, batch.endings)
    assert torch.equal(again.versions, batch.versions)
    tensors, metadata = load_file(path), {"format": "fastadv rollouts", "version": "1"}
    save_file({name: t for name, t in tensors.items() if name not in ("endings", "versions")}, path, metadata)
    without = read(path, ReadOptions()).batch
    assert without.endings is without.versions is None
    save_file({**tensors, "endings": torch.full((24,), 12)}, path, metadata)
    with pytest.raises(ReplayError, match=r"endings\[0\] is 12; endings are SUBMITTED \(0\)"):
        read(path, ReadOptions())
    save_file({**tensors, "versions": torch.full_like(tensors["versions"], -1)}, path, metadata)
    with pytest.raises(ReplayError, match=r"versions\[0\] is -1 at a sampled token"):
        read(path, ReadOptions())


def test_a_header_whose_length_begins_like_a_pickle(tmp_path: Path) -> None:
    batch, kinds = read(EXAMPLE, ReadOptions()).batch, set()
    for size in range(0, 256, 8):  # headers are padded to 8 bytes
        path = tmp_path / f"{size}.safetensors"
        portable.write(path, batch, ["x" * size] + [""] * 5)
        kinds.add((path.read_bytes()[:1] == b"\x80", kind_of(path)))
    assert kinds == {(False, "safetensors"), (True, "safetensors")}


# ---- The report ------------------------------------------------------------------------------------------------------


@pytest.mark.row(2)
def test_the_report_names_the_regime(tmp_path: Path) -> None:
    def report(capped: int, aborted: int) -> tuple[dict[str, Any], str]:
        rng, status = random.Random(0), ["truncated"] * capped + ["aborted"] * aborted + ["completed"] * 8
        entries = [sample(rng, i // 4, i, status=s, reward=float(i % 2)) for i, s in enumerate(status)]
        for entry in entries[:capped]:
            entry["reward"] = 0.0
        result = replay([write_dump(tmp_path / "dump.pt", entries)], None, ReplayOptions())
        (table,) = (t for t in tables(result) if t.title == "Outcome census")
        return json.loads(as_json(result))["regime"], table.caption

    numbers, caption = report(30, 10)
    assert (numbers["verdict"], numbers["exclusions"], numbers["budget"]["value"]) == ("budget", 40, 0.75)
    assert "Budget regime: 75% of the 40 unsolved rollouts that did not submit hit a cap" in caption
    numbers, caption = report(2, 2)
    assert numbers["verdict"] == "too few"
    assert "No regime is named: 4 of" in caption
    assert report(0, 0)[0]["budget"] == {"value": None, "low": None, "high": None}
