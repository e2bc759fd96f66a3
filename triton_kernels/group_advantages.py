"""Reward minus the group's baseline, one number a rollout, in float64.

One launch. Reads 33 bytes a row and the moments of its group, which stay in the cache, and writes 4 (8 of float64).
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from fastadv.triton_kernels._advantage_rule import (
    INPUTS,
    MEAN,
    NO_BASELINE,
    context_of,
    leave_one_out,
    mean_of,
    rule_arguments,
    scale_advantage,
)
from fastadv.triton_kernels._forms import aligned_form
from fastadv.triton_kernels._launch import Configuration, blocks, launch
from torch import Tensor

BLOCK = 256


@triton.jit(do_not_specialize=[name for name, type_ in INPUTS.items() if type_ == "i64"])
def group_advantages_kernel(
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
    advantages,  # [B] float32 or float64
    rows: tl.int64,
    groups: tl.int64,
    has_include: tl.int64,
    baseline: tl.int64,
    singleton: tl.int64,
    scaled: tl.int64,
    ddof: tl.int64,
    eps: tl.int64,
    eps_form: tl.int64,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    there = row < rows
    settled, value, of, known, reward, shifted, left, vote, all_weight, all_sum = context_of(
        row, there, rewards, left_out, votes, group, include, minimum, weight, sums, voters,
        rows, groups, has_include, baseline, singleton, scaled,
    )  # fmt: skip
    mean = tl.where(baseline == MEAN, mean_of(all_sum, all_weight), leave_one_out(all_sum, all_weight, left, vote))
    advantage = tl.where(baseline == NO_BASELINE, reward, shifted - mean)
    advantage = scale_advantage(advantage, of, known, spread_weight, squares, scaled, ddof, eps, eps_form)
    result = tl.where(settled, value, advantage)
    tl.store(advantages + row, result.to(advantages.dtype.element_ty), mask=there)


def group_advantages(tensors: list[Tensor], include: Tensor | None, rule: list[float], advantages: Tensor) -> int:
    """See `fastadv.ops.group_advantages.GROUP_ADVANTAGES`. A row of a group that does not exist gets NaN."""
    arguments = {**rule_arguments(tensors, include, rule), "advantages": advantages}
    launch(group_advantages_kernel, (blocks(advantages.shape[0], BLOCK),), arguments, {"BLOCK": BLOCK})
    return 0


STREAMING = ()  # one number a rollout


def configurations() -> Iterator[Configuration]:
    """Every form that a launch can ask for, with aligned pointers."""
    for advantages in ("*fp32", "*fp64"):
        yield aligned_form(group_advantages_kernel, {**INPUTS, "advantages": advantages}, {"BLOCK": BLOCK})


def bytes_moved(rows: int, groups: int, *, values: int = 4) -> int:
    """What the op has to read and write with one population and all rows included; `values` are the bytes of an
    advantage."""
    return (32 + values) * rows + 40 * groups
