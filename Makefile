# Every target runs in .venv, which is made on first use and made anew only when a dependency changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TYPES := build/types

.PHONY: venv demo test lint sweep

venv: $(STAMP)

# torch first, so that nothing else chooses its version.
$(STAMP): pyproject.toml constraints.txt cp_compile/_version.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	touch $@

# An unmodified FLUX on two local ranks, compared with one process. ARGS="--ulysses 4 --world 4" changes that.
demo: venv
	$(BIN)/python -m cp_compile demo $(ARGS)

# ARGS="-m fast" runs the tests that take seconds.
test: venv
	$(BIN)/python -m pytest $(ARGS)

# The whole zoo on four meshes, and docs/models.md from it: an hour or two. It goes on where it was stopped.
sweep: venv
	$(BIN)/python -m tests.models.sweep $(ARGS)

# A type checker finds packages by folder, and `passes/` is no folder of `cp_compile/`: it gets a tree of links.
lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPES) && mkdir -p $(TYPES)/cp_compile
	ln -s $(CURDIR)/cp_compile/* $(CURDIR)/passes $(TYPES)/cp_compile/
	cd $(TYPES) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml
