# The two commands a newcomer needs are `make train` and `make test`. Each target makes the environment
# it needs (.ci/venv), on a machine with Python and nothing else; a stamp makes the next run instant.
#
#   make train                    trains the demo; ARGS="--config.train.steps=20" passes flags on
#   make plan ARGS="--config=..."  a run on a GPU cluster that is not there: memory, time, better folds
#   make test                     every test that a CPU can run; ARGS="-k router" passes flags to pytest
#   make test-deviceless          tests that run the real GPU compiler, with no GPU (5 GB of tools)
#   make test-large               tests that need 22 GB of memory
#   make parity                   every fold against one device, float32 and float64, as a table
#   make lint                     ruff and the type checker (make typecheck: that alone)
#   make clean                    removes environments and caches, and keeps runs/

.DEFAULT_GOAL := help
.PHONY: help train plan test test-deviceless test-large parity lint typecheck clean

lock := pyproject.toml constraints.txt .ci/venv
# A process for each core, at most 8; the tests of a file share one, and what they have compiled. The
# files go in the order of collection, in which conftest.py puts the long ones first.
workers := --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

help:
	@sed -n 's/^#   //p' Makefile

train: .venv/.train
	.venv/bin/python -m launch.train --config=configs/demo.py $(ARGS)

plan: .venv-gpu/.plan
	.venv-gpu/bin/python -m moejax.plan $(ARGS)

test: .venv/.dev
	.venv/bin/python -m pytest $(workers) -m "not deviceless and not large" tests $(ARGS)

test-large: .venv/.dev
	.venv/bin/python -m pytest -m large tests $(ARGS)

# pytest's status 5 means that nothing was collected: said, and not taken for a failure.
test-deviceless: .venv-gpu/.dev
	.venv-gpu/bin/python -m pytest $(workers) -m deviceless tests $(ARGS) || { status=$$?; \
	  [ $$status -eq 5 ] && echo "no deviceless test exists yet: nothing was run" || exit $$status; }

parity: .venv/.dev
	.venv/bin/python -m tests.parity

lint: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/pyrefly check

typecheck: .venv/.dev
	.venv/bin/pyrefly check

# A lean environment to train; the tools to test come on top of it.
.venv/.train: $(lock)
	.ci/venv .venv
	@touch $@

.venv/.dev: $(lock)
	.ci/venv .venv dev
	@touch .venv/.train $@

.venv-gpu/.plan: $(lock)
	.ci/venv .venv-gpu gpu
	@touch $@

.venv-gpu/.dev: $(lock)
	.ci/venv .venv-gpu dev,gpu,inspect,triton
	@touch .venv-gpu/.plan $@

clean:
	rm -rf .venv .venv-gpu .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
