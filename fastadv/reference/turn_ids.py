"""Turn ids from the response mask."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv.rows import Rows


def turn_ids_from_mask(mask: Tensor, rows: Rows) -> Tensor:
    """Tokens of a row's k-th run of non-zero mask get k, all others -1; -2 if they are in no row."""
    on = mask != 0  # [N] or [B, T]
    before = torch.zeros_like(on)
    before[..., 1:] = on[..., :-1]
    if rows.cu_seqlens is not None:
        begins = rows.cu_seqlens.clamp(0, rows.tokens)  # [B + 1]: of false rows, somewhere
        starts = on.new_zeros(rows.tokens + 1).index_fill(0, begins, True)
        before = before & ~starts[:-1]
    first = on & ~before  # a run's first token
    runs = first.cumsum(-1)  # runs begun so far, over all rows if packed
    if rows.cu_seqlens is not None:
        earlier = torch.cat([runs.new_zeros(1), runs])[begins[:-1]]  # [B]: runs of the rows before
        row = rows.row_of_token()
        turns = torch.where(on, runs - earlier.index_select(0, row) - 1, -1)
        return torch.where(rows.holds(row), turns, -2).to(torch.int32)
    return torch.where(on, runs - 1, -1).to(torch.int32)


def turn_counts(turn_ids: Tensor, rows: Rows) -> Tensor:
    """1 + the largest turn id of each row, `[B]` int64; 0 where no token belongs to a turn, -1 of a false row."""
    ids = turn_ids.to(torch.int64)
    if rows.cu_seqlens is None:
        return torch.cat([ids, ids.new_full((rows.count, 1), -1)], dim=1).amax(1) + 1
    largest = ids.new_full((rows.count,), -1)
    counts = largest.scatter_reduce(0, rows.row_of_token(), ids, "amax") + 1
    return torch.where(rows.false(), -1, counts)
