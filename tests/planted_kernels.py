"""Small kernels, each with one fault that `bench/compiled_code.py` has to name, listed as ops list theirs."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from fastadv.triton_kernels._launch import Configuration

BLOCK = 2048


@triton.jit(do_not_specialize=["n"])
def sound_kernel(x, y, n: tl.int64, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)  # [BLOCK]
    if start + BLOCK <= n:
        tl.store(y + places, tl.load(x + places) + 1)
    else:
        tl.store(y + places, tl.load(x + places, mask=places < n) + 1, mask=places < n)


@triton.jit(do_not_specialize=["n"])
def spilling_kernel(x, y, n: tl.int64, BLOCK: tl.constexpr):
    """Has 512 numbers a thread to keep until their sum is known."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    values = tl.load(x + places)  # [BLOCK]
    tl.store(y + places, values / tl.sum(values))


@triton.jit(do_not_specialize=["n"])
def float64_loop_kernel(x, y, n: tl.int64, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)  # [BLOCK]
    for start in range(0, n, BLOCK):
        total += tl.load(x + start + tl.arange(0, BLOCK)).to(tl.float64)
    tl.store(y + tl.program_id(0), tl.sum(total))


@triton.jit(do_not_specialize=["n"])
def narrow_kernel(x, y, n: tl.int64, BLOCK: tl.constexpr):
    """The mask ends anywhere, so the compiler cannot load four numbers at once."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(y + places, tl.load(x + places, mask=places < n) + 1, mask=places < n)


@triton.jit(do_not_specialize=["n"])
def short_kernel(x, y, n: tl.int64, BLOCK: tl.constexpr):
    """A thread has two numbers."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(y + places, tl.load(x + places) + 1)


@triton.jit(do_not_specialize=["n"])
def half_narrow_kernel(x, y, n: tl.int64, BLOCK: tl.constexpr):
    """Of its two streams one starts where 16 bytes cannot be loaded at once, and the other is wide."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(y + places, tl.load(x + places) + tl.load(x + n + places))


@triton.jit(do_not_specialize=["n"])
def large_kernel(x, y, n: tl.int64, BLOCK: tl.constexpr):
    """Each of its stages holds two tiles of 32 KiB in shared memory."""
    places = tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :]  # [128, 128]
    total = tl.zeros([128, 128], tl.float32)  # [128, 128]
    for start in range(0, n, BLOCK):
        total += tl.dot(tl.load(x + start + places), tl.load(x + start + BLOCK + places))
    tl.store(y + places, total)


@triton.jit(do_not_specialize=["n"])
def narrow_offset_kernel(x, y, n: tl.int64, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(y + places.to(tl.int64), tl.load(x + tl.arange(0, BLOCK)))


@triton.jit
def specialised_kernel(x, y, n, BLOCK: tl.constexpr):
    tl.store(y + n, tl.load(x + n))


@triton.jit(do_not_specialize=["n"])
def atomic_kernel(x, y, n: tl.int64, BLOCK: tl.constexpr):
    tl.atomic_add(y, tl.sum(tl.load(x + tl.arange(0, BLOCK))))


@triton.jit(do_not_specialize=["n"])
def refused_kernel(x, y, n: tl.int64, BLOCK: tl.constexpr):
    """The interpreter runs this; the compiler wants a variable of one type."""
    last = 0
    while last < n:
        last = last + n
    tl.store(y, last.to(tl.float32))


@triton.jit(do_not_specialize=["n"])
def guarded_kernel(x, y, n: tl.int64, BLOCK: tl.constexpr):
    """In place, y is x: no thread may write before all have read."""
    first = tl.load(x + n)
    tl.debug_barrier()
    tl.store(y + tl.arange(0, BLOCK), first)


@triton.jit(do_not_specialize=["n"])
def unguarded_kernel(x, y, n: tl.int64, BLOCK: tl.constexpr):
    """Waits too late."""
    tl.store(y + tl.arange(0, BLOCK), tl.load(x + n))
    tl.debug_barrier()
    tl.store(y + BLOCK + tl.arange(0, BLOCK), 1.0)


@triton.jit(do_not_specialize=["n"])
def scalar_products_kernel(x, y, n: tl.int64, BLOCK: tl.constexpr):
    """A matrix product of float32 numbers as they are, which tensor cores do not take."""
    square = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a = tl.load(x + n + square)
    tl.store(y + square, tl.dot(a, a, input_precision="ieee"))


STREAMING = (sound_kernel, narrow_kernel, half_narrow_kernel, short_kernel, float64_loop_kernel)
IN_PLACE = (guarded_kernel, unguarded_kernel)
PRODUCTS = (scalar_products_kernel,)


def configurations() -> Iterator[Configuration]:
    def form(kernel, *, x: str = "*fp32", y: str = "*fp32", block: int = BLOCK, **options) -> Configuration:
        signature = (("x", x), ("y", y), ("n", "i64"))
        return Configuration(kernel, signature, (("BLOCK", block),), ("x", "y"), **options)

    for kernel in (narrow_kernel, half_narrow_kernel, narrow_offset_kernel, specialised_kernel, atomic_kernel):
        yield form(kernel)
    yield form(sound_kernel)
    yield form(sound_kernel, x="*bf16")
    yield form(refused_kernel)
    yield form(short_kernel, block=256)
    yield form(guarded_kernel)
    yield form(unguarded_kernel)
    yield form(scalar_products_kernel)
    yield form(spilling_kernel, block=16384, num_warps=1)
    yield form(float64_loop_kernel, y="*fp64")
    yield form(large_kernel, x="*bf16", block=128 * 128, num_warps=8, num_stages=5)
