# make demo   creates .venv, installs, and prefills examples/prompts.jsonl with a small model
# make test   the same for the tests;  make lint types   the other checks;  make clean
# make bench  the tables of docs/performance.md, on this machine; nothing else may run meanwhile

PYTHON ?= python3
VENV ?= .venv
# Test files that run at the same time; each takes up to 2 GB.
JOBS ?= 2
BIN := $(VENV)/bin
# Written last, so that an interrupted installation is done again.
INSTALLED := $(VENV)/.installed

.PHONY: demo install test lint types bench clean

demo: install
	$(BIN)/asapctl prefill examples/prompts.jsonl

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); torch is large, so this can take minutes."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

test: install
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(PYTEST_FLAGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Hours. Each of them can be run by itself, and tells with --help what makes it shorter.
bench: install
	$(BIN)/python -m benchmarks.models
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.reference
	$(BIN)/python -m benchmarks.asynchrony paced
	$(BIN)/python -m benchmarks.asynchrony cpu
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.footprint
	$(BIN)/python -m benchmarks.data_plane

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
