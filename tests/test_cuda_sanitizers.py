"""The project's own CUDA kernels under sanitizers, in other orders of threads, with planted faults; and which of their
lines tests reach. tests/test_cuda_emulation.py shows that the emulation itself finds what it should."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import cuda_kernels
import cuda_small_runs
import pytest
from cuda_emulation import build

TESTS = Path(__file__).parent
NAMES = (
    "cuda_advantages", "cuda_gradproj", "cuda_log_ratios", "cuda_logits", "cuda_policy_loss", "cuda_refusals",
    "bad_offsets",
)  # fmt: skip
FILES = [str(TESTS / f"test_{name}.py") for name in NAMES]
ALL = "not triton"  # of FILES
CONTRACTS = [str(TESTS / f"test_contracts{name}.py") for name in ("", "_torch", "_input")]
ADDRESS, THREAD, COVERAGE = "address", "thread", "coverage"
# A test or two of every kernel, with edges of blocks and views that are not aligned.
SELECTED = " or ".join(
    (
        "turns_and_counts", "views_that_are_not_aligned", "moments", "sizes", "every_rule", "edge_shapes", "all_sums",
        "blocks_of_several_steps", "a_factor", "log_ratios_equal", "equals_float64", "few_long_rows",
        "row_that_is_split", "any_layout_and_in_place", "statistics_of_codes", "edges_of_blocks", "aligned_or_not",
        "bits_of_the_reference",
    )
)  # fmt: skip


def needs(sanitizer: str | None) -> pytest.MarkDecorator:
    return pytest.mark.skipif(build.missing(sanitizer) is not None, reason=str(build.missing(sanitizer)))


def run(command: list[str], module: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of tests that runs these kernels; `environment` is all of it where it has a PATH."""
    environment = {**({} if "PATH" in environment else os.environ), **environment, cuda_kernels.MODULE: str(module)}
    return subprocess.run(
        [sys.executable, *command], cwd=build.ROOT, env=environment, capture_output=True, text=True, check=False
    )


def run_tests(module: Path, *selection: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Without capturing: a sanitizer that ends the process says so at once."""
    return run(["-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", *selection], module, **environment)


def passed(done: subprocess.CompletedProcess[str]) -> int:
    """How many tests passed, where none failed."""
    report = re.search(r".*(?:runtime error|ERROR: ).*", done.stderr)  # of a sanitizer, above its many frames
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{report and report[0]}\n{done.stderr[-3000:]}"
    return int(re.findall(r"(\d+) passed", done.stdout)[-1])


# ---- bounds, alignment, undefined behaviour --------------------------------------------------------------------------


@needs(ADDRESS)
def test_no_access_out_of_bounds_and_nothing_undefined() -> None:
    """In another order of threads than other tests have."""
    environment = {**build.preloaded(ADDRESS), "CUDA_EMULATION_ORDER": "backward"}
    done = run_tests(cuda_kernels.emulated(ADDRESS), "-k", ALL, *FILES, **environment)
    assert passed(done) > 400
    assert "runtime error" not in done.stderr


# ---- orders of threads -----------------------------------------------------------------------------------------------


@needs(None)
def test_a_random_order() -> None:
    done = run_tests(cuda_kernels.emulated(), "-k", SELECTED, *FILES, CUDA_EMULATION_ORDER="3")
    assert passed(done) > 100


@pytest.mark.slow
@pytest.mark.parametrize("order", ["backward", "1", "2"])
@needs(None)
def test_every_order(order: str) -> None:
    """The contracts too, which compare bits."""
    done = run_tests(cuda_kernels.emulated(), "-k", "cuda", *FILES, *CONTRACTS, CUDA_EMULATION_ORDER=order)
    assert passed(done) > 1000


# ---- races -----------------------------------------------------------------------------------------------------------

SMALL_RUNS = str(TESTS / "cuda_small_runs.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", cuda_small_runs.RUNS)
@needs(THREAD)
def test_no_races(name: str) -> None:
    done = run([SMALL_RUNS, name], cuda_kernels.emulated(THREAD), **build.preloaded(THREAD))
    assert (done.stdout, done.returncode) == (f"{name} right\n", 0), done.stderr[-6000:]
    assert "ThreadSanitizer" not in done.stderr


# ---- planted faults --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What holds threads together, gone from one place of a source."""

    source: str
    start: int
    end: int
    instead: str

    @property
    def name(self) -> str:
        """The source and the statement with its number among those of its kind, as `pytest -k` finds it."""
        text = read(self.source)
        taken = text[self.start : self.end].split("(")[0]
        return f"{self.source}-{taken}-{len(re.findall(rf'{taken}[(]', text[: self.start])) + 1}"

    def plant(self, folder: Path) -> Path:
        text = read(self.source)
        (folder / "cuda").mkdir(parents=True)
        (folder / "cuda" / self.source).write_text(text[: self.start] + self.instead + text[self.end :])
        return folder


def read(source: str) -> str:
    return (cuda_kernels.CSRC / "cuda" / source).read_text()


# What is looked for in the sources, and what stands there instead: no barrier and no fence, a lane's own value for that
# of another or of the whole warp, a counter that others write at the same time.
ORDERING = {r"__syncthreads\(\);": ";", r"__threadfence\(\);": ";"}
SHARING = {
    r"__shfl_(?:xor_|up_)?sync\([^,]+, (.+?), (?:distance|lanes|other|1|k)\)": r"(\1)",
    r"__reduce_add_sync\([^,]+, (.+?)\)(?=;)": r"int(\1)",
    r"__syncthreads_or\((.+?)\)": r"(\1)",
    r"atomic(?:Add|Max)\((.+?), (.+?)\)": r"(*(\1) += \2)",
    r"last = atomicInc\(counter, (.+?)\) == .+;": r"last = *counter == \1; *counter = last ? 0 : *counter + 1;",
}


def faults(kinds: dict[str, str]) -> list[Fault]:
    """One for each place of each source that has such a statement: a new barrier gets one too."""
    sources = sorted(path.name for path in (cuda_kernels.CSRC / "cuda").iterdir())
    return [
        Fault(source, *match.span(), match.expand(instead))
        for source in sources
        for pattern, instead in kinds.items()
        for match in re.finditer(pattern, read(source))
    ]


# What no run notices, and why.
UNSEEN = {
    "groups.h-__syncthreads-5": "every group with a row has passed a barrier of the loop before it",
    "groups.h-__syncthreads_or-1": "runs have no broken index; test_what_is_wrong_and_was_not_read_stays_visible has",
    # A block would have to be stopped between two statements while others go on to the end.
    "sums.h-__syncthreads-1": "fences of the emulation order all that came before them, also of threads not waited for",
    "sums.h-__threadfence-2": "the last block's first fence comes after those of the others but for a moment",
}
# The run that notices, by source.
NOTICED_BY = {
    "count_sketch.cu": ("gradients",),
    "groups.h": ("moments", "advantages"),
    "logits_gradient.cu": ("log_probs",),
    "multi_dot_gram.cu": ("gradients",),
    "policy_gradients.cu": ("policy_loss",),
    "policy_loss.cu": ("policy_loss",),
    "row_counts.h": ("counts",),
    "sequence_log_ratios.cu": ("log_ratios",),
    "sums.h": ("policy_loss", "log_ratios"),
    "token_counts.cu": ("counts",),
    "token_log_probs.cu": ("log_probs",),
    "turn_ids.cu": ("turn_ids", "counts"),
}
CAUGHT = r"data race|are not (close|equal)|deadlock|divergent barrier"


def assert_caught(fault: Fault, sanitizer: str | None, folder: Path) -> None:
    environment = {} if sanitizer is None else build.preloaded(sanitizer)
    if sanitizer is not None:
        environment["TSAN_OPTIONS"] += ":halt_on_error=1"
    done = run(
        [SMALL_RUNS, *NOTICED_BY[fault.source]],
        cuda_kernels.emulated(sanitizer, changed=fault.plant(folder)),
        **environment,
    )
    assert done.returncode != 0
    assert re.search(CAUGHT, done.stderr), done.stderr[-6000:]


def ids(fault: Fault) -> str:
    return fault.name


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in faults(ORDERING) if f.name not in UNSEEN], ids=ids)
@needs(THREAD)
def test_a_barrier_or_fence_that_is_gone(fault: Fault, tmp_path: Path) -> None:
    assert_caught(fault, THREAD, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in faults(SHARING) if f.name not in UNSEEN], ids=ids)
@needs(THREAD)
def test_what_lanes_do_not_share(fault: Fault, tmp_path: Path) -> None:
    assert_caught(fault, THREAD, tmp_path)


@needs(None)
def test_a_lane_that_keeps_its_own_sum(tmp_path: Path) -> None:
    """One fault of those that need no ThreadSanitizer."""
    assert_caught(next(f for f in faults(SHARING) if f.source == "policy_loss.cu"), None, tmp_path)


def test_faults_are_planted_in_every_source_that_has_such_a_statement() -> None:
    planted = {fault.source for fault in faults(ORDERING | SHARING)}
    assert UNSEEN.keys() <= {fault.name for fault in faults(ORDERING | SHARING)}
    holding = r"__sync|__shfl|__reduce|__threadfence|\batomic[A-Z]"
    sources = [path.name for path in (cuda_kernels.CSRC / "cuda").iterdir() if re.search(holding, path.read_text())]
    assert planted == set(sources) == NOTICED_BY.keys()
    found = sum(len(re.findall(rf"(?:{holding})\w*\(", read(source))) for source in sources)
    assert len(list(faults(ORDERING | SHARING))) == found


# ---- lines that tests reach ------------------------------------------------------------------------------------------

LEAST = 0.95  # of each file's lines
NEVER_RUN = "nothing_kernel() {}"  # CUDA is asked whether there is code of it


@pytest.mark.slow
@needs(COVERAGE)
def test_lines_of_the_kernels_that_tests_reach(tmp_path: Path) -> None:
    module = cuda_kernels.emulated(COVERAGE)
    for counters in module.parent.glob("*.gcda"):
        counters.unlink()
    assert passed(run_tests(module, "-k", ALL, *FILES)) > 400
    counted: dict[str, dict[int, bool]] = {}
    for notes in module.parent.glob("*.gcda"):
        command = ["gcov", "--json-format", "--stdout", str(notes)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        for document in done.stdout.splitlines():
            for file in json.loads(document)["files"]:
                lines = counted.setdefault(file["file"], {})
                for line in file["lines"]:
                    number = line["line_number"]
                    lines[number] = lines.get(number, False) or line["count"] > 0
    kernels = {Path(name).name: lines for name, lines in counted.items() if "/csrc/cuda/" in name}
    for name, lines in kernels.items():
        for number, text in enumerate(read(name).splitlines(), 1):
            if NEVER_RUN in text:
                assert not lines.pop(number)
    assert kernels.keys() >= {Path(name).name for name in cuda_kernels.SOURCES if name.startswith("cuda/")}
    shares = {name: sum(lines.values()) / len(lines) for name, lines in kernels.items()}
    missed = {name: [n for n, reached in sorted(lines.items()) if not reached] for name, lines in kernels.items()}
    print(
        *(
            f"{name}: {share:.1%} of {len(kernels[name])} lines, missed {missed[name]}"
            for name, share in sorted(shares.items())
        ),
        sep="\n",
    )
    assert min(shares.values()) >= LEAST, missed
