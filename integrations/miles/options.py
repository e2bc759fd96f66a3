"""What the hooks are told: the mapping `fastadv:` of the YAML that `--custom-config-path` names."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastadv.integrations import keys
from fastadv.integrations.miles.projections import Projections
from fastadv.integrations.miles.updates import Updates
from fastadv.integrations.reward_shaping import RewardShaping

from fastadv import Arm, Outcome
from fastadv.arms.text import arm_settings, arm_to_dict
from fastadv.losses import KL, PRESETS, Correction, LossConfig, SequenceMask

logger = logging.getLogger(__name__)

ROOT = "fastadv"
VARIABLE = "FASTADV_CONFIG"  # a YAML file, for programs that have no --custom-config-path
EXCLUSIONS = ("weight", "mask")
DIVISORS = ("candidates", "kept", "hajek")
DENOMINATORS = ("trainer", "trained")
TIMEOUTS = ("budget", "infra")
ROUTES = ("none", "init", "flags", "samples")
FILTERS = ("truncated_zero_reward", "truncated", "predictable", "random")


@dataclass(frozen=True)
class Options:
    """Keys of `fastadv:`. The reward hook needs `arm` or `estimator`; the hooks of the loss do without.

    Attributes:
        arm: written as `fastadv.named_arm` or `fastadv.arm_from_dict` takes it.
        estimator: a name of `fastadv.ESTIMATORS` that gives a rollout one advantage.
        options: of that estimator.
        exclusion: "weight": what an arm excludes gets advantage 0 and stays in the denominators; "mask": it becomes
            `remove_sample`, and denominators over tokens shrink.
        divisor: what stands for the groups that an asynchronous buffer dropped: "candidates", all groups that were
            taken from it (unbiased); "kept", nobody (larger steps); "hajek", the sum of weights (biased).
        denominator: "trainer": the trainer's own, where samples that a mask or a filter took out shrink the step: they
            count among its rollouts, and as a token each among its tokens; "trained": what they count is given back
            to the others' advantages.
        solved_above: a rollout with a reward above this is solved.
        timeout: what running out of wall-clock time is, "budget" (as in Miles' own filter of cut-off samples) or
            "infra".
        reward: what is done to rewards before any baseline.
        turns: how advantages of turns reach the trainer: "none" (an arm that has them is an error), "init" (Miles:
            --custom-megatron-init-path; slime: --custom-advantage-function-path), "flags" (Miles: per-token
            opd_reverse_kl), "samples" (every sample is one turn).
        filter: a filter of samples that the reward hook applies, in replays too: one of FILTERS.
        filter_share: of the filter "random", which share of the cut-off samples it masks.
        filter_turns: of the filter "predictable": rollouts of more turns than this are masked by a rule that is known
            beforehand; see `filters`.
        loss: of `custom_loss`: a mapping of `fastadv.LossConfig`'s fields, on top of `preset`, a name of
            `fastadv.PRESETS`; None: what the trainer's flags say.
        correction: of `tis`: `fastadv.Correction`s; None: what the trainer's flags say.
        horizon: constant length in tokens, of `pg_loss_reducer`.
        projections, updates: of `before_train_step`; None: it does not do that.
        seed: of all coins.
        record: a file of step records; None: none is written.
        run: the run's name in the records.
    """

    arm: Arm | None = None
    estimator: str | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    exclusion: str = "weight"
    divisor: str = "candidates"
    denominator: str = "trainer"
    solved_above: float = 0.0
    timeout: str = "budget"
    reward: RewardShaping = field(default_factory=RewardShaping)
    turns: str = "none"
    filter: str | None = None
    filter_share: float = 1.0
    filter_turns: int | None = None
    loss: LossConfig | None = None
    correction: tuple[Correction, ...] = ()
    horizon: float | None = None
    projections: Projections | None = None
    updates: Updates | None = None
    seed: int = 0
    record: str | None = None
    run: str = ""
    hash: str = ""

    @classmethod
    def of(cls, args: Any) -> Options:
        """The options of a run, read once and printed once.

        Args:
            args: the trainer's namespace, into which `--custom-config-path` put the mapping as `args.fastadv`; where it
                is not there, the file that the environment's FASTADV_CONFIG names is read.

        Raises:
            ValueError: no mapping, an unknown key with the valid ones, a value that the key does not take.
        """
        written = getattr(args, ROOT, None)
        if written is None:
            written = _from_file()
        return _read(json.dumps(keys.plain(written), sort_keys=True, default=str))

    @classmethod
    def from_mapping(cls, written: Any) -> Options:
        """Reads the mapping itself. Raises as `of` does."""
        given = {k: v for k, v in keys.mapping(ROOT, written, tuple(READERS)).items() if v is not None}
        if isinstance(given.get("arm"), str):
            seed = keys.integer(f"{ROOT}.seed", given.get("seed", 0))
            given["arm"] = keys.arm(f"{ROOT}.arm", given["arm"], seed=seed)
        values = {key: READERS[key](f"{ROOT}.{key}", value) for key, value in given.items()}
        options = cls(**values, hash=hashlib.sha256(json.dumps(_shown(values), sort_keys=True).encode()).hexdigest())
        options._check(given)
        return options

    def _check(self, given: Mapping[str, Any]) -> None:
        if self.arm is not None and self.estimator is not None:
            raise ValueError(f"{ROOT}: one of {ROOT}.arm and {ROOT}.estimator says what advantages are; both are given")
        needs = (
            ("options", self.estimator is not None, "estimator"),
            ("filter_share", self.filter == "random", "filter: random"),
            ("filter_turns", self.filter == "predictable", "filter: predictable"),
        )
        for key, fits, other in needs:
            if key in given and not fits:
                raise ValueError(f"{ROOT}.{key} is set, but only {ROOT}.{other} reads it")
        if self.filter == "predictable" and self.filter_turns is None:
            raise ValueError(f"{ROOT}.filter is predictable; {ROOT}.filter_turns says which turns stay")

    @property
    def timeout_outcome(self) -> Outcome:
        """What running out of wall-clock time is."""
        return Outcome[self.timeout.upper()]

    def summary(self) -> str:
        """One line a key that is not its default, and the hash of them all."""
        lines = [f"fastadv options {self.hash[:12]}"]
        lines += [f"  {key}: {_said(value)}" for key, value in self._set().items()]
        return "\n".join(lines)

    def _set(self) -> dict[str, Any]:
        plain = Options()
        return {key: getattr(self, key) for key in READERS if getattr(self, key) != getattr(plain, key)}


def _arm(path: str, value: Any) -> Arm:
    return value if isinstance(value, Arm) else keys.arm(path, value)


def _loss(path: str, value: Any) -> LossConfig:
    """A mapping of LossConfig's fields; a text is a preset."""
    given = (
        {"preset": value} if isinstance(value, str) else dict(keys.plain(value)) if isinstance(value, Mapping) else None
    )
    if given is None:
        raise keys.key_error(
            path, value, "it must be the name of a preset, or a mapping of fastadv.LossConfig's fields"
        )
    preset = given.pop("preset", "ppo")
    if preset not in PRESETS:
        raise keys.key_error(f"{path}.preset", preset, f"it must be one of {', '.join(PRESETS)}")
    if given.get("correction") is not None:
        given["correction"] = keys.made_all(f"{path}.correction", Correction, given["correction"])
    for name, kind in (("kl", KL), ("sequence_mask", SequenceMask)):
        if given.get(name) is not None:
            given[name] = keys.made(f"{path}.{name}", kind, given[name])
    for name in ("loss_agg_mode", "denominator", "horizon"):
        if name in given:
            raise keys.key_error(f"{path}.{name}", given[name], "the trainer sums and divides by itself; leave it out")
    try:
        return PRESETS[preset].but(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {str(error).removeprefix('LossConfig: ')}") from error


def _positive(path: str, value: Any) -> float:
    if keys.finite(path, value) <= 0:
        raise keys.key_error(path, value, "it must be positive")
    return float(value)


READERS: dict[str, Callable[[str, Any], Any]] = {
    "arm": _arm,
    "estimator": keys.estimator,
    "options": keys.options_mapping,
    "exclusion": keys.one_of(*EXCLUSIONS),
    "divisor": keys.one_of(*DIVISORS),
    "denominator": keys.one_of(*DENOMINATORS),
    "solved_above": keys.finite,
    "timeout": keys.one_of(*TIMEOUTS),
    "reward": RewardShaping.of,
    "turns": keys.one_of(*ROUTES),
    "filter": keys.one_of(*FILTERS),
    "filter_share": keys.share,
    "filter_turns": keys.count,
    "loss": _loss,
    "correction": lambda path, value: keys.made_all(path, Correction, value),
    "horizon": _positive,
    "projections": Projections.of,
    "updates": Updates.of,
    "seed": keys.integer,
    "record": keys.text,
    "run": keys.text,
}


def _shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they are printed and hashed."""
    return {key: _plain(value) for key, value in values.items()}


def _said(value: Any) -> Any:
    """A value as a person wrote it: of an arm what is not the default."""
    return arm_to_dict(value) if isinstance(value, Arm) else _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Arm):
        return {"name": value.name, **arm_settings(value)}
    return dict(value) if isinstance(value, Mapping) else str(value)


@lru_cache(maxsize=16)
def _read(text: str) -> Options:
    options = Options.from_mapping(json.loads(text))
    logger.info(options.summary())
    return options


def _from_file() -> Any:
    path = os.environ.get(VARIABLE)
    if not path:
        raise ValueError(
            f"there is no mapping {ROOT!r} for fastadv's hooks: write one into the YAML of --custom-config-path, or "
            f"into a file that the environment's {VARIABLE} names"
        )
    import yaml

    written = yaml.safe_load(Path(path).read_text())
    return written.get(ROOT, written) if isinstance(written, dict) else written
