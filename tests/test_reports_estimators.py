"""Public bug reports on advantages, asked of the estimators under the name of their owner."""

from __future__ import annotations

import pytest
import torch
from op_cases import BACKENDS
from test_reports import REPORTS, case, close, numbers

import fastadv as fa

ON = pytest.mark.parametrize("backend", BACKENDS)
TOKENS_ON = pytest.mark.parametrize("backend", ["reference", "cpu"])  # what scans and whitening have
NO_MORE = ("rewards", "group_ids")
BY_REWARDS = sorted(n for n, e in fa.ESTIMATORS.items() if e.level == "rollout" and e.needs == NO_MORE)


@pytest.mark.row(50)
@pytest.mark.parametrize("name", BY_REWARDS)
@pytest.mark.parametrize("text", [c["rewards"] for c in REPORTS["B01"]["input"]["cases"]])
def test_b01_equal_rewards_give_exact_zeros(text: str, name: str) -> None:
    value, count = text.replace("[", "").replace("1/3", str(1 / 3)).split("]*")
    rewards = torch.full((int(count),), float(value))
    assert fa.estimate(name, rewards, [0] * len(rewards)).advantages.tolist() == [0.0] * len(rewards)


@ON
@pytest.mark.parametrize("name", ["grpo/verl", "grpo/verl-vectorized"])
def test_b03_loop_and_vectorised_add_epsilon_to_the_std(name: str, backend: str) -> None:
    given, expected = case("B03")
    scores = numbers(given["scores"])
    advantages = fa.estimate(name, scores, given["uid"], backend=backend).advantages
    torch.testing.assert_close(advantages, numbers(expected["advantages"]), rtol=1e-3, atol=0)
    # The faulty form stays reachable, for runs that were made with it.
    floor = fa.estimate("grpo/verl-vectorized-floor", scores, given["uid"], backend=backend).advantages
    torch.testing.assert_close(floor, torch.tensor([-0.00500179, 0.00500179]), rtol=1e-3, atol=0)


@ON
@pytest.mark.row(5)
def test_b04_every_name_says_its_rule_for_a_group_of_one(backend: str) -> None:
    given, expected = case("B04")
    scores, second = numbers(given["scores"]), given["second_case"]
    close(fa.estimate("rloo/verl", scores, given["uid"], backend=backend).advantages, expected["verl_convention"])
    alone = fa.estimate("rloo/verl", numbers(second["scores"]), second["uid"], backend=backend).advantages
    close(alone, expected["second_case"])
    assert fa.estimate("grpo/verl", scores, given["uid"], backend=backend).advantages[3] == given["scores"][3]
    vectorized = fa.estimate("rloo/verl-vectorized", scores, given["uid"], backend=backend).advantages
    close(vectorized, [0.75, -0.75, 0.0, 0.0])
    for name in set(BY_REWARDS) - {"passk/verl", "gpg/verl"}:
        got = fa.estimate(name, scores, given["uid"], backend=backend).advantages[3]
        assert got == {"raw": 2.0, "zero": 0.0}[fa.ESTIMATORS[name].singleton], name


@ON
@pytest.mark.row(50)
def test_b05_a_row_without_a_valid_token_does_not_vote(backend: str) -> None:
    """Given the mask; without it every row votes, which is what verl does."""
    given, expected = case("B05")
    mask = torch.tensor(given["response_mask"])
    rewards = numbers(given["token_level_rewards"]).sum(-1)
    advantages = fa.estimate("grpo/verl", rewards, given["uid"], mask=mask, backend=backend).advantages
    close(advantages, expected["row_advantages_excluding_masked_rows"], 1e-5)
    parity = fa.estimate("grpo/verl", rewards, given["uid"], backend=backend).advantages
    close(parity[:2], [-0.48418, -0.66575], 1e-5)
    packed = fa.estimate(
        "grpo/verl", rewards, given["uid"], mask=torch.ones(4), cu_seqlens=torch.tensor([0, 2, 4, 4]), backend=backend
    ).advantages
    assert torch.equal(packed, advantages)


@ON
def test_b07_labels_are_only_compared(backend: str) -> None:
    given, expected = case("B07")
    forms = given["uid_forms"]
    labels = [*(forms[key] for key in ("int", "sparse", "negative", "object_str")), torch.tensor(forms["int"])]
    for name in ("grpo/verl", "grpo/verl-vectorized"):
        results = [fa.estimate(name, numbers(given["scores"]), uid, backend=backend).advantages for uid in labels]
        close(results[0], expected["advantages_all_forms"], 1e-5)
        assert all(torch.equal(result, results[0]) for result in results)
        text = given["string_case"]
        merged = fa.estimate(name, numbers(text["scores"]), text["uid"], backend=backend).advantages
        close(merged, expected["string_case"], 1e-5)


@TOKENS_ON
@pytest.mark.parametrize("number", range(3))
def test_b08_returns_go_back_through_a_tools_answer(number: int, backend: str) -> None:
    """Masked positions inside a response carry the return unchanged: no reset, and no further gamma."""
    given, expected = case("B08")
    one = given["cases"][number]
    mask = torch.tensor(one["mask"])[None]
    rewards = numbers(one["rewards"])[None]
    found = fa.estimate(
        "reinforce_plus_plus/verl", token_rewards=rewards, mask=mask, gamma=one["gamma"], backend=backend
    )
    assert found.returns is not None
    close(found.returns[0], expected["returns"][number])
    advantages = expected["advantages"][number]
    close(found.advantages[0], [0.0] * 6 if isinstance(advantages, str) else advantages)


@TOKENS_ON
def test_b37_all_tokens_are_whitened_together(backend: str) -> None:
    """Over ranks, one of them empty: tests/test_distributed_whiten.py."""
    given, expected = case("B37")
    tokens = numbers(given["tokens"])
    close(fa.whiten(tokens, torch.ones_like(tokens), backend=backend), expected["whitened"])
