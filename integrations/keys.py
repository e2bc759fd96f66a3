"""Keys of the drop-ins' yaml, read and checked. Every error names the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, TypeVar

import fastadv as fa
from fastadv import validation
from fastadv.arms.text import shown

Kind = TypeVar("Kind")


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


def plain(value: Any) -> Any:
    """A part of a configuration (OmegaConf's with interpolations resolved) as dictionaries, lists and scalars."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def non_negative(path: str, value: Any) -> float:
    """The value, which has to be a finite number that is at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise key_error(path, value, "pass a finite number, at least 0")
    return value


def finite(path: str, value: Any) -> float:
    """The value, which has to be a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
        raise key_error(path, value, "pass a finite number")
    return value


def share(path: str, value: Any) -> float:
    """The value, which has to be a number from 0 to 1."""
    if not 0 <= number(path, value) <= 1:
        raise key_error(path, value, "it must be from 0 to 1")
    return float(value)


def integer(path: str, value: Any) -> int:
    """The value, which has to be a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise key_error(path, value, "pass a whole number")
    return value


def count(path: str, value: Any) -> int:
    """The value, which has to be a whole number that is at least 1."""
    if integer(path, value) < 1:
        raise key_error(path, value, "it must be at least 1")
    return int(value)


def text(path: str, value: Any) -> str:
    """The value, which has to be a text."""
    if not isinstance(value, str):
        raise key_error(path, value, "it must be a text")
    return value


def flag(path: str, value: Any) -> bool:
    """The value, which has to be true or false."""
    if not isinstance(value, bool):
        raise key_error(path, value, "pass true or false")
    return value


def one_of(*valid: str) -> Callable[[str, Any], str]:
    """A reader of a value that has to be one of these."""

    def choose(path: str, value: Any) -> str:
        if value not in valid:
            raise key_error(path, value, f"it must be one of {', '.join(valid)}")
        return str(value)

    return choose


def estimator(path: str, value: Any) -> str:
    """The value, which has to be a name of `fastadv.ESTIMATORS`."""
    if value not in fa.ESTIMATORS:
        hint = validation.did_you_mean(str(value), fa.ESTIMATORS).strip(" ()")
        raise key_error(path, value, f"{hint + '; ' if hint else ''}the names are {', '.join(sorted(fa.ESTIMATORS))}")
    return str(value)


def options_mapping(path: str, value: Any) -> Mapping[str, Any]:
    """The value, which has to be a mapping."""
    if not isinstance(value, dict):
        raise key_error(path, value, "pass a mapping of the estimator's options")
    return MappingProxyType(value)


def made(path: str, kind: type[Kind], value: Any) -> Kind:
    """A dataclass such as `fastadv.Correction`, or the mapping of its fields.

    Raises:
        ValueError: no mapping, an unknown key, or fields that do not go together.
    """
    if isinstance(value, kind):
        return value
    valid = tuple(f.name for f in fields(kind))  # type: ignore[arg-type]
    try:
        settings = dict(value)
    except (TypeError, ValueError):
        raise key_error(path, value, f"it must be a mapping with keys of {', '.join(valid)}") from None
    for name in sorted(settings.keys() - set(valid)):
        hint = validation.did_you_mean(name, valid).strip(" ()")
        raise key_error(
            f"{path}.{name}", settings[name], f"{hint + ' ' if hint else ''}the keys are {', '.join(valid)}"
        )
    try:
        return kind(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {str(error).partition(': ')[2] or error}") from error


def made_all(path: str, kind: type[Kind], value: Any) -> tuple[Kind, ...]:
    """Several of them: a list, or one alone."""
    listed = value if isinstance(value, (list, tuple)) else [value]
    return tuple(made(path, kind, item) for item in listed)


def arm(path: str, value: Any, *, seed: int = 0) -> fa.Arm:
    """An arm, written as `fastadv.named_arm` takes it (with this seed), or as a mapping that `fastadv.arm_from_dict`
    takes."""
    try:
        return fa.named_arm(value, seed=seed) if isinstance(value, str) else fa.arm_from_dict(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
