"""Floors of GPU time against numbers worked out by hand."""

from __future__ import annotations

import pytest

from bench.roofline import H100, H200, LAUNCH, Work, floor

MILLION = 1_000_000


def test_the_rates_are_those_of_the_data_sheets() -> None:
    """Rates that follow from the clock are the ones that NVIDIA prints."""
    assert H100.float32 == pytest.approx(67e12, rel=0.005)
    assert H100.special == H100.float32 / 16  # 16 a clock beside 128 that count twice
    assert H100.instructions * 32 * 2 == H100.float32  # each issues a fused multiply-add of 32 lanes
    assert H200.memory / H100.memory == pytest.approx(4.8 / 3.35)
    assert H200.float32 == H100.float32


@pytest.mark.parametrize(
    ("work", "seconds", "limit"),
    [
        (Work(bytes=3.35e9), 1e-3, "memory"),
        (Work(tensor=2 * 8192**3), 2 * 8192**3 / 989.4e12, "tensor"),
        (Work(float32=132 * 256 * MILLION), MILLION / 1.98e9, "float32"),
        (Work(special=132 * 16 * MILLION), MILLION / 1.98e9, "special"),
        (Work(instructions=132 * 4 * MILLION), MILLION / 1.98e9, "instructions"),
    ],
)
def test_each_limit_alone(work: Work, seconds: float, limit: str) -> None:
    assert floor(work).seconds == pytest.approx(seconds + LAUNCH)
    assert floor(work).limit == limit
    assert sum(part > 0 for part in floor(work).parts.values()) == 1


def test_limits_overlap_and_launches_do_not() -> None:
    logits = 8192 * 128256  # bfloat16, read once, one exponential each
    both = floor(Work(bytes=2 * logits, special=logits))
    assert both.seconds == pytest.approx(627.3e-6 + LAUNCH, rel=1e-4)
    assert both.limit == "memory"
    assert both.parts["special"] == pytest.approx(251.2e-6, rel=1e-3)
    assert floor(Work(bytes=2 * logits), H200).seconds < 0.7 * both.seconds


def test_many_small_launches_are_what_takes_the_time() -> None:
    many = floor(Work(bytes=1e6, launches=12))
    assert many.limit == "launches"
    assert many.seconds == pytest.approx(12 * LAUNCH + 1e6 / 3.35e12)
    assert floor(Work(launches=0)).seconds == 0
