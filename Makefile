# make demo   the comparison on this machine; says where the report is
# make test   lint, types, architecture, and the tests that take up to 2 s, with some that stand for the longer ones;
#             what fails is repeated once, alone
# make docs   the documentation site, built strictly into site/
# make wheel  the wheel, built and tried in an empty environment
# make lab    JupyterLab on 127.0.0.1 with a card for each template in its launcher
# make test-all         what CI runs: all of that and the longer tests
# make test-exhaustive  the same with every model, plan and combination that is known, for an hour or two
# make test-gpu         the tests for GPUs alone, side by side on those of this machine
# make test-peers       DeepSpeed and Megatron-Core, which only the benchmarks need, installed and compared with plain PyTorch
# make test-trackio     Trackio, which is optional, installed and tried
# make test-under-load  make test three times beside four busy loops, to show that no verdict depends on speed
# make durations        all tests, which records in tests/durations.json how long each takes
# A fresh machine needs Python 3.11 or newer and make; everything else is installed into .venv.

# On Linux x86-64 the usual index has torch with CUDA, which is larger by gigabytes; for a machine without a GPU:
#     make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
# A torch that $(VENV) has already is kept if pyproject.toml allows its version: it may fit the driver of this node.

PYTHON ?= python3
VENV := .venv
TORCH_INDEX ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
REPORTS ?= reports

# Where this is set, as in many containers, each of the hundreds of processes would compile all of torch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-exhaustive test-under-load durations tests-elsewhere tests-in-browser tests-on-gpu test-gpu test-peers test-trackio docs wheel lab lint clean

HAS_TORCH := import re, importlib.util as u, importlib.metadata as m; \
	need = re.search(r"torch>=([0-9.]+)", open("pyproject.toml").read())[1]; \
	key = lambda text: [int(part) for part in re.findall("[0-9]+", text)[:2]]; \
	raise SystemExit(not u.find_spec("torch") or key(m.version("torch")) < key(need))

# Modules are compiled when they are first imported (--no-compile): compiling all of every package takes longer than that.
# The stamps hold what was installed: a second make starts at once, a changed lock installs again.
$(VENV)/.installed: requirements.lock pyproject.toml
	@echo "Installing into $(VENV) (a few minutes the first time): pip names each package as it goes."
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -z "$(TORCH_INDEX)" || $(PIP) install --no-compile --index-url $(TORCH_INDEX) $$(grep '^torch==' requirements.lock)
	if $(BIN)/python -c '$(HAS_TORCH)'; then grep -v '^torch==' requirements.lock; else cat requirements.lock; fi > $@.lock
	$(PIP) install --no-compile --requirement $@.lock
	$(PIP) --quiet uninstall --yes workbench
	$(PIP) --quiet install --no-deps --editable .
	touch $@

$(VENV)/.tested: $(VENV)/.installed requirements-test.lock
	$(PIP) install --no-compile --requirement requirements-test.lock
	touch $@

$(VENV)/.documented: $(VENV)/.tested requirements-docs.lock
	$(PIP) install --no-compile --requirement requirements-docs.lock
	touch $@

demo: $(VENV)/.installed
	$(BIN)/workbench execute templates/bert_scaling.ipynb --to $(REPORTS)

# The extension is taken from this checkout, as it stands. In a container there is often no user but root. An environment
# that has JupyterLab stays as it is; what is missing in it, `workbench doctor` says.
LAB_EXTENSION := $(CURDIR)/workbench/lab/jupyter
lab: $(if $(wildcard $(BIN)/jupyter-lab),,$(VENV)/.installed)
	JUPYTER_PATH=$(LAB_EXTENSION) JUPYTER_CONFIG_PATH=$(LAB_EXTENSION) \
		$(BIN)/jupyter lab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root)

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Four files of tests at a time, one thread each, the longest first, because many tests wait for processes. Beside them
# JupyterLab is driven, one test at a time, and the code is checked. Each run of pytest leaves a note of what failed; what
# did is repeated alone before tests.unsteady gives the verdict. Tests of GPUs come last: they measure memory and time.
NOTES := .cache/notes
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(RUN)
BESIDE := --workers 4
TESTS = $(MAKE) --no-print-directory --jobs 2 tests-elsewhere tests-in-browser
ON_GPU = $(MAKE) --no-print-directory tests-on-gpu
# $(call judged,COMMANDS,RUNS): runs tests beside the checks of the code, prints these in one piece, and judges both.
define judged
	@mkdir -p $(NOTES); rm -f $(NOTES)/*; \
	$(MAKE) --no-print-directory lint > $(NOTES)/lint.txt 2>&1 & lint=$$!; \
	$(1); wait $$lint; code=$$?; cat $(NOTES)/lint.txt; \
	$(BIN)/python -m tests.unsteady $(patsubst %,$(NOTES)/%.json,$(2)) || exit 1; \
	test $$code = 0 || { echo "make lint failed; what it said stands above."; exit 1; }
endef

test: $(VENV)/.tested
	$(call judged,$(TESTS) RUN=--short,elsewhere browser)

test-all: $(VENV)/.tested
	$(call judged,$(TESTS); $(ON_GPU),elsewhere browser gpu)

test-exhaustive: export WORKBENCH_TEST_EXHAUSTIVE = 1
test-exhaustive: $(VENV)/.tested
	$(call judged,$(TESTS) RUN=--timeout=1800; $(ON_GPU),elsewhere browser gpu)

durations: $(VENV)/.tested
	@mkdir -p $(NOTES); rm -f $(NOTES)/*; $(TESTS) RUN=--record-durations=tests/durations.json; \
	$(BIN)/python -m tests.unsteady $(NOTES)/elsewhere.json $(NOTES)/browser.json

# Shows that no verdict depends on speed: WHAT (test, test-all) passes TIMES times beside LOOPS busy loops, on CORES cores.
WHAT ?= test
TIMES ?= 3
LOOPS ?= 4
test-under-load: $(VENV)/.tested
	$(BIN)/python -m tests.under_load --times $(TIMES) --loops $(LOOPS) $(if $(CORES),--cores $(CORES)) -- $(MAKE) $(WHAT)

tests-elsewhere: $(VENV)/.tested
	-@$(PYTEST) --note-failures=$(NOTES)/elsewhere.json $(BESIDE) \
		$(filter-out tests/__pycache__/ tests/browser/ tests/gpu/,$(wildcard tests/*/))

# What it prints comes in one piece, when it is over.
tests-in-browser: $(VENV)/.tested
	-@said=$$($(PYTEST) --note-failures=$(NOTES)/browser.json tests/browser 2>&1); printf '\n%s\n' "$$said"

# Three workers a GPU; what looks at one start of processes stays together. Without a GPU all of it is skipped.
ON_GPUS := tests/gpu --numprocesses auto --dist loadgroup
tests-on-gpu: $(VENV)/.tested
	-@$(PYTEST) --note-failures=$(NOTES)/gpu.json $(ON_GPUS)

test-gpu: $(VENV)/.tested
	$(PYTEST) $(ON_GPUS)

$(VENV)/.peers: $(VENV)/.tested benchmarks/peers/requirements.txt
	$(PIP) install --no-compile --requirement benchmarks/peers/requirements.txt
	touch $@

test-peers: $(VENV)/.peers
	$(PYTEST) tests/distributed/test_peers.py

# Trackio lies in a folder of its own: it needs an older Pillow than all else here.
$(VENV)/.trackio: $(VENV)/.tested requirements-trackio.lock
	$(PIP) install --no-compile --no-deps --upgrade --target $(VENV)/trackio --requirement requirements-trackio.lock
	touch $@

test-trackio: $(VENV)/.trackio
	PYTHONPATH=$(CURDIR)/$(VENV)/trackio $(PYTEST) tests/unit/test_runs_trackio.py

docs: $(VENV)/.documented
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel is installed by the same lock.
wheel: $(VENV)/.documented
	rm -rf dist .wheel
	$(BIN)/python -m build --wheel --outdir dist . > /dev/null
	$(PYTHON) -m venv .wheel/venv
	.wheel/venv/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --constraint requirements.lock dist/*.whl
	cd .wheel && venv/bin/workbench doctor && venv/bin/workbench new bert_scaling && test -s bert_scaling.ipynb
	.wheel/venv/bin/jupyter server extension list 2>&1 | grep -q "workbench.lab.*OK"
	.wheel/venv/bin/jupyter labextension list 2>&1 | grep -q "workbench v.*OK"
	rm -rf .wheel

clean:
	rm -rf $(VENV) dist site .wheel reports runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
