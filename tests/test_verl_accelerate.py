"""Our functions in place of verl's: equal ones, wherever verl holds them, and verl's back afterwards."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("verl", reason="verl is not installed")

with warnings.catch_warnings():  # of what verl imports, and of engines that are not there
    warnings.simplefilter("ignore")
    import verl.trainer.distillation.losses
    import verl.trainer.ppo.ray_trainer
    import verl.trainer.ppo.v1.trainer_base
    import verl.workers.utils.losses  # noqa: F401
from fastadv.integrations.verl import loss_functions
from fastadv.integrations.verl.policy_losses import NAMED
from verl.trainer.ppo import core_algos
from verl.workers.config import PolicyLossConfig
from verl_batches import INFOS, MODES, Batch, actor, assert_same, batch, batches, run

from fastadv.losses import NATIVE_LOSSES

switch = importlib.import_module("fastadv.integrations.verl.accelerate")  # the package's name for it is the function

FEW = settings(max_examples=15)
LOSSES = sorted(name for name in vars(loss_functions) if name.startswith("compute_policy_loss_"))
FUNCTIONS = [*LOSSES, "agg_loss", "kl_penalty", "compute_value_loss"]


@pytest.fixture
def accelerated() -> Iterator[list[str]]:
    yield switch.accelerate()
    switch.restore()


def held() -> dict[str, Any]:
    """Every function that verl's modules and registries hold, by name."""
    functions = {
        f"{module_name}.{name}": value
        for module_name, module in sys.modules.items()
        if module_name.partition(".")[0] == "verl" and isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if isinstance(value, FunctionType)
    }
    for registry in switch.REGISTRIES:
        entries = getattr(core_algos, registry)
        functions |= {f"{switch.THEIRS}.{registry}[{name!r}]": value for name, value in entries.items()}
    return functions


# ---- the switch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("only_faster", [False, True])
def test_it_replaces_what_it_says_and_restores_it(only_faster: bool) -> None:
    before = held()
    replaced = switch.accelerate(only_faster=only_faster)
    try:
        during = held()
        assert {name for name, value in during.items() if value is not before[name]} == set(replaced)
        assert len(replaced) == len(set(replaced))
        for place in (
            "verl.trainer.ppo.core_algos.agg_loss",
            "verl.trainer.ppo.core_algos.compute_policy_loss_vanilla",
            "verl.trainer.ppo.core_algos.POLICY_LOSS_REGISTRY['vanilla']",
            "verl.trainer.ppo.core_algos.compute_gae_advantage_return",
            "verl.trainer.ppo.core_algos.ADV_ESTIMATOR_REGISTRY['grpo']",
            "verl.workers.utils.losses.agg_loss",
            "verl.workers.utils.losses.kl_penalty",
            "verl.workers.utils.losses.compute_value_loss",
            "verl.trainer.ppo.ray_trainer.agg_loss",
            "verl.trainer.ppo.v1.trainer_base.agg_loss",
            "verl.trainer.distillation.losses.kl_penalty",
        ):
            assert place in replaced
        left = set(switch.WITHOUT_KERNEL) if only_faster else set()
        old = {id(before[f"{switch.THEIRS}.{name}"]) for name in set(FUNCTIONS) - left}
        assert not [name for name in replaced if name.rpartition(".")[2] in left]
        assert not [name for name, value in during.items() if id(value) in old]
        assert switch.accelerate(only_faster=only_faster) == []  # nothing is left to replace
    finally:
        put_back = switch.restore()
    assert held() == before
    assert put_back == replaced
    assert switch.restore() == []


def test_what_is_left_to_verl_has_no_kernel() -> None:
    own = PolicyLossConfig(dro_beta=0.1)
    kinds = {name: named.read(actor(policy_loss=own)).loss for name, named in NAMED.items()}
    slow = {f"compute_policy_loss_{name}" for name, kind in kinds.items() if kind not in NATIVE_LOSSES}
    assert slow & set(LOSSES) == set(switch.WITHOUT_KERNEL)


def test_what_is_imported_in_between_is_restored_too(accelerated: list[str]) -> None:
    late = ModuleType("verl.late")
    late.aggregate = core_algos.agg_loss  # type: ignore[attr-defined]
    sys.modules["verl.late"] = late
    try:
        assert late.aggregate is loss_functions.agg_loss
        assert "verl.late.aggregate" in switch.restore()
        assert late.aggregate is core_algos.agg_loss is not loss_functions.agg_loss
    finally:
        del sys.modules["verl.late"]


@pytest.mark.parametrize(("value", "asked"), [(None, False), ("0", False), ("", False), ("1", True)])
def test_the_variable(value: str | None, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(switch.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(switch.VARIABLE, value)
    try:
        assert bool(switch.accelerate_if_asked()) == asked
        assert (core_algos.agg_loss is loss_functions.agg_loss) == asked
    finally:
        switch.restore()


def test_what_goes_wrong_at_the_import_is_a_warning_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch.VARIABLE, "yes")
    message = "FASTADV_VERL_ACCELERATE is 'yes'; set it to 1"
    with pytest.warns(RuntimeWarning, match=message), pytest.raises(ValueError, match=message):
        switch.accelerate_if_asked()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "verl_version", lambda: "0.8.0")
    before = held()
    with pytest.raises(RuntimeError, match=r"verl is 0\.8\.0, but our functions equal those of 0\.9\.1"):
        switch.accelerate()
    assert held() == before


def test_bypass_mode_calls_ours(accelerated: list[str]) -> None:
    """verl's own function, which calls two that were replaced."""
    results = []
    for _ in range(2):
        for loss_type in ("ppo_clip", "reinforce"):
            own = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction={"loss_type": loss_type})
            results.append(run(core_algos.compute_policy_loss_bypass_mode, batch(4, 9), MODES[0], actor({}, own)))
        switch.restore()
    for ours, verls in zip(results[:2], results[2:], strict=True):
        assert_same(ours, verls)


# ---- the functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_verls(name: str) -> None:
    ours, verls = (inspect.signature(getattr(m, name)).parameters for m in (loss_functions, core_algos))
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [(p.name, p.default, p.kind) for p in verls.values()]


@pytest.mark.parametrize(
    "name", sorted(set(LOSSES) - {"compute_policy_loss_geo_mean", "compute_policy_loss_reinforce"})
)
@FEW
@given(b=batches(), mode=st.sampled_from(MODES), info=INFOS)
def test_policy_losses(name: str, b: Batch, mode: str, info: dict[str, Any]) -> None:
    """As under names of ours, but a missing loss_scale_factor is the micro-batch's width, as in verl."""
    if name == "compute_policy_loss_geo_mean":  # where verl's counts are there, its own divisor is wrong
        info = {}
    info = {key: value for key, value in info.items() if key != "loss_scale_factor"}
    own = PolicyLossConfig(clip_cov_ratio=1.0, clip_cov_lb=0.05, kl_cov_ratio=0.3, ppo_kl_coef=0.4, dro_beta=0.3)
    config = actor(info, own, clip_ratio_c=1.5)
    old = next(iter(inspect.signature(getattr(core_algos, name)).parameters))  # or rollout_log_prob

    def result(module: ModuleType) -> Any:
        def function(old_log_prob: Tensor, **fields: Any) -> Any:
            return getattr(module, name)(**{old: old_log_prob}, **fields)

        return run(function, b, mode, config)

    assert_same(result(loss_functions), result(core_algos))


def value_and_gradient(function: Any, leaf: Tensor) -> tuple[Any, ...]:
    leaf = leaf.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = function(leaf)
    first, *rest = value if isinstance(value, tuple) else (value,)
    first.backward(torch.linspace(0.5, 2, first.numel()).reshape(first.shape))
    return (first.detach(), leaf.grad, *rest)


def close(ours: tuple[Any, ...], verls: tuple[Any, ...]) -> None:
    torch.testing.assert_close(ours, verls, rtol=2e-5, atol=2e-6)


@FEW
@given(b=batches(), mode=st.sampled_from(MODES), info=INFOS)
def test_agg_loss(b: Batch, mode: str, info: dict[str, Any]) -> None:
    close(*(
        value_and_gradient(lambda x, m=m: m.agg_loss(x, b.response_mask, mode, **info), b.log_prob)
        for m in (loss_functions, core_algos)
    ))  # fmt: skip


def test_agg_loss_of_nan_outside_of_the_mask() -> None:
    """verl's modes over rows multiply it."""
    losses, mask = torch.tensor([[1.0, torch.nan], [3.0, 5.0]]), torch.tensor([[True, False], [True, True]])
    for mode, right in (("seq-mean-token-mean", 2.5), ("seq-mean-token-sum", 4.5), ("seq-mean-token-sum-norm", 2.25)):
        leaf = losses.clone().requires_grad_()
        loss = loss_functions.agg_loss(leaf, mask, mode)
        assert loss == right
        loss.backward()
        assert leaf.grad is not None
        assert leaf.grad[0, 1] == 0
        assert core_algos.agg_loss(losses, mask, mode).isnan()


def test_agg_loss_refuses_what_verl_refuses() -> None:
    x = torch.ones(2, 3)
    for module in (loss_functions, core_algos):
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
            with pytest.raises(ValueError, match="dp_size"):
                module.agg_loss(x, x, mode, dp_size=2)
        with pytest.raises(ValueError, match="loss_agg_mode"):
            module.agg_loss(x, x, "mean")


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("name", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_kl_penalty(name: str, plus: str) -> None:
    g = torch.Generator().manual_seed(0)
    log_prob = -2 * torch.rand(3, 7, generator=g)
    ref = log_prob + torch.randn(3, 7, generator=g)
    ref[0] += torch.tensor([30.0, -30.0, 2.0, -2.0, 21.0, -19.0, 4.0])
    for columns in (slice(None), slice(0, 6, 2)):  # not contiguous either
        close(*(
            value_and_gradient(lambda x, m=m, c=columns: m.kl_penalty(x[:, c], ref[:, c], name + plus), log_prob)
            for m in (loss_functions, core_algos)
        ))  # fmt: skip


def test_kl_penalty_of_an_impossible_token() -> None:
    """A log-prob of -inf has the value that its estimator says, and the others keep theirs."""
    log_prob, ref = torch.tensor([-torch.inf, -1.0]), torch.tensor([-1.0, -2.0])
    for name in ("k1", "abs"):
        assert torch.equal(*(m.kl_penalty(log_prob, ref, name) for m in (loss_functions, core_algos)))


@pytest.mark.parametrize("name", ["full", "k4"])
def test_kl_penalty_that_verl_lacks(name: str) -> None:
    for module in (loss_functions, core_algos):
        with pytest.raises(NotImplementedError):
            module.kl_penalty(torch.zeros(2), torch.zeros(2), name)


@FEW
@given(b=batches(), mode=st.sampled_from(MODES), info=INFOS)
def test_value_loss(b: Batch, mode: str, info: dict[str, Any]) -> None:
    close(*(
        value_and_gradient(
            lambda x, m=m: m.compute_value_loss(
                vpreds=x, returns=b.advantages, values=b.old_log_prob, response_mask=b.response_mask,
                cliprange_value=0.2, loss_agg_mode=mode, **info,
            ),
            b.log_prob,
        )
        for m in (loss_functions, core_algos)
    ))  # fmt: skip


def test_value_loss_reads_nothing_outside_of_the_mask() -> None:
    mask = torch.tensor([[True, False]])
    leaf = torch.tensor([[1.0, torch.nan]]).requires_grad_()
    other = torch.tensor([[0.0, torch.inf]])
    loss, fraction = loss_functions.compute_value_loss(leaf, other, other, mask, 0.2, "seq-mean-token-sum")
    loss.backward()
    assert loss == 0.5
    assert fraction == 0
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_package_does_what_the_variable_says_when_it_is_imported(value: str) -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import fastadv.integrations.verl, verl.workers.utils.losses as losses\n"
        "print(losses.agg_loss.__module__, fastadv.integrations.verl.PolicyLossConfig.__module__)"
    )
    environment = os.environ | {switch.VARIABLE: value}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    module = "fastadv.integrations.verl.loss_functions" if value == "1" else "verl.trainer.ppo.core_algos"
    assert ran.stdout.split()[-2:] == [module, "fastadv.integrations.verl.policy_loss_config"]
