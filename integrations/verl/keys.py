"""fastadv's own keys of verl's yaml, `algorithm.fastadv.*`, read and checked. Every error names the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fastadv.integrations import keys
from fastadv.integrations.keys import key_error, plain

import fastadv as fa
from fastadv import validation
from fastadv.ops.group_advantages import POPULATIONS, SCALES
from fastadv.ops.turn_advantages import SHRINK_TARGETS

ROOT = "algorithm.fastadv"
TRAINER = "trainer.v1.trainer_mode=fastadv_sync"  # or a sister of it: they know what verl does not pass

# Read by our trainers, which check their values; with a trainer of verl's nothing would read them.
TRAINER_KEYS = ("trainer",)

SINGLETONS = ("zero", "raw")
TIMEOUTS = ("infra", "budget")


def read(config: Any, name: str, default: Any = None) -> Any:
    """A key of verl's config (DictConfig, AlgoConfig, a dictionary, None); `default` where it is not there or null."""
    value = None if config is None else config.get(name, None)
    return default if value is None else value


@dataclass(frozen=True)
class EstimatorOptions:
    """`algorithm.fastadv`, and the keys of `algorithm` that verl's own estimators read.

    Attributes:
        kappa: shrinkage of the turn-reached baseline.
        shrink_to: what it shrinks to, see `fastadv.turn_advantages`.
        population: who votes in a baseline, "all" or the "survivors", rollouts that no cap cut off.
        scale: "none" or "std".
        ddof: of that standard deviation.
        eps: added to it.
        singleton: what a group of one gets, "zero" or "raw".
        estimator: a name of `fastadv.ESTIMATORS`, for `adv_estimator=fastadv`.
        options: of that estimator.
        arm: for `adv_estimator=fastadv_arm`, written as `fastadv.named_arm` or `fastadv.arm_from_dict` takes it.
        solved_above: a rollout with a reward above this is solved.
        timeout: what running out of wall-clock time is, "infra" or "budget".
        trainer: keys that only our trainers read (`TRAINER_KEYS`), as they were written.
        given: which keys of `algorithm.fastadv` were written.
        gamma, lam: verl's `algorithm.gamma`, `algorithm.lam`.
        norm_adv_by_std_in_grpo: verl's.
    """

    kappa: float = 2.0
    shrink_to: str = "loo"
    population: str = "all"
    scale: str = "none"
    ddof: float = 1
    eps: float = 1e-6
    singleton: str = "zero"
    estimator: str | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    arm: fa.Arm | None = None
    solved_above: float = 0.0
    timeout: str = "infra"
    trainer: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    given: frozenset[str] = frozenset()
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True

    @classmethod
    def of(cls, algorithm: Any) -> EstimatorOptions:
        """Reads verl's `algorithm`.

        Args:
            algorithm: DictConfig, AlgoConfig, a dictionary, or None for the defaults.

        Raises:
            ValueError: an unknown key, with the valid ones; a value that the key does not take.
        """
        written = plain(read(algorithm, "fastadv", {}))
        if not isinstance(written, dict):
            raise key_error(ROOT, written, "pass a mapping, such as +algorithm.fastadv.kappa=2")
        for key in written:
            if key not in (*OWN, *TRAINER_KEYS):
                raise ValueError(_unknown(key))
        given = {key: value for key, value in written.items() if value is not None}
        values = {key: OWN[key](f"{ROOT}.{key}", value) for key, value in given.items() if key in OWN}
        return cls(
            **values,
            trainer=MappingProxyType({key: given[key] for key in TRAINER_KEYS if key in given}),
            given=frozenset(given),
            gamma=keys.non_negative("algorithm.gamma", read(algorithm, "gamma", 1.0)),
            lam=keys.non_negative("algorithm.lam", read(algorithm, "lam", 1.0)),
            norm_adv_by_std_in_grpo=keys.flag(
                "algorithm.norm_adv_by_std_in_grpo", read(algorithm, "norm_adv_by_std_in_grpo", True)
            ),
        )

    def only(self, estimator: str, reads: tuple[str, ...]) -> None:
        """Raises ValueError where a key of `algorithm.fastadv` was written that this estimator does not read."""
        for key in sorted(self.given.difference(reads, TRAINER_KEYS)):
            can = f"it reads {', '.join(reads)}" if reads else "it reads none of these keys"
            raise ValueError(f"{ROOT}.{key} is set, but algorithm.adv_estimator={estimator} does not read it; {can}")


def _unknown(key: str) -> str:
    valid = (*OWN, *TRAINER_KEYS)
    hint = validation.did_you_mean(key, valid)
    return f"{ROOT}.{key} is no key of fastadv{hint}; the keys are {', '.join(valid)}"


# Our keys, and how each is read.
OWN: dict[str, Any] = {
    "kappa": keys.non_negative,
    "shrink_to": keys.one_of(*SHRINK_TARGETS),
    "population": keys.one_of(*POPULATIONS),
    "scale": keys.one_of(*SCALES),
    "ddof": keys.non_negative,
    "eps": keys.non_negative,
    "singleton": keys.one_of(*SINGLETONS),
    "estimator": keys.estimator,
    "options": keys.options_mapping,
    "arm": keys.arm,
    "solved_above": keys.finite,
    "timeout": keys.one_of(*TIMEOUTS),
}
