"""`jobs.check` and resuming name every damaged file of an output, whatever is damaged, and hide no other finding."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.load import ConfigError
from configs.schema import CaptionJobConfig
from jobs import check
from pipeline.reports.summary import count
from pipeline.run.execution import write_provenance
from pipeline.run.plan import Plan
from pipeline.run.resume import is_complete, resume_lines
from pipeline.storage.shard import WHOLE, Shard
from tests.pipeline.attempts import end, job, make_rows, plan_of, run, save, start, write_summary
from tests.pipeline.exports.small_jobs import export, images

SHARDS = (Shard(0, 2), Shard(1, 2))
UNCHECKED = ("_job/report.html", "_job/digests/", "_job/logs/")


def make(folder: Path, shards: tuple[Shard, ...] = (WHOLE,)) -> CaptionJobConfig:
    """A finished output with every kind of file: attempts, errors, exports, and turns of shards."""
    images(folder / "in", [f"{number:02}.png" for number in range(14)])
    source = {"kind": "images", "path": str(folder / "in"), "span_max_rows": 5}
    config = job(source, folder / "out", sink={"rows_per_file": 4})
    for shard in shards:
        run(config, fails=lambda own: own.startswith("03"), num_batches=1, shard=shard)
        plan, begun = start(plan_of(config, shard=shard))
        write_provenance(plan, begun.publisher)
        save(plan, begun, make_rows(plan, 2, lambda own: own.startswith("03")))
        end(plan, begun)
        write_summary(plan, count(plan.output, plan.empty_summary(1.0)), begun.publisher)
    export(folder / "out", {"kind": "dataset", "path": str(folder / "set")})
    return config


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> CaptionJobConfig:
    return make(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> CaptionJobConfig:
    return make(tmp_path_factory.mktemp("sharded"), SHARDS)


@pytest.fixture
def copy(whole: CaptionJobConfig, tmp_path: Path) -> CaptionJobConfig:
    """A copy of the finished output that may be changed."""
    shutil.copytree(whole.sink.path, tmp_path / "out")
    return whole.model_copy(update={"sink": whole.sink.model_copy(update={"path": str(tmp_path / "out")})})


def files_of(config: CaptionJobConfig) -> list[Path]:
    paths = (path for path in Path(config.sink.path).rglob("*") if path.is_file() and path.stat().st_size)
    return sorted(path for path in paths if not any(part in str(path) for part in UNCHECKED))


@contextlib.contextmanager
def changed(path: Path, data: bytes) -> Iterator[None]:
    """Replace the content of a file in the block."""
    before, times = path.read_bytes(), path.stat()
    try:
        path.write_bytes(data)
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def checked(config: CaptionJobConfig) -> tuple[int, str]:
    """The status of `jobs.check` and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = check.main([config.sink.path])
    return status, printed.getvalue()


def shown_name(config: CaptionJobConfig, path: Path) -> str:
    """The name by which a finding of a shard or of the whole output names a file."""
    name = path.relative_to(config.sink.path).as_posix()
    for number in (0, 1):
        name = name.replace(f"/shard-{number:04d}-", "/").replace(f"_job/shards/{number:04d}/", "_job/")
    return name.removeprefix("_job/files/").removesuffix(".json") if name.startswith("_job/files/") else name


def planned(config: CaptionJobConfig, shard: Shard) -> tuple[Plan | None, str]:
    """The plan of a job that resumes, or the message with which it is refused."""
    try:
        return plan_of(config, shard=shard), ""
    except ConfigError as error:
        return None, str(error)


def check_that_nothing_passes(config: CaptionJobConfig, path: Path, shards: tuple[Shard, ...]) -> None:
    """The check names the damaged file, and a job that resumes refuses in words or has work to do."""
    status, text = checked(config)
    assert status == check.UNSOUND, text
    assert shown_name(config, path) in text
    relative = path.relative_to(config.sink.path).as_posix()
    for shard in shards:
        plan, refusal = planned(config, shard)
        if plan is None:
            assert "is damaged: " in refusal
            continue
        resume_lines(plan)
        own = shard == WHOLE or f"shard-{shard.number:04d}-" in relative or f"shards/{shard.number:04d}/" in relative
        if own and relative.partition("/")[0] in ("data", "errors"):
            assert not is_complete(plan)


@given(st.data())
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_bit_anywhere_in_an_output_is_named(whole: CaptionJobConfig, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(files_of(whole)))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with changed(path, bytes(content)):
        check_that_nothing_passes(whole, path, (WHOLE,))


@given(st.data())
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_bit_anywhere_in_an_output_of_shards_is_named(sharded: CaptionJobConfig, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(files_of(sharded)))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with changed(path, bytes(content)):
        check_that_nothing_passes(sharded, path, SHARDS)


JSON: Any = st.recursive(
    st.sampled_from([None, True, -7, 0, 10**13, 10**30, 1e400, float("nan"), "", "x", "\ud800"]),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)


def mutated(value: Any, data: st.DataObject) -> Any:
    """A JSON value in which one inner value is replaced or left out."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(value)))
        if data.draw(st.integers(0, 4)) == 0:
            return {key: inner for key, inner in value.items() if key != name}
        return {**value, name: mutated(value[name], data)}
    return data.draw(JSON)


@given(st.data())
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("has_digests", [True, False])
def test_a_json_file_with_other_values_is_reported_without_a_traceback(
    sharded: CaptionJobConfig, has_digests: bool, data: st.DataObject
) -> None:
    """Without recorded digests, as in outputs of older versions, only values of a wrong type are found."""
    path = data.draw(st.sampled_from([path for path in files_of(sharded) if path.suffix == ".json"]))
    before = json.loads(path.read_text())
    after = mutated(before, data)
    output = Path(sharded.sink.path)
    moved = [(folder, folder.with_name("hidden")) for folder in output.rglob("digests")] if not has_digests else []
    for folder, hidden in moved:
        folder.rename(output.parent / f"{hidden.name}{len(folder.parts)}{folder.parent.name}")
    try:
        with changed(path, json.dumps(after, indent=2).encode()):
            status, _ = checked(sharded)
            assert status in (check.COMPLETE, check.UNSOUND, check.INCOMPLETE)
            assert status == check.UNSOUND or not has_digests
            for shard in SHARDS:
                with contextlib.suppress(ConfigError):
                    resume_lines(plan_of(sharded, shard=shard))
    finally:
        for folder, hidden in moved:
            (output.parent / f"{hidden.name}{len(folder.parts)}{folder.parent.name}").rename(folder)


@pytest.mark.parametrize("target", ["a folder", "a fifo", "nothing", "not JSON", "nested", "huge"])
@pytest.mark.parametrize(
    "name", ["_job/attempts/000001.json", "_job/summary.json", "_job/manifest/part-00000.parquet", "data", "notes"]
)
def test_paths_that_are_not_regular_files_are_named_without_waiting(
    copy: CaptionJobConfig, name: str, target: str
) -> None:
    output = Path(copy.sink.path)
    names = {"data": "data/part-000004.parquet", "notes": "_job/files/data/part-000004.parquet.json"}
    path = output / names.get(name, name)
    path.unlink()
    if target == "a folder":
        path.mkdir()
        (path / "inside").write_bytes(b"x")
    elif target == "a fifo":
        os.mkfifo(path)
    elif target == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
        if name in ("data", "_job/manifest/part-00000.parquet"):
            os.truncate(path, 1 << 24)
    else:
        path.write_bytes({"nothing": b"", "not JSON": b"{", "nested": b"[" * 100_000}[target])
    status, text = checked(copy)
    assert status == check.UNSOUND, text
    assert path.name.removesuffix(".json") in text
    with contextlib.suppress(ConfigError):
        resume_lines(plan_of(copy))


def test_a_damaged_manifest_and_a_damaged_result_are_both_named(copy: CaptionJobConfig) -> None:
    output = Path(copy.sink.path)
    for name in ("_job/manifest/part-00000.parquet", "data/part-000000.parquet", "_job/attempts/000001.json"):
        data = bytearray((output / name).read_bytes())
        data[-40] ^= 1
        (output / name).write_bytes(data)
    (output / "data/mine.parquet").write_bytes(b"PAR1")
    status, text = checked(copy)
    assert status == check.UNSOUND
    assert "manifest  damaged" in text
    assert "missing   an unknown number, because the manifest is damaged" in text
    for line in (
        "_job/manifest/part-00000.parquet: its bytes are not those that were written",
        "data/part-000000.parquet: its bytes are not those that were written",
        "_job/attempts/000001.json: its bytes are not those that were written",
        "data/mine.parquet: it is torn",
    ):
        assert f"  {line}" in text
    rows = sum(
        pq.read_metadata(path).num_rows for path in (output / "data").glob("part-*") if "000000" not in path.name
    )
    assert f"rows      {rows:,} in data/, 1 in errors/" in text


def test_file_names_that_are_not_utf_8_are_printed(copy: CaptionJobConfig) -> None:
    (Path(copy.sink.path) / "data" / os.fsdecode(b"\xff\nproblems  0.parquet")).write_bytes(b"x")
    status, text = checked(copy)
    assert status == check.UNSOUND
    assert r"data/\udcff\nproblems  0.parquet: it is torn" in text


def test_the_samples_that_a_limit_leaves_out_are_counted(tmp_path: Path) -> None:
    images(tmp_path / "in", [f"{number:02}.png" for number in range(60)])
    config = job({"kind": "images", "path": str(tmp_path / "in")}, tmp_path / "out")
    shards = [Shard(number, 3) for number in range(3)]
    for shard in shards:
        run(config, shard=shard, limit=3 if shard.number == 1 else None)
    status, text = checked(config)
    assert status == check.INCOMPLETE
    assert "rows      43 in data/, 0 in errors/" in text
    assert "limited   shard 1/3: 3 of 20 samples are planned (--limit 3)" in text
    run(config, shard=shards[1])
    assert checked(config)[0] == check.COMPLETE
    assert "limited" not in checked(config)[1]


def test_a_limit_that_excludes_no_sample_makes_the_output_complete(tmp_path: Path) -> None:
    images(tmp_path / "in", ["a.png", "b.png"])
    config = job({"kind": "images", "path": str(tmp_path / "in")}, tmp_path / "out")
    plan, begun = start(plan_of(config, limit=1))
    save(plan, begun, make_rows(plan, 1))
    end(plan, begun)
    summary = plan.empty_summary()
    write_summary(plan, summary, begun.publisher)
    assert ("limited", "1 of 2 samples are planned (--limit 1); the same command without --limit runs the others") in (
        summary.lines()
    )
    assert checked(config)[0] == check.INCOMPLETE
    run(config, limit=2)
    assert checked(config)[0] == check.COMPLETE
