"""Groups of rollouts: labels of any kind, factorised once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastadv import validation


@dataclass(frozen=True, eq=False)
class GroupIndex:
    """Which rows belong together. Built once per batch by `group_index`; every op takes it in place of labels.

    Groups are numbered by first appearance, so the index depends on which labels are equal and on nothing else.

    Attributes:
        index: `[B]` int64, number of each row's group.
        order: `[B]` int64, rows by group, in row order within a group.
        offsets: `[G + 1]` int64; group g's rows are `order[offsets[g] : offsets[g + 1]]`.
    """

    index: Tensor  # [B]
    order: Tensor  # [B]
    offsets: Tensor  # [G + 1]

    def __post_init__(self) -> None:
        validation.index_fields(self, "index")
        validation.index_fields(self, "order", "offsets", device=self.index.device)
        if self.order.shape != self.index.shape or self.offsets.shape[0] < 1 + (self.num_rows > 0):
            raise ValueError(
                f"GroupIndex: index has shape {list(self.index.shape)}, order {list(self.order.shape)} and offsets "
                f"{list(self.offsets.shape)}; expected [B], [B] and [G + 1]. Build it with fastadv.group_index"
            )

    @property
    def num_rows(self) -> int:
        """Number of rows, B."""
        return self.index.shape[0]

    @property
    def num_groups(self) -> int:
        """Number of groups, G."""
        return self.offsets.shape[0] - 1

    def sizes(self) -> Tensor:
        """Rows in each group, `[G]` int64."""
        return self.offsets.diff()

    def to(self, device: torch.device | str) -> GroupIndex:
        """The index on another device."""
        return GroupIndex(self.index.to(device), self.order.to(device), self.offsets.to(device))


Labels = Tensor | np.ndarray | Sequence[Any] | GroupIndex


def group_index(group_ids: Labels, *, op: str = "group_index") -> GroupIndex:
    """Factorises group labels.

    Args:
        group_ids: `[B]` labels, compared for equality only: an integer tensor, or an array or a sequence of integers or
            strings, in any order, groups of any size. "07" and "7" are two groups. A GroupIndex is returned as it is.
        op: name of the calling op, for error messages.

    Returns:
        The index, on the labels' device (CPU for arrays and sequences). On a GPU this waits for the device: build it
        once per batch, outside of `torch.compile`.

    Raises:
        TypeError: labels that are not integers or strings (floats, None).
        ValueError: labels that are not one-dimensional.
    """
    if isinstance(group_ids, GroupIndex):
        return group_ids
    if isinstance(group_ids, Tensor):
        validation.tensor(op, "group_ids", group_ids, dtypes=(*validation.INTEGERS, torch.bool))
        return _from_integers(op, group_ids)
    labels = np.asarray(group_ids) if not isinstance(group_ids, np.ndarray) and _all_integers(group_ids) else group_ids
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "iub" and not _beyond_int64(labels):
        return _from_integers(op, torch.from_numpy(labels.astype(np.int64)))
    return _from_integers(op, _number_by_appearance(op, labels))


def _beyond_int64(labels: np.ndarray) -> bool:
    """Whether unsigned labels would wrap around to negative ones."""
    return labels.dtype == np.uint64 and bool((labels > np.iinfo(np.int64).max).any())


def _all_integers(labels: Sequence[Any]) -> bool:
    return all(type(label) is int and -(2**63) <= label < 2**63 for label in labels)


def _number_by_appearance(op: str, labels: Sequence[Any] | np.ndarray) -> Tensor:
    numbers: dict[int | str, int] = {}
    index = []
    for row, label in enumerate(labels):
        if isinstance(label, np.generic):
            label = label.item()
        if not isinstance(label, (int, str)):
            raise TypeError(f"{op}: group_ids[{row}] is {label!r}; labels are integers or strings")
        index.append(numbers.setdefault(label, len(numbers)))
    return torch.tensor(index, dtype=torch.int64)


def _from_integers(op: str, labels: Tensor) -> GroupIndex:
    if labels.dim() != 1:
        raise ValueError(f"{op}: group_ids has shape {list(labels.shape)}; expected [B], one label a rollout")
    unique, inverse = torch.unique(labels, return_inverse=True)
    rows = torch.arange(labels.shape[0], device=labels.device)
    first = torch.full_like(unique, labels.shape[0], dtype=torch.int64).scatter_reduce(0, inverse, rows, "amin")
    number = torch.empty_like(first).scatter_(0, first.argsort(), torch.arange(first.shape[0], device=labels.device))
    index = number[inverse]
    counts = torch.bincount(index, minlength=first.shape[0])
    offsets = torch.zeros(first.shape[0] + 1, dtype=torch.int64, device=labels.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return GroupIndex(index, torch.argsort(index, stable=True), offsets)
