# `make demo` and `make test` work on a fresh machine: each makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS = 1

.PHONY: demo score test lint setup
setup: .venv/.installed

.venv/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (about half a minute) ..."
	@$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

# word problems and held-out bits per byte of the small trained model
score: setup
	$(BIN)/python examples/score_small.py checkpoints/small-k3

test: setup
	$(BIN)/pytest -n auto
	TRITON_INTERPRET=1 $(BIN)/pytest -n auto tests/kernels
	$(BIN)/pytest -n auto tests/compile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python .ci/budgets.py
