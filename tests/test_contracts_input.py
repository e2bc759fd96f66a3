"""Contract 11: bad input is an error that names the argument, the value and the fix."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_cases import BACKENDS
from torch import Tensor

import fastadv as fa

ON = pytest.mark.parametrize("backend", BACKENDS)
MASK = torch.tensor([True, True, False, True, True])
CU = torch.tensor([0, 2, 5], dtype=torch.int32)
IDS = torch.tensor([0, 0, -1, 0, 1], dtype=torch.int32)
REWARDS = torch.tensor([1.0, 0.0])
LOG_PROBS = torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.5])
NAN = float("nan")


def loss(backend: str, **changes: Any) -> Any:
    given = {
        "log_probs": LOG_PROBS,
        "old_log_probs": LOG_PROBS,
        "advantages": torch.ones(5),
        "mask": MASK,
        "cu_seqlens": CU,
        **changes,
    }
    return fa.policy_loss(**given, backend=backend)


def group(backend: str, **changes: Any) -> Any:
    return fa.group_advantages(**{"rewards": REWARDS, "group_ids": [0, 0], **changes}, backend=backend)


def turn(backend: str, **changes: Any) -> Any:
    given = {"rewards": REWARDS, "group_ids": [0, 0], "turn_ids": IDS, "cu_seqlens": CU, **changes}
    return fa.turn_advantages(**given, backend=backend)


def ids(backend: str, mask: Any = MASK, cu_seqlens: Any = CU) -> Any:
    return fa.turn_ids_from_mask(mask, cu_seqlens, backend=backend)


def index(backend: str, turn_ids: Any = IDS, cu_seqlens: Any = CU) -> Any:
    return fa.segments(turn_ids, cu_seqlens, backend=backend)


def freeze(backend: str, **changes: Any) -> Any:
    given = {"rewards": REWARDS, "group_ids": [0, 0], "turn_ids": IDS, "cu_seqlens": CU, **changes}
    return fa.freeze_statistics(**given, backend=backend)


def gram(backend: str, **changes: Any) -> Any:
    return fa.multi_dot_gram(**{"vectors": [LOG_PROBS, LOG_PROBS], **changes}, backend=backend)


def sketch(backend: str, **changes: Any) -> Any:
    return fa.gradproj.count_sketch(**{"values": LOG_PROBS, "size": 64, **changes}, backend=backend)


def table(turns: Tensor = IDS, values: int = 3) -> fa.SegmentTable:
    return fa.SegmentTable(torch.ones(values), fa.segments(turns, CU))


FROZEN = fa.freeze_statistics(REWARDS, [0, 0], include=torch.tensor([True, False]), turn_ids=IDS, cu_seqlens=CU)

BAD = [
    # cu_seqlens, in every op that takes it
    (ids, {"cu_seqlens": torch.tensor([0, 3, 2, 5])}, ValueError, r"cu_seqlens decreases after row 1 \(3 to 2\)"),
    (ids, {"cu_seqlens": torch.tensor([1, 5])}, ValueError, r"cu_seqlens starts at 1"),
    (ids, {"cu_seqlens": torch.tensor([0, 4])}, ValueError, r"cu_seqlens ends at 4, but mask has 5 tokens"),
    (ids, {"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, r"cu_seqlens has dtype torch.float32"),
    (ids, {"cu_seqlens": torch.empty(0, dtype=torch.int64)}, ValueError, r"cu_seqlens has shape \[0\]"),
    (ids, {"mask": MASK.view(1, 5)}, ValueError, r"mask is padded \[B, T\] and cu_seqlens is given"),
    (ids, {"mask": torch.ones(1, 1, 5), "cu_seqlens": None}, ValueError, r"mask has shape \[1, 1, 5\]"),
    (index, {"cu_seqlens": torch.tensor([0, 9])}, ValueError, r"cu_seqlens ends at 9"),
    (loss, {"cu_seqlens": torch.tensor([0, 2, 1, 5])}, ValueError, r"cu_seqlens decreases"),
    # masks
    (ids, {"mask": torch.tensor([1, 0.5, 0, 1, 1])}, ValueError, r"mask has a fractional"),
    (ids, {"mask": [1, 0, 0, 1, 1]}, TypeError, r"mask is a list; pass a tensor"),
    (loss, {"mask": torch.tensor([1, 0.5, 0, 1, 1])}, ValueError, r"mask has a fractional.*`weights`"),
    (loss, {"mask": torch.tensor([1, NAN, 0, 1, 1])}, ValueError, r"mask has a fractional or non-finite"),
    (loss, {"mask": MASK[:4]}, ValueError, r"mask has shape \[4\]; expected \[5\]"),
    (loss, {"mask": MASK.to(torch.complex64)}, TypeError, r"mask has dtype torch.complex64"),
    # turn ids
    (index, {"turn_ids": torch.tensor([0, -2, 0, 0, 0])}, ValueError, r"turn_ids has a value below -1"),
    (index, {"turn_ids": torch.tensor([0, 2**40, 0, 0, 0])}, ValueError, r"turns above 1048575 are not supported"),
    (index, {"turn_ids": torch.zeros(5)}, TypeError, r"turn_ids has dtype torch.float32; use int32, int64"),
    (turn, {"turn_ids": IDS, "cu_seqlens": None}, ValueError, r"turn_ids has 1 rollouts, rewards has 2"),
    # rewards and groups
    (group, {"rewards": torch.tensor([NAN, 0.0])}, ValueError, r"rewards\[0\] is nan; a reward that votes must"),
    (group, {"rewards": torch.tensor([0.0, math.inf])}, ValueError, r"rewards\[1\] is inf"),
    (turn, {"rewards": torch.tensor([NAN, 0.0])}, ValueError, r"turn_advantages: rewards\[0\] is nan"),
    (freeze, {"rewards": torch.tensor([0.0, NAN])}, ValueError, r"freeze_statistics: rewards\[1\] is nan"),
    (group, {"rewards": torch.ones(3)}, ValueError, r"rewards has shape \[3\]; expected \[2\]"),
    (group, {"rewards": [1.0, 0.0]}, TypeError, r"rewards is a list"),
    (group, {"group_ids": [0.5, 1]}, TypeError, r"group_ids\[0\] is 0.5; labels are integers or strings"),
    (group, {"group_ids": ["a", None]}, TypeError, r"group_ids\[1\] is None"),
    (group, {"group_ids": torch.zeros(2)}, TypeError, r"group_ids has dtype torch.float32"),
    (group, {"group_ids": torch.zeros(2, 1, dtype=torch.int64)}, ValueError, r"group_ids has shape \[2, 1\]"),
    # options of advantages
    (group, {"baseline": "median"}, ValueError, r"baseline is 'median'; it must be one of 'none', 'mean', 'loo'"),
    (group, {"population": "some"}, ValueError, r"population is 'some'"),
    (group, {"population": "survivors"}, ValueError, r"population is 'survivors' but include is not given"),
    (group, {"singleton": "keep"}, ValueError, r"singleton is 'keep'.*'zero', 'raw', 'drop'"),
    (group, {"scale": "mad"}, ValueError, r"scale is 'mad'"),
    (group, {"eps_form": "max"}, ValueError, r"eps_form is 'max'"),
    (group, {"eps": -1e-6}, ValueError, r"eps is -1e-06; it must be finite and at least 0"),
    (group, {"ddof": "1"}, TypeError, r"ddof is a str; pass a number"),
    (group, {"include": torch.ones(2)}, TypeError, r"include has dtype torch.float32; use bool"),
    (group, {"votes": torch.tensor([1.0, -1.0])}, ValueError, r"votes has a negative"),
    (turn, {"kappa": -1.0}, ValueError, r"kappa is -1.0"),
    (turn, {"kappa": NAN}, ValueError, r"kappa is nan"),
    (turn, {"shrink_to": "median"}, ValueError, r"shrink_to is 'median'"),
    (turn, {"output": "rows"}, ValueError, r"output is 'rows'"),
    # frozen statistics of something else
    (group, {"statistics": FROZEN, "votes": torch.ones(2)}, ValueError, r"votes cannot be given with statistics"),
    (group, {"statistics": FROZEN, "group_ids": [0, 1]}, ValueError, r"group_ids differ from those"),
    (group, {"statistics": FROZEN, "scale": "std", "ddof": 0}, ValueError, r"ddof is 0.*frozen with 1"),
    (
        group,
        {"statistics": FROZEN, "population": "survivors", "include": torch.tensor([True, True])},
        ValueError,
        r"include differs from the survivors",
    ),
    (turn, {"statistics": FROZEN, "kappa": 4.0}, ValueError, r"kappa is 4.0.*frozen for kappa=2.0"),
    (
        turn,
        {"statistics": fa.freeze_statistics(REWARDS, [0, 0])},
        ValueError,
        r"frozen without turn_ids",
    ),
    (
        group,
        {"statistics": fa.freeze_statistics(REWARDS, [0, 0]), "population": "survivors"},
        ValueError,
        r"frozen without include",
    ),
    (turn, {"statistics": FROZEN, "turn_ids": torch.tensor([0, 1, 2, 3, 4])}, ValueError, r"other turns than those"),
    # losses
    (loss, {"log_probs": LOG_PROBS.to(torch.int64)}, TypeError, r"log_probs has dtype torch.int64"),
    (loss, {"old_log_probs": LOG_PROBS[:3]}, ValueError, r"old_log_probs has shape \[3\]; expected \[5\]"),
    (loss, {"old_log_probs": None}, ValueError, r"old_log_probs is None; the 'ppo' loss needs it"),
    (loss, {"advantages": torch.ones(3)}, ValueError, r"advantages has shape \[3\].*\[5\] \(per token\).*\[2\]"),
    (loss, {"advantages": 1.0}, TypeError, r"advantages is a float"),
    (loss, {"weights": torch.ones(4)}, ValueError, r"weights has shape \[4\]"),
    (loss, {"is_weights": torch.ones(2)}, ValueError, r"is_weights has shape \[2\]"),
    (loss, {"config": "pop"}, ValueError, r"config is 'pop'; it must be a LossConfig or one of 'reinforce'"),
    (loss, {"reduction": "mean"}, ValueError, r"reduction is 'mean'; it must be one of 'loss', 'none'"),
    (loss, {"denominator": 0.0}, ValueError, r"denominator is 0.0; it must be positive"),
    (loss, {"denominator": torch.tensor(-3.0)}, ValueError, r"denominator is -3.0"),
    (loss, {"denominator": torch.ones(2)}, ValueError, r"denominator has shape \[2\]"),
    (loss, {"denominator": "tokens"}, TypeError, r"denominator is a str"),
    (
        loss,
        {"config": fa.LossConfig(loss_agg_mode="seq-mean-token-sum-norm")},
        ValueError,
        r"divides by a constant length; set horizon",
    ),
    (loss, {"old_log_probs": LOG_PROBS.clone().requires_grad_()}, ValueError, r"pass old_log_probs.detach\(\)"),
    (loss, {"advantages": torch.ones(5).requires_grad_()}, ValueError, r"advantages requires grad"),
    (loss, {"turn_ids": IDS}, ValueError, r"turn_ids belongs to a SegmentTable"),
    (loss, {"advantages": table(values=2)}, ValueError, r"advantages.values has shape \[2\]; expected \[3\]"),
    (
        loss,
        {"advantages": table(), "turn_ids": torch.tensor([0, 0, -1, 0, 7])},
        ValueError,
        r"turn_ids names a turn that its rollout does not have",
    ),
    (
        loss,
        {"log_probs": LOG_PROBS[:2], "old_log_probs": LOG_PROBS[:2], "mask": MASK[:2], "advantages": REWARDS,
         "cu_seqlens": torch.tensor([0, 2, 2])},
        ValueError,
        r"advantages has shape \[2\], which is both the number of tokens and of rollouts",
    ),
    # gradient projections
    (gram, {"vectors": []}, ValueError, r"vectors is empty; pass at least one"),
    (gram, {"vectors": torch.ones(2, 5)}, TypeError, r"vectors is a tensor; pass a list of tensors"),
    (gram, {"vectors": [LOG_PROBS, None]}, TypeError, r"vectors\[1\] is a NoneType"),
    (gram, {"vectors": [LOG_PROBS, LOG_PROBS[:4]]}, ValueError, r"vectors\[1\] has shape \[4\]; expected \[5\]"),
    (gram, {"vectors": [LOG_PROBS, LOG_PROBS.half()]}, TypeError, r"vectors\[1\] has dtype torch.float16; use float32"),
    (gram, {"vectors": [IDS]}, TypeError, r"vectors\[0\] has dtype torch.int32"),
    (sketch, {"values": IDS}, TypeError, r"values has dtype torch.int32"),
    (sketch, {"values": torch.ones(2, 2, 2)}, ValueError, r"values has shape \[2, 2, 2\]; pass \[n\] or \[rows, col"),
    (sketch, {"values": torch.tensor([1.0, NAN])}, ValueError, r"values\[1\] is nan; it must be finite and below"),
    (sketch, {"size": 31}, ValueError, r"size is 31; it must be from 32 to 268435456"),
    (sketch, {"size": 2**28 + 1}, ValueError, r"size is 268435457"),
    (sketch, {"size": 64.0}, TypeError, r"size is 64\.0, a float; pass an integer"),
    (sketch, {"copies": 0}, ValueError, r"copies is 0; it must be from 1"),
    (sketch, {"row_offset": -1}, ValueError, r"row_offset is -1"),
    (sketch, {"column_offset": -32}, ValueError, r"column_offset is -32"),
    (sketch, {"quantum": 1e-12}, ValueError, r"quantum is 1e-12; it must be a power of two"),
    (sketch, {"quantum": 0.0}, ValueError, r"quantum is 0.0"),
    (sketch, {"quantum": -0.5}, ValueError, r"quantum is -0.5"),
    (sketch, {"quantum": NAN}, ValueError, r"quantum is nan"),
    (sketch, {"quantum": "1"}, TypeError, r"quantum is a str"),
    (sketch, {"out": torch.zeros(64, dtype=torch.int64)}, ValueError, r"out has shape \[64\]; expected \[1, 64\]"),
    (sketch, {"out": torch.zeros(1, 64)}, TypeError, r"out has dtype torch.float32; use int64"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "changes", "error", "message"), BAD, ids=[f"{b[0].__name__}: {b[3]}" for b in BAD])
@ON
def test_bad_input(call: Any, changes: dict[str, Any], error: type[Exception], message: str, backend: str) -> None:
    call(backend)  # the call is right without the change
    tensors = {name: value.clone() for name, value in changes.items() if isinstance(value, Tensor)}
    with pytest.raises(error, match=message):
        call(backend, **changes)
    for name, before in tensors.items():
        torch.testing.assert_close(changes[name], before, rtol=0, atol=0, equal_nan=True)


CONFIGS = [
    ({"loss": "ppoo"}, r"loss is 'ppoo'; it must be one of 'reinforce', 'ppo'"),
    ({"loss_agg_mode": "mean"}, r"loss_agg_mode is 'mean'; it must be one of 'token-mean'"),
    ({"denominator": "rows"}, r"denominator is 'rows'"),
    ({"clip_low": 1.5}, r"clip_low is 1.5; it must be in \[0, 1\]"),
    ({"clip_high": -0.1}, r"clip_high is -0.1"),
    ({"clip_high": NAN}, r"clip_high is nan"),
    ({"dual_clip": 1.0}, r"dual_clip is 1.0; it must be above 1"),
    (
        {"loss": "reinforce", "dual_clip": 3.0},
        r"dual_clip is an option of 'ppo', 'gspo'; the 'reinforce' loss ignores it",
    ),
    ({"log_ratio_bound": 100.0}, r"log_ratio_bound is 100.0"),
    ({"horizon": 0}, r"horizon is 0"),
]


@pytest.mark.parametrize(("fields", "message"), CONFIGS, ids=[c[1] for c in CONFIGS])
def test_bad_configuration(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fa.LossConfig(**fields)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="clip_ratio_c"):
        fa.LossConfig(clip_ratio_c=3.0)
    with pytest.raises(TypeError, match="clip_ratio"):
        loss("reference", clip_ratio=0.2)


COUNTS = [
    ({"tokens": NAN}, ValueError, r"tokens is nan; it must be finite and at least 0"),
    ({"tokens": torch.tensor(-1.0)}, ValueError, r"tokens is -1; it must be finite and at least 0"),
    ({"sequences": math.inf}, ValueError, r"sequences is inf"),
    ({"candidates": torch.ones(2)}, ValueError, r"candidates has shape \[2\]; pass one number"),
    ({"candidates": "3"}, TypeError, r"candidates is a str; pass a number or a 0-d tensor"),
    ({"horizon": 0.0}, ValueError, r"horizon is 0; it must be finite and positive"),
    ({"horizon": math.inf}, ValueError, r"horizon is inf"),
    ({"ranks": 0}, ValueError, r"ranks is 0; it must be finite and at least 1"),
]


@pytest.mark.parametrize(("fields", "error", "message"), COUNTS, ids=[c[2] for c in COUNTS])
def test_bad_denominators(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    right = {"tokens": 5.0, "sequences": torch.tensor(2.0), "candidates": 0, "horizon": 7, "ranks": 2}
    fa.Denominators(**right)
    with pytest.raises(error, match=f"Denominators: {message}"):
        fa.Denominators(**{**right, **fields})
    if not isinstance(next(iter(fields.values())), (float, int)):
        return
    with pytest.raises(ValueError, match=r"Denominators: candidates is nan; it must be finite and positive"):
        fa.Denominators(**right).with_candidates(NAN)


def test_a_horizon_is_checked_before_anything_is_counted() -> None:
    with pytest.raises(ValueError, match="denominators: horizon is inf; it must be finite and positive"):
        fa.denominators(torch.tensor([0.5]), horizon=math.inf)


GROUPS_OF_THREE = [0, 0, 0, 1, 1, 1]


@ON
@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("eps_form", ["add", "floor", "positive"])
@pytest.mark.parametrize("eps", [0.0, 0.5])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_without_checks_a_bad_reward_is_never_a_plausible_number(
    scale: str, eps_form: str, eps: float, bad: float, backend: str
) -> None:
    clean = torch.tensor([0.5, 1.0, 0.0, 2.0, 0.0, 1.0])
    rewards = torch.tensor([bad, *clean[1:]])
    options: dict[str, Any] = {"scale": scale, "eps_form": eps_form, "eps": eps, "backend": backend}
    turns = fa.segments(torch.zeros(6, 1, dtype=torch.int64))
    with fa.checks("off"):
        for baseline in ("mean", "loo"):
            advantages = fa.group_advantages(rewards, GROUPS_OF_THREE, baseline=baseline, **options)
            assert not advantages[:3].isfinite().any(), baseline
            plain = fa.group_advantages(clean, GROUPS_OF_THREE, baseline=baseline, **options)
            assert torch.equal(advantages[3:], plain[3:])
        by_turn = fa.turn_advantages(rewards, GROUPS_OF_THREE, turns, **options)
        assert not by_turn[:3].isfinite().any()
        votes = torch.tensor([bad, 1.0, 1.0, 1.0, 1.0, 1.0])
        assert not fa.group_advantages(clean, GROUPS_OF_THREE, votes=votes, **options)[:3].isfinite().any()


@ON
@pytest.mark.parametrize("eps_form", ["add", "floor", "positive"])
def test_without_checks_a_scale_that_is_not_known_is_nan(eps_form: str, backend: str) -> None:
    """The mean is over survivors and finite; the scale is over all, of whom one has no reward."""
    rewards, include = torch.tensor([1.0, 0.0, NAN]), torch.tensor([True, True, False])
    options: dict[str, Any] = {"population": "survivors", "include": include, "backend": backend}
    with fa.checks("off"):
        frozen = fa.freeze_statistics(rewards, [0] * 3, include=include, backend=backend)
        options["statistics"] = frozen
        scaled = fa.group_advantages(rewards, [0] * 3, scale="std", eps_form=eps_form, eps=0.0, **options)
        assert scaled[:2].isnan().all()
        assert fa.group_advantages(rewards, [0] * 3, **options).tolist() == [0.5, -0.5, 0.0]
    # Nor does a group without a scale hide the reward of a row that does not vote.
    votes, voterless = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, NAN])
    flat = fa.group_advantages(voterless, [0] * 3, votes=votes, scale="std", eps=0.0, backend=backend)
    assert flat[:2].tolist() == [0.0, 0.0]
    assert flat[2].isnan()


@ON
def test_checks_can_be_turned_off(backend: str) -> None:
    with fa.checks("off"):
        assert group(backend, rewards=torch.tensor([NAN, 0.0])).isnan().all()
    with pytest.raises(ValueError, match="must be finite"):
        group(backend, rewards=torch.tensor([NAN, 0.0]))
    with pytest.raises(ValueError, match="mode is 'loud'"):
        fa.checks("loud")


@ON
def test_an_unknown_backend(backend: str) -> None:
    with pytest.raises(ValueError, match=r"backend is 'gpu'; it must be 'auto' or one of 'reference', 'cpu'"):
        group("gpu")


def test_a_backend_that_cannot_take_the_tensors() -> None:
    with pytest.raises(fa.BackendUnavailableError, match=r"'cpu' cannot run: it takes float32.*not float64"):
        loss("cpu", log_probs=LOG_PROBS.double())
    assert loss("auto", log_probs=LOG_PROBS.double()).loss.dtype == torch.float64
    assert fa.last_backend() == "reference"
