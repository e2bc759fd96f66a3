"""Estimators for `algorithm.adv_estimator=fastadv_*`: each is a `fastadv.estimate`, a turn-reached baseline or an arm.

verl passes rewards, mask and uid to a registered estimator and nothing else: no turns, no session, no ending. Under a
trainer of ours an estimator also finds what `rows.telling` was given; what needs it says so under a trainer of verl's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from fastadv.integrations.keys import plain
from fastadv.integrations.verl.keys import ROOT, TRAINER, EstimatorOptions, read
from fastadv.integrations.verl.rows import Rows, stable_ids, told
from torch import Tensor

import fastadv as fa

Result = tuple[Tensor, Tensor]  # advantages and returns, [B, R]
Function = Callable[[Rows, EstimatorOptions], Result]

# What estimators need and verl does not pass, by field of Rows, and who does.
NEEDS = {
    "values": f"the critic's values, which verl passes to adv_estimator=gae only: set {TRAINER} and critic.enable=True",
    "greedy_rewards": "reward_baselines, which verl makes for adv_estimator=remax and trainer.use_v1=False only: take "
    "these, and FASTADV_VERL_ACCELERATE=1",
    "old_log_probs": "old_log_probs, which verl passes to its own token baselines only: take "
    "adv_estimator=optimal_token_baseline or tir_optimal_token_baseline, and FASTADV_VERL_ACCELERATE=1",
    "sum_pi_squared": "sum_pi_squared, which actor_rollout_ref.actor.calculate_sum_pi_squared=True computes and verl "
    "passes to its own token baselines only: take adv_estimator=optimal_token_baseline or tir_optimal_token_baseline "
    "with trainer.use_v1=False, and FASTADV_VERL_ACCELERATE=1",
    "endings": f"how rollouts ended, which verl passes to no estimator: set {TRAINER}",
}
BASELINE_KEYS = ("population", "scale", "ddof", "eps", "singleton", "solved_above", "timeout")


@dataclass(frozen=True)
class VerlEstimator:
    """An estimator as verl's yaml names it.

    Attributes:
        name: of `algorithm.adv_estimator`.
        function: of Rows and options.
        keys: of `algorithm.fastadv` that it reads.
        needs: fields of Rows without which it is an error.
    """

    name: str
    function: Function
    keys: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def advantages(name: str, rows: Rows, options: EstimatorOptions) -> Result:
    """Advantages and returns, `[B, R]` float32 each, 0 outside of the mask.

    Args:
        name: a key of `ESTIMATORS`.
        rows: the batch.
        options: `EstimatorOptions.of(config.algorithm)`.

    Raises:
        ValueError: an unknown name, a key that it does not read, something that it needs and nobody gave, a mask
            without a token.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"algorithm.adv_estimator is {name!r}; fastadv's names are {', '.join(ESTIMATORS)}")
    found = ESTIMATORS[name]
    always = () if told() is None else ("solved_above", "timeout")  # our trainers count what is solved
    options.only(name, (*found.keys, *always))
    for need in found.needs:
        if getattr(rows, need) is None:
            raise ValueError(f"algorithm.adv_estimator={name} needs {NEEDS[need]}")
    if not bool(rows.has_tokens.any()):
        raise ValueError(
            f"algorithm.adv_estimator={name}: response_mask is 0 everywhere, so there is nothing to learn from; "
            "algorithm.rollout_correction.rollout_rs is one thing that takes tokens out of it"
        )
    result, returns = found.function(rows, options)
    return result.to(torch.float32), returns.to(torch.float32)


# ---- one advantage a rollout: a session counts once ------------------------------------------------------------------


def _of_sessions(name: str, rows: Rows, **options: Any) -> Result:
    sessions, found = rows.voting, fa.ESTIMATORS[name]
    given: dict[str, Any] = {}
    if any("lengths" in need for need in found.needs):
        given["lengths"] = rows.session_lengths
    if "turn_ids" in found.needs:
        given["turn_ids"], given["cu_seqlens"] = rows.packed.pack(rows.turns), rows.packed.cu_seqlens
    per_session = fa.estimate(name, sessions.rewards, sessions.groups, **given, **options).advantages
    assert isinstance(per_session, Tensor)
    return _to_tokens(rows, per_session)


def _to_tokens(rows: Rows, per_session: Tensor) -> Result:
    spread = rows.spread(rows.voting.to_rows(per_session))
    return spread, spread


def _grpo(rows: Rows, options: EstimatorOptions) -> Result:
    return _of_sessions("grpo/verl" if options.norm_adv_by_std_in_grpo else "dr_grpo/verl", rows)


def _passk(rows: Rows, options: EstimatorOptions) -> Result:
    return _of_sessions("passk/verl", rows, std=options.norm_adv_by_std_in_grpo)


def _plain(name: str, rows: Rows, options: EstimatorOptions) -> Result:
    return _of_sessions(name, rows)


def _survivor(rows: Rows, options: EstimatorOptions) -> Result:
    """Leave-one-out among the rollouts that no cap cut off; the others get 0."""
    sessions = rows.voting
    return _to_tokens(
        rows,
        fa.group_advantages(
            sessions.rewards, sessions.groups, baseline="loo", population="survivors", include=survivors(rows, options),
            singleton=options.singleton, scale=options.scale, ddof=options.ddof, eps=options.eps,
        ),
    )  # fmt: skip


def outcomes(rows: Rows, options: EstimatorOptions) -> fa.Outcomes:
    """Outcomes of the sessions that vote. Where nobody knows how they ended, they are solved or failed by reward."""
    sessions = rows.voting
    unknown = torch.full_like(sessions.rows, fa.Ending.UNKNOWN)
    endings = unknown if rows.endings is None else rows.endings[sessions.rows]
    scores = sessions.rewards if rows.scores is None else rows.scores[sessions.rows]
    return fa.outcomes_of(
        endings, scores, solved_above=options.solved_above, timeout=fa.Outcome[options.timeout.upper()]
    )


def survivors(rows: Rows, options: EstimatorOptions) -> Tensor:
    """Sessions that vote and that no cap cut off, `[S]` bool."""
    if rows.endings is None:
        raise ValueError(f"{ROOT}.population=survivors needs {NEEDS['endings']}")
    return ~outcomes(rows, options).capped


# ---- one advantage a turn --------------------------------------------------------------------------------------------


def _turn(rows: Rows, options: EstimatorOptions) -> Result:
    """A rollout's reward at turn l beside those of the others of its group that reached turn l."""
    sessions, packed = rows.voting, rows.packed
    include = survivors(rows, options) if options.population == "survivors" else None
    per_token = fa.turn_advantages(
        sessions.rewards, sessions.groups, packed.pack(rows.turns), packed.cu_seqlens, mask=packed.pack(rows.on),
        kappa=options.kappa, shrink_to=options.shrink_to, population=options.population, include=include,
        singleton=options.singleton, scale=options.scale, ddof=options.ddof, eps=options.eps,
    )  # fmt: skip
    result = packed.unpack(per_token)
    return result, result


# ---- one advantage a token: on rows ----------------------------------------------------------------------------------


def _of_tokens(name: str, rows: Rows, **options: Any) -> Result:
    found = fa.ESTIMATORS[name]
    given: dict[str, Any] = {"mask": rows.on}
    both = [need for needs in (*found.needs, *found.reads) for need in needs.split("|")]
    for one, value in {
        "values": rows.values,
        "greedy_rewards": rows.greedy_rewards,
        "log_probs": rows.old_log_probs,
        "sum_p2": rows.sum_pi_squared,
        "is_weights": rows.rollout_is_weights,
    }.items():
        if one in both and value is not None:
            given[one] = value
    if "rewards|token_rewards" in found.needs:
        given["token_rewards"] = rows.rewards_on_mask
    else:
        given["rewards"] = rows.rewards
    groups = rows.voting_groups if "group_ids" in both else None
    result, returns = fa.estimate(name, group_ids=groups, **given, **options)
    assert isinstance(result, Tensor)
    return result, returns if isinstance(returns, Tensor) else result


def _reinforce_plus_plus(rows: Rows, options: EstimatorOptions) -> Result:
    return _of_tokens("reinforce_plus_plus/verl", rows, gamma=options.gamma)


def _reinforce_plus_plus_baseline(rows: Rows, options: EstimatorOptions) -> Result:
    """Rewards are centred over sessions and whitened over tokens: to the second, each row is a group of its own."""
    sessions = rows.voting
    centred = fa.estimate("dr_grpo/verl", sessions.rewards, sessions.groups).advantages
    assert isinstance(centred, Tensor)
    alone = replace(rows, rewards=sessions.to_rows(centred), groups=fa.group_index(range(rows.rewards.shape[0])))
    return _of_tokens("reinforce_plus_plus_baseline/verl", alone)


def _remax(rows: Rows, options: EstimatorOptions) -> Result:
    return _of_tokens("remax/verl", rows)


def _gae(rows: Rows, options: EstimatorOptions) -> Result:
    return _of_tokens("gae/verl", rows, gamma=options.gamma, lam=options.lam)


def _token_baseline(name: str, rows: Rows, options: EstimatorOptions) -> Result:
    return _of_tokens(name, rows)


def _estimate(rows: Rows, options: EstimatorOptions) -> Result:
    """Any name of `fastadv.ESTIMATORS`."""
    name = options.estimator
    if name is None:
        raise ValueError(f"algorithm.adv_estimator=fastadv needs {ROOT}.estimator, a name of fa.ESTIMATORS")
    found = fa.ESTIMATORS[name]
    missing = [FIELDS[need] for need in found.needs if need in FIELDS and getattr(rows, FIELDS[need]) is None]
    if missing:
        raise ValueError(f"{ROOT}.estimator={name} needs {NEEDS[missing[0]]}")
    if "anchor_ids" in found.needs:
        raise ValueError(f"{ROOT}.estimator={name} compares observations, which verl does not pass; see verl-agent")
    own = dict(options.options)
    for key in ("gamma", "lam"):
        if key in found.options:
            own.setdefault(key, getattr(options, key))
    try:
        if found.level == "token":
            return _of_tokens(name, rows, **own)
        if found.level == "rollout":
            return _of_sessions(name, rows, **own)
    except ValueError as error:
        raise ValueError(f"{ROOT}.estimator: {error}") from error
    raise ValueError(
        f"{ROOT}.estimator={name} has an advantage for each turn; take algorithm.adv_estimator=fastadv_turn"
    )


# Inputs of fastadv.estimate, as fields of Rows.
FIELDS = {
    "values": "values",
    "greedy_rewards": "greedy_rewards",
    "log_probs": "old_log_probs",
    "sum_p2": "sum_pi_squared",
}


# ---- arms ------------------------------------------------------------------------------------------------------------


class ArmRows(NamedTuple):
    """What an arm makes of rows.

    Attributes:
        advantages: `[B, R]`, weights of rollouts and tokens multiplied in, 0 outside of the mask.
        excluded: `[B]` bool, rows whose weight is 0.
        removed: `[B]` bool, rows whose mask is to be 0 before a loss counts its denominators.
        arm: the arm.
        batch: the sessions that vote.
        result: the arm's, for them.
    """

    advantages: Tensor  # [B, R]
    excluded: Tensor  # [B]
    removed: Tensor  # [B]
    arm: fa.Arm
    batch: fa.Batch
    result: fa.ArmResult


def arm_rows(rows: Rows, options: EstimatorOptions) -> ArmRows:
    """Applies `algorithm.fastadv.arm`.

    verl has no place for weights, so they are multiplied into the advantages: exact for the policy term of every loss
    that is linear in the advantage, and no part of entropy and KL terms.

    Args:
        rows: the batch.
        options: with an arm.

    Raises:
        ValueError: no arm, or one that reads what nobody gave.
    """
    arm = options.arm
    if arm is None:
        raise ValueError(f"algorithm.adv_estimator=fastadv_arm needs {ROOT}.arm: a name of fastadv.ARMS, or its fields")
    if rows.endings is None and _reads_endings(arm):
        raise ValueError(f"{ROOT}.arm={arm.name} needs {NEEDS['endings']}")
    if arm.divisor == "hajek":
        raise ValueError(f"{ROOT}.arm={arm.name}: divisor is 'hajek', and verl's losses divide by counts")
    batch, packed, sessions = sessions_batch(rows, options), rows.trimmed, rows.voting
    ids = None if rows.group_ids is None else rows.group_ids[sessions.rows]
    known = fa.Known(train_version=rows.train_version, group_ids=ids)
    try:
        result = arm.apply(batch, None, known=known)
    except ValueError as error:
        raise ValueError(f"{ROOT}.arm: {error} ({TRAINER} knows endings, versions and ids)") from error
    weighted = fa.segment_tokens(result.advantages, mask=packed.pack(rows.on)) * batch.rows.spread(result.weights)
    if result.token_weights is not None:
        weighted = weighted * result.token_weights
    nobody = torch.zeros_like(result.excluded)
    return ArmRows(
        packed.unpack(weighted.to(torch.float32)),
        sessions.to_rows(result.excluded),
        sessions.to_rows(nobody if result.removed is None else result.removed),
        arm,
        batch,
        result,
    )


def sessions_batch(rows: Rows, options: EstimatorOptions) -> fa.Batch:
    """The sessions that vote, for arms, censuses and records."""
    packed, sessions = rows.trimmed, rows.voting
    found = outcomes(rows, options)
    return fa.Batch.of(
        mask=packed.pack(rows.on if rows.sampled is None else rows.sampled),
        rewards=sessions.rewards,
        group_ids=sessions.groups,
        outcomes=found.outcomes,
        capped=found.capped,
        cu_seqlens=packed.cu_seqlens,
        turn_ids=packed.pack(rows.turns),
        endings=None if rows.endings is None else rows.endings[sessions.rows],
        row_ids=None if rows.row_ids is None else rows.row_ids[sessions.rows],
        versions=None if rows.versions is None else packed.pack(rows.versions),
    )


def _reads_endings(arm: fa.Arm) -> bool:
    by_reward = (fa.Outcome.SOLVED, fa.Outcome.FAILED)
    condition = arm.condition
    return (
        bool(arm.endings)
        or any(outcome not in by_reward for outcome in arm.excludes)
        or (condition is not None and (condition.capped or condition.not_wrong))
    )


def _arm(rows: Rows, options: EstimatorOptions) -> Result:
    made, trainer = arm_rows(rows, options), told()
    if trainer is not None:
        trainer.made = made
    elif made.arm.matched_update:
        raise ValueError(f"{ROOT}.arm={made.arm.name} matches updates, which a trainer does: set {TRAINER}")
    elif bool(made.removed.any()):
        raise ValueError(
            f"{ROOT}.arm={made.arm.name} takes rollouts out of the mask, which no estimator can: set {TRAINER}"
        )
    return made.advantages, made.advantages


# ---- names -----------------------------------------------------------------------------------------------------------

TABLE = (
    VerlEstimator("fastadv_grpo", _grpo),
    VerlEstimator("fastadv_dr_grpo", partial(_plain, "dr_grpo/verl")),
    VerlEstimator("fastadv_rloo", partial(_plain, "rloo/verl")),
    VerlEstimator("fastadv_opo", partial(_plain, "opo/verl")),
    VerlEstimator("fastadv_gpg", partial(_plain, "gpg/verl")),
    VerlEstimator("fastadv_passk", _passk),
    VerlEstimator("fastadv_maxrl", partial(_plain, "maxrl/prime-rl")),
    VerlEstimator("fastadv_reinforce_plus_plus", _reinforce_plus_plus),
    VerlEstimator("fastadv_reinforce_plus_plus_baseline", _reinforce_plus_plus_baseline),
    VerlEstimator("fastadv_remax", _remax, needs=("greedy_rewards",)),
    VerlEstimator("fastadv_gae", _gae, needs=("values",)),
    VerlEstimator("fastadv_otb", partial(_token_baseline, "otb/verl"), needs=("old_log_probs", "sum_pi_squared")),
    VerlEstimator(
        "fastadv_otb_tir", partial(_token_baseline, "otb-tir/verl"), needs=("old_log_probs", "sum_pi_squared")
    ),
    VerlEstimator("fastadv_turn", _turn, ("kappa", "shrink_to", *BASELINE_KEYS)),
    VerlEstimator("fastadv_survivor", _survivor, BASELINE_KEYS, ("endings",)),
    VerlEstimator("fastadv_arm", _arm, ("arm", "solved_above", "timeout")),
    VerlEstimator("fastadv", _estimate, ("estimator", "options")),
)
ESTIMATORS: Mapping[str, VerlEstimator] = MappingProxyType({found.name: found for found in TABLE})


# ---- as verl calls them ----------------------------------------------------------------------------------------------

PASSED = {  # fields of Rows, as verl names them
    "values": "values",
    "old_log_probs": "old_log_probs",
    "sum_pi_squared": "sum_pi_squared",
    "rollout_is_weights": "rollout_is_weights",
    "greedy_rewards": "reward_baselines",
}


def registered(name: str) -> Callable[..., Result]:
    """The function that verl's registry gets for a name of `ESTIMATORS`."""

    def compute(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        config: Any = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        batch: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Result:
        options, trainer = EstimatorOptions.of(config), told()
        if index is None and non_tensor_batch is not None:
            index = non_tensor_batch.get("uid")
        given = {field: kwargs.get(key, None if batch is None else batch.get(key)) for field, key in PASSED.items()}
        if trainer is not None:
            given.update(trainer.fields)
        elif options.trainer:
            raise ValueError(f"{ROOT}.{next(iter(options.trainer))} is read by our trainers: set {TRAINER}, or drop it")
        elif _needs_turns(name, options):
            check_rejection(name, config)
        tosses = options.arm is not None and options.arm.tosses
        if tosses and index is not None and given.get("row_ids") is None:
            given |= {name: ids.to(token_level_rewards.device) for name, ids in stable_ids(index).items()}
        with torch.no_grad():
            return advantages(name, Rows.of_verl(token_level_rewards, response_mask, index, **given), options)

    compute.__name__ = compute.__qualname__ = name
    compute.__doc__ = f"`algorithm.adv_estimator={name}`, see fastadv.integrations.verl.estimators."
    return compute


def _needs_turns(name: str, options: EstimatorOptions) -> bool:
    if name == "fastadv_arm":
        return options.arm is not None and options.arm.level != "rollout" and not options.arm.position_edges
    if name == "fastadv":
        return options.estimator is not None and "turn_ids" in fa.ESTIMATORS[options.estimator].needs
    return name == "fastadv_turn"


def check_rejection(name: str, config: Any) -> None:
    """Raises ValueError where verl's rejection of tokens has cut turns into pieces before an estimator sees them."""
    correction = read(config, "rollout_correction", {})
    rejection = plain(read(correction, "rollout_rs", ""))
    tokens = any(str(part).strip().startswith("token") for part in str(rejection).split(","))
    if tokens and not read(correction, "bypass_mode", False):
        raise ValueError(
            f"algorithm.rollout_correction.rollout_rs is {rejection!r}: it takes single tokens out of response_mask "
            f"before algorithm.adv_estimator={name} sees it, and one turn then looks like two; set {TRAINER}, which "
            "reads turns from the mask as it was, or reject whole sequences"
        )


REGISTERED: Mapping[str, Callable[..., Result]] = MappingProxyType({name: registered(name) for name in ESTIMATORS})
