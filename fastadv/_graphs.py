"""What `torch.compile` is told about functions, without loading the compiler."""

from __future__ import annotations

from typing import TypeVar

F = TypeVar("F")


def constant_in_graphs(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which imports torch._dynamo (and triton, where it is installed) at once.

    The mark is all that it leaves on the function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
