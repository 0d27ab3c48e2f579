"""CSV: every record accounted for with its line, quoted fields over several lines, stray quotes that cost one line."""

from __future__ import annotations

import csv as standard_csv
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
from configs.schema import PromptConfig, RowColumnsConfig, SamplingConfig
from configs.source import SourceColumnsConfig, SourceConfig
from pipeline.formats import csv, lines
from pipeline.manifest import freezing, manifest, survey
from pipeline.media.image_decoding import DecodeOptions, decode_table
from pipeline.prompts.row_options import PromptOptions
from tests.pipeline.formats.shards import encode, fetched, outcomes, read_all


def csv_source(path: Path | str, image: str | None = None, **options) -> SourceConfig:
    return SourceConfig(kind="csv", path=str(path), columns=SourceColumnsConfig(image=image), **options)


def values(table: pa.Table, name: str) -> list[str | None]:
    return [json.loads(fields)[name] for fields in table["fields"].to_pylist()]


def test_fields_are_text_and_may_be_quoted_over_several_lines(tmp_path) -> None:
    text = '\ufeffid,q,n\r\n\r\n1,"two, with ""quotes""\r\nand a line",007\r\n2,,\r\n3, x "y" ,é\r\n'
    (tmp_path / "a.csv").write_bytes(text.encode())
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text.replace("\r", "").replace("1,", "4,").encode()))
    for span_rows in (1, 2, 1000):
        table = read_all(csv_source(tmp_path, span_max_rows=span_rows), "{q}", keep=("n",))
        assert outcomes(table) == {f"{name}#{row}": "" for name in ("a.csv", "b.csv.gz") for row in range(3)}
        assert values(table, "q") == ['two, with "quotes"\nand a line', "", ' x "y" '] * 2
        assert table["n"].to_pylist() == ["007", "", "é"] * 2


def test_tabs_and_other_delimiters(tmp_path) -> None:
    (tmp_path / "a.tsv").write_text("q\tn\na,b\t1\n")
    (tmp_path / "b.csv").write_text("q;n\na,b;1\n")
    assert values(read_all(csv_source(tmp_path / "a.tsv"), "{q}"), "q") == ["a,b"]
    assert values(read_all(csv_source(tmp_path / "b.csv", delimiter=";"), "{q}"), "q") == ["a,b"]


def test_records_that_do_not_fit_are_error_rows_with_their_lines(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(csv.Csv, "max_bytes", 60)
    bad = [b"only one", b"1,2,3,4", b'x,"open', b'x,"closed"y', b"x,\xff", b"x," + b"y" * 60, b"x,y\rz", b'"']
    (tmp_path / "a.csv").write_bytes(
        b"\n".join([b"a,q", *(line for bad_line in bad for line in (bad_line, b"good,q"))])
    )
    for span_rows in (3, 1000):
        table = read_all(csv_source(tmp_path, span_max_rows=span_rows), "{q}", keep=("a",))
        assert list(outcomes(table).values()) == ["broken_line", ""] * len(bad)
        assert table["a"].to_pylist() == [None, "good"] * len(bad)
        messages = [message for message in table["error_message"].to_pylist() if message]
        assert [message.split(" ")[1].rstrip(":") for message in messages] == [
            str(2 + 2 * index) for index in range(len(bad))
        ]


def test_a_stray_quote_costs_its_line_and_not_the_rest_of_the_file(tmp_path) -> None:
    rows = [f"{number},text {number}" for number in range(1000)]
    rows[10] = '10,"never closed'
    (tmp_path / "a.csv").write_text("\n".join(["id,q", *rows]) + "\n")
    table = read_all(csv_source(tmp_path, span_max_rows=300), "{q}")
    codes = outcomes(table)
    assert [row for row, code in enumerate(codes.values()) if code] == [10]
    assert len(codes) == 1000
    assert "line 12" in table["error_message"][10].as_py()


def test_images_are_uris_and_ids_are_text(tmp_path) -> None:
    (tmp_path / "red.png").write_bytes(encode("red"))
    (tmp_path / "a.csv").write_text("key,image\n01,red.png\n2,\n,red.png\n01,red.png\n3,gone.png\n")
    source = csv_source(tmp_path / "a.csv", "image", id_column="key")
    codes = outcomes(fetched(read_all(source), source))
    assert codes == {
        "01": "",
        "2": "missing_image",
        "a.csv#2": "missing_id",
        "a.csv#3": "duplicate_id",
        "3": "missing_image",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"^prompt\.text: the column 'q' is not in a\.csv; columns there: a, b"),
        ("q,q\n1,2\n", r"^prompt\.text: a\.csv has several columns named 'q'"),
        ("\n\n", r"^source\.path: .* hold no rows"),
        ("q\n", r"^source\.path: .* hold no rows"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path, text, message) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_all(csv_source(tmp_path), "{q}")


def test_a_file_whose_header_is_damaged_is_error_rows(tmp_path) -> None:
    (tmp_path / "a.csv").write_text('"q\n1\n2\n')
    (tmp_path / "b.csv").write_text("q\n1\n")
    table = read_all(csv_source(tmp_path), "{q}")
    assert outcomes(table) == {"a.csv#0": "broken_shard", "a.csv#1": "broken_shard", "b.csv#0": ""}
    assert "the header cannot be read: line 1" in table["error_message"][0].as_py()


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=8)


@settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=20), st.integers(1, 9), st.integers(1, 60), st.booleans())
def test_records_are_read_as_they_were_written_at_any_split(rows, span_rows, span_bytes, quote_all) -> None:
    buffer = io.StringIO(newline="")
    quoting = standard_csv.QUOTE_ALL if quote_all else standard_csv.QUOTE_MINIMAL
    writer = standard_csv.writer(buffer, lineterminator="\n", quoting=quoting)
    writer.writerows([("a", "b"), *rows])
    fsspec.filesystem("memory").pipe_file("/csv/x.csv", buffer.getvalue().encode())
    source = csv_source("memory://csv/x.csv", span_max_rows=span_rows, span_max_bytes=span_bytes)
    table = read_all(source, "{a}{b}")
    assert list(zip(values(table, "a"), values(table, "b"), strict=True)) == rows
    assert set(outcomes(table).values()) == {""}


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(st.sampled_from(['"', ",", "\n", "x", '""', "\r"]), max_size=40), st.integers(1, 4))
def test_every_split_gives_the_same_rows_with_any_quotes(parts, span_rows) -> None:
    fsspec.filesystem("memory").pipe_file("/csv/y.csv", ("a,b\n1,2\n" + "".join(parts)).encode())
    whole = read_all(csv_source("memory://csv/y.csv"), "{a}{b}")
    cut = read_all(csv_source("memory://csv/y.csv", span_max_rows=span_rows), "{a}{b}")
    assert cut.equals(whole)
    assert whole["sample_id"].to_pylist() == [f"y.csv#{row}" for row in range(whole.num_rows)]


def test_blank_cells_leave_seed_and_sampling_to_the_job(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("q,s,t\na,7,0.5\nb,,\nc, ,1\n")
    prompt_options = PromptOptions(
        PromptConfig(text="{q}"), RowColumnsConfig(seed="s", temperature="t"), SamplingConfig(temperature=0.25), seed=5
    )
    source = SourceConfig(kind="csv", path=str(tmp_path))
    made = decode_table(read_all(source, prompt_options), DecodeOptions.of(source, str(tmp_path), prompt_options))
    assert made["error_type"].to_pylist() == [""] * 3
    assert [json.loads(values) for values in made["sampling"].to_pylist()] == [
        {"seed": 7, "temperature": 0.5},
        {"seed": 5, "temperature": 0.25},
        {"seed": 5, "temperature": 1.0},
    ]


CELLS = st.lists(
    st.sampled_from(["a", "b", '"', '""', '"x\ny"', "\n", "\r\n", ",", "\n\n", '"long\n\nfield",', "c\n", '"', "é"]),
    max_size=40,
).map("".join)


@pytest.mark.slow
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CELLS, st.integers(1, 12), st.integers(6, 20), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_an_index_of_ranges_is_that_of_the_whole_file(
    monkeypatch, text, range_bytes, limit, max_rows, chunk, begins_early
) -> None:
    """Quoted fields over several lines, stray quotes and long records cross the ranges anywhere."""
    monkeypatch.setattr(csv.Csv, "max_bytes", limit)
    monkeypatch.setattr(lines, "CHUNK_BYTES", chunk)
    header = b"q,n\n" if begins_early else b"\n\nq,n\n"
    text += "\nz,1\n"
    data = header + text.encode()
    fsspec.filesystem("memory").pipe_file("/ranges/a.csv", data)
    source = csv_source("memory://ranges/a.csv", span_max_rows=max_rows)

    def read(num_bytes: int) -> tuple[manifest.Manifest, list[dict]]:
        monkeypatch.setattr(survey, "RANGE_BYTES", num_bytes)
        frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="{q}")))
        return frozen, read_all(source, "{q}").to_pylist()

    whole, whole_rows = read(1 << 30)
    split, split_rows = read(range_bytes)
    assert split_rows == whole_rows
    facts, expected = (table.files.to_pylist()[0] for table in (split, whole))
    if facts["num_samples"] is None:
        # Then no sample begins in the first range, which may lack the header too.
        assert len(header) + len(text) - len(text.lstrip()) >= range_bytes
        return
    assert facts["num_samples"] == expected["num_samples"]
    for name in ("rows", "bytes", "lines"):
        assert sum(facts[f"row_group_{name}"]) == sum(expected[f"row_group_{name}"])


def test_records_that_cross_ranges_are_counted_in_few_rounds(tmp_path, monkeypatch) -> None:
    """Each range begins inside a record, and only its first record was taken for another one."""
    record = '1,"line one\nline two\nline three"\n'
    (tmp_path / "a.csv").write_text("n,q\n" + record * 200)
    rounds: list[int] = []
    before = survey._begun_inside

    def counted(*given) -> dict[int, int]:
        result = before(*given)
        rounds.append(len(result))
        return result

    monkeypatch.setattr(survey, "_begun_inside", counted)
    monkeypatch.setattr(survey, "RANGE_BYTES", 10 * len(record) + 5)
    frozen = freezing.freeze(csv_source(tmp_path), PromptOptions(PromptConfig(text="{q}")))
    assert frozen.num_samples == 200
    assert rounds[0] > 10
    assert rounds[1:] == [0]


def test_a_file_whose_ranges_stay_wrong_is_counted_when_it_is_read(tmp_path, monkeypatch) -> None:
    """In lines of one quote, a parser that begins one line late never meets the records."""
    num_lines = 400
    (tmp_path / "a.csv").write_text("q\n" + '"\n' * num_lines)
    (tmp_path / "b.csv").write_text("q\n" + "row\n" * num_lines)
    source = csv_source(tmp_path)
    monkeypatch.setattr(survey, "RANGE_BYTES", 50)
    rounds = []
    before = survey._begun_inside
    monkeypatch.setattr(survey, "_begun_inside", lambda *given: rounds.append(1) or before(*given))
    frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="{q}")))
    assert frozen.files["num_samples"].to_pylist() == [None, num_lines]
    assert len(rounds) == survey.MAX_ROUNDS + 2
    assert len(outcomes(read_all(source, "{q}"))) == num_lines // 2 + num_lines


class Slow(csv.Csv):
    """Joins lines as the docstring of `Csv.join` describes, from each line again; all records are small."""

    def join(self, lines_, delimiter):
        waiting = list(lines_)
        while waiting:
            parts: list[lines.Record] = []
            for record in waiting:
                parts.append(record)
                data = b"\n".join(part.data or b"" for part in parts)
                is_open = csv.ends_inside(data.replace(b"\n", b" "), False, delimiter.encode())
                if record.data is None or not is_open:
                    break
            joined = lines.Record(parts[0].line, data, sum(part.num_bytes for part in parts), len(parts))
            is_valid = len(parts) == 1 or not (record.data is None or is_open or joined.num_bytes > self.max_bytes)
            if is_valid and len(parts) > 1:
                try:
                    self.fields(joined, delimiter)
                except csv.RowError:
                    is_valid = False
            yield joined if is_valid and len(parts) > 1 else parts[0]
            waiting = waiting[len(parts) if is_valid and len(parts) > 1 else 1 :]


QUOTED = st.lists(
    st.sampled_from(['"', "a", ",", "\n", '""', 'a"b,"', '","', "é", " ", "\n\n", '"\n', "x" * 9]), max_size=25
).map("".join)


@settings(deadline=None, max_examples=300)
@given(QUOTED)
def test_records_are_joined_as_if_each_line_was_tried_again(text) -> None:
    def joined(form: csv.Csv) -> list[tuple]:
        form.max_bytes = 40
        split = lines.split_lines(io.BytesIO(text.encode()), 40)
        single = (line for line in split for line in unjoined(line))
        return [(line.line, line.data) for line in form.join(single, ",") if not line.is_blank]

    def unjoined(record: lines.Record) -> list[lines.Record]:
        if record.num_lines == 1:
            return [record]
        parts = [] if record.data is None else record.data.split(b"\n")
        return [lines.Record(record.line + index, data, len(data) + 1, 1) for index, data in enumerate(parts)]

    assert joined(csv.Csv()) == joined(Slow())


@pytest.mark.parametrize("end", ["", 'x",y"z\n', 'x"\n'])
def test_the_work_for_stray_quotes_grows_with_the_number_of_lines(monkeypatch, end) -> None:
    counts = [0]
    original = csv.Csv.examine

    def counted(self, *arguments):
        counts[0] += 1
        return original(self, *arguments)

    monkeypatch.setattr(csv.Csv, "examine", counted)
    num_lines = 20_000
    text = 'a"b,"\n' * num_lines + end
    records = list(csv.Csv().join(lines.split_lines(io.BytesIO(text.encode()), csv.Csv.max_bytes), ","))
    assert num_lines <= len(records) <= num_lines + 1
    assert counts[0] <= 2 * num_lines + 2
