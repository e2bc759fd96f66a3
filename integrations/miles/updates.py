"""How far a step would move the parameters, and a learning rate that makes two runs move them equally far: the matched
update, by the hook `before_train_step`.

The norm is that of a dry run on the finished gradients, clipped as Megatron clips: nothing is changed by it. A control
run reads the norms of a reference run, step by step, and multiplies its learning rate for each step by the ratio. Norms
of gradients would not do: Adam divides them out.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from fastadv.integrations import keys
from fastadv.integrations.miles.clips import CLIPPED
from torch import Tensor
from torch.optim import AdamW, Optimizer

import fastadv as fa
from fastadv.gradproj import megatron_filter

logger = logging.getLogger(__name__)

LEAST, MOST = 1e-3, 1e3  # multipliers beyond are no match of two runs of one recipe


@dataclass(frozen=True)
class Updates:
    """Keys of `fastadv.updates`.

    Attributes:
        file: JSON lines, one a step: the norm of the update, and the multiplier.
        match: such a file of another run, whose norms this run's steps are to have; None: this run is the reference.
    """

    file: str
    match: str | None = None

    @classmethod
    def of(cls, path: str, value: Any) -> Updates:
        """Reads the mapping of the yaml."""
        given = keys.mapping(path, value, tuple(f.name for f in fields(cls)))
        for name in ("file", "match"):
            if given.get(name) is not None:
                given[name] = keys.text(f"{path}.{name}", given[name])
        if given.get("file") is None:
            raise keys.key_error(f"{path}.file", None, "name a file for the norms of each step")
        if given["file"] == given.get("match"):
            raise keys.key_error(f"{path}.match", given["match"], "it is the file that this run writes")
        return cls(**given)


def take(options: Updates, optimizer: Any, step: tuple[int, int], *, write: bool) -> dict[str, Any]:
    """Measures the step that follows, and with `match` scales its learning rate; Megatron's scheduler sets the next.

    Args:
        options: the keys.
        optimizer: Megatron's, gradients finished.
        step: rollout_id and step_id.
        write: whether this rank writes the line.

    Returns:
        The line: "update_norm" as it will be, "multiplier", and "clip_ratio" of `custom_loss` if that ran.

    Raises:
        ValueError: no optimizer, one with a loss scale, a step that the reference's file has not, norms that no
            multiplier can match.
    """
    if optimizer is None:
        raise ValueError("fastadv.updates measures steps of an optimizer, and --debug-disable-optimizer leaves none")
    norm, multiplier = update_norm(optimizer), 1.0
    if options.match is not None:
        multiplier = _multiplier(norm, _reference(options.match, step), options.match, step)
        for inner, _ in _inner(optimizer):
            for group in inner.param_groups:
                group["lr"] = group["lr"] * multiplier
    line: dict[str, Any] = {
        "rollout_id": step[0], "step_id": step[1], "update_norm": norm * multiplier, "multiplier": multiplier,
        "clip_ratio": CLIPPED.take(_device(list(_inner(optimizer)))),
    }  # fmt: skip
    if write:
        Path(options.file).parent.mkdir(parents=True, exist_ok=True)
        with open(options.file, "a") as file:
            file.write(json.dumps(line) + "\n")
        logger.info("fastadv: update %s", line)
    return line


def update_norm(optimizer: Any) -> float:
    """Euclidean length of the next change of all parameters, over all ranks.

    Raises:
        ValueError: an optimizer with a loss scale, whose gradients are looked at once only.
    """
    mpu: Any = importlib.import_module("megatron.core").mpu
    counted = megatron_filter(mpu.get_tensor_model_parallel_rank())
    optimizers = list(_inner(optimizer))
    for _, own in optimizers:
        if getattr(own, "grad_scaler", None) is not None:
            raise ValueError("fastadv.updates reads gradients before the step, and a loss scale (fp16) is undone in it")
        own.prepare_grads()  # into the optimizer's parameters; the step does the same again
    clip, factor = optimizer.config.clip_grad, 1.0
    if clip > 0:
        factor = min(1.0, clip / (float(optimizer.get_grad_norm()) + 1e-6))
    square = 0.0
    for inner, own in optimizers:
        shards = type(own).__name__ == "DistributedOptimizer"
        gradients: list[Tensor | None] = []
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            mine = counted("", parameter) and (shards or _first_copy(mpu, parameter))
            gradients.append(parameter.grad * factor if mine and parameter.grad is not None else None)
        square += fa.update_norms(plain(inner), {"next": gradients})["next"].update ** 2
    if torch.distributed.is_initialized():
        total = torch.tensor(square, dtype=torch.float64, device=_device(optimizers))
        torch.distributed.all_reduce(total)
        square = float(total)
    return float(square**0.5)


def _inner(optimizer: Any) -> Iterator[tuple[Optimizer, Any]]:
    """Optimizers of torch inside of Megatron's, and what holds each."""
    for own in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(own, "is_stub_optimizer", False):
            yield own.optimizer, own


def _first_copy(mpu: Any, parameter: Tensor) -> bool:
    """Whether this is the first of the data-parallel ranks that hold a parameter whole."""
    if getattr(parameter, "allreduce", True):
        return bool(mpu.get_data_parallel_rank(with_context_parallel=True) == 0)
    return bool(mpu.get_expert_data_parallel_rank() == 0)


def plain(inner: Optimizer) -> Optimizer:
    """The optimizer, or torch's AdamW in the state of a fused Adam, whose kernels run on a GPU in float32 only.

    Raises:
        ValueError: a class that is neither.
    """
    if type(inner).__module__.startswith("torch.optim"):
        return inner
    if not all("betas" in group and "eps" in group for group in inner.param_groups):
        raise ValueError(f"fastadv.updates knows optimizers of torch and fused Adams, not {type(inner).__name__}")
    if not getattr(inner, "adam_w_mode", True):
        raise ValueError("fastadv.updates knows fused Adams with decoupled weight decay (AdamW) only")
    names = ("lr", "betas", "eps", "weight_decay")
    made = AdamW([{"params": list(g["params"]), **{name: g[name] for name in names}} for g in inner.param_groups])
    for group in inner.param_groups:
        for parameter in group["params"]:
            held = inner.state.get(parameter, {})
            if "exp_avg" not in held:
                continue
            step = torch.as_tensor(float(held.get("step", group.get("step", 0))))
            averages = {name: held[name].to(torch.float32) for name in ("exp_avg", "exp_avg_sq")}
            made.state[parameter] = {"step": step, **averages}
    return made


def _device(optimizers: list[tuple[Optimizer, Any]]) -> torch.device:
    found = (p.device for inner, _ in optimizers for group in inner.param_groups for p in group["params"])
    return next(found, torch.device("cpu"))


def lines_of(path: str, rollout_id: int) -> dict[int, dict[str, Any]]:
    """Lines of a rollout's steps in such a file, by step_id; the last of a step counts. None where there is no file."""
    if not Path(path).exists():
        return {}
    lines = [json.loads(text) for text in Path(path).read_text().splitlines() if text.endswith("}")]  # whole ones
    return {line["step_id"]: line for line in lines if line["rollout_id"] == rollout_id}


def _reference(path: str, step: tuple[int, int]) -> float:
    """The norm of a step in another run's file."""
    line = lines_of(path, step[0]).get(step[1])
    if line is None:
        raise ValueError(f"fastadv.updates.match: {path} has no step {step[0]}.{step[1]}; the reference run is shorter")
    return float(line["update_norm"])


def _multiplier(norm: float, reference: float, path: str, step: tuple[int, int]) -> float:
    if norm == reference == 0:
        return 1.0
    found = reference / norm if norm > 0 else float("inf")
    if not LEAST <= found <= MOST:
        raise ValueError(
            f"fastadv.updates.match: in step {step[0]}.{step[1]} this run would move by {norm:g} and {path} by "
            f"{reference:g}; no learning rate of one recipe makes up for that"
        )
    return found
