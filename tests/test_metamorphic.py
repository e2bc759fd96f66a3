"""Contract 12: what must not change a result does not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from loss_cases import PPO, make_policy_loss
from op_cases import BACKENDS, NATIVE, Shape
from torch import Tensor

import fastadv as fa

ON = pytest.mark.parametrize("backend", BACKENDS)
SHAPES = st.builds(
    Shape,
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=12).map(tuple),
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 4),
)
KINDS = ("token", "row", "segment")
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def rollouts_of(values: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    return list(values.split(cu_seqlens.diff().tolist()))


def permuted(values: Tensor, cu_seqlens: Tensor, order: Tensor) -> Tensor:
    parts = rollouts_of(values, cu_seqlens)
    return torch.cat([parts[i] for i in order] or [values])


def reordered(cu_seqlens: Tensor, order: Tensor) -> Tensor:
    lengths = cu_seqlens.diff()[order]
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


@ON
@hypothesis.given(shape=SHAPES)
def test_permuting_rollouts_permutes_turn_advantages(backend: str, shape: Shape) -> None:
    d = shape.draw()
    order = torch.randperm(d.rows, generator=d.generator)
    turn_ids = d.turn_ids()

    def advantages(rewards: Tensor, groups: Tensor, ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        return fa.turn_advantages(rewards, groups, ids, cu_seqlens, scale="std", backend=backend)

    plain = advantages(d.rewards, d.group_ids, turn_ids, d.cu_seqlens)
    shuffled = advantages(
        d.rewards[order], d.group_ids[order], permuted(turn_ids, d.cu_seqlens, order), reordered(d.cu_seqlens, order)
    )
    # Sums run in row order, so the last bit of a float64 may differ: far below what float32 shows, bar a tie.
    torch.testing.assert_close(shuffled, permuted(plain, d.cu_seqlens, order), rtol=2e-7, atol=1e-9)


@ON
@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(shape=SHAPES)
def test_permuting_rollouts_permutes_the_gradient(backend: str, kind: str, shape: Shape) -> None:
    d = shape.draw()
    hypothesis.assume(d.tokens[0] != d.rows)
    order = torch.randperm(d.rows, generator=d.generator)
    inputs = make_policy_loss(PPO, kind)(d)
    moved = {name: permuted(inputs[name], d.cu_seqlens, order) for name in ("log_probs", "old_log_probs", "mask")}
    moved["cu_seqlens"] = reordered(d.cu_seqlens, order)
    if kind == "token":
        moved["advantages"] = permuted(inputs["advantages"], d.cu_seqlens, order)
    elif kind == "row":
        moved["advantages"] = inputs["advantages"][order]
    else:
        table = inputs["advantages"]
        index = fa.segments(permuted(table.segments.turn_ids, d.cu_seqlens, order), moved["cu_seqlens"])
        moved["advantages"] = fa.SegmentTable(permuted(table.values, table.segments.offsets, order), index)

    def gradient(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        leaf = given["log_probs"].clone().requires_grad_()
        loss = fa.policy_loss(**{**given, "log_probs": leaf}, config=PPO, backend=backend).loss
        loss.backward()
        return loss.detach(), leaf.grad

    (loss, grad), (moved_loss, moved_grad) = gradient(inputs), gradient(moved)
    assert torch.equal(moved_grad, permuted(grad, d.cu_seqlens, order))
    torch.testing.assert_close(moved_loss, loss, rtol=1e-5, atol=1e-5)


LABELS = {
    "integers": lambda ids: ids,
    "sparse and negative": lambda ids: ids * 10**15 - 5 * 10**14,
    "list of integers": lambda ids: ids.tolist(),
    "strings": lambda ids: [f"prompt-{i}" for i in ids.tolist()],
    "object array": lambda ids: np.array([f"u{i}" for i in ids.tolist()], dtype=object),
    "array of strings": lambda ids: np.array([f"u{i}" for i in ids.tolist()]),
    "array of integers": lambda ids: ids.numpy().astype(np.int16),
    "index": lambda ids: fa.group_index(ids),
}


@ON
@pytest.mark.parametrize("kind", LABELS)
def test_relabelling_groups_changes_no_bit(backend: str, kind: str) -> None:
    d = Shape(lengths=(5,) * 12, groups=4).draw()
    plain = fa.turn_advantages(d.rewards, d.group_ids, d.turn_ids(), d.cu_seqlens, backend=backend)
    relabelled = LABELS[kind](d.group_ids)
    assert torch.equal(fa.turn_advantages(d.rewards, relabelled, d.turn_ids(), d.cu_seqlens, backend=backend), plain)
    index = fa.group_index(relabelled)
    assert torch.equal(index.index, fa.group_index(d.group_ids).index)
    for group in range(index.num_groups):
        members = index.order[index.offsets[group] : index.offsets[group + 1]]
        assert torch.equal(members, (index.index == group).nonzero().squeeze(1))


def test_labels_are_compared_and_not_read() -> None:
    assert fa.group_index(["07", "07", "7", "7"]).index.tolist() == [0, 0, 1, 1]
    assert fa.group_index([True, 1, "1", 0]).index.tolist() == [0, 0, 1, 2]
    assert fa.group_index([]).num_groups == 0


@ON
@pytest.mark.parametrize("baseline", ["mean", "loo"])
@pytest.mark.parametrize("scale", ["none", "std"])
@hypothesis.given(shape=SHAPES, shift=st.sampled_from([1.0, -3.0, 1024.0, 2.0**18]))
def test_shifting_rewards_changes_no_bit(backend: str, baseline: str, scale: str, shape: Shape, shift: float) -> None:
    d = shape.draw()
    options = {"scale": scale, "backend": backend}
    plain = fa.group_advantages(d.rewards, d.group_ids, baseline=baseline, **options)
    assert torch.equal(fa.group_advantages(d.rewards + shift, d.group_ids, baseline=baseline, **options), plain)
    ids, cu = d.turn_ids(), d.cu_seqlens
    turned = fa.turn_advantages(d.rewards, d.group_ids, ids, cu, **options)
    assert torch.equal(fa.turn_advantages(d.rewards + shift, d.group_ids, ids, cu, **options), turned)


@ON
@hypothesis.given(shape=SHAPES)
def test_doubling_rewards_doubles_advantages_or_cancels(backend: str, shape: Shape) -> None:
    d = shape.draw()
    for scale, factor in (("none", 2.0), ("std", 1.0)):
        options = {"scale": scale, "eps": 0.0, "backend": backend}
        plain = fa.group_advantages(d.rewards, d.group_ids, **options)
        assert torch.equal(fa.group_advantages(2 * d.rewards, d.group_ids, **options), factor * plain)


@pytest.mark.row(10)
@ON
@hypothesis.settings(max_examples=100)
@hypothesis.given(shape=SHAPES, mode=st.sampled_from(MODES), kind=st.sampled_from(KINDS), data=st.data())
def test_splitting_the_batch(backend: str, shape: Shape, mode: str, kind: str, data: st.DataObject) -> None:
    """With the step's denominators given, gradients are the same to the bit and losses add up."""
    d = shape.draw()
    config = PPO.but(dual_clip=3.0, loss_agg_mode=mode)
    inputs = make_policy_loss(config, kind, ("row weights",))(d)
    step = fa.denominators(d.mask, d.cu_seqlens, horizon=50.0)
    whole = inputs["log_probs"].clone().requires_grad_()
    part = inputs["log_probs"].clone().requires_grad_()
    hypothesis.assume(d.tokens[0] != d.rows)

    def loss(leaf: Tensor, first: int, last: int) -> Tensor:
        begin, end = int(d.cu_seqlens[first]), int(d.cu_seqlens[last])
        hypothesis.assume(end - begin != last - first)
        advantages = inputs["advantages"]
        if kind == "token":
            advantages = advantages[begin:end]
        else:
            advantages = advantages[first:last] if kind == "row" else advantages.rollouts(first, last)
        out = fa.policy_loss(
            leaf[begin:end], inputs["old_log_probs"][begin:end], advantages, d.mask[begin:end], config=config,
            cu_seqlens=d.cu_seqlens[first : last + 1] - begin, weights=inputs["weights"][first:last], denominator=step,
            backend=backend,
        )  # fmt: skip
        return out.loss

    total = loss(whole, 0, d.rows)
    total.backward()
    cuts = sorted({0, d.rows, *data.draw(st.lists(st.integers(0, d.rows), max_size=3))})
    losses = [loss(part, first, last) for first, last in pairwise(cuts)]
    torch.stack(losses).sum().backward()
    assert torch.equal(part.grad, whole.grad)
    parts = torch.stack(losses).detach().double()
    allowed = 1e-6 * max(float(parts.abs().sum()), 1e-6)
    torch.testing.assert_close(parts.sum(), total.detach().double(), rtol=0, atol=allowed)


@ON
@hypothesis.settings(max_examples=100)
@hypothesis.given(shape=SHAPES, mode=st.sampled_from(MODES), kind=st.sampled_from(KINDS), extra=st.integers(0, 5))
def test_padding_the_batch(backend: str, shape: Shape, mode: str, kind: str, extra: int) -> None:
    d = shape.draw()
    hypothesis.assume(d.tokens[0] != d.rows)
    config = PPO.but(loss_agg_mode=mode, horizon=30.0)
    inputs = make_policy_loss(config, kind, ("row weights",))(d)
    width = max(shape.lengths) + extra

    def padded(values: Tensor) -> Tensor:
        return fa.pad(values, d.cu_seqlens, width=width)

    wide = {name: padded(inputs[name]) for name in ("log_probs", "old_log_probs", "mask")}
    wide["weights"] = inputs["weights"]
    wide["advantages"] = inputs["advantages"]
    if kind == "token":
        wide["advantages"] = padded(inputs["advantages"])
    elif kind == "segment":
        table = inputs["advantages"]
        ids = fa.pad(table.segments.turn_ids, d.cu_seqlens, width=width, fill=-1)
        wide["advantages"] = fa.SegmentTable(table.values, fa.segments(ids))

    def run(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        leaf = given["log_probs"].clone().requires_grad_()
        loss = fa.policy_loss(**{**given, "log_probs": leaf}, config=config, backend=backend).loss
        loss.backward()
        return loss.detach(), leaf.grad

    (loss, grad), (wide_loss, wide_grad) = run(inputs), run(wide)
    assert torch.equal(fa.unpad(wide_grad, d.cu_seqlens.diff()), grad)
    assert wide_grad.count_nonzero() == grad.count_nonzero()
    torch.testing.assert_close(wide_loss, loss, rtol=1e-5, atol=2e-6)


@ON
@hypothesis.given(shape=SHAPES, extra=st.integers(0, 5))
def test_padding_advantages(backend: str, shape: Shape, extra: int) -> None:
    d = shape.draw()
    ids = d.turn_ids()
    wide = fa.pad(ids, d.cu_seqlens, width=max(shape.lengths) + extra, fill=-1)
    plain = fa.turn_advantages(d.rewards, d.group_ids, ids, d.cu_seqlens, backend=backend)
    padded = fa.turn_advantages(d.rewards, d.group_ids, wide, backend=backend)
    assert torch.equal(fa.unpad(padded, d.cu_seqlens.diff()), plain)
    assert torch.equal(fa.turn_ids_from_mask(fa.pad(d.mask, d.cu_seqlens, width=wide.shape[1]), backend=backend), wide)


@pytest.mark.parametrize("backend", NATIVE)
def test_one_token_alone_equals_the_same_token_in_a_batch(backend: str) -> None:
    d = Shape(lengths=(3000,)).draw()
    inputs = make_policy_loss(PPO, "token")(d)

    def gradient(rows: slice) -> Tensor:
        leaf = inputs["log_probs"][rows].clone().requires_grad_()
        parts = (inputs[name][rows] for name in ("old_log_probs", "advantages", "mask"))
        fa.policy_loss(leaf, *parts, denominator=1000.0, backend=backend).loss.backward()
        return leaf.grad

    whole = gradient(slice(None))
    for token in (0, 15, 16, 17, 1023, 1024, 2999):
        assert torch.equal(gradient(slice(token, token + 1)), whole[token : token + 1])


@ON
@hypothesis.given(sizes=st.tuples(st.integers(1, 9), st.integers(0, 700)), seed=st.integers(0, 2**32))
def test_permuting_and_doubling_vectors_does_that_to_their_products(
    backend: str, sizes: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = list(torch.randn(sizes, generator=generator))
    order = torch.randperm(sizes[0], generator=generator)
    gram = fa.multi_dot_gram(vectors, backend=backend)
    assert torch.equal(fa.multi_dot_gram([vectors[i] for i in order], backend=backend), gram[order][:, order])
    doubled = fa.multi_dot_gram([2 * vectors[0], *vectors[1:]], backend=backend)
    factor = torch.ones(sizes[0], dtype=torch.float64)
    factor[0] = 2
    assert torch.equal(doubled, gram * factor * factor[:, None])


@ON
@hypothesis.given(
    shape=st.tuples(st.integers(0, 9), st.integers(0, 99)), power=st.integers(-20, 20), seed=st.integers(0, 2**32)
)
def test_a_sketch_does_not_depend_on_the_unit(backend: str, shape: tuple[int, int], power: int, seed: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    sketch = fa.gradproj.count_sketch(values, 96, backend=backend)
    assert torch.equal(fa.gradproj.count_sketch(-values, 96, backend=backend), -sketch)
    unit = 2.0**power
    assert torch.equal(fa.gradproj.count_sketch(values * unit, 96, quantum=unit * 2.0**-40, backend=backend), sketch)
