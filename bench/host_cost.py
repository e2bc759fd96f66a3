"""What a call costs the host up to the launch, without a GPU.

    python -m bench.host_cost       writes bench/results/host_cost.json and .md

The CUDA kernels' launchers are compiled for the CPU (tests/cuda_emulation) with launches that do nothing, so that
Python, pybind11 and the launcher's C++ are measured; Triton runs up to its driver, which is replaced by one that does
nothing. Tensors are on the CPU: PyTorch's own ops in a call compute there, and on a GPU each of them is a launch too.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastadv as fa
from bench import harness
from fastadv.ops import _logits
from fastadv.ops import _policy_loss_kernel as loss_kernel
from fastadv.ops import turn_advantages as turn_ops
from fastadv.ops.group_advantages import check, fused_arguments
from fastadv.ops.segments import SEGMENT_TOKENS
from fastadv.reference.group_advantages import AdvantageRule

RAW, AUTOGRAD = 12.0, 25.0  # us: bars of a raw call and of loss and gradient through autograd
TESTS = Path(__file__).parent.parent / "tests"
ROWS, WIDTH, VOCAB = 8, 64, 256  # small: PyTorch's ops on the CPU compute at once
CALLS, ROUNDS = 400, 25


@dataclass(frozen=True)
class Cost:
    """Microseconds of a call."""

    what: str
    kind: str
    microseconds: float
    bar: float | None = None

    @property
    def met(self) -> bool:
        """Whether it is below its bar."""
        return self.bar is None or self.microseconds < self.bar


def load_kernels() -> None:
    """The CUDA extension for CPU tensors, whose launches do nothing."""
    sys.path.insert(0, str(TESTS))
    kernels, build = importlib.import_module("cuda_kernels"), importlib.import_module("cuda_emulation.build")
    path = kernels.emulated(defines={"CUDA_EMULATION_EMPTY_LAUNCHES": 1})
    sys.modules["fastadv._cuda"] = build.load_module(path)


class NoDriver:
    """Triton's driver as far as a launch needs one: it loads nothing and starts nothing."""

    def __init__(self) -> None:
        self.utils = self

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**18}

    def load_binary(self, *args: Any) -> tuple[object, int, int, int, int]:
        return object(), 0, 0, 0, 1024

    def unload_module(self, module: object) -> None:
        pass

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *args: None


def microseconds(call: Callable[[], object]) -> float:
    """Processor time of a call: the least mean of some rounds."""
    for _ in range(CALLS):
        call()
    best = float("inf")
    gc.collect()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            start = time.thread_time_ns()
            for _ in range(CALLS):
                call()
            best = min(best, (time.thread_time_ns() - start) / CALLS / 1000)
    finally:
        gc.enable()
    return best


class Nothing(torch.autograd.Function):
    """An op of PyTorch's that computes nothing: what autograd alone costs in Python."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return loss.view(())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient, None, None


def on_both(what: str, call: Callable[[str], object]) -> list[Cost]:
    """A raw kernel: with its bar on this project's launcher, and Triton's beside it."""
    return [
        Cost(what, "raw", microseconds(lambda: call("cuda")), RAW),
        Cost(what, "raw, Triton", microseconds(lambda: call("triton"))),
    ]


def policy_loss() -> list[Cost]:
    """ppo with token advantages and a dual clip; the step's denominator is given, as a training loop has it."""
    log_probs, old, advantages = torch.randn(3, ROWS, WIDTH)
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    divisor = torch.tensor(float(mask.sum()), dtype=torch.float64)
    none: tuple[Any, ...] = (None,) * 15
    inputs = loss_kernel.Inputs(*none)._replace(old_log_probs=old, mask=mask, advantages=advantages, divisor=divisor)
    config = fa.LossConfig(dual_clip=3.0)
    formula = loss_kernel.Formula.of(config, 0)
    numbers = [float(x) for x in formula]
    gradient, value = torch.empty_like(log_probs), torch.empty(())
    sums = torch.empty(len(loss_kernel.SUMS), dtype=torch.float64)
    leaf = log_probs.clone().requires_grad_()

    def raw(backend: str) -> None:
        loss = value if backend in loss_kernel.WRITES_LOSS else None
        loss_kernel.POLICY_LOSS(backend, log_probs, None, inputs, formula, gradient, None, loss, sums)

    def public(t: Tensor) -> Tensor:
        return fa.policy_loss(t, old, advantages, mask, config=config, denominator=divisor, backend="cuda").loss

    def with_gradient() -> None:
        leaf.grad = None
        public(leaf).backward()

    def autograd_alone() -> None:
        """Without the public op's checks and metrics."""
        leaf.grad = None
        loss_kernel.PolicyLoss.apply(leaf, None, inputs, formula, False, "cuda")[0].backward()

    def in_graph() -> object:
        return loss_kernel.PolicyLoss.apply(leaf, None, inputs, formula, False, "cuda")

    def nothing() -> None:
        leaf.grad = None
        Nothing.apply(leaf, value, gradient).backward()

    registered = torch.ops.fastadv.policy_loss
    return [
        Cost(
            "nothing",
            "an autograd.Function of PyTorch's, forward",
            microseconds(lambda: Nothing.apply(leaf, value, gradient)),
        ),
        Cost("nothing", "an autograd.Function of PyTorch's, with backward", microseconds(nothing)),
        *on_both("policy_loss", raw),
        Cost("policy_loss", "kernel in autograd, forward", microseconds(in_graph), AUTOGRAD),
        Cost("policy_loss", "kernel in autograd, with backward", microseconds(autograd_alone), AUTOGRAD),
        Cost("policy_loss", "public", microseconds(lambda: public(log_probs))),
        Cost("policy_loss", "public, forward in a graph", microseconds(lambda: public(leaf)), AUTOGRAD),
        Cost("policy_loss", "public, with backward", microseconds(with_gradient), AUTOGRAD),
        Cost(
            "policy_loss",
            "torch.ops",
            microseconds(lambda: registered("cuda", log_probs, None, list(inputs), numbers, [True, False], False)),
        ),
    ]


def turn_advantages() -> list[Cost]:
    """Turn-reached, from rewards to a table of segments, in one launch; then to tokens, in another."""
    turns = (torch.arange(WIDTH, dtype=torch.int32) // 8).repeat(ROWS, 1)
    index, groups = fa.segments(turns, backend="cpu"), fa.group_index(torch.arange(ROWS) // 4)
    rewards = torch.rand(ROWS)
    tables = fa.turn_advantages(rewards, groups, index, output="segments", backend="cpu")
    tokens = torch.empty(ROWS, WIDTH)

    def raw(backend: str) -> None:
        SEGMENT_TOKENS(backend, tables.values, index.offsets, turns, None, None, tokens)

    rule = AdvantageRule("loo", "zero", "none", 1, 1e-6, "add")
    given = check("bench", "cuda", rewards, groups, rule, "all", None, None, None)
    arguments = (*fused_arguments(given, rule), index.offsets, index.count, 2.0, False, False)
    public = {"output": "segments", "backend": "cuda"}
    return [
        *on_both("segment_tokens", raw),
        Cost("segment_tokens", "public", microseconds(lambda: fa.segment_tokens(tables, backend="cuda"))),
        Cost("turn_advantages", "raw", microseconds(lambda: turn_ops._launch_fused(*arguments)), RAW),
        Cost(
            "turn_advantages",
            "public, segments",
            microseconds(lambda: fa.turn_advantages(rewards, groups, index, **public)),  # type: ignore[call-overload]
        ),
        Cost(
            "turn_advantages",
            "public, tokens",
            microseconds(lambda: fa.turn_advantages(rewards, groups, index, backend="cuda")),
        ),
        Cost(
            "turn_advantages",
            "torch.ops",
            microseconds(lambda: torch.ops.fastadv.fused_turn_advantages(*arguments)),
        ),
    ]


def token_log_probs() -> list[Cost]:
    """The label's log-prob without moments, and its gradient."""
    logits, labels = torch.randn(ROWS, VOCAB), torch.arange(ROWS)
    log_prob, state = torch.empty(ROWS), torch.empty(1, ROWS, dtype=torch.float64)
    leaf, ones = logits.clone().requires_grad_(), torch.ones(ROWS)

    def raw(backend: str) -> None:
        _logits.TOKEN_LOG_PROBS(backend, logits, labels, 1.0, 0.0, log_prob, None, None, state)

    def public(t: Tensor) -> Tensor:
        return fa.token_log_probs(t, labels, backend="cuda").log_probs

    def with_gradient() -> None:
        leaf.grad = None
        public(leaf).backward(ones)

    registered = torch.ops.fastadv.token_log_probs
    return [
        *on_both("token_log_probs", raw),
        Cost("token_log_probs", "public", microseconds(lambda: public(logits))),
        Cost("token_log_probs", "public, with backward", microseconds(with_gradient), AUTOGRAD),
        Cost(
            "token_log_probs",
            "torch.ops",
            microseconds(lambda: registered("cuda", logits, labels, None, 1.0, 0.0, False)),
        ),
    ]


def measured() -> list[Cost]:
    """All of them; without looks at values, which a GPU's tensors are not given."""
    load_kernels()
    importlib.import_module("triton.runtime.driver").driver.set_active(NoDriver())
    torch.set_num_threads(1)
    with fa.checks("off"):
        return [*policy_loss(), *turn_advantages(), *token_log_probs()]


def write(costs: list[Cost]) -> bool:
    """Writes results/host_cost.json and .md and prints the table; returns whether every bar is met."""
    facts = harness.machine()
    title = "Host time of a call up to the launch, without a GPU"
    table = ["| op | what | us | bar | |", "|---|---|---|---|---|"]
    for cost in costs:
        bar = "" if cost.bar is None else f"< {cost.bar:g}"
        mark = "" if cost.bar is None else ("met" if cost.met else "MISSED")
        table.append(f"| {cost.what} | {cost.kind} | {cost.microseconds:.1f} | {bar} | {mark} |")
    warning = [] if harness.clean(str(facts["commit"])) else [harness.DIRTY, ""]
    told = ", ".join(f"{key} {value}" for key, value in facts.items())
    method = (
        f"Processor time, the least of {ROUNDS} rounds of {CALLS} calls, tensors on the CPU, launches that do nothing. "
        "On a GPU a call also pays for the driver's launch, and PyTorch's ops in it for theirs."
    )
    text = "\n".join([f"# {title}", "", *warning, *table, "", f"{told}. {method}", ""])
    harness.RESULTS.mkdir(exist_ok=True)
    (harness.RESULTS / "host_cost.md").write_text(text)
    document = {"title": title, "machine": facts, "costs": [asdict(cost) for cost in costs]}
    (harness.RESULTS / "host_cost.json").write_text(json.dumps(document, indent=1) + "\n")
    print(text)
    return all(cost.met for cost in costs)


if __name__ == "__main__":
    sys.exit(not write(measured()))
