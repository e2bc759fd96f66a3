"""Which response tokens of a sequence a context-parallel rank holds, in Miles and in slime."""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """A rank of a context-parallel group."""

    rank: int
    size: int


def place() -> Place:
    """This process's rank in its context-parallel group, as the trainer that runs here knows it.

    Raises:
        RuntimeError: no trainer runs here.
    """
    if "miles" in sys.modules:
        state: Any = importlib.import_module("miles.backends.training_utils.parallel").get_parallel_state()
        return Place(state.cp.rank, state.cp.size)
    try:
        mpu: Any = importlib.import_module("megatron.core").mpu
    except ImportError as error:
        raise RuntimeError(
            "neither Miles nor Megatron is loaded here, so nobody knows this rank's part of the sequences"
        ) from error
    return Place(mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size())


def context_group() -> Any:
    """The context-parallel group of this process, for reductions."""
    if "miles" in sys.modules:
        state: Any = importlib.import_module("miles.backends.training_utils.parallel").get_parallel_state()
        return state.cp.group
    mpu: Any = importlib.import_module("megatron.core").mpu
    return mpu.get_context_parallel_group()


def local_spans(
    total_length: int, response_length: int, place: Place, *, width: int | None = None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two spans of response positions whose log-probs a rank holds; either may be empty, and so may both.

    A sequence is cut into 2 cp chunks, of which a rank holds number `rank` and number 2 cp - 1 - `rank`. A token's
    log-prob comes from the logits before it, so the response's are at positions from prompt_length - 1.

    Args:
        total_length: tokens of prompt and response, T.
        response_length: of the response, R.
        place: the rank.
        width: what sequences are padded to before they are cut (`qkv_format` "bshd"); None: T.

    Returns:
        Two spans (begin, end) in 0 .. R, in the order in which the rank holds them.
    """
    if place.size == 1:
        return (0, response_length), (response_length, response_length)
    chunk = -(-(total_length if width is None else width) // (2 * place.size))
    first = total_length - response_length - 1  # place of the logits of the first response token
    spans = []
    for number in (place.rank, 2 * place.size - 1 - place.rank):
        begin, end = max(number * chunk, first), min((number + 1) * chunk, total_length - 1)
        spans.append((begin - first, end - first) if begin < end else (0, 0))
    return spans[0], spans[1]


def local_tokens(per_token: Tensor, spans: tuple[tuple[int, int], tuple[int, int]]) -> Tensor:
    """A rank's part of what there is for each response token: `[R]` to `[C]`, C from 0 to R."""
    (a, b), (c, d) = spans
    return per_token[a:b] if c == d else torch.cat([per_token[a:b], per_token[c:d]])
