# Works from a fresh clone: the first call creates .venv and installs everything.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable
EXTRAS := '.[torch,tensorflow,keras,jax,cli]'
WORKERS ?= 2
ONE_THREAD := OMP_NUM_THREADS=1
RESULTS := build/tests
SUITES := test-tensorflow test-cli test-jax test-keras-tensorflow test-crash test-torch test-tasks test-keras-jax \
  test-docs test-ranks test-keras-torch test-core
PYTEST = $(ONE_THREAD) $(BIN)/python -m pytest $(if $(ALL),--all) $(PYTEST_ARGS)
RANKS := $(ONE_THREAD) $(BIN)/torchrun --standalone
ON_FOUR_RANKS := $(if $(ALL),not views and not small and not verify,test_windows)
export TF_CPP_MIN_LOG_LEVEL := 3

.PHONY: demo test test-all $(SUITES) coverage check format bench bench-gpu exactness soak pictures clean

demo: .venv/demo
	$(BIN)/bigbatch train digits

# Frameworks conflict in one process, so each suite has its own process. WORKERS + 1 suites run at a time,
# because some tests wait rather than compute. BUDGET=1 fails if it takes longer than 12 minutes.
test: .venv/test
	@rm -rf $(RESULTS) && mkdir -p $(RESULTS) && touch $(RESULTS)/start
	@$(MAKE) --no-print-directory --keep-going --jobs $$(($(WORKERS) + 1)) --output-sync=target $(SUITES); code=$$?; \
	  $(BIN)/python -m tests.summary $(RESULTS) $(if $(BUDGET),--budget 720) && exit $$code

# Everything a release needs: all combinations, kills, four ranks, many examples.
test-all: .venv/test
	@$(MAKE) --no-print-directory test ALL=1 BUDGET=

test-core test-torch test-tensorflow test-jax test-cli test-crash test-docs: test-%: .venv/test
	$(PYTEST) tests/$* --junitxml $(RESULTS)/$*.xml

test-keras-tensorflow test-keras-jax test-keras-torch: test-keras-%: .venv/test
	KERAS_BACKEND=$* $(PYTEST) tests/keras --junitxml $(RESULTS)/keras-$*.xml

test-tasks: .venv/test
	$(PYTEST) tests/tasks/test_torch.py --junitxml $(RESULTS)/tasks-torch.xml
	$(PYTEST) tests/tasks/test_tensorflow.py --junitxml $(RESULTS)/tasks-tensorflow.xml
	$(PYTEST) tests/tasks/test_keras.py --junitxml $(RESULTS)/tasks-keras.xml
	$(PYTEST) tests/tasks/test_jax.py --junitxml $(RESULTS)/tasks-jax.xml

test-ranks: .venv/test
	$(RANKS) --nproc-per-node 2 -m pytest $(if $(ALL),--all) -q -x tests/ranks $(PYTEST_ARGS) --junitxml '$(RESULTS)/ranks-$$RANK-of-2.xml'
	$(RANKS) --nproc-per-node 4 -m pytest $(if $(ALL),--all) -q -x tests/ranks -k "$(ON_FOUR_RANKS)" $(PYTEST_ARGS) --junitxml '$(RESULTS)/ranks-$$RANK-of-4.xml'

# Branch coverage of make test, or of make test-all with ALL=1, including every Python process that a test starts.
coverage: .venv/coverage
	rm -rf build/coverage
	mkdir -p build/coverage
	COVERAGE_FILE=$(CURDIR)/build/coverage/data COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(MAKE) --no-print-directory test
	COVERAGE_FILE=build/coverage/data $(BIN)/coverage combine --quiet
	COVERAGE_FILE=build/coverage/data $(BIN)/coverage report --skip-covered

check: .venv/check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.mutations --check

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

# Stops with a message if there is no GPU.
bench-gpu: .venv/bench
	$(BIN)/python -m benchmarks.gpu
	$(BIN)/python -m benchmarks.gpu_tables

# Writes the tables of docs/exactness.md and README.md.
exactness: .venv/bench
	$(BIN)/python -m benchmarks.exactness
	$(BIN)/python -m benchmarks.exactness_tensorflow
	$(BIN)/python -m benchmarks.exactness_jax
	$(RANKS) --nproc-per-node 2 -m benchmarks.exactness_ranks
	$(BIN)/python -m benchmarks.peers

# The long run: 250 kills, 20,000 random sequences of calls, 100,000 steps per framework. Writes build/soak.md.
soak: .venv/test
	rm -f build/soak.md
	$(BIN)/python -m tests.crash.soak --kills 200 --framework torch --report build/soak.md
	$(BIN)/python -m tests.crash.soak --kills 25 --framework tensorflow --report build/soak.md
	$(BIN)/python -m tests.crash.soak --kills 25 --framework jax --report build/soak.md
	$(BIN)/python -m tests.crash.steps --framework torch --report build/soak.md
	$(BIN)/python -m tests.crash.steps --framework tensorflow --report build/soak.md
	$(BIN)/python -m tests.crash.steps --framework jax --report build/soak.md
	BIGBATCH_EXAMPLES=20000 $(PYTEST) tests/torch/test_stateful.py

# Creates the pictures of docs/command-line.md; needs Chromium.
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
	$(INSTALL) $(EXTRAS) --group test
	touch $@ .venv/demo

.venv/check: .venv/test
	$(INSTALL) $(EXTRAS) --group check --group test
	touch $@

.venv/coverage: .venv/test
	$(INSTALL) $(EXTRAS) --group coverage --group test
	touch $@

.venv/bench: .venv/test
	$(INSTALL) $(EXTRAS) --group bench --group test
	touch $@

clean:
	rm -rf .venv
