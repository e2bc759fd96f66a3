"""The optimal token baseline. At position t of a group's rollouts i that have a token there:

    B_t = sum_i G_it W_it / (sum_i W_it + eps)      W_it = sum_{u <= t} (1 - 2 p_iu + sum_v p_iuv^2) rho_iu^2

W is the energy of the scores so far: the squared length of the gradient of log p_u at the logits, summed up to t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv.groups import GroupIndex
from fastadv.reference.token_returns import ends, suffix
from fastadv.rows import Rows


def running_sum(values: Tensor, last: Tensor) -> Tensor:
    """Sum of each row's values up to and with each token; `last` marks the rows' last tokens."""
    first = torch.ones_like(last)
    first[..., 1:] = last[..., :-1]
    follows = torch.where(first, 0.0, 1.0).to(values.dtype)
    return suffix(follows.flip(-1), values.flip(-1)).flip(-1)


def optimal_token_baseline(
    returns: Tensor,
    on: Tensor,
    rows: Rows,
    groups: GroupIndex,
    log_probs: Tensor,
    sum_p2: Tensor,
    is_weights: Tensor | None,
    compact: bool,
    zero_tail: bool,
    eps: float,
) -> Tensor:
    """Returns minus their baseline, float64, 0 outside of the mask `on`.

    `compact` counts positions in tokens of the mask, and takes a rollout without one out of its group. `zero_tail`:
    the one rollout of a group that has the most tokens has no baseline beyond the second longest.
    """
    last = ends(rows, on.device)
    given = [torch.where(on, t.to(torch.float64), 0.0) for t in (returns, log_probs, sum_p2)]
    g, energy = given[0], 1 - 2 * given[1].exp() + given[2]
    if is_weights is not None:
        energy = energy * torch.where(on, is_weights.to(torch.float64), 0.0).square()
    weight = running_sum(torch.where(on, energy, 0.0), last)
    counted = on if compact else torch.ones_like(on)
    position = (running_sum(counted.to(torch.float64), last) - 1).clamp(min=0).to(torch.int64)

    # Each group has as many slots as its rollouts have tokens; it fills those of its longest one.
    lengths = rows.sum(torch.ones_like(on, dtype=torch.int64))  # [B]
    before = torch.cat([lengths.new_zeros(1), lengths[groups.order].cumsum(0)])  # [B + 1]
    slot = (rows.spread(before[groups.offsets[:-1]][groups.index]) + position).flatten()
    slots = torch.zeros(rows.tokens, dtype=torch.float64, device=on.device)
    top, bottom = (slots.index_add(0, slot, torch.where(on, x, 0.0).flatten()) for x in (g * weight, weight))
    baseline = (top / (bottom + eps))[slot].view(on.shape)

    tokens = rows.sum(on.to(torch.int64))  # [B]
    present = tokens > 0 if compact else torch.ones_like(tokens, dtype=torch.bool)
    members = _in_group(present.to(torch.int64), groups, "sum")  # [B]
    most = _in_group(torch.where(present, tokens, -1), groups, "amax")
    longest = present & (tokens == most)
    second = _in_group(torch.where(present & ~longest, tokens, -1), groups, "amax")
    alone = longest & (_in_group(longest.to(torch.int64), groups, "sum") == 1) & zero_tail
    none = rows.spread(members < 2) | (rows.spread(alone) & (position >= rows.spread(second)))
    return torch.where(on, g - torch.where(none, 0.0, baseline), 0.0)


def _in_group(values: Tensor, groups: GroupIndex, reduce: str) -> Tensor:
    """Sum or maximum over each row's group, at the row, `[B]`."""
    of_group = values.new_full((groups.num_groups,), 0 if reduce == "sum" else -1)
    return of_group.scatter_reduce(0, groups.index, values, reduce)[groups.index]
