"""Triton's interpreter, right where it is wrong and strict where a GPU would say nothing.

It runs a kernel's programs one after the other on numpy arrays. As it comes with Triton 3.9, a kernel that is wrong on
a GPU often passes there, and one that is right may fail. `install()` changes that for the process:

- Repaired: bfloat16 (the interpreter computes with its bits as if they were integers), casts to bfloat16 and fp8 (it
  cuts off, a GPU rounds to nearest even), casts of NaN, inf and large numbers to integers (a GPU saturates), and
  numpy's warnings about NaN and inf (a GPU has none).
- Refused, with a CheckError that names kernel, program and argument: an access outside of the tensors that the kernel
  was given, or not aligned to its element; a race; two lanes of one store with different values for one element; a
  false `tl.device_assert`; an integer of less than 64 bits that overflows; a reduction of bfloat16.
- Made to show: lanes that a load masks off without `other` hold garbage, not 0; programs run in a shuffled order.

The bounds are those of the arguments, not of their storages: a store past the end of a view is refused although there
is memory, since it is somebody else's. It is not noticed where another argument begins right there, nor in the gaps of
a strided argument.

A race is what a GPU may do in any order: two programs touch one element, and neither do both read, nor are both atomic.
What threads of one program do to each other is not looked at: a program that reads through memory what it has stored
needs `tl.debug_barrier()` between on a GPU, and passes here without.

`traffic()` counts the bytes that kernels move and `launches()` the kernels that start.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from strict_memory import ATOMIC, CHECK, LOAD, STORE, CheckError, Launch, Moved
from triton.runtime import interpreter

__all__ = ["CHECK", "CheckError", "Moved", "Traffic", "install", "launches", "traffic"]

# ---- numbers ---------------------------------------------------------------------------------------------------------

TORCH_TYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
}  # fmt: skip
WITHOUT_NUMPY = {"bf16": torch.uint16, "fp8e4nv": torch.uint8, "fp8e5": torch.uint8}  # numpy arrays hold their bits


def _convert(data: np.ndarray, source: tl.dtype, target: tl.dtype) -> np.ndarray:
    """Floating numbers in another type, to nearest even, and what is too large for fp8 to its largest number."""
    values = torch.from_numpy(np.array(data, order="C")).view(TORCH_TYPES[source.name])
    values = values.to(torch.float64 if tl.float64 in (source, target) else torch.float32)
    if target.name.startswith("fp8"):
        largest = torch.finfo(TORCH_TYPES[target.name]).max
        values = values.clamp(-largest, largest)
    values = values.to(TORCH_TYPES[target.name])
    return values.view(WITHOUT_NUMPY.get(target.name, values.dtype)).numpy()


def _saturated(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Floating numbers as integers, like a GPU's: cut off, NaN is 0, too large ones are the largest."""
    limits = np.iinfo(dtype)
    whole = np.trunc(np.where(np.isnan(data), 0, data).astype(np.float64))
    low, high = whole <= float(limits.min), whole >= float(limits.max)
    integers = np.array(np.where(low | high, 0, whole)).astype(dtype)
    integers[low], integers[high] = limits.min, limits.max
    return integers


def _widened(handle: Any) -> Any:
    """Numbers that numpy does not have, in float32, which holds each of them."""
    scalar = handle.dtype.scalar
    if scalar.name not in WITHOUT_NUMPY:
        return handle
    return interpreter.TensorHandle(_convert(handle.data, scalar, tl.float32), tl.float32)


def _computed(plain: Callable[..., Any], operands: tuple[Any, ...], *rest: Any) -> Any:
    """What an operation of the interpreter gives; on bfloat16 in float32, and then rounded."""
    if all(operand.dtype.scalar != tl.bfloat16 for operand in operands):
        return plain(*operands, *rest)
    result = plain(*map(_widened, operands), *rest)
    if result.data.dtype != np.float32:  # a comparison
        return result
    return interpreter.TensorHandle(_convert(result.data, tl.float32, tl.bfloat16), tl.bfloat16)


# ---- what takes the interpreter's place ------------------------------------------------------------------------------


def _size(pointers: Any) -> int:
    """Bytes of an element. Triton makes pointers to bool pointers to int8 before."""
    return pointers.get_element_ty().primitive_bitwidth // 8


class _Builder:
    """Mixed into InterpreterBuilder, which carries out the operations of kernels: each method replaces one there."""

    launch: Launch | None = None  # the one that runs

    def set_grid_dim(self, nx: int, ny: int, nz: int) -> None:
        self.launch.set_grid((nx, ny, nz))
        super().set_grid_dim(nx, ny, nz)

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        super().set_grid_idx(*self.launch.next_program(x, y, z))

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: bool) -> Any:
        self.launch.access(LOAD, ptrs.data, _size(ptrs), mask.data)
        return super().create_masked_load(ptrs, mask, other, cache_policy, is_volatile)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        self.launch.access(STORE, ptrs.data, _size(ptrs), mask.data, value.data)
        return super().create_masked_store(ptrs, value, mask, cache_policy)

    def create_atomic_rmw(self, operation: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        self.launch.access(ATOMIC, ptr.data, _size(ptr), mask.data)
        return super().create_atomic_rmw(operation, ptr, value, mask, sem, scope)

    def create_atomic_cas(self, ptr: Any, compare: Any, value: Any, sem: Any, scope: Any) -> Any:
        self.launch.access(ATOMIC, ptr.data, _size(ptr), np.True_)
        return super().create_atomic_cas(ptr, compare, value, sem, scope)

    def create_assert(self, condition: Any, message: str) -> None:
        if not condition.data.all():
            raise self.launch.fault(f"device_assert: {message}")

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        result = _computed(super().binary_op, (lhs, rhs), op)
        if result.data.dtype == np.bool_:  # a comparison, which keeps its operands' type, and is then cast as such
            return interpreter.TensorHandle(result.data, tl.int1)
        return result

    def unary_op(self, arg: Any, op: Any) -> Any:
        return _computed(super().unary_op, (arg,), op)

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        return _computed(super().ternary_op, (lhs, rhs, other), op)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        return _computed(super().create_fma, (x, y, z))

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        return super().create_dot(_widened(a), _widened(b), d, input_precision, max_num_imprecise_acc)

    def cast_impl(self, src: Any, dst_type: tl.dtype) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source.is_floating() and target.is_int() and target.primitive_bitwidth >= 16:  # narrower: also open on a GPU
            data = _saturated(src.data, interpreter._get_np_dtype(target))
        elif target.name in WITHOUT_NUMPY and not source.is_floating():
            data = _convert(src.data.astype(np.float32), tl.float32, target)
        elif {source.name, target.name} & WITHOUT_NUMPY.keys() and {source.name, target.name} <= TORCH_TYPES.keys():
            data = _convert(src.data, source, target)
        else:
            return super().cast_impl(src, dst_type)
        return interpreter.TensorHandle(data, target)

    def create_fp_to_fp(self, src: Any, dst_type: tl.dtype, rounding_mode: Any) -> Any:
        if rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        source, target = src.dtype.scalar, dst_type.scalar
        return interpreter.TensorHandle(_convert(src.data, source, target), target)


# Every bit but one: NaN as a floating number, before the argument as an offset, and on as a byte of a mask. It is small
# as an integer, so that arithmetic on lanes that nobody looks at does not overflow.
GARBAGE = -3


class _Semantic:
    """Mixed into TritonSemantic, which checks the arguments of operations and hands them to the builder."""

    def load(self, ptr: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: bool) -> Any:
        result = super().load(ptr, mask, other, cache_policy, is_volatile)
        if mask is None or other is not None or not CHECK.poison:  # the builder is not told of an `other` that is 0
            return result
        data = np.array(result.handle.data)
        garbage = True if data.dtype == np.bool_ else np.array(GARBAGE, f"i{data.itemsize}").view(data.dtype)
        data[~np.broadcast_to(mask.handle.data, data.shape)] = garbage
        return tl.tensor(interpreter.TensorHandle(data, result.handle.dtype), result.type)


class _Reduction:
    """Mixed into ReduceOps and ScanOps, which add, compare and scan in numpy."""

    def check_tensor(self, input: Any) -> None:
        super().check_tensor(input)
        if any(t.dtype == tl.bfloat16 for t in input):  # numpy sees integers, and a GPU would round after each step
            fault = "a reduction or a scan of bfloat16 has no exact meaning; cast to float32 before"
            raise interpreter.interpreter_builder.launch.fault(fault)


class _Executor:
    """Mixed into GridExecutor, which runs the programs of a launch."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
        args, kwargs = super()._init_args_hst(args_dev, kwargs)
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        interpreter.interpreter_builder.launch = Launch(self.fn.__name__, named)
        return args, kwargs

    def __call__(self, *args_dev: Any, **kwargs: Any) -> None:
        builder = interpreter.interpreter_builder
        builder.options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=CHECK.overflow)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # numpy's
                super().__call__(*args_dev, **kwargs)
            for observe in _observers:
                observe(builder.launch)
        except interpreter.InterpreterError as error:
            if fault := _check_error(error):
                raise fault from None
            raise
        finally:
            builder.launch = None


def _check_error(error: BaseException | None) -> CheckError | None:
    """The error of a check, which the interpreter wraps once for each function of a kernel."""
    while error is not None and not isinstance(error, CheckError):
        error = error.__cause__
    return error


# ---- installing ------------------------------------------------------------------------------------------------------

REPLACED = {
    "InterpreterBuilder": _Builder, "TritonSemantic": _Semantic, "ReduceOps": _Reduction, "ScanOps": _Reduction,
    "GridExecutor": _Executor,
}  # fmt: skip
ALSO_USED = (
    "InterpreterError", "InterpreterOptions", "TensorHandle", "_get_np_dtype", "_ir", "interpreter_builder",
    "interpreter_semantic",
)  # fmt: skip


def install() -> None:
    """Makes the interpreter of this process strict. More than once does nothing more.

    Raises:
        RuntimeError: kernels are compiled here, or this Triton is not the one whose private names are replaced.
    """
    _check_triton()
    if isinstance(interpreter.interpreter_builder, _Builder):
        return
    for name, mixin in REPLACED.items():
        setattr(interpreter, name, type(f"Strict{name}", (mixin, getattr(interpreter, name)), {}))
    interpreter.interpreter_builder = interpreter.InterpreterBuilder()
    interpreter.interpreter_semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)


def _check_triton() -> None:
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("kernels are compiled here; the strict interpreter needs TRITON_INTERPRET=1")
    pin = "install the version of triton that constraints.txt pins, or adapt tests/strict_interpreter.py"
    if not triton.__version__.startswith("3.9."):
        raise RuntimeError(f"this is Triton {triton.__version__}, and private names of 3.9 are replaced; {pin}")
    missing = [name for name in ALSO_USED if not hasattr(interpreter, name)]
    for name, mixin in REPLACED.items():
        methods = [method for method, value in vars(mixin).items() if inspect.isfunction(value)]
        plain = getattr(interpreter, name, None)
        missing += [f"{name}.{method}" for method in methods if not hasattr(plain, method)]
    if missing:
        raise RuntimeError(
            f"triton.runtime.interpreter of Triton {triton.__version__} lacks {', '.join(missing)}; {pin}"
        )


# ---- counting --------------------------------------------------------------------------------------------------------

_observers: list[Callable[[Launch], None]] = []  # called after each launch


@contextlib.contextmanager
def _observing(observe: Callable[[Launch], None]) -> Iterator[None]:
    install()  # else there would be nothing to observe
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


@contextlib.contextmanager
def launches() -> Iterator[list[str]]:
    """The names of the kernels that start inside of the `with`, in order. Operations of torch are not among them."""
    names: list[str] = []
    with _observing(lambda launch: names.append(launch.kernel)):
        yield names


class Traffic:
    """What kernels move: `traffic["mask"].loads` of an argument, over all launches, or `traffic.total.distinct`."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, list[tuple[tuple[str, ...], Moved]]]] = []  # kernel; arguments and their bytes

    def add(self, launch: Launch) -> None:
        self.launches.append((launch.kernel, [(tuple(r.names), r.moved()) for r in launch.regions]))

    def __getitem__(self, argument: str) -> Moved:
        """Arguments that overlap are counted together, under each of their names."""
        found = [moved for _, arguments in self.launches for names, moved in arguments if argument in names]
        if not found:
            raise KeyError(f"no launch had memory in an argument {argument!r}")
        return sum(found, Moved())

    @property
    def total(self) -> Moved:
        return sum((moved for _, arguments in self.launches for _, moved in arguments), Moved())


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    """Counts the bytes that the kernels inside of the `with` load and store."""
    counted = Traffic()
    with _observing(counted.add):
        yield counted
