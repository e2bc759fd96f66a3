"""Random inputs for ops, and what a case of an op is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fastadv as fa

BACKENDS = ("reference", "cpu")
NATIVE = tuple(name for name in BACKENDS if name != "reference")
INTERPRETED = (
    "triton",
)  # on CPU tensors, in an interpreter that takes 0.1 ms an operation: the contracts, not every test
EMULATED = ("cuda",)  # on CPU tensors too, compiled for the CPU
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
    which nothing counts outside of inputs["mask"], nor where "weights" are 0. row_inputs: per-rollout tensors, of which
    nothing counts where `silent` is True. gradient_of: the input that gradients flow to, with "loss" the output they
    come from; entropy gets one too where it is there. magnitude: sum of the absolute values of what "loss" is the sum
    of: rounding is relative to it. settle: moves inputs away from where the gradient jumps, since there another
    rounding is another branch. stops_gradient: the gradient is not the derivative of the value, so differences cannot
    check it. tolerance: relative, to the float64 reference.
    """

    name: str
    make: Callable[[Draw], Inputs]
    call: Callable[..., Outputs]
    token_inputs: tuple[str, ...] = ()
    row_inputs: tuple[str, ...] = ()
    silent: Callable[[Inputs], Tensor] | None = None
    gradient_of: str | None = None
    magnitude: Callable[[Inputs], float] | None = None
    settle: Callable[[Inputs], Inputs] | None = None
    stops_gradient: bool = False
    tolerance: float = 2e-6

    def counts(self, inputs: Inputs, name: str) -> Tensor:
        """Where the values of a per-token input count."""
        on, weights = inputs["mask"], inputs.get("weights")
        if weights is None or name == "weights":
            return on
        if weights.shape != on.shape:  # per rollout
            cu_seqlens = inputs["cu_seqlens"]
            weights = weights[:, None] if cu_seqlens is None else weights.repeat_interleave(cu_seqlens.diff())
        return on & (weights != 0)

    def run(self, backend: str, inputs: Inputs) -> Outputs:
        """Outputs, and the gradient under "gradient" if there is one."""
        if self.gradient_of is None:
            return self.call(backend, **inputs)
        names = [name for name in (self.gradient_of, "entropy") if name in inputs]
        leaves = {name: inputs[name].detach().requires_grad_() for name in names}
        outputs = dict(self.call(backend, **{**inputs, **leaves}))
        outputs["loss"].sum().backward()
        outputs = {k: v.detach() for k, v in outputs.items()}
        outputs["gradient"] = leaves[self.gradient_of].grad
        if "entropy" in leaves:
            outputs["gradient of entropy"] = leaves["entropy"].grad
        return outputs

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


def same_bits(a: Outputs, b: Outputs) -> None:
    """Whether two runs gave the same, NaN where the other has it."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
