"""Step records and metrics from Miles' and slime's log hooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fastadv.integrations import miles
from fastadv.integrations.miles import records
from fastadv.integrations.miles.options import Options
from fastadv.integrations.miles.records import record_of
from fastadv.integrations.miles.samples import LOSS_WEIGHT, STALENESS, TAKEN
from miles_standins import SAMPLES, Status, arguments, drawn, make

import fastadv as fa


def logged(samples: list[Any], mapping: dict[str, Any], **metrics: Any) -> dict[str, Any]:
    assert miles.rollout_log(7, arguments(mapping), samples, metrics, 3.5) is False  # the trainer logs on
    return metrics


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_record_of_a_step_counts_what_happened(kind: type, tmp_path: Path) -> None:
    samples = drawn(torch.Generator().manual_seed(3), 6, kind=kind)
    samples += [make(None, group=3, index=1000, kind=kind), make(0.0, group=3, index=1001, status=Status.ABORTED)]
    file = str(tmp_path / "steps.jsonl")
    metrics = logged(samples, {"arm": "mask", "record": file, "run": "a"}, own=1)
    (record,) = fa.read_records(file)
    assert (record.step, record.arm, record.run) == (7, "mask", "a")
    assert record.rollouts == len(samples)
    assert record.census.infra == 2
    cut = [s.status == Status.TRUNCATED or "exit_status" in s.metadata for s in samples]
    assert record.census.budget == sum(c and not (s.reward or 0) > 0 for c, s in zip(cut, samples, strict=True))
    assert record.tokens == sum(sum(s.loss_mask) for s in samples)
    assert record.response_tokens == sum(s.response_length for s in samples)
    turns = [sum(b > a for a, b in zip([0, *s.loss_mask], s.loss_mask, strict=False)) for s in samples]
    assert record.turns.all == pytest.approx(sum(turns) / len(turns))
    assert record.extra["rollout_s"] == 3.5
    assert record.statistics_hash
    assert record.subsidy is not None
    assert metrics["rollout/fastadv/census/infra"] == 2
    assert metrics["rollout/fastadv/b"] == pytest.approx(record.b)
    assert metrics["own"] == 1


def test_a_record_is_that_of_a_replay_of_the_same_samples() -> None:
    """The arm sees in the hook what it sees in a batch of the same rollouts."""
    from test_miles_reward import whole_batch

    samples = drawn(torch.Generator().manual_seed(4), 6)
    batch = whole_batch(samples)
    for name in ("mask", "turn-reached", "survivors"):
        mapping = {"arm": name} | ({"turns": "init"} if name == "turn-reached" else {})
        args = arguments(mapping)
        found = record_of(0, args, samples, Options.of(args), {}, 0.0)
        arm = fa.named_arm(name)
        statistics = arm.freeze(batch)
        expected = fa.StepRecord.of(batch, arm.apply(batch, statistics), statistics, step=0, arm=arm)
        assert found is not None
        for field in (
            "b",
            "b_over_sigma",
            "advantage_variance",
            "subsidy",
            "excluded_rate",
            "census",
            "turns",
            "reward",
        ):
            assert getattr(found, field) == getattr(expected, field), field


def test_staleness_of_the_buffer_is_in_the_record() -> None:
    samples = [
        make(float(i), group=g, index=2 * g + i, metadata={LOSS_WEIGHT: 1.0, STALENESS: g, TAKEN: 1})
        for g in range(3)
        for i in range(2)
    ]
    args = arguments({"arm": "never-drop"})
    metrics = {"rollout/fastadv/stale_groups_dropped": 4, "rollout/fastadv/stale_groups_rescued": 2}
    record = record_of(0, args, samples, Options.of(args), metrics, 0.0)
    assert record is not None
    assert record.staleness is not None
    assert (record.staleness.dropped_groups, record.staleness.kept_groups) == (4, 2)
    assert (record.extra["staleness_mean"], record.extra["staleness_most"]) == (1.0, 2)


def test_the_clock_runs_from_record_to_record() -> None:
    samples = drawn(torch.Generator().manual_seed(5), 3)
    args = arguments({"arm": "mask", "run": "clock"})
    found = [record_of(step, args, samples, Options.of(args), {}, 0.0) for step in range(2)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].wall_clock_s is None
    assert found[1].wall_clock_s is not None
    assert 0 < found[1].wall_clock_s < 60


def test_the_filter_of_the_options_is_in_force_before_masks_are_made() -> None:
    samples = [make(0.0, index=0, status=Status.TRUNCATED), make(1.0, index=1)]
    logged(samples, {"arm": "none", "filter": "truncated_zero_reward"})
    assert [s.remove_sample for s in samples] == [True, False]


def test_estimators_are_counted_and_have_no_record(tmp_path: Path) -> None:
    samples = [make(0.0, index=0, status=Status.TRUNCATED), make(1.0, index=1)]
    metrics = logged(samples, {"estimator": "grpo/miles"})
    assert metrics["rollout/fastadv/census/budget"] == 1
    assert metrics["rollout/fastadv/cap_hit_rate"] == 0.5
    with pytest.raises(ValueError, match=r"set fastadv\.arm, or leave fastadv\.record out"):
        logged(samples, {"estimator": "grpo/miles", "record": str(tmp_path / "x.jsonl")})
    assert miles.rollout_log(0, arguments({"arm": "mask"}), samples, None, 1.0) is False


def test_evaluations_are_counted_by_set() -> None:
    metrics: dict[str, Any] = {}
    data = {
        "math": {"rewards": [1.0, 0.0], "samples": [make(1.0, index=0), make(0.0, index=1, status=Status.TRUNCATED)]},
        "bare": {"rewards": [1.0]},
    }
    assert miles.eval_rollout_log(3, arguments({"arm": "turn-reached", "turns": "init"}), data, metrics) is False
    assert metrics["eval/fastadv/math/census/solved"] == 1
    assert metrics["eval/fastadv/math/census/budget"] == 1
    assert not [name for name in metrics if "bare" in name]
    assert miles.eval_rollout_log(3, arguments({"arm": "mask"}), data, None) is False


def test_a_record_waits_for_what_the_training_process_says(tmp_path: Path) -> None:
    samples = drawn(torch.Generator().manual_seed(6), 3)
    file, norms = str(tmp_path / "steps.jsonl"), tmp_path / "norms.jsonl"
    mapping = {"arm": "mask", "record": file, "updates": {"file": str(norms)}}
    for step in range(3):
        miles.rollout_log(step, arguments(mapping), samples, {}, 1.0)
        if step == 1:  # two local updates, of which the first was taken twice, after a restart
            said = [(0, 9.0, 1.0, None), (0, 0.5, 1.0, 0.25), (1, 0.75, 2.0, None)]
            with norms.open("a") as out:
                for number, norm, multiplier, clip in said:
                    line = {"rollout_id": 1, "step_id": number, "update_norm": norm, "multiplier": multiplier}
                    out.write(json.dumps({**line, "clip_ratio": clip}) + "\n")
                out.write('{"rollout_id": 1, "step_id": 2, "upd')  # being written
    found = fa.read_records(file)
    assert [(r.step, r.extra.get("local_update")) for r in found] == [(0, None), (1, 0), (1, 1)]
    assert [(r.update_norm, r.learning_rate_multiplier, r.clip_ratio) for r in found] == [
        (None, None, None), (0.5, 1.0, 0.25), (0.75, 2.0, None)
    ]  # fmt: skip
    records._complete(file, str(norms))  # as at exit
    assert [r.step for r in fa.read_records(file)] == [0, 1, 1, 2]
    records._complete(file, str(norms))
    assert len(fa.read_records(file)) == 4
