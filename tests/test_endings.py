"""Endings from what trainers log, outcomes from endings, the census and its regime."""

from __future__ import annotations

import enum
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import fastadv as fa
from fastadv.intervals import difference, odds_ratio, wilson
from fastadv.outcomes import FEWEST, Ending, Outcome
from fastadv.status_tables import SYSTEMS, StatusTable

PAGE = (Path(__file__).parent.parent / "docs" / "outcomes.md").read_text()
WITH_STATUS = [name for name, table in SYSTEMS.items() if table.statuses]
S, E, T, L, C = Ending.SUBMITTED, Ending.ENVIRONMENT, Ending.TURN_CAP, Ending.LENGTH_CAP, Ending.CONTEXT_CAP
W, X, A, V, U = Ending.TIMEOUT, Ending.ERROR, Ending.ABORTED, Ending.VOID, Ending.UNKNOWN

# ---- Adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.row(1)
@pytest.mark.parametrize(
    ("system", "statuses", "expected"),
    [
        ("vllm", "stop length abort error repetition tool_calls", (S, L, A, X, V, S)),
        ("sglang", "stop length abort tool_calls", (S, L, A, S)),
        ("verl", "completed aborted abort stop length tool_calls", (U, A, A, S, L, S)),
        ("slime", "pending completed truncated aborted failed", (A, S, L, A, X)),
        ("miles", "pending completed truncated aborted failed", (A, S, L, A, X)),
        ("miles-agent", "Submitted TimeLimitExceeded SequenceLengthLimitExceeded AgentError Unknown", (S, W, C, X, U)),
        ("miles-agent", "NoToolCall TurnLimitExceeded RequestRejected SandboxUnavailable Aborted", (S, T, V, X, A)),
        ("miles-agent", "IntegrityViolation completed timeout VerifierError NoReward ClientError", (S, S, W, X, X, X)),
        ("miles-agent", "ModelEndpointFailed VerifierCrashCleanRun ServerUnreachable EnvironmentTimeout", (X,) * 4),
        ("miles-agent", "GenerationAborted", (A,)),
        ("rllm", "max_prompt_length_exceeded max_response_length_exceeded max_turns_exceeded", (C, L, T)),
        ("rllm", "env_done timeout error unknown", (E, W, X, U)),
        ("deepswe", "PROMPT_TRUNCATION TRUNCATION MAX_STEPS TIMEOUT ENV_TIMEOUT ENV_DONE", (C, L, T, W, W, E)),
        ("prime-rl", "agent_completed user_closed empty_action error context_length", (S, E, V, X, C)),
        ("prime-rl", "max_turns max_input_tokens max_output_tokens max_total_tokens", (T, C, L, C)),
        ("prime-rl", "no_tools_called has_final_env_response has_error timeout_reached", (S, E, X, W)),
        ("prime-rl", "prompt_too_long max_turns_reached max_total_completion_tokens_reached", (C, T, L)),
        ("nemo-rl", "truncated max_turns_reached terminated", (L, T, E)),
        ("skyrl", "stop stop_token complete completed tool_calls length", (S, S, S, S, S, L)),
        ("skyrl", "context_length agent_timeout error abort", (C, W, X, A)),
        ("skyrl-agent", "FINISH FINISH_TOOL max_iterations_reached CONTEXT_WINDOW_EXCEEDED", (S, S, T, C)),
        ("skyrl-agent", "cmd_timeout error_runtime error_evaluation error stuck_in_a_loop", (W, X, X, X, E)),
        ("skyrl-agent", "BAD_LLM_RESPONSE NO_FUNCTION_CALL", (V, V)),
        ("openrlhf", "truncated", (L,)),
        ("areal", "length stop tool_calls abort", (L, S, S, A)),
        ("roll", "finish max_length max_steps abort env_timeout unknown", (S, L, T, A, W, U)),
        ("roll", "env_reset_failed sandbox_init_failed llm_generate_failed no_system_prompt eval_gt", (X, X, X, X, E)),
        ("mini-o3", "exceed_mask void_mask", (T, V)),
        ("mini-swe-agent", "Submitted LimitsExceeded TimeExceeded RepeatedFormatError", (S, T, W, V)),
        (
            "mini-swe-agent",
            "ContextWindowExceededError TimeoutExpired RateLimitError docker.APIException",
            (C, X, X, X),
        ),
    ],
)
def test_what_each_systems_statuses_stand_for(system: str, statuses: str, expected: tuple[Ending, ...]) -> None:
    assert fa.statuses.endings(system, statuses.split()).tolist() == list(expected)


@pytest.mark.row(1)
def test_every_status_of_the_tables_is_in_the_test_above() -> None:
    (marks,) = (m for m in test_what_each_systems_statuses_stand_for.pytestmark if m.name == "parametrize")
    tested = {(system, status) for system, statuses, _ in marks.args[1] for status in statuses.split()}
    listed = {(system, status) for system, table in SYSTEMS.items() for status in table.statuses if status}
    assert listed - tested == set()


def row_of(name: str, table: StatusTable) -> str:
    """A system's row of the page."""
    by_ending: dict[Ending, list[str]] = {}
    for status, ending in table.statuses.items():
        by_ending.setdefault(ending, []).append(f"`{status}`" if status else "(empty)")
    cell = "<br>".join(f"{ending.name}: {', '.join(statuses)}" for ending, statuses in by_ending.items())
    return f"| `{name}` | {table.field} | {cell or '–'} | {table.source} | {table.note or '–'} |"


@pytest.mark.row(1)
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_page_shows_the_tables(system: str) -> None:
    assert row_of(system, SYSTEMS[system]) in PAGE.split("\n")


class Reason(enum.Enum):
    ENV_DONE = "env_done"
    MAX_LENGTH = 3


def test_members_of_enumerations_case_and_text_after_a_colon() -> None:
    assert fa.statuses.ending("rllm", Reason.ENV_DONE) == E  # by value
    assert fa.statuses.ending("roll", Reason.MAX_LENGTH) == L  # by name, where the value is a number
    assert fa.statuses.ending("rllm", "ENV_DONE") == E
    assert fa.statuses.ending("skyrl-agent", "error: connection refused") == X
    assert fa.statuses.ending("mini-swe-agent", "litellm.APIError: 503") == X
    assert isinstance(fa.statuses.ending("rllm", "timeout"), Ending)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("litellm.ContextWindowExceededError: too long", C),  # the table has the class without its module
        ("exceptions.TimeoutExpired", X),
        ("LimitsExceeded: RateLimitError", T),  # the text after the colon is none of the class's
        ("Submitted: no Error", S),
    ],
)
def test_names_of_exceptions(status: str, expected: Ending) -> None:
    assert fa.statuses.ending("mini-swe-agent", status) == expected
    assert fa.statuses.ending("mini-swe-agent", status.lower()) == expected


def test_a_sentence_is_no_exception() -> None:
    for text in ("There was an Error", "Submitted.", ": Submitted"):
        with pytest.raises(ValueError, match="mini-swe-agent writes 'Submitted'"):
            fa.statuses.ending("mini-swe-agent", text)


class Stop(enum.IntEnum):
    FINISH = 0
    ABORT = 1


class Generate(enum.IntEnum):
    MAX_LENGTH = 0
    FINISH = 1


def test_members_of_two_enumerations_with_equal_numbers() -> None:
    members = [Stop.FINISH, Generate.MAX_LENGTH, Stop.ABORT, Generate.FINISH]
    assert fa.statuses.endings("roll", members).tolist() == [S, L, A, S]


def test_what_is_no_list_of_statuses() -> None:
    for bad in ("stop", {"stop"}, {"stop": 1}, None, 3):
        with pytest.raises(TypeError, match=f"statuses is a {type(bad).__name__}; pass a list"):
            fa.statuses.endings("vllm", bad, strict=False)  # type: ignore[arg-type]
    assert fa.statuses.endings("vllm", np.array(["STOP", "length"])).tolist() == [S, L]  # type: ignore[arg-type]
    for system in (None, ["vllm"], b"vllm"):
        with pytest.raises(TypeError, match=f"system is a {type(system).__name__}; pass the name"):
            fa.statuses.ending(system, "stop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'vLLM' \(did you mean 'vllm'\?\)"):
        fa.statuses.ending("vLLM", "stop")


def test_what_is_in_no_table() -> None:
    with pytest.raises(
        ValueError, match=r"'trunctated' \(did you mean 'truncated'\?\); miles writes 'completed', 'trun"
    ):
        fa.statuses.ending("miles", "trunctated")
    with pytest.raises(ValueError, match="row 1: status is 'done'; slime writes"):
        fa.statuses.endings("slime", ["completed", "done", "done"])
    with pytest.raises(ValueError, match="status is None"):
        fa.statuses.ending("vllm", None)
    with pytest.raises(ValueError, match=r"status is 'xxx.*'\.\.\.; vllm"):
        fa.statuses.ending("vllm", "x" * 1000)
    with pytest.raises(ValueError, match=r"system is 'vlm' \(did you mean 'vllm'\?\); it must be one of vllm, sglang"):
        fa.statuses.ending("vlm", "stop")
    with pytest.raises(ValueError, match=r"verl-agent writes no status; .*derived_endings with max_turns"):
        fa.statuses.ending("verl-agent", "done", strict=False)
    with pytest.raises(TypeError, match="row 0: status is a int"):
        fa.statuses.endings("vllm", [3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="status is a list"):
        fa.statuses.endings("vllm", [["stop"]])  # type: ignore[list-item]
    assert fa.statuses.endings("prime-rl", ["stop_bash", None, "error"], strict=False).tolist() == [U, U, X]
    assert fa.statuses.endings("vllm", []).tolist() == []


def test_flags() -> None:
    truncated, most_turns = torch.tensor([1, 1, 0, 0, 0]).bool(), torch.tensor([0, 1, 1, 0, 0]).bool()
    flags = {
        "terminated": torch.tensor([1, 0, 0, 1, 0]).bool(),
        "max_turns_reached": most_turns,
        "truncated": truncated,
    }
    assert fa.statuses.flagged_endings("nemo-rl", flags).tolist() == [L, L, T, E, S]
    assert fa.statuses.flagged_endings("openrlhf", {"truncated": truncated}).tolist() == [L, L, S, S, S]
    with pytest.raises(ValueError, match=r"'miles' has no flags, but Sample\.status; systems with flags are nemo-rl"):
        fa.statuses.flagged_endings("miles", flags)
    with pytest.raises(ValueError, match="knows no flag 'void'; it has exceed_mask, void_mask"):
        fa.statuses.flagged_endings("mini-o3", {"void": truncated})
    with pytest.raises(ValueError, match="needs a flag"):
        fa.statuses.flagged_endings("mini-o3", {})
    with pytest.raises(ValueError, match=r"truncated has shape \[2\]; expected \[5\]"):
        fa.statuses.flagged_endings("nemo-rl", {**flags, "truncated": truncated[:2]})
    with pytest.raises(ValueError, match=r"truncated has shape \[1, 5\]; expected \[B\]"):
        fa.statuses.flagged_endings("nemo-rl", {"truncated": truncated[None]})
    with pytest.raises(TypeError, match="flags is a list; pass a dict"):
        fa.statuses.flagged_endings("nemo-rl", [truncated])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="truncated has dtype"):
        fa.statuses.flagged_endings("nemo-rl", {"truncated": truncated.int()})


def test_endings_that_nobody_logs() -> None:
    lengths, turns = torch.tensor([8, 5, 8, 3]), torch.tensor([4, 4, 1, 1])
    assert fa.statuses.derived_endings(lengths, max_length=8).tolist() == [L, S, L, S]
    assert fa.statuses.derived_endings(lengths, turns=turns, max_turns=4).tolist() == [T, T, S, S]
    assert fa.statuses.derived_endings(lengths, max_length=8, turns=turns, max_turns=4).tolist() == [L, T, L, S]
    num_turns = torch.tensor([8, 2, 6])  # verl's: four, one and three replies of the model
    assert fa.statuses.derived_endings(lengths[:3], turns=num_turns // 2, max_turns=4).tolist() == [T, S, S]
    last = torch.tensor([2, 9, 0, 7])  # 2 ends a reply, 0 is padding
    assert fa.statuses.derived_endings(lengths, last_ids=last, end_ids=(2, 0)).tolist() == [S, L, S, L]


def test_what_nothing_can_be_derived_from() -> None:
    lengths = torch.tensor([8, 5])
    with pytest.raises(ValueError, match="pass max_length, turns and max_turns, or last_ids"):
        fa.statuses.derived_endings(lengths)
    with pytest.raises(ValueError, match="turns and max_turns come together"):
        fa.statuses.derived_endings(lengths, max_length=8, max_turns=4)
    with pytest.raises(ValueError, match="last_ids and end_ids come together"):
        fa.statuses.derived_endings(lengths, last_ids=lengths)
    with pytest.raises(ValueError, match=r"lengths\[0\] is 8, more than max_length 7"):
        fa.statuses.derived_endings(lengths, max_length=7)
    with pytest.raises(ValueError, match=r"turns\[1\] is 5, more than max_turns 4"):
        fa.statuses.derived_endings(lengths, turns=torch.tensor([1, 5]), max_turns=4)
    with pytest.raises(ValueError, match="max_length is 0"):
        fa.statuses.derived_endings(lengths, max_length=0)
    with pytest.raises(TypeError, match="lengths has dtype"):
        fa.statuses.derived_endings(lengths.float(), max_length=8)
    with pytest.raises(ValueError, match=r"lengths has shape \[1, 2\]"):
        fa.statuses.derived_endings(lengths[None], max_length=8)
    for name, call in (
        ("lengths", lambda bad: fa.statuses.derived_endings(bad, max_length=8)),
        ("turns", lambda bad: fa.statuses.derived_endings(lengths, turns=bad, max_turns=8)),
    ):
        with pytest.raises(ValueError, match=rf"{name}\[1\] is -3, below 0"):
            call(torch.tensor([8, -3]))
    for limit in (math.nan, 8.0, True, "8"):
        with pytest.raises(TypeError, match=r"max_length is .*; pass an integer"):
            fa.statuses.derived_endings(lengths, max_length=limit)  # type: ignore[arg-type]
    for ids, message in ((5, "end_ids is a int"), ("5", "end_ids is a str"), ([5.0], r"end_ids\[0\] is 5.0, a float")):
        with pytest.raises(TypeError, match=message):
            fa.statuses.derived_endings(lengths, last_ids=lengths, end_ids=ids)  # type: ignore[arg-type]


def test_limits_that_do_not_fit_into_the_dtype_of_lengths() -> None:
    lengths = torch.tensor([100, 44, 127], dtype=torch.int8)  # 300 in int8 is 44
    assert fa.statuses.derived_endings(lengths, max_length=300).tolist() == [S, S, S]
    assert fa.statuses.derived_endings(lengths, turns=lengths, max_turns=300).tolist() == [S, S, S]


# ---- Outcomes --------------------------------------------------------------------------------------------------------


@pytest.mark.row(1)
@pytest.mark.parametrize(
    ("ending", "wrong", "right", "capped"),
    [
        (S, Outcome.FAILED, Outcome.SOLVED, False),
        (E, Outcome.FAILED, Outcome.SOLVED, False),
        (V, Outcome.FAILED, Outcome.SOLVED, False),
        (U, Outcome.FAILED, Outcome.SOLVED, False),
        (T, Outcome.BUDGET, Outcome.SOLVED, True),  # cut off and passed: solved, with the flag
        (L, Outcome.BUDGET, Outcome.SOLVED, True),
        (C, Outcome.BUDGET, Outcome.SOLVED, True),
        (W, Outcome.INFRA, Outcome.INFRA, False),
        (X, Outcome.INFRA, Outcome.INFRA, False),
        (A, Outcome.INFRA, Outcome.INFRA, False),
    ],
)
def test_outcomes(ending: Ending, wrong: Outcome, right: Outcome, capped: bool) -> None:
    outcomes, flags = fa.outcomes_of(torch.tensor([ending] * 3), torch.tensor([0.0, 1.0, math.nan]))
    assert outcomes.tolist() == [wrong, right, Outcome.INFRA]
    assert flags.tolist() == [capped] * 3


def test_time_as_one_more_cap_and_a_threshold() -> None:
    endings, rewards = torch.tensor([W, W, S, L], dtype=torch.int8), torch.tensor([0.2, 0.9, 0.5, 0.4])
    outcomes, capped = fa.outcomes_of(endings, rewards, solved_above=0.5, timeout=Outcome.BUDGET)
    assert outcomes.tolist() == [Outcome.BUDGET, Outcome.SOLVED, Outcome.FAILED, Outcome.BUDGET]
    assert capped.tolist() == [True, True, False, True]


def test_outcomes_of_what_is_none() -> None:
    two = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"endings\[1\] is 10; endings are SUBMITTED \(0\)"):
        fa.outcomes_of(torch.tensor([0, 10]), two)
    with pytest.raises(ValueError, match=r"rewards has shape \[1\]; expected \[2\]"):
        fa.outcomes_of(two, two[:1])
    with pytest.raises(ValueError, match=r"rewards\[0\] is inf"):
        fa.outcomes_of(two, torch.tensor([math.inf, 0.0]))
    with pytest.raises(ValueError, match=r"must be Outcome\.INFRA or Outcome\.BUDGET"):
        fa.outcomes_of(two, two, timeout=Outcome.SOLVED)
    for threshold in (math.nan, math.inf, True, "0"):
        with pytest.raises(ValueError, match=r"solved_above is .*; it must be a finite number"):
            fa.outcomes_of(two, two, solved_above=threshold)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"endings has shape \[1, 2\]"):
        fa.outcomes_of(two[None], two[None])


@pytest.mark.row(1)
@pytest.mark.parametrize("system", WITH_STATUS)
def test_totals_add_up_to_the_rollouts_of_any_system(system: str) -> None:
    statuses = [status for status in SYSTEMS[system].statuses for _ in range(3)]
    rewards = torch.tensor([0.0, 1.0, math.nan]).repeat(len(statuses) // 3)
    outcomes, _ = fa.outcomes_of(fa.statuses.endings(system, statuses), rewards)
    census = fa.census(outcomes, [i % 2 for i in range(len(statuses))], torch.arange(len(statuses)) // 2)
    assert census.total == len(statuses)
    assert census.by_group.sum() == census.by_step.sum() == len(statuses)
    assert census.counts[Outcome.INFRA] >= len(statuses) // 3


# ---- Census and regime -----------------------------------------------------------------------------------------------


@pytest.mark.row(1)
def test_the_census_by_step_and_group() -> None:
    outcomes, steps = ["solved", "budget", "infra", "budget", "failed"], torch.tensor([7, 3, 7, 3, 3])
    census = fa.census(outcomes, list("aabba"), steps)
    assert census.steps.tolist() == [3, 7]
    assert census.by_step.tolist() == [[0, 1, 2, 0], [1, 0, 0, 1]]
    assert census.step_rates(Outcome.BUDGET).tolist() == [2 / 3, 0.0]
    assert census.group_rates(Outcome.BUDGET).tolist() == [1 / 3, 1 / 2]
    both = census + fa.census(["solved"], ["c"], torch.tensor([3]))
    assert both.steps.tolist() == [3, 7]
    assert both.by_step.tolist() == [[1, 1, 2, 0], [1, 0, 0, 1]]
    assert both.by_group.tolist() == [[1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]]
    assert (census + fa.census(["solved"])).by_step is None
    with pytest.raises(ValueError, match="taken without steps"):
        fa.census(outcomes).step_rates(Outcome.SOLVED)
    with pytest.raises(ValueError, match=r"steps has shape \[2\]; expected \[5\]"):
        fa.census(outcomes, steps=steps[:2])


@pytest.mark.row(1)
def test_what_a_census_counts_and_what_is_no_outcome() -> None:
    for values in (np.array([0, 2]), [np.int64(0), np.str_("budget")], ["Solved", Outcome.BUDGET]):
        assert fa.census(values).counts == {**dict.fromkeys(Outcome, 0), Outcome.SOLVED: 1, Outcome.BUDGET: 1}
    for bad in (Ending.SUBMITTED, Stop.ABORT, 2**70, -1, 1.0, True, None, b"solved"):
        with pytest.raises(ValueError, match=r"census: outcomes\[1\] is .*; outcomes are SOLVED \(0\)"):
            fa.census([0, bad])
    for none in (None, "solved", {"solved"}, 3):
        with pytest.raises(TypeError, match=f"outcomes is a {type(none).__name__}; pass a list"):
            fa.census(none)  # type: ignore[arg-type]
    empty = fa.census([], [], torch.tensor([], dtype=torch.int64))
    assert (empty.total, empty.rate(Outcome.SOLVED)) == (0, 0)
    assert empty.by_group.shape == empty.by_step.shape == (0, 4)
    extremes = torch.tensor([2**63 - 1, -(2**63), 2**63 - 1])
    census = fa.census([0, 1, 1], [-5, 2**62, -5], extremes)
    assert census.steps.tolist() == [-(2**63), 2**63 - 1]
    assert census.by_group.tolist() == [[1, 1, 0, 0], [0, 1, 0, 0]]
    assert census.rate("failed") == 2 / 3  # type: ignore[arg-type]
    for call in (census.rate, census.share_of_unsolved, census.group_rates, census.step_rates):
        with pytest.raises(ValueError, match=f"{call.__name__}: outcome is 7; outcomes are"):
            call(7)  # type: ignore[arg-type]


def test_a_census_that_does_not_add_up() -> None:
    counts = dict.fromkeys(Outcome, 1)
    for bad in ({Outcome.SOLVED: 1}, {**counts, Outcome.INFRA: math.nan}, {"solved": 1}, [1, 1, 1, 1], None):
        with pytest.raises(ValueError, match=r"Census: counts is .*; expected a number for each Outcome"):
            fa.Census(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps and by_step come together"):
        fa.Census(counts, steps=torch.tensor([1]))
    for table in (torch.tensor([[2, 1, 1, 1]]), torch.ones(4), torch.ones(1, 3)):
        with pytest.raises(ValueError, match=r"by_group, .* does not add up to the counts"):
            fa.Census(counts, table)
    with pytest.raises(TypeError, match="unsupported operand"):
        fa.Census(counts) + 1  # type: ignore[operator]
    with pytest.raises(TypeError, match="regime: census is a dict"):
        fa.regime(counts)  # type: ignore[arg-type]


@pytest.mark.row(2)
@pytest.mark.parametrize(
    ("budget", "infra", "verdict"),
    [
        (40, 0, "budget"),
        (0, 40, "infrastructure"),
        (20, 20, "mixed"),
        (26, 14, "mixed"),  # 65 %, from 50 % to 78 %: the lower end is 0.4951
        (27, 13, "budget"),  # 0.5202
        (13, 27, "infrastructure"),
        (FEWEST - 1, 0, "too few"),
        (FEWEST, 0, "budget"),
        (0, 0, "too few"),
    ],
)
def test_the_regime(budget: int, infra: int, verdict: str) -> None:
    names = ["solved"] * 30 + ["failed"] * 50 + ["budget"] * budget + ["infra"] * infra
    regime = fa.regime(fa.census(names))
    assert regime.verdict == verdict
    assert (regime.exclusions, regime.unsolved) == (budget + infra, 50 + budget + infra)
    assert verdict in ("mixed", "too few") or f"{verdict.capitalize()} regime: " in str(regime)
    with pytest.raises(ValueError, match="negative counts"):
        fa.regime(fa.Census(dict.fromkeys(Outcome, -1)))


def test_intervals_against_published_numbers() -> None:
    assert wilson(5, 10) == pytest.approx((0.5, 0.236593, 0.763407), abs=1e-6)
    assert wilson(0, 10) == pytest.approx((0.0, 0.0, 0.277533), abs=1e-6)
    assert wilson(10, 10) == pytest.approx((1.0, 0.722467, 1.0), abs=1e-6)
    # Newcombe (1998), table II (a): 56 of 70 against 48 of 80, method 10.
    assert difference((56, 48), (70, 80)) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
    ratio = odds_ratio((9, 3), (10, 10))  # (9.5 * 7.5) / (1.5 * 3.5)
    assert ratio.value == pytest.approx(9.5 * 7.5 / (1.5 * 3.5))
    assert math.log(ratio.high / ratio.value) == pytest.approx(
        1.959964 * math.sqrt(1 / 9.5 + 1 / 7.5 + 1 / 1.5 + 1 / 3.5)
    )
    assert ratio.low * ratio.high == pytest.approx(ratio.value**2)
    assert all(math.isnan(x) for x in (*wilson(0, 0), *difference((0, 1), (0, 2)), *odds_ratio((0, 1), (0, 2))))


def test_intervals_of_what_are_no_counts() -> None:
    for call in (wilson, lambda h, n: difference((1, h), (2, n)), lambda h, n: odds_ratio((h, 1), (n, 2))):
        for hits, total in ((5, 3), (-1, 10), (0, -5)):
            with pytest.raises(ValueError, match=r"(hits|total) is -?[0-9]+; it must be"):
                call(hits, total)
        for hits, total in ((math.nan, 3), (1, math.nan), (True, 2), (0.5, 2)):
            with pytest.raises(TypeError, match=r"(hits|total) is .*; pass an integer"):
                call(hits, total)
    narrow, wide = (np.uint8(200), np.uint8(250)), (200, 250)  # sums of NumPy's narrow integers wrap around
    assert wilson(*narrow) == wilson(*wide)  # type: ignore[arg-type]
    assert difference(narrow, narrow[::-1][:1] * 2) == difference(wide, (250, 250))  # type: ignore[arg-type]
    assert odds_ratio(narrow, (250, 250)) == odds_ratio(wide, (250, 250))  # type: ignore[arg-type]
    assert fa.Census(dict.fromkeys(Outcome, narrow[0])).total == 800  # type: ignore[arg-type]
    for total in (1, 2, 17, 10**17):
        for hits in {0, 1, total // 2, total - 1, total}:
            value, low, high = wilson(hits, total)
            assert 0 <= low <= value <= high <= 1
