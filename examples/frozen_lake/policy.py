"""The policy: a small Llama over the words of the game."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import fastadv as fa
from examples.frozen_lake.environment import ACTION_IDS, BOS, MAX_TURNS, TURN_TOKENS, WORD_IDS, WORDS

FORMAT_EMBEDDING, FORMAT_NORM = 0.3, 6.0  # see `_know_format`


def new_policy(seed: int) -> LlamaForCausalLM:
    """An untrained policy of 84,608 parameters; the same seed gives the same weights."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=TURN_TOKENS * MAX_TURNS + 1,
        tie_word_embeddings=True,
        bos_token_id=WORD_IDS[BOS],
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    _know_format(model)
    return model


@torch.no_grad()
def _know_format(model: LlamaForCausalLM) -> None:
    """Gives a new policy what a pre-trained one brings along: it answers an observation with an action word.

    The policy samples from its whole vocabulary, so logged log-probs are those of a plain softmax. Untrained, it would
    hit an action word 4 times in 37 and hardly ever reach a goal. Channel 0 separates the two kinds of words: the last
    word of an observation sets it below zero, the final norm flips its sign, and the tied output embedding turns that
    into a logit of about +10 for each action and -10 for the rest. These are first weights like any others: training
    can change them.
    """
    channel = model.model.embed_tokens.weight[:, 0]  # [V]
    channel.fill_(-FORMAT_EMBEDDING)
    channel[list(ACTION_IDS)] = FORMAT_EMBEDDING
    model.model.norm.weight[0] = -FORMAT_NORM


def save_policy(model: LlamaForCausalLM, directory: Path) -> None:
    """Writes config.json and model.safetensors, for `transformers.AutoModelForCausalLM.from_pretrained(directory)`."""
    model.config.save_pretrained(directory)
    tied = {"lm_head.weight"}  # the same tensor as the input embedding, and restored from it
    weights = {name: weight for name, weight in model.state_dict().items() if name not in tied}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def load_policy(directory: Path) -> LlamaForCausalLM:
    """The policy that `save_policy` wrote."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


class Sampler:
    """Samples one token a turn for a batch of episodes, with what the policy has read so far in a KV cache.

    Every turn is TURN_TOKENS long, so that rows stay aligned and no padding mask is needed.
    """

    def __init__(self, model: LlamaForCausalLM, generator: torch.Generator):
        self._model, self._generator = model, generator
        self._cache = DynamicCache(config=model.config)

    @torch.inference_mode()
    def sample(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Reads a turn and samples the next token, at temperature 1 from the whole vocabulary.

        Args:
            blocks: `[B, TURN_TOKENS]` int64, the next turn of each episode that still runs.

        Returns:
            Tokens `[B]` int64 and their log-probs `[B]` float32, in nats.
        """
        # The cache by position: the argument is `past_key_values` in some versions of transformers, `cache` in others.
        output = self._model(blocks, None, None, self._cache, use_cache=True, logits_to_keep=1)
        log_probs = output.logits[:, 0].log_softmax(-1)  # [B, V]
        tokens = torch.multinomial(log_probs.exp(), 1, generator=self._generator)  # [B, 1]
        return tokens[:, 0], log_probs.gather(1, tokens)[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Drops all rows of the batch but these, `[K]` int64."""
        self._cache.batch_select_indices(rows)


class FullPass(NamedTuple):
    """What the policy says about the tokens of a batch that were sampled; 0 at the other response tokens."""

    log_probs: Tensor  # [N] float32, nats
    entropy: Tensor  # [N] float32, nats: of the choice among the four actions


def full_pass(model: LlamaForCausalLM, batch: fa.Batch) -> FullPass:
    """Log-probs and entropies of the sampled tokens in one pass without a cache, with gradient.

    The entropy is that of the distribution given that the token is an action. As a bonus, the entropy over the whole
    vocabulary pays for malformed actions, and the policy collapses into them before it has found a reward.

    Args:
        model: the policy.
        batch: packed, with token ids.
    """
    assert batch.token_ids is not None
    padded = fa.pad(batch.token_ids.ids.long(), batch.token_ids.cu_seqlens)  # [B, T]; causal: padding is never read
    rows, columns = _sampled(batch)  # [A], [A]
    hidden = model.model(padded, use_cache=False).last_hidden_state  # [B, T, H]
    logits = model.lm_head(hidden[rows, columns - 1])  # [A, V]
    log_probs = logits.log_softmax(-1).gather(1, padded[rows, columns, None])[:, 0]  # [A]
    actions = logits[:, list(ACTION_IDS)].log_softmax(-1)  # [A, 4]
    entropy = -(actions.exp() * actions).sum(-1)  # [A]
    zeros = torch.zeros(batch.mask.shape)  # [N]
    return FullPass(zeros.masked_scatter(batch.mask, log_probs), zeros.masked_scatter(batch.mask, entropy))


def _sampled(batch: fa.Batch) -> tuple[Tensor, Tensor]:
    """Rollout and position, prompt included, of each token that was sampled, in the order of the mask."""
    rows = torch.arange(batch.num_rollouts).repeat_interleave(batch.lengths)  # [N]
    assert batch.token_ids is not None
    assert batch.cu_seqlens is not None
    prompt_lengths = batch.token_ids.cu_seqlens.diff() - batch.lengths  # [B]
    columns = torch.arange(batch.num_tokens) - batch.cu_seqlens[rows] + prompt_lengths[rows]  # [N]
    return rows[batch.mask], columns[batch.mask]
