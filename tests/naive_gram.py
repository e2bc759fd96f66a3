"""The segment Gram the plain way: a backward pass for each segment, flat gradients, one product. The tests' oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import fastadv as fa
from fastadv.gradproj import SegmentGram
from fastadv.replay.policy import Policy


def segment_gradients(policy: Policy, batch: fa.Batch, level: str = "turn") -> Tensor:
    """`[S, P]` float64."""
    gradients = []
    for row in range(batch.num_rollouts):
        log_probs = policy.log_probs(batch, row, row + 1)
        first, last = int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])
        mask, turns = batch.mask[first:last], batch.turn_ids[first:last]
        count = int(batch.segments.turns()[row])
        on = [mask & (turns == turn) for turn in range(count)] if level == "turn" else [mask & (turns >= 0)]
        for chosen in on:
            flat = torch.autograd.grad(
                torch.where(chosen, log_probs, 0.0).sum(), policy.parameters, retain_graph=True, allow_unused=True,
                materialize_grads=True,
            )  # fmt: skip
            gradients.append(torch.cat([g.reshape(-1) for g in flat]).double())
    return torch.stack(gradients)


def naive_gram(policy: Policy, batches: fa.Batch | Sequence[fa.Batch], level: str = "turn") -> SegmentGram:
    batches = [batches] if isinstance(batches, fa.Batch) else list(batches)
    gradients = torch.cat([segment_gradients(policy, batch, level) for batch in batches])
    rows, turns, rollouts = [], [], 0
    for batch in batches:
        if level == "turn":
            row = batch.segments.row_of_segment()
            turn = torch.arange(batch.segments.count) - batch.segments.offsets[row]
        else:
            row = torch.arange(batch.num_rollouts)
            turn = torch.full_like(row, -1)
        rows.append(row + rollouts)
        turns.append(turn)
        rollouts += batch.num_rollouts
    return SegmentGram(
        gradients @ gradients.T, torch.cat(rows), torch.cat(turns), policy.size, policy.size,
        temperature=policy.temperature, dtype=str(policy.parameters[0].dtype).removeprefix("torch."),
    )  # fmt: skip
