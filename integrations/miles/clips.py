"""How many tokens of a step the loss clipped: counted by the loss, read once the step's gradients are finished."""

from __future__ import annotations

import torch
from torch import Tensor


class ClipTally:
    """Clipped tokens of `custom_loss` since the last step, on the device."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None  # [2] clipped tokens, tokens

    def add(self, metrics: dict[str, Tensor]) -> None:
        """Those of a micro-batch; nothing is waited for."""
        if "clip_fraction" not in metrics:
            return
        tokens = metrics["tokens"].to(torch.float64)
        share = torch.where(tokens > 0, metrics["clip_fraction"].to(torch.float64), 0.0)
        sums = torch.stack([share * tokens, tokens]).detach()
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self, device: torch.device) -> float | None:
        """The share over all ranks, and a new start; None where no loss of ours ran."""
        sums = torch.zeros(2, dtype=torch.float64, device=device) if self._sums is None else self._sums.to(device)
        self._sums = None
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        clipped, tokens = sums.tolist()
        return clipped / tokens if tokens else None


CLIPPED = ClipTally()
