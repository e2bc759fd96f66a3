"""The file of a segment Gram: everything that arms need comes back, and nothing in a file is believed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_files import samples, write_dump
from safetensors.torch import load_file, save_file
from torch import Tensor

import fastadv as fa
from fastadv.arms import freeze, question_one_arms
from fastadv.arms.prompt_sums import prompt_sums
from fastadv.gradproj import SegmentGram, project
from fastadv.gradproj.gram import batch_fingerprint, checkpoint_fingerprint
from fastadv.gradproj.gram_file import OPTIONAL, TENSORS
from fastadv.gradproj.outline import outline
from fastadv.replay.predictions_rollouts import rollout_baselines
from fastadv.replay.readers import ReadOptions, read


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> fa.Batch:
    batch = read(write_dump(tmp_path_factory.mktemp("dump") / "d.pt", samples(5, 4)), ReadOptions()).batch
    return replace(batch, versions=torch.where(batch.mask, batch.rows.spread(batch.row_ids % 3), -1).to(torch.int32))


@pytest.fixture(scope="module")
def gram(batch: fa.Batch) -> SegmentGram:
    size = batch.segments.count
    gradients = torch.randn(size, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = batch.segments.row_of_segment()
    bare = SegmentGram(
        gradients @ gradients.T, rows, torch.arange(size) - batch.segments.offsets[rows], 40, 50, temperature=0.7,
        dtype="bfloat16", checkpoint="c0ffee",
    )  # fmt: skip
    return bare.with_rollouts(batch, notes=["d.pt: said \x1b[31m"])


def test_what_is_saved_comes_back(gram: SegmentGram, tmp_path: Path) -> None:
    path = tmp_path / "gram.safetensors"
    path.write_text("an earlier one")
    gram.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["gram.safetensors"]
    back = SegmentGram.load(path)
    for name in ("gram", "rows", "turns", "tokens"):
        assert torch.equal(getattr(back, name), getattr(gram, name))
    for name in ("covered", "total", "temperature", "dtype", "checkpoint", "batch", "notes", "level", "size"):
        assert getattr(back, name) == getattr(gram, name)
    for name in ("rewards", "outcomes", "capped", "row_ids", "turn_ids"):
        assert torch.equal(getattr(back.rollouts, name), getattr(gram.rollouts, name))
    arms = question_one_arms(seed=2)
    ours, theirs = (project(one, arms, draws=20, seed=1) for one in (gram, back))
    assert str(ours) == str(theirs)  # a NaN is not equal to itself


def test_the_outline_counts_the_tokens_that_were_sampled(batch: fa.Batch) -> None:
    """Arms' sums over tokens come out the same; turns without a sampled token are turns all the same."""
    silent = replace(batch, mask=batch.mask & ~((batch.turn_ids == 1) & (batch.rows.row_of_token() % 2 == 0)))
    for one in (batch, silent):
        rollouts, tokens, _ = outline([one])
        assert torch.equal(rollouts.segments.offsets, one.segments.offsets)
        assert int(tokens.sum()) == int((one.mask & (one.turn_ids >= 0)).sum())
        for arm in question_one_arms():
            full = prompt_sums(arm, arm.apply(one, freeze(one)), one, freeze(one))
            short = prompt_sums(arm, arm.apply(rollouts, freeze(rollouts)), rollouts, freeze(rollouts), tokens)
            for name, value in vars(full).items():
                torch.testing.assert_close(getattr(short, name), value, rtol=1e-14, atol=0)
            # b of a rollout is the same in P2, which has the outline, as in the table of arms.
            b = rollout_baselines(arm, rollouts, tokens)
            torch.testing.assert_close(b, rollout_baselines(arm, one), rtol=1e-14, atol=0)
            by_prompt = torch.zeros_like(full.baseline).index_add(0, one.groups.index, b)
            torch.testing.assert_close(by_prompt, full.baseline, rtol=1e-13, atol=0)
    assert bool((outline([silent])[1] == 0).any())
    with pytest.raises(ValueError, match="no batch was given"):
        outline([])


def test_fingerprints_notice_a_change(batch: fa.Batch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    first = checkpoint_fingerprint(model)
    assert checkpoint_fingerprint(model) == first
    with torch.no_grad():
        model[1].bias[2] = torch.nextafter(model[1].bias[2], torch.tensor(9.0))
    assert checkpoint_fingerprint(model) != first
    assert checkpoint_fingerprint(model.to(torch.bfloat16)) != first
    ids = fa.TokenIds(batch.token_ids.ids.clone(), batch.token_ids.cu_seqlens)
    before = batch_fingerprint([batch])
    assert batch_fingerprint([replace(batch, token_ids=ids)]) == before
    ids.ids[0] += 1
    assert batch_fingerprint([replace(batch, token_ids=ids)]) != before
    assert batch_fingerprint([replace(batch, mask=~batch.mask)]) != before


def test_a_gram_without_rollouts_is_not_saved(gram: SegmentGram, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="take with_rollouts first"):
        replace(gram, rollouts=None, tokens=None).save(tmp_path / "x")
    with pytest.raises(OSError, match="absent is no folder"):
        gram.save(tmp_path / "absent" / "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="is a folder; name a file in it"):
        gram.save(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


# ---- what no Gram is -------------------------------------------------------------------------------------------------


def at(value: Tensor, where: Any, number: float) -> Tensor:
    changed = value.clone()
    changed[where] = number
    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: {"gram": g.gram[:-1]}, r"expected \[S, S\], \[S\] and \[S\]"),
        (lambda g: {"gram": g.gram.float()}, "gram has dtype torch.float32"),
        (
            lambda g: {"gram": at(g.gram, (3, 3), -1.0)},
            r"gram\[3, 3\] is -1.0; a squared norm is finite",
        ),
        (lambda g: {"gram": at(g.gram, (3, 3), math.nan)}, r"gram\[3, 3\] is nan"),
        (lambda g: {"gram": at(g.gram, (3, 3), math.inf)}, r"gram\[3, 3\] is inf"),
        (lambda g: {"gram": at(g.gram, (3, 4), math.nan)}, r"gram\[3, 4\] is nan; an inner product is at most"),
        (lambda g: {"gram": at(g.gram, (3, 4), 1e9)}, r"gram\[3, 4\] is 1000000000.0; an inner product is at most"),
        (lambda g: {"gram": at(g.gram, (3, 4), float(g.gram[3, 4]) + 0.01)}, "it must be symmetric"),
        (lambda g: {"rows": g.rows.int()}, "rows has dtype torch.int32"),
        (lambda g: {"rows": g.rows.flip(0)}, "rows must not decrease, and turns count from 0 within each"),
        (lambda g: {"rows": g.rows - 1}, "rows must not decrease"),
        (lambda g: {"turns": at(g.turns, 0, 1)}, "turns count from 0 within each"),
        (lambda g: {"turns": at(g.turns, 0, -1)}, "turns below 0 mean one segment a rollout"),
        (lambda g: {"covered": 51}, "covered is 51; it must be from 0 to 50"),
        (lambda g: {"covered": -1}, "covered is -1; it must be from 0 to 50"),
        (lambda g: {"temperature": 0.0}, "temperature is 0; it must be finite and positive"),
        (lambda g: {"temperature": math.inf}, "temperature is inf"),
        (lambda g: {"tokens": None}, "rollouts and tokens come together"),
        (lambda g: {"tokens": g.tokens[:-1]}, "tokens"),
        (lambda g: {"tokens": at(g.tokens, 2, -5)}, "tokens holds -5; counts are from 0"),
        (lambda g: {"tokens": at(g.tokens, 2, 2**62)}, "tokens holds 4611686018427387904; all together .* at most 2"),
        (lambda g: {"rollouts": g.rollouts.select(g.rollouts.row_ids < 7), "tokens": g.tokens}, "tokens"),
    ],
)
def test_parts_that_do_not_fit(gram: SegmentGram, change: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        replace(gram, **change(gram))


def test_products_of_float32_gradients_are_close_enough_to_symmetric(gram: SegmentGram) -> None:
    """Rounding is no fault, for parallel gradients either."""
    rounded = gram.gram * (1 + 1e-7 * torch.randn(gram.gram.shape, generator=torch.Generator().manual_seed(0)).double())
    assert replace(gram, gram=rounded).size == gram.size
    ones = torch.ones(gram.size, gram.size, dtype=torch.float64)
    ones[0, 1] = 1 + 1e-7
    assert replace(gram, gram=ones).size == gram.size
    empty = torch.zeros(0, dtype=torch.int64)
    assert SegmentGram(torch.zeros(0, 0, dtype=torch.float64), empty, empty, 0, 0).level == "turn"


# ---- files that lie --------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(gram: SegmentGram, tmp_path: Path) -> Path:
    gram.save(tmp_path / "gram.safetensors")
    return tmp_path / "gram.safetensors"


def metadata_of(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def refused(path: Path, message: str, tensors: dict[str, Tensor] | None = None, **metadata: str) -> None:
    """The file with these parts instead of its own is refused, and the message names it."""
    given = {**load_file(path), **(tensors or {})}
    bad = path.with_name("bad.safetensors")
    kept = {name: t.contiguous() for name, t in given.items() if t is not None}
    save_file(kept, bad, {**metadata_of(path), **metadata})
    with pytest.raises(ValueError, match=message) as error:
        SegmentGram.load(bad)
    assert "bad.safetensors" in str(error.value)


def message_of(path: Path) -> str | None:
    """Why a file cannot be read; None where it can, and arms can be asked about."""
    try:
        gram = SegmentGram.load(path)
    except ValueError as error:
        return str(error)
    project(gram, [*question_one_arms(), *map(fa.named_arm, ("compact", "rescue", "microcoder"))], draws=5)
    return None


@pytest.mark.parametrize("name", [*TENSORS, *OPTIONAL])
def test_any_tensor_of_a_file(saved: Path, name: str) -> None:
    """In every dtype, shape and with every number at either end: refused or read, and never another error."""
    good = load_file(saved)[name]
    if name in TENSORS:
        refused(saved, f"{name} is missing", {name: None})
    odd = [good.to(dtype) for dtype in (torch.float32, torch.int8, torch.float16, torch.bfloat16)]
    odd += [good[:-1], torch.cat([good, good[-1:]]), good[:0], good[None], good.flatten()[0]]
    for value in (-(2**62), -2, -1, 2, 2**40, 2**62, math.nan, math.inf):
        if good.dtype.is_floating_point or isinstance(value, int):
            limit = value if good.dtype in (torch.int64, torch.float64) else int(value) % 200
            odd += [at(good, (0,) * good.dim(), limit), at(good, (-1,) * good.dim(), limit)]
    outcomes = []
    for number, tensor in enumerate(odd):
        path = saved.with_name(f"{number}.safetensors")
        save_file({**load_file(saved), name: tensor.contiguous()}, path, metadata_of(saved))
        message = message_of(path)
        outcomes.append(message)
        assert message is None or path.name in message
    assert sum(message is not None for message in outcomes) >= 8


def test_rollouts_without_a_result_are_refused(saved: Path) -> None:
    outcomes = load_file(saved)["outcomes"]
    refused(saved, "outcomes holds 3; a result is 0, 1 or 2", {"outcomes": at(outcomes, 0, 3)})


def test_metadata_that_lies(saved: Path) -> None:
    about = json.loads(metadata_of(saved)["about"])
    refused(saved, "is no segment Gram: its metadata has no format", format="fastadv rollouts")
    refused(saved, "has version '3' of the format; this is fastadv for 1 and 2", version="3")
    refused(saved, "more is missing, or not of the format", {"more": torch.zeros(1)})
    refused(saved, "its metadata is no JSON", about="{")
    refused(saved, "its metadata is no JSON", about="[" * 100_000)
    refused(saved, "must have the keys covered, total", about="[]")
    refused(saved, "must have the keys covered, total", about=json.dumps({**about, "more": 1}))
    refused(saved, "at most 1,048,576 are read", about=json.dumps({**about, "notes": ["x" * 2**20]}))
    for name, value, message in (
        ("covered", 1.5, "covered in its metadata is a float"),
        ("covered", True, "covered in its metadata is a bool"),
        ("covered", 51, "covered is 51; it must be"),
        ("temperature", "1", "temperature in its metadata is a str"),
        ("temperature", 10**400, "temperature in its metadata is not finite"),
        ("temperature", -1.0, "temperature is -1; it must be"),
        ("notes", "x", "notes in its metadata is a str"),
        ("notes", [1], "notes in its metadata must be texts"),
        ("dtype", None, "dtype in its metadata is a NoneType"),
    ):
        refused(saved, message, about=json.dumps({**about, name: value}))


def test_files_that_are_none(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="is truncated or no safetensors file"):
        SegmentGram.load(tmp_path / "text")
    (tmp_path / "half").write_bytes(saved.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is truncated or no safetensors file"):
        SegmentGram.load(tmp_path / "half")
    with pytest.raises(OSError, match="No such file"):
        SegmentGram.load(tmp_path / "absent")
    with pytest.raises((OSError, ValueError)):
        SegmentGram.load(tmp_path)


def test_a_few_bytes_do_not_become_gigabytes(saved: Path) -> None:
    tensors = load_file(saved)
    offsets = tensors["offsets"].clone()
    offsets[-1] = 2**40
    refused(saved, "offsets end at 1099511627776, but tokens has", {"offsets": offsets})
    offsets[-1], offsets[1] = int(tensors["offsets"][-1]), -(2**62)
    refused(saved, "offsets must start at 0 and not decrease", {"offsets": offsets})
    refused(saved, "offsets must start at 0 and not decrease", {"offsets": at(tensors["offsets"], 0, 1)})
    many = at(tensors["tokens"], 0, 2**52)
    save_file({**tensors, "tokens": many}, saved, metadata_of(saved))
    assert int(SegmentGram.load(saved).tokens[0]) == 2**52  # counts are numbers, nothing is made of their size
