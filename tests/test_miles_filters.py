"""Sample filters of Miles and slime: what they remove, and that removed samples keep their vote."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastadv.integrations import miles
from miles_standins import SAMPLES, SlimeSample, Status, arguments, by_group, make, mask_of

import fastadv as fa

LENGTH, TIME, TURNS = (
    {"exit_status": name} for name in ("SequenceLengthLimitExceeded", "TimeLimitExceeded", "TurnLimitExceeded")
)


def cases(kind: type[SlimeSample]) -> list[tuple[Any, bool, bool]]:
    """Samples, whether they are cut off, and whether they have no positive reward."""
    plain = [
        (make(0.0, status=Status.TRUNCATED, kind=kind), True, True),
        (make(1.0, status=Status.TRUNCATED, kind=kind), True, False),
        (make(-1.0, status=Status.TRUNCATED, kind=kind), True, True),
        (make(None, status=Status.TRUNCATED, kind=kind), True, True),
        (make(float("nan"), status=Status.TRUNCATED, kind=kind), True, True),
        (make(0.0, metadata=dict(LENGTH), kind=kind), True, True),  # completed, without the turn that had no room
        (make(0.0, metadata=dict(TIME), kind=kind), True, True),
        (make(1.0, metadata=dict(TIME), kind=kind), True, False),
        (make(0.0, metadata=dict(TURNS), kind=kind), False, True),  # no cut to Miles' filter
        (make(0.0, metadata=None, kind=kind), False, True),
        (make(1.0, kind=kind), False, False),
    ]
    for index, (sample, _, _) in enumerate(plain):
        sample.index, sample.group_index = index, index // 4
    return plain


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("nested", [False, True])
def test_cut_off_samples_are_removed(kind: type[SlimeSample], nested: bool) -> None:
    for function, needs_no_reward in ((miles.mask_truncated_zero_reward, True), (miles.mask_truncated, False)):
        known = cases(kind)
        samples = [sample for sample, _, _ in known]
        data = [[[s] for s in group] for group in by_group(samples)] if nested else by_group(samples)
        function(arguments({"arm": "none"}), data)
        assert [s.remove_sample for s in samples] == [cut and (none or not needs_no_reward) for _, cut, none in known]


def test_a_status_that_is_a_text_counts_as_the_enumeration() -> None:
    sample = make(0.0, status="truncated")
    miles.mask_truncated_zero_reward(arguments(), [[sample]])
    assert sample.remove_sample


def test_rewards_of_dictionaries(caplog: pytest.LogCaptureFixture) -> None:
    samples = [make({"acc": float(i)}, index=i, status=Status.TRUNCATED) for i in range(2)]
    with caplog.at_level(logging.WARNING, "fastadv"):
        miles.mask_truncated_zero_reward(arguments(), [samples])
    assert not any(s.remove_sample for s in samples)
    assert "--reward-key is not set" in caplog.text
    miles.mask_truncated_zero_reward(arguments(reward_key="acc"), [samples])
    assert [s.remove_sample for s in samples] == [True, False]


def test_a_random_share_by_the_arms_coins() -> None:
    samples = [make(0.0, index=i, group=i // 8, status=Status.TRUNCATED) for i in range(400)]
    args = arguments({"arm": "none", "filter": "random", "filter_share": 0.3, "seed": 9})
    miles.mask_random(args, by_group(samples))
    removed = [s.remove_sample for s in samples]
    assert 80 < sum(removed) < 160
    assert removed == fa.keep(9, list(range(400)), 0.3, stream="arm exclusion").tolist()
    for sample in samples:
        sample.remove_sample = False
    miles.reward_post_process(args, samples[::-1])  # the hook applies it too, in any order
    assert [s.remove_sample for s in samples] == removed
    arm = arguments({"arm": "random-mask:rho=0.3", "seed": 9})
    for sample in samples:
        sample.reward = float(sample.index % 2)
    _, advantages = miles.reward_post_process(arm, samples)
    solved = [s.reward > 0 for s in samples]
    assert all(a == 0 for a, hit, won in zip(advantages, removed, solved, strict=True) if hit and not won)
    assert all(a != 0 for a, hit, won in zip(advantages, removed, solved, strict=True) if not hit and not won)


def test_a_predictable_mask_looks_at_no_ending() -> None:
    samples = [make(float(i % 2), index=i, turns=1 + i % 4) for i in range(8)]
    samples.append(make(0.0, index=8, loss_mask=None, response_length=4))
    args = arguments({"arm": "none", "filter": "predictable", "filter_turns": 2})
    for _ in range(2):  # the second time changes nothing
        miles.mask_predictable(args, by_group(samples))
        for sample in samples[:8]:
            turns = 1 + sample.index % 4
            expected = mask_of(turns)[:8] + [0] * (len(mask_of(turns)) - 8)
            assert sample.loss_mask == expected[: len(mask_of(turns))]
            assert not sample.remove_sample
    assert samples[8].loss_mask is None


def test_a_predictable_mask_counts_turns_through_siblings() -> None:
    samples = [make(1.0, index=i, rollout_id=5, turns=2) for i in range(2)]
    args = arguments({"arm": "none", "filter": "predictable", "filter_turns": 3})
    miles.reward_post_process(args, samples)
    assert samples[0].loss_mask == mask_of(2)
    assert samples[1].loss_mask == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ["truncated_zero_reward", "truncated"])
def test_removed_samples_keep_their_vote_and_replays_are_filtered_too(name: str) -> None:
    """A replay does not run the filter's flag; the hook does what `fastadv.filter` says."""
    samples = [make(0.0, index=0, status=Status.TRUNCATED), make(1.0, index=1), make(0.0, index=2)]
    _, advantages = miles.reward_post_process(arguments({"estimator": "dr_grpo/verl", "filter": name}), samples)
    assert [s.remove_sample for s in samples] == [True, False, False]
    assert advantages == pytest.approx([-1 / 3, 2 / 3, -1 / 3])


def test_a_coin_needs_an_id() -> None:
    args = arguments({"arm": "none", "filter": "random", "filter_share": 0.5})
    with pytest.raises(ValueError, match="neither rollout_id nor index"):
        miles.mask_random(args, [[make(0.0, index=None, status=Status.TRUNCATED)]])
