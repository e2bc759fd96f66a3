"""verl's FSDP engine with fused log-probs and the matched update, without a cluster: verl's own methods on one
process."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verl_import import verl_module

import fastadv as fa

engine = verl_module("fastadv.integrations.verl.engine")
tensordict = verl_module("tensordict")
base = verl_module("verl.workers.engine.base")
tu = verl_module("verl.utils.tensordict_utils")


@pytest.fixture(scope="module")
def model() -> Any:
    transformers = verl_module("transformers")
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what verl passes to transformers
@pytest.mark.parametrize("shifted", [False, True])
def test_fused_log_probs_are_verls(model: Any, shifted: bool) -> None:
    """Values and gradients of verl's fused forward in PyTorch, and the sum of squares that it has not."""
    theirs = verl_module("verl.models.transformers.dense_common").forward_with_torch_backend
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 97, (2, 23), generator=g)
    given: dict[str, Any] = {"input_ids": ids, "temperature": 0.7, "return_dict": True}
    if shifted:
        given["shift_labels"] = torch.randint(0, 97, ids.shape, generator=g)
    weights = torch.randn(2, 23, generator=g)
    a, b = engine.fused_forward(model, **given), theirs(model, **given)
    torch.testing.assert_close(a.log_probs, b.log_probs.view(2, 23), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a.entropy, b.entropy.view(2, 23), rtol=1e-5, atol=1e-5)
    ours, own = (gradients(model, (out.log_probs.view(2, 23) * weights).sum()) for out in (a, b))
    for name in own:
        torch.testing.assert_close(ours[name], own[name], rtol=1e-3, atol=1e-5, msg=name)
    p = (model(input_ids=ids).logits / 0.7).softmax(-1)
    torch.testing.assert_close(a.sum_pi_squared, p.square().sum(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_the_sum_of_squares_comes_back_as_log_probs_do(packed: bool) -> None:
    made = object.__new__(engine.FastadvEngine)
    made.use_ulysses_sp, made.ulysses_parallel_group = False, None
    lengths = [3, 5]
    ids = torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)
    shape = (1, 8) if packed else (2, 5)
    output = SimpleNamespace(log_probs=torch.zeros(shape), entropy=torch.ones(shape), sum_pi_squared=torch.rand(shape))
    batch = tensordict.TensorDict({"input_ids": ids}, batch_size=2)
    tu.assign_non_tensor(
        batch, use_remove_padding=packed, use_fused_kernels=True, calculate_entropy=True, calculate_sum_pi_squared=True
    )
    args = {"input_ids_rmpad_rolled": None, "temperature_rmpad": None, "pad_size": 0}
    found = made.prepare_model_outputs(output, args, batch, None)
    flat = (
        output.sum_pi_squared[0] if packed else torch.cat([output.sum_pi_squared[i, :n] for i, n in enumerate(lengths)])
    )
    assert torch.equal(found["sum_pi_squared"].values(), flat)
    assert found["log_probs"].values().tolist() == [0.0] * 8
    assert found["entropy"].values().tolist() == [1.0] * 8
    assert tu.get_non_tensor_data(batch, "calculate_sum_pi_squared", False), "the batch is as it was"


def test_verl_finds_the_engine_by_its_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "fastadv")
    for strategy in ("fsdp", "fsdp2"):
        assert base.EngineRegistry.get_engine_cls("language_model", strategy) is engine.FastadvEngine
        assert base.EngineRegistry.get_engine_cls("value_model", strategy).__name__ == "FSDPEngineWithValueHead"
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    assert base.EngineRegistry.get_engine_cls("language_model", "fsdp").__name__ == "FSDPEngineWithLMHead"


# ---- the matched update ----------------------------------------------------------------------------------------------


class OneProcess(base.BaseEngine):
    """An engine of verl in the least code: a module, an optimizer, one micro-batch."""

    scaler = None

    def __init__(self, clip: float) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1, weight_decay=0.1)
        self.optimizer_config = SimpleNamespace(clip_grad=clip)

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        loss, metrics = loss_function(model_output=self.module(data["x"])[:, 0], data=data, dp_group=None)
        loss.backward()
        return {"metrics": metrics}

    def optimizer_step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.optimizer_config.clip_grad)
        self.optimizer.step()
        return float(norm)

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True


class Matched(engine.MatchedUpdateEngine, OneProcess):
    pass


def loss(model_output: Tensor, data: Any, dp_group: Any) -> Any:
    return -(model_output * data["advantages"]).mean(), {}


def batch(*, matched: bool) -> Any:
    g = torch.Generator().manual_seed(2)
    fields = {"x": torch.randn(6, 4, generator=g), "advantages": torch.randn(6, generator=g)}
    if matched:
        fields[engine.REFERENCE] = 5 * torch.randn(6, generator=g)
    return tensordict.TensorDict(fields, batch_size=6)


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_the_step_is_as_long_as_the_references(clip: float) -> None:
    found = Matched(clip)
    for _ in range(2):  # the second time Adam has moments
        data = batch(matched=True)
        other = Matched(clip)
        other.module.load_state_dict(found.module.state_dict())
        other.optimizer.load_state_dict(deepcopy(found.optimizer.state_dict()))
        before = nn.utils.parameters_to_vector(found.module.parameters()).detach().clone()
        alone = data.clone()
        alone["advantages"] = alone.pop(engine.REFERENCE)
        other.train_batch(alone, loss)
        reference = nn.utils.parameters_to_vector(other.module.parameters()).detach() - before
        metrics = found.train_batch(data, loss)["metrics"]
        step = nn.utils.parameters_to_vector(found.module.parameters()).detach() - before
        assert float(step.norm()) == pytest.approx(float(reference.norm()), rel=1e-5)
        assert metrics["fastadv/update_norm"] == pytest.approx(float(step.norm()), rel=1e-5)
        assert metrics["fastadv/learning_rate_multiplier"] != 1.0
        assert not torch.allclose(step, reference), "its direction is its own arm's"
        assert found.optimizer.param_groups[0]["lr"] == 0.1


def test_without_a_reference_it_is_verls_step() -> None:
    found, theirs = Matched(1.0), OneProcess(1.0)
    a, b = found.train_batch(batch(matched=False), loss), theirs.train_batch(batch(matched=False), loss)
    assert a == b
    assert all(torch.equal(p, q) for p, q in zip(found.module.parameters(), theirs.module.parameters(), strict=True))


def test_a_loss_scale_is_refused_by_its_key() -> None:
    found = Matched(1.0)
    found.scaler = object()
    with pytest.raises(ValueError, match=r"actor\.fsdp_config\.mixed_precision\.param_dtype is fp16"):
        found.train_batch(batch(matched=True), loss)


def test_norms_are_the_librarys() -> None:
    found = Matched(100.0)
    found.optimizer_zero_grad()
    found.forward_backward_batch(batch(matched=False), loss)
    norm = fa.update_norms(found.optimizer, {"own": None})["own"]
    before = nn.utils.parameters_to_vector(found.module.parameters()).detach().clone()
    found.optimizer_step()
    step = nn.utils.parameters_to_vector(found.module.parameters()).detach() - before
    assert norm.update == pytest.approx(float(step.norm()), rel=1e-5)
