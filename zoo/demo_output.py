"""Functions shared by the parts of the demo: reads and checks the rows of runs, prints captions beside the truth."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.reports.result_tables import list_tables, read_tables
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir

Rows = dict[str, dict[str, Any]]
"""Rows of a run by sample id."""


def read_rows(output: Path, columns: Sequence[str]) -> Rows:
    """Read all rows of an output, those in errors/ included."""
    directory = OutputDir(str(output))
    names = list_tables(directory, (DATA, ERRORS))
    tables = read_tables(directory, names, ["sample_id", "error_type", *columns])
    return {row["sample_id"]: row for table in tables for row in table.to_pylist()}


def check(noun: str, results: dict[str, Rows], wanted: dict[str, str]) -> list[str]:
    """Return the failures of runs by name: ids or error codes unlike `wanted`, and texts that differ between runs."""
    problems = []
    for name, found in results.items():
        wrong = sorted({key: row["error_type"] for key, row in found.items()}.items() ^ wanted.items())
        if wrong:
            problems.append(f"{noun}, {name}: rows are not as planned: {wrong[:4]}")
    texts = [{key: row.get("generated_text") for key, row in found.items()} for found in results.values()]
    if any(some != texts[0] for some in texts):
        problems.append(f"{noun}: results differ between the runs")
    return problems


def show_caption(truth: str, caption: str) -> None:
    """Print a caption below the truth."""
    for label, text in (("truth", truth), ("caption", caption)):
        print(textwrap.fill(text, 112, initial_indent=f"  {label:<8}", subsequent_indent=" " * 10))


def show_speed(measure: str, ratio: float, reason: Sequence[str]) -> None:
    """Print a speed-up; `reason` explains one below 1."""
    print(f"speed       {measure}: {ratio:.2f}")
    if ratio < 1:
        print(*(f"            {line}" for line in reason), sep="\n")
