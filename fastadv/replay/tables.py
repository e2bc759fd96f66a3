"""Tables of a report, and numbers in them. The terminal and the page show the same."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A titled table; `caption` says how to read it."""

    title: str
    caption: str
    columns: list[str]
    rows: list[list[str]]


def number(value: float, digits: int = 3) -> str:
    """A number for people; a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def significant(value: float) -> str:
    """A number of any size for people; a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:.3g}"


def times(value: float) -> str:
    """A factor for people."""
    return "–" if math.isnan(value) else f"{value:.2f}x"


def percent(value: float) -> str:
    """A share for people."""
    return "–" if math.isnan(value) else f"{value:.1%}"
