"""Reward minus a baseline conditioned on the turn reached, one advantage a (rollout, turn)."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from fastadv import cuda, native, validation
from fastadv.groups import GroupIndex, Labels
from fastadv.kernels import Kernel
from fastadv.ops._register import native_op
from fastadv.ops.group_advantages import (
    Checked,
    check,
    dtype_of,
    fused_arguments,
    fused_kernel_arguments,
    kernel_arguments,
    kernel_rule,
    launch_arguments,
    prepare,
)
from fastadv.ops.moments import readable, turn_moments
from fastadv.ops.segments import segment_tokens
from fastadv.ops.turn_ids import segments
from fastadv.reference import turn_advantages as reference
from fastadv.reference.group_advantages import AdvantageInputs, AdvantageRule
from fastadv.reference.moments import TurnMoments
from fastadv.segment_table import Segments, SegmentTable
from fastadv.statistics import FrozenStatistics

SHRINK_TARGETS = ("loo", "mean")
OUTPUTS = ("tokens", "segments")


def _cpu(
    tensors: list[Tensor],
    include: Tensor | None,
    rule: list[float],
    table: list[Tensor],
    offsets: Tensor,
    kappa: float,
    shrink_to_mean: bool,
    values: Tensor,
) -> int:
    native.module().turn_advantages(
        *kernel_arguments(tensors, include, rule),
        (*map(native.address, table), table[1].shape[0]),
        (native.address(offsets), values.shape[0]),
        kappa,
        shrink_to_mean,
        values.dtype == torch.float64,
        values.data_ptr(),
        native.threads(values.shape[0]),
    )
    return 0


def _cuda(
    tensors: list[Tensor],
    include: Tensor | None,
    rule: list[float],
    table: list[Tensor],
    offsets: Tensor,
    kappa: float,
    shrink_to_mean: bool,
    values: Tensor,
) -> int:
    cuda.module().turn_advantages(
        *cuda.place(values),
        *kernel_arguments(tensors, include, rule),
        (*[native.address(t) for t in table], table[1].shape[0]),
        native.address(offsets),
        values.shape[0],
        kappa,
        shrink_to_mean,
        values.dtype == torch.float64,
        values.data_ptr(),
    )
    return 0


# Writes values, [S], float32 or float64; `table` holds the fields of a TurnMoments.
TURN_ADVANTAGES = Kernel("turn_advantages", cpu=_cpu, triton="turn_advantages", cuda=_cuda)


def _fake(
    backend: str,
    tensors: list[Tensor],
    include: Tensor | None,
    rule: list[float],
    table: list[Tensor],
    offsets: Tensor,
    segments: int,
    kappa: float,
    shrink_to_mean: bool,
    wide: bool,
) -> Tensor:
    return tensors[0].new_empty(segments, dtype=dtype_of(wide))


@native_op("turn_advantages", _fake)
def _launch(
    backend: str,
    tensors: list[Tensor],
    include: Tensor | None,
    rule: list[float],
    table: list[Tensor],
    offsets: Tensor,
    segments: int,
    kappa: float,
    shrink_to_mean: bool,
    wide: bool,
) -> Tensor:
    values = native.empty((segments,), dtype_of(wide), tensors[0].device)
    TURN_ADVANTAGES(backend, tensors, include, rule, table, offsets, kappa, shrink_to_mean, values)
    return values


def _fake_fused(
    rewards: Tensor,
    groups: list[Tensor],
    votes: Tensor | None,
    include: Tensor | None,
    survivors: bool,
    rule: list[float],
    offsets: Tensor,
    segments: int,
    kappa: float,
    shrink_to_mean: bool,
    wide: bool,
) -> Tensor:
    return rewards.new_empty(segments, dtype=dtype_of(wide))


# Given index objects, float rewards and, if any, a bool mask, this is the op's one launch, or the first of two that
# write tokens: the dtypes are read as they are. With frozen statistics rewards become float64 first, a launch more.
@native_op("fused_turn_advantages", _fake_fused)
def _launch_fused(
    rewards: Tensor,
    groups: list[Tensor],
    votes: Tensor | None,
    include: Tensor | None,
    survivors: bool,
    rule: list[float],
    offsets: Tensor,
    segments: int,
    kappa: float,
    shrink_to_mean: bool,
    wide: bool,
) -> Tensor:
    rewards, votes = readable(rewards), None if votes is None else readable(votes)
    values = native.empty((segments,), dtype_of(wide), rewards.device)
    cuda.module().fused_turn_advantages(
        *cuda.place(rewards),
        fused_kernel_arguments(rewards, groups, votes, include, survivors),
        kernel_rule(rule),
        native.address(offsets),
        segments,
        kappa,
        shrink_to_mean,
        wide,
        values.data_ptr(),
    )
    return values


@overload
def turn_advantages(
    rewards: Tensor,
    group_ids: Labels | GroupIndex,
    turn_ids: Tensor | Segments,
    cu_seqlens: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    kappa: float = 2.0,
    shrink_to: str = "loo",
    population: str = "all",
    include: Tensor | None = None,
    singleton: str = "zero",
    scale: str = "none",
    ddof: float = 1,
    eps: float = 1e-6,
    eps_form: str = "add",
    statistics: FrozenStatistics | None = None,
    output: Literal["tokens"] = "tokens",
    backend: str = "auto",
) -> Tensor: ...


@overload
def turn_advantages(
    rewards: Tensor,
    group_ids: Labels | GroupIndex,
    turn_ids: Tensor | Segments,
    cu_seqlens: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    kappa: float = 2.0,
    shrink_to: str = "loo",
    population: str = "all",
    include: Tensor | None = None,
    singleton: str = "zero",
    scale: str = "none",
    ddof: float = 1,
    eps: float = 1e-6,
    eps_form: str = "add",
    statistics: FrozenStatistics | None = None,
    output: Literal["segments"],
    backend: str = "auto",
) -> SegmentTable: ...


def turn_advantages(
    rewards: Tensor,
    group_ids: Labels | GroupIndex,
    turn_ids: Tensor | Segments,
    cu_seqlens: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    kappa: float = 2.0,
    shrink_to: str = "loo",
    population: str = "all",
    include: Tensor | None = None,
    singleton: str = "zero",
    scale: str = "none",
    ddof: float = 1,
    eps: float = 1e-6,
    eps_form: str = "add",
    statistics: FrozenStatistics | None = None,
    output: str = "tokens",
    backend: str = "auto",
) -> Tensor | SegmentTable:
    """Advantage of each turn: the rollout's reward minus the mean reward of the others that got as far.

    At turn l the baseline is `target + lam * (bucket - target)`: bucket is the mean over the other voters that reached
    turn l, target the mean over the other voters, `lam = n / (n + kappa)` with n the number in the bucket. It is known
    before turn l is sampled, so the policy gradient stays unbiased; it takes away what the turn number says about the
    reward.

    Args:
        rewards: `[B]`. May be NaN only in rows that do not vote.
        group_ids: `[B]` labels or a GroupIndex.
        turn_ids: turn of each token from 0, -1 outside of turns, `[N]` or `[B, T]` int32 or int64; or the batch's
            Segments.
        cu_seqlens: `[B + 1]` for packed tokens.
        mask: shaped like `turn_ids`; tokens with 0 get 0. It changes nothing else: turns are counted from `turn_ids`
            alone.
        kappa: pseudo-count that shrinks a thin bucket to the target.
        shrink_to: target of the shrinkage: "loo", or "mean", the group's mean with the row in it, which scales the
            gradient of each turn by another factor below 1 (kept for comparison).
        population, include, singleton, scale, ddof, eps, eps_form: as in `group_advantages`.
        statistics: frozen statistics of the unmasked batch, frozen with `turn_ids` and this kappa.
        output: "tokens" for a tensor like `turn_ids`, "segments" for a SegmentTable, which losses look up in the
            kernel.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        float32 (float64 for float64 rewards), 0 at tokens outside of turns; or the SegmentTable.

    Raises:
        ValueError, TypeError: as `group_advantages`; kappa other than that of the statistics.

    Source: docs/theory.md, equation 13.
    """
    op = "turn_advantages"
    validation.choice(op, "shrink_to", shrink_to, SHRINK_TARGETS)
    validation.choice(op, "output", output, OUTPUTS)
    validation.non_negative(op, "kappa", kappa)
    rule = AdvantageRule("loo", singleton, scale, ddof, eps, eps_form)
    index = segments(turn_ids, cu_seqlens, backend=backend)
    given = check(op, backend, rewards, group_ids, rule, population, include, None, statistics)
    validation.tensor(op, "turn_ids", index.turn_ids, device=rewards.device)
    if index.num_rows != given.groups.num_rows:
        raise ValueError(f"{op}: turn_ids has {index.num_rows} rollouts, rewards has {given.groups.num_rows}")
    numbers = (index.offsets, index.count, float(kappa), shrink_to == "mean", given.dtype == torch.float64)
    if given.fused:
        values = _launch_fused(*fused_arguments(given, rule), *numbers)
    else:
        inputs = prepare(given)
        table = _table(given, inputs, index, kappa)
        if given.backend == "reference":
            values = reference.turn_advantages(inputs, rule, table, index.offsets, index.count, kappa, shrink_to)
            values = values.to(given.dtype)
        else:
            values = _launch(given.backend, *launch_arguments(inputs, rule), list(table), *numbers)
    result = SegmentTable(values, index)
    return result if output == "segments" else segment_tokens(result, mask, backend=given.backend)


def _table(given: Checked, inputs: AdvantageInputs, index: Segments, kappa: float) -> TurnMoments:
    """Moments of each group's turns: of these rewards, or frozen."""
    op, statistics = given.op, given.statistics
    if statistics is None:
        return turn_moments(inputs.left_out, inputs.votes, inputs.groups, index, inputs.mean.minimum, given.backend)
    if kappa != statistics.kappa:
        raise ValueError(
            f"{op}: kappa is {kappa}, but the statistics were frozen for kappa={statistics.kappa}; use one of the two"
        )
    frozen = statistics.population(given.population, op)
    if frozen.turns is None or statistics.segments is None:
        raise ValueError(f"{op}: the statistics were frozen without turn_ids; freeze them with it")
    if validation.reads_values(index.offsets) and not torch.equal(index.offsets, statistics.segments.offsets):
        raise ValueError(f"{op}: turn_ids has other turns than those that the statistics were frozen with")
    return frozen.turns
