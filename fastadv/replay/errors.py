"""What went wrong with a user's files or options, in words for the user."""

from __future__ import annotations

import math
import unicodedata


class ReplayError(Exception):
    """A mistake in what was given: the command prints the message and stops, without a traceback."""


def plain(text: str) -> str:
    """Untrusted text in one line without control characters, so that no terminal acts on it."""
    return "".join(" " if unicodedata.category(c) in _CONTROLS else c for c in text)


LONGEST_NAME = 80


def short(name: str) -> str:
    """An untrusted name in one line, as `plain`, its end left out where it would fill a screen."""
    return plain(name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…")


# Controls, formats (which turn text around), surrogates, private and unassigned characters, line and paragraph ends.
_CONTROLS = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def counted(number: int, what: str) -> str:
    """A number of things: "1 prompt", "2,000 prompts"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def finite(option: str, value: float, *, least: float = -math.inf, above: float = -math.inf) -> None:
    """Raises ReplayError unless an option's value is a finite number, at least `least` and more than `above`."""
    if not math.isfinite(value) or value < least or value <= above:
        bounds = [f" and {word} {x:g}" for word, x in (("at least", least), ("above", above)) if math.isfinite(x)]
        raise ReplayError(f"{option} is {value}; it must be finite{''.join(bounds)}")
