"""What a policy loss is: one configuration object, checked when it is made, and presets under their owners' names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
DENOMINATORS = ("tokens", "sequences", "candidates", "one")
_DEFAULT_DENOMINATOR = {"token-mean": "tokens", "token-sum": "one"}

LOSSES = (
    "reinforce", "ppo", "cispo", "sapo", "gspo", "vespo", "gmpo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro",
)  # fmt: skip
NATIVE_LOSSES = LOSSES[:5]  # in the order of fastadv::Loss; the others run on the reference
SEQUENCE_LOSSES = ("gspo", "vespo", "gmpo")  # their ratio belongs to the rollout
SELECTING_LOSSES = ("clip_cov", "kl_cov")  # they pick tokens out of the whole batch
TRUST_REGION_LOSSES = ("dppo_tv", "dppo_kl")  # they leave out the tokens that have gone too far

# Which losses read an option; any other value than the default is a contradiction elsewhere.
_OPTIONS = {
    "clip_low": ("ppo", "cispo", "gspo", "gmpo", "clip_cov"),
    "clip_high": ("ppo", "cispo", "gspo", "gmpo", "clip_cov"),
    "dual_clip": ("ppo", "gspo"),
    "delta": ("ppo", "gspo"),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    "sequence_gradient": ("gspo",),
    "gamma_pos": ("vespo",),
    "gamma_neg": ("vespo",),
    "cov_fraction": SELECTING_LOSSES,
    "cov_low": ("clip_cov",),
    "cov_high": ("clip_cov",),
    "cov_kl_coef": ("kl_cov",),
    "seed": ("clip_cov",),
    "divergence_low": TRUST_REGION_LOSSES,
    "divergence_high": TRUST_REGION_LOSSES,
    "two_sided": TRUST_REGION_LOSSES,
    "ratio_cap": TRUST_REGION_LOSSES,
    "surrogate": TRUST_REGION_LOSSES,
    "dro_beta": ("dro",),
}

CORRECTIONS = ("tis", "mis", "reject")
LEVELS = ("token", "sequence", "geometric")
KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "low_var_kl")
KL_GRADIENTS = ("own", "straight-through", "unbiased")
SURROGATES = ("log-prob", "ratio")


def _choice(owner: str, name: str, value: Any, valid: tuple[Any, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{owner}: {name} is {value!r}; it must be one of {', '.join(map(repr, valid))}")


def _between(owner: str, name: str, value: float, low: float, high: float, words: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}: {name} is {value!r}; pass a number")
    if not low <= value <= high:
        raise ValueError(f"{owner}: {name} is {value}; it must be {words}")


_TINY, _HUGE = 1e-38, 3.4e38  # about the least positive and the greatest number of float32


@dataclass(frozen=True)
class Correction:
    """An importance weight of the policy term, because the sampler's probabilities are not the trainer's.

    The ratio is exp(old_log_prob - rollout_log_prob): of a token, or of a rollout as the product over its tokens
    ("sequence") or as their geometric mean ("geometric").

    Attributes:
        kind: "tis", the ratio cut to [low, high] (truncated importance sampling); "mis", the ratio inside the bounds
            and 0 outside (masked importance sampling; IcePop is "mis" over tokens with 0.5 and 5); "reject", 1 inside
            and 0 outside.
        level: "token", "sequence" or "geometric".
        low, high: bounds of the ratio, edges inside.
        veto: a rollout with a token whose ratio is below this gets weight 0 at all of its tokens. None: no veto.
        missing: tokens whose sampler log-prob is NaN: "neutral", ratio 1, or "exclude", weight 0; sums over a rollout
            skip them. Both are counted.

    Denominators are not changed by a weight of 0.

    Source: TIS, fengyao.notion.site/off-policy-rl; MIS and the levels, "When Speed Kills Stability",
    richardli.xyz/rl-collapse (both as verl cites them); IcePop, the Ring-1T report (Ling Team 2025).
    """

    kind: str = "tis"
    level: str = "token"
    low: float = 0.0
    high: float = 2.0
    veto: float | None = None
    missing: str = "neutral"

    def __post_init__(self) -> None:
        _choice("Correction", "kind", self.kind, CORRECTIONS)
        _choice("Correction", "level", self.level, LEVELS)
        _choice("Correction", "missing", self.missing, ("neutral", "exclude"))
        _between("Correction", "low", self.low, 0.0, 1.0, "in [0, 1], so that a ratio of 1 is inside")
        _between("Correction", "high", self.high, 1.0, _HUGE, "finite and at least 1, so that a ratio of 1 is inside")
        if self.veto is not None:
            _between("Correction", "veto", self.veto, _TINY, 1.0, "in (0, 1]")


@dataclass(frozen=True)
class KL:
    """A penalty on the divergence from a reference policy, per token; l = log_prob - ref_log_prob.

    Attributes:
        estimator: "k1": l; "abs": |l|; "k2": l^2 / 2; "k3": exp(-l) - 1 + l (Schulman 2020), continued by its tangent
            beyond |l| = 40; "low_var_kl": k3 with l cut to +-20 and the value to 10, verl's and Miles' form.
        coef: what the penalty is multiplied by.
        gradient: "own", the estimator's; "straight-through", the estimator's value with k2's gradient (verl's "+");
            "unbiased", the estimator times the ratio to the old policy, through which gradient flows too
            (DeepSeek-V3.2; TRL's use_bias_correction_kl, Miles' use_unbiased_kl). The ratio is the token's, whatever
            the loss.
    """

    estimator: str = "k3"
    coef: float = 0.001
    gradient: str = "own"

    def __post_init__(self) -> None:
        _choice("KL", "estimator", self.estimator, KL_ESTIMATORS)
        _choice("KL", "gradient", self.gradient, KL_GRADIENTS)
        _between("KL", "coef", self.coef, -_HUGE, _HUGE, "finite")


@dataclass(frozen=True)
class SequenceMask:
    """Leaves the tokens of negative advantage out of the policy term where the policy has moved away from the rollout.

    A rollout is too far where the mean over its tokens of (sampled log-prob - log_prob) is above `delta`. KL, entropy
    and denominators still count what is left out.

    Attributes:
        delta: the largest mean gap that is kept, in nats a token.
        sign: whose advantage decides: "rollout", the sum over the rollout's tokens that count, so that a rollout goes
            or stays as a whole; "token", each token's own, so that the positive turns of a rollout that is too far stay
            (TRL, Miles and slime; Miles #1127 and slime #1917 report it as a fault). The same where the advantage is
            constant on the rollout.
        log_probs: the sampled log-probs: "old", those that the ratio is to (Miles, slime; TRL without vLLM), or
            "rollout", `rollout_log_probs` (TRL with vLLM). A missing one, NaN, counts as no gap, as in TRL.

    Source: DeepSeek-V3.2, arXiv 2512.02556, eq. 9; TRL's off_policy_mask_threshold, Miles' and slime's use_opsm.
    """

    delta: float
    sign: str = "rollout"
    log_probs: str = "old"

    def __post_init__(self) -> None:
        _between("SequenceMask", "delta", self.delta, 0.0, _HUGE, "finite and at least 0")
        _choice("SequenceMask", "sign", self.sign, ("rollout", "token"))
        _choice("SequenceMask", "log_probs", self.log_probs, ("old", "rollout"))


@dataclass(frozen=True)
class LossConfig:
    """A policy loss, its clipping, its corrections and its aggregation. r = exp(log_prob - old_log_prob).

    Attributes:
        loss: "reinforce", -A log_prob (Williams 1992); "ppo", the clipped surrogate (Schulman et al. 2017, eq. 7;
            GRPO's loss too); "cispo", -A sg(clip(r)) log_prob (arXiv 2506.13585); "sapo",
            -A sigmoid(tau (r - 1)) 4 / tau (arXiv 2511.20347); "gspo", the surrogate of the rollout's ratio, exp of the
            mean log-ratio (arXiv 2507.18071); "vespo", -A phi(w) log_prob with w the rollout's product of ratios and
            phi(w) = w^k e^(lambda (1 - w)), log w cut to [ln 1e-8, 20] (arXiv 2602.10693); "gmpo", -mean(A) exp(mean of
            clipped log-ratios), one term a rollout (arXiv 2507.20673); "clip_cov" and "kl_cov", which treat a few
            tokens of high covariance between advantage and log-prob apart (arXiv 2505.22617); "dppo_tv" and
            "dppo_kl", -A sg(min(r, cap)) log_prob, 0 outside of a trust region of the token's probability (arXiv
            2602.04879); "dro", -(A log_prob - dro_beta / 2 (log r)^2) (arXiv 2405.19107).
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high] (DAPO, arXiv 2503.14476, eq. 5);
            for "gmpo" the log-ratio is clipped to [-clip_low, clip_high]. With clip_low 1 there is no lower bound.
        dual_clip: bound c > 1: the loss of a token with negative advantage is at most -c * advantage (arXiv 1912.09729,
            eq. 5); None: no bound. verl calls it clip_ratio_c, Miles eps_clip_c.
        delta: the ratio itself is cut here before the surrogate (INTELLECT-2, arXiv 2505.07291; TRL's delta), which
            ends the gradient beyond; None: not cut.
        log_ratio_bound: |log_prob - old_log_prob| is cut here before exp, and no gradient flows through the ratio
            beyond it (verl: 20). "gspo" cuts the rollout's log-ratio from above only (verl: 10).
        tau_pos, tau_neg: temperatures of "sapo" for positive and for other advantages.
        sequence_gradient: how the gradient of a "gspo" rollout reaches its tokens: "straight-through", each token as if
            the ratio were its own (verl), or "mean", the rollout's sum spread evenly (TRL). The same where the
            advantage is constant on the rollout.
        gamma_pos, gamma_neg: (k, lambda) of "vespo" for advantages of at least 0 and below.
        cov_fraction: share of the tokens that "clip_cov" and "kl_cov" pick.
        cov_low, cov_high: "clip_cov" picks, by the coin of `seed`, among unclipped tokens with covariance between
            these, and takes their loss away.
        cov_kl_coef: "kl_cov" adds coef * |log_prob - old_log_prob| to the tokens of largest covariance.
        seed: of the coins of "clip_cov", which are the same for the same seed: `config.but(seed=step)`.
        divergence_low, divergence_high: with p = exp(log_prob) and q = exp(old_log_prob), a token is outside of the
            trust region where p > q and its divergence is above divergence_high, or p < q and it is above
            divergence_low. The divergence is |p - q| ("dppo_tv") or the KL of (q, 1 - q) to (p, 1 - p) ("dppo_kl").
            verl's clip_ratio_low and _high, prime-rl's dppo_mask_low and _high.
        two_sided: False: a token is left out where it went the way that its advantage pushes, up where that is positive
            and down elsewhere; True: whichever way (prime-rl's "ipo").
        ratio_cap: the ratio of "dppo_tv" and "dppo_kl" is cut here; None: not cut. verl's clip_ratio_c.
        surrogate: of "dppo_tv" and "dppo_kl": "log-prob", -A sg(min(r, cap)) log_prob (verl); "ratio", -A min(r, cap)
            (prime-rl), whose gradient is the same up to the cap and 0 beyond.
        dro_beta: weight of the squared log-ratio of "dro".
        correction: a Correction, or several that multiply (at most one over tokens): importance weights of the policy
            term from `rollout_log_probs`.
        sequence_mask: a SequenceMask, which leaves tokens of rollouts that are too far off out of the policy term.
        kl: a KL penalty to `ref_log_probs`.
        entropy_coef: this times the entropy is subtracted from each token's loss; needs `entropy`.
        loss_agg_mode: how token losses become one number, by verl's names:
            "token-mean": sum / tokens; "token-sum": sum; "seq-mean-token-sum": sum / sequences;
            "seq-mean-token-mean": each rollout's sum / its own tokens, then / sequences;
            "seq-mean-token-sum-norm": sum / (sequences * horizon), Dr. GRPO's constant length.
        denominator: what to divide by where the mode's own choice is not meant: "tokens" (active tokens), "sequences"
            (rollouts with an active token), "candidates" (all rollouts, TRL's choice for GRPO), "one". None: "tokens"
            for token-mean, "one" for token-sum, "sequences" for the others.
        horizon: constant length in tokens of "seq-mean-token-sum-norm"; required there unless the denominators bring
            one.

    At a clip edge or a tie between branches the gradient is that of the unclipped branch. KL and entropy aggregate as
    the policy term does.
    """

    loss: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    delta: float | None = None
    log_ratio_bound: float = 20.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    sequence_gradient: str = "straight-through"
    gamma_pos: tuple[float, float] = (2.0, 3.0)
    gamma_neg: tuple[float, float] = (3.0, 2.0)
    cov_fraction: float = 0.0002
    cov_low: float = 1.0
    cov_high: float = 5.0
    cov_kl_coef: float = 1.0
    seed: int = 0
    divergence_low: float = 0.15
    divergence_high: float = 0.15
    two_sided: bool = False
    ratio_cap: float | None = 20.0
    surrogate: str = "log-prob"
    dro_beta: float = 0.05
    correction: Correction | tuple[Correction, ...] | None = None
    sequence_mask: SequenceMask | None = None
    kl: KL | None = None
    entropy_coef: float = 0.0
    loss_agg_mode: str = "token-mean"
    denominator: str | None = None
    horizon: float | None = None

    def __post_init__(self) -> None:
        me = "LossConfig"
        _choice(me, "loss", self.loss, LOSSES)
        _choice(me, "loss_agg_mode", self.loss_agg_mode, AGGREGATIONS)
        _choice(me, "denominator", self.denominator, (None, *DENOMINATORS))
        _choice(me, "sequence_gradient", self.sequence_gradient, ("straight-through", "mean"))
        _choice(me, "surrogate", self.surrogate, SURROGATES)
        if self.loss == "gmpo":  # of log-ratios
            _between(me, "clip_low", self.clip_low, 0.0, _HUGE, "finite and at least 0")
        else:
            _between(me, "clip_low", self.clip_low, 0.0, 1.0, "in [0, 1]")
        _between(me, "clip_high", self.clip_high, 0.0, _HUGE, "finite and at least 0")
        for name in ("dual_clip", "delta"):
            if getattr(self, name) is not None:
                _between(me, name, getattr(self, name), math.nextafter(1.0, 2.0), _HUGE, "above 1")
        if self.delta is not None and self.delta < 1 + self.clip_high:
            raise ValueError(f"{me}: delta is {self.delta}; it must be at least 1 + clip_high, {1 + self.clip_high}")
        _between(me, "log_ratio_bound", self.log_ratio_bound, _TINY, 80.0, "in (0, 80], where float32's exp is finite")
        for name in ("tau_pos", "tau_neg"):
            _between(me, name, getattr(self, name), 1e-6, 80.0, "in [1e-6, 80]")
        for name in ("gamma_pos", "gamma_neg"):
            pair = getattr(self, name)
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise ValueError(f"{me}: {name} is {pair!r}; pass two numbers (k, lambda)")
            for value in pair:
                _between(me, name, value, 0.0, 1e6, "two numbers in [0, 1e6]")
            object.__setattr__(self, name, tuple(pair))  # yaml has lists only
        _between(me, "cov_fraction", self.cov_fraction, _TINY, 1.0, "in (0, 1]")
        _between(me, "cov_high", self.cov_high, -_HUGE, _HUGE, "finite")
        _between(me, "cov_low", self.cov_low, -_HUGE, self.cov_high, "at most cov_high")
        _between(me, "cov_kl_coef", self.cov_kl_coef, -_HUGE, _HUGE, "finite")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"{me}: seed is {self.seed!r}; pass an integer")
        for name in ("divergence_low", "divergence_high", "dro_beta"):
            _between(me, name, getattr(self, name), 0.0, _HUGE, "finite and at least 0")
        if self.ratio_cap is not None:
            _between(me, "ratio_cap", self.ratio_cap, 1.0, _HUGE, "finite and at least 1")
        if not isinstance(self.two_sided, bool):
            raise TypeError(f"{me}: two_sided is {self.two_sided!r}; pass a bool")
        _between(me, "entropy_coef", self.entropy_coef, -_HUGE, _HUGE, "finite")
        if self.horizon is not None:
            _between(me, "horizon", self.horizon, _TINY, _HUGE, "positive")
        for name, users in _OPTIONS.items():
            if self.loss not in users and getattr(self, name) != _DEFAULTS[name]:
                raise ValueError(
                    f"{me}: {name} is an option of {', '.join(map(repr, users))}; the {self.loss!r} loss ignores it"
                )
        for correction in self.corrections:
            if not isinstance(correction, Correction):
                raise TypeError(f"{me}: correction holds a {type(correction).__name__}; pass fa.Correction objects")
        if sum(c.level == "token" for c in self.corrections) > 1:
            raise ValueError(f"{me}: correction has two of level 'token'; at most one can be")
        if len({c.missing for c in self.corrections}) > 1:
            raise ValueError(f"{me}: corrections treat missing log-probs differently; give all the same `missing`")
        for name, kind in (("kl", KL), ("sequence_mask", SequenceMask)):
            given = getattr(self, name)
            if given is not None and not isinstance(given, kind):
                raise TypeError(f"{me}: {name} is a {type(given).__name__}; pass a fa.{kind.__name__} or None")
        if self.loss == "gmpo":
            self._check_gmpo()

        if self.loss == "vespo" and any(c.level != "token" for c in self.corrections):
            raise ValueError("LossConfig: 'vespo' weighs whole rollouts itself; use a correction of level 'token'")

    def _check_gmpo(self) -> None:
        """GMPO has one term a rollout, so nothing that is per token can be added to it."""
        if self.loss_agg_mode != "seq-mean-token-mean":
            raise ValueError("LossConfig: 'gmpo' is a mean over rollouts; set loss_agg_mode='seq-mean-token-mean'")
        if any(c.level == "token" for c in self.corrections):
            raise ValueError("LossConfig: 'gmpo' has one term a rollout; use a correction of level 'geometric'")
        if self.sequence_mask is not None and self.sequence_mask.sign == "token":
            raise ValueError("LossConfig: 'gmpo' has one term a rollout; use a sequence_mask of sign 'rollout'")

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """The corrections as a tuple."""
        if self.correction is None:
            return ()
        return self.correction if isinstance(self.correction, tuple) else (self.correction,)

    @property
    def token_correction(self) -> Correction | None:
        """The correction of level "token", if there is one."""
        return next((c for c in self.corrections if c.level == "token"), None)

    @property
    def denominator_name(self) -> str:
        """The denominator that applies."""
        return self.denominator or _DEFAULT_DENOMINATOR.get(self.loss_agg_mode, "sequences")

    def but(self, **changes: Any) -> LossConfig:
        """A copy with some fields changed."""
        unknown = changes.keys() - {f.name for f in fields(self)}
        if unknown:
            valid = ", ".join(f.name for f in fields(self))
            raise ValueError(f"LossConfig: {sorted(unknown)[0]!r} is no option; the options are {valid}")
        return replace(self, **changes)


_DEFAULTS = {f.name: f.default for f in fields(LossConfig)}

_GRPO = LossConfig(loss_agg_mode="seq-mean-token-mean", denominator="candidates")
_GSPO_VERL = LossConfig("gspo", 3e-4, 4e-4, log_ratio_bound=10.0, loss_agg_mode="seq-mean-token-mean")
_GSPO_TRL = LossConfig(
    "gspo", 3e-4, 4e-4, log_ratio_bound=80.0, sequence_gradient="mean", loss_agg_mode="seq-mean-token-mean",
    denominator="candidates",
)  # fmt: skip
_DPPO_PRIME_RL = LossConfig(
    "dppo_tv", divergence_low=0.2, divergence_high=0.2, ratio_cap=None, surrogate="ratio", log_ratio_bound=80.0
)

PRESETS: Mapping[str, LossConfig] = MappingProxyType({
    "reinforce": LossConfig("reinforce"),
    "gpg": LossConfig("reinforce"),  # verl's name; its advantages are its own
    "ppo": LossConfig("ppo"),
    "ppo/verl": LossConfig("ppo", dual_clip=3.0),  # verl's "vanilla" with its default clip_ratio_c
    "grpo": _GRPO,  # DeepSeekMath, arXiv 2402.03300, eq. 3; TRL's "grpo"
    "bnpo": LossConfig("ppo"),  # TRL's name for the token mean
    "dr_grpo": LossConfig("ppo", loss_agg_mode="seq-mean-token-sum-norm", denominator="candidates"),  # 2503.20783
    "dapo": LossConfig("ppo", clip_high=0.28),  # arXiv 2503.14476, eq. 8 and section 4.1
    "dapo/verl": LossConfig("ppo", clip_high=0.28, dual_clip=10.0),  # the recipe's clip_ratio_c
    "gspo/verl": _GSPO_VERL,  # clips of the paper, arXiv 2507.18071
    "gspo/trl": _GSPO_TRL,
    "cispo/verl": LossConfig("cispo"),
    "cispo/trl": LossConfig("cispo", clip_low=1.0, clip_high=4.0, log_ratio_bound=80.0),  # epsilon_high 5, absolute
    "tis/roll": LossConfig("cispo", clip_low=1.0, clip_high=0.0),  # coefficient min(r, 1)
    "sapo": LossConfig("sapo", loss_agg_mode="seq-mean-token-mean"),
    "luspo": _GSPO_TRL.but(loss_agg_mode="seq-mean-token-sum"),  # arXiv 2602.05261: a rollout's loss times its length
    "vespo": LossConfig("vespo"),
    "gmpo": LossConfig(
        "gmpo", 0.4, 0.4, loss_agg_mode="seq-mean-token-mean", denominator="candidates", log_ratio_bound=80.0
    ),  # clips of the paper; verl's "geo_mean" takes a plain mean over rows
    "clip_cov": LossConfig("clip_cov"),
    "kl_cov": LossConfig("kl_cov"),
    "dppo_tv/verl": LossConfig("dppo_tv", ratio_cap=1e4),  # limits and cap of verl's example script
    "dppo_kl/verl": LossConfig("dppo_kl", divergence_low=0.05, divergence_high=0.05, ratio_cap=1e4),
    "dppo_tv/prime-rl": _DPPO_PRIME_RL,  # its "default" loss
    "ipo/prime-rl": _DPPO_PRIME_RL.but(divergence_low=0.1, divergence_high=0.1, two_sided=True),
    "dro": LossConfig("dro"),  # beta of Tinker's documentation; verl has none
})  # fmt: skip


def loss_config(config: str | LossConfig) -> LossConfig:
    """A configuration, or the preset of this name."""
    if isinstance(config, LossConfig):
        return config
    if not isinstance(config, str):
        raise TypeError(f"config is a {type(config).__name__}; pass a LossConfig or the name of a preset")
    if config not in PRESETS:
        raise ValueError(f"config is {config!r}; it must be a LossConfig or one of {', '.join(map(repr, PRESETS))}")
    return PRESETS[config]
