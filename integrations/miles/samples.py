"""Samples of Miles and slime as a batch of rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fastadv.integrations.miles.options import Options
from fastadv.integrations.miles.runs import Runs, find_runs
from torch import Tensor

from fastadv import ESTIMATORS, Arm, Batch, outcomes_of
from fastadv.arms import Known, Rescue
from fastadv.outcomes import Outcome
from fastadv.replay.readers.miles_turns import last_sample, turns_of_runs
from fastadv.statuses import sample_ending

# What `RescueDataBuffer` writes into the metadata of a group's samples.
LOSS_WEIGHT, STALENESS, TAKEN = "fastadv_loss_weight", "fastadv_staleness", "fastadv_groups_taken"


@dataclass(frozen=True, eq=False)
class SampledRollouts:
    """All rollouts of samples, in order of appearance, those without a result too.

    Attributes:
        members: rows of the samples of each rollout, `[A]` lists.
        number: `[S]` int64, rollout of each sample.
        rewards: `[A]` float64, as they were given; NaN for none.
        groups: labels of their groups, `[A]`.
        outcomes, endings: `[A]` int64.
        capped: `[A]` bool.
        row_ids: `[A]` int64, what coins are tossed by.
    """

    members: list[list[int]]
    number: Tensor  # [S]
    rewards: Tensor  # [A]
    groups: list[int | str]
    outcomes: Tensor  # [A]
    endings: Tensor  # [A]
    capped: Tensor  # [A]
    row_ids: Tensor  # [A]

    @classmethod
    def of(cls, args: Any, samples: Sequence[Any], options: Options) -> SampledRollouts:
        """Reads them; see `read_samples`."""
        number, members = _rollouts(args, samples)
        last = [_last(samples, rows) for rows in members]
        rewards = torch.tensor([_shared_reward(args, samples, rows) for rows in members], dtype=torch.float64)
        endings = torch.tensor([_ending(samples[row], row) for row in last], dtype=torch.int64)
        outcomes, capped = outcomes_of(
            endings, rewards, solved_above=options.solved_above, timeout=options.timeout_outcome
        )
        groups = [_group(samples[row], row, args, len(samples)) for row in last]
        row_ids = torch.tensor([_row_id(samples[row], row) for row in last], dtype=torch.int64)
        return cls(members, number, rewards, groups, outcomes, endings, capped, row_ids)

    @property
    def has_result(self) -> Tensor:
        """`[A]` bool."""
        return self.outcomes != Outcome.INFRA


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """Samples as rollouts. A rollout is the samples that share a `rollout_id` (else `index`) within a group.

    The batch is an outline: one token a turn where turns matter, one a rollout where they do not, so that nobody reads
    token lists for advantages of rollouts.

    Attributes:
        samples: as the hook got them, `[S]`.
        rollout: `[S]` int64, rollout of each sample in `batch`; -1 for samples of a rollout without a result.
        raw_rewards: `[S]` rewards as they were given; 0.0 for none.
        batch: the rollouts with a result, in order of appearance; rewards shaped.
        lengths: `[B]` int64, response tokens of each rollout.
        sampled: `[B]` int64, those that the model chose; None: masks were not looked at.
        known: what an arm may ask besides.
        everything: all rollouts, of which `batch` has those with a result.
        loss_weights: `[B]` float64, of the buffer; None: no buffer of ours gave these samples.
        taken: groups that were taken from the buffer to get these; None: not known.
        runs: of the masks; None: turns were not looked at.
        turns: `[R]` int64, which turn of its rollout each run is; None with `runs`.
    """

    samples: Sequence[Any]
    rollout: Tensor  # [S]
    raw_rewards: list[float]
    batch: Batch
    lengths: Tensor  # [B]
    known: Known
    everything: SampledRollouts
    loss_weights: Tensor | None = None  # [B]
    taken: int | None = None
    runs: Runs | None = None
    turns: np.ndarray | None = None  # [R]
    sampled: Tensor | None = None  # [B]

    def at_samples(self, values: Tensor) -> Tensor:
        """A value of each rollout at its samples, `[S]` float64; 0 for samples without a result."""
        padded = torch.cat([values.to(torch.float64), torch.zeros(1, dtype=torch.float64)])
        return padded[self.rollout]


def check_samples(samples: Sequence[Any]) -> None:
    """Raises ValueError, naming the sample, where a field cannot be what it is: dumps may hold anything."""
    for row, sample in enumerate(samples):
        length, metadata = sample.response_length, sample.metadata
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise ValueError(f"sample {row}: response_length is {length!r}; it must be a number of tokens")
        if metadata is not None and not isinstance(metadata, dict):
            raise ValueError(f"sample {row}: metadata is a {type(metadata).__name__}; it must be a dictionary")
        for name in ("group_index", "rollout_id", "index"):
            value = getattr(sample, name, None)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, str))):
                raise ValueError(f"sample {row}: {name} is {value!r}; it must be an integer or a text")


def reads_turns(options: Options) -> bool:
    """Whether masks are looked at: for advantages of turns, and for estimators that count tokens or turns."""
    if options.arm is not None:
        return options.arm.level == "turn"
    needs = () if options.estimator is None else ESTIMATORS[options.estimator].needs
    return "turn_ids" in needs or any("lengths" in need for need in needs)


def read_samples(args: Any, samples: Sequence[Any], options: Options, *, turns: bool | None = None) -> SampleBatch:
    """Makes the batch of samples that `check_samples` let through.

    Args:
        args: the trainer's namespace; `reward_key`, `n_samples_per_prompt` are read.
        samples: `[S]` samples, of groups of any size and order.
        options: the run's.
        turns: whether masks are looked at; None: where advantages differ by turn.

    Raises:
        ValueError: rewards that differ within a rollout, a dictionary as reward without --reward-key, samples without
            groups, a loss mask that is no mask, versions that an arm needs and nobody wrote.
    """
    everything = SampledRollouts.of(args, samples, options)
    has_result, rewards = everything.has_result, everything.rewards
    kept = has_result.nonzero().squeeze(1).tolist()
    place = torch.where(has_result, has_result.cumsum(0) - 1, -1)[everything.number]  # [S]
    runs = turn_of_run = sampled = None
    reached = np.ones(len(kept), np.int64)
    if reads_turns(options) if turns is None else turns:
        runs = find_runs([s.loss_mask for s in samples], [s.response_length for s in samples])
        turn_of_run = _turns(samples, everything.members, runs)
        rollout = np.repeat(place.numpy(), runs.counts)  # [R]
        reached = _reached(turn_of_run, rollout, len(kept))
        tokens = np.bincount(rollout + 1, runs.end - runs.begin, len(kept) + 1)[1:]
        sampled = torch.from_numpy(tokens.astype(np.int64))
    members = [[samples[row] for row in everything.members[r]] for r in kept]
    lengths = torch.tensor([sum(sample.response_length for sample in own) for own in members], dtype=torch.int64)
    groups = [everything.groups[r] for r in kept]
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(reached)]))
    count, capped = int(offsets[-1]), everything.capped[has_result]
    batch = Batch.of(
        mask=torch.ones(count, dtype=torch.bool),
        turn_ids=torch.arange(count) - torch.repeat_interleave(offsets[:-1], offsets.diff(), output_size=count),
        cu_seqlens=offsets,
        rewards=options.reward.apply(
            rewards[has_result], lengths, capped, longest=getattr(args, "rollout_max_response_len", None),
            solved_above=options.solved_above,
        ),
        group_ids=groups,
        outcomes=everything.outcomes[has_result],
        capped=capped,
        endings=everything.endings[has_result],
        row_ids=everything.row_ids[has_result],
    )  # fmt: skip
    owners = [own[-1] for own in members]
    given: list[float] = torch.where(rewards.isnan(), 0.0, rewards)[everything.number].tolist()
    return SampleBatch(
        samples, place, given, batch, lengths, _known(options.arm, batch, members, groups, owners), everything,
        _loss_weights(owners), _taken(samples, everything), runs, turn_of_run,
        sampled,
    )  # fmt: skip


def ending_of(sample: Any) -> int:
    """The Ending of a sample, by its status and `metadata["exit_status"]`."""
    return sample_ending(sample.status, _metadata(sample).get("exit_status"))


def _ending(sample: Any, row: int) -> int:
    try:
        return int(ending_of(sample))
    except (TypeError, ValueError) as error:
        raise ValueError(f"sample {row}: {error}") from error


def _metadata(sample: Any) -> dict[str, Any]:
    return sample.metadata or {}


def _rollouts(args: Any, samples: Sequence[Any]) -> tuple[Tensor, list[list[int]]]:
    """Number of the rollout of each sample `[S]`, and the samples of each."""
    numbers: dict[Any, int] = {}
    of_sample: list[int] = []
    members: list[list[int]] = []
    for row, sample in enumerate(samples):
        own = sample.rollout_id if getattr(sample, "rollout_id", None) is not None else sample.index
        key = (_group(sample, row, args, len(samples)), ("row", row) if own is None else own)
        found = numbers.setdefault(key, len(numbers))
        if found == len(members):
            members.append([])
        members[found].append(row)
        of_sample.append(found)
    return torch.tensor(of_sample, dtype=torch.int64), members


def _group(sample: Any, row: int, args: Any, count: int) -> int | str:
    """The group of a sample; without group_index, by its place, as Miles and slime do where groups are whole."""
    if sample.group_index is not None:
        found: int | str = sample.group_index
        return found
    size = getattr(args, "n_samples_per_prompt", None)
    if not size or count % size:
        raise ValueError(
            f"sample {row} has no group_index, and {count} samples are no whole number of groups of "
            f"--n-samples-per-prompt {size}: nobody can tell which samples are of one prompt"
        )
    return int(row // size)


def _row_id(sample: Any, row: int) -> int:
    own = sample.rollout_id if getattr(sample, "rollout_id", None) is not None else sample.index
    return own if isinstance(own, int) else row


def _last(samples: Sequence[Any], rows: list[int]) -> int:
    """The sample that a rollout ended with."""
    return rows[0] if len(rows) == 1 else rows[last_sample([_metadata(samples[row]).get("leaf") for row in rows])]


def _shared_reward(args: Any, samples: Sequence[Any], rows: list[int]) -> float:
    """The reward of a rollout, NaN for none."""
    found = {row: _reward(args, samples[row], row) for row in rows}
    given = {reward for reward in found.values() if not math.isnan(reward)}
    if len(given) > 1:
        shown = ", ".join(f"sample {row}: {reward:g}" for row, reward in found.items())
        raise ValueError(
            f"the samples of one rollout have several rewards ({shown}); a rollout has one, or its votes for the "
            "baseline of its group would contradict each other"
        )
    return given.pop() if given else math.nan


def _reward(args: Any, sample: Any, row: int) -> float:
    value, key = sample.reward, getattr(args, "reward_key", None)
    if isinstance(value, dict):
        if not key:
            raise ValueError(
                f"sample {row}: the reward is a dictionary with {', '.join(map(str, value))}; choose one with "
                "--reward-key"
            )
        if key not in value:
            raise ValueError(
                f"sample {row}: the reward has no --reward-key {key!r}; it has {', '.join(map(str, value))}"
            )
        value = value[key]
    if value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"sample {row}: the reward is {value!r:.80}, which is no number") from error


def _turns(samples: Sequence[Any], members: list[list[int]], runs: Runs) -> np.ndarray:
    """Which turn of its rollout each run is, `[R]` int64."""
    counts = np.diff(runs.offsets)
    turns: np.ndarray = np.arange(len(runs.begin)) - np.repeat(runs.offsets[:-1], counts)  # [R]
    for rows in members:
        if len(rows) == 1:
            continue
        try:
            found = turns_of_runs([counts[row] for row in rows], [_metadata(samples[row]).get("leaf") for row in rows])
        except ValueError as error:
            raise ValueError(f"samples {rows}: {error}") from error
        for row, turn in zip(rows, found, strict=True):
            turns[runs.offsets[row] : runs.offsets[row + 1]] = turn
    return turns


def _reached(turns: np.ndarray, rollout: np.ndarray, count: int) -> np.ndarray:
    """Turns of each rollout, `[B]` int64; `rollout [R]` is that of each run, -1 for none."""
    reached = np.zeros(count, np.int64)
    voting = rollout >= 0
    np.maximum.at(reached, rollout[voting], turns[voting] + 1)
    return reached


def _loss_weights(owners: list[Any]) -> Tensor | None:
    """Weights of rollouts `[B]`, as the buffer wrote them; None: it did not."""
    weights = [_metadata(sample).get(LOSS_WEIGHT) for sample in owners]
    if all(weight is None for weight in weights):
        return None
    if any(weight is None for weight in weights):
        row = weights.index(None)
        raise ValueError(
            f"rollout {row} has no {LOSS_WEIGHT} in its metadata, others have: they did not come through one buffer"
        )
    return torch.tensor(weights, dtype=torch.float64)


def _taken(samples: Sequence[Any], everything: SampledRollouts) -> int | None:
    """How many groups were taken from the buffer to get these, those without a result too; None: it did not say."""
    taken = {
        group: _metadata(samples[rows[-1]]).get(TAKEN)
        for group, rows in zip(everything.groups, everything.members, strict=True)
    }
    counts = [count for count in taken.values() if isinstance(count, int)]
    return sum(counts) if len(counts) == len(taken) else None


def _known(
    arm: Arm | None, batch: Batch, members: list[list[Any]], groups: list[int | str], owners: list[Any]
) -> Known:
    if arm is None:
        return Known()
    condition = arm.condition
    after = None if condition is None else condition.stale_after
    if isinstance(arm.row_weights, Rescue):
        after = arm.row_weights.stale_after
    stale = None if after is None else _stale(arm, members, groups, owners, after)
    repeats = 0 if condition is None else condition.not_repeating
    repeating = None
    if repeats:
        ended = [samples[_last(samples, list(range(len(samples))))] for samples in members]
        repeating = torch.tensor([_repeats(sample, repeats) for sample in ended], dtype=torch.bool)
    return Known(stale=stale, group_ids=groups, repeating=repeating)


def _stale(arm: Arm, members: list[list[Any]], groups: list[int | str], owners: list[Any], after: int) -> Tensor:
    """Rollouts of stale groups, `[B]` bool: by what the buffer measured, else by versions against the newest here."""
    measured = [s for sample in owners if isinstance(s := _metadata(sample).get(STALENESS), int)]
    if len(measured) == len(owners):
        return torch.tensor([staleness > after for staleness in measured], dtype=torch.bool)
    versions = [[int(v) for s in samples for v in s.weight_versions or () if str(v).isdecimal()] for samples in members]
    for row, found in enumerate(versions):
        if not found:
            raise ValueError(
                f"arm {arm.name!r} reads how stale groups are, but rollout {row} has neither {STALENESS} in its "
                "metadata, which RescueDataBuffer writes, nor weight_versions"
            )
    newest = max((max(found) for found in versions), default=0)
    oldest: dict[int | str, int] = {}
    for group, found in zip(groups, versions, strict=True):
        oldest[group] = min(oldest.get(group, newest), *found)
    return torch.tensor([newest - oldest[group] > after for group in groups], dtype=torch.bool)


def _repeats(sample: Any, tokens: int) -> bool:
    """Whether a response's last tokens are those before them once more."""
    ids = sample.tokens
    return sample.response_length >= 2 * tokens and list(ids[-tokens:]) == list(ids[-2 * tokens : -tokens])
