"""Rollouts without their tokens: as much of them as an arm on a segment Gram reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from fastadv import validation
from fastadv.batch import Batch
from fastadv.outcomes import Ending
from fastadv.token_ids import offsets_of

SHIFT = 2**31  # versions are below it: slot * SHIFT + version is of both


@dataclass(frozen=True, eq=False)
class Repeats:
    """For which n the last n response tokens of a rollout are the n before them once more.

    Attributes:
        offsets: `[B + 1]` int64, ends of the rollouts in `lengths`.
        lengths: `[Q]` int32, these n, from 1, ascending within a rollout.

    Raises:
        ValueError, TypeError: offsets that do not fit, an n below 1 or out of order.
    """

    offsets: Tensor  # [B + 1]
    lengths: Tensor  # [Q]

    def __post_init__(self) -> None:
        op = "Repeats"
        validation.tensor(op, "repeat_offsets", self.offsets, dtypes=(torch.int64,))
        validation.tensor(op, "repeats", self.lengths, dtypes=(torch.int32,))
        count = self.lengths.shape[0] if self.lengths.dim() == 1 else -1
        if self.offsets.dim() != 1 or not self.offsets.numel() or int(self.offsets[-1]) != count:
            raise ValueError(f"{op}: repeat_offsets must be [B + 1] and end at the number of repeats, [Q]")
        if int(self.offsets[0]) != 0 or bool((self.offsets.diff() < 0).any()):
            raise ValueError(f"{op}: repeat_offsets must start at 0 and not decrease")
        if count and int(self.lengths.min()) < 1:
            raise ValueError(f"{op}: repeats holds {int(self.lengths.min())}; a repetition has at least 1 token")
        row = self._rows()
        if bool(((row.diff() == 0) & (self.lengths.long().diff() <= 0)).any()):
            raise ValueError(f"{op}: repeats must ascend within a rollout")

    def _rows(self) -> Tensor:
        rows = torch.arange(self.offsets.shape[0] - 1)
        return torch.repeat_interleave(rows, self.offsets.diff(), output_size=self.lengths.shape[0])

    def of(self, tokens: int) -> Tensor:
        """Rollouts whose last `tokens` response tokens repeat those before them, `[B]` bool."""
        found = torch.zeros(self.offsets.shape[0] - 1, dtype=torch.bool)
        found[self._rows()[self.lengths == tokens]] = True
        return found


class Outline(NamedTuple):
    """What arms read of rollouts.

    Attributes:
        rollouts: with one token a run: the sampled tokens of a turn, one after another, that weights of one version
            sampled; a turn without a sampled token is one run that is masked off. On the CPU.
        tokens: `[R]` int64, sampled tokens of each run.
        repeats: None: no token ids were known.
    """

    rollouts: Batch
    tokens: Tensor  # [R]
    repeats: Repeats | None


def outline(batches: Sequence[Batch]) -> Outline:
    """The rollouts of all batches as one batch, which arms with weights of rollouts or turns treat as the batches.

    An arm compares a version with the newest of its batch, so versions are moved by as much as makes the newest of each
    batch the newest of all. Endings, versions and token ids are there if every batch has them.
    """
    if not batches:
        raise ValueError("outline: no batch was given")
    parts = [_Runs.of(batch) for batch in batches]

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(batch, name).cpu() for batch in batches])

    groups, group_ids = 0, []
    for batch in batches:
        group_ids.append(batch.groups.index.cpu() + groups)
        groups += batch.groups.num_groups
    tokens = torch.cat([part.tokens for part in parts])
    lengths = torch.cat([part.lengths for part in parts])
    rollouts = Batch.of(
        mask=tokens > 0, turn_ids=torch.cat([part.turns for part in parts]), cu_seqlens=offsets_of(lengths),
        rewards=joined("rewards"), group_ids=torch.cat(group_ids), outcomes=joined("outcomes"),
        capped=joined("capped"), row_ids=joined("row_ids"), versions=_versions(batches, parts),
        endings=joined("endings") if all(map(_says_endings, batches)) else None,
    )  # fmt: skip
    known = all(batch.token_ids is not None for batch in batches)
    return Outline(rollouts, tokens, _repeats(batches) if known else None)


def _says_endings(batch: Batch) -> bool:
    """Arms refuse a batch whose endings are all unknown; it must not get lost among others."""
    return batch.endings is not None and bool((batch.endings != Ending.UNKNOWN).any())


class _Runs(NamedTuple):
    """The runs of one batch, by rollout and turn."""

    lengths: Tensor  # [B] runs of each rollout
    turns: Tensor  # [R] int64
    tokens: Tensor  # [R] int64
    versions: Tensor  # [R] int64, 0 if they are not known

    @classmethod
    def of(cls, batch: Batch) -> _Runs:
        index, rows = batch.segments, torch.arange(batch.num_rollouts, device=batch.mask.device)
        first = index.offsets[:-1] + rows + 1  # a rollout has a slot for what is outside of its turns, and then these
        on, count = batch.mask, index.count + batch.num_rollouts
        slot = (batch.rows.spread(first) + batch.turn_ids)[on].to(torch.int64)
        version = torch.zeros_like(slot) if batch.versions is None else batch.versions[on].to(torch.int64)
        order = slot.argsort(stable=True)  # turns of a rollout may lie in any order
        keys, tokens = torch.unique_consecutive((slot * SHIFT + version)[order], return_counts=True)
        empty = torch.bincount(slot, minlength=count) == 0
        empty[first - 1] = False  # a turn without a sampled token is a turn all the same
        silent = empty.nonzero().squeeze(1)
        keys, tokens = torch.cat([keys, silent * SHIFT]), torch.cat([tokens, torch.zeros_like(silent)])
        order = (keys // SHIFT).argsort(stable=True)
        keys, tokens, first = keys[order].cpu(), tokens[order].cpu(), first.cpu()
        row = torch.searchsorted(first - 1, keys // SHIFT, right=True) - 1
        lengths = torch.bincount(row, minlength=batch.num_rollouts)
        return cls(lengths, keys // SHIFT - first[row], tokens, keys % SHIFT)


def _versions(batches: Sequence[Batch], parts: Sequence[_Runs]) -> Tensor | None:
    if any(batch.versions is None for batch in batches):
        return None
    newest = [int(part.versions.max()) if part.versions.numel() else 0 for part in parts]
    return torch.cat([part.versions + (max(newest) - own) for part, own in zip(parts, newest, strict=True)])


def _repeats(batches: Sequence[Batch]) -> Repeats:
    found: list[list[int]] = []
    for batch in batches:
        assert batch.token_ids is not None
        given = batch.token_ids.to("cpu")
        last = given.rows_of(batch.num_rollouts)[1:] - 1  # how a rollout's last row ends
        responses = batch.lengths.cpu() if given.responses is None else given.responses
        for row in last.tolist():
            end, length = (int(given.cu_seqlens[row + 1]), int(responses[row])) if row >= 0 else (0, 0)
            found.append(_repetitions(given.ids[end - length : end].flip(0).tolist()))
    counts = torch.tensor([len(lengths) for lengths in found], dtype=torch.int64)
    return Repeats(offsets_of(counts), torch.tensor(list(chain.from_iterable(found)), dtype=torch.int32))


def _repetitions(back: list[int]) -> list[int]:
    """Every n for which the first n ids are the n that follow them, in linear time: with the Z-function, the length of
    what from each place on is as from the beginning. A rollout that got into a loop is one long repetition."""
    same = [0] * (len(back) // 2 + 1)
    left = right = 0  # the match that reaches farthest
    for place in range(1, len(same)):
        length = min(right - place, same[place - left]) if place < right else 0
        while place + length < len(back) and back[length] == back[place + length]:
            length += 1
        if place + length > right:
            left, right = place, place + length
        same[place] = length
    return [n for n in range(1, len(same)) if same[n] >= n]
