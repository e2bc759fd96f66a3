"""Coins that do not depend on the order, the process or the number of times they are tossed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fastadv import validation
from fastadv._graphs import constant_in_graphs

STEP = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, as int64: splitmix64's increment


def shifted(x: Tensor, bits: int) -> Tensor:
    """int64 as uint64, shifted to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: Tensor) -> Tensor:
    """splitmix64's finaliser; int64 arithmetic wraps as uint64's does."""
    x = (x ^ shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ shifted(x, 31)


@constant_in_graphs
def number(text: str) -> int:
    """A string's 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def uniforms(seed: int, ids: Tensor | Sequence[int | str], stream: str = "") -> Tensor:
    """A number in [0, 1) for each id, `[n]` float64: a hash of (seed, stream, id) and of nothing else.

    The id's element of the splitmix64 sequence that starts at a mix of the seed and the stream's name; strings are
    first hashed to 64 bits by BLAKE2b. Numbers of different streams are independent.

    Raises:
        TypeError: ids that are not integers or strings.
    """
    if isinstance(ids, Tensor):
        validation.tensor("uniforms", "ids", ids, dtypes=validation.INTEGERS)
        numbers = ids.to(torch.int64)
    else:
        for i, x in enumerate(ids):
            if isinstance(x, bool) or not isinstance(x, (int, str)):
                raise TypeError(f"uniforms: ids[{i}] is {x!r}; ids are integers or strings")
        numbers = torch.tensor([number(x) if isinstance(x, str) else x for x in ids], dtype=torch.int64)
    origin = torch.tensor((seed + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=numbers.device)
    if stream:
        origin = mixed(origin + STEP) ^ number(stream)
    bits = mixed(mixed(origin + STEP) + (numbers + 1) * STEP)
    return shifted(bits, 11).to(torch.float64) * 2.0**-53


def keep(seed: int, ids: Tensor | Sequence[int | str], probability: float | Tensor, *, stream: str = "") -> Tensor:
    """Tosses one coin per id.

    The same seed and id give the same coin in every pass, process and restart, so a rollout that is looked at twice is
    not tossed for twice. Raising the probability only adds ids.

    Args:
        seed: any integer.
        ids: `[n]` integers or strings; say rollout ids, or group ids to keep groups whole.
        probability: chance of True, in [0, 1]; one number or `[n]`.
        stream: name of the use, where one id needs several independent coins.

    Returns:
        `[n]` bool.

    Raises:
        ValueError: a probability outside of [0, 1].
        TypeError: ids that are not integers or strings.
    """
    chance = torch.as_tensor(probability, dtype=torch.float64)
    if bool(((chance < 0) | (chance > 1) | chance.isnan()).any()):
        raise ValueError(f"keep: probability is {probability}; it must be in [0, 1]")
    u = uniforms(seed, ids, stream)
    return u < chance.to(u.device)
