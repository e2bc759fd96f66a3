"""linear_policy_loss equals policy_loss of linear_log_probs, and does less for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import BACKENDS
from test_linear_log_probs import LAYER, record
from torch import Tensor

import fastadv as fa
from fastadv.losses import KL, NATIVE_LOSSES, PRESETS, Correction, loss_config
from fastadv.ops import _linear, linear_policy_loss

ON = pytest.mark.parametrize("backend", BACKENDS)
TOKENS, CU = 40, torch.tensor([0, 12, 12, 31, 40])


def batch(seed: int = 0, vocab: int = 37) -> dict[str, Any]:
    """Packed rollouts, with old log-probs around the new ones: some ratios are clipped."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    given = {
        "hidden": normal(TOKENS, 8),
        "weight": 0.4 * normal(vocab, 8),
        "bias": normal(vocab),
        "labels": torch.randint(0, vocab, (TOKENS,), generator=generator),
        "mask": torch.rand(TOKENS, generator=generator) < 0.7,
        "temperature": 0.5 + torch.rand(TOKENS, generator=generator),
    }
    log_probs = fa.linear_log_probs(**given).log_probs
    return {
        **given,
        "old_log_probs": log_probs + 0.4 * normal(TOKENS),
        "advantages": normal(TOKENS),
        "cu_seqlens": CU,
        "softcap": 8.0,
    }


def with_leaves(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    leaves = {name: given[name].detach().clone().requires_grad_() for name in LAYER if given.get(name) is not None}
    return {**given, **leaves}, leaves


def composition(given: dict[str, Any], backend: str = "auto") -> fa.LossOutput:
    """The definition."""
    layer = {
        k: given[k] for k in ("hidden", "weight", "labels", "bias", "mask", "temperature", "softcap") if k in given
    }
    rest = {k: v for k, v in given.items() if k not in layer and k not in ("chunk_tokens", "deterministic")}
    config = loss_config(given.get("config", "ppo"))
    wanted = config.entropy_coef != 0
    log_probs, entropy, _ = fa.linear_log_probs(**layer, return_entropy=wanted, backend=backend)
    backend = backend if config.loss in NATIVE_LOSSES else "reference"
    return fa.policy_loss(log_probs, mask=given["mask"], **rest, entropy=entropy, backend=backend)


def results(call: Any, given: dict[str, Any], factor: float = 1.0) -> dict[str, Tensor]:
    ours, leaves = with_leaves(given)
    out = call(ours)
    (factor * out.loss.sum()).backward()
    grads = {f"d {name}": leaf.grad for name, leaf in leaves.items()}
    return {"loss": out.loss.detach(), **out.metrics, **grads}


def double(value: Any) -> Any:
    if isinstance(value, fa.SegmentTable):
        return fa.SegmentTable(value.values.double(), value.segments)
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 3e-6) -> None:
    assert a.keys() == b.keys()
    for name in a:
        scale = max(1e-3, float(b[name].abs().max()))
        torch.testing.assert_close(
            a[name].double(),
            b[name].double(),
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def variants() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    mask = batch()["mask"]
    index = fa.segments(fa.turn_ids_from_mask(mask, CU), CU)
    uniform = torch.rand(TOKENS, generator=generator)
    return {
        "plain": {},
        "chunks": {"chunk_tokens": 7},
        "deterministic": {"deterministic": True},
        "no bias": {"bias": None},
        "dual clip": {"config": fa.LossConfig(clip_low=0.1, clip_high=0.28, dual_clip=3.0), "chunk_tokens": 9},
        "reinforce": {"config": "reinforce"},
        "reinforce without old": {"config": "reinforce", "old_log_probs": None},
        "row means": {"config": fa.LossConfig(loss_agg_mode="seq-mean-token-mean"), "chunk_tokens": 7},
        "sums": {"config": fa.LossConfig(loss_agg_mode="seq-mean-token-sum-norm", horizon=9.0)},
        "rows": {"advantages": torch.tensor([1.0, -1.0, 0.0, 2.0]), "weights": torch.tensor([1.0, 2.0, 0.0, 0.5])},
        "segments": {"advantages": fa.SegmentTable(torch.randn(index.count, generator=generator), index)},
        "weights": {"weights": uniform * (uniform > 0.3), "chunk_tokens": 11},
        "is_weights": {"is_weights": uniform * (uniform > 0.3), "chunk_tokens": 11},
        "zero advantages": {"advantages": torch.zeros(TOKENS)},
        "denominator": {"denominator": 123.0},
        "entropy": {"config": fa.LossConfig(entropy_coef=0.3), "advantages": torch.zeros(TOKENS), "chunk_tokens": 7},
        "cispo, k3": {
            "config": fa.LossConfig("cispo", kl=KL("k3", 0.2), entropy_coef=0.1),
            "ref_log_probs": -3 * uniform,
            "chunk_tokens": 7,
        },
        "sapo, icepop": {
            "config": PRESETS["sapo"].but(correction=Correction("mis", low=0.6, high=1.7)),
            "rollout_log_probs": batch()["old_log_probs"] + 0.3 * uniform,
            "chunk_tokens": 7,
        },
        "ppo, sequence tis": {
            "config": fa.LossConfig(correction=Correction("tis", "sequence", 0.2, 3.0, veto=0.1)),
            "rollout_log_probs": batch()["old_log_probs"] + 0.3 * uniform,
        },
        "reinforce to the policy itself": {
            "config": fa.LossConfig("reinforce", correction=Correction("tis", "geometric")),
            "rollout_log_probs": -3 * uniform,
            "old_log_probs": None,
        },
        "gspo": {"config": PRESETS["gspo/verl"].but(clip_low=0.2, clip_high=0.3)},
        "gspo, mean": {"config": PRESETS["gspo/trl"].but(clip_low=0.2, clip_high=0.3)},
        "vespo": {"config": "vespo"},
        "gmpo": {"config": "gmpo"},
    }


VARIANTS = variants()


@ON
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_composition(name: str, backend: str) -> None:
    given = {**batch(), **VARIANTS[name]}
    exact = results(lambda x: composition(x, "reference"), {k: double(v) for k, v in given.items()})
    for factor in (1.0, -2.5):
        expected = {k: v * factor if k.startswith("d ") else v for k, v in exact.items()}
        same(results(lambda x: fa.linear_policy_loss(**x, backend=backend), given, factor), expected)
    config = loss_config(given.get("config", "ppo"))
    assert fa.last_backend() == (backend if config.loss in NATIVE_LOSSES else "reference")


@pytest.mark.parametrize("name", VARIANTS)
def test_one_pass_and_two_passes_agree(name: str, monkeypatch: Any) -> None:
    """A loss that is not by token goes the other way."""
    given = {**batch(), **VARIANTS[name]}
    one = results(lambda x: fa.linear_policy_loss(**x), given)
    monkeypatch.setattr(linear_policy_loss, "TOKEN_LOSSES", frozenset())
    rows = record(monkeypatch)
    two = results(lambda x: fa.linear_policy_loss(**x), given)
    assert len(rows["load"]) == len(set(rows["load"])) + len(rows["backward"])
    same(one, two)


def test_padded_as_packed() -> None:
    given = batch()
    packed = results(lambda x: fa.linear_policy_loss(**x), {**given, "cu_seqlens": None})
    tokens = ("hidden", "labels", "mask", "temperature", "old_log_probs", "advantages")
    padded = {k: v.view(4, 10, *v.shape[1:]) if k in tokens else v for k, v in given.items() if k != "cu_seqlens"}
    found = results(lambda x: fa.linear_policy_loss(**x), padded)
    same({k: v.view(packed[k].shape) for k, v in found.items()}, packed)


def test_reduction_none_gives_token_losses() -> None:
    given = {**batch(), "reduction": "none"}
    same(results(lambda x: fa.linear_policy_loss(**x), given), results(composition, given))


# ---- what is not computed --------------------------------------------------------------------------------------------


def test_each_row_is_multiplied_out_once_and_goes_back_only_with_a_gradient(monkeypatch: Any) -> None:
    given = {**batch(), "advantages": torch.where(torch.arange(TOKENS) % 3 == 0, 0.0, batch()["advantages"])}
    log_probs = fa.linear_log_probs(
        **{k: given[k] for k in (*LAYER, "labels", "mask", "temperature", "softcap")}
    ).log_probs.requires_grad_()
    fa.policy_loss(log_probs, given["old_log_probs"], given["advantages"], given["mask"]).loss.backward()
    counted, flowing = given["mask"].nonzero().flatten().tolist(), log_probs.grad.nonzero().flatten().tolist()
    assert 0 < len(flowing) < 0.7 * len(counted)
    for chunk in (None, 1, 7):
        with monkeypatch.context() as patch:
            rows = record(patch)
            results(lambda x, c=chunk: fa.linear_policy_loss(**x, chunk_tokens=c), given)
        assert rows["load"] == counted
        assert sorted(rows["backward"]) == flowing


@ON
def test_rows_that_do_not_count_enter_nothing(backend: str) -> None:
    weights = (torch.arange(TOKENS) % 5 > 0).float()
    given = {**batch(), "weights": weights}
    on = given["mask"] & (weights != 0)
    dirty = {**given, "hidden": torch.where(on[:, None], given["hidden"], torch.nan)}
    dirty["labels"] = torch.where(on, given["labels"], -7)
    clean = results(lambda x: fa.linear_policy_loss(**x, backend=backend), given)
    found = results(lambda x: fa.linear_policy_loss(**x, backend=backend), dirty)
    for name in clean:
        assert torch.equal(clean[name], found[name]), name
    assert bool((found["d hidden"][~on] == 0).all())


@ON
@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_that_counts(backend: str, tokens: int) -> None:
    given, leaves = with_leaves({k: batch()[k] for k in LAYER})
    given["hidden"] = leaves["hidden"] = given["hidden"].detach()[:tokens].requires_grad_()
    zeros = torch.zeros(tokens)
    loss = fa.linear_policy_loss(**given, labels=zeros.long(), old_log_probs=zeros, advantages=zeros, mask=zeros,
                                 backend=backend).loss  # fmt: skip
    assert float(loss.detach()) == 0
    loss.backward()
    assert all(bool((leaf.grad == 0).all()) for leaf in leaves.values())


def test_without_grad_no_gradient_work_is_done(monkeypatch: Any) -> None:
    rows = record(monkeypatch)
    given, _ = with_leaves(batch())
    with torch.no_grad():
        out = fa.linear_policy_loss(**given)
    plain = fa.linear_policy_loss(**batch())
    assert not out.loss.requires_grad
    assert not plain.loss.requires_grad
    assert rows["backward"] == []
    torch.testing.assert_close(out.loss, fa.linear_policy_loss(**given).loss, rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYER)
def test_only_the_gradients_that_are_needed(name: str, monkeypatch: Any) -> None:
    made = made_gradients(monkeypatch)
    given, leaves = batch(), with_leaves(batch())[1]
    fa.linear_policy_loss(**{**given, name: leaves[name]}).loss.backward()
    (sums,) = made
    assert [part for part in LAYER if getattr(sums, part) is not None] == [name]
    torch.testing.assert_close(leaves[name].grad, results(composition, given)[f"d {name}"], rtol=1e-5, atol=1e-6)


def made_gradients(monkeypatch: Any) -> list[_linear.Gradients]:
    made: list[_linear.Gradients] = []
    of = _linear.Gradients.of.__func__

    def making(cls: Any, *given: Any, **options: Any) -> _linear.Gradients:
        made.append(of(cls, *given, **options))
        return made[-1]

    monkeypatch.setattr(_linear.Gradients, "of", classmethod(making))
    return made


def test_bad_input_is_refused_before_anything_is_multiplied(monkeypatch: Any) -> None:
    rows = record(monkeypatch)
    for changes, error, message in (
        ({"denominator": 0.0}, ValueError, r"policy_loss: denominator is 0.0"),
        ({"old_log_probs": torch.zeros(3)}, ValueError, r"policy_loss: old_log_probs has shape \[3\]"),
        ({"advantages": torch.zeros(7)}, ValueError, r"policy_loss: advantages has shape \[7\]"),
        ({"config": "pop"}, ValueError, r"config is 'pop'"),
        ({"mask": torch.full((TOKENS,), 0.5)}, ValueError, r"linear_policy_loss: mask has a fractional"),
        ({"mask": None}, TypeError, r"linear_policy_loss: mask is a NoneType"),
        ({"labels": torch.full((TOKENS,), 99)}, ValueError, r"linear_policy_loss: labels\[\d+\] is 99"),
        ({"clip_ratio": 0.2}, TypeError, r"clip_ratio"),
        ({"vocab_start": 3}, ValueError, r"vocab_start is 3 without vocab_group"),
        ({"reduction": "mean"}, ValueError, r"reduction is 'mean'"),
    ):
        given, _ = with_leaves(batch())
        with pytest.raises(error, match=message):
            fa.linear_policy_loss(**{**given, **changes})
    assert rows["backward"] == []


# ---- autograd --------------------------------------------------------------------------------------------------------


def test_the_gradient_is_handed_over_without_a_copy(monkeypatch: Any) -> None:
    made = made_gradients(monkeypatch)
    given, leaves = with_leaves(batch())
    loss = fa.linear_policy_loss(**given).loss
    address = made[0].weight.data_ptr()
    made.clear()
    loss.backward()
    assert leaves["weight"].grad.data_ptr() == address


def test_backward_twice_with_retain_graph() -> None:
    given, leaves = with_leaves(batch())
    loss = fa.linear_policy_loss(**given).loss
    first = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.fill_(torch.nan)  # it belongs to the caller
    second = torch.autograd.grad(3 * loss, list(leaves.values()))
    for a, b in zip(kept, second, strict=True):
        torch.testing.assert_close(3 * a, b, rtol=1e-6, atol=1e-7)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves["weight"])


@pytest.mark.parametrize("name", ["weight", "old_log_probs", "advantages", "mask"])
def test_an_input_that_changed_in_between(name: str) -> None:
    """The gradients were made already; were they made anew, from what changed, that would be an error."""
    given, leaves = with_leaves(batch())
    loss = fa.linear_policy_loss(**given).loss
    torch.autograd.grad(loss, leaves["weight"], retain_graph=True)
    with torch.no_grad():
        given[name].logical_not_() if name == "mask" else given[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaves["weight"])


def test_micro_batches_add_up() -> None:
    given = batch()
    step = fa.denominators(given["mask"], CU)
    whole = results(lambda x: fa.linear_policy_loss(**x), {**given, "denominator": step})
    parts = []
    for first, last in ((0, 12), (12, 40)):
        tokens = ("hidden", "labels", "mask", "temperature", "old_log_probs", "advantages")
        part = {k: v[first:last] if k in tokens else v for k, v in given.items()}
        inside = CU[(first <= CU) & (last >= CU)] - first
        part["cu_seqlens"] = inside.unique() if first else inside[:2]
        parts.append(results(lambda x: fa.linear_policy_loss(**x), {**part, "denominator": step}))
    for name in ("loss", "d weight", "d bias"):
        torch.testing.assert_close(parts[0][name] + parts[1][name], whole[name], rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(
        torch.cat([parts[0]["d hidden"], parts[1]["d hidden"]]), whole["d hidden"], rtol=2e-6, atol=1e-7
    )


def test_a_scaled_loss_keeps_small_float16_gradients() -> None:
    """A gradient below what float16 holds is scaled before it is rounded."""
    low = {k: v.half() if k in LAYER else v for k, v in batch().items()}
    found = results(lambda x: fa.linear_policy_loss(**x, denominator=1e9), low, 2.0**30)
    exact = results(
        lambda x: composition({**x, "denominator": 1e9}, "reference"), {k: double(v) for k, v in low.items()}, 2.0**30
    )
    for name in LAYER:
        assert found[f"d {name}"].dtype == torch.float16
        same({name: found[f"d {name}"]}, {name: exact[f"d {name}"]}, 2e-3)


def test_compiled_as_in_eager_mode() -> None:
    torch._dynamo.reset()
    given, leaves = with_leaves(batch())
    compiled = torch.compile(lambda **x: fa.linear_policy_loss(**x).loss, fullgraph=True, backend="aot_eager")
    compiled(**given).backward()
    for name, expected in results(composition, batch()).items():
        if name.startswith("d "):
            torch.testing.assert_close(leaves[name[2:]].grad, expected, rtol=1e-5, atol=1e-6)


def test_deterministic_hidden_gradients_do_not_depend_on_the_chunk() -> None:
    found = [
        results(lambda x, c=chunk: fa.linear_policy_loss(**x, deterministic=True, chunk_tokens=c), batch())
        for chunk in (None, 64)
    ]
    assert torch.equal(found[0]["d hidden"], found[1]["d hidden"])
