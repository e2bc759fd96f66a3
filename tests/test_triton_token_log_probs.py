"""The Triton kernels from logits, in Triton's interpreter: values, the same bits in every form, what is read and
launched. One interpreted row costs a tenth of a second."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fastadv.triton_kernels import _launch as launching
from fastadv.triton_kernels import _logits as views
from fastadv.triton_kernels import token_log_probs as kernels
from log_prob_cases import DTYPES, INF, NAN, close, draw, equal, run
from torch import Tensor

import fastadv as fa
from fastadv.ops import _logits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns where a GPU computes NaN
NATIVE = DTYPES[:3]


@pytest.fixture
def launches(monkeypatch: Any) -> list[Any]:
    """What the launches of a test ask for."""
    asked: list[Any] = []
    monkeypatch.setattr(launching, "launched", asked.append)
    return asked


@pytest.fixture(autouse=True)
def _every_form_is_known(launches: list[Any]) -> Iterator[None]:
    """The ahead-of-time gate compiles what is launched. Kernels are not specialised on the alignment of pointers."""
    yield
    known = {dataclasses.replace(c, aligned=()) for c in kernels.configurations()}
    for configuration in launches:
        assert dataclasses.replace(configuration, aligned=()) in known, configuration


def names(launches: list[Any]) -> list[str]:
    return [c.name.removesuffix("_kernel") for c in launches]


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NATIVE, ids=str)
@pytest.mark.parametrize("vocab", [1, 19, 1023, 1025, 4095, 4096, 4097, 9217])
def test_equals_float64(vocab: int, dtype: torch.dtype, poisoned_memory: None) -> None:
    logits, labels = draw(2, vocab)
    logits[:, ::3] = -INF
    logits = logits.scatter(1, labels[:, None], 1.0).to(dtype)
    temperature = torch.tensor([0.7, 1.3]) if vocab % 2 else 0.7
    options: dict[str, Any] = {"temperature": temperature, "softcap": 5.0 if vocab in (19, 4097) else None}
    found = run("triton", logits, labels, **options)
    close(found, run("reference", logits.double(), labels, **options), rounding=torch.finfo(dtype).eps)
    assert [x.dtype for x in found] == [torch.float32] * 3 + [dtype]


def test_small_logits_keep_their_digits_under_a_softcap() -> None:
    logits, labels = draw(2, 40, scale=1e-3)
    close(run("triton", logits, labels, softcap=1e3), run("reference", logits.double(), labels, softcap=1e3), 1e-6)


def test_a_temperature_that_is_a_number_keeps_its_digits() -> None:
    logits, labels = draw(2, 40)
    (*_, state), (*_, expected) = (
        _logits.log_probs(b, logits + 1e4, labels, 1 / 0.7, 0.0, True) for b in ("triton", "cpu")
    )
    torch.testing.assert_close(state, expected, rtol=0, atol=1e-6)  # 4e-4 apart if it were float32


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_large_logits(softcap: float | None) -> None:
    most = torch.finfo(torch.float32).max
    logits, labels = draw(2, 33, scale=3e3)
    logits = torch.cat([logits, torch.full_like(logits, -most)])
    logits[3] = most
    options = {"softcap": softcap, "temperature": 0.7}
    labels = torch.cat([labels, labels])
    found, expected = (run(b, x, labels, **options) for b, x in (("triton", logits), ("reference", logits.double())))
    close(found[:3], expected[:3], 6e-6)
    close([x[:2] for x in found], [x[:2] for x in expected], 6e-6)  # the state has no digits for gradients at 1e38


@pytest.mark.parametrize("vocab", [3, 6000])
def test_probabilities_near_one_keep_their_small_gradients(vocab: int) -> None:
    logits = torch.zeros(1, vocab)
    logits[0, 0] = 20.0 + math.log(vocab)
    gradient = run("triton", logits, torch.tensor([0]), (1.0, 0.0, 0.0))[3]
    expected = -math.expm1(-math.log1p((vocab - 1) / vocab * math.exp(-20)))
    assert float(gradient[0, 0]) == pytest.approx(expected, rel=1e-5 if vocab == 3 else 2e-3)


@pytest.mark.parametrize("backend", ["triton", "cpu"])
def test_a_label_is_never_more_than_certain(backend: str) -> None:
    """Rounding may put the sum of all exponentials below the label's: its gradient is 0, and not of the other sign."""
    logits, one = torch.tensor([[3.0, -200.0]]), torch.ones(1)
    lse, sum_p2 = torch.tensor([3.0 - 1e-3], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for upstream in ((one, None, None), (None, one, None), (None, None, one)):
        out = _logits.logits_gradient(
            backend, logits, torch.tensor([0]), lse, 0 * sum_p2, sum_p2, *upstream, out=torch.empty_like(logits)
        )
        assert out[0, 0] == 0


def test_equal_logits_have_no_gradient_of_entropy_or_sum_p2() -> None:
    gradient = run("triton", torch.full((1, 5003), 5.25), torch.tensor([1]), (0.0, 1.0, 1.0))[3]
    assert float(gradient.abs().max()) <= 1e-11


# ---- -inf, NaN -------------------------------------------------------------------------------------------------------


def test_impossible_tokens() -> None:
    vocab = 5000
    logits, labels = draw(4, vocab, scale=2.0)
    logits[0, :4500], labels[0] = -INF, 4700  # a whole block of one part
    logits[1, 1:] = -INF
    labels[1] = 0
    logits[2, ::2] = -INF
    labels[2] = 2001
    logits[3, labels[3]] = -INF
    found = run("triton", logits, labels, (1.0, 0.5, -0.25))
    close(found, run("cpu", logits, labels, (1.0, 0.5, -0.25)))
    assert float(found[0][3]) == -INF
    assert bool((found[3][logits == -INF] == 0).all())
    # An infinite upstream gradient is not multiplied by a probability of 0.
    gradient = run("triton", logits[:1], labels[:1], (INF, 0.0, 0.0))[3]
    assert bool((gradient[logits[:1] == -INF] == 0).all())


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_rows_without_meaning_are_nan(softcap: float | None) -> None:
    logits, labels = draw(5, 1100)
    bad = logits.clone()
    bad[1], bad[2, -1], bad[3, 7] = -INF, NAN, INF
    found, clean = run("triton", bad, labels, softcap=softcap), run("triton", logits, labels, softcap=softcap)
    rows = [1, 2] if softcap else [1, 2, 3]  # a softcap makes a number of +inf
    for x in found:
        assert bool(x[rows].isnan().all())
    equal([x[[0, 4]] for x in found], [x[[0, 4]] for x in clean])


def test_labels_and_temperatures_without_meaning_are_nan() -> None:
    logits, labels = draw(4, 50)
    labels[1], labels[2] = 50, -7
    temperature = torch.tensor([1.0, 1.0, 1.0, 0.0])
    with fa.checks("off"):
        found = run("triton", logits, labels, temperature=temperature)
    assert [x.isnan().tolist() for x in found[:3]] == [[False, True, True, True]] * 3
    assert found[3].isnan().all(1).tolist() == [False, True, True, True]
    equal([x[:1] for x in found], [x[:1] for x in run("triton", logits, labels.clamp(0, 49))])


# ---- rows that are not read ------------------------------------------------------------------------------------------


@pytest.fixture
def traffic(monkeypatch: Any) -> dict[str, int]:
    """Bytes that the lanes of programs load and store; a scalar counts once."""
    from triton.runtime.interpreter import InterpreterBuilder

    moved = {"loads": 0, "stores": 0}
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted(kind: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        moved[kind] += int((mask.data & (pointers.data != 0)).sum()) * size

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        counted("loads", pointers, mask)
        return load(self, pointers, mask, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counted("stores", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", masked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", masked_store)
    return moved


def test_masked_rows_are_not_read(poisoned_memory: None, traffic: dict[str, int]) -> None:
    logits, labels = draw(6, 600)
    mask = torch.tensor([1, 0, 0, 1, 0, 0])
    plain = run("triton", logits[mask != 0], labels[mask != 0])
    traffic.update(loads=0, stores=0)
    logits[mask == 0], labels[1] = NAN, -100
    upstream = (torch.tensor([1.0, NAN, INF, 1.0, 1.0, 1.0]), 0.5, -0.25)
    found = run("triton", logits, labels, upstream, mask=mask)
    assert traffic["loads"] < 2 * 2 * logits[0].nbytes + 6 * 200  # forward and backward, and some numbers a row
    for x in found:
        assert bool((x[mask == 0] == 0).all())
    equal([x[mask != 0] for x in found], plain)


def test_rows_to_which_nothing_flows_back_are_not_read(poisoned_memory: None) -> None:
    logits, labels = draw(3, 1500)
    logits[1] = NAN
    upstream = (torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, -0.0, 1.0]), torch.zeros(3))
    gradient = run("triton", logits, labels, upstream)[3]
    assert gradient[1].count_nonzero() == 0
    assert bool((gradient[[0, 2]].abs().sum(1) > 0).all())


@pytest.mark.parametrize("moments", [False, True])
def test_bytes(moments: bool, traffic: dict[str, int]) -> None:
    """Each logit is read once by the forward, read and written once by the backward."""
    rows, vocab = 2, 5000
    logits, labels = draw(rows, vocab)
    leaf = logits.to(torch.bfloat16).requires_grad_()
    out = fa.token_log_probs(leaf, labels, return_entropy=moments, return_sum_p2=moments, backend="triton")
    for gradient in (False, True):
        least = kernels.bytes_moved(rows, vocab, 2, moments=moments, gradient=gradient)
        assert least <= sum(traffic.values()) <= least + 32 * rows
        traffic.update(loads=0, stores=0)
        if not gradient:
            sum(x.sum() for x in out if x is not None).backward()  # type: ignore[union-attr]


# ---- the same bits ---------------------------------------------------------------------------------------------------


def test_dtypes_and_layouts_give_the_same_bits(launches: list[Any]) -> None:
    """Which logits meet in a sum follows from their columns alone."""
    vocab = 4096 + 1024 + 8
    logits = torch.randn(2, 2, vocab, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    labels = torch.tensor([[3, 4096], [vocab - 1, 1000]])
    wide = torch.full((2, 2, vocab + 3), NAN, dtype=logits.dtype)
    wide[..., 1:-2] = logits
    plain: list[Tensor] = []
    for kind, laid_out, neighbours in (
        ("contiguous", logits, 8),
        ("sequence first", logits.transpose(0, 1).contiguous().transpose(0, 1), 8),
        ("odd rows", wide[..., 1:-2], 1),
        ("every other column", torch.stack([logits, logits], -1).flatten(-2)[..., ::2], 8),
        ("float", logits.float(), 4),
        ("odd start of floats", torch.zeros(logits.numel() + 1)[1:].view(logits.shape).copy_(logits), 1),
    ):
        launches.clear()
        *found, state = _logits.log_probs("triton", laid_out, labels, 1.0, 0.0, True)
        gradient = _logits.logits_gradient(
            "triton", laid_out, labels, *state, *torch.ones(3, 4), out=torch.full_like(laid_out, NAN)
        )
        forms = [dict(c.constants) for c in launches]
        assert (forms[0]["NEIGHBOURS"], forms[1]["ALIGNED"]) == (neighbours, neighbours > 1), kind
        plain = plain or [*found, state, gradient]
        equal([*found, state], plain[:4])
        step = 0.0 if laid_out.dtype == logits.dtype else 2.0**-7  # an interpreter may cut off what a GPU rounds
        torch.testing.assert_close(gradient.to(logits.dtype), plain[4], rtol=step, atol=0.0)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_a_row_that_is_split_gives_the_same_bits(softcap: float, launches: list[Any], monkeypatch: Any) -> None:
    logits, labels = draw(2, 2 * 32_768 + 100)
    logits[1, :32_768] = -INF
    labels = torch.tensor([40_000, 2 * 32_768 + 99])
    inverse = torch.tensor([1.0, 1.25], dtype=torch.float64)
    split = _logits.log_probs("triton", logits, labels, inverse, softcap, True)
    assert names(launches) == ["row_sums", "row_sums"]
    monkeypatch.setattr(kernels, "ROWS_TO_SPLIT", 0)
    whole = _logits.log_probs("triton", logits, labels, inverse, softcap, True)
    assert names(launches) == ["row_sums"] * 3
    for x, y in zip(split, whole, strict=True):
        assert torch.equal(x, y)
    for x, y in zip(whole, _logits.log_probs("cpu", logits, labels, inverse, softcap, True), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6)


def test_a_row_does_not_depend_on_others(launches: list[Any]) -> None:
    logits, labels = draw(4, 517)
    batch, again = run("triton", logits, labels), run("triton", logits, labels)
    equal(batch, again)
    equal([x[2:3] for x in batch], run("triton", logits[2:3], labels[2:3]))
    assert names(launches) == ["row_sums", "logits_gradient"] * 3


def test_log_probs_are_the_same_without_moments() -> None:
    logits, labels = draw(2, 1300)
    for softcap in (None, 20.0):
        leaf = logits.clone().requires_grad_()
        only = fa.token_log_probs(leaf, labels, softcap=softcap, backend="triton")
        only.log_probs.sum().backward()
        full = run("triton", logits, labels, (1.0, 0.0, 0.0), softcap=softcap)
        equal([only.log_probs.detach()], full[:1])
        close([leaf.grad], full[3:], 1e-6)  # type: ignore[list-item]


# ---- statistics of parts of the vocabulary ---------------------------------------------------------------------------


def test_parts_of_the_vocabulary_merge_to_the_whole() -> None:
    logits, labels = draw(3, 5000)
    logits[2, :3000] = -INF
    labels[2] = 4999
    inverse = torch.tensor([0.5, 1.0, 1.7], dtype=torch.float64)
    whole = _logits.finish("cpu", _logits.row_statistics("cpu", logits, labels, inverse))
    edges, parts, local = (0, 1, 2048, 3000, 5000), [], []
    for a, b in itertools.pairwise(edges):
        local.append(torch.where((labels >= a) & (labels < b), labels - a, _logits.NO_LABEL))
        parts.append(_logits.row_statistics("triton", logits[:, a:b], local[-1], inverse))
    statistics = torch.stack(parts)
    merged = _logits.finish("triton", statistics)
    for x, y, z in zip(merged, whole, _logits.finish("cpu", statistics), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(x, z, rtol=1e-14, atol=1e-15)

    given = (whole.lse, whole.entropy, whole.sum_p2, torch.randn(3), torch.randn(3), torch.randn(3), inverse)
    full = _logits.logits_gradient("triton", logits, labels, *given, out=torch.full_like(logits, NAN))
    torch.testing.assert_close(
        full, _logits.logits_gradient("cpu", logits, labels, *given, out=torch.empty_like(logits)), rtol=2e-6, atol=1e-8
    )
    split, wide = torch.full_like(logits, NAN), torch.full((3, 7, 5001), NAN)
    for (a, b), codes in zip(itertools.pairwise(edges), local, strict=True):
        _logits.logits_gradient("triton", logits[:, a:b], codes, *given, out=split[:, a:b])
        _logits.logits_gradient("triton", logits[:, a:b], codes, *given, out=wide[:, 3, a + 1 : b + 1])
    assert torch.equal(full, split)
    assert torch.equal(full, wide[:, 3, 1:])
    assert bool(wide[:, :3].isnan().all())


def test_statistics_of_codes() -> None:
    logits = torch.randn(7, 70)
    codes = torch.tensor([_logits.SKIPPED, _logits.INVALID, 70, _logits.NO_LABEL, 3, 3, 3])
    inverse = torch.tensor([NAN, 1.0, 1.0, 1.0, 0.7, 0.0, -1.0], dtype=torch.float64)
    logits[0] = NAN
    found = _logits.row_statistics("triton", logits, codes, inverse)
    expected = _logits.row_statistics("cpu", logits, codes, inverse)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6, equal_nan=True)
    assert found[:, 0].tolist() == [0, 0, 1, 0, 0]
    for x, y in zip(_logits.finish("triton", found), _logits.finish("cpu", expected), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6, equal_nan=True)
    many = torch.rand(3, 5, 300, dtype=torch.float64)  # more rows than a program merges
    many[:, :, 7], many[1, 1, 8] = NAN, -INF
    for x, y in zip(_logits.finish("triton", many), _logits.finish("cpu", many), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-14, equal_nan=True)


# ---- gradients: layouts, in place, what is absent --------------------------------------------------------------------


def test_gradient_of_any_layout_and_in_place() -> None:
    logits, labels = torch.randn(2, 2, 3, 1030), torch.randint(0, 1030, (2, 2, 3))
    state = _logits.log_probs("cpu", logits, labels, 1.0, 0.0, True)[3]
    g = torch.randn(3, 12)
    given = (*state, *g)
    plain = _logits.logits_gradient("triton", logits, labels, *given, out=torch.full_like(logits, NAN))
    assert bool(plain.isfinite().all())
    # Two leading strides; three that do not merge; the vocabulary first.
    for order, viewed in (((2, 0, 1, 3), True), ((2, 1, 0, 3), False), ((3, 0, 1, 2), False)):
        back = sorted(range(4), key=order.__getitem__)
        laid_out = logits.permute(order).contiguous().permute(back)
        assert (views.view_of(laid_out) is not None) == viewed
        out = torch.full_like(laid_out, NAN)
        assert out.stride() == laid_out.stride() != logits.stride()
        assert torch.equal(_logits.logits_gradient("triton", laid_out, labels, *given, out=out), plain)
        assert torch.equal(laid_out, logits)
        assert torch.equal(_logits.logits_gradient("triton", laid_out, labels, *given, out=laid_out), plain)


def test_absent_upstream_gradients() -> None:
    logits, labels = draw(2, 90)
    state = _logits.log_probs("cpu", logits, labels, 1.25, 0.0, True)[3]
    for chosen in itertools.product((None, torch.randn(2)), repeat=3):
        found = _logits.logits_gradient(
            "triton", logits, labels, *state, *chosen, 1.25, out=torch.full_like(logits, NAN)
        )
        expected = _logits.logits_gradient("cpu", logits, labels, *state, *chosen, 1.25, out=torch.empty_like(logits))
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-8)
    without_state = (state[0], None, None, torch.ones(2), None, None)
    found = _logits.logits_gradient("triton", logits, labels, *without_state, 1.25, out=torch.empty_like(logits))
    assert bool(found.isfinite().all())


def test_nothing_to_do(launches: list[Any]) -> None:
    for shape in ((0, 9), (3, 0, 9), (0, 0, 0, 1)):
        found = run("triton", torch.randn(shape), torch.zeros(shape[:-1], dtype=torch.int64))
        assert [x.shape for x in found] == [shape[:-1]] * 3 + [shape]
    single = run("triton", torch.tensor([1.0, 2.0]), torch.tensor(1))
    close(single, run("reference", torch.tensor([1.0, 2.0]).double(), torch.tensor(1)))
