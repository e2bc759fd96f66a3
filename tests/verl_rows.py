"""Padded rows as verl hands them to an estimator, drawn from a seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class VerlRows:
    """Uids in any order and groups of any size, tool holes in an int64 mask, an outcome on each row's last token.

    Rewards are quarters, which float32 adds up exactly: verl's float32 and our float64 then agree on groups of equals.

    Args:
        seed: of everything.
        rows: how many.
        width: of the padding.
        pairs: no group of one.
        empty: share of the rows without a token.
        outside: the outcome may stand outside of the mask, where a tool answered last.
        token_rewards: a reward at each token of the mask besides.
    """

    def __init__(
        self,
        seed: int,
        rows: int,
        width: int,
        *,
        pairs: bool = False,
        empty: float = 0.0,
        outside: bool = False,
        token_rewards: bool = False,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, max(1, rows // 3), (rows,), generator=g)
        if pairs:
            labels = torch.cat([torch.arange(rows) % max(1, rows // 2)] * 2)[torch.randperm(2 * rows, generator=g)]
        rows = len(labels)
        self.uid = np.array([f"uid-{int(label)}" for label in labels], dtype=object)
        lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
        position = torch.arange(width)
        sampled = (torch.rand(rows, width, generator=g) < 0.7) | (position == lengths - 1) & (not outside)
        sampled |= position == 0  # who answered has a token
        gone = torch.rand(rows, 1, generator=g) < empty
        self.mask = ((position < lengths) & sampled & ~gone).long()
        self.scores = torch.randint(-4, 9, (rows,), generator=g) / 4
        self.rewards = torch.zeros(rows, width)
        self.rewards[torch.arange(rows), lengths[:, 0] - 1] = self.scores
        if token_rewards:
            self.rewards += torch.randint(-4, 5, (rows, width), generator=g) / 64 * self.mask
        self.values = torch.randn(rows, width, generator=g)
        chance = 0.05 + 0.9 * torch.rand(rows, width, generator=g)
        self.log_probs = chance.log()
        self.squares = chance**2 + (1 - chance) ** 2 * torch.rand(rows, width, generator=g)
        self.is_weights = 2 * torch.rand(rows, width, generator=g)
        self.greedy = torch.randint(0, 5, (rows,), generator=g) / 4

    def call(self, *names: str) -> dict[str, Any]:
        """Arguments of verl's functions: rewards, mask and those that are named."""
        known: dict[str, Any] = {
            "index": self.uid,
            "values": self.values,
            "reward_baselines": self.greedy,
            "old_log_probs": self.log_probs,
            "sum_pi_squared": self.squares,
            "rollout_is_weights": self.is_weights,
        }
        chosen = {name: known[name] for name in names}
        return {"token_level_rewards": self.rewards.clone(), "response_mask": self.mask, **chosen}

    def take(self, rows: Tensor) -> VerlRows:
        """Some of the rows."""
        other = object.__new__(VerlRows)
        for name, value in vars(self).items():
            setattr(other, name, value[rows] if isinstance(value, Tensor) else value[rows.numpy()])
        return other
