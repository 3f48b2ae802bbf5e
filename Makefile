# `make demo` and `make test` work on a fresh checkout: they create .venv, install into it what constraints.txt
# pins, and run. The other targets use the same environment.
#
#   PYTHON  the interpreter that .venv is made from (3.10 to 3.13)
#   ARGS    more arguments: overrides for `make demo`, options for `make probe`, pytest's for `make test`
#           make demo ARGS="trainer.max_steps=10"      make test ARGS="tests/package -x"
#   WORKERS how many files of tests run side by side in `make test`, each with ranks of its own

PYTHON ?= python3
ARGS ?=
WORKERS ?= 2

# Relative paths only, so that the checkout may lie in a directory with spaces. DeepSpeed starts ninja by name.
BIN := .venv/bin
RUN = PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m
STAMP := .venv/installed

.PHONY: demo doctor probe test faults test-fast lint format typecheck wheel docs figure setup clean help

help:  ## what the targets do
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1: /'

demo: $(STAMP)  ## train on uneven requests: two CPU ranks, or all GPUs
	$(RUN) requestzero.recipes.lightning_sft $(ARGS)

doctor: $(STAMP)  ## versions, machine, and what stock DeepSpeed does to a config: make doctor ARGS=ds.json
	$(RUN) requestzero.doctor $(ARGS)

probe: $(STAMP)  ## measure against stock DeepSpeed on this machine, into outputs/probe
	$(RUN) requestzero.probe --html outputs/probe/probe.html $(ARGS)

# A file stays on one worker, for its fixtures. In the order of the files: by number of tests, as xdist would have it, the
# longest, which start programs, come last and leave a core idle.
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Tests of waiting times run after the rest, without other work beside them, and more of them at once since they wait.
WAITS := tests/rank_check tests/support

test: $(STAMP)  ## all tests
ifeq ($(strip $(ARGS)),)
	$(RUN) pytest $(SIDE_BY_SIDE) $(WAITS:%=--ignore=%)
	$(RUN) pytest $(SIDE_BY_SIDE) -n $$((2 * $(WORKERS))) $(WAITS)
else
	$(RUN) pytest $(ARGS)
endif

faults: $(STAMP)  ## inject 500 faults into trainings of two ranks: make faults ARGS="--count 50 --seed 1"
	$(RUN) requestzero.faults $(ARGS)

test-fast: $(STAMP)  ## a few quick tests of every file: minutes, for the inner loop
	$(RUN) pytest $(SIDE_BY_SIDE) --fast $(ARGS)

lint: $(STAMP)  ## ruff: rules and layout; import-linter: the layers of the packages
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

format: $(STAMP)  ## rewrite to the layout that lint checks
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

typecheck: $(STAMP)  ## mypy
	$(RUN) mypy

wheel: $(STAMP)  ## dist/requestzero-*.whl
	$(RUN) build --wheel --no-isolation --outdir dist .

docs: $(STAMP)  ## the documentation into docs/_build/html; a warning or a link that leads nowhere is an error
	$(RUN) sphinx -b html -W -n --keep-going -q docs docs/_build/html
	@echo "Written: docs/_build/html/index.html"

FIGURE := docs/_static/wrong_updates.svg

figure: $(STAMP)  ## measure the README's figure anew
	$(RUN) requestzero.probe --columns updates --out outputs/figure
	cp outputs/figure/probe.svg $(FIGURE)

setup: $(STAMP)  ## create .venv only

# A change of the dependencies or of their pins installs again. Python compiles what it imports: pip would compile all
# of it, which takes as long as the rest of the installation.
$(STAMP): pyproject.toml constraints.txt
	"$(PYTHON)" -m venv .venv
	@echo "Installing into .venv what constraints.txt pins (about a minute)."
	$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

clean:  ## remove what the targets made
	rm -rf .venv dist build outputs docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
