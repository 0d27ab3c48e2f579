"""Passes of several methods over the same requests, side by side: a slice of one, then a slice of another.

Whoever has made the fewest tokens goes on, so that all meet the same minutes of a machine that changes its pace. Knows
engines, phases and forwards. Knows nothing of pairs, references or what figures are compared with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.forward_clock import ForwardClock
from benchmarks.peer_process import Outcome
from decoding import Completion, Engine, Request

PHASES = ("encode_s", "prefill_s", "draft_s", "verify_s", "commit_s")
SLICE_S = 0.5
"""A slice ends with the first step after so long: many steps of one row, so that what a change of engines leaves in the
CPU's caches weighs little, and few of many rows."""


@dataclass
class Pass:
    """One pass of one method: what came out, and how long phases and forwards took.

    `step_forwards_s` and `prompt_forwards_s` are those of target and drafter together; `num_new_graphs` were compiled
    during the pass. `typical_length` is that of a row in the middle of its text, in columns.
    """

    outcome: Outcome
    phases_s: dict[str, float]
    num_steps: int
    num_slot_steps: int
    step_forwards_s: float
    prompt_forwards_s: float
    num_new_graphs: int
    typical_length: int
    histogram: list[int]


class Running:
    """A pass of one method that is under way; its time is that of its own slices."""

    def __init__(self, engine: Engine, clock: ForwardClock, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._clock = clock
        self._requests = requests
        self._seconds = 0.0
        self._num_graphs = 0
        self._done: dict[str, Completion] = {}
        self._stats_before = dict(vars(engine.stats))
        clock.prompts_s = clock.steps_s = 0.0
        for request in requests:
            engine.submit(request)

    @property
    def is_over(self) -> bool:
        return not self._engine.has_work

    @property
    def num_tokens(self) -> int:
        """Tokens made so far, those of unfinished texts among them."""
        finished = sum(len(one.token_ids) for one in self._done.values())
        return finished + sum(len(one.token_ids) for one in self._engine._slots.progress if one is not None)

    def go_on(self, slice_s: float) -> None:
        """Take steps until `slice_s` have passed or nothing is left, at least one."""
        num_graphs_before = count_graphs()
        start = time.perf_counter()
        while True:
            for one in self._engine.step():
                self._done[one.sample_id] = one
            spent = time.perf_counter() - start
            if spent >= slice_s or self.is_over:
                break
        self._seconds += spent
        self._num_graphs += count_graphs() - num_graphs_before

    def result(self) -> Pass:
        """What the pass came to, once it is over.

        Raises:
            RuntimeError: a request failed.
        """
        completions = [self._done[request.sample_id] for request in self._requests]
        if broken := [one.error for one in completions if one.error is not None]:
            raise RuntimeError(f"{len(broken)} requests failed: {broken[0]}")
        stats = vars(self._engine.stats)
        spent = {name: stats[name] - self._stats_before[name] for name in (*PHASES, "num_steps", "num_slot_steps")}
        told = [one.telemetry for one in completions]
        outcome = Outcome(
            self._seconds,
            [list(one.token_ids) for one in completions],
            sum(one.num_spec_steps for one in told),
            sum(one.num_accepted_draft_tokens for one in told),
        )
        return Pass(
            outcome,
            {name: spent[name] for name in PHASES},
            spent["num_steps"],
            spent["num_slot_steps"],
            self._clock.steps_s,
            self._clock.prompts_s,
            self._num_graphs,
            _typical_length(completions),
            _sum_histograms(completions),
        )


def run_side_by_side(
    engines: Mapping[str, tuple[Engine, ForwardClock]], order: Sequence[str], requests: Sequence[Request]
) -> dict[str, Pass]:
    """One pass of each of the `order`'s methods, whose first begins; by the method's name."""
    running = {mode: Running(*engines[mode], requests) for mode in order}
    while going := [one for one in running.values() if not one.is_over]:
        min(going, key=lambda one: one.num_tokens).go_on(SLICE_S)
    return {mode: one.result() for mode, one in running.items()}


def count_graphs() -> int:
    """Graphs that torch has compiled in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


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
