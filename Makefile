# make demo       caption scenes and draw prompts with what ships, speculatively and plainly (sets itself up)
# make test       every promise once, five minutes, warnings as errors (sets itself up)
# make test-all   the whole suite
# make test-product  the rest of the products of cases
# make check      ruff, mypy and the layers
# make docs       build the documentation as a site in build/docs (sets itself up)
# make bench      every method on the zoo, captions and images, and the tables made from it (no GPU needed)
# make bench-engine  this engine alone: batches and lengths, where a step's time goes (half an hour)
# make bench-gpu  this engine on one GPU, true shapes, with the python3 at hand (eight minutes; torch 2.11, transformers, llguidance)
# make bench-peers  this engine beside transformers and vLLM on a CPU, in an environment that it makes (about an hour)
# make test-real  lossless methods on a pretrained model and real text (downloads 90 MB; ten minutes)
# make test-cluster  a node killed, a node drained, a fleet that grows and shrinks (six minutes; not beside another Ray)
# make chaos      fifty kills of a job's driver in every phase, a hundred runs with attempts that overlap, and fifty kills
#                 under Ray of each kind of process (a quarter of an hour)
# make fuzz       10,000 mutated files of all formats, each read between two valid ones (ten minutes)
#
# TORCH_INDEX=https://…   take torch from this index instead of choosing a build for the machine

PY := .venv/bin/python
.DEFAULT_GOAL := help
.PHONY: help demo docs test test-all test-product test-real test-cluster check bench bench-engine bench-gpu bench-peers chaos fuzz

help:
	@sed -n 's/^# //p' Makefile

.venv/.installed: pyproject.toml bootstrap.py
	@command -v python3 >/dev/null || { echo "make: needs python3 (3.11 to 3.14) on the PATH" >&2; exit 1; }
	@python3 bootstrap.py

demo: .venv/.installed
	@$(PY) -m zoo.demo

DESELECTED := not full and not gpu and not cluster and not real

test: .venv/.installed
	@$(PY) -m pytest -n auto --maxprocesses=4 --dist loadfile -m "$(DESELECTED) and not slow"

test-all: .venv/.installed
	@$(PY) -m pytest -n auto --maxprocesses=4 --dist loadfile

test-product: .venv/.installed
	@$(PY) -m pytest -n auto --maxprocesses=4 --dist loadfile -m full
	@$(PY) -m tests.conformance.product

test-real: .venv/.installed
	@$(PY) -m pip install -q --disable-pip-version-check --progress-bar off -e '.[real]'
	@$(PY) -m pytest tests/real -m real

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

fuzz: .venv/.installed
	@$(PY) -m tests.fuzz

.venv-docs/.installed: pyproject.toml
	@python3 -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -q --disable-pip-version-check --progress-bar off $$(python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

docs: .venv-docs/.installed
	@.venv-docs/bin/sphinx-build -W -q -b html docs build/docs
	@echo build/docs/index.html

bench: .venv/.installed
	@$(PY) -m benchmarks.methods
	@$(PY) -m benchmarks.lantern
	@$(PY) -m benchmarks.tables

bench-engine: .venv/.installed
	@$(PY) -m benchmarks.engine
	@$(PY) -m benchmarks.tables

# No environment is made: a machine with a GPU has its own torch. PYTHON=… names another interpreter.
bench-gpu: PYTHON ?= python3
bench-gpu:
	@$(PYTHON) -c "import torch, transformers, llguidance" 2>/dev/null || { echo "make: $(PYTHON) has no torch, transformers or llguidance; PYTHON=… names another" >&2; exit 1; }
	@$(PYTHON) -m benchmarks.gpu

bench-peers: .venv/.installed
	@$(PY) -m benchmarks.peers
