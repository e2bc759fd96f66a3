"""verl's own advantage functions, under their names and with their arguments: equal results of our kernels.

`accelerate` puts them where verl's are. They reproduce verl 0.9.1, rollouts without a token that vote and rewards that
are lost outside of the mask among it; the estimators `fastadv_*` do neither. `DIFFERENCES` lists where the numbers are
not verl's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastadv as fa

Result = tuple[Tensor, Tensor]  # advantages and returns, [B, R]

# A mask that is read more than once becomes bool first: a copy of verl's int64 costs less than to read it again.


class Difference(NamedTuple):
    """Where a function of this module does not give what verl's gives.

    Attributes:
        functions: names in verl's registry.
        verl: what verl 0.9.1 does.
        ours: what is done here.
    """

    functions: tuple[str, ...]
    verl: str
    ours: str


GROUPED = ("grpo", "grpo_vectorized", "gdpo", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg")
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
DIFFERENCES = (
    Difference(
        ("gae", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"),
        "advantages (GAE, ReMax) and returns hold numbers outside of the mask, which losses leave out",
        "0 there",
    ),
    Difference(
        ("grpo", "grpo_vectorized", "gdpo", "grpo_passk"),
        "float32 sums: a group of equal rewards that float32 cannot add up exactly gets rounding errors over 1e-6",
        "float64 sums: exactly 0",
    ),
    Difference(
        WHITENED,
        "float32 sums over all tokens; a mask with one token or none is an error",
        "float64 sums; a mask with one token or none gives zeros",
    ),
    Difference(
        ("opo",),
        "a group of several rows and no token divides 0 by 0: NaN",
        "0",
    ),
    Difference(
        (*GROUPED, "reinforce_plus_plus_baseline"),
        "a NaN or an infinite reward makes its group NaN",
        "an error that names the row",
    ),
    Difference(
        ("grpo_vectorized", "rloo_vectorized"),
        "integer uids allocate up to the largest, negative ones fail (grpo_vectorized); bfloat16 rewards give float64 "
        "(rloo_vectorized)",
        "any labels; float32",
    ),
    Difference(
        ("grpo_vectorized",),
        "a keyword that it does not know, such as reward_baselines, is a TypeError",
        "it is not read",
    ),
    Difference(
        (*GROUPED, *WHITENED, "remax", "optimal_token_baseline", "tir_optimal_token_baseline"),
        "bfloat16 and float16 rewards give bfloat16 and float16",
        "float32",
    ),
)


def _scores(token_level_rewards: Tensor) -> Tensor:
    """What each rollout was given, `[B]`, in verl's precision."""
    return token_level_rewards.sum(dim=-1)


def _spread(per_row: Tensor, response_mask: Tensor) -> Result:
    """A value of each row at the tokens of the mask, twice: verl calls advantages returns too."""
    spread = fa.token_returns(response_mask, rewards=per_row).returns
    return spread, spread


def _estimate(name: str, *args: Any, **inputs: Any) -> Result:
    found = fa.estimate(name, *args, **inputs)
    assert isinstance(found.advantages, Tensor)
    assert isinstance(found.returns, Tensor)
    return found.advantages, found.returns


def _grpo(scores: Tensor, groups: fa.GroupIndex, epsilon: float, scaled: bool) -> Tensor:
    """GRPO of rows, `[B]`. verl gives a group of one the mean 0 and the standard deviation 1."""
    if not scaled:
        return fa.group_advantages(scores, groups, singleton="raw")
    found = fa.group_advantages(scores, groups, singleton="raw", scale="std", eps=epsilon)
    return torch.where(fa.singleton_rows(groups), found / (1 + epsilon), found)


def _required(config: Any, name: str) -> Any:
    if config is None:
        raise AssertionError(f"{name} needs config, verl's algorithm")
    return config


@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float | Tensor, lam: float | Tensor
) -> Result:
    """verl's "gae": GAE over the tokens of the mask, whitened."""
    return _estimate(
        "gae/verl", token_rewards=token_level_rewards, values=values, mask=response_mask.bool(), gamma=float(gamma),
        lam=float(lam),
    )  # fmt: skip


@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Result:
    """verl's "grpo"."""
    groups = fa.group_index(index).to(response_mask.device)
    return _spread(_grpo(_scores(token_level_rewards), groups, epsilon, norm_adv_by_std_in_grpo), response_mask)


@torch.no_grad()
def compute_grpo_vectorized_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Result:
    """verl's "grpo_vectorized"."""
    return compute_grpo_outcome_advantage(token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo)


@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Result:
    """verl's "gdpo": GRPO of each reward, their weighted sum, whitened over the tokens.

    Raises:
        AssertionError: no algorithm.gdpo_reward_keys, or a key without rewards.
    """
    groups = fa.group_index(index).to(response_mask.device)
    rewards, weights = [_scores(token_level_rewards)], None
    if config is not None and non_tensor_batch is not None and batch is not None:
        keys = config.get("gdpo_reward_keys", None)
        if not keys:
            raise AssertionError(
                "algorithm.gdpo_reward_keys is not set; it names the rewards that compute_score returns"
            )
        for key in keys:
            if key not in non_tensor_batch:
                raise AssertionError(f"algorithm.gdpo_reward_keys has {key!r}, which compute_score does not return")
        columns = ([float(x) for x in non_tensor_batch[key]] for key in keys)
        rewards = [torch.tensor(column, dtype=torch.float32, device=response_mask.device) for column in columns]
        weights = config.get("gdpo_reward_weights", None)
    factors = [1.0] * len(rewards) if weights is None else [float(weight) for weight in weights]
    total = torch.zeros_like(rewards[0])
    for reward, factor in zip(rewards, factors, strict=True):
        total += factor * _grpo(reward, groups, epsilon, norm_adv_by_std_in_grpo)
    alone = fa.group_index(range(total.shape[0])).to(total.device)  # nothing is left to take from a group's mean
    return _estimate("reinforce_plus_plus_baseline/verl", total, alone, mask=response_mask.bool())


@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Result:
    """verl's "grpo_passk", which reads `norm_adv_by_std_in_grpo` from config."""
    scaled = _required(config, "grpo_passk").get("norm_adv_by_std_in_grpo", True)
    scores, groups = _scores(token_level_rewards), fa.group_index(index).to(response_mask.device)
    gap = _estimate("passk/verl", scores, groups, std=False)[0]
    if scaled:
        # Of a rollout that leads alone, centred and scaled advantage are positive: their ratio is 1 / (std + epsilon).
        centred = _grpo(scores, groups, epsilon, False)
        gap = torch.where(gap > 0, gap * _grpo(scores, groups, epsilon, True) / centred, 0.0)
    return _spread(gap, response_mask)


@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Result:
    """verl's "reinforce_plus_plus_baseline"."""
    groups = fa.group_index(index).to(response_mask.device)
    return _estimate(
        "reinforce_plus_plus_baseline/verl", _scores(token_level_rewards), groups, mask=response_mask.bool()
    )


@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Result:
    """verl's "rloo": a group of one keeps its reward."""
    return _spread(_estimate("rloo/verl", _scores(token_level_rewards), index)[0], response_mask)


@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Result:
    """verl's "opo": the mean weights rewards by the tokens of the mask."""
    mask = response_mask.bool()  # read twice: as one byte a token it costs less, the copy included
    groups, lengths = fa.group_index(index).to(mask.device), fa.token_counts(mask)
    found = _estimate("opo/verl", _scores(token_level_rewards), groups, lengths=lengths)[0]
    # The one row with tokens among several without is beside itself to verl, and alone to the estimator.
    beside_itself = fa.singleton_rows(groups, votes=lengths) & ~fa.singleton_rows(groups)
    return _spread(torch.where(beside_itself, 0.0, found), mask)


@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> Result:
    """verl's "reinforce_plus_plus"."""
    gamma = float(_required(config, "reinforce_plus_plus").gamma)
    return _estimate(
        "reinforce_plus_plus/verl", token_rewards=token_level_rewards, mask=response_mask.bool(), gamma=gamma
    )


@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> Result:
    """verl's "remax"."""
    return _estimate(
        "remax/verl", token_rewards=token_level_rewards, greedy_rewards=reward_baselines, mask=response_mask.bool()
    )


@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> Result:
    """verl's "gpg", which computes alpha whatever was passed."""
    return _spread(_estimate("gpg/verl", _scores(token_level_rewards), index)[0] / f_norm, response_mask)


@torch.no_grad()
def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Result:
    """verl's "rloo_vectorized": a group of one gets 0."""
    return _spread(_estimate("rloo/verl-vectorized", _scores(token_level_rewards), index)[0], response_mask)


def _token_baseline(
    positions: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None,
    zero_tail: bool,
    eps: float,
) -> Result:
    mask = response_mask.bool()
    returns = fa.token_returns(mask, token_rewards=token_level_rewards).returns
    advantages = fa.optimal_token_baseline(
        returns, mask, index, old_log_probs, sum_pi_squared, is_weights=rollout_is_weights,
        positions=positions, zero_tail=zero_tail, eps=eps,
    )  # fmt: skip
    return advantages, returns


@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> Result:
    """verl's "optimal_token_baseline"."""
    return _token_baseline(
        "all", token_level_rewards, response_mask, index, old_log_probs, sum_pi_squared, rollout_is_weights,
        handle_zero_tail, epsilon,
    )  # fmt: skip


@torch.no_grad()
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> Result:
    """verl's "tir_optimal_token_baseline": positions are counted in tokens of the mask."""
    return _token_baseline(
        "sampled", token_level_rewards, response_mask, index, old_log_probs, sum_pi_squared, rollout_is_weights,
        handle_zero_tail, epsilon,
    )  # fmt: skip
