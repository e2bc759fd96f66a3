"""Log-probability of the label, entropy and sum of squared probabilities of rows of logits: the specification."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowResults(NamedTuple):
    """Per row, shaped like the labels."""

    log_probs: Tensor
    entropy: Tensor
    sum_p2: Tensor


def token_log_probs(
    logits: Tensor, labels: Tensor, reads: Tensor, temperature: float | Tensor, softcap: float | None
) -> RowResults:
    """p = softmax(softcapped / temperature); log p_label, H = -sum p log p and sum p^2, with 0 log 0 = 0.

    Args:
        logits: `[..., V]` float32 or float64; -inf is a token of probability exactly 0.
        labels: like logits without the last dimension, int64; one outside of [0, V) gives NaN.
        reads: bool, like labels: False for rows that are replaced before any arithmetic; their results are 0.
        temperature: a positive number, or one a row.
        softcap: z becomes softcap * tanh(z / softcap), before the temperature; -inf stays -inf. None: no softcap.
    """
    valid = (labels >= 0) & (labels < logits.shape[-1])
    z = torch.where(reads[..., None], logits, 0.0)  # [..., V]
    if softcap is not None:
        exact = z.double()  # autograd's 1 - tanh^2 cancels in float32 where tanh is near 1
        z = torch.where(z > -torch.inf, softcap * torch.tanh(exact / softcap), exact).to(z.dtype)
    z = z / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
    # A constant where it is -inf: no gradient flows there, whatever the label is. A row of nothing else stays, for NaN.
    z = torch.where((z == -torch.inf) & (z != -torch.inf).any(-1, keepdim=True), -torch.inf, z)
    log_p = z.log_softmax(-1)

    label = torch.where(reads & valid, labels, 0)
    log_prob = log_p.gather(-1, label[..., None]).squeeze(-1)
    zero = log_p == -torch.inf
    entropy = -torch.where(zero, 0.0, log_p.exp() * torch.where(zero, 0.0, log_p)).sum(-1)
    sum_p2 = (2 * log_p).exp().sum(-1)
    return RowResults(*(torch.where(reads, torch.where(valid, x, torch.nan), 0.0) for x in (log_prob, entropy, sum_p2)))
