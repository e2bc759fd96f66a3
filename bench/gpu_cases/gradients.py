"""Ops on gradients: products of all pairs, a count sketch, and the weight gradients of segments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

import fastadv as fa
from bench import cuda_bytes
from bench.gpu_cases.case import CHECKED, Case, Floor, Peer, Run, Work, copy_of, relative_error
from fastadv.coins import number, shifted
from fastadv.ops.segment_weight_gram import Part, weight_gradient_tiles
from fastadv.ops.segment_weight_gram import Run as Rows
from fastadv.reference.count_sketch import CHUNK, descend


def multi_dot_gram(device: str, vectors: int, elements: int) -> Work:
    """Products of all pairs of gradients that have a part in common, each read once."""
    generator = torch.Generator(device).manual_seed(0)
    common = torch.randn(elements, generator=generator, device=device)
    given = [common + (i + 1) * torch.randn(elements, generator=generator, device=device) for i in range(vectors)]

    @cache
    def exact() -> Tensor:
        return fa.multi_dot_gram([v.double() for v in given], backend="reference")

    pairs = torch.ones(vectors, vectors, dtype=torch.bool).tril().nonzero()  # [K (K + 1) / 2, 2]
    place = torch.zeros(vectors, vectors, dtype=torch.int64)  # of a pair in their order
    place[pairs[:, 0], pairs[:, 1]] = place[pairs[:, 1], pairs[:, 0]] = torch.arange(len(pairs))
    place = place.to(device)

    def dots() -> Tensor:
        return torch.stack([torch.dot(given[i], given[j]) for i, j in pairs.tolist()])[place]

    def product(rows: Tensor) -> Tensor:
        return rows @ rows.t()

    def stacked() -> Run:
        rows = torch.stack(given)  # [K, n]
        return lambda: product(rows)

    others = (
        Peer("eager torch.dot of each pair", lambda: dots),
        Peer("eager torch.stack and product", lambda: lambda: product(torch.stack(given))),
        Peer("eager product of what is stacked already", stacked),
    )
    amount = cuda_bytes.multi_dot_gram(elements, vectors)
    return Work(
        lambda backend: lambda: fa.multi_dot_gram(given, backend=backend), others, amount, copy_of(amount, device),
        lambda found: relative_error(found, exact()),
    )  # fmt: skip


def count_sketch(device: str, elements: int, slots: int) -> Work:
    """A count sketch of a gradient, hashed as it is read, in integers."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn(elements, generator=generator, device=device)

    @cache
    def exact() -> Tensor:
        return fa.gradproj.sketch_values(fa.gradproj.count_sketch(values.double(), slots, backend="reference"))

    def error(found: Tensor) -> float:
        return relative_error(fa.gradproj.sketch_values(found) if found.dtype == torch.int64 else found, exact())

    def tables() -> Run:
        places, signs = _tables(elements, slots, device)

        def run() -> Tensor:
            return torch.zeros(1, slots, device=device).index_add_(1, places, (values * signs)[None])

        return run

    amount = cuda_bytes.count_sketch(elements, slots)
    return Work(
        lambda backend: lambda: fa.gradproj.count_sketch(values, slots, backend=backend),
        (Peer("eager index_add_ with stored tables, 9 bytes an element", tables, "the same bits in any order"),),
        amount, copy_of(amount, device), error,
    )  # fmt: skip


def _tables(elements: int, slots: int, device: str) -> tuple[Tensor, Tensor]:
    """Our hash written out, as others keep theirs: slot int64 and sign int8 of each element."""
    column = torch.arange(elements, device=device)  # [n]
    first = torch.zeros((), dtype=torch.int64, device=device)
    state = descend(descend(descend(number("0 "), first), first), column // CHUNK)  # [n] of copy 0, row 0
    places = (((shifted(state, 32) * slots) >> 32) + column % CHUNK) % slots
    return places, (1 - 2 * ((state >> (column % CHUNK)) & 1)).to(torch.int8)


def segment_weights(device: str, segments: int, tokens: int, size: int) -> Work:
    """Every segment's weight gradient dY^T X in float32, of bfloat16, segments from a quarter to seven quarters of the
    mean: one launch of grouped products."""
    generator = torch.Generator(device).manual_seed(0)
    share = torch.linspace(0.25, 1.75, segments)
    ends = [0, *(share.cumsum(0) / share.sum() * tokens).round().long().tolist()]
    x, dy = (
        torch.randn(tokens, size, generator=generator, device=device).to(torch.bfloat16) for _ in range(2)
    )  # [N, d]
    parts = [slice(a, b) for a, b in pairwise(ends)]
    one = Part(x, dy, [Rows(s, part.start, part.start, part.stop - part.start) for s, part in enumerate(parts)])
    numbers = segments * size * size

    def grouped(backend: str) -> Run:
        def run() -> Tensor:
            (tile,) = weight_gradient_tiles([one], segments, 4 * numbers, backend)
            return tile.values

        return run

    @cache
    def exact() -> Tensor:
        return torch.stack([dy[part, CHECKED].double().t() @ x[part].double() for part in parts])

    def loop() -> Run:
        out = torch.empty(segments, size, size, dtype=torch.bfloat16, device=device)

        def run() -> Tensor:
            for s, part in enumerate(parts):
                torch.mm(dy[part].t(), x[part], out=out[s])
            return out

        return run

    def batched() -> Run:
        """Of segments that were padded to the longest before."""
        wide_x, wide_dy = (torch.nn.utils.rnn.pad_sequence([t[part] for part in parts], True) for t in (x, dy))
        return lambda: torch.bmm(wide_dy.transpose(1, 2), wide_x)

    others = (
        Peer("eager torch.mm of each segment in float32, our reference", lambda: grouped("reference")),
        Peer(f"eager torch.mm of each segment, {ROUNDED}", loop, ROUNDED),
        Peer(f"eager torch.bmm, padded before, {ROUNDED}", batched, ROUNDED),
    )
    amount = 2.0 * tokens * size * size
    floor = Floor(
        f"torch.mm of [{size}, {tokens}] and [{tokens}, {size}]: one weight gradient", _whole(dy, x), amount, "TF/s"
    )
    return Work(grouped, others, amount, floor, lambda found: relative_error(found[:, CHECKED], exact()))


def _whole(dy: Tensor, x: Tensor) -> Callable[[], Tensor]:
    return lambda: dy.t() @ x


ROUNDED = "results in bfloat16"
CASES = (
    Case(
        "products of all pairs of six gradients",
        multi_dot_gram,
        {"vectors": 6, "elements": 2**25},
        {"vectors": 6, "elements": 5000},
    ),
    Case(
        "count sketch of a gradient", count_sketch, {"elements": 2**25, "slots": 2**20}, {"elements": 5000, "slots": 96}
    ),
    Case(
        "weight gradients of segments, grouped (Triton alone)",
        segment_weights,
        {"segments": 64, "tokens": 65_536, "size": 2048},
        {"segments": 3, "tokens": 40, "size": 32},
        backends=("triton",),
    ),
)
