"""The file of a segment Gram, docs/gram_file.md: written whole, and read without believing anything in it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastadv import validation
from fastadv.batch import Batch
from fastadv.gradproj.gram import SegmentGram
from fastadv.gradproj.outline import Repeats
from fastadv.outcomes import Outcome

FORMAT, VERSION = "fastadv segment gram", "2"
OLDER = {
    "gram": torch.float64, "rows": torch.int64, "turns": torch.int64, "offsets": torch.int64, "tokens": torch.int64,
    "rewards": torch.float64, "group_ids": torch.int64, "outcomes": torch.uint8, "capped": torch.bool,
    "row_ids": torch.int64,
}  # fmt: skip
TENSORS = {**OLDER, "turn_ids": torch.int64}
OPTIONAL = {
    "endings": torch.uint8, "versions": torch.int32, "repeat_offsets": torch.int64, "repeats": torch.int32,
}  # fmt: skip
REQUIRED = {"1": OLDER, VERSION: TENSORS}  # by version
LARGEST_NOTES = 2**20  # characters of metadata that are looked into


def write(gram: SegmentGram, path: Path) -> None:
    """What `SegmentGram.save` does."""
    if gram.rollouts is None or gram.tokens is None:
        raise ValueError("SegmentGram.save: no arm can be computed without the rollouts; take with_rollouts first")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"SegmentGram.save: {path} cannot be written: {path.parent} is no folder")
    if path.is_dir():
        raise IsADirectoryError(f"SegmentGram.save: {path} is a folder; name a file in it")
    batch = gram.rollouts
    about = {
        "covered": gram.covered, "total": gram.total, "temperature": gram.temperature, "dtype": gram.dtype,
        "checkpoint": gram.checkpoint, "batch": gram.batch, "notes": list(gram.notes),
    }  # fmt: skip
    optional = {
        "endings": None if batch.endings is None else batch.endings.to(torch.uint8),
        "versions": batch.versions,
        "repeat_offsets": None if gram.repeats is None else gram.repeats.offsets,
        "repeats": None if gram.repeats is None else gram.repeats.lengths,
    }
    assert batch.cu_seqlens is not None
    tensors = {
        "gram": gram.gram, "rows": gram.rows, "turns": gram.turns, "offsets": batch.cu_seqlens,
        "turn_ids": batch.turn_ids.to(torch.int64), "tokens": gram.tokens, "rewards": batch.rewards,
        "group_ids": batch.groups.index, "outcomes": batch.outcomes.to(torch.uint8), "capped": batch.capped,
        "row_ids": batch.row_ids, **{name: tensor for name, tensor in optional.items() if tensor is not None},
    }  # fmt: skip
    metadata = {"format": FORMAT, "version": VERSION, "about": json.dumps(about)}
    handle, name = tempfile.mkstemp(dir=path.parent)
    os.close(handle)
    try:
        save_file({key: t.cpu().contiguous() for key, t in tensors.items()}, name, metadata)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException as error:
        os.unlink(name)
        if isinstance(error, SafetensorError):
            raise OSError(f"safetensors: {error}") from error
        raise


def read(path: Path) -> SegmentGram:
    """What `SegmentGram.load` does."""
    tensors, about, version = _read(path)
    if bool((tensors["outcomes"] > Outcome.BUDGET).any()):
        raise ValueError(f"{path}: outcomes holds {int(tensors['outcomes'].max())}; a result is 0, 1 or 2")
    try:
        with validation.checks("on"):  # a file's offsets are not trusted, whatever FASTADV_CHECKS says
            rollouts = Batch.of(
                mask=tensors["tokens"] > 0, turn_ids=_turn_ids(tensors), cu_seqlens=tensors["offsets"],
                rewards=tensors["rewards"], group_ids=tensors["group_ids"], outcomes=tensors["outcomes"],
                capped=tensors["capped"], row_ids=tensors["row_ids"], endings=tensors.get("endings"),
                versions=tensors.get("versions"),
            )  # fmt: skip
            repeats = Repeats(tensors["repeat_offsets"], tensors["repeats"]) if "repeats" in tensors else None
            return SegmentGram(
                tensors["gram"], tensors["rows"], tensors["turns"], rollouts=rollouts, tokens=tensors["tokens"],
                repeats=repeats, file_version=int(version), **about,
            )  # fmt: skip
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _turn_ids(tensors: dict[str, Tensor]) -> Tensor:
    """Turn of each run, `[R]` int64, after checks that come before anything is made of a turn's size."""
    offsets, tokens = tensors["offsets"], tensors["tokens"]
    if int(offsets[-1]) != tokens.shape[0]:
        raise ValueError(f"offsets end at {int(offsets[-1])}, but tokens has {tokens.shape[0]} runs")
    lengths = offsets.diff()
    if int(offsets[0]) != 0 or bool((lengths < 0).any()):
        raise ValueError("offsets must start at 0 and not decrease")
    begin = torch.repeat_interleave(offsets[:-1], lengths, output_size=tokens.shape[0])
    place = torch.arange(tokens.shape[0]) - begin
    if "turn_ids" not in tensors:  # version 1: a run is a turn
        return place
    turns = tensors["turn_ids"]
    if turns.shape != tokens.shape:
        raise ValueError(f"turn_ids has {turns.shape[0]} runs, but tokens has {tokens.shape[0]}")
    step = torch.cat([turns[:1], turns.diff()])
    first = place == 0
    if bool((first & ~((turns == 0) | (turns == -1))).any()) or bool((~first & ~((step == 0) | (step == 1))).any()):
        raise ValueError("turn_ids must begin at 0 (or -1, outside of turns) in each rollout and go up by 0 or 1")
    return turns


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name the Gram in it, such as {path / 'gram.safetensors'}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} is no segment Gram: its metadata has no format {FORMAT!r}")
            version = metadata.get("version")
            if version not in REQUIRED:
                raise ValueError(
                    f"{path} has version {version!r} of the format; this is fastadv for {' and '.join(REQUIRED)}"
                )
            names, required = set(file.keys()), set(REQUIRED[version])
            allowed = required | set(OPTIONAL) if version == VERSION else required
            odd = (required - names) | (names - allowed) | _halves(names)
            if odd:
                listed = ", ".join(sorted(name[:80] for name in odd)[:10])
                raise ValueError(f"{path}: {listed} is missing, or not of the format")
            tensors = {name: file.get_tensor(name) for name in names}
    except OSError as error:  # which does not always say of which file
        raise type(error)(f"{path} cannot be read: {error}") from error
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error})") from error
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:  # a dtype that torch has not
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    for name, tensor in tensors.items():
        dtype, dimensions = (TENSORS | OPTIONAL)[name], 1 + (name == "gram")
        if tensor.dtype != dtype or tensor.dim() != dimensions:
            raise ValueError(
                f"{path}: {name} is {tensor.dtype} of shape {list(tensor.shape)}; the format has {dtype} of "
                f"{dimensions} dimensions"
            )
    if tensors["offsets"].shape[0] < 1:
        raise ValueError(f"{path}: offsets is empty; it has one number more than there are rollouts")
    return tensors, _about(path, metadata.get("about", "")), version


def _halves(names: set[str]) -> set[str]:
    """What is missing of two tensors that come together."""
    pair = {"repeats", "repeat_offsets"}
    return pair - names if pair & names else set()


def _about(path: Path, text: str) -> dict[str, Any]:
    kinds: dict[str, type | tuple[type, ...]] = {
        "covered": int, "total": int, "temperature": (int, float), "dtype": str, "checkpoint": str, "batch": str,
        "notes": list,
    }  # fmt: skip
    if len(text) > LARGEST_NOTES:
        raise ValueError(f"{path}: its metadata has {len(text):,} characters; at most {LARGEST_NOTES:,} are read")
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its metadata is no JSON ({error})") from error
    if not isinstance(about, dict) or set(about) != set(kinds):
        raise ValueError(f"{path}: its metadata must have the keys {', '.join(kinds)}, and no others")
    for name, kind in kinds.items():
        if not isinstance(about[name], kind) or isinstance(about[name], bool):
            raise ValueError(f"{path}: {name} in its metadata is a {type(about[name]).__name__}")
    if not all(isinstance(note, str) for note in about["notes"]):
        raise ValueError(f"{path}: notes in its metadata must be texts")
    if abs(about["temperature"]) > 1e300:  # an integer may be too large for a float
        raise ValueError(f"{path}: temperature in its metadata is not finite")
    return {**about, "notes": tuple(about["notes"]), "temperature": float(about["temperature"])}
