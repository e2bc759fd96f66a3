"""Public bug reports as tests, each under its id in data/reports.json; inputs and right answers are read from there.

Reports about losses, log-probs and hidden states are in test_reports_losses.py, test_reports_log_probs.py and
test_reports_linear.py, B40 in test_packaging.py and test_gradproj_flash.py; test_reports_estimators.py has B08
and B37, and asks B01 to B07 of the estimators by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from op_cases import BACKENDS
from torch import Tensor

import fastadv as fa

REPORTS = {r["id"]: r for r in json.loads((Path(__file__).parent / "data" / "reports.json").read_text())}
ON = pytest.mark.parametrize("backend", BACKENDS)
GRPO = {"baseline": "mean", "singleton": "raw", "scale": "std", "ddof": 1, "eps": 1e-6}


def numbers(values: Any) -> Tensor:
    """JSON numbers, with "nan" and "inf" spelled out, as float32."""
    if isinstance(values, list):
        return torch.stack([numbers(v) for v in values])
    return torch.tensor(float(values))


def case(number: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return REPORTS[number]["input"], REPORTS[number]["expected"]


def close(actual: Tensor, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual.double(), numbers(expected).double(), rtol=0, atol=tolerance)


@ON
@pytest.mark.parametrize("text", [c["rewards"] for c in REPORTS["B01"]["input"]["cases"]])
def test_b01_equal_rewards_give_exact_zeros(text: str, backend: str) -> None:
    value, count = text.replace("[", "").replace("1/3", str(1 / 3)).split("]*")
    rewards = torch.full((int(count),), float(value))
    for options in (GRPO, {**GRPO, "eps": 0.0}, {**GRPO, "baseline": "loo"}, {**GRPO, "ddof": 0}):
        assert fa.group_advantages(rewards, [0] * len(rewards), **options, backend=backend).abs().sum() == 0
    frozen = fa.freeze_statistics(rewards, [0] * len(rewards), backend=backend)
    assert float(frozen.all.moments.squares) == 0  # the standard deviation, and the flag of an informative group
    turn_ids = torch.arange(len(rewards)) % 3
    cu_seqlens = torch.arange(len(rewards) + 1)
    turned = fa.turn_advantages(rewards, [0] * len(rewards), turn_ids, cu_seqlens, scale="std", backend=backend)
    assert turned.abs().sum() == 0


@ON
def test_b03_epsilon_is_added_to_the_std_not_to_the_variance(backend: str) -> None:
    given, expected = case("B03")
    scores = numbers(given["scores"])
    advantages = fa.group_advantages(scores, given["uid"], **GRPO, backend=backend)
    torch.testing.assert_close(advantages, numbers(expected["advantages"]), rtol=1e-3, atol=0)
    for exponent in range(-12, 1):  # twelve orders of spread, against float64
        pair = torch.tensor([0.0, 10.0**exponent])
        exact = fa.group_advantages(pair.double(), [0, 0], **GRPO)
        torch.testing.assert_close(
            fa.group_advantages(pair, [0, 0], **GRPO, backend=backend).double(), exact, rtol=1e-6, atol=0
        )


@ON
def test_b04_the_rule_for_a_group_of_one_is_said_and_kept(backend: str) -> None:
    given, expected = case("B04")
    rloo = {"baseline": "loo", "singleton": "raw", "backend": backend}
    close(fa.group_advantages(numbers(given["scores"]), given["uid"], **rloo), expected["verl_convention"])
    second = given["second_case"]
    close(fa.group_advantages(numbers(second["scores"]), second["uid"], **rloo), expected["second_case"])
    grpo = fa.group_advantages(numbers(given["scores"]), given["uid"], **GRPO, backend=backend)
    assert grpo[3] == given["scores"][3]  # the score itself
    zero = fa.group_advantages(numbers(given["scores"]), given["uid"], baseline="loo", backend=backend)
    assert zero[3] == 0
    drop = fa.group_advantages(
        numbers(given["scores"]), given["uid"], baseline="loo", singleton="drop", backend=backend
    )
    assert drop[3] == 0
    assert fa.singleton_rows(given["uid"]).tolist() == [False, False, False, True]


@ON
def test_b05_a_row_without_a_valid_token_does_not_move_its_siblings(backend: str) -> None:
    given, expected = case("B05")
    mask = torch.tensor(given["response_mask"])
    rewards = numbers(given["token_level_rewards"]).sum(-1)
    include = mask.any(1)
    advantages = fa.group_advantages(
        rewards, given["uid"], **GRPO, population="survivors", include=include, backend=backend
    )
    close(advantages, expected["row_advantages_excluding_masked_rows"], 1e-5)
    parity = fa.group_advantages(rewards, given["uid"], **GRPO, backend=backend)  # the default: every row votes
    close(parity[:2], [-0.48418, -0.66575], 1e-5)


@ON
def test_b07_labels_are_only_compared(backend: str) -> None:
    given, expected = case("B07")
    forms = given["uid_forms"]
    labels = [forms["int"], forms["sparse"], forms["negative"], forms["object_str"], torch.tensor(forms["int"])]
    results = [fa.group_advantages(numbers(given["scores"]), uid, **GRPO, backend=backend) for uid in labels]
    close(results[0], expected["advantages_all_forms"], 1e-5)
    assert all(torch.equal(result, results[0]) for result in results)
    text = given["string_case"]
    close(
        fa.group_advantages(numbers(text["scores"]), text["uid"], **GRPO, backend=backend),
        expected["string_case"],
        1e-5,
    )


@ON
def test_b14_dual_clip(backend: str) -> None:
    given, expected = case("B14")
    log_probs = numbers(given["ratio"]).log().requires_grad_()
    advantages, mask = numbers(given["advantages"]), torch.ones(6)
    config = fa.LossConfig(dual_clip=given["c"])
    out = fa.policy_loss(log_probs, torch.zeros(6), advantages, mask, config=config, reduction="none", backend=backend)
    close(out.loss.detach(), expected["loss"])
    out.loss.sum().backward()
    close(log_probs.grad, expected["grad_wrt_logp_sum"])
    assert out.metrics["dual_clip_fraction"] == pytest.approx(1 / 6)
    mean = fa.policy_loss(log_probs, torch.zeros(6), advantages, mask, config=config, backend=backend).loss
    close(mean.detach(), expected["token_mean"])


@ON
def test_b20_masked_slots_are_replaced_before_any_arithmetic(backend: str) -> None:
    given, expected = case("B20")
    log_probs = numbers(given["logp"]).requires_grad_()
    rest = (numbers(given["old_logp"]), numbers(given["advantages"]), torch.tensor(given["mask"]))
    per_token = fa.policy_loss(log_probs, *rest, reduction="none", backend=backend).loss
    close(per_token.detach(), expected["per_token"])
    out = fa.policy_loss(log_probs, *rest, backend=backend)
    out.loss.backward()
    close(out.loss.detach(), expected["loss"])
    close(log_probs.grad, expected["grad_wrt_logp"])
    close(out.metrics["approx_kl"], expected["ppo_kl"])


@pytest.mark.row(20, 39)
@ON
@pytest.mark.parametrize("mode", [key for key in REPORTS["B22"]["expected"] if "mean" in key and "_" not in key])
def test_b22_one_masked_reduction_for_all_modes(mode: str, backend: str) -> None:
    """Token losses go in as log-probs: reinforce with advantage -1 is the log-prob itself."""
    given, expected = case("B22")
    name, _, horizon = mode.partition("(horizon ")
    config = fa.LossConfig("reinforce", loss_agg_mode=name, horizon=float(horizon.rstrip(")")) if horizon else None)

    def aggregated(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        leaf = losses.clone().requires_grad_()
        loss = fa.policy_loss(leaf, None, torch.full_like(losses, -1), mask, config=config, backend=backend).loss
        loss.backward()
        return loss.detach(), leaf.grad

    mask = torch.tensor(given["mask"])
    loss, gradient = aggregated(numbers(given["loss"]), mask)
    close(loss, expected[mode])
    if name == "token-mean":
        close(gradient, expected["grad_token_mean"])
        variant = given["finite_variant"]
        close(
            aggregated(numbers(variant["loss"]), torch.tensor(variant["mask"]))[0],
            expected["finite_variant_token_mean"],
        )
    for garbage in (0.0, 1e30, float("nan"), -float("inf")):
        filled = torch.where(mask != 0, numbers(given["loss"]), garbage)
        other, other_gradient = aggregated(filled, mask)
        assert torch.equal(other, loss)
        assert torch.equal(other_gradient, gradient)


@pytest.mark.row(20, 39)
@ON
@pytest.mark.parametrize("split", [[(0, 2)], [(0, 1), (1, 2)], [(0, 1), (1, 1), (1, 2)]])
def test_b24_the_update_does_not_depend_on_the_split(split: list[tuple[int, int]], backend: str) -> None:
    given, expected = case("B24")
    x, advantages = numbers(given["case1"]["x"]), numbers(given["case1"]["advantages"])
    cu_seqlens, mask = torch.tensor([0, 1, 4]), torch.ones(4)
    step = fa.denominators(mask, cu_seqlens)
    theta = torch.tensor(0.3, requires_grad=True)
    total = 0.0
    for first, last in split:  # a micro-batch without rollouts included
        tokens = slice(int(cu_seqlens[first]), int(cu_seqlens[last]))
        out = fa.policy_loss(
            theta * x[tokens], 0.3 * x[tokens], advantages[tokens], mask[tokens], denominator=step,
            cu_seqlens=cu_seqlens[first : last + 1] - cu_seqlens[first], backend=backend,
        )  # fmt: skip
        out.loss.backward()
        total += out.loss.item()
    assert total == pytest.approx(expected["case1"]["loss"], abs=1e-6)
    assert theta.grad.item() == pytest.approx(expected["case1"]["grad_theta"], abs=1e-6)


@ON
def test_b24_two_ranks(backend: str) -> None:
    """Each rank divides by the tokens of both and multiplies by 2, since the trainer averages over ranks."""
    given, expected = case("B24")
    ranks = [numbers(tokens) for tokens in given["case2"]["two_ranks"]]
    step = fa.Denominators(tokens=float(sum(len(x) for x in ranks)), sequences=2.0, candidates=2.0, ranks=len(ranks))
    gradients = []
    for x in ranks:
        w = torch.tensor(1.0, requires_grad=True)
        config = fa.LossConfig("reinforce")
        fa.policy_loss(w * x, None, -torch.ones_like(x), torch.ones_like(x), config=config, denominator=step,
                       backend=backend).loss.backward()  # fmt: skip
        gradients.append(float(w.grad))
    assert sum(gradients) / 2 == pytest.approx(expected["case2"]["grad_w"], abs=1e-6)
