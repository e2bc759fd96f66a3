"""Rewards of rollouts that were cut off or ran long."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastadv as fa
from fastadv.arms import Condition

NAN = math.nan


def same(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=0, atol=0, equal_nan=True)


# ---- soft overlong penalty -------------------------------------------------------------------------------------------


@pytest.mark.row(44)
def test_e13_the_papers_configuration() -> None:
    """arXiv 2503.14476, section 4.1: L_max 20480, L_cache 4096."""
    same(fa.soft_overlong_penalty([12288, 15800, 16384, 18432, 20480, 30000], 20480, 4096), [0, 0, 0, -0.5, -1, -1])
    # Whoever takes L_max for the start of the line punishes a response that the paper does not.
    other = fa.soft_overlong_penalty([15800], 16384, 4096)
    assert float(other) == pytest.approx(-0.8574, abs=5e-5)
    assert float(1 + other) == pytest.approx(0.1426, abs=5e-5)


def by_definition(length: int, most: int, cache: int) -> float:
    """Eq. 13, and TRL's `get_soft_overlong_punishment`."""
    if length <= most - cache:
        return 0.0
    return (most - cache - length) / cache if length <= most else -1.0


@pytest.mark.row(44)
@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 150), st.floats(0, 5))
def test_the_owners_forms(before: int, cache: int, length: int, factor: float) -> None:
    most = before + cache
    excess = length - before

    def penalty(**options: float | None) -> float:
        return float(fa.soft_overlong_penalty([length], most, cache, **options))

    paper = penalty()
    assert paper == pytest.approx(by_definition(length, most, cache), rel=1e-6)
    openrlhf = -min(excess, cache) / cache * factor if excess > 0 else 0.0
    assert penalty(factor=factor) == pytest.approx(openrlhf, rel=1e-6, abs=1e-30)
    verl = min(-excess / cache * factor, 0.0)
    assert penalty(factor=factor, floor=None) == pytest.approx(verl, rel=1e-6, abs=1e-30)
    assert length > most or penalty(floor=None) == paper


def test_verl_has_no_floor() -> None:
    same(fa.soft_overlong_penalty([100, 120, 140], 100, 20, floor=None), [-1, -2, -3])
    same(fa.soft_overlong_penalty([100, 120, 140], 100, 20, floor=-1.5, factor=2.0), [-2, -3, -3])


def test_a_cache_of_zero_is_a_step() -> None:
    same(fa.soft_overlong_penalty([0, 99, 100, 101], 100, 0), [0, 0, 0, -1])


def test_lengths_of_any_integer_type_and_none_at_all() -> None:
    for dtype in (torch.int32, torch.int64, torch.uint8):
        same(fa.soft_overlong_penalty(torch.tensor([95], dtype=dtype), 100, 10), [-0.5])
    same(fa.soft_overlong_penalty([2**40], 2**40, 2**39), [-1])
    assert fa.soft_overlong_penalty([], 100, 10).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1], 100, 101), {}, "cache_length is 101, max_length 100"),
        (([1], 100, 10), {"factor": -1.0}, "factor is -1.0"),
        (([1], 100, 10), {"factor": NAN}, "factor is nan"),
        (([1], 100, 10), {"floor": 0.5}, "floor is 0.5"),
        (([1], 100, 10), {"floor": -math.inf}, "floor is -inf"),
        (([1], 100, 0), {"floor": None}, "would be infinite"),
        (([1, -2], 100, 10), {}, r"lengths\[1\] is -2"),
        (([1], -1, 0), {}, "max_length is -1"),
        ((torch.zeros(2, 2, dtype=torch.int64), 100, 10), {}, r"lengths has shape \[2, 2\]"),
    ],
)
def test_contradictions_of_the_penalty(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fa.soft_overlong_penalty(*arguments, **options)


def test_wrong_types_of_the_penalty() -> None:
    with pytest.raises(TypeError, match=r"lengths has dtype torch\.float32"):
        fa.soft_overlong_penalty([1.5], 100, 10)
    for value in (0.9, True):
        with pytest.raises(TypeError, match="cache_length is a"):
            fa.soft_overlong_penalty([1], 100, value)


# ---- cut-off rollouts ------------------------------------------------------------------------------------------------

REWARDS = torch.tensor([1.0, 0.0, 1.0, 0.0, -0.5, NAN])
CUT = torch.tensor([False, False, True, True, True, True])


@pytest.mark.row(44)
def test_zero_on_cap() -> None:
    same(fa.zero_on_cap(REWARDS, CUT), [1, 0, 0, 0, 0, 0])
    same(fa.zero_on_cap(REWARDS, CUT, passed="keep"), [1, 0, 1, 0, 0, 0])
    same(fa.zero_on_cap(REWARDS, CUT, passed="keep", passing=1.0), [1, 0, 0, 0, 0, 0])
    assert fa.zero_on_cap(REWARDS.bfloat16(), CUT).dtype == torch.bfloat16


@pytest.mark.row(44)
def test_truncated_but_passed() -> None:
    assert fa.truncation_mask(REWARDS, CUT).tolist() == [False, False, False, True, True, True]
    assert fa.truncation_mask(REWARDS, CUT, passed="exclude").tolist() == CUT.tolist()
    # A partial credit above the bar passes, one below does not.
    partial = torch.tensor([0.4, 0.6])
    assert fa.truncation_mask(partial, torch.tensor([True, True]), passing=0.5).tolist() == [True, False]


@pytest.mark.row(44)
def test_stop_properly() -> None:
    same(fa.stop_properly_penalty(REWARDS, CUT, 0.5), [1, 0, 0.5, 0, -0.25, NAN])
    same(fa.stop_properly_penalty(REWARDS, CUT, 0.0), [1, 0, 0, 0, 0, 0])
    same(fa.stop_properly_penalty(REWARDS, CUT, 1.0), REWARDS.tolist())
    same(fa.stop_properly_penalty(REWARDS, CUT, -0.5), [1, 0, -0.5, -0.5, -0.5, -0.5])


def test_nothing_is_written_and_nothing_is_shared() -> None:
    rewards, cut = REWARDS.clone(), CUT.clone()
    fa.zero_on_cap(rewards, cut)
    fa.stop_properly_penalty(rewards, cut, -1.0)
    fa.truncation_mask(rewards, cut, passed="exclude")[:] = False
    same(rewards, REWARDS.tolist())
    assert torch.equal(cut, CUT)


def test_bad_rewards() -> None:
    for op in (fa.zero_on_cap, fa.truncation_mask):
        with pytest.raises(ValueError, match=f"{op.__name__}: passing is nan, which no reward is above"):
            op(torch.ones(2), torch.tensor([True, False]), passing=float("nan"))
    with pytest.raises(ValueError, match="passed is 'drop'; it must be one of 'keep', 'zero'"):
        fa.zero_on_cap(REWARDS, CUT, passed="drop")
    with pytest.raises(ValueError, match="passed is 'zero'; it must be one of 'keep', 'exclude'"):
        fa.truncation_mask(REWARDS, CUT, passed="zero")
    for coefficient in (1.5, NAN, -math.inf):
        with pytest.raises(ValueError, match="coefficient is"):
            fa.stop_properly_penalty(REWARDS, CUT, coefficient)
    with pytest.raises(ValueError, match=r"truncated has shape \[2\]; expected \[6\]"):
        fa.truncation_mask(REWARDS, CUT[:2])
    with pytest.raises(TypeError, match=r"capped has dtype torch\.float32; use bool"):
        fa.zero_on_cap(REWARDS, CUT.float())
    with pytest.raises(ValueError, match=r"rewards has shape \[6, 1\]"):
        fa.zero_on_cap(REWARDS[:, None], CUT[:, None])


@pytest.mark.parametrize("rule", [fa.zero_on_cap, fa.truncation_mask])
def test_a_bar_that_no_reward_is_above_is_an_error(rule: Any) -> None:
    with pytest.raises(ValueError, match="passing is nan"):
        rule(torch.ones(1), torch.tensor([True]), passed="keep", passing=math.nan)
    with pytest.raises(ValueError, match="reward_at_most is nan"):
        Condition(reward_at_most=math.nan)


def test_lengths_and_factors_beyond_numbers() -> None:
    with pytest.raises(ValueError, match="lengths holds what is no number of tokens"):
        fa.soft_overlong_penalty([2**70], 10, 5)
    with pytest.raises(ValueError, match=r"max_length is 1180591620717411303424; a response has fewer than 2\^62"):
        fa.soft_overlong_penalty([3], 2**70, 5)
    with pytest.raises(ValueError, match=r"with factor 1e\+300 the penalty of the longest response is beyond float32"):
        fa.soft_overlong_penalty([12], 10, 5, factor=1e300)


def test_a_penalty_that_the_rewards_dtype_does_not_hold() -> None:
    rewards, truncated = torch.ones(2, dtype=torch.float16), torch.tensor([True, False])
    with pytest.raises(ValueError, match=r"coefficient is -1e\+09, beyond the rewards' torch.float16"):
        fa.stop_properly_penalty(rewards, truncated, -1e9)
