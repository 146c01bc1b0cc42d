PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTED := $(VENV)/.ready-to-test
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup run test test-all lint clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fedncv needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing fedncv into $(VENV) (once; about a minute)"
	$(PIP) -e .
	@touch $(READY)

$(TESTED): $(READY)
	@echo "installing what the tests need into $(VENV) (once)"
	$(PIP) -e ".[test]"
	@touch $(TESTED)

run: $(READY)  ## the default study: both readings of FedNCV and four baselines on the built-in digits
	$(BIN)/fedncv run --recipe smoke --out runs/digits --overwrite

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -q -n 2 -m "not slow"

test-all: lint
	$(BIN)/pytest -q -n 2

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache

.PHONY: mutants
mutants: $(TESTED)  ## break the estimators on purpose: every change must be noticed, or excused in docs/mutants.md
	$(BIN)/python tools/mutate.py src/fedncv/estimators tests/estimators docs/mutants.md
