# make demo: from a clone to an answered prompt.   make test: the whole test suite.   make help: the rest.
PYTHON ?= python3
VENV ?= .venv
# Where pip finds PyTorch's CPU build, if not on its usual indexes (see README.md, "PyTorch").
TORCH_INDEX ?=
MODEL := smollm2-135m-instruct

BIN := $(VENV)/bin
TORCH := $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)
CONSTRAINTS := constraints/base.txt constraints/torch-$(TORCH).txt
INSTALLED := $(VENV)/installed-$(TORCH)
PYTEST_ARGS ?=

.PHONY: help install model demo test check format clean
help:
	@echo "make demo     install, get the default model, serve it, answer a prompt, stop"
	@echo "make test     install and run the whole test suite"
	@echo "make check    lint and types"
	@echo "make format   format the code and fix what the linter can"
	@echo "make install  only create the environment ($(VENV))"
	@echo "make clean    remove the environment and caches"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; this is " + sys.version + ". Set PYTHON=/path/to/python")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing into $(VENV): this downloads PyTorch and Ray, and takes a minute or more without a word"
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  $(CONSTRAINTS:%=--constraint %) --editable '.[dev]' \
	  || { echo "Installation failed. If pip did not find torch, see README.md, section PyTorch." >&2; exit 1; }
	touch $@

model: $(INSTALLED)
	$(BIN)/helios models pull $(MODEL)

demo: $(INSTALLED)
	$(BIN)/helios demo

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: model
	$(BIN)/python -m pytest $(PYTEST_ARGS)

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
