"""Estimates the cost of a job from a pilot run on samples spread over the source. Writes nothing."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from configs.load import ConfigError
from configs.pool import EnginePoolConfig
from pipeline.manifest.datasource import SpanDatasource
from pipeline.pilot import figures
from pipeline.pilot.verdict import PilotVerdict, Range, finite

Floats = NDArray[np.float64]
MAX_SPANS = 24
NUM_RESAMPLES = 2000
LEVEL = 0.9
"""Confidence level of the interval."""


@dataclass(frozen=True)
class Pilot:
    """Samples of evenly spaced spans of the source: one table per span; `span_rows` are the row counts of the spans."""

    tables: tuple[pa.Table, ...]
    span_rows: tuple[int, ...]
    num_spans: int
    num_samples: int | None
    """Number of samples of the whole source; None if it is unknown before the source is read."""
    repeats: int = 1
    """How often each sample is decoded (`pipeline.pilot.repeats`)."""

    @property
    def datasource(self) -> Tables:
        return Tables(self.tables * self.repeats)

    @property
    def size(self) -> int:
        return sum(table.num_rows for table in self.tables)


class Tables(Datasource):  # type: ignore[misc]
    """Ray datasource over tables in memory, with one read task per table."""

    def __init__(self, tables: Sequence[pa.Table]) -> None:
        super().__init__()
        self._tables = tuple(tables)

    @property
    def num_spans(self) -> int:
        return len(self._tables)

    def estimate_inmemory_data_size(self) -> int | None:
        return sum(int(table.nbytes) for table in self._tables)

    def get_read_tasks(self, parallelism: int, *arguments: Any, **options: Any) -> list[ReadTask]:
        return [
            ReadTask(partial(list, [table]), BlockMetadata(table.num_rows, table.nbytes, None, None))
            for table in self._tables
        ]


def draw(datasource: SpanDatasource, num_samples: int, shift: float = 0.5) -> Pilot:
    """Read at most `num_samples` samples, spread evenly over spans and rows; raise ConfigError if there are none.
    `shift`, at least 0 and less than 1, is their place in equal parts of the source; 0.5 is the middle."""
    count = min(MAX_SPANS, datasource.num_spans, num_samples)
    chosen = [int((index + shift) * datasource.num_spans / count) for index in range(count)]
    tables, span_rows, remaining = [], [], num_samples
    for index, span in enumerate(chosen):
        table = datasource.read(span, note=False)  # a note is a file in the output
        wanted = min(table.num_rows, math.ceil(remaining / (count - index)))
        rows = [int((index + shift) * table.num_rows / wanted) for index in range(wanted)]
        tables.append(table.take(pa.array(rows, pa.int64())))
        span_rows.append(table.num_rows)
        remaining -= wanted
    if not sum(span_rows):
        raise ConfigError("source.path: the spans looked at hold no samples")
    return Pilot(tuple(tables), tuple(span_rows), datasource.num_spans, datasource.num_samples)


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of the whole job; hours count the working time of engines, without model loading and waiting."""

    pilot_samples: int
    pilot_rows: int
    pilot_errors: int
    samples: Range
    rows: Range
    engine_hours: Range
    device: str
    device_hours: Range
    wall_hours: Range
    output_bytes: Range
    tokens: Range
    mean_acceptance_length: float
    price_per_hour: float | None = None
    cost: Range | None = None
    verdict: PilotVerdict | None = None
    notes: tuple[str, ...] = field(default=())
    interval_of: str = ""
    """The values whose spread gives the intervals, as text."""

    def to_json(self) -> str:
        """Return the estimate as one line of JSON."""
        verdict = None if self.verdict is None else self.verdict.to_json()
        return json.dumps({**finite(asdict(self)), "verdict": verdict, "interval": LEVEL})

    def show(self) -> str:
        """Return the estimate as a table for the terminal."""
        errors = f"{self.pilot_errors:,} of them failed"
        lines = [
            ("pilot", f"{self.pilot_samples:,} samples, {self.pilot_rows:,} rows, {errors}"),
            ("samples", figures.count(self.samples)),
            ("rows", figures.count(self.rows)),
            ("tokens", figures.shown(self.tokens)),
            ("acceptance length", f"{self.mean_acceptance_length:.2f}"),
            (f"{self.device}-hours", figures.shown(self.device_hours)),
            ("wall clock", figures.time(self.wall_hours.times(3600))),
            ("output", figures.size(self.output_bytes)),
        ]
        if self.cost is not None:
            lines.append(("cost", f"{figures.shown(self.cost)}, at {self.price_per_hour:g} per {self.device}-hour"))
        if self.interval_of:
            lines.append(("intervals", f"{100 * LEVEL:.0f} %, Student's t, over {self.interval_of}"))
        text = [f"{label:<18}{value}" for label, value in lines]
        text += self.verdict.lines() if self.verdict is not None else []
        return "\n".join([*text, *(f"note: {note}" for note in self.notes)])


def estimate(
    pilot: Pilot,
    results: pa.Table,
    pool: EnginePoolConfig,
    threads: int | None,
    price_per_hour: float | None = None,
    seed: int = 0,
    verdict: PilotVerdict | None = None,
    method: str = "",
    total_rows: int | None = None,
) -> Estimate:
    """Scale a pilot's results up to the whole source.

    Confidence intervals are bootstrapped over spans, because rows of one file are similar; over samples if there is one
    span. `threads` is the number of CPU cores of an engine without a GPU. With a `verdict`, hours are those of `method`
    at full slots, otherwise those that its rows report. `total_rows` are the samples of the whole job, in place of
    those of the source.
    """
    own = _rows_of(results, method)
    sums = _sums(pilot, results, own)
    rng = np.random.default_rng(seed)
    num_groups = len(sums["samples"])
    picks = rng.integers(0, num_groups, (NUM_RESAMPLES, num_groups))
    drawn = {name: values[picks].sum(1) for name, values in sums.items()}
    counts = np.asarray(pilot.span_rows, float)
    known = pilot.num_samples if total_rows is None else total_rows
    if known is not None:
        samples = Range(known, known, known)
    else:
        again = counts[rng.integers(0, len(counts), (NUM_RESAMPLES, len(counts)))].mean(1)
        samples = _ranged(counts.mean() * pilot.num_spans, again * pilot.num_spans, len(counts))

    def whole(name: str) -> Range:
        per_sample = sums[name].sum() / sums["samples"].sum()
        each = _ranged(per_sample, drawn[name] / np.maximum(drawn["samples"], 1e-9), num_groups)
        return Range(samples.value * each.value, samples.low * each.low, samples.high * each.high)

    rows, devices = whole("rows"), pool.gpus or float(threads or 1)
    # Only rows of the method: those that plain decoding made cost more or less.
    per_row = sums["engine_s"].sum() / sums["own"].sum()
    some = drawn["own"] > 0
    each = _ranged(per_row, drawn["engine_s"][some] / drawn["own"][some], num_groups)
    engine_hours = Range(rows.value * each.value, rows.low * each.low, rows.high * each.high).times(1 / 3600)
    acceptance_length = _acceptance_length(own)
    if verdict is not None and engine_hours.value:
        spread = engine_hours.times(1 / engine_hours.value)
        verdict = verdict.with_hours(rows.value, spread, devices, price_per_hour)
        result = verdict.result_of(method)
        if result is not None and result.row_s is not None:
            engine_hours = result.row_s.times_range(spread).times(rows.value / 3600)
            acceptance_length = result.acceptance_length
    device_hours = engine_hours.times(devices)
    return Estimate(
        pilot_samples=pilot.size,
        pilot_rows=results.num_rows,
        pilot_errors=pc.sum(pc.not_equal(results["error_type"], "")).as_py() or 0,
        samples=samples,
        rows=rows,
        engine_hours=engine_hours,
        device="GPU" if pool.gpus else "core",
        device_hours=device_hours,
        wall_hours=engine_hours.times(1 / pool.max_size),
        output_bytes=whole("bytes").times(_written(results) / max(1.0, sums["bytes"].sum() * pilot.repeats)),
        tokens=whole("tokens"),
        mean_acceptance_length=acceptance_length,
        price_per_hour=price_per_hour,
        cost=None if price_per_hour is None else device_hours.times(price_per_hour),
        verdict=verdict,
        notes=_notes(pilot, results, pool, verdict is not None),
        interval_of=_interval_of(pilot, num_groups),
    )


_KEY = ["source", "row_index"]


def _interval_of(pilot: Pilot, num_groups: int) -> str:
    spans = len(pilot.tables)
    return f"{num_groups} of {pilot.num_spans:,} spans" if spans > 1 else f"{num_groups} samples of one span"


def _rows_of(results: pa.Table, method: str) -> pa.Table:
    """Return the rows that a method decoded; all rows if it decoded none."""
    own = results.filter(pc.equal(results["method"], method))
    return own if own.num_rows else results


def _sums(pilot: Pilot, results: pa.Table, own: pa.Table) -> dict[str, Floats]:
    """Sum samples, rows, tokens and bytes in memory per span of the pilot (per sample if one span), for one decoding of
    each sample; and rows and engine seconds of `own`, the rows of one method."""
    spans = [np.full(table.num_rows, span) for span, table in enumerate(pilot.tables)]
    groups = np.concatenate(spans) if len(pilot.tables) > 1 else np.arange(pilot.size)
    samples = pa.concat_tables(table.select(_KEY) for table in pilot.tables).append_column("group", pa.array(groups))
    telemetry = own["telemetry"]
    engine_ms = [pc.struct_field(telemetry, phase) for phase in ("prefill_ms", "draft_ms", "verify_ms")]
    rows = pa.table(
        {
            **{name: results[name] for name in _KEY},
            "rows": pa.repeat(1.0, results.num_rows),
            "tokens": results["num_generated_tokens"],
            "bytes": pa.array(results.slice(row, 1).nbytes for row in range(results.num_rows)),
        }
    )
    timed = pa.table(
        {
            **{name: own[name] for name in _KEY},
            "own": pa.repeat(1.0, own.num_rows),
            "engine_s": pc.divide(pc.add(pc.add(engine_ms[0], engine_ms[1]), engine_ms[2]), 1000),
        }
    )
    num_groups = len(pilot.tables) if len(pilot.tables) > 1 else pilot.size
    sums = {"samples": np.bincount(groups, minlength=num_groups).astype(float)}
    for table in (rows, timed):
        names = table.column_names[len(_KEY) :]
        by_group = samples.join(table, _KEY, join_type="left outer").group_by("group")
        totals = by_group.aggregate([(name, "sum") for name in names])
        for name in names:
            sums[name] = np.zeros(num_groups)
            sums[name][totals["group"].to_numpy()] = totals[f"{name}_sum"].fill_null(0).to_numpy()
    for name in ("rows", "tokens", "bytes"):
        sums[name] /= pilot.repeats
    return sums


def _acceptance_length(results: pa.Table) -> float:
    """Return the mean acceptance length over all steps, the bonus token included."""
    telemetry = results["telemetry"]
    steps, accepted = (
        pc.sum(pc.struct_field(telemetry, name)).as_py() for name in ("num_spec_steps", "num_accepted_draft_tokens")
    )
    return 1 + accepted / steps if steps else 1.0


def _written(results: pa.Table) -> int:
    """Return the size in bytes of the rows as a Parquet file."""
    file = io.BytesIO()
    pq.write_table(results, file, compression="zstd")
    return file.tell()


def _ranged(value: float, drawn: Floats, num_drawn: int) -> Range:
    """Return the value with the interval between quantiles of `drawn`, widened for a small sample of `num_drawn`."""
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    wider = _small_sample(num_drawn)
    below, above = wider * max(0.0, value - low), wider * max(0.0, high - value)
    return Range(float(value), float(value - below), float(value + above))


def _small_sample(count: int) -> float:
    """Return the factor that widens a bootstrap interval of a sample of `count` values: sqrt(n / (n - 1)), times
    Student's t quantile (Cornish-Fisher expansion) over the normal quantile."""
    if count < 2:
        return 1.0
    z, freedom = 1.6449, count - 1
    student = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return math.sqrt(count / freedom) * student / z


def _notes(pilot: Pilot, results: pa.Table, pool: EnginePoolConfig, is_judged: bool) -> tuple[str, ...]:
    notes = ["loading models, waiting for input and the CPUs that decode are not counted"]
    if pool.slots == "auto":
        notes.append(
            "pool.slots is auto: a pilot of fewer than 4 rows for each slot leaves some empty, and looks slower"
        )
    elif results.num_rows < 4 * pool.slots and not is_judged:
        notes.append(
            f"{results.num_rows} rows do not fill {pool.slots} slots for long, and engines with empty slots are slower "
            f"for each row: a pilot of {4 * pool.slots} or more is closer"
        )
    methods = Counter(results["method"].to_pylist())
    if not is_judged:
        notes.append("the pilot has too few rows, or too few slots in use, to compare methods: take more samples")
    if len(methods) > 1 and not is_judged:
        counts = ", ".join(f"{name} {count:,}" for name, count in sorted(methods.items()))
        notes.append(
            f"its rows were decoded by several methods, which method.auto tries ({counts}): the whole job keeps the "
            "best of them after its first rows, so that its hours are fewer"
        )
    if len(pilot.tables) < 5:
        notes.append(f"the source has few spans ({pilot.num_spans}): the interval tells little about unlike files")
    return tuple(notes)
