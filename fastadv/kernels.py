"""The kernels of an op, by backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fastadv import native


class Kernel:
    """One kernel of an op on every backend that has it: `kernel(backend, *tensors)`.

    Each takes the same checked tensors, those that it writes among them, and returns what it found wrong in the values
    (see Fault in csrc/cpu/kernels.h). A kernel that nobody waits for returns 0 and leaves NaN where values are wrong.
    """

    def __init__(
        self, name: str, *, cpu: Callable[..., int], triton: str | None = None, cuda: Callable[..., int] | None = None
    ) -> None:
        """`triton` is the module of `fastadv.triton_kernels` that holds a function of this name."""
        self.name, self._cpu, self._triton, self._cuda = name, cpu, triton, cuda

    def __call__(self, backend: str, *args: Any) -> int:
        """Runs the kernel of a backend."""
        try:
            return self.on(backend)(*args)
        except native.Unreadable as error:
            raise type(error)(f"{self.name}: {error}") from None

    def on(self, backend: str) -> Callable[..., int]:
        """The function of a backend. Triton and its kernels are imported by the first call that asks for them."""
        if backend == "cpu":
            return self._cpu
        if backend == "cuda" and self._cuda is not None:
            return self._cuda
        if backend == "triton" and self._triton is not None:
            module = importlib.import_module(f"fastadv.triton_kernels.{self._triton}")
            kernel: Callable[..., int] = getattr(module, self.name)
            return kernel
        raise ValueError(f"{self.name}: no kernels of backend {backend!r}")
