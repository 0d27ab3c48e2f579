"""The cases of the planner's benchmark at small sizes, and their table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scale import planner
from benchmarks.tables.parts import PARTS
from tests.covering import by_tier


@pytest.mark.parametrize("number", by_tier(range(len(planner.CASES)), 0, 2))
def test_a_case_runs_and_has_a_row_in_the_table(tmp_path: Path, number: int) -> None:
    case = replace(planner.CASES[number], num_files=4)
    case = replace(case, rows_per_file=min(case.rows_per_file, 50))
    case.prepare(tmp_path, case)
    case_row = planner.run_case(case, tmp_path)
    assert (case_row["case"], case_row["num_files"], case_row["num_rows"]) == (case.name, 4, case.num_rows)
    assert case_row["wall_s"] > 0
    assert case_row["peak_rss_bytes"] > 1e7
    header, _, row = PARTS["scale_planner"].render({"planner": {"cases": [case_row]}}).splitlines()
    assert header.count("|") == row.count("|")
    assert f"| {case.name} | 4 | {case.num_rows} |" in row


@pytest.mark.slow
def test_a_case_is_measured_in_a_process_of_its_own() -> None:
    [row] = planner.measure_planner(planner.CASES[:1])["cases"]
    assert row["num_rows"] == 10**6
    assert row["planning_rss_bytes"] <= row["peak_rss_bytes"]


def test_the_target_size_is_that_of_the_largest_case() -> None:
    assert planner.GOAL.num_rows == 10**8
    assert planner.GOAL.num_files == 10**5
