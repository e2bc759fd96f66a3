"""Samples of Miles and slime as rollouts: groups, siblings, leaves, masks, rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fastadv.integrations.miles.options import Options
from fastadv.integrations.miles.runs import find_runs
from fastadv.integrations.miles.samples import LOSS_WEIGHT, STALENESS, TAKEN, SampleBatch, read_samples
from miles_standins import SAMPLES, SlimeSample, Status, arguments, drawn, make, mask_of

from fastadv import Outcome
from fastadv.replay.readers.miles_turns import turns_of_runs


def read(samples: list[Any], mapping: dict[str, Any] | None = None, **flags: Any) -> SampleBatch:
    args = arguments(mapping or {"arm": "none"}, **flags)
    return read_samples(args, samples, Options.of(args))


TURNS = {"arm": "turn-reached", "turns": "init"}


# ---- runs ------------------------------------------------------------------------------------------------------------


def naive_bounds(mask: list[int]) -> list[int]:
    bounds, before = [], 0
    for at, value in enumerate([*mask, 0]):
        if value != before:
            bounds.append(at)
        before = value
    return bounds


@pytest.mark.parametrize("as_kind", [list, np.array, torch.tensor])
def test_runs_of_masks(as_kind: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    masks = [torch.randint(2, (length,), generator=generator).tolist() for length in range(40)]
    masks += [[constant] * length for length in (0, 1, 5) for constant in (0, 1)]
    found = find_runs([*map(as_kind, masks), None, None], [*map(len, masks), 5, 0])
    for mask, a, b in zip([*masks, [1] * 5, []], found.offsets, found.offsets[1:], strict=False):
        naive = naive_bounds(mask)
        assert found.begin[a:b].tolist() == naive[::2]
        assert found.end[a:b].tolist() == naive[1::2]
    assert sum(found.counts) == len(found.begin)
    assert find_runs([], []).counts == []


@pytest.mark.parametrize("mask", [[0, 2, 0], [1, 2, 0], [0, 0.5, 1], [1, 1, -1], np.array([0, 0.5]), [2, 2]])
def test_what_is_no_mask_is_refused(mask: Any) -> None:
    with pytest.raises(ValueError, match="sample 1: loss_mask holds something else than 0 and 1"):
        find_runs([[1, 0, 1], mask], [3, len(mask)])
    with pytest.raises(ValueError, match=r"sample 1: loss_mask has \d entries for 9 response tokens"):
        find_runs([[], mask], [0, 9])


def test_siblings_continue_each_other() -> None:
    assert turns_of_runs([2, 0, 3], [None] * 3) == [[0, 1], [], [2, 3, 4]]


def test_leaves_share_the_calls_of_their_path() -> None:
    # calls 0 -> 1 -> 2 and 0 -> 3 -> 4 -> 5; the first leaf owns 0.
    leaves = [{"node_id": 2, "path_node_ids": [0, 1, 2]}, {"node_id": 5, "path_node_ids": [0, 3, 4, 5]}]
    assert turns_of_runs([3, 3], leaves) == [[0, 1, 2], [1, 2, 3]]
    assert turns_of_runs([3, 3], leaves[::-1]) == [[1, 2, 3], [0, 1, 2]]  # pickers reorder
    assert turns_of_runs([3, 2], leaves) == [[0, 1, 2], [1, 2]]  # the last call was cut off
    with pytest.raises(ValueError, match="leaf 5 has 4 turns in its loss_mask, but 3 calls of its own"):
        turns_of_runs([3, 4], leaves)
    with pytest.raises(ValueError, match="some are not"):
        turns_of_runs([3, 1], [leaves[0], None])
    for broken in ({"node_id": 1}, {"node_id": "1", "path_node_ids": [0]}, {"node_id": 1, "path_node_ids": [[]]}, 7):
        with pytest.raises(ValueError, match="leaf"):
            turns_of_runs([1, 1], [leaves[0], broken])


# ---- rollouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_batch_holds_what_its_samples_say(kind: type[SlimeSample]) -> None:
    samples = drawn(torch.Generator().manual_seed(1), 7, kind=kind)
    found = read(samples, TURNS)
    assert found.rollout.tolist() == list(range(len(samples)))
    assert found.batch.rewards.tolist() == [s.reward for s in samples] == found.raw_rewards
    assert found.lengths.tolist() == [s.response_length for s in samples]
    groups = [s.group_index for s in samples]
    for i, a in enumerate(groups):
        for j, b in enumerate(groups):
            assert (found.batch.groups.index[i] == found.batch.groups.index[j]) == (a == b)
    for row, sample in enumerate(samples):
        turns = len(naive_bounds(sample.loss_mask)) // 2
        assert int(found.batch.segments.offsets.diff()[row]) == turns
        cut = sample.status == Status.TRUNCATED or "exit_status" in sample.metadata
        expected = Outcome.SOLVED if sample.reward > 0 else Outcome.BUDGET if cut else Outcome.FAILED
        assert found.batch.outcomes[row] == expected
        assert bool(found.batch.capped[row]) == cut
    assert read(samples).batch.segments.count == len(samples)  # advantages of rollouts do not look at masks


def test_siblings_are_one_rollout() -> None:
    samples = [
        make(1.0, index=0, rollout_id=70, turns=2, status=Status.TRUNCATED),
        make(0.0, index=1, rollout_id=71),
        make(1.0, index=2, rollout_id=70, turns=3),
        make(1.0, index=3, rollout_id=70, group=1),  # the same number in another group is another rollout
    ]
    found = read(samples, TURNS)
    assert found.rollout.tolist() == [0, 1, 0, 2]
    assert found.batch.rewards.tolist() == [1, 0, 1]
    assert found.batch.segments.offsets.diff().tolist() == [5, 1, 1]
    assert found.turns is not None
    assert found.turns.tolist() == [0, 1, 0, 2, 3, 4, 0]
    assert found.lengths.tolist() == [len(mask_of(2)) + len(mask_of(3)), 3, 3]
    assert not bool(found.batch.capped[0])  # its last sample completed
    samples[2].reward = 0.5
    with pytest.raises(ValueError, match=r"several rewards \(sample 0: 1, sample 2: 0.5\)"):
        read(samples)
    samples[2].reward = None  # rewards stand at one sibling, often the last
    assert read(samples).batch.rewards.tolist() == [1, 0, 1]


def test_a_tree_ends_as_its_latest_leaf_did() -> None:
    paths = ([0, 1, 2], [0, 3])
    leaves = [{"leaf": {"node_id": path[-1], "path_node_ids": path}} for path in paths]
    late = make(0.0, index=1, rollout_id=5, turns=1, metadata=leaves[1], status=Status.TRUNCATED)
    early = make(0.0, index=0, rollout_id=5, turns=3, metadata=leaves[0])
    for samples in ([early, late], [late, early]):
        found = read(samples, TURNS)
        assert found.batch.outcomes.tolist() == [Outcome.BUDGET]
        assert found.batch.segments.offsets.diff().tolist() == [3]
        assert found.turns is not None
        assert found.turns.tolist() == ([0, 1, 2, 1] if samples[0] is early else [1, 0, 1, 2])


def test_rollouts_without_a_result_do_not_vote() -> None:
    samples = [
        make(1.0, index=0), make(None, index=1), make(0.5, index=2, status=Status.ABORTED), make(0.0, index=3),
        make(float("nan"), index=4), make(0.0, index=5, metadata={"exit_status": "AgentError"}),
    ]  # fmt: skip
    found = read(samples)
    assert found.rollout.tolist() == [0, -1, -1, 1, -1, -1]
    assert found.raw_rewards == [1.0, 0.0, 0.5, 0.0, 0.0, 0.0]
    assert int((~found.everything.has_result).sum()) == 4
    assert found.at_samples(torch.tensor([2.0, 3.0])).tolist() == [2, 0, 0, 3, 0, 0]


def test_a_timeout_is_a_budget_unless_it_is_the_machines() -> None:
    samples = [make(0.0, index=0, metadata={"exit_status": "TimeLimitExceeded"}), make(0.0, index=1)]
    assert read(samples).batch.outcomes.tolist() == [Outcome.BUDGET, Outcome.FAILED]
    assert read(samples, {"arm": "none", "timeout": "infra"}).batch.outcomes.tolist() == [Outcome.FAILED]


def test_rewards_of_dictionaries_need_their_key() -> None:
    samples = [make({"acc": 1.0, "format": 0.5}, index=0), make({"acc": 0.0, "format": 1.0}, index=1)]
    assert read(samples, reward_key="acc").batch.rewards.tolist() == [1, 0]
    with pytest.raises(ValueError, match="choose one with --reward-key"):
        read(samples)
    with pytest.raises(ValueError, match="sample 0: the reward has no --reward-key 'accuracy'; it has acc, format"):
        read(samples, reward_key="accuracy")
    with pytest.raises(ValueError, match="sample 1: the reward is 'high', which is no number"):
        read([make(1.0, index=0), make("high", index=1)])
    with pytest.raises(ValueError, match=r"rewards\[0\] is inf"):
        read([make(float("inf"), index=0)])


def test_groups_by_place_where_samples_have_no_group() -> None:
    samples = [make(float(i), group=None, index=None) for i in range(8)]
    assert read(samples, n_samples_per_prompt=4).batch.groups.sizes().tolist() == [4, 4]
    with pytest.raises(ValueError, match="--n-samples-per-prompt 3"):
        read(samples, n_samples_per_prompt=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": [1, 0], "response_length": 3}, "sample 1: loss_mask has 2 entries for 3 response tokens"),
        ({"loss_mask": [1, 3, 0]}, "sample 1: loss_mask holds something else"),
    ],
)
def test_broken_masks_name_their_sample(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read([make(1.0, index=0), make(1.0, index=1, **fields)], TURNS)


def test_a_batch_without_any_result_and_rollouts_without_a_turn() -> None:
    found = read([make(None, index=0), make(None, index=1)], TURNS)
    assert found.batch.num_rollouts == 0
    empty = read([make(1.0, index=0, loss_mask=[]), make(0.0, index=1)], TURNS)
    assert empty.batch.segments.offsets.diff().tolist() == [0, 1]


# ---- what the buffer wrote -------------------------------------------------------------------------------------------


def buffered(weight: float, staleness: int, taken: int, **fields: Any) -> Any:
    return make(1.0, metadata={LOSS_WEIGHT: weight, STALENESS: staleness, TAKEN: taken}, **fields)


def test_staleness_weights_and_counts_of_the_buffer() -> None:
    samples = [buffered(1.0, 0, 2, index=0), buffered(1.0, 0, 2, index=1), buffered(4.0, 3, 5, index=2, group=1)]
    found = read(samples, {"arm": "rescue:a=0.25,after=1"})
    assert found.taken == 7
    assert found.loss_weights is not None
    assert found.loss_weights.tolist() == [1, 1, 4]
    assert found.known.stale is not None
    assert found.known.stale.tolist() == [False, False, True]
    del samples[0].metadata[LOSS_WEIGHT]
    with pytest.raises(ValueError, match="did not come through one buffer"):
        read(samples, {"arm": "rescue:a=0.25,after=1"})


def test_staleness_by_versions_where_no_buffer_measured_it() -> None:
    samples = [
        make(1.0, index=0, weight_versions=["3", "5"]), make(1.0, index=1, weight_versions=["5"]),
        make(1.0, index=2, group=1, weight_versions=["4", "6"]), make(1.0, index=3, group=2, weight_versions=["7"]),
    ]  # fmt: skip
    known = read(samples, {"arm": "drop-stale:after=2"}).known
    assert known.stale is not None
    assert known.stale.tolist() == [True, True, True, False]
    samples[1].weight_versions = []
    with pytest.raises(ValueError, match="rollout 1 has neither fastadv_staleness"):
        read(samples, {"arm": "drop-stale:after=2"})
    assert read(samples).known.stale is None  # an arm that does not ask


def test_repetitions_are_looked_for_where_an_arm_asks() -> None:
    loop = [7, 8] * 40
    samples = [make(0.0, index=0, loss_mask=[1] * 80), make(0.0, index=1, loss_mask=[1] * 80)]
    samples[0].tokens[-80:] = loop
    known = read(samples, {"arm": "microcoder:window=16"}).known
    assert known.repeating is not None
    assert known.repeating.tolist() == [True, False]
    leaves = [{"leaf": {"node_id": path[-1], "path_node_ids": path}} for path in ([0, 1], [0, 2])]
    for number, metadata in enumerate(leaves):  # a tree ends as the leaf of the latest call does, wherever that lies
        samples[number].rollout_id, samples[number].metadata = 5, metadata
    for expected in (False, True):
        for given in (samples, samples[::-1]):
            known = read(given, {"arm": "microcoder:window=16"}).known
            assert known.repeating is not None
            assert known.repeating.tolist() == [expected]
        samples[0].tokens, samples[1].tokens = samples[1].tokens, samples[0].tokens
