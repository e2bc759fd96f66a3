"""Reward minus the baseline of the turn reached, one number a segment, in float64.

One launch. Writes 4 bytes a segment (8 of float64) and reads its row's 33, its row's offset and its turn's moments,
which stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from fastadv.triton_kernels._advantage_rule import (
    INPUTS,
    bits,
    context_of,
    float_of,
    leave_one_out,
    mean_of,
    rule_arguments,
    scale_advantage,
)
from fastadv.triton_kernels._forms import aligned_form
from fastadv.triton_kernels._launch import Configuration, blocks, launch
from fastadv.triton_kernels._rows import rows_of_tokens
from torch import Tensor

BLOCK = 256
TABLE = {"offsets": "*i64", "table": "*i64", "turn_votes": "*fp64", "turn_rewards": "*fp64"}
NUMBERS = dict.fromkeys(("segments", "size", "kappa", "shrink_to_mean"), "i64")


@triton.jit(do_not_specialize=[name for name, type_ in {**INPUTS, **NUMBERS}.items() if type_ == "i64"])
def turn_advantages_kernel(
    rewards,  # [B] float64
    left_out,  # [B] float64: the reward that the moments hold for the row
    votes,  # [B] float64: its votes there
    group,  # [B] int64
    include,  # [B] uint8
    minimum,  # [G] float64: these four of the population that the mean is over
    weight,  # [G] float64
    sums,  # [G] float64
    voters,  # [G] int64
    spread_weight,  # [G] float64: these two of the population that the scale is over
    squares,  # [G] float64
    offsets,  # [B + 1] int64: each row's first segment
    table,  # [G + 1] int64: each group's first turn
    turn_votes,  # [size] float64
    turn_rewards,  # [size] float64
    values,  # [segments] float32 or float64
    rows: tl.int64,
    groups: tl.int64,
    has_include: tl.int64,
    baseline: tl.int64,
    singleton: tl.int64,
    scaled: tl.int64,
    ddof: tl.int64,
    eps: tl.int64,
    eps_form: tl.int64,
    segments: tl.int64,
    size: tl.int64,
    kappa: tl.int64,
    shrink_to_mean: tl.int64,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    segment = start + tl.arange(0, BLOCK)  # [BLOCK]
    there = segment < segments
    row, held = rows_of_tokens(offsets, rows, 0, start, segments, BLOCK, True)
    settled, value, of, known, _, shifted, left, vote, all_weight, all_sum = context_of(
        row, there, rewards, left_out, votes, group, include, minimum, weight, sums, voters,
        rows, groups, has_include, baseline, singleton, scaled,
    )  # fmt: skip
    mean = tl.where(shrink_to_mean != 0, mean_of(all_sum, all_weight), leave_one_out(all_sum, all_weight, left, vote))
    slot = tl.load(table + of, mask=known, other=0) + segment - tl.load(offsets + row, mask=there, other=0)
    in_table = known & held & (slot >= 0) & (slot < tl.minimum(tl.load(table + of + 1, mask=known, other=0), size))
    count = tl.load(turn_votes + slot, mask=in_table, other=float("nan"))
    total = tl.load(turn_rewards + slot, mask=in_table, other=float("nan"))
    n = count - vote  # of the others that reached the turn
    alone = n <= 0.0
    n = tl.where(alone, 1.0, n)
    lam = n / (n + float_of(kappa))
    bucket = (total - vote * left) / n
    target = tl.where(alone, mean, mean + lam * (bucket - mean))
    advantage = scale_advantage(shifted - target, of, known, spread_weight, squares, scaled, ddof, eps, eps_form)
    result = tl.where(held, tl.where(settled, value, advantage), float("nan"))
    tl.store(values + segment, result.to(values.dtype.element_ty), mask=there)


def turn_advantages(
    tensors: list[Tensor],
    include: Tensor | None,
    rule: list[float],
    table: list[Tensor],
    offsets: Tensor,
    kappa: float,
    shrink_to_mean: bool,
    values: Tensor,
) -> int:
    """See `fastadv.ops.turn_advantages.TURN_ADVANTAGES`. A turn that its group's table lacks gets NaN."""
    arguments = {
        **rule_arguments(tensors, include, rule),
        **dict(zip(TABLE, (offsets, *table), strict=True)),
        "values": values,
        "segments": values.shape[0],
        "size": table[1].shape[0],
        "kappa": bits(kappa),
        "shrink_to_mean": int(shrink_to_mean),
    }
    launch(turn_advantages_kernel, (blocks(values.shape[0], BLOCK),), arguments, {"BLOCK": BLOCK})
    return 0


STREAMING = ()  # one number a segment


def configurations() -> Iterator[Configuration]:
    """Every form that a launch can ask for, with aligned pointers."""
    for values in ("*fp32", "*fp64"):
        arguments = {**INPUTS, **TABLE, "values": values, **NUMBERS}
        yield aligned_form(turn_advantages_kernel, arguments, {"BLOCK": BLOCK})


def bytes_moved(segments: int, rows: int, groups: int, turns: int, *, values: int = 4) -> int:
    """What the op has to read and write with one population and all rows included, where groups have this many turns
    in all; `values` are the bytes of an advantage."""
    return values * segments + 40 * rows + 8 + 48 * groups + 8 + 16 * turns
