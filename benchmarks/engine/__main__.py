"""Measures this engine alone: plain decoding, chains and the controller at every batch size, and phases of a step.

    python -m benchmarks.engine    # the grid; writes results/engine.json; half an hour on two cores

All methods decode the same requests side by side, in slices of half a second, so that changes of the machine's speed
affect all of them; ratios are of the same round. Forwards are timed inside the engine and, after each round, alone over
caches of the same length: these give the possible speed-up τ / (γ · c + v). A method whose outputs differ from the
target's own beyond rounding has no speed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from actors.loading.method import build_method
from benchmarks.engine.slices import PHASES, Pass, run_side_by_side, time_forwards
from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.engines import kv_bytes, lanes_of, measure_grid
from benchmarks.harness.process import Work, forget_peak, peak_bytes_of
from benchmarks.harness.results import describe_pair, pair_command_line, progress, results_file
from benchmarks.harness.verdict import make_row, turns
from benchmarks.peers.engine_peer import choose_method, load_model
from benchmarks.peers.work import GAMMA, make_work, reference_of
from benchmarks.tables.engine import BOUND_BATCHES, FORWARDS, MODES, T_975
from benchmarks.tables.parts import finish
from decoding import Engine, Request, Sampling
from zoo.text import held_out_prompts

RESULTS = results_file("engine")
SEED = 0
BATCHES = (1, 8, 32, 128, 4)
"""Batch sizes in the order of measurement; those of the goals come first."""
NEW_TOKENS, MAX_REQUESTS = 64, 64
LONG_BATCHES, LONG_NEW_TOKENS, MAX_LONG_REQUESTS = (1, 8), 256, 24
"""Long outputs, most of which the target ends before the limit."""
MAX_S = 1200.0


@dataclass(frozen=True)
class Cell:
    """One configuration: batch size, output length, number of requests, and number of passes over them."""

    batch: int
    max_new_tokens: int
    num_requests: int
    repeats: int


class Bench:
    """A loaded, compiled pair; `work` has the most requests and the longest outputs of all configurations."""

    def __init__(self, work: Work) -> None:
        torch.set_num_threads(work.threads)
        self.work = work
        self._target, self._drafter = (load_model(path, work.dtype) for path in (work.target, work.drafter))
        self._target.compile()
        self._drafter.compile()

    def requests(self, cell: Cell) -> list[Request]:
        sampling = Sampling(max_new_tokens=cell.max_new_tokens, ignore_eos=self.work.ignore_eos)
        texts = self.work.prompt_texts[: cell.num_requests]
        return [Request(str(number), text, sampling=sampling) for number, text in enumerate(texts)]

    def engine(self, mode: str, cell: Cell) -> tuple[Engine, DeviceClock]:
        """Return a new engine, and a clock for the forwards of its target and drafter."""
        drafter = None if mode == "plain" else self._drafter
        method = build_method(choose_method(mode, self.work.gamma), drafter, self._target)
        engine = Engine(self._target, method, cell.batch, self._max_context_tokens(cell))
        return engine, DeviceClock(lanes_of(engine))

    def memory_bytes(self, cell: Cell) -> int:
        """Return the approximate size of the target's KV caches in the engines of all methods."""
        return kv_bytes(self._target, len(MODES) * cell.batch * self._max_context_tokens(cell))

    def _max_context_tokens(self, cell: Cell) -> int:
        return self.work.max_context_tokens - (self.work.max_new_tokens - cell.max_new_tokens)

    def forwards_ms(self, engine: Engine, batch: int, length: int) -> dict[str, float]:
        """Return the milliseconds of isolated forwards: the target over 1 and γ + 1 nodes, the drafter over 2 and 1."""
        target, drafter = lanes_of(engine)
        sizes = ((target, 1), (target, self.work.gamma + 1), (drafter, 2), (drafter, 1))
        return time_forwards(dict(zip(FORWARDS, sizes, strict=True)), batch, length)


def measure_cell(bench: Bench, cell: Cell, reference: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measure one configuration; return one row per method."""
    forget_peak(os.getpid())
    engines = {mode: bench.engine(mode, cell) for mode in MODES}
    passes: dict[str, list[Pass]] = {mode: [] for mode in MODES}
    forwards: list[dict[str, float]] = []
    requests = bench.requests(cell)
    for _ in range(2):
        # All slots filled twice, so that refills are compiled too.
        run_side_by_side(engines, MODES, requests[: 2 * cell.batch])
    for order in turns(MODES, cell.repeats):
        for mode, run in run_side_by_side(engines, order, requests).items():
            passes[mode].append(run)
        forwards.append(bench.forwards_ms(engines["chain"][0], cell.batch, passes["chain"][-1].typical_length))
    peak_bytes = peak_bytes_of(os.getpid())
    rows = []
    for mode, rounds in passes.items():
        row = {"batch": cell.batch, "max_new_tokens": cell.max_new_tokens, "mode": mode}
        row |= make_row([run.outcome for run in rounds], reference, bench.work.dtype, peak_bytes)
        for name in ("num_steps", "num_slot_steps", "step_forwards_s", "prompt_forwards_s", "num_new_graphs"):
            row[name] = [getattr(run, name) for run in rounds]
        row["phases_s"] = {name: [run.phases_s[name] for run in rounds] for name in PHASES}
        if mode == "chain":
            row["forwards_ms"] = {name: [times[name] for times in forwards] for name in forwards[0]}
        row["acceptance_histogram"] = rounds[-1].histogram
        rows.append(row)
        speed = row["tokens_per_s"] or row["withheld"]
        progress(f"batch {cell.batch:3d}, {cell.max_new_tokens} tokens {mode:10s} {speed}")
    return rows


def plan(repeats: Sequence[int]) -> list[Cell]:
    """Return the configurations (batch size and output length) in the order of measurement."""
    cells = [
        Cell(batch, length, max(batch, min(per_slot * batch, most)), repeats[BATCHES.index(batch)])
        for batches, length, per_slot, most in (
            (BATCHES, NEW_TOKENS, 8, MAX_REQUESTS),
            (LONG_BATCHES, LONG_NEW_TOKENS, 4, MAX_LONG_REQUESTS),
        )
        for batch in batches
    ]
    return sorted(cells, key=lambda cell: cell.batch not in BOUND_BATCHES)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = pair_command_line("engine", __doc__)
    help_text = f"passes at batch {BATCHES} (5)"
    parser.add_argument("--repeats", type=int, nargs=len(BATCHES), default=[5] * len(BATCHES), help=help_text)
    parser.add_argument("--max-s", type=float, default=MAX_S, help=f"no batch starts after this time ({MAX_S:.0f})")
    options = parser.parse_args(arguments)
    if not set(options.repeats) <= set(T_975):
        parser.error(f"repeats are {min(T_975)} to {max(T_975)}")
    return options


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[tuple[int, int, str]]]:
    """Return the rows of the grid, and (batch, length, missing resource) of configurations that were left out."""
    cells = plan(options.repeats)
    prompts = held_out_prompts(max(cell.num_requests for cell in cells), SEED)
    work = make_work(options, prompts, LONG_NEW_TOKENS, max(BATCHES))
    references = {}
    for length in (NEW_TOKENS, LONG_NEW_TOKENS):
        count = max(cell.num_requests for cell in cells if cell.max_new_tokens == length)
        ids, texts = work.prompt_ids[:count], work.prompt_texts[:count]
        part = replace(work, max_new_tokens=length, prompt_ids=ids, prompt_texts=texts)
        references[length] = reference_of(part, options.scratch)
    bench = Bench(work)
    rows, left_out = measure_grid(
        cells,
        bench.memory_bytes,
        lambda cell: measure_cell(bench, cell, references[cell.max_new_tokens][: cell.num_requests]),
        options.max_s,
    )
    return rows, [(cell.batch, cell.max_new_tokens, missing) for cell, missing in left_out]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    results = describe_pair(options) | {"gamma": GAMMA}
    results["rows"], results["left_out"] = measure(options)
    return finish(RESULTS, results, "engine", "engine_claims")


if __name__ == "__main__":
    sys.exit(main())
