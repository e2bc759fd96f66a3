"""Small causal language models and batches for the gradient-projection tests, and their gradients written out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import fastadv as fa

VOCABULARY = 23
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")


def small_model(family: str, *, tied: bool = False, **changes: Any) -> Any:
    """Two random layers, with weights large enough to have opinions, in float64 and evaluation mode."""
    import transformers as hf

    common = {
        "vocab_size": VOCABULARY, "tie_word_embeddings": tied, "initializer_range": 0.4, "bos_token_id": 0,
        "eos_token_id": None, "num_hidden_layers": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    llama = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, **common}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if family == "gpt2":
            model: Any = hf.GPT2LMHeadModel(hf.GPT2Config(**{"n_embd": 16, "n_head": 2, **common, **changes}))
        elif family == "llama":  # with every bias that the family can have
            biases = {"attention_bias": True, "mlp_bias": True}
            model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**biases, **llama, **changes}))
        elif family == "qwen2":
            model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**{**llama, **changes}))
        else:
            model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**{"head_dim": 8, **llama, **changes}))
        with torch.no_grad():
            for parameter in model.parameters():  # norms of 1 and biases of 0 would hide much
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


def ragged_batch(rollouts: int = 6, *, seed: int = 0, turns: int = 4, vocabulary: int = VOCABULARY) -> fa.Batch:
    """Rollouts of one to `turns` turns in groups of two; tool results between, before and behind them."""
    rng = random.Random(seed)
    mask: list[int] = []
    ids: list[int] = []
    ends, id_ends = [0], [0]
    for _ in range(rollouts):
        response: list[int] = []
        for turn in range(rng.randint(1, turns)):
            response += [0] * rng.randint(min(turn, 1), 2) + [1] * rng.randint(1, 3)
        response += [0] * rng.randint(0, 2)
        mask += response
        ids += [rng.randrange(vocabulary) for _ in range(rng.randint(1, 4) + len(response))]
        ends.append(len(mask))
        id_ends.append(len(ids))
    return fa.Batch.of(
        mask=torch.tensor(mask),
        rewards=torch.tensor([float(rng.random() < 0.5) for _ in range(rollouts)]),
        group_ids=[i // 2 for i in range(rollouts)],
        outcomes=torch.zeros(rollouts, dtype=torch.int64),
        cu_seqlens=torch.tensor(ends),
        token_ids=fa.TokenIds(torch.tensor(ids), torch.tensor(id_ends)),
    )


def equal_batch(rollouts: int, turns: int, turn_tokens: int) -> fa.Batch:
    """Rollouts of equal length, one token of prompt."""
    length = turns * turn_tokens
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (rollouts * (length + 1),), generator=generator)
    return fa.Batch.of(
        mask=(torch.arange(length) % turn_tokens >= 1).repeat(rollouts),
        rewards=torch.zeros(rollouts),
        group_ids=[0] * rollouts,
        outcomes=torch.zeros(rollouts, dtype=torch.int64),
        cu_seqlens=torch.arange(rollouts + 1) * length,
        token_ids=fa.TokenIds(ids, torch.arange(rollouts + 1) * (length + 1)),
    )


@contextmanager
def exact_norms(model: nn.Module) -> Iterator[None]:
    """RMSNorms without the float32 that transformers computes them in, whatever the model is."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]

    def forward(norm: Any, x: Tensor) -> Tensor:
        scaled: Tensor = norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return scaled

    for norm in norms:
        norm.forward = forward.__get__(norm)
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def rollout_log_probs(model: Any, batch: fa.Batch, row: int, temperature: float = 1.0) -> Tensor:
    """Log-probs of a rollout's response, scored alone, with a graph."""
    assert batch.token_ids is not None
    first, last = batch.token_ids.cu_seqlens[row : row + 2].tolist()
    ids = batch.token_ids.ids[first:last].long()
    scores = (model(input_ids=ids[None]).logits[0] / temperature)[:-1].log_softmax(-1)
    log_probs: Tensor = scores.gather(1, ids[1:, None]).squeeze(1)[-int(batch.lengths[row]) :]
    return log_probs


def written_out(
    model: Any, batch: fa.Batch, level: str, *, temperature: float = 1.0, weights: Tensor | None = None
) -> Tensor:
    """Every segment's whole gradient `[S, P]`, by autograd, one rollout at a time."""
    assert batch.cu_seqlens is not None
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = []
    with exact_norms(model):
        for row in range(batch.num_rollouts):
            log_probs = rollout_log_probs(model, batch, row, temperature)
            tokens = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
            turn = batch.turn_ids[tokens]
            factor = (batch.mask[tokens] & (turn >= 0)).to(log_probs.dtype)
            factor = factor if weights is None else factor * weights[tokens]
            turns = int(batch.segments.turns()[row]) if level == "turn" else 1
            for j in range(turns):
                loss = (log_probs * factor * (turn == j if level == "turn" else 1)).sum()
                gradient = torch.autograd.grad(
                    loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
                )
                found.append(torch.cat([g.reshape(-1) for g in gradient]))
    return torch.stack(found)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected number."""
    return float((found - expected).abs().max() / expected.abs().max())
