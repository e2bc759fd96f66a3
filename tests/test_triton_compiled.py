"""Every form of every Triton kernel, compiled for GPUs that are not here: no spills, wide loads, no worse than before.

The compiler runs in processes of its own, where kernels are not interpreted, and keeps what it made in build/triton.
"""

from __future__ import annotations

import functools
import importlib
import json
import re

import pytest

from bench import compiled_code, compiled_report, kernel_registry
from bench.compiled_code import Facts
from bench.kernel_registry import Entry

EVERY = kernel_registry.all_entries()
SAMPLE = kernel_registry.sample(EVERY, most=4)  # the rest is slow
REST = [entry for entry in EVERY if entry not in SAMPLE]
PLANTED = kernel_registry.entries("planted_kernels")

entries = pytest.mark.parametrize(
    "entry",
    [*SAMPLE, *(pytest.param(entry, marks=pytest.mark.slow) for entry in REST)],
    ids=lambda entry: entry.name,
)


@functools.cache
def compiled(*, rest: bool) -> dict[str, Facts | str]:
    """What the compiler made of the sample and of the planted kernels, or of all others; once a session."""
    return compiled_code.inspect_all(REST if rest else [*SAMPLE, *PLANTED])


def facts(entry: Entry) -> Facts | str:
    return compiled(rest=entry in REST)[entry.name]


@entries
def test_a_kernel_compiles_to_what_it_should_be(entry: Entry) -> None:
    assert (
        compiled_code.check(facts(entry), streaming=entry.streaming, in_place=entry.in_place, products=entry.products)
        == []
    )


@entries
def test_a_kernel_is_no_worse_than_its_record(entry: Entry) -> None:
    found = facts(entry)
    recorded = json.loads(compiled_report.RECORD.read_text())["configurations"]
    assert isinstance(found, Facts), found
    assert entry.name in recorded, compiled_report.ACCEPT
    assert compiled_report.regressions(entry.name, recorded[entry.name], found) == []


def test_the_record_is_of_these_kernels_and_this_compiler() -> None:
    record = json.loads(compiled_report.RECORD.read_text())
    assert {name: record[name] for name in compiled_report.versions()} == compiled_report.versions(), (
        f"the numbers depend on the compiler, which is another one now: {compiled_report.ACCEPT}"
    )
    assert set(record["configurations"]) == {entry.name for entry in EVERY}, compiled_report.ACCEPT
    assert compiled_report.RECORD.read_text() == compiled_report.text(record)
    assert compiled_report.RECORD.with_suffix(".md").read_text() == compiled_report.page(EVERY, record)


@pytest.mark.parametrize("module", kernel_registry.modules())
def test_a_module_lists_all_of_its_kernels(module: str) -> None:
    assert kernel_registry.entries(module)
    assert kernel_registry.unlisted(importlib.import_module(module)) == set()


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 100])
def test_other_gpus(target: int) -> None:
    one_of_each = kernel_registry.representatives(EVERY)  # family: in float32
    results = compiled_code.inspect_all(one_of_each, target)
    complaints = {
        e.name: compiled_code.check(results[e.name], streaming=e.streaming, in_place=e.in_place, products=e.products)
        for e in one_of_each
    }
    assert {name: sentences for name, sentences in complaints.items() if sentences} == {}


FAULTS = {
    "spilling": [r"spills: \d+ loads and \d+ stores of local memory, \d+ bytes a thread, with \d+ registers"],
    "float64_loop": [r"\d+ float64 instructions in innermost loops"],
    "narrow": [
        "0 loads of 128 bits, where full blocks take 4 of a thread: x 4",
        "0 stores of 128 bits, where full blocks take 4 of a thread: y 4",
    ],
    "half_narrow": ["4 loads of 128 bits, where full blocks take 8 of a thread: x 8"],
    "short": ["its largest load, of x, takes 8 bytes of a thread"],
    "large": [r"\d+ bytes of shared memory, at most 232448"],
    "narrow_offset": ["the offset into y is computed in 32 bits: cast to tl.int64 before multiplying"],
    "specialised": [
        "n is i64 here, but i32 in a launch where its value fits: write `n: tl.int64`",
        "n is compiled anew for 1 and for multiples of 16: name it in do_not_specialize",
    ],
    "atomic": ["1 float atomics, whose order is another in each run"],
    "unguarded": ["no barrier between what its threads read together and its stores: in place, they race"],
    "scalar_products": ["no matrix products on tensor cores"],
    "refused": ["does not compile: CompilationError: .*Loop-carried variable last has initial type int32.*"],
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    (entry,) = (entry for entry in PLANTED if entry.kernel == f"{name}_kernel")
    found = compiled(rest=False)[entry.name]
    complaints = compiled_code.check(found, streaming=entry.streaming, in_place=entry.in_place, products=entry.products)
    assert len(complaints) == len(FAULTS[name]), complaints
    for complaint, expected in zip(complaints, FAULTS[name], strict=True):
        assert re.fullmatch(expected, complaint, re.DOTALL), complaint


def test_a_sound_kernel_is_not_complained_about() -> None:
    sound = [entry for entry in PLANTED if entry.kernel == "sound_kernel"]
    assert [entry.name for entry in sound] == [f"planted_kernels.sound_kernel[x {x}]" for x in ("fp32", "bf16")]
    guarded = [entry for entry in PLANTED if entry.kernel == "guarded_kernel"]
    for entry in [*sound, *guarded]:
        found = compiled(rest=False)[entry.name]
        assert (
            compiled_code.check(found, streaming=entry.streaming, in_place=entry.in_place, products=entry.products)
            == []
        )
    assert {entry.kernel for entry in PLANTED} == {f"{name}_kernel" for name in [*FAULTS, "sound", "guarded"]}


@pytest.mark.slow
def test_a_kernel_is_compiled_once() -> None:
    sound = [entry for entry in PLANTED if entry.kernel == "sound_kernel"]
    before = compiled(rest=False)
    for name, again in compiled_code.inspect_all(sound).items():
        first = before[name]
        assert isinstance(again, Facts)
        assert isinstance(first, Facts)
        assert again.cached
        assert compiled_report.documented(again) == compiled_report.documented(first)
