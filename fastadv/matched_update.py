"""The matched-update control: how far two arms would move the weights, and the learning rate that makes it equally far.

An optimizer's step does not grow with the gradient (Adam's hardly knows its scale), so gradient norms say nothing about
it. Here the optimizer itself is run, on copies in float64, one parameter at a time.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastadv import validation
from fastadv.gradproj.sharding import is_dtensor, local_part, reduced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MATCHES = ("update", "gradient_part")
TOLERANCE = 1e-6
PLAIN = ("foreach", "fused", "capturable", "differentiable")  # options that change how a step runs, not what it is

Gradients = Sequence[Tensor | None]


class UpdateNorm(NamedTuple):
    """Euclidean norms over all parameters of one dry run.

    Attributes:
        update: of what the step adds to the parameters, weight decay included, decoupled or not.
        gradient_part: the same with every group's weight decay at 0: what is left is the arm's.
        gradient: of the gradient itself.
    """

    update: float
    gradient_part: float
    gradient: float


@dataclass(frozen=True)
class MatchedUpdate:
    """A learning-rate multiplier, and the norms that it comes from.

    Attributes:
        multiplier: times the learning rates of all groups, the other arm's norm is the reference's.
        match: which norm, "update" or "gradient_part".
        reference: norms of the reference's gradient.
        other: norms of the other arm's gradient.
        scaled: norms of the other arm's gradient with the multiplier, measured, not computed.
    """

    multiplier: float
    match: str
    reference: UpdateNorm
    other: UpdateNorm
    scaled: UpdateNorm

    @contextmanager
    def scaled_learning_rates(self, optimizer: Optimizer) -> Iterator[None]:
        """Multiplies the learning rates of all groups inside of the context, and puts them back:
        `with matched.scaled_learning_rates(optimizer): optimizer.step()`. A scheduler steps outside of it: what it sets
        inside is lost."""
        _check_rates("scaled_learning_rates", optimizer)
        rates = {id(group["lr"]): group["lr"] for group in optimizer.param_groups}  # groups may share a tensor
        tensors = [(rate, rate.detach().clone()) for rate in rates.values() if isinstance(rate, Tensor)]
        numbers = [(group, group["lr"]) for group in optimizer.param_groups if not isinstance(group["lr"], Tensor)]
        try:
            for rate, _ in tensors:
                rate.detach().mul_(self.multiplier)
            for group, rate in numbers:
                group["lr"] = rate * self.multiplier
            yield
        finally:
            for rate, before in tensors:
                rate.detach().copy_(before)
            for group, rate in numbers:
                group["lr"] = rate


def update_norms(
    optimizer: Optimizer,
    gradients: Mapping[str, Gradients | None],
    *,
    process_group: ProcessGroup | None = None,
) -> dict[str, UpdateNorm]:
    """Norms of the steps that an optimizer would make for each of several gradients.

    Nothing is changed: not parameters, gradients, the optimizer's state, step counts, hooks, a scheduler's count, nor
    random numbers (a step that calls its base class's by name, not by super(), runs the hooks that are registered for
    all optimizers). Each gradient starts from the optimizer's present state. The step is computed in float64 from the
    state as it is, by the optimizer's own code without foreach, fused and capturable, and is not rounded to the
    parameters' dtype: at a learning rate of 1e-6 most of a bfloat16 parameter would not move at all. Of a step below
    1e-10 of the weights float64 keeps fewer than six digits.

    Memory: float64 copies of one parameter (of its shard), its gradient and its state, and what the optimizer's code
    needs beside them, for the optimizers of torch.optim; of all parameters at once for any other class, whose step may
    look across them. Time: a single-tensor step per gradient, and a second one for groups with weight decay. The host
    waits for the device.

    Args:
        optimizer: any `torch.optim.Optimizer` whose step needs no closure, and whose code runs in float64.
        gradients: a list per name, in the order of the parameters in `optimizer.param_groups`, as the optimizer would
            see them: unscaled, reduced over ranks, clipped if the trainer clips. None for a parameter that has none
            (it does not move), None for a list: the gradients in `.grad` now.
        process_group: ranks that hold other parts of the parameters; squares are added over it, in one all-reduce that
            every rank has to join. DTensors (FSDP2) are read from their placements, so what ranks hold twice counts
            once; plain tensors are taken for parts, so leave the group out where every rank holds all of them.

    Returns:
        name -> UpdateNorm, the same on all ranks of the group.

    Raises:
        TypeError: not an optimizer of torch or one that cannot be copied, no mapping of lists, a gradient that is no
            tensor of real numbers, a plain gradient of a DTensor.
        ValueError: an optimizer that needs a closure, holds a parameter twice, or whose code fails on these gradients
            in float64; a list of another length, a gradient of another shape or device, DTensors with shards outside
            of the group.
    """
    _check_optimizer(optimizer)
    if not isinstance(gradients, Mapping):
        raise TypeError(f"update_norms: gradients is a {type(gradients).__name__}; pass a dict of a list per name")
    names = list(gradients)
    if not names:
        raise ValueError("update_norms: gradients is empty; pass one list of gradients per name")
    lists = {name: _checked(optimizer, name, gradients[name]) for name in names}
    return dict(zip(names, _norms(optimizer, list(lists.values()), 1.0, process_group), strict=True))


def matched_update(
    optimizer: Optimizer,
    reference: Gradients | None,
    other: Gradients | None,
    *,
    match: str = "update",
    process_group: ProcessGroup | None = None,
) -> MatchedUpdate:
    """The learning-rate multiplier that makes one arm's step as long as another's, on the same batch.

    Args:
        optimizer: as in `update_norms`; both arms start from its present state.
        reference: gradients of the arm whose step is the measure; None: those in `.grad`.
        other: gradients of the arm whose learning rate is to be scaled; None: those in `.grad`.
        match: "update", the whole change of the weights, or "gradient_part", without weight decay. Decoupled decay is
            proportional to the learning rate too, so the multiplier scales it with the rest.
        process_group: as in `update_norms`.

    Returns:
        The MatchedUpdate. The scaled norm has been measured and is the reference's to 1e-6.

    Raises:
        ValueError: an arm that does not move the weights, or by a number that is not finite; an optimizer whose step is
            not proportional to its learning rate (Adafactor above 1/sqrt(step), Rprop after its first step, ASGD), or
            that has none; what `update_norms` refuses.
        TypeError: as of `update_norms`.
    """
    validation.choice("matched_update", "match", match, MATCHES)
    _check_optimizer(optimizer)
    _check_rates("matched_update", optimizer)
    norms = update_norms(optimizer, {"reference": reference, "other": other}, process_group=process_group)
    target, start = (getattr(norms[name], match) for name in ("reference", "other"))
    for name, norm in (("reference", target), ("other", start)):
        if not (math.isfinite(norm) and norm > 0):
            raise ValueError(
                f"matched_update: the {match} norm of {name} is {norm}; no learning rate matches it with another. "
                "Skip the step"
            )
    multiplier = target / start
    scaled = _norms(optimizer, [_checked(optimizer, "other", other)], multiplier, process_group)[0]
    reached = getattr(scaled, match)
    if not abs(reached - target) <= TOLERANCE * target:
        raise ValueError(
            f"matched_update: with learning rates times {multiplier:.6g} the norm is {reached:.9g}, not {target:.9g}: "
            f"the step of {type(optimizer).__name__} is not proportional to its learning rate here, or too small "
            "beside the weights for float64"
        )
    return MatchedUpdate(multiplier, match, norms["reference"], norms["other"], scaled)


class _Member(NamedTuple):
    """A parameter with its gradient."""

    name: str
    group: dict[str, Any]
    parameter: Tensor
    gradient: Tensor | None


def _check_optimizer(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"update_norms: optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer (the one inside of "
            "a wrapper)"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise ValueError(
            f"update_norms: {type(optimizer).__name__} steps with a closure: it evaluates the loss at points that it "
            "picks, so no gradient has an update of its own"
        )


def _check_rates(op: str, optimizer: Optimizer) -> None:
    """Raises unless every group has a learning rate that can be scaled."""
    for i, group in enumerate(optimizer.param_groups):
        rate = group.get("lr")
        if not (rate.is_floating_point() if isinstance(rate, Tensor) else isinstance(rate, Real)):
            raise ValueError(
                f"{op}: param_groups[{i}]['lr'] of {type(optimizer).__name__} is {rate!r}; what is scaled is a "
                "learning rate that is a number or a floating-point tensor"
            )


def _checked(optimizer: Optimizer, name: str, gradients: Gradients | None) -> list[_Member]:
    """All parameters, with gradients that fit."""
    held = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if len({id(parameter) for _, parameter in held}) < len(held):
        raise ValueError("update_norms: the optimizer holds a parameter twice and would step it twice; give it once")
    if gradients is None:
        gradients = [parameter.grad for _, parameter in held]
    if not isinstance(gradients, Sequence):
        raise TypeError(f"update_norms: {name!r} is a {type(gradients).__name__}; pass a list with one gradient each")
    if len(gradients) != len(held):
        raise ValueError(
            f"update_norms: {name!r} has {len(gradients)} gradients, the optimizer {len(held)} parameters; pass one "
            "each, None for a parameter without one"
        )
    members = []
    for i, ((group, parameter), gradient) in enumerate(zip(held, gradients, strict=True)):
        where = f"parameter {i} ({name!r})"
        members.append(_Member(where, group, parameter, gradient))
        if gradient is None:
            continue
        if not isinstance(gradient, Tensor):
            raise TypeError(
                f"update_norms: the gradient of {where} is a {type(gradient).__name__}; pass a tensor or None"
            )
        real = gradient.is_floating_point() and parameter.is_floating_point()
        if not real or is_dtensor(gradient) != is_dtensor(parameter):
            raise TypeError(
                f"update_norms: the gradient of {where} is a {type(gradient).__name__} of {gradient.dtype}, which is a "
                f"{type(parameter).__name__} of {parameter.dtype}; pass real numbers, and DTensors for DTensors"
            )
        if gradient.shape != parameter.shape:
            raise ValueError(
                f"update_norms: the gradient of {where} has shape {list(gradient.shape)}, the parameter "
                f"{list(parameter.shape)}; lists follow the order of optimizer.param_groups"
            )
        if gradient.device != parameter.device or gradient.is_meta:
            raise ValueError(
                f"update_norms: the gradient of {where} is on {gradient.device}, the parameter on {parameter.device}; "
                "both have to be on one device, with values"
            )
    return members


@torch.no_grad()
def _norms(
    optimizer: Optimizer, lists: Sequence[list[_Member]], factor: float, process_group: ProcessGroup | None
) -> list[UpdateNorm]:
    """Of each list of gradients, with learning rates times a factor."""
    parameters = [member.parameter for member in lists[0]]
    device = parameters[0].device if parameters else torch.get_default_device()
    gpus = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    alone = _steps_alone(optimizer)
    squares = torch.zeros(len(lists), 3, dtype=torch.float64, device=device)  # update, gradient part, gradient
    for row, members in zip(squares, lists, strict=True):
        for part in [[m] for m in members if m.gradient is not None] if alone else [members]:
            with nullcontext() if alone else _random_numbers_kept(gpus):
                changes = _changes(optimizer, part, factor)
            undecayed = changes
            if any(m.group.get("weight_decay") for m in part):
                with nullcontext() if alone else _random_numbers_kept(gpus):
                    undecayed = _changes(optimizer, part, factor, weight_decay=0.0)
            for member, *values in zip(part, changes, undecayed, strict=True):
                if member.gradient is not None:
                    values.append(_dense(member.gradient))
                for i, value in enumerate(values):
                    local = local_part(member.name, value, process_group)
                    if local is not None:
                        row[i] += local.to(torch.float64).square().sum().to(device)
    return [UpdateNorm(*row) for row in reduced(squares, process_group).sqrt().tolist()]


def _steps_alone(optimizer: Optimizer) -> bool:
    """Whether each parameter is stepped for itself, as torch.optim does; any other class gets all of them together."""
    return type(optimizer).__module__.startswith("torch.optim.")


@contextmanager
def _random_numbers_kept(gpus: list[int]) -> Iterator[None]:
    """Puts back the state of the generators of torch, Python and NumPy."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _dense(gradient: Tensor) -> Tensor:
    """The numbers of a gradient, sparse or not."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _changes(optimizer: Optimizer, members: list[_Member], factor: float, **options: float) -> list[Tensor]:
    """What a step would add to these parameters, float64; group options are replaced by those given."""
    name = type(optimizer).__name__
    twins = {m.parameter: nn.Parameter(m.parameter.to(torch.float64, copy=True)) for m in members}
    memo: dict[int, Any] = {id(parameter): twin for parameter, twin in twins.items()}
    groups = []
    for group in optimizer.param_groups:
        mine = [m for m in members if m.group is group]
        if not mine:
            continue
        other = {
            key: _copied(f"option {key!r} of {name}", value, memo) for key, value in group.items() if key != "params"
        }
        other |= {key: False for key in PLAIN if key in group}
        other |= {key: value for key, value in options.items() if key in group}
        if factor != 1:
            other["lr"] = other["lr"] * factor
        if isinstance(other.get("eps"), tuple) and other["eps"][0] is None:  # Adafactor's depends on the dtype
            other["eps"] = (torch.finfo(mine[0].parameter.dtype).eps, *other["eps"][1:])
        memo[id(group)] = {**other, "params": [twins[m.parameter] for m in mine]}
        groups.append(memo[id(group)])
    state: dict[Any, Any] = defaultdict(dict)
    shared = [] if _steps_alone(optimizer) else [key for key in optimizer.state if not isinstance(key, Tensor)]
    for key in (*twins, *shared):
        if key in optimizer.state:
            state[twins.get(key, key)] = _copied(f"the state of {name}", optimizer.state[key], memo)
    memo |= {id(optimizer.param_groups): groups, id(optimizer.state): state}
    double = _double(optimizer, memo)
    for m in members:
        twins[m.parameter].grad = None if m.gradient is None else m.gradient.to(torch.float64, copy=True)
    try:
        double.step()
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"update_norms: a dry run of {name} in float64, of {members[0].name}, stopped with {type(error).__name__}: "
            f"{error}"
        ) from error
    return [(twins[m.parameter] - m.parameter.to(torch.float64)).detach() for m in members]


def _double(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy without hooks; of what is in `memo`, the copy that is there."""
    kind = type(optimizer)
    double = memo[id(optimizer)] = object.__new__(_without_hooks(kind))  # type: ignore[arg-type]
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            setattr(double, key, OrderedDict())
        elif key != "step":  # a scheduler's counter wraps it
            setattr(double, key, _copied(f"attribute {key!r} of {kind.__name__}", value, memo))
    double.defaults |= {key: False for key in PLAIN if key in double.defaults}
    return double


@cache
def _without_hooks(kind: type[Optimizer]) -> type[Optimizer]:
    """The class, with its step, and those that it reaches by super(), without the wrapper around them that runs the
    hooks which are registered for all optimizers."""
    inherited = [base for base in kind.__bases__ if issubclass(base, Optimizer) and base is not Optimizer]
    bases = [_without_hooks(base) for base in inherited]  # type: ignore[arg-type]
    step = inspect.unwrap(kind.step, stop=lambda step: not getattr(step, "hooked", False))
    return type(kind.__name__, (kind, *bases), {"step": step})


def _copied(what: str, value: Any, memo: dict[int, Any]) -> Any:
    try:
        return _widened(value, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise TypeError(
            f"update_norms: {what} cannot be copied for a dry run ({error}); pass the optimizer inside of it"
        ) from error


def _widened(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of an optimizer's state, option or attribute, tensors in float64. What is one object stays one."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        dtype = torch.float64 if value.is_floating_point() else value.dtype
        memo[id(value)] = value.detach().to(dtype, copy=True)
        return memo[id(value)]
    if isinstance(value, dict):
        table = memo[id(value)] = copy.copy(value)
        table.clear()
        table.update({_widened(key, memo): _widened(x, memo) for key, x in value.items()})
        return table
    if isinstance(value, Optimizer):  # inside of a wrapper
        return _double(value, memo)
    if type(value) is list:
        other = memo[id(value)] = []
        other.extend(_widened(x, memo) for x in value)
        return other
    if type(value) is tuple:
        return tuple(_widened(x, memo) for x in value)
    return copy.deepcopy(value, memo)
