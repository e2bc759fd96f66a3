"""Denominators over data-parallel ranks, with real processes on gloo."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fastadv as fa

# Rollouts of each rank: the second rank has none, the third none with a valid token.
MASKS = [
    torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]),
    torch.zeros(0, 4, dtype=torch.int64),
    torch.zeros(1, 4),
    torch.ones(3, 4),
]


def run_rank(rank: int, world: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    mine = torch.cat([m.float() for m in MASKS[rank::world]])  # fewer ranks hold the same rollouts
    step = fa.denominators(mine, process_group=dist.group.WORLD)
    log_probs = torch.full(mine.shape, -1.0, requires_grad=True)
    results = {"counts": torch.stack([step.tokens, step.sequences, step.candidates]), "ranks": step.ranks}
    for mode in ("token-mean", "seq-mean-token-mean"):
        config = fa.LossConfig("reinforce", loss_agg_mode=mode)
        loss = fa.policy_loss(log_probs, None, torch.ones(mine.shape[0]), mine, config=config, denominator=step).loss
        loss.backward()
        averaged = loss.detach().double() / world  # as a data-parallel trainer averages
        dist.all_reduce(averaged)
        results[mode] = averaged
    torch.save(results, f"{folder}/result-{world}-{rank}.pt")
    dist.destroy_process_group()


def test_one_rank_equals_two_equals_four() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2, 4):
            mp.spawn(run_rank, (world, folder), nprocs=world)
        results = {w: [torch.load(f"{folder}/result-{w}-{r}.pt") for r in range(w)] for w in (1, 2, 4)}
    whole = torch.cat([m.float() for m in MASKS])
    local = fa.denominators(whole)
    for world, ranks in results.items():
        for result in ranks:
            assert result["counts"].tolist() == [float(local.tokens), float(local.sequences), float(local.candidates)]
            assert result["ranks"] == world
            for mode in ("token-mean", "seq-mean-token-mean"):
                torch.testing.assert_close(result[mode], torch.tensor(1.0, dtype=torch.float64), rtol=0, atol=1e-6)
