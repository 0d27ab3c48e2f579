"""Decoding on the device: plain and with chains, eager and replayed, in turns at every batch size.

Outputs are held against the target's own, and a row whose outputs differ by more than rounding has no speed. Beside the
speed stand what the forwards had to read at least, at the bandwidth of a copy, and of replayed steps the share of their
time in which neither a graph nor an output layer was at work.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_clock import DeviceClock, Reading
from benchmarks.gpu_models import CAPTURED, EAGER, TextPair, drafted, peak_bytes, plain, watched_of
from benchmarks.gpu_sizes import Sizes
from benchmarks.peer_process import Outcome
from benchmarks.peer_rounds import turns
from benchmarks.peer_verdict import make_row
from decoding import Completion, Engine, Request, Sampling
from models.kv.lanes import LaneModel

CONTENDERS = {
    "plain, eager": ("plain", EAGER),
    "plain, captured": ("plain", CAPTURED),
    "chain, eager": ("chain", EAGER),
    "chain, captured": ("chain", CAPTURED),
}
Row = dict[str, Any]


class Bench:
    """One engine for a contender, and its clock."""

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
        """One pass.

        Raises:
            RuntimeError: a request gave an error.
        """
        before = steps_s(self.engine), self.engine.stats.num_steps
        start = time.perf_counter()
        done = {one.sample_id: one for one in self.engine.run(requests)}
        seconds = time.perf_counter() - start
        reading = self.clock.read()
        completions = check([done[request.sample_id] for request in requests])
        if is_timed:
            told = [one.telemetry for one in completions]
            outputs = [list(one.token_ids) for one in completions]
            drafts = any(one.num_draft_tokens for one in told)
            num_steps = sum(one.num_spec_steps for one in told) if drafts else 0
            accepted = sum(one.num_accepted_draft_tokens for one in told)
            self.outcomes.append(Outcome(seconds, outputs, num_steps, accepted))
            self.steps_s.append(steps_s(self.engine) - before[0])
            self.num_steps.append(self.engine.stats.num_steps - before[1])
            self.readings.append(reading)


def lanes_of(engine: Engine) -> list[LaneModel]:
    """The target's, and the drafter's where it has any."""
    lanes = getattr(engine.method.drafter, "lanes", None)
    return [engine._lanes, lanes] if isinstance(lanes, LaneModel) else [engine._lanes]


def steps_s(engine: Engine) -> float:
    """Seconds in steps so far; each ends with a look at the device, so its work is done by then."""
    stats = engine.stats
    return stats.draft_s + stats.verify_s + stats.commit_s


def check(done: list[Completion]) -> list[Completion]:
    """The same completions.

    Raises:
        RuntimeError: one of them is an error.
    """
    if broken := [one.error for one in done if one.error is not None]:
        raise RuntimeError(f"{len(broken)} requests failed: {broken[0]}")
    return done


def measure_decoding(
    pair: TextPair, sizes: Sizes, device: torch.device, copy_bytes_per_s: float, has_time: Callable[[], bool]
) -> tuple[list[Row], list[str]]:
    """A row for each contender at each batch size, and what was left out and why."""
    rows: list[Row] = []
    left_out: list[str] = []
    for batch in sizes.batches:
        if not has_time():
            left_out.append(f"batch {batch}: the section's time was used up")
            continue
        try:
            rows += measure_batch(pair, batch, sizes, device, copy_bytes_per_s, has_time)
        except torch.OutOfMemoryError:
            left_out.append(f"batch {batch}: the device's memory did not hold it")
        # What the engines held is gone only after their cycles are.
        gc.collect()
    return rows, left_out


def measure_batch(
    pair: TextPair,
    batch: int,
    sizes: Sizes,
    device: torch.device,
    copy_bytes_per_s: float,
    has_time: Callable[[], bool],
) -> list[Row]:
    """The rows of one batch size; at least one round is timed."""
    count = batch * sizes.requests_per_slot
    sampling = Sampling(max_new_tokens=sizes.max_new_tokens)
    requests = [Request(str(number), text, sampling=sampling) for number, text in enumerate(pair.prompts[:count])]
    peaks = {}
    benches = {}
    for name in CONTENDERS:
        peak_bytes(device)
        benches[name] = Bench(pair, name, batch, sizes.gamma)
        # All slots filled and drained once: every size of batch is recorded before anything is timed.
        benches[name].run(requests[: 2 * batch], False)
        peaks[name] = peak_bytes(device)
    for number, order in enumerate(turns(list(CONTENDERS), sizes.rounds)):
        if number and not has_time():
            break
        for name in order:
            benches[name].run(requests, True)
    reference = pair.reference[:count]
    rows = []
    for name, bench in benches.items():
        method, step = CONTENDERS[name]
        row = make_row(bench.outcomes, reference, sizes.dtype, peaks[name])
        rows.append({"batch": batch, "method": method, "step": step, **row, **in_steps(bench, copy_bytes_per_s)})
    return rows


def in_steps(bench: Bench, copy_bytes_per_s: float) -> Row:
    """What the steps of all passes come to: seconds, forwards by kind, and the least that they could take."""
    forwards = {
        kind: {
            "calls": [one[kind].calls for one in bench.readings],
            "seconds": [one[kind].seconds for one in bench.readings],
            "bytes": [one[kind].num_bytes for one in bench.readings],
        }
        for kind in bench.readings[0]
    }
    least, outside = [], []
    for spent, reading in zip(bench.steps_s, bench.readings, strict=True):
        kinds = [reading[kind] for kind in ("target", "drafter")]
        least.append(sum(one.num_bytes for one in kinds) / copy_bytes_per_s / spent)
        outside.append(1 - sum(one.busy_s for one in kinds) / spent)
    return {
        "steps_s": bench.steps_s,
        "num_steps": bench.num_steps,
        "forwards": forwards,
        "of_roofline": statistics.median(least),
        # An eager step has gaps within its forwards, which nothing here sees.
        "outside_graphs": statistics.median(outside) if bench.clock.watched else None,
    }
