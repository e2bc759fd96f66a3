"""linear_log_probs against a float64 softmax written here, what it skips, and what it keeps in memory."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from op_cases import BACKENDS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fastadv as fa
from fastadv.ops import _linear
from fastadv.testing import peak_memory_rise

ON = pytest.mark.parametrize("backend", BACKENDS)
VOCABULARIES = (1, 3, 17, 1000, 1100)
ALL = {"return_entropy": True, "return_sum_p2": True}


def problem(tokens: int = 23, size: int = 8, vocab: int = 17, seed: int = 0, density: float = 0.6) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "hidden": normal(tokens, size),
        "weight": normal(vocab, size) / size**0.5,
        "bias": normal(vocab),
        "labels": torch.randint(0, vocab, (tokens,), generator=generator),
        "mask": torch.rand(tokens, generator=generator) < density,
        "temperature": 0.5 + torch.rand(tokens, generator=generator),
    }


def oracle(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """A softmax in float64 of the rows that count, one after another."""
    hidden, weight = given["hidden"].double(), given["weight"].double()
    shape, rows = given["labels"].shape, []
    mask = given.get("mask", torch.ones(shape, dtype=torch.bool)).reshape(-1)
    temperature = given.get("temperature", 1.0)
    temperatures = torch.as_tensor(temperature, dtype=torch.float64).expand(shape).reshape(-1)
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), given["labels"].reshape(-1)
    for i in range(labels.shape[0]):
        if not mask[i]:
            rows.append(torch.zeros(3, dtype=torch.float64))
            continue
        z = weight @ hidden[i]
        if given.get("bias") is not None:
            z = z + given["bias"].double()
        if given.get("softcap") is not None:
            z = given["softcap"] * torch.tanh(z / given["softcap"])
        z = z / temperatures[i]
        log_p = z - z.logsumexp(0)
        p = log_p.exp()
        rows.append(torch.stack([log_p[labels[i]], -(p * log_p).sum(), (p * p).sum()]))
    stacked = torch.stack(rows) if rows else torch.zeros((0, 3), dtype=torch.float64)
    return tuple(x.reshape(shape) for x in stacked.unbind(1))  # type: ignore[return-value]


LAYER = ("hidden", "weight", "bias")


def gradients(outputs: tuple[Tensor, ...], leaves: dict[str, Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """Of a sum over all outputs, each weighted by its part of upstream `[3, ...]`."""
    total = sum((o * u.to(o.dtype)).sum() for o, u in zip(outputs, upstream, strict=True))
    if not total.requires_grad:  # the oracle's, where no row counts
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in zip(leaves, found, strict=True)}


def with_leaves(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    leaves = {name: given[name].detach().clone().requires_grad_() for name in LAYER if given.get(name) is not None}
    return {**given, **leaves}, leaves


def equals_oracle(given: dict[str, Any], backend: str, tolerance: float = 3e-6, **options: Any) -> None:
    upstream = torch.randn((3, *given["labels"].shape), generator=torch.Generator().manual_seed(5))
    ours, leaves = with_leaves(given)
    outputs = tuple(fa.linear_log_probs(**ours, **ALL, **options, backend=backend))
    assert all(o.requires_grad for o in outputs)
    exact, exact_leaves = with_leaves({k: v.double() if k in LAYER and v is not None else v for k, v in given.items()})
    right = oracle(exact)
    for mine, theirs in zip(outputs, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)
    mine, theirs = gradients(outputs, leaves, upstream), gradients(right, exact_leaves, upstream)
    for name, exact_gradient in theirs.items():
        scale = float(exact_gradient.abs().max()) if exact_gradient.numel() else 0.0
        torch.testing.assert_close(
            mine[name].double(), exact_gradient, rtol=tolerance, atol=3 * tolerance * max(scale, 1.0),
            msg=lambda m, n=name: f"{n}: {m}",
        )  # fmt: skip


# ---- the right numbers -----------------------------------------------------------------------------------------------


@ON
@hypothesis.given(data=st.data())
def test_equals_a_softmax_in_float64(backend: str, data: st.DataObject) -> None:
    draw = data.draw
    given = problem(
        draw(st.integers(0, 30)), draw(st.integers(1, 9)), draw(st.sampled_from(VOCABULARIES)),
        draw(st.integers(0, 2**16)), draw(st.sampled_from([0.0, 0.4, 1.0])),
    )  # fmt: skip
    if draw(st.booleans()):
        given["bias"] = None
    given["temperature"] = draw(st.sampled_from([1.0, 0.7, given["temperature"]]))
    given["softcap"] = draw(st.sampled_from([None, 2.0]))
    if draw(st.booleans()):
        del given["mask"]
    if draw(st.booleans()) and given["labels"].shape[0] % 2 == 0:
        given = {k: v.unflatten(0, (2, -1)) if per_token(k, v) else v for k, v in given.items()}
    options = {"chunk_tokens": draw(st.sampled_from([None, 1, 7])), "deterministic": draw(st.booleans())}
    equals_oracle(given, backend, **options)


def per_token(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name not in ("weight", "bias")


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("products", ["ieee", "bf16"])
def test_low_precision_rounds_no_logit(vocab: int, dtype: torch.dtype, products: str) -> None:
    """Against float64 of the rounded inputs; also where torch multiplies bfloat16 operands, which these are."""
    given = problem(size=64, vocab=vocab)
    given = {k: v.to(dtype) if k in LAYER else v for k, v in given.items()}
    given["hidden"] = given["hidden"] * 4
    right = oracle(given)
    with product_precision(products if dtype == torch.bfloat16 else "ieee"):
        ours, leaves = with_leaves(given)
        outputs = tuple(fa.linear_log_probs(**ours, **ALL))
        found = gradients(outputs, leaves, torch.ones(3, 23))
    for mine, theirs in zip(outputs, right, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=3e-6, atol=1e-5)
    exact, exact_leaves = with_leaves({k: v.double() if k in LAYER else v for k, v in given.items()})
    for name, theirs in gradients(oracle(exact), exact_leaves, torch.ones(3, 23)).items():
        assert found[name].dtype == dtype
        error = (found[name].double() - theirs).norm() / theirs.norm().clamp(min=1e-9)
        assert error < 0.01, name


@contextlib.contextmanager
def product_precision(precision: str) -> Any:
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def test_weights_are_widened_tile_by_tile(monkeypatch: Any) -> None:
    ten_rows = dataclasses.replace(_linear.SIZES["cpu"], tile_bytes=4 * 8 * 10)
    monkeypatch.setitem(_linear.SIZES, "cpu", ten_rows)
    for given in (problem(vocab=37), {**problem(vocab=37), "weight": torch.randn(37, 16)[:, ::2]}):
        equals_oracle(given, "cpu")
        equals_oracle(given, "cpu", deterministic=True)
    low = {k: v.bfloat16() if k in LAYER else v for k, v in problem(vocab=37).items()}
    for mine, theirs in zip(fa.linear_log_probs(**low, **ALL), oracle(low), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 5}, {"deterministic": True}], ids=str)
def test_any_strides(options: dict[str, Any]) -> None:
    given = problem(24, vocab=1100)
    wide, tall = torch.randn(24, 16), torch.randn(2200, 24)
    sequence_first = torch.randn(4, 6, 8)
    for changes in (
        {"hidden": wide[:, ::2]},
        {"hidden": wide.as_strided((24, 8), (0, 1))},
        {"weight": tall[::2, :8]},
        {"weight": tall[:1100, ::3]},
        {"weight": torch.randn(8, 1100).t()},
        {"weight": torch.randn(1, 8).expand(1100, 8)},
        {"bias": torch.randn(2200)[::2]},
    ):
        equals_oracle({**given, **changes}, "cpu", **options)
    shaped = {k: v.view(6, 4) if per_token(k, v) and k != "hidden" else v for k, v in given.items()}
    equals_oracle({**shaped, "hidden": sequence_first.transpose(0, 1)}, "cpu", **options)
    equals_oracle({**shaped, "hidden": torch.randn(6, 1, 8).expand(6, 4, 8)}, "cpu", **options)


def test_expanded_and_strided_upstream_gradients() -> None:
    given, leaves = with_leaves(problem())
    out = fa.linear_log_probs(**given).log_probs
    expanded = torch.autograd.grad(out, leaves["weight"], torch.tensor(2.0).expand(23), retain_graph=True)[0]
    full = torch.autograd.grad(out, leaves["weight"], torch.full((23,), 2.0), retain_graph=True)[0]
    assert torch.equal(expanded, full)
    upstream = torch.randn(46)
    strided = torch.autograd.grad(out, leaves["weight"], upstream[::2], retain_graph=True)[0]
    assert torch.equal(strided, torch.autograd.grad(out, leaves["weight"], upstream[::2].contiguous())[0])


def test_gradcheck_of_the_reference_by_every_part_of_the_layer() -> None:
    given = problem(5, 3, 4)
    leaves = [given[name].double().requires_grad_() for name in LAYER]

    def results(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        layer = {"hidden": hidden, "weight": weight, "bias": bias}
        return tuple(fa.linear_log_probs(**{**given, **layer, "softcap": 3.0}, **ALL, backend="reference"))

    assert torch.autograd.gradcheck(results, leaves)


@ON
def test_what_was_not_asked_for_is_none(backend: str) -> None:
    out = fa.linear_log_probs(**problem(), backend=backend)
    assert isinstance(out, fa.TokenLogProbs)
    assert out.entropy is None
    assert out.sum_p2 is None
    assert fa.linear_log_probs(**problem(), return_entropy=True, backend=backend).entropy.dtype == torch.float32


# ---- what does not count is not read ---------------------------------------------------------------------------------


@ON
@pytest.mark.parametrize("how", ["mask", "ignore_index"])
def test_rows_that_do_not_count_enter_nothing(backend: str, how: str) -> None:
    clean = problem()
    dirty = {**clean, "hidden": torch.where(clean["mask"][:, None], clean["hidden"], torch.nan)}
    dirty["labels"] = torch.where(clean["mask"], clean["labels"], -100)
    options: dict[str, Any] = {}
    if how == "ignore_index":
        del dirty["mask"]
        options["ignore_index"] = -100
    results = []
    for given, more in ((clean, {}), (dirty, options)):
        ours, leaves = with_leaves(given)
        outputs = tuple(fa.linear_log_probs(**ours, **ALL, **more, backend=backend))
        results.append([*outputs, *gradients(outputs, leaves, torch.ones(3, 23)).values()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    off = ~clean["mask"]
    assert all(bool((x[off] == 0).all()) for x in results[1][:4])  # three outputs and the hidden gradient


@ON
@pytest.mark.parametrize("tokens", [0, 7])
@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_that_counts(backend: str, tokens: int, deterministic: bool) -> None:
    given, leaves = with_leaves(problem(tokens, density=0.0))
    outputs = tuple(fa.linear_log_probs(**given, **ALL, deterministic=deterministic, backend=backend))
    for gradient in gradients(outputs, leaves, torch.ones(3, tokens)).values():
        assert bool((gradient == 0).all())
    assert all(o.shape == (tokens,) and bool((o == 0).all()) for o in outputs)


def record(monkeypatch: Any) -> dict[str, list[int]]:
    """Rows of the chunks that are computed, and of those that gradients are made of."""
    rows: dict[str, list[int]] = {"load": [], "backward": []}
    load, backward = _linear.Head.load, _linear.Head.backward

    def loading(head: _linear.Head, take: Tensor) -> None:
        rows["load"] += head.rows[take].tolist()
        load(head, take)

    def going_back(head: _linear.Head, state: Tensor, upstream: Any, sums: Any) -> None:
        rows["backward"] += head.rows[head.take].tolist()
        backward(head, state, upstream, sums)

    monkeypatch.setattr(_linear.Head, "load", loading)
    monkeypatch.setattr(_linear.Head, "backward", going_back)
    return rows


def test_rows_without_an_upstream_gradient_are_not_computed_again(monkeypatch: Any) -> None:
    rows = record(monkeypatch)
    given, leaves = with_leaves(problem())
    counted = given["mask"].nonzero().flatten().tolist()
    out = fa.linear_log_probs(**given, **ALL, chunk_tokens=4)
    assert rows == {"load": counted, "backward": []}
    upstream = torch.zeros(3, 23)
    upstream[0, counted[0]] = 1.0
    upstream[1, counted[2]] = -1.0
    upstream[2, counted[3]] = torch.nan
    gradients(tuple(out), leaves, upstream)
    assert rows["backward"] == rows["load"][len(counted) :] == [counted[0], counted[2], counted[3]]


def test_without_grad_no_gradient_work_is_done(monkeypatch: Any) -> None:
    rows = record(monkeypatch)
    given, _ = with_leaves(problem())
    with torch.no_grad():
        out = fa.linear_log_probs(**given, **ALL)
    assert not any(o.requires_grad for o in out)
    assert rows["backward"] == []
    assert not fa.linear_log_probs(**problem()).log_probs.requires_grad


@pytest.mark.parametrize("name", LAYER)
def test_only_the_gradients_that_are_needed(name: str, monkeypatch: Any) -> None:
    made = []
    of = _linear.Gradients.of.__func__
    monkeypatch.setattr(
        _linear.Gradients, "of", classmethod(lambda cls, *given: made.append(of(cls, *given)) or made[-1])
    )
    given, leaves = problem(), with_leaves(problem())[1]
    fa.linear_log_probs(**{**given, name: leaves[name]}).log_probs.sum().backward()
    (sums,) = made
    assert [part for part in LAYER if getattr(sums, part) is not None] == [name]
    whole, all_leaves = with_leaves(given)
    fa.linear_log_probs(**whole).log_probs.sum().backward()
    torch.testing.assert_close(leaves[name].grad, all_leaves[name].grad, rtol=1e-6, atol=1e-6)


# ---- autograd --------------------------------------------------------------------------------------------------------


def test_backward_twice_with_retain_graph() -> None:
    given, leaves = with_leaves(problem())
    out = fa.linear_log_probs(**given, **ALL)
    total = out.log_probs.sum() + out.entropy.sum()
    first = torch.autograd.grad(total, list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(total, list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, leaves["weight"])


def test_a_weight_that_changed_in_between_is_an_error() -> None:
    given, leaves = with_leaves(problem())
    out = fa.linear_log_probs(**given).log_probs.sum()
    with torch.no_grad():
        leaves["weight"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_autocast_casts_the_layer_and_no_logit() -> None:
    given, leaves = with_leaves(problem(vocab=1000))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fa.linear_log_probs(**given)
    rounded = {k: v.bfloat16() if k in LAYER else v for k, v in problem(vocab=1000).items()}
    torch.testing.assert_close(out.log_probs.double(), oracle(rounded)[0], rtol=3e-6, atol=1e-5)
    out.log_probs.sum().backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves.values())
    with torch.autocast("cpu", dtype=torch.bfloat16):  # autocast around the backward changes nothing
        plain, more = with_leaves(problem(vocab=1000))
        fa.linear_log_probs(**plain).log_probs.sum().backward()
    assert all(torch.equal(more[name].grad, leaves[name].grad) for name in LAYER)


def test_compiled_as_in_eager_mode() -> None:
    torch._dynamo.reset()
    given, leaves = with_leaves(problem())
    compiled = torch.compile(lambda **x: tuple(fa.linear_log_probs(**x, **ALL)), fullgraph=True, backend="aot_eager")
    upstream = torch.randn(3, 23)
    theirs = gradients(tuple(fa.linear_log_probs(**given, **ALL)), leaves, upstream)
    mine = gradients(compiled(**given), leaves, upstream)
    for name in LAYER:
        assert torch.equal(mine[name], theirs[name]), name


def test_a_dispatch_mode_sees_registered_ops() -> None:
    mode = FakeTensorMode()
    given, leaves = with_leaves(problem())
    fake = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in given.items()}
    with mode:
        fa.linear_log_probs(**fake, backend="cpu").log_probs.sum().backward()
    assert all(fake[name].grad.shape == leaf.shape for name, leaf in leaves.items())


# ---- the same bits, or close ones ------------------------------------------------------------------------------------


def row_results(given: dict[str, Any], index: Any, **options: Any) -> list[Tensor]:
    """Everything that belongs to the tokens of `index`, computed without the others."""
    alone = {k: v[index] if per_token(k, v) else v for k, v in given.items()}
    ours, leaves = with_leaves(alone)
    outputs = tuple(fa.linear_log_probs(**ours, **ALL, **options))
    upstream = torch.tensor([1.0, -0.5, 2.0])[:, None].expand(3, alone["labels"].shape[0])
    return [*outputs, gradients(outputs, leaves, upstream)["hidden"]]


@pytest.mark.parametrize(("size", "vocab"), [(1, 1), (7, 3), (16, 17), (64, 1000), (33, 1100)])
def test_deterministic_rows_do_not_depend_on_the_batch(size: int, vocab: int) -> None:
    given = problem(1000, size, vocab, density=0.7)
    every = row_results(given, slice(None), deterministic=True)
    for chunk_tokens, threads in ((64, 1), (200, 2), (None, 3)):
        torch.set_num_threads(threads)
        again = row_results(given, slice(None), deterministic=True, chunk_tokens=chunk_tokens)
        assert all(torch.equal(a, b) for a, b in zip(every, again, strict=True))
    for index in (slice(0, 1), slice(999, 1000), slice(123, 124), slice(63, 66), slice(400, 713), [5, 900, 17]):
        some = row_results(given, index, deterministic=True)
        assert all(torch.equal(a[index], b) for a, b in zip(every, some, strict=True)), index


@pytest.mark.parametrize("size", [1, 63, 65])
def test_deterministic_weight_gradients_do_not_depend_on_threads(size: int) -> None:
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        given, leaves = with_leaves(problem(size, 64, 1100))
        outputs = tuple(fa.linear_log_probs(**given, **ALL, deterministic=True))
        results.append(gradients(outputs, leaves, torch.ones(3, size)))
        assert torch.get_num_threads() == threads
    assert all(torch.equal(results[0][name], other[name]) for name in LAYER for other in results[1:])


def test_otherwise_rows_depend_on_the_batch_within_rounding() -> None:
    given = problem(1000, 64, 1100)
    every = row_results(given, slice(None))
    for index in (slice(0, 1), slice(400, 713)):
        for a, b in zip(every, row_results(given, index), strict=True):
            torch.testing.assert_close(a[index], b, rtol=2e-6, atol=2e-6)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [False, True], ids=("linear_log_probs", "linear_policy_loss"))
def test_memory_is_a_chunk_of_logits_and_the_gradients(loss: bool) -> None:
    tokens, vocab, size, chunk = 4096, 16384, 32, 128
    given = {k: v for k, v in problem(tokens, size, vocab).items() if k not in ("bias", "temperature")}
    ours, leaves = with_leaves(given)
    old, advantages = torch.full((tokens,), -10.0), torch.ones(tokens)

    def run() -> None:
        for leaf in leaves.values():
            leaf.grad = None
        if loss:
            ours["mask"] = given["mask"]
            fa.linear_policy_loss(
                ours["hidden"], ours["weight"], ours["labels"], old, advantages, ours["mask"], chunk_tokens=chunk
            ).loss.backward()
        else:
            fa.linear_log_probs(**ours, chunk_tokens=chunk).log_probs.sum().backward()

    run()  # thread pools
    logits, gradients_ = 4 * chunk * vocab, sum(4 * leaf.numel() for leaf in leaves.values())
    small = 2**24  # a packed operand of the products, and large pages, which round every buffer up
    assert peak_memory_rise(run, times=3) < logits + gradients_ + small
    assert logits + gradients_ + small < 4 * tokens * vocab / 9  # all logits would be 256 MiB


# ---- bad input -------------------------------------------------------------------------------------------------------

BAD = [
    ({"hidden": torch.ones(2, 2, 2, 8)}, ValueError, r"hidden has shape \[2, 2, 2, 8\]; pass \[N, H\] or \[B, T, H\]"),
    ({"hidden": torch.ones(23, 8, dtype=torch.int64)}, TypeError, r"hidden has dtype torch.int64"),
    ({"weight": torch.ones(17, 9)}, ValueError, r"weight has shape \[17, 9\]; expected \[V, 8\]"),
    ({"weight": torch.ones(0, 8), "bias": None}, ValueError, r"weight has shape \[0, 8\]; a vocabulary has at least"),
    ({"weight": torch.ones(17, 8, dtype=torch.bfloat16)}, TypeError, r"weight has dtype torch.bfloat16, hidden has"),
    ({"weight": torch.ones(17, 8, dtype=torch.float64)}, TypeError, r"weight has dtype torch.float64, hidden has"),
    ({"bias": torch.ones(17, dtype=torch.float16)}, TypeError, r"bias has dtype torch.float16.*torch.autocast"),
    ({"bias": torch.ones(3)}, ValueError, r"bias has shape \[3\]; expected \[17\]"),
    ({"labels": torch.zeros(22, dtype=torch.int64)}, ValueError, r"labels has shape \[22\]; expected \[23\]"),
    ({"labels": torch.zeros(23)}, TypeError, r"labels has dtype torch.float32"),
    ({"labels": torch.full((23,), 17)}, ValueError, r"labels\[\d+\] is 17; a label must be in \[0, 17\)"),
    ({"labels": torch.full((23,), -1)}, ValueError, r"labels\[\d+\] is -1; a label must be in \[0, 17\)"),
    ({"mask": torch.full((23,), 0.5)}, ValueError, r"mask has a fractional"),
    ({"mask": torch.ones(1, 23)}, ValueError, r"mask has shape \[1, 23\]"),
    ({"temperature": 0.0}, ValueError, r"temperature is 0.0"),
    ({"temperature": torch.zeros(23)}, ValueError, r"temperature\[\d+\] is 0.0"),
    ({"temperature": torch.ones(23).requires_grad_()}, ValueError, r"temperature requires grad"),
    ({"softcap": -1.0}, ValueError, r"softcap is -1.0"),
    ({"ignore_index": 0.5}, TypeError, r"ignore_index is a float; pass an integer"),
    ({"chunk_tokens": 0}, ValueError, r"chunk_tokens is 0; it must be at least 1"),
    ({"vocab_start": 4}, ValueError, r"vocab_start is 4 without vocab_group"),
]  # fmt: skip


@ON
@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[b[2] for b in BAD])
def test_bad_input(backend: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"linear_log_probs: {message}"):
        fa.linear_log_probs(**{**problem(), **changes}, backend=backend)


@ON
def test_a_label_out_of_range_gives_nan_where_values_are_not_checked(backend: str) -> None:
    given = problem(density=1.0)
    given["labels"][3] = 17
    with fa.checks("off"):
        out = fa.linear_log_probs(**given, backend=backend).log_probs
    assert out.isnan().nonzero().flatten().tolist() == [3]
