import importlib.abc
import importlib.util
import os
import sys

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("fastadv", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("fastadv")


class _StrictKernels(importlib.abc.MetaPathFinder):
    """Whatever imports the Triton kernels first makes their interpreter strict: no launch goes unchecked.

    A test that launches kernels of its own calls `strict_interpreter.install()` itself.
    """

    def find_spec(self, name, path, target=None):
        if name == "fastadv.triton_kernels":
            import strict_interpreter  # imports triton, which most tests do without

            strict_interpreter.install()
        return None  # those that come next find the module


class _EmulatedKernels(importlib.abc.MetaPathFinder):
    """Whatever imports the CUDA kernels first gets them compiled for the CPU, on whose tensors they then run."""

    def find_spec(self, name, path, target=None):
        if name != "fastadv._cuda":
            return None
        import cuda_kernels

        return importlib.util.spec_from_file_location(name, cuda_kernels.chosen())


# Triton kernels run in Triton's interpreter, but for `make gpu`, which says 0. Triton looks at this when a kernel is
# defined, so it is set before anything imports triton. Subprocesses of tests inherit it, but not the checks.
if os.environ.setdefault("TRITON_INTERPRET", "1") == "1":
    sys.meta_path[:0] = [_StrictKernels(), _EmulatedKernels()]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread():
    """The tensors are small, and a second thread only waits; tests of threads set their own number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    return tensor.fill_(True) if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Memory that an op allocates without writing it holds NaN, or the largest integer."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, plain=plain, **kwargs: _poison(plain(*args, **kwargs)))
