"""Segment Grams beside one forward and backward pass with checkpointing of the same model on the same rollouts:
operations that are counted, time, and peak memory, each in a process of its own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import fastadv as fa
from bench.harness import Line, interleave, write
from bench.replay_memory import peak
from fastadv import gradproj

ROLLOUTS, TURNS, VOCABULARY, SIZE, INNER, LAYERS = 16, 8, 1024, 192, 512, 4
MAX_TOKENS = 1024  # padded tokens of a micro-batch, in every way
ARMS = 6
BARS = {"rollout": (1.12, 1.4), "turn": (3.8, 5.5)}  # operations and time beside one step


class Operations(TorchDispatchMode):
    """Counts the operations of matrix products, by torch's own formulas. (FlopCounterMode hooks the inputs of modules,
    which must not be leaves then.)"""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in flop_registry:
            self.by_name[str(packet)] += flop_registry[packet](*args, **kwargs, out_val=out)
        return out

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_name.values())


def problem() -> tuple[Any, fa.Batch]:
    """A policy of 2.2M parameters and 16 rollouts of 8 turns: 3,300 tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    rng = random.Random(0)
    mask: list[int] = []
    ids: list[int] = []
    ends, id_ends = [0], [0]
    for _ in range(ROLLOUTS):
        response: list[int] = []
        for turn in range(TURNS):
            response += [1] * rng.randint(12, 20) + [0] * (rng.randint(4, 12) if turn < TURNS - 1 else 0)
        mask += response
        ids += [rng.randrange(VOCABULARY) for _ in range(16 + len(response))]
        ends.append(len(mask))
        id_ends.append(len(ids))
    batch = fa.Batch.of(
        mask=torch.tensor(mask),
        rewards=torch.zeros(ROLLOUTS),
        group_ids=[i // 4 for i in range(ROLLOUTS)],
        outcomes=torch.zeros(ROLLOUTS, dtype=torch.int64),
        cu_seqlens=torch.tensor(ends),
        token_ids=fa.TokenIds(torch.tensor(ids), torch.tensor(id_ends)),
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=SIZE, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval(), batch


def step(model: Any, batch: fa.Batch, arms: int = 1) -> list[Tensor]:
    """The gradient of the sampled log-probs, layers checkpointed, micro-batch by micro-batch; once for each arm."""
    from fastadv.replay.policy import Policy, token_range

    policy = Policy(model, VOCABULARY, None)
    model.train()
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=_checkpoint)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            for _ in range(arms):
                model.zero_grad()
                for first, last in batch.micro_batches(MAX_TOKENS):
                    log_probs = policy.log_probs(batch, first, last)
                    (log_probs * batch.mask[token_range(batch, first, last)]).sum().backward()
        return [p.grad for p in policy.parameters if p.grad is not None]
    finally:
        model.zero_grad()
        model._set_gradient_checkpointing(enable=False)
        model.eval()


def _checkpoint(*arguments: Any, **keywords: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(*arguments, use_reentrant=False, **keywords)


def ways() -> dict[str, Callable[[], object]]:
    """What is compared."""
    model, batch = problem()

    def gram(level: str) -> Callable[[], object]:
        return lambda: gradproj.segment_gram(model, batch, level=level, max_tokens=MAX_TOKENS)

    return {"step": lambda: step(model, batch), "rollout": gram("rollout"), "turn": gram("turn")}


def operation_ratios() -> dict[str, float]:
    """Operations of each way beside the step's."""
    counts = {}
    for name, run in ways().items():
        with Operations() as counted:
            run()
        counts[name] = counted.total
    return {name: count / counts["step"] for name, count in counts.items()}


def one_layer(level: str) -> float:
    """Bytes of a layer's inputs and output gradients over all tokens, which all segments' gradients are made from."""
    model, batch = problem()
    assert batch.token_ids is not None
    plan = gradproj.plan(
        model, tokens=batch.token_ids.ids.numel(), rollouts=ROLLOUTS, turns=TURNS, level=level, value_bytes=4
    )
    return plan.layer_bytes


def peaks() -> dict[str, int]:
    """Bytes that each way adds to the high-water mark of a process of its own, in which the allocator gives back what
    is freed: what it keeps in between would be counted otherwise."""
    found = {}
    for name in ("step", "rollout", "turn"):
        command = [sys.executable, "-W", "ignore", "-m", "bench.gradproj", name]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found[name] = int(ran.stdout)
    return found


def segment_grams() -> bool:
    """The table; whether every bar is met. By one thread: products this small leave others nothing to do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _segment_grams()
    finally:
        torch.set_num_threads(threads)


def _segment_grams() -> bool:
    operations, memory = operation_ratios(), peaks()
    runs = ways()
    model, batch = problem()
    runs["arms"] = lambda: step(model, batch, ARMS)
    t = interleave(runs, rounds=5, counted=1)
    lines = []
    for level, (most_operations, most_time) in BARS.items():
        what = f"{level} Gram / one checkpointed step"
        lines += [
            Line(f"{what}: operations", operations[level], 1.0, operations[level], most_operations, "floor"),
            Line(f"{what}: time", t[level].p50, t["step"].p50, t[level].p50 / t["step"].p50, most_time, "floor"),
        ]
        allowed = memory["step"] + one_layer(level)
        bar = 1.0 if level == "rollout" else None
        lines.append(
            Line(
                f"{what} and one layer's inputs and output gradients: peak (MB for ms)",
                memory[level] / 1e9, allowed / 1e9, memory[level] / allowed, bar, "floor",
            )
        )  # fmt: skip
    lines.append(
        Line(
            f"gradients of {ARMS} arms, one after the other / one checkpointed step: time",
            t["arms"].p50, t["step"].p50, t["arms"].p50 / t["step"].p50, None, "floor",
        )
    )  # fmt: skip
    parameters = sum(p.numel() for p in model.parameters())
    title = f"segment Grams, {parameters / 1e6:.2f}M parameters, {ROLLOUTS} rollouts x {TURNS} turns, one thread"
    details = {"timings": {name: vars(timing) for name, timing in t.items()}, "peak bytes": memory}
    return write("gradproj", title, lines, details)


def main() -> None:
    """The table; with the name of a way, the bytes that it takes."""
    if not sys.argv[1:]:
        raise SystemExit(not segment_grams())
    torch.set_num_threads(1)
    run = ways()[sys.argv[1]]
    before = peak()
    run()
    print(peak() - before)


if __name__ == "__main__":
    main()
