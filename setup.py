"""Builds the kernels: one extension per instruction set of the CPU, and one for CUDA where nvcc is. None is linked with
torch.

`fastadv/native.py` imports the best of the first that the processor runs, `fastadv/cuda.py` the last. A machine without
a compiler gets a package that works on the `reference` backend and says so when it is used.

    FASTADV_CUDA        auto (default): build for CUDA if nvcc is there; 1: fail if that fails; 0: don't
    FASTADV_CUDA_ARCHS  compute capabilities, "80;90a;100" by default; the last one's PTX is for what comes later

nvcc is taken from CUDA_HOME, or from the path. No GPU is needed to build.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.errors import CompileError

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


CUDA = os.environ.get("FASTADV_CUDA", "auto")
CUDA_ARCHS = os.environ.get("FASTADV_CUDA_ARCHS", "80;90a;100")
CUDA_SOURCES = sorted(str(path) for path in Path("csrc/cuda").glob("*.cu"))
CUDA_HEADERS = sorted(str(path) for folder in ("cuda", "include/fastadv") for path in Path("csrc", folder).glob("*.h"))
# A product and a sum are one rounding only where the source says so.
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Icsrc",
    "-Icsrc/include",
]


PLANNED = {"I": "#$ INCLUDES=", "L": "#$ LIBRARIES="}  # lines of what nvcc says that it would do


def nvcc():
    """Path of the compiler, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return (shutil.which("nvcc", path=str(Path(home, "bin"))) if home else None) or shutil.which("nvcc")


def nvcc_folders(compiler, option):
    """Folders of CUDA's headers (I) or libraries (L), as nvcc itself would pass them on."""
    plan = subprocess.run([compiler, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    found = [shlex.split(line.split("=", 1)[1]) for line in plan.splitlines() if line.startswith(PLANNED[option])]
    return [str(Path(word.removeprefix(f"-{option}")).resolve()) for words in found for word in words]


def generated_code(compiler):
    """nvcc's options for the architectures that were asked for; of the default ones, for those that it knows."""
    archs = [arch.strip() for arch in CUDA_ARCHS.replace(",", ";").split(";") if arch.strip()]
    if not archs or not all(re.fullmatch(r"\d+a?", arch) and int(arch.rstrip("a")) >= 80 for arch in archs):
        raise RuntimeError(f"FASTADV_CUDA_ARCHS is {CUDA_ARCHS!r}; pass compute capabilities from 80 on, as '80;90a'")

    def code(arch, form):
        return f"-gencode=arch=compute_{arch},code={form}_{arch}"

    def known(arch):
        plan = [compiler, "--dryrun", code(arch, "sm"), "-x", "cu", "-c", os.devnull]
        return subprocess.run(plan, capture_output=True).returncode == 0

    if "FASTADV_CUDA_ARCHS" not in os.environ:
        archs = [arch for arch in archs if known(arch)]
        if not archs:
            raise RuntimeError(f"{compiler} knows none of the architectures {CUDA_ARCHS}; take nvcc from CUDA 11.1 on")
    # Code for 90a runs on nothing else, and so would its PTX.
    return [*(code(arch, "sm") for arch in archs), code(archs[-1].rstrip("a"), "compute")]


class BuildExtensions(build_ext):
    def build_extension(self, ext):
        if ext.name == "fastadv._cuda":
            try:
                self.build_cuda(ext)
            except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                raise CompileError(f"no CUDA kernels: {error}") from error  # what an optional extension may fail with
            return
        # The extensions share sources: each needs its own folder for objects.
        shared, self.build_temp = self.build_temp, str(Path(self.build_temp) / ext.name)
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = shared

    def build_cuda(self, ext):
        """Compiles the kernels with nvcc, one core a file, and links the bindings with them and CUDA's runtime."""
        compiler = nvcc()
        if compiler is None:
            raise RuntimeError("FASTADV_CUDA is 1, but there is no nvcc in CUDA_HOME or on the path")
        folder = Path(self.build_temp) / ext.name
        folder.mkdir(parents=True, exist_ok=True)
        codes = generated_code(compiler)

        def compiled(source):
            target = folder / f"{Path(source).stem}.o"
            subprocess.run([compiler, *NVCC_FLAGS, *codes, "-c", source, "-o", str(target)], check=True)
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            ext.extra_objects = list(pool.map(compiled, CUDA_SOURCES))
        ext.include_dirs += nvcc_folders(compiler, "I")
        ext.library_dirs += nvcc_folders(compiler, "L")
        super().build_extension(ext)


def cuda_extensions():
    """The extension for CUDA, where it is to be built."""
    if CUDA not in ("auto", "0", "1"):
        raise RuntimeError(f"FASTADV_CUDA is {CUDA!r}; it must be auto, 0 or 1")
    missing = "there is no nvcc in CUDA_HOME or on the path" if sys.platform == "linux" else "this is not Linux"
    if CUDA == "0" or (CUDA == "auto" and (nvcc() is None or sys.platform != "linux")):
        reason = "FASTADV_CUDA is 0" if CUDA == "0" else missing
        print(f"fastadv: no CUDA kernels are built: {reason}")
        return []
    return [
        Pybind11Extension(
            "fastadv._cuda",
            ["csrc/bindings_cuda.cpp"],
            depends=[*CUDA_SOURCES, *CUDA_HEADERS],
            include_dirs=["csrc", "csrc/include"],
            libraries=["cudart_static", "rt", "dl", "pthread"],
            extra_compile_args=FLAGS,
            cxx_std=17,
            optional=CUDA == "auto",
        )
    ]


ParallelCompile(default=0).install()  # one compiler a core

setup(
    package_dir={
        "fastadv": "fastadv",
        "fastadv.triton_kernels": "triton_kernels",
        "fastadv.integrations": "integrations",
    },
    cmdclass={"build_ext": BuildExtensions},
    ext_modules=cuda_extensions()
    + [
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
