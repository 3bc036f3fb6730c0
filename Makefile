# A fresh clone needs Python 3.10 or newer, make and a package index; everything else goes into .venv.
#   make test ARGS="-k pp2"     further arguments of the command behind a target
#   make PYTHON=python3.12 ...  the Python that .venv is made with
.DEFAULT_GOAL := help
.PHONY: help install train test check format contract
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
ARGS ?=
unexport PYTHONDONTWRITEBYTECODE # set in many containers: each process would compile torch and Lightning anew, for 7 s
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 1))')

help: ## what can be made
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "make %-10s%s\n", $$1, $$2 }'

install: $(READY) ## .venv with the package and all that its tests need

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "PYTHON is $(PYTHON): Python 3.10 or newer is needed. Set make PYTHON=python3.12 or such." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --editable '.[dev]' # Python compiles what it imports
	@touch $@

train: install ## the quickstart: a small GPT on real text, two pipeline ranks, a few minutes on two cores
	$(BIN)/hybrid train experiment=quickstart $(ARGS)

test: install ## the whole suite, a file a worker at a time: one more than cores, since ranks wait for each other
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

check: install ## format, lint, types, floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: install ## puts the code into its form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

contract: install ## Lightning's promises, item by layout: same, refused or different
	$(BIN)/python -m tests.contract $(ARGS)
