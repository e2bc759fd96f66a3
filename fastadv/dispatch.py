"""Which implementation of an op runs: `reference` (PyTorch), `cpu` (C++), `triton` or `cuda`; by name, by environment
or by `auto`.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import warnings

import torch
from torch import Tensor

from fastadv import cuda, native, validation
from fastadv._graphs import constant_in_graphs

NAMES = ("reference", "cpu", "triton", "cuda")
LATE = (
    "TRITON_INTERPRET is not what it was when triton was imported: half of its functions would be interpreted, the "
    "others compiled; set it before Python starts"
)
WITH_KERNELS = ("cpu", "triton", "cuda")
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
    device: torch.device | None = None,
    dtypes: tuple[torch.dtype, ...] = NATIVE_DTYPES,
    kernels: tuple[str, ...] = WITH_KERNELS,
    reference_only: str | None = None,
) -> str:
    """Name of the backend that runs `op` on these tensors.

    "auto" is `FASTADV_BACKEND` if that is set, else the fastest that can run. A backend that was asked for and cannot
    run raises BackendUnavailableError; an unknown name raises ValueError.

    Args:
        op: name for messages.
        backend: a name, or "auto".
        tensors: those that decide; all on one device.
        device: that device, where no tensor's dtype matters.
        dtypes: those that the kernels take where a tensor is floating.
        kernels: the backends that have a kernel of this op.
        reference_only: names a choice that no kernel has.
    """
    if device is None:
        device = next((t.device for t in tensors if t is not None), torch.device("cpu"))
    asked = backend
    if asked == "auto":
        asked = os.environ.get("FASTADV_BACKEND", "auto")
    if asked == "auto":
        name = _fastest(op, device, tensors, dtypes, kernels) if reference_only is None else "reference"
    else:
        if asked not in NAMES:
            raise ValueError(f"{op}: backend is {asked!r}; it must be 'auto' or one of {', '.join(map(repr, NAMES))}")
        reason = None
        if asked != "reference":
            reason = _why_not(asked) or _unsuited(asked, device, tensors, dtypes)
            if reference_only or asked not in kernels:
                reason = f"it has no kernel for {reference_only or 'this op'}; use backend='reference'"
        if reason:
            raise BackendUnavailableError(f"{op}: backend {asked!r} cannot run: {reason}")
        name = asked
    _last.name = name
    return name


def _fastest(
    op: str,
    device: torch.device,
    tensors: tuple[Tensor | None, ...],
    dtypes: tuple[torch.dtype, ...],
    kernels: tuple[str, ...],
) -> str:
    """What "auto" means on a device. An interpreter is never it."""
    name = "cpu" if device.type == "cpu" else "triton"
    if device.type == "cuda" and "cuda" in kernels and _why_not("cuda") is None:
        name = "cuda"  # its launches cost the host less
    if name not in kernels or _unsuited(name, device, tensors, dtypes) or _missing(op, name):
        return "reference"
    return name


def _unsuited(
    name: str, device: torch.device, tensors: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype, ...]
) -> str | None:
    """Why kernels do not take these tensors."""
    if validation.in_transform():
        return "torch.func's transforms (grad, vmap, jvp) do not see into its kernels; use backend='reference'"
    if name == "cpu" and device.type != "cpu":
        return f"it takes CPU tensors, not {device.type}; use backend='triton' or 'reference'"
    if name == "cuda" and device.type != _cuda_device():
        return f"it takes CUDA tensors, not {device.type}; move them (.cuda()), or use another backend"
    if name == "triton" and device.type != "cuda" and not (device.type == "cpu" and interpreting()):
        return f"it takes CUDA tensors, not {device.type}; move them (.cuda()), or use another backend"
    for t in tensors:
        if t is not None and t.is_floating_point() and t.dtype not in dtypes:
            *names, last, given = (str(d).removeprefix("torch.") for d in (*dtypes, t.dtype))
            return f"it takes {', '.join(names)} and {last}, not {given}; use backend='reference'"
    return None


@constant_in_graphs
def _cuda_device() -> str:
    """Kind of device whose tensors the CUDA kernels take: tests compile them for the CPU."""
    return str(cuda.module().device_type())


def _asks_for_interpreter() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")  # as Triton reads it


@constant_in_graphs
def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on CPU tensors: for tests, thousands of times slower.

    Triton settles that when it is imported.
    """
    triton = sys.modules.get("triton")
    if triton is None:
        return _asks_for_interpreter()
    return not isinstance(triton.language.cdiv, triton.JITFunction)


_load_errors: dict[str, str] = {}


# torch.compile runs this function and the next one as they are, and keeps the answer: a graph may hold a process's
# first op, and an import cannot be traced.
@constant_in_graphs
def _why_not(name: str) -> str | None:
    """Why a backend cannot run on this machine at all."""
    if name == "reference":
        return None
    if name not in _load_errors:
        _load_errors[name] = {"cpu": _cpu_error, "triton": _triton_error, "cuda": _cuda_error}[name]()
    if name == "triton" and not _load_errors[name] and interpreting() != _asks_for_interpreter():
        return LATE
    return _load_errors[name] or None


def _cpu_error() -> str:
    try:
        native.module()
    except ImportError as error:
        return f"its extension does not load ({error}); install fastadv with a C++17 compiler at hand"
    return ""


def _triton_error() -> str:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton does not load ({error}); pip install 'fastadv[triton]'"
    if not interpreting() and not torch.cuda.is_available():
        if _asks_for_interpreter():
            return LATE
        return (
            "torch sees no CUDA device; run it where there is one. To try a kernel without, slowly, start Python with "
            "TRITON_INTERPRET=1, which runs it on CPU tensors"
        )
    return ""


def _cuda_error() -> str:
    try:
        kernels = cuda.module()
    except ImportError as error:
        return f"its extension does not load ({error}); install fastadv where nvcc is, with FASTADV_CUDA=1"
    if kernels.device_type() != "cuda":
        return ""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; run it where there is one"
    try:
        kernels.check_device(torch.cuda.current_device())
    except RuntimeError as error:
        if "NoKernelImage" in str(error) or "InvalidDeviceFunction" in str(error):
            return f"its extension has no code for this card ({error}); FASTADV_CUDA_ARCHS names what is built"
        return f"its extension cannot use this card ({error})"
    return ""


@constant_in_graphs
def _missing(op: str, name: str) -> bool:
    reason = _why_not(name)
    if reason and not getattr(_last, "warned", False):
        _last.warned = True
        warnings.warn(f"{op}: the reference backend runs instead of {name!r}: {reason}", RuntimeWarning, stacklevel=5)
    return reason is not None
