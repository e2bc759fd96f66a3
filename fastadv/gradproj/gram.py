"""Inner products of the policy gradients of a batch's segments."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class SegmentGram:
    """Inner products of the segments' gradients.

    Attributes:
        gram: `[S, S]` float64.
        rows: `[S]` int64, rollout of each segment, in batch order.
        turns: `[S]` int64, turn from 0; -1 at level "rollout".
        covered: number of parameters that the gradients are of.
        total: number of parameters of the model.
    """

    gram: Tensor  # [S, S]
    rows: Tensor  # [S]
    turns: Tensor  # [S]
    covered: int
    total: int
