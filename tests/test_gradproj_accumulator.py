"""The Gram matrix of a trainer's gradients, plain and sharded by FSDP2, against flattened ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from tiny_lm import VOCABULARY, TinyLM, flat, largest_error
from torch import Tensor, nn

from fastadv.gradproj import (
    GramAccumulator,
    RolloutSketches,
    SketchCollector,
    fsdp2_filter,
    megatron_filter,
    sum_gradients,
)

ROLLOUTS, LENGTH = 8, 5
ARMS, DIRECTIONS = ("reference", "close", "far"), ("cap",)


def tiny_lm() -> TinyLM:
    torch.manual_seed(1)
    return TinyLM().double()


def data() -> tuple[Tensor, Tensor]:
    """Ids of the rollouts, and the coefficients of the arms and the direction."""
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (ROLLOUTS, LENGTH), generator=g)
    coefficients = torch.randn(4, ROLLOUTS, LENGTH, generator=g, dtype=torch.float64)
    coefficients[1] = coefficients[0] + 1e-3 * coefficients[1]
    return ids, coefficients


def backward(model: nn.Module, arm: int, rows: Tensor) -> None:
    """Two micro-batches of an arm."""
    ids, coefficients = data()
    for part in rows.chunk(2):
        (model(ids[part]) * coefficients[arm, part]).sum().backward()


def accumulate(model: nn.Module, rows: Tensor, **options: Any) -> GramAccumulator:
    accumulator = GramAccumulator(ARMS, directions=DIRECTIONS, **options)
    for arm in range(4):
        model.zero_grad()
        backward(model, arm, rows)
        accumulator.capture(arm, model)
    return accumulator


def flattened(dtype: torch.dtype = torch.float64) -> Tensor:
    """[4, P] float64, one backward pass over everything for each."""
    model, (ids, coefficients) = tiny_lm().to(dtype), data()
    log_probs = model(ids)
    losses = [(log_probs * c.to(dtype)).sum() for c in coefficients]
    parameters = list(model.parameters())
    return torch.stack([flat(list(torch.autograd.grad(x, parameters, retain_graph=True))) for x in losses]).double()


def gram_of(gradients: Tensor, basis: str = "arms") -> Tensor:
    if basis == "differences":
        gradients = torch.cat([gradients[:1], gradients[1:3] - gradients[:1], gradients[3:]])
    return gradients @ gradients.T


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("basis", ["arms", "differences"])
def test_the_gram_is_that_of_flat_gradients(basis: str) -> None:
    accumulator = accumulate(tiny_lm(), torch.arange(ROLLOUTS))
    assert accumulator.names == (*ARMS, *DIRECTIONS)
    assert largest_error(accumulator.gram(basis), gram_of(flattened(), basis)) < 1e-12


def test_float32_gradients_are_multiplied_in_more_than_float32() -> None:
    accumulator = accumulate(tiny_lm().float(), torch.arange(ROLLOUTS))
    assert largest_error(accumulator.gram(), gram_of(flattened())) < 1e-6


def test_an_arm_close_to_the_reference_keeps_its_difference() -> None:
    g = torch.Generator().manual_seed(0)
    reference = torch.randn(100_000, generator=g)
    close = reference + 1e-4 * torch.randn(100_000, generator=g)
    accumulator = GramAccumulator(2)
    accumulator.add("weight", [reference, close])
    difference = close.double() - reference.double()
    exact = float(difference @ difference)
    assert float(accumulator.gram("differences")[1, 1]) == pytest.approx(exact, rel=1e-6)
    products = torch.stack([reference, close]) @ torch.stack([reference, close]).T  # what float32 products leave of it
    assert abs(float(products[0, 0] - 2 * products[0, 1] + products[1, 1]) / exact - 1) > 0.1


def test_capture_leaves_gradients_alone_and_add_gives_the_same() -> None:
    model, captured, added = tiny_lm(), GramAccumulator(["a", "b"]), GramAccumulator(["a", "b"])
    kept: list[dict[str, Tensor]] = []
    for arm in range(2):
        model.zero_grad()
        backward(model, arm, torch.arange(ROLLOUTS))
        captured.capture("ab"[arm], model)
        kept.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.embedding.weight.grad.add_(0)  # the trainer's own, to write to
    for name in kept[0]:
        added.add(name, [k[name] for k in kept])
    assert torch.equal(captured.gram(), added.gram())
    model.embedding.weight.grad.fill_(7.0)
    assert torch.equal(captured.gram(), added.gram())


def test_copies_do_not_follow_gradients_that_are_written_over() -> None:
    model, accumulator = tiny_lm(), GramAccumulator(2)
    for arm in range(2):
        model.zero_grad(set_to_none=False)  # in place, as Megatron's buffers are
        backward(model, arm, torch.arange(ROLLOUTS))
        accumulator.capture(arm, model)
    assert largest_error(accumulator.gram(), gram_of(flattened())[:2, :2]) < 1e-12


def test_a_parameter_that_one_arm_does_not_reach_counts_as_zeros() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)})
    accumulator = GramAccumulator(2)
    for arm, names in enumerate(["ab", "b"]):
        model.zero_grad()
        sum(model[name](torch.tensor([1.0, 2.0])).sum() for name in names).backward()
        accumulator.capture(arm, model)
    assert accumulator.gram().tolist() == [[10.0, 5.0], [5.0, 5.0]]


def test_megatron_main_grad_and_its_duplicates() -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(3)) for name in ("split", "norm", "tied")})
    for p in model.values():
        p.main_grad = torch.ones(3)
    model["split"].tensor_model_parallel = True
    model["tied"].shared = True
    for rank, counted in ((0, 2), (1, 1)):
        accumulator = GramAccumulator(1, filter=megatron_filter(rank))
        accumulator.capture(0, model)
        assert accumulator.gram().tolist() == [[3.0 * counted]]


def test_what_cannot_be_right_is_refused() -> None:
    model, rows = tiny_lm(), torch.arange(ROLLOUTS)
    with pytest.raises(ValueError, match="each name once"):
        GramAccumulator(["a", "b"], directions=["a"])
    accumulator = GramAccumulator(["a", "b"])
    with pytest.raises(ValueError, match="no gradients; call capture"):
        accumulator.gram()
    with pytest.raises(ValueError, match="no parameter of the model has a gradient"):
        accumulator.capture("a", model)
    backward(model, 0, rows)
    accumulator.capture("a", model)
    with pytest.raises(ValueError, match="'a' was captured before"):
        accumulator.capture("a", model)
    with pytest.raises(ValueError, match="'c' is none of"):
        accumulator.capture("c", model)
    with pytest.raises(ValueError, match="no gradients of b were captured"):
        accumulator.gram()
    with pytest.raises(ValueError, match=r"norm.weight was added before; .* micro-batches"):
        accumulator.add("norm.weight", [torch.zeros(2)] * 2)
    with pytest.raises(ValueError, match="1 gradients of w; pass 2"):
        accumulator.add("w", [torch.zeros(2)])
    with pytest.raises(ValueError, match=r"the gradients of w have shapes \[\[2\], \[3\]\]"):
        GramAccumulator(2).add("w", [torch.zeros(2), torch.zeros(3)])
    accumulator.capture("b", model)
    with pytest.raises(ValueError, match="basis is 'arm'"):
        accumulator.gram("arm")
    with pytest.raises(ValueError, match="no part of the model is sharded"):
        sum_gradients(model)


def test_gradients_that_are_no_dense_real_numbers_are_refused() -> None:
    dense = torch.ones(3)
    for strange, words in (
        (torch.ones(3, dtype=torch.complex64), "torch.complex64"),
        (dense.to_sparse(), "torch.sparse_coo"),
        (torch.ones(3, dtype=torch.int64), "torch.int64"),
    ):
        with pytest.raises(ValueError, match=rf"the gradient of w is .*{words}.*; pass a dense one of real numbers"):
            GramAccumulator(["a", "b"]).add("w", [dense, strange])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named(value: float) -> None:
    model, accumulator = tiny_lm().float(), GramAccumulator(["a", "b"])
    backward(model, 0, torch.arange(ROLLOUTS))
    accumulator.capture("a", model)
    model.layers[1].gate.weight.grad[0, 2] = value
    accumulator.capture("b", model)
    with pytest.raises(ValueError, match=r"the gradient of layers.1.gate.weight \(arm 'b'\) is not finite, or above"):
        accumulator.gram()


# ---- two ranks -------------------------------------------------------------------------------------------------------


def sharded(mesh: Any = None) -> TinyLM:
    from torch.distributed.fsdp import fully_shard

    model = tiny_lm()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def tensor_parallel(rank: int) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """Norm, column-parallel and row-parallel Linear, and what runs them."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(3)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    if rank >= 0:
        mesh = dist.init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    return model, lambda m: m(x).square().sum().backward()


def sketches(model: nn.Module, rows: Tensor) -> RolloutSketches:
    with SketchCollector(model, size=1024, copies=2) as collector:
        for part in rows.chunk(2):
            with collector.micro_batch(part):
                model(data()[0][part]).sum().backward()
    return collector.sketches()


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def run_rank(rank: int) -> dict[str, Any]:
    world: Any = dist.group.WORLD
    rows = torch.arange(ROLLOUTS).chunk(2)[rank]
    found: dict[str, Any] = {}

    model = sharded()
    found["mean"] = accumulate(model, rows, process_group=world).gram()
    model.set_gradient_divide_factor(1.0)  # of the root only
    found["root only"] = accumulate(model, rows, process_group=world).gram()
    sum_gradients(model)
    accumulator = accumulate(model, rows, process_group=world)
    found["sum"], found["differences"] = accumulator.gram(), accumulator.gram("differences")
    found["empty shard"] = min(p.to_local().numel() for p in model.parameters())
    found["no group"] = message(lambda: accumulate(model, rows))
    if rank == 1:
        model.layers[0].norm.bias.grad.to_local()[0] = torch.nan
    broken = GramAccumulator(1, process_group=world)
    broken.capture(0, model)
    found["not finite"] = message(broken.gram)

    own = sketches(model, rows)
    union = own.all_reduce(world)
    found["rollouts"], found["sketches"] = union.rollouts, union.values
    found["arms"] = own.arms(data()[1][:, rows, 0], process_group=world)
    found["other seeds"] = message(lambda: replace(own, seed=rank).all_reduce(world))

    replicas = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(replicas)
    sum_gradients(model)
    for name, group in (("world", world), ("one replica", replicas.get_group("shard"))):
        found[f"HSDP, {name}"] = accumulate(model, rows, process_group=group).gram()

    model, step = tensor_parallel(rank)
    step(model)
    for name, chosen in (("once", fsdp2_filter(world)), ("twice", None)):
        accumulator = GramAccumulator(1, process_group=world, filter=chosen)
        accumulator.capture(0, model)
        found[f"tensor parallel, {name}"] = accumulator.gram()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return worlds.run(run_rank, 2)


def test_shards_of_fsdp2_give_the_unsharded_gram(ranks: list[dict[str, Any]]) -> None:
    exact = flattened()
    for rank in ranks:
        assert largest_error(rank["sum"], gram_of(exact)) < 1e-12
        assert largest_error(rank["differences"], gram_of(exact, "differences")) < 1e-12
    assert ranks[1]["empty shard"] == 0  # the gate has one row


def test_a_divide_factor_on_the_root_only_gives_a_false_gram(ranks: list[dict[str, Any]]) -> None:
    exact = gram_of(flattened())
    assert largest_error(ranks[0]["mean"], exact / 4) < 1e-12  # averages of two ranks: wrong, but all of it alike
    assert largest_error(ranks[0]["root only"], exact) > 0.2
    norms = exact.diagonal().sqrt()
    wrong = ranks[0]["root only"].diagonal().sqrt()
    cosines = ranks[0]["root only"] / wrong[:, None] / wrong - exact / norms[:, None] / norms
    assert cosines.abs().max() > 1e-3  # no cosine survives it


def test_hybrid_shards_are_counted_once_whatever_group_is_given(ranks: list[dict[str, Any]]) -> None:
    exact = gram_of(flattened())
    for rank in ranks:
        for group in ("world", "one replica"):
            assert largest_error(rank[f"HSDP, {group}"], exact) < 1e-12


def test_what_tensor_parallel_ranks_have_twice_counts_once(ranks: list[dict[str, Any]]) -> None:
    model, step = tensor_parallel(-1)
    step(model)
    squares = {name: float(p.grad.square().sum()) for name, p in model.named_parameters()}
    norm, whole = squares["0.weight"] + squares["0.bias"], sum(squares.values())
    for rank in ranks:
        assert float(rank["tensor parallel, once"]) == pytest.approx(whole, rel=1e-12)
        assert float(rank["tensor parallel, twice"]) == pytest.approx(whole + norm, rel=1e-12)


def test_sketches_of_sharded_models_are_those_of_the_whole_one(ranks: list[dict[str, Any]]) -> None:
    model = tiny_lm()
    parts = [sketches(model, rows) for rows in torch.arange(ROLLOUTS).chunk(2)]
    whole = replace(parts[0], values=torch.cat([p.values for p in parts]), rollouts=torch.arange(ROLLOUTS))
    for rank in ranks:
        assert rank["rollouts"].tolist() == list(range(ROLLOUTS))
        assert torch.equal(rank["sketches"], whole.values)
        assert largest_error(rank["arms"], whole.arms(data()[1][:, :, 0])) < 1e-12
        assert "(seed, quantum, copies, size) are [(0, " in rank["other seeds"]


def test_errors_of_shards_reach_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert all("is split over ranks [0, 1], and process_group is None" in rank["no group"] for rank in ranks)
    assert "a parameter on another rank is not finite" in ranks[0]["not finite"]
    assert "the gradient of layers.0.norm.bias (arm 'arm 0') is not finite" in ranks[1]["not finite"]
