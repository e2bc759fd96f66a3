"""Segment tables: one value per (rollout, turn)."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv.rows import Rows


def segment_tokens(values: Tensor, offsets: Tensor, turn_ids: Tensor, rows: Rows, mask: Tensor | None) -> Tensor:
    """`values[offsets[row] + turn]` at each token that belongs to a turn and is in the mask, 0 elsewhere."""
    on = turn_ids >= 0  # [N] or [B, T]
    if mask is not None:
        on = on & (mask != 0)
    segment = rows.spread(offsets[:-1]) + turn_ids
    if values.shape[0] == 0:
        return values.new_zeros(turn_ids.shape)
    return torch.where(on, values[torch.where(on, segment, 0)], 0)
