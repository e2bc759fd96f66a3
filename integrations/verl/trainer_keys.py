"""The trainer's part of the yaml: `algorithm.fastadv.trainer`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from fastadv.integrations.keys import key_error, mapping, number, text
from fastadv.integrations.reward_shaping import RewardShaping
from fastadv.integrations.verl.keys import EstimatorOptions

from fastadv import Outcome

PATH = "algorithm.fastadv.trainer"
EXCLUSIONS = ("weight", "mask")


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
            if given.get(name) is not None:
                given[name] = text(f"{PATH}.{name}", given[name])
        given["reward"] = RewardShaping.of(f"{PATH}.reward", given.get("reward"))
        return cls(**given, own=own)
