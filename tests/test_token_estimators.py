"""Token-level estimators by owner's name, against loops over their equations."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from draws import BACKENDS, GARBAGE, Draw, Shape, where_masked
from test_token_returns import ACROSS_GAPS, dtype_of, gae, like, rewards_to_go, rows_of, shapes, whitened, with_terminal
from torch import Tensor

import fastadv as fa

ON = pytest.mark.parametrize("backend", BACKENDS)
PLUS = "reinforce_plus_plus"
OWNERS = pytest.mark.parametrize("owner", ["verl", "miles", "openrlhf"])
CONVENTION = {
    "verl": (1, 1e-8, "add_to_variance"),
    "miles": (1, 1e-8, "add_to_variance"),
    "openrlhf": (0, 1e-8, "floor_of_variance"),
}
TOKEN_LEVEL = sorted(name for name, e in fa.ESTIMATORS.items() if e.level == "token")


def close(found: Any, exact: Tensor, on: Tensor) -> None:
    """Whitening magnifies what float32 rounds off by how far the values are from 0 in standard deviations."""
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.double(), exact.double(), rtol=1e-4, atol=1e-4)
    assert not found[~on].any()


def inputs(d: Draw, backend: str) -> dict[str, Tensor]:
    """All that an estimator may read, by its name."""
    p = 0.01 + 0.9 * d.uniform(*d.tokens)
    given = {
        "rewards": d.normal(d.rows),
        "greedy_rewards": d.uniform(d.rows),
        "token_rewards": d.normal(*d.tokens),
        "values": d.normal(*d.tokens),
        "log_probs": p.log(),
        "sum_p2": p * p + 0.5 * (1 - p) ** 2,
        "is_weights": d.uniform(*d.tokens) + 0.5,
    }
    return {name: value.to(dtype_of(backend)) for name, value in given.items()}


def needed(name: str, d: Draw, backend: str) -> dict[str, Any]:
    """The arguments of an estimator: what it needs, the first of two that stand for each other."""
    given = {**inputs(d, backend), "mask": d.mask, "group_ids": d.group_ids}
    needs = [need.split("|")[-1] for need in fa.ESTIMATORS[name].needs]
    return {need: given[need] for need in needs} | {"cu_seqlens": d.cu_seqlens, "backend": backend}


def spreads_enough(exact: Tensor, on: Tensor) -> bool:
    """Whether float32 can tell the values' spread from rounding."""
    active = exact[on]
    return len(active) < 2 or float(active.std()) > 1e-2 * float(active.abs().max())


def group_mean(d: Draw, rewards: Tensor, singleton: str) -> Tensor:
    """Rewards minus their group's mean, `[B]`."""
    out = []
    for i in range(d.rows):
        group = rewards[d.group_ids == d.group_ids[i]].double()
        out.append(rewards[i].double() - (0.0 if singleton == "raw" and len(group) == 1 else group.mean()))
    return torch.stack(out) if out else rewards.double()


@ON
@OWNERS
@pytest.mark.row(43)
@hypothesis.given(shape=shapes, gamma=st.sampled_from([0.9, 1.0]))
def test_reinforce_plus_plus(owner: str, backend: str, shape: Shape, gamma: float) -> None:
    d = shape.draw()
    given = inputs(d, backend)
    rewards, tokens = given["rewards"], given["token_rewards"]
    read = {"rewards": rewards} if owner == "verl" else {"rewards": rewards, "token_rewards": tokens}
    masks = rows_of(d, d.mask)
    terms = rows_of(d, torch.zeros(d.tokens) if owner == "verl" else tokens)
    rows = [with_terminal(*x) for x in zip(terms, masks, rewards.tolist(), strict=True)]
    returns = like(d, [rewards_to_go(r, m, gamma, owner != "verl") for r, m in zip(rows, masks, strict=True)])
    hypothesis.assume(spreads_enough(returns, d.mask))
    out = fa.estimate(f"{PLUS}/{owner}", **read, mask=d.mask, cu_seqlens=d.cu_seqlens, gamma=gamma, backend=backend)
    close(out.returns, returns, d.mask)
    close(out.advantages, whitened(returns, d.mask, *CONVENTION[owner]), d.mask)


@ON
@pytest.mark.parametrize(
    ("owner", "penalty"),
    [("verl", False), ("miles", False), ("miles", True), ("openrlhf", False), ("openrlhf", True)],
)
@hypothesis.given(shape=shapes)
def test_reinforce_plus_plus_baseline(owner: str, penalty: bool, backend: str, shape: Shape) -> None:
    d = shape.draw()
    given = inputs(d, backend)
    read = {"rewards": given["rewards"]} | ({"token_rewards": given["token_rewards"]} if penalty else {})
    centred = group_mean(d, given["rewards"], "raw" if owner == "verl" else "zero").tolist()
    terms = rows_of(d, given["token_rewards"] if penalty else torch.zeros(d.tokens))
    rows = []
    for term, mask, reward in zip(terms, rows_of(d, d.mask), centred, strict=True):
        if owner == "openrlhf":
            rows.append(rewards_to_go(with_terminal(term, mask, reward), mask, 1.0, True))
        else:
            rows.append([k + reward if m else 0.0 for k, m in zip(term, mask, strict=True)])
    exact = like(d, rows)
    hypothesis.assume(spreads_enough(exact, d.mask))
    out = fa.estimate(
        f"{PLUS}_baseline/{owner}", group_ids=d.group_ids, **read, mask=d.mask, cu_seqlens=d.cu_seqlens, backend=backend
    )
    advantages = whitened(exact, d.mask, *CONVENTION[owner])
    close(out.advantages, advantages, d.mask)
    close(out.returns, advantages if owner == "verl" else exact, d.mask)


@ON
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("gamma", "rewards", "mask", "returns", "advantages"), ACROSS_GAPS)
def test_known_answers_across_gaps(
    backend: str, packed: bool, gamma: float, rewards: Any, mask: Any, returns: Any, advantages: Any
) -> None:
    tokens, on = torch.tensor(rewards, dtype=dtype_of(backend)), torch.tensor(mask)
    if not packed:
        tokens, on = tokens[None], on[None]
    out = fa.estimate(f"{PLUS}/verl", token_rewards=tokens, mask=on, gamma=gamma, backend=backend)
    for found, exact in ((out.returns, returns), (out.advantages, advantages)):
        assert found.flatten().tolist() == pytest.approx(exact, abs=1e-6)


@ON
@hypothesis.given(shape=shapes)
def test_remax(backend: str, shape: Shape) -> None:
    d = shape.draw()
    given = inputs(d, backend)
    tokens, greedy = given["token_rewards"], given["greedy_rewards"]
    read = {"token_rewards": tokens, "greedy_rewards": greedy, "mask": d.mask, "cu_seqlens": d.cu_seqlens}
    out = fa.estimate("remax/verl", **read, backend=backend)
    masks = rows_of(d, d.mask)
    exact = [rewards_to_go(r, m, 1.0, False) for r, m in zip(rows_of(d, tokens), masks, strict=True)]
    left = [
        [g - b if m else 0.0 for g, m in zip(*x, strict=True)]
        for *x, b in zip(exact, masks, greedy.tolist(), strict=True)
    ]
    close(out.returns, like(d, exact), d.mask)
    close(out.advantages, like(d, left), d.mask)


@ON
@pytest.mark.parametrize(("name", "whiten"), [("gae/verl", None), ("gae/miles", False), ("gae/miles", True)])
@hypothesis.given(shape=shapes)
def test_gae(name: str, whiten: bool | None, backend: str, shape: Shape) -> None:
    d = shape.draw()
    given = inputs(d, backend)
    rewards, values = given["rewards"], given["values"]
    masks = rows_of(d, d.mask)
    rows = [with_terminal([0.0] * len(m), m, r) for m, r in zip(masks, rewards.tolist(), strict=True)]
    exact = like(d, [gae(r, v, m, 0.95, 0.9) for r, v, m in zip(rows, rows_of(d, values), masks, strict=True)])
    hypothesis.assume(spreads_enough(exact, d.mask))
    options = {"gamma": 0.95, "lam": 0.9} | ({} if whiten is None else {"whiten": whiten})
    out = fa.estimate(name, rewards, values=values, mask=d.mask, cu_seqlens=d.cu_seqlens, backend=backend, **options)
    close(out.returns, torch.where(d.mask, exact + values.double(), 0.0), d.mask)
    close(out.advantages, exact if whiten is False else whitened(exact, d.mask), d.mask)


@ON
@pytest.mark.parametrize(("name", "positions"), [("otb/verl", "all"), ("otb-tir/verl", "sampled")])
def test_the_optimal_token_baseline_is_that_of_the_returns(name: str, positions: str, backend: str) -> None:
    d = Shape(lengths=(30, 9, 0, 31, 12)).draw()
    given = inputs(d, backend)
    read = {key: given[key] for key in ("log_probs", "sum_p2", "is_weights")}
    out = fa.estimate(
        name, group_ids=d.group_ids, token_rewards=given["token_rewards"], mask=d.mask, cu_seqlens=d.cu_seqlens,
        zero_tail=False, backend=backend, **read,
    )  # fmt: skip
    returns = fa.token_returns(d.mask, d.cu_seqlens, token_rewards=given["token_rewards"], backend=backend).returns
    alone = fa.optimal_token_baseline(
        returns, d.mask, d.group_ids, given["log_probs"], given["sum_p2"], d.cu_seqlens,
        is_weights=given["is_weights"], positions=positions, zero_tail=False, backend=backend,
    )  # fmt: skip
    assert torch.equal(out.returns, returns)
    assert torch.equal(out.advantages, alone)
    assert not torch.equal(alone, returns)


@pytest.mark.parametrize("positions", ["all", "sampled"])
@pytest.mark.parametrize("runs", [(1, 2), (1, 40), (30, 700), (900, 3000)])
def test_the_optimal_token_baseline_over_runs_of_any_length(runs: tuple[int, int], positions: str) -> None:
    """Turns that end inside of tiles of 1024 tokens, at their ends, and beyond: in C++ runs and short pieces go two
    ways, and NaN lies between them."""
    g = torch.Generator().manual_seed(runs[1])
    rows = []
    for length in (2500, 1024, 0, 4096, 2049, 1):
        mask = torch.zeros(length, dtype=torch.bool)
        at, on = 0, bool(torch.randint(2, (), generator=g))
        while at < length:
            end = at + int(torch.randint(*runs, (), generator=g))
            mask[at:end] = on
            at, on = end, not on
        rows.append(mask)
    mask = torch.cat(rows)
    cu_seqlens = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    given = [torch.rand(len(mask), generator=g) for _ in range(4)]
    given = [torch.where(mask, t, torch.nan) for t in (given[0], given[1].log(), given[2], given[3])]

    def found(dtype: torch.dtype, backend: str) -> Tensor:
        returns, log_probs, sum_p2, rho = (t.to(dtype) for t in given)
        return fa.optimal_token_baseline(
            returns, mask, [0, 1, 0, 0, 1, 1], log_probs, sum_p2, cu_seqlens, is_weights=rho, positions=positions,
            backend=backend,
        )  # fmt: skip

    torch.testing.assert_close(
        found(torch.float32, "cpu").double(), found(torch.float64, "reference"), rtol=1e-6, atol=1e-6
    )


# ---- all of them -----------------------------------------------------------------------------------------------------

DEGENERATE = {
    "no rollouts": Shape(lengths=()),
    "no tokens": Shape(lengths=(0, 0, 0)),
    "all masked": Shape(density=0.0),
    "one token": Shape(lengths=(1,), density=1.0),
    "only singletons": Shape(groups=10**6, seed=3),
}


@ON
@pytest.mark.parametrize("name", TOKEN_LEVEL)
@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.row(50)
def test_degenerate_batches_are_finite(name: str, kind: str, backend: str) -> None:
    d = DEGENERATE[kind].draw()
    for value in fa.estimate(name, **needed(name, d, backend)):
        assert value.shape == d.tokens
        assert value.isfinite().all()
        assert not value[~d.mask].any()


@ON
@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_packed_equals_padded_and_what_is_masked_may_be_anything(name: str, backend: str) -> None:
    d = Shape(lengths=(40, 7, 0, 300, 9), padded=True).draw()
    given = needed(name, d, backend)
    plain = fa.estimate(name, **given)
    inside = torch.arange(d.tokens[1]) < torch.tensor([40, 7, 0, 300, 9])[:, None]
    packed = {k: v[inside] if isinstance(v, Tensor) and v.dim() == 2 else v for k, v in given.items()}
    packed["cu_seqlens"] = torch.tensor([0, 40, 47, 47, 347, 356])
    for a, b in zip(fa.estimate(name, **packed), plain, strict=True):
        torch.testing.assert_close(a, b[inside], rtol=1e-6, atol=1e-6)
    for garbage in GARBAGE:
        dirty = {
            k: where_masked(d.mask, v, garbage)
            if isinstance(v, Tensor) and v.is_floating_point() and v.dim() == 2
            else v
            for k, v in given.items()
        }
        for a, b in zip(fa.estimate(name, **dirty), plain, strict=True):
            assert torch.equal(a, b)


@ON
@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_a_nan_that_counts_stays_visible(name: str, backend: str) -> None:
    d = Shape(density=1.0, groups=1).draw()
    given = needed(name, d, backend)
    read = [key for key in ("token_rewards", "values", "log_probs", "sum_p2") if key in given]
    for key in read:
        dirty = given[key].clone()
        dirty[0] = torch.nan
        assert fa.estimate(name, **{**given, key: dirty}).advantages.isnan().any(), key


@pytest.mark.parametrize("owner", ["verl", "miles", "openrlhf"])
def test_rewards_too_far_apart_to_be_whitened(owner: str) -> None:
    rewards, mask = torch.tensor([3.4e38, -3.4e38, -3.4e38, 1.0]), torch.ones(4, 2, dtype=torch.bool)
    name = f"reinforce_plus_plus_baseline/{owner}"
    with pytest.raises(
        ValueError, match=r"rewards\[0\] is 3\.4e\+38, too far from its group's mean for torch\.float32"
    ):
        fa.estimate(name, rewards, [0, 0, 0, 0], mask=mask)
    assert fa.estimate(name, rewards * 1e-3, [0, 0, 0, 0], mask=mask).advantages.isfinite().all()
