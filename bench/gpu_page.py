"""The page of the GPU benchmarks: made of their results, or saying that there are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench import gpu_tools
from bench.gpu_cases import CASES, Case
from bench.harness import DIRTY, clean

OURS = {backend: f"fastadv ({backend})" for backend in ("cuda", "triton")}
UNITS = {"GB/s": 1e9, "TF/s": 1e12}
LIKE_H100 = "9.0"  # compute capability of the cards that bars in seconds are for

NOT_MEASURED = """\
# On a GPU: not measured

**Nothing in this project was measured on a GPU.** No card was there; there are no times, rates or errors of one, and
none are estimated here. This page was written by `python -m bench.gpu --not-measured`.

`make gpu` on a machine with a CUDA device runs the contracts of every op there on both of its backends, cuda and triton
(`tests/test_gpu.py`), then the cases below on those that have a kernel, each beside its peers where they are installed
and beside the card's own copy or matrix product in the same run, and writes this page anew and `gpu.json` with it:
card, driver, clocks and what held them down, versions, commit, 20th, 50th and 80th percentile, rate, times the floor,
peak memory, error against float64. Bars are for the backend that "auto" takes.

Where `compute-sanitizer` is on the path, the CUDA kernels' small cases run under its memcheck and racecheck too; where
`ncu` is, it counts bytes, bandwidth and occupancy of each case. **Neither was run**: both need a card.

What was argued without a card, from bytes, counted instructions and occupancy, is in `bench/RECORD.md` ("Triton, argued
and not measured"); the compiled kernels are in `docs/triton_kernels.md` and `docs/cuda_kernels.md`. What each op has to
move is in `bench/cuda_bytes.py`; `tests/test_cuda_bytes.py` counts what the CUDA kernels do move.

| case | size | bar |
|---|---|---|
"""

NOTES = """\
Cold cache, runs in turns, device time between events, with what the host adds where it comes late. A rate is of the
bytes or operations that the op needs, over p50. A floor is the last line of its case: the same amount at the rate of a
copy, or of torch's product of one chunk, in the same run. Errors are the largest difference from float64, relative to
the largest value; rounding a gradient to bfloat16 is up to 4e-3 of it.
"""


def bar(case: Case) -> str:
    """What a case has to keep, in words."""
    if case.bar is not None:
        return f"{case.bar:.2f} times the floor"
    return "none" if case.seconds is None else f"{case.seconds * 1e3:g} ms on an H100"


def not_measured() -> str:
    """The page where no card was."""
    lines = [f"| {c.name} | {', '.join(f'{k} {v:,}' for k, v in c.sizes.items())} | {bar(c)} |" for c in CASES]
    return NOT_MEASURED + "\n".join(lines) + "\n"


def kept(case: Case, row: Mapping[str, Any], machine: Mapping[str, Any]) -> bool | None:
    """Whether our row keeps its case's bar; None where none applies to this card."""
    if case.bar is not None:
        return bool(row["of_floor"] <= case.bar)
    if case.seconds is None or machine.get("capability") != LIKE_H100:
        return None
    return bool(row["p50"] <= case.seconds)


def sound(document: Mapping[str, Any]) -> bool:
    """Whether ours, on the backend that "auto" takes, ran in every case, with a right answer, and missed no bar, and no
    check of the kernels found an error."""
    auto = document["machine"]["auto"]
    judged = {case.name: OURS.get(case.judged(auto)) for case in CASES}
    ours = {row["case"]: row for row in document["rows"] if row["what"] == judged.get(row["case"])}
    return all(check["sound"] is not False for check in document["sanitized"]) and all(
        case.name in ours
        and not ours[case.name]["failure"]
        and ours[case.name]["error"] <= case.tolerance
        and kept(case, ours[case.name], document["machine"]) is not False
        for case in CASES
    )


def _line(row: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    cases = {case.name: case for case in CASES}
    ours = row["what"].startswith("fastadv")
    name = row["case"] if ours else ""
    if row["failure"]:
        return f"| {name} | {row['what']} | {row['failure']} | | | | | | | |"
    case = cases.get(row["case"])
    verdict = ""
    if ours and case is not None:
        verdict = bar(case) + {True: ", met", False: ", MISSED", None: ""}[kept(case, row, machine)]
    error = "" if row["error"] is None else f"{row['error']:.1e}"
    if ours and case is not None and row["error"] > case.tolerance:
        error += " WRONG"
    rate = f"{row['rate'] / UNITS[row['unit']]:.0f} {row['unit']}"
    return (
        f"| {name} | {row['what']} | {row['p20'] * 1e6:.1f} | {row['p50'] * 1e6:.1f} | {row['p80'] * 1e6:.1f} "
        f"| {rate} | {row['of_floor']:.2f} | {verdict} | {row['peak_bytes'] / 2**20:.0f} | {error} |"
    )


def measured(document: Mapping[str, Any]) -> str:
    """The page of results."""
    machine, rows = document["machine"], document["rows"]
    slowed = sorted({str(reason) for state in document["states"] for reason in state["slowed by"]})
    absent = sorted({f"{r['what']} ({r['failure']})" for r in rows if r["failure"].startswith("not installed")})
    partial = sorted({f"{r['what']} ({r['leaves_out']})" for r in rows if r["leaves_out"]})
    return "\n".join(
        [
            f"# On a GPU: {machine['card']}",
            "",
            *([] if clean(str(machine["commit"])) else [DIRTY, ""]),
            "| case | | p20 us | p50 us | p80 us | rate | times the floor | bar | peak MiB | error |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(_line(row, machine) for row in rows),
            "",
            ", ".join(f"{key} {value}" for key, value in machine.items()) + f"; {document['seconds']:.0f} s in all.",
            "",
            f'Bars are for {machine["auto"]}, which "auto" takes here.',
            f"Clocks were held down by: {', '.join(slowed) or 'nothing'}.",
            f"Peers that are not here: {'; '.join(absent) or 'none'}.",
            f"Peers that leave something out: {'; '.join(partial) or 'none'}.",
            "",
            *gpu_tools.page(document),
            "",
            NOTES,
        ]
    )
