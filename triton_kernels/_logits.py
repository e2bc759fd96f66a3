"""Rows of logits as the kernels of token_log_probs read them: tiles of columns, scaling, views.

A block of a row is four tiles, which a program loads at once, and a part eight blocks. A tile belongs to LANES lanes of
WIDTH columns each.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fastadv.triton_kernels._launch import ALIGNMENT, TYPES
from torch import Tensor

from fastadv.ops._logits import NO_LABEL, SKIPPED, row_strides

LANES = tl.constexpr(128)  # threads of a program
WIDTH = tl.constexpr(8)  # neighbouring columns: 16 bytes of bfloat16, two loads of float32
TILE = tl.constexpr(1024)
BLOCK = tl.constexpr(4096)  # 64 bytes of bfloat16 a thread are in flight
PART = tl.constexpr(32_768)
NUM_WARPS = 4  # LANES threads

LOG2E = tl.constexpr(1.4426950408889634)  # powers are of 2: the factor joins the temperature
LN2 = tl.constexpr(0.6931471805599453)
NONE = tl.constexpr(float("-inf"))
FLOOR = tl.constexpr(-160.0)  # 2^d is 0 from here on: -inf is cut to it, since 0 times -inf is NaN
UNLABELLED, UNREAD = tl.constexpr(NO_LABEL), tl.constexpr(SKIPPED)


@triton.jit
def row_start(row, inner, outer_stride, inner_stride):
    """Where a row begins in a view with two leading dimensions, the second of size `inner`."""
    outer = row // inner
    return outer * outer_stride + (row - outer * inner) * inner_stride


@triton.jit
def lane_columns(NEIGHBOURS: tl.constexpr):
    """The first columns of each lane of a tile, [LANES, NEIGHBOURS] int32; [LANES] if one."""
    if NEIGHBOURS == 1:
        return tl.arange(0, LANES) * WIDTH
    else:
        return tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, NEIGHBOURS)[None, :]


@triton.jit
def load_columns(pointers, first, left, NEIGHBOURS: tl.constexpr, FULL: tl.constexpr):
    """Columns `first` and its neighbours of each lane of a tile of which `left` columns exist."""
    if FULL:  # no mask: the compiler then loads 16 bytes at a time
        return tl.load(pointers + first).to(tl.float32)
    elif NEIGHBOURS == 1:
        return tl.load(pointers + first, mask=lane_columns(1) + first < left, other=NONE).to(tl.float32)
    else:  # an instruction holds a column's number within its lane; numbers within the tile would take registers
        inside = first + tl.arange(0, NEIGHBOURS)[None, :] < left - tl.arange(0, LANES)[:, None] * WIDTH
        return tl.load(pointers + first, mask=inside, other=NONE).to(tl.float32)


@triton.jit
def inverse_temperature_of(inverse_temperatures, row, per_row, high, low):
    """Of a row, float64: from the tensor, or the number that two float32 make."""
    inverse = tl.zeros([], tl.float64) + high + low
    if per_row != 0:
        inverse = tl.load(inverse_temperatures + row)
    return inverse


@triton.jit
def softcapped(z, cap, inverse_cap):
    """cap * tanh(z / cap) and its slope, as in csrc/include/fastadv/log_softmax.h."""
    x = z * inverse_cap
    square = x * x
    small = tl.fma(square, -5.70498872745e-3, 2.06390887954e-2)
    small = tl.fma(small, square, -5.37397155531e-2)
    small = tl.fma(small, square, 1.33314422036e-1)
    small = tl.fma(small, square, -3.33332819422e-1)
    small = tl.fma(small * square, x, x)
    u = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    root = tl.rsqrt(1.0 + u)
    inverse = root * root  # two instructions; a division is six
    large = (1.0 - u) * inverse
    tanh = tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0.0, -large, large))
    return tl.where(z > NONE, cap * tanh, z), 4.0 * u * inverse * inverse


# ---- launchers -------------------------------------------------------------------------------------------------------


Signature = tuple[tuple[str, str], ...]  # as a Configuration has it; "*" is a pointer to logits

SCALING: Signature = (
    ("inverse_temperatures", "*fp64"), ("per_row", "i64"), ("inverse_high", "fp32"), ("inverse_low", "fp32"),
    ("cap", "fp32"), ("inverse_cap", "fp32"),
)  # fmt: skip
"""What `scaling` returns."""


def unspecialised(signature: Signature) -> dict[str, Any]:
    """Options of `triton.jit`: no size, stride or address compiles a kernel anew. What is aligned, a constant says."""
    pointers = [name for name, kind in signature if kind.startswith("*")]
    return {
        "do_not_specialize": [name for name, _ in signature if name not in pointers],
        "do_not_specialize_on_alignment": pointers,
    }


def signature_for(dtype: torch.dtype, signature: Signature) -> Signature:
    """The signature for logits of a dtype."""
    return tuple((name, "*" + TYPES[dtype] if kind == "*" else kind) for name, kind in signature)


class View(NamedTuple):
    """Rows with at most two leading dimensions and a vocabulary of stride 1."""

    rows: Tensor
    inner: int  # size of the second leading dimension, or of the only one
    outer_stride: int
    inner_stride: int

    @property
    def aligned(self) -> bool:
        """Whether each row begins at a multiple of 16 bytes."""
        size = self.rows.element_size()
        strides = (self.outer_stride * size, self.inner_stride * size)
        return all(x % ALIGNMENT == 0 for x in (self.rows.data_ptr(), *strides))


def view_of(t: Tensor) -> View | None:
    """A view of a tensor's memory; None where it has other strides."""
    if not t.numel():
        return View(t, 1, 0, 0)
    strides = row_strides(t)
    return None if strides is None else View(t, *strides)


def readable(logits: Tensor) -> View:
    """A view of logits, or of a copy: where three leading strides do not merge, or the vocabulary's is not 1."""
    view = view_of(logits) or view_of(logits.contiguous())
    assert view is not None
    return view


def scaling(inverse_temperature: float | Tensor, softcap: float, other: Tensor) -> dict[str, Tensor | int | float]:
    """Kernel arguments that say how logits are scaled. A float64 number goes as two float32; `other` is any float64
    tensor, which stands for none."""
    per_row = isinstance(inverse_temperature, Tensor)
    number = 1.0 if isinstance(inverse_temperature, Tensor) else inverse_temperature
    high = ctypes.c_float(number).value
    return {
        "inverse_temperatures": inverse_temperature if isinstance(inverse_temperature, Tensor) else other,
        "per_row": int(per_row),
        "inverse_high": high,
        "inverse_low": number - high,
        "cap": softcap,
        "inverse_cap": 1.0 / softcap if softcap else 0.0,
    }
