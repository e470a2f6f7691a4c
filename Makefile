# Everything sets itself up: a venv in .venv, the package in it, then the job.
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	if $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then echo $$p; break; fi; done)
BIN := .venv/bin

.PHONY: demo test lint format clean

demo: .venv/installed
	$(BIN)/python -m runner +exp=adaptgear

test: .venv/installed-test
	$(BIN)/python -m pytest

lint: .venv/installed-test
	$(BIN)/ruff check runner tests
	$(BIN)/ruff format --check runner tests
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed-test
	$(BIN)/ruff format runner tests
	$(BIN)/ruff check --fix runner tests

.venv/bin/pip:
	@test -n "$(PYTHON)" || { echo "Gearsail needs Python 3.11 or 3.12: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/installed: .venv/bin/pip pyproject.toml
	$(BIN)/python -m pip install --quiet -e .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

clean:
	rm -rf .venv build dist
