"""Estimators with one advantage a rollout: a reward beside the other rewards of its group.

Most are `fastadv.group_advantages` with an owner's options: the table `PLAIN`. Behind it are the methods that weight,
rescale or select rewards in a way of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastadv import validation
from fastadv.estimators.registry import OP, Estimate, Inputs, estimator, needed
from fastadv.groups import GroupIndex
from fastadv.ops.group_advantages import POPULATIONS, group_advantages, singleton_rows
from fastadv.ops.token_counts import token_counts
from fastadv.reference.group_advantages import divided
from fastadv.statistics import include_rows


class Convention(NamedTuple):
    """An owner's options of `fastadv.group_advantages`.

    `population` is the owner's: whether rollouts that `include` takes out vote. `unscored` says that a reward of NaN
    stands for none: such a rollout neither votes nor learns.
    """

    baseline: str = "mean"
    singleton: str = "zero"
    scale: str = "none"
    ddof: float = 1
    eps: float = 0.0
    eps_form: str = "add"
    population: str = "all"
    unscored: bool = False


VERL = "verl/trainer/ppo/core_algos.py:"
VERL_DATE = " (0.9.1)"
TRL = "trl/trainer/grpo_trainer.py:_generate_and_score_completions (1.16.0)"
TRL_RLOO = "trl/trainer/rloo_trainer.py:_generate_and_score_completions (1.16.0)"
OPENRLHF = "openrlhf/trainer/ppo_utils/experience_maker.py:compute_advantages_and_returns (2026-08-13)"
RLLM = "rllm/trainer/algorithms/rl_algo.py:"
NEMO = "nemo_rl/algorithms/utils.py:calculate_baseline_and_std_per_prompt (2026-08-22)"
SKYRL = "skyrl/backends/skyrl_train/utils/ppo_utils.py:"
AREAL = "areal/utils/data.py:Normalization (2026-05-21)"
ZERO = "train_zero_math.py:compute_monte_carlo_advantages (2025-08-27)"
PRIME = "src/prime_rl/orchestrator/algo/"

STD = Convention(scale="std", eps=1e-6)  # of verl and its descendants
LOO = Convention(baseline="loo")

# Name, convention, where the owner has it.
PLAIN: tuple[tuple[str, Convention, str], ...] = (
    ("grpo/verl", STD._replace(singleton="raw"), f"{VERL}compute_grpo_outcome_advantage{VERL_DATE}"),
    (
        "grpo/verl-vectorized",
        STD._replace(singleton="raw"),
        f"{VERL}compute_grpo_vectorized_outcome_advantage{VERL_DATE}",
    ),
    (
        "grpo/verl-vectorized-floor",
        STD._replace(singleton="raw", eps_form="floor"),
        "verl/utils/groupwise.py:group_mean_std (2025-09-27 to 2026-05-14)",
    ),
    ("grpo/trl", STD._replace(eps=1e-4, unscored=True), TRL),
    (
        "grpo/trl-async",
        STD._replace(ddof=0, eps=1e-8, unscored=True),
        "trl/experimental/async_grpo/async_rollout_worker.py (1.16.0)",
    ),
    ("grpo/openrlhf", STD._replace(eps=1e-9), OPENRLHF),
    (
        "grpo/rllm",
        STD._replace(ddof=0, singleton="raw", population="survivors"),
        f"{RLLM}calculate_grpo_advantages_per_group (2026-08-15)",
    ),
    ("grpo/skyrl", STD._replace(singleton="raw"), f"{SKYRL}compute_grpo_outcome_advantage (2026-08-21)"),
    ("grpo/areal", STD._replace(eps=1e-5), AREAL),
    ("grpo/roll", STD, "roll/utils/functionals.py:reward_norm (2026-08-19)"),
    ("grpo/slime", STD, "slime/ray/rollout.py:_post_process_rewards (2026-08-21)"),
    (
        "grpo/miles",
        STD._replace(eps_form="positive"),
        "miles/ray/rollout/train_data_conversion.py:_normalize_rewards_by_rollout (2026-08-21)",
    ),
    ("grpo/prime-rl", Convention(population="survivors"), f"{PRIME}grpo.py:score_group (2026-08-21)"),
    ("grpo/understand-r1-zero", STD._replace(eps=1e-8), ZERO),
    ("dr_grpo/verl", Convention(singleton="raw"), f"{VERL}compute_grpo_outcome_advantage{VERL_DATE}"),
    ("dr_grpo/understand-r1-zero", Convention(), ZERO),
    ("dr_grpo/trl", Convention(unscored=True), TRL),
    ("dr_grpo/openrlhf", Convention(), OPENRLHF),
    ("rloo/verl", LOO._replace(singleton="raw"), f"{VERL}compute_rloo_outcome_advantage{VERL_DATE}"),
    ("rloo/verl-vectorized", LOO, f"{VERL}compute_rloo_vectorized_outcome_advantage{VERL_DATE}"),
    ("rloo/trl", LOO._replace(unscored=True), TRL_RLOO),
    ("rloo/openrlhf", LOO, OPENRLHF),
    (
        "rloo/rllm",
        LOO._replace(singleton="raw", population="survivors"),
        f"{RLLM}calculate_rloo_advantages_per_group (2026-08-15)",
    ),
    ("rloo/nemo-rl", LOO._replace(population="survivors"), NEMO),
    ("rloo/skyrl", LOO, f"{SKYRL}compute_rloo_outcome_advantage (2026-08-21)"),
    ("rloo/fastadv", LOO, "fastadv/estimators/groups.py:plain"),
    ("survivors/fastadv", LOO._replace(population="survivors"), "fastadv/estimators/groups.py:plain"),
)

# Owners of variants.
OWNERS = {
    "verl-vectorized": "verl",
    "verl-vectorized-floor": "verl",
    "verl-agent-trajectory": "verl-agent",
    "trl-async": "trl",
    "areal-adv-norm": "areal",
}
WITH_RETURNS = ("verl", "verl-agent", "skyrl", "rllm")  # hand the advantages out a second time, as returns
READS_MASK = ("verl",)  # a rollout without a token in the mask does not vote


class Voters(NamedTuple):
    """Who votes and who learns, as `fastadv.group_advantages` takes it."""

    population: str
    include: Tensor | None  # [B] bool
    votes: Tensor | None  # [B]

    def voting(self, rewards: Tensor) -> Tensor:
        """Which rollouts vote, `[B]` bool."""
        result = torch.ones_like(rewards, dtype=torch.bool) if self.votes is None else self.votes != 0
        return result & self.include if self.population == "survivors" and self.include is not None else result


def voters(inputs: Inputs, convention: Convention, votes: Tensor | None = None) -> Voters:
    """Rollouts that vote: those with a reward and a token; of those that `include` takes out, as the owner has it."""
    given = inputs.options.get("population", convention.population)
    validation.choice(OP, "population", given, POPULATIONS)
    rewards, groups = _rows(inputs)
    include = inputs.include
    if include is not None:
        include = include_rows(OP, include, groups.num_rows, rewards.device)
    absent = rewards.isnan() if convention.unscored else None
    if inputs.mask is not None:
        empty = token_counts(inputs.mask, inputs.cu_seqlens, backend=inputs.backend) == 0
        validation.tensor(OP, "mask's rows", empty, shape=rewards.shape, device=rewards.device)
        absent = empty if absent is None else absent | empty
    if absent is not None:
        present = ~absent
        include = present if include is None else include & present
        votes = present.to(torch.float64) if votes is None else torch.where(present, votes.to(torch.float64), 0.0)
    # Without a filter everybody is a survivor; an owner's "survivors" then asks for nothing.
    asked = given if include is not None or given != convention.population else "all"
    return Voters(asked, include, votes)


def advantages(
    inputs: Inputs, convention: Convention, votes: Tensor | None = None, rewards: Tensor | None = None
) -> Tensor:
    """`fastadv.group_advantages` under a convention, `[B]`."""
    own, groups = _rows(inputs)
    return group_advantages(
        own if rewards is None else rewards,
        groups,
        baseline=convention.baseline,
        singleton=convention.singleton,
        scale=convention.scale,
        ddof=convention.ddof,
        eps=convention.eps,
        eps_form=convention.eps_form,
        backend=inputs.backend,
        **voters(inputs, convention, votes)._asdict(),
    )


def _rows(inputs: Inputs) -> tuple[Tensor, GroupIndex]:
    """Rewards, and groups on their device: what every estimator here needs."""
    rewards, groups = needed(inputs.rewards), needed(inputs.groups)
    return rewards, groups if groups.index.device == rewards.device else groups.to(rewards.device)


def _wide(inputs: Inputs) -> Tensor:
    """Rewards in float64: what is rescaled afterwards is rounded once."""
    return _rows(inputs)[0].to(torch.float64)


def _narrow(result: Tensor, inputs: Inputs) -> Tensor:
    """Float64 results in the dtype of advantages."""
    return result.to(torch.float64 if _rows(inputs)[0].dtype == torch.float64 else torch.float32)


def _to_rows(per_group: Tensor, groups: GroupIndex) -> Tensor:
    """A value of each group at its rows, `[B]`. (Indexing with brackets would wake all of torch's threads.)"""
    return per_group.index_select(0, groups.index)


def group_sums(values: Tensor, groups: GroupIndex) -> Tensor:
    """Sum over each row's group, `[B]`."""
    return _to_rows(values.new_zeros(groups.num_groups).index_add(0, groups.index, values), groups)


def equation(convention: Convention) -> str:
    """A convention as a formula."""
    mean = {"mean": "mean_G R", "loo": "mean_{j != i} R_j"}[convention.baseline]
    if convention.scale == "none":
        return f"A = R - {mean}"
    std, eps = "std_G R", f"{convention.eps:g}"
    divisor = {
        "add": f"({std} + {eps})",
        "floor": f"(sqrt(max(var_G R, {eps})) + {eps})",
        "positive": f"({std} + {eps}), undivided where the std is 0",
    }[convention.eps_form]
    return f"A = (R - {mean}) / {divisor}"


def masking(convention: Convention, reads: tuple[str, ...]) -> str:
    """Who votes, in words."""
    parts = ["filtered rollouts " + ("vote" if convention.population == "all" else "do not vote")]
    if "mask" in reads:
        parts.append("rollouts without a token in the mask do not vote")
    if convention.unscored:
        parts.append("NaN rewards do not vote")
    return "; ".join(parts)


Rollouts = Callable[[Inputs, Convention], Tensor]


def register(
    name: str, convention: Convention, code_path: str, formula: str, function: Rollouts, **fields: Any
) -> None:
    """Registers a function of rollouts, with the fields that follow from its convention."""
    variant = name.partition("/")[2]
    owner = OWNERS.get(variant, variant)
    scaled = convention.scale == "std"
    reads = fields.pop("reads", ("include", "mask") if owner in READS_MASK else ("include",))
    options = {"population": convention.population} if "include" in reads else {}

    def run(inputs: Inputs) -> Estimate:
        result = function(inputs, convention)
        return Estimate(result, result if owner in WITH_RETURNS else None)

    estimator(
        name,
        owner=owner,
        equation=formula,
        code_path=code_path,
        ddof=convention.ddof if scaled else None,
        eps=convention.eps if scaled else None,
        eps_form=convention.eps_form if scaled else None,
        singleton=fields.pop("singleton", convention.singleton),
        masking=masking(convention, reads) if "include" in reads else "every rollout votes",
        reads=reads,
        options={**options, **fields.pop("options", {})},
        **fields,
    )(run)


def plain(inputs: Inputs, convention: Convention) -> Tensor:
    """A line of `PLAIN`."""
    return advantages(inputs, convention)


for _name, _convention, _code_path in PLAIN:
    register(_name, _convention, _code_path, equation(_convention), plain)


def opo(inputs: Inputs, convention: Convention) -> Tensor:
    """The mean weights rewards by lengths."""
    lengths = inputs.lengths
    if lengths is None:
        lengths = token_counts(needed(inputs.mask), inputs.cu_seqlens, backend=inputs.backend)
    result = advantages(inputs, convention, votes=lengths)
    return torch.where(lengths == 0, torch.zeros_like(result), result)  # no token to have an advantage


register(
    "opo/verl", Convention(singleton="raw"), f"{VERL}compute_opo_outcome_advantage{VERL_DATE}",
    "A = R - sum_G L R / sum_G L", opo, needs=("rewards", "group_ids", "lengths|mask"), reads=("include",),
)  # fmt: skip


def gpg(inputs: Inputs, convention: Convention) -> Tensor:
    """Centred rewards times alpha, the rollouts for each one whose reward is not 0."""
    centred = advantages(inputs, convention, rewards=_wide(inputs))
    voting = voters(inputs, convention).voting(centred)
    scored = voting & (_wide(inputs) != 0)
    alpha = voting.sum(dtype=torch.float64) / scored.sum(dtype=torch.float64).clamp(min=1)
    return _narrow(centred * alpha, inputs)


register(
    "gpg/verl", Convention(singleton="raw"), f"{VERL}compute_gpg_outcome_advantage{VERL_DATE}",
    "A = B / #(R != 0) (R - mean_G R)", gpg,
)  # fmt: skip


def maxrl(inputs: Inputs, convention: Convention, *, positive: bool) -> Tensor:
    """Centred rewards by the group's mean: plus eps, or only where it is positive."""
    rewards = _wide(inputs)
    centred = advantages(inputs, convention._replace(scale="none", singleton="zero"), rewards=rewards)
    mean = rewards - centred
    if positive:
        return _narrow(torch.where(mean > 0, divided(centred, mean), 0.0), inputs)
    scaled = torch.where(centred == 0, 0.0, divided(centred, mean + convention.eps))
    lone = singleton_rows(_rows(inputs)[1], **voters(inputs, convention)._asdict())
    return _narrow(torch.where(lone, advantages(inputs, convention, rewards=rewards), scaled), inputs)


register(
    "maxrl/prime-rl", Convention(population="survivors"), f"{PRIME}max_rl.py:score_group (2026-08-21)",
    "A = (R - mean_G R) / mean_G R, 0 where the mean is <= 0", partial(maxrl, positive=True),
)  # fmt: skip
register(
    "maxrl/skyrl", Convention(singleton="raw", eps=1e-6), f"{SKYRL}compute_maxrl_advantage (2026-08-21)",
    "A = (R - mean_G R) / (mean_G R + 1e-6)", partial(maxrl, positive=False),
)  # fmt: skip


def passk(inputs: Inputs, convention: Convention) -> Tensor:
    """The best rollout of a group gets its lead on the second, all others 0."""
    rewards, groups = _wide(inputs), _rows(inputs)[1]
    who = voters(inputs, convention)
    if validation.reads_values(rewards) and bool(singleton_rows(groups, **who._asdict()).any()):
        raise ValueError(f"{OP} 'passk/verl': a group has one rollout that votes; it needs a second to compare with")
    voting = who.voting(rewards)
    candidates = torch.where(voting, rewards, -torch.inf)
    row = torch.arange(groups.num_rows, device=rewards.device)
    none = rewards.new_full((groups.num_groups,), -torch.inf)
    best = _to_rows(none.scatter_reduce(0, groups.index, candidates, "amax"), groups)
    leads = row.new_full((groups.num_groups,), groups.num_rows).scatter_reduce(
        0, groups.index, torch.where(candidates == best, row, groups.num_rows), "amin"
    )
    first = voting & (_to_rows(leads, groups) == row)
    rest = torch.where(first, -torch.inf, candidates)
    second = _to_rows(none.scatter_reduce(0, groups.index, rest, "amax"), groups)
    gap = torch.where(first & second.isfinite(), candidates - second, 0.0)
    if who.include is not None:
        gap = torch.where(who.include, gap, 0.0)
    if not inputs.options["std"]:
        return _narrow(gap, inputs)
    # Of a rollout that leads, scaled and centred advantage are positive, and their ratio is 1 / (std + eps).
    centred = advantages(inputs, convention._replace(scale="none"), rewards=rewards)
    scaled = advantages(inputs, convention, rewards=rewards)
    return _narrow(torch.where(gap > 0, gap * divided(scaled, centred), 0.0), inputs)


register(
    "passk/verl", STD, f"{VERL}compute_grpo_passk_outcome_advantage{VERL_DATE}",
    "A = (R_max - R_2nd) / (std_G R + 1e-6) for the best rollout, 0 for the others", passk,
    singleton="error", options={"std": True},
)  # fmt: skip


def nemo_grpo(inputs: Inputs, convention: Convention) -> Tensor:
    """Mean and standard deviation over the other rollouts of the group; not scaled where these do not differ."""
    rewards, groups = _wide(inputs), _rows(inputs)[1]
    voting = voters(inputs, convention).voting(rewards)
    unscaled = convention._replace(scale="none")
    result = advantages(inputs, unscaled, rewards=rewards)
    deviation = torch.where(voting, advantages(inputs, unscaled._replace(baseline="mean"), rewards=rewards), 0.0)
    n = group_sums(voting.to(torch.float64), groups)
    own = torch.where(voting, 1.0, 0.0)
    others = (n - own).clamp(min=1)
    # Squares of the others about their own mean; a row that does not vote leaves nobody out.
    squares = group_sums(deviation.square(), groups) - divided(n, others) * deviation.square()
    std = (squares.clamp(min=0) / (others - 1).clamp(min=1)).sqrt()
    std = torch.where((others > 1) & ~_others_equal(rewards, voting, groups), std, 0.0)
    return _narrow(torch.where(std > 0, result / (std + convention.eps), result), inputs)


def _others_equal(rewards: Tensor, voting: Tensor, groups: GroupIndex) -> Tensor:
    """Whether the voters other than the row have one reward, `[B]` bool: exact, where a difference of squares is
    not."""
    empty = rewards.new_full((groups.num_groups,), torch.inf)
    lowest = empty.scatter_reduce(0, groups.index, torch.where(voting, rewards, torch.inf), "amin")
    highest = (-empty).scatter_reduce(0, groups.index, torch.where(voting, rewards, -torch.inf), "amax")
    low, high = _to_rows(lowest, groups), _to_rows(highest, groups)
    at_low, at_high = voting & (rewards == low), voting & (rewards == high)
    lows, highs = group_sums(at_low.long(), groups), group_sums(at_high.long(), groups)
    two_values = lows + highs == group_sums(voting.long(), groups)
    return (low == high) | (two_values & ((at_low & (lows == 1)) | (at_high & (highs == 1))))


register(
    "grpo/nemo-rl", STD._replace(baseline="loo", eps_form="positive", population="survivors"), NEMO,
    "A = (R - mean_{j != i} R_j) / (std_{j != i} R_j + 1e-06), undivided where the std is 0", nemo_grpo,
)  # fmt: skip


def areal_adv_norm(inputs: Inputs, convention: Convention) -> Tensor:
    """Group-normalised rewards, 0 where filtered, then normalised again over the tokens of the batch: which gives a
    filtered rollout an advantage again."""
    first = advantages(inputs, convention, rewards=_wide(inputs))
    tokens = needed(inputs.lengths).to(torch.float64)
    total = tokens.sum()
    centred = first - divided((tokens * first).sum(), total)
    if not inputs.options["std"]:
        return _narrow(centred, inputs)
    std = divided((tokens * centred.square()).sum(), (total - convention.ddof).clamp(min=0)).sqrt()
    return _narrow(centred / (std + convention.eps), inputs)


register(
    "grpo/areal-adv-norm", STD._replace(eps=1e-5),
    "areal/trainer/ppo/actor.py:_compute_advantages (2026-05-21)",
    "a = (R - mean_G R) / (std_G R + 1e-5), 0 where filtered; A = (a - mean a) / (std a + 1e-5) over tokens",
    areal_adv_norm, needs=("rewards", "group_ids", "lengths"), options={"std": True},
)  # fmt: skip
