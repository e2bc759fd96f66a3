"""Advantages of turns in Miles' and slime's trainers, on context-parallel ranks of any part of a sequence."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from fastadv.integrations import miles, slime
from fastadv.integrations.miles.context_parallel import Place, local_spans, local_tokens, place
from fastadv.integrations.miles.turns import ACTOR, SEAM, apply_turn_advantages, spread_over_turns
from hypothesis import given
from hypothesis import strategies as st
from miles_standins import arguments, drawn, rank_data
from torch import Tensor

TURNS = {"arm": "turn-reached", "turns": "init"}


def expanded(sample: Any) -> Tensor:
    """Advantages of a sample's turns at its tokens, [R], by a loop over tokens."""
    values, turn, tokens = sample.metadata["round_number"]["fastadv_turn_advantages"], -1, []
    for before, value in pairwise([0, *sample.loss_mask]):
        turn += value > before
        tokens.append(values[turn] if value else 0.0)
    return torch.tensor(tokens)


def sent(seed: int = 0) -> tuple[list[Any], list[float]]:
    """Samples as the reward hook leaves them, and what it returned."""
    samples = drawn(torch.Generator().manual_seed(seed), 4)
    _, advantages = miles.reward_post_process(arguments(TURNS), samples)
    return samples, advantages


@given(
    prompt=st.integers(1, 9), response=st.integers(0, 30), size=st.sampled_from([1, 2, 3, 4, 8]), pad=st.integers(0, 9)
)
def test_ranks_hold_every_response_token_once(prompt: int, response: int, size: int, pad: int) -> None:
    for width in (None, prompt + response + pad):
        held = []
        for rank in range(size):
            spans = local_spans(prompt + response, response, Place(rank, size), width=width)
            positions = local_tokens(torch.arange(response), spans).tolist()
            assert positions == [i for begin, end in spans for i in range(begin, end)]
            held += positions
        assert sorted(held) == list(range(response))


def test_the_zigzag_of_a_known_sequence() -> None:
    # 12 tokens, 5 of them the prompt's, four chunks of 3: logits 4 .. 10 are the response's.
    assert local_spans(12, 7, Place(0, 2)) == ((0, 0), (5, 7))
    assert local_spans(12, 7, Place(1, 2)) == ((0, 2), (2, 5))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_turns_reach_the_tokens_of_every_rank(size: int) -> None:
    samples, advantages = sent()
    some_are_empty = False
    for rank in range(size):
        spans = [local_spans(len(s.tokens), s.response_length, Place(rank, size)) for s in samples]
        data = rank_data(samples, advantages, spans)
        for name in ("advantages", "kl"):
            some_are_empty |= any(t.numel() == 0 for t in data[name])
        slime_data = copy.deepcopy(data)
        apply_turn_advantages(data, Place(rank, size))
        assert "round_number" not in data
        for sample, own, found, returns in zip(samples, spans, data["advantages"], data["returns"], strict=True):
            torch.testing.assert_close(found, local_tokens(expanded(sample), own), rtol=0, atol=1e-6)
            assert torch.equal(found, returns)
        for name in ("advantages", "returns"):
            del slime_data[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slime, "place", lambda rank=rank: Place(rank, size))
            slime.advantage(arguments(TURNS), slime_data)
        for a, b in zip(data["advantages"], slime_data["advantages"], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert "round_number" not in slime_data
    assert some_are_empty == (size == 4)


def test_groups_may_be_split_over_data_parallel_ranks() -> None:
    """Groups are whole where advantages are computed, in the rollout process; a rank has any samples."""
    samples, advantages = sent(3)
    expected = [expanded(s) for s in samples]
    for rank in range(3):
        rows = list(range(rank, len(samples), 3))
        own = [samples[row] for row in rows]
        assert len({s.group_index for s in own}) > 1
        data = rank_data(own, [advantages[row] for row in rows], [((0, s.response_length), (0, 0)) for s in own])
        apply_turn_advantages(data, Place(0, 1))
        for row, found in zip(rows, data["advantages"], strict=True):
            torch.testing.assert_close(found, expected[row], rtol=0, atol=1e-6)


def test_what_distillation_added_stays() -> None:
    samples, advantages = sent()
    spans = [((0, s.response_length), (0, 0)) for s in samples]
    data = rank_data(samples, advantages, spans)
    added = [torch.linspace(-1, 1, s.response_length) for s in samples]
    data["advantages"] = [a + more for a, more in zip(data["advantages"], added, strict=True)]
    apply_turn_advantages(data, Place(0, 1))
    for sample, found, more in zip(samples, data["advantages"], added, strict=True):
        torch.testing.assert_close(found, expanded(sample) + more, rtol=0, atol=1e-6)


def test_removed_samples_and_earlier_pipeline_stages() -> None:
    samples, advantages = sent()
    spans = [((0, s.response_length), (0, 0)) for s in samples]
    data = rank_data(samples, advantages, spans)
    data["loss_masks"][0] = torch.zeros_like(data["loss_masks"][0])  # by a filter, after the hook
    apply_turn_advantages(data, Place(0, 1))
    assert not data["advantages"][0].any()
    earlier = {"round_number": [1], "advantages": None}
    apply_turn_advantages(earlier, Place(0, 1))
    assert earlier == {"advantages": None}


def test_masks_that_were_edited_after_the_hook_are_refused() -> None:
    samples, advantages = sent()
    spans = [((0, s.response_length), (0, 0)) for s in samples]
    longest = max(range(len(samples)), key=lambda row: samples[row].response_length)
    data = rank_data(samples, advantages, spans)
    data["loss_masks"][longest][:3] = 0
    with pytest.raises(ValueError, match=rf"sample {longest}: its loss_mask has \d turns here and had \d"):
        apply_turn_advantages(data, Place(0, 1))
    for broken, message in (
        (None, "no advantages of turns came"),
        ([1], "no advantages of turns came"),
        ([3] * len(samples), "sample 0: round_number is 3"),
        ([{}] * len(samples), r"sample 0: round_number is \{\}"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_turn_advantages(rank_data(samples, advantages, spans, round_number=broken), Place(0, 1))


def test_nothing_to_spread() -> None:
    assert spread_over_turns([], []) == []
    assert [t.shape for t in spread_over_turns([[]], [torch.zeros(0, dtype=torch.int)])] == [(0,)]
    found = spread_over_turns([[], [2.0]], [torch.zeros(0, dtype=torch.int), torch.tensor([0, 1])])
    assert [t.tolist() for t in found] == [[], [0, 2]]


# ---- hooks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of Miles as its trainer has them loaded, rank 0 of 1."""
    for name in (ACTOR, "miles.backends.training_utils.parallel"):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    state = Namespace(cp=Namespace(rank=0, size=1))
    sys.modules["miles.backends.training_utils.parallel"].get_parallel_state = lambda: state  # type: ignore[attr-defined]
    actor: Any = sys.modules[ACTOR]
    actor.calls = []

    def compute(args: Any, rollout_data: dict[str, Any]) -> None:
        actor.calls.append(args)

    setattr(actor, SEAM, compute)
    return actor


def test_miles_trainer_computes_advantages_of_turns_after_the_init_hook(trainer: Any) -> None:
    samples, advantages = sent()
    data = rank_data(samples, advantages, [((0, s.response_length), (0, 0)) for s in samples])
    args = arguments(TURNS)
    miles.megatron_init(args)
    once = getattr(trainer, SEAM)
    miles.megatron_init(args)
    assert getattr(trainer, SEAM) is once
    once(args, data)
    assert trainer.calls == [args]
    torch.testing.assert_close(data["advantages"][0], expanded(samples[0]), rtol=0, atol=1e-6)


def test_the_init_hook_says_when_it_cannot_help(trainer: Any) -> None:
    with pytest.raises(ValueError, match="it is none"):
        miles.megatron_init(arguments({"arm": "mask"}))
    delattr(trainer, SEAM)
    with pytest.raises(AttributeError, match=r"computes advantages elsewhere; fastadv\.turns: flags"):
        miles.megatron_init(arguments(TURNS))


def test_slimes_hooks_without_turns() -> None:
    data: dict[str, Any] = {"kl": [torch.zeros(8), torch.zeros(0)], "rewards": [0.5, -0.5], "round_number": [3, 4]}
    slime.advantage(arguments({"arm": "mask"}), data)
    assert [a.tolist() for a in data["advantages"]] == [[0.5] * 8, []]
    assert data["returns"][0] is not data["advantages"][0]
    assert "round_number" not in data
    unchanged: dict[str, Any] = {"advantages": [torch.ones(2)], "round_number": [3]}
    slime.rollout_data_postprocess(arguments({"arm": "mask"}), 3, unchanged)
    assert unchanged["round_number"] == [3]


def test_the_postprocess_hook_in_both_frameworks(trainer: Any) -> None:
    samples, advantages = sent()
    data = rank_data(samples, advantages, [((0, s.response_length), (0, 0)) for s in samples])
    slime.rollout_data_postprocess(arguments(TURNS), 0, data)
    torch.testing.assert_close(data["advantages"][0], expanded(samples[0]), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="passes no data in Miles"):
        slime.rollout_data_postprocess(arguments(TURNS))


def test_a_rank_is_asked_of_the_trainer_that_runs(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place() == (0, 1)
    monkeypatch.delitem(sys.modules, "miles")
    core = ModuleType("megatron.core")
    core.mpu = Namespace(  # type: ignore[attr-defined]
        get_context_parallel_rank=lambda: 1, get_context_parallel_world_size=lambda: 4
    )
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    assert place() == (1, 4)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(RuntimeError, match="neither Miles nor Megatron"):
        place()
