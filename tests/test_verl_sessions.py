"""What verl's trainer knows of its rows, taken apart and put together: sessions, turns, endings, rewards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from verl_import import verl_module
from verl_queue import VerlRows, agents

import fastadv as fa

endings = verl_module("fastadv.integrations.verl.endings")
sessions_of = verl_module("fastadv.integrations.verl.sessions")
trainer_keys = verl_module("fastadv.integrations.verl.trainer_keys")
trainer_rows = verl_module("fastadv.integrations.verl.trainer_rows")
SessionBatch, SessionKeys, TrainerOptions = (
    sessions_of.SessionBatch,
    trainer_rows.SessionKeys,
    trainer_keys.TrainerOptions,
)
OPTIONS = TrainerOptions()


def rows_of(rows: VerlRows, **changes: Any) -> Any:
    """The rows as the trainer would read them."""
    keys = SessionKeys.of(rows.keys)
    values = {
        "keys": keys,
        "sampled": rows.padded("loss_mask") != 0,
        "lengths": torch.tensor([len(row["responses"]) for row in rows.fields]),
        "padding": torch.tensor([uid.startswith("pad") for uid in keys.uids]),
        "scores": rows.padded("rm_scores").sum(1),
        **changes,
    }
    return trainer_rows.TrainerRows(**values)


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_keys_are_sessions_and_outputs() -> None:
    keys = SessionKeys.of(["x_y_0_1", "q_0_0", "x_y_0_0", "q_1_0"])
    assert keys.uids == ("x_y", "q", "x_y", "q")
    assert keys.sessions.tolist() == [0, 1, 0, 2]
    assert keys.outputs.tolist() == [1, 0, 0, 0]
    assert keys.last.tolist() == [True, True, False, True]
    again = SessionKeys.of(["q_0_0", "x_y_0_7"])
    assert keys.ids[[1, 0]].tolist() == again.ids.tolist(), "a session's coin depends on its key alone"
    assert bool((keys.ids >= 0).all())


@pytest.mark.parametrize("keys", [["a_0"], ["a_0_x"], ["a_0_0", "a_0_0"]])
def test_keys_of_another_form_are_refused(keys: list[str]) -> None:
    with pytest.raises(ValueError, match=r"key"):
        SessionKeys.of(keys)


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_turns_count_on_through_the_outputs_of_a_session() -> None:
    """Against a loop, on random sessions in any order."""
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        n = int(torch.randint(1, 9, (), generator=g))
        sessions = torch.randint(0, 4, (n,), generator=g)
        outputs = torch.zeros_like(sessions)
        for s in range(4):
            of_s = (sessions == s).nonzero()[:, 0]
            outputs[of_s] = torch.randperm(len(of_s), generator=g) * 2
        sampled = torch.rand(n, 7, generator=g) < 0.6
        expected = torch.full((n, 7), -1)
        for s in range(4):
            turn = -1
            for row in sorted((sessions == s).nonzero()[:, 0].tolist(), key=lambda r: int(outputs[r])):
                inside = False
                for t in range(7):
                    if sampled[row, t] and not inside:
                        turn += 1
                    inside = bool(sampled[row, t])
                    expected[row, t] = turn if inside else -1
        assert sessions_of.continued_turn_ids(sampled, sessions, outputs).tolist() == expected.tolist()


def test_turns_of_no_tokens() -> None:
    assert sessions_of.continued_turn_ids(
        torch.zeros(2, 0, dtype=torch.bool), torch.tensor([0, 1]), torch.zeros(2).long()
    ).shape == (2, 0)


# ---- sessions as a batch ---------------------------------------------------------------------------------------------


def test_a_session_is_one_rollout() -> None:
    rows = rows_of(agents(), versions=torch.tensor([[1, 2]] * 9))
    sessions = SessionBatch.of(rows.scores, rows, OPTIONS)
    batch = sessions.batch
    assert batch.num_rollouts == 7  # a/0 a/1 a/2 b/0 b/1 b/2 c_1/0
    assert batch.groups.index.tolist() == [0, 1, 0, 1, 0, 2, 1]  # a b a b a c_1 b, in order of appearance
    assert torch.equal(sessions.prompts, rows.keys.prompts[[0, 1, 2, 3, 6, 7, 8]])
    assert batch.rewards.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 0.5, 0.25]
    assert batch.segments.turns().tolist() == [2, 3, 4, 1, 1, 1, 2]
    assert batch.lengths.tolist() == [4, 5, 8, 1, 3, 2, 5]
    assert sessions.rollout.tolist() == [0, 1, 2, 3, -1, 1, 4, 5, 6]
    assert batch.versions is not None
    first = batch.versions[: int(batch.cu_seqlens[1])].tolist()
    assert first == [1, 1, -1, 2], "all but the last sampled token have the first version; a tool's has none"


def test_values_come_back_to_the_rows() -> None:
    rows = rows_of(agents())
    sessions = SessionBatch.of(rows.scores, rows, OPTIONS)
    segments = sessions.batch.segments
    table = fa.SegmentTable(torch.arange(segments.count).float() + 1, segments)
    spread = sessions.of_segments(table)
    assert not spread[~rows.sampled].any()
    assert torch.equal(sessions.at_tokens(fa.segment_tokens(table)), spread)
    assert spread[0].tolist() == [1, 1, 0, 2, 0, 0, 0, 0]
    assert spread[6].tolist() == [0, 11, 11, 0, 0, 0, 0, 0]
    assert (spread[1] - spread[5, 0]).tolist()[:3] == [1, -spread[5, 0], 2], "b/0 goes on in its second output"
    per_session = sessions.of_rollouts(torch.arange(7.0) + 1)
    assert per_session[5].tolist() == [2.0, 2.0, 0, 0, 0, 0, 0, 0], "both outputs of b/0 are session 1"
    assert not per_session[4].any(), "padding rows get nothing"


def test_only_padding() -> None:
    rows = rows_of(agents())
    only = trainer_rows.TrainerRows(
        SessionKeys.of(["pad1_0_0", "pad1_1_0"]), torch.zeros(2, 1, dtype=torch.bool), torch.ones(2).long(),
        torch.ones(2, dtype=torch.bool), torch.zeros(2),
    )  # fmt: skip
    sessions = SessionBatch.of(only.scores, only, OPTIONS)
    assert sessions.batch.num_rollouts == 0
    assert sessions.of_rollouts(torch.zeros(0)).tolist() == [[0.0], [0.0]]
    assert rows.padding.sum() == 1


# ---- endings ---------------------------------------------------------------------------------------------------------

CAPS = endings.Caps(response_length=8, assistant_turns=3, user_turns=None, model_length=12)
ENDINGS = {  # length, prompt, num_turns, last id -> ending
    "submitted": (5, 3, 4, 99, fa.Ending.SUBMITTED),
    "filled the response": (8, 3, 4, 99, fa.Ending.LENGTH_CAP),
    "filled the model's window": (7, 5, 4, 99, fa.Ending.CONTEXT_CAP),
    "as many replies as there may be": (5, 3, 6, 99, fa.Ending.TURN_CAP),
    "cut in a reply": (5, 3, 4, 7, fa.Ending.LENGTH_CAP),
    "a tool had the last word": (5, 3, 5, -1, fa.Ending.SUBMITTED),
    "filled and out of turns": (8, 3, 6, 99, fa.Ending.LENGTH_CAP),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_endings_follow_from_caps(case: str) -> None:
    length, prompt, turns, last, expected = ENDINGS[case]
    got = endings.derived(
        CAPS, lengths=torch.tensor([length]), prompt_lengths=torch.tensor([prompt]), num_turns=torch.tensor([turns]),
        replies=torch.tensor([turns // 2]), last_ids=torch.tensor([last]), end_ids=(99,),
    )  # fmt: skip
    assert fa.Ending(int(got)) == expected


def test_a_loops_own_reason_counts() -> None:
    known = torch.tensor([int(fa.Ending.SUBMITTED)] * 3)
    extra = [{"why": "length"}, {}, {"why": "aborted"}]
    got = endings.reported(extra, "why", "verl", known)
    assert [fa.Ending(int(x)) for x in got] == [fa.Ending.LENGTH_CAP, fa.Ending.SUBMITTED, fa.Ending.ABORTED]
    with pytest.raises(ValueError, match=r"algorithm\.fastadv\.trainer\.ending_field is 'nope'"):
        endings.reported(extra, "nope", "verl", known)


# ---- keys of the yaml ------------------------------------------------------------------------------------------------

BAD = {
    "trainer.exclusion": ({"exclusion": "drop"}, r"trainer\.exclusion is 'drop'.*weight, mask"),
    "an unknown key": ({"recrod": "x"}, r"trainer\.recrod is no key of fastadv .did you mean 'record'"),
    "not a mapping": (3, r"algorithm\.fastadv\.trainer is 3; it must be a mapping"),
    "reward": ({"reward": {"zero": 1}}, r"trainer\.reward\.zero is no key"),
    "zero_on_cap": ({"reward": {"zero_on_cap": True}}, r"reward\.zero_on_cap is True"),
    "overlong without a cache": ({"reward": {"overlong": {}}}, r"overlong\.cache_length is None"),
    "overlong form": ({"reward": {"overlong": {"cache_length": 3, "form": "dapo"}}}, r"form is 'dapo'.*paper"),
    "a length of a half": ({"reward": {"overlong": {"cache_length": 0.5}}}, r"cache_length is 0\.5"),
    "a path that is no text": ({"record": 3}, r"trainer\.record is 3; it must be a text"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_key(case: str) -> None:
    given, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        TrainerOptions.of({"fastadv": {"trainer": given}})


def test_options_are_read() -> None:
    options = TrainerOptions.of({
        "fastadv": {"kappa": 1, "trainer": {
            "exclusion": "mask", "end_ids": [2, 5], "reward": {"overlong": {"cache_length": 4, "form": "verl"}},
        }}
    })  # fmt: skip
    assert options.exclusion == "mask"
    assert options.end_ids == (2, 5)
    assert options.reward.overlong.form == "verl"
    assert TrainerOptions.of({}) == TrainerOptions()
    assert TrainerOptions.of({"fastadv": None}) == TrainerOptions()


def test_rewards_are_shaped_in_order() -> None:
    rewards, lengths = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([4, 10, 9])
    capped = torch.tensor([False, True, True])

    def shaped(given: dict[str, object]) -> list[float]:
        shaping = TrainerOptions.of({"fastadv": {"trainer": {"reward": given}}}).reward
        return shaping.apply(rewards, lengths, capped, longest=10, solved_above=0.0).tolist()

    assert trainer_keys.RewardShaping().active is False
    assert shaped({"zero_on_cap": "zero"}) == [1.0, 0.0, 0.0]
    assert shaped({"zero_on_cap": "keep"}) == [1.0, 1.0, 0.0]
    assert shaped({"stop_properly": 0.5}) == [1.0, 0.5, -0.5]
    assert shaped({"overlong": {"cache_length": 4}}) == pytest.approx([1.0, 0.0, -1.75])
    assert shaped({"overlong": {"cache_length": 4, "max_length": 8}}) == pytest.approx([1.0, 0.0, -2.0])
    assert shaped({"overlong": {"cache_length": 4, "max_length": 8, "form": "verl"}}) == pytest.approx(
        [1.0, -0.5, -2.25]
    )
    assert shaped({"zero_on_cap": "zero", "overlong": {"cache_length": 4}}) == pytest.approx([1.0, -1.0, -0.75])
