"""Vocabularies and sequences that are split over ranks, with real processes on gloo: one world of four for every case,
of which two are a group of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from torch import Tensor

import fastadv as fa

TOKENS, SIZE, VOCAB = 30, 6, 23
ROWS = 5  # rollouts of 6 tokens
# Rows of the weight on each rank, by the number of ranks: unequal parts, and a rank without any.
PARTS = {2: (20, 3), 4: (11, 0, 5, 7)}
WORLDS = tuple(PARTS)
LAYER = ("hidden", "weight", "bias")
ALL = {"return_entropy": True, "return_sum_p2": True}
CONFIG = fa.LossConfig(clip_high=0.28)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    given = {
        "hidden": normal(TOKENS, SIZE),
        "weight": normal(VOCAB, SIZE),
        "bias": normal(VOCAB),
        "labels": torch.randint(0, VOCAB, (TOKENS,), generator=generator),
        "mask": torch.rand(TOKENS, generator=generator) < 0.7,
        "temperature": 0.5 + torch.rand(TOKENS, generator=generator),
    }
    given["hidden"][~given["mask"]] = torch.nan
    return given


def few(given: dict[str, Any]) -> dict[str, Any]:
    """The batch with four tokens that count."""
    return {**given, "mask": given["mask"] & (given["mask"].cumsum(0) <= 4)}


def loss_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    old = fa.linear_log_probs(**batch()).log_probs + 0.3 * torch.randn(TOKENS, generator=generator)
    return {"old_log_probs": old, "advantages": torch.randn(TOKENS, generator=generator)}


def with_leaves(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    leaves = {name: given[name].clone().requires_grad_() for name in LAYER}
    return {**given, **leaves}, leaves


def log_probs(given: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    ours, leaves = with_leaves(given)
    out = fa.linear_log_probs(**ours, **ALL, softcap=9.0, **options)
    weights = torch.arange(TOKENS) % 4 - 1.0
    (out.log_probs * weights + 0.1 * out.entropy - out.sum_p2 * weights.flip(0)).sum().backward()
    results = {k: v.detach() for k, v in zip(out._fields, out, strict=True)}
    return {**results, **{name: leaf.grad for name, leaf in leaves.items()}}


def policy_loss(given: dict[str, Any], config: fa.LossConfig, **options: Any) -> dict[str, Tensor]:
    ours, leaves = with_leaves(given)
    out = fa.linear_policy_loss(**ours, config=config, **options)
    out.loss.backward()
    return {"loss": out.loss.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def split_vocabulary(rank: int, world: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """This rank's rows of the weight, its own results and an error of each kind."""
    parts = PARTS[world]
    first = sum(parts[:rank])
    mine = slice(first, first + parts[rank])
    given = batch()
    given["weight"], given["bias"] = given["weight"][mine].clone(), given["bias"][mine].clone()
    options = {"vocab_start": first, "vocab_group": group}
    results: dict[str, Any] = {
        "log_probs": log_probs(given, **options),
        "deterministic": log_probs(given, **options, deterministic=True, chunk_tokens=3),
        "loss": policy_loss({**given, **loss_inputs()}, CONFIG, **options),
    }
    with pytest.raises(ValueError, match="vocab_group is given, but ranks exchange"):
        fa.linear_log_probs(**given, **options, backend="reference")
    if world == 2:  # the interpreter takes its time
        results["triton"] = log_probs(few(given), **options, backend="triton")
    with torch.no_grad():
        results["no grad"] = fa.linear_log_probs(**given, **options).log_probs
    for name, changes in (
        ("gap", {"vocab_start": first + (rank == world - 1)}),
        ("label", {"labels": torch.full((TOKENS,), VOCAB)}),
    ):
        with pytest.raises(ValueError, match="linear_log_probs") as error:
            fa.linear_log_probs(**{**given, **options, **changes})
        results[name] = str(error.value)
    return results


def split_sequence(rank: int, world: int) -> dict[str, Any]:
    """This rank's tokens of every rollout, labels shifted before the split; with four ranks one has none."""
    edges = (0, 4, 6) if world == 2 else (0, 1, 1, 5, 6)
    given = {**batch(), **loss_inputs()}
    step = fa.denominators(given["mask"].view(ROWS, -1))
    tokens = [name for name in given if name not in ("weight", "bias")]
    mine = slice(edges[rank], edges[rank + 1])
    for name in tokens:
        given[name] = given[name].view(ROWS, TOKENS // ROWS, *given[name].shape[1:])[:, mine]
    return {"mine": mine, "loss": policy_loss(given, CONFIG, denominator=step)}


def run_rank(rank: int) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for world in WORLDS:
        group = dist.new_group(list(range(world)))
        if rank < world:
            found[world] = {"vocabulary": split_vocabulary(rank, world, group), "sequence": split_sequence(rank, world)}
    return found


@pytest.fixture(scope="module")
def ranks() -> dict[int, list[dict[str, Any]]]:
    found = worlds.run(run_rank, max(WORLDS))
    return {world: [rank[world] for rank in found[:world]] for world in WORLDS}


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def joined(found: list[dict[str, Tensor]], whole: dict[str, Tensor]) -> None:
    """Every rank has the whole results and hidden gradient, the same bits, and its own rows of the others."""
    for name, expected in whole.items():
        if name in ("weight", "bias"):
            close(torch.cat([part[name] for part in found]), expected)
            continue
        for part in found:
            assert torch.equal(part[name], found[0][name]), name
        close(found[0][name], expected)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["log_probs", "deterministic"])
def test_a_split_vocabulary_gives_the_same_log_probs(ranks: Any, world: int, kind: str) -> None:
    found = [rank["vocabulary"][kind] for rank in ranks[world]]
    joined(found, log_probs(batch()))
    assert bool((found[0]["hidden"][~batch()["mask"]] == 0).all())


def test_a_split_vocabulary_on_triton(ranks: Any) -> None:
    joined([rank["vocabulary"]["triton"] for rank in ranks[2]], log_probs(few(batch())))


@pytest.mark.parametrize("world", WORLDS)
def test_a_split_vocabulary_gives_the_same_loss(ranks: Any, world: int) -> None:
    whole = policy_loss({**batch(), **loss_inputs()}, CONFIG)
    joined([rank["vocabulary"]["loss"] for rank in ranks[world]], whole)


@pytest.mark.parametrize("world", WORLDS)
def test_a_split_vocabulary_without_gradients(ranks: Any, world: int) -> None:
    for rank in ranks[world]:
        close(rank["vocabulary"]["no grad"], fa.linear_log_probs(**batch()).log_probs)


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_raises_what_one_finds(ranks: Any, world: int) -> None:
    for rank in ranks[world]:
        assert "parts must neither overlap nor leave a gap" in rank["vocabulary"]["gap"]
        assert f"a label must be in [0, {VOCAB})" in rank["vocabulary"]["label"]


@pytest.mark.parametrize("world", WORLDS)
def test_a_split_sequence_adds_up_to_the_same_loss(ranks: Any, world: int) -> None:
    """With the step's denominators, the losses and the gradients of the layer are sums over ranks."""
    given = {**batch(), **loss_inputs()}
    whole = policy_loss(given, CONFIG)
    found = [rank["sequence"]["loss"] for rank in ranks[world]]
    for name in ("loss", "weight", "bias"):
        close(sum(part[name] for part in found), whole[name])
    hidden = torch.cat([part["hidden"] for part in found], 1).view(TOKENS, SIZE)
    close(hidden, whole["hidden"])
    assert any(part["hidden"].shape[1] == 0 for part in found) == (world == 4)
