"""How our names come into verl's registries: both of its loaders, twice, and without a verl that could hold them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
from verl_import import verl_module

integration = verl_module("fastadv.integrations.verl")
registration = verl_module("fastadv.integrations.verl.registration")
algos = verl_module("verl.trainer.ppo.core_algos")

NAMES = """
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as registry
print(",".join(name for name in registry if name.startswith("fastadv")))
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, without the settings of this one."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("VERL_USE")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**kept, **environment}, timeout=300
    )


def test_the_module_that_verl_is_told_to_import() -> None:
    found = python(
        f"import verl{NAMES}", VERL_USE_EXTERNAL_MODULES=integration.__name__, VERL_USE_EXTERNAL_PLUGINS="none"
    )
    assert found.stdout.strip().split(",") == list(registration.ESTIMATORS), found.stderr[-2000:]


def test_the_entry_point() -> None:
    (entry,) = [e for e in metadata.entry_points(group="verl.plugins") if e.name == "fastadv"]
    assert entry.load() is integration
    found = python(f"import verl{NAMES}")
    assert found.stdout.strip().split(",") == list(registration.ESTIMATORS), found.stderr[-2000:]


def test_ours_before_verl_and_without_its_loaders() -> None:
    found = python(f"import fastadv.integrations.verl, verl{NAMES}", VERL_USE_EXTERNAL_PLUGINS="none")
    assert found.stdout.strip().split(",") == list(registration.ESTIMATORS), found.stderr[-2000:]
    found = python(f"import verl{NAMES}", VERL_USE_EXTERNAL_PLUGINS="none")
    assert found.stdout.strip() == "", "nobody asked"


def test_fastadv_alone_imports_nothing_of_verl() -> None:
    code = "import sys, fastadv.integrations; print([m for m in ('verl', 'ray', 'tensordict') if m in sys.modules])"
    assert python(code).stdout.strip() == "[]"


def test_a_second_time_changes_nothing() -> None:
    before = dict(algos.ADV_ESTIMATOR_REGISTRY), dict(algos.POLICY_LOSS_REGISTRY)
    found = integration.register()
    assert before == (algos.ADV_ESTIMATOR_REGISTRY, algos.POLICY_LOSS_REGISTRY)
    assert found.estimators == tuple(registration.ESTIMATORS)
    assert all(name.startswith("fastadv") for names in found for name in names), "no name of verl's is taken"
    for name in found.estimators:
        assert algos.get_adv_estimator_fn(name) is registration.ESTIMATORS[name]


def test_a_name_that_another_package_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(algos.ADV_ESTIMATOR_REGISTRY, "fastadv_turn", print)
    with pytest.raises(ValueError, match="fastadv_turn has already been registered"):
        integration.register()


def test_no_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs verl, which is not installed: pip install 'verl>=0\.6'"):
        integration.register()


@pytest.mark.parametrize("text", ["0.5.0", "0.4.1.dev0"])
def test_a_verl_that_is_too_old(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: text)
    with pytest.raises(ImportError, match=f"verl is {text}.*needs 0.6 or later: pip install -U verl"):
        integration.register()


@pytest.mark.parametrize("text", ["0.6.1", "0.9.1", "0.10.0.dev0", "1.0"])
def test_a_verl_that_is_not(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: text)
    assert registration.verl_version() == text


def test_a_checkout_of_verl_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace(__version__="0.5.0", __spec__="there"))
    with pytest.raises(ImportError, match=r"verl is 0\.5\.0"):
        registration.verl_version()


def test_a_failure_that_verl_hides_is_a_warning() -> None:
    """verl logs what a plugin raises at DEBUG, which nobody sees."""
    code = """
import sys, importlib.metadata as m
version = m.version
m.version = lambda name: "0.5.0" if name == "verl" else version(name)
import verl
print("fastadv.integrations.verl" in sys.modules)
"""
    found = python(code)
    assert "RuntimeWarning: fastadv is not registered with verl: verl is 0.5.0" in found.stderr
    assert found.stdout.strip() == "False", found.stderr[-2000:]


def test_without_transfer_queue_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there = registration._is_there
    monkeypatch.setattr(registration, "_is_there", lambda name: name != "transfer_queue" and there(name))
    found = integration.register()
    assert found.trainers == ()
    assert found.estimators


def test_modules_below_what_is_not_there() -> None:
    assert not registration._is_there("verl.nothing.below")
    assert registration._is_there("verl.trainer.ppo.v1")
