"""Tokens that count, by row."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv.rows import Rows


def token_counts(mask: Tensor, rows: Rows) -> Tensor:
    """Tokens with a non-zero mask in each row, `[B]` int64."""
    return rows.sum((mask != 0).to(torch.int64))
