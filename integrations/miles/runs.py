"""Turns of samples: the runs of ones in their loss masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of ones in the masks of samples, R of them.

    Attributes:
        begin, end: `[R]` int64, in tokens of the run's sample's response.
        offsets: `[S + 1]` int64: those of sample s are `offsets[s]` to `offsets[s + 1]`.
    """

    begin: np.ndarray  # [R]
    end: np.ndarray  # [R]
    offsets: np.ndarray  # [S + 1]

    @property
    def counts(self) -> list[int]:
        """Runs of each sample, `[S]`."""
        found: list[int] = np.diff(self.offsets).tolist()
        return found


def find_runs(masks: Sequence[Any], lengths: Sequence[int]) -> Runs:
    """Finds the runs of ones of all masks in one pass over bytes: no Python loop goes over tokens.

    Args:
        masks: `[S]` of zeros and ones, lists as Miles and slime have them, arrays or tensors; None: all ones, as both
            fill it in.
        lengths: `[S]` response tokens.

    Raises:
        ValueError: a mask of another length than its response, or that holds something else than 0 and 1, naming the
            sample.
    """
    parts: list[bytes | bytearray] = []
    for row, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
        if mask is None:
            parts.append(b"\1" * length)
            continue
        if len(mask) != length:
            raise ValueError(f"sample {row}: loss_mask has {len(mask)} entries for {length} response tokens")
        parts.append(_as_bytes(mask, row))
    # A zero in front of each sample and at the end: runs neither begin before the first token nor span two samples.
    tokens = np.frombuffer(b"\0".join([b"", *parts, b""]), np.uint8)
    starts = np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64) + 1)])  # [S + 1], places of the zeros
    if tokens.size and tokens.max() > 1:
        row = int(np.searchsorted(starts, int((tokens > 1).argmax()), "right")) - 1
        raise ValueError(f"sample {row}: loss_mask holds something else than 0 and 1")
    changes = np.flatnonzero(tokens[1:] != tokens[:-1])  # [2 R], the place before each
    begin, end = changes[::2], changes[1::2]
    offsets = np.searchsorted(begin, starts)  # [S + 1]
    first = np.repeat(starts[:-1], np.diff(offsets))  # [R]
    return Runs(begin - first, end - first, offsets)


def _as_bytes(mask: Any, row: int) -> bytes | bytearray:
    if isinstance(mask, list):
        try:
            return bytearray(mask)  # a tenth of what numpy takes for a list of integers
        except (TypeError, ValueError):  # fractions, and numbers that no byte holds
            pass  # the array says which
    on = np.asarray(mask)
    if not ((on == 0) | (on == 1)).all():
        raise ValueError(f"sample {row}: loss_mask holds something else than 0 and 1")
    return on.astype(np.uint8).tobytes()
