"""Exports write only into the folders that they began with, beside files of others, and hide no damage of outputs."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import pickle
import random
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.load import ConfigError, validate
from configs.output import ExportJobConfig
from configs.pool import JobSectionConfig
from jobs import export as command
from pipeline.exports import archives, run
from pipeline.exports.rows import as_json, json_bytes, rows_of
from pipeline.exports.run import ExportReport, run_exports
from pipeline.exports.sidecars import _with_object
from pipeline.output.recorded_job import read_job
from pipeline.storage.folders import FolderId
from pipeline.storage.tree import Tree
from tests.pipeline.attempts import run as run_job
from tests.pipeline.exports.small_jobs import (
    export,
    files_below,
    image_job,
    images,
    members,
    records,
    some_tars,
    tar_job,
)
from tests.pipeline.formats.shards import tar_bytes

NAMES = ["a.png", "b.png", "s/c.png", "s/d.png"]


def dataset(tmp_path: Path) -> dict[str, Any]:
    return {"kind": "dataset", "path": str(tmp_path / "new")}


def accepting(output: Path, section: dict[str, Any]) -> list[ExportReport]:
    exports = validate(ExportJobConfig, {"exports": [section]}, "test").exports
    return run_exports(read_job(str(output), "--from"), exports, JobSectionConfig(progress=False), accepts_moved=True)


# --- files of others in an exported folder --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data/mine.parquet", "data/train-mine.parquet", "data/notes.txt", "mine.parquet"])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"mine", "rows"])
def test_files_of_the_user_are_kept_and_not_counted(tmp_path: Path, name: str, content: bytes | str) -> None:
    config = image_job(tmp_path, NAMES)
    export(tmp_path / "out", dataset(tmp_path))
    mine = tmp_path / "new" / name
    if isinstance(content, str):
        pq.write_table(pa.table({"sample_id": ["x"] * 100}), mine)
    else:
        mine.write_bytes(content)
    before = mine.read_bytes()
    images(tmp_path / "in", ["e.png"])
    run_job(config)
    [report] = export(tmp_path / "out", dataset(tmp_path))
    assert report.num_written == 1
    assert mine.read_bytes() == before
    assert "rows          5\n" in (tmp_path / "new/README.md").read_text()


@pytest.mark.parametrize("damage", ["foreign", "torn", "gone", "folder"])
def test_an_exported_file_that_is_damaged_is_named_and_written_again(tmp_path: Path, damage: str) -> None:
    image_job(tmp_path, NAMES)
    export(tmp_path / "out", dataset(tmp_path))
    path = sorted((tmp_path / "new/data").iterdir())[0]
    before = pq.read_table(path)
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "foreign":
        path.write_bytes(b"mine")
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    with pytest.raises(RuntimeError, match=rf"{path.name} is damaged: .*start the export again, which writes it again"):
        export(tmp_path / "out", dataset(tmp_path))
    if damage == "folder":
        path.rmdir()
    assert export(tmp_path / "out", dataset(tmp_path))[0].num_parts == 1
    assert pq.read_table(path).equals(before)
    assert export(tmp_path / "out", dataset(tmp_path))[0].num_parts == 0


def test_a_damaged_list_of_cards_is_named(tmp_path: Path) -> None:
    image_job(tmp_path, NAMES)
    export(tmp_path / "out", dataset(tmp_path))
    [path] = (tmp_path / "out").glob("_job/exports/*/card.json")
    path.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"card\.json is damaged: it is no JSON list; remove it"):
        export(tmp_path / "out", dataset(tmp_path))


# --- folders that were replaced -------------------------------------------------------------------------------------


def replaced(folder: Path, by_copy: bool) -> Path:
    """Move a folder away and put a link to another one in its place; return the other one."""
    other = folder.with_name("elsewhere")
    if by_copy:
        shutil.copytree(folder, other)
    else:
        other.mkdir()
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(other)
    return other


@pytest.mark.parametrize("by_copy", [False, True])
@pytest.mark.parametrize("existing", ["skip", "overwrite", "append"])
def test_sidecars_are_not_written_into_a_root_that_became_a_link(tmp_path: Path, by_copy: bool, existing: str) -> None:
    image_job(tmp_path, NAMES)
    other = replaced(tmp_path / "in", by_copy)
    before = files_below(other)
    section = {"kind": "sidecars", "existing": existing}
    with pytest.raises(ConfigError, match=r"^source\.path: .*/in was replaced by another folder: it is .*elsewhere"):
        export(tmp_path / "out", section)
    assert files_below(other) == before
    if by_copy:
        assert accepting(tmp_path / "out", section)[0].num_written == 4
        assert export(tmp_path / "out", section)[0].num_parts == 0
    else:
        with pytest.raises(ConfigError, match=r"has none of the files that the job read, such as a\.png"):
            accepting(tmp_path / "out", section)
        assert files_below(other) == before


def test_sidecars_of_an_old_output_are_not_written_beside_other_files(tmp_path: Path) -> None:
    """Its record has no identity of the source's folder."""
    image_job(tmp_path, NAMES)
    path = tmp_path / "out/_job/attempts/000001.json"
    path.write_text(
        json.dumps({key: value for key, value in json.loads(path.read_text()).items() if "folder" not in key})
    )
    other = replaced(tmp_path / "in", by_copy=False)
    images(other, ["x.png"])
    with pytest.raises(ConfigError, match="has none of the files that the job read"):
        export(tmp_path / "out", {"kind": "sidecars"})
    assert sorted(files_below(other)) == ["x.png"]
    (tmp_path / "in").unlink()
    (tmp_path / "moved").rename(tmp_path / "in")
    assert export(tmp_path / "out", {"kind": "sidecars"})[0].num_written == 4


def test_a_root_that_is_a_link_from_the_beginning_is_written(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "in").symlink_to(tmp_path / "real")
    image_job(tmp_path, NAMES)
    assert export(tmp_path / "out", {"kind": "sidecars"})[0].num_written == 4
    (tmp_path / "in").unlink()
    (tmp_path / "real").rename(tmp_path / "in")  # moved within the file system: the same folder
    images(tmp_path / "in", ["e.png"])
    assert export(tmp_path / "out", {"kind": "sidecars"})[0].num_existing == 0


@pytest.mark.parametrize("kind", ["dataset", "webdataset"])
def test_the_target_of_an_export_that_became_a_link_is_refused(tmp_path: Path, kind: str) -> None:
    config = image_job(tmp_path, NAMES) if kind == "dataset" else tar_job(tmp_path, some_tars())
    section = {"kind": kind, "path": str(tmp_path / "new")}
    export(tmp_path / "out", section)
    other = replaced(tmp_path / "new", by_copy=False)
    if kind == "dataset":
        images(tmp_path / "in", ["e.png"])
    else:
        (tmp_path / "in/new.tar").write_bytes(tar_bytes(members(2)))
    run_job(config)
    with pytest.raises(
        ConfigError, match=r"^exports\.0\.path: .*/new was replaced by another folder: .*--accept-moved"
    ):
        export(tmp_path / "out", section)
    assert [path for path in other.rglob("*") if path.is_file()] == []
    (tmp_path / "new").unlink()
    (tmp_path / "moved").rename(tmp_path / "new")
    assert export(tmp_path / "out", section)[0].num_written == {"dataset": 1, "webdataset": 2}[kind]


@pytest.mark.parametrize("kind", ["sidecars", "dataset", "webdataset"])
def test_a_folder_that_is_replaced_while_an_export_runs_gets_no_file(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "webdataset":
        tar_job(tmp_path, some_tars())
    else:
        image_job(tmp_path, NAMES)
    true, others = run._export, list[Path]()

    def replacing(exporter: Any, ledger: Any, item: Any) -> Any:
        exporter = pickle.loads(pickle.dumps(exporter))  # as a task receives it
        if not others:
            others.append(replaced(tmp_path / ("in" if kind == "sidecars" else "new"), by_copy=False))
        return true(exporter, ledger, item)

    monkeypatch.setattr(run, "_export", replacing)
    section = {"kind": kind} if kind == "sidecars" else {"kind": kind, "path": str(tmp_path / "new")}
    if kind == "sidecars":
        [report] = export(tmp_path / "out", section)
        assert (report.num_written, report.num_refused) == (0, 4)
        assert "was replaced: it is" in report.refused[0]
    else:
        with pytest.raises(RuntimeError, match=rf"^{kind}-.*/new was replaced: it is .*elsewhere, and was .*/new"):
            export(tmp_path / "out", section)
    assert [path for path in others[0].rglob("*") if path.is_file()] == []


def test_a_damaged_identity_is_named(tmp_path: Path) -> None:
    image_job(tmp_path, NAMES)
    export(tmp_path / "out", dataset(tmp_path))
    [path] = (tmp_path / "out").glob("_job/exports/*/folder.json")
    for content in ("{", "[]", '{"path": 1, "inode": 2, "device": 3, "host": "h"}', '{"inode": 1e400}'):
        path.write_text(content)
        with pytest.raises(
            ConfigError, match=r"folder\.json is damaged: .*; remove it, if the folder is the right one"
        ):
            export(tmp_path / "out", dataset(tmp_path))
    path.unlink()
    export(tmp_path / "out", dataset(tmp_path))
    assert json.loads(path.read_text())["path"] == str(tmp_path / "new")


def test_folders_are_recognised_by_path_and_by_inode() -> None:
    folder = FolderId("/data/in", 7, 1, "h")
    assert folder.is_same(FolderId("/data/in", 8, 2, "h")), "a network file system was mounted again"
    assert folder.is_same(FolderId("/data/moved", 7, 1, "h")), "it was moved"
    assert folder.is_same(FolderId("/mnt/in", 7, 99, "other")), "another host mounts it elsewhere"
    assert not folder.is_same(FolderId("/data/elsewhere", 8, 1, "h"))
    assert not folder.is_same(FolderId("/mnt/in", 7, 2, "h")), "another device of this host"
    assert FolderId.parse(folder.to_json()) == folder
    assert FolderId.of("/no/such/folder") is None


def test_a_tree_keeps_its_folder_when_it_is_sent(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    tree = Tree(str(tmp_path / "root"), "test")
    tree.create("a", b"a")
    sent = pickle.dumps(tree)
    other = replaced(tmp_path / "root", by_copy=False)
    for tree_copy in (tree, pickle.loads(sent)):
        for act in (
            lambda target=tree_copy: target.create("b", b"b"),
            lambda target=tree_copy: target.replace("a", b"b"),
        ):
            with pytest.raises(OSError, match="was replaced"):
                act()
    assert list(other.iterdir()) == []


@pytest.mark.parametrize("is_link", [False, True])
def test_a_lance_dataset_that_was_replaced_gets_no_column(tmp_path: Path, is_link: bool) -> None:
    lance = pytest.importorskip("lance")
    image_job(tmp_path, ["a.png"])
    for name in ("rows.lance", "other.lance"):
        lance.write_dataset(pa.table({"id": ["1", "2"]}), str(tmp_path / name))
    recorded = read_job(str(tmp_path / "out"), "--from")
    source = recorded.config.source.model_copy(update={"id_column": "id"})
    from dataclasses import replace

    recorded = replace(recorded, config=recorded.config.model_copy(update={"source": source}))
    section = {"kind": "lance", "path": str(tmp_path / "rows.lance")}
    exports = validate(ExportJobConfig, {"exports": [section]}, "test").exports
    run_exports(recorded, exports, JobSectionConfig(progress=False))
    (tmp_path / "rows.lance").rename(tmp_path / "moved.lance")
    if is_link:
        (tmp_path / "rows.lance").symlink_to(tmp_path / "other.lance")
        with pytest.raises(ConfigError, match=r"^exports\.0\.path: .*rows\.lance was replaced by another folder"):
            run_exports(recorded, exports, JobSectionConfig(progress=False))
    assert lance.dataset(str(tmp_path / "other.lance")).schema.names == ["id"]


# --- damage of the output -------------------------------------------------------------------------------------------


def changed_text(path: Path) -> None:
    """Other texts in a whole file: only its digest shows it."""
    table = pq.read_table(path)
    column = table.schema.get_field_index("generated_text")
    other = table.set_column(column, table.schema.field(column), [["other"] * table.num_rows])
    pq.write_table(other.replace_schema_metadata(table.schema.metadata), path)


@pytest.mark.parametrize("kind", ["sidecars", "dataset", "webdataset"])
def test_rows_of_a_changed_file_are_no_success(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = tar_job(tmp_path, {"a.tar": tar_bytes(members(5))}) if kind == "webdataset" else image_job(tmp_path, NAMES)
    path = next(path for path in sorted((tmp_path / "out/data").iterdir()) if pq.read_metadata(path).num_rows)
    changed_text(path)
    section = {"kind": kind} if kind == "sidecars" else {"kind": kind, "path": str(tmp_path / "new")}
    if kind == "sidecars":
        section["existing"] = "overwrite"
    (tmp_path / "e.yaml").write_text(json.dumps({"exports": [section]}))
    arguments = ["--from", str(tmp_path / "out"), "--config", str(tmp_path / "e.yaml")]
    for _ in range(2):  # such a part is exported again each time
        assert command.main(arguments) == command.ROWS_REFUSED
        assert f"damaged: data/{path.name}: it" in capsys.readouterr().out
    run_job(config)
    assert command.main(arguments) == command.DONE
    assert not any(b"other" in data for data in files_below(tmp_path / "in").values())


def test_a_result_without_a_needed_column_is_named(tmp_path: Path) -> None:
    image_job(tmp_path, NAMES, rows_per_file=20)
    [path] = (tmp_path / "out/data").iterdir()
    table = pq.read_table(path)
    pq.write_table(table.drop_columns("generated_text").replace_schema_metadata(table.schema.metadata), path)
    with pytest.raises(RuntimeError, match=r"part-000000\.parquet: it has no column 'generated_text'; the job's own"):
        export(tmp_path / "out", {"kind": "sidecars"})


@pytest.mark.parametrize("compression", ["gzip", "bz2", "xz", "zstd"])
def test_a_damaged_compressed_archive_is_copied_up_to_its_damage(compression: str) -> None:
    import lzma

    chance = random.Random(0)
    plain = tar_bytes([(f"{row:03}.png", chance.randbytes(20_000)) for row in range(100)])
    compress: dict[str, Any] = {
        "gzip": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "zstd": lambda data: pa.compress(data, "zstd", asbytes=True),
    }
    data = bytearray(compress[compression](plain))
    for index in range(len(data) // 2, len(data) // 2 + 400):
        data[index] ^= 0xFF
    sink = io.BytesIO()
    archives.copy_with(io.BytesIO(bytes(data)), sink, dict.fromkeys(range(40), b"text"), "txt", False)
    sink.seek(0)
    assert archives.compression_of(sink) == compression


def test_a_full_disk_while_an_archive_is_expanded_ends_the_export() -> None:
    class Full(io.BytesIO):
        def read(self, *arguments: Any) -> bytes:
            if self.tell() > 8:
                raise OSError(28, "No space left on device")
            return super().read(*arguments)

    with pytest.raises(OSError, match="No space left"):
        archives.copy_with(Full(gzip.compress(tar_bytes(members(3)))), io.BytesIO(), {}, "txt", False)


# --- values that JSON does not have ---------------------------------------------------------------------------------


def test_values_of_any_size_are_json() -> None:
    table = pa.table(
        {
            "big": pa.array([2**64 - 1], pa.uint64()),
            "decimal": pa.array([10**30], pa.decimal128(38)),
            "nan": [float("nan")],
            "list": [[float("inf"), 1.5]],
            "late": pa.array([2**62], pa.timestamp("s")),
            "date": pa.array([2**31 - 1], pa.date32()),
            "time": pa.array([datetime(2026, 1, 2)], pa.timestamp("us")),
            "bytes": [b"\xff"],
        }
    )
    [row] = rows_of(table)
    assert json.loads(json_bytes(as_json(row, table.column_names))) == {
        "big": 2**64 - 1,
        "decimal": str(10**30),
        "nan": None,
        "list": [None, 1.5],
        "late": str(2**62),
        "date": str(2**31 - 1),
        "time": "2026-01-02 00:00:00",
        "bytes": "b'\\xff'",
    }


def test_an_object_is_appended_to_whatever_json_a_user_has() -> None:
    assert json.loads(_with_object(b'["\\ud800", 1e400, NaN, 1%s]' % (b"0" * 30), {"a": 1}))[-1] == {"a": 1}
    assert b"\\ud800" in _with_object(b'["\\ud800"]', {"a": "\u00fc"})
    for hostile in (b"[" * 100_000, b"1" * 5000, b'"text"', b"\xff", b'{"a": ' * 900 + b"1" + b"}" * 900):
        try:
            joined = _with_object(hostile, {"a": 1})
        except OSError as error:
            joined = str(error).encode()
        assert b"the file is no JSON object or list" in joined or json.loads(joined)[-1] == {"a": 1}


def test_records_of_old_exports_are_read(tmp_path: Path) -> None:
    image_job(tmp_path, NAMES)
    export(tmp_path / "out", dataset(tmp_path))
    for path in (tmp_path / "out").glob("_job/exports/*/done/*"):
        record = json.loads(path.read_text())
        del record["damaged"]
        path.write_text(json.dumps(record))
    assert export(tmp_path / "out", dataset(tmp_path))[0].num_parts == 0
    assert len(records(tmp_path / "out", "dataset")) == 2
