"""Rows as verl's agent loops leave them in TransferQueue, for tests of the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class VerlRows:
    """A batch in the making: one call of `add` a row.

    Attributes:
        keys, fields, tags: as verl's agent_loop_tq.py puts them.
    """

    keys: list[str] = field(default_factory=list)
    fields: list[dict[str, Any]] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, uid: str, session: int, output: int, mask: list[int], reward: float, *, turns: int = 2,
        versions: tuple[int, int] = (1, 1), extra: dict[str, Any] | None = None, prompt: int = 3,
    ) -> VerlRows:  # fmt: skip
        """One output of a session: its mask, and its reward at the last token whatever the mask is there."""
        n = len(mask)
        scores = torch.zeros(n)
        scores[-1] = reward
        padding = uid.startswith("pad")
        g = torch.Generator().manual_seed(len(self.keys))
        self.keys.append(f"{uid}_{session}_{output}")
        self.fields.append({
            "uid": uid, "loss_mask": torch.tensor(mask), "response_mask": torch.tensor(mask),
            "prompts": torch.arange(prompt), "responses": torch.arange(10, 10 + n),
            "num_turns": 0 if padding else turns, "extra_fields": extra or {}, "rm_scores": scores,
            "old_log_probs": -torch.rand(n, generator=g), "rollout_log_probs": -torch.rand(n, generator=g),
        })  # fmt: skip
        self.tags.append({"is_padding": padding, "min_global_steps": versions[0], "max_global_steps": versions[1]})
        return self

    def padded(self, name: str) -> Tensor:
        """A field of all rows, `[B, R]`, 0 in the padding."""
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in self.fields], batch_first=True)


def agents() -> VerlRows:
    """Three prompts: sessions of one and of several outputs, tool holes, a row of padding in between."""
    return (
        VerlRows()
        .add("a", 0, 0, [1, 1, 0, 1], 1.0, turns=4)
        .add("b", 0, 1, [1, 0, 1], 1.0, turns=4)
        .add("a", 1, 0, [1, 0, 1, 0, 1, 1, 0, 1], 0.0, turns=8)
        .add("b", 1, 0, [1], 0.0)
        .add("padf00d", 0, 0, [0], 0.0)
        .add("b", 0, 0, [1, 1], 1.0)
        .add("a", 2, 0, [0, 1, 1], 1.0)
        .add("c_1", 0, 0, [1, 1], 0.5)
        .add("b", 2, 0, [1, 0, 0, 1, 1], 0.25, turns=4)
    )
