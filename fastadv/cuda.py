"""The compiled CUDA kernels: loading them, and where they run."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor


@functools.cache
def module() -> ModuleType:
    """The extension. Raises ImportError with the reason where it was not built or does not load."""
    return importlib.import_module("fastadv._cuda")


def place(t: Tensor) -> tuple[int, int]:
    """Device and current stream of a tensor, as every function of the extension takes them first."""
    if t.device.type != "cuda":
        return 0, 0  # kernels that were compiled for the CPU have neither
    index = t.device.index
    return index, torch._C._cuda_getCurrentRawStream(index)
