"""A vocabulary that is split over the ranks of a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class VocabParts:
    """The parts of all ranks, in rank order."""

    group: ProcessGroup
    vocab: int  # tokens of the whole vocabulary

    @classmethod
    def of(cls, op: str, group: ProcessGroup, start: int, size: int, device: torch.device) -> VocabParts:
        """Every rank tells its part in one small all-gather on this device, for which the host waits. Raises
        ValueError, on every rank alike, where the parts leave a gap or overlap."""
        mine = torch.tensor([start, size], device=device)
        gathered = _all_gather(mine, group).tolist()
        expected = 0
        for first, count in sorted((first, count) for first, count in gathered if count):
            if first != expected:
                raise ValueError(
                    f"{op}: vocab_start of the ranks with their rows are {gathered}; a part begins at {first} where "
                    f"{expected} is due: parts must neither overlap nor leave a gap"
                )
            expected = first + count
        if expected == 0:
            raise ValueError(f"{op}: no rank of vocab_group holds a row of the weight")
        return cls(group, expected)

    def gather(self, statistics: Tensor) -> Tensor:
        """Statistics of all ranks: `[5, L]` to `[ranks, 5, L]`, the same on every rank. Merged in rank order they give
        every rank the same bits, which a sum over the group would not promise."""
        return _all_gather(statistics, self.group)

    def add_up(self, per_row: Tensor, rows: Tensor) -> None:
        """Sums these rows of `[N, H]` over the ranks, in place."""
        import torch.distributed as dist

        chosen = per_row.index_select(0, rows)
        dist.all_reduce(chosen, group=self.group)
        per_row.index_copy_(0, rows, chosen)


def _all_gather(mine: Tensor, group: ProcessGroup) -> Tensor:
    import torch.distributed as dist

    mine = mine.contiguous()
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return torch.stack(found)
