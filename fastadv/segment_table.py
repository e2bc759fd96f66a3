"""Segments: the (rollout, turn) pairs of a batch, and tables with one value per segment."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastadv.rows import Rows


@dataclass(frozen=True, eq=False)
class Segments:
    """The (rollout, turn) pairs of a batch. Built once per batch by `fastadv.segments`.

    Segment (row, turn) has the number `offsets[row] + turn`; a row has `1 + its largest turn id` of them, 0 if no token
    of it belongs to a turn.
    """

    turn_ids: Tensor  # [N] or [B, T] int32 or int64: turn of each token, -1 outside turns
    cu_seqlens: Tensor | None  # [B + 1] int64 if packed
    offsets: Tensor  # [B + 1] int64
    count: int  # S

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


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """One number per segment: advantages that are constant on each (rollout, turn).

    A loss that gets a table looks its advantages up in the kernel; `fastadv.segment_tokens` writes them out per token.
    """

    values: Tensor  # [S] float32 (float64 from float64 rewards)
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
