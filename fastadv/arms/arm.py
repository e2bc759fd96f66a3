"""Arms: what a training recipe does with rollouts that end in a certain way, declared as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fastadv import validation
from fastadv.arms.contradictions import contradiction
from fastadv.arms.known import NOTHING, Known
from fastadv.arms.rules import (
    TOKEN_COINS,
    Condition,
    InverseProbability,
    Rescue,
    RowWeights,
    StaleTokens,
    TokenWeights,
)
from fastadv.batch import Batch, pad
from fastadv.coins import EXCLUSION, check_seed, in_any_row, keep
from fastadv.ops.group_advantages import BASELINES, POPULATIONS, SCALES, group_advantages
from fastadv.ops.turn_advantages import turn_advantages
from fastadv.ops.turn_ids import segments, turn_ids_from_positions
from fastadv.outcomes import Ending, Outcome
from fastadv.segment_table import Segments, SegmentTable
from fastadv.statistics import FrozenStatistics, freeze_statistics

ARM_BASELINES = (*BASELINES, "turn-reached")
ARM_POPULATIONS = (*POPULATIONS, "removed")
ARM_SINGLETONS = ("zero", "raw")
GROUP_FILTERS = ("all", "mixed")
ARM_DIVISORS = ("candidates", "constant", "hajek")
WEIGHTED = ("loss", "reward")


class ArmResult(NamedTuple):
    """What an arm makes of a batch.

    Attributes:
        advantages: one a (rollout, turn), or (rollout, position bucket); 0 for excluded rollouts.
        weights: `[B]`, 0 for excluded rollouts, else 1 (float32), or what the arm weights rollouts by (float64). They
            multiply numerators, never denominators.
        token_weights: like the batch's mask, float64, numerators' too; None: all 1.
        removed: `[B]` bool, rollouts whose mask is to be set to 0 before denominators are counted; None: none.
        divisor: what a loss over rollouts divides by: "candidates" (all rollouts, excluded ones too), "constant", or
            "hajek" (the sum of the weights, which is biased).
    """

    advantages: SegmentTable
    weights: Tensor  # [B]
    token_weights: Tensor | None = None  # like the batch's mask
    removed: Tensor | None = None  # [B]
    divisor: str = "candidates"

    @property
    def excluded(self) -> Tensor:
        """Rollouts that the arm takes out of the loss, `[B]` bool."""
        return self.weights == 0

    def loss_weights(self, batch: Batch) -> Tensor:
        """What `fastadv.policy_loss` takes as `weights`: `[B]`, or like the mask where tokens have weights."""
        if self.token_weights is None:
            return self.weights
        return self.token_weights * batch.rows.spread(self.weights)


@dataclass(frozen=True)
class Arm:
    """One way of turning rewards into advantages: choices that do not depend on each other.

    Attributes:
        name: for reports.
        excludes: outcomes whose rollouts leave the loss, by weight 0. Every rollout keeps its reward.
        fraction: share of the excluded rollouts that is excluded, by one coin per rollout id.
        baseline: "none", "mean", "loo" or "turn-reached".
        population: who votes in the mean: "all" rollouts, or the "survivors" that are not excluded; "removed": an
            excluded rollout takes its whole group along.
        singleton: what a group with one voter gets: "zero" or "raw". (To drop it is to edit the mask, and no arm does.)
        kappa: shrinkage of the turn-reached baseline.
        seed: of the coins.
        description: one line for reports.
        endings: endings whose rollouts are excluded, as those of `excludes` are.
        condition: what these rollouts have to be besides; without outcomes and endings: which rollouts are excluded.
        scale: "none", or "std": advantages are divided by the group's standard deviation.
        groups: "all", or "mixed": groups without a solved or without an unsolved rollout are removed, from denominators
            too.
        row_weights: weights of the rollouts that are kept, InverseProbability or Rescue; None: 1.
        weighted: what row_weights multiply: the "loss", or the "reward" before the baseline is taken.
        token_weights: weights of tokens: TurnMask, StaleTokens, TokenCoins, PrefixCut or Continuation; None: 1.
        position_edges: positions at which the buckets of a turn-reached baseline end, in place of turns; fixed before
            rollouts are looked at.
        divisor: see ArmResult.
        matched_update: the learning rate is to be scaled until updates are as long as the reference arm's, which a
            trainer does.
    """

    name: str
    excludes: tuple[Outcome, ...] = ()
    fraction: float = 1.0
    baseline: str = "loo"
    population: str = "all"
    singleton: str = "zero"
    kappa: float = 2.0
    seed: int = 0
    description: str = ""
    endings: tuple[Ending, ...] = ()
    condition: Condition | None = None
    scale: str = "none"
    groups: str = "all"
    row_weights: RowWeights | None = None
    weighted: str = "loss"
    token_weights: TokenWeights | None = None
    position_edges: tuple[int, ...] = ()
    divisor: str = "candidates"
    matched_update: bool = False

    def __post_init__(self) -> None:
        op = self._op
        for name, plain in (("name", str), ("description", str), ("matched_update", bool)):
            if not isinstance(getattr(self, name), plain):
                raise TypeError(f"{op}: {name} is {getattr(self, name)!r}; pass a {plain.__name__}")
        for name, kind in (("excludes", Outcome), ("endings", Ending)):
            object.__setattr__(self, name, _members(op, name, getattr(self, name), kind))
        object.__setattr__(self, "position_edges", tuple(self.position_edges))
        validation.choice(op, "baseline", self.baseline, ARM_BASELINES)
        validation.choice(op, "population", self.population, ARM_POPULATIONS)
        validation.choice(op, "singleton", self.singleton, ARM_SINGLETONS)
        validation.choice(op, "scale", self.scale, SCALES)
        validation.choice(op, "groups", self.groups, GROUP_FILTERS)
        validation.choice(op, "divisor", self.divisor, ARM_DIVISORS)
        validation.choice(op, "weighted", self.weighted, WEIGHTED)
        validation.non_negative(op, "kappa", self.kappa)
        validation.non_negative(op, "fraction", self.fraction)
        for edge in self.position_edges:
            if isinstance(edge, bool) or not isinstance(edge, int):
                raise TypeError(f"{op}: position_edges holds {edge!r}; pass positions, integers")
        check_seed(op, self.seed)
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"{op}: fraction is {self.fraction}; it must be in [0, 1]")
        problem = contradiction(self)
        if problem:
            raise ValueError(f"{op}: {problem}")

    @property
    def _op(self) -> str:
        return f"Arm {self.name!r}"

    @property
    def excludes_any(self) -> bool:
        """Whether there are rollouts that it may exclude."""
        return bool(self.excludes or self.endings) or self.condition is not None

    @property
    def tosses(self) -> bool:
        """Whether its seed decides about anything."""
        return self.fraction < 1 or isinstance(self.row_weights, Rescue) or isinstance(self.token_weights, TOKEN_COINS)

    @property
    def needs(self) -> tuple[str, ...]:
        """What it reads of a batch that not every batch has: "endings", "versions", "token_ids"."""
        condition = self.condition
        stale = condition is not None and condition.stale_after is not None
        rules = isinstance(self.row_weights, Rescue) or isinstance(self.token_weights, StaleTokens)
        found = {
            "endings": bool(self.endings),
            "versions": stale or rules,
            "token_ids": condition is not None and condition.not_repeating > 0,
        }
        return tuple(name for name, needed in found.items() if needed)

    @property
    def mask_kind(self) -> str:
        """What decides about its masks: "none" (nothing, or coins alone, whose weights give it all back), "predictable"
        (what is known before a token is sampled) or "outcome" (how the rollout ended)."""
        if self.excludes_any or self.groups == "mixed":
            return "outcome"
        return "none" if self.token_weights is None else self.token_weights.kind

    @property
    def level(self) -> str:
        """What its weights and advantages are constant on: a "rollout", a "turn" or a "token"."""
        rule = "rollout" if self.token_weights is None else self.token_weights.level
        if self.position_edges or rule == "token":
            return "token"
        return "turn" if rule == "turn" or self.baseline == "turn-reached" else "rollout"

    @property
    def flags(self) -> tuple[str, ...]:
        """What a reader of its numbers should know."""
        found = []
        inverse = isinstance(self.row_weights, InverseProbability)
        token_kind = "none" if self.token_weights is None else self.token_weights.kind
        if inverse:
            found.append("its mask depends on the outcome, and its weights give back what that takes")
        elif self.excludes_any or token_kind == "outcome":
            found.append("its mask depends on the outcome: being masked is paid (fastadv.audit says how much)")
        if self.groups == "mixed":
            found.append("it edits the mask: removed groups leave the denominators")
        if self.divisor == "hajek":
            found.append("it divides by the sum of the weights (Hajek), which is biased")
        if self.matched_update:
            found.append("its learning rate is matched by a trainer; gradients at a checkpoint are those without")
        return tuple(found)

    # ---- which rollouts ----------------------------------------------------------------------------------------------

    def decided(self, batch: Batch, known: Known = NOTHING) -> Tensor:
        """Rollouts that it excludes unless a coin saves them, `[B]` bool."""
        hit = self.meets(batch, known)
        return in_any_row(batch.groups, hit) if self.population == "removed" else hit

    def meets(self, batch: Batch, known: Known = NOTHING) -> Tensor:
        """Rollouts that end as the arm says, and meet its condition, `[B]` bool."""
        if not self.excludes_any:
            return torch.zeros_like(batch.capped)
        hit = torch.zeros_like(batch.capped) if self.excludes or self.endings else torch.ones_like(batch.capped)
        for outcome in self.excludes:
            hit |= batch.outcomes == outcome
        if self.endings:
            hit |= self._ended(batch)
        if self.condition is not None:
            hit &= self.condition.holds(self._op, batch, known)
        return hit

    def _ended(self, batch: Batch) -> Tensor:
        names = ", ".join(ending.name for ending in self.endings)
        if batch.endings is None or bool((batch.endings == Ending.UNKNOWN).all()):
            raise ValueError(
                f"{self._op}: it excludes rollouts that ended by {names}, but the batch does not say how its rollouts "
                "ended; give Batch.of endings, or exclude outcomes"
            )
        return torch.isin(batch.endings, batch.endings.new_tensor(list(self.endings)))

    def excluded(self, batch: Batch, known: Known = NOTHING) -> Tensor:
        """Rollouts that the arm takes out of the loss for how they ended, `[B]` bool."""
        hit = self.decided(batch, known)
        if self.fraction < 1:
            hit = hit & keep(self.seed, batch.row_ids, self.fraction, stream=EXCLUSION)
        return hit

    def segments(self, batch: Batch) -> Segments:
        """What its advantages are constant on: the batch's turns, or buckets of positions."""
        if not self.position_edges:
            return batch.segments
        ids = turn_ids_from_positions(batch.lengths, self.position_edges)
        if batch.cu_seqlens is None:
            offsets = torch.cat([batch.lengths.new_zeros(1), batch.lengths.cumsum(0)])
            ids = pad(ids, offsets, width=batch.mask.shape[1], fill=-1)
        return segments(torch.where(batch.mask, ids, -1), batch.cu_seqlens)

    # ---- advantages and weights --------------------------------------------------------------------------------------

    def freeze(self, batch: Batch, *, known: Known = NOTHING, backend: str = "auto") -> FrozenStatistics:
        """The statistics of an unmasked batch as this arm reads them: its survivors, its kappa, its buckets."""
        excluded = self.decided(batch, known) if self.population == "survivors" else torch.zeros_like(batch.capped)
        return _freeze(batch, ~excluded, self.segments(batch), self.kappa, backend)

    def reads(self, statistics: FrozenStatistics, batch: Batch, known: Known = NOTHING) -> bool:
        """Whether statistics of this batch, frozen for another arm, are those that this one reads."""
        include = statistics.include
        survivors = self.population == "survivors"
        if survivors and (include is None or not torch.equal(include, ~self.decided(batch, known))):
            return False
        return self.baseline != "turn-reached" or (self.kappa == statistics.kappa and not self.position_edges)

    def apply(
        self,
        batch: Batch,
        statistics: FrozenStatistics | None,
        *,
        known: Known = NOTHING,
        backend: str = "auto",
    ) -> ArmResult:
        """Advantages and weights of a batch under frozen statistics.

        Args:
            batch: the batch.
            statistics: `fastadv.freeze(batch, ...)` of the same batch: an arm with population "survivors" needs them
                frozen for the rollouts that it excludes, a turn-reached one for its kappa; `Arm.freeze` does both.
                None: the statistics of who votes in this arm, standard deviations too, as in a training step.
            known: what a trainer knows besides.
            backend: "auto" or the name of one of `fastadv.backends()`.

        Raises:
            ValueError: statistics of another batch, of other survivors or another kappa; endings, versions or
                probabilities that the arm reads and nobody gave.
        """
        op, excluded = self._op, self.excluded(batch, known)
        table = self._table(batch, ~excluded, statistics, backend)
        removed = self._removed(batch)
        dropped = excluded if removed is None else excluded | removed
        weights = (~dropped).to(torch.float32)
        values, row = table.values, table.segments.row_of_segment()
        if self.row_weights is not None:
            factors = self._factors(self.row_weights, batch, known)
            if self.weighted == "reward":
                values = values * factors[row]
                factors = (factors != 0).to(torch.float64)
            weights = torch.where(dropped, 0.0, factors)
        values = torch.where((weights == 0)[row], 0.0, values)
        tokens = None if self.token_weights is None else self.token_weights.weights(op, batch, self.seed, known)
        return ArmResult(SegmentTable(values, table.segments), weights, tokens, removed, self.divisor)

    def _factors(self, rule: RowWeights, batch: Batch, known: Known) -> Tensor:
        """What rollouts are weighted by, `[B]` float64."""
        coins = self.excludes_any or known.keep_probability is not None
        if isinstance(rule, InverseProbability) and not coins:
            raise ValueError(
                f"{self._op}: inverse-probability weights, but no probability is known: no coin of the arm excludes "
                "anything, and Known(keep_probability=[B]) was not given"
            )
        chance = self.fraction * self.decided(batch, known).to(torch.float64)
        return rule.weights(self._op, batch, chance, self.seed, known)

    def _table(self, batch: Batch, include: Tensor, statistics: FrozenStatistics | None, backend: str) -> SegmentTable:
        population = "survivors" if self.population == "survivors" else "all"
        ddof = 1 if statistics is None else statistics.ddof
        index = self.segments(batch)
        if self.baseline == "turn-reached":
            return turn_advantages(
                batch.rewards, batch.groups, index, kappa=self.kappa, population=population, include=include,
                singleton=self.singleton, scale=self.scale, ddof=ddof, statistics=statistics, output="segments",
                backend=backend,
            )  # fmt: skip
        per_rollout = group_advantages(
            batch.rewards, batch.groups, baseline=self.baseline, population=population, include=include,
            singleton=self.singleton, scale=self.scale, ddof=ddof, statistics=statistics, backend=backend,
        )  # fmt: skip
        return SegmentTable(index.spread(per_rollout), index)

    def _removed(self, batch: Batch) -> Tensor | None:
        """Rollouts of the groups that a group filter removes."""
        if self.groups == "all":
            return None
        solved = batch.outcomes == Outcome.SOLVED
        return ~(in_any_row(batch.groups, solved) & in_any_row(batch.groups, ~solved))


def _members(op: str, name: str, values: Sequence[IntEnum], kind: type[IntEnum]) -> tuple[IntEnum, ...]:
    """The values, which have to be of this enumeration: the numbers of another one mean something else."""
    for value in values:
        if not isinstance(value, kind):
            names = ", ".join(member.name for member in kind)
            raise TypeError(f"{op}: {name} holds {value!r}; pass members of {kind.__name__}: {names}")
    return tuple(values)


def _freeze(batch: Batch, include: Tensor, index: Segments, kappa: float, backend: str) -> FrozenStatistics:
    if validation.reads_values(batch.rewards):
        lost = int((~batch.rewards.isfinite()).sum())
        if lost:
            raise ValueError(
                f"freeze: {lost} of {batch.num_rollouts} rollouts have no result (a reward of NaN), and no arm decides "
                "about them: leave them out with batch.select(batch.rewards.isfinite())"
            )
    return freeze_statistics(
        batch.rewards,
        batch.groups,
        include=include,
        turn_ids=index,
        cu_seqlens=batch.cu_seqlens,
        mask=batch.mask,
        kappa=kappa,
        backend=backend,
    )


CAPPED = (Outcome.BUDGET,)


def freeze(
    batch: Batch, *, excludes: tuple[Outcome, ...] = CAPPED, kappa: float = 2.0, backend: str = "auto"
) -> FrozenStatistics:
    """Freezes the statistics of a batch, for arms that exclude these outcomes.

    Args:
        batch: the unmasked batch.
        excludes: outcomes that the arms with population "survivors" exclude; the other rollouts are the survivors. For
            an arm that excludes otherwise: `Arm.freeze`.
        kappa: shrinkage of the arms with a turn-reached baseline.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        FrozenStatistics for `Arm.apply`, with turns and denominators.

    Raises:
        ValueError, TypeError: a reward that is not finite (leave rollouts without a result out: `Batch.select`), a
            negative kappa.
    """
    include = torch.ones_like(batch.capped)
    for outcome in excludes:
        include &= batch.outcomes != outcome
    return _freeze(batch, include, batch.segments, kappa, backend)
