"""The optimal token baseline: a group's mean return at each position, weighted by how much the rollouts' scores have
moved so far."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv import dispatch, native, validation
from fastadv.groups import GroupIndex, Labels, group_index
from fastadv.kernels import Kernel
from fastadv.ops._register import native_op
from fastadv.ops.whiten import KERNELS
from fastadv.reference import optimal_token_baseline as reference
from fastadv.rows import Rows

POSITIONS = ("all", "sampled")


def _cpu(
    mask: Tensor,
    cu_seqlens: Tensor | None,
    groups: list[Tensor],
    tokens: list[Tensor],
    is_weights: Tensor | None,
    compact: bool,
    zero_tail: bool,
    eps: float,
    advantages: Tensor,
) -> int:
    rows = Rows.trusted(mask, cu_seqlens)
    order, offsets = groups
    faults: int = native.module().optimal_token_baseline(
        native.rows(rows),
        (offsets.shape[0] - 1, order.shape[0], native.address(order), native.address(offsets)),
        (native.view(mask), *(native.view(t) for t in tokens), native.view(is_weights)),
        (compact, zero_tail, eps),
        advantages.data_ptr(),
        native.threads(rows.tokens),
    )
    return faults


# Writes advantages, float32, like the mask; `tokens` are returns, log-probs and sums of squares.
OPTIMAL_TOKEN_BASELINE = Kernel("optimal_token_baseline", cpu=_cpu)


def _fake(
    backend: str,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    groups: list[Tensor],
    tokens: list[Tensor],
    is_weights: Tensor | None,
    compact: bool,
    zero_tail: bool,
    eps: float,
) -> Tensor:
    return torch.empty(mask.shape, dtype=torch.float32, device=mask.device)


@native_op("optimal_token_baseline", _fake)
def _launch(
    backend: str,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    groups: list[Tensor],
    tokens: list[Tensor],
    is_weights: Tensor | None,
    compact: bool,
    zero_tail: bool,
    eps: float,
) -> Tensor:
    advantages = native.empty(mask.shape, torch.float32, mask.device)
    given = (mask, cu_seqlens, groups, tokens, is_weights, compact, zero_tail, eps)
    validation.native_faults("optimal_token_baseline", OPTIMAL_TOKEN_BASELINE(backend, *given, advantages))
    return advantages


def optimal_token_baseline(
    returns: Tensor,
    mask: Tensor,
    group_ids: Labels | GroupIndex,
    log_probs: Tensor,
    sum_p2: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    is_weights: Tensor | None = None,
    positions: str = "all",
    zero_tail: bool = True,
    eps: float = 1e-8,
    backend: str = "auto",
) -> Tensor:
    """Returns minus a baseline for each position of each group. No gradient flows.

    The baseline at a position is the mean return of the group's rollouts that have a token of the mask there, weighted
    by W, the sum of 1 - 2 p + sum p^2 over their tokens so far. A group of one has none. It contains the rollout's own
    return, and W the probability of its own token, so it is not quite free of bias.

    Args:
        returns: `[N]` or `[B, T]`, rewards to go (`token_returns`).
        mask: like returns; non-zero tokens count.
        group_ids: `[B]` labels or a GroupIndex.
        log_probs: like returns, of the sampled tokens.
        sum_p2: like returns, sum of the squared probabilities over the vocabulary (`token_log_probs` gives it).
        cu_seqlens: `[B + 1]` for packed tokens; without it, 1-D tokens are one rollout.
        is_weights: like returns; the terms of W are multiplied by their squares.
        positions: "all" counts positions through a rollout's tokens, "sampled" through those of the mask only (verl's
            form for tool-integrated reasoning; rollouts without one are then not in their group).
        zero_tail: the one rollout of a group with the most tokens has no baseline at the positions beyond the number of
            tokens of the second: nobody else is there.
        eps: added to the sum of the weights.
        backend: "auto", "cpu" or "reference"; there are no kernels for GPUs, whose tensors run on the reference.
            Per-token inputs may be float32, bfloat16 or float16 (native), float64 (reference), with any strides.

    Returns:
        Like returns, float32 (float64 where an input is float64), 0 outside of the mask.

    Raises:
        ValueError, TypeError: shapes, dtypes or `cu_seqlens` that do not fit, a fractional mask value.

    Source: verl, compute_optimal_token_baseline_advantage and compute_multi_turn_optimal_token_baseline_advantage.
    """
    op = "optimal_token_baseline"
    validation.tensor(op, "returns", returns, dtypes=validation.FLOATS)
    rows = Rows.of(op, "returns", returns, cu_seqlens)
    shape, device = tuple(returns.shape), returns.device
    validation.tensor(op, "mask", mask, shape=shape, dtypes=validation.MASKS, device=device)
    for name, t in (("log_probs", log_probs), ("sum_p2", sum_p2)):
        validation.tensor(op, name, t, shape=shape, dtypes=validation.FLOATS, device=device)
    if is_weights is not None:
        validation.tensor(op, "is_weights", is_weights, shape=shape, dtypes=validation.FLOATS, device=device)
    validation.choice(op, "positions", positions, POSITIONS)
    validation.non_negative(op, "eps", eps)
    groups = group_index(group_ids, op=op)
    if groups.num_rows != rows.count:
        raise ValueError(f"{op}: group_ids has {groups.num_rows} rollouts, returns has {rows.count}")
    if groups.index.device != device:
        groups = groups.to(device)
    backend = dispatch.resolve(op, backend, returns, log_probs, sum_p2, is_weights, kernels=KERNELS)
    tokens = [t.detach() for t in (returns, log_probs, sum_p2)]
    weights = None if is_weights is None else is_weights.detach()
    compact = positions == "sampled"
    if backend == "cpu":
        index = [groups.order, groups.offsets]
        numbers = (compact, zero_tail, float(eps))
        launched: Tensor = _launch(backend, native.as_mask(mask), rows.cu_seqlens, index, tokens, weights, *numbers)
        return launched
    validation.mask_values(op, "mask", mask)
    exact = reference.optimal_token_baseline(
        tokens[0], mask != 0, rows, groups, tokens[1], tokens[2], weights, compact, zero_tail, eps
    )
    wide = any(t is not None and t.dtype == torch.float64 for t in (*tokens, weights))
    return exact.to(torch.float64 if wide else torch.float32)
