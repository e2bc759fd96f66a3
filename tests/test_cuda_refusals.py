"""Launches that CUDA refuses, compiled for the CPU: an exception that names the op and the cause, and the next call is
right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda_kernels
import pytest
import torch
from cuda_emulation import build
from torch import Tensor

import fastadv as fa
from fastadv import cuda
from fastadv.groups import group_index
from fastadv.ops import _logits
from fastadv.ops import moments as moment_ops
from fastadv.ops._policy_loss_kernel import SCALE_GRADIENT

pytestmark = pytest.mark.skipif(cuda_kernels.missing() is not None, reason=str(cuda_kernels.missing()))

ON: dict[str, Any] = {"backend": "cuda"}
ROWS, TOKENS = 3, 40
MASK = torch.ones(ROWS, TOKENS, dtype=torch.bool)
TURNS = torch.zeros(ROWS, TOKENS, dtype=torch.int32)
INDEX = fa.segments(TURNS, backend="cpu")
GROUPS = group_index(torch.tensor([0, 0, 1]))
REWARDS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
FROZEN = fa.freeze_statistics(REWARDS, GROUPS, turn_ids=INDEX, backend="cpu")
LOG_PROBS = -torch.rand(ROWS, TOKENS, generator=torch.Generator().manual_seed(0))
LOGITS = torch.randn(ROWS, 9, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([1, 2, 3])
STATE = _logits.log_probs("cpu", LOGITS, LABELS, 1.0, 0.0, True)[3]


def voters() -> tuple[Tensor, Tensor, fa.GroupIndex]:
    return REWARDS, torch.ones_like(REWARDS), GROUPS


def policy_loss(**options: Any) -> Tensor:
    return fa.policy_loss(LOG_PROBS, LOG_PROBS, REWARDS.float(), MASK, denominator=1.0, **ON, **options).loss


def shared_gradient() -> Tensor:
    leaf = LOG_PROBS.clone().requires_grad_()
    config = fa.LossConfig("gspo", sequence_gradient="mean")
    fa.policy_loss(leaf, LOG_PROBS, REWARDS.float(), MASK, denominator=1.0, config=config, **ON).loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def scaled_gradient() -> Tensor:
    gradient = torch.ones(5)
    SCALE_GRADIENT("cuda", gradient, torch.tensor(2.0))
    return gradient


def logits_gradient() -> Tensor:
    return _logits.logits_gradient("cuda", LOGITS, LABELS, *STATE, *torch.ones(3, 3), out=torch.empty_like(LOGITS))


def turns_of(**statistics: Any) -> Tensor:
    return fa.turn_advantages(REWARDS, GROUPS, INDEX, output="segments", **statistics, **ON).values


# Each launch by the op that it belongs to, which a user called or which called it.
LAUNCHES: dict[str, tuple[str, Callable[[], Any]]] = {
    "segment_tokens": ("segment_tokens", lambda: fa.segment_tokens(fa.SegmentTable(REWARDS, INDEX), **ON)),
    "turn_ids_from_mask": ("turn_ids_from_mask", lambda: fa.turn_ids_from_mask(MASK, **ON)),
    "turn_counts": ("segments", lambda: fa.segments(TURNS, **ON).offsets),
    "token_counts": ("token_counts", lambda: fa.token_counts(MASK, **ON)),
    "group_moments": ("group_moments", lambda: moment_ops.group_moments(*voters(), "cuda").sum),
    "turn_moments": (
        "turn_moments",
        lambda: moment_ops.turn_moments(*voters(), INDEX, torch.ones(2, dtype=torch.float64), "cuda").rewards,
    ),
    "fused_group_advantages": ("group_advantages", lambda: fa.group_advantages(REWARDS, GROUPS, **ON)),
    "group_advantages": (
        "group_advantages",
        lambda: fa.group_advantages(REWARDS, GROUPS, statistics=FROZEN, **ON),
    ),
    "fused_turn_advantages": ("turn_advantages", turns_of),
    "turn_advantages": ("turn_advantages", lambda: turns_of(statistics=FROZEN)),
    "sequence_log_ratios": (
        "sequence_log_ratios",
        lambda: fa.sequence_log_ratios(LOG_PROBS, LOG_PROBS, MASK, **ON).sum,
    ),
    "policy_loss": ("policy_loss", policy_loss),
    "share_gradients": ("share_gradients", shared_gradient),
    "scale_gradient": ("scale_gradient", scaled_gradient),
    "row_statistics": ("token_log_probs", lambda: _logits.row_statistics("cuda", LOGITS, LABELS)),
    "finish_statistics": ("token_log_probs", lambda: _logits.finish("cuda", torch.ones(2, 5, 3)).lse),
    "token_log_probs": ("token_log_probs", lambda: fa.token_log_probs(LOGITS, LABELS, **ON).log_probs),
    "logits_gradient": ("token_log_probs", logits_gradient),
    "multi_dot_gram": ("multi_dot_gram", lambda: fa.multi_dot_gram([LOG_PROBS, 2 * LOG_PROBS], **ON)),
    "count_sketch": ("count_sketch", lambda: fa.gradproj.count_sketch(LOG_PROBS, 64, **ON)),
}


class Watched:
    """The extension; `before` is called before each of its functions."""

    def __init__(self, module: Any, before: Callable[[str], None]) -> None:
        self.module, self.before = module, before

    def __getattr__(self, name: str) -> Any:
        self.before(name)
        return getattr(self.module, name)


def test_every_launcher_is_here() -> None:
    others = {"check_device", "device_type", "row_sums_scratch"}
    assert {name for name, value in vars(cuda.module()).items() if callable(value)} - others == LAUNCHES.keys()


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_a_refused_launch_names_op_and_cause(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, call = LAUNCHES[launcher]
    module, right = cuda.module(), call()

    def plant(name: str) -> None:
        if name == launcher:
            build.fail_next_launch(module, 701)

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "module", lambda: Watched(module, plant))
        with pytest.raises(RuntimeError, match=f"^{op}: cudaErrorLaunchOutOfResources: too many resources requested"):
            call()
    assert torch.equal(call(), right)


@pytest.mark.parametrize("launcher", sorted(LAUNCHES.keys() - {"share_gradients"}))  # it is where the loss was
def test_a_device_that_is_not_there(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, call = LAUNCHES[launcher]
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "place", lambda t: (3, 0))
        with pytest.raises(RuntimeError, match=f"^{op}: cudaErrorInvalidDevice: invalid device ordinal"):
            call()
    call()


def test_a_device_is_looked_for_without_a_launch() -> None:
    started = build.operations(cuda.module())
    cuda.module().check_device(0)
    with pytest.raises(RuntimeError, match=r"^fastadv: cudaErrorInvalidDevice: invalid device ordinal"):
        cuda.module().check_device(3)
    assert build.operations(cuda.module()) == started


HUGE = 2**60  # of anything: more blocks than a grid has
ROWS_OF, NONE = (HUGE, HUGE, 0, 0), 0
VOTERS = (HUGE, HUGE, 0, 0, 0, (0, 0), (0, 0), 0, False)
MOMENTS = (0,) * 5
RULE = (0, 0, False, 1.0, 1e-6, 0)
ADVANTAGES = (HUGE, HUGE, 0, 0, 0, 0, 0, MOMENTS, MOMENTS)
LOGITS_VIEW = (0, 0, HUGE, 1, 1, 1, 1)
LOGITS_INPUTS = (LOGITS_VIEW, 0, 0, 1.0, 0.0)
TOO_MANY: dict[str, tuple[Any, ...]] = {
    "segment_tokens": (ROWS_OF, False, 0, 0, 0, 4, 0, 0, 0),
    "turn_ids_from_mask": (ROWS_OF, 0, 0, 0),
    "turn_counts": (ROWS_OF, 4, 0, 0),
    "token_counts": (ROWS_OF, 0, 0),
    "group_moments": (VOTERS, MOMENTS),
    "turn_moments": (VOTERS, 0, 0, (0, 0, 0, HUGE)),
    "fused_group_advantages": (VOTERS, RULE, False, 0),
    "group_advantages": (ADVANTAGES, RULE, False, 0),
    "fused_turn_advantages": (VOTERS, RULE, 0, HUGE, 2.0, False, False, 0),
    "turn_advantages": (ADVANTAGES, RULE, (0, 0, 0, 0), 0, HUGE, 2.0, False, False, 0),
    "sequence_log_ratios": (ROWS_OF, 0, 0, 0, 0, 0, False, 1, (0,) * 4, 0, 0),
    "share_gradients": (ROWS_OF, 0, 0, 0, False, 0),
    "scale_gradient": (HUGE, 0, 0, 0),
    "row_statistics": (LOGITS_INPUTS, 0, 0),
    "finish_statistics": (1, HUGE, 0, 0),
    "token_log_probs": (LOGITS_INPUTS, 0, 0, 0, 0, 0),
    "logits_gradient": (LOGITS_INPUTS, 0, 0, 0, 0, 0, 0, LOGITS_VIEW),
    "multi_dot_gram": (0, HUGE, [0, 0], 0, 0),
    "count_sketch": ((HUGE, HUGE, 1, 0), 0, 0, (0, 0), 1, 1.0, 1, 32, 0),
}


@pytest.mark.parametrize("launcher", TOO_MANY)
def test_more_blocks_than_a_grid_has(launcher: str) -> None:
    op = LAUNCHES[launcher][0]
    with pytest.raises(ValueError, match=f"^{op}: too many blocks for a grid"):
        getattr(cuda.module(), launcher)(0, 0, *TOO_MANY[launcher])


def test_fewer_blocks_than_the_loss_needs() -> None:
    inputs, formula = (0,) * 18, (0,) * 21
    with pytest.raises(ValueError, match=r"^policy_loss: too few blocks"):
        cuda.module().policy_loss(0, 0, (1, 2**31, 0, 0), 0, inputs, formula, (0,) * 9, 1)


def test_a_grid_that_is_too_wide_is_refused_by_cuda() -> None:
    """Parts of a row are the grid's second dimension, which has 65535 blocks."""
    view = (0, 0, 1, 2**40, 1, 1, 1)
    with pytest.raises(RuntimeError, match=r"^token_log_probs: cudaErrorInvalidConfiguration: invalid configuration"):
        cuda.module().logits_gradient(0, 0, (view, 0, 0, 1.0, 0.0), 0, 0, 0, 0, 0, 0, view)


def test_logits_of_another_type() -> None:
    integers = (0, 5, 1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="logits are float32, bfloat16 or float16"):
        cuda.module().row_statistics(0, 0, (integers, 0, 0, 1.0, 0.0), 0, 0)


def test_tensors_without_memory() -> None:
    with pytest.raises(fa.BackendUnavailableError, match=r"token_counts: backend 'cuda' cannot run: .* not meta"):
        fa.token_counts(MASK.to("meta"), **ON)
    freed = torch.ones(5, dtype=torch.bool)
    freed.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="tensor without memory"):
        fa.turn_ids_from_mask(freed, **ON)
