"""Score centering: its mean under the sampler, its zeros, its gradient, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from draws import GARBAGE
from torch import Tensor

import fastadv as fa

SAMPLER = fa.Sampler()
TIS = fa.LossConfig("reinforce", correction=fa.Correction("tis", high=1.3))
MIS = fa.LossConfig("reinforce", correction=fa.Correction("mis", low=0.6, high=1.5))
CONFIGS = {"f = 1": fa.LossConfig("reinforce"), "TIS": TIS, "MIS": MIS}
VOCAB = 11


def policy(seed: int, near: Tensor | None = None) -> Tensor:
    """Logits of a policy, `[V]` float64."""
    noise = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise if near is None else near + 0.5 * noise


def expected_gradient(logits: Tensor, q: Tensor, head: Tensor, config: fa.LossConfig, support: str) -> Tensor:
    """Gradient of the loss by the logits, averaged exactly over the tokens that the sampler may draw, advantage 1."""
    leaf = logits.clone().requires_grad_()
    log_p = leaf.log_softmax(0)
    n = VOCAB
    out = fa.score_centering_loss(
        log_p, q.log(), log_p[head].expand(n, -1), q.log()[head].expand(n, -1), torch.ones(n, dtype=torch.float64),
        torch.ones(n), sampler=SAMPLER, support=support, config=config, weights=q,
        denominator=1.0, cu_seqlens=torch.arange(n + 1),
    )  # fmt: skip
    out.loss.backward()
    return leaf.grad


@pytest.mark.row(32)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_mean_under_the_sampler_is_zero(name: str) -> None:
    """With the whole vocabulary, for any policy and any weight; without centring it is not."""
    logits = policy(0)
    q = policy(1, logits).softmax(0)
    everything = torch.arange(VOCAB)
    assert expected_gradient(logits, q, everything, CONFIGS[name], "full").abs().max() < 1e-15
    leaf = logits.clone().requires_grad_()
    (q * -leaf.log_softmax(0)).sum().backward()
    assert leaf.grad.abs().max() > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tail_is_estimated_from_the_head(name: str) -> None:
    """The mean is what the tail's ratios differ among themselves, and smaller than without the tail's term."""
    logits = policy(2)
    q = policy(3, logits).softmax(0)
    head = q.topk(4).indices
    with_tail = expected_gradient(logits, q, head, CONFIGS[name], "head")
    without = expected_gradient(logits, q, head, CONFIGS[name], "replayed")
    assert 0 < with_tail.norm() < without.norm()
    flat = logits.clone()
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[head] = False
    flat[outside] = q[outside].log()  # the tail's probabilities keep their proportions: the estimate is exact
    assert expected_gradient(flat, q, head, CONFIGS["f = 1"], "head").abs().max() < 1e-6


@pytest.mark.row(32)
@pytest.mark.parametrize("name", CONFIGS)
def test_on_policy_it_is_reinforce(name: str) -> None:
    """Zero correction where p = q: the same gradient, token by token."""
    logits = policy(4)
    q = logits.softmax(0)
    head = q.topk(5).indices

    def gradient(loss_of: Any) -> Tensor:
        leaf = logits.clone().requires_grad_()
        loss_of(leaf.log_softmax(0)).backward()
        return leaf.grad

    one = torch.ones(1, dtype=torch.float64)
    for token in range(VOCAB):

        def centred(log_p: Tensor, token: int = token) -> Tensor:
            return fa.score_centering_loss(
                log_p[token, None], q.log()[token, None], log_p[head][None], q.log()[head][None], one, torch.ones(1),
                sampler=SAMPLER, config=CONFIGS[name],
            ).loss  # fmt: skip

        torch.testing.assert_close(
            gradient(centred), gradient(lambda log_p, t=token: -log_p[t]), rtol=1e-12, atol=1e-14
        )


@pytest.mark.row(32)
def test_an_exact_importance_weight_leaves_nothing_to_centre() -> None:
    """w = p / q: E_q of the weighted score is E_p of the score, 0 already."""
    logits = policy(5)
    q = policy(6, logits).softmax(0)
    exact = fa.LossConfig("reinforce", correction=fa.Correction("tis", high=1e6))
    leaf = logits.clone().requires_grad_()
    log_p = leaf.log_softmax(0)
    centre = fa.score_centering_loss(
        torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), log_p[None], q.log()[None],
        torch.ones(1, dtype=torch.float64), torch.ones(1), sampler=SAMPLER, support="full", config=exact,
    ).loss  # fmt: skip
    centre.backward()
    assert leaf.grad.abs().max() < 1e-15


def test_known_values() -> None:
    """Head of two of p = (.5, .2, .3), q = (.4, .4, .2); the first token was drawn; A = 2."""
    p, q = torch.tensor([0.5, 0.2]), torch.tensor([0.4, 0.4])
    log_p = p.log().requires_grad_()
    given = (q.log()[:1], log_p[None], q.log()[None], torch.tensor([2.0]), torch.ones(1))
    for config, own, f_head, f_tail in (
        (CONFIGS["f = 1"], 1.0, (1.0, 1.0), 1.0),
        (fa.LossConfig("reinforce", correction=fa.Correction("tis", high=1.2)), 1.2, (1.2, 0.5), 1.2),
        (fa.LossConfig("reinforce", correction=fa.Correction("mis", low=0.6, high=1.6)), 1.25, (1.25, 0.0), 1.5),
    ):
        log_p.grad = None
        out = fa.score_centering_loss(log_p[:1], *given, sampler=SAMPLER, config=config)
        out.loss.backward()
        rho = 0.2 / 0.3
        alpha = rho * f_tail
        c = [0.4 * f_head[0] - alpha * 0.5, 0.4 * f_head[1] - alpha * 0.2]
        loss = -2 * (own * math.log(0.5) - c[0] * math.log(0.5) - c[1] * math.log(0.2))
        assert out.loss.item() == pytest.approx(loss, rel=1e-5)
        assert log_p.grad.tolist() == pytest.approx([-2 * (own - c[0]), 2 * c[1]], rel=1e-5, abs=1e-6)
        assert out.metrics["tail_mean"] == pytest.approx(0.2, rel=1e-5)


def batch(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    shape, k = (4, 9), 3
    head = torch.randn(*shape, VOCAB, generator=g).log_softmax(-1)
    sampled = (head + 0.3 * torch.randn(*shape, VOCAB, generator=g)).log_softmax(-1)
    token = torch.randint(0, VOCAB, (*shape, 1), generator=g)
    ids = sampled.topk(k).indices
    return {
        "log_probs": head.gather(-1, token)[..., 0],
        "rollout_log_probs": sampled.gather(-1, token)[..., 0],
        "head_log_probs": head.gather(-1, ids),
        "rollout_head_log_probs": sampled.gather(-1, ids),
        "advantages": torch.randn(*shape, generator=g),
        "mask": torch.rand(shape, generator=g) < 0.7,
    }


def run(given: dict[str, Any], **options: Any) -> tuple[fa.LossOutput, Tensor, Tensor]:
    a, b = (given[name].clone().requires_grad_() for name in ("log_probs", "head_log_probs"))
    options = {"sampler": SAMPLER, **options}
    out = fa.score_centering_loss(**{**given, "log_probs": a, "head_log_probs": b}, **options)
    out.loss.sum().backward()
    return out, a.grad, b.grad


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("support", ["head", "full"])
def test_masked_tokens_and_excluded_rollouts_may_hold_anything(name: str, support: str) -> None:
    given = batch()
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5])
    clean = run(given, config=CONFIGS[name], support=support, weights=weights)
    on = given["mask"] & (weights != 0)[:, None]
    for garbage in GARBAGE:
        dirty = dict(given)
        for key in ("log_probs", "rollout_log_probs", "advantages"):
            dirty[key] = torch.where(on, given[key], garbage)
        for key in ("head_log_probs", "rollout_head_log_probs"):
            dirty[key] = torch.where(on[..., None], given[key], garbage)
        for a, b in zip(run(dirty, config=CONFIGS[name], support=support, weights=weights)[1:], clean[1:], strict=True):
            assert torch.equal(a, b)


def test_empty_places_of_the_head_and_missing_log_probs() -> None:
    given = batch(1)
    wider = {
        **given,
        "head_log_probs": torch.cat([given["head_log_probs"], torch.full((4, 9, 2), -math.inf)], -1),
        "rollout_head_log_probs": torch.cat([given["rollout_head_log_probs"], torch.full((4, 9, 2), math.nan)], -1),
    }
    plain, padded = run(given, config=TIS), run(wider, config=TIS)
    torch.testing.assert_close(padded[0].loss, plain[0].loss)
    torch.testing.assert_close(padded[2][..., :3], plain[2])
    assert padded[2][..., 3:].abs().sum() == 0

    hole = tuple(given["mask"].nonzero()[0].tolist())
    lost = {**given, "rollout_log_probs": given["rollout_log_probs"].clone()}
    lost["rollout_log_probs"][hole] = math.nan
    neutral, _, _ = run(lost, config=TIS)
    assert neutral.loss.isfinite()
    assert neutral.metrics["is_missing_fraction"] == pytest.approx(1 / int(given["mask"].sum()))
    excluded = TIS.but(correction=fa.Correction("tis", high=1.3, missing="exclude"))
    _, gradient, head = run(lost, config=excluded)
    assert gradient[hole] == 0
    assert head[hole].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_and_reductions(dtype: torch.dtype) -> None:
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch(2).items()}
    out, gradient, head = run(given)
    assert out.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradient.dtype == head.dtype == dtype
    tokens, _, _ = run(given, reduction="none")
    assert tokens.loss.shape == given["mask"].shape
    torch.testing.assert_close(tokens.loss.sum() / given["mask"].sum(), out.loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sampler": fa.Sampler(top_p=0.9)}, ValueError, r"sampler filters \(top_p 0\.9"),
        ({"sampler": fa.Sampler(top_k=50)}, ValueError, "top_k 50"),
        ({"sampler": fa.Sampler(min_p=0.1)}, ValueError, r"min_p 0\.1"),
        ({"sampler": fa.Sampler(constrained=True)}, ValueError, "sampler is constrained"),
        ({"sampler": fa.Sampler(speculative=True)}, ValueError, "sampler is speculative"),
        ({"sampler": fa.Sampler(temperature=0.7)}, ValueError, r"sampler.temperature is 0\.7, but temperature is 1\.0"),
        ({"sampler": {"top_p": 1.0}}, TypeError, "sampler is a dict"),
        ({"config": fa.LossConfig("ppo")}, ValueError, "clipped and sequence ratios to an old policy do not compose"),
        ({"config": fa.LossConfig("gspo")}, ValueError, "use 'reinforce'"),
        ({"config": fa.LossConfig("reinforce", kl=fa.KL())}, ValueError, "KL or entropy term"),
        (
            {"config": fa.LossConfig("reinforce", correction=fa.Correction(level="sequence"))},
            ValueError,
            "weighs whole rollouts",
        ),
        ({"support": "tail"}, ValueError, "support is 'tail'; it must be one of 'head', 'replayed', 'full'"),
        (
            {"head_log_probs": torch.zeros(4, 9)},
            ValueError,
            r"head_log_probs has shape \[4, 9\]; expected \[4, 9, 'K'\]",
        ),
        ({"rollout_head_log_probs": torch.zeros(4, 9, 2)}, ValueError, r"expected \[4, 9, 3\]"),
    ],
)
def test_what_it_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fa.score_centering_loss(**{**batch(), "sampler": SAMPLER, **options})


def test_a_replayed_filter_is_allowed() -> None:
    given = batch(3)
    sampler = fa.Sampler(top_p=0.9, temperature=0.7)
    out = fa.score_centering_loss(**given, sampler=sampler, temperature=0.7, support="replayed")
    assert out.loss.isfinite()
    assert out.metrics["tail_mean"] == 0
