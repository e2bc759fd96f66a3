"""Frozen statistics: what a batch's baselines and denominators are, computed once and shared by every arm."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fastadv import dispatch, validation
from fastadv.groups import GroupIndex, Labels, group_index
from fastadv.ops.moments import group_moments, turn_moments
from fastadv.ops.token_counts import Denominators, denominators
from fastadv.ops.turn_ids import segments
from fastadv.reference.moments import GroupMoments, TurnMoments
from fastadv.segment_table import Segments


@dataclass(frozen=True, eq=False)
class Population:
    """Moments over one set of voters.

    Attributes:
        votes: `[B]` float64, 1 or 0.
        moments: of each group.
        turns: of each turn of each group; None: the batch's turns were not given.
    """

    votes: Tensor  # [B]
    moments: GroupMoments
    turns: TurnMoments | None


@dataclass(frozen=True, eq=False)
class FrozenStatistics:
    """Means, standard deviations, counts and denominators of one unmasked batch.

    Arms that differ in a mask must not differ in these, or the comparison measures the statistics. Standard deviations,
    counts and denominators come from the whole batch (`all`); a mean is over `all` or over `survivors`, whichever an
    arm asks for.

    Attributes:
        rewards: `[B]` float64, a copy.
        groups: which rollouts are of one prompt.
        all: moments over all rollouts.
        survivors: moments over the rollouts with `include`; None: it was not given.
        include: `[B]` bool, the survivors, a copy; None: it was not given.
        segments: the (rollout, turn) pairs; None: turn ids were not given, and there are no turn-reached baselines.
        denominators: counts of the unmasked batch; None: the mask was not given.
        kappa: shrinkage of turn-reached baselines that these statistics are for.
        ddof: delta degrees of freedom of standard deviations.
    """

    rewards: Tensor  # [B]
    groups: GroupIndex
    all: Population
    survivors: Population | None
    include: Tensor | None  # [B]
    segments: Segments | None
    denominators: Denominators | None
    kappa: float
    ddof: float

    def population(self, name: str, op: str) -> Population:
        """The population of this name, "all" or "survivors"."""
        if name == "all":
            return self.all
        if self.survivors is None:
            raise ValueError(
                f"{op}: population is 'survivors', but the statistics were frozen without include; freeze them with it"
            )
        return self.survivors

    @cached_property
    def hash(self) -> str:
        """SHA-256 over every number in here, as hexadecimal: arms that report the same hash shared their statistics."""
        digest = hashlib.sha256(f"fastadv statistics 1: kappa={self.kappa!r} ddof={self.ddof!r}".encode())
        for name, value in self._numbers():
            digest.update(f";{name}".encode())
            if value is not None:
                array = torch.as_tensor(value).detach().cpu().contiguous()
                digest.update(f" {array.dtype} {list(array.shape)} ".encode())
                digest.update(array.numpy().tobytes())
        return digest.hexdigest()

    def _numbers(self) -> list[tuple[str, Tensor | float | None]]:
        numbers: list[tuple[str, Tensor | float | None]] = [
            ("rewards", self.rewards),
            ("groups", self.groups.index),
            ("include", self.include),
        ]
        for name, population in (("all", self.all), ("survivors", self.survivors)):
            if population is None:
                continue
            numbers.extend((f"{name}.{field}", value) for field, value in population.moments._asdict().items())
            if population.turns is not None:
                offsets = population.turns.offsets
                used = int(offsets[-1])  # the tables may be longer than the groups need
                numbers.append((f"{name}.turns", offsets))
                numbers.append((f"{name}.turn_votes", population.turns.votes[:used]))
                numbers.append((f"{name}.turn_rewards", population.turns.rewards[:used]))
        if self.denominators is not None:
            d = self.denominators
            numbers.extend(
                [("tokens", d.tokens), ("sequences", d.sequences), ("candidates", d.candidates), ("horizon", d.horizon)]
            )
        return numbers


def check_rows(op: str, name: str, values: Tensor, rows: int, device: torch.device) -> None:
    """Raises unless a per-rollout argument has numbers `[B]` on this device."""
    validation.tensor(
        op, name, values, shape=(rows,), dtypes=(*validation.FLOATS, *validation.INTEGERS, torch.bool), device=device
    )


def float64_rows(op: str, name: str, values: Tensor, rows: int, device: torch.device) -> Tensor:
    """A per-rollout argument as contiguous float64 `[B]`."""
    check_rows(op, name, values, rows, device)
    return values.detach().to(torch.float64).contiguous()


def include_rows(op: str, include: Tensor, rows: int, device: torch.device) -> Tensor:
    """The `include` argument as contiguous bool `[B]`."""
    validation.tensor(op, "include", include, shape=(rows,), dtypes=(torch.bool,), device=device)
    return include.contiguous()


def freeze_statistics(
    rewards: Tensor,
    group_ids: Labels,
    *,
    include: Tensor | None = None,
    turn_ids: Tensor | Segments | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    kappa: float = 2.0,
    ddof: float = 1,
    horizon: float | None = None,
    backend: str = "auto",
) -> FrozenStatistics:
    """Freezes the statistics of an unmasked batch.

    Args:
        rewards: `[B]`, one reward a rollout, finite.
        group_ids: `[B]` labels or a GroupIndex; rollouts of one prompt share a label.
        include: `[B]` bool; if given, the means over the included rows are frozen too (population "survivors").
        turn_ids: `[N]` or `[B, T]` turn ids or Segments; needed for turn-reached advantages.
        cu_seqlens: `[B + 1]` for packed tokens.
        mask: `[N]` or `[B, T]`, the unmasked response mask; if given, denominators are counted from it.
        kappa: shrinkage of the turn-reached baseline that these statistics are for.
        ddof: delta degrees of freedom of the standard deviations.
        horizon: constant length in tokens for the denominators.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        FrozenStatistics; `.hash` identifies them.

    Raises:
        ValueError, TypeError: a reward that is not finite, mismatched sizes, a negative kappa or ddof.
    """
    op = "freeze_statistics"
    validation.tensor(op, "rewards", rewards)
    validation.non_negative(op, "kappa", kappa)
    validation.non_negative(op, "ddof", ddof)
    groups = group_index(group_ids, op=op)
    rows, device = groups.num_rows, rewards.device
    if groups.index.device != device:
        groups = groups.to(device)
    name = dispatch.resolve(op, backend, rewards, dtypes=validation.FLOATS)
    # Copies: what is frozen does not change with what the caller does to its tensors afterwards.
    values = float64_rows(op, "rewards", rewards, rows, device).clone()
    if include is not None:
        include = include_rows(op, include, rows, device).clone()
    index = None if turn_ids is None else segments(turn_ids, cu_seqlens, backend=backend)
    if index is not None:
        validation.tensor(op, "turn_ids", index.turn_ids, device=device)
        if index.num_rows != rows:
            raise ValueError(f"{op}: turn_ids has {index.num_rows} rollouts, rewards has {rows}")
    ones = torch.ones_like(values)
    validation.finite_voters(op, values, ones)

    def population(votes: Tensor) -> Population:
        moments = group_moments(values, votes, groups, name)
        turns = None if index is None else turn_moments(values, votes, groups, index, moments.minimum, name)
        return Population(votes, moments, turns)

    return FrozenStatistics(
        rewards=values,
        groups=groups,
        all=population(ones),
        survivors=None if include is None else population(include.to(torch.float64)),
        include=include,
        segments=index,
        denominators=None if mask is None else denominators(mask, cu_seqlens, horizon=horizon, backend=backend),
        kappa=float(kappa),
        ddof=float(ddof),
    )
