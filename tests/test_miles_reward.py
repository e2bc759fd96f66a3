"""The reward hook: arms and estimators as advantages of samples, weights, divisors, turns."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from fastadv.integrations.miles import reward_post_process
from fastadv.integrations.miles.samples import LOSS_WEIGHT, STALENESS, TAKEN
from hypothesis import given
from hypothesis import strategies as st
from miles_standins import SAMPLES, MilesSample, Status, arguments, by_group, drawn, make
from torch import Tensor

import fastadv as fa

ROLLOUT_ARMS = (
    "none", "mask", "survivors", "random-mask:rho=0.5", "compact", "compact-survivors", "truncated-zero-reward",
    "mini-o3", "skywork-before", "skywork-after", "dynamic-sampling", "inverse-probability:rho=0.5", "oracle",
    "never-drop",
)  # fmt: skip


def whole_batch(samples: list[Any]) -> fa.Batch:
    """The same rollouts with all of their tokens."""
    lengths = torch.tensor([0, *(s.response_length for s in samples)])
    endings = [fa.statuses.sample_ending(s.status, s.metadata.get("exit_status")) for s in samples]
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    outcomes, capped = fa.outcomes_of(torch.tensor(endings), rewards, timeout=fa.Outcome.BUDGET)
    return fa.Batch.of(
        mask=torch.tensor([x for s in samples for x in s.loss_mask], dtype=torch.bool), cu_seqlens=lengths.cumsum(0),
        rewards=rewards, group_ids=[s.group_index for s in samples], outcomes=outcomes, capped=capped,
        endings=torch.tensor(endings), row_ids=torch.tensor([s.index for s in samples]),
    )  # fmt: skip


def at_tokens(arm: fa.Arm, batch: fa.Batch) -> Tensor:
    """What the arm says at every token, weights multiplied in: [N] float64."""
    result = arm.apply(batch, arm.freeze(batch))
    tokens = fa.segment_tokens(result.advantages).double() * result.loss_weights(batch).double().expand_as(
        batch.mask
    ) if result.token_weights is not None else fa.segment_tokens(result.advantages).double() * batch.rows.spread(
        result.weights.double()
    )  # fmt: skip
    return torch.where(batch.mask, tokens, 0.0)


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("name", ROLLOUT_ARMS)
def test_arms_of_rollouts_are_those_of_the_whole_batch(name: str, kind: type) -> None:
    for seed in range(4):
        samples = drawn(torch.Generator().manual_seed(seed), 6, kind=kind)
        batch = whole_batch(samples)
        arm = fa.named_arm(name, seed=3)
        raw, advantages = reward_post_process(arguments({"arm": name, "seed": 3}), samples)
        assert raw == [s.reward for s in samples]
        first = batch.cu_seqlens[:-1] if batch.cu_seqlens is not None else None
        torch.testing.assert_close(torch.tensor(advantages, dtype=torch.float64), at_tokens(arm, batch)[first])
        assert sum(map(abs, advantages)) > 0
        excluded = arm.apply(batch, arm.freeze(batch)).excluded.tolist()
        assert [a for a, gone in zip(advantages, excluded, strict=True) if gone] == [0.0] * sum(excluded)


@pytest.mark.parametrize("name", ["grpo/miles", "grpo/slime", "rloo/trl", "dr_grpo/verl", "maxrl/skyrl", "gpg/verl"])
def test_estimators_are_those_of_their_owners(name: str) -> None:
    samples = drawn(torch.Generator().manual_seed(5), 6)
    _, advantages = reward_post_process(arguments({"estimator": name}), samples)
    expected = fa.estimate(
        name, torch.tensor([s.reward for s in samples], dtype=torch.float64), [s.group_index for s in samples]
    ).advantages
    torch.testing.assert_close(torch.tensor(advantages, dtype=torch.float64), expected.double())


ROLLOUT_ESTIMATORS = sorted(name for name, found in fa.ESTIMATORS.items() if found.level == "rollout")


@pytest.mark.parametrize("name", ROLLOUT_ESTIMATORS)
def test_every_estimator_of_rollouts(name: str) -> None:
    """Those that count tokens or turns get them from the masks."""
    samples = [s for group in by_group(drawn(torch.Generator().manual_seed(9), 8)) if len(group) > 1 for s in group]
    batch = whole_batch(samples)
    _, advantages = reward_post_process(arguments({"estimator": name}), samples)
    needs = fa.ESTIMATORS[name].needs
    given: dict[str, Any] = {}
    if "lengths|mask" in needs or "lengths" in needs:
        given["lengths"] = fa.token_counts(batch.mask, batch.cu_seqlens)
    if "turn_ids" in needs:
        given["turn_ids"] = batch.segments
    expected = fa.estimate(name, batch.rewards, batch.groups, **given).advantages
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(torch.tensor(advantages, dtype=torch.float64), expected.double())
    assert any(advantages)


def normalised(samples: list[Any]) -> list[float]:
    """What Miles does by itself: mean and unbiased standard deviation of each group."""
    result = [0.0] * len(samples)
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.group_index, []).append(row)
    for rows in groups.values():
        rewards = [samples[row].reward for row in rows]
        mean = sum(rewards) / len(rows)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rows) - 1)) if len(rows) > 1 else 0
        for row, reward in zip(rows, rewards, strict=True):
            result[row] = (reward - mean) / (std + 1e-6) if std else reward - mean
    return result


def test_a_multiplier_of_raw_rewards_would_cancel_and_the_hooks_weight_does_not() -> None:
    a = 0.25
    samples = [make(float(r), group=g, index=4 * g + i) for g in range(2) for i, r in enumerate((1, 0, 0, 1))]
    plain = normalised(samples)
    for sample in samples:
        stale = sample.group_index == 1
        sample.metadata = {LOSS_WEIGHT: 1 / a if stale else 1.0, STALENESS: int(stale), TAKEN: 1}
    _, weighted = reward_post_process(arguments({"estimator": "grpo/miles"}), samples)
    assert weighted[:4] == pytest.approx(plain[:4], rel=1e-5)
    assert weighted[4:] == pytest.approx([x / a for x in plain[4:]], rel=1e-5)
    for sample in samples[4:]:  # what the plan warns of
        sample.reward /= a
    assert normalised(samples)[4:] == pytest.approx(plain[4:], rel=1e-5)


def test_exclusion_is_a_weight_or_a_mask() -> None:
    def run(exclusion: str) -> list[Any]:
        samples = [make(0.0, index=0, status=Status.TRUNCATED), make(1.0, index=1), make(0.0, index=2)]
        samples[2].remove_sample = True  # by a filter
        _, advantages = reward_post_process(arguments({"arm": "mask", "exclusion": exclusion}), samples)
        assert advantages == pytest.approx([0.0, 1.0, -0.5])
        return [s.remove_sample for s in samples]

    assert run("weight") == [False, False, True]
    assert run("mask") == [True, False, True]


@pytest.mark.parametrize("per_token", [False, True])
def test_what_the_denominator_counts_of_removed_samples_is_given_back(per_token: bool) -> None:
    """The trainer's loss is a mean over all rollouts, or over tokens with one for each removed sample."""

    def step(denominator: str) -> tuple[float, list[float]]:
        samples = [make(float(i % 3 == 0), index=i, turns=1 + i % 3) for i in range(6)]
        samples[2].remove_sample = samples[4].remove_sample = True
        mapping = {"estimator": "dr_grpo/verl", "denominator": denominator}
        _, advantages = reward_post_process(arguments(mapping, calculate_per_token_loss=per_token), samples)
        tokens = [0 if s.remove_sample else sum(s.loss_mask) for s in samples]
        if per_token:  # of losses of 1 a token, times the advantage
            total = sum(a * t for a, t in zip(advantages, tokens, strict=True))
            return total / sum(max(t, 1) for t in tokens), advantages
        return sum(a for a, t in zip(advantages, tokens, strict=True) if t) / len(samples), advantages

    _, plain = step("trainer")
    mean, _ = step("trained")
    kept = [0, 1, 3, 5]
    tokens = [sum(make(0.0, turns=1 + i % 3).loss_mask) for i in range(6)]
    expected = sum(plain[i] for i in kept) / len(kept)
    if per_token:
        expected = sum(plain[i] * tokens[i] for i in kept) / sum(tokens[i] for i in kept)
    assert mean == pytest.approx(expected)
    assert step("trainer")[0] != pytest.approx(expected)


def test_a_batch_of_which_nothing_is_left_is_not_divided_by() -> None:
    samples = [make(float(i), index=i, remove_sample=True) for i in range(2)]
    for per_token in (False, True):
        mapping = {"arm": "none", "denominator": "trained"}
        _, advantages = reward_post_process(arguments(mapping, calculate_per_token_loss=per_token), samples)
        assert all(map(math.isfinite, advantages))


def test_groups_that_an_arm_removes_leave_the_denominators() -> None:
    samples = [
        make(float(r), group=g, index=2 * g + i) for g, rs in enumerate([(1, 1), (0, 1)]) for i, r in enumerate(rs)
    ]
    reward_post_process(arguments({"arm": "dynamic-sampling"}), samples)
    assert [s.remove_sample for s in samples] == [True, True, False, False]


def test_shaped_rewards_are_what_baselines_see_and_raw_ones_are_logged() -> None:
    samples = [make(1.0, index=0, status=Status.TRUNCATED), make(1.0, index=1), make(0.0, index=2)]
    raw, advantages = reward_post_process(arguments({"arm": "none", "reward": {"zero_on_cap": "zero"}}), samples)
    assert raw == [1, 1, 0]
    assert advantages == pytest.approx([-0.5, 1.0, -0.5])


def test_no_samples_no_results_and_a_single_rollout() -> None:
    args = arguments({"arm": "none"})
    assert reward_post_process(args, []) == ([], [])
    assert reward_post_process(args, [make(None, index=0), make(None, index=1)]) == ([0, 0], [0, 0])
    assert reward_post_process(args, [make(1.0, index=0)]) == ([1], [0])


def test_it_gives_plain_numbers() -> None:
    raw, advantages = reward_post_process(arguments({"arm": "none"}), drawn(torch.Generator().manual_seed(2), 3))
    assert {type(x) for x in raw + advantages} == {float}


# ---- turns -----------------------------------------------------------------------------------------------------------


def expand(samples: list[Any], advantages: list[float], route: str) -> Tensor:
    """Advantages of tokens as the trainer ends up with them, [N] float64."""
    tokens: list[float] = []
    for sample, base in zip(samples, advantages, strict=True):
        if route == "flags":
            tokens += [base + more for more in sample.opd_reverse_kl]
            continue
        values = sample.metadata["round_number"]["fastadv_turn_advantages"]
        edges = [0, *(i for i, (a, b) in enumerate(pairwise([0, *sample.loss_mask])) if b > a), sample.response_length]
        tokens += [0.0] * edges[1] if len(edges) > 2 else [0.0] * sample.response_length
        for value, begin, end in zip(values, edges[1:], edges[2:], strict=False):
            tokens += [value] * (end - begin)
    mask = torch.tensor([x for s in samples for x in s.loss_mask], dtype=torch.bool)
    return torch.where(mask, torch.tensor(tokens, dtype=torch.float64), 0.0)


FLAGS = {"use_opd": True, "opd_type": "sglang", "opd_kl_coef": -1.0}


@pytest.mark.parametrize("name", ["turn-reached", "turn-reached:kappa=0", "predictable:below=2", "stopd:a=0.5,turn=1"])
@pytest.mark.parametrize("route", ["init", "flags"])
def test_advantages_of_turns_are_those_of_the_whole_batch(name: str, route: str) -> None:
    for seed in range(3):
        samples = drawn(torch.Generator().manual_seed(seed), 5)
        batch = whole_batch(samples)
        flags = FLAGS if route == "flags" else {}
        _, base = reward_post_process(arguments({"arm": name, "turns": route, "seed": 1}, **flags), samples)
        expected = at_tokens(fa.named_arm(name, seed=1), batch)
        torch.testing.assert_close(expand(samples, base, route), expected)
        assert len({round(float(x), 6) for x in expected}) > 3


def test_one_sample_a_turn() -> None:
    rollouts = {70: (1.0, 3), 71: (0.0, 1), 72: (1.0, 2)}
    samples = [
        make(reward, index=len(rollouts) + turn, rollout_id=number)
        for number, (reward, turns) in rollouts.items()
        for turn in range(turns)
    ]
    _, advantages = reward_post_process(arguments({"arm": "turn-reached:kappa=0", "turns": "samples"}), samples)
    # turn 0: rewards 1, 0, 1; turn 1: 1 and 1; turn 2: nobody else, so the leave-one-out mean of the group
    assert advantages == pytest.approx([0.5, 0.0, 0.5, -1.0, 0.5, 0.0])
    samples[0].loss_mask, samples[0].response_length = [1, 0, 1], 3
    with pytest.raises(ValueError, match=r"sample 0 has 2 turns, and fastadv\.turns is samples"):
        reward_post_process(arguments({"arm": "turn-reached:kappa=0", "turns": "samples"}), samples)


def test_what_another_hook_wrote_into_the_metadata_stays() -> None:
    samples = [make(1.0, index=0, metadata={"exit_status": "Submitted"}), make(0.0, index=1, metadata=None)]
    reward_post_process(arguments({"arm": "turn-reached", "turns": "init"}), samples)
    assert samples[0].metadata["exit_status"] == "Submitted"
    assert samples[1].metadata["round_number"] == {"fastadv_turn_advantages": [-1.0]}


# ---- the buffer's weights and the divisor ----------------------------------------------------------------------------


def taken_from(generator: torch.Generator, groups: int, share: float, a: float | None, seed: int) -> list[Any]:
    """Groups as a buffer hands them out that refills until it has enough: fresh ones, and stale ones that a coin kept.

    Each group is one rollout with gradient 1 beside one with 0, so the mean over candidates is known. `a` None: stale
    ones are always kept, with weight 1.
    """
    samples: list[Any] = []
    group = int(torch.randint(2**40, (), generator=generator))
    while len(samples) < groups:
        taken = 0
        while True:
            taken, group = taken + 1, group + 1
            stale = bool(torch.rand((), generator=generator) < share)
            kept = not stale or a is None or bool(fa.keep(seed, [group], a, stream="rescue")[0])
            if kept:
                break
        weight = 1 / a if stale and a is not None else 1.0
        samples.append(
            make(1.0, group=group, index=group, metadata={LOSS_WEIGHT: weight, STALENESS: int(stale), TAKEN: taken})
        )
    return samples


def batches(a: float | None, share: float, count: int, groups: int = 6) -> list[list[Any]]:
    generator = torch.Generator().manual_seed(11)
    return [taken_from(generator, groups, share, a, seed=5) for _ in range(count)]


def means(a: float | None, divisor: str, of: list[list[Any]]) -> Tensor:
    """What the hook makes of rewards as advantages, the mean of each batch."""
    rule: dict[str, Any] = {"name": "x", "baseline": "none"}
    if a is not None:
        rule |= fa.arm_to_dict(fa.named_arm(f"rescue:a={a}", seed=5)) | {"baseline": "none"}
    args = arguments({"arm": rule, "divisor": divisor})
    return torch.tensor([sum(reward_post_process(args, samples)[1]) / len(samples) for samples in of])


def interval(values: Tensor) -> float:
    """Four standard errors of the mean."""
    return 4 * values.std().item() / math.sqrt(len(values))


@pytest.mark.parametrize(("share", "a"), [(0.4, 0.5), (0.6, 0.25)])
def test_refilling_raises_the_learning_rate_and_the_divisor_takes_it_back(share: float, a: float) -> None:
    rise = 1 / (1 - share * (1 - a))
    drawn = batches(a, share, 700)
    kept, candidates, hajek = (means(a, divisor, drawn) for divisor in ("kept", "candidates", "hajek"))
    assert abs(kept.mean().item() - rise) < interval(kept)  # the hidden rise, against never dropping
    assert rise - 1 > 2 * interval(kept)
    assert abs(candidates.mean().item() - 1) < interval(candidates)  # unbiased
    torch.testing.assert_close(hajek, torch.ones_like(hajek))  # here all gradients are equal: Hajek is exact
    assert torch.equal(means(None, "candidates", batches(None, share, 20)), torch.ones(20))


def test_hajek_is_biased_where_stale_groups_differ() -> None:
    """Stale groups with gradient 1, fresh ones with 0: the mean over candidates is the stale share."""
    share, a = 0.5, 0.25
    drawn = batches(a, share, 1200, groups=2)
    for samples in drawn:
        for sample in samples:
            sample.reward = float(sample.metadata[STALENESS])
    candidates, hajek = means(a, "candidates", drawn), means(a, "hajek", drawn)
    assert abs(candidates.mean().item() - share) < interval(candidates)
    assert hajek.mean().item() < share - 2 * interval(hajek)


def test_the_mean_weight_of_candidates_is_one() -> None:
    """E[w] = 1 over groups as they come, kept or not."""
    generator = torch.Generator().manual_seed(1)
    stale = torch.rand(200_000, generator=generator) < 0.5
    weights = fa.coins.rescue_weights(5, torch.arange(200_000), stale, 0.25)
    assert weights.mean().item() == pytest.approx(1, abs=0.01)


def test_the_buffer_and_the_arm_have_to_agree() -> None:
    samples = [make(1.0, group=g, index=g, metadata={LOSS_WEIGHT: 2.0, STALENESS: 1, TAKEN: 1}) for g in range(8)]
    with pytest.raises(ValueError, match=r"both have to read the same fastadv\.arm and"):
        reward_post_process(arguments({"arm": "rescue:a=0.25", "seed": 5}), samples)


def test_coins_of_another_seed_are_not_taken_for_drops() -> None:
    """Groups that the buffer kept, and that the arm's coins would have dropped."""
    a, seed = 0.25, 5
    dropped = next(g for g in range(50) if not bool(fa.keep(seed, [g], a, stream="rescue")[0]))
    samples = [
        make(float(i), group=dropped, index=i, metadata={LOSS_WEIGHT: 4.0, STALENESS: 1, TAKEN: 1}) for i in range(2)
    ]
    with pytest.raises(ValueError, match=r"the arm gives it 0; both have to read the same"):
        reward_post_process(arguments({"arm": f"rescue:a={a}", "seed": seed}), samples)


def test_groups_without_a_result_were_taken_too() -> None:
    samples = [
        make(
            None if g == 2 else float(i), group=g, index=2 * g + i, metadata={LOSS_WEIGHT: 1.0, STALENESS: 0, TAKEN: 3}
        )
        for g in range(3)
        for i in range(2)
    ]
    args = arguments({"arm": "rescue:a=0.5", "divisor": "candidates"})
    _, advantages = reward_post_process(args, samples)
    assert advantages == pytest.approx([-2 / 8, 2 / 8, -2 / 8, 2 / 8, 0, 0])


@pytest.mark.parametrize("name", ["mask", "dynamic-sampling", "inverse-probability:rho=0.5", "survivors", "none"])
def test_arms_without_coins_about_groups_go_with_the_buffer(name: str) -> None:
    samples = drawn(torch.Generator().manual_seed(7), 6)
    _, plain = reward_post_process(arguments({"arm": name}), samples)
    for sample in samples:
        sample.metadata |= {LOSS_WEIGHT: 1.0, STALENESS: 0, TAKEN: 1}
        sample.remove_sample = False
    assert reward_post_process(arguments({"arm": name}), samples)[1] == plain
    samples[0].metadata[LOSS_WEIGHT] = 4.0
    with pytest.raises(ValueError, match="the buffer gave it fastadv_loss_weight 4, the arm gives it 1"):
        reward_post_process(arguments({"arm": name}), samples)


def test_hajek_leaves_exclusions_alone() -> None:
    """It is about groups that coins dropped; what an arm masks stays in the denominator."""
    samples = [make(float(i % 2), index=i, status=Status.TRUNCATED if i == 0 else Status.COMPLETED) for i in range(4)]
    found = [reward_post_process(arguments({"arm": "mask", "divisor": d}), samples)[1] for d in ("candidates", "hajek")]
    assert found[0] == found[1]


def test_one_group_says_nothing_about_a_divisor() -> None:
    seed = next(s for s in range(50) if bool(fa.keep(s, [0], 0.5, stream="rescue")[0]))
    samples = [make(1.0, index=i, metadata={LOSS_WEIGHT: 2.0, STALENESS: 1, TAKEN: 3}) for i in range(2)]
    with pytest.raises(ValueError, match="a batch of one group"):
        reward_post_process(arguments({"arm": "rescue:a=0.5", "seed": seed}), samples)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
    shift=st.floats(-3, 3),
)
def test_order_names_of_groups_and_a_shift_of_rewards_change_nothing(sizes: list[int], seed: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> list[Any]:
        generator.manual_seed(seed)
        rewards = iter(torch.randint(4, (sum(sizes),), generator=generator).tolist())
        return [
            make(next(rewards) / 2, group=g, index=10 * g + i, turns=1 + (g + i) % 3)
            for g, size in enumerate(sizes)
            for i in range(size)
        ]

    args = arguments({"estimator": "rloo/fastadv"})
    _, plain = reward_post_process(args, draw())
    samples = draw()
    order = torch.randperm(len(samples), generator=generator).tolist()
    _, permuted = reward_post_process(args, [samples[i] for i in order])
    assert permuted == pytest.approx([plain[i] for i in order])
    for sample in samples:
        sample.group_index, sample.reward = 1000 - 7 * sample.group_index, sample.reward + shift
    _, shifted = reward_post_process(args, samples)
    assert shifted == pytest.approx(plain, abs=1e-9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_length": None}, "sample 1: response_length is None"),
        ({"response_length": -1}, "sample 1: response_length is -1"),
        ({"metadata": "text"}, "sample 1: metadata is a str; it must be a dictionary"),
        ({"group_index": 1.5}, "sample 1: group_index is 1.5"),
        ({"rollout_id": [1]}, r"sample 1: rollout_id is \[1\]"),
        ({"index": True}, "sample 1: index is True"),
        ({"status": "odd"}, "sample 1: ending: status is 'odd'"),
        ({"status": 3}, "sample 1: ending: status is a int"),
        ({"reward": 10**400}, "sample 1: the reward is 1000"),
        ({"reward": [1]}, r"sample 1: the reward is \[1\], which is no number"),
    ],
)
def test_fields_that_cannot_be_name_their_sample(fields: dict[str, Any], message: str) -> None:
    samples = [make(1.0, index=0), make(0.0, index=1)]
    for name, value in fields.items():
        setattr(samples[1], name, value)
    with pytest.raises(ValueError, match=message):
        reward_post_process(arguments({"arm": "none", "filter": "truncated"}), samples)


# ---- a dump that Miles wrote -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "mask", "survivors", "turn-reached"])
def test_the_hook_on_a_dump_of_miles_is_its_replay(name: str) -> None:
    """The committed dump, 24 samples in 6 groups, as `--load-debug-rollout-data` hands it to the hook."""
    from pathlib import Path

    from fastadv.replay.readers.miles import read
    from fastadv.replay.readers.rollouts import ReadOptions

    path = Path(__file__).parent / "data" / "miles_dump_example.pt"
    batch = read(path, ReadOptions()).batch
    assert batch is not None
    samples = []
    for fields in torch.load(path, weights_only=True)["samples"]:
        known = {k: v for k, v in fields.items() if k in MilesSample.__dataclass_fields__}
        samples.append(MilesSample(**{**known, "status": Status(fields["status"])}))
    has_result = batch.outcomes != fa.Outcome.INFRA
    kept = batch.select(has_result)
    arm = fa.named_arm(name)
    result = arm.apply(kept, arm.freeze(kept))
    table = result.advantages.values * result.weights[result.advantages.segments.row_of_segment()]
    offsets = result.advantages.segments.offsets.tolist()
    mapping = {"arm": name} | ({"turns": "init"} if name == "turn-reached" else {})
    raw, advantages = reward_post_process(arguments(mapping), samples)
    assert len(raw) == len(advantages) == 24
    place = 0
    for sample, there, advantage in zip(samples, has_result.tolist(), advantages, strict=True):
        if not there:
            assert advantage == 0
            continue
        assert advantage == pytest.approx(float(table[offsets[place]]) if offsets[place + 1] > offsets[place] else 0.0)
        if name == "turn-reached":
            sent = sample.metadata["round_number"]["fastadv_turn_advantages"]
            assert sent == pytest.approx(table[offsets[place] : offsets[place + 1]].tolist())
        place += 1
    assert any(advantages)
