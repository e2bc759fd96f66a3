"""Which part of a gradient this rank counts, where trainers split parameters or copy them over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastadv import validation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Filter = Callable[[str, Tensor], bool]  # name and parameter -> whether this rank counts it


def sum_gradients(model: nn.Module) -> None:
    """Makes FSDP2 add gradients over data-parallel ranks, where it would average them.

    `set_gradient_divide_factor(1.0)` of FSDP2 reaches the module that it is called on and none inside: called on the
    root only, the blocks' gradients stay divided by the number of ranks and the root's are not, and no Gram matrix of
    the two is one of anything. This sets it on every module that `fully_shard` was called on.

    Args:
        model: after `fully_shard`. The setting stays: a training step that wants the mean divides its loss.

    Raises:
        ValueError: no part of the model is sharded by FSDP2.
    """
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ValueError("sum_gradients: no part of the model is sharded by FSDP2; call it after fully_shard")
    for module in sharded:
        module.set_gradient_divide_factor(1.0)


def megatron_filter(tensor_parallel_rank: int) -> Filter:
    """Counts each parameter of Megatron-like trainers once, as their gradient norm does.

    A parameter that is split over tensor-parallel ranks says so in its attribute `tensor_model_parallel`; any other is
    there on each of them and counts on rank 0. A copy of a tied parameter on another pipeline stage says `shared`.

    Gradients have to be finished: call `capture` after `finalize_model_grads`. Of Megatron's distributed optimizer a
    rank's `main_grad` is reduced in the rank's own slice of the buffer only: `add` those slices.

    Args:
        tensor_parallel_rank: this rank's number within its tensor-parallel group.

    Raises:
        TypeError, ValueError: a rank that is no integer from 0.
    """
    validation.integer("megatron_filter", "tensor_parallel_rank", tensor_parallel_rank)

    def counted(name: str, parameter: Tensor) -> bool:
        if getattr(parameter, "shared", False):
            return False
        return bool(getattr(parameter, "tensor_model_parallel", False)) or tensor_parallel_rank == 0

    return counted


def fsdp2_filter(tensor_parallel_group: ProcessGroup) -> Filter:
    """Counts each parameter once under FSDP2 with tensor parallelism: what `parallelize_module` split over the group
    counts on every rank, and what it left alone, which no placement tells of, on the group's first."""
    import torch.distributed as dist

    members = dist.get_process_group_ranks(tensor_parallel_group)
    first = dist.get_rank() == members[0]

    def counted(name: str, parameter: Tensor) -> bool:
        return first or (is_dtensor(parameter) and members in [ranks for ranks, _ in _along(parameter)])

    return counted


def is_dtensor(value: Any) -> bool:
    """Whether this is a DTensor."""
    if type(value) in (Tensor, nn.Parameter):
        return False  # without loading what it takes to know
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def local_part(name: str, gradient: Tensor, group: ProcessGroup | None) -> Tensor | None:
    """What of a gradient this rank counts: all of a plain tensor, the local shard of a DTensor; None where another rank
    of the group holds the same shard and comes first.

    Raises:
        ValueError: a DTensor whose other shards are on ranks that are not in the group, or one that is not reduced.
    """
    if not is_dtensor(gradient):
        return gradient
    import torch.distributed as dist

    rank = dist.get_rank()
    members = {rank} if group is None else set(dist.get_process_group_ranks(group))
    counted = True
    for ranks, placement in _along(gradient):
        if placement.is_partial():
            raise ValueError(f"the gradient of {name} is not reduced yet ({placement}); redistribute it first")
        if placement.is_replicate():
            counted = counted and rank == min(members.intersection(ranks))
        elif not members.issuperset(ranks):
            raise ValueError(
                f"the gradient of {name} is split over ranks {ranks}, and process_group is "
                f"{'None' if group is None else f'of ranks {sorted(members)}'}: pass one that holds all shards"
            )
    local: Tensor = gradient.to_local()  # type: ignore[attr-defined]
    return local if counted else None


def _along(value: Any) -> list[tuple[list[int], Any]]:
    """Of each mesh dimension of a DTensor: the ranks along it from here, and the placement."""
    import torch.distributed as dist

    mesh = value.device_mesh
    groups = [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim)]
    return list(zip(groups, value.placements, strict=True))


def gradient_of(parameter: Tensor) -> Tensor | None:
    """`.grad`, or Megatron's `main_grad` where there is none."""
    gradient: Tensor | None = parameter.grad
    return getattr(parameter, "main_grad", None) if gradient is None else gradient


def reduced(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the ranks of a group."""
    if group is not None:
        torch.distributed.all_reduce(values, group=group)
    return values
