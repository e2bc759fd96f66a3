"""verl's own loss functions, by verl's names and with its signatures, made of our kernels: what `accelerate` puts in.

They equal verl 0.9.1's in value, gradient and metrics, but where verl is wrong, and in what nobody should rely on:

| function | verl 0.9.1 | here |
|---|---|---|
| every mode of `agg_loss` but token-mean and token-sum | NaN at a masked position makes the loss NaN | masked positions count nowhere, in no gradient |
| every loss | a micro-batch without a token is 0/0 unless the trainer counts | 0, with a graph |
| `compute_policy_loss_geo_mean` | mean over the micro-batch's rows: k micro-batches give k times the gradient (#7913) | over `global_batch_size` and the ranks, where the trainer gives them |
| `compute_policy_loss_clip_cov` | the coins are `torch.randperm`'s | the same law, other coins, seeded by torch's generator |
| `compute_policy_loss_clip_cov`, `_kl_cov` | pick out of each micro-batch | so do these: a loss is not shown the rest of the step |
| `agg_loss`, seq-mean-token-sum-norm | without `loss_scale_factor` divides by the micro-batch's longest response | the same; losses named `fastadv_...` refuse |
| metrics of `compute_policy_loss_dro` | over all tokens | over those whose importance weight is not 0 |
| `response_mask` | a fraction weighs its token | an error: weigh the advantages |
| low precision | sums in the input's dtype | sums and results in float32 |
| log-ratios of gpg, dro, geo_mean, clip_cov, kl_cov | exp overflows above 88 | cut at 80 |
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import torch
from fastadv.integrations.verl.policy_losses import NAMED, PolicyLoss, as_verl_calls, compute, step_denominators
from torch import Tensor

import fastadv as fa

_SUM = fa.LossConfig("reinforce")  # of -A x, which is x where A is -1
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl"}
KL_ESTIMATORS["k3"] = "low_var_kl"  # verl's k3 has the same cuts


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> Tensor:
    """Token losses `[B, R]` as one number, divided by what the trainer counted over the mini-batch and its ranks."""
    info = {
        "dp_size": dp_size, "batch_num_tokens": batch_num_tokens, "global_batch_size": global_batch_size,
        "loss_scale_factor": loss_scale_factor,
    }  # fmt: skip
    config, denominator = step_denominators(_SUM.but(loss_agg_mode=loss_agg_mode), info, loss_mask.shape[-1])
    minus_one = loss_mat.new_full(loss_mat.shape[:1], -1.0)  # [B]
    loss: Tensor = fa.policy_loss(loss_mat, None, minus_one, loss_mask, config=config, denominator=denominator).loss
    return loss


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Penalty of each token on the divergence from the reference; "+" gives an estimator k2's gradient."""
    base = kl_penalty.removesuffix("+")
    if base not in KL_ESTIMATORS:  # "full" needs the logits, in verl too
        raise NotImplementedError(f"kl_penalty is {kl_penalty!r}; use {', '.join(KL_ESTIMATORS)}, each also with '+'")
    penalty = fa.KL(KL_ESTIMATORS[base], 1.0, "own" if base == kl_penalty else "straight-through")
    flat, ref = logprob.reshape(-1), ref_logprob.reshape(-1)  # [N]
    everywhere = torch.ones((), dtype=torch.bool, device=flat.device).expand(flat.shape)
    nothing = flat.new_zeros(1)  # no advantage, and a weight of 0 to the policy term
    losses = fa.policy_loss(
        flat, None, nothing, everywhere, config=fa.LossConfig("reinforce", kl=penalty), ref_log_probs=ref,
        is_weights=nothing.expand(flat.shape), reduction="none",
    ).loss  # fmt: skip
    return losses.view(logprob.shape)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Half of the larger squared error of the values, as they are and held near the old ones; and how often the second
    was the larger."""
    on = response_mask != 0
    vpreds, returns, values = (torch.where(on, t, 0.0) for t in (vpreds, returns, values))
    held = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain, clipped = (vpreds - returns).square(), (held - returns).square()
    loss = agg_loss(
        torch.maximum(plain, clipped), response_mask, loss_agg_mode, dp_size, batch_num_tokens, global_batch_size,
        loss_scale_factor,
    )  # fmt: skip
    return 0.5 * loss, ((clipped > plain) & on).sum() / on.sum().clamp(min=1)


def _like_verls(name: str, ours: str, loss_agg_mode: str = "token-mean") -> PolicyLoss:
    return as_verl_calls(f"compute_policy_loss_{name}", NAMED[ours], loss_agg_mode=loss_agg_mode, local_width=True)


compute_policy_loss_vanilla = _like_verls("vanilla", "ppo")
compute_policy_loss_gspo = _like_verls("gspo", "gspo", "seq-mean-token-mean")
compute_policy_loss_sapo = _like_verls("sapo", "sapo", "seq-mean-token-mean")
compute_policy_loss_cispo = _like_verls("cispo", "cispo")
compute_policy_loss_gpg = _like_verls("gpg", "gpg")
compute_policy_loss_geo_mean = _like_verls("geo_mean", "geo_mean")
compute_policy_loss_clip_cov = _like_verls("clip_cov", "clip_cov")
compute_policy_loss_kl_cov = _like_verls("kl_cov", "kl_cov")
compute_policy_loss_dppo_tv = _like_verls("dppo_tv", "dppo_tv")
compute_policy_loss_dppo_kl = _like_verls("dppo_kl", "dppo_kl")
compute_policy_loss_dro = _like_verls("dro", "dro")


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """verl's loss of "bypass_mode" with loss_type "reinforce": (loss, metrics)."""
    return compute(
        NAMED["reinforce"], rollout_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
        rollout_is_weights, log_prob.shape[-1],
    )  # fmt: skip
