"""Estimators with one advantage a rollout or turn, beside the loops over rows that frameworks run: a list of scores for
each prompt, torch's mean and std of each list, and a second loop over the rows.

Prompts are labelled by strings, as trainers label them, and the loops read these; ours read the index objects that a
batch builds once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastadv as fa
from bench.harness import Line, Timing, against_floor, against_peer, interleave, write

GROUPS, SIZE, TURNS = 1024, 8, 40
MOST = 0.005  # seconds of an estimator with one advantage a rollout


@dataclass(frozen=True)
class Rollouts:
    """A step's rollouts: scores of 0 and 1 of half-solved prompts, in mixed order, with up to 40 turns each."""

    scores: Tensor  # [B]
    labels: list[str]
    groups: fa.GroupIndex
    segments: fa.Segments
    lengths: Tensor  # [B]
    observations: list[str]
    anchors: fa.GroupIndex
    step_rewards: Tensor  # [S]

    @classmethod
    def draw(cls, groups: int = GROUPS, seed: int = 0) -> Rollouts:
        """Rollouts of this many prompts."""
        g = torch.Generator().manual_seed(seed)
        rows = groups * SIZE
        prompts = torch.randperm(rows, generator=g) % groups
        labels = [f"prompt-{int(p):08x}" for p in prompts]
        index = fa.group_index(labels)
        turns = torch.randint(TURNS // 2, TURNS + 1, (rows,), generator=g)
        turn_ids = torch.cat([torch.arange(int(n), dtype=torch.int32) for n in turns])
        segments = fa.segments(turn_ids, torch.cat([turns.new_zeros(1), turns.cumsum(0)]))
        observations = [f"observation {int(x)}" for x in torch.randint(0, 50, (segments.count,), generator=g)]
        return cls(
            scores=torch.randint(0, 2, (rows,), generator=g).float(),
            labels=labels,
            groups=index,
            segments=segments,
            lengths=100 * turns,
            observations=observations,
            anchors=fa.estimators.anchor_groups(observations, index, segments),
            step_rewards=torch.randint(0, 2, (segments.count,), generator=g).float(),
        )

    def given(self, name: str) -> dict[str, Any]:
        """What the estimator needs, as index objects."""
        all_of_it = {
            "rewards": self.scores, "group_ids": self.groups, "lengths": self.lengths, "turn_ids": self.segments,
            "anchor_ids": self.anchors, "step_rewards": self.step_rewards,
        }  # fmt: skip
        needs = [need.split("|")[0] for need in fa.ESTIMATORS[name].needs]
        return {need: all_of_it[need] for need in needs}

    def rows_of_steps(self, per_rollout: list[Any]) -> list[Any]:
        """A value of each rollout, once for each of its turns."""
        return [x for x, n in zip(per_rollout, self.segments.turns().tolist(), strict=True) for _ in range(n)]


def collected(scores: Tensor, labels: list[Any]) -> dict[Any, list[Tensor]]:
    """Scores of each label, a 0-d tensor each."""
    lists: dict[Any, list[Tensor]] = defaultdict(list)
    for i in range(scores.shape[0]):
        lists[labels[i]].append(scores[i])
    return lists


def by_mean(scores: Tensor, labels: list[Any], *, std: bool = True, eps: float = 1e-6) -> Tensor:
    """GRPO."""
    means, stds = {}, {}
    for label, values in collected(scores, labels).items():
        stacked = torch.stack(values)
        means[label] = torch.mean(stacked) if len(values) > 1 else torch.tensor(0.0)
        stds[label] = torch.std(stacked) if len(values) > 1 else torch.tensor(1.0)
    result = scores.clone()
    for i in range(scores.shape[0]):
        result[i] = scores[i] - means[labels[i]]
        if std:
            result[i] = result[i] / (stds[labels[i]] + eps)
    return result


def by_others(scores: Tensor, labels: list[Any]) -> Tensor:
    """RLOO."""
    lists = collected(scores, labels)
    means = {label: torch.mean(torch.stack(values)) for label, values in lists.items()}
    result = scores.clone()
    for i in range(scores.shape[0]):
        n = len(lists[labels[i]])
        result[i] = (scores[i] - means[labels[i]]) * n / (n - 1)
    return result


def by_length(scores: Tensor, labels: list[Any], lengths: Tensor) -> Tensor:
    """OPO."""
    weights = collected(lengths.float(), labels)
    baselines = {}
    for label, values in collected(scores, labels).items():
        weight = torch.stack(weights[label])
        baselines[label] = (weight * torch.stack(values)).sum() / weight.sum()
    result = scores.clone()
    for i in range(scores.shape[0]):
        result[i] = scores[i] - baselines[labels[i]]
    return result


def by_best(scores: Tensor, labels: list[Any]) -> Tensor:
    """pass@k."""
    rows = defaultdict(list)
    for i, label in enumerate(labels):
        rows[label].append(i)
    result = torch.zeros_like(scores)
    for label, values in collected(scores, labels).items():
        stacked = torch.stack(values)
        top, at = torch.topk(stacked, 2)
        result[rows[label][int(at[0])]] = (top[0] - top[1]) / (torch.std(stacked) + 1e-6)
    return result


def by_observation(b: Rollouts) -> Tensor:
    """GiGPO over step rows, given its step groups, with returns of gamma 1 by a loop over turns."""
    returns, at = b.step_rewards.clone(), 0
    for n in b.segments.turns().tolist():
        for t in range(at + n - 2, at - 1, -1):
            returns[t] += returns[t + 1]
        at += n
    scores = torch.repeat_interleave(b.scores, b.segments.turns())
    prompts = b.rows_of_steps(b.labels)
    states = list(zip(prompts, b.observations, strict=True))
    lists = collected(returns, states)
    step = by_mean(returns, states, std=False)
    for i, state in enumerate(states):
        if len(lists[state]) == 1:
            step[i] = 0.0
    return by_mean(scores, prompts, std=False) + step


def over_steps(b: Rollouts) -> Tensor:
    """verl-agent's GRPO over step rows, one advantage a rollout."""
    rows = torch.repeat_interleave(b.scores, b.segments.turns())
    return by_mean(rows, b.rows_of_steps(b.labels))[b.segments.offsets[:-1]]


Loop = Callable[[Rollouts], Tensor]
LOOPS: dict[str, Loop] = {
    "grpo/verl": lambda b: by_mean(b.scores, b.labels),
    "dr_grpo/verl": lambda b: by_mean(b.scores, b.labels, std=False),
    "rloo/verl": lambda b: by_others(b.scores, b.labels),
    "opo/verl": lambda b: by_length(b.scores, b.labels, b.lengths),
    "gpg/verl": lambda b: by_mean(b.scores, b.labels, std=False) * (len(b.labels) / b.scores.count_nonzero()),
    "passk/verl": lambda b: by_best(b.scores, b.labels),
}
STEP_LOOPS: dict[str, Loop] = {"grpo/verl-agent": over_steps, "gigpo/verl-agent": by_observation}


def estimated(name: str, b: Rollouts) -> Tensor:
    """Our advantages, `[B]` or `[S]`."""
    found = fa.estimate(name, **b.given(name)).advantages
    return found.values if isinstance(found, fa.SegmentTable) else found


def estimators() -> bool:
    """Every estimator of rollouts and turns at 1,024 prompts of 8 rollouts with up to 40 turns."""
    small, b = Rollouts.draw(groups=16), Rollouts.draw()
    for name, loop in (LOOPS | STEP_LOOPS).items():  # no number without the right answer
        torch.testing.assert_close(estimated(name, small), loop(small), rtol=1e-4, atol=1e-4)
    names = [name for name, e in fa.ESTIMATORS.items() if e.level in ("rollout", "turn")]
    ours = interleave({name: partial(estimated, name, b) for name in names})
    loops: dict[str, Timing] = {}
    for name, loop in (LOOPS | STEP_LOOPS).items():
        loops |= interleave({name: partial(loop, b)}, rounds=3, counted=1)
    lines: list[Line] = []
    for name in names:
        a_turn = name.startswith("gigpo")  # a number a turn, of which there are thirty times as many
        lines.append(against_floor(f"{name} / 5 ms", ours[name], MOST, None if a_turn else 1))
        if name in loops:
            lines.append(against_peer(f"{name} / the loop over rows", ours[name], loops[name], 5))
    timings = {name: vars(timing) for name, timing in (ours | {f"{n}, loop": t for n, t in loops.items()}).items()}
    title = (
        f"estimators, {GROUPS * SIZE:,} rollouts of {GROUPS:,} prompts, {b.segments.count:,} turns, given index objects"
    )
    return write("estimators", title, lines, {"timings": timings})
