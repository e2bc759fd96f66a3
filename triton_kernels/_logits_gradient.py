"""Gradient of log-prob, entropy and sum of squares by the logits.

One launch. Reads each logit once and writes its gradient once, 4 bytes of bfloat16; a row to which nothing flows back
is only written. It is elementwise: a program takes a part of a row, and threads never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from fastadv.triton_kernels._launch import Configuration, blocks, launch
from fastadv.triton_kernels._logits import (
    BLOCK,
    FLOOR,
    LANES,
    LN2,
    LOG2E,
    NONE,
    NUM_WARPS,
    PART,
    SCALING,
    TILE,
    UNREAD,
    WIDTH,
    Signature,
    inverse_temperature_of,
    lane_columns,
    load_columns,
    readable,
    row_start,
    scaling,
    signature_for,
    softcapped,
    unspecialised,
    view_of,
)
from torch import Tensor

KEPT = tl.constexpr(-115.0)  # below this power of 2, relative to the mean, a probability counts as 0


@triton.jit
def _number(numbers, row, given):
    """A row's, 0 where none are given."""
    return tl.where(given, tl.load(numbers + row, mask=given), 0.0)


@triton.jit
def _tile_gradient(z, numbers, MOMENTS: tl.constexpr, CAPPED: tl.constexpr):
    """By logits of which none is the label's, [LANES, WIDTH]: 0 where p is, whatever flows back."""
    center, scale, p_scale, rest, g_log_p, g_h, g_p2, p2, cap, inverse_cap = numbers
    slope = 1.0
    if CAPPED:
        z, slope = softcapped(z, cap, inverse_cap)
    d = tl.maximum((z - center) * scale, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(d) * p_scale
    factor = g_log_p
    if MOMENTS:
        factor = tl.fma(g_h, d + rest, tl.fma(g_p2, p2 - p, g_log_p))
    return tl.where(d < KEPT, 0.0, -p * factor * slope)


@triton.jit
def _put(out, left, z, label, by_label, numbers, MOMENTS: tl.constexpr, CAPPED: tl.constexpr, FULL: tl.constexpr):
    """Writes the gradient by a tile of which `left` columns exist; `label` may be one of them."""
    column, lane = tl.arange(0, WIDTH)[None, :], tl.arange(0, LANES)[:, None] * WIDTH
    gradient = _tile_gradient(z, numbers, MOMENTS, CAPPED)
    gradient = tl.where(column == label - lane, by_label, gradient).to(out.dtype.element_ty)  # [LANES, WIDTH]
    if FULL:
        tl.store(out, gradient)
    else:
        tl.store(out, gradient, mask=column < left - lane)


@triton.jit
def _label_gradient(at, slope, inverse, lse, h, p2, g_log_p, g_h, g_p2):
    """By the label's logit, in float64: 1 - p has as many digits as lse leaves it."""
    log_p = at.to(tl.float64) * inverse - lse
    log_p = tl.where(log_p > 0.0, 0.0, log_p)
    p = tl.exp(log_p)
    gradient = g_log_p * (1.0 - p) - p * (g_h * (log_p + h) - 2.0 * g_p2 * (p - p2))
    return (gradient * inverse * slope).to(tl.float32)


SIGNATURE: Signature = (
    ("logits", "*"), ("out", "*"), ("labels", "*i64"), ("lse", "*fp64"), ("entropy", "*fp64"), ("sum_p2", "*fp64"),
    ("g_log_prob", "*fp32"), ("g_entropy", "*fp32"), ("g_sum_p2", "*fp32"), ("inner", "i64"), ("outer_stride", "i64"),
    ("inner_stride", "i64"), ("out_inner", "i64"), ("out_outer_stride", "i64"), ("out_inner_stride", "i64"),
    ("vocab", "i64"), ("given", "i64"), *SCALING,
)  # fmt: skip


@triton.jit(**unspecialised(SIGNATURE))
def logits_gradient_kernel(
    logits,  # rows of V, a view of [rows / inner, inner, V]
    out,  # like logits, a view of [rows / out_inner, out_inner, V]; may be the logits
    labels,  # [R] int64
    lse,  # [R] float64
    entropy,  # [R] float64, if g_entropy is given
    sum_p2,  # [R] float64, if g_sum_p2 is given
    g_log_prob,  # [R] float32; this and the next two if bits 0, 1 and 2 of `given` say so
    g_entropy,  # [R] float32
    g_sum_p2,  # [R] float32
    inner: tl.int64,
    outer_stride: tl.int64,
    inner_stride: tl.int64,
    out_inner: tl.int64,
    out_outer_stride: tl.int64,
    out_inner_stride: tl.int64,
    vocab: tl.int64,
    given: tl.int64,
    inverse_temperatures,  # [R] float64, if per_row
    per_row: tl.int64,
    inverse_high,
    inverse_low,
    cap,
    inverse_cap,
    ALIGNED: tl.constexpr,
    MOMENTS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * PART
    columns = tl.minimum(vocab - start, PART).to(tl.int32)
    full = columns // BLOCK * BLOCK
    first = logits + (row_start(row, inner, outer_stride, inner_stride) + start)
    first_out = out + (row_start(row, out_inner, out_outer_stride, out_inner_stride) + start)
    if ALIGNED:
        first = tl.multiple_of(first, 16)
        first_out = tl.multiple_of(first_out, 16)
    pointers, out_pointers = first + lane_columns(WIDTH), first_out + lane_columns(WIDTH)  # [LANES, WIDTH]

    label = tl.load(labels + row)
    g_log_p = _number(g_log_prob, row, (given & 1) != 0)
    g_h = _number(g_entropy, row, (given & 2) != 0)
    g_p2 = _number(g_sum_p2, row, (given & 4) != 0)
    if (label == UNREAD) | ((g_log_p == 0.0) & (g_h == 0.0) & (g_p2 == 0.0)):
        zeros = tl.zeros([LANES, WIDTH], out.dtype.element_ty)
        for _ in range(0, full, TILE):
            tl.store(out_pointers, zeros)
            out_pointers += TILE
        for done in range(full, columns, TILE):
            tl.store(out_pointers, zeros, mask=lane_columns(WIDTH) < columns - done)
            out_pointers += TILE
    else:
        inverse = inverse_temperature_of(inverse_temperatures, row, per_row, inverse_high, inverse_low)
        row_lse = tl.load(lse + row)
        h = _number(entropy, row, (given & 2) != 0)
        p2 = _number(sum_p2, row, (given & 4) != 0)

        here = tl.where((label >= start) & (label < start + columns), label - start, -1).to(tl.int32)
        by_label = tl.zeros([], tl.float32)
        if here >= 0:
            at = tl.load(first + here).to(tl.float32)
            tl.debug_barrier()  # in place, no thread may write this logit before all have read it
            slope = at * 0.0 + 1.0
            if CAPPED:
                at, slope = softcapped(at, cap, inverse_cap)
            by_label = _label_gradient(at, slope, inverse, row_lse, h, p2, g_log_p, g_h, g_p2)
            here = tl.where(at == NONE, -1, here)  # its gradient is 0, as that of every logit of -inf

        # log p + H is (z - center) / T: exactly 0 where all logits are equal. The center is a float and a rest.
        center = (row_lse - h) / inverse
        center_high = center.to(tl.float32)
        rest = (center - center_high.to(tl.float64)) * inverse
        numbers = (
            center_high,
            (inverse * LOG2E).to(tl.float32),
            tl.exp(-h - rest).to(tl.float32),
            (rest * -LOG2E).to(tl.float32),
            (g_log_p * inverse).to(tl.float32),
            (g_h * inverse * LN2).to(tl.float32),
            (2.0 * g_p2 * inverse).to(tl.float32),
            p2.to(tl.float32),
            cap,
            inverse_cap,
        )
        for done in range(0, full, BLOCK):
            # All are read before one is written, or they could not be in flight together.
            z0 = load_columns(pointers, 0, 0, WIDTH, True)  # [LANES, WIDTH]
            z1 = load_columns(pointers, TILE, 0, WIDTH, True)  # [LANES, WIDTH]
            z2 = load_columns(pointers, 2 * TILE, 0, WIDTH, True)  # [LANES, WIDTH]
            z3 = load_columns(pointers, 3 * TILE, 0, WIDTH, True)  # [LANES, WIDTH]
            at_label = here - done
            _put(out_pointers, 0, z0, at_label, by_label, numbers, MOMENTS, CAPPED, True)
            _put(out_pointers + TILE, 0, z1, at_label - TILE, by_label, numbers, MOMENTS, CAPPED, True)
            _put(out_pointers + 2 * TILE, 0, z2, at_label - 2 * TILE, by_label, numbers, MOMENTS, CAPPED, True)
            _put(out_pointers + 3 * TILE, 0, z3, at_label - 3 * TILE, by_label, numbers, MOMENTS, CAPPED, True)
            pointers += BLOCK
            out_pointers += BLOCK
        for done in range(full, columns, TILE):
            z = load_columns(pointers, 0, columns - done, WIDTH, False)  # [LANES, WIDTH]
            _put(out_pointers, columns - done, z, here - done, by_label, numbers, MOMENTS, CAPPED, False)
            pointers += TILE
            out_pointers += TILE


def logits_gradient(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    sum_p2: Tensor | None,
    g_log_prob: Tensor | None,
    g_entropy: Tensor | None,
    g_sum_p2: Tensor | None,
    inverse_temperature: float | Tensor,
    softcap: float,
    out: Tensor,
) -> int:
    """See `fastadv.ops._logits.logits_gradient`. Where `out` has strides that no kernel takes (see `readable`), the
    gradient is written elsewhere and copied."""
    view, target = readable(logits), view_of(out)
    written = out if target is not None else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    target = target or readable(written)
    upstream = {"g_log_prob": g_log_prob, "g_entropy": g_entropy, "g_sum_p2": g_sum_p2}
    given = [g for g in upstream.values() if g is not None]
    absent = given[0] if given else lse.new_empty(0, dtype=torch.float32)
    launch(
        logits_gradient_kernel,
        (labels.numel(), blocks(logits.shape[-1], PART.value)),
        {
            "logits": view.rows,
            "out": target.rows,
            "labels": labels,
            "lse": lse,
            "entropy": lse if entropy is None else entropy,
            "sum_p2": lse if sum_p2 is None else sum_p2,
            **{name: absent if g is None else g for name, g in upstream.items()},
            "inner": view.inner,
            "outer_stride": view.outer_stride,
            "inner_stride": view.inner_stride,
            "out_inner": target.inner,
            "out_outer_stride": target.outer_stride,
            "out_inner_stride": target.inner_stride,
            "vocab": logits.shape[-1],
            "given": sum(bit for bit, g in zip((1, 2, 4), upstream.values(), strict=True) if g is not None),
            **scaling(inverse_temperature, softcap, lse),
        },
        {
            "ALIGNED": view.aligned and target.aligned,
            "MOMENTS": g_entropy is not None or g_sum_p2 is not None or softcap != 0,
            "CAPPED": softcap != 0,
        },
        num_warps=NUM_WARPS,
        fp_fusion=False,  # fused multiply-adds are written out: a logit's gradient is the same in every form
    )
    if written is not out:
        out.copy_(written)
    return 0


def configurations() -> Iterator[Configuration]:
    """Every form that a launch asks for. Of float32 logits of an output layer in bfloat16, the gradient is bfloat16: an
    operand of its products."""
    mixed = tuple((name, "*bf16" if name == "out" else kind) for name, kind in signature_for(torch.float32, SIGNATURE))
    of_inputs = (signature_for(dtype, SIGNATURE) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    for signature in (*of_inputs, mixed):
        for aligned in (True, False):
            for moments, capped in ((False, False), (True, False), (True, True)):
                constants = (("ALIGNED", aligned), ("MOMENTS", moments), ("CAPPED", capped))
                yield Configuration(logits_gradient_kernel, signature, constants, (), NUM_WARPS)
