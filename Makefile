# Every target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := $(wildcard csrc/*.cpp csrc/*/*.cpp csrc/*/*.cu csrc/*/*.h csrc/*/*/*.h)

.PHONY: test test-all test-verl test-miles peers sanitize replay bench profile host-cost gpu compiled lint format clean

# All checks that land a change: style, types, tests.
test: lint .venv/verl
	$(BIN)/pytest -q -m "not slow and not gpu and not peers and not trainers"

# The long proofs too.
test-all: lint .venv/verl
	$(BIN)/pytest -q -m "not gpu and not peers and not trainers"

# verl's own CPU tests, from the source archive of the version that we equal, with our functions in place of verl's.
test-verl: .venv/verl
	$(BIN)/python tests/verls_own_tests.py

# Hooks under Miles', slime's and Megatron-LM's own code, from checkouts that FASTADV_MILES, FASTADV_SLIME and
# FASTADV_MEGATRON name.
test-miles: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt httpx
	TORCHDYNAMO_DISABLE=1 $(BIN)/pytest -q -m trainers tests/test_miles_real.py tests/test_miles_megatron.py

# Every dialect against its owner's own code.
peers: .venv/peers
	$(BIN)/pytest -q -m peers

# The op tests on kernels that check every access and every undefined operation. They are built beside the others, in
# build/sanitize, which comes first on the path. libasan has to be loaded before Python, and libstdc++ with it. Python and
# torch leave memory to the system when they end, so leaks are not looked for.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1
OP_TESTS := $(addprefix tests/test_,$(addsuffix .py,contracts contracts_input contracts_torch conversions index_objects \
	advantages policy_loss losses losses_corrections losses_covariance token_log_probs gradproj_kernels batch metamorphic \
	reports reports_losses reports_log_probs))
sanitize: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt pybind11 setuptools
	rm -rf build/sanitize
	CFLAGS="$(SANITIZERS)" CXXFLAGS="$(SANITIZERS)" LDFLAGS="$(SANITIZERS)" \
		$(BIN)/python setup.py --quiet build --build-base build/sanitize --build-lib build/sanitize/lib
	nm -D build/sanitize/lib/fastadv/_cpu_baseline*.so | grep -q __asan_report  # the flags arrived
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		$(BIN)/pytest -q -m "not slow and not gpu and not peers" -k "not triton" -o pythonpath="build/sanitize/lib ." $(OP_TESTS)

# The main job on the committed rollouts: tables here, a page and a JSON in out/replay.
replay: .venv/installed
	$(BIN)/fastadv replay examples/frozen_lake/rollouts.pt --policy examples/frozen_lake/policy --out out/replay --overwrite

# Ratios to peers and floors, in interleaved runs: writes bench/results/, fails if a bar is missed. Needs a quiet machine.
bench: .venv/peers
	$(BIN)/python -m bench.ratios

# Absolute times of the ops on this machine.
profile: .venv/installed
	$(BIN)/pytest bench --benchmark-columns=min,median,max,rounds --benchmark-sort=name

# What a call costs the host up to the launch, without a GPU: writes bench/results/host_cost.md and .json. Needs a quiet machine.
host-cost: .venv/installed
	$(BIN)/python -m bench.host_cost

# On the card that is here: every contract of every op on it, on both backends, then, whatever failed, the benchmarks beside
# the peers that are installed, and compute-sanitizer and ncu where they are: bench/results/gpu.md and .json.
gpu: .venv/installed
	TRITON_INTERPRET=0 $(BIN)/pytest -q -m gpu tests/test_gpu.py; tests=$$?; \
		TRITON_INTERPRET=0 $(BIN)/python -m bench.gpu && exit $$tests

# Every Triton kernel compiled for GPUs that are not here, checked, and recorded in docs/triton_kernels.md and .json.
compiled: .venv/installed
	$(BIN)/python -m bench.compiled_code

# integrations/ is fastadv.integrations once it is installed: a folder of links shows mypy that.
TYPED := build/typed/fastadv
lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	rm -rf $(TYPED) && mkdir -p $(TYPED) && ln -s $(CURDIR)/fastadv/* $(CURDIR)/integrations $(TYPED)
	MYPYPATH=$(dir $(TYPED)) $(BIN)/mypy --package fastadv.integrations

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A CUDA kernel that spills registers is a fault here; another nvcc than ours may spill some, and users' builds go on.
NO_SPILLS := -Xptxas=--warn-on-spills,--warn-on-local-memory-usage -Werror=all-warnings
.venv/installed: pyproject.toml setup.py constraints.txt $(SOURCES)
	$(PYTHON) -m venv .venv
	NVCC_APPEND_FLAGS="$(NO_SPILLS)" $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Where pip cannot reach verl, its tests skip and say so.
VERL := verl==0.9.1
.venv/verl: .venv/installed tests/verl.txt
	if $(BIN)/pip install --quiet --no-deps $(VERL) && $(BIN)/pip install --quiet --constraint constraints.txt --requirement tests/verl.txt; \
		then touch $@; else echo "pip cannot reach $(VERL): its tests skip"; fi

.venv/peers: .venv/installed bench/peers.txt bench/peers_alone.txt
	$(BIN)/pip install --quiet --no-deps --requirement bench/peers_alone.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement bench/peers.txt
	touch $@

clean:
	rm -rf .venv build out *.egg-info fastadv/*.so
