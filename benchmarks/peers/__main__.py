"""Compares this engine with transformers and vLLM in one run, with the same weights, prompts and outputs.

    python -m benchmarks.peers                              # the full grid; writes results/peers.json
    python -m benchmarks.peers --requests-per-slot 8 2 1    # one number for each batch size

Every peer is a process, launched several times because the speed at batch 1 differs between launches; vLLM runs in an
environment that this command makes. At each batch size all peers are warmed up and then take turns. A peer whose
outputs differ from the target's own (fp32) beyond rounding has no speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.process import PeerError
from benchmarks.harness.results import describe_pair, pair_command_line, results_file, write_results
from benchmarks.inflate.shapes import InflationError
from benchmarks.peers.compare import compare
from benchmarks.peers.environment import EnvironmentRefused
from benchmarks.peers.rounds import CONTENDERS, Cell, Contender
from benchmarks.peers.work import make_work
from benchmarks.tables.parts import show
from models.loading.checkpoints import CheckpointError
from zoo.text import held_out_prompts

RESULTS = results_file("peers")
SEED = 0
BATCHES = (1, 8, 32)
MAX_NEW_TOKENS = 64


def measure(options: argparse.Namespace, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Measure all contenders at all batch sizes."""
    description = describe_pair(options)
    cells = [
        Cell(batch, batch * per_slot, repeats)
        for batch, per_slot, repeats in zip(BATCHES, options.requests_per_slot, options.repeats, strict=True)
    ]
    prompts = held_out_prompts(max(cell.num_requests for cell in cells), SEED)
    work = make_work(options, prompts, MAX_NEW_TOKENS, max(BATCHES))
    results = compare(work, contenders, cells, options.launches, options.scratch)
    return {"target": "text_target", "drafter": "text_drafter", **description, **results}


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
        results = measure(
            options, [contender for contender in CONTENDERS if not (options.without_vllm and contender.is_vllm)]
        )
    except (PeerError, EnvironmentRefused, CheckpointError, InflationError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    print(show("peers", results, "peers"))
    if not options.without_vllm:
        write_results(RESULTS, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
