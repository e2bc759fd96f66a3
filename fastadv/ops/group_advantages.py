"""Reward minus the group's baseline, one advantage a rollout."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastadv import dispatch, native, validation
from fastadv.groups import GroupIndex, Labels, group_index
from fastadv.kernels import Kernel
from fastadv.ops._register import native_op
from fastadv.ops.moments import group_moments
from fastadv.reference import group_advantages as reference
from fastadv.reference.group_advantages import AdvantageInputs, AdvantageRule
from fastadv.statistics import FrozenStatistics, float64_rows, include_rows

BASELINES = ("none", "mean", "loo")
POPULATIONS = ("all", "survivors")
SINGLETONS = ("zero", "raw", "drop")
SCALES = ("none", "std")
EPS_FORMS = ("add", "floor", "positive")


class Prepared(NamedTuple):
    """Checked arguments of an advantage op."""

    backend: str
    dtype: torch.dtype  # of the advantages
    inputs: AdvantageInputs


def prepare(
    op: str,
    backend: str,
    rewards: Tensor,
    group_ids: Labels,
    rule: AdvantageRule,
    population: str,
    include: Tensor | None,
    votes: Tensor | None,
    statistics: FrozenStatistics | None,
) -> Prepared:
    """Checks the arguments that group and turn-reached advantages share, and takes or computes the moments."""
    validation.choice(op, "population", population, POPULATIONS)
    validation.choice(op, "singleton", rule.singleton, SINGLETONS)
    validation.choice(op, "scale", rule.scale, SCALES)
    validation.choice(op, "eps_form", rule.eps_form, EPS_FORMS)
    validation.non_negative(op, "ddof", rule.ddof)
    validation.non_negative(op, "eps", rule.eps)
    validation.tensor(op, "rewards", rewards)
    groups = group_index(group_ids, op=op)
    rows, device = groups.num_rows, rewards.device
    values = float64_rows(op, "rewards", rewards, rows, device)
    if groups.index.device != device:
        groups = groups.to(device)
    if include is not None:
        include = include_rows(op, include, rows, device)
    name = dispatch.resolve(op, backend, rewards, dtypes=validation.FLOATS)

    if statistics is None:
        voting = own_votes(op, groups, device, population, include, votes)
        validation.finite_voters(op, values, voting)
        mean = spread = group_moments(values, voting, groups, name)
        left_out = values
    else:
        if votes is not None:
            raise ValueError(
                f"{op}: votes cannot be given with statistics; who voted was settled when they were frozen"
            )
        if rule.scale == "std" and rule.ddof != statistics.ddof:
            raise ValueError(
                f"{op}: ddof is {rule.ddof}, but the statistics were frozen with {statistics.ddof}; use one of the two"
            )
        if statistics.rewards.shape[0] != rows:
            raise ValueError(
                f"{op}: rewards has {rows} rows, the statistics have {statistics.rewards.shape[0]}; freeze this batch's"
            )
        if validation.reads_values(groups.index) and not torch.equal(groups.index, statistics.groups.index):
            raise ValueError(f"{op}: group_ids differ from those that the statistics were frozen with")
        frozen = statistics.population(population, op)
        include = _frozen_include(op, population, include, statistics)
        mean, spread, left_out, voting = frozen.moments, statistics.all.moments, statistics.rewards, frozen.votes

    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    return Prepared(name, dtype, AdvantageInputs(values, left_out, voting, include, groups, mean, spread))


def own_votes(
    op: str,
    groups: GroupIndex,
    device: torch.device,
    population: str,
    include: Tensor | None,
    votes: Tensor | None,
) -> Tensor:
    """Votes of each row, `[B]` float64."""
    if population == "survivors" and include is None:
        raise ValueError(
            f"{op}: population is 'survivors' but include is not given; pass include [B], True where a row survives"
        )
    if votes is None:
        result = torch.ones(groups.num_rows, dtype=torch.float64, device=device)
    else:
        result = float64_rows(op, "votes", votes, groups.num_rows, device)
        if validation.reads_values(result) and bool(((result < 0) | ~result.isfinite()).any()):
            raise ValueError(f"{op}: votes has a negative or non-finite value; they are weights in the group's mean")
    return torch.where(include, result, 0.0) if population == "survivors" and include is not None else result


def _frozen_include(op: str, population: str, include: Tensor | None, statistics: FrozenStatistics) -> Tensor | None:
    if population != "survivors" or statistics.include is None:
        return include
    if include is not None and validation.reads_values(include) and not torch.equal(include, statistics.include):
        raise ValueError(
            f"{op}: include differs from the survivors that the statistics were frozen with; freeze them again"
        )
    return statistics.include


def launch_arguments(inputs: AdvantageInputs, rule: AdvantageRule) -> tuple[list[Tensor], Tensor | None, list[float]]:
    """Inputs and rule as the registered ops take them."""
    tensors = [inputs.rewards, inputs.left_out, inputs.votes, inputs.groups.index, *inputs.mean, *inputs.spread]
    numbers = (
        BASELINES.index(rule.baseline),
        SINGLETONS.index(rule.singleton),
        rule.scale == "std",
        rule.ddof,
        rule.eps,
        EPS_FORMS.index(rule.eps_form),
    )
    return tensors, inputs.include, [float(x) for x in numbers]


def kernel_arguments(
    tensors: list[Tensor], include: Tensor | None, rule: list[float]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Inputs and rule as the C++ kernels take them, from what `launch_arguments` made."""
    addresses = [native.address(t) for t in tensors]
    rewards, left_out, votes, index = addresses[:4]
    mean, spread = tuple(addresses[4:9]), tuple(addresses[9:14])
    sizes = (tensors[0].shape[0], tensors[4].shape[0])
    baseline, singleton, scaled, ddof, eps, eps_form = rule
    return (
        (*sizes, index, rewards, left_out, votes, native.address(include), mean, spread),
        (int(baseline), int(singleton), bool(scaled), ddof, eps, int(eps_form)),
    )


def dtype_of(wide: bool) -> torch.dtype:
    """Dtype of advantages; the kernels compute in float64 either way."""
    return torch.float64 if wide else torch.float32


def _cpu(tensors: list[Tensor], include: Tensor | None, rule: list[float], advantages: Tensor) -> int:
    native.module().group_advantages(
        *kernel_arguments(tensors, include, rule),
        advantages.dtype == torch.float64,
        advantages.data_ptr(),
        native.threads(advantages.shape[0]),
    )
    return 0


# Writes advantages, [B], float32 or float64, from what `launch_arguments` made.
GROUP_ADVANTAGES = Kernel("group_advantages", cpu=_cpu, triton="group_advantages")


def _fake(backend: str, tensors: list[Tensor], include: Tensor | None, rule: list[float], wide: bool) -> Tensor:
    return tensors[0].new_empty(tensors[0].shape, dtype=dtype_of(wide))


@native_op("group_advantages", _fake)
def _launch(backend: str, tensors: list[Tensor], include: Tensor | None, rule: list[float], wide: bool) -> Tensor:
    advantages = torch.empty(tensors[0].shape[0], dtype=dtype_of(wide), device=tensors[0].device)
    GROUP_ADVANTAGES(backend, tensors, include, rule, advantages)
    return advantages


def group_advantages(
    rewards: Tensor,
    group_ids: Labels | GroupIndex,
    *,
    baseline: str = "mean",
    population: str = "all",
    include: Tensor | None = None,
    votes: Tensor | None = None,
    singleton: str = "zero",
    scale: str = "none",
    ddof: float = 1,
    eps: float = 1e-6,
    eps_form: str = "add",
    statistics: FrozenStatistics | None = None,
    backend: str = "auto",
) -> Tensor:
    """Advantage of each rollout: its reward minus its group's baseline, perhaps divided by the group's standard
    deviation.

    Every option stands for itself; none implies another. GRPO in verl is `baseline="mean", singleton="raw",
    scale="std"`, Dr. GRPO is `baseline="mean"`, RLOO is `baseline="loo", singleton="raw"`.

    Args:
        rewards: `[B]`. May be NaN only in rows that do not vote.
        group_ids: `[B]` labels (integers or strings, any order, groups of any size) or a GroupIndex.
        baseline: "none" (the reward itself), "mean" of the voters, or "loo": mean of the voters other than the row.
        population: who votes: "all" rows, or "survivors", the rows with `include`. Governs mean and standard deviation.
        include: `[B]` bool. Rows without it are excluded: their advantage is exactly 0.
        votes: `[B]`, weights of the rows in mean and standard deviation (lengths for OPO; a count of steps for
            verl-agent). A row with 0 votes does not vote.
        singleton: what a group with exactly one voter gets: "zero" (advantage 0), "raw" (the reward itself), or "drop":
            0, and out of the denominators too, once the mask of the rows that `singleton_rows` names is 0. A group
            without a voter gets 0.
        scale: "none", or "std" of the voters.
        ddof: delta degrees of freedom of the standard deviation.
        eps: used by `eps_form`: "add" divides by std + eps, "floor" by sqrt(max(variance, eps)) + eps, "positive" by
            std + eps where std > 0 and not at all elsewhere. A group whose divisor is 0 gets 0.
        eps_form: see `eps`.
        statistics: frozen statistics of the unmasked batch: standard deviation and counts come from the whole batch,
            and `population` picks the mean.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        `[B]` float32, float64 for float64 rewards.

    Raises:
        ValueError: "survivors" without include, a reward that votes and is not finite, an unknown option.
        TypeError: labels that are not integers or strings.

    Source: docs/theory.md, equations 2, 5 and 6.
    """
    op = "group_advantages"
    validation.choice(op, "baseline", baseline, BASELINES)
    rule = AdvantageRule(baseline, singleton, scale, ddof, eps, eps_form)
    prepared = prepare(op, backend, rewards, group_ids, rule, population, include, votes, statistics)
    if prepared.backend == "reference":
        advantages = reference.group_advantages(prepared.inputs, rule).to(prepared.dtype)
    else:
        advantages = _launch(
            prepared.backend, *launch_arguments(prepared.inputs, rule), prepared.dtype == torch.float64
        )
    return advantages


def singleton_rows(
    group_ids: Labels | GroupIndex,
    *,
    population: str = "all",
    include: Tensor | None = None,
    votes: Tensor | None = None,
) -> Tensor:
    """Rollouts whose group has exactly one voter: what `singleton="drop"` leaves out of the denominators.

    Args:
        group_ids, population, include, votes: as in `group_advantages`.

    Returns:
        `[B]` bool. Set the mask of these rows to 0 before counting denominators.

    Raises:
        ValueError: "survivors" without include.
    """
    op = "singleton_rows"
    validation.choice(op, "population", population, POPULATIONS)
    groups = group_index(group_ids, op=op)
    voters = own_votes(op, groups, groups.index.device, population, include, votes) != 0
    counts = torch.zeros_like(groups.offsets[1:]).index_add(0, groups.index, voters.to(torch.int64))
    return (counts == 1)[groups.index]
