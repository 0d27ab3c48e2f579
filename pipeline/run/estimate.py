"""Estimates the cost of a whole job from a pilot over some samples that are spread over the source.

Draws the pilot, scales up its rows, and computes the interval. Writes nothing.
"""

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
import pyarrow.parquet as pq
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from configs.load import ConfigError
from configs.schema import EnginePool
from pipeline.source.datasource import SpanDatasource

MAX_SPANS = 24
NUM_RESAMPLES = 2000
LEVEL = 0.9
"""Of the interval: nine pilots in ten would have led to one that holds the whole."""


@dataclass(frozen=True)
class Pilot:
    """Samples out of some spans of the source, evenly spread; `span_rows` is what each of those spans holds in all."""

    tables: tuple[pa.Table, ...]
    span_rows: tuple[int, ...]
    num_spans: int
    num_samples: int | None
    """Rows of the whole source, None if only reading all of it gives the number."""

    @property
    def datasource(self) -> Tables:
        """The pilot as Ray reads it."""
        return Tables(self.tables)

    @property
    def size(self) -> int:
        """How many samples were drawn."""
        return sum(table.num_rows for table in self.tables)


class Tables(Datasource):  # type: ignore[misc]
    """Tables of this process, one read task for each."""

    def __init__(self, tables: Sequence[pa.Table]) -> None:
        super().__init__()
        self._tables = tuple(tables)

    @property
    def num_spans(self) -> int:
        """How many read tasks there are."""
        return len(self._tables)

    def estimate_inmemory_data_size(self) -> int | None:
        """The tables' bytes."""
        return sum(int(table.nbytes) for table in self._tables)

    def get_read_tasks(self, parallelism: int, *arguments: Any, **options: Any) -> list[ReadTask]:
        """One task for each table, for any `parallelism`."""
        return [ReadTask(partial(_one, table), _metadata(table)) for table in self._tables]


def draw(datasource: SpanDatasource, num_samples: int) -> Pilot:
    """Read `num_samples` samples, spans evenly over the source and rows evenly in each; fewer if there are no more.

    Raises:
        ConfigError: the source holds none.
    """
    count = min(MAX_SPANS, datasource.num_spans, num_samples)
    chosen = [(2 * index + 1) * datasource.num_spans // (2 * count) for index in range(count)]
    tables, span_rows, left = [], [], num_samples
    for place, span in enumerate(chosen):
        table = datasource.read(span, note=False)  # which would write into the output
        wanted = min(table.num_rows, math.ceil(left / (count - place)))
        rows = [(2 * index + 1) * table.num_rows // (2 * wanted) for index in range(wanted)]
        tables.append(table.take(pa.array(rows, pa.int64())))
        span_rows.append(table.num_rows)
        left -= wanted
    if not sum(span_rows):
        raise ConfigError("source.path: the spans looked at hold no samples")
    return Pilot(tuple(tables), tuple(span_rows), datasource.num_spans, datasource.num_samples)


@dataclass(frozen=True)
class Range:
    """A value and the interval around it."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        """All three scaled."""
        return Range(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Estimate:
    """What the whole job would take; hours are those of engines at work: no loading, no waiting."""

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
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({**asdict(self), "interval": LEVEL})

    def show(self) -> str:
        """The estimate as a table for people."""
        lines = [
            (
                "pilot",
                f"{self.pilot_samples:,} samples, {self.pilot_rows:,} rows, {self.pilot_errors:,} of them failed",
            ),
            ("samples", _shown(self.samples, "", 0)),
            ("rows", _shown(self.rows, "", 0)),
            ("tokens", _shown(self.tokens, "", 0)),
            ("acceptance length", f"{self.mean_acceptance_length:.2f}"),
            (f"{self.device}-hours", _shown(self.device_hours, "", 2)),
            ("wall clock", _shown(self.wall_hours, "h", 2)),
            ("output", _shown(self.output_bytes.times(1e-9), "GB", 3)),
        ]
        if self.cost is not None:
            lines.append(("cost", f"{_shown(self.cost, '', 2)}, at {self.price_per_hour:g} per {self.device}-hour"))
        text = [f"{label:<18}{value}" for label, value in lines]
        return "\n".join([*text, *(f"note: {note}" for note in self.notes)])


def estimate(
    pilot: Pilot,
    results: pa.Table,
    pool: EnginePool,
    threads: int | None,
    price_per_hour: float | None = None,
    seed: int = 0,
) -> Estimate:
    """Scale a pilot's results up to the whole source.

    Spans are drawn again with replacement (a bootstrap over clusters, because rows of one file are alike), the samples
    of a single span one by one. `threads` are the cores of an engine without a GPU.
    """
    sums = _sums(pilot, results)
    rng = np.random.default_rng(seed)
    groups = sums if len(pilot.tables) > 1 else _rows_alone(pilot, results)
    picks = rng.integers(0, len(groups), (NUM_RESAMPLES, len(groups)))
    drawn = groups[picks].sum(1)  # (resamples, columns)
    counts = np.asarray(pilot.span_rows, float)

    def scaled(column: int) -> Range:
        total = sums[:, column].sum() / sums[:, 0].sum()
        return _ranged(total, drawn[:, column] / np.maximum(drawn[:, 0], 1e-9), len(groups))

    if pilot.num_samples is not None:
        samples = Range(pilot.num_samples, pilot.num_samples, pilot.num_samples)
    else:
        again = counts[rng.integers(0, len(counts), (NUM_RESAMPLES, len(counts)))].mean(1)
        samples = _ranged(counts.mean() * pilot.num_spans, again * pilot.num_spans, len(counts))

    def whole(column: int) -> Range:
        each = scaled(column)
        return Range(samples.value * each.value, samples.low * each.low, samples.high * each.high)

    engine_hours = whole(2).times(1 / 3600)
    per_engine = pool.num_gpus or float(threads or 1)
    device_hours = engine_hours.times(per_engine)
    steps, accepted = _telemetry(results, "num_spec_steps"), _telemetry(results, "num_accepted_draft_tokens")
    return Estimate(
        pilot_samples=pilot.size,
        pilot_rows=results.num_rows,
        pilot_errors=sum(1 for code in results.column("error_type").to_pylist() if code),
        samples=samples,
        rows=whole(1),
        engine_hours=engine_hours,
        device="GPU" if pool.num_gpus else "core",
        device_hours=device_hours,
        wall_hours=engine_hours.times(1 / pool.max_size),
        output_bytes=whole(4).times(_written(results) / max(1.0, float(sums[:, 4].sum()))),
        tokens=whole(3),
        mean_acceptance_length=1 + accepted.sum() / steps.sum() if steps.sum() else 1.0,
        price_per_hour=price_per_hour,
        cost=None if price_per_hour is None else device_hours.times(price_per_hour),
        notes=_notes(pilot, results, pool),
    )


def _sums(pilot: Pilot, results: pa.Table) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Per span of the pilot: samples, rows, engine seconds, tokens, bytes in memory."""
    place = {
        key: span for span, table in enumerate(pilot.tables) for key in zip(*(_column(table, name) for name in _KEY))
    }
    sums = np.zeros((len(pilot.tables), 5))
    sums[:, 0] = [table.num_rows for table in pilot.tables]
    spans = np.asarray([place[key] for key in zip(*(_column(results, name) for name in _KEY))], int)
    for column, values in enumerate((np.ones(results.num_rows), _engine_s(results), _tokens(results)), start=1):
        np.add.at(sums[:, column], spans, values)
    for span in range(len(pilot.tables)):
        sums[span, 4] = results.take(np.flatnonzero(spans == span)).nbytes
    return sums


def _rows_alone(pilot: Pilot, results: pa.Table) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The same per sample, for a source of one span."""
    keys = list(zip(*(_column(pilot.tables[0], name) for name in _KEY)))
    alone = [Pilot((pilot.tables[0].slice(index, 1),), (1,), 1, 1) for index in range(len(keys))]
    of_sample: dict[Any, list[int]] = {key: [] for key in keys}
    for row, key in enumerate(zip(*(_column(results, name) for name in _KEY))):
        of_sample[key].append(row)
    return np.concatenate([_sums(one, results.take(of_sample[key])) for one, key in zip(alone, keys)])


_KEY = ("source", "row_index")


def _column(table: pa.Table, name: str) -> list[Any]:
    values: list[Any] = table.column(name).to_pylist()
    return values


def _telemetry(results: pa.Table, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray([row[name] for row in _column(results, "telemetry")], float)


def _engine_s(results: pa.Table) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Shares of the engine's time, which add up to it."""
    phases = ("prefill_ms", "draft_ms", "verify_ms")
    seconds: np.ndarray[Any, np.dtype[np.float64]] = np.zeros(results.num_rows)
    for phase in phases:
        seconds += _telemetry(results, phase) / 1000
    return seconds


def _tokens(results: pa.Table) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(_column(results, "num_generated_tokens"), float)


def _written(results: pa.Table) -> int:
    """Bytes of the rows as a Parquet file."""
    file = io.BytesIO()
    pq.write_table(results, file, compression="zstd")
    return file.tell()


def _ranged(value: float, drawn: np.ndarray[Any, np.dtype[np.float64]], num_drawn: int) -> Range:
    """The value between the quantiles of the drawn values, wider if `num_drawn` is small."""
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    wider = _small_sample(num_drawn)
    return Range(
        float(value), float(value - wider * max(0.0, value - low)), float(value + wider * max(0.0, high - value))
    )


def _small_sample(count: int) -> float:
    """By how much a bootstrap interval of `count` draws is too narrow: n for n - 1, the normal for Student's t.

    The quantile of t is that of Cornish and Fisher's expansion.
    """
    if count < 2:
        return 1.0
    z, freedom = 1.6449, count - 1
    student = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return math.sqrt(count / freedom) * student / z


def _notes(pilot: Pilot, results: pa.Table, pool: EnginePool) -> tuple[str, ...]:
    notes = ["loading models, waiting for input and the CPUs that decode are not counted"]
    if pool.slots == "auto":
        notes.append(
            "pool.slots is auto: a pilot of fewer than 4 rows for each slot leaves some empty, and looks slower"
        )
    elif results.num_rows < 4 * pool.slots:
        notes.append(
            f"{results.num_rows} rows do not fill {pool.slots} slots for long, and engines with empty slots are slower "
            f"for each row: a pilot of {4 * pool.slots} or more is closer"
        )
    methods = Counter(results.column("method").to_pylist())
    if len(methods) > 1:
        told = ", ".join(f"{name} {count:,}" for name, count in sorted(methods.items()))
        notes.append(
            f"its rows were decoded by several methods, which method.auto tries ({told}): the whole job keeps the best "
            "of them after its first rows, so that its hours are fewer"
        )
    if len(pilot.tables) < 5:
        notes.append(f"the source has few spans ({pilot.num_spans}): the interval tells little about unlike files")
    return tuple(notes)


def _shown(value: Range, unit: str, digits: int) -> str:
    text = f"{value.value:,.{digits}f}"
    if value.high - value.low > 1e-9 * abs(value.value):
        text += f" ({value.low:,.{digits}f} to {value.high:,.{digits}f})"
    return f"{text} {unit}".rstrip()


def _one(table: pa.Table) -> list[pa.Table]:
    return [table]


def _metadata(table: pa.Table) -> BlockMetadata:
    return BlockMetadata(num_rows=table.num_rows, size_bytes=table.nbytes, input_files=None, exec_stats=None)
