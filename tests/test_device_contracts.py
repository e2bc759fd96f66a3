"""What `make gpu` runs on a card, run once on the CPU: each contract on one kernel, in Triton's interpreter."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from dataclasses import replace

import pytest
import test_large
import torch
from device_contracts import CONTRACTS, LARGE, case_on, equal_bits, refusing_waits, replayed, run_large
from op_cases import CASES, Case, Outputs, Shape

import fastadv as fa

(PPO,) = [case for case in CASES if case.name == "policy_loss[ppo]"]


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_holds_in_the_interpreter(name: str, request: pytest.FixtureRequest) -> None:
    contract = CONTRACTS[name]
    assert contract.applies(PPO)
    if contract.poisoned:
        request.getfixturevalue("poisoned_memory")
    contract.run(case_on(PPO, "cpu"), "triton", whole=False)


@pytest.mark.parametrize("check", LARGE, ids=lambda check: check.__name__)
def test_the_large_ones_in_small(check: Callable[[str], None]) -> None:
    run_large(check, "cpu", "cpu", 3 * test_large.LAST)
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
