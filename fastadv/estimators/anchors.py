"""Turns that started from the same observation of the same prompt: GiGPO's step groups."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from fastadv.groups import GroupIndex, Labels, group_index
from fastadv.segment_table import Segments


def anchor_groups(
    anchor_ids: Labels, group_ids: Labels | GroupIndex, segments: Segments, *, op: str = "anchor_groups"
) -> GroupIndex:
    """Groups turns by prompt and observation. Build it once per batch where several estimators read it.

    Args:
        anchor_ids: `[S]` labels of the observations that turns started from, in the order of the segments, compared for
            equality only.
        group_ids: `[B]` labels of prompts, or a GroupIndex.
        segments: the (rollout, turn) pairs.
        op: name of the calling op, for error messages.

    Returns:
        A GroupIndex of the S turns.

    Raises:
        ValueError: labels for another number of turns or rollouts.
        TypeError: labels that are not integers or strings.
    """
    labels, groups = group_index(anchor_ids, op=op), group_index(group_ids, op=op)
    if labels.num_rows != segments.count:
        raise ValueError(f"{op}: anchor_ids has {labels.num_rows} labels, but there are {segments.count} turns")
    if groups.num_rows != segments.num_rows:
        raise ValueError(f"{op}: group_ids has {groups.num_rows} labels, turn_ids {segments.num_rows} rollouts")
    device = segments.offsets.device
    prompt = segments.spread(groups.index.to(device))
    return group_index(prompt * max(labels.num_groups, 1) + labels.index.to(device), op=op)


def similar_anchors(texts: Sequence[str], group_ids: Sequence[int | str], *, threshold: float = 0.95) -> list[int]:
    """Labels of turns whose observations are similar: verl-agent's `enable_similarity`, for `anchor_ids`.

    A turn joins the first cluster of its prompt whose first text has a `difflib` ratio of at least the threshold, so
    the result depends on the order of turns.

    Args:
        texts: `[S]`, the observation that each turn started from, in the order of the Segments.
        group_ids: `[S]`, label of the prompt of each turn.
        threshold: in (0, 1].

    Returns:
        `[S]` labels, different in different prompts.

    Raises:
        ValueError: lists of different lengths, a threshold out of range.
    """
    if len(texts) != len(group_ids):
        raise ValueError(f"similar_anchors: {len(texts)} texts, but {len(group_ids)} group_ids; pass one each a turn")
    if not 0 < threshold <= 1:
        raise ValueError(f"similar_anchors: threshold is {threshold}; it must be in (0, 1]")
    clusters: dict[int | str, list[tuple[str, int]]] = {}
    labels: list[int] = []
    count = 0
    for text, group in zip(texts, group_ids, strict=True):
        known = clusters.setdefault(group, [])
        label = next((n for first, n in known if SequenceMatcher(None, text, first).ratio() >= threshold), None)
        if label is None:
            label, count = count, count + 1
            known.append((text, label))
        labels.append(label)
    return labels
