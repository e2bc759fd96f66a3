"""Stand-ins for what Miles and slime hand to hooks, written from their documented signatures (August 2026, newer)."""

from __future__ import annotations

import enum
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


class Status(enum.Enum):
    """Sample.Status of both."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class SlimeSample:
    """What slime's and Miles' Sample have in common."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.COMPLETED
    metadata: dict[str, Any] | None = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None

    @property
    def oldest_weight_version(self) -> int | None:
        """The oldest version of the weights that sampled it."""
        versions = [int(v) for v in self.weight_versions if str(v).isdigit()]
        return min(versions, default=None)


@dataclass
class MilesSample(SlimeSample):
    """Miles' own fields besides."""

    teacher_log_probs: list[float] | None = None
    opd_reverse_kl: list[float] | None = None


SAMPLES = (MilesSample, SlimeSample)


def arguments(fastadv: Any = None, **flags: Any) -> Namespace:
    """The trainer's namespace, with the mapping that --custom-config-path put there."""
    given = {
        "advantage_estimator": "grpo",
        "reward_key": None,
        "n_samples_per_prompt": 4,
        "rollout_batch_size": 2,
        "normalize_advantages": False,
        "use_opsm": False,
        "use_opd": False,
        "loss_type": "policy_loss",
        "rollout_sample_filter_path": None,
        **flags,
    }
    if fastadv is not None:
        given["fastadv"] = fastadv
    return Namespace(**given)


def mask_of(turns: int, *, sampled: int = 3, observed: int = 2) -> list[int]:
    """Turns of sampled tokens with observations between them."""
    mask = ([1] * sampled + [0] * observed) * turns
    return mask[: len(mask) - observed]


def make(
    reward: float | dict[str, Any] | None, *, group: int | None = 0, index: int | None = 0, turns: int = 1,
    kind: type[SlimeSample] = MilesSample, prompt: int = 2, **fields: Any,
) -> Any:  # fmt: skip
    """A sample of some turns."""
    mask = fields.pop("loss_mask", mask_of(turns))
    length = fields.pop("response_length", len(mask) if mask is not None else 0)
    return kind(
        group_index=group, index=index, tokens=list(range(prompt + length)), response_length=length, reward=reward,
        loss_mask=mask, **fields,
    )  # fmt: skip


def drawn(generator: torch.Generator, groups: int, *, kind: type[SlimeSample] = MilesSample) -> list[Any]:
    """Groups of one to six samples in a random order, completed and cut off."""
    samples: list[Any] = []

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    for group in range(groups):
        for _ in range(1 + draw(6)):
            status = (Status.COMPLETED, Status.COMPLETED, Status.TRUNCATED)[draw(3)]
            out_of_time = {"exit_status": "TimeLimitExceeded"} if draw(6) == 0 else {}
            samples.append(
                make(
                    draw(5) / 4,
                    group=10 * group + 3,
                    index=len(samples),
                    turns=1 + draw(5),
                    kind=kind,
                    status=status,
                    metadata=out_of_time,
                )
            )
    order = torch.randperm(len(samples), generator=generator).tolist()
    return [samples[i] for i in order]


def by_group(samples: Sequence[Any]) -> list[list[Any]]:
    """Samples as a rollout function hands them on: a list a group."""
    found: dict[Any, list[Any]] = {}
    for sample in samples:
        found.setdefault(sample.group_index, []).append(sample)
    return list(found.values())


# ---- the asynchronous buffer, in its layout of August 2026 and in the newer one -------------------------------------


@dataclass
class BufferInput:
    """What a buffer is made of."""

    args: Namespace
    unused_handler_fn: Any


@dataclass
class Entry:
    """A group that was finished, and the prompts that it came from."""

    prompt_group: list[Any]
    group: list[Any]


def _oldest(group: list[Any]) -> int | None:
    samples = [s for item in group for s in (item if isinstance(item, list) else [item])]
    return min((v for s in samples if (v := s.oldest_weight_version) is not None), default=None)


class _Buffer:
    def __init__(self, input: BufferInput) -> None:
        self._args, self._handler, self._entries = input.args, input.unused_handler_fn, list[Entry]()
        self._stale = 0
        self._version: int | None = None

    async def put(self, input: Entry) -> None:
        self._entries.append(input)

    def get_metrics(self) -> dict[str, float]:
        buffered = [s for e in self._entries if (s := self._staleness(e.group, self._version)) is not None]
        stale, self._stale = self._stale, 0
        return {"rollout/fully_async/stale_groups_filtered": stale, "rollout/fully_async/queue_size": len(buffered)}

    def _fits(self, staleness: int | None) -> bool:
        limit = self._args.max_weight_staleness
        return staleness is None or limit is None or staleness <= limit


class AugustBuffer(_Buffer):
    """`get` takes a group from the front, and asks how stale it is."""

    async def get(self, current_version: int | None = None, **_: Any) -> Entry:
        self._version = current_version
        while True:
            entry = self._entries.pop(0)
            if self._fits(self._staleness(entry.group, current_version)):
                return entry
            self._stale += 1
            self._handler(entry.prompt_group)

    @staticmethod
    def _staleness(group: list[Any], current_version: int | None) -> int | None:
        oldest = _oldest(group)
        return None if oldest is None or current_version is None else current_version - oldest


class NewerBuffer(_Buffer):
    """`get` first asks how stale all groups are and evicts, then hands several on."""

    async def get(self, *, num_groups: int, current_version: int | None, **_: Any) -> list[Entry]:
        self._version = current_version
        stalenesses = [self._staleness(entry.group, current_version) for entry in self._entries]
        for entry in self._evict_stale(current_version=current_version, stalenesses=stalenesses):
            self._stale += 1
            self._handler(entry.prompt_group)
        taken, self._entries = self._entries[:num_groups], self._entries[num_groups:]
        return taken

    def _evict_stale(self, *, current_version: int | None, stalenesses: list[int | None]) -> list[Entry]:
        fits = [self._fits(staleness) for staleness in stalenesses]
        evicted = [entry for entry, fit in zip(self._entries, fits, strict=True) if not fit]
        self._entries = [entry for entry, fit in zip(self._entries, fits, strict=True) if fit]
        return evicted

    def _staleness(self, group: list[Any], current_version: int | None) -> int | None:
        return AugustBuffer._staleness(group, current_version)


BUFFERS = (AugustBuffer, NewerBuffer)


# ---- the trainer's part of a batch -----------------------------------------------------------------------------------


def rank_data(samples: Sequence[Any], advantages: Sequence[float], spans: Sequence[Any], **more: Any) -> dict[str, Any]:
    """`rollout_data` of one rank, after Miles made advantages of rewards as grpo does."""
    local = [sum(end - begin for begin, end in own) for own in spans]
    made = [
        torch.ones(count) * torch.tensor(a, dtype=torch.float32) for count, a in zip(local, advantages, strict=True)
    ]
    return {
        "rewards": list(advantages),
        "loss_masks": [torch.tensor(s.loss_mask, dtype=torch.int) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "total_lengths": [len(s.tokens) for s in samples],
        "kl": [torch.zeros(count) for count in local],
        "advantages": made,
        "returns": made,
        "round_number": [s.metadata["round_number"] for s in samples],
        **more,
    }
