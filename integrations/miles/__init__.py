"""Miles drop-in: hooks that its flags name, `--custom-reward-post-process-path
fastadv.integrations.miles.reward_post_process` and so on (docs/miles.md). Nothing of Miles is imported before a hook is
called.
"""

from typing import Any

from fastadv.integrations.miles.corrections import pg_loss_reducer, tis
from fastadv.integrations.miles.filters import (
    mask_predictable,
    mask_random,
    mask_truncated,
    mask_truncated_zero_reward,
)
from fastadv.integrations.miles.losses import custom_loss
from fastadv.integrations.miles.options import Options
from fastadv.integrations.miles.projections import before_train_step
from fastadv.integrations.miles.records import eval_rollout_log, rollout_log
from fastadv.integrations.miles.reward import reward_post_process
from fastadv.integrations.miles.turns import megatron_init

__all__ = [
    "Options",
    "before_train_step",
    "custom_loss",
    "eval_rollout_log",
    "mask_predictable",
    "mask_random",
    "mask_truncated",
    "mask_truncated_zero_reward",
    "megatron_init",
    "pg_loss_reducer",
    "reward_post_process",
    "rollout_log",
    "tis",
]


def __getattr__(name: str) -> Any:
    """`RescueDataBuffer` when it is asked for: it is made of a class of Miles."""
    if name != "RescueDataBuffer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastadv.integrations.miles.buffer import rescue_data_buffer

    return rescue_data_buffer()
