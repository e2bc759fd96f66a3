"""Contracts 9 and 10: nothing waits for a GPU, and torch.compile and torch.library take every op."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from op_cases import BACKENDS, CASES, NATIVE, Case, Shape
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import fastadv as fa

# Index objects are built once per batch, outside of graphs: they need the number of segments on the host.
IN_GRAPH = [case for case in CASES if case.name != "segments"]
EVERY = pytest.mark.parametrize("case", IN_GRAPH, ids=lambda case: case.name)
ON = pytest.mark.parametrize("backend", BACKENDS)


def with_index_objects(case: Case) -> dict[str, Any]:
    """Inputs with the batch's index objects in place of labels and turn ids."""
    inputs = case.make(Shape().draw())
    if "group_ids" in inputs:
        inputs["group_ids"] = fa.group_index(inputs["group_ids"])
    if "turn_ids" in inputs:
        inputs["turn_ids"] = fa.segments(inputs["turn_ids"], inputs.pop("cu_seqlens"))
    return inputs


def without_values(value: Any, mode: FakeTensorMode) -> Any:
    """A tensor that has a shape and no values, like one whose kernel has not run yet, whatever holds it."""
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if isinstance(value, (fa.SegmentTable, fa.Segments, fa.GroupIndex)):
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


@EVERY
@ON
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


@EVERY
@pytest.mark.parametrize("backend", NATIVE)
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
