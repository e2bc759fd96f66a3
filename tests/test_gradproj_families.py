"""Every family of models against gradients that are written out, and what cannot be projected."""

from __future__ import annotations

import pytest
from gradproj_models import FAMILIES, ragged_batch, relative_error, small_model, written_out

import fastadv as fa
from fastadv import gradproj


@pytest.fixture(scope="module")
def batch() -> fa.Batch:
    return ragged_batch()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gram_is_that_of_gradients_written_out(family: str, tied: bool, batch: fa.Batch) -> None:
    model = small_model(family, tied=tied)
    for level in ("rollout", "turn"):
        u = written_out(model, batch, level, temperature=0.7)
        found = gradproj.segment_gram(model, batch, level=level, temperature=0.7, max_tokens=30, scratch_bytes=20_000)
        assert relative_error(found.gram, u @ u.T) < 1e-12
        assert found.covered == found.total == sum(p.numel() for p in model.parameters())
