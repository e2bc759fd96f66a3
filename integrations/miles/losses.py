"""Policy losses of fastadv in Miles' and slime's trainers.

`--loss-type custom_loss --custom-loss-function-path fastadv.integrations.miles.custom_loss`: without `fastadv.loss` the
loss that the trainer's flags describe, in one kernel; with it any other of `fastadv.LossConfig`.

The trainer sums samples' means over a step (or their tokens, `--calculate-per-token-loss`) and divides by itself: what
is returned here is that sum, so that denominators are the trainer's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fastadv.integrations.miles.clips import CLIPPED
from fastadv.integrations.miles.context_parallel import Place, context_group, local_spans, local_tokens, place
from fastadv.integrations.miles.layout import accepted, trainers_function
from fastadv.integrations.miles.options import Options
from torch import Tensor

import fastadv as fa
from fastadv.losses import KL, Correction, LossConfig

SUM = "token-sum"


def config_of(args: Any, options: Options) -> LossConfig:
    """The loss: `fastadv.loss`, and what the trainer's flags add to it; without it what the flags say.

    Raises:
        ValueError: a loss that is a mean over whole rollouts, which the trainer's sum over samples is not.
    """
    config = _of_flags(args) if options.loss is None else options.loss
    if config.loss == "gmpo":
        raise ValueError("fastadv.loss gmpo is one term a rollout and its own mean; the trainer sums over tokens")
    if config.kl is None and _flag(args, "use_kl_loss", False):
        gradient = "unbiased" if _flag(args, "use_unbiased_kl", False) else "own"
        config = config.but(kl=KL(_flag(args, "kl_loss_type", "k1"), _flag(args, "kl_loss_coef", 0.0), gradient))
    if not config.entropy_coef:
        config = config.but(entropy_coef=_flag(args, "entropy_coef", 0.0))
    if not config.corrections and _flag(args, "use_tis", False):
        config = config.but(correction=tis_of_flags(args))
    return config.but(loss_agg_mode=SUM, denominator=None)


def tis_of_flags(args: Any) -> Correction:
    """The trainer's own truncated importance sampling."""
    return Correction("tis", "token", _flag(args, "tis_clip_low", 0.0), _flag(args, "tis_clip", 2.0))


def _of_flags(args: Any) -> LossConfig:
    low = min(_flag(args, "eps_clip", 0.2), 1.0)  # no ratio is below 1 - 1
    high = _flag(args, "eps_clip_high", None)
    high = low if high is None else high
    estimator = _flag(args, "advantage_estimator", "grpo")
    if estimator == "cispo":
        return LossConfig("cispo", low, high)
    return LossConfig("gspo" if estimator == "gspo" else "ppo", low, high, dual_clip=_flag(args, "eps_clip_c", None))


def _flag(args: Any, name: str, default: Any) -> Any:
    value = getattr(args, name, default)
    return default if value is None else value


def custom_loss(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """`--custom-loss-function-path`.

    Args:
        args: the trainer's namespace.
        batch: a micro-batch of one rank: lists of `[C_i]` tensors where the rank holds C_i of R_i response tokens
            (`advantages`, `log_probs`, `rollout_log_probs`, `ref_log_probs`), whole `loss_masks` `[R_i]`, and
            `rollout_mask_sums` `[B]`.
        logits: `[1, T, V / tp]`, float32.
        sum_of_sample_mean: the trainer's reducer of what lies at the rank's tokens `[sum C_i]`; metrics go through it.

    Returns:
        The loss, 0-d, not divided by rollouts or tokens of the step, and metrics, 0-d, which the trainer divides as the
        loss.

    Raises:
        ValueError: log-probs that the loss needs and the trainer did not score.
    """
    config, where = config_of(args, Options.of(args)), place()
    scored = _log_probs(args, batch, logits, with_entropy=bool(config.entropy_coef))
    log_probs = torch.cat(scored["log_probs"])
    mask, cu_seqlens = _local_masks(batch, where, log_probs.device)
    old = _old_log_probs(args, batch, scored["log_probs"])
    given: dict[str, Any] = {}
    if config.corrections:
        given["rollout_log_probs"] = _joined(batch, "rollout_log_probs", "a correction reads the sampler's log-probs")
    if config.kl is not None:
        given["ref_log_probs"] = _joined(batch, "ref_log_probs", "--use-kl-loss reads the reference's log-probs")
    if config.entropy_coef:
        given["entropy"] = torch.cat(scored["entropy"])
    if not args.calculate_per_token_loss:
        given["weights"] = 1 / _denominators(batch, log_probs.device)
    if where.size > 1:
        given |= _whole_rollouts(config, log_probs, old, given.get("rollout_log_probs"), mask, cu_seqlens)
    if log_probs.shape[0] == cu_seqlens.shape[0] - 1:
        cu_seqlens, given = _one_more_sample(cu_seqlens, given)
    out = fa.policy_loss(
        log_probs, old, torch.cat([a.detach() for a in batch["advantages"]]), mask, config=config,
        cu_seqlens=cu_seqlens, **given,
    )  # fmt: skip
    CLIPPED.add(out.metrics)
    loss = out.loss if log_probs.numel() else out.loss + 0 * logits.sum()  # a rank without a token takes part
    return loss, _metrics(out, config, sum_of_sample_mean(torch.ones_like(mask, dtype=torch.float32)))


def _log_probs(args: Any, batch: dict[str, Any], logits: Tensor, *, with_entropy: bool) -> dict[str, list[Tensor]]:
    function = trainers_function("get_log_probs_and_entropy")
    found = function(
        logits,
        **accepted(
            function,
            {
                "args": args,
                "unconcat_tokens": batch["unconcat_tokens"],
                "total_lengths": batch["total_lengths"],
                "response_lengths": batch["response_lengths"],
                "with_entropy": with_entropy,
                "max_seq_lens": batch.get("max_seq_lens"),
            },
        ),
    )
    scored: dict[str, list[Tensor]] = found[1] if isinstance(found, tuple) else found  # slime returns a pair
    return scored


def _old_log_probs(args: Any, batch: dict[str, Any], scored: list[Tensor]) -> Tensor:
    """What the ratio is to: the sampler's with --use-rollout-logprobs, else the trainer's before the step."""
    if _flag(args, "use_rollout_logprobs", False):
        return _joined(batch, "rollout_log_probs", "--use-rollout-logprobs reads the sampler's log-probs")
    if not batch.get("log_probs"):
        return torch.cat([values.detach() for values in scored])  # nobody scored them: the step is on policy
    return _joined(batch, "log_probs", "")


def _joined(batch: dict[str, Any], name: str, why: str) -> Tensor:
    if batch.get(name) is None:
        raise ValueError(f"{why}, and the micro-batch has no {name}")
    return torch.cat([values.detach() for values in batch[name]])


def _local_masks(batch: dict[str, Any], where: Place, device: torch.device) -> tuple[Tensor, Tensor]:
    """The masks at this rank's tokens, packed `[sum C_i]`, and the ends of the samples `[B + 1]`."""
    widths = batch.get("max_seq_lens") or [None] * len(batch["loss_masks"])
    parts = [
        local_tokens(mask, local_spans(int(total), int(length), where, width=width))
        for mask, total, length, width in zip(
            batch["loss_masks"], batch["total_lengths"], batch["response_lengths"], widths, strict=True
        )
    ]
    ends = torch.tensor([0, *(part.shape[0] for part in parts)]).cumsum(0)
    return torch.cat(parts).to(device), ends.to(device)


def _one_more_sample(cu_seqlens: Tensor, given: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """A sample without tokens at the end, where there are as many tokens as samples: what there is per token and what
    there is per sample would have one shape."""
    found = dict(given)
    if "weights" in found:
        found["weights"] = torch.nn.functional.pad(found["weights"], (0, 1), value=1.0)
    for name in ("sequence_log_ratios", "rollout_log_ratios"):
        if name in found:
            found[name] = fa.SequenceLogRatios(*(torch.nn.functional.pad(values, (0, 1)) for values in found[name]))
    return torch.cat([cu_seqlens, cu_seqlens[-1:]]), found


def _denominators(batch: dict[str, Any], device: torch.device) -> Tensor:
    """What each sample's sum is divided by, `[B]` float64: its whole rollout's mask, as the trainer counted it."""
    given = batch.get("rollout_mask_sums")
    if given is None:
        given = torch.stack([mask.sum() for mask in batch["loss_masks"]])
    return torch.as_tensor(given).to(device, torch.float64).clamp(min=1)


def _whole_rollouts(
    config: LossConfig, log_probs: Tensor, old: Tensor, rollout: Tensor | None, mask: Tensor, cu_seqlens: Tensor
) -> dict[str, Any]:
    """Log-ratios of whole sequences, of which context-parallel ranks hold parts."""
    given: dict[str, Any] = {}
    if config.loss in ("gspo", "vespo"):
        given["sequence_log_ratios"] = reduced(
            fa.sequence_log_ratios(log_probs.detach(), old, mask, cu_seqlens=cu_seqlens)
        )
    if rollout is not None and any(c.level != "token" or c.veto is not None for c in config.corrections):
        ratios = fa.sequence_log_ratios(old, rollout, mask, cu_seqlens=cu_seqlens, missing="skip")
        given["rollout_log_ratios"] = reduced(ratios)
    return given


def reduced(ratios: fa.SequenceLogRatios) -> fa.SequenceLogRatios:
    """Log-ratios of whole sequences from those of their parts on this rank's context-parallel group."""
    group = context_group()
    for values in (ratios.sum, ratios.tokens, ratios.missing):
        torch.distributed.all_reduce(values, group=group)
    torch.distributed.all_reduce(ratios.minimum, op=torch.distributed.ReduceOp.MIN, group=group)
    return ratios


def _metrics(out: fa.LossOutput, config: LossConfig, samples: Tensor) -> dict[str, Tensor]:
    """Metrics by the trainers' names. Means over tokens are multiplied by what the trainer divides sums by: the rank's
    samples, or its tokens."""
    m = out.metrics
    loss = out.loss.detach()
    found = {"loss": loss, "pg_loss": m.get("policy_loss", loss)}
    for ours, theirs in (("clip_fraction", "pg_clipfrac"), ("approx_kl", "ppo_kl"), ("is_weight_mean", "tis")):
        if ours in m:
            found[theirs] = m[ours] * samples
    if config.corrections:
        touched = ("is_capped_fraction", "is_rejected_fraction", "is_row_capped_fraction")
        found["tis_clipfrac"] = sum((m[name] for name in touched if name in m), torch.zeros_like(loss)) * samples
    if config.entropy_coef:
        found["entropy_loss"] = m["entropy"] * samples
    if config.kl is not None:
        found["kl_loss"] = m["kl"] * samples
    return {name: value.detach().to(torch.float32).reshape(()) for name, value in found.items()}
