"""Launchers of the log-softmax kernels: no autograd, no checks of values.

Logits are `[..., V]` in float32, bfloat16 or float16, any strides, read without a copy. Labels are int64 and
contiguous, one a row: the column in this part of the vocabulary, NO_LABEL where another part has it, SKIPPED for a row
that is not read (its results are 0); any other value gives NaN. An inverse temperature is a number, or a tensor of one
a row. A softcap of 0 is none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastadv import cuda, native
from fastadv.kernels import Kernel

NO_LABEL, SKIPPED, INVALID = -1, -2, -3  # kNoLabel and kSkippedRow in log_softmax.h; any other is invalid
LEADING_DIMS = 8  # kLeadingDims in csrc/cpu/kernels.h

View = tuple[int, int, tuple[int, ...], tuple[int, ...], int, int]


class Results(NamedTuple):
    """Per row, `[R]` float64: what merged statistics come to."""

    log_prob: Tensor
    entropy: Tensor
    sum_p2: Tensor
    lse: Tensor  # log of the sum of exponentials, after softcap and temperature


def logits_view(logits: Tensor) -> View:
    """Logits as the kernels take them: address, type, leading sizes and strides, vocabulary size and stride."""
    *sizes, vocab = logits.shape
    *strides, stride = logits.stride()
    return (native.start(logits), native.DTYPES[logits.dtype], tuple(sizes), tuple(strides), vocab, stride)


def _inputs(
    logits: Tensor, labels: Tensor, inverse_temperature: float | Tensor, softcap: float
) -> tuple[View, int, int, float, float]:
    """What every launcher passes; tensors are float64 and contiguous by now and outlive the call."""
    if isinstance(inverse_temperature, Tensor):
        return logits_view(logits), native.address(labels), native.address(inverse_temperature), 1.0, softcap
    return logits_view(logits), native.address(labels), 0, float(inverse_temperature), softcap


def _row_statistics_cpu(
    logits: Tensor, labels: Tensor, inverse_temperature: float | Tensor, softcap: float, statistics: Tensor
) -> int:
    inputs = _inputs(logits, labels, inverse_temperature, softcap)
    native.module().row_statistics(inputs, statistics.data_ptr(), native.threads(logits.numel()))
    return 0


def _finish_cpu(statistics: Tensor, results: Tensor) -> int:
    parts = statistics.shape[0] if statistics.dim() == 3 else 1
    native.module().finish_statistics(parts, results.shape[1], native.address(statistics), results.data_ptr())
    return 0


def _log_probs_cpu(
    logits: Tensor,
    labels: Tensor,
    inverse_temperature: float | Tensor,
    softcap: float,
    log_prob: Tensor,
    entropy: Tensor | None,
    sum_p2: Tensor | None,
    state: Tensor,
) -> int:
    native.module().token_log_probs(
        _inputs(logits, labels, inverse_temperature, softcap),
        log_prob.data_ptr(),
        native.address(entropy),
        native.address(sum_p2),
        state.data_ptr(),
        native.threads(logits.numel()),
    )
    return 0


def _gradient_cpu(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    sum_p2: Tensor | None,
    g_log_prob: Tensor | None,
    g_entropy: Tensor | None,
    g_sum_p2: Tensor | None,
    inverse_temperature: float | Tensor,
    softcap: float,
    out: Tensor,
) -> int:
    native.module().logits_gradient(
        _inputs(logits, labels, inverse_temperature, softcap),
        lse.data_ptr(),
        *(native.address(t) for t in (entropy, sum_p2, g_log_prob, g_entropy, g_sum_p2)),
        logits_view(out),
        native.threads(logits.numel()),
    )
    return 0


# ---- launchers of the CUDA kernels: rows have at most two leading dimensions and a vocabulary of stride 1

RowsView = tuple[int, int, int, int, int, int, int]


def row_strides(t: Tensor) -> tuple[int, int, int] | None:
    """Size of the second leading dimension, or of the only one, and the strides of both; None where it has others."""
    merged: list[tuple[int, int]] = []  # sizes and strides of leading dimensions, the last first
    for size, stride in zip(reversed(t.shape[:-1]), reversed(t.stride()[:-1]), strict=True):
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        elif size != 1:
            merged.append((size, stride))
    if len(merged) > 2 or (t.stride(-1) != 1 and t.shape[-1] > 1):
        return None
    (inner, inner_stride), (_, outer_stride), *_ = (*merged, (1, 0), (1, 0))
    return inner, outer_stride, inner_stride


def _rows_view(t: Tensor, rows: int) -> tuple[Tensor, RowsView]:
    """A tensor, or new memory of its shape where its strides are none that a kernel takes, and the view of it: address,
    type, rows, size of the vocabulary, `row_strides`."""
    vocab = t.shape[-1]
    strides = (max(rows, 1), 0, vocab) if t.is_contiguous() else row_strides(t)
    if strides is None:
        t = torch.empty(t.shape, dtype=t.dtype, device=t.device)
        return _rows_view(t, rows)
    return t, (native.start(t), native.DTYPES[t.dtype], rows, vocab, *strides)


def _readable(logits: Tensor, rows: int) -> tuple[Tensor, RowsView]:
    """Logits, or their copy, and the view that a kernel reads."""
    read, view = _rows_view(logits, rows)
    return read if read is logits else read.copy_(logits), view


def _scratch(rows: int, vocab: int, device: torch.device) -> Tensor | None:
    """Where blocks of a row that several share leave their sums; None where each row has one."""
    numbers = cuda.module().row_sums_scratch(rows, vocab)
    return torch.empty(numbers, dtype=torch.float64, device=device) if numbers else None


def _cuda_inputs(
    view: RowsView, labels: Tensor, inverse_temperature: float | Tensor, softcap: float
) -> tuple[RowsView, int, int, float, float]:
    if isinstance(inverse_temperature, Tensor):
        return view, native.address(labels), native.address(inverse_temperature), 1.0, softcap
    return view, native.address(labels), 0, float(inverse_temperature), softcap


def _row_statistics_cuda(
    logits: Tensor, labels: Tensor, inverse_temperature: float | Tensor, softcap: float, statistics: Tensor
) -> int:
    logits, view = _readable(logits, labels.numel())
    scratch = _scratch(labels.numel(), logits.shape[-1], logits.device)
    inputs = _cuda_inputs(view, labels, inverse_temperature, softcap)
    cuda.module().row_statistics(*cuda.place(logits), inputs, native.address(scratch), statistics.data_ptr())
    return 0


def _finish_cuda(statistics: Tensor, results: Tensor) -> int:
    parts = statistics.shape[0] if statistics.dim() == 3 else 1
    addresses = (native.address(statistics), results.data_ptr())
    cuda.module().finish_statistics(*cuda.place(results), parts, results.shape[1], *addresses)
    return 0


def _log_probs_cuda(
    logits: Tensor,
    labels: Tensor,
    inverse_temperature: float | Tensor,
    softcap: float,
    log_prob: Tensor,
    entropy: Tensor | None,
    sum_p2: Tensor | None,
    state: Tensor,
) -> int:
    logits, view = _readable(logits, labels.numel())
    scratch = _scratch(labels.numel(), logits.shape[-1], logits.device)
    cuda.module().token_log_probs(
        *cuda.place(logits),
        _cuda_inputs(view, labels, inverse_temperature, softcap),
        native.address(scratch),
        log_prob.data_ptr(),
        native.address(entropy),
        native.address(sum_p2),
        state.data_ptr(),
    )
    return 0


def _gradient_cuda(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    sum_p2: Tensor | None,
    g_log_prob: Tensor | None,
    g_entropy: Tensor | None,
    g_sum_p2: Tensor | None,
    inverse_temperature: float | Tensor,
    softcap: float,
    out: Tensor,
) -> int:
    logits, view = _readable(logits, labels.numel())
    written, target = _rows_view(out, labels.numel())
    cuda.module().logits_gradient(
        *cuda.place(logits),
        _cuda_inputs(view, labels, inverse_temperature, softcap),
        lse.data_ptr(),
        *(native.address(t) for t in (entropy, sum_p2, g_log_prob, g_entropy, g_sum_p2)),
        target,
    )
    if written is not out:
        out.copy_(written)
    return 0


# Each writes its last arguments; what they hold is described at the functions below.
ROW_STATISTICS = Kernel("row_statistics", cpu=_row_statistics_cpu, triton="token_log_probs", cuda=_row_statistics_cuda)
FINISH = Kernel("finish_statistics", cpu=_finish_cpu, triton="token_log_probs", cuda=_finish_cuda)
TOKEN_LOG_PROBS = Kernel("token_log_probs", cpu=_log_probs_cpu, triton="token_log_probs", cuda=_log_probs_cuda)
LOGITS_GRADIENT = Kernel("logits_gradient", cpu=_gradient_cpu, triton="token_log_probs", cuda=_gradient_cuda)


def _exact(x: float | Tensor | None) -> Any:
    """Tensors as the kernels read them, float64 and contiguous; numbers as they are."""
    return x.to(torch.float64).contiguous() if isinstance(x, Tensor) else x


def row_statistics(
    backend: str,
    logits: Tensor,
    labels: Tensor,
    inverse_temperature: float | Tensor = 1.0,
    softcap: float = 0.0,
) -> Tensor:
    """One read of each row: what is merged over parts of the vocabulary.

    Returns:
        `[5, R]` float64: the label's logit after softcap and temperature (-inf where it is not in this part), maximum
        m, sum of e^(z - m), of e^(z - m) (z - m) and of e^(2 (z - m)).
    """
    statistics = torch.empty((5, labels.numel()), dtype=torch.float64, device=logits.device)
    ROW_STATISTICS(backend, logits, labels, _exact(inverse_temperature), softcap, statistics)
    return statistics


def finish(backend: str, statistics: Tensor) -> Results:
    """Merges statistics of parts of the vocabulary, `[5, R]` of one or `[parts, 5, R]`, in the order of parts."""
    results = torch.empty((4, statistics.shape[-1]), dtype=torch.float64, device=statistics.device)
    FINISH(backend, _exact(statistics), results)
    return Results(*results)


def log_probs(
    backend: str,
    logits: Tensor,
    labels: Tensor,
    inverse_temperature: float | Tensor,
    softcap: float,
    moments: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob, entropy and sum of squares like labels in float32, and the state that the gradient needs.

    Without `moments`, entropy and sum of squares are empty. The state is lse, entropy, sum of squares, `[3, R]`
    float64, `[1, R]` without moments.
    """
    shape = labels.shape if moments else (0,)
    log_prob, entropy, sum_p2 = (
        torch.empty(s, dtype=torch.float32, device=logits.device) for s in (labels.shape, shape, shape)
    )
    state = torch.empty((3 if moments else 1, labels.numel()), dtype=torch.float64, device=logits.device)
    wanted = (entropy, sum_p2) if moments else (None, None)
    TOKEN_LOG_PROBS(backend, logits, labels, _exact(inverse_temperature), softcap, log_prob, *wanted, state)
    return log_prob, entropy, sum_p2, state


def logits_gradient(
    backend: str,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    sum_p2: Tensor | None,
    g_log_prob: Tensor | None,
    g_entropy: Tensor | None,
    g_sum_p2: Tensor | None,
    inverse_temperature: float | Tensor = 1.0,
    softcap: float = 0.0,
    *,
    out: Tensor,
) -> Tensor:
    """Writes the gradient by the logits to `out`, shaped and typed like them, any strides; `out` may be the logits.

    A row of which every upstream gradient is 0 is not read, and its gradient is 0.

    Args:
        logits, labels, inverse_temperature, softcap: as in the forward.
        lse: `[R]` float64, of the whole vocabulary.
        entropy, sum_p2: `[R]` float64; needed with their upstream gradients.
        g_log_prob, g_entropy, g_sum_p2: upstream gradients, one a row, any strides; None: nothing flows back.
        out: gets the gradient.
    """
    upstream = [None if g is None else g.to(torch.float32).contiguous() for g in (g_log_prob, g_entropy, g_sum_p2)]
    state = (_exact(x) for x in (lse, entropy, sum_p2))
    LOGITS_GRADIENT(backend, logits, labels, *state, *upstream, _exact(inverse_temperature), softcap, out)
    return out
