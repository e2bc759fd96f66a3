"""Peak memory of a replay without a model on a dump of one training step: 128 rollouts, 4M tokens."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.harness import Line, write
from fastadv.testing import miles_sample

ROLLOUTS, TOKENS = 128, 32_768
BYTES_PER_TOKEN = 120


def make_dump(path: Path) -> int:
    """Writes a dump as Miles does; returns its response tokens."""
    rng = random.Random(0)
    samples = []
    for index in range(ROLLOUTS):
        mask: list[int] = []
        while len(mask) < TOKENS:
            mask += [1] * rng.randint(100, 900) + [0] * rng.randint(100, 900)
        mask = mask[:TOKENS]
        capped = rng.random() < 0.4
        samples.append(
            miles_sample(
                group_index=index // 8,
                index=index,
                prompt=f"task {index // 8}",
                response="",
                prompt_ids=[rng.randrange(150_000) for _ in range(2000)],
                response_ids=[rng.randrange(150_000) for _ in range(TOKENS)],
                loss_mask=mask,
                rollout_log_probs=[-rng.random() if on else 0.0 for on in mask],
                reward=0.0 if capped else float(rng.random() < 0.5),
                status="truncated" if capped else "completed",
            )
        )
    torch.save({"rollout_id": 0, "samples": samples, "metadata": {}}, path)
    return ROLLOUTS * TOKENS


def peak() -> int:
    """High-water mark of this process, in bytes. (getrusage would count what the parent had before exec.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(paths: list[Path]) -> tuple[int, float]:
    """Bytes that a replay of these dumps adds to the high-water mark, and seconds. Runs in a process of its own."""
    from fastadv.replay.pipeline import ReplayOptions, replay

    before, start = peak(), time.perf_counter()
    result = replay(paths, None, ReplayOptions())
    assert len(result.arms) == 7
    return peak() - before, time.perf_counter() - start


def main() -> None:
    """Measures one dump, then three in turns."""
    if sys.argv[1:]:
        print(*measure([Path(p) for p in sys.argv[1:]]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump.pt"
        tokens = make_dump(path)
        results = []
        for paths in ([path], [path] * 3):
            command = [sys.executable, "-m", "bench.replay_memory", *map(str, paths)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            results.append((int(output[0]), float(output[1])))
        file = path.stat().st_size
    allowed = file + BYTES_PER_TOKEN * tokens
    (one, seconds), (three, seconds_three) = results
    lines = [
        Line(
            "one dump: peak / file + 120 bytes a token (MB for ms)",
            one / 1e9,
            allowed / 1e9,
            one / allowed,
            1.0,
            "floor",
        ),
        Line("three dumps in turns: the same peak", three / 1e9, allowed / 1e9, three / allowed, 1.0, "floor"),
    ]
    details = {
        "tokens": tokens,
        "file bytes": file,
        "bytes a token beside the file": (one - file) / tokens,
        "seconds": seconds,
        "seconds of three": seconds_three,
    }
    if not write("replay_memory", f"replay without a policy, {ROLLOUTS} rollouts, {tokens:,} tokens", lines, details):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
