"""Returns and advantages token by token: rewards to go, with or without a critic."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastadv import dispatch, native, validation
from fastadv.kernels import Kernel
from fastadv.ops._register import native_op
from fastadv.ops.whiten import KERNELS
from fastadv.reference import token_returns as reference
from fastadv.reference import whiten as whiten_reference
from fastadv.rows import Rows
from fastadv.statistics import float64_rows


class TokenReturns(NamedTuple):
    """What `token_returns` gives.

    Attributes:
        advantages: like the mask, 0 outside of it. The returns themselves where there are no values or baselines.
        returns: like the mask, 0 outside of it.
        spread: `[3]` float64, how many advantages there are, their mean and the sum of squared distances from it: for
            `whiten`.
    """

    advantages: Tensor
    returns: Tensor
    spread: Tensor


def _cpu(
    mask: Tensor,
    cu_seqlens: Tensor | None,
    token_rewards: Tensor | None,
    values: Tensor | None,
    row_rewards: Tensor | None,
    row_baselines: Tensor | None,
    gamma: float,
    lam: float,
    discount_gaps: bool,
    out: list[Tensor],
) -> int:
    rows = Rows.trusted(mask, cu_seqlens)
    *tokens, spread = (t.data_ptr() for t in out)
    returns, advantages = tokens if len(tokens) == 2 else (tokens[0], 0)
    faults: int = native.module().token_returns(
        native.rows(rows),
        (
            native.view(mask),
            native.view(token_rewards),
            native.view(values),
            native.address(row_rewards),
            native.address(row_baselines),
        ),
        (gamma, lam, discount_gaps),
        (returns, advantages, spread),
        native.threads(rows.tokens),
    )
    return faults


# Writes returns, advantages where there are values or baselines, and a spread.
TOKEN_RETURNS = Kernel("token_returns", cpu=_cpu)


def _fake(
    backend: str,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    token_rewards: Tensor | None,
    values: Tensor | None,
    row_rewards: Tensor | None,
    row_baselines: Tensor | None,
    gamma: float,
    lam: float,
    discount_gaps: bool,
) -> list[Tensor]:
    tokens = 1 if values is None and row_baselines is None else 2
    like = [torch.empty(mask.shape, dtype=torch.float32, device=mask.device) for _ in range(tokens)]
    return [*like, mask.new_empty(3, dtype=torch.float64)]


@native_op("token_returns", _fake)
def _launch(
    backend: str,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    token_rewards: Tensor | None,
    values: Tensor | None,
    row_rewards: Tensor | None,
    row_baselines: Tensor | None,
    gamma: float,
    lam: float,
    discount_gaps: bool,
) -> list[Tensor]:
    tokens = 1 if values is None and row_baselines is None else 2
    out = [native.empty(mask.shape, torch.float32, mask.device) for _ in range(tokens)]
    out.append(torch.empty(3, dtype=torch.float64, device=mask.device))
    given = (mask, cu_seqlens, token_rewards, values, row_rewards, row_baselines, gamma, lam, discount_gaps)
    validation.native_faults("token_returns", TOKEN_RETURNS(backend, *given, out))
    return out


def token_returns(
    mask: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    rewards: Tensor | None = None,
    token_rewards: Tensor | None = None,
    values: Tensor | None = None,
    baselines: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    discount_gaps: bool = False,
    backend: str = "auto",
) -> TokenReturns:
    """Rewards to go of each token of the mask, and what is left of them over a critic's values or a baseline. No
    gradient flows.

    Only tokens of the mask are steps: what stands between two of them (a tool's answer) is passed without discount,
    and neither its rewards nor its values count.

    Args:
        mask: `[N]` or `[B, T]`; non-zero tokens count.
        cu_seqlens: `[B + 1]` for packed tokens; without it, 1-D tokens are one rollout.
        rewards: `[B]`, added to the reward of each rollout's last token of the mask. A rollout without one has none.
        token_rewards: like the mask; float32, bfloat16 or float16 (native), float64 (reference); any strides. Of
            rewards and token_rewards one is needed, and both may be there: a penalty a token, say -coef * KL.
        values: like the mask, of the critic: then advantages are GAE, and returns advantages + values.
        baselines: `[B]`, subtracted from all returns of a rollout; not with values.
        gamma: discount, from each token of the mask to the next.
        lam: of GAE; it needs values where it is not 1.
        discount_gaps: the discount also counts the tokens between two of the mask, as in Miles and OpenRLHF; not with
            values.
        backend: "auto", "cpu" or "reference"; there are no kernels for GPUs, whose tensors run on the reference.

    Returns:
        TokenReturns(advantages, returns, spread): float32, float64 where a floating input is float64.

    Raises:
        ValueError, TypeError: shapes, dtypes or `cu_seqlens` that do not fit, a fractional mask value, arguments that
        nothing would read.
    """
    op = "token_returns"
    rows = Rows.of(op, "mask", mask, cu_seqlens)
    shape, device = tuple(mask.shape), mask.device
    validation.tensor(op, "mask", mask, dtypes=validation.MASKS)
    for name, tokens in (("token_rewards", token_rewards), ("values", values)):
        if tokens is not None:
            validation.tensor(op, name, tokens, shape=shape, dtypes=validation.FLOATS, device=device)
    for name, number in (("gamma", gamma), ("lam", lam)):
        validation.non_negative(op, name, number)
    if rewards is None and token_rewards is None:
        raise ValueError(f"{op}: rewards and token_rewards are both None; pass one of them, or both")
    if values is None and lam != 1:
        raise ValueError(f"{op}: lam is {lam}, but values is None; it is an average over steps of a critic")
    if values is not None and (baselines is not None or discount_gaps):
        what = "baselines is given" if baselines is not None else "discount_gaps is True"
        raise ValueError(f"{op}: {what}, but with values advantages are GAE over the tokens of the mask; leave it out")
    own, baseline = (
        None if t is None else float64_rows(op, name, t, rows.count, device)
        for name, t in (("rewards", rewards), ("baselines", baselines))
    )
    backend = dispatch.resolve(op, backend, token_rewards, values, rewards, baselines, device=device, kernels=KERNELS)
    wide = any(t is not None and t.dtype == torch.float64 for t in (token_rewards, values, rewards, baselines))
    token_rewards, values = (None if t is None else t.detach() for t in (token_rewards, values))
    if backend == "cpu":
        numbers = (float(gamma), float(lam), discount_gaps)
        out = _launch(backend, native.as_mask(mask), rows.cu_seqlens, token_rewards, values, own, baseline, *numbers)
        return TokenReturns(out[-2], out[0], out[-1])
    validation.mask_values(op, "mask", mask)
    exact = reference.token_returns(mask != 0, rows, own, token_rewards, values, baseline, gamma, lam, discount_gaps)
    advantages, returns = (t.to(torch.float64 if wide else torch.float32) for t in exact)
    return TokenReturns(advantages, returns, whiten_reference.spread(advantages, mask))
