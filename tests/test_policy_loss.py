"""Policy losses: the rules at edges, aggregation, denominators, weights and precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_cases import BACKENDS, NATIVE
from torch import Tensor

import fastadv as fa

ON = pytest.mark.parametrize("backend", BACKENDS)


def per_token(config: fa.LossConfig, log_ratio: Tensor, advantages: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    old = torch.full_like(log_ratio, -2.0)
    log_probs = (old + log_ratio).requires_grad_()
    out = fa.policy_loss(
        log_probs, old, advantages, torch.ones_like(log_ratio), config=config, reduction="none", backend=backend
    )
    out.loss.sum().backward()
    return out.loss.detach(), log_probs.grad


@ON
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-0.7, -1e-3, 0.0, 1e-3, 0.4, 1.1])
def test_ties_go_to_the_branch_that_is_not_clipped(log_ratio: float, advantage: float, backend: str) -> None:
    """Exactly on an edge the gradient is the full one; the edges are put where this backend's own ratio is."""
    given = (torch.tensor([log_ratio]), torch.tensor([advantage]), backend)
    free = fa.LossConfig("ppo", 1.0, 9.0)
    ratio = abs(float(per_token(free, *given)[0]))
    edges = {"clip_low": max(0.0, 1 - ratio), "clip_high": max(0.0, ratio - 1)}  # exact in float64
    for config in (fa.LossConfig("ppo", **edges), free.but(dual_clip=ratio) if ratio > 1 else free):
        loss, gradient = per_token(config, *given)
        assert float(loss) == -advantage * ratio
        assert float(gradient) == -advantage * ratio


@ON
def test_the_log_ratio_is_bounded_before_exp(backend: str) -> None:
    log_ratio = torch.tensor([200.0, -200.0, 200.0, 19.0, 21.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    loss, gradient = per_token(fa.LossConfig(), log_ratio, advantages, backend)
    expected = [-1.2, -math.exp(-20), math.exp(20), math.exp(19), math.exp(20)]
    torch.testing.assert_close(loss, torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, torch.tensor([0, 0, 0, math.exp(19), 0]), rtol=1e-5, atol=0)
    out = fa.policy_loss(log_ratio, torch.zeros(5), advantages, torch.ones(5), backend=backend)
    assert out.metrics["saturated_fraction"] == pytest.approx(4 / 5)


@pytest.mark.parametrize("backend", NATIVE)
def test_exp_is_as_exact_as_float32_allows(backend: str) -> None:
    """Through the loss of reinforce-like ppo: -A r with A = -1 and no clip is the ratio itself."""
    log_ratio = torch.linspace(-20, 20, 400_001)
    config = fa.LossConfig("ppo", clip_low=1.0, clip_high=1e30, log_ratio_bound=80.0)
    zeros = torch.zeros_like(log_ratio)
    out = fa.policy_loss(log_ratio, zeros, zeros - 1, zeros + 1, config=config, reduction="none", backend=backend)
    relative = (out.loss.double() - log_ratio.double().exp()).abs() / log_ratio.double().exp()
    assert float(relative.max()) < 2e-7


# ---- aggregation -----------------------------------------------------------------------------------------------------

LOSSES = torch.tensor([[1.0, 2.0, 3.0, 0.0], [4.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
VALID = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
AGGREGATED = [
    ("token-mean", {}, 10 / 4),
    ("token-sum", {}, 10.0),
    ("seq-mean-token-sum", {}, 10 / 2),
    ("seq-mean-token-mean", {}, (2 + 4) / 2),
    ("seq-mean-token-sum-norm", {"horizon": 5.0}, 10 / (2 * 5)),
    ("seq-mean-token-sum", {"denominator": "candidates"}, 10 / 3),  # TRL counts empty rows, verl does not
    ("seq-mean-token-mean", {"denominator": "candidates"}, 6 / 3),
    ("token-mean", {"denominator": "one"}, 10.0),
    ("seq-mean-token-sum", {"denominator": "tokens"}, 10 / 4),
]


def aggregated(mode: str, options: dict[str, Any], backend: str, **given: Any) -> float:
    config = fa.LossConfig("reinforce", loss_agg_mode=mode, **options)
    return float(fa.policy_loss(LOSSES, None, -torch.ones(3, 4), VALID, config=config, backend=backend, **given).loss)


@ON
@pytest.mark.parametrize(("mode", "options", "expected"), AGGREGATED)
def test_aggregation(mode: str, options: dict[str, Any], expected: float, backend: str) -> None:
    assert aggregated(mode, options, backend) == pytest.approx(expected)
    counted = fa.denominators(VALID, horizon=options.get("horizon"), backend=backend)
    assert aggregated(mode, options, backend, denominator=counted) == pytest.approx(expected)


@ON
def test_denominators_that_are_given(backend: str) -> None:
    assert aggregated("token-mean", {}, backend, denominator=20) == pytest.approx(10 / 20)
    assert aggregated("token-mean", {}, backend, denominator=torch.tensor(0.5)) == pytest.approx(10 / 0.5)
    assert aggregated("seq-mean-token-sum-norm", {"horizon": 5.0}, backend, denominator=4) == pytest.approx(10 / 20)
    step = fa.Denominators(tokens=40.0, sequences=8.0, candidates=16.0, horizon=2.0, ranks=4)
    assert aggregated("token-mean", {}, backend, denominator=step) == pytest.approx(4 * 10 / 40)
    assert aggregated("token-sum", {}, backend, denominator=step) == pytest.approx(4 * 10)
    assert aggregated("seq-mean-token-sum-norm", {}, backend, denominator=step) == pytest.approx(4 * 10 / (8 * 2))
    more = step.with_candidates(32)
    options = {"denominator": "candidates"}
    assert aggregated("seq-mean-token-sum", options, backend, denominator=more) == pytest.approx(4 * 10 / 32)
    with pytest.raises(ValueError, match="candidates is 0"):
        step.with_candidates(0)


@ON
def test_denominators_count_what_is_active(backend: str) -> None:
    d = fa.denominators(VALID.float(), backend=backend)
    assert [float(x) for x in (d.tokens, d.sequences, d.candidates)] == [4, 2, 3]
    assert (d.ranks, d.horizon) == (1, None)
    with pytest.raises(ValueError, match="horizon is -1"):
        fa.denominators(VALID, horizon=-1, backend=backend)


# ---- weights and advantages ------------------------------------------------------------------------------------------


@ON
def test_weights_multiply_numerators_and_never_a_denominator(backend: str) -> None:
    weights = torch.tensor([2.0, 0.0, 5.0])
    assert aggregated("token-mean", {}, backend, weights=weights) == pytest.approx(2 * 6 / 4)
    assert aggregated("seq-mean-token-mean", {}, backend, weights=weights) == pytest.approx(2 * 2 / 2)
    per_token = weights[:, None].expand(3, 4)
    assert aggregated("token-mean", {}, backend, weights=per_token) == pytest.approx(2 * 6 / 4)
    kept = torch.tensor([True, False, True])
    assert aggregated("token-mean", {}, backend, weights=kept) == pytest.approx(6 / 4)
    assert aggregated("token-mean", {}, backend, is_weights=torch.full((3, 4), 0.5)) == pytest.approx(5 / 4)


@ON
def test_an_excluded_rollout_may_hold_anything(backend: str) -> None:
    rubbish = LOSSES.clone()
    rubbish[1] = torch.nan
    leaf = rubbish.requires_grad_()
    advantages = torch.tensor([-1.0, torch.nan, -1.0])
    weights = torch.tensor([1.0, 0.0, 1.0])
    out = fa.policy_loss(leaf, None, advantages, VALID, config="reinforce", weights=weights, backend=backend)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(6 / 4)
    assert float(out.metrics["tokens"]) == 3
    assert leaf.grad[1].abs().sum() == 0


@ON
def test_a_rejecting_importance_weight_hides_a_nan_and_metrics_still_count_the_token(backend: str) -> None:
    log_probs = torch.tensor([-1.0, torch.nan], requires_grad=True)
    old = torch.tensor([-1.5, -1.0])
    out = fa.policy_loss(
        log_probs, old, torch.ones(2), torch.ones(2), is_weights=torch.tensor([1.0, 0.0]), backend=backend
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-1.2 / 2)
    assert log_probs.grad.tolist() == [0.0, 0.0]
    assert float(out.metrics["tokens"]) == 2
    assert out.metrics["approx_kl"].isnan()


@ON
def test_every_form_of_advantages_agrees(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(90, generator=generator) < 0.7
    cu_seqlens = torch.tensor([0, 30, 30, 71, 90])
    log_probs, old = -torch.rand(90, generator=generator), -torch.rand(90, generator=generator)
    index = fa.segments(fa.turn_ids_from_mask(mask, cu_seqlens), cu_seqlens)
    table = fa.SegmentTable(torch.randn(index.count, generator=generator), index)
    per_rollout = torch.randn(4, generator=generator)

    def gradient(advantages: Any, **given: Any) -> Tensor:
        leaf = log_probs.clone().requires_grad_()
        fa.policy_loss(leaf, old, advantages, mask, cu_seqlens=cu_seqlens, backend=backend, **given).loss.backward()
        return leaf.grad

    assert torch.equal(gradient(table), gradient(fa.segment_tokens(table)))
    assert torch.equal(gradient(table, turn_ids=index), gradient(table))
    assert torch.equal(gradient(table, turn_ids=index.turn_ids.long()), gradient(table))
    assert torch.equal(gradient(per_rollout), gradient(per_rollout.repeat_interleave(cu_seqlens.diff())))
    constant = fa.SegmentTable(per_rollout.repeat_interleave(index.turns()), index)
    assert torch.equal(gradient(constant), gradient(per_rollout))


@ON
def test_a_token_outside_of_turns_has_advantage_zero_and_still_counts(backend: str) -> None:
    turn_ids = torch.tensor([0, 0, -1, 1])
    table = fa.SegmentTable(torch.tensor([-1.0, -2.0]), fa.segments(turn_ids))
    log_probs = torch.tensor([1.0, 1.0, 1.0, 1.0])
    out = fa.policy_loss(log_probs, None, table, torch.ones(4), config="reinforce", backend=backend)
    assert float(out.loss) == pytest.approx((1 + 1 + 0 + 2) / 4)


@ON
def test_any_dtype_of_mask(backend: str) -> None:
    log_probs, old, advantages = (torch.linspace(a, 1, 5) for a in (0.0, 0.5, -1.0))
    counts = torch.tensor([1, 0, 1, 1, 0])
    plain = fa.policy_loss(log_probs, old, advantages, counts.bool(), backend=backend).loss
    integers = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype in (*integers, *floats):
        assert fa.policy_loss(log_probs, old, advantages, counts.to(dtype), backend=backend).loss == plain, dtype
    assert fa.policy_loss(log_probs, old, advantages, counts * 7, backend=backend).loss == plain


@ON
def test_metrics(backend: str) -> None:
    log_probs, old = torch.tensor([0.5, 0.0, 3.0, -1.0]), torch.zeros(4)
    out = fa.policy_loss(
        log_probs, old, torch.tensor([1.0, 1.0, -1.0, 1.0]), torch.tensor([1, 1, 1, 0]),
        config=fa.LossConfig(dual_clip=3.0), backend=backend,
    )  # fmt: skip
    assert {name: pytest.approx(float(value)) for name, value in out.metrics.items()} == {
        "clip_fraction": 1 / 3,
        "dual_clip_fraction": 1 / 3,
        "saturated_fraction": 0.0,
        "approx_kl": -3.5 / 3,
        "tokens": 3.0,
    }
    assert not any(value.requires_grad for value in out.metrics.values())
    without_old = fa.policy_loss(log_probs, None, old, torch.ones(4), config="reinforce", backend=backend)
    assert "approx_kl" not in without_old.metrics


@ON
def test_dtypes(backend: str) -> None:
    values = torch.tensor([-1.0, -0.5])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        leaf = values.to(dtype, copy=True).requires_grad_()
        out = fa.policy_loss(leaf, values.to(dtype), values, torch.ones(2), backend=backend)
        out.loss.backward()
        assert (out.loss.dtype, leaf.grad.dtype) == (torch.float32, dtype)
    exact = fa.policy_loss(values.double(), values.double(), values.double(), torch.ones(2))
    assert exact.loss.dtype == torch.float64


def test_segment_advantages_need_no_advantage_per_token() -> None:
    """What the loss allocates beside its gradient does not grow with the tokens."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Allocations(TorchDispatchMode):
        sizes: list[int] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.sizes += [t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
            return out

    tokens = 50_000
    mask = torch.arange(tokens) % 100 < 60
    index = fa.segments(fa.turn_ids_from_mask(mask))
    table = fa.SegmentTable(torch.randn(index.count), index)
    log_probs = torch.zeros(tokens, requires_grad=True)
    with Allocations() as seen:
        fa.policy_loss(log_probs, log_probs.detach(), table, mask, backend="cpu").loss.backward()
    large = [size for size in seen.sizes if size >= tokens]
    assert len(large) <= 3  # the gradient, its detached alias, and the leaf's .grad


@ON
def test_float16_gradients_meet_the_loss_scale_before_they_are_rounded(backend: str) -> None:
    """Undivided by 1e8 they would be subnormal or 0 in float16; times the scale of a GradScaler they are not."""
    log_probs = torch.tensor([-1.0, -0.5], dtype=torch.float16, requires_grad=True)
    loss = fa.policy_loss(log_probs, log_probs.detach(), torch.tensor([1.0, -2.0]), torch.ones(2), denominator=1e8,
                          backend=backend).loss  # fmt: skip
    (gradient,) = torch.autograd.grad(loss * 2**16, log_probs, retain_graph=True)
    expected = (torch.tensor([-1.0, 2.0]) * 2**16 / 1e8).half()
    assert gradient.tolist() == expected.tolist()
    (again,) = torch.autograd.grad(loss * 2**16, log_probs)
    assert torch.equal(again, gradient)


@ON
def test_an_infinite_weight_of_a_row_without_tokens_does_nothing(backend: str) -> None:
    """weights = 1 / tokens is natural, and a fully masked row makes it infinite."""
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    weights = 1.0 / mask.sum(1)
    for reduction in ("loss", "none"):
        leaf = torch.full((2, 3), -1.0, requires_grad=True)
        out = fa.policy_loss(leaf, leaf.detach(), torch.ones(2), mask, weights=weights, reduction=reduction,
                             backend=backend)  # fmt: skip
        out.loss.sum().backward()
        assert out.loss.isfinite().all()
        assert leaf.grad[1].tolist() == [0.0, 0.0, 0.0]


@ON
def test_a_bad_divisor_is_an_error_or_nan_and_never_a_number(backend: str) -> None:
    log_probs = torch.tensor([-1.0, -2.0])
    given = (log_probs, log_probs, torch.ones(2), torch.ones(2))
    for bad in (0.0, -3.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="it must be positive"):
            fa.policy_loss(*given, denominator=bad, backend=backend)
        with pytest.raises(ValueError, match="it must be positive"):
            fa.policy_loss(*given, denominator=torch.tensor(bad), backend=backend)
    with fa.checks("off"):
        for bad in (0.0, -3.0, math.nan):
            assert fa.policy_loss(*given, denominator=torch.tensor(bad), backend=backend).loss.isnan()


@ON
def test_upstream_gradients_of_tokens_that_do_not_count_stay_out(backend: str) -> None:
    leaf = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    mask, weights = torch.tensor([1, 0, 1]), torch.tensor([1.0, 1.0, 0.0])
    out = fa.policy_loss(leaf, leaf.detach(), torch.ones(3), mask, weights=weights, reduction="none", backend=backend)
    out.loss.backward(torch.tensor([2.0, math.nan, math.inf]))
    assert leaf.grad.tolist() == [-2.0, 0.0, 0.0]


@ON
def test_inputs_from_inference_mode(backend: str) -> None:
    with torch.inference_mode():
        old, advantages = torch.tensor([-1.0, -2.0]), torch.ones(2)
    leaf = torch.tensor([-1.0, -2.0], requires_grad=True)
    fa.policy_loss(leaf, old, advantages, torch.ones(2), backend=backend).loss.backward()
    assert leaf.grad.tolist() == [-0.5, -0.5]


@ON
def test_a_turn_out_of_range_in_an_excluded_row_is_not_read(backend: str) -> None:
    turn_ids = torch.tensor([[0, 1], [0, 0]])
    table = fa.SegmentTable(torch.ones(3), fa.segments(turn_ids))
    wrong = torch.tensor([[0, 1], [7, 0]])
    log_probs, mask = -torch.ones(2, 2), torch.ones(2, 2)
    with pytest.raises(ValueError, match="turn_ids names a turn"):
        fa.policy_loss(log_probs, log_probs, table, mask, turn_ids=wrong, backend=backend)
    fa.policy_loss(log_probs, log_probs, table, mask, turn_ids=wrong, weights=torch.tensor([1.0, 0.0]), backend=backend)
    mask[1, 0] = 0
    fa.policy_loss(log_probs, log_probs, table, mask, turn_ids=wrong, backend=backend)


@ON
@pytest.mark.parametrize("given", [{"denominator": 4.0}, {"reduction": "none"}, {}])
def test_a_fractional_mask_is_an_error_whatever_else_is_given(given: dict[str, Any], backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        mask = torch.full((2, 3), 0.5, dtype=dtype)
        log_probs = -torch.ones(2, 3)
        with pytest.raises(ValueError, match="fractional"):
            fa.policy_loss(log_probs, log_probs, torch.ones(2), mask, backend=backend, **given)


@ON
def test_metrics_are_summed_over_all_blocks_of_work(backend: str) -> None:
    """Tokens of each rule in the first block only: kernels work in blocks of 16384."""
    log_probs = torch.zeros(40_000)
    old = torch.zeros(40_000)
    old[:10], old[10:15] = -30.0, -1.0
    advantages = torch.ones(40_000)
    out = fa.policy_loss(log_probs, old, advantages, torch.ones(40_000), backend=backend)
    assert out.metrics["saturated_fraction"] == pytest.approx(10 / 40_000)
    assert out.metrics["clip_fraction"] == pytest.approx(15 / 40_000)
    assert out.metrics["tokens"] == 40_000


def test_the_kernel_writes_gradients_of_any_stride() -> None:
    from fastadv.ops._policy_loss_kernel import POLICY_LOSS, SUMS, Formula, Inputs

    log_probs, advantages = torch.zeros(48), torch.arange(48.0)
    inputs = Inputs(log_probs, torch.ones(48), torch.tensor([0, 48]), advantages, *[None] * 7)
    formula = Formula.of(fa.LossConfig("reinforce"), 0)
    for gradient in (torch.zeros(96)[::2], torch.zeros(96)[1::2], torch.zeros(48), torch.zeros(48, 3).bfloat16()[:, 1]):
        sums = torch.empty(len(SUMS), dtype=torch.float64)
        assert POLICY_LOSS("cpu", log_probs, None, inputs, formula, gradient, None, None, sums) == 0
        assert torch.equal(gradient.float(), -advantages)


def test_a_table_of_other_rollouts_is_refused() -> None:
    turn_ids = torch.tensor([[0, 1], [0, 0]])
    table = fa.SegmentTable(torch.ones(3), fa.segments(turn_ids))
    log_probs = -torch.ones(3, 2)
    with pytest.raises(ValueError, match="advantages is a table of 2 rollouts, log_probs has 3"):
        fa.policy_loss(log_probs, log_probs, table, torch.ones(3, 2), turn_ids=torch.zeros(3, 2, dtype=torch.int32))


@ON
def test_masks_of_negative_numbers_count(backend: str) -> None:
    log_probs = -torch.ones(1, 3)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64):
        mask = torch.tensor([[-1, 0, 2]]).to(dtype)
        assert fa.policy_loss(log_probs, log_probs, torch.ones(1), mask, backend=backend).metrics["tokens"] == 2
        assert fa.token_counts(mask, backend=backend).tolist() == [2]


@ON
def test_long_sums_keep_their_digits(backend: str) -> None:
    """Four million equal losses, of which sums in float32 would lose a hundred-thousandth."""
    tokens = 2**22
    log_probs = torch.full((tokens,), -0.1)
    config = fa.LossConfig("reinforce", loss_agg_mode="token-sum")
    ones = torch.ones(1).expand(tokens)
    for mask in (ones, ones.bool()):
        loss = fa.policy_loss(log_probs, None, ones, mask, config=config, backend=backend).loss
        assert float(loss) == pytest.approx(float(torch.tensor(0.1)) * tokens, rel=1e-6)
