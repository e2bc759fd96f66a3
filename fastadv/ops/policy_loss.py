"""Policy loss from log-probs: value, gradient and metrics in one pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastadv import dispatch, native, validation
from fastadv.losses import LOSSES, LossConfig, loss_config
from fastadv.ops._register import native_op
from fastadv.ops.token_counts import Denominators, counts_of
from fastadv.reference import policy_loss as reference
from fastadv.reference.policy_loss import LossSums, TokenInputs
from fastadv.rows import Rows
from fastadv.segment_table import Segments, SegmentTable

REDUCTIONS = ("loss", "none")
TOKEN, ROW, SEGMENT = 0, 1, 2  # AdvantageKind in csrc/cpu/kernels.h
SUMS = ("loss", "clipped", "bounded", "saturated", "negative_log_ratio", "tokens")


class LossOutput(NamedTuple):
    """A loss and its metrics.

    `loss` is 0-d (reduction "loss") or shaped like the log-probs ("none"), float32 (float64 for float64 log-probs).
    `metrics` are 0-d tensors on the same device, without gradient; fractions and means are over the tokens with a
    non-zero mask and weight: "clip_fraction", "dual_clip_fraction", "saturated_fraction", "approx_kl" (mean of
    old_log_prob - log_prob) and "tokens", how many these are. To combine micro-batches, average weighted by "tokens".
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class Inputs(NamedTuple):
    """Tensors beside the log-probs, checked, as the registered op takes them; None where there is none."""

    old_log_probs: Tensor | None
    mask: Tensor
    cu_seqlens: Tensor | None  # [B + 1] int64
    advantages: Tensor  # per token, [B] or [S], as `Formula.advantage_kind` says
    turn_ids: Tensor | None
    segment_offsets: Tensor | None  # [B + 1] int64
    token_weights: Tensor | None
    row_weights: Tensor | None  # [B] float64
    is_weights: Tensor | None
    row_tokens: Tensor | None  # [B] int64: each row's sum is divided by it
    scale: Tensor | None  # 0-d float64 that the sum is multiplied by


class Formula(NamedTuple):
    """Numbers that say what is computed, as the registered op takes them."""

    advantage_kind: int
    loss: int  # index in LOSSES
    ratio_low: float
    ratio_high: float
    dual_clip: float  # 0: none
    log_ratio_bound: float


# ---- the kernel ------------------------------------------------------------------------------------------------------


def launch_into(
    log_probs: Tensor,
    inputs: Inputs,
    formula: Formula,
    *,
    gradient: Tensor | None,
    token_losses: Tensor | None,
    sums: Tensor,
) -> None:
    """Runs the CPU kernel into given buffers.

    Args:
        log_probs: `[N]` or `[B, T]`.
        inputs, formula: checked arguments.
        gradient: like log_probs, in its dtype, any strides; gets d loss / d log_prob. None: not computed.
        token_losses: float32, contiguous, like log_probs; gets weighted token losses. None: not computed.
        sums: `[6]` float64; gets loss * scale and the sums of SUMS.

    Raises:
        ValueError: a fractional mask value, a turn that the segment table does not have.
    """
    rows = Rows.trusted(log_probs, inputs.cu_seqlens)
    faults = native.module().policy_loss(
        native.rows(rows),
        native.view(log_probs),
        native.view(inputs.old_log_probs),
        native.view(inputs.mask),
        formula.advantage_kind,
        native.view(inputs.advantages),
        native.view(inputs.turn_ids),
        native.address(inputs.segment_offsets),
        native.view(inputs.token_weights),
        native.view(inputs.is_weights),
        native.address(inputs.row_weights),
        native.address(inputs.row_tokens),
        1.0 if inputs.scale is None else float(inputs.scale),
        formula.loss,
        formula[2:],
        native.view(gradient),
        native.address(token_losses),
        sums.data_ptr(),
        native.threads(rows.tokens),
    )
    validation.native_faults("policy_loss", faults)


def _fake(
    log_probs: Tensor, inputs: list[Tensor | None], formula: list[float], with_gradient: bool, per_token: bool
) -> tuple[Tensor, Tensor, Tensor]:
    value = log_probs.new_empty(log_probs.shape if per_token else (), dtype=torch.float32)
    gradient = log_probs.new_empty(log_probs.shape if with_gradient else (0,))
    return value, gradient, log_probs.new_empty(len(SUMS), dtype=torch.float64)


def _backward(ctx: Any, grad_loss: Tensor, grad_gradient: Tensor, grad_sums: Tensor) -> tuple[Any, ...]:
    (gradient,) = ctx.saved_tensors
    return (gradient * grad_loss).to(gradient.dtype), None, None, None, None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


@native_op("policy_loss", _fake, autograd=(_backward, _setup_context))
def _launch(
    log_probs: Tensor, inputs: list[Tensor | None], formula: list[float], with_gradient: bool, per_token: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gradient = native.empty(log_probs.shape if with_gradient else (0,), log_probs.dtype)
    value = native.empty(log_probs.shape if per_token else (), torch.float32)
    sums = torch.empty(len(SUMS), dtype=torch.float64)
    kind, loss, *parameters = formula
    launch_into(
        log_probs,
        Inputs(*inputs),  # type: ignore[arg-type]
        Formula(int(kind), int(loss), *parameters),
        gradient=gradient if with_gradient else None,
        token_losses=value if per_token else None,
        sums=sums,
    )
    if not per_token:
        value.copy_(sums[0])
    return value, gradient, sums


class _PolicyLoss(torch.autograd.Function):
    """The forward leaves the gradient in a buffer; the first backward hands the buffer over, a second one computes it
    again."""

    @staticmethod
    def forward(
        ctx: Any, log_probs: Tensor, inputs: Inputs, formula: Formula, per_token: bool
    ) -> tuple[Tensor, Tensor]:
        value, ctx.gradient, sums = _launch(log_probs, list(inputs), list(formula), True, per_token)
        ctx.save_for_backward(log_probs, *inputs)
        ctx.formula, ctx.per_token = list(formula), per_token
        ctx.mark_non_differentiable(sums)
        return value, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, grad_sums: Tensor) -> tuple[Tensor, None, None, None]:
        log_probs, *inputs = ctx.saved_tensors  # raises where the graph was freed
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            _, gradient, _ = _launch(log_probs, inputs, ctx.formula, True, ctx.per_token)
        if ctx.per_token or float(grad_loss) != 1.0:
            gradient.mul_(grad_loss)
        return gradient, None, None, None


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
    weights: Tensor | None = None,
    is_weights: Tensor | None = None,
    denominator: float | Tensor | Denominators | None = None,
    reduction: str = "loss",
    backend: str = "auto",
) -> LossOutput:
    """Policy loss of a batch, or of a part of one.

    The loss of a step is the sum over any split of its rollouts, if each part is given the step's denominators; the
    gradient of each token is then the same to the bit. Gradient flows to `log_probs` only.

    Args:
        log_probs: log-probability of each token under the policy, `[N]` packed or `[B, T]` padded; float32, bfloat16 or
            float16 (native), float64 (reference); any strides.
        old_log_probs: the same under the policy that the ratio is to, no gradient. None: allowed for "reinforce".
        advantages: per token (like log_probs), per rollout (`[B]`), or a SegmentTable, which is looked up in the
            kernel: no per-token advantage exists. A packed batch of as many tokens as rollouts reads `[N]` as per
            token.
        mask: like log_probs, bool, integer or whole-valued float: non-zero tokens count, in numerators and
            denominators.
        config: a LossConfig, or the name of a preset: "ppo" or "reinforce".
        cu_seqlens: `[B + 1]` int32 or int64 for packed tokens; without it, 1-D tokens are one rollout.
        turn_ids: for a SegmentTable, if not those that it was built from; 0 advantage where -1.
        weights: `[B]` or like log_probs: multiplies numerators, never a denominator. A weight of exactly 0 excludes
            what lies there, NaN too.
        is_weights: like log_probs, importance weights, no gradient; they multiply numerators. 0 rejects the token.
        denominator: where the divisor comes from. None: counted from this call's mask. Denominators: counted over the
            step (and its ranks) by `fastadv.denominators`. A number or 0-d tensor: stands in for the count. Which count
            is divided by is the configuration's choice.
        reduction: "loss" for one number, "none" for weighted token losses, undivided and like log_probs, 0 outside of
            the mask.
        backend: "auto", "reference" or "cpu".

    Returns:
        LossOutput(loss, metrics). A batch without a token that counts gives 0, with a graph.

    Raises:
        ValueError: shapes that do not fit, a fractional mask value, an unknown option, a tensor other than log_probs
            that requires grad, a missing horizon, a divisor that is not positive.
        TypeError: an argument of another type or dtype.

    Source: docs/theory.md; the losses and aggregations are described at LossConfig.
    """
    op = "policy_loss"
    config = loss_config(config)
    validation.choice(op, "reduction", reduction, REDUCTIONS)
    validation.tensor(op, "log_probs", log_probs, dtypes=validation.FLOATS)
    rows = Rows.of(op, "log_probs", log_probs, cu_seqlens)
    shape, device = tuple(log_probs.shape), log_probs.device
    if old_log_probs is None:
        if config.loss != "reinforce":
            raise ValueError(f"{op}: old_log_probs is None; the {config.loss!r} loss needs it")
    else:
        validation.tensor(op, "old_log_probs", old_log_probs, shape=shape, dtypes=validation.FLOATS, device=device)
    validation.tensor(
        op, "mask", mask, shape=shape, device=device, dtypes=(torch.bool, *validation.INTEGERS, *validation.FLOATS)
    )
    if is_weights is not None:
        validation.tensor(op, "is_weights", is_weights, shape=shape, dtypes=validation.FLOATS, device=device)
    kind, values, ids, offsets = _advantages(op, advantages, turn_ids, rows, device)
    token_weights, row_weights = _weights(op, weights, rows, device)
    _no_gradient(op, old_log_probs=old_log_probs, advantages=values, weights=weights, is_weights=is_weights)

    token_values = values if kind == TOKEN else None
    name = dispatch.resolve(op, backend, log_probs, old_log_probs, token_values, token_weights, is_weights)
    scale, row_tokens = _scale(op, config, denominator, mask, rows, name) if reduction == "loss" else (None, None)
    inputs = Inputs(
        old_log_probs=old_log_probs,
        mask=mask,
        cu_seqlens=rows.cu_seqlens,
        advantages=values,
        turn_ids=ids,
        segment_offsets=offsets,
        token_weights=token_weights,
        row_weights=row_weights,
        is_weights=is_weights,
        row_tokens=row_tokens,
        scale=scale,
    )
    per_token = reduction == "none"
    if name == "reference":
        sums = _reference(op, log_probs, inputs, kind, rows, config)
        loss, totals = sums.token_losses if per_token else sums.loss, torch.stack(sums[2:])
    else:
        loss, totals = _native(log_probs, inputs, kind, config, per_token)
    return LossOutput(loss, _metrics(totals, old_log_probs))


def _native(log_probs: Tensor, inputs: Inputs, kind: int, config: LossConfig, per_token: bool) -> tuple[Tensor, Tensor]:
    advantages = inputs.advantages if kind == TOKEN else inputs.advantages.to(torch.float32).contiguous()
    inputs = inputs._replace(mask=native.as_mask(inputs.mask), advantages=advantages)
    ratios = (1 - config.clip_low, 1 + config.clip_high, config.dual_clip or 0.0, config.log_ratio_bound)
    formula = Formula(kind, LOSSES.index(config.loss), *ratios)
    with_gradient = torch.is_grad_enabled() and log_probs.requires_grad
    if torch.compiler.is_compiling() or not with_gradient:
        loss, _, sums = _launch(log_probs, list(inputs), [float(x) for x in formula], with_gradient, per_token)
    else:
        loss, sums = _PolicyLoss.apply(log_probs, inputs, formula, per_token)  # type: ignore[no-untyped-call]
    return loss, sums[1:]


def _reference(op: str, log_probs: Tensor, inputs: Inputs, kind: int, rows: Rows, config: LossConfig) -> LossSums:
    validation.mask_values(op, "mask", inputs.mask)
    old_log_probs = log_probs if inputs.old_log_probs is None else inputs.old_log_probs
    floats = (log_probs, old_log_probs, inputs.advantages, inputs.token_weights, inputs.is_weights)
    dtype = torch.float64 if any(t is not None and t.dtype == torch.float64 for t in floats) else torch.float32
    weights = inputs.token_weights if inputs.row_weights is None else rows.spread(inputs.row_weights)
    advantages = inputs.advantages.to(dtype)
    if kind == ROW:
        advantages = rows.spread(advantages)
    elif kind == SEGMENT:
        assert inputs.turn_ids is not None
        assert inputs.segment_offsets is not None
        advantages = _looked_up(op, advantages, inputs.turn_ids, inputs.segment_offsets, inputs.mask, rows)
    tokens = TokenInputs(
        log_probs=log_probs.to(dtype),
        old_log_probs=old_log_probs.detach().to(dtype),
        advantages=advantages,
        mask=inputs.mask,
        weights=None if weights is None else weights.to(dtype),
        is_weights=None if inputs.is_weights is None else inputs.is_weights.to(dtype),
    )
    scale = 1.0 if inputs.scale is None else inputs.scale
    sums = reference.policy_loss(tokens, rows, config, scale, inputs.row_tokens)
    out = torch.float64 if log_probs.dtype == torch.float64 else torch.float32
    return sums._replace(token_losses=sums.token_losses.to(out), loss=sums.loss.to(out))


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


def _metrics(sums: Tensor, old_log_probs: Tensor | None) -> dict[str, Tensor]:
    """Metrics from the sums [clipped, bounded, saturated, negative_log_ratio, tokens]."""
    clipped, bounded, saturated, kl = (sums[:4] / sums[4].clamp(min=1)).to(torch.float32).unbind()
    metrics = {
        "clip_fraction": clipped,
        "dual_clip_fraction": bounded,
        "saturated_fraction": saturated,
        "approx_kl": kl,
        "tokens": sums[4],
    }
    if old_log_probs is None:
        del metrics["approx_kl"]
    return metrics


# ---- arguments -------------------------------------------------------------------------------------------------------


def _per_token_or_row(op: str, name: str, value: Any, rows: Rows, device: torch.device) -> int:
    """Whether a tensor has one value per token or per rollout."""
    validation.tensor(op, name, value, device=device)
    token, row = tuple(value.shape) == tuple(rows.shape), tuple(value.shape) == (rows.count,)
    if not token and not row:
        raise ValueError(
            f"{op}: {name} has shape {list(value.shape)}; expected {list(rows.shape)} (per token) or "
            f"[{rows.count}] (per rollout)"
        )
    both = token and row and rows.count > 1 and rows.cu_seqlens is not None
    if both and validation.reads_values(rows.cu_seqlens) and bool((rows.lengths() != 1).any()):
        raise ValueError(
            f"{op}: {name} has shape [{rows.count}], which is both the number of tokens and of rollouts; pass a "
            "SegmentTable or spread it over the tokens to say which is meant"
        )
    return TOKEN if token else ROW


def _advantages(
    op: str, advantages: Any, turn_ids: Any, rows: Rows, device: torch.device
) -> tuple[int, Tensor, Tensor | None, Tensor | None]:
    """Kind, values, and for a table the turn ids and offsets."""
    if not isinstance(advantages, SegmentTable):
        kind = _per_token_or_row(op, "advantages", advantages, rows, device)
        validation.tensor(op, "advantages", advantages, dtypes=validation.FLOATS)
        if turn_ids is not None:
            raise ValueError(f"{op}: turn_ids is given, but advantages is a tensor; turn_ids belongs to a SegmentTable")
        return kind, advantages, None, None
    index, values = advantages.segments, advantages.values
    validation.tensor(op, "advantages.values", values, shape=(index.count,), dtypes=validation.FLOATS, device=device)
    ids = index.turn_ids if turn_ids is None else turn_ids.turn_ids if isinstance(turn_ids, Segments) else turn_ids
    validation.tensor(op, "turn_ids", ids, shape=tuple(rows.shape), dtypes=(torch.int32, torch.int64), device=device)
    if index.num_rows != rows.count:
        raise ValueError(f"{op}: advantages is a table of {index.num_rows} rollouts, log_probs has {rows.count}")
    return SEGMENT, values, ids, index.offsets


def _weights(op: str, weights: Any, rows: Rows, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """(per token, per rollout as float64); at most one is there."""
    if weights is None:
        return None, None
    validation.tensor(op, "weights", weights, dtypes=(*validation.FLOATS, *validation.INTEGERS, torch.bool))
    if _per_token_or_row(op, "weights", weights, rows, device) == ROW:
        return None, weights.detach().to(torch.float64).contiguous()
    return weights if weights.is_floating_point() else weights.to(torch.float32), None


def _no_gradient(op: str, **tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None and t.requires_grad:
            raise ValueError(f"{op}: {name} requires grad, but gradient flows to log_probs only; pass {name}.detach()")


def _scale(
    op: str, config: LossConfig, denominator: Any, mask: Tensor, rows: Rows, backend: str
) -> tuple[Tensor, Tensor | None]:
    """What the sum is multiplied by (0-d float64), and the tokens of each row where rows are divided by them."""
    name, horizon, ranks = config.denominator_name, config.horizon, 1
    counts = None
    counted = denominator is None and name in ("tokens", "sequences")
    if counted or config.loss_agg_mode == "seq-mean-token-mean":
        counts = counts_of(op, mask, rows, backend)
    divisor: Any = 1.0
    if isinstance(denominator, Denominators):
        horizon, ranks = config.horizon or denominator.horizon, denominator.ranks
        divisor = 1.0 if name == "one" else getattr(denominator, name)
    elif denominator is not None:
        if not isinstance(denominator, (int, float, Tensor)) or isinstance(denominator, bool):
            raise TypeError(
                f"{op}: denominator is a {type(denominator).__name__}; pass a number, a 0-d tensor or Denominators"
            )
        divisor = denominator
        if not isinstance(denominator, Tensor) or validation.reads_values(denominator):
            if isinstance(denominator, Tensor) and denominator.numel() != 1:
                raise ValueError(f"{op}: denominator has shape {list(denominator.shape)}; pass one number")
            if not 0 < float(denominator) < float("inf"):
                raise ValueError(f"{op}: denominator is {float(denominator)}; it must be positive")
    elif name == "candidates":
        divisor = float(rows.count)
    elif counts is not None and counted:
        divisor = counts.sum() if name == "tokens" else (counts > 0).sum()
    if config.loss_agg_mode == "seq-mean-token-sum-norm":
        if horizon is None:
            raise ValueError(
                f"{op}: loss_agg_mode 'seq-mean-token-sum-norm' divides by a constant length; set horizon in the config"
            )
    else:
        horizon = None

    divisor = torch.as_tensor(divisor, dtype=torch.float64, device=mask.device).reshape(())
    divisor = torch.where(divisor > 0, divisor, 1.0)  # nothing counted: the numerator is 0 too
    scale = ranks / divisor if horizon is None else ranks / (divisor * horizon)
    return scale, counts if config.loss_agg_mode == "seq-mean-token-mean" else None
