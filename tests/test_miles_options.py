"""The mapping `fastadv:` of Miles' and slime's YAML, and the flags that it cannot be combined with."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastadv.integrations.miles import Options, reward_post_process
from fastadv.integrations.miles.checks import check_run
from miles_standins import arguments, make

import fastadv as fa

ARM = {"arm": "mask"}


def test_an_arm_is_read_by_name_and_as_a_mapping() -> None:
    by_name = Options.of(arguments({"arm": "rescue:a=0.5", "seed": 7}))
    assert by_name.arm == fa.named_arm("rescue:a=0.5", seed=7)
    written = fa.arm_to_dict(fa.named_arm("turn-reached:kappa=3"))
    assert Options.of(arguments({"arm": written, "turns": "init"})).arm == fa.named_arm("turn-reached:kappa=3")


def test_options_are_printed_once_with_their_hash(caplog: pytest.LogCaptureFixture) -> None:
    mapping = {"arm": "survivors", "seed": 12345, "solved_above": 0.5}
    with caplog.at_level(logging.INFO, "fastadv"):
        first, second = Options.of(arguments(dict(mapping))), Options.of(arguments(dict(mapping)))
    assert first is second
    assert len(caplog.messages) == 1
    assert first.hash[:12] in caplog.text
    assert "survivors" in caplog.text
    assert "solved_above: 0.5" in caplog.text
    assert Options.of(arguments({**mapping, "seed": 1})).hash != first.hash


def test_a_file_named_by_the_environment(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("fastadv:\n  estimator: rloo/trl\n  reward:\n    zero_on_cap: keep\n")
    monkeypatch.setenv("FASTADV_CONFIG", str(file))
    options = Options.of(arguments())
    assert options.estimator == "rloo/trl"
    assert options.reward.zero_on_cap == "keep"
    monkeypatch.delenv("FASTADV_CONFIG")
    with pytest.raises(ValueError, match="--custom-config-path"):
        Options.of(arguments())


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"arm": "mask", "estimator": "grpo/miles"}, "both are given"),
        ({"amr": "mask"}, r"fastadv.amr is no key of fastadv.*did you mean 'arm'"),
        ({"arm": "masc"}, r"fastadv.arm: .*'mask'"),
        ({"arm": {"name": "x", "bassline": "loo"}}, r"fastadv.arm: .*bassline"),
        ({"estimator": "grpo"}, r"fastadv.estimator is 'grpo'"),
        ({**ARM, "exclusion": "drop"}, "fastadv.exclusion is 'drop'; it must be one of weight, mask"),
        ({**ARM, "divisor": "sum"}, "fastadv.divisor is 'sum'"),
        ({**ARM, "solved_above": float("nan")}, "fastadv.solved_above"),
        ({**ARM, "timeout": "solved"}, "fastadv.timeout"),
        ({**ARM, "turns": "yes"}, "fastadv.turns is 'yes'"),
        ({**ARM, "seed": 1.5}, "fastadv.seed is 1.5; pass a whole number"),
        ({**ARM, "seed": True}, "fastadv.seed is True"),
        ({**ARM, "options": {"gamma": 1}}, r"fastadv.options is set, but only fastadv.estimator reads it"),
        ({**ARM, "filter": "all"}, "fastadv.filter is 'all'"),
        ({**ARM, "filter": "predictable"}, "fastadv.filter_turns says which turns stay"),
        ({**ARM, "filter": "predictable", "filter_turns": 0}, "fastadv.filter_turns is 0; it must be at least 1"),
        ({**ARM, "filter": "random", "filter_share": 1.5}, "fastadv.filter_share is 1.5; it must be from 0 to 1"),
        ({**ARM, "filter_share": 0.5}, "only fastadv.filter: random reads it"),
        ({**ARM, "reward": {"overlong": {"factor": 1}}}, "fastadv.reward.overlong.cache_length"),
        ({**ARM, "reward": {"zero": True}}, "fastadv.reward.zero is no key"),
        ({"loss": "pppo"}, r"fastadv.loss.preset is 'pppo'; it must be one of reinforce, "),
        ({"loss": {"clip_lo": 0.1}}, r"fastadv.loss: 'clip_lo' is no option"),
        ({"loss": {"preset": "sapo", "clip_low": 0.1}}, r"fastadv.loss: clip_low is an option of"),
        ({"loss": {"loss_agg_mode": "token-mean"}}, "the trainer sums and divides by itself"),
        ({"loss": {"kl": {"estimater": "k3"}}}, r"fastadv.loss.kl.estimater is 'k3'.*estimator"),
        ({"loss": 3}, "fastadv.loss is 3"),
        ({"correction": {"kind": "tiz"}}, r"fastadv.correction: kind is 'tiz'"),
        ({"correction": "tis"}, "fastadv.correction is 'tis'; it must be a mapping"),
        ({"projections": {}}, "fastadv.projections.file is None; name a file"),
        ({"projections": {"file": "x", "sise": 3}}, "fastadv.projections.sise is no key"),
        ({"projections": {"file": "x", "size": 3}}, "fastadv.projections: size is 3"),
        ({"horizon": 0}, "fastadv.horizon is 0; it must be positive"),
        ("mask", "fastadv is 'mask'; it must be a mapping"),
        ([1], "it must be a mapping"),
    ],
)
def test_wrong_keys_and_values_are_explained(mapping: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.of(arguments(mapping))


@pytest.mark.parametrize(
    ("mapping", "flags", "message"),
    [
        ({}, {}, "one of fastadv.arm and fastadv.estimator"),
        ({"arm": "rescue:a=0.5"}, {"normalize_advantages": True}, "--normalize-advantages"),
        ({"arm": "mask"}, {"normalize_advantages": True}, "--normalize-advantages"),
        ({"arm": "turn-reached", "turns": "init"}, {"normalize_advantages": True}, "--normalize-advantages"),
        ({"arm": "mask"}, {"advantage_estimator": "ppo"}, "--advantage-estimator ppo.*grpo, gspo, cispo"),
        (
            {"arm": "mask", "exclusion": "mask"},
            {"advantage_estimator": "reinforce_plus_plus"},
            "fails on a sample whose mask is 0 everywhere",
        ),
        (
            {"estimator": "grpo/miles"},
            {"advantage_estimator": "reinforce_plus_plus_baseline", "rollout_sample_filter_path": "a.b"},
            "fails on a sample whose mask is 0 everywhere",
        ),
        ({"arm": "nat-urs"}, {}, "weight or an advantage for every token"),
        ({"arm": "position-buckets"}, {}, "for every token"),
        ({"estimator": "gae/miles"}, {}, "gives an advantage a token"),
        ({"estimator": "turn_reached/fastadv"}, {}, "gives an advantage a turn.*fastadv.arm: turn-reached"),
        ({"estimator": "gigpo/verl-agent"}, {}, "gives an advantage a turn"),
        ({"arm": "turn-reached"}, {}, "fastadv.turns does not say how"),
        ({"arm": "mask", "turns": "init"}, {}, "fastadv.turns is init, but"),
        ({"estimator": "grpo/miles", "turns": "flags"}, {}, "fastadv.turns is flags, but"),
        ({"arm": "turn-reached", "turns": "init"}, {"use_opsm": True}, "--use-opsm"),
        ({"arm": "turn-reached", "turns": "init"}, {"log_multi_turn": True}, "--log-multi-turn"),
        ({"arm": "turn-reached", "turns": "flags"}, {}, "--use-opd --opd-type sglang --opd-kl-coef -1"),
        (
            {"arm": "turn-reached", "turns": "flags"},
            {"use_opd": True, "opd_type": "sglang", "opd_kl_coef": 1.0},
            "--opd-kl-coef -1",
        ),
        (
            {"arm": "turn-reached", "turns": "flags"},
            {"use_opd": True, "opd_type": "sglang", "opd_kl_coef": -1.0, "loss_type": "score_centering"},
            "score_centering does not read opd_reverse_kl",
        ),
        ({"arm": "matched-update"}, {}, "scales the learning rate"),
    ],
)
def test_combinations_that_would_destroy_something_are_refused(
    mapping: dict[str, Any], flags: dict[str, Any], message: str
) -> None:
    args = arguments(mapping, **flags)
    with pytest.raises(ValueError, match=message):
        check_run(args, Options.of(args))
    with pytest.raises(ValueError, match=message):
        reward_post_process(args, [make(1.0, index=i) for i in range(4)])


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("mapping", [{"arm": "none"}, {"arm": "mask"}, {"estimator": "dr_grpo/trl"}])
def test_what_fits_is_not_refused(estimator: str, mapping: dict[str, Any]) -> None:
    args = arguments(mapping, advantage_estimator=estimator)
    check_run(args, Options.of(args))


def test_whitening_after_an_arm_that_weights_nothing_is_allowed() -> None:
    args = arguments({"arm": "none"}, normalize_advantages=True)
    check_run(args, Options.of(args))
