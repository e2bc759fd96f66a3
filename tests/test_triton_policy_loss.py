"""The policy loss's Triton kernels, in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from draws import GARBAGE, Case, Inputs, Outputs, Shape, float64, where_masked
from fastadv.triton_kernels import _launch, _shared_gradients
from fastadv.triton_kernels import policy_loss as kernels
from loss_cases import LOSS_CASES, PPO
from torch import Tensor

import fastadv as fa
from fastadv.ops._policy_loss_kernel import POLICY_LOSS, SCALE_GRADIENT, SUMS, Formula
from fastadv.ops._policy_loss_kernel import Inputs as KernelInputs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, where a value is inf or NaN

BLOCK = 512  # tokens of a block of float32; of 16 bits it has twice as many
CASES = {case.name.removeprefix("policy_loss[").removesuffix("]"): case for case in LOSS_CASES}
# Three blocks: in one row, in several, and not full.
PACKED = Shape(lengths=(600, 0, 1, 3, 513, 40, 200, 0), seed=3)
PADDED = Shape(lengths=(333, 332, 0, 5), padded=True, seed=4)
BY_FORM = ("ppo", "ppo, rows", "ppo, segments", "gspo", "gspo, mean, k1, geometric", "sapo")
ONES = fa.LossConfig(
    "reinforce", loss_agg_mode="token-sum"
)  # with log-probs of 1 a token's loss is minus its advantage


def run(case: Case, inputs: Inputs, backend: str = "triton") -> Outputs:
    return case.run(backend, inputs)


def oracle(case: Case, inputs: Inputs) -> Outputs:
    return case.run("reference", {name: float64(value) for name, value in inputs.items()})


def assert_close(case: Case, inputs: Inputs, outputs: Outputs) -> None:
    """Each gradient and token loss by itself; sums and means relative to what they are made of."""
    exact = oracle(case, inputs)
    assert outputs.keys() == exact.keys()
    terms = case.magnitude(inputs) if case.magnitude is not None else 0.0
    allowed = {"loss": terms, "policy_loss": 10 * terms, "approx_kl": 1.0, "kl": 1.0, "is_weight_mean": 1.0}
    for name, value in exact.items():
        largest = float(value.abs().max()) if value.numel() else 0.0
        atol = case.tolerance * max(allowed.get(name, 0.0), largest / 10) + 1e-30
        torch.testing.assert_close(
            outputs[name].double(), value.double(), rtol=case.tolerance, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def same_bits(a: Outputs, b: Outputs) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def losses_and_gradient(log_probs: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = log_probs.clone().requires_grad_()
    losses = fa.policy_loss(leaf, *given, reduction="none", backend="triton", **options).loss
    losses.sum().backward()
    return losses.detach(), leaf.grad


# ---- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_float64_reference(name: str, shape: Shape, poisoned_memory: None) -> None:
    """Whatever is not written is NaN, and inputs are not written."""
    case = CASES[name]
    inputs = case.make(shape.draw())
    before = {key: value.clone() if isinstance(value, Tensor) else value for key, value in inputs.items()}
    assert_close(case, inputs, run(case, inputs))
    for key, value in inputs.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, before[key], rtol=0, atol=0, equal_nan=True)


EDGES = [(), (0,), (0, 0), (1,), (BLOCK - 1,), (BLOCK,), (BLOCK + 1,), (1,) * 12, (0, BLOCK, 0, BLOCK, 0)]


@pytest.mark.parametrize("name", ["ppo", "ppo, rows", "ppo, segments", "gspo, mean, k1, geometric"])
def test_edge_shapes(name: str) -> None:
    case = CASES[name]
    for lengths in EDGES:
        inputs = case.make(Shape(lengths=lengths, density=1.0).draw())
        assert_close(case, inputs, run(case, inputs))
    all_masked = case.make(Shape(lengths=(600, 3), density=0.0).draw())
    for key, value in run(case, all_masked).items():
        assert not value.any(), key


def test_padded_rows_without_a_column() -> None:
    for name in BY_FORM:
        inputs = CASES[name].make(Shape(lengths=(0, 0), padded=True).draw())
        outputs = run(CASES[name], inputs)
        assert float(outputs["loss"]) == 0
        assert outputs["gradient"].shape == (2, 0)


@pytest.mark.parametrize("name", ["ppo", "ppo, segments", "gspo, mean, k1, geometric"])
def test_programs_of_several_blocks(name: str, monkeypatch: Any) -> None:
    """Sums in another order; each token's gradient to the bit. Twice the same programs give the same bits."""
    case = CASES[name]
    inputs = case.make(PACKED.draw())
    plain = run(case, inputs)
    same_bits(run(case, inputs), plain)
    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    monkeypatch.setattr(kernels, "STEPS", 2)  # three blocks: of two, and of one
    outputs = run(case, inputs)
    assert torch.equal(outputs["gradient"], plain["gradient"])
    assert outputs["tokens"] == plain["tokens"]
    assert_close(case, inputs, outputs)


def test_packed_and_padded_tokens_have_the_same_gradients() -> None:
    lengths = (333, 1, 0, 200)
    inputs = CASES["ppo, rows"].make(Shape(lengths=lengths, padded=True).draw())
    inside = torch.arange(333) < torch.tensor(lengths)[:, None]
    packed = {name: t[inside] if t is not None and t.dim() == 2 else t for name, t in inputs.items()}
    packed["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    outputs, expected = run(CASES["ppo, rows"], packed), run(CASES["ppo, rows"], inputs)
    assert torch.equal(outputs["gradient"], expected["gradient"][inside])


@pytest.mark.parametrize("name", ["ppo", "ppo, rows", "ppo, segments", "ppo, none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs = case.make(Shape(lengths=(1100, 0, 1, 3, 513, 40, 600, 0), seed=3).draw())
    low = {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() and v.dim() and v.numel() > 8 else v
        for k, v in inputs.items()
    }
    low = case.settle(low) if case.settle else low
    outputs, exact = run(case, low), oracle(case, low)
    assert outputs["gradient"].dtype == dtype
    # The interpreter cuts what it writes as bfloat16, a GPU rounds it: a unit in the last place.
    of = torch.finfo(dtype)
    torch.testing.assert_close(
        outputs["gradient"], exact["gradient"].to(dtype), rtol=1.01 * of.eps, atol=of.smallest_normal
    )
    torch.testing.assert_close(outputs["loss"].double(), exact["loss"].double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tokens_have_the_bits_of_float32(dtype: torch.dtype) -> None:
    """Also where a thread's eight tokens are not all there, or not in one row."""
    for lengths in [(5,), (2 * BLOCK + 1,), (BLOCK, 0, BLOCK)]:
        count, rows = sum(lengths), len(lengths)
        low = [torch.randn(count).to(dtype) for _ in range(3)]
        mask, cu_seqlens = torch.rand(count) < 0.9, torch.tensor([0, *lengths]).cumsum(0)
        for advantages in (low[2], torch.randn(rows)):
            of_tokens = advantages.float() if advantages.numel() == count else advantages
            options = {"config": PPO.but(dual_clip=3.0), "cu_seqlens": cu_seqlens}
            losses, gradient = losses_and_gradient(low[0], low[1], advantages, mask, **options)
            expected, exact = losses_and_gradient(low[0].float(), low[1].float(), of_tokens, mask, **options)
            assert torch.equal(losses, expected)
            # The interpreter cuts what it writes as bfloat16, a GPU rounds it.
            torch.testing.assert_close(gradient.float(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_inputs_of_different_dtypes_are_computed_in_float32() -> None:
    inputs = CASES["ppo"].make(PACKED.draw())
    inputs["log_probs"] = inputs["log_probs"].bfloat16()
    inputs = CASES["ppo"].settle(inputs)
    outputs, exact = run(CASES["ppo"], inputs), oracle(CASES["ppo"], inputs)
    assert outputs["gradient"].dtype == torch.bfloat16
    torch.testing.assert_close(outputs["gradient"].double(), exact["gradient"].double(), rtol=2**-8, atol=1e-30)
    torch.testing.assert_close(outputs["loss"].double(), exact["loss"].double(), rtol=2e-6, atol=2e-6)


def test_exp_is_as_exact_as_float32_allows() -> None:
    """-A r with A = -1 and no clip is the ratio itself."""
    log_ratio = torch.linspace(-20, 20, 8_001)
    config = fa.LossConfig("ppo", clip_low=1.0, clip_high=1e30, log_ratio_bound=80.0)
    zeros = torch.zeros_like(log_ratio)
    losses = fa.policy_loss(
        log_ratio, zeros, zeros - 1, zeros == 0, config=config, reduction="none", backend="triton"
    ).loss
    relative = (losses.double() - log_ratio.double().exp()).abs() / log_ratio.double().exp()
    assert float(relative.max()) < 2e-7


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("gradient", ["own", "straight-through", "unbiased"])
def test_penalties_keep_their_digits_where_they_are_small(estimator: str, gradient: str) -> None:
    sizes = torch.cat([torch.logspace(-6, math.log10(45), 150), torch.tensor([0.5, 20.0, 40.0])])
    l = torch.cat([-sizes, torch.zeros(1), sizes])
    if gradient == "unbiased":  # far below 0 its value and its gradient cancel
        l = l[l > -1]
    zeros = torch.zeros_like(l)
    config = PPO.but(kl=fa.KL(estimator, 0.5, gradient), log_ratio_bound=80.0)

    def both(dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor]:
        leaf, none = l.to(dtype, copy=True).requires_grad_(), zeros.to(dtype)
        losses = fa.policy_loss(
            leaf, none, none, none == 0, ref_log_probs=none, config=config, reduction="none", backend=backend
        ).loss
        losses.sum().backward()
        return losses.detach(), leaf.grad

    for value, exact in zip(both(torch.float32, "triton"), both(torch.float64, "reference"), strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=2e-6, atol=1e-30)


def test_infinities_and_nan_stay_visible() -> None:
    inf, nan = math.inf, math.nan
    log_probs = torch.tensor([-inf, -1.0, nan, -1.0, -inf, -1.0])
    old = torch.tensor([-1.0, -inf, -1.0, nan, -inf, -1.0])
    for loss in ("reinforce", "ppo", "cispo", "sapo"):
        config = fa.LossConfig(loss)
        given = (log_probs, old, torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0, -1.0]), torch.ones(6))
        ours, theirs = (
            fa.policy_loss(*given, config=config, reduction="none", backend=backend).loss
            for backend in ("triton", "cpu")
        )
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0, equal_nan=True)


def test_a_rejecting_importance_weight_hides_a_nan() -> None:
    for is_weights in (torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1.0, -0.0, 2.0])):
        losses, gradient = losses_and_gradient(
            torch.tensor([0.0, math.nan, 0.0]), torch.zeros(3), torch.ones(3), torch.ones(3), is_weights=is_weights
        )
        assert losses.tolist() == gradient.tolist() == [-1.0, 0.0, -2.0]


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
    ours, theirs = torch.empty(13, dtype=torch.float64), torch.empty(13, dtype=torch.float64)
    for backend, sums in (("triton", ours), ("cpu", theirs)):
        formula = Formula.of(config, 0)
        assert POLICY_LOSS(backend, inputs["log_probs"], None, given, formula, None, None, None, sums) == 0
    counts = [
        SUMS.index(name) for name in ("clipped", "bounded", "saturated", "tokens", "rejected", "capped", "missing")
    ]
    assert torch.equal(ours[counts], theirs[counts])
    others = [i for i in range(13) if i not in counts and SUMS[i] != "is_weight"]  # the CPU's is 0 without weights
    torch.testing.assert_close(ours[others], theirs[others], rtol=1e-5, atol=1e-5)


# ---- what must not matter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo", "ppo, rows", "sapo", "gspo, tokens", "ppo, icepop, k3", "gspo, mean"])
def test_masked_values_never_enter_arithmetic(name: str) -> None:
    case = CASES[name]
    inputs = case.make(Shape(lengths=(7, 1, 0, 540, 19)).draw())
    clean = run(case, inputs)
    for garbage in GARBAGE[:2]:
        dirty = dict(inputs)
        for key in case.token_inputs:
            dirty[key] = where_masked(case.counts(inputs, key), inputs[key], garbage)
        for key in case.row_inputs:
            dirty[key] = torch.where(case.silent(inputs), garbage, inputs[key])
        same_bits(run(case, dirty), clean)


@pytest.mark.parametrize("name", ["ppo", "ppo, icepop, k3", "gspo, mean, k1, geometric"])
def test_strides_do_not_matter(name: str) -> None:
    case = CASES[name]
    inputs = case.make(Shape(padded=True).draw())
    plain = run(case, inputs)
    strided = {
        k: v.T.contiguous().T if isinstance(v, Tensor) and v.dim() == 2 else v for k, v in inputs.items()
    }  # columns lie together
    shifted = {k: torch.cat([v[:1], v])[1:] if isinstance(v, Tensor) and v.dim() else v for k, v in inputs.items()}
    same_bits(run(case, strided), plain)
    same_bits(run(case, shifted), plain)


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
    mask[5], mask[590], mask[3] = 0.5, math.nan, 0.0
    for advantages in (torch.ones(600), torch.ones(1)):
        with fa.checks("off"):
            losses, gradient = losses_and_gradient(log_probs, torch.zeros(600), advantages, mask)
        assert losses.isnan().nonzero().flatten().tolist() == [5, 590]
        assert gradient.isnan().nonzero().flatten().tolist() == [5, 590]
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
        nan = math.nan
        expected = torch.tensor([[-2, nan, 0, nan], [-4, 0, -4, -4], [0, 0, 0, 0]])
        torch.testing.assert_close(losses, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0, equal_nan=True)


def test_weights_that_are_0_or_no_number() -> None:
    """A row of weight 0 or -0 is not read, whatever the scale; a row whose scale vanishes in float32 is."""
    log_probs = torch.tensor([[1.0, 2.0], [math.nan, 1.0], [math.nan, 1.0], [3.0, 4.0], [5.0, 6.0]])
    weights = torch.tensor([1.0, 0.0, -0.0, -1e-300, 1.0], dtype=torch.float64)
    given = (None, -torch.ones(5), torch.ones(5, 2))
    options = {"config": ONES, "weights": weights, "backend": "triton"}
    out = fa.policy_loss(log_probs, *given, **options)
    assert (float(out.loss), float(out.metrics["tokens"])) == (14, 6)
    weights[3] = math.nan
    out = fa.policy_loss(log_probs, *given, **options)
    assert out.loss.isnan()
    assert out.metrics["tokens"] == 6
    mask = torch.ones(5, 2)
    mask[3] = 0
    assert float(fa.policy_loss(log_probs, None, -torch.ones(5), mask, **options).loss) == 14


# ---- the gradient's factor -------------------------------------------------------------------------------------------


class Traffic:
    """Bytes that kernels read and write, as the interpreter sees them."""

    read = written = 0


@pytest.fixture
def traffic(monkeypatch: Any) -> Traffic:
    from triton.runtime.interpreter import InterpreterBuilder

    seen = Traffic()
    plain_load, plain_store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        value = plain_load(self, pointers, mask, *rest)
        seen.read += int(mask.data.sum()) * value.data.itemsize
        return value

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        seen.written += int(mask.data.sum()) * value.data.itemsize
        return plain_store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", store)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_factor_of_1_moves_nothing(dtype: torch.dtype, traffic: Traffic) -> None:
    gradient = torch.arange(5000).to(dtype)
    before = gradient.clone()
    assert SCALE_GRADIENT("triton", gradient, torch.tensor(1.0)) == 0
    assert torch.equal(gradient, before)
    assert (traffic.read, traffic.written) == (3 * 4, 0)  # three programs look at the factor
    SCALE_GRADIENT("triton", gradient, torch.tensor(0.5))
    assert torch.equal(gradient, before * 0.5)
    SCALE_GRADIENT("triton", gradient, torch.tensor(math.nan))
    assert gradient.isnan().all()
    SCALE_GRADIENT("triton", gradient[:0], torch.tensor(2.0))


def test_upstream_gradients() -> None:
    inputs = CASES["cispo, entropy, k2"].make(Shape().draw())
    for factor in (1.0, 3.0):
        for backend in ("triton", "cpu"):
            leaves = {name: inputs[name].clone().requires_grad_() for name in ("log_probs", "entropy")}
            config = fa.LossConfig("cispo", kl=fa.KL("k2"), entropy_coef=0.01)
            loss = fa.policy_loss(**{**inputs, **leaves}, config=config, backend=backend).loss
            (factor * loss).backward(retain_graph=True)
            once = {name: leaf.grad.clone() for name, leaf in leaves.items()}
            (factor * loss).backward()
            for name, leaf in leaves.items():
                assert torch.equal(leaf.grad, 2 * once[name])
            if backend == "triton":
                ours = once
        for name, value in once.items():
            torch.testing.assert_close(ours[name], value, rtol=2e-6, atol=1e-12)


# ---- what it costs, and what is compiled -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bytes_moved(dtype: torch.dtype, traffic: Traffic) -> None:
    """Beside the tokens: a scale a program, and its 6 sums, which are read once, the tokens by each of the 13 columns,
    and written as 13 sums and means."""
    tokens = 3000
    leaf = torch.zeros(tokens, dtype=dtype, requires_grad=True)
    fa.policy_loss(
        leaf, leaf.detach(), torch.ones(tokens, dtype=dtype), torch.ones(tokens, dtype=torch.bool),
        denominator=torch.tensor(1.0), backend="triton",
    )  # fmt: skip
    programs = -(-tokens * dtype.itemsize // (BLOCK * 4))
    sums = programs * 8 + programs * 6 * 4 + programs * (7 + 13) * 4 + 13 * 12
    size, written = dtype.itemsize, 2 if dtype == torch.bfloat16 else 4
    assert traffic.read + traffic.written == kernels.bytes_moved(tokens, size=size, written=written) + sums


def test_optional_inputs_are_read_once(traffic: Traffic) -> None:
    case = CASES["sapo"]
    inputs = case.make(Shape(lengths=(2048,)).draw())  # full blocks, in one row: the others look rows up
    case.call("triton", **{**inputs, "log_probs": inputs["log_probs"].clone().requires_grad_()})
    least = kernels.bytes_moved(2048, reads=6)  # log-probs, old, advantages, weights, reference, entropy
    assert least <= traffic.read + traffic.written < 1.15 * least


@pytest.fixture
def launches(monkeypatch: Any) -> list[_launch.Configuration]:
    """What launches ask for; those without programs ask for nothing."""
    seen: list[_launch.Configuration] = []
    plain = _launch.launch

    def launch(kernel: Any, grid: tuple[int, ...], *rest: Any, **options: Any) -> None:
        before = len(seen)
        plain(kernel, grid, *rest, **options)
        if 0 in grid:
            del seen[before:]

    for module in (kernels, _shared_gradients):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(_launch, "launched", seen.append)
    return seen


def comparable(configurations: Iterator[_launch.Configuration] | list[_launch.Configuration]) -> set[Any]:
    return {
        (c.name, frozenset(c.signature), frozenset(c.constants), c.num_warps, c.num_stages, c.fp_fusion, c.registers)
        for c in configurations
    }


def test_what_a_launch_asks_for_is_compiled_ahead(launches: list[_launch.Configuration]) -> None:
    compiled = comparable(kernels.configurations())
    assert len(compiled) == len(list(kernels.configurations())) < 100
    for name, case in CASES.items():
        inputs = case.make(Shape(lengths=(5, 0, 3)).draw())
        run(case, inputs)
        for dtype in (torch.bfloat16, torch.float16) if name in (*BY_FORM[:4], "cispo") else ():
            run(case, {**inputs, **{k: v.to(dtype) for k, v in inputs.items() if k in case.token_inputs}})
    names = {c[0] for c in compiled}
    assert names <= {c.name for c in launches}
    assert comparable([c for c in launches if c.name in names]) <= compiled


LAUNCHES = {
    "ppo": ["policy_loss_kernel", "finish_sums_kernel"],
    "ppo, icepop, k3": ["policy_loss_kernel", "finish_sums_kernel"],
    "ppo, rows": ["row_scales_kernel", "policy_loss_kernel", "finish_sums_kernel"],
    "gspo, mean": [
        "row_scales_kernel", "policy_loss_kernel", "finish_sums_kernel", "row_shares_kernel", "share_gradients_kernel",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches(name: str, launches: list[_launch.Configuration]) -> None:
    inputs = CASES[name].make(Shape(lengths=(5, 0, 3)).draw())
    inputs["log_probs"].requires_grad_()
    CASES[name].call("triton", **inputs)
    assert [c.name for c in launches if c.name in {c.name for c in kernels.configurations()}] == LAUNCHES[name]
