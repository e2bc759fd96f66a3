"""The policy loss's kernel: what it takes, its registered op, and its autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastadv import cuda, native, validation
from fastadv.kernels import Kernel
from fastadv.losses import CORRECTIONS, KL_ESTIMATORS, KL_GRADIENTS, NATIVE_LOSSES, LossConfig
from fastadv.ops import _loss_arguments as arguments
from fastadv.ops._register import first_order, native_op, needs_dispatcher
from fastadv.rows import Rows

# What the kernel sums over the batch, in its order.
SUMS = (
    "loss", "policy", "clipped", "bounded", "saturated", "negative_log_ratio", "tokens", "kl", "entropy", "is_weight",
    "rejected", "capped", "missing",
)  # fmt: skip


class Inputs(NamedTuple):
    """Tensors beside log-probs and entropy, checked, as the registered op takes them; None where there is none."""

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
    divisor: Tensor | None  # 0-d float64: the sum is multiplied by Formula.numerator over it; NaN unless positive
    rollout_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    row_log_ratios: Tensor | None = None  # [B]; float32 for the kernel
    row_is_weights: Tensor | None = None  # [B]; float32 for the kernel


class Formula(NamedTuple):
    """Numbers that say what is computed, as the registered op takes them; the bindings read all but the first."""

    advantage_kind: int
    loss: int  # index in NATIVE_LOSSES
    ratio_low: float
    ratio_high: float
    dual_clip: float  # 0: none
    delta: float  # 0: none
    log_ratio_bound: float
    tau_pos: float
    tau_neg: float
    correction: int = 0  # 0: none, 4: only missing log-probs matter
    is_low: float = 0.0
    is_high: float = 0.0
    is_log_low: float = 0.0
    is_log_high: float = 0.0
    missing_weight: float = 1.0
    kl: int = 0  # 0: none
    kl_gradient: int = 0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    shared_gradient: int = 0
    numerator: float = 1.0  # what the sum is multiplied by, where there is no divisor

    @classmethod
    def of(cls, config: LossConfig, advantage_kind: int, numerator: float = 1.0) -> Formula:
        """The numbers of a configuration whose loss has a kernel."""
        formula = cls(
            advantage_kind,
            NATIVE_LOSSES.index(config.loss),
            1 - config.clip_low,
            1 + config.clip_high,
            config.dual_clip or 0.0,
            config.delta or 0.0,
            config.log_ratio_bound,
            config.tau_pos,
            config.tau_neg,
            entropy_coef=config.entropy_coef,
            shared_gradient=int(config.loss == "gspo" and config.sequence_gradient == "mean"),
            numerator=numerator,
        )
        if config.corrections:
            formula = formula._replace(
                correction=len(CORRECTIONS) + 1,
                missing_weight=1.0 if config.corrections[0].missing == "neutral" else 0.0,
            )
        if token := config.token_correction:
            formula = formula._replace(
                correction=CORRECTIONS.index(token.kind) + 1,
                is_low=token.low,
                is_high=token.high,
                is_log_low=math.log(token.low) if token.low > 0 else -math.inf,
                is_log_high=math.log(token.high),
            )
        if config.kl is not None:
            formula = formula._replace(
                kl=KL_ESTIMATORS.index(config.kl.estimator) + 1,
                kl_gradient=KL_GRADIENTS.index(config.kl.gradient),
                kl_coef=config.kl.coef,
            )
        return formula


def _cpu(
    log_probs: Tensor,
    entropy: Tensor | None,
    inputs: Inputs,
    formula: Formula,
    gradient: Tensor | None,
    entropy_gradient: Tensor | None,
    token_losses: Tensor | None,
    sums: Tensor,
    means: Tensor | None = None,
) -> int:
    rows = Rows.trusted(log_probs, inputs.cu_seqlens)
    per_token = (
        log_probs, inputs.old_log_probs, inputs.mask, inputs.advantages, inputs.turn_ids, inputs.token_weights,
        inputs.is_weights, inputs.rollout_log_probs, inputs.ref_log_probs, entropy,
    )  # fmt: skip
    offsets = (native.address(inputs.segment_offsets), inputs.advantages.numel())
    per_row = (inputs.row_weights, inputs.row_tokens, inputs.row_log_ratios, inputs.row_is_weights)
    faults: int = native.module().policy_loss(
        native.rows(rows),
        (*map(native.view, per_token), offsets, *map(native.address, per_row)),
        formula.advantage_kind,
        native.address(inputs.divisor),
        formula[1:],
        native.view(gradient),
        native.view(entropy_gradient),
        native.address(token_losses),
        sums.data_ptr(),
        native.address(means),
        native.threads(rows.tokens),
    )
    return faults


BLOCK = 1024  # tokens that are worth a block on a GPU
BLOCKS = 1024  # as many run at once on a large one: from there on, each takes more tokens,
BLOCK_TOKENS = 16384  # up to this many


def _cuda(
    log_probs: Tensor,
    entropy: Tensor | None,
    inputs: Inputs,
    formula: Formula,
    gradient: Tensor | None,
    entropy_gradient: Tensor | None,
    value: Tensor | None,
    sums: Tensor,
    means: Tensor | None = None,
) -> int:
    """Per-token inputs that are not contiguous or differ in dtype are copied first, to float32; an output that is not
    contiguous, or not in the dtype that the kernel writes, is copied last. Each takes a pass."""
    by_token = formula.advantage_kind == arguments.TOKEN
    shared = formula.shared_gradient != 0 and gradient is not None
    streams = (
        log_probs, inputs.old_log_probs, inputs.advantages if by_token else None, inputs.token_weights,
        inputs.is_weights, inputs.rollout_log_probs, inputs.ref_log_probs, entropy,
    )  # fmt: skip
    dtype = torch.float32 if shared else log_probs.dtype
    for t in streams:
        if t is not None and t.dtype != dtype:
            dtype = torch.float32
    copies = [t if t is None or (t.dtype == dtype and t.is_contiguous()) else t.to(dtype).contiguous() for t in streams]
    mask, turn_ids = inputs.mask, inputs.turn_ids
    mask = mask if mask.dtype == torch.bool and mask.is_contiguous() else native.mask_bytes(mask)
    if turn_ids is not None and turn_ids.dtype != torch.int32:
        turn_ids = turn_ids.clamp(-2, 2**31 - 1).to(torch.int32)  # a turn that no table has stays one
    small = (
        mask, None if turn_ids is None else turn_ids.contiguous(), None if by_token else inputs.advantages,
        inputs.segment_offsets, inputs.row_weights, inputs.row_tokens, inputs.row_log_ratios, inputs.row_is_weights,
        inputs.divisor,
    )  # fmt: skip
    tokens, cu_seqlens, shape = log_probs.numel(), inputs.cu_seqlens, log_probs.shape
    segments = inputs.advantages.numel()  # where these are a table
    if cu_seqlens is None:  # native.rows, without the time that it takes to make a Rows
        rows = (shape[0], tokens, shape[1], 0)
    else:
        rows = (cu_seqlens.shape[0] - 1, tokens, 0, native.address(cu_seqlens))
    written = None if gradient is None else _written(gradient, dtype)
    entropy_written = None if entropy_gradient is None else _written(entropy_gradient, dtype)
    shares = written
    if shared and written is not None and inputs.ref_log_probs is not None:
        shares = torch.empty_like(written)  # the penalty's gradient is not shared
    apart = shares is not written
    blocks = max(1, min(-(-tokens // BLOCK), max(BLOCKS, -(-tokens // BLOCK_TOKENS))))
    partials = torch.empty(len(SUMS) * blocks, dtype=torch.float64, device=sums.device)
    device, stream = cuda.place(sums)
    counter = cuda.counter(sums, stream)
    per_token = value is not None and value.dim() != 0
    module, address, start = cuda.module(), native.address, native.start
    module.policy_loss(
        device,
        stream,
        rows,
        native.DTYPES[dtype],
        (*[0 if t is None else start(t) for t in copies], *[0 if t is None else address(t) for t in small], segments),
        formula,
        (
            0 if shared and not apart else address(written),
            0 if entropy_written is None else address(entropy_written),
            address(value) if per_token else 0,
            address(shares) if shared else 0,
            sums.data_ptr(),
            0 if per_token else address(value),
            address(means),
            partials.data_ptr(),
            counter.data_ptr(),
        ),
        blocks,
    )
    if shared:
        module.share_gradients(
            device, stream, rows, address(mask), address(copies[3]), address(shares), apart, address(written)
        )
    for output, kernels in ((gradient, written), (entropy_gradient, entropy_written)):
        if output is not None and kernels is not None and kernels is not output:
            output.copy_(kernels)
    return 0


def _written(output: Tensor, dtype: torch.dtype) -> Tensor:
    """What the CUDA kernel writes, given inputs of a dtype: the output itself where that is as the kernel writes it."""
    writes = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    if output.dtype == writes and output.is_contiguous():
        return output
    return torch.empty(output.shape, dtype=writes, device=output.device)


# What it reads: log_probs, [N] or [B, T]; entropy, like them, or None; checked inputs and formula.
# What it writes:
#   gradient, entropy_gradient: derivatives of the loss by log_probs and by entropy, like them, float32, bfloat16 or
#     float16, any strides. None: not computed.
#   token_losses: weighted token losses, float32, contiguous, like log_probs. None: not computed. On WRITES_LOSS it may
#     be 0-d instead, for the loss.
#   sums: [13] float64, loss * scale and the other sums of SUMS.
#   means: [13] float32, the sums as metrics: divided by the tokens, but for loss, policy and tokens. None: not there.
POLICY_LOSS = Kernel("policy_loss", cpu=_cpu, triton="policy_loss", cuda=_cuda)
WRITES_LOSS = ("cuda",)  # a copy of the sum would be a launch of its own


def _scale_cpu(gradient: Tensor, factor: Tensor) -> int:
    if float(factor) != 1.0:
        gradient.mul_(factor)
    return 0


def _scale_cuda(gradient: Tensor, factor: Tensor) -> int:
    factor = factor.to(torch.float32)
    cuda.module().scale_gradient(
        *cuda.place(gradient), gradient.numel(), native.DTYPES[gradient.dtype], native.address(gradient),
        native.address(factor),
    )  # fmt: skip
    return 0


# Multiplies a contiguous gradient by a 0-d factor. To multiply by 1 would cost as much as the loss, and on a GPU the
# host does not wait to know the factor: there the kernel looks.
SCALE_GRADIENT = Kernel("scale_gradient", cpu=_scale_cpu, triton="policy_loss", cuda=_scale_cuda)


def scale_of(divisor: Tensor | None, numerator: float, device: torch.device) -> Tensor | None:
    """What the sum is multiplied by, 0-d float64, for backends that do not divide themselves; None for 1."""
    if divisor is None:
        return None if numerator == 1.0 else torch.full((), numerator, dtype=torch.float64, device=device)
    # What must not be there gives NaN. Without a token the numerator is 0 and stays so, whatever this is.
    return torch.where(divisor > 0, numerator / divisor, torch.nan)


class Results(NamedTuple):
    """What a call of the kernel gives; `sums` and `means` are described at POLICY_LOSS."""

    loss: Tensor  # 0-d, or like the log-probs: float32
    gradients: list[Tensor | None]  # by log_probs and by entropy, where they are wanted
    sums: Tensor
    means: Tensor


def _run(
    backend: str,
    log_probs: Tensor,
    entropy: Tensor | None,
    inputs: Inputs,
    formula: Formula,
    wanted: Sequence[bool],
    per_token: bool,
) -> Results:
    device = log_probs.device
    gradients: list[Tensor | None] = [None, None]
    for i, t in enumerate((log_probs, entropy)):
        if t is not None and wanted[i]:
            gradients[i] = native.empty(t.shape, _gradient_dtype(t.dtype, formula), device)
    loss = (
        native.empty(log_probs.shape, torch.float32, device)
        if per_token
        else torch.empty((), device=device, dtype=torch.float32)
    )
    sums = torch.empty(len(SUMS), dtype=torch.float64, device=device)
    means = torch.empty(len(SUMS), dtype=torch.float32, device=device)
    writes = per_token or backend in WRITES_LOSS
    faults = POLICY_LOSS(
        backend, log_probs, entropy, inputs, formula, *gradients, loss if writes else None, sums, means
    )
    if faults:
        validation.native_faults("policy_loss", faults)
    if not writes:
        loss.copy_(sums[0])
    return Results(loss, gradients, sums, means)


def _gradient_dtype(dtype: torch.dtype, formula: Formula) -> torch.dtype:
    """Float16 gradients stay float32 until the upstream gradient has multiplied them: without the loss scale that it
    carries, most would be 0. A gradient that a rollout shares is a sum, to be rounded once."""
    return torch.float32 if dtype == torch.float16 or formula.shared_gradient else dtype


# ---- the registered op, for graphs -----------------------------------------------------------------------------------


def _formula(numbers: list[float]) -> Formula:
    kind, loss, *rest = numbers
    return Formula(int(kind), int(loss), *rest)  # type: ignore[arg-type]


def _fake(
    backend: str,
    log_probs: Tensor,
    entropy: Tensor | None,
    inputs: list[Tensor | None],
    formula: list[float],
    gradients: list[bool],
    per_token: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    value = log_probs.new_empty(log_probs.shape if per_token else (), dtype=torch.float32)
    like_entropy = log_probs if entropy is None else entropy
    buffers = [
        t.new_empty(t.shape if wanted else (0,), dtype=_gradient_dtype(t.dtype, _formula(formula)))
        for t, wanted in zip((log_probs, like_entropy), gradients, strict=True)
    ]
    sums, means = (log_probs.new_empty(len(SUMS), dtype=dtype) for dtype in (torch.float64, torch.float32))
    return value, *buffers, sums, means  # type: ignore[return-value]


def _of_counted(grad_loss: Tensor, given: Inputs) -> Tensor:
    """Upstream gradients without those of tokens that do not count: from there nothing may come in."""
    on = arguments.active(given.mask, given.token_weights) != 0
    if given.row_weights is not None:
        on = on & Rows.trusted(given.mask, given.cu_seqlens).spread(given.row_weights != 0)
    return torch.where(on, grad_loss, 0.0)


def _backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Any, ...]:
    gradients = ctx.saved_tensors[:2]
    if ctx.per_token:
        grad_loss = _of_counted(grad_loss, Inputs(*ctx.saved_tensors[2:]))
    scaled = [
        (g * grad_loss).to(dtype) if wanted else None
        for g, dtype, wanted in zip(gradients, ctx.dtypes, ctx.gradients, strict=True)
    ]
    return (None, *scaled, None, None, None, None)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, log_probs, entropy, tensors, _, ctx.gradients, ctx.per_token = inputs
    ctx.dtypes = (log_probs.dtype, log_probs.dtype if entropy is None else entropy.dtype)
    ctx.save_for_backward(output[1], output[2], *tensors)


@native_op("policy_loss", _fake, autograd=(_backward, _setup_context))
def launch(
    backend: str,
    log_probs: Tensor,
    entropy: Tensor | None,
    inputs: list[Tensor | None],
    formula: list[float],
    gradients: list[bool],
    per_token: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given, numbers = Inputs(*inputs), _formula(formula)  # type: ignore[arg-type]
    loss, found, sums, means = _run(backend, log_probs, entropy, given, numbers, gradients, per_token)
    like_entropy = log_probs if entropy is None else entropy
    by_log_prob, by_entropy = (
        torch.empty(0, dtype=_gradient_dtype(t.dtype, numbers), device=t.device) if g is None else g
        for t, g in zip((log_probs, like_entropy), found, strict=True)
    )
    return loss, by_log_prob, by_entropy, sums, means


def run(
    backend: str,
    log_probs: Tensor,
    entropy: Tensor | None,
    inputs: Inputs,
    formula: Formula,
    wanted: Sequence[bool],
    per_token: bool,
) -> Results:
    """Runs the kernel into new memory, without autograd. `wanted`: which gradients."""
    if not needs_dispatcher((log_probs, entropy, *inputs)):  # the registered op would take lists and floats, and time
        return _run(backend, log_probs, entropy, inputs, formula, wanted, per_token)
    numbers = [float(x) for x in formula]
    loss, *gradients, sums, means = launch(backend, log_probs, entropy, list(inputs), numbers, list(wanted), per_token)
    found = [g if is_wanted else None for g, is_wanted in zip(gradients, wanted, strict=True)]
    return Results(loss, found, sums, means)


class PolicyLoss(torch.autograd.Function):
    """The forward leaves the gradients in buffers; the first backward hands the buffers over, a second one computes
    them again."""

    @staticmethod
    def forward(
        ctx: Any,
        log_probs: Tensor,
        entropy: Tensor | None,
        inputs: Inputs,
        formula: Formula,
        per_token: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.wanted = ctx.needs_input_grad[:2]
        loss, ctx.gradients, sums, means = run(backend, log_probs, entropy, inputs, formula, ctx.wanted, per_token)
        ctx.save_for_backward(*validation.saveable(log_probs, entropy, *inputs))
        ctx.formula, ctx.per_token, ctx.backend = formula, per_token, backend
        ctx.dtypes = (log_probs.dtype, None if entropy is None else entropy.dtype)
        ctx.mark_non_differentiable(sums, means)
        ctx.set_materialize_grads(False)  # or zeros would be made for the sums
        return loss, sums, means

    @staticmethod
    @first_order("policy_loss")
    def backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * 6
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None or ctx.per_token:
            log_probs, entropy, *tensors = ctx.saved_tensors  # raises where the graph was freed
            inputs = Inputs(*tensors)
            if gradients is None:
                again = run(ctx.backend, log_probs, entropy, inputs, ctx.formula, ctx.wanted, ctx.per_token)
                gradients = again.gradients
            if ctx.per_token:
                grad_loss = _of_counted(grad_loss, inputs)
        by_log_prob, by_entropy = (
            None if g is None else _scaled(ctx, g, grad_loss, dtype)
            for g, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return by_log_prob, by_entropy, None, None, None, None


def _scaled(ctx: Any, gradient: Tensor, grad_loss: Tensor, dtype: torch.dtype) -> Tensor:
    if ctx.per_token:
        gradient.mul_(grad_loss)
    else:
        SCALE_GRADIENT(ctx.backend, gradient, grad_loss)
    return gradient if gradient.dtype == dtype else gradient.to(dtype)
