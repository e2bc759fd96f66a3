"""Profiles of the ops by pytest-benchmark: absolute times of this machine, for comparing commits on it.

make profile                      # a table
pytest bench --benchmark-autosave # keep it, compare later with --benchmark-compare
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastadv as fa
from bench import linear
from bench.batches import TOKENS, forward_backward, rollouts
from bench.log_probs import STEP_ROWS
from bench.log_probs import batch as log_probs_batch
from bench.log_probs import ours as token_log_probs
from bench.ratios import BYTES

CONFIG = fa.LossConfig(dual_clip=3.0)


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    torch.set_num_threads(2)
    made: dict[str, Any] = dict(rollouts())
    made["turn_ids"] = fa.turn_ids_from_mask(made["mask"])
    made["segments"], made["index"] = fa.segments(made["turn_ids"]), fa.group_index(made["groups"])
    made["table"] = fa.turn_advantages(made["rewards"], made["index"], made["segments"], output="segments")
    made["tokens"] = made["mask"].sum()
    return made


def profile(benchmark: Any, run: Any, bytes_per_token: float) -> None:
    benchmark.pedantic(run, rounds=20, warmup_rounds=3)
    benchmark.extra_info["GB/s"] = round(bytes_per_token * TOKENS / benchmark.stats["median"] / 1e9, 2)


@pytest.mark.parametrize("mode", fa.losses.AGGREGATIONS)
@pytest.mark.parametrize("loss", fa.losses.LOSSES)
def test_policy_loss(benchmark: Any, batch: dict[str, Any], loss: str, mode: str) -> None:
    config = fa.LossConfig(loss, loss_agg_mode=mode, horizon=4096.0)
    step = fa.denominators(batch["mask"])

    def value(*given: Any) -> torch.Tensor:
        return fa.policy_loss(*given, config=config, denominator=step).loss

    profile(benchmark, forward_backward(value, batch), BYTES["policy loss"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_policy_loss_in_low_precision(benchmark: Any, batch: dict[str, Any], dtype: torch.dtype) -> None:
    low = {k: batch[k].to(dtype) for k in ("log_probs", "old_log_probs", "advantages")} | {"mask": batch["mask"]}

    def value(*given: Any) -> torch.Tensor:
        return fa.policy_loss(*given, config=CONFIG, denominator=batch["tokens"]).loss

    profile(benchmark, forward_backward(value, low), 2 + 2 + 2 + 1 + 2)


def test_policy_loss_with_segment_advantages(benchmark: Any, batch: dict[str, Any]) -> None:
    def value(log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> torch.Tensor:
        step = batch["tokens"]
        return fa.policy_loss(log_probs, old_log_probs, batch["table"], mask, config=CONFIG, denominator=step).loss

    profile(benchmark, forward_backward(value, batch), BYTES["policy loss"])


def test_turn_ids_from_mask(benchmark: Any, batch: dict[str, Any]) -> None:
    profile(benchmark, lambda: fa.turn_ids_from_mask(batch["mask"]), 1 + 4)


def test_segments(benchmark: Any, batch: dict[str, Any]) -> None:
    profile(benchmark, lambda: fa.segments(batch["turn_ids"]), 4)


def test_turn_advantages_to_tokens(benchmark: Any, batch: dict[str, Any]) -> None:
    given = (batch["rewards"], batch["index"], batch["segments"])
    profile(benchmark, lambda: fa.turn_advantages(*given), BYTES["turn advantages"])


def test_denominators(benchmark: Any, batch: dict[str, Any]) -> None:
    profile(benchmark, lambda: fa.denominators(batch["mask"]), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_token_log_probs(benchmark: Any, dtype: torch.dtype) -> None:
    torch.set_num_threads(2)
    logits, labels = log_probs_batch(STEP_ROWS, dtype)
    benchmark.pedantic(lambda: token_log_probs(logits, labels), rounds=10, warmup_rounds=2)
    benchmark.extra_info["GB/s"] = round(logits.nbytes / benchmark.stats["median"] / 1e9, 2)


@pytest.mark.parametrize("name", ["linear_policy_loss", "linear_log_probs"])
def test_from_hidden_states(benchmark: Any, name: str) -> None:
    """A quarter of bench/linear.py's vocabulary."""
    given = linear.problem(torch.float32)
    given["weight"], given["labels"] = given["weight"][:8192].clone(), given["labels"] % 8192
    loss = linear.one_pass if name == "linear_policy_loss" else linear.two_passes
    benchmark.pedantic(linear.Step(loss, given), rounds=5, warmup_rounds=1)
