"""Times decoding on the device: text at every batch size, images, and long visual contexts.

Text is decoded plainly and with chains, eager and captured in CUDA graphs; a row whose outputs differ from the target's
own beyond rounding has no speed. `of_roofline` is the time to read the bytes of all forwards at the bandwidth of a
copy, over the steps' time; `outside_graphs` is the share of captured steps in which neither a graph nor an output layer
runs. Images have LlamaGen's XL shape. Long contexts have random KV entries and forced acceptance.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, product
from typing import Any

import torch

from benchmarks.gpu.models import CAPTURED, EAGER, FUSED, SEED, ImageModels, TextPair, drafted, peak_bytes, watched_of
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.clock import DeviceClock, Reading
from benchmarks.harness.engines import lanes_of, outcome_of, plain, run_requests
from benchmarks.harness.long_context import Filled, Forced, time_steps
from benchmarks.harness.process import Outcome
from benchmarks.harness.verdict import make_row, turns
from decoding import Engine, Request, Sampling
from decoding.scheduling.replay import NUM_LAUNCHED

METHODS = ("plain", "chain")
CONTENDERS = {f"{method}, {step}": (method, step) for method in METHODS for step in (EAGER, CAPTURED, FUSED)}
GUIDANCE = 4.0
ALL, TEXT = "all columns", "the text"
NUM_WARM, SPARE = NUM_LAUNCHED + 2, 16
"""Steps before the timed ones, which are replays; KV positions beyond those of the steps."""
Row = dict[str, Any]
HasTime = Callable[[], bool]


def measure_all(measurements: Mapping[str, Callable[[], list[Row]]], has_time: HasTime) -> dict[str, Any]:
    """Return the `rows` of all named measurements, and those `left_out` for lack of time or memory."""
    rows: list[Row] = []
    left_out: list[str] = []
    for name, measure in measurements.items():
        if not has_time():
            left_out.append(f"{name}: the section's time was used up")
            continue
        try:
            rows += measure()
        except torch.OutOfMemoryError:
            left_out.append(f"{name}: the device's memory did not hold it")
        gc.collect()  # frees the engines, which are in reference cycles
    return {"rows": rows, "left_out": left_out}


class Bench:
    """Engine, clock and measurements of a contender."""

    def __init__(self, pair: TextPair, name: str, batch: int, gamma: int) -> None:
        method, step = CONTENDERS[name]
        target = pair.targets[step]
        parts = plain() if method == "plain" else drafted(pair.drafters[step], target, gamma)
        self.engine = Engine(target, parts, batch, pair.max_context_tokens)
        self.clock = DeviceClock(lanes_of(self.engine), watched_of(target, pair.drafters[step]), self.engine._runner)
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
        names = {"calls": "calls", "seconds": "seconds", "bytes": "num_bytes"}
        least, outside = [], []
        for spent, reading in zip(self.steps_s, self.readings, strict=True):
            kinds = [reading[kind] for kind in ("target", "drafter")]
            least.append(sum(part.num_bytes for part in kinds) / copy_bytes_per_s / spent)
            outside.append(1 - sum(part.busy_s for part in kinds) / spent)
        return {
            "steps_s": self.steps_s,
            "num_steps": self.num_steps,
            "forwards": {
                kind: {name: [getattr(reading[kind], key) for reading in self.readings] for name, key in names.items()}
                for kind in self.readings[0]
            },
            "of_roofline": statistics.median(least),
            # Gaps within the forwards of an eager step are not measured.
            "outside_graphs": statistics.median(outside) if self.clock.watched else None,
        }


def measure_decoding(pair: TextPair, sizes: Sizes, copy_bytes_per_s: float, has_time: HasTime) -> dict[str, Any]:
    """Return a row for each contender without fused layers at each batch size, and what was left out and why.

    Eager steps are timed at the batch sizes `sizes.eager_batches`.
    """

    def measurements() -> Iterator[tuple[str, Callable[[], list[Row]]]]:
        for b in sizes.batches:
            steps = (EAGER, CAPTURED) if b in sizes.eager_batches else (CAPTURED,)
            yield f"batch {b}", partial(_measure_batch, pair, b, steps, sizes, copy_bytes_per_s, has_time)

    return measure_all(dict(measurements()), has_time)


def measure_fused(pair: TextPair, sizes: Sizes, copy_bytes_per_s: float, has_time: HasTime) -> dict[str, Any]:
    """Return what `measure_decoding` does for captured steps of fused layers."""
    steps = (FUSED,)
    measurements = {
        f"batch {b}": partial(_measure_batch, pair, b, steps, sizes, copy_bytes_per_s, has_time) for b in sizes.batches
    }
    return measure_all(measurements, has_time)


def _measure_batch(
    pair: TextPair, batch: int, steps: tuple[str, ...], sizes: Sizes, copy_bytes_per_s: float, has_time: HasTime
) -> list[Row]:
    """Return the rows of one batch size; at least one round is timed."""
    names = [name for name, (_, step) in CONTENDERS.items() if step in steps]
    count, device = batch * sizes.requests_per_slot, next(pair.targets[EAGER].decoder.parameters()).device
    sampling = Sampling(max_new_tokens=sizes.max_new_tokens)
    requests = [Request(str(number), text, sampling=sampling) for number, text in enumerate(pair.prompts[:count])]
    peaks, benches = {}, {}
    for name in names:
        peak_bytes(device)
        benches[name] = Bench(pair, name, batch, sizes.gamma)
        # All slots are filled and drained once, so that every batch size is captured.
        benches[name].run(requests[: 2 * batch], False)
        peaks[name] = peak_bytes(device)
    for number, order in enumerate(turns(names, sizes.rounds)):
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


def measure_images(images: ImageModels, sizes: Sizes, has_time: HasTime) -> dict[str, Any]:
    """Return one row for captured and one for eager steps, which draw the same images up to rounding."""
    num_codes = sizes.grid**2
    sampling = Sampling(max_new_tokens=num_codes, temperature=1.0, guidance_scale=GUIDANCE)
    requests = [
        Request(f"image-{index:04d}", "", sampling=sampling, condition=index % images.num_classes)
        for index in range(sizes.images)
    ]
    expected: list[tuple[int, ...]] = []

    def measure(step: str) -> list[Row]:
        model = images.models[step]
        engine = Engine(model, plain(), sizes.images, model.gpt.shape.num_condition_tokens + num_codes)
        if step == CAPTURED:
            run_requests(engine, requests)  # all images have one length, so capturing needs a whole batch
        start = time.perf_counter()
        codes = [completion.token_ids for completion in run_requests(engine, requests)]
        seconds = time.perf_counter() - start
        if not expected:
            expected.extend(codes)
        pairs = list(zip(chain(*codes), chain(*expected), strict=True))
        return [
            {
                "step": step,
                "batch": sizes.images,
                "codes": num_codes,
                "seconds": seconds,
                "images_per_s": sizes.images / seconds,
                "equal_images": sum(image == other for image, other in zip(codes, expected, strict=True)),
                "equal_codes": sum(code == other for code, other in pairs) / len(pairs),
            }
        ]

    return measure_all({step: partial(measure, step) for step in (CAPTURED, EAGER)}, has_time)


def measure_long(pair: TextPair, sizes: Sizes, has_time: HasTime) -> dict[str, Any]:
    """Return rows of all contenders for each number of positions and batch size, and what was left out and why."""
    measurements = {
        f"{columns:,} columns, batch {batch}": partial(_measure_context, pair, columns, batch, sizes, has_time)
        for columns, batches in sizes.long
        for batch in batches
    }
    return measure_all(measurements, has_time)


def _measure_context(pair: TextPair, columns: int, batch: int, sizes: Sizes, has_time: HasTime) -> list[Row]:
    """Time captured steps of all contenders at one context length and batch size; plain decoding first, others if there
    is time."""
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
    for rate, reads in ((None, ""), *product(sizes.rates, (TEXT, ALL))):
        if rows and not has_time():
            break
        method = plain() if rate is None else drafted(drafters[reads], target, sizes.gamma, Forced(rate))
        seconds, num_steps, tokens = time_steps(Engine(target, method, batch, context), requests, sizes.steps, NUM_WARM)
        row = {"columns": columns, "batch": batch, "rate": rate, "drafter_reads": reads, "steps": num_steps}
        rows.append(row | {"seconds": seconds, "synthetic_tokens": tokens})
    return rows
