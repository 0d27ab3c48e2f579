"""Tests that repeated ids are found in any file, and that the first row in the manifest's order keeps the id."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.load import ConfigError
from configs.schema import PromptConfig
from configs.source import SourceConfig
from pipeline.manifest import freezing, ids
from pipeline.manifest.done_bitmap import DoneBitmap
from pipeline.prompts.row_options import PromptOptions
from tests.pipeline.formats.shards import outcomes, read_all, tar_bytes, write_parquet

FILES = st.lists(st.lists(st.sampled_from(["", "a", "b", "a\0", "é" * 200, "c" * 300, "d"]), max_size=6), max_size=5)


class Written:
    """Reads ids that are in memory; `places` are the file and row of every id, in the order of reading."""

    def __init__(self, positions: list[tuple[int, int, str]]) -> None:
        self.places = positions

    def _table(self, kept: list[tuple[int, int, str]], schema: pa.Schema) -> pa.Table:
        own = pa.array([own_id for _, _, own_id in kept], pa.large_string())
        first = ids.hash_ids(own) if schema is ids.HASHES else own
        columns = [first, [file for file, _, _ in kept], [row for _, row, _ in kept], [0] * len(kept)]
        return pa.table([pa.array(column, kind) for column, kind in zip(columns, schema.types)], schema=schema)

    def hashes(self) -> Iterator[pa.Table]:
        for start in range(0, len(self.places), 3):
            yield self._table(self.places[start : start + 3], ids.HASHES)

    def ids(self, suspects: DoneBitmap) -> Iterator[pa.Table]:
        inside = [
            triple for triple in self.places if suspects.counts[triple[0]] < 0 or triple[1] < suspects.counts[triple[0]]
        ]
        for start in range(0, len(inside), 3):
            some = inside[start : start + 3]
            is_suspect = suspects.has(*(np.array([row[part] for row in some], np.int64) for part in (0, 1)))
            yield self._table([triple for triple, keep in zip(some, is_suspect) if keep], ids.IDS)


def repeats_of(positions: list[tuple[int, int, str]], counts: list[int]) -> list[tuple[int, int, str]]:
    repeats = ids.find_repeats(Written(positions), DoneBitmap(np.array(counts, np.int64)), len(positions))
    return [(row["file"], row["row"], row["sample_id"]) for row in repeats.to_pylist()]


def expected_repeats(positions: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    seen: set[str] = set()
    expected = []
    for file, row, own_id in sorted(set(positions)):
        if own_id in seen:
            expected.append((file, row, own_id))
        seen.add(own_id)
    return expected


@given(FILES, st.integers(1, 4), st.randoms(), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_every_row_but_the_first_of_an_id_is_a_repeat(monkeypatch, files, per_partition, chance, knows_counts) -> None:
    positions = [(file, row, own_id) for file, rows in enumerate(files) for row, own_id in enumerate(rows)]
    counts = [len(rows) if knows_counts or file % 2 else -1 for file, rows in enumerate(files)]
    monkeypatch.setattr(ids, "IDS_PER_PARTITION", per_partition)
    assert repeats_of(positions, counts) == expected_repeats(positions)
    chance.shuffle(positions)
    assert repeats_of(positions, counts) == expected_repeats(positions)
    assert repeats_of(positions + positions, counts) == expected_repeats(positions), "a place that is read twice is one"


@given(FILES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_equal_hashes_of_other_ids_repeat_nothing(monkeypatch, files) -> None:
    positions = [(file, row, own_id) for file, rows in enumerate(files) for row, own_id in enumerate(rows)]
    monkeypatch.setattr(ids, "hash_ids", lambda values: np.full(len(values), 7, np.uint64))
    assert repeats_of(positions, [len(rows) for rows in files]) == expected_repeats(positions)


def test_a_partition_has_about_the_stated_number_of_ids(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(ids, "IDS_PER_PARTITION", 1000)
    hashes = ids.hash_ids(pa.array([f"image-{number}" for number in range(100_000)], pa.large_string()))
    buckets = ids._Buckets(tmp_path / "b", ids.HASHES, len(hashes))
    rows = np.arange(len(hashes))
    for part in np.split(rows, 10):
        buckets.add(pa.table([hashes[part], np.zeros(len(part), np.int32), part], schema=ids.HASHES), hashes[part])
    assert len(list((tmp_path / "b").iterdir())) == 100
    drained = list(buckets.drain())
    assert max(table.num_rows for table in drained) < 1250
    assert sorted(pa.concat_tables(drained)["row"].to_pylist()) == rows.tolist()
    assert all(table["row"].to_pylist() == sorted(table["row"].to_pylist()) for table in drained)
    assert list((tmp_path / "b").iterdir()) == []


def test_rows_beyond_the_count_of_their_file_are_not_candidates_for_repeats() -> None:
    assert repeats_of([(0, 0, "a"), (0, 1, "b"), (0, 2, "a"), (1, 0, "b")], [2, 1]) == [(1, 0, "b")]


@given(st.lists(st.text(max_size=20) | st.text(min_size=250, max_size=260), max_size=30), st.integers(0, 5))
def test_a_hash_depends_on_the_text_alone(texts, first) -> None:
    values = pa.array(["x" * 100, *texts], pa.large_string())
    hashes = ids.hash_ids(values)
    alone = [int(ids.hash_ids(pa.array([text], pa.large_string()))[0]) for text in ["x" * 100, *texts]]
    assert hashes.tolist() == alone
    assert ids.hash_ids(values.slice(first)).tolist() == alone[first:]
    assert len(set(alone)) == len({"x" * 100, *texts})


def test_ids_that_differ_in_trailing_zeros_have_other_hashes() -> None:
    texts = ["", "\0", "\0\0", "a", "a\0", "12345678", "12345678\0"]
    assert len(set(ids.hash_ids(pa.array(texts, pa.large_string())).tolist())) == len(texts)


def test_hashes_are_those_of_other_processes() -> None:
    """Attempts and tasks of other machines compare hashes, so they never change."""
    program = (
        "import pyarrow as pa; from pipeline.manifest.id_hashes import hash_ids; "
        "print(hash_ids(pa.array(['', 'a', 'image-000000000001', 'é' * 200], pa.large_string())).tolist())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    own = ids.hash_ids(pa.array(["", "a", "image-000000000001", "é" * 200], pa.large_string())).tolist()
    assert printed == {f"{own}\n".encode()}


def write(folder, kind: str, name: str, ids: list) -> None:
    if kind == "parquet":
        write_parquet(folder / f"{name}.parquet", {"k": ids}, row_group_size=2)
    elif kind == "jsonl":
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"k": sample_id}) + "\n" for sample_id in ids))
    else:
        (folder / f"{name}.csv").write_text(
            "k,x\n" + "".join(f"{'' if sample_id is None else sample_id},\n" for sample_id in ids)
        )


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize("span_rows", [1, 3, 1000])
def test_repeats_in_other_spans_and_files_are_error_rows(tmp_path, kind, span_rows) -> None:
    write(tmp_path, kind, "a", ["p", "q", None, "p", "r"])
    write(tmp_path, kind, "b", ["s", "q"])
    write(tmp_path, kind, "c", ["q", "t"])
    source = SourceConfig(kind=kind, path=str(tmp_path), id_column="k", span_max_rows=span_rows)
    assert outcomes(read_all(source)) == {
        "p": "",
        "q": "",
        f"a.{kind}#2": "missing_id",
        f"a.{kind}#3": "duplicate_id",
        "r": "",
        "s": "",
        f"b.{kind}#1": "duplicate_id",
        f"c.{kind}#0": "duplicate_id",
        "t": "",
    }


def test_without_the_check_only_repeats_within_a_span_are_found(tmp_path) -> None:
    write(tmp_path, "jsonl", "a", ["p", "p", "q"])
    write(tmp_path, "jsonl", "b", ["q"])
    source = SourceConfig(kind="jsonl", path=str(tmp_path), id_column="k", check_ids=False, span_max_rows=3)
    table = read_all(source)
    assert table["sample_id"].to_pylist() == ["p", "a.jsonl#1", "q", "q"]
    assert freezing.freeze(source, PromptOptions(PromptConfig(text="x"))).files["repeated_rows"].to_pylist() == [[], []]


def test_a_damaged_file_does_not_hide_repeats_in_others(tmp_path) -> None:
    write(tmp_path, "parquet", "a", ["p"])
    (tmp_path / "b.parquet").write_bytes(b"torn")
    write(tmp_path, "parquet", "c", ["p"])
    codes = outcomes(read_all(SourceConfig(kind="parquet", path=str(tmp_path), id_column="k")))
    assert codes == {"p": "", "b.parquet#0": "broken_shard", "c.parquet#0": "duplicate_id"}


def test_a_column_that_is_no_id_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(freezing, "MAX_REPEATED_ROWS", 3)
    write(tmp_path, "csv", "a", ["cat", "dog"] * 5)
    with pytest.raises(
        ConfigError, match=r"^source\.id_column: 'k' is no id: 8 of 10 rows have one that an earlier row"
    ):
        read_all(SourceConfig(kind="csv", path=str(tmp_path), id_column="k"))


def test_a_user_id_in_the_format_of_generated_ids_stays_unique(tmp_path) -> None:
    write(tmp_path, "jsonl", "a", ["a.jsonl#1", None, "p", "p"])
    codes = outcomes(read_all(SourceConfig(kind="jsonl", path=str(tmp_path), id_column="k")))
    assert codes == {"a.jsonl#1": "", "a.jsonl#1#": "missing_id", "p": "", "a.jsonl#3": "duplicate_id"}


def test_ids_of_tars_are_not_read_beforehand(tmp_path) -> None:
    for name in "ab":
        members = [(f"{name}.jpg", b"x"), (f"{name}.json", b'{"k": "same"}')]
        (tmp_path / f"{name}.tar").write_bytes(tar_bytes(members))
    source = SourceConfig(kind="webdataset", path=str(tmp_path), id_column="k", span_max_rows=1)
    frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="x")))
    assert frozen.files["repeated_rows"].to_pylist() == [[], []]
