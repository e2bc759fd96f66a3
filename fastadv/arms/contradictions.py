"""Choices of an arm that cannot go together, and why."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from fastadv.arms.rules import InverseProbability, Rescue, RowWeights

if TYPE_CHECKING:
    from fastadv.arms.arm import Arm


def contradiction(arm: Arm) -> str:
    """Why an arm's choices cannot go together; empty if they can."""
    rows, partial = arm.row_weights, arm.fraction != 1
    if not arm.excludes_any:
        if arm.population != "all":
            return (
                f"population is {arm.population!r}, but nothing is excluded; name outcomes in excludes, endings, or a "
                "condition"
            )
        if partial:
            return f"fraction is {arm.fraction}, but nothing is excluded that it could be a share of"
    if arm.population == "survivors" and partial:
        return f"population 'survivors' with fraction {arm.fraction}: frozen survivors are those of a full exclusion"
    if arm.population == "removed" and partial:
        return (
            f"population 'removed' with fraction {arm.fraction}: its coins are of rollouts, and one of a group's would "
            "decide for all; Rescue tosses one coin a group"
        )
    if any(b <= a for a, b in pairwise((0, *arm.position_edges))):
        return f"position_edges is {arm.position_edges}; they must be positive and increase"
    if arm.position_edges and arm.baseline != "turn-reached":
        return f"position_edges is given, but baseline {arm.baseline!r} looks at no position; use 'turn-reached'"
    if rows is None:
        if arm.weighted == "reward":
            return "weighted is 'reward', but there are no row_weights"
        if arm.divisor == "hajek":
            return "divisor is 'hajek', but without row_weights their sum is a count of what is kept"
        return ""
    return _contradictory_weights(arm, rows)


def _contradictory_weights(arm: Arm, rows: RowWeights) -> str:
    inverse = isinstance(rows, InverseProbability)
    if inverse and arm.excludes_any and arm.fraction == 1:
        return (
            "inverse-probability weights with fraction 1: what is excluded for certain is kept with probability 0, and "
            "no weight brings it back; use a fraction below 1"
        )
    stale = arm.condition is not None and arm.condition.stale_after is not None
    if isinstance(rows, Rescue) and stale:
        return "Rescue weights stale groups, and the condition excludes them; take one of the two"
    if arm.weighted == "reward" and arm.scale == "std":
        return (
            "weights multiply the reward, and scale 'std' divides them out again: (w R - w mean) / (w std) has no w in "
            "it; use weighted='loss'"
        )
    if arm.weighted == "reward" and inverse and arm.baseline != "none":
        return (
            f"weights that differ within a group multiply the reward, and the {arm.baseline!r} baseline mixes them "
            "into the others' advantages: a reward multiplier is no loss weight; use weighted='loss'"
        )
    return ""
