"""verl's advantage functions as its trainer calls them, beside ours under their names and ours by name: one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.batches import ROWS, TOKENS
from bench.harness import Line, against_peer, interleave, write
from bench.token_estimators import GAMMA, LAM, batch

LOOP, VECTORIZED, COLUMNS, BASELINE = 2.0, 1.3, 8.0, 5.0
PROBABILITIES = ("old_log_probs", "sum_pi_squared")
# By name in verl's registry: arguments besides rewards and mask, the bar, our estimator of the same numbers.
FUNCTIONS: Mapping[str, tuple[tuple[str, ...], float, str]] = {
    "grpo": (("index",), LOOP, "fastadv_grpo"),
    "grpo_vectorized": (("index",), VECTORIZED, "fastadv_grpo"),
    "gdpo": (("index",), LOOP, ""),
    "grpo_passk": (("index", "config"), LOOP, "fastadv_passk"),
    "rloo": (("index",), LOOP, "fastadv_rloo"),
    "rloo_vectorized": (("index",), VECTORIZED, "fastadv_rloo"),
    "opo": (("index",), LOOP, "fastadv_opo"),
    "gpg": (("index",), LOOP, "fastadv_gpg"),
    "remax": (("reward_baselines",), LOOP, ""),
    "reinforce_plus_plus_baseline": (("index",), LOOP, "fastadv_reinforce_plus_plus_baseline"),
    "reinforce_plus_plus": (("config",), COLUMNS, "fastadv_reinforce_plus_plus"),
    "gae": (("values", "gamma", "lam"), COLUMNS, ""),
    "optimal_token_baseline": (("index", *PROBABILITIES), BASELINE, ""),
    "tir_optimal_token_baseline": (("index", *PROBABILITIES), BASELINE, ""),
}


class Config(SimpleNamespace):
    """verl's `algorithm`, as far as its functions read it."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def inputs() -> dict[str, Any]:
    """The trainer's arguments by verl's names: an outcome on each row's last token of the mask, an int64 mask, uids."""
    b = batch()
    rewards = torch.zeros_like(b["token_rewards"])
    last = torch.where(b["mask"], torch.arange(rewards.shape[1]), -1).amax(1)
    rewards[torch.arange(ROWS), last] = b["rewards"].float()
    return {
        "token_level_rewards": rewards,
        "response_mask": b["mask"].long(),
        "index": np.array([f"uid-{label}" for label in b["groups"].tolist()], dtype=object),
        "values": b["values"],
        "reward_baselines": b["greedy"],
        "old_log_probs": b["log_probs"],
        "sum_pi_squared": b["sum_p2"],
        "config": Config(gamma=GAMMA, lam=LAM, norm_adv_by_std_in_grpo=True),
        "gamma": GAMMA,
        "lam": LAM,
    }


def bound(function: Any, given: Mapping[str, Any], names: tuple[str, ...]) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call of verl's, all by keyword."""
    chosen = {name: given[name] for name in ("token_level_rewards", "response_mask", *names)}
    return lambda: function(**chosen)


def verl_estimators() -> bool:
    """Runs the comparisons. verl's loops over columns are timed a few times only: they take seconds."""
    advantage_functions = import_module("fastadv.integrations.verl.advantage_functions")
    registered = import_module("fastadv.integrations.verl.estimators").REGISTERED
    verl = import_module("verl.trainer.ppo.core_algos")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        given = inputs()
        on = given["response_mask"].bool()
        ours: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {}
        theirs, named = dict(ours), dict(ours)
        for name, (names, _, estimator) in FUNCTIONS.items():
            theirs[name] = bound(verl.ADV_ESTIMATOR_REGISTRY[name], given, names)
            ours[name] = bound(getattr(advantage_functions, verl.ADV_ESTIMATOR_REGISTRY[name].__name__), given, names)
            if estimator:
                named[name] = bound(registered[estimator], given, ("index", "config"))
        named["turn"] = bound(registered["fastadv_turn"], given, ("index", "config"))
        for name, run in theirs.items():  # no number without the right answer
            expected = torch.where(on, run()[0], 0.0)
            for mine in (ours[name], named.get(name, ours[name])):
                torch.testing.assert_close(mine()[0], expected, rtol=1e-3, atol=1e-3)  # float32 sums of 16,384 tokens
        quick = {f"ours {name}": run for name, run in ours.items()} | {f"by name {n}": run for n, run in named.items()}
        t = interleave(quick, rounds=6)
        t |= interleave({f"verl {name}": run for name, run in theirs.items()}, rounds=3, counted=1)
    finally:
        torch.set_num_threads(threads)
    lines: list[Line] = []
    for name, (_, bar, estimator) in FUNCTIONS.items():
        lines.append(
            against_peer(f"{name}: ours in verl's place / verl 0.9.1", t[f"ours {name}"], t[f"verl {name}"], bar)
        )
        if estimator:
            what = f"{estimator}, registered / verl 0.9.1's {name}"
            lines.append(against_peer(what, t[f"by name {name}"], t[f"verl {name}"], bar))
    lines.append(against_peer("fastadv_turn, registered / verl 0.9.1's grpo", t["by name turn"], t["verl grpo"]))
    details = {"timings": {name: vars(timing) for name, timing in t.items()}}
    title = f"verl's estimators, {ROWS} x {TOKENS // ROWS} tokens, one thread"
    return write("verl_estimators", title, lines, details)
