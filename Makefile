PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTED := $(VENV)/.ready-to-test
TESTED_ALL := $(VENV)/.ready-to-test-all
DOCUMENTED := $(VENV)/.ready-for-docs
SITE := build/docs
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup run test test-all lint browser docs docs-links clean

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

$(TESTED_ALL): $(TESTED)
	@echo "installing the libraries and tools of the slow tests into $(VENV) (once)"
	$(PIP) -e ".[docs,lora,release]"
	@touch $(TESTED_ALL)

run: $(READY)  ## the default study: both readings of FedNCV and four baselines on the built-in digits
	@rm -rf runs/smoke  # what an earlier version of the code reached is not this one's result
	$(BIN)/fedncv study smoke --seeds 2 --out runs/smoke
	$(BIN)/fedncv report runs/smoke

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

browser:  # Debian's Chromium opens the report in the tests; without it those tests are skipped
	@{ command -v chromium && command -v chromedriver; } >/dev/null 2>&1 || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "installing Chromium for the tests (once)" && \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; } || \
	  echo "no Chromium here, and it cannot be installed: the tests of the page in a browser are skipped"

test: lint browser
	$(BIN)/pytest -q -n 2 -m "not slow"

test-all: lint browser $(TESTED_ALL)
	$(BIN)/pytest -q -n 2

.PHONY: package
package: $(TESTED_ALL)  ## wheel and source distribution, in dist/
	@rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

$(DOCUMENTED): $(READY)
	@echo "installing what the site needs into $(VENV) (once)"
	$(PIP) -e ".[docs]"
	@touch $(DOCUMENTED)

docs: $(DOCUMENTED)  ## the site, from docs/: runs the gallery and the notebooks; warnings and broken links are errors
	@rm -rf $(SITE) docs/auto_examples
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs $(SITE)
	$(BIN)/python tools/check_site.py $(SITE)

docs-links: docs  ## the links that leave the site; needs a network
	$(BIN)/python -m sphinx -q -b linkcheck -d build/doctrees docs build/links

clean:
	rm -rf build dist docs/auto_examples $(VENV) .mypy_cache .ruff_cache .pytest_cache

.PHONY: mutants
JOBS ?= 2
mutants: $(TESTED)  ## break estimators and methods on purpose: every change must be noticed, or excused in docs/mutants.md
	$(BIN)/python tools/mutate.py src/fedncv/estimators tests/estimators docs/mutants.md --jobs $(JOBS)
	$(BIN)/python tools/mutate.py src/fedncv/methods tests/methods docs/mutants.md --jobs $(JOBS)

.PHONY: results
results: $(READY)  ## tables and figures of docs/results/ anew, from the raw metrics in its archives
	@mkdir -p runs
	@for archive in docs/results/*.tar.xz; do \
	  name=$$(basename $$archive .tar.xz); rm -rf runs/$$name; tar xf $$archive -C runs; \
	  $(BIN)/fedncv report runs/$$name || exit 1; \
	  rm -f docs/results/$${name}_*.png; \
	  case $$name in ablation|robustness) figure=dots;; fig2) figure=scale;; *) figure=curves;; esac; \
	  cp runs/$$name/report/$$figure.png docs/results/$${name}_$$figure.png; \
	  { printf '# The table of %s\n\n' $$name; cat runs/$$name/report/table.md; } > docs/results/$$name.md; \
	  if [ -f runs/$$name/report/parts.md ]; then \
	    { printf '# Gain and cost of every method of %s\n\n' $$name; cat runs/$$name/report/parts.md; } > docs/results/$${name}_parts.md; fi; \
	done
