"""Events are bounded JSON lines without credentials, and never raise."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pytest

from actors.events import MAX_TEXT_CHARS, Events
from actors.results import Stamp

EVENTS = Events(Stamp("shards-1", 3, "f"), enabled=True)


def emitted_line(**values: Any) -> dict[str, Any]:
    stream = io.StringIO()
    EVENTS.emit("row_failed", "warning", stream, **values)
    assert stream.getvalue().count("\n") == 1
    line: dict[str, Any] = json.loads(stream.getvalue())
    return line


def test_a_line_has_time_event_job_attempt_and_sample() -> None:
    line = emitted_line(sample_id="a.tar#7", code="broken_image", message="two\nlines, “quoted”")
    assert (line["job_id"], line["attempt"], line["sample_id"]) == ("shards-1", 3, "a.tar#7")
    assert (line["event"], line["level"], line["code"]) == ("row_failed", "warning", "broken_image")
    assert line["message"] == "two\nlines, “quoted”"
    assert line["time"].endswith("+00:00")


@pytest.mark.parametrize(
    ("message", "masked"),
    [
        ("cannot read s3://me:hush@bucket/x", "cannot read s3://***@bucket/x"),
        ("GET https://h/x?a=1&X-Amz-Signature=hush&b=2 failed", "GET https://h/x?a=1&X-Amz-Signature=***&b=2 failed"),
        ("https://h/x?sas_token=hush", "https://h/x?sas_token=***"),
        ("mail me@example.com about https://h/x?page=2", "mail me@example.com about https://h/x?page=2"),
    ],
)
def test_credentials_in_urls_are_masked_and_nothing_else(message: str, masked: str) -> None:
    assert emitted_line(message=message)["message"] == masked


def test_long_texts_are_cut() -> None:
    assert len(emitted_line(message="x" * 10_000)["message"]) == MAX_TEXT_CHARS


def test_values_that_json_cannot_encode_are_written_as_text() -> None:
    assert emitted_line(error=ValueError("odd"), number=3)["error"] == "odd"


def test_a_closed_stream_raises_no_error() -> None:
    stream = io.StringIO()
    stream.close()
    EVENTS.emit("batch_done", stream=stream)


def test_a_batch_is_one_line_and_one_for_each_row_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.table(
        {
            "sample_id": ["a", "b", "c"],
            "error_type": ["", "broken_image", ""],
            "error_message": ["", "cut short", ""],
            "num_generated_tokens": [5, 0, 7],
        }
    )
    EVENTS.batch(table)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["row_failed", "batch_done"]
    assert (lines[0]["sample_id"], lines[0]["code"], lines[0]["message"]) == ("b", "broken_image", "cut short")
    assert (lines[1]["num_rows"], lines[1]["num_tokens"]) == (3, 12)


def test_a_job_that_does_not_ask_for_them_gets_none(capsys: pytest.CaptureFixture[str]) -> None:
    Events(Stamp("j", 1, "f"), enabled=False).emit("job_began")
    assert capsys.readouterr().err == ""
