"""Where the trainers keep what our hooks call: found by looking, in the layouts of August 2026 and the newer ones."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

# Function: modules that may hold it, the first that does wins.
PLACES = {
    "get_log_probs_and_entropy": (
        "miles.backends.training_utils.loss.hub.logit_processors",
        "miles.backends.training_utils.loss_hub.logit_processors",
        "slime.backends.megatron_utils.loss",
    ),
}


def trainers_function(name: str) -> Callable[..., Any]:
    """A function of the trainer that runs here.

    Raises:
        ImportError: no trainer that is loaded has it, naming where it was looked for.
    """
    loaded = [module for module in PLACES[name] if module.partition(".")[0] in sys.modules]
    for module in loaded:
        try:
            found: Any = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue  # another layout
        return found  # type: ignore[no-any-return]
    raise ImportError(f"no {name} in {', '.join(loaded) or 'Miles or slime, neither of which is loaded here'}")


def accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a function takes: layouts differ in a few."""
    parameters = inspect.signature(function).parameters
    if any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}
