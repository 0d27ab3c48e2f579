"""Times decoding on the device: plain and with chains, eager and captured in CUDA graphs, at every batch size.

A row whose outputs differ from the target's own beyond rounding has no speed. `of_roofline` is the time to read the
bytes of all forwards at the bandwidth of a copy, over the steps' time; `outside_graphs` is the share of captured steps
in which neither a graph nor an output layer runs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.models import CAPTURED, EAGER, TextPair, drafted, peak_bytes, plain, watched_of
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.clock import DeviceClock, Reading
from benchmarks.harness.engines import lanes_of, outcome_of, run_requests
from benchmarks.harness.process import Outcome
from benchmarks.harness.verdict import make_row, turns
from decoding import Engine, Request, Sampling

CONTENDERS = {
    "plain, eager": ("plain", EAGER),
    "plain, captured": ("plain", CAPTURED),
    "chain, eager": ("chain", EAGER),
    "chain, captured": ("chain", CAPTURED),
}
Row = dict[str, Any]


class Bench:
    """Engine, clock and measurements of a contender."""

    def __init__(self, pair: TextPair, name: str, batch: int, gamma: int) -> None:
        method, step = CONTENDERS[name]
        target = pair.targets[step]
        parts = plain() if method == "plain" else drafted(pair.drafters[step], target, gamma)
        self.engine = Engine(target, parts, batch, pair.max_context_tokens)
        self.clock = DeviceClock(lanes_of(self.engine), watched_of(target, pair.drafters[step]))
        self.outcomes: list[Outcome] = []
        self.steps_s: list[float] = []
        self.num_steps: list[int] = []
        self.readings: list[dict[str, Reading]] = []

    def run(self, requests: list[Request], is_timed: bool) -> None:
        """Run one pass."""
        stats = self.engine.stats
        before_s, steps_before = stats.draft_s + stats.verify_s + stats.commit_s, stats.num_steps
        start = time.perf_counter()
        done = run_requests(self.engine, requests)
        outcome = outcome_of(time.perf_counter() - start, done)
        reading = self.clock.read()
        if is_timed:
            self.outcomes.append(outcome)
            self.steps_s.append(stats.draft_s + stats.verify_s + stats.commit_s - before_s)
            self.num_steps.append(stats.num_steps - steps_before)
            self.readings.append(reading)

    def figures(self, copy_bytes_per_s: float) -> Row:
        """Return times and forwards of the steps of all passes, and the shares of the roofline and outside graphs."""
        forwards = {}
        for kind in self.readings[0]:
            readings = [asdict(one[kind]) for one in self.readings]
            names = {"calls": "calls", "seconds": "seconds", "bytes": "num_bytes"}
            forwards[kind] = {name: [one[key] for one in readings] for name, key in names.items()}
        least, outside = [], []
        for spent, reading in zip(self.steps_s, self.readings, strict=True):
            kinds = [reading[kind] for kind in ("target", "drafter")]
            least.append(sum(one.num_bytes for one in kinds) / copy_bytes_per_s / spent)
            outside.append(1 - sum(one.busy_s for one in kinds) / spent)
        return {
            "steps_s": self.steps_s,
            "num_steps": self.num_steps,
            "forwards": forwards,
            "of_roofline": statistics.median(least),
            # Gaps within the forwards of an eager step are not measured.
            "outside_graphs": statistics.median(outside) if self.clock.watched else None,
        }


def measure_decoding(
    pair: TextPair, sizes: Sizes, device: torch.device, copy_bytes_per_s: float, has_time: Callable[[], bool]
) -> tuple[list[Row], list[str]]:
    """Return a row for each contender at each batch size, and the batch sizes left out with the reason."""
    places = {
        f"batch {batch}": partial(measure_batch, pair, batch, sizes, device, copy_bytes_per_s, has_time)
        for batch in sizes.batches
    }
    return measure_places(places, has_time)


def measure_places(
    places: Mapping[str, Callable[[], list[Row]]], has_time: Callable[[], bool]
) -> tuple[list[Row], list[str]]:
    """Return the rows of all named measurements, and those left out for lack of time or memory."""
    rows: list[Row] = []
    left_out: list[str] = []
    for name, measure in places.items():
        if not has_time():
            left_out.append(f"{name}: the section's time was used up")
            continue
        try:
            rows += measure()
        except torch.OutOfMemoryError:
            left_out.append(f"{name}: the device's memory did not hold it")
        gc.collect()  # frees the engines, which are in reference cycles
    return rows, left_out


def measure_batch(
    pair: TextPair,
    batch: int,
    sizes: Sizes,
    device: torch.device,
    copy_bytes_per_s: float,
    has_time: Callable[[], bool],
) -> list[Row]:
    """Return the rows of one batch size; at least one round is timed."""
    count = batch * sizes.requests_per_slot
    sampling = Sampling(max_new_tokens=sizes.max_new_tokens)
    requests = [Request(str(number), text, sampling=sampling) for number, text in enumerate(pair.prompts[:count])]
    peaks = {}
    benches = {}
    for name in CONTENDERS:
        peak_bytes(device)
        benches[name] = Bench(pair, name, batch, sizes.gamma)
        # All slots are filled and drained once, so that every batch size is captured.
        benches[name].run(requests[: 2 * batch], False)
        peaks[name] = peak_bytes(device)
    for number, order in enumerate(turns(list(CONTENDERS), sizes.rounds)):
        if number and not has_time():
            break
        for name in order:
            benches[name].run(requests, True)
    rows = []
    for name, bench in benches.items():
        method, step = CONTENDERS[name]
        row = make_row(bench.outcomes, pair.reference[:count], sizes.dtype, peaks[name])
        rows.append({"batch": batch, "method": method, "step": step, **row, **bench.figures(copy_bytes_per_s)})
    return rows
