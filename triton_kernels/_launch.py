"""What every launcher needs: tensors as kernels take them, and one way to start a kernel.

Kernels read contiguous tensors and bool masks. Other strides, and masks of other dtypes, are copied first, one pass
each. Sizes are run-time numbers that no kernel is specialised on, so a new length compiles nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastadv import native
from fastadv.native import FRACTIONAL, NO_BYTE, fractional_byte, mask_bytes

ALIGNMENT = 16  # bytes: of pointers for which the compiler uses 128-bit loads


__all__ = [
    "ALIGNMENT", "FRACTIONAL", "NO_BYTE", "Configuration", "blocks", "fractional_byte", "launch", "mask_bytes",
    "nothing",
]  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """One compiled form of a kernel: what a launch asks for, and what the ahead-of-time gate compiles and inspects."""

    kernel: Any  # the @triton.jit function
    signature: tuple[
        tuple[str, str], ...
    ]  # run-time arguments and their types: ("log_probs", "*fp32"), ("tokens", "i64")
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]  # pointers that are multiples of ALIGNMENT
    num_warps: int = 4
    num_stages: int = 1
    fp_fusion: bool = False
    registers: int | None = None  # of a thread at most

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)


TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
    torch.uint8: "u8", torch.bool: "u1", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip

_interpreter = threading.Lock()  # it keeps the program that runs in globals: threads take turns
launched: Callable[[Configuration], None] | None = None  # tests: called with what each launch needs compiled


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: dict[str, Tensor | int | float],
    constants: dict[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 1,
    fp_fusion: bool = False,
    registers: int | None = None,
) -> None:
    """Starts a kernel on the device of its tensors. A grid without programs starts nothing.

    Raises TypeError or ValueError for a tensor that no kernel can read, as the C++ kernels do.

    Args:
        kernel: a `@triton.jit` function.
        grid: programs, one to three numbers.
        arguments: run-time arguments by name: tensors, integers (int64 in the kernel), floats (float32).
        constants: `tl.constexpr` arguments by name.
        num_warps, num_stages, fp_fusion: compiler options; fusion of a * b + c is said explicitly, never a default.
        registers: that a thread has at most. Said, the compiler uses them; not said, it may spill some for occupancy.
    """
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    for t in tensors:
        native.start(t)  # refuses what Triton would take the address of all the same
    if launched is not None:
        launched(_configuration(kernel, arguments, constants, num_warps, num_stages, fp_fusion, registers))
    if 0 in grid:
        return
    device = tensors[0].device
    guard = torch.cuda.device(device) if device.type == "cuda" else _interpreter
    with guard:
        kernel[grid](
            **arguments, **constants, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=fp_fusion,
            maxnreg=registers,
        )  # fmt: skip


def _configuration(
    kernel: Any,
    arguments: dict[str, Tensor | int | float],
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
    fp_fusion: bool,
    registers: int | None,
) -> Configuration:
    def type_of(value: Tensor | int | float) -> str:
        if isinstance(value, Tensor):
            return "*" + TYPES[value.dtype]
        return "i64" if isinstance(value, int) else "fp32"

    aligned = tuple(n for n, v in arguments.items() if isinstance(v, Tensor) and v.data_ptr() % ALIGNMENT == 0)
    return Configuration(
        kernel,
        tuple((name, type_of(value)) for name, value in arguments.items()),
        tuple(constants.items()),
        aligned,
        num_warps,
        num_stages,
        fp_fusion,
        registers,
    )


def blocks(tokens: int, block: int) -> int:
    """Programs that cover this many tokens."""
    return -(-tokens // block)  # triton.cdiv takes 2 us on the host


@functools.cache
def nothing(device: torch.device, dtype: torch.dtype) -> Tensor:
    """An empty tensor that stands for one that is absent: made once, not for each launch."""
    return torch.empty(0, device=device, dtype=dtype)
