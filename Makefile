# Two commands do everything on a machine with Python 3.11+, pip and make:
#   make test    sets up, then lint, types, doctests and all tests
#   make train   sets up, then the main job
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: test zoo train lint types unit timing test-long test-machines wheel-test gpu kill-test attack-test figures docs clean

test: lint types unit timing

train: $(READY)
	$(BIN)/hush train mnist --epsilon 2 --delta 1e-5 --out runs/mnist

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test]'
	touch $(READY)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# One thread a worker: two workers fill two cores, and OpenMP teams do not fight over them.
unit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m 'not long and not timing' --doctest-modules src tests

timing: $(READY)
	$(BIN)/pytest -m 'timing and not long' tests

test-long: $(READY)
	$(BIN)/pytest -m long tests

# Every model of the zoo against single backward passes.
zoo: $(READY)
	$(BIN)/pytest tests/zoo -m "long or not long"

# Other processors, other versions of torch, numpy and scipy; `python tests/machines.py --list` names them.
test-machines: $(READY)
	$(BIN)/python tests/machines.py

# What a user installs: archive and wheel are built, and used in an empty environment.
wheel-test: $(READY)
	$(BIN)/python tests/wheel.py

# What only a GPU can show, as a table; goes on where it was stopped.
gpu: $(READY)
	$(BIN)/python benchmarks/gpu_acceptance.py

# The site, from docs/ and the docstrings; a broken link or name fails. Lies in build/site.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'mkdocs-material' 'mkdocstrings[python]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir build/site

# 200 kills over a light run, then over a network in training; the tests have a shorter form.
kill-test: $(READY)
	$(BIN)/python tests/ledger/kill_test.py --kills 200
	$(BIN)/python tests/ledger/kill_test.py --kills 200 --training

# An hour of random steps by real processes against the ledger, after each planted fault was found.
attack-test: $(READY)
	$(BIN)/python tests/attacks/ledger_machine.py --faults --steps 60 --histories 40
	$(BIN)/python tests/attacks/ledger_machine.py --histories 200 --steps 50 --seconds 3600

# Figures 1 to 4 of the paper, the pictures and the results page; `make figures DEVICE=cuda` on a GPU.
DEVICE ?= cpu
figures: $(READY)
	$(BIN)/python experiments/all_figures.py --device $(DEVICE) --parts fig1_accountants,fig2_mnist_noise_levels,fig3_mnist_eps_delta,fig4_mnist_parameters
	$(BIN)/python experiments/all_figures.py --draw-only
	$(BIN)/python experiments/results_page.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
