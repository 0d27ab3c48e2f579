"""Tests whole jobs with a section `output`: valid rows, truncated rows, and equal texts with every drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow.parquet as pq
import pytest

from configs.load import load_job
from configs.schema import CaptionJobConfig
from jobs import caption
from zoo import demo

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs/jobs/demo_caption.yaml")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["drawing", "naïve photo", 'a "map"']},
        "caption": {"type": "string", "maxLength": 12},
        "box": {
            "type": "object",
            "properties": {"left": {"type": "integer", "minimum": 0, "maximum": 99}, "seen": {"type": "boolean"}},
            "required": ["left", "seen"],
            "additionalProperties": False,
        },
    },
    "required": ["kind", "caption", "box"],
    "additionalProperties": False,
}
NUM_ROWS = 8
METHODS = {
    "plain": ("method=plain",),
    "forced": ("method.forced_tokens=true",),
    "grammar": ("method={drafter: {kind: grammar}, tree: {kind: chain, length: 8}}", "model.drafter=null"),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> dict[str, dict[str, dict[str, Any]]]:
    """The result rows of one job per method by id, and of a job with few tokens per row."""
    folder = tmp_path_factory.mktemp("structured")
    (folder / "source").mkdir()
    # The first rows of the demo are sound images.
    demo.write_parquet(demo.draw_rows(demo.NUM_SCENES, demo.SEED)[:NUM_ROWS], folder / "source" / "shard")
    (folder / "schema.json").write_text(json.dumps(SCHEMA, ensure_ascii=False), encoding="utf-8")
    cases = {name: (*more, "sampling.max_new_tokens=90") for name, more in METHODS.items()}
    cases["short"] = (*METHODS["forced"], "sampling.max_new_tokens=20")
    rows_by_job = {}
    for name, more in cases.items():
        overrides = [
            f"source.path={folder}/source",
            f"sink.path={folder}/{name}",
            f"output.json_schema={folder}/schema.json",
        ]
        models = [f"model.{name}.path={ROOT}/zoo/checkpoints/caption_{name}" for name in ("target", "drafter")]
        assert caption.main(["--config", CONFIG, *overrides, *models, "job.progress=false", "pool.slots=4", *more]) == 0
        tables = [pq.read_table(path) for path in sorted((folder / name / "data").glob("*.parquet"))]
        rows_by_job[name] = {row["sample_id"]: row for table in tables for row in table.to_pylist()}
    return rows_by_job


@pytest.mark.parametrize("method", list(METHODS))
def test_rows_that_succeed_follow_the_schema(rows: dict[str, dict[str, dict[str, Any]]], method: str) -> None:
    statuses = [row["status"] for row in rows[method].values()]
    assert statuses.count("success") >= NUM_ROWS // 2, statuses
    for row in rows[method].values():
        if row["status"] == "success":
            jsonschema.validate(json.loads(row["generated_text"]), SCHEMA)


@pytest.mark.parametrize("method", ["forced", "grammar"])
def test_texts_equal_those_of_plain_decoding(rows: dict[str, dict[str, dict[str, Any]]], method: str) -> None:
    texts = {name: {key: row["token_ids"] for key, row in rows[name].items()} for name in ("plain", method)}
    assert texts[method] == texts["plain"]
    steps = [row["telemetry"]["num_spec_steps"] for row in rows[method].values()]
    assert sum(steps) < sum(row["telemetry"]["num_spec_steps"] for row in rows["plain"].values())


def test_rows_without_room_for_the_end_are_truncated(rows: dict[str, dict[str, dict[str, Any]]]) -> None:
    assert {(row["status"], row["finish_reason"]) for row in rows["short"].values()} == {("truncated", "length")}
    assert all(len(row["token_ids"]) == 20 for row in rows["short"].values())


def test_the_schema_belongs_to_the_content_of_a_job() -> None:
    path = str(ROOT / "configs/jobs/zoo_caption.yaml")
    free = load_job(CaptionJobConfig, path)
    first, other = (load_job(CaptionJobConfig, path, (f"output.regex={regex}",)) for regex in ("a", "b"))
    assert "output" not in free.content({})
    assert len({job.fingerprint({}) for job in (free, first, other)}) == 3
