"""Which tokens an op on hidden states computes, found once per batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv import validation
from fastadv.rows import Rows


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """The tokens that count, of a mask and weights. Built once per batch by `token_index`; the ops on hidden states
    take it in place of the mask.

    How many rows a product has the host must know. A mask on a GPU does not tell it without a wait; an index does.

    Attributes:
        mask: `[N]` or `[B, T]` bool: the mask itself.
        reads: like mask, bool: tokens that count and have a weight other than 0.
        positions: `[L]` int64: where `reads` is true, counted through all dimensions, ascending.
    """

    mask: Tensor  # [N] or [B, T]
    reads: Tensor  # like mask
    positions: Tensor  # [L]

    def __post_init__(self) -> None:
        op = "TokenIndex"
        validation.tensor(op, "mask", self.mask, dtypes=(torch.bool,))
        shape, device = tuple(self.mask.shape), self.mask.device
        validation.tensor(op, "reads", self.reads, shape=shape, dtypes=(torch.bool,), device=device)
        validation.index_fields(self, "positions", device=device)
        if validation.reads_values(self.reads, self.positions) and not torch.equal(
            self.positions, self.reads.reshape(-1).nonzero().flatten()
        ):
            raise ValueError(
                f"{op}: positions are {self.positions.shape[0]} others than the {int(self.reads.sum())} tokens of "
                "reads. Build it with fastadv.token_index"
            )

    def check_layout(self, op: str, shape: tuple[int, ...], device: torch.device) -> None:
        """Raises ValueError unless the index is of such tokens."""
        if tuple(self.mask.shape) != shape or self.mask.device != device:
            raise ValueError(
                f"{op}: the TokenIndex is of {list(self.mask.shape)} tokens on {self.mask.device}, labels have shape "
                f"{list(shape)} on {device}; build it with fastadv.token_index from the mask of these tokens"
            )

    def to(self, device: torch.device | str) -> TokenIndex:
        """The index on another device."""
        return TokenIndex(self.mask.to(device), self.reads.to(device), self.positions.to(device))


def token_index(mask: Tensor, *, weights: Tensor | None = None, cu_seqlens: Tensor | None = None) -> TokenIndex:
    """The tokens that count, once for all calls on a batch: waits for a GPU here, so that the calls do not.

    Args:
        mask: `[N]` or `[B, T]`, bool, integer or whole-valued float; what is not 0 counts.
        weights: `[B]` or like mask; tokens of weight 0 are not computed.
        cu_seqlens: `[B + 1]` int, ends of packed rollouts; needed for weights `[B]` of packed tokens.

    Returns:
        TokenIndex(mask, reads, positions).

    Raises:
        ValueError: shapes that do not fit, a fractional mask value.
        TypeError: an argument of another type.
    """
    op = "token_index"
    validation.tensor(op, "mask", mask, dtypes=validation.MASKS)
    validation.mask_values(op, "mask", mask)
    if mask.dim() not in (1, 2):
        raise ValueError(f"{op}: mask has shape {list(mask.shape)}; pass [N] or [B, T]")
    on = reads = mask != 0
    if weights is not None:
        validation.tensor(op, "weights", weights, dtypes=validation.MASKS, device=mask.device)
        rows = Rows.of(op, "mask", mask, cu_seqlens)
        if weights.shape not in (rows.shape, (rows.count,)):
            raise ValueError(
                f"{op}: weights has shape {list(weights.shape)}; expected [{rows.count}], one a rollout, or "
                f"{list(rows.shape)}, one a token"
            )
        reads = weighted(on, weights, rows)
    return TokenIndex(on, reads, reads.reshape(-1).nonzero().flatten())


def weighted(on: Tensor, weights: Tensor, rows: Rows) -> Tensor:
    """Tokens that are on and have a weight other than 0; weights of neither tokens nor rollouts change nothing."""
    if weights.shape == rows.shape:
        return on & (weights != 0)
    return on & rows.spread(weights != 0) if tuple(weights.shape) == (rows.count,) else on
