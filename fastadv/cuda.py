"""The compiled CUDA kernels: loading them, and where they run."""

from __future__ import annotations

import functools
import importlib
from concurrent.futures import ThreadPoolExecutor
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


def counter(t: Tensor, stream: int) -> Tensor:
    """An int32 zero by which the blocks of a launch tell which of them is the last; each launch leaves it at 0.

    Launches of one stream run one after the other and share it. In a graph, whose launches may run beside any other,
    each has its own.
    """
    if stream and _capturing(t.device):
        return torch.zeros(1, dtype=torch.int32, device=t.device)
    return _counter(t.device, stream)


def _capturing(device: torch.device) -> bool:
    """Whether the current stream of a device, which need not be the current one, is being captured."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@functools.cache
def _counter(device: torch.device, stream: int) -> Tensor:
    """Lives as long as the process. A memory pool that is in use where an op is called first, as while torch.compile
    warms its CUDA graphs up, would give the memory away again: pools are a thread's, so another thread asks for it."""
    with ThreadPoolExecutor(1) as other:
        zero = other.submit(lambda: torch.zeros(1, dtype=torch.int32, device=device)).result()
    if device.type == "cuda":  # that thread's stream is the default one
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
    return zero
