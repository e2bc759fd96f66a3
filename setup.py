"""Builds the CPU kernels: one extension per instruction set, all from the same sources, none linked with torch.

`fastadv/native.py` imports the best one that the processor runs. A machine without a compiler gets a package that works
on the `reference` backend and says so when it is used.
"""

import platform
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

SOURCES = ["csrc/bindings_cpu.cpp", *sorted(str(path) for path in Path("csrc/cpu").glob("*.cpp"))]
HEADERS = sorted(str(path) for pattern in ("csrc/cpu/*.h", "csrc/include/fastadv/*.h") for path in Path().glob(pattern))

# No contraction: a * b + c rounds twice everywhere, so that every instruction set gives the same bits.
# Vector types wider than a register are passed inline only, which -Wpsabi cannot know.
FLAGS = [
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]

INSTRUCTION_SETS: dict[str, list[str]] = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS["avx2"] = ["-mavx2"]
    INSTRUCTION_SETS["avx512"] = [
        "-mavx2",
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mprefer-vector-width=512",
    ]


class BuildExtensions(build_ext):
    def build_extension(self, ext):
        # The extensions share sources: each needs its own folder for objects.
        shared, self.build_temp = self.build_temp, str(Path(self.build_temp) / ext.name)
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = shared


ParallelCompile(default=0).install()  # one compiler a core

setup(
    package_dir={
        "fastadv": "fastadv",
        "fastadv.triton_kernels": "triton_kernels",
        "fastadv.integrations": "integrations",
    },
    cmdclass={"build_ext": BuildExtensions},
    ext_modules=[
        Pybind11Extension(
            f"fastadv._cpu_{name}",
            SOURCES,
            depends=HEADERS,
            include_dirs=["csrc", "csrc/include"],
            define_macros=[("FASTADV_MODULE", f"_cpu_{name}")],
            extra_compile_args=FLAGS + flags,
            extra_link_args=["-pthread"],
            cxx_std=17,
            optional=True,
        )
        for name, flags in INSTRUCTION_SETS.items()
    ],
)
