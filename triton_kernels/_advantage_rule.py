"""The rules that the group and the turn-reached advantages share: who gets 0, what a singleton gets, how an advantage
is scaled. In float64, in the order of csrc/cpu/advantage_rule.h and csrc/include/fastadv/baselines.h.

Everything is computed for every row, and what holds is selected: options are run-time numbers, so that one compiled
form serves them all.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of options, as `fastadv.ops.group_advantages` numbers them.
NO_BASELINE = tl.constexpr(0)
MEAN = tl.constexpr(1)
RAW = tl.constexpr(1)
ADD = tl.constexpr(0)
FLOOR = tl.constexpr(1)

INPUTS = {  # types of what `rule_arguments` returns
    "rewards": "*fp64", "left_out": "*fp64", "votes": "*fp64", "group": "*i64", "include": "*u8",
    "minimum": "*fp64", "weight": "*fp64", "sums": "*fp64", "voters": "*i64",
    "spread_weight": "*fp64", "squares": "*fp64",
    "rows": "i64", "groups": "i64", "has_include": "i64", "baseline": "i64", "singleton": "i64", "scaled": "i64",
    "ddof": "i64", "eps": "i64", "eps_form": "i64",
}  # fmt: skip


def bits(x: float) -> int:
    """A float64 as the integer of the same bits: a float argument of a kernel is rounded to float32."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


@triton.jit
def float_of(x):
    """The float64 whose bits `bits` made an integer of."""
    return x.to(tl.int64).to(tl.float64, bitcast=True)


def rule_arguments(tensors: list[Tensor], include: Tensor | None, rule: list[float]) -> dict[str, Tensor | int]:
    """What `fastadv.ops.group_advantages.launch_arguments` made, as arguments of a kernel."""
    rewards, left_out, votes, index, *moments = (t.contiguous() for t in tensors)
    minimum, weight, sums, _, voters, _, spread_weight, _, squares, _ = moments
    included = rewards.new_empty(0, dtype=torch.uint8) if include is None else include.contiguous().view(torch.uint8)
    baseline, singleton, scaled, ddof, eps, eps_form = rule
    arguments = (
        rewards, left_out, votes, index, included, minimum, weight, sums, voters, spread_weight, squares,
        rewards.shape[0], minimum.shape[0], int(include is not None), int(baseline), int(singleton), int(scaled),
        bits(ddof), bits(eps), int(eps_form),
    )  # fmt: skip
    return dict(zip(INPUTS, arguments, strict=True))


@triton.jit
def mean_of(total, weight):
    """total / weight, 0 where the weight is 0."""
    nothing = weight == 0.0
    return tl.where(nothing, 0.0, total / tl.where(nothing, 1.0, weight))


@triton.jit
def context_of(
    row, there, rewards, left_out, votes, group, include, minimum, weight, sums, voters,
    rows, groups, has_include, baseline, singleton, scaled,
):  # fmt: skip
    """What the advantage of a row is made of: whether it is settled, and at what; its group and reward; its reward less
    the group's minimum, the reward and the votes that the moments hold for it, and their weight and sum.

    A group that does not exist makes NaN.
    """
    of = tl.load(group + row, mask=there, other=0)
    known = there & (of >= 0) & (of < groups)
    nan = float("nan")
    reward = tl.load(rewards + row, mask=there, other=0.0)
    vote = tl.load(votes + row, mask=there, other=0.0)
    least = tl.load(minimum + of, mask=known, other=nan)
    all_weight = tl.load(weight + of, mask=known, other=nan)
    all_sum = tl.load(sums + of, mask=known, other=nan)
    many = tl.load(voters + of, mask=known, other=2)
    in_moments = vote != 0.0
    left = tl.load(left_out + row, mask=there & in_moments, other=0.0)
    left = tl.where(in_moments, left - least, 0.0)

    enough = tl.where((baseline == NO_BASELINE) & (scaled == 0), 0, 2)  # voters: the reward itself needs none
    settled = many < enough
    value = tl.where(many == tl.where(singleton == RAW, 1, -1), reward, 0.0)
    excluded = tl.load(include + row, mask=row < tl.where(has_include != 0, rows, 0), other=1) == 0
    value = tl.where(excluded, 0.0, value)
    settled = settled | excluded
    reward = tl.where(settled, 0.0, reward)  # what nobody looks at may be anything
    return settled, value, of, known, reward, reward - least, left, vote, all_weight, all_sum


@triton.jit
def leave_one_out(all_sum, all_weight, left, vote):
    """Mean over the other voters."""
    return mean_of(all_sum - vote * left, all_weight - vote)


@triton.jit
def scale_advantage(advantage, of, known, spread_weight, squares, scaled, ddof, eps, eps_form):
    """The advantage divided by its group's standard deviation, if it is to be. A group whose divisor is 0 has no scale:
    the advantage is 0 if it is finite."""
    freedom = tl.load(spread_weight + of, mask=known, other=0.0) - float_of(ddof)
    none = freedom <= 0.0
    variance = tl.load(squares + of, mask=known, other=float("nan")) / tl.where(none, 1.0, freedom)
    variance = tl.where(none, 0.0, variance)
    epsilon = float_of(eps)
    divisor = tl.sqrt(variance) + epsilon
    floored = tl.sqrt(tl.where(variance < epsilon, epsilon, variance)) + epsilon
    positive = tl.where(variance != 0.0, divisor, 1.0)
    divisor = tl.where(eps_form == ADD, divisor, tl.where(eps_form == FLOOR, floored, positive))
    flat = divisor == 0.0
    divided = tl.where(flat, advantage - advantage, advantage / tl.where(flat, 1.0, divisor))
    return tl.where(scaled != 0, divided, advantage)
