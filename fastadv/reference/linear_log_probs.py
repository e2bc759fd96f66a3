"""Log-probability of each label from hidden states and an output layer: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv.reference.token_log_probs import RowResults, token_log_probs


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    reads: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
) -> RowResults:
    """`token_log_probs` of hidden @ weight.T + bias, computed in float32, in float64 for float64 hidden.

    Args:
        hidden: `[..., H]`; what lies where `reads` is False is replaced before any arithmetic.
        weight: `[V, H]`.
        bias: `[V]` or None.
        labels, reads, temperature, softcap: as in `token_log_probs`.
    """
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    chosen = torch.where(reads[..., None], hidden, 0.0).to(dtype)  # [..., H]
    with torch.autocast(hidden.device.type, enabled=False):
        logits = chosen @ weight.to(dtype).t()  # [..., V]
    if bias is not None:
        logits = logits + bias.to(dtype)
    found = token_log_probs(logits, labels, reads, temperature, softcap)
    return RowResults(*(x.to(dtype) for x in found))  # float64 temperatures promote
