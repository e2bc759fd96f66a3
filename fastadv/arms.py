"""Arms: what a training recipe does with rollouts that end in a certain way, declared as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastadv import validation
from fastadv.batch import Batch
from fastadv.coins import keep
from fastadv.ops.group_advantages import BASELINES, POPULATIONS, group_advantages
from fastadv.ops.turn_advantages import turn_advantages
from fastadv.outcomes import Outcome
from fastadv.segment_table import SegmentTable
from fastadv.statistics import FrozenStatistics, freeze_statistics

ARM_BASELINES = (*BASELINES, "turn-reached")
ARM_SINGLETONS = ("zero", "raw")


class ArmResult(NamedTuple):
    """What an arm makes of a batch.

    Attributes:
        advantages: one a (rollout, turn); 0 for excluded rollouts.
        weights: `[B]` float32, 0 for excluded rollouts, else 1. They multiply numerators, never denominators.
    """

    advantages: SegmentTable
    weights: Tensor  # [B]

    @property
    def excluded(self) -> Tensor:
        """Rollouts that the arm takes out of the loss, `[B]` bool."""
        return self.weights == 0


@dataclass(frozen=True)
class Arm:
    """One way of turning rewards into advantages.

    Attributes:
        name: for reports.
        excludes: outcomes whose rollouts leave the loss, by weight 0. Empty: none; every rollout keeps its reward.
        fraction: share of these that is excluded, by one coin per rollout id.
        baseline: "none", "mean", "loo" or "turn-reached".
        population: who votes in the mean: "all" rollouts, or the "survivors" that are not excluded.
        singleton: what a group with one voter gets: "zero" or "raw". (To drop it is to edit the mask, and no arm does.)
        kappa: shrinkage of the turn-reached baseline.
        seed: of the coins.
        description: one line for reports.
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

    def __post_init__(self) -> None:
        op = f"Arm {self.name!r}"
        validation.choice(op, "baseline", self.baseline, ARM_BASELINES)
        validation.choice(op, "population", self.population, POPULATIONS)
        validation.choice(op, "singleton", self.singleton, ARM_SINGLETONS)
        validation.non_negative(op, "kappa", self.kappa)
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"{op}: fraction is {self.fraction}; it must be in [0, 1]")
        if self.population == "survivors" and not self.excludes:
            raise ValueError(f"{op}: population is 'survivors', but nothing is excluded; name the outcomes in excludes")
        if self.population == "survivors" and self.fraction != 1:
            raise ValueError(
                f"{op}: population 'survivors' with fraction {self.fraction}: frozen survivors are those of a full "
                "exclusion"
            )

    def excluded(self, batch: Batch) -> Tensor:
        """Rollouts that the arm takes out of the loss, `[B]` bool."""
        hit = torch.zeros_like(batch.capped)
        for outcome in self.excludes:
            hit |= batch.outcomes == outcome
        if self.fraction < 1:
            hit &= keep(self.seed, batch.row_ids, self.fraction, stream="arm exclusion")
        return hit

    def apply(self, batch: Batch, statistics: FrozenStatistics, *, backend: str = "auto") -> ArmResult:
        """Advantages and weights of a batch under frozen statistics.

        Args:
            batch: the batch.
            statistics: `fastadv.freeze(batch, ...)` of the same batch: an arm with population "survivors" needs them
                frozen for the outcomes that it excludes, a turn-reached one for its kappa.
            backend: "auto" or the name of one of `fastadv.backends()`.

        Raises:
            ValueError: statistics of another batch, of other survivors or another kappa.
        """
        excluded = self.excluded(batch)
        if self.baseline == "turn-reached":
            table = turn_advantages(
                batch.rewards,
                batch.groups,
                batch.segments,
                kappa=self.kappa,
                population=self.population,
                include=~excluded,
                singleton=self.singleton,
                statistics=statistics,
                output="segments",
                backend=backend,
            )
        else:
            per_rollout = group_advantages(
                batch.rewards,
                batch.groups,
                baseline=self.baseline,
                population=self.population,
                include=~excluded,
                singleton=self.singleton,
                statistics=statistics,
                backend=backend,
            )
            index = batch.segments
            table = SegmentTable(torch.repeat_interleave(per_rollout, index.turns(), output_size=index.count), index)
        return ArmResult(table, (~excluded).to(torch.float32))


CAPPED = (Outcome.BUDGET,)


def question_one_arms(*, baseline: str = "loo", kappa: float = 2.0, seed: int = 0) -> tuple[Arm, ...]:
    """The arms that ask whether masking capped rollouts changes the gradient (docs/theory.md, 1 to 7, 10 and 13).

    Args:
        baseline: of arms (a) to (d): "loo" (unbiased), or "mean" (GRPO's group mean, with the rollout in it).
        kappa: of the turn-reached arm.
        seed: of the coins of arm (d).

    Returns:
        Arms "a", "b", "c", "d0.3", "d0.6", "d1" and "e", in this order.

    Raises:
        ValueError: an unknown baseline, or a negative kappa.
    """
    partial = [
        Arm(
            f"d{rho:g}",
            CAPPED,
            rho,
            baseline,
            seed=seed,
            description=f"mask a random {rho:.0%} of capped rollouts, all vote",
        )
        for rho in (0.3, 0.6, 1.0)
    ]
    return (
        Arm("a", baseline=baseline, description="no mask, R = 0 at the cap"),
        Arm("b", CAPPED, baseline=baseline, description="mask capped rollouts, all vote"),
        Arm("c", CAPPED, baseline=baseline, population="survivors", description="mask capped rollouts, survivors vote"),
        *partial,
        Arm("e", baseline="turn-reached", kappa=kappa, description=f"no mask, turn-reached baseline, kappa {kappa:g}"),
    )


def freeze(
    batch: Batch, *, excludes: tuple[Outcome, ...] = CAPPED, kappa: float = 2.0, backend: str = "auto"
) -> FrozenStatistics:
    """Freezes the statistics of a batch, for arms that exclude these outcomes.

    Args:
        batch: the unmasked batch.
        excludes: outcomes that the arms with population "survivors" exclude; the other rollouts are the survivors.
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
    return freeze_statistics(
        batch.rewards,
        batch.groups,
        include=include,
        turn_ids=batch.segments,
        cu_seqlens=batch.cu_seqlens,
        mask=batch.mask,
        kappa=kappa,
        backend=backend,
    )
