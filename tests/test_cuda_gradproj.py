"""CUDA kernels of multi_dot_gram and count_sketch, compiled for the CPU: edges, orders of threads, launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda_kernels
import pytest
import torch
from cuda_emulation import build

import fastadv as fa
from fastadv import cuda
from fastadv.gradproj import count_sketch

pytestmark = pytest.mark.skipif(cuda_kernels.missing() is not None, reason=str(cuda_kernels.missing()))

BLOCK = 16_384  # kGramBlock
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ORDERS = ("forward", "backward", "7")


def test_the_block_is_the_kernels() -> None:
    assert cuda.module().GRAM_BLOCK == BLOCK


@pytest.mark.parametrize("size", [0, 1, 1023, 1025, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_at_the_edges_of_blocks(size: int, dtype: torch.dtype, poisoned_memory: None) -> None:
    vectors = [torch.randn(size).to(dtype) for _ in range(3)]
    exact = fa.multi_dot_gram(vectors, backend="reference")
    gram = fa.multi_dot_gram(vectors, backend="cuda")
    torch.testing.assert_close(gram, exact, rtol=0, atol=2e-7 * float(exact.max()))
    assert torch.equal(gram, gram.T)


@pytest.mark.parametrize("count", range(1, 10))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_vectors_aligned_or_not(count: int, dtype: torch.dtype, poisoned_memory: None) -> None:
    vectors = [torch.randn(2001).to(dtype) for _ in range(count)]
    exact = fa.multi_dot_gram(vectors, backend="reference")
    gram = fa.multi_dot_gram(vectors, backend="cuda")
    torch.testing.assert_close(gram, exact, rtol=0, atol=2e-7 * float(exact.max()))
    unaligned = [torch.cat([v[:1], v])[1:] for v in vectors]
    assert unaligned[0].data_ptr() % 16
    assert torch.equal(fa.multi_dot_gram([*vectors[:-1], unaligned[-1]], backend="cuda"), gram)


def test_the_order_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, values = [torch.randn(BLOCK + 999) for _ in range(2)], torch.randn(40, 101)
    values[7, 30] = torch.nan
    runs = []
    with fa.checks("off"):
        for order in ORDERS:
            monkeypatch.setenv("CUDA_EMULATION_ORDER", order)
            runs.append(
                (fa.multi_dot_gram(vectors, backend="cuda"), count_sketch(values, 333, copies=2, backend="cuda"))
            )
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


# A warp takes 16 chunks and a block 128, of one row or of many.
SHAPES = ((1, 511), (1, 512), (1, 513), (1, 4096), (1, 4097), (127, 32), (129, 33), (300, 1), (17, 65), (3, 0), (0, 40))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sketch_has_the_bits_of_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, poisoned_memory: None
) -> None:
    values = torch.randn(shape).to(dtype)
    for offset in (0, 31, 96):
        given: dict[str, Any] = {"size": 100, "copies": 2, "column_offset": offset, "row_offset": 3}
        right = count_sketch(values, **given, backend="reference")
        assert torch.equal(count_sketch(values, **given, backend="cuda"), right)


def launches(call: Callable[[], Any]) -> int:
    before = build.operations(cuda.module())
    call()
    return build.operations(cuda.module()) - before


def test_launches() -> None:
    vectors, out = [torch.randn(3 * BLOCK) for _ in range(9)], torch.zeros(5, 64, dtype=torch.int64)
    assert launches(lambda: fa.multi_dot_gram(vectors[:8], backend="cuda")) == 2
    assert launches(lambda: fa.multi_dot_gram(vectors, backend="cuda")) == 6  # 4 + 4, 4 + 1, 4 + 1 of them
    assert launches(lambda: fa.multi_dot_gram([torch.empty(0)], backend="cuda")) == 1
    assert launches(lambda: count_sketch(vectors[0], 64, copies=5, out=out, backend="cuda")) == 1
    assert launches(lambda: count_sketch(torch.empty(0), 64, copies=5, out=out, backend="cuda")) == 0


def test_what_the_launchers_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="too many vectors for one pass"):
        cuda.module().multi_dot_gram(0, 0, 0, 1, [0] * 9, 0, 0)
    with pytest.raises(ValueError, match="too many vectors for one pass"):
        cuda.module().multi_dot_gram(0, 0, 0, 1, [], 0, 0)
