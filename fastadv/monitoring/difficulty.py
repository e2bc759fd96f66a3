"""Masks, truncation and gradient by the difficulty of the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastadv import validation
from fastadv.groups import Labels, group_index
from fastadv.monitoring.checks import amounts, flag, mean, share
from fastadv.outcomes import Outcome, outcome_tensor

# By the success rate of the prompt's other rollouts: its siblings, or those of the other half of its group.
DIFFICULTIES = ("hard (< 1/3)", "medium", "easy (> 2/3)", "unknown")


def difficulty(outcomes: Tensor, group_ids: Labels) -> Tensor:
    """How hard each rollout's prompt is, by the success rate of the other rollouts of its group.

    Its own outcome has no say: sorted by the rate of the whole group, successes would look easier than failures of the
    same prompt, and everything that goes with success would seem to go with easiness.

    Args:
        outcomes: `[B]`, see Outcome. INFRA rollouts get a difficulty and have no say.
        group_ids: `[B]` labels or a GroupIndex.

    Returns:
        `[B]` int64, index in DIFFICULTIES: below 1/3, from 1/3 to 2/3, above, or no sibling with a result.

    Raises:
        ValueError, TypeError: a value that is no outcome, group_ids of another length.
    """
    op = "difficulty"
    values = outcome_tensor(outcomes, op=op)
    groups = group_index(group_ids, op=op).to(values.device)
    if groups.num_rows != values.shape[0]:
        raise ValueError(f"{op}: group_ids has {groups.num_rows} rows, outcomes has {values.shape[0]}")

    def siblings(hit: Tensor) -> Tensor:
        counts = torch.bincount(groups.index[hit], minlength=groups.num_groups)
        return counts[groups.index] - hit.to(torch.int64)

    solved, known = siblings(values == Outcome.SOLVED), siblings(values != Outcome.INFRA)
    return levels_of(solved, known)


def levels_of(solved: Tensor, known: Tensor) -> Tensor:
    """Index in DIFFICULTIES, int64, by how many of how many rollouts were solved."""
    level = torch.where(3 * solved < known, 0, torch.where(3 * solved > 2 * known, 2, 1))
    return torch.where(known > 0, level, 3)


@dataclass(frozen=True)
class DifficultyRow:
    """The rollouts of one difficulty.

    Attributes:
        difficulty: its name.
        rollouts: their number.
        success_rate: share of them that is solved.
        truncation_rate: share that a cap cut off.
        mask_share: share that is excluded from the loss.
        shares: by name, the part of each quantity's sum over the batch that falls on them.
    """

    difficulty: str
    rollouts: int
    success_rate: float
    truncation_rate: float
    mask_share: float
    shares: dict[str, float] = field(default_factory=dict)


def by_difficulty(
    outcomes: Tensor,
    group_ids: Labels,
    *,
    capped: Tensor | None = None,
    excluded: Tensor | None = None,
    quantities: Mapping[str, Tensor] | None = None,
    levels: Tensor | None = None,
) -> list[DifficultyRow]:
    """Mask share, truncation rate, and the share of anything else, by difficulty.

    Args:
        outcomes: `[B]`, see Outcome.
        group_ids: `[B]` labels or a GroupIndex.
        capped: `[B]` bool, cut off by a cap; None: the rollouts whose outcome is BUDGET.
        excluded: `[B]` bool, rollouts that leave the loss; None: none.
        quantities: `[B]` numbers that are not negative, by name: squared gradient norms or sums of absolute advantages
            (the gradient's share), penalties' sizes, tokens, seconds.
        levels: `[B]` integers, index in DIFFICULTIES, where difficulty comes from other rollouts than siblings; None:
            that of `difficulty`.

    Returns:
        A DifficultyRow for each of DIFFICULTIES, in this order.

    Raises:
        ValueError, TypeError: mismatched sizes, a negative or infinite quantity, quantities without names, a level that
            is none.
    """
    op = "by_difficulty"
    values = outcome_tensor(outcomes, op=op)
    of_siblings = difficulty(values, group_ids)
    level = of_siblings if levels is None else levels
    if quantities is not None and not isinstance(quantities, Mapping):
        raise TypeError(f"{op}: quantities is a {type(quantities).__name__}; pass a dict of a tensor per name")
    validation.tensor(op, "levels", level, shape=tuple(values.shape), dtypes=validation.INTEGERS, device=values.device)
    if bool(((level < 0) | (level >= len(DIFFICULTIES))).any()):
        raise ValueError(f"{op}: levels must be from 0 to {len(DIFFICULTIES) - 1}: {', '.join(DIFFICULTIES)}")
    cut = values == Outcome.BUDGET if capped is None else flag(op, "capped", capped, values)
    out = torch.zeros_like(cut) if excluded is None else flag(op, "excluded", excluded, values)
    sums = {name: amounts(op, f"quantities[{name!r}]", value, values) for name, value in (quantities or {}).items()}
    rows = []
    for number, name in enumerate(DIFFICULTIES):
        here = level == number
        rows.append(
            DifficultyRow(
                difficulty=name,
                rollouts=int(here.sum()),
                success_rate=mean(values[here] == Outcome.SOLVED),
                truncation_rate=mean(cut[here]),
                mask_share=mean(out[here]),
                shares={key: share(float(value[here].sum()), float(value.sum())) for key, value in sums.items()},
            )
        )
    return rows
