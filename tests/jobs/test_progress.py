"""Progress for people: a line's numbers, the bar, and what the client adds up."""

from __future__ import annotations

import io
import json
import random
from collections import deque

import numpy as np
import pyarrow as pa
import pytest

from actors.events import Events
from actors.results import Stamp
from pipeline.reports import progress
from pipeline.reports.pace import RowPace, duration, left_text
from pipeline.reports.progress import Counts, Look, bar, fitted, open_progress, percent, phase_line, progress_line
from pipeline.rows.schemas import result_schema
from tests import waiting
from tests.pipeline.reports.synthetic_job import result_row


def test_a_line_holds_rows_rates_times_and_errors() -> None:
    pace = RowPace()
    for second in range(5):
        pace.add(float(second), 10 * second + 10)
    counts = Counts(num_rows=50, num_errors=3, num_tokens=6000, num_steps=1000, num_accepted=2500)
    seen = Look(counts, {"broken_image": 1, "not_an_image": 2})
    assert progress_line(seen, 200, 4.0, pace) == (
        "50 of 200 rows (25 %), 12.5 rows/s (10.0 in the last minute), 1,500 tokens/s, acceptance length 3.50, "
        "4 s elapsed, 15 s left, 3 failed (2 not_an_image, 1 broken_image)"
    )


def test_a_line_without_total_or_drafts_leaves_them_out() -> None:
    seen = Look(Counts(num_rows=4, num_tokens=40, num_steps=40))
    assert progress_line(seen, None, 2.0) == "4 rows, 2.0 rows/s, 20 tokens/s, 2 s elapsed"


def test_the_time_that_is_left_has_a_range_that_holds_it() -> None:
    generator, held = np.random.default_rng(3), 0
    for _ in range(50):
        pace, rows = RowPace(), 0
        for second in range(1, 61):
            rows += int(generator.poisson(20))
            pace.add(float(second), rows)
        left = pace.left_s(rows + 20_000)
        assert left is not None
        held += left[0] <= 1000.0 <= left[1]
        assert left[0] < left[1]
    assert held >= 42


def test_the_pace_is_that_of_the_last_minute() -> None:
    pace = RowPace()
    for second in range(200):
        pace.add(float(second), min(second, 100) * 10)
    assert pace.rows_per_s == 0.0
    assert pace.left_s(5000) is None
    assert RowPace().rows_per_s is None
    slow = RowPace(deque([(0.0, 1), (1.0, 1), (2.0, 1), (3.0, 50)]))
    assert left_text(slow.left_s(100)).startswith("at least ")


def test_durations_have_two_units_at_most() -> None:
    texts = [duration(seconds) for seconds in (0.4, 59, 60, 200, 3599, 7500, 7200, 200_000)]
    assert texts == ["0 s", "59 s", "1 min", "3 min 20 s", "60 min", "2 h 5 min", "2 h", "2.3 days"]


def test_phases_are_those_of_most_engines_and_a_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert phase_line(()) == ""
    assert phase_line(("loading weights (1.2 GB)",)) == "loading weights (1.2 GB)"
    assert phase_line(("a", "b", "b")) == "b (2 of 3 engines)"
    monkeypatch.setenv("COLUMNS", "20")
    assert fitted("x" * 19) == "x" * 19
    assert fitted("x" * 40) == "x" * 18 + "…"


def test_all_rows_and_no_fewer_are_a_hundred_percent() -> None:
    assert [percent(rows, 3000) for rows in (0, 2999, 3000, 3001)] == [0.0, 99.9, 100.0, 100.0]


def test_the_bar_fills_with_the_rows_and_never_overflows() -> None:
    assert bar(50, 100) == "[" + "#" * 12 + "-" * 12 + "]"
    assert bar(300, 100) == "[" + "#" * 24 + "]"
    assert bar(5, None) == ""


def batch(num_rows: int, num_tokens: int, num_steps: int, num_accepted: int) -> pa.Table:
    """A result table with these sums, all of them in its first row."""
    rows = [result_row(number, 0.5, random.Random(number), "a/b") for number in range(num_rows)]
    for number, row in enumerate(rows):
        values = dict.fromkeys(("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"), 0)
        if number == 0:
            values = {"num_spec_steps": num_steps, "num_draft_tokens": 99, "num_accepted_draft_tokens": num_accepted}
        row["telemetry"] |= values
        row["num_generated_tokens"] = 0 if number else num_tokens
    return pa.Table.from_pylist(rows, schema=result_schema())


@pytest.mark.usefixtures("local_ray")
def test_a_terminal_gets_one_line_that_is_drawn_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(progress, "TERMINAL_INTERVAL_S", 0.01)
    stream = Terminal()
    monkeypatch.setenv("COLUMNS", "200")
    with open_progress(2, stream=stream) as client:
        client.phase("an engine", "loading weights (5 MB)")
        waiting.until(lambda: "loading weights (5 MB), " in stream.getvalue())
        client.phase("an engine", "")
        client(batch(2, 20, 10, 0))
    drawn = stream.getvalue()
    assert drawn.count("\n") == 1
    assert drawn.endswith("\n")
    assert f"\r\x1b[K[{'#' * 24}] 2 of 2 rows" in drawn


@pytest.mark.usefixtures("local_ray")
def test_a_job_whose_log_is_json_gets_its_progress_as_json() -> None:
    stream = io.StringIO()
    with progress.open_progress(10, stream=stream, events=Events(Stamp("j", 2, "f"), enabled=True)) as client:
        client(batch(1, 10, 3, 0))
        client(batch(3, 30, 5, 2))
        # The last look is taken when the block ends; both calls go to one actor, in order.
    (line,) = [json.loads(text) for text in stream.getvalue().splitlines()]
    assert (line["event"], line["job_id"], line["attempt"], line["total_rows"]) == ("progress", "j", 2, 10)
    assert (line["percent"], line["errors"], line["phase"]) == (40.0, {}, "")
    assert line["elapsed_s"] >= 0
    assert (line["num_rows"], line["num_tokens"], line["num_steps"], line["num_accepted"]) == (4, 40, 8, 2)
