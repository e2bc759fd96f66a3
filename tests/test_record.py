"""The logging record: a batch computed by hand, lines that come back, files that broke."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command import DOCS, documented
from step_records import record
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fastadv as fa
from fastadv.arms.prompt_sums import prompt_sums
from fastadv.record import (
    Bucket,
    ByOutcome,
    Counts,
    LongCorrect,
    RecordedStaleness,
    Spread,
    StepRecord,
    arm_settings,
    hints,
)
from fastadv.record_file import from_line, last_of_each_step, to_line
from fastadv.record_measures import measure
from fastadv.replay.arm_table import arm_row

X = -1  # no version
ARM = next(arm for arm in fa.arms.question_one_arms() if arm.name == "b")  # mask the capped, all vote, leave-one-out


def sampled_batch(**more: Any) -> fa.Batch:
    """Prompt A: solved, failed, capped, solved though cut off. Prompt B: solved twice, and one without a result."""
    rows = [[1, 1, 0, 1], [1], [1, 0, 1, 0, 1], [1, 1], [1, 0, 1], [1, 1, 1, 1], [1, 0]]
    versions = [[3, 3, X, 5], [5], [2, X, 4, X, 5], [5, 5], [5, X, 5], [5] * 4, [1, X]]
    return fa.Batch.of(
        mask=torch.tensor([on for row in rows for on in row]),
        cu_seqlens=torch.tensor([0, *(len(row) for row in rows)]).cumsum(0),
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, math.nan]),
        group_ids=list("AAAABBB"),
        outcomes=["solved", "failed", "budget", "solved", "solved", "solved", "infra"],
        row_ids=torch.arange(10, 17),
        versions=torch.tensor([v for row in versions for v in row]),
        **{"capped": torch.tensor([0, 0, 1, 1, 0, 0, 0]).bool(), **more},
    )


def measured(sampled: fa.Batch, **given: Any) -> StepRecord:
    batch = sampled.select(sampled.outcomes != fa.Outcome.INFRA)
    statistics = fa.freeze(batch)
    return StepRecord.of(
        batch, ARM.apply(batch, statistics), statistics, step=7, arm=ARM, sampled=sampled, **given
    )  # fmt: skip


@pytest.mark.row(23, 24, 36, 40, 47)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_batch_by_hand(layout: str) -> None:
    r = measured(
        getattr(sampled_batch(), layout)(),
        loss_metrics={"clip_fraction": torch.tensor(0.25), "approx_kl": math.nan},
        update_norm=torch.tensor([1.5]),
        learning_rate_multiplier=0.75,
        train_version=6,
        dropped_groups=2,
        ran_tests=torch.tensor([1, 0, 1, 0, 1, 1, 0]),
        seconds=torch.tensor([1.0, 2, 4, 8, 16, 32, 64]),
        wall_clock_s=9.0,
        cost={"gpu_hours": 0.5},
        trainer={"trainer": "mine 1"},
    )
    close = lambda value: pytest.approx(value, rel=1e-6)  # noqa: E731 - the shortest name for it; advantages are float32
    assert (r.step, r.arm, r.run) == (7, "b", "")
    assert r.arm_settings["excludes"] == ["budget"]
    assert r.arm_settings.keys() == {f.name for f in dataclasses.fields(fa.Arm)} - {"name"}
    assert r.versions == {"fastadv": fa.__version__, "torch": torch.__version__, "trainer": "mine 1"}
    assert r.coin_seed is None
    assert (r.prompts, r.mixed_prompts, r.rollouts, r.tokens, r.response_tokens) == (2, 1, 7, 16, 21)
    assert r.census == Counts(4, 1, 1, 1)
    assert (r.success_rate, r.submitted_failure_rate, r.cap_hit_rate) == (4 / 7, 1 / 7, 2 / 7)
    assert r.reward == 4 / 6
    assert r.response_length == ByOutcome(3.0, 13 / 4, 1.0, 5.0, 2.0)
    assert r.turns == ByOutcome(11 / 7, 3 / 2, 1.0, 3.0, 1.0)
    assert r.ran_tests == ByOutcome(4 / 7, 3 / 4, 0.0, 1.0, 0.0)
    # Leave-one-out: A's advantages are 2/3, -2/3, (-2/3), 2/3 over 3, 1, 3 and 2 tokens, and B's are 0 over 6.
    assert r.b == close(2 / 3)
    assert r.b_by_prompt == Spread(2, close(0.75), close(0.25), close(0.5), close(0.75), close(1.0))
    assert r.b_over_sigma == close(2 / 3 / math.sqrt(1 / 6))
    assert r.b_over_sigma_by_prompt == Spread(1, close(1.0), close(0.0), close(1.0), close(1.0), close(1.0))
    assert r.subsidy == close(2 / 3)
    assert (r.excluded_rate, r.excluded_token_rate) == (close(1 / 6), close(3 / 15))
    assert (r.advantage_square, r.advantage_variance) == (close(24 / 9 / 15), close(152 / 81 / 15))
    assert (r.reference_square, r.reference_variance) == (close(4 / 15), close(320 / 81 / 15))
    assert r.staleness == RecordedStaleness(28 / 16, 5.0, 8 / 16, 20 / 16, 2, None)
    watched = fa.monitoring.staleness(
        sampled_batch().versions, 6, sampled_batch().groups, cu_seqlens=sampled_batch().cu_seqlens
    )
    for name in ("mean", "most", "in_flight", "in_queue"):
        assert getattr(r.staleness, name) == getattr(watched, name), name
    assert (r.kept_s, r.excluded_s, r.wall_clock_s) == (59.0, 68.0, 9.0)
    assert (r.clip_ratio, r.update_norm, r.learning_rate_multiplier) == (0.25, 1.5, 0.75)
    assert (r.loss_metrics, r.cost) == ({"approx_kl": None}, {"gpu_hours": 0.5})


@pytest.mark.row(24)
@pytest.mark.parametrize("solved", [1, 4, 8])
def test_b_over_sigma_of_two_rewards(solved: int) -> None:
    """sqrt(p / (1 - p)) for the group's mean: largest on prompts that are nearly solved."""
    rewards = (torch.arange(9) < solved).double()
    batch = fa.Batch.of(
        mask=torch.ones(9), cu_seqlens=torch.arange(10), rewards=rewards, group_ids=[0] * 9,
        outcomes=(1 - rewards).long(),
    )  # fmt: skip
    arm, statistics = fa.Arm("mean", baseline="mean"), fa.freeze(batch)
    r = StepRecord.of(batch, arm.apply(batch, statistics), statistics, step=0, arm=arm)
    p = solved / 9
    assert r.b == pytest.approx(p)
    assert r.b_over_sigma == r.b_over_sigma_by_prompt.mean == pytest.approx(math.sqrt(p / (1 - p)))
    assert r.statistics_hash == statistics.hash


@pytest.mark.row(47)
def test_arms_on_the_same_statistics_report_the_same_hash_and_coins_their_seed() -> None:
    batch = sampled_batch()
    batch = batch.select(batch.outcomes != fa.Outcome.INFRA)
    statistics = fa.freeze(batch)
    records = [
        StepRecord.of(batch, arm.apply(batch, statistics), statistics, step=0, arm=arm)
        for arm in fa.arms.question_one_arms(seed=5)
    ]
    assert {r.statistics_hash for r in records} == {statistics.hash}
    assert {r.arm: r.coin_seed for r in records if r.coin_seed is not None} == {"d0.3": 5, "d0.6": 5}
    assert {r.subsidy for r in records if r.arm in "ae"} == {0.0}
    assert StepRecord.of(
        batch, ARM.apply(batch, statistics), statistics, step=0, arm=ARM, coin_seed=9
    ).coin_seed == 9  # fmt: skip


ENDED = [
    fa.Ending[name] for name in ("SUBMITTED", "SUBMITTED", "LENGTH_CAP", "TURN_CAP", "ENVIRONMENT", "VOID", "ERROR")
]


@pytest.mark.row(47)
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("name", fa.ARMS)
def test_every_named_arm_has_a_record(name: str, layout: str) -> None:
    sampled = sampled_batch()
    ids = fa.TokenIds(torch.arange(21), sampled.cu_seqlens)
    sampled = sampled_batch(endings=torch.tensor(ENDED), token_ids=ids)
    sampled = getattr(sampled, layout)()
    batch, arm = sampled.select(sampled.outcomes != fa.Outcome.INFRA), fa.named_arm(name, seed=5)
    statistics = arm.freeze(batch)
    r = StepRecord.of(batch, arm.apply(batch, statistics), statistics, step=0, arm=arm, sampled=sampled)
    assert from_line(to_line(r)) == r
    assert r.coin_seed == (5 if arm.tosses else None)
    if arm.token_weights is None and not arm.row_weights:
        inside = ~arm.apply(batch, statistics).excluded
        kept = batch.rows.sum(batch.mask.double())[inside].sum() / batch.mask.sum()
        assert r.excluded_token_rate == pytest.approx(1 - float(kept))


def test_the_settings_name_a_rule_and_have_its_fields() -> None:
    rescue = fa.named_arm("rescue:a=0.5,after=3")
    assert arm_settings(rescue)["row_weights"] == {"rule": "rescue", "keep": 0.5, "stale_after": 3}
    assert arm_settings(fa.named_arm("skywork-after"))["condition"] == {"capped": True}  # what is set


def test_nothing_waits_for_values() -> None:
    """Before `read` brings all numbers over at once: whatever would do so earlier raises on fake tensors."""
    sampled = sampled_batch()
    batch = sampled.select(sampled.outcomes != fa.Outcome.INFRA)
    _ = batch.segments, sampled.segments  # index objects: built once a batch, and waited for
    statistics = fa.freeze(batch)
    mode = FakeTensorMode()

    def without_values(value: Any) -> Any:
        if isinstance(value, Tensor):
            return mode.from_tensor(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(without_values, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            made = object.__new__(type(value))
            for name, part in vars(value).items():
                object.__setattr__(made, name, without_values(part))
            return made
        return value

    batch, sampled, statistics = map(without_values, (batch, sampled, statistics))
    seconds = without_values(torch.ones(7))
    with mode, fa.checks("off"):
        found = measure(
            batch, ARM.apply(batch, statistics), statistics, ARM, sampled, train_version=6,
            ran_tests=seconds, seconds=seconds, scalars={"x": seconds[0]},
        )  # fmt: skip
    assert {value.shape for value in found.values()} == {torch.Size([])}
    assert len(found) > 40


@pytest.mark.parametrize(("name", "expected"), [("none", 0.0), ("turn-reached", 0.0), ("mask", None)])
def test_the_subsidy_where_nobody_was_capped(name: str, expected: float | None) -> None:
    """An arm that masks nothing pays 0; what another would have paid nobody can tell. Record, table and audit agree."""
    batch, arm = sampled_batch(capped=torch.zeros(7).bool()).take(torch.tensor([0, 1, 4, 5])), fa.ARMS[name]()
    statistics = arm.freeze(batch)
    result = arm.apply(batch, statistics)
    row = arm_row(arm, prompt_sums(arm, result, batch, statistics)).subsidy
    audited = fa.audit(arm, batch, statistics).over_batch()["subsidy"]
    assert StepRecord.of(batch, result, statistics, step=0, arm=arm).subsidy == expected
    assert [None if math.isnan(x) else x for x in (row, audited)] == [expected, expected]


def test_a_batch_without_rollouts_has_no_rates() -> None:
    empty = fa.Batch.of(
        mask=torch.zeros(0), cu_seqlens=torch.zeros(1, dtype=torch.int64), rewards=torch.zeros(0), group_ids=[],
        outcomes=[], versions=torch.zeros(0, dtype=torch.int64),
    )  # fmt: skip
    statistics = fa.freeze(empty)
    r = StepRecord.of(empty, ARM.apply(empty, statistics), statistics, step=0, arm=ARM, train_version=1)
    assert (r.rollouts, r.tokens, r.prompts) == (0, 0, 0)
    assert (r.success_rate, r.b, r.b_by_prompt, r.advantage_variance) == (None, None, Spread(0), None)
    assert r.staleness == RecordedStaleness()
    assert from_line(to_line(r)) == r


def test_what_does_not_fit_is_refused() -> None:
    sampled = sampled_batch()
    for name, value in (("seconds", torch.ones(6)), ("ran_tests", torch.ones(6).bool())):
        with pytest.raises(ValueError, match=f"StepRecord.of: {name}"):
            measured(sampled, **{name: value})
    with pytest.raises(ValueError, match=r"loss/x has shape \[2\]; it must be one number"):
        measured(sampled, loss_metrics={"x": torch.ones(2)})
    with pytest.raises(ValueError, match="extra has 'step', which is a field"):
        measured(sampled, extra={"step": 1})
    with pytest.raises(ValueError, match=r"field 'extra\.theta' is a Tensor"):
        measured(sampled, extra={"theta": torch.ones(1)})


# ---- lines -----------------------------------------------------------------------------------------------------------

FULL = record(
    3, "b", run="seed 1", coin_seed=-4, staleness=RecordedStaleness(1.5, 3.0, 0.5, 1.0, 2, 1),
    ran_tests=ByOutcome(0.5, 0.75),
    clip_ratio=0.1, update_norm=2.0, learning_rate_multiplier=0.5, loss_metrics={"approx_kl": 0.01, "entropy": None},
    wall_clock_s=1.5, kept_s=3.0, excluded_s=4.0, cost={"gpu_hours": 0.25},
    mask_share_by_difficulty=(Bucket("hard", 0.5, 8), Bucket("easy", None, 0)),
    truncation_rate_by_difficulty=(Bucket("hard", 0.25, 8),), long_correct=(LongCorrect(True, False, 3, -0.5),),
    extra={"lr": 1e-6, "nested": {"list": [1, None, "é\u2028"]}},
)  # fmt: skip


@pytest.mark.row(47)
def test_a_record_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with fa.RecordWriter(path) as writer:
        writer.write(FULL)
        writer.write(record(4))
        assert len(fa.read_records(path)) == 2  # before the file is closed
    assert fa.read_records(path) == [FULL, record(4)]
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["schema"] == 1
    assert first["nested"] == {"list": [1, None, "é\u2028"]}
    assert "extra" not in first
    assert second["clip_ratio"] is None
    with fa.RecordWriter(path) as writer:  # appends
        writer.write(record(5))
    assert [r.step for r in fa.read_records(path)] == [3, 4, 5]


def test_numbers_that_do_not_exist_are_null() -> None:
    r = record(
        b=math.nan, cost={"x": math.inf}, turns=ByOutcome(all=-math.inf), extra={"y": [math.nan]},
        long_correct=[LongCorrect(True, True, 0, math.nan)],
    )  # fmt: skip
    assert (r.b, r.cost, r.turns.all, r.extra) == (None, {"x": None}, None, {"y": [None]})
    assert r.long_correct == (LongCorrect(True, True, 0, None),)
    assert "NaN" not in to_line(r)
    assert "Infinity" not in to_line(r)


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


BROKEN: list[tuple[Any, str]] = [
    ({"schema": 2}, "field 'schema' is 2; this version of fastadv reads 1"),
    ({"schema": True}, "field 'schema' is True"),
    ({"schema": ...}, "field 'schema' is missing"),
    ({"step": ...}, "field 'step' is missing"),
    ({"step": "3"}, "field 'step' is '3'; it must be an integer"),
    ({"step": True}, "field 'step' is True; it must be an integer"),
    ({"step": 1.5}, "field 'step' is 1.5"),
    ({"arm": None}, "field 'arm' is None; it must be a text"),
    ({"b": "much"}, "field 'b' is 'much'; it must be a number"),
    ({"census": {"solved": 1, "failed": 0, "budget": 0}}, "field 'census.infra' is missing"),
    ({"census": {"solved": 1.5, "failed": 0, "budget": 0, "infra": 0}}, "field 'census.solved' is 1.5"),
    ({"turns": {"every": 1.0}}, "field 'turns' has 'every'; it has all, solved"),
    ({"turns": [1.0]}, r"field 'turns' is \[1.0\]; it must be ByOutcome"),
    ({"loss_metrics": {"kl": []}}, "field 'loss_metrics.kl' is"),
    ({"long_correct": [{"penalised": 1, "clipped": True, "n": 1, "mean": None}]}, r"long_correct\[0\].penalised' is 1"),
    ({"mask_share_by_difficulty": {}}, "field 'mask_share_by_difficulty' is"),
    ("[1]", "is a list; a record is an object"),
    ("{", "Expecting property name"),
    ('{"schema": 1, "schema": 1}', "field 'schema' is there twice"),
    ('{"schema": 1, "b": NaN}', "NaN is no finite number; write null"),
    ('{"schema": 1, "b": 1e999}', "1e999 is no finite number; write null"),
    ('{"schema": 1, "loss_metrics": {"kl": [-1e999]}}', "-1e999 is no finite number; write null"),
    ("[" * 100_000, "nested too deeply"),
    ({"more": nested(300)}, r"field 'extra.more\[' is nested too deeply"),
    ({"b": 10**400}, "field 'b' is an integer with 333 hexadecimal digits"),
    ({"step": -(10**400)}, "field 'step' is an integer with 333"),
    ({"loss_metrics": {"kl": 10**400}}, "field 'loss_metrics.kl' is an integer"),
    (b"\xff", "can't decode"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_an_error_names_file_line_and_field(change: Any, message: str, tmp_path: Path) -> None:
    if isinstance(change, dict):
        values = {**json.loads(to_line(FULL)), **change}
        change = json.dumps({name: value for name, value in values.items() if value is not ...})
    line = change if isinstance(change, bytes) else change.encode()
    path = tmp_path / "run.jsonl"
    path.write_bytes(to_line(FULL).encode() + b"\n\n" + line + b"\n" + to_line(FULL).encode() + b"\n")
    with pytest.raises(fa.RecordError, match=rf"run\.jsonl, line 3: .*{message}"):
        fa.read_records(path)


def test_a_field_that_is_no_field_is_the_trainers(tmp_path: Path) -> None:
    line = json.dumps({**json.loads(to_line(record())), "grad_norm": 2.5, "extra": 1})
    assert from_line(line).extra == {"grad_norm": 2.5, "extra": 1}
    assert json.loads(to_line(from_line(line)))["grad_norm"] == 2.5


# ---- files that broke ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1, 40, -2])
def test_a_torn_last_line_is_left_out_and_named(kept: int, tmp_path: Path) -> None:
    path, line = tmp_path / "run.jsonl", to_line(record(1)).encode()
    path.write_bytes(to_line(record(0)).encode() + b"\n" + line[:kept])
    with pytest.warns(UserWarning, match=r"run\.jsonl, line 2: was torn and is left out: b'\{"):
        assert fa.read_records(path) == [record(0)]
    with pytest.warns(UserWarning, match=r"run\.jsonl: its last line was torn and is cut off"):
        fa.RecordWriter(path).write(record(2))
    assert fa.read_records(path) == [record(0), record(2)]


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(to_line(record(0)))
    assert fa.read_records(path) == [record(0)]
    with fa.RecordWriter(path) as writer:
        writer.write(record(1))
    assert fa.read_records(path) == [record(0), record(1)]


def test_a_last_line_nested_too_deeply_is_named_and_not_in_the_writers_way(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"schema": 1, "more": ' + "[" * 100_000)
    with pytest.warns(UserWarning, match="was torn and is left out"):
        assert fa.read_records(path) == []
    with pytest.warns(UserWarning, match="its last line was torn and is cut off"):
        fa.RecordWriter(path).close()


def test_a_writer_that_nobody_has_any_more_lets_go_of_its_file(tmp_path: Path) -> None:
    for step in range(2):
        fa.RecordWriter(tmp_path / "run.jsonl").write(record(step))
    assert len(fa.read_records(tmp_path / "run.jsonl")) == 2


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "run.jsonl", os.write
    with fa.RecordWriter(path) as writer:
        writer.write(record(0))
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:50]))  # a disk that is full
        with pytest.raises(OSError, match="No space left"):
            writer.write(record(1))
        monkeypatch.undo()
        writer.write(record(2))
    assert [r.step for r in fa.read_records(path)] == [0, 2]


def test_two_writers_of_one_file_are_one_too_many(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with fa.RecordWriter(path), pytest.raises(fa.RecordError, match=r"another writer: write from one process, or put"):
        fa.RecordWriter(path)
    with fa.RecordWriter(path) as writer:  # after the first is closed
        writer.write(record(0))
    with pytest.raises(ValueError, match="was closed"):
        writer.write(record(1))


@pytest.mark.parametrize(("name", "written"), [("run.jsonl", None), ("run{rank}.jsonl", "run3.jsonl")])
def test_another_rank_writes_nothing_or_its_own(
    name: str, written: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    with fa.RecordWriter(tmp_path / name) as writer:
        writer.write(record(0))
    assert [path.name for path in tmp_path.iterdir()] == ([written] if written else [])


def test_repeated_steps_count_as_they_were_recorded_last() -> None:
    again = record(1, b=0.75)
    assert last_of_each_step([record(0), record(1), record(2), again]) == [record(0), again, record(2)]


# ---- the page of the format ------------------------------------------------------------------------------------------

PARTS = (Counts, ByOutcome, Spread, RecordedStaleness, Bucket, LongCorrect)


@pytest.mark.row(47)
def test_the_page_has_every_field_and_no_other() -> None:
    text = (DOCS / "step_record.md").read_text()
    named = documented("step_record.md") & set(re.findall(r"`(\w+)`", text))
    spread_and_age = set(hints(Spread)) | set(hints(RecordedStaleness))
    assert named == set(hints(StepRecord)) | spread_and_age
    for part in PARTS:
        for name in hints(part):
            assert f"`{name}`" in text, (part, name)
    assert "`schema` is `1`" in text


@pytest.mark.parametrize("kind", [StepRecord, *PARTS], ids=lambda kind: kind.__name__)
def test_every_field_is_described_where_help_shows_it(kind: Any) -> None:
    described = (kind.__doc__ or "").partition("Attributes:\n")[2]
    named = {name for names in re.findall(r"^ {8}([\w, ]+):", described, re.MULTILINE) for name in names.split(", ")}
    assert named == set(hints(kind))


def test_an_integer_of_too_many_digits_is_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(to_line(record()).replace('"tokens": 100', f'"tokens": {"9" * 5000}'))
    with pytest.raises(fa.RecordError, match=r"line 1: Exceeds the limit"):
        fa.read_records(path)
