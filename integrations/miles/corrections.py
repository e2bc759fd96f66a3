"""Importance weights and reducers of the trainers' own policy loss: `--custom-tis-function-path` and
`--custom-pg-loss-reducer-function-path`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fastadv.integrations.miles.context_parallel import local_spans, local_tokens, place
from fastadv.integrations.miles.losses import reduced, tis_of_flags
from fastadv.integrations.miles.options import Options
from torch import Tensor

import fastadv as fa
from fastadv.reference.corrections import token_weights, weigh


def tis(
    *,
    args: Any,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_seq_lens: Sequence[int] | None = None,
    **more: Any,
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    """`--custom-tis-function-path`: TIS, MIS and IcePop over tokens, sequences and their geometric means, and vetoes.

    Which one says `fastadv.correction`, a mapping of `fastadv.Correction`'s fields or a list of them; without it the
    trainer's own (`--tis-clip`, `--tis-clip-low`). A weight of 0 leaves the denominators alone, as in the trainers.

    Args:
        args: the trainer's namespace.
        pg_loss: `[sum C_i]`, policy terms of this rank's tokens.
        train_log_probs, rollout_log_probs: of them, lists of `[C_i]`.
        loss_masks: whole, lists of `[R_i]`.
        total_lengths, response_lengths: `[B]`.
        max_seq_lens: `[B]`, what sequences are padded to before they are cut; None: not padded.
        more: what newer versions pass besides.

    Returns:
        The terms times their weights, the masks as they came, and metrics `[sum C_i]`.
    """
    options, where = Options.of(args), place()
    corrections = options.correction or (tis_of_flags(args),)
    old, rollout = torch.cat(list(train_log_probs)), torch.cat(list(rollout_log_probs))
    widths: Sequence[Any] = max_seq_lens or [None] * len(loss_masks)
    masks = [
        local_tokens(mask, local_spans(int(total), int(length), where, width=width))
        for mask, total, length, width in zip(loss_masks, total_lengths, response_lengths, widths, strict=True)
    ]
    mask = torch.cat(masks).to(old.device) != 0
    token = next((c for c in corrections if c.level == "token"), None)
    weight, capped, missing = token_weights(old, rollout, token, corrections[0].missing)
    rejected = (weight == 0) & ~missing
    ratio = torch.where(missing, 1.0, (old - rollout).clamp(-20, 20).exp())
    if any(c.level != "token" or c.veto is not None for c in corrections):
        lengths = torch.tensor([part.shape[0] for part in masks])
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(old.device)
        ratios = fa.sequence_log_ratios(old, rollout, mask, cu_seqlens=ends, missing="skip")
        by_row = _row_weights(corrections, reduced(ratios) if where.size > 1 else ratios)
        spread = torch.repeat_interleave(by_row, lengths.to(old.device), output_size=old.shape[0])
        weight, rejected = weight * spread, rejected | (spread == 0)
    weight = weight.to(pg_loss.dtype)
    metrics = {
        "tis": ratio,
        "tis_clipfrac": (capped | rejected).to(torch.float32),
        "tis_abs": (ratio - 1).abs(),
        "tis_weight": weight.to(torch.float32),
    }
    weighted = torch.where(mask & (weight != 0), pg_loss * weight, 0.0)
    return weighted, loss_masks, {name: value.detach().clone() for name, value in metrics.items()}


def _row_weights(corrections: Sequence[fa.Correction], ratios: fa.SequenceLogRatios) -> Tensor:
    """Weights of whole sequences, `[B]` float64."""
    weight = torch.ones_like(ratios.sum)
    for correction in corrections:
        if correction.level != "token":
            weight = weight * weigh(ratios.sum if correction.level == "sequence" else ratios.mean(), correction).weight
        if correction.veto is not None:
            weight = torch.where(ratios.minimum < math.log(correction.veto), 0.0, weight)
    return weight


def pg_loss_reducer(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
) -> Callable[[Tensor], Tensor]:
    """`--custom-pg-loss-reducer-function-path`: a sample's sum over a constant length, Dr. GRPO's.

    The length is `fastadv.horizon` of the file that FASTADV_CONFIG names: the trainers hand no namespace to this hook.
    It divides the policy term only; KL and entropy keep the trainer's own means.

    Args:
        total_lengths, response_lengths: `[B]`.
        loss_masks: whole, lists of `[R_i]`.
        calculate_per_token_loss: the trainer's flag.

    Returns:
        A function of `[sum C_i]` terms at this rank's tokens, context-parallel parts too: their masked sum over the
        horizon.

    Raises:
        ValueError: no horizon, or --calculate-per-token-loss, which divides by tokens afterwards.
    """
    horizon = Options.of(None).horizon
    if horizon is None:
        raise ValueError("the reducer divides by a constant length: set fastadv.horizon in the file of FASTADV_CONFIG")
    if calculate_per_token_loss:
        raise ValueError("--calculate-per-token-loss divides by the tokens of a step, the reducer by a constant length")
    where = place()
    mask = torch.cat([
        local_tokens(mask, local_spans(int(total), int(length), where))
        for mask, total, length in zip(loss_masks, total_lengths, response_lengths, strict=True)
    ]) != 0  # fmt: skip

    def reduce(terms: Tensor) -> Tensor:
        if terms.shape != mask.shape:
            raise ValueError(
                f"{terms.shape[0]} terms for {mask.shape[0]} tokens of this rank: sequences are cut otherwise here "
                "(qkv_format bshd), which the trainer does not tell this hook"
            )
        return torch.where(mask.to(terms.device), terms, 0.0).sum() / horizon

    return reduce
