"""Renders a comparison as a table for the terminal, CSV, Markdown and JSON."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict

from pipeline.compare.figures import Comparison, MethodFigures, times
from pipeline.pilot.verdict import finite
from pipeline.reports.intervals import Interval

HEAD = ("method", "rows/s", "speed over plain", "acceptance length", "equal to plain", "loss", "mode")
NOTE = (
    "rows/s are rows per second of engine time, without loading and waiting; intervals of 95 % over pairs of blocks of "
    "{block_rows} rows of one run each; loss is the mean edit distance from plain decoding over the longer output"
)


def cells(method: MethodFigures) -> tuple[str, ...]:
    """Return the cells of a method's row as text."""
    return (
        method.name,
        f"{method.rows_per_s:,.3g}",
        times(method.speedup),
        _figure(method.acceptance_length),
        f"{100 * method.equal:.1f} %",
        _figure(method.loss, 3),
        "lossless" if method.lossless else "lossy",
    )


def _figure(interval: Interval, digits: int = 2) -> str:
    if interval.low == interval.high or abs(interval.low) == float("inf"):
        return f"{interval.value:.{digits}f}"
    return f"{interval.value:.{digits}f} ({max(0.0, interval.low):.{digits}f} to {interval.high:.{digits}f})"


def note(comparison: Comparison) -> str:
    """Return what the figures mean, and on how many rows they are."""
    left_out = comparison.num_left_out
    rows = f"{comparison.num_rows:,} rows that all methods decoded"
    rows += f" ({left_out:,} failed or are missing with some method)" if left_out else ""
    return f"{rows}; {NOTE.format(block_rows=comparison.block_rows)}"


def as_terminal(comparison: Comparison) -> str:
    """Return a table with aligned columns, the recommendation, and the meaning of the figures."""
    rows = [HEAD, *map(cells, comparison.methods)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    advice = f"recommended: {comparison.recommended}: {comparison.reason}"
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], "", advice, note(comparison)])


def as_markdown(comparison: Comparison) -> str:
    """Return a Markdown document."""
    lines = ["# Comparison of methods", "", "| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(cell.replace("|", r"\|") for cell in cells(row)) + " |" for row in comparison.methods]
    advice = f"**Recommended: {comparison.recommended}.** {comparison.reason[:1].upper()}{comparison.reason[1:]}."
    return "\n".join([*lines, "", advice, "", f"{note(comparison)}.", ""])


def as_csv(comparison: Comparison) -> str:
    """Return one line per method, with the ends of intervals in columns of their own."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    ranged = ("speedup", "acceptance_length", "loss")
    single = ("name", "lossless", "num_rows", "rows_per_s", "tokens_per_s", "equal")
    writer.writerow([*single, *(f"{name}{end}" for name in ranged for end in ("", "_low", "_high"))])
    for method in comparison.methods:
        values = [getattr(method, name) for name in single]
        for name in ranged:
            interval: Interval = getattr(method, name)
            values += [interval.value, interval.low, interval.high]
        writer.writerow(values)
    return file.getvalue()


def as_json(comparison: Comparison) -> str:
    """Return all figures; infinite ends of intervals are null."""
    return json.dumps(finite(asdict(comparison)), indent=2) + "\n"
