"""NVIDIA's tools as `make gpu` calls them: programs of their names on the path note how they were called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_page, gpu_tools
from bench.gpu_cases import CASES

HEAD = (
    '"ID","Kernel Name","dram__bytes.sum","gpu__time_duration.sum","sm__warps_active.avg.pct_of_peak_sustained_active"'
)
TABLE = f"""==PROF== Connected to process 7
{HEAD}
"","","byte","ns","%"
"0","policy_loss_kernel(float *, int)","3,000,000","1,000","80.0"
"1","scale","1,000,000","3,000","40.0"
==PROF== Disconnected
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Puts a tool on the path that says something and ends with a status; returns the file of its calls."""

    def make(name: str, says: str = "", status: int = 0, then: str = "") -> Path:
        calls, output = tmp_path / f"{name}.calls", tmp_path / f"{name}.output"
        output.write_text(says)
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\necho "$TRITON_INTERPRET $PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {calls}\n'
            f"/bin/cat {output}\n{then}\nexit {status}\n"
        )
        program.chmod(0o755)
        return calls

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    return make


def page(**found: Any) -> str:
    return "\n".join(gpu_tools.page({"sanitized": gpu_tools.sanitized(), "profiled": [], **found}))


def test_tools_that_are_not_there_are_said_to_be_absent(tool: Any) -> None:
    assert [found["sound"] for found in gpu_tools.sanitized()] == [None, None]
    assert gpu_tools.profiled(["a case"]) == []
    text = page()
    for check in ("memcheck", "racecheck"):
        assert f"- `compute-sanitizer --tool {check}`: compute-sanitizer is not on the path." in text
    assert "Bytes and occupancy were not counted: ncu is not on the path." in text


def test_the_sanitizer_runs_the_small_cases_under_both_checks(tool: Any) -> None:
    calls = tool("compute-sanitizer", "34 passed, 2 skipped in 9.0s\n========= ERROR SUMMARY: 0 errors\n")
    assert [(c["check"], c["sound"], c["says"]) for c in gpu_tools.sanitized()] == [
        ("memcheck", True, "no errors in 34 tests"),
        ("racecheck", True, "no errors in 34 tests"),
    ]
    rest = f"--error-exitcode 86 {sys.executable} -m pytest -q -m gpu -k cuda and float64 tests/test_gpu.py"
    assert calls.read_text().splitlines() == [f"0 1 --tool {check} {rest}" for check in ("memcheck", "racecheck")]


@pytest.mark.parametrize(
    ("status", "sound", "says"),
    [
        (86, False, "errors were found: ========= ERROR SUMMARY: 3 errors"),
        (1, None, "exit status 1: ========= ERROR SUMMARY: 3 errors"),
        (0, None, "no test ran: ========= ERROR SUMMARY: 3 errors"),
    ],
    ids=["errors", "another failure", "all skipped"],
)
def test_what_a_check_finds_is_reported_and_judged(tool: Any, status: int, sound: bool | None, says: str) -> None:
    tool("compute-sanitizer", "========= Invalid read\n========= ERROR SUMMARY: 3 errors\n36 skipped\n", status)
    found = gpu_tools.sanitized()
    assert [(c["sound"], c["says"]) for c in found] == 2 * [(sound, says)]
    assert says in page()
    rows = [
        {
            "case": c.name,
            "what": gpu_page.OURS[c.judged("cuda")],
            "failure": "",
            "error": 0.0,
            "of_floor": 1.0,
            "p50": 0.0,
        }
        for c in CASES
    ]
    document = {"machine": {"auto": "cuda"}, "rows": rows, "sanitized": found}
    assert gpu_page.sound(document) == (sound is None)


def test_a_tool_that_hangs_or_does_not_start_ends_nothing(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_tools, "SANITIZER_SECONDS", 0.2)
    tool("compute-sanitizer", then="exec /bin/sleep 60")
    assert [(c["sound"], c["says"]) for c in gpu_tools.sanitized()] == 2 * [(None, "took more than 0 s")]
    (tmp_path / "ncu").write_bytes(b"\x7fELF")
    (tmp_path / "ncu").chmod(0o755)
    (found,) = gpu_tools.profiled(["a case"])
    assert found["failure"].startswith("could not be started: ")


def test_the_profiler_counts_each_case(tool: Any) -> None:
    calls = tool("ncu", TABLE)
    found = gpu_tools.profiled(["one", "two"])
    assert found == [
        {"case": case, "kernels": 2, "bytes": 4e6, "seconds": pytest.approx(4e-6), "occupancy": pytest.approx(0.5)}
        for case in ("one", "two")
    ]
    metrics = "dram__bytes.sum,gpu__time_duration.sum,sm__warps_active.avg.pct_of_peak_sustained_active"
    options = f"--csv --page raw --print-units base --profile-from-start off --metrics {metrics}"
    command = f"{options} {sys.executable} -m bench.gpu --profile"
    assert calls.read_text().splitlines() == [f"0  {command} one", f"0  {command} two"]
    text = page(profiled=found)
    assert "| one | 2 | 4.0 | 1000 | 0.50 |" in text
    assert "not counted" not in text


@pytest.mark.parametrize(
    "says",
    ["==ERROR== ERR_NVGPUCTRPERM: no permission\n", f"{HEAD}\n", f'{HEAD}\n"","","byte","ns","%"\n==ERROR== none\n'],
)
def test_a_profiler_that_fails_is_a_line(tool: Any, says: str) -> None:
    tool("ncu", says, status=1)
    (found,) = gpu_tools.profiled(["a case"])
    assert found["failure"].startswith("exit status 1, no numbers: ")
    assert f"| a case | {found['failure']} | | | |" in page(profiled=[found])


def test_one_run_is_shown_to_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    case = type("Case", (), {"name": "a case", "work": lambda self, device: self, "ours": lambda self, _: self.run})()
    case.run = lambda: events.append("run")
    monkeypatch.setattr(gpu, "CASES", (case,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: events.append(name))
    assert gpu.main(["--profile", "a case"]) == 0
    assert events == ["run", "start", "run", "stop"]


def test_the_small_cases_are_there() -> None:
    """What the checks select is a contract of each op on the CUDA kernels, and nothing of Triton."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "-k", gpu_tools.SMALL_CASES]
    run = subprocess.run(
        [*command, "tests/test_gpu.py"], cwd=gpu.RESULTS.parents[1], capture_output=True, text=True, check=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    chosen = [line for line in run.stdout.splitlines() if "::" in line]
    assert len(chosen) > 20
    assert all("test_contract[cuda: " in line and "float64" in line for line in chosen)
