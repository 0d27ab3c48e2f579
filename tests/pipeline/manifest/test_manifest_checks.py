"""Values of a stored manifest are checked before memory is reserved for them."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.load import ConfigError
from configs.schema import CaptionJobConfig
from pipeline.check.output import check_output
from pipeline.manifest.manifest import CUT_KEY, KEEP_KEY, ROOT_KEY, SCHEMA
from pipeline.manifest.manifest_checks import MAX_SAMPLES, problem_of_files
from pipeline.manifest.manifest_parts import read_parts
from pipeline.storage.damage import DamagedFile
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.shard import Shard
from tests.pipeline.attempts import job, plan_of, run
from tests.pipeline.formats.shards import write_parquet

PART = "_job/manifest/part-00000.parquet"


def made(folder: Path, shard: Shard | None = None, is_old: bool = True) -> CaptionJobConfig:
    """An output of two Parquet files with row groups; one of an older version has no digests."""
    for file in range(2):
        columns = {"id": [f"{file}-{row}" for row in range(23)]}
        write_parquet(folder / f"in/{file}.parquet", columns, row_group_size=7)
    config = job({"kind": "parquet", "path": str(folder / "in")}, folder / "out", prompt={"text": "{id}"})
    run(config, num_batches=2, **({} if shard is None else {"shard": shard}))
    if is_old:
        for path in (folder / "out/_job/digests/manifest").iterdir():
            path.unlink()
    return config


def with_column(table: pa.Table, name: str, values: Any, kind: pa.DataType | None = None) -> pa.Table:
    column = table.schema.get_field_index(name)
    field = pa.field(name, kind or table.schema.field(column).type)
    return table.set_column(column, field, pa.array(values, field.type))


def rewrite(output: Path, change: Any, metadata: dict[bytes, bytes | None] | None = None) -> None:
    table = pq.read_table(output / PART)
    footer = {**table.schema.metadata, **(metadata or {})}
    kept = {key: value for key, value in footer.items() if value is not None}
    pq.write_table(change(table).replace_schema_metadata(kept), output / PART)


COUNTS: dict[str, tuple[Any, pa.DataType | None, str]] = {
    "negative": ([-7, 23], None, r"0\.parquet: it cannot have so many rows \(-7 rows"),
    "huge": ([23, 10**13], None, r"1\.parquet: it cannot have so many rows \(10,000,000,000,000 rows"),
    "largest": ([2**63 - 1, 23], None, "it cannot have so many rows"),
    "other than its groups": ([23, 22], None, r"1\.parquet: its row groups have another number of rows"),
    "not a number": ([float("nan"), 23.0], pa.float64(), "its column 'num_samples' holds double"),
    "truth values": ([True, False], pa.bool_(), "its column 'num_samples' holds bool"),
    "text": (["23", "23"], pa.string(), "its column 'num_samples' holds string"),
    "dates": ([1, 2], pa.timestamp("s"), "its column 'num_samples' holds timestamp"),
}


@contextlib.contextmanager
def at_most_more(num_bytes: int) -> Iterator[None]:
    """Fail allocations in the block that would extend the address space by more than `num_bytes`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("case", COUNTS)
def test_a_wrong_count_is_one_sentence_and_takes_no_memory(tmp_path: Path, case: str) -> None:
    config = made(tmp_path)
    values, kind, message = COUNTS[case]
    rewrite(tmp_path / "out", lambda table: with_column(table, "num_samples", values, kind))
    with at_most_more(4 * 1024**3):
        with pytest.raises(
            ConfigError, match=rf"^sink\.path: .*part-00000\.parquet is damaged: .*{message}"
        ) as refused:
            plan_of(config)
        result = check_output(OutputDir(config.sink.path))
    assert "\n" not in str(refused.value)
    assert any(line.startswith(f"{PART}: ") for line in result.problems)
    assert (result.num_files, result.num_missing, result.is_complete) == (None, None, False)


CHANGES: dict[str, Any] = {
    "sizes": lambda table: with_column(table, "size_bytes", [-1, 5]),
    "no path": lambda table: with_column(table, "path", [None, "1.parquet"]),
    "rows of groups": lambda table: with_column(table, "row_group_rows", [[7, 7, 7, 2], [7, 7, 7, 3]]),
    "negative rows of groups": lambda table: with_column(table, "row_group_rows", [[7, 7, 7, 2], [30, -7]]),
    "huge rows of groups": lambda table: with_column(table, "row_group_rows", [[2**62, 2**62, 2**62], [23]]),
    "fewer bytes of groups": lambda table: with_column(table, "row_group_bytes", [[1], [1]]),
    "null in groups": lambda table: with_column(table, "row_group_rows", [[None, 23], [7, 7, 7, 2]]),
    "lines of groups": lambda table: with_column(table, "row_group_lines", [[1], []]),
    "repeated rows": lambda table: with_column(table, "repeated_rows", [[23], []]),
    "negative repeated rows": lambda table: with_column(table, "repeated_rows", [[-1], []]),
    "no column": lambda table: table.drop_columns("token"),
    "another column": lambda table: table.append_column("more", pa.array([1, 2])),
}


@pytest.mark.parametrize("case", CHANGES)
def test_other_wrong_values_are_one_sentence(tmp_path: Path, case: str) -> None:
    config = made(tmp_path)
    rewrite(tmp_path / "out", CHANGES[case])
    with pytest.raises(ConfigError, match=r"part-00000\.parquet is damaged: .*; move .*manifest and .*counts away"):
        plan_of(config)


@pytest.mark.parametrize(
    "metadata",
    [
        {KEEP_KEY: b"zz"},
        {KEEP_KEY: b"00"},
        {KEEP_KEY: None},
        {ROOT_KEY: b"\xff"},
        {ROOT_KEY: None},
        {CUT_KEY: None},
        {CUT_KEY: b"{"},
        {CUT_KEY: b"7"},
        {CUT_KEY: b"[" * 20_000},
        {CUT_KEY: json.dumps([[0, 0], [0, 99], [2, 0]]).encode()},
        {CUT_KEY: json.dumps([[0, 0], [1, -3], [2, 0]]).encode()},
        {CUT_KEY: json.dumps([[0, 0], [0, True], [2, 0]]).encode()},
        {CUT_KEY: json.dumps([[0, 0], [5, 0], [2, 0]]).encode()},
        {CUT_KEY: json.dumps([[0, 0]] * 5000 + [[2, 0]]).encode()},
    ],
)
def test_damaged_metadata_of_a_part_is_one_sentence(tmp_path: Path, metadata: dict[bytes, bytes | None]) -> None:
    config = made(tmp_path, Shard(0, 2))
    rewrite(tmp_path / "out", lambda table: table, metadata)
    is_another_job = metadata == {CUT_KEY: None}
    message = r"was begun without shards" if is_another_job else r"part-00000\.parquet is damaged: "
    with pytest.raises(ConfigError, match=message):
        plan_of(config, shard=Shard(0, 2))


def test_parts_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    config = made(tmp_path)
    part = tmp_path / "out" / PART
    for name, message in (
        ("part-00002.parquet", r"part-00002\.parquet is damaged: part 1 is missing"),
        ("notes.txt", r"notes\.txt is damaged: part 0 is missing"),
    ):
        (part.parent / name).write_bytes(part.read_bytes())
        with pytest.raises(ConfigError, match=message):
            plan_of(config)
        (part.parent / name).unlink()
    table = pq.read_table(part)
    cut = json.dumps([[2, 0], [3, 0], [4, 0]]).encode()
    other = table.replace_schema_metadata({**table.schema.metadata, CUT_KEY: cut})
    pq.write_table(other, part.with_name("part-00001.parquet"))
    with pytest.raises(ConfigError, match=r"part-00001\.parquet is damaged: it is cut into another number of shards"):
        plan_of(config)


def test_a_part_with_another_byte_is_refused_although_its_values_are_right(tmp_path: Path) -> None:
    config = made(tmp_path, is_old=False)
    rewrite(tmp_path / "out", lambda table: table)
    with pytest.raises(ConfigError, match="its bytes are not those that were written"):
        plan_of(config)


@given(st.data())
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_of_a_part_is_the_same_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Without digests: what is read is a manifest whose values fit together, or a ConfigError."""
    folder = tmp_path_factory.getbasetemp() / "damaged-parts"
    if not folder.exists():
        made(folder, Shard(0, 2))
        (folder / "part").write_bytes((folder / "out" / PART).read_bytes())
    content = bytearray((folder / "part").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / "out" / PART).write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) // 2]))])
    manifest = None
    with contextlib.suppress(DamagedFile):
        manifest = read_parts(OutputDir(str(folder / "out")))
    if manifest is None:
        return
    assert problem_of_files(manifest.files) == ""
    assert manifest.num_files < 10**6


def files(counts: list[int | None], sizes: list[int]) -> pa.Table:
    empty: list[list[int]] = [[] for _ in counts]
    columns = [[f"{number}" for number in range(len(counts))], sizes, [""] * len(counts), counts, *[empty] * 4]
    return pa.table(columns, schema=SCHEMA)


def test_the_bounds_of_counts() -> None:
    assert problem_of_files(files([None, 0, 1, 1000], [0, 0, 0, 1])) == ""
    assert problem_of_files(files([1001], [1])) == "0: it cannot have so many rows (1,001 rows, 1 bytes)"
    most = MAX_SAMPLES // 1000
    assert problem_of_files(files([MAX_SAMPLES], [most + 1])) == ""
    assert "cannot have so many rows" in problem_of_files(files([MAX_SAMPLES + 1], [most + 1_000_000])) or (
        problem_of_files(files([MAX_SAMPLES + 1], [most + 1_000_000])).startswith("its files have")
    )
    assert problem_of_files(files([MAX_SAMPLES, 1], [most + 1, 1])).startswith("its files have 17,179,869,185 rows")
