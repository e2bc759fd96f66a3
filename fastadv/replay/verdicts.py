"""What a prediction is held against, and what follows from an interval."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastadv.intervals import Interval

SUPPORTED, FALSIFIED, UNDECIDED, NO_DATA = "supported", "falsified", "undecided", "no data"


@dataclass(frozen=True)
class Prediction:
    """A prediction's statistic, what it is held against, and what follows."""

    name: str
    claim: str
    statistic: dict[str, float]
    threshold: str
    interval: tuple[float, float] | None  # 95 %, of the first statistic
    verdict: str
    detail: str
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)  # 95 %, of each statistic that has one


@dataclass(frozen=True)
class Rule:
    """What one statistic's interval decides.

    Supported where the whole interval is above `above`. Falsified where it reaches down to `null`, which is no effect,
    and stays below `effect`, the least that would count as one: an interval that is merely wide falsifies nothing.
    """

    above: float
    null: float = 0.0
    effect: float = 0.0

    def verdict(self, e: Interval) -> str:
        """The verdict; undecided without an interval."""
        if e.low > self.above:
            return SUPPORTED
        return FALSIFIED if e.low <= self.null and e.high < self.effect else UNDECIDED

    def __str__(self) -> str:
        below = f"below {self.effect:g}" + ("" if self.effect <= self.null else f" and reaching {self.null:g}")
        return f"supported above {self.above:g}, falsified {below}"


def judged(
    name: str,
    claim: str,
    found: Mapping[str, tuple[Interval, Rule]],
    *,
    falsifiers: Collection[str],
    lacking: Sequence[str] = (),
    shown: Mapping[str, Interval] | None = None,
) -> Prediction:
    """A prediction that several statistics decide together.

    Args:
        name: of the prediction.
        claim: what was predicted.
        found: statistics that it needs, each with its rule: it is supported if all are.
        falsifiers: those of them that falsify it.
        lacking: what is missing for support, in words.
        shown: statistics that decide nothing.
    """
    verdicts = {key: rule.verdict(estimate) for key, (estimate, rule) in found.items()}
    against = [key for key, verdict in verdicts.items() if verdict == FALSIFIED]
    open_ = [key for key, verdict in verdicts.items() if verdict == UNDECIDED]
    verdict = UNDECIDED
    if set(against) & set(falsifiers):
        verdict = FALSIFIED
    elif not against and not open_ and not lacking:
        verdict = SUPPORTED
    said = [f"{key} is against it" for key in against] + [f"{key} is open" for key in open_] + list(lacking)
    estimates = {key: estimate for key, (estimate, _) in found.items()} | dict(shown or {})
    intervals = {key: (e.low, e.high) for key, e in estimates.items() if not math.isnan(e.low)}
    return Prediction(
        name=name,
        claim=claim,
        statistic={key: estimate.value for key, estimate in estimates.items()},
        threshold="; ".join(f"{key}: {rule}" for key, (_, rule) in found.items()),
        interval=intervals.get(next(iter(estimates))),
        verdict=verdict,
        detail="; ".join(said) or "every statistic is on its side with the whole interval",
        intervals=intervals,
    )


def no_data(name: str, claim: str, why: str, threshold: str = "") -> Prediction:
    """A prediction that nothing here can decide."""
    return Prediction(name, claim, {}, threshold, None, NO_DATA, why)


def weighted_slopes(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Slope of the least-squares line through (x, y), `[D]`; NaN where x does not vary.

    Args:
        x, y: `[n]`, or `[D, n]` float64.
        weights: `[D, n]` float64; points with weight 0 may hold anything.
    """
    on = weights != 0
    total = weights.sum(-1, keepdim=True)

    def centred(values: Tensor) -> Tensor:
        values = torch.where(on, values, 0.0)
        return torch.where(on, values - (weights * values).sum(-1, keepdim=True) / total, 0.0)

    dx, dy = centred(x), centred(y)
    spread = (weights * dx.square()).sum(-1)
    scale = (weights * torch.where(on, x, 0.0).square()).sum(-1)
    # Equal x leave rounding behind, which is no spread.
    return torch.where(spread > 1e-24 * scale, (weights * dx * dy).sum(-1) / spread, math.nan)


# ---- over runs: Student's intervals, whose unit is the seed ---------------------------------------------------------

# 97.5 % points of Student's t with 1, 2, ... degrees of freedom.
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def student(freedom: float) -> float:
    """The 97.5 % point of Student's t; of fractional degrees of freedom, that of the whole number below."""
    whole = max(1, math.floor(freedom))
    return STUDENT[whole - 1] if whole <= len(STUDENT) else 1.96 + 2.4 / whole


def over_runs(values: Sequence[float]) -> Interval:
    """Mean over runs with its interval; without one for a single run, which shows no noise between seeds."""
    return difference(values, (0.0, 0.0))


def difference(left: Sequence[float], right: Sequence[float]) -> Interval:
    """Mean of the left less mean of the right, with Welch's interval over runs."""
    means, errors, freedoms = [], [], []
    for side in (left, right):
        if not side:
            return Interval(math.nan)
        mean = sum(side) / len(side)
        means.append(mean)
        freedoms.append(len(side) - 1)
        errors.append(sum((v - mean) ** 2 for v in side) / len(side) / max(1, len(side) - 1))
    value = means[0] - means[1]
    if not math.isfinite(value) or not all(freedoms):
        return Interval(value if math.isfinite(value) else math.nan)
    squares = sum(e**2 / f for e, f in zip(errors, freedoms, strict=True))
    half = student(sum(errors) ** 2 / squares) * math.sqrt(sum(errors)) if squares else 0.0
    return Interval(value, value - half, value + half)
