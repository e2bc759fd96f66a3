"""Policy losses that verl calls by name: `fastadv_ppo`, `fastadv_gspo`, ... and `fastadv` with a preset.

A name of verl's with `fastadv_` before it reads the actor's keys as verl does; luspo reads the clips, and vespo none.
As in verl, sapo and geo_mean, and luspo too, have an aggregation of their own and do not read `actor.loss_agg_mode`.
What `policy_loss` sets of its own (`PolicyLossConfig`) wins over the actor's keys. `fastadv` takes all from the preset.

Divided is by what the trainer counted over the mini-batch and its ranks. seq-mean-token-sum-norm needs
`actor.loss_scale_factor`: verl's stand-in for it depends on the micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from fastadv.integrations.keys import key_error
from torch import Tensor

import fastadv as fa
from fastadv.losses import PRESETS, SELECTING_LOSSES, LossConfig

PolicyLoss = Callable[..., tuple[Tensor, dict[str, float]]]

ACTOR = "actor_rollout_ref.actor"
OWN = f"{ACTOR}.policy_loss"

# ---- verl's keys -----------------------------------------------------------------------------------------------------


def _number(config: Any, key: str, default: float, above: float, *, included: bool = False, at: str = ACTOR) -> float:
    """A key of verl's, or the default where it is missing or null."""
    value = config.get(key)
    value = default if value is None else value
    words = f"set a number {'of at least' if included else 'above'} {above:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise key_error(f"{at}.{key}", value, words)
    if not (value > above or (included and value == above)):
        raise key_error(f"{at}.{key}", value, words)
    return value


def _clips(config: Any) -> tuple[float, float]:
    both = _number(config, "clip_ratio", 0.2, 0.0, included=True)
    low, high = (_number(config, f"clip_ratio_{side}", both, 0.0, included=True) for side in ("low", "high"))
    return low, high


def _ratio_clips(config: Any) -> dict[str, float]:
    low, high = _clips(config)
    return {"clip_low": min(low, 1.0), "clip_high": high}  # no ratio is below 1 - 1


def _policy_loss(config: Any) -> Any:
    return config.get("policy_loss") or {}


def _ppo(config: Any) -> LossConfig:
    return PRESETS["ppo"].but(**_ratio_clips(config), dual_clip=_number(config, "clip_ratio_c", 3.0, 1.0))


def _gspo(config: Any) -> LossConfig:
    return PRESETS["gspo/verl"].but(**_ratio_clips(config))


def _cispo(config: Any) -> LossConfig:
    return PRESETS["cispo/verl"].but(**_ratio_clips(config))


def _sapo(config: Any) -> LossConfig:
    pos, neg = _number(config, "tau_pos", 1.0, 0.0), _number(config, "tau_neg", 1.05, 0.0)
    return LossConfig("sapo", tau_pos=pos, tau_neg=neg)


def _geo_mean(config: Any) -> LossConfig:
    low, high = _clips(config)
    return PRESETS["gmpo"].but(clip_low=low, clip_high=high)


def _clip_cov(config: Any) -> LossConfig:
    given = _policy_loss(config)
    return PRESETS["clip_cov"].but(
        **_ratio_clips(config), log_ratio_bound=80.0,  # verl cuts nothing
        cov_fraction=_number(given, "clip_cov_ratio", 0.0002, 0.0, at=OWN),
        cov_low=_number(given, "clip_cov_lb", 1.0, -math.inf, at=OWN),
        cov_high=_number(given, "clip_cov_ub", 5.0, -math.inf, at=OWN),
    )  # fmt: skip


def _kl_cov(config: Any) -> LossConfig:
    given = _policy_loss(config)
    return LossConfig(
        "kl_cov", log_ratio_bound=80.0, cov_fraction=_number(given, "kl_cov_ratio", 0.0002, 0.0, at=OWN),
        cov_kl_coef=_number(given, "ppo_kl_coef", 1.0, -math.inf, at=OWN),
        kl=fa.KL("abs", 0.0),  # to the old policy, at no weight: for the metric
    )  # fmt: skip


def _dppo(loss: str) -> Callable[[Any], LossConfig]:
    def read(config: Any) -> LossConfig:
        low, high = _clips(config)
        cap = _number(config, "clip_ratio_c", 20.0, 1.0, included=True)
        return LossConfig(loss, divergence_low=low, divergence_high=high, ratio_cap=cap)

    return read


def _dro(config: Any) -> LossConfig:
    beta = _number(_policy_loss(config), "dro_beta", 0.0, 0.0, at=OWN)  # verl has no default either
    if own_options(config):
        return LossConfig("dro", dro_beta=beta, log_ratio_bound=80.0)
    # The same with a kernel: reinforce, and half the squared log-ratio to the old policy as a penalty.
    return PRESETS["reinforce"].but(kl=fa.KL("k2", beta), log_ratio_bound=80.0)


def _preset(config: Any) -> LossConfig:
    name = _policy_loss(config).get("preset")
    if name not in PRESETS:
        how = f"; set {OWN}._target_=fastadv.integrations.verl.PolicyLossConfig to have the key" if name is None else ""
        raise key_error(f"{OWN}.preset", name, f"it must be one of {', '.join(PRESETS)}{how}")
    return PRESETS[name]


# ---- the losses ------------------------------------------------------------------------------------------------------

CLIP_FRACTION, KL, LOWER = "actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"
NEVER = ""  # verl reports a 0
_CLIPPED = {CLIP_FRACTION: "clip_fraction", KL: "approx_kl", LOWER: "dual_clip_fraction"}


@dataclass(frozen=True)
class NamedLoss:
    """A loss under verl's name.

    Attributes:
        read: a LossConfig from the actor's keys.
        metrics: verl's names of our metrics; NEVER for what is always 0.
        loss_agg_mode: the aggregation where it is part of the loss and `actor.loss_agg_mode` is not read.
    """

    read: Callable[[Any], LossConfig]
    metrics: Mapping[str, str]
    loss_agg_mode: str | None = None


NAMED: Mapping[str, NamedLoss] = MappingProxyType({
    "ppo": NamedLoss(_ppo, _CLIPPED),
    "gspo": NamedLoss(_gspo, _CLIPPED | {LOWER: NEVER}),
    "cispo": NamedLoss(_cispo, _CLIPPED | {LOWER: NEVER}),
    "sapo": NamedLoss(_sapo, {CLIP_FRACTION: NEVER, KL: "approx_kl", LOWER: NEVER}, "seq-mean-token-mean"),
    "gpg": NamedLoss(lambda config: PRESETS["gpg"], {}),
    "reinforce": NamedLoss(lambda config: PRESETS["reinforce"].but(log_ratio_bound=80.0), {KL: "approx_kl"}),
    "geo_mean": NamedLoss(_geo_mean, _CLIPPED, "seq-mean-token-mean"),
    "clip_cov": NamedLoss(_clip_cov, {CLIP_FRACTION: "dual_clip_fraction", KL: "approx_kl"}),
    "kl_cov": NamedLoss(_kl_cov, {KL: "kl"}),
    "dppo_tv": NamedLoss(_dppo("dppo_tv"), _CLIPPED),
    "dppo_kl": NamedLoss(_dppo("dppo_kl"), _CLIPPED),
    "dro": NamedLoss(_dro, {KL: "approx_kl"}),
    "luspo": NamedLoss(lambda c: PRESETS["luspo"].but(**_ratio_clips(c)), _CLIPPED, "seq-mean-token-sum"),
    "vespo": NamedLoss(lambda config: PRESETS["vespo"], {KL: "approx_kl"}),
})  # fmt: skip
PRESET = NamedLoss(_preset, _CLIPPED)
# By the names of `actor.policy_loss.loss_mode`.
LOSS_MODES = MappingProxyType({"fastadv": PRESET} | {f"fastadv_{name}": named for name, named in NAMED.items()})
# Of options that verl does not know, reported where they are on.
OPTION_METRICS = ("sequence_mask_fraction", "is_weight_mean", "is_row_rejected_fraction", "is_veto_fraction")


def own_options(config: Any) -> dict[str, Any]:
    """What `policy_loss` sets beyond verl's keys; nothing where it is verl's own class."""
    policy_loss = config.get("policy_loss")
    options = getattr(policy_loss, "loss_options", None)
    return {} if options is None else options()


def loss_config(named: NamedLoss, config: Any, loss_agg_mode: str) -> LossConfig:
    """The configuration of a loss, from the actor's keys and what `policy_loss` sets of its own."""
    try:
        read = named.read(config)
        if named is not PRESET:
            preset = _policy_loss(config).get("preset")
            if preset is not None:
                raise key_error(f"{OWN}.preset", preset, "only loss_mode fastadv reads it")
            read = read.but(loss_agg_mode=named.loss_agg_mode or loss_agg_mode)
        return read.but(**own_options(config))
    except (TypeError, ValueError) as error:
        if "LossConfig: " not in str(error):
            raise
        raise ValueError(f"{OWN}: {str(error).removeprefix('LossConfig: ')}") from error


def step_denominators(
    config: LossConfig, info: Mapping[str, Any], width: int | None = None
) -> tuple[LossConfig, fa.Denominators | None]:
    """The divisor of a mini-batch, from what verl counted over it and its ranks; None: counted in this call.

    Args:
        config: whose `loss_agg_mode` and `denominator` say what is divided by.
        info: verl's `global_batch_info`.
        width: the constant length where `loss_scale_factor` is not set; None: it has to be.
    """
    ranks = info.get("dp_size") or 1
    counts = {"tokens": info.get("batch_num_tokens"), "sequences": info.get("global_batch_size")}
    name = config.denominator_name
    count = 1.0 if name == "one" else counts["tokens" if name == "tokens" else "sequences"]
    if config.loss_agg_mode == "seq-mean-token-sum-norm":
        horizon = info.get("loss_scale_factor")
        horizon = width if horizon is None else horizon
        if horizon is None:
            raise key_error(
                f"{ACTOR}.loss_scale_factor", None,
                "loss_agg_mode seq-mean-token-sum-norm divides by it; without it the loss depends on the longest "
                "response of each micro-batch: set a constant length in tokens",
            )  # fmt: skip
        config = config.but(horizon=float(horizon))
    if count is None:
        if ranks > 1:
            missing = "batch_num_tokens" if name == "tokens" else "global_batch_size"
            raise key_error(
                f"global_batch_info.{missing}", None,
                f"with dp_size {ranks} loss_agg_mode {config.loss_agg_mode} needs the count of all ranks",
            )  # fmt: skip
        return config, None
    return config, fa.Denominators(count, count, count, ranks=ranks)


def padded(name: str, values: Tensor, like: Tensor) -> Tensor:
    """A field of the micro-batch, in the shape of the log-probs."""
    if values.is_nested:
        values = values.to_padded_tensor(0.0, output_size=like.shape)
    if values.shape != like.shape:
        raise key_error(
            name, f"of shape {list(values.shape)}", f"log_prob has {list(like.shape)}: pad both to one response length"
        )
    return values


def _row_weights(is_weights: Tensor, mask: Tensor) -> Tensor:
    """verl's importance weight of a whole rollout: the geometric mean over its tokens, `[B]`."""
    on = mask != 0
    logs = torch.where(on, is_weights.double() + 1e-10, 1.0).log()
    return (logs.sum(-1) / on.sum(-1).clamp(min=1)).exp()


def compute(
    named: NamedLoss,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None,
    width: int | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """A loss as verl calls it, and its metrics as numbers: one copy to the host for all of them."""
    if config is None:
        raise key_error("config", None, "a policy loss needs the actor's")
    settings = loss_config(named, config, loss_agg_mode)
    settings, denominator = step_denominators(settings, config.get("global_batch_info") or {}, width)
    old, values = padded("old_log_prob", old_log_prob, log_prob), padded("advantages", advantages, log_prob)
    mask = padded("response_mask", response_mask, log_prob)
    given: dict[str, Any] = {}
    if settings.kl is not None:
        given["ref_log_probs"] = old
    if rollout_is_weights is not None:
        weights = padded("rollout_is_weights", rollout_is_weights, log_prob)
        penalised = settings.kl is not None and settings.kl.coef != 0  # dro: the weight is of both terms
        if settings.loss == "gmpo":
            given["weights"] = _row_weights(weights, mask)
        else:
            given["weights" if penalised else "is_weights"] = weights
    if settings.corrections:
        given["rollout_log_probs"] = old
    if settings.loss in SELECTING_LOSSES:
        # Of this micro-batch, as in verl: the loss is not shown the rest of the step. The coin is torch's.
        settings = settings.but(seed=int(torch.randint(2**31, ()))) if settings.loss == "clip_cov" else settings
        given["selected"] = fa.covariance_selection(log_prob.detach(), old, values, mask, config=settings)
    loss, metrics = fa.policy_loss(
        log_prob, None if settings.corrections else old, values, mask, config=settings, denominator=denominator,
        **given,
    )  # fmt: skip
    return loss, _numbers(named, settings, metrics)


def _numbers(named: NamedLoss, settings: LossConfig, metrics: Mapping[str, Tensor]) -> dict[str, float]:
    names = {theirs: ours for theirs, ours in named.metrics.items() if ours in metrics}
    if settings.corrections or settings.sequence_mask is not None:
        names |= {f"actor/{name}": name for name in OPTION_METRICS if name in metrics}
    zeros = {theirs: 0.0 for theirs, ours in named.metrics.items() if ours == NEVER}
    if not names:
        return zeros
    # verl reads each number as soon as it gets it: a tensor each would be a wait each.
    values = torch.stack([metrics[ours] for ours in names.values()]).tolist()
    return zeros | dict(zip(names, values, strict=True))


def as_verl_calls(
    name: str, named: NamedLoss, *, loss_agg_mode: str = "token-mean", local_width: bool = False
) -> PolicyLoss:
    """A loss with verl's signature and a default mode; `local_width`: `actor.loss_scale_factor` may be missing."""
    default = loss_agg_mode

    def policy_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = default,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        width = log_prob.shape[-1] if local_width else None
        return compute(
            named, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, width
        )

    policy_loss.__name__ = policy_loss.__qualname__ = name
    policy_loss.__doc__ = f"The policy loss {name!r} as verl calls it: (loss, metrics)."
    return policy_loss


POLICY_LOSSES = MappingProxyType({mode: as_verl_calls(mode, named) for mode, named in LOSS_MODES.items()})
