"""verl for tests: imported without the warnings of what it does not find, or the test file skips."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from types import ModuleType

import pytest


def verl_module(name: str) -> ModuleType:
    """A module of verl, of what it needs, or of fastadv's integration."""
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed: pip could not reach it", allow_module_level=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
