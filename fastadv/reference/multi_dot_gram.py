"""Inner products of all pairs of a few vectors."""

from __future__ import annotations

import torch
from torch import Tensor


def multi_dot_gram(vectors: list[Tensor]) -> Tensor:
    """`[K, K]` float64: the sum over elements of x_i * x_j, in float64."""
    flat = [v.to(torch.float64).flatten() for v in vectors]  # K of [n]
    return torch.stack([torch.stack([(x * y).sum() for y in flat]) for x in flat])
