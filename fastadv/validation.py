"""Checks of what callers pass: always of shape, dtype and device, of values where that is affordable.

Reading a value on a GPU would stop the host until the device has caught up, so under `checks("auto")` values are read
on CPU tensors only, and never while `torch.compile` traces. With `checks("on")` they are read everywhere, with
`checks("off")` nowhere; a NaN or an infinity where a finite value is due then stays visible in whatever it would have
changed, and never becomes a plausible number.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from numbers import Integral, Real
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

MODES = ("auto", "on", "off")
_mode: str = os.environ.get("FASTADV_CHECKS", "auto")
if _mode not in MODES:
    raise ValueError(f"FASTADV_CHECKS is {_mode!r}; it must be one of {', '.join(MODES)}")

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
MASKS = (torch.bool, *INTEGERS, *FLOATS)


class checks:  # noqa: N801 - called like a function, usable as a context manager
    """Sets when the values of arguments are checked: "auto" (CPU tensors), "on" or "off".

    Takes effect at once and stays; as a context manager (`with fa.checks("off"):`) the mode before it comes back at the
    end.
    """

    def __init__(self, mode: str) -> None:
        global _mode
        if mode not in MODES:
            raise ValueError(f"checks: mode is {mode!r}; it must be one of {', '.join(MODES)}")
        self._before, _mode = _mode, mode

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _mode
        _mode = self._before


def saveable(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors as autograd can save them: what was made in inference mode is copied."""
    return [t if t is None or not t.is_inference() else t.clone() for t in tensors]


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) runs, whose tensors have no memory, or forward-mode
    differentiation, whose tangents kernels do not see."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def on_host(*tensors: Tensor | None) -> bool:
    """Whether the values of these tensors are at hand: plain CPU tensors, and nothing traces or transforms them."""
    if torch.compiler.is_compiling() or in_transform():
        return False
    return all(t is None or (t.device.type == "cpu" and type(t) in (Tensor, torch.nn.Parameter)) for t in tensors)


def reads_values(*tensors: Tensor | None) -> bool:
    """Whether the values of these tensors may be read now."""
    if _mode == "off" or torch.compiler.is_compiling():
        return False
    return _mode == "on" or on_host(*tensors)


def did_you_mean(text: Any, valid: Iterable[str]) -> str:
    """The valid name nearest to a text, as a remark in brackets; empty if none is near."""
    by_folded = {name.casefold(): name for name in valid}
    near = difflib.get_close_matches(text[:80].casefold(), by_folded, n=1) if isinstance(text, str) else []
    return f" (did you mean {by_folded[near[0]]!r}?)" if near else ""


def choice(op: str, name: str, value: Any, valid: tuple[str, ...]) -> None:
    """Raises unless `value` is one of the valid names."""
    if value not in valid:
        raise ValueError(f"{op}: {name} is {value!r}; it must be one of {', '.join(map(repr, valid))}")


def tensor(
    op: str,
    name: str,
    value: Any,
    *,
    shape: tuple[int, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Raises unless `value` is a tensor of this shape, one of these dtypes and on this device."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; pass a tensor")
    if value.layout is not torch.strided:
        raise TypeError(f"{op}: {name} has layout {value.layout}; pass a dense tensor ({name}.to_dense())")
    if dtypes is not None and value.dtype not in dtypes:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{op}: {name} has dtype {value.dtype}; use {allowed}")
    if shape is not None and tuple(value.shape) != shape:
        raise ValueError(f"{op}: {name} has shape {list(value.shape)}; expected {list(shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{op}: {name} is on {value.device}, the other arguments are on {device}; move it there")


def rollouts(op: str, name: str, value: Tensor) -> None:
    """Raises unless a tensor has one dimension."""
    if value.dim() != 1:
        raise ValueError(f"{op}: {name} has shape {list(value.shape)}; expected [B], one for each rollout")


def index_fields(owner: Any, *names: str, device: torch.device | None = None) -> None:
    """Makes fields of a frozen index object contiguous int64 `[n]`, as the kernels read them. Raises TypeError or
    ValueError for what is no list of integers, or on another device than the given one."""
    for name in names:
        value = getattr(owner, name)
        tensor(type(owner).__name__, name, value, dtypes=INTEGERS, device=device)
        if value.dim() != 1:
            raise ValueError(
                f"{type(owner).__name__}: {name} has shape {list(value.shape)}; it must have one dimension"
            )
        if value.dtype != torch.int64 or not value.is_contiguous():
            object.__setattr__(owner, name, value.to(torch.int64).contiguous())


def mask_values(op: str, name: str, mask: Tensor) -> None:
    """Raises if a mask of floats holds a fraction: a token counts or it does not."""
    if mask.is_floating_point() and reads_values(mask) and bool((mask != mask.trunc()).any() | ~mask.isfinite().all()):
        raise ValueError(fractional_mask(op, name))


def fractional_mask(op: str, name: str = "mask") -> str:
    """The message for a mask that is not made of whole numbers."""
    return (
        f"{op}: {name} has a fractional or non-finite value; it says which tokens count (0 or not 0), "
        "put factors in `weights`"
    )


def native_faults(op: str, faults: int) -> None:
    """Raises for what a kernel found in the values that it read (see Fault in csrc/cpu/kernels.h)."""
    if faults & 1:
        raise ValueError(fractional_mask(op))
    if faults & 2:
        raise ValueError(
            f"{op}: turn_ids names a turn that its rollout does not have in the segment table; "
            "build both from the same batch"
        )


def finite_voters(op: str, rewards: Tensor, votes: Tensor) -> None:
    """Raises if a reward that votes is NaN or infinite, naming the row."""
    if not reads_values(rewards, votes):
        return
    if bool(rewards.sum().isfinite()):  # then each of them is; one pass instead of five
        return
    bad = (votes != 0) & ~rewards.isfinite()
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"{op}: rewards[{row}] is {float(rewards[row])}; a reward that votes must be finite. Exclude the row "
            "(population='survivors' with include) or give it a reward"
        )


def count(owner: str, name: str, value: Any, *, least: float = 0.0, positive: bool = False) -> None:
    """Raises unless `value`, a number or a 0-d tensor whose value may be read, is finite and at least `least`, or
    positive."""
    if isinstance(value, bool) or not isinstance(value, (Tensor, Real)):
        raise TypeError(f"{owner}: {name} is a {type(value).__name__}; pass a number or a 0-d tensor")
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{owner}: {name} has shape {list(value.shape)}; pass one number")
        if not reads_values(value):
            return
    number = float(value)
    if not least <= number < float("inf") or (positive and number == 0):
        raise ValueError(
            f"{owner}: {name} is {number:g}; it must be finite and {'positive' if positive else f'at least {least:g}'}"
        )


def integer(op: str, name: str, value: Any, *, least: int = 0, most: int | None = None) -> None:
    """Raises unless `value` is an integer, and not a truth value, from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{op}: {name} is {value!r}, a {type(value).__name__}; pass an integer")
    if int(value) < least or (most is not None and int(value) > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{op}: {name} is {value}; it must be {bounds}")


def module(op: str, name: str, value: Any) -> None:
    """Raises unless `value` is a torch.nn.Module."""
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; pass a torch.nn.Module")


def non_negative(op: str, name: str, value: float) -> None:
    """Raises unless `value` is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; pass a number")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{op}: {name} is {value}; it must be finite and at least 0")
