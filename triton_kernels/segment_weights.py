"""A block of the weight gradient of every segment, `output_gradients[s]^T inputs[s]`: grouped matrix products.

One launch for all segments. A program multiplies a segment's rows for BLOCK_OUT x BLOCK_IN numbers of the weight, on
tensor cores; each input is read once for every BLOCK_OUT rows of the weight, and each gradient once for every BLOCK_IN
columns. 16-bit inputs are multiplied as they are and added up in float32; float32 inputs as three products of tf32
parts, which leave out that of the two low ones, some 2^-22 of a product.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl
from fastadv.triton_kernels._launch import TYPES, Configuration, blocks, launch
from torch import Tensor

BLOCK_OUT, BLOCK_IN = 128, 128
BLOCK_ROWS = {torch.float32: 16, torch.bfloat16: 64, torch.float16: 64}
WARPS, STAGES = 8, 3
VECTOR = 16  # elements: strides and offsets that are multiples of it let 16 bytes be moved at a time


@triton.jit(do_not_specialize=["input_stride", "gradient_stride", "first_row", "first_column", "rows", "columns"])
def segment_weights_kernel(
    inputs,  # [n, d_in], rows input_stride apart
    output_gradients,  # [m, d_out], rows gradient_stride apart
    runs,  # [R, 4] int64: segment, first row of inputs, first row of output_gradients, number of rows
    tile,  # [S, rows, columns] float32
    input_stride: tl.int64,  # in units of VECTOR
    gradient_stride: tl.int64,  # likewise
    first_row: tl.int64,  # of the weight, likewise
    first_column: tl.int64,  # likewise
    rows: tl.int64,  # of the tile, likewise
    columns: tl.int64,  # likewise
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    WHOLE: tl.constexpr,  # the tile is made of whole blocks
):
    run = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    # Multiplied by a constant, for the compiler to know that they are multiples of it.
    input_stride, gradient_stride = input_stride * VECTOR, gradient_stride * VECTOR
    first_row, first_column = first_row * VECTOR, first_column * VECTOR
    rows, columns = rows * VECTOR, columns * VECTOR
    across = tl.cdiv(columns, BLOCK_IN)
    row, column = block // across * BLOCK_OUT, block % across * BLOCK_IN
    segment = tl.load(runs + 4 * run)
    x = inputs + tl.load(runs + 4 * run + 1) * input_stride
    dy = output_gradients + tl.load(runs + 4 * run + 2) * gradient_stride
    count = tl.load(runs + 4 * run + 3)
    of_row = row + tl.arange(0, BLOCK_OUT)  # [BLOCK_OUT]
    of_column = column + tl.arange(0, BLOCK_IN)  # [BLOCK_IN]
    x += first_column + of_column[None, :]
    dy += first_row + of_row[None, :]
    total = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for start in range(0, count, BLOCK_ROWS):
        token = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)[:, None]  # [BLOCK_ROWS, 1]
        left_mask, right_mask = token < count, token < count
        if not WHOLE:
            left_mask &= of_row[None, :] < rows
            right_mask &= of_column[None, :] < columns
        left = tl.load(dy + token * gradient_stride, mask=left_mask, other=0.0)
        right = tl.load(x + token * input_stride, mask=right_mask, other=0.0)
        total = tl.dot(tl.trans(left), right, total, input_precision="tf32x3")
    place = tile + (segment * rows + of_row[:, None]) * columns + of_column[None, :]
    if WHOLE:
        tl.store(place, total)
    else:
        tl.store(place, total, mask=(of_row[:, None] < rows) & (of_column[None, :] < columns))


def segment_weights(
    inputs: Tensor, output_gradients: Tensor, runs: Tensor, tile: Tensor, first_row: int, first_column: int
) -> None:
    """Writes to `tile` each run's block of its segment's weight gradient; segments without a run are left alone.

    Args:
        inputs: `[n, d_in]` float32, bfloat16 or float16, rows any distance apart, columns neighbours.
        output_gradients: `[m, d_out]`, likewise, of the same dtype.
        runs: `[R, 4]` int64, contiguous: segment, first row of inputs, first row of output_gradients, number of rows;
            one run a segment.
        tile: `[S, rows, columns]` float32, contiguous: rows and columns of the weight from first_row and first_column.
    """
    _, rows, columns = tile.shape
    numbers = (inputs.stride(0), output_gradients.stride(0), first_row, first_column, rows, columns)
    vector = VECTOR if all(n % VECTOR == 0 for n in numbers) else 1
    block_out = _block_out(vector)
    launch(
        segment_weights_kernel,
        (runs.shape[0], blocks(rows, block_out) * blocks(columns, BLOCK_IN)),
        {
            "inputs": inputs,
            "output_gradients": output_gradients,
            "runs": runs,
            "tile": tile,
            "input_stride": inputs.stride(0) // vector,
            "gradient_stride": output_gradients.stride(0) // vector,
            "first_row": first_row // vector,
            "first_column": first_column // vector,
            "rows": rows // vector,
            "columns": columns // vector,
        },
        _constants(inputs.dtype, vector, vector > 1 and rows % block_out == 0 and columns % BLOCK_IN == 0),
        num_warps=WARPS,
        num_stages=STAGES,
    )


def _block_out(vector: int) -> int:
    """Rows of the weight that a program takes: element by element, the loads take registers for half as many."""
    return BLOCK_OUT if vector > 1 else BLOCK_OUT // 2


def _constants(dtype: torch.dtype, vector: int, whole: bool) -> dict[str, int | bool]:
    return {
        "BLOCK_OUT": _block_out(vector), "BLOCK_IN": BLOCK_IN, "BLOCK_ROWS": BLOCK_ROWS[dtype], "VECTOR": vector,
        "WHOLE": whole,
    }  # fmt: skip


STREAMING = ()  # products are bound by operations
PRODUCTS = (segment_weights_kernel,)


def configurations() -> Iterator[Configuration]:
    """Every form that a launch can ask for, with aligned pointers."""
    numbers = ("input_stride", "gradient_stride", "first_row", "first_column", "rows", "columns")
    for dtype, (vector, whole) in product(BLOCK_ROWS, ((VECTOR, True), (VECTOR, False), (1, False))):
        pointers = {
            "inputs": "*" + TYPES[dtype], "output_gradients": "*" + TYPES[dtype], "runs": "*i64", "tile": "*fp32",
        }  # fmt: skip
        yield Configuration(
            segment_weights_kernel,
            tuple((pointers | dict.fromkeys(numbers, "i64")).items()),
            tuple(_constants(dtype, vector, whole).items()),
            tuple(pointers),
            WARPS,
            STAGES,
        )


def operations(rows: int, d_out: int, d_in: int) -> int:
    """Multiplications and additions of the weight gradients of segments that hold so many rows together."""
    return 2 * rows * d_out * d_in
