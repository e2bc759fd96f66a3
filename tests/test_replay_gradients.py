"""Gradients of the replay against plain autograd on the model, and the checks that are made with them."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from naive_gram import naive_gram
from rollout_files import VOCABULARY, samples, write_dump, write_policy
from torch import Tensor

import fastadv as fa
from fastadv.arms import freeze, question_one_arms
from fastadv.gradproj.scopes import Weighted, partition
from fastadv.outcomes import Outcome
from fastadv.replay import predictions
from fastadv.replay.errors import ReplayError
from fastadv.replay.gradients import GradientCells, compare, cosine, noise_floor, plug_in_rows, policy_gradients
from fastadv.replay.pipeline import NoProgress, ReplayOptions, replay
from fastadv.replay.policy import Policy, score
from fastadv.replay.predictions import NO_DATA, SUPPORTED, p1_two_outcomes, two_outcome_prompts
from fastadv.replay.readers import ReadOptions, read
from fastadv.replay.report import remarks, tables


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def exact(folder: Path) -> Policy:
    return Policy.load(folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dump(tmp_path_factory.mktemp("dump") / "rollouts.pt", samples())


@pytest.fixture(scope="module")
def batch(dump: Path) -> fa.Batch:
    return read(dump, ReadOptions()).batch


def by_hand(policy: Policy, batch: fa.Batch, coefficients: Tensor) -> Tensor:
    """sum of coefficient * grad log_prob, one rollout at a time, with no code of the replay."""
    total = torch.zeros(policy.size, dtype=torch.float64)
    ends, ids = batch.token_ids.cu_seqlens.tolist(), batch.token_ids.ids.long()
    for row in range(batch.num_rollouts):
        sequence = ids[ends[row] : ends[row + 1]]
        n = int(batch.lengths[row])
        logits = policy.model(input_ids=sequence[None]).logits[0]
        log_probs = torch.log_softmax(logits[:-1] / policy.temperature, -1)[
            torch.arange(len(sequence) - 1), sequence[1:]
        ]
        first = int(batch.cu_seqlens[row])
        loss = (coefficients[first : first + n] * batch.mask[first : first + n] * log_probs[-n:]).sum()
        total += torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, policy.parameters)]).double()
    return total


def test_log_probs_do_not_depend_on_the_micro_batch(exact: Policy, batch: fa.Batch) -> None:
    alone, together = (torch.cat([log_probs for _, log_probs in score(exact, batch, limit)]) for limit in (1, 10**6))
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-12)
    assert alone.shape == batch.mask.shape


@pytest.mark.parametrize("name", ["a", "c", "e"])
def test_an_arms_gradient_is_plain_autograd(exact: Policy, batch: fa.Batch, name: str) -> None:
    arm = {a.name: a for a in question_one_arms()}[name]
    result = arm.apply(batch, freeze(batch))
    (gradient,) = policy_gradients(exact, batch, [Weighted(result.advantages, result.weights)], max_tokens=64)
    coefficients = fa.segment_tokens(result.advantages) * batch.rows.spread(result.weights)
    torch.testing.assert_close(gradient, by_hand(exact, batch, coefficients), rtol=1e-9, atol=1e-9)


def test_the_ppo_gradient_has_the_ratio_in_it(exact: Policy, batch: fa.Batch) -> None:
    table = fa.SegmentTable(torch.ones(batch.segments.count, dtype=torch.float64), batch.segments)
    (gradient,) = policy_gradients(exact, batch, [Weighted(table, torch.ones(batch.num_rollouts))], loss="ppo")
    log_probs = torch.cat([values for _, values in score(exact, batch, 10**6)])
    ratio = (log_probs - batch.rollout_log_probs.double()).exp()
    coefficients = torch.where(ratio <= 1.2, ratio, 0.0)  # a positive advantage is clipped above
    torch.testing.assert_close(gradient, by_hand(exact, batch, coefficients), rtol=1e-6, atol=1e-6)


def run_cells(policy: Policy, batch: fa.Batch, **options: Any) -> GradientCells:
    arms = question_one_arms()
    statistics = freeze(batch)
    cells = GradientCells(arms, policy.size, **options)
    results = [arm.apply(batch, statistics) for arm in arms]
    cells.add(policy, batch, results, 0, loss="reinforce", max_tokens=1000, progress=lambda done: None)
    return cells


def test_buckets_add_up_to_the_whole(exact: Policy, batch: fa.Batch) -> None:
    cells, whole = run_cells(exact, batch), run_cells(exact, batch, buckets=False)
    torch.testing.assert_close(cells.by_turn.sum(2), whole.by_turn.sum(2), rtol=0, atol=1e-10)
    torch.testing.assert_close(cells.by_difficulty.sum(2), whole.by_turn.sum(2), rtol=0, atol=1e-10)
    result = question_one_arms()[0].apply(batch, freeze(batch))
    (total,) = policy_gradients(exact, batch, [Weighted(result.advantages, result.weights)])
    torch.testing.assert_close(cells.by_turn[0].sum((0, 1)), total, rtol=0, atol=1e-10)
    assert torch.equal(cells.by_turn[1], cells.by_turn[5])  # a fraction of 1 is the whole mask
    assert not torch.equal(cells.by_turn[1], cells.by_turn[4])


@pytest.mark.row(11, 12, 16)
def test_the_comparison_by_hand(exact: Policy, batch: fa.Batch) -> None:
    cells = run_cells(exact, batch)
    rows = {(row.scope, row.arm): row for row in compare(cells)}
    half = partition(batch, 0).half
    results = {arm.name: arm.apply(batch, freeze(batch)) for arm in question_one_arms()}

    def gradient(name: str, rollouts: Tensor) -> Tensor:
        result = results[name]
        weighted = Weighted(result.advantages, result.weights * rollouts)
        return policy_gradients(exact, batch, [weighted])[0] / batch.num_rollouts

    everything = torch.ones(batch.num_rollouts)
    a, b = gradient("a", everything), gradient("b", everything)
    row = rows["all", "b"]
    assert row.cosine == pytest.approx(float(a @ b / (a.norm() * b.norm())))
    assert row.norm_ratio == pytest.approx(float(b.norm() / a.norm()))
    assert row.difference == pytest.approx(float((b - a).norm() / a.norm()))
    differences = [gradient("b", half == h) - gradient("a", half == h) for h in (0, 1)]
    cap = cells.cap / batch.num_rollouts
    projection = sum(float(differences[h] @ cap[1 - h] / cap[1 - h].norm()) for h in (0, 1))
    assert row.cap_projection == pytest.approx(projection / float(a.norm()))
    common = float(2 * cap[0] @ cap[1])
    slope = sum(float(differences[h] @ cap[1 - h]) for h in (0, 1)) / common if common > 0 else math.nan
    assert row.cap_slope == pytest.approx(slope, nan_ok=True)
    opposite = GradientCells(question_one_arms(), exact.size)
    opposite.by_turn += cells.by_turn
    opposite.cap[0], opposite.cap[1] = cells.cap[0], -cells.cap[0]
    assert all(math.isnan(r.cap_slope) for r in compare(opposite))
    assert rows["all", "a"].cosine == pytest.approx(1.0)
    assert rows["all", "a"].difference == 0
    alone = []
    for h in (0, 1):
        part = batch.select(half == h)
        advantages = fa.group_advantages(part.rewards, part.groups, baseline="loo")
        table = fa.SegmentTable(advantages.repeat_interleave(part.segments.turns()), part.segments)
        alone.append(policy_gradients(exact, part, [Weighted(table, torch.ones(part.num_rollouts))])[0])
    assert noise_floor(cells) == pytest.approx(cosine(*alone))
    assert {scope for scope, _ in rows} >= {"all", "turn 1", "turn 2", "turns 3-4"}


@pytest.mark.row(15, 46)
def test_p1_holds_to_rounding(exact: Policy, folder: Path, batch: fa.Batch) -> None:
    prompts = two_outcome_prompts(batch, 5)
    assert len(prompts) == 5
    for prompt in prompts:
        assert set(prompt.outcomes.tolist()) == {Outcome.SOLVED, Outcome.BUDGET}
    p = p1_two_outcomes(exact, prompts, max_tokens=1000)
    assert p.verdict == SUPPORTED
    assert max(p.statistic.values()) < 1e-12
    single = p1_two_outcomes(Policy.load(folder), prompts, max_tokens=1000)
    assert single.verdict == SUPPORTED
    assert 0 < max(single.statistic.values()) < 1e-4
    assert p1_two_outcomes(exact, [], max_tokens=1000).verdict == NO_DATA
    half = p1_two_outcomes(Policy.load(folder, dtype=torch.bfloat16), prompts, max_tokens=1000)
    assert (half.verdict, half.statistic) == (NO_DATA, {})
    assert "it is to rounding of float32, and the policy has less: --dtype float32" in half.detail


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_p1_is_not_supported_by_a_residual_that_is_no_number(
    exact: Policy, batch: fa.Batch, monkeypatch: Any, broken: float
) -> None:
    found = [dict.fromkeys(predictions.P1_IDENTITIES, 0.0) for _ in range(3)]
    found[1]["survivors"] = broken
    monkeypatch.setattr(predictions, "p1_residuals", lambda *given, **options: found.pop(0))
    p = p1_two_outcomes(exact, two_outcome_prompts(batch, 3), max_tokens=1000)
    assert p.verdict == predictions.FALSIFIED
    assert not math.isfinite(p.statistic["survivors"])


def test_p1_says_when_nothing_was_measured(exact: Policy, batch: fa.Batch) -> None:
    silent = [replace(p, mask=torch.zeros_like(p.mask)) for p in two_outcome_prompts(batch, 2)]
    p = p1_two_outcomes(exact, silent, max_tokens=1000)
    assert (p.verdict, p.statistic) == (NO_DATA, {})


def test_p1_notices_a_statistic_that_is_not_frozen(exact: Policy, batch: fa.Batch, monkeypatch: Any) -> None:
    """The mean recomputed over what the mask keeps, which is what a pipeline that masks too early does."""
    plain = predictions.freeze

    def unfrozen(prompt: fa.Batch) -> Any:
        statistics = plain(prompt)
        object.__setattr__(statistics, "all", statistics.survivors)
        return statistics

    monkeypatch.setattr(predictions, "freeze", unfrozen)
    p = p1_two_outcomes(exact, two_outcome_prompts(batch, 3), max_tokens=1000)
    assert p.verdict == predictions.FALSIFIED
    assert p.statistic["masked, mean baseline"] > 0.1


def test_several_dumps_are_one_batch_taken_in_turns(folder: Path, dump: Path, tmp_path: Path) -> None:
    """Gradients, arms and census over two files equal those over one file with all rollouts."""
    entries = samples()
    parts = [write_dump(tmp_path / "1.pt", entries[:30]), write_dump(tmp_path / "2.pt", entries[30:])]
    policy, options = Policy.load(folder, dtype=torch.float64), ReplayOptions(buckets=False, p1_prompts=0)
    whole, split = replay([dump], policy, options), replay(parts, policy, options)
    assert whole.census.counts == split.census.counts
    for one, other in zip(whole.gradients, split.gradients, strict=True):
        assert (other.arm, other.scope) == (one.arm, one.scope)
        for name in ("norm", "cosine", "norm_ratio", "difference", "cap_projection", "cap_cosine", "cap_slope"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-6, abs=1e-9, nan_ok=True), name
    assert [row.second_moment for row in split.arms] == pytest.approx([row.second_moment for row in whole.arms])
    assert torch.equal(whole.reward_by_turn, split.reward_by_turn)
    assert len({file.statistics_hash for file in split.files}) == 2
    hashes = [file.statistics_hash for file in replay(parts, None, options).files]
    assert hashes == [file.statistics_hash for file in split.files]


# ---- the segment Gram against flat gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("naive", [True, False])
def test_the_gram_gives_what_flat_gradients_give(exact: Policy, batch: fa.Batch, naive: bool) -> None:
    """Every arm, turn bucket and difficulty, and the noise floor; from a backward pass for each segment, and from the
    pass that no segment's gradient leaves."""
    cells = run_cells(exact, batch)
    gram = naive_gram(exact, batch) if naive else fa.gradproj.segment_gram(exact.model, batch, level="turn")
    projections = fa.gradproj.project(gram.with_rollouts(batch), question_one_arms(), draws=10)
    flat, found = compare(cells), plug_in_rows(projections)
    assert len(found) == len(flat) >= 7 * 6
    for one, other in zip(flat, found, strict=True):
        assert (other.arm, other.scope) == (one.arm, one.scope)
        for field in fields(one):
            if field.name not in ("arm", "scope"):
                expected = pytest.approx(getattr(one, field.name), rel=1e-9, abs=1e-9, nan_ok=True)
                assert getattr(other, field.name) == expected, (one.arm, one.scope, field.name)
    assert projections.noise_floor == pytest.approx(noise_floor(cells), rel=1e-9)


def test_the_replay_takes_the_gram_and_says_so(exact: Policy, dump: Path) -> None:
    options = ReplayOptions(p1_prompts=0)
    streamed_, flat = (replay([dump], exact, replace(options, gradients=how)) for how in ("auto", "cells"))
    assert (streamed_.gradients_by, flat.gradients_by) == ("gram", "cells")
    assert flat.projections is None
    assert flat.gram is None
    for one, other in zip(flat.gradients, streamed_.gradients, strict=True):
        assert (other.arm, other.scope) == (one.arm, one.scope)
        assert other.cosine == pytest.approx(one.cosine, rel=1e-9, nan_ok=True)
    assert streamed_.noise_floor == pytest.approx(flat.noise_floor, rel=1e-9)
    assert streamed_.covered == streamed_.parameters == exact.size
    said = " ".join(remarks(streamed_))
    assert f"gradients of {exact.size:,} of {exact.size:,} parameters (100.0%), by segment Gram, level turn" in said
    assert "without a file for other arms: --gradients cells" in " ".join(remarks(flat))
    titles = [table.title for table in tables(streamed_)]
    assert titles == [table.title for table in tables(flat)]
    assert streamed_.gram.temperature == exact.temperature
    assert streamed_.gram.dtype == "float64"
    assert len(streamed_.gram.checkpoint) == len(streamed_.gram.batch) == 64


def test_where_the_gram_cannot_be_had(folder: Path, dump: Path) -> None:
    """A loss whose factors differ within a turn, and a model with a module that nobody intercepts."""
    options = ReplayOptions(p1_prompts=0, buckets=False)
    ppo = replay([dump], Policy.load(folder), replace(options, loss="ppo"))
    assert ppo.gradients_by == "cells"
    assert ppo.gradients_note.startswith("--loss ppo: its factors differ from token to token")
    with pytest.raises(ReplayError, match="--gradients gram does not go with --loss ppo"):
        replace(options, loss="ppo", gradients="gram")
    with pytest.raises(ReplayError, match="--gradients is 'both'; it must be one of auto, gram, cells"):
        replace(options, gradients="both")
    odd = Policy.load(folder)
    odd.model.transformer.h[0].register_parameter("scale", torch.nn.Parameter(torch.ones(3)))
    result = replay([dump], odd, options)
    assert result.gradients_by == "cells"
    assert "scale" in result.gradients_note
    assert "no interceptor" in " ".join(remarks(result))
    assert len(result.gradients) == 7
    with pytest.raises(ReplayError, match=r"--gradients gram: .*scale"):
        replay([dump], odd, replace(options, gradients="gram"))


def test_the_plan_comes_before_the_pass(exact: Policy, dump: Path) -> None:
    class Watching(NoProgress):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def say(self, text: str) -> None:
            self.seen.append(text)

        def stage(self, title: str, total: int | None) -> Any:
            self.seen.append(title)
            return nullcontext(lambda done, total=None: self.seen.append(f"{title} {done} of {total}"))

    watching = Watching()
    result = replay([dump], exact, ReplayOptions(p1_prompts=0, buckets=False), watching)
    said = watching.seen.index(result.plan)
    assert watching.seen[said + 1] == "segment Gram"
    assert re.fullmatch(r"segment Gram 1 of \d+", watching.seen[said + 2])
    assert "operations" in result.plan
    assert "memory" in result.plan


# ---- what cannot be scored -------------------------------------------------------------------------------------------


def test_rollouts_that_a_policy_cannot_score(folder: Path, batch: fa.Batch, tmp_path: Path) -> None:
    policy = Policy.load(folder)
    with pytest.raises(ReplayError, match="carry no token ids"):
        policy.check(replace(batch, token_ids=None))
    foreign = fa.TokenIds(batch.token_ids.ids + VOCABULARY, batch.token_ids.cu_seqlens)
    with pytest.raises(ReplayError, match=r"vocabulary ends at 22: they come from another tokenizer"):
        policy.check(replace(batch, token_ids=foreign))
    with pytest.raises(ReplayError, match="the policy's context ends at 5"):
        Policy.load(write_policy(tmp_path / "short", context=5)).check(batch)
    bare = fa.Batch.of(
        mask=torch.ones(3), rewards=torch.ones(1), group_ids=[0], outcomes=torch.tensor([0]),
        token_ids=fa.TokenIds(torch.ones(3, dtype=torch.int32), torch.tensor([0, 3])),
    )  # fmt: skip
    with pytest.raises(ReplayError, match="rollout 0 has no prompt"):
        policy.check(bare)
    with pytest.raises(ReplayError, match="needs rollout_log_probs"):
        policy_gradients(policy, replace(batch, rollout_log_probs=None), [], loss="ppo")


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"has no config\.json"):
        Policy.load(tmp_path)
    with pytest.raises(ReplayError, match="--temperature is inf; it must be finite and above 0"):
        Policy(torch.nn.Linear(1, 1), 1, None, math.inf)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ReplayError, match=r"config\.json is a file; --policy takes the folder that it is in"):
        Policy.load(tmp_path / "config.json")
    with pytest.raises(ReplayError, match="cannot be loaded as a policy"):
        Policy.load(tmp_path)


def test_a_parameter_that_no_rollout_reaches_has_no_gradient(folder: Path, batch: fa.Batch) -> None:
    """As an expert that no token is sent to: it is zero in the flat gradient, and the rest is as without it."""
    plain, wider = Policy.load(folder), Policy.load(folder)
    wider.model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    table = fa.SegmentTable(torch.ones(batch.segments.count), batch.segments)
    wanted = [Weighted(table, torch.ones(batch.num_rollouts))]
    gradient, expected = policy_gradients(wider, batch, wanted), policy_gradients(plain, batch, wanted)
    names = [name for name, _ in wider.model.named_parameters()]
    sizes = [p.numel() for p in wider.parameters]
    parts = dict(zip(names, gradient[0].split(sizes), strict=True))
    assert parts.pop("unused").tolist() == [0, 0, 0]
    assert torch.equal(torch.cat(list(parts.values())), expected[0])


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """transformers would draw them at random and say so in a warning."""
    from safetensors.torch import load_file, save_file

    weights = load_file(write_policy(tmp_path) / "model.safetensors")
    lost = next(name for name in weights if name.endswith("c_attn.weight"))
    del weights[lost]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    message = r"1 weight missing or of another shape \(.*c_attn\.weight is missing\)"
    with pytest.raises(ReplayError, match=message):
        Policy.load(tmp_path)


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(write_policy(tmp_path) / "model.safetensors")
    name = next(name for name in weights if name.endswith("ln_f.weight"))
    weights[name] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ReplayError, match=r"ln_f\.weight has shape \[3\] instead of \[16\]\); pass a complete"):
        Policy.load(tmp_path)


def test_weights_that_the_model_has_no_place_for_are_noted(tmp_path: Path, dump: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(write_policy(tmp_path) / "model.safetensors")
    assert Policy.load(tmp_path).notes == ()
    more = {f"value_head.\x1b{i}": torch.ones(1) for i in range(5)}
    save_file({**weights, **more}, tmp_path / "model.safetensors", {"format": "pt"})
    policy = Policy.load(tmp_path)
    assert policy.notes[0].startswith("the model has no place for 5 weights of the checkpoint: value_head.")
    result = replay([dump], policy, ReplayOptions(p1_prompts=1, buckets=False))
    assert any("no place for 5 weights of the checkpoint: value_head. 0" in remark for remark in remarks(result))


def test_a_gradient_that_is_not_finite(folder: Path, batch: fa.Batch) -> None:
    policy = Policy.load(folder)
    with torch.no_grad():
        policy.parameters[0][0, 0] = torch.nan
    table = fa.SegmentTable(torch.ones(batch.segments.count), batch.segments)
    with pytest.raises(ReplayError, match="not finite"):
        policy_gradients(policy, batch, [Weighted(table, torch.ones(batch.num_rollouts))])


def test_memory_is_counted_before_it_is_taken(folder: Path, dump: Path) -> None:
    policy = Policy.load(folder)
    with pytest.raises(ReplayError, match=r"more than --max-memory .*--no-buckets takes"):
        replay([dump], policy, ReplayOptions(max_memory=1000, gradients="cells"))
    with pytest.raises(ReplayError, match=r"the Gram of 187 segments takes 0\.0 GiB, more than --max-memory"):
        replay([dump], policy, ReplayOptions(max_memory=1000))
    assert replay([dump], policy, ReplayOptions(max_memory=8 * 187**2, p1_prompts=0)).gradients_by == "gram"


def test_p1_does_not_take_more_memory_than_it_may(exact: Policy, batch: fa.Batch) -> None:
    prompts = two_outcome_prompts(batch, 2)
    p = p1_two_outcomes(exact, prompts, max_tokens=1000, max_memory=48 * exact.size - 1)
    assert (p.verdict, p.statistic) == (NO_DATA, {})
    assert p.detail.startswith("its 6 flat gradients take 0.0 GiB, more than --max-memory")
    assert p1_two_outcomes(exact, prompts, max_tokens=1000, max_memory=48 * exact.size).verdict == SUPPORTED
