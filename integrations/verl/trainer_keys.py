"""The trainer's part of the yaml: `algorithm.fastadv.trainer`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from fastadv.integrations.verl.keys import EstimatorOptions, key_error, mapping, number
from torch import Tensor

from fastadv import Outcome, soft_overlong_penalty, stop_properly_penalty, zero_on_cap

PATH = "algorithm.fastadv.trainer"
EXCLUSIONS = ("weight", "mask")
# Whose form of the soft overlong penalty: what it is multiplied by and where it ends.
OVERLONG_FORMS = {"paper": -1.0, "openrlhf": -1.0, "trl": -1.0, "verl": None}


@dataclass(frozen=True)
class Overlong:
    """The soft overlong penalty, `fastadv.soft_overlong_penalty`.

    Attributes:
        max_length: the longest response with the cache in it; None: actor_rollout_ref.rollout.response_length.
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
    """What the trainer does to rewards before any baseline, in this order.

    Attributes:
        zero_on_cap: "zero": a capped session gets 0; "keep": unless its reward is above solved_above; None: nothing.
        stop_properly: `fastadv.stop_properly_penalty`'s coefficient for capped sessions; None: nothing.
        overlong: the soft overlong penalty, added; None: nothing.
    """

    zero_on_cap: str | None = None
    stop_properly: float | None = None
    overlong: Overlong | None = None

    @property
    def active(self) -> bool:
        """Whether it does anything."""
        return self != RewardShaping()

    def apply(self, rewards: Tensor, lengths: Tensor, capped: Tensor, *, longest: int, solved_above: float) -> Tensor:
        """Shaped rewards of sessions.

        Args:
            rewards: `[S]`.
            lengths: `[S]` response tokens, those of tools among them, as verl counts.
            capped: `[S]` bool.
            longest: actor_rollout_ref.rollout.response_length.
            solved_above: the reward above which a session is solved.
        """
        if self.zero_on_cap is not None:
            rewards = zero_on_cap(rewards, capped, passed=self.zero_on_cap, passing=solved_above)
        if self.stop_properly is not None:
            rewards = stop_properly_penalty(rewards, capped, self.stop_properly)
        if self.overlong is not None:
            o = self.overlong
            most = longest if o.max_length is None else o.max_length
            rewards = rewards + soft_overlong_penalty(
                lengths, most, o.cache_length, factor=o.factor, floor=OVERLONG_FORMS[o.form]
            )
        return rewards


@dataclass(frozen=True)
class TrainerOptions:
    """Keys of `algorithm.fastadv.trainer`.

    Attributes:
        ending_field: key of an agent loop's extra_fields that says how the session ended; None: derived from caps.
        ending_system: whose words that field holds, a system of `fastadv.statuses.ending`.
        end_ids: tokens that end a reply; None: the tokenizer's end token; empty: not looked at.
        exclusion: "weight": excluded sessions get advantage 0 and stay in the denominators; "mask": they leave
            response_mask and loss_mask, and token denominators shrink (DAPO).
        reward: RewardShaping.
        record: file of step records; None: none is written.
        run: name of the run in the records.
        rollouts: folder for the rollouts of every step, in the portable format; None: none are written.
        own: `algorithm.fastadv`: the arm, what is solved, what a timeout is.
    """

    ending_field: str | None = None
    ending_system: str = "verl"
    end_ids: tuple[int, ...] | None = None
    exclusion: str = "weight"
    reward: RewardShaping = field(default_factory=RewardShaping)
    record: str | None = None
    run: str = ""
    rollouts: str | None = None
    own: EstimatorOptions = field(default_factory=EstimatorOptions)

    @property
    def timeout(self) -> Outcome:
        """What running out of wall-clock time is."""
        return Outcome[self.own.timeout.upper()]

    @classmethod
    def of(cls, algorithm: Any) -> TrainerOptions:
        """Reads and checks `algorithm.fastadv.trainer` of verl's configuration.

        Raises:
            ValueError: an unknown key, or a value that cannot be, with the key's whole name.
        """
        own = EstimatorOptions.of(algorithm)
        given = mapping(PATH, own.trainer.get("trainer"), tuple(f.name for f in fields(cls) if f.name != "own"))
        if given.get("exclusion", "weight") not in EXCLUSIONS:
            raise key_error(f"{PATH}.exclusion", given["exclusion"], f"it must be one of {', '.join(EXCLUSIONS)}")
        if given.get("end_ids") is not None:
            given["end_ids"] = tuple(int(number(f"{PATH}.end_ids", i)) for i in given["end_ids"])
        for name in ("ending_field", "ending_system", "record", "run", "rollouts"):
            if given.get(name) is not None and not isinstance(given[name], str):
                raise key_error(f"{PATH}.{name}", given[name], "it must be a text")
        given["reward"] = _shaping(given.get("reward"))
        return cls(**given, own=own)


def _shaping(value: Any) -> RewardShaping:
    path = f"{PATH}.reward"
    given = mapping(path, value, tuple(f.name for f in fields(RewardShaping)))
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
    return RewardShaping(**given)
