"""Statistics on a segment Gram: by brute force, by enumeration, and on a task in which there is nothing to find."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from naive_gram import naive_gram, segment_gradients
from rollout_files import samples, write_dump, write_policy
from torch import Tensor

import fastadv as fa
from fastadv.arms import Arm, freeze, question_one_arms
from fastadv.gradproj import Projections, SegmentGram, project
from fastadv.gradproj.projections import arm_weights
from fastadv.gradproj.scopes import partition, within_group, within_half
from fastadv.gradproj.statistics import (
    PLUG_IN,
    U_STATISTIC,
    Comparison,
    Directions,
    bootstrapped,
    compare,
    interval,
    plug_in,
    plug_in_draws,
    prompt_products,
    resamples,
    signal_share,
    u_statistic,
    u_statistic_draws,
)
from fastadv.outcomes import Outcome
from fastadv.replay.policy import Policy
from fastadv.replay.readers import ReadOptions, read


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- products, estimators and resamples by brute force ---------------------------------------------------------------


def test_products_by_prompt_are_those_of_flat_gradients() -> None:
    gradients, prompts = normal(20, 30), torch.tensor([2, 0, 1, 1, 0, 4, 4, 2, 0, 1] * 2)  # prompt 3 has no segment
    left, right = normal(3, 20, seed=1), normal(3, 20, seed=2)
    left[0, :7] = 0
    products = prompt_products(gradients @ gradients.T, prompts, 5, left, right)
    for pair, x, y in itertools.product(range(3), range(5), range(5)):
        parts = [
            ((prompts == prompt) * side[pair]) @ gradients for prompt, side in ((x, left), (y, right))
        ]  # fmt: skip
        assert float(products[pair, x, y]) == pytest.approx(float(parts[0] @ parts[1]), rel=1e-12, abs=1e-12)
    whole = ((left @ gradients) * (right @ gradients)).sum(1)
    torch.testing.assert_close(plug_in(products), whole, rtol=1e-12, atol=1e-12)


def test_the_u_statistic_is_unbiased_and_the_plug_in_is_not() -> None:
    """Over every sample of three prompts from a population of three: exact expectations."""
    population, other = normal(3, 5), normal(3, 5, seed=1)
    truth = 9 * float(population.mean(0) @ other.mean(0))
    samples_ = [list(pick) for pick in itertools.product(range(3), repeat=3)]
    products = torch.stack([population[pick] @ other[pick].T for pick in samples_])
    assert float(u_statistic(products).mean()) == pytest.approx(truth, rel=1e-12)
    noise = 3 * float((population * other).sum(1).mean() - population.mean(0) @ other.mean(0))
    assert float(plug_in(products).mean()) == pytest.approx(truth + noise, rel=1e-12)
    assert abs(noise) > 0.1 * abs(truth)
    assert math.isnan(float(u_statistic(products[:1, :1, :1])))


def test_a_resample_never_pairs_a_prompt_with_its_copy() -> None:
    """By the list of what was drawn: all pairs, and pairs of different prompts alone."""
    products = normal(2, 6, 6)
    counts = resamples(6, 40, seed=3)
    assert counts.shape == (40, 6)
    assert bool((counts.sum(1) == 6).all())
    batch = plug_in_draws(products, counts)
    u = u_statistic_draws(products, counts, batch)
    for draw in range(40):
        drawn = [prompt for prompt in range(6) for _ in range(int(counts[draw, prompt]))]
        pairs = [(x, y) for x in drawn for y in drawn if x != y]
        for pair in range(2):
            mean = sum(float(products[pair, x, y]) for x, y in pairs) / len(pairs)
            assert float(u[pair, draw]) == pytest.approx(36 * mean, abs=1e-10)
            every = sum(float(products[pair, x, y]) for x in drawn for y in drawn)
            assert float(batch[pair, draw]) == pytest.approx(every, abs=1e-10)
    alone = torch.tensor([[6.0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    assert math.isnan(float(u_statistic_draws(products, alone, plug_in_draws(products, alone))[0, 0]))
    assert torch.equal(resamples(6, 40, seed=3), counts)
    assert not torch.equal(resamples(6, 40, seed=4), counts)
    assert resamples(3, 40, seed=3).shape == (0, 3)


def test_an_undefined_draw_might_have_been_anything() -> None:
    draws = torch.arange(1000, dtype=torch.float64)[torch.randperm(1000)]
    assert interval(draws) == (25.0, 974.0)
    draws[draws >= 990] = math.nan
    assert interval(draws) == (15.0, 974.0)
    draws[draws >= 980] = math.inf
    draws[draws < 5] = -math.inf
    assert interval(draws) == (5.0, 979.0)
    draws[draws == 5] = math.nan
    assert all(math.isnan(end) for end in interval(draws))
    assert all(math.isnan(end) for end in interval(draws[:0]))
    assert math.isnan(bootstrapped(torch.tensor([math.inf])).value)


# ---- comparisons -----------------------------------------------------------------------------------------------------


def directions_of(whole: Tensor, first: Tensor, second: Tensor, half: Tensor) -> Directions:
    return Directions(whole, torch.stack([first, second]), half)


@pytest.mark.row(12)
def test_a_comparison_by_flat_gradients() -> None:
    gradients, prompts = normal(24, 40) + 1, torch.arange(6).repeat_interleave(4)
    half = torch.arange(24) % 2
    reference, difference, whole = (scale * normal(24, seed=seed).abs() for seed, scale in ((1, 1), (2, 0.3), (3, 1)))
    caps = [torch.where(half == h, whole, 0.0) for h in (0, 1)]
    directions, counts = directions_of(whole, *caps, half), resamples(6, 9, 0)
    found = compare(gradients @ gradients.T, prompts, reference, difference, directions, counts, 24)

    def flat(coefficients: Tensor) -> Tensor:
        return coefficients @ gradients

    r, d, c = flat(reference), flat(difference), [flat(cap) for cap in caps]
    g, halves = r + d, [flat(torch.where(half == h, difference, 0.0)) for h in (0, 1)]
    crossed = [float(halves[h] @ c[1 - h]) for h in (0, 1)]
    along = sum(crossed[h] / float(c[1 - h].norm()) for h in (0, 1))
    expected = {
        "norm": float(g.norm()) / 24,
        "cosine": float(g @ r / g.norm() / r.norm()),
        "norm_ratio": float(g.norm() / r.norm()),
        "difference": float(d.norm() / r.norm()),
        "cap_projection": along / float(r.norm()),
        "cap_cosine": sum(crossed[h] / float(halves[h].norm() * c[1 - h].norm()) for h in (0, 1)) / 2,
        "explained": (along / float(d.norm())) ** 2,
        "cap_slope": sum(crossed) / float(2 * c[0] @ c[1]),
        "alignment": float(d @ flat(whole) / d.norm() / flat(whole).norm()),
    }
    for name, value in expected.items():
        assert getattr(found[PLUG_IN], name).value == pytest.approx(value, rel=1e-11), name

    def pairs(a: Tensor, b: Tensor) -> float:
        return 6 / 5 * sum(
            float(flat(a * (prompts == x)) @ flat(b * (prompts == y)))
            for x in range(6) for y in range(6) if x != y
        )  # fmt: skip

    rr, rd, dd = pairs(reference, reference), pairs(reference, difference), pairs(difference, difference)
    dc, cc = pairs(difference, whole), pairs(whole, whole)
    gg = rr + 2 * rd + dd
    assert min(rr, dd, cc, gg) > 0
    expected = {
        "norm": math.sqrt(gg) / 24,
        "cosine": (rr + rd) / math.sqrt(gg * rr),
        "norm_ratio": math.sqrt(gg / rr),
        "difference": math.sqrt(dd / rr),
        "cap_projection": dc / math.sqrt(cc * rr),
        "cap_cosine": dc / math.sqrt(cc * dd),
        "explained": dc**2 / cc / dd,
        "cap_slope": dc / cc,
        "alignment": dc / float(d.norm() * flat(whole).norm()),  # there is signal: prompts do not cancel
    }
    for name, value in expected.items():
        assert getattr(found[U_STATISTIC], name).value == pytest.approx(value, rel=1e-11), name


def test_a_difference_is_a_vector_of_its_own() -> None:
    """An arm with cosine 0.999996: from the arms' own products in float32, |g - r|^2 has lost its digits."""
    gradients, prompts = normal(64, 2000), torch.arange(16).repeat_interleave(4)
    reference, nudge = normal(64, seed=1), 0.0028 * normal(64, seed=2)
    zeros = torch.zeros(64, dtype=torch.float64)
    no_direction = directions_of(zeros, zeros, zeros, torch.zeros(64, dtype=torch.int64))
    found = compare(gradients @ gradients.T, prompts, reference, nudge, no_direction, resamples(16, 0, 0), 64)[PLUG_IN]
    assert found.cosine.value == pytest.approx(0.999996, abs=2e-6)
    exact = float((nudge @ gradients).square().sum())
    norm = float((reference @ gradients).norm())
    assert (found.difference.value * norm) ** 2 == pytest.approx(exact, rel=1e-9)
    arms = torch.stack([reference, reference + nudge]) @ gradients
    products = (arms @ arms.T).to(torch.float32)
    lost = float(products[0, 0] - 2 * products[0, 1] + products[1, 1])
    assert abs(lost / exact - 1) > 0.01


# ---- nothing to find -------------------------------------------------------------------------------------------------


class Task:
    """Rollouts whose gradients know nothing of how they ended, up to a mean of capped ones."""

    def __init__(self, seed: int, prompts: int = 12, size: int = 4, dimensions: int = 300, effect: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (prompts * size,)
        self.capped = torch.rand(shape, generator=generator) < 0.4
        self.solved = ~self.capped & (torch.rand(shape, generator=generator) < 0.5)
        scale = torch.arange(1, dimensions + 1, dtype=torch.float64) ** -0.25
        gradients = torch.randn(*shape, dimensions, generator=generator, dtype=torch.float64) * scale
        gradients[:, 0] += effect * (self.capped.double() - 0.4)  # grad P(cap) is along the first direction
        self.gradients = gradients
        rollouts = torch.arange(prompts * size)
        batch = fa.Batch.of(
            mask=torch.ones(len(rollouts)), cu_seqlens=torch.arange(len(rollouts) + 1), rewards=self.solved.double(),
            group_ids=rollouts // size, outcomes=torch.where(self.capped, 2, torch.where(self.solved, 0, 1)),
        )  # fmt: skip
        gram = SegmentGram(gradients @ gradients.T, rollouts, torch.zeros_like(rollouts), dimensions, dimensions)
        self.gram = gram.with_rollouts(batch)


def rows_of(projections: Projections, arm: str) -> dict[str, Comparison]:
    return {row.estimator: row.comparison for row in projections.rows if (row.arm, row.scope) == (arm, "all")}


@pytest.mark.row(11)
def test_the_null_task_is_covered_and_the_batchs_own_cosine_is_not() -> None:
    """Equal lengths, rewards and caps independent of the tokens: every expected gradient is zero. The mask's difference
    and the cap direction are sums over the same rollouts, so within a batch they lie along each other all the same."""
    arms = question_one_arms()[:2]
    covered, fooled, signal, plain, aligned, crossed = 0, 0, 0, [], [], []
    runs = 120
    for seed in range(runs):
        projections = project(Task(seed).gram, arms, buckets=False, draws=300, seed=seed)
        both = rows_of(projections, "b")
        u, batch = both[U_STATISTIC].alignment, both[PLUG_IN].alignment
        covered += u.low <= 0 <= u.high
        fooled += batch.low > 0
        plain.append(batch.value)
        signal += projections.signal.low <= 0 <= projections.signal.high
        aligned.append(u.value)
        crossed.append(both[PLUG_IN].cap_cosine.value)
    assert covered / runs >= 0.95
    assert signal / runs >= 0.95
    assert fooled / runs >= 0.95
    assert sum(plain) / runs > 0.5
    for values in (torch.tensor(aligned), torch.tensor(crossed)):  # unbiased, and so is the cross-fitted direction
        assert abs(float(values.mean())) < 3 * float(values.std()) / math.sqrt(runs)


def test_an_effect_is_found_and_its_size_covered() -> None:
    """The mask pays b for the cap, and grad P(cap) is not zero: the slope is b times what a group of 4 keeps."""
    arms = question_one_arms()[:2]
    found, covered, runs = 0, 0, 80
    slopes = []
    for seed in range(runs):
        both = rows_of(project(Task(seed, prompts=24, effect=6.0).gram, arms, buckets=False, draws=300, seed=seed), "b")
        u = both[U_STATISTIC]
        found += u.alignment.low > 0 and u.cap_slope.low > 0
        covered += u.cap_slope.low <= 0.3 <= u.cap_slope.high  # b: half of the 0.6 that are not capped are solved
        slopes.append(u.cap_slope.value)
    assert found / runs >= 0.95
    assert 0.85 <= covered / runs <= 1
    assert float(torch.tensor(slopes).mean()) == pytest.approx(0.3, abs=0.03)


@pytest.mark.slow
def test_the_null_task_through_a_policy(tmp_path: Path) -> None:
    """Rollouts of equal length sampled from a small model, whose rewards and caps are drawn without a look at them."""
    policy = Policy.load(write_policy(tmp_path), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    prompts, size, length = 8, 4, 4
    covered, fooled, runs, plain, aligned = 0, 0, 60, [], []
    for seed in range(runs):
        ids = torch.randint(0, 23, (prompts, 2), generator=generator).repeat_interleave(size, 0)
        with torch.no_grad():
            for _ in range(length):
                logits = policy.model(input_ids=ids).logits[:, -1]
                ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
        rollouts = prompts * size
        capped = torch.rand(rollouts, generator=generator) < 0.4
        solved = ~capped & (torch.rand(rollouts, generator=generator) < 0.5)
        batch = fa.Batch.of(
            mask=torch.ones(rollouts * length), cu_seqlens=torch.arange(rollouts + 1) * length, rewards=solved.double(),
            group_ids=torch.arange(rollouts) // size,
            outcomes=torch.where(capped, 2, torch.where(solved, 0, 1)),
            token_ids=fa.TokenIds(ids.flatten(), torch.arange(rollouts + 1) * (length + 2)),
        )  # fmt: skip
        gram = naive_gram(policy, batch, level="rollout").with_rollouts(batch)
        both = rows_of(project(gram, question_one_arms()[:2], buckets=False, draws=300, seed=seed), "b")
        u = both[U_STATISTIC].alignment
        covered += u.low <= 0 <= u.high
        fooled += both[PLUG_IN].alignment.low > 0
        plain.append(both[PLUG_IN].alignment.value)
        aligned.append(u.value)
    assert covered / runs >= 0.93
    assert fooled / runs >= 0.6
    assert sum(plain) / runs > 0.4
    values = torch.tensor(aligned)
    assert abs(float(values.mean())) < 3 * float(values.std()) / math.sqrt(runs)


# ---- arms ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy.load(write_policy(tmp_path_factory.mktemp("policy")), dtype=torch.float64)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[fa.Batch]:
    folder = tmp_path_factory.mktemp("dumps")
    return [
        read(write_dump(folder / f"{seed}.pt", samples(4, 6, seed=seed)), ReadOptions()).batch for seed in (0, 1)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def gram(policy: Policy, batches: list[fa.Batch]) -> SegmentGram:
    return naive_gram(policy, batches).with_rollouts(batches)


@pytest.mark.parametrize("arm", question_one_arms(seed=3), ids=lambda arm: arm.name)
def test_an_arm_on_the_outline_is_the_arm_on_its_batches(gram: SegmentGram, batches: list[fa.Batch], arm: Arm) -> None:
    expected = []
    for batch in batches:
        result = arm.apply(batch, freeze(batch))
        expected.append(result.advantages.values * batch.segments.spread(result.weights))
    assert torch.equal(arm_weights(arm, gram.rollouts).coefficients(gram), torch.cat(expected))


def test_halves_and_difficulties_are_those_of_each_dump(gram: SegmentGram, batches: list[fa.Batch]) -> None:
    whole = partition(gram.rollouts, 5)
    parts = [partition(batch, 5) for batch in batches]
    for name in ("half", "difficulty", "turn"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))


def test_cross_terms_between_dumps_are_in_it(policy: Policy, gram: SegmentGram, batches: list[fa.Batch]) -> None:
    gradients = torch.cat([segment_gradients(policy, batch) for batch in batches])
    arm = question_one_arms()[0]
    both = arm_weights(arm, gram.rollouts).coefficients(gram) @ gradients
    rows = rows_of(project(gram, [arm], buckets=False, draws=10), "a")
    assert rows[PLUG_IN].norm.value == pytest.approx(float(both.norm()) / gram.rollouts.num_rollouts, rel=1e-10)
    split = sum(
        float((arm_weights(arm, one.rollouts).coefficients(one) @ part).square().sum())
        for one, part in (
            (SegmentGram(part @ part.T, *segments_of(batch), 1, 1).with_rollouts(batch), part)
            for batch, part in zip(batches, gradients.split([b.segments.count for b in batches]), strict=True)
        )
    )
    assert math.sqrt(split) != pytest.approx(float(both.norm()), rel=1e-3)


def segments_of(batch: fa.Batch) -> tuple[Tensor, Tensor]:
    rows = torch.repeat_interleave(torch.arange(batch.num_rollouts), batch.segments.turns())
    return rows, torch.arange(batch.segments.count) - batch.segments.offsets[rows]


def test_a_gram_of_whole_rollouts_serves_arms_that_do_not_know_turns(
    policy: Policy, gram: SegmentGram, batches: list[fa.Batch]
) -> None:
    coarse = naive_gram(policy, batches, level="rollout").with_rollouts(batches)
    assert (coarse.level, gram.level) == ("rollout", "turn")
    arms = [arm for arm in question_one_arms() if arm.name != "e"]
    fine = {(r.arm, r.scope, r.estimator): r.comparison for r in project(gram, arms, draws=50).rows}
    rough = {(r.arm, r.scope, r.estimator): r.comparison for r in project(coarse, arms, draws=50).rows}
    assert {scope for _, scope, _ in rough} < {scope for _, scope, _ in fine}
    assert not any(scope.startswith("turn") for _, scope, _ in rough)
    for key, comparison in rough.items():
        for name in ("norm", "cosine", "difference", "cap_projection", "alignment"):
            one, other = getattr(comparison, name), getattr(fine[key], name)
            assert one.value == pytest.approx(other.value, rel=1e-9, abs=1e-12, nan_ok=True), (key, name)
            assert one.low == pytest.approx(other.low, rel=1e-9, abs=1e-12, nan_ok=True), (key, name)
    with pytest.raises(ValueError, match="compute it at level 'turn'"):
        project(coarse, question_one_arms())


@pytest.mark.row(13)
def test_parts_add_up_to_the_whole(gram: SegmentGram) -> None:
    """Signal and noise of turns and of difficulties: the coefficients of all parts are those of the whole."""
    projections = project(gram, question_one_arms(), draws=0)
    scopes = {row.scope for row in projections.rows}
    assert {"all", "turn 1", "turn 2", "turns 3-4", "medium"} <= scopes
    assert "turns 33+" not in scopes
    assert {row.arm for row in projections.rows} == {arm.name for arm in question_one_arms()}
    assert projections.prompts == 8
    capped = gram.rollouts.outcomes == Outcome.BUDGET
    cells = partition(gram.rollouts, 0)
    halves = [within_half(capped, gram.rollouts, cells, half).coefficients(gram) for half in (0, 1)]
    assert not bool(((halves[0] != 0) & (halves[1] != 0)).any())  # no rollout in both
    assert float(within_group(capped, gram.rollouts).coefficients(gram).abs().sum()) > 0


@pytest.mark.row(33)
def test_the_reference_may_be_any_arm(gram: SegmentGram) -> None:
    a, b, *_ = question_one_arms()
    forth, back = (rows_of(project(gram, arms, buckets=False, draws=0), arms[1].name) for arms in ([a, b], [b, a]))
    assert forth[PLUG_IN].cosine.value == pytest.approx(back[PLUG_IN].cosine.value)
    assert forth[PLUG_IN].norm_ratio.value == pytest.approx(1 / back[PLUG_IN].norm_ratio.value)
    assert rows_of(project(gram, [a, b], buckets=False, draws=0), "a")[PLUG_IN].difference.value == 0


def test_what_cannot_be_projected(gram: SegmentGram, batches: list[fa.Batch]) -> None:
    with pytest.raises(ValueError, match=r"take SegmentGram\.with_rollouts first"):
        project(replace(gram, rollouts=None, tokens=None), question_one_arms())
    with pytest.raises(ValueError, match="no arm was given"):
        project(gram, [])
    with pytest.raises(ValueError, match="segments are not those of the 24 rollouts"):
        gram.with_rollouts(batches[0])
    other = arm_weights(question_one_arms()[0], batches[0])
    with pytest.raises(ValueError, match=rf"{batches[0].segments.count} segments, but the Gram has {gram.size}"):
        other.coefficients(gram)


def test_few_prompts_have_no_interval() -> None:
    for prompts, there in ((1, False), (3, False), (4, True)):
        projections = project(Task(0, prompts=prompts).gram, question_one_arms()[:2], buckets=False, draws=200)
        assert math.isfinite(projections.signal.low) == there
        assert math.isfinite(projections.signal.value) == (prompts > 1)


def test_a_signal_share_by_hand() -> None:
    for product, share in ((1.0, 4 / 10), (-1.0, -4 / 8)):  # of the batch's square, or where prompts cancel the noise's
        products = torch.tensor([[[3.0, product], [product, 5.0]]], dtype=torch.float64)
        assert signal_share(products, resamples(2, 0, 0)).value == pytest.approx(share)
