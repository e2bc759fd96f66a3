"""The emulation that tests of CUDA kernels rely on: samples are right in every order, each planted fault is caught."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cuda_emulation import build

FOLDER = Path(build.__file__).parent
ORDERS = ["forward", "backward", "1", "2"]
PLAIN, ADDRESS, THREAD = None, "address", "thread"
FAULT_PROGRAM = {"sources": [FOLDER / "fault_program.cpp"], "name": "fault_program", "kind": "program"}
SAMPLES = {
    "sources": [FOLDER / "samples.cu", FOLDER / "sample_bindings.cpp"],
    "name": "emulated_samples",
    "kind": "module",
}
CHECKS = {"sources": [FOLDER / "device_checks.cpp"], "name": "device_checks", "kind": "program"}


@pytest.fixture(scope="module")
def built():
    """What the tests need, built from the first test on by two compilers; a test waits for its own."""
    with ThreadPoolExecutor(2) as pool:
        futures: dict[tuple[str, str | None], Future[Path]] = {}

        def path(options: dict, sanitizer: str | None = PLAIN) -> Path:
            if reason := build.missing(sanitizer):
                pytest.skip(reason)
            key = options["name"], sanitizer
            if key not in futures:
                futures[key] = pool.submit(build.build, **options, sanitizer=sanitizer)
            return futures[key].result()

        for sanitizer in (PLAIN, ADDRESS, THREAD):
            if build.missing(sanitizer) is None:
                futures["fault_program", sanitizer] = pool.submit(build.build, **FAULT_PROGRAM, sanitizer=sanitizer)
        yield path


@pytest.fixture
def samples(built: Callable[..., Path]) -> ModuleType:
    return build.load_module(built(SAMPLES))


def run(command: list[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def lines_named(output: str) -> list[str]:
    """The lines of samples.cu in which a sanitizer says that an access is."""
    source = (FOLDER / "samples.cu").read_text().splitlines()
    return [source[int(line) - 1].strip() for line in re.findall(r"#0 .*samples\.cu:(\d+)", output)]


# ---- samples, as a Python test uses a module -------------------------------------------------------------------------


@pytest.fixture(params=ORDERS)
def order(request, monkeypatch) -> str:
    monkeypatch.setenv("CUDA_EMULATION_ORDER", request.param)
    return request.param


STREAM = 7  # any integer: launches are over when they return


def test_row_log_sum_exp(samples: ModuleType, order: str) -> None:
    logits = (3 * torch.randn(5, 1040)).bfloat16()
    out = torch.full((5,), torch.nan)
    samples.row_log_sum_exp(logits.data_ptr(), out.data_ptr(), 5, 1024, 1040, STREAM)
    torch.testing.assert_close(out.double(), logits[:, :1024].double().logsumexp(-1), rtol=0, atol=2e-6)


def test_segment_sums(samples: ModuleType, order: str) -> None:
    lengths = torch.tensor([0, 1, 3, 31, 32, 33, 127, 300, 0, 5])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    values = torch.randn(int(offsets[-1]))
    out = torch.full((10,), torch.nan)
    samples.segment_sums(values.data_ptr(), offsets.data_ptr(), out.data_ptr(), 10, STREAM)
    wanted = torch.segment_reduce(values.double(), "sum", offsets=offsets)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)


def test_total_sum(samples: ModuleType, order: str) -> None:
    values, partial = torch.randn(5000), torch.full((7,), torch.nan)
    finished = torch.zeros(1, dtype=torch.int32)
    for _ in range(2):  # the second finds the counter as the first found it
        out = torch.full((1,), torch.nan)
        samples.total_sum(
            values.data_ptr(), partial.data_ptr(), finished.data_ptr(), out.data_ptr(), values.numel(), 7, STREAM
        )
        torch.testing.assert_close(out[0].double(), values.double().sum(), rtol=0, atol=1e-4)


def test_histogram(samples: ModuleType, order: str) -> None:
    bins = torch.randint(300, (4000,), dtype=torch.int32)
    counts = torch.zeros(300, dtype=torch.int32)
    samples.histogram(bins.data_ptr(), counts.data_ptr(), bins.numel(), 300, 5, STREAM)
    assert counts.tolist() == bins.bincount(minlength=300).tolist()


def test_reverse_warps(samples: ModuleType, order: str) -> None:
    values, out = torch.randn(3, 8, 32), torch.full((3, 8, 32), torch.nan)
    samples.reverse_warps(values.data_ptr(), out.data_ptr(), 3, STREAM)
    assert torch.equal(out, values.flip(-1))


# ---- launches --------------------------------------------------------------------------------------------------------

KIB = 1024


@pytest.mark.parametrize(
    ("grid", "block", "shared", "allowed", "error"),
    [
        (1, 1024, 48 * KIB, 0, None),
        (2, 64, 227 * KIB, 227 * KIB, None),
        (1, 1025, 0, 0, "invalid configuration argument"),
        (0, 32, 0, 0, "invalid configuration argument"),
        (1, 0, 0, 0, "invalid configuration argument"),
        (-1, 32, 0, 0, "invalid configuration argument"),  # 2^32 - 1 blocks
        (1, 32, 64 * KIB, 60 * KIB, "invalid argument"),
        (1, 32, 0, 227 * KIB + 1, "invalid argument"),  # refused by cudaFuncSetAttribute
    ],
)
def test_launch_over_the_limits(
    samples: ModuleType, grid: int, block: int, shared: int, allowed: int, error: str | None
) -> None:
    out = torch.full((1024,), -1, dtype=torch.int32)
    if error is None:
        samples.launch_with(out.data_ptr(), grid, block, shared, allowed, STREAM)
        assert out[: grid * block].tolist() == grid * list(range(block))
        return
    with pytest.raises(RuntimeError, match=error):
        samples.launch_with(out.data_ptr(), grid, block, shared, allowed, STREAM)
    assert (out == -1).all()


def test_shared_memory_over_the_limit_without_asking(samples: ModuleType) -> None:
    bins, counts = torch.zeros(1, dtype=torch.int32), torch.zeros(12 * KIB + 1, dtype=torch.int32)
    samples.histogram(bins.data_ptr(), counts.data_ptr(), 1, 12 * KIB, 1, STREAM)
    assert counts[0] == 1
    with pytest.raises(RuntimeError, match="invalid argument"):
        samples.histogram(bins.data_ptr(), counts.data_ptr(), 1, 12 * KIB + 1, 1, STREAM)
    assert counts[0] == 1


def test_a_planted_error_fails_one_launch(samples: ModuleType) -> None:
    out = torch.full((32,), -1, dtype=torch.int32)
    build.fail_next_launch(samples, 719)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        samples.launch_with(out.data_ptr(), 1, 32, 0, 0, STREAM)
    assert (out == -1).all()
    samples.launch_with(out.data_ptr(), 1, 32, 0, 0, STREAM)
    assert out.tolist() == list(range(32))


def test_an_order_that_is_none(samples: ModuleType, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_EMULATION_ORDER", "sideways")
    with pytest.raises(RuntimeError, match="CUDA_EMULATION_ORDER is forward, backward or a number"):
        samples.launch_with(torch.empty(32, dtype=torch.int32).data_ptr(), 1, 32, 0, 0, STREAM)


# ---- what a machine may lack -----------------------------------------------------------------------------------------


def test_reasons_of_a_skip(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "cuda_include", lambda: None)
    if shutil.which(build.COMPILER):
        assert re.search("no cuda_runtime.h: .*CUDA_HOME", str(build.missing()))
    monkeypatch.setattr(build, "_library", lambda name: Path(name))  # what g++ prints for a library that it lacks
    if shutil.which(build.COMPILER):
        assert re.search(r"has no libtsan\.so", str(build.missing(THREAD)))
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    assert build.missing() == "no C++ compiler no-such-compiler on the PATH"
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        build.build(**CHECKS)


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_where_headers_are_looked_for(monkeypatch, tmp_path: Path, variable: str) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.cuda_include.__wrapped__() is None
    monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / "include").mkdir()
    assert build.cuda_include.__wrapped__() is None
    (tmp_path / "include" / "cuda_runtime.h").touch()
    assert build.cuda_include.__wrapped__() == tmp_path / "include"


# ---- device functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_device_and_runtime_functions(built: Callable[..., Path], order: str) -> None:
    done = run([built(CHECKS)], CUDA_EMULATION_ORDER=order)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize(
    ("kind", "message"),
    list(
        enumerate(
            [
                r"__shfl_sync at \S+:\d+: mask 0x1 lacks lane 1, which calls it",
                r"__shfl_sync at \S+:\d+: width 5 is no power of two up to 32",
                r"__shfl_sync at \S+:\d+: lane 0 reads lane 5, which mask 0x3 lacks",
                r"__ballot_sync at \S+:\d+ with mask 0xff meets lane 0 in __shfl_sync at \S+:\d+ with mask 0xff",
                r"__ballot_sync at \S+:\d+: mask 0xfff names lanes beyond the block's 8",
                r"thread \(7, 0, 0\): __trap at \S+:\d+",
                r"a kernel launches a kernel",
                r"no room for __shared__ one of 4 bytes: 48 KiB at most",
            ]
        )
    ),
)
def test_what_no_device_allows(built: Callable[..., Path], kind: int, message: str) -> None:
    done = run([built(CHECKS), str(kind)])
    assert re.search(message, done.stdout), done


REFUSED = {
    "__global__ void k(unsigned* x) { *x = __activemask(); }": "compute the mask",
    "__global__ void k(long long* x) { atomicAdd(x, 1); }": "atomicAdd takes int, unsigned, unsigned long long",
    "__global__ void k(int* x) { *x = __reduce_or_sync(~0u, *x); }": "take unsigned values",
}


@pytest.mark.slow
@pytest.mark.parametrize("source", REFUSED)
def test_what_does_not_compile(built: Callable[..., Path], tmp_path: Path, monkeypatch, source: str) -> None:
    built(FAULT_PROGRAM)  # or skips
    monkeypatch.setattr(build, "CACHE", tmp_path)
    (tmp_path / "refused.cu").write_text(f"{source}\nvoid launch() {{ k<<<1, 1>>>(nullptr); }}\n")
    with pytest.raises(build.BuildError, match=REFUSED[source]):
        build.build([tmp_path / "refused.cu"], name="refused")


HEADER = """
#pragma once
template <class T>
__device__ T shared_twice(T value) {
  __shared__ T kept;
  if (threadIdx.x == 0) kept = value;
  __syncthreads();
  return kept + kept;
}
template <class T, int count> __global__ void twice(T* out, T value) { out[threadIdx.x] = shared_twice(value); }
"""
SOURCE = """
#include "twice.cuh"
extern "C" __attribute__((visibility("default"))) void run_twice(double* out) {
  twice<double,
        COUNT>
      <<<1, COUNT>>>(out,
                     0.75);
}
"""


def test_a_library_with_a_header_is_built_once(built: Callable[..., Path], tmp_path: Path, monkeypatch) -> None:
    built(FAULT_PROGRAM)  # or skips
    monkeypatch.setattr(build, "CACHE", tmp_path)
    (tmp_path / "twice.cuh").write_text(HEADER)
    (tmp_path / "twice.cu").write_text(SOURCE)
    options = {"name": "twice", "defines": {"COUNT": 33}, "includes": [tmp_path]}
    library = build.build([tmp_path / "twice.cu"], **options)
    out = torch.zeros(33, dtype=torch.float64)
    ctypes.CDLL(str(library)).run_twice(ctypes.c_void_p(out.data_ptr()))
    assert (out == 1.5).all()
    changed = library.stat().st_mtime_ns
    assert build.build([tmp_path / "twice.cu"], **options) == library
    assert library.stat().st_mtime_ns == changed
    (tmp_path / "twice.cuh").write_text(HEADER.replace("kept + kept", "no_such_name"))
    with pytest.raises(build.BuildError, match=r"twice\.cuh:8:.*no_such_name"):
        build.build([tmp_path / "twice.cu"], **options)
    (tmp_path / "twice.cuh").write_text(HEADER)
    (tmp_path / "twice.cu").write_text(SOURCE + "int x = no_such_name;\n")
    with pytest.raises(build.BuildError, match=r"twice\.cu:9:.*no_such_name"):
        build.build([tmp_path / "twice.cu"], **options)


# ---- planted faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_clean_kernels_are_right(built: Callable[..., Path], order: str) -> None:
    assert run([built(FAULT_PROGRAM)], CUDA_EMULATION_ORDER=order).stdout == "right\n"


def test_clean_kernels_under_address_sanitizer(built: Callable[..., Path]) -> None:
    done = run([built(FAULT_PROGRAM, ADDRESS)])
    assert (done.stdout, done.stderr) == ("right\n", "")


@pytest.mark.parametrize("kernel", ["row_log_sum_exp", "segment_sums", "total_sum", "histogram", "reverse_warps"])
def test_clean_kernels_under_thread_sanitizer(built: Callable[..., Path], kernel: str) -> None:
    done = run([built(FAULT_PROGRAM, THREAD), kernel])
    assert (done.stdout, done.stderr) == ("right\n", "")


@pytest.mark.parametrize(
    ("kernel", "fault", "right"),
    [
        # The one who writes is in another warp: in the order of their numbers others read before it.
        ("row_log_sum_exp", "kReadBeforeWrite", {"backward"}),
        ("histogram", "kUninitialised", set()),  # counters start at -1
    ],
)
def test_a_wrong_result_in_some_order(built: Callable[..., Path], kernel: str, fault: str, right: set[str]) -> None:
    results = {order: run([built(FAULT_PROGRAM), kernel, fault], CUDA_EMULATION_ORDER=order).stdout for order in ORDERS}
    assert results == {order: "right\n" if order in right else "wrong result\n" for order in ORDERS}


@pytest.mark.parametrize(
    ("kernel", "fault", "lines"),
    [
        ("row_log_sum_exp", "kReadBeforeWrite", ["sum += buffer[i]", "buffer[warp] = value"]),
        ("row_log_sum_exp", "kWriteBeforeRead", ["buffer[warp] = value", "sum += buffer[i]"]),
        ("total_sum", "kNoFence", ["sum += partial[i]", "partial[blockIdx.x] = sum"]),
        ("total_sum", "kBlockFence", ["sum += partial[i]", "partial[blockIdx.x] = sum"]),
        ("histogram", "kSharedCounter", ["++of_block[bins[i]]", "++of_block[bins[i]]"]),
        ("histogram", "kGlobalCounter", ["counts[i] += of_block[i]", "counts[i] += of_block[i]"]),
        ("reverse_warps", "kShuffleAsBarrier", ["tile[thread - lane + 31 - lane]", "tile[thread] = values"]),
    ],
)
def test_thread_sanitizer_names_both_lines(
    built: Callable[..., Path], kernel: str, fault: str, lines: list[str]
) -> None:
    done = run([built(FAULT_PROGRAM, THREAD), kernel, fault], CUDA_EMULATION_ORDER="forward")
    assert "WARNING: ThreadSanitizer: data race" in done.stderr, done
    first = done.stderr.split("SUMMARY:")[0]
    named = lines_named(first)[:2]
    assert len(named) == 2, first
    assert all(line in name for line, name in zip(lines, named, strict=True)), named


def test_blocks_on_one_os_thread_are_ordered(built: Callable[..., Path]) -> None:
    command = [built(FAULT_PROGRAM, THREAD), "histogram", "kGlobalCounter"]
    assert "data race" in run(command, CUDA_EMULATION_THREADS="2").stderr
    assert run(command, CUDA_EMULATION_THREADS="1").stderr == ""


@pytest.mark.parametrize(
    ("kernel", "fault", "message", "line"),
    [
        ("segment_sums", "kSegmentOffByOne", "heap-buffer-overflow", "offsets[segment + 1]"),
        ("row_log_sum_exp", "kSharedBounds", "use-after-poison", "buffer[warp + kMaxWarps] = value"),
        ("histogram", "kDynamicSharedBounds", "use-after-poison", "of_block[i] = 0"),
        ("segment_sums", "kMisaligned", "misaligned address 0x.* requires 16 byte alignment", "const float4 x"),
        ("row_log_sum_exp", "kIntOverflow", "signed integer overflow: 2 [*] 1073741824", "begin = static_cast<int>"),
    ],
)
def test_address_sanitizer_names_the_line(
    built: Callable[..., Path], kernel: str, fault: str, message: str, line: str
) -> None:
    done = run([built(FAULT_PROGRAM, ADDRESS), kernel, fault])
    assert done.returncode != 0
    assert re.search(message, done.stderr), done
    source = (FOLDER / "samples.cu").read_text().splitlines()
    place = re.search(r"samples\.cu:(\d+)", done.stderr)
    assert place, done
    assert line in source[int(place[1]) - 1]


@pytest.mark.parametrize("sanitizer", [PLAIN, ADDRESS, THREAD])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "kDivergentBarrier",
            r"thread \(95, 0, 0\): divergent barrier: __syncthreads at tests/cuda_emulation/samples.cu:\d+,"
            r" but thread 0 is in __syncthreads at tests/cuda_emulation/samples.cu:\d+\n",
        ),
        (
            "kBarrierNotReached",
            r"block \(\d, 0, 0\): deadlock: 16 threads wait in __syncthreads at tests/cuda_emulation/samples.cu:\d+;"
            r" 80 threads have ended\n",
        ),
        (
            "kDivergentShuffle",
            r"deadlock: 16 threads wait in __shfl_xor_sync at tests/cuda_emulation/samples.cu:\d+;"
            r" 80 threads have ended\n",
        ),
    ],
)
def test_threads_that_do_not_meet(built: Callable[..., Path], fault: str, message: str, sanitizer: str | None) -> None:
    done = run([built(FAULT_PROGRAM, sanitizer), "histogram", fault], CUDA_EMULATION_ORDER="forward")
    assert re.search(message, done.stdout), done
    assert done.stderr == ""


def test_a_full_mask_meets_a_lane_that_has_ended(built: Callable[..., Path]) -> None:
    done = run([built(FAULT_PROGRAM), "histogram", "kDivergentShuffle"], CUDA_EMULATION_ORDER="backward")
    assert re.search(r"__shfl_xor_sync at \S+:\d+: mask 0xffffffff names lane 16, which has ended", done.stdout), done


# ---- in Python, under a sanitizer ------------------------------------------------------------------------------------

IN_PYTHON = """
import sys, torch
from cuda_emulation import build
samples = build.load_module(build.Path({path!r}))
values, out = torch.randn(2, 256), torch.zeros(2, 256)
samples.reverse_warps(values.data_ptr(), out.data_ptr(), 2, 0)
assert torch.equal(out.view(2, 8, 32), values.view(2, 8, 32).flip(-1))
print("clean", file=sys.stderr, flush=True)
{fault}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizer", "fault", "message", "line"),
    [
        (
            ADDRESS,
            "short = torch.empty(300); samples.reverse_warps(values.data_ptr(), short.data_ptr(), 2, 0)",
            "heap-buffer-overflow",
            "out[first + thread]",
        ),
        (
            THREAD,  # the second block reads what the first writes
            "three = torch.zeros(3, 256); samples.reverse_warps(three.data_ptr(), three[1].data_ptr(), 2, 0)",
            "data race",
            "tile[thread] = values[first + thread]",
        ),
    ],
)
def test_a_module_under_a_sanitizer(
    built: Callable[..., Path], sanitizer: str, fault: str, message: str, line: str
) -> None:
    code = IN_PYTHON.format(path=str(built(SAMPLES, sanitizer)), fault=fault)
    environment = {**build.preloaded(sanitizer), "PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
    done = run([sys.executable, "-c", code], **environment)
    clean, _, report = done.stderr.partition("clean\n")
    assert not clean
    assert message in report, done
    assert any(line in named for named in lines_named(report)), report


@pytest.mark.slow
def test_coverage_counts_lines_of_kernels(built: Callable[..., Path], tmp_path: Path) -> None:
    program = built(FAULT_PROGRAM, "coverage")
    assert run([program]).stdout == "right\n"
    notes = next(program.parent.glob("*.gcda"))
    subprocess.run(["gcov", str(notes)], cwd=tmp_path, check=True, capture_output=True)
    lines = (tmp_path / "samples.cu.gcov").read_text().splitlines()
    assert any(re.match(r" +\d+\*?: +\d+: .*sum \+= buffer\[i\];", line) for line in lines)
    assert any(re.match(r" +#####: +\d+: .*\+\+of_block\[bins\[i\]\];", line) for line in lines)  # a fault, not planted


@pytest.mark.slow
def test_nvcc_compiles_the_samples_as_they_are(tmp_path: Path) -> None:
    if (nvcc := shutil.which("nvcc")) is None:
        pytest.skip("no nvcc on the PATH")
    command = [nvcc, "-std=c++17", "-arch=sm_90a", "-c", FOLDER / "samples.cu", "-o", tmp_path / "samples.o"]
    done = run(command)
    assert done.returncode == 0, done.stderr
