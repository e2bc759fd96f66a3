"""The least time that a GPU can take for some work: a floor, not a prediction.

It has no parameter that was fitted to a run, and nothing here was measured. A real kernel takes longer: it reaches a
part of the memory's bandwidth and less of the tensor cores' rate, and it does not do everything at once.
"""

from __future__ import annotations

from dataclasses import dataclass

LAUNCH = 4e-6
"""Seconds from one kernel's start to the next one's that waits for it, enqueued one by one; an assumption that no data
sheet states. CUDA graphs take less, launches from Python more where the GPU waits for them."""


@dataclass(frozen=True)
class Gpu:
    """What one GPU can do in a second."""

    name: str
    memory: float  # bytes
    tensor: float  # operations of bfloat16 or float16 matrices, dense: half of what data sheets quote for sparse ones
    multiprocessors: int
    clock: float  # of the highest boost, so that a floor stays one

    @property
    def float32(self) -> float:
        """Additions and multiplications; a fused multiply-add is two."""
        return self.multiprocessors * 128 * 2 * self.clock

    @property
    def special(self) -> float:
        """exp2, log2, reciprocals, square roots: 16 a clock and multiprocessor."""
        return self.multiprocessors * 16 * self.clock

    @property
    def instructions(self) -> float:
        """Instructions of whole warps: four schedulers a multiprocessor issue one a clock each."""
        return self.multiprocessors * 4 * self.clock


# NVIDIA, H100 Tensor Core GPU data sheet and architecture whitepaper: SXM5, HBM3 of 3.35 TB/s, 989.4 TFLOP/s of dense
# bfloat16 (at 1.83 GHz), 132 multiprocessors, 1.98 GHz outside of the tensor cores, and so 66.9 TFLOP/s of float32.
# NVIDIA, H200 data sheet: the same processor with HBM3e of 4.8 TB/s. Operations a clock and multiprocessor, of compute
# capability 9.0: CUDA C++ programming guide, arithmetic throughput (128 float32, 16 special) and schedulers (4).
H100 = Gpu("H100 SXM5", memory=3.35e12, tensor=989.4e12, multiprocessors=132, clock=1.98e9)
H200 = Gpu("H200 SXM", memory=4.8e12, tensor=989.4e12, multiprocessors=132, clock=1.98e9)


@dataclass(frozen=True)
class Work:
    """What kernels that run one after another have to do."""

    bytes: float = 0.0  # that memory has to move: what is read and written once, with nothing in a cache before
    tensor: float = 0.0  # operations of matrix products: 2 m n k
    float32: float = 0.0  # additions and multiplications
    special: float = 0.0  # exponentials, logarithms, reciprocals
    instructions: float = 0.0  # of whole warps: those of `bench/compiled_code.py`, times warps, times turns of loops
    launches: int = 1


@dataclass(frozen=True)
class Floor:
    """The least time, in seconds, and what sets it."""

    parts: dict[str, float]  # each limit by itself, all at once
    launches: float  # after one another

    @property
    def seconds(self) -> float:
        """The longest of what is done at once, and the launches."""
        return max(self.parts.values()) + self.launches

    @property
    def limit(self) -> str:
        """What most of the time goes into: a name of `parts`, or "launches"."""
        name = max(self.parts, key=lambda part: self.parts[part])
        return name if self.parts[name] > self.launches else "launches"


def floor(work: Work, gpu: Gpu = H100) -> Floor:
    """The least time that a GPU takes for some work."""
    return Floor(
        {
            "memory": work.bytes / gpu.memory,
            "tensor": work.tensor / gpu.tensor,
            "float32": work.float32 / gpu.float32,
            "special": work.special / gpu.special,
            "instructions": work.instructions / gpu.instructions,
        },
        work.launches * LAUNCH,
    )
