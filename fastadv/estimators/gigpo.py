"""verl-agent's estimators, whose rows are turns: group statistics over step rows, and GiGPO's anchor states."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fastadv import validation
from fastadv.estimators.groups import STD, Convention, advantages, group_sums, register
from fastadv.estimators.registry import OP, Estimate, Inputs, estimator, needed
from fastadv.groups import GroupIndex
from fastadv.ops.group_advantages import group_advantages
from fastadv.ops.token_returns import token_returns
from fastadv.ops.turn_advantages import turn_advantages
from fastadv.segment_table import Segments, SegmentTable
from fastadv.statistics import check_rows

MODES = ("mean_norm", "mean_std_norm")
AGENT = STD._replace(singleton="raw")
GRPO = "verl/trainer/ppo/core_algos.py:compute_grpo_outcome_advantage (verl-agent, 2026-04-03)"
GIGPO = "gigpo/core_gigpo.py:compute_gigpo_outcome_advantage (2026-04-03)"


def _segments(inputs: Inputs) -> Segments:
    """Turns, of as many rollouts as there are rewards."""
    index, rewards = needed(inputs.segments), needed(inputs.rewards)
    if index.num_rows != rewards.shape[0]:
        raise ValueError(f"{OP}: turn_ids have {index.num_rows} rollouts, rewards {rewards.shape[0]}")
    return index


def over_steps(inputs: Inputs, convention: Convention) -> Tensor:
    """Group statistics over step rows: a rollout votes once for each of its turns."""
    turns = _segments(inputs).turns()
    result = advantages(inputs, convention, votes=turns)
    # A lone rollout of several turns is a group of several equal rows, not a group of one.
    rows = group_sums(turns, needed(inputs.groups))
    repeated = (rows == turns) & (turns > 1)
    return torch.where(repeated | (turns == 0), torch.zeros_like(result), result)


register(
    "grpo/verl-agent", AGENT, GRPO,
    "A = (R - sum_G n R / sum_G n) / (std over step rows + 1e-6), n the rollout's turns", over_steps,
    needs=("rewards", "group_ids", "turn_ids"), reads=(), singleton="raw for a group of one step row",
)  # fmt: skip
register("grpo/verl-agent-trajectory", AGENT, GRPO, "A = (R - mean_G R) / (std_G R + 1e-6)", advantages, reads=())


def discounted(step_rewards: Tensor, index: Segments, gamma: float, backend: str = "auto") -> Tensor:
    """Return of each turn, sum_{k >= t} gamma^(k - t) r_k over its rollout, `[S]`: the returns of tokens where turns
    are the tokens."""
    check_rows(OP, "step_rewards", step_rewards, index.count, index.offsets.device)
    if not step_rewards.is_floating_point():
        step_rewards = step_rewards.to(torch.float64)
    turns = torch.ones_like(step_rewards, dtype=torch.bool)
    return token_returns(turns, index.offsets, token_rewards=step_rewards, gamma=gamma, backend=backend).returns


def _check_anchors(anchors: GroupIndex, groups: GroupIndex, index: Segments) -> None:
    """Raises unless the anchors are of these turns, and none groups turns of two prompts."""
    if anchors.num_rows != index.count:
        raise ValueError(f"{OP}: anchor_ids has {anchors.num_rows} labels, but there are {index.count} turns")
    if validation.reads_values(anchors.index, groups.index):
        prompt = index.spread(groups.index)  # [S]
        first = prompt.index_select(0, anchors.order.index_select(0, anchors.offsets[:-1]))
        if not torch.equal(first.index_select(0, anchors.index), prompt):
            raise ValueError(f"{OP}: anchor_ids puts turns of two prompts into one group; build it with anchor_groups")


def gigpo(inputs: Inputs, *, cross_steps: bool) -> Estimate:
    """Advantage of the episode plus omega times that of the turn among the turns from the same observation."""
    index, anchors, mode = _segments(inputs), needed(inputs.anchors), inputs.options["mode"]
    validation.choice(OP, "mode", mode, MODES)
    convention = AGENT if mode == "mean_std_norm" else AGENT._replace(scale="none")
    episode = (over_steps if cross_steps else advantages)(inputs, convention)
    _check_anchors(anchors, needed(inputs.groups), index)
    step = group_advantages(
        discounted(needed(inputs.step_rewards), index, inputs.options["gamma"], inputs.backend),
        anchors,
        scale=convention.scale,
        ddof=convention.ddof,
        eps=convention.eps,
        backend=inputs.backend,
    )
    values = index.spread(episode)
    table = SegmentTable(values + (inputs.options["omega"] * step).to(values.dtype), index)
    return Estimate(table, table)


for _name, _cross_steps, _mean in (
    ("gigpo/verl-agent", True, "sum_G n R / sum_G n"),
    ("gigpo/verl-agent-trajectory", False, "mean_G R"),
):
    estimator(
        _name,
        owner="verl-agent",
        level="turn",
        equation=f"A = R - {_mean} + omega (G_t - mean of G over the prompt's turns from the same observation), "
        "G_t = sum_{k >= t} gamma^(k - t) r_k; mode mean_std_norm: each divided by its std + 1e-6",
        code_path=GIGPO,
        ddof=AGENT.ddof,
        eps=AGENT.eps,
        eps_form=AGENT.eps_form,
        singleton="episode: raw; observation seen once: zero",
        masking="every rollout votes",
        needs=("rewards", "group_ids", "turn_ids", "anchor_ids", "step_rewards"),
        options={"mode": "mean_norm", "gamma": 1.0, "omega": 1.0},
    )(partial(gigpo, cross_steps=_cross_steps))


def turn_reached(inputs: Inputs) -> Estimate:
    """`fastadv.turn_advantages` as a table."""
    table = turn_advantages(
        needed(inputs.rewards),
        needed(inputs.groups),
        _segments(inputs),
        kappa=inputs.options["kappa"],
        population="all" if inputs.include is None else inputs.options["population"],
        include=inputs.include,
        output="segments",
        backend=inputs.backend,
    )
    return Estimate(table)


estimator(
    "turn_reached/fastadv",
    level="turn",
    equation="A = R - b, b = n/(n + kappa) mean of the n others that reached the turn + kappa/(n + kappa) mean of all "
    "others",
    code_path="fastadv/ops/turn_advantages.py:turn_advantages",
    masking="filtered rollouts vote",
    needs=("rewards", "group_ids", "turn_ids"),
    reads=("include",),
    options={"population": "all", "kappa": 2.0},
)(turn_reached)
