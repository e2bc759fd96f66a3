"""Every CUDA kernel on the smallest batches that take two blocks or more, compared with the C++ kernels: for a process
of its own, under ThreadSanitizer, which is slow.

    python tests/cuda_small_runs.py [name of a run]...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import conftest  # noqa: F401 - the kernels are those that were compiled for the CPU
from triton_batches import batch

import fastadv as fa
from fastadv.groups import group_index
from fastadv.ops import _logits
from fastadv.ops import moments as moment_ops
from fastadv.ops import sequence_log_ratios as ratios
from fastadv.ops._policy_loss_kernel import SCALE_GRADIENT

BLOCK = 2048  # kTurnIdsBlock
Run = Callable[[str], Iterable[Tensor]]


def segment_tokens(backend: str) -> Iterable[Tensor]:
    turns = (torch.arange(3 * 1024, dtype=torch.int32) % 1024 // 8).view(3, 1024)
    table = fa.SegmentTable(torch.arange(3.0 * 128), fa.segments(turns, backend="cpu"))
    yield fa.segment_tokens(table, backend=backend)


def turn_ids(backend: str) -> Iterable[Tensor]:
    mask, cu_seqlens = batch((5, BLOCK, 0, 4 * BLOCK + 9))  # the last row's runs lie in several blocks
    yield fa.turn_ids_from_mask(mask, cu_seqlens, backend=backend)


def counts(backend: str) -> Iterable[Tensor]:
    for lengths in ((7, 0, 9) * 30, (300,) * 17, (10 * 4096,)):  # threads of a row: 8, 32, several blocks
        mask, cu_seqlens = batch(lengths)
        yield fa.token_counts(mask, cu_seqlens, backend=backend)
        yield fa.segments(mask.int() - 1, cu_seqlens, backend=backend).offsets


def groups(rows: int) -> tuple[Tensor, fa.GroupIndex, fa.Segments]:
    """Rewards, two groups, and turns: as many rows as give a group few threads, or many."""
    lengths = torch.arange(rows) % 5 + 30
    ids = torch.cat([torch.arange(int(n), dtype=torch.int32) for n in lengths])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    index = fa.Segments(ids, offsets, offsets, int(offsets[-1]))
    return torch.randn(rows, dtype=torch.float64), group_index(torch.arange(rows) % 2), index


def moments(backend: str) -> Iterable[Tensor]:
    for rows in (8, 514):
        rewards, index, turns = groups(rows)
        given = (rewards, torch.ones_like(rewards), index)
        found = moment_ops.group_moments(*given, backend)
        yield from found
        yield from moment_ops.turn_moments(*given, turns, moment_ops.group_moments(*given, "cpu").minimum, backend)


def advantages(backend: str) -> Iterable[Tensor]:
    for rows in (5, 514):
        rewards, index, turns = groups(rows)
        frozen = fa.freeze_statistics(rewards, index, turn_ids=turns, backend="cpu")
        for statistics in (None, frozen):
            options: dict[str, Any] = {"scale": "std", "statistics": statistics, "backend": backend}
            yield fa.group_advantages(rewards, index, **options)
            yield fa.turn_advantages(rewards, index, turns, output="segments", **options).values


def log_ratios(backend: str) -> Iterable[Tensor]:
    for lengths in ((90, 0, 5) * 4, (2100, 1700)):  # a warp a row; a block, or several
        for part in (2**40, 600):
            ratios.PART = part
            mask, cu_seqlens = batch(lengths)
            old, new = torch.randn(2, sum(lengths))
            old[::7] = torch.nan
            yield from fa.sequence_log_ratios(new, old, mask, cu_seqlens, missing="skip", backend=backend)


def policy_loss(backend: str) -> Iterable[Tensor]:
    old, new, ref = torch.randn(3, 3, 1000)
    mask = torch.rand(3, 1000) < 0.9
    for config in (fa.LossConfig(), fa.LossConfig("gspo", sequence_gradient="mean", kl=fa.KL("k3", 0.1))):
        leaf = new.clone().requires_grad_()
        given = {"ref_log_probs": ref} if config.kl else {}
        out = fa.policy_loss(leaf, old, torch.randn(3, 1000), mask, config=config, **given, backend=backend)
        (2 * out.loss).backward()
        yield from (out.loss.detach(), leaf.grad, *out.metrics.values())
    gradient = torch.ones(3000)
    SCALE_GRADIENT(backend, gradient, torch.tensor(2.0))
    yield gradient


def log_probs(backend: str) -> Iterable[Tensor]:
    for vocab, labels in ((1030, (3, 1029)), (32_768 + 8, (5, 32_770))):  # a block a row; two
        logits = torch.randn(2, vocab)
        given = (logits, torch.tensor(labels))
        *found, state = _logits.log_probs(backend, *given, 1.0, 0.0, True)
        yield from found
        yield from _logits.finish(backend, torch.stack([_logits.row_statistics(backend, *given)] * 2))
        yield _logits.logits_gradient(backend, *given, *state, *torch.ones(3, 2), out=logits)


def gradients(backend: str) -> Iterable[Tensor]:
    yield fa.multi_dot_gram([torch.randn(17_000) for _ in range(3)], backend=backend)
    yield fa.gradproj.count_sketch(torch.randn(70, 75), 64, column_offset=5, copies=2, backend=backend)


RUNS: dict[str, Run] = {
    run.__name__: run
    for run in (segment_tokens, turn_ids, counts, moments, advantages, log_ratios, policy_loss, log_probs, gradients)
}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names or RUNS:
        found = []
        for backend in ("cuda", "cpu"):
            torch.manual_seed(0)
            found.append(list(RUNS[name](backend)))
        for mine, right in zip(*found, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5, equal_nan=True)
        print(name, "right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
