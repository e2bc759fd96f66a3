"""`fastadv replay --arms` and what it does with arms of every kind."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import DOCS, documented, fails, fastadv, keys_of
from rollout_files import samples, write_dump, write_policy
from test_replay_gradients import by_hand
from torch import Tensor

import fastadv as fa
from fastadv.arms import Arm, TokenCoins, TurnMask, question_one_arms
from fastadv.arms.baselines import baselines
from fastadv.arms.prompt_sums import prompt_sums
from fastadv.gradproj.outline import outline
from fastadv.gradproj.projections import arm_weights
from fastadv.gradproj.scopes import Weighted
from fastadv.outcomes import Ending, Outcome
from fastadv.replay import pipeline
from fastadv.replay.arm_table import arm_row
from fastadv.replay.errors import ReplayError
from fastadv.replay.gradients import GradientCells, policy_gradients
from fastadv.replay.page import render
from fastadv.replay.pipeline import ReplayOptions, replay
from fastadv.replay.policy import Policy
from fastadv.replay.readers import ReadOptions, read
from fastadv.replay.report import as_json, tables
from fastadv.replay.requery import chosen_arms, parse_arm

EDGES = {"position-buckets": {"edges": "2+5"}, "microcoder": {"rho": 1.0, "window": 1}}
NAMED = [named(seed=1, **EDGES.get(name, {})) for name, named in fa.ARMS.items()]
PRESETS = {arm.name: arm for arm in question_one_arms()}


def with_everything(batch: fa.Batch) -> fa.Batch:
    """The same rollouts, as if their endings and the versions of their tokens had been logged."""
    capped = batch.outcomes == Outcome.BUDGET
    versions = 5 + batch.rows.spread(batch.row_ids % 3) * (batch.turn_ids == 0)
    return replace(
        batch, endings=torch.where(capped, torch.where(batch.row_ids % 2 == 0, Ending.TURN_CAP, Ending.LENGTH_CAP), 0),
        versions=torch.where(batch.mask, versions, -1).to(torch.int32),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dump(tmp_path_factory.mktemp("dump") / "rollouts.pt", samples(6, 4))


@pytest.fixture(scope="module")
def batch(dump: Path) -> fa.Batch:
    return with_everything(read(dump, ReadOptions()).batch)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dumps that say everything that an arm can read."""

    def reads(path: Path, options: ReadOptions) -> Any:
        rollouts = read(path, options)
        return replace(rollouts, batch=with_everything(rollouts.batch))

    monkeypatch.setattr(pipeline, "read", reads)


def coefficients(arm: Arm, batch: fa.Batch) -> Tensor:
    """What each token's log-prob is multiplied by, with no code of the replay."""
    result = arm.apply(batch, arm.freeze(batch))
    values = fa.segment_tokens(result.advantages).double() * result.weights.double()[batch.rows.row_of_token()]
    return values if result.token_weights is None else values * result.token_weights


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.row(9)
def test_many_arms_from_one_forward_pass(folder: Path, batch: fa.Batch) -> None:
    """Each arm's gradient is that of plain autograd on its own, whatever the arm weights."""
    policy = Policy.load(folder, dtype=torch.float64)
    results = [arm.apply(batch, arm.freeze(batch)) for arm in NAMED]
    wanted = [Weighted(r.advantages, r.weights, r.token_weights) for r in results]
    together = policy_gradients(policy, batch, wanted, max_tokens=64)
    for arm, gradient in zip(NAMED, together, strict=True):
        expected = by_hand(policy, batch, coefficients(arm, batch))
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9, msg=arm.name)


@pytest.mark.usefixtures("logged")
@pytest.mark.parametrize("by", ["gram", "cells"])
def test_replay_of_named_arms_is_plain_autograd(folder: Path, dump: Path, batch: fa.Batch, by: str) -> None:
    """Norms and cosines of every arm, by both ways of computing them; arms of single tokens by flat gradients alone."""
    policy = Policy.load(folder, dtype=torch.float64)
    arms = tuple(arm for arm in NAMED if by == "cells" or arm.level != "token")
    result = replay([dump], policy, ReplayOptions(arms=arms, gradients=by, p1_prompts=0))
    assert result.gradients_by == by
    whole = {row.arm: row for row in result.gradients if row.scope == "all"}
    assert list(whole) == [arm.name for arm in arms]
    reference = by_hand(policy, batch, coefficients(arms[0], batch)) / batch.num_rollouts
    for arm in arms:
        gradient = by_hand(policy, batch, coefficients(arm, batch)) / batch.num_rollouts
        assert whole[arm.name].norm == pytest.approx(float(gradient.norm()), rel=1e-6), arm.name
        assert whole[arm.name].difference == pytest.approx(
            float((gradient - reference).norm() / reference.norm()), rel=1e-6, abs=1e-7
        )
    by_turn = [row for row in result.gradients if row.scope == "turn 2"]
    assert (by_turn[0].norm > 0) is True
    assert next(row for row in by_turn if row.arm == "predictable").norm == 0
    render(result)
    json.loads(as_json(result))


def test_buckets_of_positions_and_coins_add_up_to_the_whole(folder: Path, batch: fa.Batch) -> None:
    """Turns are parts of the batch, whatever the arm's own buckets are."""
    policy = Policy.load(folder, dtype=torch.float64)
    both = Arm("both", baseline="turn-reached", position_edges=(2,), token_weights=TokenCoins(0.5))
    cells = GradientCells([both], policy.size)
    result = both.apply(batch, both.freeze(batch))
    cells.add(policy, batch, [result], 0, loss="reinforce", max_tokens=64, progress=lambda done: None)
    found = coefficients(both, batch)
    for turn in (0, 1):
        expected = by_hand(policy, batch, torch.where(batch.turn_ids == turn, found, 0.0))
        torch.testing.assert_close(cells.by_turn[0, :, turn].sum(0), expected, rtol=1e-9, atol=1e-9)
    whole = by_hand(policy, batch, found)
    torch.testing.assert_close(cells.by_difficulty[0].sum((0, 1)), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("logged")
def test_arms_of_single_tokens_take_flat_gradients(folder: Path, dump: Path) -> None:
    policy = Policy.load(folder)
    arms = chosen_arms("none,nat-urs,position-buckets:edges=2", PRESETS)
    result = replay([dump], policy, ReplayOptions(arms=arms, buckets=False, p1_prompts=0))
    assert result.gradients_by == "cells"
    assert "'nat-urs', 'position-buckets:edges=2'" in result.gradients_note
    assert "differ from token to token" in result.gradients_note
    with pytest.raises(ReplayError, match="--gradients gram does not go with --arms 'nat-urs'"):
        ReplayOptions(arms=arms, gradients="gram")


def test_a_gram_refuses_arms_of_single_tokens(batch: fa.Batch) -> None:
    for name in ("nat-urs", "nat-rpc", "position-buckets"):
        with pytest.raises(ValueError, match=f"arm '{name}.*' treats the tokens of a turn differently"):
            arm_weights(next(arm for arm in NAMED if arm.name.startswith(name)), batch)
    skipped = arm_weights(Arm("skip", token_weights=TurnMask(skip=(0,))), batch)
    first = batch.segments.offsets[:-1]
    assert not skipped.advantages.values[first].any()
    assert skipped.advantages.values.any()
    outlined, _, _ = outline([replace(batch, endings=None, versions=None)])
    for name, message in (
        ("mini-o3", "does not say how"),
        ("rescue", "no versions"),
        ("microcoder", "does not say how"),
    ):
        with pytest.raises(ValueError, match=message):
            arm_weights(fa.ARMS[name](), outlined)
    whole, part = arm_weights(fa.ARMS["stopd"](), batch), arm_weights(fa.ARMS["stopd"](), outlined)
    assert torch.equal(whole.advantages.values, part.advantages.values)
    with pytest.raises(ValueError, match="tokens have weights of their own"):
        Weighted(skipped.advantages, skipped.weights, torch.ones_like(batch.mask)).coefficients(None)  # type: ignore[arg-type]


# ---- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", NAMED, ids=lambda arm: arm.name)
def test_rows_of_the_table_by_brute_force(arm: Arm, batch: fa.Batch) -> None:
    statistics = arm.freeze(batch)
    result = arm.apply(batch, statistics)
    row = arm_row(arm, prompt_sums(arm, result, batch, statistics))
    sampled, of_token = batch.mask, batch.rows.row_of_token()
    advantages = coefficients(arm, batch)[sampled]
    group = batch.groups.index[of_token][sampled]
    assert row.second_moment == pytest.approx(float((advantages**2).mean()))
    within = sum(float(((advantages[group == g] - advantages[group == g].mean()) ** 2).sum()) for g in group.unique())
    assert row.variance == pytest.approx(within / len(group))
    kept = ~result.excluded[of_token][sampled]
    if result.token_weights is not None:
        kept &= result.token_weights[sampled] != 0
    assert row.kept_tokens == pytest.approx(float(kept.double().mean()))
    assert row.kept_rollouts == pytest.approx(float((~result.excluded).double().mean()))
    table = fa.SegmentTable(baselines(arm, batch, statistics), result.advantages.segments)
    baseline = fa.segment_tokens(table)[sampled]
    per_rollout = torch.stack([baseline[of_token[sampled] == r].mean() for r in range(batch.num_rollouts)])
    assert row.baseline == pytest.approx(float(per_rollout.mean()))
    capped = batch.outcomes == Outcome.BUDGET
    given = (per_rollout * (1 - result.weights.double()))[capped]
    assert row.subsidy == pytest.approx(float(given.sum() / capped.sum()))
    if arm.scale == "none" and arm.row_weights is None and result.token_weights is None:
        reward = batch.rewards[of_token][sampled]
        torch.testing.assert_close(advantages[kept], (reward - baseline)[kept], rtol=0, atol=1e-12)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_takes_names_and_files(dump: Path, tmp_path: Path) -> None:
    file = tmp_path / "arms.yaml"
    file.write_text("- random-mask:rho=0.6\n- name: half $x$ <b>[red]\n  excludes: [budget]\n  fraction: 0.5\n")
    out = tmp_path / "out"
    run = fastadv("replay", dump, "--out", out, "--arms", file, "--seed", 3)
    assert run.returncode == 0, run.stderr
    numbers = json.loads((out / "report.json").read_text())
    assert [arm["name"] for arm in numbers["arms"]] == ["none", "random-mask:rho=0.6", "half $x$ <b>[red]"]
    assert [arm["name"] for arm in numbers["options"]["arms"]] == [arm["name"] for arm in numbers["arms"]]
    assert numbers["options"]["arms"][1]["seed"] == 3
    written = [fa.arm_from_dict(arm) for arm in numbers["options"]["arms"]]
    assert written[1] == fa.named_arm("random-mask:rho=0.6", seed=3)
    page = (out / "report.html").read_text()
    assert "<b>[red]" not in page
    assert "half $x$ &lt;b&gt;[red]" in page
    plain = {"SOLVED", "FAILED", "BUDGET", "INFRA", "solved_above", "reward_key", "trust"}
    plain.update(*(prediction["statistic"] for prediction in numbers["predictions"]))
    assert keys_of(numbers, frozenset(plain)) <= documented("report_json.md") | documented("arms.md")


@pytest.mark.row(49)
def test_the_command_says_what_is_more_than_one_thing(dump: Path, tmp_path: Path) -> None:
    run = fastadv("replay", dump, "--out", tmp_path / "1", "--arms", "survivors,a,mask,inverse-probability:rho=0.5")
    assert run.returncode == 0, run.stderr
    words = " ".join(run.stdout.split())
    assert "• a and survivors differ in 2 things" in words
    assert "• a and mask differ" not in words
    assert "• arm mask: its mask depends on the outcome: being masked is paid" in words
    assert "• arm inverse-probability: its mask depends on the outcome, and its weights give back" in words
    names = [arm["name"] for arm in json.loads((tmp_path / "1" / "report.json").read_text())["arms"]]
    assert names == ["a", "survivors", "mask", "inverse-probability"]
    plain = fastadv("replay", dump, "--out", tmp_path / "2")
    assert "differ in" not in plain.stdout


def test_mistakes_in_arms_are_messages(dump: Path, tmp_path: Path) -> None:
    def wrong(arms: Any, message: str) -> None:
        fails("replay", dump, "--out", tmp_path / "out", "--arms", arms, message=message)
        assert not (tmp_path / "out").exists()

    wrong("masc", "'masc' is no arm .did you mean 'mask'..; they are none, mask, survivors")
    wrong("mask,mask", "two arms are called 'mask'")
    wrong(",", "no arm is named")
    wrong("rescue:a=2", r"keep is 2\.0; it must be in")
    wrong("stale-tokens", "Arm 'stale-tokens': the batch has no versions")
    wrong(tmp_path / "none.yaml", "No such file")
    (tmp_path / "bad.yml").write_text("- name: x\n  colour: red\n")
    wrong(tmp_path / "bad.yml", "'colour' is no key; the keys are name, excludes")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    wrong(tmp_path / "bytes.yaml", "bytes.yaml: ")


def test_parameters_stay_with_their_name() -> None:
    arms = chosen_arms("mask, rescue:a=0.5, after=3 ,b,position-buckets:edges=1+2,kappa=4", PRESETS, seed=2)
    assert [arm.name for arm in arms] == [
        "none",
        "mask",
        "rescue:a=0.5,after=3",
        "b",
        "position-buckets:edges=1+2,kappa=4.0",
    ]
    assert arms[2] == fa.ARMS["rescue"](a=0.5, after=3, seed=2)
    assert arms[3] is PRESETS["b"]
    assert [arm.name for arm in chosen_arms("mask,a", PRESETS)] == ["a", "mask"]


def test_compare_takes_named_arms() -> None:
    assert parse_arm("random-mask:rho=0.5", PRESETS, seed=3) == fa.ARMS["random-mask"](rho=0.5, seed=3)
    assert parse_arm("survivors", PRESETS) == fa.ARMS["survivors"]()
    with pytest.raises(ReplayError, match="'b=1' is no parameter=value of rho, seed"):
        parse_arm("random-mask:b=1", PRESETS)


def test_the_arms_are_listed() -> None:
    run = fastadv("arms")
    assert run.returncode == 0
    for name, named in fa.ARMS.items():
        assert re.search(rf"^{name} ", run.stdout, re.MULTILINE), name
        for key, value in named.parameters.items():
            assert f"{key}={value}" in run.stdout


@pytest.mark.parametrize("command", ["arms", "estimators"])
def test_lists_fit_eighty_columns(command: str) -> None:
    """No name is broken, and no line is longer than the terminal."""
    lines = fastadv(command, columns=80).stdout.splitlines()
    assert max(map(len, (line.rstrip() for line in lines))) <= 80
    firsts = {line.split(" ")[0] for line in lines}
    names = fa.ARMS if command == "arms" else [name for name in fa.ESTIMATORS if len(name) <= 24]
    assert set(names) <= firsts


def test_the_estimators_are_listed() -> None:
    run = fastadv("estimators", "rloo")
    assert run.returncode == 0
    assert all((name in run.stdout) == ("rloo" in name) for name in fa.ESTIMATORS)
    found = json.loads(fastadv("estimators", "--json").stdout)
    assert [e["name"] for e in found] == list(fa.ESTIMATORS)
    assert all(e["code_path"] == fa.ESTIMATORS[e["name"]].code_path for e in found)
    wrong = fastadv("estimators", "nope")
    assert (wrong.returncode, "Traceback" in wrong.stderr) == (2, False)
    assert "no estimator has 'nope'" in wrong.stderr


def test_every_named_arm_is_in_the_docs() -> None:
    """With its parameters, its equation, and tests that there are."""
    page = (DOCS / "arms.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)(?:: [^`]*)?` \| (.+) \|$", page, re.MULTILINE))
    assert list(fa.ARMS) == [name for name in rows if name in fa.ARMS]
    for name, named in fa.ARMS.items():
        head = next(line for line in page.splitlines() if re.match(rf"\| `{name}[:`]", line))
        for parameter in named.parameters:
            assert re.search(rf"`{name}: .*\b{parameter}\b", head), (name, parameter)
        assert f"| {named.equation} |" in head, name
        if named.code_path:
            assert named.code_path.split(":")[0] in head, name
        (test,) = re.findall(r"`(test_\w+)` \|$", head)
        sources = "".join(path.read_text() for path in Path(__file__).parent.glob("test_arms*.py"))
        assert f"def {test}(" in sources, test


def test_default_tables_are_those_of_the_first_question(dump: Path) -> None:
    result = replay([dump], None, ReplayOptions())
    assert [row.name for row in result.arms] == list(PRESETS)
    assert "arms" in {table.title.lower() for table in tables(result)}
