"""Reward minus the group's baseline, one advantage a rollout."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastadv import cuda, dispatch, native, validation
from fastadv.groups import GroupIndex, Labels, group_index
from fastadv.kernels import Kernel
from fastadv.ops._register import native_op
from fastadv.ops.moments import group_moments, readable, row_values
from fastadv.reference import group_advantages as reference
from fastadv.reference.group_advantages import AdvantageInputs, AdvantageRule
from fastadv.statistics import FrozenStatistics, check_rows, float64_rows, include_rows

BASELINES = ("none", "mean", "loo")
POPULATIONS = ("all", "survivors")
SINGLETONS = ("zero", "raw", "drop")
SCALES = ("none", "std")
EPS_FORMS = ("add", "floor", "positive")


class Checked(NamedTuple):
    """Checked arguments of an advantage op."""

    op: str
    backend: str
    rewards: Tensor  # [B], without a graph
    groups: GroupIndex
    population: str
    include: Tensor | None  # [B] bool, contiguous
    votes: Tensor | None  # [B]
    statistics: FrozenStatistics | None

    @property
    def dtype(self) -> torch.dtype:
        """Of the advantages."""
        return torch.float64 if self.rewards.dtype == torch.float64 else torch.float32

    @property
    def fused(self) -> bool:
        """Whether one kernel goes from the rewards to the advantages, and PyTorch has nothing to compute before it."""
        return self.backend == "cuda" and self.statistics is None


def check(
    op: str,
    backend: str,
    rewards: Tensor,
    group_ids: Labels,
    rule: AdvantageRule,
    population: str,
    include: Tensor | None,
    votes: Tensor | None,
    statistics: FrozenStatistics | None,
) -> Checked:
    """Checks the arguments that group and turn-reached advantages share."""
    validation.choice(op, "population", population, POPULATIONS)
    validation.choice(op, "singleton", rule.singleton, SINGLETONS)
    validation.choice(op, "scale", rule.scale, SCALES)
    validation.choice(op, "eps_form", rule.eps_form, EPS_FORMS)
    validation.non_negative(op, "ddof", rule.ddof)
    validation.non_negative(op, "eps", rule.eps)
    validation.tensor(op, "rewards", rewards)
    groups = group_index(group_ids, op=op)
    rows, device = groups.num_rows, rewards.device
    check_rows(op, "rewards", rewards, rows, device)
    if groups.index.device != device:
        groups = groups.to(device)
    if include is not None:
        include = include_rows(op, include, rows, device)
    _check_survivors(op, population, include, statistics)
    name = dispatch.resolve(op, backend, rewards, dtypes=validation.FLOATS)
    if statistics is not None:
        if votes is not None:
            raise ValueError(
                f"{op}: votes cannot be given with statistics; who voted was settled when they were frozen"
            )
        if rule.scale == "std" and rule.ddof != statistics.ddof:
            raise ValueError(
                f"{op}: ddof is {rule.ddof}, but the statistics were frozen with {statistics.ddof}; use one of the two"
            )
        validation.tensor(op, "statistics.rewards", statistics.rewards, device=device)
        if statistics.rewards.shape[0] != rows:
            raise ValueError(
                f"{op}: rewards has {rows} rows, the statistics have {statistics.rewards.shape[0]}; freeze this batch's"
            )
        if validation.reads_values(groups.index) and not torch.equal(groups.index, statistics.groups.index):
            raise ValueError(f"{op}: group_ids differ from those that the statistics were frozen with")
    if votes is not None:
        check_rows(op, "votes", votes, rows, device)
        votes = votes.detach()
    return Checked(op, name, rewards.detach(), groups, population, include, votes, statistics)


def prepare(given: Checked) -> AdvantageInputs:
    """What advantages are made of where several kernels make them: takes or computes the moments."""
    op, statistics, include = given.op, given.statistics, given.include
    values = float64_rows(op, "rewards", given.rewards, given.groups.num_rows, given.rewards.device)
    if statistics is None:
        voting = own_votes(op, given.groups, values.device, given.population, include, given.votes)
        validation.finite_voters(op, values, voting)
        moments = group_moments(values, voting, given.groups, given.backend)
        return AdvantageInputs(values, values, voting, include, given.groups, moments, moments)
    frozen = statistics.population(given.population, op)
    include = _frozen_include(op, given.population, include, statistics)
    return AdvantageInputs(
        values, statistics.rewards, frozen.votes, include, given.groups, frozen.moments, statistics.all.moments
    )


def _check_survivors(
    op: str, population: str, include: Tensor | None, statistics: FrozenStatistics | None = None
) -> None:
    if population == "survivors" and include is None and statistics is None:
        raise ValueError(
            f"{op}: population is 'survivors' but include is not given; pass include [B], True where a row survives"
        )


def own_votes(
    op: str,
    groups: GroupIndex,
    device: torch.device,
    population: str,
    include: Tensor | None,
    votes: Tensor | None,
) -> Tensor:
    """Votes of each row, `[B]` float64."""
    _check_survivors(op, population, include)
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


FusedArguments = tuple[Tensor, list[Tensor], Tensor | None, Tensor | None, bool, list[float]]


def fused_arguments(given: Checked, rule: AdvantageRule) -> FusedArguments:
    """Rewards, groups, votes, include, whether only survivors vote, and rule, as the registered ops take them. The
    values of tensors are checked if they may be read."""
    groups = given.groups
    if validation.reads_values(given.rewards, given.include, given.votes):
        voting = own_votes(given.op, groups, given.rewards.device, given.population, given.include, given.votes)
        validation.finite_voters(given.op, given.rewards, voting)
    index = [groups.index, groups.order, groups.offsets]
    return given.rewards, index, given.votes, given.include, given.population == "survivors", rule_numbers(rule)


def fused_kernel_arguments(
    rewards: Tensor, groups: list[Tensor], votes: Tensor | None, include: Tensor | None, survivors: bool
) -> tuple[Any, ...]:
    """Voters as the CUDA kernels take them. The tensors, `readable`, have to live until the launch."""
    addresses = [native.address(t) for t in groups]
    sizes = (rewards.shape[0], groups[2].shape[0] - 1)
    return (*sizes, *addresses, row_values(rewards), row_values(votes), native.address(include), survivors)


def rule_numbers(rule: AdvantageRule) -> list[float]:
    """The rule as the registered ops take it."""
    numbers = (
        BASELINES.index(rule.baseline),
        SINGLETONS.index(rule.singleton),
        rule.scale == "std",
        rule.ddof,
        rule.eps,
        EPS_FORMS.index(rule.eps_form),
    )
    return [float(x) for x in numbers]


def kernel_rule(rule: list[float]) -> tuple[int, int, bool, float, float, int]:
    """What `rule_numbers` gave, as the C++ kernels take it."""
    baseline, singleton, scaled, ddof, eps, eps_form = rule
    return int(baseline), int(singleton), bool(scaled), ddof, eps, int(eps_form)


def launch_arguments(inputs: AdvantageInputs, rule: AdvantageRule) -> tuple[list[Tensor], Tensor | None, list[float]]:
    """Inputs and rule as the registered ops take them."""
    tensors = [inputs.rewards, inputs.left_out, inputs.votes, inputs.groups.index, *inputs.mean, *inputs.spread]
    return tensors, inputs.include, rule_numbers(rule)


def kernel_arguments(
    tensors: list[Tensor], include: Tensor | None, rule: list[float]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Inputs and rule as the C++ kernels take them, from what `launch_arguments` made."""
    addresses = [native.address(t) for t in tensors]
    rewards, left_out, votes, index = addresses[:4]
    mean, spread = tuple(addresses[4:9]), tuple(addresses[9:14])
    sizes = (tensors[0].shape[0], tensors[4].shape[0])
    return (*sizes, index, rewards, left_out, votes, native.address(include), mean, spread), kernel_rule(rule)


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


def _cuda(tensors: list[Tensor], include: Tensor | None, rule: list[float], advantages: Tensor) -> int:
    cuda.module().group_advantages(
        *cuda.place(advantages),
        *kernel_arguments(tensors, include, rule),
        advantages.dtype == torch.float64,
        advantages.data_ptr(),
    )
    return 0


# Writes advantages, [B], float32 or float64, from what `launch_arguments` made.
GROUP_ADVANTAGES = Kernel("group_advantages", cpu=_cpu, triton="group_advantages", cuda=_cuda)


def _fake(backend: str, tensors: list[Tensor], include: Tensor | None, rule: list[float], wide: bool) -> Tensor:
    return tensors[0].new_empty(tensors[0].shape, dtype=dtype_of(wide))


@native_op("group_advantages", _fake)
def _launch(backend: str, tensors: list[Tensor], include: Tensor | None, rule: list[float], wide: bool) -> Tensor:
    advantages = torch.empty(tensors[0].shape[0], dtype=dtype_of(wide), device=tensors[0].device)
    GROUP_ADVANTAGES(backend, tensors, include, rule, advantages)
    return advantages


def _fake_fused(
    rewards: Tensor,
    groups: list[Tensor],
    votes: Tensor | None,
    include: Tensor | None,
    survivors: bool,
    rule: list[float],
    wide: bool,
) -> Tensor:
    return rewards.new_empty(rewards.shape, dtype=dtype_of(wide))


# Given a GroupIndex this is the op's one launch: rewards and votes of most types are read as they are. With frozen
# statistics rewards become float64 first, a launch more.
@native_op("fused_group_advantages", _fake_fused)
def _launch_fused(
    rewards: Tensor,
    groups: list[Tensor],
    votes: Tensor | None,
    include: Tensor | None,
    survivors: bool,
    rule: list[float],
    wide: bool,
) -> Tensor:
    rewards, votes = readable(rewards), None if votes is None else readable(votes)
    advantages = torch.empty(rewards.shape[0], dtype=dtype_of(wide), device=rewards.device)
    voters = fused_kernel_arguments(rewards, groups, votes, include, survivors)
    place = cuda.place(rewards)
    cuda.module().fused_group_advantages(*place, voters, kernel_rule(rule), wide, advantages.data_ptr())
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
    given = check(op, backend, rewards, group_ids, rule, population, include, votes, statistics)
    wide = given.dtype == torch.float64
    advantages: Tensor
    if given.fused:
        advantages = _launch_fused(*fused_arguments(given, rule), wide)
    elif given.backend == "reference":
        advantages = reference.group_advantages(prepare(given), rule).to(given.dtype)
    else:
        advantages = _launch(given.backend, *launch_arguments(prepare(given), rule), wide)
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
