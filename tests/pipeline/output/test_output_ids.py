"""Ids of an output's rows are compared over all of its files, by place in the source or by row of the output."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.formats.kind import no_row_groups
from pipeline.manifest import ids, manifest
from pipeline.manifest.manifest import Manifest
from pipeline.output import output_ids
from pipeline.output.files import Format
from pipeline.output.publishing import Publisher
from pipeline.storage.output_dir import DATA, OutputDir

SCHEMA = pa.schema([("sample_id", pa.string()), ("source", pa.string()), ("row_index", pa.int64())])


def listing(counts: list[int | None]) -> Manifest:
    empty = no_row_groups(len(counts))
    names = [f"{number}.tar" for number in range(len(counts))]
    columns = [names, [1] * len(counts), names, pa.array(counts, pa.int64()), empty, empty, empty, empty]
    return Manifest("root", pa.table(columns, schema=manifest.SCHEMA), pa.schema([]))


@pytest.mark.parametrize("seed", range(12))
def test_repeats_are_those_of_all_rows_in_one_table(tmp_path: Path, monkeypatch, seed: int) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(output_ids, "PARTITION_FILES", chance.randrange(1, 4))
    monkeypatch.setattr(ids, "IDS_PER_PARTITION", chance.randrange(1, 9))
    output = OutputDir(str(tmp_path))
    publisher = Publisher(output, Format(SCHEMA), 1, "f")
    names = [f"id-{number}" for number in range(chance.randrange(5, 40))]
    positions = [(file, row) for file in range(4) for row in range(6)]
    chance.shuffle(positions)
    rows = []
    for file, row in positions:  # one or two rows per sample
        rows += [(own, f"{file}.tar", row) for own in chance.sample(names, chance.randrange(1, 3))]
    for number in range(6):
        columns = [[row[part] for row in rows[number::6]] for part in range(3)]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
        publisher.publish_rows(DATA, number, pa.table(arrays, schema=SCHEMA))
    (tmp_path / "data/part-000099.parquet").write_bytes(b"torn")
    files = [f"data/{name}" for name in output.list_files(DATA)]
    counts = Counter(own for own, _, _ in rows)
    assert output_ids.ids_of_several_rows(output, files) == sorted(own for own, count in counts.items() if count > 1)
    first: dict[str, tuple[str, int]] = {}
    for own, source, row in rows:
        first[own] = min(first.get(own, (source, row)), (source, row))
    expected = sorted((source, row, own) for own, source, row in rows if (source, row) != first[own])
    known = [6 if chance.random() < 0.7 else None for _ in range(4)]
    repeated = output_ids.repeated_samples(output, listing(known), len(rows)).to_pylist()
    assert [(f"{row['file']}.tar", row["row"], row["sample_id"]) for row in repeated] == expected
