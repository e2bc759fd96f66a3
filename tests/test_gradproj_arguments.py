"""What the gradient projections are given by mistake: the message names argument and value, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradproj_models import ragged_batch, small_model
from torch import nn

import fastadv as fa
from fastadv import gradproj
from fastadv.gradproj import GramAccumulator, SegmentGram, SketchCollector

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "vocab_size": 32,
    "num_attention_heads": 2,
}  # fmt: skip


class Untouched(nn.Module):
    """A model that nothing may run, or look into."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the model was asked for {name}")


@pytest.fixture(scope="module")
def batch() -> fa.Batch:
    return ragged_batch()


def gram_of(batch: fa.Batch) -> SegmentGram:
    segments = batch.segments.count
    rows = torch.repeat_interleave(torch.arange(batch.num_rollouts), batch.segments.turns())
    turns = torch.arange(segments) - batch.segments.offsets[rows]
    return SegmentGram(torch.eye(segments, dtype=torch.float64), rows, turns, 1, 1).with_rollouts(batch)


def linear() -> nn.Linear:
    return nn.Linear(3, 2)


def weight_gram(**options: Any) -> None:
    x = torch.ones(2, 3)
    gradproj.segment_weight_gram(x, x, torch.tensor([0, 2]), torch.zeros(1, 1, dtype=torch.float64), **options)


# By function: a call with one argument replaced, and what the argument is: a count, or any number above 0.
FUNCTIONS: dict[str, tuple[Callable[[fa.Batch, dict[str, Any]], Any], dict[str, str]]] = {
    "segment_gram": (
        lambda batch, given: gradproj.segment_gram(Untouched(), batch, **given),
        {"temperature": "number", "max_tokens": "count"},
    ),
    "segment_weight_gram": (lambda batch, given: weight_gram(**given), {"scratch_bytes": "count"}),
    "token_dots": (
        lambda batch, given: gradproj.token_dots(Untouched(), batch, {}, **given),
        {"temperature": "number", "max_tokens": "count"},
    ),
    "SketchCollector": (
        lambda batch, given: SketchCollector(linear(), **given),
        {"size": "count", "copies": "count", "scratch": "count", "quantum": "number"},
    ),
    "plan": (
        lambda batch, given: gradproj.plan(CONFIG, **{"tokens": 9, "rollouts": 3, **given}),
        {
            "tokens": "count", "rollouts": "count", "turns": "count", "gpus": "count", "value_bytes": "count",
            "scratch_bytes": "count", "rate": "number", "link_rate": "number",
        },
    ),
    "project": (lambda batch, given: gradproj.project(gram_of(batch), [fa.Arm("a")], **given), {"draws": "count"}),
    "megatron_filter": (
        lambda batch, given: gradproj.megatron_filter(**given), {"tensor_parallel_rank": "count"},
    ),
}  # fmt: skip
WRONG: dict[str, list[Any]] = {
    "count": [-1, 1.5, True, "x", float("nan")],
    "number": [0.0, -1.0, True, "x", float("nan"), float("inf"), [1.0]],
}
CASES = [(name, argument, value) for name, (_, kinds) in FUNCTIONS.items() for argument, kind in kinds.items()
         for value in WRONG[kind]]  # fmt: skip


@pytest.mark.parametrize(("name", "argument", "value"), CASES)
def test_numbers_that_cannot_be(name: str, argument: str, value: Any, batch: fa.Batch) -> None:
    with pytest.raises(TypeError if value is True or isinstance(value, str) else (TypeError, ValueError)) as error:
        FUNCTIONS[name][0](batch, {argument: value})
    assert str(error.value).startswith(f"{name}: {argument} is ")


def test_scratch_of_a_pass(batch: fa.Batch) -> None:
    """Whose default is the device's, so that the model is asked for it."""
    model = small_model("llama")
    for value in (1.5, True, "x"):
        with pytest.raises(TypeError, match=r"segment_gram: scratch_bytes is .*; pass an integer"):
            gradproj.segment_gram(model, batch, scratch_bytes=value)


def test_things_that_are_no_model_and_no_batch(batch: fa.Batch) -> None:
    for what in (None, "path/of/a/model", {}):
        with pytest.raises(TypeError, match=f"segment_gram: model is a {type(what).__name__}; pass a torch"):
            gradproj.segment_gram(what, batch)
        with pytest.raises(TypeError, match=f"SketchCollector: model is a {type(what).__name__}"):
            SketchCollector(what)
        with pytest.raises(TypeError, match=f"batch is a {type(what).__name__}; pass a Batch"):
            gradproj.segment_gram(linear(), what)
    with pytest.raises(TypeError, match=r"batch is a list; pass a Batch \(see Batch\.of\), or a list of them"):
        gradproj.segment_gram(linear(), [batch, 3])
    with pytest.raises(TypeError, match="with_rollouts: batch is a Tensor"):
        gram_of(batch).with_rollouts(batch.mask)
    with pytest.raises(TypeError, match=r"arms must be a list of fastadv\.Arm"):
        gradproj.project(gram_of(batch), fa.Arm("a"))
    with pytest.raises(TypeError, match="seed is 'x'; pass an integer"):
        gradproj.project(gram_of(batch), [fa.Arm("a")], seed="x")
    with pytest.raises(TypeError, match="segment_dots: dots is a list; pass a tensor"):
        gradproj.segment_dots([1.0], batch)


@pytest.mark.parametrize(
    ("place", "error", "message"),
    [
        ((-32, 0), ValueError, r"the row of shards\['weight'\] is -32; it must be at least 0"),
        ((0, -1), ValueError, r"the column of shards\['weight'\] is -1; it must be at least 0"),
        ((0.5, 0), TypeError, r"the row of shards\['weight'\] is 0.5, a float; pass an integer"),
        ((True, 0), TypeError, r"the row of shards\['weight'\] is True, a bool"),
        (32, TypeError, r"shards\['weight'\] is 32; pass \(row, column\)"),
        ((0, 0, 0), TypeError, r"shards\['weight'\] is \(0, 0, 0\); pass \(row, column\)"),
    ],
)
def test_shards_that_begin_nowhere(place: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SketchCollector(linear(), shards={"weight": place})


def test_a_configuration_whose_sizes_are_none() -> None:
    for change, message in (
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be at least 1"),
        ({"hidden_size": "8"}, "hidden_size is '8', a str; pass an integer"),
        ({"vocab_size": -5}, "vocab_size is -5"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            gradproj.plan({**CONFIG, **change}, tokens=9, rollouts=3)
    for tokens in (10, 2.0, -1):
        with pytest.raises((TypeError, ValueError), match=f"loss_tokens is {tokens}"):
            gradproj.plan(CONFIG, tokens=9, rollouts=3, loss_tokens=tokens)


def test_what_would_fail_late_or_mean_nothing(batch: fa.Batch, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"progress is a int; pass a function of \(done, total\)"):
        gradproj.segment_gram(Untouched(), batch, progress=3)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        gradproj.segment_gram(small_model("llama").requires_grad_(False), batch)
    with pytest.raises(ValueError, match="no parameter to sketch: none requires a gradient"):
        SketchCollector(linear().requires_grad_(False))
    for build in (lambda: SketchCollector(linear(), device="gpu"), lambda: GramAccumulator(2, device="gpu")):
        with pytest.raises(RuntimeError, match="device"):
            build()
    with pytest.raises(TypeError, match=r"register_interceptor: kind is 3; pass a class of modules"):
        gradproj.register_interceptor(3)
    with pytest.raises(TypeError, match="register_interceptor: kind is <class 'int'>"):
        gradproj.register_interceptor(int)
    model = small_model("llama")
    for direction in ({}, None):
        with pytest.raises(ValueError, match=r"the direction is .*; pass a mapping from names"):
            gradproj.token_dots(model, batch, direction)
    with pytest.raises(TypeError, match=r"the direction along lm_head\.weight is a int; pass a tensor"):
        gradproj.token_dots(model, batch, {"lm_head.weight": 3})
    with pytest.raises(TypeError, match="token_dots: batch is a str"):
        gradproj.token_dots(model, "rollouts", {})
    with pytest.raises(TypeError, match="project: gram is a Tensor; pass a SegmentGram"):
        gradproj.project(torch.ones(2, 2), [fa.Arm("a")])
    with pytest.raises(TypeError, match="parameter is 3; pass the parameter's name"):
        gradproj.count_sketch(torch.ones(3), 32, parameter=3)
    gram = gram_of(batch)
    for change in ({"notes": "abc"}, {"notes": (1,)}, {"dtype": torch.float32}, {"checkpoint": None}):
        with pytest.raises(TypeError, match=f"SegmentGram: {next(iter(change))} is .*; pass a text"):
            replace(gram, **change)
    with pytest.raises(FileNotFoundError, match=r"absent/x cannot be written: .*absent is no folder"):
        gram.save(tmp_path / "absent" / "x")
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        gram.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_sketches_that_cannot_be_of_rollouts() -> None:
    values = torch.zeros(3, 2, 64, dtype=torch.int64)
    with pytest.raises(ValueError, match="rollouts holds a number twice"):
        gradproj.RolloutSketches(values, torch.tensor([0, 0, 1]), 0.5, 7, 10, 12)
    with pytest.raises(ValueError, match="covered is 13; it must be from 0 to 12"):
        gradproj.RolloutSketches(values, torch.arange(3), 0.5, 7, 13, 12)


# ---- arms of an accumulator ------------------------------------------------------------------------------------------


def with_gradients(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def test_arms_are_numbers_or_lists_of_names() -> None:
    for options, message in (
        ({"arms": "ab"}, r"arms is the text 'ab'; pass a list of names, such as \['ab'\]"),
        ({"arms": ["a"], "directions": "cap"}, "directions is the text 'cap'"),
        ({"arms": ["a", 1]}, "arms hold 1; names are texts"),
        ({"arms": True}, "arms is True, a bool"),
    ):
        with pytest.raises(TypeError, match=message):
            GramAccumulator(**options)
    with pytest.raises(ValueError, match="arms is -1; it must be at least 1"):
        GramAccumulator(-1)


def test_an_arm_is_captured_by_its_number_or_name() -> None:
    model = with_gradients(linear())
    accumulator = GramAccumulator(["a", "b"])
    for arm in (5, 2, -1):
        with pytest.raises(ValueError, match=f"capture: arm is {arm}; it must be from 0 to 1"):
            accumulator.capture(arm, model)
    for arm in (True, 0.0, None, ("a",)):
        with pytest.raises(TypeError, match=r"capture: arm is .*; pass an integer"):
            accumulator.capture(arm, model)
    with pytest.raises(TypeError, match=r"capture: model is a dict; pass a torch\.nn\.Module"):
        accumulator.capture("a", dict(model.named_parameters()))
    accumulator.capture(0, model)
    with pytest.raises(ValueError, match="'a' was captured before"):
        accumulator.capture(0, model)
    accumulator.capture("b", model)
    assert accumulator.gram().tolist() == [[8.0, 8.0], [8.0, 8.0]]


def test_parameters_of_another_model_are_no_zeros() -> None:
    model = with_gradients(nn.Sequential(linear()))
    for other, message in (
        (linear(), r"0\.weight is missing in this model, compared with that of the arms before"),
        (nn.Sequential(linear(), linear()), r"1\.weight is new in this model"),
        (nn.Sequential(nn.Linear(3, 4)), r"0\.weight is of another shape in this model"),
    ):
        accumulator = GramAccumulator(["a", "b"])
        accumulator.capture("a", model)
        with pytest.raises(ValueError, match=message):
            accumulator.capture("b", with_gradients(other))
        with pytest.raises(ValueError, match=r"add: head is no parameter of the model that was captured; 0\.weight"):
            accumulator.add("head", [torch.ones(2)] * 2)
        accumulator.capture("b", with_gradients(nn.Sequential(linear())))  # a copy
        assert accumulator.gram().tolist() == [[8.0, 8.0], [8.0, 8.0]]
    with pytest.raises(TypeError, match="gradients of w hold a float; pass tensors, or None"):
        GramAccumulator(2).add("w", [torch.ones(2), 1.0])
