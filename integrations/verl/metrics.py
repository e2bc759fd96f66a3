"""What the trainer makes of a batch for its logs: an arm's run, and lines of the logging record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fastadv.integrations.verl.sessions import SessionBatch
from fastadv.integrations.verl.trainer_keys import TrainerOptions
from fastadv.integrations.verl.trainer_rows import TrainerRows
from torch import Tensor

from fastadv import Arm, ArmResult, FrozenStatistics, RecordWriter, StepRecord

# verl's names of what a record has fields for.
CLIP, NORM, SECONDS = "actor/pg_clipfrac", "actor/fastadv/update_norm", "step"
MULTIPLIER = "actor/fastadv/learning_rate_multiplier"


@dataclass(frozen=True, eq=False)
class ArmRun:
    """What an arm did to a batch.

    Attributes:
        arm: the arm.
        sessions: the sessions that it was applied to.
        result: what it made of them.
        statistics: those that it was made with.
    """

    arm: Arm
    sessions: SessionBatch
    result: ArmResult
    statistics: FrozenStatistics


def record_of(made: ArmRun, rows: TrainerRows, **given: Any) -> StepRecord:
    """The record of an arm's step, so far as the batch tells."""
    return StepRecord.of(
        made.sessions.batch, made.result, made.statistics, step=rows.step, arm=made.arm,
        train_version=rows.train_version, **given,
    )  # fmt: skip


class StepRecords:
    """Writes a line a local update to `algorithm.fastadv.trainer.record`."""

    def __init__(self, options: TrainerOptions) -> None:
        self.run = options.run
        self.writer = RecordWriter(options.record) if options.record else None

    def write(self, made: ArmRun, rows: TrainerRows, update: int, metrics: Mapping[str, Any], timing: Any) -> None:
        """One line, with what verl has measured since."""
        if self.writer is None:
            return
        from verl import __version__

        clip, norm, multiplier = (_number(metrics.get(name)) for name in (CLIP, NORM, MULTIPLIER))
        self.writer.write(
            record_of(
                made, rows, run=self.run, loss_metrics={} if clip is None else {"clip_fraction": clip},
                update_norm=norm, learning_rate_multiplier=multiplier, wall_clock_s=timing.get(SECONDS),
                trainer={"verl": __version__}, extra={"local_update": update},
            )
        )  # fmt: skip


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def removed_rows(run: ArmRun, exclusion: str) -> Tensor | None:
    """Rows whose masks are to be 0, `[B]` bool: of groups that the arm removes and, with exclusion "mask", of sessions
    that it excludes. None: none."""
    gone = torch.zeros(run.sessions.batch.num_rollouts, dtype=torch.bool)
    if run.result.removed is not None:
        gone |= run.result.removed
    if exclusion == "mask":
        gone |= run.result.excluded
    if not bool(gone.any()):
        return None
    return gone[run.sessions.rollout.clamp(min=0)] & (run.sessions.rollout >= 0)
