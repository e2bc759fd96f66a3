"""Triton kernels of turns, segments and row sums, in Triton's interpreter."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from fastadv.triton_kernels import _row_tiles, segments, sequence_log_ratios, token_counts, turn_ids
from fastadv.triton_kernels._rows import rows_of_tokens
from torch import Tensor
from triton_batches import batch, both, same

import fastadv as fa
from fastadv.rows import Rows

BLOCK = segments.BLOCK
EDGES = (
    (),
    (0,),
    (0, 0, 0),
    (1,),
    (7, 1, 0, 40, 19),
    (BLOCK - 1,),
    (BLOCK,),
    (BLOCK + 1,),
    (0, 0, 5, BLOCK - 5, 0, 3, 2 * BLOCK, 17, 0, 0),  # rows that end where blocks do, and rows without a token
    (40,) * 110,  # many rows in each of several blocks
    (5 * token_counts.ELEMENTS + 5,),  # a row for several programs
)
LAYOUTS = [(lengths, padded) for lengths in EDGES for padded in (False, True)]
every_layout = pytest.mark.parametrize(
    ("lengths", "padded"),
    LAYOUTS,
    ids=[f"{len(n)}x{max(n, default=0)}-{'padded' if p else 'packed'}" for n, p in LAYOUTS],
)


@every_layout
def test_turns_and_counts(lengths: tuple[int, ...], padded: bool, poisoned_memory: None) -> None:
    for density in (0.0, 0.95, 1.0) if sum(lengths) < BLOCK else (0.95,):
        mask, cu_seqlens = batch(lengths, padded, density)
        both(fa.turn_ids_from_mask, mask, cu_seqlens)
        both(fa.token_counts, mask, cu_seqlens)
        for dtype in (torch.int32, torch.int64):
            turns = fa.turn_ids_from_mask(mask, cu_seqlens, backend="reference").to(dtype)
            mine, right = (fa.segments(turns, cu_seqlens, backend=name) for name in ("triton", "reference"))
            same(mine.offsets, right.offsets)


@every_layout
def test_segment_tokens(lengths: tuple[int, ...], padded: bool, poisoned_memory: None) -> None:
    mask, cu_seqlens = batch(lengths, padded)
    turns = fa.turn_ids_from_mask(mask, cu_seqlens, backend="reference")
    for values, ids in product((torch.float32, torch.float64), (torch.int32, torch.int64)):
        index = fa.segments(turns.to(ids), cu_seqlens, backend="reference")
        table = fa.SegmentTable(torch.randn(index.count, dtype=values), index)
        both(fa.segment_tokens, table, mask & (torch.rand(mask.shape) < 0.8))
        if ids == torch.int32:
            both(fa.segment_tokens, table)


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_no_gradient_flows_to_a_segment_table(backend: str) -> None:
    """On no backend, rather than on the one that could."""
    index = fa.segments(torch.tensor([0, -1, 1], dtype=torch.int32))
    tokens = fa.segment_tokens(fa.SegmentTable(torch.ones(2, requires_grad=True), index), backend=backend)
    assert not tokens.requires_grad


@every_layout
def test_log_ratios(lengths: tuple[int, ...], padded: bool, poisoned_memory: None) -> None:
    mask, cu_seqlens = batch(lengths, padded)
    floats = (torch.float32, torch.bfloat16, torch.float16)
    pairs = product(floats, floats) if len(lengths) == 5 else [(torch.float32, torch.float32)]
    for new, old in pairs:
        log_probs, old_log_probs = -2 * torch.rand(mask.shape), -2 * torch.rand(mask.shape)
        old_log_probs[torch.rand(mask.shape) < 0.01] = torch.nan
        for missing in ("nan", "skip"):
            given = (log_probs.to(new), old_log_probs.to(old))
            mine = fa.sequence_log_ratios(*given, mask, cu_seqlens, missing=missing, backend="triton")
            exact = [t.double() for t in given]
            right = fa.sequence_log_ratios(*exact, mask, cu_seqlens, missing=missing, backend="reference")
            for a, b in zip(mine, right, strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_long_sums_are_as_good_as_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's elements add thousands of steps: 1 + 2^-12 has more digits than float32 keeps beside 4096."""
    monkeypatch.setattr(sequence_log_ratios, "ELEMENTS", 64)
    monkeypatch.setattr(_row_tiles, "SHORT_WIDTH", 64)
    monkeypatch.setattr(_row_tiles, "PARTS", 1)
    steps = 300
    log_probs = torch.full((steps * 64,), -1 - 2.0**-12)
    log_probs[:64] = -(2.0**13)
    mine = fa.sequence_log_ratios(log_probs, torch.zeros_like(log_probs), log_probs < 0, backend="triton")
    assert mine.sum.item() == log_probs.double().sum().item()
    assert log_probs.view(steps, 64).cumsum(0)[-1].sum().item() != mine.sum.item()


def test_many_programs_for_a_row(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    """More parts than are put together at once."""
    for module in (sequence_log_ratios, token_counts, turn_ids):
        monkeypatch.setattr(module, "ELEMENTS", 64)
    monkeypatch.setattr(_row_tiles, "MERGE", 2)
    monkeypatch.setitem(sequence_log_ratios.MERGE, "PARTS", 2)
    mask, cu_seqlens = batch((1500, 1700))
    turns = fa.turn_ids_from_mask(mask, cu_seqlens, backend="cpu")
    turns[100] = 900
    log_probs = -torch.rand(mask.shape)
    log_probs[100] = -9.0
    old = torch.where(torch.rand(mask.shape) < 0.1, torch.nan, 0.0)
    old[100] = 0
    mask[100] = True
    assert _row_tiles.tiles(Rows.of("", "", mask, cu_seqlens), 64).parts == 7
    both(fa.token_counts, mask, cu_seqlens)
    same(*(fa.segments(turns, cu_seqlens, backend=name).offsets for name in ("triton", "cpu")))
    mine, right = (
        fa.sequence_log_ratios(log_probs, old, mask, cu_seqlens, missing="skip", backend=name)
        for name in ("triton", "cpu")
    )
    torch.testing.assert_close(mine, right, rtol=1e-6, atol=0)
    # What is wrong in the first of the parts stays visible beside what the others hold.
    turns[3], marked = -2, mask.float()
    marked[3] = 0.5
    counts = torch.empty(2, dtype=torch.int64)
    turn_ids.turn_counts(turns, cu_seqlens, counts)
    assert counts.tolist() == [-1, int(turns[1500:].max()) + 1]
    with fa.checks("off"):
        counted = fa.token_counts(marked, cu_seqlens, backend="triton")
        ratios = fa.sequence_log_ratios(log_probs, old, marked, cu_seqlens, missing="skip", backend="triton")
    assert counted.tolist() == ratios.tokens.tolist() == [-(2**62), int(mask[1500:].sum())]
    assert ratios.sum.isnan().tolist() == ratios.minimum.isnan().tolist() == [True, False]


def test_turns_of_a_row_of_many_blocks(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    """More blocks than are counted at once."""
    monkeypatch.setattr(turn_ids, "BLOCK", 64)
    monkeypatch.setattr(turn_ids, "COUNTS", tl.constexpr(4))
    mask, cu_seqlens = batch((30, 64 * 11, 90))
    both(fa.turn_ids_from_mask, mask, cu_seqlens)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, which is the interpreter's GPU
def test_infinite_log_ratios() -> None:
    log_probs = torch.tensor([-1.0, -torch.inf, -2.0, -1.0, torch.inf, -0.5, -torch.inf, torch.inf])
    given = (log_probs, torch.zeros(8), torch.ones(8, dtype=torch.bool), torch.tensor([0, 3, 6, 8]))
    mine, right = (fa.sequence_log_ratios(*given, backend=name) for name in ("triton", "cpu"))
    for a, b in zip(mine, right, strict=True):
        same(a, b)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_garbage_under_the_mask(garbage: float) -> None:
    mask, cu_seqlens = batch((7, 1, 0, 40, 19))
    clean = [torch.where(mask, -torch.rand(mask.shape), 0.0) for _ in range(2)]
    dirty = [torch.where(mask, t, garbage) for t in clean]
    for a, b in zip(
        fa.sequence_log_ratios(*dirty, mask, cu_seqlens, missing="skip", backend="triton"),
        fa.sequence_log_ratios(*clean, mask, cu_seqlens, missing="skip", backend="triton"),
        strict=True,
    ):
        same(a, b)


def test_strides_and_masks_of_every_type() -> None:
    mask, _ = batch((19, 40, 7), padded=True)
    turns = fa.turn_ids_from_mask(mask, backend="reference")
    wide = torch.zeros(3, 80, dtype=torch.int32)
    wide[:, ::2] = turns
    strided = mask.T.contiguous().T
    assert not strided.is_contiguous()
    assert not wide[:, ::2].is_contiguous()
    same(fa.turn_ids_from_mask(strided, backend="triton"), turns)
    both(fa.token_counts, strided)
    same(fa.segments(wide[:, ::2], backend="triton").offsets, fa.segments(turns, backend="reference").offsets)
    index = fa.segments(wide[:, ::2], backend="triton")
    both(fa.segment_tokens, fa.SegmentTable(torch.randn(index.count), index), strided)
    for dtype in (torch.uint8, torch.int64, torch.int16, torch.float32, torch.bfloat16, torch.float64):
        same(fa.turn_ids_from_mask((3 * mask).to(dtype), backend="triton"), turns)
        both(fa.token_counts, (3 * mask).to(dtype))
    x = -torch.rand(3, 80)[:, ::2]
    mine, right = (fa.sequence_log_ratios(x, x.flip(0), strided, backend=name) for name in ("triton", "reference"))
    torch.testing.assert_close(mine.sum, right.sum, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("value", [0.5, torch.nan])
def test_a_fractional_mask_makes_nothing_plausible(row: int, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody reads values, as on a GPU."""
    length = _row_tiles.STEPS * token_counts.ELEMENTS + 1  # for two programs
    mask = torch.ones(2, length)
    mask[row, -2 if row else 5] = value
    log_probs = torch.zeros(2, length)
    for programs in (1, _row_tiles.PROGRAMS):
        monkeypatch.setattr(_row_tiles, "PROGRAMS", programs)
        with fa.checks("off"):
            counts = fa.token_counts(mask, backend="triton")
            ratios = fa.sequence_log_ratios(log_probs, log_probs, mask, backend="triton")
            turns = fa.turn_ids_from_mask(mask[:, -20:], backend="triton")
        assert counts.tolist() == [-(2**62) if r == row else length for r in range(2)]
        assert ratios.sum.isnan().tolist() == ratios.minimum.isnan().tolist() == [r == row for r in range(2)]
        assert ratios.tokens.tolist() == counts.tolist()
        assert ratios.mean().isnan()[row]
        assert (turns < -1).sum() == row  # the other row's is not among the last twenty
    index = fa.segments(torch.zeros(2, length, dtype=torch.int32), backend="triton")
    with fa.checks("off"):
        tokens = fa.segment_tokens(fa.SegmentTable(torch.ones(2), index), mask, backend="triton")
    assert torch.equal(tokens.isnan(), mask != 1)


def test_turns_below_minus_one() -> None:
    turns = torch.full((2 * BLOCK,), 3, dtype=torch.int64)
    cu_seqlens = torch.tensor([0, 5, 2 * BLOCK])
    for bad in (-2, -(2**40)):
        turns[BLOCK] = bad
        with pytest.raises(ValueError, match="below -1"):
            fa.segments(turns, cu_seqlens, backend="triton")
        counts = torch.empty(2, dtype=torch.int64)
        turn_ids.turn_counts(turns, cu_seqlens, counts)
        assert counts.tolist() == [4, -1]
    turns[BLOCK] = 2**40
    with pytest.raises(ValueError, match="are not supported"):
        fa.segments(turns, cu_seqlens, backend="triton")


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [5, BLOCK + 3])
def test_a_turn_that_the_table_lacks_is_nan(ids: torch.dtype, count: int) -> None:
    turns = torch.ones(count, dtype=ids)
    turns[2] = 2 if ids == torch.int32 else 2**33 + 1
    index = fa.Segments(turns, torch.tensor([0, count]), torch.tensor([0, 2]), 2)
    tokens = fa.segment_tokens(fa.SegmentTable(torch.tensor([1.0, 2.0]), index), backend="triton")
    assert tokens[2].isnan()
    assert (tokens == 2).sum() == count - 1


@triton.jit(do_not_specialize=["rows", "width", "start", "count"])
def rows_kernel(cu_seqlens, out, rows, width, start, count, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    first = start.to(tl.int64)
    row, held = rows_of_tokens(cu_seqlens, rows, width, first, count, BLOCK, PACKED)
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.where(held | (first + place >= count), row, -1))


def rows_of(cu_seqlens: Tensor, width: int, start: int, count: int, block: int) -> Tensor:
    out = torch.empty(block, dtype=torch.int64)
    packed = width == 0
    rows = cu_seqlens.shape[0] - 1 if packed else count // width
    rows_kernel[(1,)](cu_seqlens, out, rows, width, start, count, BLOCK=block, PACKED=packed)
    assert 0 <= int(out.min()) <= int(out.max()) < rows  # also past the last token
    return out[: count - start]


@pytest.mark.parametrize("far", [0, 2**31, 2**40])
def test_rows_of_tokens(far: int) -> None:
    """Thousands of rows, many of them empty, also where offsets are beyond int32."""
    lengths = torch.randint(0, 9, (3000,)) * (torch.rand(3000) < 0.3)
    lengths[0] += far
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    count = int(cu_seqlens[-1])
    for start in {0, far, far + 1, far + 256, count - 300, count - 1, count - 256}:
        tokens = torch.arange(start, min(count, start + 256))
        expected = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
        assert torch.equal(rows_of(cu_seqlens, 0, start, count, 256)[: tokens.shape[0]], expected)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 100, 255, 256, 257, 1000, 2**31 + 1])
def test_rows_of_padded_tokens(width: int) -> None:
    count = 5 * max(width, 200) // width * width
    for start in {0, 1, width - 1, count - 256, count - 1}:
        tokens = torch.arange(start, min(count, start + 256))
        assert torch.equal(rows_of(torch.empty(0), width, start, count, 256)[: tokens.shape[0]], tokens // width)
