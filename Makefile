# Targets build their own virtual environment in .venv; pip's settings (PIP_CONSTRAINT, indexes)
# are taken from the environment. A stamp per set of extras says what is installed already.

PYTHON ?= python3
VENV ?= .venv
# One test process per core, up to 8: each of them loads torch and the compiler. Who is done takes
# tests from the others: the slow ones stand together, at the beginning. Many tests start Python
# again, which finds the bytecode of those before.
WORKERS ?= $(shell n=$$(nproc); echo $$((n > 8 ? 8 : n)))
PYTEST ?=

bin := $(VENV)/bin
types := build/types
mypy = $(abspath $(bin))/mypy --config-file $(abspath pyproject.toml) \
       --cache-dir $(abspath .mypy_cache)

# The DSL's CUDA 13 code generator is the faster one and needs driver 580.
driver := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null \
            | head -n 1 | cut -d. -f1 | grep -E '^[0-9]+$$')
cu13 := $(shell [ "$(or $(driver),0)" -ge 580 ] && echo ,cu13)

.PHONY: help demo test lint format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.cli$(cu13)  ## the linear layers of a Llama-3-8B block: find, compile, verify, time
	$(bin)/python examples/llama_linear_layers.py

test: $(VENV)/.test,cli$(cu13)  ## the tests; WORKERS=n processes, PYTEST='-k name' to choose
	PYTHONDONTWRITEBYTECODE= $(bin)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST)

lint: $(VENV)/.dev $(types)/kernel_api  ## ruff (rules and format), then mypy --strict
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	cd $(types) && $(mypy) -p kernel_api && $(mypy) $(abspath tests/data/typed_program.py)

format: $(VENV)/.dev  ## let ruff mend what it can
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

clean:  ## remove what the other targets made
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

$(bin)/python:
	$(PYTHON) -m venv $(VENV)

# .venv/.test,cli says that the extras "test" and "cli" are installed.
$(VENV)/.%: pyproject.toml | $(bin)/python
	$(bin)/python -m pip install -e '.[$*]'
	@touch $@

# The folders providers/ and implementations/ stand beside the package that they belong to; mypy
# sees the installed shape as a tree of links. Kernels in the DSL's own dialect are not type-checked.
$(types)/kernel_api: kernel_api providers
	@rm -rf $@ && mkdir -p $@
	@ln -s $(abspath $(wildcard kernel_api/*) providers) $@/
