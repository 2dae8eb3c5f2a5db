# make demo   creates .venv, installs, and prefills examples/prompts.jsonl with a small model
# make test   the same for the tests;  make lint types   the other checks;  make clean

PYTHON ?= python3
VENV ?= .venv
# Test files that run at the same time; each takes up to 2 GB.
JOBS ?= 2
BIN := $(VENV)/bin
# Written last, so that an interrupted installation is done again.
INSTALLED := $(VENV)/.installed

.PHONY: demo install test lint types clean

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

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
