"""Measures how the acceptance of suffix decoding grows with the outputs that an engine has finished.

    python -m benchmarks.suffix_history    # writes results/suffix_history.json; minutes
    python -m benchmarks.tables            # the table

Captions of single held-out images, greedy, on the shipped pair. Every method decodes all rows with one engine, and the
rows are counted in blocks of equal size, in the order in which they were submitted.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from actors.loading.method import build_method
from actors.loading.pair import load
from benchmarks.harness.engines import acceptance_of
from benchmarks.harness.markdown import Results, percent, table
from benchmarks.harness.results import command_line, finish, progress, results_file
from benchmarks.methods.runs import MAX_CONTEXT_TOKENS, MAX_NEW_TOKENS, run_cases
from benchmarks.methods.scenarios import build_scenarios
from configs.load import load_preset
from configs.schema import CaptionJob
from decoding import Engine, Sampling

RESULTS = results_file("suffix_history")
METHODS = ("plain", "lookup", "suffix")
SLOTS = 8
NUM_BLOCKS = 4


def run_all(num_cases: int, seed: int) -> dict[str, Any]:
    """Return the acceptance of every method in every block, and the share of rows that equal plain decoding."""
    cases = build_scenarios(num_cases, seed)["single"]
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
    per_block = -(-num_cases // NUM_BLOCKS)
    methods: dict[str, Any] = {}
    plain = None
    for name in METHODS:
        start, job = time.perf_counter(), load_preset(CaptionJob, f"zoo_{name}")
        pair = load(job)
        engine = Engine(pair.target, build_method(job.method, pair.drafter, pair.target), SLOTS, MAX_CONTEXT_TOKENS)
        done = run_cases(pair, engine, cases, sampling, seed)
        plain = plain or done
        rows = [done[case.case_id] for case in cases]
        blocks = [rows[first : first + per_block] for first in range(0, num_cases, per_block)]
        methods[name] = {
            "blocks": [acceptance_of(block) | {"num_rows": len(block)} for block in blocks],
            "equal_share": sum(one.token_ids == plain[one.sample_id].token_ids for one in rows) / num_cases,
        }
        lengths = "  ".join(f"{cell['mean_acceptance_length']:.2f}" for cell in methods[name]["blocks"])
        progress(f"{name:10s} {time.perf_counter() - start:6.1f} s  {lengths}")
    return {"num_cases": num_cases, "seed": seed, "slots": SLOTS, "torch": torch.__version__, "methods": methods}


def history_table(results: Results) -> str:
    """Render the acceptance length (bonus token included) of every method by block of rows."""
    per_block = results["methods"]["plain"]["blocks"][0]["num_rows"]
    lines = []
    for name, one in results["methods"].items():
        cells = [f"{c['mean_acceptance_length']:.2f} ± {c['acceptance_length_se']:.2f}" for c in one["blocks"]]
        lines.append([name, *cells, percent(one["equal_share"])])
    firsts = [1 + per_block * block for block in range(NUM_BLOCKS)]
    return table(["method", *(f"rows {first}–{first + per_block - 1}" for first in firsts), "equal to plain"], lines)


TABLES = {"suffix_history": history_table}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("suffix_history", __doc__)
    parser.add_argument("--cases", type=int, default=192, help="captions (192)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    return finish(RESULTS, run_all(options.cases, options.seed), history_table)


if __name__ == "__main__":
    sys.exit(main())
