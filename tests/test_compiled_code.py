"""Reading machine code and TTIR, names of configurations, and what counts as worse; nothing is compiled here."""

from __future__ import annotations

import dataclasses
import json
import sys
import types

import pytest
from fastadv.triton_kernels._launch import Configuration

from bench import compiled_code, compiled_report, kernel_ir, kernel_registry, machine_code
from bench.compiled_code import MULTIPROCESSORS, Facts
from bench.kernel_ir import Stream


def listing(*lines: str) -> str:
    """Machine code as cuobjdump prints it, 16 bytes an instruction."""
    text = [f"        /*{16 * i:04x}*/   {line} ;   /* 0x000000061c32c981 */" for i, line in enumerate(lines)]
    return "\n".join(["\t\tFunction : k", *text])


def loops(*lines: str) -> list[list[int]]:
    return [sorted(loop) for loop in machine_code.loops(machine_code.instructions(listing(*lines)))]


def test_instructions_are_read_without_the_padding() -> None:
    code = machine_code.instructions(
        listing("LDC R1, c[0x0][0x28]", "@!UP0 LDG.E.LTC128B.128 R8, desc[UR6][R4.64+0x10]", "EXIT", "BRA 0x30", "NOP")
    )
    assert [i.name for i in code] == ["LDC", "LDG", "EXIT"]
    assert code[1] == machine_code.Instruction(16, "@!UP0", "LDG.E.LTC128B.128", "R8, desc[UR6][R4.64+0x10]")
    assert (code[1].bits, code[1].wide_address) == (128, True)


@pytest.mark.parametrize(
    ("opcode", "operands", "bits", "wide"),
    [
        ("LDG.E", "R50, [R28.64]", 32, True),  # sm_80
        ("LDG.E.U8.CONSTANT", "R5, desc[UR6][R2.U32+UR4]", 8, True),
        ("LDG.E.U16", "R5, desc[UR6][R2.64]", 16, True),
        ("LDG.E.64", "R50, desc[UR6][R54.64+0x8]", 64, True),
        ("LDG.E.ENL2.256", "R8, R4, desc[UR6][R2.64]", 256, True),  # sm_100
        ("LDGSTS.E.BYPASS.128", "[R7], desc[UR6][R2.64]", 128, True),
        ("LDG", "R5, [R2]", 32, False),
        ("LDG.E", "R5, [R2]", 32, False),
    ],
)
def test_widths_of_accesses(opcode: str, operands: str, bits: int, wide: bool) -> None:
    access = machine_code.Instruction(0, "", opcode, operands)
    assert (access.bits, access.wide_address) == (bits, wide)
    counted = machine_code.count(listing(f"{opcode} {operands}", "EXIT"))
    assert (counted.loads, counted.narrow_pointers) == ({str(bits): 1}, int(not wide))


def test_a_branch_back_to_code_that_does_not_return_is_no_loop() -> None:
    """The compiler puts rare code behind the rest, from where it jumps back."""
    assert loops("NOP", "@P0 BRA 0x40", "FADD R1, R1, R1", "EXIT", "MUFU.RCP R1, R1", "BRA 0x20") == []
    assert loops("NOP", "BRA.DIV UR4, 0x30", "EXIT", "FADD R1, R1, R1", "BRA 0x20") == []


def test_loops_and_loops_within_loops() -> None:
    nested = ("NOP", "FADD R1, R1, R1", "FMUL R1, R1, R1", "@P0 BRA 0x20", "@P1 BRA 0x10", "EXIT")
    assert loops(*nested) == [[1, 2, 3, 4], [2, 3]]
    assert machine_code.count(listing(*nested)).loops == (4, 2)
    assert machine_code.count(listing(*nested)).in_loops == 4
    assert loops("@P0 BRA 0x0", "EXIT") == [[0]]
    assert loops("FADD R1, R1, R1", "@P0 BRA 0x0", "EXIT") == [[0, 1]]


def test_what_a_loop_calls_is_in_it() -> None:
    """A float64 division is a routine behind the kernel's end."""
    code = ("NOP", "CALL.REL.NOINC 0x40", "@P0 BRA 0x10", "EXIT", "DFMA R2, R2, R2, R2", "RET.REL.NODEC R4 0x0")
    assert loops(*code) == [[1, 2, 4, 5]]
    assert machine_code.count(listing(*code)).float64_in_loops == 1
    outside = ("CALL.REL.NOINC 0x30", "@P0 BRA 0x10", "EXIT", "DFMA R2, R2, R2, R2", "RET.REL.NODEC R4 0x0")
    assert machine_code.count(listing(*outside)).float64_in_loops == 0
    assert machine_code.count(listing(*outside)).float64 == 1


def test_float64_around_a_stream_is_not_in_it() -> None:
    nested = ["NOP", "FADD R1, R1, R1", "FMUL R1, R1, R1", "@P0 BRA 0x20", "@P1 BRA 0x10", "EXIT"]
    for place, inside in ((1, 0), (2, 1)):
        code = [*nested]
        code[place] = "DADD R2, R2, R4"
        assert machine_code.count(listing(*code)).float64_in_loops == inside


def test_a_call_that_does_not_come_back_is_a_jump() -> None:
    """So ptxas leaves a loop for sm_80; the float64 sum behind it is not in it."""
    code = ("NOP", "@P0 CALL.REL.NOINC 0x30", "BRA 0x0", "DADD R2, R2, R4", "EXIT")
    assert loops(*code) == [[0, 1, 2]]
    assert machine_code.count(listing(*code)).float64_in_loops == 0
    assert loops("NOP", "CALL.REL.NOINC 0x30", "BRA 0x0", "DADD R2, R2, R4", "EXIT") == []


def test_a_loop_in_a_routine() -> None:
    code = ("CALL.REL.NOINC 0x20", "EXIT", "FADD R1, R1, R1", "@P0 BRA 0x20", "RET.REL.NODEC R4 0x0")
    assert loops(*code) == [[2, 3]]


def test_threads_that_met_go_on_behind_their_barrier() -> None:
    back = ("BSSY B0, 0x40", "@P0 BRA 0x30", "BSYNC B0", "BRA 0x20", "EXIT")
    assert loops(*back) == []


def test_an_indirect_branch_is_refused() -> None:
    with pytest.raises(ValueError, match="an indirect branch at 0x0"):
        loops("BRX R4 0x0", "EXIT")


def test_kinds_of_instructions() -> None:
    float64 = ["DADD R2, R2, R4", "F2F.F64.F32 R2, R1", "F2F.F32.F64 R2, R4", "MUFU.RCP64H R3, R5", "I2F.F64 R4, R2"]
    local = ["LDL R1, [R2]", "STL [R2], R1", "STL [R2+0x4], R1"]
    atomics = ["REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5", "ATOMG.E.ADD.STRONG.GPU PT, R2, [R2.64], R5"]
    others = ["FADD R1, R1, R1", "STG.E.128 desc[UR4][R2.64], R4", "EXIT"]
    counted = machine_code.count(listing(*float64, "DSETP.GEU.AND P0, PT, R2, R4, PT", *local, *atomics, *others))
    assert (counted.local_loads, counted.local_stores) == (1, 2)
    assert (counted.float64, counted.float64_in_loops) == (6, 0)
    assert counted.float_atomics == 1  # of integers, the order does not matter
    assert counted.stores == {"128": 1}


HEAD = 'tt.func public @k(%x: !tt.ptr<bf16> loc("x"(#loc)), %y: !tt.ptr<f32> {tt.divisibility = 16 : i32}, %n: i64) {'
PLACES = """
  %range = tt.make_range {end = 2048 : i32, start = 0 : i32} : tensor<2048xi32> loc(#loc1)
  %pid = tt.get_program_id x : i32
  %block = arith.constant 2048 : i32
  %wide_block = arith.constant 2048 : i64
  %wide_pid = arith.extsi %pid : i32 to i64
  %wide_range = arith.extsi %range : tensor<2048xi32> to tensor<2048xi64>
  %start = arith.muli %wide_pid, %wide_block : i64
  %starts = tt.splat %start : i64 -> tensor<2048xi64>
  %good = arith.addi %starts, %wide_range : tensor<2048xi64>
  %short = arith.muli %pid, %block : i32
  %shorts = tt.splat %short : i32 -> tensor<2048xi32>
  %bad = arith.addi %shorts, %range : tensor<2048xi32>
  %late = arith.extsi %bad : tensor<2048xi32> to tensor<2048xi64>
  %cast = arith.trunci %good : tensor<2048xi64> to tensor<2048xi32>
  %pid_y = tt.get_program_id y : i32
  %short_y = arith.muli %pid_y, %block : i32
  %along_y = tt.splat %short_y : i32 -> tensor<2048xi32>
  %xs = tt.splat %x : !tt.ptr<bf16> -> tensor<2048x!tt.ptr<bf16>>
  %ys = tt.splat %y : !tt.ptr<f32> -> tensor<2048x!tt.ptr<f32>>
"""


def program(*lines: str) -> kernel_ir.Program:
    return kernel_ir.Program("module {\n" + HEAD + PLACES + "\n".join(lines) + "\n tt.return\n}\n}")


@pytest.mark.parametrize(
    ("offset", "type_", "narrow"),
    [
        ("good", "i64", False),
        ("bad", "i32", True),
        ("late", "i64", True),
        ("range", "i32", False),
        ("cast", "i32", False),  # on purpose
        ("along_y", "i32", False),  # at most 65,535 programs
    ],
)
def test_offsets_that_were_computed_in_32_bits(offset: str, type_: str, narrow: bool) -> None:
    at = f"%at = tt.addptr %ys, %{offset} : tensor<2048x!tt.ptr<f32>>, tensor<2048x{type_}>"
    assert program(at).narrow == ({"y"} if narrow else set())


def test_an_offset_that_a_loop_carries() -> None:
    """It wraps around at the end of one turn, and is added at the beginning of the next."""
    lines = [
        "%zero = arith.constant 0 : i32",
        "%end = scf.for %i = %zero to %pid step %block iter_args(%place = %zero) -> (i32) : i32 {",
        "  %at = tt.addptr %y, %place : !tt.ptr<f32>, i32",
        "  %next = arith.addi %place, %STEP : i32",
        "  scf.yield %next : i32",
        "}",
    ]
    assert program(*(line.replace("%STEP", "%i") for line in lines)).narrow == {"y"}
    behind = [line for line in lines if "addptr" not in line] + ["%at = tt.addptr %y, %end : !tt.ptr<f32>, i32"]
    assert program(*(line.replace("%STEP", "%pid") for line in behind)).narrow == {"y"}
    assert program(*(line.replace("%STEP", "%zero") for line in lines)).narrow == set()


@pytest.mark.parametrize(("summed", "narrow"), [("range", False), ("pids", True)])
def test_a_sum_is_small_if_what_it_adds_is(summed: str, narrow: bool) -> None:
    lines = [
        "%pids = tt.splat %pid : i32 -> tensor<2048xi32>",
        f'%sum = "tt.reduce"(%{summed}) <{{axis = 0 : i32}}> ({{',
        "^bb0(%a: i32 loc(#loc), %b: i32 loc(#loc)):",
        "  %c = arith.addi %a, %b : i32",
        "  tt.reduce.return %c : i32",
        "}) : (tensor<2048xi32>) -> i32",
        "%twice = arith.addi %sum, %sum : i32",
        "%at = tt.addptr %y, %twice : !tt.ptr<f32>, i32",
    ]
    assert program(*lines).narrow == ({"y"} if narrow else set())


def test_what_a_loops_condition_passes_on() -> None:
    lines = [
        "%ends:2 = scf.while (%first = %short, %left = %start) : (i32, i64) -> (i32, i64) {",
        "  %more = arith.cmpi sgt, %left, %wide_block : i64",
        "  scf.condition(%more) %first, %left : i32, i64",
        "} do {",
        "^bb0(%at: i32 loc(#loc), %rest: i64 loc(#loc)):",
        "  scf.yield %pid, %rest : i32, i64",
        "} loc(#loc4)",
    ]
    assert program(*lines, "%a = tt.addptr %y, %ends#0 : !tt.ptr<f32>, i32").narrow == {"y"}
    assert program(*lines, "%a = tt.addptr %y, %ends#1 : !tt.ptr<f32>, i64").narrow == set()


def test_streams_are_of_consecutive_places() -> None:
    many = "tensor<2048x!tt.ptr<bf16>>"
    found = program(
        f"%a = tt.addptr %xs, %good : {many}, tensor<2048xi64>",
        f"%b = tt.load %a cacheModifier = ca evictionPolicy = evict_first : {many}",
        "%m = arith.cmpi slt, %good, %starts : tensor<2048xi64>",
        f"%c = tt.load %a, %m, %b : {many}",
        "%i = arith.extsi %b : tensor<2048xi16> to tensor<2048xi64>",
        f"%d = tt.addptr %xs, %i : {many}, tensor<2048xi64>",
        f"%e = tt.load %d : {many}",
        "%f = tt.addptr %ys, %good : tensor<2048x!tt.ptr<f32>>, tensor<2048xi64>",
        "tt.store %f, %b : tensor<2048x!tt.ptr<f32>>",
        "tt.store %f, %b, %m : tensor<2048x!tt.ptr<f32>>",
    ).streams
    x, y = Stream("x", False, False, 2048, 2), Stream("y", True, False, 2048, 4)
    assert found == [x, dataclasses.replace(x, masked=True), y, dataclasses.replace(y, masked=True)]
    assert kernel_ir.vectors(found, 128, stores=False) == {"x": 2}  # the masked one is the end's
    assert kernel_ir.vectors(found, 128, stores=True) == {"y": 4}
    assert kernel_ir.vectors([x, x, y], 128, stores=False) == {"x": 4}
    assert kernel_ir.vectors(found, 512, stores=False) == {}  # 8 bytes a thread
    always_masked = [stream for stream in found if stream.masked]
    assert kernel_ir.vectors(always_masked * 2, 128, stores=False) == {"x": 2}


def test_of_two_sides_the_one_that_moves_more_counts() -> None:
    """The compiler puts what both sides load behind each other into one place."""
    many = "tensor<2048x!tt.ptr<bf16>>"
    lines = [
        f"%a = tt.addptr %xs, %good : {many}, tensor<2048xi64>",
        f"%b = tt.load %a : {many}",
        "%m = arith.cmpi slt, %start, %n : i64",
        "scf.if %m {",
        f"  %c = tt.load %a : {many}",
        f"  %d = tt.load %a : {many}",
        "} else {",
        f"  %c = tt.load %a : {many}",
        "} loc(#loc2)",
    ]
    found = program(*lines).streams
    assert len(found) == 4
    assert len({stream.branches for stream in found}) == 3
    assert kernel_ir.vectors(found, 128, stores=False) == {"x": 3 * 2}


def test_a_largest_load_that_is_short() -> None:
    x, mask = Stream("x", False, False, 2048, 2), Stream("mask", False, True, 2048, 1)
    assert kernel_ir.short_load([x, mask], 256) == ""
    assert kernel_ir.short_load([x, mask], 512) == "its largest load, of x, takes 8 bytes of a thread"
    assert kernel_ir.short_load([mask], 512) == ""  # a mask's bytes beside a wide store
    assert kernel_ir.short_load([dataclasses.replace(x, stores=True)], 128) == "it loads no consecutive places"


def test_streams_of_tiles() -> None:
    """A row's places are consecutive, whatever its rows are apart; a column's are not."""
    tile = "tensor<4x2048x!tt.ptr<f32>>"
    lines = [
        "%r = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32>",
        "%r1 = tt.expand_dims %r {axis = AXIS : i32} : tensor<4xi32> -> tensor<ROWS>",
        "%r2 = tt.broadcast %r1 : tensor<ROWS> -> tensor<4x2048xi32>",
        "%c1 = tt.expand_dims %range {axis = 0 : i32} : tensor<2048xi32> -> tensor<1x2048xi32>",
        "%c2 = tt.broadcast %c1 : tensor<1x2048xi32> -> tensor<4x2048xi32>",
        "%at = arith.addi %r2, %c2 : tensor<4x2048xi32>",
        f"%p = tt.splat %y : !tt.ptr<f32> -> {tile}",
        f"%a = tt.addptr %p, %at : {tile}, tensor<4x2048xi32>",
        f"%b = tt.load %a : {tile}",
    ]
    rows = [line.replace("AXIS", "1").replace("ROWS", "4x1xi32") for line in lines]
    assert program(*rows).streams == [Stream("y", False, False, 4 * 2048, 4)]
    doubled = [line.replace("AXIS", "0").replace("ROWS", "1x4xi32") for line in lines]
    assert program(*doubled).streams == []


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "occupancy"),
    [
        (32, 0, 8, 1.0),
        (33, 0, 8, 0.75),  # registers are handed out by 256 a warp: 40 a thread
        (255, 0, 4, 0.125),
        (16, 0, 1, 0.5),  # 32 blocks
        (32, 100 << 10, 4, 0.125),  # two blocks
        (32, 227 << 10, 4, 0.0625),
    ],
)
def test_occupancy(registers: int, shared: int, warps: int, occupancy: float) -> None:
    assert MULTIPROCESSORS[90].occupancy(registers, shared, warps) == occupancy


SOUND = Facts(
    instructions=200, in_loops=100, loops=(100,), loads={"16": 16, "128": 2}, stores={"128": 4}, narrow_pointers=0,
    local_loads=0, local_stores=0, float64=0, float64_in_loops=0, float_atomics=0, barriers_before_stores=0,
    tensor_core=0, target=90, warps=4, registers=40, stack=0, shared=4096, occupancy=0.75, streamed_loads={"x": 2},
    streamed_stores={"y": 4}, short_load="", narrow_offsets=(), recompiled=(), cached=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"stack": 8}, "spills: 0 loads and 0 stores of local memory, 8 bytes a thread, with 40 registers"),
        ({"local_loads": 3}, "spills: 3 loads and 0 stores of local memory, 0 bytes a thread, with 40 registers"),
        ({"shared": 227 * 1024}, None),
        ({"shared": 227 * 1024 + 1}, "232449 bytes of shared memory, at most 232448"),
        ({"shared": 163 * 1024 + 1, "target": 80}, "166913 bytes of shared memory, at most 166912"),
        ({"float64": 9}, None),  # outside of loops
        ({"float64_in_loops": 2}, "2 float64 instructions in innermost loops"),
        ({"narrow_pointers": 1}, "1 global accesses by addresses of fewer than 64 bits"),
        ({"loads": {"128": 1, "64": 2}}, "1 loads of 128 bits, where full blocks take 2 of a thread: x 2"),
        ({"loads": {"256": 2}}, None),
        ({"stores": {"32": 16}}, "0 stores of 128 bits, where full blocks take 4 of a thread: y 4"),
        ({"stores": {"32": 1}, "streamed_stores": {}}, None),  # sums
        ({"short_load": "its largest load is short"}, "its largest load is short"),
    ],
)
def test_complaints(changes: dict[str, object], complaint: str | None) -> None:
    changed = dataclasses.replace(SOUND, **changes)
    assert compiled_code.check(changed, streaming=True) == ([complaint] if complaint else [])


def test_a_kernel_that_works_in_place_needs_a_barrier() -> None:
    (complaint,) = compiled_code.check(SOUND, streaming=True, in_place=True)
    assert complaint.startswith("no barrier between")
    guarded = dataclasses.replace(SOUND, barriers_before_stores=1)
    assert compiled_code.check(guarded, streaming=True, in_place=True) == []


LOAD, STORE, WAIT = "LDG.E R2, desc[UR6][R4.64]", "STG.E desc[UR6][R4.64], R2", "BAR.SYNC.DEFER_BLOCKING 0x0"


@pytest.mark.parametrize(
    ("code", "barriers"),
    [
        ((LOAD, WAIT, STORE, "EXIT"), 1),
        ((LOAD, STORE, "EXIT"), 0),
        ((LOAD, STORE, WAIT, "EXIT"), 0),  # after the stores
        ((LOAD, STORE, WAIT, STORE, "EXIT"), 0),  # between them
        ((WAIT, LOAD, STORE, "EXIT"), 0),  # before the load
        ((LOAD, "@P0 BRA 0x30", WAIT, STORE, "EXIT"), 0),  # beside it
        (("@P0 BRA 0x30", LOAD, WAIT, STORE, "EXIT"), 1),  # threads that do not load need not wait
        ((LOAD, WAIT, STORE, "@P0 BRA 0x0", "EXIT"), 0),  # in a loop: of its exchange through shared memory
    ],
)
def test_barriers_between_a_load_and_stores(code: tuple[str, ...], barriers: int) -> None:
    assert machine_code.count(listing(*code)).barriers_before_stores == barriers


def test_streams_matter_where_they_are_claimed() -> None:
    """Kernels over rows and groups may gather, and add up in float64."""
    changed = dataclasses.replace(SOUND, loads={"32": 16}, stores={"32": 16}, short_load="short", float64_in_loops=1)
    assert compiled_code.check(changed, streaming=False) == []
    assert len(compiled_code.check(changed, streaming=True)) == 4


def test_a_launch_has_what_the_kernel_takes() -> None:
    def argument(name: str, type_: str = "i64", plain: bool = True) -> object:
        return types.SimpleNamespace(name=name, annotation_type=type_, do_not_specialize=plain)

    kernel = types.SimpleNamespace(
        params=[argument("x", ""), argument("n"), argument("scale", ""), argument("BLOCK", "")]
    )
    signature = (("x", "*fp32"), ("n", "i64"), ("scale", "fp32"))
    good = Configuration(kernel, signature, (("BLOCK", 8),), ())
    assert list(compiled_code.recompiled(good)) == []
    other = Configuration(kernel, signature, (("SIZE", 8),), ())
    assert [sentence.split(" ")[0] for sentence in compiled_code.recompiled(other)] == ["BLOCK", "SIZE"]


def record() -> dict[str, object]:
    return compiled_report.documented(SOUND)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"registers": 48}, ""),
        ({"registers": 49}, "49 registers, 40 before"),
        ({"registers": 20, "occupancy": 1.0, "instructions": 10, "in_loops": 1}, ""),
        ({"occupancy": 0.6875}, "occupancy 0.688, 0.750 before"),
        ({"local_stores": 1}, "1 loads and stores of spilled registers"),
        ({"instructions": 220, "in_loops": 110}, ""),
        ({"instructions": 221}, "221 instructions, 200 before"),
        ({"in_loops": 111}, "111 instructions in loops, 100 before"),
    ],
)
def test_what_is_worse_than_the_record(changes: dict[str, object], words: str) -> None:
    found = compiled_report.regressions("k[x fp32]", record(), dataclasses.replace(SOUND, **changes))
    if not words:
        assert found == []
        return
    (sentence,) = found
    assert sentence.startswith(f"k[x fp32]: {words}; ")
    assert "python -m bench.compiled_code" in sentence


class Named:
    def __init__(self, name: str) -> None:
        self.__name__ = name


class Listed:
    """A module of kernels that runs nothing."""

    one_kernel = Named("one_kernel")
    two_kernel = Named("two_kernel")
    forgotten_kernel = Named("forgotten_kernel")
    STREAMING = (one_kernel,)

    @classmethod
    def configurations(cls) -> list[Configuration]:
        def form(kernel: object, x: str, masked: bool, warps: int = 4) -> Configuration:
            signature = (("x", f"*{x}"), ("y", f"*{x}"), ("n", "i64"))
            return Configuration(kernel, signature, (("BLOCK", 8), ("MASKED", masked)), ("x", "y"), warps)

        ones = [form(cls.one_kernel, x, masked) for masked in (True, False) for x in ("bf16", "fp32", "bf16")]
        return [*ones, form(cls.one_kernel, "fp32", True, 8), form(cls.two_kernel, "fp16", True)]


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> tuple[kernel_registry.Entry, ...]:
    monkeypatch.setitem(sys.modules, "listed", Listed)
    return kernel_registry.entries("listed")


def test_configurations_have_names(listed: tuple[kernel_registry.Entry, ...]) -> None:
    """Named by what tells them apart: not y, which is like x, and not the block."""
    assert [entry.name for entry in listed] == [
        "listed.one_kernel[x bf16, MASKED=True, warps=4]",
        "listed.one_kernel[x fp32, MASKED=True, warps=4]",
        "listed.one_kernel[x bf16, MASKED=False, warps=4]",
        "listed.one_kernel[x fp32, MASKED=False, warps=4]",
        "listed.one_kernel[x fp32, MASKED=True, warps=8]",
        "listed.two_kernel",
    ]
    assert [entry.streaming for entry in listed] == [True] * 5 + [False]
    assert [entry.name for entry in kernel_registry.representatives(listed)] == [listed[i].name for i in (1, 3, 4, 5)]
    assert [entry.name for entry in kernel_registry.sample(listed, 2)] == [listed[i].name for i in (1, 3, 5)]
    assert kernel_registry.unlisted(Listed) == {"forgotten_kernel"}


def test_the_page_has_a_line_for_each_family(listed: tuple[kernel_registry.Entry, ...]) -> None:
    facts = {entry.name: dataclasses.replace(SOUND, registers=40 + i) for i, entry in enumerate(listed)}
    document = compiled_report.document(facts)
    lines = [line for line in compiled_report.page(listed, document).splitlines() if line.startswith("| `")]
    assert lines[0] == (
        "| `listed.one_kernel` MASKED=True, warps=4 **s** | 2 | 40 to 41 | 0.75 | 4096 | 2 of 18 | 4 of 4 | 200 | 100 |"
    )
    assert len(lines) == 4
    assert json.loads(compiled_report.text(document)) == json.loads(json.dumps(document))
    assert len(compiled_report.text(document).splitlines()) == 6 + len(facts) + 2


def test_modules_with_kernels() -> None:
    assert "fastadv.triton_kernels.segments" in kernel_registry.modules()
    assert not any("._" in name for name in kernel_registry.modules())
