"""An output on an object store with refused, truncated and misreported requests holds every row exactly once."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from configs.schema import CaptionJobConfig
from jobs import check
from pipeline.storage import retries
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.retries import RetryPolicy
from tests.object_store import S3, Fault, make_bucket
from tests.pipeline.attempts import end, job, make_rows, plan_of, run, save, start

pytestmark = pytest.mark.slow

BUCKET = "resumed"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "DEFAULT_POLICY", RetryPolicy(4, 0.0))


@pytest.fixture
def config(s3: S3, tmp_path: Path) -> CaptionJobConfig:
    make_bucket(BUCKET)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("".join(f"line {row}\n" for row in range(30)))
    source = {"kind": "text", "path": str(tmp_path / "in"), "span_max_rows": 8}
    return job(source, f"s3://{BUCKET}/out", sink={"rows_per_file": 12})


def ids(output: OutputDir, folder: str = "data") -> list[str]:
    sample_ids = []
    for name in output.list_files(folder):
        with output.filesystem.open(output.path(f"{folder}/{name}"), "rb") as file:
            sample_ids += pq.read_table(file)["sample_id"].to_pylist()
    return sample_ids


EVERY = sorted(f"a.txt#{row}" for row in range(30))


@pytest.mark.parametrize("kind", ["refuse", "done"])
def test_puts_that_are_refused_or_carried_out_and_refused_leave_every_row_once(
    s3: S3, config: CaptionJobConfig, kind: str
) -> None:
    faults = [Fault(kind, "PUT", "/data/part", times=3), Fault(kind, "PUT", "/spool/", times=3)]
    with s3.failing(*faults, Fault("refuse", "GET", "/spool/", times=2), Fault("refuse", "HEAD", "", times=2)):
        run(config)
    output = OutputDir(config.sink.path)
    assert sorted(ids(output)) == EVERY
    assert output.list_files("_job/spool") == []


def test_a_job_whose_bucket_fails_in_the_middle_resumes(s3: S3, config: CaptionJobConfig) -> None:
    plan, begun = start(plan_of(config))
    batches = make_rows(plan, 1)
    begun.publisher.spool(0, batches[:2])
    with s3.failing(Fault("refuse", "PUT", "", times=10_000)), pytest.raises(OSError, match="try later"):
        save(plan, begun, batches[2:])
    assert ids(OutputDir(config.sink.path)) == []
    run(config, fails=lambda own: own == "a.txt#29")
    output = OutputDir(config.sink.path)
    assert sorted(ids(output) + ids(output, "errors")) == EVERY


def test_a_job_whose_store_fails_during_finalize_resumes(s3: S3, config: CaptionJobConfig) -> None:
    plan, begun = start(plan_of(config))
    save(plan, begun, make_rows(plan, 1))
    with s3.failing(Fault("cut", "GET", "/data/part", times=10_000)), pytest.raises(Exception, match=r"\S"):
        end(plan, begun)
    run(config)
    assert sorted(ids(OutputDir(config.sink.path))) == EVERY


def test_a_torn_file_on_a_store_is_copied_aside_and_its_number_is_not_reused(s3: S3, config: CaptionJobConfig) -> None:
    run(config)
    output = OutputDir(config.sink.path)
    output.write_bytes("data/part-000001.parquet", b"torn")
    output.write_bytes("data/notes.txt", b"mine")
    run(config)
    assert sorted(ids(OutputDir(config.sink.path))) == EVERY  # reads part 1 as well, which is empty
    assert "part-000001.parquet" in output.list_files("data")
    assert "notes.txt" not in output.list_files("data")
    aside = output.list_files("_job/aside/data")
    assert [name.rpartition(".")[0] for name in aside] == ["notes.txt", "part-000001.parquet"]
    assert output.read_bytes(f"_job/aside/data/{aside[1]}") == b"torn"


def test_the_check_reads_an_object_store(s3: S3, config: CaptionJobConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run(config)
    output = OutputDir(config.sink.path)
    output.write_json("_job/config.yaml", config.resolved())
    assert check.main([config.sink.path]) == check.COMPLETE
    assert "rows      30 in data/, 0 in errors/" in capsys.readouterr().out
    output.filesystem.rm_file(output.path("data/part-000001.parquet"))
    assert check.main([config.sink.path]) == check.INCOMPLETE
