"""Calls of estimators for tests: through verl's compute_advantage, and over Rows as our trainers do it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl_import import verl_module
from verl_rows import VerlRows

estimators = verl_module("fastadv.integrations.verl.estimators")
EstimatorOptions = verl_module("fastadv.integrations.verl.keys").EstimatorOptions
Rows = verl_module("fastadv.integrations.verl.rows").Rows
ray_trainer = verl_module("verl.trainer.ppo.ray_trainer")
DataProto = verl_module("verl").DataProto
OmegaConf = verl_module("omegaconf").OmegaConf


def algorithm(fastadv: dict[str, Any] | None = None, **keys: Any) -> Any:
    """verl's `algorithm`, whose unknown keys are errors as hydra makes them."""
    known: dict[str, Any] = {"gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True, **keys}
    if fastadv is not None:
        known["fastadv"] = fastadv
    config = OmegaConf.create(known)
    OmegaConf.set_struct(config, True)
    return config


def computed(name: str, b: VerlRows, config: Any = None, **fields: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns by verl's compute_advantage."""
    config = algorithm() if config is None else config
    tensors = {"token_level_rewards": b.rewards.clone(), "response_mask": b.mask.clone(), **fields}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": b.uid})
    out = ray_trainer.compute_advantage(
        data,
        adv_estimator=name,
        gamma=config.gamma,
        lam=config.lam,
        norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
        config=config,
    )
    return out.batch["advantages"], out.batch["returns"]


def direct(name: str, b: VerlRows, fastadv: dict[str, Any] | None = None, **more: Any) -> Tensor:
    """Advantages of an estimator over Rows, as our trainers call it."""
    rows = Rows.of_verl(b.rewards, b.mask, b.uid, **more)
    return estimators.advantages(name, rows, EstimatorOptions.of(algorithm(fastadv)))[0]


def three() -> VerlRows:
    """One prompt, rewards 1, 0 and 0, with 2, 2 and 1 turns."""
    b = VerlRows(0, 3, 4)
    b.uid = np.array(["a"] * 3, dtype=object)
    b.mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 0, 0]])
    b.scores = torch.tensor([1.0, 0.0, 0.0])
    b.rewards = torch.zeros(3, 4)
    b.rewards[:, -1] = b.scores
    return b
