"""Files of lines: every line accounted for with its number, whatever ends it, compresses it and cuts it into spans."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.load import ConfigError
from configs.schema import PromptConfig
from configs.source import SourceColumnsConfig, SourceConfig
from pipeline.formats import csv, jsonl, limits, lines, records, text
from pipeline.formats.kind import FilePiece
from pipeline.manifest import datasource, freezing, manifest, survey
from pipeline.prompts.row_options import PromptOptions
from tests.pipeline.formats.shards import encode, images_of, outcomes, read_all


def text_source(path: Path | str, **options) -> SourceConfig:
    return SourceConfig(kind="text", path=str(path), **options)


def jsonl_source(path: Path | str, image: str | None = None, **options) -> SourceConfig:
    return SourceConfig(kind="jsonl", path=str(path), columns=SourceColumnsConfig(image=image), **options)


def compressed(data: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data)
    return pa.compress(data, codec="zstd", asbytes=True) if suffix else data


def prompts_of(table: pa.Table, name: str = "text") -> list[str | None]:
    return [json.loads(fields)[name] for fields in table["fields"].to_pylist()]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_line_with_any_line_ending_is_a_prompt_and_blank_lines_are_skipped(tmp_path, suffix) -> None:
    data = "\ufeffone\r\n\n  two \n \t\r\nthree é\n\nno end".encode()
    (tmp_path / f"p.txt{suffix}").write_bytes(compressed(data, suffix))
    for span_rows in (1, 2, 1000):
        table = read_all(text_source(tmp_path, span_max_rows=span_rows), "{text}", keep=("text",))
        assert table["sample_id"].to_pylist() == [f"p.txt{suffix}#{row}" for row in range(4)]
        assert prompts_of(table) == ["one", "  two ", "three é", "no end"]
        assert table["text"].to_pylist() == prompts_of(table)


def test_lines_that_cannot_be_used_are_error_rows_with_their_numbers(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(jsonl.Jsonl, "max_bytes", 40)
    bad = [b"{", b"[1]", b'"x"', b"null", b"7", b"\xff{}", b'{"q": "' + b"x" * 40 + b'"}', b'{"q": "a\0"}', b"[" * 40]
    good = b'{"q": "good"}'
    (tmp_path / "x.jsonl").write_bytes(
        b"\n".join([good, b"", *(line for bad_line in bad for line in (bad_line, good))])
    )
    for span_rows in (3, 1000):
        table = read_all(jsonl_source(tmp_path, span_max_rows=span_rows), "{q}")
        assert list(outcomes(table).values()) == [""] + ["broken_line", ""] * len(bad)
        messages = [message for message in table["error_message"].to_pylist() if message]
        assert [message.split(" ")[1] for message in messages] == [str(3 + 2 * index) for index in range(len(bad))]
        assert "has more than 40 bytes" in messages[6]


def test_columns_of_json_are_prompt_values_kept_text_ids_and_images(tmp_path) -> None:
    (tmp_path / "red.png").write_bytes(encode("red"))
    rows = [
        {"id": 7, "q": "what?", "image": "red.png", "meta": {"a": [1, "é"]}},
        {"id": "b", "q": 3, "image": ["red.png", "red.png"], "meta": "plain"},
        {"id": "b", "q": "x", "image": "red.png"},
        {"id": None, "q": "x", "image": "red.png"},
        {"id": [1], "q": "x", "image": "red.png"},
        {"id": "c", "q": "x", "image": None},
        {"id": "d", "q": "x", "image": 5},
        {"id": "e", "q": "x", "image": "gone.png"},
        {"id": "\ud800", "q": "x", "image": []},
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    table = read_all(jsonl_source(tmp_path / "x.jsonl", "image", id_column="id"), "{q}", keep=("meta", "id"))
    assert outcomes(table) == {
        "7": "",
        "b": "",
        "x.jsonl#2": "duplicate_id",
        "x.jsonl#3": "missing_id",
        "x.jsonl#4": "invalid_value",
        "c": "missing_image",
        "d": "invalid_value",
        "e": "",
        "\ufffd": "",
    }
    assert images_of(table) == [["red.png"], ["red.png"] * 2, [], [], [], [], [], ["gone.png"], []]
    assert table["meta"].to_pylist()[:3] == ['{"a": [1, "é"]}', "plain", None]
    assert table["id"].to_pylist()[:2] == ["7", "b"]
    assert prompts_of(table, "q")[:2] == ["what?", 3]


@pytest.mark.parametrize(
    ("source", "prompt", "keep", "message"),
    [
        (
            text_source,
            "{prompt}",
            (),
            r"^prompt\.text: the column 'prompt' is not in a file of lines; columns there: text",
        ),
        (
            jsonl_source,
            "{nope}",
            (),
            r"^prompt\.text: the column 'nope' is not in the first 100 rows of b\.jsonl; .* a, q",
        ),
        (jsonl_source, "x", ("nope",), r"^sink\.keep_columns: the column 'nope'"),
    ],
)
def test_a_column_that_no_line_has_is_refused_by_name(tmp_path, source, prompt, keep, message) -> None:
    (tmp_path / "a.jsonl").write_text("nothing but damage\n")
    (tmp_path / "b.jsonl").write_text('{"q": 1}\n{"a": 2}\n')
    (tmp_path / "c.txt").write_text("x\n")
    with pytest.raises(ConfigError, match=message):
        read_all(source(tmp_path), prompt, keep)


def test_a_text_source_has_no_image_column(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("x\n")
    with pytest.raises(ConfigError, match=r"^source\.columns\.image: source\.kind 'text' has no image column"):
        read_all(text_source(tmp_path, columns=SourceColumnsConfig(image="text")))


def test_a_file_of_blank_lines_is_refused_for_holding_no_rows(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n \r\n\n")
    with pytest.raises(ConfigError, match=r"^source\.path: .* hold no rows"):
        read_all(text_source(tmp_path))


@pytest.mark.parametrize(("cut", "num_good"), [(-6, 0), (None, 0)])
def test_a_damaged_compressed_file_is_one_error_row_after_what_could_be_read(tmp_path, cut, num_good) -> None:
    data = gzip.compress(b"\n".join(b"line %d" % number for number in range(50)))
    (tmp_path / "a.txt.gz").write_bytes(data[:cut] if cut else b"no gzip at all")
    (tmp_path / "b.txt").write_text("whole\n")
    codes = outcomes(read_all(text_source(tmp_path)))
    assert list(codes)[-1] == "b.txt#0"
    assert list(codes.values())[-2:] == ["broken_shard", ""]
    assert set(list(codes.values())[:-2]) <= {""}


def test_a_decompression_bomb_is_an_error_row_and_is_not_read_to_its_end(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lines, "CHUNK_BYTES", 1000)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"\n".join([b"x" * 99] * 5000)))
    table = read_all(text_source(tmp_path, span_max_rows=10**6))
    assert set(outcomes(table).values()) == {"", "broken_shard"}
    assert table.num_rows <= 2 * (tmp_path / "a.txt.gz").stat().st_size + 1 < 5000
    assert "expands to more than 200 times its size" in table["error_message"].to_pylist()[-1]


def test_a_file_that_shrinks_after_the_listing_gives_an_error_row_for_every_row_that_is_gone(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{number}\n" for number in range(10)))
    source = text_source(path, span_max_rows=4)
    frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="{text}")))
    path.write_text("".join(f"{number}\n" for number in range(5)))
    table = datasource.read_first(source, frozen, ("text",), 10)
    assert table["sample_id"].to_pylist() == [f"a.txt#{row}" for row in range(10)]
    assert table["error_type"].to_pylist() == [""] * 5 + ["broken_shard"] * 5


def test_a_long_line_is_never_in_memory_as_a_whole(tmp_path, monkeypatch) -> None:
    class Endless:
        left = 300

        def read(self, num_bytes: int) -> bytes:
            self.left -= 1
            return b"y" * 1000 if self.left > 0 else b""

    [record] = lines.split_lines(Endless(), 1500)
    assert record == lines.Record(1, None, 299_000, 1)


LINES = st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line), max_size=30)


@settings(
    deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    LINES, st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.integers(1, 9), st.integers(1, 40), st.integers(1, 9)
)
def test_records_at_any_split_are_those_of_the_whole_file(written, end, ended, rows, size, chunk) -> None:
    data = end.join([b"first", *written]) + end * ended
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/lines/a.txt", data)
    expected = [
        line.removesuffix(b"\r").removeprefix(b"" if index else lines.BOM)
        for index, line in enumerate(data.split(b"\n"))
    ]
    expected = [line for line in expected if line.strip()]
    before, lines.CHUNK_BYTES = lines.CHUNK_BYTES, chunk
    try:
        table = read_all(text_source("memory://lines/a.txt", span_max_rows=rows, span_max_bytes=size), "{text}")
    finally:
        lines.CHUNK_BYTES = before
    codes = list(outcomes(table).values())
    assert len(codes) == len(expected)
    for line, code, prompt in zip(expected, codes, prompts_of(table), strict=True):
        try:
            assert (prompt, code) == (line.decode(), "")
        except UnicodeDecodeError:
            assert (prompt, code) == (None, "broken_line")


CONTENT = st.lists(
    st.sampled_from([b"a", b"bc", b" ", b"\r", b"\n", b"\r\n", b"\n\n", lines.BOM, b"x" * 9, b" " * 9]), max_size=40
).map(b"".join)


@pytest.mark.slow
@settings(
    deadline=None, max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(CONTENT, st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), st.integers(1, 20), st.integers(1, 9))
def test_an_index_of_ranges_is_that_of_the_whole_file(
    monkeypatch, data, range_bytes, limit, max_rows, max_bytes, chunk
) -> None:
    monkeypatch.setattr(text.Text, "max_bytes", limit)
    monkeypatch.setattr(lines, "CHUNK_BYTES", chunk)
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/ranges/a.txt", data)
    source = text_source("memory://ranges/a.txt", span_max_rows=max_rows, span_max_bytes=max_bytes)

    def read() -> tuple[manifest.Manifest, list[dict]]:
        frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="{text}")))
        return frozen, read_all(source, "{text}").to_pylist()

    def is_row(number: int, line: bytes) -> bool:
        content = line.removesuffix(b"\r").removeprefix(lines.BOM)
        return len(content) > limit or len(line) > limit + 1 or bool(content.strip())

    if b"\n" not in data:
        data = data.replace(b"\r", b"\n")
    offsets = [0, *(place + 1 for place, byte in enumerate(data) if byte == 10)]  # of all lines, in bytes
    ends = [*offsets[1:], len(data)]
    is_sample = [
        is_row(number, data[low:high].removesuffix(b"\n"))
        for number, (low, high) in enumerate(zip(offsets, ends, strict=True))
    ]
    if not any(is_sample):
        return
    monkeypatch.setattr(survey, "RANGE_BYTES", 1 << 30)
    whole, whole_rows = read()
    monkeypatch.setattr(survey, "RANGE_BYTES", range_bytes)
    split, split_rows = read()
    assert split_rows == whole_rows
    for frozen in (whole, split):
        assert frozen.num_samples == sum(is_sample)
        facts = frozen.files.to_pylist()[0]
        assert sum(facts["row_group_bytes"]) == len(data)
        assert sum(facts["row_group_lines"]) == sum(low < high for low, high in zip(offsets, ends, strict=True))
        for row in range(sum(is_sample)):
            entry = frozen.entry(0, row)
            assert offsets[entry.line - 1] == entry.offset
            assert sum(is_sample[: entry.line - 1]) == entry.row <= row


def test_only_plain_files_are_split() -> None:
    for kind, name in ((text.KIND, "a.txt"), (jsonl.KIND, "a.JSONL"), (csv.KIND, "a.csv")):
        assert kind.can_split(name)
    for kind, name in ((text.KIND, "a.txt.gz"), (jsonl.KIND, "a.JSONL.ZST"), (csv.KIND, "a.csv.gz")):
        assert not kind.can_split(name)


def test_text_is_counted_before_the_job_and_cut_at_lines(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{number}\n" for number in range(100)))
    source = text_source(tmp_path, span_max_rows=30)
    frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="{text}")))
    spans = datasource.SpanDatasource(source, frozen, ("text",))
    assert (frozen.num_samples, spans.num_samples, spans.num_spans) == (100, 100, 4)
    assert frozen.files["row_group_lines"].to_pylist() == [[30, 30, 30, 10]]
    assert frozen.entry(0, 65).row == 60
    assert frozen.entry(0, 65).line == 61
    assert (
        text.KIND.count(
            fsspec.filesystem("file"), datasource.ReadSpec(source, str(tmp_path), (), pa.schema([])), "a.txt", 7
        )
        == 7
    )


# --- files that expand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"\n", b" \t\r\n"])
def test_blank_lines_are_joined_and_counted(end) -> None:
    data = b"a\n" + end * 1_000_000 + b"b\n" + end * 9 + b"c"
    records = list(lines.split_lines(io.BytesIO(data), lines.TEXT_MAX_BYTES))
    assert len(records) < 40
    assert [(record.line, record.data) for record in records if not record.is_blank] == [
        (1, b"a"),
        (1_000_002, b"b"),
        (1_000_012, b"c"),
    ]
    assert sum(record.num_bytes for record in records) == len(data)
    assert sum(record.num_lines for record in records) == 1_000_012


def test_no_record_of_blank_lines_crosses_the_end_of_a_range() -> None:
    data = b"a\n" + b"\n" * 100 + b"b\n"
    for cut in range(len(data) + 1):
        position, starts = 0, []
        for record in lines.split_lines(io.BytesIO(data), 1000, cut=cut):
            starts.append(position)
            position += record.num_bytes
        if 0 < cut < len(data) - 1:
            assert cut in starts or cut == 1


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("blank", [b"\n", b" \r\n"])
def test_a_file_of_blank_lines_that_expands_too_far_is_an_error_row_after_its_rows(
    tmp_path, monkeypatch, suffix, blank
) -> None:
    monkeypatch.setattr(lines, "CHUNK_BYTES", 10_000)
    data = b"one\ntwo\n" + blank * 3_000_000 + b"three\n"
    (tmp_path / f"a.txt{suffix}").write_bytes(compressed(data, suffix))
    table = read_all(text_source(tmp_path), "{text}")
    assert list(outcomes(table).values()) == ["", "", "broken_shard"]
    assert "expands to more than 200 times its size" in table["error_message"][2].as_py()


@pytest.mark.parametrize("kind", ["text", "csv"])
def test_a_compressed_file_has_a_bounded_number_of_rows_for_its_size(tmp_path, monkeypatch, kind) -> None:
    monkeypatch.setattr(limits, "MIN_MAX_ROWS", 1000)
    for number, num_rows in enumerate((1000, 1001)):
        content = b"text\n" * (kind == "csv") + b"x\n" * num_rows
        (tmp_path / f"{number}.{kind if kind == 'csv' else 'txt'}.gz").write_bytes(gzip.compress(content))
    source = SourceConfig(kind=kind, path=str(tmp_path))
    assert freezing.freeze(source, PromptOptions(PromptConfig(text="{text}"))).files["num_samples"].to_pylist() == [
        1000,
        None,
    ]
    table = read_all(source, "{text}")
    assert list(outcomes(table).values()) == [""] * 2000 + ["broken_shard"]
    assert "more than 1000 rows, too many for its size" in table["error_message"][2000].as_py()


def test_a_value_that_is_nested_too_deeply_is_its_rows_error() -> None:
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    source = jsonl_source("x", image="i", id_column="id")
    spec = datasource.ReadSpec(source, "x", ("q",), pa.schema([("k", pa.string())]))
    rows = [
        (0, {"q": deep, "id": "a", "i": "x"}, 1),
        (1, {"k": deep, "id": "b", "i": "x"}, 1),
        (2, {"id": deep, "i": "x"}, 1),
        (3, {"id": "d", "i": {"bytes": deep}}, 1),
        (4, {"q": [1], "k": "k", "id": "e", "i": "x"}, 1),
    ]
    samples = [sample for chunk in records.chunks_of(spec, rows) for sample in chunk.samples]
    assert [sample.error.code if sample.error else "" for sample in samples] == ["invalid_value"] * 4 + [""]
    assert samples[4].fields == '{"q": [1]}'


def test_rows_of_much_text_are_yielded_in_small_batches(tmp_path) -> None:
    source = jsonl_source("x")
    spec = datasource.ReadSpec(source, "x", ("q",), pa.schema([]))
    rows = ((row, {"q": row}, 400_000) for row in range(10))
    sizes = [len(chunk.samples) for chunk in records.chunks_of(spec, rows)]
    assert sizes == [3, 3, 3, 1]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_only_needed_columns_of_a_row_are_held(tmp_path, kind) -> None:
    names = [f"c{number}" for number in range(1000)]
    if kind == "csv":
        (tmp_path / "a.csv").write_text("\n".join([",".join(names)] + [",".join(map(str, range(1000)))] * 2))
    else:
        (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({name: row for row, name in enumerate(names)})] * 2))
    source = SourceConfig(kind=kind, path=str(tmp_path), id_column="c7")
    spec = datasource.ReadSpec(source, str(tmp_path), ("c5",), pa.schema([("c3", pa.string())]))
    form = {"jsonl": jsonl.Jsonl(), "csv": csv.Csv()}[kind]
    filesystem = fsspec.filesystem("file")
    rows = [dict(row) for _, row, _ in form._rows(filesystem, spec, FilePiece(f"a.{kind}"))]
    assert rows == [{name: type(rows[0][name])(name[1:]) for name in ("c5", "c3", "c7")}] * 2
