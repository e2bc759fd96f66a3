"""Prompts and responses of rollouts as token ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv import validation
from fastadv.rows import Rows

LARGEST_ID = 2**31 - 1


def offsets_of(lengths: Tensor) -> Tensor:
    """Where rows of these lengths begin, and where the last ends: `[B + 1]`."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def ranges(offsets: Tensor, rows: Tensor) -> Tensor:
    """Positions `offsets[r] .. offsets[r + 1] - 1` of each row r in `rows`, one after another."""
    lengths = offsets.diff()[rows]
    ends = lengths.cumsum(0)
    shift = torch.repeat_interleave(offsets[rows] - (ends - lengths), lengths)
    return torch.arange(shift.shape[0], device=offsets.device) + shift


@dataclass(frozen=True, eq=False)
class TokenIds:
    """Prompt and response ids of each rollout, packed; a response is the end of its row.

    A rollout is one row, or several: calls of a model that do not continue each other's text (another prompt, a context
    that was cut, leaves of a tree). Its response tokens are then those of its rows, one row after the other.

    Attributes:
        ids: `[M]` int32, from 0.
        cu_seqlens: `[B + 1]` int64, ends of the rows in `ids`; the first is 0, the last M. `[Q + 1]` where a rollout
            may be several rows.
        rollouts: `[Q]` int64, rollout of each row, not decreasing; None: a row each.
        responses: `[Q]` int64, response tokens of each row; with `rollouts`.
    """

    ids: Tensor  # [M]
    cu_seqlens: Tensor  # [B + 1] or [Q + 1]
    rollouts: Tensor | None = None  # [Q]
    responses: Tensor | None = None  # [Q]

    def checked(self, op: str, lengths: Tensor) -> TokenIds:
        """The same ids as int32 and everything else as int64.

        Args:
            op: what checks, for error messages.
            lengths: `[B]` response tokens of the rollouts.

        Raises:
            TypeError, ValueError: an id that is no integer in [0, 2^31), offsets that do not start at 0, decrease or do
                not end at the number of ids, a row with fewer ids than response tokens, rows whose response tokens are
                not their rollouts'.
        """
        device = lengths.device
        validation.tensor(op, "token_ids.ids", self.ids, dtypes=validation.INTEGERS, device=device)
        if self.ids.dim() != 1:
            raise ValueError(f"{op}: token_ids.ids has shape {list(self.ids.shape)}; pass packed ids [M]")
        rollouts, responses = self._checked_rows(op, lengths)
        count = lengths.shape[0] if responses is None else responses.shape[0]
        validation.tensor(op, "token_ids.cu_seqlens", self.cu_seqlens, shape=(count + 1,))
        rows = Rows.of(op, "token_ids.ids", self.ids, self.cu_seqlens, "token_ids.cu_seqlens")
        assert rows.cu_seqlens is not None
        bad = (self.ids < 0) | (self.ids.to(torch.int64) > LARGEST_ID)
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise ValueError(
                f"{op}: token_ids.ids[{at}] is {int(self.ids[at])}; ids are from 0 to {LARGEST_ID}, and a token "
                "without an id cannot be scored"
            )
        needed = lengths if responses is None else responses
        short = rows.lengths() < needed
        if bool(short.any()):
            row = int(short.nonzero()[0])
            what = "rollout" if responses is None else "row"
            raise ValueError(
                f"{op}: token_ids has {int(rows.lengths()[row])} tokens for {what} {row}, fewer tokens than its "
                f"response of {int(needed[row])}; a row is the prompt and then the response"
            )
        return TokenIds(self.ids.to(torch.int32), rows.cu_seqlens, rollouts, responses)

    def _checked_rows(self, op: str, lengths: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.rollouts is None or self.responses is None:
            if self.rollouts is not self.responses:
                missing = "rollouts" if self.rollouts is None else "responses"
                raise ValueError(f"{op}: token_ids.{missing} is None; rollouts and responses come together")
            return None, None
        for name, values in (("rollouts", self.rollouts), ("responses", self.responses)):
            validation.tensor(op, f"token_ids.{name}", values, dtypes=validation.INTEGERS, device=lengths.device)
            if values.dim() != 1 or values.shape != self.rollouts.shape:
                raise ValueError(f"{op}: token_ids.{name} has shape {list(values.shape)}; pass [Q], one a row")
        rollouts, responses = self.rollouts.to(torch.int64), self.responses.to(torch.int64)
        count = lengths.shape[0]
        bad = (rollouts < 0) | (rollouts >= count)
        bad[1:] |= rollouts.diff() < 0
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise ValueError(
                f"{op}: token_ids.rollouts[{row}] is {int(rollouts[row])}; rollouts are from 0 to {count - 1} and do "
                "not decrease"
            )
        if bool((responses < 0).any()):
            row = int((responses < 0).nonzero()[0])
            raise ValueError(f"{op}: token_ids.responses[{row}] is {int(responses[row])}; it must be at least 0")
        sums = torch.zeros_like(lengths).index_add(0, rollouts, responses)
        if not torch.equal(sums, lengths):
            row = int((sums != lengths).nonzero()[0])
            raise ValueError(
                f"{op}: the rows of rollout {row} in token_ids have {int(sums[row])} response tokens, the rollout has "
                f"{int(lengths[row])}"
            )
        return rollouts, responses

    def to(self, device: torch.device | str) -> TokenIds:
        """The same on another device."""
        parts = (self.ids, self.cu_seqlens, self.rollouts, self.responses)
        return TokenIds(*(None if part is None else part.to(device) for part in parts))  # type: ignore[arg-type]

    def rows_of(self, count: int) -> Tensor:
        """Where the rows of each of `count` rollouts begin, and the last ones end, `[B + 1]` int64."""
        device = self.cu_seqlens.device
        if self.rollouts is None:
            return torch.arange(count + 1, device=device)
        return torch.searchsorted(self.rollouts, torch.arange(count + 1, device=device))

    def rollout_of(self, row: int) -> int:
        """The rollout that a row is of, as errors name it."""
        return row if self.rollouts is None else int(self.rollouts[row])

    def take(self, rollouts: Tensor, count: int) -> TokenIds:
        """Those of some of `count` rollouts, `[n]` int64, in this order."""
        offsets = self.rows_of(count)
        rows = ranges(offsets, rollouts)
        ids, ends = self.ids[ranges(self.cu_seqlens, rows)], offsets_of(self.cu_seqlens.diff()[rows])
        if self.responses is None:
            return TokenIds(ids, ends)
        numbers = torch.arange(rollouts.shape[0], device=rollouts.device)
        return TokenIds(ids, ends, torch.repeat_interleave(numbers, offsets.diff()[rollouts]), self.responses[rows])
