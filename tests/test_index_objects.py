"""Index objects that callers build or carry about themselves, and sums over rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import BACKENDS
from torch import Tensor

import fastadv as fa
from fastadv.rows import Rows

ON = pytest.mark.parametrize("backend", BACKENDS)
REWARDS = torch.tensor([1.0, 0.0, 0.5, 3.0])
CU = torch.tensor([0, 2, 3, 5, 6])
TURNS = torch.tensor([0, 1, 0, 0, 1, 0])


def every_other(t: Tensor) -> Tensor:
    """The same values, one apart in memory."""
    spread = torch.full((2 * t.shape[0],), 7, dtype=t.dtype)
    spread[::2] = t
    return spread[::2]


FORMS = {"int32": Tensor.int, "strided": every_other, "strided int32": lambda t: every_other(t.int())}


@ON
@pytest.mark.parametrize("form", FORMS)
def test_index_objects_hold_what_kernels_read(form: str, backend: str) -> None:
    change, groups, index = FORMS[form], fa.group_index([0, 0, 1, 1]), fa.segments(TURNS, CU)
    changed = fa.GroupIndex(*(change(t) for t in (groups.index, groups.order, groups.offsets)))
    plain = fa.group_advantages(REWARDS, groups, backend=backend)
    assert torch.equal(fa.group_advantages(REWARDS, changed, backend=backend), plain)
    turns = fa.Segments(index.turn_ids, change(CU), change(index.offsets), index.count)
    plain = fa.turn_advantages(REWARDS, groups, index, backend=backend)
    assert torch.equal(fa.turn_advantages(REWARDS, changed, turns, backend=backend), plain)
    assert turns.offsets.dtype == changed.order.dtype == torch.int64


ELSEWHERE = "meta"  # a device that is not the CPU, wherever this runs
THERE = CU.to(ELSEWHERE)
BAD = [
    (fa.GroupIndex, {"index": CU[:2], "order": THERE[:2], "offsets": CU[:2]}, ValueError, "order is on meta"),
    (fa.GroupIndex, {"index": CU[:2], "order": CU[:2], "offsets": THERE[:2]}, ValueError, "offsets is on meta"),
    (
        fa.Segments,
        {"turn_ids": TURNS, "cu_seqlens": CU, "offsets": THERE, "count": 6},
        ValueError,
        "offsets is on meta",
    ),
    (
        fa.Segments,
        {"turn_ids": TURNS, "cu_seqlens": THERE, "offsets": CU, "count": 6},
        ValueError,
        "cu_seqlens is on meta",
    ),
    (
        fa.TokenIndex,
        {"mask": CU > 2, "reads": CU > 2, "positions": THERE[:3]},
        ValueError,
        "positions is on meta",
    ),
    (fa.GroupIndex, {"index": torch.zeros(2), "order": CU[:2], "offsets": CU[:2]}, TypeError, "index has dtype"),
    (fa.GroupIndex, {"index": CU[:2], "order": CU[:3], "offsets": CU[:2]}, ValueError, r"order \[3\]"),
    (fa.GroupIndex, {"index": CU[:2], "order": CU[:2], "offsets": CU.view(1, 5)}, ValueError, r"offsets has shape"),
    (
        fa.Segments,
        {"turn_ids": TURNS, "cu_seqlens": CU, "offsets": CU[:3], "count": 3},
        ValueError,
        r"cu_seqlens \[5\] and offsets \[3\]",
    ),
    (fa.Segments, {"turn_ids": TURNS, "cu_seqlens": None, "offsets": CU, "count": 6}, ValueError, r"\[B, T\] without"),
    (fa.Segments, {"turn_ids": TURNS, "cu_seqlens": CU, "offsets": CU, "count": 5}, ValueError, "offsets end at 6"),
    (fa.TokenIndex, {"mask": TURNS, "reads": TURNS == 0, "positions": CU}, TypeError, "mask has dtype"),
    (fa.TokenIndex, {"mask": TURNS == 0, "reads": CU == 0, "positions": CU}, ValueError, r"reads has shape \[5\]"),
    (fa.TokenIndex, {"mask": CU > 2, "reads": CU > 2, "positions": CU[:2]}, ValueError, "2 others than the 3 tokens"),
    (fa.TokenIndex, {"mask": CU > 2, "reads": CU > 2, "positions": CU.float()}, TypeError, "positions has dtype"),
    (fa.Segments, {"turn_ids": TURNS, "cu_seqlens": CU.float(), "offsets": CU, "count": 6}, TypeError, "cu_seqlens"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "error", "message"), BAD, ids=[b[3] for b in BAD])
def test_bad_index_objects(kind: Any, fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kind(**fields)


@ON
def test_segments_of_another_layout_are_refused(backend: str) -> None:
    index = fa.segments(TURNS, CU)
    assert fa.segments(index, CU.clone(), backend=backend) is index
    for cu_seqlens in (torch.tensor([0, 1, 3, 5, 6]), torch.tensor([0, 3, 6])):
        with pytest.raises(ValueError, match="divide otherwise; build both from one cu_seqlens"):
            fa.turn_advantages(REWARDS, [0] * 4, index, cu_seqlens, backend=backend)
        with pytest.raises(ValueError, match="divide otherwise"):
            fa.freeze_statistics(REWARDS, [0] * 4, turn_ids=index, cu_seqlens=cu_seqlens, backend=backend)
    padded = fa.segments(torch.zeros(4, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"padded \[B, T\] and cu_seqlens is given"):
        fa.turn_advantages(REWARDS, [0] * 4, padded, CU, backend=backend)


# ---- sums over rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=("packed", "padded"))
def test_sums_over_long_rows_are_exact(padded: bool) -> None:
    """A float32 accumulator stops at 2^24 ones."""
    tokens = 20_000_000
    values = torch.ones(1, tokens) if padded else torch.ones(tokens)
    total = Rows.of("test", "values", values, None).sum(values)
    assert total.dtype == torch.float64
    assert total.tolist() == [tokens]
    assert Rows.of("test", "values", values, None).sum(values.to(torch.int64)).dtype == torch.int64


def test_the_reference_loss_of_a_long_rollout() -> None:
    tokens = 4_000_000
    ones = torch.full((tokens,), 0.1)
    config = fa.LossConfig("reinforce", loss_agg_mode="token-sum")
    out = fa.policy_loss(ones, None, -torch.ones(tokens), torch.ones(tokens), config=config, backend="reference")
    assert float(out.loss) == pytest.approx(tokens * float(ones[0].double()), rel=1e-7)


def test_kernels_refuse_what_lies_beyond_a_table() -> None:
    """Sizes are not trusted, even where nothing checked the index object: reads and writes would go past the end."""
    from fastadv import native

    mask = torch.ones(3, 8)
    index = fa.segments(fa.turn_ids_from_mask(mask))
    values = torch.rand(index.count)
    for wrong in (index.offsets + 40, index.offsets.flip(0), index.offsets * 10**9):
        object.__setattr__(index, "offsets", wrong.contiguous())
        with pytest.raises(ValueError, match="segment offsets"):
            fa.segment_tokens(fa.SegmentTable(values, index), backend="cpu")
        with pytest.raises(ValueError, match="segment offsets"):
            fa.policy_loss(-mask, -mask, fa.SegmentTable(values, index), mask, backend="cpu")
        with pytest.raises(ValueError, match=r"segment offsets|groups have 1000000000 turns, but there are 3 segments"):
            fa.turn_advantages(torch.rand(3), [0] * 3, index, output="segments", backend="cpu")
    with pytest.raises(ValueError, match=r"rows \* width is not the number of tokens"):
        native.module().token_counts((2**32, 0, 2**32, 0), native.view(mask), mask.data_ptr(), 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ids", [[2] * 16, [0] * 16 + [2], [0, 2] * 9])
def test_the_first_turn_beyond_a_rollouts_is_refused(ids: list[int], backend: str) -> None:
    """Sixteen equal ids, one in the rest, and mixed ones: kernels look these up in three ways."""
    turn_ids = torch.tensor([ids])
    known = torch.tensor([[0] * (len(ids) - 1) + [1]])
    table = fa.SegmentTable(torch.ones(2), fa.segments(known))
    log_probs, mask = -torch.ones(turn_ids.shape), torch.ones(turn_ids.shape)
    given = {"turn_ids": turn_ids, "backend": backend}
    with pytest.raises(ValueError, match="turn_ids names a turn"):
        fa.policy_loss(log_probs, log_probs, table, mask, **given)
    masked = (turn_ids < 2).float()  # what is not in the mask may be out of range
    out = fa.policy_loss(log_probs, log_probs, table, masked, **given)
    assert float(out.loss) == (-1.0 if masked.any() else 0.0)


def test_rows_of_a_group_keep_their_order() -> None:
    """Sums run in row order, so the order must not depend on the sort: ten thousand rows in three groups."""
    labels = torch.randint(0, 3, (10_000,), generator=torch.Generator().manual_seed(0))
    index = fa.group_index(labels)
    for group in range(3):
        rows = index.order[index.offsets[group] : index.offsets[group + 1]]
        assert (rows.diff() > 0).all()


def test_index_objects_on_another_device() -> None:
    """Their addresses would mean nothing to a kernel."""
    index, other = fa.segments(TURNS, CU), fa.segments(TURNS, CU, backend="reference")
    moved = fa.Segments(TURNS.to(ELSEWHERE), CU.to(ELSEWHERE), other.offsets.to(ELSEWHERE), other.count)
    table, log_probs, mask = fa.SegmentTable(torch.ones(moved.count), moved), torch.zeros(6), torch.ones(6)
    with pytest.raises(ValueError, match=r"^segment_tokens: table\.values is on cpu"):
        fa.segment_tokens(table)
    with pytest.raises(ValueError, match=r"^policy_loss: advantages\.segments\.offsets is on meta"):
        fa.policy_loss(log_probs, log_probs, table, mask, cu_seqlens=CU, turn_ids=index)
    with pytest.raises(ValueError, match=r"^freeze_statistics: turn_ids is on meta"):
        fa.freeze_statistics(REWARDS, [0, 0, 1, 1], turn_ids=moved)
    frozen = fa.freeze_statistics(REWARDS.to(ELSEWHERE), [0, 0, 1, 1], backend="reference")
    assert frozen.groups.index.device == frozen.rewards.device  # labels are numbered on the CPU
    with pytest.raises(ValueError, match=r"^group_advantages: statistics\.rewards is on meta"):
        fa.group_advantages(REWARDS, [0, 0, 1, 1], statistics=frozen)
