"""Which turn of its rollout each run of a loss mask is, where a rollout of Miles or slime is several samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def turns_of_runs(counts: Sequence[int], leaves: Sequence[Any]) -> list[list[int]]:
    """Which turn of the rollout each run of its samples is, from 0.

    Samples that are leaves of a tree of calls (Miles' sessions) share the calls of their common path, which are masked
    in all but the earliest leaf: a run is the call at its depth of the path. Other samples of a rollout continue each
    other.

    Turns of a sample increase.

    Args:
        counts: runs of each sample of one rollout, in order.
        leaves: `metadata["leaf"]` of each, None where there is none.

    Raises:
        ValueError: a leaf with more runs than calls of its own; leaves beside samples that are none; a broken leaf.
    """
    if all(leaf is None for leaf in leaves):
        turns, begin = [], 0
        for count in counts:
            turns.append(list(range(begin, begin + count)))
            begin += count
        return turns
    paths = [_path(leaf) for leaf in leaves]
    owner: dict[Any, int] = {}
    for node, path in paths:
        for call in path:
            owner[call] = min(node, owner.get(call, node))
    turns = []
    for (node, path), count in zip(paths, counts, strict=True):
        own = [depth for depth, call in enumerate(path) if owner[call] == node]
        if count > len(own):
            raise ValueError(f"leaf {node} has {count} turns in its loss_mask, but {len(own)} calls of its own")
        turns.append(own[:count])
    return turns


def last_sample(leaves: Sequence[Any]) -> int:
    """Number of the sample that a rollout ended with: the last, or of leaves, which come in any order, the one of the
    latest call.

    Args:
        leaves: `metadata["leaf"]` of the rollout's samples, None where there is none.
    """
    calls = [leaf.get("node_id") if isinstance(leaf, dict) else None for leaf in leaves]
    known = [call for call in calls if isinstance(call, int)]
    return calls.index(max(known)) if len(known) == len(calls) > 0 else len(leaves) - 1


def _path(leaf: Any) -> tuple[int, list[Any]]:
    if leaf is None:
        raise ValueError("some samples of the rollout are leaves of a session (metadata['leaf']) and some are not")
    if not isinstance(leaf, dict):
        raise ValueError(f"metadata['leaf'] is a {type(leaf).__name__}; it must be a dictionary")
    try:
        node, path = leaf["node_id"], list(leaf["path_node_ids"])
        hash(tuple(path))
    except (KeyError, TypeError) as error:
        raise ValueError(f"metadata['leaf'] is broken: {type(error).__name__} {error}") from error
    if not isinstance(node, int) or isinstance(node, bool):
        raise ValueError(f"metadata['leaf']['node_id'] is {node!r}; it must be an integer")
    return node, path
