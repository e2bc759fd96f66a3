"""verl-agent's estimators, where a row of the batch is a turn: GRPO over turns or over trajectories, and GiGPO.

A trajectory is what has one `traj_uid`, and its turns are its rows in the order in which the batch has them, as in
verl-agent. Under a trainer of `fastadv.integrations.verl.trainer` it is a session whose agent loop puts out one row a
turn; `anchor_obs` and `step_reward` are then keys of each output's `extra_fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fastadv.integrations.keys import key_error, mapping, number
from fastadv.integrations.verl.keys import TRAINER, EstimatorOptions
from fastadv.integrations.verl.rows import told
from torch import Tensor

from fastadv import group_advantages, group_index, token_returns
from fastadv.estimators import similar_anchors
from fastadv.estimators.gigpo import AGENT, MODES
from fastadv.groups import GroupIndex

PATH = "algorithm.gigpo"  # verl-agent's own keys


@dataclass(frozen=True)
class GigpoOptions:
    """verl-agent's keys under `algorithm.gigpo`.

    Attributes:
        step_advantage_w: weight of the advantage among turns from one observation.
        mode: "mean_norm", or "mean_std_norm", which divides by standard deviations.
        enable_similarity: observations need not be equal, but alike.
        similarity_thresh: how much, a ratio of difflib.
    """

    step_advantage_w: float = 1.0
    mode: str = "mean_norm"
    enable_similarity: bool = False
    similarity_thresh: float = 0.95

    @classmethod
    def of(cls, algorithm: Any) -> GigpoOptions:
        """Reads and checks `algorithm.gigpo`.

        Raises:
            ValueError: an unknown key or value, with the key's whole name.
        """
        given = mapping(PATH, algorithm.get("gigpo"), tuple(cls.__dataclass_fields__))
        if given.get("mode", "mean_norm") not in MODES:
            raise key_error(f"{PATH}.mode", given["mode"], f"it must be one of {', '.join(MODES)}")
        for name in ("step_advantage_w", "similarity_thresh"):
            if name in given:
                given[name] = number(f"{PATH}.{name}", given[name])
        return cls(**given)


@dataclass(frozen=True, eq=False)
class TurnRows:
    """Rows of a batch as turns.

    Attributes:
        prompts: `[B]`, prompt of each row.
        trajectories: rows of one trajectory are one group, in the order of its turns.
        first: `[B]` bool, the first turn of its trajectory.
    """

    prompts: GroupIndex
    trajectories: GroupIndex
    first: Tensor  # [B]

    @classmethod
    def of(cls, index: Sequence[Any], traj_index: Sequence[Any]) -> TurnRows:
        """Of verl-agent's `uid` and `traj_uid`, `[B]` each.

        Raises:
            ValueError: lists of different lengths, a trajectory with rows of two prompts.
        """
        if len(index) != len(traj_index):
            raise ValueError(f"uid has {len(index)} rows, traj_uid {len(traj_index)}; verl-agent has one each a turn")
        prompts, trajectories = group_index(list(map(str, index))), group_index(list(map(str, traj_index)))
        first = torch.zeros(len(index), dtype=torch.bool)
        begin = trajectories.order[trajectories.offsets[:-1]]
        first[begin] = True
        if not torch.equal(prompts.index[begin][trajectories.index], prompts.index):
            raise ValueError("traj_uid: a trajectory has rows with two uids; both have to come from one rollout")
        return cls(prompts, trajectories, first)

    def returns(self, step_rewards: Tensor, gamma: float) -> Tensor:
        """Discounted returns of turns over their trajectories, `[B]`."""
        order, offsets = self.trajectories.order, self.trajectories.offsets
        on = torch.ones(len(order), dtype=torch.bool)
        found = token_returns(on, offsets, token_rewards=step_rewards[order], gamma=gamma).returns
        return torch.empty_like(found).index_copy_(0, order, found)

    def episodes(self, rewards: Tensor, *, std: bool, cross_steps: bool) -> Tensor:
        """Advantage of each row among the rows of its prompt, or among its trajectories by their first rows; `[B]`."""
        votes = None if cross_steps else self.first.to(torch.float64)
        return group_advantages(
            rewards, self.prompts, votes=votes, singleton=AGENT.singleton, scale="std" if std else "none",
            ddof=AGENT.ddof, eps=AGENT.eps, eps_form=AGENT.eps_form,
        )  # fmt: skip

    def steps(self, returns: Tensor, anchors: GroupIndex, *, std: bool) -> Tensor:
        """Advantage of each row among the rows of its prompt that started from the same observation; `[B]`."""
        return group_advantages(
            returns, anchors, scale="std" if std else "none", ddof=AGENT.ddof, eps=AGENT.eps, eps_form=AGENT.eps_form
        )


@dataclass(frozen=True, eq=False)
class AgentTurns:
    """Rows that are turns, in the order of their trajectories.

    Attributes:
        order: `[n]` int64, the rows.
        uids: `[n]`, their prompts.
        trajectories: `[n]`, theirs.
        anchor_obs: `[n]`, the observation that each turn started from; None where nobody gave it.
        step_rewards: `[n]`, reward of each turn; None where nobody gave it.
    """

    order: Tensor  # [n]
    uids: list[Any]
    trajectories: list[Any]
    anchor_obs: list[Any]
    step_rewards: list[Any]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> AgentTurns:
        """Of verl-agent's non_tensor_batch."""
        missing = next((name for name in ("uid", "traj_uid") if name not in fields), None)
        if missing is not None:
            raise ValueError(
                f"algorithm.adv_estimator: this estimator needs {missing} of non_tensor_batch, which verl does not "
                f"pass; take {TRAINER}, or in verl-agent fastadv.integrations.verl.agent.accelerate()"
            )
        count = len(fields["uid"])
        nothing = [None] * count
        return cls(
            torch.arange(count), list(fields["uid"]), list(fields["traj_uid"]),
            list(fields.get("anchor_obs", nothing)), list(fields.get("rewards", nothing)),
        )  # fmt: skip

    def given(self, name: str) -> list[Any]:
        """A field of all turns.

        Raises:
            ValueError: a turn without it.
        """
        values: list[Any] = getattr(self, name)
        lacking = next((i for i, value in enumerate(values) if value is None), None)
        if lacking is not None:
            key = "step_reward" if name == "step_rewards" else name
            raise ValueError(
                f"algorithm.adv_estimator: GiGPO needs {key} of every turn, in extra_fields of AgentLoopOutput (one "
                f"output a turn) or in verl-agent's non_tensor_batch; row {int(self.order[lacking])} has none"
            )
        return values


def anchors_of(anchor_obs: Sequence[Any], index: Sequence[Any], options: GigpoOptions) -> GroupIndex:
    """Rows of one prompt with equal, or with similar, observations.

    Args:
        anchor_obs: `[B]` texts, numbers, arrays, or lists and mappings of them.
        index: `[B]`, verl's uid.
        options: whether similar is enough.

    Raises:
        TypeError: an observation that is none of these; a similarity of what is no text.
    """
    prompts = list(map(str, index))
    if options.enable_similarity:
        wrong = next((obs for obs in anchor_obs if not isinstance(obs, str)), None)
        if wrong is not None:
            raise TypeError(f"{PATH}.enable_similarity compares texts, but anchor_obs has a {type(wrong).__name__}")
        return group_index(similar_anchors(list(anchor_obs), prompts, threshold=options.similarity_thresh))
    number_of: dict[Hashable, int] = {}
    labels = [(prompt, _hashable(obs)) for prompt, obs in zip(prompts, anchor_obs, strict=True)]
    return group_index([number_of.setdefault(label, len(number_of)) for label in labels])


def _hashable(value: Any) -> Hashable:
    if hasattr(value, "tolist") and hasattr(value, "flatten"):  # an array, and a number of numpy's
        return tuple(value.flatten().tolist())
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, Mapping):
        return tuple(sorted((key, _hashable(item)) for key, item in value.items()))
    if isinstance(value, (str, bool, int, float)) or value is None:
        return value
    raise TypeError(
        f"anchor_obs has a {type(value).__name__}; observations are texts, numbers, arrays or lists of them"
    )


# ---- verl-agent's own functions, in its own signatures ---------------------------------------------------------------


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any],
    traj_index: Sequence[Any],
    epsilon: float = AGENT.eps,
    norm_adv_by_std_in_grpo: bool = True,
    compute_mean_std_cross_steps: bool = True,
) -> tuple[Tensor, Tensor]:
    """verl-agent's function of this name in `verl.trainer.ppo.core_algos`: equal values, without its loops."""
    _only(epsilon)
    turns = TurnRows.of(index, traj_index)
    found = turns.episodes(
        token_level_rewards.sum(-1), std=norm_adv_by_std_in_grpo, cross_steps=compute_mean_std_cross_steps
    )
    return _spread(found, response_mask)


def compute_gigpo_outcome_advantage(
    token_level_rewards: Tensor,
    step_rewards: Tensor,
    response_mask: Tensor,
    anchor_obs: Sequence[Any],
    index: Sequence[Any],
    traj_index: Sequence[Any],
    epsilon: float = AGENT.eps,
    step_advantage_w: float = 1.0,
    mode: str = "mean_norm",
    enable_similarity: bool = False,
    similarity_thresh: float = 0.95,
    compute_mean_std_cross_steps: bool = True,
) -> tuple[Tensor, Tensor]:
    """verl-agent's function of this name in `gigpo.core_gigpo`: equal values, without its loops. `step_rewards` are
    returns, as `compute_step_discounted_returns` makes them."""
    _only(epsilon)
    given = {"step_advantage_w": step_advantage_w, "mode": mode, "enable_similarity": enable_similarity,
             "similarity_thresh": similarity_thresh}  # fmt: skip
    options = GigpoOptions.of({"gigpo": given})
    turns = TurnRows.of(index, traj_index)
    return _spread(
        gigpo(turns, token_level_rewards.sum(-1), step_rewards, anchors_of(anchor_obs, index, options), options,
               cross_steps=compute_mean_std_cross_steps), response_mask,
    )  # fmt: skip


def compute_step_discounted_returns(batch: Any, gamma: float) -> Tensor:
    """verl-agent's function of this name in `gigpo.core_gigpo`: equal values, without its search for each row."""
    rows = batch.non_tensor_batch
    turns = TurnRows.of(rows["traj_uid"], rows["traj_uid"])
    if not rows["active_masks"].astype(bool).all():
        raise ValueError("active_masks: a row of a trajectory is not active; verl-agent leaves those rows out")
    rewards = torch.from_numpy(rows["rewards"].astype("float32"))
    return turns.returns(rewards, gamma).to(batch.batch["input_ids"].device)


def gigpo(
    turns: TurnRows, rewards: Tensor, returns: Tensor, anchors: GroupIndex, options: GigpoOptions, *, cross_steps: bool
) -> Tensor:
    """Advantages of rows, `[B]`: of the episode, and of the turn among those from the same observation."""
    std = options.mode == "mean_std_norm"
    episode = turns.episodes(rewards, std=std, cross_steps=cross_steps)
    return episode + options.step_advantage_w * turns.steps(returns.to(rewards.dtype), anchors, std=std)


def _only(epsilon: float) -> None:
    if epsilon != AGENT.eps:
        raise ValueError(f"epsilon is {epsilon}; verl-agent's trainer never passes another than {AGENT.eps}")


def _spread(per_row: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.where(mask != 0, per_row.to(torch.float32).to(mask.device)[:, None], 0.0)
    return tokens, tokens


def accelerate() -> tuple[str, ...]:
    """Puts the functions above in the place of verl-agent's, whose names are fixed in its trainer.

    Returns:
        What was replaced.

    Raises:
        ImportError: verl-agent is not installed.
    """
    try:
        from gigpo import core_gigpo
    except ImportError as error:
        raise ImportError("verl-agent is not installed: its package `gigpo` cannot be imported") from error
    from verl.trainer.ppo import core_algos

    core_gigpo.compute_gigpo_outcome_advantage = compute_gigpo_outcome_advantage
    core_gigpo.compute_step_discounted_returns = compute_step_discounted_returns
    core_algos.compute_grpo_outcome_advantage = compute_grpo_outcome_advantage
    return (
        "gigpo.core_gigpo.compute_gigpo_outcome_advantage", "gigpo.core_gigpo.compute_step_discounted_returns",
        "verl.trainer.ppo.core_algos.compute_grpo_outcome_advantage",
    )  # fmt: skip


# ---- by name in verl -------------------------------------------------------------------------------------------------


def _by_name(rows: Tensor, algorithm: Any, turns: AgentTurns, *, anchors: bool, cross_steps: bool) -> Tensor:
    """Advantages of rows, `[B]`."""
    options, index = EstimatorOptions.of(algorithm), TurnRows.of(turns.uids, turns.trajectories)
    scores = rows[turns.order]
    if anchors:
        own = GigpoOptions.of(algorithm)
        step_rewards = torch.tensor([float(reward) for reward in turns.given("step_rewards")])
        returns, observed = index.returns(step_rewards, options.gamma), turns.given("anchor_obs")
        found = gigpo(index, scores, returns, anchors_of(observed, turns.uids, own), own, cross_steps=cross_steps)
    else:
        found = index.episodes(scores, std=options.norm_adv_by_std_in_grpo, cross_steps=cross_steps)
    return torch.zeros_like(rows).index_copy_(0, turns.order, found.to(rows.dtype))


def registered(name: str, *, anchors: bool, cross_steps: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function that verl's registry gets for an estimator over turns."""

    def compute(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        config: Any = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        trainer = told()
        turns = trainer.turns if trainer is not None else AgentTurns.of(non_tensor_batch or {})
        with torch.no_grad():
            found = _by_name(
                token_level_rewards.sum(-1), {} if config is None else config, turns, anchors=anchors,
                cross_steps=cross_steps,
            )  # fmt: skip
        return _spread(found, response_mask)

    compute.__name__ = compute.__qualname__ = name
    compute.__doc__ = f"`algorithm.adv_estimator={name}`, see fastadv.integrations.verl.agent."
    return compute


REGISTERED = {
    "fastadv_grpo_steps": registered("fastadv_grpo_steps", anchors=False, cross_steps=True),
    "fastadv_gigpo": registered("fastadv_gigpo", anchors=True, cross_steps=True),
    "fastadv_gigpo_trajectory": registered("fastadv_gigpo_trajectory", anchors=True, cross_steps=False),
}
