"""Result lines of OpenAI's batch format: one per request, in the order of the requests."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.load import ConfigError
from configs.schema import CaptionJobConfig
from pipeline.exports import openai_batch
from tests.pipeline.attempts import job, run
from tests.pipeline.exports.small_jobs import export, files_below, image_job


def request(custom_id: str) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": f"What is {custom_id}?"}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def batch_job(tmp_path: Path, files: dict[str, list[str]], **source: Any) -> CaptionJobConfig:
    for name, ids in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("".join(json.dumps(request(own)) + "\n" for own in ids))
    return job(
        {"kind": "jsonl", "path": str(tmp_path / "in"), "id_column": "custom_id", "span_max_rows": 3, **source},
        tmp_path / "out",
        prompt=None,
        columns={"messages": "body.messages"},
        sink={"rows_per_file": 4},
    )


def section(tmp_path: Path) -> dict[str, Any]:
    return {"kind": "openai_batch", "path": str(tmp_path / "new")}


def results(tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    return {name: list(map(json.loads, data.splitlines())) for name, data in files_below(tmp_path / "new").items()}


def test_every_request_has_one_result_line_in_the_order_of_the_requests(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(openai_batch, "ROWS_AT_ONCE", 7)
    files = {"a.jsonl": [f"r-{99 - number}" for number in range(25)], "s/b.jsonl": ["x", "y", "x"]}
    before = int(datetime.now(UTC).timestamp())
    run(batch_job(tmp_path, files), fails=lambda own: own in ("r-90", "y"))
    [report] = export(tmp_path / "out", section(tmp_path))
    assert (report.num_written, report.num_parts, report.num_refused) == (28, 2, 0)
    found = results(tmp_path)
    assert [line["custom_id"] for line in found["a.jsonl.results.jsonl"]] == files["a.jsonl"]
    assert [line["custom_id"] for line in found["s/b.jsonl.results.jsonl"]] == ["x", "y", "s/b.jsonl#2"]
    first, failed = found["a.jsonl.results.jsonl"][0], found["a.jsonl.results.jsonl"][9]
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    body = first["response"]["body"]
    assert before <= body.pop("created") <= datetime.now(UTC).timestamp()
    assert body.pop("id") == "chatcmpl-" + first["response"]["request_id"]
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "text of r-99"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
    assert failed == {
        "id": failed["id"],
        "custom_id": "r-90",
        "response": None,
        "error": {"code": "engine_died", "message": "about engine_died"},
    }
    [_, _, duplicate] = found["s/b.jsonl.results.jsonl"]
    assert duplicate["error"]["code"] == "duplicate_id"
    lines = [line for file in found.values() for line in file]
    assert len({line["id"] for line in lines}) == len(lines) == 28
    stats = {path: path.stat().st_mtime_ns for path in (tmp_path / "new").rglob("*.jsonl")}
    assert export(tmp_path / "out", section(tmp_path))[0].num_parts == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "new").rglob("*.jsonl")} == stats


def test_reasons_and_numbers_of_tokens_are_those_of_the_rows(tmp_path: Path) -> None:
    run(batch_job(tmp_path, {"a.jsonl": ["a", "b", "c"]}))
    [path] = (tmp_path / "out/data").glob("*.parquet")
    table = pq.read_table(path)
    changed = {
        "finish_reason": pa.array(["length", "stop_string", "stop"]),
        "num_input_tokens": pa.array([5, 6, None], pa.int64()),
        "num_generated_tokens": pa.array([2, 3, 4], pa.int64()),
    }
    for name, values in changed.items():
        table = table.set_column(table.schema.get_field_index(name), name, values)
    pq.write_table(table, path)
    export(tmp_path / "out", section(tmp_path))
    bodies = [line["response"]["body"] for line in results(tmp_path)["a.jsonl.results.jsonl"]]
    assert [body["choices"][0]["finish_reason"] for body in bodies] == ["length", "stop", "stop"]
    assert [list(body["usage"].values()) for body in bodies] == [[5, 2, 7], [6, 3, 9], [0, 4, 4]]


def test_a_file_is_written_when_all_of_its_requests_have_rows_and_again_when_rows_change(tmp_path: Path) -> None:
    config = batch_job(tmp_path, {"a.jsonl": ["a0", "a1"], "b.jsonl": [f"b{number}" for number in range(9)]})
    run(config, limit=3)
    export(tmp_path / "out", section(tmp_path))
    assert set(results(tmp_path)) == {"a.jsonl.results.jsonl"}
    run(config)
    export(tmp_path / "out", section(tmp_path))
    assert [line["custom_id"] for line in results(tmp_path)["b.jsonl.results.jsonl"]] == [f"b{n}" for n in range(9)]


def test_jobs_without_requests_are_refused(tmp_path: Path) -> None:
    image_job(tmp_path, ["a.png"])
    with pytest.raises(ConfigError, match=r"exports\.0: a file of results is written for each file of requests"):
        export(tmp_path / "out", section(tmp_path))
