"""The committed record of the compiled kernels, docs/triton_kernels.md and .json, and what counts as worse than it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.compiled_code import MULTIPROCESSORS, TARGET, Facts, wide_accesses
from bench.kernel_registry import Entry

RECORD = Path(__file__).parent.parent / "docs" / "triton_kernels.json"
COMMAND = "python -m bench.compiled_code"
ACCEPT = f"if this is meant, run `{COMMAND}` and commit what it writes after a look at the diff"
MORE_REGISTERS = 8
MORE_INSTRUCTIONS = 1.1

# The rest is checked to be nothing.
RECORDED = (
    "registers", "occupancy", "warps", "shared", "instructions", "in_loops", "loops", "loads", "stores", "float64",
    "float64_in_loops", "streamed_loads", "streamed_stores",
)  # fmt: skip

PAGE = """# Triton kernels as compiled

Written by `{command}`; change the kernels, not this page. **Nothing here was measured on a GPU.**

Every form of every kernel that a launch can ask for was compiled for {target} (H100, H200) on a machine without a GPU,
by Triton {triton} and its ptxas {ptxas}, and the machine code was taken apart with `cuobjdump`. The numbers hold for
these versions only. They tell what a kernel asks of a multiprocessor, not how long it runs; `bench/roofline.py` has
floors of that.

Kernels: {kernels}. Forms: {forms}. `tests/test_triton_compiled.py` sees to it that none spills registers or uses local
memory, none adds floats atomically, every offset is computed in 64 bits, and none needs more than {shared} KiB of
shared memory. Kernels that stream, over tokens or logits, move 16 bytes with each instruction in full blocks, and
compute nothing in float64 in their innermost loops.

Each line is a family: a kernel with one choice of its constants, in all its dtypes. A range is over the dtypes.

| column | says |
|---|---|
| **s** | a kernel that has to stream |
| forms | dtypes that the line stands for |
| registers | of a thread; 255 at most |
| occupancy | part of the {warps} warps of a multiprocessor that run at once: what registers and shared memory allow |
| shared | bytes of shared memory a block |
| loads, stores | global ones in the code: of 16 bytes or more, and all |
| instructions | in the code |
| in loops | those of them that are in loops, and in what loops call |

{table}
"""


def documented(facts: Facts) -> dict[str, Any]:
    """The facts of one configuration as the record holds them."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(facts)))
    return {name: values[name] for name in RECORDED}


def document(facts: Mapping[str, Facts]) -> dict[str, Any]:
    """The record: versions, and the facts of each configuration by its name."""
    return {
        "made_by": COMMAND,
        **versions(),
        "configurations": {name: documented(f) for name, f in sorted(facts.items())},
    }


def versions() -> dict[str, str]:
    """What the numbers depend on."""
    compiler = importlib.import_module("triton.backends.nvidia.compiler")  # which has no types
    ptxas = re.search(r"V([\d.]+)", compiler.get_ptxas_version(TARGET))
    return {
        "triton": importlib.import_module("triton").__version__,
        "ptxas": ptxas[1] if ptxas else "unknown",
        "target": f"sm_{TARGET}a",
    }


def regressions(name: str, recorded: Mapping[str, Any], facts: Facts) -> list[str]:
    """What is worse than the record of one configuration, in words."""
    found = []
    if facts.registers > recorded["registers"] + MORE_REGISTERS:
        found.append(f"{facts.registers} registers, {recorded['registers']} before")
    if facts.occupancy < recorded["occupancy"]:
        found.append(f"occupancy {facts.occupancy:.3f}, {recorded['occupancy']:.3f} before")
    if facts.spills:
        found.append(f"{facts.spills} loads and stores of spilled registers")
    for what, now, before in (
        ("instructions", facts.instructions, recorded["instructions"]),
        ("instructions in loops", facts.in_loops, recorded["in_loops"]),
    ):
        if now > MORE_INSTRUCTIONS * before:
            found.append(f"{now} {what}, {before} before")
    return [f"{name}: {', '.join(found)}; {ACCEPT}"] if found else []


def page(entries: Iterable[Entry], record: Mapping[str, Any]) -> str:
    """The record as a page: one line for each family of configurations."""
    families: dict[str, list[Entry]] = {}
    for entry in entries:
        families.setdefault(entry.family, []).append(entry)
    table = ["| kernel | forms | registers | occupancy | shared | loads | stores | instructions | in loops |"]
    table.append("|---" * 9 + "|")
    numbers = record["configurations"]
    for family, members in families.items():
        table.append(_line(family, members[0].streaming, [numbers[entry.name] for entry in members]))
    return PAGE.format(
        command=COMMAND,
        **{name: record[name] for name in ("target", "triton", "ptxas")},
        forms=len(numbers),
        kernels=len({name.partition("[")[0] for name in numbers}),
        shared=MULTIPROCESSORS[TARGET].shared // 1024 - 1,
        warps=MULTIPROCESSORS[TARGET].warps,
        table="\n".join(table),
    )


def _line(family: str, streaming: bool, members: list[Mapping[str, Any]]) -> str:
    def across(name: str) -> str:
        return _range([m[name] for m in members])

    def wide(name: str) -> str:
        of_all = [sum(m[name].values()) for m in members]
        return f"{_range([wide_accesses(m[name]) for m in members])} of {_range(of_all)}"

    kernel, _, choices = family.partition("[")
    title = f"`{kernel}`" + (f" {choices.removesuffix(']')}" if choices else "") + (" **s**" if streaming else "")
    cells = [title, len(members), across("registers"), across("occupancy"), across("shared"), wide("loads")]
    cells += [wide("stores"), across("instructions"), across("in_loops")]
    return "| " + " | ".join(map(str, cells)) + " |"


def _range(values: list[float]) -> str:
    low, high = (f"{value:.2f}" if isinstance(value, float) else str(value) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def text(record: Mapping[str, Any]) -> str:
    """The record as JSON with one line for each configuration, so that a diff shows which changed."""
    head = {name: value for name, value in record.items() if name != "configurations"}
    lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(f)}" for n, f in record["configurations"].items())
    return json.dumps(head, indent=1).removesuffix("\n}") + f',\n "configurations": {{\n{lines}\n }}\n}}\n'


def write(entries: Iterable[Entry], facts: Mapping[str, Facts]) -> None:
    """Writes the record and its page."""
    record = document(facts)
    RECORD.write_text(text(record))
    RECORD.with_suffix(".md").write_text(page(entries, record))
