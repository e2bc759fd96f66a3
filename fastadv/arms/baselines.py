"""The baseline that an arm compares each reward with, of excluded rollouts too."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv.arms.arm import Arm
from fastadv.batch import Batch
from fastadv.ops.group_advantages import group_advantages
from fastadv.ops.turn_advantages import turn_advantages
from fastadv.reference.group_advantages import divided
from fastadv.segment_table import Segments
from fastadv.statistics import FrozenStatistics


def baselines(arm: Arm, batch: Batch, statistics: FrozenStatistics) -> Tensor:
    """The baseline of each segment of the arm, `[S]` float64, of excluded rollouts too."""
    index = arm.segments(batch)
    if arm.baseline == "turn-reached":
        table = turn_advantages(
            batch.rewards, batch.groups, index, kappa=arm.kappa, singleton=arm.singleton, statistics=statistics,
            output="segments",
        )  # fmt: skip
        return index.spread(batch.rewards) - table.values
    if arm.population != "survivors":
        per_rollout = group_advantages(
            batch.rewards, batch.groups, baseline=arm.baseline, singleton=arm.singleton, statistics=statistics
        )
        return index.spread(batch.rewards - per_rollout)
    # Excluded rollouts do not vote, so their baseline is the survivors' mean: there is nothing to leave out.
    survivors = statistics.population("survivors", "baselines").moments
    mean = survivors.minimum + divided(survivors.sum, survivors.weight)
    kept = batch.rewards - group_advantages(
        batch.rewards, batch.groups, baseline=arm.baseline, population="survivors", singleton=arm.singleton,
        statistics=statistics,
    )  # fmt: skip
    assert statistics.include is not None
    per_rollout = torch.where(statistics.include, kept, mean[batch.groups.index])
    return index.spread(per_rollout)


def segment_sums(batch: Batch, index: Segments, per_token: Tensor) -> Tensor:
    """Sum over the sampled tokens of each segment, `[S]` float64. Waits for no device."""
    on = batch.mask & (index.turn_ids >= 0)
    segment = torch.where(on, batch.rows.spread(index.offsets[:-1]) + index.turn_ids, index.count)
    sums = torch.zeros(index.count + 1, dtype=torch.float64, device=per_token.device)  # the last of tokens without one
    values = torch.where(on, per_token.to(torch.float64), 0.0)
    return sums.index_add(0, segment.reshape(-1), values.reshape(-1))[: index.count]


def rollout_means(batch: Batch, index: Segments, values: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Mean over each rollout's sampled tokens of a value per segment, `[B]` float64; 0 where there are none. So is the
    baseline of a rollout, wherever b is told. `tokens`, like the batch's mask: how many sampled tokens each of an
    outline's tokens stands for; None: one."""
    tokens = segment_sums(batch, index, torch.ones_like(batch.mask) if tokens is None else tokens)  # [S]
    row = index.row_of_segment()
    zeros = torch.zeros(batch.num_rollouts, dtype=torch.float64, device=values.device)
    return divided(zeros.index_add(0, row, tokens * values), zeros.index_add(0, row, tokens))
