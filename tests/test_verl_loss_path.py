"""The path that users run: verl's own `ppo_loss`, given a micro-batch of nested tensors as its engines build it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl", reason="verl is not installed")

from fastadv.integrations.verl.policy_loss_config import PolicyLossConfig as Ours
from fastadv.integrations.verl.policy_losses import POLICY_LOSSES
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl_batches import actor

Step = tuple[Tensor, list[Tensor], dict[str, Any]]  # loss, gradients by row, metrics
PROMPT = 3
LENGTHS = (7, 2, 5, 1, 6, 4)
PAIRS = {"fastadv_ppo": "vanilla", "fastadv_gspo": "gspo", "fastadv_cispo": "cispo", "fastadv_kl_cov": "kl_cov"}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in POLICY_LOSSES.items():
        monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, name, function)


class Rollouts:
    """Rows of different lengths with tool results in them; the fourth has no token that the model sampled."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(4)

        def rows(kind: str) -> list[Tensor]:
            if kind == "mask":
                return [(torch.arange(n) % 3 != 2).long() for n in LENGTHS]
            return [torch.randn(n, generator=g) for n in LENGTHS]

        self.mask = rows("mask")
        self.mask[3] = torch.zeros(1, dtype=torch.int64)
        self.old = [-x.abs() - 0.1 for x in rows("old")]
        self.log_probs = [(old + 0.3 * x).clamp(max=-0.01) for old, x in zip(self.old, rows("noise"), strict=True)]
        self.ref = [old + 0.3 * x for old, x in zip(self.old, rows("noise"), strict=True)]
        self.advantages, self.weights = rows("advantages"), [x.abs() for x in rows("weights")]
        self.entropy = [x.abs() for x in rows("entropy")]

    @property
    def tokens(self) -> int:
        return int(sum(mask.sum() for mask in self.mask))

    def run(self, config: Any, rows: range, ranks: int) -> Step:
        """Loss, gradients by row and metrics of some rows, through the model's output over prompt and response."""
        leaves = [self.log_probs[i].clone().requires_grad_() for i in rows]

        def model_output(values: list[Tensor]) -> Tensor:  # a token's value lies at the place before it
            return nested([torch.cat([torch.zeros(PROMPT - 1), v, torch.zeros(1)]) for v in values])

        data = TensorDict({
            "prompts": nested([torch.zeros(PROMPT, dtype=torch.int64) for _ in rows]),
            "responses": nested([torch.zeros(LENGTHS[i], dtype=torch.int64) for i in rows]),
            "response_mask": nested([self.mask[i] for i in rows]),
            "old_log_probs": nested([self.old[i] for i in rows]),
            "advantages": nested([self.advantages[i] for i in rows]),
            "rollout_is_weights": nested([self.weights[i] for i in rows]),
            "ref_log_prob": nested([self.ref[i] for i in rows]),
        }, batch_size=[len(rows)])  # fmt: skip
        tu.assign_non_tensor(data, dp_size=ranks, batch_num_tokens=self.tokens, global_batch_size=len(LENGTHS))
        output = {"log_probs": model_output(leaves), "entropy": model_output([self.entropy[i] for i in rows])}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, metrics = ppo_loss(config, output, data)
        loss.backward()
        return loss.detach(), [leaf.grad for leaf in leaves], metrics  # type: ignore[misc]


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def config_of(loss_mode: str, mode: str, **keys: Any) -> Any:
    own = PolicyLossConfig(loss_mode=loss_mode, kl_cov_ratio=0.3)
    return actor(
        policy_loss=own, loss_agg_mode=mode, loss_scale_factor=11, entropy_coeff=0.01, use_kl_loss=True, **keys
    )


def assert_same_step(ours: Step, verls: Step) -> None:
    torch.testing.assert_close(ours[0], verls[0], rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(ours[1], verls[1], rtol=2e-5, atol=2e-6)
    assert ours[2].keys() == verls[2].keys()
    assert "actor/pg_loss" in ours[2]
    for metric, value in verls[2].items():
        numbers = [m if isinstance(m, float) else m.aggregate() for m in (ours[2][metric], value)]
        assert numbers[0] == pytest.approx(numbers[1], rel=2e-5, abs=2e-6), metric


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("name", PAIRS)
def test_ppo_loss(name: str, mode: str) -> None:
    """Value, gradient and every metric, with entropy and KL added in place to the loss that was returned."""
    rollouts, everything = Rollouts(), range(len(LENGTHS))
    ours, verls = (rollouts.run(config_of(n, mode), everything, 1) for n in (name, PAIRS[name]))
    assert_same_step(ours, verls)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("name", ["vanilla", "sapo", "gpg"])
def test_ppo_loss_accelerated(name: str, mode: str) -> None:
    """verl's own names with our functions behind them, the entropy's and the penalty's aggregation among them."""
    switch = importlib.import_module("fastadv.integrations.verl.accelerate")
    rollouts, config = Rollouts(), config_of(name, mode)
    verls = rollouts.run(config, range(6), 1)
    switch.accelerate()
    try:
        ours = rollouts.run(config, range(6), 1)
    finally:
        switch.restore()
    assert_same_step(ours, verls)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("name", ["fastadv_ppo", "fastadv_gspo", "fastadv_geo_mean", "fastadv"])
def test_splits(name: str, mode: str) -> None:
    """Two ranks of two micro-batches each, of other widths, give the gradient of the whole mini-batch.

    FSDP adds the micro-batches' gradients and averages over the ranks. So does Megatron: verl multiplies a loss by the
    number of micro-batches there, by which its schedule divides.
    """
    rollouts = Rollouts()
    config = config_of(name, mode)
    if name == "fastadv":
        own = Ours(loss_mode="fastadv", preset="dr_grpo", delta=1.5)
        config = actor(policy_loss=own, loss_agg_mode=mode, loss_scale_factor=11, entropy_coeff=0.01, use_kl_loss=True)
    whole = rollouts.run(config, range(6), 1)
    ranks = [[range(2), range(2, 3)], [range(3, 5), range(5, 6)]]
    gradients, losses = [], []
    for rank in ranks:
        for micro in rank:
            loss, by_row, _ = rollouts.run(config, micro, 2)
            gradients += [g / len(ranks) for g in by_row]
            losses.append(loss / len(ranks))
    torch.testing.assert_close(sum(losses), whole[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients, whole[1], rtol=1e-5, atol=1e-7)
