"""The contracts of tests/test_contracts.py on another device. `make gpu` runs them on a card (tests/test_gpu.py);
tests/test_device_contracts.py runs each once without, so that they are known to run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import test_contracts as contracts
import test_contracts_torch as torch_contracts
import test_large
import torch
from op_cases import Case, Inputs, Outputs, Shape
from torch import Tensor

import fastadv as fa

BACKENDS = ("cuda", "triton")  # in the order in which "auto" takes them
NO_CODE = ("cudaErrorNoKernelImageForDevice", "cudaErrorUnsupportedPtxVersion")
SHAPES = (Shape(), Shape(padded=True, seed=1), Shape(lengths=(1100, 2300, 17, 0, 9000), seed=2))


@functools.cache
def why_not(backend: str, device: str) -> str | None:
    """Why a backend cannot run on a device: it was not built, or not for this card. None: it can."""
    reason = fa.backends()[backend]
    if reason != "available":
        return reason
    try:
        fa.token_counts(torch.ones(1, device=device), backend=backend)
    except RuntimeError as error:
        if not any(name in str(error) for name in NO_CODE):
            raise
        return f"the extension has no code for this card ({error}); FASTADV_CUDA_ARCHS names what is built"
    return None


def skip_unless(backend: str, device: str) -> None:
    """Skips a test of a backend that cannot run on a device."""
    if reason := why_not(backend, device):
        pytest.skip(f"{backend}: {reason}")


# ---- cases on a device -----------------------------------------------------------------------------------------------


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


def case_on(case: Case, device: str) -> Case:
    """The case with its inputs on a device."""

    def make(draw: Any) -> Inputs:
        return {name: on_device(value, device) for name, value in case.make(draw).items()}

    return replace(case, make=make)


def device_of(values: dict[str, Any]) -> str:
    return next(value.device.type for value in values.values() if isinstance(value, Tensor))


# ---- what test_contracts.py has not ----------------------------------------------------------------------------------


def equals_float64(case: Case, backend: str, shape: Shape) -> None:
    inputs = case.make(shape.draw())
    outputs = case.run(backend, inputs)
    assert fa.last_backend() == backend
    assert all(value.device.type == device_of(inputs) for value in outputs.values())
    contracts.close_to_oracle(case, inputs, outputs)


def agrees_with_triton(case: Case, backend: str, shape: Shape) -> None:
    """What one rounds away, the other may keep: as far apart as each may be from float64."""
    inputs = case.make(shape.draw())
    skip_unless("triton", device_of(inputs))
    contracts.close_to(case, inputs, case.run(backend, inputs), case.run("triton", inputs))


def equal_bits(case: Case, backend: str, shape: Shape) -> None:
    inputs = case.make(shape.draw())
    first = case.run(backend, inputs)
    for _ in range(3):
        contracts.same_bits(case.run(backend, inputs), first)


@contextlib.contextmanager
def refusing_waits(device: str) -> Iterator[None]:
    """Whatever waits for the card raises."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def never_waits(case: Case, backend: str) -> None:
    inputs = torch_contracts.with_index_objects(case)
    first = case.run(backend, inputs)  # compiles
    with refusing_waits(device_of(first)):
        second = case.run(backend, inputs)
    contracts.same_bits(second, first)


def replayed(call: Callable[[], Outputs], device: str) -> Outputs:
    """What a CUDA graph of a call leaves when it is replayed; on another device, what the call leaves."""
    if device != "cuda":
        return call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles, and lets autograd set itself up
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    for value in outputs.values():
        value.fill_(77)  # nothing ran yet
    graph.replay()
    torch.cuda.synchronize()
    return outputs


def replays_from_a_graph(case: Case, backend: str) -> None:
    inputs = torch_contracts.with_index_objects(case)
    plain = case.run(backend, inputs)
    contracts.same_bits(replayed(lambda: case.run(backend, inputs), device_of(plain)), plain)


def opcheck(case: Case, backend: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        torch_contracts.test_opcheck(case, backend, patch)


# ---- all of them -----------------------------------------------------------------------------------------------------


def anything(case: Case) -> bool:
    return True


def in_graph(case: Case) -> bool:
    """Of an index object the size is read, once per batch, outside of graphs."""
    return case.name != "segments"


@dataclass(frozen=True)
class Contract:
    """A check of a case on a backend, for each of its further arguments."""

    check: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    applies: Callable[[Case], Any] = anything
    poisoned: bool = False  # memory that is allocated and not written holds NaN
    backends: tuple[str, ...] = BACKENDS

    def run(self, case: Case, backend: str, *, whole: bool = True) -> None:
        """Checks; with the first argument alone if not whole."""
        if not self.arguments:
            self.check(case, backend)
        for argument in self.arguments if whole else self.arguments[:1]:
            self.check(case, backend, argument)


LAYOUTS = contracts.LAYOUTS[:2]
CONTRACTS = {
    "float64": Contract(equals_float64, SHAPES),
    "agreement": Contract(agrees_with_triton, SHAPES, backends=("cuda",)),
    "garbage": Contract(
        contracts.test_masked_values_never_enter_arithmetic, LAYOUTS, lambda c: c.token_inputs or c.row_inputs
    ),
    "degenerate": Contract(contracts.test_degenerate_batches_are_finite, tuple(contracts.DEGENERATE)),
    "written": Contract(contracts.test_outputs_are_written_and_inputs_are_not, LAYOUTS, poisoned=True),
    "written, many blocks": Contract(contracts.test_outputs_of_many_blocks_are_written, poisoned=True),
    "strides": Contract(contracts.test_strides_do_not_matter, LAYOUTS),
    "expanded": Contract(contracts.test_expanded_inputs, LAYOUTS, lambda c: c.token_inputs),
    "upstream": Contract(
        contracts.test_expanded_and_strided_upstream_gradients, applies=lambda c: c.gradient_of is not None
    ),
    "low precision": Contract(
        contracts.test_low_precision_inputs, (torch.bfloat16, torch.float16), contracts.float_inputs
    ),
    "backward twice": Contract(contracts.test_backward_twice_and_scaled, applies=lambda c: c.gradient_of),
    "equal bits": Contract(equal_bits, SHAPES),
    "no wait": Contract(never_waits, applies=in_graph),
    "graph": Contract(replays_from_a_graph, applies=in_graph),
    "compile": Contract(torch_contracts.test_compiles_without_a_graph_break, applies=in_graph),
    "opcheck": Contract(opcheck, applies=in_graph),
}

# Over 2^31 tokens, and over 2^31 numbers of hidden states.
LARGE = (
    test_large.test_policy_loss,
    test_large.test_turn_ids_and_counts,
    test_large.test_segment_tokens,
    test_large.test_linear_log_probs,
    test_large.test_gradient_projections,
)


def run_large(check: Callable[[str], None], backend: str, device: str, tokens: int) -> None:
    """A test of tests/test_large.py whose tensors are made on a device."""
    with pytest.MonkeyPatch.context() as patch, torch.device(device):
        patch.setattr(test_large, "TOKENS", tokens)
        patch.setattr(test_large, "CU", torch.tensor([0, tokens // 2, tokens - test_large.LAST, tokens]))
        check(backend)
