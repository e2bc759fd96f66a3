"""Worlds of gloo processes: a worker runs on every rank, and what the ranks found comes back."""

import faulthandler
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_IMPORTED_ONCE = ["torch", "torch.distributed", "fastadv", "pytest"]


def run(worker: Callable[[int], Any], ranks: int) -> list[Any]:
    """What `worker(rank)` returned on each rank; `worker` is a function of a module, or a partial of one.

    An exception of any rank is raised here.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.set_forkserver_preload(_IMPORTED_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(_run_rank, (worker, ranks, folder), nprocs=ranks, start_method="forkserver")
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            for errors in sorted(Path(folder).glob("*.stderr")):  # what a killed process said is nowhere else
                error.add_note(f"rank {errors.stem} wrote:\n{errors.read_text(errors='replace')[-4000:]}")
            raise
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _run_rank(rank: int, worker: Callable[[int], Any], ranks: int, folder: str) -> None:
    with open(f"{folder}/{rank}.stderr", "wb") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.save(worker(rank), Path(folder) / f"{rank}.pt")
    # Groups that are destroyed while gloo's threads still hold connections to ranks that have gone can abort the
    # process now and then. So all ranks wait for each other, and leave without taking anything down.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
