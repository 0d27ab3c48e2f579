"""Tests the renderer of tables, and that archived tables name the commit and the command that measured them."""

from __future__ import annotations

import pytest

from benchmarks.harness.markdown import Cells, Table
from benchmarks.tables.archive import Archived


def test_cells_render_shares_ranges_verdicts_and_withheld_figures() -> None:
    speed = {"median": 2.0, "low": 1.5, "high": 2.25}
    verdict = {"num_sequences": 4, "num_equal": 3, "num_different": 1}
    assert Cells().format("{0:.1%} · {1:.1f} · {2} · {3:.1f}", 0.125, speed, verdict, None) == (
        "12.5 % · 2.0 (1.5–2.2) · 75.0 %, **1 beyond rounding** · withheld"
    )


def test_rows_are_found_by_a_path_whose_keys_are_columns() -> None:
    made = Table(
        "pair | place | value", "{0} | {1} | {twice:.1f}", "pairs.*.rows.*", lambda row: {"twice": 2 * row["x"]}
    )
    results = {"pairs": {"a": {"rows": [{"x": 1}, {"x": 2}]}, "b": {"rows": [{"x": 4}]}}}
    assert made(results).splitlines()[2:] == ["| a | 0 | 2.0 |", "| a | 1 | 4.0 |", "| b | 0 | 8.0 |"]


def test_a_missing_field_is_an_error_unless_the_table_allows_it() -> None:
    results = {"rows": [{"x": 1}]}
    with pytest.raises(KeyError, match="y"):
        Table("x | y", "{x} | {y}")(results)
    assert Table("x | y", "{x} | {y}", absent="–")(results).endswith("| 1 | – |")


def test_an_archived_table_names_its_commit_and_its_command() -> None:
    (make,) = Archived("abc123", "python -m gone", {"t": Table("x", "{x}")}).renders().values()
    assert make({"rows": [{"x": 1}]}).splitlines()[-1] == (
        "Measured at commit `abc123` by `python -m gone`, which was deleted since."
    )
