# Two commands for a newcomer: `make run` and `make test`. Both set everything up first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: run setup lint test test-all clean

run: setup
	$(BIN)/tilewave ladder

setup: $(READY)

$(READY): pyproject.toml requirements-test.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-test.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 -m "not long"

test-all: lint
	$(BIN)/pytest -n 2

clean:
	rm -rf $(VENV) .cache build dist
