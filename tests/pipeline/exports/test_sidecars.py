"""Sidecars hold each caption once, beside listed files only, and no file of the user changes unless asked."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from configs.load import ConfigError
from configs.output import SidecarExportConfig
from pipeline.exports import sidecars
from pipeline.exports.sidecars import _with_line
from pipeline.output.recorded_job import read_job
from pipeline.run.job_plan import ResumeOptions
from pipeline.storage import tree
from pipeline.storage.shard import Shard
from tests.pipeline.attempts import job, run
from tests.pipeline.exports.small_jobs import export, files_below, image_job, images, records, some_tars, tar_job

NAMES = ["a.png", "b.c.png", "sub/d.png", "sub/deep/ü e.png"]


def beside(folder: Path, suffix: str = ".txt") -> dict[str, str]:
    return {name: data.decode() for name, data in files_below(folder).items() if name.endswith(suffix)}


def test_every_image_gets_its_caption_and_a_second_run_writes_nothing(tmp_path) -> None:
    image_job(tmp_path, NAMES)
    before = {name: os.stat(tmp_path / "in" / name) for name in NAMES}
    [report] = export(tmp_path / "out", {"kind": "sidecars"})
    assert (report.num_written, report.num_existing, report.num_refused) == (4, 0, 0)
    expected = {
        "a.txt": "text of a.png#0\n",
        "b.c.txt": "text of b.c.png#0\n",
        "sub/d.txt": "text of sub/d.png#0\n",
        "sub/deep/ü e.txt": "text of sub/deep/ü e.png#0\n",
    }
    assert beside(tmp_path / "in") == expected
    stats = {name: os.stat(tmp_path / "in" / name).st_mtime_ns for name in expected}
    [again] = export(tmp_path / "out", {"kind": "sidecars"})
    assert (again.num_parts, again.num_before, again.num_written) == (0, report.num_parts, 0)
    assert {name: os.stat(tmp_path / "in" / name).st_mtime_ns for name in expected} == stats
    assert {name: os.stat(tmp_path / "in" / name) for name in NAMES} == before
    assert list((tmp_path / "in").rglob(".*")) == []


def test_an_export_without_its_record_recognises_the_files_it_has_written(tmp_path) -> None:
    image_job(tmp_path, NAMES)
    for policy in ("skip", "overwrite", "append"):
        section = {"kind": "sidecars", "existing": policy}
        export(tmp_path / "out", section)
        whole = files_below(tmp_path / "in")
        for path in (tmp_path / "out").glob("_job/exports/*/done/*"):
            path.unlink()
        export(tmp_path / "out", section)
        assert files_below(tmp_path / "in") == whole
        assert all(text.count("text of") == 1 for text in beside(tmp_path / "in").values())


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("skip", b"mine, without a line feed"),
        ("overwrite", b"text of a.png#0\n"),
        ("append", b"mine, without a line feed\ntext of a.png#0\n"),
    ],
)
def test_a_file_of_the_user_is_kept_replaced_or_continued(tmp_path, policy, expected) -> None:
    image_job(tmp_path, NAMES)
    (tmp_path / "in/a.txt").write_bytes(b"mine, without a line feed")
    [report] = export(tmp_path / "out", {"kind": "sidecars", "existing": policy})
    assert (tmp_path / "in/a.txt").read_bytes() == expected
    assert report.num_existing == (policy == "skip")
    assert beside(tmp_path / "in")["sub/d.txt"] == "text of sub/d.png#0\n"


def test_bytes_that_are_no_text_are_continued_as_they_are(tmp_path) -> None:
    image_job(tmp_path, NAMES)
    (tmp_path / "in/a.txt").write_bytes(b"\xff\xfe\x00\r\n")
    export(tmp_path / "out", {"kind": "sidecars", "existing": "append"})
    assert (tmp_path / "in/a.txt").read_bytes() == b"\xff\xfe\x00\r\ntext of a.png#0\n"


@given(st.binary(max_size=30), st.text("ab\n", max_size=6))
@example(b"", "")
@example(b"xa", "a")
@example(b"a", "a")
@example(b"a\nb", "b\na")
def test_a_line_is_added_once_and_old_bytes_stay(old: bytes, text: str) -> None:
    line = (text + "\n").encode()
    once = _with_line(old, line)
    assert once.startswith(old)
    assert _with_line(once, line) == once
    assert b"\n" + line in b"\n" + once + b"\n"
    if once != old:
        assert once.removesuffix(line) in (old, old + b"\n")


def test_json_holds_the_columns_and_is_continued_as_a_list(tmp_path) -> None:
    image_job(tmp_path, ["a.png", "b.png", "c.png", "d.png"])
    (tmp_path / "in/a.json").write_text('{"mine": 1}')
    (tmp_path / "in/b.json").write_text('[1, "x"]')
    (tmp_path / "in/c.json").write_text('{"cut')
    section = {"kind": "sidecars", "format": "json", "existing": "append", "columns": ["generated_text", "telemetry"]}
    [report] = export(tmp_path / "out", section)
    first = json.loads((tmp_path / "in/a.json").read_text())
    assert first[0] == {"mine": 1}
    assert (first[1]["generated_text"], first[1]["telemetry"]["num_spec_steps"]) == ("text of a.png#0", 1)
    assert json.loads((tmp_path / "in/b.json").read_text())[:2] == [1, "x"]
    assert json.loads((tmp_path / "in/d.json").read_text())["generated_text"] == "text of d.png#0"
    assert (tmp_path / "in/c.json").read_text() == '{"cut'
    assert (report.num_refused, report.num_written) == (1, 3)
    [refused] = [row for record in records(tmp_path / "out", "sidecars") for row in record["refused"]]
    assert (refused["sample_id"], refused["error_type"]) == ("c.png#0", "export_failed")
    whole = files_below(tmp_path / "in")
    [again] = export(tmp_path / "out", section)
    assert (again.num_parts, again.num_refused) == (1, 1), "a part with refused rows is tried again"
    assert files_below(tmp_path / "in") == whole
    (tmp_path / "in/c.json").unlink()
    [repaired] = export(tmp_path / "out", section)
    assert (repaired.num_refused, repaired.num_written) == (0, 1)
    assert export(tmp_path / "out", section)[0].num_parts == 0


def test_rows_of_all_shards_are_exported(tmp_path) -> None:
    images(tmp_path / "in", NAMES)
    config = job({"kind": "images", "path": str(tmp_path / "in")}, tmp_path / "out")
    run(config, shard=Shard(0, 2))
    assert export(tmp_path / "out", {"kind": "sidecars"})[0].num_written == 2
    run(config, shard=Shard(1, 2))
    assert export(tmp_path / "out", {"kind": "sidecars"})[0].num_written == 2
    assert len(beside(tmp_path / "in")) == 4


def test_error_rows_get_no_file_and_a_later_result_gets_one(tmp_path) -> None:
    images(tmp_path / "in", NAMES)
    config = job({"kind": "images", "path": str(tmp_path / "in")}, tmp_path / "out")
    run(config, fails=lambda own: own.startswith("a.png"))
    export(tmp_path / "out", {"kind": "sidecars"})
    assert sorted(beside(tmp_path / "in")) == ["b.c.txt", "sub/d.txt", "sub/deep/ü e.txt"]
    run(config, ResumeOptions(retry_errors=True))
    [report] = export(tmp_path / "out", {"kind": "sidecars"})
    assert (report.num_written, report.num_existing) == (1, 0)
    assert beside(tmp_path / "in")["a.txt"] == "text of a.png#0\n"


# --- hostile places --------------------------------------------------------------------------------------------------


def with_sources(output: Path, sources: list[str]) -> None:
    """Give the rows of the only file with rows other sources, as a tampered output has them."""
    [path] = [path for path in sorted((output / "data").iterdir()) if pq.read_metadata(path).num_rows]
    table = pq.read_table(path)
    position = table.schema.get_field_index("source")
    changed = table.set_column(position, table.schema.field(position), pa.array(sources, pa.string()))
    pq.write_table(changed, path)


HOSTILE = ["../evil.png", "/tmp/evil.png", "sub/../../evil.png", "unlisted.png", ".", "a\0.png"]


@pytest.mark.parametrize("tampered_manifest", [False, True])
def test_sources_that_leave_the_root_or_are_not_listed_are_refused_as_rows(
    tmp_path, monkeypatch, tampered_manifest
) -> None:
    names = ["a.png", "b.png", "c.png", "d.png", "e.png", "f.png", "g.png"]
    image_job(tmp_path, names, rows_per_file=20)
    with_sources(tmp_path / "out", ["a.png", *HOSTILE])
    if tampered_manifest:  # the second line of defence alone
        monkeypatch.setattr(sidecars, "is_listed", lambda table, manifest: [True] * table.num_rows)
    before = set(tmp_path.rglob("*"))
    [report] = export(tmp_path / "out", {"kind": "sidecars"})
    assert (report.num_written, report.num_refused) == (1 + tampered_manifest, 6 - tampered_manifest)
    refused = [row for record in records(tmp_path / "out", "sidecars") for row in record["refused"]]
    assert {row["error_type"] for row in refused} == {"export_refused"}
    assert len(report.refused) == 5, "the first refused rows are named"
    new = {path for path in set(tmp_path.rglob("*")) - before if "_job" not in path.parts}
    allowed = {tmp_path / "in/a.txt", *([tmp_path / "in/unlisted.txt"] if tampered_manifest else [])}
    assert new == allowed
    assert not Path("/tmp/evil.txt").exists()


def test_a_folder_that_became_a_link_out_of_the_root_is_refused(tmp_path) -> None:
    image_job(tmp_path, NAMES)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "in/sub").rename(tmp_path / "moved")
    (tmp_path / "in/sub").symlink_to(tmp_path / "elsewhere")
    [report] = export(tmp_path / "out", {"kind": "sidecars", "existing": "overwrite"})
    assert (report.num_written, report.num_refused) == (2, 2)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_inside_of_the_root_is_followed(tmp_path) -> None:
    images(tmp_path / "in", ["real/a.png"])
    (tmp_path / "in/alias").symlink_to(tmp_path / "in/real")
    run(job({"kind": "images", "path": str(tmp_path / "in")}, tmp_path / "out"))
    export(tmp_path / "out", {"kind": "sidecars", "existing": "append"})
    assert sorted(beside(tmp_path / "in")["real/a.txt"].splitlines()) == [
        "text of alias/a.png#0",
        "text of real/a.png#0",
    ]


@pytest.mark.parametrize("policy", ["skip", "overwrite", "append"])
@pytest.mark.parametrize("obstacle", ["link", "folder", "fifo", "large"])
def test_an_existing_path_that_is_not_a_regular_file_is_never_followed(tmp_path, monkeypatch, policy, obstacle) -> None:
    monkeypatch.setattr(sidecars, "MAX_EXISTING_BYTES", 100)
    image_job(tmp_path, ["a.png"])
    secret, path = tmp_path / "secret", tmp_path / "in/a.txt"
    secret.write_text("keep")
    if obstacle == "link":
        path.symlink_to(secret)
    elif obstacle == "folder":
        path.mkdir()
    elif obstacle == "fifo":
        os.mkfifo(path)
    else:
        path.write_text("x" * 101)
    [report] = export(tmp_path / "out", {"kind": "sidecars", "existing": policy})
    assert secret.read_text() == "keep"
    if policy == "skip":
        assert (report.num_existing, report.num_refused) == (1, 0)
    elif policy == "overwrite" and obstacle != "folder":
        assert not path.is_symlink()
        assert path.read_text() == "text of a.png#0\n"
    else:
        assert report.num_refused == 1
        assert path.is_symlink() == (obstacle == "link")


def test_a_full_disk_ends_the_export_and_the_next_one_resumes(tmp_path, monkeypatch) -> None:
    image_job(tmp_path, NAMES)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tree.os, "fsync", full)
        with pytest.raises((OSError, ConfigError), match="No space left"):
            export(tmp_path / "out", {"kind": "sidecars"})
    assert beside(tmp_path / "in") == {}
    assert list((tmp_path / "in").rglob(".*")) == []
    assert export(tmp_path / "out", {"kind": "sidecars"})[0].num_written == 4


# --- refusals before anything is written ----


def test_names_that_collide_are_refused_and_full_names_are_not(tmp_path) -> None:
    image_job(tmp_path, ["a.png", "a.webp.png", "b.png", "b.jpg"])
    with pytest.raises(ConfigError, match=r"exports\.0\.names: b\.jpg and b\.png have the same stem.*names: full"):
        export(tmp_path / "out", {"kind": "sidecars"})
    assert beside(tmp_path / "in") == {}
    export(tmp_path / "out", {"kind": "sidecars", "names": "full"})
    assert sorted(beside(tmp_path / "in")) == ["a.png.txt", "a.webp.png.txt", "b.jpg.txt", "b.png.txt"]


def test_sources_without_a_file_per_sample_are_refused(tmp_path) -> None:
    tar_job(tmp_path, some_tars())
    with pytest.raises(ConfigError, match=r"source\.kind is 'webdataset'; exports of kind webdataset add captions"):
        export(tmp_path / "out", {"kind": "sidecars"})


def test_several_captions_of_a_file_are_refused(tmp_path) -> None:
    image_job(tmp_path, NAMES)
    recorded = read_job(str(tmp_path / "out"), "OUTPUT")
    sampling = recorded.config.sampling.model_copy(update={"num_captions_per_prompt": 2, "temperature": 0.5})
    several = replace(recorded, config=recorded.config.model_copy(update={"sampling": sampling}))
    with pytest.raises(ConfigError, match=r"exports\.0: a sample of the job has 2 captions .* a sidecar has one"):
        sidecars.Sidecars.of(several, SidecarExportConfig(), "exports.0")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            [{"kind": "sidecars", "format": "json", "columns": ["nothing"]}],
            r"exports\.0\.columns: .* no column 'nothing'",
        ),
        ([{"kind": "sidecars"}, {"kind": "sidecars", "existing": "append"}], r"exports\.1: writes the same files as"),
    ],
)
def test_invalid_export_settings_are_refused(tmp_path, sections, message) -> None:
    image_job(tmp_path, NAMES)
    with pytest.raises(ConfigError, match=message):
        export(tmp_path / "out", *sections)
    assert not (tmp_path / "out/_job/exports").exists()


def test_a_damaged_published_file_is_named(tmp_path) -> None:
    image_job(tmp_path, NAMES, rows_per_file=20)
    [path] = (tmp_path / "out/data").iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RuntimeError, match=r"data/part-000000\.parquet: it is torn.*sets it aside"):
        export(tmp_path / "out", {"kind": "sidecars"})
