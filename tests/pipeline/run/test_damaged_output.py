"""A job that resumes makes damaged, edited, repeated and foreign rows again, and signs nothing of others."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.load import ConfigError
from configs.schema import CaptionJobConfig
from pipeline.check.output import check_output
from pipeline.manifest.manifest_parts import COUNTS
from pipeline.output.files import Format, write_checksum
from pipeline.output.publishing import Publisher
from pipeline.run.job_plan import ResumeOptions
from pipeline.run.resume import is_complete
from pipeline.storage.output_dir import CONTENT, OutputDir
from pipeline.storage.shard import WHOLE, Shard
from tests.pipeline.attempts import at_rest, end, job, make_rows, plan_of, rows_in, run, save, start
from tests.pipeline.formats.shards import encode, tar_bytes

NUM_SHARDS = 3
SHARDS = [Shard(number, NUM_SHARDS) for number in range(NUM_SHARDS)]


def config_in(folder: Path, num_files: int = 1, count: int = 30) -> CaptionJobConfig:
    (folder / "in").mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        (folder / f"in/{number}.txt").write_text("".join(f"line {row}\n" for row in range(count)))
    return job({"kind": "text", "path": str(folder / "in"), "span_max_rows": 8}, folder / "out")


def every_id(num_files: int = 1, count: int = 30) -> set[str]:
    return {f"{number}.txt#{row}" for number in range(num_files) for row in range(count)}


def with_text(table: pa.Table, text: str) -> pa.Table:
    column = table.schema.get_field_index("generated_text")
    return table.set_column(column, table.schema.field(column), [[text] * table.num_rows])


def as_old_output(output: Path) -> None:
    """Remove what older versions did not write."""
    for folder in sorted(output.glob("_job/**/digests")):
        shutil.rmtree(folder)


# --- files that were edited -----------------------------------------------------------------------------------------


def flipped(path: Path) -> bytes:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    return bytes(data)


def rewritten(path: Path) -> bytes:
    """Other texts, in a file with the footer's metadata of the old one."""
    table = pq.read_table(path)
    sink = pa.BufferOutputStream()
    pq.write_table(with_text(table, "edited").replace_schema_metadata(table.schema.metadata), sink)
    return bytes(sink.getvalue())


def forged(path: Path) -> bytes:
    """Other texts, in a file as the job writes it."""
    table = pq.read_table(path)
    metadata = table.schema.metadata
    fingerprint = metadata[b"draftfleet.config_fingerprint"].decode()
    return bytes(Format(table.schema).serialise(with_text(table, "edited"), 1, fingerprint))


def no_note(note: Path, data: bytes) -> None:
    note.unlink()


def damaged_note(note: Path, data: bytes) -> None:
    note.write_text("{")


def right_note(note: Path, data: bytes) -> None:
    record = json.loads(note.read_text())
    note.write_text(json.dumps(record | {"sha256": hashlib.sha256(data).hexdigest(), "num_bytes": len(data)}))


@pytest.mark.parametrize("edit", [flipped, rewritten, forged])
@pytest.mark.parametrize("edit_note", [no_note, damaged_note, right_note])
def test_a_file_that_was_edited_with_its_checksum_note_is_detected_and_rewritten(
    tmp_path: Path, edit: Callable[[Path], bytes], edit_note: Callable[[Path, bytes], None]
) -> None:
    config = config_in(tmp_path)
    run(config)
    path, note = tmp_path / "out/data/part-000001.parquet", tmp_path / "out/_job/files/data/part-000001.parquet.json"
    before = {own: row["generated_text"] for own, row in rows_in(tmp_path / "out/data").items()}
    data = edit(path)
    edit_note(note, data)
    path.write_bytes(data)
    assert any(
        line.startswith("data/part-000001.parquet: it") for line in check_output(OutputDir(config.sink.path)).problems
    )
    plan = plan_of(config)
    assert [file.relative for file in plan.prior.inventory.strange] == ["data/part-000001.parquet"]
    assert not is_complete(plan)
    run(config)
    assert {own: row["generated_text"] for own, row in rows_in(tmp_path / "out/data").items()} == before
    assert check_output(OutputDir(config.sink.path)).problems == []


@pytest.mark.parametrize("edit_note", [no_note, damaged_note, right_note])
def test_a_wrong_checksum_note_is_rewritten_and_its_file_is_kept(
    tmp_path: Path, edit_note: Callable[[Path, bytes], None]
) -> None:
    config = config_in(tmp_path)
    run(config)
    OutputDir(config.sink.path).write_json("_job/summary.json", {"attempt": 1})
    note = tmp_path / "out/_job/files/data/part-000001.parquet.json"
    before, inode = note.read_bytes(), (tmp_path / "out/data/part-000001.parquet").stat().st_ino
    edit_note(note, b"other bytes")
    assert (
        not check_output(OutputDir(config.sink.path)).is_complete or check_output(OutputDir(config.sink.path)).problems
    )
    assert not is_complete(plan_of(config))
    run(config)
    assert note.read_bytes() == before
    assert (tmp_path / "out/data/part-000001.parquet").stat().st_ino == inode
    assert check_output(OutputDir(config.sink.path)).problems == []


@pytest.mark.parametrize("edit_note", [no_note, damaged_note])
def test_a_file_of_an_older_version_without_a_note_is_not_signed(
    tmp_path: Path, edit_note: Callable[[Path, bytes], None]
) -> None:
    config = config_in(tmp_path)
    run(config)
    as_old_output(tmp_path / "out")
    assert check_output(OutputDir(config.sink.path)).problems == []
    path, note = tmp_path / "out/data/part-000001.parquet", tmp_path / "out/_job/files/data/part-000001.parquet.json"
    path.write_bytes(rewritten(path))
    edit_note(note, b"")
    run(config)
    assert "edited" not in {row["generated_text"] for row in rows_in(tmp_path / "out/data").values()}
    assert at_rest(tmp_path / "out") == (every_id(), set())


@pytest.mark.parametrize("num_batches", [None, 0, 3])
def test_an_output_of_an_older_version_resumes(tmp_path: Path, num_batches: int | None) -> None:
    config = config_in(tmp_path)
    run(config, num_batches=num_batches)
    as_old_output(tmp_path / "out")
    plan = run(config)
    assert plan.prior.inventory.strange == []
    assert plan.datasource.num_samples == {None: 0, 0: 30, 3: 18}[num_batches]
    assert at_rest(tmp_path / "out") == (every_id(), set())
    assert check_output(OutputDir(config.sink.path)).problems == []


def test_digests_of_spool_files_are_removed_with_them(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run(config, num_batches=3)
    assert len(list((tmp_path / "out/_job/digests/spool").rglob("*-data.parquet-*"))) == 3
    run(config)
    assert [path for path in (tmp_path / "out/_job/digests/spool").rglob("*") if path.is_file()] == []


# --- rows that are there twice --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("repeated", ["one row", "all rows", "another text"])
def test_a_spool_file_with_a_repeated_row_costs_no_row_and_doubles_none(
    tmp_path: Path, is_old: bool, repeated: str
) -> None:
    config = config_in(tmp_path)
    run(config, num_batches=3)
    [first, *_] = sorted((tmp_path / "out/_job/spool").glob("*/*-data.parquet"))
    table = pq.read_table(first)
    more = {"one row": table.slice(1, 1), "all rows": table, "another text": with_text(table.slice(2, 1), "other")}
    pq.write_table(pa.concat_tables([table, more[repeated]]), first)
    if is_old:
        as_old_output(tmp_path / "out")
    run(config)
    good, bad = at_rest(tmp_path / "out")
    assert (good, bad) == (every_id(), set())
    assert {row["generated_text"] for row in rows_in(tmp_path / "out/data").values()} == {
        f"text of {own}" for own in every_id()
    }


def test_repeated_rows_of_errors_in_the_spool_are_published_once(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run(config, num_batches=3, fails=lambda own: own.endswith("#1"))
    [path] = sorted((tmp_path / "out/_job/spool").glob("*/*-errors.parquet"))
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, table]), path)
    as_old_output(tmp_path / "out")
    run(config)
    assert at_rest(tmp_path / "out") == (every_id() - {"0.txt#1"}, {"0.txt#1"})


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("case", ["a file twice", "rows of two files", "a row twice in its file"])
def test_repeated_published_rows_are_set_aside(tmp_path: Path, case: str, is_old: bool) -> None:
    config = config_in(tmp_path)
    run(config)
    output = OutputDir(config.sink.path)
    if is_old:
        as_old_output(tmp_path / "out")
    tables = [pq.read_table(tmp_path / f"out/data/part-00000{number}.parquet") for number in (0, 1)]
    made = {
        "a file twice": ("data/part-000009.parquet", tables[0]),
        "rows of two files": ("data/part-000001.parquet", pa.concat_tables([tables[1], tables[0].slice(0, 2)])),
        "a row twice in its file": ("data/part-000001.parquet", pa.concat_tables([tables[1], tables[1].slice(0, 1)])),
    }
    relative, table = made[case]
    fingerprint = table.schema.metadata[b"draftfleet.config_fingerprint"].decode()
    data = Format(table.schema).serialise(table, 1, fingerprint)
    if not is_old:
        output.record(relative, data)
    output.write_bytes(relative, data)
    write_checksum(output, relative, data, table.num_rows)
    problem = f"{relative}: {min(len(table), 10) if case == 'a file twice' else 2 if 'two' in case else 1} rows are in"
    assert any(line.startswith(problem) for line in check_output(output).problems)
    plan = plan_of(config)
    assert [file.relative for file in plan.prior.inventory.strange] == [relative]
    assert not is_complete(plan)
    run(config)
    assert at_rest(tmp_path / "out") == (every_id(), set())
    assert check_output(output).problems == []


# --- shards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_note", [False, True])
@pytest.mark.parametrize("mixes", [False, True])
def test_rows_of_another_shard_in_a_file_of_this_shard_are_not_accepted(
    tmp_path: Path, with_note: bool, mixes: bool
) -> None:
    config = config_in(tmp_path)
    for shard in SHARDS:
        run(config, shard=shard)
    views = [OutputDir(config.sink.path, shard) for shard in SHARDS]
    table = pq.read_table(views[1].path("data/part-000000.parquet"))
    if mixes:
        table = pa.concat_tables([pq.read_table(views[0].path("data/part-000000.parquet")).slice(0, 1), table])
    fingerprint = table.schema.metadata[b"draftfleet.config_fingerprint"].decode()
    data = Format(table.schema).serialise(table, 1, fingerprint)
    relative = "data/part-000001.parquet"
    if with_note:
        views[0].record(relative, data)
        write_checksum(views[0], relative, data, table.num_rows)
    views[0].write_bytes(relative, data)
    [line] = [
        problem
        for problem in check_output(OutputDir(config.sink.path)).problems
        if problem.startswith(f"shard 0/3: {relative}")
    ]
    assert "rows of other shards" in line or not with_note
    plan = run(config, shard=SHARDS[0])
    [strange] = plan.prior.inventory.strange
    assert strange.relative == relative
    assert strange.problem == "it holds 10 rows of other shards" or not with_note
    assert at_rest(tmp_path / "out") == (every_id(), set())
    assert check_output(OutputDir(config.sink.path)).problems == []


@pytest.mark.parametrize("shard", [SHARDS[1], SHARDS[2]])
def test_a_file_that_is_gone_is_refused_at_the_first_attempt_of_its_shard(tmp_path: Path, shard: Shard) -> None:
    config = config_in(tmp_path, num_files=3, count=10)
    run(config, shard=SHARDS[0])
    (tmp_path / f"in/{shard.number}.txt").unlink()
    message = rf"^source\.path: {shard.number}\.txt was there when .* was begun, is not done, and is gone"
    with pytest.raises(ConfigError, match=message):
        plan_of(config, shard=shard)
    run(config, shard=SHARDS[3 - shard.number])
    other = config_in(tmp_path / "other", num_files=3, count=10)  # the same bytes at another time
    shutil.copy(Path(other.source.path, f"{shard.number}.txt"), tmp_path / "in")
    with pytest.raises(ConfigError, match=rf"^source\.path: {shard.number}\.txt changed since"):
        plan_of(config, shard=shard)
    run(config, ResumeOptions(accept_touched=True), shard=shard)
    assert at_rest(tmp_path / "out") == (every_id(3, 10), set())


def test_a_file_of_another_size_is_refused_at_the_first_attempt_of_a_shard(tmp_path: Path) -> None:
    config = config_in(tmp_path, num_files=3, count=10)
    run(config, shard=SHARDS[0])
    (tmp_path / "in/1.txt").write_text("short\n")
    with pytest.raises(ConfigError, match=r"^source\.path: 1\.txt changed since"):
        plan_of(config, ResumeOptions(accept_touched=True), shard=SHARDS[1])


@pytest.mark.parametrize("shard", [SHARDS[1], WHOLE])
def test_a_file_that_is_gone_when_another_attempt_has_listed_it_is_refused(tmp_path: Path, shard: Shard) -> None:
    """Both attempts are planned before either begins, the second one after the file has gone."""
    config = config_in(tmp_path, num_files=3, count=10)
    first = plan_of(config, shard=SHARDS[0] if shard != WHOLE else WHOLE)
    (tmp_path / "in/1.txt").unlink()
    second = plan_of(config, shard=shard)
    start(first)
    with pytest.raises(ConfigError, match=r"^source\.path: 1\.txt was there when .* is not done, and is gone"):
        start(second)


def test_a_tar_of_another_shard_may_be_gone(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        members = [(f"{number}-{row}.png", encode("red")) for row in range(4)]
        (tmp_path / f"in/{number}.tar").write_bytes(tar_bytes(members))
    config = job({"kind": "webdataset", "path": str(tmp_path / "in")}, tmp_path / "out")
    run(config, shard=SHARDS[0])
    (tmp_path / "in/0.tar").unlink()
    run(config, shard=SHARDS[1])
    (tmp_path / "in/2.tar").unlink()
    with pytest.raises(ConfigError, match=r"2\.tar was there when"):
        plan_of(config, shard=SHARDS[2])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"7", b"[" * 10_000, b"\xff", b'{"a": NaN'])
def test_damaged_settings_of_shards_are_one_sentence(tmp_path: Path, content: bytes) -> None:
    config = config_in(tmp_path)
    run(config, shard=SHARDS[0])
    (tmp_path / "out" / CONTENT).write_bytes(content)
    with pytest.raises(ConfigError, match=r"^sink\.path: .*content\.json is damaged: .*; remove it") as refused:
        plan_of(config, shard=SHARDS[1])
    assert "\n" not in str(refused.value)
    assert any(line.startswith("_job/content.json: ") for line in check_output(OutputDir(config.sink.path)).problems)
    (tmp_path / "out" / CONTENT).unlink()
    run(config, shard=SHARDS[1])
    assert (tmp_path / "out" / CONTENT).exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'[0, "1"]', b"[true, 1]", b"[-1, 1]", b"[0, 1e99]"])
def test_a_damaged_turn_is_named_with_its_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        members = [("a.png", encode("red")), ("a.json", b'{"id": "%d"}' % number)]
        (tmp_path / f"in/{number}.tar").write_bytes(tar_bytes(members))
    config = job({"kind": "webdataset", "path": str(tmp_path / "in"), "id_column": "id"}, tmp_path / "out")
    run(config, shard=SHARDS[0])
    turn = tmp_path / "out/_job/turns/000000.json"
    before = turn.read_bytes()
    turn.write_bytes(content)
    assert any(
        line.startswith("_job/turns/000000.json: ") for line in check_output(OutputDir(config.sink.path)).problems
    )
    with pytest.raises(
        ConfigError, match=r"turns/000000\.json is damaged: .*; write into it the shard and the attempt"
    ):
        run(config, shard=SHARDS[1])
    turn.write_bytes(before)
    run(config, shard=SHARDS[1])


# --- counts ---------------------------------------------------------------------------------------------------------


def test_a_count_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.tar").write_bytes(tar_bytes([("a.png", encode("red"))]))
    config = job({"kind": "webdataset", "path": str(tmp_path / "in")}, tmp_path / "out")
    run(config)
    (tmp_path / "out" / COUNTS / f"00000000-{10**13}").write_bytes(b"-")
    with pytest.raises(ConfigError, match=rf"counts/00000000-{10**13} is damaged: it counts 10,000,000,000,000 rows"):
        plan_of(config)
    result = check_output(OutputDir(config.sink.path))
    assert any(line.startswith(f"_job/counts/00000000-{10**13}: it counts") for line in result.problems)
    assert result.num_rows == {"data": 1, "errors": 0}


@pytest.mark.parametrize("row", [-1, 30, 10**13])
def test_rows_beyond_the_end_of_a_file_take_no_memory(tmp_path: Path, row: int) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.tar").write_bytes(tar_bytes([(f"{own}.png", encode("red")) for own in range(3)]))
    config = job({"kind": "webdataset", "path": str(tmp_path / "in")}, tmp_path / "out")
    plan, begun = start(plan_of(config))
    table = make_rows(plan, 1)[0].slice(0, 1)
    column = table.schema.get_field_index("row_index")
    wrong = table.set_column(column, table.schema.field(column), pa.array([row] * table.num_rows, pa.int64()))
    for path in (tmp_path / "out" / COUNTS).iterdir():
        path.unlink()
    begun.publisher.publish_rows("data", 0, wrong)
    plan = plan_of(config)
    if row == 30:  # possible, until the tar is read to its end
        assert plan.prior.inventory.strange == []
    else:
        [strange] = plan.prior.inventory.strange
        assert strange.problem == "it holds rows of samples that the manifest does not list"


# --- folders that became links --------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["data", "errors", "_job"])
def test_a_folder_of_the_output_that_became_a_link_is_refused(tmp_path: Path, folder: str) -> None:
    config = config_in(tmp_path)
    run(config, num_batches=3)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / folder).rename(tmp_path / "moved")
    (tmp_path / "out" / folder).symlink_to(tmp_path / ("moved" if folder == "_job" else "elsewhere"))
    with pytest.raises(ConfigError, match=rf"^sink\.path: .*out/{folder} is no folder of the output \(a link"):
        plan_of(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputDir, "refuse_links", lambda output: None)
        plan = plan_of(config)
    with pytest.raises(ConfigError, match=rf"out/{folder} is no folder of the output"):
        start(plan)
    with pytest.raises(ConfigError, match=rf"out/{folder} is no folder of the output"):
        check_output(OutputDir(config.sink.path))
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("folder", ["data", "root"])
def test_a_folder_that_is_replaced_while_the_job_runs_gets_no_file(tmp_path: Path, folder: str) -> None:
    config = config_in(tmp_path)
    plan, begun = start(plan_of(config))
    batches = make_rows(plan, 1)
    (tmp_path / "elsewhere/_job").mkdir(parents=True)
    replaced = tmp_path / "out" / ("data" if folder == "data" else "")
    replaced.rename(tmp_path / "moved")
    replaced.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"a link in its path leaves the root|was replaced"):
        save(plan, begun, batches)
    assert [path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()] == []


def test_an_output_below_a_link_is_written(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    run(config)
    assert at_rest(tmp_path / "out") == (every_id(), set())


def test_a_published_file_of_another_attempt_that_was_changed_is_not_signed_at_the_end(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    plan, begun = start(plan_of(config))
    save(plan, begun, make_rows(plan, 1))
    path = tmp_path / "out/data/part-000001.parquet"
    path.write_bytes(rewritten(path))
    (tmp_path / "out/_job/files/data/part-000001.parquet.json").unlink()
    with pytest.raises(RuntimeError, match=r"part-000001\.parquet: its bytes are not those that were written; start"):
        end(plan, begun)
    run(config)
    assert "edited" not in {row["generated_text"] for row in rows_in(tmp_path / "out/data").values()}


def test_a_publisher_names_a_spool_file_that_is_damaged_meanwhile(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    plan, begun = start(plan_of(config))
    publisher: Publisher = begun.publisher
    [spooled] = publisher.spool(0, make_rows(plan, 1)[:1])
    path = tmp_path / "out" / spooled.relative
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"000000-00-data\.parquet is damaged: .*; start the job again"):
        publisher.publish("data", 0, [spooled])
