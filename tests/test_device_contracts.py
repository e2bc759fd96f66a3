"""What `make gpu` runs on a card, run once on the CPU: each contract on one kernel of each backend, in Triton's
interpreter and in the emulation of CUDA."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cuda_kernels
import pytest
import test_large
import torch
from cuda_emulation import build
from device_contracts import (
    CONTRACTS,
    LARGE,
    agrees_with_triton,
    case_on,
    equal_bits,
    refusing_waits,
    replayed,
    run_large,
    why_not,
)
from op_cases import CASES, NEEDS_EMULATION, Case, Outputs, Shape

import fastadv as fa
from bench import cuda_code
from fastadv import cuda

(PPO,) = [case for case in CASES if case.name == "policy_loss[ppo]"]


CHECKS = [
    pytest.param(name, backend, id=f"{backend}: {name}", marks=[NEEDS_EMULATION] if backend == "cuda" else [])
    for name, contract in CONTRACTS.items()
    for backend in contract.backends
]


@pytest.mark.parametrize(("name", "backend"), CHECKS)
def test_a_contract_holds_without_a_card(name: str, backend: str, request: pytest.FixtureRequest) -> None:
    contract = CONTRACTS[name]
    assert contract.applies(PPO)
    if contract.poisoned:
        request.getfixturevalue("poisoned_memory")
    contract.run(case_on(PPO, "cpu"), backend, whole=False)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=NEEDS_EMULATION)])
@pytest.mark.parametrize("check", LARGE, ids=lambda check: check.__name__)
def test_the_large_ones_in_small(check: Callable[[str], None], backend: str) -> None:
    run_large(check, backend, "cpu", 3 * test_large.LAST)
    assert test_large.TOKENS > 2**31


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inputs_move_whole(case: Case) -> None:
    """No tensor of a case stays behind when its inputs go to another device."""

    def devices(value: object) -> set[str]:
        if isinstance(value, torch.Tensor):
            return {value.device.type}
        parts = vars(value).values() if isinstance(value, (fa.SegmentTable, fa.Segments, fa.GroupIndex)) else ()
        return set().union(*map(devices, parts))

    inputs = case_on(case, "meta").make(Shape().draw())
    assert set().union(*map(devices, inputs.values())) == {"meta"}


def test_runs_that_differ_would_be_noticed() -> None:
    def unsteady(backend: str, **inputs: torch.Tensor) -> Outputs:
        outputs: Outputs = PPO.call(backend, **inputs)
        return {**outputs, "loss": outputs["loss"] * (1 + torch.rand(()))}

    with pytest.raises(AssertionError, match="loss"):
        equal_bits(replace(PPO, call=unsteady), "cpu", Shape())


@NEEDS_EMULATION
def test_backends_that_disagree_would_be_noticed() -> None:
    def askew(backend: str, **inputs: torch.Tensor) -> Outputs:
        outputs: Outputs = PPO.call(backend, **inputs)
        return {**outputs, "loss": outputs["loss"] * (1.0001 if backend == "triton" else 1)}

    with pytest.raises(AssertionError, match="loss"):
        agrees_with_triton(replace(PPO, call=askew), "cuda", Shape())


# ---- which backends run, and which of their builds -------------------------------------------------------------------


@NEEDS_EMULATION
def test_why_a_backend_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = why_not.__wrapped__
    assert plain("cuda", "cpu") is None
    build.fail_next_launch(cuda.module(), 209)  # as on a card that the extension has no code for
    assert plain("cuda", "cpu").startswith(
        "the extension has no code for this card (token_counts: cudaErrorNoKernelImage"
    )
    build.fail_next_launch(cuda.module(), 700)
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        plain("cuda", "cpu")
    monkeypatch.setattr(fa, "backends", lambda: {"cuda": "its extension does not load"})
    assert plain("cuda", "cuda") == "its extension does not load"


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_make_gpu_loads_the_extension_that_was_built(interpret: str) -> None:
    """tests/conftest.py puts the emulation in its place in all other runs."""
    code = "import conftest; from fastadv import cuda; print(cuda.module().device_type(), cuda.module().__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": interpret},
    )  # fmt: skip
    if interpret == "1" and (reason := cuda_kernels.missing()):
        assert reason in run.stderr
    elif interpret == "1":
        assert run.stdout.split() == ["cpu", str(cuda_kernels.emulated())], run.stderr
    elif extension := cuda_code.extension():
        assert run.stdout.split() == ["cuda", str(extension)], run.stderr
    else:
        assert "No module named 'fastadv._cuda'" in run.stderr


# ---- the parts that only a card runs, on a stand-in for torch.cuda ---------------------------------------------------


def test_waits_are_refused_and_allowed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", modes.append)

    def wait() -> None:
        with refusing_waits("cuda"):
            assert modes == ["error"]
            raise RuntimeError("waited")

    with pytest.raises(RuntimeError, match="waited"):
        wait()
    assert modes == ["error", "default"]


def test_a_graph_that_replays_nothing_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr("torch.cuda.Stream", lambda: stream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: stream)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: types.SimpleNamespace(replay=lambda: events.append("replay")))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: events.append("wait"))
    assert replayed(lambda: {"loss": torch.ones(())}, "cuda") == {"loss": torch.tensor(77.0)}
    assert events == ["replay", "wait"]
