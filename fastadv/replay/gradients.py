"""Each arm's policy gradient at a fixed checkpoint, by turn, by difficulty and by half, and how they lie to each other.

The plain way: one backward pass for each arm and cell, gradients kept flat in float64. It is exact, serves every loss
and every model, and is the yardstick for the segment Gram (`fastadv.gradproj`); its memory is the number of cells times
the number of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fastadv.arms import Arm, ArmResult
from fastadv.batch import Batch
from fastadv.gradproj.projections import Projections
from fastadv.gradproj.scopes import TURN_NAMES, Partition, Weighted, partition, within_half
from fastadv.gradproj.statistics import PLUG_IN
from fastadv.losses import LossConfig
from fastadv.monitoring.difficulty import DIFFICULTIES
from fastadv.ops.policy_loss import policy_loss
from fastadv.ops.segments import segment_tokens
from fastadv.ops.turn_ids import segments
from fastadv.outcomes import Outcome
from fastadv.replay.errors import ReplayError
from fastadv.replay.policy import Policy, token_range
from fastadv.segment_table import SegmentTable
from fastadv.token_ids import ranges


def policy_gradients(
    policy: Policy,
    batch: Batch,
    wanted: Sequence[Weighted],
    *,
    loss: str = "reinforce",
    max_tokens: int = 4096,
    progress: Callable[[int], None] = lambda rollouts: None,
) -> Tensor:
    """Ascent directions `[len(wanted), P]` float64: sum over rollouts and tokens of weight * advantage * grad log_prob.

    Args:
        policy: the checkpoint.
        batch: packed rollouts with token ids.
        wanted: what to weight them by; one forward pass serves all.
        loss: "reinforce", or "ppo" with the logged log-probs as the old ones.
        max_tokens: padded tokens of a micro-batch.
        progress: called with the number of rollouts done.

    Raises:
        ReplayError: a gradient that is not finite; "ppo" without logged log-probs.
    """
    policy.check(batch)
    if loss == "ppo" and batch.rollout_log_probs is None:
        raise ReplayError("--loss ppo needs rollout_log_probs, which the rollouts do not carry")
    config = LossConfig(loss, loss_agg_mode="token-sum")
    parameters = policy.parameters
    total = torch.zeros(len(wanted), policy.size, dtype=torch.float64)
    for first, last in batch.micro_batches(max_tokens):
        log_probs = policy.log_probs(batch, first, last)  # [n]
        tokens = token_range(batch, first, last)
        assert batch.cu_seqlens is not None
        cu_seqlens = batch.cu_seqlens[first : last + 1] - batch.cu_seqlens[first]
        old = None if batch.rollout_log_probs is None or loss == "reinforce" else batch.rollout_log_probs[tokens]
        for number, one in enumerate(wanted):
            part, weights = one.advantages.rollouts(first, last), one.weights[first:last]
            if one.token_weights is not None:
                weights = one.token_weights[tokens] * torch.repeat_interleave(weights, cu_seqlens.diff())
            if not bool(weights.any()) or not bool(part.values.any()):
                continue
            leaf = log_probs.detach().requires_grad_()
            out = policy_loss(
                leaf, old, part, batch.mask[tokens], config=config, cu_seqlens=cu_seqlens, weights=weights
            )
            (by_log_prob,) = torch.autograd.grad(out.loss, leaf)
            # A parameter that these rollouts do not reach, such as an expert that no token is sent to, has gradient 0.
            gradient = torch.autograd.grad(
                log_probs, parameters, -by_log_prob, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            total[number] += torch.cat([g.reshape(-1) for g in gradient]).cpu()
        progress(last)
    if not bool(total.isfinite().all()):
        raise ReplayError(
            "a policy gradient is not finite: the checkpoint or the logged log-probs hold NaN or infinity, or "
            "--temperature is too small"
        )
    return total


# ---- cells -----------------------------------------------------------------------------------------------------------


class GradientCells:
    """Flat gradients of every (arm, half, bucket), summed over dumps."""

    def __init__(self, arms: Sequence[Arm], size: int, *, buckets: bool = True) -> None:
        self.arms, self.buckets = tuple(arms), buckets
        turns, difficulties = (len(TURN_NAMES), len(DIFFICULTIES)) if buckets else (1, 0)
        self.by_turn = torch.zeros(len(arms), 2, turns, size, dtype=torch.float64)
        self.by_difficulty = torch.zeros(len(arms), 2, difficulties, size, dtype=torch.float64)
        self.cap = torch.zeros(2, size, dtype=torch.float64)
        self.alone = torch.zeros(2, size, dtype=torch.float64)  # the reference arm of each half without the other
        self.rollouts = 0

    @staticmethod
    def bytes(arms: int, size: int, *, buckets: bool) -> int:
        """Memory of the cells."""
        cells = 2 * arms * (len(TURN_NAMES) + len(DIFFICULTIES) if buckets else 1) + 4
        return 8 * cells * size

    def add(
        self,
        policy: Policy,
        batch: Batch,
        results: Sequence[ArmResult],
        seed: int,
        *,
        loss: str,
        max_tokens: int,
        progress: Callable[[int], None],
    ) -> None:
        """Adds the gradients of one batch. Arms that came out the same are computed once, and rollouts of one cell lie
        together, so that a micro-batch which has none of a cell's is passed over."""
        order = _by_cell(partition(batch, seed))
        before, batch = batch, batch.take(order)
        results = [_reordered(result, order, before, batch) for result in results]
        cells = partition(batch, seed)
        wanted: list[Weighted] = []
        targets: list[list[Tensor]] = []

        def want(one: Weighted, into: list[Tensor]) -> None:
            if bool(one.weights.any()) and bool(one.advantages.values.any()):
                wanted.append(one)
                targets.append(into)

        first_like = [next(j for j, other in enumerate(results) if _same(other, result)) for result in results]
        for number in sorted(set(first_like)):
            result = results[number]
            alike = [i for i, j in enumerate(first_like) if j == number]
            for half in (0, 1):
                weights = result.weights * (cells.half == half)
                for turn in range(self.by_turn.shape[2]):
                    one = Weighted(result.advantages, weights, result.token_weights)
                    one = _of_turns(one, batch, cells.turn == turn) if self.buckets else one
                    want(one, [self.by_turn[i, half, turn] for i in alike])
                for level in range(self.by_difficulty.shape[2]):
                    inside = weights * (cells.difficulty == level)
                    one = Weighted(result.advantages, inside, result.token_weights)
                    want(one, [self.by_difficulty[i, half, level] for i in alike])
        for half in (0, 1):
            want(within_half(batch.outcomes == Outcome.BUDGET, batch, cells, half), [self.cap[half]])
            want(within_half(batch.rewards, batch, cells, half), [self.alone[half]])
        gradients = policy_gradients(policy, batch, wanted, loss=loss, max_tokens=max_tokens, progress=progress)
        for gradient, into in zip(gradients, targets, strict=True):
            for target in into:
                target += gradient
        self.rollouts += batch.num_rollouts


def _by_cell(cells: Partition) -> Tensor:
    """Rollouts sorted by half and difficulty."""
    return (cells.half * len(DIFFICULTIES) + cells.difficulty).argsort(stable=True)


def _reordered(result: ArmResult, order: Tensor, before: Batch, after: Batch) -> ArmResult:
    """An arm's result for the batch with its rollouts, and so its segments, in another order."""
    assert before.cu_seqlens is not None
    index, tokens = result.advantages.segments, ranges(before.cu_seqlens, order)
    values = result.advantages.values[ranges(index.offsets, order)]
    own = after.segments if index is before.segments else segments(index.turn_ids[tokens], after.cu_seqlens)
    return result._replace(
        advantages=SegmentTable(values, own),
        weights=result.weights[order],
        token_weights=None if result.token_weights is None else result.token_weights[tokens],
    )


def _of_turns(one: Weighted, batch: Batch, inside: Tensor) -> Weighted:
    """What an arm does to these turns alone; `inside [S]` bool."""
    if one.advantages.segments is batch.segments:
        table = SegmentTable(torch.where(inside, one.advantages.values, 0.0), batch.segments)
        return replace(one, advantages=table)
    here = segment_tokens(SegmentTable(inside.to(torch.float64), batch.segments))  # like the mask
    return replace(one, token_weights=here if one.token_weights is None else here * one.token_weights)


def _same(a: ArmResult, b: ArmResult) -> bool:
    def equal(x: Tensor | None, y: Tensor | None) -> bool:
        return x is y if x is None or y is None else torch.equal(x, y)

    return (
        torch.equal(a.advantages.segments.offsets, b.advantages.segments.offsets)
        and equal(a.advantages.segments.turn_ids, b.advantages.segments.turn_ids)
        and equal(a.advantages.values, b.advantages.values)
        and equal(a.weights, b.weights)
        and equal(a.token_weights, b.token_weights)
    )


# ---- geometry --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientRow:
    """One arm's gradient against the reference arm's, over all tokens or a bucket of them.

    Norms are of the mean over rollouts. The cap direction of each half comes from the other half's rollouts: the
    difference shares no rollout with what it is projected on.
    """

    arm: str
    scope: str  # "all", a turn bucket or a difficulty
    norm: float
    cosine: float  # to the reference arm
    norm_ratio: float  # to the reference arm
    difference: float  # norm of the difference, relative to the reference's norm
    cap_projection: float  # of the difference on the unit cap direction, relative to the reference's norm
    cap_cosine: float  # of the difference with the cap direction
    cap_slope: float  # difference ~ slope * grad P(cap): the implied subsidy b; NaN if the halves share no direction


def plug_in_rows(projections: Projections) -> list[GradientRow]:
    """The same rows from a segment Gram, without any gradient."""
    names = [field.name for field in fields(GradientRow) if field.name not in ("arm", "scope")]
    return [
        GradientRow(row.arm, row.scope, **{name: getattr(row.comparison, name).value for name in names})
        for row in projections.rows
        if row.estimator == PLUG_IN
    ]


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two flat gradients; NaN if one is zero."""
    product = float(a.norm() * b.norm())
    return float(a @ b) / product if product > 0 else float("nan")


def quotient(a: float, b: float) -> float:
    """a / b; NaN if b is zero."""
    return a / b if b else float("nan")


def compare(cells: GradientCells) -> list[GradientRow]:
    """Every arm against the first, over all tokens and by bucket; buckets without a gradient are left out."""
    scopes = [("all", cells.by_turn.sum(2))]
    if cells.buckets:
        scopes += [(name, cells.by_turn[:, :, i]) for i, name in enumerate(TURN_NAMES)]
        scopes += [(name, cells.by_difficulty[:, :, i]) for i, name in enumerate(DIFFICULTIES)]
    cap = cells.cap / max(1, cells.rollouts)
    rows = []
    for scope, halves in scopes:  # [K, 2, P]
        halves = halves / max(1, cells.rollouts)
        if not bool(halves.any()):
            continue
        reference = halves[0].sum(0)
        for arm, gradient in zip(cells.arms, halves, strict=True):
            rows.append(_row(arm.name, scope, gradient, halves[0], reference, cap))
    return rows


def _row(arm: str, scope: str, halves: Tensor, reference_halves: Tensor, reference: Tensor, cap: Tensor) -> GradientRow:
    whole, norm = halves.sum(0), float(reference.norm())
    difference = halves - reference_halves  # [2, P]
    crossed = [(difference[half], cap[1 - half]) for half in (0, 1)]
    projection = sum(quotient(float(d @ c), float(c.norm())) for d, c in crossed)
    common = 2 * float(cap[0] @ cap[1])  # estimates |grad P(cap)|^2 / 2: not positive if noise is all there is
    slope = quotient(sum(float(d @ c) for d, c in crossed), common) if common > 0 else float("nan")
    return GradientRow(
        arm=arm,
        scope=scope,
        norm=float(whole.norm()),
        cosine=cosine(whole, reference),
        norm_ratio=quotient(float(whole.norm()), norm),
        difference=quotient(float((whole - reference).norm()), norm),
        cap_projection=quotient(projection, norm),
        cap_cosine=sum(cosine(d, c) for d, c in crossed) / 2,
        cap_slope=slope,
    )


def noise_floor(cells: GradientCells) -> float:
    """Cosine of the reference arm's gradients on two independent halves: what resampling alone does to it.

    The baseline of each half comes from that half. With the whole group's, a group's advantages add up to zero, so what
    its rollouts have in common would enter the two halves with opposite signs.
    """
    return cosine(cells.alone[0], cells.alone[1])
