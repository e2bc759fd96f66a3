"""Arms in writing, and what two of them differ in."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import fastadv as fa
from fastadv.arms import (
    CAPPED,
    Arm,
    Condition,
    Continuation,
    InverseProbability,
    PrefixCut,
    Rescue,
    StaleTokens,
    TokenCoins,
    TurnMask,
    question_one_arms,
)

EVERYTHING = Arm(
    "all of it", (fa.Outcome.BUDGET, fa.Outcome.FAILED), 0.5, "turn-reached", "all", "raw", 3.5, 11, "a: # b",
    (fa.Ending.TIMEOUT,), Condition(True, 0.5, True, 7, 2), "std", "mixed", InverseProbability(), "loss",
    Continuation((1, 4), 0.25), (8, 16), "hajek", True,
)  # fmt: skip
RULES = (TurnMask(3), TurnMask(None, (1, 2)), StaleTokens(1), TokenCoins(0.1), PrefixCut(4), Continuation((2,), 1.0))
WRITTEN = (
    EVERYTHING,
    *question_one_arms(seed=5),
    *(named(seed=3) for named in fa.ARMS.values()),
    *(Arm(str(rule), token_weights=rule) for rule in RULES),
    Arm("by reward", row_weights=Rescue(0.5, 2), weighted="reward", baseline="none"),
    Arm("gone", population="removed", condition=Condition(stale_after=0)),
    Arm("größer ✓"),
)


def test_every_arm_comes_back() -> None:
    text = fa.arms_to_yaml(WRITTEN)
    assert fa.arms_from_yaml(text) == WRITTEN
    assert fa.arms_to_yaml(fa.arms_from_yaml(text)) == text
    for arm in WRITTEN:
        again = fa.arm_from_dict(fa.arm_to_dict(arm))
        assert again == arm
        kinds = [type(value) for value in (*arm.excludes, *arm.endings)]
        assert [type(value) for value in (*again.excludes, *again.endings)] == kinds  # equal numbers are not enough


def test_what_is_not_said_is_the_default() -> None:
    assert fa.arm_to_dict(Arm("a")) == {"name": "a"}
    assert fa.arm_to_dict(fa.ARMS["rescue"]()) == {
        "name": "rescue", "description": "keep stale groups with probability 0.25, weight them by its inverse",
        "row_weights": {"rule": "rescue", "keep": 0.25},
    }  # fmt: skip


def test_a_file_of_arms() -> None:
    text = """
- none
- rescue:a=0.5,after=2
- name: half      # by hand
  excludes: [BUDGET, failed]
  fraction: 0.5
- name: compact
  endings: [timeout, turn_cap]
  condition: {reward_at_most: 0}
  token_weights: {rule: continuation, turns: [8, 16], keep: 0.5}
"""
    none, rescue, half, compact = fa.arms_from_yaml(text, seed=4)
    assert none == fa.ARMS["none"](seed=4)
    assert rescue == fa.ARMS["rescue"](a=0.5, after=2, seed=4)
    assert half == Arm("half", (fa.Outcome.BUDGET, fa.Outcome.FAILED), 0.5)
    assert compact.endings == (fa.Ending.TIMEOUT, fa.Ending.TURN_CAP)
    assert compact.token_weights == Continuation((8, 16), 0.5)


BOMB = "&a [x], " + ", ".join(f"&{b} [{', '.join(['*' + a] * 10)}]" for a, b in pairwise("abcdefghij"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- name: x\n  exclude: [budget]", "arm 'x': 'exclude' is no key; the keys are name, excludes, fraction"),
        ("- name: x\n  condition: {cap: true}", "arm 'x', condition: 'cap' is no key; the keys are capped, reward_at"),
        ("- name: x\n  row_weights: {rule: rescue}", "arm 'x', row_weights: 'keep' is missing; the keys are keep, st"),
        ("- name: x\n  row_weights: {rule: rescu, keep: 1}", "has no 'rule' of inverse-probability, rescue"),
        ("- name: x\n  token_weights: {rule: rescue, keep: 1}", "has no 'rule' of turn-mask, stale-tokens, token-coi"),
        ("- name: x\n  token_weights: nat-urs", "has no 'rule' of turn-mask"),
        ("- name: x\n  excludes: [capped]", "arm 'x', excludes: 'capped' is none of solved, failed, budget, infra"),
        ("- name: x\n  excludes: [2]", "arm 'x', excludes: 2 is none of solved"),
        ("- name: x\n  endings: [budget]", "arm 'x', endings: 'budget' is none of submitted, environment, turn_cap"),
        ("- name: x\n  excludes: budget", "arm 'x', excludes: 'budget' is no list"),
        ("- name: x\n  fraction: half", "arm 'x', fraction: 'half' is no number"),
        ("- name: x\n  fraction: true", "arm 'x', fraction: True is no number"),
        ("- name: x\n  seed: 1.5", "arm 'x', seed: 1.5 is no integer"),
        ("- name: x\n  matched_update: 1", "arm 'x', matched_update: 1 is no yes or no"),
        ("- name: x\n  baseline: 3", "arm 'x', baseline: 3 is no text"),
        ("- name: x\n  condition: capped", "arm 'x', condition: 'capped' is no dictionary"),
        ("- name: x\n  population: survivors", "nothing is excluded"),
        ("- excludes: [budget]", "an arm has no name: .*add a key 'name'"),
        ("- 3", "an arm is 3; describe it by keys and values"),
        ("- masc", "'masc' is no arm .did you mean 'mask'..; they are none, mask"),
        ("- mask\n- mask", "two arms are called 'mask'"),
        ("name: x", "arms are a YAML list"),
        ("", "arms are a YAML list"),
        ("[]", "arms are a YAML list"),
        ("- [", "no YAML: while parsing"),
        ("- !!python/object/apply:os.getcwd []", "no YAML: could not determine a constructor"),
        ("[" * 5000, "no YAML"),
        ("- name: !!int ''", "no YAML"),
        ("- name: !!bool maybe", "no YAML"),
        ("- name: !!timestamp now", "no YAML"),
        ("- name: 2026-13-01", "no YAML: month must be"),
        ("- {name: x, excludes: [budget], excludes: [infra]}", "no YAML: a key is there twice"),
        ("- &a {name: x}\n- {<<: *a, seed: 3}", "no YAML: merges"),
        ("- name: x\n  row_weights: {rule: [rescue]}", "has no 'rule' of inverse-probability, rescue"),
        ("- rescue:a=0.5,a=0.25", "a is there twice"),
        # Ten aliases of ten aliases, nine deep: written out, the error would be a text of gigabytes.
        (f"- {{description: [{BOMB}], name: x}}", "arm 'x', description: .{,2000} is no text"),
    ],
)
def test_wrong_files(text: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        fa.arms_from_yaml(text)


def test_yaml_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    for call in (lambda: fa.arms_from_yaml("- none"), lambda: fa.arms_to_yaml([Arm("x")])):
        with pytest.raises(ImportError, match=r"pip install 'fastadv\[yaml\]'"):
            call()


# ---- comparisons -----------------------------------------------------------------------------------------------------


def choices(a: Arm, b: Arm) -> list[str]:
    return [difference.choice for difference in fa.compare_arms(a, b).differences]


@pytest.mark.row(49)
def test_a_comparison_of_one_thing() -> None:
    a, b, c, third, _, d1, e = question_one_arms()
    assert choices(a, b) == ["exclusion"] == choices(b, third) == choices(a, d1)
    assert choices(b, c) == ["population"]
    assert choices(a, e) == ["baseline"]
    assert choices(b, d1) == choices(a, Arm("other name", description="text")) == []
    assert choices(a, replace(a, kappa=5.0, seed=7)) == []  # nobody reads them
    assert choices(e, replace(e, kappa=5.0)) == ["baseline"]
    assert choices(third, replace(third, seed=7)) == ["seed"]
    assert choices(fa.ARMS["drop-stale"](), fa.ARMS["drop-stale"](after=2)) == ["exclusion"]
    for one, other in ((a, b), (b, c), (b, d1)):
        assert fa.compare_arms(one, other).report == ""


@pytest.mark.row(49)
def test_a_comparison_of_more_is_reported() -> None:
    a, _, c, third, *_ = question_one_arms()
    found = fa.compare_arms(a, c)
    assert [d.choice for d in found.differences] == ["exclusion", "population"]
    assert "a and c differ in 2 things" in found.report
    assert "population: population=all / population=survivors" in found.report
    assert "exclusion: nothing / excludes=['budget']" in found.report
    assert choices(third, replace(third, fraction=0.5, seed=9)) == ["exclusion", "seed"]


@pytest.mark.row(49)
@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({"singleton": "raw"}, "singleton"),
        ({"scale": "std"}, "scale"),
        ({"groups": "mixed"}, "groups"),
        ({"token_weights": TurnMask(2)}, "token weights"),
        ({"row_weights": InverseProbability()}, "rollout weights"),
        ({"matched_update": True}, "matched update"),
        ({"divisor": "constant"}, "divisor"),
        ({"endings": (fa.Ending.TIMEOUT,)}, "exclusion"),
        ({"condition": Condition(capped=True)}, "exclusion"),
        ({"baseline": "none"}, "baseline"),
    ],
)
def test_every_choice_is_compared(fields: dict[str, Any], choice: str) -> None:
    """No field of an arm goes by unseen."""
    one = Arm("x", CAPPED, 0.5)
    assert choices(one, replace(one, **fields)) == [choice]


def test_settings_that_say_the_same_are_no_difference() -> None:
    budget, infra = fa.Outcome.BUDGET, fa.Outcome.INFRA
    same = (
        (Arm("a", (budget, infra)), Arm("b", (infra, budget, budget))),
        (Arm("a", condition=Condition(reward_at_most=0)), Arm("b", condition=Condition(reward_at_most=0.0))),
        (Arm("a", row_weights=Rescue(1)), Arm("b", row_weights=Rescue(1.0))),
    )
    for a, b in same:
        assert fa.compare_arms(a, b).differences == ()
    # The reference has no coins: a seed that only the other one reads is nothing that changes between them.
    (only,) = fa.compare_arms(fa.named_arm("none"), fa.named_arm("rescue", seed=5)).differences
    assert only.choice == "rollout weights"
    (only,) = fa.compare_arms(fa.named_arm("rescue", seed=4), fa.named_arm("rescue", seed=5)).differences
    assert only.choice == "seed"


def test_a_number_of_numpys_is_written_as_a_number() -> None:
    arm = Arm("half", (fa.Outcome.BUDGET,), np.float64(0.5))
    assert fa.arms_from_yaml(fa.arms_to_yaml([arm])) == (arm,)
