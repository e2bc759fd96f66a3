"""Offsets and tables that are false, where nobody reads values, as on a GPU: NaN or a count that there is not, never a
plausible number, and no access out of bounds, which Triton's strict interpreter refuses."""

from __future__ import annotations

from collections.abc import Iterator

import cuda_kernels
import pytest
import torch
from fastadv.triton_kernels import _row_tiles, segments, token_counts, turn_ids

import fastadv as fa
from fastadv.ops.turn_ids import TURN_COUNTS
from fastadv.rows import UNKNOWN, Rows

BLOCK = segments.BLOCK
CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(cuda_kernels.missing() is not None, reason=str(cuda_kernels.missing()))
)
KERNELS = ["triton", CUDA]
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
each = pytest.mark.parametrize("backend", [*KERNELS, "reference"])
each_kernel = pytest.mark.parametrize("backend", KERNELS)


@pytest.fixture
def seven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that an op allocates without writing it holds sevens: a NaN there was written."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, plain=plain, **kwargs: plain(*args, **kwargs).fill_(7))


@pytest.fixture(autouse=True)
def _nobody_reads_values() -> Iterator[None]:
    with fa.checks("off"):
        yield


@each
@every_fault
def test_counts_of_false_rows(offsets: list[int], rows: list[int], lost: object, backend: str, seven: None) -> None:
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


def test_false_rows_of_several_programs(monkeypatch: pytest.MonkeyPatch, seven: None) -> None:
    for module in (token_counts, turn_ids):
        monkeypatch.setattr(module, "ELEMENTS", 64)
    mask, cu_seqlens = torch.ones(600, dtype=torch.bool), torch.tensor([0, 250, 2**40])
    assert _row_tiles.tiles(Rows.trusted(mask, cu_seqlens), 64).parts == 2
    assert fa.token_counts(mask, cu_seqlens, backend="triton").tolist() == [250, UNKNOWN]
    counts = torch.empty(2, dtype=torch.int64)
    turn_ids.turn_counts(mask.int(), cu_seqlens, counts)
    assert counts.tolist() == [2, -1]


@each_kernel
def test_false_rows_that_several_blocks_share(backend: str, seven: None) -> None:
    mask, cu_seqlens = torch.ones(70_000, dtype=torch.bool), torch.tensor([0, 40_000, 2**40])
    assert fa.token_counts(mask, cu_seqlens, backend=backend).tolist() == [40_000, UNKNOWN]
    counts = torch.empty(2, dtype=torch.int64)
    TURN_COUNTS(backend, mask.int(), cu_seqlens, counts)
    assert counts.tolist() == [2, -1]
    ratios = fa.sequence_log_ratios(torch.zeros(70_000), torch.zeros(70_000), mask, cu_seqlens, backend=backend)
    assert ratios.tokens.tolist() == [40_000, UNKNOWN]
    assert ratios.sum.isnan().tolist() == ratios.minimum.isnan().tolist() == [False, True]


# Rows of which every second one ends before it begins: as many as take sums of UNKNOWN past 2^64.
MANY_FALSE = [0, *[9, 5] * 4, 9]


@each
def test_denominators_of_false_rows(backend: str) -> None:
    mask, cu_seqlens = torch.ones(9, dtype=torch.bool), torch.tensor(MANY_FALSE)
    assert (fa.token_counts(mask, cu_seqlens, backend=backend) == UNKNOWN).sum() == 4
    step = fa.denominators(mask, cu_seqlens, backend=backend)
    assert torch.stack([step.tokens, step.sequences]).isnan().all()
    assert step.candidates == 9
    log_probs = -torch.rand(9)
    for name in ("tokens", "sequences"):
        config = fa.LossConfig(denominator=name)
        given = {"config": config, "cu_seqlens": cu_seqlens, "backend": backend}
        assert fa.policy_loss(log_probs, log_probs, torch.ones(9), mask, **given).loss.isnan()


@pytest.mark.parametrize("shape", [(2, 4096), (8192, 3)])
@each_kernel
def test_counts_of_fractions_alone(shape: tuple[int, int], backend: str, seven: None) -> None:
    """As many as would wrap around."""
    mask = torch.full(shape, 0.5)
    assert (fa.token_counts(mask, backend=backend) < 0).all()
    step = fa.denominators(mask, backend=backend)
    assert torch.stack([step.tokens, step.sequences]).isnan().all()


@pytest.mark.parametrize("times", [1, BLOCK // 4])
@each
@every_fault
def test_tokens_in_no_row(
    offsets: list[int], rows: list[int], lost: range | list[int], times: int, backend: str, seven: None
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
@each_kernel
def test_garbage_for_offsets(offsets: list[int], backend: str, seven: None) -> None:
    """Sums and differences of it overflow."""
    mask, cu_seqlens = torch.ones(BLOCK + 9, dtype=torch.bool), torch.tensor(offsets)
    cu_seqlens[cu_seqlens == 9] = mask.shape[0]
    assert (fa.token_counts(mask, cu_seqlens, backend=backend) == UNKNOWN).all()
    turns = fa.turn_ids_from_mask(mask, cu_seqlens, backend=backend)
    assert (turns == -2).all()
    index = fa.Segments(mask.int(), cu_seqlens, cu_seqlens, 2)
    assert fa.segment_tokens(fa.SegmentTable(torch.ones(2), index), backend=backend).isnan().all()


# Offsets of the segments of two rows in a table of four; the rows whose segments are not all in it.
TABLES = [
    ([0, 2, 5], [1]), ([0, 6, 4], [0, 1]), ([-1, 2, 4], [0]), ([0, 2**40, 4], [0, 1]), ([LEAST, 2, 4], [0]),
    ([1, LEAST, 4], [0, 1]),
]  # fmt: skip


@pytest.mark.parametrize("times", [1, BLOCK])
@pytest.mark.parametrize(("offsets", "rows"), TABLES)
@each_kernel
def test_a_table_that_the_offsets_leave(offsets: list[int], rows: list[int], times: int, backend: str) -> None:
    turns = torch.tensor([1, 1, 0, 1, -1, 0, 1], dtype=torch.int32)
    index = fa.Segments(turns.repeat_interleave(times), times * torch.tensor([0, 3, 7]), torch.tensor(offsets), 4)
    tokens = fa.segment_tokens(fa.SegmentTable(torch.ones(4), index), backend=backend)
    lost = torch.tensor([0 in rows] * 3 + [1 in rows] * 4) & (turns >= 0)
    expected = torch.where(lost, torch.nan, (turns >= 0).float())
    torch.testing.assert_close(tokens, expected.repeat_interleave(times), rtol=0, atol=0, equal_nan=True)


@each_kernel
def test_a_false_count_of_segments(backend: str) -> None:
    index = fa.Segments(torch.arange(5, dtype=torch.int32), torch.tensor([0, 5]), torch.tensor([0, 5]), 3)
    tokens = fa.segment_tokens(fa.SegmentTable(torch.ones(3), index), backend=backend)
    assert tokens.isnan().all()  # the row's segments are not what the table holds
    right = fa.segment_tokens(fa.SegmentTable(torch.ones(3), index), backend="reference")
    assert right.isnan().tolist() == [False, False, False, True, True]


def segments_of(offsets: list[int]) -> fa.Segments:
    """Two rollouts of two turns each, whose segments are said to lie there."""
    turns, cu_seqlens = torch.tensor([0, 1, 0, 1], dtype=torch.int32), torch.tensor([0, 2, 4])
    return fa.Segments(turns, cu_seqlens, torch.tensor(offsets), 4)


# Offsets of the segments of two rollouts that have two each.
SEGMENTS = ([0, 3, 9], [1, 2, 4], [0, -3, 4], [LEAST, 2, 4], [0, 2**40, 4], [0, 0, 0], [4, 2, 0])


@pytest.mark.parametrize("offsets", SEGMENTS)
@each_kernel
def test_advantages_of_false_segments(offsets: list[int], backend: str, seven: None) -> None:
    index = segments_of(offsets)
    table = fa.turn_advantages(torch.tensor([0.0, 1.0]), [0, 0], index, output="segments", backend=backend)
    right = fa.turn_advantages(torch.tensor([0.0, 1.0]), [0, 0], segments_of([0, 2, 4]), output="segments")
    assert table.values.isnan().any()
    assert (table.values.isnan() | (table.values == right.values)).all() or backend == "triton"


@each_kernel
def test_advantages_of_a_group_that_there_is_not(backend: str) -> None:
    """Nor does the table of turns lie anywhere else for it."""
    groups = fa.GroupIndex(torch.tensor([0, 7]), torch.tensor([0, 1]), torch.tensor([0, 2]))
    turns, cu_seqlens = torch.tensor([0, 1, 0, 1], dtype=torch.int32), torch.tensor([0, 2, 4])
    index = fa.segments(turns, cu_seqlens, backend=backend)
    table = fa.turn_advantages(torch.tensor([0.0, 1.0]), groups, index, output="segments", backend=backend)
    assert table.values[2:].isnan().all()


# Index, order and offsets of groups that contradict each other.
CONTRADICTIONS = [
    ([0, 0, 1], [0, 1, 2], [0, 2, 2]), ([0, 0, 1], [0, 1, 2], [0, 2, 9]), ([0, 0, 1], [0, 1, 2], [1, 2, 3]),
    ([0, 0, 1], [0, 1, 2], [0, 3, 3]), ([0, 0, 1], [0, 1, 2], [0, -5, 3]), ([0, 0, 1], [0, 1, 2], [0, 2**40, 3]),
    ([0, 0, 1], [0, 1, 2], [LEAST, 2, 3]), ([0, 0, 1], [0, 1, 99], [0, 2, 3]), ([0, 0, 1], [0, 0, 2], [0, 2, 3]),
    ([0, 1, 9], [0, 1, 2], [0, 1, 3]),
]  # fmt: skip


@pytest.mark.skipif(cuda_kernels.missing() is not None, reason=str(cuda_kernels.missing()))
@pytest.mark.parametrize(("index", "order", "offsets"), CONTRADICTIONS)
def test_groups_that_contradict_themselves(index: list[int], order: list[int], offsets: list[int], seven: None) -> None:
    """From the rewards at once, every row is written, as if its group were right or NaN."""
    rewards, segments = torch.tensor([0.5, 1.0, 3.0]), fa.segments(torch.zeros(3, dtype=torch.int32), torch.arange(4))
    groups = fa.GroupIndex(torch.tensor(index), torch.tensor(order), torch.tensor(offsets))
    found = fa.group_advantages(rewards, groups, backend="cuda")
    assert found.isnan().any()
    assert (found.isnan() | (found == fa.group_advantages(rewards, index, backend="cuda"))).all()
    by_turn = fa.turn_advantages(rewards, groups, segments, output="segments", backend="cuda").values
    right = fa.turn_advantages(rewards, index, segments, output="segments", backend="cuda").values
    assert by_turn.isnan().any()
    assert (by_turn.isnan() | (by_turn == right)).all()


@pytest.mark.skipif(cuda_kernels.missing() is not None, reason=str(cuda_kernels.missing()))
def test_a_row_without_a_place(seven: None) -> None:
    """Another is there twice, in two groups. The third group does not know that it lacks the row."""
    groups = fa.GroupIndex(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]), torch.arange(4))
    rewards, segments = torch.tensor([0.5, 1.0, 3.0]), fa.segments(torch.zeros(3, dtype=torch.int32), torch.arange(4))
    assert fa.group_advantages(rewards, groups, backend="cuda")[2].isnan()
    assert fa.turn_advantages(rewards, groups, segments, output="segments", backend="cuda").values[2].isnan()


@each_kernel
def test_offsets_without_a_row(backend: str) -> None:
    """Their number is always checked."""
    mask, none = torch.ones(3, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="cu_seqlens has no row, but mask has 3 tokens"):
        fa.token_counts(mask, none, backend=backend)
    with pytest.raises(ValueError, match=r"Segments: turn_ids has shape \[3\]"):
        fa.Segments(mask.int(), none, none, 0)
    with pytest.raises(ValueError, match=r"GroupIndex: index has shape \[1\]"):
        fa.GroupIndex(none, none, none)


# ---- losses ----------------------------------------------------------------------------------------------------------


def loss_of(offsets: list[int], backend: str, *, by_row: bool) -> fa.LossOutput:
    log_probs = -torch.rand(9)
    advantages = torch.ones(len(offsets) - 1) if by_row else torch.ones(9)
    mask, cu_seqlens = torch.ones(9, dtype=torch.bool), torch.tensor(offsets)
    config = fa.LossConfig(loss="ppo", loss_agg_mode="token-mean")
    return fa.policy_loss(
        log_probs, log_probs, advantages, mask, config=config, cu_seqlens=cu_seqlens, denominator=1.0,
        backend=backend,
    )  # fmt: skip


@pytest.mark.parametrize("offsets", [v[0] for v in FALSE.values()], ids=FALSE)
@each_kernel
def test_a_loss_by_row_with_tokens_in_no_row(offsets: list[int], backend: str) -> None:
    loss = loss_of(offsets, backend, by_row=True).loss
    assert loss.isnan() or offsets == [0, 5, 3, 9]


@each_kernel
def test_a_loss_that_looks_no_rows_up_needs_none(backend: str) -> None:
    torch.manual_seed(0)
    false = loss_of([0, 4, 8], backend, by_row=False).loss
    torch.manual_seed(0)
    assert false == loss_of([0, 4, 9], backend, by_row=False).loss


@each_kernel
@pytest.mark.parametrize("offsets", [v[0] for v in FALSE.values()], ids=FALSE)
def test_a_gradient_that_false_rows_share(offsets: list[int], backend: str, seven: None) -> None:
    """Also of rows that are false though they hold their tokens."""
    cu_seqlens = torch.tensor(offsets)
    log_probs = -torch.rand(9)
    config = fa.LossConfig(loss="gspo", sequence_gradient="mean", loss_agg_mode="token-mean")
    leaf = log_probs.clone().requires_grad_()
    fa.policy_loss(
        leaf, log_probs, torch.ones(9), torch.ones(9, dtype=torch.bool), config=config, cu_seqlens=cu_seqlens,
        denominator=1.0, backend=backend,
    ).loss.backward()  # fmt: skip
    assert leaf.grad is not None
    begins, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    token = torch.arange(9)
    sound = (begins >= 0) & (begins <= token) & (token < ends) & (ends <= 9)
    sound[0] &= cu_seqlens[0] == 0
    sound[-1] &= cu_seqlens[-1] == 9
    assert leaf.grad[~sound.any(0)].isnan().all()


@each_kernel
@pytest.mark.parametrize("times", [1, BLOCK])
@pytest.mark.parametrize(("offsets", "rows"), TABLES)
def test_a_loss_of_a_table_that_the_offsets_leave(
    offsets: list[int], rows: list[int], times: int, backend: str
) -> None:
    turns = torch.tensor([1, 1, 0, 1, -1, 0, 1], dtype=torch.int32).repeat_interleave(times)
    cu_seqlens = times * torch.tensor([0, 3, 7])
    table = fa.SegmentTable(torch.ones(4), fa.Segments(turns, cu_seqlens, torch.tensor(offsets), 4))
    log_probs = torch.zeros(7 * times, requires_grad=True)
    fa.policy_loss(
        log_probs, log_probs.detach(), table, torch.ones(7 * times, dtype=torch.bool), cu_seqlens=cu_seqlens,
        denominator=1.0, backend=backend,
    ).loss.backward()  # fmt: skip
    lost = torch.tensor([0 in rows] * 3 + [1 in rows] * 4).repeat_interleave(times) & (turns >= 0)
    assert log_probs.grad is not None
    assert log_probs.grad.isnan().tolist() == lost.tolist()


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
    assert fa.policy_loss(log_probs, log_probs, log_probs, mask, backend="triton").loss.isfinite()


# ---- the C++ kernels, which check all offsets ------------------------------------------------------------------------


@pytest.mark.parametrize("offsets", [*(v[0] for v in FALSE.values()), [0, LEAST, 9]])
def test_the_cpu_kernels_refuse_false_rows(offsets: list[int]) -> None:
    mask, cu_seqlens, log_probs = torch.ones(9, dtype=torch.bool), torch.tensor(offsets), -torch.rand(9)
    for op in (
        lambda: fa.token_counts(mask, cu_seqlens, backend="cpu"),
        lambda: fa.turn_ids_from_mask(mask, cu_seqlens, backend="cpu"),
        lambda: fa.segments(mask.int(), cu_seqlens, backend="cpu"),
        lambda: fa.sequence_log_ratios(log_probs, log_probs, mask, cu_seqlens, backend="cpu"),
        lambda: loss_of(offsets, "cpu", by_row=True),
    ):
        with pytest.raises(ValueError, match="cu_seqlens"):
            op()


@pytest.mark.parametrize("offsets", [*SEGMENTS, [0, 2**62, 4]])
def test_the_cpu_kernels_refuse_false_segments(offsets: list[int]) -> None:
    table = fa.SegmentTable(torch.ones(4), segments_of(offsets))
    log_probs, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    with pytest.raises(ValueError, match="segment offsets"):
        fa.segment_tokens(table, backend="cpu")
    with pytest.raises(ValueError, match="segment offsets"):
        fa.policy_loss(log_probs, log_probs, table, mask, cu_seqlens=torch.tensor([0, 2, 4]), backend="cpu")
    with pytest.raises(ValueError, match="segment"):
        fa.turn_advantages(torch.tensor([0.0, 1.0]), [0, 0], segments_of(offsets), output="segments", backend="cpu")


def test_the_cpu_kernels_refuse_turns_beyond_their_table() -> None:
    """Whose numbers wrap around to a small sum."""
    offsets = torch.tensor([0, 2**62, 0, 2**62, 0, 2**62, 0, 2**62, 4])
    index = fa.Segments(torch.zeros(8, dtype=torch.int32), torch.arange(9), offsets, 4)
    with pytest.raises(ValueError, match="turn offsets"):
        fa.turn_advantages(torch.zeros(8), list(range(8)), index, output="segments", backend="cpu")


@pytest.mark.parametrize(("index", "order", "offsets"), [c for c in CONTRADICTIONS if c[2] != [0, 3, 3]])
def test_the_cpu_kernels_refuse_false_groups(index: list[int], order: list[int], offsets: list[int]) -> None:
    """But for an order that only `index` contradicts, which the moments do not read."""
    rewards, segments = torch.tensor([0.5, 1.0, 3.0]), fa.segments(torch.zeros(3, dtype=torch.int32), torch.arange(4))
    groups = fa.GroupIndex(torch.tensor(index), torch.tensor(order), torch.tensor(offsets))
    with pytest.raises(ValueError, match="group"):
        fa.group_advantages(rewards, groups, backend="cpu")
    with pytest.raises(ValueError, match="group"):
        fa.turn_advantages(rewards, groups, segments, output="segments", backend="cpu")


@each
def test_a_weight_of_0_does_not_exclude_a_token_in_no_row(backend: str) -> None:
    """Whose weight it is nobody knows."""
    log_probs, advantages, mask = -torch.rand(9), torch.ones(9), torch.ones(9, dtype=torch.bool)
    given = {"cu_seqlens": torch.tensor([0, 4, 8]), "weights": torch.zeros(2), "denominator": 1.0}
    assert fa.policy_loss(log_probs, log_probs, advantages, mask, **given, backend=backend).loss.isnan()
