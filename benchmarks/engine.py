"""This engine alone: plain decoding, chains and the controller at every batch size, and where a step's time goes.

    python -m benchmarks.engine            # the grid; writes results/engine.json; half an hour on two cores
    python -m benchmarks.engine --quick    # few short requests, printed only

All methods decode the same requests side by side, in slices of half a second, so that a machine that changes its pace
changes it for all of them; ratios are of the same round. Forwards are timed where they are run: what steps take beyond
them is drawing trees, accepting and committing, and what a pass takes beyond them a device would idle for. After each
round forwards alone are timed too, in turn and over memory of the same length: from these follows the speed-up that
drafts could have, τ / (γ · c + v). A method has no speed where its outputs differ from the target's own by more than
rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_pair import Bench, Cell
from benchmarks.engine_slices import PHASES, Pass, run_side_by_side
from benchmarks.engine_tables import BOUND_BATCHES, MODES, T_975, engine_claims_table, engine_table
from benchmarks.peer_process import Work, peak_bytes_of
from benchmarks.peer_rounds import turns
from benchmarks.peer_verdict import make_row
from benchmarks.peers import SCRATCH, by_batch, cores, cpu_name, inflated, make_work, reference_of
from models.backends.memory import free_bytes
from zoo.pair import CHECKPOINTS

RESULTS = Path(__file__).parent / "results" / "engine.json"
BATCHES = (1, 8, 32, 128, 4)
"""In this order: those that something is to be shown at come first."""
MAX_NEW_TOKENS = 64
LONG_BATCHES, LONG_NEW_TOKENS, LONG_REQUESTS_PER_SLOT = (1, 8), 256, 4
"""Texts that end where the target ends them, most of them before that many tokens."""
MAX_LONG_REQUESTS = 24
MAX_S = 1200.0
"""No batch is begun after so long; the results name those that were left out."""
OF_MEMORY = 0.7
"""Nor one for which so much of what is free would be taken."""


def measure_cell(bench: Bench, cell: Cell, reference: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method at one batch size and length."""
    # What the engines of the cell before held is gone only after their cycles are.
    gc.collect()
    forget_peak()
    engines = {mode: bench.engine(mode, cell) for mode in MODES}
    passes: dict[str, list[Pass]] = {mode: [] for mode in MODES}
    forwards: list[dict[str, float]] = []
    requests = bench.requests(cell)
    for _ in range(2):
        # Two fillings of all slots, so that there are refills and last rows; twice, because the first one compiles.
        run_side_by_side(engines, MODES, requests[: 2 * cell.batch])
    for order in turns(MODES, cell.repeats):
        for mode, made in run_side_by_side(engines, order, requests).items():
            passes[mode].append(made)
        forwards.append(bench.forwards_ms(engines["chain"][0], cell.batch, passes["chain"][-1].typical_length))
    peak_bytes = peak_bytes_of(os.getpid())
    rows = []
    for mode, rounds in passes.items():
        row = make_row([one.outcome for one in rounds], reference, bench.work.dtype, peak_bytes)
        told: dict[str, Any] = {
            name: [getattr(one, name) for one in rounds]
            for name in ("num_steps", "num_slot_steps", "step_forwards_s", "prompt_forwards_s", "num_new_graphs")
        }
        told["phases_s"] = {name: [one.phases_s[name] for one in rounds] for name in PHASES}
        if mode == "chain":
            told["forwards_ms"] = {name: [one[name] for one in forwards] for name in forwards[0]}
        told["acceptance_histogram"] = rounds[-1].histogram
        rows.append({"batch": cell.batch, "max_new_tokens": cell.max_new_tokens, "mode": mode, **row, **told})
        where = f"batch {cell.batch:3d}, {cell.max_new_tokens} tokens"
        print(f"{where} {mode:10s} {row['tokens_per_s'] or row['withheld']}", file=sys.stderr, flush=True)
    return rows


def forget_peak() -> None:
    """Let this process's highest resident memory begin anew; where the kernel does not allow that, it goes on."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def plan(options: argparse.Namespace) -> list[Cell]:
    """Batches and lengths, in the order in which they are measured."""
    repeats = options.repeats
    short = [
        Cell(batch, options.max_new_tokens, max(batch, min(8 * batch, options.max_requests)), repeats[batch])
        for batch in options.batches
    ]
    long = [
        Cell(
            batch,
            options.long_new_tokens,
            max(batch, min(LONG_REQUESTS_PER_SLOT * batch, MAX_LONG_REQUESTS)),
            repeats[batch],
        )
        for batch in options.long_batches
    ]
    return sorted([*short, *long], key=lambda cell: cell.batch not in BOUND_BATCHES)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few short requests; nothing is written")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), metavar="N")
    parser.add_argument(
        "--long-batches", type=int, nargs="*", metavar="N", help=f"of these, with long outputs {LONG_BATCHES}"
    )
    parser.add_argument("--max-requests", type=int, default=64, help="at one batch size; 8 for each slot below that")
    parser.add_argument(
        "--repeats", type=int, nargs="+", default=[5], metavar="N", help="one number or one per batch (5)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, help=f"({MAX_NEW_TOKENS})")
    parser.add_argument("--long-new-tokens", type=int, default=LONG_NEW_TOKENS, help=f"({LONG_NEW_TOKENS})")
    parser.add_argument("--max-s", type=float, default=MAX_S, help=f"no batch is begun after that ({MAX_S:.0f})")
    parser.add_argument("--gamma", type=int, default=5, help="drafts of a step (5)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(cores()), help="(all cores)")
    parser.add_argument("--target-shape", default="0.3B")
    parser.add_argument("--drafter-shape", default="draft-0.05")
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    options = parser.parse_args(arguments)
    options.target, options.drafter = CHECKPOINTS / "text_target", CHECKPOINTS / "text_drafter"
    options.ignore_eos, options.prompts = False, None
    if options.long_batches is None:
        options.long_batches = [batch for batch in LONG_BATCHES if batch in options.batches]
    if options.quick:
        options.batches, options.long_batches, options.max_requests, options.repeats = [1, 4], [1], 8, [2]
        options.max_new_tokens, options.long_new_tokens = 16, 24
    if min([*options.batches, *options.long_batches]) < 1 or not set(options.repeats) <= set(T_975):
        parser.error(f"batches are at least 1, and repeats {min(T_975)} to {max(T_975)}")
    if unknown := set(options.long_batches) - set(options.batches):
        parser.error(f"--long-batches are among --batches, which {min(unknown)} is not")
    try:
        options.repeats = by_batch("--repeats", options.batches, options.repeats)
    except ValueError as error:
        parser.error(str(error))
    if options.long_new_tokens == options.max_new_tokens:
        parser.error("the two lengths of outputs have to differ")
    return options


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[tuple[int, int, str]], Work]:
    """The rows of the whole grid, and (batch, length, what was lacking) of what was left out."""
    scratch: Path = options.scratch
    target = inflated(options.target, options.target_shape, options.dtype, scratch)
    drafter = inflated(options.drafter, options.drafter_shape, options.dtype, scratch)
    cells = plan(options)
    longest = argparse.Namespace(**vars(options) | {"max_new_tokens": max(cell.max_new_tokens for cell in cells)})
    work = make_work(longest, target, drafter, [cell.num_requests for cell in cells])
    references = {}
    for length in sorted({cell.max_new_tokens for cell in cells}):
        count = max(cell.num_requests for cell in cells if cell.max_new_tokens == length)
        ids, texts = work.prompt_ids[:count], work.prompt_texts[:count]
        work_file = scratch / "engine_work.json"
        own = replace(work, max_new_tokens=length, prompt_ids=ids, prompt_texts=texts)
        own.write(work_file)
        references[length] = reference_of(own, work_file, dict(os.environ), scratch)
    bench = Bench(work)
    rows: list[dict[str, Any]] = []
    left_out = []
    began_s = time.monotonic()
    for cell in cells:
        if time.monotonic() - began_s > options.max_s:
            left_out.append((cell.batch, cell.max_new_tokens, "time"))
            continue
        if bench.memory_bytes(cell) > OF_MEMORY * free_bytes():
            left_out.append((cell.batch, cell.max_new_tokens, "memory"))
            continue
        reference = references[cell.max_new_tokens][: cell.num_requests]
        rows += measure_cell(bench, cell, reference)
    return rows, left_out, work


def main(arguments: list[str] | None = None) -> int:
    """Measure; see the module's docstring."""
    options = parse(arguments)
    load = os.getloadavg()[0]
    rows, left_out, work = measure(options)
    found = {
        "target_shape": options.target_shape,
        "drafter_shape": options.drafter_shape,
        "dtype": work.dtype,
        "threads": work.threads,
        "gamma": work.gamma,
        "machine": f"{cpu_name()}, {len(cores())} cores, load {load:.1f} at the start",
        "torch": torch.__version__,
        "left_out": left_out,
        "rows": rows,
    }
    print(engine_table(found), engine_claims_table(found), sep="\n\n")
    if not options.quick:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
