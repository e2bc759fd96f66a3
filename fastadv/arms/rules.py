"""What an arm is put together from: conditions for exclusion, weights of rollouts, weights of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from fastadv import validation
from fastadv.arms.known import NOTHING, Known, group_ids, newest, sampled_ranks, stale_rollouts
from fastadv.batch import Batch
from fastadv.coins import RESCUE, in_any_row, keep, mixed, uniforms, weights_of
from fastadv.outcomes import Outcome


def _probability(rule: str, name: str, value: float) -> None:
    validation.non_negative(rule, name, value)
    if not 0 < value <= 1:
        raise ValueError(f"{rule}: {name} is {value}; it must be in (0, 1], since what is kept is weighted by 1/{name}")


def _whole(rule: str, name: str, value: int, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{rule}: {name} is {value!r}; pass an integer")
    if value < least:
        raise ValueError(f"{rule}: {name} is {value}; it must be at least {least}")


@dataclass(frozen=True)
class Condition:
    """What else a rollout has to be for an arm to exclude it. Everything that is set has to hold.

    Attributes:
        capped: it was cut off by a cap, solved or not.
        reward_at_most: its reward is at most this.
        not_wrong: it did not submit a wrong answer (its outcome is not FAILED).
        not_repeating: its last n response tokens are not the n before them once more; 0: not asked.
        stale_after: its oldest sampled token is more than this many versions old.
    """

    capped: bool = False
    reward_at_most: float | None = None
    not_wrong: bool = False
    not_repeating: int = 0
    stale_after: int | None = None

    def __post_init__(self) -> None:
        _whole("Condition", "not_repeating", self.not_repeating)
        if self.stale_after is not None:
            _whole("Condition", "stale_after", self.stale_after)
        if self.reward_at_most is not None and math.isnan(self.reward_at_most):
            raise ValueError("Condition: reward_at_most is nan, and no reward is at most that; pass a number")
        if all(getattr(self, f.name) == f.default for f in fields(self)):
            raise ValueError("Condition: nothing is asked of a rollout; leave the condition out")

    def holds(self, op: str, batch: Batch, known: Known) -> Tensor:
        """Rollouts for which it holds, `[B]` bool."""
        true = torch.ones_like(batch.capped)
        if self.capped:
            true &= batch.capped
        if self.reward_at_most is not None:
            true &= batch.rewards <= self.reward_at_most
        if self.not_wrong:
            true &= batch.outcomes != Outcome.FAILED
        if self.not_repeating:
            true &= ~repeating(op, batch, self.not_repeating, known)
        if self.stale_after is not None:
            true &= stale_rollouts(op, batch, self.stale_after, known)
        return true


def repeating(op: str, batch: Batch, tokens: int, known: Known = NOTHING) -> Tensor:
    """Rollouts whose last response tokens are the same as those before them, `[B]` bool."""
    if known.repeating is not None:
        shape, device = (batch.num_rollouts,), batch.rewards.device
        validation.tensor(op, "repeating", known.repeating, shape=shape, dtypes=(torch.bool,), device=device)
        return known.repeating
    if batch.token_ids is None:
        raise ValueError(f"{op}: the batch has no token ids, so nobody can tell which rollouts repeat themselves")
    ids, ends, lengths = batch.token_ids.ids, batch.token_ids.cu_seqlens[1:], batch.lengths
    if batch.token_ids.responses is not None:  # how the last row of a rollout ends
        last = batch.token_ids.rows_of(batch.num_rollouts)[1:] - 1
        there = last >= 0
        ends, lengths = ends[last] * there, batch.token_ids.responses[last] * there
    rows = (lengths >= 2 * tokens).nonzero().squeeze(1)
    place = ends[rows, None] - tokens + torch.arange(tokens, device=ends.device)  # [n, tokens]
    found = torch.zeros_like(batch.capped)
    found[rows] = (ids[place] == ids[place - tokens]).all(1)
    return found


# ---- weights of rollouts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InverseProbability:
    """Weight 1/c for a rollout that is kept with the known probability c.

    c is 1 - fraction for the rollouts that an arm's coins decided about, times `Known.keep_probability`.
    """

    def weights(self, op: str, batch: Batch, chance: Tensor, seed: int, known: Known) -> Tensor:
        """`[B]` float64; `chance [B]` is that of being excluded."""
        kept = 1 - chance
        if known.keep_probability is not None:
            given = known.keep_probability
            shape, device = (batch.num_rollouts,), kept.device
            validation.tensor(op, "keep_probability", given, shape=shape, dtypes=validation.FLOATS, device=device)
            bad = ~((given > 0) & (given <= 1))
            if validation.reads_values(given) and bool(bad.any()):
                row = int(bad.nonzero()[0])
                raise ValueError(
                    f"{op}: keep_probability[{row}] is {float(given[row])}; a rollout that is there was kept with a "
                    "probability in (0, 1]"
                )
            kept = kept * given
        return 1 / kept


@dataclass(frozen=True)
class Rescue:
    """Stale groups are kept with a known probability, by one coin a group, and then weighted by its inverse: the coins
    of `fastadv.coins.rescue_weights`.

    Attributes:
        keep: probability, in (0, 1].
        stale_after: a group is stale if its oldest sampled token is more than this many versions old.
    """

    keep: float
    stale_after: int = 0

    def __post_init__(self) -> None:
        _probability("Rescue", "keep", self.keep)
        _whole("Rescue", "stale_after", self.stale_after)

    def weights(self, op: str, batch: Batch, chance: Tensor, seed: int, known: Known) -> Tensor:
        """`[B]` float64: 1, 0 or 1/keep."""
        stale = in_any_row(batch.groups, stale_rollouts(op, batch, self.stale_after, known))
        kept = keep(seed, group_ids(op, batch, known), self.keep, stream=RESCUE)
        return weights_of(stale, kept, 1 / self.keep)


RowWeights = InverseProbability | Rescue


# ---- weights of tokens -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnMask:
    """Only these turns are trained on: m_t is known before the token is sampled.

    Attributes:
        below: turns from this one on (counted from 0) are masked; None: none for that reason.
        skip: turns that are masked.
    """

    below: int | None = None
    skip: tuple[int, ...] = ()

    kind: ClassVar[str] = "predictable"
    level: ClassVar[str] = "turn"

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", tuple(self.skip))
        if self.below is not None:
            _whole("TurnMask", "below", self.below, 1)
        for turn in self.skip:
            _whole("TurnMask", "skip", turn)
        if self.below is None and not self.skip:
            raise ValueError("TurnMask: no turn is masked; set below or skip, or leave the rule out")

    def weights(self, op: str, batch: Batch, seed: int, known: Known) -> Tensor:
        """Like the mask, float64."""
        kept = batch.turn_ids < self.below if self.below is not None else torch.ones_like(batch.mask)
        for turn in self.skip:
            kept = kept & (batch.turn_ids != turn)
        return kept.to(torch.float64)


@dataclass(frozen=True)
class StaleTokens:
    """Tokens that more than `after` versions ago's weights sampled are masked: which ones depends on how long the
    rollout took, and so on how it went on."""

    after: int

    kind: ClassVar[str] = "outcome"
    level: ClassVar[str] = "token"

    def __post_init__(self) -> None:
        _whole("StaleTokens", "after", self.after)

    def weights(self, op: str, batch: Batch, seed: int, known: Known) -> Tensor:
        """Like the mask, float64."""
        versions, trained = newest(op, batch, known)
        return (versions >= trained - self.after).to(torch.float64)


@dataclass(frozen=True)
class TokenCoins:
    """NAT's uniform subsampling (URS): each token is kept by a coin of its own, and then weighted by 1/keep.

    Divide by the full length, not by the number kept.

    Attributes:
        keep: probability, in (0, 1].
    """

    keep: float

    kind: ClassVar[str] = "none"
    level: ClassVar[str] = "token"

    def __post_init__(self) -> None:
        _probability("TokenCoins", "keep", self.keep)

    def weights(self, op: str, batch: Batch, seed: int, known: Known) -> Tensor:
        """Like the mask, float64: 0 or 1/keep."""
        ids = batch.rows.spread(mixed(batch.row_ids)) + sampled_ranks(batch)
        return (uniforms(seed, ids, "token coins") < self.keep).to(torch.float64) / self.keep


@dataclass(frozen=True)
class PrefixCut:
    """NAT's random prefix cut (RPC): tokens up to K are kept and weighted by 1 / P(K >= t).

    K is uniform on `least` .. T for a rollout of T sampled tokens. Divide by the full length, not by the number kept.

    Attributes:
        least: smallest K, from 1; shorter rollouts are kept whole.
    """

    least: int = 1

    kind: ClassVar[str] = "none"
    level: ClassVar[str] = "token"

    def __post_init__(self) -> None:
        _whole("PrefixCut", "least", self.least, 1)

    def weights(self, op: str, batch: Batch, seed: int, known: Known) -> Tensor:
        """Like the mask, float64."""
        total = batch.rows.sum(batch.mask.to(torch.int64))  # [B]
        choices = (total - self.least + 1).clamp(min=1)  # [B]: values of K
        cut = self.least + (uniforms(seed, batch.row_ids, "prefix cut") * choices).floor()  # [B]
        place = sampled_ranks(batch) + 1  # like the mask: t, from 1
        spread = batch.rows.spread
        reached = ((spread(total) - place + 1) / spread(choices)).clamp(max=1)  # P(K >= t)
        kept = place <= spread(cut)
        return torch.where(kept & batch.mask, 1 / torch.where(batch.mask, reached, 1.0), 0.0)


@dataclass(frozen=True)
class Continuation:
    """STOPD: at each of these turns the rollout goes on with a known probability, and what comes after is weighted by
    its inverse, the product of them where there are several.

    Attributes:
        turns: before which a coin is tossed, counted from 0 (so from 1 on), increasing.
        keep: probability of going on, in (0, 1].
    """

    turns: tuple[int, ...]
    keep: float

    kind: ClassVar[str] = "none"
    level: ClassVar[str] = "turn"

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", tuple(self.turns))
        _probability("Continuation", "keep", self.keep)
        if not self.turns:
            raise ValueError("Continuation: no turn is named; leave the rule out")
        for turn in self.turns:
            _whole("Continuation", "turns", turn, 1)
        if sorted(set(self.turns)) != list(self.turns):
            raise ValueError(f"Continuation: turns is {self.turns}; they must increase")

    def weights(self, op: str, batch: Batch, seed: int, known: Known) -> Tensor:
        """Like the mask, float64."""
        result = torch.ones_like(batch.mask, dtype=torch.float64)
        for number, turn in enumerate(self.turns):
            going = keep(seed, batch.row_ids, self.keep, stream=f"continuation {number}").to(torch.float64) / self.keep
            result = torch.where(batch.turn_ids >= turn, result * batch.rows.spread(going), result)
        return result


TokenWeights = TurnMask | StaleTokens | TokenCoins | PrefixCut | Continuation
TOKEN_COINS = (TokenCoins, PrefixCut, Continuation)  # those that the seed decides about
