"""The rows of a verl batch as an estimator reads them: one row is one output of an agent loop, padded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastadv as fa
from fastadv import validation
from fastadv.coins import number

OP = "fastadv in verl"


@dataclass(frozen=True, eq=False)
class Sessions:
    """The sessions that vote: one conversation each, whose reward is that of its last row.

    A session without a token in the mask (verl's padding, a rollout that rejection took out) is none of them.

    Attributes:
        rewards: `[S]`.
        groups: which sessions are of one prompt.
        rows: `[S]` int64, the last row of each.
        of_row: `[B]` int64, the session of each row, S for rows of none.
    """

    rewards: Tensor  # [S]
    groups: fa.GroupIndex
    rows: Tensor  # [S]
    of_row: Tensor  # [B]

    def to_rows(self, values: Tensor) -> Tensor:
        """A value of each session at its rows, `[B]`; 0 at rows of none."""
        return torch.cat([values, values.new_zeros(1)]).index_select(0, self.of_row)


@dataclass(frozen=True, eq=False)
class Packed:
    """The tokens of the sessions that vote, one session after another, as `fastadv.Batch` and turns are packed.

    Attributes:
        order: `[n]` int64, rows of these sessions, by session.
        cu_seqlens: `[S + 1]` int64, ends of the sessions.
        shape: of the padded rows.
        lengths: `[n]` int64, what is packed of each row; None: all of it, padding too, which saves copies.
    """

    order: Tensor  # [n]
    cu_seqlens: Tensor  # [S + 1]
    shape: torch.Size
    lengths: Tensor | None = None  # [n]

    @cached_property
    def _everything(self) -> bool:
        return torch.equal(self.order, torch.arange(self.shape[0], device=self.order.device))

    def pack(self, padded: Tensor) -> Tensor:
        """`[B, R]` to `[N]`."""
        rows = padded if self._everything else padded[self.order]
        return rows.reshape(-1) if self.lengths is None else fa.unpad(rows, self.lengths)

    def unpack(self, packed: Tensor) -> Tensor:
        """`[N]` to `[B, R]`, 0 at all other tokens."""
        if self.lengths is None:
            rows = packed.view(-1, self.shape[1])
        else:
            rows = fa.pad(packed, _offsets(self.lengths), width=self.shape[1])
        if self._everything:
            return rows
        padded = rows.new_zeros(self.shape)
        padded[self.order] = rows
        return padded


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


@dataclass(frozen=True, eq=False)
class Rows:
    """What of verl's padded rows an estimator reads.

    Masks are bool, or integers as verl has them, not 0 at what counts.

    Attributes:
        rewards: `[B]` float32, token rewards summed over all columns: the reward may stand where the mask is 0.
        token_rewards: `[B, R]`.
        mask: `[B, R]`, as the loss will see it.
        groups: which rows are of one prompt.
        sampled: `[B, R]`, tokens that the model sampled, before any rejection; None: equal to the mask.
        turn_ids: `[B, R]` int32, -1 outside of turns, continuing over the outputs of a session; None: the runs of
            `sampled`.
        sessions: `[B]` int64, the session of each row; None: each row is one.
        outputs: `[B]` int64, place of the row among the outputs of its session, the last of which has its reward; with
            sessions.
        lengths: `[B]` int64, response tokens of each row, tools' too; None: up to the last that was sampled.
        padding: `[B]` bool, rows that verl made up; None: the rows without a token in the mask.
        endings: `[B]` int64, see `fastadv.Ending`, of a session in its last row; None: not known.
        row_ids: `[B]` int64, what coins are tossed by, of a session in its last row; None: not known.
        group_ids: `[B]` int64, what coins of groups are tossed by; None: not known.
        versions: `[B, R]` int32, version of the weights that sampled each token; None: not known.
        values: `[B, R]`, the critic's; None: there is none.
        old_log_probs, sum_pi_squared, rollout_is_weights: `[B, R]`; None: not known.
        greedy_rewards: `[B]`, verl's `reward_baselines`; None: not known.
        train_version: of the weights that are about to be updated; None: not known.
        scores: `[B]`, rewards before penalties and shaping, which say what is solved; None: the rewards.
    """

    rewards: Tensor  # [B]
    token_rewards: Tensor  # [B, R]
    mask: Tensor  # [B, R]
    groups: fa.GroupIndex
    sampled: Tensor | None = None  # [B, R]
    turn_ids: Tensor | None = None  # [B, R]
    sessions: Tensor | None = None  # [B]
    outputs: Tensor | None = None  # [B]
    lengths: Tensor | None = None  # [B]
    padding: Tensor | None = None  # [B]
    endings: Tensor | None = None  # [B]
    row_ids: Tensor | None = None  # [B]
    group_ids: Tensor | None = None  # [B]
    versions: Tensor | None = None  # [B, R]
    values: Tensor | None = None  # [B, R]
    old_log_probs: Tensor | None = None  # [B, R]
    sum_pi_squared: Tensor | None = None  # [B, R]
    rollout_is_weights: Tensor | None = None  # [B, R]
    greedy_rewards: Tensor | None = None  # [B]
    train_version: int | None = None
    scores: Tensor | None = None  # [B]

    def __post_init__(self) -> None:
        shape, device = self.token_rewards.shape, self.token_rewards.device
        if len(shape) != 2:
            raise ValueError(f"{OP}: token_level_rewards has shape {list(shape)}; expected [B, R]")
        for name in ("mask", "sampled", "turn_ids", "versions", *TOKENS):
            value = getattr(self, name)
            if value is not None:
                validation.tensor(OP, VERL_NAMES.get(name, name), value, shape=tuple(shape), device=device)
        for name in ROWS:
            value = getattr(self, name)
            if value is not None:
                validation.tensor(OP, VERL_NAMES.get(name, name), value, shape=(shape[0],), device=device)
        if self.groups.num_rows != shape[0]:
            raise ValueError(f"{OP}: uid has {self.groups.num_rows} labels, token_level_rewards has {shape[0]} rows")
        if (self.sessions is None) != (self.outputs is None):
            raise ValueError(f"{OP}: sessions and outputs come together")

    @classmethod
    def of_verl(cls, token_level_rewards: Tensor, response_mask: Tensor, index: Any, **more: Any) -> Rows:
        """Rows from what verl passes to a registered estimator: each row is a session of its own.

        Args:
            token_level_rewards: `[B, R]`.
            response_mask: `[B, R]`.
            index: `[B]` labels, verl's uid, in any order; None: not passed, which no estimator that compares rollouts
                can do without.
            more: other fields, as they are.

        Raises:
            ValueError, TypeError: no uid, shapes that differ.
        """
        validation.tensor(OP, "token_level_rewards", token_level_rewards)
        validation.tensor(OP, "response_mask", response_mask, dtypes=validation.MASKS)
        if index is None:
            raise ValueError(
                f"{OP}: uid is missing: data.non_tensor_batch['uid'] says which rollouts are of one prompt. verl's "
                "trainers set it; where compute_advantage is called by hand, set it there"
            )
        return cls(
            rewards=token_level_rewards.sum(-1),
            token_rewards=token_level_rewards,
            mask=response_mask,
            groups=fa.group_index(index, op=f"{OP}, uid").to(token_level_rewards.device),
            **more,
        )

    @cached_property
    def on(self) -> Tensor:
        """The mask as bool, for what reads it more than once: a copy costs less than eight bytes a token once more."""
        return self.mask.bool()

    @cached_property
    def has_tokens(self) -> Tensor:
        """Rows with a token in the mask, `[B]` bool; padding has none. Whole rows are read only where the first token
        is not of the mask."""
        found = self.mask[:, :1].bool().any(-1)
        rest = (~found).nonzero().squeeze(1)
        if rest.numel():
            found[rest] = fa.token_counts(self.mask[rest]) > 0
        return found if self.padding is None else found & ~self.padding

    @cached_property
    def voting(self) -> Sessions:
        """The sessions that vote."""
        last = of_row = torch.arange(self.mask.shape[0], device=self.mask.device)
        keeps = self.has_tokens
        if self.sessions is not None:
            index = fa.group_index(self.sessions)
            last, of_row = self._last_rows(index), index.index
            keeps = torch.zeros_like(last).index_add(0, of_row, keeps.long()) > 0
        if bool(keeps.all()):
            groups = self.groups if self.sessions is None else fa.group_index(self.groups.index[last])
            return Sessions(self.rewards[last], groups, last, of_row)
        place = torch.where(keeps, keeps.cumsum(0) - 1, keeps.sum())
        kept = last[keeps]
        return Sessions(self.rewards[kept], fa.group_index(self.groups.index[kept]), kept, place[of_row])

    @cached_property
    def session_lengths(self) -> Tensor:
        """Tokens of the mask of each session that votes, `[S]` int64."""
        of_row, count = self.voting.of_row, self.voting.rows.shape[0]
        return of_row.new_zeros(count + 1).index_add(0, of_row, fa.token_counts(self.on))[:count]

    @cached_property
    def _in_sessions(self) -> Tensor:
        """All rows, `[B]` int64, by session and then by output."""
        if self.sessions is None or self.outputs is None:
            return torch.arange(self.mask.shape[0], device=self.mask.device)
        by_output = self.outputs.argsort(stable=True)
        return by_output[fa.group_index(self.sessions).index[by_output].argsort(stable=True)]

    def _last_rows(self, index: fa.GroupIndex) -> Tensor:
        """The last row of each session, `[S]`."""
        order = self._in_sessions
        last = order[index.offsets[1:] - 1]
        if not torch.equal(self.groups.index[last][index.index], self.groups.index):
            raise ValueError(f"{OP}: a session has rows of two uids; its outputs answer one prompt")
        return last

    @cached_property
    def packed(self) -> Packed:
        """The sessions that vote, one after another, padding too."""
        order = self._by_session
        return Packed(order, self._ends(torch.full_like(order, self.mask.shape[1])), self.mask.shape)

    @cached_property
    def trimmed(self) -> Packed:
        """The same without padding, where positions and lengths are looked at."""
        lengths = self.lengths
        if lengths is None:  # to the last token that was sampled
            on = self.on if self.sampled is None else self.sampled.bool()
            lengths = torch.where(on, torch.arange(1, on.shape[1] + 1, device=on.device), 0).amax(1)
        lengths = lengths[self._by_session]
        return Packed(self._by_session, self._ends(lengths), self.mask.shape, lengths)

    @cached_property
    def _by_session(self) -> Tensor:
        """Rows of the sessions that vote, `[n]`, by session and then by output."""
        order = self._in_sessions
        order = order[self.voting.of_row[order] < self.voting.rows.shape[0]]
        return order[self.voting.of_row[order].argsort(stable=True)]

    def _ends(self, lengths: Tensor) -> Tensor:
        """Ends of sessions, `[S + 1]`, from the lengths of `_by_session`."""
        sums = lengths.new_zeros(self.voting.rows.shape[0])
        return _offsets(sums.index_add(0, self.voting.of_row[self._by_session], lengths))

    @cached_property
    def voting_groups(self) -> fa.GroupIndex:
        """Groups of rows, those without a token each in one of its own."""
        empty = ~self.has_tokens
        if not bool(empty.any()):
            return self.groups
        own = self.groups.num_groups + torch.arange(empty.shape[0], device=empty.device)
        return fa.group_index(torch.where(empty, own, self.groups.index))

    @cached_property
    def rewards_on_mask(self) -> Tensor:
        """Token rewards, `[B, R]`: what stands outside of the mask (verl writes an outcome on a row's last token, be it
        a tool's) moved to the token of the mask before it. What has none before it follows from no token."""
        outside = self.token_rewards.bool() > self.on
        rows = outside.any(-1).nonzero().squeeze(1)
        if not rows.numel():
            return self.token_rewards
        mine, on = self.token_rewards[rows], self.on[rows]  # [n, R]
        before = torch.where(on, torch.arange(on.shape[1], device=on.device), -1).cummax(-1).values
        moved = torch.where(~on & (before >= 0), mine, 0.0)
        result = self.token_rewards.clone()
        result[rows] = torch.where(on, mine, 0.0).scatter_add(1, before.clamp(min=0), moved)
        return result

    def spread(self, per_row: Tensor) -> Tensor:
        """A value of each row at its tokens of the mask, 0 elsewhere: `[B, R]` float32."""
        mask = self.__dict__.get("on", self.mask)  # where it was made, it is the smaller one
        return fa.token_returns(mask, rewards=per_row).returns

    @property
    def turns(self) -> Tensor:
        """Turn of each token, `[B, R]` int32."""
        if self.turn_ids is not None:
            return self.turn_ids
        ids = fa.turn_ids_from_mask(self.mask if self.sampled is None else self.sampled)
        if self.sessions is None or not ids.numel():
            return ids
        order, session = self._in_sessions, fa.group_index(self.sessions)
        turns = ids.amax(1).long()[order] + 1
        before = turns.cumsum(0) - turns  # in all rows up to here
        first = before[session.offsets[:-1]]  # of each session
        start = torch.empty_like(before).index_copy_(0, order, before) - first[session.index]
        return torch.where(ids < 0, ids, ids + start[:, None].to(torch.int32))


@dataclass(eq=False)
class Told:
    """What a trainer of ours says about a batch while verl computes its advantages.

    Attributes:
        fields: fields of Rows that verl does not pass, by name.
        made: what an arm made of the rows, which it leaves for the trainer; None: no arm ran.
        turns: rows that are turns, for the estimators of verl-agent; None: nobody says.
    """

    fields: Mapping[str, Any]
    made: Any = None
    turns: Any = None


_TOLD: ContextVar[Told | None] = ContextVar("fastadv_verl_told", default=None)


def told() -> Told | None:
    """What a trainer of ours says about the batch; None under a trainer of verl's."""
    return _TOLD.get()


@contextmanager
def telling(*, turns: Any = None, **fields: Any) -> Iterator[Told]:
    """Inside of the context, registered estimators know these fields of Rows. A trainer calls verl's own code in it."""
    found = Told(fields, turns=turns)
    token = _TOLD.set(found)
    try:
        yield found
    finally:
        _TOLD.reset(token)


ROWS = (
    "rewards", "sessions", "outputs", "lengths", "padding", "endings", "row_ids", "group_ids", "greedy_rewards",
    "scores",
)  # fmt: skip
TOKENS = ("values", "old_log_probs", "sum_pi_squared", "rollout_is_weights")
# Fields that verl calls otherwise, for errors.
VERL_NAMES = {"mask": "response_mask", "greedy_rewards": "reward_baselines", "rewards": "token_level_rewards.sum(-1)"}


def stable_ids(labels: Sequence[Any] | np.ndarray) -> dict[str, Tensor]:
    """`row_ids` and `group_ids` of rows with these uids, where nobody gives any: a row's follows from its uid and from
    how many rows of that uid come before it."""
    seen: dict[str, int] = {}
    ids = []
    for label in map(str, labels):
        seen[label] = seen.get(label, -1) + 1
        ids.append((number(f"{label}/{seen[label]}"), number(label)))
    row_ids, group_ids = torch.tensor(ids, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return {"row_ids": row_ids, "group_ids": group_ids}
