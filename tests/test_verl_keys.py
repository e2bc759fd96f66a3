"""Yaml keys of the verl integration, and the errors that name them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from verl_calls import EstimatorOptions, Rows, algorithm, computed, direct, estimators, three
from verl_import import verl_module
from verl_rows import VerlRows

rows_module = verl_module("fastadv.integrations.verl.rows")
telling = rows_module.telling

# ---- errors ----------------------------------------------------------------------------------------------------------

KEY = r"algorithm\.fastadv"
HAJEK = {"arm": {"name": "h", "divisor": "hajek", "row_weights": {"rule": "rescue", "keep": 0.5}}}
WRONG: dict[str, tuple[str, dict[str, Any] | None, str]] = {
    "a key of another estimator": ("fastadv_rloo", {"kappa": 2}, rf"{KEY}.kappa is set.*fastadv_rloo does not read it"),
    "no such key": ("fastadv_turn", {"kapa": 2}, rf"{KEY}.kapa is no key of fastadv .did you mean 'kappa'"),
    "a value": ("fastadv_turn", {"kappa": -1}, rf"{KEY}.kappa is -1; pass a finite number"),
    "a choice": ("fastadv_turn", {"scale": "var"}, rf"{KEY}.scale is 'var'; it must be one of none, std"),
    "no mapping": ("fastadv_turn", [1], rf"{KEY} is \[1\]; pass a mapping"),
    "a trainer's key": ("fastadv_turn", {"trainer": {"x": 1}}, rf"{KEY}.trainer is read by our trainers"),
    "survivors of nothing": ("fastadv_turn", {"population": "survivors"}, rf"{KEY}.population=survivors.*fastadv_sync"),
    "no endings": ("fastadv_survivor", None, "fastadv_survivor needs how rollouts ended.*fastadv_sync"),
    "no values": ("fastadv_gae", None, r"fastadv_gae needs the critic's values.*fastadv_sync and critic.enable=True"),
    "no greedy rollouts": ("fastadv_remax", None, "fastadv_remax needs reward_baselines.*use_v1=False"),
    "no probabilities": ("fastadv_otb", None, "fastadv_otb needs old_log_probs.*optimal_token_baseline"),
    "no arm": ("fastadv_arm", None, rf"fastadv_arm needs {KEY}.arm"),
    "no such arm": ("fastadv_arm", {"arm": "masc"}, rf"{KEY}.arm: 'masc' is no arm .did you mean 'mask'..; they are"),
    "an arm of endings": ("fastadv_arm", {"arm": "mask"}, rf"{KEY}.arm=mask needs how rollouts ended.*fastadv_sync"),
    "an arm of versions": ("fastadv_arm", {"arm": "stale-tokens"}, rf"{KEY}.arm: .*versions.*fastadv_sync"),
    "a matched update": ("fastadv_arm", {"arm": "matched-update"}, f"{KEY}.arm=matched-update.*fastadv_sync"),
    "Hajek": ("fastadv_arm", HAJEK, rf"{KEY}.arm=h: divisor is 'hajek'"),
    "no estimator": ("fastadv", None, rf"adv_estimator=fastadv needs {KEY}.estimator"),
    "no such estimator": ("fastadv", {"estimator": "grpo"}, rf"{KEY}.estimator is 'grpo'; did you mean"),
    "an estimator of turns": ("fastadv", {"estimator": "turn_reached/fastadv"}, "take algorithm.adv_est.*fastadv_turn"),
    "an estimator of observations": ("fastadv", {"estimator": "gigpo/verl-agent"}, "compares observations"),
    "an estimator of values": ("fastadv", {"estimator": "gae/verl"}, rf"{KEY}.estimator=gae/verl needs the critic"),
    "an option": (
        "fastadv",
        {"estimator": "grpo/trl", "options": {"gama": 1}},
        rf"{KEY}.estimator: .*no option 'gama'",
    ),
    "options that are none": ("fastadv", {"estimator": "grpo/trl", "options": 1}, rf"{KEY}.options is 1; pass"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_key(case: str) -> None:
    name, fastadv, what = WRONG[case]
    b = VerlRows(2, 6, 5, pairs=True)
    with pytest.raises(ValueError, match=f"(?s){what}"):
        computed(name, b, algorithm(fastadv))


@pytest.mark.parametrize("key", ["gamma", "lam", "norm_adv_by_std_in_grpo"])
def test_errors_name_verls_keys(key: str) -> None:
    with pytest.raises(ValueError, match=rf"algorithm\.{key} is 'x'"):
        EstimatorOptions.of(algorithm(**{key: "x"}))


def test_no_uid() -> None:
    b = VerlRows(2, 6, 5)
    for name in ("fastadv_rloo", "fastadv_reinforce_plus_plus"):
        with pytest.raises(ValueError, match=r"uid is missing: data.non_tensor_batch\['uid'\]"):
            estimators.REGISTERED[name](b.rewards, b.mask, config=algorithm())
    call = estimators.REGISTERED["fastadv_rloo"]
    found = call(b.rewards, b.mask, non_tensor_batch={"uid": b.uid}, config=None)[0]
    assert torch.equal(found, computed("fastadv_rloo", b)[0])


@pytest.mark.parametrize("name", ["fastadv_rloo", "fastadv_turn", "fastadv_reinforce_plus_plus"])
def test_a_mask_without_a_token(name: str) -> None:
    b = VerlRows(2, 6, 5)
    b.mask.zero_()
    with pytest.raises(ValueError, match=rf"adv_estimator={name}: response_mask is 0 everywhere.*rollout_rs"):
        computed(name, b)


def test_shapes_that_differ() -> None:
    b = VerlRows(2, 6, 5)
    call = estimators.REGISTERED["fastadv_rloo"]
    with pytest.raises(ValueError, match=r"response_mask has shape \[6, 4\]; expected \[6, 5\]"):
        call(b.rewards, b.mask[:, :4], b.uid)
    with pytest.raises(ValueError, match="uid has 5 labels, token_level_rewards has 6 rows"):
        call(b.rewards, b.mask, b.uid[:5])
    with pytest.raises(ValueError, match=r"token_level_rewards has shape \[6\]"):
        call(b.scores, b.mask, b.uid)
    with pytest.raises(ValueError, match=r"old_log_probs has shape \[6, 4\]"):
        call(b.rewards, b.mask, b.uid, old_log_probs=b.log_probs[:, :4])
    with pytest.raises(ValueError, match=r"reward_baselines has shape \[5\]"):
        call(b.rewards, b.mask, b.uid, reward_baselines=b.greedy[:5])
    with pytest.raises(ValueError, match="fastadv's names are fastadv_grpo"):
        estimators.advantages("grpo", Rows.of_verl(b.rewards, b.mask, b.uid), EstimatorOptions())


# ---- configuration ---------------------------------------------------------------------------------------------------


def test_keys_through_hydra() -> None:
    hydra = verl_module("hydra")
    folder = verl_module("verl.trainer.config").__path__[0]
    overrides = ["algorithm.adv_estimator=fastadv_turn", "+algorithm.fastadv.kappa=3", "algorithm.gamma=0.5"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra's, about omegaconf
        with hydra.initialize_config_dir(config_dir=folder, version_base=None):
            config = hydra.compose("ppo_trainer", overrides=overrides)
    options = EstimatorOptions.of(config.algorithm)
    assert (options.kappa, options.gamma, options.given) == (3, 0.5, {"kappa"})
    assert EstimatorOptions.of(config.algorithm.copy()).shrink_to == "loo"
    b = three()
    assert torch.equal(computed("fastadv_turn", b, config.algorithm)[0], direct("fastadv_turn", b, {"kappa": 3}))


def test_keys_of_verls_dataclass_and_of_none() -> None:
    config = verl_module("verl.trainer.config").AlgoConfig(gamma=0.5, norm_adv_by_std_in_grpo=False)
    options = EstimatorOptions.of(config)
    assert (options.gamma, options.norm_adv_by_std_in_grpo) == (0.5, False)
    assert EstimatorOptions.of(None) == EstimatorOptions()


def test_rows_are_replaced_not_changed() -> None:
    b = VerlRows(2, 6, 5)
    rows = Rows.of_verl(b.rewards, b.mask, b.uid)
    before = rows.rewards.clone()
    estimators.advantages("fastadv_reinforce_plus_plus_baseline", rows, EstimatorOptions())
    assert torch.equal(rows.rewards, before)
    assert replace(rows, train_version=3).train_version == 3


def test_what_a_trainer_tells_ends_with_the_context() -> None:
    with telling(train_version=1):
        with telling(train_version=2) as inner:
            assert rows_module.told() is inner
        assert rows_module.told().fields == {"train_version": 1}
    assert rows_module.told() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_advantages_are_float32_whatever_rewards_are(dtype: torch.dtype) -> None:
    b = VerlRows(2, 6, 5, pairs=True)
    for name in ("fastadv_grpo", "fastadv_turn", "fastadv_reinforce_plus_plus", "fastadv_passk"):
        expected = computed(name, b)
        found = estimators.REGISTERED[name](b.rewards.to(dtype), b.mask, b.uid)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_padding_that_is_named_and_lists_that_coins_read() -> None:
    b = three()
    found = direct("fastadv_rloo", b, padding=torch.tensor([False, True, False]))
    assert found[:, 0].tolist() == [1, 0, -1]
    ids = rows_module.stable_ids(["a", "b", "a"])
    assert ids["group_ids"][0] == ids["group_ids"][2] != ids["group_ids"][1]
    assert len(set(ids["row_ids"].tolist())) == 3
    assert torch.equal(rows_module.stable_ids(["b", "a", "a"])["row_ids"], ids["row_ids"][[1, 0, 2]])
    assert rows_module.stable_ids([])["row_ids"].shape == (0,)
