"""Which loss tokens go back through the model together, and how far back their gradient reaches.

A stream holds at most one segment of each rollout of a micro-batch. By causality the gradient of a segment is exactly 0
behind its last loss token: the rows before are its live rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastadv.batch import Batch
from fastadv.ops.segment_weight_gram import Run

LEVELS = ("rollout", "turn")


@dataclass(frozen=True, eq=False)
class Packed:
    """The first rows of some of a micro-batch's rollouts, one rollout behind the other. Rows are counted through the
    padded `[b, T]`."""

    live: Tensor | None  # [n] these rows; None: all rows in order
    lengths: list[int]  # [k] by rollout
    ends: Tensor  # [k + 1] int32, from 0

    @classmethod
    def of(cls, lengths: Tensor, width: int, device: torch.device) -> Packed:
        """From the number of rows of each of a micro-batch's rollouts `[b]`, of which those with 0 are left out."""
        there = lengths[lengths > 0]  # [k]
        starts = lengths.cumsum(0) - lengths  # [b]
        within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)
        live = torch.repeat_interleave(torch.arange(len(lengths)) * width, lengths) + within  # [n]
        whole = len(live) == len(lengths) * width
        ends = nn.functional.pad(there.cumsum(0), (1, 0)).to(torch.int32)
        return cls(None if whole else live.to(device), there.tolist(), ends.to(device))

    @property
    def rows(self) -> int:
        """n."""
        return sum(self.lengths)

    def gather(self, values: Tensor) -> Tensor:
        """The live rows `[n, ...]` of `[b * T, ...]`."""
        return values if self.live is None else values.index_select(0, self.live)

    def spread(self, values: Tensor, rows: int) -> Tensor:
        """Live rows `[n, ...]` among all rows `[rows, ...]`; the rest is 0."""
        if self.live is None:
            return values
        return values.new_zeros(rows, *values.shape[1:]).index_copy_(0, self.live, values)


@dataclass(frozen=True, eq=False)
class Stream(Packed):
    """One segment of some of a micro-batch's rollouts, and its live rows."""

    runs: list[Run]  # live rows of each segment, among the micro-batch's rows and among the stream's
    rollouts: Tensor  # [k] which of the micro-batch's rollouts
    losses: Tensor  # [l] which of the micro-batch's loss tokens are the stream's
    loss_rows: Tensor  # [l] where they are predicted, among the live rows

    @property
    def segments(self) -> list[int]:
        """Numbers of the segments, in the order of `rollouts`."""
        return [run.segment for run in self.runs]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rollouts up to the token before their last loss token, padded on the right, where no causal attention looks."""

    ids: Tensor  # [b, T] int64
    whole: Packed  # all rows but the padding
    loss_rows: Tensor  # [l] row of b * T that predicts each loss token
    labels: Tensor  # [l] the tokens
    segments: Tensor  # [l]
    weights: Tensor  # [l] float64
    streams: list[Stream]

    @property
    def rows(self) -> int:
        """b * T."""
        return self.ids.numel()


@dataclass(frozen=True, eq=False)
class Layout:
    """All micro-batches, and what the segments are."""

    micro_batches: list[MicroBatch]
    rows: Tensor  # [S] rollout of each segment
    turns: Tensor  # [S] turn, -1 at level "rollout"

    @property
    def segments(self) -> int:
        """S."""
        return self.rows.shape[0]


def layout(
    batches: Sequence[Batch], level: str, max_tokens: int, weights: Tensor | None, device: torch.device
) -> Layout:
    """Divides packed batches, whose token ids are checked, into micro-batches and streams."""
    found: list[MicroBatch] = []
    rows, turns = [], []
    rollouts = segments = tokens = 0
    for batch in map(_on_host, batches):
        count = batch.num_rollouts
        row, turn = _numbered(batch, level)
        rows.append(rollouts + row)
        turns.append(turn)
        mine = torch.ones(batch.mask.shape[0]) if weights is None else weights[tokens : tokens + batch.mask.shape[0]]
        for first, last in batch.micro_batches(max_tokens):
            one = _micro_batch(batch, first, last, level, segments, mine.to("cpu", torch.float64), device)
            if one is not None:
                found.append(one)
        rollouts, segments, tokens = rollouts + count, segments + len(rows[-1]), tokens + batch.mask.shape[0]
    nothing = torch.zeros(0, dtype=torch.int64)
    return Layout(found, torch.cat([nothing, *rows]), torch.cat([nothing, *turns]))


class Sequences(NamedTuple):
    """A batch in which each row of the token ids is a rollout of its own."""

    batch: Batch
    turns: Tensor | None  # [S'] turn of each (sequence, turn) in its rollout, on the CPU; None: the batch as it was


def sequences(batch: Batch) -> Sequences:
    """`Batch.by_sequence` of a packed batch, where only turns that lie in a sequence are segments of it.

    By their turns of the rollout, a rollout of n samples of one turn each would be n (n + 1) / 2 segments, all but n of
    them without a token, and each sample a stream of its own.
    """
    parts = batch.by_sequence()
    if parts is batch:
        return Sequences(batch, None)
    row, turn = parts.rows.row_of_token(), parts.turn_ids.to(torch.int64)
    inside = turn >= 0
    most = max(0, int(turn.max())) + 1 if turn.numel() else 1
    found, number = torch.unique((row * most + turn)[inside], return_inverse=True)  # [S'], by sequence and turn
    first = torch.searchsorted(found, torch.arange(parts.num_rollouts, device=found.device) * most)
    own = torch.full_like(parts.turn_ids, -1)
    own[inside] = (number - first[row[inside]]).to(own.dtype)
    return Sequences(replace(parts, turn_ids=own), (found % most).cpu())


def segments_of(
    batches: Sequence[Batch], divided: Sequence[Sequences], level: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rollout and turn of each segment of batches, and to which of them each segment of `sequences` of the same batches
    belongs; None: they are the same."""
    rows, turns, place = [], [], []
    rollouts = segments = 0
    for whole, parts in zip(batches, divided, strict=True):
        row, turn = _numbered(whole, level)
        of, own = _numbered(parts.batch, level)
        if parts.turns is not None:
            assert whole.token_ids is not None
            assert whole.token_ids.rollouts is not None
            of, own = whole.token_ids.rollouts.cpu()[of], parts.turns  # rollout and turn of each part
        place.append(segments + (whole.segments.offsets.cpu()[of] + own if level == "turn" else of))
        rows.append(rollouts + row)
        turns.append(turn)
        rollouts, segments = rollouts + whole.num_rollouts, segments + len(row)
    nothing = torch.zeros(0, dtype=torch.int64)
    same = all(parts.turns is None for parts in divided)
    return torch.cat([nothing, *rows]), torch.cat([nothing, *turns]), None if same else torch.cat([nothing, *place])


def _numbered(batch: Batch, level: str) -> tuple[Tensor, Tensor]:
    """Rollout and turn of each segment of one batch; turn -1 at level "rollout"."""
    if level != "turn":
        return torch.arange(batch.num_rollouts), torch.full((batch.num_rollouts,), -1)
    index = batch.segments
    row = index.row_of_segment()
    return row.cpu(), (torch.arange(index.count, device=row.device) - index.offsets[row]).cpu()


def _on_host(batch: Batch) -> Batch:
    """The batch where its layout can be read without waiting."""
    if batch.mask.device.type == "cpu":
        return batch
    assert batch.token_ids is not None
    assert batch.cu_seqlens is not None
    return replace(
        batch,
        mask=batch.mask.cpu(),
        turn_ids=batch.turn_ids.cpu(),
        cu_seqlens=batch.cu_seqlens.cpu(),
        lengths=batch.lengths.cpu(),
        token_ids=batch.token_ids.to("cpu"),
    )


def _micro_batch(
    batch: Batch, first: int, last: int, level: str, segment: int, weights: Tensor, device: torch.device
) -> MicroBatch | None:
    """Rollouts `first .. last - 1`; None if they have no loss token."""
    assert batch.token_ids is not None
    assert batch.cu_seqlens is not None
    tokens = torch.arange(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[last]))
    tokens = tokens[(batch.mask & (batch.turn_ids >= 0))[tokens]]  # [l]
    if not len(tokens):
        return None
    rollout = torch.searchsorted(batch.cu_seqlens, tokens, right=True) - 1  # [l]
    starts = batch.token_ids.cu_seqlens
    prompts = starts.diff() - batch.lengths  # [B]
    position = tokens - batch.cu_seqlens[rollout] + prompts[rollout]  # [l] in its sequence; predicted by the row before
    turn = batch.turn_ids[tokens].to(torch.int64) if level == "turn" else torch.zeros_like(tokens)
    number = segment + (batch.segments.offsets[rollout] + turn if level == "turn" else rollout)
    local = rollout - first
    reach = torch.zeros(last - first, dtype=torch.int64).scatter_reduce(0, local, position, "amax")  # [b]
    width = int(reach.max())
    ids = batch.token_ids.ids.long()
    padded = nn.utils.rnn.pad_sequence(
        [ids[start : start + n] for start, n in zip(starts[first:last].tolist(), reach.tolist(), strict=True)],
        batch_first=True,
    )  # [b, T]
    streams = [_stream(turn == j, local, position, number, padded.shape, device) for j in range(int(turn.max()) + 1)]
    return MicroBatch(
        ids=padded.to(device),
        whole=Packed.of(reach, width, device),
        loss_rows=(local * width + position - 1).to(device),
        labels=ids[starts[rollout] + position].to(device),
        segments=number.to(device),
        weights=weights[tokens].to(device),
        streams=[stream for stream in streams if stream is not None],
    )


def _stream(
    inside: Tensor, local: Tensor, position: Tensor, number: Tensor, shape: torch.Size, device: torch.device
) -> Stream | None:
    """The stream of the loss tokens that are inside; None if there are none."""
    losses = inside.nonzero().squeeze(1)  # [l]
    if not len(losses):
        return None
    local, position, number = local[losses], position[losses], number[losses]
    reach = torch.zeros(shape[0], dtype=torch.int64).scatter_reduce(0, local, position, "amax")  # [b]
    segment = torch.zeros(shape[0], dtype=torch.int64).index_copy(0, local, number)
    rollouts = (reach > 0).nonzero().squeeze(1)  # [k]
    starts = reach.cumsum(0) - reach  # [b] of each rollout's live rows among the stream's
    packed = Packed.of(reach, shape[1], device)
    runs = [Run(int(segment[r]), int(r) * shape[1], int(starts[r]), int(reach[r])) for r in rollouts]
    return Stream(
        live=packed.live,
        lengths=packed.lengths,
        ends=packed.ends,
        runs=runs,
        rollouts=rollouts.to(device),
        losses=losses.to(device),
        loss_rows=(starts[local] + position - 1).to(device),
    )
