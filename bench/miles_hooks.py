"""Hooks of Miles and slime on lists of Python numbers, as these trainers keep them: 128 groups of 8 with 40 turns."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from bench.harness import Line, against_floor, interleave, write

GROUPS, SIZE, TURNS = 128, 8, 40
BAR = 0.020  # seconds of the reward hook
DECISION = 20e-6  # seconds of a decision of the buffer about a group of 8
SHORT, LONG = (20, 20), (60, 42)  # sampled and observed tokens of a turn: 1.6M tokens, and 4.1M


def samples(sampled: int, observed: int) -> list[Any]:
    """Samples with what the hook reads of them; one in three was cut off, and rewards are 0 and 1."""
    mask = ([1] * sampled + [0] * observed) * TURNS
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(GROUPS * SIZE, generator=generator).lt(0.5).double().tolist()
    return [
        SimpleNamespace(
            group_index=row // SIZE, index=row, rollout_id=None, reward=reward, remove_sample=False,
            status="completed" if row % 3 else "truncated", metadata={}, loss_mask=list(mask), weight_versions=["3"],
            response_length=len(mask), opd_reverse_kl=None,
        )
        for row, reward in enumerate(rewards)
    ]  # fmt: skip


def miles_hooks() -> bool:
    """Runs the comparisons."""
    miles = import_module("fastadv.integrations.miles")
    decisions = import_module("fastadv.integrations.miles.buffer").Decisions
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        short, long, waiting = samples(*SHORT), samples(*LONG), samples(1, 1)
        groups = [waiting[row : row + SIZE] for row in range(0, len(waiting), SIZE)]
        plain, turns = {"arm": "mask"}, {"arm": "turn-reached", "turns": "init"}
        flags = {"use_opd": True, "opd_type": "sglang", "opd_kl_coef": -1.0}
        buffer = decisions(
            Namespace(
                fastadv={"arm": "rescue:a=0.5,after=0"}, max_weight_staleness=0, async_unused_samples_handler="drop"
            )
        )

        def hook(given: list[Any], mapping: dict[str, Any], **more: Any) -> Callable[[], object]:
            args = Namespace(fastadv=mapping, reward_key=None, n_samples_per_prompt=SIZE, **more)
            return lambda: miles.reward_post_process(args, given)

        runs: dict[str, Callable[[], object]] = {
            "rollouts": hook(long, plain),
            "turns, short": hook(short, turns),
            "turns": hook(long, turns),
            "turns by flags": hook(long, {**turns, "turns": "flags"}, **flags),
            "masks as bytes": lambda: [bytearray(sample.loss_mask) for sample in long],
            "decisions": lambda: [buffer.staleness(group, 3) for group in groups],
        }
        t = interleave(runs, rounds=9)
    finally:
        torch.set_num_threads(threads)
    tokens = {"short": sum(s.response_length for s in short), "long": sum(s.response_length for s in long)}
    read = t["masks as bytes"].p50
    lines: list[Line] = [
        against_floor(f"advantages of rollouts, {tokens['long'] / 1e6:.1f}M tokens / 20 ms", t["rollouts"], BAR, 1),
        against_floor(f"advantages of turns, {tokens['short'] / 1e6:.1f}M tokens / 20 ms", t["turns, short"], BAR, 1),
        against_floor(f"advantages of turns, {tokens['long'] / 1e6:.1f}M tokens / reading the masks", t["turns"], read),
        against_floor("the same by flags, a number a token / reading the masks", t["turns by flags"], read),
        against_floor(f"{GROUPS} decisions of the buffer / 20 us each", t["decisions"], GROUPS * DECISION, 1),
    ]
    details = {"timings": {name: vars(timing) for name, timing in t.items()}, "tokens": tokens}
    title = f"Hooks of Miles and slime, {GROUPS} groups of {SIZE} with {TURNS} turns, one thread"
    return write("miles_hooks", title, lines, details)
