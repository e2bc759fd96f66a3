"""Arms on a segment Gram: how each arm's gradient lies to the reference's and to grad P(cap), without the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv import validation
from fastadv.arms import Arm, ArmResult, Known, StaleTokens
from fastadv.arms.baselines import segment_sums
from fastadv.batch import Batch
from fastadv.gradproj.gram import SegmentGram
from fastadv.gradproj.scopes import TURN_NAMES, Partition, Weighted, partition, within_group, within_half
from fastadv.gradproj.statistics import (
    PLUG_IN,
    U_STATISTIC,
    Comparison,
    Directions,
    compare,
    cosine,
    prompt_products,
    resamples,
    signal_share,
)
from fastadv.intervals import Interval
from fastadv.monitoring.difficulty import DIFFICULTIES
from fastadv.outcomes import Outcome
from fastadv.reference.group_advantages import divided
from fastadv.segment_table import SegmentTable
from fastadv.statistics import FrozenStatistics

DRAWS = 1000  # of the bootstrap over prompts


@dataclass(frozen=True)
class Projection:
    """One arm against the reference over one part of the tokens, by one estimator."""

    arm: str
    scope: str  # "all", a turn bucket or a difficulty
    estimator: str  # "plug-in" or "u-statistic"
    comparison: Comparison


ALL = "all"  # the scope of all tokens


@dataclass(frozen=True)
class Projections:
    """What a Gram says about some arms.

        found["b"].cosine.value  # over all tokens, as they are in the batch
        found["b", "turn 1", "u-statistic"].alignment.low
        print(found)  # a table

    Attributes:
        rows: every arm and scope, by both estimators.
        noise_floor: cosine of the reference's gradients from two independent halves of each group.
        signal: share of the reference's squared norm that is no noise; none is shown where the interval holds 0.
        prompts: that intervals resample.
    """

    rows: tuple[Projection, ...]
    noise_floor: float
    signal: Interval
    prompts: int

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms; the first is the reference."""
        return tuple(dict.fromkeys(row.arm for row in self.rows))

    @property
    def scopes(self) -> tuple[str, ...]:
        """Parts that the arms were compared on."""
        return tuple(dict.fromkeys(row.scope for row in self.rows))

    def __getitem__(self, key: str | tuple[str, ...]) -> Comparison:
        """The comparison of an arm: `[arm]`, `[arm, scope]` or `[arm, scope, estimator]`; without them over all tokens
        and as they are in the batch.

        Raises:
            KeyError: what was not compared, with the names of what was.
        """
        given = key if isinstance(key, tuple) else (key,)
        asked = (*given, *(None, ALL, PLUG_IN)[len(given) :])
        valid = {"arm": self.arms, "scope": self.scopes, "estimator": (PLUG_IN, U_STATISTIC)}
        if len(asked) != len(valid):
            raise KeyError(f"Projections has arms, scopes and estimators; got {key!r}")
        for (what, names), name in zip(valid.items(), asked, strict=True):
            if name not in names:
                raise KeyError(f"Projections has no {what} {name!r}; there are {', '.join(map(repr, names))}")
        return next(row.comparison for row in self.rows if (row.arm, row.scope, row.estimator) == asked)

    def table(self, scope: str = ALL) -> str:
        """A line an arm and estimator: its numbers over a scope, each with its interval where it has one."""
        names = ("cosine", "norm_ratio", "difference", "cap_cosine", "explained", "alignment")
        lines = [["arm", "estimator", *names]]
        for arm in self.arms:
            for estimator in (PLUG_IN, U_STATISTIC):
                one = self[arm, scope, estimator]
                lines.append([arm, estimator, *(str(getattr(one, name)) for name in names)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def __repr__(self) -> str:
        if not self.rows:
            return "Projections(no arm has a gradient)"
        return (
            f"Projections of {len(self.arms)} arms against {self.arms[0]!r}, {self.prompts} prompts, noise floor "
            f"{self.noise_floor:.3f}, signal {self.signal}\n{self.table(self.scopes[0])}\n"
            f"scopes: {', '.join(self.scopes)}"
        )


def arm_weights(arm: Arm, rollouts: Batch) -> Weighted:
    """An arm's advantages and weights, with statistics that are frozen from these rollouts.

    Raises:
        ValueError: a rollout that votes and has no finite reward; an arm that looks at single tokens, or at what the
            rollouts do not carry.
    """
    return turn_weights(arm, arm.apply(rollouts, arm.freeze(rollouts)), rollouts)


def apply_to_gram(arm: Arm, gram: SegmentGram) -> tuple[ArmResult, FrozenStatistics]:
    """What an arm makes of a Gram's rollouts, and the statistics that it read, which are frozen from them.

    Raises:
        ValueError: an arm that looks at single tokens, or at what the Gram does not hold.
    """
    rollouts = gram.rollouts
    assert rollouts is not None
    _refuse_tokens(arm)
    held = {"endings": rollouts.endings, "versions": rollouts.versions, "token_ids": gram.repeats}
    missing = [name for name in arm.needs if held[name] is None]
    if missing:
        why = "the rollouts that it was made of did not say them"
        if gram.file_version < 2:
            why = "its file is of version 1, which holds none: write it again, with fastadv replay"
        raise ValueError(f"arm {arm.name!r} reads {' and '.join(missing)}, which the Gram does not have; {why}")
    known = Known()
    if gram.repeats is not None and arm.condition is not None and arm.condition.not_repeating:
        known = Known(repeating=gram.repeats.of(arm.condition.not_repeating))
    statistics = arm.freeze(rollouts, known=known)
    return arm.apply(rollouts, statistics, known=known), statistics


NO_COEFFICIENT = (
    "a segment of the Gram has one coefficient for all of its tokens; take flat gradients (fastadv replay --gradients "
    "cells)"
)


def _refuse_tokens(arm: Arm) -> None:
    """Raises for arms whose weights are no turn's, whatever the rollouts are. Stale tokens may be whole turns."""
    if arm.position_edges or (arm.level == "token" and not isinstance(arm.token_weights, StaleTokens)):
        raise ValueError(f"arm {arm.name!r} treats the tokens of a turn differently, and {NO_COEFFICIENT}")


def turn_weights(arm: Arm, result: ArmResult, rollouts: Batch) -> Weighted:
    """An arm's result with its weights of turns, if any, multiplied into the advantages.

    Raises:
        ValueError: an arm whose weights differ within a turn.
    """
    _refuse_tokens(arm)
    if result.token_weights is None:
        return Weighted(result.advantages, result.weights)
    index = result.advantages.segments
    factors = divided(
        segment_sums(rollouts, index, result.token_weights),
        segment_sums(rollouts, index, torch.ones_like(rollouts.mask)),
    )
    torn = (factors != 0) & (factors != 1) if arm.level == "token" else torch.zeros_like(factors, dtype=torch.bool)
    if bool(torn.any()):
        raise ValueError(
            f"arm {arm.name!r} treats the tokens of a turn differently, of {int(torn.sum())} turns of {index.count}, "
            f"and {NO_COEFFICIENT}"
        )
    return Weighted(SegmentTable(result.advantages.values * factors, index), result.weights)


def project(
    gram: SegmentGram,
    arms: Sequence[Arm],
    *,
    weighted: Sequence[Weighted] | None = None,
    buckets: bool = True,
    draws: int = DRAWS,
    seed: int = 0,
) -> Projections:
    """Every arm's gradient against that of the first, over all tokens, by turn and by difficulty.

    Args:
        gram: with rollouts; of level "turn" if an arm's advantages or the buckets depend on the turn.
        arms: the first is the reference.
        weighted: what each arm makes of the rollouts, for arms that read more of a batch than the Gram carries; None:
            by what it carries.
        buckets: by turn (where the Gram has turns) and by difficulty too. Parts without a gradient are left out.
        draws: bootstrap resamples of prompts.
        seed: of halves and bootstrap. (Coins of an arm have the arm's.)

    Returns:
        Projections.

    Raises:
        ValueError: no arm, a Gram without rollouts, advantages that differ within its segments.
    """
    if not isinstance(gram, SegmentGram):
        raise TypeError(f"project: gram is a {type(gram).__name__}; pass a SegmentGram, see segment_gram")
    validation.integer("project", "draws", draws)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"project: seed is {seed!r}; pass an integer")
    if isinstance(arms, Arm) or not all(isinstance(arm, Arm) for arm in arms):
        raise TypeError("project: arms must be a list of fastadv.Arm, the first the reference")
    rollouts = gram.rollouts
    if rollouts is None:
        raise ValueError("project: no arm can be computed without the rollouts; take SegmentGram.with_rollouts first")
    if not arms:
        raise ValueError("project: no arm was given")
    names = [arm.name for arm in arms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"project: two arms are called {twice!r}; give each a name of its own")
    if weighted is None:
        weighted = [turn_weights(arm, apply_to_gram(arm, gram)[0], rollouts) for arm in arms]
    coefficients = torch.stack([one.coefficients(gram) for one in weighted])  # [K, S]
    inner, rows_of = gram.gram.cpu(), gram.rows.cpu()
    prompts, n = rollouts.groups.index[rows_of], rollouts.groups.num_groups
    cells, counts = partition(rollouts, seed), resamples(n, draws, seed)
    capped = rollouts.outcomes == Outcome.BUDGET
    directions = Directions(
        within_group(capped, rollouts).coefficients(gram),
        torch.stack([within_half(capped, rollouts, cells, half).coefficients(gram) for half in (0, 1)]),
        cells.half[rows_of],
    )
    reference, differences = coefficients[0], coefficients - coefficients[0]
    rows: list[Projection] = []
    for scope, inside in scopes(gram, cells, buckets):
        if not bool((coefficients[:, inside] != 0).any()):
            continue
        part, size = torch.where(inside, reference, 0.0), rollouts.num_rollouts
        found = [
            compare(inner, prompts, part, torch.where(inside, difference, 0.0), directions, counts, size)
            for difference in differences
        ]
        if all(one[PLUG_IN].norm.value == 0 for one in found):
            continue
        for arm, by_estimator in zip(arms, found, strict=True):
            rows += [Projection(arm.name, scope, name, one) for name, one in by_estimator.items()]
    alone = [within_half(rollouts.rewards, rollouts, cells, half).coefficients(gram) for half in (0, 1)]
    left = torch.stack([alone[0], alone[1], alone[0], reference])
    right = torch.stack([alone[0], alone[1], alone[1], reference])
    products = prompt_products(inner, prompts, n, left, right)
    return Projections(tuple(rows), cosine(products[:3]), signal_share(products[3:], counts), n)


def scopes(gram: SegmentGram, cells: Partition, buckets: bool) -> Iterator[tuple[str, Tensor]]:
    """Parts that gradients are compared on: names, and which of the Gram's segments are inside, `[S]` bool."""
    yield ALL, torch.ones(gram.size, dtype=torch.bool)
    if not buckets:
        return
    if gram.level == "turn":
        for number, name in enumerate(TURN_NAMES):
            yield name, cells.turn == number
    difficulty = cells.difficulty[gram.rows.cpu()]
    for number, name in enumerate(DIFFICULTIES):
        yield name, difficulty == number
