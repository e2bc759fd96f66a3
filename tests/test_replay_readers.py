"""Readers: what a dump means, and every way in which one can be wrong."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_files import sample, samples, write_dump, write_verl

from fastadv.outcomes import Outcome
from fastadv.replay.errors import ReplayError
from fastadv.replay.readers import ReadOptions, Rollouts, find, portable, read

EXAMPLE = Path(__file__).parent / "data" / "miles_dump_example.pt"
RNG = random.Random(0)


def one(tmp_path: Path, **changes: Any) -> Any:
    """A dump with one ordinary rollout and one changed."""
    entries = [sample(RNG, 0, 0), {**sample(RNG, 0, 1), **changes}]
    for name, value in list(changes.items()):
        if value is DELETED:
            del entries[1][name]
    return read(write_dump(tmp_path / "dump.pt", entries), ReadOptions())


DELETED = object()


# ---- Miles and slime -------------------------------------------------------------------------------------------------


def test_a_dump_that_miles_wrote() -> None:
    rollouts = read(EXAMPLE, ReadOptions())
    census = rollouts.census()
    assert [census.counts[o] for o in Outcome] == [9, 8, 3, 4]
    assert rollouts.groups.num_groups == 6
    assert rollouts.labels == [f"task-{i}: synthetic task {i}" for i in range(6)]
    batch = rollouts.batch
    assert batch.num_tokens == 1217
    assert batch.lengths[:4].tolist() == [106, 37, 89, 26]
    assert batch.segments.turns()[:4].tolist() == [5, 2, 5, 2]
    assert batch.rollout_log_probs[0] == pytest.approx(-0.10596698754838857)
    assert batch.token_ids.ids[:3].tolist() == [776, 911, 430]
    assert batch.row_ids.tolist() == list(range(24))


@pytest.mark.parametrize(
    ("changes", "outcome", "capped"),
    [
        ({"status": "completed", "reward": 1.0}, Outcome.SOLVED, False),
        ({"status": "completed", "reward": 0.0}, Outcome.FAILED, False),
        ({"status": "completed", "reward": -1}, Outcome.FAILED, False),
        ({"status": "truncated", "reward": 0.0}, Outcome.BUDGET, True),
        ({"status": "truncated", "reward": 1.0}, Outcome.SOLVED, True),  # cut off and passed
        (
            {"status": "completed", "reward": 0.0, "metadata": {"exit_status": "TimeLimitExceeded"}},
            Outcome.BUDGET,
            True,
        ),
        (
            {"status": "completed", "reward": 0.0, "metadata": {"exit_status": "SequenceLengthLimitExceeded"}},
            Outcome.BUDGET,
            True,
        ),
        ({"status": "completed", "reward": 0.0, "metadata": {"exit_status": "Submitted"}}, Outcome.FAILED, False),
        ({"status": "aborted", "reward": 1.0}, Outcome.INFRA, False),
        ({"status": "failed", "reward": 0.0}, Outcome.INFRA, False),
        ({"status": "pending", "reward": None}, Outcome.INFRA, False),
        ({"status": "completed", "reward": None}, Outcome.INFRA, False),
        ({"status": "completed", "reward": math.nan}, Outcome.INFRA, False),
    ],
)
def test_outcomes(tmp_path: Path, changes: dict[str, Any], outcome: Outcome, capped: bool) -> None:
    rollouts = one(tmp_path, **changes)
    assert Outcome(int(rollouts.outcomes[1])) == outcome
    assert bool(rollouts.batch.capped[1]) == capped


def test_what_may_be_missing(tmp_path: Path) -> None:
    unmasked = one(tmp_path, loss_mask=None)
    assert unmasked.batch.mask.dtype == torch.bool
    assert unmasked.notes == ["1 sample without loss_mask: every response token counts as sampled"]
    without = one(tmp_path, rollout_log_probs=None)
    assert without.batch.rollout_log_probs is None
    assert without.notes == ["1 sample without rollout_log_probs: those of the others are not used"]
    assert one(tmp_path, metadata=None).census().total == 2
    ungrouped = one(tmp_path, group_index=None)
    assert ungrouped.groups.num_groups == 2
    assert ungrouped.notes == ["1 sample without group_index: each is a group of its own"]
    repeated = one(tmp_path, index=0)
    assert repeated.batch.row_ids.tolist() == [0, 1]
    assert one(tmp_path, remove_sample=True).notes[0].startswith("1 sample marked by a sample filter: the marks are")
    assert one(tmp_path, reward=None).notes == ["1 finished sample without a reward (None or NaN): counted as INFRA"]
    for name in ("metadata", "index", "loss_mask", "rollout_log_probs", "prompt"):
        assert one(tmp_path, **{name: DELETED}).census().total == 2


def test_rewards_in_dictionaries(tmp_path: Path) -> None:
    entries = [{**sample(RNG, 0, i), "reward": {"accuracy": float(i), "format": 0.5}} for i in range(2)]
    path = write_dump(tmp_path / "dump.pt", entries)
    assert read(path, ReadOptions(reward_key="accuracy")).rewards.tolist() == [0.0, 1.0]
    with pytest.raises(ReplayError, match=r"sample 0: the reward is a dictionary; .*--reward-key \(accuracy, format\)"):
        read(path, ReadOptions())
    with pytest.raises(ReplayError, match="the reward has no key 'score'; it has accuracy, format"):
        read(path, ReadOptions(reward_key="score"))


def test_a_reward_key_for_plain_rewards_is_noted(tmp_path: Path) -> None:
    entries = [sample(RNG, 0, i) for i in range(3)]
    entries[0]["reward"] = {"accuracy": 1.0}
    options = ReadOptions(reward_key="accuracy")
    notes = read(write_dump(tmp_path / "dump.pt", entries), options).notes
    assert notes == ["--reward-key does not apply to 2 samples: the reward is no dictionary"]
    assert (
        "--reward-key does not apply: verl" in read(write_verl(tmp_path / "1.jsonl", [verl_line()]), options).notes[1]
    )
    path, _ = portable_file(tmp_path)
    assert "--reward-key does not apply: the portable format" in read(path, options).notes[0]


def test_text_labels_of_groups(tmp_path: Path) -> None:
    rollouts = one(tmp_path, group_index="django-1")
    assert rollouts.groups.index.tolist() == [0, 1]
    assert rollouts.notes == []


def test_arrays_and_tensors_in_place_of_lists(tmp_path: Path) -> None:
    entry = sample(RNG, 0, 0)
    tensors = {**entry, "tokens": torch.tensor(entry["tokens"]), "loss_mask": torch.tensor(entry["loss_mask"])}
    plain = read(write_dump(tmp_path / "a.pt", [entry]), ReadOptions()).batch
    other = read(write_dump(tmp_path / "b.pt", [tensors]), ReadOptions()).batch
    assert torch.equal(plain.mask, other.mask)
    assert torch.equal(plain.token_ids.ids, other.token_ids.ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": DELETED}, "sample 1 has no 'tokens'"),
        ({"response_length": DELETED}, "sample 1 has no 'response_length'"),
        ({"status": DELETED}, "sample 1 has no 'status'"),
        ({"status": "done"}, "'status' is 'done'; Miles and slime write completed"),
        ({"status": 3}, "'status' is a int; it must be a text"),
        ({"tokens": "abc"}, "'tokens' is a str; it must be a list of numbers"),
        ({"tokens": [1, "x"]}, "'tokens' holds something that is no number"),
        ({"tokens": [-5] * 50}, r"'tokens' holds an id outside of \[0, 2147483647\]"),
        ({"tokens": [2**40] * 50}, "'tokens' holds an id outside"),
        ({"tokens": [[1, 2]]}, r"'tokens' holds something that is no number \(a list\)"),
        ({"tokens": torch.ones(2, 2, dtype=torch.int64)}, "'tokens' has 2 dimensions"),
        ({"response_length": 10**6}, "'response_length' is 1000000 of"),
        ({"response_length": -1}, "'response_length' is -1 of"),
        ({"response_length": 2.5}, "'response_length' is a float; it must be an integer"),
        ({"response_length": 10**600}, "'response_length' has 1994 bits; it must fit into 64"),
        ({"loss_mask": [1]}, "'loss_mask' has 1 entries for"),
        ({"loss_mask": [0.5] * 100}, "'loss_mask' has 100 entries for"),
        ({"rollout_log_probs": [0.0]}, "'rollout_log_probs' has 1 entries for"),
        ({"rollout_log_probs": ["a"]}, "'rollout_log_probs' holds something that is no number"),
        ({"reward": "good"}, "the reward is a str"),
        ({"reward": [1.0]}, "the reward is a list"),
        ({"group_index": 1.5}, "'group_index' is a float; it must be an integer or a text"),
        ({"metadata": "none"}, "'metadata' is a str; it must be a dictionary"),
        ({"rollout_id": 7}, None),
    ],
)
def test_a_sample_that_is_wrong(tmp_path: Path, changes: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert one(tmp_path, **changes).census().total == 2
        return
    with pytest.raises(ReplayError, match=message):
        one(tmp_path, **changes)


def test_a_fractional_mask(tmp_path: Path) -> None:
    entry = sample(RNG, 0, 0)
    entry["loss_mask"] = [0.5] * entry["response_length"]
    with pytest.raises(ReplayError, match="'loss_mask' holds a number that is not whole"):
        read(write_dump(tmp_path / "dump.pt", [entry]), ReadOptions())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weights": torch.zeros(3)}, "is no rollout dump: it holds weights, not a dictionary with 'samples'"),
        ([1, 2], "is no rollout dump: it holds list"),
        (torch.zeros(3), "is no rollout dump: it holds Tensor"),
        ({"samples": {}}, "'samples' is a dict, not a list"),
        ({"samples": []}, "holds no rollouts"),
        ({"samples": [5]}, "sample 0 is a int, not a dictionary"),
        ({"samples": [None]}, "sample 0 is a NoneType"),
    ],
)
def test_a_torch_file_of_something_else(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "other.pt"
    torch.save(content, path)
    with pytest.raises(ReplayError, match=message):
        read(path, ReadOptions())


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("where", ["sample", "beside"])
def test_code_in_a_dump_is_not_executed(tmp_path: Path, legacy: bool, where: str) -> None:
    target, path = tmp_path / "executed", tmp_path / "evil.pt"
    entries = samples(2, 2)
    dump: dict[str, Any] = {"samples": entries}
    if where == "sample":
        entries[0]["metadata"] = {"x": Malicious(target)}
    else:
        dump["metadata"] = Malicious(target)
    torch.save(dump, path, _use_new_zipfile_serialization=not legacy)
    message = r"holds more than plain data and was refused; nothing in it was executed \(it names posix\.system\)"
    with pytest.raises(ReplayError, match=message) as caught:
        read(path, ReadOptions())
    assert "weights_only" not in str(caught.value)
    assert not target.exists()


def test_a_bare_pickle_is_not_executed(tmp_path: Path) -> None:
    target, path = tmp_path / "executed", tmp_path / "evil.pt"
    path.write_bytes(pickle.dumps({"samples": [Malicious(target)]}))
    with pytest.raises(ReplayError, match=r"evil\.pt .*refused") as caught:
        read(path, ReadOptions())
    assert "weights_only" not in str(caught.value)
    assert not target.exists()


def test_a_trusted_dump_may_hold_arrays(tmp_path: Path) -> None:
    entries = samples(1, 2)
    entries[0]["rollout_routed_experts"] = np.zeros((3, 2, 2), dtype=np.int32)
    path = write_dump(tmp_path / "dump.pt", entries)
    with pytest.raises(ReplayError, match="--trust-dump"):
        read(path, ReadOptions())
    assert read(path, ReadOptions(trust=True)).census().total == 2


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_dump(tmp_path: Path, keep: float) -> None:
    whole = write_dump(tmp_path / "dump.pt", samples(4, 4)).read_bytes()
    path = tmp_path / "cut.pt"
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(ReplayError, match=r"cut\.pt"):
        read(path, ReadOptions())


@pytest.mark.parametrize("flip", [30, 200, 1000, 3000])
def test_a_corrupted_dump_is_an_error_or_is_checked(tmp_path: Path, flip: int) -> None:
    data = bytearray(write_dump(tmp_path / "dump.pt", samples(4, 4)).read_bytes())
    data[flip] ^= 0xFF
    path = tmp_path / "bad.pt"
    path.write_bytes(bytes(data))
    result = attempt(path)
    assert isinstance(result, (Rollouts, ReplayError))
    assert isinstance(result, Rollouts) or "bad.pt" in str(result)


def attempt(path: Path) -> Rollouts | ReplayError:
    """What was read, or why not; any other exception is a failure."""
    try:
        return read(path, ReadOptions())
    except ReplayError as error:
        return error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello", "is no dump that can be read"),
        (b"\x89PNG\r\n", "is no dump that can be read"),
        (b"PK\x03\x04garbage", "is truncated or no torch file"),
        (b"\x80\x04garbage", "garbage.bin"),
        (b'{"input": 1', "line 1 is no JSON"),
        (b'{\n "input": "a",\n', "a log has one object a line"),
        (b'[{"input": "a"}]', "is a JSON array; verl's log has one object a line"),
        ("{}".encode("utf-16"), "is UTF-16 text; verl's log is UTF-8"),
        (b"\n" * 100, "holds no rollouts"),
    ],
)
def test_a_foreign_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "garbage.bin"
    path.write_bytes(content)
    with pytest.raises(ReplayError, match=message):
        read(path, ReadOptions())


def test_finding_dumps(tmp_path: Path) -> None:
    for name in ("b.pt", "a.pt", "c.jsonl", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert [p.name for p in find([tmp_path])] == ["a.pt", "b.pt", "c.jsonl"]
    assert find([tmp_path / "notes.txt"]) == [tmp_path / "notes.txt"]
    (tmp_path / "link.pt").symlink_to("b.pt")
    several = find([tmp_path / "c.jsonl", tmp_path, tmp_path / "link.pt", tmp_path / "." / "a.pt"])
    assert [p.name for p in several] == ["c.jsonl", "a.pt", "b.pt"]  # each file once
    with pytest.raises(ReplayError, match="does not exist"):
        find([tmp_path / "absent.pt"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReplayError, match="is a folder without dumps"):
        find([tmp_path / "empty"])


# ---- verl ------------------------------------------------------------------------------------------------------------


def verl_line(**changes: Any) -> dict[str, Any]:
    return {"input": "2 + 2?", "output": "4", "gts": "4", "score": 1.0, "step": 3, **changes}


def test_a_verl_log(tmp_path: Path) -> None:
    lines = [verl_line(), verl_line(score=0.0), verl_line(input="3 + 3?"), verl_line(step=4), verl_line(score=None)]
    rollouts = read(write_verl(tmp_path / "3.jsonl", lines), ReadOptions())
    assert [rollouts.census().counts[o] for o in Outcome] == [3, 1, 0, 1]
    assert rollouts.groups.index.tolist() == [0, 0, 1, 2, 0]  # by step and input
    assert rollouts.batch is None
    assert "Arms and gradients need the portable format" in rollouts.refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input": "a", "output": "b"}\n', "line 1 has no 'score'"),
        ('{"output": "b", "score": 1}\n', "line 1 has no 'input'"),
        (json.dumps(verl_line()) + "\n[1, 2]\n", "line 2 is a list"),
        (json.dumps(verl_line()) + "\n{broken\n", "line 2 is no JSON"),
        (json.dumps(verl_line(score="high")), "'score' is 'high', not a number"),
        (json.dumps(verl_line(score=True)), "'score' is True"),
        ("{" + "[" * 100_000, "line 1 is no JSON"),
    ],
)
def test_a_verl_log_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "3.jsonl"
    path.write_text(text)
    with pytest.raises(ReplayError, match=message):
        read(path, ReadOptions())


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"\xef\xbb\xbf\n\n", b"\n" * 100 + b"  "])
def test_a_verl_log_with_a_byte_order_mark_or_blank_lines(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "3.jsonl"
    path.write_bytes(before + json.dumps(verl_line()).encode())
    assert read(path, ReadOptions()).rewards.tolist() == [1.0]


def test_a_verl_log_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "3.jsonl"
    path.write_bytes(b'{"input": "\xff\xfe"}\n')
    with pytest.raises(ReplayError, match="is no text"):
        read(path, ReadOptions())


# ---- portable --------------------------------------------------------------------------------------------------------


def portable_file(tmp_path: Path) -> tuple[Path, Any]:
    rollouts = read(EXAMPLE, ReadOptions())
    path = tmp_path / "rollouts.safetensors"
    portable.write(path, rollouts.batch, rollouts.labels)
    return path, rollouts


@pytest.mark.row(48)
def test_the_portable_format_keeps_everything(tmp_path: Path) -> None:
    path, rollouts = portable_file(tmp_path)
    again = read(path, ReadOptions())
    assert again.source == "portable"
    assert again.labels == rollouts.labels
    a, b = rollouts.batch, again.batch
    for name in ("mask", "turn_ids", "cu_seqlens", "lengths", "outcomes", "capped", "row_ids", "rollout_log_probs"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(a.rewards, b.rewards)
    assert torch.equal(a.groups.index, b.groups.index)
    assert torch.equal(a.token_ids.ids, b.token_ids.ids)
    with pytest.raises(FileExistsError):
        portable.write(path, a)


def test_a_minimal_portable_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "minimal.safetensors"
    tensors = {
        "cu_seqlens": torch.tensor([0, 2, 3], dtype=torch.int32),
        "mask": torch.tensor([1, 1, 1]),
        "rewards": torch.tensor([1.0, 0.0]),
        "group_ids": torch.tensor([9, 9]),
        "outcomes": torch.tensor([0, 2]),
    }
    save_file(tensors, path, {"format": "fastadv rollouts", "version": "1"})
    rollouts = read(path, ReadOptions())
    assert rollouts.labels == ["group 0"]
    assert rollouts.batch.capped.tolist() == [False, True]

    def wrong(message: str, metadata: dict[str, str] | None = None, **changes: torch.Tensor | None) -> None:
        changed = {k: v for k, v in {**tensors, **changes}.items() if v is not None}
        save_file(changed, path, {"format": "fastadv rollouts", "version": "1", **(metadata or {})})
        with pytest.raises(ReplayError, match=message):
            read(path, ReadOptions())

    wrong("has no tensor 'rewards'", rewards=None)
    wrong("holds log_probs, which the format does not know", log_probs=torch.zeros(3))
    wrong(r"rewards has shape \[3\]; expected \[2\]", rewards=torch.zeros(3))
    wrong("cu_seqlens ends at 9", cu_seqlens=torch.tensor([0, 2, 9]))
    wrong(r"outcomes\[0\] is 7", outcomes=torch.tensor([7, 0]))
    wrong("token_ids and token_cu_seqlens come together", token_ids=torch.zeros(3, dtype=torch.int32))
    wrong("not of rollouts", {"format": "other"})
    wrong("has version '2' of the format", {"version": "2"})
    wrong("group_labels is no JSON", {"group_labels": "["})
    wrong("group_labels is no JSON", {"group_labels": "[" * 90_000 + "]" * 90_000})
    wrong("rewards has dtype torch.complex64; the format has float64 or float32", rewards=torch.ones(2) * 1j)
    wrong("rewards has dtype torch.bool", rewards=torch.ones(2, dtype=torch.bool))
    wrong("rewards has dtype torch.int64", rewards=torch.ones(2, dtype=torch.int64))
    wrong("turn_ids of rollout 1 reach 1, but it has 1 token; turns count from 0", turn_ids=torch.tensor([0, 1, 1]))
    wrong("group_labels must be a list of 1 texts", {"group_labels": "[]"})


def test_a_broken_portable_file(tmp_path: Path) -> None:
    path, _ = portable_file(tmp_path)
    data = path.read_bytes()
    for cut in (20, len(data) // 2, len(data) - 1):
        broken = tmp_path / f"cut{cut}.safetensors"
        broken.write_bytes(data[:cut])
        with pytest.raises(ReplayError, match="is truncated or no safetensors file"):
            read(broken, ReadOptions())


def test_a_portable_file_that_contradicts_itself_is_noted(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "rollouts.safetensors"
    tensors = {
        "cu_seqlens": torch.arange(5),
        "mask": torch.ones(4, dtype=torch.bool),
        "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        "group_ids": torch.tensor([9, 9, 9, 9]),
        "outcomes": torch.tensor([0, 0, 1, 2]),
        "row_ids": torch.tensor([3, 4, 4, 4]),
    }
    save_file(tensors, path, {"format": "fastadv rollouts", "version": "1"})
    assert read(path, ReadOptions()).notes == [
        "1 rollout marked solved with a reward of 0 or less, 1 marked failed with more (--solved-above): outcomes are "
        "taken as the file has them",
        "2 row ids repeated: rollouts with one id share their coin",
    ]
