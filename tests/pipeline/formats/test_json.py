"""Arrays of JSON and files of annotations: every value is one row, wherever spans begin, whatever is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.load import ConfigError
from configs.schema import PromptConfig
from configs.source import SourceConfig
from pipeline.formats import coco, json_values, lines
from pipeline.formats.json import KIND, Json
from pipeline.formats.uris import Fetcher
from pipeline.manifest import freezing
from pipeline.prompts.row_options import PromptOptions
from tests.pipeline.attempts import at_rest, job, rows_in, run
from tests.pipeline.formats.shards import encode, outcomes, read_all
from tests.pipeline.formats.test_foreign_rows import GREEN, RED, colours, decoded, text_of
from tests.pipeline.formats.test_lines import compressed
from tests.pipeline.inputs import clips

PROMPT = PromptOptions(PromptConfig(text="{v}"))


def source_of(path: Path | str, kind: str = "json", **options: Any) -> SourceConfig:
    return SourceConfig.model_validate({"kind": kind, "path": str(path), **options})


SCALARS = st.one_of(
    st.sampled_from(['"', "\\", '\\"', "[{", "}],", "é猫\n", "", "]", "\u2028"]),
    st.none(),
    st.booleans(),
    st.integers(),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS.map(str), inner))
ROWS = st.lists(st.builds(lambda value: {"v": value}, VALUES), min_size=1, max_size=8)
LAYOUTS = ("array", "lines", "sequence", "coco", "coco, images last")


def written(rows: list[dict[str, Any]], layout: str, indent: int | None, is_ascii: bool) -> bytes:
    """The rows in a layout."""

    def dumped(value: Any, indent: int | None = indent) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=is_ascii)

    objects: dict[str, Any] = {"images": rows, "info": {"images": [1]}, "annotations": [{"images": [{"v": 2}]}]}
    if layout == "coco, images last":
        objects = dict(reversed(objects.items()))
    text = {
        "array": lambda: dumped(rows),
        "lines": lambda: "\n".join(dumped(row, None) for row in rows),
        "sequence": lambda: "\n".join(dumped(row, 1) for row in rows),
        "coco": lambda: dumped(objects),
        "coco, images last": lambda: dumped(objects),
    }[layout]()
    return text.encode()


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    ROWS,
    st.sampled_from(LAYOUTS),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.sampled_from([b"", lines.BOM, b" \n\t"]),
    *(st.integers(1, limit) for limit in (4, 60, 9)),
)
def test_every_value_is_one_row_wherever_spans_begin(
    rows, layout, indent, is_ascii, before, max_rows, max_bytes, chunk
) -> None:
    data = before + written(rows, layout, indent, is_ascii) + b"\n"
    fsspec.filesystem("memory").pipe_file("/values/a.json", data)
    source = source_of(
        "memory://values/a.json",
        layout.split(",")[0] if layout.startswith("coco") else "json",
        span_max_rows=max_rows,
        span_max_bytes=max_bytes,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "CHUNK_BYTES", chunk)
        table = read_all(source, "{v}")
    assert outcomes(table) == {f"a.json#{index}": "" for index in range(len(rows))}
    assert [json.loads(fields) for fields in table["fields"].to_pylist()] == rows


def test_an_array_in_one_line_is_split_into_spans(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"v": f"{number:03}" * 1000} for number in range(40)]))
    [facts] = freezing.freeze(source_of(tmp_path, span_max_rows=7), PROMPT).files.to_pylist()
    assert facts["row_group_rows"] == [7, 7, 7, 7, 7, 5]
    assert sum(facts["row_group_bytes"]) == path.stat().st_size
    assert not KIND.can_split("a.json")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_llava_rows_have_their_images_below_the_media_root(tmp_path: Path, suffix: str) -> None:
    for name, colour in (("a/1.png", RED), ("a/2.png", GREEN)):
        (tmp_path / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pictures" / name).write_bytes(encode(colour))
    answer = {"from": "gpt", "value": "An old answer."}
    rows = [
        {
            "id": "one",
            "image": "a/1.png",
            "conversations": [{"from": "human", "value": '<image>\nWhat "is" this?'}, answer],
        },
        {
            "id": "two",
            "image": ["a/2.png", "a/1.png"],
            "conversations": [{"from": "human", "value": "First <image> then <image>"}, answer],
        },
        {"id": "text", "conversations": [{"from": "human", "value": "No image?"}, answer]},
        {"id": "outside", "image": "../data/x.png", "conversations": [{"from": "human", "value": "<image>"}, answer]},
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x.png").write_bytes(encode())
    (tmp_path / f"data/llava.json{suffix}").write_bytes(compressed(json.dumps(rows, indent=2).encode(), suffix))
    source = {"kind": "json", "path": str(tmp_path / "data"), "columns": {"image": "image"}, "id_column": "id"}
    sections: dict[str, Any] = {"prompt": None, "columns": {"messages": "conversations"}}
    one, two, text, outside = decoded(source | {"media_root": "../pictures"}, tmp_path, **sections)
    assert [row["sample_id"] for row in (one, two, text, outside)] == ["one", "two", "text", "outside"]
    assert (colours(one), text_of(one)) == ([RED], '<image>What "is" this?')
    assert (colours(two), text_of(two)) == ([GREEN, RED], "First <image> then <image>")
    assert (colours(text), text_of(text)) == ([], "No image?")
    assert outside["error_type"] == "uri_refused"
    assert "it leaves source.media_root" in outside["error_message"]
    again = decoded(source | {"media_root": str(tmp_path / "pictures")}, tmp_path, **sections)
    assert colours(again[1]) == [GREEN, RED]
    kept = decoded(source | {"media_root": "../pictures", "final_answers": "error"}, tmp_path, **sections)
    assert [row["error_type"] for row in kept[:3]] == ["invalid_value"] * 3


def test_a_media_root_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"image": "x.png"}]')
    with pytest.raises(ConfigError, match=r"source\.media_root: .*/pictures is no folder; it is relative to"):
        read_all(source_of(tmp_path, media_root="pictures", columns={"image": "image"}))


COCO = {
    "info": {"year": 2017},
    "images": [{"id": number, "file_name": f"{number}.png"} for number in (7, 8, 9)],
    "annotations": [
        {"id": 1, "image_id": 8, "caption": "A cat."},
        {"id": 2, "image_id": 7, "caption": 'A "dog".'},
        {"id": 3, "image_id": 8, "caption": "Two cats."},
        {"id": 4, "image_id": 9, "bbox": [1, 2, 3, 4]},
    ],
}


def test_an_image_of_coco_is_one_row_with_its_captions(tmp_path: Path) -> None:
    for number, colour in ((7, RED), (8, GREEN)):
        (tmp_path / "val" / f"{number}.png").parent.mkdir(exist_ok=True)
        (tmp_path / "val" / f"{number}.png").write_bytes(encode(colour))
    (tmp_path / "captions.json").write_text(json.dumps(COCO))
    source = {"kind": "coco", "path": str(tmp_path / "captions.json"), "columns": {"image": "file_name"}}
    source |= {"id_column": "id", "media_root": "val", "span_max_rows": 1}
    rows = decoded(source, tmp_path, prompt={"text": "{captions}"}, sink={"keep_columns": ["captions", "file_name"]})
    assert [(row["sample_id"], colours(row), row["captions"], row["file_name"]) for row in rows] == [
        ("7", [RED], '["A \\"dog\\"."]', "7.png"),
        ("8", [GREEN], '["A cat.", "Two cats."]', "8.png"),
        ("9", "missing_image", "[]", "9.png"),
    ]
    assert text_of(rows[1]) == '<image>["A cat.", "Two cats."]'


def test_captions_that_cannot_be_joined_are_refused_before_the_job(tmp_path: Path, monkeypatch: Any) -> None:
    source = source_of(tmp_path, "coco")
    (tmp_path / "a.json").write_text(json.dumps(COCO).replace('"caption": "Two', '"caption" "Two'))
    with pytest.raises(ConfigError, match=r"prompt.text: a.json: its captions cannot be read: the value at byte \d+"):
        read_all(source, "{captions}")
    (tmp_path / "a.json").write_text(json.dumps({"images": COCO["images"]}, indent=1))
    with pytest.raises(ConfigError, match="no JSON object with a list 'annotations'"):
        read_all(source, "{captions}")
    assert read_all(source, "{file_name}").num_rows == 3
    (tmp_path / "a.json").write_text(json.dumps(COCO, indent=2))
    monkeypatch.setattr(coco, "MAX_CAPTION_BYTES", 2 * coco.CAPTION_BYTES + 14)
    with pytest.raises(ConfigError, match="they take more than 414 bytes"):
        read_all(source, "{captions}")
    monkeypatch.setattr(coco, "MAX_CAPTION_BYTES", 3 * coco.CAPTION_BYTES + 23)
    assert read_all(source, "{captions}").num_rows == 3


ARRAY = '[{"v": 0},\n {"v": 1},\n {"v": 2},\n {"v": 3}]'


@pytest.mark.parametrize(
    ("old", "new", "codes", "message"),
    [
        ('"v": 1', '"v" 1', ["", "broken_line", "", ""], "the value at byte 12 (line 2) is no JSON: "),
        ('{"v": 2}', "7", ["", "", "broken_line", ""], "the value at byte 23 (line 3) is no JSON object but a number"),
        ('{"v": 2}', f'{{"v": "{"x" * 80}"}}', ["", "", "broken_line", ""], "(line 3) has more than 64 bytes"),
        ("2},\n", "2}\n", ["", "", "broken_line"], "the value at byte 23 (line 3) is no JSON: Extra data"),
        (', \n {"v": 3}]', ",", ["", "", "", "broken_shard"], ""),
        ('{"v": 3}]', '{"v": 3', ["", "", "", "broken_shard"], "ends inside the value at byte 34 (line 4)"),
        ('{"v": 2},', '{"v": [2},', ["", "", "broken_shard"], "ends inside the value at byte 23 (line 3)"),
        ('{"v": 2},', '{"v": "2},', ["", "", "broken_shard"], "ends inside the value at byte 23 (line 3)"),
        ('{"v": 2},', '{"v": 2}},', ["", "", "", "broken_shard"], "more behind the end of the array"),
        ("3}]", '3}] [{"v": 4}]', ["", "", "", "", "broken_shard"], "several arrays in one file"),
        ("3}]", "3}, ]", ["", "", "", ""], ""),
    ],
)
def test_damage_of_an_array_is_an_error_row_with_its_position(
    tmp_path: Path, monkeypatch: Any, old: str, new: str, codes: list[str], message: str
) -> None:
    monkeypatch.setattr(Json, "max_bytes", 64)
    text = ARRAY.replace(old.replace(", \n", ",\n"), new)
    assert text != ARRAY
    (tmp_path / "a.json").write_text(text)
    table = read_all(source_of(tmp_path, span_max_rows=2), "{v}")
    assert list(outcomes(table).values()) == codes
    assert message in "".join(table["error_message"].to_pylist())
    assert [json.loads(fields)["v"] for fields, code in zip(table["fields"].to_pylist(), codes) if not code] == [
        number for number, code in enumerate(codes) if not code
    ]


def test_a_value_of_the_largest_size_is_read_and_a_larger_one_is_an_error_row(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Json, "max_bytes", 20)
    monkeypatch.setattr(json_values, "CHUNK_BYTES", 7)
    (tmp_path / "a.json").write_text('[    {"v":"0123456789ab"},{"v":"0123456789abc"},{"v":1}]')
    table = read_all(source_of(tmp_path), "{v}")
    assert list(outcomes(table).values()) == ["", "broken_line", ""]


def test_an_array_is_resumed_without_reading_done_rows_again(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.json").write_text(json.dumps([{"id": f"r{number}", "ask": "?"} for number in range(30)]))
    config = job(
        {"kind": "json", "path": str(tmp_path / "in"), "id_column": "id", "span_max_rows": 4},
        tmp_path / "out",
        prompt={"text": "{ask}"},
    )
    run(config, num_batches=3)
    run(config)
    good, bad = at_rest(tmp_path / "out")
    assert (good, bad) == ({f"r{number}" for number in range(30)}, set())
    assert {row["attempt"] for row in rows_in(tmp_path / "out/data").values()} == {1, 2}


def test_an_array_is_no_file_of_lines(tmp_path: Path) -> None:
    for text in ('[{"v": 1}]', '[\n{"v": 1},\n{"v": 2}\n]'):
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(
            ConfigError, match=r"source\.kind: a\.jsonl is a JSON array; source.kind 'json' reads these"
        ):
            read_all(source_of(tmp_path, "jsonl"), "x")
    (tmp_path / "a.jsonl").write_text('[1]\n{"v": 1}\n')
    assert list(outcomes(read_all(source_of(tmp_path, "jsonl"), "{v}")).values()) == ["broken_line", ""]


def test_lines_that_are_named_json_keep_their_neighbours(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('{"v": 0}\n{"v": [1}\n{"v": 2}\n')
    table = read_all(source_of(tmp_path), "{v}")
    assert list(outcomes(table).values()) == ["", "broken_line", ""]
    assert table["error_message"].to_pylist()[1].startswith("line 2 is no JSON")


@pytest.mark.parametrize("kind", ["jsonl", "hf"])
def test_lines_that_are_named_json_are_read_in_folders_without_other_files(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "red.png").write_bytes(encode(RED))
    (folder / "train.json").write_text('{"image": "red.png", "text": "a"}\n{"image": "red.png", "text": "b"}\n')
    if kind == "hf":
        (folder / "dataset_info.json").write_text('{"citation": ""}')
    source = {"kind": kind, "path": str(folder), "columns": {"image": "image"}}
    rows = decoded(source, tmp_path, prompt={"text": "{text}"})
    assert [(row["sample_id"], colours(row), text_of(row)) for row in rows] == [
        ("train.json#0", [RED], "<image>a"),
        ("train.json#1", [RED], "<image>b"),
    ]
    (folder / "more.jsonl").write_text('{"image": "red.png", "text": "c"}\n')
    assert [row["sample_id"] for row in decoded(source, tmp_path, prompt={"text": "{text}"})] == ["more.jsonl#0"]


def test_arrays_are_rows_of_hugging_face_folders(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('[{"text": "a"}, {"text": "b"}]')
    assert list(outcomes(read_all(source_of(tmp_path, "hf"), "{text}")).values()) == ["", ""]
    (tmp_path / "x.tsv").write_text("text\na\n")
    with pytest.raises(ConfigError, match=r"source\.path: files '\.tsv' are none of \.arrow, "):
        read_all(source_of(tmp_path / "*.tsv", "hf"), "{text}")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_arrays_of_other_encodings_are_read_wherever_spans_begin(tmp_path: Path, encoding: str) -> None:
    rows = [{"v": f"naïve 猫 {number}"} for number in range(9)]
    text = json.dumps(rows, ensure_ascii=False, indent=1)
    (tmp_path / "a.json").write_text("\ufeff" * encoding.endswith("be") + text, encoding=encoding)
    table = read_all(source_of(tmp_path, span_max_rows=2), "{v}")
    assert [json.loads(fields) for fields in table["fields"].to_pylist()] == rows


@pytest.mark.parametrize("text", ["[]", " [\n]\n", "", " \n"])
def test_a_file_without_values_has_no_rows(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match="hold no rows"):
        read_all(source_of(tmp_path), "x")
    (tmp_path / "b.json").write_text('[{"v": 1}]')
    assert outcomes(read_all(source_of(tmp_path), "{v}")) == {"b.json#0": ""}


def test_rows_of_llava_video_show_their_videos_at_the_marks_of_images(tmp_path: Path) -> None:
    for name, data in clips().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    turns = [{"from": "human", "value": "<image>\nWhat happens?"}, {"from": "gpt", "value": "Old."}]
    (tmp_path / "a.json").write_text(json.dumps([{"video": name, "conversations": turns} for name in clips()]))
    source: dict[str, Any] = {"kind": "json", "path": str(tmp_path / "a.json"), "video": {"num_frames": 2}}
    source["columns"] = {"video": "video"}
    rows = decoded(source, tmp_path, prompt=None, columns={"messages": "conversations"})
    assert [(text_of(row), len(row["videos"])) for row in rows] == [("<video>What happens?", 1)] * 2


@pytest.mark.parametrize(
    ("root", "given", "expected"),
    [
        ("/data/ann", None, "/data/ann"),
        ("/data/ann", "../val", "/data/val"),
        ("/data/ann", "/pictures", "/pictures"),
        ("/data/ann", "s3://b/c", "s3://b/c"),
        ("s3://b/data/ann", "../val", "s3://b/data/val"),
        ("s3://b", "val", "s3://b/val"),
        ("http://h/data", "val/", "http://h/data/val"),
    ],
)
def test_a_media_root_is_relative_to_the_source_root(root: str, given: str | None, expected: str) -> None:
    assert Fetcher(source_of("x", media_root=given), root).media_root == expected
