"""Helpers for tests, examples and benchmarks: rollouts in trainers' formats, and the memory that a call takes."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def peak_memory_rise(run: Callable[[], object], *, times: int = 1) -> int:
    """How far the resident memory of this process rises above where it is now while `run` runs.

    What the allocator keeps of freed memory goes back to the system first: `run` would be given it again, and nothing
    would seem to have been taken.

    Args:
        run: what is measured.
        times: how often. What it needs it takes each time; what others take meanwhile, it does not.

    Returns:
        Bytes, the least of all times.

    Raises:
        OSError: the system has no `/proc/self/clear_refs` (Linux has), so the peak cannot be set back.
    """

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    rises = []
    for _ in range(times):
        gc.collect()
        if trim is not None:
            trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        run()
        rises.append(resident("VmHWM") - before)
    return min(rises)


def miles_sample(
    *,
    group_index: int,
    index: int,
    prompt: str,
    response: str,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    loss_mask: Sequence[int],
    rollout_log_probs: Sequence[float] | None,
    reward: float | None,
    status: str = "completed",
    metadata: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One rollout as an entry of the `samples` list that Miles' and slime's `--save-debug-rollout-data` write.

    Args:
        group_index, index: numbers of the prompt and of the rollout.
        prompt, response: text.
        prompt_ids, response_ids: token ids.
        loss_mask: one int a response token, 1 where the model sampled it.
        rollout_log_probs: one float a response token, 0.0 where it was not sampled.
        reward: None where the rollout has no result.
        status: "completed", "truncated", "aborted", "failed" or "pending".
        metadata: free, `exit_status` says why an agent stopped.

    Returns:
        A dictionary of plain objects, as `Sample.to_dict` gives it; save `{"rollout_id", "samples", "metadata"}` with
        `torch.save`.
    """
    return {
        "group_index": group_index,
        "index": index,
        "prompt": prompt,
        "tokens": [*prompt_ids, *response_ids],
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": response,
        "response_length": len(response_ids),
        "label": None,
        "reward": reward,
        "loss_mask": list(loss_mask),
        "weight_versions": [],
        "rollout_log_probs": None if rollout_log_probs is None else list(rollout_log_probs),
        "rollout_routed_experts": None,
        "remove_sample": False,
        "teacher_log_probs": None,
        "status": status,
        "metadata": dict(metadata or {}),
        "generate_function_path": None,
        "train_metadata": None,
        "non_generation_time": 0.0,
        "spec_info": {},
        "prefix_cache_info": {},
    }
