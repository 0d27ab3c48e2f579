"""Compares this engine with transformers and vLLM on the pretrained model: plain decoding and n-grams."""

from __future__ import annotations

import argparse
import sys

from actors.loading.pair import load
from benchmarks.harness.markdown import Results
from benchmarks.harness.process import PeerError
from benchmarks.harness.results import machine
from benchmarks.peers.compare import compare
from benchmarks.peers.environment import EnvironmentRefused
from benchmarks.peers.rounds import CONTENDERS, ENGINE, Cell, Contender
from benchmarks.peers.work import write_work
from benchmarks.real import text

ON_TEXT = (
    Contender("engine_lookup", "draftfleet, n-grams", "", ENGINE, "lookup"),
    *(
        contender
        for contender in CONTENDERS
        if contender.mode in ("plain", "eager", "compiled", "ngram")  # those without a drafter
    ),
)
CELLS = (Cell(1, 8, 3), Cell(8, 24, 3), Cell(32, 64, 3))
LAUNCHES = 1
MAX_NEW_TOKENS = 64


def compare_engines(options: argparse.Namespace) -> Results | None:
    """Measure all engines in bfloat16, greedily; None if one could not run, after a message."""
    about, most = machine(), max(cell.batch for cell in CELLS)
    loaded = load(text.job_of("plain", "bfloat16"))
    folders = (loaded.config.model.target.path, "")
    prompts = text.read_prompts(loaded, max(cell.num_requests for cell in CELLS))
    work = write_work(folders, "bfloat16", options.threads, prompts, MAX_NEW_TOKENS, most, options.scratch)
    try:
        results = compare(work, ON_TEXT, CELLS, LAUNCHES, options.scratch)
    except (PeerError, EnvironmentRefused) as error:
        print(f"real: {error}", file=sys.stderr)
        return None
    return {"machine": about, "threads": options.threads, **results}
