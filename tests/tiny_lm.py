"""Causal language models of a few hundred parameters, small enough to hold every gradient flat."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 11


class Block(nn.Module):
    """Attention, and a second part that all that is odd about shapes is in: widths of 7 and 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.gate, self.down = nn.Linear(width, 7), nn.Linear(width, 1), nn.Linear(7, width)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(x.shape[-1])).masked_fill(~allowed, -torch.inf)
        x = x + self.out(scores.softmax(-1) @ v)
        h = self.norm(x)
        return x + self.down(self.up(h).tanh() * self.gate(h).sigmoid())


class TinyLM(nn.Module):
    """Log-probs of ids, padded `[B, T]` or packed `[1, N]` with `cu_seqlens`; the first of each rollout has 0."""

    def __init__(self, width: int = 6, layers: int = 2, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointing: bool | None = None  # reentrant or not

    def forward(self, ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        n = ids.shape[1]
        rollout = torch.zeros(n) if cu_seqlens is None else torch.bucketize(torch.arange(n), cu_seqlens[1:], right=True)
        allowed = torch.ones(n, n, dtype=torch.bool).tril() & (rollout[:, None] == rollout)
        x = self.embedding(ids)
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x, allowed)
            else:
                x = torch.utils.checkpoint.checkpoint(layer, x, allowed, use_reentrant=self.checkpointing)
        log_probs = self.head(self.norm(x)).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        first = torch.ones(n, dtype=torch.bool) if cu_seqlens is None else rollout.diff(prepend=-torch.ones(1)) == 0
        log_probs = nn.functional.pad(log_probs, (1, 0))
        return log_probs if cu_seqlens is None else torch.where(first, log_probs, 0.0)


def flat(gradients: list[Tensor]) -> Tensor:
    return torch.cat([g.reshape(-1) for g in gradients])


def largest_error(value: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest number."""
    return float((value - expected).abs().max() / expected.abs().max())


# ---- of transformers ------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.4,
}  # fmt: skip


def in_float64(norm: nn.Module) -> None:
    """RMSNorms of transformers are float32 inside, whatever they are given."""
    eps = norm.variance_epsilon
    norm.forward = lambda x: norm.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def causal_lm(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model of transformers, qwen2 with a tied head; in float64 throughout where that is asked for."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=8, n_layer=2, n_head=2, n_positions=64, initializer_range=0.4,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).to(dtype).eval()
    tied = family == "qwen2"
    names = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
    extra = {"head_dim": 4} if family == "qwen3" else {}
    config = getattr(transformers, f"{names[family]}Config")(**SIZES, **extra, tie_word_embeddings=tied)
    model = getattr(transformers, f"{names[family]}ForCausalLM")(config).to(dtype).eval()
    for module in model.modules():
        if dtype == torch.float64 and type(module).__name__.endswith("RMSNorm"):
            in_float64(module)
    return model
