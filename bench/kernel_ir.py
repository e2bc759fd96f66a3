"""Reads what Triton made of a kernel before it chose registers (TTIR): where addresses come from.

The machine code always holds 64-bit addresses, for pointers have 64 bits. Whether the offset that was added had them
can only be seen here: `program_id * BLOCK` without a cast to int64 is multiplied in 32 bits and wraps around at 2^31.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

NAME = r"%[\w.$-]+(?:#\d+)?"
RESULT = re.compile(rf'^({NAME})(?::\d+)? = "?([\w.]+)"?(.*)$')
ARGUMENT = re.compile(rf"({NAME}): ([^,){{]+)")
ASSIGNED = re.compile(rf"({NAME}) = ({NAME})")
BOUNDS = re.compile(rf"({NAME}) = ({NAME}) to ({NAME}) step {NAME}(.*)")
LOCATION = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
TYPE = re.compile(r"^(?:tensor<((?:\d+x)+))?(?:!tt\.ptr<)?(\w+)")
BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}
VECTOR = 16  # bytes that a thread moves with one instruction

SAME = ("broadcast", "extsi", "extui", "bitcast", "index_cast", "index_castui")
MOVING = ("reshape", "trans", "gather", "join", "cat")
NARROWING = ("trunci", "fptosi", "fptoui")  # whoever writes `.to(tl.int32)` says that the value is small
WRAPPING = ("addi", "subi", "muli", "shli")
LIMITING = ("minsi", "minui", "andi", "remsi", "remui")  # no larger than the smaller of two
COMBINING = ("maxsi", "maxui", "divsi", "divui", "ori", "xori", "shrsi", "shrui")


class Range(IntEnum):
    """What is known of an integer's size."""

    SMALL = 0  # of constants, of places within a block, and of what was cast to 32 bits on purpose
    ANY = 1  # any value of its type: arguments, program ids, loaded values
    WRAPPED = 2  # computed in 32 bits or fewer from what may be any value, and so perhaps wrapped around


class Shape(IntEnum):
    """How a tensor changes along its last dimension."""

    UNIFORM = 0  # not at all; also scalars
    CONTIGUOUS = 1  # by one from place to place
    OTHER = 2


@dataclass(frozen=True)
class Value:
    """What is known of one value of the program."""

    range: Range = Range.ANY
    shape: Shape = Shape.OTHER
    argument: str = ""  # of a pointer: the kernel's argument that it points into

    def joined(self, other: Value | None) -> Value:
        """What holds if it may be either of two."""
        if other is None:
            return self
        return Value(
            max(self.range, other.range),
            self.shape if self.shape == other.shape else Shape.OTHER,
            self.argument if self.argument == other.argument else "",
        )


@dataclass(frozen=True)
class Stream:
    """A load or store of consecutive places."""

    argument: str
    stores: bool
    masked: bool
    places: int  # of the whole block
    size: int  # bytes of a place
    branches: tuple[tuple[int, int], ...] = ()  # the conditions that it is under, and the side of each

    @property
    def bytes(self) -> int:
        """What the whole block moves."""
        return self.places * self.size


def vectors(streams: Iterable[Stream], threads: int, *, stores: bool) -> dict[str, int]:
    """Accesses of 16 bytes that full blocks of each argument's loads, or stores, take of a thread, if any.

    What has no mask is that of full blocks; of two sides of a condition the one that moves more counts, for the
    compiler may put them together. An argument that is always masked, perhaps at multiples of 16 bytes, has to be moved
    so once.
    """
    wide = [s for s in streams if s.stores == stores and s.bytes >= VECTOR * threads]
    needed: dict[str, int] = {}
    for stream in wide:
        along = [s for s in wide if s.argument == stream.argument and s.branches == stream.branches[: len(s.branches)]]
        full = sum(s.bytes // (VECTOR * threads) for s in along if not s.masked)
        needed[stream.argument] = max(full, needed.get(stream.argument, 0))
    for name in (name for name, number in needed.items() if not number):
        needed[name] = min(s.bytes // (VECTOR * threads) for s in wide if s.argument == name)
    return needed


def short_load(streams: Iterable[Stream], threads: int) -> str:
    """The largest load, in words, if it takes less than 16 bytes of a thread; nothing of a mask's single bytes."""
    loads = [stream for stream in streams if not stream.stores]
    if not loads:
        return "it loads no consecutive places"
    largest = max(loads, key=lambda stream: stream.bytes)
    if largest.bytes >= VECTOR * threads or largest.size == 1:
        return ""
    return f"its largest load, of {largest.argument}, takes {largest.bytes / threads:g} bytes of a thread"


@dataclass
class _Region:
    """An operation with code inside."""

    operation: str
    line: int
    result: str
    side: int = 0  # of a condition
    reduced: Range = Range.ANY  # what a reduction or a scan combines
    passed: tuple[str, ...] = ()  # what the condition of a scf.while hands to its body, and out of the loop


class Program:
    """One kernel's TTIR, read again until nothing more is learnt of what its loops carry.

    Attributes:
        narrow: arguments with an offset that may have wrapped around.
        streams: loads and stores of consecutive places.
    """

    def __init__(self, text: str) -> None:
        self._lines = [LOCATION.sub("", line).strip() for line in text.splitlines()]
        self._carried: dict[tuple[int, int], Value] = {}  # by the line of the region, and the place among its results
        self._learnt = True
        while self._learnt:
            self._learnt = False
            self.narrow: set[str] = set()
            self.streams: list[Stream] = []
            self._values: dict[str, Value] = {}
            self._regions: list[_Region] = []
            for number, line in enumerate(self._lines):
                self._read(number, line)

    def _read(self, number: int, line: str) -> None:
        match = RESULT.match(line)
        if line.startswith("}"):
            if line.endswith("{"):  # else {, do {
                self._regions[-1].side += 1
            else:
                self._close(line)
        elif line.endswith("{"):
            result, operation, rest = match.groups() if match else ("", *line.partition(" ")[::2])
            self._regions.append(_Region(operation, number, result))
            self._open(self._regions[-1], rest)
        elif line.startswith("^"):
            passed = self._regions[-1].passed
            for i, (name, kind) in enumerate(ARGUMENT.findall(line)):
                self._values[name] = self._get(passed[i]) if i < len(passed) else _unknown(kind)
        elif line.startswith("scf.yield"):
            for i, name in enumerate(re.findall(NAME, line)):
                self._carry(self._regions[-1].line, i, self._get(name))
        elif line.startswith("scf.condition"):
            self._regions[-1].passed = tuple(re.findall(NAME, line)[1:])
        elif line.startswith("tt.store"):
            self._access(line, stores=True)
        elif match:
            name, operation, rest = match.groups()
            self._values[name] = self._result(operation, rest)

    def _open(self, region: _Region, rest: str) -> None:
        if region.operation in ("tt.reduce", "tt.scan"):
            region.reduced = max(self._get(name).range for name in re.findall(NAME, rest))
        if region.operation == "tt.func":
            for name, kind in ARGUMENT.findall(rest):
                self._values[name] = Value(Range.ANY, Shape.UNIFORM, name[1:] if "ptr" in kind else "")
        if region.operation == "scf.for" and (bounds := BOUNDS.search(rest)):
            name, first, last, rest = bounds.groups()
            self._values[name] = Value(max(self._get(first).range, self._get(last).range), Shape.UNIFORM)
        if region.operation in ("scf.for", "scf.while"):
            for i, (name, start) in enumerate(ASSIGNED.findall(rest)):
                if region.operation == "scf.for":  # which yields what it started with if it runs no turn
                    self._carry(region.line, i, self._get(start))
                self._values[name] = self._get(start).joined(self._carried.get((region.line, i)))

    def _close(self, line: str) -> None:
        region = self._regions.pop()
        results = [self._get(name) for name in region.passed]
        while not region.passed and (value := self._carried.get((region.line, len(results)))) is not None:
            results.append(value)
        if not results:
            self._values[region.result] = replace(_unknown(line.rpartition("-> ")[2]), range=region.reduced)
        for i, value in enumerate(results):
            self._values[f"{region.result}#{i}" if len(results) > 1 else region.result] = value

    def _carry(self, line: int, place: int, value: Value) -> None:
        known = self._carried.get((line, place))
        self._carried[line, place] = value.joined(known)
        self._learnt |= self._carried[line, place] != known

    def _get(self, name: str) -> Value:
        return self._values.get(name, Value())

    def _result(self, operation: str, rest: str) -> Value:
        kind = rest.rpartition(" : ")[2].rpartition("-> ")[2].rpartition(" to ")[2]
        if operation == "tt.load":
            self._access(rest, stores=False)
        given = [self._get(name) for name in re.findall(NAME, rest)]
        value = self._computed(operation.rpartition(".")[2], given, rest, kind)
        return value if kind.startswith("tensor") else replace(value, shape=Shape.UNIFORM)

    def _computed(self, operation: str, given: list[Value], rest: str, kind: str) -> Value:
        sizes, element = _type(kind)
        shape = Shape.UNIFORM if all(v.shape == Shape.UNIFORM for v in given) else Shape.OTHER
        largest = max((v.range for v in given), default=Range.SMALL)
        wrapped = largest if largest == Range.WRAPPED else None
        if operation == "make_range":
            return Value(Range.SMALL, Shape.CONTIGUOUS)
        if operation == "get_program_id":  # the grid has at most 65,535 programs along y and z
            return Value(Range.ANY if rest.startswith(" x") else Range.SMALL)
        if operation in MOVING:
            return Value(given[0].range)
        if operation in NARROWING:
            return Value(wrapped or Range.SMALL, given[0].shape)
        if operation == "constant":
            return Value(Range.SMALL, Shape.OTHER if "dense<[" in rest else Shape.UNIFORM)
        if operation == "addptr":
            if given[1].range == Range.WRAPPED:
                self.narrow.add(given[0].argument or "a pointer")
            return Value(Range.ANY, _sum(given, shape), given[0].argument)
        if operation in SAME:
            return given[0]
        if operation in ("splat", "expand_dims"):
            spread = operation == "splat" or f"axis = {len(sizes) - 1}" in rest
            return replace(given[0], shape=Shape.UNIFORM) if spread else given[0]
        if operation == "select":
            return Value(max(given[1].range, given[2].range), shape)
        if operation in WRAPPING:
            shape = _sum(given, shape) if operation == "addi" else shape
            wraps = largest > Range.SMALL and element in ("i8", "i16", "i32")
            return Value(Range.WRAPPED if wraps else largest, shape)
        if operation in LIMITING:
            smallest = min(v.range for v in given)
            return Value(wrapped or smallest, shape)
        if operation in COMBINING:
            return Value(largest, shape)
        return Value(Range.SMALL if operation.startswith("cmp") else Range.ANY, shape)

    def _access(self, rest: str, *, stores: bool) -> None:
        given = [self._get(name) for name in re.findall(NAME, rest)]
        sizes, element = _type(rest.rpartition(" : ")[2])
        masked = len(given) > 1 + stores
        if given[0].shape == Shape.CONTIGUOUS and given[0].argument and element in BYTES:
            branches = tuple((r.line, r.side) for r in self._regions if r.operation == "scf.if")
            self.streams.append(Stream(given[0].argument, stores, masked, math.prod(sizes), BYTES[element], branches))


def _unknown(kind: str) -> Value:
    return Value(Range.ANY, Shape.OTHER if kind.startswith("tensor") else Shape.UNIFORM)


def _sum(given: list[Value], otherwise: Shape) -> Shape:
    one_moves = sorted(v.shape for v in given) == [Shape.UNIFORM, Shape.CONTIGUOUS]
    return Shape.CONTIGUOUS if one_moves else otherwise


def _type(kind: str) -> tuple[list[int], str]:
    """Sizes and elements of a type: those that a pointer points to."""
    found = TYPE.match(kind)
    if found is None:
        return [], ""
    return [int(size) for size in (found[1] or "").split("x") if size], found[2]
