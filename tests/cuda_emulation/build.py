"""Compiles CUDA C++ for the CPU: a shared library, a Python extension or a program, plain or under a sanitizer."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from . import launch_syntax

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BYTE_COUNTS = HERE / "byte_counts.cpp"  # compiled as it is: what it calls calls nothing back
CACHE = ROOT / "build" / "cuda_emulation"
COMPILER = os.environ.get("CXX", "g++")

# Kernels read one type as another (uint4 as bfloat16), which nvcc allows, and GCC with the first flag.
# A multiplication and an addition are one rounding only where the source says so. Each module has an emulation of its
# own: nothing of it is visible to others.
FLAGS = [
    "-std=c++17",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fPIC",
    "-pthread",
    f"-fmacro-prefix-map={ROOT}/=",
]
SANITIZER_FLAGS = {
    None: ["-O1"],  # of -O2 the compiler takes longer than the tests gain
    "address": [
        "-Og",  # as fast here as -O1, and a quarter cheaper to compile
        "-g1",
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
    ],
    "thread": ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=thread"],
    "coverage": ["-O0", "--coverage", "-fprofile-update=atomic"],  # gcov reads the files beside the library
    # A call of byte_counts.cpp at each access. No sanitizer's library is there, so headers must not ask for one.
    "bytes": [
        "-O1",
        "-fsanitize=kernel-address",
        "--param=asan-instrumentation-with-call-threshold=0",
        "--param=asan-stack=0",
        "--param=asan-globals=0",
        "-U__SANITIZE_ADDRESS__",
    ],
}
SANITIZER_LIBRARIES = {"address": "libasan.so", "thread": "libtsan.so"}
# Python leaves memory to the system when it ends, and is built without ThreadSanitizer.
SANITIZER_OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1"},
}
LINK_FLAGS = {"library": ["-shared"], "module": ["-shared"], "program": []}


class BuildError(Exception):
    """What the compiler said."""


def missing(sanitizer: str | None = None) -> str | None:
    """Why nothing can be built here, or nothing with this sanitizer: the reason of a skip. None: it can."""
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return "the CUDA emulation switches stacks as x86-64 Linux does"
    if shutil.which(COMPILER) is None:
        return f"no C++ compiler {COMPILER} on the PATH"
    if "Free Software Foundation" not in _run([COMPILER, "--version"]):
        return f"the CUDA emulation is built with GCC, and {COMPILER} is another compiler"
    if sanitizer in SANITIZER_LIBRARIES and not _library(SANITIZER_LIBRARIES[sanitizer]).is_absolute():
        return f"{COMPILER} has no {SANITIZER_LIBRARIES[sanitizer]}"
    if cuda_include() is None:
        return "no cuda_runtime.h: neither CUDA_HOME nor an nvcc on the PATH leads to CUDA's headers"
    return None


@functools.cache
def cuda_include() -> Path | None:
    """The folder of CUDA's headers; nothing else of CUDA is used."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if nvcc := shutil.which("nvcc"):
        homes += re.findall(r"^#\$ TOP=(.*)$", _run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull]), re.MULTILINE)
    for home in homes:
        if (include := Path(home, "include").resolve()).joinpath("cuda_runtime.h").exists():
            return include
    return None


def build(
    sources: Sequence[str | Path],
    *,
    name: str,
    kind: str = "library",
    sanitizer: str | None = None,
    defines: Mapping[str, str | int] | None = None,
    includes: Iterable[str | Path] = (),
) -> Path:
    """Compiles and links, unless the same was built before, and returns the path.

    Args:
        sources: `.cu` and `.cpp` files, relative to the root of the repository; all see the emulation's headers.
        name: of the file, and so of a Python extension's module.
        kind: `library`, `module` (a Python extension, with pybind11's headers on the path) or `program`.
        sanitizer: None, `address` (with undefined behaviour), `thread`, `coverage` for gcov, or `bytes` for counts of
            the bytes that kernels move.
        defines: macros.
        includes: folders of headers, relative to the root.
    """
    if reason := missing(sanitizer):
        raise BuildError(reason)
    flags = FLAGS + SANITIZER_FLAGS[sanitizer]
    preprocess = [f"-D{macro}={value}" for macro, value in (defines or {}).items()]
    preprocess += [f"-I{ROOT / folder}" for folder in includes] + ["-isystem", str(cuda_include())]
    if kind == "module":
        import pybind11

        preprocess += ["-isystem", pybind11.get_include(), "-isystem", sysconfig.get_paths()["include"]]
    paths = [ROOT / source for source in sources]
    paths += [BYTE_COUNTS] if sanitizer == "bytes" else []
    texts = _both_cores(lambda path: _preprocessed(path, flags + preprocess), paths)

    folder = CACHE / f"{name}-{sanitizer or 'plain'}-{_digest(kind, name, flags, texts)}"
    target = folder / (name if kind == "program" else f"{name}.so")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # tests in other processes may want the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            # Modules share what they have in common; gcov's counters are a library's own, and beside its objects.
            where = folder if sanitizer == "coverage" else CACHE / "objects"
            where.mkdir(exist_ok=True)
            each = [FLAGS + SANITIZER_FLAGS[None] if path == BYTE_COUNTS else flags for path in paths]
            names = [f"{p.stem}-{_digest(f, t)}.o" for p, f, t in zip(paths, each, texts, strict=True)]
            objects = [where / object_name for object_name in names]
            _both_cores(lambda one: _compiled(*one), list(zip(texts, objects, each, strict=True)))
            unfinished = folder / "linked"
            _run([COMPILER, *flags, *LINK_FLAGS[kind], *map(str, objects), "-o", str(unfinished)])
            unfinished.rename(target)
    return target


def load_module(path: Path) -> ModuleType:
    """Imports a Python extension from where it was built."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fail_next_launch(module: ModuleType, error: int) -> None:
    """The next launch of this thread does not run; the module's cudaGetLastError returns `error` after it."""
    ctypes.CDLL(str(module.__file__)).cuda_emulation_fail_next_launch(error)


def operations(module: ModuleType) -> int:
    """Kernels, memsets and copies that the module has started so far."""
    count = ctypes.CDLL(str(module.__file__)).cuda_emulation_operations
    count.restype = ctypes.c_longlong
    return int(count())


def preloaded(sanitizer: str) -> dict[str, str]:
    """The environment of a Python process that can load modules with this sanitizer."""
    libraries = [str(_library(SANITIZER_LIBRARIES[sanitizer])), str(_library("libstdc++.so"))]
    return {**os.environ, **SANITIZER_OPTIONS[sanitizer], "LD_PRELOAD": " ".join(libraries)}


def _library(name: str) -> Path:
    return Path(_run([COMPILER, f"-print-file-name={name}"]).strip())  # the bare name where there is none


def _preprocessed(source: Path, flags: list[str]) -> str:
    header = str(HERE / "cuda_emulation.h")
    return _run([COMPILER, *flags, "-include", header, "-E", "-x", "c++", str(source)])


@functools.cache
def _tools() -> tuple[str, str]:
    return _run([COMPILER, "--version"]), Path(launch_syntax.__file__).read_text()


def _digest(*parts: object) -> str:
    """Of what is compiled and by what. Sources are not rewritten for it, which takes longer than all else of a build
    that is there."""
    return hashlib.sha256(repr((*_tools(), *parts)).encode()).hexdigest()[:16]


def _compiled(text: str, target: Path, flags: list[str]) -> None:
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        source, unfinished = target.with_suffix(".ii"), target.with_suffix(".unfinished")
        source.write_text(launch_syntax.rewrite(text))
        _run([COMPILER, *flags, "-c", str(source), "-o", str(unfinished)])
        unfinished.rename(target)


def _both_cores(function: Callable[[Any], Any], items: list) -> list:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, items))


def _run(command: list[str]) -> str:
    # Preprocessed sources name the folder that the compiler ran in.
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout or done.stderr  # nvcc --dryrun writes to the second
