# Everything from nothing: only Python (3.11 or newer), make and a package index are needed.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
PIP := $(BIN)/python -m pip install --constraint constraints.txt

.PHONY: train test lint format docs clean soak

train: $(STAMP)
	$(BIN)/python -m parallax train $(ARGS)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not soak" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(DOCS_STAMP)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and by its exact version, so that nothing that follows can bring a second one.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable '.[dev]'
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(PIP) --editable '.[docs]'
	touch $@

# Hours: draws thousands of compositions and writes the composability matrix.
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m parallax.testing.soak --out docs/composability.md $(ARGS)
