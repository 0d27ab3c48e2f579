"""Reads and writes against a real S3 server with refused, truncated, stalled and misreported requests."""

from __future__ import annotations

import io
import json
import logging
import re
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from configs.load import ConfigError
from configs.schema import PromptConfig
from configs.source import FetchConfig, SourceColumnsConfig, SourceConfig
from pipeline.formats.uris import Fetcher
from pipeline.manifest import datasource, freezing
from pipeline.media import image_decoding
from pipeline.prompts.row_options import PromptOptions
from pipeline.storage import access, retries
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.retries import RetryPolicy
from tests.object_store import ACCESS_KEY, S3, SECRET_KEY, Fault, make_bucket
from tests.pipeline.formats.shards import encode, outcomes, read_all, tar_bytes

pytestmark = pytest.mark.slow

BUCKET = "shards"
TEXT = "".join(f"line {number}\n" for number in range(100)).encode()


@pytest.fixture(scope="module")
def bucket(s3: S3):
    return make_bucket(BUCKET)


@pytest.fixture(autouse=True)
def _no_waiting_and_no_retries_but_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs tries cut and stalled reads again by itself; what is tested here is what comes after that."""
    monkeypatch.setattr(retries, "DEFAULT_POLICY", RetryPolicy(4, 0.0))
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)


def put(bucket, name: str, data: bytes) -> str:
    bucket.pipe_file(f"{BUCKET}/{name}", data)
    bucket.invalidate_cache()
    return f"s3://{BUCKET}/{name}"


def parquet_bytes(columns: dict) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def text_source(path: str, **options) -> SourceConfig:
    return SourceConfig(kind="text", path=path, **options)


def prompts_of(table: pa.Table) -> list[str]:
    return [json.loads(fields)["text"] for fields in table["fields"].to_pylist()]


# --- listing -------------------------------------------------------------------------------------------------------


def test_prefixes_globs_and_lists_are_listed_like_folders(bucket) -> None:
    for name in ("a/1.txt", "a/b/2.txt", "a/b/c/3.txt", "a/.hidden/4.txt", "a/_tmp/5.txt", "a/note.md", "d/6.txt"):
        put(bucket, f"listing/{name}", b"x\n")
    bucket.pipe_file(f"{BUCKET}/listing/a/", b"")  # what consoles leave as a folder's marker
    root = f"s3://{BUCKET}/listing"

    def paths(path) -> list[str]:
        return freezing.freeze(text_source(path), PromptOptions(PromptConfig(text="{text}"))).files["path"].to_pylist()

    assert paths(root) == ["a/1.txt", "a/b/2.txt", "a/b/c/3.txt", "d/6.txt"]
    assert paths(f"{root}/a/") == ["1.txt", "b/2.txt", "b/c/3.txt"]
    assert paths(f"{root}/a/b/2.txt") == ["2.txt"]
    assert paths(f"{root}/*/b/*.txt") == ["a/b/2.txt"]
    assert paths(f"{root}/a/**/*.txt") == ["1.txt", "b/2.txt", "b/c/3.txt"]
    assert paths((f"{root}/d", f"{root}/a/b/**", f"{root}/a/b/2.txt")) == ["a/b/2.txt", "a/b/c/3.txt", "d/6.txt"]


def test_keys_with_empty_names_are_listed_and_read(bucket) -> None:
    below = ["b.txt", "/a.txt", "/e/c.txt", "f//g.txt", "/.hidden.txt"]
    for name in below:
        put(bucket, f"slashes/d/{name}", f"of {name}".encode())
    table = read_all(text_source(f"s3a://{BUCKET}/slashes/d"), "{text}")
    assert table["source"].to_pylist() == ["/a.txt", "/e/c.txt", "b.txt", "f//g.txt"]
    assert prompts_of(table) == [f"of {name}" for name in table["source"].to_pylist()]


def test_schemes_and_keys_of_rows_are_spelled_in_several_ways(bucket) -> None:
    for name in ("spelled//a.png", "spelled/b c.png"):
        put(bucket, name, encode("red"))
    uris = [f"S3://{BUCKET}/spelled//a.png", f"s3a://{BUCKET}/spelled//a.png", "b%20c.png ", "./b c.png"]
    source = SourceConfig(kind="jsonl", path=f"S3://{BUCKET}/spelled", uri_schemes=("s3",))
    found = Fetcher(source, f"s3://{BUCKET}/spelled").fetch([*uris, "gone.png"])
    assert [found[uri] for uri in uris] == [encode("red")] * len(uris)
    assert found["gone.png"].code == "missing_image"


@pytest.mark.parametrize("path", ["nothing/here", "nothing/*.txt", "nothing"])
def test_missing_objects_are_refused(bucket, path) -> None:
    with pytest.raises(ConfigError, match=r"^source\.path: "):
        read_all(text_source(f"s3://{BUCKET}/{path}"), "{text}")
    with pytest.raises(ConfigError, match=r"^source\.path: "):
        read_all(text_source(f"s3://no-such-bucket/{path}"), "{text}")


def test_a_listing_that_is_refused_again_and_again_is_refused_and_never_shortened(s3: S3, bucket) -> None:
    for name in ("x/1.txt", "y/2.txt"):
        put(bucket, f"refused/{name}", b"x\n")
    source = text_source(f"s3://{BUCKET}/refused")
    with s3.failing(Fault("refuse", "GET", f"/{BUCKET}", times=3)):
        bucket.invalidate_cache()
        assert outcomes(read_all(source, "{text}")) == {"x/1.txt#0": "", "y/2.txt#0": ""}
    bucket.invalidate_cache()
    with s3.failing(Fault("refuse", "GET", f"/{BUCKET}", times=1000)), pytest.raises(ConfigError, match="cannot be"):
        read_all(source, "{text}")


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["refuse", "cut", "stall"])
def test_reads_are_retried_after_faults_that_the_driver_does_not_retry(s3: S3, bucket, kind, monkeypatch) -> None:
    impatient = {"config_kwargs": {"connect_timeout": 5, "read_timeout": 0.2}}
    monkeypatch.setitem(access._OPTIONS, "s3", {**access._OPTIONS["s3"], **impatient})
    url = put(bucket, "faults/a.txt", TEXT)
    frozen = freezing.freeze(text_source(url, span_max_rows=30), PromptOptions(PromptConfig(text="{text}")))
    spans = datasource.SpanDatasource(text_source(url, span_max_rows=30), frozen, ("text",))
    for task in spans.get_read_tasks(1):
        with s3.failing(Fault(kind, "GET", "faults/a.txt", times=2), Fault(kind, "HEAD", "faults/a.txt", times=2)):
            table = next(iter(task()))
        assert set(outcomes(table).values()) == {""}
        assert not s3.was_outlasted


def test_a_store_that_stays_broken_costs_rows_and_not_the_job(s3: S3, bucket) -> None:
    good, bad = put(bucket, "broken/a.txt", TEXT), put(bucket, "broken/b.txt", TEXT)
    assert good != bad
    source = text_source(f"s3://{BUCKET}/broken")
    frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="{text}")))
    with s3.failing(Fault("refuse", "GET", "b.txt", 1000), Fault("refuse", "HEAD", "b.txt", 1000)):
        table = datasource.read_first(source, frozen, ("text",), 200)
    codes = outcomes(table)
    assert codes == {f"{name}.txt#{row}": "broken_shard" if name == "b" else "" for name in "ab" for row in range(100)}
    assert table["error_message"][150].as_py() == "b.txt: cannot be read from row 0 on: Service Unavailable"


def test_stalled_connections_are_closed_by_default() -> None:
    filesystem, _ = access.open_url(f"s3://{BUCKET}", "source.path")
    assert filesystem.config_kwargs == {"connect_timeout": 20, "read_timeout": 60}


class Short(io.BytesIO):
    """A driver's file that returns half of the requested bytes `times` times, and fails once in between."""

    times: ClassVar[list[int]] = []

    def read(self, num_bytes: int | None = -1) -> bytes:
        data = super().read(num_bytes)
        if not self.times:
            return data
        if self.times.pop() == 2:
            raise ConnectionResetError("on purpose")
        return data[: len(data) // 2]

    @property
    def size(self) -> int:
        return len(self.getbuffer())


class ShortFiles:
    """A store of one file whose driver does not notice that an answer was cut."""

    def open(self, path: str, mode: str, block_size: int = 0) -> Short:
        return Short(TEXT)


def test_short_reads_without_an_error_are_completed(monkeypatch) -> None:
    monkeypatch.setattr(Short, "times", [1, 2, 1])
    file = access.open_file(ShortFiles(), "x")
    assert [file.read(10), file.read(300), file.read()] == [TEXT[:10], TEXT[10:310], TEXT[310:]]
    assert file.read(5) == b""
    assert Short.times == []
    monkeypatch.setattr(Short, "times", [1, 2])
    assert access.read_bounded(ShortFiles(), "x", len(TEXT)) == TEXT
    monkeypatch.setattr(Short, "times", [1] * 4)
    with pytest.raises(retries.CutShort):
        access.read_bounded(ShortFiles(), "x", len(TEXT))


def test_a_cut_in_the_middle_of_a_parquet_file_or_a_tar_changes_nothing(s3: S3, bucket) -> None:
    data = encode("red", (64, 64))
    put(bucket, "cut/p/a.parquet", parquet_bytes({"i": [data] * 20, "q": [str(row) for row in range(20)]}))
    put(bucket, "cut/t/a.tar", tar_bytes([(f"{row}.png", data) for row in range(20)]))
    sources = (
        SourceConfig(kind="parquet", path=f"s3://{BUCKET}/cut/p", columns=SourceColumnsConfig(image="i")),
        SourceConfig(kind="webdataset", path=f"s3://{BUCKET}/cut/t"),
    )
    for source in sources:
        whole = read_all(source)
        with s3.failing(Fault("cut", "GET", "cut/", times=3)):
            assert read_all(source).equals(whole)
        assert whole.num_rows == 20


def test_images_by_uri_come_from_the_store_and_only_its_own_failures_cost_their_rows(s3: S3, bucket) -> None:
    red, blue = encode("red"), encode("blue", (4, 2))
    put(bucket, "pictures/red.png", red)
    put(bucket, "pictures/blue.png", blue)
    put(bucket, "elsewhere/green.png", encode("green"))
    names = [
        "red.png",
        f"s3://{BUCKET}/pictures/blue.png",
        "gone.png",
        f"s3://{BUCKET}/elsewhere/green.png",
        "../x.png",
    ]
    put(bucket, "pictures/rows.parquet", parquet_bytes({"i": names}))
    fetch = FetchConfig(max_attempts=2)
    columns = SourceColumnsConfig(image="i")
    source = SourceConfig(
        kind="parquet", path=f"s3://{BUCKET}/pictures", columns=columns, uri_schemes=("s3",), fetch=fetch
    )
    prompt_options = PromptOptions(PromptConfig(text="x"))
    options = image_decoding.DecodeOptions.of(source, f"s3://{BUCKET}/pictures", prompt_options)
    rows = read_all(source)
    assert image_decoding.decode_table(rows, options)["error_type"].to_pylist() == [
        "",
        "",
        "missing_image",
        "",
        "uri_refused",
    ]
    with s3.failing(Fault("refuse", "GET", "blue.png", 100), Fault("refuse", "HEAD", "blue.png", 100)):
        codes = image_decoding.decode_table(rows, options)["error_type"].to_pylist()
    assert codes == ["", "unreadable_image", "missing_image", "", "uri_refused"]
    refused = source.model_copy(update={"uri_schemes": ("file",)})
    options = image_decoding.DecodeOptions.of(refused, f"s3://{BUCKET}/pictures", prompt_options)
    assert image_decoding.decode_table(rows, options)["error_type"].to_pylist()[1] == "uri_refused"


# --- writing -------------------------------------------------------------------------------------------------------


@pytest.fixture
def output(bucket, request) -> OutputDir:
    return OutputDir(f"s3://{BUCKET}/out-{abs(hash(request.node.name))}")


def test_an_output_is_written_listed_and_read_back(output) -> None:
    output.refuse_if_used()
    output.check_writable()
    output.refuse_if_used()
    output.write_bytes("data/x.parquet", parquet_bytes({"a": [1]}))
    assert output.list_files("data") == ["x.parquet"]
    assert output.list_files("errors") == []
    with pytest.raises(ConfigError, match=r"is not empty: it holds data/x\.parquet"):
        output.refuse_if_used()


def test_writes_are_retried_after_503_and_publish_whole_objects(s3: S3, output) -> None:
    with s3.failing(Fault("refuse", "PUT", "", times=3), Fault("refuse", "HEAD", "", times=2)):
        output.write_bytes("data/x.bin", b"x" * 1000)
    assert output.filesystem.cat_file(output.path("data/x.bin")) == b"x" * 1000
    with s3.failing(Fault("refuse", "PUT", "", times=100)), pytest.raises(OSError):
        output.write_bytes("data/y.bin", b"y")
    assert output.list_files("data") == ["x.bin"]


def test_an_attempt_is_claimed_once(s3: S3, output) -> None:
    assert output.take_attempt({"job_id": "a"}) == 1
    with pytest.raises(ConfigError, match="another job has taken attempt 1"):
        output.take_attempt({"job_id": "a"})


def test_an_attempt_whose_put_succeeded_with_an_error_is_recognised_as_own(s3: S3, output) -> None:
    with s3.failing(Fault("done", "PUT", "attempts", times=1)):
        assert output.take_attempt({"job_id": "a"}) == 1
    with pytest.raises(ConfigError, match="another job has taken attempt 1"):
        output.take_attempt({"job_id": "b"})


def test_an_output_that_cannot_be_written_is_refused(s3: S3, output) -> None:
    with (
        s3.failing(Fault("refuse", "PUT", "", 1000)),
        pytest.raises(ConfigError, match=r"^sink\.path: .* cannot be written"),
    ):
        output.check_writable()
    with pytest.raises(ConfigError, match=r"^sink\.path: .* cannot be written"):
        OutputDir("s3://no-such-bucket/out").check_writable()


def test_a_store_without_conditional_put_is_refused_before_anything_is_written(s3: S3, output) -> None:
    with s3.without_conditional_put(), pytest.raises(ConfigError) as refused:
        output.check_writable()
    assert re.match(
        r"sink\.path: s3://.* has no conditional put: .*two attempts could both publish", str(refused.value)
    )
    assert output.list_files("") == []
    output.check_writable()


def test_a_store_whose_first_put_succeeded_with_an_error_supports_conditional_put(s3, output) -> None:
    with s3.failing(Fault("done", "PUT", "probe", times=1)):
        output.check_writable()
    assert output.list_files("") == []


# --- secrets -------------------------------------------------------------------------------------------------------


def test_no_credential_is_in_any_message(s3: S3, bucket, output, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, "botocore")
    put(bucket, "secret/a.txt", TEXT)
    messages = [
        access.reason_of(OSError(f"denied for {ACCESS_KEY} with {SECRET_KEY} at https://x/?X-Amz-Signature=f00"))
    ]
    source = text_source(f"s3://{BUCKET}/secret")
    frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="{text}")))
    with s3.failing(*(Fault("refuse", method, "", 1000) for method in ("GET", "HEAD", "PUT"))):
        messages += datasource.read_first(source, frozen, ("text",), 100)["error_message"].to_pylist()
        for refused in (output.check_writable, lambda: output.take_attempt({}), lambda: read_all(source, "{text}")):
            with pytest.raises(ConfigError) as caught:
                refused()
            messages.append(str(caught.value))
    for text in (*messages, *caplog.messages):
        assert SECRET_KEY not in text
        assert "f00" not in text
    assert "https://x/" in messages[0]
    assert ACCESS_KEY not in messages[0]
