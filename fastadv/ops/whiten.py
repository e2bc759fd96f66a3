"""Whitening: values minus their mean, over their standard deviation, over all tokens that count on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastadv import dispatch, native, validation
from fastadv.kernels import Kernel
from fastadv.ops._register import native_op
from fastadv.reference import whiten as reference
from fastadv.rows import Rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EPS_FORMS = ("add_to_variance", "floor_of_variance")
KERNELS = ("cpu",)  # the backends that have some


def _spread_cpu(values: Tensor, mask: Tensor, cu_seqlens: Tensor | None, spread: Tensor) -> int:
    rows = Rows.trusted(mask, cu_seqlens)
    faults: int = native.module().masked_spread(
        native.rows(rows), native.view(values), native.view(mask), spread.data_ptr(), native.threads(rows.tokens)
    )
    return faults


def _standardize_cpu(
    values: Tensor, mask: Tensor, cu_seqlens: Tensor | None, mean_and_scale: Tensor, out: Tensor
) -> int:
    rows = Rows.trusted(mask, cu_seqlens)
    faults: int = native.module().standardize(
        native.rows(rows),
        native.view(values),
        native.view(mask),
        native.address(mean_and_scale),
        out.data_ptr(),
        native.threads(rows.tokens),
    )
    return faults


# Writes a spread, [3] float64 (see reference/whiten.py).
MASKED_SPREAD = Kernel("masked_spread", cpu=_spread_cpu)
# Writes (value - mean) * scale, float32, like the values.
STANDARDIZE = Kernel("standardize", cpu=_standardize_cpu)


def _fake_spread(backend: str, values: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return values.new_empty(3, dtype=torch.float64)


@native_op("masked_spread", _fake_spread)
def _launch_spread(backend: str, values: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    spread = torch.empty(3, dtype=torch.float64, device=values.device)
    validation.native_faults("whiten", MASKED_SPREAD(backend, values, mask, cu_seqlens, spread))
    return spread


def _fake_standardize(
    backend: str, values: Tensor, mask: Tensor, cu_seqlens: Tensor | None, mean_and_scale: Tensor
) -> Tensor:
    return torch.empty(values.shape, dtype=torch.float32, device=values.device)


@native_op("standardize", _fake_standardize)
def _launch_standardize(
    backend: str, values: Tensor, mask: Tensor, cu_seqlens: Tensor | None, mean_and_scale: Tensor
) -> Tensor:
    out = native.empty(values.shape, torch.float32, values.device)
    validation.native_faults("whiten", STANDARDIZE(backend, values, mask, cu_seqlens, mean_and_scale, out))
    return out


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    process_group: ProcessGroup | None = None,
    spread: Tensor | None = None,
    ddof: float = 1.0,
    eps: float = 1e-8,
    eps_form: str = "add_to_variance",
    backend: str = "auto",
) -> Tensor:
    """(value - mean) / sqrt(variance + eps) over the tokens of the mask, 0 elsewhere. No gradient flows.

    Args:
        values: `[N]` or `[B, T]`; float32, bfloat16 or float16 (native), float64 (reference); any strides.
        mask: like values; non-zero tokens count.
        cu_seqlens: `[B + 1]` for packed tokens, which are whitened together whatever it says.
        process_group: ranks whose tokens are whitened together. One all-reduce, which every rank must join, ranks
            without a token too: each puts count, mean and squared distances from it into a table, and all ranks merge
            the table alike (Chan), so they get the same bits. It may cut the batch anywhere, also within rollouts.
        spread: count, mean and squared distances of this rank's values, `[3]` float64, where something has them
            already (`token_returns`): saves a read of the values.
        ddof: delta degrees of freedom of the variance. No more values than that have a variance of 0.
        eps: see `eps_form`.
        eps_form: "add_to_variance" divides by sqrt(variance + eps) (verl, Miles), "floor_of_variance" by
            sqrt(max(variance, eps)) (OpenRLHF). `group_advantages` adds to the standard deviation: other names there.
        backend: "auto", "cpu" or "reference"; there are no kernels for GPUs, whose tensors run on the reference.

    Returns:
        Like values, float32 (float64 for float64 values). Values without spread give exact zeros.

    Raises:
        ValueError, TypeError: shapes, dtypes or `cu_seqlens` that do not fit, a fractional mask value.
    """
    op = "whiten"
    validation.tensor(op, "values", values, dtypes=validation.FLOATS)
    rows = Rows.of(op, "values", values, cu_seqlens)
    validation.tensor(op, "mask", mask, shape=tuple(values.shape), dtypes=validation.MASKS, device=values.device)
    validation.choice(op, "eps_form", eps_form, EPS_FORMS)
    validation.non_negative(op, "ddof", ddof)
    validation.non_negative(op, "eps", eps)
    if spread is not None:
        validation.tensor(op, "spread", spread, shape=(3,), dtypes=(torch.float64,), device=values.device)
    backend = dispatch.resolve(op, backend, values, kernels=KERNELS)
    values = values.detach()
    if backend == "reference":
        validation.mask_values(op, "mask", mask)
    else:
        mask = native.as_mask(mask)
    if spread is None:
        if backend == "reference":
            spread = reference.spread(values, mask)
        else:
            spread = _launch_spread(backend, values, mask, rows.cu_seqlens)
    scale = reference.mean_and_scale(over_ranks(spread, process_group), ddof, eps, eps_form)
    if backend == "reference":
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        return reference.standardize(values, mask, scale).to(dtype)
    whitened: Tensor = _launch_standardize(backend, values, mask, rows.cu_seqlens, scale)
    return whitened


def over_ranks(spread: Tensor, process_group: ProcessGroup | None) -> Tensor:
    """The spread of all ranks' values from each rank's, `[3]`."""
    if process_group is None:
        return spread
    import torch.distributed as dist

    table = spread.new_zeros(dist.get_world_size(process_group), 3)  # [ranks, 3]
    table[dist.get_rank(process_group)] = spread
    dist.all_reduce(table, group=process_group)  # each number is added to zeros only
    return reference.merged(table)
