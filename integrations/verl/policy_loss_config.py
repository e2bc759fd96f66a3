"""`actor.policy_loss` with keys of our own."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any

from fastadv.integrations.keys import key_error, made, made_all
from fastadv.integrations.verl.policy_losses import LOSS_MODES, OWN, loss_config
from verl.workers.config import PolicyLossConfig as VerlPolicyLossConfig

import fastadv as fa

UNSET = "unset"  # null is a value: dual_clip=null takes the bound away
# Keys that a loss of ours could have, but that verl hands to other places.
_ELSEWHERE = {
    "kl": "verl adds the penalty itself: use actor.use_kl_loss, actor.kl_loss_coef and actor.kl_loss_type",
    "entropy_coef": "verl adds entropy itself: use actor.entropy_coeff",
    "horizon": "use actor.loss_scale_factor",
    "denominator": "verl counts the denominators: choose loss_agg_mode",
    "seed": "the coins are drawn by torch's generator",
}


@dataclass
class PolicyLossConfig(VerlPolicyLossConfig):
    """verl's `policy_loss` and options of `fastadv.LossConfig`, for losses named `fastadv` or `fastadv_...`.

    In the yaml, or on the command line:
    `actor_rollout_ref.actor.policy_loss._target_=fastadv.integrations.verl.PolicyLossConfig`
    `+actor_rollout_ref.actor.policy_loss.delta=1.3`

    Attributes:
        preset: name of `fastadv.PRESETS`, for loss_mode "fastadv": its numbers and its loss_agg_mode.
        correction: a mapping of `fastadv.Correction`'s fields, or a list of them. verl does not hand the sampler's
            log-probs to a loss, so it is for "reinforce" in a trainer that runs in bypass mode, where the old log-probs
            are the sampler's; elsewhere use algorithm.rollout_correction.
        sequence_mask: a mapping of `fastadv.SequenceMask`'s fields.
        dual_clip, delta, ...: the field of `fastadv.LossConfig` of this name. "unset": what the preset says, or the
            key of the actor that the loss reads (clip_ratio_low for clip_low, clip_ratio_c for dual_clip, ...).
    """

    preset: str | None = None
    loss_agg_mode: Any = UNSET
    clip_low: Any = UNSET
    clip_high: Any = UNSET
    dual_clip: Any = UNSET
    delta: Any = UNSET
    log_ratio_bound: Any = UNSET
    tau_pos: Any = UNSET
    tau_neg: Any = UNSET
    sequence_gradient: Any = UNSET
    gamma_pos: Any = UNSET
    gamma_neg: Any = UNSET
    cov_fraction: Any = UNSET
    cov_low: Any = UNSET
    cov_high: Any = UNSET
    cov_kl_coef: Any = UNSET
    divergence_low: Any = UNSET
    divergence_high: Any = UNSET
    two_sided: Any = UNSET
    ratio_cap: Any = UNSET
    surrogate: Any = UNSET
    correction: Any = UNSET
    sequence_mask: Any = UNSET

    def __new__(cls, *args: Any, **keys: Any) -> PolicyLossConfig:
        """Explains a wrong key, which the class itself would only name."""
        valid = [f.name for f in fields(cls) if f.name != "_target_"]
        for key in sorted(keys.keys() - {"_target_", *valid}):
            raise key_error(f"{OWN}.{key}", keys[key], _ELSEWHERE.get(key) or _valid(key, valid))
        config: PolicyLossConfig = super().__new__(cls)
        return config

    def __post_init__(self) -> None:
        """Checks the keys of ours where the configuration is made, on the driver, not in the first step."""
        options = self.loss_options()
        named = LOSS_MODES.get(self.loss_mode)
        if named is None:  # a loss of verl, or of someone else
            if options or self.preset is not None:
                key = next(iter(options), "preset")
                raise key_error(f"{OWN}.loss_mode", self.loss_mode, f"{key} is a key of {', '.join(LOSS_MODES)}")
            return
        # The actor's clips are not known here; with none, what does not depend on them is checked.
        config = loss_config(named, {"policy_loss": self, "clip_ratio": 0.0}, "token-mean")
        if config.corrections and config.loss != "reinforce":
            raise key_error(
                f"{OWN}.correction", self.correction,
                f"verl hands no sampler log-probs to the {config.loss} loss; use algorithm.rollout_correction, whose "
                "weights every loss multiplies by",
            )  # fmt: skip
        if config.sequence_mask is not None and config.sequence_mask.log_probs == "rollout":
            raise key_error(f"{OWN}.sequence_mask.log_probs", "rollout", "verl hands a loss the old ones only; use old")

    def loss_options(self) -> dict[str, Any]:
        """The fields of `fastadv.LossConfig` that are set."""
        own = {f.name: getattr(self, f.name) for f in fields(PolicyLossConfig) if f.default == UNSET}
        options = {name: value for name, value in own.items() if value != UNSET}
        if "loss_agg_mode" in options:
            options["denominator"] = None  # the mode's own, not the preset's
        beta = self.get("dro_beta")  # a key of verl's, which the losses named fastadv_... read themselves
        if self.loss_mode == "fastadv" and beta is not None:
            options["dro_beta"] = beta
        if options.get("correction") is not None:
            given = options["correction"]
            listed = list(given) if _is_list(given) else given
            options["correction"] = made_all(f"{OWN}.correction", fa.Correction, listed)
        if options.get("sequence_mask") is not None:
            options["sequence_mask"] = made(f"{OWN}.sequence_mask", fa.SequenceMask, options["sequence_mask"])
        return options


def _valid(key: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(key, valid, n=1)
    return f"did you mean {near[0]!r}? the keys are {', '.join(valid)}" if near else f"the keys are {', '.join(valid)}"


def _is_list(given: Any) -> bool:
    return not hasattr(given, "keys") and hasattr(given, "__iter__") and not isinstance(given, str)
