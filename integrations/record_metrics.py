"""Numbers of a batch for the trackers of trainers: those of `fastadv.StepRecord` (docs/step_record.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastadv import Batch, StepRecord

PREFIX = "fastadv/"
# Of a record, what is a number of the batch; the rest comes later or is text.
FIELDS = (
    "prompts", "mixed_prompts", "rollouts", "tokens", "response_tokens", "census", "success_rate",
    "submitted_failure_rate", "cap_hit_rate", "reward", "response_length", "turns", "b", "b_by_prompt", "b_over_sigma",
    "b_over_sigma_by_prompt", "subsidy", "advantage_variance", "advantage_square", "reference_variance",
    "reference_square", "excluded_rate", "excluded_token_rate", "staleness",
)  # fmt: skip


def census_metrics(batch: Batch, prefix: str = PREFIX) -> dict[str, float]:
    """Counts and rates of a batch that no arm was applied to."""
    census = batch.census()
    names = ("solved", "failed", "budget", "infra")
    return {
        **{f"{prefix}census/{name}": float((batch.outcomes == value).sum()) for value, name in enumerate(names)},
        f"{prefix}cap_hit_rate": float(batch.capped.float().mean()) if len(batch.capped) else 0.0,
        f"{prefix}prompts": float(batch.groups.num_groups),
        f"{prefix}rollouts": float(census.total),
    }


def record_metrics(record: StepRecord, prefix: str = PREFIX) -> dict[str, float]:
    """Numbers of a record under their paths, those that exist."""
    return {f"{prefix}{name}": value for name, value in _numbers({f: getattr(record, f) for f in FIELDS})}


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)
        elif hasattr(value, "__dataclass_fields__"):
            for inner, number in _numbers({f: getattr(value, f) for f in value.__dataclass_fields__}):
                yield f"{name}/{inner}", number
