"""Compares this engine with transformers and vLLM in one run, with the same weights, prompts and outputs.

    python -m benchmarks.peers                      # the full grid; writes results/peers.json
    python -m benchmarks.peers --requests-per-slot 8 2 1    # one number for each batch size
    python -m benchmarks.peers --quick              # few short requests, one launch and repeat, printed only

Every peer is a process, launched several times because the speed at batch 1 differs between launches; vLLM runs in an
environment that this command makes. At each batch size all peers are warmed up and then take turns. A peer whose
outputs differ from the target's own (fp32) beyond rounding has no speed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.process import PeerError
from benchmarks.harness.results import cores, describe_pair, pair_command_line, progress, results_file, write_results
from benchmarks.harness.verdict import TOLERANCE_ULPS, turns
from benchmarks.inflate.shapes import InflationError
from benchmarks.peers.environment import (
    EnvironmentRefused,
    base_variables,
    make_environment,
    preloads,
    python_of,
    vllm_variables,
)
from benchmarks.peers.rounds import CONTENDERS, Contender, Launched, Timed, measure_batch, run_launch
from benchmarks.peers.tables import peers_table
from benchmarks.peers.work import by_batch, inflated_pair, make_work, reference_of
from models.loading.checkpoints import CheckpointError
from zoo.text.samples import held_out_prompts

RESULTS = results_file("peers")
SEED = 0


def measure(options: argparse.Namespace, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Measure all contenders at all batch sizes, launch by launch."""
    scratch: Path = options.scratch
    repeats: dict[int, int] = options.repeats
    counts = {batch: batch * number for batch, number in options.requests_per_slot.items()}
    scratch.mkdir(parents=True, exist_ok=True)
    description = describe_pair(options)
    target, drafter = inflated_pair(options)
    prompts = held_out_prompts(max(counts.values()), SEED)
    work = make_work(options, target, drafter, prompts, options.max_new_tokens, max(counts))
    work_file = scratch / "work.json"
    work.write(work_file)
    variables = base_variables(options.threads, scratch, os.environ)
    vllm_folder, special = scratch / "vllm", variables
    if any(one.is_vllm for one in contenders):
        make_environment(vllm_folder)
        own = vllm_variables(cores()[: options.threads], scratch)
        special = {**variables, **own, "LD_PRELOAD": preloads(vllm_folder)}
    reference = reference_of(work, variables, scratch)
    launched = [
        Launched(
            one,
            str(python_of(vllm_folder)) if one.is_vllm else sys.executable,
            work_file,
            special if one.is_vllm else variables,
            scratch / "logs" / f"{one.name}.log",
        )
        for one in contenders
    ]
    timed: dict[int, dict[str, Timed]] = {batch: {} for batch in counts}
    versions: dict[str, Any] = {}
    for launch in range(options.launches):
        progress(f"launch {launch + 1} of {options.launches}")
        for batch, peers, found_versions in run_launch(launched, list(counts)):
            versions |= found_versions
            orders = list(turns(list(peers), options.launches * repeats[batch]))
            chosen = orders[launch * repeats[batch] : (launch + 1) * repeats[batch]]
            measure_batch(peers, batch, reference[: counts[batch]], work.dtype, chosen, timed[batch])
    return {
        "target": "text_target",
        "drafter": "text_drafter",
        **description,
        "max_new_tokens": work.max_new_tokens,
        "ignore_eos": work.ignore_eos,
        "launches": options.launches,
        "tolerance_ulps": TOLERANCE_ULPS,
        "versions": versions,
        "rows": [
            {"batch": batch, "name": one.name, "row": one.row, "variant": one.variant}
            | found[one.name].row(reference[: counts[batch]], work.dtype)
            for batch, found in timed.items()
            for one in contenders
            if one.name in found
        ],
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = pair_command_line("peers", __doc__, "few short requests, one launch and one repeat")
    many: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "N"}
    parser.add_argument("--batches", default=[1, 8, 32], **many)
    parser.add_argument("--requests-per-slot", help="one number or one per batch size (8)", **many)
    parser.add_argument("--repeats", help="timed passes in each launch, one number or one per batch size (2)", **many)
    parser.add_argument("--launches", type=int, help="launches of every peer (2)")
    parser.add_argument("--max-new-tokens", type=int, help="(64)")
    parser.add_argument("--gamma", type=int, default=5, help="drafts per step (5)")
    parser.add_argument(
        "--only", nargs="+", choices=[one.name for one in CONTENDERS], metavar="PEER", help="%(choices)s"
    )
    parser.add_argument("--without-vllm", action="store_true", help="measure the others, write nothing")
    options = parser.parse_args(arguments)
    defaults = {"requests_per_slot": ([2], [8]), "repeats": ([1], [2]), "launches": (1, 2), "max_new_tokens": (16, 64)}
    for name, (quick, full) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    if min(*options.batches, *options.requests_per_slot, options.launches, *options.repeats) < 1:
        parser.error("batches, requests, launches and repeats are at least 1")
    try:
        options.requests_per_slot = by_batch("--requests-per-slot", options.batches, options.requests_per_slot)
        options.repeats = by_batch("--repeats", options.batches, options.repeats)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    contenders = [
        one
        for one in CONTENDERS
        if not (options.without_vllm and one.is_vllm) and (options.only is None or one.name in options.only)
    ]
    try:
        found = measure(options, contenders)
    except (PeerError, EnvironmentRefused, CheckpointError, InflationError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    print(peers_table(found))
    if not options.quick and len(contenders) == len(CONTENDERS):
        write_results(RESULTS, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
