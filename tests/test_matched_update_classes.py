"""The matched-update control on optimizers of other people's making, and on what is no gradient."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_matched_update import Noisy, bits, parameters, some_gradients, step, two_groups
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fastadv as fa


class Descent(torch.optim.Optimizer):
    """Plain descent, times what `factor` makes of the optimizer's own memory."""

    def __init__(self, held: list[nn.Parameter], **options: Any) -> None:
        super().__init__(held, {"lr": 0.1, **options})

    def factor(self, parameter: Tensor) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * self.factor(p) * (p.grad + group.get("weight_decay", 0.0) * p))


class OneCount(Descent):
    """All parameters share one step count, and two attributes a list and a table."""

    def __init__(self, held: list[nn.Parameter]) -> None:
        super().__init__(held)
        count = torch.tensor(0.0)
        for p in held:
            self.state[p]["count"] = count
        self.seen, self.factors = [], {}
        self.same = self.seen, self.factors

    def factor(self, parameter: Tensor) -> Any:
        self.seen.append(parameter)
        self.factors[len(self.seen)] = self.state[parameter]["count"].add_(1)
        return sum(len(each) for each in self.same)


class OfNoParameter(Descent):
    """State under a name, in a table with a default, and a float32 attribute."""

    def __init__(self, held: list[nn.Parameter]) -> None:
        super().__init__(held)
        self.state["all"]["count"] = torch.tensor(0.0)
        self.scale = torch.full((3,), 0.5)

    def factor(self, parameter: Tensor) -> Any:
        self.state["again"].setdefault("count", torch.tensor(3.0))
        return self.state["all"]["count"].add_(self.state["again"]["count"]) * torch.dot(self.scale, parameter[0, :3])


class Random(Descent):
    """Draws from everybody's generators and from its own."""

    def __init__(self, held: list[nn.Parameter]) -> None:
        super().__init__(held)
        self.generator = torch.Generator().manual_seed(1)

    def factor(self, parameter: Tensor) -> Any:
        return random.random() + np.random.rand() + torch.rand(()) + torch.rand((), generator=self.generator)


class Slow(torch.optim.Optimizer):
    """Follows an optimizer inside of it with slow weights, as Lookahead does."""

    def __init__(self, held: list[nn.Parameter]) -> None:
        self.inner = torch.optim.AdamW(held, lr=0.1, weight_decay=0.5)
        super().__init__(self.inner.param_groups, {})
        self.slow = {p: p.detach().clone() for p in held}

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        self.inner.step()
        for p, slow in self.slow.items():
            slow.add_(0.5 * (p - slow))
            p.copy_(slow)


class Delegating(torch.optim.Optimizer):
    """Has groups and state of an optimizer inside of it, as Accelerate's."""

    def __init__(self, held: list[nn.Parameter]) -> None:
        self.inner = torch.optim.AdamW(held, lr=0.1, weight_decay=0.5)
        self.defaults = self.inner.defaults

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure: object = None) -> None:
        self.inner.step()


class Derived(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        super().step(closure)


@pytest.mark.parametrize("make", [OneCount, OfNoParameter, Random, Slow, Delegating, Derived])
def test_a_dry_run_is_the_step_and_touches_nothing(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    torch.optim.AdamW(parameters())  # whose step runs everybody's hooks from now on, called by super() too
    second = some_gradients(1, torch.float32)

    def started() -> torch.optim.Optimizer:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        optimizer = make(parameters(torch.float32))
        step(optimizer, some_gradients(0, torch.float32))
        return optimizer

    optimizer = started()
    generator = getattr(optimizer, "generator", torch.default_generator)

    def state() -> Any:
        of_numpy = np.random.get_state(legacy=False)["state"]["key"].tolist()  # type: ignore[call-overload, index]
        of_torch = torch.get_rng_state().tolist(), generator.get_state().tolist()
        inner = vars(getattr(optimizer, "inner", optimizer))
        return bits([vars(optimizer), inner, random.getstate(), of_numpy, of_torch])

    calls: list[int] = []
    registers = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    hooks = [register(lambda *_: calls.append(1)) for register in registers]
    before = state()
    try:
        found = fa.update_norms(optimizer, {"a": second, "again": second})
    finally:
        for hook in hooks:
            hook.remove()
    assert state() == before
    assert calls == []
    assert found["a"] == found["again"]
    assert float(step(optimizer, second).norm()) == pytest.approx(found["a"].update, rel=1e-5)
    undecayed = started()
    for group in undecayed.param_groups:
        group |= {"weight_decay": 0.0} if "weight_decay" in group else {}
    assert float(step(undecayed, second).norm()) == pytest.approx(found["a"].gradient_part, rel=1e-5)


class Failing(Noisy):
    """Stops in the middle of a step."""

    error: Exception = AssertionError("half way")

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        super().step()
        raise self.error


def test_a_step_that_fails_half_way_is_named_and_leaves_everything_as_it_was() -> None:
    optimizer = Failing(two_groups(parameters()))
    held, gradients = optimizer.param_groups[0]["params"], some_gradients(0)
    before = bits([vars(optimizer), held, gradients, torch.get_rng_state().tolist()])
    with pytest.raises(ValueError, match=r"dry run of Failing in float64, .*stopped with AssertionError: half way"):
        fa.update_norms(optimizer, {"a": gradients})
    assert bits([vars(optimizer), held, gradients, torch.get_rng_state().tolist()]) == before
    Failing.error = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):  # which trainers catch by its type
        fa.update_norms(optimizer, {"a": gradients})
    weights = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(
        ValueError, match=r"dry run of Adam .*of parameter 0 \('a'\).*does not support sparse gradients"
    ):
        fa.update_norms(torch.optim.Adam([weights]), {"a": [torch.eye(2).to_sparse()]})


def test_a_learning_rate_tensor_may_ask_for_a_gradient() -> None:
    rate = torch.tensor(0.1, requires_grad=True)
    optimizer = torch.optim.SGD(parameters(), lr=rate, foreach=False)
    matched = fa.matched_update(optimizer, some_gradients(0), [2 * g for g in some_gradients(0)])
    with matched.scaled_learning_rates(optimizer):
        assert rate.item() == pytest.approx(0.05)
    assert rate.item() == pytest.approx(0.1)


@pytest.mark.parametrize("rate", [None, "0.1", torch.tensor(1)])
def test_optimizers_without_a_learning_rate_have_none_to_scale(rate: Any) -> None:
    good = some_gradients(0)
    optimizer = Descent(parameters())
    matched = fa.matched_update(optimizer, good, good)
    optimizer.param_groups[0]["lr"] = rate
    for call in (
        lambda: fa.matched_update(optimizer, good, good),
        lambda: matched.scaled_learning_rates(optimizer).__enter__(),
    ):
        with pytest.raises(ValueError, match=r"param_groups\[0\]\['lr'\] of Descent is .*a floating-point tensor"):
            call()


def test_steps_too_small_for_float64_are_not_matched() -> None:
    weights = nn.Parameter(torch.full((3,), 100.0))
    with pytest.raises(ValueError, match="or too small beside the weights for float64"):
        fa.matched_update(torch.optim.SGD([weights], lr=1e-12), [torch.ones(3)], [torch.tensor([1.0, 2.0, 0.3])])


def test_what_is_no_gradient() -> None:
    optimizer, good = torch.optim.Adam(parameters()), some_gradients(0)
    for bad, kind in ((good, "list"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"gradients is a {kind}; pass a dict of a list per name"):
            fa.update_norms(optimizer, bad)  # type: ignore[arg-type]
    for bad, kind in ((dict(enumerate(good)), "dict"), (iter(good), "list_iterator"), (good[0], "Tensor")):
        with pytest.raises(TypeError, match=f"'a' is a {kind}; pass a list"):
            fa.update_norms(optimizer, {"a": bad})  # type: ignore[dict-item]
    for bad, kind in ((good[0].numpy(), "ndarray"), (1.0, "float")):
        with pytest.raises(TypeError, match=rf"the gradient of parameter 0 \('a'\) is a {kind}; pass a tensor"):
            fa.update_norms(optimizer, {"a": [bad, *good[1:]]})  # type: ignore[list-item]
    with pytest.raises(ValueError, match="is on meta, the parameter on cpu"):
        fa.update_norms(optimizer, {"a": [good[0].to("meta"), *good[1:]]})
    complex_weights = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"Parameter of torch\.complex64; pass real numbers"):
        fa.update_norms(torch.optim.SGD([complex_weights], lr=1.0), {"a": [torch.ones(3)]})


def test_parameters_that_are_given_twice_or_not_at_all() -> None:
    weights = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    optimizer.param_groups[0]["params"].append(weights)  # torch itself only warns
    with pytest.raises(ValueError, match="holds a parameter twice"):
        fa.update_norms(optimizer, {"a": [torch.ones(3)] * 2})
    assert fa.update_norms(torch.optim.SGD([{"params": []}], lr=1.0), {"a": []})["a"] == (0.0, 0.0, 0.0)


def test_options_and_states_that_cannot_be_copied_are_named() -> None:
    for what in ("option 'lock' of Descent", "the state of Descent"):
        optimizer = Descent(parameters())
        group = optimizer.param_groups[0]
        place = group if what.startswith("option") else optimizer.state[group["params"][0]]
        place["lock"] = threading.Lock()
        with pytest.raises(TypeError, match=f"{what} cannot be copied for a dry run"):
            fa.update_norms(optimizer, {"a": some_gradients(0)})
