"""Dumps of a few bytes that stand for more than the machine has: each is refused, or not unfolded."""

from __future__ import annotations

import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_files import sample, samples, write_dump
from safetensors.torch import save_file

from fastadv.replay.errors import ReplayError
from fastadv.replay.readers import ReadOptions, Rollouts, read

RNG = random.Random(0)


def one(tmp_path: Path, **changes: Any) -> Rollouts:
    """A dump with one ordinary rollout and one changed."""
    return read(write_dump(tmp_path / "dump.pt", [sample(RNG, 0, 0), {**sample(RNG, 0, 1), **changes}]), ReadOptions())


def bomb() -> Any:
    """A hundred million texts of a thousand letters, in a few bytes."""
    value: Any = ["A" * 1000]
    for _ in range(8):
        value = [value] * 10
    return value


def test_texts_that_are_no_texts_are_not_unfolded(tmp_path: Path) -> None:
    everywhere = {"exit_status": bomb(), "instance_id": bomb()}
    assert one(tmp_path, prompt=bomb(), metadata=everywhere, group_index=1).labels[1] == "(no text: list)"
    assert one(tmp_path, prompt=[{"content": bomb()}], group_index=1).labels[1] == "(no text: list)"
    with pytest.raises(ReplayError, match=r"choose one of its keys with --reward-key \(a\)"):
        one(tmp_path, reward={"a": bomb()})
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        with pytest.raises(ReplayError, match=rf"'{name}' holds something that is no number \(a list\)"):
            one(tmp_path, **{name: bomb()})


def write_zip(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """A torch file with this data.pkl."""
    torch.save(1, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, pickled if name.endswith("data.pkl") else content)
    return path


@pytest.mark.parametrize("levels", [50_000, 1_000_000])
@pytest.mark.parametrize("field", [b"prompt", b"tokens", b"reward"])
def test_lists_in_lists(tmp_path: Path, levels: int, field: bytes) -> None:
    plainly = pickle.dumps({"samples": [sample(RNG, 0, 0)]}, protocol=2)
    nested = b"]" * levels + b"a" * (levels - 1)
    key = b"X" + len(field).to_bytes(4, "little") + field
    assert plainly.endswith(b"ua" + b"s.") or plainly.endswith(b"uas.")
    path = write_zip(tmp_path / "deep.pt", plainly[:-3] + key + nested + b"sas.")
    if field == b"prompt":
        assert read(path, ReadOptions()).labels == ["(no text: list)"]
    else:
        with pytest.raises(ReplayError, match=r"deep\.pt, sample 0"):
            read(path, ReadOptions())


def test_an_archive_that_would_unpack_to_far_more(tmp_path: Path) -> None:
    pickled = pickle.dumps({"samples": samples(40, 4), "pad": "A" * 10**7}, protocol=2)
    with pytest.raises(ReplayError, match=r"would unpack to 1\d,\d{3},\d{3}: more than 20 times"):
        read(write_zip(tmp_path / "bomb.pt", pickled, zipfile.ZIP_DEFLATED), ReadOptions())
    ordinary = pickle.dumps({"samples": samples(40, 4)}, protocol=2)
    assert read(write_zip(tmp_path / "dump.pt", ordinary, zipfile.ZIP_DEFLATED), ReadOptions()).census().total == 160


def test_samples_that_share_their_lists(tmp_path: Path) -> None:
    path = write_dump(tmp_path / "dump.pt", [sample(RNG, 0, 0)] * 5000)
    with pytest.raises(ReplayError, match=r"up to sample \d+ there are [\d,]+ tokens in [\d,]+ bytes: samples share"):
        read(path, ReadOptions())
    path_of_calls = list(range(10**6))
    leaves = [{"leaf": {"node_id": i, "path_node_ids": path_of_calls}} for i in range(1000)]
    entries = [{**sample(RNG, 0, i), "rollout_id": 5, "reward": 0.0, "metadata": leaves[i]} for i in range(1000)]
    with pytest.raises(ReplayError, match=r"up to sample \d+ there are [\d,]+ tokens .*: samples share their lists"):
        read(write_dump(tmp_path / "leaves.pt", entries), ReadOptions())
    wide = torch.zeros(1, dtype=torch.uint8).expand(10**11)
    with pytest.raises(ReplayError, match="'tokens' is a tensor that repeats its entries in place"):
        one(tmp_path, tokens=wide)


def test_turns_that_a_row_has_no_tokens_for(tmp_path: Path) -> None:
    """Two hundred rollouts of a token each would make tables of two hundred million turns."""
    rows = 200
    tensors = {
        "cu_seqlens": torch.arange(rows + 1),
        "mask": torch.ones(rows, dtype=torch.bool),
        "rewards": torch.rand(rows),
        "group_ids": torch.arange(rows) // 8,
        "outcomes": torch.zeros(rows, dtype=torch.uint8),
        "turn_ids": torch.full((rows,), 2**20 - 1, dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "turns.safetensors", {"format": "fastadv rollouts", "version": "1"})
    with pytest.raises(ReplayError, match="turn_ids of rollout 0 reach 1048575, but it has 1 token; turns count from"):
        read(tmp_path / "turns.safetensors", ReadOptions())
