"""Rewards to go and GAE, token by token. Backwards through a rollout, with m the mask:

    G_t = m_t ? r_t + gamma G_{t+1} : G_{t+1}
    A_t = m_t ? r_t + gamma V' - V_t + gamma lam A_{t+1} : A_{t+1}      V' = value of the next token of the mask, or 0

Both are x_t = added_t + kept_t x_{t+1}, which `suffix` solves for all tokens at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv.rows import Rows


def suffix(kept: Tensor, added: Tensor) -> Tensor:
    """x with x_t = added_t + kept_t x_{t+1} along the last dimension. `kept` is 0 where nothing may follow.

    Steps of twice the length each: after k of them x holds what the next 2^k tokens add.
    """
    x, step = added, 1
    while step < x.shape[-1]:
        beyond = x.new_zeros((*x.shape[:-1], step))
        # What is not kept may be anything.
        x = x + torch.where(kept == 0, 0.0, kept * torch.cat([x[..., step:], beyond], -1))
        kept = kept * torch.cat([kept[..., step:], beyond], -1)
        step *= 2
    return x


def ends(rows: Rows, device: torch.device) -> Tensor:
    """The last token of each row, bool like the tokens."""
    last = torch.ones(rows.shape, dtype=torch.bool, device=device)
    if rows.shape[-1]:
        last[..., :-1] = False if rows.cu_seqlens is None else rows.row_of_token().diff() != 0
    return last


def token_returns(
    on: Tensor,
    rows: Rows,
    row_rewards: Tensor | None,
    token_rewards: Tensor | None,
    values: Tensor | None,
    row_baselines: Tensor | None,
    gamma: float,
    lam: float,
    discount_gaps: bool,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), float64, 0 outside of the mask `on`; rewards of rows `[B]` float64."""
    last = ends(rows, on.device)  # like on, as all that follows
    follows = torch.where(last, 0.0, 1.0).to(torch.float64)
    zero = torch.zeros_like(follows)
    reward = zero if token_rewards is None else torch.where(on, token_rewards.to(torch.float64), 0.0)
    if row_rewards is not None:
        to_go = suffix(follows, on.to(torch.float64))  # tokens of the mask from here on
        reward = reward + torch.where(on & (to_go == 1), rows.spread(row_rewards), 0.0)
    decay = gamma if values is None else gamma * lam
    kept = torch.where(on, follows * decay, follows * (decay if discount_gaps else 1.0))
    if values is not None:
        value = torch.where(on, values.to(torch.float64), 0.0)
        here_or_next = suffix(torch.where(on, 0.0, follows), value)
        following = torch.cat([here_or_next[..., 1:], here_or_next[..., :1]], -1)
        advantages = suffix(kept, torch.where(on, reward + gamma * torch.where(last, 0.0, following) - value, 0.0))
        return torch.where(on, advantages, 0.0), torch.where(on, advantages + value, 0.0)
    returns = torch.where(on, suffix(kept, reward), 0.0)
    if row_baselines is None:
        return returns, returns
    return torch.where(on, returns - rows.spread(row_baselines), 0.0), returns
