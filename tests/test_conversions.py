"""Sixteen-bit floats and masks of floats, over all of their values: what the kernels read and write."""

from __future__ import annotations

import pytest
import torch
from op_cases import NATIVE
from torch import Tensor

import fastadv as fa

ON = pytest.mark.parametrize("backend", NATIVE)
LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SUM = fa.LossConfig("reinforce", loss_agg_mode="token-sum")


def spread(t: Tensor) -> Tensor:
    """The same values, one apart in memory."""
    wide = t.new_zeros(2 * t.shape[0])
    wide[::2] = t
    return wide[::2]


@ON
@LOW
@pytest.mark.parametrize("strided", [False, True])
def test_every_value_is_read(dtype: torch.dtype, strided: bool, backend: str) -> None:
    values = torch.arange(2**16).to(torch.int32).to(torch.int16).view(dtype)
    read = spread(values) if strided else values
    out = fa.policy_loss(
        read, None, -torch.ones(2**16), torch.ones(2**16), config=SUM, reduction="none", backend=backend
    )
    torch.testing.assert_close(out.loss, values.float(), rtol=0, atol=0, equal_nan=True)


@ON
@LOW
@pytest.mark.parametrize("strided", [False, True])
def test_every_kind_of_float_is_written(dtype: torch.dtype, strided: bool, backend: str) -> None:
    """Every value of the low precision, all that lies halfway between two, and its neighbours in float32."""
    exact = torch.arange(2**16).to(torch.int32).to(torch.int16).view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    halfway = ((exact[1:].double() + exact[:-1].double()) / 2).float()
    values = torch.cat([exact, halfway, torch.tensor([65519.0, 65520.0, 65521.0, 1e38, torch.inf, torch.nan])])
    infinity = torch.tensor(torch.inf)
    values = torch.cat([values, values.nextafter(infinity), values.nextafter(-infinity)])
    leaf = torch.zeros(values.shape, dtype=dtype)
    leaf = (spread(leaf) if strided else leaf).requires_grad_()
    loss = fa.policy_loss(leaf, None, -values, torch.ones(values.shape), config=SUM, denominator=1.0, backend=backend)
    loss.loss.backward()
    torch.testing.assert_close(leaf.grad, values.to(dtype), rtol=0, atol=0, equal_nan=True)


WHOLE = [0.0, -0.0, 1.0, -3.0, 2.0**23 - 1, 2.0**23, 2.0**23 + 1, 2.0**24 - 1, -(2.0**31), 3.4028234e38]
NOT_WHOLE = [0.5, -0.5, 1e-45, 2.0**22 + 0.5, -(2.0**23) + 0.5, torch.inf, -torch.inf, torch.nan]


@ON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_masks_of_floats(dtype: torch.dtype, backend: str) -> None:
    whole = torch.tensor(WHOLE, dtype=dtype)
    assert fa.token_counts(whole, backend=backend).tolist() == [len(WHOLE) - 2]
    table = fa.SegmentTable(torch.ones(1), fa.segments(torch.zeros(37, dtype=torch.int32)))
    for value in NOT_WHOLE:
        for place in (0, 20, 36):  # in a vector and in the rest of the row
            mask = torch.ones(37, dtype=dtype)
            mask[place] = value
            with pytest.raises(ValueError, match="fractional or non-finite"):
                fa.token_counts(mask, backend=backend)
            with pytest.raises(ValueError, match="fractional or non-finite"):
                fa.turn_ids_from_mask(mask, backend=backend)
            with pytest.raises(ValueError, match="fractional or non-finite"):
                fa.segment_tokens(table, mask, backend=backend)


@ON
def test_a_mask_is_not_read_twice(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels find what is not whole: a second look in Python would cost more than they do."""
    monkeypatch.setattr("fastadv.validation.mask_values", lambda *args: pytest.fail("the mask was read in Python"))
    mask = torch.ones(9)
    fa.token_counts(mask, backend=backend)
    index = fa.segments(fa.turn_ids_from_mask(mask, backend=backend), backend=backend)
    fa.segment_tokens(fa.SegmentTable(torch.ones(1), index), mask, backend=backend)
