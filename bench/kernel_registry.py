"""Every form in which the Triton kernels are compiled, by a name that tests, reports and other processes share."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

PACKAGE = "fastadv.triton_kernels"
HALVES = ("*bf16", "*fp16")


@dataclass(frozen=True)
class Entry:
    """One `Configuration` of `triton_kernels/_launch.py`, with its names."""

    module: str
    name: str  # "segments.segment_tokens_kernel[values fp32, PACKED=True]": what tells it from the kernel's others
    family: str  # the same without dtypes
    streaming: bool  # whether its main stream has to move 16 bytes at a time
    in_place: bool  # whether it may write where its threads read what they share
    products: bool  # whether its matrix products belong on tensor cores
    configuration: Any

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return str(self.configuration.name)

    @property
    def halves(self) -> int:
        """Pointers to 16-bit floats."""
        return sum(kind in HALVES for _, kind in self.configuration.signature)


def modules() -> list[str]:
    """The modules with kernels. Those with a leading underscore hold what several of them share."""
    package = importlib.import_module(PACKAGE)
    return [f"{PACKAGE}.{m.name}" for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]


@cache
def entries(module: str) -> tuple[Entry, ...]:
    """The configurations that a module lists, each once."""
    source = importlib.import_module(module)
    by_kernel: dict[str, list[Any]] = {}
    for configuration in dict.fromkeys(source.configurations()):
        by_kernel.setdefault(configuration.name, []).append(configuration)
    streaming = {kernel.__name__ for kernel in source.STREAMING}
    in_place = {kernel.__name__ for kernel in getattr(source, "IN_PLACE", ())}
    products = {kernel.__name__ for kernel in getattr(source, "PRODUCTS", ())}
    narrow = getattr(source, "narrow", lambda configuration: False)  # forms that move less at a time, and say why
    short = module.rpartition(".")[2]
    return tuple(
        Entry(
            module,
            f"{short}.{kernel}" + _bracketed(dtypes | rest),
            f"{short}.{kernel}" + _bracketed(rest),
            kernel in streaming and not narrow(configuration),
            kernel in in_place,
            kernel in products,
            configuration,
        )
        for kernel, configurations in by_kernel.items()
        for configuration, dtypes, rest in _told_apart(configurations)
    )


def all_entries(names: Iterable[str] | None = None) -> list[Entry]:
    """The configurations of all modules, or of those that are named."""
    return [entry for module in (modules() if names is None else names) for entry in entries(module)]


def representatives(every: Iterable[Entry]) -> list[Entry]:
    """One of each family: the one with the fewest 16-bit floats, the first of several."""
    chosen: dict[str, Entry] = {}
    for entry in every:
        if entry.family not in chosen or entry.halves < chosen[entry.family].halves:
            chosen[entry.family] = entry
    return list(chosen.values())


def sample(every: Iterable[Entry], most: int) -> list[Entry]:
    """Representatives of at most so many families of a kernel, from all over its list: what a minute compiles."""
    by_kernel: dict[str, list[Entry]] = {}
    for entry in representatives(every):
        by_kernel.setdefault(f"{entry.module}.{entry.kernel}", []).append(entry)
    chosen = []
    for families in by_kernel.values():
        number = min(most, len(families))
        chosen += [families[i * len(families) // number] for i in range(number)]
    return chosen


def unlisted(module: ModuleType) -> set[str]:
    """Kernels that a module defines and lists in no configuration."""
    defined = {name for name in vars(module) if name.endswith("_kernel") and not name.startswith("_")}
    return defined - {configuration.name for configuration in module.configurations()}


def _bracketed(parts: dict[str, str]) -> str:
    return f"[{', '.join(parts.values())}]" if parts else ""


def _told_apart(configurations: list[Any]) -> Iterator[tuple[Any, dict[str, str], dict[str, str]]]:
    """Each configuration with the dtypes, and the other choices, that tell it from the others of its kernel."""
    dtypes = [{name: kind.removeprefix("*") for name, kind in c.signature} for c in configurations]
    others = [
        {**dict(c.constants), **{f"{n} unaligned": True for n in _unaligned(c)}}
        | {"warps": c.num_warps, "stages": c.num_stages, "fused": c.fp_fusion}
        for c in configurations
    ]
    # The other choices come first, so that a family is what they say and not what a dtype implies.
    needed = _needed([{**rest, **kinds} for rest, kinds in zip(others, dtypes, strict=True)])
    for configuration, kinds, rest in zip(configurations, dtypes, others, strict=True):
        yield (
            configuration,
            {name: f"{name} {kinds[name]}" for name in needed if name in kinds},
            {name: f"{name}={rest[name]}" for name in needed if name in rest},
        )


def _unaligned(configuration: Any) -> list[str]:
    pointers = [name for name, kind in configuration.signature if kind.startswith("*")]
    return [name for name in pointers if name not in configuration.aligned]


def _needed(rows: list[dict[str, Any]]) -> list[str]:
    """Names whose values, together, tell the rows apart; none that the ones before it imply."""
    needed: list[str] = []
    apart = 1
    for name in dict.fromkeys(name for row in rows for name in row):
        number = len({tuple(repr(row.get(n)) for n in [*needed, name]) for row in rows})
        if number > apart:
            needed.append(name)
            apart = number
    return needed
