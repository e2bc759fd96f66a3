"""The CUDA kernels move the bytes that bench/cuda_bytes.py states: counted access by access in the emulation."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import cuda_kernels
import pytest
import torch
from loss_cases import LOSS_CASES
from op_cases import Shape
from torch import Tensor
from triton_batches import batch

import fastadv as fa
from bench import cuda_bytes
from fastadv import cuda
from fastadv.ops import _logits
from fastadv.ops import moments as moment_ops

pytestmark = [
    pytest.mark.slow,  # a build of its own takes a minute
    pytest.mark.skipif(cuda_kernels.missing() is not None, reason=str(cuda_kernels.missing())),
]

LENGTHS = (3000, 17, 4000)
TOKENS, ROWS, GROUPS, VOCAB = sum(LENGTHS), len(LENGTHS), 2, 5000
ALLOWED = 0.03  # of the stated bytes: what blocks tell each other, ends of rows, labels that lie with others
# What launches nothing, and what reads some numbers of each row once more and no token or logit.
NOT_COUNTED = {"check_device", "device_type", "row_sums_scratch", "finish_statistics"}


class Counted:
    """The extension with kernels whose accesses are counted, where it notes which of its functions were called."""

    def __init__(self, module: ModuleType, library: ctypes.CDLL) -> None:
        self._module, self._library = module, library
        self.called: set[str] = set()
        self._since = ""
        self._kept: list[Tensor] = []  # no address has two tensors
        library.byte_counts_distinct.restype = ctypes.c_int64

    def __getattr__(self, name: str) -> Any:
        self.called.add(name)
        if name == self._since:
            self._forget()
        return getattr(self._module, name)

    def functions(self) -> set[str]:
        return {name for name in dir(self._module) if not name.startswith("_")}

    def watch(self, t: Tensor, address: int) -> None:
        self._kept.append(t)
        self._library.byte_counts_watch(ctypes.c_size_t(address), ctypes.c_size_t(t.nbytes))

    def _forget(self) -> None:
        self._library.byte_counts_forget()
        self._kept.clear()

    def bytes_of(self, op: Callable[[], object], since: str = "") -> int:
        """What a call reads of tensors and writes to them, each byte once; from its launch of a function on."""
        self._forget()
        self._since = since
        op()
        return int(self._library.byte_counts_distinct())


@pytest.fixture(scope="module")
def module() -> Counted:
    path = cuda_kernels.emulated("bytes")
    # Under the usual name pybind11 would give the module back that another test imported before.
    spec = importlib.util.spec_from_file_location("byte_counts._cuda", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    assert loaded.__file__ == str(path)
    return Counted(loaded, ctypes.CDLL(str(path)))


@pytest.fixture
def counted(module: Counted, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Its kernels run, and every tensor whose address anyone asks for is watched."""
    plain = Tensor.data_ptr

    def data_ptr(t: Tensor) -> int:
        address = plain(t)
        module.watch(t, address)
        return address

    monkeypatch.setattr(cuda, "module", lambda: module)
    monkeypatch.setattr(Tensor, "data_ptr", data_ptr)
    return module


Op = tuple[Callable[[], object], int]  # a call, and the bytes that are stated for it


def token_ops() -> dict[str, Op]:
    mask, cu_seqlens = batch(LENGTHS)
    turns = fa.turn_ids_from_mask(mask, cu_seqlens, backend="cpu")
    index = fa.segments(turns, cu_seqlens, backend="cpu")
    table, x, on = fa.SegmentTable(torch.ones(index.count), index), torch.zeros(TOKENS), {"backend": "cuda"}
    return {
        "turn_ids": (
            lambda: fa.turn_ids_from_mask(mask, cu_seqlens, **on),
            cuda_bytes.turn_ids(TOKENS, ROWS),
        ),
        "turn_counts": (
            lambda: fa.segments(turns, cu_seqlens, **on),
            cuda_bytes.turn_counts(TOKENS, ROWS),
        ),
        "segment_tokens": (
            lambda: fa.segment_tokens(table, **on),
            cuda_bytes.segment_tokens(TOKENS, ROWS, index.count),
        ),
        "segment_tokens, mask": (
            lambda: fa.segment_tokens(table, mask, **on),
            cuda_bytes.segment_tokens(TOKENS, ROWS, index.count, masked=True),
        ),
        "token_counts": (
            lambda: fa.token_counts(mask, cu_seqlens, **on),
            cuda_bytes.token_counts(TOKENS, ROWS),
        ),
        "sequence_log_ratios": (
            lambda: fa.sequence_log_ratios(x, x.bfloat16(), mask, cu_seqlens, **on),
            cuda_bytes.sequence_log_ratios(TOKENS, ROWS, old=2),
        ),
    }


def row_ops() -> dict[str, Op]:
    mask, cu_seqlens = batch(LENGTHS)
    index = fa.segments(fa.turn_ids_from_mask(mask, cu_seqlens, backend="cpu"), cu_seqlens, backend="cpu")
    rewards, groups = torch.tensor([1.0, 2.0, 4.0]), fa.group_index([0, 1, 0])
    inputs = (rewards.double(), torch.ones(ROWS, dtype=torch.float64), groups)
    turns = index.turns()
    of_groups = int(turns[::2].max() + turns[1])  # turns of both groups
    frozen = fa.freeze_statistics(rewards, groups, turn_ids=index)
    on: dict[str, Any] = {"backend": "cuda"}
    by_segment = {**on, "output": "segments"}
    return {
        "group_moments": (
            lambda: moment_ops.group_moments(*inputs, "cuda"),
            cuda_bytes.group_moments(ROWS, GROUPS),
        ),
        "turn_moments": (
            lambda: moment_ops.turn_moments(*inputs, index, torch.zeros(GROUPS, dtype=torch.float64), "cuda"),
            cuda_bytes.turn_moments(ROWS, GROUPS, of_groups),
        ),
        "group_advantages": (
            lambda: fa.group_advantages(rewards, groups, **on),
            cuda_bytes.group_advantages(ROWS, GROUPS),
        ),
        "group_advantages, float64": (
            lambda: fa.group_advantages(rewards.double(), groups, **on),
            cuda_bytes.group_advantages(ROWS, GROUPS, rewards=8, values=8),
        ),
        "group_advantages, frozen": (
            lambda: fa.group_advantages(rewards, groups, statistics=frozen, **on),
            cuda_bytes.frozen_group_advantages(ROWS, GROUPS),
        ),
        "turn_advantages": (
            lambda: fa.turn_advantages(rewards, groups, index, **by_segment),
            cuda_bytes.turn_advantages(index.count, ROWS, GROUPS),
        ),
        "turn_advantages, frozen": (
            lambda: fa.turn_advantages(rewards, groups, index, statistics=frozen, **by_segment),
            cuda_bytes.frozen_turn_advantages(index.count, ROWS, GROUPS, of_groups),
        ),
    }


def loss_of(dtype: torch.dtype) -> Tensor:
    leaf = torch.zeros(TOKENS, dtype=dtype, requires_grad=True)
    old, advantages = torch.zeros(TOKENS, dtype=dtype), torch.ones(TOKENS, dtype=dtype)
    mask = torch.ones(TOKENS, dtype=torch.bool)
    return fa.policy_loss(leaf, old, advantages, mask, denominator=1.0, backend="cuda").loss


def loss_case(name: str) -> Callable[[], object]:
    case = next(case for case in LOSS_CASES if case.name == f"policy_loss[{name}]")
    inputs = case.make(Shape(lengths=LENGTHS).draw())
    inputs["log_probs"].requires_grad_()
    inputs["mask"] = torch.ones(TOKENS, dtype=torch.bool)
    return lambda: case.call("cuda", **inputs)


def loss_ops() -> dict[str, Op]:
    loss = loss_of(torch.float32)
    return {
        "policy_loss": (lambda: loss_of(torch.float32), cuda_bytes.policy_loss(TOKENS)),
        "policy_loss, bfloat16": (
            lambda: loss_of(torch.bfloat16),
            cuda_bytes.policy_loss(TOKENS, size=2, written=2),
        ),
        "policy_loss, optional inputs": (
            loss_case("sapo"),  # with token weights, a reference and entropy
            cuda_bytes.policy_loss(TOKENS, reads=6),
        ),
        "share_gradients": (loss_case("gspo, mean"), cuda_bytes.share_gradients(TOKENS)),
        "scale_gradient": (lambda: (3 * loss).backward(), cuda_bytes.scale_gradient(TOKENS)),
    }


def logit_ops(dtype: torch.dtype) -> dict[str, Op]:
    logits, labels = torch.randn(2, VOCAB).to(dtype).requires_grad_(), torch.tensor([3, VOCAB - 1])
    ops: dict[str, Op] = {}
    for moments in (False, True):
        what, size = (f"{dtype}, moments" if moments else str(dtype)), (2, VOCAB, dtype.itemsize)

        def forward(moments: bool = moments) -> list[Tensor]:
            out = fa.token_log_probs(logits, labels, return_entropy=moments, return_sum_p2=moments, backend="cuda")
            return [x for x in (out.log_probs, out.entropy, out.sum_p2) if x is not None]

        total = torch.stack(forward()).sum()
        ops[f"token_log_probs, {what}"] = (forward, cuda_bytes.token_log_probs(*size, moments=moments))
        ops[f"logits_gradient, {what}"] = (total.backward, cuda_bytes.logits_gradient(*size, moments=moments))
    ops[f"row_statistics, {dtype}"] = (
        lambda: _logits.row_statistics("cuda", logits.detach(), labels),
        cuda_bytes.row_statistics(2, VOCAB, dtype.itemsize),
    )
    return ops


def gradient_ops() -> dict[str, Op]:
    vectors = [torch.randn(40_000) for _ in range(4)]
    halves = [v.bfloat16() for v in vectors]
    sketch = torch.zeros(1, 1000, dtype=torch.int64)  # of so few slots that each gets something
    return {
        "multi_dot_gram": (
            lambda: fa.multi_dot_gram(vectors, backend="cuda"),
            cuda_bytes.multi_dot_gram(40_000, 4),
        ),
        "multi_dot_gram, bfloat16": (
            lambda: fa.multi_dot_gram(halves, backend="cuda"),
            cuda_bytes.multi_dot_gram(40_000, 4, 2),
        ),
        "count_sketch": (
            lambda: fa.gradproj.count_sketch(vectors[0].view(200, 200), 1000, out=sketch, backend="cuda"),
            cuda_bytes.count_sketch(40_000, 1000),
        ),
    }


OPS = {
    "of gradients": gradient_ops,
    "of tokens": token_ops,
    "of rows": row_ops,
    "losses": loss_ops,
    "of logits in bfloat16": lambda: logit_ops(torch.bfloat16),
    "of logits in float32": lambda: logit_ops(torch.float32),
}


SINCE = {"share_gradients": "share_gradients"}  # the loss is launched before it, and stated by itself


@pytest.mark.parametrize("kind", OPS)
def test_kernels_move_the_bytes_that_are_stated(kind: str, counted: Counted) -> None:
    ops = OPS[kind]()
    moved = {name: counted.bytes_of(op, SINCE.get(name, "")) for name, (op, _) in ops.items()}
    assert moved == {name: pytest.approx(stated, rel=ALLOWED) for name, (_, stated) in ops.items()}


def test_every_function_of_the_extension_is_counted(counted: Counted) -> None:
    counted.called.clear()
    for ops in OPS.values():
        for op, _ in ops().values():
            counted.bytes_of(op)
    assert counted.functions() - counted.called <= NOT_COUNTED


def test_a_read_too_many_would_be_noticed(counted: Counted) -> None:
    """A mask that the statement leaves out."""
    _, stated = token_ops()["segment_tokens"]
    op, _ = token_ops()["segment_tokens, mask"]
    assert counted.bytes_of(op) != pytest.approx(stated, rel=ALLOWED)
