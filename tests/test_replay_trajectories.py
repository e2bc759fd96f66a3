"""Dumps of Miles and slime whose rollouts are several samples: siblings, leaves of a session, one sample a turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fastadv.integrations import miles
from miles_standins import Status, arguments, make, mask_of

import fastadv as fa
from fastadv import Ending, Outcome
from fastadv.replay.errors import ReplayError
from fastadv.replay.readers.miles import read
from fastadv.replay.readers.rollouts import ReadOptions, Rollouts


def dumped(path: Path, samples: list[Any], *, slime: bool = False) -> Path:
    """Samples as `--save-debug-rollout-data` writes them."""
    entries = [{**vars(s), "status": s.status.value} for s in samples]
    torch.save({"rollout_id": 0, "samples": entries} | ({} if slime else {"metadata": {}}), path)
    return path


def reread(tmp_path: Path, samples: list[Any], **options: Any) -> Rollouts:
    return read(dumped(tmp_path / "dump.pt", samples), ReadOptions(**options))


def leaf(path: list[int]) -> dict[str, Any]:
    return {"leaf": {"node_id": path[-1], "path_node_ids": path}}


def siblings() -> list[Any]:
    return [
        make(1.0, index=0, rollout_id=70, turns=2),
        make(0.0, index=1, rollout_id=71, status=Status.TRUNCATED),
        make(1.0, index=2, rollout_id=70, turns=3),
        make(0.0, index=3, group=1),
        make(1.0, index=4, rollout_id=70, group=1),  # of another group
    ]


@pytest.mark.parametrize("slime", [False, True])
def test_siblings_are_one_rollout(tmp_path: Path, slime: bool) -> None:
    found = read(dumped(tmp_path / "dump.pt", siblings(), slime=slime), ReadOptions())
    batch = found.batch
    assert batch is not None
    assert batch.rewards.tolist() == [1, 0, 0, 1]
    assert batch.outcomes.tolist() == [Outcome.SOLVED, Outcome.BUDGET, Outcome.FAILED, Outcome.SOLVED]
    assert batch.lengths.tolist() == [len(mask_of(2)) + len(mask_of(3)), 3, 3, 3]
    assert batch.segments.offsets.diff().tolist() == [5, 1, 1, 1]
    assert batch.mask[: batch.lengths[0]].tolist() == [x == 1 for x in mask_of(2) + mask_of(3)]
    # The second sample begins with a sampled token, right after the last of the first: two turns all the same.
    assert batch.turn_ids[7].item() == 1
    assert batch.turn_ids[8].item() == 2
    assert batch.row_ids.tolist() == [70, 1, 3, 4]
    assert batch.groups.sizes().tolist() == [2, 2]
    assert batch.token_ids is None
    assert any("1 rollout of 2 samples" in note and "gradients are not taken" in note for note in found.notes)


def test_one_sample_a_rollout_is_read_as_before(tmp_path: Path) -> None:
    samples = [make(float(i % 2), index=i, rollout_id=i, turns=1 + i) for i in range(4)]
    found = reread(tmp_path, samples)
    assert found.batch is not None
    assert found.batch.token_ids is not None
    assert not any("gradients" in note for note in found.notes)


def tree() -> list[Any]:
    """Calls 0 -> 1 -> 2 and 0 -> 3 -> 4: the second leaf's first call is masked, since the first leaf owns it."""
    early = make(0.0, index=0, rollout_id=5, turns=3, metadata=leaf([0, 1, 2]))
    late = make(0.0, index=1, rollout_id=5, turns=3, metadata=leaf([0, 3, 4]), status=Status.TRUNCATED)
    late.loss_mask[:3] = [0, 0, 0]
    return [early, late, make(1.0, index=2, turns=2)]


@pytest.mark.parametrize("backwards", [False, True])
def test_calls_of_leaves_are_turns_at_their_depth(tmp_path: Path, backwards: bool) -> None:
    samples = tree()
    if backwards:  # pickers reorder
        samples[:2] = samples[1::-1]
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    assert batch.segments.offsets.diff().tolist() == [3, 2]
    turns = batch.turn_ids[: batch.lengths[0]].split(13)
    early, late = turns[::-1] if backwards else turns
    assert early[early >= 0].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert late[late >= 0].tolist() == [1] * 3 + [2] * 3
    assert batch.outcomes.tolist() == [Outcome.BUDGET, Outcome.SOLVED]  # as the leaf of the latest call ended
    assert batch.endings is not None
    assert batch.endings[0] == Ending.LENGTH_CAP


@pytest.mark.parametrize("samples", [siblings(), tree()])
@pytest.mark.parametrize("name", ["none", "mask", "turn-reached"])
def test_a_replay_gives_the_advantages_that_the_hook_gave(tmp_path: Path, samples: list[Any], name: str) -> None:
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    mapping = {"arm": name} | ({"turns": "init"} if name == "turn-reached" else {})
    _, advantages = miles.reward_post_process(arguments(mapping), samples)
    arm = fa.named_arm(name)
    result = arm.apply(batch, arm.freeze(batch))
    table = result.advantages.values * result.weights[result.advantages.segments.row_of_segment()]
    offline = table[result.advantages.segments.offsets[:-1]].tolist()
    if samples[0].rollout_id == 70:
        assert advantages == pytest.approx([offline[i] for i in (0, 1, 0, 2, 3)])
    else:
        assert advantages == pytest.approx([offline[i] for i in (0, 0, 1)])
    if name == "turn-reached":
        sent = [x for s in samples for x in s.metadata["round_number"]["fastadv_turn_advantages"]]
        assert {round(x, 6) for x in sent} == {round(x, 6) for x in table.tolist()}
        assert len(sent) >= len(table)  # calls of one depth in two leaves share an advantage


def test_weight_versions_of_siblings_follow_each_other(tmp_path: Path) -> None:
    samples = siblings()
    for sample, versions in zip(samples, (["3", "4"], ["4"], ["5", "5", "6"], ["4"], ["6"]), strict=True):
        sample.weight_versions = versions
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    assert batch.versions is not None
    own = batch.versions[: batch.lengths[0]]
    assert own[batch.mask[: batch.lengths[0]]].tolist() == [3] * 3 + [4] * 3 + [5] * 6 + [6] * 3


def test_rewards_of_siblings(tmp_path: Path) -> None:
    samples = siblings()
    samples[0].reward = None  # the last one has it
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    assert batch.rewards.tolist() == [1, 0, 0, 1]
    samples[0].reward = 0.25
    with pytest.raises(ReplayError, match=r"several rewards \(sample 0: 0.25, sample 2: 1\)"):
        reread(tmp_path, samples)
    samples[0].reward = samples[2].reward = None
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    assert batch.outcomes[0] == Outcome.INFRA


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"node_id": 4, "path_node_ids": [0]}, "leaf 4 has 2 turns in its loss_mask, but 0 calls of its own"),
        ({"node_id": 4}, "metadata.'leaf'. is broken: KeyError"),
        ({"node_id": 4, "path_node_ids": 3}, "is broken: TypeError"),
        ({"node_id": 4, "path_node_ids": [[0]]}, "is broken: TypeError"),
        ({"node_id": "4", "path_node_ids": [0]}, "must be an integer"),
        ([4], "is a list; it must be a dictionary"),
        ("4", "is a str; it must be a dictionary"),
        (None, "some are not"),
    ],
)
def test_trees_that_do_not_fit_are_refused(tmp_path: Path, broken: Any, message: str) -> None:
    samples = tree()
    samples[1].metadata = {"leaf": broken}
    with pytest.raises(ReplayError, match=message):
        reread(tmp_path, samples)
