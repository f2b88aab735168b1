# make demo   the comparison on this machine; says where the report is
# make test   lint, types, architecture and all tests that CI runs
# make lab    JupyterLab on 127.0.0.1 with the templates in its launcher
# A fresh machine needs Python 3.11 or newer and make; everything else is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
REPORTS ?= reports

.PHONY: demo test test-all lab lint clean

# The stamps hold what was installed: a second make starts at once, a changed lock installs again.
$(VENV)/.installed: requirements.lock pyproject.toml
	@echo "Installing into $(VENV) (a few minutes the first time) …"
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --requirement requirements.lock
	$(PIP) install --no-deps --editable .
	touch $@

$(VENV)/.tested: $(VENV)/.installed requirements-test.lock
	$(PIP) install --requirement requirements-test.lock
	touch $@

demo: $(VENV)/.installed
	$(BIN)/workbench execute templates/bert_scaling.ipynb --to $(REPORTS)

lab: $(VENV)/.installed
	$(BIN)/jupyter lab --ip=127.0.0.1

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest

test-all: lint
	WORKBENCH_TEST_ALL=1 $(BIN)/python -m pytest

clean:
	rm -rf $(VENV) reports runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
