# Everything a newcomer types. Each target does all the set-up it needs, once.
#
#   make demo      watch a tiny Llama find its batch size and train, on 2 CPU ranks
#   make demo-oom  the same, with half of one rank's memory taken mid-run, compared with an undisturbed run
#   make test      lint, types, and the quick tests, which sample the slow ones (SHARD=N takes another sample)
#   make test-all  lint, types, and every test that needs no GPU
#   make test-rest only what `make test` samples or leaves out, as test-all runs it (MINUTES=M: for so long)
#   make test-one  the tests in T, e.g. T=tests/core/test_search.py
#   make test-torchtune-main PYTHON=...  what is special on torchtune's main branch, which that Python has
#   make check     lint and types only
#   make bench     the benchmarks that run on a CPU
#   make dist      both distributions in dist/, checked, and tried in an environment of their own
#   make gpu       tests and benchmarks on a GPU, continuing where they stopped; writes docs/results/gpu.md
#   make clean     remove what these made

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo demo-oom test test-unit test-ranks test-runs test-all test-rest test-one test-torchtune-main check bench dist gpu clean
.DEFAULT_GOAL := test

PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# torch first, on its own, so that everything else gets the version pinned in constraints.txt.
$(READY): pyproject.toml library/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("torchtune-adaptive needs Python 3.11 or newer, and $(PYTHON) is %d.%d. For example: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "Setting up .venv with $(PYTHON), once:"
	@$(PYTHON) -m venv .venv
	@echo "  1 of 2: installing torch (1 to 3 minutes, 1 GB or more)"
	@$(PIP) torch
	@echo "  2 of 2: installing torchtune, what it needs, and tools for tests (1 to 5 minutes)"
	@$(PIP) --editable ./library --editable '.[dev]'
	@$(PIP) --no-deps --target .venv/torchvision torchvision  # see tests/helpers/torchvision.py
	@touch $(READY)

# The environment of every run: one thread per rank, no network, because nothing here needs one, and compiled
# modules are kept, because tests start many processes.
RUN := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 PYTHONWARNINGS=ignore

# On a CPU nothing uses torchao's kernels, and it would say that it cannot load them.
DEMO := $(RUN) TORCHAO_FORCE_SKIP_LOADING_SO_FILES=1

demo: $(READY)
	$(DEMO) $(BIN)/tune run --nproc_per_node 2 adaptive_full_finetune_distributed \
		--config tiny/full output_dir=demo_output

demo-oom: $(READY)
	$(DEMO) $(BIN)/tune run --nproc_per_node 2 adaptive_full_finetune_distributed \
		--config tiny/full output_dir=demo_output/undisturbed \
		adaptive_batching.memory_limit=30MiB
	$(DEMO) $(BIN)/tune run --nproc_per_node 2 demos/neighbour.py \
		--config tiny/full output_dir=demo_output/disturbed \
		adaptive_batching.memory_limit=30MiB adaptive_batching.grow_back_after=10
	$(BIN)/python demos/compare_runs.py demo_output/undisturbed demo_output/disturbed

SHARD ?= 0
PYTEST := $(RUN) $(BIN)/python -m pytest --shard $(SHARD)
TIER :=
OF_TIER = $(TIER) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(PLACES),--places $(PLACES))

# In lanes, because processes of ranks wait for each other much of the time; each lane prints when it is done.
LANES = @+$(MAKE) --no-print-directory -j 3 --output-sync=target test-unit test-ranks test-runs

test: $(READY)
	@echo "Running lint, types and unit tests, tests of ranks, and whole runs in parallel: about 30 minutes on 2 idle cores."
	$(LANES)

test-unit: check
	$(PYTEST) --lane unit $(OF_TIER)

test-ranks: $(READY)
	$(PYTEST) --lane ranks $(OF_TIER)

test-runs: $(READY)
	$(PYTEST) --lane runs $(OF_TIER)

test-all: $(READY)
	$(LANES) TIER=--exhaustive

test-rest: $(READY)
	$(LANES) TIER=--rest

test-one: $(READY)
	$(PYTEST) $(or $(T),$(error which tests? For example: make test-one T=tests/core/test_search.py))

test-torchtune-main:
	$(RUN) PATH="$(dir $(PYTHON)):$$PATH" $(PYTHON) -m pytest -W ignore tests/recipe/test_upstream.py \
		tests/recipe/test_objectives.py tests/recipe/test_torchtune_main.py tests/recipe/test_validating_runs.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(RUN) $(BIN)/python benchmarks/search_cost.py
	$(RUN) $(BIN)/python benchmarks/step_overhead.py
	$(RUN) $(BIN)/python benchmarks/host_overhead.py
	$(RUN) $(BIN)/python benchmarks/mesh_overhead.py
	$(RUN) $(BIN)/python benchmarks/token_budget.py
	$(RUN) $(BIN)/python benchmarks/rollout_budget.py

# What a release uploads: the library first, which the recipes need.
TRIED := build/tried/bin
dist: $(READY)
	rm -rf dist build/tried
	$(BIN)/python -m build --no-isolation --outdir dist library
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(PYTHON) -m venv build/tried
	$(TRIED)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(TRIED)/pip install --quiet --disable-pip-version-check --constraint constraints.txt twine \
		dist/torchtune_adaptive_library-*.whl
	$(TRIED)/twine check --strict dist/*
	cd build && tried/bin/python -c "from torchtune_adaptive import AdaptiveStep"
	$(TRIED)/pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/torchtune_adaptive-*.whl
	cd build && $(DEMO) tried/bin/tune run --nproc_per_node 2 adaptive_full_finetune_distributed \
		--config tiny/full output_dir=tried/demo_output
	@echo "Built and tried: $$(ls dist | tr '\n' ' ')"

gpu: $(READY)
	$(RUN) $(BIN)/python benchmarks/gpu.py --out docs/results

clean:
	rm -rf .venv demo_output build dist .mypy_cache .ruff_cache .pytest_cache
