from __future__ import annotations

from types import SimpleNamespace

import duckdb
import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.data.datasource.datasink import WriteResult

from configs.schema import Sink
from pipeline import rows
from pipeline.datasink import ParquetSink, Written, file_stem
from pipeline.layout import OutputDir

KEEP = [pa.field("url", pa.string()), pa.field("score", pa.float32())]


def result_table(ids: list[str], bad: tuple[str, ...] = ()) -> pa.Table:
    """A RESULT table with these ids; those in `bad` are error rows."""
    schema = rows.result_schema(KEEP)
    columns = []
    for field in schema:
        if field.name == "sample_id":
            values = ids
        elif field.name == "error_type":
            values = ["broken_image" if id_ in bad else "" for id_ in ids]
        elif field.name == "telemetry":
            values = [{"acceptance_histogram": [1, 2], "num_spec_steps": 3, "extras": "{}"}] * len(ids)
        elif field.name in ("url", "score"):
            values = [None] * len(ids)
        else:
            values = ["é" if field.type == pa.string() else 1] * len(ids)
        columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=schema)


def sink_at(path: object, attempt: int = 1, **options) -> ParquetSink:
    sink = ParquetSink(OutputDir(str(path)), Sink(path=str(path), **options), "cap/tion: é 1", attempt, KEEP)
    sink.on_write_start(None)
    return sink


def write(sink: ParquetSink, blocks: list[pa.Table], task: int) -> Written:
    return sink.write(iter(blocks), SimpleNamespace(task_idx=task))


def ids_in(folder) -> list[str]:
    return pads.dataset(folder, format="parquet").to_table()["sample_id"].to_pylist()


def test_good_rows_go_to_data_and_bad_ones_to_errors(tmp_path) -> None:
    written = write(sink_at(tmp_path), [result_table(["a", "b"], ("b",)), result_table(["c", "d"], ("c",))], 7)
    assert written.files == ("data/cap-tion-1-a0001-000007-000.parquet", "errors/cap-tion-1-a0001-000007-000.parquet")
    assert (written.num_rows, written.num_error_rows) == (4, 2)
    assert ids_in(tmp_path / "data") == ["a", "d"]
    assert ids_in(tmp_path / "errors") == ["b", "c"]


@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
def test_data_reads_as_it_is_with_every_tool(tmp_path, compression) -> None:
    sink = sink_at(tmp_path, compression=compression)
    write(sink, [result_table(["a", "b", "x"], ("x",))], 0)
    write(sink, [result_table(["c"])], 1)
    data = tmp_path / "data"
    assert ids_in(data) == ["a", "b", "c"]
    assert pd.read_parquet(data)["sample_id"].tolist() == ["a", "b", "c"]
    query = f"select sample_id, telemetry.num_spec_steps from '{data}/*.parquet' order by 1"
    assert duckdb.sql(query).fetchall() == [("a", 3), ("b", 3), ("c", 3)]
    for path in data.iterdir():
        assert pq.read_schema(path).equals(rows.result_schema(KEEP), check_metadata=False)
        assert pq.read_schema(path).metadata[b"draftfleet.schema_version"] == b"1"


def test_a_retried_write_replaces_itself_and_another_attempt_does_not(tmp_path) -> None:
    sink = sink_at(tmp_path, rows_per_file=2)
    first = write(sink, [result_table(["a", "b", "c"])], 0)
    assert write(sink_at(tmp_path, rows_per_file=2), [result_table(["a", "b", "c"])], 0) == first
    assert sorted(ids_in(tmp_path / "data")) == ["a", "b", "c"]
    second = write(sink_at(tmp_path, attempt=2), [result_table(["d"])], 0)
    assert not set(first.files) & set(second.files)
    assert sorted(ids_in(tmp_path / "data")) == ["a", "b", "c", "d"]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.booleans(), max_size=9), max_size=4), st.integers(1, 7))
def test_every_id_is_written_once_to_its_side_in_files_of_bounded_length(blocks, rows_per_file) -> None:
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists("/sink"):
        filesystem.rm("/sink", recursive=True)
    tables, good, bad = [], [], []
    for number, block in enumerate(blocks):
        ids = [f"{number}-{row}" for row in range(len(block))]
        failed = tuple(id_ for id_, is_bad in zip(ids, block, strict=True) if is_bad)
        tables.append(result_table(ids, failed))
        bad += failed
        good += [id_ for id_ in ids if id_ not in failed]
    written = write(sink_at("memory://sink", rows_per_file=rows_per_file), tables, 3)
    found: dict[str, list[str]] = {"data": [], "errors": []}
    for name in written.files:
        with filesystem.open(f"/sink/{name}", "rb") as file:
            ids = pq.read_table(file)["sample_id"].to_pylist()
        assert 1 <= len(ids) <= rows_per_file
        found[name.split("/")[0]] += ids
    assert found == {"data": good, "errors": bad}
    assert (written.num_rows, written.num_error_rows) == (len(good) + len(bad), len(bad))


def test_a_job_without_one_good_row_leaves_readable_data(tmp_path) -> None:
    sink = sink_at(tmp_path)
    written = write(sink, [result_table(["a"], ("a",))], 0)
    sink.on_write_complete(WriteResult(1, 1, [written]))
    assert sink.written == [written]
    assert pd.read_parquet(tmp_path / "data")["sample_id"].tolist() == []
    assert ids_in(tmp_path / "errors") == ["a"]


def test_a_job_with_good_rows_gets_no_empty_file(tmp_path) -> None:
    sink = sink_at(tmp_path)
    sink.on_write_complete(WriteResult(1, 1, [write(sink, [result_table(["a"])], 0)]))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cap-tion-1-a0001-000000-000.parquet"]


def test_an_empty_block_writes_no_file(tmp_path) -> None:
    assert write(sink_at(tmp_path), [result_table([])], 0) == Written((), 0, 0)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_block_of_another_schema_is_refused(tmp_path) -> None:
    sink = sink_at(tmp_path)
    with pytest.raises(ValueError, match="a result block has the columns"):
        write(sink, [result_table(["a"]).drop_columns("url")], 0)
    table = result_table(["a"])
    index = table.schema.get_field_index("status")
    with pytest.raises(ValueError, match="'status' of a result block holds nulls"):
        write(sink, [table.set_column(index, "status", pa.nulls(1, pa.string()))], 0)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_task_that_fails_halfway_publishes_no_half_file(tmp_path) -> None:
    def blocks():
        yield result_table(["a"])
        raise RuntimeError("upstream died")

    with pytest.raises(RuntimeError, match="upstream died"):
        sink_at(tmp_path).write(blocks(), SimpleNamespace(task_idx=0))
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize(
    ("job_id", "stem"),
    [
        ("caption", "caption"),
        ("../../x", "x"),
        ("a/b c", "a-b-c"),
        ("...", "job"),
        ("", "job"),
        ("_x", "x"),
        ("é" * 9, "job"),
    ],
)
def test_a_job_id_becomes_a_visible_file_name(job_id, stem) -> None:
    assert file_stem(job_id) == stem


def test_a_long_job_id_is_cut() -> None:
    assert file_stem("j" * 300) == "j" * 80
