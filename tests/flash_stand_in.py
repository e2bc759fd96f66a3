"""A module in flash-attn's place: its function of variable length with the documented arguments, in plain PyTorch."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from torch import Tensor

from fastadv.gradproj import flash

HALVES = (torch.float16, torch.bfloat16)


class FlashAttn(types.ModuleType):
    """What flash-attn checks is checked, and what it was called with is kept."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = HALVES) -> None:
        super().__init__("flash_attn")
        self.__spec__ = ModuleSpec("flash_attn", None)  # transformers looks for it
        self.dtypes, self.calls = dtypes, []  # type: tuple[torch.dtype, ...], list[dict[str, Any]]
        self.leak = 0.0  # of a rollout's neighbour into its results

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        for t in (q, k, v):
            assert t.dim() == 3
            assert t.dtype == q.dtype
            assert t.dtype in self.dtypes, f"FlashAttention only supports fp16 and bf16 data type, not {t.dtype}"
            assert t.stride(-1) == 1, "Input tensor must have contiguous last dimension"
        for ends, longest, rows in ((cu_seqlens_q, max_seqlen_q, len(q)), (cu_seqlens_k, max_seqlen_k, len(k))):
            assert ends.dtype == torch.int32
            assert ends.is_contiguous()
            assert ends.device == q.device
            assert (int(ends[0]), int(ends[-1])) == (0, rows)
            assert type(longest) is int
            assert longest == int(ends.diff().max())
        assert q.shape[1] % k.shape[1] == 0
        assert k.shape == v.shape
        self.calls.append(
            {
                "rows": len(q), "ends": cu_seqlens_q.tolist(), "window": window_size, "dropout": dropout_p,
                "causal": causal, "deterministic": deterministic, "gradient": torch.is_grad_enabled(),
            }
        )  # fmt: skip
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        left, right = window_size
        found = []
        for first, last in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
            wide = torch.promote_types(q.dtype, torch.float32)
            one, keys, values = (t[first:last].to(wide).transpose(0, 1) for t in (q, k, v))  # [H, L, D]
            keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 0) for t in (keys, values))
            behind = torch.arange(last - first)[:, None] - torch.arange(last - first)
            looks = torch.ones_like(behind, dtype=torch.bool)
            looks &= (behind >= 0) if causal else looks
            looks &= (behind <= left) if left >= 0 else looks
            looks &= (behind >= -right) if right >= 0 else looks
            scores = (one @ keys.transpose(1, 2) * scale).masked_fill(~looks, -torch.inf)
            found.append((scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype))
        out = torch.cat(found)
        return out + self.leak * out.sum() if self.leak else out


def install(
    monkeypatch: pytest.MonkeyPatch, module: Any, *, dtypes: tuple[torch.dtype, ...] = HALVES, on_cpu: bool = True
) -> None:
    """Puts a module in flash-attn's place; `on_cpu`: as if a CPU were a card."""
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(flash, "DTYPES", dtypes)
    if on_cpu:
        monkeypatch.setattr(flash, "DEVICES", ("cpu",))
    flash._varlen.cache_clear()
