"""Score centering: off-policy REINFORCE without the score's mean under the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv import validation
from fastadv.losses import LossConfig, loss_config
from fastadv.ops import _loss_arguments as arguments
from fastadv.ops.policy_loss import LossOutput, policy_loss
from fastadv.ops.token_counts import Denominators
from fastadv.reference.score_centering import centred_scores
from fastadv.rows import Rows
from fastadv.segment_table import SegmentTable

SUPPORTS = ("head", "replayed", "full")


@dataclass(frozen=True)
class Sampler:
    """How the rollouts were sampled; score centering is right for some ways only, and refuses the others.

    Attributes:
        temperature: that the sampler's log-probs are at.
        top_p, top_k, min_p: filters; the values here mean none.
        constrained: a grammar or another constraint cut tokens off.
        speculative: log-probs are a draft model's.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    constrained: bool = False
    speculative: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 1e-6, 1e6),
            ("top_p", 0.0, 1.0),
            ("top_k", -1, 2**31),
            ("min_p", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Sampler: {name} is {value!r}; pass a number")
            if not low <= value <= high:
                raise ValueError(f"Sampler: {name} is {value}; it must be between {low} and {high}")


def score_centering_loss(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    head_log_probs: Tensor,
    rollout_head_log_probs: Tensor,
    advantages: Tensor | SegmentTable,
    mask: Tensor,
    *,
    sampler: Sampler,
    temperature: float = 1.0,
    support: str = "head",
    config: str | LossConfig = "reinforce",
    cu_seqlens: Tensor | None = None,
    weights: Tensor | None = None,
    denominator: float | Tensor | Denominators | None = None,
    reduction: str = "loss",
    backend: str = "auto",
) -> LossOutput:
    """REINFORCE from a stale or otherwise different sampler, with the score's expectation under it taken out.

    Token loss: -A [sg(f(p_y / q_y)) log p_y - sum_v sg(c_v) log p_v], p the policy, q the sampler. f is 1, or what
    `config.correction` says (TIS, MIS). The sum has mean 0 under q, so a baseline is not missed where p and q differ;
    it is 0 where p = q, and where the weight is exactly p / q. Gradient flows to `log_probs` and `head_log_probs`.

    Args:
        log_probs: of the sampled tokens under the policy, `[N]` or `[B, T]`.
        rollout_log_probs: the same under the sampler. NaN is missing, by `config.correction.missing` (neutral without
            a correction).
        head_log_probs: the policy's full-vocabulary log-probs at the sampler's head, `[N, K]` or `[B, T, K]`: say of
            its 128 likeliest tokens.
        rollout_head_log_probs: the sampler's own there; NaN marks a place that it left empty.
        advantages: per token, per rollout or a SegmentTable, as in `policy_loss`.
        mask: like log_probs; non-zero tokens count.
        sampler: how the rollouts were sampled. Filters (top_p, top_k, min_p) need support "replayed"; constrained and
            speculative sampling are refused.
        temperature: that `log_probs` and `head_log_probs` are at; the sampler's.
        support: "head", the head of a larger vocabulary, whose tail is estimated; "replayed", exactly the tokens that a
            filter left, over which the policy's log-probs are normalised too; "full", the whole vocabulary.
        config: loss "reinforce", with at most a correction of level "token" and without veto, KL or entropy; its
            aggregation applies.
        cu_seqlens, weights, denominator, reduction, backend: as in `policy_loss`. The scores are plain PyTorch, on any
            device; the aggregation runs on the backend.

    Returns:
        LossOutput(loss, metrics): "tokens", "is_weight_mean", "is_missing_fraction" and "tail_mean", the sampler's mean
        probability outside of the head.

    Raises:
        ValueError: ways of sampling and compositions that the method is not right for, shapes that do not fit.
        TypeError: an argument of another type or dtype.

    Source: Score Centering Stabilizes Off-policy RL, arXiv 2609.20807; docs/ops/score_centering_loss.md.
    """
    op = "score_centering_loss"
    config = loss_config(config)
    validation.tensor(op, "log_probs", log_probs, dtypes=validation.FLOATS)
    rows = Rows.of(op, "log_probs", log_probs, cu_seqlens)
    shape, device = tuple(log_probs.shape), log_probs.device
    validation.tensor(op, "rollout_log_probs", rollout_log_probs, shape=shape, dtypes=validation.FLOATS, device=device)
    validation.tensor(op, "head_log_probs", head_log_probs, dtypes=validation.FLOATS, device=device)
    if head_log_probs.dim() != len(shape) + 1 or tuple(head_log_probs.shape[:-1]) != shape:
        raise ValueError(f"{op}: head_log_probs has shape {list(head_log_probs.shape)}; expected {[*shape, 'K']}")
    head = tuple(head_log_probs.shape)
    validation.tensor(
        op, "rollout_head_log_probs", rollout_head_log_probs, shape=head, dtypes=validation.FLOATS, device=device
    )
    validation.tensor(op, "mask", mask, shape=shape, dtypes=validation.MASKS, device=device)
    _refuse(op, sampler, temperature, support, config)
    arguments.no_gradient(
        op,
        "log_probs and head_log_probs",
        rollout_log_probs=rollout_log_probs,
        rollout_head_log_probs=rollout_head_log_probs,
    )
    token_weights, row_weights = arguments.weights(op, weights, rows, device)
    on = arguments.active(mask, token_weights) != 0
    if row_weights is not None:
        on = on & (rows.spread(row_weights) != 0)

    dtype = torch.float64 if log_probs.dtype == torch.float64 else torch.float32
    correction = config.token_correction
    log_p, log_q = (torch.where(on, t.to(dtype), 0.0) for t in (log_probs, rollout_log_probs))
    missing = log_q.isnan()
    scores = centred_scores(
        log_p,
        torch.where(missing, log_p.detach(), log_q),
        torch.where(on[..., None], head_log_probs.to(dtype), torch.nan),
        torch.where(on[..., None], rollout_head_log_probs.to(dtype), torch.nan),
        correction,
        tail=support == "head",
    )
    score = scores.score
    excluded = correction is not None and correction.missing == "exclude"
    if excluded:
        score = torch.where(missing, 0.0, score)
    out = policy_loss(
        score, None, advantages, mask, config=config.but(correction=None), cu_seqlens=cu_seqlens, weights=weights,
        denominator=denominator, reduction=reduction, backend=backend,
    )  # fmt: skip
    count = on.sum().clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return (torch.where(on, values, 0.0).sum() / count).to(torch.float32)

    with torch.no_grad():
        metrics = {
            "tokens": out.metrics["tokens"],
            "is_weight_mean": mean(torch.where(missing & excluded, 0.0, scores.weight)),
            "is_missing_fraction": mean(missing.to(dtype)),
            "tail_mean": mean(scores.tail),
        }
    return LossOutput(out.loss, metrics)


def _refuse(op: str, sampler: Sampler, temperature: float, support: str, config: LossConfig) -> None:
    validation.choice(op, "support", support, SUPPORTS)
    if not isinstance(sampler, Sampler):
        raise TypeError(f"{op}: sampler is a {type(sampler).__name__}; pass a fa.Sampler, which says how it sampled")
    if config.loss != "reinforce":
        raise ValueError(
            f"{op}: config is of loss {config.loss!r}; clipped and sequence ratios to an old policy do not compose "
            "with centring, use 'reinforce'"
        )
    if config.kl is not None or config.entropy_coef != 0:
        raise ValueError(f"{op}: config has a KL or entropy term; add those by a policy_loss of their own")
    if any(c.level != "token" or c.veto is not None for c in config.corrections):
        raise ValueError(f"{op}: config.correction weighs whole rollouts; only one of level 'token' has a known mean")
    if config.sequence_mask is not None:
        raise ValueError(f"{op}: config.sequence_mask leaves out tokens after the fact; the rest has no known mean")
    for name, given in (("constrained", sampler.constrained), ("speculative", sampler.speculative)):
        if given:
            raise ValueError(f"{op}: sampler is {name}; its log-probs are not those of the distribution it drew from")
    filtered = sampler.top_p < 1 or sampler.top_k > 0 or sampler.min_p > 0
    if filtered and support != "replayed":
        raise ValueError(
            f"{op}: sampler filters (top_p {sampler.top_p}, top_k {sampler.top_k}, min_p {sampler.min_p}); replay the "
            "tokens that it left and say support='replayed', or sample without a filter"
        )
    if sampler.temperature != temperature:
        raise ValueError(
            f"{op}: sampler.temperature is {sampler.temperature}, but temperature is {temperature}; take the policy's "
            "log-probs at the sampler's"
        )
