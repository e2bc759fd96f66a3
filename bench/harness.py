"""Timing that compares: everything in one process, in turns, against a floor measured in the same run."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
DIRTY = "**The tree had changes that no commit holds: measure again before quoting this.**"


@dataclass(frozen=True)
class Timing:
    """Seconds of one implementation over all rounds."""

    p20: float
    p50: float
    p80: float
    rounds: int


WARM = 0.04  # seconds of runs in a turn that are not counted


def interleave(
    implementations: Mapping[str, Callable[[], object]], *, rounds: int = 8, counted: int = 3
) -> dict[str, Timing]:
    """Times implementations in turns, another one first in each round, so that a machine that drifts drifts for all.

    A turn runs its implementation until it is in its own steady state, at least once and for WARM seconds, and then
    counts `counted` runs. The first runs pay for what the one before left behind: a cache full of dirty temporaries,
    OpenMP workers that spin for milliseconds.
    """
    names = list(implementations)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for round_ in range(rounds):
            for i in range(len(names)):
                name = names[(i + round_) % len(names)]
                until = time.perf_counter() + WARM
                implementations[name]()
                while time.perf_counter() < until:
                    implementations[name]()
                seconds[name] += [_timed(implementations[name]) for _ in range(counted)]
    finally:
        gc.enable()
    return {name: _timing(values) for name, values in seconds.items()}


def after_torch_operation(implementation: Callable[[], object], *, rounds: int = 31) -> Timing:
    """Times an implementation right after a parallel torch operation, whose worker threads still spin."""
    small = torch.ones(1_000_000)
    seconds = []
    for _ in range(rounds):
        small.add_(1)
        seconds.append(_timed(implementation))
    return _timing(seconds)


def _timing(values: list[float]) -> Timing:
    p20, p50, p80 = (statistics.quantiles(values, n=10)[i] for i in (1, 4, 7))
    return Timing(p20, p50, p80, len(values))


def last_level_cache() -> int:
    """Bytes of the largest cache that the system tells of; 32 MiB where it tells of none."""
    sizes = [32 * 2**20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes)


def available_memory() -> int:
    """Bytes that can be taken now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no MemAvailable in /proc/meminfo")


@dataclass(frozen=True)
class Bandwidth:
    """Copy bandwidth of the machine: bytes read and written per second."""

    bytes_per_second: float
    buffer_bytes: int
    caches: float  # buffer size in last-level caches; 8 or more unless memory is short


def copy_bandwidth(rounds: int = 5) -> Bandwidth:
    """Copies between two buffers of eight last-level caches, or of what memory allows, by torch's threads."""
    cache = last_level_cache()
    size = min(8 * cache, available_memory() // 4)
    source, target = torch.ones(size // 4), torch.empty(size // 4)
    target.copy_(source)
    best = min(_timed(lambda: target.copy_(source)) for _ in range(rounds))
    return Bandwidth(2 * size / best, size, size / cache)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def commit() -> str:
    """The commit that runs, with "-dirty" where a file of it was changed; results that a run writes do not count."""

    def git(*arguments: str) -> str:
        ran = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=RESULTS.parent, check=False)
        return ran.stdout.strip()

    name = git("describe", "--always")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":(exclude){RESULTS.name}")
    return f"{name}-dirty" if name and changed else name or "unknown"


def machine() -> dict[str, object]:
    """What the numbers were taken on."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "processor": model,
        "threads": torch.get_num_threads(),
        "last level cache MiB": last_level_cache() // 2**20,
        "load before": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def clean(commit: str) -> bool:
    """Whether `git describe --always --dirty` named a commit that holds everything that ran."""
    return commit != "unknown" and not commit.endswith("-dirty")


@dataclass(frozen=True)
class Line:
    """One comparison: ours against a peer or the floor, with the bar it has to meet."""

    what: str
    ours: float  # seconds, median
    other: float  # seconds, median; for a floor: bytes over bandwidth
    ratio: float  # other / ours for peers (higher is better), ours / floor for floors (lower is better)
    bar: float | None  # at least for peers, at most for floors
    kind: str  # "peer" or "floor"

    @property
    def met(self) -> bool:
        """Whether the bar is met."""
        return self.bar is None or (self.ratio >= self.bar if self.kind == "peer" else self.ratio <= self.bar)


def against_peer(what: str, ours: Timing, peer: Timing, bar: float | None = None) -> Line:
    """How many times faster than a peer."""
    return Line(what, ours.p50, peer.p50, peer.p50 / ours.p50, bar, "peer")


def against_floor(what: str, ours: Timing, floor: float, bar: float | None = None) -> Line:
    """How many times the floor."""
    return Line(what, ours.p50, floor, ours.p50 / floor, bar, "floor")


def write(name: str, title: str, lines: list[Line], details: Mapping[str, object]) -> bool:
    """Writes results/<name>.json and .md and prints the table; returns whether every bar is met."""
    facts = machine()
    RESULTS.mkdir(exist_ok=True)
    table = ["| comparison | ours ms | other ms | ratio | bar | |", "|---|---|---|---|---|---|"]
    for line in lines:
        sign = "≥" if line.kind == "peer" else "≤"
        bar = "" if line.bar is None else f"{sign} {line.bar:g}x"
        mark = "" if line.bar is None else ("met" if line.met else "MISSED")
        table.append(
            f"| {line.what} | {line.ours * 1e3:.2f} | {line.other * 1e3:.2f} | {line.ratio:.2f}x | {bar} | {mark} |"
        )
    facts_text = ", ".join(f"{key} {value}" for key, value in facts.items())
    states = "Medians of interleaved rounds; each in its own steady state where nothing else is said."
    warning = [] if clean(str(facts["commit"])) else [DIRTY, ""]
    text = "\n".join([f"# {title}", "", *warning, *table, "", f"{facts_text}. {states}", ""])
    (RESULTS / f"{name}.md").write_text(text)
    document = {"title": title, "machine": facts, "lines": [asdict(line) for line in lines], "details": details}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(text)
    return all(line.met for line in lines)
