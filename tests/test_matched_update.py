"""The matched-update control: dry runs of optimizers against their real steps."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from tiny_lm import VOCABULARY, TinyLM
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from toy_agent import THREE_OUTCOMES, Enumeration

import fastadv as fa
from fastadv.gradproj import sum_gradients

OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups),
    "sgd, nesterov": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, weight_decay=0.1),
    "adam, amsgrad": lambda groups: torch.optim.Adam(groups, amsgrad=True, maximize=True),
    "adamw": lambda groups: torch.optim.AdamW(groups),
    "adamw, foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "adamw, fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "adadelta": lambda groups: torch.optim.Adadelta(groups),
    "adafactor": lambda groups: torch.optim.Adafactor(groups),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr_decay=0.1),
    "adamax": lambda groups: torch.optim.Adamax(groups),
    "asgd": lambda groups: torch.optim.ASGD(groups),
    "muon": lambda groups: torch.optim.Muon(groups),
    "nadam": lambda groups: torch.optim.NAdam(groups, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda groups: torch.optim.RAdam(groups),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
    "rprop": lambda groups: torch.optim.Rprop(groups),
}


class Noisy(torch.optim.Optimizer):
    """Of nobody's library: looks across parameters, draws random numbers, writes into gradients, counts."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.1, "weight_decay": 0.0})
        self.steps = [0]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        held = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for _, p in held).sqrt()
        self.steps[0] += 1
        for group, p in held:
            p.grad.div_(norm)
            memory = self.state[p].setdefault("memory", [torch.zeros_like(p)])
            memory[0].mul_(0.9).add_(p.grad)
            p.sub_(group["lr"] * (memory[0] + torch.rand(()) * p.grad + group["weight_decay"] * p) * self.steps[0])


OPTIMIZERS["of nobody's library"] = Noisy


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=g, dtype=dtype)) for shape in ((4, 3), (2, 5), (3, 3))]


def some_gradients(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(100 + seed)
    return [torch.randn(p.shape, generator=g, dtype=dtype) for p in parameters()]


def two_groups(held: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": held[:2], "lr": 0.02}, {"params": held[2:], "lr": 0.005, "weight_decay": 0.0}]


def step(optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> Tensor:
    """A real step; what it added, flat."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in held]
    for p, g in zip(held, gradients, strict=True):
        p.grad = g.clone()
    optimizer.step()
    return torch.cat([(p.detach() - b).flatten() for p, b in zip(held, before, strict=True)])


def started(name: str, steps: int = 3) -> torch.optim.Optimizer:
    """An optimizer with a history."""
    optimizer = OPTIMIZERS[name](two_groups(parameters()))
    for i in range(steps):
        step(optimizer, some_gradients(i))
    return optimizer


def norm(tensors: list[Tensor]) -> float:
    return float(fa.global_norm(tensors))


# ---- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.row(19)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_dry_run_is_the_step(name: str, steps: int) -> None:
    optimizer = started(name, steps)
    gradients = {"a": some_gradients(7), "b": [3 * g for g in some_gradients(8)]}
    torch.manual_seed(5)
    found = fa.update_norms(optimizer, gradients)
    for arm, given in gradients.items():
        twin = started(name, steps)
        torch.manual_seed(5)
        assert found[arm].update == pytest.approx(float(step(twin, given).norm()), rel=1e-8)
        assert found[arm].gradient == pytest.approx(norm(given), rel=1e-12)
        twin = started(name, steps)
        for group in twin.param_groups:
            group |= {"weight_decay": 0.0} if "weight_decay" in group else {}
        torch.manual_seed(5)
        assert found[arm].gradient_part == pytest.approx(float(step(twin, given).norm()), rel=1e-8)


@pytest.mark.row(19)
def test_sparse_gradients() -> None:
    embedding = nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    found = fa.update_norms(optimizer, {"a": None})["a"]
    before = embedding.weight.detach().clone()
    optimizer.step()
    assert found.update == pytest.approx(float((embedding.weight.detach() - before).norm()), rel=1e-12)
    assert found.gradient == pytest.approx(math.sqrt(2 * (4 + 1)))  # 2 in row 1, 1 in row 4


@pytest.mark.row(19)
def test_steps_below_the_resolution_of_the_parameters_are_measured() -> None:
    weights = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([weights], lr=1e-6)
    gradient = torch.linspace(1, 2, 1000, dtype=torch.bfloat16)
    assert fa.update_norms(optimizer, {"a": [gradient]})["a"].update == pytest.approx(1e-6 * 1000**0.5, rel=1e-6)
    assert not step(optimizer, [gradient]).any()


def test_the_default_epsilon_of_adafactor_is_that_of_the_parameters() -> None:
    weights = nn.Parameter(torch.ones(4))
    gradient = torch.full((4,), 1e-9)  # far below float32's epsilon, far above float64's
    norms = fa.update_norms(torch.optim.Adafactor([weights]), {"a": [gradient]})["a"]
    twin = torch.optim.Adafactor([weights], eps=(torch.finfo(torch.float32).eps, 1e-3))
    assert norms == fa.update_norms(twin, {"a": [gradient]})["a"]


def test_how_a_step_is_run_makes_no_difference() -> None:
    norms = []
    rate = torch.tensor(1e-3)
    for options in ({}, {"capturable": True}, {"lr": rate}, {"foreach": True}, {"differentiable": True}):
        optimizer = torch.optim.AdamW(parameters(), **options)
        norms.append(tuple(fa.update_norms(optimizer, {"a": some_gradients(0)})["a"]))
    for other in norms[1:]:
        assert other == pytest.approx(norms[0], rel=1e-6)


def test_a_parameter_without_gradient_does_not_move() -> None:
    optimizer = started("adamw")
    first, *rest = some_gradients(7)
    found = fa.update_norms(optimizer, {"all": [first, *rest], "rest": [None, *rest]})
    alone = fa.update_norms(optimizer, {"first": [first, None, None]})["first"]
    for field in fa.UpdateNorm._fields:
        squares = [getattr(x, field) ** 2 for x in (found["all"], found["rest"], alone)]
        assert squares[0] == pytest.approx(squares[1] + squares[2], rel=1e-12)
    assert fa.update_norms(optimizer, {"none": [None] * 3})["none"] == (0.0, 0.0, 0.0)


# ---- nothing is touched ----------------------------------------------------------------------------------------------


def bits(value: Any) -> Any:
    """A copy that compares by bits."""
    if isinstance(value, Tensor):
        return (id(value), value.dtype, value.detach().flatten().view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {id(k) if isinstance(k, Tensor) else k: bits(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(v) for v in value]
    return value


@pytest.mark.row(19)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_is_touched(name: str) -> None:
    optimizer = started(name)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls: list[str] = []
    # A step in place of the class's, and a hook, that hold what cannot be copied, as those of trainers do.
    optimizer.step = partial(lambda lock: calls.append("step"), threading.Lock())  # type: ignore[method-assign]
    optimizer.register_step_pre_hook(partial(lambda lock, *_: calls.append("pre"), threading.Lock()))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append("everywhere"))
    gradients = some_gradients(7)

    def state() -> Any:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return bits([
            vars(optimizer), held, [p.grad for p in held], gradients, torch.get_rng_state().tolist(),
            scheduler.state_dict(), len(optimizer.state),
        ])  # fmt: skip

    before = state()
    try:
        fa.update_norms(optimizer, {"now": None, "a": gradients})
        if name not in ("asgd", "rprop"):
            fa.matched_update(optimizer, None, gradients)
    finally:
        everywhere.remove()
    assert state() == before
    assert calls == []


# ---- the multiplier --------------------------------------------------------------------------------------------------


def toy_gradients() -> tuple[Tensor, Tensor]:
    """Of the unmasked arm and of the masked one."""
    one = Enumeration.of(THREE_OUTCOMES, 1)
    grad_j, grad_cap = one.gradient_of(one.rewards), one.gradient_of(one.capped.double())
    return grad_j, grad_j + one.mean(one.rewards) * grad_cap


@pytest.mark.row(19)
def test_e22_gradient_norms_would_be_the_wrong_thing_under_adam() -> None:
    reference, masked = toy_gradients()
    theta = nn.Parameter(THREE_OUTCOMES.theta)
    adam = fa.matched_update(torch.optim.Adam([theta], lr=0.01), [reference], [masked])
    assert adam.reference.gradient / adam.other.gradient == pytest.approx(1.62, abs=5e-3)
    assert adam.multiplier == pytest.approx(1.0, abs=5e-3)
    sgd = fa.matched_update(torch.optim.SGD([theta], lr=0.01), [reference], [masked])
    assert sgd.multiplier == pytest.approx(sgd.reference.gradient / sgd.other.gradient, rel=1e-9)
    # Matched by gradient norms, the masked arm's Adam steps would be 1.62 times as long as the reference's.
    optimizer = torch.optim.Adam([theta], lr=0.01 * sgd.multiplier)
    assert fa.update_norms(optimizer, {"masked": [masked]})["masked"].update > 1.6 * adam.reference.update


@pytest.mark.row(19)
@pytest.mark.parametrize("match", ["update", "gradient_part"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("asgd", "rprop")])
def test_scaled_steps_are_as_long_as_the_reference(name: str, match: str) -> None:
    optimizer = started(name)
    reference, other = some_gradients(7), [0.3 * g + 0.1 for g in some_gradients(8)]
    torch.manual_seed(5)
    matched = fa.matched_update(optimizer, reference, other, match=match)
    target = getattr(matched.reference, match)
    assert getattr(matched.scaled, match) == pytest.approx(target, rel=1e-6)
    assert matched.multiplier == pytest.approx(target / getattr(matched.other, match), rel=1e-12)
    assert abs(matched.multiplier - 1) > 1e-3
    if match == "update":
        torch.manual_seed(5)
        with matched.scaled_learning_rates(optimizer):
            assert float(step(optimizer, other).norm()) == pytest.approx(target, rel=1e-6)


def test_learning_rates_come_back() -> None:
    rate = torch.tensor(0.1)
    held = parameters()
    for groups in (two_groups(held), [{"params": held[:1], "lr": rate}, {"params": held[1:], "lr": rate}]):
        optimizer = torch.optim.SGD(groups, foreach=False)
        matched = fa.matched_update(optimizer, some_gradients(0), [2 * g for g in some_gradients(0)])
        before = [float(group["lr"]) for group in optimizer.param_groups]
        with matched.scaled_learning_rates(optimizer):
            assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([x / 2 for x in before])
        assert [float(group["lr"]) for group in optimizer.param_groups] == before
    assert all(group["lr"] is rate for group in optimizer.param_groups)


@pytest.mark.row(19)
def test_decoupled_decay_counts_in_the_update_and_not_in_its_gradient_part() -> None:
    weights = nn.Parameter(torch.full((4,), 3.0, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weights], lr=0.1, weight_decay=0.5, eps=0.0)
    found = fa.update_norms(optimizer, {"a": [torch.ones(4)], "b": [-torch.ones(4)]})
    assert tuple(found["a"]) == pytest.approx((0.1 * (1 + 0.5 * 3) * 2, 0.1 * 2, 2.0))
    assert tuple(found["b"]) == pytest.approx((0.1 * (0.5 * 3 - 1) * 2, 0.1 * 2, 2.0))
    assert fa.matched_update(optimizer, [torch.ones(4)], [-torch.ones(4)]).multiplier == pytest.approx(5.0)
    by_part = fa.matched_update(optimizer, [torch.ones(4)], [-torch.ones(4)], match="gradient_part")
    assert by_part.multiplier == pytest.approx(1.0)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), [("ASGD", {}), ("Rprop", {}), ("Adafactor", {"lr": 0.9})])
def test_optimizers_that_do_not_follow_their_learning_rate_are_refused(name: str, options: dict[str, float]) -> None:
    optimizer = getattr(torch.optim, name)(parameters(), **options)
    for i in range(3):
        step(optimizer, some_gradients(i))
    signs = [
        g.abs() * p.grad.sign() for g, p in zip(some_gradients(7), optimizer.param_groups[0]["params"], strict=True)
    ]
    with pytest.raises(ValueError, match=f"the step of {name} is not proportional to its learning rate"):
        fa.matched_update(optimizer, signs, [-0.3 * g for g in signs])


class Evaluating(Noisy):
    def step(self, closure: Callable[[], float]) -> None:
        closure()


def test_optimizers_with_closures_are_refused() -> None:
    for make in (torch.optim.LBFGS, Evaluating):
        with pytest.raises(ValueError, match=f"{make.__name__} steps with a closure"):
            fa.update_norms(make(parameters()), {"a": some_gradients(0)})


def test_what_cannot_be_copied_is_refused() -> None:
    optimizer = Noisy(two_groups(parameters()))
    optimizer.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="attribute 'lock' of Noisy cannot be copied"):
        fa.update_norms(optimizer, {"a": some_gradients(0)})


def test_bad_gradients() -> None:
    optimizer, good = started("sgd"), some_gradients(0)
    with pytest.raises(TypeError, match="optimizer is a StepLR"):
        fa.update_norms(torch.optim.lr_scheduler.StepLR(optimizer, 1), {"a": good})
    with pytest.raises(ValueError, match="gradients is empty"):
        fa.update_norms(optimizer, {})
    with pytest.raises(ValueError, match="'a' has 2 gradients, the optimizer 3 parameters"):
        fa.update_norms(optimizer, {"a": good[:2]})
    with pytest.raises(ValueError, match=r"parameter 1 \('a'\) has shape \[3, 3\], the parameter \[2, 5\]"):
        fa.update_norms(optimizer, {"a": [good[0], good[2], good[1]]})
    with pytest.raises(TypeError, match=r"parameter 0 \('a'\) is a Tensor of torch\.complex128"):
        fa.update_norms(optimizer, {"a": [good[0].to(torch.complex128), *good[1:]]})
    with pytest.raises(ValueError, match="match is 'gradient'; it must be one of 'update', 'gradient_part'"):
        fa.matched_update(optimizer, good, good, match="gradient")
    for bad in ([0 * g for g in good], [g / 0 for g in good], [None] * 3):
        with pytest.raises(ValueError, match="update norm of other is"):
            fa.matched_update(optimizer, good, bad)
        with pytest.raises(ValueError, match="update norm of reference is"):
            fa.matched_update(optimizer, bad, good)


# ---- shards ----------------------------------------------------------------------------------------------------------

SHARDED: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda held: torch.optim.AdamW(held, lr=0.01, weight_decay=0.1),
    "adamw, foreach": lambda held: torch.optim.AdamW(held, lr=0.01, weight_decay=0.1, foreach=True),
    "sgd": lambda held: torch.optim.SGD(held, lr=0.01, momentum=0.9),
}
ROLLOUTS = 6


def backward(model: nn.Module, arm: int, rows: Tensor) -> None:
    g = torch.Generator().manual_seed(arm)
    ids = torch.randint(0, VOCABULARY, (ROLLOUTS, 5), generator=torch.Generator().manual_seed(2))
    coefficients = torch.randn(ROLLOUTS, 5, generator=g, dtype=torch.float64)
    model.zero_grad()
    (model(ids[rows]) * coefficients[rows]).sum().backward()


def matched_on(model: nn.Module, rows: Tensor, name: str, **options: Any) -> fa.MatchedUpdate:
    """After a real step, of two arms."""
    held = [p for p in model.parameters() if p.requires_grad]
    optimizer = SHARDED[name](held)
    backward(model, 0, rows)
    optimizer.step()
    backward(model, 1, rows)
    reference = [p.grad for p in held]
    backward(model, 2, rows)
    return fa.matched_update(optimizer, reference, None, **options)


def whole_model() -> TinyLM:
    torch.manual_seed(1)
    return TinyLM().double()


def run_rank(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    world: Any = dist.group.WORLD
    rows = torch.arange(ROLLOUTS).chunk(2)[rank]
    replicas = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {}
    for name in SHARDED:
        for layout, mesh in (("sharded", None), ("replicated", replicas)):
            model = whole_model()
            for module in (*model.layers, model):
                fully_shard(module, mesh=mesh)
            sum_gradients(model)
            found[f"{name}, {layout}"] = matched_on(model, rows, name, process_group=world)
    held = [p for p in model.parameters() if p.requires_grad]
    found["plain"] = refusal(lambda: fa.update_norms(SHARDED["sgd"](held), {"a": [p.grad.to_local() for p in held]}))
    model = whole_model()
    fully_shard(model)
    found["no group"] = refusal(lambda: matched_on(model, rows, "sgd"))
    # A rank's part of a flat buffer, as Megatron's optimizers hold it; the second rank has a gradient of its own only.
    buffer = nn.Parameter(torch.ones(3 + rank, dtype=torch.float64))
    optimizer = torch.optim.SGD([buffer], lr=0.5)
    gradients = {"both": [torch.ones(3 + rank)], "second": [torch.ones(4)] if rank else [None]}
    found["parts"] = fa.update_norms(optimizer, gradients, process_group=world)
    return found


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return worlds.run(run_rank, 2)


@pytest.mark.row(19)
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("name", SHARDED)
def test_shards_of_fsdp2_match_as_the_whole_does(ranks: list[dict[str, Any]], name: str, layout: str) -> None:
    expected = matched_on(whole_model(), torch.arange(ROLLOUTS), name)
    assert abs(expected.multiplier - 1) > 1e-3
    for rank in ranks:
        found = rank[f"{name}, {layout}"]
        assert found.multiplier == pytest.approx(expected.multiplier, rel=1e-9)
        for norms in ("reference", "other", "scaled"):
            assert tuple(getattr(found, norms)) == pytest.approx(tuple(getattr(expected, norms)), rel=1e-9)
    assert ranks[0][f"{name}, {layout}"] == ranks[1][f"{name}, {layout}"]


def test_shards_outside_of_the_group_and_plain_gradients_of_dtensors_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "pass one that holds all shards" in rank["no group"]
        assert "pass real numbers, and DTensors for DTensors" in rank["plain"]


def test_parts_of_a_buffer_are_added_over_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert tuple(rank["parts"]["both"]) == pytest.approx((0.5 * 7**0.5, 0.5 * 7**0.5, 7**0.5))
        assert tuple(rank["parts"]["second"]) == pytest.approx((1.0, 1.0, 2.0))
