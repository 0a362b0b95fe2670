# make serve   environment, install, starter models, server on 127.0.0.1:8000
# make test    the same set-up, then every test that takes a few seconds
# make docs    the documentation, in site/
# make lint    style
# make setup   only the environment; the command is then .venv/bin/polymux

.DELETE_ON_ERROR:
.PHONY: setup models serve test slow apart lint docs clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torchao is imported by transformers wherever it is installed, and costs every process three seconds: it is tested apart
APART := plugins/torchao
PLUGINS := $(filter-out $(APART),$(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml)))
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11 python,\
	$(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))

setup: $(STAMP)

# Rebuilt only when what is installed changes: editable installs see new code by themselves.
$(STAMP): pyproject.toml setup.py $(PLUGINS:%=%/pyproject.toml)
	@test -n "$(PYTHON)" || { echo "polymux needs Python 3.11 or newer: make setup PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q "pip>=24" "setuptools>=77"
	@echo "installing polymux and what it stands on (about 6 GB and a few minutes the first time)"
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --no-build-isolation \
		-e ".[test,dev,docs,gguf]" $(foreach plugin,$(PLUGINS),-e ./$(plugin))
	touch $@

models: setup
	$(BIN)/polymux pull

serve: models
	$(BIN)/polymux serve

test: models
	$(BIN)/python -m pytest

slow: models
	$(BIN)/python -m pytest -m "slow and not gpu"

docs: setup
	$(BIN)/python -m mkdocs build --strict

apart: setup
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --target build/apart "torchao>=0.18,<0.19"
	PYTHONPATH=build/apart $(BIN)/python -m pytest -m "not gpu" $(APART)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis .mypy_cache
