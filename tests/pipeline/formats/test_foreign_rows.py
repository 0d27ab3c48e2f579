"""Rows that other tools write: media as text, spellings of paths, encodings, separators, nested names, ids, rows
without media. Each case has the value that browsers, spreadsheets or the tool itself read."""

from __future__ import annotations

import base64
import io
import json
import os
import unicodedata
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from configs.load import ConfigError
from pipeline.formats.base64_text import image_in_text
from pipeline.formats.csv import Csv
from pipeline.formats.uris import spellings
from pipeline.media.image_decoding import decode_table
from pipeline.storage import access
from tests.pipeline.attempts import job, plan_of
from tests.pipeline.formats.shards import encode, tar_bytes

RED, GREEN = (220, 30, 30), (30, 200, 30)
PNG = encode(RED)
TEXT = base64.b64encode(PNG).decode()
NOISE = io.BytesIO()
Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)).save(NOISE, "PNG")


def decoded(source: dict[str, Any], tmp_path: Path, **sections: Any) -> list[dict[str, Any]]:
    """The decoded rows of a source, read as a job reads them."""
    plan = plan_of(job(source, tmp_path / "no-output", **sections))
    spans = range(plan.datasource.num_spans)
    tables = [decode_table(plan.datasource.read(span), plan.decode_options, plan.present_ids) for span in spans]
    return [row for table in tables for row in table.to_pylist()]


def colours(row: dict[str, Any]) -> list[tuple[int, ...]]:
    """The error code, or the colours of the first pixels of a row's images."""
    return row["error_type"] or [tuple(image["rgb"][:3]) for image in row["images"]]


def text_of(row: dict[str, Any]) -> str:
    parts = [part for turn in json.loads(row["messages"]) for part in turn["content"]]
    return "".join(part.get("text", f"<{part['type']}>") for part in parts)


def lines(path: Path, *rows: Any) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return {"kind": "jsonl", "path": str(path), "columns": {"image": "image"}, "uri_schemes": ["data", "file"]}


WRAPPED = "\n".join(TEXT[place : place + 20] for place in range(0, len(TEXT), 20))


@pytest.mark.parametrize(
    "value",
    [
        f"data:image/png;base64,{WRAPPED}",
        "data:image/png;base64," + WRAPPED.replace("\n", "\r\n"),
        f"data:image/png;base64,{TEXT}\n",
        f" data:image/png;base64,{TEXT}",
        f"DATA:image/png;BASE64,{TEXT}",
        f"data:image/png; base64 ,{TEXT}",
        "data:;base64," + TEXT.rstrip("="),
        "data:;base64," + TEXT.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
        "data:;base64," + base64.urlsafe_b64encode(PNG).decode(),
        TEXT,
        WRAPPED,
        list(PNG),
        [byte - 256 if byte > 127 else byte for byte in PNG],
        {"bytes": list(PNG)},
        json.dumps([f"data:;base64,{TEXT}"]),
        [TEXT],
    ],
)
def test_an_image_in_a_value_is_read_however_it_is_written(tmp_path: Path, value: Any) -> None:
    [row] = decoded(lines(tmp_path / "r.jsonl", {"image": value}), tmp_path)
    assert colours(row) == [RED]


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("['red.png', 'green.png']", [RED, GREEN]),
        ("['green.png','red.png']", [GREEN, RED]),
        (f"['{TEXT}', 'green.png']", [RED, GREEN]),
        ("['red.png']", [RED]),
        ("['red.png', green.png]", "missing_image"),
    ],
)
def test_a_list_as_pandas_writes_it_to_csv_is_a_list(tmp_path: Path, cell: str, expected: Any) -> None:
    for name, colour in (("red", RED), ("green", GREEN)):
        (tmp_path / f"{name}.png").write_bytes(encode(colour))
    (tmp_path / "r.csv").write_text(f'image\n"{cell}"\n')
    [row] = decoded({"kind": "csv", "path": str(tmp_path / "r.csv"), "columns": {"image": "image"}}, tmp_path)
    assert colours(row) == expected


def test_url_safe_base64_is_that_of_the_other_alphabet() -> None:
    data = NOISE.getvalue()
    text = base64.urlsafe_b64encode(data).decode()
    assert set("-_") <= set(text)
    assert image_in_text(text) == data


@pytest.mark.parametrize("text", ["/9j/photo.jpg", "iVBORw0KGgo.png", "A" * 80, "iVBORw0KGgo" + "é" * 80, TEXT + "!"])
def test_a_name_is_no_image(text: str) -> None:
    assert image_in_text(text) is None


@pytest.mark.parametrize("value", ["data:;base64,QUJDR", [1, 300], [-200, 1], "data:image/png;base64"])
def test_a_value_that_is_no_bytes_is_a_row_error(tmp_path: Path, value: Any) -> None:
    [row] = decoded(lines(tmp_path / "r.jsonl", {"image": value}), tmp_path)
    assert row["error_type"] == "invalid_value"


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.uint8()), pa.list_(pa.int8()), pa.list_(pa.list_(pa.uint8())), pa.string()]
)
def test_bytes_in_lists_and_text_of_parquet_are_images(tmp_path: Path, kind: pa.DataType) -> None:
    values = np.frombuffer(PNG, np.uint8)
    cell = {pa.list_(pa.int8()): values.view(np.int8).tolist(), pa.string(): TEXT}.get(kind, values.tolist())
    cell = [cell, cell] if kind == pa.list_(pa.list_(pa.uint8())) else cell
    pq.write_table(pa.table({"image": pa.array([cell], kind)}), tmp_path / "r.parquet")
    source = {"kind": "parquet", "path": str(tmp_path), "columns": {"image": "image"}}
    [row] = decoded(source, tmp_path)
    assert colours(row) == [RED] * (2 if kind == pa.list_(pa.list_(pa.uint8())) else 1)


NFC, NFD = (unicodedata.normalize(form, "bilder/é.png") for form in ("NFC", "NFD"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("a.png", "file://localhost{root}/a.png"),
        ("a.png", "FILE://{root}/a.png"),
        ("a.png", "file:{root}/a.png"),
        ("a b.png", "file://{root}/a%20b.png"),
        ("a b.png", "a%20b.png"),
        ("a.png", "a.png "),
        ("a.png", "\ta.png\n"),
        (" a.png", " a.png"),
        ("d/a.png", "d\\a.png"),
        ("d/a.png", ".\\d\\a.png"),
        (NFC, NFD),
        (NFD, NFC),
        ("a%20b.png", "a%20b.png"),
        ("[1].png", "[1].png"),
    ],
)
def test_a_path_is_found_as_other_systems_spell_it(tmp_path: Path, name: str, value: str) -> None:
    root = tmp_path / "root"
    (root / name).parent.mkdir(parents=True)
    (root / name).write_bytes(PNG)
    source = lines(root / "r.jsonl", {"image": value.format(root=root)}) | {"local_roots": [str(root)]}
    [row] = decoded(source, tmp_path)
    assert colours(row) == [RED]


def test_the_name_as_it_is_written_comes_first_and_no_spelling_leaves_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.png").write_bytes(PNG)
    (root / "a%20b.png").write_bytes(encode(GREEN))
    (root / "a b.png").write_bytes(PNG)
    values = ["a%20b.png", "..%2Fsecret.png", "..\\secret.png", "%2e%2e/secret.png", "a%00.png"]
    rows = decoded(lines(root / "r.jsonl", *({"image": value} for value in values)), tmp_path)
    assert [colours(row) for row in rows] == [[GREEN], *["missing_image"] * 4]
    assert len(list(spellings(" ".join([NFD, "%20", "\\", " "])))) <= 24


@pytest.mark.parametrize(
    "uri",
    [
        "http%3A//169.254.169.254/x.png",
        "http%3A%2F%2F127.0.0.1%3A9/x.png",
        "http:\\\\127.0.0.1\\x.png",
        "s3%3A//bucket/x.png",
        "%66ile:///etc/hostname",
        "data%3Aimage/png;base64,AAAA",
    ],
)
def test_no_spelling_of_a_path_has_a_scheme(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    open_url = access.open_url
    monkeypatch.setattr(access, "open_url", lambda url, where: opened.append(url) or open_url(url, where))
    rows = decoded(lines(tmp_path / "r.jsonl", {"image": uri}), tmp_path)
    assert [colours(row) for row in rows] == ["missing_image"]
    assert {access.uri_scheme(url) for url in opened} <= {"", "file"}
    assert not any("etc/hostname" in url for url in opened)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("S3://Bucket/Key", "s3://Bucket/Key"),
        ("s3a://b/k", "s3://b/k"),
        ("s3n://b//k", "s3://b//k"),
        (" HTTP://h/x", "http://h/x"),
        ("FILE:/a", "file:///a"),
        ("file://localhost/a", "file:///a"),
        ("file://host/a", "file://host/a"),
        ("a:b", "a:b"),
        (" a", " a"),
    ],
)
def test_schemes_have_one_spelling(url: str, expected: str) -> None:
    assert access.canonical(url) == expected
    assert access.uri_scheme(url) == access.uri_scheme(expected)


RECORDS = [["image", "ask", "id"], ["red.png", "naïve 猫?", "1"], ["red.png", "second", "2"]]


def joined(separator: str = ",", end: str = "\n") -> str:
    return "".join(separator.join(record) + end for record in RECORDS)


@pytest.mark.parametrize("tail", ["", ".gz"])
@pytest.mark.parametrize(
    "data",
    [
        "\ufeff".encode("utf-16-le") + joined().encode("utf-16-le"),
        "\ufeff".encode("utf-16-be") + joined(end="\r\n").encode("utf-16-be"),
        "\ufeff".encode("utf-32-le") + joined("\t").encode("utf-32-le"),
        joined(end="\r").encode(),
        joined(";").encode(),
        joined("\t").encode(),
        joined("|").encode(),
        b"sep=,\r\n" + joined().encode(),
        b'"sep=;"\n' + joined(";").encode(),
        b"\xef\xbb\xbf" + joined(" , ").replace("red.png ", "red.png").replace("? ", "?").replace(", ", ",").encode(),
    ],
)
def test_csv_of_spreadsheets_is_read_as_they_show_it(tmp_path: Path, data: bytes, tail: str) -> None:
    (tmp_path / "red.png").write_bytes(PNG)
    with pa.output_stream(tmp_path / f"r.csv{tail}", compression="gzip" if tail else None) as file:
        file.write(data)
    source = {"kind": "csv", "path": str(tmp_path), "columns": {"image": "image"}, "id_column": "id"}
    for span_rows in (1, 1000):
        rows = decoded(source | {"span_max_rows": span_rows}, tmp_path, prompt={"text": "{ask}"})
        assert [(row["sample_id"].strip(), text_of(row).strip()) for row in rows] == [
            ("1", "<image>naïve 猫?"),
            ("2", "<image>second"),
        ]
        assert [colours(row) for row in rows] == [[RED], [RED]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q\na;b\nc;d\n", ["a;b", "c;d"]),
        ("q,n\na;b;c,1\nd;e;f,2\n", ["a;b;c", "d;e;f"]),
        ('q;n\n"a;\nb";1\nc;2\n', ["a;\nb", "c"]),
        ("q,n\na,1\nb\n", ["a", "broken_line"]),
    ],
)
def test_a_separator_that_fits_is_not_replaced(tmp_path: Path, text: str, expected: list[str]) -> None:
    (tmp_path / "r.csv").write_text(text)
    rows = decoded({"kind": "csv", "path": str(tmp_path)}, tmp_path, prompt={"text": "{q}"})
    assert [row["error_type"] or text_of(row) for row in rows] == expected


@pytest.mark.parametrize(
    "data",
    [
        "\ufeff".encode("utf-16-be") + b"".join(f'{{"q":"{n}é"}}\n'.encode("utf-16-be") for n in range(5)),
        b"".join(f'{{"q":"{n}é"}}\r'.encode() for n in range(5)),
        b"".join(f'\ufeff{{"q":"{n}é"}}\n'.encode() for n in range(5)),
    ],
)
@pytest.mark.parametrize("range_bytes", [7, 1 << 30])
def test_lines_of_other_encodings_are_read_whatever_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, range_bytes: int
) -> None:
    monkeypatch.setattr("pipeline.manifest.survey.RANGE_BYTES", range_bytes)
    (tmp_path / "r.jsonl").write_bytes(data)
    for span_rows in (1, 2, 1000):
        source = {"kind": "jsonl", "path": str(tmp_path), "span_max_rows": span_rows}
        rows = decoded(source, tmp_path, prompt={"text": "{q}"})
        assert [text_of(row) for row in rows] == [f"{n}é" for n in range(5)]


def test_text_that_is_invalid_in_its_encoding_is_an_error_row(tmp_path: Path) -> None:
    bad = "\ufeff".encode("utf-16-le") + '{"q":"'.encode("utf-16-le") + b"\x00\xd8" + '"}\n'.encode("utf-16-le")
    (tmp_path / "r.jsonl").write_bytes(bad + '{"q":"good"}\n'.encode("utf-16-le"))
    rows = decoded({"kind": "jsonl", "path": str(tmp_path)}, tmp_path, prompt={"text": "{q}"})
    assert [row["error_type"] or text_of(row) for row in rows] == ["broken_line", "good"]


def test_a_row_of_vlmevalkit_may_refer_to_the_image_of_an_earlier_one(tmp_path: Path) -> None:
    green = base64.b64encode(encode(GREEN)).decode()
    rows = [("0", TEXT, "a"), ("7", green, "b"), ("8", "0", "c"), ("9", "7", "d"), ("10", "99", "e"), ("11", "8", "f")]
    (tmp_path / "r.tsv").write_text("index\timage\tq\n" + "".join("\t".join(row) + "\n" for row in rows))
    for span_rows in (1, 1000):
        source = {"kind": "csv", "path": str(tmp_path), "columns": {"image": "image"}, "span_max_rows": span_rows}
        found = decoded(source, tmp_path, prompt={"text": "{q}"})
        assert [colours(row) for row in found] == [[RED], [GREEN], [RED], [GREEN], "missing_image", "missing_image"]


def test_a_line_of_csv_may_hold_a_large_image(tmp_path: Path) -> None:
    text = base64.b64encode(PNG + bytes(2 * 1024 * 1024)).decode()
    assert len(text) > Csv().max_quoted_bytes
    (tmp_path / "r.csv").write_text(f"image,q\n{text},x\n")
    [row] = decoded({"kind": "csv", "path": str(tmp_path), "columns": {"image": "image"}}, tmp_path)
    assert colours(row) == [RED]


@pytest.mark.parametrize(
    ("prompt", "ask", "expected"),
    [
        ("{ask}", "", "missing_column_value"),
        ("{ask}", " ", "missing_column_value"),
        ("{ask}{image}", "", "red.png"),
        ("Describe. {ask}", "", "Describe. "),
    ],
)
def test_a_prompt_that_is_blank_is_missing(tmp_path: Path, prompt: str, ask: str, expected: str) -> None:
    (tmp_path / "r.csv").write_text(f"image,ask\nred.png,{ask}\n")
    [row] = decoded({"kind": "csv", "path": str(tmp_path)}, tmp_path, prompt={"text": prompt})
    assert (row["error_type"] or text_of(row)) == expected


IDS = [("1.0", "1"), ("-2.00", "-2"), ("1.5", "1.5"), ("1e3", "1e3"), ("007", "007"), ("v1.0", "v1.0")]


def test_ids_with_an_empty_fraction_are_integers(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("id,q\n" + "".join(f"{id_},x\n" for id_, _ in IDS))
    source = {"kind": "csv", "path": str(tmp_path), "id_column": "id"}
    assert [row["sample_id"] for row in decoded(source, tmp_path)] == [expected for _, expected in IDS]
    rows = decoded(source | {"integral_ids": False}, tmp_path)
    assert [row["sample_id"] for row in rows] == [id_ for id_, _ in IDS]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (pa.array([1.0, 2.0]), ["1", "2"]),
        (pa.array([1.0, 2.5]), ["1", "invalid_value"]),
        (pa.array([2.0**53, float("nan")]), ["invalid_value"] * 2),
        (pa.array([Decimal(12345678901234567890), Decimal(3)], pa.decimal128(38, 0)), ["12345678901234567890", "3"]),
        (pa.array([Decimal("1.00"), Decimal("1.50")], pa.decimal128(9, 2)), ["1", "invalid_value"]),
    ],
)
def test_numbers_without_a_fraction_are_ids(tmp_path: Path, ids: pa.Array, expected: list[str]) -> None:
    pq.write_table(pa.table({"id": ids}), tmp_path / "r.parquet")
    rows = decoded({"kind": "parquet", "path": str(tmp_path), "id_column": "id"}, tmp_path)
    assert [row["error_type"] or row["sample_id"] for row in rows] == expected


def test_floats_of_json_are_ids(tmp_path: Path) -> None:
    source = lines(tmp_path / "r.jsonl", {"id": 1.0}, {"id": 2.5}, {"id": 3}) | {"columns": {}, "id_column": "id"}
    found = [row["error_type"] or row["sample_id"] for row in decoded(source, tmp_path)]
    assert found == ["1", "invalid_value", "3"]


NESTED = {"meta": {"image": {"url": "red.png"}, "ask": "what?", "id": 7}, "a": 1}


def write_nested(folder: Path, kind: str) -> None:
    if kind == "jsonl":
        (folder / "r.jsonl").write_text(json.dumps(NESTED))
    elif kind == "csv":
        (folder / "r.csv").write_text('meta,a\n"' + json.dumps(NESTED["meta"]).replace('"', '""') + '",1\n')
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist([NESTED]), folder / "r.parquet")
    elif kind == "hf":
        table = pa.Table.from_pylist([NESTED])
        with pa.ipc.new_stream(str(folder / "r.arrow"), table.schema) as writer:
            writer.write_table(table)
    else:
        members = [("1.json", json.dumps(NESTED).encode()), ("1.png", PNG)]
        (folder / "r.tar").write_bytes(tar_bytes(members))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "hf", "webdataset"])
def test_names_with_dots_name_values_inside_objects_in_every_format(tmp_path: Path, kind: str) -> None:
    (tmp_path / "red.png").write_bytes(PNG)
    write_nested(tmp_path, kind)
    source = {"kind": kind, "path": str(tmp_path), "id_column": "meta.id"}
    if kind != "webdataset":
        source["columns"] = {"image": "meta.image.url"}
    rows = decoded(source, tmp_path, prompt={"text": "{meta.ask}"}, sink={"keep_columns": ["meta.image.url"]})
    [row] = rows
    assert (row["sample_id"], text_of(row), colours(row)) == ("7", "<image>what?", [RED])
    assert row["meta.image.url"] == "red.png"
    if kind != "csv":  # a column of CSV may hold any text
        with pytest.raises(ConfigError, match=r"'meta\.nope' is not in"):
            decoded(source, tmp_path, prompt={"text": "{meta.nope}"})


def test_a_column_of_the_whole_name_comes_first(tmp_path: Path) -> None:
    source = lines(tmp_path / "r.jsonl", {"a.b": "whole", "a": {"b": "inner"}}) | {"columns": {}}
    assert text_of(decoded(source, tmp_path, prompt={"text": "{a.b}"})[0]) == "whole"


def test_an_openai_batch_file_is_a_source(tmp_path: Path) -> None:
    url = {"url": f"data:image/png;base64,{TEXT}", "detail": "low"}
    content = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": url}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 9}
    row = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source = lines(tmp_path / "r.jsonl", row) | {"columns": {}, "id_column": "custom_id"}
    columns = {"messages": "body.messages", "max_new_tokens": "body.max_tokens"}
    [found] = decoded(source, tmp_path, prompt=None, columns=columns)
    assert (found["sample_id"], text_of(found), colours(found)) == ("r-1", "what?<image>", [RED])
    assert json.loads(found["sampling"])["max_new_tokens"] == 9


def turns(text: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": text}, {"from": "gpt", "value": "the old answer"}]


def test_rows_without_an_image_are_asked_as_text_where_they_say_so(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(PNG)
    source = lines(
        tmp_path / "r.jsonl",
        {"conversations": turns("Hi?")},
        {"conversations": turns("Hi?"), "image": None},
        {"conversations": turns("<image>\nWhat?"), "image": "red.png"},
        {"conversations": turns("<image>\nWhat?")},
        {"conversations": turns("Hi?"), "image": [None]},
    )
    rows = decoded(source, tmp_path, prompt=None, columns={"messages": "conversations"})
    found = [row["error_type"] or text_of(row) for row in rows]
    assert found == ["Hi?", "Hi?", "<image>What?", "invalid_value", "missing_image"]
    old = source | {"text_only_rows": "error", "final_answers": "error"}
    rows = decoded(old, tmp_path, prompt=None, columns={"messages": "conversations"})
    assert [row["error_type"] for row in rows] == [
        "missing_image", "missing_image", "invalid_value", "missing_image", "missing_image"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("auto", ["What?", "missing_image", "missing_image"]),
        ("always", ["What?"] * 3),
        ("error", ["missing_image"] * 3),
    ],
)
def test_templates_are_asked_without_an_image_by_rule(tmp_path: Path, rule: str, expected: list[str]) -> None:
    source = lines(tmp_path / "r.jsonl", {"image": []}, {"image": None}, {"image": ""}) | {"text_only_rows": rule}
    assert [row["error_type"] or text_of(row) for row in decoded(source, tmp_path)] == expected


def test_files_of_hugging_faces_cache_are_links_to_their_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "datasets--x"
    snapshot = repository / "snapshots/abc/data"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    pq.write_table(pa.table({"image": [PNG, b"a.png"]}), repository / "blobs/1")
    os.symlink("../../../blobs/1", snapshot / "train.parquet")
    source = {"kind": "parquet", "path": str(snapshot.parent), "columns": {"image": "image"}}
    assert colours(decoded(source, tmp_path)[0]) == [RED]
    (tmp_path / "elsewhere").write_bytes((repository / "blobs/1").read_bytes())
    os.symlink(tmp_path / "elsewhere", snapshot / "other.parquet")
    with pytest.raises(ConfigError, match="a link that leaves"):
        decoded(source, tmp_path)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("s-{000..002}.tar", ["s-000.tar", "s-001.tar", "s-002.tar"]),
        ("{a,b}/s-{9..10}.tar", ["a/s-9.tar", "a/s-10.tar", "b/s-9.tar", "b/s-10.tar"]),
        ("s-{0..1}.tar", ["s-{0..1}.tar"]),
    ],
)
def test_braces_name_shards_as_in_webdataset(tmp_path: Path, pattern: str, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(tar_bytes([("1.png", PNG)]))
    rows = decoded({"kind": "webdataset", "path": str(tmp_path / pattern)}, tmp_path)
    assert sorted(row["sample_id"] for row in rows) == sorted(f"{name}#0" for name in names)


def test_braces_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the braces name 1,000,000,000 paths"):
        decoded({"kind": "webdataset", "path": str(tmp_path / "{0..999999999}.tar")}, tmp_path)
