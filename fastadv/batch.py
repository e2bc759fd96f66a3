"""A batch of rollouts: what is known per token and per rollout, packed or padded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fastadv import validation
from fastadv.groups import GroupIndex, Labels, group_index
from fastadv.ops.turn_ids import segments, turn_ids_from_mask
from fastadv.outcomes import Census, Outcome, census, ending_tensor, outcome_tensor
from fastadv.rows import Rows
from fastadv.segment_table import Segments
from fastadv.token_ids import LARGEST_ID, TokenIds, offsets_of, ranges


def pad(values: Tensor, cu_seqlens: Tensor, *, width: int | None = None, fill: float = 0) -> Tensor:
    """Packed `[N]` to padded `[B, T]`.

    Args:
        values: `[N]`, any dtype.
        cu_seqlens: `[B + 1]`.
        width: T; None: the longest row.
        fill: value of the padding.

    Returns:
        `[B, T]`. Where every row is `width` long this is a view of `values`, else a copy.

    Raises:
        ValueError: a row longer than `width`, `cu_seqlens` that does not fit.
    """
    rows = Rows.of("pad", "values", values, cu_seqlens)
    lengths = rows.lengths()
    longest = int(lengths.max()) if rows.count else 0
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"pad: width is {width}, but a row has {longest} tokens")
    if rows.tokens == rows.count * width:
        return values.view(rows.count, width)
    padded = values.new_full((rows.count, width), fill)
    padded[_occupied(lengths, width)] = values
    return padded


def unpad(padded: Tensor, lengths: Tensor) -> Tensor:
    """Padded `[B, T]` to packed `[N]`: the first `lengths[b]` tokens of each row.

    Args:
        padded: `[B, T]`, any dtype.
        lengths: `[B]` integers.

    Returns:
        `[N]`, a copy.

    Raises:
        TypeError, ValueError: lengths that are not integers, a length above T or below 0.
    """
    validation.tensor("unpad", "padded", padded)
    validation.tensor("unpad", "lengths", lengths, dtypes=validation.INTEGERS)
    if padded.dim() != 2 or lengths.shape != padded.shape[:1]:
        raise ValueError(
            f"unpad: padded has shape {list(padded.shape)}, lengths {list(lengths.shape)}; expected [B, T] and [B]"
        )
    lengths = lengths.to(torch.int64)  # a narrow type may not hold the width
    if bool(((lengths < 0) | (lengths > padded.shape[1])).any()):
        raise ValueError(f"unpad: lengths must be in [0, {padded.shape[1]}], the width of padded")
    return padded[_occupied(lengths, padded.shape[1])]


def _occupied(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device) < lengths[:, None]


@dataclass(frozen=True, eq=False)
class Batch:
    """Rollouts with everything that advantages, losses and reports are computed from. Make one with `Batch.of`.

    Per-token tensors are packed `[N]` or padded `[B, T]`, responses only; `packed()` and `padded()` go from one to the
    other.

    Attributes:
        mask: `[N]` or `[B, T]` bool, tokens that the model sampled.
        turn_ids: like mask, int32 or int64: turn of each token from 0, -1 outside of turns.
        cu_seqlens: `[B + 1]` int64, ends of the rollouts; None: padded.
        lengths: `[B]` int64, response tokens of each rollout, tool results included and padding not.
        rewards: `[B]` float64; NaN only for rollouts without a result.
        groups: which rollouts are of one prompt.
        outcomes: `[B]` int64, values of Outcome.
        capped: `[B]` bool, cut off by a cap, solved or not.
        row_ids: `[B]` int64, what coins are tossed by: the same number in every pass over a rollout.
        rollout_log_probs: like mask, log-probs under the sampler; None: not logged.
        token_ids: prompt and response ids; None: not known.
        endings: `[B]` int64, values of Ending; None: not known.
        versions: like mask, int32, version of the weights that sampled each token, -1 where none did; None: not known.
    """

    mask: Tensor  # [N] or [B, T]
    turn_ids: Tensor  # like mask
    cu_seqlens: Tensor | None  # [B + 1]
    lengths: Tensor  # [B]
    rewards: Tensor  # [B]
    groups: GroupIndex
    outcomes: Tensor  # [B]
    capped: Tensor  # [B]
    row_ids: Tensor  # [B]
    rollout_log_probs: Tensor | None = None  # like mask
    token_ids: TokenIds | None = None
    endings: Tensor | None = None  # [B]
    versions: Tensor | None = None  # like mask

    @classmethod
    def of(
        cls,
        *,
        mask: Tensor,
        rewards: Tensor,
        group_ids: Labels,
        outcomes: Tensor,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
        turn_ids: Tensor | None = None,
        capped: Tensor | None = None,
        row_ids: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        token_ids: TokenIds | None = None,
        endings: Tensor | None = None,
        versions: Tensor | None = None,
    ) -> Batch:
        """Makes a batch from its parts and checks that they fit.

        Args:
            mask: `[N]` or `[B, T]`, bool, integer or whole-valued float; non-zero marks tokens that the model sampled.
            rewards: `[B]`; NaN only for rollouts without a result (INFRA).
            group_ids: `[B]` labels or a GroupIndex.
            outcomes: `[B]`, see Outcome.
            cu_seqlens: `[B + 1]` for packed tokens.
            lengths: `[B]` response tokens of padded rows, what is past them is padding; None: the width. With
                `cu_seqlens` it can be left out.
            turn_ids: like mask, -1 outside of turns; None: the runs of the mask.
            capped: `[B]` bool; None: the rollouts whose outcome is BUDGET.
            row_ids: `[B]` integers; None: 0 .. B - 1.
            rollout_log_probs: like mask.
            token_ids: prompt and response ids.
            endings: `[B]` integers, see Ending.
            versions: like mask, integers: version of the weights that sampled each token, from 0; what it holds where
                the mask is 0 is not looked at.

        Raises:
            ValueError, TypeError: parts that do not fit, or hold a number that cannot be what they name.
        """
        op = "Batch"
        numbers = (torch.bool, *validation.INTEGERS, *validation.FLOATS)
        rows = Rows.of(op, "mask", mask, cu_seqlens)
        validation.tensor(op, "mask", mask, dtypes=numbers)
        validation.mask_values(op, "mask", mask)
        device, shape, per_row = mask.device, tuple(mask.shape), (rows.count,)
        validation.tensor(op, "rewards", rewards, shape=per_row, dtypes=numbers, device=device)
        groups = group_index(group_ids, op=op).to(device)
        if groups.num_rows != rows.count:
            raise ValueError(f"{op}: group_ids has {groups.num_rows} rows, mask has {rows.count}")
        outcomes = outcome_tensor(outcomes, op=op).to(device)
        validation.tensor(op, "outcomes", outcomes, shape=per_row)
        values = rewards.to(torch.float64)
        unknown = ~values.isfinite() & (outcomes != Outcome.INFRA)
        if bool(unknown.any()):
            row = int(unknown.nonzero()[0])
            raise ValueError(
                f"{op}: rewards[{row}] is {float(values[row])}, but its outcome is not INFRA; "
                "a result has a finite reward"
            )
        lengths = _lengths(op, rows, mask, lengths)
        if turn_ids is None:
            turn_ids = turn_ids_from_mask(mask, rows.cu_seqlens)
        validation.tensor(op, "turn_ids", turn_ids, shape=shape, dtypes=(torch.int32, torch.int64), device=device)
        if rows.cu_seqlens is None and bool((lengths < shape[1]).any()):
            turn_ids = torch.where(_occupied(lengths, shape[1]), turn_ids, -1)
        if rollout_log_probs is not None:
            validation.tensor(
                op, "rollout_log_probs", rollout_log_probs, shape=shape, dtypes=validation.FLOATS, device=device
            )
        row_ids = torch.arange(rows.count, device=device) if row_ids is None else row_ids
        validation.tensor(op, "row_ids", row_ids, shape=per_row, dtypes=validation.INTEGERS, device=device)
        capped = outcomes == Outcome.BUDGET if capped is None else capped
        validation.tensor(op, "capped", capped, shape=per_row, dtypes=(torch.bool,), device=device)
        if endings is not None:
            validation.tensor(op, "endings", endings, shape=per_row, dtypes=validation.INTEGERS, device=device)
            endings = ending_tensor(endings, op=op)
        if versions is not None:
            versions = _versions(op, versions, mask)
        batch = cls(
            mask != 0,
            turn_ids,
            rows.cu_seqlens,
            lengths,
            values,
            groups,
            outcomes,
            capped,
            row_ids.to(torch.int64),
            rollout_log_probs,
            None if token_ids is None else token_ids.checked(op, lengths),
            endings,
            versions,
        )
        try:
            batch.segments  # noqa: B018 - turn ids are checked where they are listed, and no later than here
        except ValueError as error:
            raise ValueError(f"{op}: {error}") from error
        return batch

    def __repr__(self) -> str:
        parts = [f"{self.num_rollouts} rollouts in {self.groups.num_groups} groups"]
        if validation.on_host(self.mask, self.turn_ids):
            parts += [
                f"{self.segments.count} turns",
                f"{self.num_tokens} tokens, {int(self.mask.sum())} of them sampled",
            ]
        layout = "padded" if self.cu_seqlens is None else "packed"
        optional = ("rollout_log_probs", "token_ids", "endings", "versions")
        known = [name for name in optional if getattr(self, name) is not None]
        parts += [f"{layout} {list(self.mask.shape)} on {self.mask.device}", *(f"with {name}" for name in known)]
        return f"Batch({', '.join(parts)})"

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts, B."""
        return self.rewards.shape[0]

    @property
    def num_tokens(self) -> int:
        """Response tokens, padding not counted."""
        return int(self.lengths.sum())

    @property
    def rows(self) -> Rows:
        """The token layout."""
        return Rows(self.mask.shape, self.num_rollouts, self.cu_seqlens)

    @cached_property
    def segments(self) -> Segments:
        """The (rollout, turn) pairs."""
        return segments(self.turn_ids, self.cu_seqlens)

    def census(self) -> Census:
        """Counts of outcomes, over all and by group."""
        return census(self.outcomes, self.groups)

    def padded(self, width: int | None = None) -> Batch:
        """The batch with `[B, T]` tokens. A view where every row is `width` long, else a copy."""
        if self.cu_seqlens is None:
            return self if width is None or width == self.mask.shape[1] else self.packed().padded(width)
        cu_seqlens = self.cu_seqlens

        def spread(values: Tensor, fill: float) -> Tensor:
            return pad(values, cu_seqlens, width=width, fill=fill)

        log_probs = None if self.rollout_log_probs is None else spread(self.rollout_log_probs, 0.0)
        versions = None if self.versions is None else spread(self.versions, -1)
        return replace(
            self,
            mask=spread(self.mask, 0),
            turn_ids=spread(self.turn_ids, -1),
            rollout_log_probs=log_probs,
            versions=versions,
            cu_seqlens=None,
        )

    def packed(self) -> Batch:
        """The batch with `[N]` tokens and `cu_seqlens`."""
        if self.cu_seqlens is not None:
            return self
        log_probs = None if self.rollout_log_probs is None else unpad(self.rollout_log_probs, self.lengths)
        versions = None if self.versions is None else unpad(self.versions, self.lengths)
        return replace(
            self,
            mask=unpad(self.mask, self.lengths),
            turn_ids=unpad(self.turn_ids, self.lengths),
            rollout_log_probs=log_probs,
            versions=versions,
            cu_seqlens=offsets_of(self.lengths),
        )

    def take(self, rows: Tensor) -> Batch:
        """The rollouts with these numbers (`[n]` int64), in this order, packed; groups keep what is left of them."""
        validation.tensor("Batch.take", "rows", rows, dtypes=(torch.int32, torch.int64))
        bad = (rows < 0) | (rows >= self.num_rollouts)
        if rows.dim() != 1 or bool(bad.any()):
            what = f"has shape {list(rows.shape)}" if rows.dim() != 1 else f"holds {int(rows[bad][0])}"
            raise ValueError(f"Batch.take: rows {what}; pass [n] numbers from 0 to {self.num_rollouts - 1}")
        batch = self.packed()
        assert batch.cu_seqlens is not None
        tokens = ranges(batch.cu_seqlens, rows)
        ids = batch.token_ids
        if ids is not None:
            ids = ids.take(rows, batch.num_rollouts)
        return Batch(
            mask=batch.mask[tokens],
            turn_ids=batch.turn_ids[tokens],
            cu_seqlens=offsets_of(batch.lengths[rows]),
            lengths=batch.lengths[rows],
            rewards=batch.rewards[rows],
            groups=group_index(batch.groups.index[rows]),
            outcomes=batch.outcomes[rows],
            capped=batch.capped[rows],
            row_ids=batch.row_ids[rows],
            rollout_log_probs=None if batch.rollout_log_probs is None else batch.rollout_log_probs[tokens],
            token_ids=ids,
            endings=None if batch.endings is None else batch.endings[rows],
            versions=None if batch.versions is None else batch.versions[tokens],
        )

    def select(self, rows: Tensor) -> Batch:
        """The rollouts where `rows [B]` (bool) is True, as `take` gives them."""
        validation.tensor("Batch.select", "rows", rows, shape=(self.num_rollouts,), dtypes=(torch.bool,))
        return self.take(rows.nonzero().squeeze(1))

    def by_sequence(self) -> Batch:
        """The batch in which each row of `token_ids` is a rollout of its own, packed; itself where it is that already.

        Tokens keep their order, their turns and their rollout's reward, group and row id, so that per-token values of
        one are those of the other. Turns that lie in other rows are segments without tokens.
        """
        ids = self.token_ids
        if ids is None or ids.rollouts is None or ids.responses is None:
            return self
        batch, of = self.packed(), ids.rollouts
        return replace(
            batch,
            cu_seqlens=offsets_of(ids.responses),
            lengths=ids.responses,
            rewards=batch.rewards[of],
            groups=group_index(batch.groups.index[of]),
            outcomes=batch.outcomes[of],
            capped=batch.capped[of],
            row_ids=batch.row_ids[of],
            token_ids=TokenIds(ids.ids, ids.cu_seqlens),
            endings=None if batch.endings is None else batch.endings[of],
        )

    def micro_batches(self, max_tokens: int) -> Iterator[tuple[int, int]]:
        """Ranges `(first, last)` of rollouts, in order: at most `max_tokens` padded tokens in each, or one rollout.

        Raises:
            ValueError: max_tokens below 1.
        """
        if max_tokens < 1:
            raise ValueError(f"micro_batches: max_tokens is {max_tokens}; it must be at least 1")
        rows, lengths = [1] * self.num_rollouts, self.lengths.tolist()  # of each rollout, and its longest
        if self.token_ids is not None:
            offsets = self.token_ids.rows_of(self.num_rollouts)
            rows, whole = offsets.diff().tolist(), self.token_ids.cu_seqlens.diff()
            row = torch.repeat_interleave(torch.arange(len(rows), device=whole.device), offsets.diff())
            lengths = torch.zeros_like(self.lengths).scatter_reduce(0, row, whole, "amax").tolist()
        first, longest, count = 0, 0, 0
        for rollout, (length, own) in enumerate(zip(lengths, rows, strict=True)):
            longest_now = max(longest, length)
            if rollout > first and longest_now * (count + own) > max_tokens:
                yield first, rollout
                first, longest_now, count = rollout, length, 0
            longest, count = longest_now, count + own
        if first < len(lengths):
            yield first, len(lengths)


def _lengths(op: str, rows: Rows, mask: Tensor, lengths: Tensor | None) -> Tensor:
    """Response tokens of each row, `[B]` int64, after checks of what was given."""
    if lengths is not None:
        validation.tensor(op, "lengths", lengths, shape=(rows.count,), dtypes=validation.INTEGERS, device=mask.device)
        lengths = lengths.to(torch.int64)
    if rows.cu_seqlens is not None:
        known = rows.lengths()
        if lengths is not None and not torch.equal(lengths, known):
            row = int((lengths != known).nonzero()[0])
            raise ValueError(
                f"{op}: lengths[{row}] is {int(lengths[row])}, but by cu_seqlens the row has {int(known[row])} tokens; "
                "leave lengths out for packed tokens"
            )
        return known
    width = mask.shape[1]
    if lengths is None:
        return torch.full((rows.count,), width, dtype=torch.int64, device=mask.device)
    bad = (lengths < 0) | (lengths > width)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(f"{op}: lengths[{row}] is {int(lengths[row])}; it must be in [0, {width}], the width of mask")
    past = (mask != 0) & ~_occupied(lengths, width)
    if bool(past.any()):
        row, at = past.nonzero()[0].tolist()
        raise ValueError(
            f"{op}: mask[{row}, {at}] is set, but lengths[{row}] is {int(lengths[row])}; past it there is padding only"
        )
    return lengths


def _versions(op: str, versions: Tensor, mask: Tensor) -> Tensor:
    """Versions as int32, -1 where the model sampled nothing, after checks of what was given."""
    validation.tensor(op, "versions", versions, shape=tuple(mask.shape), dtypes=validation.INTEGERS, device=mask.device)
    sampled, versions = mask != 0, versions.to(torch.int64)  # a narrow type would not hold the limits below
    bad = sampled & ((versions < 0) | (versions > LARGEST_ID))
    if bool(bad.any()):
        at = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{op}: versions{at} is {int(versions[tuple(at)])} at a sampled token; versions are from 0 to {LARGEST_ID}"
        )
    return torch.where(sampled, versions, -1).to(torch.int32)
