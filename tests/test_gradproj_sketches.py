"""What sketches of rollouts' gradients say about arms, and sketches in files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_lm import largest_error
from torch import Tensor

from fastadv.gradproj import RolloutSketches, count_sketch, sketch_values


def sketched(vectors: Tensor, *, seed: int, size: int = 256, copies: int = 16) -> RolloutSketches:
    """Of made-up gradients [B, n]."""
    values = torch.stack([count_sketch(v.view(-1, 50), size, seed=seed, copies=copies) for v in vectors])
    return RolloutSketches(values, torch.arange(len(vectors)), 2.0**-40, seed, 0, 0)


def test_cosines_are_right_within_their_errors() -> None:
    g = torch.Generator().manual_seed(0)
    u = torch.randn(5, 2000, generator=g, dtype=torch.float64)
    a = torch.randn(3, 5, generator=g, dtype=torch.float64)
    a[1] = a[0] + 0.2 * a[1]  # close to the reference
    exact = a @ u @ u.T @ a.T
    norms = exact.diagonal().sqrt()
    exact_cosines = exact / norms[:, None] / norms
    pairs = torch.tensor([[0, 0, 1], [1, 2, 2]])
    misses, errors, products = [], [], []
    for seed in range(24):
        sketches = sketched(u, seed=seed)
        value, error = sketches.cosines(a)
        misses.append((value - exact_cosines)[pairs[0], pairs[1]])
        errors.append(error[pairs[0], pairs[1]])
        dots, dot_error = sketches.inner_products(a)
        products.append(((dots - exact) / dot_error)[pairs[0], pairs[1]])
        torch.testing.assert_close(value.diagonal(), torch.ones(3, dtype=torch.float64), rtol=1e-12, atol=0)
    rmse = torch.stack(misses).square().mean(0).sqrt()
    theory = (1 - exact_cosines[pairs[0], pairs[1]] ** 2) / math.sqrt(256 * 16)
    claimed = torch.stack(errors).square().mean(0).sqrt()
    assert (rmse / theory).max() < 1.4
    assert (rmse / theory).min() > 0.6
    assert (claimed / rmse).max() < 1.5
    assert (claimed / rmse).min() > 0.65
    assert torch.stack(misses).mean(0).abs().div(rmse).max() < 3 / math.sqrt(24)
    assert 0.6 < float(torch.stack(products).square().mean().sqrt()) < 1.5


def test_arms_are_combinations_of_rollouts() -> None:
    g = torch.Generator().manual_seed(0)
    u = torch.randn(4, 100, generator=g, dtype=torch.float64)
    sketches, a = sketched(u, seed=0, copies=2), torch.randn(3, 4, generator=g, dtype=torch.float64)
    expected = torch.stack([sketch_values(count_sketch(v.view(-1, 50), 256, copies=2)) for v in a @ u])
    assert largest_error(sketches.arms(a), expected) < 1e-9
    a[:, 2] = 0
    broken = sketched(u, seed=0, copies=2)
    broken.values[2] = 2**62  # a rollout that no arm weights is not read
    assert torch.equal(broken.arms(a), sketches.arms(a))
    one = sketched(u, seed=0, copies=1)
    assert one.cosines(a).error.isnan().all()
    assert one.cosines(torch.zeros(1, 4)).value.isnan().all()
    with pytest.raises(ValueError, match=r"coefficients has shape \[4\]; expected \[K, 4\]"):
        sketches.arms(a[0])


def test_sketches_can_be_saved(tmp_path: Path) -> None:
    sketches = sketched(torch.randn(3, 100, generator=torch.Generator().manual_seed(0)), seed=1)
    sketches.save(tmp_path / "sketches.pt")
    loaded = RolloutSketches.load(tmp_path / "sketches.pt")
    for name, value in vars(sketches).items():
        other = getattr(loaded, name)
        assert torch.equal(other, value) if isinstance(value, Tensor) else other == value, name
    torch.save({"values": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="holds no fastadv rollout sketches"):
        RolloutSketches.load(tmp_path / "other.pt")
    (tmp_path / "garbage.pt").write_bytes(b"no pickle at all")
    with pytest.raises(ValueError, match="holds no fastadv rollout sketches"):
        RolloutSketches.load(tmp_path / "garbage.pt")
    whole = torch.load(tmp_path / "sketches.pt", weights_only=True)
    for name, false in (
        ("values", whole["values"].double()),
        ("values", whole["values"][:, 0]),
        ("rollouts", whole["rollouts"][:-1]),
        ("quantum", "x"),
        ("seed", 1.5),
        ("covered", -1),
        ("more", 0),
    ):
        torch.save({**whole, name: false}, tmp_path / "false.pt")
        with pytest.raises(ValueError, match=rf"false\.pt is no sound fastadv rollout sketches 1: .*{name}"):
            RolloutSketches.load(tmp_path / "false.pt")
    del whole["total"]
    torch.save(whole, tmp_path / "false.pt")
    with pytest.raises(ValueError, match=r"no sound .*total"):
        RolloutSketches.load(tmp_path / "false.pt")
