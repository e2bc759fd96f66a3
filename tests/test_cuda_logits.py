"""The CUDA kernels from logits, compiled for the CPU: values at the edges of tiles and parts, the same bits in every
form, what is not read, layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import cuda_kernels
import pytest
import torch
from cuda_emulation import build
from log_prob_cases import DTYPES, INF, NAN, close, draw, equal, run
from test_linear_log_probs import equals_oracle
from torch import Tensor

import fastadv as fa
from fastadv import cuda
from fastadv.ops import _logits

pytestmark = pytest.mark.skipif(cuda_kernels.missing() is not None, reason=str(cuda_kernels.missing()))
NATIVE = DTYPES[:3]
TILE, STEP, PART, ROWS_TO_SPLIT = 1024, 4096, 32_768, 384  # as in csrc/cuda/logit_rows.h and token_log_probs.cu
EDGES = (1, 7, 8, 9, TILE - 1, TILE, TILE + 1, STEP - 1, STEP, STEP + 1, STEP + TILE + 9)
ORDERS = ("backward", "1", "2")


def whole(monkeypatch: Any) -> None:
    """From here on each row has one block, however few there are."""
    monkeypatch.setattr(_logits, "_scratch", lambda rows, vocab, device: None)


def log_probs(
    logits: Tensor, labels: Tensor, inverse: float | Tensor = 1.0, softcap: float = 0.0, backend: str = "cuda"
) -> list[Tensor]:
    return list(_logits.log_probs(backend, logits, labels, inverse, softcap, True))


def gradient(logits: Tensor, labels: Tensor, *given: Any, out: Tensor | None = None, backend: str = "cuda") -> Tensor:
    """By the logits, in memory that held NaN unless it is given."""
    out = torch.full_like(logits, NAN) if out is None else out
    return _logits.logits_gradient(backend, logits, labels, *given, out=out)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NATIVE, ids=str)
@pytest.mark.parametrize("vocab", EDGES)
def test_equals_float64(vocab: int, dtype: torch.dtype, poisoned_memory: None) -> None:
    logits, labels = draw(2, vocab)
    logits[:, ::3] = -INF
    logits = logits.scatter(1, labels[:, None], 1.0).to(dtype)
    temperature = torch.tensor([0.7, 1.3]) if vocab % 2 else 0.7
    options: dict[str, Any] = {"temperature": temperature, "softcap": 5.0 if vocab in (9, STEP + 1) else None}
    found = run("cuda", logits, labels, **options)
    close(found, run("reference", logits.double(), labels, **options), rounding=torch.finfo(dtype).eps)
    assert [x.dtype for x in found] == [torch.float32] * 3 + [dtype]


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_several_parts(rows: int, poisoned_memory: None) -> None:
    for vocab in (PART, PART + 1, 2 * PART + 1030):
        logits, labels = draw(rows, vocab)
        close(run("cuda", logits, labels), run("reference", logits.double(), labels))


def test_more_rows_than_are_split() -> None:
    """As many blocks as rows, and the merge of statistics takes several blocks."""
    logits, labels = draw(ROWS_TO_SPLIT + 1, 33)
    found = run("cuda", logits, labels)
    close(found, run("reference", logits.double(), labels))
    equal([x[-2:] for x in found], run("cuda", logits[-2:], labels[-2:]))


def test_few_long_rows_are_split() -> None:
    device = torch.device("cpu")
    for rows, vocab, split in (
        (ROWS_TO_SPLIT - 1, PART + 1, True),
        (ROWS_TO_SPLIT, PART + 1, False),
        (1, PART, False),
        (0, 2 * PART, False),
    ):
        assert (_logits._scratch(rows, vocab, device) is not None) == split


def test_small_logits_keep_their_digits_under_a_softcap() -> None:
    logits, labels = draw(2, 40, scale=1e-3)
    close(run("cuda", logits, labels, softcap=1e3), run("reference", logits.double(), labels, softcap=1e3), 1e-6)


def test_a_temperature_that_is_a_number_keeps_its_digits() -> None:
    logits, labels = draw(2, 40)
    found, expected = (log_probs(logits + 1e4, labels, 1 / 0.7, backend=b)[-1] for b in ("cuda", "cpu"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # 4e-4 apart if it were float32


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_large_logits(softcap: float | None) -> None:
    most = torch.finfo(torch.float32).max
    logits, labels = draw(2, 33, scale=3e3)
    logits = torch.cat([logits, torch.full_like(logits, -most)])
    logits[3] = most
    options = {"softcap": softcap, "temperature": 0.7}
    labels = torch.cat([labels, labels])
    found, expected = (run(b, x, labels, **options) for b, x in (("cuda", logits), ("reference", logits.double())))
    close(found[:3], expected[:3], 6e-6)
    close([x[:2] for x in found], [x[:2] for x in expected], 6e-6)  # the state has no digits for gradients at 1e38


def test_shifting_the_logits_changes_nothing() -> None:
    logits, labels = draw(3, 1000)
    logits = (logits * 64).round() / 64  # exact after the shift
    equal(run("cuda", logits + 64, labels)[:3], run("cuda", logits, labels)[:3])
    close(run("cuda", logits + 4096, labels), run("cuda", logits, labels), 1e-6)


@pytest.mark.parametrize("vocab", [3, 6000])
def test_probabilities_near_one_keep_their_small_gradients(vocab: int) -> None:
    logits = torch.zeros(1, vocab)
    logits[0, 0] = 20.0 + math.log(vocab)
    found = run("cuda", logits, torch.tensor([0]), (1.0, 0.0, 0.0))[3]
    expected = -math.expm1(-math.log1p((vocab - 1) / vocab * math.exp(-20)))
    assert float(found[0, 0]) == pytest.approx(expected, rel=1e-5 if vocab == 3 else 2e-3)


def test_a_label_is_no_likelier_than_1() -> None:
    """Where a log-sum-exp was rounded down, the gradient is 0 and has no other sign."""
    logits, one = torch.full((1, 1), 5.0), torch.ones(1)
    lse = torch.tensor([5.0 - 1e-6], dtype=torch.float64)
    assert float(gradient(logits, torch.tensor([0]), lse, None, None, one, None, None)) == 0.0


def test_equal_logits_have_no_gradient_of_entropy_or_sum_p2() -> None:
    for value, inverse in ((5.25, 1.0), (-77.7, 0.3), (1e4, 1.7)):
        logits, labels = torch.full((1, 5003), value), torch.tensor([1])
        state = log_probs(logits, labels, inverse)[3]
        found = gradient(logits, labels, *state, None, torch.ones(1), torch.ones(1), inverse)
        assert float(found.abs().max()) <= 1e-11


# ---- -inf, NaN -------------------------------------------------------------------------------------------------------


def test_impossible_tokens() -> None:
    vocab = 5000
    logits, labels = draw(4, vocab, scale=2.0)
    logits[0, :4500], labels[0] = -INF, 4700  # a whole step
    logits[1, 1:] = -INF
    labels[1] = 0
    logits[2, ::2] = -INF
    labels[2] = 2001
    logits[3, labels[3]] = -INF
    found = run("cuda", logits, labels, (1.0, 0.5, -0.25))
    close(found, run("cpu", logits, labels, (1.0, 0.5, -0.25)))
    assert float(found[0][3]) == -INF
    assert bool((found[3][logits == -INF] == 0).all())
    # An infinite upstream gradient is not multiplied by a probability of 0.
    infinite = run("cuda", logits[:1], labels[:1], (INF, 0.0, 0.0))[3]
    assert bool((infinite[logits[:1] == -INF] == 0).all())


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_rows_without_meaning_are_nan(softcap: float | None) -> None:
    logits, labels = draw(6, STEP + 1100)
    bad = logits.clone()
    bad[1], bad[2, -1], bad[3, 7], bad[4, :STEP] = -INF, NAN, INF, NAN
    found, clean = run("cuda", bad, labels, softcap=softcap), run("cuda", logits, labels, softcap=softcap)
    rows = [1, 2, 4] if softcap else [1, 2, 3, 4]  # a softcap makes a number of +inf
    for x in found:
        assert bool(x[rows].isnan().all())
    equal([x[[0, 5]] for x in found], [x[[0, 5]] for x in clean])


def test_labels_and_temperatures_without_meaning_are_nan() -> None:
    logits, labels = draw(4, 50)
    labels[1], labels[2] = 50, -7
    temperature = torch.tensor([1.0, 1.0, 1.0, 0.0])
    with fa.checks("off"):
        found = run("cuda", logits, labels, temperature=temperature)
    assert [x.isnan().tolist() for x in found[:3]] == [[False, True, True, True]] * 3
    assert found[3].isnan().all(1).tolist() == [False, True, True, True]
    equal([x[:1] for x in found], [x[:1] for x in run("cuda", logits, labels.clamp(0, 49))])


# ---- rows that are not read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [600, PART + 8])
def test_masked_rows_are_not_read(vocab: int, poisoned_memory: None) -> None:
    logits, labels = draw(6, vocab)
    mask = torch.tensor([1, 0, 0, 1, 0, 0])
    plain = run("cuda", logits[mask != 0], labels[mask != 0])
    logits[mask == 0], labels[1] = NAN, -100
    upstream = (torch.tensor([1.0, NAN, INF, 1.0, 1.0, 1.0]), 0.5, -0.25)
    found = run("cuda", logits, labels, upstream, mask=mask)
    for x in found:
        assert bool((x[mask == 0] == 0).all())
    equal([x[mask != 0] for x in found], plain)


def test_rows_to_which_nothing_flows_back_are_not_read(poisoned_memory: None) -> None:
    logits, labels = draw(3, STEP + 1500)
    logits[1] = NAN
    upstream = (torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, -0.0, 1.0]), torch.zeros(3))
    found = run("cuda", logits, labels, upstream)[3]
    assert found[1].count_nonzero() == 0
    assert bool((found[[0, 2]].abs().sum(1) > 0).all())


# ---- the same bits ---------------------------------------------------------------------------------------------------


def layouts(logits: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Logits `[2, 2, V]` of bfloat16, and the same numbers laid out otherwise."""
    wide = torch.full((2, 2, logits.shape[-1] + 3), NAN, dtype=logits.dtype)
    wide[..., 1:-2] = logits
    yield "contiguous", logits
    yield "sequence first", logits.transpose(0, 1).contiguous().transpose(0, 1)
    yield "odd rows", wide[..., 1:-2]
    yield "every other column", torch.stack([logits, logits], -1).flatten(-2)[..., ::2]
    yield "vocabulary first", logits.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    yield "float", logits.float()
    yield "odd start of floats", torch.zeros(logits.numel() + 1)[1:].view(logits.shape).copy_(logits)
    yield "half", logits.half()


@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_dtypes_and_layouts_give_the_same_bits(softcap: float) -> None:
    """Which logits meet in a sum follows from their columns alone."""
    vocab = STEP + TILE + 8
    exact = torch.randint(-512, 512, (2, 2, vocab), generator=torch.Generator().manual_seed(0)) / 128
    labels = torch.tensor([[3, STEP], [vocab - 1, 1000]])
    plain: list[Tensor] = []
    for kind, laid_out in layouts(exact.to(torch.bfloat16).half().to(torch.bfloat16)):
        *found, state = log_probs(laid_out, labels, 1.25, softcap)
        by_logits = gradient(laid_out, labels, *state, *torch.ones(3, 4), 1.25, softcap)
        plain = plain or [*found, state, by_logits]
        for x, y in zip([*found, state], plain, strict=False):
            assert torch.equal(x, y), kind
        if laid_out.dtype != torch.float16:
            assert torch.equal(by_logits.to(torch.bfloat16), plain[4]), kind


@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_a_row_that_is_split_gives_the_same_bits(softcap: float, monkeypatch: Any) -> None:
    vocab = 4 * PART + 1100
    logits = draw(4, vocab)[0]
    logits[1, :PART] = -INF
    logits[2] = -INF
    labels = torch.tensor([40_000, vocab - 1, 5, _logits.SKIPPED])
    inverse = torch.tensor([1.0, 1.25, 1.0, NAN], dtype=torch.float64)
    split = [*log_probs(logits, labels, inverse, softcap), _logits.row_statistics("cuda", logits, labels, inverse)]
    whole(monkeypatch)
    at_once = [*log_probs(logits, labels, inverse, softcap), _logits.row_statistics("cuda", logits, labels, inverse)]
    equal(split, at_once)
    for x, y in zip(at_once, log_probs(logits, labels, inverse, softcap, "cpu"), strict=False):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_threads_changes_nothing(order: str, monkeypatch: Any) -> None:
    logits, labels = draw(3, PART + STEP + 77)
    before = run("cuda", logits, labels)
    monkeypatch.setenv("CUDA_EMULATION_ORDER", order)
    equal(run("cuda", logits, labels), before)


def test_a_row_does_not_depend_on_others() -> None:
    logits, labels = draw(4, 517)
    batch = run("cuda", logits, labels)
    equal(batch, run("cuda", logits, labels))
    equal([x[2:3] for x in batch], run("cuda", logits[2:3], labels[2:3]))


def test_log_probs_are_the_same_without_moments() -> None:
    logits, labels = draw(2, 1300)
    for softcap in (None, 20.0):
        leaf = logits.clone().requires_grad_()
        only = fa.token_log_probs(leaf, labels, softcap=softcap, backend="cuda")
        only.log_probs.sum().backward()
        full = run("cuda", logits, labels, (1.0, 0.0, 0.0), softcap=softcap)
        equal([only.log_probs.detach()], full[:1])
        close([leaf.grad], full[3:], 1e-6)  # type: ignore[list-item]


# ---- statistics of parts of the vocabulary ---------------------------------------------------------------------------


def test_parts_of_the_vocabulary_merge_to_the_whole() -> None:
    logits, labels = draw(3, 5000)
    logits[2, :3000] = -INF
    labels[2] = 4999
    inverse = torch.tensor([0.5, 1.0, 1.7], dtype=torch.float64)
    all_of_it = _logits.finish("cpu", _logits.row_statistics("cpu", logits, labels, inverse))
    edges, parts, local = (0, 0, 1, 2048, 3000, 5000), [], []  # the first part is empty
    for a, b in itertools.pairwise(edges):
        local.append(torch.where((labels >= a) & (labels < b), labels - a, _logits.NO_LABEL))
        parts.append(_logits.row_statistics("cuda", logits[:, a:b], local[-1], inverse))
    statistics = torch.stack(parts)
    merged = _logits.finish("cuda", statistics)
    for x, y, z in zip(merged, all_of_it, _logits.finish("cpu", statistics), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(x, z, rtol=1e-14, atol=1e-15)

    given = (
        all_of_it.lse,
        all_of_it.entropy,
        all_of_it.sum_p2,
        torch.randn(3),
        torch.randn(3),
        torch.randn(3),
        inverse,
    )
    full = gradient(logits, labels, *given)
    torch.testing.assert_close(full, gradient(logits, labels, *given, backend="cpu"), rtol=2e-6, atol=1e-8)
    split, wide = torch.full_like(logits, NAN), torch.full((3, 7, 5001), NAN)
    for (a, b), codes in zip(itertools.pairwise(edges), local, strict=True):
        gradient(logits[:, a:b], codes, *given, out=split[:, a:b])
        gradient(logits[:, a:b], codes, *given, out=wide[:, 3, a + 1 : b + 1])
    assert torch.equal(full, split)
    assert torch.equal(full, wide[:, 3, 1:])
    assert bool(wide[:, :3].isnan().all())


def test_statistics_of_codes() -> None:
    logits = torch.randn(7, 70)
    codes = torch.tensor([_logits.SKIPPED, _logits.INVALID, 70, _logits.NO_LABEL, 3, 3, 3])
    inverse = torch.tensor([NAN, 1.0, 1.0, 1.0, 0.7, 0.0, -1.0], dtype=torch.float64)
    logits[0] = NAN
    found, expected = (_logits.row_statistics(b, logits, codes, inverse) for b in ("cuda", "cpu"))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6, equal_nan=True)
    assert found[:, 0].tolist() == [0, 0, 1, 0, 0]
    many = torch.rand(3, 5, 300, dtype=torch.float64)  # more rows than a block merges
    many[:, :, 7], many[1, 1, 8], many[2, 0, 9] = NAN, -INF, NAN
    for statistics in (found, many):
        for x, y in zip(_logits.finish("cuda", statistics), _logits.finish("cpu", statistics), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-14, equal_nan=True)


# ---- gradients: layouts, in place, what is absent --------------------------------------------------------------------


def test_gradient_of_any_layout_and_in_place() -> None:
    logits, labels = torch.randn(2, 2, 3, 1030), torch.randint(0, 1030, (2, 2, 3))
    given = (*log_probs(logits, labels, backend="cpu")[3], *torch.randn(3, 12))
    plain = gradient(logits, labels, *given)
    assert bool(plain.isfinite().all())
    # Two leading strides; three that do not merge; the vocabulary first.
    for order, viewed in (((2, 0, 1, 3), True), ((2, 1, 0, 3), False), ((3, 0, 1, 2), False)):
        back = sorted(range(4), key=order.__getitem__)
        laid_out = logits.permute(order).contiguous().permute(back)
        assert (_logits.row_strides(laid_out) is not None) == viewed
        out = torch.full_like(laid_out, NAN)
        assert out.stride() == laid_out.stride() != logits.stride()
        assert torch.equal(gradient(laid_out, labels, *given, out=out), plain)
        assert torch.equal(laid_out, logits)
        assert torch.equal(gradient(laid_out, labels, *given, out=laid_out), plain)


@pytest.mark.parametrize("order", ["forward", *ORDERS])
@pytest.mark.parametrize("dtype", NATIVE, ids=str)
def test_the_label_s_logit_is_read_before_it_is_written(dtype: torch.dtype, order: str, monkeypatch: Any) -> None:
    """In place, whichever thread comes first."""
    monkeypatch.setenv("CUDA_EMULATION_ORDER", order)
    logits, labels = torch.randn(2, PART + 2000).to(dtype), torch.tensor([STEP - 1, PART + 1024])
    given = (*log_probs(logits, labels)[3], *torch.randn(3, 2))
    expected = gradient(logits, labels, *given)
    assert torch.equal(gradient(logits, labels, *given, out=logits), expected)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_bfloat16_gradient_of_float32_logits(softcap: float) -> None:
    for width in (0, 1):  # rows that begin at multiples of 16 bytes, and not
        logits, labels = torch.randn(3, 5200), torch.tensor([7, 5199, _logits.SKIPPED])
        given = (*log_probs(logits, labels, 1.0, softcap)[3], *torch.randn(3, 3), 1.0, softcap)
        out = torch.full((3, 5200 + width), NAN, dtype=torch.bfloat16)[:, width:]
        found = gradient(logits, labels, *given, out=out)
        assert torch.equal(found, gradient(logits, labels, *given).to(torch.bfloat16))
    with pytest.raises(ValueError, match="another type"):
        gradient(logits, labels, *given, out=torch.empty(3, 5200, dtype=torch.float16))


def test_absent_upstream_gradients() -> None:
    logits, labels = draw(2, 90)
    state = log_probs(logits, labels, 1.25, backend="cpu")[3]
    for chosen in itertools.product((None, torch.randn(2)), repeat=3):
        found, expected = (gradient(logits, labels, *state, *chosen, 1.25, backend=b) for b in ("cuda", "cpu"))
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-8)
    found = gradient(logits, labels, state[0], None, None, torch.ones(2), None, None, 1.25)
    assert bool(found.isfinite().all())


def test_nothing_to_do() -> None:
    for shape in ((0, 9), (3, 0, 9), (0, 0, 0, 1), (0, 2 * PART)):
        found = run("cuda", torch.randn(shape), torch.zeros(shape[:-1], dtype=torch.int64))
        assert [x.shape for x in found] == [shape[:-1]] * 3 + [shape]
    single = run("cuda", torch.tensor([1.0, 2.0]), torch.tensor(1))
    close(single, run("reference", torch.tensor([1.0, 2.0]).double(), torch.tensor(1)))


def test_a_launch_that_cuda_refuses_is_an_error() -> None:
    logits, labels = draw(2, 9)
    build.fail_next_launch(cuda.module(), 701)
    with pytest.raises(RuntimeError, match="token_log_probs: cudaErrorLaunchOutOfResources"):
        fa.token_log_probs(logits, labels, backend="cuda")
    close(run("cuda", logits, labels), run("reference", logits.double(), labels))


# ---- from hidden states ----------------------------------------------------------------------------------------------


def test_hidden_states() -> None:
    """Torch's products, and these kernels between them."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (7, 300))
    labels, mask = torch.randint(0, 300, (7,), generator=generator), torch.tensor([1, 0, 1, 1, 0, 0, 1])
    given = {"hidden": hidden, "weight": weight, "labels": labels, "mask": mask, "softcap": 20.0}
    equals_oracle(given, backend="cuda")
