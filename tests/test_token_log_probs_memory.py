"""token_log_probs in every layout of memory, its bits, its peak memory, in place and compiled."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from log_prob_cases import DTYPES, INF, NAN, ON, ON_NATIVE, close, draw, equal, run
from op_cases import NATIVE
from torch import Tensor

import fastadv as fa
from fastadv import native
from fastadv.ops import _logits
from fastadv.testing import peak_memory_rise

# ---- layouts ---------------------------------------------------------------------------------------------------------


def layouts(t: Tensor) -> dict[str, Tensor]:
    """`[S, B, V]` logits in other layouts of memory."""
    wide = torch.full((t.shape[0], t.shape[1], t.shape[2] + 5), NAN, dtype=t.dtype)
    wide[..., 2:-3] = t
    every = torch.full((t.shape[0], 2 * t.shape[1], t.shape[2]), NAN, dtype=t.dtype)
    every[:, ::2] = t
    columns = torch.full((*t.shape[:2], 3 * t.shape[2]), NAN, dtype=t.dtype)
    columns[..., ::3] = t
    return {
        "leading dimensions transposed": t.transpose(0, 1).contiguous().transpose(0, 1),
        "rows of a wider tensor": wide[..., 2:-3],
        "every other row": every[:, ::2],
        "every third column": columns[..., ::3],
        "vocabulary first": t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "reversed": t.flip(0).flip(0),
    }


@ON
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("vocab", [5, 16, 37, 2100])
def test_layouts(vocab: int, dtype: torch.dtype, backend: str) -> None:
    logits = torch.randn(3, 4, vocab).to(dtype)
    labels = torch.randint(0, vocab, (3, 4))
    upstream = (torch.randn(3, 4), torch.randn(4, 3).t(), torch.tensor(0.5).expand(3, 4))
    plain = run(backend, logits, labels, upstream)
    for kind, laid_out in layouts(logits).items():
        assert torch.equal(laid_out, logits), kind
        found = run(backend, laid_out, labels.t().contiguous().t(), upstream)
        if backend in NATIVE:
            equal(found, plain)
        else:
            close(found, plain, rounding=torch.finfo(dtype).eps)
    one = logits[:1, :1]
    expanded = run(backend, one.expand(3, 4, vocab), labels, upstream)
    close(
        expanded, run(backend, one.expand(3, 4, vocab).contiguous(), labels, upstream), rounding=torch.finfo(dtype).eps
    )


@ON
def test_no_leading_dimension_and_many(backend: str) -> None:
    logits, labels = torch.randn(2, 1, 2, 3, 1, 11), torch.randint(0, 11, (2, 1, 2, 3, 1))
    found = run(backend, logits.permute(3, 1, 0, 4, 2, 5), labels.permute(3, 1, 0, 4, 2))
    flat = run(backend, logits.reshape(12, 11), labels.reshape(12))
    for x, y in zip(found, flat, strict=True):
        back = x.permute(2, 1, 4, 0, 3, *range(5, x.dim()))
        torch.testing.assert_close(back.reshape(y.shape), y, rtol=1e-6, atol=1e-6)
    single = run(backend, logits[0, 0, 0, 0, 0], labels[0, 0, 0, 0, 0])
    assert single[0].shape == ()
    close(single, [x[0] for x in flat])


@ON_NATIVE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_whole_lanes_and_single_numbers_convert_alike(dtype: torch.dtype, backend: str) -> None:
    """Every finite bit pattern is read, and gradients from subnormal to overflow are written, sixteen at a time as one
    at a time, and as torch rounds them."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    patterns = patterns[patterns.isfinite()].view(-1, 16)
    labels = torch.arange(len(patterns)) % 16
    upstream = (10.0 ** (torch.arange(len(patterns)) % 24 - 16.0), 0.0, 0.0)
    spread = torch.empty(len(patterns), 32, dtype=dtype)[:, ::2].copy_(patterns)
    low = run(backend, patterns, labels, upstream)
    equal(run(backend, spread, labels, upstream), low)
    single = run(backend, patterns.float(), labels, upstream)
    equal(low, [*single[:3], single[3].to(dtype)])


# ---- the same bits ---------------------------------------------------------------------------------------------------


@ON_NATIVE
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_a_row_alone_and_in_a_batch(dtype: torch.dtype, backend: str) -> None:
    logits, labels = draw(1000, 517)
    logits = logits.to(dtype)
    torch.set_num_threads(2)
    batch = run(backend, logits, labels)
    for row in (0, 1, 126, 127, 500, 999):
        one = slice(row, row + 1)
        equal([x[one] for x in batch], run(backend, logits[one], labels[one]))


@ON_NATIVE
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_instruction_sets_give_the_same_bits(
    softcap: float | None, dtype: torch.dtype, backend: str, monkeypatch: Any
) -> None:
    logits, labels = draw(5, 4099)
    logits[1, :2500], logits[2, 7], logits[3] = -INF, NAN, logits[3] * 1000
    logits, upstream = logits.to(dtype), (torch.randn(5), torch.randn(5), torch.randn(5))
    best = native.INSTRUCTION_SETS.index(native.module().best_instruction_set())
    results = []
    for name in native.INSTRUCTION_SETS[: best + 1]:
        build = importlib.import_module(f"fastadv._cpu_{name}")
        monkeypatch.setattr(native, "module", lambda build=build: build)
        results.append(run(backend, logits, labels, upstream, softcap=softcap, temperature=0.9))
    for other in results[1:]:
        equal(results[0], other)


def test_parts_of_the_vocabulary_merge_to_the_whole() -> None:
    """The launchers that vocabulary-parallel and chunked callers use."""
    logits, labels = draw(9, 5000)
    logits[3, :3000] = -INF
    inverse = (1 / (0.5 + torch.rand(9))).double()
    whole = _logits.finish("cpu", _logits.row_statistics("cpu", logits, labels, inverse))
    parts, edges = [], (0, 1, 2048, 3000, 5000)
    for a, b in itertools.pairwise(edges):
        local = torch.where((labels >= a) & (labels < b), labels - a, _logits.NO_LABEL)
        parts.append(_logits.row_statistics("cpu", logits[:, a:b], local, inverse))
    merged = _logits.finish("cpu", torch.stack(parts))
    for x, y in zip(merged, whole, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=1e-7)
    g = torch.randn(9), torch.randn(9), torch.randn(9)
    given = (whole.lse, whole.entropy, whole.sum_p2, *g, inverse)
    full = _logits.logits_gradient("cpu", logits, labels, *given, out=torch.empty_like(logits))
    split = torch.full_like(logits, NAN)
    for a, b in itertools.pairwise(edges):
        local = torch.where((labels >= a) & (labels < b), labels - a, _logits.NO_LABEL)
        _logits.logits_gradient("cpu", logits[:, a:b], local, *given, out=split[:, a:b])
    assert torch.equal(full, split)
    overwritten = logits.clone()
    _logits.logits_gradient("cpu", overwritten, labels, *given, out=overwritten)
    assert torch.equal(full, overwritten)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_the_measurement_counts_memory_that_the_allocator_had_kept() -> None:
    del [torch.empty(2**23)][:]  # from here on glibc gives blocks of less than 32 MiB from its heap, and keeps them
    blocks = [torch.ones(2**18) for _ in range(64)]
    above = torch.ones(2**10)  # the heap cannot shrink while this lives
    del blocks
    assert peak_memory_rise(lambda: torch.ones(2**22)) > 3 * 2**22
    assert peak_memory_rise(above.sum, times=3) < 2**20


@ON_NATIVE
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_peak_memory(dtype: torch.dtype, backend: str) -> None:
    threads = 2
    torch.set_num_threads(threads)
    logits, labels = torch.zeros(128, 151_936, dtype=dtype), torch.arange(128)
    options = {"return_entropy": True, "return_sum_p2": True, "backend": backend}
    fa.token_log_probs(logits, labels, **options)
    assert peak_memory_rise(lambda: fa.token_log_probs(logits, labels, **options), times=3) < threads * 2**20
    leaf = logits.requires_grad_()
    kept: list[Any] = []

    def step() -> None:
        out = fa.token_log_probs(leaf, labels, **options)
        kept.append(torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), leaf))

    # One gradient in the dtype of the logits; large pages round it up.
    assert peak_memory_rise(step, times=3) < logits.nbytes + threads * 2**20 + 4 * 2**20
    kept.clear()

    def step_in_place() -> None:
        out = fa.token_log_probs(leaf, labels, inplace_backward=True, **options)
        kept.append(torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), leaf))

    assert peak_memory_rise(step_in_place, times=3) < threads * 2**20


# ---- in place --------------------------------------------------------------------------------------------------------


@ON_NATIVE
@pytest.mark.parametrize("laid_out", ["contiguous", "transposed", "every other column"])
def test_inplace_backward(laid_out: str, backend: str) -> None:
    source = torch.randn(6, 40, requires_grad=True)
    labels = torch.randint(0, 20, (6,))
    mask = torch.tensor([1, 1, 0, 1, 1, 1])
    views = {
        "contiguous": lambda t: (t * 2)[:, :20].contiguous(),
        "transposed": lambda t: (t * 2).t().contiguous().t()[:, :20],
        "every other column": lambda t: (t * 2)[:, ::2],
    }

    def gradient(in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
        logits = views[laid_out](source)
        before = logits.detach().clone()
        out = fa.token_log_probs(logits, labels, mask=mask, inplace_backward=in_place, backend=backend)
        assert torch.equal(logits.detach(), before)  # the forward writes nothing
        loss = out.log_probs.sum()
        (found,) = torch.autograd.grad(loss, source, retain_graph=True)
        if in_place:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, source)
        else:
            assert torch.equal(torch.autograd.grad(loss, source)[0], found)
        return found, before, logits.detach()

    plain, before, after = gradient(False)
    assert torch.equal(before, after)
    reused, before, after = gradient(True)
    assert torch.equal(plain, reused)
    assert not torch.equal(before, after)


@ON_NATIVE
def test_inplace_backward_is_seen_by_whoever_else_saved_the_logits(backend: str) -> None:
    source = torch.randn(3, 8, requires_grad=True)
    logits = source * 1
    other = logits.square().sum()  # saves the logits
    out = fa.token_log_probs(logits, torch.tensor([0, 1, 2]), inplace_backward=True, backend=backend)
    out.log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


# ---- compile ---------------------------------------------------------------------------------------------------------


@ON
def test_compiled_labels_outside_of_the_vocabulary_give_nan(backend: str) -> None:
    torch._dynamo.reset()
    logits, labels = draw(4, 9)
    labels[1] = 9

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(logits: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor | None]:
        out = fa.token_log_probs(logits, labels, temperature=temperature, return_entropy=True, backend=backend)
        return out.log_probs, out.entropy

    temperature = torch.tensor([1.0, 1.0, 0.0, 1.0])
    for x in compiled(logits, labels, temperature):
        assert x.isnan().tolist() == [False, True, True, False]


@ON_NATIVE
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, imported by the first compilation
def test_inductor_runs_the_op(backend: str) -> None:
    torch._dynamo.reset()
    logits, labels = draw(4, 33)

    @torch.compile(fullgraph=True)
    def compiled(logits: Tensor) -> Tensor:
        out = fa.token_log_probs(logits * 2, labels, return_entropy=True, backend=backend)
        assert out.entropy is not None
        return (out.log_probs - 0.1 * out.entropy).sum()

    leaf = logits.clone().requires_grad_()
    compiled(leaf).backward()
    close([leaf.grad], [2 * run(backend, 2 * logits, labels, (1.0, -0.1, 0.0))[3]])
