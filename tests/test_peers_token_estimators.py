"""Token-level estimators against verl's own functions. Opt-in: `make peers`."""

from __future__ import annotations

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
SEEDS = pytest.mark.parametrize("seed", range(4))


@pytest.fixture(scope="module")
def algos() -> Any:
    return pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed: make peers")


class Batch:
    """Padded rollouts in verl's form: an integer mask, gaps in it, ends of different lengths."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        shape = (9, 37)
        lengths = torch.randint(3, shape[1] + 1, (shape[0], 1), generator=g)
        on = (torch.arange(shape[1]) < lengths) & (torch.rand(shape, generator=g) < 0.8)
        if seed == 3:
            on[4] = False
        self.mask = on.to(torch.int64)
        self.token_rewards = torch.rand(shape, generator=g, dtype=torch.float64) * on
        self.rewards = torch.randint(0, 3, shape[:1], generator=g).double()
        self.values = torch.randn(shape, generator=g, dtype=torch.float64)
        p = 0.01 + 0.9 * torch.rand(shape, generator=g, dtype=torch.float64)
        self.log_probs, self.sum_p2 = p.log(), p**2 + (1 - p) ** 2 * torch.rand(shape, generator=g)
        self.is_weights = 2 * torch.rand(shape, generator=g, dtype=torch.float64)
        self.greedy = torch.rand(shape[0], generator=g, dtype=torch.float64)
        self.uids = np.array([f"uid{int(x)}" for x in torch.randint(0, 3, shape[:1], generator=g)], dtype=object)
        self.uids[0] = "alone"

    def outcome(self) -> Tensor:
        """The rewards on the last token of each rollout, as verl has them; a rollout without a token has none."""
        last = (self.mask * torch.arange(1, 38)).argmax(1)
        scores = torch.zeros_like(self.token_rewards)
        return scores.scatter(1, last[:, None], self.rewards[:, None]) * self.mask.bool().any(1, keepdim=True)


def compare(name: str, b: Batch, backend: str, theirs: tuple[Tensor, Tensor], **given: Any) -> None:
    dtype = torch.float64 if backend == "reference" else torch.float32
    given = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
    rewards = given.pop("rewards", None)
    group_ids = list(b.uids) if "group_ids" in fa.ESTIMATORS[name].needs else None
    ours = fa.estimate(name, rewards, group_ids, mask=b.mask, backend=backend, **given)
    bound = (
        1e-5 if backend != "reference" else 1e-7 if fa.ESTIMATORS[name].eps else 1e-9
    )  # verl's n / (n - 1) is float32
    for found, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found.double(), exact.double() * b.mask, rtol=bound, atol=bound)


@ON
@SEEDS
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(backend: str, seed: int, gamma: float, algos: Any) -> None:
    b, config = Batch(seed), SimpleNamespace(gamma=gamma)
    theirs = algos.compute_reinforce_plus_plus_outcome_advantage(b.token_rewards, b.mask, config=config)
    compare("reinforce_plus_plus/verl", b, backend, theirs, token_rewards=b.token_rewards, gamma=gamma)
    theirs = algos.compute_reinforce_plus_plus_outcome_advantage(b.outcome(), b.mask, config=config)
    compare("reinforce_plus_plus/verl", b, backend, theirs, rewards=b.rewards, gamma=gamma)


@ON
@SEEDS
def test_reinforce_plus_plus_baseline(backend: str, seed: int, algos: Any) -> None:
    b = Batch(seed)
    scores = b.rewards[:, None] * torch.eye(1, 37, dtype=torch.float64)  # verl sums them up wherever they are
    theirs = algos.compute_reinforce_plus_plus_baseline_outcome_advantage(scores, b.mask, b.uids)
    compare("reinforce_plus_plus_baseline/verl", b, backend, theirs, rewards=b.rewards)


@ON
@SEEDS
def test_remax(backend: str, seed: int, algos: Any) -> None:
    b = Batch(seed)
    theirs = algos.compute_remax_outcome_advantage(b.token_rewards, b.greedy, b.mask)
    compare("remax/verl", b, backend, theirs, token_rewards=b.token_rewards, greedy_rewards=b.greedy)


@ON
@SEEDS
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.9)])
def test_gae(backend: str, seed: int, gamma: float, lam: float, algos: Any) -> None:
    b = Batch(seed)
    theirs = algos.compute_gae_advantage_return(b.token_rewards, b.values, b.mask, gamma, lam)
    given = {"token_rewards": b.token_rewards, "values": b.values}
    compare("gae/verl", b, backend, theirs, **given, gamma=gamma, lam=lam)


@ON
@SEEDS
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("otb/verl", "compute_optimal_token_baseline_advantage"),
        ("otb-tir/verl", "compute_multi_turn_optimal_token_baseline_advantage"),
    ],
)
def test_optimal_token_baseline(
    backend: str, seed: int, weighted: bool, zero_tail: bool, name: str, function: str, algos: Any
) -> None:
    b = Batch(seed)
    rho = {"is_weights": b.is_weights} if weighted else {}
    theirs = getattr(algos, function)(
        b.token_rewards, b.mask, b.uids, b.log_probs, b.sum_p2, rho.get("is_weights"), handle_zero_tail=zero_tail
    )
    given = {"token_rewards": b.token_rewards, "log_probs": b.log_probs, "sum_p2": b.sum_p2, **rho}
    compare(name, b, backend, theirs, **given, zero_tail=zero_tail)
