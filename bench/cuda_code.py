"""Takes the CUDA extension apart: what its kernels ask of a GPU, and whether they are compiled as they have to be.

    python -m bench.cuda_code       writes docs/cuda_kernels.md and .json

What is inspected is what was built, and what users run: the machine code for sm_90a inside `fastadv/_cuda*.so`. No GPU
is needed, and nothing is measured.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fastadv
from bench import machine_code
from bench.compiled_code import MULTIPROCESSORS, cuobjdump, wide_accesses

TARGET = 90
RECORD = Path(__file__).parent.parent / "docs" / "cuda_kernels.json"
COMMAND = "python -m bench.cuda_code"
ACCEPT = f"if this is meant, run `{COMMAND}` and commit what it writes after a look at the diff"
MORE_REGISTERS = 8
MORE_INSTRUCTIONS = 1.1
FUNCTION = re.compile(r"^\s*Function\s*:?\s*(\S+?):?\s*$", re.MULTILINE)
RESOURCES = re.compile(r"Function (\S+):\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
THREADS = re.compile(r"^\.nv\.info\.(\S+)\s*$.*?EIATTR_MAX_THREADS.*?Value:\s*0x([0-9a-f]+)", re.MULTILINE | re.DOTALL)
LARGEST_SHARED = 48 << 10  # what every launch may have without asking for more


@dataclass(frozen=True)
class Facts(machine_code.Counts):
    """What the compiler made of one kernel, and what its block asks of a multiprocessor."""

    threads: int  # of a block, at most
    registers: int
    stack: int  # bytes a thread, of local memory
    shared: int  # bytes a block, static
    occupancy: float


def extension() -> Path | None:
    """The extension that was built, if one was."""
    return next(Path(fastadv.__file__).parent.glob("_cuda.*.so"), None)


def architectures(path: Path) -> list[str]:
    """Those that an extension has machine code for, such as sm_90a."""
    return re.findall(r"\.(sm_\w+)\.cubin", cuobjdump("-lelf", str(path)))


def resources_of(path: Path, arch: str) -> dict[str, list[int]]:
    """Registers, stack, shared and local memory of each kernel, by its mangled name."""
    used = RESOURCES.findall(cuobjdump("-arch", arch, "-res-usage", str(path)))
    return {name: list(map(int, rest)) for name, *rest in used}


def inspect(path: Path) -> dict[str, Facts]:
    """The kernels of an extension by name. Raises ValueError where it has no machine code for sm_90a."""
    arch = f"sm_{TARGET}a"
    if arch not in architectures(path):
        raise ValueError(f"{path.name} has no code for {arch}; FASTADV_CUDA_ARCHS names what is built")
    resources = resources_of(path, arch)
    threads = {name: int(value, 16) for name, value in THREADS.findall(cuobjdump("-arch", arch, "-elf", str(path)))}
    code = dict(_functions(cuobjdump("-arch", arch, "-sass", str(path))))
    readable = dict(zip(code, _demangled(list(code)), strict=True))
    found = {}
    for name, text in code.items():
        registers, stack, shared, local = resources[name]
        if name not in threads:
            raise ValueError(f"{readable[name]} has no __launch_bounds__")
        found[readable[name]] = Facts(
            **asdict(machine_code.count(text)),
            threads=threads[name],
            registers=registers,
            stack=stack + local,
            shared=shared,
            occupancy=MULTIPROCESSORS[TARGET].occupancy(registers, shared, -(-threads[name] // 32)),
        )
    return dict(sorted(found.items()))


def fences(path: Path) -> dict[str, list[str]]:
    """Of each kernel whose last block reads what the others wrote: fences and the counter between them, in order."""
    code = _functions(cuobjdump("-arch", f"sm_{TARGET}a", "-sass", str(path)))
    found = {name: re.findall(r"MEMBAR(?=\.\w+\.GPU)|INC(?=\.STRONG\.GPU)", text) for name, text in code}
    return {name: order for name, order in found.items() if "INC" in order}


def _functions(sass: str) -> Iterator[tuple[str, str]]:
    starts = list(FUNCTION.finditer(sass))
    for i, start in enumerate(starts):
        yield start[1], sass[start.end() : starts[i + 1].start() if i + 1 < len(starts) else len(sass)]


def _demangled(names: list[str]) -> list[str]:
    """`kernel<template arguments>`."""
    whole = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True).stdout.splitlines()
    prefixes = re.compile(r"^void |fastadv::(cuda::)?|\(anonymous namespace\)::|\([\w:]+\)(?=\d)")  # the last: (Loss)1
    return [prefixes.sub("", name).partition("(")[0] for name in whole]


# ---- what has to hold ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """What is asked of a kernel that goes over tokens or logits."""

    aligned: int | None = None  # template argument that says that pointers are multiples of 16 bytes; None: a branch
    loads: bool = True  # of 16 bytes
    stores: bool = True
    finish: int = 0  # float64 instructions of innermost loops that add up what warps or blocks have, once at the end


STREAMS = {
    "segment_tokens_kernel": Stream(aligned=2),
    "row_counts_kernel": Stream(aligned=2, stores=False),
    "count_runs_kernel": Stream(aligned=0, stores=False),
    "turn_ids_kernel": Stream(aligned=0, loads=False),  # of a mask a thread needs 8 bytes
    "warp_rows_kernel": Stream(stores=False),
    "block_rows_kernel": Stream(stores=False, finish=8),
    "policy_loss_kernel": Stream(finish=16),
    "scale_gradient_kernel": Stream(),
    "row_sums_kernel": Stream(aligned=1, stores=False, finish=60),
    "logits_gradient_kernel": Stream(aligned=2),
    "block_products_kernel": Stream(stores=False),
    "count_sketch_kernel": Stream(loads=False, stores=False),  # a lane has a column, and so atomics have neighbours
}


def kernel_of(name: str) -> str:
    """Without the template arguments."""
    return name.partition("<")[0]


def arguments_of(name: str) -> list[str]:
    """The template arguments, which may have some of their own."""
    inside = re.sub(r"<[^<>]*>", "", name.partition("<")[2].removesuffix(">"))
    return inside.split(", ")


def check(name: str, facts: Facts) -> list[str]:
    """What is wrong with a kernel, in words; nothing if all is well."""
    complaints = []
    if facts.stack or facts.local_loads or facts.local_stores:
        complaints.append(
            f"spills: {facts.local_loads} loads and {facts.local_stores} stores of local memory, {facts.stack} bytes a "
            f"thread, with {facts.registers} registers"
        )
    if facts.shared > LARGEST_SHARED:
        complaints.append(f"{facts.shared} bytes of shared memory, at most {LARGEST_SHARED}")
    if facts.float_atomics:
        complaints.append(f"{facts.float_atomics} float atomics, whose order is another in each run")
    if facts.narrow_pointers:
        complaints.append(f"{facts.narrow_pointers} global accesses by addresses of fewer than 64 bits")
    stream = STREAMS.get(kernel_of(name))
    if stream is None:
        return complaints
    if facts.float64_in_loops > stream.finish:
        complaints.append(f"{facts.float64_in_loops} float64 instructions in innermost loops, at most {stream.finish}")
    if stream.aligned is None or arguments_of(name)[stream.aligned] == "true":
        if stream.loads and not wide_accesses(facts.loads):
            complaints.append("no load of 128 bits")
        if stream.stores and not wide_accesses(facts.stores):
            complaints.append("no store of 128 bits")
    return complaints


def regressions(name: str, recorded: Mapping[str, Any], facts: Facts) -> list[str]:
    """What is worse than the record of a kernel, in words."""
    found = []
    if facts.registers > recorded["registers"] + MORE_REGISTERS:
        found.append(f"{facts.registers} registers, {recorded['registers']} before")
    if facts.occupancy < recorded["occupancy"]:
        found.append(f"occupancy {facts.occupancy:.3f}, {recorded['occupancy']:.3f} before")
    for what, now, before in (
        ("instructions", facts.instructions, recorded["instructions"]),
        ("instructions in loops", facts.in_loops, recorded["in_loops"]),
    ):
        if now > MORE_INSTRUCTIONS * before:
            found.append(f"{now} {what}, {before} before")
    return [f"{name}: {', '.join(found)}; {ACCEPT}"] if found else []


# ---- the record ------------------------------------------------------------------------------------------------------

PAGE = """# CUDA kernels as compiled

Written by `{command}`; change the kernels, not this page. **Nothing here was measured on a GPU.**

The machine code for sm_90a (H100, H200) in the extension that `setup.py` builds, made by nvcc {nvcc} on a machine
without a GPU and taken apart with `cuobjdump`. The numbers hold for this version only. They tell what a kernel asks of
a multiprocessor, not how long it runs.

`tests/test_cuda_code.py` sees to it that no kernel spills registers or uses local memory, none adds floats atomically,
every address has 64 bits, and kernels that stream, over tokens, logits or gradients (**s**), have loads and stores of
16 bytes and compute nothing in float64 in the loops over their stream; `count_sketch_kernel` moves single elements, so
that the atomics of a warp are of neighbours. Where a template argument says so, a form is for pointers
that are no multiples of 16 bytes, and moves less at a time.

| column | says |
|---|---|
| threads | of a block |
| registers | of a thread; 255 at most |
| occupancy | part of the {warps} warps of a multiprocessor that run at once |
| shared | bytes of shared memory a block |
| loads, stores | global ones in the code: of 16 bytes or more, and all |
| instructions | in the code, and those of them in loops |

| kernel | threads | registers | occupancy | shared | loads | stores | instructions | in loops |
|---|---|---|---|---|---|---|---|---|
{table}
"""


def document(facts: Mapping[str, Facts]) -> dict[str, Any]:
    """The record: who made it, and the facts of each kernel by its name."""
    kernels = json.loads(json.dumps({name: asdict(f) for name, f in facts.items()}))
    return {"made_by": COMMAND, "nvcc": compiler_version(), "target": f"sm_{TARGET}a", "kernels": kernels}


def compiler_version() -> str:
    """nvcc's."""
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", said)
    return found[1] if found else "unknown"


def page(record: Mapping[str, Any]) -> str:
    """The record as a page."""
    lines = [_line(name, facts) for name, facts in record["kernels"].items()]
    warps = MULTIPROCESSORS[TARGET].warps
    return PAGE.format(command=COMMAND, nvcc=record["nvcc"], warps=warps, table="\n".join(lines))


def _line(name: str, facts: Mapping[str, Any]) -> str:
    def wide(kind: str) -> str:
        return f"{wide_accesses(facts[kind])} of {sum(facts[kind].values())}"

    title = f"`{name}`" + (" **s**" if kernel_of(name) in STREAMS else "")
    cells = [title, facts["threads"], facts["registers"], f"{facts['occupancy']:.2f}", facts["shared"], wide("loads")]
    return "| " + " | ".join(map(str, [*cells, wide("stores"), facts["instructions"], facts["in_loops"]])) + " |"


def text(record: Mapping[str, Any]) -> str:
    """The record as JSON with one line for each kernel, so that a diff shows which changed."""
    head = {name: value for name, value in record.items() if name != "kernels"}
    lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(f)}" for n, f in record["kernels"].items())
    return json.dumps(head, indent=1).removesuffix("\n}") + f',\n "kernels": {{\n{lines}\n }}\n}}\n'


def main() -> int:
    """Inspects the extension and writes the record; 0 if nothing is wrong."""
    path = extension()
    if path is None:
        print("fastadv._cuda is not built: there was no nvcc, or FASTADV_CUDA is 0", file=sys.stderr)
        return 2
    facts = inspect(path)
    complaints = [f"{name}: {what}" for name, f in facts.items() for what in check(name, f)]
    record = document(facts)
    RECORD.write_text(text(record))
    RECORD.with_suffix(".md").write_text(page(record))
    print("\n".join(complaints) or f"{len(facts)} kernels, nothing wrong: {RECORD.with_suffix('.md')}")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
