"""Numbers with confidence intervals, and those of shares and of what is made of two shares, in closed form."""

from __future__ import annotations

import math
from typing import NamedTuple

from fastadv import validation

Z = 1.959963984540054  # of 95 %


class Interval(NamedTuple):
    """A number with its 95 % interval; NaN where there is none.

    Attributes:
        value: the number.
        low, high: the ends.
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "–"
        return f"{self.value:.3f}" + ("" if math.isnan(self.low) else f" ({self.low:.2f} to {self.high:.2f})")


UNKNOWN = Interval(math.nan)


def wilson(hits: int, total: int) -> Interval:
    """A share with Wilson's score interval, which keeps to [0, 1] and has a length for 0 and for all hits. Raises
    ValueError or TypeError for what are no counts."""
    hits, total = _counts("wilson", hits, total)
    if total == 0:
        return UNKNOWN
    p, spread = hits / total, Z * Z / total
    centre = (p + spread / 2) / (1 + spread)
    half = Z * math.sqrt(p * (1 - p) / total + spread / (4 * total)) / (1 + spread)
    # At the ends the formula is exact, and its floating-point value is not.
    return Interval(p, 0.0 if hits == 0 else centre - half, 1.0 if hits == total else centre + half)


def difference(hits: tuple[int, int], totals: tuple[int, int]) -> Interval:
    """The first share minus the second, with Newcombe's hybrid score interval (his method 10). Raises
    ValueError or TypeError for what are no counts."""
    cells = [_counts("difference", h, n) for h, n in zip(hits, totals, strict=True)]
    if 0 in totals:
        return UNKNOWN
    (p, p_low, p_high), (q, q_low, q_high) = (wilson(h, n) for h, n in cells)
    low, high = math.hypot(p - p_low, q_high - q), math.hypot(p_high - p, q - q_low)
    return Interval(p - q, p - q - low, p - q + high)


def odds_ratio(hits: tuple[int, int], totals: tuple[int, int]) -> Interval:
    """The first share's odds over the second's, with half a count added to each cell (Haldane and Anscombe) and Woolf's
    interval on the logarithm. Raises ValueError or TypeError for what are no counts."""
    pairs = [_counts("odds_ratio", h, n) for h, n in zip(hits, totals, strict=True)]
    if 0 in totals:
        return UNKNOWN
    cells = [count + 0.5 for h, n in pairs for count in (h, n - h)]
    log = math.log(cells[0] * cells[3] / (cells[1] * cells[2]))
    half = Z * math.sqrt(sum(1 / cell for cell in cells))
    return Interval(math.exp(log), math.exp(log - half), math.exp(log + half))


def _counts(op: str, hits: int, total: int) -> tuple[int, int]:
    """Both as Python's integers: NumPy's wrap around."""
    validation.integer(op, "total", total)
    validation.integer(op, "hits", hits, most=int(total))
    return int(hits), int(total)
