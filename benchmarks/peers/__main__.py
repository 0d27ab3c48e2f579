"""Compares this engine with transformers and vLLM in one run, with the same weights, prompts and outputs.

    python -m benchmarks.peers                              # the full grid; writes results/peers.json
    python -m benchmarks.peers --requests-per-slot 8 2 1    # one number for each batch size

Every peer is a process, launched several times because the speed at batch 1 differs between launches; vLLM runs in an
environment that this command makes. At each batch size all peers are warmed up and then take turns. A peer whose
outputs differ from the target's own (fp32) beyond rounding has no speed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.process import PeerError
from benchmarks.harness.results import cores, describe_pair, pair_command_line, results_file, write_results
from benchmarks.harness.verdict import TOLERANCE_ULPS
from benchmarks.inflate.shapes import InflationError
from benchmarks.peers.environment import (
    EnvironmentRefused,
    base_variables,
    make_environment,
    preloads,
    python_of,
    vllm_variables,
)
from benchmarks.peers.rounds import CONTENDERS, Cell, Contender, Launched, measure_cells
from benchmarks.peers.tables import peers_table
from benchmarks.peers.work import GAMMA, make_work, reference_of
from models.loading.checkpoints import CheckpointError
from zoo.text.samples import held_out_prompts

RESULTS = results_file("peers")
SEED = 0
BATCHES = (1, 8, 32)
MAX_NEW_TOKENS = 64


def measure(options: argparse.Namespace, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Measure all contenders at all batch sizes."""
    scratch, dtype = options.scratch, options.dtype
    description = describe_pair(options)
    cells = [
        Cell(batch, batch * per_slot, repeats)
        for batch, per_slot, repeats in zip(BATCHES, options.requests_per_slot, options.repeats, strict=True)
    ]
    prompts = held_out_prompts(max(cell.num_requests for cell in cells), SEED)
    work = make_work(options, prompts, MAX_NEW_TOKENS, max(BATCHES))
    variables = base_variables(options.threads, scratch, os.environ)
    pythons = {True: str(python_of(scratch / "vllm")), False: sys.executable}
    environments = {True: variables, False: variables}
    if any(one.is_vllm for one in contenders):
        make_environment(scratch / "vllm")
        own = vllm_variables(cores()[: options.threads], scratch)
        environments[True] = {**variables, **own, "LD_PRELOAD": preloads(scratch / "vllm")}
    reference = reference_of(work, scratch)
    launched = [Launched(one, pythons[one.is_vllm], environments[one.is_vllm]) for one in contenders]
    timed, versions = measure_cells(launched, scratch / "work.json", cells, options.launches, reference, dtype)
    return {
        "target": "text_target",
        "drafter": "text_drafter",
        **description,
        "gamma": GAMMA,
        "max_new_tokens": work.max_new_tokens,
        "ignore_eos": work.ignore_eos,
        "launches": options.launches,
        "tolerance_ulps": TOLERANCE_ULPS,
        "versions": versions,
        "rows": [
            {"batch": cell.batch, "name": one.name, "row": one.row, "variant": one.variant}
            | found[one.name].row(reference[: cell.num_requests], dtype)
            for cell, found in timed.items()
            for one in contenders
            if one.name in found
        ],
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = pair_command_line("peers", __doc__)
    each: dict[str, Any] = {"type": int, "nargs": len(BATCHES), "metavar": "N"}
    parser.add_argument("--requests-per-slot", default=[8] * len(BATCHES), help=f"at batch {BATCHES} (8)", **each)
    parser.add_argument("--repeats", default=[2] * len(BATCHES), help=f"passes in each launch, {BATCHES} (2)", **each)
    parser.add_argument("--launches", type=int, default=2, help="launches of every peer (2)")
    parser.add_argument("--without-vllm", action="store_true", help="measure the others, write nothing")
    options = parser.parse_args(arguments)
    if min(*options.requests_per_slot, options.launches, *options.repeats) < 1:
        parser.error("requests, launches and repeats are at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        found = measure(options, [one for one in CONTENDERS if not (options.without_vllm and one.is_vllm)])
    except (PeerError, EnvironmentRefused, CheckpointError, InflationError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    print(peers_table(found))
    if not options.without_vllm:
        write_results(RESULTS, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
