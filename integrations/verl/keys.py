"""fastadv's own keys of verl's yaml, `algorithm.fastadv.*`, read and checked. Every error names the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import fastadv as fa
from fastadv import validation
from fastadv.arms.text import shown
from fastadv.ops.group_advantages import POPULATIONS, SCALES
from fastadv.ops.turn_advantages import SHRINK_TARGETS

ROOT = "algorithm.fastadv"
TRAINER = "trainer.v1.trainer_mode=fastadv_sync"  # or a sister of it: they know what verl does not pass

# Read by our trainers, which check their values; with a trainer of verl's nothing would read them.
TRAINER_KEYS = ("trainer",)

SINGLETONS = ("zero", "raw")
TIMEOUTS = ("infra", "budget")


def key_error(path: str, value: Any, fix: str) -> ValueError:
    """An error about the value of a yaml key: `algorithm.fastadv.kappa is -1; it must be at least 0`."""
    return ValueError(f"{path} is {shown(value)}; {fix}")


def mapping(path: str, value: Any, valid: tuple[str, ...]) -> dict[str, Any]:
    """The keys of a mapping of the yaml, which have to be among the valid ones; none where it is null.

    Raises:
        ValueError: not a mapping, an unknown key.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise key_error(path, value, f"it must be a mapping with keys among {', '.join(valid)}")
    for key in value:
        if key not in valid:
            hint = validation.did_you_mean(str(key), valid)
            raise ValueError(f"{path}.{key} is no key of fastadv{hint}; {path} has {', '.join(valid)}")
    return {str(key): item for key, item in value.items()}


def number(path: str, value: Any) -> float:
    """The value, which has to be a number that is no NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise key_error(path, value, "it must be a number")
    return value


def read(config: Any, name: str, default: Any = None) -> Any:
    """A key of verl's config (DictConfig, AlgoConfig, a dictionary, None); `default` where it is not there or null."""
    value = None if config is None else config.get(name, None)
    return default if value is None else value


def plain(value: Any) -> Any:
    """A part of verl's config as dictionaries, lists, strings and numbers, interpolations resolved."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


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
            gamma=_number("algorithm.gamma", read(algorithm, "gamma", 1.0)),
            lam=_number("algorithm.lam", read(algorithm, "lam", 1.0)),
            norm_adv_by_std_in_grpo=_flag(
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


def _number(path: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise key_error(path, value, "pass a finite number, at least 0")
    return value


def _finite(path: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
        raise key_error(path, value, "pass a finite number")
    return value


def _flag(path: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise key_error(path, value, "pass true or false")
    return value


def _one_of(*valid: str) -> Any:
    def choose(path: str, value: Any) -> Any:
        if value not in valid:
            raise key_error(path, value, f"it must be one of {', '.join(valid)}")
        return value

    return choose


def _estimator(path: str, value: Any) -> str:
    if value not in fa.ESTIMATORS:
        hint = validation.did_you_mean(str(value), fa.ESTIMATORS).strip(" ()")
        raise key_error(path, value, f"{hint + '; ' if hint else ''}the names are {', '.join(sorted(fa.ESTIMATORS))}")
    return str(value)


def _mapping(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise key_error(path, value, "pass a mapping of the estimator's options")
    return MappingProxyType(value)


def _arm(path: str, value: Any) -> fa.Arm:
    try:
        return fa.named_arm(value) if isinstance(value, str) else fa.arm_from_dict(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


# Our keys, and how each is read.
OWN: dict[str, Any] = {
    "kappa": _number,
    "shrink_to": _one_of(*SHRINK_TARGETS),
    "population": _one_of(*POPULATIONS),
    "scale": _one_of(*SCALES),
    "ddof": _number,
    "eps": _number,
    "singleton": _one_of(*SINGLETONS),
    "estimator": _estimator,
    "options": _mapping,
    "arm": _arm,
    "solved_above": _finite,
    "timeout": _one_of(*TIMEOUTS),
}
