"""Which turn of its rollout each run of a loss mask is, where a rollout of Miles or slime is several samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastadv.token_ids import LARGEST_ID


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
    owner: dict[int, int] = {}
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


def in_order(leaves: Sequence[Any]) -> list[int]:
    """Numbers of a rollout's samples in the order in which they ended: as they lie, or of leaves, which come in any
    order, by their last calls.

    Args:
        leaves: `metadata["leaf"]` of the rollout's samples, None where there is none.
    """
    calls = [leaf.get("node_id") if isinstance(leaf, dict) else None for leaf in leaves]
    known = [call for call in calls if isinstance(call, int)]
    numbers = range(len(leaves))
    return sorted(numbers, key=known.__getitem__) if len(known) == len(calls) else list(numbers)


def last_sample(leaves: Sequence[Any]) -> int:
    """Number of the sample that a rollout ended with, of which there is at least one; see `in_order`."""
    return in_order(leaves)[-1]


def versions_of(versions: object, mask: np.ndarray, shared: int = 0) -> np.ndarray | None:
    """The version of the weights that sampled each token, `[n]` int32, -1 outside of the mask; None where it is not
    known.

    `weight_versions` has an entry a call of the engine. Calls and turns are the same where they are equally many, and
    it does not matter which is which where all versions are the same.

    Args:
        versions: `Sample.weight_versions`; what cannot be a list of versions says nothing.
        mask: `[n]` bool, response tokens that the model sampled.
        shared: calls before the first turn of the mask: those that a leaf leaves to another one.
    """
    if not isinstance(versions, (list, tuple)) or not 0 < len(versions) <= shared + mask.size:
        return None  # a call samples a token or more
    starts = np.diff(mask.astype(np.int8), prepend=np.int8(0)) == 1
    turns = int(starts.sum())
    if not all(isinstance(v, (str, int)) for v in versions):
        return None
    if len(versions) == shared + turns:
        versions = versions[shared:]
    else:
        versions = (versions[0],) * turns if len(set(versions)) == 1 else ()
    texts = [str(v) if isinstance(v, int) and 0 <= v <= LARGEST_ID else v for v in versions]
    if len(texts) != turns or not all(
        isinstance(v, str) and len(v) <= 10 and v.isascii() and v.isdecimal() and int(v) <= LARGEST_ID for v in texts
    ):
        return None
    by_turn = np.array([-1, *map(int, texts)], np.int32)
    tokens: np.ndarray = np.where(mask, by_turn[np.cumsum(starts)], np.int32(-1))
    return tokens


def _path(leaf: Any) -> tuple[int, Sequence[int]]:
    if leaf is None:
        raise ValueError("some samples of the rollout are leaves of a session (metadata['leaf']) and some are not")
    if not isinstance(leaf, dict):
        raise ValueError(f"metadata['leaf'] is a {type(leaf).__name__}; it must be a dictionary")
    for name in ("node_id", "path_node_ids"):
        if name not in leaf:
            raise ValueError(f"metadata['leaf'] has no {name!r}")
    node, path = leaf["node_id"], leaf["path_node_ids"]
    if not isinstance(node, int) or isinstance(node, bool):
        raise ValueError(f"metadata['leaf']['node_id'] is a {type(node).__name__}; it must be an integer")
    if not isinstance(path, (list, tuple)):
        raise ValueError(f"metadata['leaf']['path_node_ids'] is a {type(path).__name__}; it must be a list of integers")
    for call in path:
        if not isinstance(call, int) or isinstance(call, bool):
            raise ValueError(f"metadata['leaf']['path_node_ids'] holds a {type(call).__name__}; it must hold integers")
    if len(set(path)) < len(path):
        raise ValueError(f"metadata['leaf']['path_node_ids'] of leaf {node} holds a call twice")
    return node, path
