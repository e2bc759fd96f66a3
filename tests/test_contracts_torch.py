"""Contracts 9 and 10: nothing waits for a GPU, and torch.compile and torch.library take every op."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from op_cases import BACKENDS, CASES, CPU_CASES, EMULATED, INTERPRETED, NATIVE, Case, Shape, parametrize
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import fastadv as fa
from fastadv import native

# Index objects are built once per batch, outside of graphs: they need the number of segments on the host.
IN_GRAPH = [case for case in (*CASES, *CPU_CASES) if case.name != "segments"]
EVERY = pytest.mark.parametrize("case", IN_GRAPH, ids=lambda case: case.name)
ON = pytest.mark.parametrize("backend", BACKENDS)


def in_graph(*backends: str) -> pytest.MarkDecorator:
    """Parametrises over the cases that a graph may hold, on these backends and on those that run without a GPU."""
    pairs = [(case, backend) for case in IN_GRAPH for backend in backends]
    pairs += [(case, backend) for case in CASES if case in IN_GRAPH for backend in (*INTERPRETED, *EMULATED)]
    return parametrize(pairs, interpreted=True)


def with_index_objects(case: Case) -> dict[str, Any]:
    """Inputs with the batch's index objects in place of labels and turn ids."""
    inputs = case.make(Shape().draw())
    if "group_ids" in inputs:
        inputs["group_ids"] = fa.group_index(inputs["group_ids"])
    if "turn_ids" in inputs:
        inputs["turn_ids"] = fa.segments(inputs["turn_ids"], inputs.pop("cu_seqlens"))
    if "hidden" in inputs:
        inputs["mask"] = fa.token_index(inputs["mask"])
    return inputs


def without_values(value: Any, mode: FakeTensorMode) -> Any:
    """A tensor that has a shape and no values, like one whose kernel has not run yet, whatever holds it."""
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if isinstance(value, (fa.SegmentTable, fa.Segments, fa.GroupIndex, fa.TokenIndex)):
        return type(value)(**{name: without_values(part, mode) for name, part in vars(value).items()})
    return value


@EVERY
def test_nothing_waits_for_values(case: Case) -> None:
    """Whatever would bring a value to the host, and so wait for a GPU, raises on fake tensors. They lie on the CPU
    here: a torch without CUDA has no index kernels for fake CUDA tensors."""
    mode = FakeTensorMode()
    inputs = {name: without_values(value, mode) for name, value in with_index_objects(case).items()}
    with mode:
        case.call("reference", **inputs)
        if case.gradient_of:
            leaf = inputs[case.gradient_of].requires_grad_()
            case.call("reference", **case.with_leaf(inputs, leaf))["loss"].sum().backward()
            assert leaf.grad is not None


def test_a_wait_would_be_noticed() -> None:
    mode = FakeTensorMode()
    with mode, pytest.raises(DataDependentOutputException):
        bool((mode.from_tensor(torch.ones(3)) > 0).any())


@in_graph(*BACKENDS)
def test_compiles_without_a_graph_break(case: Case, backend: str) -> None:
    torch._dynamo.reset()
    inputs = with_index_objects(case)
    plain = case.run(backend, inputs)
    compiled = torch.compile(lambda **given: case.call(backend, **given), fullgraph=True, backend="aot_eager")
    leaf = case.leaf(inputs) if case.gradient_of else None
    outputs = compiled(**(inputs if leaf is None else case.with_leaf(inputs, leaf)))
    for name, value in outputs.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-6, atol=1e-6)
    if leaf is not None:
        (2 * outputs["loss"]).sum().backward()
        torch.testing.assert_close(leaf.grad, 2 * plain["gradient"], rtol=1e-6, atol=1e-7)


@in_graph(*NATIVE)
def test_opcheck(case: Case, backend: str, monkeypatch: Any) -> None:
    """torch's own checks of every registered op that the case launches, on the arguments of the case."""
    seen = []
    launch = torch.library.CustomOpDef.__call__

    def record(op: Any, *args: Any) -> Any:
        seen.append((op, args))
        return launch(op, *args)

    monkeypatch.setattr(torch.library.CustomOpDef, "__call__", record)
    monkeypatch.setattr("fastadv.ops._register.needs_dispatcher", lambda args: True)
    inputs = with_index_objects(case)
    if case.gradient_of:
        inputs[case.gradient_of] = inputs[case.gradient_of].requires_grad_()
        monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)  # the compiled way registers autograd
    case.call(backend, **inputs)
    monkeypatch.undo()
    assert seen, "the case launches no registered op"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for op, args in seen:
            torch.library.opcheck(op, args)


# ---- tensors that are not what they seem -----------------------------------------------------------------------------


def wrapped(value: Any) -> Any:
    """A tensor of a class that has no memory of its own, whatever holds it."""
    if isinstance(value, fa.SegmentTable):
        return fa.SegmentTable(wrapped(value.values), value.segments)
    return TwoTensor(value, value.clone()) if isinstance(value, Tensor) else value


def unwrapped(value: Tensor) -> Tensor:
    if not isinstance(value, TwoTensor):
        return value
    assert torch.equal(value.a, value.b)
    return value.a


ALL = pytest.mark.parametrize("case", [*CASES, *CPU_CASES], ids=lambda case: case.name)


@ALL
@ON
def test_tensor_subclasses(case: Case, backend: str) -> None:
    """Each argument in turn is a subclass, which the registered ops hand over to the class; then all of them."""
    inputs = case.make(Shape().draw())
    plain = case.run(backend, inputs)
    tensors = [name for name, value in inputs.items() if isinstance(value, (Tensor, fa.SegmentTable))]
    for names in (*([name] for name in tensors), tensors):
        outputs = case.run(backend, {**inputs, **{name: wrapped(inputs[name]) for name in names}})
        assert outputs.keys() == plain.keys()
        for name, value in outputs.items():
            assert torch.equal(unwrapped(value), plain[name]), (names, name)


class Named(Tensor):
    """A subclass that changes what functions do, and whose memory is a tensor's."""


@ALL
@pytest.mark.parametrize("backend", NATIVE)
def test_subclasses_with_memory(case: Case, backend: str) -> None:
    inputs = case.make(Shape().draw())
    plain = case.run(backend, inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            outputs = case.run(backend, {**inputs, name: value.as_subclass(Named)})
            for output, exact in plain.items():
                assert torch.equal(outputs[output].as_subclass(Tensor), exact), (name, output)


def test_kernels_read_memory_only() -> None:
    """The last line of defence: an address is one that may be read, and nothing else stands for absence."""
    values = torch.ones(4)
    assert native.address(None) == 0
    assert native.view(None) is None
    assert native.view(torch.empty(0)) is not None
    for take in (native.address, native.view):
        with pytest.raises(TypeError, match="a kernel cannot read a TwoTensor; pass a plain tensor"):
            take(TwoTensor(values, values))
        with FakeTensorMode() as mode, pytest.raises(TypeError, match="cannot read a FakeTensor"):
            take(mode.from_tensor(values))
        with pytest.raises(TypeError, match="without memory"):
            take(torch.ones(4, device="meta"))
        with pytest.raises(ValueError, match=r"pass t.resolve_neg\(\)"):
            take(torch._neg_view(values))
    with pytest.raises(ValueError, match=r"pass t.contiguous\(\)"):
        native.address(values[::2])


@pytest.mark.parametrize("backend", NATIVE)
def test_a_tensor_that_no_kernel_reads_is_refused_by_the_ops_name(backend: str) -> None:
    log_probs = torch._neg_view(torch.ones(4))
    with pytest.raises(ValueError, match=r"^policy_loss: a kernel cannot .* pass t.resolve_neg\(\)"):
        fa.policy_loss(log_probs, log_probs, torch.ones(4), torch.ones(4), backend=backend)


@ON
def test_tensors_without_strides_are_refused(backend: str) -> None:
    with pytest.raises(TypeError, match=r"mask has layout torch.sparse_coo; pass a dense tensor"):
        fa.token_counts(torch.ones(3).to_sparse(), backend=backend)


DIFFERENTIABLE = pytest.mark.parametrize("case", [c for c in CASES if c.gradient_of], ids=lambda case: case.name)


@DIFFERENTIABLE
def test_transforms_run_on_the_reference_and_are_refused_by_kernels(case: Case) -> None:
    inputs = case.make(Shape().draw())
    leaf = inputs[case.gradient_of]

    def loss(backend: str, leaf: Tensor) -> Tensor:
        return case.call(backend, **case.with_leaf(inputs, leaf))["loss"].sum()

    plain = case.run("reference", inputs)["gradient"]
    for backend in ("reference", "auto"):
        assert torch.equal(torch.func.grad(lambda x, b=backend: loss(b, x))(leaf), plain)
        assert fa.last_backend() == "reference"
    for backend in NATIVE:
        with pytest.raises(fa.BackendUnavailableError, match=r"torch.func's transforms.*use backend='reference'"):
            torch.func.grad(lambda x, b=backend: loss(b, x))(leaf)


def test_vmap_runs_on_the_reference() -> None:
    rewards, ids = torch.rand(5, 4), [0, 0, 1, 1]
    many = torch.vmap(lambda r: fa.group_advantages(r, ids, scale="std"))(rewards)
    one_by_one = [fa.group_advantages(r, ids, scale="std", backend="reference") for r in rewards]
    assert torch.equal(many, torch.stack(one_by_one))


@DIFFERENTIABLE
@pytest.mark.parametrize("backend", NATIVE)
def test_second_derivatives_of_registered_ops_are_refused(case: Case, backend: str, monkeypatch: Any) -> None:
    """Their gradient is a kernel's: it has no graph, and says so instead of ending one."""
    inputs = with_index_objects(case)
    leaf = inputs[case.gradient_of].requires_grad_()
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)  # the registered way
    value = case.call(backend, **inputs)["loss"].sum()
    monkeypatch.undo()
    (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
    torch.testing.assert_close(gradient, case.run(backend, inputs)["gradient"], rtol=1e-6, atol=1e-7)
    with pytest.raises(RuntimeError, match="cannot be differentiated again; use backend='reference'"):
        gradient.sum().backward()


def test_a_denominator_that_changes_is_compiled_for_once_more_at_most() -> None:
    """A trainer's token count differs every step; a graph that looked at it would be compiled every step."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    log_probs = -torch.rand(64)

    def loss(leaf: Tensor, denominator: float) -> Tensor:
        return fa.policy_loss(leaf, log_probs, log_probs, torch.ones(64), denominator=denominator).loss

    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    for step in range(10):
        torch.testing.assert_close(compiled(1.1 * log_probs, 1.5 + step), loss(1.1 * log_probs, 1.5 + step))
    assert counters["stats"]["unique_graphs"] <= 2
