"""What a Gram keeps of rollouts: every arm on it is the arm on the rollouts, also after a trip through the file."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import fails, fastadv
from rollout_files import sample, write_dump, write_policy
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import fastadv as fa
from fastadv.arms.prompt_sums import prompt_sums
from fastadv.arms.rules import Condition, repeating
from fastadv.gradproj import SegmentGram, project
from fastadv.gradproj.gram_file import OLDER
from fastadv.gradproj.outline import Repeats, outline
from fastadv.gradproj.projections import apply_to_gram, turn_weights
from fastadv.outcomes import Ending
from fastadv.replay.pipeline import ReplayOptions, replay
from fastadv.replay.policy import Policy
from fastadv.replay.readers import ReadOptions, read
from fastadv.replay.requery import ask

PARAMETERS = {
    "microcoder": {"rho": 1.0, "window": 1}, "stale-tokens": {"after": 0}, "rescue": {"a": 0.5, "after": 1},
    "drop-stale": {"after": 1}, "position-buckets": {"edges": "2+5"},
}  # fmt: skip
NAMED = [named(seed=1, **PARAMETERS.get(name, {})) for name, named in fa.ARMS.items()]
BY_TOKEN = ("nat-urs", "nat-rpc", "position-buckets")  # weights of tokens, which no segment has
NEEDY = [arm for arm in NAMED if arm.needs]


def logged(seed: int) -> list[dict[str, Any]]:
    """Rollouts that ran out of everything, some in a loop, with weights that changed between their turns."""
    rng = random.Random(seed)
    exits = ("TurnLimitExceeded", "TimeLimitExceeded", "SequenceLengthLimitExceeded", None)
    found = []
    for number in range(36):
        one = sample(rng, number // 6, number)
        turns = "".join(map(str, one["loss_mask"])).replace("0", " ").split()
        newest = 9 * seed + 3 - (number // 12)  # the newest of a dump is its step, and dumps come from several
        one["weight_versions"] = [str(newest - (len(turns) - turn > 2)) for turn in range(len(turns))]
        one["tokens"][-2:] = (
            one["tokens"][-1:] * 2 if number % 3 == 0 and len(one["loss_mask"]) > 1 else one["tokens"][-2:]
        )
        if one["status"] == "truncated":
            one["metadata"] = {"exit_status": exits[number % 4]}
        found.append(one)
    return found


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("dumps")
    return [write_dump(folder / f"{seed}.pt", logged(seed)) for seed in (1, 0)]


@pytest.fixture(scope="module")
def batches(dumps: list[Path]) -> list[fa.Batch]:
    return [read(dump, ReadOptions()).batch for dump in dumps]


def gram_of(batches: list[fa.Batch]) -> SegmentGram:
    """Any Gram of these rollouts."""
    rows = [batch.segments.row_of_segment() for batch in batches]
    turns = [torch.arange(len(r)) - b.segments.offsets[r] for r, b in zip(rows, batches, strict=True)]
    first = torch.tensor([0, *(batch.num_rollouts for batch in batches)]).cumsum(0)
    gradients = torch.randn(sum(map(len, rows)), 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    all_rows = torch.cat([r + before for r, before in zip(rows, first, strict=False)])
    return SegmentGram(gradients @ gradients.T, all_rows, torch.cat(turns), 20, 20).with_rollouts(batches)


@pytest.fixture(scope="module")
def path(batches: list[fa.Batch], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "gram.safetensors"
    gram_of(batches).save(path)
    return path


@pytest.fixture(scope="module")
def gram(path: Path) -> SegmentGram:
    return SegmentGram.load(path)


OWN = fa.Arm("own", population="survivors", condition=Condition(not_repeating=1, stale_after=1))


@pytest.mark.parametrize("arm", [*NAMED, OWN], ids=lambda arm: arm.name)
def test_a_named_arm_is_the_same_through_the_file(arm: fa.Arm, gram: SegmentGram, batches: list[fa.Batch]) -> None:
    if arm.name.partition(":")[0] in BY_TOKEN:
        with pytest.raises(ValueError, match=rf"arm '{re.escape(arm.name)}' treats the tokens .* --gradients cells"):
            apply_to_gram(arm, gram)
        return
    result, statistics = apply_to_gram(arm, gram)
    direct, sums = [], None
    for batch in batches:
        frozen = arm.freeze(batch)
        applied = arm.apply(batch, frozen)
        one = turn_weights(arm, applied, batch)
        direct.append(one.advantages.values * one.weights[batch.segments.row_of_segment()])
        part = prompt_sums(arm, applied, batch, frozen)
        sums = part if sums is None else sums + part
    assert torch.equal(turn_weights(arm, result, gram.rollouts).coefficients(gram), torch.cat(direct).double())
    again = prompt_sums(arm, result, gram.rollouts, statistics, gram.tokens)
    for name, value in vars(sums).items():
        torch.testing.assert_close(getattr(again, name), value, rtol=1e-13, atol=1e-13, msg=name)
    if arm.needs:  # and what it reads made a difference, in both dumps
        plain = fa.named_arm("none")
        same = [torch.equal(arm.apply(b, arm.freeze(b)).loss_weights(b), plain.apply(b, None).weights) for b in batches]
        assert same == [False, False]


def test_the_whole_way_from_dumps(dumps: list[Path], tmp_path: Path) -> None:
    """The replay's numbers come back from its file, of each dump with the step of its own."""
    arms = (NAMED[0], *(arm for arm in NEEDY if arm.level != "token"))
    policy = Policy.load(write_policy(tmp_path / "policy"))
    result = replay(dumps, policy, ReplayOptions(arms=arms, p1_prompts=0))
    result.gram.save(tmp_path / "gram")
    answer = ask(tmp_path / "gram", list(arms))
    assert str(answer.rows) == str(result.arms)
    assert str(answer.projections) == str(result.projections)
    file = tmp_path / "arms.yaml"
    file.write_text("- compact\n- name: mine\n  endings: [timeout]\n  condition: {not_repeating: 1, stale_after: 0}\n")
    run = fastadv("compare", tmp_path / "gram", "--reference", "none", "--arm", file, "--out", tmp_path / "out.json")
    assert run.returncode == 0, run.stderr
    assert [arm["name"] for arm in json.loads((tmp_path / "out.json").read_text())["arms"]] == [
        "none",
        "compact",
        "mine",
    ]
    file.write_text("- name: x\n  colour: red\n")
    fails("compare", tmp_path / "gram", "--arm", file, message=r"--arm .*arms\.yaml: .*'colour' is no key")


def test_a_replay_takes_all_of_them(dumps: list[Path], tmp_path: Path) -> None:
    run = fastadv("replay", *dumps, "--out", tmp_path, "--arms", ",".join(arm.name for arm in NAMED))
    assert run.returncode == 0, run.stderr
    names = [arm.name for arm in NAMED]
    numbers = json.loads((tmp_path / "report.json").read_text())
    assert [arm["name"] for arm in numbers["arms"]] == names == [arm["name"] for arm in numbers["options"]["arms"]]


def test_stale_tokens_take_the_gram_where_they_are_whole_turns(batches: list[fa.Batch]) -> None:
    batch = batches[0]
    last = torch.cat([batch.turn_ids.diff() != 0, torch.tensor([True])]) & batch.mask  # last token of each turn
    newest = int(batch.versions.max())
    torn = replace(batch, versions=torch.where(last, newest + 1, batch.versions).to(torch.int32))
    arm, gram = fa.named_arm("stale-tokens:after=0"), gram_of([torn])
    with pytest.raises(ValueError, match=r"stale-tokens.* of \d+ turns of \d+, and a segment .* one coefficient"):
        project(gram, [arm], draws=5)
    (result, frozen), statistics = apply_to_gram(arm, gram), arm.freeze(torn)
    sums = prompt_sums(arm, arm.apply(torn, statistics), torn, statistics)
    again = prompt_sums(arm, result, gram.rollouts, frozen, gram.tokens)  # counts of tokens are right all the same
    assert torch.equal(again.kept_tokens, sums.kept_tokens)
    assert bool((sums.kept_tokens > 0).all() & (sums.kept_tokens < sums.tokens).all())
    late = fa.named_arm("stale-tokens:after=5")
    assert project(gram, [late, fa.named_arm("none")], draws=5)["none"].difference.value == 0


# ---- versions, endings, repeats --------------------------------------------------------------------------------------


def test_versions_come_back_token_by_token(tmp_path: Path) -> None:
    """Also where they change within a turn, where a turn has no sampled token, and outside of turns."""
    mask = torch.tensor([1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1]).bool()
    turns = torch.tensor([0, 0, 0, -1, 1, 1, 2, -1, 0, 0, 1, 1])
    versions = torch.tensor([3, 4, 3, 0, 4, 4, 0, 7, 5, 5, 0, 6])
    batch = fa.Batch.of(
        mask=mask, turn_ids=turns, versions=versions, cu_seqlens=torch.tensor([0, 8, 12]), rewards=torch.ones(2),
        group_ids=torch.zeros(2).long(), outcomes=torch.zeros(2, dtype=torch.int64),
    )  # fmt: skip
    gram_of([batch]).save(tmp_path / "gram")
    gram = SegmentGram.load(tmp_path / "gram")
    rollouts, tokens = gram.rollouts, gram.tokens
    assert tokens.tolist() == [1, 1, 1, 1, 2, 0, 2, 1]
    assert rollouts.turn_ids.tolist() == [-1, 0, 0, 0, 1, 2, 0, 1]
    assert rollouts.versions.tolist() == [7, 3, 4, 3, 4, -1, 5, 6]
    row = rollouts.rows.row_of_token().repeat_interleave(tokens)
    for turn in (-1, 0, 1, 2):
        for rollout in (0, 1):
            chosen = (row == rollout) & (rollouts.turn_ids.repeat_interleave(tokens) == turn)
            here = mask & (turns == turn) & (batch.rows.row_of_token() == rollout)
            assert rollouts.versions.repeat_interleave(tokens)[chosen].tolist() == versions[here].tolist()
    for after in range(5):
        arm = fa.named_arm(f"drop-stale:after={after}")
        assert torch.equal(arm.excluded(rollouts), arm.excluded(batch))


def test_what_one_dump_does_not_say_is_not_there(batches: list[fa.Batch]) -> None:
    first, second = batches
    known, unknown = outline(batches), torch.full_like(second.endings, Ending.UNKNOWN)
    assert torch.equal(known.rollouts.endings, torch.cat([first.endings, second.endings]))
    assert {int(outline([b]).rollouts.versions.max()) for b in batches} == {12, 3}
    newest = [int(part.max()) for part in known.rollouts.versions.split([len(outline([b]).tokens) for b in batches])]
    assert newest == [12, 12]
    for silent, name in (
        (replace(second, endings=None), "endings"),
        (replace(second, endings=unknown), "endings"),
        (replace(second, versions=None), "versions"),
    ):
        assert getattr(outline([first, silent]).rollouts, name) is None
    assert outline([first, replace(second, token_ids=None)]).repeats is None
    padded = outline([batch.padded(40) for batch in batches])
    for name in ("turn_ids", "versions", "cu_seqlens"):
        assert torch.equal(getattr(padded.rollouts, name), getattr(known.rollouts, name))
    assert torch.equal(padded.tokens, known.tokens)
    bare = replace(second, endings=None, versions=None, token_ids=None)
    for arm in NEEDY:
        with pytest.raises(ValueError, match="which the Gram does not have; the rollouts that it was made of did not"):
            project(gram_of([bare]), [arm], draws=5)


def test_repetitions_by_brute_force() -> None:
    """Any window, of rollouts that are one loop, of none, and of prompts that go on in the response."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 1, 2, 9, 16, 24, 31])
    prompts = torch.tensor([3, 9, 0, 9, 2, 0, 1])
    rows = [torch.randint(0, 2, (int(n),), generator=generator) for n in lengths + prompts]
    rows[3][:], rows[4][2:] = 1, torch.tensor([0, 1, 1, 0] * 4)
    batch = fa.Batch.of(
        mask=torch.ones(int(lengths.sum()), dtype=torch.bool), rewards=torch.zeros(7), group_ids=torch.zeros(7).long(),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0), outcomes=torch.ones(7, dtype=torch.int64),
        token_ids=fa.TokenIds(torch.cat(rows), torch.tensor([0, *(lengths + prompts)]).cumsum(0)),
    )  # fmt: skip
    repeats = outline([batch, batch.take(torch.tensor([4, 3]))]).repeats
    assert repeats.lengths[repeats.offsets[3] : repeats.offsets[4]].tolist() == [1, 2, 3, 4]
    for n in range(1, 17):
        assert repeats.of(n)[:7].tolist() == repeating("test", batch, n).tolist()
        assert repeats.of(n)[7:].tolist() == repeats.of(n)[[4, 3]].tolist()
    with pytest.raises(ValueError, match="repeating"):
        repeating("test", batch, 1, fa.Known(repeating=torch.ones(6, dtype=torch.bool)))


# ---- files -----------------------------------------------------------------------------------------------------------


def rewritten(path: Path, to: Path, changes: dict[str, Tensor | None], version: str = "2") -> Path:
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), "version": version}
    tensors = {**load_file(path), **changes}
    save_file({name: t.contiguous() for name, t in tensors.items() if t is not None}, to, metadata)
    return to


def test_a_file_of_the_older_version_is_read(gram: SegmentGram, path: Path, tmp_path: Path) -> None:
    """A run was a turn there. What it does not hold is an error that says so."""
    rollouts = gram.rollouts
    counts = torch.zeros(gram.size, dtype=torch.int64)
    segment = rollouts.rows.spread(rollouts.segments.offsets[:-1]) + rollouts.turn_ids
    changes: dict[str, Tensor | None] = dict.fromkeys(set(load_file(path)) - set(OLDER))
    changes |= {"offsets": rollouts.segments.offsets, "tokens": counts.index_add(0, segment, gram.tokens)}
    older = rewritten(path, tmp_path / "older", changes, version="1")
    assert set(load_file(older)) == set(OLDER)
    back = SegmentGram.load(older)
    for arm in NAMED:
        if arm.needs:
            with pytest.raises(ValueError, match=r"its file is of version 1, .*: write it again, with fastadv replay"):
                project(back, [arm], draws=5)
        elif arm.level != "token":
            ours, theirs = (apply_to_gram(arm, one)[0] for one in (gram, back))
            assert torch.equal(ours.advantages.values, theirs.advantages.values)
            assert torch.equal(ours.weights, theirs.weights)
    fails("compare", older, "--arm", "mini-o3", message="version 1, which holds none: write it again, with fastadv rep")
    back.save(tmp_path / "again")
    assert torch.equal(SegmentGram.load(tmp_path / "again").tokens, back.tokens)


def first(value: Tensor, number: int, at: int = 0) -> Tensor:
    changed = value.clone()
    changed[at] = number
    return changed


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("endings", lambda t: first(t, 10), r"endings\[0\] is 10; endings are SUBMITTED"),
        ("endings", lambda t: t[:-1], "endings has shape"),
        ("endings", lambda t: t.long(), "endings is torch.int64 of shape .*; the format has torch.uint8"),
        ("versions", lambda t: first(t, -1), r"versions\[0\] is -1 at a sampled token"),
        ("versions", lambda t: t[1:], "versions has shape"),
        ("versions", lambda t: t[None], "of 1 dimensions"),
        ("versions", lambda t: t.float(), "versions is torch.float32"),
        ("turn_ids", lambda t: first(t, 1), "turn_ids must begin at 0"),
        ("turn_ids", lambda t: first(t, -2), "turn_ids must begin at 0"),
        ("turn_ids", lambda t: first(t, 2**19, -1), "in each rollout and go up by 0 or 1"),
        ("turn_ids", lambda t: first(t, -(2**63), -1), "in each rollout and go up by 0 or 1"),
        ("turn_ids", lambda t: t[:-1], r"turn_ids has \d+ runs, but tokens has"),
        ("turn_ids", lambda t: t * 0, "segments are not those of the"),
        ("turn_ids", lambda t: None, "turn_ids is missing"),
        ("repeats", lambda t: first(t, 0), "repeats holds 0; a repetition has at least 1 token"),
        ("repeats", lambda t: None, "repeats is missing"),
        ("repeats", lambda t: t[:-1], "end at the number of repeats"),
        ("repeats", lambda t: t.long(), "repeats is torch.int64"),
        ("repeat_offsets", lambda t: first(t, 1), "repeat_offsets must start at 0 and not decrease"),
        ("repeat_offsets", lambda t: first(t, 2**62, 3), "repeat_offsets must start at 0 and not decrease"),
        ("repeat_offsets", lambda t: torch.cat([t, t[-1:]]), r"repeats are of 73 rollouts, but there are 72"),
        ("repeat_offsets", lambda t: t.clamp(0, 0), "end at the number of repeats"),
        ("repeat_offsets", lambda t: torch.where(t == 0, 0, t[-1]), "repeats must ascend within a rollout"),
        ("repeat_offsets", lambda t: t[:0], "end at the number of repeats"),
        ("repeat_offsets", lambda t: None, "repeat_offsets is missing"),
    ],
)
def test_fields_that_lie(path: Path, tmp_path: Path, name: str, change: Any, message: str) -> None:
    bad = rewritten(path, tmp_path / "bad.safetensors", {name: change(load_file(path)[name])})
    with pytest.raises(ValueError, match=message) as error:
        SegmentGram.load(bad)
    assert "bad.safetensors" in str(error.value)


def test_a_tensor_of_another_version_is_none_of_the_format(path: Path, tmp_path: Path) -> None:
    for version, message in (("1", "endings, repeat_offsets, repeats, turn_ids"), ("3", "this is fastadv for 1 and 2")):
        with pytest.raises(ValueError, match=message):
            SegmentGram.load(rewritten(path, tmp_path / "bad", {}, version=version))


def test_repeats_are_tensors_of_their_kind() -> None:
    with pytest.raises(TypeError, match="repeat_offsets has dtype"):
        Repeats(torch.zeros(1), torch.zeros(0, dtype=torch.int32))
