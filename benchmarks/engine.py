"""This engine alone: plain decoding, chains and the controller at every batch size, and where a step's time goes.

    python -m benchmarks.engine            # the grid; writes results/engine.json; twenty minutes on two cores
    python -m benchmarks.engine --quick    # few short requests, printed only

All methods take turns at one batch size, so ratios are of the same round. After each of their passes the forwards
alone are timed, over memory of the same length: what a step takes beyond them is drawing trees, accepting and
committing, and from them alone follows the speed-up that drafts could have, τ / (γ · c + v). A method has no speed
where its outputs differ from the target's own by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.method import build_method
from actors.pair import load_target
from benchmarks.engine_tables import engine_table
from benchmarks.peer_engine import choose_method
from benchmarks.peer_process import Outcome, Work
from benchmarks.peer_rounds import turns
from benchmarks.peer_verdict import make_row
from benchmarks.peers import SCRATCH, cores, cpu_name, inflated, make_work, reference_of
from configs.schema import Checkpoint
from decoding import Completion, Engine, Request, Sampling
from models.lanes import LaneModel, SlotBatch
from models.target import Target
from zoo.pair import CHECKPOINTS

RESULTS = Path(__file__).parent / "results" / "engine.json"
MODES = ("plain", "chain", "controlled")
BATCHES = (1, 2, 4, 8, 16, 32)
PHASES = ("encode_s", "prefill_s", "draft_s", "verify_s", "commit_s")
NUM_FORWARDS = 7
"""Timed forwards of each kind; their median counts."""


@dataclass
class Pass:
    """One pass of one method: what came out, how long each phase took, and the forwards that were timed after it.

    `forwards_ms` are medians by kind: of the target over one and γ + 1 nodes, of the drafter over two and one.
    """

    outcome: Outcome
    phases_s: dict[str, float]
    num_steps: int
    num_slot_steps: int
    forwards_ms: dict[str, float]
    histogram: list[int]


class Bench:
    """A loaded pair, compiled, with an engine for each method at one batch size."""

    def __init__(self, work: Work) -> None:
        torch.set_num_threads(work.threads)
        self._work = work
        self._target = self._load(work.target)
        self._drafter = self._load(work.drafter)
        sampling = Sampling(max_new_tokens=work.max_new_tokens, ignore_eos=work.ignore_eos)
        self._requests = [Request(str(i), text, sampling=sampling) for i, text in enumerate(work.prompt_texts)]

    def _load(self, folder: str) -> Target:
        model = load_target(Checkpoint(path=folder, dtype=self._work.dtype, device="cpu"), folder)
        model.compile(0.0)
        return model

    def engine(self, mode: str, batch: int) -> Engine:
        """A fresh engine."""
        drafter = None if mode == "plain" else self._drafter
        method = build_method(choose_method(mode, self._work.gamma), drafter, self._target)
        return Engine(self._target, method, batch, self._work.max_context_tokens)

    def run(self, engine: Engine, batch: int, count: int) -> Pass:
        """Decode the first `count` requests, then time forwards alone."""
        before = dict(vars(engine.stats))
        start = time.perf_counter()
        done = {one.sample_id: one for one in engine.run(self._requests[:count])}
        seconds = time.perf_counter() - start
        spent = {name: vars(engine.stats)[name] - before[name] for name in (*PHASES, "num_steps", "num_slot_steps")}
        completions = [done[str(number)] for number in range(count)]
        if broken := [one.error for one in completions if one.error is not None]:
            raise RuntimeError(f"{len(broken)} requests failed: {broken[0]}")
        told = [one.telemetry for one in completions]
        outcome = Outcome(
            seconds,
            [list(one.token_ids) for one in completions],
            sum(one.num_spec_steps for one in told),
            sum(one.num_accepted_draft_tokens for one in told),
        )
        phases = {name: spent[name] for name in PHASES}
        return Pass(
            outcome,
            phases,
            spent["num_steps"],
            spent["num_slot_steps"],
            self._time_forwards(engine, batch, _typical_length(completions)),
            _sum_histograms(completions),
        )

    def _time_forwards(self, engine: Engine, batch: int, length: int) -> dict[str, float]:
        kinds = {"target 1": (engine._lanes, 1), "target γ+1": (engine._lanes, self._work.gamma + 1)}
        lanes = getattr(engine.method.drafter, "lanes", None)
        if isinstance(lanes, LaneModel):
            kinds |= {"drafter 2": (lanes, 2), "drafter 1": (lanes, 1)}
        return {name: time_forward(model, batch, nodes, length) for name, (model, nodes) in kinds.items()}


@torch.inference_mode()
def time_forward(lanes: LaneModel, batch: int, num_nodes: int, length: int) -> float:
    """Milliseconds of one forward with its output layer, `num_nodes` for each of `batch` rows that hold `length`."""
    slots = SlotBatch(torch.arange(batch), tuple(range(batch)), (0,) * batch)
    lanes.cache.lens[:batch] = length
    lanes._prefix_lengths[:batch] = [length] * batch
    tokens = torch.full((batch, num_nodes), 5)
    depth = torch.arange(num_nodes).expand(batch, -1)
    visible = torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril().expand(batch, -1, -1)
    times = []
    for _ in range(NUM_FORWARDS):
        start = time.perf_counter()
        lanes.logits(lanes.forward(slots, tokens, depth, visible))
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def _typical_length(done: list[Completion]) -> int:
    """Columns of a row in the middle of its text."""
    return round(statistics.mean(one.num_input_tokens + len(one.token_ids) / 2 for one in done))


def _sum_histograms(done: list[Completion]) -> list[int]:
    longest = max(len(one.telemetry.acceptance_histogram) for one in done)
    counts = [0] * longest
    for one in done:
        for place, number in enumerate(one.telemetry.acceptance_histogram):
            counts[place] += number
    return counts


def measure_batch(
    bench: Bench, batch: int, reference: list[dict[str, Any]], dtype: str, repeats: int
) -> list[dict[str, Any]]:
    """A row for each method at one batch size."""
    engines = {mode: bench.engine(mode, batch) for mode in MODES}
    passes: dict[str, list[Pass]] = {mode: [] for mode in MODES}
    for mode in MODES:
        bench.run(engines[mode], batch, len(reference))
    for order in turns(MODES, repeats):
        for mode in order:
            passes[mode].append(bench.run(engines[mode], batch, len(reference)))
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = []
    for mode, made in passes.items():
        row = make_row([one.outcome for one in made], reference, dtype, peak_bytes)
        phases = {name: [one.phases_s[name] for one in made] for name in PHASES}
        forwards = {name: [one.forwards_ms[name] for one in made] for name in made[0].forwards_ms}
        told = {"num_steps": [one.num_steps for one in made], "num_slot_steps": [one.num_slot_steps for one in made]}
        rows.append(
            {"batch": batch, "mode": mode, **row, **told, "phases_s": phases, "forwards_ms": forwards}
            | {"acceptance_histogram": made[-1].histogram}
        )
        print(f"batch {batch:3d} {mode:10s} {row['tokens_per_s'] or row['withheld']}", file=sys.stderr, flush=True)
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few short requests; nothing is written")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), metavar="N")
    parser.add_argument("--max-requests", type=int, default=96, help="at one batch size; 8 for each slot below that")
    parser.add_argument("--repeats", type=int, default=5, help="(5)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="(64)")
    parser.add_argument("--gamma", type=int, default=5, help="drafts of a step (5)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(cores()), help="(all cores)")
    parser.add_argument("--target-shape", default="0.3B")
    parser.add_argument("--drafter-shape", default="draft-0.05")
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    options = parser.parse_args(arguments)
    options.target, options.drafter = CHECKPOINTS / "text_target", CHECKPOINTS / "text_drafter"
    options.ignore_eos, options.prompts = False, None
    if options.quick:
        options.batches, options.max_requests, options.repeats, options.max_new_tokens = [1, 4], 8, 2, 16
    if min(options.batches) < 1 or options.repeats < 2 or options.max_requests < max(options.batches):
        parser.error("batches are at least 1, repeats at least 2, and requests enough for the largest batch")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure; see the module's docstring."""
    options = parse(arguments)
    load = os.getloadavg()[0]
    scratch: Path = options.scratch
    target = inflated(options.target, options.target_shape, options.dtype, scratch)
    drafter = inflated(options.drafter, options.drafter_shape, options.dtype, scratch)
    counts = {batch: min(8 * batch, options.max_requests) for batch in options.batches}
    work = make_work(options, target, drafter, list(counts.values()))
    work_file = scratch / "engine_work.json"
    work.write(work_file)
    reference = reference_of(work, work_file, dict(os.environ), scratch)
    bench = Bench(work)
    rows = [
        row
        for batch, count in counts.items()
        for row in measure_batch(bench, batch, reference[:count], work.dtype, options.repeats)
    ]
    found = {
        "target_shape": options.target_shape,
        "drafter_shape": options.drafter_shape,
        "dtype": work.dtype,
        "threads": work.threads,
        "gamma": work.gamma,
        "max_new_tokens": work.max_new_tokens,
        "repeats": options.repeats,
        "machine": f"{cpu_name()}, {len(cores())} cores, load {load:.1f} at the start",
        "torch": torch.__version__,
        "rows": rows,
    }
    print(engine_table(found))
    if not options.quick:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
