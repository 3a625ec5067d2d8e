# `make demo` and `make test` do all the set-up: they create .venv and install pinned packages.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SURVEY ?=

.PHONY: demo test lint format bench-cp bench-mae bench-long bench-gpu bench-read bench-feed clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py $(if $(SURVEY),--survey '$(SURVEY)') $(DEMO_ARGS)

test: $(READY)
	$(BIN)/python -m pytest -m 'not slow and not gpu and not postgres and not browser' $(TEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-cp: $(READY)
	$(BIN)/python benchmarks/context_parallel.py

bench-mae: $(READY)
	$(BIN)/python -W ignore benchmarks/mae.py

bench-long: $(READY)
	$(BIN)/python benchmarks/long_context.py

bench-gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py $(GPU_ARGS)

bench-read: $(READY)
	$(BIN)/python -m benchmarks.read $(READ_ARGS)

bench-feed: $(READY)
	$(BIN)/python -W ignore -m benchmarks.feed

clean:
	rm -rf $(VENV)
