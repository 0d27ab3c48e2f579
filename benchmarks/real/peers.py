"""Compares this engine with transformers and vLLM on a pretrained model and real text: plain decoding and n-grams."""

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
from benchmarks.peers.tables import best_rows, peers_table, ratio
from benchmarks.peers.work import write_work
from benchmarks.real.text import job_of, read_prompts

ON_TEXT = (
    Contender("engine_lookup", "draftfleet, n-grams", "", ENGINE, "lookup"),
    *(
        one
        for one in CONTENDERS
        if one.mode in ("plain", "eager", "compiled", "ngram")  # those without a drafter
    ),
)
CELLS = (Cell(1, 8, 3), Cell(8, 24, 3), Cell(32, 64, 3))
LAUNCHES = 1
MAX_NEW_TOKENS = 64
OWN = ("draftfleet", "draftfleet, n-grams")


def compare_engines(options: argparse.Namespace) -> Results | None:
    """Measure all engines in bfloat16, greedily; None if one could not run, after a message."""
    about = machine()
    pair = load(job_of("plain", "bfloat16"))
    prompts = read_prompts(pair, max(cell.num_requests for cell in CELLS))
    folders = (str(pair.config.model.target.path), "")
    work = write_work(
        folders, "bfloat16", options.threads, prompts, MAX_NEW_TOKENS, max(one.batch for one in CELLS), options.scratch
    )
    try:
        found = compare(work, ON_TEXT, CELLS, LAUNCHES, options.scratch)
    except (PeerError, EnvironmentRefused) as error:
        print(f"real: {error}", file=sys.stderr)
        return None
    return {"machine": about, "threads": options.threads, **found}


def engines_table(results: Results) -> str:
    """Render every engine's best variant at every batch size."""
    return peers_table(results["peers"]) if "peers" in results else "Not measured yet."


def engines_line(results: Results) -> str:
    """Render this engine's fastest row over the fastest of the others, by batch size."""
    if "peers" not in results:
        return "Not measured yet."
    parts = []
    rows = best_rows(results["peers"])
    for batch in sorted({row["batch"] for row in rows}):
        here = [row for row in rows if row["batch"] == batch and row["samples_per_s"] is not None]
        own, other = (
            max(some, key=lambda row: row["samples_per_s"]["median"])
            for some in (
                [row for row in here if row["row"] in OWN],
                [row for row in here if row["row"] not in OWN],
            )
        )
        over = ratio(own, other)
        assert over is not None
        parts.append(f"{over['median']:.2f} at batch {batch} ({own['row']} over {other['row']})")
    return f"Requests per second of this engine's fastest row over the fastest other one: {', '.join(parts)}."
