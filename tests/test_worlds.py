"""The helper of the other tests: what goes wrong on a rank is said here."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import worlds


def total(rank: int) -> float:
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    return value.item()


def killed(rank: int) -> None:
    if rank == 1:
        os.abort()
    dist.barrier()


def wrong(rank: int) -> None:
    raise ValueError(f"a fault of rank {rank}")


def test_every_rank_answers() -> None:
    assert worlds.run(total, 3) == [6, 6, 6]


def test_a_killed_rank_is_an_error_with_its_last_words() -> None:
    with pytest.raises(mp.ProcessExitedException) as error:
        worlds.run(killed, 2)
    assert "in killed" in "".join(error.value.__notes__)


def test_an_exception_of_a_rank_is_raised() -> None:
    with pytest.raises(mp.ProcessRaisedException, match="a fault of rank"):
        worlds.run(wrong, 2)
