"""The count sketch of a piece of a parameter.

One launch. Reads 4 bytes an element in float32, and adds 8 a copy to slots that lie in the cache where the sketch is no
larger. Sums are integers, so the order of atomics changes nothing.

A piece begins at any column, and chunks with it, so reads are of single elements, neighbours in a warp; additions are
then of neighbours too. Each lane hashes the chunk for itself: with all of that, the CUDA kernel is the faster one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from fastadv.triton_kernels._forms import aligned_form
from fastadv.triton_kernels._launch import TYPES, Configuration, blocks, launch
from torch import Tensor

CHUNK = tl.constexpr(32)  # columns that share a hash
LIMIT = tl.constexpr(2.0**50)  # quanta that a value stays below
CHUNKS = 32  # of a program
NUMBERS = {
    "rows": "i64", "columns": "i64", "row_offset": "i64", "column_offset": "i64", "key": "i64", "scale": "fp32",
    "copies": "i64", "size": "i64",
}  # fmt: skip


@triton.jit(
    do_not_specialize=["rows", "columns", "row_offset", "column_offset", "key", "scale", "copies", "size"],
)
def count_sketch_kernel(
    values,  # [rows, columns] float32, bfloat16 or float16
    out,  # [copies, size] int64
    rows: tl.int64,
    columns: tl.int64,
    row_offset: tl.int64,
    column_offset: tl.int64,
    key: tl.int64,
    scale,
    copies: tl.int64,
    size: tl.int64,
    CHUNKS: tl.constexpr,
):
    first = column_offset // CHUNK
    in_row = tl.cdiv(column_offset + columns, CHUNK) - first
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)  # [CHUNKS], of the piece
    row = chunk // in_row
    number = chunk - row * in_row
    place = tl.arange(0, CHUNK)[None, :]  # [1, 32]
    column = (number * CHUNK - column_offset % CHUNK)[:, None] + place  # [CHUNKS, 32]
    there = (row < rows)[:, None] & (column >= 0) & (column < columns)
    quanta = tl.load(values + row[:, None] * columns + column, mask=there, other=0.0).to(tl.float32) * scale
    good = (quanta < LIMIT) & (quanta > -LIMIT)  # not of NaN
    bad = tl.sum((~good).to(tl.int64), axis=1)  # [CHUNKS]
    quanta = tl.where(good, quanta, 0.0)
    # To the nearest whole number, ties to even: below 2^23, adding that leaves no bit for a fraction.
    magnitude = tl.abs(quanta)
    magnitude = tl.where(magnitude < 8388608.0, (magnitude + 8388608.0) - 8388608.0, magnitude)
    whole = magnitude.to(tl.int64)
    whole = tl.where(quanta < 0, -whole, whole)  # [CHUNKS, 32]
    poison = bad[:, None] << (62 - place).to(tl.int64)
    for copy in range(copies):
        of_copy = _descend(key.to(tl.uint64, bitcast=True), tl.full((), 1, tl.int64) * copy)
        of_row = _descend(of_copy, row_offset + row)
        state = _descend(of_row, first + number)  # [CHUNKS] uint64
        start = ((state >> 32) * size.to(tl.uint64) >> 32).to(tl.int64)
        negative = (state[:, None] >> place.to(tl.uint64)) & 1  # [CHUNKS, 32]
        amount = tl.where(negative == 1, -whole, whole) + poison
        slot = start[:, None] + place
        slot = tl.where(slot < size, slot, slot - size)
        tl.atomic_add(out + copy * size + slot, amount, mask=amount != 0, sem="relaxed")


@triton.jit
def _descend(state, number):
    """The state below a state with this number, uint64. See csrc/include/fastadv/count_sketch.h."""
    x = state + (number.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def count_sketch(
    values: Tensor, key: int, row_offset: int, column_offset: int, quantum: float, copies: int, size: int, out: Tensor
) -> int:
    """See `fastadv.ops.count_sketch.COUNT_SKETCH`."""
    rows, columns = (1, values.shape[0]) if values.dim() == 1 else values.shape
    in_row = blocks(column_offset + columns, CHUNK.value) - column_offset // CHUNK.value
    arguments = {
        "values": values.contiguous(), "out": out, "rows": rows, "columns": columns, "row_offset": row_offset,
        "column_offset": column_offset, "key": key, "scale": 1 / quantum, "copies": copies, "size": size,
    }  # fmt: skip
    launch(count_sketch_kernel, (blocks(rows * in_row, CHUNKS) if columns else 0,), arguments, {"CHUNKS": CHUNKS})
    return 0


STREAMING = ()


def configurations() -> Iterator[Configuration]:
    """Every form that a launch can ask for, with aligned pointers."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        arguments = {"values": "*" + TYPES[dtype], "out": "*i64", **NUMBERS}
        yield aligned_form(count_sketch_kernel, arguments, {"CHUNKS": CHUNKS})


def bytes_moved(elements: int, slots: int, itemsize: int = 4) -> int:
    """What the op has to read, and to add to slots, where elements go to that many."""
    return elements * itemsize + 8 * slots
