"""The CUDA kernels of the policy loss, compiled for the CPU."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from typing import Any

import cuda_kernels
import pytest
import torch
from draws import GARBAGE, Case, Inputs, Outputs, Shape, float64, same_bits, where_masked
from loss_cases import LOSS_CASES, PPO, settled
from torch import Tensor

import fastadv as fa
from fastadv import cuda
from fastadv.ops import _policy_loss_kernel as kernel
from fastadv.ops._policy_loss_kernel import POLICY_LOSS, SCALE_GRADIENT, SUMS, Formula
from fastadv.ops._policy_loss_kernel import Inputs as KernelInputs

pytestmark = pytest.mark.skipif(cuda_kernels.missing() is not None, reason=str(cuda_kernels.missing()))

BLOCK = 1024  # tokens that a block takes in a step, of float32; twice as many of 16 bits
CASES = {case.name.removeprefix("policy_loss[").removesuffix("]"): case for case in LOSS_CASES}
PACKED = Shape(lengths=(2100, 0, 1, 3, 513, 40, 200, 0), seed=3)  # a row of several blocks, short ones, empty ones
PADDED = Shape(lengths=(333, 332, 0, 5), padded=True, seed=4)
BY_FORM = ("ppo", "ppo, rows", "ppo, segments", "sapo", "gspo, mean", "gspo, mean, k1, geometric")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ORDERS = ("forward", "backward", "1", "2")


def run(case: Case, inputs: Inputs) -> Outputs:
    return case.run("cuda", inputs)


def assert_close(case: Case, inputs: Inputs, outputs: Outputs) -> None:
    """Each gradient and token loss by itself; sums and means relative to what they are made of."""
    exact = case.run("reference", {name: float64(value) for name, value in inputs.items()})
    assert outputs.keys() == exact.keys()
    terms = case.magnitude(inputs) if case.magnitude is not None else 0.0
    allowed = {"loss": terms, "policy_loss": 10 * terms, "approx_kl": 1.0, "kl": 1.0, "is_weight_mean": 1.0}
    for name, value in exact.items():
        largest = float(value.abs().max()) if value.numel() else 0.0
        atol = case.tolerance * max(allowed.get(name, 0.0), largest / 10) + 1e-30
        torch.testing.assert_close(
            outputs[name].double(), value.double(), rtol=case.tolerance, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def losses_and_gradient(log_probs: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = log_probs.clone().requires_grad_()
    losses = fa.policy_loss(leaf, *given, reduction="none", backend="cuda", **options).loss
    losses.sum().backward()
    return losses.detach(), leaf.grad


# ---- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_float64_reference(name: str, shape: Shape, poisoned_memory: None) -> None:
    inputs = CASES[name].make(shape.draw())
    assert_close(CASES[name], inputs, run(CASES[name], inputs))


@pytest.mark.parametrize("loss", ["reinforce", "ppo", "cispo", "sapo", "gspo"])
@pytest.mark.parametrize("kind", ["token", "row", "segment"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extended", [False, True], ids=["plain", "extended"])
def test_every_loss_with_every_kind_of_advantages(loss: str, kind: str, dtype: torch.dtype, extended: bool) -> None:
    d = Shape(lengths=(2050, 3, 0, 70), seed=5).draw()
    config = fa.LossConfig(loss, kl=fa.KL("k3", 0.1) if extended else None)
    log_probs = (-3 * d.uniform(*d.tokens)).to(dtype)
    given = {
        "log_probs": log_probs,
        "old_log_probs": (log_probs + 0.3 * d.normal(*d.tokens)).to(dtype),
        "mask": d.mask,
        "cu_seqlens": d.cu_seqlens,
        **({"ref_log_probs": (log_probs + d.normal(*d.tokens)).to(dtype)} if extended else {}),
    }
    given = settled(config, given)
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}
    table = d.segments()
    advantages = {"token": d.normal(*d.tokens).to(dtype), "row": d.normal(d.rows), "segment": d.normal(table.count)}
    values = advantages[kind]

    def computed(backend: str, double: bool) -> tuple[Tensor, Tensor]:
        inputs = {k: float64(v) for k, v in given.items()} if double else dict(given)
        leaf = inputs["log_probs"] = inputs["log_probs"].clone().requires_grad_()
        of_batch = values.double() if double else values
        of_batch = fa.SegmentTable(of_batch, table) if kind == "segment" else of_batch
        out = fa.policy_loss(**inputs, advantages=of_batch, config=config, reduction="none", backend=backend)
        out.loss.sum().backward()
        return out.loss.detach().double(), leaf.grad

    (losses, gradient), (exact, exact_gradient) = computed("cuda", False), computed("reference", True)
    assert gradient.dtype == dtype
    torch.testing.assert_close(losses, exact, rtol=1e-5, atol=1e-5)
    eps = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(
        gradient.double(), exact_gradient, rtol=eps, atol=1e-5 * float(exact_gradient.abs().max())
    )


EDGES = [(), (0,), (0, 0), (1,), (BLOCK - 1,), (BLOCK,), (BLOCK + 1,), (2 * BLOCK + 1,), (1,) * 40, (0, BLOCK, 0, 3, 0)]


@pytest.mark.parametrize("name", ["ppo", "ppo, rows", "ppo, segments", "gspo, mean, k1, geometric"])
def test_edge_shapes(name: str, poisoned_memory: None) -> None:
    case = CASES[name]
    for lengths in EDGES:
        inputs = case.make(Shape(lengths=lengths, density=1.0).draw())
        assert_close(case, inputs, run(case, inputs))
    all_masked = case.make(Shape(lengths=(600, 3), density=0.0).draw())
    for key, value in run(case, all_masked).items():
        assert not value.any(), key


@pytest.mark.parametrize("config", [PPO.but(dual_clip=1.5), PPO.but(kl=fa.KL("k2"))], ids=["plain", "extended"])
def test_all_sums(config: fa.LossConfig, poisoned_memory: None) -> None:
    inputs = CASES["ppo"].make(PACKED.draw())
    given = KernelInputs(*[None] * 15)._replace(
        mask=inputs["mask"],
        cu_seqlens=inputs["cu_seqlens"],
        advantages=inputs["advantages"],
        old_log_probs=inputs["old_log_probs"],
        ref_log_probs=inputs["old_log_probs"] if config.kl else None,
    )
    formula = Formula(*map(float, Formula.of(config, 0)))
    ours, theirs = (torch.empty(13, dtype=torch.float64) for _ in range(2))
    loss = torch.empty(())
    assert POLICY_LOSS("cuda", inputs["log_probs"], None, given, formula, None, None, loss, ours) == 0
    assert POLICY_LOSS("cpu", inputs["log_probs"], None, given, Formula.of(config, 0), None, None, None, theirs) == 0
    names = ("clipped", "bounded", "saturated", "tokens", "is_weight", "rejected", "capped", "missing")
    counts = [SUMS.index(name) for name in names]
    assert torch.equal(ours[counts], theirs[counts])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert loss == ours[0].float()


def test_inputs_of_different_dtypes_are_computed_in_float32() -> None:
    case = CASES["ppo"]
    inputs = case.make(PACKED.draw())
    inputs["log_probs"] = inputs["log_probs"].bfloat16()
    inputs = settled(PPO, inputs)
    outputs = run(case, inputs)
    exact = case.run("reference", {k: float64(v) for k, v in inputs.items()})
    assert outputs["gradient"].dtype == torch.bfloat16
    torch.testing.assert_close(outputs["gradient"].double(), exact["gradient"].double(), rtol=2**-8, atol=1e-30)
    torch.testing.assert_close(outputs["loss"].double(), exact["loss"].double(), rtol=2e-6, atol=2e-6)


def test_gradients_of_any_stride() -> None:
    log_probs, advantages = torch.zeros(48), torch.arange(48.0)
    given = KernelInputs(log_probs, torch.ones(48), torch.tensor([0, 48]), advantages, *[None] * 7)
    formula = Formula.of(fa.LossConfig("reinforce"), 0)
    for gradient in (torch.zeros(96)[::2], torch.zeros(49)[1:], torch.zeros(48), torch.zeros(48, 3).bfloat16()[:, 1]):
        sums = torch.empty(len(SUMS), dtype=torch.float64)
        assert POLICY_LOSS("cuda", log_probs, None, given, formula, gradient, None, None, sums) == 0
        assert torch.equal(gradient.float(), -advantages)


# ---- what must not matter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_FORM)
def test_orders_of_threads_and_blocks_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    inputs = case.make(PACKED.draw())
    plain = run(case, inputs)
    for order in ORDERS:
        monkeypatch.setenv("CUDA_EMULATION_ORDER", order)
        same_bits(run(case, inputs), plain)


@pytest.mark.parametrize("name", ["ppo", "ppo, segments", "gspo, mean, k1, geometric"])
def test_blocks_of_several_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in another order; each token's gradient to the bit."""
    case = CASES[name]
    inputs = case.make(PACKED.draw())
    plain = run(case, inputs)
    monkeypatch.setattr(kernel, "BLOCKS", 1)
    outputs = run(case, inputs)
    assert torch.equal(outputs["gradient"], plain["gradient"])
    assert outputs["tokens"] == plain["tokens"]
    assert_close(case, inputs, outputs)


@pytest.mark.parametrize("name", BY_FORM)
def test_alignment_and_strides_do_not_matter(name: str) -> None:
    case = CASES[name]
    inputs = case.make(PADDED.draw())
    plain = run(case, inputs)
    by_column = {k: v.T.contiguous().T if isinstance(v, Tensor) and v.dim() == 2 else v for k, v in inputs.items()}

    def off_by_one(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return torch.cat([value.reshape(-1)[:1], value.reshape(-1)])[1:].view(value.shape)

    same_bits(run(case, by_column), plain)
    same_bits(run(case, {k: off_by_one(v) for k, v in inputs.items()}), plain)


@pytest.mark.parametrize("name", ["ppo", "ppo, rows", "sapo", "gspo, tokens", "ppo, icepop, k3", "gspo, mean"])
def test_masked_values_never_enter_arithmetic(name: str) -> None:
    case = CASES[name]
    inputs = case.make(Shape(lengths=(7, 1, 0, 1540, 19)).draw())
    clean = run(case, inputs)
    for garbage in GARBAGE:
        dirty = dict(inputs)
        for key in case.token_inputs:
            dirty[key] = where_masked(case.counts(inputs, key), inputs[key], garbage)
        for key in case.row_inputs:
            dirty[key] = torch.where(case.silent(inputs), garbage, inputs[key])
        same_bits(run(case, dirty), clean)


def test_masked_tokens_of_a_rollout_beyond_its_bounds_are_not_counted() -> None:
    """A rollout's ratio is that of its masked tokens too."""
    log_probs = -torch.rand(2, 40)
    mask = torch.arange(40) % 4 < torch.tensor([[1], [3]])
    config = fa.LossConfig("gspo", delta=2.0, log_ratio_bound=10.0)
    for old, name in ((log_probs - 3, "dual_clip_fraction"), (log_probs - 15, "saturated_fraction")):
        metrics = fa.policy_loss(log_probs, old, -torch.ones(2), mask, config=config, backend="cuda").metrics
        right = fa.policy_loss(log_probs, old, -torch.ones(2), mask, config=config, backend="reference").metrics
        torch.testing.assert_close(metrics[name], right[name])
        assert right["tokens"] == 40


def test_types_of_turn_ids_and_masks() -> None:
    case = CASES["ppo, segments"]
    inputs = case.make(Shape().draw())
    plain = run(case, inputs)
    ids = inputs["advantages"].segments.turn_ids
    for mask in (inputs["mask"].float() * 3, inputs["mask"].to(torch.int8) * -1, inputs["mask"].double()):
        same_bits(run(case, {**inputs, "mask": mask}), plain)
    same_bits(run(case, {**inputs, "turn_ids": ids.long()}), plain)
    spread = {**inputs, "advantages": fa.segment_tokens(inputs["advantages"], backend="cpu")}
    assert torch.equal(run(case, spread)["gradient"], plain["gradient"])


# ---- what is wrong and nobody waits for ------------------------------------------------------------------------------


@pytest.mark.parametrize("log_ratio", [0.0, 30.0])
def test_a_fraction_in_the_mask_is_nan_there(log_ratio: float) -> None:
    """Also where the ratio is beyond its bound, which would have made the gradient 0."""
    log_probs = torch.full((600,), log_ratio)
    mask = torch.ones(600)
    mask[5], mask[599], mask[3] = 0.5, math.nan, 0.0
    for advantages in (torch.ones(600), torch.ones(1)):
        with fa.checks("off"):
            losses, gradient = losses_and_gradient(log_probs, torch.zeros(600), advantages, mask)
        assert losses.isnan().nonzero().flatten().tolist() == [5, 599]
        assert gradient.isnan().nonzero().flatten().tolist() == [5, 599]
        assert (losses[3], gradient[3]) == (0, 0)


def test_a_turn_that_the_table_lacks_is_nan_where_it_counts() -> None:
    ids = torch.tensor([[0, 1, -1, 0], [0, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)
    table = fa.SegmentTable(torch.tensor([2.0, 3.0, 4.0, 5.0]), fa.segments(ids, backend="cpu"))
    log_probs, mask = torch.zeros(3, 4), torch.ones(3, 4)
    mask[1, 1] = 0
    for kind, none in ((torch.int32, 2**31 - 1), (torch.int64, 2**32)):  # 2^32 is no turn 0
        wrong = ids.to(kind)
        wrong[0, 1], wrong[0, 3], wrong[1, 1], wrong[2, 0] = 7, none, 7, 7
        losses, gradient = losses_and_gradient(
            log_probs, log_probs, table, mask, turn_ids=wrong, weights=torch.tensor([1.0, 1.0, 0.0])
        )
        expected = torch.tensor([[-2, math.nan, 0, math.nan], [-4, 0, -4, -4], [0, 0, 0, 0]])
        torch.testing.assert_close(losses, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0, equal_nan=True)


def test_weights_that_are_0_or_no_number() -> None:
    """A row of weight 0 or -0 is not read, whatever the scale; a row whose scale vanishes in float32 is."""
    log_probs = torch.tensor([[1.0, 2.0], [math.nan, 1.0], [math.nan, 1.0], [3.0, 4.0], [5.0, 6.0]])
    weights = torch.tensor([1.0, 0.0, -0.0, -1e-300, 1.0], dtype=torch.float64)
    options = {
        "config": fa.LossConfig("reinforce", loss_agg_mode="token-sum"), "weights": weights, "backend": "cuda",
    }  # fmt: skip
    given = (None, -torch.ones(5), torch.ones(5, 2))
    out = fa.policy_loss(log_probs, *given, **options)
    assert (float(out.loss), float(out.metrics["tokens"])) == (14, 6)
    weights[3] = math.nan
    assert fa.policy_loss(log_probs, *given, **options).loss.isnan()
    mask = torch.ones(5, 2)
    mask[3] = 0
    assert float(fa.policy_loss(log_probs, None, -torch.ones(5), mask, **options).loss) == 14


# ---- the gradient's factor, launches, the counter --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_factor(dtype: torch.dtype) -> None:
    gradient = torch.arange(5000).to(dtype)
    before = gradient.clone()
    SCALE_GRADIENT("cuda", gradient, torch.tensor(1.0))
    assert torch.equal(gradient, before)
    SCALE_GRADIENT("cuda", gradient, torch.tensor(0.5))
    assert torch.equal(gradient, before * 0.5)
    SCALE_GRADIENT("cuda", gradient[1:], torch.tensor(2.0, dtype=torch.float64))
    assert torch.equal(gradient[1:], before[1:])
    SCALE_GRADIENT("cuda", gradient, torch.tensor(math.nan))
    assert gradient.isnan().all()
    SCALE_GRADIENT("cuda", gradient[:0], torch.tensor(2.0))


class Recorded:
    """The extension, and which of its functions were called: each launches one kernel."""

    def __init__(self, module: Any) -> None:
        self.module, self.calls = module, []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.module, name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ppo", ["policy_loss"]),
        ("ppo, icepop, k3", ["policy_loss"]),
        ("ppo, rows", ["policy_loss"]),
        ("gspo", ["sequence_log_ratios", "policy_loss"]),
        ("gspo, mean", ["sequence_log_ratios", "policy_loss", "share_gradients"]),
    ],
)
def test_launches(name: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(cuda.module())
    monkeypatch.setattr(cuda, "module", lambda: recorded)
    inputs = CASES[name].make(Shape(lengths=(5, 0, 3)).draw())
    inputs["log_probs"].requires_grad_()
    loss = CASES[name].call("cuda", **inputs)["loss"]
    ignored = ("device_type", "token_counts")
    assert [call for call in recorded.calls if call not in ignored] == expected
    recorded.calls.clear()
    loss.backward()
    assert recorded.calls == ["scale_gradient"]


NO_LAUNCH = re.compile("empty|view|select|unbind|as_strided|expand|reshape|alias|detach|resolve|lift|slice|^aten::to$")


def of_pytorch(call: Callable[[], object]) -> list[str]:
    """PyTorch's own operations that would be launches on a GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    names = [event.name for event in profile.events() if event.name.startswith("aten::")]
    return [name for name in names if not NO_LAUNCH.search(name)]


@pytest.mark.parametrize("name", ["ppo", "ppo, rows", "ppo, segments", "ppo, icepop, k3"])
def test_pytorch_launches_nothing_beside_the_kernel(name: str) -> None:
    """Given the denominator, of metrics and of the backward too; else the counts of rollouts are added up."""
    inputs = CASES[name].make(Shape(lengths=(5, 0, 3)).draw())
    leaf, ones = inputs["log_probs"].requires_grad_(), torch.ones(())
    if "weights" in inputs:
        inputs["weights"] = inputs["weights"].double()  # of rollouts: in any other dtype they are converted

    def loss_and_gradient(**denominator: Any) -> None:
        torch.autograd.grad(CASES[name].call("cuda", **inputs, **denominator)["loss"], leaf, ones)

    with fa.checks("off"):  # values of a GPU's tensors are not looked at
        loss_and_gradient()  # the stream's counter is made
        for divisor in (torch.tensor(8.0, dtype=torch.float64), 8.0):
            assert of_pytorch(lambda d=divisor: loss_and_gradient(denominator=d)) == []
        assert of_pytorch(loss_and_gradient).count("aten::sum") == 1


class Nothing(torch.autograd.Function):
    """Through which no gradient flows back, not even zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def test_a_backward_makes_nothing_for_the_sums() -> None:
    """Zeros in their place would be a launch; where nothing flows back, nothing is launched at all."""
    inputs = CASES["ppo"].make(PACKED.draw())
    leaf = inputs["log_probs"].clone().requires_grad_()
    losses = [CASES["ppo"].call("cuda", **{**inputs, "log_probs": leaf})["loss"] for _ in range(2)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        losses[0].backward()
    assert not {event.key for event in profile.key_averages()} & {"aten::zeros", "aten::zero_", "aten::new_zeros"}
    Nothing.apply(losses[1]).backward()  # type: ignore[no-untyped-call]


def test_the_counter_is_left_as_it_was_found() -> None:
    case = CASES["ppo"]
    run(case, case.make(PACKED.draw()))
    assert cuda.counter(torch.zeros(1), 0).tolist() == [0]


def test_streams_and_graphs_do_not_share_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    t, capturing = torch.zeros(1), False
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: capturing)
    eager = [cuda.counter(t, stream) for stream in (0, 1, 2)]
    assert len({c.data_ptr() for c in eager}) == 3
    assert cuda.counter(t, 1) is eager[1]
    capturing = True
    captured = [cuda.counter(t, 1) for _ in range(2)]
    assert len({c.data_ptr() for c in (*eager, *captured)}) == 5


def test_a_counter_is_in_no_memory_pool_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools are a thread's, and what torch.compile's CUDA graphs allocate while they warm up is given away again."""
    threads, plain = [], torch.zeros
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: threads.append(threading.get_ident()) or plain(*a, **k))
    assert cuda.counter(torch.zeros(1), 77).tolist() == [0]
    assert [thread == threading.get_ident() for thread in threads] == [True, False]
