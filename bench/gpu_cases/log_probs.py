"""Ops on log-probs and rewards."""

from __future__ import annotations

from functools import cache, partial

from torch import Tensor

import fastadv as fa
from bench import cuda_bytes, gpu_peers, peers
from bench.batches import PPO, rollouts
from bench.gpu_cases.case import (
    Case,
    Peer,
    Run,
    Work,
    copy_of,
    relative_error,
    with_gradient,
)


def policy_loss(device: str, rows: int, tokens: int) -> Work:
    """ppo with dual clip: loss, gradient and metrics, through autograd."""
    batch = {name: t.to(device) for name, t in rollouts(rows=rows, tokens=tokens).items()}
    count = batch["mask"].sum()
    inputs = [batch[name] for name in ("old_log_probs", "advantages", "mask")]
    step = partial(with_gradient, batch["log_probs"])

    def loss(backend: str, *given: Tensor) -> Tensor:
        return fa.policy_loss(*given, config=PPO, denominator=count, backend=backend).loss

    @cache
    def exact() -> Tensor:
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        gradient: Tensor = with_gradient(batch["log_probs"].double(), partial(loss, "reference"), *wide)()
        return gradient

    def compiled() -> Run:
        formula = gpu_peers.compiled(peers.formula)
        return step(lambda *given: formula(*given)[0], *inputs)

    others = (
        Peer("eager", lambda: step(lambda *given: peers.formula(*given)[0], *inputs)),
        Peer("torch.compile", compiled),
        Peer("verl compute_policy_loss_vanilla", lambda: step(peers.verl_vanilla(), *inputs)),
    )
    amount = cuda_bytes.policy_loss(batch["mask"].numel())
    return Work(
        lambda backend: step(partial(loss, backend), *inputs), others, amount, copy_of(amount, device),
        lambda found: relative_error(found, exact()),
    )  # fmt: skip


def turn_advantages(device: str, rows: int, tokens: int) -> Work:
    """Turn-reached advantages written out per token, from index objects."""
    batch = {name: t.to(device) for name, t in rollouts(rows=rows, tokens=tokens).items()}
    turn_ids = fa.turn_ids_from_mask(batch["mask"], backend="reference")
    index, groups = fa.segments(turn_ids, backend="reference"), fa.group_index(batch["groups"])

    def run(rewards: Tensor, backend: str) -> Tensor:
        return fa.turn_advantages(rewards, groups, index, backend=backend)

    def error(found: Tensor) -> float:
        return relative_error(found, run(batch["rewards"].double(), "reference"))

    others = (Peer("eager", lambda: partial(run, batch["rewards"], "reference")),)
    amount = cuda_bytes.turn_advantages(index.count, rows, groups.num_groups)
    amount += cuda_bytes.segment_tokens(batch["mask"].numel(), rows, index.count)
    return Work(lambda backend: partial(run, batch["rewards"], backend), others, amount, copy_of(amount, device), error)


BATCH = {"rows": 256, "tokens": 4_194_304}
CASES = (
    Case("policy loss, ppo", policy_loss, BATCH, {"rows": 3, "tokens": 3 * 900}, 1.25),
    Case("turn advantages", turn_advantages, BATCH, {"rows": 4, "tokens": 4 * 700}, 1.4),
)
