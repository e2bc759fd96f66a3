"""What trainers do to the reward of a rollout that was cut off or ran long.

Pure functions of `[B]` tensors; nothing is written in place. docs/rewards_and_coins.md says whose is which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastadv import validation

PASSED_REWARDS = ("keep", "zero")
PASSED_MASKS = ("keep", "exclude")


def soft_overlong_penalty(
    lengths: Tensor | Sequence[int],
    max_length: int,
    cache_length: int,
    *,
    factor: float = 1.0,
    floor: float | None = -1.0,
) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13), to be added to the reward.

    factor * min(0, max(floor, ((max_length - cache_length) - length) / cache_length)): 0 up to max_length -
    cache_length, a straight line to -factor at max_length, and from there on the floor. With the defaults that is the
    paper's and TRL's, with a factor OpenRLHF's, which floors before it multiplies, too; verl and NeMo-RL have no floor:
    beyond max_length their line goes on.

    Args:
        lengths: `[B]` integers. What counts as length is the caller's: verl counts all tokens of the response, those of
            tools among them.
        max_length: L_max, the longest response including the cache (20480 in the paper).
        cache_length: L_cache, the width of the line (4096 in the paper: it starts at 16384). 0 is a step to the
            floor beyond max_length.
        factor: multiplies it all; at least 0.
        floor: lowest value before the factor, at most 0; None: no floor (verl, NeMo-RL).

    Returns:
        `[B]` float32 on the lengths' device, in [factor * floor, 0].

    Raises:
        ValueError: a cache longer than max_length, which would punish every response; a cache of 0 without a floor; a
            negative length or factor; a floor above 0.
        TypeError: lengths that are not integers.
    """
    op = "soft_overlong_penalty"
    if not isinstance(lengths, Tensor):
        try:
            lengths = torch.tensor(lengths, dtype=torch.int64) if len(lengths) == 0 else torch.tensor(lengths)
        except (OverflowError, RuntimeError, ValueError) as error:
            raise ValueError(f"{op}: lengths holds what is no number of tokens: {error}") from error
    validation.tensor(op, "lengths", lengths, dtypes=validation.INTEGERS)
    _one_dimension(op, "lengths", lengths)
    for name, value in (("max_length", max_length), ("cache_length", cache_length)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{op}: {name} is a {type(value).__name__}; pass a number of tokens")
        validation.non_negative(op, name, value)
        if value >= 2**62:
            raise ValueError(f"{op}: {name} is {value}; a response has fewer than 2^62 tokens")
    if cache_length > max_length:
        raise ValueError(
            f"{op}: cache_length is {cache_length}, max_length {max_length}: the penalty would start at a negative "
            "length. max_length is the longest response with the cache in it"
        )
    validation.non_negative(op, "factor", factor)
    if floor is None and cache_length == 0:
        raise ValueError(f"{op}: cache_length is 0 and floor is None: the penalty would be infinite; give it a floor")
    if floor is not None and not (math.isfinite(floor) and floor <= 0):
        raise ValueError(f"{op}: floor is {floor}; it must be finite and at most 0, or None")
    if validation.reads_values(lengths) and bool((lengths < 0).any()):
        row = int((lengths < 0).nonzero()[0])
        raise ValueError(f"{op}: lengths[{row}] is {int(lengths[row])}; a length is at least 0")
    excess = (lengths.to(torch.int64) - (max_length - cache_length)).clamp(min=0).to(torch.float64)  # [B]
    ramp = torch.where(excess > 0, -excess / cache_length if cache_length else -math.inf, 0.0)  # [B]
    penalty = (factor * (ramp if floor is None else ramp.clamp(min=floor))).to(torch.float32)
    if validation.reads_values(penalty) and bool(penalty.isinf().any()):
        raise ValueError(f"{op}: with factor {factor:g} the penalty of the longest response is beyond float32")
    return penalty


def zero_on_cap(rewards: Tensor, capped: Tensor, *, passed: str = "zero", passing: float = 0.0) -> Tensor:
    """Gives capped rollouts reward 0.

    Args:
        rewards: `[B]`; NaN where a capped rollout was never scored is fine.
        capped: `[B]` bool, rollouts that hit a cap.
        passed: capped rollouts whose reward is above `passing`: "zero" them too (SkyRL's `zero_reward_on_non_stop`;
            DeepSWE, which does not even score them), or "keep" their reward.
        passing: the highest reward that does not pass.

    Returns:
        `[B]`, the rewards' dtype.

    Raises:
        ValueError, TypeError: an unknown rule, shapes that differ, a mask that is not boolean, `passing` that is NaN.
    """
    _check("zero_on_cap", rewards, capped, "capped")
    _check_passing("zero_on_cap", passing)
    validation.choice("zero_on_cap", "passed", passed, PASSED_REWARDS)
    hit = capped if passed == "zero" else capped & ~(rewards > passing)
    return torch.where(hit, torch.zeros_like(rewards), rewards)


def truncation_mask(rewards: Tensor, truncated: Tensor, *, passed: str = "keep", passing: float = 0.0) -> Tensor:
    """Which rollouts a truncation filter takes out of the loss: weight 0, not a reward.

    Args:
        rewards: `[B]`; NaN, no result, does not pass.
        truncated: `[B]` bool, rollouts that were cut off.
        passed: truncated rollouts whose reward is above `passing`: "keep" them (Miles' `mask_truncated_zero_reward`;
            DeepScaleR's `mask_truncated_samples`, for rewards of 0 and 1), or "exclude" every truncated one (TRL's
            `mask_truncated_completions`, NeMo-RL's `overlong_filtering`, SkyRL's `apply_overlong_filtering`).
        passing: the highest reward that does not pass.

    Returns:
        `[B]` bool, True: excluded.

    Raises:
        ValueError, TypeError: as `zero_on_cap`.
    """
    _check("truncation_mask", rewards, truncated, "truncated")
    _check_passing("truncation_mask", passing)
    validation.choice("truncation_mask", "passed", passed, PASSED_MASKS)
    return truncated.clone() if passed == "exclude" else truncated & ~(rewards > passing)


def stop_properly_penalty(rewards: Tensor, truncated: Tensor, coefficient: float) -> Tensor:
    """ProRL's penalty of truncated rollouts: scales their reward, or sets it.

    Args:
        rewards: `[B]`.
        truncated: `[B]` bool, rollouts that were cut off.
        coefficient: in [0, 1]: the reward times this, right or wrong, so a negative reward moves towards 0 (NeMo-RL,
            OpenRLHF); below 0: the reward of every truncated rollout (OpenRLHF only), whatever a soft overlong
            penalty took before.

    Returns:
        `[B]`, the rewards' dtype.

    Raises:
        ValueError: a coefficient above 1, which would pay for being cut off, or one that is not finite.
        TypeError: a mask that is not boolean.
    """
    _check("stop_properly_penalty", rewards, truncated, "truncated")
    if not (math.isfinite(coefficient) and coefficient <= 1):
        raise ValueError(
            f"stop_properly_penalty: coefficient is {coefficient}; pass a factor in [0, 1] or a negative reward"
        )
    if abs(coefficient) > torch.finfo(rewards.dtype).max:
        raise ValueError(f"stop_properly_penalty: coefficient is {coefficient:g}, beyond the rewards' {rewards.dtype}")
    shaped = rewards * coefficient if coefficient > 0 else torch.full_like(rewards, coefficient)
    return torch.where(truncated, shaped, rewards)


def _check_passing(op: str, passing: float) -> None:
    """Raises where no reward would be above `passing`, whatever it is."""
    if math.isnan(passing):
        raise ValueError(f"{op}: passing is nan, which no reward is above; pass the highest reward that does not pass")


def _one_dimension(op: str, name: str, value: Tensor) -> None:
    if value.dim() != 1:
        raise ValueError(f"{op}: {name} has shape {list(value.shape)}; expected [B]")


def _check(op: str, rewards: Tensor, flags: Tensor, name: str) -> None:
    validation.tensor(op, "rewards", rewards, dtypes=validation.FLOATS)
    _one_dimension(op, "rewards", rewards)
    validation.tensor(op, name, flags, shape=tuple(rewards.shape), dtypes=(torch.bool,), device=rewards.device)
