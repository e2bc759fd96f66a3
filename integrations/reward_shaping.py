"""What drop-ins do to rewards before any baseline: zero on cap, the stop-properly and the soft overlong penalty."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fastadv.integrations.keys import key_error, mapping, number
from torch import Tensor

from fastadv import soft_overlong_penalty, stop_properly_penalty, zero_on_cap

# Whose form of the soft overlong penalty: what it is multiplied by and where it ends.
OVERLONG_FORMS = {"paper": -1.0, "openrlhf": -1.0, "trl": -1.0, "verl": None}


@dataclass(frozen=True)
class Overlong:
    """The soft overlong penalty, `fastadv.soft_overlong_penalty`.

    Attributes:
        max_length: the longest response with the cache in it; None: the trainer's longest.
        cache_length: width of the line.
        factor: multiplies it.
        form: "paper" (as "trl" and "openrlhf": not below -factor) or "verl" (the line goes on).
    """

    cache_length: int
    max_length: int | None = None
    factor: float = 1.0
    form: str = "paper"


@dataclass(frozen=True)
class RewardShaping:
    """What is done to rewards before any baseline, in this order.

    Attributes:
        zero_on_cap: "zero": a capped rollout gets 0; "keep": unless its reward is above solved_above; None: nothing.
        stop_properly: `fastadv.stop_properly_penalty`'s coefficient for capped rollouts; None: nothing.
        overlong: the soft overlong penalty, added; None: nothing.
    """

    zero_on_cap: str | None = None
    stop_properly: float | None = None
    overlong: Overlong | None = None

    @property
    def active(self) -> bool:
        """Whether it does anything."""
        return self != RewardShaping()

    def apply(
        self, rewards: Tensor, lengths: Tensor, capped: Tensor, *, longest: int | None, solved_above: float
    ) -> Tensor:
        """Shaped rewards.

        Args:
            rewards: `[B]`, of rollouts.
            lengths: `[B]` response tokens, those of tools among them.
            capped: `[B]` bool.
            longest: the longest response that the trainer lets through; None: it has no such number.
            solved_above: the reward above which a rollout is solved.
        """
        if self.zero_on_cap is not None:
            rewards = zero_on_cap(rewards, capped, passed=self.zero_on_cap, passing=solved_above)
        if self.stop_properly is not None:
            rewards = stop_properly_penalty(rewards, capped, self.stop_properly)
        if self.overlong is not None:
            o = self.overlong
            most = longest if o.max_length is None else o.max_length
            if most is None:
                raise ValueError("the soft overlong penalty needs reward.overlong.max_length: this trainer has none")
            rewards = rewards + soft_overlong_penalty(
                lengths, most, o.cache_length, factor=o.factor, floor=OVERLONG_FORMS[o.form]
            )
        return rewards

    @classmethod
    def of(cls, path: str, value: Any) -> RewardShaping:
        """Reads a mapping of the yaml.

        Args:
            path: its key, for errors.
            value: what stands there; None: nothing is shaped.

        Raises:
            ValueError: an unknown key, or a value that cannot be, with the key's whole name.
        """
        given = mapping(path, value, tuple(f.name for f in fields(cls)))
        if given.get("zero_on_cap") not in (None, "zero", "keep"):
            raise key_error(f"{path}.zero_on_cap", given["zero_on_cap"], "it must be zero, keep or null")
        if given.get("stop_properly") is not None:
            given["stop_properly"] = number(f"{path}.stop_properly", given["stop_properly"])
        if given.get("overlong") is not None:
            path += ".overlong"
            overlong = mapping(path, given["overlong"], tuple(f.name for f in fields(Overlong)))
            if "cache_length" not in overlong:
                raise key_error(f"{path}.cache_length", None, "give the width of the penalty's line in tokens")
            for name in ("cache_length", "max_length"):
                value = overlong.get(name)
                if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                    raise key_error(f"{path}.{name}", value, "it must be a number of tokens")
            if overlong.get("form", "paper") not in OVERLONG_FORMS:
                raise key_error(f"{path}.form", overlong["form"], f"it must be one of {', '.join(OVERLONG_FORMS)}")
            if "factor" in overlong:
                overlong["factor"] = number(f"{path}.factor", overlong["factor"])
            given["overlong"] = Overlong(**overlong)
        return cls(**given)
