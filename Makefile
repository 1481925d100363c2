# Everything works from a fresh clone: the first call makes .venv and installs, later calls do not.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable
ALL := '.[torch,tensorflow,keras,jax,cli]'
WORKERS ?= 2
ONE_THREAD := OMP_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal
RANKS := $(ONE_THREAD) $(BIN)/torchrun --standalone
ON_FOUR_RANKS := not views and not small and not verify
export TF_CPP_MIN_LOG_LEVEL := 3

.PHONY: demo test check format bench bench-gpu exactness soak pictures clean

demo: .venv/demo
	$(BIN)/bigbatch train digits

# Frameworks fight in one process, so each is tested in its own.
test: .venv/test
	$(PYTEST) tests/core
	$(PYTEST) tests/torch
	$(RANKS) --nproc-per-node 2 -m pytest -q -x tests/ranks
	$(RANKS) --nproc-per-node 4 -m pytest -q -x tests/ranks -k "$(ON_FOUR_RANKS)"
	$(PYTEST) tests/tensorflow
	$(PYTEST) tests/jax
	KERAS_BACKEND=tensorflow $(PYTEST) tests/keras
	KERAS_BACKEND=jax $(PYTEST) tests/keras
	KERAS_BACKEND=torch $(PYTEST) tests/keras
	$(PYTEST) tests/tasks/test_torch.py
	$(PYTEST) tests/tasks/test_tensorflow.py
	$(PYTEST) tests/tasks/test_keras.py
	$(PYTEST) tests/tasks/test_jax.py
	$(PYTEST) tests/cli
	$(BIN)/python -m pytest tests/crash
	$(PYTEST) tests/docs

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
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.tensorflow
	$(BIN)/python -m benchmarks.jax
	$(RANKS) --nproc-per-node 2 -m benchmarks.ranks

# Says so where there is no GPU.
bench-gpu: .venv/bench
	$(BIN)/python -m benchmarks.gpu
	$(BIN)/python -m benchmarks.gpu_tables

# Writes the tables of docs/exactness.md and README.md.
exactness: .venv/bench
	$(BIN)/python -m benchmarks.exactness
	$(BIN)/python -m benchmarks.exactness_tensorflow
	$(BIN)/python -m benchmarks.exactness_jax
	$(RANKS) --nproc-per-node 2 -m benchmarks.exactness_ranks

# The long run: 250 kills, 20,000 stories of calls, 100,000 steps of each framework; leaves build/soak.md.
soak: .venv/test
	rm -f build/soak.md
	$(BIN)/python -m tests.crash.soak --kills 200 --framework torch --report build/soak.md
	$(BIN)/python -m tests.crash.soak --kills 25 --framework tensorflow --report build/soak.md
	$(BIN)/python -m tests.crash.soak --kills 25 --framework jax --report build/soak.md
	$(BIN)/python -m tests.crash.steps --framework torch --report build/soak.md
	$(BIN)/python -m tests.crash.steps --framework tensorflow --report build/soak.md
	$(BIN)/python -m tests.crash.steps --framework jax --report build/soak.md
	BIGBATCH_EXAMPLES=20000 $(PYTEST) tests/torch/test_stateful.py

# Makes the pictures of docs/command-line.md; needs Chromium.
pictures: .venv/test
	$(BIN)/python docs/make_pictures.py

.venv/pip: constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt pip
	touch $@

.venv/demo: .venv/pip pyproject.toml
	$(INSTALL) '.[torch,cli]' --group demo
	touch $@

.venv/test: .venv/pip pyproject.toml
	$(INSTALL) $(ALL) --group test
	touch $@ .venv/demo

.venv/check: .venv/test
	$(INSTALL) $(ALL) --group check --group test
	touch $@

.venv/bench: .venv/test
	$(INSTALL) $(ALL) --group bench --group test
	touch $@

clean:
	rm -rf .venv
