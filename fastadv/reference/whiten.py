"""Whitening over the tokens that count. A spread is three numbers, `[3]` float64: how many values, their mean, and the
sum of their squared distances from it."""

from __future__ import annotations

import torch
from torch import Tensor


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """The spread of the values of the mask: the mean first, then the distances from it."""
    on = mask != 0  # like values
    x = torch.where(on, values, 0.0).to(torch.float64).flatten()
    on = on.flatten()
    count = on.sum().to(torch.float64)
    # Distances from a value of the batch: values without spread are then exact zeros.
    pivot = x.gather(0, on.to(torch.int8).argmax().view(1)) if x.shape[0] else x.new_zeros(1)  # [1]
    apart = torch.where(on, x - pivot, 0.0)
    mean = apart.sum() / count.clamp(min=1)
    squares = torch.where(on, apart - mean, 0.0).square().sum()
    return torch.stack([count, pivot[0] + mean, squares])


def merged(spreads: Tensor) -> Tensor:
    """The spread of all values from those of parts, `[R, 3]` to `[3]` (Chan's formula for many parts)."""
    count, mean, squares = spreads.unbind(-1)  # [R]
    total = count.sum()
    pivot = mean.gather(0, count.argmax().view(1)) if count.shape[0] else total.new_zeros(1)  # [1]
    apart = torch.where(count != 0, mean - pivot, 0.0)
    shift = (count * apart).sum() / total.clamp(min=1)
    between = (count * (apart - shift).square()).sum()
    return torch.stack([total, pivot[0] + shift, squares.sum() + between])


def mean_and_scale(spread: Tensor, ddof: float, eps: float, eps_form: str) -> Tensor:
    """What is subtracted, and then multiplied by, `[2]`. Too few values for a variance have none: 0."""
    count, mean, squares = spread.unbind()
    freedom = count - ddof
    variance = torch.where(freedom > 0, squares / freedom, 0.0)
    if eps_form == "add_to_variance":
        variance = variance + eps
    elif eps_form == "floor_of_variance":
        variance = variance.clamp(min=eps)
    return torch.stack([mean, torch.where(variance == 0, 0.0, variance.rsqrt())])


def standardize(values: Tensor, mask: Tensor, mean_and_scale: Tensor) -> Tensor:
    """(value - mean) * scale in the mask, 0 outside of it, float64."""
    mean, scale = mean_and_scale.unbind()
    return torch.where(mask != 0, (values.to(torch.float64) - mean) * scale, 0.0)
