"""Inner products of all pairs of a few vectors.

Two launches. The first reads each vector once, 4 bytes an element in float32, and leaves a float64 a pair and block;
the second adds these up. A thread sums 128 elements in float32, in one order; all beyond is float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from fastadv.triton_kernels._forms import aligned_form
from fastadv.triton_kernels._launch import TYPES, Configuration, blocks, launch
from torch import Tensor

VECTORS = 8  # at most
BLOCK = 16384  # elements of a program
WARPS = 4
ROWS = 32 * WARPS  # a thread has one, of as many columns as 16 bytes hold
PARTS = 1024  # blocks that the second kernel reads at once


@triton.jit(do_not_specialize=["count"])
def block_products_kernel(
    v0, v1, v2, v3, v4, v5, v6, v7,  # [N] float32, bfloat16 or float16; those from VECTORS on are not read
    partials,  # [blocks, pairs] float64
    count: tl.int64,
    VECTORS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = VECTORS * (VECTORS + 1) // 2
    STEP: tl.constexpr = ROWS * COLUMNS
    vectors = (v0, v1, v2, v3, v4, v5, v6, v7)
    block = tl.program_id(0).to(tl.int64)
    start = block * BLOCK
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]  # [ROWS, COLUMNS]
    sums = ()  # of each pair [ROWS]
    for _ in tl.static_range(PAIRS):
        sums += (tl.zeros([ROWS], tl.float32),)
    if start + BLOCK <= count:
        for step in range(BLOCK // STEP):
            sums = _add(sums, vectors, start + step * STEP + place, count, VECTORS, True)
    else:
        for left in range(tl.cdiv(count - start, STEP).to(tl.int32)):
            sums = _add(sums, vectors, start + left * STEP + place, count, VECTORS, False)
    for pair in tl.static_range(PAIRS):
        tl.store(partials + block * PAIRS + pair, tl.sum(sums[pair].to(tl.float64)))


@triton.jit
def _add(sums, vectors, at, count, VECTORS: tl.constexpr, FULL: tl.constexpr):
    """The sums with what is at `at`: pairs (i, j) with j <= i, row by row."""
    inside = None if FULL else at < count
    read = ()
    for v in tl.static_range(VECTORS):
        read += (tl.load(vectors[v] + at, mask=inside, other=None if FULL else 0.0).to(tl.float32),)
    more = ()
    for i in tl.static_range(VECTORS):
        for j in tl.static_range(i + 1):
            more += (sums[i * (i + 1) // 2 + j] + tl.sum(read[i] * read[j], axis=1),)
    return more


@triton.jit(do_not_specialize=["blocks", "vectors"])
def add_products_kernel(
    partials,  # [blocks, pairs] float64
    gram,  # [vectors, vectors] float64
    blocks: tl.int64,
    vectors: tl.int64,
    PARTS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    pairs = vectors * (vectors + 1) // 2
    total = tl.zeros([PARTS], tl.float64)
    for first in range(0, blocks, PARTS):
        block = first + tl.arange(0, PARTS)  # [PARTS]
        total += tl.load(partials + block * pairs + pair, mask=block < blocks, other=0.0)
    i = tl.zeros((), tl.int64)
    while (i + 1) * (i + 2) // 2 <= pair:
        i += 1
    j = pair - i * (i + 1) // 2
    product = tl.sum(total)
    tl.store(gram + i * vectors + j, product)
    tl.store(gram + j * vectors + i, product)


def multi_dot_gram(vectors: list[Tensor], gram: Tensor) -> int:
    """See `fastadv.ops.multi_dot_gram.MULTI_DOT_GRAM`."""
    vectors = [v.contiguous() for v in vectors]
    number, count, itemsize = len(vectors), vectors[0].numel(), vectors[0].element_size()
    pairs, programs = number * (number + 1) // 2, blocks(count, BLOCK)
    partials = gram.new_empty((programs, pairs))
    given = {f"v{i}": vectors[min(i, number - 1)] for i in range(VECTORS)}
    constants = {"VECTORS": number, "ROWS": ROWS, "COLUMNS": 16 // itemsize, "BLOCK": BLOCK}
    launch(
        block_products_kernel, (programs,), {**given, "partials": partials, "count": count}, constants,
        num_warps=WARPS, fp_fusion=True, registers=_registers(number),
    )  # fmt: skip
    sizes = {"blocks": programs, "vectors": number}
    launch(add_products_kernel, (pairs,), {"partials": partials, "gram": gram, **sizes}, {"PARTS": PARTS})
    return 0


def _registers(vectors: int) -> int | None:
    """Of a thread. Six vectors of 16 bits spill six on sm_100 unless told; the others take what they need."""
    return 112 if vectors == 6 else None


STREAMING = (block_products_kernel,)


def configurations() -> Iterator[Configuration]:
    """Every form that a launch can ask for, with aligned pointers."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pointers = {**dict.fromkeys((f"v{i}" for i in range(VECTORS)), "*" + TYPES[dtype]), "partials": "*fp64"}
        for number in range(1, VECTORS + 1):
            constants = {"VECTORS": number, "ROWS": ROWS, "COLUMNS": 16 // dtype.itemsize, "BLOCK": BLOCK}
            yield Configuration(
                block_products_kernel,
                (*pointers.items(), ("count", "i64")),
                tuple(constants.items()),
                tuple(pointers),
                WARPS,
                fp_fusion=True,
                registers=_registers(number),
            )
    arguments = {"partials": "*fp64", "gram": "*fp64", "blocks": "i64", "vectors": "i64"}
    yield aligned_form(add_products_kernel, arguments, {"PARTS": PARTS})


def bytes_moved(count: int, vectors: int, itemsize: int = 4) -> int:
    """What the op has to read and write, at most 8 vectors of `count` elements."""
    return count * vectors * itemsize + 8 * vectors**2
