"""token_log_probs against float64, and at the edges of the number range. Contracts that all ops share are in
test_contracts*.py, layouts and memory in test_token_log_probs_memory.py, reports in test_reports_log_probs.py."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from log_prob_cases import DTYPES, INF, NAN, ON, ON_NATIVE, SIZES, close, draw, equal, run
from op_cases import GARBAGE, NATIVE

import fastadv as fa

# ---- values ----------------------------------------------------------------------------------------------------------


@ON
@hypothesis.given(
    vocab=st.sampled_from(SIZES),
    leading=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 0.1, 3.0, 50.0]),
    temperature=st.sampled_from([1.0, 0.6, 2.0, "rows"]),
    softcap=st.sampled_from([None, 1.0, 30.0]),
    impossible=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_equals_float64(
    backend: str, vocab: int, leading: list[int], dtype: torch.dtype, seed: int, scale: float, temperature: Any,
    softcap: float | None, impossible: float,
) -> None:  # fmt: skip
    if dtype == torch.float64:
        backend = "reference"
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(*leading, vocab, generator=generator)).to(dtype)
    labels = torch.randint(0, vocab, leading, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < impossible] = -INF
    logits.scatter_(-1, labels[..., None], 0.5)
    if temperature == "rows":
        temperature = 0.5 + torch.rand(leading, generator=generator)
    options = {"temperature": temperature, "softcap": softcap}
    found = run(backend, logits, labels, **options)
    # Logits after softcap are at most 30, their last place in float32 is 2e-6.
    close(found, run("reference", logits.double(), labels, **options), 6e-6, torch.finfo(dtype).eps)
    out = torch.float64 if dtype == torch.float64 else torch.float32
    assert [x.dtype for x in found] == [out, out, out, dtype]
    assert bool((found[0] <= 0).all())
    assert bool((found[1] >= -1e-6).all())
    assert bool((found[1] <= math.log(vocab) + 1e-5).all())


@ON
@pytest.mark.parametrize("vocab", SIZES)
def test_large_finite_logits(vocab: int, backend: str) -> None:
    logits, labels = draw(6, vocab)
    logits = torch.cat([(logits * 4000).clamp(-1e4, 1e4), logits + 1e4, logits - 1e4])
    labels = labels.repeat(3)
    close(run(backend, logits, labels), run("reference", logits.double(), labels))
    halves = (logits.clamp(-6e4, 6e4)).to(torch.float16)
    close(run(backend, halves, labels), run("reference", halves.double(), labels), rounding=1e-3)


@ON
def test_the_largest_finite_logits(backend: str) -> None:
    most = torch.finfo(torch.float32).max
    logits = torch.tensor([[most, most, -most], [-most, -most, -most], [most, 0.0, -most]])
    found = run(backend, logits, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(found[0], torch.tensor([-math.log(2), -math.log(3), -INF]))
    torch.testing.assert_close(found[1], torch.tensor([math.log(2), math.log(3), 0.0]))


@ON
def test_shifting_the_logits_changes_nothing(backend: str) -> None:
    logits, labels = draw(20, 1000)
    logits = (logits * 64).round() / 64  # exact after the shift
    for shift in (-120.0, 64.0, 4096.0):
        close(run(backend, logits + shift, labels), run(backend, logits, labels), 1e-6)
    if backend in NATIVE:
        equal(run(backend, logits + 64, labels)[:3], run(backend, logits, labels)[:3])


@ON
def test_probabilities_near_one_keep_their_small_gradients(backend: str) -> None:
    """1 - p is taken without cancellation: float32 has nothing left of it at a margin of 20."""
    logits = torch.tensor([[20.0, 0.0, 0.0]], dtype=torch.float32 if backend in NATIVE else torch.float64)
    gradient = run(backend, logits, torch.tensor([0]), (1.0, 0.0, 0.0))[3]
    assert float(gradient[0, 0]) == pytest.approx(2 * math.exp(-20), rel=1e-5)


@ON_NATIVE
def test_equal_logits_have_no_gradient_of_entropy_or_sum_p2(backend: str) -> None:
    logits, labels = torch.full((3, 32003), 5.25), torch.tensor([0, 1, 2])
    gradient = run(backend, logits, labels, (0.0, 1.0, 1.0))[3]
    assert float(gradient.abs().max()) <= 1e-11


# ---- -inf, NaN -------------------------------------------------------------------------------------------------------


@ON
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("where", ["head 2048", "head 16384", "tail", "all but the label", "every other"])
def test_impossible_tokens(where: str, dtype: torch.dtype, backend: str) -> None:
    vocab = 20_000
    logits, _ = draw(3, vocab, scale=2.0)
    labels = torch.tensor([vocab - 1, 17_001, 16_385])
    impossible = torch.zeros(vocab, dtype=torch.bool)
    if where.startswith("head"):
        impossible[: int(where.split()[1])] = True
    elif where == "tail":
        impossible[5000:], labels = True, torch.tensor([0, 4999, 77])
    elif where == "every other":
        impossible[::2], labels = True, labels | 1
        labels[0] = vocab - 1
    if where == "all but the label":
        kept = logits.gather(1, labels[:, None])
        logits = torch.full_like(logits, -INF).scatter(1, labels[:, None], kept)
    else:
        logits = logits.masked_fill(impossible, -INF)
    logits = logits.to(dtype)
    found = run(backend, logits, labels)
    close(found, run("reference", logits.double(), labels), rounding=torch.finfo(dtype).eps)
    assert bool((found[3][logits == -INF] == 0).all())
    if where != "all but the label":  # the same as without these columns
        left = torch.where(impossible, 0, 1).cumsum(0) - 1
        close([*found[:3], found[3][:, ~impossible]], run(backend, logits[:, ~impossible], left[labels]), rounding=1e-2)


@ON
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_an_impossible_label(softcap: float | None, backend: str) -> None:
    logits = torch.tensor([[1.0, -INF, 2.0, -INF]])
    log_prob, entropy, sum_p2, _ = run(backend, logits, torch.tensor([1]), softcap=softcap)
    assert float(log_prob) == -INF
    possible = run(backend, logits[:, ::2], torch.tensor([0]), softcap=softcap)
    close([entropy, sum_p2], possible[1:3])
    leaf = logits.clone().requires_grad_()
    fa.token_log_probs(leaf, torch.tensor([1]), softcap=softcap, backend=backend).log_probs.sum().backward()
    p = torch.softmax(logits if softcap is None else softcap * torch.tanh(logits[:, ::2] / softcap), -1)
    p = p if softcap is None else torch.tensor([[p[0, 0], 0.0, p[0, 1], 0.0]])
    slope = torch.ones(1, 4) if softcap is None else 1 - torch.tanh(logits / softcap) ** 2
    torch.testing.assert_close(leaf.grad, -p * slope)
    assert leaf.grad[0, 1] == 0
    assert leaf.grad[0, 3] == 0


@ON
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("vocab", [1, 5, 16, 3000])
def test_rows_without_meaning_are_nan(vocab: int, softcap: float | None, backend: str) -> None:
    logits, labels = draw(5, vocab)
    bad = logits.clone()
    bad[1], bad[3, -1] = -INF, NAN
    found, plain = run(backend, bad, labels, softcap=softcap), run(backend, logits, labels, softcap=softcap)
    for x, clean in zip(found, plain, strict=True):
        if x.dim() == 1:
            assert bool(x[[1, 3]].isnan().all())
        equal([x[[0, 2, 4]]], [clean[[0, 2, 4]]])
    assert bool(found[3][3].isnan().all())


@ON
def test_positive_infinity_is_nan(backend: str) -> None:
    log_prob, entropy, sum_p2, _ = run(backend, torch.tensor([[0.0, INF]]), torch.tensor([0]))
    assert bool(torch.stack([log_prob, entropy, sum_p2]).isnan().all())


# ---- labels, mask, skipped rows --------------------------------------------------------------------------------------


@ON
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("bad", [7, 12, -1, -100, -2, 2**31 - 1])
def test_a_label_outside_of_the_vocabulary_is_an_error(bad: int, dtype: torch.dtype, backend: str) -> None:
    logits, labels = torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=dtype)
    labels[1, 2] = bad
    with pytest.raises(ValueError, match=rf"token_log_probs: labels\[1, 2\] is {bad}; a label must be in \[0, 7\)"):
        fa.token_log_probs(logits, labels, backend=backend)
    with pytest.raises(ValueError, match=r"or ignore_index \(-7\)"):
        fa.token_log_probs(logits, labels, ignore_index=-7, backend=backend)
    mask = labels == 0
    assert float(fa.token_log_probs(logits, labels, mask=mask, backend=backend).log_probs[1, 2]) == 0
    with fa.checks("off"):
        unchecked = run(backend, logits, labels)
    assert all(bool(x[1, 2].isnan()) and bool(x[0].isfinite().all()) for x in unchecked[:3])
    assert bool(unchecked[3][0].isfinite().all())


@ON
@pytest.mark.parametrize("ignored", [-100, 0, 6, 10**9])
def test_ignored_labels(ignored: int, backend: str) -> None:
    logits, labels = draw(6, 7)
    labels[labels == ignored] = 1
    plain = run(backend, logits, labels)
    labels[[1, 4]], dirty = ignored, logits.clone()
    dirty[[1, 4]] = NAN
    found = run(backend, dirty, labels, ignore_index=ignored)
    for x, clean in zip(found, plain, strict=True):
        assert bool((x[[1, 4]] == 0).all())
        equal([x[[0, 2, 3, 5]]], [clean[[0, 2, 3, 5]]])


@ON
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32, torch.uint8], ids=str)
def test_masked_rows_are_not_read(kind: torch.dtype, backend: str) -> None:
    logits, labels = draw(6, 33)
    mask = torch.tensor([1, 0, 1, 1, 0, 1], dtype=kind)
    plain = run(backend, logits, labels)
    for garbage in GARBAGE:
        dirty, wrong = logits.clone(), labels.clone()
        dirty[[1, 4]], wrong[[1, 4]] = garbage, torch.tensor([-100, 10**12])
        temperature = torch.tensor([1.0, 0.0, 1.0, 1.0, NAN, 1.0])
        found = run(
            backend,
            dirty,
            wrong,
            (torch.tensor([1.0, NAN, 1.0, 1.0, INF, 1.0]), 0.5, -0.25),
            mask=mask,
            temperature=temperature,
        )
        for x in found:
            assert bool((x[[1, 4]] == 0).all())
        equal([x[mask != 0] for x in found[:3]], [x[mask != 0] for x in plain[:3]])


@ON_NATIVE
def test_the_backward_skips_rows_without_upstream_gradient(backend: str) -> None:
    """Their gradient is exactly 0 even where the row holds NaN: it is not read again."""
    logits, labels = draw(4, 50)
    logits[2] = NAN
    upstream = (torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(4))
    leaf = logits.clone().requires_grad_()
    out = fa.token_log_probs(leaf, labels, return_entropy=True, return_sum_p2=True, backend=backend)
    torch.autograd.backward([out.log_probs, out.entropy, out.sum_p2], list(upstream))
    assert bool((leaf.grad[[1, 2]] == 0).all())
    assert bool((leaf.grad[[0, 3]].abs().sum(1) > 0).all())


@ON
def test_unused_results_and_what_was_not_asked_for(backend: str) -> None:
    logits, labels = draw(4, 9)
    full = run(backend, logits, labels)
    only = fa.token_log_probs(logits, labels, backend=backend)
    assert only.entropy is None
    assert only.sum_p2 is None
    equal([only.log_probs], full[:1])
    leaf = logits.clone().requires_grad_()
    out = fa.token_log_probs(leaf, labels, return_entropy=True, backend=backend)
    assert out.sum_p2 is None
    out.entropy.sum().backward()  # nothing flows back from log_probs
    close([*full[:3], leaf.grad], [*full[:3], run(backend, logits, labels, (0.0, 1.0, 0.0))[3]])


# ---- arguments -------------------------------------------------------------------------------------------------------


@ON
def test_bad_arguments_are_named(backend: str) -> None:
    logits, labels = draw(4, 9)
    temperatures = torch.ones(4)
    for error, match, changes in (
        (ValueError, "temperature is 0.0; it must be finite and greater than 0", {"temperature": 0.0}),
        (ValueError, "temperature is -1", {"temperature": -1}),
        (ValueError, "temperature is nan", {"temperature": NAN}),
        (ValueError, r"temperature\[2\] is 0.0", {"temperature": torch.tensor([1.0, 1.0, 0.0, 1.0])}),
        (ValueError, r"temperature has shape \[3\]", {"temperature": torch.ones(3)}),
        (ValueError, "temperature requires grad", {"temperature": temperatures.clone().requires_grad_()}),
        (TypeError, "temperature is a str", {"temperature": "hot"}),
        (ValueError, "softcap is 0; it must be finite and greater than 0", {"softcap": 0}),
        (TypeError, "softcap is a bool", {"softcap": True}),
        (TypeError, "ignore_index is a float", {"ignore_index": -100.0}),
        (ValueError, r"mask has shape \[4, 1\]", {"mask": torch.ones(4, 1)}),
        (ValueError, "mask has a fractional", {"mask": torch.tensor([1.0, 0.5, 0.0, 1.0])}),
        (ValueError, r"labels has shape \[3\]; expected \[4\]", {"labels": labels[:3]}),
        (TypeError, "labels has dtype torch.float32", {"labels": labels.float()}),
        (TypeError, "logits has dtype torch.int64", {"logits": logits.long()}),
        (TypeError, "logits is a list", {"logits": logits.tolist()}),
        (ValueError, r"logits has shape \[4, 0\]", {"logits": logits[:, :0]}),
        (ValueError, "share memory", {"logits": logits[:1].expand(4, 9), "inplace_backward": True}),
        (ValueError, "share memory", {"logits": logits.view(-1).unfold(0, 9, 8)[:4], "inplace_backward": True}),
        (ValueError, "backend is 'gpu'", {"backend": "gpu"}),
    ):
        given = {"logits": logits, "labels": labels, "backend": backend, **changes}
        with pytest.raises(error, match=match):
            fa.token_log_probs(**given)
    with pytest.raises(fa.BackendUnavailableError, match="float64"):
        fa.token_log_probs(logits.double(), labels, backend="cpu")
