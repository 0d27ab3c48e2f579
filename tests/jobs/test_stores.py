"""Whole jobs from stores to stores: the source on S3 or on the web, the output on S3; only the pair is a fake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import object_store
from tests.jobs.stand_ins import run_fake
from tests.pipeline.formats import web_server
from tests.pipeline.inputs import ASKED, INPUTS

BUCKET = "jobs"
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]
PIXEL_SUMS = {"red": 255 * 6 * 8, "blue": 255 * 2 * 4}


@pytest.fixture(scope="module")
def bucket() -> Any:
    object_store.running()
    return object_store.make_bucket(BUCKET)


@pytest.fixture(scope="module")
def web() -> Iterator[web_server.WebServer]:
    with web_server.running() as server:
        yield server


def texts(bucket: Any, folder: str) -> list[str]:
    """The fake pair's answers to the rows in `data/`, in order; `errors/` must be empty."""
    assert not bucket.exists(f"{BUCKET}/{folder}/errors")
    bucket.invalidate_cache()
    parts = [pq.read_table(pa.BufferReader(bucket.cat(path))) for path in bucket.glob(f"{BUCKET}/{folder}/data/*")]
    return pa.concat_tables(parts).sort_by("sample_id")["generated_text"].to_pylist()


@pytest.mark.parametrize("name", ["Parquet, image URIs", "WebDataset `.tar.zst`"])
def test_a_job_reads_from_s3_and_writes_to_s3(name: str, bucket: Any) -> None:
    given = INPUTS[name]
    bucket.pipe({f"{BUCKET}/{given.kind}/in/{path}": data for path, data in given.files().items()})
    source = {"kind": given.kind, "path": f"s3://{BUCKET}/{given.kind}/in", "columns": given.columns}
    run_fake(source, f"s3://{BUCKET}/{given.kind}/out", "{ask}")
    marks = zip(ASKED, PIXEL_SUMS.values(), strict=True)
    assert texts(bucket, f"{given.kind}/out") == [f"user: <image> {ask} / [{total}]" for ask, total in marks]
    assert bucket.exists(f"{BUCKET}/{given.kind}/out/_job/summary.json")


def test_transient_faults_of_a_store_do_not_change_the_output(bucket: Any) -> None:
    given = INPUTS["JSONL `.gz`"]
    bucket.pipe({f"{BUCKET}/faults/in/{path}": data for path, data in given.files().items()})
    source = {"kind": given.kind, "path": f"s3://{BUCKET}/faults/in", "columns": given.columns}
    store = object_store.running()
    refusals = [object_store.Fault("refuse", method, "faults/", 2) for method in ("GET", "HEAD", "PUT")]
    with store.failing(*refusals, object_store.Fault("cut", "GET", "red.png", 2)):
        run_fake(source, f"s3://{BUCKET}/faults/out", "{ask}")
        assert [fault.times for fault in store.faults] == [0] * 4
    assert len(texts(bucket, "faults/out")) == 2
