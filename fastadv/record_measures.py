"""What one pass over a batch tells of a training step. Numbers stay on the device and are read together, once."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fastadv import validation
from fastadv.arms import Arm, ArmResult
from fastadv.arms.prompt_sums import PromptSums, prompt_sums, subsidy
from fastadv.batch import Batch
from fastadv.monitoring.staleness import ages
from fastadv.outcomes import Outcome
from fastadv.reference.group_advantages import divided
from fastadv.statistics import FrozenStatistics

OP = "StepRecord.of"
REFERENCE = Arm("reference", baseline="loo")  # no mask, leave-one-out: what advantage variances are held against


def read(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The numbers, in one transfer from the device."""
    values = torch.stack([value.to(torch.float64) for value in tensors.values()]).tolist()
    return dict(zip(tensors, values, strict=True))


def measure(
    batch: Batch,
    result: ArmResult,
    statistics: FrozenStatistics,
    arm: Arm,
    sampled: Batch,
    *,
    train_version: int | None = None,
    ran_tests: Tensor | None = None,
    seconds: Tensor | None = None,
    scalars: Mapping[str, Tensor | float] | None = None,
) -> dict[str, Tensor]:
    """Numbers of a step by name, 0-d on the batch's device and not waited for; NaN where there is nothing to divide by.
    See `fastadv.record.StepRecord.of`."""
    for name, values in (("ran_tests", ran_tests), ("seconds", seconds)):
        if values is not None:
            shape, device = (sampled.num_rollouts,), sampled.rewards.device
            validation.tensor(
                OP, name, values, shape=shape, dtypes=(torch.bool, *validation.INTEGERS, *validation.FLOATS),
                device=device,
            )  # fmt: skip
    found = _outcomes(sampled, ran_tests)
    sums = prompt_sums(arm, result, batch, statistics)
    reference = prompt_sums(REFERENCE, REFERENCE.apply(batch, statistics), batch, statistics)
    found |= _advantages("arm", sums) | _advantages("reference", reference)
    found |= _baseline(arm, sums, batch)
    if seconds is not None:
        found |= _seconds(batch, result, sampled, seconds)
    if train_version is not None and sampled.versions is not None:
        found |= _staleness(sampled, sampled.versions, train_version)
    device = batch.rewards.device
    given = {name: torch.as_tensor(value).detach().to(device) for name, value in (scalars or {}).items()}
    for name, value in given.items():
        if value.numel() != 1:
            raise ValueError(f"{OP}: {name} has shape {list(value.shape)}; it must be one number")
    return found | {name: value.reshape(()) for name, value in given.items()}


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; NaN unless the denominator is positive."""
    return torch.where(denominator > 0, numerator / denominator, math.nan)


def _outcomes(sampled: Batch, ran_tests: Tensor | None) -> dict[str, Tensor]:
    """Census, rates, and means by outcome."""
    names = [outcome.name.lower() for outcome in Outcome]
    is_ = sampled.outcomes[:, None] == torch.arange(len(names), device=sampled.outcomes.device)  # [B, 4]
    members = torch.cat([torch.ones_like(is_[:, :1]), is_], 1).to(torch.float64)  # [B, 5]: all, and by outcome
    counts = members.sum(0)  # [5]
    found = {f"census/{name}": counts[1 + i] for i, name in enumerate(names)}
    rates = _over(counts[1:], counts[0])
    found |= {
        "success_rate": rates[Outcome.SOLVED],
        "submitted_failure_rate": rates[Outcome.FAILED],
        "cap_hit_rate": _over(sampled.capped.to(torch.float64).sum(), counts[0]),
    }
    columns = {"length": sampled.lengths, "turns": sampled.segments.turns()}
    if ran_tests is not None:
        columns["ran_tests"] = ran_tests != 0
    for column, values in columns.items():
        means = _over(members.T @ values.to(torch.float64), counts)
        found |= {f"{column}/{name}": means[i] for i, name in enumerate(("all", *names))}
    known = sampled.rewards.isfinite()
    reward_sum = torch.where(known, sampled.rewards, 0.0).sum()
    found["reward"] = _over(reward_sum, known.to(torch.float64).sum())
    found["tokens"] = sampled.mask.sum()
    found["response_tokens"] = sampled.lengths.sum()
    return found


def _advantages(name: str, s: PromptSums) -> dict[str, Tensor]:
    """Variance within prompts and mean square of the weighted advantage, per sampled token."""
    within = (s.squares - divided(s.advantage.square(), s.tokens)).sum()
    total = s.tokens.sum()
    return {f"{name}/variance": _over(within, total), f"{name}/square": _over(s.squares.sum(), total)}


def _baseline(arm: Arm, s: PromptSums, batch: Batch) -> dict[str, Tensor]:
    """The realised baseline, over the batch and over prompts, and what exclusion pays."""
    groups = batch.groups

    def by_prompt(values: Tensor) -> Tensor:
        return torch.zeros_like(s.rollouts).index_add(0, groups.index, values)

    mean = divided(by_prompt(batch.rewards), s.rollouts)
    squares = by_prompt((batch.rewards - mean[groups.index]).square())  # [G]: exactly 0 only without a spread
    rewards = batch.rewards
    least = torch.full_like(mean, math.inf).scatter_reduce(0, groups.index, rewards, "amin")
    most = torch.full_like(mean, -math.inf).scatter_reduce(0, groups.index, rewards, "amax")
    mixed = least < most
    b = divided(s.baseline, s.rollouts)  # [G]
    sigma = divided(squares, s.rollouts).sqrt()
    total = s.rollouts.sum()
    overall = _over(s.baseline.sum(), total)
    pooled = _over(torch.where(mixed, squares, 0.0).sum(), total).sqrt()
    found = {
        "mixed_prompts": mixed.sum(),
        "b": overall,
        "b_over_sigma": _over(overall, pooled),
        "subsidy": subsidy(arm, s),
        "excluded_rate": _over((s.rollouts - s.kept).sum(), total),
        "excluded_token_rate": _over((s.tokens - s.kept_tokens).sum(), s.tokens.sum()),
    }
    return found | _spread("b", b, s.rollouts > 0) | _spread("b_over_sigma", divided(b, sigma), mixed)


def _spread(name: str, values: Tensor, known: Tensor) -> dict[str, Tensor]:
    """Number, mean, deviation, extremes and median of the values that are known."""
    count = known.to(torch.float64).sum()
    mean = _over(torch.where(known, values, 0.0).sum(), count)
    variance = _over(torch.where(known, (values - mean).square(), 0.0).sum(), count)
    none = values.new_full((1,), math.nan)  # so that a batch without prompts has extremes too: none
    ordered = torch.cat([torch.where(known, values, math.inf).sort().values, none])
    at = (count - 1).clamp(min=0)
    at = at.to(torch.int64)
    # index_select: a 0-d tensor as an index would be read by the host.
    low, high, last = ordered.index_select(0, torch.stack([at // 2, (at + 1) // 2, at]))
    some = count > 0
    found = {"mean": mean, "sd": variance.sqrt(), "least": ordered[0], "median": (low + high) / 2, "most": last}
    return {
        f"{name}/prompts": count, **{f"{name}/{part}": torch.where(some, v, math.nan) for part, v in found.items()}
    }  # fmt: skip


def _seconds(batch: Batch, result: ArmResult, sampled: Batch, seconds: Tensor) -> dict[str, Tensor]:
    """Seconds of the rollouts in the loss and of all others."""
    inside = ~result.excluded
    if batch is not sampled:
        nobody = torch.iinfo(torch.int64).min
        inside = torch.isin(sampled.row_ids, torch.where(inside, batch.row_ids, nobody))
    values = seconds.to(torch.float64)
    return {
        "kept_s": torch.where(inside, values, 0.0).sum(), "excluded_s": torch.where(inside, 0.0, values).sum()
    }  # fmt: skip


def _staleness(sampled: Batch, versions: Tensor, train_version: int) -> dict[str, Tensor]:
    """Ages of sampled tokens, and where rollouts spent them: what `fastadv.monitoring.staleness` counts, unread."""
    found = ages(versions.to(torch.int64), sampled.rows, train_version)
    tokens = found.sampled.to(torch.float64).sum()
    none = found.age.new_full((1,), torch.iinfo(torch.int64).min)
    most = torch.cat([torch.where(found.sampled, found.age, none), none]).max()

    def mean(values: Tensor) -> Tensor:
        return _over(torch.where(found.sampled, values, 0).to(torch.float64).sum(), tokens)

    return {
        "staleness/mean": mean(found.age),
        "staleness/most": torch.where(tokens > 0, most.to(torch.float64), math.nan),
        "staleness/in_flight": mean(found.age - found.last),
        "staleness/in_queue": mean(found.last),
    }
