"""What a reader makes of a file."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from fastadv.batch import Batch
from fastadv.groups import GroupIndex
from fastadv.outcomes import Census, census
from fastadv.replay.errors import ReplayError, finite

LARGEST_LOG_PROB = 1e-3  # 0, and what low precision makes of it
LARGEST_REWARD = 1e30  # float32 ends at 3e38, and rewards are squared in float64 and summed over tokens


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

    def __post_init__(self) -> None:
        finite("--solved-above", self.solved_above)


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


def reward_of(where: str, value: object) -> float:
    """A logged reward; NaN for none.

    Raises:
        ReplayError: what is no number, infinite, or too large to compute with.
    """
    if value is None:
        return math.nan
    if not isinstance(value, (int, float)):
        raise ReplayError(
            f"{where} is a {type(value).__name__}; a reward is a number, or None where there is no result"
        )
    if value == value and not -LARGEST_REWARD <= value <= LARGEST_REWARD:  # math.isnan would overflow on an integer
        raise ReplayError(
            f"{where} is {_shown(value)}; a reward is finite and at most {LARGEST_REWARD:g} in size, or None for no "
            "result"
        )
    return float(value)


def check_log_probs(where: str, batch: Batch) -> None:
    """Raises ReplayError where a sampled token of a packed batch has a log-prob that no token can have."""
    values = batch.rollout_log_probs
    if values is None or batch.cu_seqlens is None:
        return
    bad = batch.mask & ~(values.isfinite() & (values <= LARGEST_LOG_PROB))
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        row = int(torch.searchsorted(batch.cu_seqlens, at, right=True)) - 1
        token = at - int(batch.cu_seqlens[row])
        raise ReplayError(
            f"{where} {row}: 'rollout_log_probs'[{token}] is {float(values[at])} at a sampled token; a "
            "log-prob is finite and not above 0. Leave rollout_log_probs out if the engine did not log them"
        )


def _shown(value: float) -> str:
    """A number, a huge integer by its size."""
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else str(value)


def label_text(prompt: object, name: object = None, width: int = 80) -> str:
    """A prompt in one line: the task's name if it has one, and its text, or the last message of a chat.

    Only texts are looked into: a few bytes of any other object can stand for gigabytes of text.
    """
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content", "")
    named, shown = _beginning(name, 4 * width), _beginning(prompt, 4 * width)
    text = f"{named}: " if named is not None else ""
    text = " ".join((text + (f"(no text: {type(prompt).__name__})" if shown is None else shown)).split())
    return text if len(text) <= width else text[: width - 1] + "…"


def _beginning(value: object, length: int) -> str | None:
    """The beginning of a text, or a number; None for anything else."""
    if isinstance(value, str):
        return value[:length]
    return str(value) if isinstance(value, int) and abs(value) < 2**63 else None


def names_of(keys: Iterable[object]) -> str:
    """The first few keys of a dictionary in alphabetical order, however many and whatever they are."""
    shown = sorted(key[:80] if isinstance(key, str) else f"<{type(key).__name__}>" for key in islice(keys, 1000))
    return ", ".join(shown[:10]) + (", ..." if len(shown) > 10 else "")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def short(value: object) -> str:
    """The beginning of an object's `repr`, however large or deep it is."""
    return _SHORT.repr(value)


def packed_offsets(lengths: list[int]) -> Tensor:
    """`cu_seqlens` of rows of these lengths."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
