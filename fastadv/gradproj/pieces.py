"""How the gradients of a module's own parameters come about, in pieces; and modules whose forward is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastadv.gradproj.interceptors import has_own_weights, is_conv1d


class Watch:
    """A module's forward that a collector looks at: inside of all hooks, so that what they change is none of it."""

    def __init__(self, module: Any, look: Callable[[Any, Any], None]) -> None:
        self.module, self.look, self.forward = module, look, module.forward
        self.before, self.off = vars(module).get("forward"), False
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        output = self.forward(*args, **kwargs)
        if torch.is_grad_enabled() and not self.off:
            self.look(args[0] if args else next(iter(kwargs.values())), output)
        return output

    def remove(self) -> None:
        """Puts back what was there, unless something has been put around it since."""
        self.off = True
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self.before is not None:
                self.module.forward = self.before


def unwatched(module: nn.Module) -> Any:
    """A module's forward that nobody watches."""
    forward: Any = module.forward
    while isinstance(forward, Watch):
        forward = forward.forward
    return forward


class Piece(NamedTuple):
    """Some rows of a parameter's gradient."""

    parameter: str  # "weight" or "bias"
    row: int  # the first of them
    values: Tensor  # [rows, columns], or [n] of a parameter with one dimension


# Of a module, its input and the gradient of its output, both of one rollout: the gradient of its parameters, in pieces
# of about so many elements.
Pieces = Callable[[nn.Module, Tensor, Tensor, int], Iterator[Piece]]


def _products(left: Tensor, right: Tensor, limit: int) -> Iterator[Piece]:
    """left^T right, [n, rows] and [n, columns]."""
    rows = max(1, limit // right.shape[1])
    for row in range(0, left.shape[1], rows):
        yield Piece("weight", row, left[:, row : row + rows].T @ right)


def _linear(module: nn.Module, x: Tensor, dy: Tensor, limit: int) -> Iterator[Piece]:
    x, dy = x.flatten(0, -2).to(dy.dtype), dy.flatten(0, -2)  # [n, d_in], [n, d_out]
    yield from _products(dy, x, limit)
    yield Piece("bias", 0, dy.sum(0))


def _conv1d(module: nn.Module, x: Tensor, dy: Tensor, limit: int) -> Iterator[Piece]:
    """GPT-2's Linear, whose weight is [d_in, d_out]."""
    x, dy = x.flatten(0, -2).to(dy.dtype), dy.flatten(0, -2)
    yield from _products(x, dy, limit)
    yield Piece("bias", 0, dy.sum(0))


def _embedding(module: nn.Module, ids: Tensor, dy: Tensor, limit: int) -> Iterator[Piece]:
    assert isinstance(module, nn.Embedding)
    ids, dy = ids.flatten(), dy.flatten(0, -2)  # [n], [n, d]
    if module.padding_idx is not None:
        ids, dy = ids[ids != module.padding_idx], dy[ids != module.padding_idx]
    rows = max(1, limit // dy.shape[1])
    for tile in sorted(set((ids // rows).tolist())):  # most of a vocabulary is in no rollout
        inside = ids // rows == tile
        height = min(rows, module.num_embeddings - tile * rows)
        sums = dy.new_zeros(height, dy.shape[1])
        yield Piece("weight", tile * rows, sums.index_add_(0, ids[inside] - tile * rows, dy[inside]))


def _norm(module: nn.Module, x: Tensor, dy: Tensor, limit: int) -> Iterator[Piece]:
    x = x.to(dy.dtype)
    if isinstance(module, nn.LayerNorm):
        normalised = nn.functional.layer_norm(x, module.normalized_shape, eps=module.eps)
    else:
        assert isinstance(module, nn.RMSNorm)
        normalised = nn.functional.rms_norm(x, module.normalized_shape, eps=module.eps)
    yield Piece("weight", 0, (dy * normalised).flatten(0, -2).sum(0))
    yield Piece("bias", 0, dy.flatten(0, -2).sum(0))


class _Bare(nn.Module):
    """A module's forward without its hooks and collectors, which have seen the pass already."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return unwatched(self.module)(x)


def _scale(module: nn.Module, x: Tensor, dy: Tensor, limit: int) -> Iterator[Piece]:
    """A norm with a formula of its own: it runs again with a weight for each token, whose gradients are summed."""
    weight = module.get_parameter("weight").detach()
    each = weight.expand(*x.shape[:-1], -1).clone().requires_grad_()
    with torch.enable_grad():
        y = torch.func.functional_call(_Bare(module), {"module.weight": each}, (x,))
        (gradient,) = torch.autograd.grad(y, each, dy.to(y.dtype))
    yield Piece("weight", 0, gradient.to(dy.dtype).flatten(0, -2).sum(0))


def way_of(module: nn.Module) -> Pieces | None:
    """How the gradients of a module's own parameters come about; None: not known."""
    forward, kind = getattr(unwatched(module), "__func__", None), type(module).__name__
    if not has_own_weights(module):
        return None
    if forward is nn.Linear.forward:
        return _linear
    if forward is nn.Embedding.forward:
        plain = module.max_norm is None and not module.scale_grad_by_freq
        return _embedding if plain else None
    if forward in (nn.LayerNorm.forward, nn.RMSNorm.forward):
        return _norm if len(module.normalized_shape) == 1 else None  # type: ignore[arg-type]
    own = {name: p.dim() for name, p in module.named_parameters(recurse=False)}
    if kind.endswith("RMSNorm") and own == {"weight": 1}:
        return _scale
    return _conv1d if is_conv1d(module) and forward is type(module).forward else None
