"""Computes the figures of methods from their outputs, over the rows that all of them have decoded.

Speed is rows over engine time, the sum of the times that rows report: loading, waiting and other attempts do not count.
Rows that are decoded together share their steps, so intervals resample blocks of neighbouring rows and not rows; blocks
of two methods are paired.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.losses import relative_distance
from pipeline.compare.methods import PLAIN
from pipeline.output.recorded_job import RecordedJob
from pipeline.reports.intervals import Interval, mean_interval, paired_ratio

MIN_BLOCKS = 8
MAX_BLOCK_ROWS = 64
SEED = 0
Key = tuple[Any, ...]
_KEY = ("source", "row_index", "clip_index", "prompt_index", "replica", "sample_id")
_COLUMNS = (*_KEY, "generated_text", "token_ids", "codes", "num_generated_tokens", "verify_mode", "telemetry")


@dataclass(frozen=True)
class ComparedRow:
    """What a comparison needs of one row; `tokens` are None if the output has none."""

    engine_s: float
    num_tokens: int
    num_steps: int
    num_accepted: int
    histogram: tuple[int, ...]
    text: str
    tokens: tuple[int, ...] | None
    lossless: bool


@dataclass(frozen=True)
class MethodFigures:
    """Figures of one method over the common rows; those beside plain decoding have paired intervals.

    `equal` is the share of rows whose output is that of plain decoding; `loss` the mean edit distance from it, over the
    longer output's length. `by_position` has the share of steps that accepted each position.
    """

    name: str
    lossless: bool
    num_rows: int
    rows_per_s: float
    tokens_per_s: float
    speedup: Interval
    acceptance_length: Interval
    equal: float
    loss: Interval
    by_position: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """The figures of all methods, plain decoding first; `num_left_out` rows failed or are missing with some method."""

    methods: tuple[MethodFigures, ...]
    num_rows: int
    num_left_out: int
    block_rows: int
    recommended: str
    reason: str


def read_rows(job: RecordedJob[Any], dotted: str) -> dict[Key, ComparedRow]:
    """Read the rows of an output by their place in the source; ConfigError if a file is damaged."""
    rows: dict[Key, ComparedRow] = {}
    for table in job.results(_COLUMNS, dotted):
        for row in table.to_pylist():
            rows[tuple(row.get(name) for name in _KEY)] = _row(row)
    return rows


def _row(row: Mapping[str, Any]) -> ComparedRow:
    telemetry = row["telemetry"]
    phases = (telemetry[name] or 0.0 for name in ("prefill_ms", "draft_ms", "verify_ms"))
    tokens = row.get("token_ids") if row.get("codes") is None else row["codes"]
    return ComparedRow(
        sum(phases) / 1000,
        row["num_generated_tokens"] or 0,
        telemetry["num_spec_steps"] or 0,
        telemetry["num_accepted_draft_tokens"] or 0,
        tuple(telemetry["acceptance_histogram"] or ()),
        row.get("generated_text") or "",
        None if tokens is None else tuple(tokens),
        row["verify_mode"] == "lossless",
    )


def compare(outputs: Mapping[str, Mapping[Key, ComparedRow]], slots: int) -> Comparison:
    """Compare outputs by the method's name, of which one is `plain`. Raises ValueError if they share no row."""
    common = sorted(set.intersection(*(set(rows) for rows in outputs.values())), key=_order)
    if not common:
        raise ValueError("no row was decoded by all methods")
    block_rows = max(1, min(slots, MAX_BLOCK_ROWS, len(common) // MIN_BLOCKS))
    plain = [outputs[PLAIN][key] for key in common]
    methods = tuple(_figures(name, [rows[key] for key in common], plain, block_rows) for name, rows in outputs.items())
    recommended, reason = recommend(methods)
    num_all = len(set().union(*outputs.values()))
    return Comparison(methods, len(common), num_all - len(common), block_rows, recommended, reason)


def _order(key: Key) -> tuple[Any, ...]:
    source, *numbers, sample_id = key
    return (source, *(-1 if number is None else number for number in numbers), sample_id)


def _figures(name: str, rows: Sequence[ComparedRow], plain: Sequence[ComparedRow], block_rows: int) -> MethodFigures:
    seconds, plain_s = (_blocks([row.engine_s for row in some], block_rows) for some in (rows, plain))
    steps = _blocks([float(row.num_steps) for row in rows], block_rows)
    decoded = _blocks([float(row.num_steps + row.num_accepted) for row in rows], block_rows)
    losses = [loss_of(row, other) for row, other in zip(rows, plain, strict=True)]
    total_s = max(sum(row.engine_s for row in rows), 1e-12)
    is_same = name == PLAIN
    return MethodFigures(
        name,
        all(row.lossless for row in rows),
        len(rows),
        len(rows) / total_s,
        sum(row.num_tokens for row in rows) / total_s,
        Interval(1.0, 1.0, 1.0) if is_same or not seconds.sum() or not plain_s.sum() else _ratio(plain_s, seconds),
        _ratio(decoded, steps) if steps.sum() else Interval(1.0, 1.0, 1.0),
        sum(_equal(row, other) for row, other in zip(rows, plain, strict=True)) / len(rows),
        Interval(0.0, 0.0, 0.0) if not any(losses) else mean_interval(losses),
        _by_position(rows),
    )


def _ratio(ours: NDArray[np.float64], others: NDArray[np.float64]) -> Interval:
    return paired_ratio(ours.tolist(), others.tolist(), seed=SEED)


def _blocks(values: Sequence[float], block_rows: int) -> NDArray[np.float64]:
    """Return the sums of blocks of neighbouring rows; the last, shorter block is joined with the one before."""
    starts = np.arange(0, max(1, len(values) - block_rows + 1), block_rows)
    return np.add.reduceat(np.asarray(values, float), starts)


def _equal(row: ComparedRow, other: ComparedRow) -> bool:
    if row.tokens is None or other.tokens is None:
        return row.text == other.text
    return row.tokens == other.tokens


def loss_of(row: ComparedRow, plain: ComparedRow) -> float:
    """Return the edit distance from the plain output over the longer length, by tokens if both have them."""
    if row.tokens is None or plain.tokens is None:
        return relative_distance(row.text, plain.text)
    return relative_distance(row.tokens, plain.tokens)


def _by_position(rows: Sequence[ComparedRow]) -> tuple[float, ...]:
    """Return the share of steps that accepted at least 1, 2, … drafts."""
    counts = [sum(entries) for entries in itertools.zip_longest(*(row.histogram for row in rows), fillvalue=0)]
    total = sum(counts)
    return tuple(sum(counts[depth:]) / total for depth in range(1, len(counts))) if total else ()


def recommend(methods: Sequence[MethodFigures]) -> tuple[str, str]:
    """Return the fastest lossless method whose whole interval is above plain decoding, else `plain`, and the reason;
    a lossy one that is faster is named with its loss."""
    others = [method for method in methods if method.name != PLAIN]
    lossless = [method for method in others if method.lossless]
    best = max(lossless, key=lambda method: method.speedup.value, default=None)
    if best is not None and best.speedup.is_above_one:
        chosen, reason = best.name, f"the fastest lossless method: {times(best.speedup)} of plain decoding"
    elif best is not None and best.speedup.is_below_one:
        chosen, reason = PLAIN, f"no lossless method is faster: {best.name} reaches {times(best.speedup)}"
    elif best is not None:
        chosen = PLAIN
        reason = f"no lossless method is measurably faster on these rows: {best.name} reaches {times(best.speedup)}"
    else:
        chosen, reason = PLAIN, "no other lossless method was compared"
    least = best.speedup.value if best is not None and chosen != PLAIN else 1.0
    faster = [method for method in others if not method.lossless and method.speedup.low > least]
    if faster:
        lossy = max(faster, key=lambda method: method.speedup.value)
        reason += (
            f"; {lossy.name} reaches {times(lossy.speedup)}, but changes outputs: {100 * lossy.loss.value:.1f} % edit "
            f"distance, {100 * lossy.equal:.0f} % of rows equal"
        )
    return chosen, reason


def times(interval: Interval) -> str:
    """Return a ratio with its interval, such as `1.83x (1.71 to 1.95)`."""
    if not np.isfinite([interval.low, interval.high]).all() or interval.low == interval.high:
        return f"{interval.value:.2f}x"
    return f"{interval.value:.2f}x ({interval.low:.2f} to {interval.high:.2f})"
