"""Segments: the (rollout, turn) pairs of a batch, and tables with one value per segment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv import validation
from fastadv.rows import Rows


@dataclass(frozen=True, eq=False)
class Segments:
    """The (rollout, turn) pairs of a batch. Built once per batch by `fastadv.segments`.

    Segment (row, turn) has the number `offsets[row] + turn`; a row has `1 + its largest turn id` of them, 0 if no token
    of it belongs to a turn.

    Attributes:
        turn_ids: `[N]` or `[B, T]` int32 or int64, turn of each token from 0, -1 outside of turns.
        cu_seqlens: `[B + 1]` int64, ends of the rollouts if packed; None: padded.
        offsets: `[B + 1]` int64, number of the first segment of each rollout, and S.
        count: S, the number of segments.
    """

    turn_ids: Tensor  # [N] or [B, T]
    cu_seqlens: Tensor | None  # [B + 1]
    offsets: Tensor  # [B + 1]
    count: int

    def __post_init__(self) -> None:
        op = "Segments"
        validation.tensor(op, "turn_ids", self.turn_ids, dtypes=(torch.int32, torch.int64))
        names = ["offsets"] if self.cu_seqlens is None else ["offsets", "cu_seqlens"]
        validation.index_fields(self, *names, device=self.turn_ids.device)
        packed = self.cu_seqlens is not None
        rows = self.cu_seqlens.shape[0] - 1 if self.cu_seqlens is not None else self.turn_ids.shape[0]
        nowhere = packed and rows == 0 and self.turn_ids.numel() > 0
        if self.turn_ids.dim() != 2 - packed or self.offsets.shape[0] != rows + 1 or nowhere:
            raise ValueError(
                f"{op}: turn_ids has shape {list(self.turn_ids.shape)}, cu_seqlens "
                f"{None if self.cu_seqlens is None else list(self.cu_seqlens.shape)} and offsets "
                f"{list(self.offsets.shape)}; expected [N] with [B + 1], or [B, T] without, and [B + 1]. "
                "Build them with fastadv.segments"
            )
        if validation.reads_values(self.offsets) and int(self.offsets[-1]) != self.count:
            raise ValueError(f"{op}: count is {self.count}, but offsets end at {int(self.offsets[-1])}")

    def check_layout(self, op: str, rows: Rows) -> None:
        """Raises ValueError unless tokens divide into rollouts as these segments' do (where values may be read)."""
        mine, other = self.cu_seqlens, rows.cu_seqlens
        same = self.turn_ids.shape == rows.shape and self.num_rows == rows.count
        if mine is None or other is None:
            same = same and mine is other
        elif same and mine is not other and validation.reads_values(mine, other):
            same = torch.equal(mine, other)
        if not same:
            raise ValueError(
                f"{op}: the segments are of {list(self.turn_ids.shape)} tokens in {self.num_rows} rollouts, which the "
                f"other arguments ({list(rows.shape)} in {rows.count}) divide otherwise; build both from one cu_seqlens"
            )

    @property
    def rows(self) -> Rows:
        """The token layout."""
        return Rows(self.turn_ids.shape, self.num_rows, self.cu_seqlens)

    @property
    def num_rows(self) -> int:
        """Number of rollouts, B."""
        return self.offsets.shape[0] - 1

    def turns(self) -> Tensor:
        """Turns of each rollout, `[B]` int64."""
        return self.offsets.diff()

    def spread(self, per_rollout: Tensor) -> Tensor:
        """A value of each rollout at its segments, `[B]` to `[S]`."""
        return torch.repeat_interleave(per_rollout, self.turns(), output_size=self.count)

    def row_of_segment(self) -> Tensor:
        """Rollout of each segment, `[S]` int64."""
        return self.spread(torch.arange(self.num_rows, device=self.offsets.device))


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """One number per segment: advantages that are constant on each (rollout, turn).

    A loss that gets a table looks its advantages up in the kernel; `fastadv.segment_tokens` writes them out per token.

    Attributes:
        values: `[S]` float32 (float64 from float64 rewards), in the order of the segments.
        segments: which (rollout, turn) each value is of.
    """

    values: Tensor  # [S]
    segments: Segments

    def rollouts(self, first: int, last: int) -> SegmentTable:
        """The table of rollouts `first .. last - 1`, for a micro-batch. Reads two offsets: waits for a GPU."""
        s = self.segments
        if not 0 <= first <= last <= s.num_rows:
            raise ValueError(f"SegmentTable.rollouts: {first} .. {last} is no range of its {s.num_rows} rollouts")
        begin, end = int(s.offsets[first]), int(s.offsets[last])
        if s.cu_seqlens is None:
            turn_ids, cu_seqlens = s.turn_ids[first:last], None
        else:
            token, cu_seqlens = s.cu_seqlens[first], s.cu_seqlens[first : last + 1] - s.cu_seqlens[first]
            turn_ids = s.turn_ids[int(token) : int(s.cu_seqlens[last])]
        part = Segments(turn_ids, cu_seqlens, s.offsets[first : last + 1] - begin, end - begin)
        return SegmentTable(self.values[begin:end], part)
