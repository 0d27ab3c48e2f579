"""Tests how the benchmark of processors splits the waits of a run."""

from __future__ import annotations

import pytest

from actors.serving.engine_thread import Waits
from benchmarks.processors.waits import START_S, rates_and_waits


def test_waits_and_rates_of_the_start_are_told_from_later_ones() -> None:
    reports = [Waits(6.0, 0.0, START_S / 2), Waits(8.0, 0.0, START_S), Waits(8.0, 0.0, 60.0), Waits(9.0, 0.0, 120.0)]
    assert rates_and_waits(reports, 50) == {
        "total_s": 120.0,
        "actors_waited_share": 0.075,
        "later_rows_per_s": 1.0,
        "later_actors_waited_share": 0.01,
    }


def test_a_run_that_ends_with_its_start_is_an_error() -> None:
    for reports in ([Waits(1.0, 0.0, 4.0)], [Waits(1.0, 0.0, 4.0), Waits(2.0, 0.0, START_S)]):
        with pytest.raises(RuntimeError, match="needs more rows"):
            rates_and_waits(reports, 50)
