"""Every op as the contract suite sees it. A new op joins by a line in CASES, a new backend by a word in BACKENDS."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import cuda_kernels
import pytest
import torch
from draws import (
    BACKENDS,
    EMULATED,
    GARBAGE,
    INTERPRETED,
    NATIVE,
    Case,
    Draw,
    Inputs,
    Outputs,
    Shape,
    float64,
    where_masked,
)
from loss_cases import LOSS_CASES, LOSSES_WITHOUT_KERNEL, PPO, settled
from torch import Tensor

import fastadv as fa

__all__ = [
    "BACKENDS",
    "CASES",
    "CPU_CASES",
    "EMULATED",
    "GARBAGE",
    "INTERPRETED",
    "NATIVE",
    "PRODUCT_CASES",
    "REFERENCE_CASES",
    "Case",
    "Draw",
    "Inputs",
    "Outputs",
    "Shape",
    "float64",
    "parametrize",
    "where_masked",
]

# ---- turns and segments ----------------------------------------------------------------------------------------------


def turn_ids_from_mask(backend: str, mask: Tensor, cu_seqlens: Tensor | None) -> Outputs:
    return {"turn_ids": fa.turn_ids_from_mask(mask, cu_seqlens, backend=backend)}


def segments(backend: str, turn_ids: Tensor, cu_seqlens: Tensor | None) -> Outputs:
    return {"offsets": fa.segments(turn_ids, cu_seqlens, backend=backend).offsets}


def segment_tokens(backend: str, values: Tensor, index: fa.Segments, mask: Tensor) -> Outputs:
    return {"tokens": fa.segment_tokens(fa.SegmentTable(values, index), mask, backend=backend)}


def make_segment_tokens(d: Draw) -> Inputs:
    index = d.segments()
    return {"values": d.normal(index.count), "index": index, "mask": d.mask & (d.uniform(*d.tokens) < 0.8)}


def sequence_log_ratios(backend: str, **inputs: Any) -> Outputs:
    return fa.sequence_log_ratios(**inputs, missing="skip", backend=backend)._asdict()


def make_sequence_log_ratios(d: Draw) -> Inputs:
    old = -2 * d.uniform(*d.tokens)
    old = torch.where(d.uniform(*d.tokens) < 0.1, torch.nan, old)
    return {"log_probs": -2 * d.uniform(*d.tokens), "old_log_probs": old, "mask": d.mask, "cu_seqlens": d.cu_seqlens}


def token_counts(backend: str, mask: Tensor, cu_seqlens: Tensor | None) -> Outputs:
    return {"counts": fa.token_counts(mask, cu_seqlens, backend=backend)}


# ---- advantages ------------------------------------------------------------------------------------------------------


def make_group_advantages(d: Draw) -> Inputs:
    return {"rewards": d.rewards, "group_ids": d.group_ids}


def group_advantages(options: dict[str, Any]) -> Callable[..., Outputs]:
    def call(backend: str, **inputs: Any) -> Outputs:
        return {"advantages": fa.group_advantages(**inputs, **options, backend=backend)}

    return call


def make_turn_advantages(d: Draw) -> Inputs:
    return {"rewards": d.rewards, "group_ids": d.group_ids, "turn_ids": d.turn_ids(), "cu_seqlens": d.cu_seqlens}


def turn_advantages(options: dict[str, Any]) -> Callable[..., Outputs]:
    def call(backend: str, **inputs: Any) -> Outputs:
        return {"advantages": fa.turn_advantages(**inputs, **options, backend=backend)}

    return call


def excluded(inputs: Inputs) -> Tensor:
    return ~inputs["include"]


def with_include(make: Callable[[Draw], Inputs]) -> Callable[[Draw], Inputs]:
    return lambda d: {**make(d), "include": d.include}


# ---- token-level returns ---------------------------------------------------------------------------------------------


def whiten(backend: str, **inputs: Any) -> Outputs:
    return {"whitened": fa.whiten(**inputs, backend=backend)}


def make_whiten(d: Draw) -> Inputs:
    return {"values": 3 + d.normal(*d.tokens), "mask": d.mask, "cu_seqlens": d.cu_seqlens}


def token_returns(options: dict[str, Any]) -> Callable[..., Outputs]:
    def call(backend: str, **inputs: Any) -> Outputs:
        out = fa.token_returns(**inputs, **options, backend=backend)
        count, mean, squares = out.spread
        return {"advantages": out.advantages, "returns": out.returns, "count": count, "mean": mean, "squares": squares}

    return call


def make_token_returns(d: Draw, *tokens: str, rows: tuple[str, ...] = ()) -> Inputs:
    inputs = {name: 0.5 + d.uniform(*d.tokens) for name in tokens} | {name: d.uniform(d.rows) for name in rows}
    return {**inputs, "mask": d.mask, "cu_seqlens": d.cu_seqlens}


def optimal_token_baseline(options: dict[str, Any]) -> Callable[..., Outputs]:
    def call(backend: str, **inputs: Any) -> Outputs:
        return {"advantages": fa.optimal_token_baseline(**inputs, **options, backend=backend)}

    return call


def make_optimal_token_baseline(d: Draw, weighted: bool = False) -> Inputs:
    p = 0.01 + 0.7 * d.uniform(*d.tokens)
    inputs = {
        "returns": d.normal(*d.tokens),
        "log_probs": p.log(),
        "sum_p2": p * p + (1 - p) ** 2 * d.uniform(*d.tokens),
        "group_ids": d.group_ids,
        "mask": d.mask,
        "cu_seqlens": d.cu_seqlens,
    }
    return {**inputs, "is_weights": 0.1 + d.uniform(*d.tokens)} if weighted else inputs


# ---- log-probs from logits -------------------------------------------------------------------------------------------


def make_token_log_probs(vocab: int, extra: tuple[str, ...] = ()) -> Callable[[Draw], Inputs]:
    def make(d: Draw) -> Inputs:
        inputs = {
            "logits": 2 * d.normal(*d.tokens, vocab),
            "labels": torch.randint(0, vocab, d.tokens, generator=d.generator),
            "mask": d.mask,
        }
        if "temperature" in extra:
            inputs["temperature"] = 0.5 + d.uniform(*d.tokens)
        return inputs

    return make


def token_log_probs(options: dict[str, Any]) -> Callable[..., Outputs]:
    """With entropy and sum of squares, "loss" is one number a token that gradients of all three reach."""

    def call(backend: str, **inputs: Any) -> Outputs:
        out = fa.token_log_probs(**inputs, **options, backend=backend)
        if out.entropy is None or out.sum_p2 is None:
            return {"loss": out.log_probs}
        loss = out.log_probs - 0.01 * out.entropy + 0.1 * out.sum_p2
        return {"loss": loss, "entropy": out.entropy, "sum_p2": out.sum_p2}

    return call


# ---- log-probs from hidden states ------------------------------------------------------------------------------------


def make_linear_log_probs(d: Draw) -> Inputs:
    return {
        "hidden": d.normal(*d.tokens, 8),
        "weight": 0.3 * d.normal(3, 8),
        "labels": torch.randint(0, 3, d.tokens, generator=d.generator),
        "mask": d.mask,
    }


def make_linear_log_probs_moments(d: Draw) -> Inputs:
    return {
        "hidden": d.normal(*d.tokens, 5),
        "bias": d.normal(19),
        "labels": torch.randint(0, 19, d.tokens, generator=d.generator),
        "temperature": 0.5 + d.uniform(*d.tokens),
        "mask": d.mask,
    }


def linear_log_probs(backend: str, **inputs: Any) -> Outputs:
    """Deterministic: the contract of equal bits holds there."""
    return {"loss": fa.linear_log_probs(**inputs, deterministic=True, backend=backend).log_probs}


def linear_log_probs_moments(backend: str, **inputs: Any) -> Outputs:
    weight = (torch.arange(19 * 5) % 7 - 3).view(19, 5).to(inputs["hidden"]) / 2
    options = {**MOMENTS, "softcap": 10.0, "ignore_index": 2, "chunk_tokens": 100, "deterministic": True}
    out = fa.linear_log_probs(**inputs, weight=weight, **options, backend=backend)
    return {"loss": out.log_probs - 0.01 * out.entropy + 0.1 * out.sum_p2, "entropy": out.entropy, "sum_p2": out.sum_p2}


def make_linear_policy_loss(d: Draw) -> Inputs:
    given = make_linear_log_probs(d)
    log_probs = fa.linear_log_probs(**given, backend="reference").log_probs
    old = log_probs + d.normal(*d.tokens) * d.uniform(*d.tokens) ** 4 * 4
    close = {"log_probs": log_probs, "old_log_probs": old, "mask": d.mask, "cu_seqlens": d.cu_seqlens}
    old = settled(PPO, close)["old_log_probs"]
    return {**given, "old": old, "advantages": d.normal(*d.tokens), "cu_seqlens": d.cu_seqlens}


def linear_policy_loss(backend: str, old: Tensor, reduction: str = "loss", **inputs: Any) -> Outputs:
    options = {"config": PPO, "deterministic": True, "reduction": reduction}
    out = fa.linear_policy_loss(**inputs, old_log_probs=old, **options, backend=backend)
    return {"loss": out.loss, **out.metrics}


def linear_magnitude(inputs: Inputs) -> float:
    exact = {name: float64(value) for name, value in inputs.items()}
    losses = linear_policy_loss("reference", **exact, reduction="none")["loss"]
    return float(losses.abs().sum() / inputs["mask"].sum().clamp(min=1))


# ---- gradient projections --------------------------------------------------------------------------------------------


def make_multi_dot_gram(d: Draw) -> Inputs:
    return {name: d.normal(*d.tokens) for name in "abc"}


def multi_dot_gram(backend: str, a: Tensor, b: Tensor, c: Tensor) -> Outputs:
    return {"gram": fa.multi_dot_gram([a, b, c], backend=backend)}


def count_sketch(backend: str, numbers: Tensor) -> Outputs:
    """A piece of a larger parameter, in which no chunk begins where a row does."""
    place = {"row_offset": 3, "column_offset": 37, "parameter": "layers.0.weight", "copies": 2}
    return {"sketch": fa.gradproj.count_sketch(numbers, 100, **place, backend=backend)}


# ---- score centering -------------------------------------------------------------------------------------------------


def make_score_centering(d: Draw) -> Inputs:
    head = -1 - 3 * d.uniform(*d.tokens, 4)
    log_probs = -3 * d.uniform(*d.tokens)
    return {
        "log_probs": log_probs,
        "rollout_log_probs": log_probs + 0.05 * d.normal(*d.tokens),
        "head_log_probs": head.log_softmax(-1) - 0.2,
        "rollout_head_log_probs": (head + 0.05 * d.normal(*d.tokens, 4)).log_softmax(-1) - 0.2,
        "advantages": d.normal(*d.tokens),
        "mask": d.mask,
        "cu_seqlens": d.cu_seqlens,
    }


def score_centering(backend: str, **inputs: Any) -> Outputs:
    config = fa.LossConfig("reinforce", correction=fa.Correction("tis", high=1.9))
    out = fa.score_centering_loss(**inputs, sampler=fa.Sampler(), config=config, backend=backend)
    return {"loss": out.loss, **out.metrics}


def score_magnitude(inputs: Inputs) -> float:
    exact = {name: float64(value) for name, value in inputs.items()}
    losses = fa.score_centering_loss(**exact, sampler=fa.Sampler(), reduction="none").loss
    return 5 * float(losses.abs().sum() / inputs["mask"].sum().clamp(min=1))


MOMENTS = {"return_entropy": True, "return_sum_p2": True}
CASES = (
    Case("turn_ids_from_mask", lambda d: {"mask": d.mask, "cu_seqlens": d.cu_seqlens}, turn_ids_from_mask),
    Case("segments", lambda d: {"turn_ids": d.turn_ids(), "cu_seqlens": d.cu_seqlens}, segments),
    Case("segment_tokens", make_segment_tokens, segment_tokens),
    Case("token_counts", lambda d: {"mask": d.mask, "cu_seqlens": d.cu_seqlens}, token_counts),
    Case(
        "sequence_log_ratios",
        make_sequence_log_ratios,
        sequence_log_ratios,
        token_inputs=("log_probs", "old_log_probs"),
    ),
    Case("group_advantages[mean]", make_group_advantages, group_advantages({"baseline": "mean"})),
    Case("group_advantages[loo, std]", make_group_advantages, group_advantages({"baseline": "loo", "scale": "std"})),
    Case(
        "group_advantages[loo, survivors, raw]",
        with_include(make_group_advantages),
        group_advantages({"baseline": "loo", "population": "survivors", "singleton": "raw"}),
        row_inputs=("rewards",),
        silent=excluded,
    ),
    Case("turn_advantages", make_turn_advantages, turn_advantages({})),
    Case("turn_advantages[mean, std]", make_turn_advantages, turn_advantages({"shrink_to": "mean", "scale": "std"})),
    Case(
        "turn_advantages[survivors]",
        with_include(make_turn_advantages),
        turn_advantages({"population": "survivors", "singleton": "raw", "kappa": 0.0}),
        row_inputs=("rewards",),
        silent=excluded,
    ),
    *LOSS_CASES,
    Case(
        "token_log_probs",
        make_token_log_probs(19),
        token_log_probs({}),
        token_inputs=("logits",),
        gradient_of="logits",
    ),
    Case(
        "token_log_probs[entropy, sum_p2, temperature]",
        make_token_log_probs(16, ("temperature",)),
        token_log_probs(MOMENTS),
        token_inputs=("logits",),
        gradient_of="logits",
    ),
    Case(
        "token_log_probs[softcap]",
        make_token_log_probs(19),
        token_log_probs({**MOMENTS, "softcap": 10.0, "temperature": 1.3, "ignore_index": 2}),
        token_inputs=("logits",),
        gradient_of="logits",
    ),
    Case("linear_log_probs", make_linear_log_probs, linear_log_probs, token_inputs=("hidden",), gradient_of="hidden"),
    Case(
        "linear_log_probs[moments]",
        make_linear_log_probs_moments,
        linear_log_probs_moments,
        token_inputs=("hidden",),
        gradient_of="hidden",
    ),
    Case(
        "linear_policy_loss",
        make_linear_policy_loss,
        linear_policy_loss,
        token_inputs=("hidden", "old", "advantages"),
        gradient_of="hidden",
        magnitude=linear_magnitude,
    ),
    Case("multi_dot_gram", make_multi_dot_gram, multi_dot_gram),
    Case("count_sketch", lambda d: {"numbers": 10 * d.normal(*d.tokens)}, count_sketch),
)
# What has kernels on the CPU only.
CPU_CASES = (
    Case("whiten", make_whiten, whiten, token_inputs=("values",)),
    Case(
        "token_returns",
        lambda d: make_token_returns(d, "token_rewards"),
        token_returns({"gamma": 0.99}),
        token_inputs=("token_rewards",),
    ),
    Case(
        "token_returns[rows, baselines]",
        lambda d: make_token_returns(d, "token_rewards", rows=("rewards", "baselines")),
        token_returns({"gamma": 0.9, "discount_gaps": True}),
        token_inputs=("token_rewards",),
    ),
    Case(
        "token_returns[gae]",
        lambda d: make_token_returns(d, "token_rewards", "values"),
        token_returns({"gamma": 0.99, "lam": 0.95}),
        token_inputs=("token_rewards", "values"),
        tolerance=1e-5,  # an advantage is a difference
    ),
    Case(
        "optimal_token_baseline",
        make_optimal_token_baseline,
        optimal_token_baseline({}),
        token_inputs=("returns", "log_probs", "sum_p2"),
    ),
    Case(
        "optimal_token_baseline[sampled, is_weights]",
        lambda d: make_optimal_token_baseline(d, weighted=True),
        optimal_token_baseline({"positions": "sampled", "zero_tail": False}),
        token_inputs=("returns", "log_probs", "sum_p2", "is_weights"),
    ),
)
# The interpreter takes seconds a test: one case of each kernel runs always, and the rest with the slow tests.
QUICK = (
    "turn_ids_from_mask", "segments", "segment_tokens", "token_counts", "sequence_log_ratios", "group_advantages[mean]",
    "turn_advantages", "policy_loss[ppo]", "multi_dot_gram", "count_sketch", "segment_weight_gram",
)  # fmt: skip


NEEDS_EMULATION = pytest.mark.skipif(cuda_kernels.missing() is not None, reason=str(cuda_kernels.missing()))


def parametrize(pairs: Iterable[tuple[Case, str]], *, interpreted: bool = False) -> pytest.MarkDecorator:
    """A test over cases and backends. What is interpreted is slow, unless it is said to be quick enough."""
    params = [
        pytest.param(
            of_few_tokens(case) if backend in INTERPRETED else case,
            backend,
            id=f"{case.name}-{backend}",
            marks=_marks(case, backend, interpreted),
        )
        for case, backend in pairs
    ]
    return pytest.mark.parametrize(("case", "backend"), params)


def of_few_tokens(case: Case) -> Case:
    """The case with at most eight tokens, where the interpreter takes a tenth of a second for each: those of logits."""
    if not {"logits", "hidden"} & set(case.token_inputs):
        return case

    def make(d: Draw) -> Inputs:
        return case.make(replace(d.spec, lengths=tuple(min(length, 2) for length in d.spec.lengths[:4])).draw())

    return replace(case, make=make)


def _marks(case: Case, backend: str, interpreted: bool) -> list[pytest.MarkDecorator]:
    if backend in EMULATED:
        return [NEEDS_EMULATION]
    return [pytest.mark.slow] if backend in INTERPRETED and not (interpreted and case.name in QUICK) else []


def make_segment_weight_gram(d: Draw) -> Inputs:
    ends = d.cu_seqlens if d.cu_seqlens is not None else torch.arange(d.rows + 1) * d.tokens[1]
    return {"x": d.normal(*d.tokens, 5), "dy": d.normal(*d.tokens, 3), "ends": ends}


def segment_weight_gram(backend: str, x: Tensor, dy: Tensor, ends: Tensor) -> Outputs:
    gram = torch.zeros(len(ends) - 1, len(ends) - 1, dtype=torch.float64)
    fa.gradproj.segment_weight_gram(x.flatten(0, -2), dy.flatten(0, -2), ends, gram, backend=backend)
    return {"gram": gram}


# Products, PyTorch's or in Triton; it waits to know where segments end, so it is none for graphs.
PRODUCT_CASES = (Case("segment_weight_gram", make_segment_weight_gram, segment_weight_gram),)
# What has no kernel, or is made of PyTorch: the contracts hold on the reference.
REFERENCE_CASES = (
    *LOSSES_WITHOUT_KERNEL,
    Case(
        "score_centering_loss",
        make_score_centering,
        score_centering,
        token_inputs=("log_probs", "head_log_probs", "rollout_head_log_probs", "advantages"),
        gradient_of="log_probs",
        magnitude=score_magnitude,
        stops_gradient=True,
        tolerance=1e-5,
    ),
)
