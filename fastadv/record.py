"""The logging record: what one training step did, in numbers that arms, trainers and restarts can be compared by.

docs/step_record.md describes every field; fastadv/record_file.py writes and reads the lines.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastadv.arms import Arm, ArmResult
from fastadv.arms.text import arm_settings
from fastadv.batch import Batch
from fastadv.outcomes import Outcome
from fastadv.record_measures import measure, read
from fastadv.statistics import FrozenStatistics

SCHEMA = 1  # a field is renamed, removed or changed in meaning only with another number; fields may be added


@dataclass(frozen=True)
class Counts:
    """Rollouts by outcome.

    Attributes:
        solved, failed, budget, infra: number of rollouts, see Outcome.
    """

    solved: int
    failed: int
    budget: int
    infra: int


@dataclass(frozen=True)
class ByOutcome:
    """A mean over rollouts, over all and by how they ended; None over no rollout.

    Attributes:
        all, solved, failed, budget, infra: means.
    """

    all: float | None = None
    solved: float | None = None
    failed: float | None = None
    budget: float | None = None
    infra: float | None = None


@dataclass(frozen=True)
class Spread:
    """How a number lies over prompts.

    Attributes:
        prompts: that have the number.
        mean, sd, least, median, most: of it; the standard deviation is the population's. None without a prompt.
    """

    prompts: int
    mean: float | None = None
    sd: float | None = None
    least: float | None = None
    median: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class RecordedStaleness:
    """What a record has of `fastadv.monitoring.Staleness`: how old the weights were that sampled, in versions.

    Attributes:
        mean, most: of the trained version less the one that sampled, over sampled tokens.
        in_flight: mean over sampled tokens of what passed until the last one of their rollout.
        in_queue: mean over sampled tokens of what passed since; with `in_flight` it makes `mean`.
        dropped_groups: groups that were too old and left out; None: not told.
        kept_groups: groups that were too old and kept by a coin; None: not told.
    """

    mean: float | None = None
    most: float | None = None
    in_flight: float | None = None
    in_queue: float | None = None
    dropped_groups: int | None = None
    kept_groups: int | None = None


@dataclass(frozen=True)
class Bucket:
    """A rate over one bucket, of prompts by difficulty for example.

    Attributes:
        name: of the bucket.
        value: the rate; None without a rollout.
        n: rollouts that it is over.
    """

    name: str
    value: float | None
    n: int


@dataclass(frozen=True)
class LongCorrect:
    """Long solved rollouts in one cell of soft penalty by clip-higher.

    Attributes:
        penalised: the soft overlong penalty took from their reward.
        clipped: the upper clip took their gradient, of a token at least.
        n: rollouts.
        mean: of their advantages; None without one.
    """

    penalised: bool
    clipped: bool
    n: int
    mean: float | None


@dataclass(frozen=True)
class StepRecord:
    """One training step. Make one with `StepRecord.of`, or by hand; a number that is not finite becomes None.

    "Sampled tokens" are the tokens that the model chose. Rates are shares of rollouts, from 0 to 1. "Within prompts" is
    about each prompt's own mean, prompts weighted by their tokens.

    Attributes:
        step: number of the update, from 0 or from 1 as the trainer counts.
        arm: name of the arm.
        arm_settings: every field of the arm but its name, as `fastadv.arm_to_dict` writes them.
        run: name of the run, to tell seeds apart.
        versions: of "fastadv", "torch" and whatever the trainer names.
        statistics_hash: SHA-256 of the frozen statistics, `FrozenStatistics.hash`.
        coin_seed: of the coins that the arm or a sampler tossed.
        prompts: number of prompts.
        mixed_prompts: prompts whose rewards differ, all others have no advantage.
        rollouts: number of rollouts, those without a result too.
        tokens: sampled tokens.
        response_tokens: sampled tokens and tool results.
        census: rollouts by outcome.
        success_rate: share solved.
        submitted_failure_rate: share submitted and wrong.
        cap_hit_rate: share cut off by a cap, solved or not.
        reward: mean, of the rollouts with a result.
        response_length: mean response tokens, by outcome.
        turns: mean number of turns, by outcome.
        ran_tests: share that ran tests before it submitted, by outcome; None: not told.
        clip_ratio: share of the loss's tokens that were clipped.
        update_norm: Euclidean length of the change of all parameters.
        learning_rate_multiplier: of the matched update; None where there is none.
        loss_metrics: other metrics of the loss, by name.
        advantage_variance: per sampled token, of the weighted advantage within prompts.
        advantage_square: its mean square per sampled token.
        reference_variance: the same of the arm without mask and with a leave-one-out mean, on the same statistics.
        reference_square: of that arm.
        excluded_rate: share of the trained rollouts that the arm takes out of the loss.
        excluded_token_rate: share of their sampled tokens.
        b: realised baseline, in reward: mean over rollouts of their tokens' mean baseline, excluded rollouts too.
        b_by_prompt: the same, over each prompt's rollouts.
        b_over_sigma: b over the standard deviation of rewards within prompts, which rollouts weight.
        b_over_sigma_by_prompt: each prompt's b over its population standard deviation, where that is not 0.
        subsidy: what running into the cap is paid, in reward: mean over capped, unsolved rollouts of (1 - w) b, w the
            rollout's weight: b where the arm excludes them and 0 where it leaves them as they are. 0 for an arm that
            masks nothing by outcome, None for another, where no rollout was capped.
        staleness: of the sampling weights; None: not told.
        wall_clock_s: seconds that the step took.
        kept_s: seconds spent on rollouts that the loss has, sandboxes included.
        excluded_s: seconds spent on rollouts that it has not, those without a result too.
        cost: what else the step used, by name and unit, "gpu_hours" for example.
        mask_share_by_difficulty: share of rollouts that the mask takes, by difficulty of their prompt.
        truncation_rate_by_difficulty: share of rollouts that a cap cut off, by difficulty of their prompt.
        long_correct: long solved rollouts, by soft penalty and upper clip.
        extra: whatever else the trainer logs.
    """

    step: int
    arm: str
    arm_settings: dict[str, Any]
    run: str
    versions: dict[str, str]
    statistics_hash: str | None
    coin_seed: int | None
    prompts: int
    mixed_prompts: int
    rollouts: int
    tokens: int
    response_tokens: int
    census: Counts
    success_rate: float | None
    submitted_failure_rate: float | None
    cap_hit_rate: float | None
    reward: float | None
    response_length: ByOutcome
    turns: ByOutcome
    b: float | None
    b_by_prompt: Spread
    b_over_sigma: float | None
    b_over_sigma_by_prompt: Spread
    subsidy: float | None
    advantage_variance: float | None
    advantage_square: float | None
    reference_variance: float | None
    reference_square: float | None
    excluded_rate: float | None
    excluded_token_rate: float | None
    ran_tests: ByOutcome | None = None
    clip_ratio: float | None = None
    update_norm: float | None = None
    learning_rate_multiplier: float | None = None
    loss_metrics: dict[str, float | None] = field(default_factory=dict)
    staleness: RecordedStaleness | None = None
    wall_clock_s: float | None = None
    kept_s: float | None = None
    excluded_s: float | None = None
    cost: dict[str, float | None] = field(default_factory=dict)
    mask_share_by_difficulty: tuple[Bucket, ...] = ()
    truncation_rate_by_difficulty: tuple[Bucket, ...] = ()
    long_correct: tuple[LongCorrect, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, hint in hints(StepRecord).items():
            object.__setattr__(self, name, checked(getattr(self, name), hint, name))
        taken = sorted(({"schema", *hints(StepRecord)} - {"extra"}) & set(self.extra))
        if taken:
            raise ValueError(f"StepRecord: extra has {taken[0]!r}, which is a field; choose another name")

    @classmethod
    def of(
        cls,
        batch: Batch,
        result: ArmResult,
        statistics: FrozenStatistics,
        *,
        step: int,
        arm: Arm,
        run: str = "",
        sampled: Batch | None = None,
        loss_metrics: Mapping[str, Tensor | float] | None = None,
        update_norm: Tensor | float | None = None,
        learning_rate_multiplier: Tensor | float | None = None,
        coin_seed: int | None = None,
        train_version: int | None = None,
        dropped_groups: int | None = None,
        kept_groups: int | None = None,
        ran_tests: Tensor | None = None,
        seconds: Tensor | None = None,
        wall_clock_s: float | None = None,
        cost: Mapping[str, float] | None = None,
        mask_share_by_difficulty: Sequence[tuple[str, float, int]] = (),
        truncation_rate_by_difficulty: Sequence[tuple[str, float, int]] = (),
        long_correct: Sequence[tuple[bool, bool, int, float]] = (),
        trainer: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> StepRecord:
        """Measures a step from its batch and takes the rest as it is given. The device is waited for once, and once
        more for the statistics' hash where nobody asked for it before.

        Args:
            batch: what the arm was applied to: rollouts with a result.
            result: what the arm made of it.
            statistics: those that it was made with.
            step: number of the update.
            arm: the arm.
            run: name of the run.
            sampled: everything that was sampled, rollouts without a result too; census, turns, lengths, tests, seconds
                and staleness are of it. None: the batch.
            loss_metrics: `LossOutput.metrics`; "clip_fraction" becomes the clip ratio.
            update_norm: length of the change of all parameters.
            learning_rate_multiplier: of the matched update.
            coin_seed: None: the arm's, if it tosses coins.
            train_version: of the weights that were trained; with `sampled.versions` it gives the staleness.
            dropped_groups, kept_groups: groups too old that were left out, and kept by a coin.
            ran_tests: `[B]` bool of `sampled`: ran tests before it submitted.
            seconds: `[B]` of `sampled`: what each rollout took. Row ids say which of them the batch has.
            wall_clock_s: seconds that the step took.
            cost: what else it used, by name.
            mask_share_by_difficulty, truncation_rate_by_difficulty: buckets as (name, rate, rollouts).
            long_correct: cells as (penalised, clipped, rollouts, mean advantage).
            trainer: versions of whatever the trainer wants to be known.
            extra: whatever else is to be in the line.

        Returns:
            The record.

        Raises:
            ValueError, TypeError: parts that do not fit, seconds or tests of another number of rollouts, a metric that
                is not one number, a key of `extra` that is a field.
        """
        from fastadv import __version__

        scalars = {f"loss/{name}": value for name, value in (loss_metrics or {}).items()}
        for name, value in (("update_norm", update_norm), ("multiplier", learning_rate_multiplier)):
            if value is not None:
                scalars[name] = value
        sampled = batch if sampled is None else sampled
        tensors = measure(
            batch, result, statistics, arm, sampled, train_version=train_version, ran_tests=ran_tests, seconds=seconds,
            scalars=scalars,
        )  # fmt: skip
        m = read(tensors)
        loss: dict[str, float | None] = {name: m[f"loss/{name}"] for name in loss_metrics or {}}

        def by_outcome(name: str) -> ByOutcome:
            return ByOutcome(*(m[f"{name}/{which}"] for which in ("all", *OUTCOMES)))

        def spread(name: str) -> Spread:
            parts = ("mean", "sd", "least", "median", "most")
            return Spread(int(m[f"{name}/prompts"]), *(m[f"{name}/{part}"] for part in parts))

        staleness = None
        told = "staleness/mean" in m
        if told or dropped_groups is not None or kept_groups is not None:
            parts = ("mean", "most", "in_flight", "in_queue")
            ages = {part: m[f"staleness/{part}"] for part in parts if told}
            staleness = RecordedStaleness(**ages, dropped_groups=dropped_groups, kept_groups=kept_groups)
        return cls(
            step=step,
            arm=arm.name,
            arm_settings=arm_settings(arm),
            run=run,
            versions={"fastadv": __version__, "torch": torch.__version__, **(trainer or {})},
            statistics_hash=statistics.hash,
            coin_seed=arm.seed if coin_seed is None and arm.tosses else coin_seed,
            prompts=sampled.groups.num_groups,
            mixed_prompts=int(m["mixed_prompts"]),
            rollouts=sampled.num_rollouts,
            tokens=int(m["tokens"]),
            response_tokens=int(m["response_tokens"]),
            census=Counts(*(int(m[f"census/{name}"]) for name in OUTCOMES)),
            success_rate=m["success_rate"],
            submitted_failure_rate=m["submitted_failure_rate"],
            cap_hit_rate=m["cap_hit_rate"],
            reward=m["reward"],
            response_length=by_outcome("length"),
            turns=by_outcome("turns"),
            b=m["b"],
            b_by_prompt=spread("b"),
            b_over_sigma=m["b_over_sigma"],
            b_over_sigma_by_prompt=spread("b_over_sigma"),
            subsidy=m["subsidy"],
            advantage_variance=m["arm/variance"],
            advantage_square=m["arm/square"],
            reference_variance=m["reference/variance"],
            reference_square=m["reference/square"],
            excluded_rate=m["excluded_rate"],
            excluded_token_rate=m["excluded_token_rate"],
            ran_tests=None if ran_tests is None else by_outcome("ran_tests"),
            clip_ratio=loss.pop("clip_fraction", None),
            update_norm=m.get("update_norm"),
            learning_rate_multiplier=m.get("multiplier"),
            loss_metrics=loss,
            staleness=staleness,
            wall_clock_s=wall_clock_s,
            kept_s=m.get("kept_s"),
            excluded_s=m.get("excluded_s"),
            cost=dict(cost or {}),
            mask_share_by_difficulty=tuple(Bucket(*bucket) for bucket in mask_share_by_difficulty),
            truncation_rate_by_difficulty=tuple(Bucket(*bucket) for bucket in truncation_rate_by_difficulty),
            long_correct=tuple(LongCorrect(*cell) for cell in long_correct),
            extra=dict(extra or {}),
        )


OUTCOMES = tuple(outcome.name.lower() for outcome in Outcome)


# ---- what a field may hold -------------------------------------------------------------------------------------------

Kind = TypeVar("Kind")


@cache
def hints(kind: Any) -> dict[str, Any]:
    """Types of a dataclass's fields, by name."""
    return typing.get_type_hints(kind)


def checked(value: Any, hint: Any, where: str) -> Any:
    """The value as its field has it: numbers that are not finite as None, lists as tuples, objects as dataclasses.

    Raises:
        ValueError: a value of another type, naming the field.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _json(value, where)
    if origin is types.UnionType:
        missing = value is None or (isinstance(value, float) and not math.isfinite(value))
        return None if missing else checked(value, parts[0], where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(checked(item, parts[0], f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"field {where!r}: key {key!r} is no text")
        return {key: checked(item, parts[1], f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, (dict, hint)):  # type: ignore[arg-type]
        found = value if isinstance(value, dict) else vars(value)
        return built(typing.cast("type[Any]", hint), found, where)
    if hint in (int, float) and isinstance(value, int) and not isinstance(value, bool):
        try:
            as_float = float(value)
        except OverflowError as error:  # and no plot or table could hold it
            raise ValueError(
                f"field {where!r} is an integer with {len(f'{abs(value):x}')} hexadecimal digits"
            ) from error
        return as_float if hint is float else value
    if hint is float and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"field {where!r} is {value}; it must be a finite number")
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    shown = hint.__name__ if isinstance(hint, type) and origin is None else str(hint)
    raise ValueError(f"field {where!r} is {value!r:.100}; it must be {_WORDS.get(shown, shown)}")


_WORDS = {"int": "an integer", "float": "a number", "str": "a text", "bool": "true or false"}


def built(kind: type[Kind], values: dict[str, Any], where: str) -> Kind:
    """A dataclass of a record from its fields by name.

    Raises:
        ValueError: a field that is missing, unknown or of another type.
    """
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ValueError(f"field {where!r} has {name!r}; it has {', '.join(known)}")
    for name, one in known.items():
        if name not in values and one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            raise ValueError(f"field {f'{where}.{name}'.lstrip('.')!r} is missing")
    prefix, types_ = f"{where}." if where else "", hints(typing.cast("Any", kind))
    return kind(**{name: checked(value, types_[name], prefix + name) for name, value in values.items()})


DEPTH = 100  # of lists and objects within each other: all that reads, copies or writes them is recursive


def _json(value: Any, where: str, depth: int = 0) -> Any:
    """A value of the trainer's own: whatever JSON can hold."""
    if depth > DEPTH:
        raise ValueError(f"field {where[: where.find('[') + 1 or 40]!r} is nested too deeply")
    if isinstance(value, (list, tuple)):
        return [_json(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {str(key): _json(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"field {where!r} is a {type(value).__name__}; JSON holds numbers, texts, lists and objects")
