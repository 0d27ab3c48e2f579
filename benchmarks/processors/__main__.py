"""Measures where the target's processor runs: CPU time per image, and how long an engine waits for input.

    python -m benchmarks.processors                 # writes results/processors.json; minutes
    python -m benchmarks.processors --only costs    # one part (costs, waits); the other is kept

Costs are CPU seconds of one core per image: decoding (with its subprocess), processing, packing, and unpacking in the
actor. Waits are measured on the real graph, with an engine of fixed time per row that reads processor outputs or,
with the processor in the actor, runs it on one prefetch thread, as engines on GPUs do. Its pace is 90 % of the rate of
the graph without such an engine, with the processor in tasks. That rate is measured before and after the run, after the
first `START_S` seconds, in which Ray starts the processes that decode. Batches have the rows that a job chooses itself.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.harness.results import command_line, finish, machine, read_results, results_file
from benchmarks.processors.costs import costs, costs_table
from benchmarks.processors.waits import waits, waits_table

RESULTS = results_file("processors")
PARTS = {"costs": costs, "waits": waits}
TABLES = {"processor_costs": costs_table, "processor_waits": waits_table}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("processors", __doc__)
    parser.add_argument("--only", choices=PARTS, help="run one part")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = read_results(RESULTS) if RESULTS.exists() else {}
    for name, run in PARTS.items():
        if options.only in (None, name):
            results[name] = {"machine": machine(), **run()}
    return finish(RESULTS, results, *TABLES.values())


if __name__ == "__main__":
    sys.exit(main())
