"""Sketches of Megatron's finished gradients, over data- and tensor-parallel ranks, with and without shards."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from fastadv.integrations import miles
from fastadv.integrations.miles.projections import Projections, compared, pieces, sketch_of
from miles_standins import arguments
from torch import Tensor, nn

PADDED = 64  # elements that a bucket is a multiple of


class Chunk(nn.Module):
    """Megatron's DistributedDataParallel as far as the hook looks: buffers with parts of the gradient."""

    def __init__(self, *, distributed: bool = False, group: Any = None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 11), nn.Linear(11, 3))
        self.module[1].weight.tensor_model_parallel = True
        self.buffers = [self.buffer([0, 1], distributed, group)]  # type: ignore[assignment]
        self.expert_parallel_buffers = [self.buffer([2], distributed, group)]
        for parameter in self.module[2].parameters():
            parameter.allreduce = False  # an expert's

    def buffer(self, layers: list[int], distributed: bool, group: Any) -> Namespace:
        """Parameters in backward order, a bucket a layer."""
        index, buckets, at = {}, [], 0
        for number, layer in enumerate(reversed(layers)):
            begin = at
            for parameter in self.module[layer].parameters():
                index[parameter] = (at, at + parameter.numel(), number)
                at += parameter.numel()
            at += -at % PADDED
            buckets.append((begin, at))
        data = torch.zeros(at)
        return Namespace(
            param_index_map=index, grad_data=data, data_parallel_group=group,
            buckets=[Namespace(offset=a, grad_data=data[a:b]) for a, b in buckets],
            ddp_config=Namespace(use_distributed_optimizer=distributed, num_distributed_optimizer_instances=1),
        )  # fmt: skip

    def gradients(self, seed: int) -> dict[str, Tensor]:
        """Puts a gradient into the buffers; the padding holds garbage."""
        g = torch.Generator().manual_seed(seed)
        found = {}
        names = {id(p): n for n, p in self.named_parameters()}
        for buffer in [*self.buffers, *self.expert_parallel_buffers]:  # type: ignore[misc]
            buffer.grad_data.fill_(torch.nan)
        for buffer in [*self.buffers, *self.expert_parallel_buffers]:  # type: ignore[misc]
            for parameter, (start, end, _) in buffer.param_index_map.items():
                buffer.grad_data[start:end] = found[names[id(parameter)]] = torch.randn(end - start, generator=g)
        return found


def install(put: Any, config: Any = None, tensor_rank: int = 0, stage: int = 0, expert: int = 0) -> None:
    """Megatron's modules."""
    core, utils = ModuleType("megatron.core"), ModuleType("megatron.core.utils")
    core.mpu = Namespace(  # type: ignore[attr-defined]
        get_tensor_model_parallel_rank=lambda: tensor_rank,
        get_pipeline_model_parallel_rank=lambda: stage,
        get_expert_model_parallel_rank=lambda: expert,
    )
    utils.get_model_config = lambda chunk: config  # type: ignore[attr-defined]
    for name, module in {
        "megatron": ModuleType("megatron"),
        "megatron.core": core,
        "megatron.core.utils": utils,
    }.items():
        put(name, module)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """The model's configuration; finishing a gradient puts the next one into the chunk that it is called with."""
    found = Namespace(calls=[], finalize_model_grads_func=None)
    install(partial(monkeypatch.setitem, sys.modules), found)
    return found


def options(**more: Any) -> Projections:
    return Projections(**{"file": "unused", "size": 1024, "copies": 2, **more})


def test_every_element_counts_once(config: Any) -> None:
    chunk = Chunk()
    expected = chunk.gradients(0)
    found = list(pieces([chunk]))
    assert sum(p.values.numel() for p in found) == sum(v.numel() for v in expected.values())
    assert len({p.key for p in found}) == len(expected)
    for piece in found:
        name = piece.key.rpartition(": ")[2]
        torch.testing.assert_close(piece.values, expected[name])
        assert ("tensor 0" in piece.key) == (name == "module.1.weight")
        assert ("expert 0" in piece.key) == name.startswith("module.2")


def of_rank(rank: int, *, distributed: bool) -> Tensor:
    install(sys.modules.__setitem__)
    chunk = Chunk(distributed=distributed, group=dist.group.WORLD)
    chunk.gradients(3)
    if distributed:  # right in the rank's own parts only
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:  # type: ignore[misc]
            for bucket in buffer.buckets:
                own = bucket.grad_data.numel() // dist.get_world_size()
                keep = bucket.grad_data[rank * own : (rank + 1) * own].clone()
                bucket.grad_data.fill_(torch.nan)
                bucket.grad_data[rank * own : (rank + 1) * own] = keep
    return sketch_of([chunk], options())


@pytest.mark.parametrize("distributed", [False, True])
def test_data_parallel_ranks_have_the_bits_of_one(config: Any, distributed: bool) -> None:
    chunk = Chunk()
    chunk.gradients(3)
    whole = sketch_of([chunk], options())
    for sketch in worlds.run(partial(of_rank, distributed=distributed), 4):
        assert torch.equal(sketch, whole)


def of_tensor_rank(rank: int) -> tuple[Tensor, int]:
    install(sys.modules.__setitem__, tensor_rank=rank)
    chunk = Chunk()
    chunk.gradients(3)
    return sketch_of([chunk], options(size=65536)), sum(p.values.numel() for p in pieces([chunk]))


def test_what_tensor_parallel_ranks_share_counts_on_the_first() -> None:
    (one, first), (other, second) = worlds.run(of_tensor_rank, 2)
    assert torch.equal(one, other)
    assert second == 55  # the split weight
    assert first == sum(p.numel() for p in Chunk().parameters())


def run(config: Any, tmp_path: Path, steps: list[int], **keys: Any) -> list[dict[str, Any]]:
    """Lines of a run whose gradients have these seeds."""
    chunk = Chunk()
    file = tmp_path / "steps.jsonl"
    args = arguments({"projections": {"file": str(file), "size": 4096, **keys}})
    for number, seed in enumerate(steps):
        if number % 2 == 0:  # Megatron sets the function once a rollout, and takes two steps
            config.finalize_model_grads_func = lambda model, tokens, **more: model[0].gradients(tokens)
        miles.before_train_step(args, number // 2, number % 2, [chunk], None, None)
        config.finalize_model_grads_func([chunk], seed, pg_collection=None, force_all_reduce=False)
    return [json.loads(line) for line in file.read_text().splitlines()]


def exact(a: int, b: int) -> float:
    x, y = (torch.cat(list(Chunk().gradients(seed).values())) for seed in (a, b))
    return float(x @ y / x.norm() / y.norm())


def test_lines_of_steps(config: Any, tmp_path: Path) -> None:
    lines = run(config, tmp_path, [1, 2, 1, 5])
    assert [(line["rollout_id"], line["step_id"]) for line in lines] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [line["cosine"] for line in lines] == pytest.approx([1, exact(1, 2), 1, exact(1, 5)], abs=0.05)
    norm = torch.cat(list(Chunk().gradients(2).values())).norm()
    assert lines[1]["norm"] == pytest.approx(float(norm), rel=0.05)
    assert abs(exact(1, 2)) < 0.5


def test_other_references(config: Any, tmp_path: Path) -> None:
    before = run(config, tmp_path / "a", [1, 1, 2], reference="previous", seed=1)
    assert [line["cosine"] for line in before] == pytest.approx([1, 1, exact(1, 2)], abs=0.05)
    run(config, tmp_path / "b", [4, 5], save=str(tmp_path / "kept"), seed=2)
    beside = run(config, tmp_path / "c", [4, 6], reference=str(tmp_path / "kept"), seed=2)
    assert [line["cosine"] for line in beside] == pytest.approx([1, exact(5, 6)], abs=0.05)
    with pytest.raises(ValueError, match=r"is a sketch with .*fastadv\.projections has"):
        run(config, tmp_path / "d", [4], reference=str(tmp_path / "kept"), seed=3)
    torch.save([1], tmp_path / "kept" / "0-0.pt")
    with pytest.raises(ValueError, match="is no sketch of a step"):
        run(config, tmp_path / "e", [4], reference=str(tmp_path / "kept"), seed=2)


def test_what_there_is_no_number_for(config: Any) -> None:
    zero, one = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    assert compared(zero, one, 1) == {"norm": 0.0, "reference_norm": 2.0, "cosine": None}
    assert compared(one * torch.nan, one, 1) == {"norm": None, "reference_norm": 2.0, "cosine": None}


def test_the_result_of_finishing_is_handed_on_and_nothing_is_wrapped_twice(config: Any, tmp_path: Path) -> None:
    chunk = Chunk()
    chunk.gradients(0)
    config.finalize_model_grads_func = lambda *args, **more: "done"
    args = arguments({"projections": {"file": str(tmp_path / "x.jsonl"), "size": 64, "seed": 77}})
    miles.before_train_step(args, 0, 0, [chunk], None, None)
    miles.before_train_step(args, 0, 1, [chunk], None, None)
    assert config.finalize_model_grads_func([chunk], None) == "done"
    (line,) = (tmp_path / "x.jsonl").read_text().splitlines()
    assert json.loads(line)["step_id"] == 1


def test_models_that_are_none_of_megatrons(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not in Megatron's DistributedDataParallel"):
        sketch_of([nn.Linear(2, 2)], options())
    several = Chunk(distributed=True)
    several.buffers[0].ddp_config.num_distributed_optimizer_instances = 2  # type: ignore[index]
    with pytest.raises(ValueError, match="--num-distributed-optimizer-instances"):
        sketch_of([several], options())
    with pytest.raises(ValueError, match=r"set fastadv\.projections or fastadv\.updates"):
        miles.before_train_step(arguments({"arm": "none"}), 0, 0, [several], None, None)
