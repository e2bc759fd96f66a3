"""What an arm may need to know of a batch that the batch does not hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv import validation
from fastadv.batch import Batch
from fastadv.coins import Ids


@dataclass(frozen=True, eq=False)
class Known:
    """What a trainer knows of a batch of rollouts besides the batch.

    Attributes:
        train_version: of the weights that are about to be updated; None: the newest version in the batch.
        stale: `[B]` bool, rollouts that are stale; None: by `Batch.versions`.
        keep_probability: `[B]` in (0, 1], with which each rollout got into the batch; None: all of them did.
        group_ids: `[B]` integers or strings that coins of groups are tossed by, the same in every pass and process;
            without them: the smallest row id of each group.
        repeating: `[B]` bool, rollouts that repeat themselves at the end, by as many tokens as the arm asks about;
            None: by `Batch.token_ids`.
    """

    train_version: int | None = None
    stale: Tensor | None = None  # [B]
    keep_probability: Tensor | None = None  # [B]
    group_ids: Ids | None = None  # [B]
    repeating: Tensor | None = None  # [B]


NOTHING = Known()


def newest(op: str, batch: Batch, known: Known) -> tuple[Tensor, int]:
    """Versions of the tokens, and the version that they are compared with."""
    if batch.versions is None:
        raise ValueError(
            f"{op}: the batch has no versions, so nobody can tell what is stale; give Batch.of versions, or the arm "
            "Known(stale=[B])"
        )
    if known.train_version is not None:
        return batch.versions, known.train_version
    return batch.versions, int(batch.versions.max()) if batch.versions.numel() else 0


def stale_rollouts(op: str, batch: Batch, after: int, known: Known) -> Tensor:
    """Rollouts with a sampled token that is more than `after` versions old, `[B]` bool."""
    if known.stale is not None:
        shape, device = (batch.num_rollouts,), batch.rewards.device
        validation.tensor(op, "stale", known.stale, shape=shape, dtypes=(torch.bool,), device=device)
        return known.stale
    versions, trained = newest(op, batch, known)
    return batch.rows.sum((batch.mask & (versions < trained - after)).to(torch.int64)) > 0


def group_ids(op: str, batch: Batch, known: Known) -> Ids:
    """What the coins of groups are tossed by, `[B]`."""
    if known.group_ids is not None:
        if len(known.group_ids) != batch.num_rollouts:
            raise ValueError(
                f"{op}: group_ids has {len(known.group_ids)} ids, the batch has {batch.num_rollouts} rollouts"
            )
        return known.group_ids
    groups = batch.groups
    largest = torch.full((groups.num_groups,), torch.iinfo(torch.int64).max, device=batch.row_ids.device)
    return largest.scatter_reduce(0, groups.index, batch.row_ids, "amin")[groups.index]


def sampled_ranks(batch: Batch) -> Tensor:
    """How many tokens of its rollout were sampled before each token, like the mask, int64."""
    counts = batch.mask.to(torch.int64).cumsum(-1)
    if batch.cu_seqlens is not None:
        before = torch.cat([counts.new_zeros(1), counts])[batch.cu_seqlens[:-1]]
        counts = counts - batch.rows.spread(before)
    return counts - batch.mask.to(torch.int64)
