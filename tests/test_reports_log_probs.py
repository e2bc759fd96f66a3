"""Public bug reports about log-probs from logits, as tests under their ids: B.. in data/reports.json, from which inputs
and right answers are read, and k.. for the rows of a list of user reports, whose repositories and numbers are named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from log_prob_cases import INF, NAN, ON, ON_NATIVE, close, draw, equal, run
from op_cases import NATIVE
from torch import Tensor

import fastadv as fa

REPORTS = {r["id"]: r for r in json.loads((Path(__file__).parent / "data" / "reports.json").read_text())}


def numbers(values: Any) -> Tensor:
    """JSON numbers, with "nan" and "inf" spelled out, as float32."""
    return torch.stack([numbers(v) for v in values]) if isinstance(values, list) else torch.tensor(float(values))


def case(number: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return REPORTS[number]["input"], REPORTS[number]["expected"]


def near(actual: Tensor, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual.double(), numbers(expected).double(), rtol=0, atol=tolerance)


# ---- data/reports.json -----------------------------------------------------------------------------------------------


@ON
def test_b27_no_lane_beyond_the_vocabulary_counts(backend: str) -> None:
    given, expected = case("B27")
    exact = given["exact"]
    logits = numbers(exact["hidden"]) @ numbers(exact["weight"]).T
    labels = torch.tensor(exact["labels"])
    log_prob, entropy, _, _ = run(backend, logits.expand(3, 3), labels)
    near(log_prob, expected["exact"]["logp"], 1e-5)
    near(entropy, [expected["exact"]["entropy"]] * 3, 1e-5)
    for vocab in given["recipe"]["V"]:
        hidden = torch.sin(torch.arange(4 * 16, dtype=torch.float64)).view(4, 16)
        weight = torch.cos(torch.arange(vocab * 16, dtype=torch.float64) * 0.37).view(vocab, 16)
        logits = (hidden @ weight.T + given["recipe"]["logit_bias"]).float()
        labels = torch.tensor([0, vocab // 2, vocab - 1, vocab // 3])
        log_prob, entropy, _, _ = run(backend, logits, labels)
        near(log_prob, expected["recipe_logp"][str(vocab)], 1e-5)
        if str(vocab) in expected["recipe_entropy"]:
            near(entropy, expected["recipe_entropy"][str(vocab)], 1e-5)


@ON
def test_b28_temperature_divides_logits_in_float32_and_its_gradient(backend: str) -> None:
    given, expected = case("B28")
    logits, tokens = numbers(given["logits"]).expand(3, 3), torch.tensor(given["tokens"])
    hot = run(backend, logits, tokens, temperature=given["temperature"])
    near(hot[0], expected["logp_T0.6"])
    near(hot[1], [expected["entropy_T0.6"]] * 3)
    near(run(backend, logits, tokens)[0], expected["logp_T1"])
    per_row = run(backend, logits[:2], tokens[:2], temperature=torch.tensor(given["per_row_temperature"]))
    near(per_row[0], [expected["logp_T0.6"][0], expected["logp_T1"][1]])
    one = run(backend, logits[:1], tokens[:1], (1.0, 0.0, 0.0), temperature=given["temperature"])
    near(one[3][0], expected["grad_logp_token0_wrt_logits"])
    for bad in (0.0, -0.6):
        with pytest.raises(ValueError, match="temperature"):
            fa.token_log_probs(logits, tokens, temperature=bad, backend=backend)
    low = torch.tensor([[11.0625, 3.0, -2.0]], dtype=torch.bfloat16)  # the quotient is not rounded to bfloat16
    exact = run("reference", low.double(), tokens[1:2], temperature=0.7)
    near(run(backend, low, tokens[1:2], temperature=0.7)[0], exact[0].tolist(), 2e-6)


@ON
def test_b32_the_logits_are_never_overwritten(backend: str) -> None:
    given, expected = case("B32")
    logits, label = numbers(given["logits"]), torch.tensor([given["label"]])
    leaf = logits.clone().requires_grad_()

    def log_prob() -> Tensor:
        return fa.token_log_probs(leaf, label, backend=backend).log_probs.sum()

    def entropy() -> Tensor:
        out = fa.token_log_probs(leaf, label, return_entropy=True, backend=backend)
        assert out.entropy is not None
        return out.entropy.sum()

    for first, second, names in ((log_prob, entropy, "logp entropy"), (entropy, log_prob, "entropy logp")):
        for function, name in zip((first, second), names.split(), strict=True):
            value = function()
            near(value.detach(), expected[name])
            for _ in range(2):
                (gradient,) = torch.autograd.grad(value, leaf, retain_graph=True)
                near(gradient[0], expected[f"grad_{name}"])
            assert torch.equal(leaf, logits)
    out = fa.token_log_probs(leaf, label, return_entropy=True, backend=backend)
    (out.log_probs + 0.1 * out.entropy).sum().backward()
    near(leaf.grad[0], expected["grad_sum"])
    assert torch.equal(leaf, logits)


@ON
def test_b33_zero_log_zero_is_zero(backend: str) -> None:
    given, expected = case("B33")
    for row, entropy in zip(given["rows"], expected["entropy"], strict=True):
        found = run(backend, numbers([row]), torch.tensor([0]), (0.0, 1.0, 0.0))
        near(found[1], [entropy])
        assert bool(found[3].isfinite().all())
    near(found[3][0], expected["grad_row3"])
    for dtype in (torch.float16, torch.float32):
        halves = numbers([given["fp16_row"]]).to(dtype)
        found = run(backend, halves, torch.tensor([0]))
        near(found[1], [expected["fp16_row"]])
        assert bool(found[3].isfinite().all())
    nothing = numbers([["-inf", "-inf"]])
    assert bool(run(backend, nothing, torch.tensor([0]))[1].isnan())
    assert float(run(backend, nothing, torch.tensor([0]), mask=torch.tensor([0]))[1]) == 0


@ON_NATIVE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_b35_rows_far_apart(dtype: torch.dtype, backend: str) -> None:
    """The small-memory variant: a view of 4 rows of 8 columns 2^30 elements apart. Only touched pages become memory."""
    _, expected = case("B35")
    rows, vocab = 4, 8
    near_rows = torch.zeros(rows, vocab, dtype=dtype)
    near_rows[torch.arange(rows), torch.arange(rows) % vocab] = 5.0
    far = torch.empty((rows - 1) * 2**30 + vocab, dtype=dtype).as_strided((rows, vocab), (2**30, 1)).copy_(near_rows)
    for shift, name in ((0, "hit"), (1, "miss")):
        labels = (torch.arange(rows) + shift) % vocab
        equal(run(backend, far, labels), run(backend, near_rows, labels))
        at_full_size = expected[f"logp_label_{name}"] + math.log(math.exp(5) + 151_935) - math.log(math.exp(5) + 7)
        near(run(backend, far, labels)[0], [at_full_size] * rows, 1e-4)
    gradient = run(backend, far, labels, (torch.tensor([0.0, 0.0, 0.0, 1.0]), 0.0, 0.0))[3]
    assert bool((gradient[:3] == 0).all())
    assert float(gradient[3, (rows - 1 + 1) % vocab]) > 0.9
    scattered = torch.empty((rows - 1) * 2**30 + vocab, dtype=dtype).as_strided((rows, vocab), (2**30, 1))
    scattered.copy_(near_rows)
    leaf = scattered.requires_grad_()
    out = fa.token_log_probs(leaf, labels, inplace_backward=True, backend=backend)
    (in_place,) = torch.autograd.grad(out.log_probs.sum(), leaf)
    one_step = torch.finfo(dtype).eps  # the plain gradient beside an entropy's rounds otherwise
    torch.testing.assert_close(in_place, run(backend, near_rows, labels, (1.0, 0.0, 0.0))[3], rtol=one_step, atol=1e-7)


@ON_NATIVE
def test_b36_entropy_of_equal_logits(backend: str) -> None:
    """Its memory bounds, as ratios at small size, are test_peak_memory's in test_token_log_probs_memory.py."""
    given, expected = case("B36")
    logits = torch.zeros(2, given["V"], dtype=torch.bfloat16)
    log_prob, entropy, sum_p2, gradient = run(backend, logits, torch.tensor([0, given["V"] - 1]))
    near(entropy, [expected["entropy"]] * 2, 1e-4)
    near(log_prob, [-expected["entropy"]] * 2, 1e-4)
    torch.testing.assert_close(sum_p2, torch.full((2,), 1 / given["V"]), rtol=1e-6, atol=0)
    assert gradient.dtype == torch.bfloat16


# ---- reports of users of other libraries -----------------------------------------------------------------------------


@ON
def test_k10_impossible_label_masked_or_not(backend: str) -> None:
    """NeMo-RL#4154: top-k and top-p leave logits of -inf; times a mask of 0 they are NaN."""
    logits, label = torch.tensor([[0.0, 0.0, -INF]]), torch.tensor([2])
    masked = run(backend, logits, label, mask=torch.tensor([0]))
    assert all(bool((x == 0).all()) for x in masked)
    leaf = logits.clone().requires_grad_()
    out = fa.token_log_probs(leaf, label, mask=torch.tensor([1]), backend=backend)
    assert float(out.log_probs.detach()) == -INF
    out.log_probs.sum().backward()
    near(leaf.grad[0], [-0.5, -0.5, 0.0])


@ON
def test_k11_entropy_gradient_beside_an_impossible_token(backend: str) -> None:
    """VeOmni#720, TRL#7221: 0 times -inf in the gradient of the entropy."""
    found = run(backend, torch.tensor([[0.0, 0.0, -INF]]), torch.tensor([0]), (0.0, 1.0, 0.0))
    near(found[1], [math.log(2)])
    near(found[3][0], [0.0, 0.0, 0.0])


@ON
@pytest.mark.parametrize("head", [2048, 16384])
def test_k12_whole_first_blocks_of_impossible_tokens(head: int, backend: str) -> None:
    """flash-attn#1930, and block sizes of other kernels: -inf minus -inf in the online maximum."""
    logits, _ = draw(2, 20_000)
    logits[:, :head] = -INF
    labels = torch.tensor([head, 19_999])
    rest = run(backend, logits[:, head:], labels - head)
    found = run(backend, logits, labels)
    close(found[:3], rest[:3])
    close([*found[:3], found[3][:, head:]], rest)


@ON
def test_k13_rows_without_meaning_are_never_plausible(backend: str) -> None:
    """pytorch#195829: an all -inf row, a NaN logit, a target out of range."""
    for row in ([-INF, -INF], [0.0, NAN], [NAN, NAN]):
        assert all(bool(x.isnan().all()) for x in run(backend, torch.tensor([row]), torch.tensor([0])))
    with pytest.raises(ValueError, match=r"labels\[0\] is 2"):
        fa.token_log_probs(torch.zeros(1, 2), torch.tensor([2]), backend=backend)
    with fa.checks("off"):
        assert bool(fa.token_log_probs(torch.zeros(1, 2), torch.tensor([2]), backend=backend).log_probs.isnan())


@ON
@pytest.mark.parametrize("vocab", [1, 3, 1025, 2049, 3001])
def test_k14_log_probs_are_at_most_zero(vocab: int, backend: str) -> None:
    """verl#2656: the fused kernel gave log-probs up to +123.7 where V is no multiple of the block."""
    logits, labels = draw(8, vocab, scale=300.0)
    labels[:4] = logits[:4].argmax(-1)
    assert bool((run(backend, logits, labels)[0] <= 0).all())


@ON
@pytest.mark.parametrize("vocab", [1100, 129_920])
def test_k15_vocabularies_that_are_no_multiple_of_a_block(vocab: int, backend: str) -> None:
    """verl#2899, verl#5349: phantom columns; with 1100 zeros, -7.003065."""
    found = run(backend, torch.zeros(1, vocab), torch.tensor([vocab - 1]))
    near(found[0], [-math.log(vocab)], 1e-5)
    near(found[1], [math.log(vocab)], 1e-5)
    if vocab == 1100:
        near(found[0], [-7.003065])


@ON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_k16_all_logits_far_below_zero(dtype: torch.dtype, backend: str) -> None:
    """SkyRL#2141: a maximum that starts at 0; and a second run on the same inputs gives the same."""
    logits, labels = torch.full((2, 1024), -120.0, dtype=dtype), torch.tensor([0, 1023])
    found = run(backend, logits, labels)
    near(found[0], [-6.931472] * 2)
    near(found[1], [6.931472] * 2)
    equal(run(backend, logits, labels), found)


@ON
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_k17_log_probs_come_out_in_float32(dtype: torch.dtype, backend: str) -> None:
    """verl#5662: at -11 a step of bfloat16 is 0.0625."""
    logits, labels = draw(4, 1000)
    logits = logits.to(dtype)
    logits[torch.arange(4), labels] = -5.0
    found = run(backend, logits, labels)[0]
    assert found.dtype == torch.float32
    exact = run("reference", logits.double(), labels)[0]
    assert bool((exact < -11).all())
    near(found, exact.tolist(), 1e-5)


@ON_NATIVE
def test_k18_a_row_does_not_depend_on_the_batch(backend: str) -> None:
    """verl#6280, RL-Kernel#96: the same row alone and among 1000."""
    logits, labels = draw(1000, 301)
    whole = run(backend, logits, labels)
    for row in (0, 217, 218, 999):
        one = slice(row, row + 1)
        equal(run(backend, logits[one], labels[one]), [x[one] for x in whole])


@ON
def test_k20_strided_logits(backend: str) -> None:
    """verl#6960, TransformerEngine#2734 (2.0794 everywhere), vllm#42684, unsloth#10713."""
    source = torch.randn(3, 2, 8)
    for laid_out in (
        source.transpose(0, 1),
        source[:, :, ::2],
        source[:, ::2],
        source.view(6, 8)[:, :5],
        source[:1, :1].expand(4, 3, 8),
    ):
        labels = torch.randint(0, laid_out.shape[-1], laid_out.shape[:-1])
        upstream = (torch.tensor(0.5).expand(labels.shape), 0.0, 0.0)
        found, plain = run(backend, laid_out, labels, upstream), run(backend, laid_out.contiguous(), labels, upstream)
        equal(found, plain) if backend in NATIVE else close(found, plain)
        near(found[0], (-torch.nn.functional.cross_entropy(
            laid_out.reshape(-1, laid_out.shape[-1]), labels.reshape(-1), reduction="none"
        )).reshape(labels.shape).tolist())  # fmt: skip


@pytest.mark.slow
@ON_NATIVE
def test_k21_more_than_two_billion_logits(backend: str) -> None:
    """Liger#251, triton#6748, pytorch#111484: row 14134 straddles element 2^31, row 14135 begins beyond it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    if int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) < 10 * 2**20:
        pytest.skip("needs 10 GB of free memory")
    torch.set_num_threads(2)
    rows, vocab = 14_136, 151_936
    logits, labels = torch.zeros(rows, vocab, dtype=torch.bfloat16), torch.arange(rows)
    generator = torch.Generator().manual_seed(0)
    for row in (0, 14_133, 14_134, 14_135):
        logits[row] = torch.randn(vocab, generator=generator)
    found = run(backend, logits, labels)
    for row in (0, 14_133, 14_134, 14_135):
        one = slice(row, row + 1)
        equal(run(backend, logits[one], labels[one]), [x[one] for x in found])


@ON
@pytest.mark.usefixtures("poisoned_memory")
def test_k22_ignored_rows_under_compile(backend: str) -> None:
    """Liger#1338, Liger#174: garbage of uninitialised memory at ignored rows."""
    torch._dynamo.reset()
    logits, labels = draw(6, 40)
    labels[[0, 3]] = -100
    plain = run(backend, logits, labels, ignore_index=-100)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        out = fa.token_log_probs(logits, labels, ignore_index=-100, return_entropy=True, backend=backend)
        return out.log_probs, out.entropy

    leaf = logits.clone().requires_grad_()
    log_prob, entropy = compiled(leaf, labels)
    log_prob.sum().backward()
    for x in (log_prob, entropy, leaf.grad, *plain):
        assert bool((x[[0, 3]] == 0).all())
        assert bool(x.isfinite().all())
    near(log_prob.detach(), plain[0].tolist())
