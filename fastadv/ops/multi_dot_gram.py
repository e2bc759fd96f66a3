"""Inner products of all pairs of a few vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastadv import cuda, dispatch, native, validation
from fastadv.kernels import Kernel
from fastadv.ops._register import native_op
from fastadv.reference import multi_dot_gram as reference

VECTORS = 8  # kGramVectors of csrc/include/fastadv/gram.h: in one pass over them


def _cpu(vectors: list[Tensor], gram: Tensor) -> int:
    seen = [v if v.dim() in (1, 2) else v.reshape(-1) for v in vectors]
    shape = seen[0].shape
    rows = (shape[0] if len(shape) == 2 else 1, seen[0].numel(), shape[-1], 0)
    threads = native.threads(len(seen) * seen[0].numel())
    native.module().multi_dot_gram(rows, [native.view(v) for v in seen], native.address(gram), threads)
    return 0


def _cuda(vectors: list[Tensor], gram: Tensor) -> int:
    vectors, kernels = [v.contiguous() for v in vectors], cuda.module()
    count, n = len(vectors), vectors[0].numel()
    partials = gram.new_empty(-(-n // kernels.GRAM_BLOCK) * (count * (count + 1) // 2))
    kernels.multi_dot_gram(
        *cuda.place(gram),
        native.DTYPES[vectors[0].dtype],
        n,
        [native.address(v) for v in vectors],
        partials.data_ptr(),
        gram.data_ptr(),
    )
    return 0


# Writes `gram`, [K, K] float64, of at most VECTORS vectors of one shape and dtype.
MULTI_DOT_GRAM = Kernel("multi_dot_gram", cpu=_cpu, triton="multi_dot_gram", cuda=_cuda)


def _fake(backend: str, vectors: list[Tensor]) -> Tensor:
    return vectors[0].new_empty((len(vectors), len(vectors)), dtype=torch.float64)


@native_op("multi_dot_gram", _fake)
def _launch(backend: str, vectors: list[Tensor]) -> Tensor:
    count, device = len(vectors), vectors[0].device
    gram = torch.empty((count, count), dtype=torch.float64, device=device)
    if count <= VECTORS:
        MULTI_DOT_GRAM(backend, vectors, gram)
        return gram
    half = VECTORS // 2
    groups = [slice(first, min(first + half, count)) for first in range(0, count, half)]
    for i, a in enumerate(groups):
        for b in groups[:i]:
            both = vectors[a] + vectors[b]
            part = torch.empty((len(both), len(both)), dtype=torch.float64, device=device)
            MULTI_DOT_GRAM(backend, both, part)
            n = len(vectors[a])
            gram[a, a], gram[a, b], gram[b, a], gram[b, b] = part[:n, :n], part[:n, n:], part[n:, :n], part[n:, n:]
    return gram


def multi_dot_gram(vectors: Sequence[Tensor], *, backend: str = "auto") -> Tensor:
    """Inner products of all pairs of vectors: `gram[i, j] = sum(vectors[i] * vectors[j])`. No gradient flows.

    Up to 8 vectors are read once, all together; of more, groups of 4 in pairs, so K vectors are read ceil(K / 4) - 1
    times. Products and sums of at most 2048 elements are float32, the sums of those float64, in one order: the same
    bits for any number of threads. What overflows or underflows in float32 does so here: keep products of elements that
    matter between 1e-37 and 1e37.

    Where vectors nearly agree, pass their differences: a difference of products keeps nothing of them.

    Args:
        vectors: K tensors of one shape, dtype and device; float64 is computed in float64 by the reference.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        `[K, K]` float64, symmetric to the bit. 0 for tensors without elements. A NaN or an infinity in a vector is in
        each of its products.

    Raises:
        ValueError: no vector, vectors of different shapes or on different devices.
        TypeError: dtypes that differ, or are not floating.
    """
    op = "multi_dot_gram"
    if isinstance(vectors, Tensor):
        raise TypeError(f"{op}: vectors is a tensor; pass a list of tensors (list(vectors) of its rows)")
    given = list(vectors)
    if not given:
        raise ValueError(f"{op}: vectors is empty; pass at least one")
    validation.tensor(op, "vectors[0]", given[0], dtypes=validation.FLOATS)
    for i, v in enumerate(given[1:], 1):
        validation.tensor(
            op, f"vectors[{i}]", v, shape=tuple(given[0].shape), dtypes=(given[0].dtype,), device=given[0].device
        )
    given = [v.detach() for v in given]
    name = dispatch.resolve(op, backend, *given)
    gram: Tensor = reference.multi_dot_gram(given) if name == "reference" else _launch(name, given)
    return gram
