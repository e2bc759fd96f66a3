"""The policy loss of every token, its gradient, and the sums that metrics are made of, in one pass.

Plain losses read 4 bytes a token each of log_probs, old_log_probs and advantages (4 of turn_ids; nothing where
advantages are per rollout) and 1 of mask, and write 4 of gradient: 17 bytes in float32, 9 in bfloat16. Each of the
optional inputs adds 4. Two launches: the tokens, and the sums of the programs' sums. Weights of rollouts, or their
numbers of tokens, take a small one before. A gradient that rollouts share takes two more after: a small one for the
shares, and one that reads the mask again and writes the gradient.

Compiled for sm_90a, ppo takes 62 instructions a token (of a warp, 32 tokens) in float32, 60 in bfloat16: of four
million tokens 9 us at one instruction a clock in each of an H100's schedulers, while the bytes take 21 us, or 11.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from fastadv.triton_kernels import _shared_gradients
from fastadv.triton_kernels._launch import TYPES, Configuration, blocks, fractional_byte, launch, mask_bytes, nothing
from fastadv.triton_kernels._policy_terms import GSPO, SAPO, CorrectionParameters, KlParameters, LossParameters
from fastadv.triton_kernels._policy_tokens import (
    ENTROPY,
    ENTROPY_GRADIENT,
    EVEN_BYTES,
    GRADIENT,
    IS_WEIGHTS,
    LOW,
    OLD_LOG_PROBS,
    REFERENCE,
    ROLLOUT,
    ROW,
    ROW_IS_WEIGHTS,
    ROW_TOKENS,
    ROW_WEIGHTS,
    SCALE,
    SEGMENT,
    SHARED,
    TOKEN,
    TOKEN_LOSSES,
    TOKEN_WEIGHTS,
    WARPS,
    PerRow,
    Rule,
    Streams,
    Sums,
    add_full,
    add_parts,
    row_and_end,
)
from fastadv.triton_kernels._row_scales import ROW_BLOCK, row_scales, row_scales_kernel
from torch import Tensor

from fastadv.ops._policy_loss_kernel import scale_of
from fastadv.rows import Rows

if TYPE_CHECKING:
    from fastadv.ops._policy_loss_kernel import Formula, Inputs

GRADIENTS = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}  # by inputs
VECTORS = {dtype: 16 // dtype.itemsize for dtype in GRADIENTS}  # tokens of a thread: 16 bytes of log-probs
PROGRAMS = 1024  # as many run at once on an H100: from there on, each takes more blocks,
STEPS = 8  # up to this many
SCALED_BLOCK, SCALED_WARPS = 2048, 8
SUM_REGISTERS = 64  # of a thread: not told, the compiler spills one on sm_80, for more warps than 13 programs have

# Places in the sums, as in fastadv.ops._policy_loss_kernel.SUMS.
LOSS_SUM, POLICY_SUM, CLIPPED, BOUNDED, SATURATED, NEGATIVE_LOG_RATIO, TOKENS = (tl.constexpr(i) for i in range(7))
KL_SUM, ENTROPY_SUM, IS_WEIGHT, REJECTED, CAPPED, MISSING = (tl.constexpr(i) for i in range(7, 13))
COLUMNS = 13

# Formula's fields that the kernel takes as they are.
KINDS = ["correction", "kl", "kl_gradient"]
FLOATS = [
    "ratio_low", "ratio_high", "log_ratio_bound", "tau_pos", "tau_neg", "is_low", "is_high", "is_log_low",
    "is_log_high", "missing_weight", "kl_coef", "entropy_coef",
]  # fmt: skip
INTEGERS = ["rows", "width", "count", "table", "steps", "given", "fractional", *KINDS]


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=INTEGERS)
def policy_loss_kernel(
    log_probs,  # [N] float32, bfloat16 or float16; so are all that name no dtype
    old_log_probs,  # [N]
    mask,  # [N] uint8
    advantages,  # [N], or float32 [B] or [S]
    turn_ids,  # [N] int32
    token_weights,  # [N]
    is_weights,  # [N]
    rollout_log_probs,  # [N]
    ref_log_probs,  # [N]
    entropy,  # [N]
    gradient,  # [N]; float32 of float16
    entropy_gradient,  # [N] float32
    token_losses,  # [N] float32
    segment_offsets,  # [B + 1] int64
    row_scales,  # [B] float32
    row_log_ratios,  # [B] float32
    row_is_weights,  # [B] float32
    cu_seqlens,  # [B + 1] int64
    scale,  # 0-d float64
    partials,  # [13, programs] float32
    pieces,  # [2, rows + blocks] float32
    rows: tl.int64,
    width: tl.int64,
    count: tl.int64,
    table: tl.int64,  # S
    steps: tl.int64,
    given: tl.int64,
    fractional: tl.int64,  # byte of the mask
    correction: tl.int64,
    kl: tl.int64,
    kl_gradient: tl.int64,
    ratio_low, ratio_high, dual_clip, ratio_cap, log_ratio_bound, tau_pos, tau_neg,
    is_low, is_high, is_log_low, is_log_high, missing_weight, kl_coef, entropy_coef,
    LOSS: tl.constexpr,
    KIND: tl.constexpr,
    EXTENDED: tl.constexpr,  # anything beside log-probs, advantages and mask
    BY_ROW: tl.constexpr,  # anything is per row
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    t = Streams(
        log_probs, old_log_probs, mask, advantages, turn_ids, token_weights, is_weights, rollout_log_probs,
        ref_log_probs, entropy, gradient, entropy_gradient, token_losses,
    )  # fmt: skip
    r = PerRow(segment_offsets, row_scales, row_log_ratios, row_is_weights, pieces, table)
    rule = Rule(
        given.to(tl.int32),
        fractional.to(tl.int32),
        tl.load(scale, mask=(given & SCALE) != 0, other=1.0).to(tl.float32),
        LossParameters(ratio_low, ratio_high, dual_clip, ratio_cap, log_ratio_bound, tau_pos, tau_neg),
        CorrectionParameters(correction.to(tl.int32), is_low, is_high, is_log_low, is_log_high, missing_weight),
        KlParameters(kl.to(tl.int32), kl_gradient.to(tl.int32), kl_coef),
        entropy_coef,
    )
    zero = tl.zeros([BLOCK // VECTOR], tl.float32)
    none = tl.zeros([BLOCK // VECTOR], tl.int32)
    sums = Sums(zero, zero, none, zero, zero, zero, zero, none)
    row = tl.zeros((), tl.int64)
    end = row
    # What could be computed before the loop would be kept in registers across it.
    for step in tl.range(0, steps.to(tl.int32), disable_licm=True):
        block = program * steps + step
        start = block * BLOCK
        if start < count:
            stop = count
            if BY_ROW:
                if start >= end:
                    row, end = row_and_end(cu_seqlens, rows, width, start)
                stop = end
            # Full and within one row, as most blocks of long rollouts are.
            if (start + BLOCK <= stop) & (stop <= count):
                sums = add_full(
                    sums, t, r, rule, row, block, rows, count, BLOCK, VECTOR, LOSS, KIND, EXTENDED, BY_ROW
                )  # fmt: skip
            else:
                sums = add_parts(
                    sums, t, r, rule, row, end, cu_seqlens, block, rows, width, count, BLOCK, VECTOR,
                    LOSS, KIND, EXTENDED, BY_ROW,
                )  # fmt: skip
    programs = tl.num_programs(0).to(tl.int64)
    out = partials + program
    even = tl.sum(sums.counts & EVEN_BYTES)  # tokens, bounded
    odd = tl.sum((sums.counts >> 8) & EVEN_BYTES)  # clipped, saturated
    tl.store(out + LOSS_SUM * programs, tl.sum(sums.loss))
    tl.store(out + NEGATIVE_LOG_RATIO * programs, tl.sum(sums.negative_log_ratio))
    tl.store(out + TOKENS * programs, (even & LOW).to(tl.float32))
    tl.store(out + CLIPPED * programs, (odd & LOW).to(tl.float32))
    tl.store(out + BOUNDED * programs, (even >> 16).to(tl.float32))
    tl.store(out + SATURATED * programs, (odd >> 16).to(tl.float32))
    if EXTENDED:
        even = tl.sum(sums.weighed & EVEN_BYTES)  # rejected, missing
        tl.store(out + POLICY_SUM * programs, tl.sum(sums.policy))
        tl.store(out + KL_SUM * programs, tl.sum(sums.kl))
        tl.store(out + ENTROPY_SUM * programs, tl.sum(sums.entropy))
        tl.store(out + IS_WEIGHT * programs, tl.sum(sums.is_weight))
        tl.store(out + REJECTED * programs, (even & LOW).to(tl.float32))
        tl.store(out + CAPPED * programs, tl.sum(sums.weighed >> 8 & 0xFF).to(tl.float32))
        tl.store(out + MISSING * programs, (even >> 16).to(tl.float32))


@triton.jit
def column_sum(start, count, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, count, BLOCK):
        program = first + tl.arange(0, BLOCK)  # [BLOCK]
        total += tl.load(start + program, mask=program < count, other=0.0).to(tl.float64)
    return tl.sum(total)


@triton.jit(do_not_specialize=["programs", "extended"])
def finish_sums_kernel(
    partials,  # [13, programs] float32
    sums,  # [13] float64
    means,  # [13] float32
    programs: tl.int64,
    extended: tl.int64,
    BLOCK: tl.constexpr,
):
    column = tl.program_id(0)
    source = column.to(tl.int64)
    count = programs
    if extended == 0:  # the loss is all policy, and the sums of what else there is were not written
        if column == POLICY_SUM:
            source = tl.zeros((), tl.int64) + LOSS_SUM
        if column > TOKENS:
            count = tl.zeros((), tl.int64)
    total = column_sum(partials + source * programs, count, BLOCK)
    tokens = column_sum(partials + TOKENS * programs, programs, BLOCK)
    tl.store(sums + column, total)
    whole = (column == LOSS_SUM) | (column == POLICY_SUM) | (column == TOKENS)
    tl.store(means + column, (total / tl.where(whole, 1.0, tl.maximum(tokens, 1.0))).to(tl.float32))


@triton.jit(do_not_specialize=["count"])
def scale_gradient_kernel(
    gradient,  # [N] float32, bfloat16 or float16
    factor,  # 0-d float32
    count: tl.int64,
    BLOCK: tl.constexpr,
):
    by = tl.load(factor)
    if by != 1.0:  # to multiply by 1 would cost as much as the loss
        start = tl.program_id(0).to(tl.int64) * BLOCK
        place = start + tl.arange(0, BLOCK)  # [BLOCK]
        if start + BLOCK <= count:
            tl.store(gradient + place, tl.load(gradient + place).to(tl.float32) * by)
        else:
            inside = place < count
            value = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(gradient + place, value * by, mask=inside)


# ---- launchers -------------------------------------------------------------------------------------------------------


def policy_loss(
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
    """See `fastadv.ops._policy_loss_kernel.POLICY_LOSS`.

    Per-token inputs of other strides, and turn ids of int64, are copied first. Losses with any optional input compute
    from float32, and so does a loss whose inputs differ in dtype: the others are converted first. An output that is not
    contiguous, or not in the dtype that the kernel writes, is copied last. Each takes a pass.
    """
    rows = Rows.trusted(log_probs, inputs.cu_seqlens)
    by_token = formula.advantage_kind == TOKEN.value
    # Pairs: a bit of Triton's hashes slowly.
    optional = (
        (TOKEN_WEIGHTS, inputs.token_weights), (IS_WEIGHTS, inputs.is_weights), (ENTROPY, entropy),
        (ROW_IS_WEIGHTS, inputs.row_is_weights), (ROLLOUT, inputs.rollout_log_probs), (REFERENCE, inputs.ref_log_probs),
    )  # fmt: skip
    extended = bool(formula.shared_gradient) or any(t is not None for _, t in optional)
    per_row = (inputs.row_weights, inputs.row_tokens, inputs.row_log_ratios, inputs.row_is_weights)
    dtype = _dtype(log_probs, inputs, by_token, extended, gradient)
    block = VECTORS[dtype] * 32 * WARPS
    count = blocks(rows.tokens, block)
    steps = min(STEPS, max(1, count // PROGRAMS))
    programs = blocks(count, steps)
    like = log_probs.to(dtype).contiguous()  # stands for what is not there, with `partials` and empty tensors
    partials = sums.new_empty((COLUMNS, programs), dtype=torch.float32)

    def stream(t: Tensor | None) -> Tensor:
        return like if t is None else t.to(dtype).contiguous()

    def small(t: Tensor | None, kind: torch.dtype) -> Tensor:
        return nothing(sums.device, kind) if t is None else t

    scale = scale_of(inputs.divisor, formula.numerator, sums.device)
    shared = bool(formula.shared_gradient) and gradient is not None
    present = (
        *optional, (SCALE, scale), (OLD_LOG_PROBS, inputs.old_log_probs), (ROW_WEIGHTS, inputs.row_weights),
        (ROW_TOKENS, inputs.row_tokens), (ENTROPY_GRADIENT, entropy_gradient), (TOKEN_LOSSES, token_losses),
        (SHARED, gradient if shared else None),
        # Without a penalty, the pass that writes the shares writes all there is.
        (GRADIENT, inputs.ref_log_probs if shared else gradient),
    )  # fmt: skip
    given = sum(bit.value for bit, t in present if t is not None)
    written = _written(gradient, GRADIENTS[dtype], like if dtype == torch.bfloat16 else partials)
    entropy_written = _written(entropy_gradient, torch.float32, partials)
    pieces = sums.new_empty((2, rows.count + count), dtype=torch.float32) if shared else partials
    mask, token_weights = mask_bytes(inputs.mask), stream(inputs.token_weights)
    cu_seqlens = small(inputs.cu_seqlens, torch.int64)
    width = 0 if inputs.cu_seqlens is not None else rows.shape[1]
    launch(
        policy_loss_kernel,
        (programs,),
        {
            "log_probs": like,
            "old_log_probs": stream(inputs.old_log_probs),
            "mask": mask,
            "advantages": stream(inputs.advantages) if by_token else inputs.advantages,
            "turn_ids": _turn_ids(inputs.turn_ids, sums),
            "token_weights": token_weights,
            "is_weights": stream(inputs.is_weights),
            "rollout_log_probs": stream(inputs.rollout_log_probs),
            "ref_log_probs": stream(inputs.ref_log_probs),
            "entropy": stream(entropy),
            "gradient": written,
            "entropy_gradient": entropy_written,
            "token_losses": partials if token_losses is None else token_losses,
            "segment_offsets": small(inputs.segment_offsets, torch.int64),
            "row_scales": row_scales(inputs, scale, rows.count, given, sums),
            "row_log_ratios": small(inputs.row_log_ratios, torch.float32),
            "row_is_weights": small(inputs.row_is_weights, torch.float32),
            "cu_seqlens": cu_seqlens,
            "scale": small(scale, torch.float64),
            "partials": partials,
            "pieces": pieces,
            "rows": rows.count,
            "width": width,
            "count": rows.tokens,
            "table": inputs.advantages.numel(),
            "steps": steps,
            "given": given,
            "fractional": fractional_byte(inputs.mask),
            # The registered op holds all of the formula's numbers as floats.
            **{name: int(getattr(formula, name)) for name in KINDS},
            "dual_clip": formula.dual_clip or math.nan,  # nothing is below NaN
            "ratio_cap": formula.delta or math.inf,
            **{name: float(getattr(formula, name)) for name in FLOATS},
        },
        {
            "LOSS": formula.loss,
            "KIND": formula.advantage_kind,
            "EXTENDED": extended,
            "BY_ROW": not by_token or shared or any(t is not None for t in per_row),
            "BLOCK": block,
            "VECTOR": VECTORS[dtype],
        },
        num_warps=WARPS,
        registers=_registers(dtype, formula.loss, formula.advantage_kind, extended),
    )
    if means is None:
        means = torch.empty_like(sums, dtype=torch.float32)
    launch(
        finish_sums_kernel,
        (COLUMNS,),
        {"partials": partials, "sums": sums, "means": means, "programs": programs, "extended": int(extended)},
        {"BLOCK": ROW_BLOCK},
        registers=SUM_REGISTERS,
    )
    if shared and rows.tokens:
        _shared_gradients.share_gradients(pieces, mask, token_weights, cu_seqlens, written, rows.count, width, given)
    for output, kernels in ((gradient, written), (entropy_gradient, entropy_written)):
        if output is not None and kernels is not output:
            output.copy_(kernels)
    return 0


def _dtype(log_probs: Tensor, inputs: Inputs, by_token: bool, extended: bool, gradient: Tensor | None) -> torch.dtype:
    """What the kernel reads the per-token inputs in."""
    streams = (log_probs, inputs.old_log_probs, inputs.advantages if by_token else None)
    alike = len({t.dtype for t in streams if t is not None}) == 1
    writes = gradient is None or gradient.dtype == GRADIENTS[log_probs.dtype]
    return log_probs.dtype if alike and writes and not extended else torch.float32


def _registers(dtype: torch.dtype, loss: int, kind: int, extended: bool) -> int:
    """Of a thread, as tried: none spills any on sm_90 and sm_100, at an occupancy of 0.31 (extended), 0.44 or 0.5."""
    if extended:
        return 104 if loss == GSPO.value else 96
    if dtype == torch.float32:
        return 72 if loss == GSPO.value and kind == SEGMENT.value else 64
    return 72 if (kind == ROW.value and loss != SAPO.value) or loss == GSPO.value else 64


def _written(output: Tensor | None, dtype: torch.dtype, nothing: Tensor) -> Tensor:
    """What the kernel writes: the output itself where that is contiguous and in its dtype."""
    if output is None:
        return nothing
    return output if output.dtype == dtype and output.is_contiguous() else output.new_empty(output.shape, dtype=dtype)


def _turn_ids(turn_ids: Tensor | None, sums: Tensor) -> Tensor:
    """Turn ids as int32, in which a turn that no table has stays one."""
    if turn_ids is None:
        return nothing(sums.device, torch.int32)
    if turn_ids.dtype != torch.int32:
        turn_ids = turn_ids.clamp(-2, 2**31 - 1).to(torch.int32)
    return turn_ids.contiguous()


def scale_gradient(gradient: Tensor, factor: Tensor) -> int:
    """Multiplies a contiguous gradient by a 0-d factor. Where that is 1, nothing else is read."""
    launch(
        scale_gradient_kernel,
        (blocks(gradient.numel(), SCALED_BLOCK),),
        {"gradient": gradient, "factor": factor.to(torch.float32), "count": gradient.numel()},
        {"BLOCK": SCALED_BLOCK},
        num_warps=SCALED_WARPS,
    )
    return 0


# ---- what is compiled ------------------------------------------------------------------------------------------------

STREAMING = (policy_loss_kernel, scale_gradient_kernel, *_shared_gradients.STREAMING)


def bytes_moved(tokens: int, *, reads: int = 3, size: int = 4, written: int = 4) -> int:
    """Bytes that a loss has to move: the mask, `reads` per-token inputs of `size` bytes (log-probs, old log-probs,
    advantages or turn ids, and each optional one), and `written` bytes a token of gradients and token losses."""
    return tokens * (1 + reads * size + written)


def configurations() -> Iterator[Configuration]:
    """Every form that a launch can ask for, with aligned pointers."""
    for loss in range(GSPO.value + 1):
        for kind, by_row in ((TOKEN, False), (TOKEN, True), (ROW, True), (SEGMENT, True)):
            if loss != GSPO.value or by_row:
                for dtype in GRADIENTS:
                    yield _loss_configuration(loss, kind.value, by_row, False, dtype)
                yield _loss_configuration(loss, kind.value, by_row, True, torch.float32)
    small = {
        row_scales_kernel: {
            "row_weights": "*fp64", "row_tokens": "*i64", "scale": "*fp64", "row_scales": "*fp32", "rows": "i64",
            "given": "i64",
        },
        finish_sums_kernel: {
            "partials": "*fp32", "sums": "*fp64", "means": "*fp32", "programs": "i64", "extended": "i64",
        },
    }  # fmt: skip
    for kernel, signature in small.items():
        registers = SUM_REGISTERS if kernel is finish_sums_kernel else None
        yield _configuration(kernel, signature, {"BLOCK": ROW_BLOCK}, WARPS, registers)
    for dtype in GRADIENTS:
        signature = {"gradient": "*" + TYPES[dtype], "factor": "*fp32", "count": "i64"}
        yield _configuration(scale_gradient_kernel, signature, {"BLOCK": SCALED_BLOCK}, SCALED_WARPS)
    yield from _shared_gradients.configurations()


def _loss_configuration(loss: int, kind: int, by_row: bool, extended: bool, dtype: torch.dtype) -> Configuration:
    of_inputs = "*" + TYPES[dtype]
    signature = dict.fromkeys(
        ("log_probs", "old_log_probs", "token_weights", "is_weights", "rollout_log_probs", "ref_log_probs", "entropy"),
        of_inputs,
    )
    signature |= dict.fromkeys(("entropy_gradient", "token_losses", "partials", "pieces"), "*fp32")
    signature |= dict.fromkeys(("row_scales", "row_log_ratios", "row_is_weights"), "*fp32")
    signature |= {
        "advantages": of_inputs if kind == TOKEN.value else "*fp32", "gradient": "*" + TYPES[GRADIENTS[dtype]],
        "mask": "*u8", "turn_ids": "*i32", "segment_offsets": "*i64", "cu_seqlens": "*i64", "scale": "*fp64",
    }  # fmt: skip
    signature |= dict.fromkeys(INTEGERS, "i64") | dict.fromkeys(("dual_clip", "ratio_cap", *FLOATS), "fp32")
    constants = {
        "LOSS": loss, "KIND": kind, "EXTENDED": extended, "BY_ROW": by_row,
        "BLOCK": VECTORS[dtype] * 32 * WARPS, "VECTOR": VECTORS[dtype],
    }  # fmt: skip
    return _configuration(policy_loss_kernel, signature, constants, WARPS, _registers(dtype, loss, kind, extended))


def _configuration(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, registers: int | None = None
) -> Configuration:
    aligned = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    return Configuration(
        kernel, tuple(signature.items()), tuple(constants.items()), aligned, warps, registers=registers
    )
