"""Batches, outcomes, coins and arms."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from op_cases import NATIVE
from torch import Tensor

import fastadv as fa
from fastadv.arms import freeze, question_one_arms
from fastadv.coins import uniforms
from fastadv.outcomes import Outcome


def make(**changes: Any) -> fa.Batch:
    given = {
        "mask": torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 1]),
        "cu_seqlens": torch.tensor([0, 4, 5, 9, 10]),
        "rewards": torch.tensor([1.0, 0.0, 0.0, 0.0]),
        "group_ids": ["p", "p", "p", "q"],
        "outcomes": torch.tensor([0, 1, 2, 1]),
        **changes,
    }
    return fa.Batch.of(**given)


def test_a_batch_says_what_else_it_holds() -> None:
    assert repr(make()).endswith("packed [10] on cpu)")
    told = make(endings=torch.zeros(4, dtype=torch.int64), versions=torch.zeros(10, dtype=torch.int64))
    assert repr(told).endswith("packed [10] on cpu, with endings, with versions)")


# ---- layouts ---------------------------------------------------------------------------------------------------------


@hypothesis.given(
    lengths=st.lists(st.integers(0, 9), max_size=6), extra=st.integers(0, 3), fill=st.sampled_from([0.0, -1.0])
)
def test_pad_and_unpad_are_inverse(lengths: list[int], extra: int, fill: float) -> None:
    counts = torch.tensor(lengths, dtype=torch.int64)
    cu_seqlens = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    values = torch.arange(1.0, 1 + sum(lengths))
    padded = fa.pad(values, cu_seqlens, width=max(lengths, default=0) + extra, fill=fill)
    assert padded.shape == (len(lengths), max(lengths, default=0) + extra)
    assert torch.equal(fa.unpad(padded, counts), values)
    assert int((padded == fill).sum()) == padded.numel() - sum(lengths)


def test_padding_rows_that_fill_the_width_is_a_view() -> None:
    values = torch.arange(6)
    assert fa.pad(values, torch.tensor([0, 3, 6])).data_ptr() == values.data_ptr()
    with pytest.raises(ValueError, match="width is 2, but a row has 3"):
        fa.pad(values, torch.tensor([0, 3, 6]), width=2)
    with pytest.raises(ValueError, match=r"lengths must be in \[0, 2\]"):
        fa.unpad(torch.zeros(1, 2), torch.tensor([3]))
    with pytest.raises(TypeError, match=r"unpad: lengths has dtype torch\.float32"):
        fa.unpad(torch.zeros(1, 2), torch.tensor([1.0]))


def test_padded_and_packed_batches_hold_the_same() -> None:
    batch = make(rollout_log_probs=torch.linspace(-1, 0, 10))
    padded = batch.padded(width=6)
    assert padded.mask.shape == (4, 6)
    assert padded.num_tokens == batch.num_tokens == 10
    back = padded.packed()
    for name in ("mask", "turn_ids", "cu_seqlens", "lengths", "rewards", "rollout_log_probs"):
        assert torch.equal(getattr(back, name), getattr(batch, name)), name
    assert torch.equal(padded.segments.offsets, batch.segments.offsets)
    assert padded.padded() is padded
    assert batch.packed() is batch


def test_a_padded_batch_from_strided_storage() -> None:
    """Views into a wider tensor, as a trainer holds them, make the same batch."""
    batch = make()
    wide = torch.zeros(4, 20, dtype=torch.int64)
    view = wide[:, 3:12:2]
    view.copy_(batch.padded(width=5).mask)
    strided = make(mask=view, cu_seqlens=None, lengths=batch.lengths)
    assert torch.equal(strided.packed().mask, batch.mask)
    assert torch.equal(strided.packed().turn_ids, batch.turn_ids)


def test_endings_and_versions_go_with_their_rollouts_and_tokens() -> None:
    """What is not sampled has no version, whatever the log holds there; padding and selecting move both."""
    versions = torch.tensor([3, 3, -7, 4, 5, 6, 2**40, 6, 7, 8])
    batch = make(endings=torch.tensor([0, 1, 2, 9], dtype=torch.uint8), versions=versions)
    expected = torch.tensor([3, 3, -1, 4, 5, 6, -1, 6, 7, 8], dtype=torch.int32)
    padded = batch.padded(width=6)
    assert padded.versions is not None
    assert padded.versions[1].tolist() == [5, -1, -1, -1, -1, -1]
    for same in (batch, padded.packed(), batch.take(torch.arange(4))):
        assert same.versions is not None
        assert same.endings is not None
        assert torch.equal(same.versions, expected)
        assert same.endings.tolist() == [0, 1, 2, 9]
    part = batch.take(torch.tensor([3, 1]))
    assert part.endings is not None
    assert part.versions is not None
    assert part.endings.tolist() == [9, 1]
    assert part.versions.tolist() == [8, 5]
    assert make().endings is None
    assert make().versions is None


def test_select_keeps_whole_rollouts() -> None:
    ids = fa.TokenIds(torch.arange(14, dtype=torch.int32), torch.tensor([0, 5, 7, 12, 14]))
    batch = make(token_ids=ids, rollout_log_probs=torch.arange(10.0), row_ids=torch.tensor([7, 8, 9, 10]))
    part = batch.select(torch.tensor([True, False, True, False]))
    assert part.rollout_log_probs.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert part.token_ids.ids.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert part.row_ids.tolist() == [7, 9]
    assert part.groups.num_groups == 1
    assert part.outcomes.tolist() == [0, 2]
    assert make().select(torch.zeros(4, dtype=torch.bool)).num_rollouts == 0


def test_rows_that_a_batch_does_not_have() -> None:
    batch = make()
    for rows, what in (([-1], "holds -1"), ([0, 7], "holds 7"), ([[0]], r"has shape \[1, 1\]")):
        with pytest.raises(ValueError, match=f"Batch.take: rows {what}; pass .* from 0 to 3"):
            batch.take(torch.tensor(rows))
    table = fa.SegmentTable(torch.zeros(batch.segments.count), batch.segments)
    for first, last in ((2, 9), (-1, 2), (3, 2)):
        with pytest.raises(ValueError, match=f"{first} .. {last} is no range of its 4 rollouts"):
            table.rollouts(first, last)


def test_a_padded_batch_of_another_width() -> None:
    padded = make().padded(width=6)
    assert padded.padded(8).mask.shape == (4, 8)
    assert torch.equal(padded.padded(8).packed().mask, make().mask)
    with pytest.raises(ValueError, match="width is 2, but a row has 4"):
        padded.padded(2)


def test_micro_batches_cover_all_rollouts_in_order() -> None:
    batch = make()
    for limit in (1, 4, 5, 8, 100):
        ranges = list(batch.micro_batches(limit))
        assert [r for first, last in ranges for r in range(first, last)] == [0, 1, 2, 3]
        for first, last in ranges:
            widest = int(batch.lengths[first:last].max())
            assert last == first + 1 or widest * (last - first) <= limit
    with pytest.raises(ValueError, match="max_tokens is 0"):
        list(batch.micro_batches(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": torch.ones(3)}, r"rewards has shape \[3\]; expected \[4\]"),
        ({"rewards": torch.tensor([1.0, math.nan, 0.0, 0.0])}, r"rewards\[1\] is nan, but its outcome is not INFRA"),
        ({"group_ids": ["p"]}, "group_ids has 1 rows, mask has 4"),
        ({"outcomes": torch.tensor([0, 1, 2, 4])}, r"outcomes\[3\] is 4; outcomes are SOLVED \(0\)"),
        ({"rollout_log_probs": torch.zeros(9)}, r"rollout_log_probs has shape \[9\]"),
        ({"turn_ids": torch.zeros(3, dtype=torch.int32)}, r"turn_ids has shape \[3\]"),
        ({"mask": torch.tensor([0.5] * 10)}, "mask has a fractional"),
        (
            {"token_ids": fa.TokenIds(torch.zeros(9, dtype=torch.int32), torch.tensor([0, 3, 4, 8, 9]))},
            "token_ids has 3 tokens for rollout 0, fewer tokens than its response of 4",
        ),
        ({"lengths": torch.tensor([4, 1, 4, 2])}, r"lengths\[3\] is 2, but by cu_seqlens the row has 1 tokens"),
        ({"lengths": torch.tensor([9])}, r"lengths has shape \[1\]; expected \[4\]"),
        ({"lengths": torch.tensor([4.0, 1, 4, 1])}, r"lengths has dtype torch\.float32; use int32"),
        ({"turn_ids": torch.full((10,), 2**30)}, r"turn_ids reaches 1073741824; turns above 1048575"),
        ({"turn_ids": torch.full((10,), -2)}, "turn_ids has a value below -1"),
        ({"turn_ids": torch.zeros(10)}, r"turn_ids has dtype torch\.float32"),
        ({"mask": torch.ones(10, dtype=torch.complex64)}, r"mask has dtype torch\.complex64"),
        ({"rewards": torch.ones(4, dtype=torch.complex64)}, r"rewards has dtype torch\.complex64"),
        ({"rewards": torch.tensor([1.0, -math.inf, 0.0, 0.0])}, r"rewards\[1\] is -inf, but its outcome is not INFRA"),
        ({"endings": torch.tensor([0, 0, 10, 0])}, r"endings\[2\] is 10; endings are SUBMITTED \(0\), "),
        ({"endings": torch.zeros(3, dtype=torch.int64)}, r"endings has shape \[3\]; expected \[4\]"),
        ({"versions": torch.tensor([0, 0, 0, -1, *[0] * 6])}, r"versions\[3\] is -1 at a sampled token"),
        ({"versions": torch.zeros(10)}, r"versions has dtype torch\.float32"),
    ],
)
def test_parts_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make(**changes)


IDS = torch.arange(14, dtype=torch.int32)
ENDS = torch.tensor([0, 5, 7, 12, 14])


@pytest.mark.parametrize(
    ("ids", "ends", "message"),
    [
        (IDS, ENDS + 1, r"token_ids\.cu_seqlens starts at 1; it must start at 0"),
        (IDS[1:], ENDS, r"token_ids\.cu_seqlens ends at 14, but token_ids\.ids has 13 tokens"),
        (IDS, ENDS[:-1], r"token_ids\.cu_seqlens has shape \[4\]; expected \[5\]"),
        (IDS, torch.tensor([0, 5, 4, 12, 14]), r"token_ids\.cu_seqlens decreases after row 1 \(5 to 4\)"),
        (IDS, ENDS.double(), r"token_ids\.cu_seqlens has dtype torch\.float64"),
        (IDS - 1, ENDS, r"token_ids\.ids\[0\] is -1; ids are from 0 to 2147483647"),
        (IDS.long() + 2**31, ENDS, r"token_ids\.ids\[0\] is 2147483648"),
        (IDS.float(), ENDS, r"token_ids\.ids has dtype torch\.float32; use int32"),
        (IDS[None], ENDS, r"token_ids\.ids has shape \[1, 14\]; pass packed ids"),
        (IDS.tolist(), ENDS, r"token_ids\.ids is a list; pass a tensor"),
        (IDS, None, r"token_ids\.cu_seqlens is a NoneType; pass a tensor"),
    ],
)
def test_token_ids_that_do_not_fit(ids: Any, ends: Any, message: str) -> None:
    assert make(token_ids=fa.TokenIds(IDS, ENDS)).token_ids is not None
    with pytest.raises((ValueError, TypeError), match=f"^Batch: {message}"):
        make(token_ids=fa.TokenIds(ids, ends))


def test_token_ids_of_another_width_become_int32() -> None:
    kept = make(token_ids=fa.TokenIds(IDS.long(), ENDS.int())).token_ids
    assert (kept.ids.dtype, kept.cu_seqlens.dtype) == (torch.int32, torch.int64)
    assert torch.equal(kept.ids, IDS)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([9], r"lengths has shape \[1\]; expected \[2\]"),
        ([9, 9], r"lengths\[0\] is 9; it must be in \[0, 4\], the width of mask"),
        ([4, -1], r"lengths\[1\] is -1; it must be in \[0, 4\]"),
        ([4, 1], r"mask\[1, 1\] is set, but lengths\[1\] is 1; past it there is padding only"),
        ([4.0, 2.0], r"lengths has dtype torch\.float32"),
    ],
)
def test_lengths_of_padded_rows_that_do_not_fit(lengths: list[float], message: str) -> None:
    given = {"mask": torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]]), "cu_seqlens": None, "rewards": torch.ones(2)}
    given |= {"group_ids": [0, 0], "outcomes": torch.tensor([0, 0])}
    assert make(**given, lengths=torch.tensor([4, 2])).num_tokens == 6
    with pytest.raises((ValueError, TypeError), match=message):
        make(**given, lengths=torch.tensor(lengths))


def test_turn_ids_in_the_padding_are_no_turns() -> None:
    """What a trainer leaves behind a row's end does not make a turn of it: packed and padded stay the same batch."""
    batch = make()
    turn_ids = batch.padded(width=6).turn_ids.clone()
    turn_ids[torch.arange(6) >= batch.lengths[:, None]] = 7
    padded = make(mask=batch.padded(width=6).mask, cu_seqlens=None, lengths=batch.lengths, turn_ids=turn_ids)
    assert torch.equal(padded.segments.offsets, batch.segments.offsets)
    assert torch.equal(padded.packed().turn_ids, batch.turn_ids)


# ---- outcomes --------------------------------------------------------------------------------------------------------


def test_census() -> None:
    names = ["solved", "FAILED", Outcome.BUDGET, 2, "infra", "solved"]
    census = fa.census(names, ["a", "a", "b", "b", "b", "a"])
    assert census.counts == {Outcome.SOLVED: 2, Outcome.FAILED: 1, Outcome.BUDGET: 2, Outcome.INFRA: 1}
    assert census.by_group.tolist() == [[2, 1, 0, 0], [0, 0, 2, 1]]
    assert census.rate(Outcome.BUDGET) == pytest.approx(2 / 6)
    assert census.share_of_unsolved(Outcome.BUDGET) == pytest.approx(2 / 4)
    double = census + census
    assert double.total == 12
    assert double.by_group.shape == (4, 4)
    empty = fa.census([])
    assert (empty.total, empty.rate(Outcome.SOLVED), empty.share_of_unsolved(Outcome.INFRA)) == (0, 0.0, 0.0)
    for bad in (["won"], [5], [None], [True], torch.tensor([-1])):
        with pytest.raises(ValueError, match=r"outcomes\[0\] is"):
            fa.census(bad)
    with pytest.raises(ValueError, match="group_ids has 1 rows, outcomes has 2"):
        fa.census([0, 1], [0])


def test_labels_beyond_int64_stay_apart() -> None:
    largest = np.array([2**64 - 1, -1 % 2**64, 2**63, 5], dtype=np.uint64)
    assert fa.group_index(largest).index.tolist() == [0, 0, 1, 2]
    assert fa.group_index(np.array([7, 7, 3], dtype=np.uint64)).index.tolist() == [0, 0, 1]
    assert fa.group_index([2**64 - 1, -1]).num_groups == 2


# ---- coins -----------------------------------------------------------------------------------------------------------


def splitmix(seed: int, number: int) -> float:
    """The definition in fastadv/coins.py, in Python integers."""
    mask, step = 2**64 - 1, 0x9E3779B97F4A7C15

    def mixed(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    return (mixed((mixed((seed + step) & mask) + (number + 1) * step) & mask) >> 11) * 2.0**-53


def test_the_coins_definition() -> None:
    assert splitmix(2**64 - 0x9E3779B97F4A7C15, 0) == (0xE220A8397B1DCDAF >> 11) * 2.0**-53  # splitmix64(0), published
    for seed in (0, 1, -1, 2**70 + 5):
        for number in (0, 1, 123456789, -7, 2**62):
            expected = splitmix(seed % 2**64, number)
            assert float(uniforms(seed, torch.tensor([number]))) == expected, (seed, number)
    text = int.from_bytes(hashlib.blake2b(b"django__django-1", digest_size=8).digest(), "little", signed=True)
    assert uniforms(3, ["django__django-1"]).tolist() == [splitmix(3, text)]


def test_coins_do_not_depend_on_order_process_or_company() -> None:
    ids = torch.arange(1000)
    coins = fa.keep(7, ids, 0.3)
    order = torch.randperm(1000)
    assert torch.equal(fa.keep(7, ids[order], 0.3), coins[order])
    assert torch.equal(torch.cat([fa.keep(7, ids[:10], 0.3), fa.keep(7, ids[10:].tolist(), 0.3)]), coins)
    code = "import torch, fastadv as fa; print(fa.keep(7, torch.arange(1000), 0.3).nonzero().squeeze(1).tolist())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(coins.nonzero().squeeze(1).tolist())


def test_coins_are_fair_independent_and_monotone() -> None:
    ids = torch.arange(200_000)
    for probability in (0.0, 0.1, 0.5, 1.0):
        share = float(fa.keep(0, ids, probability).double().mean())
        deviation = math.sqrt(probability * (1 - probability) / len(ids))
        assert abs(share - probability) <= 5 * deviation
    few, many = fa.keep(5, ids, 0.2), fa.keep(5, ids, 0.4)
    assert not bool((few & ~many).any())
    for other in (fa.keep(6, ids, 0.4), fa.keep(5, ids, 0.4, stream="another use")):
        both = float((many & other).double().mean())
        assert abs(both - 0.16) < 5 * math.sqrt(0.16 * 0.84 / len(ids))
    assert torch.equal(fa.keep(0, ids[:3], torch.tensor([0.0, 1.0, 0.0])), torch.tensor([False, True, False]))


def test_bad_coins() -> None:
    for probability in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"probability is"):
            fa.keep(0, [1], probability)
    with pytest.raises(TypeError, match=r"ids\[1\] is 0.5"):
        fa.keep(0, [1, 0.5], 0.5)
    with pytest.raises(TypeError, match=r"ids has dtype torch\.float32"):
        fa.keep(0, torch.zeros(3), 0.5)
    with pytest.raises(TypeError, match=r"seed is 0\.5; pass an integer"):  # cut off, it would be the coins of 0
        fa.keep(0.5, [1], 0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"seed is 1\.0; pass an integer"):
        fa.Arm("x", seed=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ids\[1\] is 18446744073709551616, which has more than 64 bits"):
        fa.keep(0, [1, 2**64], 0.5)
    with pytest.raises(TypeError, match="ids is a generator; pass a tensor or a list"):
        fa.keep(0, (i for i in range(3)), 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"probability has shape \[2\]; pass one number or \[3\]"):
        fa.keep(0, [1, 2, 3], torch.tensor([0.1, 0.2]))


# ---- arms ------------------------------------------------------------------------------------------------------------


def arms_batch() -> fa.Batch:
    """40 prompts x 8 rollouts of 1 to 5 turns; those that reach turn 5 ran into the cap."""
    generator = torch.Generator().manual_seed(3)
    turns = torch.randint(1, 6, (320,), generator=generator)
    mask = torch.cat([torch.tensor([1, 0] * int(t)) for t in turns])
    lengths = 2 * turns
    solved = (torch.rand(320, generator=generator) < 0.5) & (turns < 5)
    outcomes = torch.where(turns == 5, 2, torch.where(solved, 0, 1))
    return fa.Batch.of(
        mask=mask,
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        rewards=solved.double(),
        group_ids=torch.arange(320) // 8,
        outcomes=outcomes,
        row_ids=torch.arange(320) + 5000,
    )


ARMS = {arm.name: arm for arm in question_one_arms()}


def rollout_values(result: fa.ArmResult) -> Tensor:
    """The advantage of each rollout, from its first segment."""
    return result.advantages.values[result.advantages.segments.offsets[:-1]]


def test_the_arms_of_the_first_question() -> None:
    batch = arms_batch()
    statistics = freeze(batch)
    capped = batch.outcomes == Outcome.BUDGET
    results = {name: arm.apply(batch, statistics) for name, arm in ARMS.items()}
    assert list(results) == ["a", "b", "c", "d0.3", "d0.6", "d1", "e"]

    reference = fa.group_advantages(batch.rewards, batch.groups, baseline="loo")
    assert torch.equal(rollout_values(results["a"]), reference)
    assert not results["a"].excluded.any()
    assert torch.equal(results["b"].excluded, capped)
    assert torch.equal(rollout_values(results["b"]), torch.where(capped, 0.0, reference))
    assert torch.equal(results["b"].weights, (~capped).float())
    survivors = fa.group_advantages(
        batch.rewards, batch.groups, baseline="loo", population="survivors", include=~capped
    )
    assert torch.equal(rollout_values(results["c"]), survivors)
    assert torch.equal(results["d1"].advantages.values, results["b"].advantages.values)
    turned = fa.turn_advantages(batch.rewards, batch.groups, batch.segments, output="segments")
    assert torch.equal(results["e"].advantages.values, turned.values)
    assert not results["e"].excluded.any()
    for result in results.values():  # every arm's advantages are constant on a (rollout, turn), and 0 if excluded
        index = result.advantages.segments
        row = torch.repeat_interleave(torch.arange(320), index.turns())
        assert result.advantages.values[result.excluded[row]].abs().sum() == 0


def test_random_partial_masks_are_nested_and_keyed_by_rollout() -> None:
    batch = arms_batch()
    capped = batch.outcomes == Outcome.BUDGET
    third, most = ARMS["d0.3"].excluded(batch), ARMS["d0.6"].excluded(batch)
    assert bool((most | ~third).all())
    assert bool((capped | ~most).all())
    share = float(most.sum() / capped.sum())
    assert abs(share - 0.6) < 5 * math.sqrt(0.24 / float(capped.sum()))
    half = batch.row_ids < 5160
    assert torch.equal(ARMS["d0.6"].excluded(batch.select(half)), most[half])


def test_rollouts_without_a_result_are_left_out_before_arms() -> None:
    lost = make(rewards=torch.tensor([1.0, math.nan, 0.0, 0.0]), outcomes=torch.tensor([0, 3, 2, 1]))
    for attempt in (lambda: freeze(lost), lambda: fa.named_arm("mask").freeze(lost)):
        with pytest.raises(ValueError, match=r"1 of 4 rollouts have no result .*batch\.select\(batch\.rewards\.isf"):
            attempt()
    assert freeze(lost.select(lost.rewards.isfinite())).rewards.shape == (3,)


def test_arms_refuse_what_contradicts_itself() -> None:
    with pytest.raises(ValueError, match="population is 'survivors', but nothing is excluded"):
        fa.Arm("x", population="survivors")
    with pytest.raises(ValueError, match="baseline is 'median'"):
        fa.Arm("x", baseline="median")
    with pytest.raises(ValueError, match=r"fraction is 1\.5"):
        fa.Arm("x", (Outcome.BUDGET,), 1.5)
    with pytest.raises(ValueError, match="frozen survivors are those of a full exclusion"):
        fa.Arm("x", (Outcome.BUDGET,), 0.5, population="survivors")
    batch = arms_batch()
    other = freeze(batch, excludes=(Outcome.FAILED,))
    with pytest.raises(ValueError, match="include differs from the survivors"):
        ARMS["c"].apply(batch, other)
    with pytest.raises(ValueError, match=r"frozen for kappa=3\.0"):
        ARMS["e"].apply(batch, freeze(batch, kappa=3.0))


def test_all_arms_share_one_hash() -> None:
    batch = arms_batch()
    statistics = freeze(batch)
    before = statistics.hash
    for arm in ARMS.values():
        arm.apply(batch, statistics)
    assert statistics.hash == before == freeze(batch).hash


# ---- backends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", NATIVE)
def test_arms_run_on_the_kernels(backend: str) -> None:
    """A batch's rewards are float64, which the advantage kernels take."""
    batch = make()
    statistics, plain = (freeze(batch, backend=name) for name in (backend, "reference"))
    for arm in question_one_arms():
        result = arm.apply(batch, statistics, backend=backend)
        assert fa.last_backend() == backend
        expected = arm.apply(batch, plain, backend="reference")
        torch.testing.assert_close(result.advantages.values, expected.advantages.values, rtol=1e-14, atol=1e-15)
        assert result.advantages.values.dtype == torch.float64


def test_narrow_integers_are_numbers_too() -> None:
    """torch compares in the tensor's own type, where 2^31 - 1 and a width of 300 are other numbers."""
    mask = torch.tensor([True, True, False])
    given = {"mask": mask, "rewards": torch.ones(1), "group_ids": [0], "outcomes": torch.tensor([0])}
    for dtype in (torch.int8, torch.uint8, torch.int16):
        batch = fa.Batch.of(**given, cu_seqlens=torch.tensor([0, 3]), versions=torch.tensor([3, 4, 0], dtype=dtype))
        assert batch.versions.tolist() == [3, 4, -1]
        assert fa.unpad(torch.zeros(1, 300), torch.tensor([100], dtype=dtype)).shape == (100,)
