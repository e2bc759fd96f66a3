"""Sample filters, `--rollout-sample-filter-path`: which samples the loss leaves out, by how they ended.

A removed sample keeps its vote in its group's baseline: trainers set its mask to 0 after rewards are normalised. Miles
and slime run the filter where rollouts are assembled, so not in a replay of a dump (`--load-debug-rollout-data`): name
it as `fastadv.filter` too, and the reward hook applies it there and everywhere.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fastadv.integrations.miles.options import Options
from fastadv.integrations.miles.runs import find_runs

from fastadv import keep
from fastadv.coins import EXCLUSION
from fastadv.replay.readers.miles_turns import turns_of_runs

logger = logging.getLogger(__name__)

TRUNCATED = "truncated"
CUT_OFF = ("TimeLimitExceeded", "SequenceLengthLimitExceeded")  # metadata["exit_status"]


def is_cut_off(sample: Any) -> bool:
    """Whether time or length ended a sample: a cut that leaves whole turns only ends with status "completed"."""
    status = getattr(sample.status, "value", sample.status)
    return status == TRUNCATED or (sample.metadata or {}).get("exit_status") in CUT_OFF


def mask_truncated_zero_reward(args: Any, data: Sequence[Any]) -> None:
    """Removes cut-off samples without a positive reward; those with one stay, as in Miles' filter of this name.

    Args:
        args: the trainer's namespace; `reward_key` is read.
        data: groups of samples, or of lists of samples; or samples.
    """
    _remove(data, lambda sample: is_cut_off(sample) and _not_positive(args, sample))


def mask_truncated(args: Any, data: Sequence[Any]) -> None:
    """Removes all cut-off samples, whatever their reward."""
    _remove(data, is_cut_off)


def mask_random(args: Any, data: Sequence[Any]) -> None:
    """Removes `fastadv.filter_share` of what `mask_truncated_zero_reward` removes, by one coin a rollout.

    The coins are those of `fastadv.Arm(fraction=...)` with `fastadv.seed`: the same in every pass, process and replay.
    """
    options = Options.of(args)
    share, seed = options.filter_share, options.seed

    def hit(sample: Any) -> bool:
        if not (is_cut_off(sample) and _not_positive(args, sample)):
            return False
        own = getattr(sample, "rollout_id", None)
        own = sample.index if own is None else own
        if own is None:
            raise ValueError("a sample has neither rollout_id nor index, and a coin is tossed by one of them")
        return bool(keep(seed, [own], share, stream=EXCLUSION)[0])

    _remove(data, hit)


def mask_predictable(args: Any, data: Sequence[Any]) -> None:
    """Masks the turns from `fastadv.filter_turns` on in every sample, however it ended.

    Whether a turn is masked is known before its first token is sampled, so the gradient of what is left has no term
    that pays for being excluded: the control for the filters above.
    """
    options = Options.of(args)
    assert options.filter_turns is not None
    below = options.filter_turns
    for rollout in _rollouts(data):
        runs = find_runs([sample.loss_mask for sample in rollout], [sample.response_length for sample in rollout])
        leaves = [(sample.metadata or {}).get("leaf") if len(rollout) > 1 else None for sample in rollout]
        turns, begin, end = turns_of_runs(runs.counts, leaves), runs.begin.tolist(), runs.end.tolist()
        for sample, first, of_runs in zip(rollout, runs.offsets.tolist(), turns, strict=False):
            late = [first + run for run, turn in enumerate(of_runs) if turn >= below]
            if not late:
                continue
            mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
            for run in late:
                mask[begin[run] : end[run]] = [0] * (end[run] - begin[run])
            sample.loss_mask = mask


BY_NAME: dict[str, Callable[[Any, Sequence[Any]], None]] = {
    "truncated_zero_reward": mask_truncated_zero_reward,
    "truncated": mask_truncated,
    "random": mask_random,
    "predictable": mask_predictable,
}


def apply_filter(options: Options, args: Any, samples: Sequence[Any]) -> None:
    """Applies `fastadv.filter`; a second time changes nothing."""
    if options.filter is not None:
        BY_NAME[options.filter](args, samples)


def _flat(data: Iterable[Any]) -> Iterator[Any]:
    for item in data:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item


def _rollouts(data: Iterable[Any]) -> list[list[Any]]:
    """Samples by rollout."""
    found: dict[Any, list[Any]] = {}
    for row, sample in enumerate(_flat(data)):
        own = getattr(sample, "rollout_id", None)
        own = sample.index if own is None else own
        found.setdefault((sample.group_index, ("row", row) if own is None else own), []).append(sample)
    return list(found.values())


def _remove(data: Iterable[Any], hit: Callable[[Any], bool]) -> None:
    samples = list(_flat(data))
    removed = 0
    for sample in samples:
        if hit(sample):
            sample.remove_sample = True
            removed += 1
    logger.info("fastadv: %d of %d samples removed", removed, len(samples))


def _not_positive(args: Any, sample: Any) -> bool:
    """Whether a sample has no reward, or one of at most 0; False where a dictionary's key was not chosen."""
    value, key = sample.reward, getattr(args, "reward_key", None)
    if isinstance(value, dict):
        if not key:
            logger.warning("fastadv: rewards are dictionaries and --reward-key is not set: no sample is removed")
            return False
        value = value.get(key)
    return value is None or math.isnan(value) or value <= 0
