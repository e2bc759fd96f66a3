"""slime drop-in: the hooks of `fastadv.integrations.miles` under slime's flags, and those that only slime has
(docs/miles.md). Nothing of slime is imported before a hook is called.
"""

from typing import Any

import torch
from fastadv.integrations.miles import (
    Options,
    before_train_step,
    custom_loss,
    eval_rollout_log,
    mask_predictable,
    mask_random,
    mask_truncated,
    mask_truncated_zero_reward,
    pg_loss_reducer,
    reward_post_process,
    rollout_log,
    tis,
)
from fastadv.integrations.miles.context_parallel import place
from fastadv.integrations.miles.turns import CARRIER, apply_turn_advantages, turn_advantages_of

__all__ = [
    "Options",
    "advantage",
    "before_train_step",
    "custom_loss",
    "eval_rollout_log",
    "mask_predictable",
    "mask_random",
    "mask_truncated",
    "mask_truncated_zero_reward",
    "pg_loss_reducer",
    "reward_post_process",
    "rollout_data_postprocess",
    "rollout_log",
    "tis",
]


def advantage(args: Any, rollout_data: dict[str, Any]) -> None:
    """`--custom-advantage-function-path`: sets `advantages` and `returns`, lists of tensors like those in `kl`.

    With `fastadv.turns: init` they are the advantages of turns; else a sample's number is that of all of its tokens, as
    in slime's own grpo.

    Args:
        args: slime's namespace.
        rollout_data: of one rank.

    Raises:
        ValueError: `fastadv.turns: init`, and no advantages of turns came from the reward hook.
    """
    kl = rollout_data["kl"]
    carried = rollout_data.pop(CARRIER, None)
    if Options.of(args).turns == "init":
        local = turn_advantages_of(rollout_data, carried, place())
        found = [new.to(own.device, torch.float32) for new, own in zip(local, kl, strict=True)]
    else:
        rewards = rollout_data["rewards"]
        found = [torch.full_like(own, float(r), dtype=torch.float32) for own, r in zip(kl, rewards, strict=True)]
    rollout_data["advantages"], rollout_data["returns"] = found, [values.clone() for values in found]


def rollout_data_postprocess(args: Any, rollout_id: Any = None, rollout_data: dict[str, Any] | None = None) -> None:
    """`--rollout-data-postprocess-path` of slime: advantages of turns where `advantage` is not the advantage function.

    Raises:
        ValueError: Miles calls a function of this flag without any data.
    """
    if rollout_data is None:
        raise ValueError(
            "--rollout-data-postprocess-path passes no data in Miles; use --custom-megatron-init-path "
            "fastadv.integrations.miles.megatron_init"
        )
    if Options.of(args).turns == "init":
        apply_turn_advantages(rollout_data, place())
