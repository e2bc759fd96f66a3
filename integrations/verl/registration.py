"""What verl finds under our names: estimators, losses and trainers, put into its registries."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import warnings
from importlib import metadata
from typing import NamedTuple

from fastadv.integrations.verl import agent, estimators

ESTIMATORS = {**estimators.REGISTERED, **agent.REGISTERED}
PACKAGE = "fastadv.integrations.verl"
OLDEST = (0, 6)  # the first that takes any name for estimators


class Registered(NamedTuple):
    """Names that verl knows after `register`.

    Attributes:
        estimators: of algorithm.adv_estimator.
        losses: of actor_rollout_ref.actor.policy_loss.loss_mode.
        trainers: of trainer.v1.trainer_mode; none where verl has no V1 trainer, or TransferQueue is not installed.
    """

    estimators: tuple[str, ...]
    losses: tuple[str, ...]
    trainers: tuple[str, ...]


def verl_version() -> str:
    """The version of verl.

    Raises:
        ImportError: verl is not installed, or too old.
    """
    if importlib.util.find_spec("verl") is None:
        raise ImportError(f"{PACKAGE} needs verl, which is not installed: pip install 'verl>=0.6'", name="verl")
    try:
        text = metadata.version("verl")
    except metadata.PackageNotFoundError:  # a checkout on the path
        text = str(importlib.import_module("verl").__version__)
    if tuple(map(int, re.findall(r"\d+", text)[:2])) < OLDEST:
        raise ImportError(
            f"verl is {text}, whose trainer takes no estimators but its own; {PACKAGE} needs 0.6 or later: "
            "pip install -U verl",
            name="verl",
        )
    return text


def register() -> Registered:
    """Puts our estimators, losses and trainers into verl's registries, beside its own. A second time changes nothing.

    Raises:
        ImportError: verl is not installed, or too old.
        ValueError: another package holds one of our names.
    """
    verl_version()
    from verl.trainer.ppo import core_algos

    for name, function in ESTIMATORS.items():
        core_algos.register_adv_est(name)(function)
    losses = _part("policy_losses", "POLICY_LOSSES")
    for name, loss in losses.items():
        core_algos.register_policy_loss(name)(loss)
    if os.environ.get("VERL_ENGINE_VENDOR") == "fastadv":
        importlib.import_module(f"{PACKAGE}.engine")  # which registers itself
    v1 = _is_there("verl.trainer.ppo.v1") and _is_there("transfer_queue")
    trainers = _part("trainer", "TRAINERS") if v1 else {}  # which its import registers
    return Registered(tuple(ESTIMATORS), tuple(losses), tuple(trainers))


def _part(module: str, table: str) -> dict[str, object]:
    """A table of names in a module of this package."""
    name = f"{PACKAGE}.{module}"
    return dict(getattr(importlib.import_module(name), table)) if _is_there(name) else {}


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def register_as_plugin() -> None:
    """`register`, for the import of the package. verl hides what a plugin raises, so a warning says it too."""
    called_by_verl = "verl" in sys.modules
    try:
        register()
    except Exception as error:
        if called_by_verl:
            warnings.warn(f"fastadv is not registered with verl: {error}", RuntimeWarning, stacklevel=2)
        raise
