"""examples/miles and docs/miles.md: every arm's files load and go together, every hook is there with its signature."""

from __future__ import annotations

import inspect
import re
import shlex
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from fastadv.integrations import miles, slime
from fastadv.integrations.miles.buffer import Decisions
from fastadv.integrations.miles.checks import check_run
from fastadv.integrations.miles.options import Options
from miles_standins import Status, arguments, make

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
FOLDER, PAGE = ROOT / "examples" / "miles", (ROOT / "docs" / "miles.md").read_text()
ARMS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# What each hook is called with, in both layouts and frameworks.
SIGNATURES = {
    "--custom-reward-post-process-path": ("args, samples",),
    "--rollout-sample-filter-path": ("args, data",),
    "--custom-megatron-init-path": ("args",),
    "--custom-advantage-function-path": ("args, rollout_data",),
    "--rollout-data-postprocess-path": ("args, rollout_id, rollout_data", "args"),
    "--custom-loss-function-path": ("args, batch, logits, sum_of_sample_mean",),
    "--custom-pg-loss-reducer-function-path": (
        "total_lengths, response_lengths, loss_masks, calculate_per_token_loss",
    ),
    "--custom-megatron-before-train-step-hook-path": (
        "args, rollout_id, step_id, model, optimizer, opt_param_scheduler",
    ),
    "--custom-rollout-log-function-path": ("rollout_id, args, samples, extra_metrics, rollout_time",),
    "--custom-eval-rollout-log-function-path": ("rollout_id, args, data, extra_metrics",),
}
TIS = ("args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")


def flags_of(arm: str) -> Namespace:
    """The flags of an arm as the trainer's namespace has them, the YAML's mapping among them."""
    words = shlex.split((FOLDER / f"{arm}.flags").read_text())
    given: dict[str, Any] = {}
    while words:
        flag = words.pop(0)
        assert flag.startswith("--"), flag
        value: Any = True
        if words and not words[0].startswith("--"):
            value = words.pop(0)
        given[flag[2:].replace("-", "_")] = yaml.safe_load(value) if isinstance(value, str) else value
    path = ROOT / given.pop("custom_config_path")
    assert path == FOLDER / f"{arm}.yaml"
    return arguments(yaml.safe_load(path.read_text())["fastadv"], **given)


def hook(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("arm", ARMS)
def test_the_files_of_an_arm_go_together(arm: str) -> None:
    args = flags_of(arm)
    options = Options.of(args)
    check_run(args, options)
    if getattr(args, "fully_async", False):
        args.max_weight_staleness = getattr(args, "max_weight_staleness", None)
        Decisions(args)
    ends = (Status.TRUNCATED, Status.COMPLETED, Status.COMPLETED)
    samples = [
        make(float(i % 2), group=i // 4, index=i, turns=1 + i % 3, status=ends[i % 3],
             weight_versions=["1"])
        for i in range(8)
    ]  # fmt: skip
    raw, advantages = miles.reward_post_process(args, samples)
    assert raw == [s.reward for s in samples]
    assert any(advantages)
    for name, value in vars(args).items():
        if name.endswith("_path") and isinstance(value, str) and value.endswith("RescueDataBuffer") is False:
            assert callable(hook(value)), name


def test_every_arm_is_a_command_in_the_docs_and_the_readme() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert ARMS
    for arm in ARMS:
        assert (FOLDER / f"{arm}.flags").exists()
        assert re.search(rf"`python train(_async)?\.py \$\(cat examples/miles/{arm}\.flags\) \.\.\.`", PAGE), arm
        assert re.search(rf"\b{arm}\b", readme), arm
    assert len(ARMS) == len(list(FOLDER.glob("*.flags")))
    asynchronous = {arm for arm in ARMS if "--fully-async" in (FOLDER / f"{arm}.flags").read_text()}
    assert asynchronous == set(re.findall(r"train_async\.py \$\(cat examples/miles/([\w-]+)\.flags", PAGE))


def test_paths_in_the_docs_are_there() -> None:
    found = set(re.findall(r"fastadv\.integrations\.((?:miles|slime)\.\w+)", PAGE))
    assert len(found) >= 7
    for path in found - {"miles.RescueDataBuffer"}:
        assert callable(hook(f"fastadv.integrations.{path}")), path


def test_hooks_take_what_trainers_pass() -> None:
    """The table of hooks in docs/miles.md, against the signatures that the frameworks document."""
    rows = re.findall(r"^\| `(--[\w-]+)` \| `((?:miles|slime)\.\w+)", PAGE, re.M)
    table = dict(rows)
    assert set(SIGNATURES) | {"--custom-async-data-buffer-path", "--custom-tis-function-path"} == set(table)
    table["--rollout-sample-filter-path"] = "miles.mask_truncated_zero_reward"
    for flag, calls in SIGNATURES.items():
        function = hook(f"fastadv.integrations.{table[flag]}")
        for call in calls:
            inspect.signature(function).bind(*call.split(", "))
    for more in ({}, {"parallel_state": None, "max_seq_lens": None}, {"newer": 1}):
        for module in (miles, slime):
            inspect.signature(module.tis).bind(**dict.fromkeys(TIS, 0), **more)
    for name in ("mask_truncated", "mask_random", "mask_predictable"):
        inspect.signature(getattr(slime, name)).bind("args", "data")
    assert set(slime.__all__) >= set(miles.__all__) - {"megatron_init"}


def test_nothing_of_a_framework_is_imported_before_a_hook_is_called() -> None:
    import subprocess
    import sys

    code = (
        "import sys, fastadv.integrations.miles, fastadv.integrations.slime\n"
        "theirs = ('miles', 'slime', 'megatron', 'ray', 'yaml', 'triton')\n"
        "print([name for name in sys.modules if name.partition('.')[0] in theirs])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
