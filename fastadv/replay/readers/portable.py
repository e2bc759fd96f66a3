"""The portable rollout format: one safetensors file. docs/portable_format.md describes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastadv import validation
from fastadv.batch import Batch
from fastadv.outcomes import Outcome
from fastadv.replay.errors import ReplayError, counted
from fastadv.replay.readers.rollouts import LARGEST_REWARD, ReadOptions, Rollouts, check_log_probs, label_text
from fastadv.token_ids import TokenIds

FORMAT, VERSION = "fastadv rollouts", "1"
REQUIRED = ("cu_seqlens", "mask", "rewards", "group_ids", "outcomes")
REWARDS = (torch.float64, torch.float32)
OPTIONAL = (
    "turn_ids", "capped", "row_ids", "rollout_log_probs", "endings", "versions", "token_ids", "token_cu_seqlens",
    "sequence_rollouts", "sequence_responses",
)  # fmt: skip
# Of what errors call otherwise.
NAMES = {
    "token_ids.ids": "token_ids", "token_ids.cu_seqlens": "token_cu_seqlens", "token_ids.rollouts": "sequence_rollouts",
    "token_ids.responses": "sequence_responses",
}  # fmt: skip


def write(path: Path, batch: Batch, labels: list[str] | None = None) -> None:
    """Writes a batch in the portable format.

    Args:
        path: file to write; an existing one is not overwritten.
        batch: the rollouts.
        labels: one text a group, for people.

    Raises:
        FileExistsError: the file exists.
        OSError: the file cannot be written; nothing of it is left.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    batch = batch.packed()
    assert batch.cu_seqlens is not None
    tensors = {
        "cu_seqlens": batch.cu_seqlens,
        "mask": batch.mask,
        "turn_ids": batch.turn_ids,
        "rewards": batch.rewards,
        "group_ids": batch.groups.index,
        "outcomes": batch.outcomes.to(torch.uint8),
        "capped": batch.capped,
        "row_ids": batch.row_ids,
    }
    if batch.rollout_log_probs is not None:
        tensors["rollout_log_probs"] = batch.rollout_log_probs
    if batch.endings is not None:
        tensors["endings"] = batch.endings.to(torch.uint8)
    if batch.versions is not None:
        tensors["versions"] = batch.versions
    if batch.token_ids is not None:
        tensors["token_ids"] = batch.token_ids.ids
        tensors["token_cu_seqlens"] = batch.token_ids.cu_seqlens.clone()  # may be the responses' own: no prompts
        if batch.token_ids.rollouts is not None and batch.token_ids.responses is not None:
            tensors["sequence_rollouts"] = batch.token_ids.rollouts
            tensors["sequence_responses"] = batch.token_ids.responses
    metadata = {"format": FORMAT, "version": VERSION}
    if labels is not None:
        metadata["group_labels"] = json.dumps(labels)
    with path.open("xb"):
        pass  # claims the name, so that nothing that appeared meanwhile is overwritten
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, SafetensorError):
            raise OSError(f"safetensors: {error}") from error
        raise


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ReplayError(
                    f"{path} is a safetensors file, but not of rollouts: its metadata has no format {FORMAT!r}"
                )
            if metadata.get("version") != VERSION:
                raise ReplayError(
                    f"{path} has version {metadata.get('version')!r} of the format; this is fastadv for {VERSION!r}"
                )
            names = set(file.keys())
            unknown = sorted(names - {*REQUIRED, *OPTIONAL})
            if unknown:
                raise ReplayError(f"{path} holds {', '.join(unknown)}, which the format does not know")
            return {name: file.get_tensor(name) for name in names}, metadata
    except (SafetensorError, OSError) as error:
        raise ReplayError(f"{path} is truncated or no safetensors file ({error})") from error
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:  # a dtype that torch has not
        raise ReplayError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def read(path: Path, options: ReadOptions) -> Rollouts:
    """Reads a file in the portable format.

    Raises:
        ReplayError: a tensor that is missing or does not fit the others.
    """
    tensors, metadata = _load(path)
    for name in REQUIRED:
        if name not in tensors:
            raise ReplayError(f"{path} has no tensor {name!r}")
    if tensors["rewards"].dtype not in REWARDS:
        raise ReplayError(f"{path}: rewards has dtype {tensors['rewards'].dtype}; the format has float64 or float32")
    parts: dict[str, Any] = dict(tensors)
    ids, ends = parts.pop("token_ids", None), parts.pop("token_cu_seqlens", None)
    if (ids is None) != (ends is None):
        raise ReplayError(f"{path}: token_ids and token_cu_seqlens come together")
    sequences = parts.pop("sequence_rollouts", None), parts.pop("sequence_responses", None)
    if ids is None and sequences != (None, None):
        raise ReplayError(f"{path}: sequence_rollouts and sequence_responses come with token_ids")
    try:
        with validation.checks("on"):  # a file's offsets are not trusted, whatever FASTADV_CHECKS says
            batch = Batch.of(**parts, token_ids=None if ids is None else TokenIds(ids, ends, *sequences))
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).removeprefix("Batch: ")
        for ours, theirs in NAMES.items():
            reason = reason.replace(ours, theirs)
        raise ReplayError(f"{path}: {reason}") from error
    large = batch.rewards.abs() > LARGEST_REWARD
    if bool(large.any()):
        row = int(large.nonzero()[0])
        raise ReplayError(
            f"{path}: rewards[{row}] is {float(batch.rewards[row])}; a reward is finite and at most "
            f"{LARGEST_REWARD:g} in size, or NaN for no result"
        )
    turns = batch.segments.turns()
    beyond = turns > batch.lengths  # a few bytes would make tables of millions of turns
    if bool(beyond.any()):
        row = int(beyond.nonzero()[0])
        raise ReplayError(
            f"{path}: turn_ids of rollout {row} reach {int(turns[row]) - 1}, but it has "
            f"{counted(int(batch.lengths[row]), 'token')}; turns count from 0, and each has a token"
        )
    check_log_probs(f"{path}, rollout", batch)
    if batch.num_rollouts == 0:
        raise ReplayError(f"{path} holds no rollouts")
    options.progress(batch.num_rollouts, batch.num_rollouts)
    labels, notes = _labels(path, batch, metadata), _notes(batch, options)
    return Rollouts("portable", batch.outcomes, batch.rewards, batch.groups, labels, batch, notes)


def _notes(batch: Batch, options: ReadOptions) -> list[str]:
    """What a reader of the report should know about a file that contradicts itself or the options."""
    notes = []
    above = batch.rewards > options.solved_above
    unrewarded = int(((batch.outcomes == Outcome.SOLVED) & ~above).sum())
    rewarded = int(((batch.outcomes == Outcome.FAILED) & above).sum())
    if unrewarded or rewarded:
        notes.append(
            f"{counted(unrewarded, 'rollout')} marked solved with a reward of {options.solved_above:g} or less, "
            f"{rewarded:,} marked failed with more (--solved-above): outcomes are taken as the file has them"
        )
    repeated = batch.num_rollouts - torch.unique(batch.row_ids).numel()
    if repeated:
        notes.append(f"{counted(repeated, 'row id')} repeated: rollouts with one id share their coin")
    if options.reward_key is not None:
        notes.append("--reward-key does not apply: the portable format has one reward a rollout")
    return notes


def _labels(path: Path, batch: Batch, metadata: dict[str, str]) -> list[str]:
    plain = [f"group {g}" for g in range(batch.groups.num_groups)]
    if "group_labels" not in metadata:
        return plain
    try:
        labels = json.loads(metadata["group_labels"])
    except (ValueError, RecursionError) as error:
        raise ReplayError(f"{path}: group_labels is no JSON ({error})") from error
    if not isinstance(labels, list) or len(labels) != len(plain):
        raise ReplayError(f"{path}: group_labels must be a list of {len(plain)} texts")
    return [label_text(label) for label in labels]
