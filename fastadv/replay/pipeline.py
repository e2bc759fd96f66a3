"""The replay itself: dumps one at a time, from census to arms to gradients to predictions."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fastadv.arms import Arm, ArmResult, freeze, question_one_arms
from fastadv.arms.prompt_sums import PromptSums, prompt_sums
from fastadv.batch import Batch
from fastadv.gradproj import flash
from fastadv.gradproj.gram import SegmentGram
from fastadv.gradproj.projections import Projections, project, turn_weights
from fastadv.gradproj.scopes import Weighted
from fastadv.monitoring import turns_by_outcome
from fastadv.outcomes import Census, Outcome, Regime, regime
from fastadv.replay import streamed
from fastadv.replay.arm_table import ArmRow, arm_row
from fastadv.replay.errors import ReplayError, counted, finite
from fastadv.replay.gradients import GradientCells, GradientRow, compare, noise_floor, plug_in_rows
from fastadv.replay.policy import Policy, score
from fastadv.replay.predictions import p1_two_outcomes, p7_variance_drop, two_outcome_prompts
from fastadv.replay.predictions_rollouts import TurnPairs, p2_direction, p4_amplification, p5_separation
from fastadv.replay.readers import ReadOptions, Rollouts, read
from fastadv.replay.verdicts import Prediction
from fastadv.segment_table import SegmentTable
from fastadv.statistics import FrozenStatistics

GRADIENTS = ("auto", "gram", "cells")
NO_CONSTANT = "its factors differ from token to token, and a segment of the Gram has one"


@dataclass(frozen=True)
class ReplayOptions:
    """What is computed.

    Attributes:
        baseline: of the arms that are not turn-reached, "loo" or "mean".
        kappa: shrinkage of the turn-reached arm.
        seed: of coins, halves and bootstrap.
        loss: "reinforce", or "ppo" with the logged log-probs as the old ones.
        cap_reward: "zero" (R = 0 at the cap, as docs/theory.md, 2, supposes) or "logged".
        max_tokens: padded tokens of a micro-batch.
        buckets: gradients by turn and by difficulty too.
        gradients: "gram" (one pass gives the inner products of all segments' gradients), "cells" (a flat gradient for
            each arm and bucket), or "auto": the Gram where the loss and the model allow it.
        attention: of the Gram's pass, as `gradproj.segment_gram` takes it.
        max_memory: bytes that a Gram or flat gradients may take.
        p1_prompts: prompts that the two-outcome check is made on.
        arms: that are replayed, the reference first; empty: those of the first question.
        read: how dumps are read.
    """

    baseline: str = "loo"
    kappa: float = 2.0
    seed: int = 0
    loss: str = "reinforce"
    cap_reward: str = "zero"
    max_tokens: int = 4096
    buckets: bool = True
    gradients: str = "auto"
    attention: str = "auto"
    max_memory: int = 8 * 2**30
    p1_prompts: int = 8
    arms: tuple[Arm, ...] = ()
    read: ReadOptions = field(default_factory=ReadOptions)

    def __post_init__(self) -> None:
        finite("--kappa", self.kappa, least=0)
        if self.gradients not in GRADIENTS:
            raise ReplayError(f"--gradients is {self.gradients!r}; it must be one of {', '.join(GRADIENTS)}")
        if self.gradients == "gram" and self.loss != "reinforce":
            raise ReplayError(
                f"--gradients gram does not go with --loss {self.loss}: {NO_CONSTANT}; take auto or cells"
            )
        if self.gradients == "gram" and self.by_token:
            raise ReplayError(f"--gradients gram does not go with {self.by_token}: {NO_CONSTANT}; take auto or cells")
        if self.attention not in flash.CHOICES:
            raise ReplayError(f"--attention is {self.attention!r}; it must be one of {', '.join(flash.CHOICES)}")
        if self.attention != "auto" and (self.gradients == "cells" or self.loss != "reinforce" or self.by_token):
            other = self.by_token or f"--gradients {self.gradients} --loss {self.loss}"
            raise ReplayError(
                f"--attention {self.attention} does not go with {other}: flat gradients run the model's own attention"
            )

    @property
    def by_token(self) -> str:
        """The arms that treat the tokens of a turn differently, for messages; empty without any."""
        names = [repr(arm.name) for arm in self.arms if arm.level == "token"]
        return f"--arms {', '.join(names)}" if names else ""


@dataclass(frozen=True)
class FileSummary:
    """One dump."""

    name: str
    source: str
    rollouts: int
    tokens: int | None  # response tokens
    census: Census
    statistics_hash: str | None
    notes: tuple[str, ...]
    refused: str


@dataclass(frozen=True)
class PromptSummary:
    """One prompt; its label is untrusted text."""

    label: str
    counts: tuple[int, int, int, int]  # by Outcome
    mean_reward: float


@dataclass(frozen=True)
class Agreement:
    """Logged log-probs against those of the policy, over sampled tokens."""

    tokens: int
    mean_difference: float  # mean |logged - policy|
    largest_difference: float


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """Everything that the report shows."""

    options: ReplayOptions
    files: list[FileSummary]
    prompts: list[PromptSummary]
    arms: list[ArmRow]
    gradients: list[GradientRow]
    noise_floor: float | None
    projections: Projections | None  # with intervals; None: no policy, or flat gradients
    gradients_by: str  # "gram" or "cells"; "" without a policy
    gradients_note: str  # why it was this way
    plan: str  # what the pass was to cost
    gram: SegmentGram | None
    agreement: Agreement | None
    predictions: list[Prediction]
    turns_by_outcome: dict[Outcome, Tensor]  # [L] rollouts by number of turns, from 0
    reward_by_turn: Tensor  # [L, 2], row l for turn l + 1: rollouts that reached it, and the sum of their rewards
    parameters: int | None  # of the policy; None: no policy
    covered: int | None  # parameters that the Gram is of; None: no Gram
    policy_notes: tuple[str, ...]

    @property
    def census(self) -> Census:
        """Outcomes of all files."""
        total = self.files[0].census
        for file in self.files[1:]:
            total = total + file.census
        return total

    @property
    def regime(self) -> Regime:
        """Whether what a mask would exclude has a reward, over all files."""
        return regime(self.census)


class Steps(Protocol):
    """Called with the number of steps done, and of all steps where that was not known before."""

    def __call__(self, done: int, total: int | None = None) -> None:
        """Shows how far it is."""


class Progress(Protocol):
    """Somewhere to show how far a stage is."""

    def stage(self, title: str, total: int | None) -> AbstractContextManager[Steps]:
        """A stage of `total` steps (None: unknown)."""

    def say(self, text: str) -> None:
        """Shows a text before a stage that takes long."""


class NoProgress:
    """Shows nothing."""

    def stage(self, title: str, total: int | None) -> AbstractContextManager[Steps]:
        """A stage that nobody watches."""
        return nullcontext(lambda done, total=None: None)

    def say(self, text: str) -> None:
        """Nobody listens."""


def usable(rollouts: Rollouts, options: ReplayOptions) -> tuple[Batch, list[str]]:
    """The rollouts with a result, and the rules that were applied to get them."""
    batch, notes = rollouts.batch, list(rollouts.notes)
    assert batch is not None
    with_result = batch.outcomes != Outcome.INFRA
    lost = int((~with_result).sum())
    if lost:
        batch = batch.select(with_result)
        notes.append(f"{counted(lost, 'rollout')} without a result (INFRA): left out of votes and losses")
    capped = batch.outcomes == Outcome.BUDGET
    if options.cap_reward == "zero" and bool((batch.rewards[capped] != 0).any()):
        changed = counted(int((batch.rewards[capped] != 0).sum()), "capped rollout")
        batch = replace(batch, rewards=torch.where(capped, 0.0, batch.rewards))
        notes.append(f"the reward of {changed} was set to 0 (--cap-reward logged keeps it)")
    single = int((batch.groups.sizes() == 1).sum())
    if single:
        groups = f"{single:,} of {counted(batch.groups.num_groups, 'group')}"
        notes.append(f"{groups} with a single rollout that has a result: its advantage is 0")
    return batch, notes


class _Run:
    """What accumulates over dumps."""

    def __init__(self, policy: Policy | None, options: ReplayOptions, progress: Progress) -> None:
        self.policy, self.options, self.progress = policy, options, progress
        question = question_one_arms(baseline=options.baseline, kappa=options.kappa, seed=options.seed)
        self.arms = options.arms or question
        # What predictions compare, whatever the report's arms are: P2 and P4 no mask, mask and survivors, P7
        # leave-one-out with turn-reached.
        self.asked = (*question[:3], Arm("loo"), Arm("turn-reached", baseline="turn-reached", kappa=options.kappa))
        self.sums: list[PromptSums | None] = [None] * (len(self.arms) + len(self.asked))
        self.files: list[FileSummary] = []
        self.prompts: list[PromptSummary] = []
        self.p1_prompts: list[Batch] = []
        self.turns = {outcome: torch.zeros(0, dtype=torch.int64) for outcome in Outcome}
        self.reached = torch.zeros(0, 2, dtype=torch.float64)
        self.pairs: TurnPairs | None = None
        self.batches: list[Batch] = []  # whose Gram is taken: its cross terms need them all
        self.cells: GradientCells | None = None
        self.gradients_note = ""
        self.differences = [0.0, 0.0, 0.0]  # tokens, sum and maximum of |logged - policy|
        if policy is not None and (options.gradients == "cells" or options.loss != "reinforce" or options.by_token):
            asked = options.gradients == "cells"
            why = options.by_token if options.loss == "reinforce" else f"--loss {options.loss}"
            self.gradients_note = "--gradients cells" if asked else f"{why}: {NO_CONSTANT}"
            self.cells = self._new_cells(policy)
        elif policy is not None and options.attention != "auto":
            streamed.check_attention(policy, options.attention)

    def _new_cells(self, policy: Policy) -> GradientCells:
        """Flat gradients, if they are small enough."""
        needed = GradientCells.bytes(len(self.arms), policy.size, buckets=self.options.buckets)
        if needed > self.options.max_memory:
            why = f" ({self.gradients_note})" if self.gradients_note else ""
            raise ReplayError(
                f"flat gradients{why} of {policy.size:,} parameters for every arm and bucket take "
                f"{needed / 2**30:.1f} GiB, more than --max-memory {self.options.max_memory / 2**30:.1f}; --no-buckets "
                f"takes {GradientCells.bytes(len(self.arms), policy.size, buckets=False) / 2**30:.1f} GiB"
            )
        return GradientCells(self.arms, policy.size, buckets=self.options.buckets)

    def add(self, path: Path) -> None:
        """Reads one dump and adds what it holds."""
        with self.progress.stage(f"reading {path.name}", None) as done:
            rollouts = read(path, replace(self.options.read, progress=lambda n, total: done(n)))
        census = rollouts.census()
        self._add_prompts(rollouts, census)
        tokens = None if rollouts.batch is None else rollouts.batch.num_tokens
        summary = FileSummary(
            path.name, rollouts.source, census.total, tokens, census, None, tuple(rollouts.notes), rollouts.refused
        )
        if rollouts.batch is not None:
            batch, notes = usable(rollouts, self.options)
            summary = replace(summary, notes=tuple(notes))
            if not batch.num_rollouts:
                summary = replace(summary, refused="no rollout has a result")
            elif not bool(batch.mask.any()):
                summary = replace(summary, refused="no rollout has a sampled token")
            else:
                summary = replace(summary, statistics_hash=self._add_batch(batch))
        self.files.append(summary)

    def _add_prompts(self, rollouts: Rollouts, census: Census) -> None:
        finite = torch.where(rollouts.rewards.isfinite(), rollouts.rewards, 0.0)
        known = rollouts.rewards.isfinite().to(torch.float64)
        groups = rollouts.groups
        zeros = torch.zeros(groups.num_groups, dtype=torch.float64)
        means = zeros.index_add(0, groups.index, finite) / zeros.index_add(0, groups.index, known)
        assert census.by_group is not None
        for label, counts, mean in zip(rollouts.labels, census.by_group.tolist(), means.tolist(), strict=True):
            self.prompts.append(PromptSummary(label, tuple(counts), mean))

    def _add_batch(self, batch: Batch) -> str:
        """Arms, curves and gradients of one batch; returns the hash of its statistics."""
        statistics = freeze(batch, kappa=self.options.kappa)
        results = []
        everything = (*self.arms, *self.asked)
        with self.progress.stage("arms", len(everything)) as done:
            for number, arm in enumerate(everything):
                result, own = _applied(arm, batch, statistics)
                sums, before = prompt_sums(arm, result, batch, own), self.sums[number]
                self.sums[number] = sums if before is None else before + sums
                results.append(result)
                done(number + 1)
        self._add_curves(batch)
        pairs = TurnPairs.of(batch)
        self.pairs = pairs if self.pairs is None else self.pairs + pairs
        missing = self.options.p1_prompts - len(self.p1_prompts)
        if self.policy is not None:
            self.p1_prompts += two_outcome_prompts(batch, missing)
            self.policy.check(batch)
            self._add_agreement(self.policy, batch)
            if self.cells is None:
                self.batches.append(batch)
            else:
                self._add_cells(self.policy, self.cells, batch, results[: len(self.arms)])
        return statistics.hash

    def _add_cells(self, policy: Policy, cells: GradientCells, batch: Batch, results: list[ArmResult]) -> None:
        with self.progress.stage("gradients", batch.num_rollouts) as done:
            cells.add(
                policy, batch, results, self.options.seed, loss=self.options.loss, max_tokens=self.options.max_tokens,
                progress=done,
            )  # fmt: skip

    def _gram(self, policy: Policy) -> tuple[SegmentGram | None, str]:
        """The Gram of all dumps, and what it was to cost; or flat gradients, where it cannot be had and need not be."""
        segments = sum(batch.segments.count for batch in self.batches)
        if 8 * segments**2 > self.options.max_memory:
            raise ReplayError(
                f"the Gram of {segments:,} segments takes {8 * segments**2 / 2**30:.1f} GiB, more than --max-memory "
                f"{self.options.max_memory / 2**30:.1f}"
            )
        notes = [f"{file.name}: {note}" for file in self.files for note in file.notes]
        try:
            plan = streamed.plan(policy, self.batches, attention=self.options.attention)
            self.progress.say(plan)
            with self.progress.stage("segment Gram", None) as done:
                gram = streamed.segment_gram(
                    policy, self.batches, max_tokens=self.options.max_tokens, attention=self.options.attention,
                    notes=notes, progress=done,
                )  # fmt: skip
        except ValueError as error:
            attention = self.options.attention
            if self.options.gradients == "gram" or attention != "auto":
                asked = "--gradients gram" if attention == "auto" else f"--attention {attention}"
                raise ReplayError(f"{asked}: {error}") from error
            self.gradients_note = str(error)
        else:
            return gram, plan
        self.cells = self._new_cells(policy)
        for batch in self.batches:
            statistics = freeze(batch, kappa=self.options.kappa)
            self._add_cells(policy, self.cells, batch, [_applied(arm, batch, statistics)[0] for arm in self.arms])
        return None, ""

    def _weighted(self, gram: SegmentGram) -> list[Weighted]:
        """Each arm on the rollouts of all dumps: applied to each, where it finds all that it reads."""
        assert gram.rollouts is not None
        found: list[list[Weighted]] = [[] for _ in self.arms]
        for batch in self.batches:
            statistics = freeze(batch, kappa=self.options.kappa)
            for arm, parts in zip(self.arms, found, strict=True):
                parts.append(turn_weights(arm, _applied(arm, batch, statistics)[0], batch))
        return [
            Weighted(
                SegmentTable(torch.cat([part.advantages.values for part in parts]), gram.rollouts.segments),
                torch.cat([part.weights for part in parts]),
            )
            for parts in found
        ]

    def _add_curves(self, batch: Batch) -> None:
        turns = batch.segments.turns()
        for outcome, here in turns_by_outcome(turns, batch.outcomes).items():
            self.turns[outcome] = _added(self.turns[outcome], here)
        ended = torch.stack([torch.bincount(turns).to(torch.float64), torch.bincount(turns, batch.rewards)], 1)
        reached = ended.flip(0).cumsum(0).flip(0)[1:]  # [L, 2]: rollouts with at least that many turns
        self.reached = _added(self.reached, reached)

    def _add_agreement(self, policy: Policy, batch: Batch) -> None:
        if batch.rollout_log_probs is None:
            return
        with self.progress.stage("scoring", batch.num_tokens) as done:
            for tokens, log_probs in score(policy, batch, self.options.max_tokens):
                sampled = batch.mask[tokens]
                gap = (batch.rollout_log_probs[tokens].double() - log_probs.double())[sampled].abs()
                if gap.numel():
                    self.differences[0] += gap.numel()
                    self.differences[1] += float(gap.sum())
                    largest = gap.new_tensor(self.differences[2])
                    self.differences[2] = float(torch.maximum(gap.max(), largest))  # a NaN stays one
                done(tokens.stop)

    def result(self) -> ReplayResult:
        """Everything that was added."""
        predictions: list[Prediction] = []
        rows: list[ArmRow] = []
        if all(s is not None for s in self.sums):
            sums = [s for s in self.sums if s is not None]
            rows = [arm_row(arm, s) for arm, s in zip(self.arms, sums, strict=False)]
            if self.policy is not None:
                with self.progress.stage("two-outcome check", len(self.p1_prompts)) as done:
                    p1 = p1_two_outcomes(
                        self.policy, self.p1_prompts, max_tokens=self.options.max_tokens,
                        max_memory=self.options.max_memory, progress=done,
                    )  # fmt: skip
                predictions.append(p1)
            _, masked, survivors, loo, reached = sums[len(self.arms) :]
            predictions.append(p4_amplification(masked, survivors, seed=self.options.seed))
            assert self.pairs is not None
            predictions.append(p5_separation(self.pairs, seed=self.options.seed))
            predictions.append(p7_variance_drop(loo, reached, seed=self.options.seed))
        gram, plan, projections = None, "", None
        gradients: list[GradientRow] = []
        floor: float | None = None
        if self.policy is not None and self.batches:
            gram, plan = self._gram(self.policy)
        if gram is not None:
            with self.progress.stage("statistics", None):
                projections = project(
                    gram, self.arms, weighted=self._weighted(gram), buckets=self.options.buckets, seed=self.options.seed
                )
            gradients, floor = plug_in_rows(projections), projections.noise_floor
            plain, masking = self.asked[:2]
            predictions.append(p2_direction(gram, masking, plain, seed=self.options.seed))
            predictions.sort(key=lambda p: p.name)
        elif self.cells is not None and self.cells.rollouts:
            gradients, floor = compare(self.cells), noise_floor(self.cells)
        tokens, total, largest = self.differences
        return ReplayResult(
            options=self.options,
            files=self.files,
            prompts=self.prompts,
            arms=rows,
            gradients=gradients,
            noise_floor=floor,
            projections=projections,
            gradients_by="gram" if gram is not None else "cells" if gradients else "",
            gradients_note=self.gradients_note,
            plan=plan,
            gram=gram,
            agreement=Agreement(int(tokens), total / tokens, largest) if tokens else None,
            predictions=predictions,
            turns_by_outcome=self.turns,
            reward_by_turn=self.reached,
            parameters=None if self.policy is None else self.policy.size,
            covered=None if gram is None else gram.covered,
            policy_notes=() if self.policy is None else self.policy.notes,
        )


def _applied(arm: Arm, batch: Batch, shared: FrozenStatistics) -> tuple[ArmResult, FrozenStatistics]:
    """An arm's result, and the statistics that it read: those that all arms share, or its own where it has survivors,
    a kappa or buckets of its own."""
    try:
        statistics = shared if arm.reads(shared, batch) else arm.freeze(batch)
        return arm.apply(batch, statistics), statistics
    except ValueError as error:
        raise ReplayError(f"--arms: {error}") from error


def _added(a: Tensor, b: Tensor) -> Tensor:
    """Sum of two tables that may have different lengths."""
    longest = max(a.shape[0], b.shape[0])
    sum_ = a.new_zeros((longest, *a.shape[1:]))
    sum_[: a.shape[0]] += a
    sum_[: b.shape[0]] += b
    return sum_


def replay(
    paths: list[Path], policy: Policy | None, options: ReplayOptions, progress: Progress | None = None
) -> ReplayResult:
    """Replays dumps, one at a time. Of each, what a gradient needs is kept: a Gram is over the rollouts of all.

    Args:
        paths: dumps in any format that `fastadv.replay.readers` reads; groups do not reach over files.
        policy: the checkpoint for gradients; None: census, arms and predictions that need no model.
        options: what is computed.
        progress: where progress is shown.

    Raises:
        ReplayError: a dump or a policy that cannot be used, with what to do about it.
    """
    if not paths:
        raise ReplayError("no dump was given")
    run = _Run(policy, options, progress or NoProgress())
    try:
        for path in paths:
            run.add(path)
            gc.collect()
        return run.result()
    except torch.OutOfMemoryError as error:  # of a CUDA device
        raise ReplayError(
            f"the device has too little memory ({error}): a smaller --max-tokens or fewer dumps take less, and "
            "--device cpu has the machine's"
        ) from error
