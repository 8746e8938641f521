# make quickstart: from an empty machine to a trained model; make test: everything CI runs; make test-all: slow tests too.
SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install quickstart lint docs test test-all

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

help:
	@echo 'make quickstart   install, prepare data, train, resume, evaluate and generate: a few minutes on two cores'
	@echo 'make test         install, then lint and run the tests, as CI does'
	@echo 'make test-all     the same with the tests marked slow: more meshes, kernels and whole programs'
	@echo 'make lint         ruff, mypy, the import layers, shellcheck and hadolint'
	@echo 'make docs         the documentation as a site, build/site/index.html; a dead link is an error'
	@echo 'make install      create .venv (PYTHON=python3.12 names another interpreter)'

install: $(INSTALLED)

# Compiled sources only: Python files are read in place.
$(INSTALLED): pyproject.toml constraints.txt setup.py tools/install.sh $(shell find csrc -type f -not -name '*.py*')
	tools/install.sh '$(PYTHON)'
	@touch $@

quickstart: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/quickstart/run.sh

SCRIPTS := .ci/run $(wildcard */*.sh */*/*.sh examples/slurm/*.sbatch tests/launch/slurm/*)
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck $(SCRIPTS)
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cpu

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# One thread a process: several ranks share the cores, and idle OpenMP threads spin. A worker takes whole files, which
# share what their first test makes, in the order of tests/conftest.py. Tests on a GPU need its memory for themselves.
# Bytecode is written even where the environment forbids it: else each of some hundred processes compiles megalin again.
WORKERS := $(if $(wildcard /dev/nvidia0),0,logical)

PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python tools/cpu_seconds.py \
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations=15

test: lint docs
	$(PYTEST) -m 'not slow'

test-all: lint docs
	$(PYTEST)
