# `make` lists the targets. All of them need only make and a Python of 3.11 or later.

VENV  := .venv
BIN   := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt
ARGS    ?=
DATA    ?= $(or $(DECODESIM_DATA),../shared/data)
RUNS    ?= $(foreach name,cpu-family cpu-processes cpu-models,calibrate/measurements/$(name)/$(name).json)
WORKERS ?= 2
PYTHON  ?=
CANDIDATES := $(or $(PYTHON),python3.11 python3)

# Bytecode of the project and of its tests is kept: two workers, and every process that a test starts, would compile it anew.
export PYTHONDONTWRITEBYTECODE :=

# One install at a time: both stamps stand for the same environment.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help run test test-full mutate bench validate notebooks guide lint clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | while IFS='	' read -r name what; do \
	    printf '  make %-10s %s\n' "$$name" "$$what"; done

run: $(VENV)/.run-stamp  ## run the default scenario; ARGS="--set path=value" passes options on
	$(BIN)/sim run $(ARGS)

test: $(VENV)/.test-stamp  ## lint, types, contracts, doctests, the quick tests and the notebooks, on WORKERS=2 processes
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-full: $(VENV)/.test-stamp  ## also the slow tests, with more and random examples, and the notebooks
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "slow or not slow" --hypothesis-profile=thorough $(ARGS)

mutate: $(VENV)/.test-stamp  ## plant faults drawn by seed in all packages and see which the tests catch; ARGS="--seed 1 --faults 20"
	$(BIN)/python -m tests.mutation.mutation_sample $(ARGS)

bench: $(VENV)/.test-stamp  ## time the simulator and real decodings against known limits
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.bench $(ARGS)

validate: $(VENV)/.run-stamp  ## write calibrate/VALIDATION.md anew from DATA; ARGS=--check says whether it is out of date
	$(BIN)/calibrate report $(DATA) $(ARGS)
	$(BIN)/sim compare $(RUNS) --page calibrate/VALIDATION.md $(ARGS)

notebooks: $(VENV)/.test-stamp  ## execute the notebooks and pages of the guide and store their outputs; ARGS names some
	$(BIN)/python notebooks/store_outputs.py $(ARGS)

guide: $(VENV)/.test-stamp  ## build the guide: open notebooks/_build/html/index.html
	$(BIN)/python -m sphinx -b html -W --keep-going -q notebooks notebooks/_build/html

lint: $(VENV)/.test-stamp  ## ruff, mypy and the import contracts alone
	$(BIN)/python -m ruff check
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

clean:  ## remove the environment and every cache; results in runs/ stay
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find model sim calibrate figures tests notebooks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# $(call install,.[extra]): stamps go first and come back last, so an environment without one was never finished and is
# started afresh. setuptools comes before the project so that it is built by the pinned version and not by the newest.
# Nothing is compiled in advance, which would take a minute: Python writes the bytecode of a module when it is first imported, and three
# modules of four never are.
# $(call install,.[extra],torch): torch comes before what needs it, so that a build for processors is taken where one is offered.
define install
	@if [ ! -e $(VENV)/.run-stamp ] && [ ! -e $(VENV)/.test-stamp ]; then \
	    python=; \
	    for candidate in $(CANDIDATES); do \
	        if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	            python=$$candidate; break; \
	        fi; \
	    done; \
	    if [ -z "$$python" ]; then \
	        echo 'Python 3.11 or later is needed; no such: $(CANDIDATES). Name one: make PYTHON=/path/to/python' >&2; \
	        exit 1; \
	    fi; \
	    echo "building $(VENV) with $$python"; \
	    "$$python" -m venv --clear $(VENV); \
	fi
	@rm -f $(VENV)/.run-stamp $(VENV)/.test-stamp
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt setuptools $(2)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt --no-build-isolation -e '$(1)'
endef

$(VENV)/.run-stamp: $(INPUTS)
	$(call install,.)
	@touch $@

# The test environment holds all that a run needs.
$(VENV)/.test-stamp: $(INPUTS)
	$(call install,.[test],torch)
	@touch $(VENV)/.run-stamp $@
