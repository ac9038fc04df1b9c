# Everything runs in virtual environments that these targets make; only Python 3.11 or newer, make and a network are needed.

PYTHON ?= python3
VENV := .venv
BENCH_VENV := .bench-venv
BIN := $(VENV)/bin
PIP_OPTIONS := --quiet --disable-pip-version-check --no-input --progress-bar off
PROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml)
TYPED := mpbackend matrices plugins examples benchmarks tests docs

.PHONY: demo test lint test-slow test-faults test-ascend test-npu test-cuda test-te test-browser bench docs clean python-version
.DEFAULT_GOAL := test

# Threads that wait asleep: on cores that other work shares, waiting busily makes a step ten times slower.
demo: export OMP_WAIT_POLICY ?= PASSIVE
demo: $(VENV)/.stamp
	$(BIN)/mpbackend demo

test: lint
	$(BIN)/python -m pytest -n 2 -m "not slow"

lint: $(VENV)/.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)

test-slow: $(VENV)/.stamp
	$(BIN)/python -m pytest -n 2 -m slow

# Silent faults put back into a copy of the code, one at a time: the tests that guard against each must fail.
test-faults: $(VENV)/.stamp
	$(BIN)/python -m tests.faults.run

test-cuda: $(VENV)/.stamp
	$(BIN)/python -m pytest plugins/cuda/tests/device || [ $$? -eq 5 ]  # 5: nothing collected, no GPU here

test-ascend: | python-version
	$(PYTHON) plugins/ascend/tests/lane.py

test-npu:
	@if $(PYTHON) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch_npu") is None)'; then \
	  $(PYTHON) -m venv --system-site-packages .npu-venv && .npu-venv/bin/python -m pip install $(PIP_OPTIONS) -e . -e plugins/cpu -e plugins/ascend pytest && \
	  .npu-venv/bin/python -m pytest -q plugins/ascend/tests/device; \
	else echo "test-npu: skipped: $(PYTHON) has no torch_npu; name one that has: make PYTHON=... test-npu"; fi

test-te: $(VENV)/te/.stamp
	PYTHONPATH=$(VENV)/te $(BIN)/python -m pytest plugins/cuda/tests/test_te_recipes_installed.py plugins/cuda/tests/test_te_layers_installed.py

$(VENV)/te/.stamp: plugins/cuda/requirements-te.txt $(VENV)/.stamp
	$(BIN)/python -m pip install $(PIP_OPTIONS) --no-deps --target $(VENV)/te -r plugins/cuda/requirements-te.txt
	touch $@

# Needs a Chromium from the system packages; the screenshots are in build/screenshots.
test-browser: export MPBACKEND_SCREENSHOTS ?= build/screenshots
test-browser: $(VENV)/browser/.stamp
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { echo "no Chromium here; for example: apt-get install chromium" >&2; exit 1; }
	PYTHONPATH=$(VENV)/browser $(BIN)/python -m pytest tests/browser

$(VENV)/browser/.stamp: requirements-browser.txt $(VENV)/.stamp
	$(BIN)/python -m pip install $(PIP_OPTIONS) --target $(VENV)/browser -r requirements-browser.txt
	touch $@

bench: $(BENCH_VENV)/.stamp
	status=0; for script in benchmarks/*.py; do echo "== $$script"; $(BENCH_VENV)/bin/python "$$script" || status=1; done; exit $$status

docs: $(VENV)/.stamp
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) $(BENCH_VENV) .ascend-venv .npu-venv build dist demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
	find . -name '*.egg-info' -prune -exec rm -rf {} +

$(VENV)/.stamp: requirements-dev.txt $(PROJECTS) | python-version
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_OPTIONS) -r requirements-dev.txt
	touch $@

$(BENCH_VENV)/.stamp: requirements-bench.txt $(PROJECTS) | python-version
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install $(PIP_OPTIONS) -r requirements-bench.txt
	touch $@

python-version:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than Python 3.11; name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
