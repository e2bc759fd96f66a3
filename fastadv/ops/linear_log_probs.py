"""Log-probs of labels from hidden states and an output layer, without the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastadv import dispatch, validation
from fastadv.ops import _label_arguments as label_arguments
from fastadv.ops import _logits
from fastadv.ops._linear import Gradients, Head
from fastadv.ops._logits import NO_LABEL, SKIPPED
from fastadv.ops._register import first_order, native_op, needs_dispatcher
from fastadv.ops._vocab_parts import VocabParts
from fastadv.ops.token_log_probs import TokenLogProbs
from fastadv.reference import linear_log_probs as reference
from fastadv.token_index import TokenIndex

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Inputs(NamedTuple):
    """Tensors beside hidden, weight and bias, checked, as the registered op takes them; None where there is none."""

    codes: Tensor  # int64, like a token: the label, SKIPPED or INVALID of fastadv.ops._logits
    inverse_temperatures: Tensor | None  # float64, like codes
    positions: Tensor | None  # int64: tokens that are computed, of an index object, or read off the codes


class Numbers(NamedTuple):
    """Numbers that say what is computed, as the registered op takes them."""

    inverse_temperature: float  # where there is no tensor of them
    softcap: float  # 0: none
    vocab_start: float
    chunk: float  # rows; 0: as many as pay
    deterministic: float


class Arguments(NamedTuple):
    """Checked arguments of an op on an output layer, and the backend that runs it."""

    backend: str
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    inputs: Inputs
    numbers: Numbers
    parts: VocabParts | None

    @property
    def layer(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What gradients flow to."""
        return self.hidden, self.weight, self.bias

    @property
    def registered(self) -> bool:
        """Whether the registered op has to run: a graph is traced, or a dispatch mode looks on."""
        return torch.compiler.is_compiling() or needs_dispatcher((*self.layer, *self.inputs))

    @property
    def needs_gradient(self) -> bool:
        """Whether a graph has to be built."""
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in self.layer)


# ---- the native op ---------------------------------------------------------------------------------------------------


def counted_rows(inputs: Inputs) -> Tensor:
    """Tokens that are computed, `[L]` int64, counted through all dimensions of the labels. Waits for a GPU where no
    index tells."""
    if inputs.positions is not None:
        return inputs.positions
    return (inputs.codes.view(-1) != SKIPPED).nonzero().flatten()


def may_wait(backend: str, inputs: Inputs) -> bool:
    """Whether the host may ask how many of the rows need gradients: not where an index was given to save it from
    waiting for a GPU. Rows without one are then multiplied as zeros."""
    return backend == "cpu" or inputs.positions is None


def head_of(
    backend: str,
    layer: tuple[Tensor, Tensor, Tensor | None],
    inputs: Inputs,
    numbers: Numbers,
    rows: Tensor,
    parts: VocabParts | None = None,
) -> Head:
    """The output layer over these tokens."""
    labels = inputs.codes.view(-1)[rows]
    if parts is not None:
        here = labels - int(numbers.vocab_start)
        elsewhere = (labels >= 0) & ((here < 0) | (here >= layer[1].shape[0]))
        labels = torch.where(elsewhere, NO_LABEL, torch.where(labels >= 0, here, labels))
    factor: float | Tensor = numbers.inverse_temperature
    if inputs.inverse_temperatures is not None:
        factor = inputs.inverse_temperatures.view(-1)[rows]
    options = (numbers.softcap, int(numbers.chunk), bool(numbers.deterministic))
    return Head(backend, *layer, rows, labels, factor, *options)


@torch.no_grad()
def forward(
    backend: str,
    layer: tuple[Tensor, Tensor, Tensor | None],
    inputs: Inputs,
    numbers: Numbers,
    parts: VocabParts | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob, entropy, sum of squares (float32, like labels; 0 where nothing counts) and the state that the gradient
    needs: `[3, N]` float64, log of the sum of exponentials, entropy, sum of squares."""
    rows, device = counted_rows(inputs), inputs.codes.device
    head = head_of(backend, layer, inputs, numbers, rows, parts)
    statistics = torch.empty((5, rows.shape[0]), dtype=torch.float64, device=device)
    for take in head.chunks():
        head.load(take)
        statistics[:, take] = head.statistics()
    if parts is not None:
        statistics = parts.gather(statistics)
    results = _logits.finish(backend, statistics)
    outputs = []
    for values in (results.log_prob, results.entropy, results.sum_p2):
        out = torch.zeros(inputs.codes.shape, dtype=torch.float32, device=device)
        # What an index counts may still have a label that is ignored.
        out.view(-1)[rows] = values.to(torch.float32).masked_fill_(head.labels == SKIPPED, 0)
        outputs.append(out)
    state = torch.zeros((3, inputs.codes.numel()), dtype=torch.float64, device=device)
    state[:, rows] = torch.stack([results.lse, results.entropy, results.sum_p2])
    return outputs[0], outputs[1], outputs[2], state


@torch.no_grad()
def backward(
    backend: str,
    layer: tuple[Tensor, Tensor, Tensor | None],
    inputs: Inputs,
    numbers: Numbers,
    state: Tensor,
    upstream: Sequence[Tensor | None],
    needs: Sequence[bool],
    parts: VocabParts | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, where `needs` says. Computes the logits of the rows again that have an
    upstream gradient other than 0, and no others where the host may wait."""
    hidden, weight, _ = layer
    rows = counted_rows(inputs)
    flat = [None if g is None else g.reshape(-1)[rows] for g in upstream]
    flows = torch.zeros_like(rows, dtype=torch.bool)
    for g in flat:
        if g is not None:
            flows |= g != 0
    head = head_of(backend, layer, inputs, numbers, rows, parts)
    flows &= head.labels != SKIPPED
    sums = Gradients.of(backend, hidden, weight, needs)
    if parts is not None and sums.hidden is not None:
        sums.hidden = sums.hidden.to(torch.float32)
    chosen = state[:, rows]
    waits = may_wait(backend, inputs)
    for take in head.chunks(flows.nonzero().flatten() if waits else None):
        head.load(take)
        if not waits:
            head.silence(flows[take])
        head.backward(chosen, flat, sums)
    del head  # its buffers are free before weight gradients in low precision are copied
    if parts is not None and sums.hidden is not None:
        parts.add_up(sums.hidden, rows)
        sums.hidden = sums.hidden.to(hidden.dtype)
    return sums.finished(hidden, weight)


def _fake(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    codes: Tensor,
    inverse_temperatures: Tensor | None,
    positions: Tensor | None,
    numbers: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_probs, entropy, sum_p2 = (codes.new_empty(codes.shape, dtype=torch.float32) for _ in range(3))
    return log_probs, entropy, sum_p2, codes.new_empty((3, codes.numel()), dtype=torch.float64)


def _fake_backward(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    codes: Tensor,
    inverse_temperatures: Tensor | None,
    positions: Tensor | None,
    numbers: list[float],
    state: Tensor,
    upstream: list[Tensor | None],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    d_hidden, d_weight, d_bias = (
        t.new_empty(t.shape if needed and t is not None else (0,)) if t is not None else weight.new_empty(0)
        for t, needed in zip((hidden, weight, bias), needs, strict=True)
    )
    return d_hidden, d_weight, d_bias


@native_op("linear_log_probs_backward", _fake_backward)
def _launch_backward(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    codes: Tensor,
    inverse_temperatures: Tensor | None,
    positions: Tensor | None,
    numbers: list[float],
    state: Tensor,
    upstream: list[Tensor | None],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(codes, inverse_temperatures, positions)
    found = backward(backend, (hidden, weight, bias), inputs, Numbers(*numbers), state, upstream, needs)
    d_hidden, d_weight, d_bias = (weight.new_empty(0) if g is None else g for g in found)
    return d_hidden, d_weight, d_bias


def _registered_backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    hidden, weight, bias, state, *inputs = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[1:4])
    found = _launch_backward(
        ctx.backend, hidden, weight, bias, *inputs, ctx.numbers, state, list(upstream[:3]), needs
    )  # fmt: skip
    return (None, *(g if needed else None for g, needed in zip(found, needs, strict=True)), None, None, None, None)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.backend, hidden, weight, bias, *tensors, ctx.numbers = inputs
    ctx.save_for_backward(hidden, weight, bias, output[3], *tensors)
    ctx.set_materialize_grads(False)  # an entropy that nothing flows from is another sum than one of zeros


@native_op("linear_log_probs", _fake, autograd=(_registered_backward, _setup_context))
def _launch(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    codes: Tensor,
    inverse_temperatures: Tensor | None,
    positions: Tensor | None,
    numbers: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = Inputs(codes, inverse_temperatures, positions)
    return forward(backend, (hidden, weight, bias), inputs, Numbers(*numbers))


class _LinearLogProbs(torch.autograd.Function):
    """Keeps three numbers a token for the backward, which computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: str,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: Inputs,
        numbers: Numbers,
        parts: VocabParts | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_prob, entropy, sum_p2, state = forward(backend, (hidden, weight, bias), inputs, numbers, parts)
        ctx.save_for_backward(*validation.saveable(hidden, weight, bias, state, *inputs))
        ctx.backend, ctx.numbers, ctx.parts = backend, numbers, parts
        ctx.set_materialize_grads(False)
        return log_prob, entropy, sum_p2

    @staticmethod
    @first_order("linear_log_probs")
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, state, *inputs = ctx.saved_tensors
        d_hidden, d_weight, d_bias = backward(
            ctx.backend, (hidden, weight, bias), Inputs(*inputs), ctx.numbers, state, upstream,
            ctx.needs_input_grad[1:4], ctx.parts,
        )  # fmt: skip
        return None, d_hidden, d_weight, d_bias, None, None, None


# ---- the public op ---------------------------------------------------------------------------------------------------


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | TokenIndex | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = None,
    vocab_start: int = 0,
    vocab_group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    return_entropy: bool = False,
    return_sum_p2: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> TokenLogProbs:
    """Log-probability of each label under softmax(softcap(hidden @ weight.T + bias) / temperature), in chunks of rows.

    Tokens outside the mask cost nothing and come out as 0; the backward also passes over every token whose upstream
    gradients are all 0. Gradients flow to hidden, weight and bias, from every output; only those that are needed are
    computed.

    Args:
        hidden: `[N, H]` or `[B, T, H]`, float32, bfloat16 or float16 (native), float64 (reference), any strides.
        weight: `[V, H]` in the dtype of hidden, any strides.
        labels: `[N]` or `[B, T]` int32 or int64, the token that each hidden state predicts: shift before calling.
        bias: `[V]` in the dtype of hidden.
        mask: like labels, bool, integer or whole-valued float: what does not count is not read, NaN there enters
            nothing. A `fastadv.token_index` of it saves the host from waiting for a GPU, see below.
        temperature: a positive number, or one per token (like labels), no gradient. Divides after the softcap.
        softcap: positive; logits become softcap * tanh(logits / softcap) (Gemma 2, arXiv 2408.00118).
        ignore_index: tokens with this label do not count.
        vocab_start, vocab_group: the weight is rows `[vocab_start, vocab_start + V)` of a vocabulary split over the
            ranks of this torch.distributed group; each rank passes the same hidden, labels and mask. Every rank gets
            the results and the hidden gradient of the whole vocabulary, and the gradients of its own rows. On a backend
            with kernels, in eager mode; every rank must call, also one without a row, and the backward too.
        chunk_tokens: rows of float32 logits that exist at a time; None: 128 MiB of them, on a GPU 1.25 GiB, and half as
            much again of their bfloat16 gradient. Results depend on it within rounding.
        return_entropy: also the entropy of the distribution in nats.
        return_sum_p2: also the sum of squared probabilities.
        deterministic: the results and the hidden gradient of a token have the same bits whatever other tokens there
            are, however many, and everything has the same bits for any number of threads. Products then have 64
            rows, filled up with zeros, and run on one thread: that is the price.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        TokenLogProbs(log_probs, entropy, sum_p2), each like labels, None where not asked for; float32 (float64 for
        float64 hidden), exactly 0 where nothing counts. log_probs are at most 0.

    On a GPU the host waits twice: in the forward for the number of tokens that count, in the backward for the number of
    those with an upstream gradient. Given a `fastadv.token_index` it never waits; the backward then multiplies all of
    its tokens, those without an upstream gradient as zeros.

    Under torch.autocast, hidden, weight and bias are cast to its dtype, as torch.nn.functional.linear does; logits and
    what comes from them stay float32.

    Raises:
        ValueError: shapes that do not fit, a label outside of the vocabulary where the mask counts it, a fractional
            mask value, a temperature or softcap that is not positive, ranks whose parts leave a gap or overlap.
        TypeError: an argument of another type, hidden, weight and bias of different dtypes.

    Source: docs/ops/linear_log_probs.md.
    """
    op = "linear_log_probs"
    given = arguments(
        op, hidden, weight, labels, bias=bias, mask=mask, temperature=temperature, softcap=softcap,
        ignore_index=ignore_index, vocab_start=vocab_start, vocab_group=vocab_group, chunk_tokens=chunk_tokens,
        deterministic=deterministic, backend=backend,
    )  # fmt: skip
    found = log_probs_of(given)
    return TokenLogProbs(found[0], found[1] if return_entropy else None, found[2] if return_sum_p2 else None)


def log_probs_of(given: Arguments) -> tuple[Tensor, ...]:
    """Log-probs, entropy and sum of squares for checked arguments."""
    return _reference(given) if given.backend == "reference" else _native(given)


def _native(given: Arguments) -> tuple[Tensor, ...]:
    inputs, numbers, parts = given.inputs, given.numbers, given.parts
    backend = given.backend
    if parts is None and (given.registered or not given.needs_gradient):
        return _launch(backend, *given.layer, *inputs, list(numbers))[:3]  # type: ignore[no-any-return]
    if not given.needs_gradient:
        return forward(backend, given.layer, inputs, numbers, parts)[:3]
    found = _LinearLogProbs.apply(backend, *given.layer, inputs, numbers, parts)  # type: ignore[no-untyped-call]
    return found  # type: ignore[no-any-return]


def _reference(given: Arguments) -> tuple[Tensor, ...]:
    codes, inverse_temperatures, _ = given.inputs
    temperature: float | Tensor = 1 / given.numbers.inverse_temperature
    if inverse_temperatures is not None:
        temperature = 1 / inverse_temperatures
    return reference.linear_log_probs(*given.layer, codes, codes != SKIPPED, temperature, given.numbers.softcap or None)


# ---- arguments -------------------------------------------------------------------------------------------------------


def arguments(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None,
    mask: Tensor | TokenIndex | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    vocab_start: int,
    vocab_group: ProcessGroup | None,
    chunk_tokens: int | None,
    deterministic: bool,
    backend: str,
) -> Arguments:
    """Checks what `linear_log_probs` says of its arguments."""
    validation.tensor(op, "hidden", hidden, dtypes=validation.FLOATS)
    device = hidden.device
    if hidden.dim() not in (2, 3):
        raise ValueError(f"{op}: hidden has shape {list(hidden.shape)}; pass [N, H] or [B, T, H]")
    validation.tensor(op, "weight", weight, dtypes=validation.FLOATS, device=device)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{op}: weight has shape {list(weight.shape)}; expected [V, {hidden.shape[-1]}], as hidden has"
        )
    shape = tuple(hidden.shape[:-1])
    validation.tensor(op, "labels", labels, shape=shape, dtypes=(torch.int32, torch.int64), device=device)
    if bias is not None:
        validation.tensor(op, "bias", bias, shape=(weight.shape[0],), dtypes=validation.FLOATS, device=device)
    positions: Tensor | None = None
    if isinstance(mask, TokenIndex):
        mask.check_layout(op, shape, device)
        positions, mask = mask.positions, mask.reads
    elif mask is not None:
        validation.tensor(op, "mask", mask, shape=shape, device=device, dtypes=validation.MASKS)
        validation.mask_values(op, "mask", mask)
    hidden, weight, bias = _autocast(hidden, weight, bias)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != hidden.dtype:
            raise TypeError(
                f"{op}: {name} has dtype {t.dtype}, hidden has {hidden.dtype}; cast one, or use torch.autocast"
            )
    if softcap is not None:
        label_arguments.positive(op, "softcap", softcap)
    for name, number in (("ignore_index", ignore_index), ("chunk_tokens", chunk_tokens), ("vocab_start", vocab_start)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise TypeError(f"{op}: {name} is a {type(number).__name__}; pass an integer")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"{op}: chunk_tokens is {chunk_tokens}; it must be at least 1, or None")
    name = dispatch.resolve(op, backend, hidden, weight, bias)
    parts, vocab = None, weight.shape[0]
    if vocab_group is not None and (name == "reference" or torch.compiler.is_compiling()):
        raise ValueError(
            f"{op}: vocab_group is given, but ranks exchange their parts on a backend with kernels in eager mode only, "
            f"not on {name!r}" + (" under torch.compile" if torch.compiler.is_compiling() else "")
        )
    if vocab_group is not None:
        parts = VocabParts.of(op, vocab_group, vocab_start, vocab, device)
        vocab = parts.vocab
    elif vocab_start != 0:
        raise ValueError(f"{op}: vocab_start is {vocab_start} without vocab_group; pass the group of the ranks")
    elif vocab == 0:
        raise ValueError(f"{op}: weight has shape {list(weight.shape)}; a vocabulary has at least one token")

    reads = label_arguments.rows_read(labels, mask, ignore_index)
    codes = label_arguments.codes(op, labels, reads, vocab, ignore_index)
    factor, factors = 1.0, None
    if isinstance(temperature, Tensor):
        factors = label_arguments.temperatures(op, temperature, reads, shape, device).reciprocal()
    else:
        label_arguments.positive(op, "temperature", temperature)
        factor = 1 / temperature
    numbers = Numbers(factor, float(softcap or 0), float(vocab_start), float(chunk_tokens or 0), float(deterministic))
    return Arguments(name, hidden, weight, bias, Inputs(codes, factors, positions), numbers, parts)


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    cast = [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (hidden, weight, bias)]
    return cast[0], cast[1], cast[2]  # type: ignore[return-value]
