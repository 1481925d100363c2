# Everything works from a fresh clone: the first call makes .venv and installs, later calls do not.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[torch,cli]'

.PHONY: demo test check format bench exactness clean

demo: .venv/demo
	$(BIN)/python examples/digits.py

# Frameworks fight in one process, so each is tested in its own.
test: .venv/test
	$(BIN)/python -m pytest tests/core
	$(BIN)/python -m pytest tests/torch
	$(BIN)/python -m pytest tests/docs

check: .venv/check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/bench
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.memory

# Writes the tables of docs/exactness.md and README.md.
exactness: .venv/test
	$(BIN)/python -m benchmarks.exactness

.venv/pip: constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt pip
	touch $@

.venv/demo: .venv/pip pyproject.toml
	$(INSTALL) --group demo
	touch $@

.venv/test: .venv/pip pyproject.toml
	$(INSTALL) --group test
	touch $@ .venv/demo

.venv/check: .venv/test
	$(INSTALL) --group check --group test
	touch $@

.venv/bench: .venv/test
	$(INSTALL) --group bench --group test
	touch $@

clean:
	rm -rf .venv
