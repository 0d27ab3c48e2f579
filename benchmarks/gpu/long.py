"""Times long visual contexts on the device: forced acceptance, random KV entries, captured steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu.decoding import Row, measure_places
from benchmarks.gpu.models import CAPTURED, SEED, TextPair, drafted, plain
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.long_context import Filled, Forced, time_steps
from decoding import Engine, Request, Sampling

ALL, TEXT = "all columns", "the text"
NUM_WARM, SPARE = 2, 16


def measure_long(pair: TextPair, sizes: Sizes, has_time: Callable[[], bool]) -> tuple[list[Row], list[str]]:
    """Return rows of all contenders for each number of positions and batch size, and what was left out and why."""
    places = {
        f"{columns:,} columns, batch {batch}": partial(measure_cell, pair, columns, batch, sizes, has_time)
        for columns, batches in sizes.long
        for batch in batches
    }
    return measure_places(places, has_time)


def measure_cell(pair: TextPair, columns: int, batch: int, sizes: Sizes, has_time: Callable[[], bool]) -> list[Row]:
    """Time all contenders at one context length and batch size; plain decoding first, others if there is time."""
    room = (sizes.steps + NUM_WARM + 1) * (sizes.gamma + 1) + 2
    context = pair.max_context_tokens + room
    target: Any = Filled(pair.targets[CAPTURED], columns, batch, context + SPARE)
    drafters: dict[str, Any] = {
        reads: Filled(pair.drafters[CAPTURED], num, batch, context + SPARE)
        for reads, num in ((TEXT, 0), (ALL, columns))
    }
    sampling = Sampling(max_new_tokens=room, ignore_eos=True)
    texts = pair.prompts[:batch]
    requests = [Request(f"row-{i}", text, sampling=sampling, seed=SEED) for i, text in enumerate(texts)]
    rows: list[Row] = []
    for rate, reads in ((None, ""), *((rate, reads) for rate in sizes.rates for reads in (TEXT, ALL))):
        if rows and not has_time():
            break
        method = plain() if rate is None else drafted(drafters[reads], target, sizes.gamma, Forced(rate))
        seconds, num_steps, tokens = time_steps(Engine(target, method, batch, context), requests, sizes.steps, NUM_WARM)
        rows.append(
            {
                "columns": columns,
                "batch": batch,
                "rate": rate,
                "drafter_reads": reads,
                "steps": num_steps,
                "seconds": seconds,
                "synthetic_tokens": tokens,
            }
        )
    return rows
