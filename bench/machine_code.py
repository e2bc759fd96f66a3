"""Reads the machine code of a GPU kernel: its instructions, its loops, and how it moves data.

The text is that of `cuobjdump -sass`, one instruction a line: `/*0070*/ @!P0 LDG.E.128 R8, desc[UR6][R4.64] ;`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;", re.MULTILINE)
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
MATRIX = ("HGMMA", "HMMA", "UTCHMMA")
ENDS = ("EXIT", "RET", "KILL")
INDIRECT = ("BRX", "BRXU", "JMX", "JMXU")
FLOAT64 = re.compile(r"D(ADD|MUL|FMA|SETP|MNMX|MMA)\b|(F2F|F2I|I2F|FRND)\S*\.F64|MUFU\.\w*64H")
FLOAT_ATOMIC = re.compile(r"(ATOMG?|ATOMS|REDG?)\b.*\.(BF16|F16|F32|F64)")
BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}


@dataclass(frozen=True)
class Instruction:
    """One instruction: `opcode` with its modifiers, `operands` as printed."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> list[str]:
        """What follows the opcode's name, `E` and `128` of `LDG.E.128`."""
        return self.opcode.split(".")[1:]

    @property
    def target(self) -> int | None:
        """The address that a branch, a call or a BSSY names."""
        found = TARGET.search(self.operands)
        return int(found[1], 16) if found else None

    @property
    def bits(self) -> int:
        """Bits that a load or store moves for each thread."""
        return next((BITS[m] for m in self.modifiers if m in BITS), 32)

    @property
    def wide_address(self) -> bool:
        """Whether a global access takes a 64-bit address: `.E`, and a pair of registers `R4.64` or a uniform base."""
        place = self.operands.rpartition("[")[2]
        return "E" in self.modifiers and (".64" in place or "UR" in place)


def instructions(text: str) -> list[Instruction]:
    """The instructions of one function, without the padding behind its end."""
    found = [Instruction(int(address, 16), *rest) for address, *rest in LINE.findall(text)]
    while found and (found[-1].name == "NOP" or (found[-1].name == "BRA" and found[-1].target == found[-1].address)):
        found.pop()
    return found


def _flow(code: list[Instruction]) -> tuple[list[list[int]], dict[int, int]]:
    """Where each instruction may go on, and the first instruction of what each call runs, by index."""
    at = {instruction.address: i for i, instruction in enumerate(code)}
    meeting: dict[str, int] = {}  # where threads go on that have met at a barrier
    edges = []
    calls = {}
    for i, instruction in enumerate(code):
        name, target = instruction.name, at.get(instruction.target if instruction.target is not None else -1)
        ends = False
        branches: list[int] = []
        if name in INDIRECT:
            raise ValueError(f"an indirect branch at {instruction.address:#x}: its loops cannot be told")
        if name == "BSSY" and target is not None:
            meeting[instruction.operands.partition(",")[0]] = target
        elif name == "BSYNC" and instruction.operands in meeting:
            branches, ends = [meeting[instruction.operands]], True
        elif name == "BRA" and target is not None:
            branches, ends = [target], "," not in instruction.operands  # or with a condition: BRA.DIV UR4, 0x70
        elif name == "CALL" and target is not None:
            calls[i] = target
        elif name in ENDS:
            ends = True
        goes_on = i + 1 < len(code) and not (ends and not instruction.predicate)
        edges.append(branches + ([i + 1] if goes_on else []))
    for i, target in list(calls.items()):
        if not any(code[j].name == "RET" for j in _reached([target], edges, {})):  # a far jump
            edges[i] = [calls.pop(i), *(edges[i] if code[i].predicate else [])]
    return edges, calls


def _reached(starts: Iterable[int], edges: list[list[int]], calls: dict[int, int]) -> set[int]:
    """What may run after some instructions, with them, and what it calls."""
    reached: set[int] = set()
    waiting = list(starts)
    while waiting:
        i = waiting.pop()
        if i not in reached:
            reached.add(i)
            waiting += edges[i] + ([calls[i]] if i in calls else [])
    return reached


def _cycles(nodes: set[int], edges: list[list[int]]) -> list[set[int]]:
    """Largest sets of nodes that all reach each other (Tarjan), of one node only where it is its own successor."""
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    path: list[int] = []
    on_path: set[int] = set()
    found = []
    for root in sorted(nodes):
        if root in order:
            continue
        work = [(root, iter(edges[root]))]
        order[root] = lowest[root] = len(order)
        path.append(root)
        on_path.add(root)
        while work:
            node, rest = work[-1]
            following = next((n for n in rest if n in nodes and (n not in order or n in on_path)), None)
            if following is not None and following in order:
                lowest[node] = min(lowest[node], order[following])
            elif following is not None:
                order[following] = lowest[following] = len(order)
                path.append(following)
                on_path.add(following)
                work.append((following, iter(edges[following])))
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[node])
                if lowest[node] == order[node]:
                    cycle = set(path[path.index(node) :])
                    del path[path.index(node) :]
                    on_path -= cycle
                    if len(cycle) > 1 or node in edges[node]:
                        found.append(cycle)
    return found


def loops(code: list[Instruction]) -> list[set[int]]:
    """Each loop as the indices of its instructions and of what it calls; the loops within it are listed too."""
    edges, calls = _flow(code)
    found = []
    waiting = _cycles(set(range(len(code))), edges)
    while waiting:
        loop = waiting.pop(0)
        found.append(loop | _reached((calls[i] for i in loop if i in calls), edges, calls))
        entered = {j for i, following in enumerate(edges) if i not in loop for j in following if j in loop}
        waiting += _cycles(loop - (entered or {min(loop)}), edges)
    return found


def barriers_before_stores(code: list[Instruction]) -> int:
    """Barriers, outside of loops, that stand between a load and stores: past the last global load before such a
    barrier, no global store can be reached but through it."""
    edges, calls = _flow(code)
    looping = {i for loop in loops(code) for i in loop}
    barriers = [i for i, instruction in enumerate(code) if instruction.name == "BAR" and i not in looping]
    stores = {i for i, instruction in enumerate(code) if instruction.name == "STG"}
    found = 0
    for barrier in barriers:
        load = max((i for i in range(barrier) if code[i].name == "LDG"), default=None)
        if load is not None and stores & _reached([barrier], edges, calls):
            cut = [[j for j in following if j != barrier] for following in edges]
            found += not stores & _reached([load], cut, calls)
    return found


@dataclass(frozen=True)
class Counts:
    """How many instructions of which kind a kernel has."""

    instructions: int
    in_loops: int
    loops: tuple[int, ...]  # instructions of each loop, those of the loops inside it too
    loads: dict[str, int]  # global loads, asynchronous ones too, by bits
    stores: dict[str, int]  # global stores, by bits
    narrow_pointers: int  # global accesses whose address has not 64 bits
    local_loads: int
    local_stores: int
    float64: int
    float64_in_loops: int  # that hold no other loop: a loop around a stream may end each piece in float64
    float_atomics: int
    barriers_before_stores: int
    tensor_core: int  # matrix products


def count(text: str) -> Counts:
    """Counts the instructions of one function."""
    code = instructions(text)
    each = loops(code)
    looping = {i for loop in each for i in loop}
    innermost = {i for loop in each if not any(inner < loop for inner in each) for i in loop}
    loads = [i for i in code if i.name in ("LDG", "LDGSTS")]
    stores = [i for i in code if i.name == "STG"]
    return Counts(
        instructions=len(code),
        in_loops=len(looping),
        loops=tuple(sorted((len(loop) for loop in each), reverse=True)),
        loads=_by_bits(loads),
        stores=_by_bits(stores),
        narrow_pointers=sum(not i.wide_address for i in loads + stores),
        local_loads=sum(i.name == "LDL" for i in code),
        local_stores=sum(i.name == "STL" for i in code),
        float64=sum(bool(FLOAT64.match(i.opcode)) for i in code),
        float64_in_loops=sum(bool(FLOAT64.match(code[i].opcode)) for i in innermost),
        float_atomics=sum(bool(FLOAT_ATOMIC.match(i.opcode)) for i in code),
        barriers_before_stores=barriers_before_stores(code),
        tensor_core=sum(i.name in MATRIX for i in code),
    )


def _by_bits(accesses: Iterable[Instruction]) -> dict[str, int]:
    return {str(bits): n for bits, n in sorted(Counter(i.bits for i in accesses).items())}
