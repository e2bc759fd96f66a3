"""verl's rows as sessions: one rollout of a Batch each, whatever number of outputs its agent loop put out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from fastadv.integrations.verl.trainer_keys import TrainerOptions
from fastadv.integrations.verl.trainer_rows import TrainerRows
from torch import Tensor

from fastadv import Batch, Ending, SegmentTable, outcomes_of, pad, segment_tokens, turn_ids_from_mask, unpad


def continued_turn_ids(sampled: Tensor, sessions: Tensor, outputs: Tensor) -> Tensor:
    """Turns of rows, counted on through the outputs of a session.

    Args:
        sampled: `[B, R]` bool, tokens that the model sampled; a turn is a run of them.
        sessions: `[B]` int64, session of each row.
        outputs: `[B]` int64, place of the row in its session.

    Returns:
        `[B, R]` int32, -1 outside of turns.
    """
    ids = turn_ids_from_mask(sampled)  # [B, R]
    count = ids.amax(1).to(torch.int64) + 1 if ids.shape[1] else sessions.new_zeros(ids.shape[0])  # [B]
    order = session_order(sessions, outputs)
    before = count[order].cumsum(0) - count[order]  # turns of all earlier rows
    first = _first_of_run(sessions[order])
    begin = torch.where(first, before, -1).cummax(0).values  # of the session
    offset = torch.empty_like(count)
    offset[order] = before - begin
    return torch.where(ids >= 0, ids + offset[:, None].to(torch.int32), -1)


def session_order(sessions: Tensor, outputs: Tensor) -> Tensor:
    """Rows by session, then by output, `[B]` int64."""
    by_output = torch.argsort(outputs, stable=True)
    return by_output[torch.argsort(sessions[by_output], stable=True)]


def _first_of_run(values: Tensor) -> Tensor:
    first = torch.ones_like(values, dtype=torch.bool)
    first[1:] = values[1:] != values[:-1]
    return first


@dataclass(frozen=True, eq=False)
class SessionBatch:
    """Sessions of verl's rows as a Batch, without verl's padding rows.

    Attributes:
        batch: packed, a rollout is a session: the responses of its outputs one after the other.
        rollout: `[B]` int64, rollout of each row; -1 for padding rows.
        turn_ids: `[B, R]` int32, turns of the rows, counted on through a session.
        order: `[M]` int64, the rows that the batch holds, in its order.
        lengths: `[M]` int64, their response tokens.
        prompts: `[S]` int64, what coins of groups are tossed by.
    """

    batch: Batch
    rollout: Tensor  # [B]
    turn_ids: Tensor  # [B, R]
    order: Tensor  # [M]
    lengths: Tensor  # [M]
    prompts: Tensor  # [S]

    @classmethod
    def of(cls, rewards: Tensor, rows: TrainerRows, options: TrainerOptions) -> SessionBatch:
        """Makes the batch.

        Args:
            rewards: `[B]` float, rewards of rows, as advantages are to be computed from; a session's is its last
                output's.
            rows: what the trainer knows.
            options: the trainer's keys.
        """
        keys = rows.keys
        turn_ids = continued_turn_ids(rows.sampled, keys.sessions, keys.outputs)
        order = session_order(keys.sessions, keys.outputs)
        order = order[~rows.padding[order]]
        # Sessions are counted from 0 in order of appearance, padding rows among them: the others close up.
        present, rollout = torch.unique(keys.sessions[order], return_inverse=True)
        of_row = torch.full_like(keys.sessions, -1)
        of_row[order] = rollout
        last = order[keys.last[order]]  # one row a session, in the order of the sessions
        lengths = rows.lengths[order]
        per_session = torch.zeros(len(present), dtype=torch.int64).index_add_(0, rollout, lengths)
        cu_seqlens = torch.cat([per_session.new_zeros(1), per_session.cumsum(0)])
        endings = None if rows.endings is None else rows.endings[last]
        if endings is None:
            endings = torch.full_like(last, int(Ending.UNKNOWN))
        outcomes = outcomes_of(
            endings, rows.scores[last], solved_above=options.own.solved_above, timeout=options.timeout
        )
        uids, versions = [keys.uids[row] for row in last.tolist()], row_versions(rows)
        batch = Batch.of(
            mask=unpad(rows.sampled[order], lengths),
            rewards=rewards[last],
            group_ids=uids,
            outcomes=outcomes.outcomes,
            capped=outcomes.capped,
            cu_seqlens=cu_seqlens,
            turn_ids=unpad(turn_ids[order], lengths),
            row_ids=keys.ids[present],
            endings=rows.endings if rows.endings is None else endings,
            versions=None if versions is None else unpad(versions[order], lengths),
        )
        return cls(batch, of_row, turn_ids, order, lengths, keys.prompts[last])

    def at_tokens(self, values: Tensor) -> Tensor:
        """Values of the batch's tokens `[N]` at verl's: `[B, R]` float32, 0 where the model did not sample."""
        values = torch.where(self.batch.mask, values, 0.0).to(torch.float32)
        ends = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])
        spread = torch.zeros(self.turn_ids.shape)  # [B, R]
        spread[self.order] = pad(values, ends, width=self.turn_ids.shape[1])
        return spread

    def of_segments(self, table: SegmentTable) -> Tensor:
        """Values of turns at verl's tokens, `[B, R]`."""
        return self.at_tokens(segment_tokens(table))

    def of_rollouts(self, values: Tensor) -> Tensor:
        """Values of rollouts `[S]` at verl's tokens, `[B, R]`."""
        return self.at_tokens(self.batch.rows.spread(values))


def row_versions(rows: TrainerRows) -> Tensor | None:
    """Versions of the weights at verl's tokens, `[B, R]` int32; None where nothing tells.

    verl knows those of the first and of the last token of a row: all but the last sampled token get the first, so that
    no token is younger than it is said to be.
    """
    if rows.versions is None:
        return None
    first, last = rows.versions.to(torch.int32).unbind(1)
    position = torch.arange(rows.sampled.shape[1])
    newest = torch.where(rows.sampled, position, -1).amax(1, keepdim=True) if len(position) else -1  # [B, 1]
    return torch.where(position == newest, last[:, None], first[:, None])
