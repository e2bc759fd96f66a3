"""What launches ask the compiler for, beside what the modules of kernels list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastadv.triton_kernels import _launch
from fastadv.triton_kernels._launch import Configuration

from bench import kernel_registry

Form = tuple[Any, ...]


def launches(calls: Iterable[Callable[[], object]]) -> list[Configuration]:
    """The configurations of all launches that some calls make, in order."""
    found: list[Configuration] = []
    before, _launch.launched = _launch.launched, found.append
    try:
        for call in calls:
            call()
    finally:
        _launch.launched = before
    return found


def form(configuration: Configuration) -> Form:
    """What two launches share that run the same compiled kernel, alignment aside."""
    return (
        configuration.name,
        tuple(sorted(configuration.signature)),
        tuple(sorted((name, repr(value)) for name, value in configuration.constants)),
        configuration.num_warps,
        configuration.num_stages,
        configuration.fp_fusion,
        configuration.registers,
    )


def unlisted(found: Iterable[Configuration]) -> list[Form]:
    """What was launched and no module lists: the compiler's gate has not seen it."""
    listed = {form(entry.configuration) for entry in kernel_registry.all_entries()}
    return [launched for launched in dict.fromkeys(map(form, found)) if launched not in listed]


def never_launched(found: Iterable[Configuration], modules: Iterable[str] | None = None) -> list[str]:
    """What modules list, all of them if none is named, and was not launched: too many forms, or too few calls."""
    launched = set(map(form, found))
    return [e.name for e in kernel_registry.all_entries(modules) if form(e.configuration) not in launched]
