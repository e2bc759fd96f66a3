"""verl's advantage functions as its trainer calls them (an int64 mask, uids as texts) beside ours in their place: one
thread, 256 rows of 16,384 tokens in groups of eight."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.batches import ROWS, TOKENS
from bench.harness import Line, against_peer, interleave, write
from bench.token_estimators import batch

LOOPS, VECTORISED, SCANS, OTB = 2.0, 1.3, 8.0, 5.0
# The registry's name: bar.
BARS = {
    "grpo": LOOPS, "rloo": LOOPS, "opo": LOOPS, "gpg": LOOPS, "grpo_passk": LOOPS, "grpo_vectorized": VECTORISED,
    "rloo_vectorized": VECTORISED, "reinforce_plus_plus_baseline": LOOPS, "remax": LOOPS, "reinforce_plus_plus": SCANS,
    "gae": SCANS, "optimal_token_baseline": OTB, "tir_optimal_token_baseline": OTB,
}  # fmt: skip
SLOW = ("reinforce_plus_plus", "gae")  # verl's take a second


def verl_estimators() -> bool:
    """Runs the comparisons."""
    algos = import_module("verl.trainer.ppo.core_algos")
    ours = import_module("fastadv.integrations.verl.advantage_functions")
    b = batch()
    uid = np.array([f"uid-{int(x)}" for x in b["groups"]], dtype=object)
    rewards = b["token_rewards"] * b["mask"]
    group = {"token_level_rewards": rewards, "response_mask": b["mask"].long(), "index": uid}
    config = SimpleNamespace(gamma=0.99, get=lambda key, default=None: default)
    squares = {"old_log_probs": b["log_probs"], "sum_pi_squared": b["sum_p2"]}
    inputs: dict[str, dict[str, Any]] = {name: {**group, "config": config} for name in BARS}
    inputs["gae"] = {**group, "values": b["values"], "gamma": 0.99, "lam": 0.95}
    del inputs["gae"]["index"]
    inputs["remax"] |= {"reward_baselines": b["greedy"]}
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        inputs[name] = {**group, **squares}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lines: list[Line] = []
    details: dict[str, object] = {}
    try:
        for name, bar in BARS.items():
            verls = algos.ADV_ESTIMATOR_REGISTRY[name]
            own = getattr(ours, verls.__name__)
            _agree(name, own, verls, inputs[name])
            rounds, counted = (2, 1) if name in SLOW else (4, 2)
            steps = {"ours": _run(own, inputs[name]), "verl": _run(verls, inputs[name])}
            t = interleave(steps, rounds=rounds, counted=counted)
            lines.append(against_peer(f"{name} / verl's", t["ours"], t["verl"], bar))
            details[name] = {who: vars(timing) for who, timing in t.items()}
        title = f"verl's advantage functions, {ROWS} x {TOKENS // ROWS} tokens, float32, int64 mask, one thread"
        return write("verl_estimators", title, lines, {"timings": details})
    finally:
        torch.set_num_threads(threads)


def _run(function: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Any]) -> Callable[[], Tensor]:
    return lambda: function(**inputs)[0]


def _agree(name: str, ours: Callable[..., Any], verls: Callable[..., Any], inputs: dict[str, Any]) -> None:
    """No number without the right answer. verl sums 16,384 tokens in float32."""
    found, exact = ours(**inputs)[0], verls(**inputs)[0] * inputs["response_mask"]
    torch.testing.assert_close(found, exact.float(), rtol=2e-3, atol=2e-3, msg=lambda text: f"{name}: {text}")
