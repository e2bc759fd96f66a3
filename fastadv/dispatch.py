"""Which implementation of an op runs: `reference` (PyTorch) or `cpu` (C++), by name, by environment or by `auto`."""

from __future__ import annotations

import os
import threading
import warnings

import torch
from torch import Tensor

from fastadv import native, validation
from fastadv._graphs import constant_in_graphs

NAMES = ("reference", "cpu")
NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # unless an op says otherwise
_last = threading.local()


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name that cannot run here, or not with these tensors."""


def backends() -> dict[str, str]:
    """Each backend's name with "available", or with the reason why it cannot run and how to get it."""
    return {name: reason or "available" for name in NAMES for reason in (_why_not(name),)}


def last_backend() -> str | None:
    """Name of the backend that was chosen for this thread's latest op, which may have failed; None before the first."""
    return getattr(_last, "name", None)


def resolve(
    op: str,
    backend: str,
    *tensors: Tensor | None,
    dtypes: tuple[torch.dtype, ...] = NATIVE_DTYPES,
    reference_only: str | None = None,
) -> str:
    """Name of the backend that runs `op` on these tensors. `dtypes` are those that its kernels take where a tensor is
    floating.

    "auto" is `FASTADV_BACKEND` if that is set, else the fastest that can run. A backend that was asked for and cannot
    run raises BackendUnavailableError; an unknown name raises ValueError. `reference_only` names a choice that no
    native kernel has.
    """
    asked = backend
    if asked == "auto":
        asked = os.environ.get("FASTADV_BACKEND", "auto")
    if asked == "auto":
        on_reference = reference_only or _unsuited("cpu", tensors, dtypes) or _missing_cpu(op)
        name = "reference" if on_reference else "cpu"
    else:
        if asked not in NAMES:
            raise ValueError(f"{op}: backend is {asked!r}; it must be 'auto' or one of {', '.join(map(repr, NAMES))}")
        reason = _unsuited(asked, tensors, dtypes) or _why_not(asked)
        if reference_only and asked != "reference":
            reason = f"it has no kernel for {reference_only}; use backend='reference'"
        if reason:
            raise BackendUnavailableError(f"{op}: backend {asked!r} cannot run: {reason}")
        name = asked
    _last.name = name
    return name


def _unsuited(name: str, tensors: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why a backend does not take these tensors."""
    if name == "reference":
        return None
    if validation.in_transform():
        return "torch.func's transforms (grad, vmap, jvp) do not see into its kernels; use backend='reference'"
    for t in tensors:
        if t is None:
            continue
        if t.device.type != "cpu":
            return f"it takes CPU tensors, not {t.device.type}; use backend='reference'"
        if t.is_floating_point() and t.dtype not in dtypes:
            *names, last, given = (str(d).removeprefix("torch.") for d in (*dtypes, t.dtype))
            return f"it takes {', '.join(names)} and {last}, not {given}; use backend='reference'"
    return None


_load_errors: dict[str, str] = {}


# torch.compile runs this function and the next one as they are, and keeps the answer: a graph may hold a process's
# first op, and an import cannot be traced.
@constant_in_graphs
def _why_not(name: str) -> str | None:
    """Why a backend cannot run on this machine at all."""
    if name == "reference":
        return None
    if name not in _load_errors:
        try:
            native.module()
            _load_errors[name] = ""
        except ImportError as error:
            _load_errors[name] = f"its extension does not load ({error}); install fastadv with a C++17 compiler at hand"
    return _load_errors[name] or None


@constant_in_graphs
def _missing_cpu(op: str) -> bool:
    reason = _why_not("cpu")
    if reason and not getattr(_last, "warned", False):
        _last.warned = True
        warnings.warn(f"{op}: the reference backend runs instead of 'cpu': {reason}", RuntimeWarning, stacklevel=4)
    return reason is not None
