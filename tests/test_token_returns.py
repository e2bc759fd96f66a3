"""Whitening, token-level returns and the optimal token baseline against loops over their equations, in float64."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from draws import BACKENDS, GARBAGE, Draw, Shape, where_masked
from torch import Tensor

import fastadv as fa
from fastadv.ops.whiten import EPS_FORMS

ON = pytest.mark.parametrize("backend", BACKENDS)
shapes = st.builds(
    Shape,
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=9).map(tuple),
    padded=st.booleans(),
    seed=st.integers(0, 2**32),
    density=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    groups=st.integers(1, 4),
)


def rows_of(d: Draw, tokens: Tensor) -> list[list[float]]:
    """A per-token tensor as a list a rollout."""
    if d.cu_seqlens is None:
        return tokens.tolist()
    return [part.tolist() for part in tokens.split(d.cu_seqlens.diff().tolist())]


def like(d: Draw, rows: list[list[float]]) -> Tensor:
    """The inverse of rows_of, float64."""
    flat = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    return flat.view(d.tokens)


def close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact.double(), rtol=2e-6, atol=2e-6)


def dtype_of(backend: str) -> torch.dtype:
    return torch.float64 if backend == "reference" else torch.float32


# ---- the equations, one token after the other ------------------------------------------------------------------------


def whitened(values: Tensor, on: Tensor, ddof: float = 1, eps: float = 1e-8, form: str = "add_to_variance") -> Tensor:
    active = [x for x, m in zip(values.flatten().tolist(), on.flatten().tolist(), strict=True) if m]
    mean = math.fsum(active) / max(1, len(active))
    squares = math.fsum((x - mean) ** 2 for x in active)
    variance = squares / (len(active) - ddof) if len(active) > ddof else 0.0
    variance = variance + eps if form == "add_to_variance" else max(variance, eps)
    return torch.where(on, (values.double() - mean) / math.sqrt(variance), 0.0)


def rewards_to_go(rewards: list[float], on: list[bool], gamma: float, gaps: bool) -> list[float]:
    running, out = 0.0, []
    for r, m in zip(reversed(rewards), reversed(on), strict=True):
        if m:
            running = r + gamma * running
        elif gaps:
            running *= gamma
        out.append(running if m else 0.0)
    return out[::-1]


def gae(rewards: list[float], values: list[float], on: list[bool], gamma: float, lam: float) -> list[float]:
    running, following, out = 0.0, 0.0, []
    for r, v, m in zip(reversed(rewards), reversed(values), reversed(on), strict=True):
        if m:
            running = r + gamma * following - v + gamma * lam * running
            following = v
        out.append(running if m else 0.0)
    return out[::-1]


def with_terminal(rewards: list[float], on: list[bool], reward: float) -> list[float]:
    """The rollout's reward on its last token that counts."""
    out = [r if m else 0.0 for r, m in zip(rewards, on, strict=True)]
    for t in reversed(range(len(out))):
        if on[t]:
            out[t] += reward
            break
    return out


def token_baseline(
    returns: list[list[float]], on: list[list[bool]], energies: list[list[float]], compact: bool, tail: bool
) -> list[list[float]]:
    """Advantages of one group."""
    lengths = [sum(m) for m in on]
    members = [i for i in range(len(on)) if lengths[i] or not compact]
    sums: dict[int, list[float]] = {}
    places = []
    for i, row in enumerate(on):
        energy, place, row_places = 0.0, -1, []
        for t, m in enumerate(row):
            place = place + m if compact else t
            row_places.append(place)
            if m:
                energy += energies[i][t]
                total = sums.setdefault(place, [0.0, 0.0])
                total[0] += returns[i][t] * energy
                total[1] += energy
        places.append(row_places)
    ordered = sorted((lengths[i] for i in members), reverse=True)
    out = []
    for i, row in enumerate(on):
        lonely = tail and len(members) > 1 and lengths[i] == ordered[0] > ordered[1]
        advantages = []
        for t, m in enumerate(row):
            if not m:
                advantages.append(0.0)
                continue
            top, bottom = sums[places[i][t]]
            none = len(members) < 2 or (lonely and places[i][t] >= ordered[1])
            advantages.append(returns[i][t] - (0.0 if none else top / (bottom + 1e-8)))
        out.append(advantages)
    return out


# ---- whiten ----------------------------------------------------------------------------------------------------------


@ON
@hypothesis.given(shape=shapes, offset=st.sampled_from([0.0, 1000.0]), form=st.sampled_from(EPS_FORMS))
def test_whiten_equals_the_equation(backend: str, shape: Shape, offset: float, form: str) -> None:
    d = shape.draw()
    values = d.normal(*d.tokens) + offset
    ddof = 1.0 if form == "add_to_variance" else 0.0
    options: dict[str, Any] = {"ddof": ddof, "eps_form": form, "cu_seqlens": d.cu_seqlens, "backend": backend}
    exact = whitened(values, d.mask, ddof, 1e-8, form)
    close(fa.whiten(values.to(dtype_of(backend)), d.mask, **options), exact)


@ON
@pytest.mark.parametrize("value", [0.1, -3.0, 1e30])
def test_whitened_values_without_spread_are_exact_zeros(backend: str, value: float) -> None:
    for tokens in (1, 2, 7, 40_000):
        values = torch.full((tokens,), value)
        assert not fa.whiten(values, torch.ones(tokens), backend=backend).any()
        assert not fa.whiten(values.double(), torch.ones(tokens), backend="reference").any()


@ON
def test_whiten_of_large_means_does_not_cancel(backend: str) -> None:
    """E[x^2] - E[x]^2 in float32 would be rounding noise here."""
    values = 4096 + torch.arange(100_000) % 2
    found = fa.whiten(values.float(), torch.ones(100_000), backend=backend)
    close(found, whitened(values.double(), torch.ones(100_000, dtype=torch.bool)))


@ON
def test_the_spread_that_token_returns_gives_is_the_one_that_whiten_takes(backend: str) -> None:
    d = Shape(lengths=(700, 3, 0, 2000)).draw()
    out = fa.token_returns(d.mask, d.cu_seqlens, token_rewards=d.normal(*d.tokens), gamma=0.9, backend=backend)
    own = fa.whiten(out.advantages, d.mask, cu_seqlens=d.cu_seqlens, backend=backend)
    given = fa.whiten(out.advantages, d.mask, cu_seqlens=d.cu_seqlens, spread=out.spread, backend=backend)
    torch.testing.assert_close(given, own, rtol=1e-6, atol=1e-6)
    active = out.advantages[d.mask].double()
    exact = torch.stack([d.mask.sum().double(), active.mean(), active.var() * (len(active) - 1)])
    torch.testing.assert_close(out.spread, exact, rtol=1e-9, atol=1e-9)


# ---- token_returns ---------------------------------------------------------------------------------------------------

# verl#7278: a scan that starts over at each token outside of the mask gives everything before a tool's answer 0.
ACROSS_GAPS = (
    (1.0, [0, 0, 0, 0, 0, 1], [1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]),
    (0.5, [0, 0, 1], [1, 0, 1], [0.5, 0, 1], [-0.70710675, 0, 0.70710675]),
    (
        0.9,
        [0, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 0],
        [0.81, 0.9, 0, 0, 1, 0],
        [-0.98200233, -0.03507151, 0, 0, 1.01707384, 0],
    ),
)


@ON
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("gamma", "rewards", "mask", "returns", "advantages"), ACROSS_GAPS)
def test_returns_are_carried_across_gaps(
    backend: str, packed: bool, gamma: float, rewards: Any, mask: Any, returns: Any, advantages: Any
) -> None:
    rewards, mask = torch.tensor(rewards, dtype=dtype_of(backend)), torch.tensor(mask)
    if not packed:
        rewards, mask = rewards[None], mask[None]
    out = fa.token_returns(mask, token_rewards=rewards, gamma=gamma, backend=backend)
    close(out.returns.flatten(), torch.tensor(returns, dtype=torch.float64))
    whitened = fa.whiten(out.advantages, mask, spread=out.spread, backend=backend)
    torch.testing.assert_close(
        whitened.flatten().double(), torch.tensor(advantages, dtype=torch.float64), rtol=0, atol=1e-6
    )


@ON
@hypothesis.given(
    shape=shapes,
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    gaps=st.booleans(),
    which=st.sampled_from(["rows", "tokens", "both"]),
)
def test_rewards_to_go_equal_the_loop(backend: str, shape: Shape, gamma: float, gaps: bool, which: str) -> None:
    d = shape.draw()
    tokens, rewards, baselines = (
        x.to(dtype_of(backend)) for x in (d.normal(*d.tokens), d.normal(d.rows), d.normal(d.rows))
    )
    given = {"token_rewards": None if which == "rows" else tokens, "rewards": None if which == "tokens" else rewards}
    out = fa.token_returns(
        d.mask, d.cu_seqlens, **given, baselines=baselines, gamma=gamma, discount_gaps=gaps, backend=backend
    )
    terms = rows_of(d, torch.zeros(d.tokens) if which == "rows" else tokens)
    terminal = [0.0] * d.rows if which == "tokens" else rewards.tolist()
    masks = rows_of(d, d.mask)
    rows = [with_terminal(*x) for x in zip(terms, masks, terminal, strict=True)]
    exact = [rewards_to_go(r, m, gamma, gaps) for r, m in zip(rows, masks, strict=True)]
    left = [
        [g - b if m else 0.0 for g, m in zip(*x, strict=True)]
        for *x, b in zip(exact, masks, baselines.tolist(), strict=True)
    ]
    close(out.returns, like(d, exact))
    close(out.advantages, like(d, left))


@ON
@hypothesis.given(shape=shapes, gamma=st.sampled_from([0.0, 0.95, 1.0]), lam=st.sampled_from([0.0, 0.9, 1.0]))
def test_gae_equals_the_loop(backend: str, shape: Shape, gamma: float, lam: float) -> None:
    d = shape.draw()
    tokens, values, rewards = (
        x.to(dtype_of(backend)) for x in (d.normal(*d.tokens), d.normal(*d.tokens), d.normal(d.rows))
    )
    out = fa.token_returns(
        d.mask,
        d.cu_seqlens,
        token_rewards=tokens,
        rewards=rewards,
        values=values,
        gamma=gamma,
        lam=lam,
        backend=backend,
    )
    masks = rows_of(d, d.mask)
    rows = [with_terminal(*x) for x in zip(rows_of(d, tokens), masks, rewards.tolist(), strict=True)]
    exact = like(d, [gae(r, v, m, gamma, lam) for r, v, m in zip(rows, rows_of(d, values), masks, strict=True)])
    close(out.advantages, exact)
    close(out.returns, torch.where(d.mask, exact + values, 0.0))


@ON
def test_gae_of_the_tokens_that_count_is_gae_of_them_alone(backend: str) -> None:
    """Tokens outside of the mask are no steps (Miles #1827): taking them out changes nothing."""
    d = Shape(lengths=(40,), padded=True).draw()
    rewards, values = d.normal(*d.tokens), d.normal(*d.tokens)
    options = {"gamma": 0.9, "lam": 0.8, "backend": backend}
    whole = fa.token_returns(d.mask, token_rewards=rewards, values=values, **options)
    alone = [t[d.mask][None] for t in (rewards, values)]
    compact = fa.token_returns(torch.ones_like(alone[0]), token_rewards=alone[0], values=alone[1], **options)
    assert torch.equal(whole.advantages[d.mask], compact.advantages[0])
    assert torch.equal(whole.returns[d.mask], compact.returns[0])


@ON
@pytest.mark.parametrize("lengths", [(3000,), (1, 5000, 0, 300, 257, 256, 255), (700,) * 19])
def test_rows_of_many_tiles(backend: str, lengths: tuple[int, ...]) -> None:
    """Rows of any lengths side by side, longer than what the kernel takes of them at a time."""
    d = Shape(lengths=lengths).draw()
    tokens, values = d.normal(*d.tokens), d.normal(*d.tokens)
    out = fa.token_returns(
        d.mask, d.cu_seqlens, token_rewards=tokens, values=values, gamma=0.99, lam=0.97, backend=backend
    )
    rows = zip(rows_of(d, tokens), rows_of(d, values), rows_of(d, d.mask), strict=True)
    close(out.advantages, like(d, [gae(r, v, m, 0.99, 0.97) for r, v, m in rows]))


# ---- optimal_token_baseline ------------------------------------------------------------------------------------------


@ON
@pytest.mark.parametrize("weighted", [False, True])
@hypothesis.given(shape=shapes, positions=st.sampled_from(["all", "sampled"]), tail=st.booleans())
def test_the_optimal_token_baseline_equals_the_loop(
    backend: str, weighted: bool, shape: Shape, positions: str, tail: bool
) -> None:
    d = shape.draw()
    p = 0.9 * d.uniform(*d.tokens) + 0.01
    returns, log_probs, sum_p2 = (
        x.to(dtype_of(backend)) for x in (d.normal(*d.tokens), p.log(), p * p + 0.3 * (1 - p) ** 2)
    )
    rho = (2 * d.uniform(*d.tokens)).to(dtype_of(backend)) if weighted else None
    out = fa.optimal_token_baseline(
        returns, d.mask, d.group_ids, log_probs, sum_p2, d.cu_seqlens, is_weights=rho, positions=positions,
        zero_tail=tail, backend=backend,
    )  # fmt: skip
    energy = 1 - 2 * log_probs.double().exp() + sum_p2.double()
    energies = rows_of(d, energy if rho is None else energy * rho.double() ** 2)
    rows, masks = rows_of(d, returns), rows_of(d, d.mask)
    exact: list[list[float]] = [[] for _ in range(d.rows)]
    for label in set(d.group_ids.tolist()):
        members = (d.group_ids == label).nonzero().flatten().tolist()
        pick = [[table[i] for i in members] for table in (rows, masks, energies)]
        for i, row in zip(members, token_baseline(*pick, positions == "sampled", tail), strict=True):
            exact[i] = row
    close(out, like(d, exact))


@ON
def test_the_energy_of_scores_is_the_squared_gradient_of_the_log_prob(backend: str) -> None:
    """One group of two rollouts of one token: the weights are |d log p / d logits|^2."""
    logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(-1)
    energy = torch.stack(
        [torch.autograd.grad(log_p[i, 2], logits, retain_graph=True)[0][i].square().sum() for i in (0, 1)]
    )
    returns = torch.tensor([[1.0], [0.0]])
    given = log_p[:, 2:3].detach(), log_p.exp().square().sum(-1, keepdim=True).detach()
    out = fa.optimal_token_baseline(
        returns.to(dtype_of(backend)),
        torch.ones(2, 1),
        [7, 7],
        *(t.to(dtype_of(backend)) for t in given),
        backend=backend,
    )
    close(out.flatten(), returns.flatten() - energy[0] / energy.sum())


# ---- what none of them may do ----------------------------------------------------------------------------------------


@ON
@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_is_masked_may_be_anything_in_any_layout(backend: str, garbage: float) -> None:
    d = Shape(padded=True, lengths=(40, 0, 300, 7, 9)).draw()
    names = ("token_rewards", "values", "log_probs", "sum_p2")
    clean = {name: d.uniform(*d.tokens) for name in names}
    dirty = {name: where_masked(d.mask, value, garbage).t().contiguous().t() for name, value in clean.items()}

    def run(token_rewards: Tensor, values: Tensor, log_probs: Tensor, sum_p2: Tensor) -> list[Tensor]:
        out = fa.token_returns(d.mask, token_rewards=token_rewards, values=values, lam=0.5, backend=backend)
        baseline = fa.optimal_token_baseline(
            values, d.mask, d.group_ids, log_probs, sum_p2, positions="sampled", backend=backend
        )
        return [*out, baseline, fa.whiten(token_rewards, d.mask, backend=backend)]

    for a, b in zip(run(**clean), run(**dirty), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_backends_without_these_kernels_say_so(backend: str) -> None:
    ones = torch.ones(2, 3)
    for call in (
        lambda: fa.whiten(ones, ones, backend=backend),
        lambda: fa.token_returns(ones, token_rewards=ones, backend=backend),
        lambda: fa.optimal_token_baseline(ones, ones, [0, 0], -ones, ones, backend=backend),
    ):
        with pytest.raises(fa.BackendUnavailableError, match="no kernel for this op; use backend='reference'"):
            call()


# ---- bad input -------------------------------------------------------------------------------------------------------

MASK, TOKENS, CU = torch.tensor([1, 1, 0, 1, 1]), -torch.ones(5), torch.tensor([0, 2, 5])


def run(backend: str, **changes: Any) -> Any:
    return fa.token_returns(**{"mask": MASK, "cu_seqlens": CU, "token_rewards": TOKENS, **changes}, backend=backend)


def white(backend: str, **changes: Any) -> Any:
    return fa.whiten(**{"values": TOKENS, "mask": MASK, **changes}, backend=backend)


def baseline(backend: str, **changes: Any) -> Any:
    given = {"returns": TOKENS, "log_probs": TOKENS, "sum_p2": -TOKENS, "mask": MASK, "cu_seqlens": CU}
    return fa.optimal_token_baseline(**{**given, "group_ids": [0, 0], **changes}, backend=backend)


BAD = [
    (run, {"mask": torch.tensor([1, 0.5, 0, 1, 1])}, ValueError, r"token_returns: mask has a fractional"),
    (run, {"cu_seqlens": torch.tensor([0, 4])}, ValueError, r"cu_seqlens ends at 4, but mask has 5 tokens"),
    (run, {"token_rewards": TOKENS[:4]}, ValueError, r"token_rewards has shape \[4\]; expected \[5\]"),
    (run, {"token_rewards": MASK}, TypeError, r"token_rewards has dtype torch.int64"),
    (run, {"rewards": torch.ones(5)}, ValueError, r"rewards has shape \[5\]; expected \[2\]"),
    (run, {"token_rewards": None}, ValueError, r"rewards and token_rewards are both None"),
    (run, {"gamma": -0.5}, ValueError, r"gamma is -0.5; it must be finite and at least 0"),
    (run, {"gamma": torch.ones(())}, TypeError, r"gamma is a Tensor; pass a number"),
    (run, {"lam": 0.9}, ValueError, r"lam is 0.9, but values is None"),
    (run, {"values": TOKENS, "baselines": torch.ones(2)}, ValueError, r"baselines is given, but with values"),
    (run, {"values": TOKENS, "discount_gaps": True}, ValueError, r"discount_gaps is True, but with values"),
    (white, {"values": MASK}, TypeError, r"values has dtype torch.int64"),
    (white, {"mask": torch.tensor([1, 0.5, 0, 1, 1])}, ValueError, r"whiten: mask has a fractional"),
    (white, {"mask": MASK[:4]}, ValueError, r"mask has shape \[4\]; expected \[5\]"),
    (
        white,
        {"eps_form": "max"},
        ValueError,
        r"eps_form is 'max'; it must be one of 'add_to_var",
    ),
    (white, {"eps": math.inf}, ValueError, r"eps is inf; it must be finite"),
    (white, {"spread": torch.ones(2).double()}, ValueError, r"spread has shape \[2\]; expected \[3\]"),
    (baseline, {"mask": torch.tensor([1, 0.5, 0, 1, 1])}, ValueError, r"optimal_token_baseline: mask has a fractional"),
    (baseline, {"group_ids": [0, 0, 1]}, ValueError, r"group_ids has 3 rollouts, returns has 2"),
    (baseline, {"positions": "turns"}, ValueError, r"positions is 'turns'; it must be one of 'all', 'sampled'"),
    (baseline, {"is_weights": torch.ones(2)}, ValueError, r"is_weights has shape \[2\]; expected \[5\]"),
]


@ON
@pytest.mark.parametrize(("call", "changes", "error", "message"), BAD, ids=[b[3] for b in BAD])
def test_bad_input(call: Any, changes: dict[str, Any], error: type[Exception], message: str, backend: str) -> None:
    call(backend)
    with pytest.raises(error, match=message):
        call(backend, **changes)


@ON
def test_no_gradient_flows(backend: str) -> None:
    leaf = TOKENS.clone().requires_grad_()
    for out in (
        run(backend, token_rewards=leaf, values=leaf),
        [white(backend, values=leaf), baseline(backend, returns=leaf)],
    ):
        assert not any(t.requires_grad for t in out)
