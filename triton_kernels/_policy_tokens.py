"""One block of the policy loss's tokens: their loss, gradient and sums, and the rows that they are in.

Tokens are laid out as tiles [BLOCK / VECTOR, VECTOR], so that a thread holds VECTOR tokens in a row: 16 bytes of
float32. Masks of a byte and values of two then come in the same layout, and nothing is moved between threads. (Sixteen
bytes of bfloat16 would be eight tokens a thread, with twice the registers and half as many threads at work.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from fastadv.triton_kernels._launch import FRACTIONAL
from fastadv.triton_kernels._policy_terms import GSPO, REINFORCE, importance_weight, kl_term, ratio_of, token_term
from fastadv.triton_kernels._rows import row_of

VECTOR, WARPS = 4, 4
BLOCK = VECTOR * 32 * WARPS  # a vector a thread

TOKEN, ROW, SEGMENT = (tl.constexpr(i) for i in range(3))  # AdvantageKind in csrc/cpu/kernels.h
BAD = tl.constexpr(FRACTIONAL)
EXCLUDED = tl.constexpr(-(2**31))  # the bits of -0: the scale of a row of weight 0, and of no other
LOW = tl.constexpr(0xFFFF)  # two counts in one integer: a program has fewer tokens than 2^16

# What a launch was given, as bits.
(
    SCALE,
    OLD_LOG_PROBS,
    ROW_WEIGHTS,
    ROW_TOKENS,
    TOKEN_WEIGHTS,
    IS_WEIGHTS,
    ROW_IS_WEIGHTS,
    ROLLOUT,
    REFERENCE,
    ENTROPY,
) = (tl.constexpr(1 << i) for i in range(10))
GRADIENT, ENTROPY_GRADIENT, TOKEN_LOSSES, SHARED = (tl.constexpr(1 << i) for i in range(10, 14))
ROW_SCALES = tl.constexpr(ROW_WEIGHTS.value | ROW_TOKENS.value)


class Streams(NamedTuple):
    """Per-token tensors, [N]."""

    log_probs: Any
    old_log_probs: Any
    mask: Any
    advantages: Any  # [N], [B] or [S]
    turn_ids: Any
    token_weights: Any
    is_weights: Any
    rollout_log_probs: Any
    ref_log_probs: Any
    entropy: Any
    gradient: Any
    entropy_gradient: Any
    token_losses: Any


class PerRow(NamedTuple):
    """Tensors of rows, [B]."""

    segment_offsets: Any  # [B + 1]
    scales: Any
    log_ratios: Any
    is_weights: Any
    pieces: Any  # [2, rows + blocks]


class Rule(NamedTuple):
    """What is computed."""

    given: Any  # bits
    scale: Any  # of rows that have none of their own
    loss: Any
    correction: Any
    kl: Any
    entropy_coef: Any


class Sums(NamedTuple):
    """What a thread's tokens add up to, [BLOCK / VECTOR]; those after the first four are 0 but in extended losses."""

    loss: Any
    negative_log_ratio: Any
    tokens: Any  # and clipped
    bounded: Any  # and saturated
    policy: Any
    kl: Any
    entropy: Any
    is_weight: Any
    rejected: Any  # and capped
    missing: Any


# ---- tokens ----------------------------------------------------------------------------------------------------------


@triton.jit
def when(condition, mask):
    """`mask & condition`, where the condition may be a scalar. (Of `&` Triton's interpreter makes integers then.)"""
    return tl.where(condition, mask, tl.zeros_like(mask))


@triton.jit
def load(pointer, present, inside, other, FULL: tl.constexpr):
    """An input in float32, `other` where it is absent. In a full block the mask is the same at all tokens, and the
    compiler moves 16 bytes at a time."""
    mask = when(present, tl.full(pointer.shape, 1, tl.int1) if FULL else inside)
    return tl.load(pointer, mask=mask, other=other).to(tl.float32)


@triton.jit
def store(pointer, value, wanted, inside, FULL: tl.constexpr):
    """Writes an output if it is wanted: a branch would cost more, since what was compared had to be kept across it."""
    tl.store(pointer, value, mask=when(wanted, tl.full(pointer.shape, 1, tl.int1) if FULL else inside))


@triton.jit
def _counts(on, low, high):
    """Two counts of a token in one integer."""
    return tl.where(on, tl.where(low, 1, 0) + tl.where(high, LOW + 1, 0), 0)


@triton.jit
def _advantages(t, r, row, place, on, inside, KIND: tl.constexpr, FULL: tl.constexpr):
    """(advantages of the tokens that count, tokens whose turn the table lacks)."""
    if KIND == TOKEN:
        return load(t.advantages + place, True, inside, 0.0, FULL), on & ~on
    elif KIND == ROW:
        return tl.load(t.advantages + row), on & ~on
    else:
        turn = tl.load(t.turn_ids + place, mask=None if FULL else inside, other=None if FULL else -1)
        first = tl.load(r.segment_offsets + row)
        turns = (tl.load(r.segment_offsets + row + 1) - first).to(tl.int32)
        there = on & (turn >= 0) & (turn < turns)
        return tl.load(t.advantages + first + turn, mask=there, other=0.0), on & (turn >= turns)


@triton.jit
def _tokens(
    t,  # Streams
    r,  # PerRow
    rule,  # Rule
    row,  # of each token, [BLOCK / VECTOR, VECTOR] int64, or one for all; not read where nothing is per row
    place,  # of each token in the streams, [BLOCK / VECTOR, VECTOR] int64
    count,  # tokens that there are
    LOSS: tl.constexpr, KIND: tl.constexpr, EXTENDED: tl.constexpr, BY_ROW: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Loss and gradient of a block: (Sums, the policy gradients that rows share, which tokens count)."""
    given = rule.given
    inside = place < count
    m = tl.load(t.mask + place, mask=None if FULL else inside, other=None if FULL else 0)
    log_prob = load(t.log_probs + place, True, inside, 0.0, FULL)
    has_old = (given & OLD_LOG_PROBS) != 0 if LOSS == REINFORCE else True
    old_log_prob = load(t.old_log_probs + place, has_old, inside, 0.0, FULL)
    if LOSS == REINFORCE:
        old_log_prob = tl.where(has_old, old_log_prob, log_prob)

    # A token outside of the mask, of weight 0 or in a row of weight 0 is replaced before any arithmetic, so whatever
    # lies there (NaN, inf, garbage) reaches neither value, gradient nor metric.
    on = m != 0
    scale = rule.scale
    row_log_ratio = 0.0
    if BY_ROW:
        scale = tl.load(r.scales + row, mask=when((given & ROW_SCALES) != 0, row == row), other=scale)
        on = when(scale.to(tl.int32, bitcast=True) != EXCLUDED, on)
        if LOSS == GSPO:
            row_log_ratio = tl.load(r.log_ratios + row) + tl.zeros(place.shape, tl.float32)
    if EXTENDED:
        weight = load(t.token_weights + place, (given & TOKEN_WEIGHTS) != 0, inside, 1.0, FULL)
        on = on & (weight != 0.0)
        weight = tl.where(on, weight, 0.0)
    advantage, lost = _advantages(t, r, row, place, on, inside, KIND, FULL)
    log_prob = tl.where(on, log_prob, 0.0)
    old_log_prob = tl.where(on, old_log_prob, 0.0)
    advantage = tl.where(on, advantage, 0.0)
    # What a fraction in the mask or a turn that the table lacks means nobody knows: NaN, also where a bound would have
    # hidden it.
    scale = tl.where((m == BAD) | lost, float("nan"), scale)

    ratio = ratio_of(log_prob, old_log_prob, row_log_ratio, rule.loss, LOSS)
    term = token_term(ratio, log_prob, advantage, rule.loss, LOSS)
    loss = term.loss
    gradient = term.gradient
    shared = gradient
    nothing = tl.zeros([place.shape[0]], tl.float32)
    policy = nothing
    kl_value = nothing
    entropy = nothing
    is_weight = nothing
    weighed = nothing.to(tl.int32)
    missed = weighed
    if EXTENDED:
        # An importance weight of 0 rejects the token, even where its policy term is NaN; KL, entropy and metrics still
        # count it.
        correction = load(t.is_weights + place, (given & IS_WEIGHTS) != 0, inside, 1.0, FULL)
        correction = tl.where(on, correction, 1.0)
        capped = on & ~on
        missing = capped
        if (given & ROW_IS_WEIGHTS) != 0:
            correction = correction * tl.load(r.is_weights + row)
        if (given & ROLLOUT) != 0:
            rollout_log_prob = tl.where(on, load(t.rollout_log_probs + place, True, inside, 0.0, FULL), 0.0)
            w = importance_weight(old_log_prob, rollout_log_prob, rule.correction)
            correction = correction * w.weight
            capped = w.capped
            missing = w.missing
        rejected = correction == 0.0
        used = on & ~rejected
        is_weight = tl.sum(tl.where(on, correction, 0.0), 1)
        weighed = tl.sum(_counts(on, rejected, capped), 1)
        missed = tl.sum(tl.where(on & missing, 1, 0), 1)
        loss = tl.where(used, loss * correction, 0.0) * weight
        shared = tl.where(used, gradient * correction, 0.0) * weight
        policy = tl.sum(tl.where(on, loss * scale, 0.0), 1)
        gradient = tl.where((given & SHARED) != 0, 0.0, shared)
        if (given & REFERENCE) != 0:
            ref_log_prob = tl.where(on, load(t.ref_log_probs + place, True, inside, 0.0, FULL), 0.0)
            kl = kl_term(log_prob, old_log_prob, ref_log_prob, rule.loss.log_ratio_bound, rule.kl)
            factor = rule.kl.coef * weight
            kl_value = tl.sum(tl.where(on, kl.value, 0.0), 1)
            loss = loss + tl.where(on, kl.value * factor, 0.0)
            gradient = gradient + tl.where(on, kl.gradient * factor, 0.0)
        if (given & ENTROPY) != 0:
            value = tl.where(on, load(t.entropy + place, True, inside, 0.0, FULL), 0.0)
            factor = -rule.entropy_coef * weight
            entropy = tl.sum(value, 1)
            loss = loss + value * factor
            value = tl.where(on, factor * scale, 0.0)
            store(t.entropy_gradient + place, value, (given & ENTROPY_GRADIENT) != 0, inside, FULL)
    loss = tl.where(on, loss * scale, 0.0)
    gradient = tl.where(on, gradient * scale, 0.0)
    sums = Sums(
        tl.sum(loss, 1),
        tl.sum(-ratio.log_ratio, 1),
        tl.sum(_counts(on, True, term.clipped), 1),
        tl.sum(_counts(on, term.bounded, ratio.saturated), 1),
        policy,
        kl_value,
        entropy,
        is_weight,
        weighed,
        missed,
    )
    store(t.gradient + place, gradient, (given & GRADIENT) != 0, inside, FULL)
    store(t.token_losses + place, loss, (given & TOKEN_LOSSES) != 0, inside, FULL)
    return sums, shared * scale, on


@triton.jit
def _added(a, b):
    return Sums(
        a.loss + b.loss,
        a.negative_log_ratio + b.negative_log_ratio,
        a.tokens + b.tokens,
        a.bounded + b.bounded,
        a.policy + b.policy,
        a.kl + b.kl,
        a.entropy + b.entropy,
        a.is_weight + b.is_weight,
        a.rejected + b.rejected,
        a.missing + b.missing,
    )


@triton.jit
def add_block(
    sums, t, r, rule,
    row,  # see _tokens
    first, last,  # rows of the block
    block, place, rows, count, BLOCK: tl.constexpr,
    LOSS: tl.constexpr, KIND: tl.constexpr, EXTENDED: tl.constexpr, BY_ROW: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """`sums` with those of a block, whose loss and gradient are written. What each of its rows has of a gradient that
    the row's tokens share goes to `pieces`."""
    new, shared, on = _tokens(t, r, rule, row, place, count, LOSS, KIND, EXTENDED, BY_ROW, FULL)
    if EXTENDED and LOSS == GSPO and (rule.given & SHARED) != 0:
        cells = rows + tl.cdiv(count, BLOCK)
        for each in range(first, last + 1):
            mine = on & (row == each)
            # From one piece to the next, the row or the block is the next: no two pieces have one sum of both.
            cell = r.pieces + each + block
            tl.store(cell, tl.sum(tl.where(mine, shared, 0.0)))
            tl.store(cell + cells, tl.sum(mine.to(tl.int32)).to(tl.float32))
    return _added(sums, new)


# ---- rows ------------------------------------------------------------------------------------------------------------


@triton.jit
def row_and_end(cu_seqlens, rows, width, token):
    """`row_of` where the layout is told at run time: padded rows have a width, packed ones 0."""
    if width > 0:
        row, end = row_of(cu_seqlens, rows, width, token, False)
    else:
        row, end = row_of(cu_seqlens, rows, width, token, True)
    return row, end


@triton.jit
def rows_of(cu_seqlens, width, first, last, end, place):
    """The row of each token, [BLOCK / VECTOR, VECTOR] int64, from `first`, which ends at `end`, to `last`; past
    the last token, any of these."""
    low = tl.zeros_like(place).to(tl.int32)  # rows after the first
    if width > 0:
        # In 32 bits: from the start of the first row, or of its last 2^30 tokens, since a block has no more.
        short = tl.minimum(width, 2**30)
        low = (place - (end - short)).to(tl.int32) // short.to(tl.int32)
    else:
        left = (last - first).to(tl.int32)
        high = low + left
        while left > 0:
            middle = (low + high + 1) // 2
            reached = tl.load(cu_seqlens + first + middle) <= place
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle - 1)
            left = left // 2
    return tl.minimum(first + low, last)
