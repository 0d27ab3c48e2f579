"""Progress for people: a line's numbers, the bar, and what the client adds up."""

from __future__ import annotations

import io
import json
import random

import pyarrow as pa
import pytest

from actors.events import Events
from actors.results import Stamp
from pipeline.reports import progress
from pipeline.reports.progress import Counts, bar, open_progress, progress_line
from pipeline.rows.schemas import result_schema
from tests.pipeline.reports.synthetic_job import result_row


def test_a_line_holds_rows_rates_and_the_acceptance_length() -> None:
    line = progress_line(Counts(num_rows=50, num_tokens=6000, num_steps=1000, num_accepted=2500), 200, 4.0)
    assert line == "50 of 200 rows, 12.5 rows/s, 1,500 tokens/s, acceptance length 3.50"


def test_a_line_without_total_or_drafts_leaves_them_out() -> None:
    assert (
        progress_line(Counts(num_rows=4, num_tokens=40, num_steps=40), None, 2.0) == "4 rows, 2.0 rows/s, 20 tokens/s"
    )


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
    with open_progress(2, stream=stream) as client:
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
    assert (line["num_rows"], line["num_tokens"], line["num_steps"], line["num_accepted"]) == (4, 40, 8, 2)
