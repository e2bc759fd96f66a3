"""What a policy loss is: one configuration object, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, replace

LOSSES = ("reinforce", "ppo")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
DENOMINATORS = ("tokens", "sequences", "candidates", "one")
_DEFAULT_DENOMINATOR = {"token-mean": "tokens", "token-sum": "one"}


@dataclass(frozen=True)
class LossConfig:
    """A policy loss, its clipping and its aggregation.

    Attributes:
        loss: "ppo", the clipped surrogate (Schulman et al. 2017, eq. 7; GRPO's loss too), or "reinforce", -advantage *
            log_prob (Williams 1992).
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high] (DAPO, arXiv 2503.14476, eq. 5).
        dual_clip: bound c > 1: the loss of a token with negative advantage is at most -c * advantage (arXiv 1912.09729,
            eq. 5); None: no bound. verl calls it clip_ratio_c, Miles eps_clip_c.
        log_ratio_bound: |log_prob - old_log_prob| is cut here before exp, and no gradient flows beyond it (verl: 20).
        loss_agg_mode: how token losses become one number, by verl's names:
            "token-mean": sum / tokens; "token-sum": sum; "seq-mean-token-sum": sum / sequences;
            "seq-mean-token-mean": each rollout's sum / its own tokens, then / sequences;
            "seq-mean-token-sum-norm": sum / (sequences * horizon), Dr. GRPO's constant length.
        denominator: what to divide by where the mode's own choice is not meant: "tokens" (active tokens), "sequences"
            (rollouts with an active token), "candidates" (all rollouts, TRL's choice for GRPO), "one". None: "tokens"
            for token-mean, "one" for token-sum, "sequences" for the others.
        horizon: constant length in tokens of "seq-mean-token-sum-norm"; required there unless the denominators bring
            one.

    At a clip edge or a tie between branches the gradient is that of the unclipped branch.
    """

    loss: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    log_ratio_bound: float = 20.0
    loss_agg_mode: str = "token-mean"
    denominator: str | None = None
    horizon: float | None = None

    def __post_init__(self) -> None:
        for name, value, valid in (
            ("loss", self.loss, LOSSES),
            ("loss_agg_mode", self.loss_agg_mode, AGGREGATIONS),
            ("denominator", self.denominator, (None, *DENOMINATORS)),
        ):
            if value not in valid:
                raise ValueError(f"LossConfig: {name} is {value!r}; it must be one of {', '.join(map(repr, valid))}")
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"LossConfig: clip_low is {self.clip_low}; it must be in [0, 1]")
        if not 0 <= self.clip_high < float("inf"):
            raise ValueError(f"LossConfig: clip_high is {self.clip_high}; it must be finite and at least 0")
        if self.dual_clip is not None:
            if self.loss != "ppo":
                raise ValueError(f"LossConfig: dual_clip bounds the ppo loss; loss is {self.loss!r}")
            if not 1 < self.dual_clip < float("inf"):
                raise ValueError(f"LossConfig: dual_clip is {self.dual_clip}; it must be above 1")
        if not 0 < self.log_ratio_bound <= 80:
            raise ValueError(
                f"LossConfig: log_ratio_bound is {self.log_ratio_bound}; it must be in (0, 80], where float32's exp is "
                "finite"
            )
        if self.horizon is not None and not 0 < self.horizon < float("inf"):
            raise ValueError(f"LossConfig: horizon is {self.horizon}; it must be positive")

    @property
    def denominator_name(self) -> str:
        """The denominator that applies."""
        return self.denominator or _DEFAULT_DENOMINATOR.get(self.loss_agg_mode, "sequences")

    def but(self, **changes: object) -> LossConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


PRESETS = {"ppo": LossConfig("ppo"), "reinforce": LossConfig("reinforce")}


def loss_config(config: str | LossConfig) -> LossConfig:
    """A configuration, or the preset of this name."""
    if isinstance(config, LossConfig):
        return config
    if config not in PRESETS:
        raise ValueError(f"config is {config!r}; it must be a LossConfig or one of {', '.join(map(repr, PRESETS))}")
    return PRESETS[config]
