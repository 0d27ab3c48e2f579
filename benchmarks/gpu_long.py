"""Synthetic timings of long visual contexts on the device: acceptance is forced, visual columns are random numbers.

As `benchmarks.synthetic` on a CPU, at the true shape and with steps replayed: what steps cost over the memory of many
images or of a long video, whatever the texts. Only steps count; prompts with their columns are read before.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.forced_acceptance import Forced
from benchmarks.gpu_models import CAPTURED, SEED, TextPair, drafted, plain
from benchmarks.gpu_sizes import Sizes
from decoding import Engine, Request, Sampling
from models.inputs.prefix import Prefix
from models.target import Target

ALL, TEXT = "all columns", "the text"


@dataclass(frozen=True)
class Contender:
    """Plain decoding, or chains with a rate of acceptance and what the drafter reads."""

    rate: float | None = None
    drafter_reads: str = ""


class Looking:
    """A model whose prompts have `num_columns` random columns before their text; otherwise the model itself."""

    def __init__(self, model: Target, num_columns: int) -> None:
        self._model = model
        self._num_columns = num_columns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_lanes(self, *asked: Any) -> list[Prefix]:
        """See `models.contract.TargetModel`."""
        (text,) = self._model.encode_lanes(*asked)
        device, count = text.embeds.device, self._num_columns
        drawn = torch.Generator(device).manual_seed(SEED)
        seen = torch.randn(count, text.embeds.shape[1], generator=drawn, device=device) * text.embeds.float().std()
        columns = torch.arange(count + text.length, device=device)
        return [
            Prefix(
                torch.cat([text.token_ids.new_zeros(count), text.token_ids]),
                torch.cat([seen.to(text.embeds.dtype), text.embeds]),
                columns,
                columns < count,
            )
        ]


def contenders(sizes: Sizes) -> list[Contender]:
    """Plain decoding first."""
    return [Contender(), *(Contender(rate, reads) for rate in sizes.rates for reads in (TEXT, ALL))]


def measure_long(pair: TextPair, sizes: Sizes, has_time: Callable[[], bool]) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each contender at each number of columns and batch size, and what was left out and why."""
    rows: list[dict[str, Any]] = []
    left_out = []
    for columns, batches in sizes.long:
        for batch in batches:
            where = f"{columns:,} columns, batch {batch}"
            try:
                for one in contenders(sizes):
                    if not has_time():
                        left_out.append(f"{where}: the section's time was used up")
                        break
                    rows.append(time_steps(one, pair, columns, batch, sizes))
            except torch.OutOfMemoryError:
                left_out.append(f"{where}: the device's memory did not hold it")
            gc.collect()
    return rows, left_out


def time_steps(one: Contender, pair: TextPair, columns: int, batch: int, sizes: Sizes) -> dict[str, Any]:
    """Steps of all rows after those that admit and record.

    Raises:
        RuntimeError: a row ended, or was refused.
    """
    num_warm = 2
    room = (sizes.steps + num_warm + 1) * (sizes.gamma + 1) + 2
    target: Any = Looking(pair.targets[CAPTURED], columns)
    if one.rate is None:
        method = plain()
    else:
        drafter = pair.drafters[CAPTURED]
        reads: Any = Looking(drafter, columns) if one.drafter_reads == ALL else drafter
        method = drafted(reads, target, sizes.gamma, Forced(one.rate))
    engine = Engine(target, method, batch, pair.max_context_tokens + columns + room)
    sampling = Sampling(max_new_tokens=room, ignore_eos=True)
    for number, text in enumerate(pair.prompts[:batch]):
        engine.submit(Request(f"row-{number}", text, sampling=sampling, seed=SEED))
    ended = [*engine.step(), *(one for _ in range(num_warm - 1) for one in engine.step())]
    before = count_tokens(engine)
    start = time.perf_counter()
    for _ in range(sizes.steps):
        ended += engine.step()
    seconds = time.perf_counter() - start
    if ended:
        raise RuntimeError(f"{len(ended)} rows ended before they were timed: {ended[0].error or ended[0]}")
    tokens = count_tokens(engine) - before
    return {
        "columns": columns,
        "batch": batch,
        "rate": one.rate,
        "drafter_reads": one.drafter_reads,
        "steps": sizes.steps,
        "seconds": seconds,
        "synthetic_tokens": tokens,
    }


def count_tokens(engine: Engine) -> int:
    """Tokens of all rows in their slots."""
    return sum(len(one.token_ids) for one in engine._slots.progress if one is not None)
