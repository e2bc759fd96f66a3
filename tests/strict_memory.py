"""What a kernel may touch, and who touched it: the checks of tests/strict_interpreter.py on memory, on numpy alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor


class CheckError(Exception):
    """A kernel does what goes wrong on a GPU."""


@dataclasses.dataclass
class Settings:
    """What is checked in the launches that follow."""

    bounds: bool = True  # each access is inside of an argument, and aligned
    races: bool = True  # between programs, and between the lanes of a store
    overflow: bool = True  # of integers of less than 64 bits
    poison: bool = True  # lanes that a load masks off without `other` hold garbage
    seed: int | None = 0  # of the order in which programs run; None: by their numbers

    @contextlib.contextmanager
    def options(self, **values: Any) -> Iterator[None]:
        """Sets some of them for a while: `with CHECK.options(seed=1, poison=False): ...`."""
        before = dataclasses.asdict(self)
        if unknown := values.keys() - before.keys():
            raise TypeError(f"no such options: {', '.join(sorted(unknown))}; there are {', '.join(before)}")
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


CHECK = Settings()

LOAD, STORE, ATOMIC = "load", "store", "atomic"  # kinds of access
NOBODY, BY_ATOMICS, BY_SEVERAL = 0, -1, -2  # who touched an element, beside the owner number of one program


@dataclasses.dataclass
class Moved:
    """Bytes that the active lanes of accesses move. An atomic is a load and a store."""

    loads: int = 0
    stores: int = 0
    distinct_loads: int = 0  # each byte counted once in a launch, however often it is loaded
    distinct_stores: int = 0

    @property
    def distinct(self) -> int:
        """The least that memory has to move: what is loaded again comes from a cache."""
        return self.distinct_loads + self.distinct_stores

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass
class Region:
    """The bytes of an argument, or of arguments that overlap, and which programs touched them in a launch."""

    names: list[str]
    start: int
    end: int
    item: int  # bytes of an element, the smallest of the arguments'
    loads: int = 0  # bytes, see Moved
    stores: int = 0

    @property
    def name(self) -> str:
        """For messages."""
        return "+".join(self.names)

    @functools.cached_property
    def writers(self) -> np.ndarray:
        """By element the latest of owner numbers and BY_ATOMICS, or NOBODY."""
        return np.zeros(-(-(self.end - self.start) // self.item), np.int32)

    @functools.cached_property
    def readers(self) -> np.ndarray:
        """By element an owner number, BY_SEVERAL or NOBODY."""
        return np.zeros_like(self.writers)

    def elements(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Those that accesses of `size` bytes at these addresses touch."""
        first = (addresses - self.start) // self.item
        return first if size <= self.item else (first[:, None] + np.arange(size // self.item)).ravel()

    def conflicts(self, kind: str, elements: np.ndarray, owner: int) -> np.ndarray:
        """The elements among these on which the access of this program races with another program's."""
        writers, readers = self.writers[elements], self.readers[elements]
        written = (writers != NOBODY) & (writers != owner)
        read = (readers != NOBODY) & (readers != owner)
        if kind == LOAD:
            return elements[written]
        return elements[read | written & ((kind == STORE) | (writers != BY_ATOMICS))]

    def mark(self, kind: str, elements: np.ndarray, owner: int) -> None:
        """Remembers who touched them."""
        if kind == LOAD:
            readers = self.readers[elements]
            self.readers[elements] = np.where((readers == NOBODY) | (readers == owner), owner, BY_SEVERAL)
        elif kind == STORE:
            self.writers[elements] = owner
        else:  # a plain store of this program is not forgotten: it races with the atomics of others
            self.writers[elements] = np.where(self.writers[elements] == owner, owner, BY_ATOMICS)

    def moved(self) -> Moved:
        """What the launch moved here."""
        loaded = np.count_nonzero((self.readers != NOBODY) | (self.writers == BY_ATOMICS))
        return Moved(self.loads, self.stores, loaded * self.item, np.count_nonzero(self.writers) * self.item)


def _regions(arguments: dict[str, Any]) -> list[Region]:
    """The memory of a kernel's arguments, by address."""
    tensors = [(name, t) for name, t in arguments.items() if isinstance(t, Tensor) and t.numel()]
    regions: list[Region] = []
    for name, t in sorted(tensors, key=lambda named: named[1].data_ptr()):
        last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        start, end = t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()
        if regions and start < regions[-1].end:
            shared = regions[-1]
            shared.names.append(name)
            shared.end, shared.item = max(shared.end, end), min(shared.item, t.element_size())
        else:
            regions.append(Region([name], start, end, t.element_size()))
    return regions


class Launch:
    """A kernel that runs: what it may touch, and which program is on."""

    def __init__(self, kernel: str, arguments: dict[str, Any]) -> None:
        self.kernel, self.regions = kernel, _regions(arguments)
        self._starts = np.array([r.start for r in self.regions], np.int64)
        self._ends = np.array([*(r.end for r in self.regions), 0], np.int64)  # 0: before the first region

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        """Draws the order of the programs."""
        self._grid, self._order = grid, np.arange(np.prod(grid))
        if CHECK.seed is not None:
            np.random.default_rng(CHECK.seed).shuffle(self._order)

    def next_program(self, x: int, y: int, z: int) -> tuple[int, int, int]:
        """The program that runs in the place of this one."""
        self._owner = int(self._order[np.ravel_multi_index((x, y, z), self._grid)]) + 1  # 0 is NOBODY
        return self._program(self._owner)

    def _program(self, owner: int) -> tuple[int, int, int]:
        x, y, z = (int(i) for i in np.unravel_index(owner - 1, self._grid))
        return x, y, z

    def fault(self, text: str) -> CheckError:
        """An error of the running program."""
        return CheckError(f"{self.kernel}, program {self._program(self._owner)}: {text}")

    def access(
        self, kind: str, pointers: np.ndarray, size: int, mask: np.ndarray, values: np.ndarray | None = None
    ) -> None:
        """Checks and remembers an access of `size` bytes a lane. `values` are those of a plain store."""
        lanes, active = np.broadcast_arrays(pointers, mask)
        addresses = lanes[active].astype(np.int64)
        places = np.searchsorted(self._starts, addresses, side="right") - 1
        inside = (places >= 0) & (self._ends[places] - addresses >= size)
        if CHECK.bounds:
            self._check_bounds(kind, addresses, size, inside)
        if CHECK.races and values is not None:
            self._check_lanes(addresses, np.broadcast_to(values, lanes.shape)[active])
        for place in np.unique(places[inside]):
            self._touch(kind, self.regions[place], addresses[inside & (places == place)], size)

    def _check_bounds(self, kind: str, addresses: np.ndarray, size: int, inside: np.ndarray) -> None:
        if not inside.all():
            outside = addresses[~inside]
            where = f"{outside.size} of {addresses.size} active lanes, the first {self._where(int(outside[0]), size)}"
            raise self.fault(f"{kind} out of bounds: {where}")
        if (odd := addresses[addresses % size != 0]).size:
            where = f"{odd[0] - self._region(odd[0]).start} bytes into {self._region(odd[0]).name}"
            raise self.fault(f"misaligned {kind} of {size} bytes, {where}")

    def _region(self, address: np.int64) -> Region:
        """The last that begins at or before an address."""
        return self.regions[np.searchsorted(self._starts, address, side="right") - 1]

    def _where(self, address: int, size: int) -> str:
        """A place outside of all arguments, seen from the nearest."""
        places = [(r.start - address, f"starts {r.start - address} bytes before", r) for r in self.regions]
        places += [(address + size - r.end, f"ends {address + size - r.end} bytes past", r) for r in self.regions]
        if not places:
            return "where no argument has memory"
        _, text, region = min((place for place in places if place[0] > 0), key=lambda place: place[0])
        return f"{text} {region.name} of {region.end - region.start} bytes"

    def _check_lanes(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Lanes of one store that write one element have to agree: which of them comes last is open."""
        if (addresses[1:] > addresses[:-1]).all():
            return
        order = np.argsort(addresses, kind="stable")
        addresses, bits = addresses[order], values[order].view(f"u{values.itemsize}")
        twice = addresses[1:][(addresses[1:] == addresses[:-1]) & (bits[1:] != bits[:-1])]
        if twice.size:
            region = self._region(twice[0])
            element = (twice[0] - region.start) // region.item
            raise self.fault(f"store: two lanes write different values to element {element} of {region.name}")

    def _touch(self, kind: str, region: Region, addresses: np.ndarray, size: int) -> None:
        elements = region.elements(addresses, size)
        if CHECK.races and (conflicts := region.conflicts(kind, elements, self._owner)).size:
            element = int(conflicts[0])
            what = f"element {element} of {region.name}, which {self._who(region, element)}"
            raise self.fault(f"race: {kind} of {what}")
        region.mark(kind, elements, self._owner)
        region.loads += addresses.size * size if kind != STORE else 0
        region.stores += addresses.size * size if kind != LOAD else 0

    def _who(self, region: Region, element: int) -> str:
        """Who touched an element before."""
        writer, reader = int(region.writers[element]), int(region.readers[element])
        if writer not in (NOBODY, self._owner):
            return "atomics write" if writer == BY_ATOMICS else f"program {self._program(writer)} writes"
        return "several programs read" if reader == BY_SEVERAL else f"program {self._program(reader)} reads"
