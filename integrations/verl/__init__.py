"""verl drop-in: importing this package puts estimators, losses and trainers named `fastadv_*` into verl's registries.

verl 0.9 and later import it by themselves (entry-point group `verl.plugins`); for 0.6 to 0.8 set
`VERL_USE_EXTERNAL_MODULES=fastadv.integrations.verl` in the environment of every process.
`FASTADV_VERL_ACCELERATE=1` also replaces verl's own functions by equal ones, which `accelerate` describes.
"""

from typing import Any

from fastadv.integrations.verl.accelerate import accelerate, accelerate_if_asked, restore
from fastadv.integrations.verl.registration import Registered, register, register_as_plugin

__all__ = ["PolicyLossConfig", "Registered", "accelerate", "register", "restore"]


def __getattr__(name: str) -> Any:
    """`PolicyLossConfig` when it is asked for: it is made of a class of verl, and where verl is missing the import of
    this package says how to get it."""
    if name != "PolicyLossConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastadv.integrations.verl.policy_loss_config import PolicyLossConfig

    return PolicyLossConfig


register_as_plugin()
accelerate_if_asked()
