"""Tests whole jobs with the shipped pair on real files: every row is accounted for, common readers open the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from configs.load import load_job
from configs.schema import CaptionJobConfig
from jobs import caption
from pipeline.rows.schemas import ERROR_CODES, SCHEMA_VERSION_KEY
from zoo import demo

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs/jobs/demo_caption.yaml")
BROKEN = {
    f"scene-{demo.NOT_AN_IMAGE:03}": "not_an_image",
    f"scene-{demo.TRUNCATED:03}": "broken_image",
    f"scene-{demo.NO_QUESTION:03}": "missing_column_value",
}
MAX_NEW_TOKENS = 6
pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's own 256 scenes: half in Parquet, half in tars, three rows broken."""
    folder = tmp_path_factory.mktemp("source")
    demo.write_sources(demo.draw_rows(demo.NUM_SCENES, demo.SEED), folder)
    return folder


def overrides_of(source: Path, kind: str, output: Path, *more: str) -> list[str]:
    pair = ROOT / "zoo/checkpoints"
    return [
        *demo.KINDS[kind],
        f"source.path={source}/{kind}",
        f"sink.path={output}",
        f"model.target.path={pair}/caption_target",
        f"model.drafter.path={pair}/caption_drafter",
        f"sampling.max_new_tokens={MAX_NEW_TOKENS}",
        "pool.slots=8",
        "job.progress=false",
        *more,
    ]


def run_job(source: Path, kind: str, output: Path, *more: str) -> None:
    assert caption.main(["--config", CONFIG, *overrides_of(source, kind, output, *more)]) == 0


@pytest.fixture(scope="module")
def output(source: Path, tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Path:
    """One run over the Parquet shards."""
    folder = tmp_path_factory.mktemp("outputs") / "parquet"
    run_job(source, "parquet", folder)
    return folder


def rows_of(output: Path, folder: str) -> list[dict[str, Any]]:
    """All rows of one folder, however many files there are, none included."""
    if not (output / folder).exists():
        return []
    return [row for path in sorted((output / folder).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def check_rows(output: Path, expected: set[str]) -> None:
    """Every id once, the broken rows in `errors` with their code, their kept column and no text, exact telemetry."""
    good, bad = rows_of(output, "data"), rows_of(output, "errors")
    broken = {key: code for key, code in BROKEN.items() if key in expected}
    assert {row["sample_id"]: row["error_type"] for row in bad} == broken
    assert len(bad) == len(broken)
    assert len(good) == len(expected) - len(broken)
    assert {row["sample_id"] for row in good} == expected - set(broken)
    for row in bad:
        assert row["error_type"] in ERROR_CODES
        assert (row["status"], row["generated_text"], row["num_generated_tokens"]) == ("error", "", 0)
        assert row["error_message"]
        assert row["truth"]
    for row in good:
        telemetry = row["telemetry"]
        steps, accepted = telemetry["num_spec_steps"], telemetry["num_accepted_draft_tokens"]
        assert row["num_generated_tokens"] == 1 + accepted + steps - telemetry["ended_inside_path"]
        assert sum(telemetry["acceptance_histogram"]) == steps
        kept = sum(depth * count for depth, count in enumerate(telemetry["acceptance_histogram"]))
        assert kept == accepted
        assert row["status"] == ("truncated" if row["finish_reason"] == "length" else "success")
        assert 1 <= row["num_generated_tokens"] <= MAX_NEW_TOKENS


def test_every_row_of_parquet_shards_is_in_data_or_errors_with_exact_telemetry(output: Path) -> None:
    check_rows(output, {f"scene-{index:03}" for index in range(128)})


@pytest.mark.slow
def test_every_row_of_tars_is_in_data_or_errors_with_two_actors(source: Path, tmp_path: Path) -> None:
    run_job(source, "webdataset", tmp_path / "out", "pool.min_size=2", "pool.max_size=2")
    check_rows(tmp_path / "out", {f"scene-{index:03}" for index in range(128, 256)})


def test_data_opens_as_it_is_in_pyarrow_pandas_and_duckdb(output: Path) -> None:
    data = output / "data"
    by_arrow = pq.read_table(data).num_rows
    frame = pd.read_parquet(data)
    [(by_duckdb, nulls)] = duckdb.sql(
        f"select count(*), count(*) filter (generated_text is null or error_type is null) from '{data}/*.parquet'"
    ).fetchall()
    assert by_arrow == len(frame) == by_duckdb == 126
    assert nulls == 0
    assert frame["sample_id"].is_unique
    schema = pq.read_schema(next(data.glob("*.parquet")))
    assert schema.metadata[SCHEMA_VERSION_KEY] == b"1"


def test_a_job_leaves_its_manifest_config_versions_attempt_and_summary(output: Path) -> None:
    job = output / "_job"
    record = json.loads((job / "attempts/000001.json").read_text())
    versions = json.loads((job / "versions.json").read_text())
    totals = json.loads((job / "summary.json").read_text())
    assert pyarrow.dataset.dataset(job / "manifest").count_rows() == 4
    assert record["job_id"] == f"caption-{record['config_fingerprint']}"
    assert versions["code_revision"] == record["code_revision"]
    assert set(versions["model_revisions"]) == {"target", "drafter"}
    assert (totals["num_samples"], totals["errors_by_type"]) == (128, {"not_an_image": 1, "broken_image": 1})
    again = load_job(CaptionJobConfig, job / "config.yaml")
    assert again.sampling.max_new_tokens == MAX_NEW_TOKENS
    assert again.fingerprint(versions["model_revisions"]) == record["config_fingerprint"]
    assert not list((output / "_job").glob("tmp/*"))


@pytest.mark.slow
def test_plain_decoding_gives_the_same_texts_and_no_drafts(source: Path, output: Path, tmp_path: Path) -> None:
    run_job(source, "parquet", tmp_path / "plain", "method.drafter.kind=none", "pool.slots=3")
    plain = {row["sample_id"]: row for row in rows_of(tmp_path / "plain", "data")}
    drafted = {row["sample_id"]: row for row in rows_of(output, "data")}
    assert {key: row["generated_text"] for key, row in plain.items()} == {
        key: row["generated_text"] for key, row in drafted.items()
    }
    assert {row["telemetry"]["num_draft_tokens"] for row in plain.values()} == {0}
    assert {row["drafter_id"] for row in plain.values()} == {""}
    assert {row["telemetry"]["num_draft_tokens"] > 0 for row in drafted.values()} == {True}


@pytest.mark.slow
def test_a_limited_run_takes_the_first_samples_and_shows_all_of_them_in_its_report(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", CONFIG, *overrides_of(source, "parquet", tmp_path / "out"), "--limit", "20"]
    assert caption.main(arguments) == 0
    rows = rows_of(tmp_path / "out", "data") + rows_of(tmp_path / "out", "errors")
    assert sorted(row["sample_id"] for row in rows) == [f"scene-{index:03}" for index in range(20)]
    page = (tmp_path / "out/_job/report.html").read_text()
    assert page.count("<article ") == 20
    assert page.count("data:image/jpeg") == 19
    gallery = page[page.index('id="gallery"') :]
    assert gallery.index("scene-003") < gallery.index("scene-017") < gallery.index("scene-019")
    assert "not_an_image" in page
    assert '<span class="badge ok">done</span>' in page
    output = capsys.readouterr().out
    assert "rows/s" in output
    assert "acceptance length" in output
    assert "run it again  python -m jobs.caption --config" in output
    assert "--limit 20 sink.path=NEW" in output


def test_a_second_run_finds_nothing_to_do_and_another_config_is_refused(
    source: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", CONFIG, *overrides_of(source, "parquet", output)]
    assert caption.main(arguments) == 0
    assert "nothing is missing in" in capsys.readouterr().out
    assert caption.main([*arguments, "sampling.max_new_tokens=5"]) == 2
    assert "sampling.max_new_tokens: 6 then, 5 now" in capsys.readouterr().err


@pytest.mark.slow
def test_a_limited_run_is_resumed_and_keeps_its_rows(
    source: Path, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", CONFIG, *overrides_of(source, "parquet", tmp_path / "out")]
    assert caption.main([*arguments, "--limit", "60"]) == 0
    assert caption.main(arguments) == 0
    assert "resuming: 60 samples are done, 68 missing, 0 files set aside" in capsys.readouterr().out
    at_once = {row["sample_id"]: row for row in rows_of(output, "data")}
    rows = {row["sample_id"]: row for row in rows_of(tmp_path / "out", "data")}
    assert len(rows_of(tmp_path / "out", "data")) == len(at_once)
    assert {key: row["generated_text"] for key, row in rows.items()} == {
        key: row["generated_text"] for key, row in at_once.items()
    }
    assert {row["attempt"] for row in rows.values()} == {1, 2}
    assert json.loads((tmp_path / "out/_job/summary.json").read_text())["num_samples"] == 128


def test_results_are_gathered_into_few_files(output: Path) -> None:
    assert len(list((output / "data").glob("*.parquet"))) == 1
    table = pq.read_table(output / "data")
    assert pc.count_distinct(table["job_id"]).as_py() == 1
