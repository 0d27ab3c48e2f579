from __future__ import annotations

import contextlib
import datetime
import decimal
import json
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.load import ConfigError
from configs.schema import PromptConfig
from configs.source import SourceColumnsConfig, SourceConfig
from pipeline.formats import kind, parquet
from pipeline.manifest import datasource, freezing
from pipeline.prompts import templates
from pipeline.prompts.row_options import PromptOptions
from tests.pipeline.formats.shards import encode, fetched, images_of, outcomes, read_all, write_parquet


def parquet_source(path: Path | str, image: str | None = None, **options) -> SourceConfig:
    return SourceConfig(kind="parquet", path=str(path), columns=SourceColumnsConfig(image=image), **options)


def fields_of(table: pa.Table) -> list[dict]:
    return [json.loads(text) for text in table["fields"].to_pylist()]


def test_ids_are_the_relative_path_and_the_row_over_row_groups_and_files(tmp_path) -> None:
    write_parquet(tmp_path / "b.parquet", {"q": ["x", "y"]})
    write_parquet(tmp_path / "a" / "deep.parquet", {"q": [str(row) for row in range(7)]}, row_group_size=3)
    table = read_all(parquet_source(tmp_path, span_max_rows=2), "{q}")
    assert table["sample_id"].to_pylist() == [f"a/deep.parquet#{row}" for row in range(7)] + [
        "b.parquet#0",
        "b.parquet#1",
    ]
    assert [fields["q"] for fields in fields_of(table)] == ["0", "1", "2", "3", "4", "5", "6", "x", "y"]
    assert table["row_index"].to_pylist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert table["source"].to_pylist() == ["a/deep.parquet"] * 7 + ["b.parquet"] * 2


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.lists(
        st.lists(st.text(st.characters(codec="utf-8"), max_size=5), min_size=1, max_size=30), min_size=1, max_size=4
    ),
    st.integers(1, 10),
    st.integers(1, 12),
)
def test_every_row_is_read_once_with_its_own_values_at_any_split(files, group_rows, span_rows) -> None:
    filesystem = fsspec.filesystem("memory")
    root = "/cuts"
    if filesystem.exists(root):
        filesystem.rm(root, recursive=True)
    for number, texts in enumerate(files):
        with filesystem.open(f"{root}/{number}.parquet", "wb") as file:
            pq.write_table(pa.table({"q": texts}), file, row_group_size=group_rows)
    table = read_all(parquet_source(f"memory:/{root}", span_max_rows=span_rows), "{q}", ("q",))
    expected = [
        (f"{number}.parquet#{row}", text) for number, texts in enumerate(files) for row, text in enumerate(texts)
    ]
    assert list(zip(table["sample_id"].to_pylist(), table["q"].to_pylist(), strict=True)) == expected
    assert [fields["q"] for fields in fields_of(table)] == [text for _, text in expected]


def test_images_as_bytes_uris_structs_and_lists_are_the_same_bytes(tmp_path) -> None:
    red, blue = encode("red"), encode("blue")
    (tmp_path / "pics").mkdir()
    (tmp_path / "pics" / "blue.png").write_bytes(blue)
    uri = "pics/blue.png"
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {
        "as_bytes": pa.array([red, blue], pa.binary()),
        "as_large_bytes": pa.array([red, blue], pa.large_binary()),
        "as_struct": pa.array([{"bytes": red, "path": "gone.png"}, {"bytes": None, "path": uri}], struct),
        "as_list": pa.array([[red], [blue]], pa.list_(pa.binary())),
        "as_structs": pa.array([[{"bytes": red}], [{"path": uri}]], pa.list_(struct)),
    }
    write_parquet(tmp_path / "x.parquet", columns)
    for name in columns:
        source = parquet_source(tmp_path, name)
        assert images_of(fetched(read_all(source), source)) == [[red], [blue]], name
    write_parquet(tmp_path / "x.parquet", {"as_uri": [uri, f"file://{tmp_path}/{uri}"], "many": [[uri, uri], [uri]]})
    for name, expected in (("as_uri", [[blue], [blue]]), ("many", [[blue, blue], [blue]])):
        source = parquet_source(tmp_path, name)
        assert images_of(fetched(read_all(source), source)) == expected


def test_without_an_image_column_rows_are_text_only(tmp_path) -> None:
    write_parquet(tmp_path / "x.parquet", {"q": ["a", "b"]})
    table = read_all(parquet_source(tmp_path), "no column at all")
    assert images_of(table) == [[], []]
    assert outcomes(table) == {"x.parquet#0": "", "x.parquet#1": ""}


@pytest.mark.parametrize("cell", [None, b"", [None], [b"x", None]])
def test_a_row_without_its_image_is_missing_image(tmp_path, cell) -> None:
    kind = pa.list_(pa.binary()) if isinstance(cell, list) else pa.binary()
    good = [b"good"] if isinstance(cell, list) else b"good"
    write_parquet(tmp_path / "x.parquet", {"i": pa.array([good, cell, good], kind)})
    table = read_all(parquet_source(tmp_path, "i"))
    assert outcomes(table) == {"x.parquet#0": "", "x.parquet#1": "missing_image", "x.parquet#2": ""}
    assert images_of(table)[1] == []


@pytest.mark.parametrize(
    ("uri", "code"),
    [
        ("gone.png", "missing_image"),
        ("", "missing_image"),
        ("../secret.png", "uri_refused"),
        ("a/../../secret.png", "uri_refused"),
        ("s3://bucket/key.png", "uri_refused"),
        ("HTTP://host/x.png", "uri_refused"),
        ("simplecache::s3://bucket/key", "uri_refused"),
        ("zip://x.png::file:///etc/x.zip", "uri_refused"),
        ("x\0.png", "uri_refused"),
        ("data:image/png;base64,AAAA", "uri_refused"),
        ("file:///no/such/file.png", "missing_image"),
        ("folder", "unreadable_image"),
        ("x" * 5000, "unreadable_image"),
        ("big.bin", "image_too_large"),
    ],
)
def test_a_uri_that_cannot_be_used_is_this_rows_error(tmp_path, uri, code) -> None:
    root = tmp_path / "root"
    write_parquet(root / "x.parquet", {"i": ["good.png", uri, "good.png"]})
    (tmp_path / "secret.png").write_bytes(b"secret")
    (root / "good.png").write_bytes(b"good")
    (root / "big.bin").write_bytes(b"b" * 101)
    (root / "folder").mkdir()
    source = parquet_source(root, "i", max_image_bytes=100)
    table = fetched(read_all(source), source)
    assert outcomes(table) == {"x.parquet#0": "", "x.parquet#1": code, "x.parquet#2": ""}
    assert images_of(table) == [[b"good"], [], [b"good"]]


def test_credentials_of_a_uri_are_not_in_the_message(tmp_path) -> None:
    write_parquet(tmp_path / "x.parquet", {"i": ["https://user:secret@host/a.png?token=secret"]})
    source = parquet_source(tmp_path, "i")
    [message] = fetched(read_all(source), source)["error_message"].to_pylist()
    assert "secret" not in message
    assert "https://host/a.png" in message


def test_the_id_column_gives_the_ids_and_bad_ones_are_error_rows(tmp_path) -> None:
    write_parquet(tmp_path / "x.parquet", {"key": ["k1", None, "k1", "", "k2"]})
    table = read_all(parquet_source(tmp_path, id_column="key"))
    assert outcomes(table) == {
        "k1": "",
        "x.parquet#1": "missing_id",
        "x.parquet#2": "duplicate_id",
        "x.parquet#3": "missing_id",
        "k2": "",
    }


def test_integer_ids_become_strings(tmp_path) -> None:
    write_parquet(tmp_path / "x.parquet", {"key": [7, 2**63 - 1]})
    assert list(outcomes(read_all(parquet_source(tmp_path, id_column="key")))) == ["7", str(2**63 - 1)]


def test_kept_columns_keep_their_types_and_nulls(tmp_path) -> None:
    columns = {
        "when": pa.array([1, None, 3], pa.timestamp("ns")),
        "tags": pa.array([["a"], None, []], pa.list_(pa.string())),
        "meta": pa.array([{"x": 1.5}, None, {"x": None}], pa.struct([("x", pa.float32())])),
        "word": pa.array(["a", "b", "a"]).dictionary_encode(),
        "nothing": pa.nulls(3),
        "a.b": pa.array([1, 2, 3], pa.int16()),
    }
    write_parquet(tmp_path / "x.parquet", columns)
    table = read_all(parquet_source(tmp_path), keep=tuple(columns))
    kept = {name: table[name].combine_chunks() for name in columns}
    assert kept["when"].equals(columns["when"])
    assert kept["tags"].equals(columns["tags"])
    assert kept["meta"].equals(columns["meta"])
    assert kept["word"].equals(pa.array(["a", "b", "a"]))
    assert kept["nothing"].equals(pa.nulls(3, pa.string()))
    assert kept["a.b"].equals(columns["a.b"])


def test_kept_types_are_unified_over_files(tmp_path) -> None:
    write_parquet(tmp_path / "a.parquet", {"n": pa.array([1], pa.int32()), "t": pa.nulls(1)})
    write_parquet(tmp_path / "b.parquet", {"n": pa.array([2**40], pa.int64()), "t": ["x"]})
    table = read_all(parquet_source(tmp_path), keep=("n", "t"))
    assert table.schema.field("n").type == pa.int64()
    assert table["n"].to_pylist() == [1, 2**40]
    assert table["t"].to_pylist() == [None, "x"]


@pytest.mark.parametrize(
    "values", [["text"], pa.array([1.5]), pa.array([b"x"]), pa.array([[1]]), pa.array([True]), pa.array([{"a": 1}])]
)
def test_kept_types_that_conflict_are_refused_by_name(tmp_path, values) -> None:
    write_parquet(tmp_path / "a.parquet", {"n": [1]})
    write_parquet(tmp_path / "b.parquet", {"n": values})
    with pytest.raises(ConfigError, match=r"^sink\.keep_columns: 'n' is .* in b\.parquet and int64 in an earlier file"):
        read_all(parquet_source(tmp_path), keep=("n",))


def test_values_for_the_prompt_are_json_of_every_type(tmp_path) -> None:
    columns = {
        "day": pa.array([datetime.date(2026, 1, 2)]),
        "price": pa.array([decimal.Decimal("1.50")]),
        "pair": pa.array([{"a": [1, None]}]),
        "none": pa.nulls(1),
        "word": pa.array(["w"]).dictionary_encode(),
    }
    write_parquet(tmp_path / "x.parquet", columns)
    [fields] = fields_of(read_all(parquet_source(tmp_path), "{day}{price}{pair}{none}{word}"))
    assert fields == {"day": "2026-01-02", "price": "1.50", "pair": {"a": [1, None]}, "none": None, "word": "w"}


@pytest.mark.parametrize(
    ("prompt", "keep", "options", "message"),
    [
        ("{nope}", (), {}, r"^prompt\.text: the column 'nope' is not in x\.parquet; columns there: bytes, n, q"),
        ("x", ("nope",), {}, r"^sink\.keep_columns: the column 'nope' is not in x\.parquet"),
        ("x", (), {"id_column": "nope"}, r"^source\.id_column: the column 'nope' is not in x\.parquet"),
        ("x", (), {"image": "nope"}, r"^source\.columns\.image: the column 'nope' is not in x\.parquet"),
        ("x", (), {"image": "n"}, r"^source\.columns\.image: 'n' in x\.parquet is double; images are"),
        ("x", (), {"id_column": "bytes"}, r"^source\.id_column: 'bytes' in x\.parquet is binary"),
        ("{bytes}", (), {}, r"^prompt\.text: the column 'bytes' in x\.parquet contains bytes"),
        ("x", ("status",), {}, r"^sink\.keep_columns: 'status' is a column of the output"),
        ("x", ("Sample_ID",), {}, r"^sink\.keep_columns: 'Sample_ID' is a column of the output"),
        ("x", ("q", "q"), {}, r"^sink\.keep_columns: a column is named twice"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_anything_starts(tmp_path, prompt, keep, options, message) -> None:
    write_parquet(tmp_path / "x.parquet", {"q": ["a"], "n": [1.0], "bytes": [b"x"]})
    with pytest.raises(ConfigError, match=message):
        freezing.freeze(parquet_source(tmp_path, **options), PromptOptions(PromptConfig(text=prompt)), keep)


def test_text_that_is_not_utf8_is_this_rows_error_and_is_not_kept(tmp_path) -> None:
    raw = pa.array([b"fine", b"\xff\xfe", b"also"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    write_parquet(tmp_path / "x.parquet", {"t": text})
    for options in ({"prompt": "{t}"}, {"keep": ("t",)}):
        table = read_all(parquet_source(tmp_path), **options)
        assert outcomes(table) == {"x.parquet#0": "", "x.parquet#1": "invalid_value", "x.parquet#2": ""}
    assert table["t"].to_pylist() == ["fine", None, "also"]
    table = read_all(parquet_source(tmp_path, id_column="t"))
    assert outcomes(table) == {"fine": "", "x.parquet#1": "invalid_value", "also": ""}


def test_a_file_that_changed_after_the_listing_is_an_error_row_for_every_row_that_it_had(tmp_path) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"q": ["a", "b", "c"]})
    source = parquet_source(tmp_path)
    frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="x")))
    write_parquet(path, {"q": ["a"]})
    table = datasource.read_first(source, frozen, (), 3)
    assert outcomes(table) == {f"x.parquet#{row}": "broken_shard" for row in range(3)}
    assert "1 rows and had 3" in table["error_message"][0].as_py()


@pytest.mark.parametrize("checksums", [False, True])
def test_damage_in_the_middle_keeps_the_rows_before_it_and_accounts_for_the_others(tmp_path, checksums) -> None:
    texts = [f"{row:0100d}" for row in range(400)]
    options = {"row_group_size": 200, "compression": "none", "use_dictionary": False}
    path = write_parquet(tmp_path / "x.parquet", {"q": texts}, write_page_checksum=checksums, **options)
    page = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    if checksums:
        data[page + 500] ^= 1  # one bit of one value
    else:
        data[page : page + 50] = b"\xff" * 50  # the page's header
    path.write_bytes(bytes(data))
    table = read_all(parquet_source(tmp_path, span_max_rows=1000), "{q}")
    codes = outcomes(table)
    num_good = list(codes.values()).index("broken_shard")
    assert 0 < num_good <= 200
    assert list(codes) == [f"x.parquet#{row}" for row in range(400)]
    assert list(codes.values()) == [""] * num_good + ["broken_shard"] * (400 - num_good)
    assert [fields["q"] for fields in fields_of(table)[:num_good]] == texts[:num_good]
    assert "x.parquet" in table["error_message"][num_good].as_py()


# --- large and hostile files ---------------------------------------------------------------------------------------


def spans_of(source: SourceConfig, prompt: str) -> datasource.SpanDatasource:
    template = PromptConfig(text=prompt)
    return datasource.SpanDatasource(
        source, freezing.freeze(source, PromptOptions(template)), tuple(templates.placeholders(template))
    )


@pytest.fixture
def opened(monkeypatch) -> list[int]:
    """The row at which each opening of a file begins to decode."""
    for reader in parquet._open_readers.values():
        reader.close()
    parquet._open_readers.clear()
    starts: list[int] = []
    original = parquet.RowsOfFile.__init__

    def counted(self, filesystem, path, names, piece) -> None:
        original(self, filesystem, path, names, piece)
        starts.append(self._position)

    monkeypatch.setattr(parquet.RowsOfFile, "__init__", counted)
    return starts


def test_slices_of_a_huge_row_group_are_decoded_once_where_one_process_reads_them_in_order(tmp_path, opened) -> None:
    texts = [f"{row:0100d}" for row in range(1000)]
    write_parquet(tmp_path / "x.parquet", {"q": texts}, row_group_size=600, use_dictionary=False, compression="none")
    spans = spans_of(parquet_source(tmp_path, span_max_bytes=20_000), "{q}")
    assert [(piece.start, piece.stop) for (piece,) in spans._spans] == [
        *((150 * part, 150 * part + 150) for part in range(4)),
        *((600 + 400 * part // 3, 600 + 400 * (part + 1) // 3) for part in range(3)),
    ]
    tables = [next(iter(task())) for task in spans.get_read_tasks(1)]
    assert [fields["q"] for table in tables for fields in fields_of(table)] == texts
    assert opened == [0, 600]


def test_slices_that_come_in_another_order_or_twice_are_the_same_rows(tmp_path, opened) -> None:
    texts = [f"{row:0100d}" for row in range(1000)]
    write_parquet(tmp_path / "x.parquet", {"q": texts}, row_group_size=1000, use_dictionary=False, compression="none")
    tasks = spans_of(parquet_source(tmp_path, span_max_bytes=20_000), "{q}").get_read_tasks(1)
    assert len(tasks) == 6
    tables = {number: next(iter(tasks[number]())) for number in (3, 0, 5, 2, 2, 1, 4)}
    assert [fields["q"] for number in range(6) for fields in fields_of(tables[number])] == texts
    assert len(opened) == 5


def test_a_dictionary_with_one_huge_value_does_not_fill_the_memory(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kind, "MIN_SPAN_BYTES", 2**20)
    monkeypatch.setattr(parquet, "BATCH_BYTES", 2**21)
    huge = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array([bytes(500_000)], pa.binary()))
    options = {"compression": "zstd", "store_schema": False}
    path = write_parquet(tmp_path / "x.parquet", {"i": huge}, **options)
    assert path.stat().st_size < 1000
    before = pa.default_memory_pool().max_memory()
    table = read_all(parquet_source(tmp_path, "i", span_max_bytes=2**20))
    codes = list(outcomes(table).values())
    num_good = codes.index("broken_shard")
    assert codes == [""] * num_good + ["broken_shard"] * (2000 - num_good)
    assert 12 <= num_good <= 16
    assert "takes more than 8388608 bytes" in table["error_message"][num_good].as_py()
    assert pa.default_memory_pool().max_memory() - before < 2**26


@pytest.mark.parametrize(
    ("groups", "num_rows", "message"),
    [([1_000_001], 1_000_001, "in a file of 1000 bytes"), ([3, -1], 2, "row groups"), ([3, 3], 7, "row groups")],
)
def test_a_footer_whose_numbers_make_no_sense_is_refused(groups, num_rows, message) -> None:
    metadata = SimpleNamespace(
        num_rows=num_rows,
        num_row_groups=len(groups),
        row_group=lambda index: SimpleNamespace(num_rows=groups[index]),
    )
    with pytest.raises(ValueError, match=message):
        parquet.check_footer(metadata, 1000)


def test_folders_named_name_equals_value_are_columns(tmp_path) -> None:
    write_parquet(tmp_path / "year=2024" / "lang=en" / "x.parquet", {"q": ["a", "b"]})
    write_parquet(tmp_path / "year=2025" / "lang=f%20r" / "x.parquet", {"q": ["c"]})
    write_parquet(tmp_path / "year=__HIVE_DEFAULT_PARTITION__" / "lang=de" / "x.parquet", {"q": ["d"], "lang": ["own"]})
    table = read_all(parquet_source(tmp_path), "{q}{lang}", keep=("year", "lang"))
    assert [tuple(fields.values()) for fields in fields_of(table)] == [
        ("a", "en"),
        ("b", "en"),
        ("c", "f r"),
        ("d", "own"),
    ]
    assert table["year"].to_pylist() == ["2024", "2024", "2025", None]
    assert table["sample_id"][0].as_py() == "year=2024/lang=en/x.parquet#0"
    with pytest.raises(
        ConfigError, match=r"^prompt\.text: the column 'month' is not in year=2024/.*columns there: lang, q, year"
    ):
        read_all(parquet_source(tmp_path), "{month}")


ID_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.int8(),
    pa.uint64(),
    pa.null(),
    pa.float64(),
]


@pytest.mark.parametrize("dtype", ID_TYPES, ids=str)
@pytest.mark.parametrize("damage", [False, True])
def test_ids_read_as_a_column_are_those_of_the_samples(tmp_path, monkeypatch, dtype, damage) -> None:
    monkeypatch.setattr(parquet, "ID_BATCH_ROWS", 3 * parquet.BATCH_ROWS)
    values = pa.array([None if row % 7 == 0 else row % 120 for row in range(1000)], pa.int64())
    if pa.types.is_null(dtype):
        values = pa.nulls(1000)
    elif not (pa.types.is_integer(dtype) or pa.types.is_floating(dtype)):
        values = pc.if_else(pc.equal(values, 3), "", pc.binary_join_element_wise("é-", values.cast(pa.string()), ""))
    values = values.dictionary_encode() if pa.types.is_dictionary(dtype) else values.cast(dtype)
    path = write_parquet(
        tmp_path / "a.parquet",
        {"k": values},
        row_group_size=400,
        data_page_size=16,
        write_batch_size=16,
        use_dictionary=False,
    )
    if damage:
        data = bytearray(path.read_bytes())
        chunk = pq.read_metadata(path).row_group(1).column(0)
        data[chunk.data_page_offset + chunk.total_compressed_size * 9 // 10] ^= 0xFF
        path.write_bytes(data)
    filesystem = fsspec.filesystem("file")
    source = SourceConfig(kind="parquet", path=str(tmp_path), id_column="k")
    spec = kind.ReadSpec(source, str(tmp_path), (), pa.schema([])).with_ids_only("k")

    def rows_and_ids(chunks) -> list[tuple[int, str]]:
        pairs = []
        with contextlib.suppress(Exception):
            for chunk in chunks:
                pairs += zip(chunk.rows.tolist(), chunk.ids.to_pylist(), strict=True)
        return pairs

    for start, stop in ((0, None), (1, 999), (399, 401), (650, 1000)):
        piece = kind.FilePiece("a.parquet", start, stop, 1000)
        samples = rows_and_ids(kind.IdRows.of(chunk) for chunk in parquet.read(filesystem, spec, piece))
        while parquet._open_readers:  # a reader that began in another row group has other batches
            parquet._open_readers.popitem()[1].close()
        assert rows_and_ids(parquet.KIND.ids(filesystem, spec, piece)) == samples
    if not damage and not pa.types.is_null(dtype):
        assert len(samples) == 300 or len(samples) > 250


def test_ids_that_are_not_utf_8_are_left_out(tmp_path) -> None:
    bad = pa.array([b"a", b"\xff", b"b"], pa.binary()).cast(pa.string(), safe=False)
    write_parquet(tmp_path / "a.parquet", {"k": bad})
    spec = kind.ReadSpec(
        SourceConfig(kind="parquet", path=str(tmp_path), id_column="k"), str(tmp_path), (), pa.schema([])
    )
    [table] = parquet.KIND.ids(fsspec.filesystem("file"), spec.with_ids_only("k"), kind.FilePiece("a.parquet"))
    assert (table.rows.tolist(), table.ids.to_pylist()) == ([0, 2], ["a", "b"])


def test_a_batch_of_ids_stays_small_if_a_dictionary_may_hold_a_large_value(tmp_path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"k": ["x" * 1_000_000, *["y"] * 70_000]})
    metadata, schema = pq.read_metadata(path), pq.read_schema(path)
    num_rows = parquet.batch_rows(metadata, [0], ["k"], schema, parquet.ID_BATCH_ROWS)
    assert num_rows * 1_000_000 <= max(parquet.BATCH_BYTES, parquet.BATCH_ROWS * 1_000_000)
    small = write_parquet(tmp_path / "b.parquet", {"k": [f"{row:010d}" for row in range(1000)]})
    metadata = pq.read_metadata(small)
    assert parquet.batch_rows(metadata, [0], ["k"], schema, parquet.ID_BATCH_ROWS) > 1000
    assert parquet.batch_rows(metadata, [0], ["k"], schema) == parquet.BATCH_ROWS
