"""The losses that verl calls by name beside verl's own, and what they do with keys, denominators and bad input."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("verl", reason="verl is not installed")

from fastadv.integrations.verl.policy_loss_config import PolicyLossConfig
from fastadv.integrations.verl.policy_losses import NAMED, POLICY_LOSSES
from verl.trainer.ppo import core_algos
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import PolicyLossConfig as VerlPolicyLossConfig
from verl_batches import INFOS, MODES, Batch, actor, assert_same, batch, batches, run

import fastadv as fa
from fastadv.losses import PRESETS, SELECTING_LOSSES

FEW = settings(max_examples=15)
# Ours by verl's name. clip_cov picks every token that it may, so that no coin decides.
OF_VERL = {
    "vanilla": "ppo", "gspo": "gspo", "sapo": "sapo", "cispo": "cispo", "gpg": "gpg", "geo_mean": "geo_mean",
    "clip_cov": "clip_cov", "kl_cov": "kl_cov", "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl", "dro": "dro",
}  # fmt: skip
KEYS = {
    "policy_loss": VerlPolicyLossConfig(
        clip_cov_ratio=1.0, clip_cov_lb=0.05, kl_cov_ratio=0.3, ppo_kl_coef=0.4, dro_beta=0.3
    ),
    "clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.3,
}  # fmt: skip
HORIZON = {"loss_scale_factor": 17}


def theirs(name: str) -> Any:
    return core_algos.get_policy_loss_fn(name)


def test_every_loss_of_verl_is_here() -> None:
    left_out = {"bypass_mode"}  # it calls two of the others
    ours = {name for name in core_algos.POLICY_LOSS_REGISTRY if not name.startswith("fastadv")}
    assert ours - left_out == OF_VERL.keys()


@pytest.mark.parametrize("name", sorted(OF_VERL.keys() - {"geo_mean"}))
@FEW
@given(b=batches(), mode=st.sampled_from(MODES), info=INFOS)
def test_equal_to_verl(name: str, b: Batch, mode: str, info: dict[str, Any]) -> None:
    config = actor(HORIZON | info, **KEYS)
    ours = run(POLICY_LOSSES[f"fastadv_{OF_VERL[name]}"], b, mode, config)
    assert_same(ours, run(theirs(name), b, mode, config))


@FEW
@given(b=batches(), info=INFOS)
def test_geo_mean(b: Batch, info: dict[str, Any]) -> None:
    """verl takes the mean over the rows that it sees; ours divides by the mini-batch's, where verl counted them."""
    config = actor(info, **KEYS)
    ours, verls = (run(f, b, "token-mean", config) for f in (POLICY_LOSSES["fastadv_geo_mean"], theirs("geo_mean")))
    factor = b.log_prob.shape[0] / info["global_batch_size"] * info["dp_size"] if info else 1.0
    assert_same(ours, verls._replace(loss=verls.loss * factor, gradient=verls.gradient * factor))


def test_reinforce_is_that_of_bypass_mode() -> None:
    b = batch(4, 9, weighted=True)
    config = actor()
    ours = run(POLICY_LOSSES["fastadv_reinforce"], b, "seq-mean-token-sum", config)

    def verls(old_log_prob: Any, **fields: Any) -> Any:
        return core_algos.compute_policy_loss_reinforce(rollout_log_prob=old_log_prob, **fields)

    assert_same(ours, run(verls, b, "seq-mean-token-sum", config))


@pytest.mark.parametrize(("name", "config"), [
    ("luspo", PRESETS["luspo"].but(clip_low=0.1, clip_high=0.15)),  # its aggregation is its own
    ("vespo", PRESETS["vespo"].but(loss_agg_mode="token-sum")),
])  # fmt: skip
def test_losses_that_verl_lacks(name: str, config: fa.LossConfig) -> None:
    b = batch(4, 9, 3, weighted=True)
    ours = run(POLICY_LOSSES[f"fastadv_{name}"], b, "token-sum", actor(**KEYS))
    expected = fa.policy_loss(*b[:4], config=config, is_weights=b.rollout_is_weights)
    torch.testing.assert_close(ours.loss, expected.loss)
    assert ours.metrics["actor/ppo_kl"] == float(expected.metrics["approx_kl"])


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("weighted", [False, True])
def test_presets(preset: str, weighted: bool) -> None:
    config = PRESETS[preset]
    weighted = weighted and config.loss != "gmpo"  # its weights are of whole rollouts
    b = batch(4, 9, 3, weighted=weighted)
    ours = run(
        POLICY_LOSSES["fastadv"], b, "token-sum", actor(HORIZON, PolicyLossConfig(loss_mode="fastadv", preset=preset))
    )
    leaf = b.log_prob.clone().requires_grad_()
    given = {}
    if config.loss in SELECTING_LOSSES:
        given["selected"] = fa.covariance_selection(*b[:4], config=config)
    loss, _ = fa.policy_loss(
        leaf, *b[1:4], config=config.but(horizon=17.0 if "norm" in config.loss_agg_mode else None),
        is_weights=b.rollout_is_weights, **given,
    )  # fmt: skip
    loss.backward()
    torch.testing.assert_close(ours.loss, loss.detach())
    torch.testing.assert_close(ours.gradient, leaf.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(NAMED.keys() - set(SELECTING_LOSSES)))
@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)])
def test_the_gradient_is_that_of_the_whole_batch(name: str, mode: str, ranks: int, parts: int) -> None:
    """Micro-batches add up; ranks are averaged, as FSDP does, or their micro-batches too, as Megatron does."""
    b = batch(8, 11, 5, weighted=True)
    info = {"batch_num_tokens": int(b.response_mask.sum()), "global_batch_size": 8, "loss_scale_factor": 30}
    function = POLICY_LOSSES[f"fastadv_{name}"]
    whole = run(function, b, mode, actor(info | {"dp_size": 1}, **KEYS))
    config = actor(info | {"dp_size": ranks}, **KEYS)
    rows = 8 // (ranks * parts)
    results = [run(function, b.part(slice(i, i + rows)), mode, config) for i in range(0, 8, rows)]
    torch.testing.assert_close(sum(r.loss for r in results) / ranks, whole.loss, rtol=1e-5, atol=1e-6)
    gradient = torch.cat([r.gradient for r in results]) / ranks
    torch.testing.assert_close(gradient, whole.gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_what_lies_outside_of_the_mask_is_not_read(name: str) -> None:
    b = batch(4, 9, 2, weighted=True)
    results = []
    for garbage in (0.5, torch.nan, torch.inf):
        fields = [t if t is b.response_mask else torch.where(b.response_mask, t, garbage) for t in b]
        torch.manual_seed(0)
        leaf = fields[0].requires_grad_()
        loss, metrics = POLICY_LOSSES[f"fastadv_{name}"](
            old_log_prob=fields[1], log_prob=leaf, advantages=fields[2], response_mask=fields[3],
            loss_agg_mode="seq-mean-token-sum", config=actor(**KEYS), rollout_is_weights=fields[4],
        )  # fmt: skip
        loss.backward()
        results.append((loss.item(), leaf.grad, metrics))
    for other in results[1:]:
        assert other[0] == results[0][0]
        assert torch.equal(other[1], results[0][1])
        assert other[2] == results[0][2]


@pytest.mark.parametrize("info", [{}, {"dp_size": 2, "batch_num_tokens": 0, "global_batch_size": 8}])
@pytest.mark.parametrize("name", sorted(NAMED))
def test_no_token(name: str, info: dict[str, Any]) -> None:
    b = batch(3, 5)._replace(response_mask=torch.zeros(3, 5, dtype=torch.bool))
    result = run(POLICY_LOSSES[f"fastadv_{name}"], b, "token-mean", actor(info, **KEYS))
    assert result.loss == 0
    assert not result.gradient.any()
    assert all(value == 0 for value in result.metrics.values())


class Waits(TorchDispatchMode):
    """Counts what would wait for a GPU: numbers that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_metrics_are_numbers_read_at_once() -> None:
    """verl's Metric reads a tensor as it gets it, each with a wait; ours come as numbers, in one copy."""
    b = batch(4, 9)
    waits = []
    for function in (POLICY_LOSSES["fastadv_ppo"], theirs("vanilla")):
        with Waits() as mode:
            _, metrics = function(*b[1:2], b.log_prob, *b[2:4], config=actor())
            made = Metric.from_dict(metrics, aggregation=AggregationType.MEAN)
        waits.append(mode.count)
        assert all(type(value) is float for value in metrics.values())
        assert made["actor/ppo_kl"].aggregate() == metrics["actor/ppo_kl"]
    assert waits == [0, 3]


def test_a_coin_of_clip_cov_is_new_in_every_call_and_seeded_by_torch() -> None:
    b = batch(6, 20)
    config = actor(policy_loss=VerlPolicyLossConfig(clip_cov_ratio=0.05, clip_cov_lb=-9.0, clip_cov_ub=9.0))
    function = POLICY_LOSSES["fastadv_clip_cov"]
    torch.manual_seed(1)
    first, second = (run(function, b, "token-mean", config) for _ in range(2))
    torch.manual_seed(1)
    again = run(function, b, "token-mean", config)
    assert not torch.equal(first.gradient, second.gradient)
    assert torch.equal(first.gradient, again.gradient)
    picked = int(0.05 * int(b.response_mask.sum()))
    verls = run(theirs("clip_cov"), b, "token-mean", config)
    share = first.metrics["actor/pg_clipfrac"]
    assert share == pytest.approx(picked / int(b.response_mask.sum()))
    assert share == pytest.approx(verls.metrics["actor/pg_clipfrac"])


# ---- keys ------------------------------------------------------------------------------------------------------------


def call(name: str = "fastadv_ppo", mode: str = "token-mean", config: Any = None, **changes: Any) -> Any:
    b = batch(3, 5)._replace(**changes)
    return POLICY_LOSSES[name](**b._asdict(), loss_agg_mode=mode, config=actor() if config is None else config)


def test_own_keys_win_over_the_actors() -> None:
    b = batch(4, 9, 1)
    own = PolicyLossConfig(loss_mode="fastadv_ppo", clip_low=0.05, dual_clip=None, delta=1.4)
    ours = run(POLICY_LOSSES["fastadv_ppo"], b, "token-mean", actor(policy_loss=own, clip_ratio_high=0.3))
    config = fa.LossConfig(clip_low=0.05, clip_high=0.3, delta=1.4)
    expected = fa.policy_loss(*b[:4], config=config).loss
    torch.testing.assert_close(ours.loss, expected)
    assert fa.policy_loss(*b[:4], config="ppo/verl").loss != expected


def test_another_mode_than_the_presets_has_its_own_divisor() -> None:
    b = batch(4, 9, 1)
    own = PolicyLossConfig(loss_mode="fastadv", preset="grpo", loss_agg_mode="token-mean")
    ours = run(POLICY_LOSSES["fastadv"], b, "token-sum", actor(policy_loss=own))
    torch.testing.assert_close(ours.loss, fa.policy_loss(*b[:4], config="ppo").loss)


def test_a_sequence_mask_reports_what_it_leaves_out() -> None:
    b = batch(4, 9, 1)
    own = PolicyLossConfig(loss_mode="fastadv_ppo", sequence_mask={"delta": 0.01})
    ours = run(POLICY_LOSSES["fastadv_ppo"], b, "token-mean", actor(policy_loss=own))
    config = PRESETS["ppo/verl"].but(sequence_mask=fa.SequenceMask(0.01))
    loss, metrics = fa.policy_loss(*b[:4], config=config)
    torch.testing.assert_close(ours.loss, loss)
    assert metrics["sequence_mask_fraction"] > 0
    assert ours.metrics["actor/sequence_mask_fraction"] == float(metrics["sequence_mask_fraction"])


def test_a_correction_of_reinforce_is_to_the_samplers_log_probs() -> None:
    """In bypass mode the old log-probs are the sampler's, and the policy is what the ratio is of."""
    b = batch(4, 9, 1)
    own = PolicyLossConfig(loss_mode="fastadv_reinforce", correction={"kind": "tis", "high": 1.1})
    ours = run(POLICY_LOSSES["fastadv_reinforce"], b, "token-mean", actor(policy_loss=own))
    weights = (b.log_prob - b.old_log_prob).exp().clamp(max=1.1)
    expected = run(POLICY_LOSSES["fastadv_reinforce"], b._replace(rollout_is_weights=weights), "token-mean", actor())
    torch.testing.assert_close(ours.loss, expected.loss)
    torch.testing.assert_close(ours.gradient, expected.gradient)


def test_a_lower_clip_above_one_is_none() -> None:
    b = batch(4, 9)
    config = actor(clip_ratio_low=10.0, clip_ratio_high=0.2)
    assert_same(*(run(f, b, "token-mean", config) for f in (POLICY_LOSSES["fastadv_cispo"], theirs("cispo"))))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"detla": 1.3},
            r"actor_rollout_ref\.actor\.policy_loss\.detla is 1\.3; did you mean 'delta'\? the keys are loss_mode, ",
        ),
        ({"preset": "pppo"}, r"policy_loss\.preset is 'pppo'; it must be one of reinforce, gpg, ppo, "),
        ({}, r"policy_loss\.preset is None; it must be one of .*_target_=fastadv\.integrations\.verl"),
        ({"preset": "ppo", "clip_low": -1}, r"policy_loss: clip_low is -1; it must be in \[0, 1\]"),
        ({"preset": "ppo", "tau_pos": 2.0}, r"policy_loss: tau_pos is an option of 'sapo'; the 'ppo' loss ignores it"),
        ({"preset": "ppo", "kl": 0.1}, r"policy_loss\.kl is 0\.1; .*actor\.use_kl_loss"),
        ({"preset": "ppo", "horizon": 9}, r"policy_loss\.horizon is 9; use actor\.loss_scale_factor"),
        (
            {"preset": "ppo", "sequence_mask": {"dleta": 1}},
            r"policy_loss\.sequence_mask\.dleta is 1; did you mean 'delta'\? the keys are delta, ",
        ),
        ({"preset": "ppo", "sequence_mask": {"delta": -1}}, r"policy_loss\.sequence_mask: delta is -1"),
        ({"preset": "ppo", "sequence_mask": 3}, r"policy_loss\.sequence_mask is 3; it must be a mapping"),
        (
            {"preset": "ppo", "sequence_mask": {"delta": 1, "log_probs": "rollout"}},
            r"policy_loss\.sequence_mask\.log_probs is 'rollout'; .*use old",
        ),
        ({"preset": "ppo", "correction": {"kind": "tis"}}, r"policy_loss\.correction is .*algorithm\.rollout_corr"),
        ({"loss_mode": "fastadv_ppo", "preset": "ppo"}, r"policy_loss\.preset is 'ppo'; only loss_mode fastadv"),
        ({"loss_mode": "vanilla", "delta": 2.0}, r"policy_loss\.loss_mode is 'vanilla'; delta is a key of fastadv, "),
        ({"loss_mode": "fastadv_dro"}, r"policy_loss\.dro_beta is 0\.0; set a number above 0"),
        ({"loss_mode": "fastadv_clip_cov", "clip_cov_ratio": 0}, r"policy_loss\.clip_cov_ratio is 0; set a number"),
    ],
)
def test_wrong_own_keys_are_explained_when_the_config_is_made(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLossConfig(**({"loss_mode": "fastadv"} | keys))


def test_delta_is_checked_against_the_actors_clip() -> None:
    own = PolicyLossConfig(loss_mode="fastadv_ppo", delta=1.15)
    call(config=actor(policy_loss=own, clip_ratio_high=0.1))
    with pytest.raises(ValueError, match=r"policy_loss: delta is 1\.15; it must be at least 1 \+ clip_high"):
        call(config=actor(policy_loss=own, clip_ratio_high=0.2))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("fastadv_ppo", {"clip_ratio_c": 1.0}, r"actor_rollout_ref\.actor\.clip_ratio_c is 1\.0; set a number above 1"),
        ("fastadv_ppo", {"clip_ratio_low": -0.1}, r"actor\.clip_ratio_low is -0\.1; set a number of at least 0"),
        ("fastadv_sapo", {"tau_neg": 0}, r"actor\.tau_neg is 0; set a number above 0"),
        ("fastadv_dro", {}, r"actor\.policy_loss\.dro_beta is 0\.0; set a number above 0"),
        ("fastadv", {}, r"actor\.policy_loss\.preset is None; it must be one of"),
    ],
)
def test_wrong_keys_of_the_actor(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(name, config=actor(**keys))


@pytest.mark.parametrize("field", ["old_log_prob", "advantages", "response_mask", "rollout_is_weights"])
def test_another_width_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field} is 'of shape \[3, 6\]'; log_prob has \[3, 5\]"):
        call(**{field: torch.ones(3, 6)})


@pytest.mark.parametrize(
    ("mode", "missing"), [("token-mean", "batch_num_tokens"), ("seq-mean-token-mean", "global_batch_size")]
)
def test_ranks_without_counts_are_refused(mode: str, missing: str) -> None:
    with pytest.raises(ValueError, match=rf"global_batch_info\.{missing} is None; with dp_size 2"):
        call(mode=mode, config=actor({"dp_size": 2}))


def test_a_length_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"actor\.loss_scale_factor is None; .*set a constant length"):
        call(mode="seq-mean-token-sum-norm")


def test_importance_weights_may_be_nested() -> None:
    """As verl's distillation has them; their longest row may be shorter than the batch."""
    rows = [torch.rand(n) for n in (4, 3, 2)]
    weights = torch.nested.nested_tensor(rows, layout=torch.jagged)
    dense = torch.stack([torch.cat([row, torch.zeros(5 - len(row))]) for row in rows])
    assert call(rollout_is_weights=weights)[0] == call(rollout_is_weights=dense)[0]


@pytest.mark.parametrize("name", sorted(OF_VERL.keys() - {"geo_mean"}))
def test_weights_of_zero_reject(name: str) -> None:
    """IcePop's weights are 0 outside of its bounds. verl counts such tokens in the metrics, and so do all but dro."""
    b = batch(4, 9, 1, weighted=True)
    assert b.rollout_is_weights is not None
    b = b._replace(rollout_is_weights=torch.where(b.rollout_is_weights < 0.8, 0.0, b.rollout_is_weights))
    ours, verls = (
        run(f, b, "token-mean", actor(**KEYS)) for f in (POLICY_LOSSES[f"fastadv_{OF_VERL[name]}"], theirs(name))
    )
    assert_same(ours._replace(metrics=verls.metrics) if name == "dro" else ours, verls)


def test_dro_with_options_is_the_same_loss() -> None:
    b = batch(4, 9, 1, weighted=True)
    plain, other = (
        PolicyLossConfig(loss_mode="fastadv_dro", dro_beta=0.3, **keys) for keys in ({}, {"log_ratio_bound": 70.0})
    )
    assert_same(*(run(POLICY_LOSSES["fastadv_dro"], b, MODES[3], actor(policy_loss=own)) for own in (plain, other)))
    masked = PolicyLossConfig(loss_mode="fastadv_dro", dro_beta=0.3, sequence_mask={"delta": 0.0})
    ours = run(POLICY_LOSSES["fastadv_dro"], b, "token-mean", actor(policy_loss=masked))
    config = fa.LossConfig("dro", dro_beta=0.3, sequence_mask=fa.SequenceMask(0.0))
    torch.testing.assert_close(ours.loss, fa.policy_loss(*b[:4], config=config, is_weights=b[4]).loss)


@pytest.mark.filterwarnings("ignore")  # hydra's, beside a newer omegaconf
def test_the_config_travels() -> None:
    """Through verl's own yaml by the command line, to other processes, and through copies."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    at = "actor_rollout_ref.actor.policy_loss"
    overrides = [
        f"{at}._target_=fastadv.integrations.verl.PolicyLossConfig",
        f"{at}.loss_mode=fastadv",
        f"+{at}.preset=gspo/verl",
        f"+{at}.dual_clip=null",
        f"+{at}.clip_high=0.01",
        f"+{at}.gamma_pos=unset",
        f"+{at}.sequence_mask.delta=0.2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ]
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        composed = compose("ppo_trainer", overrides)
    config = omega_conf_to_dataclass(composed.actor_rollout_ref.actor).policy_loss
    assert type(config) is PolicyLossConfig
    options = {"dual_clip": None, "clip_high": 0.01, "sequence_mask": fa.SequenceMask(0.2)}
    for made in (config, pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert made.loss_options() == options
        assert made.get("preset") == "gspo/verl"


def test_verls_distillation_calls_them_with_a_config_of_its_own() -> None:
    """It has neither policy_loss nor clip_ratio_c, and its mask may be integers."""
    from verl.workers.config import DistillationLossConfig

    b, config = batch(3, 7, mask=torch.int64), DistillationLossConfig()
    assert_same(*(run(f, b, "token-mean", config) for f in (POLICY_LOSSES["fastadv_ppo"], theirs("vanilla"))))


def test_options_are_those_that_are_set() -> None:
    assert PolicyLossConfig(loss_mode="vanilla").loss_options() == {}
    assert PolicyLossConfig(loss_mode="fastadv", preset="dro", dro_beta=0.2).loss_options() == {"dro_beta": 0.2}
    corrections = [{"high": 1.5}, {"kind": "mis", "level": "geometric", "low": 0.9, "high": 1.1}]
    made = PolicyLossConfig(loss_mode="fastadv_gpg", correction=corrections).loss_options()
    assert made == {"correction": (fa.Correction(high=1.5), fa.Correction("mis", "geometric", 0.9, 1.1))}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_log_probs_of_another_dtype(dtype: torch.dtype) -> None:
    b = batch(4, 9, 2)
    b = b._replace(log_prob=b.log_prob.to(dtype))
    results = []
    for function in (POLICY_LOSSES["fastadv_ppo"], theirs("vanilla")):
        leaf = b.log_prob.clone().requires_grad_()
        loss, _ = function(**b._replace(log_prob=leaf)._asdict(), config=actor())
        loss.backward()
        results.append((loss.detach().double(), leaf.grad))
    assert results[0][1].dtype == dtype
    torch.testing.assert_close(*results, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-4)
