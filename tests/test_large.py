"""Contract 5 in full size: over 2^31 tokens, at most 20 GB, in `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from op_cases import NATIVE
from torch import Tensor

import fastadv as fa

pytestmark = pytest.mark.slow

TOKENS = 2**31 + 4099
LAST = 5000  # tokens of the last rollout, which lies across 2^31
CU = torch.tensor([0, TOKENS // 2, TOKENS - LAST, TOKENS])


@pytest.fixture(autouse=True)
def _memory() -> None:
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    if int(available.split()[1]) < 20 * 2**20:
        pytest.skip("needs 20 GB of free memory")
    torch.set_num_threads(2)


def tail(values: Tensor) -> Tensor:
    return values[TOKENS - LAST :].clone()


@pytest.mark.parametrize("backend", NATIVE)
def test_policy_loss(backend: str) -> None:
    log_probs = torch.empty(TOKENS, dtype=torch.bfloat16).fill_(-1.0)
    log_probs[TOKENS - LAST :] = -torch.rand(LAST).to(torch.bfloat16)
    old, mask = torch.empty_like(log_probs).fill_(-1.25), torch.ones(TOKENS, dtype=torch.bool)
    advantages, step = torch.tensor([0.5, -0.5, 1.0]), fa.denominators(mask, CU)
    assert float(step.tokens) == TOKENS

    def gradient(
        lp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, Tensor]:
        leaf = lp.requires_grad_()
        out = fa.policy_loss(
            leaf, old, advantages, mask, cu_seqlens=cu_seqlens, denominator=1000.0, backend=backend,
            config=fa.LossConfig("reinforce"),
        )  # fmt: skip
        out.loss.backward()
        return out.metrics["tokens"], leaf.grad

    alone = gradient(tail(log_probs), tail(old), advantages[2:], tail(mask), torch.tensor([0, LAST]))[1]
    tokens, whole = gradient(log_probs, old, advantages, mask, CU)
    assert float(tokens) == TOKENS
    assert torch.equal(tail(whole), alone)
    assert float(whole[0]) == pytest.approx(-0.5 / 1000, rel=1e-2)
    assert float(whole[TOKENS // 2]) == pytest.approx(0.5 / 1000, rel=1e-2)


@pytest.mark.parametrize("backend", NATIVE)
def test_turn_ids_and_counts(backend: str) -> None:
    mask = torch.ones(TOKENS, dtype=torch.bool)
    mask[TOKENS - LAST :: 7] = False
    turn_ids = fa.turn_ids_from_mask(mask, CU, backend=backend)
    alone = fa.turn_ids_from_mask(tail(mask), backend="reference")
    assert torch.equal(tail(turn_ids), alone)
    counts = fa.token_counts(mask, CU, backend=backend)
    assert counts.tolist() == [TOKENS // 2, TOKENS - LAST - TOKENS // 2, int(tail(mask).sum())]
    del mask
    assert fa.segments(turn_ids, CU, backend=backend).turns().tolist() == [1, 1, int(alone.max()) + 1]


@pytest.mark.parametrize("backend", NATIVE)
def test_segment_tokens(backend: str) -> None:
    turn_ids = torch.zeros(TOKENS, dtype=torch.int32)
    turn_ids[TOKENS - LAST :] = torch.arange(LAST, dtype=torch.int32) // 100
    index = fa.segments(turn_ids, CU, backend=backend)
    values = torch.arange(index.count, dtype=torch.float32)
    tokens = fa.segment_tokens(fa.SegmentTable(values, index), backend=backend)
    assert float(tokens[0]) == 0
    assert float(tokens[TOKENS // 2]) == 1
    assert torch.equal(tail(tokens), 2 + torch.arange(LAST) // 100)


@pytest.mark.parametrize("backend", NATIVE)
def test_linear_log_probs(backend: str) -> None:
    """Hidden states of over 2^31 elements; the tokens that count lie on both sides of 2^31."""
    size, counted = 1024, 300
    tokens = max(TOKENS // size, counted // 2) + counted // 2
    hidden, mask = torch.zeros((tokens, size), dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.bool)
    hidden[-counted:] = torch.randn(counted, size).to(torch.bfloat16)
    mask[-counted:] = True
    weight, labels = torch.randn(11, size).to(torch.bfloat16), torch.arange(tokens) % 11

    def results(hidden: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        leaf = hidden.requires_grad_()
        out = fa.linear_log_probs(leaf, weight, labels, mask=mask, deterministic=True, backend=backend).log_probs
        out.sum().backward()
        return out.detach(), leaf.grad

    alone = results(hidden[-counted:].clone(), labels[-counted:], mask[-counted:])
    for whole, part in zip(results(hidden, labels, mask), alone, strict=True):
        assert torch.equal(whole[-counted:], part)
        assert not whole[:-counted:4096].any()


@pytest.mark.parametrize("backend", NATIVE)
def test_gradient_projections(backend: str) -> None:
    """A gradient of over 2^31 elements, of which the last are not 0."""
    gradient = torch.zeros(TOKENS, dtype=torch.bfloat16)
    gradient[TOKENS - LAST :] = torch.randn(LAST).to(torch.bfloat16)
    alone = tail(gradient)
    squares = [float(fa.multi_dot_gram([x], backend=backend)) for x in (gradient, alone)]
    assert squares[0] == pytest.approx(squares[1], rel=2e-7)
    assert squares[0] > 0
    sketch = fa.gradproj.count_sketch(gradient, 1024, backend=backend)
    place = {"column_offset": TOKENS - LAST}
    assert torch.equal(fa.gradproj.count_sketch(alone, 1024, **place, backend=backend), sketch)
    assert sketch.any()
