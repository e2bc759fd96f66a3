"""Causal attention in blocks of queries, on torch's products: the triangle only, and of a stream its live rows only.

Scores are float32 at least and exist for one block of queries at a time; the backward multiplies them again, once for
each stream. A rollout's results come from its own rows, whatever lies beside it or behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from fastadv.gradproj.interceptors import Tape
from fastadv.ops.segment_weight_gram import tile_dtype

NAME = "fastadv_blocks"  # in transformers' registry of attention functions
BLOCK = 64  # queries
TAPE: ContextVar[Tape] = ContextVar("tape")  # of the pass that runs


def register(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Makes an attention known to transformers, with masks as for torch's own: none where attention is plainly causal,
    else True where a query looks."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)


def check_options(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Raises ValueError where a layer attends with more than softmax and mask."""
    for name in ("softcap", "position_bias", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"segment_gram: {type(module).__name__} attends with {name}, which is not supported")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, with transformers' arguments.

    Args:
        module: the layer, which is causal.
        query: `[b, H, T, D]`.
        key, value: `[b, K, T, D]`; K divides H.
        attention_mask: `[b, 1, T, T]` bool, True where a query looks, never ahead of it; None: at all before it.
        scaling: of the scores; None: 1 / sqrt(D).
        options: what other attentions read; what would change the result is refused.

    Returns:
        `[b, T, H, D]`, and None for the weights.
    """
    check_options(module, options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    y: Tensor = _Attention.apply(query, key, value, attention_mask, scale, TAPE.get())  # type: ignore[no-untyped-call]
    return y.transpose(1, 2), None


class _Blocks:
    """Views of queries, keys and values for blocks of queries `first .. last - 1`, which see keys `0 .. last - 1`."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> None:
        self.k, self.v = (t.flatten(0, 1) for t in (k, v))  # [b * K, T, D]
        self.q, self.mask, self.scale, self.heads = q, mask, scale, k.shape[1]
        self.dtype = tile_dtype(q.dtype)

    def rows(self, t: Tensor, first: int, last: int) -> Tensor:
        """Rows of `[b, H, T, D]` as `[b * K, (H / K) * n, D]`: the heads of one key head together."""
        block = t[:, :, first:last].to(self.dtype)
        return block.reshape(t.shape[0] * self.heads, -1, t.shape[3])

    def keys(self, t: Tensor, last: int) -> Tensor:
        """The first keys or values."""
        return t[:, :last].to(self.dtype)

    def probabilities(self, first: int, last: int) -> Tensor:
        """`[b * K, (H / K) * n, last]`."""
        scores = torch.bmm(self.rows(self.q, first, last), self.keys(self.k, last).transpose(1, 2)).mul_(self.scale)
        by_query = scores.view(self.q.shape[0], -1, last - first, last)  # [b, H, n, last]
        if self.mask is None:
            ahead = torch.ones(last - first, last, dtype=torch.bool, device=scores.device).triu_(first + 1)
        else:
            ahead = ~self.mask[:, :, first:last, :last]
        by_query.masked_fill_(ahead, -torch.inf)
        return scores.softmax(-1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, tape: Tape) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale, ctx.tape = scale, tape
        blocks, out = _Blocks(q, k, v, mask, scale), torch.empty_like(q, memory_format=torch.contiguous_format)
        for first in range(0, q.shape[2], BLOCK):
            last = min(q.shape[2], first + BLOCK)
            y = torch.bmm(blocks.probabilities(first, last), blocks.keys(blocks.v, last))
            out[:, :, first:last] = y.view(*q.shape[:2], last - first, -1)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask = ctx.saved_tensors
        (dy,) = gradients
        blocks, scale = _Blocks(q, k, v, mask, ctx.scale), ctx.scale
        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(blocks.k.shape, dtype=blocks.dtype, device=q.device) for _ in range(2))
        assert ctx.tape.stream is not None
        reach = max(run.rows for run in ctx.tape.stream.runs)  # behind, dy is 0
        for first in range(0, reach, BLOCK):
            last = min(reach, first + BLOCK)
            p = blocks.probabilities(first, last)
            d = blocks.rows(dy, first, last)
            dv[:, :last] += torch.bmm(p.transpose(1, 2), d)
            ds = torch.bmm(d, blocks.keys(blocks.v, last).transpose(1, 2))
            ds.sub_((ds * p).sum(-1, keepdim=True)).mul_(p).mul_(scale)
            block = torch.bmm(ds, blocks.keys(blocks.k, last))
            dq[:, :, first:last] = block.view(*q.shape[:2], last - first, -1)
            dk[:, :last] += torch.bmm(ds.transpose(1, 2), blocks.rows(q, first, last))
        return dq, dk.to(k.dtype).view(k.shape), dv.to(v.dtype).view(v.shape), None, None, None
