"""From what a trainer logs about a rollout's end to an Ending."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence, Set
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fastadv import validation
from fastadv.outcomes import NO_RESULT, Ending, listed
from fastadv.status_tables import SYSTEMS, StatusTable

Status = str | enum.Enum | None
LARGEST = 2**63 - 1
_AGENTS = ("miles-agent", "mini-swe-agent")  # whose exit statuses a sample may hold
_LONGEST_STATUS = 80


def ending(system: str, status: Status, *, strict: bool = True) -> Ending:
    """The Ending that a system's status stands for.

    Args:
        system: whose status it is, a key of the table in docs/outcomes.md: "miles", "rllm", "vllm", ...
        status: as the system writes it; upper and lower case are the same. An enumeration's member counts by its value,
            or by its name where the value is no text; what follows a colon does not count where the whole is unknown,
            nor the module in front of an exception's name.
        strict: False: a status that is not in the table, or None, is Ending.UNKNOWN.

    Returns:
        The Ending.

    Raises:
        ValueError: a system without a table or without a status, or an unknown status, with the ones that are valid.
        TypeError: a status that is no text.
    """
    table = _table("ending", system)
    return _ending("ending", system, table, status, strict)


def endings(system: str, statuses: Sequence[Status], *, strict: bool = True) -> Tensor:
    """The Endings of a batch, see `fastadv.statuses.ending`.

    Args:
        system: whose statuses they are.
        statuses: `[B]`, one a rollout.
        strict: False: unknown ones are Ending.UNKNOWN.

    Returns:
        `[B]` int64, values of Ending, as `Batch.of` and `outcomes_of` take them.

    Raises:
        ValueError, TypeError: as of `fastadv.statuses.ending`, naming the row; statuses that are no list.
    """
    table, known, result = _table("endings", system), dict[tuple[type, Status], Ending](), []
    for row, status in enumerate(listed("endings", "statuses", statuses)):
        # With its type: members of two enumerations are equal where their numbers are.
        key = (type(status), status)
        found = known.get(key) if isinstance(status, Status) else None
        if found is None:
            found = known[key] = _ending(f"endings: row {row}", system, table, status, strict)
        result.append(found)
    return torch.tensor(result, dtype=torch.int64)


def sample_ending(status: Status, exit_status: object = None) -> Ending:
    """The Ending of a sample of Miles or slime: by its status, which an agent's own loop may say more precisely.

    The engine says "completed" of a reply whose agent then ran out of turns or time; a sample without a result has none
    whatever the agent says, and one that was cut off was not submitted.

    Args:
        status: `Sample.status`.
        exit_status: `Sample.metadata["exit_status"]`; what is no text, or none that an agent is known to write, says
            nothing.

    Raises:
        ValueError, TypeError: as of `ending`, of the status.
    """
    by_status = ending("miles", status)
    if by_status in NO_RESULT or not isinstance(exit_status, str) or len(exit_status) > _LONGEST_STATUS:
        return by_status
    for agent in _AGENTS:
        said = ending(agent, exit_status, strict=False)
        if said != Ending.UNKNOWN:
            return by_status if said == Ending.SUBMITTED else said
    return by_status


def flagged_endings(system: str, flags: Mapping[str, Tensor]) -> Tensor:
    """The Endings of a batch of a system that sets a flag instead of a status: NeMo-RL, OpenRLHF, Mini-o3.

    Args:
        system: whose flags they are.
        flags: `[B]` bool each, by the names of the system's table. Of several that are set the first in the table
            counts; a rollout with none was submitted.

    Returns:
        `[B]` int64, values of Ending.

    Raises:
        ValueError: a system without flags, an unknown flag, no flag at all, flags of different lengths.
        TypeError: a flag that is no bool tensor, flags without names.
    """
    op = "flagged_endings"
    table = _table(op, system)
    if not isinstance(flags, Mapping):
        raise TypeError(f"{op}: flags is a {type(flags).__name__}; pass a dict of a tensor per name")
    if not table.flags:
        having = ", ".join(name for name, other in SYSTEMS.items() if other.flags)
        raise ValueError(f"{op}: {system!r} has no flags, but {table.field}; systems with flags are {having}")
    unknown = [name for name in flags if name not in table.statuses]
    if unknown or not flags:
        what = f"knows no flag {unknown[0]!r}" if unknown else "needs a flag"
        raise ValueError(f"{op}: {system!r} {what}; it has {', '.join(table.statuses)}")
    first = next(iter(flags.values()))
    result: Tensor | None = None
    for name in reversed(list(table.statuses)):  # the first in the table has the last word
        if name in flags:
            flag = flags[name]
            validation.tensor(op, name, flag, dtypes=(torch.bool,))
            validation.rollouts(op, name, flag)
            validation.tensor(op, name, flag, shape=tuple(first.shape), device=first.device)
            if result is None:
                result = torch.full(flag.shape, Ending.SUBMITTED, dtype=torch.int64, device=flag.device)
            result[flag] = int(table.statuses[name])
    assert result is not None
    return result


def derived_endings(
    lengths: Tensor,
    *,
    max_length: int | None = None,
    turns: Tensor | None = None,
    max_turns: int | None = None,
    last_ids: Tensor | None = None,
    end_ids: Sequence[int] = (),
) -> Tensor:
    """The Endings of a batch of a system that logs none: from lengths, turns and last tokens.

    A response that fills its window, or whose last token does not end a reply, is LENGTH_CAP; of the others one with
    the most turns is TURN_CAP; the rest is SUBMITTED. What cannot be told: an agent that submits with its last turn or
    token counts as capped, and one that was stopped short of its window because a tool's reply would not fit into it
    (verl's tool loop) as submitted. verl's `num_turns` counts prompt and tool replies too: pass `num_turns // 2`.

    Args:
        lengths: `[B]` integers, response tokens, padding not counted.
        max_length: the window; None: lengths are not looked at.
        turns: `[B]` integers, replies of the model.
        max_turns: the most of them; with `turns`.
        last_ids: `[B]` integers, the last token of each response.
        end_ids: tokens that end a reply, padding among them if it may follow; with `last_ids`.

    Returns:
        `[B]` int64, values of Ending.

    Raises:
        ValueError: nothing to derive from, one argument of a pair without the other, a length or number of turns that
            is negative or beyond its maximum.
        TypeError: tensors, maxima or ids that are not integers.
    """
    op = "derived_endings"
    lengths = _counts(op, "lengths", lengths, "max_length", max_length)
    shape, device = tuple(lengths.shape), lengths.device
    if isinstance(end_ids, str) or not isinstance(end_ids, (Sequence, Set, Tensor, np.ndarray)):
        raise TypeError(f"{op}: end_ids is a {type(end_ids).__name__}; pass a list of token ids")
    ends = end_ids.tolist() if isinstance(end_ids, Tensor) else list(end_ids)
    for i, token in enumerate(ends):
        validation.integer(op, f"end_ids[{i}]", token, most=LARGEST)
    pairs = (("turns", turns is not None, "max_turns", max_turns is not None),
             ("last_ids", last_ids is not None, "end_ids", len(ends) > 0))  # fmt: skip
    for one, given, other, other_given in pairs:
        if given != other_given:
            raise ValueError(f"{op}: {one} and {other} come together")
    if max_length is None and turns is None and last_ids is None:
        raise ValueError(f"{op}: pass max_length, turns and max_turns, or last_ids and end_ids")
    result = torch.full(shape, Ending.SUBMITTED, dtype=torch.int64, device=device)
    if turns is not None and max_turns is not None:
        validation.tensor(op, "turns", turns, shape=shape, dtypes=validation.INTEGERS, device=device)
        turns = _counts(op, "turns", turns, "max_turns", max_turns)
        result[turns >= max_turns] = Ending.TURN_CAP
    if last_ids is not None:
        validation.tensor(op, "last_ids", last_ids, shape=shape, dtypes=validation.INTEGERS, device=device)
        result[~torch.isin(last_ids, torch.tensor(ends, device=device))] = Ending.LENGTH_CAP
    if max_length is not None:
        result[lengths >= max_length] = Ending.LENGTH_CAP
    return result


def _counts(op: str, name: str, values: Tensor, limit_name: str, limit: int | None) -> Tensor:
    """`[B]` int64, from 0 to the limit. In a narrower dtype torch would compare with the limit wrapped around."""
    validation.tensor(op, name, values, dtypes=validation.INTEGERS)
    validation.rollouts(op, name, values)
    values = values.to(torch.int64)
    if limit is not None:
        validation.integer(op, limit_name, limit, least=1, most=LARGEST)
    bad = (values < 0) | (values > (LARGEST if limit is None else limit))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        what = "below 0" if values[row] < 0 else f"more than {limit_name} {limit}"
        raise ValueError(f"{op}: {name}[{row}] is {int(values[row])}, {what}")
    return values


def _table(op: str, system: str) -> StatusTable:
    if not isinstance(system, str):
        raise TypeError(f"{op}: system is a {type(system).__name__}; pass the name of a table")
    if system not in SYSTEMS:
        near = validation.did_you_mean(system, SYSTEMS)
        raise ValueError(f"{op}: system is {system!r}{near}; it must be one of {', '.join(SYSTEMS)}")
    return SYSTEMS[system]


@cache
def _by_folded_name(system: str) -> dict[str, Ending]:
    return {name.casefold(): value for name, value in SYSTEMS[system].statuses.items()}


def _ending(op: str, system: str, table: StatusTable, status: Status, strict: bool) -> Ending:
    if not table.statuses:
        raise ValueError(f"{op}: {system} writes no status; {table.note}")
    text = status
    if isinstance(text, enum.Enum):
        text = text.value if isinstance(text.value, str) else text.name
    if text is None and not strict:
        return Ending.UNKNOWN
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{op}: status is a {type(text).__name__}; it must be a text or an enumeration's member")
    if text is not None:
        known, head = _by_folded_name(system), text.partition(":")[0]
        kind = head.rpartition(".")[2] if table.exceptions else ""  # of an exception, without its module
        for name in (text, *filter(None, (head, kind))):
            if name.casefold() in known:
                return known[name.casefold()]
        if kind.endswith(("Error", "Exception")) and head.replace(".", "").isidentifier():
            return Ending.ERROR
        if not strict:
            return Ending.UNKNOWN
    shown = repr(text) if text is None or len(text) <= 80 else repr(text[:80]) + "..."
    valid = ", ".join(repr(name) for name in table.statuses)
    near = validation.did_you_mean(text, table.statuses)
    raise ValueError(
        f"{op}: status is {shown}{near}; {system} writes {valid}; strict=False makes others Ending.UNKNOWN"
    )
