"""Advantage estimators by the name of their owner: what a name stands for, what it reads, and the call.

An estimator is a function of `Inputs` under `@estimator(...)`, which says everything that two owners of one method do
differently. `estimate` checks that what it gets is what the estimator reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor

from fastadv import validation
from fastadv.estimators.anchors import anchor_groups
from fastadv.groups import GroupIndex, Labels, group_index
from fastadv.ops.turn_ids import segments
from fastadv.segment_table import Segments, SegmentTable
from fastadv.statistics import check_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OP = "estimate"
LEVELS = ("rollout", "turn", "token")

# What an estimator may read, as errors describe it.
INPUTS = {
    "rewards": "rewards [B], one number a rollout",
    "group_ids": "group_ids [B], the label of each rollout's prompt",
    "mask": "mask [N] or [B, T], not 0 at tokens that the model sampled",
    "lengths": "lengths [B], the number of tokens of each rollout that count",
    "include": "include [B] bool, False where a filter takes the rollout out",
    "turn_ids": "turn_ids, the turn of each token or a Segments",
    "anchor_ids": "anchor_ids [S], the label of the observation that each turn started from",
    "step_rewards": "step_rewards [S], one number a turn",
    "token_rewards": "token_rewards, like the mask",
    "values": "values, the critic's, like the mask",
    "greedy_rewards": "greedy_rewards [B], the reward of the greedy rollout of each prompt",
    "log_probs": "log_probs, like the mask",
    "sum_p2": "sum_p2, the sum of squared probabilities at each token, like the mask",
    "is_weights": "is_weights, importance weights, like the mask",
    "process_group": "process_group, the ranks whose tokens are whitened together",
}
PER_TOKEN = ("mask", "turn_ids", "token_rewards", "values", "log_probs", "sum_p2", "is_weights")


class Estimate(NamedTuple):
    """What an estimator returns.

    Attributes:
        advantages: `[B]` at level "rollout", a SegmentTable at level "turn", like the mask at level "token".
        returns: targets of a critic, in the same form; None where the owner has none.
    """

    advantages: Tensor | SegmentTable
    returns: Tensor | SegmentTable | None = None


@dataclass(frozen=True, eq=False)
class Inputs:
    """Checked arguments of `estimate`: None where not given. An estimator finds what it `needs` and never what it does
    not read.

    Attributes:
        rewards: `[B]`, without a graph.
        groups: which rollouts are of one prompt.
        mask: `[N]` or `[B, T]`.
        cu_seqlens: `[B + 1]`, ends of packed rollouts.
        lengths: `[B]`.
        include: `[B]` bool.
        segments: the (rollout, turn) pairs.
        anchors: turns of equal observations, over all segments.
        step_rewards: `[S]`.
        token_rewards, values, log_probs, sum_p2, is_weights: like the mask.
        greedy_rewards: `[B]`.
        process_group: of torch.distributed.
        options: the estimator's options, its defaults filled in.
        backend: "auto" or the name of a backend.
    """

    rewards: Tensor | None  # [B]
    groups: GroupIndex | None
    mask: Tensor | None  # [N] or [B, T]
    cu_seqlens: Tensor | None  # [B + 1]
    lengths: Tensor | None  # [B]
    include: Tensor | None  # [B] bool
    segments: Segments | None
    anchors: GroupIndex | None
    step_rewards: Tensor | None  # [S]
    token_rewards: Tensor | None  # like the mask
    values: Tensor | None  # like the mask
    greedy_rewards: Tensor | None  # [B]
    log_probs: Tensor | None  # like the mask
    sum_p2: Tensor | None  # like the mask
    is_weights: Tensor | None  # like the mask
    process_group: ProcessGroup | None
    options: Mapping[str, Any]
    backend: str


Function = Callable[[Inputs], Estimate]
T = TypeVar("T")


def needed(value: T | None) -> T:
    """An input that the estimator needs, which `estimate` has seen to."""
    if value is None:
        raise AssertionError("an estimator reads an input that it does not list in needs")
    return value


@dataclass(frozen=True)
class Estimator:
    """An estimator and the conventions of its owner.

    Attributes:
        name: "method/owner", as `estimate` takes it.
        method: "grpo", ...
        owner: the framework whose conventions these are.
        level: what there is one advantage of: "rollout", "turn" or "token".
        equation: in plain text.
        code_path: file and function in the owner's repository, and the revision that was read.
        ddof: of the standard deviation; None: it has none.
        eps: see `eps_form`; None: it has none.
        eps_form: "add", "floor" or "positive", see `fastadv.group_advantages`; of whitening "add_to_variance"
            or "floor_of_variance", see `fastadv.whiten`; None: no standard deviation.
        singleton: what a group with one voter gets.
        masking: who votes and who gets an advantage, where rollouts are filtered or have no token.
        needs: inputs without which it is an error. "a|b": exactly one of the two.
        reads: inputs that it reads if given.
        options: defaults of its options.
        function: of Inputs.
    """

    name: str
    method: str
    owner: str
    level: str
    equation: str
    code_path: str
    ddof: float | None
    eps: float | None
    eps_form: str | None
    singleton: str
    masking: str
    needs: tuple[str, ...]
    reads: tuple[str, ...]
    options: Mapping[str, Any]
    function: Function


_registered: dict[str, Estimator] = {}
ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(_registered)


def estimator(
    name: str,
    *,
    equation: str,
    code_path: str,
    level: str = "rollout",
    owner: str = "",
    ddof: float | None = None,
    eps: float | None = None,
    eps_form: str | None = None,
    singleton: str = "zero",
    masking: str = "",
    needs: tuple[str, ...] = ("rewards", "group_ids"),
    reads: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> Callable[[Function], Function]:
    """Registers a function of Inputs under "method/owner"; the arguments are the fields of Estimator. `owner` is given
    where the name's second half is a variant of an owner's, as in "grpo/verl-vectorized"."""
    method, _, variant = name.partition("/")
    validation.choice(f"estimator {name!r}", "level", level, LEVELS)
    if not method or not variant or name in _registered:
        raise ValueError(f"estimator: {name!r} is taken, or not of the form method/owner")
    for names in (*needs, *reads):
        for one in names.split("|"):
            validation.choice(f"estimator {name!r}", "an input", one, tuple(INPUTS))

    def register(function: Function) -> Function:
        _registered[name] = Estimator(
            name, method, owner or variant, level, equation, code_path, ddof, eps, eps_form, singleton, masking,
            needs, reads, MappingProxyType(dict(options or {})), function,
        )  # fmt: skip
        return function

    return register


def named(name: str) -> Estimator:
    """The estimator of this name. Raises ValueError, listing the names that there are."""
    if name in _registered:
        return _registered[name]
    text = name if isinstance(name, str) else ""
    of_method = sorted(other for other in _registered if text and other.startswith(f"{text}/"))
    meant = f" (did you mean {' or '.join(map(repr, of_method))}?)" if of_method else ""
    hint = meant or validation.did_you_mean(text, _registered)
    raise ValueError(f"{OP}: there is no estimator {name!r}{hint}; names are {', '.join(sorted(_registered))}")


def estimate(
    name: str,
    rewards: Tensor | None = None,
    group_ids: Labels | None = None,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
    include: Tensor | None = None,
    turn_ids: Tensor | Segments | None = None,
    anchor_ids: Labels | None = None,
    step_rewards: Tensor | None = None,
    token_rewards: Tensor | None = None,
    values: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
    log_probs: Tensor | None = None,
    sum_p2: Tensor | None = None,
    is_weights: Tensor | None = None,
    process_group: ProcessGroup | None = None,
    backend: str = "auto",
    **options: Any,
) -> Estimate:
    """Advantages as a named framework computes them: its baseline, standard deviation, epsilon, rule for groups of one.

    An input that the estimator does not read is an error, as is one that it needs and did not get.
    `fastadv.ESTIMATORS[name]` says which these are, and its equation and source.

    Args:
        name: "method/owner", a key of `fastadv.ESTIMATORS`: "grpo/verl", "rloo/trl", "gigpo/verl-agent", ...
        rewards: `[B]`. May be NaN only in rows that do not vote.
        group_ids: `[B]` labels (integers or strings, any order, groups of any size) or a GroupIndex.
        mask: `[N]` or `[B, T]`, non-zero at tokens that the model sampled.
        cu_seqlens: `[B + 1]`, ends of the rollouts where tokens are packed `[N]`.
        lengths: `[B]`, tokens of each rollout that count.
        include: `[B]` bool, False where a filter took the rollout out: its advantage is 0. Whether it votes is the
            owner's affair, see `Estimator.masking`.
        turn_ids: turn of each token, like the mask, or a Segments.
        anchor_ids: `[S]` labels of the observations that turns started from, compared within a prompt, or what
            `fastadv.estimators.anchor_groups` made of them.
        step_rewards: `[S]`, one number a (rollout, turn), in the order of the Segments.
        token_rewards, values, log_probs, sum_p2, is_weights: like the mask.
        greedy_rewards: `[B]`, rewards of the greedy rollouts.
        process_group: of torch.distributed: statistics of tokens are over all of its ranks.
        backend: "auto" or the name of one of `fastadv.backends()`.
        options: of the estimator (`Estimator.options`: gamma, lam, omega, ...).

    Returns:
        Estimate(advantages, returns).

    Raises:
        ValueError: an unknown name or option, an input that is missing, not read, or of the wrong shape.
        TypeError: an input that is no tensor, labels that are not integers or strings.
    """
    found = named(name)
    op = f"{OP} {name!r}"
    given = {
        "rewards": rewards, "group_ids": group_ids, "mask": mask, "lengths": lengths, "include": include,
        "turn_ids": turn_ids, "anchor_ids": anchor_ids, "step_rewards": step_rewards, "token_rewards": token_rewards,
        "values": values, "greedy_rewards": greedy_rewards, "log_probs": log_probs, "sum_p2": sum_p2,
        "is_weights": is_weights, "process_group": process_group,
    }  # fmt: skip
    _check_given(op, found, {key for key, value in given.items() if value is not None}, cu_seqlens is not None)
    for option, value in options.items():
        _check_option(op, found, option, value)
    groups = None if group_ids is None else group_index(group_ids, op=op)
    turns = None if turn_ids is None else segments(turn_ids, cu_seqlens, backend=backend)
    _check_rows(op, groups, rewards, lengths, include, greedy_rewards)
    return found.function(
        Inputs(
            rewards=None if rewards is None else rewards.detach(),
            groups=groups,
            mask=mask,
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            include=include,
            segments=turns,
            anchors=_anchors(op, anchor_ids, groups, turns),
            step_rewards=step_rewards,
            token_rewards=token_rewards,
            values=values,
            greedy_rewards=greedy_rewards,
            log_probs=log_probs,
            sum_p2=sum_p2,
            is_weights=is_weights,
            process_group=process_group,
            options={**found.options, **options},
            backend=backend,
        )
    )


def _anchors(
    op: str, anchor_ids: Labels | None, groups: GroupIndex | None, turns: Segments | None
) -> GroupIndex | None:
    if anchor_ids is None or isinstance(anchor_ids, GroupIndex):
        return anchor_ids
    return anchor_groups(anchor_ids, needed(groups), needed(turns), op=op)


def _check_option(op: str, found: Estimator, name: str, value: Any) -> None:
    """Raises unless the estimator has this option, and the value is of its default's kind."""
    if name not in found.options:
        valid = f"options are {', '.join(found.options)}" if found.options else "this estimator has none"
        raise ValueError(f"{op}: there is no option {name!r}; {valid}")
    kind = type(found.options[name])
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{op}: {name} is {value!r}; pass a finite number")
    elif not isinstance(value, kind):
        raise ValueError(f"{op}: {name} is {value!r}; pass a {kind.__name__}")


def _check_given(op: str, found: Estimator, given: set[str], packed: bool) -> None:
    for need in found.needs:
        one = need.split("|")
        if not given.intersection(one):
            raise ValueError(
                f"{op}: {need.replace('|', ' or ')} is missing; pass {' or '.join(INPUTS[x] for x in one)}"
            )
        if len(given.intersection(one)) > 1:
            raise ValueError(f"{op}: {' and '.join(one)} are both given; pass one of them")
    read = {one for need in (*found.needs, *found.reads) for one in need.split("|")}
    for name in INPUTS:
        if name in given and name not in read:
            raise ValueError(f"{op}: {name} is given, but this estimator does not read it; leave it out")
    if packed and not given.intersection(PER_TOKEN):
        raise ValueError(f"{op}: cu_seqlens is given, but nothing that is packed; leave it out")


def _check_rows(
    op: str,
    groups: GroupIndex | None,
    rewards: Tensor | None,
    lengths: Tensor | None,
    include: Tensor | None,
    greedy_rewards: Tensor | None,
) -> None:
    """Raises unless what there is one of a rollout is `[B]`, on the device of the rewards."""
    given = {"rewards": rewards, "lengths": lengths, "include": include, "greedy_rewards": greedy_rewards}
    rows = {name: value for name, value in given.items() if value is not None}
    for name, value in rows.items():
        validation.tensor(op, name, value)
        first = next(iter(rows.values()))
        check_rows(op, name, value, first.numel() if groups is None else groups.num_rows, first.device)
