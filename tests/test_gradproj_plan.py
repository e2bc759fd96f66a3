"""The planner's counts by hand, and against the operations of a real pass."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradproj_models import FAMILIES, equal_batch, ragged_batch, small_model

from fastadv import gradproj
from fastadv.gradproj.plan import Shape, size_of
from fastadv.gradproj.streams import layout

EIGHT_BILLION = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
    "vocab_size": 151_936, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_a_plan_for_eight_billion_parameters_by_hand() -> None:
    """36 layers, 8 GPUs, 4.2M tokens, 1024 rollouts, from nothing but the configuration."""
    plan = gradproj.plan(EIGHT_BILLION, tokens=4_200_000, rollouts=1024, gpus=8)
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 12288
    head = 151_936 * 4096
    assert plan.shape.layer == layer
    assert plan.shape.parameters == 36 * layer + 2 * head == pytest.approx(8.19e9, rel=1e-3)
    attention = 2 * 4.2e6 * (4.2e6 / 1024) * 4096 * 36
    gram = 1024**2 * plan.shape.parameters * 72 / 64
    assert plan.operations == pytest.approx(4.2e6 * (8 * 36 * layer + 8 * head) + 4.5 * attention + gram)
    assert plan.step_operations == pytest.approx(4.2e6 * (8 * 36 * layer + 6 * head) + 4 * attention)
    assert 1.0 < plan.steps < 1.1
    assert plan.boundary_bytes == pytest.approx(4.2e6 / 8 * 4096 * 37 * 2)
    assert plan.gram_bytes == 8 * 1024**2
    assert plan.link_bytes == pytest.approx(7 / 8 * plan.shape.parameters * (4 * 128 + 2 * 2), rel=1e-3)
    text = plan.explain()
    for expected in ("8.19B parameters", "1,024 segments", "per GPU, of 8", "over links", "(assumed)", "Not measured."):
        assert expected in text
    turns = gradproj.plan(EIGHT_BILLION, tokens=4_200_000, rollouts=1024, turns=8, level="turn", gpus=8)
    assert (turns.segments, turns.streams, turns.backward) == (8192, 8, 4.5)
    assert 4 < turns.steps < 6
    assert "over links" not in gradproj.plan(EIGHT_BILLION, tokens=10, rollouts=1).explain()


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family: str) -> None:
    model = small_model(family, tied=family == "qwen3", num_hidden_layers=3, vocab_size=1000)
    exact = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert gradproj.plan(model, tokens=1, rollouts=1).shape.parameters == exact
    assert Shape.of(model.config.to_dict()) == Shape.of(model.config)


def test_the_committed_policys_configuration() -> None:
    folder = Path(__file__).parent.parent / "examples" / "frozen_lake" / "policy"
    shape = Shape.of(json.loads((folder / "config.json").read_text()))
    assert shape.parameters == 84_608 - 5 * 64  # norms


@pytest.mark.parametrize("level", ["rollout", "turn"])
def test_operations_are_those_that_are_counted(level: str) -> None:
    """On rollouts of one length whose turns are equal, as the planner takes them to be."""
    from bench.gradproj import Operations

    model = small_model("llama", max_position_embeddings=512, vocab_size=97)
    batch = equal_batch(4, 4, 100)
    assert batch.token_ids is not None
    tokens = batch.token_ids.ids.numel()
    plan = gradproj.plan(
        model, tokens=tokens, rollouts=4, turns=4, level=level, loss_tokens=int(batch.mask.sum()), value_bytes=8
    )
    with Operations() as counted:
        gradproj.segment_gram(model, batch, level=level, max_tokens=10**6)
    assert counted.total == pytest.approx(plan.operations, rel=0.15)


@pytest.mark.parametrize("level", ["rollout", "turn"])
def test_a_batch_is_counted_as_it_is(level: str) -> None:
    """Rows up to each segment's last token, from the streams that a pass makes of it."""
    model, batches = small_model("qwen2"), [ragged_batch(9, seed=1), ragged_batch(4, seed=2)]
    plan = gradproj.plan(model, batch=batches, level=level)
    made = layout(batches, level, 10**6, None, torch.device("cpu"))
    live = [run.rows for one in made.micro_batches for stream in one.streams for run in stream.runs]
    lengths = torch.cat([batch.token_ids.cu_seqlens.diff() for batch in batches])
    assert (plan.tokens, plan.rollouts, plan.segments) == (int(lengths.sum()), 13, made.segments)
    assert plan.backward == pytest.approx(sum(live) / plan.tokens)
    assert plan.loss_tokens == sum(len(one.labels) for one in made.micro_batches)
    assert not plan.even
    assert f"{level}s as they are in the batch" in plan.explain().replace("\n", " ")


def test_a_batch_of_even_turns_is_what_sizes_say() -> None:
    batch = equal_batch(4, 5, 40)
    batch = replace(batch, token_ids=None)
    sizes = {"tokens": 800, "rollouts": 4, "turns": 5, "loss_tokens": int(batch.mask.sum())}
    counted, said = (gradproj.plan(EIGHT_BILLION, level="turn", **given) for given in ({"batch": batch}, sizes))
    for field in dataclasses.fields(counted):
        name = field.name
        if name not in ("even", "shape", "level", "attention"):  # a row fewer: the last token is not read
            assert getattr(counted, name) == pytest.approx(getattr(said, name), rel=0.03), name
    assert "turns taken to be equally long" in said.explain().replace("\n", " ")


def test_a_plan_fits_a_terminal_and_its_units_fit_the_sizes() -> None:
    small = gradproj.plan(small_model("llama"), batch=ragged_batch(), level="turn", scratch_bytes=2**24).explain()
    large = gradproj.plan(EIGHT_BILLION, tokens=4_200_000, rollouts=1024, turns=8, level="turn", gpus=8).explain()
    for text in (small, large):
        assert max(map(len, text.split("\n"))) <= 80
    assert "a tile of gradients: 16.8 MB" in small
    assert "the Gram, float64: " in small
    assert " kB\n" in small
    assert " GB" not in small
    assert "together: 257 GB" in large
    assert "29.4 TB" in large
    assert "400 GB/s" in large
    sizes = {0: "0 B", 999: "999 B", 999.7: "1 kB", 1e6: "1 MB", 123_456_789: "123 MB", 1e18: "1e+03 PB"}
    for value, shown in sizes.items():
        assert size_of(value) == shown


def test_a_plan_is_of_a_batch_or_of_sizes() -> None:
    batch = ragged_batch()
    with pytest.raises(ValueError, match="tokens, rollouts and turns are counted in the batch; leave them out"):
        gradproj.plan(EIGHT_BILLION, batch=batch, turns=3)
    with pytest.raises(ValueError, match="tokens or rollouts is missing; pass both, or a batch"):
        gradproj.plan(EIGHT_BILLION, tokens=3)
    with pytest.raises(TypeError, match="plan: batch is a str"):
        gradproj.plan(EIGHT_BILLION, batch="rollouts")
    with pytest.raises(ValueError, match="tokens is 0; it must be at least 1"):
        gradproj.plan(EIGHT_BILLION, batch=batch.take(torch.zeros(0, dtype=torch.int64)))


def test_what_cannot_be_planned() -> None:
    for name in ("tokens", "rollouts", "turns", "gpus"):
        given: dict[str, Any] = {"tokens": 1, "rollouts": 1, name: 0}
        with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
            gradproj.plan(EIGHT_BILLION, **given)
    with pytest.raises(ValueError, match="level is 'token'"):
        gradproj.plan(EIGHT_BILLION, tokens=1, rollouts=1, level="token")
    with pytest.raises(ValueError, match="model_type is 'mamba'; supported are llama"):
        gradproj.plan({"model_type": "mamba"}, tokens=1, rollouts=1)
    with pytest.raises(ValueError, match="has no num_hidden_layers"):
        gradproj.plan({k: v for k, v in EIGHT_BILLION.items() if k != "num_hidden_layers"}, tokens=1, rollouts=1)
