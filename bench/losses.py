"""The losses beside ppo: their time over ppo's, and over `torch.compile` of their formulas."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fastadv as fa
from bench.batches import PPO, TOKENS, raw_policy_loss, rollouts
from bench.harness import Line, against_floor, against_peer, interleave, write
from fastadv.losses import PRESETS

Batch = dict[str, Tensor]
Formula = Callable[[Batch, Tensor], Tensor]  # of a batch and the log-probs that gradients flow to


def _selected(b: Batch, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, log-ratios and advantages, 0 outside of the mask."""
    zero = torch.zeros((), dtype=log_probs.dtype)
    log_probs = torch.where(b["mask"], log_probs, zero)
    log_ratio = (log_probs - torch.where(b["mask"], b["old_log_probs"], zero)).clamp(-20, 20)
    return log_probs, log_ratio, torch.where(b["mask"], b["advantages"], zero)


def _surrogate(ratio: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def _token_mean(b: Batch, losses: Tensor) -> Tensor:
    return torch.where(b["mask"], losses, torch.zeros((), dtype=losses.dtype)).sum() / b["mask"].sum()


def _row_means(b: Batch, losses: Tensor) -> Tensor:
    sums = torch.where(b["mask"], losses, torch.zeros((), dtype=losses.dtype)).sum(-1)
    return (sums / b["mask"].sum(-1)).mean()


def reinforce(b: Batch, log_probs: Tensor) -> Tensor:
    """-A log_prob."""
    selected, _, advantages = _selected(b, log_probs)
    return _token_mean(b, -advantages * selected)


def cispo(b: Batch, log_probs: Tensor) -> Tensor:
    """-A sg(clip(r)) log_prob."""
    selected, log_ratio, advantages = _selected(b, log_probs)
    return _token_mean(b, -advantages * log_ratio.exp().clamp(0.8, 1.2).detach() * selected)


def sapo(b: Batch, log_probs: Tensor) -> Tensor:
    """-A sigmoid(tau (r - 1)) 4 / tau."""
    _, log_ratio, advantages = _selected(b, log_probs)
    tau = torch.where(advantages > 0, 1.0, 1.05)
    return _row_means(b, -advantages * torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4 / tau))


def ppo_tis(b: Batch, log_probs: Tensor) -> Tensor:
    """ppo, each token weighed by its ratio of old to sampler, at most 2."""
    _, log_ratio, advantages = _selected(b, log_probs)
    weight = (b["old_log_probs"] - b["rollout_log_probs"]).clamp(-20, 20).exp().clamp(max=2.0)
    return _token_mean(b, _surrogate(log_ratio.exp(), advantages) * weight)


def ppo_k3(b: Batch, log_probs: Tensor) -> Tensor:
    """ppo with a k3 penalty."""
    selected, log_ratio, advantages = _selected(b, log_probs)
    back = torch.where(b["mask"], b["ref_log_probs"] - selected, torch.zeros((), dtype=selected.dtype))
    return _token_mean(b, _surrogate(log_ratio.exp(), advantages) + 0.01 * (back.exp() - back - 1))


def gspo_verl(b: Batch, log_probs: Tensor) -> Tensor:
    """The surrogate of a rollout's ratio, straight through."""
    selected, log_ratio, advantages = _selected(b, log_probs)
    row = (log_ratio.sum(-1) / b["mask"].sum(-1)).detach()[:, None]
    ratio = (row + selected - selected.detach()).clamp(max=10).exp()
    return _row_means(b, _surrogate(ratio, advantages, 3e-4, 4e-4))


def gspo_trl(b: Batch, log_probs: Tensor) -> Tensor:
    """The surrogate of a rollout's ratio, through the mean."""
    _, log_ratio, advantages = _selected(b, log_probs)
    ratio = (log_ratio.sum(-1) / b["mask"].sum(-1))[:, None].exp()
    return _row_means(b, _surrogate(ratio, advantages, 3e-4, 4e-4))


PLAIN = fa.LossConfig()
# The presets have a bar over ppo's time; what is added to ppo reads more and has none.
LOSSES: dict[str, tuple[fa.LossConfig, Formula, float | None]] = {
    "reinforce": (PRESETS["reinforce"], reinforce, 1.6),
    "cispo/verl": (PRESETS["cispo/verl"], cispo, 1.6),
    "sapo": (PRESETS["sapo"], sapo, 1.6),
    "ppo with TIS": (PLAIN.but(correction=fa.Correction("tis")), ppo_tis, None),
    "ppo with k3": (PLAIN.but(kl=fa.KL("k3", 0.01)), ppo_k3, None),
    "gspo/verl": (PRESETS["gspo/verl"], gspo_verl, 2.0),
    "gspo/trl": (PRESETS["gspo/trl"], gspo_trl, 2.0),
}


def losses() -> bool:
    """Every native preset at 4M tokens: raw op, beside the ppo op and the compiled formula with its backward."""
    batch = rollouts()
    steps: dict[str, Callable[[], object]] = {"ppo": raw_policy_loss(batch, PPO)}
    for name, (config, formula, _) in LOSSES.items():
        steps[name] = raw_policy_loss(batch, config)
        steps[f"{name}, compiled"] = _compiled(formula, batch)
        _agree(name, config, formula)
    t = interleave(steps)
    lines: list[Line] = []
    for name, (_, _, bar) in LOSSES.items():
        lines.append(against_floor(f"{name} / ppo", t[name], t["ppo"].p50, bar))
        lines.append(against_peer(f"{name} / torch.compile of its formula", t[name], t[f"{name}, compiled"], 1.8))
    return write(
        "losses", f"losses with gradient and metrics, {TOKENS:,} tokens, float32, raw op", lines,
        {"timings": {name: vars(timing) for name, timing in t.items()}},
    )  # fmt: skip


def _compiled(formula: Formula, batch: Batch) -> Callable[[], None]:
    compiled = torch.compile(formula)
    leaf = batch["log_probs"].clone().requires_grad_()

    def run() -> None:
        leaf.grad = None
        compiled(batch, leaf).backward()

    return run


def _agree(name: str, config: fa.LossConfig, formula: Formula) -> None:
    """No number without the right answer: a smaller batch gives the formula's loss and gradient."""
    b = rollouts(rows=8, tokens=8 * 4096)
    results = []
    for ours in (True, False):
        leaf = b["log_probs"].clone().requires_grad_()
        loss = (
            fa.policy_loss(
                leaf, b["old_log_probs"], b["advantages"], b["mask"], config=config,
                rollout_log_probs=b["rollout_log_probs"] if config.corrections else None,
                ref_log_probs=b["ref_log_probs"] if config.kl else None,
            ).loss
            if ours
            else formula(b, leaf)
        )  # fmt: skip
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")
    assert results[0][1] is not None
    assert results[1][1] is not None
    different = (results[0][1] - results[1][1]).abs() > 1e-4 * results[1][1].abs() + 1e-9
    assert int(different.sum()) <= 10, f"{name}: {int(different.sum())} gradients differ"
