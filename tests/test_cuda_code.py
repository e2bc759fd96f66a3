"""The machine code of the CUDA kernels, as built: no spills, wide loads, no worse than the record."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest

from bench import cuda_code
from bench.cuda_code import Facts

PATH = cuda_code.extension()
pytestmark = pytest.mark.skipif(PATH is None, reason="fastadv._cuda is not built: no nvcc, or FASTADV_CUDA is 0")


@functools.cache
def kernels() -> dict[str, Facts]:
    assert PATH is not None
    return cuda_code.inspect(PATH)


def record() -> dict[str, dict[str, object]]:
    return json.loads(cuda_code.RECORD.read_text())


def test_kernels_are_compiled_as_they_have_to_be() -> None:
    assert [f"{name}: {what}" for name, facts in kernels().items() for what in cuda_code.check(name, facts)] == []
    assert {cuda_code.kernel_of(name) for name in kernels()} >= set(cuda_code.STREAMS)


def test_kernels_are_no_worse_than_their_record() -> None:
    recorded = record()["kernels"]
    assert set(kernels()) == set(recorded), cuda_code.ACCEPT
    assert [
        what for name, facts in kernels().items() for what in cuda_code.regressions(name, recorded[name], facts)
    ] == []


def test_the_page_is_of_the_record() -> None:
    assert cuda_code.RECORD.read_text() == cuda_code.text(record())
    assert cuda_code.RECORD.with_suffix(".md").read_text() == cuda_code.page(record())


def test_no_gpu_gets_code_that_uses_local_memory() -> None:
    assert PATH is not None
    for arch in cuda_code.architectures(PATH):
        resources = cuda_code.resources_of(PATH, arch)
        assert len(resources) == len(kernels()), arch
        assert [name for name, (_, stack, _, local) in resources.items() if stack or local] == [], arch


def test_the_last_block_reads_behind_fences() -> None:
    """Without them it may read what was there before the others wrote, which the emulation cannot show."""
    assert PATH is not None
    found = cuda_code.fences(PATH)
    assert {name for name in ("policy_loss_kernel", "block_rows_kernel") if not any(name in f for f in found)} == set()
    assert [name for name, order in found.items() if order != ["MEMBAR", "INC", "MEMBAR"]] == []


FAULTS = {
    "spills: 3 loads": {"local_loads": 3},
    "spills: 0 loads and 0 stores of local memory, 16 bytes": {"stack": 16},
    "65536 bytes of shared memory": {"shared": 65536},
    "2 float atomics": {"float_atomics": 2},
    "1 global accesses": {"narrow_pointers": 1},
    "4 float64 instructions in innermost loops, at most 0": {"float64_in_loops": 4},
    "no load of 128 bits": {"loads": {"32": 8}},
    "no store of 128 bits": {"stores": {"64": 8}},
}


@pytest.mark.parametrize("complaint", FAULTS)
def test_a_fault_is_named(complaint: str) -> None:
    name = "segment_tokens_kernel<float, int, true>"
    (found,) = cuda_code.check(name, dataclasses.replace(kernels()[name], **FAULTS[complaint]))
    assert found.startswith(complaint)


def test_worse_code_is_noticed() -> None:
    name, facts = next(iter(kernels().items()))
    recorded = dataclasses.asdict(facts)
    assert cuda_code.regressions(name, recorded, facts) == []
    worse = dataclasses.replace(
        facts, registers=facts.registers + 9, occupancy=facts.occupancy / 2, instructions=2 * facts.instructions
    )
    (found,) = cuda_code.regressions(name, recorded, worse)
    assert all(word in found for word in ("registers", "occupancy", "instructions", cuda_code.COMMAND))
