"""Weight gradients of segments as grouped products in Triton: interpreted, and compiled for a GPU that is not here."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

import fastadv as fa
from bench import compiled_code, kernel_registry
from fastadv import gradproj
from fastadv.reference import segment_weight_gram as reference

MODULE = "fastadv.triton_kernels.segment_weights"
kernels = importlib.import_module(MODULE)

LENGTHS = (5, 0, 70, 1, 16, 64)  # a block of rows, one more, none
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}  # of sums, whose terms are exact


def drawn(dtype: torch.dtype, d_in: int, d_out: int, *, gap: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and gradients with rows that no run has, which hold NaN, and the runs, last segment first."""
    generator = torch.Generator().manual_seed(d_in + d_out)
    rows = sum(LENGTHS) + 2 * len(LENGTHS)
    x = torch.randn(rows, d_in + gap, generator=generator).to(dtype)
    dy = torch.randn(rows + 3, d_out + gap, generator=generator).to(dtype)
    runs, inside = [], torch.zeros(rows, dtype=torch.bool)
    at = 0
    for segment, length in enumerate(LENGTHS):
        runs.append((segment, at, at + 3, length))
        inside[at : at + length] = True
        at += length + 2
    x[~inside] = torch.nan
    dy[:3] = torch.nan
    dy[3:][~inside] = torch.nan
    return x[:, :d_in], dy[:, :d_out], torch.tensor(runs[::-1])


def exact(x: Tensor, dy: Tensor, runs: Tensor) -> Tensor:
    """`[S, d_out, d_in]` float64."""
    out = torch.zeros(len(LENGTHS), dy.shape[1], x.shape[1], dtype=torch.float64)
    for segment, input_row, gradient_row, count in runs.tolist():
        left = dy[gradient_row : gradient_row + count].double()
        out[segment] = left.T @ x[input_row : input_row + count].double()
    return out


def assert_tile(x: Tensor, dy: Tensor, runs: Tensor, row: int, rows: int, column: int, columns: int) -> None:
    tile = torch.full((len(LENGTHS), rows, columns), torch.nan)
    kernels.segment_weights(x, dy, runs, tile, row, column)
    wanted = exact(x, dy, runs)[:, row : row + rows, column : column + columns]
    scale = float(wanted.abs().max())
    torch.testing.assert_close(tile.double(), wanted, rtol=0, atol=TOLERANCE[x.dtype] * scale)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("d_in", "d_out", "gap"),
    [(128, 128, 0), (144, 272, 0), (96, 64, 16), (20, 33, 0), (130, 65, 3), (1, 1, 0)],
    ids=["whole blocks", "parts of blocks", "in wider rows", "odd", "odd rows", "one number"],
)
def test_the_gradients_of_all_segments(dtype: torch.dtype, d_in: int, d_out: int, gap: int) -> None:
    assert_tile(*drawn(dtype, d_in, d_out, gap=gap), 0, d_out, 0, d_in)


@pytest.mark.parametrize(("row", "rows", "column", "columns"), [(16, 32, 32, 64), (3, 30, 5, 41), (127, 1, 0, 96)])
def test_a_tile_of_a_weight(row: int, rows: int, column: int, columns: int) -> None:
    assert_tile(*drawn(torch.float32, 96, 128), row, rows, column, columns)


def test_segments_without_a_run_are_left_alone() -> None:
    x, dy, runs = drawn(torch.float32, 16, 16)
    tile = torch.full((len(LENGTHS), 16, 16), 7.0)
    kernels.segment_weights(x, dy, runs[runs[:, 0] != 2], tile, 0, 0)
    assert (tile[2] == 7).all()
    assert (tile[1] == 0).all()  # one without rows
    kernels.segment_weights(x, dy, runs[:0], tile, 0, 0)
    assert (tile[2] == 7).all()


def test_a_segment_does_not_depend_on_the_others() -> None:
    x, dy, runs = drawn(torch.bfloat16, 32, 48)
    together, alone = torch.zeros(len(LENGTHS), 48, 32), torch.zeros(len(LENGTHS), 48, 32)
    kernels.segment_weights(x, dy, runs, together, 0, 0)
    for run in runs:
        kernels.segment_weights(x, dy, run[None], alone, 0, 0)
    assert torch.equal(together, alone)


def test_blocks_move_16_bytes_at_a_time() -> None:
    """Of 16-bit floats whose strides are multiples of 16, beside the run's four numbers."""
    entries = [e for e in kernel_registry.entries(MODULE) if dict(e.configuration.constants)["VECTOR"] > 1]
    entries = [e for e in entries if dict(e.configuration.signature)["inputs"] == "*bf16"]
    assert len(entries) == 2
    for facts in compiled_code.inspect_all(entries).values():
        assert isinstance(facts, compiled_code.Facts), facts
        assert set(facts.loads) == {"64", "128"}
        assert facts.loads["64"] == 4
        assert set(facts.stores) == {"128"}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_gram_of_the_gradients(dtype: torch.dtype) -> None:
    """The op on both of its ways, in one tile and in several, with gradients that lie transposed."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    x = torch.randn(int(ends[-1]), 24, generator=generator).to(dtype)
    dy = torch.randn(40, int(ends[-1]), generator=generator).to(dtype).t()
    exact_gram = reference.segment_weight_gram(x, dy, ends)
    for backend in ("reference", "triton"):
        for scratch in (None, 4 * 24 * 20 * len(LENGTHS)):
            gram = torch.ones(len(LENGTHS), len(LENGTHS), dtype=torch.float64)
            gradproj.segment_weight_gram(x, dy, ends, gram, scratch_bytes=scratch, backend=backend)
            assert fa.last_backend() == backend
            torch.testing.assert_close(gram - 1, exact_gram, rtol=0, atol=1e-6 * float(exact_gram.max()))
