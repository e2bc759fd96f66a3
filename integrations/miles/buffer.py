"""RESCUE's data buffer, `--custom-async-data-buffer-path fastadv.integrations.miles.RescueDataBuffer`.

Miles drops groups that are too stale. Which ones are depends on how long they took, so dropping them is a reward for
being quick. This buffer keeps a stale group with a known probability and hands a weight on that makes up for the
others; the arms that drop all of them or none differ from it by the arm's name and Miles' limit only.

It is Miles' own buffer, whichever of its layouts is installed, but for the question how stale a group is: it answers
with a number that Miles keeps, or drops, as the coin says.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fastadv.integrations.miles.checks import check_run
from fastadv.integrations.miles.options import Options
from fastadv.integrations.miles.samples import LOSS_WEIGHT, STALENESS, TAKEN

from fastadv import Arm
from fastadv.arms import Rescue
from fastadv.coins import RESCUE, keeps

logger = logging.getLogger(__name__)

MODULE = "miles.rollout.fully_async_data_buffer"
PREFIX = "rollout/fastadv/"


def stale_after(arm: Arm) -> int | None:
    """How many versions old a group may be to the arm; None: it does not ask."""
    if isinstance(arm.row_weights, Rescue):
        return arm.row_weights.stale_after
    return None if arm.condition is None else arm.condition.stale_after


@dataclass
class Tally:
    """What became of the groups since the last report. A group counts once a decision of the trainer's.

    Attributes:
        taken: groups that were looked at, those that were handed on and those that were dropped.
        dropped: of them.
        rescued: stale ones that were kept.
        staleness: true staleness of those that were handed on.
        weights: of them.
    """

    taken: int = 0
    dropped: int = 0
    rescued: int = 0
    staleness: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """By the names under which trackers see them."""
        found: dict[str, float] = {
            "groups_taken": self.taken,
            "stale_groups_dropped": self.dropped,
            "stale_groups_rescued": self.rescued,
        }
        if self.taken:
            found["mean_weight"] = sum(self.weights) / self.taken  # 1 in expectation, whatever is stale
        if self.staleness:
            found["true_staleness_mean"] = sum(self.staleness) / len(self.staleness)
            found["true_staleness_max"] = max(self.staleness)
        return {PREFIX + name: value for name, value in found.items()}


class Decisions:
    """What is kept and with which weight, as the run's arm says.

    Args:
        args: Miles' namespace.

    Raises:
        ValueError: an arm and flags of Miles that do not go together.
    """

    def __init__(self, args: Any) -> None:
        options = Options.of(args)
        check_run(args, options)
        arm = options.arm
        self.limit = getattr(args, "max_weight_staleness", None)
        self.rule = None if arm is None else arm.row_weights
        self.seed = options.seed if arm is None else arm.seed
        self.tally = Tally()
        self._drops: set[int] = set()  # groups, since `begin`
        if arm is None:
            return
        after = stale_after(arm)
        if arm.name == "oracle":
            raise ValueError(
                "fastadv.arm oracle trains on groups of the weights that are updated, and an asynchronous buffer hands "
                "on others: leave --fully-async out"
            )
        if arm.name == "never-drop" and self.limit is not None:
            raise ValueError(
                f"fastadv.arm never-drop keeps all groups, and --max-weight-staleness {self.limit} drops some: leave "
                "it out"
            )
        if after is not None and after != self.limit:
            raise ValueError(
                f"fastadv.arm {arm.name} calls a group stale after {after} versions, --max-weight-staleness is "
                f"{self.limit}: both have to say the same"
            )
        if isinstance(self.rule, Rescue):
            _check_rescue(args)

    def staleness(self, group: Any, measured: int | None) -> int | None:
        """What Miles' buffer is told for how stale a group is; the weight goes into the samples' metadata.

        A few microseconds. The coin is a function of the group's id, so that a group that is looked at twice, in
        another pass of the buffer or after a restart, is decided about once.
        """
        weight = 1.0
        told = measured
        if measured is not None and self.limit is not None and measured > self.limit:
            if isinstance(self.rule, Rescue) and keeps(self.seed, _group_id(group), self.rule.keep, stream=RESCUE):
                weight, told = 1 / self.rule.keep, self.limit
            else:
                weight = 0.0
                self._drops.add(id(group))
        for sample in samples_of(group):
            sample.metadata = {**(sample.metadata or {}), LOSS_WEIGHT: weight}
            if measured is not None:
                sample.metadata[STALENESS] = measured
        return told

    def begin(self) -> None:
        """Before groups are taken."""
        self._drops.clear()

    def handed_on(self, groups: list[Any]) -> None:
        """After they were: how many were looked at for each, and the tally."""
        drops = len(self._drops)
        self.tally.dropped += drops
        self.tally.taken += drops + len(groups)
        for number, group in enumerate(groups):
            for sample in samples_of(group):
                sample.metadata = {**(sample.metadata or {}), TAKEN: 1 + (drops if number == 0 else 0)}
            first = next(samples_of(group)).metadata
            weight = first.get(LOSS_WEIGHT, 1.0)
            self.tally.weights.append(weight)
            self.tally.rescued += weight > 1
            if STALENESS in first:
                self.tally.staleness.append(first[STALENESS])
        self._drops.clear()

    def metrics(self) -> dict[str, float]:
        """Since the last call."""
        found, self.tally = self.tally.metrics(), Tally()
        return found


def samples_of(group: Any) -> Iterator[Any]:
    """The samples of a group, whose items are samples or lists of them."""
    for item in group:
        if isinstance(item, (list, tuple)):
            yield from item
        else:
            yield item


def _group_id(group: Any) -> int | str:
    found: int | str | None = next(samples_of(group)).group_index
    if found is None:
        raise ValueError("a group's samples have no group_index, by which its coin is tossed")
    return found


def _check_rescue(args: Any) -> None:
    handler = getattr(args, "async_unused_samples_handler", None)
    if handler == "retry":
        raise ValueError(
            "--async-unused-samples-handler retry samples a dropped prompt again under its group's id: it meets the "
            "same coin, and the weights of the others no longer make up for it; use drop"
        )
    kept = [f"--{name.replace('_', '-')}" for name in ("entropy_coef", "kl_loss_coef") if getattr(args, name, 0)]
    if kept and (getattr(args, "use_kl_loss", False) or getattr(args, "entropy_coef", 0)):
        logger.warning(
            "fastadv: RESCUE's weights multiply advantages, so that %s keep weight 1 for every group",
            " and ".join(kept),
        )


@cache
def rescue_data_buffer() -> type:
    """The class, made of the buffer of the Miles that is installed.

    Raises:
        ImportError: there is no such buffer.
    """
    try:
        base: Any = importlib.import_module(MODULE).DefaultDataBuffer
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"RescueDataBuffer is made of {MODULE}.DefaultDataBuffer, which is not there: {error}"
        ) from error

    class RescueDataBuffer(base):
        """Miles' buffer of finished groups, where a stale group may be kept by a coin (see the module)."""

        def __init__(self, input: Any) -> None:
            self.decisions = Decisions(input.args)
            super().__init__(input)

        async def get(self, *args: Any, **context: Any) -> Any:
            """One entry, or a list of them in newer versions of Miles."""
            self.decisions.begin()
            taken = await super().get(*args, **context)
            entries = taken if isinstance(taken, list) else [taken]
            self.decisions.handed_on([entry.group for entry in entries])
            return taken

        def get_metrics(self) -> dict[str, float]:
            """Miles' metrics, in which rescued groups are as stale as the limit, and ours, in which they are not."""
            found: dict[str, float] = super().get_metrics()
            return {**found, **self.decisions.metrics()}

        def _staleness(self, group: Any, current_version: int | None) -> int | None:
            return self.decisions.staleness(group, super()._staleness(group, current_version))

    return RescueDataBuffer
