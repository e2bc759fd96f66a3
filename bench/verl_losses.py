"""verl's policy losses as its workers call them, metrics included, beside ours under verl's names: one thread."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bench.batches import TOKENS, rollouts
from bench.harness import Line, against_peer, interleave, write

BAR = 15.0  # of vanilla; the others have none
# verl's name: ours. Those that run on the reference are here too: what a user of them gains or loses.
LOSSES = {
    "vanilla": "fastadv_ppo", "gspo": "fastadv_gspo", "cispo": "fastadv_cispo", "sapo": "fastadv_sapo",
    "gpg": "fastadv_gpg", "geo_mean": "fastadv_geo_mean", "clip_cov": "fastadv_clip_cov", "kl_cov": "fastadv_kl_cov",
    "dppo_tv": "fastadv_dppo_tv", "dppo_kl": "fastadv_dppo_kl", "dro": "fastadv_dro",
}  # fmt: skip

Run = Callable[[], Tensor]


def _step(loss: Callable[..., Tensor], b: dict[str, Tensor]) -> Run:
    leaf = b["log_probs"].clone().requires_grad_()

    def run() -> Tensor:
        leaf.grad = None
        loss(leaf).backward()
        assert leaf.grad is not None
        return leaf.grad

    return run


def _policy_loss(function: Any, config: Any, b: dict[str, Tensor]) -> Run:
    def loss(leaf: Tensor) -> Tensor:
        value: Tensor = function(
            old_log_prob=b["old_log_probs"], log_prob=leaf, advantages=b["advantages"], response_mask=b["mask"],
            loss_agg_mode="token-mean", config=config, rollout_is_weights=None,
        )[0]  # fmt: skip
        return value

    return _step(loss, b)


def _value_loss(core: Any, b: dict[str, Tensor]) -> Run:
    def loss(leaf: Tensor) -> Tensor:
        value: Tensor = core.compute_value_loss(
            vpreds=leaf, returns=b["advantages"], values=b["old_log_probs"], response_mask=b["mask"],
            cliprange_value=0.2,
        )[0]  # fmt: skip
        return value

    return _step(loss, b)


def _penalty(core: Any, b: dict[str, Tensor]) -> Run:
    """What `ppo_loss` adds with use_kl_loss, by either's functions."""

    def loss(leaf: Tensor) -> Tensor:
        value: Tensor = core.agg_loss(
            core.kl_penalty(leaf, b["ref_log_probs"], "low_var_kl"), b["mask"], "token-mean",
            batch_num_tokens=int(b["mask"].sum()),
        )  # fmt: skip
        return value

    return _step(loss, b)


def verl_losses() -> bool:
    """Loss, backward and metrics of a padded float32 micro-batch with a bool mask, by verl and by us."""
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(dro_beta=0.1)
    )
    lines: list[Line] = []
    details: dict[str, object] = {}
    try:
        _agree(_pairs(rollouts(rows=8, tokens=8 * 2048), config))
        for name, (ours, verls) in _pairs(rollouts(), config).items():
            t = interleave({"ours": ours, "verl": verls}, rounds=4, counted=2)
            lines.append(against_peer(f"{name} / verl's", t["ours"], t["verl"], BAR if name == "vanilla" else None))
            details[name] = {who: vars(timing) for who, timing in t.items()}
        title = f"verl's losses with backward and metrics, {TOKENS:,} tokens, float32, bool mask, one thread"
        return write("verl_losses", title, lines, {"timings": details})
    finally:
        torch.set_num_threads(threads)


def _pairs(b: dict[str, Tensor], config: Any) -> dict[str, tuple[Run, Run]]:
    b = b | {"old_log_probs": b["old_log_probs"].clamp(max=-1e-3)}  # a probability above 1 has no binary KL
    core_algos = import_module("verl.trainer.ppo.core_algos")
    losses = import_module("fastadv.integrations.verl.policy_losses").POLICY_LOSSES
    functions = import_module("fastadv.integrations.verl.loss_functions")
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(b["mask"].sum()), global_batch_size=len(b["mask"]))
    steps = {
        name: (
            _policy_loss(losses[ours], config, b),
            _policy_loss(core_algos.get_policy_loss_fn(name), config, b),
        )
        for name, ours in LOSSES.items()
    }
    return steps | {
        "kl_penalty and agg_loss": (_penalty(functions, b), _penalty(core_algos, b)),
        "compute_value_loss": (_value_loss(functions, b), _value_loss(core_algos, b)),
    }


def _agree(steps: dict[str, tuple[Run, Run]]) -> None:
    """No number without the right answer. The tokens that clip_cov picks are a matter of coins."""
    for name, (ours, verls) in steps.items():
        a, b = ours(), verls()
        different = (a - b).abs() > 1e-4 * b.abs() + 1e-9
        assert int(different.sum()) <= 10, f"{name}: {int(different.sum())} gradients differ"
