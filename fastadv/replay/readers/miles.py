"""Dumps of Miles and slime: `--save-debug-rollout-data`.

A dump is `torch.save({"rollout_id", "samples", "metadata"})`, where samples are dictionaries of plain objects. It is
written before rewards are normalised and before masks are filled in, so it holds what the engine returned.
"""

from __future__ import annotations

import math
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastadv.batch import Batch
from fastadv.groups import group_index
from fastadv.outcomes import NO_RESULT, Outcome, outcomes_of
from fastadv.replay.errors import ReplayError, counted
from fastadv.replay.readers.miles_rollouts import Columns, joined
from fastadv.replay.readers.miles_turns import versions_of
from fastadv.replay.readers.rollouts import (
    ReadOptions,
    Rollouts,
    check_log_probs,
    label_text,
    names_of,
    packed_offsets,
    reward_of,
    short,
)
from fastadv.status_tables import SYSTEMS
from fastadv.statuses import ending, sample_ending
from fastadv.token_ids import LARGEST_ID, TokenIds

STATUSES = tuple(SYSTEMS["miles"].statuses)
EXPECTED = {int: "an integer", str: "a text", dict: "a dictionary", list: "a list of numbers"}
LARGEST_EXPANSION = 20  # torch.save does not compress; token lists that somebody zipped again shrink to a fifth or so


def load(path: Path, *, trust: bool) -> Any:
    """The object in a torch file, without executing anything in it unless `trust`.

    Raises:
        ReplayError: a file that is truncated or no torch file, or that holds more than plain objects and tensors.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols, and copies of parts of the file
            return torch.load(path, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        # Torch's message is pages of advice to programmers, the first of which is to execute the file.
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it names {refused[1]}" if refused else "torch.save writes no such pickle of plain objects"
        raise ReplayError(
            f"{path} holds more than plain data and was refused; nothing in it was executed ({reason}). "
            "If you trust whoever wrote it, --trust-dump reads it and runs the code in it"
        ) from error
    except (RuntimeError, EOFError, zipfile.BadZipFile, OSError) as error:
        reason = str(error).split("\n")[0]
        raise ReplayError(f"{path} is truncated or no torch file ({reason})") from error
    except Exception as error:  # a pickle can be broken in as many ways as there are exceptions
        raise ReplayError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def unpacked_size(path: Path) -> int:
    """Bytes of a torch file's entries once they are unpacked.

    Raises:
        ReplayError: the archive is broken, or its entries would be far larger than the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return size  # a bare pickle
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
        raise ReplayError(f"{path} is truncated or no torch file ({error})") from error
    if unpacked > LARGEST_EXPANSION * size:
        raise ReplayError(
            f"{path} has {size:,} bytes, which would unpack to {unpacked:,}: more than {LARGEST_EXPANSION} times as "
            "many, which no rollouts do. torch.save does not compress: save the rollouts with it again"
        )
    return unpacked


class _Sample:
    """One entry of `samples`, checked as it is taken apart."""

    def __init__(self, where: str, fields: Any) -> None:
        if not isinstance(fields, dict):
            raise ReplayError(f"{where} is a {type(fields).__name__}, not a dictionary of fields")
        self.where, self.fields, self.plain_reward = where, fields, False

    def get(self, name: str, kinds: type | tuple[type, ...], *, optional: bool = False) -> Any:
        """A field of one of these types; a missing one is an error unless it is optional."""
        value = self.fields.get(name)
        if value is None:
            if optional:
                return None
            raise ReplayError(f"{self.where} has no {name!r}")
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, bool) and kinds is int:
            value = int(value)
        if not isinstance(value, kinds) or isinstance(value, bool):
            wanted = kinds if isinstance(kinds, tuple) else (kinds,)
            expected = " or ".join(EXPECTED[kind] for kind in wanted if kind in EXPECTED)
            raise ReplayError(f"{self.where}: {name!r} is a {type(value).__name__}; it must be {expected}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ReplayError(f"{self.where}: {name!r} has {value.bit_length()} bits; it must fit into 64")
        return value

    def numbers(self, name: str, *, length: int | None = None) -> np.ndarray | None:
        """A per-token list as an array of numbers; None where the field is."""
        value = self.get(name, (list, tuple, np.ndarray, Tensor), optional=True)
        if value is None:
            return None
        array = self._array(name, value)
        if array.ndim != 1:
            raise ReplayError(f"{self.where}: {name!r} has {array.ndim} dimensions, not one")
        if length is not None and array.shape[0] != length:
            raise ReplayError(f"{self.where}: {name!r} has {array.shape[0]} entries for {length} response tokens")
        return array

    def whole(self, name: str, *, length: int | None = None) -> np.ndarray | None:
        """The same for a list of whole numbers."""
        array = self.numbers(name, length=length)
        if (
            array is not None
            and array.dtype.kind == "f"
            and not (np.isfinite(array) & (array == np.trunc(array))).all()
        ):
            raise ReplayError(f"{self.where}: {name!r} holds a number that is not whole")
        return array

    def _array(self, name: str, value: Any) -> np.ndarray:
        # Without a dtype: asked for one, numpy parses texts and rounds fractions.
        try:
            if isinstance(value, Tensor):
                value = value.detach()
                if value.numel() * value.element_size() > value.untyped_storage().nbytes():
                    raise ReplayError(f"{self.where}: {name!r} is a tensor that repeats its entries in place")
            elif not isinstance(value, np.ndarray):
                # Before numpy unfolds lists in lists: shared ones can be few in the file and any number in memory.
                for kind in set(map(type, value)):
                    if not issubclass(kind, (int, float, np.generic, type(None))):
                        raise ReplayError(
                            f"{self.where}: {name!r} holds something that is no number (a {kind.__name__})"
                        )
            if isinstance(value, Tensor):
                value = value.float() if value.is_floating_point() else value  # numpy has no bfloat16
            array: np.ndarray = np.asarray(value)
            if array.dtype.kind == "O" and all(x is None or isinstance(x, (int, float)) for x in array.flat):
                array = array.astype(np.float64)  # None among numbers, or integers beyond 64 bits
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ReplayError(f"{self.where}: {name!r} holds something that is no number ({error})") from error
        if array.dtype.kind not in "biuf":
            raise ReplayError(f"{self.where}: {name!r} holds something that is no number (numpy: {array.dtype})")
        return array

    def reward(self, key: str | None) -> float:
        """The reward; NaN for none."""
        value = self.fields.get("reward")
        if isinstance(value, dict):
            if key is None:
                raise ReplayError(
                    f"{self.where}: the reward is a dictionary; choose one of its keys with --reward-key "
                    f"({names_of(value)})"
                )
            if key not in value:
                raise ReplayError(f"{self.where}: the reward has no key {key!r}; it has {names_of(value)}")
            value = value[key]
        else:
            self.plain_reward = True
        if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.dim() == 0 and not value.is_meta):
            value = value.item()
        return reward_of(f"{self.where}: the reward", value)


class _Samples(Columns):
    """The samples as columns, and what is to be said about them."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[int | str, str] = {}
        self.removed = self.without_group = self.without_mask = self.plain_rewards = 0
        self.ungrouped: tuple[int | str | None, str] | None = None  # rollout_id and label of the last sample, if it is

    def add(self, sample: _Sample, row: int, options: ReadOptions) -> None:
        """Takes one sample apart."""
        response = sample.get("response_length", int)
        tokens = sample.whole("tokens")
        if tokens is None:
            raise ReplayError(f"{sample.where} has no 'tokens'")
        if not 0 <= response <= tokens.shape[0]:
            raise ReplayError(f"{sample.where}: 'response_length' is {response} of {tokens.shape[0]} tokens")
        if tokens.size and (tokens.min() < 0 or tokens.max() > LARGEST_ID):
            raise ReplayError(f"{sample.where}: 'tokens' holds an id outside of [0, {LARGEST_ID}]")
        mask = sample.whole("loss_mask", length=response)
        log_probs = sample.numbers("rollout_log_probs", length=response)
        status = sample.get("status", str)
        if status not in STATUSES:
            raise ReplayError(
                f"{sample.where}: 'status' is {short(status)}; Miles and slime write {', '.join(STATUSES)}"
            )
        metadata = sample.get("metadata", dict, optional=True) or {}
        reward, ended = sample.reward(options.reward_key), sample_ending(status, metadata.get("exit_status"))
        self.plain_rewards += sample.plain_reward
        finished = ending("miles", status) not in NO_RESULT
        self.agent_failed.append(finished and ended in NO_RESULT)
        self.leaves.append(metadata.get("leaf"))
        rollout = sample.get("rollout_id", (int, str), optional=True)
        label = label_text(sample.fields.get("prompt", ""), metadata.get("instance_id"))
        group = self._group(sample, row, rollout, label)
        index = sample.get("index", int, optional=True)
        self.rollouts.append(rollout)
        self.labels.setdefault(group, label)
        self.lengths.append(response)
        self.total_lengths.append(tokens.shape[0])
        self.without_mask += mask is None
        sampled = np.ones(response, bool) if mask is None else mask != 0
        self.masks.append(sampled)
        self.calls.append(sample.fields.get("weight_versions"))
        self.versions.append(versions_of(self.calls[-1], sampled))
        with np.errstate(over="ignore"):  # a log-prob beyond float32 is an infinite one
            self.log_probs.append(None if log_probs is None else log_probs.astype(np.float32))
        self.ids.append(tokens.astype(np.int32))
        self.rewards.append(reward)
        self.endings.append(ended)
        self.groups.append(group)
        number = rollout if isinstance(rollout, int) else index  # what the hook tosses coins by
        self.row_ids.append(row if number is None else number)
        self.removed += bool(sample.get("remove_sample", int, optional=True))

    def _group(self, sample: _Sample, row: int, rollout: int | str | None, label: str) -> int | str:
        """The sample's group; of one without, its own, or that of the sample before it if they are of one rollout.

        Evaluations of several data sets are one dump without groups, in which numbers begin anew with each: a
        `rollout_id` alone says little there.
        """
        group: int | str | None = sample.get("group_index", (int, str), optional=True)
        before, self.ungrouped = self.ungrouped, (rollout, label) if group is None else None
        if group is not None:
            return group
        self.without_group += 1
        return self.groups[-1] if rollout is not None and before == self.ungrouped else f"\0{row}"

    @property
    def size(self) -> int:
        """Numbers that the last sample holds for each token, or call of its rollout."""
        leaf = self.leaves[-1]
        path = leaf.get("path_node_ids") if isinstance(leaf, dict) else None
        return self.total_lengths[-1] + (len(path) if isinstance(path, (list, tuple)) else 0)


def _packed(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, dtype=dtype)


def read(path: Path, options: ReadOptions) -> Rollouts:
    """Reads a dump of Miles or slime.

    Endings: the status, or an `exit_status` that says more, by the tables of docs/outcomes.md. Outcomes: those of
    `fastadv.outcomes_of`, where running out of time is BUDGET, as in Miles' own filter of cut-off samples.

    Raises:
        ReplayError: a field that is missing, of the wrong type or length, naming the sample.
    """
    size = unpacked_size(path)
    dump = load(path, trust=options.trust)
    if not isinstance(dump, dict) or "samples" not in dump:
        kind = names_of(dump) if isinstance(dump, dict) else type(dump).__name__
        raise ReplayError(f"{path} is no rollout dump: it holds {kind or 'nothing'}, not a dictionary with 'samples'")
    samples = dump.pop("samples")
    if not isinstance(samples, list):
        raise ReplayError(f"{path}: 'samples' is a {type(samples).__name__}, not a list")
    if not samples:
        raise ReplayError(f"{path} holds no rollouts")
    columns, tokens = _Samples(), 0
    for row, fields in enumerate(samples):
        columns.add(_Sample(f"{path}, sample {row}", fields), row, options)
        tokens += columns.size
        if tokens > size:  # a token takes a byte or more, and so does a call
            raise ReplayError(
                f"{path}: up to sample {row} there are {tokens:,} tokens in {size:,} bytes: samples share their lists"
            )
        samples[row] = None  # lists of Python numbers weigh ten times the arrays that were made of them
        options.progress(row + 1, len(samples))
    return _rollouts(path, columns, options)


def _notes(c: _Samples, rollouts: Columns, options: ReadOptions) -> list[str]:
    notes = []
    what = "finished sample" if rollouts is c else "finished rollout"
    failed = sum(rollouts.agent_failed)
    missing = sum(
        ended not in NO_RESULT and not math.isfinite(reward)
        for ended, reward in zip(rollouts.endings, rollouts.rewards, strict=True)
    )
    if c.removed:
        notes.append(
            f"{counted(c.removed, 'sample')} marked by a sample filter: the marks are ignored, arms decide what is "
            "excluded"
        )
    if failed:
        agents = "whose exit_status says that the agent, not the policy, failed"
        notes.append(f"{counted(failed, what)} {agents}: counted as INFRA")
    if missing:
        notes.append(f"{counted(missing, what)} without a reward (None or NaN): counted as INFRA")
    if c.without_mask:
        notes.append(f"{counted(c.without_mask, 'sample')} without loss_mask: every response token counts as sampled")
    if c.without_group:
        own = "each is" if rollouts is c else "the rollout of each is"
        notes.append(f"{counted(c.without_group, 'sample')} without group_index: {own} a group of its own")
    if options.reward_key is not None and c.plain_rewards:
        plain = counted(c.plain_rewards, "sample")
        notes.append(f"--reward-key does not apply to {plain}: the reward is no dictionary")
    return notes


def _rollouts(path: Path, samples: _Samples, options: ReadOptions) -> Rollouts:
    labels = [samples.labels[g] for g in dict.fromkeys(samples.groups)]
    c, parts = joined(str(path), samples)
    notes = _notes(samples, c, options)
    unit = "sample" if parts is None else "rollout"
    token_ids = TokenIds(_packed(c.ids, torch.int32), packed_offsets(c.total_lengths))
    if parts is not None:
        notes.append(parts.note)
        rollouts, responses = torch.from_numpy(parts.rollouts), torch.from_numpy(parts.responses)
        token_ids = TokenIds(token_ids.ids, token_ids.cu_seqlens, rollouts, responses)
    if len(set(c.row_ids)) != len(c.row_ids):
        c.row_ids = list(range(len(c.row_ids)))
        notes.append("sample indices repeat: coins are tossed by position instead")
    with_log_probs = sum(lp is not None for lp in c.log_probs)
    log_probs = None
    if with_log_probs == len(c.log_probs):
        log_probs = _packed([lp for lp in c.log_probs if lp is not None], torch.float32)
    elif with_log_probs:
        without = len(c.log_probs) - with_log_probs
        notes.append(f"{counted(without, unit)} without rollout_log_probs: those of the others are not used")
    versions = [v for v in c.versions if v is not None]
    if 0 < len(versions) < len(c.versions):
        unclear = counted(len(c.versions) - len(versions), unit)
        notes.append(f"{unclear} whose weight_versions do not say which turn is whose: versions are not used")
    groups = group_index(c.groups)
    rewards, endings = torch.tensor(c.rewards, dtype=torch.float64), torch.tensor(c.endings, dtype=torch.int64)
    outcomes, capped = outcomes_of(endings, rewards, solved_above=options.solved_above, timeout=Outcome.BUDGET)
    batch = Batch.of(
        mask=_packed(c.masks, torch.bool),
        cu_seqlens=packed_offsets(c.lengths),
        turn_ids=None if parts is None else torch.from_numpy(parts.turns),
        rewards=rewards,
        group_ids=groups,
        outcomes=outcomes,
        capped=capped,
        row_ids=torch.tensor(c.row_ids, dtype=torch.int64),
        rollout_log_probs=log_probs,
        token_ids=token_ids,
        endings=endings,
        versions=_packed(versions, torch.int32) if len(versions) == len(c.versions) else None,
    )
    check_log_probs(f"{path}, sample", batch)
    return Rollouts("miles", outcomes, rewards, groups, labels, batch, notes)
