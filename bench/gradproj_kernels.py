"""Kernels of gradient projections: products of all pairs of six gradients, and a count sketch of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import fastadv as fa
from bench.harness import Bandwidth, Line, against_floor, against_peer, copy_bandwidth, interleave, write
from fastadv.ops.count_sketch import COUNT_SKETCH, QUANTUM

ELEMENTS = 2**25
VECTORS = 6
SIZES = (2**14, 2**20)  # slots of a sketch: in the second-level cache, and not

Gram = Callable[[list[Tensor]], Tensor]


def pairwise_dot(vectors: list[Tensor]) -> Tensor:
    """torch.dot of each pair: 21 for six vectors."""
    return _of_pairs(vectors, torch.dot)


def elementwise(vectors: list[Tensor]) -> Tensor:
    """(x * y).sum() of each pair, whose sum is pairwise: slow and exact."""
    return _of_pairs(vectors, lambda x, y: (x * y).sum())


def stacked(vectors: list[Tensor]) -> Tensor:
    """A float32 product of the stacked vectors."""
    rows = torch.stack(vectors)
    return rows @ rows.T


def _of_pairs(vectors: list[Tensor], product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    gram = torch.empty(len(vectors), len(vectors))
    for i, x in enumerate(vectors):
        for j, y in enumerate(vectors[: i + 1]):
            gram[i, j] = gram[j, i] = product(x, y)
    return gram


def table_sketch(size: int) -> Callable[[Tensor], Tensor]:
    """A sketch by stored tables of slots and signs, which is what others do: 9 bytes an element beside the values."""
    slots = torch.randint(0, size, (ELEMENTS,))
    signs = torch.randint(0, 2, (ELEMENTS,), dtype=torch.int8) * 2 - 1
    return lambda values: torch.zeros(size).index_add_(0, slots, values * signs)


def gradproj_kernels() -> bool:
    """Both kernels on 32M elements, beside their peers and the floor of one read."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(ELEMENTS, generator=generator)
    vectors = [common + (i + 1) * torch.randn(ELEMENTS, generator=generator) for i in range(VECTORS)]
    errors = _errors(vectors)
    bandwidth = copy_bandwidth()
    lines = [*_gram(vectors, bandwidth), *_sketch(vectors[0], bandwidth)]
    title = f"gradient projections on {ELEMENTS:,} float32 elements"
    met = write(
        "gradproj_kernels", title, lines,
        {"bandwidth": vars(bandwidth), "largest error of a product, relative to the lengths": errors},
    )  # fmt: skip
    print("largest error of a product, relative to the vectors' lengths:", errors)
    return met and errors["ours"] < min(error for name, error in errors.items() if name != "ours")


def _errors(vectors: list[Tensor]) -> dict[str, float]:
    exact = fa.multi_dot_gram([v.double() for v in vectors], backend="reference")
    lengths = exact.diagonal().sqrt()
    grams: dict[str, Gram] = {
        "ours": fa.multi_dot_gram,
        "torch.dot": pairwise_dot,
        "stack and matmul": stacked,
        "(x * y).sum()": elementwise,
    }
    return {
        name: float(((gram(vectors).double() - exact).abs() / (lengths[:, None] * lengths)).max())
        for name, gram in grams.items()
    }


def _gram(vectors: list[Tensor], bandwidth: Bandwidth) -> list[Line]:
    t = interleave(
        {
            "ours": lambda: fa.multi_dot_gram(vectors),
            "dot": lambda: pairwise_dot(vectors),
            "matmul": lambda: stacked(vectors),
            "elementwise": lambda: elementwise(vectors),
        },
        rounds=4,
        counted=2,
    )
    floor = sum(v.nbytes for v in vectors) / bandwidth.bytes_per_second
    what = f"products of {VECTORS} vectors"
    return [
        against_peer(f"{what} / torch.dot of each pair", t["ours"], t["dot"], 3),
        against_peer(f"{what} / stack and float32 matmul", t["ours"], t["matmul"]),
        against_peer(f"{what} / (x * y).sum() of each pair", t["ours"], t["elementwise"]),
        against_floor(f"{what} / floor of one read", t["ours"], floor),
    ]


def _sketch(values: Tensor, bandwidth: Bandwidth) -> list[Line]:
    steps: dict[str, Callable[[], object]] = {}
    for size in SIZES:
        out = torch.zeros(1, size, dtype=torch.int64)

        def raw(size: int = size, out: Tensor = out) -> None:
            COUNT_SKETCH("cpu", values, 0, 0, 0, QUANTUM, 1, size, out)

        def call(size: int = size, out: Tensor = out) -> None:
            fa.gradproj.count_sketch(values, size, out=out)

        steps |= {f"raw {size}": raw, f"call {size}": call, f"peer {size}": partial(table_sketch(size), values)}
    t = interleave(steps, rounds=4, counted=2)
    floor = values.nbytes / bandwidth.bytes_per_second
    lines: list[Line] = []
    for size in SIZES:
        what = f"sketch to {size:,} slots"
        lines += [
            against_peer(f"{what}: raw op / index_add_ with stored tables", t[f"raw {size}"], t[f"peer {size}"]),
            against_peer(f"{what}: call, values checked / the same", t[f"call {size}"], t[f"peer {size}"]),
            against_floor(f"{what}: raw op / floor of one read", t[f"raw {size}"], floor),
        ]
    return lines
