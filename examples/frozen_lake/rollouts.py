"""Rollouts: sampled from the policy, as a fastadv batch, and as a Miles debug dump."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import fastadv as fa
from examples.frozen_lake.environment import ENDINGS, OUTCOMES, TURN_TOKENS, Episode, decode
from examples.frozen_lake.policy import Sampler
from fastadv.testing import miles_sample


@dataclass(frozen=True)
class Rollout:
    """A finished episode."""

    map_id: int
    token_ids: list[int]  # TURN_TOKENS a turn, then the last action
    log_probs: list[float]  # one a turn, nats: of its action, under the policy that sampled it
    exit_status: str  # a key of OUTCOMES

    @property
    def prompt_ids(self) -> list[int]:
        """The first turn as the policy read it."""
        return self.token_ids[:TURN_TOKENS]

    @property
    def response_ids(self) -> list[int]:
        """The first action, the observation after it, the second action, ..., the last action."""
        return self.token_ids[TURN_TOKENS:]

    @property
    def mask(self) -> list[int]:
        """1 for each response token that the policy sampled, 0 for observations."""
        return [int(i % TURN_TOKENS == 0) for i in range(len(self.response_ids))]

    @property
    def outcome(self) -> fa.Outcome:
        """SOLVED, FAILED or BUDGET."""
        return OUTCOMES[self.exit_status]

    @property
    def reward(self) -> float:
        """1 at the goal, else 0."""
        return float(self.outcome == fa.Outcome.SOLVED)


def sample_rollouts(model: LlamaForCausalLM, map_ids: Sequence[int], generator: torch.Generator) -> list[Rollout]:
    """Runs one episode a map id to its end.

    Args:
        model: the policy.
        map_ids: the map of each rollout; a group is a map that is listed several times.
        generator: all randomness comes from it, that of the environment too.
    """
    seeds = torch.randint(2**31, (len(map_ids),), generator=generator).tolist()
    episodes = [Episode(map_id, seed) for map_id, seed in zip(map_ids, seeds, strict=True)]
    token_ids: list[list[int]] = [[] for _ in episodes]
    log_probs: list[list[float]] = [[] for _ in episodes]
    sampler = Sampler(model, generator)
    running = list(range(len(episodes)))
    while running:
        tokens, token_log_probs = sampler.sample(torch.tensor([episodes[i].block for i in running]))
        for i, token, log_prob in zip(running, tokens.tolist(), token_log_probs.tolist(), strict=True):
            token_ids[i] += episodes[i].block
            log_probs[i].append(log_prob)
            episodes[i].act(token)
            if episodes[i].exit_status is not None:
                token_ids[i].append(token)
        kept = [row for row, i in enumerate(running) if episodes[i].exit_status is None]
        sampler.keep(torch.tensor(kept, dtype=torch.int64))
        running = [running[row] for row in kept]
    return [
        Rollout(episode.map_id, ids, logged, str(episode.exit_status))
        for episode, ids, logged in zip(episodes, token_ids, log_probs, strict=True)
    ]


def to_batch(rollouts: Sequence[Rollout], *, first_id: int = 0) -> fa.Batch:
    """Rollouts as a packed batch, grouped by map.

    Args:
        rollouts: B finished episodes.
        first_id: row id of the first. Arms toss their coins by row id, so no two batches of a run may share one.
    """
    mask = torch.tensor([m for r in rollouts for m in r.mask], dtype=torch.bool)  # [N]
    log_probs = torch.tensor([log_prob for r in rollouts for log_prob in r.log_probs])  # [A]
    token_ids = torch.tensor([i for r in rollouts for i in r.token_ids], dtype=torch.int32)  # [M]
    return fa.Batch.of(
        mask=mask,
        cu_seqlens=_offsets([len(r.response_ids) for r in rollouts]),
        rewards=torch.tensor([r.reward for r in rollouts]),
        group_ids=[r.map_id for r in rollouts],
        outcomes=torch.tensor([r.outcome for r in rollouts]),
        row_ids=torch.arange(first_id, first_id + len(rollouts)),
        rollout_log_probs=torch.zeros(mask.shape).masked_scatter(mask, log_probs),
        token_ids=fa.TokenIds(token_ids, _offsets([len(r.token_ids) for r in rollouts])),
        endings=torch.tensor([ENDINGS[r.exit_status] for r in rollouts]),
    )


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)  # [B + 1]


def save_dump(rollouts: Sequence[Rollout], path: Path) -> None:
    """Writes rollouts as Miles' `--save-debug-rollout-data` does; opens with `torch.load(path, weights_only=True)`."""
    groups = {map_id: i for i, map_id in enumerate(dict.fromkeys(r.map_id for r in rollouts))}
    samples = [_sample(rollout, groups[rollout.map_id], index) for index, rollout in enumerate(rollouts)]
    torch.save({"rollout_id": 0, "samples": samples, "metadata": {}}, path)


def load_dump(path: Path) -> list[Rollout]:
    """The rollouts that `save_dump` wrote."""
    samples: list[dict[str, Any]] = torch.load(path, weights_only=True)["samples"]
    return [
        Rollout(
            map_id=sample["metadata"]["map_id"],
            token_ids=sample["tokens"],
            log_probs=[p for p, on in zip(sample["rollout_log_probs"], sample["loss_mask"], strict=True) if on],
            exit_status=sample["metadata"]["exit_status"],
        )
        for sample in samples
    ]


def _sample(rollout: Rollout, group_index: int, index: int) -> dict[str, Any]:
    log_probs = iter(rollout.log_probs)
    return miles_sample(
        group_index=group_index,
        index=index,
        prompt=" ".join(decode(rollout.prompt_ids)),
        response=" ".join(decode(rollout.response_ids)),
        prompt_ids=rollout.prompt_ids,
        response_ids=rollout.response_ids,
        loss_mask=rollout.mask,
        rollout_log_probs=[next(log_probs) if sampled else 0.0 for sampled in rollout.mask],
        reward=rollout.reward,
        status="truncated" if rollout.outcome == fa.Outcome.BUDGET else "completed",
        metadata={
            "instance_id": f"map {rollout.map_id}",
            "map_id": rollout.map_id,
            "exit_status": rollout.exit_status,
        },
    )
