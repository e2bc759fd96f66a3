"""Count sketches of parameters' gradients, in fixed point: sums in any order give the same bits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastadv import cuda, dispatch, native, validation
from fastadv.coins import number
from fastadv.kernels import Kernel
from fastadv.ops._register import native_op, needs_dispatcher
from fastadv.reference import count_sketch as reference
from fastadv.reference.count_sketch import CHUNK, LIMIT

LARGEST = 2**28  # slots: a hash of 32 bits chooses among them
QUANTUM = 2.0**-40


def _place(values: Tensor) -> tuple[int, int, int, int]:
    """The piece's rows as the kernels take a layout."""
    return (values.shape[0] if values.dim() == 2 else 1, values.numel(), values.shape[-1], 0)


def _cpu(
    values: Tensor, key: int, row_offset: int, column_offset: int, quantum: float, copies: int, size: int, out: Tensor
) -> int:
    # Each thread but one fills and merges a table of its own, which has to be less than what it reads.
    threads = max(1, min(native.threads(values.numel()), values.numel() // (4 * out.numel())))
    native.module().count_sketch(
        _place(values),
        native.view(values),
        (row_offset, column_offset),
        key % 2**64,
        1 / quantum,
        copies,
        size,
        native.address(out),
        threads,
    )
    return 0


def _cuda(
    values: Tensor, key: int, row_offset: int, column_offset: int, quantum: float, copies: int, size: int, out: Tensor
) -> int:
    values = values.contiguous()
    cuda.module().count_sketch(
        *cuda.place(values),
        _place(values),
        native.DTYPES[values.dtype],
        native.address(values),
        (row_offset, column_offset),
        key % 2**64,
        1 / quantum,
        copies,
        size,
        native.address(out),
    )
    return 0


# Adds to `out`, contiguous [copies, size] int64.
COUNT_SKETCH = Kernel("count_sketch", cpu=_cpu, triton="count_sketch", cuda=_cuda)


def _fake(
    backend: str,
    values: Tensor,
    key: int,
    row_offset: int,
    column_offset: int,
    quantum: float,
    copies: int,
    size: int,
) -> Tensor:
    return values.new_empty((copies, size), dtype=torch.int64)


@native_op("count_sketch", _fake)
def _launch(
    backend: str,
    values: Tensor,
    key: int,
    row_offset: int,
    column_offset: int,
    quantum: float,
    copies: int,
    size: int,
) -> Tensor:
    out = native.empty((copies, size), torch.int64, values.device).zero_()
    COUNT_SKETCH(backend, values, key, row_offset, column_offset, quantum, copies, size, out)
    return out


def count_sketch(
    values: Tensor,
    size: int,
    *,
    seed: int = 0,
    parameter: str = "",
    row_offset: int = 0,
    column_offset: int = 0,
    out: Tensor | None = None,
    quantum: float = QUANTUM,
    copies: int = 1,
    backend: str = "auto",
) -> Tensor:
    """Adds a parameter's gradient, or a piece of it, to a count sketch: inner products of sketches are, up to a known
    error, those of the gradients.

    Slot and sign of an element are a hash of (seed, copy, parameter, row, column) in the whole parameter, and numbers
    are summed in fixed point, so the sketch has the same bits however the parameter is split over calls and ranks, on
    any backend, for any number of threads. (Gradients of micro-batches round each for themselves: their sum differs
    from the sketch of the sum by half a quantum an element and micro-batch, and has the same bits in any order.)
    `sketch_values` reads a sketch; slots of sketches with one seed, size and quantum may be added before, also over
    ranks.

    For gradients x and y with cosine rho, <Sx, Sy> / (|Sx| |Sy|) misses rho by (1 - rho^2) / sqrt(size), one standard
    deviation; <Sx, Sy> has no bias. Rounding adds less than quantum^2 * numel / 12 to a squared norm. Copies are
    independent sketches: their spread is an error bar.

    Args:
        values: `[n]`, one row, or `[rows, columns]`; float64 runs on the reference.
        size: slots of a copy, 32 to 2^28.
        seed: any integer; vectors that are compared share it.
        parameter: name of the parameter; each has its own hash.
        row_offset, column_offset: where in the parameter `values` begin.
        out: `[copies, size]` int64 to add to; without it, a new tensor of zeros.
        quantum: power of two, from 2^-100 to 2^100: the unit of the sums. Values stay below 2^50 of it.
        copies: independent sketches.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        `[copies, size]` int64: `out` if it was given. A value that is not finite or too large, where nothing reads
        values, leaves slots that `sketch_values` makes NaN, however many sketches are added.

    Raises:
        ValueError: a value that is not finite or too large, if values are read; arguments out of their ranges, an `out`
            of another shape. Nothing was added then.
        TypeError: an argument of another type.
    """
    op = "count_sketch"
    validation.tensor(op, "values", values, dtypes=validation.FLOATS)
    if values.dim() not in (1, 2):
        raise ValueError(f"{op}: values has shape {list(values.shape)}; pass [n] or [rows, columns], as by flatten(1)")
    check_sketch(op, size, copies, quantum, seed)
    if not isinstance(parameter, str):
        raise TypeError(f"{op}: parameter is {parameter!r}; pass the parameter's name")
    validation.integer(op, "row_offset", row_offset, least=0, most=2**62)
    validation.integer(op, "column_offset", column_offset, least=0, most=2**62)
    if out is not None:
        validation.tensor(op, "out", out, shape=(copies, size), dtypes=(torch.int64,), device=values.device)
    values = values.detach()
    _check_values(op, values, quantum)
    key = number(f"{seed} {parameter}")
    name = dispatch.resolve(op, backend, values)
    place = (key, row_offset, column_offset, float(quantum), copies, size)
    if name == "reference":
        two = values if values.dim() == 2 else values[None]
        sketch = reference.count_sketch(two, size, key, row_offset, column_offset, float(quantum), copies)
        return sketch if out is None else out.add_(sketch)
    if out is None:
        fresh: Tensor = _launch(name, values, *place)
        return fresh
    if torch.compiler.is_compiling() or needs_dispatcher((values, out)) or not out.is_contiguous():
        return out.add_(_launch(name, values, *place))
    COUNT_SKETCH(name, values, *place, out)
    return out


def sketch_values(sketch: Tensor, quantum: float = QUANTUM) -> Tensor:
    """Reads a count sketch.

    Args:
        sketch: `[..., size]` int64, from `count_sketch`, or a sum of such sketches.
        quantum: the one that it was made with.

    Returns:
        Float64 of the same shape. NaN in all slots of a copy that a value came into which was not finite or too large,
        and of one whose sums are 2^61 quanta or more.

    Raises:
        TypeError: a sketch that is not int64.
        ValueError: a quantum that is not a power of two.
    """
    validation.tensor("sketch_values", "sketch", sketch, dtypes=(torch.int64,))
    _check_quantum("sketch_values", quantum)
    return reference.sketch_values(sketch, float(quantum))


def check_sketch(op: str, size: Any, copies: Any, quantum: Any, seed: Any) -> None:
    """Raises TypeError or ValueError unless there are sketches of this kind."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{op}: seed is a {type(seed).__name__}; pass an integer")
    validation.integer(op, "size", size, least=CHUNK, most=LARGEST)
    validation.integer(op, "copies", copies, least=1, most=2**20)
    _check_quantum(op, quantum)


def _check_quantum(op: str, quantum: Any) -> None:
    if isinstance(quantum, bool) or not isinstance(quantum, (int, float)):
        raise TypeError(f"{op}: quantum is a {type(quantum).__name__}; pass a number")
    if not 2.0**-100 <= quantum <= 2.0**100 or math.frexp(quantum)[0] != 0.5:
        raise ValueError(f"{op}: quantum is {quantum}; it must be a power of two, from 2**-100 to 2**100")


def _check_values(op: str, values: Tensor, quantum: float) -> None:
    if not values.numel() or not validation.reads_values(values):
        return
    limit = LIMIT * quantum
    low, high = values.aminmax()  # NaN, if any is
    if -limit < float(low) and float(high) < limit:
        return
    at = tuple((~(values.abs() < limit)).nonzero()[0].tolist())
    raise ValueError(
        f"{op}: values{list(at)} is {float(values[at])}; it must be finite and below 2^50 quanta, which is {limit:g}"
    )
