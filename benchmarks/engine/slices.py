"""Runs passes of several methods over the same requests side by side, and times isolated forwards.

The method with the fewest tokens gets the next slice of time, so that changes of the machine's speed affect all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.engines import checked, count_tokens, outcome_of, sum_histograms
from benchmarks.harness.process import Outcome
from decoding import Completion, Engine, Request
from models.kv.lanes import LaneModel, SlotBatch

PHASES = ("encode_s", "prefill_s", "draft_s", "verify_s", "commit_s")
SLICE_S = 0.5
"""A slice ends with the first step after this time: long enough that cold CPU caches do not matter."""
MAX_FORWARDS, MIN_FORWARDS, ENOUGH_S = 25, 3, 2.0
"""Maximum and minimum number of isolated forwards timed per kind; after `ENOUGH_S` seconds only the fewest."""


@dataclass
class Pass:
    """One timed pass of one method.

    `phases_s` has seconds by phase (`PHASES`). `step_forwards_s` are seconds of target and drafter forwards in steps,
    `prompt_forwards_s` those on prompts. `num_slot_steps` sums the active slots over steps. `num_new_graphs` counts
    graphs compiled during the pass. `typical_length` is the mean of prompt length plus half the output length, in
    tokens. `histogram[i]` counts steps that accepted i drafts."""

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
    """A pass in progress; its time is the sum of its slices."""

    def __init__(self, engine: Engine, clock: DeviceClock, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._clock = clock
        self._requests = requests
        self._seconds = 0.0
        self._num_graphs = 0
        self._done: dict[str, Completion] = {}
        self._stats_before = dict(vars(engine.stats))
        clock.read()
        for request in requests:
            engine.submit(request)

    @property
    def is_over(self) -> bool:
        return not self._engine.has_work

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, those of unfinished rows included."""
        return sum(len(completion.token_ids) for completion in self._done.values()) + count_tokens(self._engine)

    def run_slice(self) -> None:
        """Run steps until `SLICE_S` have passed or all requests are finished."""
        num_graphs_before, start, spent = count_graphs(), time.perf_counter(), 0.0
        while not self.is_over and spent < SLICE_S:
            self._done |= {completion.sample_id: completion for completion in self._engine.step()}
            spent = time.perf_counter() - start
        self._seconds += spent
        self._num_graphs += count_graphs() - num_graphs_before

    def result(self) -> Pass:
        """Return the finished pass; raise RuntimeError if a request failed."""
        done = checked([self._done[request.sample_id] for request in self._requests])
        names = (*PHASES, "num_steps", "num_slot_steps")
        spent = {name: getattr(self._engine.stats, name) - self._stats_before[name] for name in names}
        forwards = self._clock.read()
        return Pass(
            outcome_of(self._seconds, done),
            {name: spent[name] for name in PHASES},
            spent["num_steps"],
            spent["num_slot_steps"],
            forwards["target"].seconds + forwards["drafter"].seconds,
            forwards["prompts"].seconds,
            self._num_graphs,
            round(statistics.mean(completion.num_input_tokens + len(completion.token_ids) / 2 for completion in done)),
            sum_histograms(done),
        )


def run_side_by_side(
    engines: Mapping[str, tuple[Engine, DeviceClock]],
    order: Sequence[str],
    requests: Sequence[Request],
) -> dict[str, Pass]:
    """Run one pass of each method in `order`; ties go to the earlier method."""
    running = {mode: Running(*engines[mode], requests) for mode in order}
    while unfinished := [mode for mode, run in running.items() if not run.is_over]:
        mode = min(unfinished, key=lambda mode: running[mode].num_tokens)
        running[mode].run_slice()
    return {mode: run.result() for mode, run in running.items()}


def count_graphs() -> int:
    """Return the number of graphs that torch has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@torch.inference_mode()
def time_forwards(kinds: Mapping[str, tuple[LaneModel, int]], batch: int, length: int) -> dict[str, float]:
    """Return the median milliseconds of forwards with output layers, by kind (lanes, nodes), over `batch` rows of
    `length` positions.

    The kinds take turns, so that changes of the machine's speed affect all.
    """
    times: dict[str, list[float]] = {name: [] for name in kinds}
    start_s = time.perf_counter()
    for turn in range(MAX_FORWARDS):
        if turn >= MIN_FORWARDS and time.perf_counter() - start_s > ENOUGH_S:
            break
        for name, (lanes, num_nodes) in kinds.items():
            times[name].append(_time_forward(lanes, batch, num_nodes, length))
    return {name: statistics.median(each) for name, each in times.items()}


def _time_forward(lanes: LaneModel, batch: int, num_nodes: int, length: int) -> float:
    slots = SlotBatch(torch.arange(batch), tuple(range(batch)), (0,) * batch)
    lanes.cache.lens[:batch] = length
    lanes.rows.prefix_lengths[:batch] = [length] * batch
    tokens = torch.full((batch, num_nodes), 5)
    depth = torch.arange(num_nodes).expand(batch, -1)
    visible = torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril().expand(batch, -1, -1)
    start = time.perf_counter()
    lanes.logits(lanes.forward(slots, tokens, depth, visible))
    return 1000 * (time.perf_counter() - start)
