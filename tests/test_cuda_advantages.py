"""CUDA kernels of turns, row counts, moments and advantages, compiled for the CPU: edges of blocks, orders of threads,
and how many launches an op takes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import cuda_kernels
import pytest
import torch
from cuda_emulation import build
from torch import Tensor
from triton_batches import batch, same

import fastadv as fa
from fastadv import cuda
from fastadv.groups import group_index
from fastadv.ops import moments as moment_ops

pytestmark = pytest.mark.skipif(cuda_kernels.missing() is not None, reason=str(cuda_kernels.missing()))

BLOCK = 2048  # kTurnIdsBlock
FEW, MANY = 32, 256  # threads of a group
ORDERS = ("forward", "backward", "7")


def both(op: Callable[..., Tensor], *args: Any, **options: Any) -> None:
    """The bits of the C++ kernels."""
    same(op(*args, **options, backend="cuda"), op(*args, **options, backend="cpu"))


def close(a: Tensor, b: Tensor) -> None:
    """As good as float64 sums in another order."""
    assert a.dtype == b.dtype
    tolerance = 1e-13 if a.dtype == torch.float64 else 2e-7
    torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-13, equal_nan=True)


def segments_of(turns: list[int]) -> fa.Segments:
    """A batch whose rows have this many turns, of one token each."""
    n = torch.tensor(turns, dtype=torch.int64)
    offsets = torch.cat([n.new_zeros(1), n.cumsum(0)])
    ids = torch.cat([torch.arange(int(k)) for k in turns]) if turns else n
    return fa.Segments(ids.to(torch.int32), offsets, offsets, int(offsets[-1]))


# ---- turns and counts ------------------------------------------------------------------------------------------------

EDGES = (
    (),
    (0,),
    (1,),
    (0, 7, 1, 0, 40, 19, 0, 0),
    (BLOCK - 1,),
    (BLOCK,),
    (BLOCK + 1,),
    (0, 0, 5, BLOCK - 5, 0, 3, 2 * BLOCK, 17, 0, 0),  # rows that end where blocks do, and rows without a token
    (15, 16, 17) * 50,  # many rows in each of several blocks
    (300,) * 9,  # a warp a row
    (20 * BLOCK + 5,),  # a row for several blocks
    (5, 33 * BLOCK),
)


@pytest.mark.parametrize("padded", [False, True], ids=("packed", "padded"))
@pytest.mark.parametrize("lengths", EDGES, ids=lambda n: f"{len(n)}x{max(n, default=0)}")
def test_turns_and_counts(lengths: tuple[int, ...], padded: bool, poisoned_memory: None) -> None:
    for density in (0.0, 0.95, 1.0) if sum(lengths) < 2 * BLOCK else (0.95,):
        mask, cu_seqlens = batch(lengths, padded, density)
        both(fa.turn_ids_from_mask, mask, cu_seqlens)
        both(fa.token_counts, mask, cu_seqlens)
        for dtype in (torch.int32, torch.int64):
            turns = fa.turn_ids_from_mask(mask, cu_seqlens, backend="cpu").to(dtype)
            mine, right = (fa.segments(turns, cu_seqlens, backend=name) for name in ("cuda", "cpu"))
            same(mine.offsets, right.offsets)


def test_views_that_are_not_aligned() -> None:
    mask, _ = batch((BLOCK + 40,))
    for start in (1, 8, 16):
        both(fa.turn_ids_from_mask, mask[start:])
        both(fa.token_counts, mask[start:])
        turns = torch.randint(-1, 9, (BLOCK + 40,), dtype=torch.int32)[start:]
        mine, right = (fa.segments(turns, backend=name) for name in ("cuda", "cpu"))
        same(mine.offsets, right.offsets)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_table_is_read_by_turns_of_either_type_and_any_alignment(dtype: torch.dtype) -> None:
    turns = (torch.arange(3001) // 7).to(dtype)
    for start in (0, 1):
        index = fa.segments(turns[:3000] if start == 0 else (turns - turns[1])[1:], backend="cpu")
        values = torch.arange(float(index.count))
        both(fa.segment_tokens, fa.SegmentTable(values, index))


@pytest.mark.parametrize("lengths", [(3, 9, 4), (40 * BLOCK,)], ids=("one block a row", "several"))
def test_what_is_wrong_in_a_mask_or_in_turns_is_not_plausible(lengths: tuple[int, ...]) -> None:
    mask, cu_seqlens = batch(lengths, density=1.0)
    bad, turns = mask.float(), torch.zeros(mask.shape, dtype=torch.int64)
    bad[-1], turns[-1] = 0.5, -2
    fine = torch.arange(len(lengths)) < len(lengths) - 1
    with fa.checks("off"):
        counts = fa.token_counts(bad, cu_seqlens, backend="cuda")
        assert torch.equal(counts >= 0, fine)
        ids = fa.turn_ids_from_mask(bad, cu_seqlens, backend="cuda")
    assert int(ids[-1]) == -2
    assert int(ids[:-1].min()) >= -1
    with pytest.raises(ValueError, match="below -1"):
        fa.segments(turns, cu_seqlens, backend="cuda")


# ---- moments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "groups"), [(0, 0), (1, 1), (13, 3), (90, 2), (MANY, 1), (3 * MANY + 1, 2)])
def test_moments(rows: int, groups: int, poisoned_memory: None) -> None:
    rewards, index = torch.randn(rows, dtype=torch.float64), group_index(torch.randint(0, max(1, groups), (rows,)))
    turns = segments_of(torch.randint(0, 50, (rows,)).tolist())
    for votes in (torch.ones_like(rewards), torch.rand_like(rewards) * (torch.rand(rows) < 0.7), 0 * rewards):
        given = (torch.where(votes == 0, torch.nan, rewards), votes, index)
        mine, right = (moment_ops.group_moments(*given, name) for name in ("cuda", "cpu"))
        for a, b in zip(mine, right, strict=True):
            close(a, b)
        tables = (moment_ops.turn_moments(*given, turns, right.minimum, name) for name in ("cuda", "cpu"))
        for a, b in zip(*tables, strict=True):
            close(a, b)


# ---- advantages ------------------------------------------------------------------------------------------------------

# Groups of several voters, of one (with rows that are out, and without) and of none.
LABELS = torch.tensor([5, 5, 5, 5, 2, 2, 7, 9, 9, 5, 2])
INCLUDE = torch.tensor([1, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0]) == 1
TURNS = segments_of([3, 1, 0, 5, 5, 2, 4, 4, 5, 9, 1])
SCALES = (
    {"scale": "none"},
    {"scale": "std", "ddof": 3, "eps": 0.0},  # of a group of three rows: no scale
    {"scale": "std", "eps_form": "floor", "eps": 0.3},
    {"scale": "std", "eps_form": "positive", "ddof": 0.5},
)


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: "-".join(str(x) for x in scale.values()))
@pytest.mark.parametrize("population", ["all", "survivors"])
def test_every_rule(scale: dict[str, Any], population: str, poisoned_memory: None) -> None:
    """From the rewards in one launch, and with frozen statistics."""
    rewards = torch.randn(11, dtype=torch.float64)
    rewards[0] = rewards[1]
    given = torch.where(INCLUDE, rewards, torch.nan) if population == "survivors" else rewards
    frozen = fa.freeze_statistics(
        rewards, LABELS, include=INCLUDE, turn_ids=TURNS, ddof=scale.get("ddof", 1), backend="cpu"
    )
    for singleton, values in product(("zero", "raw"), (given, given.float())):
        options = {**scale, "singleton": singleton, "population": population, "include": INCLUDE}
        for baseline, statistics in product(("none", "mean", "loo"), (None, frozen)):
            advantages = (
                fa.group_advantages(values, LABELS, **options, baseline=baseline, statistics=statistics, backend=name)
                for name in ("cuda", "cpu")
            )
            close(*advantages)
        for target, statistics in product(("loo", "mean"), (None, frozen)):
            tables = (
                fa.turn_advantages(
                    values, LABELS, TURNS, **options, shrink_to=target, statistics=statistics, backend=name
                )
                for name in ("cuda", "cpu")
            )
            close(*tables)


SIZES = {
    "no rows": ([], []),
    "no turns": ([0, 0, 1], [0, 0, 0]),
    "a thread a row": ([0] * FEW, [2] * FEW),
    "rows beyond the threads": ([0] * (FEW + 1) + [1], [3, 1] * 17),
    "turns beyond the threads": ([0, 1, 0, 1, 2, 3], [FEW + 1, 2, FEW, FEW - 1, 70, 1]),
    "a block for each tile": ([0, 1, 0, 1], [3 * FEW + 1, 3 * FEW, 3 * FEW, 1]),
    "many threads": ([0] * (2 * MANY + 3), [1, 5, 2] * 171 + [3, 3]),
    "many threads and turns": ([0, 0, 1], [2 * MANY + 7, MANY + 1, 3]),
}


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    """Each order of threads gives the same bits."""
    labels, turns = SIZES[size]
    index, groups = segments_of(turns), group_index(torch.tensor(labels, dtype=torch.int64))
    rewards = torch.randn(len(labels), dtype=torch.float64)
    for kappa in (2.0, 0.0):
        right = fa.turn_advantages(rewards, groups, index, kappa=kappa, scale="std", backend="cpu")
        runs = []
        for order in ORDERS:
            monkeypatch.setenv("CUDA_EMULATION_ORDER", order)
            runs.append(fa.turn_advantages(rewards, groups, index, kappa=kappa, scale="std", backend="cuda"))
        close(runs[0], right)
        for other in runs[1:]:
            assert torch.equal(other, runs[0])
    close(*(fa.group_advantages(rewards, groups, scale="std", backend=name) for name in ("cuda", "cpu")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8])
def test_rewards_and_votes_of_every_type(dtype: torch.dtype) -> None:
    rewards, votes = torch.randint(0, 5, (11,)).to(dtype), torch.randint(0, 3, (11,)).to(dtype)
    both(fa.group_advantages, rewards, LABELS, votes=votes, baseline="loo")
    both(fa.group_advantages, rewards.float(), LABELS, votes=votes > 0, baseline="loo")
    both(fa.turn_advantages, rewards, LABELS, TURNS)
    both(fa.group_advantages, rewards.repeat_interleave(2)[::2], LABELS, votes=votes.repeat_interleave(2)[::2])


def test_groups_without_spread_get_exactly_zero() -> None:
    labels, turns = torch.tensor([0] * 3 + [1] * 4 + [2] * MANY), segments_of([1, 2, 1, 1, 3, 2, 1] + [2] * MANY)
    rewards = torch.where(labels == 0, 0.1, 0.7)
    for scale, eps in (("none", 0.0), ("std", 0.0), ("std", 1e-6)):
        options: dict[str, Any] = {"scale": scale, "eps": eps, "backend": "cuda"}
        for baseline in ("mean", "loo"):
            assert (fa.group_advantages(rewards, labels, baseline=baseline, **options) == 0).all()
        assert (fa.turn_advantages(rewards, labels, turns, **options) == 0).all()


def test_what_is_wrong_and_was_not_read_stays_visible(poisoned_memory: None) -> None:
    """On a GPU nobody waits for a look at rewards or indices."""
    rewards, index = torch.tensor([1.0, 2.0, torch.nan, 4.0]), group_index([0, 0, 1, 1])
    turns = segments_of([1, 1, 1, 1])
    fine = rewards.nan_to_num(3.0)
    indices = (
        fa.GroupIndex(torch.tensor([0, 0, 1, 7]), index.order, index.offsets),  # a group that is not there
        fa.GroupIndex(index.index, torch.tensor([0, 1, 2, 99]), index.offsets),  # a row that is not there
        fa.GroupIndex(index.index, torch.tensor([0, 1, 2, 2]), index.offsets),  # one that is there twice
    )
    with fa.checks("off"):
        for given, groups in ((rewards, index), *((fine, groups) for groups in indices)):
            options: dict[str, Any] = {"backend": "cuda"}
            mine = (
                fa.group_advantages(given, groups, **options),
                fa.turn_advantages(given, groups, turns, **options),
                fa.turn_advantages(given, groups, turns, scale="std", **options),
            )
            for advantages in mine:
                assert advantages.isnan().tolist() == [False, False, True, True]
        frozen = fa.freeze_statistics(fine, index, turn_ids=turns, backend="cuda")
        for groups in indices[:1]:
            mine = (
                fa.group_advantages(fine, groups, statistics=frozen, backend="cuda"),
                fa.turn_advantages(fine, groups, turns, statistics=frozen, backend="cuda"),
            )
            for advantages in mine:
                assert advantages.isnan().tolist() == [False, False, False, True]
        for groups in indices[1:]:
            assert fa.freeze_statistics(fine, groups, turn_ids=turns, backend="cuda").all.turns.rewards[1].isnan()


# ---- launches --------------------------------------------------------------------------------------------------------


def launches(call: Callable[[], Any]) -> int:
    before = build.operations(cuda.module())
    call()
    return build.operations(cuda.module()) - before


def test_launches() -> None:
    mask, cu_seqlens = batch((7, 1, 40))
    long, _ = batch((40 * BLOCK,))
    turns = fa.turn_ids_from_mask(mask, cu_seqlens, backend="cpu")
    on: dict[str, Any] = {"backend": "cuda"}
    assert launches(lambda: fa.turn_ids_from_mask(mask, cu_seqlens, **on)) == 2
    assert launches(lambda: fa.token_counts(mask, cu_seqlens, **on)) == 1
    assert launches(lambda: fa.token_counts(long, **on)) == 2
    assert launches(lambda: fa.segments(turns, cu_seqlens, **on)) == 1
    assert launches(lambda: fa.group_advantages(torch.randn(11), LABELS, **on)) == 1
    frozen = fa.freeze_statistics(torch.randn(11), LABELS, turn_ids=TURNS, **on)
    assert launches(lambda: fa.turn_advantages(torch.randn(11), LABELS, TURNS, statistics=frozen, **on)) == 2


FREE = {"aten::empty", "aten::new_empty", "aten::detach", "detach", "aten::view"}  # memory and views


def torch_ops(call: Callable[[], Any]) -> set[str]:
    """PyTorch's ops in a call that could launch a kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages()} - FREE


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("masked", [False, True])
def test_turn_advantages_take_two_launches_at_any_size(size: str, masked: bool) -> None:
    """Given the batch's index objects; and PyTorch launches nothing."""
    labels, turns = SIZES[size]
    index, groups = segments_of(turns), group_index(torch.tensor(labels, dtype=torch.int64))
    rewards, include = torch.randn(len(labels)), torch.rand(len(labels)) < 0.8
    mask = torch.rand(index.turn_ids.shape) < 0.9 if masked else None
    with fa.checks("off"):
        for options in ({}, {"population": "survivors", "include": include, "scale": "std", "singleton": "raw"}):

            def tokens(options: dict[str, Any] = options) -> Tensor:
                return fa.turn_advantages(rewards, groups, index, mask=mask, **options, backend="cuda")

            def table(options: dict[str, Any] = options) -> fa.SegmentTable:
                return fa.turn_advantages(rewards, groups, index, output="segments", **options, backend="cuda")

            for call, most in ((tokens, 2), (table, 1)):
                assert launches(call) == (most if index.count else 0)
                assert not torch_ops(call)


def test_group_advantages_take_one_launch() -> None:
    rewards, groups, votes = torch.randn(11), group_index(LABELS), torch.rand(11)
    with fa.checks("off"):
        for options in (
            {},
            {"votes": votes, "baseline": "loo", "scale": "std"},
            {"population": "survivors", "include": INCLUDE},
        ):

            def call(options: dict[str, Any] = options) -> Tensor:
                return fa.group_advantages(rewards, groups, **options, backend="cuda")

            assert launches(call) == 1
            assert not torch_ops(call)


def test_an_op_of_pytorch_would_be_noticed() -> None:
    frozen = fa.freeze_statistics(torch.randn(11), LABELS, backend="cuda")
    groups = group_index(LABELS)
    assert torch_ops(lambda: fa.group_advantages(torch.ones(11), groups, statistics=frozen, backend="cuda"))
