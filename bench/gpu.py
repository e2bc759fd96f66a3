"""Measures the ops on the card that is there, beside their peers and floors: `make gpu`.

Writes results/gpu.json and results/gpu.md. Without a CUDA device it says so and fails: nothing is estimated here.
`python -m bench.gpu --not-measured` writes the page that says so, where no results are.

Ours is measured on both backends; bars are for the one that "auto" takes. NVIDIA's tools run last, where they are.

Every case runs in a process of its own: a peer that breaks the device's context, or hangs, costs its case a second run
without peers, and no other case anything.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastadv as fa
from bench import gpu_card, gpu_page, gpu_peers, gpu_tools
from bench.gpu_cases import CASES, Case
from bench.gpu_page import OURS
from bench.harness import RESULTS, machine
from fastadv import dispatch

ROUNDS, FEWEST = 30, 5
CASE_SECONDS = 15.0  # of rounds, where FEWEST take less
PROCESS_SECONDS = 120.0  # of a case with its imports and compilers
ALL_SECONDS = 400.0
FLUSH_BYTES = 2**28  # more than any card's second-level cache: written between runs, so that none finds inputs there


@dataclass(frozen=True)
class Row:
    """One implementation of one case. Without a failure all numbers are there."""

    case: str
    what: str
    unit: str  # of the rate
    failure: str = ""  # why there are no numbers
    leaves_out: str = ""  # of what ours computes
    p20: float = 0.0  # seconds
    p50: float = 0.0
    p80: float = 0.0
    rate: float = 0.0  # of the bytes or operations that the op needs, whatever this implementation does; a second
    of_floor: float = 0.0  # time over the floor's, measured in this run
    peak_bytes: int = 0  # memory beside the inputs
    error: float | None = None  # against float64


class Runs:
    """The implementations of a case that still run, and why the others do not."""

    def __init__(self) -> None:
        self.runs: dict[str, Callable[[], Any]] = {}
        self.failures: dict[str, str] = {}

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """What an action returns; None after a failure, which takes its implementation out."""
        try:
            return action()
        except ImportError as error:
            self.failures[name] = f"not installed: {first_line(error)}"
        except fa.BackendUnavailableError as error:
            self.failures[name] = f"not here: {first_line(error)}"
        except Exception as error:  # whatever another project's code raises is a line in the table
            self.failures[name] = f"failed: {type(error).__name__}: {first_line(error)}"
        self.runs.pop(name, None)
        gc.collect()
        torch.cuda.empty_cache()
        return None


def first_line(error: object) -> str:
    """What fits into a table."""
    lines = str(error).strip().splitlines() or ["no message"]
    return lines[0][:160].replace("|", "/")


def interleaved(all_: Runs, device: str) -> dict[str, list[float]]:
    """Seconds on the device of each run, in turns, with a cold cache, after two rounds that do not count."""
    flush = torch.empty(FLUSH_BYTES if device == "cuda" else 1, dtype=torch.uint8, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in all_.runs}

    def timed(run: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    began = time.perf_counter()
    for round_ in range(ROUNDS + 2):
        if round_ >= FEWEST + 2 and time.perf_counter() - began > CASE_SECONDS:
            break
        for name, run in list(all_.runs.items()):
            took = all_.attempt(name, partial(timed, run))
            if took is not None and round_ >= 2:
                seconds[name].append(took)
    return {name: values for name, values in seconds.items() if name in all_.runs}


def peak_bytes(run: Callable[[], object]) -> int:
    """Device memory that a run takes beside what is there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(case: Case, *, device: str = "cuda", small: bool = False, peers: bool = True) -> list[Row]:
    """Ours on each backend, every peer that runs, and the floor."""
    work = case.work(device, small=small)
    floor = work.floor
    makers: dict[str, Callable[[], Callable[[], Any]]] = {
        OURS[backend]: partial(work.ours, backend) for backend in case.backends
    }
    notes = {peer.name: peer.leaves_out for peer in work.peers}
    makers |= {peer.name: peer.make for peer in work.peers if peers}
    makers[floor.name] = lambda: floor.run
    found, errors, peaks = Runs(), {}, {}
    for name, make in makers.items():
        run = found.attempt(name, make)
        if run is None:
            continue
        found.runs[name] = run
        result = found.attempt(name, run)
        if name != floor.name and name in found.runs:
            errors[name] = found.attempt(name, partial(work.error, result))
        del result
        if name in found.runs:
            peaks[name] = found.attempt(name, partial(peak_bytes, run))
    seconds = interleaved(found, device)
    if floor.name not in seconds:
        raise RuntimeError(f"{floor.name}: {found.failures[floor.name]}")
    per_amount = statistics.median(seconds[floor.name]) / floor.amount
    rows = []
    for name in makers:
        head = (case.name, name, floor.unit)
        if name in found.failures:
            rows.append(Row(*head, found.failures[name], notes.get(name, "")))
            continue
        p20, p50, p80 = (statistics.quantiles(seconds[name], n=10)[i] for i in (1, 4, 7))
        amount = floor.amount if name == floor.name else work.amount
        rows.append(
            Row(
                *head, "", notes.get(name, ""), p20, p50, p80, amount / p50, p50 / (amount * per_amount), peaks[name],
                errors.get(name),
            )
        )  # fmt: skip
    return rows


# ---- a process for each case -----------------------------------------------------------------------------------------


def run_one(name: str, path: Path, peers: bool) -> None:
    """Measures the case of this name and leaves its rows, and the card's state just after, in a file."""
    (case,) = [case for case in CASES if case.name == name]
    rows = measure(case, peers=peers)
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows], "state": gpu_card.state_or_why_not()}))


def profile_one(name: str) -> None:
    """Runs the case of this name, on what "auto" takes, twice: the second time a profiler may look at."""
    (case,) = [case for case in CASES if case.name == name]
    run = case.work("cuda").ours("auto")
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def in_a_process(case: Case, peers: bool, limit: float) -> dict[str, Any] | str:
    """What `run_one` left, or why it left nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "bench.gpu", "--case", case.name, "--to", str(path)]
        command += [] if peers else ["--without-peers"]
        try:
            ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return f"took more than {limit:.0f} s"
        sys.stderr.write(ran.stderr)
        if ran.returncode or not path.exists():
            last = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
            return first_line(last)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


Process = Callable[[Case, bool, float], "dict[str, Any] | str"]


def measure_all(
    process: Process, write: Callable[[Mapping[str, Any]], None], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Every case, written down after each: what is measured is not lost by what comes after it."""
    began = time.perf_counter()
    document: dict[str, Any] = {"machine": dict(facts), "seconds": 0.0, "states": [], "rows": []}
    document |= {"sanitized": [], "profiled": []}
    for case in CASES:
        failures = []
        for peers in (True, False):
            left = ALL_SECONDS - (time.perf_counter() - began)
            found = process(case, peers, min(left, PROCESS_SECONDS)) if left > 0 else "no time was left"
            if not isinstance(found, str):
                document["rows"] += found["rows"]
                document["states"].append(found["state"])
                break
            failures.append(found)
        if failures:
            what = "all peers" if len(failures) == 1 else "fastadv"
            document["rows"].append(asdict(Row(case.name, what, "", f"failed: {failures[0]}")))
        document["seconds"] = time.perf_counter() - began
        write(document)
    return document


def write(document: Mapping[str, Any]) -> None:
    """Writes the results and their page."""
    (RESULTS / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
    (RESULTS / "gpu.md").write_text(gpu_page.measured(document))


def write_not_measured() -> int:
    """Writes the page that says that nothing was measured, unless something was."""
    if (RESULTS / "gpu.json").exists():
        print("bench/results/gpu.json holds a card's results: gpu.md stays as it is.", file=sys.stderr)
        return 1
    (RESULTS / "gpu.md").write_text(gpu_page.not_measured())
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Measures every case; 0 if ours ran in all of them and met every bar, and no check found an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--not-measured", action="store_true", help="write the page that says that no card was there")
    parser.add_argument("--case", help="measure one case, into the file --to")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--profile", help="run one case, for a profiler")
    given = parser.parse_args(arguments)
    if given.not_measured:
        return write_not_measured()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured. Run `make gpu` on a machine that has one.", file=sys.stderr)
        return 2
    if given.case:
        run_one(given.case, given.to, not given.without_peers)
        return 0
    if given.profile:
        profile_one(given.profile)
        return 0
    os.environ["TRITON_INTERPRET"] = "0"  # of the processes too
    auto = dispatch.resolve("make gpu", "auto", device=torch.device("cuda"))
    facts = {**gpu_card.facts(), "auto": auto, **gpu_peers.versions(), **machine()}
    document = measure_all(in_a_process, write, facts)
    document["sanitized"] = gpu_tools.sanitized()
    document["profiled"] = gpu_tools.profiled(case.name for case in CASES)
    write(document)
    print(gpu_page.measured(document))
    return int(not gpu_page.sound(document))


if __name__ == "__main__":
    sys.exit(main())
