"""The hook of a step inside NVIDIA's Megatron-LM: its buffers, its finishing of gradients and its optimizers, on two
processes without a GPU. `make test-miles` with FASTADV_MEGATRON naming a checkout."""

from __future__ import annotations

import os
import sys
import warnings
from argparse import Namespace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from fastadv.integrations.miles.projections import Projections, sketch_of
from fastadv.integrations.miles.updates import update_norm
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.skipif(
        "FASTADV_MEGATRON" not in os.environ, reason="FASTADV_MEGATRON names no checkout of Megatron-LM"
    ),
]
STEPS = 3


class WithoutCard(TorchFunctionMode):
    """Megatron asks for devices and types of a card by name: it gets the CPU's, and is told what it wants to hear."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = function(*args, **kwargs)
        if function is Tensor.type and isinstance(found, str):
            found = found.replace("torch.", "torch.cuda.", 1)
        return found


def on_rank(rank: int, *, sharded: bool, clip: float) -> dict[str, Any]:
    """Norms that were foretold and that came, and sketches of finished gradients, of a few steps."""
    warnings.simplefilter("ignore")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    sys.path.insert(0, os.environ["FASTADV_MEGATRON"])
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.current_stream = lambda *_: Namespace(wait_stream=lambda other: None)  # type: ignore[assignment]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    model.config = config
    found: dict[str, Any] = {"foretold": [], "came": [], "sketches": []}
    with WithoutCard():
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
        wrapped = DistributedDataParallel(config, buffers, model)
        adam = OptimizerConfig(
            optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=clip, use_distributed_optimizer=sharded
        )
        optimizer = get_megatron_optimizer(adam, [wrapped])
        for step in range(STEPS):
            wrapped.zero_grad_buffer()
            torch.manual_seed(10 * step + rank)
            wrapped(torch.randn(4, 7)).pow(2).sum().backward()
            finalize_model_grads([wrapped])
            found["sketches"].append(sketch_of([wrapped], Projections(file="unused", size=1024)))
            found["foretold"].append(update_norm(optimizer))
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            changes = [(a.detach() - b).flatten() for a, b in zip(model.parameters(), before, strict=True)]
            found["came"].append(float(torch.cat(changes).norm()))
    assert dist.get_world_size() == 2
    return found


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_norms_of_updates_and_sketches_of_gradients(clip: float) -> None:
    whole, other = worlds.run(partial(on_rank, sharded=False, clip=clip), 2)
    shards = worlds.run(partial(on_rank, sharded=True, clip=clip), 2)
    for ranks in ([whole, other], shards):
        for rank in ranks:
            assert rank["foretold"] == pytest.approx(rank["came"], rel=1e-5)
    # Of the first step: later gradients are of parameters that the two optimizers have moved for themselves.
    for rank in (other, *shards):
        assert torch.equal(rank["sketches"][0], whole["sketches"][0])
    assert shards[0]["foretold"][0] == pytest.approx(whole["foretold"][0], rel=1e-5)
    assert len(set(whole["came"])) == STEPS
