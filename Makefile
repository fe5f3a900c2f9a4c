# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv and install everything first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Bytecode caches halve the start-up time of every process; some machines switch them off.
unexport PYTHONDONTWRITEBYTECODE
export OMP_WAIT_POLICY := PASSIVE
export MLFLOW_DISABLE_TELEMETRY := true

.PHONY: demo test lint types install clean
demo: install
	$(BIN)/python -m workbench.study studies/sync_interval.yaml

test: install
	$(BIN)/python -m pytest -n auto --dist loadgroup

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) results .pytest_cache .mypy_cache .ruff_cache .hypothesis
