"""Kernel launchers as torch.library ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Launcher = Callable[..., Any]
PLAIN = (Tensor, torch.nn.Parameter)


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
            op.register_autograd(autograd[0], setup_context=autograd[1])

        def call(*args: Any) -> Any:
            if torch.compiler.is_compiling() or needs_dispatcher(args):
                return op(*args)
            return launch(*args)

        return call

    return register


def needs_dispatcher(args: tuple[Any, ...]) -> bool:
    """Whether a dispatch mode or a tensor subclass has to see the call."""
    if torch._C._len_torch_dispatch_stack():
        return True
    return any(isinstance(a, Tensor) and type(a) not in PLAIN for a in args)
