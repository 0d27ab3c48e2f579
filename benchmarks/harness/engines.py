"""Runs engines and reads their completions, KV lanes and tokenizers.

Imports neither Ray nor pydantic.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness.process import Outcome
from benchmarks.harness.verdict import ratio_error
from decoding import Completion, Engine, Method, Request
from decoding.acceptance import Exact
from decoding.drafters import NoDrafter
from decoding.trees import Chain
from models.backends.memory import free_bytes
from models.inputs.processing import FrontEnd
from models.kv.lanes import LaneModel
from models.loading.checkpoints import CheckpointRef, read_config, read_processor
from models.target import Target

Cell = TypeVar("Cell")
OF_MEMORY = 0.7


def checked(done: Sequence[Completion]) -> list[Completion]:
    """Return the same completions; raise RuntimeError if one has an error."""
    if broken := [completion.error for completion in done if completion.error is not None]:
        raise RuntimeError(f"{len(broken)} requests failed: {broken[0]}")
    return list(done)


def run_requests(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Return all completions in the order of `requests`; raise RuntimeError if a request failed or has none."""
    done = {completion.sample_id: completion for completion in engine.run(requests)}
    if len(done) != len(requests):
        raise RuntimeError(f"{len(requests) - len(done)} of {len(requests)} requests have no completion")
    return checked([done[request.sample_id] for request in requests])


def outcome_of(seconds: float, done: Sequence[Completion]) -> Outcome:
    """Return the outcome of a timed pass; its number of steps is 0 if nothing was drafted."""
    telemetry = [completion.telemetry for completion in done]
    num_steps = (
        sum(entry.num_spec_steps for entry in telemetry) if any(entry.num_draft_tokens for entry in telemetry) else 0
    )
    outputs = [list(completion.token_ids) for completion in done]
    return Outcome(seconds, outputs, num_steps, sum(entry.num_accepted_draft_tokens for entry in telemetry))


def acceptance_of(done: Sequence[Completion]) -> dict[str, float]:
    """Return acceptance length (bonus token included; total over total; standard error over samples), drafts per step,
    and the share of relaxed acceptances."""
    telemetry = [completion.telemetry for completion in done]
    accepted = [entry.num_accepted_draft_tokens for entry in telemetry]
    steps = [entry.num_spec_steps for entry in telemetry]
    num_steps, num_accepted = max(1, sum(steps)), max(1, sum(accepted))
    return {
        "mean_acceptance_length": 1.0 + sum(accepted) / num_steps,
        "acceptance_length_se": ratio_error(accepted, steps),
        "drafted_per_step": sum(entry.num_draft_tokens for entry in telemetry) / num_steps,
        "relaxed_share": sum(entry.num_relaxed_accepts for entry in telemetry) / num_accepted,
    }


def sum_histograms(done: Sequence[Completion]) -> list[int]:
    """Return the number of steps that accepted 0, 1, … drafts, over all samples."""
    return [
        sum(counts)
        for counts in zip_longest(*(completion.telemetry.acceptance_histogram for completion in done), fillvalue=0)
    ]


def plain() -> Method:
    """Return the method of plain decoding; importing it from `actors` would need pydantic."""
    return Method(NoDrafter(), Chain(1), Exact())


def plain_step_s(model: Target, batch: int, max_context_tokens: int, requests: Iterable[Request]) -> float:
    """Return the median seconds of plain decoding steps, without the first two."""
    engine = Engine(model, plain(), batch, max_context_tokens)
    for request in requests:
        engine.submit(request)
    seconds = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def lanes_of(engine: Engine) -> list[LaneModel]:
    """Return the target's lanes, and the drafter's if the method has a drafter model."""
    lanes = getattr(engine.method.drafter, "lanes", None)
    return [engine._lanes, lanes] if isinstance(lanes, LaneModel) else [engine._lanes]


def count_tokens(engine: Engine) -> int:
    """Return the number of tokens of all unfinished rows."""
    return sum(len(state.token_ids) for state in engine._slots.progress if state is not None)


def kv_bytes(model: Target, num_positions: int) -> int:
    """Return the bytes of keys and values of `num_positions` KV positions."""
    text: Any = model.decoder.config
    width = text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 2 * model.dtype.itemsize
    return int(num_positions * width)


def measure_grid(
    cells: Iterable[Cell],
    needed_bytes: Callable[[Cell], int],
    measure: Callable[[Cell], list[dict[str, Any]]],
    max_s: float,
) -> tuple[list[dict[str, Any]], list[tuple[Cell, str]]]:
    """Measure all configurations; skip those that start after `max_s` or need over 70 % of the free memory."""
    rows: list[dict[str, Any]] = []
    left_out = []
    start_s = time.monotonic()
    for cell in cells:
        if time.monotonic() - start_s > max_s:
            left_out.append((cell, "time"))
        elif needed_bytes(cell) > OF_MEMORY * free_bytes():
            left_out.append((cell, "memory"))
        else:
            gc.collect()  # frees the previous engines, which are in reference cycles
            rows += measure(cell)
    return rows, left_out


def front_end_of(folder: str | Path) -> FrontEnd:
    """Load the tokenizer and chat template of a checkpoint."""
    ref = CheckpointRef(str(folder))
    return FrontEnd(read_processor(ref, read_config(ref)))


def encode(front_end: FrontEnd, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of prompts."""
    return [front_end.encode(text, ())["input_ids"][0].tolist() for text in texts]
