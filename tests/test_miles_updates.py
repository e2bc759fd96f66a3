"""Norms of Megatron's next step, and learning rates that match those of another run."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from fastadv.integrations import miles
from fastadv.integrations.miles.options import Options
from fastadv.integrations.miles.updates import Updates, plain, take, update_norm
from miles_standins import arguments
from test_miles_projections import install
from torch import Tensor, nn

CLIP = 1.5


class FusedAdam(torch.optim.Optimizer):
    """A fused Adam as far as others see it: the step is counted in its groups, and its code is not to be copied."""

    def __init__(self, groups: Any, lr: float, betas: Any = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (b1, b2), t = group["betas"], group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                assert p.dtype == torch.float32
                state = self.state[p]
                m, v = (state.setdefault(name, torch.zeros_like(p)) for name in ("exp_avg", "exp_avg_sq"))
                m.mul_(b1).add_(p.grad, alpha=1 - b1)
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                change = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + group["eps"]) + group["weight_decay"] * p
                p.sub_(group["lr"] * change)


def adamw(groups: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


KINDS = {"torch": adamw, "fused": FusedAdam}


class Megatron:
    """Megatron's optimizer over main copies of parameters: gradients come into them in `prepare_grads`, are clipped by
    their norm over all ranks, and step."""

    def __init__(self, kind: str, seed: int = 0, *, lr: float = 1e-2, part: slice = slice(None)) -> None:
        g = torch.Generator().manual_seed(seed)
        self.model = [torch.randn(24, generator=g), torch.randn(10, generator=g)]
        self.main = [nn.Parameter(values[part].clone()) for values in self.model]
        self.part, self.grads = part, [torch.zeros_like(v) for v in self.model]
        groups = [{"params": [self.main[0]]}, {"params": [self.main[1]], "weight_decay": 0.0}]
        self.optimizer = KINDS[kind](groups, lr)
        self.config, self.grad_scaler = Namespace(clip_grad=CLIP), None

    def finished(self, seed: int, scale: float = 1.0) -> None:
        """A gradient of the model, as finalize_model_grads leaves it."""
        g = torch.Generator().manual_seed(seed)
        self.grads = [scale * torch.randn(v.shape, generator=g) for v in self.model]

    def prepare_grads(self) -> bool:
        for main, grad in zip(self.main, self.grads, strict=True):
            main.grad = grad[self.part].clone()
        return False

    def get_grad_norm(self) -> float:
        return float(torch.cat(self.grads).norm())

    def step(self) -> None:
        self.prepare_grads()
        factor = min(1.0, self.config.clip_grad / (self.get_grad_norm() + 1e-6))
        for main in self.main:
            main.grad *= factor  # type: ignore[operator]
        self.optimizer.step()

    def moved_by(self) -> float:
        """What a real step changes."""
        before = [m.detach().clone() for m in self.main]
        self.step()
        return float(torch.cat([a.detach() - b for a, b in zip(self.main, before, strict=True)]).norm())


class DistributedOptimizer(Megatron):
    """The same with a shard of each parameter."""


@pytest.fixture(autouse=True)
def _megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron(partial(monkeypatch.setitem, sys.modules))


def megatron(put: Any, *, rank: int = 0, config: Any = None) -> None:
    install(put, config)
    mpu = sys.modules["megatron.core"].mpu  # type: ignore[attr-defined]
    mpu.get_data_parallel_rank = lambda with_context_parallel: rank
    mpu.get_expert_data_parallel_rank = lambda: rank


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_is_that_of_the_step_that_follows(kind: str) -> None:
    optimizer = Megatron(kind)
    for seed in range(4):
        optimizer.finished(seed, scale=0.2 if seed == 2 else 1.0)  # that one is not clipped
        before = [m.detach().clone() for m in optimizer.main]
        state = {
            id(p): {k: torch.as_tensor(v).clone() for k, v in s.items()} for p, s in optimizer.optimizer.state.items()
        }
        norm = update_norm(optimizer)
        assert all(torch.equal(a, b) for a, b in zip(optimizer.main, before, strict=True))
        for p, held in optimizer.optimizer.state.items():
            for name, value in held.items():
                assert torch.equal(torch.as_tensor(value), state[id(p)][name]), name
        assert norm == pytest.approx(optimizer.moved_by(), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_control_run_moves_as_far_as_its_reference(kind: str, tmp_path: Path) -> None:
    """Step by step, by the learning rate of that step alone; gradients of one norm would not have done it."""
    reference, control = Megatron(kind, lr=1e-2), Megatron(kind, lr=1e-2)
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("reference", "control")}
    moved: dict[str, list[float]] = {"reference": [], "control": []}
    for step in range(5):
        reference.finished(step)
        take(Updates(files["reference"]), reference, (step, 0), write=True)
        moved["reference"].append(reference.moved_by())
        control.finished(100 + step, scale=0.02 if step < 2 else 3.0)
        for group in control.optimizer.param_groups:
            group["lr"] = 1e-2  # as Megatron's scheduler does after each step
        line = take(Updates(files["control"], files["reference"]), control, (step, 0), write=True)
        moved["control"].append(control.moved_by())
        assert line["update_norm"] == pytest.approx(moved["control"][-1], rel=1e-5)
    assert moved["control"] == pytest.approx(moved["reference"], rel=1e-5)
    lines = [json.loads(text) for text in Path(files["control"]).read_text().splitlines()]
    assert any(abs(line["multiplier"] - 1) > 0.05 for line in lines)


def of_rank(rank: int, *, kind: str, sharded: bool) -> list[float]:
    megatron(sys.modules.__setitem__, rank=rank)
    part = slice(rank, None, 2) if sharded else slice(None)
    optimizer = (DistributedOptimizer if sharded else Megatron)(kind, part=part)
    found = []
    for seed in range(3):
        optimizer.finished(seed)
        found.append(update_norm(optimizer))
        optimizer.step()
    assert dist.get_world_size() == 2
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_measure_the_whole_update(sharded: bool) -> None:
    optimizer, expected = Megatron("fused"), []
    for seed in range(3):
        optimizer.finished(seed)
        expected.append(optimizer.moved_by())
    for found in worlds.run(partial(of_rank, kind="fused", sharded=sharded), 2):
        assert found == pytest.approx(expected, rel=1e-5)


def test_what_tensor_parallel_ranks_share_counts_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = Megatron("torch")
    optimizer.main[0].tensor_model_parallel = True  # type: ignore[attr-defined]
    optimizer.finished(0)
    whole = update_norm(optimizer)
    megatron(partial(monkeypatch.setitem, sys.modules))
    sys.modules["megatron.core"].mpu.get_tensor_model_parallel_rank = lambda: 1  # type: ignore[attr-defined]
    split = update_norm(optimizer)
    before = optimizer.main[0].detach().clone()
    optimizer.step()
    assert split == pytest.approx(float((optimizer.main[0].detach() - before).norm()), rel=1e-5)
    assert split < whole


def test_chains_and_stubs() -> None:
    first, second = Megatron("torch", 0), Megatron("fused", 1)
    stub = Namespace(is_stub_optimizer=True)
    chain = Namespace(
        chained_optimizers=[first, stub, second], config=Namespace(clip_grad=0.0), get_grad_norm=lambda: 1 / 0
    )
    for one in (first, second):
        one.finished(3)
        one.config.clip_grad = 1e9
    norm = update_norm(chain)
    assert norm == pytest.approx((first.moved_by() ** 2 + second.moved_by() ** 2) ** 0.5, rel=1e-5)


def test_the_hook_measures_when_gradients_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Namespace(finalize_model_grads_func=None)
    megatron(partial(monkeypatch.setitem, sys.modules), config=config)
    optimizer, file = Megatron("torch"), tmp_path / "norms.jsonl"
    config.finalize_model_grads_func = lambda model, tokens: optimizer.finished(tokens)
    args = arguments({"updates": {"file": str(file)}})
    moved = []
    for step in range(2):
        miles.before_train_step(args, 4, step, [nn.Linear(1, 1)], optimizer, None)
        config.finalize_model_grads_func([], 7 + step)
        moved.append(optimizer.moved_by())
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert [(line["rollout_id"], line["step_id"]) for line in lines] == [(4, 0), (4, 1)]
    assert [line["update_norm"] for line in lines] == pytest.approx(moved, rel=1e-5)


def test_what_cannot_be_matched(tmp_path: Path) -> None:
    optimizer, file = Megatron("torch"), tmp_path / "reference.jsonl"
    optimizer.finished(0)
    options = Updates(str(tmp_path / "own.jsonl"), str(file))
    file.write_text(json.dumps({"rollout_id": 0, "step_id": 0, "update_norm": 1e9}) + "\n")
    with pytest.raises(ValueError, match="no learning rate of one recipe makes up for that"):
        take(options, optimizer, (0, 0), write=False)
    with pytest.raises(ValueError, match=r"has no step 0\.1; the reference run is shorter"):
        take(options, optimizer, (0, 1), write=False)
    with pytest.raises(ValueError, match="--debug-disable-optimizer"):
        take(options, None, (0, 0), write=False)
    optimizer.grad_scaler = Namespace(scale=2.0)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="a loss scale"):
        take(options, optimizer, (0, 0), write=False)
    assert not (tmp_path / "own.jsonl").exists()


def test_classes_that_are_not_known() -> None:
    class Other(FusedAdam):
        pass

    weights = [nn.Parameter(torch.ones(2))]
    coupled = Other(weights, 0.1)
    coupled.adam_w_mode = False
    with pytest.raises(ValueError, match="decoupled weight decay"):
        plain(coupled)
    del coupled.param_groups[0]["betas"]
    with pytest.raises(ValueError, match="not Other"):
        plain(coupled)
    kept = torch.optim.SGD(weights, lr=0.1)
    assert plain(kept) is kept


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "fastadv.updates.file is None; name a file"),
        ({"file": 3}, "fastadv.updates.file is 3; it must be a text"),
        ({"file": "a", "match": "a"}, "fastadv.updates.match is 'a'; it is the file that this run writes"),
        ({"file": "a", "norms": "b"}, "fastadv.updates.norms is no key"),
    ],
)
def test_wrong_keys(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.of(arguments({"updates": mapping}))


def test_a_gradient_that_is_not_there_moves_nothing() -> None:
    optimizer = Megatron("torch")
    optimizer.finished(0)
    prepared = optimizer.prepare_grads

    def without_second() -> bool:
        prepared()
        optimizer.main[1].grad = None
        return False

    optimizer.prepare_grads = without_second  # type: ignore[method-assign]
    before: list[Tensor] = [m.detach().clone() for m in optimizer.main]
    norm = update_norm(optimizer)
    optimizer.config.clip_grad = 0.0
    assert norm > 0
    assert all(torch.equal(a, b) for a, b in zip(optimizer.main, before, strict=True))
