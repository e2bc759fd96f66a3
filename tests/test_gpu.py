"""Every contract of every op on a CUDA device: `make gpu`. Triton's interpreter and the emulation of CUDA run the same
kernels without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_large
import torch
from device_contracts import BACKENDS, CONTRACTS, LARGE, case_on, run_large, skip_unless, why_not
from op_cases import CASES, Case, Shape

import fastadv as fa
from fastadv import cuda, dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
CHECKS = [
    pytest.param(name, case, backend, id=f"{backend}: {case.name}: {name}")
    for case in CASES
    for name, contract in CONTRACTS.items()
    for backend in contract.backends
    if contract.applies(case)
]
LARGE_BYTES = 40 * 2**30  # 16-bit log-probs, old ones and the gradient of 2^31 tokens are 13 GB, and copies of them


@pytest.mark.parametrize(("name", "case", "backend"), CHECKS)
def test_contract(name: str, case: Case, backend: str, request: pytest.FixtureRequest) -> None:
    skip_unless(backend, "cuda")
    contract = CONTRACTS[name]
    if contract.poisoned:
        request.getfixturevalue("poisoned_memory")
    contract.run(case_on(case, "cuda"), backend)


@EVERY
def test_auto_takes_the_kernels(case: Case) -> None:
    here = case_on(case, "cuda")
    here.run("auto", here.make(Shape().draw()))
    assert fa.last_backend() == next(name for name in BACKENDS if why_not(name, "cuda") is None)


def test_the_kernels_are_not_those_of_the_emulation() -> None:
    if fa.backends()["cuda"] != "available":
        pytest.skip(fa.backends()["cuda"])
    assert cuda.module().device_type() == "cuda"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", LARGE, ids=lambda check: check.__name__)
def test_over_2_to_31(check: Callable[[str], None], backend: str) -> None:
    skip_unless(backend, "cuda")
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < LARGE_BYTES:
        pytest.skip("needs 40 GiB of free device memory")
    run_large(check, backend, "cuda", test_large.TOKENS)
    torch.cuda.empty_cache()


def test_a_cpu_tensor_is_refused() -> None:
    if dispatch.interpreting():
        pytest.skip("Triton's interpreter takes CPU tensors")
    with pytest.raises(fa.BackendUnavailableError, match="it takes CUDA tensors, not cpu"):
        fa.token_counts(torch.ones(3), backend="triton")
