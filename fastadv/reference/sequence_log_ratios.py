"""Log-ratios of whole rollouts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastadv.rows import Rows


class SequenceLogRatios(NamedTuple):
    """Per rollout, over the tokens of the mask, each `[B]`.

    Ranks that hold parts of the same rollouts (context parallel) add up `sum`, `tokens` and `missing` and take the
    smallest `minimum`.
    """

    sum: Tensor  # float64, of log_prob - old_log_prob
    minimum: Tensor  # float64, the smallest log-ratio, 0 where none is negative
    tokens: Tensor  # int64
    missing: Tensor  # int64, tokens whose old log-prob is NaN

    def mean(self) -> Tensor:
        """Mean log-ratio of each rollout over its tokens that are not missing, 0 where there is none, `[B]` float64."""
        return self.sum / (self.tokens - self.missing).clamp(min=1)


def sequence_log_ratios(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, rows: Rows, skip_missing: bool
) -> SequenceLogRatios:
    """Sums and minima; tokens without an old log-prob are left out of both, if they are to be skipped."""
    on = mask != 0  # [N] or [B, T]
    absent = on & old_log_probs.isnan()
    used = on & ~absent if skip_missing else on
    log_ratio = torch.where(used, log_probs.to(torch.float64) - old_log_probs.to(torch.float64), 0.0)
    minimum = rows.minimum(torch.where(log_ratio < 0, log_ratio, 0.0))
    return SequenceLogRatios(
        rows.sum(log_ratio), minimum, rows.sum(on.to(torch.int64)), rows.sum(absent.to(torch.int64))
    )
