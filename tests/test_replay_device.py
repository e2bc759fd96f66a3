"""Where the replay runs its policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_files import samples, write_dump, write_policy

from fastadv.replay import pipeline, policy
from fastadv.replay.errors import ReplayError
from fastadv.replay.pipeline import ReplayOptions, replay
from fastadv.replay.policy import Policy, device_named


def cards(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """As if torch saw so many."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, 2)
    for name in ("cpu", "cuda", "cuda:0", "cuda:1"):
        assert device_named(name) == torch.device(name)
    with pytest.raises(ReplayError, match=r"--device cuda:2: the last CUDA device is cuda:1"):
        device_named("cuda:2")
    for name in ("gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:\u00b2", "cpu:0", "meta", ""):
        with pytest.raises(ReplayError, match=r"--device is .*; it must be cpu, cuda, or cuda:0 and on"):
            device_named(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_device_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cards(monkeypatch, 0)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    with pytest.raises(ReplayError, match=f"--device {name}: torch sees no CUDA device; take cpu, or run"):
        Policy.load(tmp_path, device=name)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(ReplayError, match="torch sees no CUDA device, and this torch is built for the CPU alone;"):
        device_named(name)


def test_a_policy_is_loaded_to_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_policy(tmp_path / "policy")
    assert Policy.load(folder).device == torch.device("cpu")
    monkeypatch.setattr(policy, "device_named", torch.device)
    assert Policy.load(folder, device="meta").device == torch.device("meta")

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("torch.nn.Module.to", full)
    with pytest.raises(ReplayError, match="policy does not fit on meta: CUDA out of memory"):
        Policy.load(folder, device="meta")


def test_a_device_that_is_too_small_for_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(pipeline.streamed, "segment_gram", full)
    loaded = Policy.load(write_policy(tmp_path / "policy"))
    with pytest.raises(ReplayError, match=r"too little memory \(CUDA out of memory.* smaller --max-tokens"):
        replay([write_dump(tmp_path / "dump.pt", samples(2, 2))], loaded, ReplayOptions(p1_prompts=0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("gradients", ["gram", "cells"])
def test_a_card_gives_what_the_cpu_does(gradients: str, tmp_path: Path) -> None:
    folder, dump = write_policy(tmp_path / "policy"), write_dump(tmp_path / "dump.pt", samples(4, 4))
    options = ReplayOptions(gradients=gradients, p1_prompts=2)
    here, there = (
        replay([dump], Policy.load(folder, dtype=torch.float64, device=device), options) for device in ("cpu", "cuda")
    )
    for one, other in zip(here.gradients, there.gradients, strict=True):
        assert (other.arm, other.scope) == (one.arm, one.scope)
        assert other.cosine == pytest.approx(one.cosine, rel=1e-4, nan_ok=True)
    assert [p.verdict for p in there.predictions] == [p.verdict for p in here.predictions]
