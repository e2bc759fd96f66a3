"""Kernel launchers as torch.library ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fastadv import native

Launcher = Callable[..., Any]


def native_op(
    name: str, fake: Callable[..., Any], *, autograd: tuple[Callable[..., Any], Callable[..., None]] | None = None
) -> Callable[[Launcher], Launcher]:
    """Registers a launcher as `torch.ops.fastadv.<name>` and returns a function that takes the shortest way to it.

    `torch.compile`, fake tensors and dispatch modes need the registered op; plain tensors in eager mode go straight to
    the launcher, since the dispatcher's way through a Python op costs tens of microseconds. `autograd` is a pair
    (backward, setup_context) for the registered op.
    """

    def register(launch: Launcher) -> Launcher:
        op = torch.library.custom_op(f"fastadv::{name}", launch, mutates_args=())
        op.register_fake(fake)
        if autograd is not None:
            op.register_autograd(first_order(name)(autograd[0]), setup_context=autograd[1])

        def call(*args: Any) -> Any:
            if torch.compiler.is_compiling() or needs_dispatcher(args):
                return op(*args)
            return launch(*args)

        return call

    return register


def first_order(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a backward whose result is computed by a kernel and has no graph.

    `create_graph=True` works, and differentiating the gradient raises. (`torch.autograd.function.once_differentiable`
    gives a gradient without a graph, silently, where no upstream gradient requires one.)
    """
    message = (
        f"{name}: the gradient comes from a kernel and cannot be differentiated again; use backend='reference' for "
        "second derivatives"
    )

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        def once(ctx: Any, *grads: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                result = backward(ctx, *grads)
            return tuple(_raises(message, x) if isinstance(x, Tensor) else x for x in result)

        return once

    return decorate


def _raises(message: str, t: Tensor) -> Tensor:
    """The tensor with a graph whose backward raises."""
    delayed: Tensor = torch._C._functions.DelayedError(message, 1)(t.detach().requires_grad_())
    return delayed


def needs_dispatcher(args: tuple[Any, ...]) -> bool:
    """Whether a dispatch mode or a tensor subclass, also one inside of a list, has to see the call."""
    if torch._C._len_torch_dispatch_stack():
        return True
    return not _PLAIN.issuperset(map(type, args)) and _holds_subclass(args)


_PLAIN = frozenset({Tensor, type(None), str, bool, int, float})  # a formula is two dozen floats, in each call


def _holds_subclass(args: Iterable[Any]) -> bool:
    for a in args:
        if type(a) in _PLAIN:
            continue
        if isinstance(a, Tensor):
            if not native.has_memory(a):
                return True
        elif isinstance(a, (list, tuple)) and _holds_subclass(a):
            return True
    return False
