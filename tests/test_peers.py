"""Every dialect against its owner's own code: verl, TRL and Liger-Kernel, run as their trainers run them.

Opt-in, since the owners' packages are large: `make peers` installs them and runs this file.
"""

from __future__ import annotations

from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import BACKENDS
from torch import Tensor

import fastadv as fa
from fastadv.losses import NATIVE_LOSSES, PRESETS, TRUST_REGION_LOSSES

pytestmark = pytest.mark.peers
ON = pytest.mark.parametrize("backend", BACKENDS)
B, T = 6, 23


class Case:
    """A padded batch; the fourth row has no valid token unless `full`."""

    def __init__(self, seed: int, *, full: bool = False) -> None:
        g = torch.Generator().manual_seed(seed)
        self.mask = torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=g)
        if not full:
            self.mask[3] = False
        self.log_probs = -2 * torch.rand(B, T, generator=g, dtype=torch.float64)
        self.old = self.log_probs + 0.4 * torch.randn(B, T, generator=g, dtype=torch.float64)
        self.ref = self.log_probs + 0.4 * torch.randn(B, T, generator=g, dtype=torch.float64)
        self.rows = torch.randn(B, generator=g, dtype=torch.float64)
        self.tokens = torch.randn(B, T, generator=g, dtype=torch.float64)
        self.is_weights = 2 * torch.rand(B, T, generator=g, dtype=torch.float64)


def ours(config: fa.LossConfig, c: Case, advantages: Tensor, backend: str, **given: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if backend == "reference" else torch.float32
    given = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
    leaf = c.log_probs.to(dtype, copy=True).requires_grad_()
    loss = fa.policy_loss(
        leaf, c.old.to(dtype), advantages.to(dtype), c.mask, config=config, backend=backend, **given
    ).loss
    loss.backward()
    return loss.detach().double(), leaf.grad.double()


def theirs(loss_of: Any, c: Case) -> tuple[Tensor, Tensor]:
    leaf = c.log_probs.clone().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    return loss.detach(), leaf.grad


def compare(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], backend: str) -> None:
    tolerance = {"rtol": 1e-7, "atol": 1e-9} if backend == "reference" else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(a[0], b[0], **tolerance)
    torch.testing.assert_close(a[1], b[1], **tolerance)


def with_kernel(configs: dict[str, fa.LossConfig]) -> list[tuple[str, str]]:
    """Names of configurations, with the backends that run them."""
    return [
        (name, backend)
        for name, config in configs.items()
        for backend in BACKENDS
        if backend == "reference" or config.loss in NATIVE_LOSSES
    ]


# ---- verl ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verl() -> Any:
    return import_module("verl.trainer.ppo.core_algos")


class VerlConfig(dict):  # type: ignore[type-arg]
    __getattr__ = dict.get


def verl_config(config: fa.LossConfig) -> Any:
    policy = VerlConfig(
        clip_cov_ratio=config.cov_fraction, clip_cov_lb=config.cov_low, clip_cov_ub=config.cov_high,
        kl_cov_ratio=config.cov_fraction, ppo_kl_coef=config.cov_kl_coef, dro_beta=config.dro_beta,
    )  # fmt: skip
    trust_region = config.loss in TRUST_REGION_LOSSES  # verl's limits have the names of its clips
    low = config.divergence_low if trust_region else config.clip_low
    high = config.divergence_high if trust_region else config.clip_high
    return VerlConfig(
        clip_ratio=high, clip_ratio_low=low, clip_ratio_high=high,
        clip_ratio_c=(config.ratio_cap if trust_region else config.dual_clip) or 1e30,
        tau_pos=config.tau_pos, tau_neg=config.tau_neg, policy_loss=policy,
        loss_agg_mode=config.loss_agg_mode, global_batch_info={"loss_scale_factor": config.horizon},
    )  # fmt: skip


VERL = {
    "vanilla": PRESETS["ppo/verl"],
    "vanilla, clip-higher": PRESETS["dapo/verl"],
    "gspo": PRESETS["gspo/verl"].but(clip_low=0.1, clip_high=0.15),
    "sapo": PRESETS["sapo"],
    "gpg": PRESETS["gpg"],
    "cispo": PRESETS["cispo/verl"].but(clip_high=0.5),
    "kl_cov": PRESETS["kl_cov"].but(cov_fraction=0.1, log_ratio_bound=80.0),
    "clip_cov": PRESETS["clip_cov"].but(cov_fraction=1.0, cov_low=0.05, log_ratio_bound=80.0),  # no random choice left
    "geo_mean": PRESETS["gmpo"].but(clip_low=0.2, clip_high=0.3),
    "dppo_tv": PRESETS["dppo_tv/verl"],
    "dppo_tv, capped": PRESETS["dppo_tv/verl"].but(divergence_low=0.05, divergence_high=0.1, ratio_cap=1.2),
    "dppo_kl": PRESETS["dppo_kl/verl"].but(divergence_low=0.02, ratio_cap=1.2),
    "dro": PRESETS["dro"].but(dro_beta=0.3),
}


ONE_MODE = {"geo_mean": "seq-mean-token-mean", "sapo": "seq-mean-token-mean"}  # verl ignores loss_agg_mode there


@pytest.mark.parametrize("mode", fa.losses.AGGREGATIONS)
@pytest.mark.parametrize(("name", "backend"), with_kernel(VERL))
def test_verl(name: str, mode: str, backend: str, verl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "ActorConfig", VerlConfig)  # some losses insist on the type
    mode = ONE_MODE.get(name, mode)
    config = VERL[name].but(loss_agg_mode=mode, horizon=17.0)
    function = verl.get_policy_loss_fn(name.split(",")[0])
    for seed in range(3):
        c = Case(seed)
        c.old = c.old.clamp(max=-1e-3)  # a probability above 1 has no binary KL
        advantages = c.rows if name == "geo_mean" else c.tokens
        spread = advantages[:, None].expand(B, T) if name == "geo_mean" else advantages
        is_weights = None if name == "geo_mean" else c.is_weights
        given = {} if is_weights is None else {"is_weights": is_weights}
        mine = ours(config, c, advantages, backend, **given)
        other = theirs(
            lambda x, c=c, spread=spread, w=is_weights: function(
                old_log_prob=c.old, log_prob=x, advantages=spread.clone(), response_mask=c.mask.double(),
                loss_agg_mode=mode, config=verl_config(config), rollout_is_weights=w,
            )[0],
            c,
        )  # fmt: skip
        compare(mine, other, backend)


@ON
@pytest.mark.parametrize("name", ["k1", "abs", "k2", "low_var_kl", "k1+", "low_var_kl+"])
def test_verl_kl(name: str, backend: str, verl: Any) -> None:
    kl = fa.KL(name.removesuffix("+"), 0.3, "straight-through" if name.endswith("+") else "own")
    c = Case(7)
    c.ref[0, :4] = torch.tensor([30.0, -30.0, 3.0, -40.0])
    mine = ours(fa.LossConfig(kl=kl), c, torch.zeros(B), backend, ref_log_probs=c.ref)
    other = theirs(lambda x: 0.3 * verl.agg_loss(verl.kl_penalty(x, c.ref, name), c.mask, "token-mean"), c)
    compare(mine, other, backend)


@ON
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [1.3, "0.6_1.4"])
def test_verl_rollout_correction(level: str, threshold: Any, backend: str) -> None:
    helper = import_module("verl.trainer.ppo.rollout_corr_helper")
    c = Case(11)
    rollout = c.old + 0.2 * torch.randn(B, T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights, _ = helper.compute_rollout_correction_weights(
        log_ratio=c.old - rollout, response_mask=c.mask, rollout_is=level, rollout_is_threshold=threshold
    )
    masked = isinstance(threshold, str)
    correction = fa.Correction("mis", level, 0.6, 1.4) if masked else fa.Correction("tis", level, high=threshold)
    mine = ours(fa.LossConfig(correction=correction), c, c.tokens, backend, rollout_log_probs=rollout)
    given = ours(fa.LossConfig(), c, c.tokens, backend, is_weights=weights)
    compare(mine, given, backend)


# ---- TRL -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grpo_trainer() -> Any:
    return import_module("trl").GRPOTrainer


class Accelerator:
    num_processes = 1
    sync_gradients = True

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x


def trl_loss(trainer: Any, c: Case, log_probs: Tensor, advantages: Tensor, loss_type: str, **options: Any) -> Tensor:
    """`_compute_loss` of a GRPOTrainer whose model says these log-probs."""
    settings = {
        "delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.0625, "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "use_bias_correction_kl": False,
        "steps_per_generation": 1,
    } | {k: v for k, v in options.items() if k in ("delta", "use_bias_correction_kl")}  # fmt: skip
    me = SimpleNamespace(
        loss_type=loss_type, args=SimpleNamespace(**settings), beta=options.get("beta", 0.0), top_entropy_quantile=1.0,
        epsilon_low=options["low"], epsilon_high=options["high"],
        importance_sampling_level=options.get("level", "token"), off_policy_mask_threshold=options.get("threshold"),
        get_off_policy_mask=trainer.get_off_policy_mask,
        use_vllm="is_weights" in options, vllm_importance_sampling_correction=True,
        max_completion_length=options.get("horizon", 1), current_gradient_accumulation_steps=1, aux_loss_enabled=False,
        _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list)}, model=SimpleNamespace(training=True),
        accelerator=Accelerator(), get_gamma_weights=trainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_probs, torch.zeros_like(log_probs), None),
    )  # fmt: skip
    ids = torch.zeros(B, T, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids,
        "completion_mask": c.mask.long(), "advantages": advantages, "old_per_token_logps": c.old,
        "ref_per_token_logps": c.ref,
        "num_items_in_batch": c.mask.sum(), "importance_sampling_ratio": options.get("is_weights"),
    }  # fmt: skip
    if "sampler" in options:
        inputs["sampling_per_token_logps"] = options["sampler"]
    return trainer._compute_loss(me, None, inputs)


CLIPS = {"low": 0.1, "high": 0.15}
TRL = {
    "grpo": ("grpo", PRESETS["grpo"], CLIPS),
    "bnpo": ("bnpo", PRESETS["bnpo"], CLIPS),
    "dr_grpo": ("dr_grpo", PRESETS["dr_grpo"].but(horizon=31.0), CLIPS | {"horizon": 31}),
    "dapo": ("dapo", PRESETS["dapo"], CLIPS),
    "dapo, delta": ("dapo", PRESETS["dapo"].but(delta=1.3), CLIPS | {"delta": 1.3}),
    "gspo": ("grpo", PRESETS["gspo/trl"], CLIPS | {"level": "sequence"}),
    "luspo": ("luspo", PRESETS["luspo"], CLIPS | {"level": "sequence"}),
    "cispo": ("cispo", PRESETS["cispo/trl"], {"low": 0.1, "high": 5.0}),
    "sapo": ("sapo", PRESETS["sapo"].but(denominator="candidates", tau_neg=1.0625), CLIPS),  # TRL rounds tau to float32
    "vespo": ("vespo", PRESETS["vespo"], CLIPS),
}


@pytest.mark.parametrize("weighted", [False, True], ids=("plain", "weighted"))
@pytest.mark.parametrize("per_token", [False, True], ids=("per rollout", "per token"))
@pytest.mark.parametrize(("name", "backend"), with_kernel({name: config for name, (_, config, _) in TRL.items()}))
def test_trl(name: str, per_token: bool, weighted: bool, backend: str, grpo_trainer: Any) -> None:
    loss_type, config, options = TRL[name]
    if config.loss in ("ppo", "gspo"):
        config = config.but(clip_low=options["low"], clip_high=options["high"])
    for seed in range(3):
        c = Case(seed)
        advantages = c.tokens if per_token else c.rows
        given = {}
        if weighted:
            c.is_weights = torch.where(c.mask, c.is_weights, 1.0)
            options = options | {"is_weights": c.is_weights}
            given = {"is_weights": c.is_weights}
        mine = ours(config, c, advantages, backend, **given)
        other = theirs(lambda x, c=c, a=advantages, o=options: trl_loss(grpo_trainer, c, x, a, loss_type, **o), c)
        compare(mine, other, backend)


@ON
@pytest.mark.parametrize("unbiased", [False, True])
def test_trl_kl(unbiased: bool, backend: str, grpo_trainer: Any) -> None:
    config = PRESETS["dapo"].but(clip_low=0.1, clip_high=0.15, kl=fa.KL("k3", 0.2, "unbiased" if unbiased else "own"))
    c = Case(5)
    mine = ours(config, c, c.rows, backend, ref_log_probs=c.ref)
    options = CLIPS | {"beta": 0.2, "use_bias_correction_kl": unbiased}
    compare(mine, theirs(lambda x: trl_loss(grpo_trainer, c, x, c.rows, "dapo", **options), c), backend)


@pytest.mark.parametrize("by_sampler", [False, True], ids=("old", "sampler"))
@pytest.mark.parametrize("per_token", [False, True], ids=("per rollout", "per token"))
@pytest.mark.parametrize("name", TRL)
def test_trl_sequence_mask(name: str, per_token: bool, by_sampler: bool, grpo_trainer: Any) -> None:
    """TRL masks by each token's sign; where advantages are constant on a rollout, ours by rollout is the same."""
    loss_type, config, options = TRL[name]
    if config.loss in ("ppo", "gspo"):
        config = config.but(clip_low=options["low"], clip_high=options["high"])
    config = config.but(kl=fa.KL("k3", 0.2))
    options = options | {"threshold": 0.03, "beta": 0.2}
    for seed in range(4):
        c = Case(seed)
        advantages = c.tokens if per_token else c.rows
        given = {"ref_log_probs": c.ref}
        if by_sampler:
            noise = torch.randn(B, T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            sampler = (c.log_probs + 0.3 * noise).masked_fill(noise > 1.5, torch.nan)
            given["rollout_log_probs"], options = sampler, options | {"sampler": sampler}
        other = theirs(lambda x, c=c, a=advantages, o=options: trl_loss(grpo_trainer, c, x, a, loss_type, **o), c)
        for sign in ("token",) if per_token else ("token", "rollout"):
            mask = fa.SequenceMask(0.03, sign, "rollout" if by_sampler else "old")
            mine = ours(config.but(sequence_mask=mask), c, advantages, "reference", **given)
            compare(mine, other, "reference")


# ---- Liger-Kernel, from hidden states --------------------------------------------------------------------------------

LIGER = {
    "grpo": ("grpo", PRESETS["grpo"], {}),
    "bnpo": ("bnpo", PRESETS["bnpo"], {}),
    "dapo": ("dapo", PRESETS["dapo"], {}),
    "dapo, delta": ("dapo", PRESETS["dapo"].but(delta=1.3), {"delta": 1.3}),
    "dr_grpo": ("dr_grpo", PRESETS["dr_grpo"].but(horizon=31.0), {"max_completion_length": 31}),
    "gspo": ("grpo", PRESETS["gspo/trl"], {"importance_sampling_level": "sequence"}),
    "luspo": ("luspo", PRESETS["luspo"], {"importance_sampling_level": "sequence"}),
    "cispo": ("cispo", PRESETS["cispo/trl"], {"epsilon_high": 5.0}),
    "sapo": ("sapo", PRESETS["sapo"].but(denominator="candidates"), {}),
    "dapo, k3": ("dapo", PRESETS["dapo"].but(kl=fa.KL("k3", 0.2)), {"beta": 0.2}),
    "dapo, unbiased k3": (
        "dapo", PRESETS["dapo"].but(kl=fa.KL("k3", 0.2, "unbiased")), {"beta": 0.2, "use_bias_correction_kl": True},
    ),
}  # fmt: skip


# With importance weights per token Liger's luspo takes the mean over padded positions too; TRL's, as ours, does not.
LIGER_RUNS = [(name, weighted) for name in LIGER for weighted in (False, True) if (name, weighted) != ("luspo", True)]


@pytest.mark.parametrize(("name", "weighted"), LIGER_RUNS)
def test_liger(name: str, weighted: bool) -> None:
    """The chunked GRPO losses, which Liger makes from the last hidden states, against linear_policy_loss."""
    liger = import_module("liger_kernel.chunked_loss")
    loss_type, config, options = LIGER[name]
    options = {"epsilon_low": 0.1, "epsilon_high": 0.15, "beta": 0.0, "temperature": 0.7} | options
    if config.loss in ("ppo", "gspo"):
        config = config.but(clip_low=0.1, clip_high=0.15)
    c = Case(3, full=True)
    g = torch.Generator().manual_seed(9)
    vocab, width = 37, 16
    labels = torch.randint(0, vocab, (B, T), generator=g)
    hidden, weight = torch.randn(B, T, width, generator=g), 0.3 * torch.randn(vocab, width, generator=g)
    log_probs = fa.linear_log_probs(hidden, weight, labels, temperature=0.7).log_probs
    old, ref = (log_probs + 0.4 * torch.randn(B, T, generator=g) for _ in range(2))
    is_weights = 2 * torch.rand(B, T, generator=g) if weighted else None
    results = []
    for mine in (True, False):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        if mine:
            loss = fa.linear_policy_loss(
                *leaves, labels, old, c.rows.float(), c.mask, config=config, temperature=0.7, is_weights=is_weights,
                ref_log_probs=ref if config.kl else None, backend="cpu",
            ).loss  # fmt: skip
        else:
            peer = liger.LigerFusedLinearGRPOLoss(
                compiled=False, use_ref_model=config.kl is not None, loss_type=loss_type, **options
            )
            loss, _ = peer(
                *leaves, labels, c.mask.float(), c.rows.float(), old_per_token_logps=old, ref_per_token_logps=ref,
                vllm_is_ratio=is_weights,
            )  # fmt: skip
        loss.backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
