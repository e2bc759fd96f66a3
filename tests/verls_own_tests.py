"""Runs verl's own CPU tests with fastadv's functions in place of verl's: `make test-verl`.

The tests come from the source archive of the installed version, which pip fetches. Prints how many passed in each file,
and how often each of our functions was called: a file that calls none proves nothing about them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

BUILD = Path(__file__).parents[1] / "build" / "verl"
# Files of verl's tests that come near what we replace.
FILES = (
    "trainer/ppo/test_core_algos_on_cpu.py", "trainer/ppo/test_loss_aggregation_on_cpu.py",
    "trainer/ppo/test_value_loss_normalization_on_cpu.py", "trainer/ppo/test_reinforce_pp_multiturn_on_cpu.py",
    "trainer/ppo/test_dynamic_policy_losses_on_cpu.py", "trainer/test_multi_trajectories_advantage_on_cpu.py",
    "trainer/ppo/test_rollout_corr.py", "trainer/ppo/test_rollout_corr_integration.py",
    "trainer/ppo/test_metric_utils_on_cpu.py",
)  # fmt: skip
PLUGIN = "verl_accelerated"


def fetched() -> Path:
    """The folder with verl's tests."""
    version = metadata.version("verl")
    archive = BUILD / f"verl-{version}.tar.gz"
    folder = BUILD / f"verl-{version}"
    if not folder.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            "verl",
            f"verl=={version}",
        ]
        subprocess.run([*pip, "--dest", str(BUILD)], check=True)
        with tarfile.open(archive) as opened:
            opened.extractall(BUILD, [m for m in opened if m.name.startswith(f"{folder.name}/tests/")], filter="data")
    return folder / "tests"


def main() -> int:
    """Exit status: 0 if every file passes."""
    tests = fetched()
    (BUILD / f"{PLUGIN}.py").write_text(PLUGIN_SOURCE)
    environment = {**os.environ, "PYTHONPATH": str(BUILD), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    failed = 0
    for file in FILES:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            os.devnull,
            "-p",
            PLUGIN,
            "--rootdir",
            str(tests),
            str(tests / file),
        ]
        found = subprocess.run(command, cwd=BUILD, capture_output=True, text=True, env=environment)
        summary = re.findall(r"^.*(?:passed|failed|error).* in .*$", found.stdout, re.MULTILINE)
        calls = re.findall(r"^calls: (.*)$", found.stdout, re.MULTILINE)
        print(f"{file}: {summary[-1].strip('= ') if summary else 'nothing ran'}; {calls[-1] if calls else 'no calls'}")
        if found.returncode:
            failed += 1
            print(found.stdout[-4000:], found.stderr[-2000:])
    return int(failed > 0)


PLUGIN_SOURCE = '''
"""fastadv's functions in the place of verl's, each counting its calls."""
import functools
from collections import Counter

calls = Counter()


def counted(name, function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        calls[name] += 1
        return function(*args, **kwargs)

    return call


def pytest_configure(config):
    from fastadv.integrations.verl import accelerate, advantage_functions, loss_functions

    for module in (advantage_functions, loss_functions):
        for name, value in list(vars(module).items()):
            if callable(value) and (name.startswith("compute_") or name in ("agg_loss", "kl_penalty")):
                setattr(module, name, counted(name, value))
    import verl.trainer.ppo.ray_trainer
    import verl.workers.utils.losses

    accelerate(only_faster=False)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line("calls: " + ", ".join(f"{name} {n}" for name, n in sorted(calls.items())))
'''

if __name__ == "__main__":
    sys.exit(main())
