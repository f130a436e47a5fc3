# The words that people and the CI use. Needs Python 3.11 to 3.13 (with venv and pip) and make; the rest goes into .venv.
#
#   PYTHON                 the interpreter that .venv is made with (python3)
#   DEEPINFER_TORCH_INDEX  an index with the build of torch you want, e.g. a CPU one (default: pip's own index decides)
#   FRAMES, SEED, BLOCK    of test-nightly: how many frames (10000000), and where to go on from, as it prints
#   DEEPINFER_NO_VENV=1    use PYTHON and the packages it has: no .venv, no install (GPU machines with a torch of their own)

PYTHON ?= python3
DEEPINFER_TORCH_INDEX ?=
DEEPINFER_NO_VENV ?=
FRAMES ?= 10000000
SEED ?=
BLOCK ?= 0

VENV := .venv
CODE := deepinfer protocol workers kernels examples benchmarks tests
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ifeq ($(DEEPINFER_NO_VENV),1)
PY := $(PYTHON)
RUN_READY :=
DEV_READY :=
else
PY := $(VENV)/bin/python
RUN_READY := $(VENV)/.ready-run
DEV_READY := $(VENV)/.ready-dev
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help venv venv-dev demo test test-full test-gpu test-nightly bench check clean

help: ## this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(RUN_READY) ## prepare .venv with what serving needs

venv-dev: $(DEV_READY) ## prepare .venv with what tests and checks need as well

demo: $(RUN_READY) ## answer a few prompts with the model that comes with the packages
	@$(PY) examples/offline_inference.py

test: $(DEV_READY) ## the tests that need no GPU and little time
	@$(PY) -m pytest -m "not gpu and not full"

test-full: $(DEV_READY) ## all tests that need no GPU
	@$(PY) -m pytest -m "not gpu"

test-gpu: $(DEV_READY) ## the tests that need a GPU, each by name
	@# The files that have one: what others import need not be on such a machine.
	@$(PY) -m pytest -v -m gpu $$(grep -rl 'mark\.gpu' tests --include='test_*.py')

test-nightly: $(DEV_READY) ## frames that nobody wrote, by the million
	@PYTHONPATH=tests $(PY) -m protocol.fuzz --frames $(FRAMES) --block $(BLOCK) $(if $(SEED),--seed $(SEED))

bench: $(DEV_READY) ## what a streamed token costs the host, as JSON
	@$(PY) benchmarks/host_overhead.py --json

check: $(DEV_READY) ## format, lint, types, layering
	@echo "== format" && $(PY) -m ruff format --check .
	@echo "== lint" && $(PY) -m ruff check .
	@echo "== types" && $(PY) -m mypy $(CODE)
	@echo "== layering" && $(PY) -m pytest -q tests/test_layering.py

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CODE) -type d -name __pycache__ -prune -exec rm -rf {} +

# Each stamp is newer than all that decides what its environment holds. An environment that is there is brought up to
# date, not wiped: `make clean` does that.

$(VENV)/.ready-venv: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "$(PYTHON) is not a Python 3.11 to 3.13; name one: make PYTHON=python3.11 ..."; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "could not make $(VENV): on Debian and Ubuntu, install python3-venv"; exit 1; }
ifneq ($(DEEPINFER_TORCH_INDEX),)
	@# --no-deps: such an index seldom has the pinned versions of what torch needs; the next install brings those.
	@echo "installing torch from DEEPINFER_TORCH_INDEX"
	@$(PY) -m pip install -q --no-deps --index-url "$(DEEPINFER_TORCH_INDEX)" -c constraints.txt torch
endif
	@touch $@

$(VENV)/.ready-run: pyproject.toml $(VENV)/.ready-venv
	@echo "installing what serving needs into $(VENV) (torch is large: the first time takes minutes)"
	@$(PY) -m pip install -q -c constraints.txt -e '.[worker,uvloop,deepseek,structured,server,metrics]'
	@touch $@

$(VENV)/.ready-dev: pyproject.toml $(VENV)/.ready-venv
	@echo "installing what tests need into $(VENV) (torch is large: the first time takes minutes)"
	@$(PY) -m pip install -q -c constraints.txt -e '.[dev]'
	@# --no-deps: the DeepSeek-V4.1 that tests compare with; the training stack that it asks for is not needed for that.
	@$(PY) -m pip install -q --no-deps -c constraints.txt nemo-automodel
	@touch $(VENV)/.ready-run $@
