"""Dumps of Miles and slime whose rollouts are several samples: siblings, leaves of a session, one sample a turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastadv.integrations import miles
from miles_standins import Status, arguments, make, mask_of

import fastadv as fa
from fastadv import Ending, Outcome
from fastadv.gradproj.streams import layout, sequences
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


def offline(name: str, batch: fa.Batch) -> tuple[list[float], list[float]]:
    """Weighted advantages of an arm: of all segments, and of each rollout's first turn."""
    arm = fa.named_arm(name)
    result = arm.apply(batch, arm.freeze(batch))
    index = result.advantages.segments
    table = result.advantages.values * result.weights[index.row_of_segment()]
    return table.tolist(), table[index.offsets[:-1]].tolist()


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
    assert batch.groups.sizes().tolist() == [2, 2]
    ids = batch.token_ids
    assert ids is not None
    assert ids.rollouts is not None
    assert ids.responses is not None
    assert ids.rollouts.tolist() == [0, 0, 1, 2, 3]
    assert ids.responses.tolist() == [len(mask_of(2)), len(mask_of(3)), 3, 3, 3]
    assert ids.cu_seqlens.diff().tolist() == [2 + n for n in ids.responses.tolist()]
    assert "1 rollout of 2 samples: each votes once" in found.notes


def test_coins_are_tossed_by_what_the_hook_tosses_them_by(tmp_path: Path) -> None:
    samples = siblings()
    samples[4].rollout_id = 72
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    assert batch.row_ids.tolist() == [70, 71, 3, 72]  # a rollout_id, or the index of a sample without
    for seed in range(8):  # of which either number of a rollout is masked by some and not by others
        name = f"random-mask:rho=0.5,seed={seed}"
        _, advantages = miles.reward_post_process(arguments({"arm": name}), samples)
        assert advantages == pytest.approx([offline(name, batch)[1][i] for i in (0, 1, 0, 2, 3)])
    repeated = reread(tmp_path, siblings())  # in two groups
    assert repeated.batch is not None
    assert repeated.batch.row_ids.tolist() == [0, 1, 2, 3]
    assert "sample indices repeat: coins are tossed by position instead" in repeated.notes


def test_samples_without_a_rollout_id_are_rollouts_of_their_own(tmp_path: Path) -> None:
    found = reread(tmp_path, [make(1.0, index=3), make(0.0, index=3), make(0.0, index=4)])
    assert found.rewards.tolist() == [1, 0, 0]


def test_samples_without_a_group_are_joined_where_they_lie_together(tmp_path: Path) -> None:
    """An evaluation of two data sets: no groups, and numbers that begin anew."""
    given = {"group": None, "index": 3}
    samples = [
        make(1.0, rollout_id=3, turns=2, **given),
        make(1.0, rollout_id=3, **given),
        make(0.0, rollout_id=4, **given),
        make(0.0, rollout_id=3, **given),
        make(0.5, rollout_id=3, **given),
        make(0.0, **given),
        make(1.0, **given),
    ]
    samples[4].metadata = {"instance_id": "another task"}
    found = reread(tmp_path, samples)
    assert found.rewards.tolist() == [1, 0, 0, 0.5, 0, 1]
    assert found.groups.sizes().tolist() == [1] * 6
    assert found.labels[3].startswith("another task")
    assert "7 samples without group_index: the rollout of each is a group of its own" in found.notes


def test_notes_count_rollouts_where_samples_are_joined(tmp_path: Path) -> None:
    samples = siblings()
    samples[0].reward, samples[0].metadata = None, {"exit_status": "AgentError"}  # the last one has a result
    assert not any("INFRA" in note for note in reread(tmp_path, samples).notes)
    samples[2].reward = None
    samples[3].metadata = {"exit_status": "AgentError"}
    notes = reread(tmp_path, samples).notes
    assert "1 finished rollout without a reward (None or NaN): counted as INFRA" in notes
    assert any(note.startswith("1 finished rollout whose exit_status says that the agent") for note in notes)
    samples[0].rollout_log_probs = [-1.0] * samples[0].response_length
    samples[1].rollout_log_probs = [-1.0] * samples[1].response_length
    samples[1].remove_sample = samples[2].remove_sample = True
    notes = reread(tmp_path, samples).notes
    assert "3 rollouts without rollout_log_probs: those of the others are not used" in notes
    assert any(note.startswith("2 samples marked by a sample filter") for note in notes)


def test_one_sample_a_rollout_is_read_as_before(tmp_path: Path) -> None:
    samples = [make(float(i % 2), index=i, rollout_id=i, turns=1 + i) for i in range(4)]
    found = reread(tmp_path, samples)
    assert found.batch is not None
    assert found.batch.token_ids is not None
    assert found.batch.token_ids.rollouts is None
    assert found.batch.by_sequence() is found.batch


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
    early, late = turns  # in the order of their last calls
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
    table, first = offline(name, batch)
    rollouts = (0, 1, 0, 2, 3) if samples[0].rollout_id == 70 else (0, 0, 1)
    assert advantages == pytest.approx([first[i] for i in rollouts])
    if name == "turn-reached":
        sent = [x for s in samples for x in s.metadata["round_number"]["fastadv_turn_advantages"]]
        assert {round(x, 6) for x in sent} == {round(x, 6) for x in table}
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


@pytest.mark.parametrize("backwards", [False, True])
def test_weight_versions_of_a_leaf_are_of_all_calls_of_its_path(tmp_path: Path, backwards: bool) -> None:
    """Of the late leaf's three, the first is of the call that the early leaf owns."""
    samples = tree()
    for sample, versions in zip(samples, (["1", "2", "3"], ["1", "5", "6"], ["6", "7"]), strict=True):
        sample.weight_versions = versions
    if backwards:
        samples[:2] = samples[1::-1]
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    assert batch.versions is not None
    assert batch.versions[batch.mask].tolist() == [v for v in (1, 2, 3, 5, 6, 6, 7) for _ in range(3)]
    late = samples[0] if backwards else samples[1]
    late.weight_versions = ["5", "6"]  # nobody can tell of which calls
    found = reread(tmp_path, samples)
    assert found.batch is not None
    assert found.batch.versions is None
    assert any(note.startswith("1 rollout whose weight_versions do not say") for note in found.notes)
    late.weight_versions = ["5"] * 7  # whichever they are
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    assert batch.versions is not None
    assert batch.versions[batch.mask].tolist() == [v for v in (1, 2, 3, 5, 5, 6, 7) for _ in range(3)]


def test_a_leaf_that_was_cut_has_the_first_of_its_calls(tmp_path: Path) -> None:
    """Its last call did not fit, and went with its version: the sample ends completed, and its agent says why."""
    samples = tree()
    cut = make(0.0, index=1, rollout_id=5, turns=2, metadata=leaf([0, 3, 4]) | {"exit_status": "TimeLimitExceeded"})
    cut.loss_mask[:3] = [0, 0, 0]
    samples[1] = cut
    for sample, versions in zip(samples, (["1", "2", "3"], ["1", "5"], ["6", "7"]), strict=True):
        sample.weight_versions = versions
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    assert batch.versions is not None
    assert batch.outcomes.tolist() == [Outcome.BUDGET, Outcome.SOLVED]
    own = slice(13, 21)
    assert batch.turn_ids[own].tolist() == [-1] * 5 + [1] * 3
    assert batch.versions[own].tolist() == [-1] * 5 + [5] * 3


def test_a_leaf_has_no_more_turns_than_tokens(tmp_path: Path) -> None:
    samples = tree()
    samples[0].metadata = leaf([*range(100, 200), 2])
    samples[1].metadata = leaf([*range(100, 200), 4])
    samples[1].loss_mask = [0] * 12 + [1]
    with pytest.raises(ReplayError, match=r"sample 1: .*its last call at turn 100, but the response has 13 tokens"):
        reread(tmp_path, samples)


@pytest.mark.parametrize("field", ["group_index", "rollout_id"])
def test_a_bool_is_no_number_of_a_rollout(tmp_path: Path, field: str) -> None:
    with pytest.raises(ReplayError, match=f"sample 0: '{field}' is a bool; it must be an integer or a text"):
        reread(tmp_path, [replace(make(1.0), **{field: True})])


def test_rewards_of_siblings(tmp_path: Path) -> None:
    samples = siblings()
    samples[0].reward = None  # the last one has it
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    assert batch.rewards.tolist() == [1, 0, 0, 1]
    samples[0].reward = 0.25
    with pytest.raises(ReplayError, match=r"\(rollout_id 70\) have several rewards \(sample 0: 0.25, sample 2: 1\)"):
        reread(tmp_path, samples)
    samples[0].reward = samples[2].reward = None
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    assert batch.outcomes[0] == Outcome.INFRA


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"node_id": 4, "path_node_ids": [0]}, "leaf 4 has 2 turns in its loss_mask, but 0 calls of its own"),
        ({"node_id": 4}, "metadata.'leaf'. has no 'path_node_ids'"),
        ({"path_node_ids": [0]}, "metadata.'leaf'. has no 'node_id'"),
        ({"node_id": 4, "path_node_ids": 3}, "'path_node_ids'. is a int; it must be a list"),
        ({"node_id": 4, "path_node_ids": "034"}, "'path_node_ids'. is a str; it must be a list"),
        ({"node_id": 4, "path_node_ids": torch.tensor([0, 3, 4])}, "'path_node_ids'. is a Tensor; it must be a list"),
        ({"node_id": 4, "path_node_ids": [[0]]}, "'path_node_ids'. holds a list; it must hold integers"),
        ({"node_id": 4, "path_node_ids": [0, float("nan"), 4]}, "holds a float; it must hold integers"),
        ({"node_id": 4, "path_node_ids": [False, 3, 4]}, "holds a bool; it must hold integers"),
        ({"node_id": 4, "path_node_ids": [0, 3, 3, 4]}, "of leaf 4 holds a call twice"),
        ({"node_id": "4", "path_node_ids": [0]}, "'node_id'. is a str; it must be an integer"),
        ({"node_id": True, "path_node_ids": [0]}, "'node_id'. is a bool; it must be an integer"),
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


def one_a_turn() -> list[Any]:
    """Rollouts of four and of two turns, a sample each."""
    owners = (70, 71, 70, 70, 71, 70)
    return [make(float(owner - 70), index=i, rollout_id=owner, prompt=2 + i) for i, owner in enumerate(owners)]


# ---- gradients -------------------------------------------------------------------------------------------------------


def policy(folder: Path) -> Any:
    from rollout_files import write_policy
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(write_policy(folder, vocabulary=64)).double().eval()


def by_autograd(model: Any, samples: list[Any], numbers: list[list[int]], segments: int) -> torch.Tensor:
    """Gradients [S, P] of the sums of log-probs, sample by sample; `numbers` are segments of tokens, or -1."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = torch.zeros(segments, sum(p.numel() for p in parameters), dtype=torch.float64)
    for sample, own in zip(samples, numbers, strict=True):
        ids = torch.tensor([sample.tokens])
        log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        log_probs = log_probs[len(sample.tokens) - sample.response_length - 1 :]
        for segment in sorted(set(own) - {-1}):
            total = log_probs[torch.tensor([number == segment for number in own])].sum()
            found = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
            rows[segment] += torch.cat([g.flatten() for g in found])
    return rows


@pytest.mark.parametrize("level", ["rollout", "turn"])
@pytest.mark.parametrize(
    ("samples", "order"),
    [(siblings(), (0, 2, 1, 3, 4)), (tree(), (0, 1, 2)), (one_a_turn(), (0, 2, 3, 5, 1, 4))],
    ids=["siblings", "leaves", "turns"],
)
def test_gradients_of_a_rollout_are_sums_over_its_samples(
    tmp_path: Path, samples: list[Any], order: tuple[int, ...], level: str
) -> None:
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    assert batch.token_ids is not None
    assert batch.token_ids.rollouts is not None
    ordered = [samples[i] for i in order]
    model = policy(tmp_path / "policy")
    offsets, rollouts = batch.segments.offsets.tolist(), batch.token_ids.rollouts.tolist()
    numbers, at = [], 0
    for sample, rollout in zip(ordered, rollouts, strict=True):
        turns = batch.turn_ids[at : at + sample.response_length].tolist()
        numbers.append([-1 if t < 0 else offsets[rollout] + t if level == "turn" else rollout for t in turns])
        at += sample.response_length
    count = batch.segments.count if level == "turn" else batch.num_rollouts
    exact = by_autograd(model, ordered, numbers, count)
    for max_tokens in (8, 4096):
        found = fa.gradproj.segment_gram(model, batch, level=level, max_tokens=max_tokens)
        torch.testing.assert_close(found.gram, exact @ exact.T, rtol=1e-9, atol=1e-9)
    if level == "turn":
        assert found.rows.tolist() == batch.segments.row_of_segment().tolist()
        assert found.turns.tolist() == [t for n in batch.segments.turns().tolist() for t in range(n)]
    if level == "turn":
        dots = fa.gradproj.token_dots(model, batch, dict(model.named_parameters()), max_tokens=20)
        own = torch.cat([p.flatten() for p in model.parameters()])
        torch.testing.assert_close(fa.gradproj.segment_dots(dots, batch), exact @ own, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("level", "segments", "streams"), [("turn", 6, 1), ("rollout", 6, 1)])
def test_samples_of_one_turn_cost_no_more_than_turns(tmp_path: Path, level: str, segments: int, streams: int) -> None:
    """Numbered by the turns of their rollouts, these samples would be 13 segments in 4 streams."""
    batch = reread(tmp_path, one_a_turn()).batch
    assert batch is not None
    divided = sequences(batch)
    assert divided.turns is not None
    assert divided.turns.tolist() == [0, 1, 2, 3, 0, 1]
    made = layout([divided.batch], level, 10**6, None, torch.device("cpu"))
    assert made.segments == segments
    assert [len(one.streams) for one in made.micro_batches] == [streams]
    plan = fa.gradproj.plan(policy(tmp_path / "policy"), batch=batch, level=level)
    assert (plan.rollouts, plan.turns, plan.streams, plan.segments) == (2, 1, streams, segments)
    live = [run.rows for one in made.micro_batches for stream in one.streams for run in stream.runs]
    assert plan.backward == pytest.approx(sum(live) / plan.tokens)


def test_a_batch_of_one_row_a_rollout_is_not_divided(tmp_path: Path) -> None:
    batch = reread(tmp_path, [make(1.0, index=i, turns=2) for i in range(3)]).batch
    assert batch is not None
    assert sequences(batch) == (batch, None)


def test_what_cannot_be_scored_names_its_rollout(tmp_path: Path) -> None:
    from fastadv.replay.policy import Policy

    samples = siblings()
    del samples[3].tokens[:2]  # the fourth sequence, of the third rollout
    batch, model = reread(tmp_path, samples).batch, policy(tmp_path / "policy")
    assert batch is not None
    with pytest.raises(ReplayError, match=r"^rollout 2 has no prompt"):
        Policy(model, 64, 64).check(batch)
    for function in (fa.gradproj.segment_gram, lambda *given: fa.gradproj.token_dots(*given, {})):
        with pytest.raises(ValueError, match="rollout 2 has no prompt"):
            function(model, batch)
    samples = siblings()
    samples[3].tokens[:0] = [1] * 70
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    with pytest.raises(ValueError, match="rollout 2 has 75 tokens, the model's context ends at 64"):
        fa.gradproj.segment_gram(model, batch)


def test_a_replay_takes_gradients_of_such_dumps_either_way(tmp_path: Path) -> None:
    from rollout_files import write_policy

    from fastadv.replay.pipeline import ReplayOptions, replay
    from fastadv.replay.policy import Policy

    samples = siblings() + [make(float(i % 2), index=10 + i, rollout_id=80 + i // 2, group=2) for i in range(6)]
    for sample in samples[5:]:
        sample.reward = float(sample.rollout_id % 2)
    path = dumped(tmp_path / "dump.pt", samples)
    exact = Policy.load(write_policy(tmp_path / "policy", vocabulary=64), dtype=torch.float64)
    by_gram, flat = (replay([path], exact, ReplayOptions(p1_prompts=0, gradients=how)) for how in ("gram", "cells"))
    assert len(by_gram.gradients) == len(flat.gradients) > 5
    for one, other in zip(flat.gradients, by_gram.gradients, strict=True):
        assert (other.arm, other.scope) == (one.arm, one.scope)
        assert other.norm == pytest.approx(one.norm, rel=1e-6, abs=1e-6)
        if one.norm > 1e-6 and one.norm_ratio < 1e6:  # else what is left of terms that cancel
            assert other.cosine == pytest.approx(one.cosine, rel=1e-6)


def test_the_portable_format_holds_sequences(tmp_path: Path) -> None:
    from fastadv.replay.readers import portable

    batch = reread(tmp_path, siblings()).batch
    assert batch is not None
    portable.write(tmp_path / "rollouts.safetensors", batch)
    again = portable.read(tmp_path / "rollouts.safetensors", ReadOptions()).batch
    assert again is not None
    for name in ("ids", "cu_seqlens", "rollouts", "responses"):
        assert torch.equal(getattr(batch.token_ids, name), getattr(again.token_ids, name)), name
    assert torch.equal(batch.turn_ids, again.turn_ids)


def test_rollouts_that_are_taken_keep_their_sequences(tmp_path: Path) -> None:
    batch = reread(tmp_path, siblings()).batch
    assert batch is not None
    assert batch.token_ids is not None
    some = batch.take(torch.tensor([3, 0]))
    ids = some.token_ids
    assert ids is not None
    assert ids.rollouts is not None
    assert ids.responses is not None
    assert ids.rollouts.tolist() == [0, 1, 1]
    assert ids.responses.tolist() == [3, 8, 13]
    split = some.by_sequence()
    assert split.lengths.tolist() == [3, 8, 13]
    assert split.rewards.tolist() == [1, 1, 1]
    assert torch.equal(split.mask, some.mask)
    assert split.groups.num_groups == 2
    assert [list(r) for r in batch.micro_batches(24)] == [[0, 1], [1, 4]]
    assert [list(r) for r in batch.micro_batches(10**6)] == [[0, 4]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"responses": None}, "rollouts and responses come together"),
        ({"rollouts": [0, 0, 1, 2]}, r"token_ids.responses has shape \[5\]"),
        ({"rollouts": [0, 1, 0, 2, 3]}, r"token_ids.rollouts\[2\] is 0; rollouts are from 0 to 3 and do not decrease"),
        ({"rollouts": [0, 0, 1, 2, 4]}, r"token_ids.rollouts\[4\] is 4"),
        ({"responses": [8, 13, 3, 3, -3]}, r"token_ids.responses\[4\] is -3; it must be at least 0"),
        ({"responses": [8, 12, 3, 3, 3]}, "rows of rollout 0 in token_ids have 20 response tokens, the rollout has 21"),
        ({"responses": [21, 0, 3, 3, 3]}, "fewer tokens than its response of 21"),
        ({"rollouts": [0.0, 0, 1, 2, 3]}, "token_ids.rollouts"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    batch = reread(tmp_path, siblings()).batch
    assert batch is not None
    assert batch.token_ids is not None
    given = vars(batch.token_ids) | {k: None if v is None else torch.tensor(v) for k, v in changes.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        fa.TokenIds(**given).checked("Batch", batch.lengths)


def test_repetitions_are_looked_for_in_the_last_sequence(tmp_path: Path) -> None:
    samples = siblings()
    samples[2].tokens[-12:] = [7, 8] * 6
    samples[0].tokens[-8:] = [5] * 8  # not how the rollout ended
    batch = reread(tmp_path, samples).batch
    assert batch is not None
    assert fa.arms.rules.repeating("test", batch, 2).tolist() == [True, False, False, False]
    assert fa.arms.rules.repeating("test", batch, 8).tolist() == [False] * 4
    for backwards in (False, True):  # a tree ends as the leaf of the latest call does, wherever that lies
        samples = tree()
        samples[1].tokens[-4:] = [7, 8] * 2
        if backwards:
            samples[:2] = samples[1::-1]
        batch = reread(tmp_path, samples).batch
        assert batch is not None
        assert fa.arms.rules.repeating("test", batch, 2).tolist() == [True, False]
        assert fa.gradproj.outline.outline([batch]).repeats.of(2).tolist() == [True, False]
