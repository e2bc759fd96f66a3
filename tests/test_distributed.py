"""Denominators over data-parallel ranks and micro-batches, with real processes on gloo."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import worlds
from torch import Tensor

import fastadv as fa
from fastadv.losses import AGGREGATIONS, PRESETS

WIDTH = 9
# Rollouts of each rank: the second rank has none, the third none with a valid token.
ROLLOUTS = (3, 0, 1, 4)
CORRECTED = (fa.Correction("tis", high=1.1), fa.Correction("mis", "geometric", 0.7, 1.3))
CONFIGS = {mode: fa.LossConfig("ppo", 0.1, 0.1, loss_agg_mode=mode, horizon=7.0) for mode in AGGREGATIONS}
CONFIGS |= {
    "candidates": PRESETS["grpo"],
    "gspo": PRESETS["gspo/verl"].but(clip_low=0.05, clip_high=0.05),
    "reinforce": PRESETS["reinforce"],
    "sapo": PRESETS["sapo"],
    "gmpo": PRESETS["gmpo"].but(clip_low=0.05, clip_high=0.05),
    "gspo, mean": PRESETS["luspo"].but(clip_low=0.05, clip_high=0.05),
    "everything": fa.LossConfig("cispo", correction=CORRECTED, kl=fa.KL("k3", 0.3), entropy_coef=0.2),
}


def rollouts(rank: int) -> dict[str, Tensor]:
    """What a rank holds, float64."""
    g = torch.Generator().manual_seed(rank)
    shape = (ROLLOUTS[rank], WIDTH)
    mask = torch.rand(shape, generator=g) < 0.7
    if rank == 2:
        mask[:] = False
    names = ("x", "old", "ref", "rollout", "entropy", "advantages")
    values = {name: torch.rand(shape, generator=g, dtype=torch.float64) for name in names}
    values["rollout"] = values["old"] + 0.3 * (values["rollout"] - 0.5)
    return {**values, "mask": mask, "weights": torch.rand(shape[0], generator=g, dtype=torch.float64)}


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def loss_of(
    config: fa.LossConfig, b: dict[str, Tensor], theta: Tensor, step: Any, dtype: torch.dtype, **given: Any
) -> Tensor:
    """The loss of a policy with one parameter."""
    x, old, ref, rollout, entropy, advantages, weights = (
        b[name].to(dtype) for name in ("x", "old", "ref", "rollout", "entropy", "advantages", "weights")
    )
    return fa.policy_loss(
        theta * x, old, advantages - 0.4, b["mask"], config=config, denominator=step, weights=weights,
        rollout_log_probs=rollout if config.corrections else None, ref_log_probs=ref if config.kl else None,
        entropy=theta * entropy if config.entropy_coef else None, **given,
    ).loss  # fmt: skip


# Of parts of rollouts: "mean" gradients and gmpo need whole ones.
BY_PARTS = [name for name, config in CONFIGS.items() if config.sequence_gradient != "mean" and config.loss != "gmpo"]


def reduced(ratios: fa.SequenceLogRatios, group: Any) -> fa.SequenceLogRatios:
    """Log-ratios of whole rollouts from those of their parts."""
    for field in ("sum", "tokens", "missing"):
        dist.all_reduce(getattr(ratios, field), group=group)
    dist.all_reduce(ratios.minimum, op=dist.ReduceOp.MIN, group=group)
    return ratios


def by_parts(rank: int) -> dict[str, Tensor]:
    """Two ranks across rollouts times two along them: averaged loss and gradient of each configuration."""
    context = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    columns = slice(0, 5) if rank % 2 == 0 else slice(5, WIDTH)
    whole = joined([rollouts(2 * (rank // 2)), rollouts(2 * (rank // 2) + 1)])
    mine = {key: value if key == "weights" else value[:, columns] for key, value in whole.items()}
    step = fa.denominators(mine["mask"], process_group=data, context_group=context)
    results = {"counts": torch.stack([step.tokens, step.sequences, step.candidates]), "ranks": step.ranks}
    tokens = fa.token_counts(mine["mask"])
    dist.all_reduce(tokens, group=context)
    for name in BY_PARTS:
        config, theta = CONFIGS[name], torch.tensor(1.1, requires_grad=True)
        old, mask = mine["old"].float(), mine["mask"]
        given: dict[str, Any] = {}
        if config.loss == "gspo":
            ratios = fa.sequence_log_ratios((theta * mine["x"].float()).detach(), old, mask)
            given["sequence_log_ratios"] = reduced(ratios, context)
        if config.corrections:
            ratios = fa.sequence_log_ratios(old, mine["rollout"].float(), mask, missing="skip")
            given["rollout_log_ratios"] = reduced(ratios, context)
        if config.loss_agg_mode == "seq-mean-token-mean":
            given["row_tokens"] = tokens
        loss = loss_of(config, mine, theta, step, torch.float32, **given)
        loss.backward()
        averaged = torch.stack([loss.detach().double(), theta.grad.double()]) / 4
        dist.all_reduce(averaged)
        results[name] = averaged
    return results


def run_rank(rank: int, *, world: int) -> dict[str, Any]:
    mine = joined([rollouts(r) for r in range(rank, 4, world)])  # fewer ranks hold the same rollouts
    step = fa.denominators(mine["mask"], process_group=dist.group.WORLD)
    results: dict[str, Any] = {
        "counts": torch.stack([step.tokens, step.sequences, step.candidates]),
        "ranks": step.ranks,
    }
    for name, config in CONFIGS.items():
        theta = torch.tensor(1.1, requires_grad=True)
        total = torch.zeros((), dtype=torch.float64)
        for row in range(0, max(1, mine["x"].shape[0]), 2):  # micro-batches; a rank without rollouts joins in with one
            part = {key: value[row : row + 2] for key, value in mine.items()}
            loss = loss_of(config, part, theta, step, torch.float32)
            loss.backward()
            total += loss.detach()
        averaged = torch.stack([total, theta.grad.double()]) / world  # as a data-parallel trainer averages
        dist.all_reduce(averaged)
        results[name] = averaged
    if world == 4:
        results["parts"] = by_parts(rank)
    return results


def test_one_rank_equals_two_equals_four() -> None:
    results = {world: worlds.run(partial(run_rank, world=world), world) for world in (1, 2, 4)}
    parts = [result["parts"] for result in results[4]]
    whole = joined([rollouts(r) for r in range(4)])
    local = fa.denominators(whole["mask"])
    exact = {}
    for name, config in CONFIGS.items():
        theta = torch.tensor(1.1, dtype=torch.float64, requires_grad=True)
        loss = loss_of(config, whole, theta, None, torch.float64)
        loss.backward()
        exact[name] = torch.stack([loss.detach(), theta.grad])
        assert theta.grad.abs() > 1e-3, name
    for world, ranks in results.items():
        for result in ranks:
            assert result["counts"].tolist() == [float(local.tokens), float(local.sequences), float(local.candidates)]
            assert result["ranks"] == world
            for name, expected in exact.items():
                torch.testing.assert_close(
                    result[name], expected, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
    for result in parts:  # rollouts that are split over ranks count once
        assert result["counts"].tolist() == [float(local.tokens), float(local.sequences), float(local.candidates)]
        assert result["ranks"] == 4
        for name in BY_PARTS:
            torch.testing.assert_close(
                result[name], exact[name], rtol=1e-6, atol=1e-6, msg=f"{name}, parts of rollouts"
            )
