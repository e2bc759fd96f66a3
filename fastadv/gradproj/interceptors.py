"""Modules that hand the factors of their weight gradients over instead of multiplying them.

An interceptor takes the place of one module's forward for the time of a pass. Its backward gives the input gradient, on
live rows only, and keeps what the per-segment weight gradients are made from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastadv.gradproj.streams import MicroBatch, Stream
from fastadv.ops.segment_weight_gram import GramSum, Part, tile_dtype, weight_gradient_tiles


@dataclass
class Tape:
    """What runs now: read by interceptors in forward (micro_batch) and backward (stream)."""

    segments: int
    micro_batch: MicroBatch | None = None
    stream: Stream | None = None

    def shape(self) -> torch.Size:
        """`[b, T]` of the micro-batch that runs."""
        assert self.micro_batch is not None
        return self.micro_batch.ids.shape


class Interceptor(ABC):
    """One module's forward, and what its backward kept of one layer over all micro-batches."""

    def __init__(self, name: str, module: nn.Module, tape: Tape) -> None:
        self.name, self.tape = name, tape
        self.module: Any = module
        self.called = False

    def covers(self) -> list[nn.Parameter]:
        """Parameters whose gradients `add_to` adds."""
        return [p for p in self.module.parameters(recurse=False) if p.requires_grad]

    def __call__(self, x: Tensor) -> Tensor:
        """The module's forward."""
        if torch.is_grad_enabled():
            if self.called:
                raise ValueError(
                    f"segment_gram: {self.name} runs twice in one pass of its layer; its gradient would need both"
                )
            if x.shape[:2] != self.tape.shape():
                raise ValueError(
                    f"segment_gram: {self.name} gets an input of shape {list(x.shape)}; expected "
                    f"{list(self.tape.shape())} [rollouts, tokens] first"
                )
            self.called = True
        return self.forward(x)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The module's function of its input."""

    @abstractmethod
    def add_to(self, gram: GramSum, scratch_bytes: int) -> None:
        """Adds the Gram of this module's per-segment gradients and forgets them."""


class _Rows:
    """Per-segment gradients of a parameter with few numbers, `[S, d]`."""

    def __init__(self) -> None:
        self.found: list[tuple[list[int], Tensor]] = []

    def keep(self, tape: Tape, by_token: Tensor) -> None:
        """Sums a gradient by token `[b * T, ..., d]` over each rollout; behind a segment's live rows it is 0."""
        assert tape.stream is not None
        dtype = tile_dtype(by_token.dtype)
        sums = by_token.reshape(tape.shape()[0], -1, by_token.shape[-1]).sum(1, dtype=dtype)  # [b, d]
        self.found.append((tape.stream.segments, sums.index_select(0, tape.stream.rollouts)))

    def add_to(self, gram: GramSum) -> None:
        if not self.found:
            return
        first = self.found[0][1]
        whole = first.new_zeros(gram.segments, first.shape[1])
        for segments, rows in self.found:
            whole[segments] = rows
        self.found = []
        gram.add(whole)


class _Product(torch.autograd.Function):
    """y = x W^T + b; the weight's part of the backward goes to the owner."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: LinearInterceptor) -> Tensor:
        ctx.owner = owner
        # Detached: the tensor that the caller holds carries the graph of everything before it.
        owner.inputs = x.detach().reshape(-1, x.shape[-1])
        y = functional.linear(owner.inputs, owner.weight(), owner.bias())
        # No view: models and hooks may write into it.
        whole: Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.owner.backward(gradients[0]), None


class LinearInterceptor(Interceptor):
    """torch.nn.Linear: the weight gradient of a segment is dY^T X over its live rows."""

    def __init__(self, name: str, module: nn.Module, tape: Tape) -> None:
        super().__init__(name, module, tape)
        self.parts: list[Part] = []
        self.biases = _Rows()
        self.inputs: Tensor | None = None

    def weight(self) -> Tensor:
        """`[d_out, d_in]` without a graph."""
        weight: Tensor = self.module.weight.detach()
        return weight

    def bias(self) -> Tensor | None:
        """`[d_out]` without a graph."""
        bias: Tensor | None = self.module.bias
        return None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        if not torch.is_grad_enabled():
            return functional.linear(x, self.weight(), self.bias())
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return y

    def backward(self, dy: Tensor) -> Tensor:
        """Keeps the live rows of one stream's output gradient and returns the input gradient."""
        stream, weight = self.tape.stream, self.weight()
        assert stream is not None
        assert self.inputs is not None
        shape = dy.shape[:-1]
        dy = dy.reshape(-1, dy.shape[-1])
        live = stream.gather(dy)  # [n, d_out]
        if self.module.weight.requires_grad:
            self.parts.append(Part(self.inputs, live, stream.runs))
        if self.module.bias is not None and self.module.bias.requires_grad:
            self.biases.keep(self.tape, dy)
        return stream.spread(live @ weight, dy.shape[0]).view(*shape, weight.shape[1])

    def add_to(self, gram: GramSum, scratch_bytes: int) -> None:
        """Weight and bias."""
        for tile in weight_gradient_tiles(self.parts, gram.segments, scratch_bytes):
            gram.add(tile.flat())
        self.parts, self.inputs = [], None
        self.biases.add_to(gram)


class Conv1DInterceptor(LinearInterceptor):
    """transformers' Conv1D of GPT-2: a linear layer whose weight is stored transposed."""

    def weight(self) -> Tensor:
        """`[d_out, d_in]` without a graph."""
        return super().weight().t()


class _Scale(torch.autograd.Function):
    """y = w * n + b for a normalised input n; the parameters' part of the backward goes to the owner."""

    @staticmethod
    def forward(ctx: Any, n: Tensor, owner: NormInterceptor) -> Tensor:
        ctx.owner = owner
        ctx.save_for_backward(n)
        return owner.scale(n)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.owner.backward(gradients[0], ctx.saved_tensors[0]), None


class NormInterceptor(Interceptor):
    """A norm: a normalised input times a 1-D weight, plus a bias if there is one."""

    def __init__(self, name: str, module: nn.Module, tape: Tape) -> None:
        super().__init__(name, module, tape)
        self.weights, self.biases = _Rows(), _Rows()

    @abstractmethod
    def normalised(self, x: Tensor) -> Tensor:
        """The input as the weight meets it. float32 at least: of a float64 model, all of it is float64."""

    def scale(self, n: Tensor) -> Tensor:
        """The output."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        y: Tensor = n * self.module.weight.detach()
        return y if bias is None else y + bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x."""
        n = self.normalised(x)
        if not torch.is_grad_enabled():
            return self.scale(n)
        y: Tensor = _Scale.apply(n, self)  # type: ignore[no-untyped-call]
        return y

    def backward(self, dy: Tensor, n: Tensor) -> Tensor:
        """Keeps one stream's parameter gradients and returns that of the normalised input."""
        if self.module.weight.requires_grad:
            self.weights.keep(self.tape, dy.to(tile_dtype(dy.dtype)) * n)
        bias = getattr(self.module, "bias", None)
        if bias is not None and bias.requires_grad:
            self.biases.keep(self.tape, dy)
        dn: Tensor = dy * self.module.weight.detach()
        return dn

    def add_to(self, gram: GramSum, scratch_bytes: int) -> None:
        """Weight and bias."""
        self.weights.add_to(gram)
        self.biases.add_to(gram)


class LayerNormInterceptor(NormInterceptor):
    """torch.nn.LayerNorm over the last dimension, with a weight."""

    def normalised(self, x: Tensor) -> Tensor:
        """(x - mean) / deviation."""
        n = functional.layer_norm(x.to(tile_dtype(x.dtype)), self.module.normalized_shape, eps=self.module.eps)
        return n.to(x.dtype)


class RMSNormInterceptor(NormInterceptor):
    """Any RMSNorm: weight * x / rms(x)."""

    def normalised(self, x: Tensor) -> Tensor:
        """x / rms(x)."""
        wide = x.to(tile_dtype(x.dtype))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _epsilon(self.module))).to(x.dtype)


def _epsilon(module: Any) -> float:
    """What is added to the mean square, whatever its name."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return float(torch.finfo(module.weight.dtype).eps)  # torch.nn.RMSNorm's, if none is given


def _is_rms_norm(module: nn.Module) -> bool:
    """Whether a module is an RMSNorm: one 1-D weight, and the values of its formula on some input. (A variant that
    scales by 1 + weight, or subtracts a mean, is none.)"""
    named = dict(module.named_parameters())
    if "norm" not in type(module).__name__.lower() or set(named) != {"weight"} or named["weight"].dim() != 1:
        return False
    weight = named["weight"]
    ramp = torch.arange(1, weight.shape[0] + 1, dtype=torch.float32, device=weight.device)
    x = torch.stack([ramp.cos(), 1 + (2 * ramp).sin()]).to(weight.dtype)[None]  # [1, 2, d]
    with torch.no_grad():
        # Without hooks: they run around an interceptor too.
        ours, theirs = RMSNormInterceptor("", module, Tape(0)).forward(x), module.forward(x)
    tolerance = 1e-5 if tile_dtype(weight.dtype) == weight.dtype else 2e-2
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def _is_layer_norm(module: Any) -> bool:
    plain = is_plain(module, nn.LayerNorm) and has_own_weights(module)
    return plain and module.weight is not None and len(module.normalized_shape) == 1


def _is_conv1d(module: nn.Module) -> bool:
    return is_conv1d(module) and "forward" not in vars(module) and has_own_weights(module)


def _is_linear(module: nn.Module) -> bool:
    return is_plain(module, nn.Linear) and has_own_weights(module)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of a class and runs that class's own forward."""
    return isinstance(module, kind) and type(module).forward is kind.forward and "forward" not in vars(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is GPT-2's Conv1D. By name: transformers is not imported for it."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _weights(module: nn.Module) -> list[Any]:
    return [getattr(module, name, None) for name in ("weight", "bias")]


def has_own_weights(module: nn.Module) -> bool:
    """Whether a module's parameters are a weight, a bias or both, neither of them computed from others, as by a
    parametrization, weight_norm or spectral_norm."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return own <= {"weight", "bias"} and all(w is None or isinstance(w, nn.Parameter) for w in _weights(module))


def described(module: nn.Module) -> str:
    """A module's class, and what keeps its gradient from being that of its class."""
    kind = type(module).__name__
    if any(isinstance(w, Tensor) and not isinstance(w, nn.Parameter) for w in _weights(module)):
        return f"{kind}, whose weight is computed from other parameters, as by a parametrization or weight_norm"
    return f"{kind}, whose forward was replaced" if "forward" in vars(module) else kind


def check_gradient_hooks(op: str, parameters: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
    """Raises ValueError where hooks change the gradients of parameters behind what computes them here."""
    for name, parameter in parameters.items():
        if parameter._backward_hooks:
            raise ValueError(
                f"{op}: {name} has a hook on its gradient (Tensor.register_hook), which acts on whole gradients and "
                "not on those of rollouts; remove it"
            )
    for name, module in modules.items():
        if module._backward_hooks and not module._is_full_backward_hook:
            raise ValueError(
                f"{op}: {name or 'the model'} has a backward hook of the old kind; use register_full_backward_hook"
            )


Maker = Callable[[str, nn.Module, Tape], Interceptor]
_REGISTRY: list[tuple[Callable[[nn.Module], bool], Maker]] = []


def register_interceptor(
    kind: type[nn.Module] | Callable[[nn.Module], bool],
) -> Callable[[Maker], Maker]:
    """Decorator: an Interceptor for modules of a class (with that class's own forward), or for those that a function
    says True for. What was registered last is asked first.

    Example:
        >>> @fa.gradproj.register_interceptor(MyScale)
        ... class MyScaleInterceptor(fa.gradproj.Interceptor): ...
    """

    if not callable(kind) or (isinstance(kind, type) and not issubclass(kind, nn.Module)):
        raise TypeError(f"register_interceptor: kind is {kind!r}; pass a class of modules, or a function of a module")

    def matches(module: nn.Module) -> bool:
        return is_plain(module, kind) if isinstance(kind, type) else kind(module)

    def register(maker: Maker) -> Maker:
        _REGISTRY.insert(0, (matches, maker))
        return maker

    return register


register_interceptor(_is_rms_norm)(RMSNormInterceptor)
register_interceptor(_is_layer_norm)(LayerNormInterceptor)
register_interceptor(_is_conv1d)(Conv1DInterceptor)
register_interceptor(_is_linear)(LinearInterceptor)


def interceptor(name: str, module: nn.Module, tape: Tape) -> Interceptor | None:
    """The interceptor of a module; None where there is none for its kind."""
    return next((maker(name, module, tape) for matches, maker in _REGISTRY if matches(module)), None)
