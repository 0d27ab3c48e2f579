"""Passes of this engine over requests with one method: what came out, and where the time went.

Knows engines, phases and forwards. Knows nothing of turns, references or what figures are compared with.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from actors.method import build_method
from actors.pair import load_target
from benchmarks.engine_tables import MODES
from benchmarks.forward_clock import ForwardClock, time_forwards
from benchmarks.peer_engine import choose_method
from benchmarks.peer_process import Outcome, Work
from configs.schema import Checkpoint
from decoding import Completion, Engine, Request, Sampling
from models.lanes import LaneModel
from models.target import Target

PHASES = ("encode_s", "prefill_s", "draft_s", "verify_s", "commit_s")


@dataclass(frozen=True)
class Cell:
    """One batch size and length: how many requests."""

    batch: int
    max_new_tokens: int
    num_requests: int


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


class Bench:
    """A loaded pair, compiled, and engines over it; `work` has the most requests and the longest outputs."""

    def __init__(self, work: Work) -> None:
        torch.set_num_threads(work.threads)
        self.work = work
        self._target = self._load(work.target)
        self._drafter = self._load(work.drafter)

    def _load(self, folder: str) -> Target:
        model = load_target(Checkpoint(path=folder, dtype=self.work.dtype, device="cpu"), folder)
        model.compile(0.0)
        return model

    def requests(self, cell: Cell) -> list[Request]:
        """The first prompts."""
        sampling = Sampling(max_new_tokens=cell.max_new_tokens, ignore_eos=self.work.ignore_eos)
        texts = self.work.prompt_texts[: cell.num_requests]
        return [Request(str(number), text, sampling=sampling) for number, text in enumerate(texts)]

    def engine(self, mode: str, cell: Cell) -> tuple[Engine, ForwardClock]:
        """A fresh engine, and a clock on the forwards of its target and drafter."""
        drafter = None if mode == "plain" else self._drafter
        method = build_method(choose_method(mode, self.work.gamma), drafter, self._target)
        engine = Engine(self._target, method, cell.batch, self._max_context_tokens(cell))
        return engine, ForwardClock(_lanes_of(engine))

    def memory_bytes(self, cell: Cell) -> int:
        """Of the engines of all methods, about: the target's keys and values."""
        text: Any = self._target.decoder.config
        width = text.num_key_value_heads * text.head_dim * 2 * self._target.dtype.itemsize
        return len(MODES) * cell.batch * self._max_context_tokens(cell) * text.num_hidden_layers * width

    def _max_context_tokens(self, cell: Cell) -> int:
        return self.work.max_context_tokens - (self.work.max_new_tokens - cell.max_new_tokens)

    def run(self, engine: Engine, clock: ForwardClock, requests: list[Request]) -> Pass:
        """Decode the requests."""
        before = dict(vars(engine.stats))
        clock.prompts_s = clock.steps_s = 0.0
        num_graphs = count_graphs()
        start = time.perf_counter()
        done = {one.sample_id: one for one in engine.run(requests)}
        seconds = time.perf_counter() - start
        num_graphs = count_graphs() - num_graphs
        step_s, prompt_s = clock.steps_s, clock.prompts_s
        spent = {name: vars(engine.stats)[name] - before[name] for name in (*PHASES, "num_steps", "num_slot_steps")}
        completions = [done[request.sample_id] for request in requests]
        if broken := [one.error for one in completions if one.error is not None]:
            raise RuntimeError(f"{len(broken)} requests failed: {broken[0]}")
        told = [one.telemetry for one in completions]
        outcome = Outcome(
            seconds,
            [list(one.token_ids) for one in completions],
            sum(one.num_spec_steps for one in told),
            sum(one.num_accepted_draft_tokens for one in told),
        )
        return Pass(
            outcome,
            {name: spent[name] for name in PHASES},
            spent["num_steps"],
            spent["num_slot_steps"],
            step_s,
            prompt_s,
            num_graphs,
            _typical_length(completions),
            _sum_histograms(completions),
        )

    def forwards_ms(self, engine: Engine, batch: int, length: int) -> dict[str, float]:
        """Forwards alone over `batch` rows of `length` columns: of the target over one and γ + 1 nodes, of the drafter
        over two and one."""
        target, drafter = _lanes_of(engine)
        verified = self.work.gamma + 1
        kinds = {
            "target 1": (target, 1),
            "target γ+1": (target, verified),
            "drafter 2": (drafter, 2),
            "drafter 1": (drafter, 1),
        }
        return time_forwards(kinds, batch, length)


def _lanes_of(engine: Engine) -> list[LaneModel]:
    """The target's, and the drafter's where it has any."""
    lanes = getattr(engine.method.drafter, "lanes", None)
    return [engine._lanes, lanes] if isinstance(lanes, LaneModel) else [engine._lanes]


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
