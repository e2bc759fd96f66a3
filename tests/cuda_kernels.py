"""The project's CUDA kernels, compiled for the CPU."""

from __future__ import annotations

from pathlib import Path

from cuda_emulation import build

SOURCES = ("csrc/bindings_cuda.cpp", *sorted(str(p) for p in (build.ROOT / "csrc/cuda").glob("*.cu")))


missing = build.missing  # why they cannot be built here, or None


def emulated(sanitizer: str | None = None) -> Path:
    """Path of the extension whose kernels run on CPU tensors; built if it is not there.

    Raises ImportError with the reason where it cannot be built.
    """
    if reason := build.missing(sanitizer):
        raise ImportError(reason)
    sources = [Path(path).relative_to(build.ROOT) if Path(path).is_absolute() else path for path in SOURCES]
    return build.build(
        sources,
        name="_cuda",
        kind="module",
        sanitizer=sanitizer,
        defines={"FASTADV_CUDA_EMULATED": 1},
        includes=("csrc", "csrc/include"),
    )
