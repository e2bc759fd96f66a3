"""What the benchmarks promise about their own results."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from bench import harness

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("commit", "clean"), [("0ca7b16", True), ("v0.1-3-g0ca7b16", True), ("0ca7b16-dirty", False), ("unknown", False)]
)
def test_results_of_a_dirty_tree_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], commit: str, clean: bool
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "machine", lambda: {"commit": commit})
    assert harness.write("it", "a comparison", [harness.Line("a / b", 1.0, 2.0, 2.0, 1.5, "peer")], {})
    text, printed = (tmp_path / "it.md").read_text(), capsys.readouterr().out
    assert (harness.DIRTY in text) == (harness.DIRTY in printed) == (not clean)
    assert "| a / b | 1000.00 | 2000.00 | 2.00x | \u2265 1.5x | met |" in text


def test_the_commit_is_dirty_by_what_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(harness, "RESULTS", results)
    assert harness.commit() == "unknown"
    files = results / "it.md", tmp_path / "bench" / "run.py", tmp_path / "kernel.cpp"
    for path in files:
        path.write_text("1")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], check=True)
    name = harness.commit()
    assert re.fullmatch("[0-9a-f]{7,}", name)
    for path, dirty in zip(files, (False, True, True), strict=True):
        path.write_text("2")
        assert harness.commit() == name + "-dirty" * dirty
        path.write_text("1")


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_a_committed_result_of_a_dirty_tree_says_so(path: Path) -> None:
    clean = harness.clean(json.loads(path.read_text())["machine"]["commit"])
    assert (harness.DIRTY in path.with_suffix(".md").read_text()) == (not clean)


def test_peers_are_pinned_in_files() -> None:
    assert not re.search(r"pip install.*==", (ROOT / "Makefile").read_text())
    assert re.search(r"^verl==", (ROOT / "bench" / "peers_alone.txt").read_text(), re.MULTILINE)
