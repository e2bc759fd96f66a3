"""Values of a segment table at each token."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv import cuda, dispatch, native, validation
from fastadv.kernels import Kernel
from fastadv.ops._register import native_op
from fastadv.reference import segments as reference
from fastadv.rows import Rows
from fastadv.segment_table import SegmentTable

DTYPES = (torch.float32, torch.float64)  # of tables


def _cpu(
    values: Tensor, offsets: Tensor, turn_ids: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None, tokens: Tensor
) -> int:
    rows = Rows.trusted(turn_ids, cu_seqlens)
    faults: int = native.module().segment_tokens(
        native.rows(rows),
        values.dtype == torch.float64,
        native.address(values),
        (native.address(offsets), values.numel()),
        native.view(turn_ids),
        native.view(mask),
        native.address(tokens),
        native.threads(rows.tokens),
    )
    return faults


def _cuda(
    values: Tensor, offsets: Tensor, turn_ids: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None, tokens: Tensor
) -> int:
    turn_ids, mask = turn_ids.contiguous(), None if mask is None else native.mask_bytes(mask)
    cuda.module().segment_tokens(
        *cuda.place(values),
        native.rows(Rows.trusted(turn_ids, cu_seqlens)),
        values.dtype == torch.float64,
        native.address(values),
        values.shape[0],
        native.address(offsets),
        native.DTYPES[turn_ids.dtype],
        native.address(turn_ids),
        native.address(mask),
        native.address(tokens),
    )
    return 0


# Writes `tokens`, contiguous, like turn_ids, in the dtype of `values`.
SEGMENT_TOKENS = Kernel("segment_tokens", cpu=_cpu, triton="segments", cuda=_cuda)


def _fake(
    backend: str,
    values: Tensor,
    offsets: Tensor,
    turn_ids: Tensor,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    return values.new_empty(turn_ids.shape)


@native_op("segment_tokens", _fake)
def _launch(
    backend: str,
    values: Tensor,
    offsets: Tensor,
    turn_ids: Tensor,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    tokens = native.empty(turn_ids.shape, values.dtype, values.device)
    faults = SEGMENT_TOKENS(backend, values, offsets, turn_ids, cu_seqlens, mask, tokens)
    validation.native_faults("segment_tokens", faults)
    return tokens


def segment_tokens(table: SegmentTable, mask: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Writes a segment table out per token. No gradient flows.

    Losses look tables up by themselves; this is for code that wants the `[N]` tensor.

    Args:
        table: values per (rollout, turn).
        mask: shaped like the table's `turn_ids`; tokens with 0 get 0.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        Tensor of the shape of `turn_ids` in the table's dtype; 0 outside of turns.

    Raises:
        ValueError: a mask of another shape, a fractional mask value.
    """
    op = "segment_tokens"
    index = table.segments
    device = index.turn_ids.device
    validation.tensor(op, "table.values", table.values, shape=(index.count,), dtypes=DTYPES, device=device)
    if mask is not None:
        shape = tuple(index.turn_ids.shape)
        validation.tensor(op, "mask", mask, shape=shape, dtypes=validation.MASKS, device=device)
    values = table.values.detach()
    name = dispatch.resolve(op, backend, values, dtypes=DTYPES)
    if mask is not None and name != "cpu":
        validation.mask_values(op, "mask", mask)
    if name == "reference":
        return reference.segment_tokens(values, index.offsets, index.turn_ids, index.rows, mask)
    mask = None if mask is None else native.as_mask(mask)
    tokens: Tensor = _launch(name, values.contiguous(), index.offsets, index.turn_ids, index.cu_seqlens, mask)
    return tokens
