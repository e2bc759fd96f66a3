"""What a step's gradient points at, `--custom-megatron-before-train-step-hook-path`.

There is no hook after the backward pass: this one wraps the function with which Megatron finishes gradients, and
sketches them there, reduced and before clipping. A sketch is a megabyte, the same bits however parameters are split
over data-parallel ranks, and two runs that keep theirs can be compared step by step: the cosine between an arm's
gradient and another's.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fastadv.integrations import keys
from fastadv.integrations.miles import updates
from torch import Tensor

from fastadv.gradproj import megatron_filter
from fastadv.ops.count_sketch import QUANTUM, check_sketch, count_sketch, sketch_values

logger = logging.getLogger(__name__)

REFERENCES = ("first", "previous")
FORMAT = "fastadv step sketch 1"


@dataclass(frozen=True)
class Projections:
    """Keys of `fastadv.projections`.

    Attributes:
        file: JSON lines, one a step: cosine to the reference, both norms.
        reference: "first", this run's first step; "previous", the step before; or a folder that another run saved to,
            of which the same step is taken.
        save: a folder for this run's sketches; None: they are not kept.
        size, copies, seed, quantum: of `fastadv.gradproj.count_sketch`; those of runs that are compared have to agree.
    """

    file: str
    reference: str = "first"
    save: str | None = None
    size: int = 65536
    copies: int = 2
    seed: int = 0
    quantum: float = QUANTUM

    def __post_init__(self) -> None:
        check_sketch("projections", self.size, self.copies, self.quantum, self.seed)

    @classmethod
    def of(cls, path: str, value: Any) -> Projections:
        """Reads the mapping of the yaml."""
        given = keys.mapping(path, value, tuple(f.name for f in fields(cls)))
        if "file" not in given:
            raise keys.key_error(f"{path}.file", None, "name a file for the numbers of each step")
        return keys.made(path, cls, given)

    @property
    def settings(self) -> dict[str, Any]:
        """What two sketches have to agree in."""
        return {"size": self.size, "copies": self.copies, "seed": self.seed, "quantum": float(self.quantum)}


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """`--custom-megatron-before-train-step-hook-path`: sketches the gradient of the step that follows, and measures or
    matches its update.

    Args:
        args: the trainer's namespace, with `fastadv.projections`, `fastadv.updates` or both.
        rollout_id, step_id: of the step.
        model: the chunks of this pipeline stage, each in Megatron's DistributedDataParallel.
        optimizer: Megatron's; None under --debug-disable-optimizer.
        opt_param_scheduler: not looked at.

    Raises:
        ValueError: neither key; a model whose gradients are not in Megatron's buffers; what `updates.take` raises.
    """
    from fastadv.integrations.miles.options import Options

    options = Options.of(args)
    if options.projections is None and options.updates is None:
        raise ValueError("before_train_step has nothing to do: set fastadv.projections or fastadv.updates")
    config: Any = importlib.import_module("megatron.core.utils").get_model_config(model[0])
    found = config.finalize_model_grads_func
    finish = getattr(found, "finish", found)  # Megatron's own, which it sets anew for each rollout
    config.finalize_model_grads_func = _looked_at(finish, options, model, optimizer, (rollout_id, step_id))


def _looked_at(
    finish: Callable[..., Any], options: Any, chunks: Sequence[Any], optimizer: Any, step: tuple[int, int]
) -> Callable[..., Any]:
    """Megatron's function, and then what the options ask for."""

    @functools.wraps(finish)
    def finalize(*args: Any, **more: Any) -> Any:
        result = finish(*args, **more)
        if options.projections is not None:
            _steps(options.projections).take(chunks, step)
        if options.updates is not None:
            updates.take(options.updates, optimizer, step, write=_first_rank())
        return result

    finalize.finish = finish  # type: ignore[attr-defined]
    return finalize


class Steps:
    """The sketches of a run's steps, as far as they are needed again."""

    def __init__(self, options: Projections) -> None:
        self.options = options
        self.reference: Tensor | None = None  # [copies * size] float64

    def take(self, chunks: Sequence[Any], step: tuple[int, int]) -> None:
        """Sketches the finished gradients, on all ranks; the first writes what comes of it."""
        options = self.options
        sketch = sketch_of(chunks, options)
        values = sketch_values(sketch.cpu(), quantum=options.quantum).flatten()  # [copies * size]
        if options.reference not in REFERENCES:
            self.reference = load(step_file(options.reference, step), options)
        elif self.reference is None:
            self.reference = values  # the first step's cosine to itself
        line = {"rollout_id": step[0], "step_id": step[1], **compared(values, self.reference, options.copies)}
        if options.reference == "previous":
            self.reference = values
        if _first_rank():
            if options.save is not None:
                save(step_file(options.save, step), sketch.cpu(), options)
            Path(options.file).parent.mkdir(parents=True, exist_ok=True)
            with open(options.file, "a") as file:
                file.write(json.dumps(line) + "\n")
            logger.info("fastadv: gradient of step %s", line)


@functools.lru_cache(maxsize=4)
def _steps(options: Projections) -> Steps:
    return Steps(options)


def compared(values: Tensor, reference: Tensor, copies: int) -> dict[str, float | None]:
    """Cosine and norms of two gradients from their sketches; None where there is no number."""
    dot, square, other = (
        float(a @ b) / copies for a, b in ((values, reference), (values, values), (reference, reference))
    )
    found = {"norm": square**0.5, "reference_norm": other**0.5, "cosine": None}
    if square * other > 0:
        found["cosine"] = dot / (square * other) ** 0.5
    return {name: value if value is not None and value == value else None for name, value in found.items()}


def step_file(folder: str, step: tuple[int, int]) -> Path:
    """The file of a step's sketch."""
    return Path(folder) / f"{step[0]}-{step[1]}.pt"


def save(path: Path, sketch: Tensor, options: Projections) -> None:
    """Writes a sketch, `[copies, size]` int64."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"format": FORMAT, "sketch": sketch, **options.settings}, path)


def load(path: Path, options: Projections) -> Tensor:
    """Values of a sketch that `save` wrote, `[copies * size]` float64. Nothing in the file is executed.

    Raises:
        ValueError: a file of something else, or of a sketch with other settings.
    """
    found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no sketch of a step")
    other = {name: found.get(name) for name in options.settings}
    sketch = found.get("sketch")
    shape = (options.copies, options.size)
    if other != options.settings or not isinstance(sketch, Tensor) or sketch.shape != shape:
        raise ValueError(f"{path} is a sketch with {other}; fastadv.projections has {options.settings}")
    return sketch_values(sketch, quantum=options.quantum).flatten()


# ---- gradients of Megatron -------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """What this rank counts of a parameter's gradient."""

    key: str  # names the parameter, or this rank's slice of it
    values: Tensor  # [n]
    begin: int  # of them in the flattened parameter


def sketch_of(chunks: Sequence[Any], options: Projections) -> Tensor:
    """The sketch of a model's gradient, `[copies, size]` int64, the same on all ranks."""
    sketch: Tensor | None = None
    for piece in pieces(chunks):
        sketch = count_sketch(
            piece.values, options.size, seed=options.seed, parameter=piece.key, column_offset=piece.begin, out=sketch,
            quantum=options.quantum, copies=options.copies,
        )  # fmt: skip
    if sketch is None:
        device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
        sketch = torch.zeros(options.copies, options.size, dtype=torch.int64, device=device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(sketch)
    return sketch


def pieces(chunks: Sequence[Any]) -> Iterator[Piece]:
    """Every element of the gradient once over all ranks.

    A buffer's gradient is the same on each data-parallel rank, or with the distributed optimizer right in the rank's
    own part of each bucket only: either way a rank counts its part. What is copied over tensor-parallel ranks counts on
    the first; what is split, by expert, tensor or pipeline rank, has the rank in its key, so that sketches compare
    between runs of one layout.

    Raises:
        ValueError: a model without Megatron's buffers, several instances of the distributed optimizer.
    """
    mpu: Any = importlib.import_module("megatron.core").mpu
    tensor_rank, stage = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
    counted = megatron_filter(tensor_rank)
    for number, chunk in enumerate(chunks):
        names = {id(parameter): name for name, parameter in chunk.named_parameters()}
        for buffer in _buffers(chunk):
            distributed = bool(buffer.ddp_config.use_distributed_optimizer)
            for parameter, (start, end, bucket) in buffer.param_index_map.items():
                name = names[id(parameter)]
                if not counted(name, parameter):
                    continue
                low, high = _own(buffer, bucket if distributed else None)
                first, last = max(start, low), min(end, high)
                if first >= last:
                    continue
                split = tensor_rank if getattr(parameter, "tensor_model_parallel", False) else "all"
                expert = "all" if getattr(parameter, "allreduce", True) else mpu.get_expert_model_parallel_rank()
                key = f"stage {stage}, chunk {number}, tensor {split}, expert {expert}: {name}"
                yield Piece(key, buffer.grad_data[first:last], first - start)


def _buffers(chunk: Any) -> list[Any]:
    found = getattr(chunk, "buffers", None)
    if not isinstance(found, list):  # nn.Module's method of this name
        raise ValueError("the model is not in Megatron's DistributedDataParallel, whose buffers hold its gradients")
    return [*found, *getattr(chunk, "expert_parallel_buffers", ())]


def _own(buffer: Any, bucket: int | None) -> tuple[int, int]:
    """This data-parallel rank's part of a buffer, or of one of its buckets."""
    group = buffer.data_parallel_group
    rank, size = (
        (0, 1) if group is None else (torch.distributed.get_rank(group), torch.distributed.get_world_size(group))
    )
    if bucket is None:
        total = buffer.grad_data.numel()
        return total * rank // size, total * (rank + 1) // size
    if getattr(buffer.ddp_config, "num_distributed_optimizer_instances", 1) != 1:
        raise ValueError(
            "--num-distributed-optimizer-instances is above 1: which rank holds what is not looked at here"
        )
    part = buffer.buckets[bucket].grad_data.numel() // size
    begin = buffer.buckets[bucket].offset + rank * part
    return begin, begin + part


def _first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
