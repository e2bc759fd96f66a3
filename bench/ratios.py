"""The comparisons that the project holds itself to. `make bench` runs them and writes bench/results/.

python -m bench.ratios [policy-loss] [losses] [advantages] [estimators] [token-estimators] [log-probs] [linear]
    [gradproj] [gradproj-kernels] [verl-losses] [verl-estimators] [miles-hooks] [scaling] [replay]
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import fastadv as fa
from bench import linear, peers
from bench.batches import PPO, TOKENS, forward_backward, raw_policy_loss, rollouts
from bench.estimators import estimators
from bench.gradproj import segment_grams
from bench.gradproj_kernels import gradproj_kernels
from bench.harness import (
    Bandwidth,
    Line,
    Timing,
    after_torch_operation,
    against_floor,
    against_peer,
    copy_bandwidth,
    interleave,
    write,
)
from bench.log_probs import log_probs
from bench.losses import losses
from bench.miles_hooks import miles_hooks
from bench.token_estimators import token_estimators
from bench.verl_estimators import verl_estimators
from bench.verl_losses import verl_losses
from fastadv.ops import segments as lookup

BYTES = {
    "policy loss": 4 + 4 + 4 + 1 + 4,  # log_probs, old_log_probs, advantages, mask in; gradient out
    "turn advantages": 4 + 4,  # turn_ids in, advantages out
}


def raw_turn_advantages(batch: dict[str, Tensor], index: fa.Segments, groups: fa.GroupIndex) -> Callable[[], None]:
    """Turn-reached advantages into a given buffer, from index objects."""
    tokens = torch.empty(batch["mask"].shape)

    def run() -> None:
        table = fa.turn_advantages(batch["rewards"], groups, index, output="segments")
        lookup.SEGMENT_TOKENS("cpu", table.values, index.offsets, index.turn_ids, None, None, tokens)

    return run


def policy_loss() -> bool:
    """The ppo loss at 4M tokens, raw and through autograd, with token and with segment advantages."""
    batch = rollouts()
    config = fa.LossConfig(dual_clip=peers.DUAL_CLIP)
    tokens = batch["mask"].sum()
    index = fa.segments(fa.turn_ids_from_mask(batch["mask"]))
    table = fa.turn_advantages(batch["rewards"], batch["groups"], index, output="segments")

    raw = raw_policy_loss(batch, PPO)

    def ours(lp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return fa.policy_loss(lp, old, advantages, mask, config=config, denominator=tokens).loss

    def ours_segments(lp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return fa.policy_loss(lp, old, table, mask, config=config, denominator=tokens).loss

    def ours_counting(lp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return fa.policy_loss(lp, old, advantages, mask, config=config).loss

    compiled = peers.compiled_formula()
    verl = forward_backward(peers.verl_vanilla(), batch)
    steps = {
        "raw": raw,
        "autograd": forward_backward(ours, batch),
        "segments": forward_backward(ours_segments, batch),
        "counting": forward_backward(ours_counting, batch),
        "verl": verl,
        "compile": forward_backward(lambda *given: compiled(*given)[0], batch),
        "eager": forward_backward(lambda *given: peers.formula(*given)[0], batch),
    }
    _agree(batch, ours, peers.verl_vanilla(), lambda *given: compiled(*given)[0])
    bandwidth = copy_bandwidth()
    t = interleave(steps)
    busy = {"raw": after_torch_operation(raw)}
    floor = BYTES["policy loss"] * TOKENS / bandwidth.bytes_per_second
    lines = [
        against_peer("raw op / verl eager forward and backward", t["raw"], t["verl"], 40),
        against_peer("raw op / torch.compile of the formula", t["raw"], t["compile"], 2.2),
        against_floor("raw op / floor of 17 bytes a token", t["raw"], floor, 1.25),
        against_peer("policy_loss().backward() / verl eager", t["autograd"], t["verl"], 25),
        against_peer("policy_loss().backward() / torch.compile", t["autograd"], t["compile"], 1.5),
        against_floor("policy_loss().backward() / floor", t["autograd"], floor, 2.0),
        against_peer("policy_loss().backward() / the formula, eager", t["autograd"], t["eager"]),
        against_floor("raw op right after a torch operation / floor", busy["raw"], floor),
        against_floor("with segment advantages / floor", t["segments"], floor),
        against_floor("denominator counted by the call / floor", t["counting"], floor),
    ]
    return write(
        "policy_loss", f"ppo loss with gradient and metrics, {TOKENS:,} tokens, float32", lines,
        _details(bandwidth, steady=t, after_torch_operation=busy),
    )  # fmt: skip


def _details(bandwidth: Bandwidth, **timings: dict[str, Timing]) -> dict[str, object]:
    states = {state: {name: vars(timing) for name, timing in found.items()} for state, found in timings.items()}
    return {"bandwidth": vars(bandwidth), **states}


def _agree(batch: dict[str, Tensor], *losses: Callable[..., Tensor]) -> None:
    """No number without the right answer: every implementation gives the same loss and gradient."""
    results: list[tuple[float, Tensor]] = []
    for loss in losses:
        leaf = batch["log_probs"].clone().requires_grad_()
        value = loss(leaf, batch["old_log_probs"], batch["advantages"], batch["mask"])
        value.backward()
        assert leaf.grad is not None
        results.append((float(value.detach()), leaf.grad))
    first, expected = results[0]
    for number, gradient in results[1:]:
        assert abs(number - first) < 1e-5 * max(1.0, abs(number)), (number, first)
        # A ratio within rounding of a clip edge may fall on either side: count those tokens.
        different = int(((gradient - expected).abs() > 1e-4 * gradient.abs() + 1e-12).sum())
        assert different <= 100, f"{different} gradients differ"


def advantages() -> bool:
    """Turn-reached advantages to tokens at 4M tokens, and the index objects that a batch builds once."""
    batch = rollouts()
    turn_ids = fa.turn_ids_from_mask(batch["mask"])
    index, groups = fa.segments(turn_ids), fa.group_index(batch["groups"])
    small = rollouts(rows=64, tokens=64 * 4096)
    small_ids = fa.turn_ids_from_mask(small["mask"])
    labels = small["groups"].tolist()
    raw = raw_turn_advantages(batch, index, groups)
    steps = {
        "raw": raw,
        "tokens": lambda: fa.turn_advantages(batch["rewards"], groups, index),
        "segments": lambda: fa.turn_advantages(batch["rewards"], groups, index, output="segments"),
        "turn ids": lambda: fa.turn_ids_from_mask(batch["mask"]),
        "index": lambda: fa.segments(turn_ids),
        "reference": lambda: fa.turn_advantages(batch["rewards"], groups, index, backend="reference"),
        "small": lambda: fa.turn_advantages(small["rewards"], small["groups"], small_ids),
        "loops": lambda: peers.turn_advantages_loops(small["rewards"], labels, small_ids, 2.0),
    }
    torch.testing.assert_close(steps["small"](), steps["loops"](), rtol=1e-5, atol=1e-6)
    bandwidth = copy_bandwidth()
    t = interleave(steps)
    busy = {"raw": after_torch_operation(raw)}
    floor = BYTES["turn advantages"] * TOKENS / bandwidth.bytes_per_second
    lines = [
        against_floor("turn-reached advantages into a buffer / floor of 8 bytes a token", t["raw"], floor, 1.3),
        against_floor("the same right after a torch operation / floor", busy["raw"], floor),
        against_floor("turn_advantages(), its memory allocated by the call / floor", t["tokens"], floor),
        against_floor("turn ids from the mask / floor of 5 bytes a token", t["turn ids"], floor * 5 / 8),
        against_floor("segments of turn ids / floor of 4 bytes a token", t["index"], floor / 2),
        against_peer("to tokens / the PyTorch reference", t["tokens"], t["reference"]),
        against_peer("64 rollouts x 4096 tokens / Python loops", t["small"], t["loops"]),
    ]
    return write(
        "advantages", f"turn-reached advantages, {TOKENS:,} tokens", lines,
        _details(bandwidth, steady=t, after_torch_operation=busy),
    )  # fmt: skip


def scaling() -> bool:
    """Cost per token from 1M to 16M tokens, and per segment to 100,000 groups of ragged tables up to 200 turns."""
    lines: list[Line] = []
    details: dict[str, object] = {}
    config = fa.LossConfig(dual_clip=peers.DUAL_CLIP)
    steps: dict[str, Callable[[], object]] = {}
    sizes = (2**20, 2**22, 2**24)
    for tokens in sizes:
        batch = rollouts(rows=tokens // 16384, tokens=tokens)
        index, groups = fa.segments(fa.turn_ids_from_mask(batch["mask"])), fa.group_index(batch["groups"])
        steps[f"loss kernel {tokens}"] = raw_policy_loss(batch, PPO)
        steps[f"advantages kernel {tokens}"] = raw_turn_advantages(batch, index, groups)

        def loss(*given: Tensor) -> Tensor:
            return fa.policy_loss(*given, config=config).loss

        def turned(
            rewards: Tensor = batch["rewards"], groups: fa.GroupIndex = groups, index: fa.Segments = index
        ) -> None:
            fa.turn_advantages(rewards, groups, index)

        steps[f"policy_loss().backward() {tokens}"] = forward_backward(loss, batch)
        steps[f"turn_advantages() {tokens}"] = turned

    generator = torch.Generator().manual_seed(0)
    counts = (1_000, 10_000, 100_000)
    segments = {}
    for count in counts:
        rows = count * 8
        longest = torch.randint(1, 201, (count,), generator=generator).repeat_interleave(8)
        turns = (torch.rand(rows, generator=generator) * longest).long() + 1  # ragged: each group has its own longest
        ids = torch.arange(int(turns.sum())) - torch.repeat_interleave(turns.cumsum(0) - turns, turns)
        index = fa.segments(ids.int(), torch.cat([turns.new_zeros(1), turns.cumsum(0)]))
        groups = fa.group_index(torch.arange(rows) // 8)
        rewards = torch.randint(0, 2, (rows,), generator=generator).float()
        segments[count] = index.count

        def table(rewards: Tensor = rewards, groups: fa.GroupIndex = groups, index: fa.Segments = index) -> None:
            fa.turn_advantages(rewards, groups, index, output="segments")

        steps[f"groups {count}"] = table
    t = interleave(steps, rounds=9)
    # The kernels have a bar. What the calls allocate beyond 32 MiB comes from the system page by page, and goes back.
    bars = {
        "loss kernel": 1.5,
        "advantages kernel": 1.5,
        "policy_loss().backward()": None,
        "turn_advantages()": None,
    }
    for what, bar in bars.items():
        for small, large in ((sizes[0], size) for size in sizes[1:]):
            a, b = t[f"{what} {small}"].p50 / small, t[f"{what} {large}"].p50 / large
            lines.append(_per_unit(f"{what}: {large:,} tokens / {small:,}, per token", b, a, bar))
    for small, large in ((counts[0], count) for count in counts[1:]):
        a, b = t[f"groups {small}"].p50 / segments[small], t[f"groups {large}"].p50 / segments[large]
        lines.append(_per_unit(f"{large:,} groups / {small:,}, per segment", b, a, 1.5))
    details["timings"] = {name: vars(timing) for name, timing in t.items()}
    details["segments"] = segments
    return write("scaling", "cost grows linearly", lines, details)


def _per_unit(what: str, large: float, small: float, bar: float | None) -> Line:
    return Line(what, large * 1e6, small * 1e6, large / small, bar, "floor")


def replay() -> bool:
    """Peak memory and time of a replay without a policy: 128 rollouts, 4M tokens, in a process of its own."""
    run = subprocess.run([sys.executable, "-m", "bench.replay_memory"], check=False)
    return run.returncode == 0


SUITES = {
    "policy-loss": policy_loss,
    "losses": losses,
    "advantages": advantages,
    "estimators": estimators,
    "log-probs": log_probs,
    "linear": linear.linear,
    "gradproj": segment_grams,
    "gradproj-kernels": gradproj_kernels,
    "token-estimators": token_estimators,
    "verl-losses": verl_losses,
    "verl-estimators": verl_estimators,
    "miles-hooks": miles_hooks,
    "scaling": scaling,
    "replay": replay,
}


def main() -> None:
    """Runs the suites that are named, or all; exit status 1 if a bar is missed."""
    wanted = sys.argv[1:] or list(SUITES)
    unknown = [name for name in wanted if name not in SUITES]
    if unknown:
        raise SystemExit(f"unknown suite {unknown[0]!r}; there are {', '.join(SUITES)}")
    torch.set_num_threads(2)
    met = [SUITES[name]() for name in wanted]
    if not all(met):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
