"""Triton kernels of the advantages, in Triton's interpreter; and what they and the kernels of turns, segments and row
sums ask for: compiled forms, launches, bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from fastadv.triton_kernels import (
    _launch,
    group_advantages,
    moments,
    segments,
    sequence_log_ratios,
    token_counts,
    turn_advantages,
    turn_ids,
)
from triton.runtime import interpreter
from triton_batches import batch, both, same

import fastadv as fa
from fastadv.groups import group_index
from fastadv.ops import moments as moment_ops
from fastadv.reference.moments import TurnMoments


@pytest.mark.parametrize(("rows", "groups"), [(0, 0), (1, 1), (13, 3), (30, 2)])
def test_moments_have_the_bits_of_the_cpu(rows: int, groups: int, poisoned_memory: None) -> None:
    rewards = torch.randn(rows, dtype=torch.float64)
    index = group_index(torch.randint(0, max(1, groups), (rows,)))
    for votes in (torch.ones_like(rewards), torch.rand_like(rewards) * (torch.rand(rows) < 0.7), 0 * rewards):
        given = (torch.where(votes == 0, torch.nan, rewards), votes, index)
        for a, b in zip(*(moment_ops.group_moments(*given, name) for name in ("triton", "cpu")), strict=True):
            same(a, b)


@pytest.mark.parametrize(("rows", "chunk"), [(14, 5), (14, 1), (3, 1)])
def test_moments_of_a_large_group(rows: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond CHUNK rows the lanes share a group, beyond LANES times as many they take more."""
    rewards, votes = torch.randn(rows, dtype=torch.float64), torch.rand(rows, dtype=torch.float64)
    index = group_index(torch.zeros(rows, dtype=torch.int64))
    monkeypatch.setattr(moments, "CHUNK", chunk)
    monkeypatch.setattr(moments, "LANES", 4)
    monkeypatch.setattr(moments, "TURN_LANES", 4)
    mine, right = (moment_ops.group_moments(rewards, votes, index, name) for name in ("triton", "cpu"))
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)
    turns = torch.randint(0, 4, (rows,))
    offsets = torch.cat([turns.new_zeros(1), turns.cumsum(0)])
    segments_ = fa.Segments(torch.empty(0, rows, dtype=torch.int32).T, None, offsets, int(offsets[-1]))
    mine, right = (
        moment_ops.turn_moments(rewards, votes, index, segments_, right.minimum, name) for name in ("triton", "cpu")
    )
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


RULES = [
    {"baseline": b, "singleton": s, "scale": scale, "eps_form": form, "population": p, "ddof": d, "eps": e}
    for (b, s), (scale, form, d, e), p in product(
        product(("none", "mean", "loo"), ("zero", "raw")),
        (
            ("none", "add", 1, 1e-6),
            ("std", "add", 3, 0.0),  # of a group of three rows: no scale
            ("std", "floor", 1, 0.3),
            ("std", "positive", 0.5, 1e-6),
        ),
        ("all", "survivors"),
    )
]
# Groups of several voters, of one (with rows that are out, and without) and of none.
LABELS = torch.tensor([5, 5, 5, 5, 2, 2, 7, 9, 9, 5, 2])
INCLUDE = torch.tensor([1, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0]) == 1


@pytest.mark.parametrize("rule", RULES[::2], ids=lambda rule: "-".join(str(x) for x in rule.values() if x != "all"))
def test_group_advantages(rule: dict[str, Any], poisoned_memory: None) -> None:
    """Also of the survivors' population, with rewards that are anything where a row is out."""
    for population, dtype in (("all", torch.float32), ("survivors", torch.float64)):
        rewards = torch.randn(11, dtype=dtype)
        rewards[0] = rewards[1]
        frozen = fa.freeze_statistics(rewards, LABELS, include=INCLUDE, ddof=rule["ddof"], backend="cpu")
        given = torch.where(INCLUDE, rewards, torch.inf) if population == "survivors" else rewards
        options = {**rule, "population": population, "include": INCLUDE, "statistics": frozen}
        both(fa.group_advantages, given, LABELS, **options, other="cpu")


def test_group_advantages_from_the_rewards(poisoned_memory: None) -> None:
    """With moments of its own kernel, votes, strides, and without a row."""
    rewards, votes = torch.randn(11), torch.rand(11) + 0.1
    both(fa.group_advantages, rewards, LABELS, votes=votes, baseline="loo", scale="std", other="cpu")
    both(fa.group_advantages, rewards[::2], LABELS[::2], baseline="loo", other="cpu")
    both(fa.group_advantages, rewards[:0], LABELS[:0], other="cpu")
    nowhere = torch.where(INCLUDE, rewards, torch.nan)
    both(fa.group_advantages, nowhere, LABELS, population="survivors", include=INCLUDE, other="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_turn_advantages(dtype: torch.dtype, poisoned_memory: None) -> None:
    mask, cu_seqlens = batch((9, 30, 0, 14, 22, 1, 3, 40))
    index = fa.segments(fa.turn_ids_from_mask(mask, cu_seqlens, backend="cpu"), cu_seqlens, backend="cpu")
    rewards, labels = torch.randn(8, dtype=dtype), torch.tensor([1, 1, 1, 4, 4, 4, 6, 1])
    include = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1]) == 1
    for kappa in (2.0, 0.0):
        frozen = fa.freeze_statistics(rewards, labels, include=include, turn_ids=index, kappa=kappa, backend="cpu")
        for rule in ({}, {"population": "survivors", "singleton": "raw"}, {"scale": "std", "include": include}):
            for target in ("loo", "mean"):
                options = {**rule, "kappa": kappa, "shrink_to": target, "statistics": frozen}
                both(fa.turn_advantages, rewards, labels, index, **options, other="cpu")
    both(fa.turn_advantages, rewards, labels, index.turn_ids, cu_seqlens, mask=mask)
    both(fa.turn_advantages, rewards[:0], labels[:0], index.turn_ids[:0], cu_seqlens[:1])


def test_moments_of_turns_are_summed_as_in_the_reference(poisoned_memory: None) -> None:
    """Over the rows that reached a turn, in their order; the C++ kernel sums from the last turn to the first."""
    turns = torch.tensor([3, 1, 0, 5, 5, 2, 4, 4, 5])
    offsets = torch.cat([turns.new_zeros(1), turns.cumsum(0)])
    index = fa.Segments(torch.full((9, 1), -1), None, offsets, int(offsets[-1]))
    groups = group_index([0, 0, 0, 1, 0, 1, 2, 1, 0])
    rewards, votes = torch.randn(9, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    votes[3] = 0
    least = moment_ops.group_moments(rewards, votes, groups, "cpu").minimum
    given = (torch.where(votes == 0, torch.inf, rewards), votes, groups, index, least)
    mine, right, cpp = (moment_ops.turn_moments(*given, name) for name in ("triton", "reference", "cpu"))
    for a, b, c in zip(mine, right, cpp, strict=True):
        same(a, b)
        torch.testing.assert_close(a, c, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("programs", [1, moments.PROGRAMS])
def test_turns_of_a_group_beyond_one_block(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "PROGRAMS", programs)
    lengths = torch.tensor([2 * moments.TURNS + 3, 1, 2 * moments.TURNS + 1])
    turns = torch.cat([torch.arange(int(n)) for n in lengths]).to(torch.int32)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    for labels in ([0, 0, 0], [0, 1, 0]):
        both(fa.turn_advantages, torch.randn(3), labels, turns, cu_seqlens)


def test_groups_without_spread_get_exactly_zero() -> None:
    rewards, labels = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.7, 0.7, 0.7]), [0, 0, 0, 1, 1, 1, 1]
    turns, cu_seqlens = torch.tensor([0, 0, 1, 0, 0, 0, 1, 2, 0, 0, 0]), torch.tensor([0, 1, 3, 4, 5, 8, 10, 11])
    for scale, eps in (("none", 0.0), ("std", 0.0), ("std", 1e-6)):
        options = {"scale": scale, "eps": eps, "backend": "triton"}
        for baseline in ("mean", "loo"):
            assert (fa.group_advantages(rewards, labels, baseline=baseline, **options) == 0).all()
        assert (fa.turn_advantages(rewards, labels, turns, cu_seqlens, **options) == 0).all()


def test_what_is_wrong_and_was_not_read_stays_visible() -> None:
    """On a GPU nobody waits for a look at rewards or indices."""
    rewards, index = torch.tensor([1.0, 2.0, torch.nan, 4.0]), group_index([0, 0, 1, 1])
    turns = torch.zeros(4, 1, dtype=torch.int32)
    with fa.checks("off"):
        assert fa.group_advantages(rewards, index, backend="triton").isnan().tolist() == [False, False, True, True]
        for scale in ("none", "std"):
            mine = fa.turn_advantages(rewards, index, turns, scale=scale, backend="triton")
            assert mine[:, 0].isnan().tolist() == [False, False, True, True]
        lost = fa.GroupIndex(torch.tensor([0, 0, 1, 7]), index.order, index.offsets)
        assert fa.group_advantages(rewards.nan_to_num(3.0), lost, backend="triton")[3].isnan()
        stray = fa.GroupIndex(index.index, torch.tensor([0, 1, 2, 99]), index.offsets)
        mine = fa.group_advantages(rewards.nan_to_num(3.0), stray, baseline="loo", backend="triton")
        assert mine.isnan().tolist() == [False, False, True, True]


def test_turns_that_the_table_has_no_room_for_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_ops = importlib.import_module("fastadv.ops.turn_advantages")  # the package has a function of this name
    complete = turn_ops.turn_moments

    def cut_off(*given: Any) -> TurnMoments:
        offsets, *sums = complete(*given)
        return TurnMoments(offsets, *(t[:2].clone() for t in sums))

    monkeypatch.setattr(turn_ops, "turn_moments", cut_off)
    turns = torch.tensor([[0, 1, 2], [0, 1, 2]], dtype=torch.int32)
    mine = fa.turn_advantages(torch.tensor([1.0, 2.0]), [0, 0], turns, backend="triton")
    assert mine.isnan().tolist() == [[False, False, True]] * 2


# ---- what a launch asks for ------------------------------------------------------------------------------------------

MODULES = (
    "turn_ids", "token_counts", "sequence_log_ratios", "moments", "group_advantages", "turn_advantages", "segments",
)  # fmt: skip


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[_launch.Configuration]:
    seen: list[_launch.Configuration] = []
    monkeypatch.setattr(_launch, "launched", seen.append)
    return seen


def calls() -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Ops with the number of launches that they take, on rows for one program and on one for several."""
    for lengths, merged in (((7, 1, 40), 0), ((5 * token_counts.ELEMENTS,), 1)):
        for padded in (False, True):
            mask, cu = batch(lengths, padded)
            turns = fa.turn_ids_from_mask(mask, cu, backend="cpu")
            index = fa.segments(turns, cu, backend="cpu")
            yield "turn ids", 2, lambda m=mask, c=cu: fa.turn_ids_from_mask(m, c, backend="triton")
            yield "counts", 1 + merged, lambda m=mask, c=cu: fa.token_counts(m, c, backend="triton")
            for ids in (turns, turns.long()):
                yield "segments", 1 + merged, lambda t=ids, c=cu: fa.segments(t, c, backend="triton")
            for values in (torch.float32, torch.float64):
                table = fa.SegmentTable(torch.ones(index.count, dtype=values), index)
                yield "segment tokens", 1, lambda t=table: fa.segment_tokens(t, backend="triton")
                yield "masked", 1, lambda t=table, m=mask: fa.segment_tokens(t, m, backend="triton")
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                x = torch.zeros(mask.shape, dtype=dtype)
                yield (
                    "log ratios",
                    1 + merged,
                    lambda x=x, m=mask, c=cu: fa.sequence_log_ratios(x, x.float(), m, c, backend="triton"),
                )
    for dtype in (torch.float32, torch.float64):
        rewards = torch.tensor([1, 2, 4], dtype=dtype)
        turns = torch.tensor([[0, 1], [0, -1], [0, 1]], dtype=torch.int32)
        yield "group", 2, lambda r=rewards: fa.group_advantages(r, [0, 0, 0], backend="triton")
        yield "turn", 5, lambda r=rewards, t=turns: fa.turn_advantages(r, [0, 0, 0], t, backend="triton")


def test_every_launch_is_a_configuration(launches: list[_launch.Configuration]) -> None:
    """Of those that are compiled ahead of time, and none of these is one that nobody asks for."""
    known = {c for name in MODULES for c in importlib.import_module(f"fastadv.triton_kernels.{name}").configurations()}
    used = set()
    for name, expected, call in calls():
        launches.clear()
        call()
        assert len(launches) == expected, name
        assert set(launches) <= known, (name, set(launches) - known)
        used |= set(launches)
    assert {c.kernel for c in used} == {c.kernel for c in known}


class Traffic:
    """Bytes that kernels read and write, each counted once: what has to come from memory."""

    def __init__(self) -> None:
        self.reads: dict[int, list[np.ndarray]] = {}  # addresses by size
        self.writes: dict[int, list[np.ndarray]] = {}

    def add(self, kind: dict[int, list[np.ndarray]], pointers: Any, mask: Any) -> None:
        where, on = np.broadcast_arrays(pointers.data, mask.data)
        kind.setdefault(pointers.get_element_ty().primitive_bitwidth // 8, []).append(where[on])

    def total(self) -> int:
        return sum(
            size * np.unique(np.concatenate(parts)).size
            for kind in (self.reads, self.writes)
            for size, parts in kind.items()
        )


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    seen, builder = Traffic(), interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        seen.add(seen.reads, pointers, mask)
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        seen.add(seen.writes, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", watched_load)
    monkeypatch.setattr(builder, "create_masked_store", watched_store)
    return seen


def test_bytes_moved(traffic: Traffic) -> None:
    lengths = (3000, 17, 4000)
    tokens, rows = sum(lengths), len(lengths)
    mask, cu_seqlens = batch(lengths)
    turns = fa.turn_ids_from_mask(mask, cu_seqlens, backend="cpu")
    index = fa.segments(turns, cu_seqlens, backend="cpu")
    table, x = fa.SegmentTable(torch.ones(index.count), index), torch.zeros(tokens)
    rewards, labels = torch.tensor([1.0, 2.0, 4.0]), group_index([0, 1, 0])
    inputs = (rewards.double(), torch.ones(rows, dtype=torch.float64), labels)
    minimum = torch.zeros(2, dtype=torch.float64)
    of_groups = max(index.turns()[::2].tolist()) + int(index.turns()[1])  # turns of both groups
    options: dict[str, Any] = {"backend": "triton"}
    frozen = fa.freeze_statistics(rewards, labels, turn_ids=index)
    ops: list[tuple[Callable[[], Any], int]] = [
        (lambda: fa.turn_ids_from_mask(mask, cu_seqlens, **options), turn_ids.bytes_moved(tokens, rows)),
        (lambda: fa.segments(turns, cu_seqlens, **options), turn_ids.counts_bytes_moved(tokens, rows)),
        (lambda: fa.segment_tokens(table, **options), segments.bytes_moved(tokens, rows, index.count)),
        (
            lambda: fa.segment_tokens(table, mask, **options),
            segments.bytes_moved(tokens, rows, index.count, masked=True),
        ),
        (lambda: fa.token_counts(mask, cu_seqlens, **options), token_counts.bytes_moved(tokens, rows)),
        (
            lambda: fa.sequence_log_ratios(x, x.bfloat16(), mask, cu_seqlens, **options),
            sequence_log_ratios.bytes_moved(tokens, rows, old=2),
        ),
        (lambda: moment_ops.group_moments(*inputs, "triton"), moments.bytes_moved(rows, 2)),
        (
            lambda: moment_ops.turn_moments(*inputs, index, minimum, "triton"),
            moments.turn_bytes_moved(rows, 2, of_groups),
        ),
        (
            lambda: fa.group_advantages(rewards, labels, statistics=frozen, **options),
            group_advantages.bytes_moved(rows, 2),
        ),
        (
            lambda: fa.turn_advantages(rewards, labels, index, statistics=frozen, output="segments", **options),
            turn_advantages.bytes_moved(index.count, rows, 2, of_groups),
        ),
    ]
    for number, (op, formula) in enumerate(ops):
        traffic.reads.clear()
        traffic.writes.clear()
        op()
        assert formula <= traffic.total() <= 1.01 * formula, number
