"""The policy losses as the contract suite sees them: a line each in LOSS_CASES."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from draws import Case, Draw, Inputs, Outputs, float64
from torch import Tensor

import fastadv as fa
from fastadv.losses import PRESETS
from fastadv.rows import Rows

EXTRA = {
    "row weights": "weights",
    "token weights": "weights",
    "is_weights": "is_weights",
    "rollout": "rollout_log_probs",
    "ref": "ref_log_probs",
    "entropy": "entropy",
}
STOPS_GRADIENT = ("cispo", "vespo", "dppo_tv", "dppo_kl")


def settled(config: fa.LossConfig, inputs: Inputs) -> Inputs:
    """Old, sampler's and reference's log-probs moved to a ratio of 1 wherever a decision is close."""
    log_probs, old = inputs["log_probs"].double(), inputs["old_log_probs"].double()
    close = _close_to_edges(config, log_probs - old, inputs)
    old = inputs["old_log_probs"] = torch.where(close, inputs["log_probs"], inputs["old_log_probs"])
    if config.sequence_mask is not None:  # of old log-probs; a whole rollout moves
        gap = spread(old.double() - log_probs, inputs, "mean", old)
        close = near(gap, [config.sequence_mask.delta])
        old = inputs["old_log_probs"] = torch.where(close, inputs["log_probs"], old)
    if "rollout_log_probs" in inputs:
        rollout = inputs["rollout_log_probs"]
        close = torch.zeros_like(old, dtype=torch.bool)
        log_ratio = old.double() - rollout.double()
        for c in config.corrections:
            per_row = {"token": None, "sequence": "sum", "geometric": "mean"}[c.level]
            values = log_ratio if per_row is None else spread(log_ratio.nan_to_num(0.0), inputs, per_row, rollout)
            edges = [math.log(x) for x in (c.low, c.high) if x > 0]
            close |= near(values, edges)
            if c.veto is not None:
                close |= near(log_ratio, [math.log(c.veto)])
        inputs["rollout_log_probs"] = torch.where(close & ~rollout.isnan(), old.to(rollout.dtype), rollout)
    if "ref_log_probs" in inputs:
        ref = inputs["ref_log_probs"]
        close = near(log_probs - ref.double(), [0.0, -math.log(10.0), -2.6, 20.0, -20.0])
        inputs["ref_log_probs"] = torch.where(close, (log_probs - 0.5).to(ref.dtype), ref)
    return inputs


def _close_to_edges(config: fa.LossConfig, log_ratio: Tensor, inputs: Inputs) -> Tensor:
    if config.loss == "gspo":
        log_ratio = spread(log_ratio, inputs, "mean", log_ratio)
    edges = [config.log_ratio_bound, -config.log_ratio_bound]
    if config.loss in ("dppo_tv", "dppo_kl"):
        edges += [] if config.ratio_cap is None else [math.log(config.ratio_cap)]
        p, q = (inputs[name].double().exp() for name in ("log_probs", "old_log_probs"))
        rest = ((1 - q).clamp(min=0) + 1e-8) / ((1 - p).clamp(min=0) + 1e-8)
        binary_kl = -q * log_ratio + (1 - q) * rest.log()
        divergence = (p - q).abs() if config.loss == "dppo_tv" else binary_kl
        return near(log_ratio, edges) | near(divergence, [config.divergence_low, config.divergence_high])
    if config.loss == "gmpo":
        edges += [-config.clip_low, config.clip_high]
    else:
        edges += [math.log(1 - config.clip_low)] if config.clip_low < 1 else []
        edges += [math.log(x) for x in (1 + config.clip_high, config.dual_clip, config.delta) if x is not None]
    return near(log_ratio, edges)


def near(values: Tensor, edges: list[float]) -> Tensor:
    """Where a value is within 1e-3 of an edge."""
    return torch.stack([(values - edge).abs() < 1e-3 for edge in edges]).any(0)


def spread(values: Tensor, inputs: Inputs, how: str, present: Tensor) -> Tensor:
    """Sum or mean over each rollout's tokens that count, at each of its tokens."""
    on = inputs["mask"] & ~present.isnan()
    weights = inputs.get("weights")
    if weights is not None and weights.shape == on.shape:
        on = on & (weights != 0)
    rows = Rows.of("spread", "mask", on, inputs["cu_seqlens"])
    total = rows.sum(torch.where(on, values, 0.0))
    if how == "mean":
        total = total / rows.sum(on.double()).clamp(min=1)
    return rows.spread(total)


def make_policy_loss(config: fa.LossConfig, advantages: str, extra: tuple[str, ...] = ()) -> Callable[[Draw], Inputs]:
    def make(d: Draw) -> Inputs:
        log_probs = -3 * d.uniform(*d.tokens)
        by_kind = {
            "token": lambda: d.normal(*d.tokens),
            "row": lambda: d.normal(d.rows),
            "segment": lambda: fa.SegmentTable(d.normal(d.segments().count), d.segments()),
        }
        # A ratio of e^10 times a KL value near 0 would multiply that value's rounding.
        most = 1.5 if config.kl is not None and config.kl.gradient == "unbiased" else 12
        inputs = {
            "log_probs": log_probs,
            "old_log_probs": log_probs + d.normal(*d.tokens) * d.uniform(*d.tokens) ** 4 * most,
            "advantages": by_kind[advantages](),
            "mask": d.mask,
            "cu_seqlens": d.cu_seqlens,
        }
        if "row weights" in extra:
            inputs["weights"] = d.uniform(d.rows) * (d.uniform(d.rows) < 0.8)
            inputs["weights"][:1] = 0
        if "token weights" in extra:
            inputs["weights"] = d.normal(*d.tokens) * (d.uniform(*d.tokens) < 0.8)
        if "is_weights" in extra:
            inputs["is_weights"] = d.uniform(*d.tokens) * (d.uniform(*d.tokens) < 0.8)
        if "rollout" in extra:
            rollout = inputs["old_log_probs"] + 0.3 * d.normal(*d.tokens)
            inputs["rollout_log_probs"] = torch.where(d.uniform(*d.tokens) < 0.1, torch.nan, rollout)
        if "ref" in extra:
            inputs["ref_log_probs"] = log_probs + d.normal(*d.tokens)
        if "entropy" in extra:
            inputs["entropy"] = 2 * d.uniform(*d.tokens)
        return settled(config, inputs)

    return make


def weightless(inputs: Inputs) -> Tensor:
    return inputs["weights"] == 0


def policy_loss(config: fa.LossConfig, reduction: str = "loss") -> Callable[..., Outputs]:
    def call(backend: str, **inputs: Any) -> Outputs:
        out = fa.policy_loss(**inputs, config=config, reduction=reduction, backend=backend)
        return {"loss": out.loss, **out.metrics}

    return call


def magnitude(config: fa.LossConfig) -> Callable[[Inputs], float]:
    """The loss with each token's loss taken absolute: reinforce with log-probs of 1 is minus the sum of advantages."""

    def absolute(inputs: Inputs) -> float:
        exact = {name: float64(value) for name, value in inputs.items()}
        losses = fa.policy_loss(**exact, config=config, reduction="none").loss.abs()
        as_sum = fa.LossConfig(
            "reinforce", loss_agg_mode=config.loss_agg_mode, horizon=config.horizon, denominator=config.denominator
        )
        ones, mask, cu_seqlens = torch.ones_like(losses), inputs["mask"], inputs["cu_seqlens"]
        return -float(fa.policy_loss(ones, None, losses, mask, config=as_sum, cu_seqlens=cu_seqlens).loss)

    return absolute


def case(name: str, config: fa.LossConfig, advantages: str, *extra: str, reduction: str = "loss") -> Case:
    token_inputs = ["log_probs", "old_log_probs"] + ["advantages"] * (advantages == "token")
    token_inputs += [EXTRA[name] for name in extra if name != "row weights"]
    stops = config.loss in STOPS_GRADIENT or (config.kl is not None and config.kl.gradient == "straight-through")
    stops |= config.loss == "gspo" and config.sequence_gradient == "straight-through"
    per_row = advantages == "row" and "row weights" in extra
    return Case(
        f"policy_loss[{name}]",
        make_policy_loss(config, advantages, extra),
        policy_loss(config, reduction),
        token_inputs=tuple(token_inputs),
        row_inputs=("advantages",) if per_row else (),
        silent=weightless if per_row else None,
        gradient_of="log_probs",
        magnitude=magnitude(config) if reduction == "loss" else None,
        settle=lambda inputs: settled(config, inputs),
        stops_gradient=stops,
        # Products and powers of exponentials, and terms that cancel, multiply the inputs' rounding.
        tolerance=2e-6 if config.kl is None and config.loss != "vespo" else 1e-5,
    )


PPO = fa.LossConfig(clip_high=0.28)
GSPO = fa.LossConfig("gspo", 0.2, 0.3, log_ratio_bound=10.0, loss_agg_mode="seq-mean-token-mean")
TIS = fa.Correction("tis", low=0.5, high=1.5)
ICEPOP = fa.Correction("mis", low=0.7, high=1.4, missing="exclude")
LOSS_CASES = (
    case("ppo", PPO, "token"),
    case("ppo, rows", PPO.but(dual_clip=3.0, loss_agg_mode="seq-mean-token-mean"), "row", "row weights"),
    case("ppo, segments", PPO.but(loss_agg_mode="seq-mean-token-sum"), "segment"),
    case("ppo, none", PPO.but(dual_clip=3.0), "token", "token weights", "is_weights", reduction="none"),
    case("ppo, delta", PPO.but(delta=1.5), "token"),
    case("ppo, icepop, k3", PPO.but(correction=ICEPOP, kl=fa.KL("k3", 0.1)), "token", "rollout", "ref"),
    case(
        "ppo, sequence mis, unbiased k3",
        PPO.but(
            correction=(fa.Correction("mis", "sequence", 0.1, 8.0, veto=0.4), TIS), kl=fa.KL("k3", 0.1, "unbiased")
        ),
        "segment",
        "rollout",
        "ref",
        "row weights",
    ),
    case("reinforce", fa.LossConfig("reinforce", loss_agg_mode="token-sum"), "token", "is_weights"),
    case(
        "reinforce, segments",
        fa.LossConfig("reinforce", loss_agg_mode="seq-mean-token-sum-norm", horizon=40),
        "segment",
        "row weights",
    ),
    case("reinforce, tis", fa.LossConfig("reinforce", correction=TIS), "row", "rollout"),
    case("cispo", fa.LossConfig("cispo"), "token", "token weights"),
    case("cispo, entropy, k2", fa.LossConfig("cispo", kl=fa.KL("k2"), entropy_coef=0.01), "row", "ref", "entropy"),
    case(
        "sapo",
        PRESETS["sapo"].but(kl=fa.KL("low_var_kl", 0.05, "straight-through"), entropy_coef=-0.1),
        "token",
        "ref",
        "entropy",
        "token weights",
    ),
    case("gspo", GSPO, "row", "row weights"),
    case("gspo, tokens", GSPO.but(dual_clip=1.5), "token", "token weights", "is_weights"),
    case("gspo, mean", GSPO.but(sequence_gradient="mean", denominator="candidates"), "token", "is_weights"),
    case(
        "gspo, mean, k1, geometric",
        GSPO.but(
            sequence_gradient="mean",
            loss_agg_mode="seq-mean-token-sum",
            correction=fa.Correction("reject", "geometric", 0.9, 1.1, missing="exclude"),
            kl=fa.KL("k1", 0.3),
        ),
        "segment",
        "rollout",
        "ref",
    ),
)
# Without a kernel: the contracts hold on the reference.
LOSSES_WITHOUT_KERNEL = (
    case("vespo", fa.LossConfig("vespo"), "row", "is_weights"),
    case("gmpo", PRESETS["gmpo"], "row", "row weights"),
    case("clip_cov", fa.LossConfig("clip_cov", cov_fraction=0.1, cov_low=0.1), "token"),
    case("kl_cov", fa.LossConfig("kl_cov", cov_fraction=0.1), "token"),
    case("dppo_tv", fa.LossConfig("dppo_tv", divergence_low=0.1, ratio_cap=2.0), "token", "token weights"),
    case("dppo_kl", fa.LossConfig("dppo_kl", divergence_high=0.05, loss_agg_mode="seq-mean-token-sum"), "segment"),
    case("ipo", PRESETS["ipo/prime-rl"].but(ratio_cap=1.5, kl=fa.KL("k2", 0.01)), "row", "ref", "row weights"),
    case("dro", fa.LossConfig("dro", dro_beta=0.3), "token", "is_weights"),
    case(
        "ppo, sequence mask",
        PPO.but(sequence_mask=fa.SequenceMask(0.05, "token"), kl=fa.KL("k3", 0.1), correction=TIS),
        "token",
        "rollout",
        "ref",
    ),
    case("gspo, sequence mask", GSPO.but(sequence_mask=fa.SequenceMask(0.02)), "segment", "row weights"),
    case("cispo, sequence mask", fa.LossConfig("cispo", sequence_mask=fa.SequenceMask(0.05)), "row", "row weights"),
)
