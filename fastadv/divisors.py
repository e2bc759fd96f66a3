"""What a sum over weighted groups is divided by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv import validation
from fastadv.groups import Labels, group_index

UNBIASED = ("candidates", "constant")
BIASED = {
    "hajek": "the sum of weights (Hajek) is as random as the numerator and by the same coins: the update is biased "
    "towards fresh groups, less with more groups",
    "kept": "the number of kept groups is small where much was dropped: the update is biased, and what is kept takes "
    "larger steps, as in a batch that is refilled to a fixed size",
}
DIVISORS = (*UNBIASED, *BIASED)


@dataclass(frozen=True)
class Divisor:
    """A divisor of a sum over groups.

    Attributes:
        rule: its name.
        value: 0-d float64, what the sum over groups is divided by.
        candidates: groups there were, kept or not.
    """

    rule: str
    value: Tensor  # 0-d
    candidates: int

    @property
    def biased(self) -> bool:
        """Whether the expected update is another than that of all candidates."""
        return self.rule in BIASED

    @property
    def warning(self) -> str:
        """What a report has to say about the rule; empty for an unbiased one."""
        return BIASED.get(self.rule, "")

    @property
    def factor(self) -> Tensor:
        """candidates / value, 0-d float64: times a loss whose denominator counts all candidates, as those of this
        library do unless a mask is edited, it gives the loss of this rule."""
        return self.candidates / self.value


def divisor(
    weights: Tensor,
    rule: str = "candidates",
    *,
    group_ids: Labels | None = None,
    constant: float | None = None,
) -> Divisor:
    """The divisor of a sum of weighted groups (docs/theory.md, 12).

    Args:
        weights: `[B]`, of `rescue_weights` for instance; 0 for what was dropped, which is a candidate all the same.
        rule: "candidates", the number of groups before the coins: unbiased. "constant", a number that coins and
            outcomes do not move: unbiased up to that scale. "hajek", the sum of weights, and "kept", the number of
            groups with a positive weight: biased, for comparison, and `Divisor.warning` says so in reports.
        group_ids: `[B]` labels or a GroupIndex, rows of equal label being one group with one weight; None: each row is
            its own.
        constant: of the rule "constant", and of no other.

    Returns:
        The Divisor. If all weights are 0, so is every numerator, and the value of the biased rules is `candidates`.

    Raises:
        ValueError: an unknown rule; "constant" without a positive constant, or a constant with another rule; a group
            with several weights; no group at all; a weight that is negative or not finite.
    """
    validation.choice("divisor", "rule", rule, DIVISORS)
    validation.tensor("divisor", "weights", weights, dtypes=validation.FLOATS)
    if weights.dim() != 1 or weights.shape[0] == 0:
        raise ValueError(f"divisor: weights has shape {list(weights.shape)}; expected [B], B at least 1")
    bad = ~((weights >= 0) & weights.isfinite())
    if validation.reads_values(weights) and bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(f"divisor: weights[{row}] is {float(weights[row])}; a weight is finite and at least 0")
    if (constant is None) == (rule == "constant"):
        raise ValueError(f"divisor: rule is {rule!r} and constant is {constant}; one needs the other")
    if constant is not None:
        validation.count("divisor", "constant", constant, positive=True)
    weights = weights.detach()
    each = weights.to(torch.float64) if group_ids is None else _of_groups(weights, group_ids)  # [G]
    candidates = each.shape[0]
    if rule == "candidates":
        value = each.new_tensor(candidates)
    elif rule == "constant":
        value = torch.as_tensor(constant).to(each).reshape(())
    else:
        value = each.sum() if rule == "hajek" else (each > 0).sum().to(torch.float64)
        value = torch.where(value > 0, value, candidates)
    return Divisor(rule, value, candidates)


def _of_groups(weights: Tensor, group_ids: Labels) -> Tensor:
    """The weight of each group, [G] float64."""
    groups = group_index(group_ids, op="divisor").to(weights.device)
    if groups.num_rows != weights.shape[0]:
        raise ValueError(f"divisor: group_ids has {groups.num_rows} rows, weights has {weights.shape[0]}")
    each = weights.to(torch.float64)[groups.order[groups.offsets[:-1]]]
    if validation.reads_values(weights):
        other = each[groups.index] != weights
        if bool(other.any()):
            row = int(other.nonzero()[0])
            raise ValueError(
                f"divisor: weights[{row}] is {float(weights[row])}, another row of its group has "
                f"{float(each[groups.index[row]])}; a group has one weight"
            )
    return each
