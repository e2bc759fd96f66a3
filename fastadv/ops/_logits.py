"""Launchers of the log-softmax kernels: CPU tensors in, no autograd, no checks of values.

Logits are `[..., V]` in float32, bfloat16 or float16, any strides, read without a copy. Labels are int64 and
contiguous, one a row: the column in this part of the vocabulary, NO_LABEL where another part has it, SKIPPED for a row
that is not read (its results are 0); any other value gives NaN. An inverse temperature is a number, or a tensor of one
a row. A softcap of 0 is none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastadv import native

NO_LABEL, SKIPPED, INVALID = -1, -2, -3  # kNoLabel and kSkippedRow in csrc/cpu/kernels.h; any other is invalid
LEADING_DIMS = 8  # kLeadingDims there

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


def _exact(x: float | Tensor | None) -> Any:
    """Tensors as the kernels read them, float64 and contiguous; numbers as they are."""
    return x.to(torch.float64).contiguous() if isinstance(x, Tensor) else x


def row_statistics(
    logits: Tensor, labels: Tensor, inverse_temperature: float | Tensor = 1.0, softcap: float = 0.0
) -> Tensor:
    """One read of each row: what is merged over parts of the vocabulary.

    Returns:
        `[5, R]` float64: the label's logit after softcap and temperature (-inf where it is not in this part), maximum
        m, sum of e^(z - m), of e^(z - m) (z - m) and of e^(2 (z - m)).
    """
    statistics, inverse_temperature = torch.empty((5, labels.numel()), dtype=torch.float64), _exact(inverse_temperature)
    inputs = _inputs(logits, labels, inverse_temperature, softcap)
    native.module().row_statistics(inputs, statistics.data_ptr(), native.threads(logits.numel()))
    return statistics


def finish(statistics: Tensor) -> Results:
    """Merges statistics of parts of the vocabulary, `[5, R]` of one or `[parts, 5, R]`, in the order of parts."""
    statistics = _exact(statistics)
    rows = statistics.shape[-1]
    results = torch.empty((4, rows), dtype=torch.float64)
    parts = statistics.shape[0] if statistics.dim() == 3 else 1
    native.module().finish_statistics(parts, rows, native.address(statistics), results.data_ptr())
    return Results(*results)


def log_probs(
    logits: Tensor, labels: Tensor, inverse_temperature: float | Tensor, softcap: float, moments: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob, entropy and sum of squares like labels in float32, and the state that the gradient needs.

    Without `moments`, entropy and sum of squares are empty. The state is lse, entropy, sum of squares, `[3, R]`
    float64, `[1, R]` without moments.
    """
    inverse_temperature = _exact(inverse_temperature)
    log_prob = torch.empty(labels.shape, dtype=torch.float32)
    shape = labels.shape if moments else (0,)
    entropy, sum_p2 = torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.float32)
    state = torch.empty((3 if moments else 1, labels.numel()), dtype=torch.float64)
    native.module().token_log_probs(
        _inputs(logits, labels, inverse_temperature, softcap),
        log_prob.data_ptr(),
        entropy.data_ptr() if moments else 0,
        sum_p2.data_ptr() if moments else 0,
        state.data_ptr(),
        native.threads(logits.numel()),
    )
    return log_prob, entropy, sum_p2, state


def logits_gradient(
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
    inverse_temperature, lse, entropy, sum_p2 = (_exact(x) for x in (inverse_temperature, lse, entropy, sum_p2))
    upstream = [None if g is None else g.to(torch.float32).contiguous() for g in (g_log_prob, g_entropy, g_sum_p2)]
    native.module().logits_gradient(
        _inputs(logits, labels, inverse_temperature, softcap),
        lse.data_ptr(),
        native.address(entropy),
        native.address(sum_p2),
        *(native.address(g) for g in upstream),
        logits_view(out),
        native.threads(logits.numel()),
    )
    return out
