"""One block of the policy loss's tokens: their loss, gradient and sums, and the rows that they are in.

A thread holds VECTOR tokens in a row: 16 bytes of what the log-probs are, so four tokens of float32 and eight of 16
bits. It computes TILE of them at a time, in tiles [BLOCK / VECTOR, TILE] that hold a thread's first four tokens, or its
second: eight at once take half as many registers again. Masks of a byte come in the same layout, and nothing is moved
between threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from fastadv.triton_kernels._policy_terms import GSPO, REINFORCE, importance_weight, kl_term, ratio_of, token_term
from fastadv.triton_kernels._rows import row_of

TILE, WARPS = tl.constexpr(4), 4

TOKEN, ROW, SEGMENT = (tl.constexpr(i) for i in range(3))  # AdvantageKind in csrc/cpu/kernels.h
EXCLUDED = tl.constexpr(-(2**31))  # the bits of -0: the scale of a row of weight 0, and of no other
# Four counts lie in the bytes of one integer of a thread, which has fewer than 128 tokens: the first and the third, and
# the second and the fourth, are then added over threads in 16 bits.
CLIPPED_ONE, BOUNDED_ONE, SATURATED_ONE = (tl.constexpr(1 << 8 * i) for i in range(1, 4))  # beside 1, a token
CAPPED_ONE, MISSING_ONE = (tl.constexpr(1 << 8 * i) for i in range(1, 3))  # beside 1, a rejected token
EVEN_BYTES = tl.constexpr(0x00FF00FF)
LOW = tl.constexpr(0xFFFF)

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
    table: Any  # segments of all rows


class Rule(NamedTuple):
    """What is computed."""

    given: Any  # bits
    fractional: Any  # byte of the mask
    scale: Any  # of rows that have none of their own
    loss: Any
    correction: Any
    kl: Any
    entropy_coef: Any


class Tokens(NamedTuple):
    """What is read of each token in any loss."""

    mask: Any
    log_prob: Any
    old_log_prob: Any
    advantage: Any  # or its turn; where advantages are per row, nothing


class OfRow(NamedTuple):
    """What the tokens have of their rows: scalars where all are in one, or tiles."""

    scale: Any
    log_ratio: Any
    is_weight: Any
    advantage: Any
    begin: Any  # the first segment
    segments: Any  # how many


class Sums(NamedTuple):
    """What a thread's tokens add up to, [BLOCK / VECTOR]; those after the first three are 0 but in extended losses."""

    loss: Any
    negative_log_ratio: Any
    counts: Any  # tokens, clipped, bounded, saturated
    policy: Any
    kl: Any
    entropy: Any
    is_weight: Any
    weighed: Any  # rejected, capped, missing


# ---- tokens ----------------------------------------------------------------------------------------------------------


@triton.jit
def when(condition, mask):
    """`mask & condition`, where the condition may be a scalar. (Of `&` Triton's interpreter makes integers then.)"""
    return tl.where(condition, mask, tl.zeros_like(mask))


@triton.jit
def load(pointer, present, inside, full, other):
    """An input, `other` where it is absent. In a full block the mask is the same at all tokens, and the compiler moves
    16 bytes at a time."""
    if full:
        value = tl.load(pointer, mask=when(present, tl.full(pointer.shape, 1, tl.int1)), other=other)
    else:
        value = tl.load(pointer, mask=when(present, inside), other=other)
    return value


@triton.jit
def store(pointer, value, wanted, inside, full):
    """Writes an output if it is wanted: a branch would cost more, since what was compared had to be kept across it."""
    if full:
        tl.store(pointer, value, mask=when(wanted, tl.full(pointer.shape, 1, tl.int1)))
    else:
        tl.store(pointer, value, mask=when(wanted, inside))


@triton.jit
def _read(t, given, place, inside, LOSS: tl.constexpr, KIND: tl.constexpr, FULL: tl.constexpr):
    mask = tl.load(t.mask + place, mask=None if FULL else inside, other=None if FULL else 0)
    has_old = (given & OLD_LOG_PROBS) != 0 if LOSS == REINFORCE else True
    log_prob = load(t.log_probs + place, True, inside, FULL, 0.0)
    old_log_prob = load(t.old_log_probs + place, has_old, inside, FULL, 0.0)
    advantage = mask
    if KIND == TOKEN:
        advantage = load(t.advantages + place, True, inside, FULL, 0.0)
    elif KIND == SEGMENT:
        advantage = tl.load(t.turn_ids + place, mask=None if FULL else inside, other=None if FULL else -1)
    return Tokens(mask, log_prob, old_log_prob, advantage)


@triton.jit
def _of_row(
    t, r, rule,
    first,  # row
    after,  # rows after that, [BLOCK / VECTOR, TILE] int32, or one for all
    held,  # whether the row holds the token
    LOSS: tl.constexpr, KIND: tl.constexpr, EXTENDED: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    scale = rule.scale
    log_ratio = 0.0
    is_weight = 1.0
    advantage = 0.0
    begin = first
    segments = 0
    if BY_ROW:
        some = after == after
        scale = tl.load(r.scales + first + after, mask=when((rule.given & ROW_SCALES) != 0, some), other=scale)
        scale = tl.where(held, scale, float("nan"))
        if LOSS == GSPO:
            log_ratio = tl.load(r.log_ratios + first + after)
        if EXTENDED:
            weighed = when((rule.given & ROW_IS_WEIGHTS) != 0, some)
            is_weight = tl.load(r.is_weights + first + after, mask=weighed, other=1.0)
        if KIND == ROW:
            advantage = tl.load(t.advantages + first + after)
        elif KIND == SEGMENT:
            begin = tl.load(r.segment_offsets + first + after)
            end = tl.load(r.segment_offsets + first + after + 1)
            # None, if any is beyond the table. As unsigned numbers, negative ones are the largest.
            inside = (begin.to(tl.uint64) <= end.to(tl.uint64)) & (end.to(tl.uint64) <= r.table.to(tl.uint64))
            segments = tl.where(inside, tl.minimum(end - begin, 2**31 - 1), 0).to(tl.int32)
    return OfRow(scale, log_ratio, is_weight, advantage, begin, segments)


@triton.jit
def _tokens(
    t,  # Streams
    rule,  # Rule
    tokens,  # Tokens, [BLOCK / VECTOR, TILE]
    of_row,  # OfRow
    place,  # of each token in the streams, [BLOCK / VECTOR, TILE] int64
    inside,  # which there are
    full,  # whether all are
    LOSS: tl.constexpr, KIND: tl.constexpr, EXTENDED: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """Loss and gradient of a tile: (Sums, the gradient, the policy gradients that rows share, which tokens count)."""
    given = rule.given
    m = tokens.mask
    log_prob = tokens.log_prob.to(tl.float32)
    old_log_prob = tokens.old_log_prob.to(tl.float32)
    if LOSS == REINFORCE:
        old_log_prob = tl.where((given & OLD_LOG_PROBS) != 0, old_log_prob, log_prob)

    # A token outside of the mask, of weight 0 or in a row of weight 0 is replaced before any arithmetic, so whatever
    # lies there (NaN, inf, garbage) reaches neither value, gradient nor metric: what replaces it gives +0.
    on = m != 0
    scale = of_row.scale
    if BY_ROW:
        on = when(scale.to(tl.int32, bitcast=True) != EXCLUDED, on)
    if EXTENDED:
        weight = load(t.token_weights + place, (given & TOKEN_WEIGHTS) != 0, inside, full, 1.0)
        on = on & (weight != 0.0)
        weight = tl.where(on, weight, 0.0)
    # What a fraction in the mask or a turn that the table lacks means nobody knows: NaN, also where a bound would have
    # hidden it.
    wrong = m == rule.fractional
    if KIND == TOKEN:
        advantage = tokens.advantage.to(tl.float32)
    elif KIND == ROW:
        advantage = of_row.advantage
    else:
        turn = tokens.advantage
        known = turn.to(tl.uint32, bitcast=True) < of_row.segments.to(tl.uint32, bitcast=True)  # so of none below 0
        wrong = wrong | ((turn != -1) & ~known)
        advantage = tl.load(t.advantages + of_row.begin + turn, mask=on & known, other=0.0)
    log_prob = tl.where(on, log_prob, 0.0)
    old_log_prob = tl.where(on, old_log_prob, 0.0)
    advantage = tl.where(on, advantage, -0.0)
    row_log_ratio = tl.where(on, of_row.log_ratio, 0.0) if LOSS == GSPO else 0.0
    scale = tl.where(on, tl.where(wrong, float("nan"), scale), 0.0)

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
    if EXTENDED:
        # An importance weight of 0 rejects the token, even where its policy term is NaN; KL, entropy and metrics still
        # count it.
        correction = load(t.is_weights + place, (given & IS_WEIGHTS) != 0, inside, full, 1.0)
        correction = tl.where(on, correction * of_row.is_weight, 1.0)
        found = tl.zeros_like(m).to(tl.int32)
        if (given & ROLLOUT) != 0:
            rollout_log_prob = load(t.rollout_log_probs + place, True, inside, full, 0.0)
            w = importance_weight(old_log_prob, tl.where(on, rollout_log_prob, 0.0), rule.correction)
            correction = correction * w.weight
            found = tl.where(w.capped, CAPPED_ONE, 0) + tl.where(w.missing, MISSING_ONE, 0)
        used = correction != 0.0
        is_weight = tl.sum(tl.where(on, correction, 0.0), 1)
        weighed = tl.sum(tl.where(on, found + tl.where(used, 0, 1), 0), 1)
        loss = tl.where(used, loss * correction, 0.0) * weight
        shared = tl.where(used, gradient * correction, 0.0) * weight
        policy = tl.sum(loss * scale, 1)
        gradient = tl.where((given & SHARED) != 0, 0.0, shared)
        if (given & REFERENCE) != 0:
            ref_log_prob = tl.where(on, load(t.ref_log_probs + place, True, inside, full, 0.0), 0.0)
            kl = kl_term(log_prob, old_log_prob, ref_log_prob, rule.loss.log_ratio_bound, rule.kl)
            factor = rule.kl.coef * weight
            kl_value = tl.sum(tl.where(on, kl.value, 0.0), 1)
            loss = loss + kl.value * factor
            gradient = gradient + kl.gradient * factor
        if (given & ENTROPY) != 0:
            value = tl.where(on, load(t.entropy + place, True, inside, full, 0.0), 0.0)
            factor = -rule.entropy_coef * weight
            entropy = tl.sum(value, 1)
            loss = loss + value * factor
            value = tl.where(on, factor * scale, 0.0)
            store(t.entropy_gradient + place, value, (given & ENTROPY_GRADIENT) != 0, inside, full)
    loss = loss * scale
    gradient = gradient * scale
    seen = tl.where(term.clipped, CLIPPED_ONE + 1, 1) + tl.where(term.bounded, BOUNDED_ONE, 0)
    seen = tl.where(on, seen + tl.where(ratio.saturated, SATURATED_ONE, 0), 0)
    sums = Sums(
        tl.sum(loss, 1), tl.sum(-ratio.log_ratio, 1), tl.sum(seen, 1), policy, kl_value, entropy, is_weight, weighed
    )
    store(t.token_losses + place, loss, (given & TOKEN_LOSSES) != 0, inside, full)
    return sums, gradient.to(t.gradient.dtype.element_ty), shared * scale, on


@triton.jit
def _added(a, b):
    return Sums(
        a.loss + b.loss,
        a.negative_log_ratio + b.negative_log_ratio,
        a.counts + b.counts,
        a.policy + b.policy,
        a.kl + b.kl,
        a.entropy + b.entropy,
        a.is_weight + b.is_weight,
        a.weighed + b.weighed,
    )


@triton.jit
def halves(x):
    """[R, 2 * TILE] in two: a thread's first tokens, and its second."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, TILE]), [0, 2, 1]))


@triton.jit
def places(start, VECTOR: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the first COLUMNS tokens of each thread are, [BLOCK / VECTOR, COLUMNS] int64."""
    return start + (tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def add_full(
    sums, t, r, rule, row, block, rows, count, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    LOSS: tl.constexpr, KIND: tl.constexpr, EXTENDED: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """`sums` with those of a full block that lies in one row, if there are rows."""
    wanted = (rule.given & GRADIENT) != 0
    start = block * BLOCK
    place = places(start, VECTOR, BLOCK, TILE)
    every = place >= 0
    of_row = _of_row(t, r, rule, row, 0, True, LOSS, KIND, EXTENDED, BY_ROW)
    if VECTOR == TILE:
        tokens = _read(t, rule.given, place, every, LOSS, KIND, True)
        new, gradient, shared, on = _tokens(
            t, rule, tokens, of_row, place, every, True, LOSS, KIND, EXTENDED, BY_ROW
        )  # fmt: skip
        store(t.gradient + place, gradient, wanted, every, True)
        _share(r, rule, shared, on, 0, row, row, block, rows, count, BLOCK, LOSS, EXTENDED)
        sums = _added(sums, new)
    else:
        wide = places(start, VECTOR, BLOCK, VECTOR)
        tokens = _read(t, rule.given, wide, wide >= 0, LOSS, KIND, True)
        mask, later_mask = halves(tokens.mask)
        log_prob, later_log_prob = halves(tokens.log_prob)
        old_log_prob, later_old_log_prob = halves(tokens.old_log_prob)
        advantage, later_advantage = halves(tokens.advantage)
        new, gradient, _, _ = _tokens(
            t, rule, Tokens(mask, log_prob, old_log_prob, advantage), of_row, place, every, True,
            LOSS, KIND, EXTENDED, BY_ROW,
        )  # fmt: skip
        sums = _added(sums, new)
        later_gradient = gradient
        if gradient.dtype == tl.float32:
            store(t.gradient + place, gradient, wanted, every, True)
        if rule.given >= 0:  # always: without a branch the compiler mixes both halves, and registers are short
            later = place + TILE
            new, later_gradient, _, _ = _tokens(
                t, rule, Tokens(later_mask, later_log_prob, later_old_log_prob, later_advantage), of_row, later, every,
                True, LOSS, KIND, EXTENDED, BY_ROW,
            )  # fmt: skip
            sums = _added(sums, new)
            if gradient.dtype == tl.float32:
                store(t.gradient + later, later_gradient, wanted, every, True)
        if gradient.dtype != tl.float32:
            both = tl.permute(tl.join(gradient, later_gradient), [0, 2, 1])  # [R, 2, TILE]
            store(t.gradient + wide, tl.reshape(both, [BLOCK // VECTOR, VECTOR]), wanted, wide >= 0, True)
    return sums


@triton.jit
def add_parts(
    sums, t, r, rule, row, end, cu_seqlens, block, rows, width, count, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    LOSS: tl.constexpr, KIND: tl.constexpr, EXTENDED: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """`sums` with those of any block, which begins in `row`. Of 16-bit inputs it moves 8 bytes at a time, in one loop:
    what a block of several rows, or the last, needs beside its tokens leaves few registers."""
    start = block * BLOCK
    last = row
    if BY_ROW:
        last, _ = row_and_end(cu_seqlens, rows, width, tl.minimum(start + BLOCK, count) - 1)
    left = tl.minimum(count - start, BLOCK).to(tl.int32)
    for part in range(VECTOR // TILE):
        place = places(start + part * TILE, VECTOR, BLOCK, TILE)
        inside = places(part * TILE, VECTOR, BLOCK, TILE) < left
        if BY_ROW:
            full = left == BLOCK
            after, held = rows_after(cu_seqlens, width, row, last, end, place, count)
            if full:
                tokens = _read(t, rule.given, place, inside, LOSS, KIND, True)
            else:
                tokens = _read(t, rule.given, place, inside, LOSS, KIND, False)
        else:
            full: tl.constexpr = False
            after = 0
            held = True
            tokens = _read(t, rule.given, place, inside, LOSS, KIND, False)
        of_row = _of_row(t, r, rule, row, after, held, LOSS, KIND, EXTENDED, BY_ROW)
        new, gradient, shared, on = _tokens(
            t, rule, tokens, of_row, place, inside, full, LOSS, KIND, EXTENDED, BY_ROW
        )  # fmt: skip
        store(t.gradient + place, gradient, (rule.given & GRADIENT) != 0, inside, full)
        _share(r, rule, shared, on, after, row, last, block, rows, count, BLOCK, LOSS, EXTENDED)
        sums = _added(sums, new)
    return sums


@triton.jit
def _share(
    r, rule, shared, on, after, first, last, block, rows, count, BLOCK: tl.constexpr, LOSS: tl.constexpr,
    EXTENDED: tl.constexpr,
):  # fmt: skip
    """What each of a block's rows has of a gradient that the row's tokens share goes to `pieces`."""
    if EXTENDED and LOSS == GSPO and (rule.given & SHARED) != 0:
        cells = rows + tl.cdiv(count, BLOCK)
        for each in range(first, last + 1):
            mine = on & (after == (each - first).to(tl.int32))
            # From one piece to the next, the row or the block is the next: no two pieces have one sum of both.
            cell = r.pieces + each + block
            tl.store(cell, tl.sum(tl.where(mine, shared, 0.0)))
            tl.store(cell + cells, tl.sum(mine.to(tl.int32)).to(tl.float32))


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
def rows_after(cu_seqlens, width, first, last, end, place, count):
    """How many rows after `first`, which ends at `end`, each token's is, [BLOCK / VECTOR, TILE] int32, up to `last`;
    past the last token, any of these. And whether that row holds the token and lies among the `count` tokens: it does
    unless the offsets are false."""
    low = tl.zeros_like(place).to(tl.int32)
    held = place >= 0
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
        begins = tl.load(cu_seqlens + first + low)
        ends = tl.load(cu_seqlens + first + low + 1)
        held = (begins >= 0) & (begins <= place) & (place < ends) & (ends <= count)
    return tl.minimum(low, (last - first).to(tl.int32)), held
