"""Arms in writing: as plain dictionaries, and as YAML."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import IntEnum
from typing import Any

from fastadv.arms.arm import Arm
from fastadv.arms.named import named_arm
from fastadv.arms.rules import (
    Condition,
    Continuation,
    InverseProbability,
    PrefixCut,
    Rescue,
    StaleTokens,
    TokenCoins,
    TurnMask,
)
from fastadv.outcomes import Ending, Outcome

ROW_RULES: dict[str, type] = {"inverse-probability": InverseProbability, "rescue": Rescue}
TOKEN_RULES: dict[str, type] = {
    "turn-mask": TurnMask,
    "stale-tokens": StaleTokens,
    "token-coins": TokenCoins,
    "prefix-cut": PrefixCut,
    "continuation": Continuation,
}
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 80, 80
_RULE_NAMES = {kind: name for name, kind in (ROW_RULES | TOKEN_RULES).items()}


def arm_to_dict(arm: Arm) -> dict[str, Any]:
    """An arm's name, and its fields that are not the default, as plain strings, numbers, lists and dictionaries.

    Args:
        arm: any arm.

    Returns:
        What `arm_from_dict` takes.

    Raises:
        ValueError: never; every arm can be written down.
    """
    return {"name": arm.name, **_written(arm)}


def arm_settings(arm: Arm) -> dict[str, Any]:
    """Every field of an arm but its name, those with the default too, written as `arm_to_dict` writes them."""
    return {f.name: _plain(getattr(arm, f.name)) for f in fields(arm) if f.name != "name"}


def _written(value: Any) -> dict[str, Any]:
    found = {f.name: _plain(getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != _default(f)}
    found.pop("name", None)
    return {"rule": _RULE_NAMES[type(value)], **found} if type(value) in _RULE_NAMES else found


def _default(field: Field[Any]) -> Any:
    return None if field.default is MISSING else field.default


def _plain(value: Any) -> Any:
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return _written(value)
    # YAML writes exactly these types, and not those that count as them, such as NumPy's floats.
    kind = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
    return value if kind is None else kind(value)


def arm_from_dict(written: Mapping[str, Any]) -> Arm:
    """The arm that a dictionary describes.

    Args:
        written: `name` and any other fields of Arm: outcomes and endings by name, a condition as a dictionary of its
            fields, weights as a dictionary of `rule` and the fields of that rule.

    Returns:
        The arm.

    Raises:
        ValueError, TypeError: an unknown key, with the valid ones; a value of another type; choices that contradict
            each other.
    """
    if not isinstance(written, Mapping):
        raise TypeError(
            f"an arm is {shown(written)}; describe it by keys and values, or by the name of one of fastadv.ARMS"
        )
    name = written.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"an arm has no name: {shown(dict(written))}; add a key 'name'")
    arm: Arm = _read(Arm, written, f"arm {name!r}")
    return arm


def shown(value: Any) -> str:
    """A value in an error, shortened: aliases can make a few lines of YAML into more text than memory holds."""
    return _SHORT.repr(value)


def _read(kind: type, written: Mapping[str, Any], where: str) -> Any:
    known = {f.name: f for f in fields(kind)}
    for key in written:
        if key not in known:
            raise ValueError(f"{where}: {key!r} is no key; the keys are {', '.join(known)}")
    missing = [name for name, f in known.items() if f.default is MISSING and name not in written]
    if missing:
        raise ValueError(f"{where}: {missing[0]!r} is missing; the keys are {', '.join(known)}")
    return kind(**{key: _READERS[str(known[key].type)](value, f"{where}, {key}") for key, value in written.items()})


def _of_type(what: str, *kinds: type) -> Callable[[Any, str], Any]:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError(f"{where}: {shown(value)} is no {what}")
        return value

    return read


_text, _number, _integer = _of_type("text", str), _of_type("number", int, float), _of_type("integer", int)


def _list_of(read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def read_list(value: Any, where: str) -> Any:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{where}: {shown(value)} is no list")
        return tuple(read(item, where) for item in value)

    return read_list


def _member_of(kind: type[IntEnum]) -> Callable[[Any, str], Any]:
    def read(value: Any, where: str) -> IntEnum:
        names = {member.name.lower(): member for member in kind}
        if not isinstance(value, str) or value.lower() not in names:
            raise ValueError(f"{where}: {shown(value)} is none of {', '.join(names)}")
        return names[value.lower()]

    return read


def _optional(read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, where: None if value is None else read(value, where)


def _condition(value: Any, where: str) -> Condition:
    if not isinstance(value, Mapping):
        raise TypeError(f"{where}: {shown(value)} is no dictionary")
    condition: Condition = _read(Condition, value, where)
    return condition


def _rule(rules: dict[str, type]) -> Callable[[Any, str], Any]:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping) or value.get("rule") not in list(rules):  # a list: any rule may be asked for
            raise ValueError(f"{where}: {shown(value)} has no 'rule' of {', '.join(rules)}")
        given = dict(value)
        return _read(rules[given.pop("rule")], given, where)

    return read


# By the annotation of a field.
_READERS: dict[str, Callable[[Any, str], Any]] = {
    "str": _text,
    "float": _number,
    "float | None": _optional(_number),
    "int": _integer,
    "int | None": _optional(_integer),
    "bool": _of_type("yes or no", bool),
    "tuple[int, ...]": _list_of(_integer),
    "tuple[Outcome, ...]": _list_of(_member_of(Outcome)),
    "tuple[Ending, ...]": _list_of(_member_of(Ending)),
    "Condition | None": _optional(_condition),
    "RowWeights | None": _optional(_rule(ROW_RULES)),
    "TokenWeights | None": _optional(_rule(TOKEN_RULES)),
}


# ---- YAML ------------------------------------------------------------------------------------------------------------


def _loader(yaml: Any) -> Any:
    """SafeLoader, but a key that is there twice is an error, as it is in a record, and so is a merge: a few lines of
    them stand for more entries than memory holds."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    raise yaml.constructor.ConstructorError(None, None, "merges (<<) are not read", key.start_mark)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            found = super().construct_mapping(node, deep)
            if len(found) < len(node.value):
                raise yaml.constructor.ConstructorError(None, None, "a key is there twice", node.start_mark)
            return found

    return Loader


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("arms in YAML need PyYAML: pip install 'fastadv[yaml]'") from error
    return yaml


def arms_to_yaml(arms: Iterable[Arm]) -> str:
    """Writes arms as YAML.

    Args:
        arms: any number of them.

    Returns:
        A list of dictionaries as `arm_to_dict` makes them.

    Raises:
        ImportError: PyYAML is not installed.
    """
    text: str = _yaml().safe_dump([arm_to_dict(arm) for arm in arms], sort_keys=False, allow_unicode=True)
    return text


def arms_from_yaml(text: str, *, seed: int = 0) -> tuple[Arm, ...]:
    """Reads arms from YAML, which executes nothing.

    Args:
        text: a list. Its entries are dictionaries as `arm_from_dict` takes them, or names of `fastadv.ARMS` with their
            parameters, such as `rescue:a=0.25`.
        seed: of the coins of arms that are named, and do not say it.

    Returns:
        The arms, in the list's order.

    Raises:
        ValueError, TypeError: no YAML, a key that is there twice, no list, an unknown key, two arms of one name.
        ImportError: PyYAML is not installed.
    """
    yaml = _yaml()
    try:
        entries = yaml.load(text, Loader=_loader(yaml))
    # The last four are what PyYAML's own constructors raise, of "!!int ''" for one.
    except (yaml.YAMLError, RecursionError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError("arms are a YAML list, an entry an arm, and there is none; begin each with '- name: ...'")
    arms = [named_arm(entry, seed=seed) if isinstance(entry, str) else arm_from_dict(entry) for entry in entries]
    names = [arm.name for arm in arms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two arms are called {twice!r}; give each a name of its own")
    return tuple(arms)
