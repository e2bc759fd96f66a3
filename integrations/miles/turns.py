"""Advantages of turns in the trainer.

The rollout process, which has whole groups, computes an advantage for each turn and sends one number a turn along
(`round_number`, which both trainers carry to every rank as it is). A rank knows the loss masks of its samples, so it
knows which tokens each number is for. Miles: `--custom-megatron-init-path fastadv.integrations.miles.megatron_init`.
slime: `--custom-advantage-function-path fastadv.integrations.slime.advantage`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fastadv.integrations.miles.context_parallel import Place, local_spans, local_tokens, place
from fastadv.integrations.miles.options import Options
from fastadv.integrations.miles.reward import TURN_ADVANTAGES
from torch import Tensor

from fastadv import turn_ids_from_mask

logger = logging.getLogger(__name__)

ACTOR = "miles.backends.megatron_utils.actor"
SEAM = "compute_advantages_and_returns"  # looked up in the actor's module at every call
CARRIER = "round_number"


def megatron_init(args: Any) -> None:
    """`--custom-megatron-init-path` of Miles: with `fastadv.turns: init`, advantages of turns reach the loss.

    Called once on every rank before the model is built. It puts a function around the one with which Miles computes
    advantages; a second time changes nothing.

    Raises:
        ValueError: `fastadv.turns` is something else, so that there is nothing to do.
        AttributeError: this Miles computes advantages somewhere else.
    """
    options = Options.of(args)
    if options.turns != "init":
        raise ValueError(
            "--custom-megatron-init-path fastadv.integrations.miles.megatron_init is for fastadv.turns: init, and it "
            f"is {options.turns}"
        )
    actor: Any = importlib.import_module(ACTOR)
    if not hasattr(actor, SEAM):
        raise AttributeError(
            f"{ACTOR} has no {SEAM}: this Miles computes advantages elsewhere; fastadv.turns: flags does without it"
        )
    found = getattr(actor, SEAM)
    if not getattr(found, "of_turns", False):
        setattr(actor, SEAM, _of_turns(found))
        logger.info("fastadv: advantages of turns after %s.%s", ACTOR, SEAM)


def _of_turns(function: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    @functools.wraps(function)
    def compute(args: Any, rollout_data: dict[str, Any]) -> None:
        function(args, rollout_data)
        apply_turn_advantages(rollout_data, place())

    compute.of_turns = True  # type: ignore[attr-defined]
    return compute


def apply_turn_advantages(rollout_data: dict[str, Any], place: Place) -> None:
    """Replaces each sample's own advantage by those of its turns; what else was added to advantages stays.

    Args:
        rollout_data: the trainer's, of one rank: `advantages` and `returns`, lists of `[C_i]` tensors where this rank
            holds C_i of R_i response tokens; `rewards`, `loss_masks` (`[R_i]`), `response_lengths`, `total_lengths`,
            and `round_number` from the reward hook, which is taken out. Without advantages (an earlier pipeline stage)
            that is all.
        place: this rank's part of the sequences.

    Raises:
        ValueError: no advantages of turns came along, or a mask has other runs than the reward hook saw.
    """
    carried = rollout_data.pop(CARRIER, None)
    if rollout_data.get("advantages") is None:
        return
    local = turn_advantages_of(rollout_data, carried, place)
    advantages, returns = [], []
    for old, new, reward in zip(rollout_data["advantages"], local, rollout_data["rewards"], strict=True):
        new = new.to(old.device, old.dtype)
        added = old - torch.as_tensor(reward, dtype=old.dtype, device=old.device)  # 0, but for on-policy distillation
        advantages.append(new + added)
        returns.append(new + added)
    rollout_data["advantages"], rollout_data["returns"] = advantages, returns


def turn_advantages_of(rollout_data: dict[str, Any], carried: Any, place: Place) -> list[Tensor]:
    """Advantages of turns at this rank's tokens, float32 `[C_i]`; 0 outside of the masks.

    Raises:
        ValueError: as of `apply_turn_advantages`.
    """
    masks, totals, lengths = (rollout_data[name] for name in ("loss_masks", "total_lengths", "response_lengths"))
    widths = rollout_data.get("max_seq_lens") or [None] * len(lengths)
    values = _carried(carried, len(lengths))
    tokens = spread_over_turns(values, [torch.as_tensor(mask) for mask in masks])
    return [
        local_tokens(whole, local_spans(int(total), int(length), place, width=width))
        for whole, total, length, width in zip(tokens, totals, lengths, widths, strict=True)
    ]


def _carried(carried: Any, samples: int) -> list[list[float]]:
    if carried is None or len(carried) != samples:
        raise ValueError(
            "no advantages of turns came from the rollout process: --custom-reward-post-process-path "
            "fastadv.integrations.miles.reward_post_process sends them with fastadv.turns: init, and a custom "
            "converter has to keep round_number"
        )
    found = []
    for row, item in enumerate(carried):
        values = item.get(TURN_ADVANTAGES) if isinstance(item, dict) else None
        if values is None:
            raise ValueError(
                f"sample {row}: round_number is {item!r}, and not what fastadv's reward hook sends; something else "
                "writes metadata['round_number']"
            )
        found.append(list(values))
    return found


def spread_over_turns(values: Sequence[Sequence[float]], masks: Sequence[Tensor]) -> list[Tensor]:
    """Numbers of turns at the tokens of the runs of masks.

    Args:
        values: a number for each run of ones of each sample.
        masks: `[R_i]` each, zeros and ones.

    Returns:
        float32 `[R_i]` each, 0 outside of the runs.

    Raises:
        ValueError: another number of runs than of values; a mask of zeros goes with any number of them, since a filter
            removes samples after the hook.
    """
    lengths = [mask.shape[0] for mask in masks]
    if not sum(lengths):
        return [torch.zeros(0, device=mask.device) for mask in masks]
    packed = torch.cat(list(masks))  # [N]
    device = packed.device
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device)
    turns = turn_ids_from_mask(packed, cu_seqlens)  # [N]
    row = torch.repeat_interleave(torch.arange(len(lengths), device=device), cu_seqlens.diff())  # [N]
    reached = torch.zeros(len(lengths), dtype=torch.int64, device=device)
    runs = reached.scatter_reduce(0, row, turns.to(torch.int64) + 1, "amax").tolist()
    for i, (count, given) in enumerate(zip(runs, values, strict=True)):
        if count not in (0, len(given)):
            raise ValueError(
                f"sample {i}: its loss_mask has {count} turns here and had {len(given)} when advantages were computed; "
                "--mask-offpolicy-in-partial-rollout and others that edit masks after the reward hook do not go with "
                "advantages of turns"
            )
    begins = torch.tensor([0, *(len(given) for given in values)]).cumsum(0)[:-1].to(device)  # [S]
    table = torch.tensor([x for given in values for x in given] + [0.0], dtype=torch.float32, device=device)
    at = torch.where(turns >= 0, begins[row] + turns, table.shape[0] - 1)
    return list(torch.split(table[at], lengths))
