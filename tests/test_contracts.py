"""The contracts that every op keeps on every backend, each tested once over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from op_cases import (
    BACKENDS,
    CASES,
    CPU_CASES,
    EMULATED,
    GARBAGE,
    INTERPRETED,
    NATIVE,
    PRODUCT_CASES,
    REFERENCE_CASES,
    Case,
    Inputs,
    Outputs,
    Shape,
    float64,
    parametrize,
    where_masked,
)
from torch import Tensor

import fastadv as fa
from fastadv import native

WITH_CPU_KERNELS = (*CASES, *CPU_CASES)
# Every op on every backend; losses without a kernel keep the same contracts on the reference.
PAIRS = [
    *((case, backend) for case in WITH_CPU_KERNELS for backend in BACKENDS),
    *((case, "reference") for case in REFERENCE_CASES),
    *((case, backend) for case in PRODUCT_CASES for backend in ("reference", "triton")),
]
PAIRS += [(case, backend) for case in CASES for backend in (*INTERPRETED, *EMULATED)]


def pairs(chosen: Callable[[Case], Any] = lambda case: True, *, interpreted: bool = False) -> pytest.MarkDecorator:
    """Parametrises over the cases that are chosen, on every backend."""
    return parametrize([(case, backend) for case, backend in PAIRS if chosen(case)], interpreted=interpreted)


EVERY = pairs()
EVERY_QUICKLY = pairs(interpreted=True)
MASKABLE = pairs(lambda case: case.token_inputs)
DIFFERENTIABLE = pairs(lambda case: case.gradient_of)
ON_NATIVE = pytest.mark.parametrize("backend", NATIVE)
# Of the others nothing may be garbage.
SILENT = pairs(lambda case: case.token_inputs or case.row_inputs, interpreted=True)
LAYOUTS = (Shape(), Shape(padded=True, seed=1), Shape(lengths=(1100, 2300, 17), seed=2))


def same_bits(a: Outputs, b: Outputs) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0, equal_nan=False, msg=lambda m, n=name: f"{n}: {m}")


def identical(a: Tensor, b: Tensor) -> bool:
    """Equal, a NaN to a NaN too: a missing log-prob is one."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def same(backend: str, a: Outputs, b: Outputs) -> None:
    """To the bit where there are kernels; the reference may sum in another order."""
    if backend != "reference":
        return same_bits(a, b)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    return None


def close_to_oracle(case: Case, inputs: Inputs, outputs: Outputs) -> None:
    """To the float64 reference."""
    close_to(case, inputs, outputs, oracle_of(case, inputs))


def close_to(case: Case, inputs: Inputs, outputs: Outputs, oracle: Outputs) -> None:
    """Relative to each value of the oracle, and to the terms of a sum."""
    tolerance = case.tolerance
    assert outputs.keys() == oracle.keys()
    for name, exact in oracle.items():
        allowance = tolerance / 10 * (float(exact.abs().max()) if exact.numel() else 0.0) + 1e-30
        if name == "loss" and case.magnitude is not None:
            allowance = tolerance * case.magnitude(inputs) + 1e-30
        if name == "policy_loss" and case.magnitude is not None:
            allowance = 10 * tolerance * case.magnitude(inputs)
        if name in ("approx_kl", "kl", "is_weight_mean"):  # means of both signs of numbers around 1
            allowance = tolerance
        torch.testing.assert_close(
            outputs[name].double(), exact.double(), rtol=tolerance, atol=allowance, msg=lambda m, n=name: f"{n}: {m}"
        )


def oracle_of(case: Case, inputs: Inputs) -> Outputs:
    return case.run("reference", {name: float64(value) for name, value in inputs.items()})


shapes = st.builds(
    Shape,
    lengths=st.lists(st.integers(0, 70), max_size=9).map(tuple),
    padded=st.booleans(),
    seed=st.integers(0, 2**32),
    density=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    groups=st.integers(1, 4),
)


@EVERY
@hypothesis.given(shape=shapes)
def test_equals_the_float64_reference(case: Case, backend: str, shape: Shape) -> None:
    hypothesis.assume(shape.padded or len(shape.lengths) != sum(shape.lengths) or set(shape.lengths) <= {1})
    inputs = case.make(shape.draw())
    close_to_oracle(case, inputs, case.run(backend, inputs))


# ---- 1. a masked value never enters arithmetic -----------------------------------------------------------------------


@SILENT
@pytest.mark.parametrize("shape", LAYOUTS[:2], ids=("packed", "padded"))
def test_masked_values_never_enter_arithmetic(case: Case, backend: str, shape: Shape) -> None:
    inputs = case.make(shape.draw())
    clean = case.run(backend, inputs)
    for garbage in GARBAGE:
        dirty = dict(inputs)
        for name in case.token_inputs:
            dirty[name] = where_masked(case.counts(inputs, name), inputs[name], garbage)
        for name in case.row_inputs:
            assert case.silent is not None
            dirty[name] = torch.where(case.silent(inputs), garbage, inputs[name])
        for name in (*case.token_inputs, *case.row_inputs):
            assert not torch.equal(dirty[name], inputs[name]), f"nothing of {name} was garbage"
        same_bits(case.run(backend, dirty), clean)


@MASKABLE
def test_a_value_that_counts_stays_visible_if_it_is_nan(case: Case, backend: str) -> None:
    inputs = case.make(Shape(density=1.0).draw())
    for name in case.token_inputs:
        if name in ("rollout_log_probs", "rollout_head_log_probs") or "loss" not in case.run(backend, inputs):
            continue  # a NaN there has a meaning: missing
        counts = case.counts(inputs, name)
        if "is_weights" in case.token_inputs:
            counts = counts & (inputs["is_weights"] != 0)
        dirty = inputs[name].clone()
        dirty[counts.nonzero()[3].unbind()] = torch.nan
        run = case.run(backend, {**inputs, name: dirty})
        only_reported = name == "old_log_probs" and "reinforce" in case.name and "rollout" not in str(case.token_inputs)
        assert run["approx_kl" if only_reported else "loss"].isnan().any(), name


# ---- 2. degenerate batches give zeros with a graph -------------------------------------------------------------------

DEGENERATE = {
    "no rollouts": Shape(lengths=()),
    "no rollouts, padded": Shape(lengths=(), padded=True),
    "no tokens": Shape(lengths=(0, 0, 0)),
    "no tokens, padded": Shape(lengths=(0, 0), padded=True),
    "all masked": Shape(density=0.0),
    "one token": Shape(lengths=(1,)),
    "only singletons": Shape(groups=10**6, seed=3),
}


@EVERY
@pytest.mark.parametrize("kind", DEGENERATE)
def test_degenerate_batches_are_finite(case: Case, backend: str, kind: str) -> None:
    inputs = case.make(DEGENERATE[kind].draw())
    outputs = case.run(backend, inputs)
    for name, value in outputs.items():
        assert value.isfinite().all(), name
    if kind == "all masked" and case.gradient_of:
        assert outputs["loss"].abs().sum() == 0
        assert outputs["gradient"].abs().sum() == 0


# ---- 3. outputs are fully written, inputs never ----------------------------------------------------------------------


@EVERY_QUICKLY
@pytest.mark.parametrize("shape", LAYOUTS[:2], ids=("packed", "padded"))
@pytest.mark.usefixtures("poisoned_memory")
def test_outputs_are_written_and_inputs_are_not(case: Case, backend: str, shape: Shape) -> None:
    inputs = case.make(shape.draw())
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    outputs = case.run(backend, inputs)
    close_to_oracle(case, inputs, outputs)
    for name, value in before.items():
        assert identical(inputs[name], value), name


@EVERY
@pytest.mark.usefixtures("poisoned_memory")
def test_outputs_of_many_blocks_are_written(case: Case, backend: str) -> None:
    inputs = case.make(LAYOUTS[2].draw())
    close_to_oracle(case, inputs, case.run(backend, inputs))


# ---- 4. any strides --------------------------------------------------------------------------------------------------


def layouts_of(t: Tensor) -> dict[str, Tensor]:
    """The same values in memory laid out otherwise."""
    spread = t.new_zeros((*t.shape[:-1], 2 * t.shape[-1] + 1))
    spread[..., 1::2] = t
    out = {"every other": spread[..., 1::2]}
    if t.dim() == 2:
        out["transposed"] = t.t().contiguous().t()
        wide = t.new_zeros((t.shape[0], t.shape[1] + 5))
        wide[:, 2:-3] = t
        out["rows of a wider tensor"] = wide[:, 2:-3]
    return out


@EVERY
@pytest.mark.parametrize("shape", LAYOUTS[:2], ids=("packed", "padded"))
def test_strides_do_not_matter(case: Case, backend: str, shape: Shape) -> None:
    inputs = case.make(shape.draw())
    plain = case.run(backend, inputs)
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            continue
        for kind, laid_out in layouts_of(value).items():
            assert identical(laid_out, value), kind
            same(backend, case.run(backend, {**inputs, name: laid_out}), plain)


@MASKABLE
@pytest.mark.parametrize("shape", LAYOUTS[:2], ids=("packed", "padded"))
def test_expanded_inputs(case: Case, backend: str, shape: Shape) -> None:
    inputs = case.make(shape.draw())
    for name in case.token_inputs:
        one = inputs[name].new_tensor(0.5 if name == "is_weights" else -0.5).expand(inputs[name].shape)
        plain = case.run(backend, {**inputs, name: one.contiguous()})
        same(backend, case.run(backend, {**inputs, name: one}), plain)


@DIFFERENTIABLE
def test_expanded_and_strided_upstream_gradients(case: Case, backend: str) -> None:
    inputs = case.make(Shape(padded=True).draw())

    def gradient(upstream: Tensor) -> Tensor:
        leaf = case.leaf(inputs)
        case.call(backend, **case.with_leaf(inputs, leaf))["loss"].backward(upstream)
        return leaf.grad

    shape = case.run(backend, inputs)["loss"].shape
    two = inputs[case.gradient_of].new_tensor(2.0).expand(shape)
    assert torch.equal(gradient(two), gradient(two.contiguous()))
    if shape:
        upstream = torch.randn(shape, device=two.device)
        for laid_out in layouts_of(upstream).values():
            assert torch.equal(gradient(laid_out), gradient(upstream))


# ---- 5. 64-bit addressing --------------------------------------------------------------------------------------------

THREE_ROWS = Shape(lengths=(5, 5, 5), padded=True)


def padded_inputs(case: Case) -> list[str]:
    """Inputs that have rows of tokens."""
    inputs = case.make(THREE_ROWS.draw())
    return [name for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() == 2]


@pytest.mark.parametrize("case", [c for c in WITH_CPU_KERNELS if padded_inputs(c)], ids=lambda case: case.name)
@ON_NATIVE
def test_rows_far_apart(case: Case, backend: str) -> None:
    """Rows 2^30 elements apart: the third begins beyond what 32 bits of bytes, or of elements doubled, can reach."""
    inputs = case.make(THREE_ROWS.draw())
    plain = case.run(backend, inputs)
    for name in padded_inputs(case):
        value = inputs[name]
        # Only the pages that are written become memory.
        far = torch.empty(2 * 2**30 + 8, dtype=value.dtype).as_strided(value.shape, (2**30, 1)).copy_(value)
        same_bits(case.run(backend, {**inputs, name: far}), plain)


# ---- 6. accumulation in float32 or better ----------------------------------------------------------------------------


def float_inputs(case: Case) -> list[str]:
    """Inputs that may come in low precision; a segment table is made by an op and is float32."""
    inputs = case.make(Shape().draw())
    floats = [name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()]
    return [name for name in floats if name != "values"]


@pairs(float_inputs)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_inputs(case: Case, backend: str, dtype: torch.dtype) -> None:
    inputs = case.make(LAYOUTS[2].draw())
    low = {**inputs, **{name: inputs[name].to(dtype) for name in float_inputs(case)}}
    if case.settle is not None:
        low = case.settle(low)
    outputs = case.run(backend, low)
    for name, value in outputs.items():
        if not name.startswith("gradient"):
            assert value.dtype not in (torch.bfloat16, torch.float16), name
            continue
        exact = oracle_of(case, low)[name]  # gradients come in the inputs' dtype: rounded once
        assert value.dtype == dtype
        assert_rounded_once(value, exact)
        outputs[name] = exact
    close_to_oracle(case, low, outputs)


def assert_rounded_once(low: Tensor, exact: Tensor) -> None:
    """Within half a unit in the last place of the low precision, and a little for float32 arithmetic before it."""
    eps, most = torch.finfo(low.dtype).eps, torch.finfo(low.dtype).max
    bound = exact.abs() * (eps / 2 + 4e-6) + torch.finfo(low.dtype).smallest_normal * eps
    overflowed = low.isinf() & (exact.abs() > most) & (low.sign() == exact.sign())
    assert bool((overflowed | ((low.double() - exact).abs() <= bound)).all())


# ---- 7. the same bits for any thread count ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", WITH_CPU_KERNELS, ids=lambda case: case.name)
@ON_NATIVE
@pytest.mark.parametrize("padded", [False, True], ids=("packed", "padded"))
def test_thread_count_does_not_change_a_bit(case: Case, backend: str, padded: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(native, "TOKENS_FOR_THREADS", 1)
    inputs = case.make(Shape(lengths=(30_000, 1, 45_123, 0, 20_000), padded=padded).draw())
    torch.set_num_threads(1)
    one = case.run(backend, inputs)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        same_bits(case.run(backend, inputs), one)


# ---- 8. gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [c for c in (*CASES, *REFERENCE_CASES) if c.gradient_of and not c.stops_gradient],
    ids=lambda case: case.name,
)
def test_gradcheck_of_the_reference(case: Case) -> None:
    inputs = {k: float64(v) for k, v in case.make(Shape(lengths=(6, 0, 9)).draw()).items()}

    def loss(leaf: Tensor) -> Tensor:
        return case.call("reference", **case.with_leaf(inputs, leaf))["loss"]

    assert torch.autograd.gradcheck(loss, case.leaf(inputs), eps=1e-7, atol=1e-6)


@DIFFERENTIABLE
def test_backward_twice_and_scaled(case: Case, backend: str) -> None:
    inputs = case.make(Shape().draw())
    leaf = case.leaf(inputs)
    loss = case.call(backend, **case.with_leaf(inputs, leaf))["loss"].sum()
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    kept = first.clone()
    first.fill_(torch.nan)  # the first gradient belongs to the caller
    (second,) = torch.autograd.grad(3 * loss, leaf)
    torch.testing.assert_close(second, 3 * kept, rtol=1e-6, atol=1e-6 * float(kept.abs().max()))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaf)


@DIFFERENTIABLE
def test_the_loss_may_be_edited_in_place(case: Case, backend: str) -> None:
    inputs = case.make(Shape().draw())
    leaf = case.leaf(inputs)
    loss = case.call(backend, **case.with_leaf(inputs, leaf))["loss"]
    loss -= 0.5 * leaf.sum()
    loss.sum().backward()
    count = 1 if loss.dim() == 0 else loss.numel()
    torch.testing.assert_close(leaf.grad, case.run(backend, inputs)["gradient"] - 0.5 * count, rtol=1e-6, atol=1e-6)


@DIFFERENTIABLE
def test_without_grad_there_is_none(case: Case, backend: str) -> None:
    inputs = case.make(Shape().draw())
    leaf = inputs[case.gradient_of].requires_grad_()
    assert case.call(backend, **inputs)["loss"].requires_grad
    with torch.no_grad():
        outputs = case.call(backend, **inputs)
    assert not any(value.requires_grad for value in outputs.values())
    plain = case.run(backend, {**inputs, case.gradient_of: leaf.detach()})
    same_bits(outputs, {name: plain[name] for name in outputs})


# ---- the backend that ran --------------------------------------------------------------------------------------------


@EVERY
def test_the_backend_that_was_asked_for_runs(case: Case, backend: str) -> None:
    case.run(backend, case.make(Shape().draw()))
    assert fa.last_backend() == backend
