"""What a mask costs: what an arm pays for the outcome that it masks."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fastadv.arms.arm import Arm
from fastadv.arms.baselines import baselines, rollout_means
from fastadv.arms.known import NOTHING, Known
from fastadv.batch import Batch
from fastadv.statistics import FrozenStatistics


@dataclass(frozen=True, eq=False)
class Audit:
    """What an outcome-dependent mask pays for being masked (docs/theory.md, 1 to 8 and 10), prompt by prompt.

    A masked rollout has 0 in place of its reward minus the baseline, as if its reward were b: the gradient gains
    b grad P(masked). An arm that removes whole groups (docs/theory.md, 15) is audited for the rollouts that it does so
    for. Tensors are `[G]` float64, NaN where a prompt has none.

    Attributes:
        arm: its name.
        kind: what its masks look at: "none", "predictable" or "outcome". Only the last one pays.
        rollouts: of the prompt.
        masked: expected share of the prompt's rollouts that the mask takes away, P(not X): by the probability of coins,
            not their result, and not counting what weights give back.
        reward: J, the mean reward of all rollouts.
        spread: sigma, their standard deviation (ddof 0).
        baseline: b, that of the rollouts that the mask is about, on average over their tokens.
        subsidy: what such a rollout is paid: b times the probability that it is masked; 0 where the arm masks nothing
            by outcome.
        in_sigmas: b / sigma.
        survivors: J / P(X), what it would be paid if survivors alone voted.
        extra: J P(not X) / P(X), how much that is above J.
        lost_reward: mean reward of what is masked. Where it is 0, J above is exactly the reward of the rollouts that
            are kept; where not, the mask hides successes too.
    """

    arm: str
    kind: str
    rollouts: Tensor  # [G]
    masked: Tensor  # [G]
    reward: Tensor  # [G]
    spread: Tensor  # [G]
    baseline: Tensor  # [G]
    subsidy: Tensor  # [G]
    in_sigmas: Tensor  # [G]
    survivors: Tensor  # [G]
    extra: Tensor  # [G]
    lost_reward: Tensor  # [G]

    def over_batch(self) -> dict[str, float]:
        """Each number for the batch: the mean over the prompts that have it, weighted by their rollouts; NaN where none
        has."""
        found = {}
        for field in fields(self):
            values = getattr(self, field.name)
            if isinstance(values, Tensor) and field.name != "rollouts":
                weight = torch.where(values.isfinite(), self.rollouts, 0.0)
                found[field.name] = float((weight * values.nan_to_num(0.0, 0.0, 0.0)).sum() / weight.sum())
        return found


def audit(arm: Arm, batch: Batch, statistics: FrozenStatistics | None = None, *, known: Known = NOTHING) -> Audit:
    """Says what an arm's mask costs on a batch: the subsidy that it implies for being masked.

    A mask that looks at the outcome pays the baseline b for it; one that is known before the token is sampled pays
    nothing, whatever it takes away.

    Args:
        arm: any arm.
        batch: the unmasked batch.
        statistics: as `Arm.apply` takes them; None: `arm.freeze(batch)`.
        known: what a trainer knows besides.

    Returns:
        Audit, by prompt; `Audit.over_batch` has one number of each.

    Raises:
        ValueError: statistics of another batch; endings or versions that the arm reads and nobody gave.

    Source: docs/theory.md, equations 1 to 10.
    """
    frozen = arm.freeze(batch, known=known) if statistics is None else statistics
    groups, rewards = batch.groups, batch.rewards

    def by_prompt(per_rollout: Tensor) -> Tensor:
        return per_rollout.new_zeros(groups.num_groups).index_add(0, groups.index, per_rollout)

    about, masked = _masked(arm, batch, known)
    moments = frozen.all.moments
    size = moments.weight
    reward, spread = moments.minimum + moments.sum / size, (moments.squares / size).sqrt()
    if arm.population == "removed":  # groups that are kept are without such rollouts: their mean is that of the others
        rollout_baseline = (by_prompt((1 - about) * rewards) / by_prompt(1 - about))[groups.index]
    else:
        rollout_baseline = rollout_means(batch, arm.segments(batch), baselines(arm, batch, frozen))
    missing, of_mask = by_prompt(masked), by_prompt(about)
    baseline = by_prompt(about * rollout_baseline) / of_mask
    subsidy = by_prompt(masked * rollout_baseline) / of_mask
    kept = 1 - missing / size
    survivors = torch.where(kept > 0, reward / kept, torch.nan)
    return Audit(
        arm=arm.name,
        kind=arm.mask_kind,
        rollouts=size,
        masked=missing / size,
        reward=reward,
        spread=spread,
        baseline=baseline,
        subsidy=subsidy if arm.mask_kind == "outcome" else torch.zeros_like(subsidy),
        in_sigmas=torch.where(spread > 0, baseline / spread, torch.nan),
        survivors=survivors,
        extra=survivors - reward,
        lost_reward=by_prompt(masked * rewards) / missing,
    )


def _masked(arm: Arm, batch: Batch, known: Known) -> tuple[Tensor, Tensor]:
    """Of each rollout, `[B]` float64: whether the mask is about it, or the share of its tokens; and the probability
    that it takes it away and no weight gives it back."""
    about = arm.meets(batch, known).to(torch.float64)
    masked = about * (arm.fraction if arm.row_weights is None else 0.0)
    rule = arm.token_weights
    if rule is not None and rule.kind == "outcome":
        kept = rule.weights(f"Arm {arm.name!r}", batch, arm.seed, known)
        sampled = batch.rows.sum(batch.mask.to(torch.float64))
        share = batch.rows.sum(torch.where(batch.mask, 1 - kept, 0.0)) / sampled.clamp(min=1)
        about = about + (1 - about) * share
        masked = masked + (1 - masked) * share
    return about, masked
