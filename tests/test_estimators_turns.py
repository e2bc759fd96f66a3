"""Estimators whose rows are turns: verl-agent's statistics over step rows, GiGPO, and turn-reached baselines."""

from __future__ import annotations

from typing import Any

import estimator_oracle as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_cases import BACKENDS
from test_estimators import NAN, close

import fastadv as fa

ON = pytest.mark.parametrize("backend", BACKENDS)


def turns_of(counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed turn ids, one token a turn, and the ends of the rollouts."""
    ids = [turn for count in counts for turn in range(count)]
    return torch.tensor(ids, dtype=torch.int32), torch.tensor([0, *counts]).cumsum(0)


@st.composite
def batches(draw: Any) -> dict[str, Any]:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    rows = len(counts)
    step = st.sampled_from([0.0, 1.0, -0.1, 0.5])
    return {
        "counts": counts,
        "labels": draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)),
        "rewards": draw(st.lists(st.sampled_from([0.0, 1.0, 10.0, 1e6, 0.3]), min_size=rows, max_size=rows)),
        "steps": [draw(st.lists(step, min_size=n, max_size=n)) for n in counts],
        "anchors": [draw(st.lists(st.sampled_from("abc"), min_size=n, max_size=n)) for n in counts],
    }


@pytest.mark.row(50)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@given(batch=batches())
def test_grpo_over_step_rows(backend: str, batch: dict[str, Any]) -> None:
    turn_ids, cu_seqlens = turns_of(batch["counts"])
    rewards = torch.tensor(batch["rewards"], dtype=torch.float64)
    actual = fa.estimate(
        "grpo/verl-agent", rewards, batch["labels"], turn_ids=turn_ids, cu_seqlens=cu_seqlens, backend=backend
    )
    expected = oracle.step_rows(batch["rewards"], batch["labels"], batch["counts"], scaled=True, cross_steps=True)
    close(
        actual.advantages, expected, 2e-6
    )  # of a lone row the library gives the reward, verl-agent divides by 1 + eps
    assert actual.returns is actual.advantages


@pytest.mark.row(50)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("cross_steps", [False, True])
@given(batch=batches(), gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]), omega=st.sampled_from([0.0, 0.5, 1.0]))
def test_gigpo(scaled: bool, cross_steps: bool, batch: dict[str, Any], gamma: float, omega: float) -> None:
    turn_ids, cu_seqlens = turns_of(batch["counts"])
    given = {
        "turn_ids": fa.segments(turn_ids, cu_seqlens),
        "anchor_ids": [a for states in batch["anchors"] for a in states],
        "step_rewards": torch.tensor([r for steps in batch["steps"] for r in steps], dtype=torch.float64),
        "gamma": gamma,
        "omega": omega,
        "mode": "mean_std_norm" if scaled else "mean_norm",
    }
    name = "gigpo/verl-agent" if cross_steps else "gigpo/verl-agent-trajectory"
    actual = fa.estimate(name, torch.tensor(batch["rewards"], dtype=torch.float64), batch["labels"], **given)
    assert isinstance(actual.advantages, fa.SegmentTable)
    expected = oracle.gigpo(
        batch["rewards"], batch["labels"], batch["steps"], batch["anchors"],
        gamma=gamma, omega=omega, scaled=scaled, cross_steps=cross_steps,
    )  # fmt: skip
    close(actual.advantages.values, expected, 2e-6)


@ON
def test_the_step_mean_is_opos_baseline(backend: str) -> None:
    """Mean over step rows and OPO's length-weighted mean are one number; it is not the mean over rollouts."""
    rewards, labels = torch.tensor([1.0, 0.0, 0.0]), [0, 0, 0]
    turn_ids, cu_seqlens = turns_of([1, 2, 5])
    index = fa.segments(turn_ids, cu_seqlens)
    given = {"turn_ids": index, "anchor_ids": list(range(8)), "step_rewards": torch.zeros(8), "backend": backend}
    table = fa.estimate("gigpo/verl-agent", rewards, labels, **given).advantages
    opo = fa.estimate("opo/verl", rewards, labels, lengths=index.turns(), backend=backend).advantages
    close(opo, [7 / 8, -1 / 8, -1 / 8], 1e-6)
    close(table.values, torch.repeat_interleave(opo, index.turns()), 1e-6)
    one_each = fa.estimate("gigpo/verl-agent-trajectory", rewards, labels, **given).advantages
    close(one_each.values, [2 / 3, *[-1 / 3] * 7], 1e-6)


@pytest.mark.row(15)
def test_two_outcomes_need_the_mean_over_rollouts() -> None:
    """Rollouts that all solve or hit the cap: masked, they keep 1 - J of the reference; over step rows they do not."""
    rewards, labels = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), [0] * 4
    turn_ids, cu_seqlens = turns_of([1, 1, 3, 3])
    solved = rewards > 0
    masked = fa.estimate("dr_grpo/verl", rewards, labels, include=solved).advantages
    close(masked, (1 - rewards.mean()) * rewards)
    steps = fa.estimate(
        "gigpo/verl-agent", rewards, labels, turn_ids=turn_ids, cu_seqlens=cu_seqlens,
        anchor_ids=list(range(8)), step_rewards=torch.zeros(8),
    ).advantages  # fmt: skip
    close(steps.values[:2], [0.75, 0.75])  # 1 - 2/8, not 1 - J
    survivors = fa.estimate("survivors/fastadv", rewards, labels, include=solved).advantages
    assert not survivors.any()


def test_an_observation_seen_once_adds_nothing() -> None:
    turn_ids, cu_seqlens = turns_of([2, 2])
    given = {"turn_ids": turn_ids, "cu_seqlens": cu_seqlens, "step_rewards": torch.tensor([1.0, 5.0, 0.0, 2.0])}
    table = fa.estimate(
        "gigpo/verl-agent", torch.ones(2), [0, 0], anchor_ids=["start", "left", "start", "right"], **given
    ).advantages
    close(table.values, [2.0, 0.0, -2.0, 0.0], 1e-6)  # returns 6 and 2 from the start
    apart = fa.estimate(
        "gigpo/verl-agent", torch.ones(2), [0, 1], anchor_ids=["start", "left", "start", "right"], **given
    ).advantages
    assert not apart.values.any()  # the same observation of another prompt is another state


def test_anchor_groups_are_built_once() -> None:
    turn_ids, cu_seqlens = turns_of([2, 2])
    index = fa.segments(turn_ids, cu_seqlens)
    anchors = fa.estimators.anchor_groups(["a", "b", "a", "a"], [0, 1], index)
    assert anchors.index.tolist() == [0, 1, 2, 2]
    given = {"turn_ids": index, "step_rewards": torch.arange(4.0)}
    rewards = torch.tensor([1.0, 0.0])
    by_labels = fa.estimate("gigpo/verl-agent", rewards, [0, 1], anchor_ids=["a", "b", "a", "a"], **given)
    by_index = fa.estimate("gigpo/verl-agent", rewards, [0, 1], anchor_ids=anchors, **given)
    assert torch.equal(by_labels.advantages.values, by_index.advantages.values)
    across = fa.group_index(["a", "b", "a", "a"])
    with pytest.raises(ValueError, match="turns of two prompts into one group; build it with anchor_groups"):
        fa.estimate("gigpo/verl-agent", rewards, [0, 1], anchor_ids=across, **given)


def test_similar_anchors() -> None:
    texts = ["you are in room 1", "you are in room 1.", "a kitchen", "you are in room 1", "a kitchen"]
    assert fa.estimators.similar_anchors(texts, [0, 0, 0, 1, 0]) == [0, 0, 1, 2, 1]
    assert fa.estimators.similar_anchors(texts, [0] * 5, threshold=1.0) == [0, 1, 2, 0, 2]
    assert fa.estimators.similar_anchors([], []) == []
    with pytest.raises(ValueError, match="5 texts, but 1 group_ids"):
        fa.estimators.similar_anchors(texts, [0])
    with pytest.raises(ValueError, match="threshold is 0; it must be in"):
        fa.estimators.similar_anchors(texts, [0] * 5, threshold=0)


@ON
@pytest.mark.row(7, 22)
def test_turn_reached(backend: str) -> None:
    rewards, labels = torch.tensor([1.0, 0.0, 0.5]), [0, 0, 0]
    turn_ids, cu_seqlens = turns_of([1, 2, 3])
    table = fa.estimate(
        "turn_reached/fastadv", rewards, labels, turn_ids=turn_ids, cu_seqlens=cu_seqlens, kappa=0.0, backend=backend
    ).advantages
    close(table.values, [0.75, -0.75, -0.5, 0.0, 0.5, 0.0], 1e-6)
    include = torch.tensor([True, False, True])
    kept = fa.estimate(
        "turn_reached/fastadv", rewards, labels, turn_ids=turn_ids, cu_seqlens=cu_seqlens, include=include,
        population="survivors", backend=backend,
    ).advantages  # fmt: skip
    close(kept.values[:1], [0.5], 1e-6)
    close(kept.values[1:3], [0.0, 0.0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step_rewards": torch.zeros(3)}, r"step_rewards has shape \[3\]; expected \[4\]"),
        ({"step_rewards": torch.tensor([0.0, NAN, 0.0, 0.0])}, r"rewards\[0\] is nan"),
        ({"anchor_ids": [0, 1, 2]}, "anchor_ids has 3 labels, but there are 4 turns"),
        ({"anchor_ids": fa.group_index([0, 1, 2])}, "anchor_ids has 3 labels, but there are 4 turns"),
        ({"mode": "none"}, "mode is 'none'; it must be one of 'mean_norm', 'mean_std_norm'"),
        ({"gamma": True}, "gamma is True; pass a finite number"),
        ({"rewards": torch.zeros(3), "group_ids": [0, 0, 0]}, "2 rollouts"),
        ({"include": torch.ones(2, dtype=torch.bool)}, "include is given, but this estimator does not read it"),
    ],
)
def test_bad_inputs(changed: dict[str, Any], message: str) -> None:
    turn_ids, cu_seqlens = turns_of([2, 2])
    given = {
        "rewards": torch.zeros(2), "group_ids": [0, 0], "turn_ids": fa.segments(turn_ids, cu_seqlens),
        "anchor_ids": [0, 1, 0, 1], "step_rewards": torch.zeros(4),
    }  # fmt: skip
    fa.estimate("gigpo/verl-agent", **given)
    with pytest.raises(ValueError, match=message):
        fa.estimate("gigpo/verl-agent", **{**given, **changed})


def test_rollouts_without_a_turn() -> None:
    """They have no row in verl-agent's batch: no vote, no advantage."""
    turn_ids, cu_seqlens = turns_of([2, 0, 1])
    rewards, labels = torch.tensor([1.0, 9.0, 0.0]), [0, 0, 0]
    given = {"turn_ids": turn_ids, "cu_seqlens": cu_seqlens}
    close(fa.estimate("grpo/verl-agent", rewards, labels, **given).advantages[1:2], [0.0])
    table = fa.estimate(
        "gigpo/verl-agent", rewards, labels, anchor_ids=[0, 1, 2], step_rewards=torch.zeros(3), **given
    ).advantages
    close(table.values, [1 / 3, 1 / 3, -2 / 3], 1e-6)
    nothing = {"turn_ids": torch.zeros(0, dtype=torch.int32), "cu_seqlens": torch.tensor([0])}
    empty = fa.estimate(
        "gigpo/verl-agent", torch.ones(0), [], anchor_ids=[], step_rewards=torch.zeros(0), **nothing
    ).advantages
    assert empty.values.shape == (0,)


def test_turns_on_the_meta_device_are_refused_by_name() -> None:
    turn_ids = torch.ones(4, 3, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="turn_ids is on the meta device and has no turns to count; pass a Segments"):
        fa.estimate("grpo/verl-agent", torch.ones(4, device="meta"), [0, 0, 1, 1], turn_ids=turn_ids)
