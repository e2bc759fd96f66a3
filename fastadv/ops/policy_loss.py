"""Policy loss from log-probs: value, gradient and metrics in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastadv import dispatch, native, validation
from fastadv.losses import NATIVE_LOSSES, SELECTING_LOSSES, SEQUENCE_LOSSES, LossConfig, loss_config
from fastadv.ops import _loss_arguments as arguments
from fastadv.ops._loss_arguments import ROW, SEGMENT, TOKEN
from fastadv.ops._policy_loss_kernel import SUMS, Formula, Inputs, PolicyLoss, launch, run, scale_of
from fastadv.ops.token_counts import Denominators
from fastadv.reference import policy_loss as reference
from fastadv.reference.policy_loss import TokenInputs
from fastadv.reference.sequence_log_ratios import SequenceLogRatios
from fastadv.rows import Rows
from fastadv.segment_table import Segments, SegmentTable

REDUCTIONS = ("loss", "none")


def without_kernel(config: LossConfig, reduction: str) -> str | None:
    """What no native kernel has, in words; None where one has it."""
    if config.loss not in NATIVE_LOSSES:
        return f"the {config.loss!r} loss"
    if config.sequence_mask is not None:
        return "a sequence_mask"
    if reduction == "none" and config.loss == "gspo" and config.sequence_gradient == "mean":
        return "reduction 'none' with sequence_gradient 'mean', where each token's loss has a gradient at all others"
    return None


class LossOutput(NamedTuple):
    """A loss and its metrics.

    `loss` is 0-d (reduction "loss") or shaped like the log-probs ("none"), float32 (float64 for float64 log-probs).
    `metrics` are 0-d tensors on the same device, without gradient. Fractions and means are over the tokens with a
    non-zero mask and weight, of which there are "tokens"; to combine micro-batches, average weighted by it.

    "clip_fraction" (of dppo_tv and dppo_kl, outside of the trust region), "dual_clip_fraction" (the dual clip, delta or
    ratio_cap; of a covariance loss, the tokens that it picked; of gmpo, clips where the advantage is negative),
    "saturated_fraction", "approx_kl" (mean of old_log_prob - log_prob). With KL or entropy: "policy_loss" (the share of
    the loss without them), "kl", "entropy". With importance weights: "is_weight_mean", "is_rejected_fraction" (weight
    0), "is_capped_fraction" (cut by a token bound), "is_missing_fraction" (no sampler log-prob). With a sequence mask:
    "sequence_mask_fraction" (the tokens that it leaves out). With corrections of
    whole rollouts, over the "rollouts" that have a token: "is_row_rejected_fraction", "is_row_capped_fraction",
    "is_veto_fraction"; to combine these, average weighted by "rollouts". "policy_loss" adds up as the loss does.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


# ---- the public op ---------------------------------------------------------------------------------------------------


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor | SegmentTable,
    mask: Tensor,
    *,
    config: str | LossConfig = "ppo",
    cu_seqlens: Tensor | None = None,
    turn_ids: Tensor | Segments | None = None,
    rollout_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
    weights: Tensor | None = None,
    is_weights: Tensor | None = None,
    selected: Tensor | None = None,
    sequence_log_ratios: SequenceLogRatios | None = None,
    rollout_log_ratios: SequenceLogRatios | None = None,
    row_tokens: Tensor | None = None,
    denominator: float | Tensor | Denominators | None = None,
    reduction: str = "loss",
    backend: str = "auto",
) -> LossOutput:
    """Policy loss of a batch, or of a part of one.

    The loss of a step is the sum over any split of its rollouts, if each part is given the step's denominators; the
    gradient of each token is then the same to the bit. Gradient flows to `log_probs` and to `entropy`.

    Args:
        log_probs: log-probability of each token under the policy, `[N]` packed or `[B, T]` padded; float32, bfloat16 or
            float16 (native), float64 (reference); any strides.
        old_log_probs: the same under the policy that the ratio is to, no gradient. None: allowed for "reinforce", whose
            corrections are then to the policy itself.
        advantages: per token (like log_probs), per rollout (`[B]`), or a SegmentTable, which is looked up in the
            kernel: no per-token advantage exists. A packed batch of as many tokens as rollouts reads `[N]` as per
            token.
        mask: like log_probs, bool, integer or whole-valued float: non-zero tokens count, in numerators and
            denominators.
        config: a LossConfig, or the name of a preset of `fastadv.PRESETS`.
        cu_seqlens: `[B + 1]` int32 or int64 for packed tokens; without it, 1-D tokens are one rollout.
        turn_ids: for a SegmentTable, if not those that it was built from; 0 advantage where -1.
        rollout_log_probs: like log_probs, the sampler's, no gradient; for `config.correction`, and for
            `config.sequence_mask` where it asks for them. NaN is missing.
        ref_log_probs: like log_probs, the reference policy's, no gradient; for `config.kl`.
        entropy: like log_probs; for `config.entropy_coef`. Gradient flows to it.
        weights: `[B]` or like log_probs: multiplies numerators of every term, never a denominator. A weight of exactly
            0 excludes what lies there, NaN too, also from the ratio of its rollout.
        is_weights: like log_probs, importance weights, no gradient; they multiply the policy term. 0 rejects the token.
        selected: bool like log_probs, for "clip_cov" and "kl_cov" where the call has a part of a step:
            `fastadv.covariance_selection` of the step. None: picked from this call's tokens.
        sequence_log_ratios: for sequence losses where the call has parts of rollouts (context parallel): the whole
            rollouts', of (log_probs, old_log_probs), reduced over the ranks.
        rollout_log_ratios: the same of (old_log_probs, rollout_log_probs) with missing="skip", for corrections of whole
            rollouts; a correction of tokens, and missing "exclude", need rollout_log_probs as well.
        row_tokens: `[B]` integers, for "seq-mean-token-mean" where the call has parts of rollouts: the tokens that each
            whole rollout is divided by. None: counted from the mask.
        denominator: where the divisor comes from. None: counted from this call's mask. Denominators: counted over the
            step (and its ranks) by `fastadv.denominators`. A number or 0-d tensor: stands in for the count. Which count
            is divided by is the configuration's choice.
        reduction: "loss" for one number, "none" for weighted token losses, undivided and like log_probs, 0 outside of
            the mask.
        backend: "auto" or the name of one of `fastadv.backends()`. The losses of `fastadv.losses.NATIVE_LOSSES` have
            kernels, for float32, bfloat16 and float16; float64 per-token inputs take "auto" to the reference.

    Returns:
        LossOutput(loss, metrics). A batch without a token that counts gives 0, with a graph.

    Raises:
        ValueError: shapes that do not fit, a fractional mask value, an unknown option, a tensor that gets no gradient
            and requires it, an argument that the configuration needs and lacks or that nothing would read, a missing
            horizon, a divisor that is not positive.
        TypeError: an argument of another type or dtype.
        BackendUnavailableError: a backend by name that has no kernel for the loss.

    Source: docs/theory.md and docs/ops/policy_loss.md; the losses and aggregations are described at LossConfig.
    """
    op = "policy_loss"
    config = loss_config(config)
    validation.choice(op, "reduction", reduction, REDUCTIONS)
    if reduction == "none" and (denominator is not None or row_tokens is not None):
        ignored = "denominator" if denominator is not None else "row_tokens"
        raise ValueError(f"{op}: {ignored} is given, but reduction 'none' divides by nothing; leave it out")
    validation.tensor(op, "log_probs", log_probs, dtypes=validation.FLOATS)
    rows = Rows.of(op, "log_probs", log_probs, cu_seqlens)
    shape, device = tuple(log_probs.shape), log_probs.device
    if old_log_probs is None and config.loss != "reinforce":
        raise ValueError(f"{op}: old_log_probs is None; the {config.loss!r} loss needs it")
    arguments.check_sampler(op, config, rollout_log_probs, rollout_log_ratios)
    if config.sequence_mask is not None:
        arguments.check_sequence_mask(
            op, config.sequence_mask, old_log_probs, sequence_log_ratios=sequence_log_ratios,
            rollout_log_ratios=rollout_log_ratios, row_tokens=row_tokens,
        )  # fmt: skip
    arguments.used_by(
        op,
        ref_log_probs=(ref_log_probs, config.kl is not None, "a KL penalty"),
        entropy=(entropy, config.entropy_coef != 0, "a non-zero entropy_coef"),
    )
    optional = {
        "old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs, "ref_log_probs": ref_log_probs,
        "entropy": entropy, "is_weights": is_weights,
    }  # fmt: skip
    for name, t in optional.items():
        if t is not None:
            validation.tensor(op, name, t, shape=shape, dtypes=validation.FLOATS, device=device)
    validation.tensor(op, "mask", mask, shape=shape, device=device, dtypes=validation.MASKS)
    if is_weights is not None and config.loss == "gmpo":
        raise ValueError(
            f"{op}: is_weights is per token, but 'gmpo' has one term a rollout; use weights or a correction"
        )
    given = arguments.advantages(op, advantages, turn_ids, rows, device)
    token_weights, row_weights = arguments.weights(op, weights, rows, device)
    no_gradient = {name: t for name, t in optional.items() if name != "entropy"}
    step = vars(denominator) if isinstance(denominator, Denominators) else {"denominator": denominator}
    arguments.no_gradient(op, "log_probs and entropy", **no_gradient, **step, advantages=given.values, weights=weights)

    token_values = given.values if given.kind == TOKEN else None
    floats = (log_probs, *optional.values(), token_values, token_weights)
    backend = dispatch.resolve(op, backend, *floats, reference_only=without_kernel(config, reduction))
    if backend not in ("reference", "cpu"):
        validation.mask_values(op, "mask", mask)
    if backend != "reference":
        mask = native.as_mask(mask)
    scale = arguments.Scale()
    if reduction == "loss":
        scale = arguments.scale(op, config, denominator, mask, rows, row_tokens, backend)
    by_rollout = config.loss in SEQUENCE_LOSSES or any(c.level != "token" or c.veto for c in config.corrections)
    active = arguments.active(mask, token_weights) if by_rollout else mask  # nothing else looks at whole rollouts
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    weighted = is_weights is not None or bool(config.corrections)
    row_log_ratios = arguments.row_log_ratios(
        op, config, log_probs, old_log_probs, active, rows, sequence_log_ratios, weighted, backend
    )
    row_is_weights, row_metrics = arguments.row_corrections(
        op, config, old, rollout_log_probs, active, row_weights, rows, rollout_log_ratios, backend
    )
    inputs = Inputs(
        old_log_probs=old_log_probs,
        mask=mask,
        cu_seqlens=rows.cu_seqlens,
        advantages=given.values,
        turn_ids=given.turn_ids,
        segment_offsets=given.offsets,
        token_weights=token_weights,
        row_weights=row_weights,
        is_weights=is_weights,
        row_tokens=scale.row_tokens,
        divisor=scale.divisor,
        rollout_log_probs=rollout_log_probs,
        ref_log_probs=ref_log_probs,
        row_log_ratios=row_log_ratios,
        row_is_weights=row_is_weights,
    )
    per_token = reduction == "none"
    if selected is not None and config.loss not in SELECTING_LOSSES:
        raise ValueError(f"{op}: selected is given, but the {config.loss!r} loss selects nothing; leave it out")
    if backend == "reference":
        chosen = (selected, denominator is None)
        reduced = _reference(
            op, log_probs, entropy, inputs, given.kind, rows, config, scale.numerator, chosen, per_token
        )
    else:
        formula = Formula.of(config, given.kind, scale.numerator)
        reduced = _native(backend, log_probs, entropy, inputs, formula, per_token)
    return LossOutput(reduced.loss, _metrics(reduced, config, inputs, entropy) | row_metrics)


class _Reduced(NamedTuple):
    """A loss and what its metrics are made of."""

    loss: Tensor
    means: Mapping[str, Tensor]  # by names of SUMS, 0-d float32; "policy" is no mean but a share of the loss
    tokens: Tensor  # 0-d float64


def _native(
    backend: str,
    log_probs: Tensor,
    entropy: Tensor | None,
    inputs: Inputs,
    formula: Formula,
    per_token: bool,
) -> _Reduced:
    by_row = {"row_log_ratios": inputs.row_log_ratios, "row_is_weights": inputs.row_is_weights}
    if formula.advantage_kind != TOKEN:
        by_row["advantages"] = inputs.advantages
    given = {name: t.to(torch.float32).contiguous() for name, t in by_row.items() if t is not None}
    if given:
        inputs = inputs._replace(**given)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (log_probs, entropy)]
    if torch.compiler.is_compiling():
        numbers = [float(x) for x in formula]
        loss, *_, sums, means = launch(backend, log_probs, entropy, list(inputs), numbers, wanted, per_token)
    elif any(wanted):
        loss, sums, means = PolicyLoss.apply(  # type: ignore[no-untyped-call]
            log_probs, entropy, inputs, formula, per_token, backend
        )
    else:
        loss, _, sums, means = run(backend, log_probs, entropy, inputs, formula, wanted, per_token)
    return _Reduced(loss, dict(zip(SUMS, means.unbind(), strict=True)), sums[SUMS.index("tokens")])


def _reference(
    op: str,
    log_probs: Tensor,
    entropy: Tensor | None,
    inputs: Inputs,
    kind: int,
    rows: Rows,
    config: LossConfig,
    numerator: float,
    chosen: tuple[Tensor | None, bool],
    per_token: bool,
) -> _Reduced:
    validation.mask_values(op, "mask", inputs.mask)
    old_log_probs = log_probs.detach() if inputs.old_log_probs is None else inputs.old_log_probs
    floats = (
        log_probs, old_log_probs, inputs.advantages, inputs.token_weights, inputs.is_weights, inputs.rollout_log_probs,
        inputs.ref_log_probs, entropy,
    )  # fmt: skip
    dtype = torch.float64 if any(t is not None and t.dtype == torch.float64 for t in floats) else torch.float32
    weights = inputs.token_weights if inputs.row_weights is None else rows.spread(inputs.row_weights)
    advantages = inputs.advantages.to(dtype)
    if kind == ROW:
        advantages = rows.spread(advantages)
    elif kind == SEGMENT:
        assert inputs.turn_ids is not None
        assert inputs.segment_offsets is not None
        active = arguments.active(inputs.mask, weights)
        advantages = _looked_up(op, advantages, inputs.turn_ids, inputs.segment_offsets, active, rows)

    def cast(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(dtype)

    selected = None
    if config.loss in SELECTING_LOSSES:
        selected = arguments.selection(
            op,
            config,
            chosen[0],
            log_probs,
            old_log_probs,
            advantages,
            arguments.active(inputs.mask, weights),
            chosen[1],
        )
    tokens = TokenInputs(
        log_probs=log_probs.to(dtype),
        old_log_probs=old_log_probs.to(dtype),
        advantages=advantages,
        mask=inputs.mask,
        weights=cast(weights),
        is_weights=cast(inputs.is_weights),
        rollout_log_probs=cast(inputs.rollout_log_probs),
        ref_log_probs=cast(inputs.ref_log_probs),
        entropy=cast(entropy),
        selected=selected,
        row_log_ratios=cast(inputs.row_log_ratios),
        row_is_weights=cast(inputs.row_is_weights),
    )
    scale = scale_of(inputs.divisor, numerator, log_probs.device)
    token_losses, loss, sums = reference.policy_loss(
        tokens, rows, config, 1.0 if scale is None else scale, inputs.row_tokens
    )
    out = torch.float64 if log_probs.dtype == torch.float64 else torch.float32
    count = sums["tokens"].clamp(min=1)
    means = {name: (total if name == "policy" else total / count).to(torch.float32) for name, total in sums.items()}
    return _Reduced((token_losses if per_token else loss).to(out), means, sums["tokens"])


def _looked_up(op: str, values: Tensor, turn_ids: Tensor, offsets: Tensor, mask: Tensor, rows: Rows) -> Tensor:
    turns = rows.spread(offsets.diff())
    outside = (turn_ids >= turns) & (mask != 0)
    if validation.reads_values(turn_ids) and bool(outside.any()):
        validation.native_faults(op, 2)
    if values.shape[0] == 0:
        return values.new_zeros(turn_ids.shape)
    inside = (turn_ids >= 0) & (turn_ids < turns)
    looked_up = values[torch.where(inside, rows.spread(offsets[:-1]) + turn_ids, 0)]
    return torch.where(inside, looked_up, torch.where(outside, torch.nan, 0.0))


def _metrics(reduced: _Reduced, config: LossConfig, inputs: Inputs, entropy: Tensor | None) -> dict[str, Tensor]:
    names = {"clip_fraction": "clipped", "dual_clip_fraction": "bounded", "saturated_fraction": "saturated"}
    if inputs.old_log_probs is not None:
        names["approx_kl"] = "negative_log_ratio"
    if inputs.ref_log_probs is not None:
        names["kl"] = "kl"
    if entropy is not None:
        names["entropy"] = "entropy"
    if inputs.is_weights is not None or config.corrections:
        names |= {"is_weight_mean": "is_weight", "is_rejected_fraction": "rejected"}
    if config.sequence_mask is not None:
        names["sequence_mask_fraction"] = "left_out"
    if inputs.rollout_log_probs is not None and config.corrections:
        names |= {"is_missing_fraction": "missing"}
        if config.token_correction is not None:
            names |= {"is_capped_fraction": "capped"}
    if inputs.ref_log_probs is not None or entropy is not None:
        names["policy_loss"] = "policy"
    metrics = {name: reduced.means[of] for name, of in names.items()}
    metrics["tokens"] = reduced.tokens
    return metrics
