"""Token-level estimators at 4M tokens: kernels into given buffers against their floors, calls against verl's loops.

A floor counts what has to move: each input once, each output once, and what whitening has to see again, since its mean
is known only when all values are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastadv as fa
from bench.batches import ROWS, TOKENS, rollouts
from bench.harness import Line, Timing, against_floor, against_peer, copy_bandwidth, interleave, write
from fastadv.ops.optimal_token_baseline import OPTIMAL_TOKEN_BASELINE
from fastadv.ops.token_counts import TOKEN_COUNTS
from fastadv.ops.token_returns import TOKEN_RETURNS
from fastadv.ops.whiten import MASKED_SPREAD, STANDARDIZE
from fastadv.reference.whiten import mean_and_scale, merged

GAMMA, LAM = 0.99, 0.95
# Bytes a token, float32 and a mask of bytes; after the bar, what is read and written.
FLOORS = {
    "whiten": 5 + 9,  # values, mask; both again, output
    "reinforce_plus_plus/verl": 9 + 9,  # rewards, mask, returns; returns, mask, advantages
    "reinforce_plus_plus/verl, rewards of rollouts": 5 + 9,  # mask, returns; as above
    "reinforce_plus_plus_baseline/verl": 1 + 5,  # mask; mask, advantages
    "remax/verl": 13,  # rewards, mask, returns, advantages
    "gae/verl": 17 + 9,  # rewards, values, mask, returns, advantages; advantages, mask, output
    "otb/verl": 21,  # rewards, mask, log-probs, sums of squares, returns, advantages
    "otb-tir/verl": 21,
}
BARS = {name: 3.0 if name.startswith("otb") else 1.5 for name in FLOORS}


def batch() -> dict[str, Any]:
    """Agent rollouts with a reward a token (a penalty and the outcome), a critic and what OTB reads."""
    made: dict[str, Any] = rollouts()
    g = torch.Generator().manual_seed(1)
    shape = made["mask"].shape
    probabilities = made["old_log_probs"].exp().clamp(max=1)
    return {
        **made,
        "token_rewards": -0.01 * torch.rand(shape, generator=g),
        "values": torch.rand(shape, generator=g),
        "sum_p2": probabilities**2 + (1 - probabilities) ** 2 * torch.rand(shape, generator=g),
        "log_probs": probabilities.log(),
        "greedy": torch.rand(shape[0], generator=g),
        "index": fa.group_index(made["groups"]),
    }


def kernels(b: dict[str, Any]) -> dict[str, Callable[[], Tensor]]:
    """Each estimator's kernels, into buffers that are there; what they write last."""
    mask, tokens, values = b["mask"], b["token_rewards"], b["values"]
    returns, advantages, out = (torch.empty(mask.shape) for _ in range(3))
    spread = torch.empty(3, dtype=torch.float64)
    rows, greedy = b["rewards"].double(), b["greedy"].double()
    centred = fa.group_advantages(b["rewards"], b["index"]).double()
    counts = torch.empty(ROWS, dtype=torch.int64)
    index = [b["index"].order, b["index"].offsets]

    def scan(*given: Tensor | None, to: tuple[Tensor, ...], gamma: float = GAMMA, lam: float = 1.0) -> None:
        TOKEN_RETURNS("cpu", mask, None, *given, gamma, lam, False, [*to, spread])

    def whitened(values: Tensor) -> Tensor:
        STANDARDIZE("cpu", values, mask, None, mean_and_scale(spread, 1, 1e-8, "add_to_variance"), out)
        return out

    def whiten() -> Tensor:
        MASKED_SPREAD("cpu", values, mask, None, spread)
        return whitened(values)

    def plus(tokens: Tensor | None, rows: Tensor | None) -> Tensor:
        scan(tokens, None, rows, None, to=(returns,))
        return whitened(returns)

    def baseline() -> Tensor:
        TOKEN_COUNTS("cpu", mask, None, counts)
        mine = merged(torch.stack([counts.double(), centred, torch.zeros_like(centred)], -1))
        mean, scale = mean_and_scale(mine, 1, 1e-8, "add_to_variance").unbind()
        scan(None, None, (centred - mean) * scale, None, to=(returns,), gamma=1.0)
        return returns

    def remax() -> Tensor:
        scan(tokens, None, None, greedy, to=(returns, advantages), gamma=1.0)
        return advantages

    def gae() -> Tensor:
        scan(tokens, values, None, None, to=(returns, advantages), lam=LAM)
        return whitened(advantages)

    def otb(compact: bool) -> Tensor:
        scan(tokens, None, None, None, to=(returns,), gamma=1.0)
        given = [returns, b["log_probs"], b["sum_p2"]]
        OPTIMAL_TOKEN_BASELINE("cpu", mask, None, index, given, None, compact, True, 1e-8, advantages)
        return advantages

    return {
        "whiten": whiten,
        "reinforce_plus_plus/verl": lambda: plus(tokens, None),
        "reinforce_plus_plus/verl, rewards of rollouts": lambda: plus(None, rows),
        "reinforce_plus_plus_baseline/verl": baseline,
        "remax/verl": remax,
        "gae/verl": gae,
        "otb/verl": lambda: otb(False),
        "otb-tir/verl": lambda: otb(True),
    }


def calls(b: dict[str, Any]) -> dict[str, Callable[[], Tensor]]:
    """The same as users call them, memory for results included."""
    mask = {"mask": b["mask"]}
    tokens = {**mask, "token_rewards": b["token_rewards"]}
    probabilities = {"log_probs": b["log_probs"], "sum_p2": b["sum_p2"]}

    def estimate(*given: Any, **inputs: Any) -> Callable[[], Tensor]:
        return lambda: fa.estimate(*given, **inputs).advantages  # type: ignore[return-value]

    plus = "reinforce_plus_plus"
    return {
        "whiten": lambda: fa.whiten(b["values"], b["mask"]),
        f"{plus}/verl": estimate(f"{plus}/verl", **tokens, gamma=GAMMA),
        f"{plus}/verl, rewards of rollouts": estimate(f"{plus}/verl", b["rewards"], **mask, gamma=GAMMA),
        f"{plus}_baseline/verl": estimate(f"{plus}_baseline/verl", b["rewards"], b["index"], **mask),
        "remax/verl": estimate("remax/verl", greedy_rewards=b["greedy"], **tokens),
        "gae/verl": estimate("gae/verl", values=b["values"], **tokens, gamma=GAMMA, lam=LAM),
        "otb/verl": estimate("otb/verl", None, b["index"], **tokens, **probabilities),
        "otb-tir/verl": estimate("otb-tir/verl", None, b["index"], **tokens, **probabilities),
    }


def loops(b: dict[str, Any]) -> dict[str, Callable[[], Tensor]]:
    """verl's own functions, as its trainer calls them."""
    from verl.trainer.ppo import core_algos as verl

    mask, tokens, config = b["mask"].long(), b["token_rewards"], SimpleNamespace(gamma=GAMMA)
    uids = np.array([str(x) for x in b["groups"].tolist()], dtype=object)
    outcome = torch.zeros_like(tokens)
    outcome[:, 0] = b["rewards"]
    otb = (tokens, mask, uids, b["log_probs"], b["sum_p2"])
    return {
        "reinforce_plus_plus/verl": lambda: verl.compute_reinforce_plus_plus_outcome_advantage(
            tokens, mask, config=config
        )[0],
        "reinforce_plus_plus_baseline/verl": lambda: verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
            outcome, mask, uids
        )[0],
        "remax/verl": lambda: verl.compute_remax_outcome_advantage(tokens, b["greedy"], mask)[0],
        "gae/verl": lambda: verl.compute_gae_advantage_return(tokens, b["values"], mask, GAMMA, LAM)[0],
        "otb/verl": lambda: verl.compute_optimal_token_baseline_advantage(*otb)[0],
        "otb-tir/verl": lambda: verl.compute_multi_turn_optimal_token_baseline_advantage(*otb)[0],
    }


def token_estimators() -> bool:
    """Runs the comparisons. verl's loops are timed a few times only: they take seconds."""
    b = batch()
    raw, called, theirs = kernels(b), calls(b), loops(b)
    for name, run in raw.items():  # no number without the right answer
        exact = called[name]()
        torch.testing.assert_close(run(), exact, rtol=1e-5, atol=1e-5)
        if name in theirs:
            other = torch.where(b["mask"], theirs[name](), 0.0)  # some are not 0 elsewhere
            torch.testing.assert_close(exact, other, rtol=1e-3, atol=1e-3)  # its sums of 16,384 tokens are float32
    bandwidth = copy_bandwidth()
    steps = {f"kernels {name}": run for name, run in raw.items()} | {
        f"call {name}": run for name, run in called.items()
    }
    t = interleave(steps)
    slow = interleave({f"verl {name}": run for name, run in theirs.items()}, rounds=2, counted=1)
    lines: list[Line] = []
    for name, floor in FLOORS.items():
        seconds = floor * TOKENS / bandwidth.bytes_per_second
        what = f"{name}: {{}} / floor of {floor} bytes a token"
        lines.append(against_floor(what.format("kernels"), t[f"kernels {name}"], seconds, BARS[name]))
        lines.append(against_floor(what.format("call"), t[f"call {name}"], seconds))
        if name in theirs:
            lines.append(against_peer(f"{name}: call / verl 0.9.1", t[f"call {name}"], slow[f"verl {name}"]))
    found: dict[str, Timing] = {**t, **slow}
    details = {"bandwidth": vars(bandwidth), "timings": {name: vars(timing) for name, timing in found.items()}}
    return write("token_estimators", f"token-level estimators, {ROWS} x {TOKENS // ROWS} tokens", lines, details)
