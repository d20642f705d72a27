# make demo    two real models, three tenants, a live view and the proof
# make test    lint, types, import arrows and every test
# make check   the quick part of it: lint, types, import arrows
# make bench   the runtime, its shared prefixes, its speculation, beside mlx-lm on this machine, and its device lease: four JSON objects
# make chaos   ten minutes of kills, stops, damage and shortages under a mixed load (SECONDS=, SEED=); a JSON object
# make clean   removes what the targets above made here (not the fetched models)
#
# Each makes its own .venv first; all it takes is python3 >= 3.11 with pip, and make.

SHELL := /bin/sh
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.made-from-pyproject

.PHONY: help demo test check bench chaos clean model
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(STAMP)
	@$(PYTHON) -m runtime.cli demo

# The few tests on a real model need it in the user's cache; fetching one that is there costs nothing.
model: $(STAMP)
	@$(PYTHON) -m runtime.cli models fetch smollm2-135m

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PYTHON) -m pytest -q tests/unit/test_arrows.py

# Equality tests need MLX's own reference BLAS in the test process, hence no preload; nothing may ask a model hub. Two tests
# at a time: one computes while the other waits for a process to begin or end.
test: check model
	env -u LD_PRELOAD HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -n 2 --dist worksteal --durations=12

bench: model
	$(PYTHON) -m benchmarks.overhead
	$(PYTHON) -m benchmarks.prefix
	$(PYTHON) -m benchmarks.speculation
	$(PYTHON) -m benchmarks.device_lease

SECONDS := 600
SEED := $(shell date +%s)
chaos: $(STAMP)
	env -u LD_PRELOAD $(PYTHON) -m tests.chaos --seconds $(SECONDS) --seed $(SEED)

$(STAMP): pyproject.toml scripts/make-venv
	@sh scripts/make-venv $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
