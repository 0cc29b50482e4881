PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/tiny.toml
STAMP := $(VENV)/.installed

.PHONY: train test check install clean

train: install  ## the true asynchronous job on this machine, in minutes
	$(BIN)/llamarl train $(RECIPE)

test: install  ## the whole CPU suite
	$(BIN)/python -m pytest

check: install  ## formatter, linter, type checker
	$(BIN)/ruff format --check src tests benchmarks examples scripts
	$(BIN)/ruff check src tests benchmarks examples scripts
	$(BIN)/mypy

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
