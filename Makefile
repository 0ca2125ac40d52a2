# Two commands do everything on a fresh machine with Python 3.11+: `make demo` and `make test`.

PYTHON ?= $(shell for v in python3.13 python3.12 python3.11 python3; do \
	$$v -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$v; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
DEMO_ARGS ?=
TEST_ARGS ?=

.PHONY: help demo test lint format docs bench lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# A stamp per requirements file: the set-up runs again only when its lock or the project's metadata changed.
$(VENV)/.%-installed: requirements/%.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "pdrouter needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing locked requirements ($<)"
	@$(PIP) install --require-hashes -r $<
	@$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

demo: $(VENV)/.demo-installed  ## route real traffic over an emulated fleet and show the difference
	@$(BIN)/pdrouter demo $(DEMO_ARGS)

test: lint  ## lint, types, architecture and all tests
	@$(BIN)/python -m pytest $(TEST_ARGS)

lint: $(VENV)/.dev-installed  ## ruff (format and rules), mypy strict, architecture test
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(VENV)/.dev-installed  ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(VENV)/.dev-installed  ## write docs/config.md from the settings
	@$(BIN)/python -m pdrouter.config > docs/config.md

bench: $(VENV)/.dev-installed  ## CPU per request and per chunk, beside sglang-router
	@$(BIN)/python benchmarks/proxy.py

lock: $(VENV)/.dev-installed  ## renew the hashed requirements
	@$(PIP) install uv
	@for extra in demo dev; do $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-annotate --no-header --extra $$extra \
		--group build pyproject.toml -o requirements/$$extra.txt; done

clean:  ## remove what the targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
