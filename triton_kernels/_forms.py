"""The compiled forms of a kernel, as the ahead-of-time gate wants them."""

from __future__ import annotations

from typing import Any

from fastadv.triton_kernels._launch import Configuration


def aligned_form(
    kernel: Any, arguments: dict[str, str], constants: dict[str, Any], *, num_warps: int = 4
) -> Configuration:
    """A form with all pointers aligned. `arguments` are types by name, in the order of the launch."""
    pointers = tuple(name for name, type_ in arguments.items() if type_.startswith("*"))
    return Configuration(kernel, tuple(arguments.items()), tuple(constants.items()), pointers, num_warps)
