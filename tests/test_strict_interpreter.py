"""The checks that the Triton kernels' tests rely on: each planted fault is found, and its clean twin passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

import fastadv as fa

if not fa.dispatch.interpreting():
    pytest.skip("TRITON_INTERPRET=0, as `make gpu` says: kernels are compiled", allow_module_level=True)

import strict_interpreter
from strict_interpreter import CHECK, CheckError, launches, traffic

strict_interpreter.install()

BLOCK = 8

# ---- planted faults: each kernel with FAULT=1, and its clean twin with FAULT=0 ---------------------------------------


@triton.jit
def load_kernel(x, out, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n + FAULT, other=0.0), mask=i < n)


@triton.jit
def load_before_kernel(x, out, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i - FAULT, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def store_kernel(x, out, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n + FAULT)


@triton.jit
def atomic_bounds_kernel(x, out, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n + FAULT)


@triton.jit
def misaligned_kernel(x, out, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    bytes_ = x.to(tl.pointer_type(tl.int8), bitcast=True) + 2 * FAULT
    tl.store(out, tl.load(bytes_.to(tl.pointer_type(tl.float32), bitcast=True)))


@triton.jit
def straddling_kernel(x, out, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    pairs = (x + 2 + 2 * FAULT).to(tl.pointer_type(tl.int64), bitcast=True)
    tl.store(out, tl.load(pairs).to(tl.float32))


@triton.jit
def stores_race_kernel(x, out, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(out + tl.program_id(0) * (1 - FAULT), 1.0)


@triton.jit
def reads_race_kernel(x, out, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    tl.store(out + program, 1.0)
    tl.load(out + (program + FAULT) % tl.num_programs(0))


@triton.jit
def lanes_kernel(x, out, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i // 2, (i // (2 - FAULT)).to(tl.float32))


@triton.jit
def assert_kernel(x, out, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    tl.device_assert(tl.arange(0, BLOCK) < BLOCK - FAULT, "too many")


@triton.jit
def overflow_kernel(x, out, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0) + 2**30
    if not FAULT:
        start = start.to(tl.int64)
    tl.store(out, (start * 2).to(tl.float32), mask=tl.program_id(0) == 0)


@triton.jit
def device_function(out, FAULT: tl.constexpr):
    tl.store(out - FAULT, 1.0)


@triton.jit
def nested_kernel(x, out, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    device_function(out, FAULT)


# Kernel, programs, the option that looks for it, and what the error says.
FAULTS: dict[str, tuple[Any, int, str, str]] = {
    "out of bounds load": (load_kernel, 1, "bounds", "load out of bounds: 1 of 6 .*ends 4 bytes past x of 20 bytes"),
    "load before": (load_before_kernel, 1, "bounds", "load out of bounds: 1 of 5 .*starts 4 bytes before x of 20"),
    "out of bounds store": (store_kernel, 1, "bounds", "store out of bounds: 1 of 6 .*ends 4 bytes past out"),
    "out of bounds atomic": (atomic_bounds_kernel, 1, "bounds", "atomic out of bounds: 1 of 6 .*4 bytes past out"),
    "misaligned access": (misaligned_kernel, 1, "bounds", "misaligned load of 4 bytes, 2 bytes into x"),
    "in a device function": (nested_kernel, 1, "bounds", "store out of bounds: .*before out"),
    "half out of bounds": (straddling_kernel, 1, "bounds", "load out of bounds: 1 of 1 .*ends 4 bytes past x of 20"),
    "race of stores": (stores_race_kernel, 3, "races", "race: store of element 0 of out, which program .* writes"),
    "race of a read": (reads_race_kernel, 3, "races", "race: (load|store) of .*, which program .* (reads|writes)"),
    "lanes that disagree": (lanes_kernel, 1, "races", "store: two lanes write .* values to element 0 of out"),
    "int32 overflow": (overflow_kernel, 2, "overflow", "int32 overflow detected for operation mul"),
    "device_assert": (assert_kernel, 1, "", "device_assert: too many"),
}


def run(name: str, fault: bool, **options: Any) -> Tensor:
    """The output of a kernel of FAULTS on five elements, in the middle of memory that belongs to others."""
    kernel, programs, *_ = FAULTS[name]
    memory, n = torch.arange(32.0), 5
    x, out = memory[4 : 4 + n], memory[20 : 20 + n]
    with CHECK.options(**options):
        kernel[(programs,)](x, out, n, FAULT=int(fault), BLOCK=BLOCK)
    return memory


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_in_any_order_of_programs(name: str, seed: int | None) -> None:
    kernel, *_, message = FAULTS[name]
    with pytest.raises(CheckError, match=rf"{kernel.__name__}, program \(\d, 0, 0\): .*{message}"):
        run(name, fault=True, seed=seed)


@pytest.mark.parametrize("name", FAULTS)
def test_its_clean_twin_passes(name: str) -> None:
    run(name, fault=False)


@pytest.mark.parametrize("name", [name for name, (*_, option, _) in FAULTS.items() if option])
def test_an_option_switches_its_check_off(name: str) -> None:
    run(name, fault=True, **{FAULTS[name][2]: False})


def test_a_refused_store_changes_nothing() -> None:
    """Also not what lies past a view in its own storage: that is somebody else's."""
    memory = torch.zeros(16)
    with pytest.raises(CheckError, match="ends 4 bytes past out of 20 bytes"):
        store_kernel[(1,)](torch.ones(6), memory[2:7], 5, FAULT=1, BLOCK=BLOCK)
    assert not memory.any()
    store_kernel[(1,)](torch.ones(6), memory[2:8], 5, FAULT=1, BLOCK=BLOCK)
    assert memory.tolist() == [0, 0] + 5 * [1] + 9 * [0]


@triton.jit
def column_kernel(x, out, stride, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i * stride, tl.load(x + i * stride, mask=i < n, other=0.0) + 1, mask=i < n)


def test_the_bounds_of_a_strided_view_reach_from_its_first_to_its_last_element() -> None:
    memory = torch.zeros(5, 3)
    column_kernel[(1,)](memory[:, 1], memory[:, 1], 3, 5, BLOCK=BLOCK)  # one tensor as two arguments
    assert torch.equal(memory, torch.tensor([[0.0, 1.0, 0.0]]).expand(5, 3))
    with pytest.raises(CheckError, match=r"1 of 6 .*ends 12 bytes past x\+out of 52 bytes"):
        column_kernel[(1,)](memory[:, 1], memory[:, 1], 3, 6, BLOCK=BLOCK)


def test_no_memory_at_all() -> None:
    nothing = torch.empty(0)
    with pytest.raises(CheckError, match="1 of 1 active lanes, the first where no argument has memory"):
        stores_race_kernel[(1,)](nothing, nothing, 0, FAULT=0, BLOCK=BLOCK)
    with pytest.raises(CheckError, match=r"load out of bounds: 1 of 1 active lanes, .* starts \d+ bytes before out"):
        load_before_kernel[(1,)](nothing, torch.zeros(5), 1, FAULT=1, BLOCK=BLOCK)


@triton.jit
def tiles_kernel(out, ROWS: tl.constexpr, FAULT: tl.constexpr):
    row, column = tl.program_id(0), tl.program_id(1)
    tl.store(out + (row * tl.num_programs(1) + column) * (1 - FAULT), 10.0 * row + column)


def test_programs_of_a_grid_of_two_dimensions() -> None:
    out = torch.zeros(2, 3)
    tiles_kernel[(2, 3)](out, ROWS=2, FAULT=0)
    assert out.tolist() == [[0, 1, 2], [10, 11, 12]]
    with CHECK.options(seed=None), pytest.raises(CheckError, match=r"program \(0, 1, 0\).*program \(0, 0, 0\) writes"):
        tiles_kernel[(2, 3)](out, ROWS=2, FAULT=1)


@triton.jit
def touch(x, HOW: tl.constexpr):
    if HOW == "load":
        tl.load(x)
    if HOW == "store" or HOW == "store, atomic":
        tl.store(x, 1)
    if HOW == "atomic" or HOW == "store, atomic":
        tl.atomic_add(x, 1)
    if HOW == "swap":
        tl.atomic_cas(x, 0, 1)


@triton.jit
def two_kernel(x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    if tl.program_id(0) < tl.num_programs(0) - 1:
        touch(x, FIRST)
    else:
        touch(x, "load" if SECOND == "load, store" else SECOND)
        touch(x, "store" if SECOND == "load, store" else "")


READ, WRITTEN, BY_ATOMICS = r"program \(0, 0, 0\) reads", r"program \(0, 0, 0\) writes", "atomics write"
ORDERS = [
    ("load", "load", None),
    ("load", "store", READ),
    ("load", "atomic", READ),
    ("store", "load", WRITTEN),
    ("store", "store", WRITTEN),
    ("store", "atomic", WRITTEN),
    ("store", "swap", WRITTEN),
    ("store, atomic", "atomic", WRITTEN),  # the atomic before does not hide the store
    ("atomic", "load", BY_ATOMICS),
    ("atomic", "store", BY_ATOMICS),
    ("atomic", "atomic", None),
    ("swap", "store", BY_ATOMICS),
    ("swap", "atomic", None),
]


@pytest.mark.parametrize(("first", "second", "told"), ORDERS)
def test_what_two_programs_may_do_to_one_element(first: str, second: str, told: str | None) -> None:
    x = torch.zeros(1, dtype=torch.int32)
    with CHECK.options(seed=None):
        if told is None:
            two_kernel[(2,)](x, FIRST=first, SECOND=second)
        else:
            with pytest.raises(CheckError, match=rf"program \(1, 0, 0\): race: .* of element 0 of x, which {told}"):
                two_kernel[(2,)](x, FIRST=first, SECOND=second)


def test_a_program_may_write_what_only_it_has_read() -> None:
    x = torch.zeros(1, dtype=torch.int32)
    with CHECK.options(seed=None):
        two_kernel[(1,)](x, FIRST="", SECOND="load, store")
        with pytest.raises(CheckError, match=r"program \(2, 0, 0\): race: store of .*, which several programs read"):
            two_kernel[(3,)](x, FIRST="load", SECOND="load, store")


def test_an_element_of_two_sizes() -> None:
    """A race is also seen where one program writes half of what another writes."""

    def launch(fault: int) -> None:
        memory = torch.zeros(4, dtype=torch.int16)
        halves_kernel[(2,)](memory, memory.view(torch.int32), FAULT=fault)
        assert memory.tolist() == [0, 7, 9, 0]

    launch(0)
    with pytest.raises(CheckError, match=r"race: store of element 1 of narrow\+wide"):
        launch(1)


@triton.jit
def halves_kernel(narrow, wide, FAULT: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(narrow + 1, 7)
    else:
        tl.store(wide + 1 - FAULT, 9)


@triton.jit
def masked_off_kernel(x, total, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    if not FAULT:
        value = tl.where(i < n, value, 0)
    tl.store(total, tl.sum(value.to(tl.float32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool])
def test_a_lane_that_is_masked_off_holds_garbage(dtype: torch.dtype) -> None:
    x, total = torch.ones(5).to(dtype), torch.zeros(1)

    def launch(fault: int) -> float:
        masked_off_kernel[(1,)](x, total, 5, FAULT=fault, BLOCK=BLOCK)
        return total.item()

    assert launch(0) == 5
    leaked = launch(1)
    assert leaked != leaked if dtype.is_floating_point else leaked in (5 - 3 * 3, 5 + 3 * 253, 8)
    with CHECK.options(poison=False):
        assert launch(1) == 5  # what Triton's own interpreter makes of it


@triton.jit
def nothing_kernel(x, out, HAS_OTHER: tl.constexpr):
    if HAS_OTHER:
        tl.store(out, tl.load(x, mask=tl.program_id(0) > 0, other=0.0))
    else:
        tl.store(out, tl.load(x, mask=tl.program_id(0) > 0))


def test_a_scalar_that_is_masked_off() -> None:
    """The interpreter takes an `other` of 0 for none."""
    x, out = torch.ones(1), torch.ones(1)
    nothing_kernel[(1,)](x, out, HAS_OTHER=True)
    assert out.item() == 0
    nothing_kernel[(1,)](x, out, HAS_OTHER=False)
    assert out.isnan()


# ---- the order of programs -------------------------------------------------------------------------------------------


@triton.jit
def order_kernel(counter, order):
    tl.store(order + tl.program_id(0), tl.atomic_add(counter, 1))


def test_programs_run_in_the_order_of_the_seed() -> None:
    def order(seed: int | None) -> list[int]:
        out = torch.zeros(16, dtype=torch.int32)
        with CHECK.options(seed=seed):
            order_kernel[(16,)](torch.zeros(1, dtype=torch.int32), out)
        return out.tolist()

    in_place = list(range(16))
    assert order(None) == in_place
    assert order(0) == order(0)
    assert len({tuple(order(seed)) for seed in (None, 0, 1, 2)}) == 4
    assert sorted(order(1)) == in_place


def test_options_come_back_and_an_unknown_one_is_refused() -> None:
    before = vars(CHECK).copy()
    options = CHECK.options(races=False, seed=9)
    options.__enter__()
    assert (CHECK.races, CHECK.seed) == (False, 9)
    options.__exit__(None, None, None)
    assert vars(CHECK) == before
    with pytest.raises(TypeError, match="no such options: race; there are bounds, races, overflow, poison, seed"):
        CHECK.options(race=False).__enter__()


# ---- counting --------------------------------------------------------------------------------------------------------


@triton.jit
def twice_kernel(x, flags, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0) + tl.load(x + i, mask=i < n, other=0.0)
    flag = tl.load(flags + tl.arange(0, BLOCK))
    tl.store(out + i, value + flag, mask=i < n)


def test_traffic_counts_the_active_lanes_of_each_argument() -> None:
    n = 13  # in two programs of 8 lanes
    x, flags, out = torch.ones(n), torch.ones(BLOCK, dtype=torch.bool), torch.zeros(n, dtype=torch.float64)
    with traffic() as moved:
        twice_kernel[(2,)](x, flags, out, n, BLOCK=BLOCK)
    assert moved["x"] == strict_interpreter.Moved(loads=2 * 13 * 4, distinct_loads=13 * 4)
    assert moved["flags"] == strict_interpreter.Moved(loads=2 * 8, distinct_loads=8)
    assert moved["out"] == strict_interpreter.Moved(stores=13 * 8, distinct_stores=13 * 8)
    assert (moved.total.loads, moved.total.stores) == (2 * 13 * 4 + 16, 13 * 8)
    assert moved.total.distinct == 13 * 4 + 8 + 13 * 8
    with pytest.raises(KeyError, match="no launch had memory in an argument 'y'"):
        _ = moved["y"]


def test_traffic_of_views_atomics_and_several_launches() -> None:
    memory = torch.zeros(5, 3)
    counter, order = torch.zeros(2, 8, dtype=torch.int32)  # views of one storage are counted apart
    with traffic() as moved, CHECK.options(races=False):
        for _ in range(2):
            column_kernel[(1,)](memory[:, 1], memory[:, 1], 3, 5, BLOCK=BLOCK)
        order_kernel[(3,)](counter, order)
    order_kernel[(3,)](counter, order)  # no longer counted
    assert moved["x"] == moved["out"] == strict_interpreter.Moved(40, 40, 40, 40)
    assert moved["counter"] == strict_interpreter.Moved(12, 12, 4, 4)
    assert moved["order"] == strict_interpreter.Moved(stores=12, distinct_stores=12)
    assert moved.total == strict_interpreter.Moved(52, 64, 44, 56)
    assert [kernel for kernel, _ in moved.launches] == ["column_kernel", "column_kernel", "order_kernel"]


def test_launches_are_counted() -> None:
    with launches() as outer:
        run("out of bounds load", fault=False)
        with launches() as inner:
            run("device_assert", fault=False)
            run("race of stores", fault=False)
    assert inner == ["assert_kernel", "stores_race_kernel"]
    assert outer == ["load_kernel", *inner]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_op_of_ours(dtype: torch.dtype) -> None:
    """The bytes per token that its module promises, each moved once."""
    n = 2048 + 700  # a whole block and a part
    index = fa.segments((torch.arange(n) // 100 % 7).to(torch.int32), torch.tensor([0, 700, n]), backend="reference")
    table = fa.SegmentTable(torch.randn(index.count, dtype=dtype), index)
    mask = torch.arange(n) % 3 > 0
    with traffic() as moved, launches() as kernels:
        tokens = fa.segment_tokens(table, mask, backend="triton")
    assert torch.equal(tokens, fa.segment_tokens(table, mask, backend="cpu"))
    assert kernels == ["segment_tokens_kernel"]
    main = [(name, moved[name]) for name in ("turn_ids", "mask", "tokens")]
    assert sum(bytes_.loads + bytes_.stores for _, bytes_ in main) == n * (4 + 1 + dtype.itemsize)
    assert all(bytes_.loads + bytes_.stores == bytes_.distinct for _, bytes_ in main)
    assert moved["values"].distinct <= index.count * dtype.itemsize


# ---- installing ------------------------------------------------------------------------------------------------------


def test_another_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    with pytest.raises(RuntimeError, match=r"this is Triton 3\.10\.0, .* that constraints\.txt pins"):
        strict_interpreter.install()


def test_a_triton_that_lacks_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class NewMethods:
        def create_what(self) -> None:
            pass

    replaced = {**strict_interpreter.REPLACED, "InterpreterBuilder": NewMethods}
    monkeypatch.setattr(strict_interpreter, "REPLACED", replaced)
    monkeypatch.delattr(interpreter, "_get_np_dtype")
    monkeypatch.delattr(interpreter, "ScanOps")
    lacks = (
        r"lacks _get_np_dtype, InterpreterBuilder\.create_what, ScanOps\.check_tensor; install the version of triton"
    )
    with pytest.raises(RuntimeError, match=lacks):
        strict_interpreter.install()


def test_installing_twice_changes_nothing() -> None:
    before = vars(interpreter).copy()
    strict_interpreter.install()
    assert vars(interpreter) == before


def test_without_the_interpreter_nothing_is_counted_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="kernels are compiled here"):
        launches().__enter__()


def test_whatever_imports_our_kernels_gets_the_strict_interpreter() -> None:
    """Nothing imports triton before."""
    code = """
import conftest, sys, fastadv
print("triton" in sys.modules, end=" ")
from fastadv.triton_kernels import segments
from triton.runtime import interpreter
print(type(interpreter.interpreter_builder).__name__)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    here = Path(__file__).parent
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert process.stdout.strip() == "False StrictInterpreterBuilder", process.stderr
