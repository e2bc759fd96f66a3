"""Every contract of every op on a CUDA device: `make gpu`. The interpreter proves the same kernels without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_large
import torch
from device_contracts import CONTRACTS, LARGE, case_on, run_large
from op_cases import CASES, Case, Shape

import fastadv as fa
from fastadv import dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
PAIRS = [
    pytest.param(name, case, id=f"{case.name}: {name}")
    for case in CASES
    for name, contract in CONTRACTS.items()
    if contract.applies(case)
]
LARGE_BYTES = 40 * 2**30  # 16-bit log-probs, old ones and the gradient of 2^31 tokens are 13 GB, and copies of them


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_contract(name: str, case: Case, request: pytest.FixtureRequest) -> None:
    contract = CONTRACTS[name]
    if contract.poisoned:
        request.getfixturevalue("poisoned_memory")
    contract.run(case_on(case, "cuda"), "triton")


@EVERY
def test_auto_takes_the_kernels(case: Case) -> None:
    here = case_on(case, "cuda")
    here.run("auto", here.make(Shape().draw()))
    assert fa.last_backend() == "triton"


@pytest.mark.parametrize("check", LARGE, ids=lambda check: check.__name__)
def test_over_2_to_31(check: Callable[[str], None]) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < LARGE_BYTES:
        pytest.skip("needs 40 GiB of free device memory")
    run_large(check, "triton", "cuda", test_large.TOKENS)
    torch.cuda.empty_cache()


def test_a_cpu_tensor_is_refused() -> None:
    if dispatch.interpreting():
        pytest.skip("Triton's interpreter takes CPU tensors")
    with pytest.raises(fa.BackendUnavailableError, match="it takes CUDA tensors, not cpu"):
        fa.token_counts(torch.ones(3), backend="triton")
