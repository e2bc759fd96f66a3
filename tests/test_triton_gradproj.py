"""Triton kernels of multi_dot_gram and count_sketch, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from launch_recorder import launches, never_launched, unlisted
from strict_interpreter import traffic

import fastadv as fa
from fastadv.gradproj import count_sketch

BLOCK = 16_384
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODULES = ["fastadv.triton_kernels.multi_dot_gram", "fastadv.triton_kernels.count_sketch"]


@pytest.mark.parametrize("size", [0, 1, 511, 513, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_at_the_edges_of_blocks(size: int, dtype: torch.dtype, poisoned_memory: None) -> None:
    vectors = [torch.randn(size).to(dtype) for _ in range(2)]
    exact = fa.multi_dot_gram(vectors, backend="reference")
    gram = fa.multi_dot_gram(vectors, backend="triton")
    torch.testing.assert_close(gram, exact, rtol=0, atol=2e-7 * float(exact.max()))
    assert torch.equal(gram, gram.T)


def test_many_blocks_are_added_up() -> None:
    """More than the second kernel reads at once."""
    from fastadv.triton_kernels import multi_dot_gram

    partials, gram = (
        torch.rand(2 * multi_dot_gram.PARTS + 3, 3, dtype=torch.float64),
        torch.empty(2, 2, dtype=torch.float64),
    )
    arguments = {"partials": partials, "gram": gram, "blocks": len(partials), "vectors": 2}
    multi_dot_gram.launch(multi_dot_gram.add_products_kernel, (3,), arguments, {"PARTS": multi_dot_gram.PARTS})
    sums = partials.sum(0)
    torch.testing.assert_close(gram, torch.stack([sums[:2], sums[1:]]), rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(1, 1023), (1, 1025), (33, 32), (70, 1), (5, 65), (3, 0), (0, 40)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sketch_has_the_bits_of_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    values = torch.randn(shape).to(dtype)
    for offset in (0, 31):
        given = {"copies": 2, "column_offset": offset, "row_offset": 3}
        right = count_sketch(values, 100, **given, backend="reference")
        assert torch.equal(count_sketch(values, 100, **given, backend="triton"), right)


def calls() -> Iterator[Callable[[], object]]:
    for dtype in DTYPES:
        vectors = [torch.randn(40).to(dtype) for _ in range(8)]
        for number in range(1, 9):
            yield lambda some=vectors[:number]: fa.multi_dot_gram(some, backend="triton")
        yield lambda v=vectors[0]: count_sketch(v, 64, backend="triton")


def test_what_is_launched_is_listed() -> None:
    found = launches(calls())
    assert unlisted(found) == []
    assert never_launched(found, MODULES) == []


def test_each_vector_is_read_once() -> None:
    vectors = [torch.randn(BLOCK + 100) for _ in range(3)]
    with traffic() as moved:
        fa.multi_dot_gram(vectors, backend="triton")
    for name in ("v0", "v1", "v2"):
        assert moved[name].loads == vectors[0].nbytes
