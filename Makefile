# Needs Python 3.11 or newer with pip, and GNU make; everything else lands in .venv and .reactor.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check fix bench clean

demo: .venv/installed
	$(BIN)/reactor demo

test: .venv/installed
	$(BIN)/python -m pytest

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	$(BIN)/python -m bench

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[embedded,service,redis,dev]'
	touch $@

clean:
	rm -rf .venv .reactor
