"""The CUDA extension as it is built and loaded: it needs neither a GPU, a driver nor CUDA, and says what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from test_packaging import python

import fastadv as fa
from bench import cuda_code
from fastadv import cuda, dispatch

EXTENSION = cuda_code.extension()
BUILT = pytest.mark.skipif(EXTENSION is None, reason="fastadv._cuda is not built: no nvcc, or FASTADV_CUDA is 0")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and nothing is missing")
ROOT = Path(fa.__file__).parent.parent

ASK = """
import torch, fastadv as fa
print(fa.backends()["cuda"])
index = fa.segments(torch.tensor([0, 1, -1], dtype=torch.int32))
fa.segment_tokens(fa.SegmentTable(torch.tensor([3.0, 4.0]), index), backend="cuda")
"""


@BUILT
@NO_GPU
def test_without_a_gpu_it_loads_and_says_so() -> None:
    run = python(ASK)
    reason = "torch sees no CUDA device; run it where there is one"
    assert run.stdout.strip() == reason, run.stderr
    assert f"BackendUnavailableError: segment_tokens: backend 'cuda' cannot run: {reason}" in run.stderr


@BUILT
@NO_GPU
def test_a_launch_that_fails_names_the_op_and_the_cause() -> None:
    """Past all checks, as on a machine whose driver is missing or too old."""
    run = python(
        "from fastadv import cuda; cuda.module().segment_tokens(0, 0, (1, 8, 8, 0), False, 0, 0, 0, 4, 0, 0, 0)"
    )
    last = run.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: segment_tokens: cudaError"), run.stderr
    assert "InsufficientDriver" in last or "NoDevice" in last


def test_a_card_without_code_in_the_build_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int) -> None:
        raise RuntimeError("fastadv: cudaErrorNoKernelImageForDevice: no kernel image is available")

    kernels = types.SimpleNamespace(device_type=lambda: "cuda", check_device=refuse)
    monkeypatch.setattr(cuda, "module", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "_load_errors", {})
    reason = fa.backends()["cuda"]
    assert reason.startswith("its extension has no code for this card (fastadv: cudaErrorNoKernelImageForDevice")


@BUILT
def test_it_is_linked_with_nothing_of_cuda_or_torch() -> None:
    linked = subprocess.run(["ldd", str(EXTENSION)], capture_output=True, text=True, check=True).stdout
    libraries = {line.split()[0].split(".so")[0] for line in linked.splitlines()}
    assert libraries <= {"linux-vdso", "libstdc++", "libgcc_s", "libc", "libm", "/lib64/ld-linux-x86-64", "libpthread",
                         "librt", "libdl"}  # fmt: skip


def test_where_it_was_not_built_the_message_says_how() -> None:
    broken = """
import sys, importlib.abc
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "fastadv._cuda":
            raise ImportError("No module named 'fastadv._cuda'")
sys.meta_path.insert(0, Broken())
"""
    run = python(broken + ASK)
    reason = "its extension does not load (No module named 'fastadv._cuda'); install fastadv where nvcc is, with"
    assert run.stdout.startswith(f"{reason} FASTADV_CUDA=1"), run.stderr
    assert f"segment_tokens: backend 'cuda' cannot run: {reason}" in run.stderr


def setup(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("pybind11", reason="setup.py needs it")
    return subprocess.run(
        [sys.executable, "setup.py", *command],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FASTADV_CUDA": "0"}, "fastadv: no CUDA kernels are built: FASTADV_CUDA is 0"),
        (
            {"FASTADV_CUDA": "auto", "CUDA_HOME": "", "PATH": "/usr/bin:/bin"},
            "fastadv: no CUDA kernels are built: there is no nvcc in CUDA_HOME or on the path",
        ),
        ({"FASTADV_CUDA": "yes"}, "FASTADV_CUDA is 'yes'; it must be auto, 0 or 1"),
    ],
    ids=["0", "no nvcc", "yes"],
)
def test_setup_says_what_it_does(environment: dict[str, str], message: str) -> None:
    run = setup("--name", **environment)
    assert message in run.stdout + run.stderr
    assert (run.returncode == 0) == (environment["FASTADV_CUDA"] != "yes")


def fake_nvcc(folder: Path, *, knows: bool = True) -> str:
    """A compiler that knows every option, or no architecture, and compiles nothing."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir()
    dry_run = "exit 0" if knows else 'echo "Unsupported gpu architecture" >&2; exit 1'
    path.write_text(f'#!/bin/sh\ncase "$*" in *--dryrun*) {dry_run};; esac\necho "no such host compiler" >&2\nexit 1\n')
    path.chmod(0o755)
    return str(folder)


def test_without_a_compiler_in_cuda_home_the_path_is_asked(tmp_path: Path) -> None:
    """A CUDA_HOME of libraries alone, as images that only run programs have."""
    path = f"{fake_nvcc(tmp_path)}/bin:{os.environ['PATH']}"
    run = setup("--name", FASTADV_CUDA="auto", CUDA_HOME=str(tmp_path / "libraries"), PATH=path)
    assert run.returncode == 0
    assert "no CUDA kernels" not in run.stdout


ONLY_CUDA = """
import runpy, sys
import pybind11.setup_helpers as helpers
build = helpers.build_ext.build_extensions
def only(self):
    self.extensions = [e for e in self.extensions if e.name == "fastadv._cuda"]
    build(self)
helpers.build_ext.build_extensions = only
sys.argv = ["setup.py", "build_ext", "--build-temp", sys.argv[1], "--build-lib", sys.argv[1]]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("knows", "message"),
    [(True, "no such host compiler"), (False, "knows none of the architectures 80;90a;100")],
    ids=["broken", "too old"],
)
@pytest.mark.parametrize("asked", ["auto", "1"])
def test_a_compiler_that_fails(asked: str, knows: bool, message: str, tmp_path: Path) -> None:
    """The package is installed without CUDA kernels, unless they were asked for."""
    pytest.importorskip("pybind11", reason="setup.py needs it")
    run = subprocess.run(
        [sys.executable, "-c", ONLY_CUDA, str(tmp_path / "build")],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "FASTADV_CUDA": asked, "CUDA_HOME": fake_nvcc(tmp_path, knows=knows)},
    )  # fmt: skip
    assert (run.returncode == 0) == (asked == "auto"), run.stderr
    assert message in run.stdout + run.stderr
    assert "no CUDA kernels: " in run.stdout + run.stderr


@pytest.mark.parametrize("archs", ["75", "ninety", "90b", ""])
def test_architectures_that_there_are_no_kernels_for(archs: str, tmp_path: Path) -> None:
    build = ("--quiet", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path))
    run = setup(*build, FASTADV_CUDA="1", CUDA_HOME=fake_nvcc(tmp_path), FASTADV_CUDA_ARCHS=archs)
    assert run.returncode
    assert f"FASTADV_CUDA_ARCHS is {archs!r}; pass compute capabilities from 80 on" in run.stderr


def test_a_build_that_was_asked_for_and_cannot_be_fails(tmp_path: Path) -> None:
    build = ("--quiet", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path))
    run = setup(*build, FASTADV_CUDA="1", CUDA_HOME="", PATH="/usr/bin:/bin")
    assert run.returncode
    assert "FASTADV_CUDA is 1, but there is no nvcc in CUDA_HOME or on the path" in run.stderr
