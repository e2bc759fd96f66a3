"""Turns of an agent's rollout, as a number at each token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fastadv import cuda, dispatch, native, validation
from fastadv.kernels import Kernel
from fastadv.ops._register import native_op
from fastadv.reference import turn_ids as reference
from fastadv.rows import Rows
from fastadv.segment_table import Segments

MAX_TURN = 2**20  # turn ids index tables: a larger one is garbage, not a turn
BELOW = "segments: turn_ids has a value below -1; turns count from 0, tokens outside of turns have -1"


def _turn_ids_cpu(mask: Tensor, cu_seqlens: Tensor | None, turn_ids: Tensor) -> int:
    rows = Rows.trusted(mask, cu_seqlens)
    faults: int = native.module().turn_ids(
        native.rows(rows), native.view(mask), turn_ids.data_ptr(), native.threads(rows.tokens)
    )
    return faults


def _turn_ids_cuda(mask: Tensor, cu_seqlens: Tensor | None, turn_ids: Tensor) -> int:
    rows, mask, kernels = Rows.trusted(mask, cu_seqlens), native.mask_bytes(mask), cuda.module()
    runs = turn_ids.new_empty(-(-rows.tokens // kernels.TURN_IDS_BLOCK))
    kernels.turn_ids_from_mask(
        *cuda.place(turn_ids), native.rows(rows), native.address(mask), runs.data_ptr(), turn_ids.data_ptr()
    )
    return 0


# Writes turn_ids, int32, like the mask. A fraction that nobody waited for gets -2, which no op takes for a turn.
TURN_IDS = Kernel("turn_ids", cpu=_turn_ids_cpu, triton="turn_ids", cuda=_turn_ids_cuda)


def _fake_turn_ids(backend: str, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return torch.empty(mask.shape, dtype=torch.int32, device=mask.device)


@native_op("turn_ids_from_mask", _fake_turn_ids)
def _launch_turn_ids(backend: str, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    turn_ids = native.empty(mask.shape, torch.int32, mask.device)
    validation.native_faults("turn_ids_from_mask", TURN_IDS(backend, mask, cu_seqlens, turn_ids))
    return turn_ids


def _turn_counts_cpu(turn_ids: Tensor, cu_seqlens: Tensor | None, counts: Tensor) -> int:
    rows = Rows.trusted(turn_ids, cu_seqlens)
    below = native.module().turn_counts(
        native.rows(rows), native.view(turn_ids), counts.data_ptr(), native.threads(rows.tokens)
    )
    return int(below)


def _turn_counts_cuda(turn_ids: Tensor, cu_seqlens: Tensor | None, counts: Tensor) -> int:
    turn_ids = turn_ids.contiguous()
    cuda.module().turn_counts(
        *cuda.place(turn_ids),
        native.rows(Rows.trusted(turn_ids, cu_seqlens)),
        native.DTYPES[turn_ids.dtype],
        native.address(turn_ids),
        counts.data_ptr(),
    )
    return 0


# Writes `[B]` int64: a row's largest turn id + 1. Not 0, or a count of -1, where a value is below -1 or a row is false.
TURN_COUNTS = Kernel("turn_counts", cpu=_turn_counts_cpu, triton="turn_ids", cuda=_turn_counts_cuda)


def _fake_turn_counts(backend: str, turn_ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    rows = turn_ids.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return turn_ids.new_empty(rows, dtype=torch.int64)


@native_op("turn_counts", _fake_turn_counts)
def _launch_turn_counts(backend: str, turn_ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    rows = Rows.trusted(turn_ids, cu_seqlens)
    counts = torch.empty(rows.count, dtype=torch.int64, device=turn_ids.device)
    if TURN_COUNTS(backend, turn_ids, cu_seqlens, counts):
        raise ValueError(BELOW)
    return counts


def turn_ids_from_mask(mask: Tensor, cu_seqlens: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Numbers the runs of the response mask.

    A turn is a maximal run of tokens that the model sampled; tool results and templates separate turns. This is how
    verl, Miles and slime lay out multi-turn rollouts. It is wrong where a mask was edited afterwards (token-level
    rejection, masked partial rollouts) and where a tool result adds no token: then pass turn ids of your own.

    Args:
        mask: `[N]` or `[B, T]`, any bool, integer or whole-valued float dtype; non-zero marks model tokens.
        cu_seqlens: `[B + 1]` int32 or int64 for packed tokens; without it, 1-D tokens are one rollout.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        int32 tensor of the mask's shape: 0, 1, ... in each rollout, -1 outside turns.

    Raises:
        ValueError: a fractional mask value, or `cu_seqlens` that does not fit.
    """
    op = "turn_ids_from_mask"
    rows = Rows.of(op, "mask", mask, cu_seqlens)
    validation.tensor(op, "mask", mask, dtypes=validation.MASKS)
    name = dispatch.resolve(op, backend, device=mask.device)
    if name != "cpu":
        validation.mask_values(op, "mask", mask)
    if name == "reference":
        return reference.turn_ids_from_mask(mask, rows)
    turn_ids: Tensor = _launch_turn_ids(name, native.as_mask(mask), rows.cu_seqlens)
    return turn_ids


def turn_ids_from_positions(lengths: Tensor, edges: Sequence[int]) -> Tensor:
    """Position buckets, which stand in for turns where a rollout has a single turn.

    Fix the edges before looking at the rollouts: edges that depend on them would let a baseline see the future.

    Args:
        lengths: `[B]` integers, number of tokens of each rollout.
        edges: increasing positive positions; a token at position p (from 0) gets the number of edges <= p.

    Returns:
        `[lengths.sum()]` int32, packed. Waits for a GPU to learn its size.

    Raises:
        TypeError, ValueError: lengths that are not non-negative integers, edges that do not increase.
    """
    op = "turn_ids_from_positions"
    validation.tensor(op, "lengths", lengths, dtypes=validation.INTEGERS)
    if lengths.dim() != 1:
        raise ValueError(f"{op}: lengths has shape {list(lengths.shape)}; expected [B]")
    steps = [0, *edges]
    if any(b <= a for a, b in pairwise(steps)):
        raise ValueError(f"{op}: edges are {list(edges)}; they must be positive and increase")
    lengths = lengths.to(torch.int64)
    if bool((lengths < 0).any()):
        raise ValueError(f"{op}: lengths has a negative value")
    ends = lengths.cumsum(0)
    tokens = int(ends[-1]) if lengths.numel() else 0
    starts = torch.repeat_interleave(ends - lengths, lengths, output_size=tokens)
    position = torch.arange(tokens, device=lengths.device) - starts
    boundaries = torch.tensor(list(edges), dtype=torch.int64, device=lengths.device)
    return torch.bucketize(position, boundaries, right=True, out_int32=True)


def segments(turn_ids: Tensor | Segments, cu_seqlens: Tensor | None = None, *, backend: str = "auto") -> Segments:
    """Lists the (rollout, turn) pairs of a batch.

    Args:
        turn_ids: `[N]` or `[B, T]` int32 or int64, -1 outside turns. Segments are returned as they are.
        cu_seqlens: `[B + 1]` for packed tokens; without it, 1-D tokens are one rollout.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        The index object that the other ops take in place of `turn_ids`. On a GPU this waits for the device to learn the
        number of segments: build it once per batch, outside of `torch.compile`.

    Raises:
        TypeError, ValueError: turn ids below -1 or not integers, `cu_seqlens` that does not fit.
    """
    op = "segments"
    if isinstance(turn_ids, Segments):
        if cu_seqlens is not None:
            turn_ids.check_layout(op, Rows.of(op, "turn_ids", turn_ids.turn_ids, cu_seqlens))
        return turn_ids
    rows = Rows.of(op, "turn_ids", turn_ids, cu_seqlens)
    validation.tensor(op, "turn_ids", turn_ids, dtypes=(torch.int32, torch.int64))
    if turn_ids.is_meta:
        raise ValueError(
            f"{op}: turn_ids is on the meta device and has no turns to count; pass a Segments in place of turn_ids"
        )
    name = dispatch.resolve(op, backend, device=turn_ids.device)
    if name == "reference":
        if bool((turn_ids < -1).any()):
            raise ValueError(BELOW)
        counts = reference.turn_counts(turn_ids, rows)
    else:
        counts = _launch_turn_counts(name, turn_ids, rows.cu_seqlens)
    if name != "cpu" and bool((counts < 0).any()):
        raise ValueError(f"{BELOW}; or cu_seqlens does not divide the tokens")
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])  # [B + 1]
    if rows.count and int(counts.max()) > MAX_TURN:
        raise ValueError(
            f"{op}: turn_ids reaches {int(counts.max()) - 1}; turns above {MAX_TURN - 1} are not supported"
        )
    return Segments(turn_ids, rows.cu_seqlens, offsets, int(offsets[-1]))
