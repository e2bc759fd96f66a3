"""Bytes that each op of the CUDA backend has to move: all that it reads and all that it writes, each byte once.

What is read again comes from a cache. Where the Triton kernels move the same, the formula is theirs.
`tests/test_cuda_bytes.py` counts what the kernels do move.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable


def _of_triton(module: str, name: str = "bytes_moved") -> Callable[..., int]:
    """A formula of a module of the Triton kernels."""
    formula: Callable[..., int] = getattr(importlib.import_module(f"fastadv.triton_kernels.{module}"), name)
    return formula


turn_ids = _of_triton("turn_ids")
turn_counts = _of_triton("turn_ids", "counts_bytes_moved")
token_counts = _of_triton("token_counts")
segment_tokens = _of_triton("segments")
sequence_log_ratios = _of_triton("sequence_log_ratios")
group_moments = _of_triton("moments")
turn_moments = _of_triton("moments", "turn_bytes_moved")
frozen_group_advantages = _of_triton("group_advantages")
frozen_turn_advantages = _of_triton("turn_advantages")
policy_loss = _of_triton("policy_loss")
multi_dot_gram = _of_triton("multi_dot_gram")
count_sketch = _of_triton("count_sketch")
_log_probs = _of_triton("token_log_probs")


def group_advantages(rows: int, groups: int, *, rewards: int = 4, votes: bool = False, values: int = 4) -> int:
    """From the rewards, given an index of the groups; `rewards` and `values` are the bytes of a reward and of an
    advantage."""
    return _voters(rows, groups, rewards, votes) + values * rows


def turn_advantages(
    segments: int, rows: int, groups: int, *, rewards: int = 4, votes: bool = False, values: int = 4
) -> int:
    """The same by turn: rows' offsets are read too, and an advantage is a segment's."""
    return _voters(rows, groups, rewards, votes) + 8 * (rows + 1) + values * segments


def _voters(rows: int, groups: int, rewards: int, votes: bool) -> int:
    """A row's place in its group, its number, its reward and its vote; the groups' ends."""
    return (8 + 8 + rewards + 8 * votes) * rows + 8 * (groups + 1)


def share_gradients(tokens: int) -> int:
    """A gradient in float32 that rollouts share, without a penalty and token weights, where every token counts: read,
    and written in place."""
    return tokens * (4 + 1 + 4)


def scale_gradient(tokens: int, size: int = 4) -> int:
    """By a factor other than 1, in place; `size` are the bytes of a gradient."""
    return 2 * size * tokens


def token_log_probs(rows: int, vocab: int, itemsize: int, *, moments: bool) -> int:
    """Forward, every row: with entropy and sum of squares, or without."""
    return _log_probs(rows, vocab, itemsize, moments=moments, gradient=False)


def logits_gradient(rows: int, vocab: int, itemsize: int, *, moments: bool) -> int:
    """Backward, every row, by all results."""
    return _log_probs(rows, vocab, itemsize, moments=moments, gradient=True)


def token_log_probs_step(rows: int, vocab: int, itemsize: int, *, moments: bool) -> int:
    """Forward and backward: the logits are read twice and a gradient like them is written."""
    forward = token_log_probs(rows, vocab, itemsize, moments=moments)
    return forward + logits_gradient(rows, vocab, itemsize, moments=moments)


def row_statistics(rows: int, vocab: int, itemsize: int) -> int:
    """One read of each row, its label and the label's logit; five float64 a row are written."""
    return rows * (vocab * itemsize + itemsize + 8 + 5 * 8)
