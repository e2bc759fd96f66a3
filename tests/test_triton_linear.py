"""The ops on hidden states with Triton's epilogues, in Triton's interpreter: values, what is skipped, and that nothing
waits for a GPU where an index was built. One interpreted row costs a tenth of a second."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from fastadv.triton_kernels import _launch as launching
from fastadv.triton_kernels import token_log_probs as kernels
from test_linear_log_probs import ALL, LAYER, equals_oracle, gradients, oracle, record, with_leaves
from torch import Tensor

import fastadv as fa
from fastadv.ops import _linear, _logits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns where a GPU computes NaN
NAN = float("nan")


def problem(vocab: int = 19, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Seven tokens, of which four count."""
    generator = torch.Generator().manual_seed(vocab)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    given = {"hidden": normal(7, 8), "weight": normal(vocab, 8) / 3, "bias": normal(vocab)}
    return {
        **{name: t.to(dtype) for name, t in given.items()},
        "labels": torch.randint(0, vocab, (7,), generator=generator),
        "mask": torch.tensor([1, 0, 1, 1, 0, 0, 1]),
        "temperature": 0.5 + torch.rand(7, generator=generator),
    }


def losses(**changes: Any) -> dict[str, Any]:
    """A batch for linear_policy_loss: token 2 is clipped, token 3 has advantage 0."""
    given = {**problem(), **changes}
    mask = given["mask"] if isinstance(given["mask"], Tensor) else given["mask"].mask
    log_probs = fa.linear_log_probs(**{**given, "mask": mask}).log_probs
    shift = torch.tensor([0.1, NAN, -1.0, 0.1, NAN, NAN, -0.1])
    advantages = torch.tensor([1.0, NAN, 1.0, 0.0, NAN, NAN, -1.0])
    return {**given, "old_log_probs": log_probs + shift, "advantages": advantages}


def run(call: Any, given: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """Loss, metrics and gradients."""
    ours, leaves = with_leaves(given)
    out = call(**ours, **options)
    found = torch.autograd.grad(3 * out.loss, list(leaves.values()))
    return {"loss": out.loss.detach(), **out.metrics, **dict(zip(leaves, found, strict=True))}


def same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 3e-6) -> None:
    for name, value in b.items():
        torch.testing.assert_close(
            a[name].double(), value.double(), rtol=tolerance, atol=tolerance * max(1e-3, float(value.abs().max())),
            msg=lambda m, n=name: f"{n}: {m}",
        )  # fmt: skip


@pytest.fixture(autouse=True)
def _every_form_is_known(monkeypatch: Any) -> Iterator[None]:
    """The ahead-of-time gate compiles what is launched."""
    asked: list[Any] = []
    monkeypatch.setattr(launching, "launched", asked.append)
    yield
    known = {dataclasses.replace(c, aligned=()) for c in kernels.configurations()}
    for configuration in asked:
        if configuration.name in ("row_sums_kernel", "logits_gradient_kernel", "finish_statistics_kernel"):
            assert dataclasses.replace(configuration, aligned=()) in known, configuration


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 3, "softcap": 4.0}, {"deterministic": True}], ids=str)
def test_log_probs_equal_float64(options: dict[str, Any], poisoned_memory: None) -> None:
    options = dict(options)
    given = {**problem(1030 if options else 19), "softcap": options.pop("softcap", None)}
    equals_oracle(given, "triton", **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_rounds_no_logit(dtype: torch.dtype) -> None:
    given = problem(dtype=dtype)
    for mine, theirs in zip(fa.linear_log_probs(**given, **ALL, backend="triton"), oracle(given), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("config", ["ppo", fa.LossConfig(entropy_coef=0.01)], ids=["ppo", "entropy"])
@pytest.mark.parametrize("indexed", [False, True])
def test_the_policy_loss_equals_that_of_the_cpu(indexed: bool, config: Any, poisoned_memory: None) -> None:
    given = losses()
    right = run(fa.linear_policy_loss, given, config=config, backend="cpu")
    if indexed:
        given["mask"] = fa.token_index(given["mask"])
    same(run(fa.linear_policy_loss, given, config=config, chunk_tokens=3, backend="triton"), right)


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_token_counts(tokens: int) -> None:
    per_token = ("hidden", "labels", "mask", "temperature")
    given = {name: t[:tokens] if name in per_token else t for name, t in problem().items()}
    mask = torch.zeros(tokens)
    for given["mask"] in (mask, fa.token_index(mask)):
        ours, leaves = with_leaves(given)
        out = fa.linear_log_probs(**ours, **ALL, backend="triton")
        assert all(torch.equal(part.detach(), mask) for part in out if part is not None)
        assert all(bool((g == 0).all()) for g in gradients(tuple(out), leaves, torch.ones(3, tokens)).values())


def test_a_rank_without_a_part_of_the_vocabulary() -> None:
    """What it tells the others changes nothing."""
    labels, nothing = torch.tensor([3, 0]), torch.full((2,), -1)
    logits = torch.randn(2, 19)
    part = _logits.row_statistics("triton", logits, labels)
    empty = _logits.row_statistics("triton", logits[:, :0], nothing)
    alone, merged = _logits.finish("triton", part), _logits.finish("triton", torch.stack([empty, part]))
    assert all(torch.equal(a, b) for a, b in zip(alone, merged, strict=True))


# ---- index objects ---------------------------------------------------------------------------------------------------


class Waits:
    """Refuses whatever makes the host wait for a GPU, outside of the interpreter itself."""

    NAMES = ("nonzero", "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self, monkeypatch: Any) -> None:
        self.inside = False
        for name in self.NAMES:
            monkeypatch.setattr(Tensor, name, self._refusing(name, getattr(Tensor, name)))
        kernel = triton.runtime.interpreter.InterpretedFunction
        monkeypatch.setattr(kernel, "run", self._allowing(kernel.run))

    def _refusing(self, name: str, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            assert self.inside, f"{name} waits for a GPU"
            return method(*args, **options)

        return call

    def _allowing(self, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.inside = True
            try:
                return method(*args, **options)
            finally:
                self.inside = False

        return call


def test_with_an_index_nothing_waits(monkeypatch: Any) -> None:
    given = losses(mask=fa.token_index(torch.tensor([1, 0, 1, 1, 0, 0, 1])))
    with_mask = {**given, "mask": given["mask"].mask}
    right = run(fa.linear_policy_loss, given, backend="cpu")
    log_probs = {name: t for name, t in given.items() if name not in ("old_log_probs", "advantages")}
    with monkeypatch.context() as patch, fa.checks("off"):
        Waits(patch)
        found = run(fa.linear_policy_loss, given, backend="triton")
        out = fa.linear_log_probs(**with_leaves(log_probs)[0], backend="triton").log_probs
        out.sum().backward()
        with pytest.raises(AssertionError, match="nonzero waits"):
            fa.linear_policy_loss(**with_mask, backend="triton")
    same(found, right)


def test_what_an_index_leaves_out_enters_nothing(poisoned_memory: None) -> None:
    """Neither rows outside of the mask, nor rows without a gradient, which the products still hold."""
    given = losses()
    right = run(fa.linear_policy_loss, given, backend="cpu")
    given["hidden"] = given["hidden"].clone()
    given["hidden"][given["mask"] == 0] = NAN
    given["labels"] = torch.where(given["mask"] == 0, 99, given["labels"])
    given["mask"] = fa.token_index(given["mask"])
    same(run(fa.linear_policy_loss, given, backend="triton"), right)

    given, leaves = with_leaves({**problem(), "mask": fa.token_index(problem()["mask"])})
    given["hidden"].data[3] = NAN
    out = fa.linear_log_probs(**given, ignore_index=int(given["labels"][2]), **ALL, backend="triton")
    assert out.log_probs[3].isnan()
    assert all(float(part[2].detach()) == 0.0 for part in out if part is not None)
    upstream = torch.ones(3, 7)
    upstream[:, 3] = 0.0
    assert all(bool(g.isfinite().all()) for g in gradients(tuple(out), leaves, upstream).values())


def test_without_an_index_rows_without_a_gradient_are_dropped(monkeypatch: Any) -> None:
    rows = record(monkeypatch)
    run(fa.linear_policy_loss, losses(), backend="triton")
    assert rows["load"][-4:] == [0, 2, 3, 6]
    assert rows["backward"] == [0, 6]


def test_weights_of_an_index() -> None:
    mask, weights = torch.tensor([1, 0, 1, 1, 0, 0, 1]), torch.tensor([1.0, 0.0])
    cu_seqlens = torch.tensor([0, 3, 7])
    index = fa.token_index(mask, weights=weights, cu_seqlens=cu_seqlens)
    assert index.positions.tolist() == [0, 2]
    given = {**losses(), "cu_seqlens": cu_seqlens}
    right = run(fa.linear_policy_loss, given, weights=weights)
    same(run(fa.linear_policy_loss, {**given, "mask": index}, weights=weights), right)
    with pytest.raises(ValueError, match="weights is not 0 at 2 tokens that the TokenIndex leaves out"):
        fa.linear_policy_loss(**{**given, "mask": index})
    for grad in (True, False):
        with fa.checks("off"), torch.set_grad_enabled(grad):
            assert fa.linear_policy_loss(**with_leaves({**given, "mask": index})[0]).loss.isnan()


def test_an_index_of_other_tokens_is_refused() -> None:
    index = fa.token_index(torch.ones(2, 4))
    for call in (fa.linear_log_probs, fa.linear_policy_loss):
        given = losses() if call is fa.linear_policy_loss else problem()
        with pytest.raises(ValueError, match=r"TokenIndex is of \[2, 4\] tokens"):
            call(**{**given, "mask": index})
    for changes, error, message in (
        ({"mask": torch.tensor([0.5])}, ValueError, "token_index: mask has a fractional"),
        ({"mask": torch.tensor(1)}, ValueError, r"mask has shape \[\]"),
        ({"mask": [1, 0]}, TypeError, "mask is a list"),
        ({"weights": torch.ones(3)}, ValueError, r"weights has shape \[3\]; expected \[1\]"),
        ({"weights": 2.0}, TypeError, "weights is a float"),
    ):
        with pytest.raises(error, match=message):
            fa.token_index(**{"mask": torch.ones(7), **changes})


# ---- what only a GPU multiplies --------------------------------------------------------------------------------------


def products_of_a_gpu(monkeypatch: Any) -> list[str]:
    """torch.mm and torch.addmm with `out_dtype`, which torch has on CUDA only, and their names as they are called."""
    called: list[str] = []
    for name, whole in (("mm", torch.mm), ("addmm", torch.addmm)):

        def product(*args: Tensor, whole: Any = whole, name: str = name, **options: Any) -> Tensor:
            if "out_dtype" not in options:
                return whole(*args, **options)
            *sums, a, b = args
            assert a.dtype == b.dtype == torch.bfloat16
            assert options["out_dtype"] == options["out"].dtype == torch.float32
            called.append(name)
            return options["out"].copy_(whole(*sums, a.float(), b.float()))

        monkeypatch.setattr(torch, name, product)
    return called


@pytest.mark.parametrize("bias", [True, False])
def test_bfloat16_is_multiplied_as_it_is(bias: bool, monkeypatch: Any) -> None:
    given = losses(**{name: problem(dtype=torch.bfloat16)[name] for name in LAYER})
    if not bias:
        del given["bias"]
    exact = run(fa.linear_policy_loss, {k: v.float() if k in LAYER else v for k, v in given.items()}, backend="cpu")
    monkeypatch.setattr(_linear, "operand_dtype", lambda dtype, device: dtype)
    called = products_of_a_gpu(monkeypatch)
    found = run(fa.linear_policy_loss, given, chunk_tokens=2, backend="triton")
    assert called == ["mm"] * 5 + ["addmm"]  # of each chunk logits, hidden and weight gradient, which are added up
    for name, right in exact.items():
        error = (found[name].double() - right.double()).norm() / right.double().norm().clamp(min=1e-9)
        assert error < (0.01 if name in LAYER else 1e-5), name
