"""Which tokens the covariance losses treat apart."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv import coins, validation
from fastadv.losses import SELECTING_LOSSES, LossConfig, loss_config


def covariance_selection(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    config: str | LossConfig,
) -> Tensor:
    """Picks the tokens of "clip_cov" or "kl_cov" out of a whole step.

    A token's covariance is (A - mean A) * (log_prob - mean log_prob), the means over the batch's tokens that count.
    "kl_cov" picks the share `cov_fraction` of largest covariance, one token at least. "clip_cov" picks as many, by
    coin, among the tokens whose covariance lies between `cov_low` and `cov_high` and that the surrogate does not clip;
    fewer where there are fewer. The coin is a hash of (config.seed, position): change the seed every step. Plain
    PyTorch on any device, without a wait for it.

    Args:
        log_probs, old_log_probs: of all the step's tokens, any shape.
        advantages: per token, the same shape.
        mask: the same shape; non-zero tokens count. Mask out tokens of weight 0 too, as `policy_loss` does.
        config: a LossConfig or preset whose loss is "clip_cov" or "kl_cov".

    Returns:
        bool, like log_probs: hand its parts to `policy_loss` as `selected`, with the micro-batches.

    Raises:
        ValueError, TypeError: another loss, shapes or dtypes that do not fit.

    Source: arXiv 2505.22617; verl's clip_cov and kl_cov.
    """
    op = "covariance_selection"
    config = loss_config(config)
    if config.loss not in SELECTING_LOSSES:
        raise ValueError(f"{op}: config is of loss {config.loss!r}; it must be one of 'clip_cov', 'kl_cov'")
    validation.tensor(op, "log_probs", log_probs, dtypes=validation.FLOATS)
    shape, device = tuple(log_probs.shape), log_probs.device
    for name, t in (("old_log_probs", old_log_probs), ("advantages", advantages)):
        validation.tensor(op, name, t, shape=shape, dtypes=validation.FLOATS, device=device)
    validation.tensor(op, "mask", mask, shape=shape, device=device)
    validation.mask_values(op, "mask", mask)
    on = mask != 0
    count = on.sum()

    def exact(values: Tensor) -> Tensor:
        return values.detach().to(torch.float64)

    def centred(values: Tensor) -> Tensor:
        values = torch.where(on, exact(values), 0.0)
        return values - values.sum() / count.clamp(min=1)

    if log_probs.numel() == 0:
        return on
    covariance = centred(advantages) * centred(log_probs)
    wanted = (count * config.cov_fraction).long().clamp(min=1)
    if config.loss == "kl_cov":
        rank_by = torch.where(on, covariance, -torch.inf)
    else:
        log_ratio = torch.where(on, exact(log_probs) - exact(old_log_probs), 0.0)
        ratio = log_ratio.clamp(-config.log_ratio_bound, config.log_ratio_bound).exp()
        values = torch.where(on, exact(advantages), 0.0)
        clipped = -values * ratio.clamp(1 - config.clip_low, 1 + config.clip_high) > -values * ratio
        open_ = on & ~clipped & ~ratio.isnan() & (covariance > config.cov_low) & (covariance < config.cov_high)
        index = torch.arange(log_probs.numel(), device=device)
        coin = coins.uniforms(config.seed, index, "clip_cov").reshape(log_probs.shape)
        rank_by, count = torch.where(open_, coin, -torch.inf), open_.sum()
    order = rank_by.flatten().argsort(descending=True, stable=True)  # ties go to the earlier token
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=device))
    return (place.reshape(log_probs.shape) < torch.minimum(wanted, count)) & (rank_by > -torch.inf)
