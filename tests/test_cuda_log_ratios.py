"""The CUDA kernel of rollouts' log-ratios, compiled for the CPU."""

from __future__ import annotations

import math

import cuda_kernels
import pytest
import torch
from draws import Outputs, Shape, same_bits
from torch import Tensor

from fastadv import cuda
from fastadv.ops import sequence_log_ratios as ratios
from fastadv.ops.sequence_log_ratios import SEQUENCE_LOG_RATIOS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ORDERS = ("forward", "backward", "1", "2")
pytestmark = pytest.mark.skipif(cuda_kernels.missing() is not None, reason=str(cuda_kernels.missing()))


def sequences(backend: str, new: Tensor, old: Tensor, mask: Tensor, cu_seqlens: Tensor | None, skip: bool) -> Outputs:
    rows = mask.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = [torch.full((rows,), 77, dtype=dtype) for dtype in ratios.DTYPES]
    assert SEQUENCE_LOG_RATIOS(backend, new, old, mask, cu_seqlens, skip, out) == 0
    return dict(zip(("sum", "minimum", "tokens", "missing"), out, strict=True))


LENGTHS = [
    (), (0,), (1,), (7,), (8,), (9,), (0, 0, 3, 0), tuple(range(40)), (255, 256, 257), (2047, 2048, 2049), (5000, 1),
]  # fmt: skip


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("skip", [False, True])
def test_log_ratios_equal_those_of_the_cpu(parts: int, skip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, lengths in enumerate(LENGTHS):
        rows = max(1, len(lengths))
        monkeypatch.setattr(ratios, "PART", max(1, sum(lengths) // (rows * parts)) if parts > 1 else 2**40)
        d = Shape(lengths=lengths, seed=number).draw()
        dtypes = (DTYPES[number % 3], DTYPES[number // 3 % 3])
        new, old = (d.normal(*d.tokens).to(dtype) for dtype in dtypes)
        if skip:
            old = torch.where(d.uniform(*d.tokens) < 0.1, torch.nan, old)
        ours, theirs = (sequences(b, new, old, d.mask, d.cu_seqlens, skip) for b in ("cuda", "cpu"))
        assert torch.equal(ours["tokens"], theirs["tokens"])
        assert torch.equal(ours["missing"], theirs["missing"])
        assert torch.equal(ours["minimum"], theirs["minimum"])
        torch.testing.assert_close(ours["sum"], theirs["sum"], rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("lengths", [(900, 0, 5, 70), (9000, 8000)], ids=["warps", "parts"])
def test_log_ratios_of_other_orders_and_alignments_are_the_same(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ratios, "PART", 2000)
    d = Shape(lengths=lengths).draw()
    given = [d.normal(*d.tokens), d.normal(*d.tokens), d.mask]
    plain = sequences("cuda", *given, d.cu_seqlens, False)
    same_bits(sequences("cuda", *(torch.cat([t[:1], t])[1:] for t in given), d.cu_seqlens, False), plain)
    for order in ORDERS:
        monkeypatch.setenv("CUDA_EMULATION_ORDER", order)
        same_bits(sequences("cuda", *given, d.cu_seqlens, False), plain)
    assert cuda.counter(d.mask, 0).tolist() == [0]


@pytest.mark.parametrize("part", [2000, 2**40])
def test_log_ratios_that_nobody_knows(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fraction in the mask, an infinite log-prob, and NaN under the mask."""
    monkeypatch.setattr(ratios, "PART", part)
    new, mask = torch.zeros(3, 6000), torch.ones(3, 6000)
    mask[0, 5000], mask[2, 7] = 0.5, 0.0
    new[1, 3], new[2, 7], new[2, 8] = -math.inf, math.nan, -2.0
    out = sequences("cuda", new, torch.zeros(3, 6000), mask, None, False)
    assert out["sum"].isnan().tolist() == out["minimum"].isnan().tolist() == [True, False, False]
    assert out["tokens"][0] < 0
    assert (float(out["sum"][1]), float(out["minimum"][1])) == (-math.inf, -math.inf)
    assert (float(out["sum"][2]), float(out["minimum"][2]), int(out["tokens"][2])) == (-2.0, -2.0, 5999)


def test_long_sums_of_log_ratios_keep_their_digits() -> None:
    new = torch.full((400_000,), 0.1)
    out = sequences(
        "cuda", new, torch.zeros(400_000), torch.ones(400_000, dtype=torch.bool), torch.tensor([0, 400_000]), False
    )
    assert float(out["sum"][0]) == pytest.approx(400_000 * float(new[0]), rel=1e-12)
