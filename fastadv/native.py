"""The compiled CPU kernels: which build the processor runs, and tensors as the kernels take them."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from fastadv.rows import Rows

INSTRUCTION_SETS = ("baseline", "avx2", "avx512")
DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.uint8: 3,
    torch.bool: 3,
    torch.int32: 4,
    torch.int64: 5,
}
# The least work of a thread: to start one costs some ten microseconds, which this many tokens take at a nanosecond each
# several times over.
TOKENS_FOR_THREADS = 65_536
BYTES_FOR_LARGE_PAGES = 2**22

View = tuple[int, int, int, int]


@functools.cache
def module() -> ModuleType:
    """The extension for the best instruction set of this processor.

    `FASTADV_CPU_ISA` (auto, baseline, avx2, avx512) asks for a certain one; all give the same bits. Raises ImportError
    with the reason where it was not built, does not load, or the processor lacks the instructions.
    """
    baseline = importlib.import_module("fastadv._cpu_baseline")
    best = str(baseline.best_instruction_set())
    wanted = os.environ.get("FASTADV_CPU_ISA", "auto")
    if wanted == "auto":
        wanted = best
    if wanted not in INSTRUCTION_SETS:
        raise ImportError(f"FASTADV_CPU_ISA is {wanted!r}; it must be auto or one of {', '.join(INSTRUCTION_SETS)}")
    if INSTRUCTION_SETS.index(wanted) > INSTRUCTION_SETS.index(best):
        raise ImportError(f"FASTADV_CPU_ISA is {wanted!r}, but this processor runs {best} at most")
    return baseline if wanted == "baseline" else importlib.import_module(f"fastadv._cpu_{wanted}")


def threads(tokens: int) -> int:
    """Threads for this much work: torch's number, or as many as get TOKENS_FOR_THREADS each."""
    return max(1, min(torch.get_num_threads(), tokens // TOKENS_FOR_THREADS))


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Memory for an output that a kernel will write whole."""
    t = torch.empty(shape, dtype=dtype, device=device)
    if t.nbytes >= BYTES_FOR_LARGE_PAGES and t.device.type == "cpu":
        module().advise_large_pages(t.data_ptr(), t.nbytes)
    return t


def has_memory(t: Tensor) -> bool:
    """Whether a tensor's values lie in memory of its own: not one of a class that computes them some other way."""
    return type(t) is Tensor or type(t).__torch_dispatch__ is Tensor.__torch_dispatch__


class Unreadable(Exception):  # noqa: N818 - never raised by itself
    """A tensor that no kernel can read. `Kernel` says which op it was given to."""


class UnreadableTypeError(Unreadable, TypeError):
    """For what it is."""


class UnreadableValueError(Unreadable, ValueError):
    """For how it lies in memory."""


def start(t: Tensor) -> int:
    """Address of a tensor's first element, which a kernel may read."""
    if not has_memory(t):
        raise UnreadableTypeError(
            f"a kernel cannot read a {type(t).__name__}; pass a plain tensor, or use backend='reference'"
        )
    if t.is_neg():
        raise UnreadableValueError(
            "a kernel cannot read a tensor whose sign is yet to be changed; pass t.resolve_neg()"
        )
    first = t.data_ptr()
    if not first and t.numel():
        raise UnreadableTypeError("a kernel was given a tensor without memory; pass one that holds values")
    return first


def view(t: Tensor | None) -> View | None:
    """A per-token tensor as the kernels take it: address, type, row stride, stride (in elements). None for none."""
    if t is None:
        return None
    strides = t.stride()
    return (start(t), DTYPES[t.dtype], strides[0] if len(strides) == 2 else 0, strides[-1] if strides else 1)


def rows(r: Rows) -> tuple[int, int, int, int]:
    """A layout as the kernels take it: rows, tokens, width, address of cu_seqlens."""
    width = r.shape[1] if r.cu_seqlens is None else 0
    return (r.count, r.tokens, width, address(r.cu_seqlens))


def address(t: Tensor | None) -> int:
    """Address of a contiguous tensor; 0 for none, or for one without elements, of which nothing is read."""
    if t is None:
        return 0
    if not t.is_contiguous():
        raise UnreadableValueError(
            f"a kernel was given strides {t.stride()} for shape {list(t.shape)}; pass t.contiguous()"
        )
    return start(t)


FRACTIONAL = 0xAA  # in a mask's bytes, beside 0 and 1: not a whole number
NO_BYTE = 256  # what no byte of a mask equals


def mask_bytes(mask: Tensor) -> Tensor:
    """A mask as kernels on a GPU read it, contiguous uint8: 0, 1, or FRACTIONAL. A bool mask is not copied; one
    that was made of other bytes, which PyTorch does not make, counts where they are not 0, on CUDA but for 0xAA."""
    if mask.dtype == torch.bool:
        return mask.contiguous().view(torch.uint8)
    on = (mask != 0).to(torch.uint8)
    if mask.is_floating_point():
        on.masked_fill_(mask.frac() != 0, FRACTIONAL)  # also of NaN and inf, whose fraction is NaN
    return on.contiguous()


def fractional_byte(mask: Tensor) -> int:
    """The byte of `mask_bytes` that stands for a fraction, and none of a bool mask, in which every other is 1 too."""
    return FRACTIONAL if mask.is_floating_point() else NO_BYTE


def as_mask(mask: Tensor) -> Tensor:
    """The mask in a type that the kernels read; rare types become bool, or float32 where a kernel has to refuse what
    is not whole."""
    if mask.dtype in DTYPES:
        return mask
    if mask.is_floating_point():
        return torch.where(mask.frac() == 0, (mask != 0).to(torch.float32), torch.nan)
    return mask != 0
