"""Gram matrix of per-segment weight gradients of a linear layer."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def segment_weight_gram(inputs: Tensor, output_gradients: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`[S, S]` float64: inner products of `u_s = output_gradients[s]^T inputs[s]`, each `[d_out, d_in]`."""
    x, dy = inputs.to(torch.float64), output_gradients.to(torch.float64)  # [N, d_in], [N, d_out]
    ends = cu_seqlens.tolist()
    gradients = [(dy[a:b].T @ x[a:b]).reshape(-1) for a, b in pairwise(ends)]
    u = torch.stack(gradients) if gradients else x.new_zeros(0, x.shape[1] * dy.shape[1])  # [S, d_out * d_in]
    return u @ u.T
