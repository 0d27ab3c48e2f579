"""Small columnar files that expand to much more than their size: one error row for each value that is too large, or for
each row of what cannot be read, and all other rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.load import ConfigError
from configs.schema import PromptConfig
from configs.source import SourceColumnsConfig, SourceConfig
from pipeline.formats import kind, limits, parquet, parquet_pages
from pipeline.manifest import datasource, freezing
from pipeline.prompts.row_options import PromptOptions
from tests.pipeline.formats.false_headers import arrow_bytes, nested_views, parquet_bytes, repeated, replaced
from tests.pipeline.formats.shards import images_of, outcomes, read_all

LARGE = "x" * (limits.TEXT_MAX_BYTES + 1)
LARGEST = "x" * limits.TEXT_MAX_BYTES
MIB = 2**20


def source_of(
    folder: Path, data: bytes, name: str = "x.parquet", image: str | None = None, **options: Any
) -> SourceConfig:
    (folder / name).write_bytes(data)
    form = "hf" if name.endswith(".arrow") else "parquet"
    return SourceConfig(kind=form, path=str(folder), columns=SourceColumnsConfig(image=image), **options)


def codes_of(table: pa.Table) -> list[str]:
    return list(outcomes(table).values())


def values_of(table: pa.Table, name: str = "q") -> list[Any]:
    return [json.loads(fields)[name] for fields in table["fields"].to_pylist()]


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
@pytest.mark.parametrize("use", ["{q}", "kept", "id"])
def test_a_large_value_of_a_dictionary_is_an_error_row_each_time_and_others_are_read(tmp_path, name, use) -> None:
    table = {"q": repeated([LARGE, LARGEST, "a"], [2, 0, 0, 1, 2, 0], pa.string()), "n": [1, 2, 3, 4, 5, 6]}
    data = parquet_bytes(table) if name == "x.parquet" else arrow_bytes(pa.table(table), compression="zstd")
    assert len(data) < 5000
    source = source_of(tmp_path, data, name, id_column="q" if use == "id" else None)
    before = pa.default_memory_pool().max_memory()
    read = read_all(source, "{q}" if use == "{q}" else "x", ("q",) if use == "kept" else ())
    is_large = [False, True, True, False, False, True]
    expected = ["invalid_value" if large else "" for large in is_large]
    if use == "id":
        expected[4] = "duplicate_id"
    assert read["error_type"].to_pylist() == expected
    assert "holds a value of 16777217 bytes, more than 16777216" in read["error_message"][1].as_py()
    if use == "kept":
        assert [None if text is None else len(text) for text in read["q"].to_pylist()] == [
            1,
            None,
            None,
            2**24,
            1,
            None,
        ]
    assert pa.default_memory_pool().max_memory() - before < 200 * MIB


@pytest.mark.parametrize("form", ["bytes", "struct", "list"])
def test_large_images_of_a_dictionary_are_image_errors_and_others_are_read(tmp_path, form) -> None:
    images = repeated([bytes(3 * MIB), b"small", bytes(300)], [1, 0, 2, 1, *[0] * 40], pa.binary())
    if form == "struct":
        images = pa.StructArray.from_arrays([images], ["bytes"])
    if form == "list":
        images = pa.ListArray.from_arrays(pa.array(range(0, 45, 4), pa.int32()), images)
    source = source_of(tmp_path, parquet_bytes({"i": images}), image="i", max_image_bytes=2 * MIB)
    table = read_all(source)
    if form == "list":
        assert codes_of(table) == ["image_too_large"] * 11
        return
    assert codes_of(table) == ["", "image_too_large", "", "", *["image_too_large"] * 40]
    assert images_of(table)[:4] == [[b"small"], [], [bytes(300)], [b"small"]]


def test_a_list_of_images_beyond_the_share_of_a_row_is_not_decoded(tmp_path) -> None:
    images = pa.ListArray.from_arrays(
        pa.array([0, 1, 41, 42], pa.int32()), repeated([bytes(2 * MIB)], [0] * 42, pa.binary())
    )
    source = source_of(tmp_path, parquet_bytes({"i": images}), image="i", max_decoded_bytes=16 * MIB)
    assert codes_of(read_all(source.model_copy(update={"max_image_bytes": 3 * MIB}))) == ["", "row_too_large", ""]


NESTED = [
    pa.ListArray.from_arrays([0, 2, 3, 3, 5], repeated([b"x" * (2 * MIB), b"y"], [0, 1, 1, 0, 1], pa.binary())),
    pa.StructArray.from_arrays([repeated(["x" * (2 * MIB), "y"], [0, 1, 0, 1], pa.string())], ["s"]),
    repeated(["x" * (2 * MIB), "y"], [0, 1, None, 0], pa.string()),
]


@pytest.mark.parametrize("values", NESTED, ids=["list", "struct", "plain"])
@pytest.mark.parametrize("span_rows", [1, 3, 100])
def test_a_column_that_is_read_as_dictionary_gives_the_same_values(tmp_path, monkeypatch, values, span_rows) -> None:
    monkeypatch.setattr(parquet_pages, "LARGE_DICTIONARY_BYTES", 1000)
    data = parquet_bytes({"q": values, "n": range(4)}, row_group_size=2)
    restarts: list[str] = []
    original = parquet.RowsOfFile._restart
    monkeypatch.setattr(
        parquet.RowsOfFile,
        "_restart",
        lambda self, column: (restarts.append(column.as_dictionary), original(self, column)),
    )
    table = read_all(source_of(tmp_path, data, span_max_rows=span_rows), keep=("q", "n"))
    assert restarts
    assert all(path.startswith("q") for path in restarts)
    assert table["n"].to_pylist() == [0, 1, 2, 3]
    assert table["q"].to_pylist() == values.to_pylist()


def test_pages_of_every_encoding_are_checked_to_the_end_of_their_chunks(tmp_path) -> None:
    texts = [None if row % 7 == 0 else f"text {row % 50} of {row}" for row in range(3000)]
    lists = [[str(row)] * (row % 4) for row in range(3000)]
    for number, options in enumerate(
        {"compression": codec, "data_page_version": version, "use_dictionary": has, **more}
        for codec in ("none", "snappy", "gzip", "zstd")
        for version in ("1.0", "2.0")
        for has, more in (
            (True, {}),
            (False, {"write_statistics": False, "write_page_checksum": True}),
            (False, {"column_encoding": {"q": "DELTA_BYTE_ARRAY", "n": "DELTA_BINARY_PACKED"}}),
        )
    ):
        path = tmp_path / f"{number}.parquet"
        columns = {"q": texts, "n": range(3000), "l": lists}
        path.write_bytes(parquet_bytes(columns, data_page_size=1000, row_group_size=1100, **options))
        rows = parquet.RowsOfFile(fsspec.filesystem("file"), str(path), list(columns), kind.FilePiece(path.name))
        chunks: dict[int, parquet_pages.ColumnChunk] = {}
        results = []
        for _, batch in rows.until(3000):
            results.append(batch)
            chunks |= {chunk._stop: chunk for chunk in rows._file.watched}
        rows.close()
        assert pa.Table.from_batches(results).combine_chunks().cast(pq.read_schema(path)).equals(pq.read_table(path))
        assert len(chunks) == 9
        assert [chunk._next for chunk in chunks.values()] == list(chunks)


def test_a_row_group_with_a_page_that_expands_too_far_does_not_end_the_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(limits, "MAX_BLOCK_BYTES", MIB)
    texts = ["a"] * 10 + ["b", "x" * (2 * MIB), "b"] + ["c"] * 7
    data = parquet_bytes({"q": texts, "k": [str(row) for row in range(20)]}, row_group_size=10)
    for span_rows in (2, 100):
        table = read_all(source_of(tmp_path, data, span_max_rows=span_rows, id_column="k"), "{q}")
        assert table["error_type"].to_pylist() == [""] * 10 + ["broken_shard"] * 10
    data = parquet_bytes({"q": texts, "k": [str(row) for row in range(20)]}, row_group_size=5)
    for span_rows in (2, 100):
        table = read_all(source_of(tmp_path, data, span_max_rows=span_rows, id_column="k"), "{q}")
        assert table["error_type"].to_pylist() == [""] * 10 + ["broken_shard"] * 5 + [""] * 5
        assert table["sample_id"].to_pylist()[15:] == [str(row) for row in range(15, 20)]
        assert values_of(table) == ["a"] * 10 + [None] * 5 + ["c"] * 5
        assert "expands to 2097" in table["error_message"][10].as_py()


def test_large_pages_are_decoded_in_small_batches(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parquet_pages, "MAX_BLOCK_BYTES", MIB)
    sizes: list[int] = []
    original = parquet.RowsOfFile._next_batch

    def counted(self) -> pa.RecordBatch:
        batch = original(self)
        sizes.append(batch.num_rows)
        return batch

    monkeypatch.setattr(parquet.RowsOfFile, "_next_batch", counted)
    texts = ["a"] * 200 + [f"{row}" * 100_000 for row in range(20)] + ["b"] * 50
    data = parquet_bytes({"q": texts}, use_dictionary=False, data_page_size=1, write_batch_size=1)
    table = read_all(source_of(tmp_path, data), "{q}")
    assert values_of(table) == texts
    assert sizes == [1] * 270


@pytest.mark.parametrize(
    ("num_rows", "count"), [(limits.MIN_MAX_ROWS, limits.MIN_MAX_ROWS), (limits.MIN_MAX_ROWS + 1, None)]
)
def test_a_file_has_a_bounded_number_of_rows_per_byte(tmp_path, num_rows, count) -> None:
    data = parquet_bytes({"q": repeated(["a"], np.zeros(num_rows, np.int32), pa.string())}, row_group_size=num_rows)
    data += b""
    source = source_of(tmp_path, data + bytes(0))
    frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="{q}")))
    # Below 1000 rows per byte of the file, too.
    assert frozen.num_samples == (count if num_rows <= 1000 * len(data) else None)
    if count is None:
        assert codes_of(read_all(source, "{q}")) == ["broken_shard"]


def test_a_list_with_too_many_items_for_its_bytes_is_not_decoded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(limits, "MIN_MAX_ROWS", 100_000)
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 10**6, 10**6 + 1], pa.int32()), pa.array(np.zeros(10**6 + 1, np.int64))
    )
    data = parquet_bytes({"q": lists, "n": ["a", "b", "c"]}, row_group_size=3)
    assert codes_of(read_all(source_of(tmp_path, data), "{q}")) == ["broken_shard"] * 3
    assert codes_of(read_all(source_of(tmp_path, data), "{n}")) == [""] * 3


def test_the_time_to_reach_a_row_is_bounded_by_the_bytes_before_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parquet, "MAX_DECODED_BYTES", 3 * MIB)
    data = parquet_bytes({"q": repeated(["x" * 20_000], [0] * 600, pa.string()), "n": range(600)})
    for span_rows in (1, 1000):
        table = read_all(source_of(tmp_path, data, span_max_rows=span_rows), "{q}")
        assert codes_of(table) == [""] * 256 + ["broken_shard"] * 344
        assert "decode to more than 3145728 bytes" in table["error_message"][256].as_py()
    assert codes_of(read_all(source_of(tmp_path, data), "{n}")) == [""] * 600


ARROW = pa.table({"q": [f"text {n}" for n in range(1237)]})


@pytest.mark.parametrize("stream", [True, False])
def test_a_batch_of_arrow_that_claims_other_lengths_is_neither_trusted_nor_read(tmp_path, stream) -> None:
    lying = replaced(arrow_bytes(ARROW, stream), 1237, 2**40)
    assert codes_of(read_all(source_of(tmp_path, lying, "x.arrow"), "{q}")) == ["broken_shard"]
    lying = replaced(arrow_bytes(ARROW, stream), 1237, 20_000)
    assert set(codes_of(read_all(source_of(tmp_path, lying, "x.arrow"), "{q}"))) == {"broken_shard"}
    nulls = replaced(arrow_bytes(pa.table({"q": pa.nulls(12_345)}), stream), 12_345, 10**12)
    assert codes_of(read_all(source_of(tmp_path, nulls, "x.arrow"), "{q}")) == ["broken_shard"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("location", ["local", "memory"])
def test_a_batch_of_arrow_that_expands_too_far_is_not_decompressed(tmp_path, monkeypatch, stream, location) -> None:
    monkeypatch.setattr(limits, "MAX_BLOCK_BYTES", MIB)
    batches = [["a", "b"], ["x" * (2 * MIB), "c"], ["d"]]
    schema, sink = pa.schema([("q", pa.string())]), pa.BufferOutputStream()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for texts in batches:
            writer.write_batch(pa.record_batch({"q": texts}))
    source = source_of(tmp_path, sink.getvalue().to_pybytes(), "x.arrow")
    if location == "memory":
        fsspec.filesystem("memory").pipe_file("/bounds/x.arrow", sink.getvalue().to_pybytes())
        source = source.model_copy(update={"path": "memory://bounds/x.arrow"})
    table = read_all(source, "{q}")
    # The number of rows of remote files is unknown, so one row reports all that are lost.
    assert codes_of(table) == ["", "", *["broken_shard"] * (3 if location == "local" else 1)]
    assert "expands to 2097" in table["error_message"][2].as_py()


SHARED = {
    "views": pa.Array.from_buffers(
        pa.string_view(),
        100,
        [
            None,
            pa.py_buffer(pa.array([LARGE], pa.string_view()).buffers()[1].to_pybytes() * 100),
            pa.py_buffer(LARGE.encode()),
        ],
    ),
    "nested views": nested_views(9),
    "lists of nothing": pa.ListArray.from_arrays([0, 10**9, 10**9 + 1], pa.nulls(10**9 + 1)).slice(0, 1),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("use", ["field", "kept"])
def test_values_of_arrow_that_share_bytes_are_measured_and_not_expanded(tmp_path, name, use) -> None:
    data = arrow_bytes(pa.table({"q": SHARED[name]}), compression="zstd")
    assert len(data) < 10_000
    table = read_all(source_of(tmp_path, data, "x.arrow"), "{q}" if use == "field" else "x", ("q",) * (use == "kept"))
    assert codes_of(table) == ["invalid_value"] * len(SHARED[name])


@pytest.mark.parametrize(
    "kind_", [pa.list_(pa.null(), 10**9), pa.list_(pa.list_(pa.int8(), 2000), 2000), pa.binary(2**21)]
)
def test_a_type_whose_nulls_are_large_is_refused_by_the_name_of_the_column(tmp_path, kind_) -> None:
    source = source_of(tmp_path, arrow_bytes(pa.table({"q": pa.array([], kind_)})), "x.arrow")
    with pytest.raises(ConfigError, match=r"^prompt\.text: 'q' in x\.arrow is .* takes \d+ bytes even if it is null"):
        read_all(source, "{q}")


def test_an_arrow_file_whose_footer_is_missing_is_damaged(tmp_path) -> None:
    data = arrow_bytes(ARROW)
    assert codes_of(read_all(source_of(tmp_path, data[:-30], "x.arrow"), "{q}")) == ["broken_shard"]


def test_rows_of_a_chunk_that_fit_the_memory_of_a_piece_are_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kind, "MIN_SPAN_BYTES", 10_000)
    data = parquet_bytes({"q": repeated(["x" * 20_000], [0] * 30, pa.string())})
    table = read_all(source_of(tmp_path, data, span_max_bytes=100_000), "{q}")
    assert codes_of(table) == [""] * 3 + ["broken_shard"] * 27


@pytest.mark.parametrize("num_threads", [1, 8])
def test_the_files_of_a_span_share_its_memory_and_give_the_same_rows_each_time(
    tmp_path, monkeypatch, num_threads
) -> None:
    monkeypatch.setattr(kind, "MIN_SPAN_BYTES", 50_000)
    monkeypatch.setattr("pipeline.manifest.span_reader.NUM_PIECE_THREADS", num_threads)
    sizes = []
    for number in range(12):
        data = parquet_bytes({"q": repeated(["x" * 40_000, "small"], [1, *[0] * (15 + number % 4), 1], pa.string())})
        source = source_of(tmp_path, data, f"{number:02}.parquet")
        sizes.append(len(data))
    frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="{q}")))
    spans = datasource.SpanDatasource(source, frozen, ("q",))
    assert spans.num_spans == 1
    first, second, third = (spans.read(0) for _ in range(3))
    assert second.equals(first)
    assert third.equals(first)
    ids = [f"{number:02}.parquet#{row}" for number in range(12) for row in range(17 + number % 4)]
    codes = outcomes(first)
    assert list(codes) == ids
    num_large = sum(text == "x" * 40_000 for text in values_of(first))
    limit = 200 * sum(sizes)
    assert limit // 41_000 - 1 <= num_large <= limit // 40_000 < 12 * 10
    assert list(codes.values())[:11] == [""] * 10 + ["broken_shard"], "a file has a limit of its own"


@pytest.mark.parametrize("use", ["kept", "none"])
def test_an_arrow_batch_whose_rows_contradict_its_columns_is_one_error_row(tmp_path, use) -> None:
    batches = pa.table({"q": ["a"] * 5, "n": range(5)}), pa.table({"q": ["b"] * 77, "n": range(77)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_table(batch)
    data = sink.getvalue().to_pybytes()
    rows, wanted = (77).to_bytes(8, "little"), (300_000).to_bytes(8, "little")
    positions = [at for at in range(0, len(data) - 8, 4) if data[at : at + 8] == rows]
    refused = 0
    for at in positions:
        source = source_of(tmp_path, data[:at] + wanted + data[at + 8 :], "x.arrow")
        codes = codes_of(read_all(source, keep=("q", "n") if use == "kept" else ()))
        assert codes[:5] == [""] * 5
        assert len(codes) <= 5 + 77
        refused += codes[5:] == ["broken_shard"]
    assert refused >= 2
