"""What two arms differ in: a comparison of more than one thing at a time answers no question."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fastadv.arms.arm import Arm
from fastadv.arms.text import arm_to_dict

# One decision each, however many fields it takes to write it down.
CHOICES = {
    "exclusion": ("excludes", "endings", "condition", "fraction"),
    "population": ("population",),
    "baseline": ("baseline", "kappa", "position_edges"),
    "singleton": ("singleton",),
    "scale": ("scale",),
    "groups": ("groups",),
    "rollout weights": ("row_weights", "weighted"),
    "token weights": ("token_weights",),
    "divisor": ("divisor",),
    "matched update": ("matched_update",),
    "seed": ("seed",),
}


class Difference(NamedTuple):
    """A choice that two arms make differently, and what each of them chose."""

    choice: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.choice}: {self.first} / {self.second}"


@dataclass(frozen=True)
class ArmComparison:
    """What two arms differ in.

    Attributes:
        first, second: their names.
        differences: one for each choice that they make differently.
    """

    first: str
    second: str
    differences: tuple[Difference, ...]

    @property
    def report(self) -> str:
        """What is wrong with comparing them; empty if at most one thing changes."""
        if len(self.differences) < 2:
            return ""
        changes = "; ".join(map(str, self.differences))
        return (
            f"{self.first} and {self.second} differ in {len(self.differences)} things, so what comes out cannot be "
            f"laid to one of them: {changes}"
        )


def compare_arms(a: Arm, b: Arm) -> ArmComparison:
    """Lists what two arms differ in.

    Names and descriptions do not count, nor does a setting that an arm does not read, such as kappa without a
    turn-reached baseline. Fields that are one decision, such as what is excluded and how much of it, are one
    difference.

    Args:
        a: an arm.
        b: another.

    Returns:
        ArmComparison; its `report` says so if more than one thing changes.

    Raises:
        ValueError: never; any two arms can be compared.
    """
    found = []
    for choice, names in CHOICES.items():
        if choice == "seed" and not (a.tosses and b.tosses):
            continue  # of an arm without coins it says nothing, so there is nothing that it could differ from
        first, second = (_said(arm, names) for arm in (a, b))
        if first != second:
            found.append(Difference(choice, first, second))
    return ArmComparison(a.name, b.name, tuple(found))


def _said(arm: Arm, names: tuple[str, ...]) -> str:
    if "excludes" in names and not arm.excludes_any:
        return "nothing"
    kappa = arm.kappa if arm.baseline == "turn-reached" else 2.0
    # Any order, once or twice: what is excluded is a set.
    excludes, endings = sorted(set(arm.excludes)), sorted(set(arm.endings))
    read = replace(arm, kappa=kappa, excludes=tuple(excludes), endings=tuple(endings))
    written = {name: _same_numbers(value) for name, value in arm_to_dict(read).items()}
    shown = [name for name in names if name in written or name == names[0]]
    return ", ".join(f"{name}={written.get(name, getattr(read, name))}" for name in shown)


def _same_numbers(value: Any) -> Any:
    """The value with numbers that are equal written alike: 1 and 1.0."""
    if isinstance(value, dict):
        return {name: _same_numbers(one) for name, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
