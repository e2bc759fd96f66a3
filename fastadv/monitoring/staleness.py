"""How old the weights are that sampled what is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastadv import validation
from fastadv.groups import Labels, group_index
from fastadv.monitoring.checks import mean
from fastadv.rows import Rows


@dataclass(frozen=True)
class Staleness:
    """Staleness of a batch: versions between the weights that sampled a token and those that are trained on it.

    Attributes:
        tokens: sampled tokens that were counted.
        mean, most: over these.
        in_flight: mean over them of the versions that passed between the token and the last one of its rollout, while
            the rollout was being sampled.
        in_queue: mean over them of the versions that passed since, while the rollout waited; with `in_flight` it makes
            `mean`.
        histogram: number of tokens by staleness, in ascending order.
        oldest_mean: mean over rollouts of their oldest token's.
        dropped_rollouts, dropped_groups: what a limit on a group's oldest token would drop, whole groups; 0 without a
            limit.
        groups: groups with a sampled token.
    """

    tokens: int
    mean: float
    most: int
    in_flight: float
    in_queue: float
    histogram: dict[int, int]
    oldest_mean: float
    dropped_rollouts: int
    dropped_groups: int
    groups: int


class Ages(NamedTuple):
    """Ages of a batch's tokens in versions of the weights, each `[N]`, or `[B * T]`."""

    sampled: Tensor  # bool: the others have no age, and hold whatever comes out
    row: Tensor  # int64: rollout of the token
    age: Tensor  # int64: of the token
    last: Tensor  # int64: of its rollout's last token; what is older passed in flight, this in the queue


def ages(versions: Tensor, rows: Rows, train_version: int) -> Ages:
    """How old tokens are, without waiting for a device. `versions`: int64, -1 where none sampled."""
    row = rows.spread(torch.arange(rows.count, device=versions.device)).flatten()
    age = train_version - versions.flatten()
    last = age.new_full((rows.count,), train_version + 1).scatter_reduce(0, row, age, "amin", include_self=True)
    return Ages(versions.flatten() >= 0, row, age, last[row])


def staleness(
    versions: Tensor,
    train_version: int,
    group_ids: Labels,
    *,
    cu_seqlens: Tensor | None = None,
    max_staleness: int | None = None,
) -> Staleness:
    """Staleness statistics of a batch that is about to be trained on.

    Args:
        versions: `[N]` or `[B, T]` integers, the version that sampled each token, -1 where none did (`Batch.versions`).
        train_version: of the weights that are trained.
        group_ids: `[B]` labels or a GroupIndex.
        cu_seqlens: `[B + 1]` for packed tokens.
        max_staleness: a group is dropped if its oldest token is older than this, as in Miles' buffer; None: none is.

    Returns:
        The Staleness.

    Raises:
        ValueError: a token that is newer than the weights, a version below -1, a negative limit, group_ids of another
            length.
        TypeError: versions or limits that are not integers.
    """
    op = "staleness"
    validation.tensor(op, "versions", versions, dtypes=validation.INTEGERS)
    validation.integer(op, "train_version", train_version, most=2**62)
    if max_staleness is not None:
        validation.integer(op, "max_staleness", max_staleness, most=2**62)
    rows, groups = Rows.of(op, "versions", versions, cu_seqlens), group_index(group_ids, op=op).to(versions.device)
    if groups.num_rows != rows.count:
        raise ValueError(f"{op}: group_ids has {groups.num_rows} rows, versions has {rows.count}")
    versions = versions.to(torch.int64)  # uint8 would wrap -1 around
    if bool((versions < -1).any()):
        raise ValueError(f"{op}: versions holds {int(versions.min())}; versions are from 0, and -1 where none sampled")
    found = ages(versions, rows, train_version)
    age, row, last = (part[found.sampled] for part in (found.age, found.row, found.last))  # [S] each
    if bool((age < 0).any()):
        raise ValueError(
            f"{op}: a token was sampled by version {train_version - int(age.min())}, newer than version "
            f"{train_version}, which is trained"
        )
    count = rows.count
    oldest = age.new_zeros(count).scatter_reduce(0, row, age, "amax", include_self=True)
    occupied = torch.bincount(row, minlength=count) > 0
    group_oldest = age.new_zeros(groups.num_groups).scatter_reduce(0, groups.index, oldest, "amax", include_self=True)
    dropped = group_oldest > (train_version if max_staleness is None else max_staleness)  # none is older than version 0
    return Staleness(
        tokens=age.shape[0],
        mean=mean(age),
        most=int(age.max()) if age.numel() else 0,
        in_flight=mean(age - last),
        in_queue=mean(last),
        histogram=dict(zip(*(part.tolist() for part in torch.unique(age, return_counts=True)), strict=True)),
        oldest_mean=mean(oldest[occupied]),
        dropped_rollouts=int(dropped[groups.index].sum()),
        dropped_groups=int(dropped.sum()),
        groups=int(torch.unique(groups.index[occupied]).numel()),
    )
