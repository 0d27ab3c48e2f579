"""Finished rows become durable in the spool and are published once in whole files, also under concurrent attempts."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import duckdb
import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from configs.schema import SinkConfig
from pipeline.output.file_numbers import FileNumbers
from pipeline.output.files import Format, read_found
from pipeline.output.publishing import WINDOW, Fenced, Publisher
from pipeline.output.writer import Writer, call_here
from pipeline.rows import schemas
from pipeline.storage.output_dir import OutputDir

KEEP = [pa.field("url", pa.string()), pa.field("score", pa.float32())]


def result_table(ids: list[str], bad: tuple[str, ...] = ()) -> pa.Table:
    """A RESULT table with these ids; those in `bad` are error rows."""
    schema = schemas.result_schema(KEEP)
    columns = []
    for field in schema:
        if field.name == "sample_id":
            values = ids
        elif field.name == "error_type":
            values = ["broken_image" if id_ in bad else "" for id_ in ids]
        elif field.name == "telemetry":
            values = [{"acceptance_histogram": [1, 2], "num_spec_steps": 3, "extras": "{}"}] * len(ids)
        elif field.name in ("url", "score"):
            values = [None] * len(ids)
        else:
            values = ["é" if field.type == pa.string() else 1] * len(ids)
        columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=schema)


def press_at(path: object, attempt: int = 1, rows_per_file: int = 10, compression: str = "zstd") -> Publisher:
    form = Format(schemas.result_schema(KEEP), frozenset(("url", "score")), compression)
    return Publisher(OutputDir(str(path)), form, attempt, f"config{attempt}", rows_per_file)


def write(publisher: Publisher, tables: list[pa.Table], number: int) -> None:
    for file in publisher.spool(number, tables):
        publisher.publish(file.folder, number, [file])


def ids_in(folder: Path) -> list[str]:
    return pads.dataset(folder, format="parquet").to_table()["sample_id"].to_pylist()


# --- files ---------------------------------------------------------------------------------------------------------


def test_good_rows_go_to_data_and_bad_ones_to_errors(tmp_path) -> None:
    publisher = press_at(tmp_path)
    spooled = publisher.spool(7, [result_table(["a", "b"], ("b",)), result_table(["c", "d"], ("c",))])
    assert [(file.relative, file.num_rows) for file in spooled] == [
        ("_job/spool/a0001/000007-00-data.parquet", 2),
        ("_job/spool/a0001/000007-00-errors.parquet", 2),
    ]
    assert [publisher.publish(file.folder, 3, [file]) for file in spooled] == [3, 3]
    assert ids_in(tmp_path / "data") == ["a", "d"]
    assert ids_in(tmp_path / "errors") == ["b", "c"]
    note = json.loads((tmp_path / "_job/files/data/part-000003.parquet.json").read_text())
    assert (note["num_rows"], note["num_bytes"]) == (2, (tmp_path / "data/part-000003.parquet").stat().st_size)


@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
def test_data_reads_as_it_is_with_every_tool(tmp_path, compression) -> None:
    publisher = press_at(tmp_path, compression=compression)
    write(publisher, [result_table(["a", "b", "x"], ("x",))], 0)
    write(publisher, [result_table(["c"])], 1)
    data = tmp_path / "data"
    assert ids_in(data) == ["a", "b", "c"]
    assert pd.read_parquet(data)["sample_id"].tolist() == ["a", "b", "c"]
    query = f"select sample_id, telemetry.num_spec_steps from '{data}/*.parquet' order by 1"
    assert duckdb.sql(query).fetchall() == [("a", 3), ("b", 3), ("c", 3)]
    for path in data.iterdir():
        assert pq.read_schema(path).equals(schemas.result_schema(KEEP), check_metadata=False)
        footer = pq.read_schema(path).metadata
        assert footer[b"draftfleet.schema_version"] == b"1"
        assert (footer[b"draftfleet.attempt"], footer[b"draftfleet.config_fingerprint"]) == (b"1", b"config1")


def test_writing_again_what_was_written_changes_nothing(tmp_path) -> None:
    publisher = press_at(tmp_path)
    [spooled] = publisher.spool(0, [result_table(["a", "b"])])
    assert publisher.publish("data", 0, [spooled]) == 0
    assert publisher.spool(0, [result_table(["a", "b"])]) == [spooled]
    assert publisher.publish("data", 0, [spooled]) == 0
    assert ids_in(tmp_path / "data") == ["a", "b"]


def test_a_spool_file_that_lost_rows_is_not_published(tmp_path) -> None:
    publisher = press_at(tmp_path)
    [spooled] = publisher.spool(0, [result_table(["a", "b"])])
    publisher.spool(0, [result_table(["a"])])
    with pytest.raises(OSError, match="holds 1 rows in place of 2"):
        publisher.publish("data", 0, [spooled])
    assert not (tmp_path / "data").exists()


def test_a_block_of_another_schema_is_refused(tmp_path) -> None:
    publisher = press_at(tmp_path)
    with pytest.raises(ValueError, match="a result block has the columns"):
        publisher.spool(0, [result_table(["a"]).drop_columns("url")])
    table = result_table(["a"])
    index = table.schema.get_field_index("status")
    with pytest.raises(ValueError, match="'status' of a result block holds nulls"):
        publisher.spool(0, [table.set_column(index, "status", pa.nulls(1, pa.string()))])
    assert list(tmp_path.iterdir()) == []


# --- one attempt at a time -----------------------------------------------------------------------------------------


def test_a_superseded_attempt_publishes_nothing_more(tmp_path) -> None:
    old, new = press_at(tmp_path, 1), press_at(tmp_path, 2)
    write(old, [result_table(["a"])], 0)
    [late] = old.spool(1, [result_table(["b"])])
    assert new.fence("data") == 1 + WINDOW["data"]
    with pytest.raises(Fenced, match=r"attempt 2 of .* has taken over from attempt 1"):
        old.publish("data", 1, [late])
    write(new, [result_table(["b"])], 2)
    assert sorted(ids_in(tmp_path / "data")) == ["a", "b"]


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(0, 6))
def test_no_task_of_an_older_attempt_publishes_after_the_fence_wherever_it_was_delayed(data, num_before) -> None:
    """Tasks of the older attempt run at random moments before, during and after the fence."""
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists("/fence"):
        filesystem.rm("/fence", recursive=True)
    old, new = press_at("memory://fence", 1), press_at("memory://fence", 2)
    numbers, window = FileNumbers(0, WINDOW["data"]), WINDOW["data"]
    running: list[tuple[int, str]] = []
    published: list[str] = []
    is_fenced = False

    def step() -> None:
        nonlocal is_fenced
        free = numbers.smallest_free
        may_start = len(running) < window and free < min([free, *(number for number, _ in running)]) + window
        if may_start and not is_fenced and data.draw(st.booleans()):
            running.append((numbers.take(), f"row {len(published)} {len(running)} {free}"))
        elif running:
            number, row = running.pop(data.draw(st.integers(0, len(running) - 1)))
            has_rows = data.draw(st.integers(0, 4)) > 0
            try:
                number_of_file = old.publish_rows("data", number, result_table([row])) if has_rows else None
            except Fenced:
                is_fenced = True
                return
            published.extend([row] if has_rows else [])
            numbers.end(number, number_of_file)

    create = OutputDir.create_bytes

    def interrupted(output, relative, content):
        if relative.startswith("data/") and not interrupted.is_inside:
            interrupted.is_inside = True
            for _ in range(data.draw(st.integers(0, 3))):
                step()
            interrupted.is_inside = False
        return create(output, relative, content)

    interrupted.is_inside = True
    for _ in range(num_before):
        step()
    interrupted.is_inside = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputDir, "create_bytes", interrupted)
        free = new.fence("data")
    seen = list(published)
    while running:
        step()
    assert published == seen, "a task of the older attempt published after the fence"
    if not is_fenced and numbers.smallest_free < free:
        with pytest.raises(Fenced):
            old.publish_rows("data", numbers.take(), result_table(["late"]))
    assert sorted(ids_in_memory("fence")) == sorted(published)


def ids_in_memory(name: str) -> list[str]:
    output = OutputDir(f"memory://{name}")
    tables = [read_found(output, f"data/{file}", ("sample_id",)) for file in output.list_files("data")]
    return [id_ for table in tables for id_ in table.table["sample_id"].to_pylist()]


def test_file_numbers_are_assigned_within_the_window_and_returned_numbers_first() -> None:
    numbers = FileNumbers(5, 2)
    assert [numbers.take(), numbers.take()] == [5, 6]
    numbers.end(6, 9)  # 6, 7 and 8 were taken by files of other origin
    waiting = threading.Thread(target=lambda: taken.append(numbers.take()), daemon=True)
    taken: list[int] = []
    waiting.start()
    waiting.join(0.05)
    assert taken == [], "10 is not within the window while 5 has no file"
    numbers.end(5, None)
    waiting.join(300)
    assert taken == [5]
    numbers.end(5, 5)
    assert numbers.smallest_free == 10


def test_a_late_fence_keeps_published_files(tmp_path, monkeypatch) -> None:
    old, new = press_at(tmp_path, 1), press_at(tmp_path, 2)
    [spooled] = old.spool(0, [result_table(["a"])])
    create = OutputDir.create_bytes

    def overtaken(output, relative, data):
        monkeypatch.setattr(OutputDir, "create_bytes", create)
        old.publish("data", 0, [spooled])
        return create(output, relative, data)

    monkeypatch.setattr(OutputDir, "create_bytes", overtaken)
    assert new.fence("data") == 1 + WINDOW["data"]
    assert ids_in(tmp_path / "data") == ["a"]


def test_an_attempt_ends_when_it_sees_a_later_one(tmp_path) -> None:
    publisher = press_at(tmp_path, 1)
    publisher.output.take_attempt({}, 1)
    publisher.check_alone()
    publisher.output.take_attempt({}, 2)
    with pytest.raises(Fenced):
        publisher.check_alone()


# --- the writer -----------------------------------------------------------------------------------------------------


def writer_at(path, rows_per_file: int = 4, max_unsaved_seconds: float = 80_000.0, **options) -> Writer:
    sink = SinkConfig(path=str(path), rows_per_file=rows_per_file, max_unsaved_seconds=max_unsaved_seconds)
    return Writer(press_at(path, rows_per_file=rows_per_file), sink, **options)


def add(writer: Writer, ids: list[str], bad: tuple[str, ...] = ()) -> None:
    table = result_table(ids, bad)
    writer.add([table], table.num_rows, table.nbytes)


@pytest.mark.slow
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@example([[True] * 5, [], [False] * 9, [True]], 3, 0.0)
@example([[False] * 2, [False] * 7, [True] * 2], 4, 80_000.0)
@given(st.lists(st.lists(st.booleans(), max_size=9), max_size=6), st.integers(1, 7), st.sampled_from([0.0, 80_000.0]))
def test_every_row_is_published_once_to_its_side_in_files_of_bounded_length(blocks, rows_per_file, seconds) -> None:
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists("/sink"):
        filesystem.rm("/sink", recursive=True)
    expected: dict[str, list[str]] = {"data": [], "errors": []}
    with writer_at("memory://sink", rows_per_file, seconds) as writer:
        for number, block in enumerate(blocks):
            ids = [f"{number}-{row}" for row in range(len(block))]
            failed = tuple(id_ for id_, is_bad in zip(ids, block, strict=True) if is_bad)
            expected["errors"] += failed
            expected["data"] += [id_ for id_ in ids if id_ not in failed]
            add(writer, ids, failed)
    for folder, wanted in expected.items():
        results = []
        for name in OutputDir("memory://sink").list_files(folder):
            with filesystem.open(f"/sink/{folder}/{name}", "rb") as file:
                ids = pq.read_table(file)["sample_id"].to_pylist()
            assert 1 <= len(ids) <= rows_per_file
            results += ids
        assert sorted(results) == sorted(wanted)
    assert OutputDir("memory://sink").list_files("_job/spool") == []


def test_full_buffers_are_published_at_once_and_others_when_spool_files_fill_a_file(tmp_path) -> None:
    called: list[str] = []

    def watched(function, publisher, *arguments):
        done = call_here(function, publisher, *arguments)
        called.append(function.__name__)
        return done

    with writer_at(tmp_path, 4, 0.0, call=watched, max_tasks=1) as writer:
        for number in range(20):
            add(writer, [f"{number}-{row}" for row in range(4)])
        add(writer, ["last"])
    assert called[:20] == ["write"] * 20, "full buffers are written once"
    assert called[20:] == ["spool", "publish"]
    assert sorted(ids_in(tmp_path / "data")) == sorted(
        ["last", *(f"{number}-{row}" for number in range(20) for row in range(4))]
    )
    assert len(list((tmp_path / "data").iterdir())) == 21


def test_full_buffers_are_written_concurrently_up_to_the_bound(tmp_path) -> None:
    running, most, lock = 0, 0, threading.Lock()
    barrier = threading.Barrier(3)

    def together(function, publisher, *arguments):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait(timeout=300)  # passes only if three tasks run at the same time
        done = call_here(function, publisher, *arguments)
        with lock:
            running -= 1
        return done

    with writer_at(tmp_path, 2, call=together, max_tasks=3) as writer:
        for number in range(12):
            add(writer, [f"{number}-0", f"{number}-1"])
    assert most == 3
    assert len(ids_in(tmp_path / "data")) == 24


def test_a_write_that_is_repeated_with_other_bytes_publishes_its_rows_once(tmp_path) -> None:
    publisher = press_at(tmp_path)
    rows = result_table(["a", "b", "x"], ("x",))
    other = rows.set_column(rows.schema.get_field_index("generated_text"), "generated_text", pa.array(["other"] * 3))
    number, [errors] = publisher.write(0, 0, [rows])
    assert (number, errors.folder, errors.num_rows) == (0, "errors", 1)
    # The first task died after its file, and its input was computed again.
    assert publisher.write(0, 0, [other]) == (0, [errors])
    assert ids_in(tmp_path / "data") == ["a", "b"]
    assert publisher.write(0, 1, [result_table(["c"])]) == (1, [])


def test_a_write_that_is_repeated_with_other_failures_neither_loses_nor_doubles_a_row(tmp_path) -> None:
    publisher = press_at(tmp_path, rows_per_file=2)
    publisher.write(0, 0, [result_table(["a", "b", "x", "y"], ("x",))])
    # `a` fails now, `x` does not; the second result of the first call was spooled.
    number, spooled = publisher.write(0, 0, [result_table(["a", "b", "x", "y"], ("a",))])
    assert number == 0
    for file in spooled:
        publisher.publish(file.folder, 1, [file])
    assert sorted(ids_in(tmp_path / "data")) == ["a", "b", "x", "y"]
    assert [file.folder for file in spooled] == ["data"]


def test_buffered_rows_are_written_when_their_wait_time_is_over(tmp_path) -> None:
    now = [0.0]
    writer = writer_at(tmp_path, 100, 300.0, clock=lambda: now[0])
    spool = tmp_path / "_job/spool/a0001/000000-00-data.parquet"
    with writer:
        add(writer, ["a"])
        now[0] = 299.0
        add(writer, ["b"])
        assert not spool.exists()
        now[0] = 300.0
        add(writer, ["c"])  # wakes the timer thread
        writer._thread.join(0.0)
        while not spool.exists():
            assert writer._thread.is_alive()
    assert sorted(ids_in(tmp_path / "data")) == ["a", "b", "c"]


def test_buffered_rows_wait_at_most_a_second_while_a_node_drains(tmp_path) -> None:
    now = [0.0]
    writer = writer_at(tmp_path, 100, 300.0, clock=lambda: now[0])
    spools = [tmp_path / f"_job/spool/a0001/00000{number}-00-data.parquet" for number in range(2)]
    with writer:
        add(writer, ["a"])
        now[0] = 1.0
        writer.hurry(True)  # wakes the timer thread
        while not spools[0].exists():
            assert writer._thread.is_alive()
        writer.hurry(False)
        add(writer, ["b"])
        now[0] = 290.0
        add(writer, ["c"])
        assert not spools[1].exists()
    assert sorted(ids_in(tmp_path / "data")) == ["a", "b", "c"]


def test_draining_makes_no_row_wait_longer_than_the_configured_time(tmp_path) -> None:
    with writer_at(tmp_path, 100, 0.0, clock=lambda: 0.0) as writer:
        writer.hurry(True)
        add(writer, ["a"])
        while not (tmp_path / "_job/spool/a0001/000000-00-data.parquet").exists():
            assert writer._thread.is_alive()


def test_a_job_that_fails_keeps_what_it_finished_and_publishes_nothing_that_is_not_full(tmp_path) -> None:
    def fail() -> None:
        with writer_at(tmp_path) as writer:
            add(writer, ["a", "b"], ("b",))
            raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):
        fail()
    assert sorted(path.name for path in (tmp_path / "_job/spool/a0001").iterdir()) == [
        "000000-00-data.parquet",
        "000000-00-errors.parquet",
    ]
    assert not (tmp_path / "data").exists()


def test_a_full_disk_ends_the_job_and_what_was_spooled_stays(tmp_path, monkeypatch) -> None:
    true, written = OutputDir.write_bytes, []

    def full(output, relative, data):
        if len(written) >= 2:
            raise OSError(28, "No space left on device")
        written.append(relative)
        true(output, relative, data)

    monkeypatch.setattr(OutputDir, "write_bytes", full)

    def fill() -> None:
        with writer_at(tmp_path, 100, 0.0) as writer:
            for number in range(1000):
                add(writer, [str(number)])

    with pytest.raises(OSError, match="No space left"):
        fill()
    assert len(written) == 2
    assert all(read_found(OutputDir(str(tmp_path)), name, ("sample_id",)).problem == "" for name in written)


def test_an_attempt_that_was_superseded_publishes_nothing_at_its_end(tmp_path) -> None:
    writer = writer_at(tmp_path)
    writer._publisher.output.take_attempt({}, 1)

    def run() -> None:
        with writer:
            add(writer, ["a"])
            writer._publisher.output.take_attempt({}, 2)

    with pytest.raises(Fenced):
        run()
    assert not (tmp_path / "data").exists()
