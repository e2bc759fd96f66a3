"""Results of the gradient projections as people read them: by name, as a table, and in one line instead of tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gradproj_models import ragged_batch

import fastadv as fa
from fastadv.gradproj import Projections, RolloutSketches, SegmentGram, project
from fastadv.intervals import Interval
from fastadv.replay.gradient_tables import projection_tables


def gram_of(batch: fa.Batch) -> SegmentGram:
    """Of gradients of five numbers a turn."""
    segments = batch.segments.count
    u = torch.randn(segments, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.repeat_interleave(torch.arange(batch.num_rollouts), batch.segments.turns())
    turns = torch.arange(segments) - batch.segments.offsets[rows]
    return SegmentGram(u @ u.t(), rows, turns, 4864, 4896).with_rollouts(batch)


@pytest.fixture(scope="module")
def batch() -> fa.Batch:
    rollouts = ragged_batch(16, turns=3)
    outcomes = torch.arange(16) % 3
    return replace(rollouts, outcomes=outcomes, capped=outcomes == 2)


@pytest.fixture(scope="module")
def found(batch: fa.Batch) -> Projections:
    arms = [fa.Arm("a"), fa.Arm("b", excludes=(fa.Outcome.BUDGET,)), fa.Arm("mean", baseline="mean")]
    return project(gram_of(batch), arms, draws=50)


def test_comparisons_by_name(found: Projections) -> None:
    assert found.arms == ("a", "b", "mean")
    assert found.scopes[:2] == ("all", "turn 1")
    by_name = {(row.arm, row.scope, row.estimator): row.comparison for row in found.rows}
    assert found["b"] is by_name["b", "all", "plug-in"]
    assert found["b", "turn 1"] is by_name["b", "turn 1", "plug-in"]
    for key, one in by_name.items():
        assert found[key] is one
    for key, message in (
        ("c", "no arm 'c'; there are 'a', 'b', 'mean'"),
        (("b", "turn 9"), "no scope 'turn 9'; there are 'all', 'turn 1', "),
        (("b", "all", "median"), "no estimator 'median'; there are 'plug-in', 'u-statistic'"),
        (("b", "all", "plug-in", "more"), "has arms, scopes and estimators; got"),
        ((), "no arm None"),
        (1, "no arm 1"),
    ):
        with pytest.raises(KeyError, match=message):
            found[key]


def test_projections_print_as_a_table(found: Projections) -> None:
    lines = repr(found).split("\n")
    assert lines[0].startswith(f"Projections of 3 arms against 'a', {found.prompts} prompts, noise floor ")
    assert lines[1].split() == [
        "arm", "estimator", "cosine", "norm_ratio", "difference", "cap_cosine", "explained", "alignment",
    ]  # fmt: skip
    assert [line.split()[:2] for line in lines[2:8]] == [
        [arm, estimator] for arm in ("a", "b", "mean") for estimator in ("plug-in", "u-statistic")
    ]
    assert f"{found['b'].difference.value:.3f}" in lines[4]
    assert lines[8] == f"scopes: {', '.join(found.scopes)}"
    assert found.table("turn 1") != found.table()
    assert repr(Projections((), 0.0, Interval(0.0), 3)) == "Projections(no arm has a gradient)"


def test_a_number_prints_with_its_interval() -> None:
    assert [str(e) for e in (Interval(0.5, -1.0, 2.0), Interval(0.5), Interval(float("nan")))] == [
        "0.500 (-1.00 to 2.00)", "0.500", "–",
    ]  # fmt: skip


def test_a_slope_is_shown_with_its_interval_or_not_at_all(found: Projections) -> None:
    """Its denominator may be noise around 0."""

    def shown(slope: Interval) -> tuple[str, str]:
        rows = [replace(row, comparison=replace(row.comparison, cap_slope=slope)) for row in found.rows]
        whole, *parts = projection_tables(replace(found, rows=tuple(rows)))
        assert parts
        assert not any("slope" in table.columns for table in parts)
        (row,) = (row for row in whole.rows if row[:2] == ["b", "slope"])
        return row[2], row[3]

    assert shown(Interval(0.5)) == ("–", "–")
    assert shown(Interval(0.5, 0.25, 0.75)) == ("0.500", "0.25 to 0.75")


def test_two_arms_of_one_name_are_refused(batch: fa.Batch) -> None:
    with pytest.raises(ValueError, match="two arms are called 'b'; give each a name of its own"):
        project(gram_of(batch), [fa.Arm("a"), fa.Arm("b"), fa.Arm("b", baseline="mean")])


def test_reprs_are_a_line_without_tensors(batch: fa.Batch) -> None:
    tokens, sampled, turns = batch.mask.shape[0], int(batch.mask.sum()), batch.segments.count
    assert repr(batch) == (
        f"Batch(16 rollouts in 8 groups, {turns} turns, {tokens} tokens, {sampled} of them sampled, packed [{tokens}] "
        "on cpu, with token_ids)"
    )
    width = int(batch.lengths.max())
    assert f"{tokens} tokens" in repr(batch.padded())
    assert f"padded [16, {width}] on cpu" in repr(batch.padded())
    gram = gram_of(batch)
    assert repr(gram) == (
        f"SegmentGram({turns} segments, level turn, gram [{turns}, {turns}] on cpu, with 16 rollouts, 4,864 of 4,896 "
        "parameters, float32, temperature 1)"
    )
    assert "without rollouts" in repr(replace(gram, rollouts=None, tokens=None))
    sketches = RolloutSketches(torch.zeros(3, 2, 64, dtype=torch.int64), torch.arange(3), 0.5, 7, 10, 12)
    assert repr(sketches) == (
        "RolloutSketches(3 rollouts, 2 copies of 64 slots on cpu, 10 of 12 parameters, quantum 0.5, seed 7)"
    )


def test_a_batch_without_values_has_a_repr(batch: fa.Batch) -> None:
    fields = {name: value.to("meta") for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    assert "on meta" in repr(replace(batch, **fields))
