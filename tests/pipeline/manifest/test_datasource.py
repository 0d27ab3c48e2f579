from __future__ import annotations

import json
import pickle

import pyarrow as pa
import pytest

from configs.schema import PromptConfig
from configs.source import SourceColumnsConfig, SourceConfig
from pipeline.manifest import datasource, freezing, span_reader
from pipeline.media import image_decoding
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows import schemas
from tests.pipeline.formats.shards import encode, outcomes, read_all, tar_bytes, write_parquet

PROMPT = PromptOptions(PromptConfig(text="Describe."))
GOOD = encode()


def span_source(source: SourceConfig, limit: int | None = None) -> datasource.SpanDatasource:
    return datasource.SpanDatasource(source, freezing.freeze(source, PROMPT), (), limit)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"PAR1", id="magic only"),
        pytest.param(b"PAR1" + b"\0" * 100 + b"PAR1", id="footer of length zero"),
        pytest.param(b"PAR1" + b"\xff" * 100 + b"PAR1", id="footer longer than the file"),
        pytest.param(b"PAR1" + b"\0" * 100 + b"PARE", id="encrypted"),
        pytest.param(b"ORC\0" * 30, id="another format"),
        pytest.param(json.dumps({"a": 1}).encode(), id="json"),
        pytest.param(None, id="cut in the middle"),
    ],
)
def test_an_unreadable_parquet_file_is_one_error_row_between_its_neighbours(tmp_path, data) -> None:
    write_parquet(tmp_path / "a.parquet", {"i": [GOOD], "k": ["x"]})
    write_parquet(tmp_path / "b.parquet", {"i": [GOOD] * 50, "k": ["y"] * 50})
    write_parquet(tmp_path / "c.parquet", {"i": [GOOD], "k": ["z"]})
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2] if data is None else data)
    source = SourceConfig(kind="parquet", path=str(tmp_path), columns=SourceColumnsConfig(image="i"))
    table = read_all(source, "{k}", keep=("k",))
    assert outcomes(table) == {"a.parquet#0": "", "b.parquet#0": "broken_shard", "c.parquet#0": ""}
    assert table["k"].to_pylist() == ["x", None, "z"]
    assert table["source"].to_pylist() == ["a.parquet", "b.parquet", "c.parquet"]
    assert table["error_message"][1].as_py().startswith("b.parquet: cannot be read from row 0 on: ")


def test_a_source_of_broken_files_only_gives_error_rows_only(tmp_path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"torn")
    source = SourceConfig(kind="parquet", path=str(tmp_path / "a.parquet"), columns=SourceColumnsConfig(image="i"))
    table = read_all(source, "{k}", keep=("k",))
    assert outcomes(table) == {"a.parquet#0": "broken_shard"}
    decoded = image_decoding.decode_table(table, image_decoding.DecodeOptions(PromptOptions(PromptConfig(text="{k}"))))
    assert decoded["error_type"].to_pylist() == ["broken_shard"]


def test_files_that_vanish_after_the_listing_are_error_rows(tmp_path) -> None:
    write_parquet(tmp_path / "p" / "a.parquet", {"q": ["x"]})
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / "a.png").write_bytes(GOOD)
    (tmp_path / "i" / "b.png").write_bytes(GOOD)
    (tmp_path / "t.tar").write_bytes(tar_bytes([("a.jpg", b"a")]))
    sources = [
        SourceConfig(kind="parquet", path=str(tmp_path / "p")),
        SourceConfig(kind="images", path=str(tmp_path / "i")),
        SourceConfig(kind="webdataset", path=str(tmp_path / "t.tar")),
    ]
    planned = [span_source(source).get_read_tasks(1) for source in sources]
    (tmp_path / "p" / "a.parquet").unlink()
    (tmp_path / "i" / "a.png").unlink()
    (tmp_path / "t.tar").unlink()
    assert [outcomes(next(iter(task()))) for [task] in planned] == [
        {"a.parquet#0": "broken_shard"},
        {"a.png#0": "missing_image", "b.png#0": ""},
        {"t.tar#0": "broken_shard"},
    ]


def test_an_image_file_beyond_the_byte_limit_is_an_error_row(tmp_path) -> None:
    (tmp_path / "a.png").write_bytes(b"x" * 101)
    (tmp_path / "b.png").write_bytes(b"x" * 100)
    source = SourceConfig(kind="images", path=str(tmp_path), max_image_bytes=100)
    assert outcomes(read_all(source)) == {"a.png#0": "image_too_large", "b.png#0": ""}


def test_ids_are_unique_within_a_span_whatever_file_they_come_from(tmp_path) -> None:
    write_parquet(tmp_path / "a.parquet", {"key": ["k1", "k2"]})
    write_parquet(tmp_path / "b.parquet", {"key": ["k2", "k3"]})
    codes = outcomes(read_all(SourceConfig(kind="parquet", path=str(tmp_path), id_column="key")))
    assert codes == {"k1": "", "k2": "", "b.parquet#0": "duplicate_id", "k3": ""}


def test_a_read_task_carries_its_own_span_and_not_the_manifest(tmp_path) -> None:
    for number in range(300):
        (tmp_path / f"{number:04d}.png").write_bytes(GOOD)
    tasks = span_source(SourceConfig(kind="images", path=str(tmp_path), span_max_rows=10)).get_read_tasks(1)
    assert len(tasks) == 30
    sent = pickle.dumps(tasks[7].read_fn)
    assert len(sent) < 3000
    [table] = list(pickle.loads(sent)())
    assert table["sample_id"].to_pylist() == [f"{number:04d}.png#0" for number in range(70, 80)]
    assert tasks[7].metadata.num_rows == 10
    assert tasks[7].metadata.size_bytes == 10 * len(GOOD)


def test_a_repeated_read_is_the_same_table(tmp_path) -> None:
    write_parquet(tmp_path / "a.parquet", {"q": [str(row) for row in range(100)]}, row_group_size=7)
    for task in span_source(SourceConfig(kind="parquet", path=str(tmp_path), span_max_rows=13)).get_read_tasks(1):
        [first], [second] = list(task()), list(task())
        assert first.equals(second)


def test_counts_are_known_where_they_can_be(tmp_path) -> None:
    write_parquet(tmp_path / "a.parquet", {"q": ["x"] * 25})
    source = SourceConfig(kind="parquet", path=str(tmp_path), span_max_rows=10)
    assert span_source(source).num_samples == 25
    assert span_source(source, limit=12).num_samples == 12
    (tmp_path / "a.tar").write_bytes(tar_bytes([("a.jpg", b"a"), ("b.jpg", b"b")]))
    tars = SourceConfig(kind="webdataset", path=str(tmp_path))
    assert span_source(tars).num_samples is None
    assert span_source(tars, limit=1).num_samples == 1


def test_the_first_rows_need_no_ray(tmp_path) -> None:
    write_parquet(tmp_path / "a.parquet", {"q": [str(row) for row in range(100)]}, row_group_size=7)
    source = SourceConfig(kind="parquet", path=str(tmp_path), span_max_rows=13)
    table = datasource.read_first(source, freezing.freeze(source, PromptOptions(PromptConfig(text="{q}"))), ("q",), 30)
    assert table["sample_id"].to_pylist() == [f"a.parquet#{row}" for row in range(30)]
    assert table.schema.equals(schemas.read_schema(), check_metadata=True)


def test_a_long_error_message_is_cut_and_valid_text(tmp_path) -> None:
    name = "n" * 200 + ".parquet"
    (tmp_path / name).write_bytes(b"torn" * 1000)
    [message] = read_all(SourceConfig(kind="parquet", path=str(tmp_path)))["error_message"].to_pylist()
    assert len(message) <= span_reader.MAX_MESSAGE_CHARS
    assert pa.array([message]).validate(full=True) is None
