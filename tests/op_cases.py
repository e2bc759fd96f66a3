"""Every op as the contract suite sees it. A new op joins by a line in CASES, a new backend by a word in BACKENDS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fastadv as fa

BACKENDS = ("reference", "cpu")
NATIVE = tuple(name for name in BACKENDS if name != "reference")
GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30, -3e38)

Inputs = dict[str, Any]
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a random batch."""

    lengths: tuple[int, ...] = (7, 1, 0, 40, 19)
    padded: bool = False
    seed: int = 0
    density: float = 0.7  # chance of a token to be in the mask
    groups: int = 2

    def draw(self) -> Draw:
        return Draw(self)


class Draw:
    """Random inputs of one shape."""

    def __init__(self, shape: Shape) -> None:
        self.generator = torch.Generator().manual_seed(shape.seed)
        self.spec, self.rows = shape, len(shape.lengths)
        lengths = torch.tensor(shape.lengths, dtype=torch.int64)
        if shape.padded:
            self.cu_seqlens = None
            self.tokens = (self.rows, max(shape.lengths, default=0))
            inside = torch.arange(self.tokens[1]) < lengths[:, None]
        else:
            self.cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            self.tokens = (int(lengths.sum()),)
            inside = torch.ones(self.tokens, dtype=torch.bool)
        self.mask = inside & (self.uniform(*self.tokens) < shape.density)
        self.group_ids = torch.randint(0, max(1, shape.groups), (self.rows,), generator=self.generator)
        self.rewards = torch.randint(0, 3, (self.rows,), generator=self.generator) * 0.5
        self.include = self.uniform(self.rows) < 0.7

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def turn_ids(self) -> Tensor:
        return fa.turn_ids_from_mask(self.mask, self.cu_seqlens, backend="reference")

    def segments(self) -> fa.Segments:
        return fa.segments(self.turn_ids(), self.cu_seqlens, backend="reference")


@dataclass(frozen=True)
class Case:
    """An op with a certain choice of options.

    make: inputs from a draw. call: outputs by name from a backend and inputs. token_inputs: per-token tensors, of
    which nothing counts outside of inputs["mask"]. row_inputs: per-rollout tensors, of which nothing counts where
    `silent` is True. gradient_of: the input that gradients flow to, with "loss" the output they come from.
    magnitude: sum of the absolute values of what "loss" is the sum of: rounding is relative to it.
    """

    name: str
    make: Callable[[Draw], Inputs]
    call: Callable[..., Outputs]
    token_inputs: tuple[str, ...] = ()
    row_inputs: tuple[str, ...] = ()
    silent: Callable[[Inputs], Tensor] | None = None
    gradient_of: str | None = None
    magnitude: Callable[[Inputs], float] | None = None

    def run(self, backend: str, inputs: Inputs) -> Outputs:
        """Outputs, and the gradient under "gradient" if there is one."""
        if self.gradient_of is None:
            return self.call(backend, **inputs)
        leaf = inputs[self.gradient_of].detach().requires_grad_()
        outputs = dict(self.call(backend, **self.with_leaf(inputs, leaf)))
        outputs["loss"].sum().backward()
        return {**{k: v.detach() for k, v in outputs.items()}, "gradient": leaf.grad}

    def leaf(self, inputs: Inputs) -> Tensor:
        """A copy of the input that gradients flow to, which takes them."""
        assert self.gradient_of is not None
        return inputs[self.gradient_of].clone().requires_grad_()

    def with_leaf(self, inputs: Inputs, leaf: Tensor) -> Inputs:
        """The inputs, with another tensor as the one that gradients flow to."""
        assert self.gradient_of is not None
        return {**inputs, self.gradient_of: leaf}


def where_masked(mask: Tensor, values: Tensor, garbage: float) -> Tensor:
    """Garbage outside of the mask, in per-token values that may have more dimensions than the mask."""
    return torch.where(mask.reshape(mask.shape + (1,) * (values.dim() - mask.dim())), values, garbage)


def float64(value: Any) -> Any:
    """Floating tensors as float64, whatever holds them."""
    if isinstance(value, fa.SegmentTable):
        return replace(value, values=value.values.double())
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


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


# ---- losses ----------------------------------------------------------------------------------------------------------


def away_from_edges(log_probs: Tensor, old_log_probs: Tensor, config: fa.LossConfig) -> Tensor:
    """Old log-probs whose ratios keep away from where the gradient jumps: there another rounding is another branch."""
    log_ratio = log_probs.double() - old_log_probs.double()
    ratio = log_ratio.exp()
    near = (log_ratio.abs() - config.log_ratio_bound).abs() < 1e-3
    for edge in (1 - config.clip_low, 1 + config.clip_high, config.dual_clip or 1e9):
        near |= (ratio / edge - 1).abs() < 1e-3
    return torch.where(near, log_probs.to(old_log_probs.dtype), old_log_probs)


def make_policy_loss(config: fa.LossConfig, advantages: str, extra: tuple[str, ...] = ()) -> Callable[[Draw], Inputs]:
    def make(d: Draw) -> Inputs:
        log_probs = -3 * d.uniform(*d.tokens)
        old_log_probs = log_probs + d.normal(*d.tokens) * d.uniform(*d.tokens) ** 4 * 12
        by_kind = {
            "token": lambda: d.normal(*d.tokens),
            "row": lambda: d.normal(d.rows),
            "segment": lambda: fa.SegmentTable(d.normal(d.segments().count), d.segments()),
        }
        inputs = {
            "log_probs": log_probs,
            "old_log_probs": away_from_edges(log_probs, old_log_probs, config),
            "advantages": by_kind[advantages](),
            "mask": d.mask,
            "cu_seqlens": d.cu_seqlens,
        }
        if "row weights" in extra:
            inputs["weights"] = d.uniform(d.rows) * (d.uniform(d.rows) < 0.8)
        if "token weights" in extra:
            inputs["weights"] = d.normal(*d.tokens) * (d.uniform(*d.tokens) < 0.8)
        if "is_weights" in extra:
            inputs["is_weights"] = d.uniform(*d.tokens) * (d.uniform(*d.tokens) < 0.8)
        return inputs

    return make


def policy_loss(config: fa.LossConfig, reduction: str = "loss") -> Callable[..., Outputs]:
    def call(backend: str, **inputs: Any) -> Outputs:
        out = fa.policy_loss(**inputs, config=config, reduction=reduction, backend=backend)
        return {"loss": out.loss, **out.metrics}

    return call


def magnitude(config: fa.LossConfig) -> Callable[[Inputs], float]:
    """The loss with each token's loss taken absolute: reinforce with log-probs of 1 is minus the sum of advantages."""

    def absolute(inputs: Inputs) -> float:
        exact = {name: float64(value) for name, value in inputs.items()}
        losses = fa.policy_loss(**exact, config=config, reduction="none").loss.abs()
        as_sum = fa.LossConfig("reinforce", loss_agg_mode=config.loss_agg_mode, horizon=config.horizon)
        ones, mask, cu_seqlens = torch.ones_like(losses), inputs["mask"], inputs["cu_seqlens"]
        return -float(fa.policy_loss(ones, None, losses, mask, config=as_sum, cu_seqlens=cu_seqlens).loss)

    return absolute


def policy_loss_case(name: str, config: fa.LossConfig, advantages: str, *extra: str, reduction: str = "loss") -> Case:
    token_inputs = ["log_probs", "old_log_probs"]
    token_inputs += ["advantages"] * (advantages == "token") + ["weights"] * ("token weights" in extra)
    token_inputs += ["is_weights"] * ("is_weights" in extra)
    return Case(
        f"policy_loss[{name}]",
        make_policy_loss(config, advantages, extra),
        policy_loss(config, reduction),
        token_inputs=tuple(token_inputs),
        gradient_of="log_probs",
        magnitude=magnitude(config) if reduction == "loss" else None,
    )


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
    weight = (torch.arange(19 * 5) % 7 - 3).view(19, 5).to(inputs["hidden"].dtype) / 2
    options = {**MOMENTS, "softcap": 10.0, "ignore_index": 2, "chunk_tokens": 100, "deterministic": True}
    out = fa.linear_log_probs(**inputs, weight=weight, **options, backend=backend)
    return {"loss": out.log_probs - 0.01 * out.entropy + 0.1 * out.sum_p2, "entropy": out.entropy, "sum_p2": out.sum_p2}


def make_linear_policy_loss(d: Draw) -> Inputs:
    given = make_linear_log_probs(d)
    log_probs = fa.linear_log_probs(**given, backend="reference").log_probs
    old = log_probs + d.normal(*d.tokens) * d.uniform(*d.tokens) ** 4 * 4
    old = away_from_edges(log_probs, old, PPO)
    return {**given, "old": old, "advantages": d.normal(*d.tokens), "cu_seqlens": d.cu_seqlens}


def linear_policy_loss(backend: str, old: Tensor, reduction: str = "loss", **inputs: Any) -> Outputs:
    options = {"config": PPO, "deterministic": True, "reduction": reduction}
    out = fa.linear_policy_loss(**inputs, old_log_probs=old, **options, backend=backend)
    return {"loss": out.loss, **out.metrics}


def linear_magnitude(inputs: Inputs) -> float:
    exact = {name: float64(value) for name, value in inputs.items()}
    losses = linear_policy_loss("reference", **exact, reduction="none")["loss"]
    return float(losses.abs().sum() / inputs["mask"].sum().clamp(min=1))


MOMENTS = {"return_entropy": True, "return_sum_p2": True}
PPO = fa.LossConfig(clip_high=0.28)
CASES = (
    Case("turn_ids_from_mask", lambda d: {"mask": d.mask, "cu_seqlens": d.cu_seqlens}, turn_ids_from_mask),
    Case("segments", lambda d: {"turn_ids": d.turn_ids(), "cu_seqlens": d.cu_seqlens}, segments),
    Case("segment_tokens", make_segment_tokens, segment_tokens),
    Case("token_counts", lambda d: {"mask": d.mask, "cu_seqlens": d.cu_seqlens}, token_counts),
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
    policy_loss_case("ppo", PPO, "token"),
    policy_loss_case("ppo, rows", PPO.but(dual_clip=3.0, loss_agg_mode="seq-mean-token-mean"), "row", "row weights"),
    policy_loss_case("ppo, segments", PPO.but(loss_agg_mode="seq-mean-token-sum"), "segment"),
    policy_loss_case("ppo, none", PPO.but(dual_clip=3.0), "token", "token weights", "is_weights", reduction="none"),
    policy_loss_case("reinforce", fa.LossConfig("reinforce", loss_agg_mode="token-sum"), "token", "is_weights"),
    policy_loss_case(
        "reinforce, segments",
        fa.LossConfig("reinforce", loss_agg_mode="seq-mean-token-sum-norm", horizon=40),
        "segment",
        "row weights",
    ),
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
)
