"""flash-attn's attention of variable length in place of the library's own: on a GPU, where it is installed.

Rollouts lie one behind the other without padding, and the backward of a stream is on its live rows. A kernel of
flash-attn takes a block of one rollout's queries over that rollout's keys, in tiles whose size and order depend on
nothing else: a forward has the same bits whatever lies beside it. Its deterministic backward adds dQ up in as many
float32 sums as rollouts and heads leave multiprocessors for, so there mates can move the last bits, and no more.
`check_batch_mates` looks at both on the card that is there.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fastadv import validation
from fastadv.dispatch import BackendUnavailableError
from fastadv.gradproj import attention
from fastadv.gradproj.interceptors import Tape
from fastadv.gradproj.streams import Packed

OP = "segment_gram"
NAME = "fastadv_varlen"  # in transformers' registry, which takes names with "flash" in them for its own
CHOICES = ("auto", "blocks", "flash")
DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)
HEAD_SIZE = 256
OPTIONS = ("deterministic", "softmax_scale", "window_size")  # of its function, that are passed here
# Largest difference of a rollout's attention beside others and alone, in roundings of the dtype.
BATCH_MATE_ROUNDINGS = 4


@dataclass(frozen=True)
class Choice:
    """The attention that a pass runs, and why not the other."""

    name: str  # "blocks" or "flash"
    why: str


def choose(name: str, model: nn.Module) -> Choice:
    """The attention of this name on this model. "auto" is flash-attn's where that runs, else the library's own, with a
    warning where flash-attn is installed and broken.

    Raises:
        ValueError: a name that is none.
        BackendUnavailableError: "flash" where it cannot run.
    """
    validation.choice(OP, "attention", name, CHOICES)
    if name == "blocks":
        return Choice("blocks", "asked for by name")
    why = _why_not(model)
    if why is None:
        return Choice("flash", "asked for by name" if name == "flash" else "the model and this machine allow it")
    if name == "flash":
        raise BackendUnavailableError(f"{OP}: attention 'flash' cannot run: {why}; 'blocks' runs everywhere")
    return Choice("blocks", f"flash cannot run: {why}")


def _why_not(model: nn.Module) -> str | None:
    """Why flash-attn cannot run a model. It is imported only where all else that it needs is there."""
    weight = next(model.parameters())
    if weight.device.type not in DEVICES:
        return f"the model is on {weight.device}, and flash-attn runs on CUDA devices; move it to one"
    if weight.dtype not in DTYPES:
        return f"the model is {weight.dtype}, and flash-attn takes bfloat16 and float16; convert it"
    if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) < CAPABILITY:
        return "the card is older than flash-attn 2 runs on (Ampere)"
    _, _, size = _heads(model)
    if size > HEAD_SIZE:
        return f"heads have {size} numbers, and flash-attn takes {HEAD_SIZE} at most"
    found = _varlen()
    if isinstance(found, str):
        return found
    return None


@cache
def _varlen() -> Callable[..., Tensor] | str:
    """flash-attn's function, or why there is none. A package that is there and broken is warned of, once."""
    get = "pip install 'fastadv[flash]' on a machine with a CUDA compiler"
    try:
        function: Callable[..., Tensor] = importlib.import_module("flash_attn").flash_attn_varlen_func
    except ModuleNotFoundError as error:
        if error.name == "flash_attn":
            return f"flash-attn is not installed; {get}"
        return _broken(error)
    except Exception as error:  # built for another torch, compiler or card: whatever its import raises
        return _broken(error)
    absent = [name for name in OPTIONS if name not in inspect.signature(function).parameters]
    if absent:
        return f"flash-attn is too old, its flash_attn_varlen_func has no {', '.join(absent)}; {get}"
    return function


def _broken(error: Exception) -> str:
    why = f"flash-attn is installed and does not load ({type(error).__name__}: {error})"
    warnings.warn(f"{OP}: {why}; build it again for this torch", RuntimeWarning, stacklevel=2)
    return f"{why}; build it again for this torch"


def _heads(model: nn.Module) -> tuple[int, int, int]:
    """Query heads, key heads, and the numbers of one."""
    config: Any = model.config
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    return heads, keys, getattr(config, "head_dim", None) or config.hidden_size // heads


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, with transformers' arguments; see `attention.attention`.

    Raises:
        ValueError: a mask that is more than causal with the layer's own sliding window, or another option that changes
            the result.
    """
    attention.check_options(module, options)
    window = options.get("sliding_window")
    if attention_mask is not None and window is None:
        raise ValueError(
            f"{OP}: {type(module).__name__} attends with a mask that is more than causal, which flash-attn cannot "
            "take; pass attention='blocks'"
        )
    y: Tensor = _Attention.apply(query, key, value, scaling, window, attention.TAPE.get())  # type: ignore[no-untyped-call]
    return y, None


def _run(qkv: Sequence[Tensor], packed: Packed, scale: float | None, window: int | None) -> Tensor:
    """`[n, H, D]` of packed rows, with a graph."""
    varlen, longest = _varlen(), max(packed.lengths)
    assert callable(varlen)
    return varlen(
        *qkv, packed.ends, packed.ends, longest, longest, dropout_p=0.0, softmax_scale=scale, causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0), deterministic=True,
    )  # fmt: skip


def _gradients(
    qkv: Sequence[Tensor], dy: Tensor, packed: Packed, scale: float | None, window: int | None
) -> tuple[Tensor, ...]:
    """dq, dk and dv of packed rows."""
    leaves = [t.detach().requires_grad_() for t in qkv]
    with torch.enable_grad():
        y = _run(leaves, packed, scale, window)
    return torch.autograd.grad(y, leaves, dy)


def _packed(qkv: Sequence[Tensor], packed: Packed) -> list[Tensor]:
    """Rows `[n, H, D]` of `[b, H, T, D]`."""
    return [packed.gather(t.transpose(1, 2).flatten(0, 1)).contiguous() for t in qkv]


class _Attention(torch.autograd.Function):
    """Keeps no result: a stream's backward runs the forward again on its live rows, which are fewer."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, tape: Tape
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.how, ctx.tape = (scale, window), tape
        assert tape.micro_batch is not None
        packed = tape.micro_batch.whole
        y = _run(_packed((q, k, v), packed), packed, scale, window)
        b, heads, width, size = q.shape
        return packed.spread(y, b * width).view(b, width, heads, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), packed = gradients, ctx.tape.stream
        b, width = dy.shape[:2]
        live = packed.gather(dy.flatten(0, 1)).contiguous()
        found = _gradients(_packed(ctx.saved_tensors, packed), live, packed, *ctx.how)
        spread = [packed.spread(t, b * width).unflatten(0, (b, width)).transpose(1, 2) for t in found]
        return *spread, None, None, None


def check_batch_mates(model: nn.Module, packed: Packed) -> None:
    """Raises ValueError unless the last rollout's attention and its gradients beside the others are what they are
    alone, on random numbers, up to BATCH_MATE_ROUNDINGS."""
    weight, (heads, keys, size) = next(model.parameters()), _heads(model)
    generator = torch.Generator(weight.device).manual_seed(0)
    q, k, v, dy = (
        torch.randn(packed.rows, h, size, generator=generator, device=weight.device).to(weight.dtype)
        for h in (heads, keys, keys, heads)
    )
    length = packed.lengths[-1]
    last = slice(packed.rows - length, None)
    alone = Packed(None, [length], torch.tensor([0, length], dtype=torch.int32, device=weight.device))

    def results(part: slice, rows: Packed) -> list[Tensor]:
        given = [t[part] for t in (q, k, v)]
        with torch.no_grad():
            y = _run(given, rows, None, None)
        return [t.double() for t in (y, *_gradients(given, dy[part], rows, None, None))]

    beside, by_itself = results(slice(None), packed), results(last, alone)
    largest = max(float(t.abs().max()) for t in by_itself)
    tolerance = BATCH_MATE_ROUNDINGS * torch.finfo(weight.dtype).eps
    for name, one, other in zip(("output", "dq", "dk", "dv"), beside, by_itself, strict=True):
        difference = float((one[last] - other).abs().max()) / largest
        if not difference <= tolerance:
            raise ValueError(
                f"{OP}: flash-attn's {name} of a rollout beside others differs by {difference:.1e} of the largest "
                f"value from that alone (more than {tolerance:.0e}): pass attention='blocks'"
            )
