"""Whitening over ranks, with real processes on gloo: a rank without tokens joins in (slime#2235, Miles#3229)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import worlds
from draws import BACKENDS
from test_reports import case, numbers
from torch import Tensor

import fastadv as fa

GIVEN, EXPECTED = case("B37")  # whitened apart, 5 and 9 would both become 0.866
TOKENS, WHITENED = numbers(GIVEN["tokens"]), numbers(EXPECTED["whitened"])
RANKS = [GIVEN[f"rank{rank}_holds"] for rank in range(3)]
HOLDS = {1: [range(len(TOKENS))], 2: RANKS[:2], 3: RANKS}
ROWS = 12


def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    return {
        "rewards": torch.rand(ROWS, generator=g),
        "groups": torch.arange(ROWS) // 4,
        "mask": torch.rand(ROWS, 9, generator=g) < 0.6,
        "values": 100 + torch.randn(ROWS, 9, generator=g),
    }


def rows_of(world: int, rank: int) -> slice:
    """Whole groups. Of two ranks the second has fewer; of three the first has all, the others none."""
    rows = {1: 12, 2: 8, 3: 12}[world]
    return slice(rows * rank, rows * (rank + 1))


def results(b: dict[str, Tensor], group: Any, backend: str) -> dict[str, Tensor]:
    given = {"mask": b["mask"], "process_group": group, "backend": backend}
    plus = fa.estimate("reinforce_plus_plus/verl", b["rewards"], **given, gamma=0.9)
    critic = fa.estimate("gae/verl", b["rewards"], values=b["values"], **given)
    baseline = fa.estimate("reinforce_plus_plus_baseline/verl", b["rewards"], b["groups"], **given)
    whitened = fa.whiten(b["values"], b["mask"], process_group=group, backend=backend)
    return {"whiten": whitened, "plus": plus.advantages, "gae": critic.advantages, "baseline": baseline.advantages}


def run_rank(rank: int) -> dict[int, Any]:
    worlds_found: dict[int, Any] = {}
    for world in HOLDS:
        group = dist.new_group(list(range(world)))
        if rank >= world:
            continue
        mine = {name: value[rows_of(world, rank)] for name, value in batch().items()}
        tokens = TOKENS[list(HOLDS[world][rank])]
        found = {}
        for backend in BACKENDS:
            found[backend] = results(mine, group, backend)
            found[backend]["known"] = fa.whiten(
                tokens, torch.ones(len(tokens)), process_group=group, backend=backend
            )  # fmt: skip
        worlds_found[world] = found
    return worlds_found


def test_b37_ranks_whiten_together_and_one_of_them_may_be_empty() -> None:
    ranks = worlds.run(run_rank, max(HOLDS))
    found = {world: [rank[world] for rank in ranks[:world]] for world in HOLDS}
    for backend in BACKENDS:
        whole = results(batch(), None, backend)
        for world, ranks in found.items():
            for holds, rank in zip(HOLDS[world], ranks, strict=True):
                torch.testing.assert_close(rank[backend]["known"], WHITENED[list(holds)], rtol=0, atol=1e-6)
            for name, exact in whole.items():
                joined = torch.cat([rank[backend][name] for rank in ranks])
                torch.testing.assert_close(joined, exact, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
