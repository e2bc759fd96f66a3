"""verl-agent's estimators over rows that are turns, against loops over their definitions (GiGPO, arXiv 2505.10978)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from verl_import import verl_module

agent = verl_module("fastadv.integrations.verl.agent")
registration = verl_module("fastadv.integrations.verl.registration")


class Case:
    """Trajectories of uneven length, their rows mixed but in order; row rewards differ by an invalid-action penalty."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        rows = []
        for t in range(int(torch.randint(3, 8, (), generator=g))):
            prompt = int(torch.randint(0, 3, (), generator=g))
            reward = float(torch.randint(0, 3, (), generator=g))
            for _ in range(int(torch.randint(1, 5, (), generator=g))):
                penalty = 0.1 * float(torch.randint(0, 2, (), generator=g))
                rows.append((prompt, f"t{t}", reward - penalty, f"s{int(torch.randint(0, 3, (), generator=g))}"))
        order = torch.randperm(len(rows), generator=g)
        self.uid, self.traj, rewards, self.anchor = (
            np.array([rows[int(i)][k] for i in order], dtype=object) for k in range(4)
        )
        self.scores = torch.tensor(list(rewards), dtype=torch.float32)
        self.step = torch.rand(len(rows), generator=g)
        self.mask = (torch.rand(len(rows), 5, generator=g) < 0.7).long()
        self.rewards = torch.zeros(len(rows), 5)
        self.rewards[:, 4] = self.scores


def normalised(score: Tensor, votes: list[float], std: bool, alone_raw: bool) -> float:
    if len(votes) == 1:
        return float(score) if alone_raw else 0.0
    values = torch.tensor(votes, dtype=torch.float64)
    return float((score - values.mean()) / (values.std() + 1e-6 if std else 1.0))


def episodes(c: Case, std: bool, cross_steps: bool) -> list[float]:
    result = []
    for i in range(len(c.uid)):
        seen, votes = set(), []
        for j in range(len(c.uid)):
            if c.uid[j] == c.uid[i] and (cross_steps or c.traj[j] not in seen):
                seen.add(c.traj[j])
                votes.append(float(c.scores[j]))
        result.append(normalised(c.scores[i].double(), votes, std, True))
    return result


def returns(c: Case, gamma: float) -> list[float]:
    result = [0.0] * len(c.uid)
    for name in set(c.traj):
        later = 0.0
        for row in reversed([i for i in range(len(c.uid)) if c.traj[i] == name]):
            later = float(c.step[row]) + gamma * later
            result[row] = later
    return result


def steps(c: Case, values: list[float], std: bool) -> list[float]:
    return [
        normalised(
            torch.tensor(values[i], dtype=torch.float64),
            [values[j] for j in range(len(c.uid)) if (c.uid[j], c.anchor[j]) == (c.uid[i], c.anchor[i])], std, False,
        )
        for i in range(len(c.uid))
    ]  # fmt: skip


def near(found: Tensor, c: Case, exact: list[float]) -> None:
    expected = torch.tensor(exact)[:, None] * c.mask
    torch.testing.assert_close(found, expected.to(torch.float32), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cross_steps", [True, False])
@pytest.mark.parametrize("std", [True, False])
def test_the_functions_of_verl_agent(std: bool, cross_steps: bool) -> None:
    for seed in range(12):
        c = Case(seed)
        found = agent.compute_grpo_outcome_advantage(
            c.rewards, c.mask, c.uid, c.traj, norm_adv_by_std_in_grpo=std, compute_mean_std_cross_steps=cross_steps
        )
        near(found[0], c, episodes(c, std, cross_steps))
        batch = SimpleNamespace(
            non_tensor_batch={"rewards": c.step.numpy(), "traj_uid": c.traj, "active_masks": np.ones(len(c.uid))},
            batch={"input_ids": c.mask},
        )
        turn_returns = agent.compute_step_discounted_returns(batch, 0.9)
        torch.testing.assert_close(turn_returns, torch.tensor(returns(c, 0.9)), rtol=1e-6, atol=1e-6)
        mode = "mean_std_norm" if std else "mean_norm"
        joint = agent.compute_gigpo_outcome_advantage(
            c.rewards, turn_returns, c.mask, c.anchor, c.uid, c.traj, mode=mode, step_advantage_w=0.5,
            compute_mean_std_cross_steps=cross_steps,
        )[0]  # fmt: skip
        parts = zip(episodes(c, std, cross_steps), steps(c, turn_returns.tolist(), std), strict=True)
        near(joint, c, [e + 0.5 * s for e, s in parts])


@pytest.mark.parametrize("name", ["fastadv_gigpo", "fastadv_gigpo_trajectory", "fastadv_grpo_steps"])
def test_by_name_with_the_fields_of_verl_agent(name: str) -> None:
    """As a verl that passes non_tensor_batch calls it: traj_uid says which rows are one trajectory."""
    c = Case(3)
    fields = {"uid": c.uid, "traj_uid": c.traj, "anchor_obs": c.anchor, "rewards": c.step.numpy()}
    config = {"gamma": 0.9, "norm_adv_by_std_in_grpo": False, "gigpo": {"mode": "mean_norm"}}
    found = registration.ESTIMATORS[name](
        token_level_rewards=c.rewards, response_mask=c.mask, index=c.uid, config=config, non_tensor_batch=fields
    )[0]
    exact = episodes(c, False, name != "fastadv_gigpo_trajectory")
    if "gigpo" in name:
        exact = [e + s for e, s in zip(exact, steps(c, returns(c, 0.9), False), strict=True)]
    near(found, c, exact)


def test_observations_of_any_kind_and_alike() -> None:
    options = agent.GigpoOptions()
    kinds = [np.array([1, 2]), (1, 2), {"a": [1, 2]}, {"a": (1, 2)}, "x", 1]
    groups = agent.anchors_of(kinds, ["p"] * 6, options)
    assert groups.index.tolist()[0] == groups.index.tolist()[1]
    assert groups.index.tolist()[2] == groups.index.tolist()[3]
    assert groups.num_groups == 4
    assert agent.anchors_of(["x", "x"], ["p", "q"], options).num_groups == 2, "not across prompts"
    alike = agent.GigpoOptions(enable_similarity=True, similarity_thresh=0.8)
    assert agent.anchors_of(["you are here", "you are here!", "elsewhere"], ["p"] * 3, alike).num_groups == 2


BAD: dict[str, tuple[Any, str]] = {
    "an object": (lambda: agent.anchors_of([object()], ["p"], agent.GigpoOptions()), "anchor_obs has a object"),
    "numbers alike": (
        lambda: agent.anchors_of([1], ["p"], agent.GigpoOptions(enable_similarity=True)), "anchor_obs has a int",
    ),
    "a mode": (lambda: agent.GigpoOptions.of({"gigpo": {"mode": "x"}}), r"algorithm\.gigpo\.mode is 'x'"),
    "a key": (lambda: agent.GigpoOptions.of({"gigpo": {"moed": "x"}}), r"algorithm\.gigpo\.moed is no key"),
    "two prompts": (lambda: agent.TurnRows.of(["a", "b"], ["t", "t"]), "a trajectory has rows with two uids"),
    "lengths": (lambda: agent.TurnRows.of(["a", "b"], ["t"]), "uid has 2 rows, traj_uid 1"),
    "no traj_uid": (
        lambda: registration.ESTIMATORS["fastadv_gigpo"](torch.zeros(1, 1), torch.ones(1, 1), np.array(["a"])),
        "needs uid of non_tensor_batch, which verl does not pass",
    ),
    "verl-agent is not there": (agent.accelerate, "its package `gigpo` cannot be imported"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises((ValueError, TypeError, ImportError), match=message):
        call()
