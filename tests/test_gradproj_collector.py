"""Sketches of rollouts' gradients out of a running training step, against sketches of flattened gradients."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_lm import VOCABULARY, TinyLM, causal_lm, largest_error
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fastadv.gradproj import RolloutSketches, SketchCollector
from fastadv.ops.count_sketch import count_sketch, sketch_values

B, T, SIZE = 4, 6, 1024
SKETCH: dict[str, Any] = {"size": SIZE, "copies": 2, "seed": 3}


def tiny_lm(dtype: torch.dtype = torch.float64) -> TinyLM:
    torch.manual_seed(1)
    return TinyLM().to(dtype)


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (B, T), generator=torch.Generator().manual_seed(2))


def collect(model: nn.Module, *, size: int = B, **options: Any) -> RolloutSketches:
    """The unit loss, in micro-batches of this many rollouts."""
    with SketchCollector(model, **SKETCH, **options) as collector:
        for rows in torch.arange(B).split(size):
            with collector.micro_batch(rows):
                model(ids()[rows]).sum().backward()
    return collector.sketches()


def step(
    collector: SketchCollector, rollouts: Any, loss: Callable[[], Tensor], cu_seqlens: Tensor | None = None
) -> None:
    with collector.micro_batch(rollouts, cu_seqlens):
        loss().backward()


def sketch_of(gradients: dict[str, Tensor]) -> Tensor:
    """[copies, size] int64 of whole parameters."""
    out = torch.zeros(SKETCH["copies"], SIZE, dtype=torch.int64)
    for name, gradient in gradients.items():
        count_sketch(gradient, SIZE, seed=SKETCH["seed"], copies=SKETCH["copies"], parameter=name, out=out)
    return out


def by_rollout(model: nn.Module) -> list[dict[str, Tensor]]:
    """Gradients of each rollout's sum of log-probs, one backward a rollout."""
    found = []
    for row in ids():
        gradients = torch.autograd.grad(model(row[None]).sum(), list(model.parameters()))
        found.append(dict(zip(dict(model.named_parameters()), gradients, strict=True)))
    return found


def close(sketches: Tensor, expected: Tensor, quanta: int = 200) -> bool:
    """Equal up to the rounding of the gradients' own sums."""
    return int((sketches - expected).abs().max()) <= quanta and int(expected.abs().max()) > 1e9


# ---- what is collected -----------------------------------------------------------------------------------------------


def test_a_rollouts_sketch_is_that_of_its_gradient() -> None:
    model = tiny_lm()
    expected = torch.stack([sketch_of(gradients) for gradients in by_rollout(model)])
    result = collect(model)
    assert close(result.values, expected)  # the tied weight's two parts included
    assert result.rollouts.tolist() == [0, 1, 2, 3]
    assert result.covered == result.total == sum(p.numel() for p in model.parameters())
    assert close(collect(model, size=1).values, expected)
    assert torch.equal(collect(model, scratch=8).values, result.values)  # tiles change nothing


def test_packed_rollouts_give_what_padded_ones_do() -> None:
    model, lengths = tiny_lm(), torch.tensor([T, 3, 0, 5])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    rows = [row[:n] for row, n in zip(ids(), lengths.tolist(), strict=True)]
    with SketchCollector(model, **SKETCH) as collector, collector.micro_batch([7, 5, 6, 4], cu_seqlens):
        model(torch.cat(rows)[None], cu_seqlens).sum().backward()
    packed = collector.sketches()
    assert packed.rollouts.tolist() == [7, 5, 6, 4]
    for i in (0, 1, 3):
        with SketchCollector(model, **SKETCH) as collector, collector.micro_batch([i]):
            model(rows[i][None]).sum().backward()
        assert close(packed.values[i], collector.sketches().values[0])
    assert not packed.values[2].any()  # no tokens


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(reentrant: bool) -> None:
    model = tiny_lm(torch.float32)
    plain = collect(model, size=2)
    model.zero_grad()
    model.checkpointing = reentrant
    assert torch.equal(collect(model, size=2).values, plain.values)


def test_checkpointing_still_frees_what_the_backward_needs() -> None:
    alive = {}
    for checkpointing in (None, False):
        model, inputs = tiny_lm(), []
        model.checkpointing = checkpointing
        with SketchCollector(model, **SKETCH) as collector, collector.micro_batch(range(B)):
            model.layers[0].down.register_forward_hook(
                lambda m, args, y, to=inputs: to.append(StorageWeakRef(args[0].untyped_storage()))
            )
            loss = model(ids()).sum()
            alive[checkpointing] = not inputs[0].expired()
            loss.backward()
    assert alive == {None: True, False: False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [None, False])
def test_the_training_step_is_the_same_bits(dtype: torch.dtype, checkpointing: bool | None) -> None:
    models = [tiny_lm(dtype), tiny_lm(dtype)]
    for model, watched in zip(models, (True, False), strict=True):
        model.checkpointing = checkpointing
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            if watched:
                collect(model, size=2)
            else:
                for rows in torch.arange(B).split(2):
                    model(ids()[rows]).sum().backward()
            optimizer.step()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
        assert torch.equal(a, b), name


def test_gradients_are_not_formed_where_nobody_wants_them() -> None:
    model = tiny_lm(torch.float32)
    with_gradients = collect(model)
    model.zero_grad()
    for checkpointing in (None, False, True):
        model.checkpointing = checkpointing
        assert torch.equal(collect(model, keep_gradients=False).values, with_gradients.values)
        assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_rollout_that_comes_in_parts_adds_up() -> None:
    model = nn.Linear(5, 3).double()
    x = torch.randn(1, 8, 5, dtype=torch.float64)
    collected = []
    for parts in ([slice(0, 8)], [slice(0, 3), slice(3, 8)]):
        with SketchCollector(model, **SKETCH) as collector:
            for part in parts:
                with collector.micro_batch([4]):
                    model(x[:, part]).square().sum().backward()
        collected.append(collector.sketches())
        assert collected[-1].values.shape == (1, 2, SIZE)
    assert close(collected[1].values, collected[0].values)


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen3"])
def test_models_of_transformers_are_covered(family: str) -> None:
    """Conv1D and learned positions; a tied head; norms with a formula of their own, of each head too."""
    model = causal_lm(family, torch.float32)
    tokens = torch.randint(0, VOCABULARY, (B, T))
    positions = torch.arange(T).expand(B, T)
    with SketchCollector(model, **SKETCH) as collector, collector.micro_batch(range(B)):
        output = model(input_ids=tokens, position_ids=positions, use_cache=False)
        output.logits.log_softmax(-1)[..., 3].sum().backward()
    result = collector.sketches()
    assert result.covered == result.total == model.num_parameters()
    assert collector.gradient_error() < 1e-5


def test_padding_rows_and_outputs_that_other_hooks_change() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 6, padding_idx=3), nn.RMSNorm(6), nn.Linear(6, 2))
    model[1].register_forward_hook(lambda m, args, y: y.tanh())
    with SketchCollector(model, **SKETCH, scratch=20) as collector:
        step(collector, range(B), lambda: model(ids()).square().sum())
    assert (ids() == 3).any()
    assert collector.gradient_error() < 1e-5


def test_gradients_of_bfloat16_models_are_summed_in_float32() -> None:
    model = nn.Linear(8, 4, bias=False).bfloat16()
    x, dy = torch.randn(1, 500, 8).bfloat16(), torch.randn(1, 500, 4).bfloat16()
    with SketchCollector(model, **SKETCH) as collector, collector.micro_batch([0]):
        model(x).backward(dy)
    exact = sketch_values(sketch_of({"weight": dy[0].T.double() @ x[0].double()}))
    assert largest_error(sketch_values(collector.sketches().values[0]), exact) < 1e-6
    assert largest_error(sketch_values(sketch_of({"weight": model.weight.grad})), exact) > 1e-4


def test_tensor_parallel_shards_give_the_same_bits() -> None:
    """Whole numbers, so that a sum is the same however it is split; 35 rows and columns split a chunk."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-4, 5, (B, T, 40), generator=g).float()
    up, down = (torch.randint(-2, 3, shape, generator=g).float() for shape in ((70, 40), (9, 70)))
    bias = torch.randint(-2, 3, (70,), generator=g).float()

    def collected(first: int, last: int, cotangent: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        model = nn.Sequential(nn.Linear(40, last - first), nn.Linear(last - first, 9, bias=False))
        for p, values in zip(model.parameters(), (up[first:last], bias[first:last], down[:, first:last]), strict=True):
            p.data = values.clone()
        with SketchCollector(model, **SKETCH, **options) as collector, collector.micro_batch(range(B)):
            y = model(x)
            y.backward(torch.ones_like(y) if cotangent is None else cotangent)
        return y.detach(), collector.sketches().values

    _, whole = collected(0, 70, None)
    halves = torch.zeros_like(whole)
    for first, last in ((0, 35), (35, 70)):
        shards = {"0.weight": (first, 0), "0.bias": (0, first), "1.weight": (0, first)}
        halves += collected(first, last, None, shards=shards)[1]
    assert torch.equal(halves, whole)
    assert not torch.equal(sum(collected(a, b, None)[1] for a, b in ((0, 35), (35, 70))), whole)  # without offsets


# ---- what is not held ------------------------------------------------------------------------------------------------


def test_nothing_of_a_step_outlives_it() -> None:
    model = tiny_lm()
    dead: list[weakref.ref[Tensor]] = []

    def watch(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        dead.extend([weakref.ref(args[0]), weakref.ref(y)])
        y.register_hook(lambda dy: dead.append(weakref.ref(dy)))

    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.RMSNorm)):
            module.register_forward_hook(watch)
    gc.disable()
    try:
        with SketchCollector(model, **SKETCH) as collector:
            with collector.micro_batch(range(B)):
                # With a graph of the gradients, what is captured in a backward has one too.
                loss = model(ids()).sum()
                gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            assert len(dead) > 30
            del loss, gradients
            left = [r for r in dead if r() is not None]
            assert not left, f"{len(left)} of {len(dead)} tensors are held"
            with collector.micro_batch(range(B)):  # a forward that no backward follows
                model(ids())
                model(ids()).sum().backward()
            assert all(r() is None for r in dead)
    finally:
        gc.enable()
    assert not collector.sketches().values.requires_grad


def test_hooks_go_with_the_collector_and_broken_micro_batches_leave_nothing() -> None:
    model = tiny_lm()
    collector = SketchCollector(model, **SKETCH)

    def fails_late() -> Tensor:
        model(ids()).sum().backward()
        raise KeyError

    with pytest.raises(KeyError), collector:
        step(collector, range(B), fails_late)
    with pytest.raises(ValueError, match="no micro-batch was run"):
        collector.sketches()
    model(ids()).sum().backward()  # nobody watches
    assert not any(m._forward_hooks for m in model.modules())


def test_what_watches_norms_too_sees_each_pass_once() -> None:
    """A norm that is run again for its weight's gradient does not run the hooks of others, another collector's among
    them."""
    model, calls = causal_lm("qwen2"), []
    norm = model.model.norm
    handle = norm.register_forward_hook(lambda *_: calls.append(1))
    outer, inner = SketchCollector(model, **SKETCH), SketchCollector(model, **SKETCH)
    with outer, inner, outer.micro_batch(range(B)), inner.micro_batch(range(B)):
        model(input_ids=ids(), use_cache=False).logits.sum().backward()
    handle.remove()
    assert len(calls) == 1
    assert torch.equal(outer.sketches().values, inner.sketches().values)
    assert outer.gradient_error() < 1e-9


# ---- what is refused -------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.linear = nn.Parameter(torch.ones(3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.gain)


def test_modules_that_are_not_known_are_named() -> None:
    model = nn.Sequential(Odd(), nn.Conv2d(1, 1, 1), nn.Embedding(3, 2, max_norm=1.0))
    with pytest.raises(ValueError, match=r"parameters of 0 \(Odd\), 1 \(Conv2d\), 2 \(Embedding\)"):
        SketchCollector(model)
    collector = SketchCollector(model, strict=False)
    assert collector.covered == 8  # the Linear's
    model[0].gain.requires_grad_(False)  # frozen ones need no sketch
    SketchCollector(model[0])
    with pytest.raises(ValueError, match=r"parameters of the model itself \(Odd\)"):
        SketchCollector(Odd())


def test_a_weight_that_is_used_behind_its_modules_back_is_noticed() -> None:
    model = tiny_lm()

    def fused(x: Tensor) -> Tensor:
        return nn.functional.linear(model.embedding(x), model.head.weight)

    words = r"embedding\.weight got a gradient, but head did not run"
    with SketchCollector(model, **SKETCH) as collector:
        step(collector, range(B), lambda: model(ids()).sum())
        with pytest.raises(ValueError, match=words):
            step(collector, range(B), lambda: fused(ids()).sum())


def test_the_sum_of_sketches_is_compared_with_the_gradients() -> None:
    model = tiny_lm(torch.float32)
    for bypass, bounds in ((False, (0.0, 1e-5)), (True, (0.05, 10.0))):
        with SketchCollector(model, **SKETCH) as collector:
            with pytest.raises(ValueError, match="no micro-batch was run"):
                collector.gradient_error()
            for rows in torch.arange(B).split(2):
                with collector.micro_batch(rows):
                    loss = model(ids()[rows]).sum()
                    if bypass:  # a part of the embedding's gradient that the module has no part in
                        loss = loss + model.embedding.weight.square().sum()
                    loss.backward()
        assert bounds[0] <= collector.gradient_error() < bounds[1]
        model.zero_grad()
    with pytest.raises(ValueError, match="the model has no gradients"):
        collector.gradient_error()


def test_misuse_is_refused() -> None:
    model = tiny_lm()
    for options, words in (
        ({"size": 40}, "size is 40"),
        ({"level": "turn"}, "level is 'turn'"),
        ({"copies": 0}, "copies is 0"),
        ({"quantum": 0.0}, "quantum is 0"),
        ({"quantum": 0.3}, "quantum is 0.3; it must be a power of two"),
        ({"size": 2**29}, "size is 536870912; it must be from 32 to 268435456"),
        ({"quantum": 2.0**-200}, "it must be a power of two, from"),
        ({"copies": 2**21}, "copies is 2097152"),
        ({"shards": {"head.weight": (0, 0)}}, "shards names 'head.weight'"),  # its name is the embedding's
    ):
        with pytest.raises(ValueError, match=words):
            SketchCollector(model, **options)
    collector = SketchCollector(model, **SKETCH)
    with pytest.raises(RuntimeError, match="use the collector with `with`"), collector.micro_batch([0]):
        pass
    with collector:
        with torch.no_grad():
            model(ids())
        with pytest.raises(RuntimeError, match="embedding ran outside of micro_batch"):
            model(ids())
        with pytest.raises(RuntimeError, match="watches the model already"):
            collector.__enter__()
        with pytest.raises(ValueError, match="no gradient reached the model"), collector.micro_batch([0]):
            pass
        for rollouts, cu_seqlens, words in (
            ([0.5], None, "rollouts holds 0.5; they are integers"),
            (torch.ones(B), None, "rollouts holds 1.0; they are integers"),
            ([0], [0, 2, 3], "cu_seqlens is of 2 rollouts, 1 are named"),
            ([0], [0, 3, 2], "decrease"),
            (range(3), None, r"head works on \[4, 6, 6\], the micro-batch has 3"),
            ([0, 1], [0, 20, 24], r"head works on \[4, 6, 6\], cu_seqlens ends at 24 tokens; expected \[1, 24"),
        ):
            ends = None if cu_seqlens is None else torch.tensor(cu_seqlens)
            with pytest.raises(ValueError, match=words):
                step(collector, rollouts, lambda: model(ids()).sum(), ends)

        def twice() -> Tensor:
            loss = model(ids()).sum()
            loss.backward(retain_graph=True)
            return loss

        with pytest.raises(RuntimeError, match="a second backward through one forward of head"):
            step(collector, range(B), twice)
        with collector.micro_batch(range(B)):
            early = model(ids()).sum()
            model(ids()).sum().backward()
        with pytest.raises(RuntimeError, match="backward of head in another micro_batch"):
            step(collector, range(B), lambda: early)


def test_a_gradient_that_is_not_finite_is_named_and_leaves_nothing() -> None:
    model = tiny_lm()
    down, infinite = model.layers[1].down, torch.full((B, T, 7), torch.inf, dtype=torch.float64)
    with SketchCollector(model, **SKETCH) as collector:
        with pytest.raises(ValueError, match=r"the gradient of layers\.1\.down\.weight: .* finite"):
            step(collector, range(B), lambda: down(infinite).sum())
        step(collector, range(B), lambda: model(ids()).sum())
    assert close(collector.sketches().values, collect(tiny_lm()).values, quanta=0)


def test_position_ids_that_all_rollouts_share_are_refused() -> None:
    model = causal_lm("gpt2")
    words = r"transformer\.wpe works on \[1, 6\].* such as position ids \[1, T\]"
    with SketchCollector(model, **SKETCH) as collector, pytest.raises(ValueError, match=words):
        step(collector, range(B), lambda: model(input_ids=ids(), use_cache=False).logits.sum())


def test_only_gpt2s_conv1d_is_taken_for_it() -> None:
    """A convolution of the same name and parameters' dimensions would be sketched as a product that it is not."""

    class ShortConv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.zeros(4))

    with pytest.raises(ValueError, match=r"no way to sketch the parameters of 0 \(ShortConv1D\)"):
        SketchCollector(nn.Sequential(ShortConv1D()))
