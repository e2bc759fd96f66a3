"""The GPU benchmarks, as far as they run without one: the cases' answers, what a broken peer costs, what is written."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cuda_kernels
import pytest
import torch
from torch import Tensor

import fastadv as fa
from bench import gpu, gpu_card, gpu_page, gpu_peers, gpu_tools, peers
from bench.gpu_cases import CASES, Case, Peer, Work, copy_of, hidden, relative_error
from bench.gpu_cases.gradients import ROUNDED
from bench.gpu_page import OURS

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
BFLOAT16 = 1e-2  # the error of gradients that are rounded to it
NEED_A_CARD = ("verl linear_cross_entropy", "flash-attn cross-entropy", "quack cross-entropy")


def installed(peer: Peer) -> bool:
    """What comes with torch, not compiled: seconds each."""
    return peer.name.startswith(("eager", "F."))


@EVERY
def test_a_case_gives_the_right_answer(case: Case) -> None:
    work = case.work("cpu", small=True)
    for backend in case.backends:
        if backend == "cuda" and cuda_kernels.missing():
            continue  # tests/test_cuda_emulation.py says so by a skip
        found = work.ours(backend)()
        assert fa.last_backend() == backend
        wrong = tuple(1.1 * part for part in found) if isinstance(found, tuple) else 1.1 * found
        assert work.error(found) < case.tolerance < work.error(wrong)
    assert work.amount > 0
    work.floor.run()
    here = [peer for peer in work.peers if installed(peer)]
    assert here
    for peer in here:
        tolerance = BFLOAT16 if peer.leaves_out == ROUNDED else case.tolerance
        assert work.error(peer.make()()) < tolerance, peer.name


@EVERY
@pytest.mark.peers
def test_peers_give_the_right_answer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called as on a card: Liger's kernels run in Triton's interpreter, and what only a card runs is named."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    work = case.work("cpu", small=True)
    for peer in work.peers:
        if peer.name not in NEED_A_CARD:
            assert work.error(peer.make()()) < 1e-2, peer.name


def stand_in(monkeypatch: pytest.MonkeyPatch, path: str, **functions: Any) -> None:
    """A package that is not here, as far as a peer imports it."""
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), types.ModuleType(parts[depth - 1]))
    vars(sys.modules[path]).update(functions)


def test_peers_that_need_a_card_are_called_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with their signatures and their results: one loss a row and z-losses, a mean, log-probs and entropy."""
    losses = torch.nn.functional.cross_entropy

    def flash_attn(logits: Tensor, labels: Tensor, precomputed_lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return losses(logits.float(), labels, reduction="none"), torch.zeros(len(labels))

    def quack(x: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
        return losses(x.float(), target, ignore_index=ignore_index, reduction=reduction)

    def verl(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, reduction: str) -> tuple[Tensor, ...]:
        assert (temperature, reduction) == (1.0, "none")
        return peers.log_softmax_results((hidden @ weight.t()) / temperature, labels)[:2]

    stand_in(monkeypatch, "flash_attn.ops.triton.cross_entropy", cross_entropy_loss=flash_attn)
    stand_in(monkeypatch, "quack.cross_entropy", cross_entropy=quack)
    stand_in(monkeypatch, "verl.utils.kernel.linear_cross_entropy", linear_cross_entropy=verl)
    called = []
    for case in CASES:
        work = case.work("cpu", small=True) if case.tolerance == 1e-2 else None
        for peer in work.peers if work else ():
            if peer.name in NEED_A_CARD:
                called.append(peer.name)
                assert work.error(peer.make()()) < 1e-2, peer.name
    assert set(called) == set(NEED_A_CARD)
    assert len(called) == 4  # verl's in two cases


def test_versions_of_peers_are_told() -> None:
    found = gpu_peers.versions()
    assert found["triton"].startswith("3.")
    assert set(found) == set(gpu_peers.PACKAGES)


def test_the_error_is_relative_to_the_largest_value() -> None:
    assert relative_error(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0])) == pytest.approx(0.2)


# ---- a run survives what is run --------------------------------------------------------------------------------------


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that say a millisecond, so that measuring runs without a card."""
    event = types.SimpleNamespace(record=lambda: None, elapsed_time=lambda other: 1.0)
    monkeypatch.setattr("torch.cuda.Event", lambda enable_timing: event)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda: 0)


def case_with(*peers: Peer, ours: Any = lambda: 0.5) -> Case:
    """A case whose runs do nothing, and whose error is what they return."""
    runs = {"cuda": lambda: 0.5, "triton": ours}
    work = Work(runs.__getitem__, peers, 300.0, copy_of(100, "cpu"), float)
    return Case("a case", lambda device: work, {}, {}, 1.25)


def fails(error: Exception, after: int = 0) -> Any:
    """A run that raises after some runs."""
    count = iter(range(1000))

    def run() -> float:
        if next(count) >= after:
            raise error
        return 0.25

    return run


@pytest.mark.usefixtures("fake_cuda")
def test_a_peer_that_raises_is_a_line_and_the_others_go_on() -> None:
    def absent() -> Any:
        import a_package_that_nobody_has  # noqa: F401

    rows = gpu.measure(
        case_with(
            Peer("absent", absent, "entropy"),
            Peer("broken", lambda: fails(ValueError("no | such\nshape"))),
            Peer("large", lambda: fails(torch.OutOfMemoryError("CUDA out of memory"))),
            Peer("late", lambda: fails(RuntimeError("late"), after=5)),
            Peer("sound", lambda: lambda: 0.25),
        ),
        device="cpu",
    )
    assert {row.what: row.failure for row in rows} == {
        "fastadv (cuda)": "",
        "fastadv (triton)": "",
        "absent": "not installed: No module named 'a_package_that_nobody_has'",
        "broken": "failed: ValueError: no / such",
        "large": "failed: OutOfMemoryError: CUDA out of memory",
        "late": "failed: RuntimeError: late",
        "sound": "",
        "a copy of as many bytes": "",
    }
    by_name = {row.what: row for row in rows}
    assert by_name["fastadv (triton)"].p50 == pytest.approx(1e-3)
    assert by_name["fastadv (triton)"].rate == pytest.approx(3e5)
    assert by_name["fastadv (triton)"].of_floor == pytest.approx(1 / 3)  # three times the bytes in the same time
    assert by_name["a copy of as many bytes"].of_floor == pytest.approx(1)
    assert [by_name[name].error for name in ("fastadv (cuda)", "sound", "a copy of as many bytes")] == [0.5, 0.25, None]
    assert by_name["absent"].leaves_out == "entropy"


@pytest.mark.usefixtures("fake_cuda")
def test_ours_may_fail_and_peers_are_measured() -> None:
    rows = gpu.measure(case_with(Peer("sound", lambda: lambda: 0.25), ours=fails(RuntimeError("ours"))), device="cpu")
    assert [row.failure for row in rows] == ["", "failed: RuntimeError: ours", "", ""]
    absent = fails(fa.BackendUnavailableError("its extension does not load"))
    rows = gpu.measure(case_with(ours=absent), device="cpu")
    assert [row.failure for row in rows] == ["", "not here: its extension does not load", ""]


@pytest.mark.skipif(cuda_kernels.missing() is not None, reason=str(cuda_kernels.missing()))
@pytest.mark.parametrize(
    "case", [CASES[0], hidden.CASES[-1], CASES[-1]], ids=["by bytes", "by operations", "one backend"]
)
@pytest.mark.usefixtures("fake_cuda")
def test_a_case_is_measured_and_written(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROUNDS", 2)
    rows = gpu.measure(case, device="cpu", small=True, peers=False)
    assert [row.failure for row in rows] == [""] * (len(case.backends) + 1)
    page = gpu_page.measured(document(*rows))
    for name in (OURS[backend] for backend in case.backends):
        assert f"| {case.name} | {name} | 1000.0 | 1000.0 | 1000.0 |" in page


FACTS = {"card": "a card", "commit": "1234567-dirty", "capability": "9.0", "auto": "cuda"}


def document(*rows: gpu.Row, **given: Any) -> dict[str, Any]:
    """What a run leaves."""
    found = {"machine": FACTS, "seconds": 61.2, "states": [], "sanitized": [], "profiled": []}
    return {**found, "rows": [asdict(row) for row in rows], **given}


def row(case: Case, **given: Any) -> gpu.Row:
    good = gpu.Row(
        case.name, OURS[case.judged("cuda")], case_unit(case), "", "", 1e-5, 2e-5, 3e-5, 3.5e12, 1.0, 2**20, 1e-7
    )
    return replace(good, **given)


def case_unit(case: Case) -> str:
    return "TF/s" if case.name.startswith(("hidden", "weight gradients")) else "GB/s"


def test_no_case_costs_another() -> None:
    """A process that dies is run again without peers; every case that was measured is written at once."""
    asked, written = [], []

    def process(case: Case, peers: bool, limit: float) -> dict[str, Any] | str:
        asked.append((case, peers))
        assert 0 < limit <= gpu.PROCESS_SECONDS
        if case is CASES[1] or (case is CASES[0] and peers):
            return "CUDA error: an illegal memory access was encountered"
        return {"rows": [asdict(row(case))], "state": {"slowed by": []}}

    found = gpu.measure_all(process, lambda d: written.append(json.dumps(d)), FACTS)
    assert asked[:4] == [(CASES[0], True), (CASES[0], False), (CASES[1], True), (CASES[1], False)]
    assert asked[4:] == [(case, True) for case in CASES[2:]]
    assert len(written) == len(CASES)
    assert written[-1] == json.dumps(found)
    failed = [(r["case"], r["what"]) for r in found["rows"] if r["failure"]]
    assert failed == [(CASES[0].name, "all peers"), (CASES[1].name, "fastadv")]
    assert not gpu_page.sound(found)
    assert f"| {CASES[1].name} | fastadv | failed: CUDA error: an illegal memory access" in gpu_page.measured(found)


def test_a_run_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ALL_SECONDS", 0.0)
    found = gpu.measure_all(lambda *_: pytest.fail("no time was left"), lambda d: None, FACTS)
    assert [r["failure"] for r in found["rows"]] == ["failed: no time was left"] * len(CASES)


def test_a_process_that_dies_or_hangs_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    message = gpu.in_a_process(CASES[0], True, 100.0)
    assert message == "no CUDA device: nothing was measured. Run `make gpu` on a machine that has one."
    assert gpu.in_a_process(CASES[0], True, 0.01) == "took more than 0 s"


# ---- what is written -------------------------------------------------------------------------------------------------


def test_nothing_is_measured_without_a_card(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    assert gpu.main([]) == 2
    assert "no CUDA device: nothing was measured" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("slow", [False, True], ids=["sound", "a bar missed"])
def test_the_whole_command(slow: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a measurement that takes no card, and processes that are calls."""

    def process(command: list[str], **_: Any) -> Any:
        assert command[1:3] == ["-m", "bench.gpu"]
        return types.SimpleNamespace(returncode=gpu.main(command[3:]), stderr="")

    def measure(case: Case, peers: bool) -> list[gpu.Row]:
        if peers and case is CASES[2]:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return [row(case, of_floor=2.0 if slow else 1.0)]

    def died(command: list[str], **given: Any) -> Any:
        try:
            return process(command, **given)
        except RuntimeError as error:
            return types.SimpleNamespace(returncode=1, stderr=f"Traceback\nRuntimeError: {error}\n")

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # main sets it, and this puts it back
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu.subprocess, "run", died)
    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "machine", lambda: {"commit": "1234567"})
    monkeypatch.setattr(gpu_card, "facts", lambda: {"card": "a card"})
    monkeypatch.setattr(gpu_card, "state", lambda: {"slowed by": ["power cap"]})
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu.dispatch, "resolve", lambda *_, **__: "cuda")
    monkeypatch.setattr(gpu_tools.shutil, "which", lambda tool: None)
    assert gpu.main([]) == int(slow)
    found, page = json.loads((tmp_path / "gpu.json").read_text()), (tmp_path / "gpu.md").read_text()
    assert page == gpu_page.measured(found)
    assert [r["case"] for r in found["rows"] if r["what"] in OURS.values()] == [case.name for case in CASES]
    assert "|  | all peers | failed: RuntimeError: CUDA error: unspecified launch failure |" in page
    assert page.startswith("# On a GPU: a card\n")
    assert "held down by: power cap" in page
    assert 'Bars are for cuda, which "auto" takes here.' in page
    assert "- `compute-sanitizer --tool racecheck`: compute-sanitizer is not on the path." in page
    assert "Bytes and occupancy were not counted: ncu is not on the path." in page


def test_the_committed_page_is_what_the_command_writes() -> None:
    page, results = (gpu.RESULTS / name for name in ("gpu.md", "gpu.json"))
    expected = gpu_page.measured(json.loads(results.read_text())) if results.exists() else gpu_page.not_measured()
    assert page.read_text() == expected


def test_a_page_without_results_says_so_and_never_takes_the_place_of_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    assert gpu.main(["--not-measured"]) == 0
    text = (tmp_path / "gpu.md").read_text()
    assert "Nothing in this project was measured on a GPU" in text
    assert all(f"| {case.name} |" in text for case in CASES)
    (tmp_path / "gpu.json").write_text("{}")
    (tmp_path / "gpu.md").write_text("a card's results")
    assert gpu.main(["--not-measured"]) == 1
    assert (tmp_path / "gpu.md").read_text() == "a card's results"


def test_a_bar_in_seconds_is_for_cards_like_an_h100() -> None:
    (case,) = [case for case in CASES if case.seconds is not None]
    fast, slow = (asdict(row(case, p50=factor * case.seconds)) for factor in (0.9, 1.1))
    assert gpu_page.kept(case, fast, FACTS) is True
    assert gpu_page.kept(case, slow, FACTS) is False
    assert gpu_page.kept(case, slow, {**FACTS, "capability": "8.0"}) is None


def test_a_run_is_sound_if_every_case_is_right_and_within_its_bar() -> None:
    rows = {case.name: row(case) for case in CASES}

    def sound(**changed: Any) -> bool:
        first = replace(rows[CASES[0].name], **changed)
        return gpu_page.sound(document(first, *list(rows.values())[1:]))

    assert sound()
    assert not sound(what=OURS["triton"])  # "auto" takes the other
    assert not sound(of_floor=1.3)
    assert not sound(error=0.1)
    assert not sound(failure="failed")
    assert not sound(case="another")


def test_an_op_that_one_backend_has_is_judged_by_that_one() -> None:
    assert CASES[-1].backends == ("triton",)
    for auto in ("cuda", "triton"):
        *others, only = (row(case, what=OURS[case.judged(auto)]) for case in CASES)
        machine = {**FACTS, "auto": auto}
        assert gpu_page.sound(document(*others, only, machine=machine))
        assert not gpu_page.sound(document(*others, replace(only, error=0.1), machine=machine))


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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert gpu_card._handle(fake, 1) == 1
    assert gpu_card._handle(fake, 0) == 3  # NVML counts all cards
    assert gpu_card.state() == {
        "SM clock MHz": 1755,
        "memory clock MHz": 2619,
        "temperature C": 51,
        "power W": 312.4,
        "slowed by": ["power cap"],
    }


def test_nvml_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(name="a card", major=9, minor=0, multi_processor_count=132, total_memory=2**36)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_card.facts()["card"] == "a card"
    assert gpu_card.facts()["capability"] == "9.0"
    assert "does not tell" in str(gpu_card.facts()["NVML"])
    assert "unknown (" in str(gpu_card.state_or_why_not()["slowed by"])


def test_the_page_says_what_missed_what_is_absent_and_what_slowed_the_card() -> None:
    case = CASES[0]
    assert case.bar is not None
    rows = [
        row(case, of_floor=case.bar + 0.5, error=0.1),
        row(case, what="eager", p50=2e-3, error=None, leaves_out="metrics"),
        gpu.Row(case.name, "a peer", "GB/s", "not installed: No module named 'it'"),
    ]
    states = [{"slowed by": []}, {"slowed by": ["power cap"]}]
    page = gpu_page.measured(document(*rows, states=states))
    bar = f"{case.bar + 0.5:.2f} | {case.bar:.2f} times the floor, MISSED"
    assert f"| {case.name} | fastadv (cuda) | 10.0 | 20.0 | 30.0 | 3500 GB/s | {bar} | 1 | 1.0e-01 WRONG |" in page
    assert "|  | eager | 10.0 | 2000.0 |" in page
    assert "|  | a peer | not installed: No module named 'it' |" in page
    assert "Peers that are not here: a peer (not installed: No module named 'it')." in page
    assert "Peers that leave something out: eager (metrics)." in page
    assert "held down by: power cap" in page
    assert "61 s in all" in page
    assert gpu_page.DIRTY in page
