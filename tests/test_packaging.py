"""What importing costs, which build runs, and what happens where one cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastadv as fa
from fastadv import native

RUN_AN_OP = """
import warnings, torch, fastadv as fa
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    out = [fa.group_advantages(torch.tensor([1.0, 0.0]), [0, 0]).tolist() for _ in range(2)]
print(out[1], fa.last_backend(), len(caught), *(str(w.message) for w in caught))
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_importing_loads_neither_a_compiler_nor_a_kernel() -> None:
    # torch._dynamo loads triton where that is installed, and takes a second of its own.
    compilers = "m.split('.')[0] == 'triton' or m == 'torch._dynamo'"
    unwanted = f"{compilers} or m.startswith(('fastadv._cpu', 'fastadv.triton_kernels'))"
    code = f"import sys, fastadv; print([m for m in sys.modules if {unwanted}])"
    assert python(code).stdout.strip() == "[]"


def test_importing_loads_nothing_that_only_replay_needs() -> None:
    heavy = "{'transformers', 'matplotlib', 'typer', 'rich', 'safetensors', 'jinja2'}"
    new = "set(sys.modules) - before"
    code = f"import torch, sys; before = set(sys.modules); import fastadv; print(sorted(({new}) & {heavy}))"
    assert python(code).stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in fa.__all__:
        assert getattr(fa, name).__doc__ or name in ("ARMS", "ESTIMATORS", "PRESETS"), name  # mappings of values


@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
def test_every_instruction_set_gives_the_same_bits(isa: str) -> None:
    best = native.INSTRUCTION_SETS.index(native.module().best_instruction_set())
    if native.INSTRUCTION_SETS.index(isa) > best:
        refused = python(RUN_AN_OP, FASTADV_CPU_ISA=isa, FASTADV_BACKEND="cpu")
        assert f"this processor runs {native.INSTRUCTION_SETS[best]} at most" in refused.stderr
        return
    code = """
import hashlib, torch, fastadv as fa
g = torch.Generator().manual_seed(0)
n, digest = 70_003, hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    log_probs = (-3 * torch.rand(n, generator=g)).to(dtype).requires_grad_()
    old = (log_probs.detach().float() + torch.randn(n, generator=g)).to(dtype)
    mask = torch.rand(n, generator=g) < 0.7
    advantages = torch.randn(n, generator=g).to(dtype)
    out = fa.policy_loss(log_probs, old, advantages, mask, config=fa.LossConfig(dual_clip=3.0), backend="cpu")
    out.loss.backward()
    for t in (out.loss.detach(), log_probs.grad.float(), *out.metrics.values()):
        digest.update(t.numpy().tobytes())
rewards, ids = torch.randn(64, generator=g), torch.arange(64) % 8
turns = fa.turn_ids_from_mask(mask[:64 * 1000].view(64, 1000), backend="cpu")
digest.update(fa.turn_advantages(rewards, ids, turns, scale="std", backend="cpu").numpy().tobytes())
vectors = [torch.randn(9999, generator=g) for _ in range(7)]
digest.update(fa.multi_dot_gram(vectors, backend="cpu").numpy().tobytes())
digest.update(fa.gradproj.count_sketch(vectors[0].view(99, 101), 777, copies=2, backend="cpu").numpy().tobytes())
print(digest.hexdigest())
"""
    run = python(code, FASTADV_CPU_ISA=isa)
    baseline = python(code, FASTADV_CPU_ISA="baseline")
    assert run.returncode == 0, run.stderr
    assert run.stdout == baseline.stdout


def test_an_unknown_instruction_set_is_refused() -> None:
    run = python(RUN_AN_OP, FASTADV_CPU_ISA="avx1024", FASTADV_BACKEND="cpu")
    assert "FASTADV_CPU_ISA is 'avx1024'; it must be auto or one of baseline, avx2, avx512" in run.stderr


BREAK_THE_EXTENSION = """
import sys, importlib.abc
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("fastadv._cpu") or name.split(".")[0] in ("triton", "flash_attn"):
            raise ImportError("undefined symbol: _ZN2at4_ops")
sys.meta_path.insert(0, Broken())
"""


def test_b40_a_broken_extension_breaks_nothing_and_is_said_once() -> None:
    run = python(BREAK_THE_EXTENSION + RUN_AN_OP)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("[0.5, -0.5] reference 1 ")
    assert "the reference backend runs instead of 'cpu'" in run.stdout
    assert "undefined symbol: _ZN2at4_ops" in run.stdout


def test_b40_a_broken_backend_that_was_asked_for_raises() -> None:
    run = python(BREAK_THE_EXTENSION + RUN_AN_OP, FASTADV_BACKEND="cpu")
    assert run.returncode != 0
    assert "BackendUnavailableError: group_advantages: backend 'cpu' cannot run" in run.stderr
    assert "install fastadv with a C++17 compiler" in run.stderr
    listing = python(BREAK_THE_EXTENSION + "import fastadv as fa; print(fa.backends())")
    assert "'reference': 'available', 'cpu': 'its extension does not load (undefined symbol" in listing.stdout
    assert "triton does not load (undefined symbol: _ZN2at4_ops); pip install 'fastadv[triton]'" in listing.stdout


ASK_FOR_TRITON = """
import torch, fastadv as fa
print(fa.backends()["triton"])
index = fa.segments(torch.tensor([0, 1, -1], dtype=torch.int32))
print(fa.segment_tokens(fa.SegmentTable(torch.tensor([3.0, 4.0]), index), backend="triton").tolist())
"""


def test_triton_needs_a_gpu_or_its_interpreter() -> None:
    """conftest.py sets TRITON_INTERPRET for the tests; a user has not set it."""
    run = python(ASK_FOR_TRITON, TRITON_INTERPRET="", CUDA_VISIBLE_DEVICES="")
    reason = "torch sees no CUDA device; run it where there is one. To try a kernel without, slowly, start Python with"
    assert run.stdout.startswith(f"{reason} TRITON_INTERPRET=1")
    assert f"BackendUnavailableError: segment_tokens: backend 'triton' cannot run: {reason}" in run.stderr
    interpreted = python(ASK_FOR_TRITON, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert interpreted.stdout.splitlines() == ["available", "[3.0, 4.0, 0.0]"], interpreted.stderr


def test_the_environment_chooses_the_backend() -> None:
    assert python(RUN_AN_OP, FASTADV_BACKEND="reference").stdout.startswith("[0.5, -0.5] reference 0")
    assert python(RUN_AN_OP, FASTADV_BACKEND="cpu").stdout.startswith("[0.5, -0.5] cpu 0")
    wrong = python(RUN_AN_OP, FASTADV_BACKEND="gpu")
    assert "backend is 'gpu'; it must be 'auto' or one of 'reference', 'cpu', 'triton'" in wrong.stderr
    checks = python("import fastadv", FASTADV_CHECKS="maybe")
    assert "FASTADV_CHECKS is 'maybe'; it must be one of auto, on, off" in checks.stderr


def test_a_fork_can_run_kernels() -> None:
    """Threads end with their call, so a child process starts clean."""
    code = """
import os, torch, fastadv as fa
torch.set_num_threads(2)
mask = torch.ones(200_000)
before = fa.token_counts(mask, backend="cpu")
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.equal(fa.token_counts(mask, backend="cpu"), before) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert python(code).stdout.strip() == "0"


FIRST_OP = """
import sys, warnings, torch, fastadv as fa
warnings.simplefilter("ignore", UserWarning)
n = 6
leaf = -torch.rand(n, requires_grad=True)
given = (torch.full((n,), -0.4), torch.randn(n), torch.ones(n))
def op(x):
    return fa.policy_loss(x, *given, denominator=1.0).loss
assert not any(name.startswith("fastadv._cpu") for name in sys.modules)
compiled = torch.compile(op, fullgraph=True, backend="aot_eager")(leaf)
(gradient,) = torch.autograd.grad(compiled, leaf)
backend = fa.last_backend()
(expected,) = torch.autograd.grad(op(leaf), leaf)
print(torch.allclose(gradient, expected), backend)
"""


def test_the_first_op_of_a_process_may_be_in_a_graph() -> None:
    """What imports the extension cannot be traced."""
    run = python(FIRST_OP)
    assert run.stdout.strip() == "True cpu", run.stderr
    broken = python(BREAK_THE_EXTENSION + FIRST_OP)
    assert broken.stdout.strip() == "True reference", broken.stderr
    assert "the reference backend runs instead of 'cpu'" in broken.stderr


def test_a_thread_has_enough_to_do() -> None:
    """A thread that gets less than it costs to start makes an op slower."""
    torch.set_num_threads(8)
    most = [native.threads(n * native.TOKENS_FOR_THREADS + extra) for n in (0, 1, 2, 7, 100) for extra in (0, 9)]
    assert most == [1, 1, 1, 1, 2, 2, 7, 7, 8, 8]


LOAD_CUDA = """
import fastadv as fa
from fastadv import cuda
try:
    assert cuda.module().device_type() == "cuda"
    print(cuda.module().__file__)
except ImportError:
    print(fa.backends()["cuda"])
"""


@pytest.mark.slow
def test_install_away_from_the_source_tree(tmp_path: Path) -> None:
    """`pip install .` into another environment imports, runs an op on the compiled kernels, and has the command. Where
    nvcc is, the CUDA kernels are there, and load without a GPU."""
    source = Path(fa.__file__).parent.parent
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [venv / "bin" / "pip", "install", "--quiet", "--constraint", source / "constraints.txt"]
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", source, clone], check=True)
    subprocess.run([*pip, clone], check=True, env={**os.environ, "FASTADV_CUDA_ARCHS": "90a"})
    run = subprocess.run(
        [venv / "bin" / "python", "-c", RUN_AN_OP + "print(fa.__file__, torch.__file__)"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.startswith("[0.5, -0.5] cpu 0")
    for path in run.stdout.splitlines()[-1].split():  # neither comes from the source tree or the tests' environment
        assert Path(path).is_relative_to(venv), path
    loaded = subprocess.run(
        [venv / "bin" / "python", "-c", LOAD_CUDA], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.strip()
    nvcc = shutil.which("nvcc") or Path(os.environ.get("CUDA_HOME", ""), "bin", "nvcc").exists()
    if nvcc and os.environ.get("FASTADV_CUDA") != "0":
        assert Path(loaded).is_relative_to(venv), loaded
    else:
        assert loaded.endswith("install fastadv where nvcc is, with FASTADV_CUDA=1")
    for module in ("fastadv.triton_kernels", "fastadv.integrations"):
        subprocess.run([venv / "bin" / "python", "-c", f"import {module}"], cwd=tmp_path, check=True)
    assert subprocess.run(
        [venv / "bin" / "python", "-c", "import triton_kernels"], cwd=tmp_path, check=False
    ).returncode
    help_text = subprocess.run(
        [venv / "bin" / "fastadv", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "replay" in help_text.stdout
