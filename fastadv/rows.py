"""How the tokens of a batch divide into rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv import validation

UNKNOWN = -(2**62)  # a count that there is not: nothing plausible comes of it


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed tokens `[N]` with `cu_seqlens [B + 1]` (flash-attn's varlen convention), or padded tokens `[B, T]`.

    Packed tokens without `cu_seqlens` are one rollout.
    """

    shape: torch.Size
    count: int
    cu_seqlens: Tensor | None  # [B + 1] int64 on the tokens' device; None: padded

    @classmethod
    def of(cls, op: str, name: str, tokens: Tensor, cu_seqlens: Tensor | None, offsets: str = "cu_seqlens") -> Rows:
        """Reads the layout off a per-token tensor. `name` and `offsets` name the two arguments in errors.

        Raises ValueError where the tensor is not 1-D or 2-D, and where `cu_seqlens` does not start at 0, decreases, or
        does not end at the number of tokens. Where its values are not read, a false row's results are NaN or UNKNOWN,
        and so is what a token in no row gets.
        """
        validation.tensor(op, name, tokens)
        if tokens.dim() == 2:
            if cu_seqlens is not None:
                raise ValueError(
                    f"{op}: {name} is padded [B, T] and {offsets} is given; pass packed [N] tokens with {offsets}"
                )
            return cls(tokens.shape, tokens.shape[0], None)
        if tokens.dim() != 1:
            raise ValueError(f"{op}: {name} has shape {list(tokens.shape)}; pass packed [N] or padded [B, T] tokens")
        if cu_seqlens is None:
            return cls(tokens.shape, 1, torch.arange(2, device=tokens.device) * tokens.shape[0])
        validation.tensor(op, offsets, cu_seqlens, dtypes=(torch.int32, torch.int64), device=tokens.device)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"{op}: {offsets} has shape {list(cu_seqlens.shape)}; expected [B + 1], starting with 0")
        if cu_seqlens.shape[0] == 1 and tokens.shape[0]:
            raise ValueError(f"{op}: {offsets} has no row, but {name} has {tokens.shape[0]} tokens")
        cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
        if validation.reads_values(cu_seqlens):
            _check_offsets(op, name, offsets, cu_seqlens, tokens.shape[0])
        return cls(tokens.shape, cu_seqlens.shape[0] - 1, cu_seqlens)

    @classmethod
    def trusted(cls, tokens: Tensor, cu_seqlens: Tensor | None) -> Rows:
        """The layout of a per-token tensor whose `cu_seqlens` came from `of`."""
        return cls(tokens.shape, tokens.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, cu_seqlens)

    @property
    def tokens(self) -> int:
        """Number of token slots, padding included."""
        return self.shape.numel()

    def lengths(self) -> Tensor:
        """Token slots of each row, `[B]` int64."""
        return self._offsets().diff()

    def _offsets(self) -> Tensor:
        if self.cu_seqlens is None:
            raise ValueError("padded rows all have the width of the tensor")
        return self.cu_seqlens

    def row_of_token(self) -> Tensor:
        """Row of each token of a packed batch, `[N]` int64; of a token in no row, any.

        (`torch.repeat_interleave` would stop the device where offsets are false.)
        """
        offsets = self._offsets()
        token = torch.arange(self.tokens, device=offsets.device)
        return (torch.searchsorted(offsets, token, right=True) - 1).clamp(0, self.count - 1)

    def false(self) -> Tensor:
        """Which rows of a packed batch are not among its tokens, end before they begin, or leave out the first or the
        last token, `[B]` bool: those of offsets that nobody checked."""
        offsets = self._offsets()
        begin, end = offsets[:-1], offsets[1:]
        bad = (begin < 0) | (end < begin) | (end > self.tokens)
        bad[:1] |= begin[:1] != 0
        bad[-1:] |= end[-1:] != self.tokens
        return bad

    def holds(self, row: Tensor) -> Tensor:
        """Whether each token of a packed batch is in the row that `row_of_token` gave, and that is among the tokens,
        `[N]` bool."""
        offsets = self._offsets()
        token = torch.arange(self.tokens, device=offsets.device)
        begin, end = offsets.index_select(0, row), offsets.index_select(0, row + 1)
        return (begin >= 0) & (begin <= token) & (token < end) & (end <= self.tokens)

    def spread(self, per_row: Tensor) -> Tensor:
        """A per-row value at each token: `[B]` to the tokens' shape (padded: a view). NaN at a token in no row, where
        there is a NaN."""
        if self.cu_seqlens is None:
            return per_row[:, None].expand(self.shape)
        row = self.row_of_token()
        values = per_row.index_select(0, row)
        return torch.where(self.holds(row), values, torch.nan) if values.is_floating_point() else values

    def sum(self, per_token: Tensor) -> Tensor:
        """Sum over each row's tokens, `[B]`: float64 of floating values, since float32 stops counting at 2^24."""
        if per_token.is_floating_point():
            per_token = per_token.to(torch.float64)
        if self.cu_seqlens is None:
            return per_token.sum(-1)
        sums = per_token.new_zeros(self.count).index_add(0, self.row_of_token(), per_token)
        return torch.where(self.false(), torch.nan if sums.is_floating_point() else UNKNOWN, sums)

    def minimum(self, per_token: Tensor) -> Tensor:
        """Smallest of each row's floating values and 0, `[B]`."""
        if self.cu_seqlens is None:
            return torch.cat([per_token, per_token.new_zeros(self.count, 1)], dim=1).amin(-1)
        smallest = per_token.new_zeros(self.count).scatter_reduce(0, self.row_of_token(), per_token, "amin")
        return torch.where(self.false(), torch.nan, smallest)


def _check_offsets(op: str, name: str, offsets: str, cu_seqlens: Tensor, tokens: int) -> None:
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0:
        raise ValueError(f"{op}: {offsets} starts at {first}; it must start at 0")
    steps = cu_seqlens.diff()
    if bool((steps < 0).any()):
        row = int((steps < 0).nonzero()[0])
        raise ValueError(
            f"{op}: {offsets} decreases after row {row} ({int(cu_seqlens[row])} to {int(cu_seqlens[row + 1])})"
        )
    if last != tokens:
        raise ValueError(f"{op}: {offsets} ends at {last}, but {name} has {tokens} tokens")
