"""Log-probability of each label, entropy and sum of squared probabilities from logits, in one read of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastadv import dispatch, native, validation
from fastadv.ops import _label_arguments as arguments
from fastadv.ops import _logits
from fastadv.ops._logits import LEADING_DIMS
from fastadv.ops._register import first_order, native_op
from fastadv.reference import token_log_probs as reference


class TokenLogProbs(NamedTuple):
    """Shaped like the labels; float32, float64 for float64 logits. What was not asked for is None."""

    log_probs: Tensor
    entropy: Tensor | None
    sum_p2: Tensor | None


# ---- the kernels -----------------------------------------------------------------------------------------------------


def _fake(
    backend: str,
    logits: Tensor,
    labels: Tensor,
    inverse_temperatures: Tensor | None,
    inverse_temperature: float,
    softcap: float,
    moments: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = labels.shape if moments else (0,)
    state = logits.new_empty((3 if moments else 1, labels.numel()), dtype=torch.float64)
    log_probs, entropy, sum_p2 = (logits.new_empty(s, dtype=torch.float32) for s in (labels.shape, shape, shape))
    return log_probs, entropy, sum_p2, state


def _fake_gradient(
    backend: str,
    logits: Tensor,
    labels: Tensor,
    inverse_temperatures: Tensor | None,
    inverse_temperature: float,
    softcap: float,
    state: Tensor,
    g_log_probs: Tensor | None,
    g_entropy: Tensor | None,
    g_sum_p2: Tensor | None,
) -> Tensor:
    return logits.new_empty(logits.shape)


@native_op("token_log_probs_backward", _fake_gradient)
def _launch_gradient(
    backend: str,
    logits: Tensor,
    labels: Tensor,
    inverse_temperatures: Tensor | None,
    inverse_temperature: float,
    softcap: float,
    state: Tensor,
    g_log_probs: Tensor | None,
    g_entropy: Tensor | None,
    g_sum_p2: Tensor | None,
) -> Tensor:
    inverse = inverse_temperature if inverse_temperatures is None else inverse_temperatures
    out = native.empty(logits.shape, logits.dtype, logits.device)
    upstream = (g_log_probs, g_entropy, g_sum_p2)
    return _logits.logits_gradient(backend, logits, labels, *_parts(state), *upstream, inverse, softcap, out=out)


def _parts(state: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return (state[0], state[1], state[2]) if state.shape[0] == 3 else (state[0], None, None)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.backend, logits, labels, inverse_temperatures, ctx.inverse_temperature, ctx.softcap, ctx.moments = inputs
    ctx.save_for_backward(logits, labels, inverse_temperatures, output[3])


def _backward(ctx: Any, g_log_probs: Tensor, g_entropy: Tensor, g_sum_p2: Tensor, g_state: Tensor) -> tuple[Any, ...]:
    logits, labels, inverse_temperatures, state = ctx.saved_tensors
    upstream = (g_log_probs, g_entropy, g_sum_p2) if ctx.moments else (g_log_probs, None, None)
    scaling = (inverse_temperatures, ctx.inverse_temperature, ctx.softcap)
    gradient = _launch_gradient(ctx.backend, logits, labels, *scaling, state, *upstream)
    return None, gradient, None, None, None, None, None


@native_op("token_log_probs", _fake, autograd=(_backward, _setup_context))
def _launch(
    backend: str,
    logits: Tensor,
    labels: Tensor,
    inverse_temperatures: Tensor | None,
    inverse_temperature: float,
    softcap: float,
    moments: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inverse = inverse_temperature if inverse_temperatures is None else inverse_temperatures
    return _logits.log_probs(backend, logits, labels, inverse, softcap, moments)


class _TokenLogProbs(torch.autograd.Function):
    """Saves the logits and three numbers a row; the backward reads the logits again."""

    @staticmethod
    def forward(ctx: Any, backend: str, logits: Tensor, rest: tuple[Any, ...], in_place: bool) -> tuple[Tensor, ...]:
        labels, inverse_temperatures, *ctx.numbers, moments = rest
        log_probs, entropy, sum_p2, state = _launch(backend, logits, *rest)
        ctx.save_for_backward(logits, labels, *validation.saveable(inverse_temperatures), state)
        ctx.in_place, ctx.backend = in_place, backend
        ctx.set_materialize_grads(False)
        return (log_probs, entropy, sum_p2) if moments else (log_probs,)

    @staticmethod
    @first_order("token_log_probs")
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[None, Tensor | None, None, None]:
        logits, labels, inverse_temperatures, state = ctx.saved_tensors  # raises where the logits were overwritten
        inverse_temperature, softcap = ctx.numbers
        given = g_log_probs, g_entropy, g_sum_p2 = (*upstream, None, None)[:3]
        if all(g is None for g in given):
            return None, None, None, None
        if not ctx.in_place:
            scaling = (inverse_temperatures, inverse_temperature, softcap)
            return None, _launch_gradient(ctx.backend, logits, labels, *scaling, state, *given), None, None
        inverse = inverse_temperature if inverse_temperatures is None else inverse_temperatures
        gradient = logits.detach()
        _logits.logits_gradient(
            ctx.backend, logits, labels, *_parts(state), g_log_probs, g_entropy, g_sum_p2, inverse, softcap,
            out=gradient,
        )  # fmt: skip
        torch.autograd.graph.increment_version(logits)
        return None, gradient, None, None


def _may_overlap(t: Tensor) -> bool:
    """Whether elements share memory, or lie interleaved in a way that only a search could tell from that."""
    reach = 0  # from an element to the last one that smaller strides lead to
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride <= reach:
            return t.numel() > 0
        reach += stride * (size - 1)
    return False


# ---- the public op ---------------------------------------------------------------------------------------------------


def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = None,
    return_entropy: bool = False,
    return_sum_p2: bool = False,
    inplace_backward: bool = False,
    backend: str = "auto",
) -> TokenLogProbs:
    """Log-probability of each label under softmax(logits), with entropy and sum of squared probabilities.

    One read of the logits, no other memory of their size; the gradient is one tensor like them, written once. All three
    results are differentiable.

    A logit of -inf is a token of probability exactly 0: it adds 0 to every result and its gradient is 0. If it is the
    label's, the log-prob is -inf, and the gradient of that log-prob is -p at every finite logit and 0 at those of -inf.
    A row in which all logits are -inf, or one is NaN, gives NaN.

    Args:
        logits: `[N, V]`, `[B, T, V]` or any leading shape; float32, bfloat16 or float16 (native), float64 (reference);
            any strides.
        labels: int32 or int64, shaped like logits without the last dimension.
        mask: like labels, bool, integer or whole-valued float: where it is 0 the row is not read, its results and its
            gradient are exactly 0, whatever lies there, the label too.
        temperature: the softmax is of logits / temperature, after conversion to float32; a positive number, or a
            tensor like labels, without gradient.
        softcap: logits become softcap * tanh(logits / softcap), before the temperature; -inf stays -inf. None: none.
        ignore_index: a label that is treated as mask 0. None: there is none; a negative label is then an error, not a
            column counted from the end.
        return_entropy: also -sum p log p.
        return_sum_p2: also sum p^2, which the optimal token baseline needs.
        inplace_backward: the backward writes the gradient over the logits, which then are no logits any more: autograd
            raises where they, or this graph, are used for a gradient again. Without effect on the reference and under
            torch.compile.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        TokenLogProbs(log_probs, entropy, sum_p2), each like labels, None where not asked for; float32 (float64 for
        float64 logits). log_probs are at most 0. A row's results do not depend on the other rows, to the bit.

    Raises:
        ValueError: a label outside of [0, V) that neither the mask nor ignore_index excludes (under torch.compile, and
            on a GPU without `fa.checks("on")`, NaN instead); shapes that do not fit; a temperature or softcap that is
            not positive and finite; a fractional mask value; inplace_backward for logits whose elements share memory
            (expanded, unfolded).
        TypeError: an argument of another type or dtype.

    Source: docs/ops/token_log_probs.md. The reading of blocks is the online softmax (Milakov and Gimelshein 2018).
    """
    op = "token_log_probs"
    validation.tensor(op, "logits", logits, dtypes=validation.FLOATS)
    if not 1 <= logits.dim() <= LEADING_DIMS + 1 or logits.shape[-1] == 0:
        raise ValueError(
            f"{op}: logits has shape {list(logits.shape)}; pass [..., V] with V of at least 1 and at most "
            f"{LEADING_DIMS} leading dimensions"
        )
    shape, vocab, device = tuple(logits.shape[:-1]), logits.shape[-1], logits.device
    validation.tensor(op, "labels", labels, shape=shape, dtypes=(torch.int32, torch.int64), device=device)
    if mask is not None:
        dtypes = (torch.bool, *validation.INTEGERS, *validation.FLOATS)
        validation.tensor(op, "mask", mask, shape=shape, dtypes=dtypes, device=device)
        validation.mask_values(op, "mask", mask)
    if softcap is not None:
        arguments.positive(op, "softcap", softcap)
    if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, int)):
        raise TypeError(f"{op}: ignore_index is a {type(ignore_index).__name__}; pass an integer or None")
    if inplace_backward and _may_overlap(logits):
        raise ValueError(
            f"{op}: inplace_backward is set, but elements of logits share memory (strides {logits.stride()} for shape "
            f"{list(logits.shape)}, as of an expanded tensor); pass logits.contiguous()"
        )

    reads = arguments.rows_read(labels, mask, ignore_index)
    codes = arguments.codes(op, labels, reads, vocab, ignore_index)
    if isinstance(temperature, Tensor):
        temperature = arguments.temperatures(op, temperature, reads, shape, device)
    else:
        arguments.positive(op, "temperature", temperature)

    moments = return_entropy or return_sum_p2
    name = dispatch.resolve(op, backend, logits)
    if name == "reference":
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        if reads is None:
            reads = torch.ones_like(labels, dtype=torch.bool)
        if isinstance(temperature, Tensor):
            temperature = temperature.to(dtype)
        results: tuple[Tensor, ...] = reference.token_log_probs(
            logits.to(dtype), labels.to(torch.int64), reads, temperature, softcap
        )
    else:
        inverse = (1 / temperature, 1.0) if isinstance(temperature, Tensor) else (None, 1 / temperature)
        rest = (codes, *inverse, float(softcap or 0.0), moments)
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and logits.requires_grad):
            results = _launch(name, logits, *rest)
        else:
            results = _TokenLogProbs.apply(name, logits, rest, inplace_backward)  # type: ignore[no-untyped-call]
    return TokenLogProbs(results[0], results[1] if return_entropy else None, results[2] if return_sum_p2 else None)
