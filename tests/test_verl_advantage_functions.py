"""Functions with verl's names beside verl 0.9.1's own: values, arguments, and each difference that is listed."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from verl_import import verl_module
from verl_rows import VerlRows

ours = verl_module("fastadv.integrations.verl.advantage_functions")
algos = verl_module("verl.trainer.ppo.core_algos")
OmegaConf = verl_module("omegaconf").OmegaConf

DRAWN = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SIZES = st.tuples(st.integers(0, 10**6), st.integers(2, 14), st.integers(2, 40))
NEAR = {"rtol": 2e-5, "atol": 2e-5}  # float32 sums over some hundred tokens there

PLAIN = OmegaConf.create({"gamma": 0.97, "norm_adv_by_std_in_grpo": False})
STD = OmegaConf.create({"gamma": 1.0, "norm_adv_by_std_in_grpo": True})
BASELINE = ("index", "old_log_probs", "sum_pi_squared")

# By name in verl's registry: arguments, and options that are drawn from.
CASES: dict[str, tuple[tuple[str, ...], tuple[dict[str, Any], ...]]] = {
    "grpo": (("index",), ({}, {"norm_adv_by_std_in_grpo": False}, {"epsilon": 0.1})),
    "grpo_vectorized": (("index",), ({}, {"norm_adv_by_std_in_grpo": False}, {"epsilon": 0.1})),
    "gdpo": (("index",), ({},)),
    "grpo_passk": (("index",), ({"config": STD}, {"config": PLAIN}, {"config": STD, "epsilon": 0.1})),
    "rloo": (("index",), ({},)),
    "rloo_vectorized": (("index",), ({},)),
    "opo": (("index",), ({},)),
    "gpg": (("index",), ({}, {"f_norm": 2.0})),
    "reinforce_plus_plus": ((), ({"config": PLAIN}, {"config": STD})),
    "reinforce_plus_plus_baseline": (("index",), ({},)),
    "remax": (("reward_baselines",), ({},)),
    "gae": (("values",), ({"gamma": 0.97, "lam": 0.9}, {"gamma": torch.tensor(1.0), "lam": torch.tensor(1.0)})),
    "optimal_token_baseline": (BASELINE, ({}, {"handle_zero_tail": False}, {"epsilon": 0.1})),
    "tir_optimal_token_baseline": (BASELINE, ({}, {"handle_zero_tail": False}, {"epsilon": 0.1})),
}
TOKENS = ("gae", "remax", "reinforce_plus_plus", "optimal_token_baseline", "tir_optimal_token_baseline")


def theirs(name: str) -> Any:
    """verl's function, whatever is registered by now."""
    function = algos.get_adv_estimator_fn(name)
    assert function.__module__ == "verl.trainer.ppo.core_algos"
    return function


def mine(name: str) -> Any:
    return getattr(ours, theirs(name).__name__)


def test_every_estimator_of_verl_is_here() -> None:
    assert set(CASES) == {name for name in algos.ADV_ESTIMATOR_REGISTRY if not name.startswith("fastadv")}


@pytest.mark.parametrize("name", CASES)
def test_arguments_are_verls(name: str) -> None:
    expected, found = (dict(inspect.signature(f(name)).parameters) for f in (theirs, mine))
    if name == "grpo_vectorized":
        found.pop("kwargs")  # DIFFERENCES
    assert [(p.name, p.default, p.kind) for p in found.values()] == [
        (p.name, p.default, p.kind) for p in expected.values()
    ]


@pytest.mark.parametrize("name", CASES)
@DRAWN
@given(size=SIZES, option=st.integers(0, 2), empty=st.sampled_from([0.0, 0.3]), outside=st.booleans())
def test_values(name: str, size: tuple[int, int, int], option: int, empty: float, outside: bool) -> None:
    names, options = CASES[name]
    b = VerlRows(*size, pairs="passk" in name, empty=empty, outside=outside, token_rewards=name in TOKENS)
    chosen = options[option % len(options)]
    if name in ours.WHITENED and int(b.mask.sum()) < 2:
        return  # an error there, see test_a_mask_with_one_token
    expected = theirs(name)(
        **b.call(*names, *(["rollout_is_weights"] if option == 1 and "optimal" in name else [])), **chosen
    )
    found = mine(name)(
        **b.call(*names, *(["rollout_is_weights"] if option == 1 and "optimal" in name else [])), **chosen
    )
    there = b.mask.bool()
    for mine_, other in zip(found, expected, strict=True):
        assert mine_.dtype == other.dtype == torch.float32
        assert not mine_[~there].any()
        whole = other.isfinite()  # opo: 0 / 0, in rows without a token
        assert bool((whole | ~there).all())
        torch.testing.assert_close(mine_[there], other[there], **NEAR)


@pytest.mark.parametrize(("name", "options"), [(n, o) for n in CASES if n != "grpo_passk" for o in CASES[n][1]])
def test_groups_of_one(name: str, options: dict[str, Any]) -> None:
    b = VerlRows(1, 6, 12)
    b.uid = np.array([f"uid-{row}" for row in range(6)], dtype=object)
    found, expected = (f(name)(**b.call(*CASES[name][0]), **options)[0] for f in (mine, theirs))
    torch.testing.assert_close(found, expected * b.mask, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gae", "optimal_token_baseline"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masks_of_any_type(name: str, dtype: torch.dtype) -> None:
    names, options = CASES[name]
    b = VerlRows(1, 9, 12)
    expected = mine(name)(**b.call(*names), **options[0])
    b.mask = b.mask.to(dtype)
    for found, other in zip(mine(name)(**b.call(*names), **options[0]), expected, strict=True):
        assert torch.equal(found, other)


def test_nothing_that_is_passed_is_changed() -> None:
    b = VerlRows(5, 9, 12, token_rewards=True)
    for name, (names, options) in CASES.items():
        if name != "grpo_passk":
            call = b.call(*names)
            kept = {key: value.clone() for key, value in call.items() if isinstance(value, torch.Tensor)}
            mine(name)(**call, **options[0])
            assert all(torch.equal(call[key], value) for key, value in kept.items())


# ---- GDPO ------------------------------------------------------------------------------------------------------------


@DRAWN
@given(size=SIZES, weights=st.sampled_from([None, [1.0, 0.5]]), scaled=st.booleans())
def test_gdpo_of_several_rewards(size: tuple[int, int, int], weights: list[float] | None, scaled: bool) -> None:
    b = VerlRows(*size)
    rows, width = b.mask.shape
    g = np.random.default_rng(size[0])
    fields = {
        "format": g.integers(0, 2, rows).astype(object),
        "accuracy": g.integers(0, 5, rows) / 4.0,
        "uid": b.uid,
    }
    batch = {"prompts": torch.zeros(rows, 3), "attention_mask": torch.ones(rows, 3 + width, dtype=torch.int64)}
    config = OmegaConf.create({"gdpo_reward_keys": ["format", "accuracy"], "gdpo_reward_weights": weights})
    call = {"config": config, "non_tensor_batch": fields, "batch": batch, "norm_adv_by_std_in_grpo": scaled}
    if int(b.mask.sum()) < 2:
        return
    expected = theirs("gdpo")(**b.call("index"), **call)[0]
    found = mine("gdpo")(**b.call("index"), **call)[0]
    torch.testing.assert_close(found, expected, **NEAR)


@pytest.mark.parametrize(("keys", "what"), [(None, "is not set"), (["speed"], "'speed'.*does not return")])
def test_gdpo_without_its_rewards(keys: list[str] | None, what: str) -> None:
    b = VerlRows(1, 4, 5)
    batch = {"prompts": torch.zeros(4, 1), "attention_mask": torch.ones(4, 6)}
    for function in (theirs("gdpo"), mine("gdpo")):
        config = OmegaConf.create({"gdpo_reward_keys": keys})
        with pytest.raises(AssertionError, match=r"gdpo_reward_keys|not found"):
            function(**b.call("index"), config=config, non_tensor_batch={}, batch=batch)
    with pytest.raises(AssertionError, match=f"algorithm.gdpo_reward_keys.*{what}"):
        mine("gdpo")(**b.call("index"), config=config, non_tensor_batch={}, batch=batch)


# ---- where verl refuses, and so do we --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo_passk", "reinforce_plus_plus"])
def test_no_config(name: str) -> None:
    b = VerlRows(1, 4, 5, pairs=True)
    for function in (theirs(name), mine(name)):
        with pytest.raises(AssertionError):
            function(**b.call(*CASES[name][0]))


def test_passk_of_one() -> None:
    b = VerlRows(1, 4, 5)
    b.uid = np.array(["a", "a", "a", "b"], dtype=object)
    for function in (theirs("grpo_passk"), mine("grpo_passk")):
        with pytest.raises(ValueError, match=r"at least 2 samples|needs a second"):
            function(**b.call("index"), config=STD)


# ---- DIFFERENCES, one test each --------------------------------------------------------------------------------------


def test_numbers_outside_of_the_mask() -> None:
    b = VerlRows(3, 9, 12, token_rewards=True)
    (entry,) = [d for d in ours.DIFFERENCES if "outside of the mask" in d.verl]
    for name in entry.functions:
        names, options = CASES[name]
        out = b.mask == 0
        assert any(bool(t[out].any()) for t in theirs(name)(**b.call(*names), **options[0]))
        assert not any(bool(t[out].any()) for t in mine(name)(**b.call(*names), **options[0]))


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
def test_a_group_of_equal_rewards(name: str) -> None:
    b = VerlRows(3, 7, 4)
    b.uid, b.mask = np.array(["a"] * 7, dtype=object), torch.ones_like(b.mask)
    b.rewards.zero_()[:, -1] = 0.7
    assert not mine(name)(**b.call("index"))[0].any()
    assert float(theirs(name)(**b.call("index"))[0].abs().max()) > 1e-3


@pytest.mark.parametrize("name", ours.WHITENED)
@pytest.mark.parametrize("tokens", [0, 1])
def test_a_mask_with_one_token(name: str, tokens: int) -> None:
    b = VerlRows(3, 4, 5)
    b.mask.zero_()[0, 0] = tokens
    names, options = CASES[name]
    with pytest.raises(ValueError, match="mask"):
        theirs(name)(**b.call(*names), **options[0])
    assert not mine(name)(**b.call(*names), **options[0])[0].any()


def test_opo_of_a_group_without_tokens() -> None:
    b = VerlRows(3, 4, 5)
    b.uid, b.mask = np.array(["a"] * 4, dtype=object), torch.zeros_like(b.mask)
    assert bool(theirs("opo")(**b.call("index"))[0].isnan().all())
    assert not mine("opo")(**b.call("index"))[0].any()


@pytest.mark.parametrize("name", [*ours.GROUPED, "reinforce_plus_plus_baseline"])
def test_a_reward_that_is_not_finite(name: str) -> None:
    b = VerlRows(3, 6, 5, pairs=True)
    b.rewards[2, 0] = float("nan")
    with pytest.raises(ValueError, match=r"rewards\[2\] is nan"):
        mine(name)(**b.call("index"), **CASES[name][1][0])


def test_labels_of_any_kind_and_bfloat16() -> None:
    b = VerlRows(3, 6, 5, pairs=True)
    expected = mine("rloo_vectorized")(**b.call("index"))[0]
    assert (
        theirs("rloo_vectorized")(**{**b.call("index"), "token_level_rewards": b.rewards.bfloat16()})[0].dtype
        == torch.float64
    )
    assert (
        mine("rloo_vectorized")(**{**b.call("index"), "token_level_rewards": b.rewards.bfloat16()})[0].dtype
        == torch.float32
    )
    b.uid = np.array([int(uid[4:]) - 1 for uid in b.uid])
    assert torch.equal(mine("rloo_vectorized")(**b.call("index"))[0], expected)
    with pytest.raises((IndexError, RuntimeError)):
        theirs("grpo_vectorized")(**b.call("index"))
    mine("grpo_vectorized")(**b.call("index"))


def test_grpo_vectorized_beside_baselines_of_remax() -> None:
    b = VerlRows(3, 6, 5)
    with pytest.raises(TypeError):
        theirs("grpo_vectorized")(**b.call("index", "reward_baselines"))
    mine("grpo_vectorized")(**b.call("index", "reward_baselines"))


def test_differences_name_what_verl_has() -> None:
    for difference in ours.DIFFERENCES:
        assert set(difference.functions) <= set(CASES)
