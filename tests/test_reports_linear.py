"""Public reports about log-probs from hidden states, each under its id: B numbers from data/reports.json, k numbers are
rows of the list of user demands that the issue names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_cases import BACKENDS
from test_reports import case, close, numbers
from torch import Tensor

import fastadv as fa

ON = pytest.mark.parametrize("backend", BACKENDS)


def log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, backend: str, **options: Any) -> fa.TokenLogProbs:
    return fa.linear_log_probs(
        hidden, weight, labels, return_entropy=True, return_sum_p2=True, backend=backend, **options
    )


@ON
def test_b27_a_vocabulary_of_any_size_has_no_other_lanes(backend: str) -> None:
    given, expected = case("B27")
    exact = given["exact"]
    labels = torch.tensor(exact["labels"])
    hidden = numbers(exact["hidden"]).expand(len(labels), -1)
    out = log_probs(hidden, numbers(exact["weight"]), labels, backend)
    close(out.log_probs, expected["exact"]["logp"], 1e-5)
    close(out.entropy, [expected["exact"]["entropy"]] * len(labels), 1e-5)


@ON
@pytest.mark.parametrize("vocab", case("B27")[0]["recipe"]["V"])
@pytest.mark.parametrize("low", [False, True], ids=("float32", "bfloat16"))
def test_b27_recipe(vocab: int, low: bool, backend: str) -> None:
    """With a bias of -40 to every logit, a lane of logit 0 that is none of the vocabulary's would show."""
    hidden = torch.arange(4 * 16).double().sin().view(4, 16).float()
    weight = (torch.arange(vocab * 16).double() * 0.37).cos().view(vocab, 16).float()
    labels = torch.tensor([0, vocab // 2, vocab - 1, vocab // 3])
    bias = torch.full((vocab,), float(case("B27")[0]["recipe"]["logit_bias"]))
    if not low:
        out = log_probs(hidden, weight, labels, backend, bias=bias)
        close(out.log_probs, case("B27")[1]["recipe_logp"][str(vocab)], 1e-5)
        if str(vocab) in case("B27")[1]["recipe_entropy"]:
            close(out.entropy, case("B27")[1]["recipe_entropy"][str(vocab)], 1e-5)
    else:
        hidden, weight, bias = (t.bfloat16() for t in (hidden, weight, bias))
        out = log_probs(hidden, weight, labels, backend, bias=bias)
        exact = log_probs(hidden.double(), weight.double(), labels, "reference", bias=bias.double())
        close(out.log_probs, exact.log_probs.tolist(), 1e-5)
        close(out.entropy, exact.entropy.tolist(), 1e-5)
    assert bool((out.log_probs <= 0).all())
    assert bool(((out.entropy >= 0) & (out.entropy <= math.log(vocab) + 1e-6)).all())


@ON
@pytest.mark.parametrize("chunk_tokens", [None, 1, 2])
def test_b30_each_token_has_its_own_upstream_gradient(backend: str, chunk_tokens: int | None) -> None:
    given, expected = case("B30")
    hidden, weight = (numbers(given[name]).requires_grad_() for name in ("hidden", "weight"))
    labels = torch.tensor(given["labels"])
    out = fa.linear_log_probs(hidden, weight, labels, chunk_tokens=chunk_tokens, backend=backend).log_probs
    close(out.detach(), expected["logp"], 1e-5)
    out.backward(numbers(given["upstream"]))
    close(hidden.grad, expected["d_hidden"], 1e-5)
    close(weight.grad, expected["d_weight"], 1e-5)


@ON
def test_b30_as_a_loss(backend: str) -> None:
    """The same gradients from one pass: reinforce with minus the upstream gradients as advantages."""
    given, expected = case("B30")
    hidden, weight = (numbers(given[name]).requires_grad_() for name in ("hidden", "weight"))
    loss = fa.linear_policy_loss(
        hidden, weight, torch.tensor(given["labels"]), None, -numbers(given["upstream"]), torch.ones(3),
        config=fa.LossConfig("reinforce", loss_agg_mode="token-sum"), chunk_tokens=1, backend=backend,
    ).loss  # fmt: skip
    loss.backward()
    close(hidden.grad, expected["d_hidden"], 1e-5)
    close(weight.grad, expected["d_weight"], 1e-5)


@ON
def test_k01_upstream_of_one_token_gives_the_gradient_of_that_token(backend: str) -> None:
    """Liger #968, #488, #678, #1298: also with an ignored label among them."""
    hidden, weight = torch.randn(3, 4).requires_grad_(), torch.randn(5, 4).requires_grad_()
    labels = torch.tensor([2, 4, -100])
    out = fa.linear_log_probs(hidden, weight, labels, ignore_index=-100, backend=backend).log_probs
    out.backward(torch.tensor([1.0, 0.0, 5.0]))
    first = torch.autograd.grad((hidden[0] @ weight.t()).log_softmax(0)[2], weight)[0]
    torch.testing.assert_close(weight.grad, first, rtol=1e-5, atol=1e-6)
    assert bool((hidden.grad[1:] == 0).all())


@ON
@pytest.mark.parametrize("vocab", [127, 1000, 1100])
def test_k14_log_probs_are_at_most_zero(vocab: int, backend: str) -> None:
    """verl #2656: +123.7 with large weights and a vocabulary that is no multiple of a block."""
    hidden, weight = 30 * torch.randn(20, 16), 30 * torch.randn(vocab, 16)
    labels = (hidden @ weight.t()).argmax(-1)
    out = log_probs(hidden, weight, labels, backend)
    assert bool((out.log_probs <= 0).all())
    assert bool((out.log_probs > -1e-3).any())
    assert bool((out.entropy >= 0).all())


@ON
def test_k15_all_zero_logits(backend: str) -> None:
    """verl #2899, #5349: phantom columns gave -7.6246."""
    out = log_probs(torch.zeros(3, 8), torch.randn(1100, 8), torch.tensor([0, 1, 1099]), backend)
    close(out.log_probs, [-7.003065] * 3, 1e-6)


@ON
def test_k16_all_logits_far_below_zero(backend: str) -> None:
    """SkyRL #2141: a maximum that starts at 0 gave +inf and NaN. A second run gives what the first gave."""
    hidden, weight = torch.ones(2, 1), torch.full((1024, 1), -120.0)
    for _ in range(2):
        out = log_probs(hidden, weight, torch.tensor([0, 1023]), backend)
        close(out.log_probs, [-6.931472] * 2, 1e-6)
        close(out.entropy, [6.931472] * 2, 1e-6)


@ON
def test_k17_log_probs_of_bfloat16_are_float32(backend: str) -> None:
    """verl #5662: a bfloat16 step at -11.03 is 0.0625. Logits are not rounded either (kernels that keep them in
    bfloat16 are off by 2^-9 of a logit)."""
    hidden, weight = torch.randn(4, 64).bfloat16(), torch.randn(1000, 64).bfloat16()
    labels = (hidden @ weight.t()).float().argmin(-1)
    out = log_probs(hidden, weight, labels, backend)
    exact = log_probs(hidden.double(), weight.double(), labels, "reference")
    assert out.log_probs.dtype == torch.float32
    assert float(exact.log_probs.max()) < -11.03
    close(out.log_probs, exact.log_probs.tolist(), 2e-5)


def test_k18_a_row_does_not_depend_on_the_batch() -> None:
    """verl #6280, RL-Kernel #96, #148, #337: one row alone and among a thousand."""
    hidden, weight = torch.randn(1000, 64), torch.randn(1100, 64)
    labels = torch.randint(0, 1100, (1000,))
    every = log_probs(hidden, weight, labels, "cpu", deterministic=True)
    for row in (0, 1, 63, 64, 500, 999):
        alone = log_probs(hidden[row : row + 1], weight, labels[row : row + 1], "cpu", deterministic=True)
        for a, b in zip(every, alone, strict=True):
            assert torch.equal(a[row : row + 1], b)


@ON
def test_k19_shards_of_a_sequence(backend: str) -> None:
    """verl #3723: labels are shifted once, before the split, so a shard's last token has its own label. With real
    processes: tests/test_distributed_linear.py."""
    hidden, weight, ids = torch.randn(2, 9, 4), torch.randn(11, 4), torch.randint(0, 11, (2, 9))
    labels = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    mask = torch.arange(9).expand(2, 9) < 8  # the last token predicts nothing
    whole = fa.linear_log_probs(hidden, weight, labels, mask=mask, backend=backend).log_probs
    shards = [
        fa.linear_log_probs(hidden[:, part], weight, labels[:, part], mask=mask[:, part], backend=backend).log_probs
        for part in (slice(0, 5), slice(5, 9))
    ]
    torch.testing.assert_close(torch.cat(shards, 1), whole, rtol=1e-6, atol=1e-6)
    plain = (hidden @ weight.t()).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(whole[:, :-1], plain, rtol=1e-5, atol=1e-6)
