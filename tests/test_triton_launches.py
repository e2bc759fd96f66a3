"""What ops launch is what their modules list, and so what the compiler's gate has seen."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
from fastadv.triton_kernels.segments import segment_tokens
from launch_recorder import form, launches, never_launched, unlisted
from torch._subclasses.fake_tensor import FakeTensorMode

import fastadv as fa
from bench import kernel_registry
from fastadv import dispatch


def segment_calls() -> Iterator[Callable[[], object]]:
    for packed, masked, integers in itertools.product((True, False), (True, False), (torch.int32, torch.int64)):
        turn_ids = torch.tensor([0, -1, 1, 0, 0, 1], dtype=integers)
        cu_seqlens = torch.tensor([0, 3, 6]) if packed else None
        segments = fa.segments(turn_ids if packed else turn_ids.view(2, 3), cu_seqlens)
        mask = torch.ones_like(segments.turn_ids, dtype=torch.bool) if masked else None
        for dtype in (torch.float32, torch.float64):
            table = fa.SegmentTable(torch.arange(segments.count, dtype=dtype), segments)
            yield lambda table=table, mask=mask: fa.segment_tokens(table, mask, backend="triton")


def test_segments() -> None:
    found = launches(segment_calls())
    assert len(found) == 16
    assert unlisted(found) == []
    assert never_launched(found, ["fastadv.triton_kernels.segments"]) == []


def test_a_launch_that_no_module_lists_is_noticed() -> None:
    (entry, *_) = kernel_registry.entries("fastadv.triton_kernels.segments")
    listed = entry.configuration
    changed = type(listed)(**{**vars(listed), "constants": (*listed.constants[:-1], ("BAD", 3))})
    unaligned = type(listed)(**{**vars(listed), "aligned": ()})
    assert unlisted([listed, unaligned, changed, changed]) == [form(changed)]
    missing = never_launched([unaligned], [entry.module])
    assert len(missing) == 15
    assert entry.name not in missing


def test_what_no_kernel_can_read_is_refused() -> None:
    """As the C++ kernels refuse it. Triton would read what lies at any address: numbers of the wrong sign, say."""
    values, offsets, cu_seqlens = torch.ones(2), torch.tensor([0, 2]), torch.tensor([0, 3])
    turn_ids, tokens = torch.tensor([0, 1, -1]), torch.empty(3)

    def take(values: torch.Tensor) -> None:
        segment_tokens(values, offsets, turn_ids, cu_seqlens, None, tokens)

    with pytest.raises(ValueError, match=r"pass t.resolve_neg\(\)"):
        take(torch._neg_view(values))
    with FakeTensorMode() as mode, pytest.raises(TypeError, match="cannot read a FakeTensor"):
        take(mode.from_tensor(values))
    with pytest.raises(TypeError, match="without memory"):
        take(torch.ones(2, device="meta"))
    take(values)
    assert tokens.tolist() == [1, 1, 0]


def test_threads_take_turns_in_the_interpreter() -> None:
    """It keeps the program that runs in globals of Triton."""
    masks = [torch.ones(2, length, dtype=torch.bool) for length in range(1, 9)]
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda mask: fa.token_counts(mask, backend="triton").tolist(), masks))
    assert counts == [[length] * 2 for length in range(1, 9)]


@pytest.mark.parametrize("value", ["", "0", "1", "false", "False", "no", "off", "true", "on", "Yes", "y", "2"])
def test_kernels_are_interpreted_where_triton_says_so(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dispatch.interpreting()
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert dispatch._asks_for_interpreter() == triton.knobs.runtime.interpret
    assert dispatch.interpreting() == before  # it was settled when triton was imported
    late = "TRITON_INTERPRET is not what it was when triton was imported"
    assert fa.backends()["triton"].startswith(late if triton.knobs.runtime.interpret != before else "available")


def test_asking_for_the_interpreter_too_late() -> None:
    code = """
import os, triton, torch
os.environ["TRITON_INTERPRET"] = "1"
import fastadv as fa
try:
    fa.token_counts(torch.ones(3, dtype=torch.bool), backend="triton")
except fa.BackendUnavailableError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("token_counts: backend 'triton' cannot run: TRITON_INTERPRET is not what it was when")
