"""Numbers in Triton's interpreter, with the repairs of tests/strict_interpreter.py, against torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import fastadv as fa

if not fa.dispatch.interpreting():
    pytest.skip("TRITON_INTERPRET=0, as `make gpu` says: kernels are compiled", allow_module_level=True)

import strict_interpreter
from strict_interpreter import CheckError

strict_interpreter.install()

BLOCK = 8


@triton.jit
def cast_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n).to(out.dtype.element_ty), mask=i < n)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, out, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    return out


TIES = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 1 + 2.0**-4, 1 + 3 * 2.0**-4, 1.125, 1.375]
EXTREMES = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.3e38, 3.4e38, -3.4e38, 1e-38, 1e-40, 65504.0, 65520.0]


@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_casts_round_like_torch(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.cat([torch.tensor(TIES + EXTREMES), 100 * torch.randn(200)]).to(source)
    torch.testing.assert_close(cast(x, target), x.to(target), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_to_fp8_and_back(dtype: torch.dtype) -> None:
    x = torch.cat([torch.tensor(TIES), torch.randn(200), 20 * torch.randn(50)])
    assert torch.equal(cast(x, dtype).view(torch.uint8), x.to(dtype).view(torch.uint8))
    every = torch.arange(256).to(torch.uint8).view(dtype)
    torch.testing.assert_close(cast(every, torch.float32), every.float(), rtol=0, atol=0, equal_nan=True)
    largest = torch.finfo(dtype).max
    beyond = cast(torch.tensor([1e6, -1e6, torch.inf, torch.nan]), dtype).float()
    assert beyond[:3].tolist() == [largest, -largest, largest]
    assert beyond[3].isnan()


@triton.jit
def toward_zero_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16, fp_downcast_rounding="rtz"))


def test_a_cast_toward_zero_stays_one() -> None:
    x, out = torch.tensor(TIES), torch.zeros(len(TIES), dtype=torch.bfloat16)
    toward_zero_kernel[(1,)](x, out, BLOCK=len(TIES))
    cut = (x.view(torch.int32) >> 16 << 16).view(torch.float32)
    assert torch.equal(out.float(), cut)
    assert not torch.equal(out, x.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64])
def test_casts_to_integers_cut_off_and_saturate(source: torch.dtype, dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    x = torch.tensor([1.5, -1.5, 0.99, -0.0, torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 96.0, -30464.0, 2.0**63])
    low, high = limits.min, limits.max
    assert cast(x.to(source), dtype).tolist() == [1, -1, 0, 0, 0, high, low, high, low, 96, -30464, high]


def test_integers_become_bfloat16() -> None:
    x = torch.tensor([0, 1, -3, 257, 259, 2**20 + 1, -(2**31)], dtype=torch.int32)
    assert torch.equal(cast(x, torch.bfloat16), x.to(torch.bfloat16))


@triton.jit
def arithmetic_kernel(a, b, out, n, OPERATION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(a + i, mask=i < n, other=1.0)
    y = tl.load(b + i, mask=i < n, other=1.0)
    if OPERATION == "add":
        z = x + y
    elif OPERATION == "sub":
        z = x - y
    elif OPERATION == "mul":
        z = x * y
    elif OPERATION == "neg":
        z = -x
    elif OPERATION == "abs":
        z = tl.abs(x)
    elif OPERATION == "where":
        z = tl.where(x < y, x, y + 1)
    elif OPERATION == "maximum":
        z = tl.maximum(x, y)
    elif OPERATION == "clamp":
        z = tl.clamp(x, y, y + 1)
    elif OPERATION == "clamp, NaN stays":
        z = tl.clamp(x, y, y + 1, propagate_nan=tl.PropagateNan.ALL)
    elif OPERATION == "fma":
        z = tl.fma(x, y, y)
    elif OPERATION == "less":
        z = (x < y).to(tl.bfloat16)
    elif OPERATION == "max":
        z = tl.zeros_like(x) + tl.max(x)
    tl.store(out + i, z, mask=i < n)


def rounded(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16)


ARITHMETIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "where": lambda x, y: torch.where(x < y, x, y + 1),
    "maximum": torch.maximum,
    "clamp": lambda x, y: torch.clamp(x, y, y + 1),
    "clamp, NaN stays": lambda x, y: torch.clamp(x, y, y + 1),
    "fma": lambda x, y: rounded(x.double() * y.double() + y.double()),  # one rounding
    "less": lambda x, y: rounded(x < y),
    "max": lambda x, y: x.max().expand(x.shape),
}


@pytest.mark.parametrize("operation", ARITHMETIC)
def test_bfloat16_arithmetic_is_torchs(operation: str) -> None:
    x, y = (3 * torch.randn(2, 64)).to(torch.bfloat16)
    y[:8] = x[:8]
    out = torch.zeros_like(x)
    arithmetic_kernel[(1,)](x, y, out, 64, OPERATION=operation, BLOCK=64)
    assert torch.equal(out, ARITHMETIC[operation](x, y))


@triton.jit
def reduction_kernel(x, out, OPERATION: tl.constexpr, CAST: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    if CAST:
        value = value.to(tl.float32)
    if OPERATION == "sum":
        z = tl.sum(value)
    elif OPERATION == "cumsum":
        z = tl.max(tl.cumsum(value))
    else:
        z = tl.argmax(value, 0)
    tl.store(out, z.to(tl.float32))


@pytest.mark.parametrize(("operation", "expected"), [("sum", 13), ("cumsum", 17), ("argmax", 4)])
def test_a_reduction_of_bfloat16_is_refused(operation: str, expected: int) -> None:
    x, out = torch.tensor([-2, 5, -1, 5, 9, 0, 1, -4], dtype=torch.bfloat16), torch.zeros(1)
    with pytest.raises(CheckError, match=r"reduction_kernel, .* of bfloat16 .*; cast to float32 before"):
        reduction_kernel[(1,)](x, out, OPERATION=operation, CAST=False, BLOCK=BLOCK)
    reduction_kernel[(1,)](x, out, OPERATION=operation, CAST=True, BLOCK=BLOCK)
    assert out.item() == expected


@triton.jit
def dot_kernel(a, b, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    square = i[:, None] * SIZE + i
    tl.store(out + square, tl.dot(tl.load(a + square), tl.load(b + square)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dot(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 16, 16).to(dtype)
    out = torch.zeros(16, 16)
    dot_kernel[(1,)](a, b, out, SIZE=16)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-6, atol=1e-5)


@triton.jit
def silent_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=float("nan"))
    tl.store(out, tl.max(value))
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + 1 + i, tl.log(value) + tl.exp(-value) + value / value)


def test_nan_and_inf_warn_of_nothing() -> None:
    """As on a GPU. Warnings are errors in these tests."""
    out = torch.zeros(1 + BLOCK)
    silent_kernel[(1,)](torch.tensor([torch.nan, torch.nan]), out, 2, BLOCK=BLOCK)
    silent_kernel[(1,)](torch.tensor([-1e3, 0.0]), out, 2, BLOCK=BLOCK)
    assert out[1:].isnan().all()
    assert out[0] == 0
