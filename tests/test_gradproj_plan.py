"""The planner's counts by hand, and against the operations of a real pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gradproj_models import FAMILIES, equal_batch, small_model

from fastadv import gradproj
from fastadv.gradproj.plan import Shape

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
