"""Measures the ops on the card that is there, beside their peers and floors: `make gpu`.

Writes results/gpu.json and results/gpu.md. Without a CUDA device it says so and fails: nothing is estimated here.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

from bench import gpu_card
from bench.gpu_cases import CASES, Case, Work
from bench.harness import DIRTY, RESULTS, clean, machine

ROUNDS = 30
FLUSH_BYTES = (
    2**28
)  # written between runs: more than any card's second-level cache, so that no run finds its inputs there


@dataclass(frozen=True)
class Measured:
    """One implementation of one case."""

    case: str
    what: str
    p20: float  # seconds
    p50: float
    p80: float
    bytes_per_second: float  # of the bytes that the op has to move, whatever this implementation moves
    of_floor: float  # time over that of a copy of as many bytes on this card, in this run
    peak_bytes: int  # memory beside the inputs
    error: float | None  # against float64; ours only


def interleaved(runs: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds on the device of each run, in turns, with a cold cache, after two rounds that do not count."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for _ in range(rounds + 2):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            run()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) / 1e3 for a, b in pairs[2:]] for name, pairs in events.items()}


def peak_bytes(run: Callable[[], object]) -> int:
    """Device memory that a run takes beside what is there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_of(work: Work) -> Callable[[], object]:
    """A copy that moves as many bytes as the op has to: half are read, half are written."""
    source = torch.empty(work.bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def measure(case: Case) -> list[Measured]:
    """Ours, every peer, and the copy that is the floor."""
    work = case.work("cuda", "triton")
    error = work.error()
    floor = "a copy of as many bytes"
    runs = {"fastadv": work.ours, **work.peers, floor: copy_of(work)}
    seconds = interleaved(runs)
    least = statistics.median(seconds[floor])
    rows = []
    for name, run in runs.items():
        p20, p50, p80 = (statistics.quantiles(seconds[name], n=10)[i] for i in (1, 4, 7))
        mine = error if name == "fastadv" else None
        rows.append(
            Measured(case.name, name, p20, p50, p80, work.bytes / p50, p50 / least, peak_bytes(run), mine)
        )  # fmt: skip
    return rows


def table(rows: list[Measured], bars: Mapping[str, float]) -> list[str]:
    """The results as lines of Markdown."""
    lines = [
        "| case | | p20 us | p50 us | p80 us | GB/s | times a copy | bar | peak MiB | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        ours = r.what == "fastadv"
        bar = f"{bars[r.case]:.2f} {'met' if r.of_floor <= bars[r.case] else 'MISSED'}" if ours else ""
        error = "" if r.error is None else f"{r.error:.1e}"
        lines.append(
            f"| {r.case if ours else ''} | {r.what} | {r.p20 * 1e6:.1f} | {r.p50 * 1e6:.1f} | {r.p80 * 1e6:.1f} "
            f"| {r.bytes_per_second / 1e9:.0f} | {r.of_floor:.2f} | {bar} | {r.peak_bytes / 2**20:.0f} | {error} |"
        )
    return lines


def report(rows: list[Measured], facts: dict[str, object], states: list[dict[str, object]]) -> str:
    """The page."""
    bars = {case.name: case.bar for case in CASES}
    slowed = sorted({str(reason) for state in states for reason in _reasons(state)})
    return "\n".join(
        [
            f"# On a GPU: {facts['card']}",
            "",
            *([] if clean(str(facts["commit"])) else [DIRTY, ""]),
            *table(rows, bars),
            "",
            ", ".join(f"{key} {value}" for key, value in facts.items()) + ".",
            f"Clocks were held down by: {', '.join(slowed) or 'nothing'}.",
            "Cold cache, runs in turns, device time between events; the copy moves as many bytes as the op has to.",
            "",
        ]
    )


def _reasons(state: dict[str, object]) -> list[object]:
    reasons = state["slowed by"]
    assert isinstance(reasons, list)
    return reasons


def main() -> int:
    """Measures every case; 0 if all bars are met."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured. Run `make gpu` on a machine that has one.", file=sys.stderr)
        return 2
    facts = {**gpu_card.facts(), **machine()}
    rows: list[Measured] = []
    states = [gpu_card.state()]
    for case in CASES:
        rows += measure(case)
        torch.cuda.empty_cache()
        states.append(gpu_card.state())
    text = report(rows, facts, states)
    (RESULTS / "gpu.md").write_text(text)
    document = {"machine": facts, "states": states, "rows": [asdict(row) for row in rows]}
    (RESULTS / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
    print(text)
    bars = {case.name: case.bar for case in CASES}
    return int(any(row.of_floor > bars[row.case] for row in rows if row.what == "fastadv"))


if __name__ == "__main__":
    sys.exit(main())
