"""The project's CUDA kernels, compiled for the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cuda_emulation import build

CSRC = build.ROOT / "csrc"
SOURCES = ("bindings_cuda.cpp", *sorted(f"cuda/{path.name}" for path in (CSRC / "cuda").glob("*.cu")))
# In the environment of a pytest: the extension that `backend="cuda"` runs, built under a sanitizer or with a fault.
MODULE = "CUDA_EMULATION_MODULE"


missing = build.missing  # why they cannot be built here, or None


def emulated(
    sanitizer: str | None = None, *, defines: Mapping[str, int] | None = None, changed: Path | None = None
) -> Path:
    """Path of the extension whose kernels run on CPU tensors; built if it is not there.

    Args:
        sanitizer: as in `build.build`.
        defines: macros beside the usual one.
        changed: a folder laid out like csrc/, whose files come in place of those of the same name.

    Raises ImportError with the reason where it cannot be built.
    """
    if reason := build.missing(sanitizer):
        raise ImportError(reason)
    instead = [] if changed is None else [changed]
    sources = [next(path for folder in (*instead, CSRC) if (path := folder / name).exists()) for name in SOURCES]
    return build.build(
        sources,
        name="_cuda",
        kind="module",
        sanitizer=sanitizer,
        defines={"FASTADV_CUDA_EMULATED": 1, **(defines or {})},
        includes=(*instead, CSRC, CSRC / "include"),
    )


def chosen() -> Path:
    """The extension that this process runs."""
    return Path(os.environ[MODULE]) if MODULE in os.environ else emulated()
