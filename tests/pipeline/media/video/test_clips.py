"""Videos through the stages READ and DECODED, from every place where a row can have one."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.load import ConfigError
from configs.schema import PromptConfig
from configs.source import SourceConfig
from pipeline.manifest import freezing
from pipeline.manifest.datasource import read_first
from pipeline.media import image_decoding
from pipeline.media.video import clips
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows import schemas
from tests.pipeline.media.video.files import encode_sound, encode_video, number_in

PROMPT = PromptConfig(text="What moves?")
VIDEO = {"num_frames": 3}
LONG = encode_video(48, codec="libx264", options={"preset": "ultrafast"})
SHORT = encode_video(6, first=100)


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left():
    yield
    clips.close_worker()


def decoded(
    folder: Path, kind: str, prompt: PromptConfig = PROMPT, keep: tuple[str, ...] = (), **options: Any
) -> pa.Table:
    """All rows of a source as the actor would get them."""
    source = SourceConfig(kind=kind, path=str(folder), **{"video": VIDEO, **options})
    frozen = freezing.freeze(source, PromptOptions(prompt), keep)
    fields = tuple(freezing.needs_of(source, PromptOptions(prompt), keep).fields)
    table = read_first(source, frozen, fields, 10**6)
    assert table.schema.equals(schemas.read_schema(frozen.keep), check_metadata=True)
    made = image_decoding.decode_table(
        table, image_decoding.DecodeOptions.of(source, frozen.root, PromptOptions(prompt))
    )
    assert made.schema.equals(schemas.decoded_schema(frozen.keep), check_metadata=True)
    return made


def numbers(table: pa.Table) -> list[list[list[int]]]:
    """By row, by video: the numbers that its frames show."""
    shown = []
    for cell in table["videos"].to_pylist():
        shape = [(clip["num_frames"], clip["height"], clip["width"], 3) for clip in cell]
        frames = [np.frombuffer(clip["rgb"], np.uint8).reshape(size) for clip, size in zip(cell, shape, strict=True)]
        shown.append([[number_in(frame) for frame in clip] for clip in frames])
    return shown


def codes(table: pa.Table) -> list[str]:
    return table["error_type"].to_pylist()


def test_files_of_a_folder_are_one_row_each_and_bad_ones_keep_to_their_row(tmp_path) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.mp4").write_bytes(LONG)
    (folder / "b.mov").write_bytes(b"no video at all")
    (folder / "c.mkv").write_bytes(b"")
    (folder / "deep" / "d.MP4").write_bytes(SHORT)
    (folder / "e.m4v").write_bytes(encode_sound())
    (folder / "notes.txt").write_text("not taken")
    table = decoded(folder, "videos")
    assert table["sample_id"].to_pylist() == ["a.mp4#0", "b.mov#0", "c.mkv#0", "deep/d.MP4#0", "e.m4v#0"]
    assert codes(table) == ["", "not_a_video", "not_a_video", "", "no_video_stream"]
    assert numbers(table) == [[[0, 24, 47]], [], [], [[100, 102, 105]], []]
    assert table["clip_index"].to_pylist() == [0, None, None, 0, None]
    assert table["num_clips"].to_pylist() == [1, None, None, 1, None]
    assert table["clip_end_s"].to_pylist() == [2.0, None, None, 0.25, None]
    first = json.loads(table["messages"][0].as_py())
    assert first == [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What moves?"}]}]
    assert table["messages"][1].as_py() == ""


def test_windows_are_rows_of_their_own_and_neighbours_keep_their_order(tmp_path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(LONG)
    (folder / "b.mp4").write_bytes(b"?")
    (folder / "c.mp4").write_bytes(SHORT)
    table = decoded(folder, "videos", video={"num_frames": 2, "clip_s": 0.75})
    ids = ["a.mp4#0@0-0.75", "a.mp4#0@0.75-1.5", "a.mp4#0@1.5-2", "b.mp4#0", "c.mp4#0@0-0.25"]
    assert table["sample_id"].to_pylist() == ids
    assert table["row_index"].to_pylist() == [0] * 5
    assert table["source"].to_pylist() == ["a.mp4"] * 3 + ["b.mp4", "c.mp4"]
    assert table["clip_index"].to_pylist() == [0, 1, 2, None, 0]
    assert table["num_clips"].to_pylist() == [3, 3, 3, None, 1]
    assert table["clip_start_s"].to_pylist() == [0.0, 0.75, 1.5, None, 0.0]
    assert numbers(table) == [[[0, 17]], [[18, 35]], [[36, 47]], [], [[100, 105]]]
    assert [cell[0]["timestamps_s"][0] for cell in table["videos"].to_pylist() if cell] == [0.0] * 4


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> None:
    with tarfile.open(path, mode) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("compressed", [False, True])
def test_videos_of_an_uncompressed_tar_are_read_in_place(compressed, tmp_path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    members = {"1.mp4": LONG, "1.txt": b"one", "2.mp4": SHORT[:-200], "3.json": b"{}", "4.webm": SHORT, "4.png": PNG}
    name = "shard.tar.gz" if compressed else "shard.tar"
    write_tar(folder / name, members, "w:gz" if compressed else "w")
    source = SourceConfig(kind="webdataset", path=str(folder), video=VIDEO)
    frozen = freezing.freeze(source, PromptOptions(PROMPT), ())
    cells = read_first(source, frozen, (), 100)["videos"].to_pylist()
    assert [[ref["bytes"] is None for ref in cell] for cell in cells] == [[not compressed]] * 2 + [[], [not compressed]]
    table = decoded(folder, "webdataset")
    assert codes(table) == ["", "broken_video", "missing_image", ""]
    assert numbers(table) == [[[0, 24, 47]], [], [], [[100, 102, 105]]]
    kinds = [
        [part["type"] for part in json.loads(text)[0]["content"]] for text in table["messages"].to_pylist() if text
    ]
    assert kinds == [["video", "text"], ["image", "video", "text"]]


def encode_png() -> bytes:
    from tests.pipeline.formats.shards import encode

    return encode("red")


PNG = encode_png()


def test_a_parquet_column_holds_bytes_uris_or_both_and_several_in_a_list(tmp_path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "there.mp4").write_bytes(LONG)
    cells = [
        [{"bytes": SHORT, "path": None}],
        [{"bytes": None, "path": "there.mp4"}],
        [{"bytes": SHORT, "path": None}, {"bytes": LONG, "path": None}],
        [{"bytes": None, "path": "gone.mp4"}],
        [{"bytes": SHORT, "path": None}, {"bytes": b"junk", "path": None}],
        [],
        [{"bytes": None, "path": "../outside.mp4"}],
        [{"bytes": None, "path": "/etc/passwd"}],
        [{"bytes": None, "path": "https://example.test/x.mp4"}],
    ]
    pq.write_table(pa.table({"v": cells, "n": list(range(9))}), folder / "rows.parquet")
    source = folder / "rows.parquet"
    table = decoded(source, "parquet", keep=("n",), columns={"video": "v"})
    assert codes(table) == [
        *["", "", "", "missing_video", "not_a_video", ""],
        *["uri_refused", "uri_refused", "uri_refused"],
    ]
    assert table["error_message"][4].as_py().startswith("video 2 of 2: ")
    assert numbers(table)[:3] == [[[100, 102, 105]], [[0, 24, 47]], [[100, 102, 105], [0, 24, 47]]]
    assert table["clip_index"].to_pylist()[:3] == [0, 0, None]
    assert table["n"].to_pylist() == list(range(9))
    cut = decoded(source, "parquet", keep=("n",), columns={"video": "v"}, video={"num_frames": 2, "clip_s": 1.0})
    assert codes(cut)[:4] == ["", "", "", "invalid_value"]
    assert cut["n"].to_pylist()[:4] == [0, 1, 1, 2]


def test_jsonl_and_csv_name_videos_by_uri_with_the_schemes_of_the_job(tmp_path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "x.mp4").write_bytes(SHORT)
    data = "data:video/mp4;base64," + base64.b64encode(SHORT).decode()
    lines = [{"v": "x.mp4"}, {"v": ["x.mp4", data]}, {"v": None}, {"v": 7}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    table = decoded(folder / "rows.jsonl", "jsonl", columns={"video": "v"}, uri_schemes=("file", "data"))
    assert codes(table) == ["", "", "missing_video", "invalid_value"]
    assert numbers(table)[1] == [[100, 102, 105]] * 2
    with (folder / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["v"], ["x.mp4"], [data], [str(folder / "x.mp4")]])
    table = decoded(folder / "rows.csv", "csv", columns={"video": "v"}, uri_schemes=("data",))
    assert codes(table) == ["", "", "uri_refused"]


def test_videos_that_are_too_large_to_fetch_have_their_own_error(tmp_path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(LONG)
    (folder / "b.mp4").write_bytes(SHORT)
    assert len(LONG) > len(SHORT)
    small = {"num_frames": 2, "max_video_bytes": len(SHORT)}
    assert codes(decoded(folder, "videos", video=small)) == ["video_too_large", ""]
    write_tar(tmp_path / "s.tar", {"a.mp4": LONG, "b.mp4": SHORT})
    assert codes(decoded(tmp_path / "s.tar", "webdataset", video=small)) == ["video_too_large", ""]


def test_deleted_and_non_regular_files_are_row_errors(tmp_path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(SHORT)
    (folder / "b.mp4").write_bytes(SHORT)
    source = SourceConfig(kind="videos", path=str(folder), video=VIDEO)
    frozen = freezing.freeze(source, PromptOptions(PROMPT), ())
    (folder / "a.mp4").unlink()
    os.mkfifo(folder / "a.mp4")
    (folder / "b.mp4").unlink()
    table = read_first(source, frozen, (), 10)
    made = image_decoding.decode_table(
        table, image_decoding.DecodeOptions.of(source, frozen.root, PromptOptions(PROMPT))
    )
    assert codes(made) == ["unreadable_video", "missing_video"]


def test_remote_files_are_copied_while_they_are_decoded_and_then_gone(tmp_path, monkeypatch) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe("/bucket/a.mp4", LONG)
    store.pipe("/bucket/b.mp4", SHORT + bytes(200))
    monkeypatch.setattr(clips.tempfile, "tempdir", str(tmp_path))
    source = SourceConfig(kind="videos", path="memory://bucket/*.mp4", video={**VIDEO, "max_video_bytes": len(LONG)})
    options = clips.MediaOptions.of(source, "memory://bucket")
    refs = [{"bytes": None, "uri": None, "path": name, "offset": None, "size": None} for name in ("a.mp4", "b.mp4")]
    for ref in refs:
        with clips.opened(ref, options) as path:
            assert Path(path).read_bytes() == store.cat("/bucket/" + ref["path"])
    part = {**refs[0], "offset": 10, "size": 20}
    with clips.opened(part, options) as path:
        assert Path(path).read_bytes() == LONG[10:30]
    with pytest.raises(schemas.RowError) as caught, clips.opened({**refs[0], "path": "gone.mp4"}, options):
        pass
    assert caught.value.code == "missing_video"
    assert list(tmp_path.glob("draftfleet-*")) == []
    store.rm("/bucket", recursive=True)


def test_a_videos_source_has_no_columns(tmp_path) -> None:
    (tmp_path / "a.mp4").write_bytes(SHORT)
    with pytest.raises(ConfigError, match=r"source.columns.video: source.kind 'videos' has no video column"):
        decoded(tmp_path, "videos", columns={"video": "v"})
    with pytest.raises(ConfigError, match="has no columns"):
        decoded(tmp_path, "videos", prompt=PromptConfig(text="{name}?"))


def test_some_frames_of_a_row_are_evenly_spaced_over_all_its_clips() -> None:
    cell = [
        {"num_frames": count, "height": 1, "width": 1, "rgb": bytes(value for n in range(count) for value in [n] * 3)}
        for count in (5, 2)
    ]
    assert [int(frame[0, 0, 0]) for frame in clips.some_frames(cell, 3)] == [0, 3, 1]
    assert len(clips.some_frames(cell, 99)) == 7
    assert clips.some_frames([], 4) == []


def test_ids_of_clips_contain_seconds_without_trailing_zeros() -> None:
    assert clips.Span(0, 2, 0.0, 10.0).name("a#0") == "a#0@0-10"
    assert clips.Span(1, 2, 7.5, 15.0).name("x") == "x@7.5-15"
    assert clips.Span(1, 2, 100.0, 200.1254).name("x") == "x@100-200.125"
