"""Estimators of rollouts beside their owners' own code: verl's functions, and the lines of TRL's trainers that make
advantages of rewards, cut out of their methods.

Opt-in, since the owners' packages are large: `make peers` installs them and runs this file.
"""

from __future__ import annotations

import inspect
import textwrap
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from draws import BACKENDS
from torch import Tensor

import fastadv as fa

pytestmark = pytest.mark.peers
ON = pytest.mark.parametrize("backend", BACKENDS)
NAN = float("nan")
NEAR = {"rtol": 4e-6, "atol": 2e-6}  # verl adds 1e-6 to the std of 1 that it gives a group of one
FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}  # verl's vectorised mean and std, of rewards of 50
VECTORIZED = "grpo/verl-vectorized"

VERL = {
    "grpo/verl": ("grpo", {}),
    "dr_grpo/verl": ("grpo", {"norm_adv_by_std_in_grpo": False}),
    VECTORIZED: ("grpo_vectorized", {}),
    "rloo/verl": ("rloo", {}),
    "rloo/verl-vectorized": ("rloo_vectorized", {}),
    "opo/verl": ("opo", {}),
    "gpg/verl": ("gpg", {}),
    "passk/verl": ("grpo_passk", {"config": {"norm_adv_by_std_in_grpo": True}}),
    "passk/verl, centred only": ("grpo_passk", {"config": {"norm_adv_by_std_in_grpo": False}}),
}


class Case:
    """Token rewards of uneven groups in any order, tool holes in the mask; ties, equal groups and, unless `pairs`,
    groups of one."""

    def __init__(self, seed: int, *, pairs: bool) -> None:
        g = torch.Generator().manual_seed(seed)
        sizes = torch.randint(2 if pairs else 1, 7, (6,), generator=g)
        labels = torch.repeat_interleave(torch.arange(6), sizes)
        order = torch.randperm(len(labels), generator=g)
        self.labels = np.array([f"uid-{7 * int(label)}" for label in labels[order]], dtype=object)
        scores = torch.randint(0, 4, (len(labels),), generator=g).double() / 3
        scores[labels == 0] = 0.7
        scores[labels == 1] += 50.0
        self.scores = scores[order]
        lengths = torch.randint(1, 12, (len(labels), 1), generator=g)
        self.mask = (torch.arange(12) < lengths) & ((torch.arange(12) % 4 != 2) | (torch.arange(12) == lengths - 1))
        self.rewards = torch.zeros(len(labels), 12, dtype=torch.float64)
        self.rewards[torch.arange(len(labels)), lengths[:, 0] - 1] = self.scores


@pytest.fixture(scope="module")
def verl() -> Any:
    return import_module("verl.trainer.ppo.core_algos")


@ON
@pytest.mark.parametrize("key", VERL)
def test_verl(key: str, backend: str, verl: Any) -> None:
    name, (theirs, options) = key.split(",")[0], VERL[key]
    for seed in range(8):
        c = Case(seed, pairs="passk" in name)
        expected = verl.get_adv_estimator_fn(theirs)(
            token_level_rewards=c.rewards.clone(), response_mask=c.mask.long(), index=c.labels, **options
        )
        given: dict[str, Any] = {"mask": c.mask} if name == "opo/verl" else {}
        if "passk" in name:
            given["std"] = options["config"]["norm_adv_by_std_in_grpo"]
        ours = fa.estimate(name, c.scores, c.labels, backend=backend, **given)
        for mine, other in zip(ours, expected, strict=True):
            # In float32 verl's groups without spread are not 0, see test_reports_estimators.py.
            rows = mine != 0 if name == VECTORIZED else torch.ones_like(mine, dtype=torch.bool)
            near = FLOAT32 if name == VECTORIZED else NEAR
            torch.testing.assert_close((mine[:, None] * c.mask)[rows], other.double()[rows], **near)


@pytest.mark.parametrize("name", ["grpo/verl", "rloo/verl", "gpg/verl", "opo/verl"])
def test_verl_lets_empty_rollouts_vote(name: str, verl: Any) -> None:
    """The report that we follow (verl #6452): with the mask, our rows differ from verl's on purpose; what is left
    agrees with verl without the empty rollouts."""
    c = Case(3, pairs=True)
    c.mask[::5] = False
    there = c.mask.any(1)
    function = verl.get_adv_estimator_fn(VERL[name][0])
    call = {"token_level_rewards": c.rewards, "response_mask": c.mask.long(), "index": c.labels}
    clone = {key: value.clone() if isinstance(value, Tensor) else value for key, value in call.items()}
    with_them = function(**clone)[0]
    without = function(
        **{key: value[there if isinstance(value, Tensor) else there.numpy()] for key, value in call.items()}
    )
    ours = fa.estimate(name, c.scores, c.labels, mask=c.mask).advantages
    torch.testing.assert_close(ours[there, None] * c.mask[there], without[0].double(), **NEAR)
    assert not ours[~there].any()
    if name != "opo/verl":  # whose votes are lengths
        assert float((with_them - ours[:, None] * c.mask).abs().max()) > 1e-3


def cut(method: Any, first: str, last: str, names: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Runs the lines of a method from the one that begins with `first` to the one that begins with `last`."""
    lines = inspect.getsource(method).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    end = next(i for i, line in enumerate(lines) if i > begin and line.strip().startswith(last))
    scope = {**names, **given}
    exec(compile(textwrap.dedent("\n".join(lines[begin : end + 1])), method.__qualname__, "exec"), scope)
    return scope


def even_groups(seed: int) -> tuple[Tensor, Tensor]:
    """Rewards of six groups of five, contiguous as TRL has them, some without a reward."""
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 4, (30,), generator=g).double() / 3
    rewards[:5] = 0.7
    rewards[torch.rand(30, generator=g) < 0.2] = NAN
    rewards[10:14] = NAN  # a group with one reward
    rewards[20:25] = NAN  # and one with none
    return rewards, torch.arange(30) // 5


@ON
@pytest.mark.parametrize(("name", "scale"), [("grpo/trl", "group"), ("dr_grpo/trl", "none")])
def test_trl_grpo(name: str, scale: str, backend: str) -> None:
    module = import_module("trl.trainer.grpo_trainer")
    trainer = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize", reward_weights=torch.ones(1), scale_rewards=scale
    )
    for seed in range(5):
        rewards, labels = even_groups(seed)
        theirs = cut(
            module.GRPOTrainer._generate_and_score_completions,
            "unscorable_mask =", "advantages = torch.nan_to_num", vars(module),
            self=trainer, rewards_per_func=rewards[:, None].clone(), device="cpu", num_generations=5,
        )["advantages"]  # fmt: skip
        ours = fa.estimate(name, rewards, labels, backend=backend).advantages
        torch.testing.assert_close(ours, theirs.double(), rtol=1e-7, atol=1e-7)  # Bessel's factor is float32


@ON
def test_trl_rloo(backend: str) -> None:
    module = import_module("trl.trainer.rloo_trainer")
    for seed in range(5):
        rewards, labels = even_groups(seed)
        theirs = cut(
            module.RLOOTrainer._generate_and_score_completions,
            "grouped_rewards = rewards.view", "advantages = torch.nan_to_num", vars(module),
            self=SimpleNamespace(normalize_advantages=False), rewards=rewards.clone(), num_generations=5,
        )["advantages"]  # fmt: skip
        ours = fa.estimate("rloo/trl", rewards, labels, backend=backend).advantages
        torch.testing.assert_close(ours, theirs.double(), rtol=1e-9, atol=1e-9)


@ON
def test_trl_async(backend: str) -> None:
    module = import_module("trl.experimental.async_grpo.async_rollout_worker")
    worker = next(kind for kind in vars(module).values() if hasattr(kind, "_score_group"))
    for seed in range(5):
        rewards, labels = even_groups(seed)
        ours = fa.estimate("grpo/trl-async", rewards, labels, backend=backend).advantages
        for label in range(6):
            theirs = cut(
                worker._score_group, "scored_mask =", "reward_mean = reward_std", vars(module),
                rewards=rewards[labels == label].numpy(),
            )["advantages"]  # fmt: skip
            torch.testing.assert_close(ours[labels == label], torch.from_numpy(theirs), rtol=1e-7, atol=1e-7)
