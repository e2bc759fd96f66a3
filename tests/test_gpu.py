"""Every op on a CUDA device: `make gpu`. The interpreter proves the same kernels without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from op_cases import GARBAGE, INTERPRETED_CASES, Case, Inputs, Outputs, Shape, where_masked
from test_contracts import close_to_oracle, same_bits
from torch import Tensor

import fastadv as fa
from fastadv import dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
SHAPES = (Shape(), Shape(padded=True, seed=1), Shape(lengths=(1100, 2300, 17, 0, 9000), seed=2))
EVERY = pytest.mark.parametrize("case", INTERPRETED_CASES, ids=lambda case: case.name)


def on_device(value: Any, device: str) -> Any:
    """Tensors, and the index objects that hold some, on a device."""
    if isinstance(value, fa.SegmentTable):
        return fa.SegmentTable(value.values.to(device), on_device(value.segments, device))
    if isinstance(value, fa.Segments):
        moved = {name: on_device(getattr(value, name), device) for name in ("turn_ids", "cu_seqlens", "offsets")}
        return replace(value, **moved)
    if isinstance(value, (Tensor, fa.GroupIndex)):
        return value.to(device)
    return value


def moved(values: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: on_device(value, device) for name, value in values.items()}


def run(case: Case, inputs: Inputs) -> Outputs:
    outputs = case.run("triton", moved(inputs, "cuda"))
    assert fa.last_backend() == "triton"
    assert all(value.device.type == "cuda" for value in outputs.values())
    return moved(outputs, "cpu")


@EVERY
@pytest.mark.parametrize("shape", SHAPES, ids=("packed", "padded", "long"))
def test_equals_the_float64_reference(case: Case, shape: Shape) -> None:
    inputs = case.make(shape.draw())
    close_to_oracle(case, inputs, run(case, inputs))


@EVERY
def test_auto_takes_the_kernels(case: Case) -> None:
    case.run("auto", moved(case.make(Shape().draw()), "cuda"))
    assert fa.last_backend() == "triton"


@EVERY
def test_masked_values_never_enter_arithmetic(case: Case) -> None:
    inputs = case.make(SHAPES[1].draw())
    clean = run(case, inputs)
    for garbage in GARBAGE:
        dirty = {n: where_masked(case.counts(inputs, n), inputs[n], garbage) for n in case.token_inputs}
        same_bits(run(case, {**inputs, **dirty}), clean)


@EVERY
def test_every_run_gives_the_same_bits(case: Case) -> None:
    inputs = case.make(SHAPES[2].draw())
    first = run(case, inputs)
    for _ in range(5):
        same_bits(run(case, inputs), first)


# Of an index object the size is read, once per batch.
@pytest.mark.parametrize("case", [c for c in INTERPRETED_CASES if c.name != "segments"], ids=lambda case: case.name)
def test_the_host_never_waits(case: Case) -> None:
    inputs = moved(case.make(SHAPES[2].draw()), "cuda")
    inputs = {n: fa.group_index(v) if n == "group_ids" else v for n, v in inputs.items()}
    if "turn_advantages" in case.name:
        inputs["turn_ids"] = fa.segments(inputs["turn_ids"], inputs.pop("cu_seqlens"))
    case.run("triton", inputs)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run("triton", inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@EVERY
@pytest.mark.parametrize("kind", [Shape(lengths=()), Shape(lengths=(0, 0)), Shape(density=0.0), Shape(lengths=(1,))])
def test_degenerate_batches_are_finite(case: Case, kind: Shape) -> None:
    assert all(value.isfinite().all() for value in run(case, case.make(kind.draw())).values())


def test_a_cpu_tensor_is_refused() -> None:
    if dispatch.interpreting():
        pytest.skip("Triton's interpreter takes CPU tensors")
    with pytest.raises(fa.BackendUnavailableError, match="it takes CUDA tensors, not cpu"):
        fa.token_counts(torch.ones(3), backend="triton")
