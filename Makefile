# Two commands are all the set-up: `make demo` and `make test`. Both make .venv themselves and use it again.
# Needs make and Python 3.11 or newer; another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
# More options for pip, such as an index of your own: make demo PIP_FLAGS="--index-url ..."
PIP_FLAGS ?=
# A model for the demo other than the one that is shipped: a Hub id or a path
MODEL ?=
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
# Number of test processes, of one thread each: threads of several processes would wait for each other. 0: one process
PYTEST_WORKERS ?= auto
PYTEST_IN_PARALLEL = -n $(PYTEST_WORKERS) --maxprocesses 8 --dist worksteal $(PYTEST_FLAGS)
# More options for the pages of results, such as names, or --skip experiments solvers
RESULTS_FLAGS ?=
# Tests that write a page of results refuse to begin with changed files, unless this is set
ALLOW_DIRTY ?=
# How large the experiments are (smoke, pocket, full), and more of their options: EXPERIMENT_FLAGS="--workers 4"
SIZE ?= pocket
EXPERIMENT_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
# One environment for everything, so that demo, tests and docs see the same versions. Who only wants to see the demo does
# not wait for the tools of the tests. The stamps say what each was made from.
DEMO_STAMP := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed
EXTRAS := demo,quant,gpu,lm-eval,sklearn,bench,docs,dev
# A second one for the oldest transformers that the adapter supports, which is also the one that kvpress needs. It holds
# what differs, and finds the rest in .venv, which comes later on its path.
OLDEST := .venv-oldest
PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))
# Files of tests/hf that do not run a second time, as what they test sees nothing of transformers: packed bits, codes,
# their budgets, shares, files and refusals, steps on codes and codes of other devices, torch's defaults, threads,
# scores of tokens and the checks of damaged files are ours, or belong to libraries of which both environments have one
# version (a file's way into a model and back is in test_saving, read= in test_reading, bits in every family and way of
# generating in test_matrix). Nor do kernels run in Triton's interpreter again: the compiled ones get the same tensors.
# What the versions differ in (caches, masks, generate, the choice of attention, chunks, candidates, compiling, device
# maps, pipelines) runs in both.
ONCE := quantization eviction_scores tampering threads reading_bits bits_bad_input bits_budget bits_classes bits_codes \
	bits_heads bits_saving bits_elsewhere bits_in_place bits_sensitivity defaults
# What of constraints.txt does not go with it; constraints-oldest.txt has these, and what is needed besides.
NEWER := transformers|huggingface_hub|tokenizers|pandas
OLDEST_WANTS := ".[hf,kvpress,quant]" pytest pytest-benchmark pytest-xdist hypothesis
# A resolver that can ask for other Pythons than the one it runs on, in an environment of its own.
UV_ENV := .venv-uv
UV := $(UV_ENV)/bin/uv
RESOLVE_PYTHONS := 3.11.0 3.11.2 3.11.9 3.12.0 3.13.0
UV_COMPILE := $(UV) pip compile - --quiet --no-config --output-file /dev/null --python-platform x86_64-manylinux_2_28
# What is imported is compiled at its first import: most of what is installed never is.
PIP_INSTALL := -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_FLAGS)
# By uv, which is faster, where it does the same. setuptools warns at length about what editable installs are.
INSTALL := PYTHONWARNINGS=ignore $(BIN)/python $(if $(PIP_FLAGS),$(PIP_INSTALL),tests/install.py)

# Tests start some fifty processes, each of which would compile our sources anew. .pyc files are in .gitignore.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two of pip in one environment would spoil it.
.NOTPARALLEL:
.PHONY: help install demo test test-fast test-deep test-matrix test-families test-oldest resolve beside lint types \
	contracts compiled unit bench results install-size wheel experiments docs format clean

help: ## Show this list
	@echo "Usage: make TARGET [VARIABLE=value]"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12   the interpreter that .venv is made with (3.11 or newer)"
	@echo "  MODEL=ID_OR_PATH    the model of the demo, instead of the one that is shipped"

# What is asked for first makes the environment.
define MAKE_VENV
@command -v $(PYTHON) >/dev/null || { \
	echo "make: there is no '$(PYTHON)' here. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11" >&2; \
	exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "make: grace_opt needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	echo "      Name a newer one: make PYTHON=python3.11" >&2; \
	exit 1; }
@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "Making $(VENV) ..."; $(PYTHON) -m venv --clear $(VENV); }
endef

$(DEMO_STAMP): pyproject.toml constraints.txt
	$(MAKE_VENV)
	@echo "Installing what the demo needs into $(VENV) (the first time takes a minute or more) ..."
	@$(INSTALL) -c constraints.txt -e ".[demo]"
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	$(MAKE_VENV)
	@echo "Installing what tests, benchmarks and docs need into $(VENV) (the first time takes a minute or more) ..."
	@$(INSTALL) -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $(DEMO_STAMP) $@

install: $(STAMP) ## Make .venv with everything, or bring it up to date

demo: $(DEMO_STAMP) ## Make a trained model's cache smaller and show what it costs (MODEL=... for another model)
	@$(BIN)/grace-opt demo $(if $(MODEL),--model "$(MODEL)") $(DEMO_FLAGS)

$(OLDEST)/.installed: pyproject.toml constraints.txt constraints-oldest.txt | $(STAMP)
	@$(OLDEST)/bin/python -m pip --version >/dev/null 2>&1 || { \
		echo "Making $(OLDEST) ..."; $(BIN)/python -m venv --clear --without-pip $(OLDEST); }
	@echo "Installing into $(OLDEST) what differs from $(VENV) ..."
	@$(BIN)/python -c '$(PACKAGES)' > "$$($(OLDEST)/bin/python -c '$(PACKAGES)')/rest.pth"
	@grep -v -i -E '^($(NEWER))==' constraints.txt > $(OLDEST)/constraints.txt
	@# pip sees what is in .venv, which uv would install again.
	@PYTHONWARNINGS=ignore $(OLDEST)/bin/python $(PIP_INSTALL) \
		-c $(OLDEST)/constraints.txt -c constraints-oldest.txt -e $(OLDEST_WANTS)
	@touch $@

$(UV):
	@$(PYTHON) -m venv --clear $(UV_ENV)
	@$(UV_ENV)/bin/python $(PIP_INSTALL) uv

# Says nothing of a platform's own builds: torch's for the CPU stands in for the plain one, and needs less.
resolve: $(UV) ## Whether the pinned versions can be installed from the plain index, on every Python; asks the network
	@grep -v -i -E '^($(NEWER))==' constraints.txt > $(UV_ENV)/oldest.txt
	@for version in $(RESOLVE_PYTHONS); do \
		echo "Python $$version: everything, the demo alone, the oldest transformers, and without constraints"; \
		printf '%s\n' ".[$(EXTRAS)]" | $(UV_COMPILE) --python-version $$version -c constraints.txt && \
		printf '%s\n' ".[demo]" | $(UV_COMPILE) --python-version $$version -c constraints.txt && \
		printf '%s\n' $(OLDEST_WANTS) | \
			$(UV_COMPILE) --python-version $$version -c $(UV_ENV)/oldest.txt -c constraints-oldest.txt && \
		printf '%s\n' ".[demo]" | $(UV_COMPILE) --python-version $$version || \
		{ echo "make: the above cannot be installed with Python $$version" >&2; exit 1; }; \
	done

# All but lint is made beside something else; what it says follows the tests' words. First, types beside what is compiled;
# then, what finds that compiled, beside the tests: the oldest transformers, with half as many processes as there are
# cores, and the docs.
test: lint ## Everything that CI checks: lint, types, import contracts, tests, docs
	@said=$$(mktemp); $(MAKE) --no-print-directory --keep-going contracts types >"$$said" 2>&1 & beside=$$!; \
		trap 'kill $$beside; rm -f "$$said"; exit 130' INT TERM; \
		$(MAKE) --no-print-directory compiled; compiled=$$?; wait $$beside; types=$$?; \
		$(MAKE) --no-print-directory --keep-going beside >>"$$said" 2>&1 & beside=$$!; \
		$(MAKE) --no-print-directory unit; unit=$$?; \
		wait $$beside; beside=$$?; cat "$$said"; rm -f "$$said"; [ $$compiled$$types$$unit$$beside = 0000 ]

beside:
	@$(MAKE) --no-print-directory test-oldest \
		PYTEST_WORKERS=$$(( ($$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) + 1) / 2 )); oldest=$$?; \
		$(MAKE) --no-print-directory docs && [ $$oldest = 0 ]

test-fast: $(STAMP) ## While editing, under a minute and a half: lint, and all tests but those marked slow
	@$(MAKE) --no-print-directory lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" $(PYTEST_IN_PARALLEL)

lint: $(STAMP) ## Lint and formatting, by ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## Types, by mypy
	$(BIN)/mypy

contracts: $(STAMP) ## Who may import whom, by import-linter; rooms, floors and circles of the code
	$(BIN)/lint-imports
	$(BIN)/python tests/rooms.py

# What is imported, and the largest loops, are compiled before every test process does so for itself. Loops that share
# parts are compiled in one process, which saves a sixth.
COMPILE = from importlib import import_module as get; \
	[get(f'grace_opt.kernels.cache.{name}').OPERATION.cpu.trial() for name in '$(1)'.split()]
compiled: $(STAMP)
	@ls grace_opt/kernels/cache/heads/__pycache__/*.nbi >/dev/null 2>&1 || { \
		$(BIN)/python -c "$(call COMPILE,heads coding received); import grace_opt.hf, hypothesis, matplotlib.pyplot" & beside=$$!; \
		$(BIN)/python -c "$(call COMPILE,reading decode coded)"; failed=$$?; \
		wait $$beside && [ $$failed = 0 ]; }

unit: compiled ## Tests and doctests (PYTEST_FLAGS="-k mies")
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_IN_PARALLEL)

test-deep: $(STAMP) ## 100 000 small instances against the enumerated optimum, half an hour; page in docs/results
	GRACE_ALLOW_DIRTY=$(ALLOW_DIRTY) GRACE_TEST_INSTANCES=100000 $(BIN)/python -m pytest \
		tests/test_against_exhaustive.py tests/test_allocation.py $(PYTEST_FLAGS)

test-matrix: $(STAMP) ## Every model family in every way of generating, some ten minutes; page in docs/results
	GRACE_ALLOW_DIRTY=$(ALLOW_DIRTY) GRACE_TEST_MATRIX=1 $(BIN)/python -m pytest tests/hf/test_matrix.py $(PYTEST_FLAGS)

test-families: $(STAMP) ## Every causal language model of transformers, some three minutes; page in docs/results
	GRACE_ALLOW_DIRTY=$(ALLOW_DIRTY) GRACE_TEST_MATRIX=1 $(BIN)/python -m pytest tests/hf/test_every_family.py $(PYTEST_FLAGS)

test-oldest: $(OLDEST)/.installed ## The key-cache adapter with the oldest transformers, and with kvpress
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest tests/hf -p no:cacheprovider \
		$(ONCE:%=--ignore=tests/hf/test_%.py) -k "not triton" $(PYTEST_IN_PARALLEL)

bench: $(STAMP) ## Times of solvers and steps, by pytest-benchmark (PYTEST_FLAGS=--benchmark-compare)
	$(BIN)/python -m pytest bench --benchmark-only --benchmark-group-by=group $(PYTEST_FLAGS)

# The report is written also if cells failed: it says which are missing.
experiments: $(STAMP) ## The paper's experiments, resumable, and their report in results/report (SIZE=smoke, pocket or full)
	@$(BIN)/python -m bench.experiments all --size $(SIZE) --out results $(EXPERIMENT_FLAGS); code=$$?; \
		[ $$code -gt 1 ] || $(BIN)/grace-opt report results || code=$$?; exit $$code

# Each page from this commit, by the command that it names, one after the other: times want a machine that is quiet.
results: $(STAMP) ## Make every page of docs/results again, and say how long each took (RESULTS_FLAGS="bits answers")
	$(BIN)/python -m bench.results $(RESULTS_FLAGS)

install-size: ## What `make demo` downloads and takes on the disk, in an environment of its own; asks the network
	$(PYTHON) -m bench.install_size $(if $(PIP_FLAGS),--pip-flags="$(PIP_FLAGS)")

wheel: $(STAMP) ## A wheel for a release, in dist/, with machine code for x86-64; some minutes, on Linux
	$(BIN)/python -m bench.wheel

# From scratch (-E): a page that is not read again would keep its warnings to itself. Executed examples stay cached.
docs: $(STAMP) ## The documentation, into docs/_build/html; a warning is an error
	@rm -rf docs/api/generated
	$(BIN)/python -m sphinx -E -W --keep-going -q -b html docs docs/_build/html
	@echo "docs: open docs/_build/html/index.html"

format: $(STAMP) ## Rewrite the sources as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove what was built; .venv stays
	rm -rf build dist *.egg-info docs/_build docs/start docs/gallery docs/api/generated docs/sg_execution_times.rst
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks .coverage
	find grace_opt solvers tests bench docs -name __pycache__ -type d -prune -exec rm -rf {} +
