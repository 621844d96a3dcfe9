# Everything a newcomer types. Each target does all the set-up it needs, once.
#
#   make demo      watch a tiny Llama find its batch size and train, on 2 CPU ranks
#   make demo-oom  the same when a neighbour takes half the memory in mid-run, beside an undisturbed run
#   make test      lint, types, and all tests that need no GPU
#   make check     lint and types only
#   make bench     the benchmarks that run on a CPU
#   make gpu       tests and benchmarks on a GPU, continuing where they stopped; writes docs/results/gpu.md
#   make clean     remove what these made

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo demo-oom test check bench gpu clean
.DEFAULT_GOAL := test

# torch first: on its own, so that the version pinned in constraints.txt is the one that all else gets.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

# The environment of all runs: one thread for each rank, and no network, which nothing here needs.
RUN := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 PYTHONWARNINGS=ignore

demo: $(READY)
	$(RUN) $(BIN)/tune run --nproc_per_node 2 adaptive_full_finetune_distributed \
		--config tiny/full output_dir=demo_output

demo-oom: $(READY)
	$(RUN) $(BIN)/tune run --nproc_per_node 2 adaptive_full_finetune_distributed \
		--config tiny/full output_dir=demo_output/undisturbed \
		adaptive_batching.memory_limit=30MiB
	$(RUN) $(BIN)/tune run --nproc_per_node 2 demos/neighbour.py \
		--config tiny/full output_dir=demo_output/disturbed \
		adaptive_batching.memory_limit=30MiB adaptive_batching.grow_back_after=10
	$(BIN)/python demos/compare_runs.py demo_output/undisturbed demo_output/disturbed

test: check
	$(RUN) $(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(RUN) $(BIN)/python benchmarks/search_cost.py
	$(RUN) $(BIN)/python benchmarks/step_overhead.py
	$(RUN) $(BIN)/python benchmarks/token_budget.py

gpu: $(READY)
	$(RUN) $(BIN)/python benchmarks/gpu.py

clean:
	rm -rf .venv demo_output build dist .mypy_cache .ruff_cache .pytest_cache
