"""Segment tables: one value per (rollout, turn)."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv.rows import Rows


def segment_tokens(values: Tensor, offsets: Tensor, turn_ids: Tensor, rows: Rows, mask: Tensor | None) -> Tensor:
    """`values[offsets[row] + turn]` at each token that belongs to a turn and is in the mask, 0 elsewhere.

    A turn that the table lacks, and a token in no row, gives NaN.
    """
    on = turn_ids >= 0  # [N] or [B, T]
    if mask is not None:
        on = on & (mask != 0)
    segment = rows.spread(offsets[:-1]) + turn_ids
    there = (segment >= 0) & (segment < values.shape[0])
    if rows.cu_seqlens is not None:
        there = there & rows.holds(rows.row_of_token())
    table = torch.cat([values, values.new_full((1,), torch.nan)])  # [S + 1]
    return torch.where(on, table[torch.where(there, segment, values.shape[0])], 0)
