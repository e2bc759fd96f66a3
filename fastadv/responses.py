"""Rollouts as a causal language model takes them, and the log-probs of their response tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastadv.batch import Batch


def without_prompt(batch: Batch) -> int | None:
    """The first rollout of a batch with token ids of which a response has nothing before it, so that nothing predicts
    its first token; None if there is none."""
    ids = batch.token_ids
    assert ids is not None
    responses = batch.lengths if ids.responses is None else ids.responses
    bare = (ids.cu_seqlens.diff() == responses) & (responses > 0)
    return ids.rollout_of(int(bare.nonzero()[0])) if bool(bare.any()) else None


@dataclass(frozen=True, eq=False)
class Responses:
    """Prompts and responses of some rollouts, padded: a row each, or where a rollout is several, its rows in order."""

    ids: Tensor  # [b, T] int64
    inside: Tensor  # [b, T] bool: no padding
    chosen: Tensor  # [b, T - 1] bool: positions that predict a response token

    @classmethod
    def of(cls, batch: Batch, first: int, last: int, device: torch.device) -> Responses:
        """Rollouts `first .. last - 1` of a batch with token ids."""
        given = batch.token_ids
        assert given is not None
        counts = batch.lengths
        if given.responses is not None:
            offsets, counts = given.rows_of(batch.num_rollouts), given.responses
            first, last = int(offsets[first]), int(offsets[last])
        ends = given.cu_seqlens[first : last + 1]
        tokens = given.ids[int(ends[0]) : int(ends[-1])].to(device, torch.int64)
        lengths, responses = ends.diff().to(device), counts[first:last].to(device)
        ids = nn.utils.rnn.pad_sequence([*torch.split_with_sizes(tokens, lengths.tolist())], batch_first=True)
        positions = torch.arange(ids.shape[1], device=device)
        inside = positions < lengths[:, None]
        response = inside & (positions >= (lengths - responses)[:, None])  # [b, T]
        return cls(ids, inside, response[:, 1:])  # position p is predicted at p - 1

    def arguments(self) -> dict[str, Tensor | bool]:
        """What a model of transformers is called with."""
        return {"input_ids": self.ids, "attention_mask": self.inside.long(), "use_cache": False}

    def log_probs(self, logits: Tensor, temperature: float) -> Tensor:
        """Log-probs of the response tokens `[n]`, packed, from the model's logits `[b, T, V]`; float32 at least."""
        scores = logits[:, :-1][self.chosen]  # [n, V]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
        found: Tensor = scores.log_softmax(-1).gather(1, self.ids[:, 1:][self.chosen][:, None]).squeeze(1)
        return found
