"""The custom loss, importance weights and reducer of Miles and slime, against their formulas in float64."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from fastadv.integrations import miles
from fastadv.integrations.miles.clips import CLIPPED
from fastadv.integrations.miles.context_parallel import Place, local_spans, local_tokens
from miles_standins import arguments
from torch import Tensor

import fastadv as fa

PARALLEL = "miles.backends.training_utils.parallel"
PROCESSORS = (
    "miles.backends.training_utils.loss_hub.logit_processors",  # August 2026
    "miles.backends.training_utils.loss.hub.logit_processors",
    "slime.backends.megatron_utils.loss",
)
LENGTHS, PROMPTS, VOCABULARY = (7, 4, 9, 1), (3, 1, 5, 2), 11


def install(put: Callable[[str, ModuleType], None], place: Any, processors: str) -> None:
    """Modules of a trainer as they are loaded on one rank; `put` registers one."""
    for name in (PARALLEL, processors, "megatron.core") if processors.startswith("slime") else (PARALLEL, processors):
        if name == PARALLEL and processors.startswith("slime"):
            continue
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            put(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    if processors.startswith("slime"):
        sys.modules["megatron.core"].mpu = Namespace(  # type: ignore[attr-defined]
            get_context_parallel_rank=lambda: place.rank,
            get_context_parallel_world_size=lambda: place.size,
            get_context_parallel_group=lambda: place.group,
        )
    else:
        sys.modules[PARALLEL].get_parallel_state = lambda: Namespace(cp=place)  # type: ignore[attr-defined]

    def scored(logits: Tensor, *, unconcat_tokens: list[Tensor], total_lengths: list[int], **more: Any) -> Any:
        """Log-probs and entropies of the rank's response tokens, from the logits before each."""
        assert ("max_seq_lens" in more) == (not processors.startswith("slime"))
        found: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
        begin = 0
        for tokens, total, response in zip(unconcat_tokens, total_lengths, more["response_lengths"], strict=True):
            rows = logits[0, begin + total - response - 1 : begin + total - 1].log_softmax(-1)
            values = rows.gather(1, tokens[total - response :, None]).squeeze(1)
            spans = local_spans(total, response, Place(place.rank, place.size))
            found["log_probs"].append(local_tokens(values, spans))
            found["entropy"].append(local_tokens(-(rows.exp() * rows).sum(-1), spans))
            begin += total
        return (None, found) if processors.startswith("slime") else found

    if processors.startswith("slime"):

        def function(
            logits: Tensor, *, args: Any, unconcat_tokens: Any, total_lengths: Any, response_lengths: Any,
            with_entropy: bool = False,
        ) -> Any:  # fmt: skip
            given = {"response_lengths": response_lengths, "args": args, "with_entropy": with_entropy}
            return scored(logits, unconcat_tokens=unconcat_tokens, total_lengths=total_lengths, **given)

        sys.modules[processors].get_log_probs_and_entropy = function  # type: ignore[attr-defined]
    else:
        sys.modules[processors].get_log_probs_and_entropy = scored  # type: ignore[attr-defined]


@pytest.fixture(params=PROCESSORS)
def trainer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A trainer on the one rank that there is."""
    alone(monkeypatch, request.param)
    return str(request.param)


def alone(patch: pytest.MonkeyPatch, processors: str) -> None:
    install(partial(patch.setitem, sys.modules), Namespace(rank=0, size=1, group=None), processors)  # type: ignore[arg-type]


PLAIN = {
    "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "calculate_per_token_loss": False,
    "use_rollout_logprobs": False, "use_kl_loss": False, "kl_loss_type": "low_var_kl", "kl_loss_coef": 0.1,
    "entropy_coef": 0.0, "use_tis": False, "tis_clip": 1.3, "tis_clip_low": 0.7, "use_unbiased_kl": False,
}  # fmt: skip


def flags(mapping: dict[str, Any] | None = None, **more: Any) -> Namespace:
    return arguments(mapping or {}, **(PLAIN | more))


def whole(seed: int = 0) -> dict[str, Any]:
    """A micro-batch of whole sequences: two samples of one rollout, one that a filter removed."""
    g = torch.Generator().manual_seed(seed)
    totals = [p + r for p, r in zip(PROMPTS, LENGTHS, strict=True)]
    masks = [(torch.rand(r, generator=g) < 0.7).int() for r in LENGTHS]
    masks[1].zero_()
    sums = torch.tensor([float(m.sum()) for m in masks])
    sums[0] = sums[2] = sums[0] + sums[2]
    names = ("old", "rollout", "ref")
    log_probs = {n: [-2.5 + 0.5 * torch.randn(r, generator=g) for r in LENGTHS] for n in names}
    return {
        "unconcat_tokens": [torch.randint(VOCABULARY, (t,), generator=g) for t in totals],
        "total_lengths": totals,
        "response_lengths": list(LENGTHS),
        "loss_masks": masks,
        "rollout_mask_sums": sums,
        "advantages": [torch.randn((), generator=g).expand(r).clone() for r in LENGTHS],
        "log_probs": log_probs["old"],
        "rollout_log_probs": log_probs["rollout"],
        "ref_log_probs": log_probs["ref"],
    }


def logits_of(seed: int = 5) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    total = sum(PROMPTS) + sum(LENGTHS)
    return torch.randn(1, total, VOCABULARY, generator=g, dtype=torch.float64).float().requires_grad_()


def part_of(batch: dict[str, Any], place: Place) -> dict[str, Any]:
    """What a context-parallel rank gets of it."""
    spans = [local_spans(t, r, place) for t, r in zip(batch["total_lengths"], batch["response_lengths"], strict=True)]
    names = ("advantages", "log_probs", "rollout_log_probs", "ref_log_probs")
    local = {n: [local_tokens(v, s) for v, s in zip(batch[n], spans, strict=True)] for n in names}
    return {**batch, **local}


def reducer(args: Any, batch: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The trainers' own, for whole sequences."""

    def reduce(terms: Tensor) -> Tensor:
        parts = terms.split(batch["response_lengths"])
        sums = torch.stack([(x * m).sum() for x, m in zip(parts, batch["loss_masks"], strict=True)])
        return (sums if args.calculate_per_token_loss else sums / batch["rollout_mask_sums"].clamp(min=1)).sum()

    return reduce


def their_loss(args: Any, batch: dict[str, Any], logits: Tensor) -> dict[str, Tensor]:
    """The trainers' policy loss in float64, written from its description."""
    x = logits.double()
    log_probs, entropies, begin = [], [], 0
    for tokens, total, response in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        rows = x[0, begin + total - response - 1 : begin + total - 1].log_softmax(-1)
        log_probs.append(rows.gather(1, tokens[total - response :, None]).squeeze(1))
        entropies.append(-(rows.exp() * rows).sum(-1))
        begin += total
    old = [v.double() for v in batch["rollout_log_probs" if args.use_rollout_logprobs else "log_probs"]]
    gap = [o - n for o, n in zip(old, log_probs, strict=True)]
    if args.advantage_estimator == "gspo":
        gap = [
            ((d * m).sum() / m.sum().clamp(min=1)).expand_as(d) for d, m in zip(gap, batch["loss_masks"], strict=True)
        ]
    d, a = torch.cat(gap), torch.cat(batch["advantages"]).double()
    ratio = (-d).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    if args.advantage_estimator == "cispo":
        pg = -clipped.detach() * a * torch.cat(log_probs)
        fraction = (clipped != ratio).double()
    else:
        pg = torch.maximum(-ratio * a, -clipped * a)
        fraction = (-clipped * a > -ratio * a).double()
    if args.eps_clip_c is not None:
        pg = torch.where(a < 0, torch.minimum(-args.eps_clip_c * a, pg), pg)
    reduce, metrics = reducer(args, batch), {}
    if args.use_tis:
        weight = (torch.cat(batch["log_probs"]).double() - torch.cat(batch["rollout_log_probs"]).double()).exp()
        cut = weight.clamp(args.tis_clip_low, args.tis_clip)
        pg, metrics["tis_clipfrac"] = pg * cut, reduce((cut != weight).double())
    loss = metrics["pg_loss"] = reduce(pg)
    if args.entropy_coef:
        metrics["entropy_loss"] = reduce(torch.cat(entropies))
        loss = loss - args.entropy_coef * metrics["entropy_loss"]
    if args.use_kl_loss:
        gap = torch.cat(log_probs) - torch.cat(batch["ref_log_probs"]).double()
        kl = {"k1": gap, "k2": gap**2 / 2, "k3": (-gap).exp() - 1 + gap}
        value = kl.get(args.kl_loss_type, ((-gap).clamp(-20, 20).exp() - 1 + gap).clamp(-10, 10))
        if args.use_unbiased_kl:
            value = value * (torch.cat(log_probs) - torch.cat(old)).exp()
        metrics["kl_loss"] = reduce(value)
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    if not args.calculate_per_token_loss and args.advantage_estimator != "gspo":
        metrics["pg_clipfrac"], metrics["ppo_kl"] = reduce(fraction), reduce(d)
    return {"loss": loss, **metrics}


CASES: tuple[dict[str, Any], ...] = (
    {},
    {"eps_clip_c": 3.0},
    {"calculate_per_token_loss": True},
    {"advantage_estimator": "gspo"},
    {"advantage_estimator": "cispo"},
    {"use_tis": True},
    {"use_tis": True, "calculate_per_token_loss": True, "entropy_coef": 0.01},
    {"use_rollout_logprobs": True},
    {"entropy_coef": 0.02, "use_kl_loss": True},
    *({"use_kl_loss": True, "kl_loss_type": kind} for kind in ("k1", "k2", "k3", "low_var_kl")),
    {"use_kl_loss": True, "kl_loss_type": "k3", "use_unbiased_kl": True},
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case) or "plain")
def test_the_loss_of_the_flags_is_the_trainers_own(trainer: str, case: dict[str, Any]) -> None:
    for seed in range(3):
        args = flags()
        vars(args).update(case)
        batch, logits = whole(seed), logits_of(seed)
        expected = their_loss(args, batch, logits)
        (gradient,) = torch.autograd.grad(expected["loss"], logits)
        loss, metrics = miles.custom_loss(args, batch, logits, reducer(args, batch))
        torch.testing.assert_close(loss.double(), expected["loss"], rtol=1e-5, atol=1e-6)
        loss.backward()
        torch.testing.assert_close(logits.grad, gradient, rtol=1e-4, atol=1e-6)
        assert all(value.dim() == 0 and not value.requires_grad for value in metrics.values())
        samples = [m.sum() > 0 for m in batch["loss_masks"]]
        assert sum(samples) == 3 or seed
        for name, value in expected.items():
            exact = name in ("loss", "pg_loss") or args.calculate_per_token_loss
            if exact:  # else ours are over tokens, theirs over samples
                torch.testing.assert_close(metrics[name].double(), value, rtol=1e-4, atol=1e-5, msg=name)
            assert name in metrics


def test_what_is_masked_never_enters(trainer: str) -> None:
    args, batch, logits = flags(use_tis=True, use_kl_loss=True), whole(), logits_of()
    expected = miles.custom_loss(args, batch, logits, reducer(args, batch))[0]
    for name in ("advantages", "log_probs", "rollout_log_probs", "ref_log_probs"):
        for values, mask in zip(batch[name], batch["loss_masks"], strict=True):
            values[mask == 0] = torch.nan
    assert torch.equal(miles.custom_loss(args, batch, logits, reducer(args, batch))[0], expected)


def test_other_losses_by_name(trainer: str) -> None:
    batch, logits = whole(), logits_of()
    for loss in ("sapo", {"preset": "cispo/trl"}, {"preset": "dapo", "dual_clip": 10.0}, {"preset": "vespo"}):
        args = flags({"loss": loss})
        found = miles.custom_loss(args, batch, logits, reducer(args, batch))[0]
        assert found.isfinite()
        assert found.requires_grad
    plain = miles.custom_loss(flags(), batch, logits, reducer(flags(), batch))[0]
    assert not torch.equal(found, plain)
    with pytest.raises(ValueError, match="gmpo is one term a rollout"):
        miles.custom_loss(flags({"loss": {"preset": "gmpo"}}), batch, logits, reducer(flags(), batch))


@pytest.mark.parametrize(
    ("case", "missing", "message"),
    [
        ({"use_tis": True}, "rollout_log_probs", "a correction reads the sampler's log-probs.* no rollout_log_probs"),
        ({"use_kl_loss": True}, "ref_log_probs", "--use-kl-loss reads the reference's log-probs"),
        ({"use_rollout_logprobs": True}, "rollout_log_probs", "--use-rollout-logprobs"),
    ],
)
def test_log_probs_that_nobody_scored_are_named(trainer: str, case: Any, missing: str, message: str) -> None:
    args, batch = flags(), whole()
    vars(args).update(case)
    del batch[missing]
    with pytest.raises(ValueError, match=message):
        miles.custom_loss(args, batch, logits_of(), reducer(args, batch))


def test_a_first_step_is_on_policy(trainer: str) -> None:
    args, batch, logits = flags(), whole(), logits_of()
    del batch["log_probs"]
    loss, metrics = miles.custom_loss(args, batch, logits, reducer(args, batch))
    assert metrics["ppo_kl"] == 0
    assert metrics["pg_clipfrac"] == 0
    assert loss.requires_grad


def test_without_a_trainer_the_error_says_so() -> None:
    with pytest.raises((ImportError, RuntimeError), match="loaded here"):
        miles.custom_loss(flags(), whole(), logits_of(), lambda x: x.sum())


# ---- context-parallel ranks ------------------------------------------------------------------------------------------

SPLIT: tuple[dict[str, Any], ...] = (
    {}, {"advantage_estimator": "gspo"}, {"use_tis": True, "use_kl_loss": True, "entropy_coef": 0.01},
    {"fastadv": {"loss": {"correction": [{"kind": "mis", "level": "geometric", "low": 0.9, "high": 1.1}]}}},
    {"fastadv": {"loss": {"correction": {"kind": "tis", "level": "sequence", "veto": 0.2}}}},
)  # fmt: skip
CORRECTIONS: tuple[Any, ...] = (
    {"kind": "tis", "high": 1.3, "low": 0.7}, {"kind": "mis", "low": 0.5, "high": 5.0},
    {"kind": "mis", "level": "geometric", "low": 0.9, "high": 1.1},
    [{"kind": "tis", "high": 1.3}, {"kind": "reject", "level": "sequence", "low": 0.5, "high": 2.0, "veto": 0.3}],
)  # fmt: skip


def on_rank(rank: int, *, size: int) -> list[Any]:
    """Losses, gradients and weighted terms of one rank's parts, added up over ranks where they are sums."""
    install(sys.modules.__setitem__, Namespace(rank=rank, size=size, group=dist.group.WORLD), PROCESSORS[0])
    found: list[Any] = []
    part = part_of(whole(), Place(rank, size))
    for case in SPLIT:
        args, logits = flags(), logits_of()
        vars(args).update(case)
        loss, _ = miles.custom_loss(args, part, logits, lambda x: x.sum())
        loss.backward()
        total = torch.stack([loss.detach().double(), *(logits.grad.double().flatten())])
        dist.all_reduce(total)
        found.append(total)
    for correction in CORRECTIONS:
        terms = torch.cat([v.double() for v in part["log_probs"]])
        weighted, masks, metrics = miles.tis(
            args=arguments({"correction": correction}), pg_loss=terms, train_log_probs=part["log_probs"],
            rollout_log_probs=part["rollout_log_probs"], loss_masks=part["loss_masks"],
            total_lengths=part["total_lengths"], response_lengths=part["response_lengths"], parallel_state=None,
        )  # fmt: skip
        assert masks is part["loss_masks"]
        assert {v.shape for v in metrics.values()} == {terms.shape}
        lengths = [v.shape[0] for v in part["log_probs"]]
        found.append([part.sum().item() for part in weighted.split(lengths)])
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_sequences_add_up(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch, PROCESSORS[0])
    one = undivided()
    ranks = worlds.run(partial(on_rank, size=size), size)
    for number in range(len(SPLIT)):
        torch.testing.assert_close(ranks[0][number], one[number], rtol=1e-5, atol=1e-6)
    for number in range(len(SPLIT), len(one)):
        added = torch.tensor([rank[number] for rank in ranks]).sum(0)
        torch.testing.assert_close(added, torch.tensor(one[number]), rtol=1e-6, atol=1e-6)


def undivided() -> list[Any]:
    """The same of whole sequences."""
    found: list[Any] = []
    batch = whole()
    for case in SPLIT:
        args, logits = flags(), logits_of()
        vars(args).update(case)
        loss, _ = miles.custom_loss(args, batch, logits, lambda x: x.sum())
        loss.backward()
        found.append(torch.stack([loss.detach().double(), *(logits.grad.double().flatten())]))
    for correction in CORRECTIONS:
        weighted = weighted_terms(correction, batch)[0]
        found.append([part.sum().item() for part in weighted.split(list(LENGTHS))])
    return found


# ---- importance weights and the reducer of the trainers' own loss ----------------------------------------------------


def weighted_terms(correction: Any, batch: dict[str, Any], **more: Any) -> Any:
    return miles.tis(
        args=flags({} if correction is None else {"correction": correction}),
        pg_loss=torch.cat([v.double() for v in batch["log_probs"]]),
        train_log_probs=batch["log_probs"], rollout_log_probs=batch["rollout_log_probs"],
        loss_masks=batch["loss_masks"], total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"], **more,
    )  # fmt: skip


def test_importance_weights_of_the_flags_are_the_trainers(trainer: str) -> None:
    batch = whole()
    weighted, _, metrics = weighted_terms(None, batch, parallel_state=None, max_seq_lens=None, newer="ignored")
    ratio = (torch.cat(batch["log_probs"]).double() - torch.cat(batch["rollout_log_probs"]).double()).exp()
    on = torch.cat(batch["loss_masks"]) != 0
    expected = torch.cat(batch["log_probs"]).double() * ratio.clamp(0.7, 1.3)
    torch.testing.assert_close(weighted[on], expected[on], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(metrics["tis"][on].double(), ratio[on], rtol=1e-5, atol=1e-6)
    assert torch.equal(metrics["tis_clipfrac"][on].bool(), (ratio.clamp(0.7, 1.3) != ratio)[on])


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_importance_weights_are_those_of_the_loss(trainer: str, correction: Any) -> None:
    """The hook's weights are what `policy_loss` multiplies by: the gradient of reinforce shows them."""
    batch = whole()
    weighted = weighted_terms(correction, batch)[0]
    x = torch.cat(batch["log_probs"]).double().requires_grad_()
    listed = correction if isinstance(correction, list) else [correction]
    made = tuple(fa.Correction(**c) for c in listed)
    config = fa.LossConfig("reinforce", correction=made, loss_agg_mode="token-sum")
    rollout = torch.cat(batch["rollout_log_probs"]).double()
    fa.policy_loss(
        x, x.detach(), -torch.ones_like(x), torch.cat(batch["loss_masks"]), config=config,
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0), rollout_log_probs=rollout,
    ).loss.backward()  # fmt: skip
    assert x.grad is not None
    torch.testing.assert_close(weighted, x.grad * x.detach(), rtol=1e-5, atol=1e-6)
    assert int((weighted == 0).sum()) > 0


def test_the_reducer_divides_by_a_constant(trainer: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, file = whole(), tmp_path / "run.yaml"
    file.write_text("fastadv: {horizon: 16}\n")
    monkeypatch.setenv("FASTADV_CONFIG", str(file))
    given = (batch["total_lengths"], batch["response_lengths"], batch["loss_masks"])
    terms = torch.randn(sum(LENGTHS), requires_grad=True)
    reduced = miles.pg_loss_reducer(*given, False)(terms)
    on = torch.cat(batch["loss_masks"]) != 0
    torch.testing.assert_close(reduced, terms[on].sum() / 16)
    with pytest.raises(ValueError, match="--calculate-per-token-loss"):
        miles.pg_loss_reducer(*given, True)
    with pytest.raises(ValueError, match="5 terms for 21 tokens"):
        miles.pg_loss_reducer(*given)(torch.zeros(5))
    file.write_text("fastadv: {seed: 3}\n")
    with pytest.raises(ValueError, match=r"set fastadv\.horizon"):
        miles.pg_loss_reducer(*given, False)


# ---- score centering of the newer Miles ------------------------------------------------------------------------------


def newer_miles_score_centering(
    log_p: Tensor, log_q: Tensor, head_p: Tensor, head_q: Tensor, advantages: Tensor, weigh: Callable[[Tensor], Tensor]
) -> Tensor:
    """Token losses as its description has them; the head is padded with -inf: [N]."""
    there = head_q > -torch.inf
    p, q = (torch.where(there, x, -torch.inf).exp() for x in (head_p.detach(), head_q))  # [N, K]
    rho = (1 - q.sum(-1)).clamp(min=1e-6) / (1 - p.sum(-1)).clamp(min=1e-6)
    alpha = rho * weigh(1 / rho)  # [N]
    ratio = torch.where(there, head_p.detach() - head_q, 0.0).exp()
    centre = torch.where(there, q * weigh(ratio) - alpha[:, None] * p, 0.0)
    own = weigh((log_p.detach() - log_q).exp())
    return -advantages * (own * log_p - (centre * torch.where(there, head_p, 0.0)).sum(-1))


WEIGHTS: dict[str, tuple[Callable[[Tensor], Tensor], fa.Correction | None]] = {
    "none": (torch.ones_like, None),
    "tis": (lambda r: r.clamp(max=2.0), fa.Correction("tis", high=2.0)),
    "mis": (lambda r: torch.where((r >= 0.5) & (r <= 5.0), r, 0.0), fa.Correction("mis", low=0.5, high=5.0)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_score_centering_is_the_newer_miles(name: str) -> None:
    """Its `rollout_topk_token_ids` are -1 and `rollout_topk_log_probs` -inf where a place is empty; ours takes NaN."""
    weigh, correction = WEIGHTS[name]
    g = torch.Generator().manual_seed(4)
    n, vocabulary, k = 12, 40, 6
    logits = torch.randn(n, vocabulary, generator=g, dtype=torch.float64).requires_grad_()
    sampler = (logits.detach() + 0.7 * torch.randn(n, vocabulary, generator=g, dtype=torch.float64)).log_softmax(-1)
    tokens = sampler.exp().multinomial(1, generator=g)  # [N, 1]
    top = sampler.topk(k).indices
    empty = torch.rand(n, k, generator=g) < 0.2
    padded_ids, padded = top.masked_fill(empty, -1), sampler.gather(1, top).masked_fill(empty, -torch.inf)
    advantages = torch.randn(n, generator=g, dtype=torch.float64)
    log_p = logits.log_softmax(-1)
    head = log_p.gather(1, padded_ids.clamp(min=0))
    own, theirs = log_p.gather(1, tokens).squeeze(1), sampler.gather(1, tokens).squeeze(1)
    expected = newer_miles_score_centering(own, theirs, head, padded, advantages, weigh)
    out = fa.score_centering_loss(
        own, theirs, head, padded.masked_fill(padded == -torch.inf, torch.nan), advantages, torch.ones(n),
        sampler=fa.Sampler(), config=fa.LossConfig("reinforce", correction=correction), reduction="none",
    )  # fmt: skip
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=1e-12)
    a, b = (torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (out.loss, expected))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert a.abs().max() > 1e-3


# ---- the share of clipped tokens of a step ---------------------------------------------------------------------------


def test_clipped_tokens_are_tallied_over_micro_batches(trainer: str) -> None:
    CLIPPED.take(torch.device("cpu"))
    assert CLIPPED.take(torch.device("cpu")) is None
    clipped = tokens = 0.0
    for seed in range(3):
        args, batch = flags(eps_clip=0.05, eps_clip_high=0.05), whole(seed)
        metrics = miles.custom_loss(args, batch, logits_of(seed), lambda x: x.sum())[1]
        count = float(sum(int(m.sum()) for m in batch["loss_masks"]))
        clipped, tokens = clipped + float(metrics["pg_clipfrac"]) / sum(LENGTHS) * count, tokens + count
    assert CLIPPED.take(torch.device("cpu")) == pytest.approx(clipped / tokens)
    assert clipped > 0
    assert CLIPPED.take(torch.device("cpu")) is None
