"""Tokens that count, by row, and the denominators that losses are divided by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastadv import cuda, dispatch, native, validation
from fastadv.kernels import Kernel
from fastadv.ops._register import native_op
from fastadv.reference import token_counts as reference
from fastadv.rows import Rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Number = float | Tensor


@dataclass(frozen=True, eq=False)
class Denominators:
    """What a batch, or a whole optimizer step, may be divided by. Counts are 0-d float64 tensors (or plain numbers),
    finite and not negative; a value that may be read and is not is a ValueError.

    A loss that is given this object divides by the field that its configuration names, so the sum over micro-batches,
    accumulation steps and ranks is the loss of the whole step.

    Attributes:
        tokens: tokens with a non-zero mask.
        sequences: rollouts with at least one such token.
        candidates: all rollouts, those without a token included.
        horizon: constant length in tokens for "seq-mean-token-sum-norm" (Dr. GRPO); None: not given.
        ranks: data-parallel ranks whose gradients the trainer averages; the loss is multiplied by it.
    """

    tokens: Number
    sequences: Number
    candidates: Number
    horizon: float | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "candidates"):
            validation.count("Denominators", name, getattr(self, name))
        validation.count("Denominators", "ranks", self.ranks, least=1)
        if self.horizon is not None:
            validation.count("Denominators", "horizon", self.horizon, positive=True)

    def with_candidates(self, candidates: float) -> Denominators:
        """The same with another number of candidates, say the rollouts before a filter dropped some."""
        validation.count("Denominators", "candidates", candidates, positive=True)
        return replace(self, candidates=float(candidates))


def _cpu(mask: Tensor, cu_seqlens: Tensor | None, counts: Tensor) -> int:
    rows = Rows.trusted(mask, cu_seqlens)
    faults: int = native.module().token_counts(
        native.rows(rows), native.view(mask), counts.data_ptr(), native.threads(rows.tokens)
    )
    return faults


def _cuda(mask: Tensor, cu_seqlens: Tensor | None, counts: Tensor) -> int:
    rows, mask = Rows.trusted(mask, cu_seqlens), native.mask_bytes(mask)
    cuda.module().token_counts(*cuda.place(mask), native.rows(rows), native.address(mask), counts.data_ptr())
    return 0


# Writes counts, [B] int64; a negative one for a row with a fraction that nobody waited for.
TOKEN_COUNTS = Kernel("token_counts", cpu=_cpu, triton="token_counts", cuda=_cuda)


def _fake(backend: str, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return mask.new_empty(mask.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, dtype=torch.int64)


@native_op("token_counts", _fake)
def _launch(backend: str, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    counts = torch.empty(Rows.trusted(mask, cu_seqlens).count, dtype=torch.int64, device=mask.device)
    validation.native_faults("token_counts", TOKEN_COUNTS(backend, mask, cu_seqlens, counts))
    return counts


def token_counts(mask: Tensor, cu_seqlens: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Counts the tokens with a non-zero mask in each rollout.

    Args:
        mask: `[N]` or `[B, T]`, any bool, integer or whole-valued float dtype.
        cu_seqlens: `[B + 1]` int32 or int64 for packed tokens; without it, 1-D tokens are one rollout.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        `[B]` int64.

    Raises:
        ValueError: a fractional mask value, or `cu_seqlens` that does not fit.
    """
    op = "token_counts"
    rows = Rows.of(op, "mask", mask, cu_seqlens)
    validation.tensor(op, "mask", mask, dtypes=validation.MASKS)
    return counts_of(op, mask, rows, dispatch.resolve(op, backend, device=mask.device))


def counts_of(op: str, mask: Tensor, rows: Rows, backend: str) -> Tensor:
    """`token_counts` for a layout and a backend that are settled."""
    if backend != "cpu":
        validation.mask_values(op, "mask", mask)
    if backend == "reference":
        return reference.token_counts(mask, rows)
    counts: Tensor = _launch(backend, native.as_mask(mask), rows.cu_seqlens)
    return counts


def denominators(
    mask: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    horizon: float | None = None,
    process_group: ProcessGroup | None = None,
    context_group: ProcessGroup | None = None,
    backend: str = "auto",
) -> Denominators:
    """Counts what a step's losses are divided by. Call it once per optimizer step, on the mask of the whole step.

    Args:
        mask: `[N]` or `[B, T]`; non-zero counts.
        cu_seqlens: `[B + 1]` for packed tokens.
        horizon: constant length in tokens for "seq-mean-token-sum-norm".
        process_group: data-parallel group; counts are summed over it (one all-reduce that every rank must join, ranks
            without a token too) and `ranks` is its size, since trainers average gradients over the group.
        context_group: ranks that hold parts of the same rollouts, in the same order (context parallel): each rollout's
            tokens are summed over it first, so that a rollout counts once. `process_group` is then the group across
            rollouts only, and `ranks` the product of both sizes, for trainers that average over both.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        Denominators with counts on the mask's device; nothing waits for a GPU.

    Raises:
        ValueError: a horizon that is not positive, a fractional mask value, `cu_seqlens` that does not fit.
    """
    if horizon is not None:  # before anything is counted, or other ranks wait in the all-reduce
        validation.count("denominators", "horizon", horizon, positive=True)
    counts = token_counts(mask, cu_seqlens, backend=backend)
    # Integers that stand for no count would wrap around in a sum.
    counts = torch.where(counts < 0, torch.nan, counts.to(torch.float64))
    ranks = 1
    if context_group is not None:
        import torch.distributed as dist

        dist.all_reduce(counts, group=context_group)
        ranks *= dist.get_world_size(context_group)
    stacked = torch.stack([counts.sum(), counts.clamp(max=1).sum(), counts.new_full((), counts.shape[0])])
    if process_group is not None:
        import torch.distributed as dist

        dist.all_reduce(stacked, group=process_group)
        ranks *= dist.get_world_size(process_group)
    tokens, sequences, candidates = stacked.unbind()
    return Denominators(tokens, sequences, candidates, horizon, ranks)
