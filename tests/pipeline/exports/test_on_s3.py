"""Exports from and to an object store whose requests are refused, or carried out and reported as refused."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from configs.load import ConfigError
from pipeline.storage import retries
from pipeline.storage.retries import RetryPolicy
from tests.object_store import S3, Fault, make_bucket
from tests.pipeline.attempts import job, run
from tests.pipeline.exports.small_jobs import RED, export, some_tars
from tests.pipeline.exports.test_webdataset import contents, with_captions

pytestmark = pytest.mark.slow

BUCKET = "exported"
NAMES = ["a.png", "s/b.png", "s/c.png"]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "DEFAULT_POLICY", RetryPolicy(3, 0.0))


@pytest.fixture
def bucket(s3: S3):
    return make_bucket(BUCKET)


def finished(bucket, tmp_path: Path, files: dict[str, bytes], kind: str = "images") -> str:
    for name, data in files.items():
        bucket.pipe_file(f"{BUCKET}/in/{name}", data)
    output = f"s3://{BUCKET}/out"
    run(job({"kind": kind, "path": f"s3://{BUCKET}/in"}, output))
    return output


def stored(bucket, folder: str) -> dict[str, bytes]:
    bucket.invalidate_cache()
    return {
        path.removeprefix(f"{BUCKET}/{folder}/"): bucket.cat_file(path) for path in bucket.find(f"{BUCKET}/{folder}")
    }


TEXTS = {f"{name[:-4]}.txt": f"text of {name}#0\n".encode() for name in NAMES}


@pytest.mark.parametrize("policy", ["skip", "overwrite", "append"])
@pytest.mark.parametrize("fault", ["refuse", "done"])
def test_sidecars_are_put_once_whatever_the_store_reports(s3: S3, bucket, tmp_path, policy, fault) -> None:
    output = finished(bucket, tmp_path, dict.fromkeys(NAMES, RED))
    bucket.pipe_file(f"{BUCKET}/in/a.txt", b"mine")
    section = {"kind": "sidecars", "existing": policy}
    with s3.failing(Fault(fault, "PUT", "/s/b.txt", times=2), Fault(fault, "PUT", "/_job/exports", times=2)):
        export(output, section)
    mine = {"skip": b"mine", "overwrite": TEXTS["a.txt"], "append": b"mine\n" + TEXTS["a.txt"]}[policy]
    expected = {**dict.fromkeys(NAMES, RED), **TEXTS, "a.txt": mine}
    assert stored(bucket, "in") == expected
    assert export(output, section)[0].num_parts == 0
    bucket.rm(bucket.glob(f"{BUCKET}/out/_job/exports/*/done/*"))
    export(output, section)
    assert stored(bucket, "in") == expected


def test_a_store_that_fails_for_long_ends_the_export_and_the_next_one_resumes(s3: S3, bucket, tmp_path) -> None:
    output = finished(bucket, tmp_path, dict.fromkeys(NAMES, RED))
    section = {"kind": "sidecars", "existing": "append"}
    with s3.failing(Fault("refuse", "PUT", "/s/b.txt", times=100)), pytest.raises(OSError):
        export(output, section)
    export(output, section)
    assert stored(bucket, "in") == {**dict.fromkeys(NAMES, RED), **TEXTS}


def test_a_store_without_conditional_put_is_refused_unless_files_are_replaced(s3: S3, bucket, tmp_path) -> None:
    output = finished(bucket, tmp_path, dict.fromkeys(NAMES, RED))
    with s3.without_conditional_put():
        with pytest.raises(ConfigError, match=r"source\.path: .* has no conditional put"):
            export(output, {"kind": "sidecars"})
        assert stored(bucket, "in") == dict.fromkeys(NAMES, RED)
        export(output, {"kind": "sidecars", "existing": "overwrite"})
    assert stored(bucket, "in") == {**dict.fromkeys(NAMES, RED), **TEXTS}


def test_tars_and_datasets_are_put_whole(s3: S3, bucket, tmp_path) -> None:
    tars = some_tars()
    output = finished(bucket, tmp_path, tars, "webdataset")
    sections = (
        {"kind": "webdataset", "path": f"s3://{BUCKET}/new"},
        {"kind": "dataset", "path": f"s3://{BUCKET}/set", "images": "first"},
    )
    with s3.failing(Fault("done", "PUT", "/new/a.tar"), Fault("refuse", "PUT", "/set/data", times=2)):
        export(output, *sections)
    new = stored(bucket, "new")
    assert {name: contents(data) for name, data in new.items()} == {
        name: with_captions(contents(data), name) for name, data in tars.items()
    }
    rows = [
        row
        for name, data in stored(bucket, "set").items()
        if name.endswith(".parquet")
        for row in pq.read_table(io.BytesIO(data)).to_pylist()
    ]
    assert len({row["sample_id"] for row in rows}) == len(rows) == 10
    assert [report.num_parts for report in export(output, *sections)] == [0, 0]
