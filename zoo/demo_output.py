"""Functions shared by the parts of the demo: reads the rows of a run and prints captions beside the truth."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.reports import summary
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir

Rows = dict[str, dict[str, Any]]
"""Rows of a run by sample id."""


def read_rows(output: Path, columns: Sequence[str]) -> Rows:
    """Read all rows of an output, those in errors/ included."""
    tables = summary.read_tables(OutputDir(str(output)), (DATA, ERRORS), ["sample_id", "error_type", *columns])
    return {row["sample_id"]: row for table in tables for row in table.to_pylist()}


def errors_of(found: Rows) -> dict[str, str]:
    """Return the error codes of the rows that have one."""
    return {sample_id: row["error_type"] for sample_id, row in found.items() if row["error_type"]}


def show_caption(truth: str, caption: str) -> None:
    """Print a caption below the truth."""
    for label, text in (("truth", truth), ("caption", caption)):
        print(textwrap.fill(text, 112, initial_indent=f"  {label:<8}", subsequent_indent=" " * 10))


def show_speed(measure: str, ratio: float, reason: Sequence[str]) -> None:
    """Print a speed-up; `reason` explains one below 1."""
    print(f"speed       {measure}: {ratio:.2f}")
    if ratio < 1:
        print(*(f"            {line}" for line in reason), sep="\n")
