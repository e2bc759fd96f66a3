"""Derivatives of single tokens' log-probs, and the identities that tie them to gradients and Gram matrices."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_lm import VOCABULARY, causal_lm, flat, largest_error
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from toy_agent import THREE_OUTCOMES, Enumeration

import fastadv as fa
from fastadv.gradproj import directional_derivative, segment_dots, token_dots
from fastadv.replay.policy import Policy


def rollouts(seed: int = 0) -> fa.Batch:
    """Six rollouts of one to three turns, unequal in length, with their prompts."""
    rng = random.Random(seed)
    masks = [[1, 1, 0, 1], [1], [1, 1, 1, 0, 0, 1, 0, 1], [1, 1], [1, 0, 1, 1], [1, 1, 1]]
    prompts = [2, 3, 1, 4, 1, 2]
    lengths = [p + len(m) for p, m in zip(prompts, masks, strict=True)]
    ids = fa.TokenIds(
        torch.tensor([rng.randrange(VOCABULARY) for _ in range(sum(lengths))]),
        torch.tensor([0, *lengths]).cumsum(0),
    )
    return fa.Batch.of(
        mask=torch.tensor([on for mask in masks for on in mask]),
        cu_seqlens=torch.tensor([0, *map(len, masks)]).cumsum(0),
        rewards=torch.zeros(6), group_ids=torch.zeros(6, dtype=torch.long), outcomes=torch.zeros(6, dtype=torch.long),
        token_ids=ids,
    )  # fmt: skip


def per_segment(model: nn.Module, batch: fa.Batch) -> Tensor:
    """[S, P]: the gradient of each segment's sum of log-probs, one backward a segment."""
    log_probs = Policy(model, VOCABULARY, None).log_probs(batch, 0, batch.num_rollouts)
    segments = batch.segments
    number = batch.rows.spread(segments.offsets[:-1]) + segments.turn_ids
    parameters = list(model.parameters())
    return torch.stack([
        flat(list(torch.autograd.grad(log_probs[(number == s) & batch.mask].sum(), parameters, retain_graph=True)))
        for s in range(segments.count)
    ])  # fmt: skip


def as_direction(model: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    sizes = [p.numel() for p in model.parameters()]
    parts = vector.split(sizes)
    return {name: part.view(p.shape) for (name, p), part in zip(model.named_parameters(), parts, strict=True)}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gpt2"])
def test_dots_along_an_arms_gradient_are_the_gram_matrix_times_the_arm(family: str) -> None:
    model, batch = causal_lm(family), rollouts()
    u = per_segment(model, batch)
    arm = torch.randn(batch.segments.count, dtype=torch.float64)
    direction = as_direction(model, arm @ u)
    dots = token_dots(model, batch, direction, max_tokens=20)  # several micro-batches
    assert dots.dtype == torch.float64
    assert dots.shape == batch.mask.shape
    advantages = fa.segment_tokens(fa.SegmentTable(arm, batch.segments)) * batch.mask
    assert float(advantages @ dots) == pytest.approx(float((arm @ u).square().sum()), rel=1e-12)
    assert largest_error(segment_dots(dots, batch), u @ u.T @ arm) < 1e-12
    # Another arm's product with this one is its advantages times the same dots.
    other = torch.randn(batch.segments.count, dtype=torch.float64)
    tokens = fa.segment_tokens(fa.SegmentTable(other, batch.segments)) * batch.mask
    assert float(tokens @ dots) == pytest.approx(float((other @ u) @ (arm @ u)), rel=1e-11)


def test_every_token_has_its_own_derivative() -> None:
    model, batch = causal_lm("gpt2"), rollouts()
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    policy, parameters = Policy(model, VOCABULARY, None, temperature=0.7), list(model.parameters())
    log_probs = policy.log_probs(batch, 0, batch.num_rollouts)
    along = flat(list(direction.values()))
    by_hand = [flat(list(torch.autograd.grad(x, parameters, retain_graph=True))) @ along for x in log_probs]
    dots = token_dots(model, batch, direction, temperature=0.7)
    assert largest_error(dots, torch.stack(by_hand)) < 1e-12
    # Linear in the direction, and 0 along what it leaves out.
    some = dict(list(direction.items())[:3])
    rest = dict(list(direction.items())[3:])
    parts = [token_dots(model, batch, d, temperature=0.7) for d in (some, rest)]
    torch.testing.assert_close(sum(parts), dots, rtol=1e-12, atol=1e-12)
    assert all(p.grad is None for p in parameters)


def test_the_toy_agent_has_the_identity() -> None:
    world = Enumeration.of(THREE_OUTCOMES, 3)
    theta = world.agent.theta
    arm = torch.randn(world.submits.shape[0], dtype=torch.float64)

    def log_probs(parameters: dict[str, Tensor]) -> Tensor:
        logit = parameters["theta"][world.turn_ids]
        return torch.where(world.submits, logsigmoid(logit), logsigmoid(-logit))

    leaf = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((arm * log_probs({"theta": leaf})).sum(), leaf)
    dots = directional_derivative(log_probs, {"theta": theta}, {"theta": gradient})
    assert float(arm @ dots) == pytest.approx(float(gradient.square().sum()), rel=1e-12)
    p = torch.tensor(world.agent.p, dtype=torch.float64)[world.turn_ids]
    by_hand = torch.where(world.submits, 1 - p, -p) * gradient[world.turn_ids]  # d log p / d logit = 1 - p
    torch.testing.assert_close(dots, by_hand, rtol=1e-12, atol=0)


def test_what_cannot_be_right_is_refused() -> None:
    model, batch = causal_lm("gpt2"), rollouts()
    with pytest.raises(ValueError, match=r"names 'head', which is no parameter; names are transformer\.wte"):
        token_dots(model, batch, {"head": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"transformer.wte.weight has shape \[1\], the parameter \[11, 8\]"):
        token_dots(model, batch, {"transformer.wte.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="temperature is 0"):
        token_dots(model, batch, {}, temperature=0.0)
    with pytest.raises(ValueError, match=r"dropout is on in transformer\.drop"):
        token_dots(model.train(), batch, {})
    bare = fa.Batch.of(mask=torch.ones(2), rewards=torch.zeros(1), group_ids=[0], outcomes=torch.zeros(1).long())
    with pytest.raises(ValueError, match="carries no token ids"):
        token_dots(model.eval(), bare, {})
    ids = fa.TokenIds(torch.zeros(2, dtype=torch.long), torch.tensor([0, 2]))
    bare = fa.Batch.of(
        mask=torch.ones(2), rewards=torch.zeros(1), group_ids=[0], outcomes=torch.zeros(1).long(), token_ids=ids
    )
    with pytest.raises(ValueError, match="rollout 0 has no prompt"):
        token_dots(model, bare, {})
