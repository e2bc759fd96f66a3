"""Penalties on the divergence from a reference policy."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv.losses import KL

K3_BOUND = 40.0  # k3 goes on by its tangent beyond: finite, and the gradient points the right way
LOW_VARIANCE_LOG_RATIO, LOW_VARIANCE_VALUE = 20.0, 10.0  # verl's and Miles' bounds


def estimate(l: Tensor, estimator: str) -> Tensor:
    """An estimator of KL(policy | reference) from l = log_prob - ref_log_prob (Schulman 2020)."""
    if estimator == "k1":
        return l
    if estimator == "abs":
        return l.abs()
    if estimator == "k2":
        return l.square() / 2
    if estimator == "k3":
        c = l.clamp(-K3_BOUND, K3_BOUND)
        return (torch.expm1(-c) + c) + (1 - (-c).exp()) * (l - c)
    cut = l.clamp(-LOW_VARIANCE_LOG_RATIO, LOW_VARIANCE_LOG_RATIO)
    return (torch.expm1(-cut) + cut).clamp(max=LOW_VARIANCE_VALUE)


def penalty(log_probs: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, kl: KL, log_ratio_bound: float) -> Tensor:
    """The penalty of each token, undivided and without its coefficient."""
    l = log_probs - ref_log_probs
    value = estimate(l, kl.estimator)
    if kl.gradient == "straight-through":
        surrogate = l.square() / 2
        return value.detach() + surrogate - surrogate.detach()
    if kl.gradient == "unbiased":
        return value * (log_probs - old_log_probs).clamp(-log_ratio_bound, log_ratio_bound).exp()
    return value
