"""Estimators as loops over fractions, written from their equations and from nothing of the library."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Form:
    """Conventions of an owner, as its code has them."""

    method: str
    ddof: int = 1
    eps: float = 0.0
    where: str = "none"  # where epsilon goes; "none": not divided by a standard deviation
    lone: str = "zero"  # a group with one voter: "zero" or "raw"
    survivors: bool = False  # filtered rollouts do not vote
    nan: bool = False  # a NaN reward is no reward


FORMS = {
    "grpo/verl": Form("mean", 1, 1e-6, "add", "raw"),
    "grpo/verl-vectorized": Form("mean", 1, 1e-6, "add", "raw"),
    "grpo/verl-vectorized-floor": Form("mean", 1, 1e-6, "floor", "raw"),
    "grpo/trl": Form("mean", 1, 1e-4, "add", nan=True),
    "grpo/trl-async": Form("mean", 0, 1e-8, "add", nan=True),
    "grpo/openrlhf": Form("mean", 1, 1e-9, "add"),
    "grpo/rllm": Form("mean", 0, 1e-6, "add", "raw", survivors=True),
    "grpo/nemo-rl": Form("nemo", 1, 1e-6, "positive", survivors=True),
    "grpo/skyrl": Form("mean", 1, 1e-6, "add", "raw"),
    "grpo/areal": Form("mean", 1, 1e-5, "add"),
    "grpo/roll": Form("mean", 1, 1e-6, "add"),
    "grpo/slime": Form("mean", 1, 1e-6, "add"),
    "grpo/miles": Form("mean", 1, 1e-6, "positive"),
    "grpo/prime-rl": Form("mean", survivors=True),
    "grpo/understand-r1-zero": Form("mean", 1, 1e-8, "add"),
    "grpo/verl-agent-trajectory": Form("mean", 1, 1e-6, "add", "raw"),
    "dr_grpo/verl": Form("mean", lone="raw"),
    "dr_grpo/understand-r1-zero": Form("mean"),
    "dr_grpo/trl": Form("mean", nan=True),
    "dr_grpo/openrlhf": Form("mean"),
    "rloo/verl": Form("loo", lone="raw"),
    "rloo/verl-vectorized": Form("loo"),
    "rloo/trl": Form("loo", nan=True),
    "rloo/openrlhf": Form("loo"),
    "rloo/rllm": Form("loo", lone="raw", survivors=True),
    "rloo/nemo-rl": Form("loo", survivors=True),
    "rloo/skyrl": Form("loo"),
    "rloo/fastadv": Form("loo"),
    "survivors/fastadv": Form("loo", survivors=True),
    "opo/verl": Form("length", lone="raw"),
    "gpg/verl": Form("gpg", lone="raw"),
    "maxrl/prime-rl": Form("maxrl where positive", survivors=True),
    "maxrl/skyrl": Form("maxrl", eps=1e-6, lone="raw"),
    "passk/verl": Form("passk", 1, 1e-6, "add"),
}


def mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def std(values: Sequence[Fraction], ddof: int) -> float:
    if len(values) <= ddof:
        return 0.0
    middle = mean(values)
    return math.sqrt(sum((x - middle) ** 2 for x in values) / (len(values) - ddof))


def divisor(spread: float, form: Form) -> float:
    """What the centred reward is divided by."""
    return {
        "none": 1.0,
        "add": spread + form.eps,
        "floor": math.sqrt(max(spread**2, form.eps)) + form.eps,
        "positive": spread + form.eps if spread > 0 else 1.0,
    }[form.where]


def rollouts(
    form: Form,
    rewards: Sequence[float],
    labels: Sequence[int],
    *,
    include: Sequence[bool] | None = None,
    present: Sequence[bool] | None = None,
    lengths: Sequence[int] | None = None,
) -> list[float]:
    """Advantages; `present` says which rollouts have a token at all."""
    count = len(rewards)
    keep = [True] * count if include is None else list(include)
    here = [True] * count if present is None else list(present)
    here = [h and not (form.nan and math.isnan(r)) for h, r in zip(here, rewards, strict=True)]
    votes = [h and (k or not form.survivors) for h, k in zip(here, keep, strict=True)]
    members: dict[int, list[int]] = defaultdict(list)
    for row, label in enumerate(labels):
        if votes[row] and (lengths is None or lengths[row] > 0):
            members[label].append(row)
    voting = sum(votes)
    scored = sum(v and r != 0 for v, r in zip(votes, rewards, strict=True))
    result = []
    for row, label in enumerate(labels):
        voters = members[label]
        if not (keep[row] and here[row]) or not voters:
            result.append(0.0)
        elif len(voters) == 1:
            alone = rewards[row] if form.lone == "raw" else 0.0
            result.append(alone * voting / max(scored, 1) if form.method == "gpg" else alone)
        else:
            result.append(float(_one(form, row, voters, rewards, lengths, Fraction(voting, max(scored, 1)))))
    return result


def _one(
    form: Form,
    row: int,
    voters: list[int],
    rewards: Sequence[float],
    lengths: Sequence[int] | None,
    alpha: Fraction,
) -> Fraction | float:
    own, values = Fraction(rewards[row]), [Fraction(rewards[v]) for v in voters]
    others = [Fraction(rewards[v]) for v in voters if v != row]
    if len(set(values)) == 1 and own == values[0]:
        return 0.0
    middle = mean(values)
    if form.method == "mean":
        return float(own - middle) / divisor(std(values, form.ddof), form)
    if form.method == "loo":
        return own - mean(others)
    if form.method == "nemo":
        return float(own - mean(others)) / divisor(std(others, form.ddof), form)
    if form.method == "length":
        return own - sum(lengths[v] * Fraction(rewards[v]) for v in voters) / sum(lengths[v] for v in voters)
    if form.method == "gpg":
        return alpha * (own - middle)
    if form.method == "maxrl":
        return float(own - middle) / (float(middle) + form.eps)
    if form.method == "maxrl where positive":
        return float(own - middle) / float(middle) if middle > 0 else 0.0
    assert form.method == "passk"
    best = sorted(values, reverse=True)
    return float(best[0] - best[1]) / divisor(std(values, form.ddof), form) if own == best[0] else 0.0


def step_rows(
    rewards: Sequence[float], labels: Sequence[int], turns: Sequence[int], *, scaled: bool, cross_steps: bool
) -> list[float]:
    """verl-agent's episode advantage of each rollout: statistics over its step rows, or one row a rollout."""
    rows: dict[int, list[Fraction]] = defaultdict(list)
    for reward, label, count in zip(rewards, labels, turns, strict=True):
        rows[label] += [Fraction(reward)] * (count if cross_steps else 1)
    return [
        _normed(Fraction(reward), rows[label], scaled, reward) for reward, label in zip(rewards, labels, strict=True)
    ]


def _normed(value: Fraction, values: Sequence[Fraction], scaled: bool, alone: float) -> float:
    if len(values) == 1:
        return alone
    return float(value - mean(values)) / (std(values, 1) + 1e-6 if scaled else 1.0)


def gigpo(
    rewards: Sequence[float],
    labels: Sequence[int],
    step_rewards: Sequence[Sequence[float]],
    anchors: Sequence[Sequence[object]],
    *,
    gamma: float,
    omega: float,
    scaled: bool,
    cross_steps: bool,
) -> list[float]:
    """Advantages of all turns, rollout after rollout."""
    turns = [len(steps) for steps in step_rewards]
    episode = step_rows(rewards, labels, turns, scaled=scaled, cross_steps=cross_steps)
    groups: dict[tuple[int, object], list[Fraction]] = defaultdict(list)
    returns = []
    for steps, label, states in zip(step_rewards, labels, anchors, strict=True):
        own = [
            sum((Fraction(gamma) ** (k - t) * Fraction(steps[k]) for k in range(t, len(steps))), Fraction(0))
            for t in range(len(steps))
        ]
        returns.append(own)
        for value, state in zip(own, states, strict=True):
            groups[label, state].append(value)
    return [
        episode[row] + omega * _normed(value, groups[label, state], scaled, 0.0)
        for row, (own, label, states) in enumerate(zip(returns, labels, anchors, strict=True))
        for value, state in zip(own, states, strict=True)
    ]
