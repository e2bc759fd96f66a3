"""multi_dot_gram and count_sketch: by hand, against slow Python, and what the sketch promises of its error."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from op_cases import BACKENDS, EMULATED, INTERPRETED, NEEDS_EMULATION
from torch import Tensor

import fastadv as fa
from fastadv import native
from fastadv.gradproj import count_sketch, sketch_values

ON = pytest.mark.parametrize("backend", BACKENDS)
EVERYWHERE = pytest.mark.parametrize(
    "backend",
    [*BACKENDS, *INTERPRETED, *(pytest.param(name, marks=NEEDS_EMULATION) for name in EMULATED)],
)

# ---- inner products --------------------------------------------------------------------------------------------------


def close(gram: Tensor, vectors: list[Tensor]) -> None:
    """As good as float32 products: relative to the vectors' lengths, which bound a product."""
    exact = fa.multi_dot_gram([v.double() for v in vectors], backend="reference")
    assert gram.dtype == torch.float64
    assert torch.equal(gram, gram.T)
    lengths = exact.diagonal().sqrt()
    assert float(((gram - exact).abs() / (lengths[:, None] * lengths + 1e-300)).max()) < 2e-7


@EVERYWHERE
def test_products_by_hand(backend: str) -> None:
    a, b = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([4.0, 0.5, 0.0])
    assert fa.multi_dot_gram([a, b], backend=backend).tolist() == [[14.0, 3.0], [3.0, 16.25]]
    assert fa.multi_dot_gram([b], backend=backend).tolist() == [[16.25]]
    assert fa.last_backend() == backend


SIZES = (0, 1, 15, 16, 17, 511, 513, 4095, 4097, 65_535, 65_536, 65_537, 200_003)  # around lanes, tiles, blocks


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_size_and_number_of_vectors(size: int, dtype: torch.dtype) -> None:
    vectors = [torch.randn(size).to(dtype) for _ in range(13)]
    for count in range(1, 14):
        close(fa.multi_dot_gram(vectors[:count], backend="cpu"), vectors[:count])


@EVERYWHERE
@pytest.mark.parametrize("count", [2, 8, 9, 13])
def test_a_product_does_not_depend_on_the_other_vectors(count: int, backend: str) -> None:
    vectors = [torch.randn(700) for _ in range(count)]
    gram = fa.multi_dot_gram(vectors, backend=backend)
    for i, j in ((0, 0), (count - 1, 0), (count // 2, count - 1)):
        assert gram[i, j] == fa.multi_dot_gram([vectors[i], vectors[j]], backend=backend)[0, 1]


def test_sums_stay_exact_where_torch_dot_loses_digits() -> None:
    x = torch.rand(2**23)
    exact = float(x.double().dot(x.double()))
    ours = abs(float(fa.multi_dot_gram([x], backend="cpu")) / exact - 1)
    assert ours < 1e-8
    assert ours < 0.1 * abs(float(torch.dot(x, x)) / exact - 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_squares_of_short_numbers_are_not_rounded_one_way(dtype: torch.dtype) -> None:
    """In float32 sums eight times as long they are: by 2.5e-7 of the sum."""
    x = torch.randn(2**18).to(dtype)
    exact = float(fa.multi_dot_gram([x], backend="reference"))
    assert abs(float(fa.multi_dot_gram([x], backend="cpu")) / exact - 1) < 8e-8


def test_a_difference_of_products_keeps_nothing_that_the_product_of_differences_keeps() -> None:
    """Nearly parallel gradients: pass differences. Theirs is as good as any; from the others' Gram it is not."""
    reference = torch.randn(100_000)
    other = reference + 1e-4 * torch.randn(100_000)
    exact = float((other.double() - reference.double()).square().sum())
    gram = fa.multi_dot_gram([reference, other], backend="cpu")
    apart = float(gram[0, 0] - 2 * gram[0, 1] + gram[1, 1])
    together = float(fa.multi_dot_gram([reference, other - reference], backend="cpu")[1, 1])
    assert abs(together / exact - 1) < 1e-6
    assert abs(apart / exact - 1) > 1e-5


@EVERYWHERE
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_in_each_of_its_products_and_no_other(bad: float, backend: str) -> None:
    vectors = [1 + torch.rand(600) for _ in range(3)]
    clean = fa.multi_dot_gram(vectors, backend=backend)
    vectors[1][555] = bad
    gram = fa.multi_dot_gram(vectors, backend=backend)
    assert not gram[1].isfinite().any()
    assert not gram[:, 1].isfinite().any()
    for i, j in ((0, 0), (0, 2), (2, 2)):
        assert gram[i, j] == clean[i, j]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "every third": lambda x: torch.stack([x, -x, 0 * x], -1)[..., 0],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "permuted": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
}


@EVERYWHERE
@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, backend: str) -> None:
    vectors = [torch.randn(5, 7, 11) for _ in range(2)]
    laid_out = [VIEWS[view](v) for v in vectors]
    assert torch.equal(laid_out[0], vectors[0])
    gram = fa.multi_dot_gram(laid_out, backend=backend)
    assert torch.equal(gram, fa.multi_dot_gram([v.flatten() for v in vectors], backend=backend))
    assert torch.equal(gram, fa.multi_dot_gram([laid_out[0], vectors[1]], backend=backend))


def test_an_expanded_and_an_empty_vector_and_a_number() -> None:
    for backend in BACKENDS:
        assert fa.multi_dot_gram([torch.tensor(2.0).expand(50)], backend=backend).item() == 200.0
        assert fa.multi_dot_gram([torch.empty(3, 0), torch.empty(3, 0)], backend=backend).tolist() == [[0, 0], [0, 0]]
        assert fa.multi_dot_gram([torch.tensor(3.0)], backend=backend).item() == 9.0


def test_float64_is_the_references() -> None:
    vectors = [torch.randn(1000, dtype=torch.float64) for _ in range(2)]
    gram = fa.multi_dot_gram(vectors)
    assert fa.last_backend() == "reference"
    assert float(gram[0, 1]) == pytest.approx(float(vectors[0] @ vectors[1]), rel=1e-13)
    leaf = vectors[0].float().requires_grad_()
    assert not fa.multi_dot_gram([leaf]).requires_grad


# ---- the sketch against slow Python ----------------------------------------------------------------------------------

WORD = 2**64 - 1


def descend(state: int, number: int) -> int:
    x = (state + (number + 1) * 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def slow_sketch(
    rows: list[list[float]], size: int, seed: int, parameter: str, offsets: tuple[int, int], quantum: float, copies: int
) -> list[list[int]]:
    """Element by element, in Python's integers."""
    digest = hashlib.blake2b(f"{seed} {parameter}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little")
    out = [[0] * size for _ in range(copies)]
    for copy in range(copies):
        for r, row in enumerate(rows, offsets[0]):
            for c, x in enumerate(row, offsets[1]):
                state = descend(descend(descend(key, copy), r), c // 32)
                start = ((state >> 32) * size) >> 32
                if abs(x / quantum) < 2**50:
                    sign = -1 if state >> (c % 32) & 1 else 1
                    out[copy][(start + c % 32) % size] += sign * round(x / quantum)  # ties to even
                else:
                    for i in range(32):
                        out[copy][(start + i) % size] += 2 ** (62 - i)
    return [[(x + 2**63) % 2**64 - 2**63 for x in slots] for slots in out]


PIECES = {
    "a row": ((1, 200), (0, 0)),
    "a piece in the middle": ((4, 75), (10**9, 2**40 + 21)),
    "narrow": ((40, 3), (5, 30)),
    "within a chunk": ((2, 5), (0, 70)),
}


@EVERYWHERE
@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sketch_is_that_of_slow_python(piece: str, dtype: torch.dtype, backend: str) -> None:
    shape, offsets = PIECES[piece]
    values = (3 * torch.randn(shape)).to(dtype)
    values[-1, -1] = 1000.0
    options: dict[str, Any] = {"seed": -7, "parameter": "ü.weight", "copies": 3}
    for size, quantum in ((32, 2.0**-40), (75, 0.25), (1024, 2.0**-20)):
        right = slow_sketch(values.tolist(), size, -7, "ü.weight", offsets, quantum, 3)
        place = {"row_offset": offsets[0], "column_offset": offsets[1]}
        mine = count_sketch(values, size, quantum=quantum, **place, **options, backend=backend)
        assert mine.tolist() == right
        if shape[0] == 1:
            assert torch.equal(count_sketch(values[0], size, quantum=quantum, **options, backend=backend), mine)


def test_the_hash_never_changes() -> None:
    """Sketches that are kept stay comparable."""
    sketch = count_sketch(torch.arange(1.0, 41.0), 64, quantum=1.0)
    digest = hashlib.sha256(str(sketch.tolist()).encode()).hexdigest()
    assert digest[:16] == "dc5a78d7645849ff"


@EVERYWHERE
def test_numbers_are_rounded_to_even_and_added_exactly(backend: str) -> None:
    large = 2**49 + 2**26
    for x, whole in ((0.5, 0), (1.5, 2), (-2.5, -2), (-0.75, -1), (8388607.5, 8388608), (float(large), large)):
        sketch = count_sketch(torch.tensor([x]), 32, quantum=1.0, backend=backend)
        assert sorted({abs(v) for v in sketch.flatten().tolist()} - {0}) == ([abs(whole)] if whole else [])
    tiny = count_sketch(torch.tensor([1e-45, 2.0**-126]), 32, quantum=2.0**100, backend=backend)
    assert not tiny.any()


# ---- splits, orders, additions ---------------------------------------------------------------------------------------


def sketch_in_pieces(values: Tensor, rows: list[int], columns: list[int], backend: str) -> Tensor:
    out = torch.zeros(2, 96, dtype=torch.int64)
    for r0, r1 in reversed(list(pairwise(rows))):
        for c0, c1 in pairwise(columns):
            place = {"row_offset": r0, "column_offset": c0}
            piece = values[r0:r1, c0:c1]
            given = count_sketch(piece, 96, parameter="w", **place, copies=2, out=out, backend=backend)
            assert given is out
    return out


@EVERYWHERE
@pytest.mark.parametrize("bad", [False, True])
def test_any_split_has_the_bits_of_the_whole(bad: bool, backend: str) -> None:
    """By rows, by columns, in unequal pieces, in another order: tensor and data parallel layouts. Bad values too."""
    values = torch.randn(8, 132)
    if bad:
        values[3, 70], values[3, 71], values[7, 0] = math.nan, math.inf, -1e30
    with fa.checks("off"):
        whole = count_sketch(values, 96, parameter="w", copies=2, backend="reference")
        for rows, columns in (
            ([0, 2, 4, 6, 8], [0, 132]),
            ([0, 8], [0, 33, 66, 99, 132]),
            ([0, 1, 7, 7, 8], [0, 5, 64, 131, 132]),
        ):
            assert torch.equal(sketch_in_pieces(values, rows, columns, backend), whole)


@ON
def test_threads_and_strides_change_no_bit(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(300, 517)
    sketches = []
    monkeypatch.setattr(native, "TOKENS_FOR_THREADS", 1)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for view in (values, values.T.contiguous().T, torch.stack([values, values], -1)[..., 1]):
            sketches.append(count_sketch(view, 1000, copies=3, backend=backend))
    assert all(torch.equal(s, sketches[0]) for s in sketches)


@EVERYWHERE
def test_what_is_there_is_added_to(backend: str) -> None:
    a, b = torch.randn(3, 50), torch.randn(3, 50)
    one = {"backend": backend, "copies": 2}
    out = count_sketch(a, 64, **one)
    spread = torch.stack([out, out], -1)[..., 0]
    first = out.clone()
    assert count_sketch(b, 64, out=out, **one) is out
    assert torch.equal(out, first + count_sketch(b, 64, **one))
    assert torch.equal(count_sketch(b, 64, out=spread, **one), out)
    exact = (a * 1024).round() / 1024, (b * 1024).round() / 1024  # whole numbers of quanta: the sketch is linear
    total = count_sketch(exact[0] + exact[1], 64, **one)
    assert torch.equal(count_sketch(exact[0], 64, **one) + count_sketch(exact[1], 64, **one), total)


@ON
def test_into_a_given_sketch_in_a_graph(backend: str) -> None:
    values, out = torch.randn(4, 40), torch.zeros(1, 64, dtype=torch.int64)

    def add(values: Tensor, out: Tensor) -> Tensor:
        return count_sketch(values, 64, out=out, backend=backend)

    torch.compile(add, fullgraph=True, backend="aot_eager")(values, out)
    assert torch.equal(out, count_sketch(values, 64, backend=backend))


def test_seeds_parameters_and_copies_are_others() -> None:
    values = torch.randn(40, 64)
    several = count_sketch(values, 256, copies=3)
    assert torch.equal(several[:1], count_sketch(values, 256))
    others = [*several, count_sketch(values, 256, seed=1)[0], count_sketch(values, 256, parameter="b")[0]]
    for i, a in enumerate(others):
        for b in others[:i]:
            assert float((a == b).float().mean()) < 0.1


# ---- statistics ------------------------------------------------------------------------------------------------------

SIZE, COPIES = 1024, 32


def related(rows: int, columns: int) -> Tensor:
    """Vectors, as matrices, whose cosines are anything from 0 to nearly 1."""
    common, own = torch.randn(1, rows, columns), torch.randn(7, rows, columns)
    return common + torch.tensor([0.02, 0.1, 0.3, 0.6, 1.0, 2.0, 8.0]).view(7, 1, 1) * own


def in_one_column(rows: int, columns: int) -> Tensor:
    """Like gradients of layers that read an outlier feature: nearly all that there is lies in one column."""
    x = 0.01 * related(rows, columns)
    x[:, :, 5] = 10 * related(rows, 1)[:, :, 0]
    return x


def estimates(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Products of sketches, `[copies, K, K]`, and the exact ones."""
    sketches = torch.stack([sketch_values(count_sketch(v, SIZE, seed=3, copies=COPIES)) for v in vectors], 1)
    flat = vectors.flatten(1).double()
    return sketches @ sketches.transpose(1, 2), flat @ flat.T


@pytest.mark.parametrize("make", [related, in_one_column], ids=lambda make: make.__name__)
def test_products_have_no_bias_and_cosines_the_error_that_is_stated(make: Callable[[int, int], Tensor]) -> None:
    found, exact = estimates(make(4000, 40))
    lengths = exact.diagonal().sqrt()
    scaled = (found - exact) / (lengths[:, None] * lengths)
    mean, spread = scaled.mean(0), scaled.std(0) / math.sqrt(COPIES)
    assert float((mean.abs() / spread).max()) < 3

    rho = exact / (lengths[:, None] * lengths)
    norms = found.diagonal(dim1=1, dim2=2).sqrt()
    cosines = found / (norms[:, :, None] * norms[:, None, :])
    below = torch.tril_indices(7, 7, -1)
    relative = ((cosines - rho) / (1 - rho.square()) * math.sqrt(SIZE))[:, below[0], below[1]]
    assert 1 / 1.2 < float(relative.square().mean().sqrt()) < 1.2
    squares = scaled.diagonal(dim1=1, dim2=2) / math.sqrt(2 / SIZE)
    assert 1 / 1.3 < float(squares.square().mean().sqrt()) < 1.3


def test_copies_err_independently() -> None:
    found, exact = estimates(related(400, 40))
    error = (found - exact)[:, 1, 6] / exact[6, 6]
    product = error[::2] * error[1::2]
    assert abs(float(product.mean())) < 3 * float(error.square().mean()) / math.sqrt(len(product))


# ---- values without a meaning ----------------------------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1025.0, -3e38])
def test_a_bad_value_stays_visible_whatever_is_added(bad: float, backend: str) -> None:
    values = torch.randn(3, 100)
    clean = count_sketch(values, 512, copies=2, backend=backend)
    values[1, 77] = bad
    with fa.checks("off"):
        sketch = count_sketch(values, 512, copies=2, backend=backend)
    assert sketch_values(sketch).isnan().all()
    total = clean.clone()
    for ranks in range(1, 70):  # each of which met it
        total += sketch
        assert sketch_values(total).isnan().all(), ranks
    for doubled in range(20):
        assert sketch_values(sketch << doubled).isnan().all(), doubled
    assert sketch_values(clean).isfinite().all()


def test_only_the_copy_that_is_bad_is_nan() -> None:
    sketch = torch.zeros(2, 64, dtype=torch.int64)
    sketch[0, 3], sketch[1, 3] = 2**61, 2**61 - 1
    values = sketch_values(sketch, 1.0)
    assert values[0].isnan().all()
    assert values[1].tolist()[3] == 2.0**61
    assert sketch_values(-sketch, 1.0)[0].isnan().all()
    assert sketch_values(torch.full((64,), -(2**63))).isnan().all()


@EVERYWHERE
@pytest.mark.parametrize(("bad", "shown"), [(math.nan, "nan"), (-math.inf, "-inf"), (1024.0, "1024.0")])
def test_bad_values_are_refused_before_anything_is_added(bad: float, shown: str, backend: str) -> None:
    values, out = torch.randn(3, 40), torch.ones(1, 64, dtype=torch.int64)
    values[2, 17] = bad
    with pytest.raises(ValueError, match=rf"values\[2, 17\] is {shown}; it must be finite and below .* which is 1024$"):
        count_sketch(values, 64, out=out, backend=backend)
    assert out.eq(1).all()
    assert count_sketch(values.nan_to_num(0, 0, 0), 64, quantum=2.0**-30, backend=backend).any()
