"""What a rollout step is logged with: `--custom-rollout-log-function-path` and its sister for evaluations.

Both add numbers to the trainer's own dictionary and let it log on, so that every tracker gets them; with
`fastadv.record` a line a step goes into a file that `fastadv record` reads (docs/step_record.md). With
`fastadv.updates` the line waits for the training process's numbers, update norm and clip ratio, and is written when the
next step is logged.
"""

from __future__ import annotations

import atexit
import importlib
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from fastadv.integrations.miles.filters import apply_filter
from fastadv.integrations.miles.options import Options
from fastadv.integrations.miles.samples import STALENESS, SampleBatch, SampledRollouts, check_samples, read_samples
from fastadv.integrations.miles.updates import lines_of
from fastadv.integrations.record_metrics import census_metrics, record_metrics

from fastadv import Batch, Outcome, RecordWriter, StepRecord

PREFIX = "rollout/fastadv/"
DROPPED, RESCUED = f"{PREFIX}stale_groups_dropped", f"{PREFIX}stale_groups_rescued"


def rollout_log(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    extra_metrics: MutableMapping[str, Any] | None,
    rollout_time: float,
) -> bool:
    """`--custom-rollout-log-function-path`: the step's record.

    It is called before the reward hook, and asks the arm what it will do; samples are left as they are, but for what
    `fastadv.filter` removes.

    Args:
        rollout_id: number of the step.
        args: the trainer's namespace.
        samples: `[S]`.
        extra_metrics: the trainer's dictionary, to which numbers are added under "rollout/fastadv/"; None: it has none.
        rollout_time: seconds.

    Returns:
        False: the trainer logs what it logs by itself, too.

    Raises:
        ValueError: `fastadv.record` with an estimator in place of an arm, which a record is of.
    """
    options = Options.of(args)
    check_samples(samples)
    apply_filter(options, args, samples)
    record = record_of(rollout_id, args, samples, options, extra_metrics or {}, rollout_time)
    if record is None:
        if options.record:
            raise ValueError("fastadv.record writes what an arm did: set fastadv.arm, or leave fastadv.record out")
        numbers = census_metrics(_whole(args, samples, options)[0], PREFIX)
    else:
        numbers = record_metrics(record, PREFIX)
        if options.record:
            _written(options, record)
    if extra_metrics is not None:
        extra_metrics.update(numbers)
    return False


def eval_rollout_log(
    rollout_id: int, args: Any, data: Mapping[str, Any], extra_metrics: MutableMapping[str, Any] | None
) -> bool:
    """`--custom-eval-rollout-log-function-path`: how the rollouts of each evaluation set ended.

    Args:
        rollout_id: number of the step.
        args: the trainer's namespace.
        data: by name of the set; those with "samples" are counted.
        extra_metrics: the trainer's dictionary, to which "eval/fastadv/<set>/..." is added.

    Returns:
        False: the trainer logs what it logs by itself, too.
    """
    options = replace(Options.of(args), arm=None, turns="none")
    for name, found in data.items():
        samples = found.get("samples") if isinstance(found, Mapping) else None
        if samples and extra_metrics is not None:
            check_samples(samples)
            extra_metrics.update(census_metrics(_whole(args, samples, options)[0], f"eval/fastadv/{name}/"))
    return False


_before: dict[str, float] = {}  # when the last record of these options was made


def _seconds_since(options_hash: str) -> float | None:
    """Seconds since the record before this one: a rollout and the training beside or before it; None for the first."""
    now = time.monotonic()
    last = _before.get(options_hash)
    _before[options_hash] = now
    return None if last is None else now - last


def record_of(
    step: int,
    args: Any,
    samples: Sequence[Any],
    options: Options,
    metrics: Mapping[str, Any],
    rollout_time: float,
) -> StepRecord | None:
    """The record of a step, so far as the rollout process knows; None for an estimator."""
    arm = options.arm
    if arm is None:
        return None
    sampled, read = _whole(args, samples, options)
    batch = replace(sampled.select(sampled.outcomes != Outcome.INFRA), rewards=read.batch.rewards)
    statistics = arm.freeze(batch, known=read.known)
    result = arm.apply(batch, statistics, known=read.known)
    extra: dict[str, Any] = {"rollout_s": rollout_time, "options_hash": options.hash}
    ages = [s.metadata[STALENESS] for s in samples if s.metadata and isinstance(s.metadata.get(STALENESS), int)]
    if ages:
        extra["staleness_mean"], extra["staleness_most"] = float(np.mean(ages)), max(ages)
    return StepRecord.of(
        batch, result, statistics, step=step, arm=arm, run=options.run, sampled=sampled,
        dropped_groups=metrics.get(DROPPED), kept_groups=metrics.get(RESCUED), trainer=_trainer(samples), extra=extra,
        wall_clock_s=_seconds_since(options.hash),
    )  # fmt: skip


def _whole(args: Any, samples: Sequence[Any], options: Options) -> tuple[Batch, SampleBatch]:
    """All rollouts with all of their tokens, those without a result too, and the outline of the others."""
    everything = SampledRollouts.of(args, samples, options)
    ordered = [samples[row] for rows in everything.members for row in rows]
    read = read_samples(args, ordered, options, turns=True)
    assert read.runs is not None
    assert read.turns is not None
    begins = np.cumsum([0, *(sample.response_length for sample in ordered)])  # [S + 1]
    first = np.repeat(begins[:-1], read.runs.counts) + read.runs.begin  # [R], in all tokens
    long = read.runs.end - read.runs.begin  # [R]
    within = np.arange(long.sum()) - np.repeat(np.cumsum(long) - long, long)
    turn_ids = np.full(int(begins[-1]), -1, np.int64)
    turn_ids[np.repeat(first, long) + within] = np.repeat(read.turns, long)
    ends = begins[np.cumsum([0, *(len(rows) for rows in everything.members)])]  # [A + 1]
    turns = torch.from_numpy(turn_ids)
    batch = Batch.of(
        mask=turns >= 0, turn_ids=turns, cu_seqlens=torch.from_numpy(ends), rewards=everything.rewards,
        group_ids=everything.groups, outcomes=everything.outcomes, capped=everything.capped,
        endings=everything.endings, row_ids=everything.row_ids,
    )  # fmt: skip
    return batch, read


def _trainer(samples: Sequence[Any]) -> dict[str, str]:
    """The trainer and its version, by the class of the samples."""
    name = type(samples[0]).__module__.partition(".")[0]
    if name not in ("miles", "slime"):
        return {}
    return {name: str(getattr(importlib.import_module(name), "__version__", "unknown"))}


def _written(options: Options, record: StepRecord) -> None:
    """Writes a record; where the training process tells what came of a step, when the next is made, or at exit."""
    assert options.record is not None
    if options.updates is None:
        _writer(options.record).write(record)
        return
    before = _held.get(options.record)
    if before is None:
        atexit.register(_complete, options.record, options.updates.file)
    else:
        _complete(options.record, options.updates.file)
    _held[options.record] = record


_held: dict[str, StepRecord] = {}  # by the file that they go into


def _complete(path: str, updates: str) -> None:
    """Writes the record that is held, one line a local update that the training process wrote about."""
    record = _held.pop(path, None)
    if record is None:
        return
    lines = lines_of(updates, record.step)
    for number, line in sorted(lines.items()):
        _writer(path).write(
            replace(
                record, clip_ratio=line.get("clip_ratio"), update_norm=line["update_norm"],
                learning_rate_multiplier=line["multiplier"], extra={**record.extra, "local_update": number},
            )
        )  # fmt: skip
    if not lines:
        _writer(path).write(record)


@lru_cache(maxsize=4)
def _writer(path: str) -> RecordWriter:
    return RecordWriter(path)
