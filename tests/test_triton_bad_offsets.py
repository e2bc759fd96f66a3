"""Offsets and tables that are false, where nobody reads values, as on a GPU: NaN or a count that there is not, never a
plausible number, and no access out of bounds, which the strict interpreter refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fastadv.triton_kernels import _launch, _row_tiles, segments, token_counts, turn_ids

import fastadv as fa
from fastadv.rows import UNKNOWN, Rows

BLOCK = segments.BLOCK
BACKENDS = ("triton", "reference")
LEAST = -(2**63)

# Offsets of nine tokens; the rows that are false; tokens that are in no row, or in one that is not among the tokens.
FALSE = {
    "beyond the tokens": ([0, 4, 10], [1], range(4, 9)),
    "far beyond": ([0, 4, 2**40], [1], range(4, 9)),
    "before the end": ([0, 4, 8], [1], [8]),
    "after the start": ([1, 4, 9], [0], [0]),
    "below 0": ([-2, 4, 9], [0], range(4)),
    "no row": ([3, 3, 3], [0, 1], range(9)),
    "all beyond": ([20, 30, 40], [0, 1], range(9)),
    "all below": ([-9, -5, -1], [0, 1], range(9)),
    "decreasing": ([0, 5, 3, 9], [1], []),
    "a gap": ([0, 20, 5, 9], [0, 1], range(5)),
}
every_fault = pytest.mark.parametrize(("offsets", "rows", "lost"), FALSE.values(), ids=FALSE)
each = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _nobody_reads_values() -> Iterator[None]:
    with fa.checks("off"):
        yield


@each
@every_fault
def test_counts_of_false_rows(
    offsets: list[int], rows: list[int], lost: object, backend: str, poisoned_memory: None
) -> None:
    mask, cu_seqlens = torch.ones(9, dtype=torch.bool), torch.tensor(offsets)
    counts = fa.token_counts(mask, cu_seqlens, backend=backend)
    assert (counts == UNKNOWN).nonzero().flatten().tolist() == rows
    assert ((counts == UNKNOWN) | (counts == cu_seqlens.diff())).all() or offsets == [0, 5, 3, 9]
    with pytest.raises(ValueError, match="cu_seqlens does not divide the tokens"):
        fa.segments(torch.zeros(9, dtype=torch.int32), cu_seqlens, backend=backend)
    ratios = fa.sequence_log_ratios(-torch.rand(9), -torch.rand(9), mask, cu_seqlens, backend=backend)
    for field in (ratios.sum, ratios.minimum, ratios.mean()):
        assert field.isnan().nonzero().flatten().tolist() == rows
    assert (ratios.tokens == UNKNOWN).nonzero().flatten().tolist() == rows


def test_false_rows_of_several_programs(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    for module in (token_counts, turn_ids):
        monkeypatch.setattr(module, "ELEMENTS", 64)
    mask, cu_seqlens = torch.ones(600, dtype=torch.bool), torch.tensor([0, 250, 2**40])
    assert _row_tiles.tiles(Rows.trusted(mask, cu_seqlens), 64).parts == 2
    assert fa.token_counts(mask, cu_seqlens, backend="triton").tolist() == [250, UNKNOWN]
    counts = torch.empty(2, dtype=torch.int64)
    turn_ids.turn_counts(mask.int(), cu_seqlens, counts)
    assert counts.tolist() == [2, -1]


@pytest.mark.parametrize(("backend", "times"), [("triton", 1), ("triton", BLOCK // 4), ("reference", 1)])
@every_fault
def test_tokens_in_no_row(
    offsets: list[int], rows: list[int], lost: range | list[int], times: int, backend: str, poisoned_memory: None
) -> None:
    """In blocks of many rows, of one and of none. Where offsets decrease, a token that is in two rows may be lost too,
    or have the number of a turn of neither: `segments` refuses these rows."""
    cu_seqlens = torch.tensor(offsets) * times
    nowhere = torch.tensor([place in lost for place in range(9)]).repeat_interleave(times)
    decreases = bool((cu_seqlens.diff() < 0).any())
    turns = fa.turn_ids_from_mask(torch.ones(9 * times, dtype=torch.bool), cu_seqlens, backend=backend)
    index = fa.Segments(torch.zeros_like(turns), cu_seqlens, torch.arange(len(offsets)), len(offsets) - 1)
    tokens = fa.segment_tokens(fa.SegmentTable(torch.ones(index.count), index), backend=backend)
    for bad, good in ((turns == -2, turns >= -1 if decreases else turns == 0), (tokens.isnan(), tokens == 1)):
        assert (bad | good).all()
        assert bad[nowhere].all() if decreases else torch.equal(bad, nowhere)


@pytest.mark.parametrize("offsets", [[0, LEAST, 9], [LEAST, LEAST, LEAST], [0, 2**63 - 1, 9], [2**63 - 1, 0, LEAST]])
def test_garbage_for_offsets(offsets: list[int], poisoned_memory: None) -> None:
    """Sums and differences of it overflow."""
    mask, cu_seqlens = torch.ones(BLOCK + 9, dtype=torch.bool), torch.tensor(offsets)
    cu_seqlens[cu_seqlens == 9] = mask.shape[0]
    assert (fa.token_counts(mask, cu_seqlens, backend="triton") == UNKNOWN).all()
    turns = fa.turn_ids_from_mask(mask, cu_seqlens, backend="triton")
    assert (turns == -2).all()
    index = fa.Segments(mask.int(), cu_seqlens, cu_seqlens, 2)
    assert fa.segment_tokens(fa.SegmentTable(torch.ones(2), index), backend="triton").isnan().all()


# Offsets of the segments of two rows in a table of four; the rows whose segments are not all in it.
TABLES = [
    ([0, 2, 5], [1]), ([0, 6, 4], [0, 1]), ([-1, 2, 4], [0]), ([0, 2**40, 4], [0, 1]), ([LEAST, 2, 4], [0]),
    ([1, LEAST, 4], [0, 1]),
]  # fmt: skip


@pytest.mark.parametrize("times", [1, BLOCK])
@pytest.mark.parametrize(("offsets", "rows"), TABLES)
def test_a_table_that_the_offsets_leave(offsets: list[int], rows: list[int], times: int) -> None:
    turns = torch.tensor([1, 1, 0, 1, -1, 0, 1], dtype=torch.int32)
    index = fa.Segments(turns.repeat_interleave(times), times * torch.tensor([0, 3, 7]), torch.tensor(offsets), 4)
    tokens = fa.segment_tokens(fa.SegmentTable(torch.ones(4), index), backend="triton")
    lost = torch.tensor([0 in rows] * 3 + [1 in rows] * 4) & (turns >= 0)
    expected = torch.where(lost, torch.nan, (turns >= 0).float())
    torch.testing.assert_close(tokens, expected.repeat_interleave(times), rtol=0, atol=0, equal_nan=True)


def test_a_false_count_of_segments() -> None:
    index = fa.Segments(torch.arange(5, dtype=torch.int32), torch.tensor([0, 5]), torch.tensor([0, 5]), 3)
    tokens = fa.segment_tokens(fa.SegmentTable(torch.ones(3), index), backend="triton")
    assert tokens.isnan().all()  # the row's segments are not what the table holds
    right = fa.segment_tokens(fa.SegmentTable(torch.ones(3), index), backend="reference")
    assert right.isnan().tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("offsets", [[0, 3, 9], [1, 2, 4], [0, -3, 4], [LEAST, 2, 4]])
def test_advantages_of_false_segments(offsets: list[int], poisoned_memory: None) -> None:
    turns, cu_seqlens = torch.tensor([0, 1, 0, 1], dtype=torch.int32), torch.tensor([0, 2, 4])
    index = fa.Segments(turns, cu_seqlens, torch.tensor(offsets), 4)
    table = fa.turn_advantages(torch.tensor([0.0, 1.0]), [0, 0], index, output="segments", backend="triton")
    assert table.values.isnan().any()


def test_advantages_of_a_group_that_there_is_not() -> None:
    """Nor does the table of turns lie anywhere else for it."""
    groups = fa.GroupIndex(torch.tensor([0, 7]), torch.tensor([0, 1]), torch.tensor([0, 2]))
    turns, cu_seqlens = torch.tensor([0, 1, 0, 1], dtype=torch.int32), torch.tensor([0, 2, 4])
    index = fa.segments(turns, cu_seqlens, backend="triton")
    table = fa.turn_advantages(torch.tensor([0.0, 1.0]), groups, index, output="segments", backend="triton")
    assert table.values[2:].isnan().all()


def test_offsets_without_a_row() -> None:
    """Their number is always checked."""
    mask, none = torch.ones(3, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="cu_seqlens has no row, but mask has 3 tokens"):
        fa.token_counts(mask, none, backend="triton")
    with pytest.raises(ValueError, match=r"Segments: turn_ids has shape \[3\]"):
        fa.Segments(mask.int(), none, none, 0)
    with pytest.raises(ValueError, match=r"GroupIndex: index has shape \[1\]"):
        fa.GroupIndex(none, none, none)


# ---- losses ----------------------------------------------------------------------------------------------------------

LOOKED_UP = "the loss's kernels look rows up without asking whether the row holds the token"
lookups = pytest.mark.xfail(strict=True, reason=LOOKED_UP)


def loss_of(offsets: list[int], *, by_row: bool) -> fa.LossOutput:
    log_probs = -torch.rand(9)
    advantages = torch.ones(len(offsets) - 1) if by_row else torch.ones(9)
    mask, cu_seqlens = torch.ones(9, dtype=torch.bool), torch.tensor(offsets)
    config = fa.LossConfig(loss="ppo", loss_agg_mode="token-mean")
    return fa.policy_loss(
        log_probs, log_probs, advantages, mask, config=config, cu_seqlens=cu_seqlens, denominator=1.0,
        backend="triton",
    )  # fmt: skip


@pytest.mark.parametrize("offsets", [pytest.param(v[0], marks=lookups if v[2] else (), id=n) for n, v in FALSE.items()])
def test_a_loss_by_row_with_tokens_in_no_row(offsets: list[int]) -> None:
    loss = loss_of(offsets, by_row=True).loss
    assert loss.isnan() or offsets == [0, 5, 3, 9]


def test_a_loss_that_looks_no_rows_up_needs_none() -> None:
    assert loss_of([0, 4, 8], by_row=False).loss == loss_of([0, 4, 9], by_row=False).loss


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", [2, 3, 0xAA, 0xFF])
def test_every_byte_of_a_bool_mask_but_zero_is_on(byte: int) -> None:
    mask = (byte * torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.uint8)).view(torch.bool)
    plain, cu_seqlens = mask.view(torch.uint8) != 0, torch.tensor([0, 2, 6])
    log_probs = -torch.rand(6)
    index = fa.segments(torch.zeros(6, dtype=torch.int32), cu_seqlens)
    table = fa.SegmentTable(torch.ones(2), index)
    for op in (
        lambda m: fa.turn_ids_from_mask(m, cu_seqlens, backend="triton"),
        lambda m: fa.token_counts(m, cu_seqlens, backend="triton"),
        lambda m: fa.segment_tokens(table, m, backend="triton"),
        lambda m: torch.stack(fa.sequence_log_ratios(log_probs, 0 * log_probs, m, cu_seqlens, backend="triton")[:2]),
    ):
        assert torch.equal(op(mask), op(plain))
    if byte != _launch.FRACTIONAL:  # which the loss takes for a fraction still
        assert fa.policy_loss(log_probs, log_probs, log_probs, mask, backend="triton").loss.isfinite()
