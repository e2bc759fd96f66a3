"""Gradients of embeddings, as rows by token id: most rows of most segments' gradients are 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv.gradproj.streams import Stream
from fastadv.ops.segment_weight_gram import GramSum, tile_dtype


class EmbeddingRows:
    """Gradients of an embedding's rows, from the cotangent of its output: row by token id, as few as there are ids."""

    def __init__(self, padding: int | None) -> None:
        self.padding = padding  # the id whose row autograd gives no gradient
        self._ids: list[Tensor] = []
        self._segments: list[Tensor] = []
        self._rows: list[Tensor] = []

    def keep(self, ids: Tensor, stream: Stream, cotangent: Tensor) -> None:
        """One stream's cotangent `[n, d]` of the live rows, whose ids are `ids [n]`."""
        lengths = torch.tensor([run.rows for run in stream.runs])
        segments = torch.tensor(stream.segments).repeat_interleave(lengths).to(ids.device)
        if self.padding is not None:
            inside = ids != self.padding
            ids, segments, cotangent = ids[inside], segments[inside], cotangent[inside]
        self._ids.append(ids)
        self._segments.append(segments)
        self._rows.append(cotangent)

    def any(self) -> bool:
        """Whether something was kept."""
        return bool(self._ids)

    def sorted(self) -> SortedRows:
        """Everything that was kept, by id; forgets it here."""
        found = SortedRows.of(torch.cat(self._ids), torch.cat(self._segments), torch.cat(self._rows))
        self._ids, self._segments, self._rows = [], [], []
        return found

    def add_to(self, gram: GramSum, scratch_bytes: int) -> None:
        """Adds the Gram: only rows of one id meet, so only ids that occur are laid out, a slice at a time."""
        if not self.any():
            return
        rows = self.sorted()
        d = rows.values.shape[1]
        dtype = tile_dtype(rows.values.dtype)
        numbers = max(1, scratch_bytes // dtype.itemsize)
        columns = min(d, max(1, numbers // gram.segments))
        width = max(1, numbers // (gram.segments * columns))
        for first in range(0, rows.distinct, width):
            last = min(rows.distinct, first + width)
            segments, inverse = torch.unique(rows.segments[rows.span(first, last)], return_inverse=True)
            for column in range(0, d, columns):
                wide = min(columns, d - column)
                tile = torch.zeros(len(segments), last - first, wide, dtype=dtype, device=rows.values.device)
                rows.scatter(tile, first, last, column, inverse)
                gram.add(tile.flatten(1), segments)


@dataclass(frozen=True, eq=False)
class SortedRows:
    """Rows of an embedding's gradient, sorted by token id."""

    ids: Tensor  # [U] the ids that occur, rising
    starts: list[int]  # [U + 1] where each one's rows begin
    segments: Tensor  # [M]
    values: Tensor  # [M, d]

    @classmethod
    def of(cls, ids: Tensor, segments: Tensor, values: Tensor) -> SortedRows:
        """Sorts rows."""
        order = ids.argsort(stable=True)
        there, counts = torch.unique_consecutive(ids[order], return_counts=True)
        return cls(there, [0, *counts.cumsum(0).tolist()], segments[order], values[order])

    @property
    def distinct(self) -> int:
        """U."""
        return len(self.starts) - 1

    def span(self, first: int, last: int) -> slice:
        """Rows of the ids numbered `first .. last - 1`."""
        return slice(self.starts[first], self.starts[last])

    def scatter(self, tile: Tensor, first: int, last: int, column: int, where: Tensor) -> None:
        """Adds the ids numbered `first .. last - 1` to `tile [k, last - first, columns]`, at the segments `where`."""
        span = self.span(first, last)
        counts = torch.tensor(self.starts[first : last + 1]).diff()
        slot = torch.arange(last - first).repeat_interleave(counts).to(where.device)
        self._add(tile, where * tile.shape[1] + slot, span, column)

    def scatter_ids(self, tile: Tensor, row: int, column: int) -> None:
        """Adds ids `row .. row + rows - 1` to `tile [S, rows, columns]` of all segments."""
        ends = torch.tensor([row, row + tile.shape[1]], device=self.ids.device)
        first, last = torch.searchsorted(self.ids, ends).tolist()
        span = self.span(first, last)
        counts = torch.tensor(self.starts[first : last + 1]).diff().to(self.ids.device)
        slot = (self.ids[first:last] - row).repeat_interleave(counts)
        self._add(tile, self.segments[span] * tile.shape[1] + slot, span, column)

    def _add(self, tile: Tensor, index: Tensor, span: slice, column: int) -> None:
        columns = tile.shape[2]
        rows = self.values[span, column : column + columns].to(tile.dtype)
        tile.view(-1, columns).index_add_(0, index, rows)
