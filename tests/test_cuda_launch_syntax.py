"""CUDA's syntax as a host compiler reads it: launches and shared variables, and that lines keep their numbers."""

from __future__ import annotations

import pytest
from cuda_emulation.launch_syntax import LaunchSyntaxError, rewrite


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("k<<<a, b>>>();", "::cuda_emulation::launch(a, b, 0, nullptr, k);"),
        ("k<<<a, b, c, s>>>(x, y);", "::cuda_emulation::launch(a, b, c, s, k, x, y);"),
        (
            "if (n > 0) ns::k<T, 4> <<<a, b>>>(x);",
            "if (n > 0) ::cuda_emulation::launch(a, b, 0, nullptr, ns::k<T, 4>, x);",
        ),
        (
            "k<(n > 4)><<<f(a, b), {1, 2}>>>(g(x, y));",
            "::cuda_emulation::launch(f(a, b), {1, 2}, 0, nullptr, k<(n > 4)>, g(x, y));",
        ),
        ("A<T>::k<<<a, b>>>();", "::cuda_emulation::launch(a, b, 0, nullptr, A<T>::k);"),
        (
            "else kernels[i]<<<div<T, 4>(n), b>>>();",
            "else ::cuda_emulation::launch(div<T, 4>(n), b, 0, nullptr, kernels[i]);",
        ),
        ("s = \"k<<<a, b>>>()\"; c = '\"'; n = 1'000;", "s = \"k<<<a, b>>>()\"; c = '\"'; n = 1'000;"),
        ("x << 1; y < z;", "x << 1; y < z;"),
        ("k<<<n < 4 ? 1 : 2, m > 3>>>(x);", "::cuda_emulation::launch(n < 4 ? 1 : 2, m > 3, 0, nullptr, k, x);"),
        (
            "{ __shared__ float a[2][3], b; }",
            '{ auto& a = ::cuda_emulation::shared_variable<float[2][3], 1>("a", [] {});'
            ' auto& b = ::cuda_emulation::shared_variable<float, 1>("b", [] {}); }',
        ),
        (
            "{ static __shared__ __attribute__((aligned(16))) S<int, 2> a; }",
            '{ auto& a = ::cuda_emulation::shared_variable<S<int, 2>, 16>("a", [] {}); }',
        ),
        ("{ extern __shared__ char a[]; }", "{ char* a = ::cuda_emulation::dynamic_shared<char>(); }"),
        (
            "; extern __attribute__((aligned(16))) __shared__ float4 a[];",
            "; float4* a = ::cuda_emulation::dynamic_shared<float4>();",
        ),
    ],
)
def test_rewriting(source: str, wanted: str) -> None:
    assert rewrite(source) == wanted


def test_rewriting_keeps_line_numbers() -> None:
    source = '# 7 "a.cu"\nk<\n  T\n><<<a,\n    b\n>>>(x,\n  y); z;\nw;\n'
    lines = rewrite(source).splitlines()
    assert len(lines) == len(source.splitlines())
    assert lines[-2:] == ["; z;", "w;"]


def test_rewriting_keeps_line_numbers_around_line_markers() -> None:
    source = 'k<<<a,\n# 8 "a.cu" 3 4\n b\n# 8 "a.cu"\n >>>(\n  x); z;\n'  # z is in line 9
    assert rewrite(source) == '::cuda_emulation::launch(a, b, 0, nullptr, k, x)\n# 9 "a.cu"\n; z;\n'


@pytest.mark.parametrize(
    "source", ["k<<<a>>>(x);", "k<<<a, b>>>;", "<<<a, b>>>(x);", "k<<<a, b>>>(x;", "{ __shared__ 3; }"]
)
def test_what_is_not_read(source: str) -> None:
    with pytest.raises(LaunchSyntaxError):
        rewrite(source)
