"""Log-ratios of whole rollouts, for sequence-level losses and corrections."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv import cuda, dispatch, native, validation
from fastadv.kernels import Kernel
from fastadv.ops._register import native_op
from fastadv.reference import sequence_log_ratios as reference
from fastadv.reference.sequence_log_ratios import SequenceLogRatios
from fastadv.rows import Rows

DTYPES = (torch.float64, torch.float64, torch.int64, torch.int64)  # of a SequenceLogRatios


def _cpu(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    skip_missing: bool,
    out: list[Tensor],
) -> int:
    rows = Rows.trusted(mask, cu_seqlens)
    faults: int = native.module().sequence_log_ratios(
        native.rows(rows),
        native.view(log_probs),
        native.view(old_log_probs),
        native.view(mask),
        skip_missing,
        tuple(t.data_ptr() for t in out),
        native.threads(rows.tokens),
    )
    return faults


BLOCKS = 1024  # more do not make a GPU faster
PART = 16384  # tokens of a row below which a second block is not worth it
PARTIAL = 32  # bytes of what a block finds of a row


def _cuda(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    skip_missing: bool,
    out: list[Tensor],
) -> int:
    rows = Rows.trusted(mask, cu_seqlens)
    log_probs, old_log_probs, on = log_probs.contiguous(), old_log_probs.contiguous(), native.mask_bytes(mask)
    device, stream = cuda.place(mask)
    count = max(1, rows.count)
    parts = max(1, min(BLOCKS // count, rows.tokens // (count * PART)))  # blocks that share a row
    shared = parts > 1
    partials = torch.empty(parts * count * PARTIAL, dtype=torch.uint8, device=mask.device) if shared else None
    counter = cuda.counter(mask, stream) if shared else None
    cuda.module().sequence_log_ratios(
        device,
        stream,
        native.rows(rows),
        native.DTYPES[log_probs.dtype],
        native.address(log_probs),
        native.DTYPES[old_log_probs.dtype],
        native.address(old_log_probs),
        native.address(on),
        skip_missing,
        parts,
        tuple(t.data_ptr() for t in out),
        native.address(partials),
        native.address(counter),
    )
    return 0


# Writes the fields of a SequenceLogRatios, each [B].
SEQUENCE_LOG_RATIOS = Kernel("sequence_log_ratios", cpu=_cpu, triton="sequence_log_ratios", cuda=_cuda)


def _fake(
    backend: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    skip_missing: bool,
) -> list[Tensor]:
    rows = mask.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return [mask.new_empty(rows, dtype=dtype) for dtype in DTYPES]


@native_op("sequence_log_ratios", _fake)
def _launch(
    backend: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    skip_missing: bool,
) -> list[Tensor]:
    rows = Rows.trusted(mask, cu_seqlens).count
    out = [torch.empty(rows, dtype=dtype, device=mask.device) for dtype in DTYPES]
    faults = SEQUENCE_LOG_RATIOS(backend, log_probs, old_log_probs, mask, cu_seqlens, skip_missing, out)
    validation.native_faults("sequence_log_ratios", faults)
    return out


def sequence_log_ratios(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    missing: str = "nan",
    backend: str = "auto",
) -> SequenceLogRatios:
    """Sums log_prob - old_log_prob over each rollout. No gradient flows.

    Args:
        log_probs, old_log_probs: `[N]` packed or `[B, T]` padded; float32, bfloat16 or float16 (native), float64
            (reference); any strides. For a correction these are the old and the sampler's log-probs.
        mask: like log_probs; non-zero tokens count.
        cu_seqlens: `[B + 1]` for packed tokens; without it, 1-D tokens are one rollout.
        missing: what an old log-prob of NaN does: "nan", the sum is NaN; "skip", sum and minimum leave the token out.
            It is counted either way.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        SequenceLogRatios(sum, minimum, tokens, missing), each `[B]`, and its mean(). Where ranks hold parts of a
        rollout, reduce the fields over them and hand the result to `policy_loss`.

    Raises:
        ValueError, TypeError: shapes, dtypes or `cu_seqlens` that do not fit, a fractional mask value.
    """
    op = "sequence_log_ratios"
    validation.choice(op, "missing", missing, ("nan", "skip"))
    validation.tensor(op, "log_probs", log_probs, dtypes=validation.FLOATS)
    rows = Rows.of(op, "log_probs", log_probs, cu_seqlens)
    shape, device = tuple(log_probs.shape), log_probs.device
    validation.tensor(op, "old_log_probs", old_log_probs, shape=shape, dtypes=validation.FLOATS, device=device)
    validation.tensor(op, "mask", mask, shape=shape, dtypes=validation.MASKS, device=device)
    name = dispatch.resolve(op, backend, log_probs, old_log_probs)
    return log_ratios_of(op, log_probs, old_log_probs, mask, rows, missing == "skip", name)


def log_ratios_of(
    op: str, log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, rows: Rows, skip_missing: bool, backend: str
) -> SequenceLogRatios:
    """`sequence_log_ratios` for checked arguments and a backend that is settled."""
    given = (log_probs.detach(), old_log_probs.detach())
    if backend != "cpu":
        validation.mask_values(op, "mask", mask)
    if backend == "reference":
        return reference.sequence_log_ratios(*given, mask, rows, skip_missing)
    return SequenceLogRatios(*_launch(backend, *given, native.as_mask(mask), rows.cu_seqlens, skip_missing))
