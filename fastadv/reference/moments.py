"""What each group knows of its voters' rewards. All of it is float64 and shifted by the group's smallest voting reward:
a group without spread is then made of exact zeros, whatever its value and size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastadv.groups import GroupIndex


class GroupMoments(NamedTuple):
    """Moments of the voters of each group, each `[G]`; sums weighted by the votes."""

    minimum: Tensor  # float64: smallest reward
    weight: Tensor  # float64: sum of votes
    sum: Tensor  # float64: of votes * (reward - minimum)
    squares: Tensor  # float64: of votes * (reward - mean)^2
    voters: Tensor  # int64: rows with a vote that is not zero


class TurnMoments(NamedTuple):
    """Voters that reached each turn of a group: ragged, group g's turns are `[offsets[g], offsets[g + 1])`."""

    offsets: Tensor  # [G + 1] int64
    votes: Tensor  # [at least offsets[G]] float64: of those with more than `turn` turns
    rewards: Tensor  # like votes: sum of votes * (reward - minimum) over them


def group_moments(rewards: Tensor, votes: Tensor, groups: GroupIndex) -> GroupMoments:
    """Moments of `rewards [B]` float64 over rows with `votes [B]` float64 not zero."""
    index, votes_here = groups.index, votes != 0
    infinity = torch.full_like(rewards[:1], torch.inf).expand(groups.num_groups)
    minimum = infinity.scatter_reduce(0, index, torch.where(votes_here, rewards, torch.inf), "amin")
    voters = torch.zeros_like(groups.offsets[1:]).index_add(0, index, votes_here.to(torch.int64))
    minimum = torch.where(voters > 0, minimum, 0.0)

    def total(values: Tensor) -> Tensor:  # of votes * values by group, over voters only
        weighted = torch.where(votes_here, votes * values, 0.0)
        return torch.zeros_like(minimum).index_add(0, index, weighted)

    shifted = rewards - minimum[index]
    weight = total(torch.ones_like(votes))
    reward_sum = total(shifted)
    mean = torch.where(weight == 0, 0.0, reward_sum / weight)
    return GroupMoments(minimum, weight, reward_sum, total((shifted - mean[index]).square()), voters)


def turn_offsets(groups: GroupIndex, turn_counts: Tensor) -> Tensor:
    """Where each group's turns lie in a TurnMoments table, `[G + 1]`: a group has as many as its longest row."""
    index = groups.index.clamp(0, groups.num_groups - 1)  # a group that there is not would stop a GPU
    turns = torch.zeros_like(groups.offsets[1:]).scatter_reduce(0, index, turn_counts, "amax")  # [G]
    return torch.cat([turns.new_zeros(1), turns.cumsum(0)])


def turn_moments(
    rewards: Tensor,
    votes: Tensor,
    groups: GroupIndex,
    segment_offsets: Tensor,
    segments: int,
    minimum: Tensor,
    offsets: Tensor,
    size: int,
) -> TurnMoments:
    """Moments by turn, in a table of `size` slots that begins as `offsets` says. `segment_offsets [B + 1]` is the
    running sum of the rows' turns, `segments` its end."""
    counts = segment_offsets.diff()
    row = torch.repeat_interleave(torch.arange(groups.num_rows, device=rewards.device), counts, output_size=segments)
    turn = torch.arange(segments, device=rewards.device) - segment_offsets[row]  # [S]
    slot = offsets[groups.index[row]] + turn  # [S]: the (group, turn) that a segment belongs to
    shifted = torch.where(votes != 0, votes * (rewards - minimum[groups.index]), 0.0)  # [B]
    zeros = torch.zeros(size, dtype=torch.float64, device=rewards.device)
    return TurnMoments(offsets, zeros.index_add(0, slot, votes[row]), zeros.index_add(0, slot, shifted[row]))
