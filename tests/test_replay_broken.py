"""Dumps and options in which any number, list or offset may lie: a message, never a traceback, and nothing is written.

Every field of every format is replaced by every kind of value that a file can hold. What comes of it is a replay or a
ReplayError; anything else fails.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_files import sample, samples, write_dump, write_policy, write_verl
from safetensors.torch import save_file
from test_cli import fails, fastadv

from fastadv.replay.errors import ReplayError, plain
from fastadv.replay.pipeline import ReplayOptions, replay
from fastadv.replay.policy import Policy
from fastadv.replay.readers import ReadOptions, Rollouts, read
from fastadv.replay.readers.rollouts import LARGEST_REWARD, label_text
from fastadv.replay.report import as_json, tables


def deep(levels: int = 3000) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


NUMBERS = [
    0, 1, -1, 2**31, 2**62, 2**63, -(2**63) - 1, 2**70, 10**400, True, 0.0, 0.5, 1e30, 1.1e30, 1e308, -1e308, 5e-324,
    math.nan, math.inf, -math.inf,
]  # fmt: skip
OTHERS = [
    None, "", "7", "nan", "\ud800", "\x1b[31m", b"bytes", 1j, [], [1], {}, {"a": 1}, (), torch.zeros(()), torch.ones(2),
    torch.zeros(0), torch.tensor(1j), torch.ones(2, 2), torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
]  # fmt: skip


def entries_of(length: int) -> list[Any]:
    """Lists of a field's own length in which one entry is odd, and lists of other lengths."""
    odd = [[1] * (length - 1) + [value] for value in [*NUMBERS, None, "1", "x", [1], {}, 1j, b"1"]]
    return [*odd, [1] * (length + 1), [1] * max(0, length - 1), [True] * length, [[1]] * length, [None] * length]


def message_of(path: Path) -> str | None:
    """Why a file cannot be read; None where it can."""
    try:
        assert isinstance(read(path, ReadOptions()), Rollouts)
    except ReplayError as error:
        message = plain(str(error))
        return message if path.name in message else pytest.fail(message)
    return None


def replays(*paths: Path) -> None:
    """What could be read can be replayed, shown and saved."""
    result = replay(list(paths), None, ReplayOptions())
    json.loads(as_json(result))
    assert tables(result)


FIELDS = ["index", "group_index", "prompt", "tokens", "response_length", "reward", "loss_mask", "rollout_log_probs"]
FIELDS += ["status", "metadata", "remove_sample", "rollout_id", "prompt_chat", "exit_status", "instance_id", "others"]
FIELDS += ["weight_versions"]
FREE = ("prompt", "prompt_chat", "exit_status", "instance_id", "others", "weight_versions")  # nothing is refused


def changed(good: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    if field == "prompt_chat":
        return {**good, "prompt": [{"role": "user", "content": value}]}
    if field in ("exit_status", "instance_id"):
        return {**good, "metadata": {field: value}}
    if field == "others":
        return {name: entry if name in FIELDS else value for name, entry in good.items()}
    return {**good, field: value}


@pytest.mark.parametrize("field", FIELDS)
def test_any_value_in_any_field_of_a_miles_sample(tmp_path: Path, field: str) -> None:
    good = sample(random.Random(1), 0, 1)
    values = [*NUMBERS, *OTHERS, deep(), *entries_of(good["response_length"]), *entries_of(len(good["tokens"]))]
    accepted, refused = [sample(random.Random(0), 0, 0)], 0
    for value in values:
        entry = changed(good, field, value)
        try:
            path = write_dump(tmp_path / "dump.pt", [entry])
        except (RecursionError, TypeError, ValueError, OverflowError):  # what torch.save cannot write, no dump holds
            continue
        if message_of(path) is None:
            accepted.append(entry)
        else:
            refused += 1
    assert (refused > 0) == (field not in FREE)
    assert len(accepted) > 1 or field in ("status", "response_length")
    if field != "rollout_id":  # several of one number are a mistake of their own
        replays(write_dump(tmp_path / "dump.pt", accepted))


PORTABLE = {
    "cu_seqlens": torch.tensor([0, 2, 5]),
    "mask": torch.ones(5, dtype=torch.bool),
    "rewards": torch.tensor([1.0, 0.0]),
    "group_ids": torch.tensor([3, 3]),
    "outcomes": torch.tensor([0, 2], dtype=torch.uint8),
    "turn_ids": torch.tensor([0, 1, 0, 0, 1], dtype=torch.int32),
    "capped": torch.tensor([False, True]),
    "row_ids": torch.tensor([7, 8]),
    "rollout_log_probs": torch.zeros(5),
    "token_ids": torch.arange(8, dtype=torch.int32),
    "token_cu_seqlens": torch.tensor([0, 3, 8]),
}
DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
)  # fmt: skip


def write_portable(path: Path, **changes: Any) -> Path:
    tensors = {name: t.contiguous() for name, t in {**PORTABLE, **changes}.items() if t is not None}
    save_file(tensors, path, {"format": "fastadv rollouts", "version": "1"})
    return path


def odd_tensors(good: torch.Tensor) -> list[torch.Tensor]:
    """The tensor in every dtype, at other lengths and shapes, and with every number at either end."""
    found = [good.to(dtype) for dtype in DTYPES]
    found += [good[:-1], torch.cat([good, good[-1:]]), good[:0], good[None], good[0], good.flip(0).clone()]
    for dtype in (torch.int64, torch.float64):
        for value in (-(2**62), -2, -1, 0, 1, 2, 3, 2**20, 2**30, 2**31, 2**62, math.nan, math.inf, -math.inf, 1e308):
            if dtype == torch.int64 and not isinstance(value, int):
                continue
            for at in (0, -1):
                changed = good.to(dtype, copy=True)
                changed[at] = value
                found.append(changed)
    return found


@pytest.mark.parametrize("name", PORTABLE)
def test_any_tensor_in_a_portable_file(tmp_path: Path, name: str) -> None:
    accepted = [write_portable(tmp_path / "good.safetensors")]
    messages = []
    for number, tensor in enumerate(odd_tensors(PORTABLE[name])):
        path = write_portable(tmp_path / f"{number}.safetensors", **{name: tensor})
        message = message_of(path)
        if message is None:
            accepted.append(path)
        else:
            messages.append(message)
    other = {"cu_seqlens": "mask", "token_cu_seqlens": "token_ids"}.get(name, name)
    assert any(name in message or other in message for message in messages)
    replays(*accepted[:: max(1, len(accepted) // 8)])


@pytest.mark.parametrize("field", ["input", "output", "score", "step"])
def test_any_value_in_any_field_of_a_verl_log(tmp_path: Path, field: str) -> None:
    values = [*NUMBERS, *(v for v in OTHERS if not isinstance(v, (bytes, complex, torch.Tensor))), deep(900)]
    accepted = [{"input": "q", "output": "a", "score": 1.0, "step": 1}]
    for value in values:
        line = {**accepted[0], field: value}
        if message_of(write_verl(tmp_path / "1.jsonl", [line])) is None:
            accepted.append(line)
    replays(write_verl(tmp_path / "1.jsonl", accepted))


def test_scores_that_are_missing_are_noted(tmp_path: Path) -> None:
    lines = [{"input": "q", "output": "a", "score": score, "step": 1} for score in (None, math.nan, 1.0)]
    notes = read(write_verl(tmp_path / "1.jsonl", lines), ReadOptions()).notes
    assert notes[1:] == ["2 rollouts without a score (null or NaN): counted as INFRA"]


# ---- what the messages say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_cu_seqlens": torch.tensor([0, 3, 9])}, "token_cu_seqlens ends at 9, but token_ids has 8 tokens"),
        ({"token_cu_seqlens": torch.tensor([1, 3, 8])}, "token_cu_seqlens starts at 1; it must start at 0"),
        ({"token_cu_seqlens": torch.tensor([0, 1, 8])}, "token_ids has 1 tokens for rollout 0, fewer tokens than its"),
        ({"token_ids": torch.arange(8, dtype=torch.int32) - 3}, r"token_ids\[0\] is -3; ids are from 0 to 2147483647"),
        ({"token_ids": torch.arange(8.0)}, r"token_ids has dtype torch\.float32"),
        ({"turn_ids": torch.full((5,), 2**30)}, "turn_ids reaches 1073741824"),
        (
            {"rewards": torch.tensor([1e31, 0.0])},
            r"rewards\[0\] is 9\.99\d*e\+30; a reward is finite and at most 1e\+30",
        ),
        ({"rewards": torch.tensor([math.inf, 0.0])}, r"rewards\[0\] is inf"),
    ],
)
def test_a_portable_file_that_lies(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path, out = write_portable(tmp_path / "rollouts.safetensors", **changes), tmp_path / "out"
    fails("replay", path, "--out", out, message=message)
    assert not out.exists()


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_offsets_in_a_file_are_checked_whatever_the_environment_says(tmp_path: Path, mode: str) -> None:
    import fastadv as fa

    path = write_portable(tmp_path / "rollouts.safetensors", cu_seqlens=torch.tensor([0, 2, 9]))
    with fa.checks(mode), pytest.raises(ReplayError, match="cu_seqlens ends at 9, but mask has 5 tokens"):
        read(path, ReadOptions())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": 2**70}, "sample 1: 'index' has 71 bits; it must fit into 64"),
        ({"rollout_id": [5]}, "sample 1: 'rollout_id' is a list; it must be an integer or a text"),
        ({"rollout_id": {}}, "sample 1: 'rollout_id' is a dict"),
        ({"reward": 10**400}, "sample 1: the reward is an integer of 1329 bits; a reward is finite and at most"),
        ({"reward": math.inf}, "sample 1: the reward is inf; a reward is finite"),
        ({"reward": torch.ones(2)}, "sample 1: the reward is a Tensor; a reward is a number"),
        ({"remove_sample": torch.ones(2)}, "sample 1: 'remove_sample' is a Tensor"),
        ({"tokens": [1.5] * 50}, "sample 1: 'tokens' holds a number that is not whole"),
        ({"tokens": ["7"] * 50}, "sample 1: 'tokens' holds something that is no number"),
        ({"tokens": [math.nan] * 50}, "sample 1: 'tokens' holds a number that is not whole"),
    ],
)
def test_a_miles_dump_that_lies(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    entries = [sample(random.Random(0), 0, 0), {**sample(random.Random(1), 0, 1), **changes}]
    out = tmp_path / "out"
    fails("replay", write_dump(tmp_path / "dump.pt", entries), "--out", out, message=message)
    assert not out.exists()


@pytest.mark.parametrize("bad", ["1", math.inf, math.nan, 1e300, [1]])
def test_a_loss_mask_of_what_is_no_whole_number(tmp_path: Path, bad: Any) -> None:
    entry = sample(random.Random(0), 0, 0)
    entry["loss_mask"] = [bad, *entry["loss_mask"][1:]]
    path = write_dump(tmp_path / "dump.pt", [entry])
    if bad == 1e300:  # a whole number
        assert isinstance(read(path, ReadOptions()), Rollouts)
        return
    with pytest.raises(ReplayError, match="'loss_mask' holds"):
        read(path, ReadOptions())


def test_lists_as_tensors_of_any_dtype(tmp_path: Path) -> None:
    entry = sample(random.Random(0), 0, 0)
    plainly = read(write_dump(tmp_path / "a.pt", [entry]), ReadOptions()).batch
    entry["rollout_log_probs"] = torch.tensor(entry["rollout_log_probs"], dtype=torch.bfloat16, requires_grad=True)
    entry["loss_mask"] = torch.tensor(entry["loss_mask"], dtype=torch.float16)
    entry["tokens"] = torch.tensor(entry["tokens"], dtype=torch.uint8)
    batch = read(write_dump(tmp_path / "b.pt", [entry]), ReadOptions()).batch
    assert torch.equal(batch.mask, plainly.mask)
    assert torch.equal(batch.token_ids.ids, plainly.token_ids.ids)
    torch.testing.assert_close(batch.rollout_log_probs, plainly.rollout_log_probs, rtol=1e-2, atol=1e-2)


def test_a_verl_log_that_lies(tmp_path: Path) -> None:
    line = {"input": "q", "output": "a", "score": 10**400, "step": 1}
    with pytest.raises(ReplayError, match="line 1: 'score' is an integer of 1329 bits"):
        read(write_verl(tmp_path / "1.jsonl", [line]), ReadOptions())
    with pytest.raises(ReplayError, match="line 1: 'score' is inf"):
        read(write_verl(tmp_path / "1.jsonl", [{**line, "score": math.inf}]), ReadOptions())
    with pytest.raises(ReplayError, match="line 1: 'input' is a list, not the prompt's text"):
        read(write_verl(tmp_path / "1.jsonl", [{**line, "score": 1, "input": []}]), ReadOptions())


def test_the_largest_reward_gives_finite_numbers(tmp_path: Path) -> None:
    entries = [{**entry, "reward": LARGEST_REWARD * (-1) ** i} for i, entry in enumerate(samples(3, 4))]
    policy = Policy.load(write_policy(tmp_path / "policy"))
    result = replay([write_dump(tmp_path / "dump.pt", entries)], policy, ReplayOptions(cap_reward="logged"))
    assert all(math.isfinite(row.second_moment) and math.isfinite(row.variance) for row in result.arms)
    assert all(math.isfinite(row.norm) for row in result.gradients)


def test_a_label_is_short_however_deep_its_object(tmp_path: Path) -> None:
    assert label_text([{"role": "user", "content": "  hello\n there "}]) == "hello there"
    assert label_text("task 5", "id-5") == "id-5: task 5"
    assert label_text("x" * 100, width=10) == "x" * 9 + "…"
    assert label_text(7, 5) == "5: 7"
    assert label_text(10**5000, [1]) == "(no text: int)"
    assert len(label_text("x" * 10**8, "y" * 10**8)) == 80
    assert len(label_text(deep(10**5), {"a": [1] * 1000})) <= 80


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.5, None])
def test_a_log_prob_that_no_token_has(tmp_path: Path, bad: float | None) -> None:
    entries = samples(2, 3)
    entries[1]["rollout_log_probs"][0] = bad
    with pytest.raises(ReplayError, match=r"sample 1: 'rollout_log_probs'\[0\] is \S+ at a sampled token"):
        read(write_dump(tmp_path / "dump.pt", entries), ReadOptions())
    values = torch.tensor([0.0, 0, 0, math.nan if bad is None else bad, 0])
    with pytest.raises(ReplayError, match=r"rollout 1: 'rollout_log_probs'\[1\] is"):
        read(write_portable(tmp_path / "rollouts.safetensors", rollout_log_probs=values), ReadOptions())
    mask = torch.tensor([True, True, True, False, True])  # anything where the mask is 0
    read(write_portable(tmp_path / "rollouts.safetensors", rollout_log_probs=values, mask=mask), ReadOptions())


def test_a_dump_without_a_sampled_token_is_refused(tmp_path: Path) -> None:
    entries = [{**entry, "loss_mask": [0] * entry["response_length"]} for entry in samples(2, 3)]
    policy = Policy.load(write_policy(tmp_path / "policy"))
    result = replay([write_dump(tmp_path / "dump.pt", entries)], policy, ReplayOptions())
    assert result.files[0].refused == "no rollout has a sampled token"
    assert result.predictions == []


# ---- options and places ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("option", ["--solved-above", "--temperature", "--kappa", "--max-memory"])
def test_an_option_that_is_no_number(tmp_path: Path, option: str, value: str) -> None:
    dump, out = write_dump(tmp_path / "dump.pt", samples(2, 2)), tmp_path / "out"
    fails(
        "replay",
        dump,
        "--out",
        out,
        option,
        value,
        message=f"{option}.*(is {value}; it must be finite|greater than or equal to 0|range)",
    )
    assert not out.exists()
    if option == "--solved-above":
        fails("convert", dump, tmp_path / "out.safetensors", option, value, message="it must be finite")
        with pytest.raises(ReplayError, match="--solved-above is"):
            ReadOptions(solved_above=float(value))
    if option == "--kappa":
        with pytest.raises(ReplayError, match="--kappa is"):
            ReplayOptions(kappa=float(value))
    if option == "--temperature":
        with pytest.raises(ReplayError, match="--temperature is"):
            Policy(torch.nn.Linear(1, 1), 1, None, float(value))


@pytest.mark.parametrize("options", [["--seed", 10**30], ["--seed", -(10**30)], ["--max-memory", 1e308]])
def test_an_option_that_is_a_large_number(tmp_path: Path, options: list[Any]) -> None:
    run = fastadv("replay", write_dump(tmp_path / "dump.pt", samples(2, 2)), "--out", tmp_path / "out", *options)
    assert run.returncode == 0, run.stderr


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    dump, file = write_dump(tmp_path / "dump.pt", samples(2, 2)), tmp_path / "file"
    file.write_text("mine")
    fails("replay", dump, "--out", file / "below" / "it", message=r"below/it cannot be made: .*file is a file")
    fails("replay", dump, "--out", tmp_path / ("x" * 300), message="cannot be written: File name too long")
    (tmp_path / "loop").symlink_to(tmp_path / "nowhere" / "at all")
    fails("replay", dump, "--out", tmp_path / "loop", message="loop cannot be written: File exists")
    if sys.platform == "linux":
        fails("replay", dump, "--out", "/proc/report", message="/proc/report cannot be written")
    fails("convert", dump, file / "out.safetensors", message=r"cannot be written: .*file is no folder")
    fails("convert", dump, tmp_path / "absent" / "out.safetensors", message="absent is no folder")
    fails("convert", dump, tmp_path / ("x" * 300), message="cannot be written: File name too long")
    assert file.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dump.pt", "file", "loop"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_does_not_allow_it(tmp_path: Path) -> None:
    dump, closed = write_dump(tmp_path / "dump.pt", samples(2, 2)), tmp_path / "closed"
    closed.mkdir(mode=0o500)
    fails("replay", dump, "--out", closed / "out", message="closed does not allow it")
    closed.chmod(0)
    fails("replay", closed, "--out", tmp_path / "out", message="closed cannot be listed: Permission denied")


def test_a_page_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    dump, out = write_dump(tmp_path / "dump.pt", samples(2, 2)), tmp_path / "out"
    (out / "report.html").mkdir(parents=True)
    fails("replay", dump, "--out", out, "--overwrite", message="out cannot be written: Is a directory")
    assert [p.name for p in out.iterdir()] == ["report.html"]


def test_a_message_is_one_line_that_no_terminal_acts_on(tmp_path: Path) -> None:
    torch.save({"\x1b[31mred\nline": 1}, tmp_path / "dump.pt")
    run = fastadv("replay", tmp_path / "dump.pt", "--out", tmp_path / "out")
    assert run.returncode == 2
    assert "\x1b" not in run.stderr
    assert run.stderr.count("\n") == 1
    assert "it holds  [31mred line" in run.stderr
