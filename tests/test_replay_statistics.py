"""The replay's statistics against brute force, enumeration and known numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from rollout_files import samples, write_dump
from torch import Tensor
from toy_agent import THREE_OUTCOMES, Enumeration, TurnAgent

import fastadv as fa
from fastadv.arms import Arm, freeze, question_one_arms
from fastadv.arms.baselines import baselines
from fastadv.arms.prompt_sums import PromptSums, prompt_sums
from fastadv.gradproj.scopes import TURN_NAMES, partition, within_half
from fastadv.monitoring.difficulty import DIFFICULTIES
from fastadv.outcomes import Outcome
from fastadv.replay.arm_table import arm_row
from fastadv.replay.predictions import FALSIFIED, NO_DATA, SUPPORTED, UNDECIDED, p7_variance_drop
from fastadv.replay.readers import ReadOptions, read

ARMS = {arm.name: arm for arm in question_one_arms()}


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> fa.Batch:
    return read(write_dump(tmp_path_factory.mktemp("dump") / "d.pt", samples()), ReadOptions()).batch


def enumerated(agent: TurnAgent, size: int) -> tuple[fa.Batch, Tensor]:
    """Every group that can occur, a prompt each, with its probability."""
    e = Enumeration.of(agent, size)
    batch = fa.Batch.of(
        mask=torch.ones_like(e.submits),
        turn_ids=e.turn_ids,
        cu_seqlens=e.cu_seqlens,
        rewards=e.rewards,
        group_ids=e.group_ids,
        outcomes=torch.where(e.capped, 2, torch.where(e.rewards > 0, 0, 1)),
    )
    return batch, e.probability


def weighted(sums: PromptSums, probability: Tensor) -> PromptSums:
    return PromptSums(**{name: value * probability for name, value in vars(sums).items()})


def sums_of(arm: Arm, batch: fa.Batch) -> PromptSums:
    statistics = freeze(batch, kappa=arm.kappa)
    return prompt_sums(arm, arm.apply(batch, statistics), batch, statistics)


# ---- E9b, E9c: the second moment of advantages at finite group size --------------------------------------------------

INFORMATIVE = TurnAgent((0.3, 0.4, 0.2, 0.1, 0.1), (0.95, 0.8, 0.2, 0.05, 0.05))


@pytest.mark.row(14)
@pytest.mark.parametrize(
    ("agent", "size", "reference", "changes"),
    [
        (THREE_OUTCOMES, 4, 0.3074, {0.0: 0.0796, 2.0: 0.0116, 8.0: 0.0012}),
        (THREE_OUTCOMES, 6, 0.2766, {0.0: 0.0604, 2.0: 0.0143, 8.0: 0.0021}),
        (INFORMATIVE, 4, 0.3461, {0.0: -0.153, 2.0: -0.107, 8.0: -0.044}),
    ],
)
def test_what_the_turn_tells_at_finite_group_size(
    agent: TurnAgent, size: int, reference: float, changes: dict[float, float]
) -> None:
    """A turn index that says little costs variance at small kappa; one that says much pays, less than in the limit."""
    batch, probability = enumerated(agent, size)

    def second_moment(arm: Arm) -> float:
        return arm_row(arm, weighted(sums_of(arm, batch), probability)).second_moment

    plain = second_moment(Arm("a"))
    assert plain == pytest.approx(reference, abs=5e-5)
    for kappa, change in changes.items():
        turned = second_moment(Arm("e", baseline="turn-reached", kappa=kappa))
        assert turned / plain - 1 == pytest.approx(change, abs=6e-4)


@pytest.mark.row(14)
def test_e9d_explained_variance_is_within_prompts() -> None:
    """Over an easy and a hard prompt the pooled variance is large, and the turn explains next to none of it within."""
    easy, hard = TurnAgent((0.9,) * 3, (0.9,) * 3), TurnAgent((0.1,) * 3, (0.1,) * 3)
    rows = []
    for agent in (easy, hard):
        single, probability = enumerated(agent, 1)
        index = single.segments
        row = torch.repeat_interleave(torch.arange(single.num_rollouts), index.turns())
        turn = torch.arange(index.count) - index.offsets[row]
        rows.append((turn, single.rewards[row], probability[row]))
    for parts, expected in ((rows[:1], None), (rows[1:], None), (rows, 0.2007)):
        turn, reward, chance = (torch.cat(column) for column in zip(*parts, strict=True))
        mean = (chance * reward).sum() / chance.sum()
        variance = (chance * (reward - mean) ** 2).sum()
        by_turn = torch.stack([(chance * reward)[turn == t].sum() / chance[turn == t].sum() for t in range(3)])
        explained = float((chance * (by_turn[turn] - mean) ** 2).sum() / variance)
        if expected is None:
            assert explained < 0.01
        else:
            assert explained == pytest.approx(expected, abs=5e-4)
    # The report's number stays within prompts: two prompts with different means explain nothing by their means.
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    batch = fa.Batch.of(
        mask=torch.ones(8), cu_seqlens=torch.arange(9), rewards=rewards, group_ids=[0] * 4 + [1] * 4,
        outcomes=torch.where(rewards > 0, 0, 1),
    )  # fmt: skip
    row = arm_row(Arm("mean", baseline="mean"), sums_of(Arm("mean", baseline="mean"), batch))
    assert row.explained_variance == pytest.approx(0.0)
    assert row.variance == pytest.approx(0.25 * 0.75)


# ---- the arms table against brute force ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARMS)
def test_arm_rows_by_brute_force(name: str, batch: fa.Batch) -> None:
    arm, statistics = ARMS[name], freeze(batch)
    result = arm.apply(batch, statistics)
    row = arm_row(arm, prompt_sums(arm, result, batch, statistics))

    token_row = batch.rows.row_of_token()
    sampled = batch.mask
    advantages = fa.segment_tokens(result.advantages)[sampled] * result.weights[token_row][sampled]
    kept = ~result.excluded[token_row][sampled]
    group = batch.groups.index[token_row][sampled]
    assert row.second_moment == pytest.approx(float((advantages**2).mean()))
    within = sum(float(((advantages[group == g] - advantages[group == g].mean()) ** 2).sum()) for g in group.unique())
    assert row.variance == pytest.approx(within / len(group))
    assert row.kept_tokens == pytest.approx(float(kept.double().mean()))
    assert row.kept_rollouts == pytest.approx(float((~result.excluded).double().mean()))
    assert row.token_factor == pytest.approx(1 / row.kept_tokens)
    assert row.sequence_factor == pytest.approx(1 / row.kept_rollouts)

    baseline = fa.segment_tokens(fa.SegmentTable(baselines(arm, batch, statistics), batch.segments))[sampled]
    reward = batch.rewards[token_row][sampled]
    torch.testing.assert_close(advantages[kept], (reward - baseline)[kept], rtol=0, atol=1e-12)
    spread = sum(
        float(((reward[here] - reward[here].mean()) ** 2).sum())
        for g in group.unique()
        if bool((here := kept & (group == g)).any())
    )
    assert row.explained_variance == pytest.approx(1 - float(((reward - baseline)[kept] ** 2).sum()) / spread)
    per_rollout = torch.stack([baseline[token_row[sampled] == r].mean() for r in range(batch.num_rollouts)])
    assert row.baseline == pytest.approx(float(per_rollout.mean()))
    capped = batch.outcomes == Outcome.BUDGET
    assert row.subsidy == pytest.approx(float((per_rollout * result.excluded)[capped].sum() / capped.sum()))


def test_the_subsidy_is_what_theory_says(batch: fa.Batch) -> None:
    """Masked over all it is the mean of the others; survivors pay their own mean; half the rollouts pay half."""
    rows = {name: arm_row(arm, sums_of(arm, batch)) for name, arm in ARMS.items()}
    capped = batch.outcomes == Outcome.BUDGET
    size, survivors, all_ = 6, [], []
    for g in range(batch.groups.num_groups):
        here = batch.groups.index == g
        total, alive = float(batch.rewards[here].sum()), int((here & ~capped).sum())
        survivors += [total / alive if alive else 0.0] * int((here & capped).sum())
        all_ += [total / (size - 1)] * int((here & capped).sum())
    assert rows["b"].subsidy == pytest.approx(sum(all_) / len(all_))
    assert rows["c"].subsidy == pytest.approx(sum(survivors) / len(survivors))
    assert rows["a"].subsidy == rows["e"].subsidy == 0
    assert 0 < rows["d0.3"].subsidy < rows["d0.6"].subsidy < rows["d1"].subsidy == rows["b"].subsidy


def test_sums_add_over_dumps(batch: fa.Batch) -> None:
    first = batch.groups.index < 5
    parts = [batch.select(first), batch.select(~first)]
    for arm in ARMS.values():
        added = sums_of(arm, parts[0]) + sums_of(arm, parts[1])
        whole, split = arm_row(arm, sums_of(arm, batch)), arm_row(arm, added)
        for name in ("second_moment", "variance", "explained_variance", "baseline", "subsidy", "kept_tokens"):
            assert getattr(split, name) == pytest.approx(getattr(whole, name)), name


# ---- P7 --------------------------------------------------------------------------------------------------------------


def with_squares(values: Tensor) -> PromptSums:
    ones = torch.ones_like(values)
    return PromptSums(**{name: values if name == "squares" else ones for name in PromptSums.__dataclass_fields__})


@pytest.mark.row(46)
@pytest.mark.parametrize(
    ("drop", "spread", "verdict", "clear"),
    [
        (0.35, 0.01, SUPPORTED, True),
        (0.201, 0.3, SUPPORTED, False),
        (0.15, 0.01, UNDECIDED, False),
        (0.099, 0.3, FALSIFIED, False),
        (0.02, 0.01, FALSIFIED, True),
        (-0.2, 0.01, FALSIFIED, True),
    ],
)
def test_p7_on_both_sides_of_its_thresholds(drop: float, spread: float, verdict: str, clear: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.full((64,), 2.0, dtype=torch.float64)
    noise = torch.randn(64, generator=generator, dtype=torch.float64) * spread
    turned = reference * (1 - drop + noise - noise.mean())
    p = p7_variance_drop(with_squares(reference), with_squares(turned))
    assert p.statistic["variance drop"] == pytest.approx(drop)
    assert p.verdict == verdict
    assert p.interval[0] <= drop <= p.interval[1]
    assert ("whole interval" in p.detail) == clear
    assert p7_variance_drop(with_squares(reference), with_squares(turned)) == p  # the bootstrap has a seed


def test_p7_without_spread() -> None:
    zero = with_squares(torch.zeros(3, dtype=torch.float64))
    assert p7_variance_drop(zero, zero).verdict == NO_DATA


def test_p7_of_few_prompts_has_no_interval() -> None:
    """Fewer than four: resampling them shows nothing, as of every other prediction."""
    few = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    p = p7_variance_drop(with_squares(few), with_squares(few / 2))
    assert (p.statistic, p.interval, p.intervals) == ({"variance drop": 0.5}, None, {})
    assert (p.verdict, p.detail) == (SUPPORTED, "there are too few prompts for an interval")


# ---- halves, difficulty, turns, the cap direction --------------------------------------------------------------------


def test_halves_are_balanced_stable_and_by_rollout(batch: fa.Batch) -> None:
    cells = partition(batch, seed=1)
    for g in range(batch.groups.num_groups):
        assert int(cells.half[batch.groups.index == g].sum()) == 3
    assert torch.equal(partition(batch, seed=1).half, cells.half)
    assert not torch.equal(partition(batch, seed=2).half, cells.half)
    order = torch.randperm(batch.num_rollouts)
    shuffled = replace(batch, row_ids=batch.row_ids[order], groups=fa.group_index(batch.groups.index[order]))
    assert torch.equal(partition(shuffled, seed=1).half, cells.half[order])


def test_difficulty_comes_from_the_other_half(batch: fa.Batch) -> None:
    cells = partition(batch, seed=1)
    solved = batch.outcomes == Outcome.SOLVED
    for row in range(batch.num_rollouts):
        others = (batch.groups.index == batch.groups.index[row]) & (cells.half != cells.half[row])
        rate = float(solved[others].double().mean())
        expected = 0 if rate < 1 / 3 else 2 if rate > 2 / 3 else 1
        assert int(cells.difficulty[row]) == expected
    single = batch.select(batch.row_ids == 3)
    assert DIFFICULTIES[int(partition(single, 1).difficulty)] == "unknown"


def test_turn_buckets() -> None:
    lengths = torch.tensor([40])
    batch = fa.Batch.of(
        mask=torch.ones(40), turn_ids=torch.arange(40), cu_seqlens=torch.tensor([0, 40]), rewards=torch.zeros(1),
        group_ids=[0], outcomes=torch.tensor([1]),
    )  # fmt: skip
    names = [TURN_NAMES[i] for i in partition(batch, 0).turn]
    assert [names[i - 1] for i in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 40)] == [
        "turn 1", "turn 2", "turns 3-4", "turns 3-4", "turns 5-8", "turns 5-8", "turns 9-16", "turns 9-16",
        "turns 17-32", "turns 17-32", "turns 33+", "turns 33+",
    ]  # fmt: skip
    assert lengths.sum() == 40


def test_the_cap_direction_is_leave_one_out_within_its_half(batch: fa.Batch) -> None:
    cells = partition(batch, seed=1)
    capped = (batch.outcomes == Outcome.BUDGET).double()
    for half in (0, 1):
        direction = within_half(capped, batch, cells, half)
        assert torch.equal(direction.weights != 0, cells.half == half)
        values = direction.advantages.values[batch.segments.offsets[:-1]]
        for row in (cells.half == half).nonzero().squeeze(1).tolist():
            others = (batch.groups.index == batch.groups.index[row]) & (cells.half == half)
            others[row] = False
            assert float(values[row]) == pytest.approx(float(capped[row] - capped[others].mean()))


def test_e18_the_same_rollouts_would_make_a_cosine_out_of_nothing() -> None:
    """Cap independent of actions, true grad P(cap) zero: the difference of masked and unmasked gradients, b times the
    capped scores, lies along the cap direction of the same rollouts, and not along that of the other half."""
    generator = torch.Generator().manual_seed(0)
    prompts, size, dimensions = 64, 16, 64
    same, other = [], []
    for _ in range(8):
        b = 0.1 + 0.8 * torch.rand(prompts, generator=generator, dtype=torch.float64)
        scores = torch.randn(prompts, size, dimensions, generator=generator, dtype=torch.float64)
        capped = (torch.rand(prompts, size, generator=generator) < 0.5).double()
        halves = torch.arange(size) % 2

        def cap(half: int, scores: Tensor = scores, capped: Tensor = capped, halves: Tensor = halves) -> Tensor:
            inside = capped[:, halves == half]
            advantages = inside - (inside.sum(1, keepdim=True) - inside) / (inside.shape[1] - 1)
            return (advantages[:, :, None] * scores[:, halves == half]).sum((0, 1))

        first = halves == 0
        difference = (b[:, None, None] * capped[:, first, None] * scores[:, first]).sum((0, 1))
        same.append(float(torch.cosine_similarity(difference, cap(0), dim=0)))
        other.append(float(torch.cosine_similarity(difference, cap(1), dim=0)))
    assert sum(same) / 8 > 0.5
    assert abs(sum(other) / 8) < 3 / math.sqrt(8 * dimensions)
