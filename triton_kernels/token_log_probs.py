"""Log-softmax of rows of logits: log-prob of the label, entropy and sum of squares.

Reads each logit once, 2 bytes of bfloat16, in one launch; few long rows take two. The gradient is in
`_logits_gradient.py`.

A program takes a row. Each of its lanes, one in a thread, has an online softmax of its own (Milakov and Gimelshein
2018, algorithm 3): the maximum of its logits and sums relative to it, rescaled once for the 32 logits that it gets from
a block. So the loop has no barrier and takes one exp2 a logit, and a loop over blocks leaves no thread waiting for
another; a maximum of the whole block would cost a barrier each, one a logit another exp2. Lanes meet at a row's end.

The same bits everywhere: which logits meet in a sum, and in which order, follows from their columns alone, not from
dtype, strides, alignment, or whether a row is split. So lanes are added in pairs (a + b is b + a, however the compiler
lays them out) and parts of a row in their order, and fused multiply-adds are written out, with no others made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from fastadv.triton_kernels import _logits_gradient
from fastadv.triton_kernels._launch import ALIGNMENT, Configuration, blocks, launch
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
    UNLABELLED,
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
)
from fastadv.triton_kernels._logits_gradient import logits_gradient, logits_gradient_kernel
from torch import Tensor

__all__ = ["finish_statistics", "logits_gradient", "row_statistics", "token_log_probs"]

# What a program reads: a row; a part of one, whose sums it leaves in memory; what all parts left.
WHOLE, SPLIT, MERGE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
STATISTICS, LOG_PROB, RESULTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what it writes
# Fewer rows than this are split: three programs for each of the 132 processors of an H100. A part leaves 4 KiB.
ROWS_TO_SPLIT = 384
REGISTERS = 88  # of a thread, with a softcap: without a limit said, ptxas spills some on sm_100 for occupancy
ROWS = 128  # of a program that merges statistics


# ---- sums of a part of a row -----------------------------------------------------------------------------------------


@triton.jit
def _load_tile(pointers, left, cap, inverse_cap, NEIGHBOURS: tl.constexpr, CAPPED: tl.constexpr, FULL: tl.constexpr):
    """A tile of logits, [LANES, WIDTH], each lane in a thread of its own.

    Asked for a whole tile, the compiler deals a lane to several threads where one load does not hold its columns, and
    the sums need shuffles. So each thread gets them by several loads.
    """
    if NEIGHBOURS == 8:
        z = load_columns(pointers, 0, left, 8, FULL)
    elif NEIGHBOURS == 4:
        halves = tl.join(load_columns(pointers, 0, left, 4, FULL), load_columns(pointers, 4, left, 4, FULL))
        z = tl.reshape(tl.permute(halves, [0, 2, 1]), [LANES, WIDTH])
    else:
        z04 = tl.join(load_columns(pointers, 0, left, 1, FULL), load_columns(pointers, 4, left, 1, FULL))
        z15 = tl.join(load_columns(pointers, 1, left, 1, FULL), load_columns(pointers, 5, left, 1, FULL))
        z26 = tl.join(load_columns(pointers, 2, left, 1, FULL), load_columns(pointers, 6, left, 1, FULL))
        z37 = tl.join(load_columns(pointers, 3, left, 1, FULL), load_columns(pointers, 7, left, 1, FULL))
        z = tl.reshape(tl.join(tl.join(z04, z26), tl.join(z15, z37)), [LANES, WIDTH])
    if CAPPED:
        z, _ = softcapped(z, cap, inverse_cap)
    return z


@triton.jit
def _finite(m):
    """A maximum that can be subtracted: 0 in place of -inf, that of columns without a possible token."""
    return tl.where(m == NONE, 0.0, m)


@triton.jit
def _relative(m, center, scale):
    """Powers of 2 that take sums relative to `m` to sums relative to `center`, and their logarithms."""
    d = tl.maximum((m - center) * scale, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return d, tl.exp2(d)


@triton.jit
def _powers(z, center, scale, MOMENTS: tl.constexpr):
    """d = log2 of e^((z - center) / T), and 2^d. The difference comes first: large logits keep their digits."""
    d = (z - center) * scale
    if MOMENTS:
        d = tl.maximum(d, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return d, tl.exp2(d)


@triton.jit
def _sum_width(x):
    """Over the columns of each lane, [LANES, WIDTH] to [LANES]."""
    x = tl.sum(tl.reshape(x, [LANES, 4, 2]), 2)
    x = tl.sum(tl.reshape(x, [LANES, 2, 2]), 2)
    return tl.sum(x, 1)


@triton.jit
def _sum_lanes(x):
    """[LANES] to a number."""
    x = tl.sum(tl.reshape(x, [64, 2]), 1)
    x = tl.sum(tl.reshape(x, [32, 2]), 1)
    x = tl.sum(tl.reshape(x, [16, 2]), 1)
    x = tl.sum(tl.reshape(x, [8, 2]), 1)
    x = tl.sum(tl.reshape(x, [4, 2]), 1)
    x = tl.sum(tl.reshape(x, [2, 2]), 1)
    return tl.sum(x, 0)


@triton.jit
def _add_block(
    pointers, left, m, s, w, q, scale, cap, inverse_cap,
    NEIGHBOURS: tl.constexpr, MOMENTS: tl.constexpr, CAPPED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The sums of each lane with a full block more, or with a tile of which `left` columns exist.

    m is the maximum, s = sum 2^d, w = sum 2^d d, q = sum 2^2d, where d = (z - m) log2(e) / T. s is kept by column of a
    lane, [LANES, WIDTH]: where p is nearly 1, 1 in a float32 sum swallows all other tokens.
    """
    z0 = _load_tile(pointers, left, cap, inverse_cap, NEIGHBOURS, CAPPED, FULL)
    top = z0
    if FULL:
        z1 = _load_tile(pointers + TILE, left, cap, inverse_cap, NEIGHBOURS, CAPPED, FULL)
        z2 = _load_tile(pointers + 2 * TILE, left, cap, inverse_cap, NEIGHBOURS, CAPPED, FULL)
        z3 = _load_tile(pointers + 3 * TILE, left, cap, inverse_cap, NEIGHBOURS, CAPPED, FULL)
        top = tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3))
    new = tl.maximum(m, tl.max(top, 1))  # [LANES]
    center = _finite(new)
    shift, rescale = _relative(m, center, scale)  # [LANES]
    d, e = _powers(z0, center[:, None], scale, MOMENTS)  # [LANES, WIDTH]
    sum_w, sum_q = e * d, e * e
    if FULL:
        d1, e1 = _powers(z1, center[:, None], scale, MOMENTS)
        d2, e2 = _powers(z2, center[:, None], scale, MOMENTS)
        d3, e3 = _powers(z3, center[:, None], scale, MOMENTS)
        e = (e + e1) + (e2 + e3)
        sum_w = tl.fma(e3, d3, tl.fma(e2, d2, tl.fma(e1, d1, sum_w)))
        sum_q = tl.fma(e3, e3, tl.fma(e2, e2, tl.fma(e1, e1, sum_q)))
    if MOMENTS:
        w = tl.fma(tl.fma(_sum_width(s), shift, w), rescale, _sum_width(sum_w))
        q = tl.fma(q, rescale * rescale, _sum_width(sum_q))
    return new, tl.fma(s, rescale[:, None], e), w, q


@triton.jit
def _part_sums(
    logits, start, columns, scale, cap, inverse_cap,
    NEIGHBOURS: tl.constexpr, MOMENTS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Sums of each lane over `columns` logits, [LANES]; s is float64."""
    m = tl.full([LANES], NONE, tl.float32)
    s = tl.zeros([LANES, WIDTH], tl.float32)
    w = tl.zeros([LANES], tl.float32)
    q = tl.zeros([LANES], tl.float32)
    first = logits + start
    if NEIGHBOURS > 1:
        first = tl.multiple_of(first, 16)
    pointers = first + lane_columns(NEIGHBOURS)
    full = columns // BLOCK * BLOCK
    for _ in range(0, full, BLOCK):
        m, s, w, q = _add_block(pointers, 0, m, s, w, q, scale, cap, inverse_cap, NEIGHBOURS, MOMENTS, CAPPED, True)
        pointers += BLOCK
    for done in range(full, columns, TILE):
        left = columns - done
        m, s, w, q = _add_block(pointers, left, m, s, w, q, scale, cap, inverse_cap, NEIGHBOURS, MOMENTS, CAPPED, False)
        pointers += TILE
    return m, _sum_width(s.to(tl.float64)), w, q


@triton.jit
def _merged(m, s, w, q, part_m, part_s, part_w, part_q, scale):
    """Sums of each lane over both, [LANES]."""
    new = tl.maximum(m, part_m)
    center = _finite(new)
    shift, rescale = _relative(m, center, scale)
    part_shift, part_rescale = _relative(part_m, center, scale)
    w = rescale * tl.fma(s.to(tl.float32), shift, w)
    w = tl.fma(part_rescale, tl.fma(part_s.to(tl.float32), part_shift, part_w), w)
    q = tl.fma(part_rescale * part_rescale, part_q, rescale * rescale * q)
    return new, rescale.to(tl.float64) * s + part_rescale.to(tl.float64) * part_s, w, q


# ---- rows ------------------------------------------------------------------------------------------------------------


@triton.jit
def _finished(label_logit, maximum, s, w, q, MOMENTS: tl.constexpr):
    """log_prob, lse, entropy and sum_p2 from sums in float64; NaN where s is not positive."""
    found = s > 0.0
    log_s = tl.log(tl.where(found, s, 1.0))
    log_prob = (label_logit - maximum) - log_s
    log_prob = tl.where(found, tl.where(log_prob > 0.0, 0.0, log_prob), float("nan"))
    lse = tl.where(found, maximum + log_s, float("nan"))
    if MOMENTS:
        s = tl.where(found, s, float("nan"))
        return log_prob, lse, log_s - w / s, q / (s * s)
    else:
        return log_prob, lse, lse, lse


@triton.jit
def _write(
    log_prob, entropy, sum_p2, out, row, rows, wanted, label_logit, maximum, s, w, q, MOMENTS: tl.constexpr
):  # fmt: skip
    """What a row comes to."""
    out += row
    if wanted == STATISTICS:
        tl.store(out, label_logit)
        tl.store(out + rows, maximum)
        tl.store(out + 2 * rows, s)
        tl.store(out + 3 * rows, w)
        tl.store(out + 4 * rows, q)
    else:
        log_p, lse, h, p2 = _finished(label_logit, maximum, s, w, q, MOMENTS)
        tl.store(log_prob + row, log_p.to(tl.float32))
        tl.store(out, lse)
        if wanted == RESULTS:
            tl.store(entropy + row, h.to(tl.float32))
            tl.store(sum_p2 + row, p2.to(tl.float32))
            tl.store(out + rows, h)
            tl.store(out + 2 * rows, p2)


ROW_SUMS: Signature = (
    ("logits", "*"), ("labels", "*i64"), ("lanes", "*fp64"), ("log_prob", "*fp32"), ("entropy", "*fp32"),
    ("sum_p2", "*fp32"), ("out", "*fp64"), ("inner", "i64"), ("outer_stride", "i64"), ("inner_stride", "i64"),
    ("rows", "i64"), ("vocab", "i64"), ("step", "i64"), ("wanted", "i64"), *SCALING,
)  # fmt: skip
FINISH: Signature = (("statistics", "*fp64"), ("results", "*fp64"), ("parts", "i64"), ("rows", "i64"))


@triton.jit(**unspecialised(ROW_SUMS))
def row_sums_kernel(
    logits,  # rows of V, a view of [rows / inner, inner, V]
    labels,  # [R] int64
    lanes,  # [R, parts, 4, LANES] float64, unless rows are read whole: m, s, w, q of each lane
    log_prob,  # [R] float32, unless statistics are wanted
    entropy,  # [R] float32; this and the next if all results are wanted
    sum_p2,  # [R] float32
    out,  # [5, R] float64 statistics, or [3, R] lse, entropy, sum_p2, or [1, R] lse
    inner: tl.int64,
    outer_stride: tl.int64,
    inner_stride: tl.int64,
    rows: tl.int64,
    vocab: tl.int64,
    step: tl.int64,
    wanted: tl.int64,
    inverse_temperatures,  # [R] float64, if per_row
    per_row: tl.int64,
    inverse_high,
    inverse_low,
    cap,
    inverse_cap,
    NEIGHBOURS: tl.constexpr,  # of WIDTH columns, those that one load of 16 bytes holds; 1 where rows are not aligned
    MOMENTS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    inverse = inverse_temperature_of(inverse_temperatures, row, per_row, inverse_high, inverse_low)
    if (label >= UNLABELLED) & (label < vocab) & (inverse > 0.0):
        start = row_start(row, inner, outer_stride, inner_stride)
        scale = (inverse * LOG2E).to(tl.float32)
        m = tl.full([LANES], NONE, tl.float32)
        s = tl.zeros([LANES], tl.float64)
        w = tl.zeros([LANES], tl.float32)
        q = tl.zeros([LANES], tl.float32)
        parts = tl.cdiv(vocab, PART)
        begin = tl.program_id(1).to(tl.int64)
        end = tl.where(step == SPLIT, begin + 1, parts)
        for part in range(begin, end):
            left_by = lanes + (row * parts + part) * (4 * LANES) + tl.arange(0, LANES)
            if step == MERGE:
                part_m = tl.load(left_by).to(tl.float32)
                part_s = tl.load(left_by + LANES)
                part_w = tl.load(left_by + 2 * LANES).to(tl.float32)
                part_q = tl.load(left_by + 3 * LANES).to(tl.float32)
            else:
                columns = tl.minimum(vocab - part * PART, PART).to(tl.int32)
                part_m, part_s, part_w, part_q = _part_sums(
                    logits, start + part * PART, columns, scale, cap, inverse_cap, NEIGHBOURS, MOMENTS, CAPPED
                )
            if step == SPLIT:
                tl.store(left_by, part_m.to(tl.float64))
                tl.store(left_by + LANES, part_s)
                tl.store(left_by + 2 * LANES, part_w.to(tl.float64))
                tl.store(left_by + 3 * LANES, part_q.to(tl.float64))
            else:
                m, s, w, q = _merged(m, s, w, q, part_m, part_s, part_w, part_q, scale)
        if step != SPLIT:
            # Read again: in the loop their registers are worth more.
            label = tl.load(labels + row)
            inverse = inverse_temperature_of(inverse_temperatures, row, per_row, inverse_high, inverse_low)
            start = row_start(row, inner, outer_stride, inner_stride)
            at = tl.load(logits + start + label, mask=label != UNLABELLED, other=NONE).to(tl.float32)
            if CAPPED:
                at, _ = softcapped(at, cap, inverse_cap)
            top = tl.max(m, 0)
            shift, rescale = _relative(m, _finite(top), scale)
            e = rescale.to(tl.float64)
            row_w = _sum_lanes(e * (w.to(tl.float64) + s * shift.to(tl.float64))) * LN2
            row_s = _sum_lanes(e * s)
            row_q = _sum_lanes(e * e * q.to(tl.float64))
            _write(
                log_prob, entropy, sum_p2, out, row, rows, wanted,
                at.to(tl.float64) * inverse, top.to(tl.float64) * inverse, row_s, row_w, row_q, MOMENTS,
            )  # fmt: skip
    elif step != SPLIT:
        # A skipped row comes to 0, as one with a single possible token; any other has no meaning.
        zero = tl.where(label == UNREAD, 0.0, float("nan")).to(tl.float64)
        _write(log_prob, entropy, sum_p2, out, row, rows, wanted, zero, zero, zero + 1.0, zero, zero, MOMENTS)


@triton.jit(**unspecialised(FINISH))
def finish_statistics_kernel(
    statistics,  # [parts, 5, R] float64
    results,  # [4, R] float64: log_prob, entropy, sum_p2, lse
    parts: tl.int64,
    rows: tl.int64,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    inside = row < rows
    label_logit = tl.full([ROWS], NONE, tl.float64)
    m = tl.full([ROWS], NONE, tl.float64)
    s = tl.zeros([ROWS], tl.float64)
    w = tl.zeros([ROWS], tl.float64)
    q = tl.zeros([ROWS], tl.float64)
    for part in range(parts):
        at = statistics + part * 5 * rows + row
        part_label = tl.load(at, mask=inside, other=0.0)
        part_m = tl.load(at + rows, mask=inside, other=0.0)
        part_s = tl.load(at + 2 * rows, mask=inside, other=1.0)
        part_w = tl.load(at + 3 * rows, mask=inside, other=0.0)
        part_q = tl.load(at + 4 * rows, mask=inside, other=0.0)
        label_logit = tl.where(part_label <= label_logit, label_logit, part_label)
        new = tl.maximum(m, part_m)
        d = tl.where(m == NONE, 0.0, m - _finite(new))  # a part without a possible token adds sums of 0
        part_d = tl.where(part_m == NONE, 0.0, part_m - _finite(new))
        e, part_e = tl.exp(d), tl.exp(part_d)
        w = e * (w + s * d) + part_e * (part_w + part_s * part_d)
        s = e * s + part_e * part_s
        q = e * e * q + part_e * part_e * part_q
        m = new
    log_prob, lse, entropy, sum_p2 = _finished(label_logit, m, s, w, q, True)
    out = results + row
    tl.store(out, log_prob, mask=inside)
    tl.store(out + rows, entropy, mask=inside)
    tl.store(out + 2 * rows, sum_p2, mask=inside)
    tl.store(out + 3 * rows, lse, mask=inside)


# ---- launchers -------------------------------------------------------------------------------------------------------


def _launch_sums(
    logits: Tensor,
    labels: Tensor,
    inverse_temperature: float | Tensor,
    softcap: float,
    results: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    wanted: tl.constexpr,
) -> int:
    view = readable(logits)
    rows, vocab = labels.numel(), logits.shape[-1]
    parts = blocks(vocab, PART.value)
    split = parts > 1 and rows < ROWS_TO_SPLIT
    arguments = {
        "logits": view.rows,
        "labels": labels,
        "lanes": out.new_empty((rows, parts, 4, LANES.value)) if split else out,
        **dict(zip(("log_prob", "entropy", "sum_p2"), results, strict=True)),
        "out": out,
        "inner": view.inner,
        "outer_stride": view.outer_stride,
        "inner_stride": view.inner_stride,
        "rows": rows,
        "vocab": vocab,
    }
    rest = {"wanted": wanted.value, **scaling(inverse_temperature, softcap, out)}
    constants = {
        "NEIGHBOURS": ALIGNMENT // logits.element_size() if view.aligned else 1,
        "MOMENTS": wanted is not LOG_PROB or softcap != 0,
        "CAPPED": softcap != 0,
    }
    for step, programs in ((SPLIT, parts), (MERGE, 1)) if split else ((WHOLE, 1),):
        launch(
            row_sums_kernel,
            (rows, programs),
            {**arguments, "step": step.value, **rest},
            constants,
            num_warps=NUM_WARPS,
            fp_fusion=False,  # the same bits in every form, see above
            registers=REGISTERS if constants["CAPPED"] else None,
        )
    return 0


def row_statistics(
    logits: Tensor, labels: Tensor, inverse_temperature: float | Tensor, softcap: float, statistics: Tensor
) -> int:
    """See `fastadv.ops._logits.row_statistics`."""
    unused = statistics.new_empty(0, dtype=torch.float32)
    return _launch_sums(logits, labels, inverse_temperature, softcap, (unused, unused, unused), statistics, STATISTICS)


def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    inverse_temperature: float | Tensor,
    softcap: float,
    log_prob: Tensor,
    entropy: Tensor | None,
    sum_p2: Tensor | None,
    state: Tensor,
) -> int:
    """See `fastadv.ops._logits.log_probs`."""
    if entropy is None or sum_p2 is None:
        results = (log_prob, log_prob, log_prob)
        return _launch_sums(logits, labels, inverse_temperature, softcap, results, state, LOG_PROB)
    return _launch_sums(logits, labels, inverse_temperature, softcap, (log_prob, entropy, sum_p2), state, RESULTS)


def finish_statistics(statistics: Tensor, results: Tensor) -> int:
    """See `fastadv.ops._logits.finish`."""
    rows = results.shape[1]
    launch(
        finish_statistics_kernel,
        (blocks(rows, ROWS),),
        {
            "statistics": statistics,
            "results": results,
            "parts": statistics.shape[0] if statistics.dim() == 3 else 1,
            "rows": rows,
        },
        {"ROWS": ROWS},
        fp_fusion=False,  # as csrc/cpu/token_log_probs.cpp merges
    )
    return 0


# ---- for the ahead-of-time gate --------------------------------------------------------------------------------------

STREAMING = (row_sums_kernel, logits_gradient_kernel)
IN_PLACE = (logits_gradient_kernel,)  # all threads of a block read the label's logit, and one writes it


def narrow(configuration: Configuration) -> bool:
    """Forms for rows that do not all begin at a multiple of 16 bytes: narrower accesses read them."""
    constants = dict(configuration.constants)
    return constants.get("NEIGHBOURS") == 1 or constants.get("ALIGNED") is False


def configurations() -> Iterator[Configuration]:
    """Every form that a launch asks for."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        signature = signature_for(dtype, ROW_SUMS)
        for neighbours in (ALIGNMENT // dtype.itemsize, 1):
            for moments, capped in ((False, False), (True, False), (True, True)):
                constants = (("NEIGHBOURS", neighbours), ("MOMENTS", moments), ("CAPPED", capped))
                registers = REGISTERS if capped else None
                yield Configuration(row_sums_kernel, signature, constants, (), NUM_WARPS, registers=registers)
    yield Configuration(finish_statistics_kernel, FINISH, (("ROWS", ROWS),), ())
    yield from _logits_gradient.configurations()


def bytes_moved(rows: int, vocab: int, itemsize: int, *, moments: bool, gradient: bool) -> int:
    """That token_log_probs, or the gradient by all its results, has to move where every row is read."""
    results = 3 if moments else 1
    if gradient:
        return rows * (2 * vocab * itemsize + itemsize + 8 + (8 + 4) * results)  # logits, label's logit, label, state
    return rows * (vocab * itemsize + itemsize + 8 + (4 + 8) * results)
