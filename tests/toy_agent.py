"""Agents small enough to enumerate: every expectation over rollouts, groups and coins is a finite sum.

The expected update of an estimator comes out of the library's own ops: all groups that can occur are one batch,
weighted by their probabilities, and `policy_loss` is differentiated through the policy's parameters. Everything is
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import factorial, prod

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import fastadv as fa


@dataclass(frozen=True)
class Rollout:
    """One way an episode can go: submit (True) or go on (False) at each turn."""

    probability: float
    submits: tuple[bool, ...]
    reward: float
    capped: bool

    @property
    def turns(self) -> int:
        return len(self.submits)


@dataclass(frozen=True)
class TurnAgent:
    """Submits at turn l with probability p[l], and is then right with probability q[l]; after the last turn the cap.

    The policy's parameters are theta[l] = logit(p[l]).
    """

    p: tuple[float, ...]
    q: tuple[float, ...]

    @property
    def theta(self) -> Tensor:
        p = torch.tensor(self.p, dtype=torch.float64)
        return p.log() - (-p).log1p()

    def rollouts(self) -> list[Rollout]:
        found, reach = [], 1.0
        for turn, (p, q) in enumerate(zip(self.p, self.q, strict=True)):
            history = (False,) * turn + (True,)
            outcomes = ((1.0, q), (0.0, 1 - q))
            found += [Rollout(reach * p * share, history, reward, False) for reward, share in outcomes if share]
            reach *= 1 - p
        return [*found, Rollout(reach, (False,) * len(self.p), 0.0, True)]


THREE_OUTCOMES = TurnAgent((1 / 5, 1 / 3, 2 / 5), (3 / 10, 1 / 2, 4 / 5))
TWO_OUTCOMES = TurnAgent((1 / 5, 1 / 3, 2 / 5), (1.0, 1.0, 1.0))


@dataclass(frozen=True, eq=False)
class Enumeration:
    """Every group of `size` rollouts that can occur, as one batch with a token a turn."""

    agent: TurnAgent
    size: int
    probability: Tensor  # [M] of each group
    rewards: Tensor  # [M * size]
    capped: Tensor  # [M * size] bool
    group_ids: Tensor  # [M * size]
    submits: Tensor  # [N] bool: action of each token
    turn_ids: Tensor  # [N]
    cu_seqlens: Tensor  # [M * size + 1]

    @classmethod
    def of(cls, agent: TurnAgent, size: int) -> Enumeration:
        """Multisets of rollouts with their multinomial probabilities."""
        rollouts = agent.rollouts()
        probability, members = [], []
        for group in combinations_with_replacement(range(len(rollouts)), size):
            ways = factorial(size) / prod(factorial(group.count(i)) for i in set(group))
            probability.append(ways * prod(rollouts[i].probability for i in group))
            members += [rollouts[i] for i in group]
        lengths = torch.tensor([r.turns for r in members])
        return cls(
            agent=agent,
            size=size,
            probability=torch.tensor(probability, dtype=torch.float64),
            rewards=torch.tensor([r.reward for r in members], dtype=torch.float64),
            capped=torch.tensor([r.capped for r in members]),
            group_ids=torch.arange(len(probability)).repeat_interleave(size),
            submits=torch.tensor([action for r in members for action in r.submits]),
            turn_ids=torch.cat([torch.arange(r.turns) for r in members]),
            cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        )

    def update(self, advantages: Tensor | fa.SegmentTable, weights: Tensor | None = None) -> Tensor:
        """Expected ascent direction `[L]`: mean over the group's rollouts of weight * sum over turns of A * score."""
        theta = self.agent.theta.requires_grad_()
        logit = theta[self.turn_ids]
        log_probs = torch.where(self.submits, logsigmoid(logit), logsigmoid(-logit))
        rows = self.probability.repeat_interleave(self.size) / self.size
        out = fa.policy_loss(
            log_probs, None, advantages, torch.ones_like(self.submits),
            config=fa.LossConfig("reinforce", loss_agg_mode="token-sum"), cu_seqlens=self.cu_seqlens,
            weights=rows if weights is None else rows * weights,
        )  # fmt: skip
        out.loss.backward()
        return -theta.grad

    def mean(self, values: Tensor) -> Tensor:
        """Expectation of a number per rollout."""
        return (self.probability.repeat_interleave(self.size) * values).sum() / self.size

    def gradient_of(self, values: Tensor) -> Tensor:
        """Gradient of the expectation of a number per rollout, by the score identity."""
        return self.update(values)


def sum_over_coins(kinds: int, chance: float, value: Callable[[Tensor], Tensor]) -> Tensor:
    """Expectation of `value(coins [kinds] bool)` over independent coins that are True with this chance."""
    total = torch.zeros((), dtype=torch.float64)
    for bits in range(2**kinds):
        coins = torch.tensor([bool(bits >> k & 1) for k in range(kinds)])
        heads = int(coins.sum())
        total = total + chance**heads * (1 - chance) ** (kinds - heads) * value(coins)
    return total
