"""Estimators with one advantage a token: rewards to go, GAE and the optimal token baseline, whitened or not.

Token rewards and what comes of them are `fastadv.token_returns`, whitening is `fastadv.whiten`; an owner is a choice of
their options. What stands outside of the mask is not read, though Miles adds its KL there (#559).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastadv import validation
from fastadv.estimators.groups import OPENRLHF, VERL, VERL_DATE
from fastadv.estimators.registry import OP, Estimate, Inputs, estimator, needed
from fastadv.ops.group_advantages import group_advantages
from fastadv.ops.optimal_token_baseline import optimal_token_baseline
from fastadv.ops.token_counts import token_counts
from fastadv.ops.token_returns import TokenReturns, token_returns
from fastadv.ops.whiten import over_ranks, whiten
from fastadv.reference.whiten import mean_and_scale, merged
from fastadv.rows import Rows

MILES = "miles/backends/training_utils/loss_hub/math_utils.py:"
WHITENED: dict[str, Any] = {"ddof": 1, "eps": 1e-8, "eps_form": "add_to_variance"}  # of verl and Miles
WHITENED_OPENRLHF: dict[str, Any] = {"ddof": 0, "eps": 1e-8, "eps_form": "floor_of_variance"}


def _returns(given: Inputs, **options: Any) -> TokenReturns:
    return token_returns(
        needed(given.mask), given.cu_seqlens, token_rewards=given.token_rewards, backend=given.backend, **options
    )


def _whitened(given: Inputs, out: TokenReturns, convention: dict[str, Any]) -> Tensor:
    return whiten(
        out.advantages, needed(given.mask), cu_seqlens=given.cu_seqlens, process_group=given.process_group,
        spread=out.spread, backend=given.backend, **convention,
    )  # fmt: skip


# ---- REINFORCE++ -----------------------------------------------------------------------------------------------------


@estimator(
    "reinforce_plus_plus/verl",
    level="token",
    equation="G_t = r_t + gamma G_n, n the next token of the mask; A = (G - mean) / sqrt(var + eps) over all tokens",
    code_path=f"{VERL}compute_reinforce_plus_plus_outcome_advantage{VERL_DATE}",
    **WHITENED,
    singleton="none",
    masking="tokens of the mask only; rewards elsewhere do not count",
    needs=("rewards|token_rewards", "mask"),
    reads=("process_group",),
    options={"gamma": 1.0},
)
def reinforce_plus_plus(given: Inputs) -> Estimate:
    """Versions of verl up to 0.8.0 start over at each token outside of the mask (#7278), which is not rebuilt here."""
    out = _returns(given, rewards=given.rewards, gamma=given.options["gamma"])
    return Estimate(_whitened(given, out, WHITENED), out.returns)


@estimator(
    "reinforce_plus_plus/miles",
    level="token",
    equation="G_t = k_t + gamma G_(t+1), the discount through all tokens; R on the last token of the mask; whitened",
    code_path=f"{MILES}get_reinforce_plus_plus_returns, miles/utils/distributed_utils.py:distributed_masked_whiten "
    "(2026-08-21)",
    **WHITENED,
    singleton="none",
    masking="tokens of the mask only; pass -kl_coef * KL as token_rewards",
    needs=("rewards", "mask"),
    reads=("token_rewards", "process_group"),
    options={"gamma": 1.0},
)
def reinforce_plus_plus_miles(given: Inputs) -> Estimate:
    """Miles also adds the KL of tokens outside of the mask (#559), and refuses a rollout that is masked whole."""
    out = _returns(given, rewards=given.rewards, gamma=given.options["gamma"], discount_gaps=True)
    return Estimate(_whitened(given, out, WHITENED), out.returns)


@estimator(
    "reinforce_plus_plus/openrlhf",
    level="token",
    equation="as Miles', whitened by the variance over n, at least eps",
    code_path=OPENRLHF,
    **WHITENED_OPENRLHF,
    singleton="none",
    masking="tokens of the mask only; pass -kl_coef * KL as token_rewards",
    needs=("rewards", "mask"),
    reads=("token_rewards", "process_group"),
    options={"gamma": 1.0},
)
def reinforce_plus_plus_openrlhf(given: Inputs) -> Estimate:
    """Its advantage_estimator "reinforce"."""
    out = _returns(given, rewards=given.rewards, gamma=given.options["gamma"], discount_gaps=True)
    return Estimate(_whitened(given, out, WHITENED_OPENRLHF), out.returns)


def _centred(given: Inputs, singleton: str) -> Tensor:
    """Rewards minus their group's mean, `[B]`.

    Raises:
        ValueError: a difference that its dtype does not hold: whitening would make NaN of it, and of all others.
    """
    rewards = needed(given.rewards)
    centred = group_advantages(rewards, needed(given.groups), singleton=singleton, backend=given.backend)
    if validation.reads_values(centred) and not bool(centred.sum().isfinite()) and bool(centred.isinf().any()):
        row = int(centred.isinf().nonzero()[0])
        raise ValueError(
            f"{OP}: rewards[{row}] is {float(rewards[row]):g}, too far from its group's mean for {centred.dtype}; "
            "scale the rewards, whitening undoes it"
        )
    return centred


def _whitened_rows(given: Inputs, rewards: Tensor, convention: dict[str, Any]) -> Tensor:
    """`rewards` `[B]`, each at all tokens of its rollout, whitened over the tokens: from the tokens' number alone."""
    mask = needed(given.mask)
    counts = token_counts(mask, given.cu_seqlens, backend=given.backend).to(torch.float64)
    exact = rewards.to(torch.float64)
    spread = merged(torch.stack([counts, exact, torch.zeros_like(exact)], -1))
    mean, scale = mean_and_scale(over_ranks(spread, given.process_group), **convention).unbind()
    whitened = ((exact - mean) * scale).to(rewards.dtype)
    return token_returns(mask, given.cu_seqlens, rewards=whitened, backend=given.backend).returns


@estimator(
    "reinforce_plus_plus_baseline/verl",
    level="token",
    equation="A = R - mean_G at each token of the mask, whitened over all tokens",
    code_path=f"{VERL}compute_reinforce_plus_plus_baseline_outcome_advantage{VERL_DATE}",
    **WHITENED,
    singleton="raw",
    masking="rollouts without a token vote in their group",
    needs=("rewards", "group_ids", "mask"),
    reads=("process_group",),
)
def reinforce_plus_plus_baseline(given: Inputs) -> Estimate:
    """What verl calls returns are the advantages."""
    advantages = _whitened_rows(given, _centred(given, "raw"), WHITENED)
    return Estimate(advantages, advantages)


@estimator(
    "reinforce_plus_plus_baseline/miles",
    level="token",
    equation="A_t = R - mean_G + k_t, whitened over all tokens",
    code_path=f"{MILES}get_reinforce_plus_plus_baseline_advantages (2026-08-21)",
    **WHITENED,
    masking="rollouts without a token vote in their group; pass -kl_coef * KL as token_rewards, which is not summed up",
    needs=("rewards", "group_ids", "mask"),
    reads=("token_rewards", "process_group"),
)
def reinforce_plus_plus_baseline_miles(given: Inputs) -> Estimate:
    """Its returns are the advantages before they are whitened."""
    rewards, mask = _centred(given, "zero"), needed(given.mask)
    if given.token_rewards is None:
        returns = token_returns(mask, given.cu_seqlens, rewards=rewards, backend=given.backend).returns
        return Estimate(_whitened_rows(given, rewards, WHITENED), returns)
    rows = Rows.of(OP, "mask", mask, given.cu_seqlens)
    returns = torch.where(mask != 0, given.token_rewards.detach() + rows.spread(rewards), 0.0)
    return Estimate(
        whiten(
            returns, mask, cu_seqlens=given.cu_seqlens, process_group=given.process_group, backend=given.backend,
            **WHITENED,
        ),
        returns,
    )  # fmt: skip


@estimator(
    "reinforce_plus_plus_baseline/openrlhf",
    level="token",
    equation="A_t = R - mean_G + sum_(u >= t) k_u, whitened by the variance over n, at least eps",
    code_path=OPENRLHF,
    **WHITENED_OPENRLHF,
    masking="rollouts without a token vote in their group; pass -kl_coef * KL as token_rewards",
    needs=("rewards", "group_ids", "mask"),
    reads=("token_rewards", "process_group"),
)
def reinforce_plus_plus_baseline_openrlhf(given: Inputs) -> Estimate:
    """Its advantage_estimator "reinforce_baseline", which sets gamma to 1."""
    out = _returns(given, rewards=_centred(given, "zero"))
    return Estimate(_whitened(given, out, WHITENED_OPENRLHF), out.returns)


# ---- ReMax, GAE ------------------------------------------------------------------------------------------------------


@estimator(
    "remax/verl",
    level="token",
    equation="A_t = sum_(u >= t) r_u - R(greedy)",
    code_path=f"{VERL}compute_remax_outcome_advantage{VERL_DATE}",
    singleton="none",
    masking="tokens of the mask only; rewards elsewhere do not count",
    needs=("rewards|token_rewards", "greedy_rewards", "mask"),
)
def remax(given: Inputs) -> Estimate:
    """The baseline is the reward of a greedy rollout of the same prompt."""
    out = _returns(given, rewards=given.rewards, baselines=given.greedy_rewards)
    return Estimate(out.advantages, out.returns)


@estimator(
    "gae/verl",
    level="token",
    equation="A_t = r_t + gamma V_n - V_t + gamma lam A_n, n the next token of the mask; whitened. Returns A + V",
    code_path=f"{VERL}compute_gae_advantage_return{VERL_DATE}",
    **WHITENED,
    singleton="none",
    masking="tokens of the mask only; verl leaves what its loss masks at other values than 0",
    needs=("rewards|token_rewards", "values", "mask"),
    reads=("process_group",),
    options={"gamma": 1.0, "lam": 1.0},
)
def gae(given: Inputs) -> Estimate:
    """Returns are those before whitening."""
    out = _returns(given, rewards=given.rewards, values=given.values, **given.options)
    return Estimate(_whitened(given, out, WHITENED), out.returns)


@estimator(
    "gae/miles",
    level="token",
    equation="as verl's, with R on the last token of the mask (#1827); whitened if asked",
    code_path=f"{MILES}get_advantages_and_returns_batch (2026-08-21)",
    **WHITENED,
    singleton="none",
    masking="tokens of the mask only; pass -kl_coef * KL as token_rewards",
    needs=("rewards", "values", "mask"),
    reads=("token_rewards", "process_group"),
    options={"gamma": 1.0, "lam": 1.0, "whiten": False},
)
def gae_miles(given: Inputs) -> Estimate:
    """`whiten` is its --normalize-advantages."""
    options = dict(given.options)
    whitens = options.pop("whiten")
    out = _returns(given, rewards=given.rewards, values=given.values, **options)
    return Estimate(_whitened(given, out, WHITENED) if whitens else out.advantages, out.returns)


# ---- the optimal token baseline --------------------------------------------------------------------------------------


def _token_baseline(given: Inputs, positions: str) -> Estimate:
    out = _returns(given, rewards=given.rewards)
    advantages = optimal_token_baseline(
        out.returns, needed(given.mask), needed(given.groups), needed(given.log_probs), needed(given.sum_p2),
        given.cu_seqlens, is_weights=given.is_weights, positions=positions, zero_tail=given.options["zero_tail"],
        backend=given.backend,
    )  # fmt: skip
    return Estimate(advantages, out.returns)


@estimator(
    "otb/verl",
    level="token",
    equation="A = G - sum_i G_it W_it / (sum_i W_it + 1e-8), W_it = sum_(u <= t) (1 - 2 p_iu + sum p_iu^2) rho_iu^2",
    code_path=f"{VERL}compute_optimal_token_baseline_advantage{VERL_DATE}",
    singleton="raw",
    masking="at a position, the rollouts of the group whose token there is of the mask",
    needs=("rewards|token_rewards", "group_ids", "mask", "log_probs", "sum_p2"),
    reads=("is_weights",),
    options={"zero_tail": True},
)
def otb(given: Inputs) -> Estimate:
    """`zero_tail`: see `fastadv.optimal_token_baseline`."""
    return _token_baseline(given, "all")


@estimator(
    "otb-tir/verl",
    level="token",
    equation="as otb/verl, positions counted in tokens of the mask",
    code_path=f"{VERL}compute_multi_turn_optimal_token_baseline_advantage{VERL_DATE}",
    singleton="raw",
    masking="at a position, the rollouts of the group that have so many tokens of the mask; those without any are out",
    needs=("rewards|token_rewards", "group_ids", "mask", "log_probs", "sum_p2"),
    reads=("is_weights",),
    options={"zero_tail": True},
)
def otb_tir(given: Inputs) -> Estimate:
    """`zero_tail`: see `fastadv.optimal_token_baseline`."""
    return _token_baseline(given, "sampled")
