"""Estimators `fastadv_*` as verl calls them: through its compute_advantage, beside its own, and under a trainer that
says more than verl passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from verl_calls import DataProto, EstimatorOptions, Rows, algorithm, computed, direct, estimators, three
from verl_import import verl_module
from verl_rows import VerlRows

import fastadv as fa

algos = verl_module("verl.trainer.ppo.core_algos")
telling = verl_module("fastadv.integrations.verl.rows").telling

DRAWN = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SIZES = st.tuples(st.integers(0, 10**6), st.integers(2, 14), st.integers(2, 40))
NEAR = {"rtol": 2e-5, "atol": 2e-5}
PAIRS = ("fastadv_passk", "fastadv_maxrl")

# Ours, and verl's that it equals where each row has a token and its reward stands on one.
EQUAL = {
    "fastadv_grpo": "grpo",
    "fastadv_rloo": "rloo",
    "fastadv_opo": "opo",
    "fastadv_gpg": "gpg",
    "fastadv_passk": "grpo_passk",
    "fastadv_reinforce_plus_plus": "reinforce_plus_plus",
    "fastadv_reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}


def by_uid(b: VerlRows) -> fa.GroupIndex:
    return fa.group_index(b.uid)


# ---- beside verl's own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EQUAL)
@DRAWN
@given(size=SIZES, scaled=st.booleans(), gamma=st.sampled_from([1.0, 0.97]))
def test_values_through_compute_advantage(name: str, size: tuple[int, int, int], scaled: bool, gamma: float) -> None:
    b = VerlRows(*size, pairs=name in PAIRS, token_rewards=name == "fastadv_reinforce_plus_plus")
    config = algorithm(norm_adv_by_std_in_grpo=scaled, gamma=gamma)
    for mine, other in zip(computed(name, b, config), computed(EQUAL[name], b, config), strict=True):
        assert mine.dtype == torch.float32
        assert mine.shape == b.mask.shape
        torch.testing.assert_close(mine, other * b.mask, **NEAR)


def test_dr_grpo_whatever_the_flag_says() -> None:
    b = VerlRows(4, 11, 9)
    expected = computed("grpo", b, algorithm(norm_adv_by_std_in_grpo=False))[0]
    torch.testing.assert_close(computed("fastadv_dr_grpo", b)[0], expected, **NEAR)


def test_maxrl_is_prime_rls() -> None:
    b = VerlRows(4, 11, 9)
    scores = fa.estimate("maxrl/prime-rl", b.scores, b.uid).advantages
    torch.testing.assert_close(computed("fastadv_maxrl", b)[0], scores[:, None] * b.mask)


@pytest.mark.parametrize("name", [*EQUAL, "fastadv_dr_grpo", "fastadv_maxrl", "fastadv_turn"])
@DRAWN
@given(size=SIZES)
def test_rows_without_a_token_do_not_vote(name: str, size: tuple[int, int, int]) -> None:
    """verl lets them vote: a rollout that rejection took out, and the rows that it pads batches with."""
    b = VerlRows(*size, pairs=True, empty=0.3)
    there = b.mask.any(1).nonzero().squeeze(1)
    left = b.take(there)
    if not len(there) or (name == "fastadv_passk" and int(by_uid(left).sizes().min()) < 2):
        return
    found = computed(name, b)[0]
    torch.testing.assert_close(found[there], computed(name, left)[0], **NEAR)
    assert not found[~b.mask.any(1)].any()


def test_a_row_without_a_token_would_have_changed_verls() -> None:
    b = VerlRows(4, 12, 9, pairs=True, empty=0.3)
    assert bool((b.scores[~b.mask.any(1)] != 0).any())
    there = b.mask.any(1).nonzero().squeeze(1)
    difference = computed("rloo", b)[0][there] - computed("fastadv_rloo", b)[0][there]
    assert float(difference.abs().max()) > 0.1


def test_padding_rows_of_verl() -> None:
    """Each has a uid of its own, a mask of 0 and one column: verl's grpo_passk refuses a batch that has one."""
    b = VerlRows(4, 8, 6, pairs=True)
    expected = computed("fastadv_passk", b)[0]
    b.uid = np.append(b.uid, "pad0af3")
    b.mask, b.rewards = (torch.cat([t, torch.zeros_like(t[:1])]) for t in (b.mask, b.rewards))
    with pytest.raises(ValueError, match="at least 2 samples"):
        computed("grpo_passk", b)
    found = computed("fastadv_passk", b)[0]
    assert torch.equal(found[:-1], expected)
    assert not found[-1].any()


# ---- tokens ----------------------------------------------------------------------------------------------------------

TOKENS = {
    "fastadv_reinforce_plus_plus": ("compute_reinforce_plus_plus_outcome_advantage", ()),
    "fastadv_remax": ("compute_remax_outcome_advantage", ("reward_baselines",)),
    "fastadv_gae": ("compute_gae_advantage_return", ("values",)),
    "fastadv_otb": ("compute_optimal_token_baseline_advantage", ("index", "old_log_probs", "sum_pi_squared")),
    "fastadv_otb_tir": (
        "compute_multi_turn_optimal_token_baseline_advantage",
        ("index", "old_log_probs", "sum_pi_squared"),
    ),
}


def known(b: VerlRows, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Fields of Rows, by what verl calls them."""
    call, fields = b.call(*names), {theirs: ours for ours, theirs in estimators.PASSED.items()}
    return {fields[name]: call[name] for name in names if name in fields}


@pytest.mark.parametrize("name", TOKENS)
@DRAWN
@given(size=SIZES)
def test_tokens_beside_verl(name: str, size: tuple[int, int, int]) -> None:
    theirs, names = TOKENS[name]
    b = VerlRows(*size, token_rewards=True)
    options: dict[str, Any] = {"gamma": 0.97} if name == "fastadv_gae" else {"config": algorithm(gamma=0.97)}
    if name == "fastadv_gae":
        options["lam"] = 0.9
    expected = getattr(algos, theirs)(**b.call(*names), **options)
    rows = Rows.of_verl(b.rewards, b.mask, b.uid, **known(b, names))
    found = estimators.advantages(name, rows, EstimatorOptions.of(algorithm(gamma=0.97, lam=0.9)))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other * b.mask, **NEAR)


@pytest.mark.parametrize("name", TOKENS)
@DRAWN
@given(size=SIZES)
def test_a_reward_outside_of_the_mask_goes_to_the_token_before_it(name: str, size: tuple[int, int, int]) -> None:
    """verl writes the outcome on the row's last token; where a tool answered last, verl's own lose it."""
    _, names = TOKENS[name]
    b = VerlRows(*size, outside=True)
    more = known(b, names)
    found = direct(name, b, **more)
    moved = torch.zeros_like(b.rewards)
    for row in range(len(b.scores)):
        moved[row, int(b.mask[row].nonzero()[-1])] = b.scores[row]
    b.rewards = moved
    torch.testing.assert_close(found, direct(name, b, **more))


def test_rewards_between_turns_and_before_the_first() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0]])
    rewards = torch.tensor([[9.0, 0.0, 1.0, 2.0, 4.0, 0.0, 8.0]])
    rows = Rows.of_verl(rewards, mask, ["a"])
    assert rows.rewards_on_mask.tolist() == [[0, 0, 7, 0, 0, 8, 0]]
    rows = Rows.of_verl(rewards * mask, mask, ["a"])
    assert rows.rewards_on_mask is rows.token_rewards


def test_an_empty_row_leaves_the_other_alone_in_its_token_baseline() -> None:
    b = VerlRows(4, 2, 6, pairs=True).take(torch.tensor([0, 1]))
    b.uid = np.array(["a", "a"], dtype=object)
    b.mask[1] = 0
    names = TOKENS["fastadv_otb"][1]
    alone = b.take(torch.tensor([0]))
    expected = direct("fastadv_otb", alone, **known(alone, names))
    assert torch.equal(direct("fastadv_otb", b, **known(b, names))[:1], expected)


# ---- sessions --------------------------------------------------------------------------------------------------------


def sessions_of(b: VerlRows, seed: int) -> tuple[dict[str, Tensor], list[str]]:
    """Rows put together to sessions of their prompt, of one to three outputs in any order: what a trainer tells, and
    verl's keys."""
    g = torch.Generator().manual_seed(seed)
    free: dict[str, list[int]] = {}
    for row in torch.randperm(len(b.uid), generator=g).tolist():
        free.setdefault(b.uid[row], []).append(row)
    keys = [""] * len(b.uid)
    sessions, outputs = torch.zeros(2, len(b.uid), dtype=torch.int64).unbind(0)
    number = 0
    for uid, mine in free.items():
        while mine:
            for output in range(min(len(mine), int(torch.randint(1, 4, (), generator=g)))):
                row = mine.pop()
                keys[row], sessions[row], outputs[row] = f"{uid}_{number}_{output}", number, output
            number += 1
    return {"sessions": sessions, "outputs": outputs}, keys


@DRAWN
@given(size=SIZES, scaled=st.booleans())
def test_a_session_counts_once_as_in_verls_grpo(size: tuple[int, int, int], scaled: bool) -> None:
    utils = verl_module("verl.trainer.ppo.v1.utils")
    b = VerlRows(*size)
    told, keys = sessions_of(b, size[0])
    config = algorithm(norm_adv_by_std_in_grpo=scaled)
    data = DataProto.from_dict(
        tensors={"token_level_rewards": b.rewards, "response_mask": b.mask}, non_tensors={"uid": b.uid}
    )
    expected = utils.compute_advantage_for_multi_trajectories(
        data, keys, "grpo", norm_adv_by_std_in_grpo=scaled, config=config
    ).batch["advantages"]
    with telling(**told):
        found = computed("fastadv_grpo", b, config)[0]
    torch.testing.assert_close(found, expected, **NEAR)


def joined(b: VerlRows, told: dict[str, Tensor]) -> tuple[VerlRows, dict[int, tuple[int, slice]]]:
    """Sessions as one row each, outputs one after another, and where each row has gone."""
    count, width = int(told["sessions"].max()) + 1, b.mask.shape[1]
    long = VerlRows(0, 1, 1)
    long.uid = np.array([""] * count, dtype=object)
    long.mask, long.rewards = torch.zeros(count, 3 * width, dtype=torch.int64), torch.zeros(count, 3 * width)
    outputs = torch.zeros(count, dtype=torch.int64).scatter_reduce(0, told["sessions"], told["outputs"], "amax")
    place = {}
    for row, (session, output) in enumerate(zip(told["sessions"].tolist(), told["outputs"].tolist(), strict=True)):
        place[row] = (session, slice(output * width, (output + 1) * width))
        long.uid[session], long.mask[place[row]] = b.uid[row], b.mask[row]
        if output == outputs[session]:
            long.rewards[place[row]] = b.rewards[row]
    return long, place


SESSIONS = {
    "fastadv_rloo": None,
    "fastadv_opo": None,
    "fastadv_gpg": None,
    "fastadv_dr_grpo": None,
    "fastadv_maxrl": None,
    "fastadv_reinforce_plus_plus_baseline": None,
    "fastadv_turn": {"kappa": 1},
    "fastadv": {"estimator": "grpo/verl-agent"},
    "fastadv_arm": {"arm": "turn-reached"},
}


@pytest.mark.parametrize("name", SESSIONS)
@pytest.mark.parametrize("empty", [0.0, 0.4])
@DRAWN
@given(size=SIZES)
def test_a_session_is_one_row_to_the_estimator(name: str, empty: float, size: tuple[int, int, int]) -> None:
    b = VerlRows(*size, empty=empty)
    b.mask[:, -1] = 0  # outputs do not touch: two turns would look like one
    if not b.mask.any():
        return
    told, _ = sessions_of(b, size[0])
    long, place = joined(b, told)
    with telling(**told):
        found = computed(name, b, algorithm(SESSIONS[name]))[0]
    expected = computed(name, long, algorithm(SESSIONS[name]))[0]
    for row, at in place.items():
        torch.testing.assert_close(found[row], expected[at], **NEAR)


def test_positions_go_on_where_the_output_before_ends() -> None:
    """Not at the end of its padding."""
    b = three()
    b.mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    told = {"sessions": torch.tensor([0, 0, 1]), "outputs": torch.tensor([0, 1, 0])}
    with telling(**told) as trainer:
        computed("fastadv_arm", b, algorithm({"arm": "turn-reached"}))
    batch = trainer.made.batch
    assert batch.lengths.tolist() == [3, 3]
    assert batch.turn_ids.tolist() == [0, 1, 1, 0, 0, 0]
    with telling(**told, lengths=torch.tensor([4, 2, 3])) as trainer:
        computed("fastadv_arm", b, algorithm({"arm": "turn-reached"}))
    assert trainer.made.batch.lengths.tolist() == [6, 3]
    assert trainer.made.advantages.shape == b.mask.shape


def test_sessions_that_are_none() -> None:
    rows, sessions = torch.ones(3, 2), torch.tensor([0, 0, 1])
    with pytest.raises(ValueError, match="sessions and outputs come together"):
        Rows.of_verl(rows, rows.long(), ["a", "b", "a"], sessions=sessions)
    with pytest.raises(ValueError, match="rows of two uids"):
        Rows.of_verl(rows, rows.long(), ["a", "b", "a"], sessions=sessions, outputs=torch.arange(3)).voting  # noqa: B018


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_turn_by_hand() -> None:
    """Without shrinkage: at turn 0 all three are there, at turn 1 the first two are each other's baseline."""
    found = computed("fastadv_turn", three(), algorithm({"kappa": 0}))[0]
    assert found.tolist() == [[1, 1, 0, 1], [-0.5, 0, -1, -1], [-0.5, -0.5, 0, 0]]


@DRAWN
@given(size=SIZES, kappa=st.sampled_from([None, 0.0, 5.0]), shrink_to=st.sampled_from([None, "mean"]))
def test_turn_is_turn_advantages(size: tuple[int, int, int], kappa: float | None, shrink_to: str | None) -> None:
    b = VerlRows(*size)
    keys = {key: value for key, value in (("kappa", kappa), ("shrink_to", shrink_to)) if value is not None}
    expected = fa.turn_advantages(b.scores, b.uid, fa.turn_ids_from_mask(b.mask), **keys)
    found, returns = computed("fastadv_turn", b, algorithm(keys))
    assert torch.equal(found, expected)
    assert torch.equal(returns, found)


def test_rejected_tokens_are_turns_to_verls_trainer_and_none_to_ours() -> None:
    b = three()
    expected = computed("fastadv_turn", b)[0]
    sampled = b.mask.clone()
    b.mask[0, 0] = b.mask[1, 3] = 0
    b.mask[2, 0] = 0
    with telling(sampled=sampled):
        assert torch.equal(computed("fastadv_turn", b)[0], expected * b.mask)
    b.mask = torch.tensor([[1, 0, 1, 1]] * 3)
    config = algorithm(rollout_correction={"rollout_rs": "seq_mean_k1,token_k1", "bypass_mode": False})
    with pytest.raises(ValueError, match=r"rollout_correction.rollout_rs is 'seq_mean_k1,token_k1'.*fastadv_sync"):
        computed("fastadv_turn", b, config)
    with telling(sampled=sampled):
        computed("fastadv_turn", b, config)
    for harmless in ({"rollout_rs": "seq_mean_k1"}, {"rollout_rs": "token_k1", "bypass_mode": True}, None):
        computed("fastadv_turn", b, algorithm(rollout_correction=harmless))
    computed("fastadv_rloo", b, config)


def test_scaled_turns_and_survivors() -> None:
    b, endings = three(), torch.tensor([fa.Ending.SUBMITTED, fa.Ending.LENGTH_CAP, fa.Ending.SUBMITTED])
    keys = {"population": "survivors", "scale": "std", "ddof": 0, "eps": 0.0, "singleton": "raw", "kappa": 1.0}
    found = direct("fastadv_turn", b, keys, endings=endings)
    expected = fa.turn_advantages(
        b.scores, b.uid, fa.turn_ids_from_mask(b.mask), population="survivors", scale="std", ddof=0, eps=0.0,
        singleton="raw", kappa=1.0, include=torch.tensor([True, False, True]),
    )  # fmt: skip
    assert torch.equal(found, expected)
    assert not found[1].any()


# ---- survivors and arms ----------------------------------------------------------------------------------------------


def test_survivor_by_hand() -> None:
    b = three()
    b.scores = torch.tensor([1.0, 0.0, 0.5])
    b.rewards[:, -1] = b.scores
    endings = torch.tensor([fa.Ending.SUBMITTED, fa.Ending.TURN_CAP, fa.Ending.SUBMITTED])
    found = direct("fastadv_survivor", b, endings=endings)
    assert found[:, 0].tolist() == [0.5, 0.0, -0.5]
    endings[1] = fa.Ending.TIMEOUT
    assert direct("fastadv_survivor", b, endings=endings)[:, 0].tolist() == [0.75, -0.75, 0.0]
    assert direct("fastadv_survivor", b, {"timeout": "budget"}, endings=endings)[:, 0].tolist() == [0.5, 0.0, -0.5]


ARMS = [
    "position-buckets",
    "none",
    "mask",
    "survivors",
    "random-mask:rho=0.5",
    "turn-reached",
    "compact",
    "nat-urs",
    "inverse-probability",
]


@pytest.mark.parametrize("arm", ARMS)
@DRAWN
@given(size=SIZES)
def test_an_arm_is_applied_to_the_batch(arm: str, size: tuple[int, int, int]) -> None:
    b = VerlRows(*size)
    rows = len(b.scores)
    g = torch.Generator().manual_seed(size[0])
    endings = torch.randint(0, 6, (rows,), generator=g)
    ids = torch.randint(0, 10**12, (rows,), generator=g)
    found = direct("fastadv_arm", b, {"arm": arm}, endings=endings, row_ids=ids)
    outcomes = fa.outcomes_of(endings, b.scores)
    batch = fa.Batch.of(
        mask=b.mask, rewards=b.scores, group_ids=b.uid, outcomes=outcomes.outcomes, capped=outcomes.capped,
        row_ids=ids, endings=endings, lengths=torch.where(b.mask != 0, torch.arange(1, 1 + b.mask.shape[1]), 0).amax(1),
    )  # fmt: skip
    result = fa.named_arm(arm).apply(batch, None)
    weights = result.loss_weights(batch)
    weights = weights if weights.dim() == 2 else weights[:, None]
    torch.testing.assert_close(found, (fa.segment_tokens(result.advantages) * weights * b.mask).float())


def test_coins_of_groups_are_tossed_by_what_the_trainer_says() -> None:
    b = VerlRows(4, 90, 6)
    b.mask[:, 0] = 1
    versions, ids = torch.zeros(b.mask.shape, dtype=torch.int32), torch.arange(90) * 7
    groups = by_uid(b).index * 11
    with telling(versions=versions, train_version=9, row_ids=ids, group_ids=groups) as trainer:
        computed("fastadv_arm", b, algorithm({"arm": "rescue:a=0.5"}))
    weights = fa.coins.rescue_weights(0, groups, torch.ones(90, dtype=torch.bool), 0.5)
    assert 0 < int((weights == 0).sum()) < 90
    assert torch.equal(trainer.made.result.weights.float(), weights.float())
    assert torch.equal(trainer.made.excluded, weights == 0)


def test_an_arm_of_ones_own_and_what_it_leaves_for_the_trainer() -> None:
    b = three()
    arm = {"name": "mine", "excludes": ["budget"], "baseline": "mean", "population": "survivors"}
    endings = torch.tensor([fa.Ending.SUBMITTED, fa.Ending.TURN_CAP, fa.Ending.SUBMITTED])
    with telling(endings=endings) as told:
        found = computed("fastadv_arm", b, algorithm({"arm": arm}))[0]
    assert found[:, 0].tolist() == [0.5, 0.0, -0.5]
    assert told.made.excluded.tolist() == [False, True, False]
    assert told.made.arm.name == "mine"
    assert told.made.batch.capped.tolist() == [False, True, False]
    with telling() as told:
        computed("fastadv_arm", b, algorithm({"arm": "dynamic-sampling"}))
    assert told.made.removed.tolist() == [False] * 3


def test_groups_that_an_arm_removes() -> None:
    b = three()
    b.rewards.zero_()
    with pytest.raises(ValueError, match=r"algorithm.fastadv.arm=dynamic-sampling takes rollouts out.*fastadv_sync"):
        computed("fastadv_arm", b, algorithm({"arm": "dynamic-sampling"}))
    with telling() as told:
        computed("fastadv_arm", b, algorithm({"arm": "dynamic-sampling"}))
    assert told.made.removed.all()


def test_coins_follow_uids_not_places() -> None:
    """Two batches of other prompts meet other coins, and one prompt's do not depend on where its rows stand."""
    b = VerlRows(4, 60, 5)
    config = algorithm({"arm": "nat-urs"})
    found = computed("fastadv_arm", b, config)[0]
    order = torch.argsort(by_uid(b).index, stable=True)
    assert torch.equal(computed("fastadv_arm", b.take(order), config)[0], found[order])
    other = b.take(torch.arange(60))
    other.uid = np.array([f"next {uid}" for uid in b.uid], dtype=object)
    assert not torch.equal(computed("fastadv_arm", other, config)[0] != 0, found != 0)


# ---- any estimator of the library ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, e in fa.ESTIMATORS.items() if e.level == "rollout" and n != "passk/verl"])
def test_any_estimator_of_rollouts(name: str) -> None:
    b = VerlRows(7, 12, 9, pairs=True)
    needs = fa.ESTIMATORS[name].needs
    given: dict[str, Any] = {}
    if any("lengths" in need for need in needs):
        given["lengths"] = b.mask.sum(1)
    if "turn_ids" in needs:
        given["turn_ids"] = fa.turn_ids_from_mask(b.mask)
    expected = fa.estimate(name, b.scores, b.uid, **given).advantages
    found = computed("fastadv", b, algorithm({"estimator": name}))[0]
    torch.testing.assert_close(found, expected[:, None] * b.mask)


@pytest.mark.parametrize("name", [n for n, e in fa.ESTIMATORS.items() if e.level == "token"])
def test_any_estimator_of_tokens(name: str) -> None:
    b = VerlRows(7, 12, 9, pairs=True)
    fields = {
        "values": b.values, "greedy_rewards": b.greedy, "old_log_probs": b.log_probs, "sum_pi_squared": b.squares,
    }  # fmt: skip
    rows = Rows.of_verl(b.rewards, b.mask, b.uid, **fields)
    options = EstimatorOptions.of(algorithm({"estimator": name}, gamma=0.9))
    found = estimators.advantages("fastadv", rows, options)[0]
    named = {"values": b.values, "greedy_rewards": b.greedy, "log_probs": b.log_probs, "sum_p2": b.squares}
    known_ = fa.ESTIMATORS[name]
    given = {key: value for key, value in named.items() if key in known_.needs}
    by_token = "rewards|token_rewards" in known_.needs
    given |= {"token_rewards": b.rewards} if by_token else {"rewards": b.scores}
    given |= {"group_ids": b.uid} if "group_ids" in known_.needs else {}
    own = {"gamma": 0.9} if "gamma" in known_.options else {}
    torch.testing.assert_close(found, fa.estimate(name, mask=b.mask, **given, **own).advantages)


def test_options_of_an_estimator() -> None:
    b = VerlRows(7, 12, 9)
    config = algorithm({"estimator": "maxrl/skyrl"})
    assert not torch.equal(computed("fastadv", b, config)[0], computed("fastadv_maxrl", b)[0])
    config = algorithm({"estimator": "gae/miles", "options": {"whiten": True, "gamma": 0.5}}, gamma=0.9)
    rows = Rows.of_verl(b.rewards, b.mask, b.uid, values=b.values)
    found = estimators.advantages("fastadv", rows, EstimatorOptions.of(config))[0]
    expected = fa.estimate("gae/miles", b.scores, mask=b.mask, values=b.values, gamma=0.5, whiten=True).advantages
    torch.testing.assert_close(found, expected)
