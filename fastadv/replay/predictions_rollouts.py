"""What logged rollouts of one checkpoint say of P2, P4 and P5: gradients, subsidies and turns, each within prompts.

P4 and P5 are about training. Here are the parts of them that one checkpoint shows; runs decide the rest
(predictions_runs.py). Claims, P2's 0.5 and the signs are the research plan's; the least effects and P2's levels of no
effect are choices that were made with this code. Neither is fitted to the rollouts that it is asked about.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv.arms import Arm, freeze
from fastadv.arms.baselines import baselines, rollout_means
from fastadv.arms.prompt_sums import PromptSums
from fastadv.batch import Batch
from fastadv.gradproj.gram import SegmentGram
from fastadv.gradproj.projections import DRAWS, arm_weights, project
from fastadv.gradproj.scopes import partition
from fastadv.gradproj.statistics import (
    PLUG_IN,
    U_STATISTIC,
    all_and,
    bootstrapped,
    plug_in_draws,
    prompt_products,
    resamples,
    u_statistic,
    u_statistic_draws,
)
from fastadv.intervals import Interval
from fastadv.monitoring.difficulty import DIFFICULTIES
from fastadv.outcomes import Outcome
from fastadv.replay.verdicts import Prediction, Rule, judged, no_data, weighted_slopes

P2_COSINE = Rule(above=0.5, null=0.1, effect=0.5)  # 0: no more along the cap than along any direction
P2_ELASTICITY = Rule(above=0.1, null=0.1, effect=0.5)  # 1: the norm is proportional to b; 0: it is flat
P4_GAP = Rule(above=0.0, null=0.0, effect=0.01)  # reward
P4_SLOPE = Rule(above=0.0, null=0.0, effect=0.05)  # reward per unit of the cap rate
P5_SEPARATION = Rule(above=0.5, null=0.5, effect=0.55)  # 0.5: turns tell nothing about the outcome


# ---- P2 --------------------------------------------------------------------------------------------------------------


def p2_direction(gram: SegmentGram, masked: Arm, reference: Arm, *, draws: int = DRAWS, seed: int = 0) -> Prediction:
    """P2: what a mask adds to the gradient points towards the cap, and is larger where b is.

    Both statistics come from pairs of different prompts, so that no noise agrees with itself (docs/theory.md, 17); the
    cosine of rollouts with the other half of their group is shown beside. The norm is held against b over subsets of
    rollouts by the success of the other half of their group, a rollout's share each, as an elasticity: the slope of a
    line through the subsets over the ratio of its means.

    Args:
        gram: with rollouts.
        masked: the arm with the mask.
        reference: the arm without.
        draws: bootstrap resamples of prompts.
        seed: of halves and bootstrap.
    """
    claim = (
        "what the mask adds to the gradient has a cosine above 0.5 with grad P(cap), and its norm grows with b over "
        "subsets of tasks"
    )
    rollouts = gram.rollouts
    if rollouts is None:
        raise ValueError("p2_direction: the Gram has no rollouts; take SegmentGram.with_rollouts first")
    rows = project(gram, (reference, masked), buckets=False, draws=draws, seed=seed).rows
    of = {row.estimator: row.comparison for row in rows if row.arm == masked.name}
    if not of or not of[PLUG_IN].difference.value > 0:
        return no_data("P2", claim, "the mask changes no gradient: no rollout that it takes had a baseline")
    elasticity = norm_elasticity(gram, rollouts, masked, reference, draws=draws, seed=seed)
    found = {
        "cosine with the cap": (of[U_STATISTIC].cap_cosine, P2_COSINE),
        "elasticity in b": (elasticity, P2_ELASTICITY),
    }
    return judged("P2", claim, found, falsifiers=found, shown={"cosine, other half": of[PLUG_IN].cap_cosine})


def norm_elasticity(
    gram: SegmentGram, rollouts: Batch, masked: Arm, reference: Arm, *, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """How the norm of a mask's difference goes with b over subsets by difficulty: 1 if it is proportional, 0 if flat.

    NaN where fewer than two subsets have rollouts, where b does not vary, or where noise is all there is.
    """
    inner, row = gram.gram.cpu(), gram.rows.cpu()
    prompts, n = rollouts.groups.index[row], rollouts.groups.num_groups
    counts = resamples(n, draws, seed)
    everything = all_and(counts)  # [1 + D, n]
    with_mask, without = (arm_weights(arm, rollouts).coefficients(gram) for arm in (masked, reference))
    difficulty = partition(rollouts, seed).difficulty
    subsets = [k for k in range(len(DIFFICULTIES) - 1) if bool((difficulty == k).any())]
    if len(subsets) < 2:
        return Interval(float("nan"))
    parts = torch.stack([torch.where(difficulty[row] == k, with_mask - without, 0.0) for k in subsets])
    products = prompt_products(inner, prompts, n, parts, parts)
    squares = torch.cat(
        [u_statistic(products)[:, None], u_statistic_draws(products, counts, plug_in_draws(products, counts))], 1
    )  # [K, 1 + D]

    def over_prompts(per_rollout: Tensor) -> Tensor:  # [K, 1 + D]: sums over the resampled prompts
        sums = torch.zeros(len(subsets), n, dtype=torch.float64)
        for k, subset in enumerate(subsets):
            sums[k].index_add_(0, rollouts.groups.index, torch.where(difficulty == subset, per_rollout, 0.0))
        return sums @ everything.T

    sizes = over_prompts(torch.ones(rollouts.num_rollouts, dtype=torch.float64))
    b = over_prompts(rollout_baselines(reference, rollouts, gram.tokens)) / sizes
    # A square from pairs of prompts is negative where noise is all there is; its root keeps the sign, or noise would
    # look like a norm.
    norms = squares.sign() * squares.abs().sqrt() / sizes
    slopes = weighted_slopes(b.T, norms.T, sizes.T)  # [1 + D]
    shares = sizes / sizes.sum(0)
    mean_norm = torch.where(sizes > 0, norms * shares, 0.0).sum(0)
    mean_b = torch.where(sizes > 0, b * shares, 0.0).sum(0)
    return bootstrapped(torch.where(mean_norm > 0, slopes * mean_b / mean_norm, float("nan")))


def rollout_baselines(arm: Arm, batch: Batch, tokens: Tensor | None = None) -> Tensor:
    """Baseline of each rollout, averaged over its sampled tokens as in a step record, `[B]`. `tokens`: as of
    `rollout_means`, whose batch may be an outline."""
    values = baselines(arm, batch, freeze(batch, excludes=arm.excludes, kappa=arm.kappa))
    return rollout_means(batch, arm.segments(batch), values, tokens)


# ---- P4 --------------------------------------------------------------------------------------------------------------


def p4_amplification(all_vote: PromptSums, survivors: PromptSums, *, draws: int = DRAWS, seed: int = 0) -> Prediction:
    """P4, offline: survivors' baselines pay the cap more than those of all rollouts, and more so where it is hit often.

    By prompt, the gap of the two subsidies is J P(cap) / P(not cap) (docs/theory.md, 6). That it is positive is
    algebra; whether it grows with the cap rate from prompt to prompt is not, since prompts that run into the cap often
    are solved seldom.

    Args:
        all_vote: sums of the arm whose masked rollouts vote.
        survivors: sums of the arm whose masked rollouts do not.
        draws: bootstrap resamples of prompts.
        seed: of the bootstrap.
    """
    claim = (
        "survivors' baselines pay running into the cap more than those of all rollouts, by a gap that grows with the "
        "prompt's cap rate; at one checkpoint, training runs decide whether arms drift apart"
    )
    capped = all_vote.capped > 0
    if not bool(capped.any()):
        return no_data("P4", claim, "no rollout ran into the cap")
    gap = torch.where(capped, (survivors.subsidy - all_vote.subsidy) / all_vote.capped, 0.0)  # [G]
    rate = all_vote.capped / all_vote.rollouts
    n = gap.shape[0]
    everything = all_and(resamples(n, draws, seed))
    weights = everything * torch.where(capped, all_vote.rollouts, 0.0)  # [1 + D, G]
    found = {
        "gap": (bootstrapped((weights * gap).sum(1) / weights.sum(1)), P4_GAP),
        "slope on the cap rate": (bootstrapped(weighted_slopes(rate, gap, weights)), P4_SLOPE),
    }
    return judged("P4", claim, found, falsifiers=found)


# ---- P5 --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TurnPairs:
    """Pairs of a solved and an unsolved rollout of one prompt, by which of them took more turns. They add over dumps.

    Attributes:
        failed: `[G]` float64, pairs of a solved rollout and a submitted failure.
        failed_longer: `[G]`, those in which the failure took more turns; half of the ties.
        unsolved: `[G]`, pairs of a solved rollout and any that is not, capped ones too.
        unsolved_longer: `[G]`, those in which the other took more turns; half of the ties.
    """

    failed: Tensor  # [G]
    failed_longer: Tensor  # [G]
    unsolved: Tensor  # [G]
    unsolved_longer: Tensor  # [G]

    @classmethod
    def of(cls, batch: Batch) -> TurnPairs:
        """The pairs of a batch."""
        turns, groups = batch.segments.turns(), batch.groups
        longest = int(turns.max()) + 1 if turns.numel() else 1

        def histogram(rows: Tensor) -> Tensor:  # [G, L]
            cells = torch.zeros(groups.num_groups * longest, dtype=torch.float64)
            cells.index_add_(0, groups.index * longest + turns, rows.to(torch.float64))
            return cells.view(groups.num_groups, longest)

        solved = histogram(batch.outcomes == Outcome.SOLVED)
        # [G, L]: solved rollouts with fewer turns, and half of those with as many
        shorter = solved.cumsum(1) - solved / 2
        found = []
        for others in ((Outcome.FAILED,), (Outcome.FAILED, Outcome.BUDGET)):
            rows = torch.zeros_like(batch.capped)
            for outcome in others:
                rows |= batch.outcomes == outcome
            other = histogram(rows)
            found += [solved.sum(1) * other.sum(1), (other * shorter).sum(1)]
        return cls(*found)

    def __add__(self, other: TurnPairs) -> TurnPairs:
        return TurnPairs(**{name: torch.cat([value, getattr(other, name)]) for name, value in vars(self).items()})


def p5_separation(pairs: TurnPairs, *, draws: int = DRAWS, seed: int = 0) -> Prediction:
    """P5, offline: of two rollouts of a prompt, the one that fails takes more turns than the one that succeeds.

    The statistic is the chance of that, ties counted half (the area under the ROC curve of turns), over pairs within
    prompts: pooled, hard prompts, which fail and take long, would separate by themselves. Submitted failures decide it,
    as capped rollouts have the most turns by definition.

    Args:
        pairs: of the rollouts.
        draws: bootstrap resamples of prompts.
        seed: of the bootstrap.
    """
    claim = (
        "submitted failures take more turns than solved rollouts of the same prompt; at one checkpoint, training runs "
        "decide whether dropping stale rollouts makes that grow"
    )
    if not bool(pairs.failed.any()):
        return no_data("P5", claim, "no prompt has both a solved rollout and a submitted failure")
    n = pairs.failed.shape[0]
    everything = all_and(resamples(n, draws, seed))
    longer = bootstrapped(everything @ pairs.failed_longer / (everything @ pairs.failed))
    any_ = bootstrapped(everything @ pairs.unsolved_longer / (everything @ pairs.unsolved))
    found = {"failed takes longer": (longer, P5_SEPARATION)}
    return judged("P5", claim, found, falsifiers=found, shown={"unsolved takes longer": any_})
