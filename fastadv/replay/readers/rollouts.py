"""What a reader makes of a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastadv.batch import Batch
from fastadv.groups import GroupIndex
from fastadv.outcomes import Census, Outcome, census


def _no_progress(done: int, total: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class ReadOptions:
    """How a dump is read.

    Attributes:
        solved_above: a rollout with a reward above this is solved.
        reward_key: key of the reward where rewards are dictionaries.
        trust: execute the code that a pickle may hold. Only for files whose author you trust.
        progress: called with (rollouts done, rollouts in the file).
    """

    solved_above: float = 0.0
    reward_key: str | None = None
    trust: bool = False
    progress: Callable[[int, int], None] = _no_progress


@dataclass(frozen=True, eq=False)
class Rollouts:
    """The rollouts of one file."""

    source: str  # "miles", "verl" or "portable"
    outcomes: Tensor  # [B] int64
    rewards: Tensor  # [B] float64; NaN where there is no result
    groups: GroupIndex
    labels: list[str]  # [G]: what the prompts are, for people; untrusted text
    batch: Batch | None  # None: the file carries no tokens
    notes: list[str] = field(default_factory=list)  # rules that were applied, for the report
    refused: str = ""  # why arms and gradients cannot be computed; "" where they can

    def census(self) -> Census:
        """Counts of outcomes."""
        return census(self.outcomes, self.groups)


def outcome_of(reward: float, *, cut_off: bool, infra: bool, solved_above: float) -> Outcome:
    """The outcome of a rollout: passing counts before how it ended, and no result is no result."""
    if infra or not math.isfinite(reward):
        return Outcome.INFRA
    if reward > solved_above:
        return Outcome.SOLVED
    return Outcome.BUDGET if cut_off else Outcome.FAILED


def label_text(prompt: object, name: object = None, width: int = 80) -> str:
    """A prompt in one line: the task's name if it has one, and its text, or the last message of a chat."""
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content", "")
    text = " ".join(f"{name}: {prompt}".split() if name is not None else str(prompt).split())
    return text if len(text) <= width else text[: width - 1] + "…"


def packed_offsets(lengths: list[int]) -> Tensor:
    """`cu_seqlens` of rows of these lengths."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
