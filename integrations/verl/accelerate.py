"""verl's own functions replaced by equal ones of ours, and put back."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fastadv.integrations.verl.registration import verl_version

OURS = "fastadv.integrations.verl"
THEIRS = "verl.trainer.ppo.core_algos"
MODULES = ("loss_functions", "advantage_functions")  # each function has verl's name
# Without a kernel of ours: right, where verl's geo_mean is not, but slower than verl's.
WITHOUT_KERNEL = tuple(
    f"compute_policy_loss_{name}" for name in ("geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")
)
REGISTRIES = ("POLICY_LOSS_REGISTRY", "ADV_ESTIMATOR_REGISTRY")
VARIABLE = "FASTADV_VERL_ACCELERATE"
EQUAL_TO = "0.9.1"  # other versions aggregate otherwise

_replaced: dict[str, tuple[Any, Any]] = {}  # verl's name: (verl's function, ours)


def accelerate(*, only_faster: bool = True) -> list[str]:
    """Puts our functions where verl's are: in core_algos, in its registries, and in every module of verl that took one
    over by name. Modules that are imported later take ours over. A second call does nothing new.

    Off unless it is called, or FASTADV_VERL_ACCELERATE=1 is set in the environment of every process that trains. What
    differs from verl's is listed in `loss_functions`. Call `restore` to have verl's back.

    Args:
        only_faster: leaves verl's where ours has no kernel and is slower (WITHOUT_KERNEL).

    Returns:
        What was replaced, by full name.

    Raises:
        RuntimeError: another version of verl than 0.9.1, whose functions ours do not equal.
    """
    version = verl_version()
    if version != EQUAL_TO:
        raise RuntimeError(
            f"verl is {version}, but our functions equal those of {EQUAL_TO}: install that, or choose estimators and "
            "losses named fastadv_... in the yaml, which need no replacing"
        )
    core = importlib.import_module(THEIRS)
    for name, ours in _our_functions().items():
        if only_faster and name in WITHOUT_KERNEL:
            continue
        if name not in _replaced:
            _replaced[name] = (getattr(core, name), ours)
    return _swap({id(theirs): ours for theirs, ours in _replaced.values()})


def restore() -> list[str]:
    """Puts verl's functions back, everywhere; returns where, by full name. Nothing where none was replaced."""
    put_back = _swap({id(ours): theirs for theirs, ours in _replaced.values()})
    _replaced.clear()
    return put_back


def accelerate_if_asked() -> list[str]:
    """Does what FASTADV_VERL_ACCELERATE says: 1 accelerates, 0 and nothing do not. verl hides what a plugin raises, so
    a warning says it too."""
    value = os.environ.get(VARIABLE, "")
    try:
        if value not in ("", "0", "1"):
            raise ValueError(f"{VARIABLE} is {value!r}; set it to 1 to replace verl's functions, or to 0")
        return accelerate() if value == "1" else []
    except Exception as error:
        warnings.warn(f"verl's functions are not replaced: {error}", RuntimeWarning, stacklevel=2)
        raise


def _our_functions() -> dict[str, Callable[..., Any]]:
    functions: dict[str, Callable[..., Any]] = {}
    for module in MODULES:
        for name, value in vars(importlib.import_module(f"{OURS}.{module}")).items():
            if callable(value) and (name.startswith("compute_") or name in ("agg_loss", "kl_penalty")):
                functions[name] = value
    return functions


def _swap(by_id: Mapping[int, Any]) -> list[str]:
    """Replaces functions, told by identity, wherever verl holds them by name."""
    changed = []
    for module_name, module in sorted(sys.modules.items()):
        if not isinstance(module, ModuleType) or module_name.partition(".")[0] != "verl":
            continue
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])
                changed.append(f"{module_name}.{name}")
    for registry in REGISTRIES:
        entries = getattr(importlib.import_module(THEIRS), registry)
        for name, value in entries.items():
            if id(value) in by_id:
                entries[name] = by_id[id(value)]
                changed.append(f"{THEIRS}.{registry}[{name!r}]")
    return changed
