"""The Gram matrix of per-segment weight gradients of a linear layer, in tiles: no segment's whole gradient exists.

Operations, with N the rows of all segments: the gradients take 2 N d_in d_out, the Gram S^2 d_in d_out (one triangle).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastadv import dispatch, validation
from fastadv.rows import Rows

SCRATCH_BYTES = {"cpu": 2**24, "cuda": 2**30}  # of a tile, where the caller does not say, by kind of device
KERNELS = ("cpu", "triton")
SUM_LENGTH = 2**15  # products that are added in float32 before their sum goes to float64
TRIANGLE_BLOCKS = 8  # of which 36 in 64 are multiplied
LEAST_BLOCK = 16  # segments
LEAST_ROWS = 32  # of a tile: thinner products are slow


class Run(NamedTuple):
    """Rows of one segment that lie together: its inputs from `input_row`, its gradients from `gradient_row`."""

    segment: int
    input_row: int
    gradient_row: int
    rows: int


class Part(NamedTuple):
    """Inputs and output gradients of a linear layer for some segments, each of which is in one part only."""

    inputs: Tensor  # [n, d_in]
    output_gradients: Tensor  # [m, d_out]
    runs: Sequence[Run]


class Tile(NamedTuple):
    """A block of the weight gradient of every segment; the next tile overwrites it."""

    values: Tensor  # [S, rows, columns]
    row: int  # first row of the weight
    column: int  # first column

    def flat(self) -> Tensor:
        """`[S, rows * columns]`."""
        return self.values.flatten(1)


def tile_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the gradients of a dtype are computed in."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def whole_float32() -> Iterator[None]:
    """PyTorch's float32 products in float32, where it was told to round factors (to TF32, or bfloat16): nearly equal
    gradients differ by less. The setting is of the process, and set back at the end."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # PyTorch before 2.9
        whole = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("highest")
            yield
        finally:
            torch.set_float32_matmul_precision(whole)
        return
    backends: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def tile_shape(segments: int, d_out: int, d_in: int, itemsize: int, scratch_bytes: int) -> tuple[int, int]:
    """Rows and columns of a tile: whole rows where LEAST_ROWS of them fit, else as many columns as do."""
    numbers = max(1, scratch_bytes // (itemsize * max(1, segments)))
    rows = min(d_out, max(min(LEAST_ROWS, numbers), numbers // max(1, d_in)))
    return rows, min(d_in, max(1, numbers // max(1, rows)))


def weight_gradient_tiles(
    parts: Sequence[Part], segments: int, scratch_bytes: int, backend: str = "auto"
) -> Iterator[Tile]:
    """The weight gradients of all segments, a tile at a time; segments without rows have 0.

    "triton" multiplies for all segments of a part in one launch, the other backends by PyTorch, one after the other.
    """
    if not parts or not segments:
        return
    d_in, d_out = parts[0].inputs.shape[1], parts[0].output_gradients.shape[1]
    if not d_in * d_out:
        return
    dtype, device = tile_dtype(parts[0].inputs.dtype), parts[0].inputs.device
    rows, columns = tile_shape(segments, d_out, d_in, dtype.itemsize, scratch_bytes)
    backend = dispatch.resolve(
        "segment_weight_gram", backend, *(t for part in parts for t in part[:2]), kernels=KERNELS
    )
    multiply = _grouped(parts) if backend == "triton" else _one_by_one(parts)
    there = {run.segment for part in parts for run in part.runs if run.rows}
    absent = torch.tensor([s for s in range(segments) if s not in there], dtype=torch.int64, device=device)
    scratch = torch.empty(segments * rows * columns, dtype=dtype, device=device)
    for row in range(0, d_out, rows):
        for column in range(0, d_in, columns):
            shape = (segments, min(rows, d_out - row), min(columns, d_in - column))
            values = scratch[: shape[0] * shape[1] * shape[2]].view(shape)
            values[absent] = 0
            tile = Tile(values, row, column)
            multiply(tile)
            yield tile


def _one_by_one(parts: Sequence[Part]) -> Callable[[Tile], None]:
    def multiply(tile: Tile) -> None:
        values, row, column = tile
        for inputs, gradients, runs in parts:
            x = inputs[:, column : column + values.shape[2]].to(values.dtype)
            dy = gradients[:, row : row + values.shape[1]].to(values.dtype).t()
            for segment, input_row, gradient_row, count in runs:
                if count:
                    left, right = dy[:, gradient_row : gradient_row + count], x[input_row : input_row + count]
                    torch.mm(left, right, out=values[segment])

    return multiply


def _grouped(parts: Sequence[Part]) -> Callable[[Tile], None]:
    kernels = importlib.import_module("fastadv.triton_kernels.segment_weights")
    arguments = [
        (_rows_of(inputs), _rows_of(gradients), torch.tensor(runs, dtype=torch.int64, device=inputs.device).view(-1, 4))
        for inputs, gradients, runs in parts
    ]

    def multiply(tile: Tile) -> None:
        for inputs, gradients, runs in arguments:
            kernels.segment_weights(inputs, gradients, runs, *tile)

    return multiply


def _rows_of(matrix: Tensor) -> Tensor:
    """The matrix with neighbouring columns, as the kernel reads it."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


class GramSum:
    """`H [S, S]` float64, summed over parts of the gradients. Only one triangle is multiplied."""

    def __init__(self, segments: int, device: torch.device) -> None:
        self.segments = segments
        self.upper = torch.zeros(segments, segments, dtype=torch.float64, device=device)

    def add(self, vectors: Tensor, segments: Tensor | None = None) -> None:
        """Adds inner products of `vectors [k, n]`, gradients of all segments or of these (`[k]` int64, rising)."""
        vectors = vectors.to(tile_dtype(vectors.dtype))
        k = vectors.shape[0]
        block = max(LEAST_BLOCK, -(-k // TRIANGLE_BLOCKS))
        for columns in torch.split(vectors, SUM_LENGTH, dim=1):
            for a in range(0, k, block):
                b = min(k, a + block)
                # Many rows by few: the other way round, libraries for the CPU take twice as long.
                products = (columns[:b] @ columns[a:b].t()).to(torch.float64)  # [b, b - a]
                if segments is None:
                    self.upper[:b, a:b] += products
                else:
                    self.upper[segments[:b, None], segments[a:b]] += products

    def finite(self) -> bool:
        """Whether all sums are. On a GPU this waits."""
        return bool(self.upper.isfinite().all())

    def whole(self) -> Tensor:
        """`H`, both triangles."""
        upper = self.upper.triu()
        return upper + upper.triu(1).t()


def segment_weight_gram(
    inputs: Tensor,
    output_gradients: Tensor,
    cu_seqlens: Tensor,
    gram: Tensor,
    *,
    scratch_bytes: int | None = None,
    backend: str = "auto",
) -> None:
    """Adds the inner products of the segments' weight gradients `u_s = output_gradients[s]^T inputs[s]` to `gram`.

    Products are float32 within a tile (float64 of float64 inputs) and float64 across tiles.

    Args:
        inputs: `[N, d_in]`, any strides.
        output_gradients: `[N, d_out]`, dtype of inputs, any strides.
        cu_seqlens: `[S + 1]`, ends of the segments; reading it waits for a GPU.
        gram: `[S, S]` float64, added to.
        scratch_bytes: most that a tile takes; None: SCRATCH_BYTES of the device.
        backend: "auto" or a name: "triton", on a GPU, or "reference" and "cpu", whose products are PyTorch's.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, scratch_bytes below 1.
    """
    op = "segment_weight_gram"
    validation.tensor(op, "inputs", inputs, dtypes=validation.FLOATS)
    validation.tensor(op, "output_gradients", output_gradients, dtypes=(inputs.dtype,), device=inputs.device)
    if inputs.dim() != 2 or output_gradients.dim() != 2 or inputs.shape[0] != output_gradients.shape[0]:
        raise ValueError(
            f"{op}: inputs has shape {list(inputs.shape)}, output_gradients {list(output_gradients.shape)}; expected "
            "[N, d_in] and [N, d_out]"
        )
    rows = Rows.of(op, "inputs", inputs.new_empty(1).expand(inputs.shape[0]), cu_seqlens)
    segments = rows.count
    validation.tensor(op, "gram", gram, shape=(segments, segments), dtypes=(torch.float64,), device=inputs.device)
    scratch_bytes = checked_scratch(op, scratch_bytes, inputs.device)
    starts, counts = cu_seqlens[:-1].tolist(), rows.lengths().tolist()
    runs = [Run(s, start, start, count) for s, (start, count) in enumerate(zip(starts, counts, strict=True))]
    part = Part(inputs, output_gradients, runs)
    with torch.no_grad(), whole_float32():
        total = GramSum(segments, inputs.device)
        for tile in weight_gradient_tiles([part], segments, scratch_bytes, backend):
            total.add(tile.flat())
        gram += total.whole()


def checked_scratch(op: str, scratch_bytes: int | None, device: torch.device) -> int:
    """The scratch that is given, or the device's. Raises TypeError or ValueError where it is none."""
    if scratch_bytes is None:
        return SCRATCH_BYTES.get(device.type, SCRATCH_BYTES["cpu"])
    validation.integer(op, "scratch_bytes", scratch_bytes, least=1)
    return scratch_bytes
