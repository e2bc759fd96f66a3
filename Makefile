# Every target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := $(wildcard csrc/*.cpp csrc/*/*.cpp csrc/*/*.h csrc/*/*/*.h)

.PHONY: test test-all replay bench profile lint format clean

# All checks that land a change: style, types, tests.
test: lint
	$(BIN)/pytest -q -m "not slow and not gpu"

# The long proofs too.
test-all: lint
	$(BIN)/pytest -q -m "not gpu"

# The main job on the committed rollouts: tables here, a page and a JSON in out/replay.
replay: .venv/installed
	$(BIN)/fastadv replay examples/frozen_lake/rollouts.pt --policy examples/frozen_lake/policy --out out/replay --overwrite

# Ratios to peers and floors, in interleaved runs: writes bench/results/, fails if a bar is missed. Needs a quiet machine.
bench: .venv/peers
	$(BIN)/python -m bench.ratios

# Absolute times of the ops on this machine.
profile: .venv/installed
	$(BIN)/pytest bench --benchmark-columns=min,median,max,rounds --benchmark-sort=name

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml setup.py constraints.txt $(SOURCES)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv/peers: .venv/installed bench/peers.txt bench/peers_alone.txt
	$(BIN)/pip install --quiet --no-deps --requirement bench/peers_alone.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement bench/peers.txt
	touch $@

clean:
	rm -rf .venv build out *.egg-info fastadv/*.so
