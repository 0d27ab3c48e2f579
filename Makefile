# make demo       caption scenes and draw prompts with what ships, speculatively and plainly (sets itself up)
# make test       the whole suite, warnings as errors (sets itself up)
# make check      ruff, mypy and the layers
# make bench      every method on the zoo, captions and images, and the tables made from it (no GPU needed)
# make bench-engine  this engine alone: batches and lengths, where a step's time goes, long contexts (40 minutes)
# make bench-gpu  this engine on one GPU, true shapes, with the python3 at hand (ten minutes; torch 2.11 and transformers)
# make bench-peers  this engine beside transformers and vLLM on a CPU, in an environment that it makes (about an hour)
# make test-all   also the full product of the conformance suite
# make test-cluster  a node killed, a node drained, a fleet that grows and shrinks (six minutes; not beside another Ray)
# make chaos      fifty kills of a job's driver in every phase, a hundred runs with attempts that overlap, and fifty kills
#                 under Ray of each kind of process (a quarter of an hour)
#
# TORCH_INDEX=https://…   take torch from this index instead of choosing a build for the machine

PY := .venv/bin/python
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-cluster check bench bench-engine bench-gpu bench-peers chaos

help:
	@sed -n 's/^# //p' Makefile

.venv/.installed: pyproject.toml bootstrap.py
	@command -v python3 >/dev/null || { echo "make: needs python3 (3.11 to 3.14) on the PATH" >&2; exit 1; }
	@python3 bootstrap.py

demo: .venv/.installed
	@$(PY) -m zoo.demo

test: .venv/.installed
	@$(PY) -m pytest -n auto --maxprocesses=4 --dist loadfile

test-all: .venv/.installed
	@$(PY) -m pytest -n auto --maxprocesses=4 --dist loadfile -m "not gpu and not cluster"
	@$(PY) -m tests.conformance.product

test-cluster: .venv/.installed
	@$(PY) -m pytest tests/cluster -m cluster

check: .venv/.installed
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest tests/test_layers.py

chaos: .venv/.installed
	@$(PY) -m tests.chaos.kills
	@$(PY) -m tests.chaos.overlaps
	@$(PY) -m tests.chaos.deaths

bench: .venv/.installed
	@$(PY) -m benchmarks.methods
	@$(PY) -m benchmarks.lantern
	@$(PY) -m benchmarks.tables

bench-engine: .venv/.installed
	@$(PY) -m benchmarks.engine
	@$(PY) -m benchmarks.synthetic
	@$(PY) -m benchmarks.tables

# No environment is made: a machine with a GPU has its own torch. PYTHON=… names another interpreter.
bench-gpu: PYTHON ?= python3
bench-gpu:
	@$(PYTHON) -c "import torch, transformers" 2>/dev/null || { echo "make: $(PYTHON) has no torch or no transformers; PYTHON=… names another" >&2; exit 1; }
	@$(PYTHON) -m benchmarks.gpu

bench-peers: .venv/.installed
	@$(PY) -m benchmarks.peers
