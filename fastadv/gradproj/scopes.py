"""What gradients are taken over: weighted rollouts, and the parts of a batch that they are compared on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv.batch import Batch
from fastadv.coins import uniforms
from fastadv.gradproj.gram import SegmentGram
from fastadv.monitoring.difficulty import levels_of
from fastadv.ops.group_advantages import group_advantages
from fastadv.outcomes import Outcome
from fastadv.segment_table import SegmentTable

# Upper ends of the turn buckets, counted from 1: 1, 2, 3-4, 5-8, 9-16, 17-32, 33 and later. Fixed before looking.
TURN_EDGES = (1, 2, 4, 8, 16, 32)
TURN_NAMES = ("turn 1", "turn 2", "turns 3-4", "turns 5-8", "turns 9-16", "turns 17-32", "turns 33+")


@dataclass(frozen=True, eq=False)
class Weighted:
    """Advantages of a batch with a weight per rollout, and perhaps one per token: one gradient."""

    advantages: SegmentTable
    weights: Tensor  # [B] floating
    token_weights: Tensor | None = None  # like the batch's mask; None: all 1

    def coefficients(self, gram: SegmentGram) -> Tensor:
        """What each of the Gram's segments is weighted by, `[S]` float64.

        Raises:
            ValueError: another batch's segments; weights that differ from token to token; advantages that differ
                between turns, of a Gram of whole rollouts.
        """
        if self.token_weights is not None:
            raise ValueError(
                "coefficients: tokens have weights of their own, and a segment of the Gram has one for all of its "
                "tokens; take flat gradients (fastadv replay --gradients cells)"
            )
        index = self.advantages.segments
        values = self.advantages.values.to(torch.float64)
        weighted = values * torch.repeat_interleave(
            self.weights.to(torch.float64), index.turns(), output_size=index.count
        )
        if gram.level == "turn":
            if weighted.shape != gram.rows.shape:
                raise ValueError(f"coefficients: {index.count} segments, but the Gram has {gram.size}")
            return weighted
        if index.num_rows != gram.size:
            raise ValueError(f"coefficients: {index.num_rows} rollouts, but the Gram has {gram.size}")
        rows = index.row_of_segment()
        per_rollout = torch.zeros(gram.size, dtype=torch.float64)
        per_rollout[rows] = weighted
        if not torch.equal(per_rollout[rows], weighted):
            raise ValueError(
                "coefficients: the advantages differ between turns of a rollout, and the Gram's segments are whole "
                "rollouts; compute it at level 'turn'"
            )
        return per_rollout


@dataclass(frozen=True, eq=False)
class Partition:
    """How a batch is cut up for comparison."""

    half: Tensor  # [B] int64: 0 or 1, the members of each group alternating by a hash of their ids
    difficulty: Tensor  # [B] int64: index in DIFFICULTIES, by the other half of the group
    turn: Tensor  # [S] int64: index in TURN_NAMES


def partition(batch: Batch, seed: int) -> Partition:
    """Halves, difficulty and turn buckets of a batch."""
    groups = batch.groups
    hashes = uniforms(seed, batch.row_ids, "half")
    by_hash = hashes.argsort(stable=True)  # ids may repeat in a file of rollouts
    order = by_hash[groups.index[by_hash].argsort(stable=True)]  # groups together, by hash within
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.shape[0]) - groups.offsets[groups.index[order]]
    half = rank % 2

    cell = groups.index * 2 + (1 - half)  # the other half of a row's group
    size = torch.bincount(groups.index * 2 + half, minlength=2 * groups.num_groups)[cell]
    solved = batch.outcomes == Outcome.SOLVED
    successes = torch.bincount((groups.index * 2 + half)[solved], minlength=2 * groups.num_groups)[cell]
    difficulty = levels_of(successes, size)

    index = batch.segments
    turn = torch.arange(index.count) - index.offsets[index.row_of_segment()] + 1
    return Partition(half, difficulty, torch.bucketize(turn, torch.tensor(TURN_EDGES)))


def within_half(values: Tensor, batch: Batch, cells: Partition, half: int) -> Weighted:
    """REINFORCE on a number per rollout with a leave-one-out mean within one half of each group: on the cap indicator
    it estimates grad P(cap), on the reward grad J, from that half alone."""
    labels = batch.groups.index * 2 + cells.half
    return Weighted(_leave_one_out(values, batch, labels), (cells.half == half).to(torch.float32))


def within_group(values: Tensor, batch: Batch) -> Weighted:
    """REINFORCE on a number per rollout with a leave-one-out mean within each group."""
    return Weighted(_leave_one_out(values, batch, batch.groups.index), torch.ones(batch.num_rollouts))


def _leave_one_out(values: Tensor, batch: Batch, labels: Tensor) -> SegmentTable:
    advantages = group_advantages(values.to(torch.float64), labels, baseline="loo")
    return SegmentTable(batch.segments.spread(advantages), batch.segments)
