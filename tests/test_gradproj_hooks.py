"""Hooks, parametrizations and patches: what they change is in the segment Gram and in sketches, or is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradproj_models import ragged_batch, relative_error, small_model, written_out
from tiny_lm import VOCABULARY, causal_lm
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import fastadv as fa
from fastadv import gradproj
from fastadv.gradproj import SketchCollector

SKETCH: dict[str, Any] = {"size": 1024, "copies": 2, "seed": 3}


@pytest.fixture(scope="module")
def batch() -> fa.Batch:
    return ragged_batch()


def scaled_gradient(y: Tensor) -> None:
    if y.requires_grad:
        y.register_hook(lambda g: 3 * g)


# Each changes what a module gives, gets, or gets back.
HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "output": lambda m: m.register_forward_hook(lambda m, x, y: y.tanh()),
    "input": lambda m: m.register_forward_pre_hook(lambda m, x: (x[0] + 0.5,)),
    "output in place": lambda m: m.register_forward_hook(lambda m, x, y: y.mul_(2)),
    "gradient": lambda m: m.register_forward_hook(lambda m, x, y: scaled_gradient(y)),
    "gradient of output": lambda m: m.register_full_backward_pre_hook(lambda m, dy: (2 * dy[0],)),
    "gradient of input": lambda m: m.register_full_backward_hook(lambda m, dx, dy: (2 * dx[0],)),
}


# ---- the segment Gram ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("part", ["layers.1.post_attention_layernorm", "layers.0.mlp.up_proj", "norm", "layers.0"])
def test_hooks_of_layers_and_their_modules_are_in_the_gram(hook: str, part: str, batch: fa.Batch) -> None:
    model, level = small_model("llama"), "turn"
    HOOKS[hook](model.model.get_submodule(part))
    u = written_out(model, batch, level)
    plain = written_out(small_model("llama"), batch, level)
    assert relative_error(u @ u.t(), plain @ plain.t()) > 1e-3
    assert relative_error(gradproj.segment_gram(model, batch, level=level).gram, u @ u.t()) < 1e-12


def test_hooks_on_layers_run_once(batch: fa.Batch) -> None:
    """What a layer is recomputed from is its input before hooks: those run then too."""
    model = small_model("qwen2")
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))
    u = written_out(model, batch, "rollout")
    assert relative_error(gradproj.segment_gram(model, batch).gram, u @ u.t()) < 1e-12


def doubled(linear: nn.Linear) -> None:
    linear.forward = lambda x: 2 * nn.functional.linear(x, linear.weight)  # type: ignore[method-assign]


def test_linear_layers_that_are_more_than_their_weight_are_refused(batch: fa.Batch) -> None:
    """Their formula is written out here, so whatever else they do would be left out of the Gram."""
    inside, head, hooked, parametrized = (small_model("qwen2") for _ in range(4))
    doubled(inside.model.layers[0].mlp.up_proj)
    with pytest.raises(ValueError, match=r"up_proj \(Linear, whose forward was replaced\) owns weight, and no"):
        gradproj.segment_gram(inside, batch)
    doubled(head.lm_head)
    with pytest.raises(ValueError, match="lm_head is a Linear, which cannot be intercepted"):
        gradproj.segment_gram(head, batch)
    hooked.lm_head.register_forward_hook(lambda module, args, logits: 2 * logits)
    with pytest.raises(ValueError, match="lm_head has forward hooks"):
        gradproj.segment_gram(hooked, batch)
    nn.utils.parametrize.register_parametrization(parametrized.lm_head, "weight", nn.Tanh())
    with pytest.raises(ValueError, match="lm_head is a ParametrizedLinear, which cannot be intercepted"):
        gradproj.segment_gram(parametrized, batch)


def steered(module: nn.Module) -> None:
    module.register_forward_hook(lambda m, x, y: (y[0] * 1.5, *y[1:]) if isinstance(y, tuple) else y * 1.5)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_hooks_outside_of_layers_are_refused_where_they_change_anything(family: str, batch: fa.Batch) -> None:
    model = small_model(family)
    expected = gradproj.segment_gram(model, batch).gram
    for module in model.modules():
        if module is not model.lm_head:
            module.register_forward_hook(lambda m, x, y: None)
    assert torch.equal(gradproj.segment_gram(model, batch).gram, expected)

    chain = "does not run its 2 layers on its embeddings one after the other, .* with nothing"
    embedding, backbone, whole, switched = (small_model(family) for _ in range(4))
    steered(embedding.get_input_embeddings())
    with pytest.raises(ValueError, match=chain):
        gradproj.segment_gram(embedding, batch)
    steered(backbone.base_model.norm if family == "qwen2" else backbone.base_model.ln_f)  # of a stage: it runs
    gradproj.segment_gram(backbone, batch)
    backbone.base_model.register_forward_hook(
        lambda m, x, y: type(y)(**{**y, "last_hidden_state": y.last_hidden_state * 1.5})
    )
    with pytest.raises(ValueError, match=chain):
        gradproj.segment_gram(backbone, batch)
    whole.register_forward_hook(lambda m, x, y: type(y)(**{**y, "logits": (y.logits / 30).tanh() * 30}))
    with pytest.raises(ValueError, match=r"logits are not its output layer's .* by .* of the largest \(a hook"):
        gradproj.segment_gram(whole, batch)
    own = switched.forward
    switched.forward = lambda **given: (lambda y: type(y)(**{**y, "logits": 2 * y.logits}))(own(**given))
    with pytest.raises(ValueError, match="logits are not its output layer's"):
        gradproj.segment_gram(switched, batch)


def test_what_is_between_layers_is_refused(batch: fa.Batch) -> None:
    """Recomputed layers begin with what they got; the gradient of what came between would be missing."""
    model = small_model("llama")
    layers = {id(layer) for layer in model.model.layers}
    handle = register_module_forward_pre_hook(lambda m, x: (2 * x[0], *x[1:]) if id(m) in layers else None)
    try:
        with pytest.raises(ValueError, match=r"with nothing .* between or around them"):
            gradproj.segment_gram(model, batch)
    finally:
        handle.remove()
    gradproj.segment_gram(model, batch)


def test_backward_hooks_that_would_not_run_are_refused(batch: fa.Batch) -> None:
    for family, name in (("gpt2", "transformer.wpe"), ("qwen2", "lm_head"), ("qwen2", "model"), ("llama", "")):
        model = small_model(family)
        handle = model.get_submodule(name).register_full_backward_hook(lambda m, dx, dy: None)
        with pytest.raises(ValueError, match=f"{name or 'the model'} has backward hooks, which do not run here"):
            gradproj.segment_gram(model, batch)
        handle.remove()
        gradproj.segment_gram(model, batch)
    model = small_model("llama")
    handle = model.model.norm.weight.register_hook(lambda g: 0 * g)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has a hook on its gradient \(Tensor\.register_hook\)"):
        gradproj.segment_gram(model, batch)
    handle.remove()
    model.model.layers[0].mlp.register_backward_hook(lambda m, dx, dy: None)
    with pytest.raises(ValueError, match=r"mlp has a backward hook of the old kind; use register_full_backward_hook"):
        gradproj.segment_gram(model, batch)


def weight_normed(linear: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(linear)


def parametrized(linear: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(linear, "weight", nn.Tanh())


@pytest.mark.parametrize("compute", [weight_normed, parametrized])
@pytest.mark.parametrize("part", ["mlp.up_proj", "input_layernorm"])
def test_weights_that_are_computed_are_no_weights(
    compute: Callable[[nn.Module], None], part: str, batch: fa.Batch
) -> None:
    """Their gradient is not that of the parameters behind them: refused, or left out with all that they own."""
    model = small_model("llama")
    compute(model.model.layers[1].get_submodule(part))
    with pytest.raises(ValueError, match="no interceptor is registered") as error:
        gradproj.segment_gram(model, batch)
    assert part in str(error.value)
    gram = gradproj.segment_gram(model, batch, strict=False)
    for parameter in model.model.layers[1].get_submodule(part).parameters():
        parameter.requires_grad_(False)
    u = written_out(model, batch, "rollout")
    assert relative_error(gram.gram, u @ u.t()) < (1e-12 if part == "mlp.up_proj" else 1e-5)  # norms in float32
    assert gram.covered == u.shape[1]


# ---- sketches --------------------------------------------------------------------------------------------------------


class OwnRMSNorm(nn.Module):
    """With a formula of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6), OwnRMSNorm(6), nn.LayerNorm(6), nn.Linear(6, 6, bias=False),
        nn.RMSNorm(6), nn.Linear(6, 2),
    )  # fmt: skip


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(2))


def run(model: nn.Module, collector: SketchCollector) -> float:
    for rows in torch.arange(4).split(2):
        with collector.micro_batch(rows):
            model(ids()[rows]).square().sum().backward()
    return collector.gradient_error()


@pytest.mark.parametrize("late", [False, True], ids=["before", "within"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_in_sketches(hook: str, late: bool) -> None:
    """Whoever registers first: sketches are of the gradients that `.grad` adds up."""
    for number in range(1, 6):
        model, plain = chain(), chain()
        if not late:
            HOOKS[hook](model[number])
        with SketchCollector(model, **SKETCH) as collector:
            if late:
                HOOKS[hook](model[number])
            assert run(model, collector) < 1e-5
        with SketchCollector(plain, **SKETCH) as other:
            run(plain, other)
        assert not torch.equal(collector.sketches().values, other.sketches().values)


def test_hooks_of_all_modules_and_hooks_that_come_first() -> None:
    model = chain()
    handle = register_module_forward_hook(lambda m, x, y: y.tanh() if m is model[3] else None)
    try:
        with SketchCollector(model, **SKETCH) as collector:
            model[1].register_forward_hook(lambda m, x, y: y.sin(), prepend=True)
            assert run(model, collector) < 1e-5
    finally:
        handle.remove()


def test_a_hook_on_the_first_output_of_a_model_whose_parameters_wait() -> None:
    model = chain()
    model[0].register_forward_hook(lambda m, x, y: y.tanh())
    with SketchCollector(model, **SKETCH) as collector:
        run(model, collector)
    spared = SketchCollector(model, **SKETCH, keep_gradients=False)
    with spared:
        for rows in torch.arange(4).split(2):
            with spared.micro_batch(rows):
                model(ids()[rows]).square().sum().backward()
    assert torch.equal(spared.sketches().values, collector.sketches().values)


def test_what_would_make_sketches_wrong_is_refused() -> None:
    for change, where in (
        (lambda m: weight_normed(m[1]), "1 \\(Linear, whose weight is computed from other parameters"),
        (lambda m: parametrized(m[1]), "1 \\(ParametrizedLinear, whose weight is computed"),
        (lambda m: parametrized(m[2]), r"2\.parametrizations\.weight \(ParametrizationList"),
        (lambda m: setattr(m[4], "forward", lambda x: 2 * x), "4 \\(Linear, whose forward was replaced"),
    ):
        model = chain()
        change(model)
        with pytest.raises(ValueError, match="no way to sketch the parameters of " + where):
            SketchCollector(model)
    model = chain()
    with SketchCollector(model, **SKETCH) as collector:
        handle = model[0].weight.register_hook(lambda g: 0 * g)
        with pytest.raises(ValueError, match=r"0\.weight has a hook on its gradient .*; remove it"):
            run(model, collector)
        handle.remove()
        model[1].register_backward_hook(lambda m, dx, dy: None)
        with pytest.raises(ValueError, match="1 has a backward hook of the old kind"):
            run(model, collector)


def test_a_norm_whose_forward_was_replaced_is_run_as_it_is() -> None:
    """As libraries do that put their own kernels into a model."""
    model = chain()
    own = model[2].forward
    model[2].forward = lambda x: 3 * own(x)
    with SketchCollector(model, **SKETCH) as collector:
        assert run(model, collector) < 1e-5
    assert model[2].forward is not own


def test_collectors_that_do_not_end_in_the_order_they_began() -> None:
    model = causal_lm("qwen2")
    outer, inner = SketchCollector(model, **SKETCH), SketchCollector(model, **SKETCH)
    outer.__enter__()
    with inner:
        outer.__exit__(None, None, None)
        with inner.micro_batch(range(4)):
            model(input_ids=ids(), use_cache=False).logits.sum().backward()
    assert inner.gradient_error() < 1e-9
    model(input_ids=ids(), use_cache=False).logits.sum().backward()  # nobody watches
