"""NVIDIA's own tools, where they are installed: the contracts of the CUDA kernels under `compute-sanitizer`, and what
`ncu` counts of each case. What they report is written into the results; what is not here, or fails, is said there."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

SANITIZER, PROFILER = "compute-sanitizer", "ncu"
CHECKS = ("memcheck", "racecheck")
SMALL_CASES = "cuda and float64"  # of tests/test_gpu.py
FOUND = 86  # exit status of a check that found errors, which no test run ends with
SANITIZER_SECONDS, PROFILER_SECONDS = 900.0, 120.0
METRICS = {
    "bytes": "dram__bytes.sum",
    "ns": "gpu__time_duration.sum",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
}


def _run(command: list[str], seconds: float, **environment: str) -> tuple[int | None, str]:
    """Exit status and output of a tool, or None and why there is no status."""
    try:
        ran = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False,
            env={**os.environ, "TRITON_INTERPRET": "0", **environment},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"took more than {seconds:.0f} s"
    except OSError as error:
        return None, f"could not be started: {error}"
    return ran.returncode, ran.stdout


def _last(text: str) -> str:
    """What fits into a line: the last error that a tool names, else the last thing that it says."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines)[-1][:200].replace("|", "/")


def sanitized() -> list[dict[str, Any]]:
    """What each check says of the small cases: `sound` is None where it could not be run to its end."""
    tool = shutil.which(SANITIZER)
    if tool is None:
        return [{"check": check, "sound": None, "says": f"{SANITIZER} is not on the path"} for check in CHECKS]
    return [_sanitized(tool, check) for check in CHECKS]


def _sanitized(tool: str, check: str) -> dict[str, Any]:
    command = [tool, "--tool", check, "--error-exitcode", str(FOUND), sys.executable, "-m", "pytest", "-q"]
    command += ["-m", "gpu", "-k", SMALL_CASES, "tests/test_gpu.py"]
    # Tensors in allocations of their own: in torch's pool, an access past the end of one lies in the next.
    status, said = _run(command, SANITIZER_SECONDS, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    if status is None:
        return {"check": check, "sound": None, "says": said}
    passed = re.search(r"(\d+) passed", said)
    if status == 0 and passed:
        return {"check": check, "sound": True, "says": f"no errors in {passed[1]} tests"}
    if status == 0:  # all were skipped, as where the extension was not built
        return {"check": check, "sound": None, "says": f"no test ran: {_last(said)}"}
    what = "errors were found" if status == FOUND else f"exit status {status}"
    return {"check": check, "sound": False if status == FOUND else None, "says": f"{what}: {_last(said)}"}


def profiled(cases: Iterable[str]) -> list[dict[str, Any]]:
    """What the profiler counts of one run of ours in each case, or why it counts nothing."""
    tool = shutil.which(PROFILER)
    if tool is None:
        return []
    return [{"case": case, **_profiled(tool, case)} for case in cases]


def _profiled(tool: str, case: str) -> dict[str, Any]:
    command = [tool, "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, "-m", "bench.gpu", "--profile", case]
    status, said = _run(command, PROFILER_SECONDS)
    if status is None:
        return {"failure": said}
    try:
        return totals(said)
    except (KeyError, ValueError, StopIteration):
        return {"failure": f"exit status {status}, no numbers: {_last(said)}"}


def totals(text: str) -> dict[str, float]:
    """Of all kernels in the profiler's table: bytes of device memory, time, and the mean occupancy over that time.

    The table comes after lines of other kinds, with names in its first line and units in its second. Raises ValueError,
    KeyError or StopIteration where it is another table, or none.
    """
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    _, *kernels = csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"'))))
    columns = {what: [float(kernel[metric].replace(",", "")) for kernel in kernels] for what, metric in METRICS.items()}
    nanoseconds = sum(columns["ns"])
    if not nanoseconds:
        raise ValueError("no kernel ran")
    warps = sum(part * ns for part, ns in zip(columns["occupancy"], columns["ns"], strict=True))
    return {
        "kernels": len(kernels),
        "bytes": sum(columns["bytes"]),
        "seconds": nanoseconds / 1e9,
        "occupancy": warps / nanoseconds / 100,
    }


def page(document: Mapping[str, Any]) -> list[str]:
    """What the tools said, as lines of the page of results."""
    checks = [f"- `{SANITIZER} --tool {c['check']}`: {c['says']}." for c in document["sanitized"]]
    lines = [
        f'The CUDA kernels, small cases (`tests/test_gpu.py -k "{SMALL_CASES}"`), under NVIDIA\'s checks:',
        "",
        *checks,
    ]
    if not document["profiled"]:
        return [*lines, "", f"Bytes and occupancy were not counted: {PROFILER} is not on the path."]
    lines += ["", f"One run of ours under `{PROFILER}`, all its kernels:", ""]
    lines += ["| case | kernels | device memory MB | GB/s | occupancy |", "|---|---|---|---|---|"]
    return lines + [_line(counted) for counted in document["profiled"]]


def _line(counted: Mapping[str, Any]) -> str:
    if "failure" in counted:
        return f"| {counted['case']} | {counted['failure']} | | | |"
    return (
        f"| {counted['case']} | {counted['kernels']} | {counted['bytes'] / 1e6:.1f} "
        f"| {counted['bytes'] / counted['seconds'] / 1e9:.0f} | {counted['occupancy']:.2f} |"
    )
