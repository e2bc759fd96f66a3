"""What the compiler makes of the Triton kernels, with no GPU: registers, spills, shared memory, widths of accesses.

`python -m bench.compiled_code` compiles every configuration for sm_90a, writes docs/triton_kernels.md and .json, and
fails if one is not as it should be. `python -m bench.compiled_code segment_tokens` prints what it finds of the kernels
whose names contain this, and writes nothing. Compiled kernels are kept in build/triton.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import kernel_ir, kernel_registry, machine_code
from bench.kernel_registry import Entry

CACHE = Path(__file__).parent.parent / "build" / "triton"
WORKERS = 2
TARGET = 90  # sm_90a: H100, H200


@dataclass(frozen=True)
class Multiprocessor:
    """What the blocks on one multiprocessor share (CUDA programming guide, technical specifications)."""

    shared: int  # bytes of shared memory
    warps: int = 64
    blocks: int = 32
    registers: int = 65536
    reserved: int = 1024  # bytes of shared memory that each block takes for the system

    def occupancy(self, registers: int, shared: int, warps: int) -> float:
        """Warps that run at once, of those that could, for blocks of so many warps."""
        of_four = -(-warps // 4) * 4  # each of four schedulers has its registers, and hands them out 256 at a time
        of_warp = -(-max(registers, 1) * 32 // 256) * 256
        by_registers = self.registers // (of_warp * of_four)
        by_shared = self.shared // (-(-shared // 128) * 128 + self.reserved)
        return min(by_registers, by_shared, self.warps // warps, self.blocks) * warps / self.warps


MULTIPROCESSORS = {80: Multiprocessor(164 << 10), 90: Multiprocessor(228 << 10), 100: Multiprocessor(228 << 10)}


@dataclass(frozen=True)
class Facts(machine_code.Counts):
    """What the compiler made of one configuration, and what its program asks of it."""

    target: int
    warps: int
    registers: int
    stack: int  # bytes of local memory a thread
    shared: int  # bytes of shared memory a block
    occupancy: float
    streamed_loads: dict[str, int]  # accesses of 16 bytes that full blocks take of a thread, by argument
    streamed_stores: dict[str, int]
    short_load: str  # its largest load, if that moves fewer bytes
    narrow_offsets: tuple[str, ...]  # pointers whose offset may have wrapped around in 32 bits
    recompiled: tuple[str, ...]  # what would have Triton compile more than this form
    cached: bool  # whether build/triton had it

    @property
    def spills(self) -> int:
        """Loads and stores of local memory: registers that were short."""
        return self.local_loads + self.local_stores


def check(facts: Facts | str, *, streaming: bool, in_place: bool = False, products: bool = False) -> list[str]:
    """What is wrong, in words; nothing if all is well.

    Args:
        facts: those of one configuration, or the compiler's message.
        streaming: whether it has a main stream, which moves 16 bytes at a time and computes nothing in float64 in its
            innermost loops.
        in_place: whether it may write where its threads read what they share, and so needs a barrier between.
        products: whether its matrix products belong on tensor cores.
    """
    if isinstance(facts, str):
        return [f"does not compile: {facts}"]
    complaints = list(facts.recompiled)
    most = MULTIPROCESSORS[facts.target].shared - 1024
    if facts.spills or facts.stack:
        complaints.append(
            f"spills: {facts.local_loads} loads and {facts.local_stores} stores of local memory, "
            f"{facts.stack} bytes a thread, with {facts.registers} registers"
        )
    if facts.shared > most:
        complaints.append(f"{facts.shared} bytes of shared memory, at most {most}")
    if facts.float_atomics:
        complaints.append(f"{facts.float_atomics} float atomics, whose order is another in each run")
    if facts.narrow_pointers:
        complaints.append(f"{facts.narrow_pointers} global accesses by addresses of fewer than 64 bits")
    for name in facts.narrow_offsets:
        complaints.append(f"the offset into {name} is computed in 32 bits: cast to tl.int64 before multiplying")
    if in_place and not facts.barriers_before_stores:
        complaints.append("no barrier between what its threads read together and its stores: in place, they race")
    if products and not facts.tensor_core:
        complaints.append("no matrix products on tensor cores")
    if streaming:
        complaints += _narrow_streams("load", facts.loads, facts.streamed_loads)
        complaints += _narrow_streams("store", facts.stores, facts.streamed_stores)
        if facts.short_load:
            complaints.append(facts.short_load)
        if facts.float64_in_loops:
            complaints.append(f"{facts.float64_in_loops} float64 instructions in innermost loops")
    return complaints


def wide_accesses(by_bits: dict[str, int]) -> int:
    """How many of the loads, or stores, move 16 bytes or more."""
    return sum(n for bits, n in by_bits.items() if int(bits) >= 128)


def _narrow_streams(what: str, found: dict[str, int], needed: dict[str, int]) -> list[str]:
    wide, all_needed = wide_accesses(found), sum(needed.values())
    names = ", ".join(f"{name} {n}" for name, n in needed.items())
    few = f"{wide} {what}s of 128 bits, where full blocks take {all_needed} of a thread: {names}"
    return [few] if wide < all_needed else []


def recompiled(configuration: Any) -> Iterator[str]:
    """What a launch would have compiled beyond a configuration: Triton goes by the values of integers, unless told."""
    of = {parameter.name: parameter for parameter in configuration.kernel.params}
    given = {name for name, _ in (*configuration.signature, *configuration.constants)}
    for name in sorted(given ^ set(of)):
        yield f"{name} is not both an argument of the kernel and named by the configuration"
    for name, kind in configuration.signature:
        if name not in of or not re.fullmatch(r"[iu]\d+", kind):
            continue
        if of[name].annotation_type != kind:
            yield f"{name} is {kind} here, but i32 in a launch where its value fits: write `{name}: tl.int{kind[1:]}`"
        if not of[name].do_not_specialize:
            yield f"{name} is compiled anew for 1 and for multiples of 16: name it in do_not_specialize"


def compile_configuration(configuration: Any, target: int = TARGET) -> tuple[Any, bool]:
    """Triton's compiled kernel, and whether the cache had it. Not in a process with TRITON_INTERPRET."""
    triton = importlib.import_module("triton")  # which has no types
    names = configuration.kernel.arg_names
    constants, types = dict(configuration.constants), dict(configuration.signature)
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **seen: hits.append(seen["cache_hit"])
    kernel = triton.compile(
        triton.compiler.ASTSource(
            fn=configuration.kernel,
            signature={name: "constexpr" if name in constants else types[name] for name in names},
            constexprs=constants,
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in configuration.aligned},
        ),
        target=triton.backends.compiler.GPUTarget("cuda", target, 32),
        options={
            "num_warps": configuration.num_warps,
            "num_stages": configuration.num_stages,
            "enable_fp_fusion": configuration.fp_fusion,
            "maxnreg": configuration.registers,
        },
    )
    return kernel, hits == [True]


def cuobjdump(*arguments: str | Path) -> str:
    """What NVIDIA's cuobjdump, which Triton brings along, says."""
    path = Path(str(importlib.import_module("triton").__file__)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def disassembled(cubin: bytes) -> tuple[str, dict[str, int]]:
    """The machine code as text, and its resources. The text takes half a second to make, so it is kept."""
    stem = CACHE / "disassembled" / hashlib.sha256(cubin).hexdigest()
    stem.parent.mkdir(parents=True, exist_ok=True)
    binary, text = stem.with_suffix(f".{os.getpid()}.cubin"), stem.with_suffix(".sass")
    binary.write_bytes(cubin)
    try:
        used = cuobjdump("-res-usage", binary)
        resources = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", used)}
        if not text.exists():
            unfinished = binary.with_suffix(".sass")
            unfinished.write_text(cuobjdump("-sass", binary))
            unfinished.replace(text)
    finally:
        binary.unlink()
    return text.read_text(), resources


def inspect(configuration: Any, target: int = TARGET) -> Facts:
    """Compiles a configuration and reads what came out."""
    kernel, cached = compile_configuration(configuration, target)
    text, resources = disassembled(kernel.asm["cubin"])
    program = kernel_ir.Program(kernel.asm["ttir"])
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    return Facts(
        **vars(machine_code.count(text)),
        target=target,
        warps=warps,
        registers=resources["REG"],
        stack=resources["STACK"] + resources["LOCAL"],
        shared=shared,
        occupancy=MULTIPROCESSORS[target].occupancy(resources["REG"], shared, warps),
        streamed_loads=kernel_ir.vectors(program.streams, 32 * warps, stores=False),
        streamed_stores=kernel_ir.vectors(program.streams, 32 * warps, stores=True),
        short_load=kernel_ir.short_load(program.streams, 32 * warps),
        narrow_offsets=tuple(sorted(program.narrow)),
        recompiled=tuple(recompiled(configuration)),
        cached=cached,
    )


def _inspect_named(module: str, name: str, target: int) -> Facts | str:
    """Runs in a worker: kernels are found by name, for they cannot be sent."""
    (configuration,) = (entry.configuration for entry in kernel_registry.entries(module) if entry.name == name)
    try:
        return inspect(configuration, target)
    except Exception as error:  # whatever the compiler raises is what is wrong with the kernel
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _for_compilers() -> Iterator[None]:
    """The environment that worker processes start with: kernels are compiled, not interpreted, and kept."""
    before = {name: os.environ.get(name) for name in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")}
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = str(CACHE)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})


def inspect_all(wanted: Iterable[Entry], target: int = TARGET) -> dict[str, Facts | str]:
    """The facts of each entry by its name, or the compiler's message; compiled in processes of their own."""
    with _for_compilers(), ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        waiting = {entry.name: pool.submit(_inspect_named, entry.module, entry.name, target) for entry in wanted}
        return {name: future.result() for name, future in waiting.items()}


def main(arguments: list[str]) -> int:
    """The command; see the module's docstring."""
    from bench import compiled_report

    parser = argparse.ArgumentParser(prog="python -m bench.compiled_code", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="*", help="parts of kernels' names; all of them, and the report, without")
    parser.add_argument("--target", type=int, choices=sorted(MULTIPROCESSORS), default=TARGET)
    asked = parser.parse_args(arguments)
    every = kernel_registry.all_entries()
    wanted = [e for e in every if not asked.kernels or any(part in e.kernel for part in asked.kernels)]
    results = inspect_all(wanted, asked.target)
    complaints = {
        e.name: check(results[e.name], streaming=e.streaming, in_place=e.in_place, products=e.products) for e in wanted
    }
    compiled = {name: facts for name, facts in results.items() if isinstance(facts, Facts)}
    if asked.kernels or asked.target != TARGET:
        for name, facts in compiled.items():
            print(name, *(f"  {k}: {v}" for k, v in dataclasses.asdict(facts).items()), sep="\n")
    elif not any(complaints.values()):
        compiled_report.write(every, compiled)
    for name, sentences in complaints.items():
        for sentence in sentences:
            print(f"{name}: {sentence}", file=sys.stderr)
    cached = sum(facts.cached for facts in compiled.values())
    print(f"{len(wanted)} configurations, {len(compiled)} compile, {cached} of them kept from before")
    return 1 if any(complaints.values()) else 0


if __name__ == "__main__":
    from bench.compiled_code import main as run  # not this copy of the module: the workers' facts are of that one

    sys.exit(run(sys.argv[1:]))
