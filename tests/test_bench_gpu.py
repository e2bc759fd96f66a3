"""The GPU benchmarks, as far as they run without one: the cases' answers in the interpreter, and what is written."""

from __future__ import annotations

import sys
import types

import pytest

from bench import gpu, gpu_card
from bench.gpu_cases import CASES, Case, relative_error

interpreted = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@interpreted
def test_a_case_gives_the_right_answer(case: Case) -> None:
    work = case.work("cpu", "triton", small=True)
    assert 0 <= work.error() < 1e-2 if "logits" in case.name or "gradient" in case.name else work.error() < 1e-5
    assert set(work.peers) <= {"eager", "torch.compile"}
    work.peers["eager"]()
    assert work.bytes > 0


def test_the_error_is_relative_to_the_largest_value() -> None:
    import torch

    assert relative_error(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0])) == pytest.approx(0.2)


def test_nothing_is_measured_without_a_card(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main() == 2
    assert "no CUDA device: nothing was measured" in capsys.readouterr().err


def test_reasons_of_low_clocks_are_named() -> None:
    assert gpu_card.slowed_by(0x1) == []
    assert gpu_card.slowed_by(0x4 | 0x40) == ["power cap", "hardware thermal limit"]
    assert gpu_card.slowed_by(0x1000) == ["unknown (0x1000)"]


def test_the_state_of_a_card_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(
        NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 1755, 2: 2619}[kind],
        nvmlDeviceGetTemperature=lambda handle, sensor: 51, NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetPowerUsage=lambda handle: 312_400, nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x4,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert gpu_card.state() == {
        "SM clock MHz": 1755,
        "memory clock MHz": 2619,
        "temperature C": 51,
        "power W": 312.4,
        "slowed by": ["power cap"],
    }


def test_the_page_says_what_missed_and_what_slowed_the_card() -> None:
    name, bar = CASES[0].name, CASES[0].bar
    rows = [
        gpu.Measured(name, "fastadv", 1e-5, 2e-5, 3e-5, 3.5e12, bar + 0.5, 2**20, 1e-7),
        gpu.Measured(name, "eager", 1e-3, 2e-3, 3e-3, 3.5e10, 100.0, 2**30, None),
    ]
    facts: dict[str, object] = {"card": "a card", "commit": "1234567-dirty"}
    page = gpu.report(rows, facts, [{"slowed by": []}, {"slowed by": ["power cap"]}])
    assert (
        f"| {name} | fastadv | 10.0 | 20.0 | 30.0 | 3500 | {bar + 0.5:.2f} | {bar:.2f} MISSED | 1 | 1.0e-07 |" in page
    )
    assert "|  | eager | 1000.0 |" in page
    assert "held down by: power cap" in page
    assert gpu.DIRTY in page
